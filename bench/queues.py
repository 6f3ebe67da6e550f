"""A device as the timer sees it: a queue with marks, an L2 to be emptied, sensors. Times and decides nothing.

Three of them: a card by torch.cuda, this host, which has no queue, and the simulated one (fake_device.py), by which
all that is built on a queue is tested without a card.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.bench.device import gpu_energy, gpu_sensor
from plait.bench.timer import Condition

CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
SPIN_CYCLES = 1_000_000  # by which the length of a cycle is measured, once


class Queue(Protocol):
    """Times in seconds. `spin` keeps the device busy that long without touching memory, so that what is launched
    behind it waits in the queue; `mark` is a place in the queue, `passed` whether the device is beyond it, `between`
    the device's own time from one mark to another; `capture` records what a block launches and returns its replay,
    one launch for all; `flush` overwrites the L2; `joules` is a counter of energy; `peak_bytes` is the most memory
    that a call held at one time, net of what was live before. None: nobody counts."""

    l2_bytes: int

    def clock(self) -> float: ...
    def sync(self) -> None: ...
    def sensor(self) -> Condition: ...
    def joules(self) -> float | None: ...
    def flush(self) -> None: ...
    def spin(self, seconds: float) -> None: ...
    def mark(self) -> Any: ...
    def passed(self, mark: Any) -> bool: ...
    def between(self, begin: Any, end: Any) -> float: ...
    def capture(self, block: Callable[[], object]) -> Callable[[], object]: ...
    def peak_bytes(self, call: Callable[[], object]) -> float | None: ...


def cpu_cache_bytes(folder: Path = CPU_CACHES) -> int:
    """The largest cache of the first core, as Linux gives it ("32768K"); 0 where it says nothing."""
    texts = [path.read_text().strip() for path in folder.glob("index*/size")]
    return max((int(text[:-1]) * UNITS[text[-1]] for text in texts if text[-1:] in UNITS), default=0)


class HostQueue:
    """This host: what is called is done when it returns. It has no marks; its L2 is the last cache before memory."""

    def __init__(self) -> None:
        self.l2_bytes = cpu_cache_bytes()
        self.other: Tensor | None = None

    def clock(self) -> float:
        return time.perf_counter()

    def sync(self) -> None:
        """Nothing is under way."""

    def sensor(self) -> Condition:
        return Condition()

    def joules(self) -> float | None:
        return None

    def flush(self) -> None:
        if self.other is None:
            self.other = torch.zeros(2 * self.l2_bytes, dtype=torch.uint8)
        self.other.add_(1)

    def peak_bytes(self, call: Callable[[], object]) -> float | None:
        return None


class CudaQueue:
    """The current stream of a card."""

    def __init__(self, index: int = 0) -> None:
        self.l2_bytes = int(torch.cuda.get_device_properties(index).L2_cache_size)
        self.sensor, self.joules = gpu_sensor(index), gpu_energy(index)
        self.other: Tensor | None = None
        self.cycle_s = 0.0

    def clock(self) -> float:
        return time.perf_counter()

    def sync(self) -> None:
        torch.cuda.synchronize()

    def flush(self) -> None:
        """Writes twice the L2's size: a policy other than least-recently-used keeps some of what was there."""
        if self.other is None:
            self.other = torch.empty(2 * self.l2_bytes, dtype=torch.uint8, device="cuda")
        self.other.zero_()

    def spin(self, seconds: float) -> None:
        if not self.cycle_s:
            self.cycle_s = self.spun(SPIN_CYCLES) / SPIN_CYCLES
        torch.cuda._sleep(int(seconds / self.cycle_s))

    def spun(self, cycles: int) -> float:
        """How long the device spins for so many cycles of its clock, as it is now."""
        self.sync()
        begin = self.mark()
        torch.cuda._sleep(cycles)
        end = self.mark()
        self.sync()
        return self.between(begin, end)

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def capture(self, block: Callable[[], object]) -> Callable[[], object]:
        """Runs the block once on a side stream, as torch asks for, then records it; RuntimeError where it cannot."""
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            block()
        main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            block()
        return graph.replay

    def peak_bytes(self, call: Callable[[], object]) -> float | None:
        """By torch's allocator: what a library takes for itself is not in it."""
        self.sync()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        self.sync()
        return float(torch.cuda.max_memory_allocated() - before)


def queue_of(device: str) -> Queue | HostQueue:
    """The queue of a case's device, "cuda" or "cpu"."""
    return CudaQueue() if device == "cuda" else HostQueue()
