"""FASTER, SLOWER, SAME or INCONCLUSIVE: what few processes allow to say of head against base. Measures nothing.

The unit is a fresh process, never a sample: samples of one process share its memory layout, its clock and its luck
(Kalibera and Jones, Rigorous benchmarking in reasonable time, ISMM 2013). A case is the list of its per-process
ratios head / base, and their logs are tested without a distribution:

- SLOWER: Wilcoxon's exact signed-rank test rejects "not slower", after Holm's correction over all cases of the suite,
  and the Hodges-Lehmann estimate is beyond the bound. FASTER likewise; the two directions are two families, each with
  the full alpha, because only one of them fails a gate.
- SAME: the interval that inverts this test lies within the bound, each end at alpha (two one-sided tests, Schuirmann
  1987). It is not corrected: a false SAME is a change that was missed, and no alarm.
- INCONCLUSIVE: everything else, with the reason.

Under A/A, base and head are exchangeable, so their log ratios are symmetric about 0, which is all the test assumes.
Five processes reach p = 0.031 and no less: alone that is a false alarm in 32, and the bound makes it fewer than one
in 100 (tests/test_verdict.py measures it). A suite of m cases needs log2(m / alpha) processes; `confirmed` measures
only the suspects again, and an alarm needs both runs: the pooled ratios pass the corrected test, and the second run
alone is beyond the bound on the same side. That keeps the level: asking for more only ever takes rejections away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

from plait.bench.stats import hodges_lehmann, holm, signed_rank_p


class Verdict(StrEnum):
    """What is said of one case. INVALID: a side's number cannot be true, so nothing is said of the ratio."""

    FASTER = "FASTER"
    SLOWER = "SLOWER"
    SAME = "SAME"
    INCONCLUSIVE = "INCONCLUSIVE"
    INVALID = "INVALID"


@dataclass(frozen=True)
class Rule:
    """alpha: chance of a false alarm in the whole suite, per direction. bound: least relative change that matters.
    floor_s: the least change in seconds that matters (0.2 us: what a queue and a timer add to a call, and take away);
    of two limits, the wider one holds."""

    alpha: float = 0.05
    bound: float = 0.02
    floor_s: float = 2e-7

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 0.5:
            raise ValueError(f"alpha: {self.alpha:g}; need 0 < alpha < 0.5")
        if not (self.bound > 0 and self.floor_s >= 0):
            raise ValueError(f"bound: {self.bound:g}, floor_s: {self.floor_s:g}; need bound > 0, floor_s >= 0")

    def processes(self, cases: int) -> int:
        """Returns how many agreeing processes pass the correction over so many cases."""
        return math.ceil(math.log2(max(cases, 1) / self.alpha))

    def limit(self, base_s: float) -> float:
        """Returns the least log ratio that matters for a case of base_s seconds."""
        return math.log1p(max(self.bound, self.floor_s / base_s))


@dataclass(frozen=True)
class Paired:
    """One case: head / base of every process, above 1 where head is slower, and base's time in seconds."""

    name: str
    ratios: tuple[float, ...]
    base_s: float

    def __post_init__(self) -> None:
        numbers = (*self.ratios, self.base_s)
        if not self.ratios or not all(math.isfinite(number) and number > 0 for number in numbers):
            raise ValueError(f"{self.name}: ratios {self.ratios}, base_s {self.base_s}; all must be finite and > 0")

    def with_more(self, other: Paired) -> Paired:
        """Returns the case with the processes of a second run."""
        return Paired(self.name, self.ratios + other.ratios, median([self.base_s, other.base_s]))


@dataclass(frozen=True)
class Decision:
    """A case's verdict. ratio and its interval are head / base; p is corrected and belongs to the ratio's direction;
    suspect: would be FASTER or SLOWER if it were the only case."""

    name: str
    verdict: Verdict
    ratio: float
    low: float
    high: float
    p: float
    processes: int
    suspect: bool
    reason: str


def process_ratio(base_s: Sequence[float], head_s: Sequence[float], same_rounds: bool) -> float:
    """Returns head / base of one process: the median of the rounds' ratios, or without common rounds of medians."""
    if not base_s or not head_s:
        raise ValueError(f"samples: {len(base_s)} of base, {len(head_s)} of head; a ratio needs both")
    if not same_rounds:
        return median(head_s) / median(base_s)
    if len(base_s) != len(head_s):
        raise ValueError(f"samples: {len(head_s)} of head beside {len(base_s)}; ratios are paired by round")
    return median(h / b for b, h in zip(base_s, head_s, strict=True))


def decide(cases: Sequence[Paired], rule: Rule, family: int | None = None) -> list[Decision]:
    """Returns the verdicts of a suite's cases; family: the number of cases where it is more than are given."""
    logs = [[math.log(ratio) for ratio in case.ratios] for case in cases]
    raw = [[signed_rank_p([sign * value for value in values]) for values in logs] for sign in (1, -1)]
    corrected = [holm(p_values, family) for p_values in raw]
    size = max(len(cases), family or 0)
    decisions: list[Decision] = []
    for index, case in enumerate(cases):
        estimate, low, high = hodges_lehmann(logs[index], rule.alpha)
        side = 0 if estimate > 0 else 1
        limit = rule.limit(case.base_s)
        suspect = abs(estimate) > limit and raw[side][index] <= rule.alpha
        verdict, reason = Verdict.INCONCLUSIVE, f"the interval reaches beyond {math.expm1(limit):.1%}"
        if suspect and corrected[side][index] <= rule.alpha:
            verdict, reason = (Verdict.SLOWER, Verdict.FASTER)[side], ""
        elif suspect:
            reason = f"suspect; {size} cases need {rule.processes(size)} agreeing processes"
        elif -limit <= low and high <= limit:
            verdict, reason = Verdict.SAME, ""
        elif math.isinf(low):
            reason = f"processes: {len(case.ratios)}; need {rule.processes(1)}"
        decisions.append(
            Decision(
                case.name,
                verdict,
                ratio=math.exp(estimate),
                low=math.exp(low),
                high=math.exp(high),
                p=corrected[side][index],
                processes=len(case.ratios),
                suspect=suspect,
                reason=reason,
            )
        )
    return decisions


def pooled(first: Sequence[Paired], second: Sequence[Paired], rule: Rule) -> list[Decision]:
    """Returns the verdicts of a run after its confirming run, which holds the first one's suspects or more.

    A suspect is judged by all its processes, and cleared when it does not come again; every other case by its first
    run, where it gave no alarm.
    """
    suspects = {decision.name for decision in decide(first, rule) if decision.suspect}
    again = {case.name: case for case in second}
    if missing := suspects - set(again):
        raise ValueError(f"confirming run: lacks {', '.join(sorted(missing))}, which the first run suspects")
    both = decide([case.with_more(again[case.name]) if case.name in suspects else case for case in first], rule)
    decisions = []
    for decision in both:
        if decision.name in suspects and decision.suspect:
            (alone,) = decide([again[decision.name]], rule)
            change, limit = math.log(alone.ratio), rule.limit(again[decision.name].base_s)
            if abs(change) <= limit or (change > 0) != (decision.ratio > 1):
                text = f"suspect, but its confirming run alone says {alone.ratio:.3f}"
                decision = replace(decision, verdict=Verdict.INCONCLUSIVE, suspect=False, reason=text)
        decisions.append(decision)
    return decisions


def confirmed(
    measure: Callable[[list[str]], list[Paired]], names: list[str], rule: Rule
) -> tuple[list[Decision], list[Decision]]:
    """Measures all cases, then the suspects once more in fresh processes: no alarm comes from one run alone.

    Returns what the first run says, and the verdicts.
    """
    first = measure(names)
    decisions = decide(first, rule)
    suspects = [decision.name for decision in decisions if decision.suspect]
    return decisions, pooled(first, measure(suspects), rule) if suspects else decisions
