"""The executor, line by line: peaks, bits, messages and allocations counted, lengths that differ, uneven stages.

One start of the ranks runs many cases where it can, since a start costs more than a case.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from plait.parallel import local_links, slots
from plait.parallel import pipeline as pipeline_module
from plait.parallel import results as results_module
from plait.parallel.gradients import inseparable
from plait.parallel.layers import ColumnParallelLinear
from plait.parallel.mesh import Axis, Mesh
from plait.parallel.p2p import P2P
from plait.parallel.pipeline import ChannelError, ChannelTimeout, Pipeline, TensorSpec
from plait.parallel.schedules import NAMES, Op, Schedule, build, lower, one_f_one_b, parse_csv, search
from plait.parallel.schedules.action import RECEIVES, SENDS, singles
from plait.parallel.streams import Inward, Outward
from tests.ranks import run_ranks
from tests.test_pipeline import CLOSE, DTYPE, WIDTH, LinearStage, SplitStage, assert_same_gradients

pytestmark = pytest.mark.ranks


class Stack(nn.Module):
    """One stage: some layers of a deeper model, each of which can split its weight gradient off."""

    layer_class: type[LinearStage] = SplitStage

    def __init__(self, layers: range, index: int, num_stages: int) -> None:
        super().__init__()
        self.index, self.last = index, index == num_stages - 1
        self.numbers = layers
        self.layers = nn.ModuleList(self.layer_class(layer, 0) for layer in layers)

    def input_specs(self, inputs: dict[str, Any]) -> tuple[TensorSpec, ...]:
        return (TensorSpec((inputs["x"].shape[0], WIDTH), DTYPE, needs_grad=True),)

    def forward(self, x: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, ...]:
        h: Any = x[0] if x else inputs["x"]
        for layer in self.layers:
            h = layer.layer(h)  # type: ignore[operator]
        if not self.last:
            return (h,)
        return ((h - inputs["targets"]) ** 2).sum(), h.shape[0], {}


class WholeStack(Stack):
    """The same with autograd's own linear layers, which cannot split."""

    layer_class = LinearStage


def stacks(schedule: Schedule, rank: int, counts: list[int], kind: type[Stack] = Stack) -> dict[int, nn.Module]:
    """The stages of a rank when stage s has counts[s] layers."""
    first = [sum(counts[:stage]) for stage in range(len(counts))]
    return {s: kind(range(first[s], first[s] + counts[s]), s, schedule.num_stages) for s in schedule.stages_of(rank)}


def rows_of(sizes: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and targets of micro-batches with so many rows."""
    made = torch.Generator().manual_seed(11)
    draw = lambda: [torch.randn(n, WIDTH, generator=made, dtype=DTYPE) for n in sizes]  # noqa: E731
    return draw(), draw()


def whole(num_layers: int, inputs: list[Tensor], targets: list[Tensor]) -> tuple[float, list[nn.Module]]:
    """Loss and layers with gradients of one process, one micro-batch after the other."""
    layers = [LinearStage(layer, 0) for layer in range(num_layers)]
    divisor, total = sum(map(len, inputs)), 0.0
    for x, target in zip(inputs, targets, strict=True):
        for layer in layers:
            x = layer.layer(x)
        loss = ((x - target) ** 2).sum() / divisor
        loss.backward()
        total += loss.item()
    return total, list(layers)


def layers_of(stages: dict[int, nn.Module]) -> dict[int, nn.Module]:
    """Layer number -> layer, over all stages of a rank."""
    return {
        number: layer
        for stage in stages.values()
        if isinstance(stage, Stack)
        for number, layer in zip(stage.numbers, stage.layers, strict=True)
    }


# ---- peaks -------------------------------------------------------------------------------------------------------


def run_peaks(rank: int, p: int, sizes: list[int]) -> None:
    """Every schedule by name on this grid; the pipeline is made anew, the ranks are not."""
    mesh = Mesh.create(pp=p)
    for m in sizes:
        for name in NAMES:
            for kind in (Stack, WholeStack):
                schedule = build(name, p, m)
                stages = stacks(schedule, rank, [1] * schedule.num_stages, kind)
                pipeline = Pipeline(stages, schedule, mesh)
                pipeline.step({"x": torch.ones(m, WIDTH, dtype=DTYPE)}, torch.zeros(m, WIDTH, dtype=DTYPE), m)
                report = schedule.check()
                assert pipeline.peak_activations == report.peak_activations[rank], (name, m)
                queued = report.peak_deferred[rank] if kind is Stack else 0
                assert pipeline.peak_deferred == queued, (name, m, kind)


@pytest.mark.parametrize("p, sizes", [(2, [1, 5]), (4, [3, 8])])
def test_measured_peaks_are_the_proved_ones_in_every_schedule(p, sizes):
    """Cases 16 and 18: live activations, and queued weight gradients, which do not grow with the micro-batches."""
    run_ranks(p, run_peaks, p, sizes)


def run_stash(rank: int) -> list[int]:
    """Queued weight gradients of ZB-H1 at their most, for few and for many micro-batches."""
    mesh, peaks = Mesh.create(pp=2), []
    for m in (4, 32):
        schedule = build("zb_h1", 2, m)
        pipeline = Pipeline(stacks(schedule, rank, [1, 1]), schedule, mesh)
        pipeline.step({"x": torch.ones(m, WIDTH, dtype=DTYPE)}, torch.zeros(m, WIDTH, dtype=DTYPE), m)
        peaks.append(pipeline.peak_deferred)
    return peaks


def test_queued_weight_gradients_do_not_grow_with_the_microbatches():
    """Case 18: the stash of what W needs stays under the schedule's bound, P."""
    assert all(few == many <= 2 for few, many in run_ranks(2, run_stash))


# ---- bits --------------------------------------------------------------------------------------------------------


def run_bits(rank: int, p: int, sizes: list[int]) -> list[dict[str, Tensor]]:
    """Per size and schedule: the loss and the gradients of the layers on this rank; eight layers, as spread by it."""
    mesh, results = Mesh.create(pp=p), []
    for m in sizes:
        inputs, targets = rows_of([3] * m)
        loss, expected = whole(8, inputs, targets)
        for name in NAMES:
            schedule = build(name, p, m)
            stages = stacks(schedule, rank, [8 // schedule.num_stages] * schedule.num_stages)
            result = Pipeline(stages, schedule, mesh).step({"x": torch.cat(inputs)}, torch.cat(targets), 3 * m)
            assert result.loss.item() == pytest.approx(loss, rel=1e-12), (name, m)
            assert_same_gradients(layers_of(stages), expected)
            found = {
                f"{number}.{key}": param.grad
                for number, layer in layers_of(stages).items()
                for key, param in layer.named_parameters()
            }
            results.append({**found, "loss": result.loss})
    return results


@pytest.mark.parametrize("p, sizes", [(2, [5]), (4, [1, 2, 3, 8])])
def test_every_schedule_gives_the_same_bits(p, sizes):
    """Weight gradients are added in the order of the micro-batches everywhere, also from W. Case 9: also M < P."""
    by_rank = run_ranks(p, run_bits, p, sizes)
    merged = [{k: v for of_rank in results for k, v in of_rank.items()} for results in zip(*by_rank, strict=True)]
    assert len(merged) == len(sizes) * len(NAMES)
    for index, results in enumerate(merged):
        first = merged[index - index % len(NAMES)]
        assert len(results) == 17, "eight layers of weight and bias, and the loss"
        for key, value in results.items():
            assert torch.equal(value, first[key]), (sizes[index // len(NAMES)], NAMES[index % len(NAMES)], key)


# ---- stages of any kind ------------------------------------------------------------------------------------------

THREE_ON_TWO = "0F0,0F1,2F0,2B0,2F1,2B1,0B0,0B1\n1F0,1F1,1B0,1B1\n"  # rank 0 holds stages 0 and 2, rank 1 one


def uneven(p: int) -> list[tuple[Schedule, list[int]]]:
    """Schedules for p ranks with layers per stage that nobody would call even."""
    if p == 4:
        return [(build("1f1b", 4, 3), [3, 1, 2, 1]), (build("zb_v", 4, 5), [1, 1, 2, 1, 1, 1, 1, 3])]
    return [
        (build("interleaved", 2, 3, 3), [1, 3, 1, 1, 2, 1]),
        (build("interleaved", 2, 5, 4), [1] * 8),
        (build("looped_bfs", 2, 4, 3), [2, 1, 1, 1, 1, 4]),
        (build("zb_h1", 2, 4), [5, 1]),
        (build("dual_pipe_v", 2, 4), [1, 4, 1, 2]),
        (parse_csv(THREE_ON_TWO), [1, 2, 1]),
    ]


def run_uneven(rank: int, p: int) -> None:
    mesh = Mesh.create(pp=p)
    for schedule, counts in uneven(p):
        stages, m = stacks(schedule, rank, counts), schedule.num_microbatches
        inputs, targets = rows_of([2] * m)
        loss, expected = whole(sum(counts), inputs, targets)
        result = Pipeline(stages, schedule, mesh).step({"x": torch.cat(inputs)}, torch.cat(targets), 2 * m)
        assert result.loss.item() == pytest.approx(loss, rel=1e-12), schedule.name
        assert_same_gradients(layers_of(stages), expected)


@pytest.mark.parametrize("p", [2, 4])
def test_ranks_may_hold_any_number_of_stages_and_layers(p):
    """Cases 35 and 54: gradients of a chunk lost, layers dropped by an uneven split."""
    run_ranks(p, run_uneven, p)


# Rank 1 holds stages 1 and 2, and does all of stage 2's W last: long after stage 1 is through with its buffers.
LATE_W = "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,2F0,2I0,1I0,1W0,1F1,2F1,2I1,1I1,1W1,1F2,2F2,2I2,1I2,1W2,2W0,2W1,2W2\n"


def run_passing(rank: int) -> None:
    """Stage 1 has no layers: it hands the very tensor that it received to stage 2."""
    schedule = parse_csv(LATE_W)
    stages = stacks(schedule, rank, [1, 0, 2])
    pipeline = Pipeline(stages, schedule, Mesh.create(pp=2))
    for seed in range(2):
        inputs, targets = rows_of([2 + seed] * 3)
        loss, expected = whole(3, inputs, targets)
        for stage in stages.values():
            stage.zero_grad()
        x, wanted = torch.cat(inputs), torch.cat(targets)
        assert pipeline.step({"x": x}, wanted, len(x)).loss.item() == pytest.approx(loss, rel=1e-12)
        assert_same_gradients(layers_of(stages), expected)
        assert pipeline.evaluate({"x": x}, wanted).loss.item() == pytest.approx(loss, rel=1e-12)


def test_what_a_stage_passes_on_stays_whole_until_the_next_stages_w():
    """The buffer of a message that went on unchanged was received into again before the queued W had read it."""
    run_ranks(2, run_passing)


class Shifted(nn.Module):
    """Adds its weight, whose gradient autograd takes from the message as it is; the last squares."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.weight = nn.Parameter(torch.zeros(2, WIDTH, dtype=DTYPE))

    def input_specs(self, inputs: dict[str, Any]) -> tuple[TensorSpec, ...]:
        return (TensorSpec((2 * WIDTH,), DTYPE, needs_grad=True),)

    def forward(self, x: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, ...]:
        if self.index:
            return ((x[0].view(2, WIDTH) + self.weight) ** 2).sum(), 2, {}
        return ((inputs["x"] + self.weight).view(-1),)


def run_shifted(rank: int) -> Tensor:
    stage = Shifted(rank)
    pipeline = Pipeline({rank: stage}, one_f_one_b(2, 4), Mesh.create(pp=2))
    for _ in range(2):
        stage.weight.grad = None
        pipeline.step({"x": torch.arange(8.0 * WIDTH, dtype=DTYPE).view(8, WIDTH)}, torch.zeros(8, WIDTH), 1)
    return stage.weight.grad


def test_a_gradient_that_is_the_message_itself_outlives_its_buffer():
    """Autograd keeps a first gradient without a copy; the next message came into the same memory."""
    wanted = 2 * torch.arange(8.0 * WIDTH, dtype=DTYPE).view(4, 2, WIDTH).sum(0)
    for grad in run_ranks(2, run_shifted):
        assert torch.equal(grad, wanted)


def test_layers_that_cannot_split_are_named_and_search_leaves_splits_out():
    """Case 62: zero bubble slower than 1F1B where the weight gradient cannot be taken apart."""
    able, unable = Stack(range(2), 0, 1), WholeStack(range(2), 0, 1)
    assert inseparable(able) == () and inseparable(unable) == ("layers.0", "layers.1")
    assert inseparable(ColumnParallelLinear(4, 4, Axis.single())) == ()
    assert inseparable(nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.LayerNorm(2), nn.Conv1d(1, 1, 1))) == (
        "2",
    )
    pipeline = Pipeline({0: unable}, one_f_one_b(1, 2), Mesh.single())
    assert pipeline.inseparable == {0: ("layers.0", "layers.1")}
    for stage, splits in ((able, True), (unable, False)):
        found = search(4, 8, split=not inseparable(stage))
        ops = {single.op for lane in found.lanes for single in singles(lane)}
        assert (Op.W in ops) == splits, found.name


# ---- messages, headers, allocations ------------------------------------------------------------------------------


class CountingStore:
    """Stands before the store and counts the headers laid down."""

    def __init__(self, store: Any) -> None:
        self.store, self.calls = store, Counter()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.calls[name] += 1
            return getattr(self.store, name)(*args)

        return call


def watched_store(pipeline: Pipeline) -> Counter[str]:
    """Counts what the pipeline asks of the store from here on."""
    p2p = pipeline._p2p
    assert p2p is not None
    p2p._store = CountingStore(p2p._store)
    return p2p._store.calls


def counted_messages() -> Counter[str]:
    """Counts, from here on and in this process, the messages that sockets send and receive."""
    messages: Counter[str] = Counter()
    send, fill = Outward.send, Inward.fill

    def counted_send(self: Outward, *args: Any) -> None:
        messages["sent"] += 1
        send(self, *args)

    def counted_fill(self: Inward, *args: Any) -> bool:
        messages["received"] += 1
        return fill(self, *args)

    Outward.send, Inward.fill = counted_send, counted_fill  # type: ignore[method-assign]
    return messages


def run_messages(rank: int) -> None:
    mesh, messages = Mesh.create(pp=2), counted_messages()
    for name in NAMES:
        schedule = build(name, 2, 4)
        lane = lower(schedule).lanes[rank]
        pipeline = Pipeline(stacks(schedule, rank, [1] * schedule.num_stages), schedule, mesh)
        asked = watched_store(pipeline)
        x, targets = torch.ones(4, WIDTH, dtype=DTYPE), torch.zeros(4, WIDTH, dtype=DTYPE)
        for step in range(3):
            asked.clear(), messages.clear()
            pipeline.step({"x": x}, targets, 4)
            assert messages["sent"] == sum(action.op in SENDS for action in lane), (name, step)
            assert messages["received"] == sum(action.op in RECEIVES for action in lane), (name, step)
            assert bool(asked) == (step == 0), (name, step, asked)


def test_static_shapes_need_no_message_but_the_tensors():
    run_ranks(2, run_messages)


def run_means(rank: int) -> list[int]:
    """How many all-reduces each of six steps needs: plain ones, local metrics, an evaluation."""
    calls: list[int] = []
    reduce = results_module.all_reduce
    results_module.all_reduce = lambda *given: (calls.append(1), reduce(*given))[1]  # type: ignore[assignment]
    schedule = build("zb_v", 2, 4)
    pipeline = Pipeline(stacks(schedule, rank, [1] * 4), schedule, Mesh.create(pp=2))
    x, targets, counts = torch.ones(4, WIDTH, dtype=DTYPE), torch.zeros(4, WIDTH, dtype=DTYPE), []
    for run in (
        lambda: pipeline.step({"x": x}, targets, 4),
        lambda: pipeline.step({"x": x}, targets, 4),
        lambda: pipeline.step([{"x": x}] * 4, [targets] * 4, 4),
        lambda: pipeline.step({"x": x}, targets, 4, metrics="local"),
        lambda: pipeline.evaluate({"x": x}, targets),
    ):
        calls.clear()
        run()
        counts.append(len(calls))
    with pytest.raises(ValueError, match="metrics='sum' must be 'mean' or 'local'"):
        pipeline.step({"x": x}, targets, 4, metrics="sum")  # type: ignore[arg-type]
    pipeline.step({"x": x}, targets, 4)  # a refused call breaks nothing
    return counts


def test_the_means_travel_once_per_step_and_their_names_once():
    assert run_ranks(2, run_means) == [[2, 1, 1, 0, 1]] * 2


class Quiet(torch.autograd.Function):
    """x * weight; tells the watch when the work is the module's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: Product) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stage = stage
        with stage.watch.mine():
            return (x * weight).sum() if stage.last else x * weight

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        with ctx.stage.watch.mine():
            return (dout * weight).expand_as(x).clone(), (dout * x).sum(), None


class Watch(TorchDispatchMode):
    """Counts the ops outside of modules whose result has memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[str] = Counter()
        self.depth = 0

    def mine(self) -> Watch.Mine:
        return Watch.Mine(self)

    class Mine:
        def __init__(self, watch: Watch) -> None:
            self.watch = watch

        def __enter__(self) -> None:
            self.watch.depth += 1

        def __exit__(self, *_: object) -> None:
            self.watch.depth -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        if not self.depth and isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
            self.made[str(func)] += 1
        return result


class Product(nn.Module):
    """One number times the input, as one node of the graph."""

    def __init__(self, index: int, num_stages: int, watch: Watch) -> None:
        super().__init__()
        self.last, self.watch = index == num_stages - 1, watch
        self.weight = nn.Parameter(torch.tensor(1.5 + index, dtype=DTYPE))

    def input_specs(self, inputs: dict[str, Any]) -> tuple[TensorSpec, ...]:
        return (TensorSpec((inputs["x"].shape[0], inputs["x"].shape[1]), DTYPE, needs_grad=True),)

    def forward(self, x: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, ...]:
        y = Quiet.apply(x[0] if x else inputs["x"], self.weight, self)
        return (y, 1, {}) if self.last else (y,)


def run_allocations(rank: int, names: list[str], width: int) -> list[tuple[str, list[Counter[str]]]]:
    """Per schedule: what the executor allocates in each of three steps, for 4 and for 8 micro-batches."""
    mesh, found = Mesh.create(pp=2), []
    for name in names:
        for m in (4, 8):
            schedule, watch, steps = build(name, 2, m), Watch(), []
            stages = {s: Product(s, schedule.num_stages, watch) for s in schedule.stages_of(rank)}
            pipeline = Pipeline(stages, schedule, mesh)
            x, targets = torch.ones(2 * m, width, dtype=DTYPE), torch.zeros(2 * m)
            for _ in range(3):
                watch.made.clear()
                with watch:
                    pipeline.step({"x": x}, targets, m, metrics="local")
                steps.append(Counter(watch.made))
            found.append((name, steps))
    return found


@pytest.mark.parametrize("width", [WIDTH, 5000])
def test_no_step_but_the_first_allocates_per_microbatch(width):
    """Receive buffers come in the first step; what a later one makes is for its result, whatever M is.

    Of large messages, which lie in slots, the first step keeps two buffers a channel, from before it knew of slots.
    """
    for rank, found in enumerate(run_ranks(2, run_allocations, ["1f1b", "interleaved", "zb_v"], width)):
        for (name, few), (_, many) in zip(found[::2], found[1::2], strict=True):
            assert sum(few[0].values()) > sum(few[1].values()), f"rank {rank} {name}: the watch sees nothing"
            assert few[1] == few[2] == many[1] == many[2], (rank, name, few[1:], many[1:])
            assert "aten.empty.memory_format" not in many[1] and sum(many[1].values()) <= 8, many[1]


LARGE = 10_000


class Wide(nn.Module):
    """tanh of its number times the input, [rows, LARGE] fp64: messages of 80 kB a row; autograd saves the input."""

    def __init__(self, index: int, num_stages: int) -> None:
        super().__init__()
        self.last = index == num_stages - 1
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, LARGE, dtype=DTYPE) + index)

    def input_specs(self, inputs: dict[str, Any]) -> tuple[TensorSpec, ...]:
        return (TensorSpec((inputs["x"].shape[0], LARGE), DTYPE, needs_grad=True),)

    def forward(self, x: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, ...]:
        y = torch.tanh((x[0] if x else inputs["x"]) * self.weight)
        return (y.sum(), 1, {}) if self.last else (y,)


def run_large(rank: int, way: str) -> list[Tensor]:
    """Loss and gradients of three steps of each schedule, the middle one with lengths of its own."""
    if way == "gloo":
        local_links.machine = lambda limit_bytes: f"machine {rank}"  # type: ignore[assignment]
    if way == "few slots":
        slots.MOST_SLOTS = 1
    mesh, found = Mesh.create(pp=2), []
    x = torch.linspace(-1, 1, 4 * LARGE, dtype=DTYPE).view(4, LARGE)
    for name in ("1f1b", "interleaved", "zb_v"):
        schedule = build(name, 2, 4)
        stages = {s: Wide(s, schedule.num_stages) for s in schedule.stages_of(rank)}
        pipeline = Pipeline(stages, schedule, mesh)
        pipeline.step({"x": x}, torch.zeros(4), 4)
        pipeline.step([{"x": x[: m + 1]} for m in range(4)], [torch.zeros(m + 1) for m in range(4)], 10)
        for _ in range(2):
            found.append(pipeline.step({"x": x}, torch.zeros(4), 4).loss)
        found += [stage.weight.grad for stage in stages.values()]
        lenders = [outward._lender for outward in pipeline._p2p.local._outward.values()]
        counts = [len(lender._slots) for lender in lenders]
        assert {"slots": all(counts), "few slots": counts == [1], "gloo": counts == []}[way], counts
    return found


def test_large_messages_give_the_same_bits_in_shared_memory_by_gloo_and_by_both():
    ways = [run_ranks(2, run_large, way) for way in ("slots", "few slots", "gloo")]
    for rank in range(2):
        for mine, few, by_gloo in zip(*(way[rank] for way in ways), strict=True):
            assert torch.equal(mine, few) and torch.equal(mine, by_gloo)


# ---- lengths that differ -----------------------------------------------------------------------------------------

LENGTHS = [3, 1, 5, 2]


def listed_step(pipeline: Pipeline, sizes: list[int]) -> float:
    inputs, targets = rows_of(sizes)
    return pipeline.step([{"x": x} for x in inputs], targets, sum(sizes)).loss.item()


def run_lengths(rank: int, p: int, names: list[str], tags: bool) -> None:
    """Listed steps, a plain one and an evaluation in between: loss, gradients, headers and buffers."""
    if not tags:
        pipeline_module.P2P = partial(P2P, tags=False)  # type: ignore[misc]
    mesh = Mesh.create(pp=p) if p > 1 else Mesh.single()
    for name in names:
        schedule = build(name, p, len(LENGTHS))
        stages = stacks(schedule, rank, [1] * schedule.num_stages)
        pipeline = Pipeline(stages, schedule, mesh)
        asked = watched_store(pipeline) if p > 1 else Counter()
        incoming = sum(s > 0 and s - 1 not in stages for s in stages)
        outgoing = sum(s + 1 < schedule.num_stages and s + 1 not in stages for s in stages)
        made = 0
        for step, sizes in enumerate([LENGTHS, LENGTHS, [2] * 4, LENGTHS, [2] * 4, [1, 1, 2, 7], LENGTHS]):
            for stage in stages.values():
                stage.zero_grad()
            asked.clear()
            inputs, targets = rows_of(sizes)
            loss, expected = whole(schedule.num_stages, inputs, targets)
            if step in (2, 4):
                got = pipeline.step({"x": torch.cat(inputs)}, torch.cat(targets), sum(sizes)).loss.item()
            else:
                got = listed_step(pipeline, sizes)
            assert got == pytest.approx(loss, rel=1e-12), (name, step)
            assert_same_gradients(layers_of(stages), expected)
            if step in (1, 3, 5, 6):
                assert asked["set"] == incoming + (0 if tags else outgoing), (name, step, asked)
            made = pipeline.num_buffers if step == 0 else made
            assert step > 1 or pipeline.num_buffers == made, "the same lengths again need no new buffer"
        held_out = pipeline.evaluate([{"x": x} for x in inputs], targets)
        assert held_out.loss.item() == pytest.approx(loss, rel=1e-12)
        if pipeline._p2p is not None:
            assert len(pipeline._p2p._free) <= 2 * len(set(LENGTHS)), "buffers of all lengths ever seen are kept"


@pytest.mark.parametrize(
    "p, names, tags",
    [(1, ["1f1b"], True), (2, list(NAMES), True), (4, ["1f1b", "zb_v"], True), (2, ["1f1b", "interleaved"], False)],
)
def test_microbatches_of_different_lengths_equal_one_process(p, names, tags):
    """One header per channel and step says all lengths; buffers are reused by shape. Also told apart by order."""
    run_ranks(p, run_lengths, p, names, tags) if p > 1 else run_lengths(0, p, names, tags)


def run_two_pipelines(rank: int) -> float:
    """dp = 2, pp = 2: each pipeline has lengths of its own."""
    mesh = Mesh.create(dp=2, pp=2)
    row, coord = mesh.coords()["dp"], mesh.axis("pp").coord
    stages = stacks(one_f_one_b(2, 3), coord, [1, 1])
    pipeline = Pipeline(stages, one_f_one_b(2, 3), mesh)
    sizes = [[1, 4, 2], [3, 3, 5]][row]
    inputs, targets = rows_of(sizes)
    for _ in range(2):
        pipeline.step([{"x": x} for x in inputs], targets, 18)
    loss, expected = whole(2, inputs, targets)
    for number, layer in layers_of(stages).items():
        for ours, theirs in zip(layer.parameters(), expected[number].parameters(), strict=True):
            torch.testing.assert_close(ours.grad, 2 * theirs.grad * sum(sizes) / 18, **CLOSE)
    return loss * sum(sizes) / 18


def test_two_pipelines_with_lengths_of_their_own():
    """Case 10: shapes exchanged without the group of the pipeline."""
    run_ranks(4, run_two_pipelines)


class Surprising(Stack):
    """Sends a row too many for one micro-batch."""

    wrong = 0

    def forward(self, x: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, ...]:
        (h,) = super().forward(x, inputs)
        return (torch.cat([h, h[:1]]) if inputs["microbatch"] == self.wrong else h,)


def run_surprise(rank: int, wrong: int) -> str:
    schedule = one_f_one_b(2, 4)
    stages = stacks(schedule, rank, [1, 1], Surprising if rank == 0 else Stack)
    for stage in stages.values():
        stage.wrong = wrong  # type: ignore[assignment]
    pipeline = Pipeline(stages, schedule, Mesh.create(pp=2, timeout_s=2))
    with pytest.raises(ChannelError) as caught:
        listed_step(pipeline, LENGTHS)
    assert isinstance(caught.value, ChannelTimeout) == (rank == 1 and wrong > 0)
    return str(caught.value)


@pytest.mark.parametrize("wrong", [0, 2])
def test_a_message_that_is_not_as_listed_is_never_sent(wrong):
    """Both ends say what they have on first use; later the sender does, and the receiver times out by name."""
    first, second = run_ranks(2, run_surprise, wrong)
    here, there = f"float64[{LENGTHS[wrong] + 1}, 5]", f"float64[{LENGTHS[wrong]}, 5]"
    assert f"action 0SEND_F{wrong}" in first and here in first and there in first
    assert f"action 1RECV_F{wrong}" in second and "peer rank 0" in second
    assert wrong or (here in second and there in second)


def run_forms(rank: int) -> str:
    """After a plain step the ranks call in different forms."""
    pipeline = Pipeline(stacks(one_f_one_b(2, 4), rank, [1, 1]), one_f_one_b(2, 4), Mesh.create(pp=2, timeout_s=2))
    inputs, targets = rows_of([2] * 4)
    pipeline.step({"x": torch.cat(inputs)}, torch.cat(targets), 8)
    with pytest.raises(ChannelError) as caught:
        if rank:
            listed_step(pipeline, LENGTHS)
        else:
            pipeline.step({"x": torch.cat(inputs)}, torch.cat(targets), 8)
    return str(caught.value)


def test_ranks_that_call_in_different_forms_never_take_each_others_messages():
    for rank, text in enumerate(run_ranks(2, run_forms)):
        assert f"peer rank {1 - rank}" in text


@pytest.mark.parametrize(
    "inputs, targets, message",
    [
        ([{}] * 3, [torch.zeros(1)] * 4, "inputs is 3 entries; with inputs by micro-batch both are lists with one"),
        ([{}] * 4, [torch.zeros(1)] * 2, "targets is 2 entries"),
        ([{}] * 4, torch.zeros(4), "targets is a Tensor"),
        (iter([{}]), [torch.zeros(1)] * 4, "inputs is a list_iterator"),
    ],
)
def test_lists_of_another_length_are_refused_and_break_nothing(inputs, targets, message):
    pipeline = Pipeline(stacks(one_f_one_b(1, 4), 0, [1]), one_f_one_b(1, 4), Mesh.single())
    with pytest.raises(ValueError) as caught:
        pipeline.step(inputs, targets, 4)
    assert message in str(caught.value)
    assert listed_step(pipeline, LENGTHS) > 0
