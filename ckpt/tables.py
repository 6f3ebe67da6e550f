"""From fragments to tensors: which pieces hold which full tensor, and the proof that they hold all of it, once.

Pure checks over what files claim, before any byte of data is read or any memory is taken; used by the coordinator
before a commit and by every reader. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch

from plait.ckpt.aside import BARE, check_bare, is_aside
from plait.ckpt.box import Box, Part, contains, cover_error, full_box, parts_of
from plait.ckpt.errors import SnapshotDamaged, StateError
from plait.ckpt.layout import can_exist, stored_bytes, torch_dtype
from plait.ckpt.manifest import CODECS, Fragment, Piece
from plait.ckpt.values import canonical

Each = Callable[[Iterable[Any]], Iterable[Any]]


class Source(NamedTuple):
    """A piece and the rank in whose data file it lies."""

    rank: int
    piece: Piece

    @property
    def parts(self) -> list[Part]:
        return parts_of(Box(self.piece.offset, self.piece.shape), self.piece.flat)


@dataclass
class TensorEntry:
    """One full tensor of a snapshot."""

    name: str
    dtype: torch.dtype
    full_shape: tuple[int, ...]
    sources: list[Source] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return stored_bytes(self.full_shape, self.dtype)


@dataclass
class Table:
    """All tensors by name, and the names that stand for another tensor."""

    tensors: dict[str, TensorEntry]
    aliases: dict[str, str]

    def entry(self, name: str) -> TensorEntry:
        """Returns the tensor of a name or of an alias; KeyError when there is none."""
        return self.tensors[self.aliases.get(name, name)]

    @property
    def names(self) -> set[str]:
        return self.tensors.keys() | self.aliases.keys()


def covered_table(fragments: Iterable[Fragment], where: str, each: Each = iter) -> Table:
    """Returns the table of pieces that are right by themselves and fill every tensor exactly once. each: how to walk
    over them; a thread that works beside training passes `in_slices`."""
    table = build_table(fragments, where, each)
    check_covered(table, where, each)
    return table


def build_table(fragments: Iterable[Fragment], where: str, each: Each = iter) -> Table:
    """Checks all pieces and returns the table. Raises SnapshotDamaged naming `where`, rank and tensor.

    Copies that did not know of each other (a DTensor repeated along a mesh dim that its own mesh does not have) are
    all written; pieces of one range with the same bytes count once, and with other bytes are an error.
    """
    tensors: dict[str, TensorEntry] = {}
    written: dict[tuple[Any, ...], Source] = {}
    aliases: dict[str, tuple[str, int]] = {}
    for fragment in fragments:
        for piece in each(fragment.pieces):
            text = f"{where}: rank {fragment.rank}, tensor {piece.name!r}"
            dtype = _check_piece(piece, fragment, text)
            entry = tensors.setdefault(piece.name, TensorEntry(piece.name, dtype, piece.full_shape))
            if (entry.dtype, entry.full_shape) != (dtype, piece.full_shape):
                raise SnapshotDamaged(
                    f"{text}: {dtype} {piece.full_shape} on this rank, {entry.dtype} {entry.full_shape} "
                    f"on rank {entry.sources[0].rank}"
                )
            copy = written.setdefault(
                (piece.name, piece.offset, piece.shape, piece.flat), Source(fragment.rank, piece)
            )
            if copy.piece is piece:
                entry.sources.append(copy)
            elif copy.piece.xxh3_128 != piece.xxh3_128:
                raise SnapshotDamaged(
                    f"{text}: other bytes than rank {copy.rank} has for box {piece.offset}+{piece.shape} of it: they "
                    "are no copies of each other (give them other names, or say what they are by Sharded)"
                )
        for name, target in fragment.aliases.items():
            known = aliases.setdefault(name, (target, fragment.rank))
            if known[0] != target:
                raise SnapshotDamaged(
                    f"{where}: {name!r} is the same memory as {target!r} on rank {fragment.rank} "
                    f"but as {known[0]!r} on rank {known[1]}"
                )
    for name, (target, rank) in aliases.items():
        if name in tensors:
            other = tensors[name].sources[0].rank
            raise SnapshotDamaged(f"{where}: {name!r} is tied to {target!r} on rank {rank} but not on rank {other}")
        if target not in tensors:
            raise SnapshotDamaged(f"{where}: {name!r} stands for {target!r}, which no rank has")
    return Table(tensors, {name: target for name, (target, _) in aliases.items()})


def check_covered(table: Table, where: str, each: Each = iter) -> None:
    """Raises SnapshotDamaged unless the pieces of every tensor fill it exactly once.

    Tensors of one geometry (most of a model's) are checked once.
    """
    known: dict[tuple[Any, ...], str | None] = {}
    for entry in each(table.tensors.values()):
        geometry = tuple((s.piece.offset, s.piece.shape, s.piece.flat) for s in entry.sources)
        key = (entry.full_shape, geometry)
        if key not in known:
            known[key] = cover_error(entry.full_shape, [part.box for s in entry.sources for part in s.parts])
        reason = known[key]
        if reason is not None:
            ranks = sorted({s.rank for s in entry.sources})
            raise SnapshotDamaged(
                f"{where}: tensor {entry.name!r} is not covered exactly once: {reason} (pieces of ranks {ranks}; "
                "a bare tensor must be on every rank, and replica=(index, count) must count all holders)"
            )


def _check_piece(piece: Piece, fragment: Fragment, text: str) -> torch.dtype:
    """Checks one piece against itself and its file; returns its dtype."""
    if (piece.codec is not None) != bool(fragment.parts) or piece.codec not in CODECS:
        raise SnapshotDamaged(f"{text}: codec {piece.codec!r} with {len(fragment.parts)} parts of a coded copy")
    file = fragment.data_file(piece.source_step)
    try:
        dtype = torch_dtype(piece.dtype, piece.logical_dtype)
    except ValueError as error:
        raise SnapshotDamaged(f"{text}: {error}") from error
    if not can_exist(piece.full_shape):
        raise SnapshotDamaged(f"{text}: no tensor can have the full shape {piece.full_shape}")
    box = Box(piece.offset, piece.shape)
    same_dims = len(piece.offset) == len(piece.shape) == len(piece.full_shape)
    if not same_dims or not contains(full_box(piece.full_shape), box):
        raise SnapshotDamaged(f"{text}: box {piece.offset}+{piece.shape} is not inside {piece.full_shape}")
    numel = prod(piece.shape)
    if piece.flat is not None:
        start, stop = piece.flat
        if not start <= stop <= numel:
            raise SnapshotDamaged(f"{text}: flat range {piece.flat} is not inside {numel} elements")
        numel = stop - start
    if piece.num_bytes != stored_bytes((numel,), dtype):
        raise SnapshotDamaged(f"{text}: {piece.num_bytes} bytes for {numel} elements of {dtype}")
    if file is None:
        raise SnapshotDamaged(f"{text}: the rank has no data file (source_step {piece.source_step})")
    if piece.file_offset + piece.num_bytes > file.bytes:
        raise SnapshotDamaged(f"{text}: ends behind '{file.name}'")
    return dtype


def merge_objects(fragments: Sequence[Fragment]) -> dict[str, Any]:
    """Returns the values of all ranks by name. StateError naming a value that differs between ranks, or the part of
    the state in which the ranks do not hold the same bare tensors."""
    check_bare((fragment.rank, fragment.objects.get(BARE, {})) for fragment in fragments)
    merged: dict[str, tuple[Any, str, int]] = {}
    for fragment in fragments:
        for name, value in fragment.objects.items():
            if is_aside(name):
                continue
            known = merged.setdefault(name, (value, canonical(value), fragment.rank))
            if known[0] is not value and known[1] != canonical(value):
                raise StateError(
                    f"value {name!r} is {known[1][:80]} on rank {known[2]} but {canonical(value)[:80]} on rank "
                    f"{fragment.rank}; wrap what belongs to one rank in PerRank"
                )
    return {name: merged[name][0] for name in sorted(merged)}
