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

from plait.kernels import flash, gated, rotary
from plait.kernels.registration import below_autograd
from plait.model_config import ModelConfig
from plait.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_backward,
    column_forward,
    row_backward,
    row_forward,
)
from plait.parallel.mesh import Axis
from plait.parallel.random import rng_key
from plait.parallel.recompute import POLICIES, Policy
from plait.parallel.token_layers import Dropout, RMSNorm, norm_backward, norm_forward

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
    """What a micro-batch tells the blocks: rotary tables, and where its rows stand in the run."""

    turn: rotary.Tables
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
        self.q = ColumnParallelLinear(dim, width, axis, units=config.num_heads, **shared)
        kv_width = config.num_kv_heads * config.head_dim
        self.kv = ColumnParallelLinear(dim, (2, kv_width), axis, units=config.num_kv_heads, **shared)
        self.out = RowParallelLinear(width, dim, axis, **shared)
        self.columns = (self.q, self.kv)

    def run(self, y: Tensor, place: Place) -> tuple[Tensor, tuple[Tensor, ...]]:
        """y [B, T(/tp), D] -> (the same shape, what `grad` needs: gathered y, q k v, output of the heads, lse)."""
        full, qkv = column_forward(y, self.columns)
        qkv = qkv.view(*qkv.shape[:2], -1, self.head_dim)  # [B, T, H + 2 KV, K]
        rotary.rotate_(self._rotated(qkv), place.turn)  # in place: it then holds what backward reads
        mixed, lse = flash.forward(*self._split(qkv), *self._options(place))
        return row_forward(mixed.flatten(2), self.out), (full, qkv, mixed, lse)

    def grad(self, dout: Tensor, place: Place, y: Tensor, gathered: bool, *kept: Tensor) -> Tensor:
        """The gradient of `run`'s y; `y` is what came in, gathered or not, `kept` the rest of what `run` gave."""
        qkv, mixed, lse = kept
        dmixed = row_backward(mixed.flatten(2), self.out, dout)
        assert dmixed is not None
        *grads, _ = flash.backward(
            dmixed.view(mixed.shape), None, *self._split(qkv), mixed, lse, *self._options(place)
        )
        dqkv = torch.cat(grads, 2)
        rotary.rotate_(self._rotated(dqkv), place.turn, inverse=True)
        dy = column_backward(y, self.columns, dqkv.flatten(2), gathered=gathered)
        assert dy is not None
        return dy

    def _split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """q [B, T, H, K], k and v [B, T, KV, K] of this rank."""
        num_kv = (qkv.shape[2] - self.num_heads) // 2
        return qkv.split_with_sizes((self.num_heads, num_kv, num_kv), 2)

    def _rotated(self, qkv: Tensor) -> Tensor:
        """What positions turn: q and k."""
        return qkv[:, :, : (qkv.shape[2] + self.num_heads) // 2]

    def _options(self, place: Place) -> tuple[Any, ...]:
        """The attention op's arguments behind q, k, v."""
        dropout = self.dropout if self.training else 0.0
        device = place.turn.cos.device
        rng = rng_key(place.seed, place.step, self.index, _ATTENTION, device=device) if dropout else None
        scale = self.head_dim**-0.5
        return None, rng, None, None, True, scale, 0, 0.0, dropout, self.head_offset, place.sample_offset


class FeedForward(nn.Module):
    """down(silu(gate(y)) * up(y)) with the ffn split over the axis."""

    def __init__(self, config: ModelConfig, axis: Axis, options: Options) -> None:
        super().__init__()
        shared: dict[str, Any] = dict(
            sequence_parallel=options.sequence_parallel, dtype=options.dtype, device=options.device
        )
        self.gate_up = ColumnParallelLinear(config.dim, (2, config.ffn_dim), axis, **shared)
        self.down = RowParallelLinear(config.ffn_dim, config.dim, axis, **shared)

    def run(self, y: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """y [B, T(/tp), D] -> (the same shape, what `grad` needs: gathered y, gate_up, hidden)."""
        full, gate_up = column_forward(y, (self.gate_up,))
        hidden = gated.forward(gate_up)
        return row_forward(hidden, self.down), (full, gate_up, hidden)

    def grad(self, dout: Tensor, y: Tensor, gathered: bool, gate_up: Tensor, hidden: Tensor | None) -> Tensor:
        """The gradient of `run`'s y, gathered or not; without `hidden` it is made again."""
        dhidden = row_backward(gated.forward(gate_up) if hidden is None else hidden, self.down, dout)
        assert dhidden is not None
        dy = column_backward(y, (self.gate_up,), gated.backward(dhidden, gate_up), gathered=gathered)
        assert dy is not None
        return dy


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
        self.selective = options.selective
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
        # Without weights among the arguments nothing would lead autograd here from an input that needs no gradient.
        anchors = () if x.requires_grad else tuple(self.parameters())
        return _Block.apply(x, self, place, *anchors)

    def drop(self, which: int, x: Tensor, place: Place) -> Tensor:
        """The dropout behind attention (0) or ffn (1); also its own gradient."""
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


class _Block(torch.autograd.Function):
    """The whole block as one node of the graph: a Python function of its own per op costs more than a small op.

    Saves per token x, the first sum and both gathered norms [D], q, kv, the heads' output, gate_up, hidden, and three
    statistics. Selective recompute drops the norms and hidden, which are cheap to make again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Block, place: Place, *anchors: Tensor) -> Tensor:
        with below_autograd():
            y, _, rstd = norm_forward(block.attention_norm, x)
            mixed, (full, *kept) = block.attention.run(y, place)
            y, h, h_rstd = norm_forward(block.ffn_norm, block.drop(0, mixed, place), x)
            out, (h_full, gate_up, hidden) = block.ffn.run(y)
            out = block.drop(1, out, place).add_(h)
        ctx.block, ctx.place = block, place
        cheap = (None, None, None) if block.selective else (full, h_full, hidden)
        ctx.save_for_backward(x, rstd, h, h_rstd, gate_up, *cheap, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        block, place = ctx.block, ctx.place
        x, rstd, h, h_rstd, gate_up, full, h_full, hidden, *kept = ctx.saved_tensors
        gathered = full is not None
        with below_autograd():
            if not gathered:
                h_full = norm_forward(block.ffn_norm, h)[0]
            dy = block.ffn.grad(block.drop(1, dout, place), h_full, gathered, gate_up, hidden)
            dh = norm_backward(block.ffn_norm, h, h_rstd, dy, dout)
            if not gathered:
                full = norm_forward(block.attention_norm, x)[0]
            dy = block.attention.grad(block.drop(0, dh, place), place, full, gathered, *kept)
            dx = norm_backward(block.attention_norm, x, rstd, dy, dh)
        return dx, *(None,) * (2 + len(ctx.needs_input_grad[3:]))


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
