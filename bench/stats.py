"""The statistics of tables and verdicts: medians, intervals, paired ratios, the signed-rank test, Holm's correction.

Pure functions on lists of numbers; nothing here assumes a normal distribution. What they decide is in verdict.py.
"""

from __future__ import annotations

import math
from statistics import median

MIN_INTERVAL = 6  # samples: 2 * 2**-6 <= 5 %, and 2 * 2**-5 is not


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


def rank_sums(ranks: list[int]) -> list[int]:
    """Returns in how many of the 2^n choices of signs the positive ranks add up to 0, 1, ..., sum(ranks)."""
    counts = [1] + [0] * sum(ranks)
    for rank in ranks:
        for total in range(len(counts) - 1, rank - 1, -1):
            counts[total] += counts[total - rank]
    return counts


def signed_rank_p(values: list[float]) -> float:
    """Returns the exact one-sided p-value of "the values are centred at 0 or below".

    Wilcoxon's signed-rank test (Wilcoxon 1945; Hollander and Wolfe, Nonparametric Statistical Methods, 3.1): under
    the null hypothesis every sign is a fair coin, whatever the scale of the values. Ties share their mean rank, and
    the distribution is counted over those ranks; zeros keep their rank but never count as positive (conservative).
    The least value for n values is 2^-n: five agreeing processes give 0.031.
    """
    if not values:
        return 1.0
    sizes = sorted(abs(value) for value in values)
    first = {size: index for index, size in reversed(list(enumerate(sizes)))}
    # twice the mean rank of equal sizes: an integer
    doubled = [2 * first[abs(value)] + sizes.count(abs(value)) + 1 for value in values]
    observed = sum(rank for rank, value in zip(doubled, values, strict=True) if value > 0)
    return sum(rank_sums(doubled)[observed:]) / 2.0 ** len(values)


def hodges_lehmann(values: list[float], alpha: float) -> tuple[float, float, float]:
    """Returns (estimate, low, high) of the centre: the median of all means of two values, and its interval.

    Each end is missed with probability <= alpha: the interval inverts the signed-rank test (Hodges and Lehmann 1963;
    Hollander and Wolfe 3.2 and 3.3). Too few values for alpha (2^-n > alpha) give an interval without ends.
    """
    if not values:
        raise ValueError("values: empty; a centre needs at least one")
    n = len(values)
    means = sorted((values[i] + values[j]) / 2 for i in range(n) for j in range(i, n))
    counts, tail, dropped = rank_sums(list(range(1, n + 1))), 0, 0
    while tail + counts[dropped] <= alpha * 2**n:
        tail += counts[dropped]
        dropped += 1
    if dropped == 0:
        return median(means), -math.inf, math.inf
    return median(means), means[dropped - 1], means[-dropped]


def holm(p_values: list[float], family: int | None = None) -> list[float]:
    """Returns p-values adjusted for asking many questions at once (Holm 1979): reject where adjusted <= alpha.

    The chance of one false rejection or more is then <= alpha, however the questions depend on each other. family:
    how many questions were asked when that is more than are given here (the others count as p = 1).
    """
    size = max(len(p_values), family or 0)
    adjusted, worst = [1.0] * len(p_values), 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        worst = max(worst, min(1.0, (size - place) * p_values[index]))
        adjusted[index] = worst
    return adjusted


def rate_bound(count: int, trials: int, confidence: float = 0.95) -> float:
    """Returns the upper confidence bound of a rate seen as count of trials (Clopper and Pearson 1934)."""
    if not 0 <= count <= trials or trials < 1:
        raise ValueError(f"count: {count} of {trials} trials; need 0 <= count <= trials, trials >= 1")
    if count == trials:
        return 1.0
    low, high = count / trials, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        tail = sum(math.exp(log_binomial(trials, k, rate)) for k in range(count + 1))
        low, high = (rate, high) if tail > 1 - confidence else (low, rate)
    return high


def log_binomial(trials: int, count: int, rate: float) -> float:
    """Returns the log of the probability of exactly count of trials, for 0 < rate < 1."""
    ways = math.lgamma(trials + 1) - math.lgamma(count + 1) - math.lgamma(trials - count + 1)
    return ways + count * math.log(rate) + (trials - count) * math.log1p(-rate)
