"""List scheduling: lanes made by running the pipeline on a clock and letting each free rank pick what is there.

Not a search over lanes. The one idea: what a rank may pick is bounded by memory, and how it picks is a `Policy`, a
few numbers; search.py tries many policies and keeps the best lanes. After the automatic schedule of Qi et al., Zero
Bubble Pipeline Parallelism (2023), section 3.1. Times are in the unit of the costs.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from plait.parallel.schedules.action import Action, Op
from plait.parallel.schedules.costs import Costs, at
from plait.parallel.schedules.machine import Product
from plait.parallel.schedules.schedule import Schedule, add_reduce_grad

_NEVER = float("inf")


class Policy(NamedTuple):
    """How a rank picks among the actions that could start now.

    backward_first: an input gradient before a forward where both are there; else they take turns.
    patience: a rank that has only weight gradients left to do waits for a message that comes within this part of one
        weight gradient's time, instead of making the message wait for the weight gradient.
    warm_up: forwards that rank r keeps alive before its first backward, as a share of what the memory allows.
    slope: how many fewer of them each following rank keeps.
    split: backward in two, I and W; else whole.
    deep_first: of several stages of a rank the later one's forward first.
    """

    backward_first: bool
    patience: float
    warm_up: float
    slope: int
    split: bool
    deep_first: bool


@dataclass
class _Rank:
    """What one rank has done and holds, on the clock."""

    stages: tuple[int, ...]
    limit: float  # memory at most, live and queued
    warm_up: float
    lane: list[Action] = field(default_factory=list)
    began: float = 0.0
    free_at: float = 0.0
    held: float = 0.0
    forwards: dict[int, int] = field(default_factory=dict)  # stage -> next micro-batch
    backwards: dict[int, int] = field(default_factory=dict)
    queued: list[tuple[int, int]] = field(default_factory=list)  # (stage, micro-batch) whose W is to come
    started_backward: bool = False
    last: Op | None = None


class _Clock:
    """One run of a policy. Decisions are made in the order of time, so nothing later can change an earlier one."""

    def __init__(
        self, stage_to_rank: Sequence[int], num_microbatches: int, costs: Costs, limits: Sequence[float],
        sizes: Sequence[float], policy: Policy,
    ) -> None:  # fmt: skip
        self.stage_to_rank, self.num_microbatches, self.costs = tuple(stage_to_rank), num_microbatches, costs
        self.sizes, self.policy = sizes, policy
        self.splits = [policy.split and costs.splits(stage) for stage in range(len(stage_to_rank))]
        self.kept = [float(at(costs.deferred, stage)) * size for stage, size in enumerate(sizes)]
        self.last_stage = len(stage_to_rank) - 1
        self.ranks = []
        for rank, limit in enumerate(limits):
            stages = tuple(s for s, owner in enumerate(stage_to_rank) if owner == rank)
            share = sum(sizes[stage] for stage in stages)
            warm_up = max(max(sizes[stage] for stage in stages), policy.warm_up * limit - policy.slope * rank * share)
            self.ranks.append(_Rank(stages, limit, warm_up, forwards=dict.fromkeys(stages, 0)))
            self.ranks[rank].backwards = dict.fromkeys(stages, 0)
        # (is backward, stage, micro-batch) -> when its input is there
        self.arrived = {(False, 0, m): 0.0 for m in range(num_microbatches)}
        self.wakes: list[tuple[float, int]] = [(0.0, rank) for rank in range(len(limits))]

    def run(self) -> tuple[tuple[Action, ...], ...] | None:
        """The lanes, or None where the policy ran into its memory limit and could not go on."""
        while self.wakes:
            now, index = heapq.heappop(self.wakes)
            rank = self.ranks[index]
            if now < rank.free_at:
                continue  # busy; the end of what it does wakes it
            action = self._pick(rank, now)
            if action is not None:
                self._start(index, action, now)
        done = all(not r.queued and all(n == self.num_microbatches for n in r.backwards.values()) for r in self.ranks)
        return tuple(add_reduce_grad(rank.lane) for rank in self.ranks) if done else None

    def _ready(self, rank: _Rank, backward: bool, now: float) -> Action | None:
        """The first action of that kind whose input is there, by the policy's order of stages."""
        upcoming = rank.backwards if backward else rank.forwards
        order = sorted(rank.stages, reverse=backward or self.policy.deep_first)
        for stage in order:
            m = upcoming[stage]
            if m < self.num_microbatches and self.arrived.get((backward, stage, m), _NEVER) <= now:
                if backward:
                    return Action(stage, Op.I if self.splits[stage] else Op.B, m)
                if self._has_room(rank, stage):
                    return Action(stage, Op.F, m)
        return None

    def _has_room(self, rank: _Rank, stage: int) -> bool:
        """Whether one more forward of the stage fits, with a place kept free for each later stage of the rank."""
        needed = sum(self.sizes[other] for other in rank.stages if other >= stage)
        limit = rank.limit if rank.started_backward else min(rank.limit, rank.warm_up)
        slack = 1e-9 * needed  # sums of shares such as 1/3
        return rank.held + needed <= max(limit, needed) + slack

    def _pick(self, rank: _Rank, now: float) -> Action | None:
        backward, forward = self._ready(rank, True, now), self._ready(rank, False, now)
        if backward is not None and (self.policy.backward_first or rank.last is Op.F or forward is None):
            return backward
        if forward is not None:
            return forward
        if backward is not None or not rank.queued:
            return backward
        stage, m = rank.queued[0]
        weight = Action(stage, Op.W, m)
        soon = now + self.policy.patience * float(self.costs.of(weight))
        return None if self._next_arrival(rank, now) <= soon else weight

    def _next_arrival(self, rank: _Rank, now: float) -> float:
        """When the next input that is on its way to the rank's next actions will be there."""
        upcoming = [(False, *item) for item in rank.forwards.items()] + [
            (True, *item) for item in rank.backwards.items()
        ]
        times = [self.arrived.get(key, _NEVER) for key in upcoming]
        return min((time for time in times if time > now), default=_NEVER)

    def _start(self, index: int, action: Action, now: float) -> None:
        rank, (stage, op, m, _) = self.ranks[index], action
        assert m is not None
        end = now + float(self.costs.of(action))
        rank.began = rank.began if rank.lane else now
        rank.lane.append(action)
        rank.free_at = end
        if op is Op.W:
            rank.queued.pop(0)
            rank.held -= self.kept[stage]
        elif op is Op.F:
            rank.forwards[stage] = m + 1
            rank.held += self.sizes[stage]
            self._send(op, stage, m, end, index)
        else:
            rank.backwards[stage] = m + 1
            rank.started_backward = True
            rank.held -= self.sizes[stage]
            if op is Op.I:
                rank.queued.append((stage, m))
                rank.held += self.kept[stage]
            self._send(op, stage, m, end, index)
        if op is not Op.W:
            rank.last = op
            del self.arrived[op is not Op.F, stage, m]
        heapq.heappush(self.wakes, (end, index))

    def _send(self, op: Op, stage: int, m: int, end: float, index: int) -> None:
        """Notes when what the action makes is there for its user, and wakes that rank then."""
        if op is Op.F and stage == self.last_stage:
            self.arrived[True, stage, m] = end  # the loss
            return
        target = stage + 1 if op is Op.F else stage - 1
        if target < 0:
            return
        peer = self.stage_to_rank[target]
        product: Product = (stage, "F" if op is Op.F else "G", m)
        there = end + (float(self.costs.latency(product)) if peer != index else 0.0)
        self.arrived[op is not Op.F, target, m] = there
        heapq.heappush(self.wakes, (there, peer))


def list_schedule(
    stage_to_rank: Sequence[int],
    num_microbatches: int,
    costs: Costs,
    limits: Sequence[float],
    policy: Policy,
    *,
    sizes: Sequence[float],
) -> tuple[Schedule, float, float] | None:
    """The schedule that `policy` makes, its makespan and its longest span of a rank (never less than simulated).

    None where it runs into the limits and cannot go on.

    limits: per rank, how much it may hold. sizes: per stage, what one micro-batch keeps from F to I (or B); of it the
    costs' `deferred` from I to W.
    """
    clock = _Clock(stage_to_rank, num_microbatches, costs, limits, sizes, policy)
    lanes = clock.run()
    if lanes is None:
        return None
    schedule = Schedule("search", len(stage_to_rank), num_microbatches, lanes, tuple(stage_to_rank))
    spans = [rank.free_at - rank.began for rank in clock.ranks]
    return schedule, max(rank.free_at for rank in clock.ranks), max(spans)
