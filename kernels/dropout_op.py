"""dropout: zeroes elements with probability p and scales the others by 1 / (1 - p); the mask is never stored.

The mask is a function of (rng, global sample, row, column) alone (see philox.py): the same on every split of the
tensor over ranks, again under recompute, and again in backward, which is the same op on the gradient.
"""

import torch

from plait.kernels.launch import below_autograd, check, check_device, check_floating, compute_dtype, register
from plait.kernels.philox import keep_mask_ref


def dropout_ref(
    x: torch.Tensor, p: float, rng: torch.Tensor, *, sample_offset: int = 0, row_offset: int = 0, col_offset: int = 0
) -> torch.Tensor:
    """The oracle; differentiable by torch."""
    batch, rows, cols = x.shape
    keep = keep_mask_ref(
        rng,
        p,
        range(sample_offset, sample_offset + batch),
        range(1),
        range(row_offset, row_offset + rows),
        range(col_offset, col_offset + cols),
    )
    scaled = x.to(compute_dtype(x.dtype)) * (1.0 / (1.0 - p))
    return torch.where(keep[:, 0], scaled, 0.0).to(x.dtype)


def _kernel(
    x: torch.Tensor, rng: torch.Tensor, p: float, sample_offset: int, row_offset: int, col_offset: int
) -> torch.Tensor:
    return dropout_ref(
        x, p, rng, sample_offset=sample_offset, row_offset=row_offset, col_offset=col_offset
    ).contiguous()


class _Dropout(torch.autograd.Function):
    """Saves rng, the caller's 16 bytes."""

    @staticmethod
    def forward(ctx, x, rng, p, sample_offset, row_offset, col_offset):
        with below_autograd():
            out = _dropout(x, rng, p, sample_offset, row_offset, col_offset)
        ctx.save_for_backward(rng)
        ctx.place = (p, sample_offset, row_offset, col_offset)
        return out

    @staticmethod
    def backward(ctx, dout):
        return _dropout(dout, *ctx.saved_tensors, *ctx.place), None, None, None, None, None


_dropout = register(
    "dropout(Tensor x, Tensor rng, float p, int sample_offset, int row_offset, int col_offset) -> Tensor",
    _kernel,
    lambda x, rng, p, sample_offset, row_offset, col_offset: x.new_empty(x.shape),
    _Dropout.apply,
)


def check_rng(op: str, rng: torch.Tensor, like: torch.Tensor) -> None:
    """`rng` is int64 [2] where `like` lives."""
    if rng.dtype is not torch.int64 or tuple(rng.shape) != (2,):
        raise TypeError(f"{op}: rng is {rng.dtype} {tuple(rng.shape)}; expected int64 [2] = (seed, offset)")
    check_device(op, like, rng=rng)


def dropout(
    x: torch.Tensor, p: float, rng: torch.Tensor, *, sample_offset: int = 0, row_offset: int = 0, col_offset: int = 0
) -> torch.Tensor:
    """Drops elements of `x[B, T, D]` with probability p in [0, 1) (steps of 2^-24).

    `rng` is int64 [2] = (seed, offset); the offsets are the global indices of x[0, 0, 0]. p = 0 returns x itself.
    Raises TypeError on dtypes, ValueError on p, shapes and devices.
    """
    check_floating("dropout", x=x)
    check_rng("dropout", rng, x)
    check(x.dim() == 3, lambda: f"dropout: x has shape {tuple(x.shape)}; expected [B, T, D]")
    check(0.0 <= p < 1.0, lambda: f"dropout: p is {p}; expected 0 <= p < 1")
    return x if p == 0.0 else _dropout(x, rng, p, sample_offset, row_offset, col_offset)
