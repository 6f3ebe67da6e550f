"""rms_norm: y = h * rstd * weight with h = x (+ residual), rstd = (mean(h^2) + eps)^-1/2 over the last dim.

Backward, with g = dy * weight: dh = rstd * (g - h * rstd^2 * mean(g * h)) (+ d residual_out), dweight = sum over rows
of dy * h * rstd, in two stages of fixed order (rows of a program, then programs), so that runs agree bit for bit.
x, weight, residual: one floating dtype; arithmetic in fp32 (fp64 for fp64); h is rounded to x's dtype before it is
normalised, so that backward sees the same h. Bytes per element: 2 accesses forward (4 with residual), 3 backward.
Kernels: norm_rows.py, and norm_tiles.py for narrow rows.
"""

from typing import overload

import torch

from plait.kernels.launch import check_floating, compute_dtype, use_triton, widened
from plait.kernels.norm_rows import build_forward, check_rows, like, run_backward, stats_like
from plait.kernels.plans import planned
from plait.kernels.registration import below_autograd, once_differentiable, register, without_zeros


def rms_norm_ref(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, *, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The oracle; differentiable by torch."""
    dtype = compute_dtype(x.dtype)
    h = x if residual is None else (x.to(dtype) + residual.to(dtype)).to(x.dtype)
    wide = h.to(dtype)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = (normed if weight is None else normed * weight.to(dtype)).to(x.dtype)
    return y if residual is None else (y, h)


def forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, h, rstd) without checks or graph: the kernel itself, for code that has a backward of its own.

    Without a residual h is x.
    """
    if use_triton(x):
        y, h, _, rstd = planned(build_forward, (x, residual, weight, None), eps, False)
        return y, h, rstd
    h = x if residual is None else x + residual
    wide = widened(h)
    # The norm is one pass without a temporary; its square overflows only where the mean of squares does.
    rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    y = torch.mul(wide, rstd)
    if weight is not None:
        y.mul_(weight)
    return (y if y.dtype is x.dtype else y.to(x.dtype)), h, rstd.squeeze(-1)


@overload
def backward(
    dy: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, dh: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def backward(
    dy: torch.Tensor, h: torch.Tensor, weight: None, rstd: torch.Tensor, dh: torch.Tensor | None
) -> tuple[torch.Tensor, None]: ...


def backward(
    dy: torch.Tensor, h: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor, dh: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(dx, dweight) without checks or graph; dh is the gradient of h by other ways."""
    if use_triton(h):
        return run_backward(dy, h, weight, None, rstd, dh)[:2]
    wide_dy, scale, num_cols = widened(dy), rstd.unsqueeze(-1), h.shape[-1]
    wide_weight = None if weight is None else widened(weight)
    # torch's layer norm with means of 0 is one pass, and lacks only rstd * mean(g), g = dy * weight.
    dx, dweight, _ = torch.ops.aten.native_layer_norm_backward(
        wide_dy, widened(h), [num_cols], torch.zeros_like(scale), scale, wide_weight, None,
        [True, weight is not None, False],
    )  # fmt: skip
    flat = wide_dy.reshape(-1, num_cols)
    missing = (flat.sum(-1) if wide_weight is None else torch.mv(flat, wide_weight)).view(scale.shape).mul_(scale)
    dx.add_(missing, alpha=1.0 / num_cols)
    if dh is not None:
        dx.add_(dh)
    return dx.to(h.dtype), None if weight is None else dweight.to(weight.dtype)


def _grad_kernel(
    dy: torch.Tensor, h: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor, dh: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `backward`; an empty dweight where there is no weight."""
    dx, dweight = backward(dy, h, weight, rstd, dh) if weight is not None else backward(dy, h, None, rstd, dh)
    return dx, h.new_empty(0) if dweight is None else dweight


class _RMSNorm(torch.autograd.Function):
    """Saves x and weight (the caller's) and rstd: 4 bytes per row."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        with below_autograd():
            y, rstd = _rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        without_zeros(ctx, rstd)
        return y, rstd

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, _):
        dx, dweight = _rms_norm_grad(dy, *ctx.saved_tensors, None)
        return dx, dweight if ctx.needs_input_grad[1] else None, None


class _RMSNormResidual(torch.autograd.Function):
    """Saves residual_out (the caller's), weight and rstd: 4 bytes per row."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        with below_autograd():
            y, h, rstd = _rms_norm_residual(x, residual, weight, eps)
        ctx.save_for_backward(h, weight, rstd)
        without_zeros(ctx, rstd)
        return y, h, rstd

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dh, _):
        h, weight, rstd = ctx.saved_tensors
        dx, dweight = _rms_norm_grad(torch.zeros_like(h) if dy is None else dy, h, weight, rstd, dh)
        return dx, dx, dweight if ctx.needs_input_grad[2] else None, None


_rms_norm = register(
    "rms_norm(Tensor x, Tensor? weight, float eps) -> (Tensor, Tensor)",
    lambda x, weight, eps: forward(x, None, weight, eps)[::2],
    lambda x, weight, eps: (like(x), stats_like(x)),
    _RMSNorm.apply,
)
_rms_norm_residual = register(
    "rms_norm_residual(Tensor x, Tensor residual, Tensor? weight, float eps) -> (Tensor, Tensor, Tensor)",
    forward,
    lambda x, residual, weight, eps: (like(x), like(x), stats_like(x)),
    _RMSNormResidual.apply,
)
_rms_norm_grad = register(
    "rms_norm_grad(Tensor dy, Tensor h, Tensor? weight, Tensor rstd, Tensor? dh) -> (Tensor, Tensor)",
    _grad_kernel,
    lambda dy, h, weight, rstd, dh: (like(h), h.new_empty(0) if weight is None else like(weight)),
)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, *, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Root-mean-square norm of `x[..., D]` by `weight[D]` (None: by 1).

    With `residual` (x's shape) returns (y, x + residual) and normalises the sum. Saves 4 bytes per row beyond what
    the caller holds. D at most 65,536. Raises TypeError on mixed dtypes, ValueError on shapes and devices.
    """
    check_floating("rms_norm", x=x, weight=weight, residual=residual)
    check_rows("rms_norm", x, residual, eps, weight=weight)
    if residual is None:
        return _rms_norm(x, weight, eps)[0]
    y, h, _ = _rms_norm_residual(x, residual, weight, eps)
    return y, h
