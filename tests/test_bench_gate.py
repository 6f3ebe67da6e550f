"""`plait bench gate`: every exit code, from rows and times that are made up; the trees themselves once, offline."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

from plait.bench import cli, gate, gate_sides, suite_launch
from plait.bench.fake_device import NOISE_MODELS, FakeDevice
from plait.bench.gate_sides import Finding, Timed, Tree
from plait.bench.result_file import ResultFile
from plait.bench.spec import Case, CaseResult, Measured, Options
from plait.bench.timer import interleave
from plait.bench.verdict import Rule, Verdict
from plait.kernels import pinned
from tests.cases import needs_compiler

ROW = pinned.Row(64, 0, 0, {}, 1024, 0, 4, 8, "registers", 1.0, "HGMMA", 8, 2, 99, 4, 64.0, 1000.0, "ab")
BASE, HEAD = Tree(Path("base")), Tree(Path("head"))


def results(factor: float, errors: dict[str, str] | None = None, invalid: str = "", launches: float = 2.0) -> Any:
    """Returns what stands in for `result_of`: case `a` takes factor times as long in head, `b` the same."""
    seeds = random.Random(5)

    def result_of(tree: Tree, args: list[str], folder: Path) -> ResultFile | str:
        only = next((arg for arg in args if arg.startswith("--only=")), "--only=").removeprefix("--only=")
        cases = {}
        for name in filter(lambda name: only in name, ("a", "b")):
            head = tree.root.name != "base"
            error = (errors or {}).get(name, "") if head else ""
            device = FakeDevice(NOISE_MODELS["iid"], seeds.getrandbits(30))
            kernel = device.kernel(1e-3 * (factor if head and name == "a" else 1.0))
            samples = interleave({"ours": kernel}, Options(rounds=10), sync=device.sync, clock=device.clock)["ours"]
            ours = Measured(samples, "equal", {"launches": launches if head and name == "a" else 2.0})
            ours.invalid = invalid if head and name == "a" else ""
            cases[name] = CaseResult(Case(name, {}), "ours", {} if error else {"ours": ours}, error=error)
        return ResultFile("file", args[0], {}, {}, cases)

    return result_of


@pytest.fixture
def made_up(monkeypatch):
    """Sets what the gate finds; returns a function that runs the command line."""

    @contextlib.contextmanager
    def unpacked(ref: str):
        yield BASE

    monkeypatch.setattr(gate, "unpacked", unpacked)
    monkeypatch.setattr(gate.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(suite_launch, "cases", lambda full: [Case("a", {})])

    def run(*args: str, static: list[Finding] | None = None, **how: Any) -> int:
        monkeypatch.setattr(gate, "static", lambda base, only: static or [])
        for module in (gate, gate_sides):
            monkeypatch.setattr(module, "result_of", results(how.pop("factor", 1.0), **how))
            how = {**how}
        return cli.main(["gate", "--base", "main", *args])

    return run


TIMED = ["--suite", "kernels", "--processes", "6"]


@pytest.mark.parametrize(
    "args, how, code, text",
    [
        ([], {}, 0, "same"),
        ([], {"launches": 3.0}, 1, "2 -> 3"),
        ([], {"launches": 1.0}, 0, "2 -> 1"),
        ([], {"errors": {"a": "RuntimeError: no such op"}}, 1, "head: RuntimeError: no such op"),
        ([], {"static": [Finding("machine code", "k sm_90", "worse: stack 0 -> 8", True)]}, 1, "stack 0 -> 8"),
        ([], {"static": [Finding("machine code", "k sm_90", "NEW: not pinned")]}, 0, "NEW: not pinned"),
    ],
)  # fmt: skip
def test_without_a_gpu_machine_code_and_launches_decide(args, how, code, text, made_up, capsys):
    assert made_up(*args, **how) == code
    said = capsys.readouterr().out
    assert text in said or text == "same" and "1 the same, 0 fail" in said


@pytest.mark.parametrize("ref", ["no-such-ref", "--output=/tmp/x"])
def test_a_base_that_git_does_not_know_is_a_usage_error(ref, capsys):
    assert cli.main(["gate", f"--base={ref}"]) == 2
    assert f"--base: {ref!r}" in capsys.readouterr().err


def test_a_suite_that_does_not_exist_is_a_usage_error(made_up, capsys):
    assert made_up("--suite", "nonsense") == 2
    assert "suite: 'nonsense' is unknown" in capsys.readouterr().err


def timed(monkeypatch: pytest.MonkeyPatch, processes: int = 6, only: str = "", **how: Any) -> tuple[Any, Any]:
    monkeypatch.setattr(gate_sides, "result_of", results(**how))
    run = Timed(BASE, HEAD, "kernels", processes, 10, 3, only, False)
    found, verdicts = run.findings(Rule())
    return {one.name: one for one in found}, verdicts


def test_a_slower_head_fails_after_its_suspect_was_measured_again(monkeypatch):
    asked = []
    measure = Timed.measure
    monkeypatch.setattr(Timed, "measure", lambda self, names: asked.append(names) or measure(self, names))
    found, verdicts = timed(monkeypatch, factor=1.06)
    assert asked == [[], ["a"]]
    assert (
        found["a"].failed
        and found["a"].text.startswith("SLOWER: head / base 1.0")
        and "12 processes" in found["a"].text
    )
    assert not found["b"].failed and verdicts == {Verdict.SLOWER, Verdict.SAME}
    assert gate.exit_code(list(found.values()), verdicts, False) == 1


def test_an_equal_and_a_faster_head_pass(monkeypatch):
    for factor, verdict in ((1.0, Verdict.SAME), (0.9, Verdict.FASTER)):
        found, verdicts = timed(monkeypatch, factor=factor)
        assert found["a"].text.startswith(verdict) and gate.exit_code(list(found.values()), verdicts, True) == 0


def test_few_processes_are_inconclusive_and_strict_says_so(monkeypatch):
    found, verdicts = timed(monkeypatch, processes=3, factor=1.06)
    assert [gate.exit_code(list(found.values()), verdicts, strict) for strict in (False, True)] == [0, 3]


def test_a_wrong_result_and_an_impossible_number_exit_4(monkeypatch):
    for how in ({"errors": {"a": "wrong result: off by 3"}}, {"invalid": "9000 TFLOP/s"}):
        found, verdicts = timed(monkeypatch, factor=1.0, **how)
        assert found["a"].text.startswith("INVALID: head: ") and found["a"].failed
        assert gate.exit_code(list(found.values()), verdicts, False) == 4 and not found["b"].failed


def test_a_case_that_broke_in_head_fails(monkeypatch):
    found, verdicts = timed(monkeypatch, factor=1.0, errors={"a": "RuntimeError: no kernel"})
    assert found["a"].text == "no numbers, head: RuntimeError: no kernel" and found["a"].failed
    assert gate.exit_code(list(found.values()), verdicts, False) == 1


def test_both_sides_come_first_in_some_process(monkeypatch):
    """A drifting machine would blame whoever always comes second."""
    order = []
    inner = results(1.0)
    monkeypatch.setattr(
        gate_sides, "result_of", lambda tree, *rest: order.append(tree.root.name) or inner(tree, *rest)
    )
    Timed(BASE, HEAD, "kernels", 8, 5, 1, "b", False).measure([])
    firsts = order[::2]
    assert len(order) == 16 and {"base", "head"} == set(firsts)
    assert all({a, b} == {"base", "head"} for a, b in zip(firsts, order[1::2], strict=True))


@pytest.mark.parametrize(
    "pinned_row, failed",
    [
        (None, True),
        (ROW._replace(registers=70), True),  # pinned, and no reason
        (ROW._replace(registers=70, reason="faster on the card"), False),
        (ROW._replace(registers=66, reason="faster on the card"), True),  # a reason for something else
    ],
)
def test_a_worse_row_is_excused_by_a_reason_for_exactly_this_row(pinned_row, failed):
    change = pinned.compare("k sm_90", ROW, ROW._replace(registers=70))
    found = gate.code_finding(change, pinned_row)
    assert found.failed == failed and "registers 64 -> 70" in found.text
    assert failed or "(faster on the card)" in found.text


@pytest.mark.offline
@needs_compiler
def test_head_beside_its_own_commit_is_the_same(capsys):
    assert cli.main(["gate", "--base", "HEAD", "--only", "swiglu.forward"]) == 0  # sm_90 and gfx942
    assert "2 looked at, 2 the same, 0 fail" in capsys.readouterr().out
