"""The roofline: bounds and shares by hand, ceilings out of a result file, the command with and without one."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest

from plait.bench import cli, report, roofline, runner, suite_ceilings
from plait.bench.ceilings import beyond_measured
from plait.bench.peaks import card_named
from plait.bench.result_file import ResultFile, read
from plait.bench.spec import Case, CaseResult, Measured, Options, Suite, WrongResultError

H200 = card_named("h200")
MACHINE = {"cpu": "c", "cores": 2, "memory_gib": 3, "gpus": [{"name": "NVIDIA H200", "memory_gib": 141}]}
BF16 = {"dtype": "bfloat16", "device": "cuda"}


CPU = Case("c", {"dtype": "bfloat16", "device": "cpu"}, flop=1.0)  # on a machine with a card


BUS = Case("c", {**BF16, "bytes": "bus"}, bytes_moved=1.0)  # between ranks: no memory's bandwidth bounds it


def result(case: Case, seconds: float, cache: str = "") -> CaseResult:
    return CaseResult(case, "plait", {"plait": Measured([seconds] * 6, "ok")}, cache=cache)


def file_of(*results: CaseResult, suite: str = "kernels", machine: dict = MACHINE) -> ResultFile:
    return ResultFile("r.json", suite, machine, {}, {one.case.name: one for one in results})


def ceilings(machine: dict = MACHINE) -> ResultFile:
    """4.3 TB/s by copy, 4.0 by read, 780 TFLOP/s."""
    copy = Case("copy", {"quantity": "copy", **BF16}, bytes_moved=4.3e9)
    reading = Case("read", {"quantity": "read", **BF16}, bytes_moved=4.0e9)
    product = Case("matmul", {"quantity": "matmul", **BF16}, flop=780e9, bytes_moved=1e9)
    return file_of(*(result(case, 1e-3) for case in (copy, reading, product)), suite="ceilings", machine=machine)


@pytest.mark.parametrize(
    "flop, nbytes, seconds, limiter",
    [
        (None, 4.8e9, 1e-3, "memory"),
        (989e9, None, 1e-3, "compute"),
        (989e9, 4.8e9 * 2, 2e-3, "memory"),
        (989e9 * 3, 4.8e9, 3e-3, "compute"),
    ],
)
def test_the_bound_is_the_larger_of_memory_and_arithmetic(flop, nbytes, seconds, limiter):
    found = roofline.datasheet(H200).bound(Case("c", BF16, flop, nbytes))
    assert found == (pytest.approx(seconds), limiter)


@pytest.mark.parametrize("case", [Case("c", BF16), Case("c", {**BF16, "dtype": "int4"}, flop=1.0), CPU, BUS])
def test_no_work_or_no_rate_is_no_bound(case):
    assert roofline.datasheet(H200).bound(case) is None


def test_the_ridge_of_an_h200_in_bf16():
    assert roofline.datasheet(H200).ridge("bfloat16") == pytest.approx(206.04, abs=0.01)


def test_measured_ceilings_are_the_better_bandwidth_and_a_rate_per_dtype():
    roof = roofline.measured_roof(ceilings())
    assert roof.bytes_per_s == pytest.approx(4.3e12) and roof.flop_per_s == {"bfloat16": pytest.approx(780e12)}
    with pytest.raises(ValueError, match="holds no bandwidth of suite `ceilings`"):
        roofline.measured_roof(file_of(result(Case("c", BF16, 1.0, 1.0), 1.0)))


def test_shares_of_both_ceilings():
    file = file_of(result(Case("c", BF16, flop=None, bytes_moved=4.3e9 / 2), 1e-3))
    (one,) = roofline.standings(file, H200, roofline.roof_for(file, [ceilings()]))
    assert one.of_measured == pytest.approx(0.5) and one.of_sheet == pytest.approx(4.3 / 4.8 / 2)
    assert (one.limiter, one.intensity, one.flop_rate, one.byte_rate) == ("memory", None, None, 4.3e12 / 2)


def test_ceilings_of_other_hardware_are_not_used():
    file = file_of(result(Case("c", BF16, bytes_moved=1.0), 1.0))
    assert roofline.roof_for(file, [ceilings({**MACHINE, "cores": 4})]) is None
    assert roofline.roof_for(file, [ceilings({**MACHINE, "torch": "other"})]) is not None
    gpu = MACHINE["gpus"][0]
    assert roofline.roof_for(file, [ceilings({**MACHINE, "gpus": [{**gpu, "driver_version": "1"}]})]) is not None
    assert roofline.roof_for(file, [ceilings({**MACHINE, "gpus": [{**gpu, "power_limit": "300"}]})]) is None


@pytest.mark.parametrize("cache, invalid", [("", True), ("cold-rotate", True), ("hot", False)])
def test_more_than_102_percent_of_the_measured_ceiling_is_invalid_unless_cached(cache, invalid):
    file = file_of(result(Case("c", BF16, bytes_moved=4.3e9 * 1.03), 1e-3, cache))
    (one,) = roofline.standings(file, H200, roofline.measured_roof(ceilings()))
    assert bool(one.invalid) is invalid and ("103% of the measured ceiling" in one.invalid) is invalid


def test_the_static_suite_is_held_against_the_card_that_it_names():
    card = roofline.card_for(file_of(result(Case("c", {"card": "H200"}), 1.0), machine={}))
    assert card is H200 and roofline.card_for(file_of(machine={})) is None
    assert roofline.card_for(file_of(), "a100").multiprocessors == 108


def run_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: dict, argv: list[str], **how: float) -> int:
    """`plait bench run` of a made-up suite beside made-up ceilings, on a made-up machine."""
    case = Case("c", BF16, how.get("flop"), how.get("nbytes"))
    found = {"kernels": CaseResult(case, "plait", {"plait": Measured([1e-3] * 5, "right")}, cache="cold-rotate")}
    cases = {"ceilings": list(ceilings().cases.values())}

    def load(name: str) -> Suite:
        if name == "ceilings":
            every = {one.case.name: one for one in cases["ceilings"]}
            return Suite(name, "a", lambda full: [one.case for one in every.values()], lambda c, o: every[c.name])
        return Suite(name, "about", lambda full: [case], lambda c, o: found[name])

    monkeypatch.setattr(cli, "load", load)
    monkeypatch.setattr(runner, "fingerprint", lambda: machine)
    monkeypatch.chdir(tmp_path)
    return cli.main(["run", *argv])


@pytest.mark.parametrize("share, code", [(1.01, 0), (1.03, 4)])
def test_a_run_holds_its_numbers_against_ceilings_that_it_measured_first(share, code, tmp_path, monkeypatch, capsys):
    """Below the data sheet (4.8 TB/s) and above what this card reached (4.3)."""
    how = {"nbytes": 4.3e9 * share}
    assert run_with(monkeypatch, tmp_path, MACHINE, ["kernels", "ceilings"], **how) == code
    said = capsys.readouterr()
    assert said.out.index("ceilings: ") < said.out.index("kernels: ")
    if code:
        assert "103% of the measured ceiling of memory (measured on this card by suite ceilings, 20" in said.err
        assert "likely cause: work skipped or replayed" in said.err and "INVALID" in said.out


@pytest.mark.parametrize("how", [{"nbytes": 4.3e9 * 1.03}, {"flop": 780e9 * 1.03}])
def test_a_run_takes_the_ceilings_of_a_file_of_this_machine(how, tmp_path, monkeypatch, capsys):
    write(tmp_path / "out" / "ceilings.json", ceilings())
    assert run_with(monkeypatch, tmp_path, MACHINE, ["kernels"], **how) == 0, "none are known"
    assert run_with(monkeypatch, tmp_path, MACHINE, ["kernels", "--ceilings", "out/ceilings.json"], **how) == 4
    assert run_with(monkeypatch, tmp_path, MACHINE, ["kernels", "--json", "out"], **how) == 4
    capsys.readouterr()
    other = {**MACHINE, "cores": 4}
    assert run_with(monkeypatch, tmp_path, other, ["kernels", "--json", "out"], **how) == 0
    assert "out/ceilings.json is of another machine, so no number is held against it" in capsys.readouterr().err
    assert run_with(monkeypatch, tmp_path, other, ["kernels", "--ceilings", "out/ceilings.json"], **how) == 5
    assert "plait bench ceilings" in capsys.readouterr().err


def test_fp32_on_a_card_is_held_against_tf32_or_nothing():
    case = Case("c", {"device": "cuda", "dtype": "float32"}, flop=100e9)
    without = roofline.Roof("r", 4e12, {"float32": 50e12})
    assert not beyond_measured(CaseResult(case, "", {}), 1e-3, without)
    with_tf32 = roofline.Roof("r", 4e12, {"float32": 50e12, "tfloat32": 90e12})
    assert "111% of the measured ceiling of arithmetic" in beyond_measured(CaseResult(case, "", {}), 1e-3, with_tf32)


# ---- the command --------------------------------------------------------------------------------------------------


def write(path: Path, file: ResultFile) -> Path:
    suite = Suite(file.suite, "about", lambda full: [], lambda case, options: list(file.cases.values())[0])
    content = report.document(suite, list(file.cases.values()), Options(), "x")
    report.write_json(path, {**content, "machine": file.machine})
    return path


def test_roofline_takes_the_ceilings_beside_the_result(tmp_path, capsys):
    path = write(tmp_path / "kernels.json", file_of(result(Case("c", BF16, bytes_moved=2.15e9), 1e-3)))
    assert cli.main(["roofline", str(path)]) == 0
    assert "no ceilings of this machine" in capsys.readouterr().out
    write(tmp_path / "ceilings.json", ceilings())
    assert cli.main(["roofline", str(path), "--csv", str(tmp_path / "r.csv")]) == 0
    assert "NVIDIA H200 SXM data sheet, read 2026-11" in capsys.readouterr().out
    (row,) = csv.DictReader((tmp_path / "r.csv").open())
    assert (row["bound by"], row["% data sheet"], row["% measured"]) == ("memory", "44.8%", "50.0%")


def test_an_impossible_rate_exits_4(tmp_path, capsys):
    path = write(tmp_path / "kernels.json", file_of(result(Case("c", BF16, bytes_moved=4.6e9), 1e-3)))
    write(tmp_path / "ceilings.json", ceilings())
    assert cli.main(["roofline", str(path)]) == 4
    assert "107% of the measured ceiling" in capsys.readouterr().out


def test_without_a_result_every_kernel_has_its_lower_bound(capsys):
    assert cli.main(["roofline", "--card", "h200", "--only", "rms_norm fwd rows=8192 cols=4096"]) == 0
    out = capsys.readouterr().out
    assert "134.23" in out and "28.0" in out and "nothing was timed" in out
    assert cli.main(["roofline"]) == 2 and "name a card" in capsys.readouterr().err
    assert cli.main(["roofline", "--card", "t4"]) == 2 and "valid: H200" in capsys.readouterr().err


# ---- measuring them -----------------------------------------------------------------------------------------------

SMALL = [
    Case("copy", {"quantity": "copy", "device": "cpu", "dtype": "float32", "mib": 1}, bytes_moved=2.0 * (1 << 20)),
    Case("read", {"quantity": "read", "device": "cpu", "dtype": "float32", "mib": 1}, bytes_moved=1.0 * (1 << 20)),
    Case("matmul", {"quantity": "matmul", "device": "cpu", "dtype": "float32", "edge": 16}, flop=2.0 * 16**3),
]


def test_the_suite_measures_what_the_roofline_reads():
    results = [suite_ceilings.measure(case, Options(rounds=3, warmup=0)) for case in SMALL]
    roof = roofline.measured_roof(file_of(*results, suite="ceilings", machine={}))
    assert roof.bytes_per_s > 0 and set(roof.flop_per_s) == {"float32"} and "host" in roof.title
    assert all("host_wall, cpu" in one.note for one in results)


def test_cases_say_host_and_declare_their_bytes():
    for case in suite_ceilings.cases(True):
        size = case.params.get("mib", 0) << 20
        assert case.name.startswith("host ") or case.params["device"] == "cuda"
        if case.params["quantity"] != "matmul":
            assert case.bytes_moved == size * (2 if case.params["quantity"] == "copy" else 1)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_a_wrong_result_gives_no_ceiling(case, monkeypatch):
    make = suite_ceilings.product if case.name == "matmul" else suite_ceilings.stream

    def idle(params, generator):
        return make(params, generator)._replace(call=lambda: None)

    monkeypatch.setattr(suite_ceilings, make.__name__, idle)
    with pytest.raises(WrongResultError, match=f"{case.name}: off by (inf|nan)"):
        suite_ceilings.measure(case, Options(rounds=1))


def test_a_run_of_the_command_is_a_result_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(suite_ceilings, "SUITE", dataclasses.replace(suite_ceilings.SUITE, cases=lambda full: SMALL))
    assert cli.main(["ceilings", "--rounds", "3", "--json", str(tmp_path)]) == 0
    file = read(tmp_path / "ceilings.json")
    assert file.suite == "ceilings" and roofline.measured_roof(file).flop_per_s["float32"] > 0
    assert cli.main(["roofline", str(tmp_path / "ceilings.json")]) == 0
