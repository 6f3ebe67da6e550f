"""Times callables side by side: a round calls every provider once, in an order drawn anew for each round.

Host wall clock with a synchronising call around the timed one: right for CPU work and for whole training steps; or
a window of the caller's own, such as a device's (windows.py).
Samples are never dropped: one that was taken while the device throttled is marked. The order comes from the seed, so
that all ranks of a distributed case walk the same one. What lies in L2 is decided here and nowhere else: inputs are
made, then the cache is flushed, then the clock starts; a policy that cannot be kept is refused.
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from plait.bench.spec import Measured, Options

REUSE = 4  # L2 sizes of other bytes between two uses of a copy, at least: what makes it cold
MIN_ROUNDS = 5  # below them an interval of the median says nothing
POLICIES = ("hot", "cold-rotate", "cold-flush")


class Condition(NamedTuple):
    """The device beside a sample; 0 where it is not known."""

    clock_mhz: float = 0.0
    watts: float = 0.0
    throttled: bool = False


class Sample(NamedTuple):
    """One timed call."""

    seconds: float
    condition: Condition


def unknown() -> Condition:
    """Of a device that tells nothing."""
    return Condition()


def sampled(
    providers: dict[str, Callable[[], object]],
    options: Options,
    *,
    sync: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int], None] = lambda done, total: None,
    fresh: Callable[[str], object] = lambda name: None,
    flush: Callable[[], object] = lambda: None,
    sensor: Callable[[], Condition] = unknown,
    window: Callable[[str, Callable[[], object]], float] | None = None,
) -> dict[str, list[Sample]]:
    """Returns every counted call, per provider, one per round.

    Before each call fresh(name) makes its inputs, then flush() empties the cache; neither is timed. sync is called
    before the clock starts and before it stops (a device synchronisation, or a barrier over ranks); sensor reads the
    device after it. window(name, call) runs the call and returns its seconds, where the clock does not.
    progress(done, total) is called after each round. Raises ValueError for no provider or less than one round.
    """
    if not providers:
        raise ValueError("providers: empty; nothing to time")
    if options.rounds < 1 or options.warmup < 0:
        raise ValueError(f"options: rounds={options.rounds}, warmup={options.warmup}; need rounds >= 1, warmup >= 0")

    def by_clock(name: str, call: Callable[[], object]) -> float:
        start = clock()
        call()
        sync()
        return clock() - start

    order = random.Random(options.seed)
    names = list(providers)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    total = options.warmup + options.rounds
    for round_index in range(total):
        order.shuffle(names)
        for name in names:
            fresh(name)
            flush()
            sync()
            elapsed = (window or by_clock)(name, providers[name])
            if round_index >= options.warmup:
                samples[name].append(Sample(elapsed, sensor()))
        progress(round_index + 1, total)
    return samples


def rounds_within(budget_s: float, spent_s: float, round_s: float, options: Options) -> Options:
    """The options with the rounds that fit into what is left of a budget (0: no limit), MIN_ROUNDS at least."""
    if not budget_s:
        return options
    fitting = int((budget_s - spent_s) / round_s) - options.warmup
    rounds = max(min(MIN_ROUNDS, options.rounds), min(options.rounds, fitting))
    return dataclasses.replace(options, rounds=rounds)


def interleave(
    providers: dict[str, Callable[[], object]],
    options: Options,
    *,
    sync: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, list[float]]:
    """Returns the seconds of `sampled` alone."""
    samples = sampled(providers, options, sync=sync, clock=clock, progress=progress)
    return {name: [one.seconds for one in values] for name, values in samples.items()}


def record(measured: Measured, samples: list[Sample], calls: int = 1) -> None:
    """Puts samples of `calls` calls each into a provider's result, with the conditions that are known."""
    measured.samples_s = [one.seconds / calls for one in samples]
    measured.throttled = [index for index, one in enumerate(samples) if one.condition.throttled]
    if any(one.condition.clock_mhz for one in samples):
        measured.clocks_mhz = [one.condition.clock_mhz for one in samples]
    if any(one.condition.watts for one in samples):
        measured.watts = [one.condition.watts for one in samples]
    if measured.throttled:
        measured.figures["THROTTLED samples"] = float(len(measured.throttled))


@dataclass(frozen=True)
class Warmth:
    """How a warm-up ended: after so many seconds, and whether clock and time had become steady."""

    seconds: float
    steady: bool


def warm_up(
    call: Callable[[], object],
    *,
    sync: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    sensor: Callable[[], Condition] = unknown,
    window: int = 20,
    tolerance: float = 0.005,
    most_s: float = 1.0,
    most_calls: int = 10_000,
) -> Warmth:
    """Calls until the median of a window of calls, and the device's clock, stay within the tolerance of the window
    before; at most `most_s` seconds or `most_calls` calls, whichever is first."""
    begin, times, clocks = clock(), [], []
    while True:
        sync()
        start = clock()
        call()
        sync()
        times.append(clock() - start)
        clocks.append(sensor().clock_mhz)
        if len(times) >= 2 * window and len(times) % window == 0:
            pairs = [(values[-2 * window : -window], values[-window:]) for values in (times, clocks)]
            if all(abs(median(new) - median(old)) <= tolerance * median(old) for old, new in pairs):
                return Warmth(clock() - begin, True)
        if clock() - begin > most_s or len(times) >= most_calls:
            return Warmth(clock() - begin, False)


def copies_for(nbytes: float, l2_bytes: int) -> int:
    """How many copies of `nbytes` of data must be used in turn, so that REUSE x L2 is touched between two uses."""
    if nbytes <= 0 or l2_bytes < 0:
        raise ValueError(f"nbytes: {nbytes:g}, l2_bytes: {l2_bytes}; need nbytes > 0, l2_bytes >= 0")
    return 1 + math.ceil(REUSE * l2_bytes / nbytes)


def check_policy(policy: str, *, calls: int, nbytes: float, copies: int, l2_bytes: int) -> str:
    """Returns the policy in words for the table; ValueError where this timing cannot keep it.

    calls: in one sample; nbytes: that a call touches; copies: of its data, used in turn.
    """
    if policy not in POLICIES:
        raise ValueError(f"cache: {policy!r} is unknown; valid: {', '.join(POLICIES)}")
    if policy == "cold-flush" and calls != 1:
        raise ValueError(
            f"cache: cold-flush with {calls} calls a sample: all but the first are warm; take cold-rotate"
        )
    between = nbytes * (copies - 1)
    reuse = f"{between / max(l2_bytes, 1):.1f} x L2 between two uses"
    if policy == "cold-rotate" and between < REUSE * l2_bytes:
        raise ValueError(
            f"cache: cold-rotate with {copies} copies of {nbytes:.0f} bytes touches {reuse}, not {REUSE} x;"
            f" take {copies_for(nbytes, l2_bytes)} copies"
        )
    if policy == "cold-rotate":
        return f"cold-rotate: {copies} copies, {reuse}"
    return "cold-flush: L2 overwritten before every call" if policy == "cold-flush" else "hot: data of the last call"
