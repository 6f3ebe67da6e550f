"""From wanted boxes to byte ranges of data files: what to read, and which view of a target takes it.

Pure planning plus one copy helper; no I/O. The one idea: wanted and held parts are boxes of the full tensor; where
their intersection is contiguous on both sides the bytes go straight into the target, else through a staged span and a
strided copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from plait.ckpt.box import Box, Shape, intersect, parts_of, spans, strides_of
from plait.ckpt.errors import SnapshotError
from plait.ckpt.tables import Source, TensorEntry

MAX_GAP_BYTES = 64 << 10  # runs closer than this are read as one
MAX_SPAN_BYTES = 16 << 20  # ... up to this much at once
WINDOW_BYTES = 128 << 20  # host memory for spans that cannot go straight into their target; of a device, two

FileKey = tuple[int, int | None]  # a rank and a source_step: one data file of a snapshot


class Target(NamedTuple):
    """What is wanted: `tensor` is the box of the full tensor, or flat elements [a, b) of it. Filled in place."""

    entry: TensorEntry
    tensor: torch.Tensor
    box: Box
    flat: tuple[int, int] | None


class Move(NamedTuple):
    """One span of a data file and the strided view of a target that takes it."""

    file_offset: int
    num_bytes: int
    target: torch.Tensor
    source_dtype: torch.dtype
    source_strides: Shape
    direct: bool


def _only_source(target: Target) -> Source | None:
    """Returns the piece that is the whole target: nearly all of a state that goes back onto the grid it came from."""
    if len(target.entry.sources) != 1 or target.flat is not None:
        return None
    only = target.entry.sources[0]
    same = only.piece.flat is None and target.box == (only.piece.offset, only.piece.shape)
    return only if same else None


def moves_of(target: Target, late: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterable[tuple[FileKey, Move]]:
    """Yields (file, move) for all that a target needs. SnapshotError when the pieces leave a part of it unfilled."""
    tensor = target.tensor
    if target.flat is not None and not tensor.is_contiguous():
        late.append((tensor, torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)))
        tensor = late[-1][1]
    item = target.entry.dtype.itemsize
    if (only := _only_source(target)) is not None:
        if target.box.numel:
            move = _move(only.piece.file_offset, target.box.numel, target.box.shape, tensor, target.entry.dtype)
            yield (only.rank, only.piece.source_step), move
        return
    filled = 0
    for wanted in parts_of(target.box, target.flat):
        view = tensor
        if target.flat is not None:
            view = tensor.reshape(-1)[wanted.start : wanted.start + wanted.box.numel].view(wanted.box.shape)
        for source in target.entry.sources:
            for held in source.parts:
                common = intersect(held.box, wanted.box)
                if common is None:
                    continue
                filled += common.numel
                file = (source.rank, source.piece.source_step)
                if common == held.box == wanted.box:  # most of a model, restored as it was saved
                    offset = source.piece.file_offset + held.start * item
                    yield file, _move(offset, common.numel, held.box.shape, view, target.entry.dtype)
                    continue
                inside = common.shifted([-o for o in held.box.offset])
                for span in spans(held.box.shape, inside, MAX_GAP_BYTES // item, MAX_SPAN_BYTES // item):
                    to = span.box.shifted([h - w for h, w in zip(held.box.offset, wanted.box.offset, strict=True)])
                    part = view[tuple(slice(o, o + n) for o, n in zip(to.offset, to.shape, strict=True))]
                    offset = source.piece.file_offset + (held.start + span.start) * item
                    yield file, _move(offset, span.length, held.box.shape, part, target.entry.dtype)
    if filled != tensor.numel():
        raise SnapshotError(f"tensor {target.entry.name!r}: {filled} of {tensor.numel()} elements found")


def _move(offset: int, length: int, held_shape: Shape, part: torch.Tensor, dtype: torch.dtype) -> Move:
    straight = part.device.type == "cpu" and part.dtype == dtype and part.is_contiguous() and length == part.numel()
    straight = straight and not part.is_conj() and not part.is_neg()
    return Move(offset, length * dtype.itemsize, part, dtype, strides_of(held_shape), straight)


def windows(moves: list[Move]) -> Iterable[list[Move]]:
    """Cuts moves so that the staged bytes of each window fit WINDOW_BYTES (or are one span that has gaps)."""
    window: list[Move] = []
    staged = 0
    for move in (part for whole in moves for part in _cut(whole)):
        need = 0 if move.direct else move.num_bytes
        if window and staged + need > WINDOW_BYTES:
            yield window
            window, staged = [], 0
        window.append(move)
        staged += need
    if window:
        yield window


def _cut(move: Move) -> Iterable[Move]:
    """Yields a move in parts of WINDOW_BYTES: one that goes through a window and has no gaps may be of any length."""
    dense = move.num_bytes == move.target.numel() * move.source_dtype.itemsize
    if move.direct or not dense or move.num_bytes <= WINDOW_BYTES:
        yield move
        return
    dim = next(dim for dim, count in enumerate(move.target.shape) if count > 1)
    count = move.target.shape[dim]
    row_bytes = move.num_bytes // count
    rows = max(1, WINDOW_BYTES // row_bytes)
    for first in range(0, count, rows):
        part = move.target.narrow(dim, first, min(rows, count - first))
        offset, num_bytes = move.file_offset + first * row_bytes, part.shape[dim] * row_bytes
        yield from _cut(move._replace(file_offset=offset, num_bytes=num_bytes, target=part))


def round_up(num_bytes: int) -> int:
    """Returns a multiple of the largest item, so that every staged span can be viewed in its dtype."""
    return -(-num_bytes // 16) * 16


_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_bits(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
    """Copies; between equal dtypes as integers of that size, so that no value is interpreted."""
    plain = not target.is_conj() and not target.is_neg()
    if target.dtype == source.dtype and plain and source.element_size() in _SAME_SIZE:
        same = _SAME_SIZE[source.element_size()]
        target.view(same).copy_(source.view(same), non_blocking=non_blocking)
    else:
        target.copy_(source, non_blocking=non_blocking)
