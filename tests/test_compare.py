"""`plait bench compare` and `plait bench aa`: every verdict and exit code, from files that the fake device filled."""

from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from plait.bench import aa, cli, report, runner
from plait.bench.compare import Comparison, Row, compare
from plait.bench.fake_device import NOISE_MODELS, FakeDevice
from plait.bench.result_file import ResultFile, ResultFileError, read, united
from plait.bench.spec import Case, CaseResult, Measured, Options, Suite
from plait.bench.timer import interleave
from plait.bench.verdict import Rule, Verdict

ROOT = Path(__file__).resolve().parent.parent
MACHINE = {"cpu": "fake", "cores": 2, "gpus": []}
Data = dict[str, Any]


def measured_case(
    name: str, ours_s: float, peer_s: float, seed: int, processes: int = 5, machine_factor: float = 1.0
) -> CaseResult:
    """A case as the fake device gives it: ours and a peer, interleaved in each of these processes."""
    runs = []
    for index in range(processes):
        device = FakeDevice(NOISE_MODELS["iid"], seed * 1000 + index, slow=machine_factor)
        kernels = {"plait": device.kernel(ours_s), "torch": device.kernel(peer_s)}
        samples = interleave(kernels, Options(rounds=20, seed=index), sync=device.sync, clock=device.clock)
        runs.append([CaseResult(Case(name, {}), "plait", {k: Measured(v, "equal") for k, v in samples.items()})])
    return united(runs)[0]


def document(cases: list[CaseResult], machine: Data | None = None, suite: str = "kernels") -> Data:
    return {
        "schema": 1,
        "suite": suite,
        "machine": machine or MACHINE,
        "source": {"commit": "0123456789", "dirty": False},
        "cases": [case.to_json() for case in cases],
    }


def suite_data(factor: float = 1.0, seed: int = 0, machine: Data | None = None, **kwargs: Any) -> Data:
    """Case `a`, whose time is 1 ms times the factor, among three that never change."""
    cases = [measured_case("a", 1e-3 * factor, 2e-3, seed, **kwargs)]
    cases += [measured_case(name, 1e-3, 2e-3, seed + i, **kwargs) for i, name in enumerate("bcd", 1)]
    return document(cases, machine)


def write(path: Path, data: Data) -> str:
    path.write_text(json.dumps(data))
    return str(path)


@pytest.fixture
def files(tmp_path):
    """Writes result files by name; returns their paths."""
    return lambda **named: [write(tmp_path / f"{name}.json", data) for name, data in named.items()]


BASE = suite_data(seed=10, processes=7)  # 4 cases need 7 processes
SLOW = suite_data(1.05, seed=20, processes=7)


def rows_of(text: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    return {f"{line[0]} {line[1]}": line for line in lines}


# ---- exit codes and tables ----------------------------------------------------------------------------------------


def test_an_equal_head_is_same_and_exits_0(files, capsys):
    base, head = files(base=BASE, head=suite_data(seed=30, processes=7))
    assert cli.main(["compare", base, head, "--strict"]) == 0
    out = capsys.readouterr().out
    assert "4 cases: 4 SAME; exit 0" in out and "too few" not in out
    rows = rows_of(out)
    assert [rows[f"{name} plait"][6] for name in "abcd"] == ["SAME"] * 4
    assert rows["a torch"][6] == "SAME", "the control"


def test_a_slower_head_exits_1_and_says_which_case(files, capsys):
    base, head = files(base=BASE, head=SLOW)
    assert cli.main(["compare", base, head]) == 1
    captured = capsys.readouterr()
    rows = rows_of(captured.out)
    assert [rows[f"{name} plait"][6] for name in "abcd"] == ["SLOWER", "SAME", "SAME", "SAME"]
    assert rows["a plait"][3].startswith("1.0") and rows["a plait"][5] == "7"
    assert "head is slower" in captured.out and "--confirm BASE2 HEAD2" in captured.err


def test_too_few_processes_say_what_to_do(files, capsys):
    base, head = files(base=suite_data(seed=10, processes=2), head=suite_data(seed=20, processes=2))
    assert cli.main(["compare", base, head, "--strict"]) == 3
    assert "4 cases: 4 INCONCLUSIVE; exit 3; too few processes for a verdict: measure" in capsys.readouterr().out


def test_a_faster_head_exits_0(files, capsys):
    head, base = files(head=BASE, base=SLOW)
    assert cli.main(["compare", base, head]) == 0
    assert rows_of(capsys.readouterr().out)["a plait"][6] == "FASTER"


def test_a_confirming_run_keeps_a_true_alarm_and_clears_a_false_one(files, capsys):
    five = {"processes": 5}
    base, head, again, true, false = files(
        base=suite_data(seed=40, **five),
        head=suite_data(1.05, seed=50, **five),
        again=suite_data(seed=60, **five),
        true=suite_data(1.05, seed=70, **five),
        false=suite_data(seed=80, **five),
    )
    assert cli.main(["compare", base, head]) == 0, "five processes are too few for four cases"
    assert "4 cases need 7 agreeing processes" in capsys.readouterr().out
    assert cli.main(["compare", base, head, "--strict"]) == 3
    assert cli.main(["compare", base, head, "--confirm", again, true]) == 1
    capsys.readouterr()
    assert cli.main(["compare", base, head, "--confirm", again, false]) == 0
    assert "its confirming run alone says" in capsys.readouterr().out


def test_one_process_is_inconclusive_whatever_its_samples_say(files, capsys):
    base, head = files(base=suite_data(seed=1, processes=1), head=suite_data(1.5, seed=2, processes=1))
    assert cli.main(["compare", base, head]) == 0
    assert "processes: 1; need 5" in capsys.readouterr().out
    assert cli.main(["compare", base, head, "--strict"]) == 3


def test_a_machine_that_slowed_down_is_not_blamed_on_ours(files, capsys):
    base, head = files(base=BASE, head=suite_data(seed=20, processes=7, machine_factor=1.1))
    assert cli.main(["compare", base, head]) == 0
    row = rows_of(capsys.readouterr().out)["a plait"]
    assert row[6] == "INCONCLUSIVE" and re.match(r"SLOWER, but so moved torch \(1\.(09|10)", row[7])
    assert cli.main(["compare", base, head, "--relative", "--strict"]) == 0


def test_other_machines_are_compared_through_a_common_provider(files, capsys):
    other = {**MACHINE, "cpu": "another"}
    base, same, slow = files(
        base=BASE,
        same=suite_data(seed=20, processes=7, machine_factor=3.0, machine=other),
        slow=suite_data(1.05, seed=20, processes=7, machine_factor=3.0, machine=other),
    )
    assert cli.main(["compare", base, same, "--strict"]) == 0
    out = capsys.readouterr().out
    assert "machines differ (cpu 'fake' and 'another')" in out and rows_of(out)["a plait"][2] == "torch"
    assert cli.main(["compare", base, slow]) == 1


def test_other_machines_without_a_common_provider_exit_5(files, capsys):
    lonely = copy.deepcopy(SLOW)
    lonely["machine"] = {**MACHINE, "cores": 64}
    for case in lonely["cases"]:
        del case["providers"]["torch"]
    base, head = files(base=BASE, head=lonely)
    assert cli.main(["compare", base, head]) == 5
    captured = capsys.readouterr()
    assert captured.out == "" and "machines differ: cores 2 and 64" in captured.err
    assert cli.main(["compare", base, base, "--reference", "liger"]) == 5
    assert "provider 'liger'" in capsys.readouterr().err


def test_an_impossible_number_exits_4(files, capsys):
    spoiled = copy.deepcopy(SLOW)
    spoiled["cases"][1]["providers"]["plait"]["invalid"] = "5019 GB/s, memory gives 1800"
    base, head = files(base=BASE, head=spoiled)
    assert cli.main(["compare", base, head]) == 4
    row = rows_of(capsys.readouterr().out)["b plait"]
    assert row[6] == "INVALID" and row[7] == "head, plait: 5019 GB/s, memory gives 1800"


def test_a_case_that_broke_in_head_exits_1_and_one_that_is_not_there_does_not(files, capsys):
    broken, fewer = copy.deepcopy(BASE), copy.deepcopy(BASE)
    broken["cases"][1] |= {"providers": {}, "ours": "", "error": "RuntimeError: no kernel\nlong trace"}
    del fewer["cases"][1]
    base, head, less = files(base=BASE, head=broken, less=fewer)
    assert cli.main(["compare", base, head]) == 1
    assert "no numbers in head: RuntimeError: no kernel" in capsys.readouterr().out
    assert cli.main(["compare", base, less]) == 0
    assert "not in head" in capsys.readouterr().out
    assert cli.main(["compare", less, base]) == 0
    assert "new: not in base" in capsys.readouterr().out


def test_other_work_under_the_same_name_gets_no_verdict(files, capsys):
    changed = copy.deepcopy(SLOW)
    changed["cases"][0]["case"]["params"] = {"rows": 5}
    base, head = files(base=BASE, head=changed)
    assert cli.main(["compare", base, head]) == 0
    assert "not the same work" in capsys.readouterr().out


def test_json_csv_and_md_say_what_the_table_says(files, tmp_path, capsys):
    base, head = files(base=BASE, head=SLOW)
    out = {kind: tmp_path / f"out.{kind}" for kind in ("json", "csv", "md")}
    cli.main(["compare", base, head, *(word for kind, path in out.items() for word in (f"--{kind}", str(path)))])
    assert out["md"].read_text() == capsys.readouterr().out
    data = json.loads(out["json"].read_text())
    assert data["exit"] == 1 and data["rows"][0]["verdict"] == "SLOWER"
    assert data["rows"][0]["decision"]["ratio"] == pytest.approx(1.05, abs=0.01)
    lines = out["csv"].read_text().splitlines()
    assert lines[0].startswith("case,provider") and len(lines) == 1 + 4 + 4 and "SLOWER" in lines[1]


def test_json_of_an_interval_without_ends_is_json(files, tmp_path):
    base, head = files(base=suite_data(seed=1, processes=1), head=suite_data(seed=2, processes=1))
    cli.main(["compare", base, head, "--json", str(tmp_path / "out.json")])
    decision = json.loads((tmp_path / "out.json").read_text())["rows"][0]["decision"]
    assert decision["low"] is None and decision["high"] is None


def test_a_reader_that_leaves_is_no_usage_error(files, monkeypatch):
    """`plait bench compare BASE HEAD | head` said [Errno 32] Broken pipe and exited 2."""

    def leave(*args: Any) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    base, head = files(base=BASE, head=SLOW)
    monkeypatch.setattr(cli, "show", leave)
    with pytest.raises(BrokenPipeError):
        cli.main(["compare", base, head])


def fake_suite_of(factor: float, seed: int) -> Suite:
    """One case, one fake process a call: the seed of the options, as `run --processes` hands it out."""

    def measure(case: Case, options: Options) -> CaseResult:
        device = FakeDevice(NOISE_MODELS["process"], seed + options.seed)
        kernels = {"plait": device.kernel(1e-3 * factor), "torch": device.kernel(2e-3)}
        samples = interleave(kernels, options, sync=device.sync, clock=device.clock)
        return CaseResult(case, "plait", {name: Measured(values) for name, values in samples.items()})

    return Suite("fake", "a device that is not there", lambda full: [Case("a", {}, flop=1e9)], measure)


def test_from_run_to_compare_on_the_fake_device(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "run_child", lambda command: cli.main(command[command.index("bench") + 1 :]))
    for name, factor, seed in (("base", 1.0, 100), ("head", 1.06, 200), ("same", 1.0, 300)):
        monkeypatch.setattr(cli, "load", lambda asked, factor=factor, seed=seed: fake_suite_of(factor, seed))
        assert cli.main(["run", "fake", "--processes", "6", "--json", str(tmp_path / name)]) == 0
    base, head, same = (str(tmp_path / name / "fake.json") for name in ("base", "head", "same"))
    assert len(read(Path(base)).cases["a"].providers["plait"].by_process()) == 6
    assert cli.main(["compare", base, head]) == 1
    assert cli.main(["compare", base, same]) == 0


# ---- input --------------------------------------------------------------------------------------------------------


def changed(path: str, value: Any) -> Data:
    """BASE with the entry at this path replaced; `...` deletes it."""
    data = copy.deepcopy(BASE)
    *keys, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    place: Any = data
    for key in keys:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return data


SAMPLES = "cases/0/providers/plait/samples_s"


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "is no JSON"),
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[1]", "is a list, not an object"),
        ('{"schema": 2}', "schema is 2; this tool reads 1"),
        (changed("cases", ...), "cases: is missing"),
        (changed("cases", {}), "cases: is '{}', of the wrong kind"),
        (changed("cases/0", 3), r"cases\[0\]: is a int, not an object"),
        (changed("cases/1/case/name", "a"), "'a' is there twice"),
        (changed("cases/0/ours", "me"), r"cases\[0\].ours: 'me' is not among"),
        (changed(f"{SAMPLES}/3", "x"), r"cases\[0\].providers.plait.samples_s\[3\]: is x; need seconds > 0"),
        (changed(f"{SAMPLES}/3", -1.0), "need seconds > 0"),
        (changed(f"{SAMPLES}/3", True), "need seconds > 0"),
        (changed(f"{SAMPLES}/3", float("nan")), "need seconds > 0"),
        (changed(SAMPLES, []), "processes: 140 entries for 0 samples"),
        (changed("cases/0/providers/plait/processes/0", "0"), "need numbers of processes"),
        (changed("machine", None), "machine: is 'None', of the wrong kind"),
    ],
)
def test_a_file_that_is_no_result_is_one_error_naming_the_place(text, message, tmp_path, capsys, files):
    path = tmp_path / "bad.json"
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    with pytest.raises(ResultFileError, match=message) as caught:
        read(path)
    assert str(caught.value).startswith(str(path))
    assert cli.main(["compare", *files(base=BASE), str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1


def test_a_missing_file_a_folder_and_bytes_are_refused(tmp_path, files, capsys):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name in ("absent", ".", "bytes"):
        assert cli.main(["compare", *files(base=BASE), str(tmp_path / name)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "args, message",
    [
        (["--alpha", "2"], "alpha: 2"),
        (["--bound", "-1"], "bound: -1"),
        (["--json", "/proc/no/such"], "/proc/no"),
    ],
)
def test_options_out_of_range_are_refused(args, message, files, capsys):
    base, head = files(base=BASE, head=SLOW)
    assert cli.main(["compare", base, head, *args]) == 2
    assert message in capsys.readouterr().err


def test_files_of_different_suites_or_without_a_common_case_are_refused(files, capsys):
    other = document([measured_case("z", 1e-3, 1e-3, 1, 1)])
    base, train, z = files(base=BASE, train={**BASE, "suite": "train"}, z=other)
    assert cli.main(["compare", base, train]) == 2
    assert "of suite 'train'" in capsys.readouterr().err
    assert cli.main(["compare", base, z]) == 2
    assert "has no case of" in capsys.readouterr().err


def test_the_committed_result_of_the_first_version_is_still_read():
    found = read(ROOT / "bench" / "results" / "train.json")
    case = found.cases["dp=1,pp=1,tp=1 1f1b"]
    assert found.suite == "train" and len(found.cases) >= 10
    assert case.providers["plait"].by_process() == [case.providers["plait"].samples_s]
    rows = compare(found, found, Rule()).rows
    assert {row.verdict for row in rows} == {Verdict.INCONCLUSIVE}
    assert all(row.decision and row.decision.ratio == 1.0 for row in rows)


def test_what_is_written_is_read_back_the_same(tmp_path):
    result = measured_case("a", 1e-3, 2e-3, 3)
    result.providers["absent"] = Measured(skipped="not installed")
    report.write_json(tmp_path / "x.json", document([result]))
    assert read(tmp_path / "x.json").cases["a"] == result


# ---- several processes as one -------------------------------------------------------------------------------------


def test_processes_are_united_by_case_and_provider():
    one = CaseResult(Case("a", {}), "x", {"x": Measured([1.0, 2.0], "ok", {"f": 1.0}), "y": Measured(skipped="no")})
    two = CaseResult(Case("a", {}), "x", {"x": Measured([3.0, 4.0], "ok", {"f": 3.0}), "y": Measured(skipped="no")})
    (result,) = united([[one], [two]])
    assert result.providers["x"].by_process() == [[1.0, 2.0], [3.0, 4.0]]
    assert result.providers["x"].figures == {"f": 2.0} and result.providers["y"].skipped == "no"


def test_a_case_that_failed_in_one_process_has_no_numbers():
    good = CaseResult(Case("a", {}), "x", {"x": Measured([1.0])})
    bad = CaseResult(Case("a", {}), "", {}, error="OSError: full")
    for runs in ([[good], [bad]], [[bad], [good]]):
        (result,) = united(runs)
        assert result.providers == {} and "OSError: full" in result.error


# ---- aa -----------------------------------------------------------------------------------------------------------


def test_aa_on_the_fake_device_reports_a_rate_for_each_noise_model(tmp_path, capsys):
    path = tmp_path / "aa.json"
    assert cli.main(["aa", "--device", "fake", "--suites", "8", "--cases", "4", "--json", str(path)]) == 0
    captured = capsys.readouterr()
    assert all(model in captured.out for model in NOISE_MODELS) and "suites" in captured.err
    tallies = json.loads(path.read_text())["tallies"]
    assert [tally["cases"] for tally in tallies] == [32] * 4
    assert all(sum(tally["verdicts"].values()) == 32 for tally in tallies)


def test_aa_is_the_same_for_the_same_seed(capsys):
    outs = []
    for seed in ("1", "1"):
        cli.main(["aa", "--device", "fake", "--suites", "3", "--cases", "3", "--seed", seed])
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1]


def test_aa_says_when_the_tool_is_not_to_be_believed():
    tally = aa.Tally("broken", suites=100, cases=100, false_suites=30)
    assert tally.too_many(Rule()) and not aa.Tally("fine", suites=100, cases=100, false_suites=10).too_many(Rule())


@pytest.mark.parametrize(
    "args, message",
    [
        (["--device", "fake", "--suites", "0"], "--suites: 0"),
        (["--cases", "0"], "--cases: 0"),
        (["--device", "cpu", "--suites", "3"], "measures one suite"),
        (["--processes", "-1"], "--processes: -1"),
    ],
)
def test_aa_refuses_what_it_cannot_do(args, message, capsys):
    assert cli.main(["aa", *args]) == 2
    assert message in capsys.readouterr().err


def test_aa_on_this_machine_runs_fresh_processes(capsys):
    args = ["aa", "--device", "cpu", "--cases", "1", "--processes", "1", "--rounds", "2"]
    assert cli.main(args) == 0
    assert "this machine, cpu" in capsys.readouterr().out


def test_a_process_that_dies_is_named(monkeypatch):
    with pytest.raises(RuntimeError, match="a process on nowhere ended with 1"):
        aa.real_suite("nowhere", ["matmul 0"], 1, random.Random(0), 1, lambda: None)


def exit_code(*verdicts: Verdict, strict: bool = False) -> int:
    return Comparison([Row("c", "p", "", verdict) for verdict in verdicts], [], "").exit_code(strict)


def test_the_worst_verdict_decides_the_exit_code():
    assert exit_code(Verdict.SLOWER, Verdict.INVALID, strict=True) == 4
    assert exit_code(Verdict.SLOWER, Verdict.INCONCLUSIVE, strict=True) == 1
    assert exit_code(Verdict.SAME, Verdict.INCONCLUSIVE, strict=True) == 3
    assert exit_code(Verdict.SAME, Verdict.INCONCLUSIVE) == 0 == exit_code(Verdict.FASTER, strict=True)
    assert isinstance(ResultFile("p", "s", {}, {}, {}).title(), str)
