"""Prices a schedule: when does each action run, how much of the time is bubble. Formulas are in docs/schedules.md.

An action starts when its rank is free and its messages are there. A message is pure latency: it holds neither rank.
Times are in the unit of the costs. Default costs are exact fractions, so that closed forms come out exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from plait.parallel.schedules.action import COMPUTE, Action, Op, singles
from plait.parallel.schedules.check import check
from plait.parallel.schedules.machine import Product, crosses, makes, needs
from plait.parallel.schedules.schedule import Schedule

Time = float | Fraction
PerStage = Time | Sequence[Time]


@dataclass(frozen=True)
class Costs:
    """Time of each operation of one stage; a number for all stages, or one per stage. A pair costs the sum.

    `send` is the latency of a message between ranks, by the maker's stage. REDUCE_GRAD and TIE_GRAD are free: they
    overlap what follows.
    """

    forward: PerStage = 1.0
    backward: PerStage = 2.0
    input: PerStage = 1.0
    weight: PerStage = 1.0
    send: PerStage = 0.0

    @staticmethod
    def unit(schedule: Schedule) -> Costs:
        """One unit of forward per rank and micro-batch: a rank with v stages gives 1/v to each; B = 2F, I = W = F."""
        shares = [Fraction(1, len(schedule.stages_of(rank))) for rank in schedule.stage_to_rank]
        return Costs(shares, [2 * share for share in shares], shares, shares, Fraction(0))

    def of(self, action: Action) -> Time:
        """Time of a single action; 0 for what is not computing."""
        return _at(self._table(action.op), action.stage) if action.op in COMPUTE else Fraction(0)

    def _table(self, op: Op) -> PerStage:
        return {Op.F: self.forward, Op.B: self.backward, Op.I: self.input, Op.W: self.weight}[op]

    def check(self, schedule: Schedule) -> None:
        """Raises ValueError when a per-stage cost has not one entry per stage."""
        for name in ("forward", "backward", "input", "weight", "send"):
            cost = getattr(self, name)
            if isinstance(cost, Sequence) and len(cost) != schedule.num_stages:
                raise ValueError(f"costs.{name} has {len(cost)} entries for {schedule.num_stages} stages")


def _at(cost: PerStage, stage: int) -> Time:
    return cost[stage] if isinstance(cost, Sequence) else cost


class Event(NamedTuple):
    """One action in time. `wait` is how long its rank stood idle before `start` for this action's messages."""

    action: Action
    start: float
    end: float
    wait: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """A schedule in time, planned (simulate) or measured (Pipeline); figures as in docs/schedules.md."""

    name: str
    lanes: tuple[tuple[Event, ...], ...]
    makespan: float
    busy: tuple[float, ...]  # per rank
    bubble: float
    bubble_over_ideal: float
    span_bubble: float
    peak_activations: float  # largest over ranks, in units of one rank's share of the layers

    @property
    def bubble_per_rank(self) -> tuple[float, ...]:
        """Idle share of the makespan, per rank."""
        return tuple(1 - busy / self.makespan for busy in self.busy)

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


ExactEvent = tuple[Action, Time, Time, Time]


def timeline(name: str, lanes: Sequence[Sequence[ExactEvent]], peak_activations: float) -> Timeline:
    """Builds the figures from events (action, start, end, wait) per rank; the first start is taken as time 0."""
    origin = min((start for lane in lanes for _, start, _, _ in lane), default=0)
    busy = [sum((end - start for _, start, end, _ in lane), Fraction(0)) for lane in lanes]
    makespan = max((end for lane in lanes for _, _, end, _ in lane), default=0) - origin
    spans = [max(e[2] for e in lane) - min(e[1] for e in lane) if lane else Fraction(0) for lane in lanes]
    longest = max(range(len(lanes)), key=lambda rank: spans[rank])
    return Timeline(
        name,
        tuple(
            tuple(Event(a, float(s - origin), float(e - origin), float(w)) for a, s, e, w in lane) for lane in lanes
        ),
        float(makespan),
        tuple(map(float, busy)),
        float(1 - sum(busy) / (len(lanes) * makespan)) if makespan else 0.0,
        float(makespan / max(busy) - 1) if makespan else 0.0,
        float(1 - busy[longest] / spans[longest]) if spans[longest] else 0.0,
        peak_activations,
    )


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Runs the schedule on the clock; `costs=None`: Costs.unit(schedule). Raises ScheduleError if it cannot run."""
    report = check(schedule)
    costs = costs or Costs.unit(schedule)
    costs.check(schedule)
    lanes = _run(schedule, costs)
    shares = [len(schedule.stages_of(rank)) for rank in range(schedule.num_ranks)]
    peak = max(n / share if share else 0.0 for n, share in zip(report.peak_activations, shares, strict=True))
    return timeline(schedule.name, lanes, peak)


def _run(schedule: Schedule, costs: Costs) -> list[list[ExactEvent]]:
    """Start and end of every action but sends and receives, by following each lane until it waits."""
    arrival: dict[Product, Time] = {}
    lanes: list[list[ExactEvent]] = [[] for _ in schedule.lanes]
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
            end = start + costs.of(action)
            lanes[rank].append((action, start, end, start - clock[rank]))
            clock[rank] = end
            for product in makes(action) if computing else ():
                arrival[product] = end + (_at(costs.send, product[0]) if crosses(product, schedule) else 0)
                if product in waiting:
                    runnable.append(waiting.pop(product))
    assert all(index == len(lane) for index, lane in zip(at, apart, strict=True)), "check proved it can run"
    return lanes
