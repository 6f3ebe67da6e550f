"""layer_norm: y = n * weight + bias, n = (h - mean(h)) * rstd with h = x (+ residual), rstd = (var(h) + eps)^-1/2.

mean and var (the biased one, of the centred row) are over the last dim. Backward, with g = dy * weight:
dh = rstd * (g - mean(g) - n * mean(g * n)) (+ d residual_out), dweight = sum of dy * n, dbias = sum of dy over rows,
in two stages of fixed order (rows of a program, then programs), so that runs agree bit for bit. x, weight, bias,
residual: one floating dtype; arithmetic in fp32 (fp64 for fp64); h is rounded to x's dtype before it is normalised,
so that backward sees the same h. Bytes per element: 2 accesses forward (4 with residual), 3 backward.
Kernels: norm_rows.py, and norm_tiles.py for narrow rows.
"""

import torch

from plait.kernels.launch import check_floating, compute_dtype, use_triton, widened
from plait.kernels.norm_rows import build_forward, check_rows, like, run_backward, stats_like
from plait.kernels.plans import planned
from plait.kernels.registration import below_autograd, once_differentiable, register, without_zeros


def layer_norm_ref(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5,
    *, residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The oracle; differentiable by torch."""
    dtype = compute_dtype(x.dtype)
    h = x if residual is None else (x.to(dtype) + residual.to(dtype)).to(x.dtype)
    wide = h.to(dtype)
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight.to(dtype)
    y = (y if bias is None else y + bias.to(dtype)).to(x.dtype)
    return y if residual is None else (y, h)


def forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, h, mean, rstd) without checks or graph: the kernel itself, for code that has a backward of its own.

    mean and rstd [...] are in the dtype of the arithmetic. Without a residual h is x.
    """
    if use_triton(x):
        found: tuple[torch.Tensor, ...] = planned(build_forward, (x, residual, weight, bias), eps, True)
        y, h, mean, rstd = found
        return y, h, mean, rstd
    h = x if residual is None else x + residual
    wide_weight = None if weight is None else widened(weight)
    wide_bias = None if bias is None else widened(bias)
    y, mean, rstd = torch.native_layer_norm(widened(h), h.shape[-1:], wide_weight, wide_bias, eps)
    return (y if y.dtype is x.dtype else y.to(x.dtype)), h, mean.squeeze(-1), rstd.squeeze(-1)


def backward(
    dy: torch.Tensor, h: torch.Tensor, weight: torch.Tensor | None, mean: torch.Tensor, rstd: torch.Tensor,
    dh: torch.Tensor | None, has_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """(dx, dweight or None, dbias or None) without checks or graph; dh is the gradient of h by other ways."""
    if use_triton(h):
        return run_backward(dy, h, weight, mean, rstd, dh, has_bias)
    wide_weight = None if weight is None else widened(weight)
    shaped_as_bias = mean.new_empty(h.shape[-1:]) if has_bias else None  # torch asks for it; no value is read
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        widened(dy), widened(h), h.shape[-1:], mean.unsqueeze(-1), rstd.unsqueeze(-1), wide_weight, shaped_as_bias,
        [True, weight is not None, has_bias],
    )  # fmt: skip
    if dh is not None:
        dx.add_(dh)
    dweight = None if weight is None else dweight.to(h.dtype)
    return dx.to(h.dtype), dweight, dbias.to(h.dtype) if has_bias else None


def _grad_kernel(
    dy: torch.Tensor, h: torch.Tensor, weight: torch.Tensor | None, mean: torch.Tensor, rstd: torch.Tensor,
    dh: torch.Tensor | None, has_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `backward`; an empty gradient where there is no weight or bias."""
    dx, dweight, dbias = backward(dy, h, weight, mean, rstd, dh, has_bias)
    return dx, h.new_empty(0) if dweight is None else dweight, h.new_empty(0) if dbias is None else dbias


def _grad_fake(
    dy: torch.Tensor, h: torch.Tensor, weight: torch.Tensor | None, mean: torch.Tensor, rstd: torch.Tensor,
    dh: torch.Tensor | None, has_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    width = h.shape[-1]
    return like(h), h.new_empty(0 if weight is None else width), h.new_empty(width if has_bias else 0)


class _LayerNorm(torch.autograd.Function):
    """Saves x and weight (the caller's), mean and rstd: 8 bytes per row."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        with below_autograd():
            y, mean, rstd = _layer_norm(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        without_zeros(ctx, mean, rstd)
        ctx.has_bias = bias is not None
        return y, mean, rstd

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, *_):
        dx, dweight, dbias = _layer_norm_grad(dy, *ctx.saved_tensors, None, ctx.has_bias)
        needs = ctx.needs_input_grad
        return dx, dweight if needs[1] else None, dbias if needs[2] else None, None


class _LayerNormResidual(torch.autograd.Function):
    """Saves residual_out (the caller's), weight, mean and rstd: 8 bytes per row."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps):
        with below_autograd():
            y, h, mean, rstd = _layer_norm_residual(x, residual, weight, bias, eps)
        ctx.save_for_backward(h, weight, mean, rstd)
        without_zeros(ctx, mean, rstd)
        ctx.has_bias = bias is not None
        return y, h, mean, rstd

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dh, *_):
        h, *others = ctx.saved_tensors
        dy = torch.zeros_like(h) if dy is None else dy
        dx, dweight, dbias = _layer_norm_grad(dy, h, *others, dh, ctx.has_bias)
        needs = ctx.needs_input_grad
        return dx, dx, dweight if needs[2] else None, dbias if needs[3] else None, None


def _kernel(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, _, mean, rstd = forward(x, None, weight, bias, eps)
    return y, mean, rstd


_layer_norm = register(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    _kernel,
    lambda x, weight, bias, eps: (like(x), stats_like(x), stats_like(x)),
    _LayerNorm.apply,
)
_layer_norm_residual = register(
    "layer_norm_residual(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    forward,
    lambda x, residual, weight, bias, eps: (like(x), like(x), stats_like(x), stats_like(x)),
    _LayerNormResidual.apply,
)
_layer_norm_grad = register(
    "layer_norm_grad(Tensor dy, Tensor h, Tensor? weight, Tensor mean, Tensor rstd, Tensor? dh, bool has_bias)"
    " -> (Tensor, Tensor, Tensor)",
    _grad_kernel,
    _grad_fake,
)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5,
    *, residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Layer norm of `x[..., D]` over D with `weight[D]` (None: 1) and `bias[D]` (None: 0).

    With `residual` (x's shape) returns (y, x + residual) and normalises the sum. Saves 8 bytes per row beyond what
    the caller holds. D at most 65,536. Raises TypeError on mixed dtypes, ValueError on shapes and devices.
    """
    check_floating("layer_norm", x=x, weight=weight, bias=bias, residual=residual)
    check_rows("layer_norm", x, residual, eps, weight=weight, bias=bias)
    if residual is None:
        return _layer_norm(x, weight, bias, eps)[0]
    y, h, *_ = _layer_norm_residual(x, residual, weight, bias, eps)
    return y, h
