"""rms_norm: y = h * rstd * weight with h = x (+ residual), rstd = (mean(h^2) + eps)^-1/2 over the last dim.

Backward, with g = dy * weight: dh = rstd * (g - h * rstd^2 * mean(g * h)) (+ d residual_out), dweight = sum over rows
of dy * h * rstd, in two stages of fixed order (rows of a program, then programs), so that runs agree bit for bit.
x, weight, residual: one floating dtype; arithmetic in fp32 (fp64 for fp64); h is rounded to x's dtype before it is
normalised, so that backward sees the same h. Bytes per element: 2 accesses forward (4 with residual), 3 backward.
"""

import torch
import triton
import triton.language as tl

from plait.kernels.launch import (
    Launch,
    below_autograd,
    check,
    check_floating,
    compute_dtype,
    from_table,
    next_power_of_two,
    register,
    rows_of,
    triton_dtype,
    use_triton,
    widened,
)


def rms_norm_ref(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The oracle; differentiable by torch."""
    dtype = compute_dtype(x.dtype)
    h = x if residual is None else (x.to(dtype) + residual.to(dtype)).to(x.dtype)
    wide = h.to(dtype)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = (wide * rstd * weight.to(dtype)).to(x.dtype)
    return y if residual is None else (y, h)


# (columns, warps): one row per program; at most 32 elements a thread, so that a row stays in registers (derived).
_WARPS = ((512, 1), (1024, 2), (2048, 4), (8192, 8), (16384, 16), (65536, 32))
_MAX_COLS = 65536
# Programs of the backward pass, each with one partial weight gradient: 2 per multiprocessor of an H100 (derived).
_NUM_PARTIALS = 264


@triton.jit
def _rms_norm_forward(
    x_ptr, residual_ptr, weight_ptr, y_ptr, h_ptr, rstd_ptr,
    stride_x_row, stride_residual_row, num_cols, eps,
    COMPUTE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_COL)
    mask = cols < num_cols
    x = tl.load(x_ptr + row * stride_x_row + cols, mask=mask, other=0.0).to(COMPUTE)  # [BLOCK_COL]
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * stride_residual_row + cols, mask=mask, other=0.0).to(COMPUTE)
        h = x.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + row * num_cols + cols, h, mask=mask)
        x = h.to(COMPUTE)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / num_cols + eps)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(COMPUTE)
    y = x * rstd * weight
    tl.store(y_ptr + row * num_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def _rms_norm_backward(
    dy_ptr, dh_ptr, h_ptr, weight_ptr, rstd_ptr, dx_ptr, partial_ptr,
    stride_dy_row, stride_dh_row, stride_h_row, num_rows, num_cols, rows_per_program,
    COMPUTE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_COL)
    mask = cols < num_cols
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(COMPUTE)
    partial = tl.zeros([BLOCK_COL], COMPUTE)
    first = program * rows_per_program
    last = tl.minimum(first + rows_per_program, num_rows)
    for row in range(first, last):
        dy = tl.load(dy_ptr + row * stride_dy_row + cols, mask=mask, other=0.0).to(COMPUTE)
        h = tl.load(h_ptr + row * stride_h_row + cols, mask=mask, other=0.0).to(COMPUTE)
        rstd = tl.load(rstd_ptr + row)
        normed = h * rstd
        partial += dy * normed
        g = dy * weight
        dx = rstd * (g - normed * (tl.sum(g * normed, axis=0) / num_cols))
        if HAS_RESIDUAL:
            dx += tl.load(dh_ptr + row * stride_dh_row + cols, mask=mask, other=0.0).to(COMPUTE)
        tl.store(dx_ptr + row * num_cols + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(partial_ptr + program * num_cols + cols, partial, mask=mask)


def forward_launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float,
    y: torch.Tensor, h: torch.Tensor, rstd: torch.Tensor,
) -> Launch:  # fmt: skip
    """y, h (with a residual) and rstd are contiguous outputs."""
    rows = rows_of(x)
    extra = rows if residual is None else rows_of(residual)
    num_rows, num_cols = rows.shape
    arguments = (
        rows, extra, weight.contiguous(), y, h, rstd, rows.stride(0), extra.stride(0), num_cols, eps
    )  # fmt: skip
    constants = {
        "COMPUTE": triton_dtype(x.dtype),
        "HAS_RESIDUAL": residual is not None,
        "BLOCK_COL": next_power_of_two(num_cols),
    }
    return Launch(_rms_norm_forward, (num_rows,), arguments, constants, from_table(_WARPS, num_cols))


def backward_launch(
    dy: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, dh: torch.Tensor | None,
    dx: torch.Tensor, partial: torch.Tensor,
) -> Launch:  # fmt: skip
    """dx and partial [programs, D] are contiguous outputs; the programs share the rows evenly."""
    rows, grad = rows_of(h), rows_of(dy)
    extra = grad if dh is None else rows_of(dh)
    num_rows, num_cols = rows.shape
    arguments = (
        grad, extra, rows, weight.contiguous(), rstd.contiguous(), dx, partial, grad.stride(0), extra.stride(0),
        rows.stride(0), num_rows, num_cols, triton.cdiv(num_rows, partial.shape[0]),
    )  # fmt: skip
    constants = {
        "COMPUTE": triton_dtype(h.dtype),
        "HAS_RESIDUAL": dh is not None,
        "BLOCK_COL": next_power_of_two(num_cols),
    }
    return Launch(_rms_norm_backward, (partial.shape[0],), arguments, constants, from_table(_WARPS, num_cols))


def _launch_forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, rstd = _like(x), _rstd_like(x)
    h = y if residual is None else _like(x)
    if x.numel():
        forward_launch(x, residual, weight, eps, y, h, rstd).run()
    return y, h, rstd


def _launch_backward(
    dy: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, dh: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    dx = _like(h)
    if not h.numel():
        return dx, torch.zeros_like(weight)
    num_rows = rstd.numel()
    num_programs = triton.cdiv(num_rows, triton.cdiv(num_rows, _NUM_PARTIALS))
    partial = torch.empty(num_programs, h.shape[-1], dtype=rstd.dtype, device=h.device)
    backward_launch(dy, h, weight, rstd, dh, dx, partial).run()
    return dx, partial.sum(0).to(weight.dtype)


def forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, h, rstd) without checks or graph: the kernel itself, for code that has a backward of its own.

    Without a residual h is x.
    """
    if use_triton(x):
        y, h, rstd = _launch_forward(x, residual, weight, eps)
        return y, (x if residual is None else h), rstd
    h = x if residual is None else x + residual
    wide = widened(h)
    # The norm is one pass without a temporary; its square overflows only where the mean of squares does.
    rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    y = torch.mul(wide, rstd).mul_(weight)
    return (y if y.dtype is x.dtype else y.to(x.dtype)), h, rstd.squeeze(-1)


def backward(
    dy: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, dh: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx, dweight) without checks or graph; dh is the gradient of h by other ways."""
    if use_triton(h):
        return _launch_backward(dy, h, weight, rstd, dh)
    wide_dy, wide_weight, scale = widened(dy), widened(weight), rstd.unsqueeze(-1)
    num_cols = h.shape[-1]
    # torch's layer norm with means of 0 is one pass, and lacks only rstd * mean(g), g = dy * weight.
    dx, dweight, _ = torch.ops.aten.native_layer_norm_backward(
        wide_dy, widened(h), [num_cols], torch.zeros_like(scale), scale, wide_weight, None, [True, True, False]
    )
    missing = torch.mv(wide_dy.reshape(-1, num_cols), wide_weight).view(scale.shape).mul_(scale)
    dx.add_(missing, alpha=1.0 / num_cols)
    if dh is not None:
        dx.add_(dh)
    return dx.to(h.dtype), dweight.to(weight.dtype)


class _RMSNorm(torch.autograd.Function):
    """Saves x and weight (the caller's) and rstd: 4 bytes per row."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        with below_autograd():
            y, rstd = _rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.mark_non_differentiable(rstd)
        return y, rstd

    @staticmethod
    def backward(ctx, dy, _):
        dx, dweight = _rms_norm_grad(dy, *ctx.saved_tensors, None)
        return dx, dweight, None


class _RMSNormResidual(torch.autograd.Function):
    """Saves residual_out (the caller's), weight and rstd: 4 bytes per row."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        with below_autograd():
            y, h, rstd = _rms_norm_residual(x, residual, weight, eps)
        ctx.save_for_backward(h, weight, rstd)
        ctx.mark_non_differentiable(rstd)
        return y, h, rstd

    @staticmethod
    def backward(ctx, dy, dh, _):
        dx, dweight = _rms_norm_grad(dy, *ctx.saved_tensors, dh)
        return dx, dx, dweight, None


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _rstd_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape[:-1], dtype=compute_dtype(x.dtype), device=x.device)


_rms_norm = register(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    lambda x, weight, eps: forward(x, None, weight, eps)[::2],
    lambda x, weight, eps: (_like(x), _rstd_like(x)),
    _RMSNorm.apply,
)
_rms_norm_residual = register(
    "rms_norm_residual(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    forward,
    lambda x, residual, weight, eps: (_like(x), _like(x), _rstd_like(x)),
    _RMSNormResidual.apply,
)
_rms_norm_grad = register(
    "rms_norm_grad(Tensor dy, Tensor h, Tensor weight, Tensor rstd, Tensor? dh) -> (Tensor, Tensor)",
    backward,
    lambda dy, h, weight, rstd, dh: (_like(h), _like(weight)),
)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Root-mean-square norm of `x[..., D]` by `weight[D]`.

    With `residual` (x's shape) returns (y, x + residual) and normalises the sum. Saves 4 bytes per row beyond what
    the caller holds. D at most 65,536. Raises TypeError on mixed dtypes, ValueError on shapes and devices.
    """
    if residual is None:
        check_floating("rms_norm", x=x, weight=weight)
    else:
        check_floating("rms_norm", x=x, weight=weight, residual=residual)
        check(
            residual.shape == x.shape,
            lambda: f"rms_norm: residual has shape {tuple(residual.shape)}; expected {tuple(x.shape)}",
        )
    check(
        x.dim() >= 1 and weight.shape == x.shape[-1:] and 0 < x.shape[-1] <= _MAX_COLS,
        lambda: f"rms_norm: x {tuple(x.shape)} needs weight of its last dim (1 to 65536), got {tuple(weight.shape)}",
    )
    if residual is None:
        return _rms_norm(x, weight, eps)[0]
    y, h, _ = _rms_norm_residual(x, residual, weight, eps)
    return y, h
