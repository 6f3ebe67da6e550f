"""The price of a schedule: closed forms, published figures, and how costs and messages enter. Pure, no processes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import pytest

from plait.model_config import MODELS, flop_per_token
from plait.parallel.schedules import (
    NAMES,
    Costs,
    LayerCosts,
    Part,
    balanced_layers,
    build,
    gpipe,
    interleaved,
    layer_costs,
    one_f_one_b,
    parse_csv,
    shared,
    split_layers,
    timeline,
    zb_h1,
)
from plait.parallel.schedules.action import COMPUTE
from plait.parallel.schedules.costs import peak_memory
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


# ---- messages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_product_that_crosses_ranks_is_one_message(name):
    """M outputs and M gradients per boundary between ranks, none where stages meet on one rank."""
    schedule = build(name, 3, 4)
    messages = schedule.simulate(Costs(send=0.5, send_grad=0.25)).messages
    place = schedule.stage_to_rank
    boundaries = [s for s in range(schedule.num_stages - 1) if place[s] != place[s + 1]]
    expected = {(s, "F", m, place[s], place[s + 1]) for s in boundaries for m in range(4)}
    expected |= {(s + 1, "G", m, place[s + 1], place[s]) for s in boundaries for m in range(4)}
    assert {message[:5] for message in messages} == expected and len(messages) == len(expected)
    assert all(m.end - m.start == pytest.approx(0.5 if m.kind == "F" else 0.25) for m in messages)


@pytest.mark.parametrize("p, m, send", [(2, 1, 1), (4, 8, 3), (3, 5, 2)])
def test_exposed_communication_of_gpipe_is_the_way_down_and_up(p, m, send):
    """Makespan (M + P - 1)(F + B) + 2 (P - 1) send: only the first message down and up each boundary is waited for.

    Rank r waits for r boundaries down before its first forward, which are made one after the other: send each is
    exposed only at its own boundary, the rest of the wait is a bubble.
    """
    line = gpipe(p, m).simulate(Costs(send=Fraction(send)))
    assert line.makespan == (m + p - 1) * 3 + 2 * (p - 1) * send
    assert sum(line.exposed_per_rank) == 2 * (p - 1) * send
    assert line.exposed_communication == pytest.approx(2 * (p - 1) * send / (p * line.makespan))
    assert gpipe(p, m).simulate().exposed_communication == 0


@pytest.mark.parametrize("name", NAMES)
def test_what_is_exposed_is_part_of_the_wait_and_of_the_bubble(name):
    line = build(name, 4, 6).simulate(Costs(send=0.375))
    assert all(0 <= event.exposed <= event.wait for lane in line.lanes for event in lane)
    for exposed, bubble in zip(line.exposed_per_rank, line.bubble_per_rank, strict=True):
        assert 0 < exposed <= bubble * line.makespan + 1e-9
    assert line.figures()["exposed_communication"] == line.exposed_communication <= line.bubble


# ---- uneven stages, embedding and head ---------------------------------------------------------------------------


@pytest.mark.parametrize("p, m", [(2, 3), (4, 8), (4, 2)])
def test_the_slowest_stage_sets_the_pace_of_gpipe(p, m):
    """Sum over stages of F + B, and M - 1 times the slowest: the closed form for uneven stages, at any place."""
    for slow in range(p):
        forward = [Fraction(7, 2) if stage == slow else Fraction(1) for stage in range(p)]
        costs = Costs(forward, [2 * f for f in forward], forward, forward)
        expected = 3 * (sum(forward) + (m - 1) * max(forward))
        assert gpipe(p, m).simulate(costs).makespan == float(expected)


def test_ideal_is_the_time_of_the_busiest_rank():
    """Not of the mean: uneven stages are no bubble of the schedule."""
    line = one_f_one_b(2, 4).simulate(Costs([1, 3], [2, 6], 1, 1))
    assert line.busy == (12, 36) and line.makespan == 39
    assert line.bubble_over_ideal == pytest.approx(39 / 36 - 1) and line.bubble == pytest.approx(1 - 48 / 78)


def test_layers_embedding_and_head_become_stages():
    """Six layers over four stages are 2, 2, 1, 1; the embedding is on the first, the head on the last."""
    costs = LayerCosts(6, Part(1, 2, 3, 10), Part(0, 0, 5, 1), Part(4, 4, 4, 7), send=0.5).stages(4)
    assert costs == Costs(
        [2, 2, 1, 5], [15, 10, 5, 13], [4, 4, 2, 6], [11, 6, 3, 7], 0.5, activation=[21, 20, 10, 17]
    )
    assert LayerCosts(6, Part(1, 2, 3), layers_of=(3, 1, 1, 1)).stages(4).forward == [3, 1, 1, 1]
    alone = LayerCosts(2, Part(1, 1, 1), Part(2, 2, 2), Part(3, 3, 3)).stages(1)
    assert (alone.forward, alone.backward, alone.activation) == ([7], [14], None)


@pytest.mark.parametrize(
    "layers_of, num_stages, message",
    [
        ((2, 2, 2), 2, "layers_of=.2, 2, 2.: must be 2 counts, one per stage, of 1 or more, that add up to 6"),
        ((2, 2), 2, "layers_of=.2, 2.: must be 2 counts"),
        ((0, 6), 2, "layers_of=.0, 6.: must be 2 counts"),
    ],
)
def test_layers_that_do_not_fit_the_stages_are_refused(layers_of, num_stages, message):
    with pytest.raises(ValueError, match=message):
        LayerCosts(6, Part(1, 1, 1), layers_of=layers_of).stages(num_stages)


@pytest.mark.parametrize("num_layers", [4, 7, 8, 13])
@pytest.mark.parametrize("place", [(0, 1), (0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0)], ids=str)
@pytest.mark.parametrize("ends", [(0, 0), (0, 3.5), (2, 0), (1, 2)], ids=str)
def test_balanced_layers_leave_the_busiest_rank_the_least_work(num_layers, place, ends):
    """Held against every way to cut the layers."""
    costs = LayerCosts(num_layers, Part(1, 1, 1), Part(ends[0], 0, 0), Part(0, ends[1], ends[1]))

    def busiest(counts):
        made = replace(costs, layers_of=tuple(counts)).stages(len(place))
        work = [f + b for f, b in zip(made.forward, made.backward, strict=True)]
        return max(sum(w for w, r in zip(work, place, strict=True) if r == rank) for rank in place)

    found = balanced_layers(costs, place)
    cuts = itertools.combinations(range(1, num_layers), len(place) - 1)
    ways = [[b - a for a, b in itertools.pairwise((0, *cut, num_layers))] for cut in cuts]
    assert list(found) in ways and busiest(found) == pytest.approx(min(map(busiest, ways)))
    if ends == (0, 0) and len(set(place)) == len(place):
        assert found == tuple(len(layers) for layers in split_layers(num_layers, len(place)))


@pytest.mark.parametrize("preset", MODELS)
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_flop_of_all_stages_are_those_of_the_model(preset, num_stages):
    """6 N + 12 l h q s per token, N without the embedding, with the head: exactly, as for the MFU."""
    model, seq = MODELS[preset], 64
    costs = layer_costs(
        dim=model.dim,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        ffn_dim=model.ffn_dim,
        vocab_size=model.vocab_size,
        seq=seq,
        rows=3,
    ).stages(num_stages)
    assert sum(costs.forward) + sum(costs.backward) == 3 * seq * flop_per_token(model, seq)
    assert [i + w for i, w in zip(costs.input, costs.weight, strict=True)] == costs.backward
    if num_stages > 1:  # all have as many layers; the last has the final norm and the head as well
        assert costs.forward[-1] - costs.forward[-2] == 2 * 3 * seq * model.dim * (model.vocab_size + 1)


# ---- memory and splitting ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("p, m", [(2, 3), (4, 8)])
def test_peak_memory_of_uneven_stages(p, m):
    """GPipe keeps M, 1F1B min(M, P - r) micro-batches of what the rank's own stage keeps."""
    sizes = [Fraction(stage + 1, 3) for stage in range(p)]
    assert gpipe(p, m).simulate(Costs(activation=sizes)).peak_memory == tuple(float(m * size) for size in sizes)
    peaks = one_f_one_b(p, m).simulate(Costs(activation=sizes)).peak_memory
    assert peaks == tuple(float(min(m, p - r) * size) for r, size in enumerate(sizes))


@pytest.mark.parametrize("deferred", [0, Fraction(1, 2), 1])
def test_queued_weight_gradients_keep_their_part(deferred):
    schedule = parse_csv("0F0,0I0,0F1,0I1,0W0,0W1\n")
    assert peak_memory(schedule, Costs(deferred=deferred)) == (max(1 + deferred, 2 * deferred),)
    assert peak_memory(schedule, Costs(deferred=deferred, split=False)) == (1,)


def test_a_stage_that_cannot_split_does_all_in_i():
    """Decision 15: I takes the time of B, W none; so ZB-H1 is 1F1B with more waiting."""
    costs = Costs(1, 2, 1, 1, split=False)
    lanes = zb_h1(3, 5).simulate(costs).lanes
    times = {e.action.op: e.end - e.start for lane in lanes for e in lane}
    assert (times["F"], times["I"], times["W"]) == (1, 2, 0)
    assert zb_h1(3, 5).simulate(costs).makespan >= one_f_one_b(3, 5).simulate(costs).makespan
    mixed = Costs(1, 2, 1, 1, split=[True, False, True])
    ends = {
        (e.action.stage, e.action.op): e.end - e.start for lane in zb_h1(3, 5).simulate(mixed).lanes for e in lane
    }
    assert (ends[0, "W"], ends[1, "W"], ends[2, "W"]) == (1, 0, 1) and ends[1, "I"] == 2


def test_numbers_are_a_ranks_share_in_everything():
    costs = shared(Costs(2, 4, 2, 2, 1, 0.5, activation=6, deferred=0.5, split=False), interleaved(2, 2, 2))
    assert costs == Costs([1] * 4, [2] * 4, [1] * 4, [1] * 4, 1, 0.5, [3] * 4, 0.5, False)
