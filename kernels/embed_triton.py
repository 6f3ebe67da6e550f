"""The Triton side of embedding (embed.py): rows by token, and the gradient of the rows summed in a fixed order.

Gradient: tokens are sorted stably, so that equal ones are a run in the order of the batch. Windows of the sorted list
are walked one token after the other; those of other shards are passed over, so that a shard's bits are those of the
whole. A run within one window goes straight to its row; of a run across windows each window leaves its sum, and a
second kernel adds those in order. No atomics: two runs agree bit for bit. Sums are fp32 (fp64 for fp64) and rounded
once. Per element one read of the gradient and one write of each row that occurs (accumulating: one read more), and
for each run that crosses a border 4 bytes a window written and read.

A gradient of its own is zeroed first, so rows that occur are written twice: V + 2 N rows for V + N (8,192 tokens of
32,000: 1.2 of the bytes). To zero the others alone, each row must be searched for in the sorted tokens; training adds
into its bucket and zeroes nothing.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from plait.kernels.launch import Launch, compute_dtype, next_power_of_two, triton_dtype
from plait.kernels.plans import Built, Site, planned

# Elements per program: 16 a thread of 4 warps, two 16-byte accesses each way in 16-bit (derived).
_BLOCK, _MAX_COL = 2048, 1024
# Tokens per window: short, for many programs on small batches; each border costs a row of partial sums.
_WINDOW = 16
# Windows whose sums are added at once, and columns: 16 reads in flight where one token fills the batch.
_BLOCK_WINDOW, _CROSSING_COL = 16, 256


@triton.jit(do_not_specialize=["vocab_start"])
def _embedding_forward(
    tokens_ptr, weight_ptr, out_ptr, stride_weight_row, stride_weight_col, num_tokens, num_rows, num_cols,
    vocab_start,
    BLOCK_TOKEN: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    num_col_blocks = tl.cdiv(num_cols, BLOCK_COL)
    program = tl.program_id(0).to(tl.int64)
    places = program // num_col_blocks * BLOCK_TOKEN + tl.arange(0, BLOCK_TOKEN)  # int64
    cols = program % num_col_blocks * BLOCK_COL + tl.arange(0, BLOCK_COL)
    here = places < num_tokens
    rows = tl.load(tokens_ptr + places, mask=here, other=0) - vocab_start
    inside = here & (rows >= 0) & (rows < num_rows)
    in_row = (cols < num_cols)[None, :]
    weight_ptrs = weight_ptr + rows[:, None] * stride_weight_row + cols[None, :] * stride_weight_col
    out = tl.load(weight_ptrs, mask=inside[:, None] & in_row, other=0.0)  # [BLOCK_TOKEN, BLOCK_COL]
    tl.store(out_ptr + places[:, None] * num_cols + cols[None, :], out, mask=here[:, None] & in_row)


@triton.jit
def _write_row(out_ptrs, sums, mask, ACCUMULATE: tl.constexpr):
    if ACCUMULATE:
        sums += tl.load(out_ptrs, mask=mask, other=0.0).to(sums.dtype)
    tl.store(out_ptrs, sums.to(out_ptrs.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["vocab_start"])
def _sum_windows(
    dout_ptr, keys_ptr, order_ptr, out_ptr, partial_ptr, stride_dout_row, stride_dout_col, stride_out_row,
    stride_out_col, num_tokens, num_rows, num_cols, vocab_start,
    COMPUTE: tl.constexpr, ACCUMULATE: tl.constexpr, WINDOW: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    """keys are sorted tokens, those of other shards too. Runs within the window go to out, the others' sums to
    partial [windows, 2, D]: of the run that comes from the window before, and of one that begins here and goes on.
    """
    beyond = num_rows + vocab_start.to(tl.int64)  # no token of this shard
    num_col_blocks = tl.cdiv(num_cols, BLOCK_COL)
    program = tl.program_id(0).to(tl.int64)
    window = program // num_col_blocks
    cols = program % num_col_blocks * BLOCK_COL + tl.arange(0, BLOCK_COL)
    first = window * WINDOW
    before = tl.load(keys_ptr + first - 1, mask=first > 0, other=beyond)
    key = tl.load(keys_ptr + first)
    sums = tl.zeros([BLOCK_COL], COMPUTE)
    for step in range(WINDOW):
        place = first + step
        row = key - vocab_start
        inside = (place < num_tokens) & (row >= 0) & (row < num_rows)
        token = tl.load(order_ptr + place, mask=inside, other=0)
        dout_ptrs = dout_ptr + token * stride_dout_row + cols * stride_dout_col
        # A condition of the whole program narrows the row: no columns, no access.
        sums += tl.load(dout_ptrs, mask=cols < tl.where(inside, num_cols, 0), other=0.0).to(COMPUTE)  # [BLOCK_COL]
        after = tl.load(keys_ptr + place + 1, mask=place + 1 < num_tokens, other=beyond)
        ends = inside & ((after != key) | (step == WINDOW - 1))
        whole = ends & (after != key) & (key != before)
        _write_row(
            out_ptr + row * stride_out_row + cols * stride_out_col,
            sums,
            cols < tl.where(whole, num_cols, 0),
            ACCUMULATE,
        )
        side = 2 * window + (key != before).to(tl.int64)
        crossing = ends & ((after == key) | (key == before))
        tl.store(partial_ptr + side * num_cols + cols, sums, mask=cols < tl.where(crossing, num_cols, 0))
        sums = tl.where(after != key, 0.0, sums)
        key = after


@triton.jit(do_not_specialize=["vocab_start"])
def _sum_crossing(
    keys_ptr, partial_ptr, out_ptr, stride_out_row, stride_out_col, num_tokens, num_rows, num_cols, vocab_start,
    ACCUMULATE: tl.constexpr, WINDOW: tl.constexpr, BLOCK_WINDOW: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    """The run that begins in a window and goes on: its sum there, then those of the next windows."""
    num_col_blocks = tl.cdiv(num_cols, BLOCK_COL)
    program = tl.program_id(0).to(tl.int64)
    window = program // num_col_blocks
    cols = program % num_col_blocks * BLOCK_COL + tl.arange(0, BLOCK_COL)
    in_row = cols < num_cols
    first = window * WINDOW
    beyond = num_rows + vocab_start.to(tl.int64)  # no token of this shard
    before = tl.load(keys_ptr + first - 1, mask=first > 0, other=beyond)
    key = tl.load(keys_ptr + first + WINDOW - 1)
    after = tl.load(keys_ptr + first + WINDOW)
    row = key - vocab_start
    if (key == after) & (key != before) & (row >= 0) & (row < num_rows):
        sums = tl.load(partial_ptr + (2 * window + 1) * num_cols + cols, mask=in_row, other=0.0)
        more = key == after
        while more:
            windows = window + 1 + tl.arange(0, BLOCK_WINDOW)
            starts = windows * WINDOW
            same = tl.load(keys_ptr + starts, mask=starts < num_tokens, other=beyond) == key
            parts = partial_ptr + 2 * windows[:, None] * num_cols + cols[None, :]
            sums += tl.sum(tl.load(parts, mask=same[:, None] & in_row[None, :], other=0.0), axis=0)
            window += BLOCK_WINDOW
            more = tl.sum(same.to(tl.int32), axis=0) == BLOCK_WINDOW
        _write_row(out_ptr + row * stride_out_row + cols * stride_out_col, sums, in_row, ACCUMULATE)


def forward_launch(tokens: torch.Tensor, weight: torch.Tensor, vocab_start: int, out: torch.Tensor) -> Launch:
    """tokens and out [..., D] are contiguous."""
    num_tokens, (num_rows, num_cols) = tokens.numel(), weight.shape
    block_col = min(_MAX_COL, next_power_of_two(num_cols))
    block_token = min(_BLOCK // block_col, next_power_of_two(num_tokens))
    grid = triton.cdiv(num_tokens, block_token) * triton.cdiv(num_cols, block_col)
    arguments = (tokens, weight, out, *weight.stride(), num_tokens, num_rows, num_cols, vocab_start)
    return Launch(_embedding_forward, (grid,), arguments, {"BLOCK_TOKEN": block_token, "BLOCK_COL": block_col})


def gradient_launches(
    dout: torch.Tensor, keys: torch.Tensor, order: torch.Tensor, partial: torch.Tensor, out: torch.Tensor,
    accumulate: bool, vocab_start: int = 0,
) -> list[Launch]:  # fmt: skip
    """dout [N, D]; keys and order [N] as sorted; partial [windows, 2, D] contiguous; out [V, D]."""
    num_tokens, (num_rows, num_cols) = keys.numel(), out.shape
    num_windows = partial.shape[0]
    shared = {"ACCUMULATE": accumulate, "WINDOW": _WINDOW}
    sizes = (num_tokens, num_rows, num_cols, vocab_start)
    block_col = min(_MAX_COL, next_power_of_two(num_cols))
    windows = Launch(
        _sum_windows,
        (num_windows * triton.cdiv(num_cols, block_col),),
        (dout, keys, order, out, partial, *dout.stride(), *out.stride(), *sizes),
        {"COMPUTE": triton_dtype(dout.dtype), **shared, "BLOCK_COL": block_col},
    )
    if num_windows == 1:
        return [windows]
    block_col = min(_CROSSING_COL, next_power_of_two(num_cols))
    # A run that begins in the last window ends there.
    grid = ((num_windows - 1) * triton.cdiv(num_cols, block_col),)
    constants = {**shared, "BLOCK_WINDOW": _BLOCK_WINDOW, "BLOCK_COL": block_col}
    return [windows, Launch(_sum_crossing, grid, (keys, partial, out, *out.stride(), *sizes), constants)]


def _build_lookup(site: Site, tokens: torch.Tensor, weight: torch.Tensor, vocab_start: int) -> Built:
    out = site.empty((*tokens.shape, weight.shape[1]), weight.dtype)
    return Built((out,), [forward_launch(tokens.contiguous(), weight, vocab_start, out)] if out.numel() else [])


def lookup(tokens: torch.Tensor, weight: torch.Tensor, vocab_start: int) -> torch.Tensor:
    """Rows of `weight` [V, D] by token, zeros for tokens of other shards."""
    found: torch.Tensor = planned(_build_lookup, (tokens, weight), vocab_start)[0]
    return found


def _build_gradient(
    site: Site, dout: torch.Tensor, keys: torch.Tensor, order: torch.Tensor, out: torch.Tensor, *options: Any
) -> Built:
    """dout [..., D]; keys and order [N] as sorted; out [V, D]."""
    num_cols = out.shape[1]
    partial = site.empty((triton.cdiv(keys.numel(), _WINDOW), 2, num_cols), compute_dtype(dout.dtype))
    return Built((), gradient_launches(dout.reshape(-1, num_cols), keys, order, partial, out, *options))


def add_rows(dout: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor, vocab_start: int, accumulate: bool) -> None:
    """Writes into `out` [V, D], or adds to it, the sum of dout [..., D] over each row's tokens."""
    if not accumulate:
        out.zero_()
    if dout.numel() and out.shape[0]:
        keys, order = torch.sort(tokens.reshape(-1), stable=True)
        planned(_build_gradient, (dout, keys, order, out), accumulate, vocab_start)
    # The kernels write by address, so autograd must be told.
    torch.autograd.graph.increment_version(out)
