"""Opens one snapshot and reads any part of any of its tensors, verified.

Not the choice of a snapshot (restore.py). The one idea: nothing is believed before it is checked, from the outside in:
manifest, sizes, fragments, coverage, and then the CRC32C of each block that is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from plait import _C
from plait.ckpt.box import Box, Shape, intersect, parts_of, spans, strides_of
from plait.ckpt.errors import SnapshotDamaged, SnapshotError
from plait.ckpt.folders import parse_step
from plait.ckpt.manifest import (
    MANIFEST,
    MAX_JSON_BYTES,
    OBJECTS,
    DataFile,
    Fragment,
    Manifest,
    Objects,
    data_name,
    fragment_name,
    from_bytes,
    sha256,
)
from plait.ckpt.tables import Table, TensorEntry, build_table, check_covered

MAX_GAP_BYTES = 64 << 10  # runs closer than this are read as one
MAX_SPAN_BYTES = 16 << 20  # ... up to this much at once
WINDOW_BYTES = 256 << 20  # host memory for spans that cannot go straight into their target


class Target(NamedTuple):
    """What is wanted: `tensor` is the box of the full tensor, or flat elements [a, b) of it. Filled in place."""

    entry: TensorEntry
    tensor: torch.Tensor
    box: Box
    flat: tuple[int, int] | None


class _Move(NamedTuple):
    """One span of a data file and the strided view of a target that takes it."""

    file_offset: int
    num_bytes: int
    target: torch.Tensor
    source_dtype: torch.dtype
    source_strides: Shape
    direct: bool


def read_manifest(io: _C.Io, folder: Path) -> Manifest:
    """Returns a step folder's manifest after checking it and the sizes of all files. SnapshotDamaged says why not.

    Reads one small file: this is what makes a snapshot a candidate. Data is verified when read.
    """
    path = folder / MANIFEST
    try:
        manifest = from_bytes(Manifest, _C.read_small(io, path, MAX_JSON_BYTES), f"'{path}'")
    except FileNotFoundError:
        raise SnapshotDamaged(f"'{folder}' has no {MANIFEST}: it was never finished") from None
    except OSError as error:
        raise SnapshotDamaged(f"'{path}' cannot be read: {error}") from error
    named = parse_step(folder)
    if named is not None and named.step != manifest.step:
        raise SnapshotDamaged(f"'{path}' is of step {manifest.step}")
    fragments = {fragment_name(rank) for rank in range(manifest.world_size)}
    names = {entry.name for entry in manifest.files}
    known = fragments | {OBJECTS} | {data_name(rank) for rank in range(manifest.world_size)}
    if not fragments | {OBJECTS} <= names <= known or len(names) != len(manifest.files):
        raise SnapshotDamaged(f"'{path}' lists {sorted(names)[:4]}..., not the files of {manifest.world_size} ranks")
    for entry in manifest.files:
        try:
            size = os.stat(folder / entry.name).st_size
        except FileNotFoundError:
            raise SnapshotDamaged(f"'{folder / entry.name}' is missing") from None
        if size != entry.bytes:
            raise SnapshotDamaged(f"'{folder / entry.name}' has {size} bytes, the manifest says {entry.bytes}")
    return manifest


class SnapshotReader:
    """One opened snapshot. Holds no file open; safe to drop at any time. SnapshotDamaged from any method."""

    def __init__(self, folder: Path, io: _C.Io | None = None, threads: int = 2) -> None:
        self.folder = folder
        self._io = io or _C.PosixIo()
        self._threads = threads
        self.manifest = read_manifest(self._io, folder)
        self._entries = {entry.name: entry for entry in self.manifest.files}
        self.bytes_read = 0

    @cached_property
    def fragments(self) -> tuple[Fragment, ...]:
        """All fragments, checked against the manifest."""
        found = []
        for rank in range(self.manifest.world_size):
            fragment = from_bytes(
                Fragment, self._small(fragment_name(rank)), f"'{self.folder / fragment_name(rank)}'"
            )
            said = (fragment.rank, fragment.attempt, fragment.step, fragment.world_size)
            if said != (rank, self.manifest.attempt, self.manifest.step, self.manifest.world_size):
                raise SnapshotDamaged(f"'{self.folder / fragment_name(rank)}' belongs to another snapshot: {said}")
            self._check_file(rank, fragment.file)
            found.append(fragment)
        return tuple(found)

    @cached_property
    def table(self) -> Table:
        """All tensors, proven to be covered exactly once."""
        table = build_table(self.fragments, f"'{self.folder}'")
        check_covered(table, f"'{self.folder}'")
        if table.aliases != self.manifest.aliases or len(table.tensors) != self.manifest.num_tensors:
            raise SnapshotDamaged(f"'{self.folder}': the manifest and the fragments name different tensors")
        return table

    @cached_property
    def values(self) -> dict[str, Any]:
        """All shared values by name, as in the file (see values.decode)."""
        return from_bytes(Objects, self._small(OBJECTS), f"'{self.folder / OBJECTS}'").values

    def read(self, targets: Iterable[Target]) -> None:
        """Fills all targets. Each block that they touch is read and verified once (per WINDOW_BYTES of scattered spans)."""
        by_rank: dict[int, list[_Move]] = {}
        late: list[tuple[torch.Tensor, torch.Tensor]] = []
        for target in targets:
            for rank, move in _moves(target, late):
                by_rank.setdefault(rank, []).append(move)
        for rank in sorted(by_rank):
            moves = sorted(by_rank[rank], key=lambda move: move.file_offset)
            for window in _windows(moves):
                self._read_window(rank, window)
        for destination, filled in late:
            destination.copy_(filled.reshape(destination.shape))

    def read_full(self, name: str) -> torch.Tensor:
        """Returns a whole tensor in new host memory."""
        entry = self.table.entry(name)
        tensor = torch.empty(entry.full_shape, dtype=entry.dtype)
        self.read([Target(entry, tensor, Box((0,) * tensor.dim(), entry.full_shape), None)])
        return tensor

    def verify(self, rank: int) -> list[str]:
        """Reads a rank's whole data file; returns one text for each damaged block, naming the tensors in it."""
        file = self.fragments[rank].file
        if file is None:
            return []
        scratch = torch.empty(min(file.bytes, WINDOW_BYTES // 4), dtype=torch.uint8)
        damage = []
        for start in range(0, file.bytes, scratch.numel()):
            stop = min(file.bytes, start + scratch.numel())
            try:
                self._ranges(rank, [(start, stop - start, scratch.data_ptr())])
            except SnapshotDamaged:
                for at in range(start, stop, file.block_bytes):
                    try:
                        self._ranges(rank, [(at, min(file.block_bytes, stop - at), scratch.data_ptr())])
                    except SnapshotDamaged as error:
                        damage.append(str(error))
        return damage

    def _read_window(self, rank: int, moves: list[_Move]) -> None:
        staged = sum(_round_up(move.num_bytes) for move in moves if not move.direct)
        window = torch.empty(staged, dtype=torch.uint8)
        requests, copies, at = [], [], 0
        for move in moves:
            if move.direct:
                requests.append((move.file_offset, move.num_bytes, move.target.data_ptr()))
                continue
            requests.append((move.file_offset, move.num_bytes, window.data_ptr() + at))
            copies.append((move, window[at : at + move.num_bytes]))
            at += _round_up(move.num_bytes)
        self._ranges(rank, requests)
        for move, staged_bytes in copies:
            typed = staged_bytes.view(move.source_dtype)
            view = torch.as_strided(typed, move.target.shape, move.source_strides, typed.storage_offset())
            _copy_bits(move.target, view)

    def _ranges(self, rank: int, requests: list[tuple[int, int, int]]) -> None:
        file = self.fragments[rank].file
        assert file is not None
        path = self.folder / file.name
        try:
            self.bytes_read += _C.read_ranges(
                self._io,
                path,
                file.bytes,
                list(file.crc32c),
                requests,
                block_bytes=file.block_bytes,
                threads=self._threads,
            )
        except _C.ChecksumError as error:
            block = int(error.block)  # type: ignore[attr-defined]
            raise SnapshotDamaged(f"{error}{self._tensors_at(rank, block, file)}") from error
        except OSError as error:
            raise SnapshotDamaged(f"'{path}' cannot be read: {error}") from error

    def _tensors_at(self, rank: int, block: int, file: DataFile) -> str:
        if block < 0:
            return ""
        begin, end = block * file.block_bytes, (block + 1) * file.block_bytes
        pieces = self.fragments[rank].pieces
        names = [p.key for p in pieces if p.file_offset < end and p.file_offset + p.num_bytes > begin]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        return f" (holds {', '.join(names[:4]) or 'the header'}{more})"

    def _small(self, name: str) -> bytes:
        entry, path = self._entries[name], self.folder / name
        try:
            data = _C.read_small(self._io, path, entry.bytes)
        except OSError as error:
            raise SnapshotDamaged(f"'{path}' cannot be read: {error}") from error
        if sha256(data) != entry.sha256:
            raise SnapshotDamaged(f"'{path}' does not have the digest that the manifest says")
        return data

    def _check_file(self, rank: int, file: DataFile | None) -> None:
        entry = self._entries.get(data_name(rank))
        if (file is None) != (entry is None):
            raise SnapshotDamaged(
                f"'{self.folder}': manifest and fragment of rank {rank} disagree about its data file"
            )
        if file is None or entry is None:
            return
        blocks = -(-file.bytes // file.block_bytes) if file.block_bytes else -1
        if (file.name, file.bytes, file.digest) != (entry.name, entry.bytes, entry.sha256) or blocks != len(
            file.crc32c
        ):
            raise SnapshotDamaged(f"'{self.folder / entry.name}': its checksums are not those that the manifest says")


def _moves(target: Target, late: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterable[tuple[int, _Move]]:
    """Yields (rank, move) for all that a target needs. SnapshotError when the pieces leave a part of it unfilled."""
    tensor = target.tensor
    if target.flat is not None and not tensor.is_contiguous():
        late.append((tensor, torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)))
        tensor = late[-1][1]
    item = target.entry.dtype.itemsize
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
                inside = common.shifted([-o for o in held.box.offset])
                for span in spans(held.box.shape, inside, MAX_GAP_BYTES // item, MAX_SPAN_BYTES // item):
                    to = span.box.shifted([h - w for h, w in zip(held.box.offset, wanted.box.offset, strict=True)])
                    part = view[tuple(slice(o, o + n) for o, n in zip(to.offset, to.shape, strict=True))]
                    offset = source.piece.file_offset + (held.start + span.start) * item
                    yield source.rank, _move(offset, span.length, held.box.shape, part, target.entry.dtype)
    if filled != tensor.numel():
        raise SnapshotError(f"tensor {target.entry.name!r}: {filled} of {tensor.numel()} elements found")


def _move(offset: int, length: int, held_shape: Shape, part: torch.Tensor, dtype: torch.dtype) -> _Move:
    straight = part.device.type == "cpu" and part.dtype == dtype and part.is_contiguous() and length == part.numel()
    straight = straight and not part.is_conj() and not part.is_neg()
    return _Move(offset, length * dtype.itemsize, part, dtype, strides_of(held_shape), straight)


def _windows(moves: list[_Move]) -> Iterable[list[_Move]]:
    """Cuts moves so that the staged bytes of each window fit WINDOW_BYTES (or are one span)."""
    window: list[_Move] = []
    staged = 0
    for move in moves:
        need = 0 if move.direct else move.num_bytes
        if window and staged + need > WINDOW_BYTES:
            yield window
            window, staged = [], 0
        window.append(move)
        staged += need
    if window:
        yield window


def _round_up(num_bytes: int) -> int:
    """Returns a multiple of the largest item, so that every staged span can be viewed in its dtype."""
    return -(-num_bytes // 16) * 16


_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies; between equal dtypes as integers of that size, so that no value is interpreted."""
    plain = not target.is_conj() and not target.is_neg()
    if target.dtype == source.dtype and plain and source.element_size() in _SAME_SIZE:
        same = _SAME_SIZE[source.element_size()]
        target.view(same).copy_(source.view(same))
    else:
        target.copy_(source)
