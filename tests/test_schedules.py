"""Generators, the CSV form, lowering and partition: pure, no processes."""

from __future__ import annotations

import csv

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from plait.parallel.schedules import (
    NAMES,
    Action,
    Op,
    Schedule,
    ScheduleError,
    build,
    from_csv,
    gpipe,
    interleaved,
    lower,
    on_one_rank,
    one_f_one_b,
    pair,
    parse_csv,
    split_layers,
)
from plait.parallel.schedules.action import COMPUTE, RECEIVES, SENDS, singles
from plait.parallel.schedules.machine import carried
from tests.torch_schedules import StageSizes, torch_csv

SIZES = [(p, m) for p in range(1, 9) for m in range(1, 33)]


@st.composite
def schedules(draw) -> Schedule:
    """Any generated schedule, tied or not."""
    p, v, m = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 20))
    name = draw(st.sampled_from(NAMES))
    made = build(name, p, m, v if name in ("interleaved", "looped_bfs") else None)
    return made.with_tied() if draw(st.booleans()) else made


def computing(schedule: Schedule) -> list[list[Action]]:
    return [[a for a in lane if all(s.op in COMPUTE for s in a.singles)] for lane in schedule.lanes]


# ---- generators --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_one_stage_per_rank_passes_for_every_size(make):
    for p, m in SIZES:
        make(p, m).check()


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_interleaved_takes_any_number_of_microbatches(chunks):
    """Cases 11 and 61: peers accept only some M, or count the warm-up wrongly."""
    for p in range(1, 9):
        for m in range(1, 34):
            interleaved(p, chunks, m).check()


def test_fewer_microbatches_than_stages_is_sound():
    """Case 9: a hang when M < P."""
    for m in (1, 2, 3):
        for schedule in (build(name, 4, m) for name in NAMES):
            schedule.check()


def test_1f1b_reads_as_in_the_paper():
    assert [str(a) for a in one_f_one_b(3, 4).lanes[1]] == "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3 1REDUCE_GRAD".split()


def test_interleaved_with_one_chunk_is_1f1b():
    assert interleaved(4, 1, 7).lanes == one_f_one_b(4, 7).lanes


def test_interleaved_equals_torchs_where_torch_has_one():
    for p, v, m in [(2, 2, 4), (4, 2, 8), (4, 3, 12), (3, 2, 5)]:
        theirs = parse_csv(torch_csv("ScheduleInterleaved1F1B", p, v, m))
        assert computing(theirs) == computing(interleaved(p, v, m))


@pytest.mark.parametrize("make", [lambda: gpipe(0, 4), lambda: one_f_one_b(2, 0), lambda: interleaved(2, 0, 4)])
def test_empty_schedules_are_refused(make):
    with pytest.raises(ScheduleError, match="needs stages, micro-batches and ranks >= 1"):
        make()


def test_the_schedule_says_where_stages_are():
    """Case 14: stages put on ranks by a loop although the schedule was a V."""
    assert interleaved(4, 2, 8).stage_to_rank == (0, 1, 2, 3, 0, 1, 2, 3)
    assert interleaved(4, 2, 8).stages_of(1) == (1, 5)
    vee = parse_csv(torch_csv("ScheduleZBVZeroBubble", 4, 2, 8))
    assert vee.stages_of(0) == (0, 7) and vee.stages_of(3) == (3, 4)
    vee.check()


def test_reduce_grad_follows_the_last_backward_of_each_stage():
    for schedule in (gpipe(3, 4), one_f_one_b(3, 4), interleaved(2, 3, 5)):
        for lane in schedule.lanes:
            for stage in {a.stage for a in lane}:
                mine = [a for a in lane if a.stage == stage]
                assert mine[-1].op is Op.REDUCE_GRAD and mine[-2].op is Op.B
                assert sum(a.op is Op.REDUCE_GRAD for a in mine) == 1


def test_tied_weights_are_summed_before_the_reduction():
    lanes = interleaved(2, 2, 3).with_tied().lanes
    assert [str(a) for a in lanes[0] if a.op is Op.TIE_GRAD] == ["0TIE_GRAD"]
    assert [str(a) for a in lanes[1] if a.op is Op.TIE_GRAD] == ["3TIE_GRAD"]
    assert lanes[0].index(Action(0, Op.TIE_GRAD)) == lanes[0].index(Action(0, Op.REDUCE_GRAD)) - 1
    assert one_f_one_b(1, 3).with_tied() == one_f_one_b(1, 3)
    twice = one_f_one_b(2, 3).with_tied()
    assert twice.with_tied() == twice


def test_a_schedule_is_a_value():
    assert one_f_one_b(4, 8) == one_f_one_b(4, 8) and hash(one_f_one_b(4, 8)) == hash(one_f_one_b(4, 8))
    with pytest.raises(AttributeError):
        one_f_one_b(2, 2).name = "other"


# ---- text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["2F0", "11B31", "0I3", "0W3", "1REDUCE_GRAD", "3SEND_F1", "4RECV_B2", "0UNSHARD"])
def test_actions_read_back(text):
    assert str(Action.parse(text)) == text
    assert str(torch_schedules._Action.from_str(text)) == text


def test_pairs_read_back():
    both = pair(Action(2, Op.F, 3), Action(5, Op.B, 1))
    assert str(both) == "(2F3;5B1)OVERLAP_F_B" and Action.parse(str(both)) == both
    assert str(torch_schedules._Action.from_str(str(both))) == str(both)


@pytest.mark.parametrize(
    "text", ["F0", "2F", "2X0", "2F0x", "1REDUCE_GRAD2", "(2F0)OVERLAP_F_B", "(2F0;1B0)F", "-1F0", "2OVERLAP_F_B0"]
)
def test_bad_actions_are_refused_by_name(text):
    with pytest.raises(ScheduleError) as caught:
        Action.parse(text)
    assert text in str(caught.value) and caught.value.action is not None


@given(schedules())
@settings(max_examples=60, deadline=None)
def test_csv_reads_back(schedule):
    back = parse_csv(schedule.to_csv(), schedule.name)
    assert (back.with_tied() if schedule.tied else back) == schedule


def test_csv_file_reads_back(tmp_path):
    schedule = interleaved(2, 2, 4)
    text = schedule.to_csv(tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text() == text
    assert from_csv(tmp_path / "a.csv").lanes == schedule.lanes


def test_idle_cells_are_ignored():
    assert parse_csv("0F0,,0B0,\n,1F0,1B0,\n").lanes == gpipe(2, 1).lanes


@pytest.mark.parametrize(
    "text, message", [("", "no actions"), ("0F0,0B0\n2F0,2B0\n", r"stages \[1\]"), ("0F0\n0B0\n", "also on rank 0")]
)
def test_csv_that_is_no_schedule_is_refused(text, message):
    with pytest.raises(ScheduleError, match=message):
        parse_csv(text)


@given(schedules())
@settings(max_examples=40, deadline=None)
def test_torch_reads_and_lowers_ours(schedule):
    """torch's own validation and lowering take our lists, with and without our messages."""
    rows = list(csv.reader(schedule.to_csv().splitlines()))
    order = {rank: [torch_schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    place = torch_schedules._validate_schedule(
        order, schedule.num_ranks, schedule.num_stages, schedule.num_microbatches
    )
    assert [place[s] for s in range(schedule.num_stages)] == list(schedule.stage_to_rank)
    assert all(action.is_compute_op for lane in order.values() for action in lane)  # what compute_only demands
    torch_schedules._add_send_recv(order, lambda stage: schedule.stage_to_rank[stage], schedule.num_stages)
    for cell in (cell for row in csv.reader(lower(schedule).to_csv().splitlines()) for cell in row):
        assert str(torch_schedules._Action.from_str(cell)) == cell


# ---- lowering ----------------------------------------------------------------------------------------------------


@given(schedules(), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_lowering_keeps_the_actions_and_stays_sound(schedule, lookahead):
    lowered = lower(schedule, lookahead=lookahead)
    assert lowered.check() == schedule.check()
    messages = SENDS | RECEIVES
    apart = tuple(tuple(singles(lane)) for lane in schedule.lanes)
    assert tuple(tuple(a for a in lane if a.op not in messages) for lane in lowered.lanes) == apart
    assert lower(lowered) == lowered


@pytest.mark.parametrize("name", ["ScheduleZBVZeroBubble", "ScheduleDualPipeV", "ScheduleInterleavedZeroBubble"])
def test_schedules_with_split_backward_lower(name):
    lower(parse_csv(torch_csv(name, 4, 2, 8))).check()


def test_a_send_follows_its_maker_and_a_receive_comes_early():
    lanes = [[str(a) for a in lane] for lane in lower(one_f_one_b(2, 3)).lanes]
    assert lanes[0].index("0SEND_F0") == lanes[0].index("0F0") + 1
    assert lanes[1].index("1RECV_F1") < lanes[1].index("1F0")
    assert lanes[0].index("0RECV_B0") > lanes[0].index("0F0")  # its shape is known only then


def test_two_chunks_between_the_same_ranks_are_received_in_sending_order():
    """p = 2 interleaved: one link carries two forward channels and a gradient channel."""
    lowered = lower(interleaved(2, 2, 6))
    for source, target in ((0, 1), (1, 0)):
        sent = [carried(a) for a in lowered.lanes[source] if a.op in SENDS]
        received = [carried(a) for a in lowered.lanes[target] if a.op in RECEIVES]
        assert sent == received and len({product[:2] for product in sent}) == 3


def test_neighbours_on_one_rank_send_nothing():
    schedule = parse_csv(torch_csv("ScheduleZBVZeroBubble", 2, 2, 4))  # stages 1 and 2 share rank 1
    messages = [a for lane in lower(schedule).lanes for a in lane if a.op in SENDS]
    assert {(a.stage, a.op) for a in messages} == {
        (0, Op.SEND_F),
        (2, Op.SEND_F),
        (1, Op.SEND_B),
        (3, Op.SEND_B),
    }


def test_one_rank_unsharded_is_written_as_lowered():
    """It sends nothing; its CSV once lost REDUCE_GRAD and kept UNSHARD, which is neither of torch's forms."""
    lowered = lower(interleaved(1, 2, 2), unshard=1)
    assert lowered.is_lowered
    text = lowered.to_csv()
    assert "UNSHARD" in text and "REDUCE_GRAD" in text


def test_unsharding_keeps_the_stages_that_come_next():
    schedule = interleaved(2, 3, 4)
    lowered = lower(schedule, unshard=2)
    lowered.check()
    for lane in lowered.lanes:
        whole: set[int] = set()
        for action in lane:
            whole |= {action.stage} if action.op is Op.UNSHARD else set()
            whole -= {action.stage} if action.op is Op.RESHARD else set()
            assert len(whole) <= 2
        assert not whole


@given(schedules())
@settings(max_examples=40, deadline=None)
def test_one_rank_can_run_all_lanes(schedule):
    alone = on_one_rank(schedule)
    alone.check()
    lanes = [tuple(singles(lane)) for lane in schedule.lanes]  # pairs are taken apart
    assert sorted(map(str, alone.lanes[0])) == sorted(str(a) for lane in lanes for a in lane)
    for lane in lanes:
        mine = set(lane)
        assert tuple(a for a in alone.lanes[0] if a in mine) == lane


# ---- partition ---------------------------------------------------------------------------------------------------


def test_every_layer_lands_on_exactly_one_stage():
    """Case 54: an uneven split drops layers (30 layers over 4 stages lost 2)."""
    for num_layers in range(1, 21):
        for num_stages in range(1, min(num_layers, 8) + 1):
            ranges = split_layers(num_layers, num_stages)
            assert [layer for r in ranges for layer in r] == list(range(num_layers))
            assert len(ranges) == num_stages and max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_layer_offsets_follow_the_stage_order_of_chunks():
    """Case 55: with several chunks per rank a stage's first layer was computed from the rank."""
    ranges = split_layers(10, 8)
    schedule = interleaved(4, 2, 4)
    starts = [ranges[stage].start for rank in range(4) for stage in schedule.stages_of(rank)]
    assert starts == [0, 6, 2, 7, 4, 8, 5, 9]


@pytest.mark.parametrize("num_layers, num_stages", [(3, 4), (0, 1), (2, 0)])
def test_fewer_layers_than_stages_is_refused(num_layers, num_stages):
    with pytest.raises(ValueError, match=f"num_layers={num_layers}.*num_stages={num_stages}"):
        split_layers(num_layers, num_stages)


# ---- torch's files, both ways ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, ours, chunks",
    [
        ("ScheduleInterleaved1F1B", "interleaved", 2),
        ("ScheduleLoopedBFS", "looped_bfs", 2),
        ("ScheduleInterleavedZeroBubble", "zb_h1", 1),
        ("ScheduleZBVZeroBubble", "zb_v", 2),
        ("ScheduleDualPipeV", "dual_pipe_v", 2),
    ],
)
@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (4, 16)])
def test_both_files_that_torch_writes_of_its_schedules_pass(tmp_path, name, ours, chunks, p, m):
    """`_dump_csv` computing only and lowered by torch, messages and all; the same actions as ours on each rank."""
    made = getattr(torch_schedules, name)([StageSizes(p, p * chunks, 0) for _ in range(chunks)], m)
    torch_schedules.PipelineScheduleMulti._dump_csv(made, tmp_path / "plain.csv")
    made._dump_csv(tmp_path / "lowered.csv", format="compute_comms")
    plain, lowered = from_csv(tmp_path / "plain.csv"), from_csv(tmp_path / "lowered.csv")
    assert plain.check() == lowered.check() and lowered.is_lowered and not plain.is_lowered
    mine = build(ours, p, m)
    for file in (plain, lowered):
        assert file.stage_to_rank == mine.stage_to_rank
        for lane, other in zip(computing(file), computing(mine), strict=True):
            assert sorted(map(str, singles(lane))) == sorted(map(str, singles(other)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p, m", [(2, 3), (3, 7), (4, 8)])
def test_what_torch_writes_after_loading_ours_passes(tmp_path, name, p, m):
    """Ours in, lowered by torch, out again: its messages pass our check, the actions are those that went in."""
    schedule = build(name, p, m)
    schedule.to_csv(tmp_path / "ours.csv")
    stages = [StageSizes(p, schedule.num_stages, 0) for _ in schedule.stages_of(0)]
    runtime = torch_schedules._PipelineScheduleRuntime(stages, m)
    runtime._load_csv(str(tmp_path / "ours.csv"))
    runtime._dump_csv(str(tmp_path / "theirs.csv"))
    back = from_csv(tmp_path / "theirs.csv")
    assert back.check() == schedule.check() and back.is_lowered == (p > 1)
    assert [[s for s in singles(lane) if s.op in COMPUTE] for lane in back.lanes] == [
        [s for s in singles(lane) if s.op in COMPUTE] for lane in schedule.lanes
    ]
    for kind in (SENDS, RECEIVES):  # as many messages as ours, whoever lowers
        counted = [sum(a.op in kind for a in lane) for lane in back.lanes]
        assert counted == [sum(a.op in kind for a in lane) for lane in lower(schedule).lanes]
