"""GPipe: every forward, then every backward. Simplest, and it holds all M micro-batches at once.

lane = F0 .. F(M-1) B0 .. B(M-1) REDUCE_GRAD
"""

from __future__ import annotations

from plait.parallel.schedules.action import Action, Op
from plait.parallel.schedules.schedule import Schedule


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """One stage per rank. Peak of live activations M; bubble over ideal time (P - 1) / M."""
    lanes = []
    for stage in range(num_stages):
        forwards = [Action(stage, Op.F, m) for m in range(num_microbatches)]
        backwards = [Action(stage, Op.B, m) for m in range(num_microbatches)]
        lanes.append((*forwards, *backwards, Action(stage, Op.REDUCE_GRAD)))
    return Schedule("gpipe", num_stages, num_microbatches, tuple(lanes), tuple(range(num_stages)))
