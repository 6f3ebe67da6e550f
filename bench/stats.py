"""The statistics that tables show: medians, their intervals, paired ratios. Pure functions on lists of seconds."""

from __future__ import annotations

import math
from statistics import median


def median_interval(samples: list[float], confidence: float = 0.95) -> tuple[float, float]:
    """Returns the distribution-free confidence interval of the median, from order statistics.

    The number of samples below the true median is Binomial(n, 1/2), so the k-th smallest and k-th largest samples
    enclose it with probability 1 - 2 P(X < k). Fewer than 6 samples allow no 95 % interval: their range is returned.
    """
    if not samples:
        raise ValueError("samples: empty; a median needs at least one")
    ordered = sorted(samples)
    n = len(ordered)
    dropped, tail = 0, 0.0  # dropped at each end: the most that keeps 2 P(X < dropped) <= 1 - confidence
    for count in range(n // 2):
        tail += math.comb(n, count) / 2.0**n
        if 2 * tail > 1 - confidence:
            break
        dropped = count + 1
    edge = max(dropped - 1, 0)
    return ordered[edge], ordered[n - 1 - edge]


def paired_ratio(ours: list[float], peer: list[float]) -> tuple[float, float, float]:
    """Returns (median, low, high) of peer / ours over paired rounds: above 1, ours is faster by that factor.

    Raises ValueError where the two were not measured in the same rounds.
    """
    if len(ours) != len(peer):
        raise ValueError(f"peer: {len(peer)} samples beside {len(ours)}; ratios are paired by round")
    ratios = [b / a for a, b in zip(ours, peer, strict=True)]
    low, high = median_interval(ratios)
    return median(ratios), low, high
