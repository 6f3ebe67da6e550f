"""How a device's own time is taken: between two marks on its queue, behind a kernel that spins meanwhile.

While it spins the host launches. Without it the device waits for the host, and short kernels are as long as their
launch. A window whose calls were not all queued in time says so ("late": marked, not dropped). Calls under
GRAPH_BELOW_S are captured into a graph of many: one launch, so that what the device does between kernels is small
too. Knows no op.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from plait.bench.queues import HostQueue, Queue

GRAPH_BELOW_S = 20e-6  # a call shorter than this is timed by a graph
BLOCK_S = 2e-3  # a sample is at least this long, so that reading a clock and waiting for the device are small in it
MAX_BLOCK = 1000
MAX_QUEUED = 100  # calls behind a spin: a queue holds about 1000 launches, and a call is several
FIRST_AHEAD_S, MOST_AHEAD_S = 1e-4, 0.05  # how long the device spins
Call = Callable[[], object]


@dataclass
class Notes:
    """Of one provider's windows, in the order taken: what the host needed to launch, whether that was too long."""

    host_s: list[float] = field(default_factory=list)
    late: list[bool] = field(default_factory=list)


class Events:
    """A window on a queue; called with a provider's name and what it launches, it returns the device's seconds."""

    def __init__(self, queue: Queue) -> None:
        self.queue, self.ahead_s = queue, FIRST_AHEAD_S
        self.notes: dict[str, Notes] = {}

    def __call__(self, name: str, call: Call) -> float:
        queue = self.queue
        queue.spin(self.ahead_s)
        begin, start = queue.mark(), queue.clock()
        call()
        host_s = queue.clock() - start
        late, end = queue.passed(begin), queue.mark()
        queue.sync()
        notes = self.notes.setdefault(name, Notes())
        notes.host_s.append(host_s)
        notes.late.append(late)
        return queue.between(begin, end)

    def settled(self, name: str, call: Call) -> float:
        """A window's seconds once the spin is long enough for what is launched; it grows up to MOST_AHEAD_S."""
        while True:
            seconds = self(name, call)
            notes = self.notes[name]
            self.ahead_s = min(MOST_AHEAD_S, max(self.ahead_s, 2 * notes.host_s[-1] + FIRST_AHEAD_S))
            if not notes.late[-1] or self.ahead_s == MOST_AHEAD_S:
                return seconds

    def least(self, name: str, call: Call, times: int = 3) -> float:
        """The least of some settled windows."""
        return min(self.settled(name, call) for _ in range(times))

    def forget(self) -> None:
        """Drops the notes, before the rounds that count."""
        self.notes.clear()


def host_seconds(queue: Queue | HostQueue, call: Call, times: int = 3) -> float:
    """The least time of a call by the host's clock, with the device waited for."""
    found = []
    for _ in range(times):
        queue.sync()
        start = queue.clock()
        call()
        queue.sync()
        found.append(queue.clock() - start)
    return min(found)


def calls_in_block(seconds: float, policy: str, most: int = MAX_BLOCK) -> int:
    """Calls in a sample, each so long: one where the cache is emptied before each."""
    return 1 if policy == "cold-flush" else max(1, min(most, round(BLOCK_S / max(seconds, 1e-9))))


def calls_in_graph(seconds: float, policy: str, copies: int) -> int:
    """The same of a graph: whole turns of the copies, else a replay would begin with data that it has just used."""
    if policy == "cold-flush":
        return 1
    return copies * max(1, min(MAX_BLOCK // copies, round(BLOCK_S / max(seconds, 1e-9) / copies)))


def joules_per_call(queue: Queue | HostQueue, block: Call, calls: int, least_s: float, most_s: float) -> float | None:
    """Energy of a call in back-to-back blocks, from one step of the card's counter to another at least `least_s`
    later: the counter moves some ten times a second only. None without a counter, or one that stands still."""
    before = queue.joules()
    if before is None:
        return None
    begin, first, start, count = queue.clock(), before, 0.0, 0
    while queue.clock() - begin < most_s:
        block()
        queue.sync()
        now = queue.joules()
        if start:
            count += calls
        if now is None or now == before:
            continue
        if start and queue.clock() - start >= least_s:
            return (now - first) / count
        if not start:
            first, start = now, queue.clock()
        before = now
    return None
