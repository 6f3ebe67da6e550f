"""Finds a schedule for measured costs under a memory limit: the best of all named ones and of many list schedules.

Not exhaustive (the problem is NP-hard). The one idea: whatever it tries is an ordinary schedule that `check` proves
and `simulate` prices, so the answer is never worse than the best named schedule that fits. Formulas and what the
search reaches of the zero-bubble paper's own: docs/schedules.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from plait.parallel.schedules.action import BACKWARD, Op, ScheduleError, singles
from plait.parallel.schedules.greedy import Policy, list_schedule
from plait.parallel.schedules.names import NAMES, build
from plait.parallel.schedules.schedule import Schedule
from plait.parallel.schedules.shapes import require_sizes, stage_map
from plait.parallel.schedules.simulate import Costs, PerStage, Time

OBJECTIVES = ("makespan", "span")
# Shares of the memory that list schedules fill before the first backward; found by hand on the timings of the
# zero-bubble paper.
_WARM_UP = (1.0, 0.95, 0.9, 0.8, 0.6)

Price = tuple[float, float]


def held(schedule: Schedule, deferred: float = 1.0) -> tuple[float, ...]:
    """The most that each rank holds at once, in units of one rank's share of one micro-batch.

    A stage's activations count from F to B (or I), its queued weight gradient `deferred` of them from I to W.
    """
    peaks = []
    for rank, lane in enumerate(schedule.lanes):
        now = most = 0.0
        for single in singles(lane):
            now += single.op is Op.F
            most = max(most, now)
            now -= single.op in BACKWARD
            now += deferred * ((single.op is Op.I) - (single.op is Op.W))
            most = max(most, now)
        peaks.append(most / max(1, len(schedule.stages_of(rank))))
    return tuple(peaks)


def search(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None = None,
    *,
    memory_limit: float | Sequence[float] | None = None,
    deferred: float = 1.0,
    split: bool = True,
    chunks: Sequence[int] = (1, 2),
    objective: str = "makespan",
) -> Schedule:
    """The cheapest schedule found.

    costs: None is F = 1, B = 2, I = W = 1; numbers are the times of one rank's whole share of a micro-batch, and a
    rank with v stages gives each 1/v of it; lists are times per stage and fix the number of stages (then `chunks` is
    read off them). memory_limit: the most that a rank (or each rank of a list) may hold, as `held` counts it; None:
    what 1F1B holds, P. deferred: what a queued weight gradient keeps, relative to a stage's activations. split: False
    where a module's weight gradient cannot be taken apart from its input gradient; no I and W are used then.
    objective: "makespan", or "span" (longest rank from its first start to its last end: what counts when a step may
    begin before all ranks have ended the last one).

    ScheduleError where no schedule fits the limit; it names the least that one was seen to need.
    """
    require_sizes("search", num_ranks=num_ranks, num_microbatches=num_microbatches)
    if objective not in OBJECTIVES:
        raise ValueError(f"objective={objective!r}: valid are {', '.join(OBJECTIVES)}")
    if not 0.0 <= deferred <= 1.0:
        raise ValueError(f"deferred={deferred}: valid are 0 (a queued weight gradient keeps nothing) to 1")
    costs, limits = costs or Costs(), _limits(memory_limit, num_ranks)
    tried = [
        *_named(num_ranks, num_microbatches, costs, split, chunks, objective),
        *_listed(num_ranks, num_microbatches, costs, limits, deferred, split, chunks, objective),
    ]
    fitting = []
    for price, schedule in tried:
        peaks = held(schedule, deferred)
        if all(peak <= limit + 1e-9 for peak, limit in zip(peaks, limits, strict=True)):
            fitting.append((price, max(peaks), schedule))
    if not fitting:
        least = min(max(held(schedule, deferred)) for _, schedule in tried)
        raise ScheduleError(
            f"schedule search: nothing fits memory_limit={memory_limit}; the least that was seen to be needed is "
            f"{least:g} of one rank's share of a micro-batch"
        )
    best = min(fitting, key=lambda entry: entry[:2])[2]
    return replace(best, name="search" if best.name == "search" else f"search({best.name})")


def _limits(memory_limit: float | Sequence[float] | None, num_ranks: int) -> list[float]:
    if memory_limit is None:
        return [float(num_ranks)] * num_ranks
    limits = list(memory_limit) if isinstance(memory_limit, Sequence) else [memory_limit] * num_ranks
    if len(limits) != num_ranks:
        raise ValueError(f"memory_limit has {len(limits)} entries for {num_ranks} ranks")
    return [float(limit) for limit in limits]


def _ordered(makespan: float, span: float, objective: str) -> Price:
    """What is compared: the objective, then the other one; rounded, so that memory decides between equals."""
    times = (round(makespan, 9), round(span, 9))
    return times if objective == "makespan" else times[::-1]


def _num_stages(costs: Costs) -> int | None:
    """How many stages the lists are for; None where all costs are numbers."""
    lengths = {len(c) for c in (costs.forward, costs.backward, costs.input, costs.weight) if isinstance(c, Sequence)}
    if len(lengths) > 1:
        raise ValueError(f"costs: lists for {' and '.join(map(str, sorted(lengths)))} stages; they must agree")
    return lengths.pop() if lengths else None


def shared(costs: Costs, schedule: Schedule) -> Costs:
    """The costs per stage: a number is a rank's share, of which each of its stages has an equal part."""

    def part(cost: PerStage) -> PerStage:
        if isinstance(cost, Sequence):
            return cost
        shares: list[Time] = [cost / len(schedule.stages_of(rank)) for rank in schedule.stage_to_rank]
        return shares

    return Costs(part(costs.forward), part(costs.backward), part(costs.input), part(costs.weight), costs.send)


def _counts(costs: Costs, num_ranks: int, chunks: Sequence[int]) -> Sequence[int]:
    """How many stages a rank may have."""
    fixed = _num_stages(costs)
    if fixed is not None and fixed % num_ranks:
        raise ValueError(f"costs: lists for {fixed} stages; num_ranks={num_ranks} must divide them")
    return chunks if fixed is None else (fixed // num_ranks,)


def _named(
    num_ranks: int, num_microbatches: int, costs: Costs, split: bool, chunks: Sequence[int], objective: str
) -> Iterator[tuple[Price, Schedule]]:
    """All named schedules with an allowed number of stages."""
    for name, count in itertools.product(NAMES, _counts(costs, num_ranks, chunks)):
        try:
            named = build(name, num_ranks, num_microbatches, count)
        except ValueError:
            continue  # this schedule has another number of stages per rank
        if split or not any(single.op is Op.W for lane in named.lanes for single in singles(lane)):
            timeline = named.simulate(shared(costs, named))
            spans = (lane[-1].end - lane[0].start for lane in timeline.lanes if lane)
            yield _ordered(timeline.makespan, max(spans), objective), named


def _listed(
    num_ranks: int, num_microbatches: int, costs: Costs, limits: list[float], deferred: float, split: bool,
    chunks: Sequence[int], objective: str,
) -> Iterator[tuple[Price, Schedule]]:  # fmt: skip
    """What the policies make on each placement."""
    for count in _counts(costs, num_ranks, chunks):
        for place in dict.fromkeys(stage_map(num_ranks, count, style) for style in ("loop", "v")):
            prices = shared(costs, Schedule("search", len(place), num_microbatches, ((),) * num_ranks, place))
            room = [limit * count for limit in limits]
            for policy in _policies(count, split):
                made = list_schedule(place, num_microbatches, prices, room, policy, deferred=deferred)
                if made is not None:
                    schedule, makespan, span = made
                    yield _ordered(makespan, span, objective), schedule


def _policies(count: int, split: bool) -> Iterator[Policy]:
    patience = (0.0, 0.25, 0.5, 1.0) if split else (0.0,)
    if count == 1:
        for first, wait, warm_up, slope in itertools.product((True, False), patience, _WARM_UP, (0, 1, 2)):
            yield Policy(first, wait, warm_up, slope, split, deep_first=True)
        return
    for first, wait, warm_up, slope, deep in itertools.product(
        (True, False), patience[::2], _WARM_UP[::2], (0, 1), (True, False)
    ):
        yield Policy(first, wait, warm_up, slope, split, deep)
