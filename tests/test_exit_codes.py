"""The exit code of every command of `plait bench`, in each way that it can end; and of `plait kernels`, for the gate.

0 ok, 1 a regression or a rule broken, 2 usage or unreadable input, 3 inconclusive with --strict, 4 a wrong result or
an impossible number, 5 machines that cannot be compared. Everything here is made up: what is tested is what is said.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from plait.bench import aa, cli, gate, runner
from plait.bench.gate_sides import Finding
from plait.bench.spec import Case, CaseResult, Measured, Options, Suite, WrongResultError
from plait.bench.verdict import Verdict

H200 = {"gpus": [{"name": "NVIDIA H200"}]}
PARAMS = {"device": "cuda", "dtype": "bfloat16"}


@dataclass
class World:
    """Where a command runs: a folder, and what is put in place of the machine."""

    folder: Path
    patch: pytest.MonkeyPatch

    def file(self, name: str, seconds: float, **how: Any) -> str:
        """A result file of one case `c`, of `processes` processes of five equal samples."""
        processes, case = how.get("processes", 5), Case("c", PARAMS, how.get("flop"), None)
        ours = Measured([seconds] * 5 * processes, "equal", processes=[i for i in range(processes) for _ in range(5)])
        ours.invalid = how.get("invalid", "")
        data = {
            "schema": 1,
            "suite": "kernels",
            "machine": how.get("machine", {"cpu": "a", "gpus": []}),
            "source": {"commit": "0" * 40, "dirty": False},
            "cases": [CaseResult(case, "ours", {"ours": ours}).to_json()],
        }
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(data))
        return str(path)

    def suite(self, measure: Callable[[Case, Options], CaseResult]) -> None:
        """A suite of one case in place of all suites."""
        self.patch.setattr(cli, "load", lambda name: Suite("s", "about", lambda full: [Case("c", PARAMS)], measure))


def good(case: Case, options: Options) -> CaseResult:
    return CaseResult(case, "ours", {"ours": Measured([1.0], "equal")})


def broken(case: Case, options: Options) -> CaseResult:
    raise RuntimeError("no such kernel")


def wrong(case: Case, options: Options) -> CaseResult:
    raise WrongResultError("off by 3")


def run_of(measure: Callable[[Case, Options], CaseResult], *argv: str) -> Callable[[World], list[str]]:
    def args(world: World) -> list[str]:
        world.suite(measure)
        return list(argv or ["run", "kernels"])

    return args


def impossible(world: World) -> list[str]:
    world.patch.setattr(runner, "fingerprint", lambda: H200)
    case = Case("c", PARAMS, flop=9e12)
    world.suite(lambda _, options: CaseResult(case, "ours", {"ours": Measured([1e-3] * 5)}))
    return ["run", "kernels"]


def other_ceilings(world: World) -> list[str]:
    world.suite(good)
    return ["run", "kernels", "--ceilings", world.file("ceilings", 1.0)]


def compare_of(head: float, *more: str, **how: Any) -> Callable[[World], list[str]]:
    base_how = {key: value for key, value in how.items() if key == "processes"}
    return lambda world: ["compare", world.file("base", 1.0, **base_how), world.file("head", head, **how), *more]


def aa_of(false_suites: int) -> Callable[[World], list[str]]:
    def args(world: World) -> list[str]:
        tally = aa.Tally("made up", suites=10, cases=10, false_suites=false_suites)
        world.patch.setattr(aa, "fake_trials", lambda rule, **how: [tally])
        return ["aa", "--device", "fake"]

    return args


def gate_of(*found: Finding, verdicts: set[Verdict] | None = None, more: tuple[str, ...] = ()) -> Any:
    def args(world: World) -> list[str]:
        world.patch.setattr(gate, "findings", lambda args, rule: (list(found), verdicts or set()))
        return ["gate", "--base", "main", *more]

    return args


SLOWER = Finding("time", "c", "SLOWER", failed=True)
TABLE: list[tuple[str, int, str, Callable[[World], list[str]]]] = [
    ("list", 0, "suites", lambda world: ["list"]),
    ("run", 0, "a good case", run_of(good)),
    ("run", 1, "a case that cannot be measured", run_of(broken)),
    ("run", 2, "an unknown suite", lambda world: ["run", "nonsense"]),
    ("run", 2, "a case that does not exist", run_of(good, "run", "kernels", "--only", "nothing")),
    ("run", 2, "an option out of range", run_of(good, "run", "kernels", "--processes", "0")),
    ("run", 2, "no rounds", run_of(good, "run", "kernels", "--rounds", "0")),
    ("run", 2, "less than no time", run_of(good, "run", "kernels", "--budget", "-1")),
    ("run", 2, "tutorials that are not there", run_of(good, "run", "kernels", "--tutorials", "/nowhere")),
    ("run", 4, "a wrong result", run_of(wrong)),
    ("run", 4, "a rate above the peak", impossible),
    ("run", 5, "ceilings of another machine", other_ceilings),
    ("train", 0, "a good case", run_of(good, "train")),
    ("train", 4, "a wrong result", run_of(wrong, "train")),
    ("ceilings", 0, "a good case", run_of(good, "ceilings")),
    ("compare", 0, "equal", compare_of(1.0)),
    ("compare", 0, "faster", compare_of(0.9)),
    ("compare", 0, "inconclusive", compare_of(1.1, processes=3)),
    ("compare", 1, "slower", compare_of(1.1)),
    ("compare", 2, "a file that is not there", lambda world: ["compare", "none.json", world.file("head", 1.0)]),
    ("compare", 3, "inconclusive, strict", compare_of(1.1, "--strict", processes=3)),
    ("compare", 4, "an invalid number", compare_of(1.0, invalid="9000 TFLOP/s")),
    ("compare", 5, "other machines", compare_of(1.0, machine={"cpu": "b", "gpus": []})),
    ("gate", 0, "the same", gate_of(Finding("time", "c", "SAME"), verdicts={Verdict.SAME})),
    ("gate", 0, "inconclusive", gate_of(verdicts={Verdict.INCONCLUSIVE})),
    ("gate", 1, "worse machine code", gate_of(Finding("machine code", "k", "worse", failed=True))),
    ("gate", 1, "slower", gate_of(SLOWER, verdicts={Verdict.SLOWER, Verdict.INCONCLUSIVE}, more=("--strict",))),
    ("gate", 2, "an unknown ref", lambda world: ["gate", "--base", "no-such-ref"]),
    ("gate", 2, "an option out of range", gate_of(more=("--processes", "0"))),
    ("gate", 3, "inconclusive, strict", gate_of(verdicts={Verdict.INCONCLUSIVE}, more=("--strict",))),
    ("gate", 4, "a wrong result beside a slower case", gate_of(SLOWER, verdicts={Verdict.SLOWER, Verdict.INVALID})),
    ("aa", 0, "no false alarm", aa_of(0)),
    ("aa", 1, "an alarm in every suite", aa_of(10)),
    ("aa", 2, "no suites", lambda world: ["aa", "--device", "fake", "--suites", "0"]),
    ("roofline", 0, "a possible rate", lambda world: ["roofline", world.file("r", 1.0, flop=1e12, machine=H200)]),
    ("roofline", 2, "neither file nor card", lambda world: ["roofline"]),
    ("roofline", 4, "invalid", lambda world: ["roofline", world.file("r", 1.0, flop=1e9, invalid="9 PFLOP/s")]),
    ("report", 0, "a page", lambda world: ["report", world.file("r", 1.0), "--out", str(world.folder / "page.html")]),
    ("report", 2, "an empty folder", lambda world: ["report", str(world.folder)]),
]  # fmt: skip
# What each command can end with besides; a command that measures cannot find machines that differ, and so on.
CODES = {
    "list": {0},
    "run": {0, 1, 2, 4, 5},
    "train": {0, 4},
    "ceilings": {0},
    "compare": {0, 1, 2, 3, 4, 5},
    "gate": {0, 1, 2, 3, 4},
    "aa": {0, 1, 2},
    "roofline": {0, 2, 4},
    "report": {0, 2},
}


@pytest.mark.parametrize(
    "command, code, when, args", TABLE, ids=lambda value: str(value) if not callable(value) else ""
)
def test_exit_code(command, code, when, args, tmp_path, monkeypatch, capsys):
    argv = args(World(tmp_path, monkeypatch))
    assert argv[0] == command and cli.main(argv) == code
    captured = capsys.readouterr()
    assert code != 2 or captured.err.startswith("plait bench: "), "a usage error says on stderr what is wrong"


def test_every_command_and_code_is_in_the_table():
    assert {(command, code) for command, code, _, _ in TABLE} == {(c, n) for c, codes in CODES.items() for n in codes}
    (commands,) = (action.choices for action in cli.parser()._actions if action.dest == "command")
    assert set(commands or ()) == set(CODES)


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["compare", "one.json"], ["gate"]])
def test_what_the_parser_refuses_exits_2(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2 and "usage: plait bench" in capsys.readouterr().err
