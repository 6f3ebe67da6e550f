"""The kernels of rms_norm and layer_norm: a row is normalised in registers, or in blocks where it is too wide.

Narrow rows, such as heads, share a program (norm_tiles.py).

CENTRED subtracts the mean (layer_norm); without it mean_ptr is not touched. The gradients of weight and bias have two
stages: a program adds up its rows in order, then column_sums.py adds the programs' sums. How many they are depends on
the number of rows alone, so that runs agree bit for bit. Wide rows are read once per pass (from the second on out of
the cache); their partial sums lie in memory, each written by one program only. Formulas: rmsnorm.py, layernorm.py.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from plait.kernels.column_sums import sum_launch
from plait.kernels.launch import Launch, compute_dtype, from_table, next_power_of_two, rows_of, triton_dtype
from plait.kernels.norm_tiles import NUM_TILE_PARTIALS, backward_tiles, forward_tiles, rows_of_tile
from plait.kernels.plans import Built, Site, planned

_MAX_COLS = 65536
# Rows up to so many columns lie several to a tile: a warp reads 16 bytes a thread from 256 columns of 16 bits on.
_MAX_NARROW = 512
# (columns, warps): one row per program; at most 32 elements a thread, so that a row stays in registers (derived).
_FORWARD_WARPS = ((1024, 2), (2048, 4), (8192, 8), (16384, 16), (32768, 32))
# Four to six numbers are kept for an element: at most 16 elements a thread.
_BACKWARD_WARPS = ((1024, 2), (2048, 4), (4096, 8), (8192, 16))
# Wider rows are walked in blocks: these are the widest that compile without spills (offline, sm_80 to sm_100).
_MAX_FORWARD = 32768
_MAX_BACKWARD = 8192
# Columns per step of a wide row: 16 elements a thread of 8 warps, two 16-byte reads of a tensor in 16-bit (derived).
_BLOCK_COL = 4096
_WIDE_WARPS = 8
# Programs of the backward pass, each with one partial gradient: 2 per multiprocessor of an H100 (derived). With one,
# as Liger has it, 8,192 rows of 16 bits would move 2 % less (a program's sums are written and read, 264 * 8 bytes a
# column beside 8,192 * 6), and lose more: up to 4,096 columns a program has 16 KB of loads in flight at most and none
# in its reductions, where 4.3 TB/s * 0.7 us (assumed) / 132 = 23 KB hide the latency; two fit, with 79 registers a
# thread (rms_norm) or 117 (layer_norm). Wider rows take 16 warps with 97 to 117 registers: one program fits (offline,
# sm_90), so 264 are two rounds of 132 and as fast as one; but on the A100's 108, 132 would be two rounds where 264
# are three of half the length, a third more time.
_NUM_PARTIALS = 264


@triton.jit
def _norm_forward(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, h_ptr, mean_ptr, rstd_ptr,
    stride_x_row, stride_residual_row, num_cols, eps,
    COMPUTE: tl.constexpr, CENTRED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_COL: tl.constexpr,
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
    if CENTRED:
        mean = tl.sum(x, axis=0) / num_cols
        tl.store(mean_ptr + row, mean)
        x = tl.where(mask, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / num_cols + eps)
    tl.store(rstd_ptr + row, rstd)
    y = x * rstd
    if HAS_WEIGHT:
        y *= tl.load(weight_ptr + cols, mask=mask, other=0.0).to(COMPUTE)
    if HAS_BIAS:
        y += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(COMPUTE)
    tl.store(y_ptr + row * num_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_backward(
    dy_ptr, dh_ptr, h_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    stride_dy_row, stride_dh_row, stride_h_row, num_rows, num_cols, rows_per_program,
    COMPUTE: tl.constexpr, CENTRED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_COL)
    mask = cols < num_cols
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(COMPUTE)
        dweight = tl.zeros([BLOCK_COL], COMPUTE)
    if HAS_BIAS:
        dbias = tl.zeros([BLOCK_COL], COMPUTE)
    first = program * rows_per_program
    last = tl.minimum(first + rows_per_program, num_rows)
    for place in range(first, last):
        row = tl.cast(place, tl.int64)  # the interpreter counts in 32 bits
        dy = tl.load(dy_ptr + row * stride_dy_row + cols, mask=mask, other=0.0).to(COMPUTE)
        h = tl.load(h_ptr + row * stride_h_row + cols, mask=mask, other=0.0).to(COMPUTE)
        rstd = tl.load(rstd_ptr + row)
        if CENTRED:
            h = tl.where(mask, h - tl.load(mean_ptr + row), 0.0)
        normed = h * rstd
        g = dy
        if HAS_WEIGHT:
            dweight += dy * normed
            g = dy * weight
        if HAS_BIAS:
            dbias += dy
        dx = g - normed * (tl.sum(g * normed, axis=0) / num_cols)
        if CENTRED:
            dx -= tl.sum(g, axis=0) / num_cols
        dx *= rstd
        if HAS_RESIDUAL:
            dx += tl.load(dh_ptr + row * stride_dh_row + cols, mask=mask, other=0.0).to(COMPUTE)
        tl.store(dx_ptr + row * num_cols + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if HAS_WEIGHT:
        tl.store(dweight_ptr + program * num_cols + cols, dweight, mask=mask)
    if HAS_BIAS:
        tl.store(dbias_ptr + program * num_cols + cols, dbias, mask=mask)


@triton.jit
def _wide_norm_forward(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, h_ptr, mean_ptr, rstd_ptr,
    stride_x_row, stride_residual_row, num_cols, eps,
    COMPUTE: tl.constexpr, CENTRED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK_COL)
    x_ptr += row * stride_x_row
    residual_ptr += row * stride_residual_row
    h_ptr += row * num_cols
    y_ptr += row * num_cols
    sums = tl.zeros([BLOCK_COL], COMPUTE)
    squares = tl.zeros([BLOCK_COL], COMPUTE)
    for start in range(0, num_cols, BLOCK_COL):
        cols = start + block
        x = tl.load(x_ptr + cols, mask=cols < num_cols, other=0.0).to(COMPUTE)
        if HAS_RESIDUAL:
            x += tl.load(residual_ptr + cols, mask=cols < num_cols, other=0.0).to(COMPUTE)
            h = x.to(h_ptr.dtype.element_ty)
            tl.store(h_ptr + cols, h, mask=cols < num_cols)
            x = h.to(COMPUTE)
        sums += x
        squares += x * x
    source_ptr = x_ptr
    if HAS_RESIDUAL:
        source_ptr = h_ptr
        tl.debug_barrier()  # h is read back below
    mean = 0.0
    if CENTRED:
        mean = tl.sum(sums, axis=0) / num_cols
        tl.store(mean_ptr + row, mean)
        squares = tl.zeros([BLOCK_COL], COMPUTE)
        for start in range(0, num_cols, BLOCK_COL):
            cols = start + block
            x = tl.load(source_ptr + cols, mask=cols < num_cols, other=0.0).to(COMPUTE)
            centred = tl.where(cols < num_cols, x - mean, 0.0)
            squares += centred * centred
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / num_cols + eps)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, num_cols, BLOCK_COL):
        cols = start + block
        y = (tl.load(source_ptr + cols, mask=cols < num_cols, other=0.0).to(COMPUTE) - mean) * rstd
        if HAS_WEIGHT:
            y *= tl.load(weight_ptr + cols, mask=cols < num_cols, other=0.0).to(COMPUTE)
        if HAS_BIAS:
            y += tl.load(bias_ptr + cols, mask=cols < num_cols, other=0.0).to(COMPUTE)
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < num_cols)


@triton.jit
def _add_up(sum_ptr, value, mask, begun):
    """sum_ptr += value, or = value where the sum has not begun."""
    tl.store(sum_ptr, tl.where(begun, tl.load(sum_ptr, mask=mask, other=0.0), 0.0) + value, mask=mask)


@triton.jit
def _wide_norm_backward(
    dy_ptr, dh_ptr, h_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    stride_dy_row, stride_dh_row, stride_h_row, num_rows, num_cols, rows_per_program,
    COMPUTE: tl.constexpr, CENTRED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK_COL)
    dweight_ptr += program * num_cols
    dbias_ptr += program * num_cols
    first = program * rows_per_program
    last = tl.minimum(first + rows_per_program, num_rows)
    for place in range(first, last):
        row = tl.cast(place, tl.int64)  # the interpreter counts in 32 bits
        mean = 0.0
        if CENTRED:
            mean = tl.load(mean_ptr + row)
        rstd = tl.load(rstd_ptr + row)
        sums = tl.zeros([BLOCK_COL], COMPUTE)
        dots = tl.zeros([BLOCK_COL], COMPUTE)
        for start in range(0, num_cols, BLOCK_COL):
            cols = start + block
            g = tl.load(dy_ptr + row * stride_dy_row + cols, mask=cols < num_cols, other=0.0).to(COMPUTE)
            if HAS_WEIGHT:
                g *= tl.load(weight_ptr + cols, mask=cols < num_cols, other=0.0).to(COMPUTE)
            h = tl.load(h_ptr + row * stride_h_row + cols, mask=cols < num_cols, other=0.0).to(COMPUTE)
            sums += g
            dots += tl.where(cols < num_cols, g * ((h - mean) * rstd), 0.0)
        dot = tl.sum(dots, axis=0) / num_cols
        mean_g = 0.0
        if CENTRED:
            mean_g = tl.sum(sums, axis=0) / num_cols
        for start in range(0, num_cols, BLOCK_COL):
            cols = start + block
            mask = cols < num_cols
            dy = tl.load(dy_ptr + row * stride_dy_row + cols, mask=mask, other=0.0).to(COMPUTE)
            h = tl.load(h_ptr + row * stride_h_row + cols, mask=mask, other=0.0).to(COMPUTE)
            normed = (h - mean) * rstd
            g = dy
            if HAS_WEIGHT:
                g *= tl.load(weight_ptr + cols, mask=mask, other=0.0).to(COMPUTE)
                _add_up(dweight_ptr + cols, dy * normed, mask, row > first)
            if HAS_BIAS:
                _add_up(dbias_ptr + cols, dy, mask, row > first)
            dx = rstd * (g - mean_g - normed * dot)
            if HAS_RESIDUAL:
                dx += tl.load(dh_ptr + row * stride_dh_row + cols, mask=mask, other=0.0).to(COMPUTE)
            tl.store(dx_ptr + row * num_cols + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.debug_barrier()  # the sums are read back in the next row


def _constants(
    x: torch.Tensor, mean: torch.Tensor | None, residual: torch.Tensor | None, weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> dict[str, Any]:  # fmt: skip
    """The switches of all kernels."""
    return {
        "COMPUTE": triton_dtype(x.dtype),
        "CENTRED": mean is not None,
        "HAS_RESIDUAL": residual is not None,
        "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None,
    }


def forward_launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None,
    eps: float, y: torch.Tensor, h: torch.Tensor, mean: torch.Tensor | None, rstd: torch.Tensor,
) -> Launch:  # fmt: skip
    """y, h (with a residual), mean (layer_norm) and rstd are contiguous outputs."""
    rows = rows_of(x)
    extra = rows if residual is None else rows_of(residual)
    num_rows, num_cols = rows.shape
    arguments = (
        rows, extra, rows if weight is None else weight.contiguous(), rows if bias is None else bias.contiguous(),
        y, h, rstd if mean is None else mean, rstd, rows.stride(0), extra.stride(0), num_cols, eps,
    )  # fmt: skip
    constants = _constants(x, mean, residual, weight, bias)
    if num_cols <= _MAX_NARROW:
        return forward_tiles(num_rows, arguments, constants)
    if num_cols > _MAX_FORWARD:
        constants["BLOCK_COL"] = _BLOCK_COL
        return Launch(_wide_norm_forward, (num_rows,), arguments, constants, _WIDE_WARPS)
    constants["BLOCK_COL"] = next_power_of_two(num_cols)
    return Launch(_norm_forward, (num_rows,), arguments, constants, from_table(_FORWARD_WARPS, num_cols))


def num_partials(num_rows: int, num_cols: int) -> int:
    """Programs of the backward, each with one partial gradient: they share the rows evenly, in whole tiles."""
    if not num_rows:
        return 0
    if num_cols <= _MAX_NARROW:
        step, most = rows_of_tile(num_cols), NUM_TILE_PARTIALS
    else:
        step, most = 1, _NUM_PARTIALS
    num_tiles = triton.cdiv(num_rows, step)
    return triton.cdiv(num_tiles, triton.cdiv(num_tiles, most))


def backward_launch(
    dy: torch.Tensor, h: torch.Tensor, weight: torch.Tensor | None, mean: torch.Tensor | None, rstd: torch.Tensor,
    dh: torch.Tensor | None, dx: torch.Tensor, dweight: torch.Tensor | None, dbias: torch.Tensor | None,
    num_programs: int,
) -> Launch:  # fmt: skip
    """dx, dweight (with a weight) and dbias (with a bias), both [programs, D], are contiguous outputs.

    `num_programs` as `num_partials` counts them.
    """
    rows, grad = rows_of(h), rows_of(dy)
    extra = grad if dh is None else rows_of(dh)
    num_rows, num_cols = rows.shape
    step = rows_of_tile(num_cols) if num_cols <= _MAX_NARROW else 1
    arguments = (
        grad, extra, rows, rows if weight is None else weight.contiguous(),
        rstd if mean is None else mean.contiguous(), rstd.contiguous(), dx,
        rstd if dweight is None else dweight, rstd if dbias is None else dbias,
        grad.stride(0), extra.stride(0), rows.stride(0), num_rows, num_cols,
        triton.cdiv(triton.cdiv(num_rows, step), num_programs) * step,
    )  # fmt: skip
    constants = _constants(h, mean, dh, weight, dbias)
    if num_cols <= _MAX_NARROW:
        return backward_tiles(num_programs, arguments, constants)
    if num_cols > _MAX_BACKWARD:
        constants["BLOCK_COL"] = _BLOCK_COL
        return Launch(_wide_norm_backward, (num_programs,), arguments, constants, _WIDE_WARPS)
    constants["BLOCK_COL"] = next_power_of_two(num_cols)
    return Launch(_norm_backward, (num_programs,), arguments, constants, from_table(_BACKWARD_WARPS, num_cols))


def check_rows(
    op: str, x: torch.Tensor, residual: torch.Tensor | None, eps: float, **parameters: torch.Tensor | None
) -> None:  # fmt: skip
    """ValueError unless x is [..., D] with D in range, residual has its shape and each parameter is [D] or None."""
    shape = x.shape
    if not eps >= 0.0:
        raise ValueError(f"{op}: eps is {eps}; expected a number >= 0")
    if not shape:
        raise ValueError(f"{op}: x is a scalar; expected [..., D]")
    if not 0 < shape[-1] <= _MAX_COLS:
        raise ValueError(f"{op}: x {tuple(shape)} has {shape[-1]} columns; expected 1 to {_MAX_COLS}")
    if residual is not None and residual.shape != shape:
        raise ValueError(f"{op}: residual has shape {tuple(residual.shape)}; expected {tuple(shape)}")
    for name, parameter in parameters.items():
        if parameter is not None and parameter.shape != shape[-1:]:
            raise ValueError(f"{op}: x {tuple(shape)} needs {name} of its last dim, got {tuple(parameter.shape)}")


def like(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of x's shape, dtype and device."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def stats_like(x: torch.Tensor) -> torch.Tensor:
    """One number per row of x[..., D], in the dtype of the arithmetic."""
    return torch.empty(x.shape[:-1], dtype=compute_dtype(x.dtype), device=x.device)


def build_forward(
    site: Site, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None,
    bias: torch.Tensor | None, eps: float, centred: bool,
) -> Built:  # fmt: skip
    """Results (y, h, mean, rstd); without a residual h is x, and mean is None unless `centred`."""
    stats = compute_dtype(x.dtype)
    y, rstd = site.empty(x.shape, x.dtype), site.empty(x.shape[:-1], stats)
    h = x if residual is None else site.empty(x.shape, x.dtype)
    mean = site.empty(x.shape[:-1], stats) if centred else None
    launches = [forward_launch(x, residual, weight, bias, eps, y, h, mean, rstd)] if x.numel() else []
    return Built((y, h, mean, rstd), launches)


def _build_backward(
    site: Site, dy: torch.Tensor, h: torch.Tensor, weight: torch.Tensor | None, mean: torch.Tensor | None,
    rstd: torch.Tensor, dh: torch.Tensor | None, has_bias: bool,
) -> Built:  # fmt: skip
    """Results (dx, dweight, dbias); None where there is no weight or bias."""
    num_programs, width = num_partials(rstd.numel(), h.shape[-1]), h.shape[-1]
    dx, wanted = site.empty(h.shape, h.dtype), (weight is not None, has_bias)
    if not num_programs:
        return Built((dx, *[site.full((width,), h.dtype, 0.0) if want else None for want in wanted]))
    partial = [site.empty((num_programs, width), rstd.dtype) if want else None for want in wanted]
    launches = [backward_launch(dy, h, weight, mean, rstd, dh, dx, partial[0], partial[1], num_programs)]
    totals = [None if part is None else site.empty((width,), h.dtype) for part in partial]
    launches += [sum_launch(a, b) for a, b in zip(partial, totals, strict=True) if a is not None and b is not None]
    return Built((dx, *totals), launches)


def run_backward(
    dy: torch.Tensor, h: torch.Tensor, weight: torch.Tensor | None, mean: torch.Tensor | None, rstd: torch.Tensor,
    dh: torch.Tensor | None, has_bias: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """(dx, dweight, dbias) in h's dtype; None where there is no weight or bias."""
    found: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None] = planned(
        _build_backward, (dy, h, weight, mean, rstd, dh), has_bias
    )
    return found
