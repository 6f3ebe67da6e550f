"""Finds a schedule for measured costs under a memory limit: the best of all named ones and of many list schedules.

Not exhaustive (the problem is NP-hard). The one idea: whatever it tries is an ordinary schedule that `check` proves
and `simulate` prices, so the answer is never worse than the best named schedule that fits. Formulas and what the
search reaches of the zero-bubble paper's own: docs/schedules.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from plait.parallel.schedules.action import Op, ScheduleError, singles
from plait.parallel.schedules.costs import AnyCosts, Costs, LayerCosts, peak_memory, shared
from plait.parallel.schedules.greedy import Policy, list_schedule
from plait.parallel.schedules.names import NAMES, build
from plait.parallel.schedules.schedule import Schedule
from plait.parallel.schedules.shapes import require_sizes, stage_map

OBJECTIVES = ("makespan", "span")
# Shares of the memory that list schedules fill before the first backward; found by hand on the timings of the
# zero-bubble paper.
_WARM_UP = (1.0, 0.95, 0.9, 0.8, 0.6)

Price = tuple[float, float]


def held(schedule: Schedule, deferred: float = 1.0) -> tuple[float, ...]:
    """The most that each rank holds at once, in units of one rank's share of one micro-batch.

    A stage's activations count from F to B (or I), its queued weight gradient `deferred` of them from I to W.
    """
    return tuple(map(float, peak_memory(schedule, Costs(deferred=deferred))))


@dataclass(frozen=True)
class _Task:
    """What is searched for: sizes, prices, and what must hold. `limit` None: P of each rank's own shares."""

    num_ranks: int
    num_microbatches: int
    costs: AnyCosts
    limit: float | Sequence[float] | None
    chunks: Sequence[int]
    objective: str

    def limits(self, schedule: Schedule, costs: Costs) -> list[float]:
        """The most that each rank may hold, in the unit of the costs' activations."""
        if self.limit is not None:
            return list(self.limit) if isinstance(self.limit, Sequence) else [self.limit] * self.num_ranks
        if costs.activation is None:
            return [float(self.num_ranks)] * self.num_ranks
        shares = [sum(_sizes(schedule, costs)[s] for s in schedule.stages_of(r)) for r in range(self.num_ranks)]
        return [self.num_ranks * share for share in shares]

    def ordered(self, makespan: float, span: float) -> Price:
        """What is compared: the objective, then the other one; rounded, so that memory decides between equals."""
        times = (round(makespan, 9), round(span, 9))
        return times if self.objective == "makespan" else times[::-1]


def _sizes(schedule: Schedule, costs: Costs) -> list[float]:
    """What one micro-batch of each stage keeps from F to B."""
    if costs.activation is None:
        return [1.0 / len(schedule.stages_of(rank)) for rank in schedule.stage_to_rank]
    assert isinstance(costs.activation, Sequence), "shared() made a list of it"
    return [float(size) for size in costs.activation]


def search(
    num_ranks: int,
    num_microbatches: int,
    costs: AnyCosts | None = None,
    *,
    memory_limit: float | Sequence[float] | None = None,
    deferred: float | None = None,
    split: bool = True,
    chunks: Sequence[int] = (1, 2),
    objective: str = "makespan",
) -> Schedule:
    """The cheapest schedule found.

    costs: None is F = 1, B = 2, I = W = 1; numbers are the times of one rank's whole share of a micro-batch, and a
    rank with v stages gives each 1/v of it; lists are times per stage and fix the number of stages (then `chunks` is
    read off them). memory_limit: the most that a rank (or each rank of a list) may hold, as `peak_memory` counts it;
    None: what 1F1B holds on its first rank, P. deferred: what a queued weight gradient keeps, relative to a stage's
    activations; None: as the costs say. split: False where a module's weight gradient cannot be taken apart from its
    input gradient; no I and W are used then. The same holds for each stage whose costs say split=False.
    objective: "makespan", or "span" (longest rank from its first start to its last end: what counts when a step may
    begin before all ranks have ended the last one).

    ScheduleError where no schedule fits the limit; it names the least that one was seen to need.
    """
    require_sizes("search", num_ranks=num_ranks, num_microbatches=num_microbatches)
    if objective not in OBJECTIVES:
        raise ValueError(f"objective={objective!r}: valid are {', '.join(OBJECTIVES)}")
    if deferred is not None and not 0.0 <= deferred <= 1.0:
        raise ValueError(f"deferred={deferred}: valid are 0 (a queued weight gradient keeps nothing) to 1")
    if isinstance(memory_limit, Sequence) and len(memory_limit) != num_ranks:
        raise ValueError(f"memory_limit has {len(memory_limit)} entries for {num_ranks} ranks")
    costs = costs or Costs()
    costs = costs if deferred is None else replace(costs, deferred=deferred)
    costs = costs if split else replace(costs, split=False)
    counts = _counts(costs, num_ranks, chunks)
    task = _Task(num_ranks, num_microbatches, costs, memory_limit, counts, objective)
    least, best = float("inf"), None
    for price, schedule in itertools.chain(_named(task), _listed(task)):
        prices = shared(costs, schedule)
        sizes = _sizes(schedule, prices)  # as floats: exact fractions cost seconds here
        peaks = [round(float(peak), 9) for peak in peak_memory(schedule, replace(prices, activation=sizes))]
        least = min(least, max(peaks))
        limits = task.limits(schedule, prices)
        fits = all(peak <= limit + 1e-9 * max(1.0, limit) for peak, limit in zip(peaks, limits, strict=True))
        if fits and (best is None or (price, max(peaks)) < best[:2]):
            best = (price, max(peaks), schedule)
    if best is None:
        unit = "of one rank's share of a micro-batch" if _in_shares(costs) else "in the unit of the costs"
        raise ScheduleError(
            f"schedule search: nothing fits memory_limit={memory_limit}; the least that was seen to be needed is "
            f"{least:g} {unit}"
        )
    name = best[2].name
    return replace(best[2], name="search" if name == "search" else f"search({name})")


def _in_shares(costs: AnyCosts) -> bool:
    """Whether memory is counted in shares of a rank, for want of a unit."""
    return costs.activation is None if isinstance(costs, Costs) else not costs.layer.activation


def _counts(costs: AnyCosts, num_ranks: int, chunks: Sequence[int]) -> Sequence[int]:
    """How many stages a rank may have; ValueError where the costs are for none of them."""
    if isinstance(costs, LayerCosts):
        fixed = None if costs.layers_of is None else len(costs.layers_of)
        chunks = [count for count in chunks if fixed or count * num_ranks <= costs.num_layers]
        if not chunks:
            raise ValueError(f"costs: {costs.num_layers} layers are fewer than the stages of {num_ranks} ranks")
    else:
        fixed = costs.num_stages()
    if fixed is not None and fixed % num_ranks:
        raise ValueError(f"costs: lists for {fixed} stages; num_ranks={num_ranks} must divide them")
    return chunks if fixed is None else (fixed // num_ranks,)


def can_run(schedule: Schedule, costs: Costs) -> bool:
    """Whether every stage whose backward the schedule splits can split it."""
    return all(
        single.op is not Op.W or costs.splits(single.stage) for lane in schedule.lanes for single in singles(lane)
    )


def _named(task: _Task) -> Iterator[tuple[Price, Schedule]]:
    """All named schedules with an allowed number of stages."""
    for name, count in itertools.product(NAMES, task.chunks):
        try:
            named = build(name, task.num_ranks, task.num_microbatches, count)
        except ValueError:
            continue  # this schedule has another number of stages per rank
        prices = shared(task.costs, named)
        if can_run(named, prices):
            timeline = named.simulate(prices)
            spans = (lane[-1].end - lane[0].start for lane in timeline.lanes if lane)
            yield task.ordered(timeline.makespan, max(spans)), named


def _listed(task: _Task) -> Iterator[tuple[Price, Schedule]]:
    """What the policies make on each placement."""
    for count in task.chunks:
        for place in dict.fromkeys(stage_map(task.num_ranks, count, style) for style in ("loop", "v")):
            empty = Schedule("search", len(place), task.num_microbatches, ((),) * task.num_ranks, place)
            prices = shared(task.costs, empty)
            sizes, limits = _sizes(empty, prices), task.limits(empty, prices)
            for policy in _policies(count, any(prices.splits(stage) for stage in range(len(place)))):
                made = list_schedule(place, task.num_microbatches, prices, limits, policy, sizes=sizes)
                if made is not None:
                    schedule, makespan, span = made
                    yield task.ordered(makespan, span), schedule


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
