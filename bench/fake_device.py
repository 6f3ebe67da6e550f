"""A GPU that is not there: a simulated clock with the ways in which real ones mislead a benchmark. Runs no kernel.

It has a host clock and a queue: a launch costs the host launch_s and returns; the kernel begins when the one before
it is done; sync() waits for the queue (it is a Queue of queues.py). How long a kernel takes depends on the noise, the
SM clock (cold, drifting, in one of two states, throttled), on whether its data still sits in L2, and on the process.
Everything follows from the seed, so a test of the timer, of a verdict or of a report sees the same numbers on every
machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from plait.bench.timer import Condition


@dataclass(frozen=True)
class Noise:
    """How far times stray, as shares of the time; all zero: an ideal device.

    iid: standard deviation of each call. outliers: share of calls that take up to 50 % longer. drift: amplitude of a
    slow swing of the clock; ramp: how much slower after span_s. states: distance of two clock states, switched at
    random about ten times in span_s. process: standard deviation of each kernel's own factor in this process, as
    memory layout gives it. span_s: about the time that a process measures.
    """

    iid: float = 0.0
    outliers: float = 0.0
    drift: float = 0.0
    ramp: float = 0.0
    states: float = 0.0
    process: float = 0.0
    span_s: float = 0.05


# The models that a verdict must stand; each has the 0.6 % of every call.
NOISE_MODELS = {
    "iid": Noise(iid=0.006, outliers=0.02),
    "drift": Noise(iid=0.006, drift=0.02, ramp=0.015),
    "clock states": Noise(iid=0.006, states=0.04),
    "process": Noise(iid=0.006, process=0.012),
}
SWITCHES = 10  # of the clock state in span_s
WATTS = 500.0  # while a kernel runs
COUNTED_S = 0.02  # of busy time between two steps of the energy counter
COLD_CLOCK_S = 0.025  # busy time after which a cold clock has made up 63 % of what it lacks


@dataclass
class Buffer:
    """What a kernel reads and writes. touched_at: how many bytes the device had touched when this was last in use."""

    nbytes: int
    touched_at: float = -math.inf


class FakeDevice:
    """One process's view of the device. Times in seconds, sizes in bytes.

    clock_start: SM clock at first, 1 when warm. throttle_after_s: busy time after which the clock falls to
    throttled_clock until as much idle time has passed. slow: factor on every kernel of this process. persisting: a
    window of L2 that a flush does not reach, left by another kernel.
    """

    def __init__(
        self,
        noise: Noise | None = None,
        seed: int = 0,
        *,
        launch_s: float = 5e-6,
        l2_bytes: int = 50 << 20,
        clock_start: float = 1.0,
        throttle_after_s: float = math.inf,
        throttled_clock: float = 0.8,
        slow: float = 1.0,
        persisting: bool = False,
    ) -> None:
        self.noise, self.random = noise or Noise(), random.Random(seed)
        self.launch_s, self.l2_bytes, self.slow, self.persisting = launch_s, l2_bytes, slow, persisting
        self.clock_start, self.throttle_after_s, self.throttled_clock = clock_start, throttle_after_s, throttled_clock
        self.now_s = 0.0  # host
        self.done_s = 0.0  # device: when the queue is empty
        self.busy_s = self.heat_s = 0.0
        self.bytes_touched = 0.0
        self.high_state = False
        self.switch_at_s = 0.0
        self.phase = self.random.uniform(0, 2 * math.pi)
        self.throttled: list[bool] = []  # of every kernel so far
        self.captured: list[Callable[[], None]] | None = None  # launches that a graph records
        self.replaying = False

    def clock(self) -> float:
        """Returns the host's time."""
        return self.now_s

    def sync(self) -> None:
        """Waits for the queue."""
        self.now_s = max(self.now_s, self.done_s)

    def sensor(self) -> Condition:
        """What a card's own sensors say after the last kernel: a warm, quiet SM clock is 1000 MHz."""
        throttled = bool(self.throttled and self.throttled[-1])
        return Condition(1000.0 * self.clock_rate(self.done_s, throttled), WATTS, throttled)

    def joules(self) -> float | None:
        """A counter that moves in steps, as a card's does."""
        return WATTS * COUNTED_S * math.floor(self.busy_s / COUNTED_S)

    def spin(self, seconds: float) -> None:
        """Keeps the device busy without memory, noise or heat."""
        self.now_s += self.launch_s
        self.done_s = max(self.now_s, self.done_s) + seconds

    def mark(self) -> float:
        """When the device will have done all that is queued now."""
        return max(self.now_s, self.done_s)

    def passed(self, mark: float) -> bool:
        return self.now_s >= mark

    def between(self, begin: float, end: float) -> float:
        return end - begin

    def peak_bytes(self, call: Callable[[], object]) -> float | None:
        """It has no memory."""
        return None

    def capture(self, block: Callable[[], object]) -> Callable[[], object]:
        """Records the block's launches, which do not run; the replay is one launch for all."""
        launches: list[Callable[[], None]] = []
        self.captured = launches
        try:
            block()
        finally:
            self.captured = None

        def replay() -> None:
            self.now_s += self.launch_s
            self.replaying = True
            for launch in launches:
                launch()
            self.replaying = False

        return replay

    def idle(self, seconds: float) -> None:
        """Lets the host sleep, and the device cool."""
        self.now_s += seconds

    def flush(self) -> None:
        """Overwrites all of L2 on the device, at 4 TB/s; of a persisting window nothing is lost."""
        self.bytes_touched += 0 if self.persisting else self.l2_bytes
        self.enqueue(self.l2_bytes / 4e12)

    def kernel(
        self,
        seconds: float,
        *,
        nbytes: int = 0,
        hot_s: float | None = None,
        copies: int = 1,
        data: list[Buffer] | None = None,
        turn: Callable[[], int] | None = None,
    ) -> Callable[[], None]:
        """Returns a kernel: calling it launches it. hot_s: its time when all its nbytes are in L2; copies: of its
        data, used in turn; or `data`, which other kernels may use too, and `turn`, which says whose turn it is."""
        factor = math.exp(self.random.gauss(0.0, self.noise.process)) if self.noise.process else 1.0
        buffers, calls = data or [Buffer(nbytes) for _ in range(copies)], 0

        def launch() -> None:
            nonlocal calls
            buffer = buffers[turn() if turn else calls % copies]
            calls += 1
            if self.captured is not None:  # a graph keeps the addresses that it was captured with
                self.captured.append(lambda: use(buffer))
            else:
                use(buffer)

        def use(buffer: Buffer) -> None:
            hot = hot_s is not None and self.bytes_touched - buffer.touched_at + nbytes <= self.l2_bytes
            self.bytes_touched += nbytes
            buffer.touched_at = self.bytes_touched
            self.enqueue(factor * (hot_s if hot and hot_s is not None else seconds))

        return launch

    def enqueue(self, ideal_s: float) -> None:
        """Launches a kernel that takes ideal_s on a warm, quiet device."""
        self.now_s += 0.0 if self.replaying else self.launch_s
        begin = max(self.now_s, self.done_s)
        self.heat_s = max(0.0, self.heat_s - (begin - self.done_s))
        throttled = self.heat_s > self.throttle_after_s
        seconds = ideal_s * self.slow * self.stray() / self.clock_rate(begin, throttled)
        self.throttled.append(throttled)
        self.busy_s += seconds
        self.heat_s += seconds
        self.done_s = begin + seconds

    def stray(self) -> float:
        """The factor of one call's own noise."""
        factor = 1.0 + self.random.gauss(0.0, self.noise.iid) if self.noise.iid else 1.0
        if self.noise.outliers and self.random.random() < self.noise.outliers:
            factor *= 1.0 + self.random.uniform(0.0, 0.5)
        return factor

    def clock_rate(self, at_s: float, throttled: bool) -> float:
        """The SM clock as a share of the warm, quiet one."""
        noise, rate = self.noise, 1.0
        if noise.drift or noise.ramp:
            turns = at_s / noise.span_s
            rate /= 1.0 + noise.drift * math.sin(2 * math.pi * turns + self.phase) + noise.ramp * turns
        if noise.states:
            while at_s >= self.switch_at_s:
                self.high_state = self.random.random() < 0.5 if self.switch_at_s == 0.0 else not self.high_state
                self.switch_at_s += self.random.expovariate(SWITCHES / noise.span_s)
            rate *= 1.0 if self.high_state else 1.0 - noise.states
        if self.clock_start != 1.0:
            rate *= 1.0 - (1.0 - self.clock_start) * math.exp(-self.busy_s / COLD_CLOCK_S)
        return rate * (self.throttled_clock if throttled else 1.0)
