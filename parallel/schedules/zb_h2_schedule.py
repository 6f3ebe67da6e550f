"""ZB-H2 (Qi et al. 2023): ZB-H1 with twice the warm-up, so that no rank waits once it has started.

Forwards fill the time before the first backward comes back, weight gradients the time after the last: every rank
works without a pause, each a step later than the one before, a parallelogram. The price is memory, 2P - 1
micro-batches between F and W on every rank, and an optimizer that does not wait for all ranks at once.

The lane is ZB-H1's with a warm-up of F * min(2 (P - r - 1), M) and up to 2r weight gradients queued.
"""

from __future__ import annotations

from plait.parallel.schedules.schedule import Schedule
from plait.parallel.schedules.zb_h1_schedule import split_1f1b


def zb_h2(num_stages: int, num_microbatches: int) -> Schedule:
    """One stage per rank; any M. Peak of live activations min(2 (P - r) - 1, M), of queued ones min(2r + 1, M).

    With F = I = W = 1 and M >= 2P - 1 no rank idles inside its span (`.span_bubble` 0), which is 3M; the makespan is
    max(3 M + P - 1, 2 M + 2 P - 1), as ZB-H1's. In general the bubble inside a span is (P - 1)(F + I - 2W).
    """
    return split_1f1b("zb_h2", num_stages, num_microbatches, depth=2)
