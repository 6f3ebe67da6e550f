"""The benchmark harness on fake clocks and known samples: order, statistics, report, command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from plait.bench import cli, report
from plait.bench.spec import Case, CaseResult, Measured, Options, Suite, WrongResultError
from plait.bench.stats import median_interval, paired_ratio
from plait.bench.timer import interleave


class FakeClock:
    """A clock that only moves when a provider says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def busy(self, seconds: float):
        def run() -> None:
            self.now += seconds

        return run


def test_every_provider_runs_once_in_every_round_and_warmup_is_not_counted():
    clock, calls = FakeClock(), []
    providers = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    samples = interleave(providers, Options(rounds=7, warmup=2, seed=3), clock=clock)
    assert {name: len(values) for name, values in samples.items()} == {"a": 7, "b": 7, "c": 7}
    rounds = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    assert len(rounds) == 9 and all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1, "the order never changed"


def test_the_order_is_the_same_for_the_same_seed():
    def order(seed: int) -> list[str]:
        calls: list[str] = []
        interleave(
            {n: (lambda n=n: calls.append(n)) for n in "abcd"}, Options(rounds=5, seed=seed), clock=FakeClock()
        )
        return calls

    assert order(1) == order(1) != order(2)


def test_samples_are_what_the_clock_says_and_sync_is_outside_the_order():
    clock, syncs = FakeClock(), []
    samples = interleave(
        {"fast": clock.busy(0.25), "slow": clock.busy(1.0)},
        Options(rounds=4, warmup=0),
        clock=clock,
        sync=lambda: syncs.append(clock.now),
    )
    assert samples == {"fast": [0.25] * 4, "slow": [1.0] * 4}
    assert len(syncs) == 2 * 2 * 4


@pytest.mark.parametrize("providers, options", [({}, Options()), ({"a": int}, Options(rounds=0))])
def test_nothing_to_time_is_refused(providers, options):
    with pytest.raises(ValueError, match="providers|rounds=0"):
        interleave(providers, options)


def test_median_interval_of_known_order_statistics():
    # n = 20, Binomial(20, 1/2): P(X <= 5) = 0.0207 and P(X <= 6) = 0.0577, so the interval is ranks 6 and 15.
    assert median_interval([float(v) for v in range(1, 21)]) == (6.0, 15.0)
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert median_interval([5.0]) == (5.0, 5.0)
    with pytest.raises(ValueError, match="empty"):
        median_interval([])


def test_ratio_is_paired_by_round():
    # The machine slows down threefold half way; the paired ratio does not see it.
    ours, peer = [1.0] * 10 + [3.0] * 10, [2.0] * 10 + [6.0] * 10
    assert paired_ratio(ours, peer) == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="paired by round"):
        paired_ratio([1.0], [1.0, 2.0])


def fake_result() -> CaseResult:
    providers = {
        "ours": Measured([0.5, 0.5, 0.5], "equal", {"tokens/s": 10.0}),
        "peer": Measured([1.0, 1.0, 1.0], "equal"),
        "absent": Measured(skipped="not installed"),
    }
    return CaseResult(Case("c", {"n": 3}, flop=1e9), "ours", providers)


def test_table_shows_ratio_rate_and_the_reason_of_a_skip():
    table = report.markdown([fake_result()])
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    by_provider = {line[1]: line for line in lines}
    assert by_provider["peer"][4] == "2.00 (2.00-2.00)"
    assert by_provider["ours"][3] == "2.00 GFLOP/s" and by_provider["ours"][5] == "tokens/s 10"
    assert by_provider["absent"][5] == "skipped: not installed"


def test_result_file_carries_samples_machine_commit_and_command(tmp_path):
    suite = Suite("fake", "about", lambda full: [], lambda case, options: fake_result())
    content = report.document(suite, [fake_result()], Options(rounds=3), "plait bench run fake")
    report.write_json(tmp_path / "deep" / "fake.json", content)
    read = json.loads((tmp_path / "deep" / "fake.json").read_text())
    assert read["schema"] == 1 and read["command"] == "plait bench run fake"
    assert read["cases"][0]["providers"]["peer"]["samples_s"] == [1.0, 1.0, 1.0]
    assert {"cpu", "cores", "torch", "triton", "gpus"} <= set(read["machine"])
    assert len(read["source"]["commit"]) == 40 or read["source"]["commit"] == "unknown"


def test_unknown_suite_is_a_usage_error_naming_the_valid_ones(capsys):
    assert cli.main(["run", "nonsense"]) == 2
    assert "valid: train, kernels" in capsys.readouterr().err


def test_wrong_result_prints_no_number_and_exits_4(monkeypatch, capsys):
    def wrong(case: Case, options: Options) -> CaseResult:
        raise WrongResultError("peer: loss 2 against 3")

    monkeypatch.setattr(cli, "load", lambda name: Suite("s", "about", lambda full: [Case("c", {})], wrong))
    assert cli.main(["run", "train"]) == 4
    captured = capsys.readouterr()
    assert "wrong result: peer" in captured.err and "ms" not in captured.out.replace("ms, median", "")


def test_a_case_that_fails_takes_no_other_with_it(monkeypatch, capsys, tmp_path):
    def measure(case: Case, options: Options) -> CaseResult:
        if case.name == "bad":
            raise OSError(28, "No space left on device")
        return fake_result()

    suite = Suite("s", "about", lambda full: [Case("bad", {}), Case("c", {"n": 3})], measure)
    monkeypatch.setattr(cli, "load", lambda name: suite)
    assert cli.main(["run", "s", "--json", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "failed: OSError: [Errno 28] No space left" in captured.out and "2.00 GFLOP/s" in captured.out
    cases = json.loads((tmp_path / "s.json").read_text())["cases"]
    assert [case["error"] for case in cases] == ["OSError: [Errno 28] No space left on device", ""]
    assert cases[1]["providers"]["ours"]["samples_s"] == [0.5, 0.5, 0.5]


def test_a_terminated_bench_leaves_no_folder(tmp_path):
    """SIGTERM while the snapshots suite holds its state on the disk."""
    command = [sys.executable, "-P", "-m", "plait", "bench", "run", "snapshots", "--rounds", "100"]
    process = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("plait-bench-*/*")):
        assert process.poll() is None and time.monotonic() < deadline, "the suite made no folder"
        time.sleep(0.05)
    process.terminate()
    assert process.wait(120) == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("plait-bench-*"))
