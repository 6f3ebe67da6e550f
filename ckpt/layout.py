"""Where bytes lie in a data file: dtype names, who writes what, offsets, and the safetensors header.

Pure: no files, no tensor data. The one idea: everything follows from the described tensors alone, so that all ranks
know the cut and its owners without a message, and an unchanged state has an unchanged file layout.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import prod

import torch

from plait.ckpt.errors import StateError
from plait.ckpt.state import Leaf

# torch -> safetensors' names; others are stored as U8 with their torch name beside (docs/format.md, logical_dtype).
SAFETENSORS_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}

ALIGNMENT = 4096  # direct I/O and page size: large pieces begin at a multiple of it
LARGE_BYTES = 1 << 20  # pieces from here on are aligned; a replica's share is never smaller than this
SMALL_BYTES = 64 << 10  # boxes up to here are written by replica 0, so that small ones share a file


def dtype_names(dtype: torch.dtype) -> tuple[str, str | None]:
    """Returns (dtype, logical_dtype) as in a fragment."""
    if dtype in SAFETENSORS_NAMES:
        return SAFETENSORS_NAMES[dtype], None
    return "U8", str(dtype).removeprefix("torch.")


def torch_dtype(dtype: str, logical_dtype: str | None) -> torch.dtype:
    """Returns the torch dtype of a fragment's names; ValueError for one that this torch does not have."""
    found = DTYPES.get(dtype) if logical_dtype is None else getattr(torch, logical_dtype, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype {logical_dtype or dtype!r} is unknown to this torch")
    return found


@dataclass(frozen=True)
class Share:
    """What this rank writes of a leaf: elements [start, stop) of the leaf's row-major local elements."""

    leaf: Leaf
    start: int
    stop: int

    @property
    def flat(self) -> tuple[int, int] | None:
        """The piece's flat range in its box; None for the whole box."""
        if self.leaf.flat is not None:
            return self.leaf.flat[0] + self.start, self.leaf.flat[0] + self.stop
        return None if (self.start, self.stop) == (0, self.leaf.tensor.numel()) else (self.start, self.stop)

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.leaf.tensor.element_size()


@dataclass(frozen=True)
class Placed:
    """A share at its place: `data_offset` bytes after the header; `shape` and `key` as in the file."""

    share: Share
    key: str
    shape: tuple[int, ...]
    data_offset: int


@dataclass(frozen=True)
class DataLayout:
    """A data file before it is written: header bytes, pieces, and the number of data bytes after the header."""

    header: bytes
    pieces: tuple[Placed, ...]
    data_bytes: int


def shares_of(leaves: Sequence[Leaf], rank: int, world_size: int) -> list[Share]:
    """Returns what this rank writes, so that all ranks together write each byte once and about the same number.

    Boxes up to SMALL_BYTES go to replica 0; larger ones are cut into parts of at least LARGE_BYTES, at most one a
    replica. Parts of tensors that the same ranks hold, which all of these see alike, go to the least loaded one,
    longest first; parts of others start at a replica chosen by their name.
    """
    shares: list[Share] = []
    together: dict[tuple[Hashable, bool, int, int], list[Leaf]] = {}
    for leaf in leaves:
        index, count = (rank, world_size) if leaf.replica is None else leaf.replica
        if count == 1:
            shares.append(Share(leaf, 0, leaf.tensor.numel()))
        else:
            known: Hashable = (leaf.name, leaf.box, leaf.flat) if leaf.holders is None else leaf.holders
            together.setdefault((known, leaf.replica is None, index, count), []).append(leaf)
    for (_, _, index, count), some in together.items():
        shares += _shares_of_replica(some, index, count)
    return shares


def _shares_of_replica(leaves: Sequence[Leaf], index: int, count: int) -> list[Share]:
    """Shares the leaves out among `count` ranks that all hold them; returns what the index-th of them writes."""
    small_bytes = 0
    shares: list[Share] = []
    units: list[tuple[int, str, int, Share]] = []
    for leaf in leaves:
        num_bytes = leaf.tensor.numel() * leaf.tensor.element_size()
        parts = 0 if num_bytes <= SMALL_BYTES else min(count, max(1, num_bytes // LARGE_BYTES))
        cuts = [leaf.tensor.numel() * p // parts for p in range(parts + 1)] if parts else []
        units += [(-num_bytes // parts, leaf.name, p, Share(leaf, *cuts[p : p + 2])) for p in range(parts)]
        if not parts:
            small_bytes += num_bytes
            shares += [Share(leaf, 0, leaf.tensor.numel())] if index == 0 else []
    units.sort(key=lambda unit: unit[:3])
    first = zlib.crc32(units[0][1].encode()) % count if units else 0  # not always the same rank where loads are equal
    loads = [(small_bytes if i == 0 else 0, (i - first) % count, i) for i in range(count)]
    heapify(loads)
    for *_, share in units:
        load, turn, owner = loads[0]
        heapreplace(loads, (load + share.num_bytes, turn, owner))
        if owner == index:
            shares.append(share)
    return shares


def key_of(share: Share) -> str:
    """Returns the piece's name in its data file: the tensor's own, if it is all of it."""
    leaf = share.leaf
    if share.flat is None and leaf.box.shape == leaf.full_shape:
        return leaf.name
    text = f"{leaf.name}@{','.join(map(str, leaf.box.offset))}"
    return text if share.flat is None else f"{text}+{share.flat[0]}:{share.flat[1]}"


def lay_out(shares: Sequence[Share]) -> DataLayout:
    """Places shares in a data file: large ones at multiples of 4096, then the small by falling item size."""
    large = sorted((s for s in shares if s.num_bytes >= LARGE_BYTES), key=lambda s: s.leaf.name)
    small = [s for s in shares if s.num_bytes < LARGE_BYTES]
    small.sort(key=lambda s: (-s.leaf.tensor.element_size(), s.leaf.name))
    entries: dict[str, dict[str, object]] = {}
    described: dict[str, list[object]] = {}
    pieces: list[Placed] = []
    at = pads = 0
    for share in [*large, *small]:
        aligned = share.num_bytes >= LARGE_BYTES or (small and share is small[0])
        gap = -at % ALIGNMENT if aligned else 0
        if gap:
            entries[f"__pad.{pads}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [at, at + gap]}
            at, pads = at + gap, pads + 1
        placed = Placed(share, key_of(share), _stored_shape(share), at)
        if placed.key in entries:
            raise StateError(f"{share.leaf.path}: two pieces would have the name {placed.key!r}")
        dtype, _ = dtype_names(share.leaf.tensor.dtype)
        end = at + share.num_bytes
        entries[placed.key] = {"dtype": dtype, "shape": list(placed.shape), "data_offsets": [at, end]}
        leaf = share.leaf
        described[placed.key] = [leaf.full_shape, leaf.box.offset, leaf.box.shape, share.flat]
        pieces.append(placed)
        at = end
    return DataLayout(_header(entries, described), tuple(pieces), at)


def _stored_shape(share: Share) -> tuple[int, ...]:
    """Returns the shape in the file; a dtype that safetensors lacks has its bytes as a last dim."""
    shape = share.leaf.box.shape if share.flat is None else (share.stop - share.start,)
    _, logical = dtype_names(share.leaf.tensor.dtype)
    return shape if logical is None else (*shape, share.leaf.tensor.element_size())


def _header(entries: dict[str, dict[str, object]], described: dict[str, list[object]]) -> bytes:
    """Returns the 8 length bytes and the JSON, padded with spaces to a multiple of ALIGNMENT."""
    metadata = {"format": "plait-data-1", "pieces": json.dumps(described, separators=(",", ":"))}
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def can_exist(shape: Sequence[int]) -> bool:
    """Returns whether torch can have a tensor of this shape: of an empty one too it counts strides in 63 bits."""
    return all(0 <= n < 1 << 63 for n in shape) and prod(max(n, 1) for n in shape[1:]) < 1 << 63


def stored_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Returns the bytes of a tensor of this shape."""
    return prod(shape) * dtype.itemsize
