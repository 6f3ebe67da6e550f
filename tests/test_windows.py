"""How the suite `kernels` times a device, end to end on the simulated one: marks behind a spin, graphs, cold data.

The ops are real ones on CPU tensors; beside each call a kernel is launched on the FakeDevice, whose time is what the
suite has to find. Nothing here asserts a time of this machine.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.bench import cli, device, queues, runner, settings, suite_kernels
from plait.bench.fake_device import FakeDevice
from plait.bench.kernel_jobs import Contender, Job, Rotation, adamw_job, problem_job
from plait.bench.kernel_problems import PROBLEMS
from plait.bench.kernel_shapes import make_case
from plait.bench.queues import HostQueue, cpu_cache_bytes
from plait.bench.report import markdown
from plait.bench.spec import CaseResult, Options, Suite, WrongResultError
from plait.bench.timer import REUSE
from plait.bench.windows import MAX_QUEUED, Events, joules_per_call
from tests.cases import needs_plain
from tests.fake_card import L2, NBYTES, NORM, QUICK, Refuses, Replays, measure_on, medians

pytestmark = needs_plain


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CaseResult]:
    """fake_card.measure_on."""
    return functools.partial(measure_on, monkeypatch)


# ---- the cache policies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cache, wanted, said",
    [
        ("hot", 4e-4, "cache hot: data of the last call"),
        ("cold-flush", 1e-3, "cache cold-flush: L2 overwritten before every call"),
        ("cold-rotate", 1e-3, "cache cold-rotate: 17 copies, 4.0 x L2 between two uses"),
    ],
)
def test_each_policy_gives_its_time_and_its_name(measured, cache, wanted, said):
    result = measured(1e-3, 4e-4, cache)
    assert medians(result) == pytest.approx({"plait": wanted, "torch": wanted})
    assert result.cache == cache and said in result.note and "events behind a spin" in result.note
    assert said in markdown([result]), "the table says it"
    calls = result.providers["plait"].figures["calls/sample"]
    assert (calls == 1) == (cache == "cold-flush")


def test_short_calls_are_timed_by_a_graph_whose_launch_cost_is_not_in_them(measured):
    for cache, wanted in (("hot", 3e-6), ("cold-rotate", 6e-6)):
        result = measured(6e-6, 3e-6, cache)
        assert medians(result) == pytest.approx({"plait": wanted, "torch": wanted}, rel=0.02)
        assert "graph of calls behind a spin" in result.note
        ours = result.providers["plait"]
        assert ours.figures["host us/call"] == pytest.approx(5.0), "the launch cost is told beside it"
        assert ours.figures["calls/sample"] % (17 if cache == "cold-rotate" else 1) == 0
    assert medians(measured(1e-3, 1e-3, "hot"))["plait"] == pytest.approx(1e-3)


def test_a_graph_of_fewer_calls_than_copies_would_be_silently_warm():
    """The trap after graph capture: its replays go through the captured copies only."""
    fake = FakeDevice(l2_bytes=L2)
    kernel = fake.kernel(6e-6, nbytes=NBYTES, hot_s=3e-6, copies=17)
    replay = fake.capture(lambda: [kernel() for _ in range(3)])
    window = Events(fake)
    assert [window("k", replay) / 3 for _ in range(3)][1:] == pytest.approx([3e-6] * 2), "the trap is not there"
    job = Job(lambda: None, list, {"k": Contender(lambda: (kernel(), ())[1])}, {}, NBYTES, Rotation(17))
    from plait.bench import kernel_blocks

    timing = kernel_blocks.timing_of(fake, job, "cold-rotate")
    assert timing.blocks["k"].size % 17 == 0
    timing.blocks["k"].size = 3
    with pytest.raises(ValueError, match="cold-rotate with 3 copies of .* take 17 copies"):
        kernel_blocks.asserted(timing, job, "cold-rotate", graph=True)


def test_a_graph_that_cannot_be_captured_leaves_events_for_everybody_and_says_why(measured):
    result = measured(6e-6, 3e-6, "hot", Refuses(l2_bytes=L2))
    assert "(no graph: plait cannot be captured: operation not permitted when stream is capturing)" in result.note
    assert medians(result) == pytest.approx({"plait": 3e-6, "torch": 3e-6}, rel=0.02)


def test_a_gradient_that_is_the_output_gradient_itself_is_not_poisoned_in_a_graph(measured):
    """Else the next replay would read NaN where its input was."""
    shape = {"rows": 6, "cols": 8, "width": 12, "epilogue": "residual"}
    result = measured(6e-6, 3e-6, "hot", case=make_case("linear", shape, "float32", "cpu", True))
    assert "graph of calls" in result.note and not any(one.invalid for one in result.providers.values())


def test_a_backward_alone_is_timed_without_its_forward_and_by_no_graph(measured):
    case = make_case("rms_norm", {"rows": 64, "cols": 256}, "float32", "cpu", True, alone=True)
    result = measured(6e-6, 3e-6, "cold-rotate", case=case)
    reason = "no graph: a backward runs on the stream of its forward"
    assert case.name.startswith("rms_norm bwd ") and reason in result.note
    assert medians(result) == pytest.approx({"plait": 6e-6, "torch": 6e-6}, rel=0.05)


@pytest.mark.parametrize("op", [*PROBLEMS, "adamw_"])
def test_copies_are_used_in_turn_and_each_holds_the_same_numbers(op):
    shape = {"rows": 3, "cols": 16, "width": 8, "vocab": 11, "tensors": 2, "elements": 9}
    shape |= {"batch": 1, "heads": 2, "kv_heads": 1, "dim": 16, "tokens": 8}
    case = make_case(op, shape, "float32", "cpu", True)
    build = (lambda l2: adamw_job(case.params, 0, l2)) if op == "adamw_" else (
        lambda l2: problem_job(case.params, 0, False, l2)
    )  # fmt: skip
    l2_bytes = int(build(0).nbytes / 2)
    job = build(l2_bytes)
    copies = job.rotation.copies
    assert copies == 3 and (copies - 1) * job.nbytes >= REUSE * l2_bytes and job.nbytes <= case.bytes_moved
    job.redraw()
    wanted = job.oracle()
    for contender in job.contenders.values():
        contender.prepare()
        results = [contender.call() for _ in range(copies)]
        places = {tuple(value.data_ptr() for value in one) for one in results}
        assert len(places) == copies, "results of one copy are not written over those of another"
        for one in results:
            assert suite_kernels.check(op, contender, one, wanted, 2e-5) <= 2e-5


def test_a_policy_that_cannot_be_kept_is_refused(monkeypatch):
    monkeypatch.setattr(HostQueue, "__init__", lambda queue: vars(queue).update(l2_bytes=0, other=None))
    with pytest.raises(ValueError, match="cold-rotate needs the size of the device's cache, which is unknown here"):
        suite_kernels.measure(NORM, dataclasses.replace(QUICK, cache="cold-rotate"))
    with pytest.raises(ValueError, match="cache: 'warm' is unknown; valid: hot, cold-rotate, cold-flush"):
        suite_kernels.measure(NORM, dataclasses.replace(QUICK, cache="warm"))


@pytest.mark.parametrize("cache", ["cold-rotate", "cold-flush"])
def test_the_host_keeps_them_too_by_its_last_cache(cache, monkeypatch):
    monkeypatch.setattr(HostQueue, "__init__", lambda queue: vars(queue).update(l2_bytes=1 << 16, other=None))
    result = suite_kernels.measure(NORM, dataclasses.replace(QUICK, cache=cache))
    assert result.cache == cache and result.note.startswith("host_wall, cpu") and f"cache {cache}" in result.note
    assert all(len(one.samples_s) == 6 for one in result.providers.values() if not one.skipped)


def test_the_last_cache_is_the_largest_that_linux_names(tmp_path):
    for index, size in enumerate(("48K", "2M", "32768K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert cpu_cache_bytes(tmp_path) == 32 << 20 and cpu_cache_bytes(tmp_path / "none") == 0


# ---- windows ------------------------------------------------------------------------------------------------------


def test_without_a_spin_a_short_kernel_is_as_long_as_its_launch():
    fake = FakeDevice(launch_s=5e-6)
    kernel = fake.kernel(1e-6)
    block = lambda: [kernel() for _ in range(50)]  # noqa: E731
    begin = fake.mark()
    block()
    assert fake.between(begin, fake.mark()) / 50 == pytest.approx(5e-6, rel=0.05), "the trap is not there"
    window = Events(fake)
    assert window.settled("k", block) / 50 == pytest.approx(1e-6)
    assert window.ahead_s >= 2 * 50 * 5e-6 and window.notes["k"].late[-1] is False


def test_a_window_that_the_host_fills_too_late_is_marked_and_kept(measured, monkeypatch):
    fake, forget = Replays(l2_bytes=L2), Events.forget

    def slow_from_here(events: Events) -> None:  # the rounds that count begin
        fake.launch_s = 1e-2
        forget(events)

    monkeypatch.setattr(Events, "forget", slow_from_here)
    for one in measured(1e-3, 1e-3, "hot", fake).providers.values():
        if one.samples_s:
            assert one.figures["LATE windows"] == 8 and len(one.samples_s) == 6, "two of the warm-up"


def test_a_block_is_no_longer_than_what_can_be_queued(measured):
    sizes = [one.figures["calls/sample"] for one in measured(3e-5, 3e-5, "hot").providers.values() if one.samples_s]
    assert max(sizes) <= MAX_QUEUED and min(sizes) > 1


def test_a_replay_that_writes_nothing_is_found_out(measured):
    with pytest.raises(WrongResultError, match="result 0 is off by nan"):
        measured(6e-6, 3e-6, "hot", FakeDevice(l2_bytes=L2))  # its replays launch, and compute nothing


# ---- sensors ------------------------------------------------------------------------------------------------------


class Nvml(SimpleNamespace):
    """pynvml for one card, whose readings are given; counts its calls."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    def __init__(self, reasons: int = 0, counts: bool = True) -> None:
        super().__init__(reasons=reasons, counts=counts, millijoules=0, started=0)

    def nvmlInit(self) -> None:
        self.started += 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetClockInfo(self, card: int, kind: int) -> int:
        return 1755

    def nvmlDeviceGetPowerUsage(self, card: int) -> int:
        return 612_000

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card: int) -> int:
        return self.reasons

    def nvmlDeviceGetTotalEnergyConsumption(self, card: int) -> int:
        if not self.counts:
            raise self.NVMLError("not supported")
        self.millijoules += 7000
        return self.millijoules


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Nvml]:
    def put(**how: Any) -> Nvml:
        fake = Nvml(**how)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: object())
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return put


@pytest.mark.parametrize("reasons, throttled", [(0, False), (0x1, False), (0x4, True), (0x40, True), (0x21, True)])
def test_clock_power_and_reasons_come_from_nvml(nvml, reasons, throttled):
    nvml(reasons=reasons)
    assert device.gpu_sensor()() == (1755.0, 612.0, throttled), "idle alone (0x1) is no throttling"


def test_energy_comes_from_nvml_where_the_card_counts_it(nvml):
    nvml()
    read = device.gpu_energy()
    first, second = read(), read()
    assert first is not None and second == first + 7.0
    nvml(counts=False)
    assert device.gpu_energy()() is None


def test_readings_reach_the_result_the_table_and_the_file(measured, nvml):
    nvml(reasons=0x4)
    fake = Replays(l2_bytes=L2)
    fake.counts = True
    fake.sensor = device.gpu_sensor()  # type: ignore[method-assign]
    ours = measured(1e-3, 1e-3, "hot", fake).providers["plait"]
    assert ours.clocks_mhz == [1755.0] * 6 and ours.watts == [612.0] * 6 and ours.throttled == list(range(6))
    assert ours.figures["THROTTLED samples"] == 6 and len(ours.samples_s) == 6
    assert ours.figures["energy J"] == pytest.approx(0.5, rel=0.1), "500 W for 1 ms"


def test_energy_is_counted_from_step_to_step_of_a_coarse_counter():
    fake = FakeDevice(launch_s=0.0)
    kernel = fake.kernel(1e-3)
    found = joules_per_call(fake, lambda: [kernel() for _ in range(3)], 3, least_s=0.2, most_s=5.0)
    assert found == pytest.approx(0.5, rel=0.1)
    assert joules_per_call(HostQueue(), lambda: None, 1, 0.1, 0.1) is None
    still = FakeDevice()
    still.joules = lambda: 1.0  # type: ignore[method-assign]
    assert joules_per_call(still, still.kernel(1e-3), 1, 0.1, 0.3) is None


# ---- torch.cuda ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cache", ["hot", "cold-rotate", "cold-flush"])
def test_a_card_is_timed_under_each_policy(cache):
    case = make_case("rms_norm", {"rows": 512, "cols": 1024}, "bfloat16", "cuda", False)
    result = suite_kernels.measure(case, dataclasses.replace(QUICK, cache=cache))
    assert result.cache == cache and "behind a spin" in result.note
    assert result.providers["plait"].figures["peak bytes"] > 0


def test_a_card_is_asked_through_torch_cuda(monkeypatch):
    """The wrapper alone, with torch.cuda's answers made up."""
    asked: list[tuple[str, Any]] = []
    now = iter(range(0, 10**6, 10))

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(now)

        def query(self) -> bool:
            return self.at > 100

        def elapsed_time(self, other: Event) -> float:
            return float(other.at - self.at)  # milliseconds

    for name, value in {
        "is_available": lambda: False,
        "get_device_properties": lambda index: SimpleNamespace(L2_cache_size=50 << 20),
        "synchronize": lambda: asked.append(("sync", None)),
        "_sleep": lambda cycles: asked.append(("sleep", cycles)),
        "Event": Event,
        "reset_peak_memory_stats": lambda: asked.append(("reset", None)),
        "memory_allocated": lambda: 100,
        "max_memory_allocated": lambda: 350,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    queue = queues.CudaQueue()
    assert queue.l2_bytes == 50 << 20 and queue.joules() is None
    begin, end = queue.mark(), queue.mark()
    assert queue.between(begin, end) == pytest.approx(0.01) and not queue.passed(begin)
    queue.spin(0.001)  # a million cycles took 10 ms
    assert [cycles for what, cycles in asked if what == "sleep"] == [queues.SPIN_CYCLES, 100_000]
    assert queue.peak_bytes(lambda: None) == 250.0 and ("reset", None) in asked


# ---- options ------------------------------------------------------------------------------------------------------


def test_the_policy_comes_from_the_command_line_or_toml(monkeypatch, tmp_path, capsys):
    ran: list[tuple[str, str]] = []

    def here(suite: Suite, options: Options, only: str, roof: Any) -> tuple[list[CaseResult], int]:
        ran.append((suite.name, options.cache))
        return [], 0

    monkeypatch.setattr(runner, "run_here", here)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "kernels", "launch", "--cache", "cold-flush"]) == 0
    assert ran == [("kernels", "cold-flush"), ("launch", "")]
    assert (
        cli.main(["run", "launch", "--cache", "hot"]) == 2 and "no choice of L2 policies" in capsys.readouterr().err
    )
    Path("pyproject.toml").write_text('[tool.plait.bench]\ncache = "cold-rotate"\n')
    assert cli.main(["run", "kernels"]) == 0 and ran[-1] == ("kernels", "cold-rotate")
    assert cli.main(["run", "kernels", "--cache", "hot"]) == 0 and ran[-1] == ("kernels", "hot")
    Path("pyproject.toml").write_text('[tool.plait.bench]\ncache = "warm"\n')
    with pytest.raises(ValueError, match="cache is 'warm'; valid: hot, cold-rotate, cold-flush"):
        settings.load(Path("pyproject.toml"), [], [])


def test_processes_of_a_run_are_told_the_policy(monkeypatch):
    said: list[list[str]] = []

    def child(command: list[str]) -> int:
        said.append(command)
        return 2

    monkeypatch.setattr(runner, "run_child", child)
    with pytest.raises(ValueError, match="process 0"):
        runner.run_processes(suite_kernels.SUITE, Options(cache="cold-rotate", providers=("torch",)), "")
    assert "--cache=cold-rotate" in said[0] and "--providers=torch" in said[0]
