"""Bitwise comparison of two snapshots on full tensors, so that different grids compare.

Not a tolerance check: equal means every bit. The one idea: both sides are read in the same slices of the full tensor,
whatever their pieces are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, isnan, prod

import torch

from plait.ckpt.box import Box
from plait.ckpt.read_plan import Target
from plait.ckpt.reader import SnapshotReader
from plait.ckpt.tables import TensorEntry
from plait.ckpt.values import canonical

SLICE_BYTES = 128 << 20  # of each side, held at once


@dataclass(frozen=True)
class Difference:
    """One thing that differs. kind: only_a, only_b, layout (shape or dtype), bits, value, per_rank.

    max_difference: absolute; max_relative: the same over the larger of both. None where one side is not a finite
    number. num_bits: how many bits differ in all.
    """

    name: str
    kind: str
    text: str
    num_different: int = 0
    max_difference: float | None = 0.0
    max_relative: float | None = 0.0
    num_bits: int = 0


def compare(a: SnapshotReader, b: SnapshotReader) -> Iterator[Difference]:
    """Yields every difference: tensors, then values, then what each rank holds alone (for equal numbers of ranks)."""
    yield from _only(a.table.names, b.table.names)
    for name in sorted(a.table.names & b.table.names):
        found = _compare_tensor(name, a, b)
        if found is not None:
            yield found
    yield from _only(set(a.values), set(b.values))
    for name in sorted(a.values.keys() & b.values.keys()):
        if canonical(a.values[name]) != canonical(b.values[name]):
            text = f"{canonical(a.values[name])[:60]} against {canonical(b.values[name])[:60]}"
            yield Difference(name, "value", text)
    if len(a.fragments) != len(b.fragments):
        return
    for rank, (mine, theirs) in enumerate(zip(a.fragments, b.fragments, strict=True)):
        for name in sorted(mine.per_rank.keys() | theirs.per_rank.keys()):
            if (name in mine.per_rank) != (name in theirs.per_rank):
                side = "first" if name in mine.per_rank else "second"
                yield Difference(name, "per_rank", f"is in the {side} only, on rank {rank}")
            elif canonical(mine.per_rank[name]) != canonical(theirs.per_rank[name]):
                yield Difference(name, "per_rank", f"differs on rank {rank}")


def _only(a: set[str], b: set[str]) -> Iterator[Difference]:
    yield from (Difference(name, "only_a", "is in the first only") for name in sorted(a - b))
    yield from (Difference(name, "only_b", "is in the second only") for name in sorted(b - a))


def _compare_tensor(name: str, a: SnapshotReader, b: SnapshotReader) -> Difference | None:
    mine, theirs = a.table.entry(name), b.table.entry(name)
    if (mine.dtype, mine.full_shape) != (theirs.dtype, theirs.full_shape):
        text = f"{mine.dtype} {mine.full_shape} against {theirs.dtype} {theirs.full_shape}"
        return Difference(name, "layout", text)
    different, num_bits, largest, relative = 0, 0, 0.0, 0.0
    for box in slices(mine):
        left, right = read_box(a, mine, box), read_box(b, theirs, box)
        if _bits(left).equal(_bits(right)):
            continue
        rows = (_bits(left) != _bits(right)).any(dim=1)
        different += int(rows.sum())
        left, right = left.reshape(-1)[rows], right.reshape(-1)[rows]
        num_bits += _changed_bits(left, right)
        largest, relative = map(_larger, (largest, relative), _largest(left, right))
    if not different:
        return None
    text = (
        f"{different} of {prod(mine.full_shape)} elements, largest difference {largest:g}, relative {relative:g}, "
        f"{num_bits} bits"
    )
    return Difference(name, "bits", text, different, _finite(largest), _finite(relative), num_bits)


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def slices(entry: TensorEntry) -> Iterator[Box]:
    """Yields boxes along dim 0 that cover a tensor, each of at most SLICE_BYTES (or one row)."""
    shape = entry.full_shape
    if not shape or entry.num_bytes <= SLICE_BYTES:
        yield Box((0,) * len(shape), shape)
        return
    rows = max(1, SLICE_BYTES * shape[0] // entry.num_bytes)
    for first in range(0, shape[0], rows):
        yield Box((first, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - first), *shape[1:]))


def read_box(reader: SnapshotReader, entry: TensorEntry, box: Box) -> torch.Tensor:
    """Returns a box of a full tensor in new host memory."""
    tensor = torch.empty(box.shape, dtype=entry.dtype)
    reader.read([Target(entry, tensor, box, None)])
    return tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes, [elements, bytes of an element]."""
    return tensor.reshape(-1, 1).view(torch.uint8)


def _changed_bits(a: torch.Tensor, b: torch.Tensor) -> int:
    ones = torch.tensor([value.bit_count() for value in range(256)], dtype=torch.uint8)
    return int(ones[(_bits(a) ^ _bits(b)).reshape(-1).int()].sum(dtype=torch.int64))


def _largest(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """Returns the largest absolute difference as numbers, and the largest one relative to the larger of both; NaN
    where one side is not a number. Exact for integers of any size."""
    if a.dtype in (torch.int64, torch.uint64):
        size = _distance(a, b)
        scale = torch.maximum(a.double().abs(), b.double().abs())
    else:
        wide = torch.complex128 if a.is_complex() else torch.float64
        size = (a.to(wide) - b.to(wide)).abs()
        scale = torch.maximum(a.to(wide).abs(), b.to(wide).abs())
    relative = torch.where(size == 0, 0.0, size / scale)  # -0.0 against 0.0
    return float(size.max()), float(relative.max())


def _distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns |a - b| of 64-bit integers as fp64: in fp64 alone, 2**53 and 2**53 + 1 would be equal."""
    pairs = zip(a.tolist(), b.tolist(), strict=True)
    return torch.tensor([float(abs(x - y)) for x, y in pairs], dtype=torch.float64)


def _larger(a: float, b: float) -> float:
    """Returns the larger one, or NaN when one is."""
    return a if isnan(a) or a > b else b
