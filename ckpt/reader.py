"""Opens one snapshot and reads any part of any of its tensors, verified.

Not the choice of a snapshot (restore.py). The one idea: nothing is believed before it is checked, from the outside
in: manifest, sizes, fragments, coverage, and then the CRC32C of each block that is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from plait import _C
from plait.ckpt.box import Box
from plait.ckpt.errors import SnapshotDamaged
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
from plait.ckpt.read_plan import WINDOW_BYTES, Move, Target, copy_bits, moves_of, round_up, windows
from plait.ckpt.tables import Table, build_table, check_covered


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
        """Fills all targets.

        Each block that they touch is read and verified once (per WINDOW_BYTES of scattered spans).
        """
        by_rank: dict[int, list[Move]] = {}
        late: list[tuple[torch.Tensor, torch.Tensor]] = []
        for target in targets:
            for rank, move in moves_of(target, late):
                by_rank.setdefault(rank, []).append(move)
        for rank in sorted(by_rank):
            moves = sorted(by_rank[rank], key=lambda move: move.file_offset)
            for window in windows(moves):
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

    def _read_window(self, rank: int, moves: list[Move]) -> None:
        staged = sum(round_up(move.num_bytes) for move in moves if not move.direct)
        window = torch.empty(staged, dtype=torch.uint8)
        requests, copies, at = [], [], 0
        for move in moves:
            if move.direct:
                requests.append((move.file_offset, move.num_bytes, move.target.data_ptr()))
                continue
            requests.append((move.file_offset, move.num_bytes, window.data_ptr() + at))
            copies.append((move, window[at : at + move.num_bytes]))
            at += round_up(move.num_bytes)
        self._ranges(rank, requests)
        for move, staged_bytes in copies:
            typed = staged_bytes.view(move.source_dtype)
            view = torch.as_strided(typed, move.target.shape, move.source_strides, typed.storage_offset())
            copy_bits(move.target, view)

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
            block = int(error.block)
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
