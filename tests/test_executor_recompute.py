"""Recompute inside the bubble: what backward needs anyway is made again while the rank waits for the gradient.

Events of each backward are written down in their order: "again L" the second forward of layer L, "wait" the moment
the rank begins to wait for the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.parallel.mesh import Mesh
from plait.parallel.pipeline import Pipeline
from plait.parallel.recompute import Policy, recompute, recompute_early
from plait.parallel.schedules import NAMES, build, gpipe, one_f_one_b, parse_csv
from plait.parallel.schedules.lowering import idle_before
from tests.ranks import run_ranks
from tests.test_executor import THREE_ON_TWO, Stack, layers_of, rows_of

pytestmark = pytest.mark.ranks


class Sparing(Stack):
    """A stage whose layers are recomputed one by one; `log` gets what happens once backward has begun."""

    policy: Policy = "full"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.log: list[str] = []
        self.in_forward = False

    def call(self, number: int, layer: Any, h: Tensor) -> Tensor:
        if not self.in_forward:
            self.log.append(f"again {number}")
        return layer.layer(h)

    def forward(self, x: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, ...]:
        self.in_forward = True
        h: Any = x[0] if x else inputs["x"]
        for number, layer in zip(self.numbers, self.layers, strict=True):
            h = recompute(partial(self.call, number, layer), h, policy=self.policy)
        self.in_forward = False
        return (((h - inputs["targets"]) ** 2).sum(), h.shape[0], {}) if self.last else (h,)


def build_pipeline(rank: int, name: str, policy: Policy, m: int) -> tuple[Pipeline, dict[int, Any]]:
    schedule = build(name, 2, m)
    size = 6 // schedule.num_stages + 1
    stages: dict[int, Any] = {
        s: Sparing(range(size * s, size * (s + 1)), s, schedule.num_stages) for s in schedule.stages_of(rank)
    }
    for stage in stages.values():
        stage.policy = policy
    return Pipeline(stages, schedule, Mesh.create(pp=2)), stages


def log_waits(pipeline: Pipeline) -> None:
    """Writes down when a stage begins to wait for a gradient, and which backward begins."""
    for runner in pipeline._runners.values():
        stage, arrived, backward = runner.module, runner._arrived, runner._backward

        def waiting(
            m: int, receipt: Any, way: Any, channel: Any, stage: Any = stage, arrived: Callable[..., Any] = arrived
        ) -> Any:
            if channel.kind == "G":
                stage.log.append("wait")
            return arrived(m, receipt, way, channel)

        def beginning(
            m: int, *, deferring: bool, stage: Any = stage, backward: Callable[..., Any] = backward
        ) -> None:
            stage.log.append(f"B{m}")
            backward(m, deferring=deferring)

        runner._arrived, runner._backward = waiting, beginning  # type: ignore[method-assign]


def run_order(rank: int) -> list[str]:
    """Events of this rank's only stage in the second step of 1F1B on two ranks, four layers each."""
    pipeline, stages = build_pipeline(rank, "1f1b", "full", 4)
    x, targets = rows_of([8])
    pipeline.step({"x": x[0]}, targets[0], 8)
    log_waits(pipeline)
    pipeline.step({"x": x[0]}, targets[0], 8)
    return stages[rank].log[-24:] if rank == 0 else stages[rank].log[-20:]


def test_the_second_forward_runs_before_the_wait():
    """Four layers; the plan of rank 0 has room before B0 and B3, elsewhere only the layer that comes next is made."""
    early = ["again 3", "again 2", "again 1", "again 0", "wait"]
    late = ["again 3", "wait", "again 2", "again 1", "again 0"]
    first, last = run_ranks(2, run_order)
    assert first == ["B0", *early, "B1", *late, "B2", *late, "B3", *early]
    assert last == [event for m in range(4) for event in (f"B{m}", "again 7", "again 6", "again 5", "again 4")]


def test_room_is_where_the_plan_waits_as_long_as_a_forward():
    assert idle_before(one_f_one_b(2, 4), 0) == {(0, 0), (0, 3)}
    assert idle_before(one_f_one_b(2, 4), 1) == set()
    assert idle_before(gpipe(4, 8), 0) == {(0, 0)}
    uneven = parse_csv(THREE_ON_TWO)  # rank 1 waits half a forward of its only stage before 1B0
    assert idle_before(uneven, 0) == {(0, 0), (0, 1)} and idle_before(uneven, 1) == set()
    for name in NAMES:
        assert idle_before(build(name, 1, 4), 0) == set(), name


def run_bits(rank: int) -> None:
    """Every schedule: no recompute, recompute on demand, and early; some layers twice per step."""
    x, targets = rows_of([10])
    for name in NAMES:
        results = []
        for policy, early in (("none", True), ("full", False), ("full", True), ("selective", True)):
            pipeline, stages = build_pipeline(rank, name, policy, 5)
            for runner in pipeline._runners.values():
                runner._may_recompute = early
            losses = [pipeline.step({"x": x[0]}, targets[0], 10).loss for _ in range(2)]
            grads = [p.grad for layer in layers_of(stages).values() for p in layer.parameters()]
            results.append([*losses, *grads])
            assert pipeline.peak_activations == pipeline.report.peak_activations[rank]
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True)), name


def test_early_recompute_changes_no_bit():
    """Case 19: once per micro-batch and layer, also where the backward is split."""
    run_ranks(2, run_bits)


def run_counts(rank: int, policy: Policy) -> tuple[list[int], bool]:
    """Second forwards per micro-batch and layer, and whether stages are still looked through."""
    pipeline, stages = build_pipeline(rank, "zb_v", policy, 4)
    x, targets = rows_of([8])
    pipeline.step({"x": x[0]}, targets[0], 8)
    counts = [stage.log.count(f"again {n}") for stage in stages.values() for n in stage.numbers]
    return counts, any(runner._may_recompute for runner in pipeline._runners.values())


def test_each_layer_is_made_again_once_per_microbatch():
    assert all(set(counts) == {4} and looks for counts, looks in run_ranks(2, run_counts, "full"))
    assert all(set(counts) == {0} and not looks for counts, looks in run_ranks(2, run_counts, "none"))


def test_the_last_blocks_come_first_and_all_is_freed():
    log: list[int] = []

    def block(number: int, x: Tensor) -> Tensor:
        log.append(number)
        return torch.tanh(x * weight)

    weight = nn.Parameter(torch.tensor(1.5))
    x = torch.linspace(-1, 1, 4, requires_grad=True)
    y = x
    for number in range(3):
        y = recompute(partial(block, number), y, policy="full")
    assert recompute_early((y, "a plain value"), 2) == 2 and log == [0, 1, 2, 2, 1]
    assert recompute_early((y,), 2) == 2 and log == [0, 1, 2, 2, 1], "what is there is not made again"
    y.sum().backward()
    assert log == [0, 1, 2, 2, 1, 0]
    wanted = x.grad.clone(), weight.grad.clone()
    x.grad = weight.grad = None
    torch.tanh(torch.tanh(torch.tanh(x * weight) * weight) * weight).sum().backward()
    assert torch.equal(x.grad, wanted[0]) and torch.equal(weight.grad, wanted[1])
    assert recompute_early((torch.ones(2), x * 2), None) == 0
