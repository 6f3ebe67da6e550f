"""dropout: zeroes elements with probability p and scales the others by 1 / (1 - p); the mask is never stored.

The mask is a function of (rng, global sample, row, column) alone (see philox.py): the same on every split of the
tensor over ranks, again under recompute, and again in backward, which is the same op on the gradient. Arithmetic in
fp32 (fp64 for fp64). Accesses per element: 2; the 38 wide multiplies that Philox costs are shared by 4 elements.
"""

import torch
import triton
import triton.language as tl

from plait.kernels.launch import (
    Launch,
    check_device,
    check_floating,
    compute_dtype,
    next_power_of_two,
    triton_dtype,
    use_triton,
)
from plait.kernels.philox import keep_mask_ref, keep_threshold, philox_keep, philox_load_key
from plait.kernels.plans import Built, Site, planned
from plait.kernels.registration import below_autograd, register


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


# Elements per program: 8 a thread of 4 warps, one 16-byte access each way in 16-bit (derived). At least the four
# columns that one Philox call serves.
_BLOCK, _MIN_COL, _MAX_COL = 1024, 4, 512


@triton.jit(do_not_specialize=["sample_offset", "row_offset", "threshold"])
def _dropout_kernel(
    x_ptr, rng_ptr, out_ptr, stride_x_sample, stride_x_row, stride_x_col, num_rows, num_cols,
    sample_offset, row_offset, first_col, lead, threshold, scale,
    COMPUTE: tl.constexpr, BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    """The block of columns begins `lead` before the tensor's first one, so that it holds whole groups of four."""
    num_col_blocks = tl.cdiv(num_cols + lead, BLOCK_COL)
    num_row_blocks = tl.cdiv(num_rows, BLOCK_ROW)
    program = tl.program_id(0).to(tl.int64)
    col_block = program % num_col_blocks
    row_block = program // num_col_blocks % num_row_blocks
    sample = program // num_col_blocks // num_row_blocks
    rows = row_block * BLOCK_ROW + tl.arange(0, BLOCK_ROW)  # int64
    cols = col_block * BLOCK_COL - lead + tl.arange(0, BLOCK_COL)
    mask = (rows < num_rows)[:, None] & ((cols >= 0) & (cols < num_cols))[None, :]
    x_ptrs = x_ptr + sample * stride_x_sample + rows[:, None] * stride_x_row + cols[None, :] * stride_x_col
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(COMPUTE)  # [BLOCK_ROW, BLOCK_COL]
    key_low, key_high = philox_load_key(rng_ptr)
    keep = philox_keep(
        key_low, key_high, sample + sample_offset, sample * 0, rows + row_offset, first_col + col_block * BLOCK_COL,
        threshold, BLOCK_COL,
    )  # fmt: skip
    out = tl.where(keep, x * scale, 0.0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (sample * num_rows + rows)[:, None] * num_cols + cols[None, :], out, mask=mask)


def forward_launch(
    x: torch.Tensor, rng: torch.Tensor, p: float, sample_offset: int, row_offset: int, col_offset: int,
    out: torch.Tensor, block_col: int | None = None,
) -> Launch:  # fmt: skip
    """x [B, T, D] of any strides, out contiguous; `block_col` changes no bit."""
    batch, num_rows, num_cols = x.shape
    lead = col_offset % 4
    wide = next_power_of_two(num_cols + lead)
    block_col = block_col or min(_MAX_COL, max(_MIN_COL, wide))
    block_row = min(next_power_of_two(num_rows), max(1, _BLOCK // block_col))
    grid = batch * -(-num_rows // block_row) * -(-(num_cols + lead) // block_col)
    arguments = (
        x, rng, out, *x.stride(), num_rows, num_cols, sample_offset, row_offset, col_offset - lead, lead,
        keep_threshold(p), 1.0 / (1.0 - p),
    )  # fmt: skip
    constants = {"COMPUTE": triton_dtype(x.dtype), "BLOCK_ROW": block_row, "BLOCK_COL": block_col}
    return Launch(_dropout_kernel, (grid,), arguments, constants)


def _build(
    site: Site, x: torch.Tensor, rng: torch.Tensor, p: float, sample_offset: int, row_offset: int, col_offset: int
) -> Built:
    out = site.empty(x.shape, x.dtype)
    place = (sample_offset, row_offset, col_offset)
    return Built((out,), [forward_launch(x, rng.contiguous(), p, *place, out)] if x.numel() else [])


def _kernel(
    x: torch.Tensor, rng: torch.Tensor, p: float, sample_offset: int, row_offset: int, col_offset: int
) -> torch.Tensor:
    if use_triton(x):
        found: torch.Tensor = planned(_build, (x, rng), p, sample_offset, row_offset, col_offset)[0]
        return found
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
    check_device(op, like, rng=rng)
    if rng.dtype is not torch.int64 or tuple(rng.shape) != (2,):
        raise TypeError(f"{op}: rng is {rng.dtype} {tuple(rng.shape)}; expected int64 [2] = (seed, offset)")


def check_offsets(op: str, **offsets: int) -> None:
    """Global indices are integers from 0 on: TypeError or ValueError naming the odd one."""
    for name, offset in offsets.items():
        if not isinstance(offset, (int, torch.SymInt)) and not hasattr(offset, "__index__"):
            raise TypeError(f"{op}: {name} is {offset!r}; expected an integer")
        if offset < 0:
            raise ValueError(f"{op}: {name} is {offset}; expected none below 0")


def dropout(
    x: torch.Tensor, p: float, rng: torch.Tensor, *, sample_offset: int = 0, row_offset: int = 0, col_offset: int = 0
) -> torch.Tensor:
    """Drops elements of `x[B, T, D]` with probability p in [0, 1) (steps of 2^-24).

    `rng` is int64 [2] = (seed, offset); the offsets are the global indices of x[0, 0, 0]. p = 0 returns x itself.
    Saves rng. Raises TypeError on dtypes, ValueError on p, offsets, shapes and devices.
    """
    check_floating("dropout", x=x)
    check_rng("dropout", rng, x)
    if x.dim() != 3:
        raise ValueError(f"dropout: x has shape {tuple(x.shape)}; expected [B, T, D]")
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout: p is {p}; expected 0 <= p < 1")
    check_offsets("dropout", sample_offset=sample_offset, row_offset=row_offset, col_offset=col_offset)
    return x if p == 0.0 else _dropout(x, rng, p, sample_offset, row_offset, col_offset)
