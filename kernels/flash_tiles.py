"""Which tile an attention kernel takes: data by kernel, architecture, head dim and what is switched on.

Not a kernel and no launch. The one idea: a tile is the first of a fixed list, largest first, that the compiler fits
into registers without a spill; tests/test_flash_compile.py holds each row to that. No row was timed on a card. A tile
changes the order of sums, so it depends on nothing that could differ between ranks.
"""

from typing import NamedTuple

import torch

from plait.kernels.attention_plain import Options
from plait.kernels.launch import from_table, next_power_of_two
from plait.kernels.measured import measured


class Tile(NamedTuple):
    """Rows and columns of one step, and how it is launched."""

    block_row: int
    block_col: int
    num_warps: int
    num_stages: int
    descriptors: bool = False  # what the loop walks is read by TMA
    # Forward by TMA on sm_90, with 4 warps: the compiler makes a group of warps that loads and two that compute half
    # of the rows each, at their own pace. It takes one loop, so that every step is masked, and refuses cu_seqlens,
    # sinks and q by pointers (triton 3.9). A candidate of the tuner: nobody has timed it.
    specialized: bool = False


class Choice(NamedTuple):
    """A tile by what is switched on: nothing that costs registers, a window or a softcap, dropout with anything.

    `ragged`: with anything, where the head dim is padded and channels are masked; None is the tile of dropout.
    """

    plain: Tile
    bounded: Tile
    dropout: Tile
    ragged: Tile | None = None


# kernel -> architecture -> (largest padded head dim, tiles), for 16-bit inputs. Derived: compiled offline (triton
# 3.9, bf16, packed documents and sinks on; bounded with window and softcap, dropout with all three; ragged as
# dropout, at head dim 96), 2026-11-29.
TILES: dict[str, dict[int, tuple[tuple[int, Choice], ...]]] = {
    "forward": {
        80: (
            (32, Choice(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(128, 64, 8, 3))),  # bounded 165
            (64, Choice(Tile(128, 64, 4, 3), Tile(128, 64, 8, 3), Tile(128, 64, 8, 3))),  # registers 255, 198, 255
            (128, Choice(Tile(128, 64, 8, 3), Tile(128, 32, 8, 3), Tile(128, 32, 8, 3))),  # registers 220, 192, 255
            (256, Choice(Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), Tile(64, 32, 8, 2))),  # registers 188, 254, 255
        ),
        90: (
            (64, Choice(Tile(128, 64, 4, 3), Tile(128, 64, 8, 3), Tile(128, 64, 8, 3))),  # registers 223, 174, 226
            (128, Choice(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(128, 32, 8, 3))),  # registers 188, 236, 235
            (256, Choice(Tile(128, 32, 8, 2), Tile(128, 32, 8, 2), Tile(64, 32, 8, 2))),  # registers 254, 255, 255
        ),
        100: (
            (64, Choice(Tile(128, 64, 4, 3), Tile(128, 64, 8, 3), Tile(128, 64, 8, 3))),  # registers 246, 191, 211
            (128, Choice(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(128, 32, 8, 3))),  # registers 244, 232, 212
            (256, Choice(Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 32, 8, 2))),  # registers 211, 222, 210
        ),
    },
    "dq": {
        80: (
            (32, Choice(Tile(64, 64, 8, 3), Tile(128, 64, 8, 3), Tile(128, 32, 8, 3))),  # plain 140
            (64, Choice(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(128, 32, 8, 3))),  # registers 182, 218, 248
            # registers 210, 246, 255, 255
            (128, Choice(Tile(128, 32, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 32, 8, 2))),
            (256, Choice(Tile(64, 32, 8, 2), Tile(64, 32, 8, 2), Tile(32, 32, 8, 1))),  # registers 228, 255, 202
        ),
        90: (
            (64, Choice(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(128, 64, 8, 3))),  # registers 128, 179, 241
            (128, Choice(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(64, 32, 8, 2))),  # registers 221, 220, 245
            (256, Choice(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1))),  # registers 162, 160, 166
        ),
        100: (
            (64, Choice(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(128, 32, 8, 3))),  # registers 170, 210, 175
            (128, Choice(Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(128, 32, 8, 2))),  # registers 186, 231, 184
            (256, Choice(Tile(64, 32, 8, 2), Tile(64, 32, 8, 2), Tile(32, 32, 8, 1))),  # registers 110, 142, 170
        ),
    },
    "dkdv": {
        80: (
            (64, Choice(Tile(32, 128, 8, 2), Tile(32, 128, 8, 2), Tile(16, 128, 8, 2))),  # registers 180, 217, 221
            # registers 224, 236, 233, 243
            (128, Choice(Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(32, 64, 8, 2))),
            # registers 255, 255, 199, 164 (head dim 64 and values of 256)
            (256, Choice(Tile(32, 64, 8, 1), Tile(32, 64, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 2))),
        ),
        90: (
            (64, Choice(Tile(64, 128, 8, 2), Tile(64, 128, 8, 2), Tile(32, 128, 8, 2))),  # registers 231, 234, 220
            # registers 238, 254, 251, 244
            (128, Choice(Tile(32, 128, 8, 2), Tile(32, 128, 8, 2), Tile(16, 128, 8, 2), Tile(16, 128, 8, 1))),
            (256, Choice(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1))),  # registers 170, 166, 178
        ),
        100: (
            (64, Choice(Tile(32, 128, 8, 2), Tile(32, 128, 8, 2), Tile(32, 128, 8, 2))),  # registers 199, 217, 255
            (128, Choice(Tile(32, 64, 8, 2), Tile(32, 64, 8, 2), Tile(16, 64, 8, 2))),  # registers 237, 255, 255
            (256, Choice(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1))),  # registers 170, 166, 174
        ),
    },
}
# Where what the loop walks fits TMA descriptors (keys and values; for dk and dv queries and dout) and nothing is
# switched on: larger tiles, since addresses and masks of rows take no registers. That they are faster is not
# measured: nobody has timed them on a card.
DESCRIPTOR_TILES: dict[str, dict[int, tuple[tuple[int, Tile], ...]]] = {
    "forward": {
        90: ((64, Tile(128, 128, 8, 3, True)), (128, Tile(128, 128, 8, 2, True)), (256, Tile(128, 64, 8, 2, True))),
    },
    "dq": {
        90: ((64, Tile(128, 64, 8, 3, True)), (128, Tile(128, 128, 8, 2, True)), (256, Tile(128, 32, 8, 2, True))),
    },
    "dkdv": {
        90: ((64, Tile(64, 128, 8, 2, True)), (128, Tile(32, 128, 8, 2, True)), (256, Tile(32, 32, 8, 1))),
    },
}
# The same over padded channels, with packed documents: 177 registers, where the tile above spills.
RAGGED_DESCRIPTORS = {("dq", 90, 128): Tile(128, 64, 8, 2, True)}
# Keys and values (for dk and dv queries and dout) of the heads that run together, so that they stay in the L2 cache:
# 50 MB on an H200, 40 on an A100 (data sheets); the rest is for what is read and written once.
RESIDENT_BYTES = 32 << 20
# 32-bit and wider operands run on the CUDA cores: head dim -> tile, on every architecture.
WIDE_TILES = ((64, Tile(32, 32, 4, 1)), (256, Tile(16, 16, 4, 1)))
# Warps by (kernel, architecture, padded head dim, dropout), where four of them spill a register or two.
WIDE_WARPS = {
    ("dq", 80, 32, True): 8,
    ("forward", 100, 64, True): 8,
    ("forward", 80, 128, True): 2,
    ("forward", 90, 128, True): 8,
    ("forward", 100, 128, True): 8,
    ("dq", 80, 128, True): 8,
    ("dkdv", 80, 128, False): 2,
    ("dkdv", 80, 128, True): 16,
    ("dkdv", 100, 128, False): 2,
    ("forward", 100, 256, False): 8,
    ("dq", 80, 256, False): 8,
    ("dq", 80, 256, True): 8,
    ("dkdv", 80, 256, True): 8,
    ("dkdv", 90, 256, True): 8,
    ("dkdv", 100, 256, True): 8,
}
# By (kernel, arch, width, class of derived_tile).
MEASURED = measured("attention", Tile)
# Rows of the kernel that makes delta: out and dout are in registers at once (64 rows of 128 spill on sm_100).
DELTA_ROWS = ((64, 64), (128, 32), (256, 16))


def padded(head_dim: int) -> int:
    """The width of a tile that holds `head_dim` channels: a power of two, at least 16, as products need it."""
    return max(16, next_power_of_two(head_dim))


def fits_descriptor(x: torch.Tensor) -> bool:
    """Whether TMA can read rows of x[B, S, KV, K]: channels side by side, all else on multiples of 16 bytes."""
    strides = x.stride()
    return (
        strides[3] == 1
        and strides[1] >= x.shape[3]  # rows that lie over each other are no matrix
        and all(stride * x.element_size() % 16 == 0 for stride in strides[:3])
        and x.data_ptr() % 16 == 0
    )


def tile_of(
    kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, arch: int,
    dout: torch.Tensor | None = None,
) -> Tile:  # fmt: skip
    """The tile of kernel "forward", "dq" or "dkdv" for these tensors: the timed one where there is one.

    "dkdv" walks q and `dout`, which counts as laid out like q where it is not given; the others walk k and v.
    """
    width = padded(max(q.shape[3], v.shape[3]))
    kind, tile = derived_tile(kernel, width, q, k, v, options, arch, dout)
    return MEASURED.get((kernel, arch, width, kind), tile)


def derived_tile(
    kernel: str, width: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, arch: int,
    dout: torch.Tensor | None = None,
) -> tuple[str, Tile]:  # fmt: skip
    """(class, tile) of the tables above for channels padded to `width`."""
    if q.element_size() > 2:
        wide: Tile = from_table(WIDE_TILES, width)
        return "wide", wide._replace(
            num_warps=WIDE_WARPS.get((kernel, arch, width, options.dropout_p > 0), wide.num_warps)
        )
    choice: Choice = from_table(TILES[kernel][arch], width)
    switched = options.dropout_p or options.window or options.softcap
    rows = DESCRIPTOR_TILES.get(kernel, {}).get(arch)
    walked = (k, v) if kernel != "dkdv" else (q, q if dout is None else dout)
    # Masks over padded channels cost registers: the kernel of dk and dv has none left, the others with a switch on.
    head, value = q.shape[3], v.shape[3]
    is_ragged = padded(head) != head or padded(value) != value or (kernel == "dkdv" and head != value)
    if rows is not None and not switched and all(fits_descriptor(x) for x in walked):
        tile: Tile = from_table(rows, width)
        return "descriptors", RAGGED_DESCRIPTORS.get((kernel, arch, width), tile) if is_ragged else tile
    if is_ragged and (kernel == "dkdv" or switched):
        return "ragged", choice.ragged or choice.dropout
    if options.dropout_p:
        return "dropout", choice.dropout
    if options.window or options.softcap:
        return "bounded", choice.bounded
    return "plain", choice.plain


def delta_rows(value_dim: int) -> int:
    """Rows of a program of the delta kernel."""
    rows: int = from_table(DELTA_ROWS, padded(value_dim))
    return rows
