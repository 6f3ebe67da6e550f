"""ZB-V (Qi et al. 2024): two stages per rank in V shape and split backward; no bubble in the middle, memory of 1F1B.

Rank r holds stages r and 2P - 1 - r, so that the last rank turns round without a message and the loss is on rank 0
with the tokens. The order is the one of the paper for F = I = W and that of torch's ScheduleZBVZeroBubble; N is
max(M, 2P - 1), and fewer micro-batches are those N without the surplus. 0 and 1 are the two stages:

    lane = F0 * (2(P-r) - 1)   (F1 F0) * r   (F1 I1 W1) * (P-r)
           (F0 I0 W0 F1 I1 W1) * (N - 2P + r + 1)   (I0 W0 F1 I1 W1) * (P-r-1)
           (I0 I1) * r   (I0 W0) * (P-r)   W1 * r   W0 * r
"""

from __future__ import annotations

from plait.parallel.schedules.action import Action
from plait.parallel.schedules.schedule import Schedule
from plait.parallel.schedules.shapes import LaneWriter, require_sizes, vee


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two stages per rank; any M. Largest peak of live activations min(P, M) shares of a rank (2P stages at most).

    With F = I = W = 1/2 per stage the makespan is max(3 M + (P - 1)/2, 2 M + 2 P - 1), the first for
    M >= (3P - 1)/2; no rank idles inside its span for M >= 2P - 1.
    """
    require_sizes("zb_v", num_ranks=num_ranks, num_microbatches=num_microbatches)
    total = max(num_microbatches, 2 * num_ranks - 1)
    return vee("zb_v", num_microbatches, [_lane(rank, num_ranks, total) for rank in range(num_ranks)])


def _lane(rank: int, num_ranks: int, total: int) -> list[Action]:
    """The lane of one rank for `total` >= 2P - 1 micro-batches."""
    after = num_ranks - rank - 1  # ranks below this one
    lane = LaneWriter(rank, 2 * num_ranks - 1 - rank)
    lane.put("F0", 2 * after + 1)
    lane.put("F1 F0", rank)
    lane.put("F1 I1 W1", after + 1)
    lane.put("F0 I0 W0 F1 I1 W1", total - 2 * num_ranks + rank + 1)
    lane.put("I0 W0 F1 I1 W1", after)
    lane.put("I0 I1", rank)
    lane.put("I0 W0", after + 1)
    lane.put("W1", rank)
    lane.put("W0", rank)
    return lane.lane
