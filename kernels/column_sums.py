"""column_sums: the last stage of a gradient that sums over rows: partial sums [P, N] added up, rounded once.

Not an op: norms and activations launch it behind the kernel whose programs wrote the partial sums. A program adds its
columns in steps of 32 rows, lane by lane, then over the lanes: one order for each P, so that runs agree bit for bit.
"""

import torch
import triton
import triton.language as tl

from plait.kernels.launch import Launch

# 8 elements a thread of 4 warps; a row of the block is one access of 128 bytes, and 4096 columns make 128 programs
# (derived).
_BLOCK_ROW, _BLOCK_COL = 32, 32


@triton.jit
def _add_rows(partial_ptr, out_ptr, num_rows, num_cols, BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_COL + tl.arange(0, BLOCK_COL)
    sums = tl.zeros([BLOCK_ROW, BLOCK_COL], partial_ptr.dtype.element_ty)
    for start in range(0, num_rows, BLOCK_ROW):
        rows = (start + tl.arange(0, BLOCK_ROW)).to(tl.int64)
        mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
        sums += tl.load(partial_ptr + rows[:, None] * num_cols + cols[None, :], mask=mask, other=0.0)
    total = tl.sum(sums, axis=0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + cols, total, mask=cols < num_cols)


def sum_launch(partial: torch.Tensor, out: torch.Tensor) -> Launch:
    """out [N] of any floating dtype = the sum over dim 0 of partial [P, N] in fp32 (fp64), both contiguous."""
    num_rows, num_cols = partial.shape
    constants = {"BLOCK_ROW": _BLOCK_ROW, "BLOCK_COL": _BLOCK_COL}
    return Launch(_add_rows, (triton.cdiv(num_cols, _BLOCK_COL),), (partial, out, num_rows, num_cols), constants)
