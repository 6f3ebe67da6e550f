"""1F1B (PipeDream-flush): a backward as soon as there is one; rank r holds at most P - r micro-batches.

lane   = warmup steady cooldown REDUCE_GRAD
warmup: F * min(P - r - 1, M)      steady: (F B)*      cooldown: B*
"""

from __future__ import annotations

from plait.parallel.schedules.action import Action, Op
from plait.parallel.schedules.schedule import Schedule


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """One stage per rank; any M. Peak of live activations min(P - r, M); bubble over ideal time (P - 1) / M."""
    lanes = []
    for stage in range(num_stages):
        num_warmup = min(num_stages - stage - 1, num_microbatches)
        lane = [Action(stage, Op.F, m) for m in range(num_warmup)]
        for m in range(num_microbatches - num_warmup):
            lane += [Action(stage, Op.F, num_warmup + m), Action(stage, Op.B, m)]
        lane += [Action(stage, Op.B, m) for m in range(num_microbatches - num_warmup, num_microbatches)]
        lanes.append((*lane, Action(stage, Op.REDUCE_GRAD)))
    return Schedule("1f1b", num_stages, num_microbatches, tuple(lanes), tuple(range(num_stages)))
