"""The proof: every sound schedule passes, every broken one is named. Pure, no processes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plait.parallel.schedules import (
    NAMES,
    Action,
    Op,
    Schedule,
    ScheduleError,
    build,
    gpipe,
    interleaved,
    lower,
    one_f_one_b,
    pair,
    parse_csv,
)
from plait.parallel.schedules.action import COMPUTE, SENDS, singles
from tests.torch_schedules import torch_csv

SPLIT = ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"]


def edited(schedule: Schedule, rank: int, lane: list[Action]) -> Schedule:
    lanes = list(schedule.lanes)
    lanes[rank] = tuple(lane)
    return replace(schedule, lanes=tuple(lanes))


@st.composite
def sound(draw) -> Schedule:
    """A schedule of any kind, plain or lowered, whole or split backward."""
    p, v, m = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    kind = draw(st.sampled_from([*NAMES, "torch"]))
    if kind == "torch":
        name = draw(st.sampled_from(SPLIT))
        p = max(p, 2)
        schedule = parse_csv(torch_csv(name, p, 2, p * (2 + m % 2)), name)  # an M that each of them takes
    else:
        schedule = build(kind, p, m, v if kind in ("interleaved", "looped_bfs") else None)
    if draw(st.booleans()):
        schedule = schedule.with_tied()
    return lower(schedule) if draw(st.booleans()) else schedule


def oracle(original: Schedule, mutant: Schedule) -> bool:
    """An independent judge of mutants with the same actions: does every rank finish, every channel in order?"""
    place, last = original.stage_to_rank, original.num_stages - 1
    lowered = original.is_lowered
    lanes = [[s for a in lane for s in a.singles] for lane in mutant.lanes]
    groups = [[set(a.singles) for a in lane for _ in a.singles] for lane in mutant.lanes]
    at = [0] * len(lanes)
    done: set[Action] = set()

    def backward_done(stage: int, m: int | None) -> bool:
        return Action(stage, Op.B, m) in done or Action(stage, Op.I, m) in done

    def ready(a: Action, rank: int, together: set[Action]) -> bool:
        before = done - together
        back = lambda s: Action(s, Op.B, a.microbatch) in before or Action(s, Op.I, a.microbatch) in before  # noqa: E731
        local = lambda s: place[s] == rank or not lowered  # noqa: E731
        if a.op is Op.F and a.stage > 0:
            if local(a.stage - 1):
                return Action(a.stage - 1, Op.F, a.microbatch) in before
            sent, posted = Action(a.stage - 1, Op.SEND_F, a.microbatch), Action(a.stage, Op.RECV_F, a.microbatch)
            return sent in before and posted in before
        if a.op in (Op.B, Op.I):
            if Action(a.stage, Op.F, a.microbatch) not in before:
                return False
            if a.stage == last:
                return True
            if local(a.stage + 1):
                return back(a.stage + 1)
            sent, posted = Action(a.stage + 1, Op.SEND_B, a.microbatch), Action(a.stage, Op.RECV_B, a.microbatch)
            return sent in before and posted in before
        if a.op is Op.W:
            return Action(a.stage, Op.I, a.microbatch) in before
        if a.op is Op.SEND_F:
            return Action(a.stage, Op.F, a.microbatch) in before
        if a.op is Op.SEND_B:
            return back(a.stage)
        if a.op in (Op.TIE_GRAD, Op.REDUCE_GRAD):
            weights = {Action(a.stage, op, m) for op in (Op.B, Op.W) for m in range(original.num_microbatches)}
            missing = {w for lane in lanes for w in lane if w in weights} - before
            tie = Action(a.stage, Op.TIE_GRAD)
            untied = a.op is Op.REDUCE_GRAD and any(tie in lane for lane in lanes) and tie not in before
            return not missing and not untied
        return True

    moved = True
    while moved:
        moved = False
        for rank, lane in enumerate(lanes):
            while at[rank] < len(lane) and all(
                ready(half, rank, groups[rank][at[rank]]) for half in groups[rank][at[rank]]
            ):
                done.add(lane[at[rank]])
                at[rank] += 1
                moved = True
    if any(index < len(lane) for index, lane in zip(at, lanes, strict=True)):
        return False
    flat = [a for lane in lanes for a in lane]
    for stage in range(last):
        forward = [[a.microbatch for a in flat if a.op is Op.F and a.stage == s] for s in (stage, stage + 1)]
        back = [[a.microbatch for a in flat if a.op in (Op.B, Op.I) and a.stage == s] for s in (stage, stage + 1)]
        if forward[0] != forward[1] or back[0] != back[1]:
            return False
    step = {Op.SEND_F: (0, 1), Op.RECV_F: (-1, 0), Op.SEND_B: (0, -1), Op.RECV_B: (1, 0)}
    links: dict[tuple[int, int], dict[bool, list[tuple[int, int, int | None]]]] = {}
    for a in flat:
        if a.op in step:
            maker, user = a.stage + step[a.op][0], a.stage + step[a.op][1]
            ends = links.setdefault((place[maker], place[user]), {True: [], False: []})
            ends[a.op in SENDS].append((maker, user, a.microbatch))
    return all(ends[True] == ends[False] for ends in links.values())


# ---- mutations ---------------------------------------------------------------------------------------------------


@given(sound())
@settings(max_examples=150, deadline=None)
def test_sound_schedules_pass_and_the_oracle_agrees(schedule):
    schedule.check()
    assert oracle(schedule, schedule)


@given(sound(), st.data())
@settings(max_examples=250, deadline=None)
def test_a_dropped_action_is_caught(schedule, data):
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    lane = list(schedule.lanes[rank])
    dropped = lane.pop(data.draw(st.integers(0, len(lane) - 1)))
    with pytest.raises(ScheduleError) as caught:
        edited(schedule, rank, lane).check()
    assert caught.value.rank is not None and caught.value.action is not None, str(dropped)


@given(sound(), st.data())
@settings(max_examples=250, deadline=None)
def test_a_duplicated_action_is_caught(schedule, data):
    """Case 2, first half: torch's validation counts in sets and lets duplicates pass."""
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    lane = list(schedule.lanes[rank])
    again = lane[data.draw(st.integers(0, len(lane) - 1))]
    lane.insert(data.draw(st.integers(0, len(lane))), again)
    with pytest.raises(ScheduleError) as caught:
        edited(schedule, rank, lane).check()
    assert caught.value.rank == rank and "duplicated" in str(caught.value)


@given(sound(), st.data())
@settings(max_examples=250, deadline=None)
def test_an_action_on_the_wrong_rank_is_caught(schedule, data):
    assume(schedule.num_ranks > 1)
    source, target = data.draw(st.permutations(range(schedule.num_ranks)))[:2]
    lane = list(schedule.lanes[source])
    moved = lane.pop(data.draw(st.integers(0, len(lane) - 1)))
    other = list(schedule.lanes[target])
    other.insert(data.draw(st.integers(0, len(other))), moved)
    with pytest.raises(ScheduleError, match=f"rank {target}"):
        edited(edited(schedule, source, lane), target, other).check()


@given(sound(), st.data())
@settings(max_examples=400, deadline=None)
def test_a_swap_is_caught_exactly_when_it_breaks_something(schedule, data):
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    lane = list(schedule.lanes[rank])
    i = data.draw(st.integers(0, len(lane) - 1))
    j = data.draw(st.integers(i, min(len(lane) - 1, i + 6)))
    assume(i != j)
    lane[i], lane[j] = lane[j], lane[i]
    mutant = edited(schedule, rank, lane)
    if oracle(schedule, mutant):
        mutant.check()
    else:
        with pytest.raises(ScheduleError):
            mutant.check()


@given(sound(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_swap_of_two_microbatches_of_one_stage_is_caught(schedule, data):
    """The order of a channel: with untagged messages this is silent wrong data."""
    assume(schedule.num_stages > 1 and schedule.num_microbatches > 1)
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    lane = list(schedule.lanes[rank])
    op = data.draw(st.sampled_from([Op.F, Op.B]))
    stage = data.draw(st.sampled_from(schedule.stages_of(rank)))
    same = [i for i, a in enumerate(lane) if a.op is op and a.stage == stage]
    assume(len(same) > 1)
    i, j = data.draw(st.permutations(same))[:2]
    lane[i], lane[j] = lane[j], lane[i]
    with pytest.raises(ScheduleError):
        edited(schedule, rank, lane).check()


@pytest.mark.parametrize("lowered", [False, True])
def test_a_thousand_random_schedules_pass_and_their_mutants_do_not(lowered):
    """2,000 random (schedule, P, v, M), half of them lowered: each passes, and with one action dropped, one written
    twice and two swapped that must not be, each is refused. No judge is asked: these three are never harmless."""
    chance = random.Random(7 + lowered)
    for _ in range(1000):
        name, p, v, m = chance.choice(NAMES), chance.randint(1, 6), chance.randint(1, 4), chance.randint(1, 14)
        schedule = build(name, p, m, v if name in ("interleaved", "looped_bfs") else None)
        schedule = schedule.with_tied() if chance.random() < 0.5 else schedule
        schedule = lower(schedule) if lowered else schedule
        schedule.check()
        case = (schedule.name, p, m, schedule.tied)
        rank = chance.randrange(p)
        lane = list(schedule.lanes[rank])
        at, to = chance.randrange(len(lane)), chance.randrange(len(lane) + 1)
        mutants = {
            f"without {lane[at]}": [*lane[:at], *lane[at + 1 :]],
            f"{lane[at]} twice": [*lane[:to], lane[at], *lane[to:]],
            **swapped(schedule, lane, chance),
        }
        for what, mutant in mutants.items():
            with pytest.raises(ScheduleError) as caught:
                edited(schedule, rank, mutant).check()
                pytest.fail(f"{case} {what}: passed")
            assert caught.value.rank is not None and caught.value.action is not None, (case, what)


def swapped(schedule: Schedule, lane: list[Action], chance: random.Random) -> dict[str, list[Action]]:
    """Two actions of a stage change places: forwards of two micro-batches where there are any, else F and backward.

    Pairs are taken apart, which changes nothing that `check` asks.
    """
    flat = list(singles(lane))
    stage = chance.choice([a.stage for a in flat if a.op is Op.F])
    forwards = [i for i, a in enumerate(flat) if a.stage == stage and a.op is Op.F]
    if len(forwards) > 1 and schedule.num_stages > 1:
        i, j = sorted(chance.sample(forwards, 2))
    else:
        i = chance.choice(forwards)
        back = [k for k, a in enumerate(flat) if a.stage == stage and a.op in (Op.B, Op.I)]
        j = next(k for k in back if flat[k].microbatch == flat[i].microbatch)
    flat[i], flat[j] = flat[j], flat[i]
    return {f"{flat[i]} and {flat[j]} swapped": flat}


# ---- what the report says ----------------------------------------------------------------------------------------


def test_torchs_1f1b_list_is_rejected_naming_rank_and_action():
    """Case 1: the last rank's list lacks F0 and holds F8 for M = 8."""
    with pytest.raises(ScheduleError) as caught:
        parse_csv(torch_csv("Schedule1F1B", 4, 1, 8)).check()
    assert caught.value.rank == 3 and caught.value.action == "3F8"
    assert "no micro-batch 8; micro-batches are 0..7" in str(caught.value)


def test_a_missing_forward_is_named():
    schedule = one_f_one_b(4, 8)
    with pytest.raises(ScheduleError, match="rank 3 action 3F0: missing"):
        edited(schedule, 3, [a for a in schedule.lanes[3] if str(a) != "3F0"]).check()


def test_a_deadlock_across_ranks_prints_the_cycle():
    """Case 2, second half: each rank waits for the other."""
    text = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    parse_csv(text).check()
    crossed = text.replace("0F0,0F1,0B0", "0F0,0B0,0F1")  # 0B0 waits for 1B0, that for 1F1, that for 0F1
    with pytest.raises(ScheduleError) as caught:
        parse_csv(crossed).check()
    assert "rank 0 at 0B0 waits for 1B0 (rank 1); rank 1 at 1F1 waits for 0F1 (rank 0) -> back to the first" in str(
        caught.value
    )


def test_two_backwards_swapped_on_one_rank_only():
    schedule = gpipe(3, 3)
    lane = [Action.parse(t) for t in "1F0 1F1 1F2 1B1 1B0 1B2 1REDUCE_GRAD".split()]
    with pytest.raises(ScheduleError, match="rank 0 action 0B0: out of order: its channel carries 1B1 first"):
        edited(schedule, 1, lane).check()


def test_1f1b_with_blocking_sends_hangs_and_gpipe_does_not():
    """Case 5: forward receive and backward send of one pair as separate blocking operations."""
    for p in (2, 4, 8):
        gpipe(p, 8).check(blocking=True)
        one_f_one_b(p, 8).check()
        with pytest.raises(ScheduleError) as caught:
            one_f_one_b(p, 8).check(blocking=True)
        assert "deadlock with blocking sends and receives" in str(caught.value)
        assert "-> back to the first" in str(caught.value) and caught.value.rank is not None


def test_blocking_interleaved_is_judged_too():
    """Case 15: interleaved against 1F1B hangs were left open by a peer."""
    with pytest.raises(ScheduleError, match="deadlock with blocking"):
        interleaved(2, 2, 4).check(blocking=True)


def test_a_blocking_send_meets_its_own_receive_only():
    """Rank 1 receives, but another message than the one that rank 0 sends: not a rendezvous."""
    text = "0F0,2F0,0F1,2F1,2B0,0B0,2B1,0B1\n1F0,1F1,3F0,3F1,3B0,1B0,3B1,1B1\n"
    parse_csv(text).check()
    with pytest.raises(ScheduleError) as caught:
        parse_csv(text).check(blocking=True)
    assert "rank 0 at 2F0 sends 2F0 (rank 1); rank 1 at 1F1 waits for 0F1 (rank 0)" in str(caught.value)


def test_a_link_posted_out_of_order_is_rejected():
    """Case 7: communicators that ranks enqueue in different order."""
    lowered = lower(gpipe(2, 3))
    lane = list(lowered.lanes[1])
    first, second = (lane.index(Action(1, Op.RECV_F, m)) for m in (0, 1))
    lane[first], lane[second] = lane[second], lane[first]
    with pytest.raises(ScheduleError, match="rank 1 action 1RECV_F1: posted out of order: rank 0 sends 0F0"):
        edited(lowered, 1, lane).check()


@pytest.mark.parametrize(
    "gone, message",
    [
        ("0SEND_F1", "rank 0 action 0SEND_F1: missing: rank 1 needs it for 1F1"),
        ("1RECV_F1", "rank 1 action 1RECV_F1: missing: 1F1 needs it and rank 0 sends it"),
        ("1SEND_B0", "rank 1 action 1SEND_B0: missing: rank 0 needs it for 0B0"),
        ("0REDUCE_GRAD", "rank 0 action 0REDUCE_GRAD: missing"),
    ],
)
def test_the_missing_partner_is_named(gone, message):
    lowered = lower(gpipe(2, 2))
    rank = int(gone[0])
    with pytest.raises(ScheduleError, match=message):
        edited(lowered, rank, [a for a in lowered.lanes[rank] if str(a) != gone]).check()


def test_a_message_that_crosses_no_ranks_is_rejected():
    schedule = parse_csv("0F0,1F0,1B0,0B0\n")
    with pytest.raises(ScheduleError, match="0SEND_F0: no message"):
        edited(schedule, 0, [*schedule.lanes[0], Action(0, Op.SEND_F, 0)]).check()


@pytest.mark.parametrize(
    "schedule, message",
    [
        (replace(gpipe(2, 1), stage_to_rank=(0, 2)), "stage 1 is on rank 2 of 2"),
        (replace(gpipe(2, 1), stage_to_rank=(-1, 1)), "stage 0 is on rank -1 of 2"),
        (edited(gpipe(2, 1), 1, [*gpipe(2, 1).lanes[1], Action(2, Op.F, 0)]), "rank 1 action 2F0: no stage 2; "),
        (edited(gpipe(2, 1), 1, [*gpipe(2, 1).lanes[1], Action(-1, Op.F, 0)]), "rank 1 action -1F0: no stage -1; "),
        (edited(gpipe(2, 1), 0, [*gpipe(2, 1).lanes[0], Action(0, Op.UNSHARD, 3)]), "UNSHARD takes no micro-batch"),
        (edited(gpipe(2, 1), 0, [Action(0, Op.F), *gpipe(2, 1).lanes[0]]), "0F: no micro-batch None; .* are 0..0"),
    ],
)
def test_what_names_no_stage_rank_or_microbatch_is_refused_by_name(schedule, message):
    """A placement on a rank that is not there ended in an IndexError, or counted ranks from the end."""
    with pytest.raises(ScheduleError, match=message):
        schedule.check()


def test_half_a_backward_is_rejected():
    for text, action in (("0F0,0I0", "0W0"), ("0F0,0W0", "0I0"), ("0F0,0B0,0W0", "0W0"), ("0F0,0I0,0W0,0B0", "0I0")):
        with pytest.raises(ScheduleError) as caught:
            replace(gpipe(1, 1), lanes=(tuple(Action.parse(t) for t in f"{text},0REDUCE_GRAD".split(",")),)).check()
        assert caught.value.action == action


def test_a_pair_whose_halves_need_each_other_is_rejected():
    lane = (pair(Action(0, Op.F, 0), Action(0, Op.B, 0)), Action(0, Op.REDUCE_GRAD))
    with pytest.raises(ScheduleError, match="0B0: stands before 0F0"):
        replace(gpipe(1, 1), lanes=(lane,)).check()


def test_tie_grad_stands_between_backward_and_reduce():
    tied = one_f_one_b(2, 2).with_tied()
    lane = list(tied.lanes[0])
    lane[-1], lane[-2] = lane[-2], lane[-1]
    with pytest.raises(ScheduleError, match="0REDUCE_GRAD: stands before 0TIE_GRAD"):
        edited(tied, 0, lane).check()
    with pytest.raises(ScheduleError, match="0TIE_GRAD: missing"):
        edited(tied, 0, [a for a in tied.lanes[0] if a.op is not Op.TIE_GRAD]).check()
    with pytest.raises(ScheduleError, match="carries no tied weight"):
        replace(tied, tied=False).check()


def test_computing_on_a_sharded_stage_is_rejected():
    lowered = lower(interleaved(2, 2, 2), unshard=1)
    lane = list(lowered.lanes[0])
    lane.remove(next(a for a in lane if a.op is Op.UNSHARD))
    with pytest.raises(ScheduleError, match="missing 0UNSHARD before it"):
        edited(lowered, 0, lane).check()
    own = list(lowered.lanes[0])
    gathered = own.index(Action(0, Op.UNSHARD))
    edits = {
        "0UNSHARD: duplicated: the stage is gathered already": [own[gathered]],
        "rank 0 action 0F0: missing 0UNSHARD before it": [own[gathered], Action(0, Op.RESHARD)],
        "rank 0 action 0RESHARD: missing 0UNSHARD before it": [Action(0, Op.RESHARD), own[gathered]],
    }
    for message, instead in edits.items():
        extra = own[gathered + 1 :] if len(instead) > 1 else own[gathered:]
        with pytest.raises(ScheduleError, match=message):
            edited(lowered, 0, [*own[:gathered], *instead, *extra]).check()


@pytest.mark.parametrize(
    "name, chunks",
    [
        ("ScheduleGPipe", 1),
        ("ScheduleInterleaved1F1B", 2),
        ("ScheduleLoopedBFS", 2),
        ("ScheduleInterleavedZeroBubble", 1),
        ("ScheduleInterleavedZeroBubble", 2),
        ("ScheduleZBVZeroBubble", 2),
        ("ScheduleDualPipeV", 2),
    ],
)
def test_every_other_list_of_torch_passes(name, chunks):
    for p, m in ((2, 4), (4, 8), (4, 16)):
        parse_csv(torch_csv(name, p, chunks, m), name).check()


# ---- peaks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [4, 8])
@pytest.mark.parametrize("m", [1, 3, 8, 20])
def test_peak_of_live_activations_is_the_documented_one(p, m):
    """Case 16."""
    assert gpipe(p, m).check().peak_activations == (m,) * p
    assert one_f_one_b(p, m).check().peak_activations == tuple(min(p - r, m) for r in range(p))


@pytest.mark.parametrize("p, m", [(4, 8), (8, 16), (4, 16)])
def test_peaks_of_split_schedules(p, m):
    """Case 16: ZB-V p, DualPipeV (2p + 1) / 2, ZB-H1 p - r, in shares of a rank (two stages each for the Vs)."""
    vee = parse_csv(torch_csv("ScheduleZBVZeroBubble", p, 2, m)).check()
    assert max(vee.peak_activations) == 2 * p
    dual = parse_csv(torch_csv("ScheduleDualPipeV", p, 2, m)).check()
    assert max(dual.peak_activations) == 2 * p + 1
    half = parse_csv(torch_csv("ScheduleInterleavedZeroBubble", p, 1, m)).check()
    assert half.peak_activations == tuple(p - r for r in range(p))
    assert max(half.peak_deferred) <= p


def test_deferred_weight_gradients_are_counted():
    report = parse_csv("0F0,0F1,0I0,0I1,0W0,0W1\n").check()
    assert report.peak_activations == (2,) and report.peak_deferred == (2,)


def test_pairs_count_both_halves():
    schedule = parse_csv(torch_csv("ScheduleDualPipeV", 2, 2, 4))
    assert any(action.parts for lane in schedule.lanes for action in lane)
    flat = [s for lane in schedule.lanes for s in singles(lane) if s.op in COMPUTE]
    assert len(flat) >= 2 * 4 * 4
