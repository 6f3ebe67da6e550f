"""ZB-H1 (Qi et al. 2023): 1F1B with backward split; weight gradients fill the tail; memory of 1F1B's first rank.

I goes on to the rank before as early as it can, W waits until it fills a bubble. No rank holds more than P
micro-batches between F and W: where fewer forwards are live (P - r), more weight gradients are queued (r).

    lane   = warmup steady cooldown W* REDUCE_GRAD
    warmup: F * min(P - r - 1, M)   steady: (F I)* first, (F I W)* once more than r are queued   cooldown: (I W)*
"""

from __future__ import annotations

from plait.parallel.schedules.action import Action, Op
from plait.parallel.schedules.schedule import Schedule
from plait.parallel.schedules.shapes import require_sizes, stage_map


def zb_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """One stage per rank; any M. Peak of live activations min(P - r, M), of queued weight gradients min(r + 1, M).

    With F = I = W = 1 the makespan is max(3 M + P - 1, 2 M + 2 P - 1), the first for M >= P; in general the bubble is
    (P - 1)(F + I - W) for M >= P.
    """
    return split_1f1b("zb_h1", num_stages, num_microbatches, depth=1)


def split_1f1b(name: str, num_stages: int, num_microbatches: int, depth: int) -> Schedule:
    """ZB-H1 (depth 1) and ZB-H2 (depth 2): `depth` (P - r - 1) forwards warm up, `depth` r weight gradients wait."""
    require_sizes(name, num_stages=num_stages, num_microbatches=num_microbatches)
    lanes = []
    for stage in range(num_stages):
        num_warmup = min(depth * (num_stages - stage - 1), num_microbatches)
        forwards = [Action(stage, Op.F, m) for m in range(num_microbatches)]
        weights = [Action(stage, Op.W, m) for m in range(num_microbatches)]
        lane = forwards[:num_warmup]
        num_weights = 0
        for m in range(num_microbatches):
            lane += [*forwards[num_warmup + m : num_warmup + m + 1], Action(stage, Op.I, m)]
            if m - num_weights >= depth * stage or m >= num_microbatches - num_warmup:
                lane.append(weights[num_weights])
                num_weights += 1
        lanes.append((*lane, *weights[num_weights:], Action(stage, Op.REDUCE_GRAD)))
    return Schedule(name, num_stages, num_microbatches, tuple(lanes), stage_map(num_stages, 1))
