"""Tables of the matmul kernels: tiles, classes of shapes, splits of K, and who multiplies. Launches nothing.

The tables are data, keyed by (op, arch, shape class). Every row here is DERIVED (shared memory, registers and waves,
and a compile without spills for its arch); none was timed on a card, and a measured row goes before any of them.
Nothing depends on the card within an arch, so that ranks agree.
"""

import functools
from typing import NamedTuple

from plait.kernels.measured import measured


class Tile(NamedTuple):
    """Block sizes in M, N and K, warps and stages, parts of the epilogue, and the height of a group of tiles."""

    block_row: int
    block_col: int
    block_inner: int
    num_warps: int
    num_stages: int
    parts: int = 1
    group: int = 8
    # By TMA: the compiler makes a group of warps that loads, on sm_90 (4 warps here) two that compute half of the
    # rows each, on sm_100 (8 warps) one that multiplies and these for the epilogue, beside the next tile's product.
    # It takes one loop over tiles and one over K (triton 3.9). Candidates of the tuner: nobody has timed them.
    specialized: bool = False


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
    ("dropout", 80, "large"): Tile(128, 128, 32, 8, 4, 4),
    ("dropout", 80, "deep"): Tile(128, 128, 32, 8, 4, 4),
    ("swiglu", 80, "large"): Tile(128, 64, 32, 8, 4),
    ("swiglu", 80, "deep"): Tile(128, 64, 32, 8, 4),
    ("gated_slope", 80, "large"): Tile(128, 128, 32, 8, 4, 4),
    ("gated_slope", 80, "deep"): Tile(128, 128, 32, 8, 4, 4),
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
    ("gated_slope", 90, "large"): Tile(128, 128, 64, 8, 4, 4),
    ("gated_slope", 90, "deep"): Tile(128, 128, 64, 8, 4, 4),
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
    ("gated_slope", 100, "large"): Tile(128, 256, 64, 8, 4, 4),
    ("gated_slope", 100, "deep"): Tile(128, 128, 64, 8, 4, 4),
}
# The rows timed on a card; a copy of none of the above.
MEASURED = measured("linear", Tile)
# Multiprocessors of A100, H100/H200, B200: where the card is not at hand, and for shape classes and splits, which
# must be the same on every card of an arch.
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}
# K is split into parts of at least this many blocks (derived: a pipeline of 4 stages fills and drains in 8).
_MIN_STEPS = 8
_MAX_SPLITS = 16
# M or N up to which a tile of 16 serves: above, tiles of 64 waste less than they reread (derived).
_FEW = 32
# (op, arch) -> the largest K for which Triton multiplies large 16-bit shapes on a card; above it, and where there is
# no row, torch (cuBLAS) does, with the epilogue in passes of its own. Derived: an epilogue saves b bytes of traffic
# per output, b / bandwidth seconds; a Triton product is taken to be 10 % slower than cuBLAS, 0.2 K / rate seconds per
# output. b: 4 (epilogue, dropout), 6 (swiglu: gate and up read, out not read again), 4 (slope; gated_slope: the
# product is neither written nor read), 8 (wgrad into fp32).
# Rates 270, 700, 1500 TFLOP/s and 1.7, 4.0, 7.0 TB/s.
TRITON_UP_TO: dict[tuple[str, int], int] = {
    ("epilogue", 80): 3072,
    ("dropout", 80): 3072,
    ("swiglu", 80): 4608,
    ("slope", 80): 3072,
    ("gated_slope", 80): 3072,
    ("wgrad_wide", 80): 6144,
    ("epilogue", 90): 3584,
    ("dropout", 90): 3584,
    ("swiglu", 90): 5120,
    ("slope", 90): 3584,
    ("gated_slope", 90): 3584,
    ("wgrad_wide", 90): 7168,
    ("epilogue", 100): 4096,
    ("dropout", 100): 4096,
    ("swiglu", 100): 6144,
    ("slope", 100): 4096,
    ("gated_slope", 100): 4096,
    ("wgrad_wide", 100): 8192,
}


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
    # A tile of 128 would be half empty, and a deep K is split whatever the tile.
    half = min(num_rows, num_cols) <= 64
    return "small" if half or num_inner < 2 * _MIN_STEPS * 64 else "deep"


@functools.lru_cache(1024)
def splits_of(tile: Tile, num_rows: int, num_cols: int, num_inner: int, arch: int) -> int:
    """Parts of K: as many as fill the card once, none empty, none under _MIN_STEPS blocks (half for tiles of 16)."""
    num_tiles = _ceil(num_rows, tile.block_row) * _ceil(num_cols, tile.block_col)
    steps = _ceil(num_inner, tile.block_inner)
    # Few rows or columns wait for memory, not for a pipeline: more programs keep more loads in flight.
    least = _MIN_STEPS // 2 if min(tile.block_row, tile.block_col) <= 16 else _MIN_STEPS
    wanted = max(1, min(MULTIPROCESSORS[arch] // max(1, num_tiles), steps // least, _MAX_SPLITS))
    return max(1, _ceil(steps, _ceil(steps, wanted))) if steps else 1


class Waves(NamedTuple):
    """How a product meets the card: jobs, rounds of them, and the share of the rounds' places that have a job."""

    jobs: int
    rounds: int
    filled: float


def waves(
    num_rows: int, num_cols: int, num_inner: int, arch: int, element_bytes: int = 2, op: str = "linear"
) -> Waves:
    """The waves of a[M, K] b[N, K]^T by the tables, both with rows of 16 bytes; one program a multiprocessor."""
    kind = shape_class(num_rows, num_cols, num_inner, element_bytes, arch)
    tile = MEASURED.get((op, arch, kind)) or TILES.get((op, arch, kind)) or TILES["any", arch, kind]
    jobs = _ceil(num_rows, tile.block_row) * _ceil(num_cols, tile.block_col)
    jobs *= splits_of(tile, num_rows, num_cols, num_inner, arch)
    rounds = _ceil(jobs, MULTIPROCESSORS[arch])
    return Waves(jobs, rounds, jobs / max(1, rounds * MULTIPROCESSORS[arch]))
