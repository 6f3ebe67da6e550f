"""The Llama-style model as pipeline stages: blocks between an embedding on the first and a head on the last stage.

Not its dimensions (`plait.model_config`), its block (`plait.block`) or foreign files (`plait.hf`). The one idea: a
stage is built from the tp axis and a range of layers; names and bits of every weight are those of the whole model,
so that a full state can be put together from any grid and cut for any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from plait.block import INIT_STD, Block, Options, Place, rotary_tables
from plait.kernels.rotary import Tables, tables
from plait.model_config import ModelConfig, parameter_shapes
from plait.parallel.collectives import broadcast
from plait.parallel.mesh import Axis, Mesh
from plait.parallel.p2p import TensorSpec
from plait.parallel.placement import gather_full
from plait.parallel.recompute import Policy, recompute
from plait.parallel.schedules import Schedule, split_layers
from plait.parallel.token_layers import RMSNorm
from plait.parallel.vocab import VocabParallelEmbedding, VocabParallelHead

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class StagePlan:
    """Who has which layers: equal on all ranks."""

    layers: tuple[range, ...]  # by stage
    stage_to_rank: tuple[int, ...]  # by stage: the coordinate on the pp axis

    @property
    def num_stages(self) -> int:
        return len(self.layers)


class LlamaStage(nn.Module):
    """One pipeline stage: the layers of `plan.layers[index]`, with the embedding first and norm and head last.

    Parameter names are those of the whole model on every stage and grid. A tied weight is `embed.weight` on the first
    and on the last stage.
    """

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        plan: StagePlan,
        axis: Axis,
        options: Options,
        embed: VocabParallelEmbedding | None = None,
    ) -> None:
        """`embed`: the embedding whose weight this last stage's head shares: that of the first stage on this rank."""
        super().__init__()
        self.config, self.index, self.plan, self.axis, self.options = config, index, plan, axis, options
        self.first, self.last = index == 0, index == plan.num_stages - 1
        shared: dict[str, Any] = dict(
            sequence_parallel=options.sequence_parallel, dtype=options.dtype, device=options.device
        )
        if self.first:
            self.embed: Any = VocabParallelEmbedding(config.vocab_size, config.dim, axis, **shared)
            embed = self.embed if config.tied else None
        self.layers = nn.ModuleDict({str(layer): Block(config, layer, axis, options) for layer in plan.layers[index]})
        if self.last:
            self.norm = RMSNorm(config.dim, axis, eps=config.norm_eps, **shared)
            head = VocabParallelHead(config.dim, config.vocab_size, axis, tied=embed, **shared)
            if config.tied and not self.first:
                self.embed = _named_weight(head.weight)  # registered before the head: the name that both ends share
            self.head = head
        self._turn: tuple[Tensor, Tables] | None = None  # positions of the last micro-batch and their tables

    def forward(self, x: tuple[Tensor, ...], inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Runs one micro-batch.

        x: () on the first stage, else the residual stream [b, T(/tp), D]. inputs: "tokens" int64 [b, T],
        "shared_positions" int64 [T], "sample_offset", "microbatch", "seed", "step", and on the last stage "targets"
        int64 [b, T], and in training "sum_grad", with which the head makes its gradients beside the loss. Returns
        (residual stream,), or (loss_sum, count, extras) on the last stage.
        """
        hidden = self.hidden(x, inputs)
        if not self.last:
            return (hidden,)
        loss_sum, count = self.head(hidden, inputs["targets"], sum_grad=inputs.get("sum_grad"))
        return loss_sum, count, {}

    def hidden(self, x: tuple[Tensor, ...], inputs: Mapping[str, Any]) -> Tensor:
        """The residual stream behind my layers, on the last stage normed: [b, T(/tp), D]."""
        stream = self.embed(inputs["tokens"]) if self.first else x[0]
        place = self._place(inputs)
        for block in self.layers.values():
            stream = recompute(block, stream, place, policy=self.options.recompute)
        return self.norm(stream) if self.last else stream

    def logits(self, inputs: Mapping[str, Any]) -> Tensor:
        """The logits [b, T, V] of a model that is one stage, on every rank of the axis; without gradients."""
        if not (self.first and self.last):
            raise ValueError(f"logits: stage {self.index} of {self.plan.num_stages} is not the whole model")
        with torch.no_grad():
            return self.head.logits(self.hidden((), inputs))

    def _place(self, inputs: Mapping[str, Any]) -> Place:
        positions = inputs["shared_positions"]
        if self._turn is None or self._turn[0] is not positions:
            cos, sin = rotary_tables(self.config, positions, self.options.dtype)
            self._turn = (positions, tables(cos, sin, self.options.dtype))
        first = inputs["sample_offset"] + inputs.get("microbatch", 0) * inputs["tokens"].shape[0]
        return Place(self._turn[1], inputs["seed"], inputs["step"], first)

    def input_specs(self, inputs: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
        """What this stage receives for a micro-batch with these inputs."""
        if self.first:
            return ()
        num_rows, seq = inputs["tokens"].shape
        if self.options.sequence_parallel:
            seq //= self.axis.size
        return (TensorSpec((num_rows, seq, self.config.dim), self.options.dtype, True),)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> full shape of my parameters."""
        return parameter_shapes(self.config, self.plan.layers[self.index], first=self.first, last=self.last)

    def reset_parameters(self, seed: int) -> None:
        """Draws every weight from (seed, name, row): the same bits on every grid."""
        if self.first:
            self.embed.reset_parameters(seed, INIT_STD, "embed")
        block: Any
        for name, block in self.layers.items():
            block.reset_parameters(seed, f"layers.{name}.", self.config.num_layers)
        if self.last:
            self.norm.reset_parameters(seed, 0.0, "norm")
            if not (self.config.tied and self.first):
                self.head.reset_parameters(seed, INIT_STD, "embed" if self.config.tied else "head")


def _named_weight(weight: nn.Parameter) -> nn.Module:
    """A module whose only content is the parameter `weight`."""
    result = nn.Module()
    result.weight = weight
    return result


def plan_stages(config: ModelConfig, schedule: Schedule | None, layers_of: Sequence[int] | None = None) -> StagePlan:
    """Spreads the layers over the stages of a schedule; None: one stage. `layers_of`: how many each has."""
    if schedule is None:
        return StagePlan((range(config.num_layers),), (0,))
    layers = split_layers(config.num_layers, schedule.num_stages, layers_of)
    return StagePlan(layers, tuple(schedule.stage_to_rank))


def build_stages(
    config: ModelConfig,
    mesh: Mesh,
    schedule: Schedule | None = None,
    *,
    seed: int | None,
    dtype: torch.dtype = torch.float32,
    sequence_parallel: bool = False,
    recompute: Policy = "none",
    dropout: float = 0.0,
    layers_of: Sequence[int] | None = None,
) -> dict[int, LlamaStage]:
    """This rank's stages by index, on the mesh's device; communicates nothing.

    `seed` draws the weights, the same bits on every grid; None leaves them as allocated, to be loaded. `layers_of`:
    layers of each stage of the schedule; None: as even as can be. ValueError names what does not fit: heads or ffn
    and tp, layers and stages, the schedule and the pp axis.
    """
    plan = plan_stages(config, schedule, layers_of)
    axis, pp = mesh.axis("tp"), mesh.axis("pp")
    config.check_tp(axis.size)
    if max(plan.stage_to_rank) + 1 != pp.size:
        raise ValueError(
            f"schedule places stages on {max(plan.stage_to_rank) + 1} ranks; the mesh has pp = {pp.size}"
        )
    options = Options(sequence_parallel, recompute, dropout, dtype, mesh.device)
    stages: dict[int, LlamaStage] = {}
    for index, owner in enumerate(plan.stage_to_rank):
        if owner == pp.coord:
            shared = stages[0].embed if config.tied and 0 < index == plan.num_stages - 1 and 0 in stages else None
            stages[index] = LlamaStage(config, index, plan, axis, options, shared)
            if seed is not None:
                stages[index].reset_parameters(seed)
    if config.tied:
        _state_tie(stages, plan, mesh)
    return stages


def _state_tie(stages: Mapping[int, LlamaStage], plan: StagePlan, mesh: Mesh) -> None:
    """Tells the tied weight's placement that the other end of the pipeline holds a copy."""
    ends = {plan.stage_to_rank[0], plan.stage_to_rank[-1]}
    if len(ends) == 1:
        return
    ranks = tuple(sorted(mesh.axis("pp").ranks[coord] for coord in ends))
    for index in (0, plan.num_stages - 1):
        if index in stages:
            weight: Any = stages[index].embed.weight
            weight.placement = replace(weight.placement, replica_ranks=ranks)


def full_parameters(
    stages: Mapping[int, LlamaStage], mesh: Mesh, value: Callable[[nn.Parameter], Tensor] = lambda p: p
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, full tensor) of the whole model in the order of `parameter_shapes`; collective over pp and tp.

    `value` picks what to gather of a parameter (the parameter, its gradient); it has the parameter's shape.
    """
    some = next(iter(stages.values()))
    config, plan, pp = some.config, some.plan, mesh.axis("pp")
    mine = {index: dict(stage.named_parameters()) for index, stage in stages.items()}
    for name, shape in parameter_shapes(config).items():
        index = _stage_of(name, plan)
        owner = plan.stage_to_rank[index]
        if owner == pp.coord:
            parameter = mine[index][name]
            full = gather_full(value(parameter), parameter.placement, mesh)  # type: ignore[attr-defined]
            broadcast(torch.tensor([_DTYPES.index(full.dtype)]), pp, owner)
        else:
            dtype = _DTYPES[int(broadcast(torch.tensor([0]), pp, owner))]
            full = torch.empty(shape, dtype=dtype, device=mesh.device)
        yield name, broadcast(full, pp, owner)


def _stage_of(name: str, plan: StagePlan) -> int:
    if name == "embed.weight":
        return 0
    if not name.startswith("layers."):
        return plan.num_stages - 1
    layer = int(name.split(".")[1])
    return next(index for index, layers in enumerate(plan.layers) if layer in layers)


def full_state(
    stages: Mapping[int, LlamaStage], mesh: Mesh, value: Callable[[nn.Parameter], Tensor] = lambda p: p
) -> dict[str, Tensor]:
    """Every full tensor on every rank: for tests and small models."""
    return dict(full_parameters(stages, mesh, value))
