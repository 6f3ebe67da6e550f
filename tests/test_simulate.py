"""The price of a schedule: closed forms, published figures, and how costs and messages enter. Pure, no processes."""

from __future__ import annotations

from fractions import Fraction

import pytest

from plait.parallel.schedules import Costs, gpipe, interleaved, one_f_one_b, parse_csv, timeline
from plait.parallel.schedules.action import COMPUTE
from tests.torch_schedules import torch_csv

# P = 4, M = 8, F = 1, B = 2, I = W = 1 per rank: makespan, bubble, peak of live activations in shares of a rank
FACTS = [
    ("gpipe", lambda: gpipe(4, 8), 33, 0.273, 8),
    ("1f1b", lambda: one_f_one_b(4, 8), 33, 0.273, 4),
    ("interleaved v2", lambda: interleaved(4, 2, 8), 28.5, 0.158, 5.5),
    ("interleaved v4", lambda: interleaved(4, 4, 8), 26.25, 0.086, 4.75),
    ("looped BFS v2", lambda: parse_csv(torch_csv("ScheduleLoopedBFS", 4, 2, 8)), 28.5, 0.158, 8),
    ("ZB-H1", lambda: parse_csv(torch_csv("ScheduleInterleavedZeroBubble", 4, 1, 8)), 27, 0.111, 4),
    ("interleaved ZB v2", lambda: parse_csv(torch_csv("ScheduleInterleavedZeroBubble", 4, 2, 8)), 25.5, 0.059, 4),
    ("ZB-V", lambda: parse_csv(torch_csv("ScheduleZBVZeroBubble", 4, 2, 8)), 25.5, 0.059, 4),
    ("DualPipeV", lambda: parse_csv(torch_csv("ScheduleDualPipeV", 4, 2, 8)), 25.5, 0.059, 4.5),
]


@pytest.mark.parametrize("make, makespan, bubble, peak", [f[1:] for f in FACTS], ids=[f[0] for f in FACTS])
def test_known_figures(make, makespan, bubble, peak):
    timeline = make().simulate()
    assert timeline.makespan == makespan and round(timeline.bubble, 3) == bubble
    assert timeline.peak_activations == peak


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("m", [1, 2, 7, 16, 32])
def test_bubble_over_ideal_of_gpipe_and_1f1b_is_p_minus_1_over_m(p, m):
    for schedule in (gpipe(p, m), one_f_one_b(p, m)):
        timeline = schedule.simulate()
        assert timeline.bubble_over_ideal == float(Fraction(p - 1, m))
        assert timeline.bubble == float(Fraction(p - 1, m + p - 1))


@pytest.mark.parametrize("p, v", [(1, 2), (2, 2), (3, 3), (4, 2), (4, 4), (8, 3)])
def test_bubble_over_ideal_of_interleaved_for_any_m_from_p_on(p, v):
    """(p-1)/(vm), exactly, also where p does not divide m."""
    for m in range(p, 3 * p + 2):
        timeline = interleaved(p, v, m).simulate()
        assert timeline.bubble_over_ideal == float(Fraction(p - 1, v * m)), m
        assert timeline.makespan == float(3 * m + Fraction(3 * (p - 1), v)), m


@pytest.mark.parametrize("p, v, m", [(2, 2, 4), (4, 2, 8), (4, 4, 8), (8, 2, 16), (3, 3, 6)])
def test_peak_of_interleaved_is_p_times_1_plus_p_minus_1_over_pv(p, v, m):
    assert interleaved(p, v, m).simulate().peak_activations == float(p * (1 + Fraction(p - 1, p * v)))


# p 8, milliseconds: TF, TB (input), TW, Tc, m -> bubble rate of 1F1B as the zero-bubble paper prints it (1.5B model)
PUBLISHED = [(18.522, 18.086, 9.337, 0.601, 24, 0.2431), (18.546, 18.097, 9.321, 0.762, 64, 0.1240)]


@pytest.mark.parametrize("tf, tb, tw, tc, m, rate", PUBLISHED)
def test_published_bubble_rate_of_1f1b(tf, tb, tw, tc, m, rate):
    costs = Costs(forward=tf, backward=tb + tw, send=tc)
    assert round(one_f_one_b(8, m).simulate(costs).span_bubble, 4) == rate


def test_costs_per_stage_and_latency_enter():
    """F of stage 0 takes 3, of stage 1 takes 5; a message 10; B 1 and 2: all on one path for M = 1."""
    costs = Costs(forward=[3, 5], backward=[1, 2], send=[10, 20])
    timeline = gpipe(2, 1).simulate(costs)
    (first, last), (second, third) = [[e for e in lane if e.action.op in COMPUTE] for lane in timeline.lanes]
    assert (first.start, first.end) == (0, 3)
    assert (second.start, second.end, second.wait) == (13, 18, 13)
    assert (third.start, third.end) == (18, 20)
    assert (last.start, last.end, last.wait) == (40, 41, 37)
    assert timeline.makespan == 41 and timeline.busy == (4, 7)
    assert timeline.bubble == pytest.approx(1 - 11 / 82)
    assert timeline.bubble_per_rank == pytest.approx((1 - 4 / 41, 1 - 7 / 41))


def test_stages_on_one_rank_pay_no_latency():
    schedule = parse_csv("0F0,1F0,1B0,0B0\n")
    assert schedule.simulate(Costs(send=100.0)).makespan == 6


def test_costs_of_wrong_length_are_refused():
    with pytest.raises(ValueError, match="costs.backward has 2 entries for 4 stages"):
        one_f_one_b(4, 8).simulate(Costs(backward=[1, 2]))


def test_span_is_not_makespan():
    """The last rank starts at 1, ends at 8 and never waits between; the zero-bubble paper counts from its start."""
    timeline = parse_csv("0F0,0I0,0W0\n1F0,1I0,1W0\n").simulate(Costs(weight=[1, 5]))
    assert timeline.makespan == 8
    assert timeline.span_bubble == 0
    assert timeline.bubble == 1 - (3 + 7) / 16


def test_no_action_starts_before_what_it_needs():
    for schedule in (interleaved(3, 2, 7), one_f_one_b(4, 6)):
        timeline = schedule.simulate(Costs(send=0.25))
        ends = {e.action: e.end for lane in timeline.lanes for e in lane}
        for lane in timeline.lanes:
            assert all(later.start >= earlier.end for earlier, later in zip(lane, lane[1:], strict=False))
            for event in lane:
                stage, op, m = event.action[:3]
                if op == "F" and stage > 0:
                    assert event.start >= ends[event.action._replace(stage=stage - 1)] + 0.25
                if op == "B" and stage < schedule.num_stages - 1:
                    assert event.start >= ends[event.action._replace(stage=stage + 1)] + 0.25


def test_measured_events_make_a_timeline_too():
    a, b = one_f_one_b(1, 1).lanes[0][:2]
    made = timeline("measured", [[(a, 10.0, 11.0, 0.0), (b, 12.0, 14.0, 1.0)]], 1.0)
    assert made.makespan == 4.0 and made.busy == (3.0,) and made.bubble == 0.25
    assert made.lanes[0][1].start == 2.0 and made.lanes[0][1].wait == 1.0
