"""Activations of linear's epilogue in torch and Triton, and one pass for their gradient, dropout's and the bias's.

gelu x Phi(x), gelu_tanh (the tanh form), silu x sigmoid(x), relu2 max(x, 0)^2. NaN passes through, as in torch. The
pass over rows reads dout and pre once and writes dpre once: 3 accesses per element; its column sums are added in two
stages of fixed order (rows of a program, then programs), so that runs agree bit for bit.
"""

import torch
import triton
import triton.language as tl

from plait.kernels.column_sums import sum_launch
from plait.kernels.launch import Launch, compute_dtype, next_power_of_two, rows_of, triton_dtype
from plait.kernels.philox import keep_threshold, philox_keep, philox_keep_any, philox_load_key
from plait.kernels.plans import Built, Site, planned

_functional = torch.nn.functional
# The position is the code that the registered ops and the kernels carry.
ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu", "relu2")
# A program's block: 8 elements a thread of 4 warps, one 16-byte access in 16-bit (derived).
_BLOCK_ROW, _BLOCK_COL = 4, 256
# Programs along the rows, each with one partial column sum: with 4,096 columns 8 for each of 132 multiprocessors
# (derived).
_NUM_PARTIALS = 64


def activate(x: torch.Tensor, code: int) -> torch.Tensor:
    """The activation of number `code` on an fp32 or fp64 tensor; `x` itself for 0."""
    if code == 0:
        return x
    if code == 1:
        return _functional.gelu(x)
    if code == 2:
        return _functional.gelu(x, approximate="tanh")
    if code == 3:
        return _functional.silu(x)
    return x.relu().square()


def activation_grad(dout: torch.Tensor, pre: torch.Tensor, code: int) -> torch.Tensor:
    """dout * activation'(pre) in dout's dtype, in plain torch; arithmetic in the compute dtype."""
    dtype = compute_dtype(pre.dtype)
    wide, x = dout.to(dtype), pre.to(dtype)
    if code == 0:
        grad = wide
    elif code == 1:
        grad = torch.ops.aten.gelu_backward(wide, x)
    elif code == 2:
        grad = torch.ops.aten.gelu_backward(wide, x, approximate="tanh")
    elif code == 3:
        grad = torch.ops.aten.silu_backward(wide, x)
    else:
        grad = wide * x.relu().mul_(2.0)
    return grad.to(dout.dtype)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-x * 1.4426950408889634))


@triton.jit
def _tanh(x):
    # Exact at both ends; 2 log2 e is folded into exp2.
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)


@triton.jit
def activated(x, CODE: tl.constexpr):
    """The activation on a block in fp32 or fp64."""
    if CODE == 1:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif CODE == 2:
        return 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif CODE == 3:
        return x * sigmoid(x)
    elif CODE == 4:
        positive = tl.where(x < 0.0, 0.0, x)
        return positive * positive
    else:
        return x


@triton.jit
def slope(x, CODE: tl.constexpr):
    """activation'(x) on a block in fp32 or fp64."""
    if CODE == 1:
        density = 0.3989422804014327 * tl.exp2(-0.7213475204444817 * x * x)
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density
    elif CODE == 2:
        square = x * x
        t = _tanh(0.7978845608028654 * (x + 0.044715 * x * square))
        return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 0.134145 * square)
    elif CODE == 3:
        s = sigmoid(x)
        return s + x * s * (1.0 - s)
    else:
        return 2.0 * tl.where(x < 0.0, 0.0, x)


@triton.jit
def keep_rows(
    rng_ptr, first_row, first_col, num_tokens, sample_offset, row_offset, col_offset, threshold,
    DROPOUT: tl.constexpr, BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    """bool [BLOCK_ROW, BLOCK_COL]: what dropout keeps of a tile of [B * T, D]; DROPOUT is `dropout_code`'s."""
    key_low, key_high = philox_load_key(rng_ptr)
    rows = first_row + tl.arange(0, BLOCK_ROW)
    samples = (sample_offset + rows // num_tokens)[:, None]
    head = tl.full((), 0, tl.int32)
    tokens = row_offset + rows % num_tokens
    col = first_col + col_offset
    if DROPOUT == 1:
        return philox_keep(key_low, key_high, samples, head, tokens, col, threshold, BLOCK_COL)
    else:
        return philox_keep_any(key_low, key_high, samples, head, tokens, col, threshold, BLOCK_COL)


@triton.jit
def _activation_backward(
    dout_ptr, pre_ptr, rng_ptr, dpre_ptr, partial_ptr, stride_dout_row, stride_pre_row, num_rows, num_cols,
    rows_per_program, num_tokens, sample_offset, row_offset, col_offset, threshold, keep_scale,
    CODE: tl.constexpr, DROPOUT: tl.constexpr, SUMS: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first_col = tl.program_id(1) * BLOCK_COL
    cols = first_col + tl.arange(0, BLOCK_COL)
    total = tl.zeros([BLOCK_ROW, BLOCK_COL], COMPUTE)
    first = program * rows_per_program
    for first_row in range(first, tl.minimum(first + rows_per_program, num_rows), BLOCK_ROW):
        rows = (first_row + tl.arange(0, BLOCK_ROW)).to(tl.int64)
        mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
        grad = tl.load(dout_ptr + rows[:, None] * stride_dout_row + cols[None, :], mask=mask, other=0.0).to(COMPUTE)
        if DROPOUT:
            keep = keep_rows(
                rng_ptr, first_row, first_col, num_tokens, sample_offset, row_offset, col_offset, threshold,
                DROPOUT, BLOCK_ROW, BLOCK_COL,
            )  # fmt: skip
            grad = tl.where(keep, grad * keep_scale, 0.0)
        if CODE != 0:
            pre = tl.load(pre_ptr + rows[:, None] * stride_pre_row + cols[None, :], mask=mask, other=0.0).to(COMPUTE)
            grad *= slope(pre, CODE)
        rounded = grad.to(dpre_ptr.dtype.element_ty)
        tl.store(dpre_ptr + rows[:, None] * num_cols + cols[None, :], rounded, mask=mask)
        if SUMS:
            total += tl.where(mask, rounded.to(COMPUTE), 0.0)
    if SUMS:
        out_ptr = partial_ptr + program.to(tl.int64) * num_cols
        tl.store(out_ptr + cols, tl.sum(total, 0), mask=cols < num_cols)


def backward_launch(
    dout: torch.Tensor, pre: torch.Tensor | None, code: int, mask: tuple[torch.Tensor, float, int, int, int] | None,
    dpre: torch.Tensor, partial: torch.Tensor | None,
) -> Launch:  # fmt: skip
    """dpre (contiguous, dout's shape) = dout * dropout * activation'(pre); partial [programs, N]: its column sums.

    `mask` is (rng, p, sample_offset, row_offset, col_offset) of dropout over dout[B, T, N].
    """
    rows = rows_of(dout)
    extra = rows if pre is None else rows_of(pre)
    num_rows, num_cols = rows.shape
    programs = row_programs(num_rows) if partial is None else partial.shape[0]
    share = _share(num_rows, programs)
    rng, p, *place = (rows, 0.0, 0, 0, 0) if mask is None else mask
    arguments = (
        rows, extra, rng, dpre, dpre if partial is None else partial, rows.stride(0), extra.stride(0),
        num_rows, num_cols, share, dout.shape[-2] if dout.dim() > 1 else 1, *place, keep_threshold(p),
        1.0 / (1.0 - p),
    )  # fmt: skip
    constants = {
        "CODE": code,
        "DROPOUT": dropout_code(mask),
        "SUMS": partial is not None,
        "COMPUTE": triton_dtype(dout.dtype),
        "BLOCK_ROW": _BLOCK_ROW,
        "BLOCK_COL": max(16, min(_BLOCK_COL, next_power_of_two(num_cols))),
    }
    return Launch(_activation_backward, (programs, -(-num_cols // constants["BLOCK_COL"])), arguments, constants)


def dropout_code(mask: tuple[torch.Tensor, float, int, int, int] | None) -> int:
    """0: no dropout; 1: its first column begins a group of the generator's four; 2: it begins anywhere."""
    return 0 if mask is None else 1 if mask[4] % 4 == 0 else 2


def row_programs(num_rows: int) -> int:
    """Programs along the rows, each of which has rows of its own."""
    return -(-num_rows // _share(num_rows, _NUM_PARTIALS))


def _share(num_rows: int, programs: int) -> int:
    """Rows of each of at most `programs`, whole blocks."""
    return -(-num_rows // (programs * _BLOCK_ROW)) * _BLOCK_ROW


def build_backward(
    site: Site, dout: torch.Tensor, pre: torch.Tensor | None, rng: torch.Tensor | None, code: int, p: float,
    sample_offset: int, row_offset: int, col_offset: int, want_sums: bool,
) -> Built:  # fmt: skip
    """Results (dpre, its column sums; without `want_sums` or rows nothing is launched for them)."""
    num_cols, dpre = dout.shape[-1], site.empty(dout.shape, dout.dtype)
    if not dout.numel():
        return Built((dpre, site.full((num_cols if want_sums else 0,), dout.dtype, 0.0)))
    mask = None if rng is None else (rng.contiguous(), p, sample_offset, row_offset, col_offset)
    total = site.empty((num_cols if want_sums else 0,), dout.dtype)
    if not want_sums:
        return Built((dpre, total), [backward_launch(dout, pre, code, mask, dpre, None)])
    partial = site.empty((row_programs(dout.numel() // num_cols), num_cols), compute_dtype(dout.dtype))
    launches = [backward_launch(dout, pre, code, mask, dpre, partial), sum_launch(partial, total)]
    return Built((dpre, total), launches)


def launch_backward(
    dout: torch.Tensor, pre: torch.Tensor | None, code: int,
    mask: tuple[torch.Tensor, float, int, int, int] | None, want_sums: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dpre, its column sums or empty), both in dout's dtype, by Triton."""
    rng, *place = (None, 0.0, 0, 0, 0) if mask is None else mask
    found: tuple[torch.Tensor, torch.Tensor] = planned(build_backward, (dout, pre, rng), code, *place, want_sums)
    return found
