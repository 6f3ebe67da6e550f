"""The executor: any schedule gives the gradients of the unsplit model, holds what was proved, and never hangs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.parallel import pipeline as pipeline_module
from plait.parallel.gradients import GradSink
from plait.parallel.mesh import Mesh
from plait.parallel.p2p import P2P
from plait.parallel.pipeline import ChannelError, Pipeline, TensorSpec
from plait.parallel.schedules import Schedule, ScheduleError, gpipe, interleaved, lower, one_f_one_b, parse_csv
from plait.parallel.schedules.action import COMPUTE
from tests.ranks import run_ranks
from tests.torch_schedules import torch_csv

WIDTH = 5
DTYPE = torch.float64
# fp64: sums over micro-batches come in another order than the unsplit model's one matmul
CLOSE = {"rtol": 1e-12, "atol": 1e-13}


class LinearStage(nn.Module):
    """tanh of a linear layer; the last stage adds squared errors against the targets."""

    def __init__(self, index: int, num_stages: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(100 + index)
        self.index, self.num_stages = index, num_stages
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=DTYPE) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.randn(WIDTH, generator=generator, dtype=DTYPE))

    def input_specs(self, inputs: dict[str, Any]) -> tuple[TensorSpec, ...]:
        return (TensorSpec((inputs["x"].shape[0], WIDTH), DTYPE, needs_grad=True),)

    def layer(self, x: Tensor) -> Tensor:
        return torch.tanh(nn.functional.linear(x, self.weight, self.bias))

    def forward(self, x: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, ...]:
        h = self.layer(inputs["x"] if self.index == 0 else x[0])
        if self.index < self.num_stages - 1:
            return (h,)
        errors = (h - inputs["targets"]) ** 2
        return errors.sum(), inputs["targets"].shape[0], {"absolute": errors.detach().sqrt().sum()}


class _SplitLinear(torch.autograd.Function):
    """A linear layer whose weight gradient goes to the sink."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: SplitStage) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return x @ layer.weight.detach().T + layer.bias.detach()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        (x,), layer = ctx.saved_tensors, ctx.layer
        sink = layer.weight_grads

        def work() -> None:
            layer.calls.append((sink.microbatch, sink.deferring))
            layer.weight.grad = dout.T @ x if layer.weight.grad is None else layer.weight.grad + dout.T @ x
            layer.bias.grad = dout.sum(0) if layer.bias.grad is None else layer.bias.grad + dout.sum(0)

        sink.add(sink.microbatch, work)
        return dout @ layer.weight.detach(), None


class SplitStage(LinearStage):
    """The same maths with separable weight gradients."""

    def __init__(self, index: int, num_stages: int) -> None:
        super().__init__(index, num_stages)
        self.weight_grads = GradSink()
        self.calls: list[tuple[int, bool]] = []

    def layer(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_(torch.is_grad_enabled())
        return torch.tanh(_SplitLinear.apply(x, self))


class TupleStage(LinearStage):
    """Hands on two differentiable tensors of which one is unused, an int64 tensor, a bool and a number."""

    def input_specs(self, inputs: dict[str, Any]) -> tuple[TensorSpec, ...]:
        rows = inputs["x"].shape[0]
        return (
            TensorSpec((rows, WIDTH), DTYPE, needs_grad=True),
            TensorSpec((rows,), torch.int64),
            TensorSpec((rows, 2), DTYPE, needs_grad=True),
            TensorSpec((rows, 3), DTYPE),
            TensorSpec((), torch.int64, plain=True),
        )

    def forward(self, x: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, ...]:
        if self.index == 0:
            rows = inputs["x"].shape[0]
            ids, passed, depth = torch.arange(rows) % 3, inputs["x"][:, :2] * self.bias[:2], 0
        else:
            ids, passed, depth = x[1], x[2], x[4]
            assert type(depth) is int and depth == self.index and ids.dtype == torch.int64
        h = self.layer(inputs["x"] if self.index == 0 else x[0]) + ids[:, None]
        if self.index < self.num_stages - 1:
            return h, ids, passed, h[:, :3] * 2, depth + 1  # `passed` goes through, h[:, :3] * 2 is never used
        used = passed.sum() if self.uses_passed else 0.0
        return ((h - inputs["targets"]) ** 2).sum() + used, inputs["targets"].shape[0], {}

    uses_passed = True


class UnusedStage(TupleStage):
    """As TupleStage, and the passed tensor is never used either."""

    uses_passed = False


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved2": lambda p, m: interleaved(p, 2, m),
    "interleaved3": lambda p, m: interleaved(p, 3, m),
    "zb_h1": lambda p, m: parse_csv(torch_csv("ScheduleInterleavedZeroBubble", p, 1, m), "zb_h1"),
    "zb_v": lambda p, m: parse_csv(torch_csv("ScheduleZBVZeroBubble", p, 2, m), "zb_v"),
    "dualpipe_v": lambda p, m: parse_csv(torch_csv("ScheduleDualPipeV", p, 2, m), "dualpipe_v"),
}
STAGES: dict[str, type[LinearStage]] = {
    "linear": LinearStage,
    "split": SplitStage,
    "tuple": TupleStage,
    "unused": UnusedStage,
}


def batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(rows, WIDTH, generator=generator, dtype=DTYPE) for _ in range(2))  # type: ignore[return-value]


def unsplit(
    kind: type[LinearStage], num_stages: int, num_microbatches: int, rows: int
) -> tuple[float, list[nn.Module]]:
    """Loss and stages with gradients of the unsplit model, one micro-batch after the other."""
    base = LinearStage if kind is SplitStage else kind
    stages = [base(index, num_stages) for index in range(num_stages)]
    x, targets = batch(rows)
    total = 0.0
    for part, target in zip(x.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True):
        values: tuple[Any, ...] = ()
        for stage in stages:
            values = stage(values, {"x": part, "targets": target})
        (values[0] / rows).backward()
        total += values[0].item() / rows
    return total, list(stages)


def assert_same_gradients(stages: dict[int, nn.Module], expected: list[nn.Module]) -> None:
    for index, stage in stages.items():
        for (name, ours), theirs in zip(stage.named_parameters(), expected[index].parameters(), strict=True):
            assert ours.grad is not None and ours.grad.abs().sum() > 0, f"stage {index} {name} got no gradient"
            torch.testing.assert_close(ours.grad, theirs.grad, **CLOSE)


# ---- parity ------------------------------------------------------------------------------------------------------


def run_parity(rank: int, name: str, kind: str, p: int, m: int) -> tuple[float, int]:
    """Two steps, an evaluation between them: loss, gradients, proved peak, buffers; returns loss and buffers."""
    schedule = SCHEDULES[name](p, m)
    mesh = Mesh.create(pp=p) if p > 1 else Mesh.single()
    place = schedule.stages_of(rank)
    stages: dict[int, nn.Module] = {s: STAGES[kind](s, schedule.num_stages) for s in place}
    pipeline = Pipeline(stages, schedule, mesh)
    rows = 2 * m
    x, targets = batch(rows)
    loss, expected = unsplit(STAGES[kind], schedule.num_stages, m, rows)
    result = pipeline.step({"x": x}, targets, rows)
    assert_same_gradients(stages, expected)
    assert result.loss.item() == pytest.approx(loss, rel=1e-12) and result.count.item() == rows
    assert pipeline.peak_activations == pipeline.report.peak_activations[rank]
    made = pipeline.num_buffers
    held_out = pipeline.evaluate({"x": x}, targets)
    assert held_out.loss.item() == pytest.approx(loss, rel=1e-12)
    before = [p.grad.clone() for s in stages.values() for p in s.parameters()]
    pipeline.step({"x": x}, targets, rows)
    after = [p.grad for s in stages.values() for p in s.parameters()]
    for once, twice in zip(before, after, strict=True):
        torch.testing.assert_close(2 * once, twice, **CLOSE)
    assert pipeline.num_buffers == made, "a later step allocated receive buffers"
    runner_state = [v for runner in pipeline._runners.values() for v in vars(runner).values() if isinstance(v, dict)]
    assert not any(runner_state), "something of the step is alive"
    return result.loss.item(), made


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved2", "interleaved3"])
@pytest.mark.parametrize("kind", ["linear", "split"])
def test_one_rank_runs_every_schedule_without_a_process_group(name, kind):
    assert run_parity(0, name, kind, 1, 4)[1] == 0


@pytest.mark.parametrize("m", [1, 2, 3, 6])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved2"])
def test_two_ranks_equal_the_unsplit_model(name, m):
    """Cases 5, 26 and 35: hang of 1F1B, gradients that depend on M, gradients of a chunk lost."""
    losses = run_ranks(2, run_parity, name, "linear", 2, m)
    assert losses[0][0] == losses[1][0]


@pytest.mark.parametrize("m", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved2"])
def test_four_ranks_equal_the_unsplit_model_also_with_fewer_microbatches(name, m):
    """Case 9: a hang when M < P."""
    run_ranks(4, run_parity, name, "linear", 4, m)


@pytest.mark.parametrize("name, p, m", [("zb_h1", 2, 4), ("zb_v", 2, 4), ("dualpipe_v", 2, 6), ("zb_h1", 4, 8)])
@pytest.mark.parametrize("kind", ["linear", "split"])
def test_split_backward_schedules_of_torch_run_here(name, p, m, kind):
    run_ranks(p, run_parity, name, kind, p, m)


@pytest.mark.parametrize("name", ["1f1b", "interleaved2", "zb_h1"])
@pytest.mark.parametrize("kind", ["tuple", "unused"])
def test_stages_may_return_several_outputs_some_unused(name, kind):
    """Case 21: wrong weight gradients of a stage with several outputs."""
    run_ranks(2, run_several, name, kind, 4)
    run_several(0, name, kind, 4, p=1)


def run_several(rank: int, name: str, kind: str, m: int, p: int = 2) -> None:
    schedule = SCHEDULES[name](p, m)
    mesh = Mesh.create(pp=p) if p > 1 else Mesh.single()
    stages: dict[int, nn.Module] = {s: STAGES[kind](s, schedule.num_stages) for s in schedule.stages_of(rank)}
    x, targets = batch(3 * m)
    loss, expected = unsplit(STAGES[kind], schedule.num_stages, m, 3 * m)
    pipeline = Pipeline(stages, schedule, mesh)
    for step in range(2):
        for stage in stages.values():
            stage.zero_grad()
        result = pipeline.step({"x": x}, targets, 3 * m)
        assert result.loss.item() == pytest.approx(loss, rel=1e-12), step
        assert_same_gradients(stages, expected)
    assert pipeline.evaluate({"x": x}, targets).loss.item() == pytest.approx(loss, rel=1e-12)


def run_m(rank: int, m: int) -> list[Tensor]:
    stages: dict[int, nn.Module] = {rank: LinearStage(rank, 2)}
    x, targets = batch(12)
    Pipeline(stages, one_f_one_b(2, m), Mesh.create(pp=2)).step({"x": x}, targets, 12)
    return [p.grad for p in stages[rank].parameters()]


def test_gradients_do_not_depend_on_the_number_of_microbatches():
    """Case 26: sums where means were meant make the norm M times too large."""
    one = run_ranks(2, run_m, 1)
    for m in (2, 4, 12):
        for ours, theirs in zip(run_ranks(2, run_m, m), one, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, **CLOSE)


def test_all_schedules_on_one_grid_give_the_same_bits():
    gradients = {name: run_ranks(2, run_bits, name) for name in ("gpipe", "1f1b")}
    for a, b in zip(*(sum(g, []) for g in gradients.values()), strict=True):
        assert torch.equal(a, b)


def run_bits(rank: int, name: str) -> list[Tensor]:
    stages: dict[int, nn.Module] = {rank: LinearStage(rank, 2)}
    x, targets = batch(12)
    Pipeline(stages, SCHEDULES[name](2, 4), Mesh.create(pp=2)).step({"x": x}, targets, 12)
    return [p.grad for p in stages[rank].parameters()]


def run_dp_pp(rank: int, name: str) -> tuple[float, list[str]]:
    """dp = 2, pp = 2: each pipeline takes half the rows; means are over the mesh."""
    mesh = Mesh.create(dp=2, pp=2)
    schedule = SCHEDULES[name](2, 4)
    coord, half = mesh.axis("pp").coord, mesh.coords()["dp"]
    stages: dict[int, nn.Module] = {s: LinearStage(s, schedule.num_stages) for s in schedule.stages_of(coord)}
    x, targets = batch(16)
    log = Recorder()
    pipeline = Pipeline(stages, schedule, mesh, data_parallel=log)
    result = pipeline.step({"x": x.chunk(2)[half]}, targets.chunk(2)[half], 16)
    assert result.count.item() == 16 and "absolute" in result.extras
    return result.loss.item(), log.calls


class Recorder:
    """Stands in for data parallelism and writes down what it is asked."""

    whole_stages = 0

    def __init__(self) -> None:
        self.calls: list[str] = []

    def open(self, stage: int) -> None:
        self.calls.append(f"open {stage}")

    def tie(self, stage: int) -> None:
        self.calls.append(f"tie {stage}")

    def reduce(self, stage: int) -> None:
        self.calls.append(f"reduce {stage}")

    def unshard(self, stage: int) -> None:
        self.calls.append(f"unshard {stage}")

    def reshard(self, stage: int) -> None:
        self.calls.append(f"reshard {stage}")


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_every_rank_gets_the_mean_over_the_mesh(name):
    """Case 22: the reduction comes once per stage, after its last W."""
    loss, _ = unsplit(LinearStage, 2, 8, 16)
    for rank, (ours, calls) in enumerate(run_ranks(4, run_dp_pp, name)):
        assert ours == pytest.approx(loss, rel=1e-12)
        assert calls == [f"open {rank % 2}", f"reduce {rank % 2}"]


def run_without_tags(rank: int, name: str, p: int, m: int) -> None:
    """As NCCL must: messages told apart by their order on a communicator per link, and by nothing else."""
    pipeline_module.P2P = partial(P2P, tags=False)  # type: ignore[misc]
    if name == "1f1b":
        run_several(rank, name, "tuple", m)
    else:
        run_parity(rank, name, "linear", p, m)


@pytest.mark.parametrize(
    "name, p, m",
    [("1f1b", 2, 4), ("interleaved2", 2, 5), ("interleaved3", 2, 4), ("interleaved2", 4, 6), ("zb_v", 2, 4)],
)
def test_messages_without_tags_stay_in_order(name, p, m):
    """Cases 4 and 7: NCCL has no tags, and its communicators must be used in one order."""
    run_ranks(p, run_without_tags, name, p, m)


# ---- order, memory, timeline -------------------------------------------------------------------------------------


def record(stages: dict[int, nn.Module], schedule: Schedule, rows: int) -> tuple[list[str], Pipeline]:
    log = Recorder()
    for index, stage in stages.items():
        stage.register_forward_pre_hook(lambda *_, i=index: log.calls.append(f"F {i}"))
    pipeline = Pipeline(stages, schedule, Mesh.single(), data_parallel=log)
    x, targets = batch(rows)
    pipeline.step({"x": x}, targets, rows)
    return log.calls, pipeline


def test_tie_comes_before_reduce_and_open_before_the_last_backward():
    stages: dict[int, nn.Module] = {s: LinearStage(s, 2) for s in range(2)}
    schedule = parse_csv("0F0,1F0,1B0,0B0,0F1,1F1,1B1,0B1\n").with_tied()
    calls, pipeline = record(stages, schedule, 4)
    assert calls == ["F 0", "F 1", "F 0", "F 1", "open 1", "tie 1", "reduce 1", "open 0", "tie 0", "reduce 0"]
    assert [str(e.action) for e in pipeline.timeline] == [str(a) for a in schedule.lanes[0]]


def test_weight_gradients_wait_for_w_and_open_comes_before_the_last_w():
    stage = SplitStage(0, 1)
    schedule = parse_csv("0F0,0F1,0I0,0I1,0W1,0W0\n")
    record({0: stage}, schedule, 4)
    assert [deferring for _, deferring in stage.calls] == [True, True]
    expected = unsplit(LinearStage, 1, 2, 4)[1]
    assert_same_gradients({0: stage}, expected)
    whole = SplitStage(0, 1)
    record({0: whole}, gpipe(1, 2), 4)
    assert whole.calls == [(0, False), (1, False)]


def test_activations_die_with_their_backward():
    """Case 57: memory of a stage that is kept until the end of the step, or beyond."""
    alive: list[weakref.ref] = []
    seen: list[int] = []

    class Watched(LinearStage):
        def layer(self, x: Tensor) -> Tensor:
            seen.append(sum(ref() is not None for ref in alive))
            h = super().layer(x)
            alive.append(weakref.ref(h))
            return h

    gc.disable()  # nothing may need the collector
    try:
        x, targets = batch(8)
        Pipeline({0: Watched(0, 1)}, one_f_one_b(1, 4), Mesh.single()).step({"x": x}, targets, 8)
    finally:
        gc.enable()
    assert seen == [0, 0, 0, 0]
    assert all(ref() is None for ref in alive)


def run_dying(rank: int) -> tuple[list[int], int]:
    """At each forward of rank 0: how many outputs of earlier forwards are alive."""
    alive: list[weakref.ref] = []
    seen: list[int] = []

    class Watched(LinearStage):
        def layer(self, x: Tensor) -> Tensor:
            seen.append(sum(ref() is not None for ref in alive))
            h = super().layer(x)
            alive.append(weakref.ref(h))
            return h

    gc.disable()
    x, targets = batch(16)
    Pipeline({rank: Watched(rank, 2)}, one_f_one_b(2, 8), Mesh.create(pp=2)).step({"x": x}, targets, 16)
    return seen, sum(ref() is not None for ref in alive)


def test_activations_die_with_their_backward_across_ranks():
    """Rank r of 1F1B holds P - r outputs at most, counting the one being made."""
    for rank, (seen, left) in enumerate(run_ranks(2, run_dying)):
        assert max(seen) + 1 == 2 - rank and left == 0


def test_timeline_lists_the_lane_in_order():
    stages: dict[int, nn.Module] = {s: LinearStage(s, 2) for s in range(2)}
    x, targets = batch(4)
    pipeline = Pipeline(stages, one_f_one_b(2, 2), Mesh.single())
    assert pipeline.timeline == ()
    pipeline.step({"x": x}, targets, 4)
    events = pipeline.timeline
    lane = [a for a in pipeline.schedule.lanes[0] if a.op in COMPUTE]
    assert [e.action for e in events] == lane
    assert events[0].start == 0 and all(a.end <= b.start for a, b in zip(events, events[1:], strict=False))
    assert all(e.wait == 0 for e in events)


def test_a_schedule_that_is_lowered_already_runs():
    schedule = lower(one_f_one_b(2, 4))
    run_ranks(2, run_lowered, schedule)


def run_lowered(rank: int, schedule: Schedule) -> None:
    stages: dict[int, nn.Module] = {rank: LinearStage(rank, 2)}
    x, targets = batch(8)
    loss, expected = unsplit(LinearStage, 2, 4, 8)
    assert Pipeline(stages, schedule, Mesh.create(pp=2)).step({"x": x}, targets, 8).loss.item() == pytest.approx(loss)
    assert_same_gradients(stages, expected)


# ---- inputs and results ------------------------------------------------------------------------------------------


def test_inputs_are_split_by_rows_and_shared_ones_are_not():
    seen: list[dict[str, Any]] = []

    class Looking(LinearStage):
        def forward(self, x: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, ...]:
            seen.append(inputs)
            return super().forward(x, inputs)

    x, targets = batch(4)
    inputs = {
        "x": x,
        "shared_positions": torch.arange(4),
        "table": torch.arange(3),
        "step": 9,
        "scale": torch.tensor(2.0),
    }
    Pipeline({0: Looking(0, 1)}, gpipe(1, 2), Mesh.single()).step(inputs, targets, 4)
    for m, got in enumerate(seen):
        assert got["microbatch"] == m and got["step"] == 9
        assert torch.equal(got["x"], x[2 * m : 2 * m + 2]) and torch.equal(got["targets"], targets[2 * m : 2 * m + 2])
        assert got["shared_positions"].shape == (4,) and got["table"].shape == (3,) and got["scale"].dim() == 0


def test_rows_that_microbatches_do_not_divide_are_refused():
    x, targets = batch(7)
    pipeline = Pipeline({0: LinearStage(0, 1)}, gpipe(1, 2), Mesh.single())
    with pytest.raises(ValueError, match="7 rows, which 2 micro-batches do not divide.*use 6 or 8"):
        pipeline.step({"x": x}, targets, 7)
    x, targets = batch(8)
    pipeline.step({"x": x}, targets, 8)  # a refused batch breaks nothing


def test_the_divisor_is_all_that_scales():
    gradients = []
    for divisor in (1, 8, 100.0):
        stage = LinearStage(0, 1)
        x, targets = batch(8)
        result = Pipeline({0: stage}, gpipe(1, 4), Mesh.single()).step({"x": x}, targets, divisor)
        gradients.append((stage.weight.grad * divisor, result.loss * divisor, result.extras["absolute"] * divisor))
    for other in gradients[1:]:
        for a, b in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(a, b, **CLOSE)


def test_evaluate_leaves_modules_and_gradients_as_they_were():
    modes: list[tuple[bool, bool]] = []

    class Moody(LinearStage):
        def __init__(self) -> None:
            super().__init__(0, 1)
            self.frozen = nn.Dropout().eval()

        def layer(self, x: Tensor) -> Tensor:
            modes.append((self.training, torch.is_grad_enabled()))
            return super().layer(x)

    stage = Moody()
    x, targets = batch(4)
    result = Pipeline({0: stage}, gpipe(1, 2), Mesh.single()).evaluate({"x": x}, targets)
    assert modes == [(False, False)] * 2 and stage.training and not stage.frozen.training
    assert stage.weight.grad is None and result.count.item() == 4


def run_local_metrics(rank: int) -> tuple[float, float, list[str]]:
    x, targets = batch(8)
    pipeline = Pipeline({rank: LinearStage(rank, 2)}, one_f_one_b(2, 4), Mesh.create(pp=2))
    result = pipeline.step({"x": x}, targets, 8, metrics="local")
    return result.loss.item(), result.count.item(), sorted(result.extras)


def test_local_metrics_are_zero_but_on_the_last_stage():
    loss, _ = unsplit(LinearStage, 2, 4, 8)
    first, last = run_ranks(2, run_local_metrics)
    assert first == (0.0, 0.0, []) and last == (pytest.approx(loss, rel=1e-12), 8.0, ["absolute"])


def test_a_frozen_first_stage_needs_no_gradient():
    run_ranks(2, run_frozen)


def run_frozen(rank: int) -> None:
    stage = LinearStage(rank, 2).requires_grad_(rank == 1)
    x, targets = batch(8)
    Pipeline({rank: stage}, one_f_one_b(2, 4), Mesh.create(pp=2)).step({"x": x}, targets, 8)
    if rank == 0:
        assert stage.weight.grad is None
    else:
        torch.testing.assert_close(stage.weight.grad, unsplit(LinearStage, 2, 4, 8)[1][1].weight.grad, **CLOSE)


# ---- refusals and failures ---------------------------------------------------------------------------------------


def test_stages_on_the_wrong_rank_are_refused():
    """Case 14: the executor reads the placement from the schedule."""
    with pytest.raises(ValueError, match=r"stages=\[0\]: schedule gpipe places stages \[0, 1\] on coordinate 0"):
        Pipeline({0: LinearStage(0, 2)}, gpipe(2, 2), Mesh.single())


def test_a_broken_schedule_is_refused_before_it_runs():
    broken = parse_csv("0B0,0F0\n")
    with pytest.raises(ScheduleError, match="0B0: stands before 0F0"):
        Pipeline({0: LinearStage(0, 1)}, broken, Mesh.single())


def run_wrong_size(rank: int) -> str:
    with pytest.raises(ValueError) as caught:
        Pipeline({rank: LinearStage(rank, 4)}, gpipe(4, 2), Mesh.create(pp=2))
    return str(caught.value)


def test_a_schedule_for_another_number_of_ranks_is_refused():
    assert "schedule gpipe is for 4 ranks; mesh axis pp has 2" in run_ranks(2, run_wrong_size)[0]


class WrongSpec(LinearStage):
    """Expects half precision where the stage before sends fp64."""

    def input_specs(self, inputs: dict[str, Any]) -> tuple[TensorSpec, ...]:
        return (TensorSpec((inputs["x"].shape[0], WIDTH), torch.float16, needs_grad=True),)


def run_mismatch(rank: int) -> str:
    pipeline = Pipeline({rank: WrongSpec(rank, 2)}, one_f_one_b(2, 4), Mesh.create(pp=2, timeout_s=20))
    x, targets = batch(8)
    with pytest.raises(ChannelError) as caught:
        pipeline.step({"x": x}, targets, 8)
    with pytest.raises(RuntimeError, match="this pipeline failed before"):
        pipeline.step({"x": x}, targets, 8)
    return str(caught.value)


def test_stages_that_disagree_on_what_passes_between_them_both_say_so():
    for rank, text in enumerate(run_ranks(2, run_mismatch)):
        assert f"rank {rank} action {('0SEND_F0', '1RECV_F0')[rank]}" in text
        assert "float64[2, 5]" in text and "float16[2, 5]" in text


class Failing(LinearStage):
    """Raises in the second forward of rank 1."""

    count = 0

    def layer(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.index == 1 and self.count == 2:
            raise ArithmeticError("broken layer")
        return super().layer(x)


def run_failing(rank: int) -> str:
    pipeline = Pipeline({rank: Failing(rank, 2)}, one_f_one_b(2, 4), Mesh.create(pp=2, timeout_s=5))
    x, targets = batch(8)
    with pytest.raises(ArithmeticError if rank == 1 else ChannelError) as caught:
        pipeline.step({"x": x}, targets, 8)
    return str(caught.value)


def test_a_stalled_peer_is_named_with_the_action_that_waits():
    first, second = run_ranks(2, run_failing)
    assert "rank 0 action 0RECV_B1" in first and "peer rank 1" in first
    assert second == "broken layer"


class Growing(LinearStage):
    """The second micro-batch has other shapes."""

    def forward(self, x: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, ...]:
        (h,) = super().forward(x, inputs)
        return (torch.cat([h, h]) if inputs["microbatch"] == 1 else h,)


def run_growing(rank: int) -> str:
    stage = (Growing if rank == 0 else LinearStage)(rank, 2)
    pipeline = Pipeline({rank: stage}, one_f_one_b(2, 4), Mesh.create(pp=2, timeout_s=2))
    x, targets = batch(8)
    with pytest.raises(ValueError if rank == 0 else ChannelError) as caught:
        pipeline.step({"x": x}, targets, 8)
    return str(caught.value)


def test_microbatches_of_unequal_shape_are_refused_by_name():
    first, second = run_ranks(2, run_growing)
    assert "stage 0 micro-batch 1" in first and "must be alike" in first
    assert "1RECV_F" in second and "peer rank 0" in second
