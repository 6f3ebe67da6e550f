"""Launchers of the matmul kernels: the choice between Triton and torch, grids, arguments. No autograd, no checks.

Not the tables (matmul_tables.py). The one idea: a launch takes its numbers and constants from shapes, strides,
dtypes, alignment and switches alone, so that plans.py makes it once for each layout.
"""

import functools
from typing import Any, NamedTuple

import torch

from plait.kernels.activations import dropout_code
from plait.kernels.launch import INTERPRETED, Launch, arch_of, compute_dtype, rows_of, triton_dtype
from plait.kernels.matmul_gated import gated_grad_kernel, swiglu_kernel
from plait.kernels.matmul_tables import MEASURED as MEASURED
from plait.kernels.matmul_tables import MULTIPROCESSORS as MULTIPROCESSORS
from plait.kernels.matmul_tables import TILES as TILES
from plait.kernels.matmul_tables import TRITON_UP_TO as TRITON_UP_TO
from plait.kernels.matmul_tables import Plan as Plan
from plait.kernels.matmul_tables import Tile as Tile
from plait.kernels.matmul_tables import shape_class as shape_class
from plait.kernels.matmul_tables import splits_of as splits_of
from plait.kernels.matmul_triton import finish_kernel, matmul_kernel
from plait.kernels.philox import keep_threshold
from plait.kernels.plans import Site

# Dropout: (rng, p, sample_offset, row_offset, col_offset).
Mask = tuple[torch.Tensor, float, int, int, int]
# What a launch depends on of a tensor: (shape, strides, dtype, whether 16 bytes divide its address).
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]
# Rows and columns of a program of the second stage: 8 elements a thread of 4 warps (derived).
_FINISH_ROWS, _FINISH_COLS = 4, 256


class Epilogue(NamedTuple):
    """What follows the product, in this order; `pre` (contiguous) is written with `keep_pre`, read with a `slope`.

    activation and slope are codes of activations.ACTIVATIONS; mask is (rng, p, sample_offset, row_offset, col_offset)
    of dropout over [B, num_tokens, N]; with `accumulate` out and sums are added to. tf32: None is torch's setting.
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
    tf32: bool | None = None


def _ceil(x: int, y: int) -> int:
    return -(-x // y)  # triton's cdiv costs microseconds on the host


def layout_of(x: torch.Tensor) -> Layout:
    """What `x` tells a launch."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() & 15 == 0


def _kind_of(op: str, a: Layout, b: Layout, arch: int) -> str:
    (num_rows, num_inner), num_cols = a[0], b[0][0]
    if not (_fits(a, 90) and _fits(b, 90)):  # on sm_80 too: 16-byte copies need the same
        return "narrow"
    return shape_class(num_rows, num_cols // 2 if op == "swiglu" else num_cols, num_inner, a[2].itemsize, arch)


def plan(op: str, a: torch.Tensor, b: torch.Tensor, arch: int | None = None) -> Plan:
    """The plan of the tables for a[M, K] and b[N, K]; the gated forms never split."""
    arch = arch_of(a) if arch is None else arch
    kind = _kind_of(op, layout_of(a), layout_of(b), arch)
    tile = MEASURED.get((op, arch, kind)) or TILES.get((op, arch, kind)) or TILES["any", arch, kind]
    gated = op in ("swiglu", "gated_slope")
    return Plan(arch, tile, 1 if gated else splits_of(tile, a.shape[0], b.shape[0], a.shape[1], arch))


def triton_multiplies(
    op: str, a: torch.Tensor, b: torch.Tensor, tf32: bool | None = None, arch: int | None = None
) -> bool:
    """Whether the tables give this product on a card to Triton; the interpreter always does.

    So does another choice of tf32 than torch's own, which only Triton takes per call.
    """
    if INTERPRETED:
        return True
    if a.dtype is torch.float32 and tf32 is not None and tf32 != torch_tf32(a):
        return True
    arch = arch_of(a) if arch is None else arch
    limit = TRITON_UP_TO.get((op, arch), 0)
    return limit > 0 and _within(limit, layout_of(a), layout_of(b), arch)


def _within(limit: int, a: Layout, b: Layout, arch: int) -> bool:
    kind = shape_class(a[0][0], b[0][0], a[0][1], a[2].itemsize, arch)
    if kind == "wide" or (kind == "large" and a[0][1] > limit):
        return False
    # Below "large", launches and traffic bind: one fused launch for two or three. "narrow" is torch's.
    return _fits(a, 90) and _fits(b, 90)


def torch_tf32(x: torch.Tensor) -> bool:
    """Whether torch was told to multiply x's dtype with tf32: what a plan of a product depends on beside layouts."""
    return x.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


def precision(dtype: torch.dtype, tf32: bool | None = None) -> str:
    """How fp32 operands are multiplied: as `tf32` says, else tf32 only where torch was told so."""
    if dtype is not torch.float32:
        return "ieee"
    return "tf32" if (torch.backends.cuda.matmul.fp32_precision == "tf32" if tf32 is None else tf32) else "ieee"


def _inner_first(x: Layout) -> bool:
    """Whether dim 1 is the one of unit stride (where both or neither is, dim 1)."""
    return x[1][1] == 1 or x[1][0] != 1


def fits_descriptor(x: torch.Tensor, arch: int) -> bool:
    """Whether TMA can read or write the matrix x: aligned to 16 bytes, one unit stride, sizes of 31 bits."""
    return _fits(layout_of(x), arch)


def _fits(x: Layout, arch: int) -> bool:
    shape, strides, dtype, aligned = x
    if arch < 90 or not aligned or min(shape) == 0 or max(shape) >= 1 << 31:
        return False
    inner = 1 if _inner_first(x) else 0
    pitch_bytes = strides[1 - inner] * dtype.itemsize
    return (
        strides[inner] == 1 and strides[1 - inner] >= shape[inner] and pitch_bytes % 16 == 0 and pitch_bytes < 1 << 40
    )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    found: int = torch.cuda.get_device_properties(device).multi_processor_count
    return found


def _num_programs(x: torch.Tensor, arch: int, num_jobs: int, site: Site | None) -> int:
    card = site.card if site is not None else x.device if x.is_cuda else None
    return min(num_jobs, MULTIPROCESSORS[arch] if card is None else _multiprocessors(card))


class _Frame(NamedTuple):
    """What all products of one kind share: constants and sizes of both stages, and how many tiles there are."""

    num_jobs: int
    constants: dict[str, Any]
    sizes: tuple[int, ...]
    finish_constants: dict[str, Any]
    finish_sizes: tuple[int, ...]
    finish_grid: tuple[int, int]


# (bias, activation, keep_pre, slope, dropout, the row stride of a residual or None, accumulate, sums)
_Switches = tuple[bool, int, bool, int, int, int | None, bool, bool]


def _frame(a: Layout, b: Layout, out: Layout, chosen: _Switches, how: Plan, precision: str) -> _Frame:
    (num_rows, num_inner), num_cols = a[0], b[0][0]
    tile, num_splits, split = how.tile, how.num_splits, how.num_splits > 1
    tiles_row, tiles_col = _ceil(num_rows, tile.block_row), _ceil(num_cols, tile.block_col)
    bias, activation, keep_pre, slope, dropout, residual, accumulate, sums = chosen
    shared = {
        "COMPUTE": triton_dtype(a[2]),
        "BIAS": bias,
        "ACTIVATION": activation,
        "KEEP_PRE": keep_pre,
        "SLOPE": slope,
        "DROPOUT": dropout,
        "RESIDUAL": residual is not None,
        "ACCUMULATE": accumulate,
        "SUMS": sums,
    }
    descriptors = _fits(a, how.arch) and _fits(b, how.arch)
    constants = shared | {
        "A_INNER": _inner_first(a),
        "B_INNER": _inner_first(b),
        "DESCRIPTORS": descriptors,
        "STORE_DESCRIPTOR": descriptors and not split and _fits(out, how.arch) and out[1][1] == 1,
        "PRECISION": precision,
        "SPLIT": split,
        "PARTS": tile.parts,
        # One loop over tiles and K overlaps a tile's epilogue with the loads of the next; needs a range of K.
        "FLATTEN": descriptors and not split and not sums and num_inner > 0 and not tile.specialized,
        "SPECIALIZED": tile.specialized and descriptors and not sums,
        "BLOCK_ROW": tile.block_row,
        "BLOCK_COL": tile.block_col,
        "BLOCK_INNER": tile.block_inner,
        "GROUP": tile.group,
    }
    strides = (out[1][0], num_cols, num_cols if residual is None else residual)
    steps = _ceil(_ceil(num_inner, tile.block_inner), num_splits)
    return _Frame(
        tiles_row * tiles_col * num_splits,
        constants,
        (num_rows, num_cols, num_inner, *a[1], *b[1], *strides, num_splits, steps),
        shared | {"BLOCK_ROW": _FINISH_ROWS, "BLOCK_COL": _FINISH_COLS},
        (num_rows, num_cols, *strides, num_splits),
        (_ceil(num_rows, _FINISH_ROWS), _ceil(num_cols, _FINISH_COLS)),
    )


def _warps(tile: Tile, constants: dict[str, Any]) -> int:
    """What the tile says; eight that load and compute where it is of groups of warps and the launch is not."""
    return 8 if tile.specialized and not constants["SPECIALIZED"] else tile.num_warps


def _randomness(extra: Epilogue) -> tuple[Any, ...]:
    """(num_tokens, sample_offset, row_offset, col_offset, threshold, keep_scale)."""
    if extra.mask is None:
        return (extra.num_tokens, 0, 0, 0, 0, 1.0)
    _, p, *place = extra.mask
    return (extra.num_tokens, *place, keep_threshold(p), 1.0 / (1.0 - p))


def product_launches(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, extra: Epilogue, how: Plan, site: Site | None = None
) -> list[Launch]:  # fmt: skip
    """out[M, N] (unit stride in N) = epilogue(a[M, K] b[N, K]^T), a and b of any strides: one launch or two.

    `site`: where a plan is built, else a's own device.
    """
    of_a, of_b, of_out = layout_of(a), layout_of(b), layout_of(out)
    assert of_out[1][1] == 1 or of_out[0][1] == 1, f"out has strides {of_out[1]}"
    bias, activation, keep_pre, slope, pre, mask, _, residual, accumulate, sums, tf32 = extra
    none = a  # stands for a tensor that a switch leaves unread
    if residual is not None:
        residual = rows_of(residual)
    chosen = (
        bias is not None, activation, keep_pre, slope, dropout_code(mask),
        None if residual is None else residual.stride(0), accumulate, sums is not None,
    )  # fmt: skip
    frame = _frame(of_a, of_b, of_out, chosen, how, precision(of_a[2], tf32))
    tensors = (
        none if bias is None else bias.contiguous(), none if pre is None else pre,
        none if residual is None else residual, none if mask is None else mask[0],
    )  # fmt: skip
    random = _randomness(extra)
    target, target_sums = out, none if sums is None else sums
    if how.num_splits > 1:
        dtype, shape = compute_dtype(of_a[2]), (how.num_splits, *of_out[0])
        here = Site(a.device, None) if site is None else site
        target = here.empty(shape, dtype)
        target_sums = none if sums is None else here.empty(shape[:2], dtype)
    launches = [
        Launch(
            matmul_kernel,
            (_num_programs(a, how.arch, frame.num_jobs, site),),
            (a, b, target, *tensors, target_sums, *frame.sizes, *random),
            frame.constants,
            _warps(how.tile, frame.constants),
            how.tile.num_stages,
        )
    ]
    if how.num_splits > 1:
        last = target if sums is None else sums
        arguments = (target, target_sums, out, *tensors, last, *frame.finish_sizes, *random)
        launches.append(Launch(finish_kernel, frame.finish_grid, arguments, frame.finish_constants))
    return launches


def _gated_frame(a: Layout, b: Layout, out: Layout, num_cols: int, how: Plan) -> tuple[int, dict[str, Any]]:
    """(number of tiles, the constants that the gated kernels share)."""
    tile = how.tile
    descriptors = _fits(a, how.arch) and _fits(b, how.arch)
    # Where the rows are the contiguous dim, the second half begins F elements into it: a multiple of 16 bytes.
    whole = num_cols * b[2].itemsize % 16 == 0
    constants = {
        "DESCRIPTORS": descriptors and (_inner_first(b) or whole),
        "STORE_DESCRIPTOR": descriptors and (_inner_first(b) or whole) and _fits(out, how.arch),
        "COMPUTE": triton_dtype(a[2]),
        "SPECIALIZED": tile.specialized and descriptors and (_inner_first(b) or whole),
        "BLOCK_ROW": tile.block_row,
        "BLOCK_COL": tile.block_col,
        "BLOCK_INNER": tile.block_inner,
        "GROUP": tile.group,
    }
    return _ceil(a[0][0], tile.block_row) * _ceil(num_cols, tile.block_col), constants


def swiglu_launch(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, gate_up: torch.Tensor | None, how: Plan,
    tf32: bool | None = None, site: Site | None = None,
) -> Launch:  # fmt: skip
    """out[M, F] and, if given, gate_up[M, 2F], both contiguous, from x[M, K] and weight[2F, K] of any strides."""
    of_x, of_weight = layout_of(x), layout_of(weight)
    num_cols, tile = out.shape[1], how.tile
    num_jobs, shared = _gated_frame(of_x, of_weight, layout_of(out), num_cols, how)
    constants = {
        **shared,
        "X_INNER": _inner_first(of_x),
        "WEIGHT_INNER": _inner_first(of_weight),
        "PRECISION": precision(of_x[2], tf32),
        "KEEP_PRE": gate_up is not None,
    }
    arguments = (
        x, weight, out, out if gate_up is None else gate_up, *of_x[0][:1], num_cols, of_x[0][1], *of_x[1],
        *of_weight[1],
    )  # fmt: skip
    grid = (_num_programs(x, how.arch, num_jobs, site),)
    return Launch(swiglu_kernel, grid, arguments, constants, _warps(tile, constants), tile.num_stages)


def gated_grad_launch(
    dout: torch.Tensor, weight: torch.Tensor, gate_up: torch.Tensor, form: int, grad: torch.Tensor,
    hidden: torch.Tensor | None, how: Plan, tf32: bool | None = None, site: Site | None = None,
) -> Launch:  # fmt: skip
    """grad[M, 2F] and, if given, hidden[M, F] (all contiguous) from dout[M, K], weight[F, K] and gate_up[M, 2F].

    form is a code of gated.FORMS. What is not stored is the product, the gradient of hidden.
    """
    of_dout, of_weight = layout_of(dout), layout_of(weight)
    num_cols, tile = of_weight[0][0], how.tile
    num_jobs, shared = _gated_frame(of_dout, of_weight, layout_of(grad), num_cols, how)
    constants = {
        **shared,
        "DOUT_INNER": _inner_first(of_dout),
        "WEIGHT_INNER": _inner_first(of_weight),
        "PRECISION": precision(of_dout[2], tf32),
        "FORM": form,
        "KEEP_HIDDEN": hidden is not None,
        "PARTS": tile.parts,
    }
    del constants["STORE_DESCRIPTOR"]
    arguments = (
        dout, weight, gate_up, grad, grad if hidden is None else hidden, *of_dout[0][:1], num_cols, of_dout[0][1],
        *of_dout[1], *of_weight[1],
    )  # fmt: skip
    grid = (_num_programs(dout, how.arch, num_jobs, site),)
    return Launch(gated_grad_kernel, grid, arguments, constants, _warps(tile, constants), tile.num_stages)
