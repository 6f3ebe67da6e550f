"""How often to save: the interval at which saving and repeating lost work together cost least.

Pure arithmetic, no clock (trigger.py has it). The one idea (Young 1974, Daly 2006): a save that holds training for s
costs s in every interval T; a failure, every M on average, costs half an interval and what was not yet durable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """seconds: of training between two saves. waste: share of all time that goes to saving and to failures, of which
    `saving` is the stalls alone. limit: what bounds it: "" (the optimum itself), "disk" (a save must be durable
    before the next), or "max"."""

    seconds: float
    waste: float
    saving: float
    limit: str


def best_interval(
    stall_s: float, mtbf_s: float, durable_s: float = 0.0, restart_s: float = 0.0, max_s: float = math.inf
) -> Interval:
    """Returns the interval of least waste for saves that hold training for `stall_s` and are durable `durable_s`
    after the call, under failures every `mtbf_s` (of the whole job) after which `restart_s` pass before training goes
    on.

    ValueError for numbers that are not positive (stall_s, durable_s, restart_s: negative) or not finite.
    """
    for name, value in (("stall_s", stall_s), ("durable_s", durable_s), ("restart_s", restart_s)):
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name}={value}: must be finite and at least 0")
    if not (0.0 < mtbf_s < math.inf and max_s > 0.0):
        raise ValueError(f"mtbf_s={mtbf_s}, max_s={max_s}: must be above 0, and mtbf_s finite")
    seconds, limit = daly(stall_s, mtbf_s), ""
    if seconds < DISK_ROOM * durable_s:
        seconds, limit = DISK_ROOM * durable_s, "disk"
    if seconds > max_s:
        seconds, limit = max_s, "max"
    saving = stall_s / (seconds + stall_s) if seconds else 0.0
    lost = (seconds / 2 + durable_s + restart_s) / mtbf_s
    return Interval(seconds, min(1.0, saving + lost), saving, limit)


DISK_ROOM = 1.1  # an interval is at least this many times the time until a save is durable


def daly(stall_s: float, mtbf_s: float) -> float:
    """Returns the time between saves of least expected waste: sqrt(2 s M) and two more terms of its series, which
    matter from s/M of a percent on (Daly 2006, eq. 37); M itself once a save costs 2 M."""
    ratio = stall_s / (2.0 * mtbf_s)
    if ratio >= 1.0:
        return mtbf_s
    return math.sqrt(2.0 * stall_s * mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - stall_s
