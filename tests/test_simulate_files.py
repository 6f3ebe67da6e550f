"""Costs from files and runs, and timelines of runs: every form, every refusal, and a run beside its plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plait.parallel.mesh import Mesh
from plait.parallel.pipeline import Pipeline
from plait.parallel.schedules import (
    NAMES,
    Costs,
    Event,
    LayerCosts,
    Part,
    Schedule,
    ScheduleError,
    build,
    layer_costs,
    search,
)
from plait.parallel.schedules.action import COMPUTE, Op, singles
from plait.parallel.schedules.cost_files import read_costs
from plait.parallel.schedules.measured import measured_costs, measured_timeline, read_timeline, to_json
from plait.parallel.timelines import gather_timeline
from tests.ranks import run_ranks
from tests.test_pipeline import STAGES, batch

# ---- costs -------------------------------------------------------------------------------------------------------

SIZES = dict(dim=8, num_layers=4, num_heads=2, num_kv_heads=1, ffn_dim=16, vocab_size=32, seq=4, rows=2)
MODEL = layer_costs(**SIZES, flop_per_s=100.0, link_bytes_per_s=64.0)  # type: ignore[arg-type]
_LINES = "".join(f"{key} = {value}\n" for key, value in SIZES.items())
FORMS: dict[str, tuple[str, Any]] = {
    "numbers.json": ('{"forward": 1, "input": 2, "weight": 3}', Costs(1, 5, 2, 3)),
    "stages.json": (
        '{"forward": [1, 2], "input": [1, 2], "weight": 1, "send": 0.5, "split": [true, false],'
        ' "activation": [3, 4]}',
        Costs([1, 2], [2, 3], [1, 2], 1, 0.5, None, [3, 4], 1.0, [True, False]),
    ),
    "stages.toml": (
        "forward = [1, 2]\ninput = 1.0\nweight = [1, 3]\nbackward = 9\nsend_grad = 2\n"
        "deferred = 0.5\nsplit = false\n",
        Costs([1, 2], 9, 1.0, [1, 3], 0.0, 2, None, 0.5, False),
    ),
    "stages.csv": (
        "stage,forward,input,weight,split\n0,1,1,1,true\n1, 2,2,0,false\n",
        Costs([1, 2], [2, 2], [1, 2], [1, 0], split=[True, False]),
    ),
    "layers.toml": (
        "layers = 6\nlayers_of = [2, 2, 1, 1]\nsend = 0.25\n[layer]\nforward = 1\ninput = 1\nweight = 1\n"
        "activation = 10\n[embedding]\nweight = 0.5\n[head]\nforward = 2\ninput = 2\nweight = 2\n",
        LayerCosts(6, Part(1, 1, 1, 10), Part(weight=0.5), Part(2, 2, 2), 0.25, layers_of=(2, 2, 1, 1)),
    ),
    "model.toml": (
        f"split = false\n[model]\n{_LINES}flop_per_s = 100.0\nlink_bytes_per_s = 64\n",
        LayerCosts(4, MODEL.layer, MODEL.embedding, MODEL.head, MODEL.send, split=False),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_costs_is_read(tmp_path: Path, name: str) -> None:
    text, expected = FORMS[name]
    (tmp_path / name).write_text(text)
    assert read_costs(str(tmp_path / name)) == expected


def test_costs_may_be_typed() -> None:
    assert read_costs(None) == Costs()
    assert read_costs("1,2,3") == Costs(1, 5, 2, 3) and read_costs("1,2,3,0.5") == Costs(1, 5, 2, 3, 0.5)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.json", '{"forward": [1, 2]}', "needs forward, input, weight; input is missing"),
        ("a.json", '{"forward": 1, "input": 1, "weight": 1, "wait": 2}', "'wait' is unknown; valid: forward, input"),
        ("a.json", '{"forward": 1, "input": "x", "weight": 1}', "input: 'x' is no finite number >= 0"),
        ("a.json", '{"forward": [1, -2], "input": 1, "weight": 1}', r"forward\[1\]: -2 is no finite number >= 0"),
        ("a.json", '{"forward": [1, NaN], "input": 1, "weight": 1}', r"forward\[1\]: nan is no finite number"),
        ("a.json", '{"forward": 1, "input": [1, 2], "weight": [1]}', "input has 2 entries, weight 1; they must"),
        ("a.json", '{"forward": [1], "input": [1, 2], "weight": 1}', "lists for 1 and 2 stages; they must agree"),
        ("a.json", '{"forward": 1, "input": 1, "weight": 1, "split": 1}', "split: 1 is neither true, false nor"),
        ("a.json", "[1, 2]", "is a list, not a table of costs"),
        ("a.json", "{", "Expecting property name"),
        ("a.toml", "forward = ", "Invalid value"),
        ("a.csv", "", "has no line of costs"),
        ("a.csv", "forward,input,weight\n1,1\n", "line 2 has not as many cells as the first"),
        ("a.csv", "forward,input,weight\n1,1,a\n", "line 2, weight: 'a' is no number"),
        ("a.csv", "stage,forward,input,weight\n1,1,1,1\n", "line 2: stages must be there in order"),
        ("a.toml", "layers = 0\n[layer]\nforward=1\ninput=1\nweight=1\n", "layers: 0 is no integer >= 1"),
        ("a.toml", "layers = 2\n[layer]\nforward=1\ninput=1\n", "layer: needs forward, input, weight; weight is"),
        ("a.toml", "layers = 2\nlayer = 3\n", "layer: 3 is no table"),
        ("a.toml", "layers = 2\nlayers_of = 2\n[layer]\nforward=1\ninput=1\nweight=1\n", "layers_of: 2 is no list"),
        ("a.toml", "[model]\ndim = 8\n", "model: needs dim, num_layers, .* seq; num_layers is missing"),
        ("a.toml", "[model]\ndim = 8\nwidth = 3\n", "model: 'width' is unknown; valid: dim, num_layers"),
        ("a.toml", "model = 3\n", "model: 3 is no table"),
        ("a.toml", f"[model]\n{_LINES}flop_per_s = 0\n", "model.flop_per_s: 0 is no rate"),
        ("a.toml", f"[model]\n{_LINES}".replace("dim = 8", "dim = 8.5"), "model.dim: 8.5 is no integer >= 1"),
        ("a.json", '{"format": "plait timeline 1"}', "is a damaged timeline: KeyError 'lanes'"),
    ],
)  # fmt: skip
def test_wrong_costs_are_refused_by_file_and_key(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_costs(str(tmp_path / name))
    assert name in str(caught.value) or "lists for" in message


@pytest.mark.parametrize("text", ["1,2", "a,b,c", "1,2,-3", "1,2,nan", "1,2,inf", "", "1,2,3,4,5", "costs.txt"])
def test_wrong_numbers_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected F,I,W or F,I,W,SEND"):
        read_costs(text)


def test_a_cost_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="a.json.*: is no text"):
        read_costs(str(tmp_path / "a.json"))
    with pytest.raises(OSError, match="No such file"):
        read_costs(str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match="the run has no timeline.json"):
        read_costs(str(tmp_path))


# ---- timelines of runs -------------------------------------------------------------------------------------------


def skewed(schedule: Schedule, costs: Costs, skew: float) -> list[list[Event]]:
    """The plan as if measured, every rank on a clock of its own."""
    lanes = schedule.simulate(costs).lanes
    return [
        [
            Event(a, s + skew * rank**2, e + skew * rank**2, w)
            for a, s, e, w, _ in lane
            if a.op in COMPUTE
        ]
        for rank, lane in enumerate(lanes)
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("skew", [0.0, 17.0, -3.5])
def test_clocks_of_ranks_are_brought_together(name: str, skew: float) -> None:
    """A run that goes as planned is measured as planned, whatever the clocks said: times, messages, figures."""
    schedule, costs = build(name, 4, 8), Costs(1.0, 2.0, 1.0, 1.0, 0.25)
    plan = schedule.simulate(costs)
    flat = Schedule(name, schedule.num_stages, 8, plan_lanes(schedule), schedule.stage_to_rank)
    seen = measured_timeline(flat, skewed(schedule, costs, skew))
    assert seen.makespan == pytest.approx(plan.makespan) and seen.bubble == pytest.approx(plan.bubble)
    assert seen.exposed_communication == pytest.approx(plan.exposed_communication)
    assert seen.peak_activations == plan.peak_activations
    for ours, theirs in zip(seen.lanes, plan.lanes, strict=True):
        kept = [event for event in theirs if event.action.op in COMPUTE]
        assert [event.action for event in ours] == [event.action for event in kept]
        assert [event.start for event in ours] == pytest.approx([event.start for event in kept])
    waited = {e.action for lane in plan.lanes for e in lane if e.wait}
    for message in seen.messages:
        assert message.end - message.start == pytest.approx(0.25) or message.end == message.start
    assert waited


def plan_lanes(schedule: Schedule) -> tuple[Any, ...]:
    return tuple(tuple(singles(lane)) for lane in schedule.lanes)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_v"])
def test_a_timeline_file_reads_back_and_gives_its_costs(tmp_path: Path, name: str) -> None:
    schedule = build(name, 2, 4)
    stages = schedule.num_stages
    forward = [1.0 + stage for stage in range(stages)]
    costs = Costs(forward, [2 * f for f in forward], forward, forward, 0.5)
    seen = measured_timeline(schedule, skewed(schedule, costs, 5.0))
    (tmp_path / "timeline.json").write_text(to_json(schedule, seen))
    for where in (tmp_path, tmp_path / "timeline.json"):
        back, line = read_timeline(where)
        assert back.lanes == schedule.lanes and back.stage_to_rank == schedule.stage_to_rank
        assert line.makespan == pytest.approx(seen.makespan)
    found = read_costs(str(tmp_path))
    assert found == read_costs(str(tmp_path / "timeline.json")) == measured_costs(schedule, seen)
    assert isinstance(found, Costs)
    assert found.forward == pytest.approx(forward) and found.backward == pytest.approx([2 * f for f in forward])
    assert found.input == pytest.approx(forward) and found.send == pytest.approx(0.5)
    assert back.simulate(found).makespan == pytest.approx(seen.makespan)


def test_pairs_count_as_measured_from_singles_or_by_thirds() -> None:
    schedule = build("dual_pipe_v", 2, 4)
    lanes, clock = [], [0.0, 0.0]
    for rank, lane in enumerate(schedule.lanes):
        events = []
        for action in lane:
            if all(single.op in COMPUTE for single in action.singles):
                length = 3.0 if action.parts else {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}[action.op.value]
                events.append(Event(action, clock[rank], clock[rank] + length))
                clock[rank] += length
        lanes.append(events)
    seen = measured_timeline(schedule, lanes)
    found = measured_costs(schedule, seen)
    assert found.forward == [1.0] * 4 and found.backward == [2.0] * 4


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda d: d.pop("lanes"), "damaged timeline: KeyError 'lanes'"),
        (lambda d: d.update(format="plait timeline 2"), "is no timeline"),
        (lambda d: d["lanes"][0][0].__setitem__(1, "x"), "'x' is no time in seconds"),
        (lambda d: d["lanes"][0][0].__setitem__(1, None), "None is no time"),
        (lambda d: d["lanes"][0].pop(), "missing"),
        (lambda d: d["lanes"][0][0].__setitem__(0, "zz"), "action 'zz'"),
        (lambda d: d.update(stage_to_rank=[0, 5]), "stage 1 is on rank"),
    ],
)
def test_damaged_timelines_are_refused(tmp_path: Path, spoil: Any, message: str) -> None:
    schedule = build("1f1b", 2, 3)
    data = json.loads(to_json(schedule, measured_timeline(schedule, skewed(schedule, Costs(), 0.0))))
    spoil(data)
    (tmp_path / "t.json").write_text(json.dumps(data))
    with pytest.raises((ValueError, ScheduleError), match=message) as caught:
        read_timeline(tmp_path / "t.json")
    assert "t.json" in str(caught.value)


# ---- the executor's order ----------------------------------------------------------------------------------------


def run_measured(rank: int, p: int, m: int, folder: str) -> list[tuple[str, list[list[str]]]]:
    """Runs every schedule one step; what its gathered timeline says was run, by schedule."""
    seen = []
    mesh = Mesh.create(pp=p)
    x, targets = batch(2 * m)
    for name in NAMES:
        schedule = build(name, p, m)
        stages: dict[int, nn.Module] = {s: STAGES["split"](s, schedule.num_stages) for s in schedule.stages_of(rank)}
        pipeline = Pipeline(stages, schedule, mesh)
        assert gather_timeline(pipeline) is None
        pipeline.step({"x": x}, targets, 2 * m)
        line = gather_timeline(pipeline)
        assert line is not None and all(e.end >= e.start for lane in line.lanes for e in lane)
        assert all(message.end >= message.start - 1e-3 for message in line.messages)
        seen.append((name, [[str(s) for e in lane for s in e.action.singles] for lane in line.lanes]))
        if rank == 0:
            (Path(folder) / f"{name}.json").write_text(to_json(schedule, line))
        pipeline.evaluate({"x": x}, targets)
        assert gather_timeline(pipeline) is None
    return seen


def run_half_split(rank: int, folder: str) -> tuple[int, ...]:
    """A step of 1F1B whose second stage cannot split; the stages that its timeline names."""
    mesh, schedule = Mesh.create(pp=2), build("1f1b", 2, 4)
    x, targets = batch(8)
    pipeline = Pipeline({rank: STAGES[("split", "linear")[rank]](rank, 2)}, schedule, mesh)
    pipeline.step({"x": x}, targets, 8)
    line = gather_timeline(pipeline)
    assert line is not None
    if rank == 0:
        (Path(folder) / "timeline.json").write_text(to_json(schedule, line))
    return line.inseparable


@pytest.mark.ranks
def test_a_run_says_which_stages_cannot_split_and_search_splits_none_of_them(tmp_path: Path) -> None:
    assert run_ranks(2, run_half_split, str(tmp_path)) == [(1,), (1,)]
    costs = read_costs(str(tmp_path))
    assert isinstance(costs, Costs) and costs.split == [True, False]
    even = replace(costs, forward=1.0, backward=2.0, input=1.0, weight=1.0, send=0.0, send_grad=0.0)
    found = search(2, 8, even, chunks=(1,))
    assert {single.stage for lane in found.lanes for single in singles(lane) if single.op is Op.W} <= {0}
    for wrong in ([2], [-1]):
        data = json.loads((tmp_path / "timeline.json").read_text()) | {"inseparable": wrong}
        (tmp_path / "wrong.json").write_text(json.dumps(data))
        with pytest.raises(ValueError, match="wrong.json: is a damaged timeline: inseparable stages"):
            read_timeline(tmp_path / "wrong.json")


@pytest.mark.ranks
@pytest.mark.parametrize("p, m", [(2, 5), (4, 8)])
def test_the_simulated_order_is_the_one_that_the_executor_measures(tmp_path: Path, p: int, m: int) -> None:
    """Every schedule: per rank the same actions in the same order, on all ranks the same; files read back."""
    results = run_ranks(p, run_measured, p, m, str(tmp_path))
    assert all(result == results[0] for result in results)
    for name, lanes in results[0]:
        plan = build(name, p, m).simulate()
        assert lanes == [[str(e.action) for e in lane if e.action.op in COMPUTE] for lane in plan.lanes], name
        schedule, line = read_timeline(tmp_path / f"{name}.json")
        assert [list(singles(lane)) for lane in schedule.lanes] == [
            list(singles(lane)) for lane in build(name, p, m).lanes
        ]
        assert line.makespan > 0 and 0 <= line.bubble < 1
        assert schedule.simulate(measured_costs(schedule, line)).makespan > 0


def test_one_rank_is_gathered_without_a_process_group() -> None:
    schedule = build("interleaved", 2, 4)
    stages: dict[int, nn.Module] = {s: STAGES["linear"](s, 4) for s in range(4)}
    pipeline = Pipeline(stages, schedule, Mesh.single())
    x, targets = batch(8)
    pipeline.step({"x": x}, targets, 8)
    line = gather_timeline(pipeline)
    assert line is not None and len(line.lanes) == 1 and not line.messages
    assert torch.tensor([e.end - e.start for e in line.lanes[0]]).sum() <= line.makespan * 1.000001
