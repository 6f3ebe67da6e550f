"""The kernels of rms_norm and layer_norm for narrow rows, such as heads: a program normalises tiles of several rows.

A row of 64 or 128 elements alone would leave most threads without an access of 16 bytes. Each row is summed over its
columns as norm_rows.py sums it; the gradients of weight and bias add up the rows of a program tile by tile, lane by
lane, then the lanes, then the programs: an order that depends on the shape alone. Formulas: rmsnorm.py, layernorm.py.
"""

from typing import Any

import triton
import triton.language as tl

from plait.kernels.launch import Launch, next_power_of_two

# Elements of a tile: 16 a thread of 4 warps forward, two 16-byte reads in 16-bit; backward 8, since four to six
# numbers are kept for each (derived; compiled for sm_80 to sm_100 without spills).
_FORWARD_TILE, _BACKWARD_TILE, _WARPS = 2048, 1024, 4
# Programs of the backward, 8 of 4 warps per multiprocessor of an H100; their partial sums are narrow too (derived).
NUM_TILE_PARTIALS = 1056


def rows_of_tile(num_cols: int, backward: bool = True) -> int:
    """Rows that a tile holds; in the backward programs share whole tiles."""
    return max(1, (_BACKWARD_TILE if backward else _FORWARD_TILE) // next_power_of_two(num_cols))


@triton.jit
def _tile_forward(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, h_ptr, mean_ptr, rstd_ptr,
    stride_x_row, stride_residual_row, num_cols, eps, num_rows,
    COMPUTE: tl.constexpr, CENTRED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROW + tl.arange(0, BLOCK_ROW)
    cols = tl.arange(0, BLOCK_COL)[None, :]
    live = rows < num_rows
    mask = live[:, None] & (cols < num_cols)
    places = rows[:, None] * num_cols + cols
    x = tl.load(x_ptr + rows[:, None] * stride_x_row + cols, mask=mask, other=0.0).to(COMPUTE)  # [ROW, COL]
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + rows[:, None] * stride_residual_row + cols, mask=mask, other=0.0).to(COMPUTE)
        h = x.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + places, h, mask=mask)
        x = h.to(COMPUTE)
    if CENTRED:
        mean = tl.sum(x, axis=1) / num_cols
        tl.store(mean_ptr + rows, mean, mask=live)
        x = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / num_cols + eps)
    tl.store(rstd_ptr + rows, rstd, mask=live)
    y = x * rstd[:, None]
    if HAS_WEIGHT:
        y *= tl.load(weight_ptr + cols, mask=cols < num_cols, other=0.0).to(COMPUTE)
    if HAS_BIAS:
        y += tl.load(bias_ptr + cols, mask=cols < num_cols, other=0.0).to(COMPUTE)
    tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _tile_backward(
    dy_ptr, dh_ptr, h_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    stride_dy_row, stride_dh_row, stride_h_row, num_rows, num_cols, rows_per_program,
    COMPUTE: tl.constexpr, CENTRED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_ROW)
    col = tl.arange(0, BLOCK_COL)
    cols = col[None, :]
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < num_cols, other=0.0).to(COMPUTE)
        dweight = tl.zeros([BLOCK_ROW, BLOCK_COL], COMPUTE)
    if HAS_BIAS:
        dbias = tl.zeros([BLOCK_ROW, BLOCK_COL], COMPUTE)
    first = program * rows_per_program
    last = tl.minimum(first + rows_per_program, num_rows)
    for place in range(first, last, BLOCK_ROW):
        rows = tl.cast(place, tl.int64) + lane  # the interpreter counts in 32 bits
        live = rows < last
        mask = live[:, None] & (cols < num_cols)
        dy = tl.load(dy_ptr + rows[:, None] * stride_dy_row + cols, mask=mask, other=0.0).to(COMPUTE)
        h = tl.load(h_ptr + rows[:, None] * stride_h_row + cols, mask=mask, other=0.0).to(COMPUTE)
        rstd = tl.load(rstd_ptr + rows, mask=live, other=0.0)[:, None]
        if CENTRED:
            h = tl.where(mask, h - tl.load(mean_ptr + rows, mask=live, other=0.0)[:, None], 0.0)
        normed = h * rstd
        g = dy
        if HAS_WEIGHT:
            dweight += dy * normed
            g = dy * weight
        if HAS_BIAS:
            dbias += dy
        dx = g - normed * (tl.sum(g * normed, axis=1) / num_cols)[:, None]
        if CENTRED:
            dx -= (tl.sum(g, axis=1) / num_cols)[:, None]
        dx *= rstd
        if HAS_RESIDUAL:
            dx += tl.load(dh_ptr + rows[:, None] * stride_dh_row + cols, mask=mask, other=0.0).to(COMPUTE)
        tl.store(dx_ptr + rows[:, None] * num_cols + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if HAS_WEIGHT:
        tl.store(dweight_ptr + program * num_cols + col, tl.sum(dweight, axis=0), mask=col < num_cols)
    if HAS_BIAS:
        tl.store(dbias_ptr + program * num_cols + col, tl.sum(dbias, axis=0), mask=col < num_cols)


def forward_tiles(num_rows: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Launch:
    """The launch with `norm_rows.forward_launch`'s arguments and switches."""
    num_cols = arguments[10]
    block_row = rows_of_tile(num_cols, backward=False)
    constants |= {"BLOCK_ROW": block_row, "BLOCK_COL": next_power_of_two(num_cols)}
    grid = (triton.cdiv(num_rows, block_row),)
    return Launch(_tile_forward, grid, (*arguments, num_rows), constants, _WARPS)


def backward_tiles(num_programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Launch:
    """The launch with `norm_rows.backward_launch`'s arguments and switches."""
    num_cols = arguments[13]
    constants |= {"BLOCK_ROW": rows_of_tile(num_cols), "BLOCK_COL": next_power_of_two(num_cols)}
    return Launch(_tile_backward, (num_programs,), arguments, constants, _WARPS)
