"""Layers that treat every token by itself, on whole or sequence-parallel activations: the norm and the dropout.

Not here: anything with a collective. The one idea: such a layer does the same on every rank, to all tokens or to its
own; what depends on the split is only how its weight gradient adds up (the placement says so) and where its random
numbers are counted from.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from plait.kernels import dropout, rms_norm, rmsnorm
from plait.parallel.gradients import accumulate
from plait.parallel.mesh import Axis
from plait.parallel.placement import Placement, placed
from plait.parallel.random import rng_key
from plait.parallel.recompute import mark_replayable


def replicas_of(axis: Axis) -> tuple[int, ...]:
    """The ranks that hold a parameter which is whole on every rank of the axis."""
    return axis.ranks if axis.size > 1 else ()


class RMSNorm(nn.Module):
    """y = x / rms(x) * weight, over the last dim, of a whole or a sequence-parallel activation.

    With sequence parallelism a rank sees only its tokens: its weight gradient is a partial over the axis, and the
    placement says so. Without it every replica computes the whole gradient from equal inputs.
    """

    def __init__(
        self,
        dim: int,
        axis: Axis,
        *,
        eps: float = 1e-6,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        replicas = replicas_of(axis)
        sums = (axis.name,) if sequence_parallel and replicas else ()
        ones = torch.ones(dim, dtype=dtype, device=device)
        self.weight = placed(ones, Placement.whole((dim,), replicas, sums))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., dim] -> the same shape. Cheap to make again: `recompute` may drop the result."""
        y = _Norm.apply(x, self, self.weight)
        if torch.is_grad_enabled():
            mark_replayable(y, rms_norm, x, self.weight, self.eps)
        return y

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), both [..., dim], in one pass; the first is cheap to make again."""
        y, total = _NormOfSum.apply(x, residual, self, self.weight)
        if torch.is_grad_enabled():
            mark_replayable(y, rms_norm, total, self.weight, self.eps)
        return y, total

    def reset_parameters(self, seed: int, std: float, name: str) -> None:
        """The weight becomes 1: nothing is drawn."""
        nn.init.ones_(self.weight)


def norm_forward(layer: RMSNorm, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """For code with a backward of its own: (norm(h), h = x (+ residual), rstd of h [...]), no graph."""
    return rmsnorm.forward(x, residual, layer.weight, layer.eps)


def norm_backward(layer: RMSNorm, h: Tensor, rstd: Tensor, dy: Tensor, dh: Tensor | None = None) -> Tensor:
    """The gradient of `norm_forward`'s x and of its residual, with dh the gradient of h by other ways.

    The weight gradient comes with it and is added at once.
    """
    weight = layer.weight
    dx, dweight = rmsnorm.backward(dy, h, weight, rstd, dh)
    if weight.requires_grad:
        accumulate(weight, dweight)
    return dx


class _Norm(torch.autograd.Function):
    """Saves x (the caller's) and rstd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: RMSNorm, weight: Tensor) -> Tensor:
        y, _, rstd = norm_forward(layer, x)
        ctx.layer = layer
        ctx.save_for_backward(x, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        x, rstd = ctx.saved_tensors
        return norm_backward(ctx.layer, x, rstd, dy), None, None


class _NormOfSum(torch.autograd.Function):
    """Saves the sum (the caller's) and rstd; x and residual have one gradient, a single tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, layer: RMSNorm, weight: Tensor) -> tuple[Tensor, Tensor]:
        y, total, rstd = norm_forward(layer, x, residual)
        ctx.layer = layer
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, rstd)
        return y, total

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor | None, dtotal: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        if dy is None:  # nobody used the norm
            return dtotal, dtotal, None, None
        total, rstd = ctx.saved_tensors
        dx = norm_backward(ctx.layer, total, rstd, dy, dtotal)
        return dx, dx, None, None


class Dropout(nn.Module):
    """Dropout whose mask depends on (seed, step, layer, site) and the global place of an element, on no rank.

    `split` says how x [B, T, D] lies on the axis: "none" (replicated: equal masks), "sequence" (dim 1 is this rank's
    part) or "features" (dim 2 is): ranks then drop the elements that one rank would drop.
    """

    def __init__(
        self, p: float, axis: Axis, *, layer: int, site: int, split: Literal["none", "sequence", "features"] = "none"
    ) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"dropout p={p} must be in [0, 1)")
        if split not in ("none", "sequence", "features"):
            raise ValueError(f"split={split!r} must be 'none', 'sequence' or 'features'")
        self.p, self.axis, self.layer, self.site, self.split = p, axis, layer, site, split

    def forward(self, x: Tensor, *, seed: int, step: int, sample_offset: int = 0) -> Tensor:
        """x [B, T, D]; `sample_offset` is the index of its first sample in the global batch. Identity in eval()."""
        if not self.training or self.p == 0.0:
            return x
        rng = rng_key(seed, step, self.layer, self.site, device=x.device)
        row = self.axis.coord * x.shape[1] if self.split == "sequence" else 0
        column = self.axis.coord * x.shape[2] if self.split == "features" else 0
        return dropout(x, self.p, rng, sample_offset=sample_offset, row_offset=row, col_offset=column)
