"""Triton kernels over rows of logits: their softmax statistics in one read, their gradient in one read and one write.

The formulas are entropy.py's. Rows belong to a vocabulary shard: `vocab_start` is the class of column 0, and a target
of another shard hits nothing. Arithmetic in fp32 (fp64 for fp64). A row is one program of the statistics, which walks
its blocks with a running maximum; the gradient has a program per block, and may write over the logits that it reads.
Every sum has one order, so that runs agree bit for bit. NaN and inf pass through as torch does.

Accesses: statistics V reads, 1 target and 4 writes per row; gradient V reads and V writes per row, and 3 numbers per
block. The numbers of a row are wide where its blocks are whole: only the last block of an odd width is narrow.

Where no other shard has a word in it, the program of a row goes on to its loss, and one more program adds the losses
up; the gradient of what it gives then finds each token's share by itself.
"""

import torch
import triton
import triton.language as tl

from plait.kernels.launch import Launch, next_power_of_two, rows_of, triton_dtype
from plait.kernels.rounding import divide

# Statistics: 8 elements a thread take 48 to 58 registers on sm_80 and sm_90: four programs or more share a processor,
# so that one reads while another reduces; 16 take 80 to 114 and spill on sm_80 (compiled offline, triton 3.9).
# Gradient: 16 a thread, up to four 16-byte reads in flight. Not yet timed on a card.
_STATS_BLOCK, _STATS_WARPS = 2048, 8
_GRAD_BLOCK, _GRAD_WARPS = 2048, 4
# One program adds up all losses: 16 bytes a thread and pass of the losses, 32 of the targets. 16k tokens are 4 passes
# and 192 KB, a few microseconds beside the 4 GB of their logits (derived).
_SUM_BLOCK, _SUM_WARPS = 4096, 32


@triton.jit
def _bounded(x, softcap, double_inverse, SOFTCAP: tl.constexpr):
    """softcap * tanh(x / softcap), or x; `double_inverse` is 2 / softcap."""
    if SOFTCAP:
        # tanh(y) = 1 - 2 / (exp(2 y) + 1): exact at both ends.
        return softcap * (1.0 - 2.0 / (tl.exp(x * double_inverse) + 1.0))
    else:
        return x


@triton.jit
def _take_in(s, live, place, top, sums, hit, totals, MASKED: tl.constexpr, BLOCK_COL: tl.constexpr):
    """The running statistics after one more block s[BLOCK_COL]; the target is its element `place`, if it has one."""
    cols = tl.arange(0, BLOCK_COL)
    if MASKED:
        totals += tl.where(live, s, 0.0)
        s = tl.where(live, s, float("-inf"))
    else:
        totals += s
    if (place >= 0) & (place < BLOCK_COL):
        hit = tl.sum(tl.where(cols == place.to(tl.int32), s, 0.0), axis=0)
    grown = tl.maximum(top, tl.max(s, axis=0))
    # While all is -inf: exp(-inf - 0) = 0 where -inf - -inf would be NaN.
    base = tl.where(grown == float("-inf"), 0.0, grown)
    sums = sums * tl.exp(top - base) + tl.exp(s - base)
    return grown, sums, hit, totals


@triton.jit
def _row_stats(
    row_ptr, column, num_cols, softcap, double_inverse,
    COMPUTE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    """(max, sum of exp(s - max), the target's s or 0, sum of s) of a row; the target is its element `column`."""
    cols = tl.arange(0, BLOCK_COL)
    top = tl.full([], float("-inf"), COMPUTE)
    hit = tl.full([], 0.0, COMPUTE)
    sums = tl.zeros([BLOCK_COL], COMPUTE)
    totals = tl.zeros([BLOCK_COL], COMPUTE)
    whole = num_cols // BLOCK_COL * BLOCK_COL
    for start in range(0, whole, BLOCK_COL):
        s = tl.load(row_ptr + start + cols).to(COMPUTE)  # [BLOCK_COL]
        s = _bounded(s, softcap, double_inverse, SOFTCAP)
        top, sums, hit, totals = _take_in(s, cols, column - start, top, sums, hit, totals, False, BLOCK_COL)
    if whole < num_cols:
        live = whole + cols < num_cols
        s = tl.load(row_ptr + whole + cols, mask=live, other=0.0).to(COMPUTE)
        s = _bounded(s, softcap, double_inverse, SOFTCAP)
        place = tl.where(column < num_cols, column - whole, -1)
        top, sums, hit, totals = _take_in(s, live, place, top, sums, hit, totals, True, BLOCK_COL)
    return top, tl.sum(sums, axis=0), hit, tl.sum(totals, axis=0)


@triton.jit
def _loss_stats(
    logits_ptr, target_ptr, stats_ptr, stride_logits_row, stride_stats_row, num_cols, vocab_start, softcap,
    double_inverse, COMPUTE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits_row
    column = tl.load(target_ptr + row) - vocab_start  # int64
    top, sum_exp, hit, total = _row_stats(
        row_ptr, column, num_cols, softcap, double_inverse, COMPUTE, SOFTCAP, BLOCK_COL
    )  # fmt: skip
    out_ptr = stats_ptr + row
    tl.store(out_ptr, top)
    tl.store(out_ptr + stride_stats_row, sum_exp)
    tl.store(out_ptr + 2 * stride_stats_row, hit)
    tl.store(out_ptr + 3 * stride_stats_row, total)


@triton.jit
def _token_loss(
    logits_ptr, target_ptr, lse_ptr, loss_ptr, stride_logits_row, num_cols, vocab_start, ignore_index, hit_weight,
    share, z_loss, softcap, double_inverse,
    COMPUTE: tl.constexpr, SMOOTHED: tl.constexpr, SQUARED: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_COL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits_row
    target = tl.load(target_ptr + row)
    top, sum_exp, hit, total = _row_stats(
        row_ptr, target - vocab_start, num_cols, softcap, double_inverse, COMPUTE, SOFTCAP, BLOCK_COL
    )  # fmt: skip
    lse = top + tl.log(sum_exp)
    loss = lse - hit_weight * hit
    if SMOOTHED:  # a sum that is infinite must not meet a share of 0
        loss -= share * total
    if SQUARED:
        loss += z_loss * (lse * lse)
    tl.store(lse_ptr + row, lse)
    tl.store(loss_ptr + row, tl.where(target == ignore_index, 0.0, loss))


@triton.jit
def _add_losses(
    loss_ptr, target_ptr, value_ptr, divisor_ptr, num_tokens, ignore_index, MEAN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    element = loss_ptr.dtype.element_ty
    sums = tl.zeros([BLOCK], element)
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_tokens, BLOCK):
        places = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        live = places < num_tokens
        sums += tl.load(loss_ptr + places, mask=live, other=0.0)
        target = tl.load(target_ptr + places, mask=live, other=ignore_index)
        counts += (target != ignore_index).to(tl.int32)
    divisor = tl.full([], 1.0, element)
    if MEAN:
        divisor = tl.maximum(tl.sum(counts.to(tl.int64), axis=0), 1).to(element)
    tl.store(value_ptr, divide(tl.sum(sums, axis=0), divisor))
    tl.store(divisor_ptr, divisor)


@triton.jit
def _slope(x, place, lse, dloss, growth, hit_weight, share, softcap, double_inverse, SOFTCAP: tl.constexpr):
    """dloss/dlogits of a block x; the target is its element `place`, if it has one."""
    s = _bounded(x, softcap, double_inverse, SOFTCAP)
    grad = tl.exp(s - lse) * growth - share
    grad = tl.where(tl.arange(0, x.shape[0]) == place, grad - hit_weight, grad) * dloss
    if SOFTCAP:
        ratio = s / softcap
        grad *= 1.0 - ratio * ratio
    return grad


@triton.jit
def _grad_block(
    logits_ptr, grad_ptr, start, target, lse, dloss, num_cols, hit_weight, share, double_z, softcap, double_inverse,
    COMPUTE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    """The gradient of BLOCK_COL columns of a row from column `start` on; `target` counts from the row's first."""
    cols = tl.arange(0, BLOCK_COL)
    growth = 1.0 + double_z * lse
    place = target - start  # int64
    in_ptr = logits_ptr + start + cols
    out_ptr = grad_ptr + start + cols
    element = grad_ptr.dtype.element_ty
    if start + BLOCK_COL <= num_cols:
        x = tl.load(in_ptr).to(COMPUTE)  # [BLOCK_COL]
        grad = _slope(x, place, lse, dloss, growth, hit_weight, share, softcap, double_inverse, SOFTCAP)
        tl.store(out_ptr, grad.to(element))
    else:
        live = start + cols < num_cols
        x = tl.load(in_ptr, mask=live, other=0.0).to(COMPUTE)
        grad = _slope(x, place, lse, dloss, growth, hit_weight, share, softcap, double_inverse, SOFTCAP)
        tl.store(out_ptr, grad.to(element), mask=live)


@triton.jit
def _token_share(dloss_ptr, divisor_ptr, target, ignore_index, GIVEN: tl.constexpr):
    """A token's part in the gradient of the reduced loss, which is the number at `dloss_ptr`, or 1."""
    dloss = tl.load(divisor_ptr)
    if GIVEN:
        dloss = divide(tl.load(dloss_ptr), dloss)
    else:
        dloss = divide(tl.full([], 1.0, dloss.dtype), dloss)
    return tl.where(target == ignore_index, 0.0, dloss)


@triton.jit
def _loss_grad(
    logits_ptr, grad_ptr, target_ptr, lse_ptr, dloss_ptr, divisor_ptr, stride_logits_row, stride_grad_row, num_cols,
    num_blocks, vocab_start, ignore_index, hit_weight, share, double_z, softcap, double_inverse,
    COMPUTE: tl.constexpr, REDUCED: tl.constexpr, GIVEN: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_COL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // num_blocks).to(tl.int64)
    lse = tl.load(lse_ptr + row)
    target = tl.load(target_ptr + row)
    if REDUCED:
        dloss = _token_share(dloss_ptr, divisor_ptr, target, ignore_index, GIVEN)
    else:
        dloss = tl.load(dloss_ptr + row)
    _grad_block(
        logits_ptr + row * stride_logits_row, grad_ptr + row * stride_grad_row, program % num_blocks * BLOCK_COL,
        target - vocab_start, lse, dloss, num_cols, hit_weight, share, double_z, softcap, double_inverse,
        COMPUTE, SOFTCAP, BLOCK_COL,
    )  # fmt: skip


def stats_launch(
    logits: torch.Tensor, target: torch.Tensor, vocab_start: int, softcap: float, stats: torch.Tensor
) -> Launch:
    """stats [4, n] (unit stride in n) is the output: max, sum of exp(s - max), target's s or 0, sum of s."""
    rows = rows_of(logits)
    num_rows, num_cols = rows.shape
    arguments = (
        rows, target.contiguous(), stats, rows.stride(0), stats.stride(0), num_cols, vocab_start,
        softcap, 2.0 / (softcap or 1.0),
    )  # fmt: skip
    constants = {
        "COMPUTE": triton_dtype(logits.dtype),
        "SOFTCAP": softcap > 0.0,
        "BLOCK_COL": min(_STATS_BLOCK, next_power_of_two(num_cols)),
    }
    return Launch(_loss_stats, (num_rows,), arguments, constants, _STATS_WARPS)


def token_loss_launch(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, vocab_start: int, num_classes: int,
    label_smoothing: float, z_loss: float, softcap: float, lse: torch.Tensor, loss: torch.Tensor,
) -> Launch:  # fmt: skip
    """lse and loss [n], contiguous, are the outputs, of all classes that there are logits of."""
    rows = rows_of(logits)
    num_rows, num_cols = rows.shape
    arguments = (
        rows, target.contiguous(), lse, loss, rows.stride(0), num_cols, vocab_start, ignore_index,
        1.0 - label_smoothing, label_smoothing / num_classes, z_loss, softcap, 2.0 / (softcap or 1.0),
    )  # fmt: skip
    constants = {
        "COMPUTE": triton_dtype(logits.dtype),
        "SMOOTHED": label_smoothing != 0.0,
        "SQUARED": z_loss != 0.0,
        "SOFTCAP": softcap > 0.0,
        "BLOCK_COL": min(_STATS_BLOCK, next_power_of_two(num_cols)),
    }
    return Launch(_token_loss, (num_rows,), arguments, constants, _STATS_WARPS)


def add_launch(
    loss: torch.Tensor, target: torch.Tensor, ignore_index: int, mean: bool, value: torch.Tensor,
    divisor: torch.Tensor,
) -> Launch:  # fmt: skip
    """The sum of loss [n] into 0-dim value, divided by the tokens that count where `mean`; by what, into divisor."""
    constants = {"MEAN": mean, "BLOCK": min(_SUM_BLOCK, next_power_of_two(loss.numel()))}
    arguments = (loss, target.contiguous(), value, divisor, loss.numel(), ignore_index)
    return Launch(_add_losses, (1,), arguments, constants, _SUM_WARPS if loss.numel() > 1024 else 4)


def grad_launch(
    logits: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, dloss: torch.Tensor | None, vocab_start: int,
    num_classes: int, label_smoothing: float, z_loss: float, softcap: float, grad: torch.Tensor,
    divisor: torch.Tensor | None = None, ignore_index: int = -100,
) -> Launch:  # fmt: skip
    """grad [n, V_local] (unit stride in V_local) is the output; it may be `logits` itself.

    dloss [n] is each token's gradient, 0 where it is ignored; with `divisor`, which `add_launch` gave beside the
    reduced loss, it is that one's, 0-dim (None: 1).
    """
    rows = rows_of(logits)
    num_rows, num_cols = rows.shape
    block = min(_GRAD_BLOCK, next_power_of_two(num_cols))
    num_blocks = triton.cdiv(num_cols, block)
    lse = lse.contiguous()
    arguments = (
        rows, grad, target.contiguous(), lse, lse if dloss is None else dloss.contiguous(),
        lse if divisor is None else divisor, rows.stride(0), grad.stride(0), num_cols, num_blocks, vocab_start,
        ignore_index, 1.0 - label_smoothing, label_smoothing / num_classes, 2.0 * z_loss, softcap,
        2.0 / (softcap or 1.0),
    )  # fmt: skip
    constants = {
        "COMPUTE": triton_dtype(logits.dtype),
        "REDUCED": divisor is not None,
        "GIVEN": dloss is not None,
        "SOFTCAP": softcap > 0.0,
        "BLOCK_COL": block,
    }
    return Launch(_loss_grad, (num_rows * num_blocks,), arguments, constants, _GRAD_WARPS)
