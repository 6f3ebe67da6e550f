"""The benchmark harness on fake clocks and known samples: order, statistics, report, command line."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from plait.bench import cli, ending, report, runner
from plait.bench.ceilings import mark_impossible
from plait.bench.device import kernel_hash, source_commit
from plait.bench.fake_device import FakeDevice
from plait.bench.progress import Progress
from plait.bench.result_file import measured_of, read, united
from plait.bench.spec import Case, CaseResult, Measured, Options, Suite, WrongResultError
from plait.bench.stats import MIN_INTERVAL, median_interval, paired_ratio
from plait.bench.timer import check_policy, copies_for, interleave
from tests import launchers


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
    rows = [line for line in table.splitlines() if line.startswith("|")]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]
    by_provider = {line[1]: line for line in lines}
    assert by_provider["peer"][4] == "2.00 (2.00-2.00)"
    assert by_provider["ours"][3] == "2.00 GFLOP/s" and by_provider["ours"][5] == "tokens/s 10"
    assert by_provider["absent"][5] == "skipped: not installed"


def test_fewer_samples_than_an_interval_needs_are_told_under_the_table():
    """The range of five holds the median in 94 of 100 runs, of three in 75: neither is a 95 % interval."""
    few, enough = fake_result(), fake_result()
    for one in enough.providers.values():
        one.samples_s = one.samples_s * 2
    text = report.markdown([few, enough])
    assert text.endswith("2 rows of 3 samples: their range stands for the interval, which needs 6")
    assert "range" not in report.markdown([enough])
    assert 1 - 2 * 0.5**MIN_INTERVAL >= 0.95 > 1 - 2 * 0.5 ** (MIN_INTERVAL - 1)


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
    args = ["bench", "run", "snapshots", "--rounds", "100"]
    code = f"import sys, tempfile; tempfile.tempdir = {str(tmp_path)!r}; from plait.cli import main"
    running = launchers.program(f"{code}; sys.exit(main({args!r}))")
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("plait-bench-*/*")):
        assert time.monotonic() < deadline, "the suite made no folder"
        time.sleep(0.05)
    os.kill(running.pid, signal.SIGTERM)
    assert running.finish()[0] == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("plait-bench-*"))


def _swallowed(error):
    pass


def _converted(error):
    raise KeyboardInterrupt("as torch's CheckpointException is no Exception") from None


def _in_a_finalizer(error):
    raise ZeroDivisionError


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("answer", [_swallowed, _converted, _in_a_finalizer])
def test_a_terminated_bench_ends_whatever_a_peer_makes_of_the_exception(monkeypatch, tmp_path, answer):
    """DCP turned SystemExit into an error of its own (exit 1); a finalizer forgets it (the suite ran to its end)."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ending, "AGAIN_S", 0.02)
    caught = []

    class Noticed:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            caught.append(len(os.listdir(tmp_path)))

    def measure(case, options):
        with ending.scratch_folder() as folder:
            (Path(folder) / "state").write_bytes(b"x")
            try:
                if answer is _in_a_finalizer:
                    Noticed()  # what is raised in it is printed, no more
                else:
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(60)
            except BaseException as error:
                caught.append(error)
                answer(error)
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                time.sleep(0.01)
        return fake_result()

    monkeypatch.setattr(cli, "load", lambda name: Suite("s", "about", lambda full: [Case("c", {"n": 3})], measure))
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "s"])
    assert ended.value.code == 128 + signal.SIGTERM and os.listdir(tmp_path) == []
    assert len(caught) == (answer is not _in_a_finalizer)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_end_of_a_bench_does_not_cut_its_own_cleaning_up_short(monkeypatch, tmp_path):
    """The signal comes while a folder is removed, and again and again afterwards; then a file comes into it late."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ending, "AGAIN_S", 0.01)
    monkeypatch.setattr(ending, "PAUSE_S", 0.01)
    real, calls = shutil.rmtree, []

    def rmtree(path, ignore_errors=False):
        calls.append(ignore_errors)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        real(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(ending.shutil, "rmtree", rmtree)
    with pytest.raises(SystemExit), ending.Ending(), ending.scratch_folder() as folder:
        (Path(folder) / "state").write_bytes(b"x")
    assert calls == [False, True] and os.listdir(tmp_path) == []

    def too_early(path, ignore_errors=False):
        calls.append(ignore_errors)
        if len(calls) < 5:
            raise OSError(errno.ENOTEMPTY, "a thread of a peer has made another file")
        real(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(ending.shutil, "rmtree", too_early)
    with ending.scratch_folder():
        pass
    assert calls[2:] == [False, False, False, True] and os.listdir(tmp_path) == []


# ---- tables as files ----------------------------------------------------------------------------------------------


def test_csv_has_one_row_a_provider_with_all_digits():
    failed = CaseResult(Case("bad, worse", {}), "", {}, error="OSError: full")
    text = report.csv_text(report.CSV_HEADER, report.csv_rows("s", [fake_result(), failed]))
    rows = {row["provider"]: row for row in csv.DictReader(io.StringIO(text))}
    assert [rows["peer"][key] for key in ("median_s", "peer_over_ours", "flop_per_s")] == [
        "1.0",
        "2.0",
        "1000000000.0",
    ]
    assert rows["ours"]["samples"] == "3" and rows["ours"]["processes"] == "1" and rows["ours"]["bytes_per_s"] == ""
    assert (rows["absent"]["status"], rows["absent"]["reason"]) == ("skipped", "not installed")
    assert (rows[""]["status"], rows[""]["case"]) == ("failed", "bad, worse")


def test_a_bar_in_a_name_does_not_break_the_table():
    assert report.table(["a"], [["x|y"]]).splitlines()[2] == "| x\\|y |"


def test_run_writes_json_csv_and_md_side_by_side(monkeypatch, tmp_path, capsys):
    suite = Suite("s", "about", lambda full: [Case("c", {"n": 3})], lambda case, options: fake_result())
    monkeypatch.setattr(cli, "load", lambda name: suite)
    folders = [f"--{kind}={tmp_path}" for kind in ("json", "csv", "md")]
    assert cli.main(["run", "s", *folders]) == 0
    captured = capsys.readouterr()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.csv", "s.json", "s.md"]
    assert (tmp_path / "s.md").read_text().strip() in captured.out
    assert read(tmp_path / "s.json").cases["c"] == fake_result()


@pytest.mark.parametrize("args, text", [(["--processes", "0"], "--processes: 0"), (["--seed", "-1"], "--seed: -1")])
def test_run_refuses_options_out_of_range(args, text, capsys):
    assert cli.main(["run", "train", *args]) == 2
    assert text in capsys.readouterr().err


# ---- several processes --------------------------------------------------------------------------------------------


def test_each_process_has_its_own_seed_and_its_samples_stay_apart(monkeypatch, capsys):
    commands = []

    def child(command: list[str]) -> int:
        commands.append(command)
        folder, seed = (command[command.index(flag) + 1] for flag in ("--json", "--seed"))
        result = fake_result()
        result.providers["ours"].samples_s = [float(seed)] * 3
        content = report.document(suite, [result], Options(), "x")
        report.write_json(Path(folder) / "fake.json", content)
        return 0

    suite = Suite("fake", "about", lambda full: [], lambda case, options: fake_result())
    monkeypatch.setattr(runner, "run_child", child)
    results, code = runner.run_processes(suite, Options(rounds=3, seed=5, full=True, processes=3), "")
    assert code == 0 and results[0].providers["ours"].by_process() == [[5.0] * 3, [6.0] * 3, [7.0] * 3]
    assert all("--full" in command and command[command.index("--rounds") + 1] == "3" for command in commands)


def test_a_process_without_a_result_is_an_error(monkeypatch, capsys):
    suite = Suite("fake", "about", lambda full: [], lambda case, options: fake_result())
    monkeypatch.setattr(runner, "run_child", lambda command: -9)
    monkeypatch.setattr(cli, "load", lambda name: suite)
    assert cli.main(["run", "fake", "--processes", "2"]) == 1
    assert "process 0 of suite fake ended with -9 and wrote no result" in capsys.readouterr().err


def test_processes_are_real(tmp_path, monkeypatch):
    args = ["run", "kernels", "--only", "geglu", "--rounds", "2", "--processes", "2", "--json", str(tmp_path)]
    pids = []

    def forked(command: list[str]) -> int:  # of a process that has torch already: a fresh one, but for the imports
        assert command[:4] == [sys.executable, "-P", "-m", "plait"]
        running = launchers.program(f"import sys; from plait.cli import main; sys.exit(main({command[4:]!r}))")
        pids.append(running.pid)
        return running.finish()[0]

    monkeypatch.setattr(runner, "run_child", forked)
    assert cli.main(args) == 0 and len(set(pids)) == 2
    (case,) = read(tmp_path / "kernels.json").cases.values()
    assert [len(samples) for samples in case.providers["plait"].by_process()] == [2, 2]


# ---- faster than physics ------------------------------------------------------------------------------------------

H200 = {"gpus": [{"name": "NVIDIA H200"}]}
MIB = 1 << 20


def gpu_result(seconds: float, flop: float | None = None, nbytes: float | None = None, cache: str = "") -> CaseResult:
    case = Case("c", {"device": "cuda", "dtype": "bfloat16"}, flop=flop, bytes_moved=nbytes)
    return CaseResult(case, "ours", {"ours": Measured([seconds] * 5)}, cache=cache)


@pytest.mark.parametrize(
    "result, text",
    [
        (gpu_result(1e-4, nbytes=40.0 * MIB), ""),
        (gpu_result(1e-3, flop=1.0e12), ""),  # 1000 TFLOP/s: within 2 % of 989
        (gpu_result(1e-3, flop=1.02e12), "1020 TFLOP/s, the peak is 989 .*work skipped or replayed"),
        (gpu_result(2e-6, flop=1e12), "shorter than a launch, so the device was not waited for"),
        (gpu_result(1e-3, nbytes=5.1e9), "5100 GB/s, memory gives 4800 .*formula that counts bytes"),
        # twice 40 MiB in 12 us, when 40 MiB stay in L2
        (gpu_result(1.2e-5, nbytes=40.0 * MIB * 2), "formula that counts bytes"),
        (gpu_result(1.2e-5, nbytes=40.0 * MIB * 1.5, cache="hot"), "formula that counts bytes"),
        (gpu_result(1.1e-5, nbytes=50.0 * MIB * 1.01), ""),
        (gpu_result(2e-6, nbytes=40.0 * MIB, cache="hot"), "shorter than a launch"),
    ],
)
def test_a_rate_above_the_ceiling_is_invalid_with_its_likely_cause(result, text):
    found = mark_impossible(result, H200)
    assert found == bool(text) == bool(result.providers["ours"].invalid)
    assert re.search(text, result.providers["ours"].invalid)


@pytest.mark.parametrize("cache, copies, valid", [("", 1, False), ("hot", 1, True), ("", 8, True)])
def test_a_working_set_in_l2_is_faster_than_memory_unless_the_table_says_hot(cache, copies, valid):
    """5019 GB/s on a card with less: the copies all fitted L2."""
    nbytes = 48 * MIB
    device = FakeDevice(l2_bytes=50 * MIB)
    kernel = device.kernel(nbytes / 4.0e12, nbytes=nbytes, hot_s=nbytes / 9.6e12, copies=copies)

    def block() -> None:
        for _ in range(100):
            kernel()

    samples = interleave({"ours": block}, Options(rounds=5, warmup=1), sync=device.sync, clock=device.clock)["ours"]
    result = gpu_result(1.0, nbytes=float(nbytes), cache=cache)
    result.providers["ours"].samples_s = [seconds / 100 for seconds in samples]
    assert mark_impossible(result, H200) is not valid
    if not valid:
        assert "48 MiB sit in the L2 of 50 MiB" in result.providers["ours"].invalid


def test_no_ceiling_is_known_for_a_cpu_or_another_card():
    assert not mark_impossible(gpu_result(1e-9, flop=1e12), {"gpus": []})


def test_an_impossible_number_is_shown_as_invalid_and_exits_4(monkeypatch, tmp_path, capsys):
    suite = Suite("s", "about", lambda full: [Case("c", {})], lambda case, options: gpu_result(1e-3, flop=9e12))
    monkeypatch.setattr(cli, "load", lambda name: suite)
    monkeypatch.setattr(runner, "fingerprint", lambda: H200)
    assert cli.main(["run", "s", f"--csv={tmp_path}"]) == 4
    captured = capsys.readouterr()
    assert "INVALID" in captured.out and "GFLOP/s" not in captured.out and "9000 TFLOP/s" in captured.err
    assert ",invalid," in (tmp_path / "s.csv").read_text()


# ---- progress -----------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_that_leaves_no_trace():
    stream = Terminal()
    progress = Progress(stream)
    progress.at(0, 4, "a long label")
    progress.at(3, 4, "b")
    assert stream.getvalue().split("\r")[1:] == [
        "[........................] 0/4 a long label",
        "[##################......] 3/4 b".ljust(43),
    ]
    progress.close()
    assert stream.getvalue().endswith("\r")


def test_progress_is_plain_lines_elsewhere_and_few_of_them():
    stream = io.StringIO()
    progress = Progress(stream)
    for done in range(1000):
        progress.at(done, 1000, "suites")
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10 and lines[:2] == ["[0/1000] suites", "[100/1000] suites"]


# ---- conditions beside the samples --------------------------------------------------------------------------------


def test_conditions_are_read_back_and_united_by_process(tmp_path):
    def run(throttled: list[int], clocks: list[float]) -> CaseResult:
        ours = Measured([1.0, 2.0], "equal", throttled=throttled, clocks_mhz=clocks, watts=[500.0, 510.0])
        return CaseResult(Case("c", {}), "ours", {"ours": ours})

    suite = Suite("fake", "about", lambda full: [], lambda case, options: fake_result())
    report.write_json(tmp_path / "fake.json", report.document(suite, [run([1], [1.0, 2.0])], Options(), "x"))
    assert read(tmp_path / "fake.json").cases["c"] == run([1], [1.0, 2.0])
    both = united([[run([1], [1980.0, 1500.0])], [run([0, 1], [])]])[0].providers["ours"]
    assert both.throttled == [1, 2, 3] and both.watts == [500.0, 510.0] * 2
    assert both.clocks_mhz == [], "not known in one process"


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("throttled", [2], r"throttled: need indices of samples, 0 to 1"),
        ("clocks_mhz", [1.0], r"clocks_mhz: need a number for each of 2 samples"),
        ("watts", ["a", "b"], r"watts: need a number for each of 2 samples"),
    ],
)
def test_conditions_that_do_not_fit_the_samples_are_refused(name, value, text):
    with pytest.raises(ValueError, match=text):
        measured_of("ours", {"samples_s": [1.0, 2.0], name: value})


def test_a_source_is_known_by_the_hash_of_its_kernels(tmp_path):
    (tmp_path / "a.py").write_text("one")
    first = kernel_hash(tmp_path)
    (tmp_path / "notes.md").write_text("no kernel")
    assert kernel_hash(tmp_path) == first and len(first) == 16
    (tmp_path / "a.py").write_text("two")
    assert kernel_hash(tmp_path) != first
    assert len(source_commit()["kernels"]) == 16


def test_a_policy_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="cache: 'warm' is unknown; valid: hot, cold-rotate, cold-flush"):
        check_policy("warm", calls=1, nbytes=1.0, copies=1, l2_bytes=1)
    assert check_policy("hot", calls=9, nbytes=1.0, copies=1, l2_bytes=1).startswith("hot")
    with pytest.raises(ValueError, match="nbytes: 0"):
        copies_for(0, 1)
