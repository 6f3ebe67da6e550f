"""Verdicts: the exact numbers of the test behind them, their false rates under four noise models, and their power.

Simulations go through the fake device and the timer, as a measurement does. Seeds are fixed: nothing here can flake.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import product

import pytest

from plait.bench.aa import fake_suite, fake_trials
from plait.bench.fake_device import NOISE_MODELS
from plait.bench.stats import hodges_lehmann, holm, rate_bound, signed_rank_p
from plait.bench.verdict import Paired, Rule, Verdict, confirmed, decide, pooled, process_ratio

RULE = Rule()
MOST_FALSE, LEAST_FOUND = 0.01, 0.95  # of A/A cases and of cases 5 % slower, by one run of five processes
UP, DOWN, FLAT = (1.05,) * 5, (0.95,) * 5, (1.001, 0.999, 1.0005, 1.002, 0.9985)


def case(ratios: tuple[float, ...], name: str = "c", base_s: float = 1e-3) -> Paired:
    return Paired(name, ratios, base_s)


def verdict(ratios: tuple[float, ...], **kwargs: float) -> Verdict:
    return decide([case(ratios, **kwargs)], RULE)[0].verdict


# ---- the statistics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values", [[1.0], [3.0, -1.0, 2.0], [1.0, 1.0, -1.0, 2.0], [0.0, 1.0, -2.0, 2.0, 5.0, -3.0], [-1.0, -2.0, -3.0]]
)
def test_signed_rank_p_counts_every_choice_of_signs(values):
    sizes = sorted(map(abs, values))
    ranks = [sum(i + 1 for i, s in enumerate(sizes) if s == abs(v)) / sizes.count(abs(v)) for v in values]
    observed = sum(rank for rank, v in zip(ranks, values, strict=True) if v > 0)
    sums = [sum(r for r, up in zip(ranks, signs, strict=True) if up) for signs in product([0, 1], repeat=len(ranks))]
    assert signed_rank_p(values) == sum(s >= observed for s in sums) / 2 ** len(values)


def test_signed_rank_p_of_the_published_table():
    # Hollander and Wolfe, table A.4: P(T+ >= 15) = 0.031 for n = 5; 0.053 and 0.010 for 44 and 50 of n = 10
    assert signed_rank_p([1, 2, 3, 4, 5]) == 1 / 32
    negative = {1, 4, 6}  # 55 - 11 = 44
    assert round(signed_rank_p([-v if v in negative else v for v in range(1, 11)]), 3) == 0.053
    assert round(signed_rank_p([-v if v == 5 else v for v in range(1, 11)]), 3) == 0.010
    assert signed_rank_p([]) == 1.0


def test_the_interval_has_no_ends_below_five_values_and_is_their_range_at_five():
    assert hodges_lehmann([1.0, 2.0, 3.0, 4.0], 0.05) == (2.5, -math.inf, math.inf)
    assert hodges_lehmann([5.0, 1.0, 3.0, 2.0, 9.0], 0.05) == (3.5, 1.0, 9.0)
    with pytest.raises(ValueError, match="empty"):
        hodges_lehmann([], 0.05)


@pytest.mark.parametrize("count", [5, 8, 11])
def test_the_interval_is_where_the_test_does_not_reject(count):
    draw = random.Random(count)
    values = [draw.gauss(0.3, 1.0) for _ in range(count)]
    _, low, high = hodges_lehmann(values, 0.05)
    for edge, sign in ((low, 1), (high, -1)):
        assert signed_rank_p([sign * (v - edge + sign * 1e-9) for v in values]) <= 0.05
        assert signed_rank_p([sign * (v - edge - sign * 1e-9) for v in values]) > 0.05


def test_holm_of_a_worked_example():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.03], family=10) == pytest.approx([0.3])
    assert holm([]) == []


def test_rate_bound_is_the_rule_of_three_and_the_published_interval():
    assert rate_bound(0, 1000) == pytest.approx(3 / 1000, rel=0.01)
    assert rate_bound(1, 10) == pytest.approx(0.3942, abs=1e-3)  # one-sided 95 %, 1 of 10
    assert rate_bound(4, 4) == 1.0
    with pytest.raises(ValueError, match="5 of 4"):
        rate_bound(5, 4)


# ---- the rule -----------------------------------------------------------------------------------------------------


def test_each_verdict_has_its_case():
    assert [verdict(r) for r in (UP, DOWN, FLAT)] == [Verdict.SLOWER, Verdict.FASTER, Verdict.SAME]
    assert verdict((1.05, 1.05, 1.05, 1.05, 0.99)) == Verdict.INCONCLUSIVE  # one process disagrees
    assert not decide([case((1.05, 1.05, 1.05, 1.05, 0.99))], RULE)[0].suspect  # nor is it measured again: p is 0.06
    assert verdict((1.01,) * 5) == Verdict.SAME  # real, but within the bound


def test_four_processes_are_never_enough():
    decision = decide([case((2.0,) * 4)], RULE)[0]
    assert decision.verdict == Verdict.INCONCLUSIVE and decision.reason == "processes: 4; need 5"


def test_a_change_below_the_absolute_floor_is_no_change():
    assert verdict((1.05,) * 5, base_s=2e-6) == Verdict.SAME  # 0.1 us
    assert verdict((1.2,) * 5, base_s=2e-6) == Verdict.SLOWER  # 0.4 us


def test_many_cases_need_more_agreeing_processes():
    crowd = [case(UP, "slow"), *(case(FLAT, f"flat {i}") for i in range(9))]
    first = decide(crowd, RULE)[0]
    assert (first.verdict, first.suspect) == (Verdict.INCONCLUSIVE, True)
    assert first.reason == "suspect; 10 cases need 8 agreeing processes" and first.p == pytest.approx(10 / 32)
    assert decide([case(UP * 2, "slow"), *crowd[1:]], RULE)[0].verdict == Verdict.SLOWER


def test_the_family_counts_cases_that_are_not_given():
    assert decide([case(UP)], RULE, family=10)[0].verdict == Verdict.INCONCLUSIVE


def test_a_suspect_is_measured_again_alone_and_judged_by_all_its_processes():
    asked = []

    def measure(names: list[str]) -> list[Paired]:
        asked.append(names)
        return [case(UP if name == "slow" else FLAT, name) for name in names]

    names = [f"flat {i}" for i in range(9)] + ["slow"]
    decisions = {d.name: d for d in confirmed(measure, names, RULE)[1]}
    assert asked == [names, ["slow"]]
    assert (decisions["slow"].verdict, decisions["slow"].processes) == (Verdict.SLOWER, 10)
    assert decisions["flat 0"].verdict == Verdict.SAME


def test_an_alarm_that_does_not_come_again_is_no_alarm():
    for second in (FLAT, DOWN):
        runs = iter([[case(UP)], [case(second)]])
        assert confirmed(lambda names, runs=runs: next(runs), ["c"], RULE)[1][0].verdict == Verdict.INCONCLUSIVE


def test_a_confirming_run_without_the_suspect_is_refused():
    with pytest.raises(ValueError, match="lacks c, which the first run suspects"):
        pooled([case(UP)], [case(UP, "other")], RULE)


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: Rule(alpha=0.7), "alpha: 0.7"),
        (lambda: Rule(bound=0), "bound: 0"),
        (lambda: Paired("c", (), 1.0), "c: ratios"),
        (lambda: Paired("c", (1.0, math.nan), 1.0), "must be finite"),
        (lambda: Paired("c", (1.0,), 0.0), "must be finite and > 0"),
        (lambda: process_ratio([], [1.0], False), "a ratio needs both"),
        (lambda: process_ratio([1.0], [1.0, 2.0], True), "paired by round"),
    ],
)
def test_what_cannot_be_judged_is_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_a_ratio_of_one_process_is_paired_where_rounds_are_common():
    base, head = [1.0, 3.0, 1.0, 3.0], [2.0, 6.0, 2.0, 6.0]
    assert process_ratio(base, head, True) == 2.0 == process_ratio(base, head, False)
    assert process_ratio([1.0, 1.0, 9.0], [1.1, 1.1, 9.9], True) == pytest.approx(1.1)


# ---- how often it is wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", NOISE_MODELS)
def test_things_that_do_not_differ_get_few_false_verdicts(model):
    (tally,) = fake_trials(RULE, suites=100, cases=10, processes=5, seed=39, models=[model])
    assert tally.cases == 1000
    assert tally.first_false / tally.cases <= MOST_FALSE, "one run, each case alone"
    assert tally.false_cases / tally.cases <= MOST_FALSE / 10, "after the confirming run, corrected"
    assert tally.false_suites / tally.suites <= RULE.alpha


@pytest.mark.parametrize("model", NOISE_MODELS)
def test_five_percent_slower_is_found_by_five_processes(model):
    draw = random.Random(f"power {model}")
    found = Counter(
        decide(fake_suite(NOISE_MODELS[model], 5, draw, ["c"], 1.05), RULE)[0].verdict for _ in range(400)
    )
    assert found[Verdict.SLOWER] >= LEAST_FOUND * 400
    assert found[Verdict.FASTER] == found[Verdict.SAME] == 0


@pytest.mark.parametrize("model", NOISE_MODELS)
def test_five_percent_slower_is_found_among_others_after_the_confirming_run(model):
    draw, noise, found = random.Random(f"suite {model}"), NOISE_MODELS[model], 0
    names = ["slow", "a", "b", "c", "d"]

    def measure(asked: list[str]) -> list[Paired]:
        return [fake_suite(noise, 5, draw, [name], 1.05 if name == "slow" else 1.0)[0] for name in asked]

    for _ in range(60):
        decisions = confirmed(measure, names, RULE)[1]
        found += decisions[0].verdict == Verdict.SLOWER
        assert all(d.verdict in (Verdict.SAME, Verdict.INCONCLUSIVE) for d in decisions[1:])
    assert found >= LEAST_FOUND * 60


def test_without_the_bound_there_would_be_many_false_verdicts():
    """The simulation can see a bad rule: a bound of nothing fails it."""
    bare, draw = Rule(bound=1e-9, floor_s=0.0), random.Random(5)
    wrong = sum(decide(fake_suite(NOISE_MODELS["iid"], 5, draw, ["c"]), bare)[0].suspect for _ in range(400))
    assert wrong / 400 > 3 * MOST_FALSE
