"""Looped BFS (Lamy-Poirier 2023): interleaved GPipe. Each stage of a rank runs every micro-batch before the next one.

lane = F0 .. F(M-1) of each of the rank's stages upwards, then B0 .. B(M-1) of each downwards, REDUCE_GRAD after each

A stage's parameters are gathered once forward and once backward and its gradients are complete as early as can be,
which suits sharded parameters. torch's ScheduleLoopedBFS takes the backwards from the last micro-batch to the first;
here they go upwards, so that gradients are summed in the same order in every schedule of ours. The time is the same.
"""

from __future__ import annotations

from plait.parallel.schedules.action import Action, Op
from plait.parallel.schedules.schedule import Schedule, add_reduce_grad
from plait.parallel.schedules.shapes import require_sizes, stage_map


def looped_bfs(num_ranks: int, chunks: int, num_microbatches: int) -> Schedule:
    """`chunks` stages on each of `num_ranks` ranks; any M. All M micro-batches are live at once.

    Bubble over ideal time (P - 1) / (v M) for M >= P.
    """
    name = f"looped_bfs_v{chunks}"
    require_sizes("looped_bfs", num_ranks=num_ranks, chunks=chunks, num_microbatches=num_microbatches)
    lanes = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * chunks, num_ranks)
        lane = [Action(stage, Op.F, m) for stage in stages for m in range(num_microbatches)]
        lane += [Action(stage, Op.B, m) for stage in reversed(stages) for m in range(num_microbatches)]
        lanes.append(add_reduce_grad(lane))
    return Schedule(name, num_ranks * chunks, num_microbatches, tuple(lanes), stage_map(num_ranks, chunks))
