"""Launchers of the matmul kernels: tile tables, the choice between Triton and torch, grids. No autograd, no checks.

The tables are data, keyed by (op, arch, shape class). Every row here is DERIVED (shared memory, registers and waves,
and a compile without spills for its arch); none was timed on a card. A timed row of measured.py goes before it.
Nothing depends on the card within an arch but the number of programs, which no result depends on: ranks agree.
"""

import functools
from typing import Any, NamedTuple

import torch

from plait.kernels.launch import INTERPRETED, Launch, arch_of, compute_dtype, rows_of, run_launches, triton_dtype
from plait.kernels.matmul_triton import finish_kernel, matmul_kernel, swiglu_kernel
from plait.kernels.measured import measured
from plait.kernels.philox import keep_threshold

# Dropout: (rng, p, sample_offset, row_offset, col_offset).
Mask = tuple[torch.Tensor, float, int, int, int]


class Tile(NamedTuple):
    """Block sizes in M, N and K, warps and stages, parts of the epilogue, and the height of a group of tiles."""

    block_row: int
    block_col: int
    block_inner: int
    num_warps: int
    num_stages: int
    parts: int = 1
    group: int = 8


# (op or "any", arch, shape class) -> tile. sm_80: 164 KiB of shared memory, operands by cp.async, 8 warps at most
# 128x128; sm_90 and sm_100: 227 KiB, TMA. "wide" is fp32 and fp64; "narrow" has an operand without 16-byte rows, read
# a few bytes at a time by pointers of 64 bits, which take the registers.
TILES: dict[tuple[str, int, str], Tile] = {
    ("any", 80, "large"): Tile(128, 128, 32, 8, 4, 2),
    ("any", 80, "deep"): Tile(128, 128, 32, 8, 4, 2),
    ("any", 80, "small"): Tile(64, 64, 64, 4, 4),
    ("any", 80, "few_rows"): Tile(16, 128, 64, 4, 4),
    ("any", 80, "few_cols"): Tile(128, 16, 64, 4, 4),
    ("any", 80, "wide"): Tile(64, 64, 32, 8, 3),
    ("any", 80, "narrow"): Tile(64, 64, 32, 8, 2, 4),
    ("swiglu", 80, "narrow"): Tile(64, 32, 32, 8, 2),
    ("swiglu", 80, "large"): Tile(128, 64, 32, 8, 4),
    ("swiglu", 80, "deep"): Tile(128, 64, 32, 8, 4),
    ("any", 90, "large"): Tile(128, 256, 64, 8, 4, 4),
    ("any", 90, "deep"): Tile(128, 128, 64, 8, 4, 2),
    ("any", 90, "small"): Tile(64, 64, 64, 4, 4),
    ("any", 90, "few_rows"): Tile(16, 128, 64, 4, 4),
    ("any", 90, "few_cols"): Tile(128, 16, 64, 4, 4),
    ("any", 90, "wide"): Tile(64, 64, 32, 8, 3),
    ("any", 90, "narrow"): Tile(64, 64, 32, 8, 2, 4),
    ("swiglu", 90, "narrow"): Tile(64, 32, 32, 8, 2),
    ("dropout", 90, "large"): Tile(128, 128, 64, 8, 4, 4),
    ("wgrad_wide", 90, "large"): Tile(128, 128, 64, 8, 4, 2),
    ("swiglu", 90, "large"): Tile(128, 128, 64, 8, 3),
    ("swiglu", 90, "deep"): Tile(128, 128, 64, 8, 3),
    ("any", 100, "large"): Tile(128, 256, 64, 8, 4, 4),
    ("any", 100, "deep"): Tile(128, 128, 64, 8, 4, 2),
    ("any", 100, "small"): Tile(128, 64, 64, 4, 4),
    ("any", 100, "few_rows"): Tile(16, 128, 64, 4, 4),
    ("any", 100, "few_cols"): Tile(128, 16, 64, 4, 4),
    ("any", 100, "wide"): Tile(64, 64, 32, 8, 3),
    ("any", 100, "narrow"): Tile(64, 64, 32, 8, 2, 4),
    ("swiglu", 100, "narrow"): Tile(64, 32, 32, 8, 2),
    ("dropout", 100, "large"): Tile(128, 128, 64, 8, 4, 4),
    ("wgrad_wide", 100, "large"): Tile(128, 128, 64, 8, 4, 2),
    ("swiglu", 100, "large"): Tile(128, 128, 64, 8, 3),
    ("swiglu", 100, "deep"): Tile(128, 128, 64, 8, 3),
}
MEASURED = measured("linear", Tile)
# Multiprocessors of A100, H100/H200, B200: where the card is not at hand, and for shape classes and splits, which
# must be the same on every card of an arch.
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}
# K is split into parts of at least this many blocks (derived: a pipeline of 4 stages fills and drains in 8).
_MIN_STEPS = 8
_MAX_SPLITS = 16
# M or N up to which a tile of 16 serves: above, tiles of 64 waste less than they reread (derived).
_FEW = 32
# Rows and columns of a program of the second stage: 8 elements a thread of 4 warps (derived).
_FINISH_ROWS, _FINISH_COLS = 4, 256

# (op, arch) -> the largest K for which Triton multiplies large 16-bit shapes on a card; above it, and where there is
# no row, torch (cuBLAS) does, with the epilogue in passes of its own. Derived: an epilogue saves b bytes of traffic
# per output, b / bandwidth seconds; a Triton product is taken to be 10 % slower than cuBLAS, 0.2 K / rate seconds per
# output. b: 4 (epilogue, dropout), 6 (swiglu: gate and up read, out not read again), 4 (slope), 8 (wgrad into fp32).
# Rates 270, 700, 1500 TFLOP/s and 1.7, 4.0, 7.0 TB/s.
TRITON_UP_TO: dict[tuple[str, int], int] = {
    ("epilogue", 80): 3072,
    ("dropout", 80): 3072,
    ("swiglu", 80): 4608,
    ("slope", 80): 3072,
    ("wgrad_wide", 80): 6144,
    ("epilogue", 90): 3584,
    ("dropout", 90): 3584,
    ("swiglu", 90): 5120,
    ("slope", 90): 3584,
    ("wgrad_wide", 90): 7168,
    ("epilogue", 100): 4096,
    ("dropout", 100): 4096,
    ("swiglu", 100): 6144,
    ("slope", 100): 4096,
    ("wgrad_wide", 100): 8192,
}


class Epilogue(NamedTuple):
    """What follows the product, in this order; `pre` is written with `keep_pre`, read with a `slope`.

    activation and slope are codes of activations.ACTIVATIONS; mask is (rng, p, sample_offset, row_offset, col_offset)
    of dropout over [B, num_tokens, N] with col_offset a multiple of 4; with `accumulate` out and sums are added to.
    """

    bias: torch.Tensor | None = None
    activation: int = 0
    keep_pre: bool = False
    slope: int = 0
    pre: torch.Tensor | None = None
    mask: Mask | None = None
    num_tokens: int = 1
    residual: torch.Tensor | None = None
    accumulate: bool = False
    sums: torch.Tensor | None = None  # [M], the sums of a's rows


class Plan(NamedTuple):
    """How one product is launched."""

    arch: int
    tile: Tile
    num_splits: int


def _ceil(x: int, y: int) -> int:
    return -(-x // y)  # triton's cdiv costs microseconds on the host


@functools.lru_cache(1024)
def shape_class(num_rows: int, num_cols: int, num_inner: int, element_bytes: int, arch: int) -> str:
    """The class of a product: see TILES."""
    if element_bytes > 2:
        return "wide"
    if num_rows <= _FEW:
        return "few_rows"
    if num_cols <= _FEW:
        return "few_cols"
    if _ceil(num_rows, 128) * _ceil(num_cols, 128) >= MULTIPROCESSORS[arch]:
        return "large"
    return "deep" if num_inner >= 2 * _MIN_STEPS * 64 else "small"


@functools.lru_cache(1024)
def splits_of(tile: Tile, num_rows: int, num_cols: int, num_inner: int, arch: int) -> int:
    """Parts of K: as many as fill the card once, a power of two, none shorter than _MIN_STEPS blocks."""
    num_tiles = _ceil(num_rows, tile.block_row) * _ceil(num_cols, tile.block_col)
    steps = _ceil(num_inner, tile.block_inner)
    wanted = min(MULTIPROCESSORS[arch] // max(1, num_tiles), steps // _MIN_STEPS, _MAX_SPLITS)
    return 1 << max(0, wanted.bit_length() - 1)


def plan(op: str, a: torch.Tensor, b: torch.Tensor, arch: int | None = None) -> Plan:
    """The plan of the tables for a[M, K] and b[N, K]; swiglu never splits."""
    arch = arch_of(a) if arch is None else arch
    num_rows, num_inner = a.shape
    num_cols = b.shape[0] // 2 if op == "swiglu" else b.shape[0]
    kind = shape_class(num_rows, num_cols, num_inner, a.element_size(), arch)
    if not (fits_descriptor(a, 90) and fits_descriptor(b, 90)):  # on sm_80 too: 16-byte copies need the same
        kind = "narrow"
    tile = MEASURED.get((op, arch, kind)) or TILES.get((op, arch, kind)) or TILES["any", arch, kind]
    return Plan(arch, tile, 1 if op == "swiglu" else splits_of(tile, num_rows, num_cols, num_inner, arch))


def triton_multiplies(op: str, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the tables give this product on a card to Triton; the interpreter always does."""
    if INTERPRETED:
        return True
    arch = arch_of(a)
    limit = TRITON_UP_TO.get((op, arch), 0)
    kind = shape_class(a.shape[0], b.shape[0], a.shape[1], a.element_size(), arch)
    if limit == 0 or kind == "wide" or (kind == "large" and a.shape[1] > limit):
        return False
    # Below "large", launches and traffic bind: one fused launch for two or three. "narrow" is torch's.
    return fits_descriptor(a, 90) and fits_descriptor(b, 90)


def precision(dtype: torch.dtype) -> str:
    """How fp32 operands are multiplied: tf32 only where torch was told so."""
    return "tf32" if dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _inner_first(x: torch.Tensor) -> bool:
    """Whether dim 1 of x is the one of unit stride (where both or neither is, dim 1)."""
    return x.stride(1) == 1 or x.stride(0) != 1


def fits_descriptor(x: torch.Tensor, arch: int) -> bool:
    """Whether TMA can read or write the matrix x: aligned to 16 bytes, one unit stride, sizes of 31 bits."""
    if arch < 90 or min(x.shape) == 0 or max(x.shape) >= 1 << 31:
        return False
    inner = 1 if _inner_first(x) else 0
    pitch = x.stride(1 - inner)
    return (
        x.stride(inner) == 1
        and pitch >= x.shape[inner]
        and pitch * x.element_size() % 16 == 0
        and pitch * x.element_size() < 1 << 40
        and (x.is_meta or x.data_ptr() % 16 == 0)
    )


def _num_programs(x: torch.Tensor, arch: int, num_jobs: int) -> int:
    if not x.is_cuda:
        return min(num_jobs, MULTIPROCESSORS[arch])
    return min(num_jobs, torch.cuda.get_device_properties(x.device).multi_processor_count)


def _switches(extra: Epilogue) -> dict[str, Any]:
    return {
        "BIAS": extra.bias is not None,
        "ACTIVATION": extra.activation,
        "KEEP_PRE": extra.keep_pre,
        "SLOPE": extra.slope,
        "DROPOUT": extra.mask is not None,
        "RESIDUAL": extra.residual is not None,
        "ACCUMULATE": extra.accumulate,
        "SUMS": extra.sums is not None,
    }


def _randomness(extra: Epilogue) -> tuple[Any, ...]:
    """(num_tokens, sample_offset, row_offset, col_offset, threshold, keep_scale)."""
    if extra.mask is None:
        return (extra.num_tokens, 0, 0, 0, 0, 1.0)
    _, p, *place = extra.mask
    return (extra.num_tokens, *place, keep_threshold(p), 1.0 / (1.0 - p))


def product_launches(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, extra: Epilogue, how: Plan
) -> list[Launch]:  # fmt: skip
    """out[M, N] (unit stride in N) = epilogue(a[M, K] b[N, K]^T), a and b of any strides: one launch or two."""
    assert out.stride(1) == 1 or out.shape[1] == 1, f"out has strides {out.stride()}"
    num_rows, num_inner = a.shape
    num_cols = b.shape[0]
    tile, num_splits = how.tile, how.num_splits
    num_jobs = _ceil(num_rows, tile.block_row) * _ceil(num_cols, tile.block_col) * num_splits
    steps = _ceil(_ceil(num_inner, tile.block_inner), num_splits)
    split = num_splits > 1
    target, sums = out, extra.sums
    if split:
        dtype = compute_dtype(a.dtype)
        target = torch.empty(num_splits, num_rows, num_cols, dtype=dtype, device=a.device)
        sums = None if sums is None else torch.empty(num_splits, num_rows, dtype=dtype, device=a.device)
    none = a  # stands for a tensor that a switch leaves unread
    residual = none if extra.residual is None else rows_of(extra.residual)
    pre = none if extra.pre is None else extra.pre.view(num_rows, num_cols)
    tensors = (
        none if extra.bias is None else extra.bias.contiguous(), pre, residual,
        none if extra.mask is None else extra.mask[0],
    )  # fmt: skip
    strides = (out.stride(0), pre.stride(0), residual.stride(0))
    shared = _switches(extra) | {"COMPUTE": triton_dtype(a.dtype)}
    descriptors = fits_descriptor(a, how.arch) and fits_descriptor(b, how.arch)
    constants = shared | {
        "A_INNER": _inner_first(a),
        "B_INNER": _inner_first(b),
        "DESCRIPTORS": descriptors,
        "STORE_DESCRIPTOR": descriptors and not split and fits_descriptor(out, how.arch) and out.stride(1) == 1,
        "PRECISION": precision(a.dtype),
        "SPLIT": split,
        "PARTS": tile.parts,
        # One loop over tiles and K overlaps a tile's epilogue with the loads of the next; needs a range of K.
        "FLATTEN": descriptors and not split and extra.sums is None and num_inner > 0,
        "BLOCK_ROW": tile.block_row,
        "BLOCK_COL": tile.block_col,
        "BLOCK_INNER": tile.block_inner,
        "GROUP": tile.group,
    }
    arguments = (
        a, b, target, *tensors, none if sums is None else sums, num_rows, num_cols, num_inner,
        *a.stride(), *b.stride(), *strides, num_splits, steps, *_randomness(extra),
    )  # fmt: skip
    grid = (_num_programs(a, how.arch, num_jobs),)
    launches = [Launch(matmul_kernel, grid, arguments, constants, tile.num_warps, tile.num_stages)]
    if split:
        launches.append(_finish_launch(target, sums, out, tensors, strides, extra, shared))
    return launches


def _finish_launch(
    partial: torch.Tensor, partial_sums: torch.Tensor | None, out: torch.Tensor, tensors: tuple[torch.Tensor, ...],
    strides: tuple[int, ...], extra: Epilogue, shared: dict[str, Any],
) -> Launch:  # fmt: skip
    num_splits, num_rows, num_cols = partial.shape
    arguments = (
        partial, partial if partial_sums is None else partial_sums, out, *tensors,
        partial if extra.sums is None else extra.sums, num_rows, num_cols, *strides, num_splits, *_randomness(extra),
    )  # fmt: skip
    constants = shared | {"BLOCK_ROW": _FINISH_ROWS, "BLOCK_COL": _FINISH_COLS}
    grid = (_ceil(num_rows, _FINISH_ROWS), _ceil(num_cols, _FINISH_COLS))
    return Launch(finish_kernel, grid, arguments, constants)


def swiglu_launch(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, gate_up: torch.Tensor | None, how: Plan
) -> Launch:
    """out[M, F] and, if given, gate_up[M, 2F], both contiguous, from x[M, K] and weight[2F, K] of any strides."""
    num_rows, num_inner = x.shape
    num_cols = out.shape[1]
    tile = how.tile
    num_jobs = _ceil(num_rows, tile.block_row) * _ceil(num_cols, tile.block_col)
    descriptors = fits_descriptor(x, how.arch) and fits_descriptor(weight, how.arch)
    # Where the rows are the contiguous dim, up begins F elements into it, which must be a multiple of 16 bytes.
    descriptors = descriptors and (_inner_first(weight) or num_cols * weight.element_size() % 16 == 0)
    constants = {
        "DESCRIPTORS": descriptors,
        "STORE_DESCRIPTOR": descriptors and fits_descriptor(out, how.arch),
        "X_INNER": _inner_first(x),
        "WEIGHT_INNER": _inner_first(weight),
        "PRECISION": precision(x.dtype),
        "COMPUTE": triton_dtype(x.dtype),
        "KEEP_PRE": gate_up is not None,
        "BLOCK_ROW": tile.block_row,
        "BLOCK_COL": tile.block_col,
        "BLOCK_INNER": tile.block_inner,
        "GROUP": tile.group,
    }
    arguments = (
        x, weight, out, out if gate_up is None else gate_up, num_rows, num_cols, num_inner,
        *x.stride(), *weight.stride(),
    )  # fmt: skip
    grid = (_num_programs(x, how.arch, num_jobs),)
    return Launch(swiglu_kernel, grid, arguments, constants, tile.num_warps, tile.num_stages)


def product(
    op: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, extra: Epilogue, how: Plan | None = None
) -> None:
    """`product_launches` by the tables, run; nothing for an empty out."""
    if out.numel():
        run_launches(product_launches(a, b, out, extra, plan(op, a, b) if how is None else how))
    elif extra.sums is not None and extra.sums.numel():  # no columns: the sums alone
        total = a.to(compute_dtype(a.dtype)).sum(1)
        extra.sums.add_(total) if extra.accumulate else extra.sums.copy_(total)


def swiglu(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, gate_up: torch.Tensor | None) -> None:
    """`swiglu_launch` by the tables, run; nothing for an empty out."""
    if out.numel():
        run_launches([swiglu_launch(x, weight, out, gate_up, plan("swiglu", x, weight))])
