"""One decoder block, written with plait.kernels ops and tensor-parallel layers, and the rotary tables it needs.

Not the stages that hold blocks (`plait.model`). The one idea: a block gathers its input once for q, k and v and once
for gate and up, and reduces twice: the fewest collectives there are. A size-1 axis runs the same code and is silent.

Under sequence parallelism the residual stream is [B, T / tp, D], else [B, T, D] on every rank; its dtype is the
model's. Rotary tables are made in fp32, as those that published weights were trained with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait import kernels
from plait.model_config import ModelConfig
from plait.parallel.layers import ColumnParallelLinear, RowParallelLinear, column_parallel
from plait.parallel.mesh import Axis
from plait.parallel.random import rng_key
from plait.parallel.recompute import POLICIES, Policy, replayable
from plait.parallel.token_layers import Dropout, RMSNorm

INIT_STD = 0.02  # GPT-2's; the layers that write to the residual stream draw with INIT_STD / sqrt(2 num_layers)
# Sites of random numbers in a layer.
_ATTENTION, _AFTER_ATTENTION, _AFTER_FFN = range(3)


@dataclass(frozen=True)
class Options:
    """How the blocks of a run are built; equal on all ranks."""

    sequence_parallel: bool = False
    recompute: Policy = "none"
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        if self.recompute not in POLICIES:
            raise ValueError(f"recompute is {self.recompute!r}; valid: {', '.join(POLICIES)}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}; it must be in [0, 1)")
        if not self.dtype.is_floating_point:
            raise ValueError(f"dtype is {self.dtype}; it must be a floating dtype")

    @property
    def selective(self) -> bool:
        return self.recompute == "selective"


@dataclass(frozen=True)
class Place:
    """What a micro-batch tells the blocks: rotary tables [T, K/2], and where its rows stand in the run."""

    cos: Tensor
    sin: Tensor
    seed: int
    step: int
    sample_offset: int  # global sample index of its first row


class Attention(nn.Module):
    """Grouped-query attention over this rank's heads; kv heads are replicated when there are fewer than ranks."""

    def __init__(self, config: ModelConfig, index: int, axis: Axis, options: Options) -> None:
        super().__init__()
        dim, width = config.dim, config.num_heads * config.head_dim
        self.head_dim, self.index = config.head_dim, index
        self.head_offset, self.num_heads = axis.split(config.num_heads)
        self.dropout = options.dropout
        shared: dict[str, Any] = dict(
            sequence_parallel=options.sequence_parallel, dtype=options.dtype, device=options.device
        )
        column = dict(shared, keep_gathered=not options.selective)
        self.q = ColumnParallelLinear(dim, width, axis, units=config.num_heads, **column)
        kv_width = config.num_kv_heads * config.head_dim
        self.kv = ColumnParallelLinear(dim, (2, kv_width), axis, units=config.num_kv_heads, **column)
        self.out = RowParallelLinear(width, dim, axis, **shared)

    def forward(self, x: Tensor, place: Place) -> Tensor:
        """x [B, T(/tp), D] -> the same shape."""
        q, kv = column_parallel(x, self.q, self.kv)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        k, v = kv.unflatten(-1, (2, -1, self.head_dim)).unbind(2)
        q, k = kernels.rope(q, k, place.cos, place.sin)
        dropout: dict[str, Any] = {}
        if self.training and self.dropout:
            dropout = dict(
                dropout_p=self.dropout,
                rng=rng_key(place.seed, place.step, self.index, _ATTENTION, device=x.device),
                head_offset=self.head_offset,
                sample_offset=place.sample_offset,
            )
        mixed: Any = kernels.attention(q, k, v, **dropout)
        return self.out(mixed.flatten(2))


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)) with the ffn split over the axis."""

    def __init__(self, config: ModelConfig, axis: Axis, options: Options) -> None:
        super().__init__()
        shared: dict[str, Any] = dict(
            sequence_parallel=options.sequence_parallel, dtype=options.dtype, device=options.device
        )
        self.selective = options.selective
        self.gate_up = ColumnParallelLinear(
            config.dim, (2, config.ffn_dim), axis, keep_gathered=not options.selective, **shared
        )
        self.down = RowParallelLinear(config.ffn_dim, config.dim, axis, **shared)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T(/tp), D] -> the same shape."""
        gate_up = self.gate_up(x)
        return self.down(replayable(kernels.swiglu, gate_up) if self.selective else kernels.swiglu(gate_up))


class Block(nn.Module):
    """x + attention(norm(x)), then + ffn(norm(.)); the first sum is made by the second norm's kernel."""

    def __init__(self, config: ModelConfig, index: int, axis: Axis, options: Options) -> None:
        super().__init__()
        norm: dict[str, Any] = dict(
            eps=config.norm_eps,
            sequence_parallel=options.sequence_parallel,
            dtype=options.dtype,
            device=options.device,
        )
        self.attention_norm = RMSNorm(config.dim, axis, **norm)
        self.attention = Attention(config, index, axis, options)
        self.ffn_norm = RMSNorm(config.dim, axis, **norm)
        self.ffn = FeedForward(config, axis, options)
        self.dropouts = [
            Dropout(
                options.dropout,
                axis,
                layer=index,
                site=site,
                split="sequence" if options.sequence_parallel else "none",
            )
            for site in (_AFTER_ATTENTION, _AFTER_FFN)
        ]

    def forward(self, x: Tensor, place: Place) -> Tensor:
        """x [B, T(/tp), D] -> the same shape."""
        mixed = self._drop(0, self.attention(self.attention_norm(x), place), place)
        y, x = self.ffn_norm.add_and_norm(mixed, x)
        return x + self._drop(1, self.ffn(y), place)

    def _drop(self, which: int, x: Tensor, place: Place) -> Tensor:
        dropout = self.dropouts[which]
        if not (self.training and dropout.p):
            return x
        return dropout(x, seed=place.seed, step=place.step, sample_offset=place.sample_offset)

    def reset_parameters(self, seed: int, prefix: str, num_layers: int) -> None:
        """Draws the weights under their global names: the same bits on every grid."""
        narrow = INIT_STD / math.sqrt(2 * num_layers)
        for name, layer, std in (
            ("attention_norm", self.attention_norm, 0.0),
            ("attention.q", self.attention.q, INIT_STD),
            ("attention.kv", self.attention.kv, INIT_STD),
            ("attention.out", self.attention.out, narrow),
            ("ffn_norm", self.ffn_norm, 0.0),
            ("ffn.gate_up", self.ffn.gate_up, INIT_STD),
            ("ffn.down", self.ffn.down, narrow),
        ):
            layer.reset_parameters(seed, std, prefix + name)


def rotary_tables(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, K/2] of positions int64 [T]: made in fp32, given in fp32 (fp64 for fp64)."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions.device) / config.head_dim
    frequency = 1.0 / (config.rope_theta**pairs)  # radians per position
    scaling = config.rope_scaling
    if scaling is not None:
        turns = scaling.original_seq * frequency / (2.0 * math.pi)  # over the length it was trained for
        slow, fast = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - slow) / (fast - slow)).clamp(0.0, 1.0)
        frequency = (1.0 - kept) * frequency / scaling.factor + kept * frequency
    angle = positions.to(torch.float32).unsqueeze(-1) * frequency
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return angle.cos().to(wide), angle.sin().to(wide)
