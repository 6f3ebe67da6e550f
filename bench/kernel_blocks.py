"""How a case of the `kernels` suite is timed: blocks of calls by the host's clock, by marks, or by a graph of them.

A block keeps the results of its call in one round drawn at random, to be checked after. The cache policy is asserted
here for every block, also for what a graph has captured. Draws no inputs, compares nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from plait.bench.kernel_jobs import Contender, Job, Results
from plait.bench.queues import HostQueue, Queue
from plait.bench.spec import Measured
from plait.bench.timer import POLICIES, check_policy
from plait.bench.windows import (
    GRAPH_BELOW_S,
    MAX_QUEUED,
    Events,
    calls_in_block,
    calls_in_graph,
    host_seconds,
    joules_per_call,
)

ENERGY_S, MOST_ENERGY_S = 0.25, 1.0  # of back-to-back calls: a few steps of the card's counter


class Block:
    """`size` calls as one timed thing. Keeps the results of the last call of turn `kept_turn`."""

    def __init__(self, contender: Contender, size: int, seconds: float) -> None:
        self.contender, self.size, self.turn_s = contender, size, size * seconds
        self.kept_turn = self.turn = 0
        self.kept: Results | None = None
        self.replay: Callable[[], object] | None = None
        self.static: Results = ()  # of a graph: every replay writes here
        self.given: frozenset[int] = frozenset()

    def launch(self) -> Results:
        """All calls, or the graph of them; returns the last one's results."""
        if self.replay is not None:
            self.replay()
            return self.static
        for _ in range(self.size):
            results = self.contender.call()
        return results

    def run(self) -> None:
        """One turn, which is timed."""
        results = self.launch()
        if self.turn == self.kept_turn and not self.contender.in_place:
            self.kept = results
        self.turn += 1

    def before(self) -> None:
        """What is done before a turn, untimed: of a graph, its results are poisoned for the turn that is kept, and
        taken away before the next one writes over them."""
        if self.replay is None or self.contender.in_place:
            return
        with torch.no_grad():
            if self.turn == self.kept_turn:
                for value in self.static:
                    if value.data_ptr() not in self.given:  # a residual's gradient is the output's, not a copy of it
                        value.fill_(float("nan"))
            elif self.turn == self.kept_turn + 1:
                self.kept = [value.clone() for value in self.static]

    def captured(self, queue: Queue, job: Job) -> None:
        """Makes the block a graph, from the first copy of the data on. Raises what torch raises where it cannot."""
        last: list[Results] = []

        def block() -> None:
            job.rotation.restart()
            for _ in range(self.size):
                last[:] = [self.contender.call()]

        self.replay = queue.capture(block)
        self.static, self.given = last[0], job.given

    def kept_results(self) -> Results:
        """What that call gave; of a provider that works in place, a new call on inputs put back."""
        if not self.contender.in_place:
            assert self.kept is not None
            return self.kept
        self.contender.prepare()
        return self.contender.call()


@dataclass
class Timing:
    """The blocks by provider, the window that times them (None: the host's clock), and both in words."""

    queue: Queue | HostQueue
    blocks: dict[str, Block]
    events: Events | None
    method: str
    policy: str
    host_s: dict[str, float] = field(default_factory=dict)  # that one call takes the host to launch

    @property
    def text(self) -> str:
        return f"{self.method}, {self.policy}"

    def flush(self) -> None:
        """Empties the cache where the policy says so."""
        if self.policy.startswith("cold-flush"):
            self.queue.flush()

    def tell(self, name: str, measured: Measured) -> None:
        """Puts what is known of a provider's launches into its figures; late windows are marked, not dropped."""
        measured.figures["calls/sample"] = float(self.blocks[name].size)
        if name in self.host_s:
            measured.figures["host us/call"] = self.host_s[name] * 1e6
        notes = self.events.notes.get(name) if self.events else None
        if notes and any(notes.late):
            measured.figures["LATE windows"] = float(sum(notes.late))

    def energy(self, name: str) -> float | None:
        """Joules of a call, None where the device counts none."""
        block = self.blocks[name]
        return joules_per_call(self.queue, block.launch, block.size, ENERGY_S, MOST_ENERGY_S)


def timing_of(queue: Queue | HostQueue, job: Job, policy: str) -> Timing:
    """Finds out how long calls take, and how to time them; ValueError where the cache policy cannot be kept."""
    if policy not in POLICIES:
        raise ValueError(f"cache: {policy!r} is unknown; valid: {', '.join(POLICIES)}")
    if policy != "hot" and not queue.l2_bytes:
        raise ValueError(f"cache: {policy} needs the size of the device's cache, which is unknown here; take hot")
    if isinstance(queue, HostQueue):
        seconds = {name: host_seconds(queue, contender.call) for name, contender in job.contenders.items()}
        blocks = {
            name: Block(contender, calls_in_block(seconds[name], policy), seconds[name])
            for name, contender in job.contenders.items()
        }
        timing = Timing(queue, blocks, None, "host_wall", policy)
    else:
        timing = device_timing(queue, job, policy)
    timing.policy = asserted(timing, job, policy, graph=timing.method.startswith("graph"))
    return timing


def device_timing(queue: Queue, job: Job, policy: str) -> Timing:
    """Windows on the device's queue: a graph for short calls, else events behind a spin."""
    events = Events(queue)
    seconds = {name: events.least(name, contender.call) for name, contender in job.contenders.items()}
    host_s = {name: min(notes.host_s) for name, notes in events.notes.items()}
    empty_us = events.least("", lambda: None) * 1e6
    reason, method = "", "graph of calls behind a spin"
    blocks: dict[str, Block] = {}
    if min(seconds.values()) < GRAPH_BELOW_S:
        reason = job.no_graph
        if not reason:
            blocks, reason = graphs(queue, job, seconds, policy)
    if not blocks:
        method = "events behind a spin" + (f" (no graph: {reason})" if reason else "")
        blocks = {n: by_events(events, n, c, seconds[n], policy) for n, c in job.contenders.items()}
    else:
        for name, block in blocks.items():
            events.settled(name, block.launch)
    events.forget()
    return Timing(queue, blocks, events, f"{method}, an empty window {empty_us:.1f} us", policy, host_s)


def by_events(events: Events, name: str, contender: Contender, seconds: float, policy: str) -> Block:
    """A block of calls that are all queued before the first one runs: fewer of them until they are."""
    size = calls_in_block(seconds, policy, MAX_QUEUED)
    while True:
        block = Block(contender, size, seconds)
        events.settled(name, block.launch)
        if size == 1 or not events.notes[name].late[-1]:
            block.turn_s += events.ahead_s
            return block
        size //= 2


def graphs(queue: Queue, job: Job, seconds: dict[str, float], policy: str) -> tuple[dict[str, Block], str]:
    """Everybody's graph, or nobody's and the reason: one case is timed one way."""
    blocks = {}
    for name, contender in job.contenders.items():
        blocks[name] = Block(contender, calls_in_graph(seconds[name], policy, job.rotation.copies), seconds[name])
        try:
            blocks[name].captured(queue, job)
        except RuntimeError as error:
            return {}, f"{name} cannot be captured: {str(error).strip().splitlines()[0]}"
    return blocks, ""


def asserted(timing: Timing, job: Job, policy: str, graph: bool) -> str:
    """The policy in words, the same for all blocks, each of which keeps it; ValueError otherwise."""
    copies, text = job.rotation.copies, ""
    for block in timing.blocks.values():
        used = min(copies, block.size) if graph else copies  # a replay goes through no more copies than it captured
        text = check_policy(policy, calls=block.size, nbytes=job.nbytes, copies=used, l2_bytes=timing.queue.l2_bytes)
    return text
