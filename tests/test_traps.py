"""Wrong benchmarks that fooled people, each set for this harness: it refuses it, marks it, or gets the right answer.

One test per trap, named after it; TRAPS has them all, with where they come from. A trap is first shown to be there:
the naive way of measuring falls into it on the same device. Then the timer's defence, and what the suite `kernels`
itself makes of it on a simulated card (fake_card.py): a defence that nobody calls is none. Each was deleted once, and
its test failed. Nothing here asserts a time of this machine.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.bench import (
    aa,
    ceilings,
    device,
    gate_sides,
    kernel_problems,
    kernel_shapes,
    peaks,
    pytest_device,
    runner,
    suite_kernels,
    suite_launch,
)
from plait.bench.compare import IncomparableError, compare
from plait.bench.fake_device import FakeDevice, Noise
from plait.bench.kernel_blocks import asserted, timing_of
from plait.bench.kernel_jobs import Contender, Job, Rotation
from plait.bench.kernel_shapes import make_case
from plait.bench.problem import EPS, Maker, Params, Problem
from plait.bench.report import markdown
from plait.bench.result_file import ResultFile
from plait.bench.runner import measured as measured_case
from plait.bench.spec import Case, CaseResult, Measured, Options, Suite, WrongResultError
from plait.bench.stats import paired_ratio
from plait.bench.timer import (
    MIN_ROUNDS,
    REUSE,
    Condition,
    check_policy,
    copies_for,
    record,
    rounds_within,
    sampled,
    warm_up,
)
from plait.bench.verdict import Paired, Rule, Verdict, confirmed, decide
from plait.kernels import inspect, rms_norm_ref
from plait.kernels.gate import Rule as CodeRule
from plait.kernels.gate import judge
from plait.kernels.inspect import Facts
from tests.cases import needs_plain
from tests.fake_card import L2, Refuses, Replays, measure_on, medians

pytestmark = needs_plain
MIB = 1 << 20
H200 = {"gpus": [{"name": "NVIDIA H200"}]}
QUICK = Options(rounds=2, warmup=1)
# trap -> where it was seen
TRAPS = {
    "cold_clock": "triton-lang/triton#2306",
    "flush_inside_the_window_or_none": "triton#10149, #8384; tritonbench#519, #527",
    "faster_than_physics": "TileGym#82",
    "silently_warm": "flashinfer#4468",
    "fresh_inputs_are_warm": "DeepGEMM#68",
    "throttling": "flashinfer#2899, tritonbench#363",
    "all_samples_dropped": "nvbench#231",
    "stop_rule_never_met": "nvbench#61",
    "same_binary_called_fast_or_slow": "nvbench#316, #313, #415",
    "zeros_run_faster": "cutlass#2004, convnet-benchmarks#71",
    "replayed_results": "reference-kernels#162, #104",
    "persisting_l2_window": "llm.c#851",
    "no_sync": "cusignal#82, mlx-benchmark#21",
    "sync_per_call": "pytorch#75393",
    "autotune_on_live_outputs": "triton#9230, #5339, #781",
    "flush_in_a_hook": "facebookexperimental/triton#1679",
    "wrong_peak": "tritonbench#78, triton.testing",
    "baseline_from_another_machine": "pytest-benchmark#276, fast_mail_parser#128",
    "alert_fatigue": "react_on_rails#3168",
    "position_bias": "ifc-lite#4221",
    "unstable_machine_key": "folo#429",
    "spill_count_units": "intel-xpu#7976, triton#1756",
    "compile_failure_timed": "cubek#611",
}


def test_every_trap_has_its_test():
    names = {name.removeprefix("test_trap_") for name in globals() if name.startswith("test_trap_")}
    assert names == set(TRAPS)


def timed(
    device: FakeDevice, kernels: dict[str, Callable[[], object]], rounds: int = 20, **how: Any
) -> dict[str, Any]:
    """Seconds by provider, without warm-up."""
    options = Options(rounds=rounds, warmup=how.pop("warmup", 0), seed=how.pop("seed", 0))
    samples = sampled(kernels, options, sync=device.sync, clock=device.clock, **how)
    return {name: [one.seconds for one in values] for name, values in samples.items()}


def gpu_case(seconds: list[float], nbytes: float = 0.0, flop: float = 0.0, cache: str = "") -> CaseResult:
    case = Case("c", {"device": "cuda", "dtype": "bfloat16"}, flop=flop or None, bytes_moved=nbytes or None)
    return CaseResult(case, "ours", {"ours": Measured(seconds)}, cache=cache)


# ---- the device ---------------------------------------------------------------------------------------------------


def test_trap_cold_clock(monkeypatch):
    naive = FakeDevice(clock_start=0.7)
    assert timed(naive, {"k": naive.kernel(1e-3)}, rounds=5)["k"][0] > 1.3e-3, "the trap is not there"
    cold = FakeDevice(clock_start=0.7)
    kernel = cold.kernel(1e-3)
    warmth = warm_up(kernel, sync=cold.sync, clock=cold.clock, sensor=cold.sensor)
    assert warmth.steady and warmth.seconds > 0.05
    assert timed(cold, {"k": kernel}, rounds=5)["k"] == pytest.approx([1e-3] * 5, rel=0.02)
    # One that never settles ends at its bound, and says so.
    restless = FakeDevice(Noise(drift=0.2, span_s=0.05))
    warmth = warm_up(
        restless.kernel(1e-3), sync=restless.sync, clock=restless.clock, sensor=restless.sensor, most_s=0.5
    )
    assert not warmth.steady and 0.5 < warmth.seconds < 0.6
    # Times alone may be steady while the clock still rises, as of a kernel that waits for memory.
    rising = (min(1000.0, 700.0 + i) for i in range(10**6))
    steady = FakeDevice()
    warmth = warm_up(
        steady.kernel(1e-3), sync=steady.sync, clock=steady.clock, sensor=lambda: Condition(next(rising), 500.0)
    )
    assert warmth.steady and warmth.seconds > 0.2
    # The suite: cold when it comes, warm when it counts, and both are told.
    result = measure_on(monkeypatch, 1e-3, 1e-3, "hot", Replays(l2_bytes=L2, clock_start=0.7))
    for one in (result.providers["plait"], result.providers["torch"]):
        assert one.samples_s == pytest.approx([1e-3] * 6, rel=0.02)
        assert one.figures["steady"] == 1.0
    assert max(one.figures.get("warm-up s", 0.0) for one in result.providers.values()) > 0.05


def test_trap_flush_inside_the_window_or_none(monkeypatch):
    l2, nbytes = 50 * MIB, 10 * MIB
    naive = FakeDevice(l2_bytes=l2)
    kernel = naive.kernel(1e-3, nbytes=nbytes, hot_s=2e-4)
    assert timed(naive, {"k": kernel}, warmup=1)["k"] == pytest.approx([2e-4] * 20, rel=0.05), "none: warm"
    right = FakeDevice(l2_bytes=l2)
    kernel = right.kernel(1e-3, nbytes=nbytes, hot_s=2e-4)
    assert timed(right, {"k": kernel}, warmup=1, flush=right.flush)["k"] == pytest.approx([1e-3 + 5e-6] * 20)
    with pytest.raises(ValueError, match="cold-flush with 100 calls a sample: all but the first are warm"):
        check_policy("cold-flush", calls=100, nbytes=nbytes, copies=1, l2_bytes=l2)
    assert check_policy("cold-flush", calls=1, nbytes=nbytes, copies=1, l2_bytes=l2).startswith("cold-flush")
    for cache, wanted in (("hot", 4e-4), ("cold-flush", 1e-3)):
        assert medians(measure_on(monkeypatch, 1e-3, 4e-4, cache))["plait"] == pytest.approx(wanted), cache
    with pytest.raises(ValueError, match="needs the size of the device's cache"):  # which then cannot be emptied
        measure_on(monkeypatch, 1e-3, 4e-4, "cold-flush", Replays(l2_bytes=0))


def test_trap_faster_than_physics(monkeypatch):
    result = gpu_case([48 * MIB / 5.019e12] * 5, nbytes=48.0 * MIB)
    assert ceilings.mark_impossible(result, H200)
    assert "5019 GB/s, memory gives 4800" in result.providers["ours"].invalid
    right = gpu_case([48 * MIB / 4.85e12] * 5, nbytes=48.0 * MIB)
    assert not ceilings.mark_impossible(right, H200), "102 % of the ceiling"
    monkeypatch.setattr(runner, "fingerprint", lambda: H200)
    again = gpu_case([48 * MIB / 5.019e12] * 5, nbytes=48.0 * MIB)
    found, code = measured_case(Suite("s", "", lambda full: [], lambda case, options: again), again.case, QUICK)
    assert code == 4 and found.providers["ours"].invalid and "INVALID" in markdown([found])


@pytest.mark.parametrize("copies", [2, 4, 5])
def test_trap_silently_warm(copies, monkeypatch):
    l2, nbytes = 50 * MIB, 11 * MIB
    need = copies_for(nbytes, l2)
    assert (need - 1) * nbytes >= REUSE * l2 > (need - 2) * nbytes
    with pytest.raises(ValueError, match=f"{copies} copies of {nbytes} bytes touches .* x L2 .* take {need} copies"):
        check_policy("cold-rotate", calls=100, nbytes=nbytes, copies=copies, l2_bytes=l2)
    assert f"{need} copies, 4.2 x L2" in check_policy("cold-rotate", calls=9, nbytes=nbytes, copies=need, l2_bytes=l2)
    fake = FakeDevice(l2_bytes=l2)
    kernel = fake.kernel(1e-3, nbytes=nbytes, hot_s=2e-4, copies=need)
    assert timed(fake, {"k": kernel}, warmup=2 * need)["k"] == pytest.approx([1e-3 + 5e-6] * 20)
    # The suite makes the copies and takes them in turn; where a job has too few of them it refuses.
    assert medians(measure_on(monkeypatch, 1e-3, 4e-4, "cold-rotate"))["plait"] == pytest.approx(1e-3)

    def rotating(seconds: float) -> tuple[FakeDevice, Job]:
        fake = FakeDevice(l2_bytes=l2)
        kernel = fake.kernel(seconds, nbytes=nbytes, copies=copies)
        return fake, Job(
            lambda: None, list, {"k": Contender(lambda: (kernel(), ())[1])}, {}, nbytes, Rotation(copies)
        )

    for seconds in (1e-3, 6e-6):  # by events, and by a graph, whose replay knows no more copies than it captured
        fake, job = rotating(seconds)
        with pytest.raises(ValueError, match=f"cold-rotate with {copies} copies .* take {need} copies"):
            timing_of(fake, job, "cold-rotate")
    job.rotation = Rotation(need)
    timing = timing_of(fake, job, "cold-rotate")
    assert timing.method.startswith("graph") and timing.blocks["k"].size % need == 0
    timing.blocks["k"].size = copies
    with pytest.raises(ValueError, match=f"cold-rotate with {copies} copies of .* take {need} copies"):
        asserted(timing, job, "cold-rotate", graph=True)


def test_trap_fresh_inputs_are_warm():
    l2, nbytes = 50 * MIB, 10 * MIB
    fake, order = FakeDevice(l2_bytes=l2), []
    kernel = fake.kernel(1e-3, nbytes=nbytes, hot_s=2e-4)

    def build(name: str) -> None:  # writes the inputs, which leaves them in L2
        order.append("fresh")
        kernel()

    assert timed(fake, {"k": kernel}, fresh=build)["k"] == pytest.approx([2e-4 + 5e-6] * 20), "the trap is not there"
    order.clear()
    flush: Callable[[], object] = lambda: (order.append("flush"), fake.flush())  # noqa: E731
    assert timed(fake, {"k": kernel}, fresh=build, flush=flush)["k"] == pytest.approx([1e-3 + 5e-6] * 20)
    assert order == ["fresh", "flush"] * 20


def test_trap_throttling(monkeypatch):
    def kernels(fake: FakeDevice) -> dict[str, Callable[[], object]]:
        return {name: fake.kernel(1e-3) for name in ("first", "second")}

    naive = FakeDevice(throttle_after_s=0.05)
    blocks = [timed(naive, {name: kernel}, rounds=50)[name] for name, kernel in kernels(naive).items()]
    assert median(blocks[1]) / median(blocks[0]) > 1.2, "the trap is not there"
    fake = FakeDevice(throttle_after_s=0.05)
    samples = sampled(
        kernels(fake), Options(rounds=50, warmup=0), sync=fake.sync, clock=fake.clock, sensor=fake.sensor
    )
    seconds = {name: [one.seconds for one in values] for name, values in samples.items()}
    assert paired_ratio(seconds["first"], seconds["second"])[0] == pytest.approx(1.0, rel=1e-6)
    marked = Measured()
    record(marked, samples["first"])
    assert 0 < len(marked.throttled) < 50 and marked.figures["THROTTLED samples"] == len(marked.throttled)
    assert {marked.clocks_mhz[i] for i in marked.throttled} == {800.0} and max(marked.clocks_mhz) == 1000.0
    result = measure_on(monkeypatch, 1e-3, 1e-3, "hot", Replays(l2_bytes=L2, throttle_after_s=0.2), rounds=60)
    for one in (result.providers["plait"], result.providers["torch"]):
        burst = [s for i, s in enumerate(one.samples_s) if i not in one.throttled]
        assert one.throttled and burst == pytest.approx([1e-3] * len(burst)), "burst and steady state are told apart"
        assert [one.samples_s[i] for i in one.throttled] == pytest.approx([1.25e-3] * len(one.throttled), rel=0.2)
        assert len(one.clocks_mhz) == len(one.watts) == 60 == len(one.samples_s)
        assert {one.clocks_mhz[i] for i in one.throttled} == {800.0}


def test_trap_all_samples_dropped():
    fake = FakeDevice(throttle_after_s=0.0)
    samples = sampled({"k": fake.kernel(1e-3)}, QUICK, sync=fake.sync, clock=fake.clock, sensor=fake.sensor)["k"]
    marked = Measured()
    record(marked, samples)
    assert len(marked.samples_s) == 2 and marked.throttled == [0, 1]
    files = [
        ResultFile(name, "s", {}, {}, {"c": CaseResult(Case("c", {}), "ours", {"ours": marked})})
        for name in ("base", "head")
    ]
    (row,) = compare(*files, Rule()).rows
    assert "THROTTLED samples: 2 of base, 2 of head" in row.note


def test_trap_persisting_l2_window():
    nbytes = 40 * MIB
    fake = FakeDevice(persisting=True)
    kernel = fake.kernel(nbytes / 4e12, nbytes=nbytes, hot_s=nbytes / 8e12)
    seconds = timed(fake, {"k": lambda: [kernel() for _ in range(100)]}, rounds=5, warmup=1, flush=fake.flush)["k"]
    result = gpu_case([s / 100 for s in seconds], nbytes=float(nbytes))
    assert ceilings.mark_impossible(result, H200), "a flush does not reach it, and the ceiling does"
    assert "40 MiB sit in the L2" in result.providers["ours"].invalid


def test_trap_no_sync(monkeypatch):
    fake = FakeDevice()
    seconds = sampled({"k": fake.kernel(1.36e-3)}, Options(rounds=5, warmup=0), clock=fake.clock)["k"]
    result = gpu_case([one.seconds for one in seconds], flop=1e12)
    assert ceilings.mark_impossible(result, H200)
    assert "shorter than a launch, so the device was not waited for" in result.providers["ours"].invalid
    case = make_case("rms_norm", {"rows": 3, "cols": 16}, "float32", "cpu", False)
    assert suite_kernels.measure(case, QUICK).note.startswith("host_wall"), "host time is named so"
    fake = FakeDevice()
    assert timed(fake, {"k": fake.kernel(1.36e-3)})["k"] == pytest.approx([1.36e-3 + 5e-6] * 20), "the timer waits"
    assert medians(measure_on(monkeypatch, 1.36e-3, 1.36e-3, "hot"))["plait"] == pytest.approx(1.36e-3)
    calls: list[str] = []
    for name, value in (("is_available", True), ("is_initialized", True)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("sync"))
    pytest_device.synchronised()
    assert calls == ["sync"], "the fixture for pytest-benchmark waits too"


def test_trap_sync_per_call(monkeypatch):
    def ratio(calls: int) -> float:
        fake = FakeDevice(launch_s=1e-6)
        kernels = {name: fake.kernel(seconds) for name, seconds in (("a", 2e-6), ("b", 4e-6))}
        blocks = {name: (lambda kernel=kernel: [kernel() for _ in range(calls)]) for name, kernel in kernels.items()}
        seconds = timed(fake, blocks)
        return paired_ratio(seconds["a"], seconds["b"])[0]

    assert ratio(1) < 1.7 and ratio(1000) == pytest.approx(2.0, rel=1e-3)
    assert "empty op" in suite_launch.providers("rms_norm", False, "cpu"), "the empty launch is measured and shown"
    seconds = {"plait": 2e-6, "torch": 4e-6}  # shorter than a launch of 5 us
    for fake, how in ((Replays(l2_bytes=L2), "graph of calls"), (Refuses(l2_bytes=L2), "events behind a spin")):
        result = measure_on(monkeypatch, seconds, seconds, "hot", fake)
        assert how in result.note and "an empty window" in result.note
        found = {name: one for name, one in result.providers.items() if one.samples_s}
        assert all(one.figures["calls/sample"] > 10 for one in found.values())
        assert paired_ratio(found["plait"].samples_s, found["torch"].samples_s)[0] == pytest.approx(2.0, rel=0.02)
    host = suite_kernels.measure(make_case("rms_norm", {"rows": 3, "cols": 16}, "float32", "cpu", False), QUICK)
    assert host.providers["plait"].figures["calls/sample"] > 1


def test_trap_flush_in_a_hook():
    """A hook that flushes in front of one provider changes who wins; the timer's own flush is everybody's."""

    def winner(hook: bool, **how: Any) -> str:
        fake = FakeDevice(l2_bytes=50 * MIB)
        a = fake.kernel(9e-4, nbytes=10 * MIB, hot_s=2e-4)
        b = fake.kernel(8e-4, nbytes=10 * MIB, hot_s=3e-4)
        kernels = {"a": (lambda: (fake.flush(), a())) if hook else a, "b": b}
        flushes = [0]

        def flush() -> None:
            flushes[0] += 1
            fake.flush()

        seconds = timed(fake, kernels, warmup=2, **({"flush": flush} if how.get("flush") else {}))
        assert flushes[0] == (2 * 22 if how.get("flush") else 0), "once before each call, whoever is called"
        return min(seconds, key=lambda name: median(seconds[name]))

    assert winner(False) == "a" and winner(True) == "b", "the trap is not there"
    assert winner(False, flush=True) == "b", "both are cold, and neither pays for the flush"


def test_trap_wrong_peak():
    for card in peaks.CARDS:
        for peak in card.peaks.values():
            product = card.multiprocessors * peak.flop_per_clock * peak.clock_hz
            assert product == pytest.approx(peak.flop_per_s, rel=0.01), card.part
        assert card.source and card.read
    h100 = next(card for card in peaks.CARDS if card.part.startswith("H100 80GB"))
    assert h100.flop_per_s("bfloat16") == 989e12, "not the half of it, and not the sparse figure"


# ---- results ------------------------------------------------------------------------------------------------------


def norm_suite(
    monkeypatch: pytest.MonkeyPatch, peer: Callable[..., Any], inputs: Any = None, mine: Any = None
) -> CaseResult:
    """Measures rms_norm on tiny rows beside `peer`; mine: in place of ours."""

    def problem(p: Params, make: Maker) -> Problem:
        x, weight = inputs or (make.normal(p["rows"], p["cols"]), make.normal(p["cols"]))
        ours = lambda x, w: rms_norm_ref(x, w, EPS)  # noqa: E731
        return Problem((x, weight), ours, {"plait": mine or ours, "torch": ours, "peer": peer})

    monkeypatch.setitem(kernel_problems.PROBLEMS, "rms_norm", problem)
    return suite_kernels.measure(make_case("rms_norm", {"rows": 3, "cols": 16}, "float32", "cpu", False), QUICK)


def problem_inputs(case: Case) -> list[torch.Tensor]:
    """What a case's problem draws."""
    make = Maker(case.params, 0)
    if case.params["op"] == "adamw_":
        return [make.normal(1 << 16)]
    return list(kernel_problems.PROBLEMS[case.params["op"]](case.params, make).inputs)


def test_trap_zeros_run_faster(monkeypatch):
    right: Callable[..., Any] = lambda x, w: rms_norm_ref(x, w, EPS)  # noqa: E731
    with pytest.raises(ValueError, match="rms_norm: input 0 is constant"):
        norm_suite(monkeypatch, right, (torch.zeros(3, 16), torch.randn(16)))
    with pytest.raises(ValueError, match="rms_norm: input 1 is constant"):
        norm_suite(monkeypatch, right, (torch.randn(3, 16), torch.ones(16)))
    for case in kernel_shapes.cases(False, "cpu"):  # what is timed is normal
        for value in problem_inputs(case):
            if value.is_floating_point() and value.numel() > 1000:
                spread = (value.std() / value.abs().mean()).item()  # sqrt(pi / 2) of normal numbers, 1.155 of uniform
                assert value.unique().numel() > 0.9 * value.numel() and 1.2 < spread < 1.31
    assert norm_suite(monkeypatch, right).providers["peer"].samples_s


def test_trap_replayed_results(monkeypatch):
    kept: list[torch.Tensor] = []

    def replays(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:  # a cache by shape
        if not kept:
            kept.append(rms_norm_ref(x, w, EPS))
        return kept[0].clone()

    with pytest.raises(WrongResultError, match="peer: result 0 is off"):
        norm_suite(monkeypatch, replays)
    calls = [0]

    def skips(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:  # right while it is looked at, then nothing
        calls[0] += 1
        return rms_norm_ref(x, w, EPS) if calls[0] <= 2 else torch.zeros_like(x)

    with pytest.raises(WrongResultError, match="peer: result 0 is off"):
        norm_suite(monkeypatch, skips)
    calls[0] = 0

    def defers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:  # nothing while it is looked at, then right
        calls[0] += 1
        return torch.zeros_like(x) if calls[0] <= 2 else rms_norm_ref(x, w, EPS)

    with pytest.raises(WrongResultError, match="peer: result 0 is off"):
        norm_suite(monkeypatch, defers)

    class Empty(Replays):  # a graph that was captured without its work: its results stay those of the capture
        def capture(self, block: Callable[[], object]) -> Callable[[], object]:
            return FakeDevice.capture(self, block)

    with pytest.raises(WrongResultError, match="result 0 is off by nan"):
        measure_on(monkeypatch, 6e-6, 6e-6, "hot", Empty(l2_bytes=L2))
    assert medians(measure_on(monkeypatch, 6e-6, 6e-6, "hot"))["plait"] == pytest.approx(6e-6, rel=0.02)


def test_trap_autotune_on_live_outputs(monkeypatch):
    """The trial run wrote the right numbers, which mask that the winning configuration leaves a tail unwritten."""
    out, calls = torch.empty(3, 16), [0]

    def tuned(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        width = 16 if calls[0] == 1 else 12
        out[:, :width] = rms_norm_ref(x, w, EPS)[:, :width]
        return out

    with pytest.raises(WrongResultError, match="peer: result 0 is off by nan"):
        norm_suite(monkeypatch, tuned)


def test_trap_compile_failure_timed(monkeypatch):
    def fails(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("ptxas: out of registers")

    peer = norm_suite(monkeypatch, fails).providers["peer"]
    assert peer.skipped == "cannot run: ptxas: out of registers" and not peer.samples_s
    with pytest.raises(RuntimeError, match="out of registers"):  # ours is never skipped
        norm_suite(monkeypatch, lambda x, w: rms_norm_ref(x, w, EPS), mine=fails)

    def measure(case: Case, options: Options) -> CaseResult:
        raise RuntimeError("ours does not compile")

    result, code = measured_case(Suite("s", "", lambda full: [], measure), Case("c", {}), QUICK)
    assert code == 1 and result.error.endswith("ours does not compile") and not result.providers


# ---- statistics and the job ---------------------------------------------------------------------------------------


def test_trap_stop_rule_never_met(monkeypatch):
    """Rounds are counted beforehand, and shrink to the budget: no spread, however wide, makes a suite endless."""
    assert rounds_within(10.0, 0.0, 1.0, Options(rounds=10**6)).rounds <= 10
    fake = FakeDevice(Noise(iid=0.5))
    assert len(timed(fake, {"k": fake.kernel(5e-5)}, rounds=30)["k"]) == 30
    case = make_case("rms_norm", {"rows": 3, "cols": 16}, "float32", "cpu", False)
    result = suite_kernels.measure(case, Options(rounds=1000, warmup=1, budget_s=1e-6))
    assert len(result.providers["plait"].samples_s) == MIN_ROUNDS, "the suite itself ends at its budget"
    restless = Replays(Noise(drift=0.5, span_s=0.05), l2_bytes=L2)
    assert measure_on(monkeypatch, 1e-3, 1e-3, "hot", restless).providers["plait"].figures["steady"] == 0.0


def test_trap_same_binary_called_fast_or_slow():
    trials = dict(suites=60, cases=1, processes=5, seed=7, rounds=10)  # one case: no correction helps it
    for tally in aa.fake_trials(Rule(), **trials):
        assert tally.first_false <= 1 and tally.false_cases == 0 and sum(tally.verdicts.values()) == tally.cases == 60
        assert not tally.too_many(Rule()) and "<" in tally.row()[-1]
    # A rule that calls everything different is found out by the rate that the tool publishes of itself.
    bare = Rule(alpha=0.4, bound=1e-9, floor_s=0.0)
    for tally in aa.fake_trials(bare, **trials):
        assert tally.first_false > 20 and tally.first_false > tally.false_suites == tally.false_cases > 5
        assert tally.too_many(Rule()) and f"{tally.false_cases / 60:.3%}" in tally.row()[-1]


def test_trap_baseline_from_another_machine(monkeypatch):
    def file(machine: dict[str, Any], seconds: float) -> ResultFile:
        case = CaseResult(Case("c", {}), "ours", {"ours": Measured([seconds] * 5)})
        return ResultFile("f", "s", machine, {}, {"c": case})

    def card(**facts: str) -> dict[str, Any]:
        return {"cpu": "c", "gpus": [{"name": "NVIDIA H200", "power_limit": "700.00", **facts}]}

    for other in ({"power_limit": "500.00"}, {"driver_version": "580"}, {"name": "NVIDIA H100"}):
        with pytest.raises(IncomparableError, match=f"machines differ: gpus .*{next(iter(other.values()))}"):
            compare(file(card(), 1.0), file(card(**other), 1.26), Rule())
    assert compare(file(card(), 1.0), file(card(), 1.26), Rule()).rows[0].decision, "equal ones are compared"
    # And a gate measures both sides in one job, beside each other: a machine that slows down blames neither.
    slower = itertools.count()

    def result_of(tree: gate_sides.Tree, args: list[str], folder: Path) -> ResultFile:
        return file({}, 1e-3 * 1.05 ** next(slower))

    monkeypatch.setattr(gate_sides, "result_of", result_of)
    sides = (gate_sides.Tree(Path("base")), gate_sides.Tree(Path("head")))
    found, verdicts = gate_sides.Timed(*sides, "s", 8, 5, 1, "", False).findings(Rule())
    assert next(slower) >= 16 and verdicts == {Verdict.INCONCLUSIVE} and not any(one.failed for one in found)


def test_trap_alert_fatigue():
    """A first run that cries wolf is measured again; where it does not come again nothing fails."""
    wolf, calm = Paired("c", (1.05,) * 5, 1e-3), Paired("c", (1.0, 0.999, 1.001, 1.0, 1.002), 1e-3)
    assert decide([wolf], Rule())[0].verdict == Verdict.SLOWER
    runs = iter([[wolf], [calm]])
    (decision,) = confirmed(lambda names: next(runs), ["c"], Rule())[1]
    assert decision.verdict == Verdict.INCONCLUSIVE and "confirming run alone" in decision.reason
    runs = iter([[wolf], [wolf]])
    assert confirmed(lambda names: next(runs), ["c"], Rule())[1][0].verdict == Verdict.SLOWER, "a wolf that is there"


def test_trap_position_bias():
    """Whoever is second in a round takes 23 % longer; the thing is beside itself."""

    def ratio(seed: int, shuffled: bool) -> float:
        fake, place = FakeDevice(Noise(iid=0.003), seed), [0]

        def kernel() -> None:
            fake.enqueue(1e-3 * (1.23 if place[0] % 2 else 1.0))
            place[0] += 1

        if shuffled:
            seconds = timed(fake, {"a": kernel, "b": kernel}, rounds=20, seed=seed)
            return median(seconds["b"]) / median(seconds["a"])
        times = [timed(fake, {"x": kernel}, rounds=1)["x"][0] for _ in range(40)]
        return median(times[1::2]) / median(times[::2])

    assert ratio(1, False) == pytest.approx(1.23, rel=0.01), "the trap is not there"
    draw = random.Random(23)
    for _ in range(20):
        ratios = tuple(ratio(draw.getrandbits(30), True) for _ in range(5))
        assert decide([Paired("c", ratios, 1e-3)], Rule())[0].verdict not in (Verdict.SLOWER, Verdict.FASTER)


def test_trap_unstable_machine_key():
    first, again = device.fingerprint(), device.fingerprint()
    assert first == again and {"ptxas", "governor", "cpu", "cores", "torch", "triton"} <= set(first)
    told = device.parse_cards("580.95.05, 700.00, 1980, 143771\n580.95.05, 700.00, 1980, 143771\n")
    assert told[0] == told[1] == {
        "driver_version": "580.95.05", "power_limit": "700.00", "clocks_max_sm": "1980", "memory_total": "143771"
    }  # fmt: skip
    assert not any(
        word in fact for fact in device.CARD_FACTS for word in ("draw", "temperature", "clocks.sm", "used")
    )


def test_trap_spill_count_units(monkeypatch):
    """A stack frame is no spill, and both are read from the machine code, one instruction each."""
    facts = Facts("k", "sm_90", 64, 0, 0, 0, 0, 4, {"LDG.E.128": 1})
    rule = CodeRule(min_warps=4)
    assert judge(facts, rule) == []
    assert judge(facts._replace(stack_bytes=16), rule) == ["spills: 0 loads, 0 stores, 16 bytes of stack"]
    assert judge(facts._replace(spill_loads=3, spill_stores=2), rule)[0].startswith("spills: 3 loads, 2 stores")
    lines = ["STL.64 [R1], R4", "STL [R1+0x8], R4", "LDL.64 R4, [R1]", "LDG.E.128 R4, [R2.64]", "EXIT"]
    text = "\n".join(f"        /*{16 * place:04x}*/                   {line} ;" for place, line in enumerate(lines))
    compiled = SimpleNamespace(asm={"cubin": b""}, metadata=SimpleNamespace(shared=0, num_warps=4))
    for name, value in {
        "compile_launch": lambda launch, arch: compiled,
        "_machine_code": lambda cubin: ("REG:64 STACK:24 SHARED:0 LOCAL:0", text),
        "remembered": lambda name, parts, make: make(),
    }.items():
        monkeypatch.setattr(inspect, name, value)
    monkeypatch.setattr(inspect.pinned_code, "code_hash", lambda cubin: "")
    launch: Any = SimpleNamespace(kernel=SimpleNamespace(__name__="k"), num_warps=4)
    read = inspect.compile_offline(launch, "sm_90")
    assert (read.spill_loads, read.spill_stores, read.stack_bytes) == (1, 2, 24), "instructions, instructions, bytes"
