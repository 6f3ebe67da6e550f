"""Tensor-parallel linears; also the place to import the norm and dropout between them from (token_layers.py).

Not here: vocabulary layers (vocab.py), and when weight gradients run (gradients.py). The one idea: a layer is an
explicit autograd function whose backward computes the input gradient, starts its reduction over the axis, gives the
weight gradient to the layer's sink while that reduction is under way, and returns None for the weight. So each block
has the fewest collectives that the mathematics allows, and a schedule can run weight gradients later.

With sequence parallelism the activations between blocks are [B, T / tp, D]: a column layer gathers them along dim 1,
a row layer reduce-scatters its sum. Without it they are [B, T, D] on every rank and a row layer all-reduces. Sizes
come from the constructor, never from the tensors. On an axis of size 1 the same code runs and nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.kernels import matmul
from plait.parallel.collectives import all_gather, all_reduce, reduce_scatter
from plait.parallel.gradients import GradSink, accumulate, accumulate_linear
from plait.parallel.mesh import Axis
from plait.parallel.placement import Placement, placed, placement_of
from plait.parallel.random import init_normal_
from plait.parallel.token_layers import Dropout, RMSNorm, replicas_of

__all__ = [
    "ColumnParallelLinear",
    "Dropout",
    "RMSNorm",
    "RowParallelLinear",
    "check_sequence",
    "column_backward",
    "column_forward",
    "column_parallel",
    "row_backward",
    "row_forward",
    "unit_box",
]


def check_sequence(num_tokens: int, axis: Axis) -> None:
    """Raises ValueError unless a sequence can be cut in equal parts over the axis: for the plan of a run."""
    if num_tokens % axis.size:
        raise ValueError(
            f"a sequence of {num_tokens} tokens cannot be split over axis {axis.name} of size {axis.size}: "
            f"use a multiple of {axis.size}, or no sequence parallelism"
        )


def unit_box(num_features: int, units: int | None, axis: Axis) -> tuple[int, int, tuple[int, ...]]:
    """Returns (offset, size, replica_ranks) of this coord's share of features that come in indivisible units.

    `units` (heads) divisible by the axis: equal shares. Fewer units than ranks: each unit lies on size / units
    neighbouring ranks, which are then its replicas. Anything else raises ValueError. None: features are divisible.
    """
    if units is None:
        units = num_features if num_features % axis.size == 0 else 0
    if units < 1 or num_features % units or (units % axis.size and axis.size % units):
        raise ValueError(
            f"{num_features} features in {units or num_features} units cannot be split over axis {axis.name} of size "
            f"{axis.size}: the units must be a multiple of {axis.size}, or divide it to be replicated"
        )
    if units % axis.size == 0:
        size = num_features // axis.size
        return axis.coord * size, size, ()
    copies = axis.size // units
    unit, size = axis.coord // copies, num_features // units
    return unit * size, size, axis.ranks[unit * copies : (unit + 1) * copies]


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the rows of W, the output features, split over the axis.

    `out_features` may be (2, F): two matrices of F rows as one parameter [2, F, in], each split along F, so that a
    shard is one box of the full tensor; the output is then [..., 2 * F_local], the first matrix's part first.
    `units` counts indivisible groups of output features (key-value heads); see `unit_box` for fewer units than ranks:
    the weight is then replicated and its gradient is a partial that must be summed over the replicas.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        axis: Axis,
        *,
        units: int | None = None,
        bias: bool = False,
        sequence_parallel: bool = False,
        keep_gathered: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """`keep_gathered`: keep the gathered input for the weight gradient, or keep the shard and gather again."""
        super().__init__()
        self.axis, self.sequence_parallel, self.keep_gathered = axis, sequence_parallel, keep_gathered
        leading = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        offset, size, replicas = unit_box(leading[-1], units, axis)
        full, local = (*leading, in_features), (*leading[:-1], size, in_features)
        start = (*(0 for _ in leading[:-1]), offset, 0)
        self.width = math.prod(local[:-1])  # output features of this rank
        sums = (axis.name,) if replicas else ()
        empty = torch.empty(local, dtype=dtype, device=device)
        self.weight = placed(empty, Placement(full, start, local, replicas, sums))
        self.bias: nn.Parameter | None = None
        if bias:
            zeros = torch.zeros(local[:-1], dtype=dtype, device=device)
            self.bias = placed(zeros, Placement(full[:-1], start[:-1], local[:-1], replicas, sums))
        self.weight_grads = GradSink()

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T(/tp), in] -> [B, T, out_local]."""
        return column_parallel(x, self)[0]

    def reset_parameters(self, seed: int, std: float, name: str) -> None:
        """Draws the weight as `name`.weight, the same bits on every grid; the bias becomes 0."""
        _reset(self, seed, std, name)


def column_parallel(x: Tensor, *layers: ColumnParallelLinear) -> tuple[Tensor, ...]:
    """Applies several column layers to one input: x is gathered once and its gradient is summed and reduced once.

    The outputs lie side by side in one tensor: they are views of its last dim.
    """
    out = _Column.apply(x, layers, *(p for layer in layers for p in (layer.weight, layer.bias)))
    return (out,) if len(layers) == 1 else out.split_with_sizes([layer.width for layer in layers], -1)


def column_forward(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[Tensor, Tensor]:
    """`column_parallel` for code with a backward of its own, without a graph.

    Returns the gathered x [B, T, in] and the outputs side by side [B, T, sum of out_local].
    """
    lead = layers[0]
    full = all_gather(x, lead.axis, 1) if lead.sequence_parallel else x
    if len(layers) == 1:
        return full, matmul.forward(full, _matrix(lead.weight), _vector(lead.bias))
    widths = [layer.width for layer in layers]
    out = full.new_empty((*full.shape[:-1], sum(widths)))
    rows = full.reshape(-1, full.shape[-1])
    for layer, part in zip(layers, out.view(-1, sum(widths)).split_with_sizes(widths, 1), strict=True):
        matmul.forward_into(rows, _matrix(layer.weight), _vector(layer.bias), part)
    return full, out


def column_backward(
    x: Tensor, layers: Sequence[ColumnParallelLinear], dout: Tensor, *, gathered: bool, need_dx: bool = True
) -> Tensor | None:
    """The gradient of `column_forward`'s x [B, T(/tp), in]; weight gradients go to the layers' sinks meanwhile.

    `x` is the gathered input, or with gathered=False the shard, which is gathered once more; `dout` is the gradient
    of the outputs side by side.
    """
    lead, reducing = layers[0], None
    gather_again = lead.sequence_parallel and not gathered and any(layer.weight.requires_grad for layer in layers)
    gathering = all_gather(x, lead.axis, 1, async_op=True) if gather_again else None
    rows = dout.reshape(-1, dout.shape[-1])
    parts = (rows,) if len(layers) == 1 else rows.split_with_sizes([layer.width for layer in layers], 1)
    if need_dx:
        dx = matmul.dgrad(parts[0], _matrix(lead.weight))
        for layer, part in zip(layers[1:], parts[1:], strict=True):
            dx.addmm_(part, _matrix(layer.weight))
        dx = dx.view(*dout.shape[:-1], -1)
        if lead.sequence_parallel:
            reducing = reduce_scatter(dx, lead.axis, 1, async_op=True)
        else:
            reducing = all_reduce(dx, lead.axis, async_op=True)
    x = x if gathering is None else gathering.wait()
    x = x.reshape(-1, x.shape[-1])
    for layer, part in zip(layers, parts, strict=True):
        _add_weight_grads(layer, x, part)
    return None if reducing is None else reducing.wait()


class _Column(torch.autograd.Function):
    """Saves the input that the weight gradients need (gathered, or the shard)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: tuple[ColumnParallelLinear, ...], *params: Any) -> Tensor:
        full, out = column_forward(x, layers)
        ctx.layers = layers
        ctx.save_for_backward(full if layers[0].keep_gathered else x)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        layers = ctx.layers
        dx = column_backward(x, layers, dout, gathered=layers[0].keep_gathered, need_dx=ctx.needs_input_grad[0])
        return dx, *(None,) * (1 + 2 * len(layers))


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the columns of W, the input features, split over the axis like a column layer's output."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        offset, size, _ = unit_box(in_features, None, axis)
        shape = (out_features, size)
        empty = torch.empty(shape, dtype=dtype, device=device)
        self.weight = placed(empty, Placement((out_features, in_features), (0, offset), shape))
        self.bias: nn.Parameter | None = None
        if bias:  # added once, after the sum; every rank sees the whole gradient of the output
            zeros = torch.zeros(out_features, dtype=dtype, device=device)
            self.bias = placed(zeros, Placement.whole((out_features,), replicas_of(axis)))
        self.weight_grads = GradSink()

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, in_local] -> [B, T(/tp), out]."""
        return _Row.apply(x, self, self.weight, self.bias)

    def reset_parameters(self, seed: int, std: float, name: str) -> None:
        """Draws the weight as `name`.weight, the same bits on every grid; the bias becomes 0."""
        _reset(self, seed, std, name)


def row_forward(x: Tensor, layer: RowParallelLinear) -> Tensor:
    """`layer(x)` for code with a backward of its own: [B, T, in_local] -> a new [B, T(/tp), out], no graph."""
    partial_sum = matmul.forward(x, layer.weight)
    if layer.sequence_parallel:
        out = reduce_scatter(partial_sum, layer.axis, 1)
    else:
        out = all_reduce(partial_sum, layer.axis)
    return out if layer.bias is None else out.add_(layer.bias)


def row_backward(x: Tensor, layer: RowParallelLinear, dout: Tensor, *, need_dx: bool = True) -> Tensor | None:
    """The gradient of `row_forward`'s x (None unless needed); the weight gradient goes to the layer's sink."""
    if layer.sequence_parallel:
        dout = all_gather(dout, layer.axis, 1)
    rows = dout.reshape(-1, dout.shape[-1])
    dx = matmul.dgrad(rows, layer.weight).view(x.shape) if need_dx else None
    _add_weight_grads(layer, x.reshape(-1, x.shape[-1]), rows)
    return dx


class _Row(torch.autograd.Function):
    """Saves the input shard."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: RowParallelLinear, *params: Any) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return row_forward(x, layer)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return row_backward(x, ctx.layer, dout, need_dx=ctx.needs_input_grad[0]), None, None, None


def _matrix(weight: Tensor) -> Tensor:
    """The weight [..., K] as the one matrix [rows, K] that a matmul takes."""
    return weight if weight.dim() == 2 else weight.view(-1, weight.shape[-1])


def _vector(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.view(-1)


def _add_weight_grads(layer: ColumnParallelLinear | RowParallelLinear, x: Tensor, dout: Tensor) -> None:
    """Gives the layer's sink the gradients of weight and bias for the micro-batch whose backward runs."""
    sink, weight, bias = layer.weight_grads, layer.weight, layer.bias
    if weight.requires_grad:
        sink.add(sink.microbatch, accumulate_linear, weight, x, dout)
    if bias is not None and bias.requires_grad:
        sink.add(sink.microbatch, _accumulate_bias, bias, dout)


def _accumulate_bias(bias: nn.Parameter, dout: Tensor) -> None:
    wide = torch.float64 if dout.dtype == torch.float64 else torch.float32
    accumulate(bias, dout.reshape(-1, dout.shape[-1]).sum(0, dtype=wide))


def _reset(layer: ColumnParallelLinear | RowParallelLinear, seed: int, std: float, name: str) -> None:
    init_normal_(layer.weight, placement_of(layer.weight), std=std, seed=seed, name=f"{name}.weight")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
