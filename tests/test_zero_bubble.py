"""ZB-H1, ZB-H2, ZB-V, DualPipeV, looped BFS: closed forms, published rates, peaks, mutants, torch."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from plait.parallel.cli import main
from plait.parallel.schedules import (
    NAMES,
    Action,
    Costs,
    Op,
    Schedule,
    ScheduleError,
    build,
    dual_pipe_v,
    gpipe,
    interleaved,
    looped_bfs,
    lower,
    one_f_one_b,
    parse_csv,
    stage_map,
    zb_h1,
    zb_h2,
    zb_v,
)
from plait.parallel.schedules.action import BACKWARD, WEIGHT, singles
from plait.parallel.schedules.machine import crosses, makes, needs
from tests.ranks import run_ranks
from tests.test_check import edited, oracle
from tests.torch_schedules import StageSizes, torch_csv

SIZES = [(p, m) for p in (1, 2, 3, 4, 5, 8) for m in (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17)]
NEW = ["looped_bfs", "zb_h1", "zb_h2", "zb_v", "dual_pipe_v"]


@st.composite
def any_schedule(draw) -> Schedule:
    """Any schedule that has a name, small enough that thousands are proved in a minute."""
    name, p, m = draw(st.sampled_from(NAMES)), draw(st.integers(1, 8)), draw(st.integers(1, 17))
    return build(name, p, m, draw(st.integers(1, 4)) if name in ("interleaved", "looped_bfs") else None)


# ---- sound for every size ----------------------------------------------------------------------------------------


@given(any_schedule(), st.booleans(), st.booleans())
@settings(max_examples=2000, deadline=None)
def test_any_schedule_of_any_size_is_sound(schedule, tied, lowered):
    """Cases 9 and 11: any P, v and M, also M < P."""
    schedule = schedule.with_tied() if tied else schedule
    report = (lower(schedule) if lowered else schedule).check()
    share = schedule.num_stages // schedule.num_ranks
    assert max(report.peak_activations) <= share * schedule.num_microbatches


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2", "zb_v", "dual_pipe_v"])
def test_each_backward_is_whole_or_split_and_in_ascending_order(name):
    """Gradients of a stage are summed in one order in every schedule: micro-batch 0 first."""
    for p, m in ((1, 1), (3, 2), (4, 8), (5, 13)):
        for lane in build(name, p, m).lanes:
            for stage in {single.stage for single in singles(lane)}:
                mine = [single for single in singles(lane) if single.stage == stage]
                for ops in ({Op.F}, BACKWARD, WEIGHT):
                    assert [single.microbatch for single in mine if single.op in ops] == list(range(m))


def test_looped_bfs_runs_a_whole_stage_before_the_next():
    assert [str(a) for a in looped_bfs(2, 2, 2).lanes[1]] == (
        "1F0 1F1 3F0 3F1 3B0 3B1 3REDUCE_GRAD 1B0 1B1 1REDUCE_GRAD".split()
    )
    assert looped_bfs(3, 1, 5).lanes == gpipe(3, 5).lanes


def test_zb_h1_reads_as_in_the_paper():
    lane = "2F0 2F1 2I0 2F2 2I1 2F3 2I2 2W0 2F4 2I3 2W1 2F5 2I4 2W2 2I5 2W3 2W4 2W5 2REDUCE_GRAD"
    assert [str(a) for a in zb_h1(4, 6).lanes[2]] == lane.split()


# ---- closed forms, exactly ---------------------------------------------------------------------------------------


def test_known_figures_of_four_ranks_and_eight_microbatches():
    """Makespan, bubble and peak as simulated elsewhere for F = 1, B = 2, I = W = 1."""
    facts = {"looped_bfs": (28.5, 0.158, 8), "zb_h1": (27, 0.111, 4), "zb_h2": (27, 0.111, 7)}
    facts |= {"zb_v": (25.5, 0.059, 4), "dual_pipe_v": (25.5, 0.059, 4.5)}
    for name, figures in facts.items():
        timeline = build(name, 4, 8).simulate()
        assert (timeline.makespan, round(timeline.bubble, 3), timeline.peak_activations) == figures, name


def test_makespan_of_zb_h1_and_zb_h2():
    for p, m in SIZES:
        expected = max(3 * m + p - 1, 2 * m + 2 * p - 1)
        assert zb_h1(p, m).simulate().makespan == zb_h2(p, m).simulate().makespan == expected, (p, m)


def test_zb_h1_has_a_third_of_1f1bs_bubble():
    for p, m in SIZES:
        if m >= p:
            assert zb_h1(p, m).simulate().bubble_over_ideal == float(Fraction(p - 1, 3 * m))
            assert one_f_one_b(p, m).simulate().bubble_over_ideal == float(Fraction(p - 1, m))


def test_zb_h2_has_no_bubble_inside_a_span():
    for p, m in SIZES:
        assert (zb_h2(p, m).simulate().span_bubble == 0) == (m >= 2 * p - 1), (p, m)


def test_makespan_of_zb_v():
    for p, m in SIZES:
        timeline = zb_v(p, m).simulate()
        assert timeline.makespan == float(max(3 * m + Fraction(p - 1, 2), 2 * m + 2 * p - 1)), (p, m)
        assert (timeline.span_bubble == 0) == (m >= 2 * p - 1), (p, m)


def test_makespan_of_dual_pipe_v():
    for p, m in SIZES:
        short = 2 * m + Fraction(5 * p - 1, 2) - (1 if m <= p else 0)
        expected = 3 * m + Fraction(p - 1, 2) if m >= 2 * p else short
        assert dual_pipe_v(p, m).simulate().makespan == float(expected), (p, m)


@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_makespan_of_looped_bfs(v):
    for p, m in SIZES:
        timeline = looped_bfs(p, v, m).simulate()
        assert timeline.makespan == float(3 * max(m, p) + Fraction(3 * (min(m, p) - 1), v)), (p, m)
        if m >= p:
            assert timeline.bubble_over_ideal == float(Fraction(p - 1, v * m)), (p, m)


@given(st.integers(1, 8), st.integers(1, 30), st.tuples(*[st.integers(1, 40)] * 3))
@settings(max_examples=60, deadline=None)
def test_bubbles_of_the_paper_for_unequal_times(p, extra, times):
    """(P - 1)(F + I - W) for ZB-H1, (P - 1)(F + I - 2W) for ZB-H2, where W is short and M long enough."""
    forward, inputs, weight = (Fraction(t) for t in times)
    weight = min(weight, forward, inputs)
    costs = Costs(forward, inputs + weight, inputs, weight, Fraction(0))
    m = 2 * p - 1 + extra
    for schedule, saved in ((zb_h1(p, m), weight), (zb_h2(p, m), 2 * weight)):
        bubble = (p - 1) * (forward + inputs - saved)
        expected = bubble / (bubble + m * (forward + inputs + weight))
        assert schedule.simulate(costs).span_bubble == pytest.approx(float(expected), abs=1e-15)


# ---- published rates ---------------------------------------------------------------------------------------------

# p 8, ms: TF, TB (input), TW, Tc, m -> rates of 1F1B, ZB-H1, ZB-H2, interleaved (v 3) that the paper prints (1.5B)
PUBLISHED = [
    (18.522, 18.086, 9.337, 0.601, 24, 0.2431, 0.1585, 0.1083, 0.1055),
    (18.546, 18.097, 9.321, 0.762, 64, 0.1240, 0.0674, 0.0444, 0.0443),
]


@pytest.mark.parametrize("tf, tb, tw, tc, m, plain, h1, h2, loop", PUBLISHED)
def test_published_bubble_rates(tf, tb, tw, tc, m, plain, h1, h2, loop):
    costs = Costs(forward=tf, backward=tb + tw, input=tb, weight=tw, send=tc)
    for schedule, rate in ((one_f_one_b(8, m), plain), (zb_h1(8, m), h1), (zb_h2(8, m), h2)):
        assert round(schedule.simulate(costs).span_bubble, 4) == rate, schedule.name


def free_of(schedule: Schedule, costs: Costs, ignored) -> float:
    """Bubble rate of a slow, independent event loop that leaves out the messages for which `ignored(product)`."""
    ends: dict[tuple[int, str, int], float] = {}
    clock = [0.0] * schedule.num_ranks
    rest = [list(singles(lane)) for lane in schedule.lanes]
    while any(rest):
        for rank, lane in enumerate(rest):
            while lane:
                computing = lane[0].microbatch is not None
                wanted = [p for p in needs(lane[0], schedule.num_stages) if not ignored(p)] if computing else []
                if any(p not in ends for p in wanted):
                    break
                latency = {p: costs.send if crosses(p, schedule) else 0.0 for p in wanted}
                clock[rank] = max([clock[rank], *(ends[p] + latency[p] for p in wanted)]) + costs.of(lane[0])
                action = lane.pop(0)
                ends |= dict.fromkeys(makes(action), clock[rank]) if computing else {}
    busy = sum(costs.of(action) for action in schedule.lanes[0])
    return 1 - busy / max(clock)


@pytest.mark.parametrize("tf, tb, tw, tc, m, plain, h1, h2, loop", PUBLISHED)
def test_published_rate_of_interleaved_leaves_messages_out(tf, tb, tw, tc, m, plain, h1, h2, loop):
    """The paper's interleaved rate prices the way from the last rank round to the first (and back) for the first
    micro-batch of each group of P only. With every message priced the rate is higher: 0.1090 and 0.0461."""
    schedule = interleaved(8, 3, m)
    costs = Costs(forward=tf / 3, backward=(tb + tw) / 3, send=tc)

    def comes_round(product):
        stage, kind, microbatch = product
        turn = 7 if kind == "F" else 0
        return stage % 8 == turn and microbatch % 8 != 0

    assert round(free_of(schedule, costs, comes_round), 4) == loop
    honest = schedule.simulate(costs).span_bubble
    assert free_of(schedule, costs, lambda product: False) == pytest.approx(honest, abs=1e-12)
    assert round(honest, 4) == {24: 0.1090, 64: 0.0461}[m]


# ---- memory ------------------------------------------------------------------------------------------------------


def most_held(lane: tuple[Action, ...]) -> int:
    """Largest number of (stage, micro-batch) pairs between F and the end of backward, W included, on the lane."""
    held = most = 0
    for single in singles(lane):
        held += single.op is Op.F
        most = max(most, held)
        held -= single.op in WEIGHT
    return most


@pytest.mark.parametrize("make, depth", [(zb_h1, 1), (zb_h2, 2)])
def test_peaks_of_zb_h1_and_zb_h2(make, depth):
    """ZB-H1: 1F1B's P - r, and P with queued weight gradients; ZB-H2: 2 (P - r) - 1, and 2P - 1 (cases 16 and 18)."""
    for p, m in SIZES:
        schedule = make(p, m)
        report = schedule.check()
        assert report.peak_activations == tuple(min(depth * (p - r - 1) + 1, m) for r in range(p))
        assert all(queued <= min(depth * r + 1, m) for r, queued in enumerate(report.peak_deferred)), (p, m)
        assert max(map(most_held, schedule.lanes)) == min(depth * (p - 1) + 1, m), (p, m)
        if depth == 1:
            assert report.peak_activations == one_f_one_b(p, m).check().peak_activations


def test_peaks_of_zb_v_and_dual_pipe_v():
    """ZB-V: P shares on each rank, queued weight gradients included; DualPipeV P + 1/2 (case 16)."""
    for p, m in SIZES:
        report = zb_v(p, m).check()
        assert zb_v(p, m).simulate().peak_activations == min(p, m)
        assert dual_pipe_v(p, m).simulate().peak_activations == min(p + 0.5, m)
        assert all(queued <= 2 * r + 1 for r, queued in enumerate(report.peak_deferred))
        if m >= 2 * p:
            assert report.peak_activations == (2 * p,) * p
            assert [most_held(lane) for lane in zb_v(p, m).lanes] == [2 * p] * p
        assert looped_bfs(p, 2, m).check().peak_activations == (2 * m,) * p


# ---- mutants -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("lowered", [False, True])
def test_every_dropped_or_doubled_action_is_caught(name, lowered):
    """Each action of a sample, not a random one: dropped, and written once more at either end and next to itself."""
    schedule = build(name, 3, 4).with_tied()
    schedule = lower(schedule) if lowered else schedule
    for rank, lane in enumerate(schedule.lanes):
        for index, action in enumerate(lane):
            with pytest.raises(ScheduleError):
                edited(schedule, rank, [*lane[:index], *lane[index + 1 :]]).check()
            for place in (0, index, len(lane)):
                with pytest.raises(ScheduleError, match="duplicated"):
                    edited(schedule, rank, [*lane[:place], action, *lane[place:]]).check()


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("lowered", [False, True])
def test_every_swap_is_caught_exactly_when_it_breaks_something(name, lowered):
    """Every two actions of every lane; an independent judge says which swaps are harmless (W and W, for one)."""
    schedule = build(name, 2, 4).with_tied()
    schedule = lower(schedule) if lowered else schedule
    caught = 0
    for rank, lane in enumerate(schedule.lanes):
        for i in range(len(lane)):
            for j in range(i + 1, len(lane)):
                new = [*lane[:i], lane[j], *lane[i + 1 : j], lane[i], *lane[j + 1 :]]
                mutant = edited(schedule, rank, new)
                if oracle(schedule, mutant):
                    mutant.check()
                    continue
                caught += 1
                with pytest.raises(ScheduleError):
                    mutant.check()
    assert caught > 100


@pytest.mark.parametrize("name", ["zb_v", "dual_pipe_v"])
def test_a_vee_placed_as_a_loop_is_caught(name):
    """Case 14."""
    schedule = build(name, 4, 8)
    with pytest.raises(ScheduleError, match=r"rank 0 action 7F0: stage 7 is on rank 3"):
        replace(schedule, stage_to_rank=stage_map(4, 2)).check()


# ---- torch -------------------------------------------------------------------------------------------------------


def test_stages_lie_where_torch_puts_them():
    for p in range(1, 9):
        for style in ("loop", "v"):
            for chunks in (1, 2, 3, 4):
                theirs = generate_stage_to_rank_mapping(p, p * chunks, style=style)
                assert stage_map(p, chunks, style) == tuple(theirs[s] for s in range(p * chunks))
        assert zb_v(p, 3).stage_to_rank == dual_pipe_v(p, 3).stage_to_rank == stage_map(p, 2, "v")
    assert zb_v(4, 8).stages_of(0) == (0, 7) and zb_v(4, 8).stages_of(3) == (3, 4)


@pytest.mark.parametrize(
    "theirs, make, chunks, accepts",
    [
        ("ScheduleInterleavedZeroBubble", zb_h1, 1, lambda p, m: m >= p and m % (m // p) == 0),
        ("ScheduleZBVZeroBubble", zb_v, 2, lambda p, m: True),
        ("ScheduleDualPipeV", dual_pipe_v, 2, lambda p, m: m >= 2 * p),
    ],
)
def test_equal_to_torchs_where_torch_has_one(theirs, make, chunks, accepts):
    compared = 0
    for p, m in SIZES:
        if accepts(p, m):
            other = parse_csv(torch_csv(theirs, p, chunks, m))
            assert other.lanes == make(p, m).lanes and other.stage_to_rank == make(p, m).stage_to_rank, (p, m)
            compared += 1
    assert compared > 25


def test_looped_bfs_is_torchs_with_ascending_backwards():
    for p, v, m in [(1, 2, 3), (2, 2, 4), (4, 3, 8), (4, 2, 3)]:
        theirs, ours = parse_csv(torch_csv("ScheduleLoopedBFS", p, v, m)), looped_bfs(p, v, m)
        assert ours.simulate().makespan == theirs.simulate().makespan
        for lane, other in zip(ours.lanes, theirs.lanes, strict=True):
            assert [a for a in lane if a.op is Op.F] == [a for a in other if a.op is Op.F]
            assert [a.stage for a in lane] == [a.stage for a in other]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p, m", [(2, 3), (4, 8), (4, 3)])
def test_torchs_runtime_loads_ours(name, p, m, tmp_path):
    """Both of torch's forms: computing only, which torch lowers itself, and with our messages."""
    schedule = build(name, p, m)
    lowered = lower(schedule, unshard=2)
    schedule.to_csv(tmp_path / "plain.csv")
    lowered.to_csv(tmp_path / "lowered.csv")
    for rank in range(p):
        stages = [StageSizes(p, schedule.num_stages, rank) for _ in schedule.stages_of(rank)]
        for form, file in (("compute_only", "plain.csv"), ("compute_comms", "lowered.csv")):
            runtime = torch_schedules._PipelineScheduleRuntime(stages, m)
            runtime._load_csv(str(tmp_path / file), format=form)
            place = runtime.stage_index_to_group_rank
            assert [place[s] for s in range(schedule.num_stages)] == list(schedule.stage_to_rank)
            back = runtime.pipeline_order_with_comms
            for lane in range(p):
                theirs = [part for a in back[lane] if a.is_compute_op for part in a.sub_actions or (a,)]
                ours = [a for a in singles(schedule.lanes[lane]) if a.op is not Op.REDUCE_GRAD]
                assert list(map(str, theirs)) == list(map(str, ours))
        assert [str(a) for a in back[rank]] == [str(a) for a in lowered.lanes[rank]]


def layers(num_stages: int) -> list[torch.nn.Module]:
    """One small fp64 layer per stage, the same on every rank."""
    torch.manual_seed(5)
    return [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).double() for _ in range(num_stages)]


def batch(num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two samples per micro-batch: inputs and targets, float64 [2 M, 4]."""
    made = torch.Generator().manual_seed(6)
    shape = (2, 2 * num_microbatches, 4)
    inputs, targets = torch.randn(shape, generator=made, dtype=torch.float64)
    return inputs, targets


def run_in_torch(rank: int, folder: str, p: int, m: int) -> dict[str, float]:
    """Steps torch's runtime with each CSV of the folder; the largest error of a weight gradient, by file."""
    errors = {}
    inputs, targets = batch(m)
    for path in sorted(Path(folder).iterdir()):
        schedule = build(path.stem.partition(".")[0], p, m)
        form = "compute_comms" if path.stem.endswith("lowered") else "compute_only"
        modules, whole = layers(schedule.num_stages), layers(schedule.num_stages)
        like, cpu = torch.zeros(2, 4, dtype=torch.float64), torch.device("cpu")
        grown = like.clone().requires_grad_()
        stages = [
            PipelineStage(modules[s], s, schedule.num_stages, cpu, grown if s else like, grown)
            for s in schedule.stages_of(rank)
        ]
        runtime = torch_schedules._PipelineScheduleRuntime(
            stages, m, loss_fn=torch.nn.functional.mse_loss, scale_grads=False
        )
        runtime._load_csv(str(path), format=form)
        first, last = schedule.stage_to_rank[0], schedule.stage_to_rank[-1]
        runtime.step(*([inputs] if rank == first else []), **({"target": targets} if rank == last else {}))
        for x, y in zip(inputs.split(2), targets.split(2), strict=True):
            torch.nn.functional.mse_loss(torch.nn.Sequential(*whole)(x), y).backward()
        pairs = [
            (mine.grad, other.grad)
            for s in schedule.stages_of(rank)
            for mine, other in zip(modules[s].parameters(), whole[s].parameters(), strict=True)
        ]
        errors[path.stem] = max(float((mine - other).abs().max()) for mine, other in pairs)
    return errors


@pytest.mark.parametrize("p, m", [(2, 3), (4, 8)])
def test_torchs_runtime_runs_ours(p, m, tmp_path):
    """One step with each schedule, lowered by torch and by us: the gradients of one process, in fp64."""
    for name in NAMES:
        build(name, p, m).to_csv(tmp_path / f"{name}.plain.csv")
        lower(build(name, p, m)).to_csv(tmp_path / f"{name}.lowered.csv")
    for errors in run_ranks(p, run_in_torch, str(tmp_path), p, m):
        assert len(errors) == 2 * len(NAMES)
        assert all(error <= 1e-10 for error in errors.values()), errors


# ---- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: zb_h1(0, 4), "zb_h1: num_stages=0: valid are integers >= 1"),
        (lambda: zb_h2(4, -1), "zb_h2: num_microbatches=-1: valid are integers >= 1"),
        (lambda: zb_v(2.0, 4), "zb_v: num_ranks=2.0: valid are integers >= 1"),
        (lambda: dual_pipe_v(2, True), "dual_pipe_v: num_microbatches=True: valid are integers >= 1"),
        (lambda: looped_bfs(2, 0, 4), "looped_bfs: chunks=0: valid are integers >= 1"),
        (lambda: looped_bfs("2", 2, 4), "looped_bfs: num_ranks='2': valid are integers >= 1"),
        (lambda: stage_map(2, 2, "w"), "style='w': valid are 'loop' and 'v'"),
        (lambda: build("zb_v", 2, 4, 3), "chunks=3: zb_v has two stages per rank, in V shape"),
        (lambda: build("zb_h1", 2, 4, 2), "chunks=2: zb_h1 has one stage per rank; interleaved and looped_bfs take"),
        (lambda: build("zigzag", 2, 4), "schedule 'zigzag' is none of gpipe, 1f1b, interleaved, looped_bfs, zb_h1"),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(ValueError) as caught:
        make()
    assert message in str(caught.value)


def test_build_makes_every_schedule_by_name():
    for name in NAMES:
        schedule = build(name, 3, 5)
        assert schedule.name.startswith(name) and schedule.num_ranks == 3 and schedule.num_microbatches == 5
    assert build("interleaved", 2, 4) == interleaved(2, 2, 4) and build("looped_bfs", 2, 4, 3) == looped_bfs(2, 3, 4)


@pytest.mark.parametrize("name", NEW)
def test_the_command_line_knows_the_new_names(name, capsys):
    assert main(["check", name, "--ranks", "2", "--microbatches", "3"]) == 0
    out = capsys.readouterr().out
    assert f"{build(name, 2, 3).name}: 2 ranks" in out and "3 micro-batches: sound" in out
    assert main(["show", name, "--ranks", "0", "--microbatches", "3"]) == 1
    assert "=0: valid are integers >= 1" in capsys.readouterr().err
