"""Prices a schedule: when does each action run, how much of the time is bubble. Formulas are in docs/schedules.md.

An action starts when its rank is free and its messages are there. A message is pure latency: it holds neither rank.
Costs are costs.py's. Default costs are exact fractions, so that closed forms come out exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from plait.parallel.schedules.action import COMPUTE, Action, Op, singles
from plait.parallel.schedules.check import check
from plait.parallel.schedules.costs import Costs, Time, peak_memory
from plait.parallel.schedules.machine import Product, crosses, makes, needs, user_stage
from plait.parallel.schedules.schedule import Schedule


class Event(NamedTuple):
    """One action in time. `wait`: how long its rank stood idle before `start` for this action's messages; `exposed`:
    the part of it in which the last of them was on its way, made already."""

    action: Action
    start: float
    end: float
    wait: float = 0.0
    exposed: float = 0.0


class Message(NamedTuple):
    """One message between ranks: its maker's stage, "F" (an output) or "G" (a gradient), and when it travelled."""

    stage: int
    kind: str
    microbatch: int
    source: int
    target: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule in time, planned (simulate) or measured (measured.py); figures as in docs/schedules.md."""

    name: str
    lanes: tuple[tuple[Event, ...], ...]
    makespan: float
    busy: tuple[float, ...]  # per rank
    bubble: float
    bubble_over_ideal: float
    span_bubble: float
    peak_activations: float  # largest over ranks, in units of one rank's share of the layers
    messages: tuple[Message, ...] = ()
    peak_memory: tuple[float, ...] = ()  # per rank, in the unit of Costs.activation (None: in one rank's shares)
    inseparable: tuple[int, ...] = ()  # of a run: stages with a weight gradient that cannot wait for W

    @property
    def bubble_per_rank(self) -> tuple[float, ...]:
        """Idle share of the makespan, per rank."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @property
    def exposed_per_rank(self) -> tuple[float, ...]:
        """Time that each rank stood idle for a message that was made and on its way."""
        return tuple(sum(event.exposed for event in lane) for lane in self.lanes)

    @property
    def exposed_communication(self) -> float:
        """Share of all ranks' time that is idle for messages on their way; the bubble has it too."""
        return sum(self.exposed_per_rank) / (len(self.lanes) * self.makespan) if self.makespan else 0.0

    def figures(self) -> dict[str, Any]:
        """All figures as plain data."""
        return {name: list(v) if isinstance(v := getattr(self, name), tuple) else v for name in _FIGURES}

    def to_svg(self) -> str:
        """A picture; see plait.parallel.schedules.draw."""
        from plait.parallel.schedules.draw import to_svg

        return to_svg(self)

    def to_perfetto(self) -> str:
        """A trace for ui.perfetto.dev; see plait.parallel.schedules.draw."""
        from plait.parallel.schedules.draw import to_perfetto

        return to_perfetto(self)

    def table(self) -> str:
        """A picture for the terminal; see plait.parallel.schedules.draw."""
        from plait.parallel.schedules.draw import table

        return table(self)


_FIGURES = (
    "name",
    "makespan",
    "bubble",
    "bubble_over_ideal",
    "span_bubble",
    "exposed_communication",
    "peak_activations",
    "busy",
    "bubble_per_rank",
    "exposed_per_rank",
    "peak_memory",
)


def timeline(
    name: str,
    lanes: Sequence[Sequence[tuple[Any, ...]]],
    peak_activations: float,
    *,
    messages: Sequence[tuple[Any, ...]] = (),
    memory: Sequence[Time] = (),
) -> Timeline:
    """Builds the figures from events (as Event, exact times allowed) per rank; the first start is taken as time 0."""
    origin = min((event[1] for lane in lanes for event in lane), default=0)
    busy = [sum((event[2] - event[1] for event in lane), Fraction(0)) for lane in lanes]
    makespan = max((event[2] for lane in lanes for event in lane), default=0) - origin
    spans = [max(e[2] for e in lane) - min(e[1] for e in lane) if lane else Fraction(0) for lane in lanes]
    longest = max(range(len(lanes)), key=lambda rank: spans[rank])
    return Timeline(
        name,
        tuple(
            tuple(Event(a, float(s - origin), float(e - origin), *map(float, more)) for a, s, e, *more in lane)
            for lane in lanes
        ),
        float(makespan),
        tuple(map(float, busy)),
        float(1 - sum(busy) / (len(lanes) * makespan)) if makespan else 0.0,
        float(makespan / max(busy) - 1) if max(busy) else 0.0,
        float(1 - busy[longest] / spans[longest]) if spans[longest] else 0.0,
        peak_activations,
        tuple(Message(*m)._replace(start=float(m[5] - origin), end=float(m[6] - origin)) for m in messages),
        tuple(map(float, memory)),
    )


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Runs the schedule on the clock; `costs=None`: Costs.unit(schedule). Raises ScheduleError if it cannot run."""
    report = check(schedule)
    costs = costs or Costs.unit(schedule)
    costs.check(schedule)
    lanes, messages = _run(schedule, costs)
    shares = [len(schedule.stages_of(rank)) for rank in range(schedule.num_ranks)]
    peak = max(n / share if share else 0.0 for n, share in zip(report.peak_activations, shares, strict=True))
    return timeline(schedule.name, lanes, peak, messages=messages, memory=peak_memory(schedule, costs))


_Lanes = list[list[tuple[Any, ...]]]


def _run(schedule: Schedule, costs: Costs) -> tuple[_Lanes, list[tuple[Any, ...]]]:
    """Start and end of every action but sends and receives, by following each lane until it waits; the messages."""
    arrival: dict[Product, Time] = {}
    made: dict[Product, Time] = {}
    lanes: _Lanes = [[] for _ in schedule.lanes]
    messages: list[tuple[Any, ...]] = []
    apart = [tuple(singles(lane)) for lane in schedule.lanes]
    at = [0] * schedule.num_ranks
    clock: list[Time] = [Fraction(0)] * schedule.num_ranks
    waiting: dict[Product, int] = {}
    runnable = list(range(schedule.num_ranks))
    while runnable:
        rank = runnable.pop()
        lane = apart[rank]
        while at[rank] < len(lane):
            action = lane[at[rank]]
            computing = action.op in COMPUTE
            wanted = needs(action, schedule.num_stages) if computing else []
            missing = next((p for p in wanted if p not in arrival), None)
            if missing is not None:
                waiting[missing] = rank
                break
            at[rank] += 1
            if not computing and action.op not in (Op.REDUCE_GRAD, Op.TIE_GRAD):
                continue
            start = max([clock[rank], *(arrival[p] for p in wanted)])
            exposed = start - max([clock[rank], *(made[p] for p in wanted)])
            end = start + costs.of(action)
            lanes[rank].append((action, start, end, start - clock[rank], exposed))
            clock[rank] = end
            for product in makes(action) if computing else ():
                made[product] = arrival[product] = end
                if crosses(product, schedule):
                    arrival[product] = end + costs.latency(product)
                    target = schedule.stage_to_rank[user_stage(product)]
                    messages.append((*product, rank, target, end, arrival[product]))
                if product in waiting:
                    runnable.append(waiting.pop(product))
    assert all(index == len(lane) for index, lane in zip(at, apart, strict=True)), "check proved it can run"
    return lanes, messages
