"""DualPipeV (DeepSeek's DualPipe 2024, cut in half by Sea AI Lab): V shape, a forward and a backward run as a pair.

Rank r holds stages r and 2P - 1 - r. In the middle every forward is paired with a backward of another micro-batch, so
that the messages of one half can hide behind the computing of the other; backward is split at both ends only. The
order is torch's ScheduleDualPipeV (which takes M >= 2P only); N is max(M, 2P), and fewer micro-batches are those N
without the surplus. 0 and 1 are the two stages, + is a pair, W the oldest queued weight gradient of either:

    lane = F0 * 2(P-r-1)   (F0 F1) * (r+1)   (I1 W F1) * (P-r-1)
           (F0+B1 F1+B0) * (N - 2P + r + 1), on the last rank the first of them F0 B1 F1+B0
           (B1 F1+B0) * (P-r-1)   (B1 B0) * (r+1), the second half of it I for B   (W I0) * (P-r-1)   W * (r+1)
"""

from __future__ import annotations

from plait.parallel.schedules.action import Action
from plait.parallel.schedules.schedule import Schedule
from plait.parallel.schedules.shapes import LaneWriter, require_sizes, vee


def dual_pipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two stages per rank; any M. Largest peak of live activations min(P + 1/2, M) shares of a rank, 2P + 1 stages.

    With F = I = W = 1/2 and B = 1 per stage the makespan is 3 M + (P - 1)/2 for M >= 2P, as ZB-V's; for fewer it is
    2 M + (5 P - 1)/2, less 1 for M <= P.
    """
    require_sizes("dual_pipe_v", num_ranks=num_ranks, num_microbatches=num_microbatches)
    total = max(num_microbatches, 2 * num_ranks)
    return vee("dual_pipe_v", num_microbatches, [_lane(rank, num_ranks, total) for rank in range(num_ranks)])


def _lane(rank: int, num_ranks: int, total: int) -> list[Action]:
    """The lane of one rank for `total` >= 2P micro-batches."""
    after = num_ranks - rank - 1  # ranks below this one
    num_pairs = total - 2 * num_ranks + rank + 1
    lane = LaneWriter(rank, 2 * num_ranks - 1 - rank)
    lane.put("F0", 2 * after)
    lane.put("F0 F1", rank + 1)
    lane.put("I1 W F1", after)
    lane.put("F0+B1 F1+B0" if after else "F0 B1 F1+B0")
    lane.put("F0+B1 F1+B0", num_pairs - 1)
    lane.put("B1 F1+B0", after)
    last = ["B1", "B0"] * ((rank + 1) // 2) + (["B1", "I0"] if rank % 2 == 0 else [])
    lane.put(" ".join(last))
    lane.put("I1 I0", rank + 1 - len(last) // 2)
    lane.put("W I0", after)
    lane.put("W", rank + 1)
    return lane.lane
