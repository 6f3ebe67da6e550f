"""The fake device, and what the timer makes of it: each way to mislead a benchmark is here, seen or defused."""

from __future__ import annotations

import random
from statistics import median

import pytest

from plait.bench.aa import fake_process
from plait.bench.fake_device import NOISE_MODELS, FakeDevice, Noise
from plait.bench.spec import Options
from plait.bench.stats import paired_ratio
from plait.bench.timer import interleave
from plait.bench.verdict import Paired, Rule, Verdict, decide

MIB = 1 << 20
LAUNCH_S = 5e-6


def timed(device: FakeDevice, kernels, rounds: int = 20, warmup: int = 0, seed: int = 0) -> dict[str, list[float]]:
    return interleave(kernels, Options(rounds=rounds, warmup=warmup, seed=seed), sync=device.sync, clock=device.clock)


def test_an_ideal_device_gives_launch_and_kernel_time_to_the_digit():
    device = FakeDevice()
    samples = timed(device, {"k": device.kernel(1e-3)})["k"]
    assert samples == pytest.approx([1e-3 + LAUNCH_S] * 20)


def test_a_timer_without_sync_sees_the_launch_alone():
    device = FakeDevice()
    samples = interleave({"k": device.kernel(1e-3)}, Options(rounds=5, warmup=0), clock=device.clock)
    assert samples["k"] == pytest.approx([LAUNCH_S] * 5)


def test_launch_cost_drowns_the_difference_of_short_kernels():
    device = FakeDevice()
    samples = timed(device, {"a": device.kernel(1e-6), "b": device.kernel(2e-6)})
    assert paired_ratio(samples["a"], samples["b"])[0] == pytest.approx(7 / 6)

    def block(kernel):  # many calls behind each other hide all launches but the first where kernels are longer
        return lambda: [kernel() for _ in range(1000)]

    device = FakeDevice(launch_s=1e-7)
    samples = timed(device, {"a": block(device.kernel(1e-6)), "b": block(device.kernel(2e-6))})
    assert paired_ratio(samples["a"], samples["b"])[0] == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("model", NOISE_MODELS)
def test_the_same_seed_gives_the_same_samples_and_another_does_not(model):
    ratios = [fake_process(NOISE_MODELS[model], seed) for seed in (1, 1, 2)]
    assert ratios[0] == ratios[1] != ratios[2]


@pytest.mark.parametrize("copies, hot", [(1, True), (4, True), (5, False), (8, False)])
def test_rotating_copies_are_cold_only_when_they_exceed_l2(copies, hot):
    """ "cold" with too few copies is silently warm."""
    device = FakeDevice(l2_bytes=50 * MIB)
    samples = timed(device, {"k": device.kernel(1e-3, nbytes=11 * MIB, hot_s=2e-4, copies=copies)}, warmup=8)["k"]
    assert samples == pytest.approx([(2e-4 if hot else 1e-3) + LAUNCH_S] * 20)


def test_a_flush_before_each_call_makes_it_cold_and_is_not_timed():
    device = FakeDevice()
    kernel = device.kernel(1e-3, nbytes=10 * MIB, hot_s=2e-4)

    def sync() -> None:
        device.sync()
        device.flush()
        device.sync()

    def sync_only_before():  # the timer calls it before and after the call: flush outside the window only
        turn = iter(range(10**6))
        return lambda: sync() if next(turn) % 2 == 0 else device.sync()

    samples = interleave({"k": kernel}, Options(rounds=5, warmup=1), sync=sync_only_before(), clock=device.clock)["k"]
    assert samples == pytest.approx([1e-3 + LAUNCH_S] * 5)


def test_a_kernel_with_other_data_evicts():
    device = FakeDevice(l2_bytes=50 * MIB)
    samples = timed(
        device,
        {"k": device.kernel(1e-3, nbytes=20 * MIB, hot_s=2e-4), "other": device.kernel(1e-3, nbytes=40 * MIB)},
    )
    # hot only where the order of two rounds puts both calls of k beside each other
    assert {round(s - LAUNCH_S, 7) for s in samples["k"]} == {1e-3, 2e-4}


def test_a_cold_clock_is_gone_after_warm_up_and_never_in_the_ratio():
    device = FakeDevice(clock_start=0.7)
    samples = timed(device, {"a": device.kernel(1e-3), "b": device.kernel(1e-3)}, rounds=100)
    assert samples["a"][0] > 1.3e-3 and median(samples["a"][-10:]) == pytest.approx(1e-3 + LAUNCH_S, rel=0.02)
    assert paired_ratio(samples["a"], samples["b"])[0] == pytest.approx(1.0, rel=0.01)


def test_throttling_hits_the_later_provider_back_to_back_and_nobody_interleaved():
    device = FakeDevice(throttle_after_s=0.05)
    blocks = {}
    for name in ("first", "second"):
        blocks[name] = timed(device, {name: device.kernel(1e-3)}, rounds=50)[name]
    assert median(blocks["second"]) / median(blocks["first"]) > 1.2, "the trap is not there"
    device = FakeDevice(throttle_after_s=0.05)
    samples = timed(device, {"first": device.kernel(1e-3), "second": device.kernel(1e-3)}, rounds=50)
    assert paired_ratio(samples["first"], samples["second"])[0] == pytest.approx(1.0, rel=1e-6)
    assert any(device.throttled) and not all(device.throttled)
    assert len(samples["first"]) == 50, "throttled samples are kept"


def test_a_throttled_device_recovers_when_it_rests():
    device = FakeDevice(throttle_after_s=0.01)
    kernel = device.kernel(1e-3)
    for _ in range(20):
        kernel()
    device.sync()
    assert device.throttled[-1]
    device.idle(1.0)
    kernel()
    assert not device.throttled[-1]


def test_drift_and_clock_states_spread_the_times_and_not_the_ratio():
    for model, least in (("drift", 1.02), ("clock states", 1.03)):
        device = FakeDevice(NOISE_MODELS[model], seed=4)
        samples = timed(device, {"a": device.kernel(1e-3), "b": device.kernel(1e-3)}, rounds=40)
        spread = sorted(samples["a"])
        assert spread[-4] / spread[3] > least
        assert paired_ratio(samples["a"], samples["b"])[0] == pytest.approx(1.0, abs=0.01)


def test_a_slow_process_changes_times_and_no_verdict():
    base, ratios = [], []
    for seed in range(5):
        device = FakeDevice(Noise(iid=0.003), seed, slow=1.5 if seed == 2 else 1.0)
        samples = timed(device, {"base": device.kernel(1e-3), "head": device.kernel(1e-3)}, seed=seed)
        base.append(median(samples["base"]))
        ratios.append(paired_ratio(samples["base"], samples["head"])[0])
    assert base[2] > 1.4 * base[0]
    assert decide([Paired("c", tuple(ratios), 1e-3)], Rule())[0].verdict == Verdict.SAME


def test_one_process_with_a_slow_head_is_no_regression():
    draw = random.Random(7)
    ratios = [fake_process(NOISE_MODELS["iid"], draw.getrandbits(30), 1.3 if i == 3 else 1.0) for i in range(5)]
    assert decide([Paired("c", tuple(ratios), 1e-3)], Rule())[0].verdict == Verdict.INCONCLUSIVE


def test_samples_of_one_process_are_not_processes():
    """Twenty rounds of one process with an unlucky layout look certain, and say nothing."""
    device = FakeDevice(Noise(iid=0.002, process=0.05), seed=11)
    samples = timed(device, {"base": device.kernel(1e-3), "head": device.kernel(1e-3)})
    ratio, low, high = paired_ratio(samples["base"], samples["head"])
    assert not low <= 1.0 <= high, "the trap is not there"
    assert decide([Paired("c", (ratio,), 1e-3)], Rule())[0].verdict == Verdict.INCONCLUSIVE
