"""A small real model by each executor: the same Llama blocks and weights, no optimizer.

Ours are the layers of `plait train`, torch's those of peer_torch.py under torch.distributed.pipelining. Loss and
gradients of both are compared with the unsplit model, which every rank runs once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.bench.pipeline_stages import schedule_of, torch_schedule, torch_stage
from plait.bench.suite_train import stage_of
from plait.block import rotary_tables
from plait.model import build_stages, full_state
from plait.model_config import ModelConfig
from plait.parallel.mesh import Mesh
from plait.parallel.pipeline import Pipeline

SEED = 1
# The model of the case, but for its number of layers: one layer a stage under the schedules with two chunks.
SIZES: dict[str, Any] = dict(
    dim=128, num_heads=4, num_kv_heads=2, ffn_dim=352, vocab_size=256, max_seq=64, tied=False
)
# fp32: sums over micro-batches and attention of another kernel; the largest seen was 8e-7
TOLERANCE = 1e-4


def model_of(params: dict[str, Any]) -> ModelConfig:
    """Two layers for each rank."""
    return ModelConfig(num_layers=2 * params["pp"], **SIZES)


class Executor:
    """Our model on one rank; `step` returns the loss (0 but on the last stage's rank)."""

    def __init__(self, params: dict[str, Any], mesh: Mesh, rows: Tensor) -> None:
        schedule, self.model = schedule_of(params), model_of(params)
        self.stages = build_stages(self.model, mesh, schedule, seed=SEED)
        self.weights = {name: value.detach().clone() for name, value in full_state(self.stages, mesh).items()}
        self.pipeline = Pipeline(self.stages, schedule, mesh)
        self.targets = rows[:, 1:]
        self.inputs: dict[str, Any] = {
            "tokens": rows[:, :-1],
            "shared_positions": torch.arange(rows.shape[1] - 1),
            "sample_offset": 0,
            "seed": SEED,
            "step": 0,
        }

    def zero_grad(self) -> None:
        for stage in self.stages.values():
            stage.zero_grad()

    def step(self) -> float:
        result = self.pipeline.step(self.inputs, self.targets, self.targets.numel(), metrics="local")
        return result.loss.item()

    def gradients(self) -> dict[str, Tensor]:
        """By our names of parameters."""
        found = {}
        for stage in self.stages.values():
            for name, parameter in stage.named_parameters():
                assert parameter.grad is not None, f"{name} has no gradient"
                found[name] = parameter.grad
        return found


class TorchExecutor:
    """The same model, of torch's own pieces, with our weights."""

    def __init__(self, params: dict[str, Any], mesh: Mesh, rows: Tensor, ours: Executor) -> None:
        schedule, model = schedule_of(params), ours.model
        mine = schedule.stages_of(mesh.axis("pp").coord)
        last = schedule.num_stages - 1
        self.stages = {s: peer_stage(model, ours.stages[s].plan.layers[s], ours, s == 0, s == last) for s in mine}
        for stage in self.stages.values():
            stage.angles = rotary_tables(model, ours.inputs["shared_positions"], torch.float32)
        parts = [torch_stage(self.stages[s], s, schedule, mesh) for s in mine]
        count = rows[:, 1:].numel()
        self.schedule = torch_schedule(params, schedule, parts, lambda logits, target: loss_of(logits, target, count))
        self.args = (rows[:, :-1],) if 0 in mine else ()
        self.targets = rows[:, 1:] if last in mine else None

    def zero_grad(self) -> None:
        for stage in self.stages.values():
            stage.zero_grad()

    def step(self) -> float:
        losses: list[Tensor] = []
        kwargs = {} if self.targets is None else {"target": self.targets, "losses": losses}
        self.schedule.step(*self.args, **kwargs)
        return float(sum(losses))

    def gradients(self) -> dict[str, Tensor]:
        """By our names, pieces of fused weights put together."""
        found: dict[str, Tensor] = {}
        for stage in self.stages.values():
            found |= named_gradients(stage)
        return found


def peer_stage(model: ModelConfig, layers: range, ours: Executor, first: bool, last: bool) -> Any:
    """torch's stage with these layers of our weights."""
    return stage_of(model, layers, ours.weights, first, last)


def loss_of(logits: Tensor, targets: Tensor, count: int) -> Tensor:
    """A micro-batch's part of the mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count


def named_gradients(stage: nn.Module) -> dict[str, Tensor]:
    """A peer stage's gradients under our names: k and v, gate and up are one weight of ours."""
    grads = {name: parameter.grad for name, parameter in stage.named_parameters() if parameter.grad is not None}
    found = {}
    for name, grad in grads.items():
        for first, second, fused in (("attention.k.", "attention.v.", "attention.kv."), ("ffn.gate.", "ffn.up.", "")):
            if first in name:
                other = grads[name.replace(first, second)]
                found[name.replace(first, fused or "ffn.gate_up.")] = torch.stack([grad, other])
                break
            if second in name:
                break
        else:
            found[name] = grad
    return found


def unsplit(ours: Executor, rows: Tensor, num_microbatches: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the whole model in this process, one micro-batch after the other."""
    model = ours.model
    whole = peer_stage(model, range(model.num_layers), ours, True, True)
    whole.angles = rotary_tables(model, ours.inputs["shared_positions"], torch.float32)
    total = 0.0
    for part in rows.chunk(num_microbatches):
        loss = loss_of(whole(part[:, :-1]), part[:, 1:], rows[:, 1:].numel())
        loss.backward()
        total += loss.item()
    return total, named_gradients(whole)


def error_of(executor: Executor | TorchExecutor, loss: float, gradients: dict[str, Tensor], last: bool) -> float:
    """Runs a step; the largest error of this rank's loss and of a gradient's norm, relative; NaN stays NaN."""
    executor.zero_grad()
    said = executor.step()
    errors = [said / loss - 1 if last else said]
    for name, grad in executor.gradients().items():
        errors.append(((grad - gradients[name]).norm() / gradients[name].norm()).item())
    return math.nan if any(map(math.isnan, errors)) else max(map(abs, errors))
