"""Opens one snapshot and reads any part of any of its tensors, verified.

Not the choice of a snapshot (restore.py). The one idea: nothing is believed before it is checked, from the outside
in: manifest, sizes, fragments, coverage, and then the CRC32C of each block that is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from plait import _C
from plait.ckpt.box import Box
from plait.ckpt.crypt import Key
from plait.ckpt.errors import SnapshotDamaged
from plait.ckpt.folders import parse_step
from plait.ckpt.manifest import (
    FILE_NAME,
    MANIFEST,
    MAX_JSON_BYTES,
    OBJECTS,
    DataFile,
    FileEntry,
    Fragment,
    Manifest,
    Objects,
    data_name,
    fragment_name,
    from_bytes,
    sha256,
)
from plait.ckpt.read_plan import WINDOW_BYTES, FileKey, Move, Target, moves_of, windows
from plait.ckpt.tables import Table, covered_table
from plait.ckpt.windows import Request, Windows

BLOCK_UNIT = 4096  # blocks begin where direct I/O can
MAX_BLOCK_BYTES = 64 << 20  # of a file of any writer: what a reader may have to hold at once


def read_manifest(io: _C.Io, folder: Path, key: Key | None = None) -> Manifest:
    """Returns a step folder's manifest after checking it and the sizes of all files. SnapshotDamaged says why not.

    Reads one small file: this is what makes a snapshot a candidate. Data is verified when read. With a key, the
    manifest must be signed by it.
    """
    path = folder / MANIFEST
    try:
        manifest = from_bytes(Manifest, _C.read_small(io, path, MAX_JSON_BYTES), f"'{path}'", key)
    except FileNotFoundError:
        raise SnapshotDamaged(f"'{folder}' has no {MANIFEST}: it was never finished") from None
    except OSError as error:
        raise SnapshotDamaged(f"'{path}' cannot be read: {error}") from error
    named = parse_step(folder)
    if named is not None and named.step != manifest.step:
        raise SnapshotDamaged(f"'{path}' is of step {manifest.step}")
    check_names(manifest, f"'{path}'")
    for entry in manifest.files:
        try:
            size = os.stat(folder / entry.name).st_size
        except FileNotFoundError:
            if manifest.commit == "disks" and FILE_NAME.fullmatch(entry.name):
                continue  # a data file on the disk of its rank; whoever needs it will find out
            raise SnapshotDamaged(f"'{folder / entry.name}' is missing") from None
        except OSError as error:
            raise SnapshotDamaged(f"'{folder / entry.name}' cannot be read: {error}") from error
        if size != entry.bytes:
            raise SnapshotDamaged(f"'{folder / entry.name}' has {size} bytes, the manifest says {entry.bytes}")
    return manifest


def check_names(manifest: Manifest, where: str) -> None:
    """Raises SnapshotDamaged unless the manifest lists the files of its ranks and nothing else."""
    if manifest.world_size > len(manifest.files):
        raise SnapshotDamaged(f"{where} lists {len(manifest.files)} files for {manifest.world_size} ranks")
    wanted = {fragment_name(rank) for rank in range(manifest.world_size)} | {OBJECTS}
    names = {entry.name for entry in manifest.files}
    data = [FILE_NAME.fullmatch(name) for name in names - wanted]
    foreign = any(match is None or int(match[1]) >= manifest.world_size for match in data)
    if foreign or not wanted <= names or len(names) != len(manifest.files):
        raise SnapshotDamaged(f"{where} lists {sorted(names)[:4]}..., not the files of {manifest.world_size} ranks")


class SnapshotReader:
    """One opened snapshot. Holds no file open; safe to drop at any time. SnapshotDamaged from any method.

    spare: opens another copy of the same attempt, from which damaged blocks are taken; `filled` says what it filled.
    """

    def __init__(
        self,
        folder: Path,
        io: _C.Io | None = None,
        threads: int = 2,
        key: Key | None = None,
        spare: Callable[[str], SnapshotReader | None] | None = None,
    ) -> None:
        self.folder = folder
        self._io = io or _C.PosixIo()
        self._threads, self._key, self._spare = threads, key, spare
        self._windows = Windows
        self.manifest = self._open_manifest()
        self._entries = {entry.name: entry for entry in self.manifest.files}
        self.bytes_read, self.filled = 0, list[str]()

    @property
    def location(self) -> Path | str:
        """The folder, or the URL of a copy that is in none."""
        return self.folder

    @property
    def place(self) -> str:  # for people
        return str(self.location)

    @cached_property
    def fragments(self) -> tuple[Fragment, ...]:
        """All fragments, checked against the manifest."""
        return tuple(self.fragment(rank) for rank in range(self.manifest.world_size))

    def fragment(self, rank: int) -> Fragment:
        """Reads one fragment, checked against the manifest."""
        name = fragment_name(rank)
        where = f"'{self.place}/{name}'"
        fragment = from_bytes(Fragment, self._content(name, self.stored(name)), where)
        said = (fragment.rank, fragment.attempt, fragment.step, fragment.world_size)
        if said != (rank, self.manifest.attempt, self.manifest.step, self.manifest.world_size):
            raise SnapshotDamaged(f"{where} belongs to another snapshot: {said}")
        self._check_files(fragment)
        return fragment

    @cached_property
    def table(self) -> Table:
        """All tensors, proven to be covered exactly once."""
        table = covered_table(self.fragments, f"'{self.place}'")
        if table.aliases != self.manifest.aliases or len(table.tensors) != self.manifest.num_tensors:
            raise SnapshotDamaged(f"'{self.place}': the manifest and the fragments name different tensors")
        return table

    @cached_property
    def values(self) -> dict[str, Any]:
        """All shared values by name, as in the file (see values.decode)."""
        data = self._content(OBJECTS, self.stored(OBJECTS))
        return from_bytes(Objects, data, f"'{self.place}/{OBJECTS}'").values

    def read(self, targets: Iterable[Target]) -> None:
        """Fills all targets.

        Each block that they touch is read and verified once (per WINDOW_BYTES of scattered spans).
        """
        by_file: dict[FileKey, list[Move]] = {}
        late: list[tuple[torch.Tensor, torch.Tensor]] = []
        for target in targets:
            for file, move in moves_of(target, late):
                by_file.setdefault(file, []).append(move)
        with self._windows() as through:
            for file in sorted(by_file, key=lambda file: (file[0], file[1] or 0)):
                moves = sorted(by_file[file], key=lambda move: move.file_offset)
                for window in windows(moves):
                    through.fill(window, partial(self._ranges, file))
        for destination, filled in late:
            destination.copy_(filled.reshape(destination.shape))

    def read_full(self, name: str) -> torch.Tensor:
        """Returns a whole tensor in new host memory."""
        entry = self.table.entry(name)
        tensor = torch.empty(entry.full_shape, dtype=entry.dtype)
        self.read([Target(entry, tensor, Box((0,) * tensor.dim(), entry.full_shape), None)])
        return tensor

    def read_range(self, file: FileKey, offset: int, num_bytes: int, address: int) -> None:
        """Reads bytes of a data file, verified, to an address: for those who copy files whole."""
        self._ranges(file, [(offset, num_bytes, address)])

    def verify(self, rank: int) -> list[str]:
        """Reads all data files of a rank; returns one text for each damaged block, naming the tensors in it."""
        return [
            text for step, file in self.fragments[rank].data_files.items() for text in self._verify(rank, step, file)
        ]

    def _verify(self, rank: int, step: int | None, file: DataFile) -> list[str]:
        scratch = torch.empty(min(file.bytes, WINDOW_BYTES // 2), dtype=torch.uint8)
        damage: list[str] = []
        for start in range(0, file.bytes, scratch.numel()):
            stop = min(file.bytes, start + scratch.numel())
            try:
                self._ranges((rank, step), [(start, stop - start, scratch.data_ptr())])
            except SnapshotDamaged as first:
                known = len(damage)
                for at in range(start, stop, file.block_bytes):
                    try:
                        request = (at, min(file.block_bytes, stop - at), scratch.data_ptr())
                        self._ranges((rank, step), [request])
                    except SnapshotDamaged as error:
                        damage.append(str(error))
                damage += [f"{first}; good at a second look"] * (len(damage) == known)
        return damage

    def _ranges(self, key: FileKey, requests: list[Request]) -> None:
        """Reads and verifies; what is damaged here is taken from the spare copy, which verifies as well."""
        file = self.fragments[key[0]].data_file(key[1])
        assert file is not None
        try:
            self.bytes_read += self._read_blocks(key, file, requests)
            return
        except _C.ChecksumError as error:
            damage = SnapshotDamaged(f"{error}{self._tensors_at(key, int(error.block), file)}")
            damage.__cause__ = error
        except OSError as error:
            damage = SnapshotDamaged(f"'{self.place}/{file.name}' cannot be read: {error}")
            damage.__cause__ = error
        spare = self._spare(self.manifest.attempt) if self._spare is not None else None
        if spare is None or spare.manifest.attempt != self.manifest.attempt:
            raise damage
        if spare.fragments[key[0]].data_file(key[1]) != file:
            raise damage
        spare._ranges(key, requests)
        self.filled.append(f"{damage}; filled from '{spare.place}'")

    def _read_blocks(self, key: FileKey, file: DataFile, requests: list[Request]) -> int:
        """Fills the requests with verified bytes; returns the bytes read. ChecksumError or OSError."""
        return _C.read_ranges(
            self._io,
            self.folder / file.name,
            file.bytes,
            list(file.crc32c),
            requests,
            block_bytes=file.block_bytes,
            threads=4 * self._threads,  # most of them wait for the disk while the others verify
        )

    def _tensors_at(self, key: FileKey, block: int, file: DataFile) -> str:
        if block < 0:
            return ""
        begin, end = block * file.block_bytes, (block + 1) * file.block_bytes
        pieces = [p for p in self.fragments[key[0]].pieces if p.source_step == key[1]]
        names = [p.key for p in pieces if p.file_offset < end and p.file_offset + p.num_bytes > begin]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        return f" (holds {', '.join(names[:4]) or 'the header'}{more})"

    def _open_manifest(self) -> Manifest:
        return read_manifest(self._io, self.folder, self._key)

    def _fetch(self, name: str, num_bytes: int) -> bytes:  # a small file as it lies there
        return _C.read_small(self._io, self.folder / name, num_bytes)

    def _content(self, name: str, stored: bytes) -> bytes:  # what a small file says
        return stored

    def stored_manifest(self) -> bytes:
        """Returns the manifest's bytes, signature included."""
        return _C.read_small(self._io, self.folder / MANIFEST, MAX_JSON_BYTES)

    def stored(self, name: str) -> bytes:
        """Returns a small file of the manifest as it is stored, its digest checked."""
        entry, where = self._entries[name], f"'{self.place}/{name}'"
        try:
            data = self._fetch(name, entry.bytes)
        except OSError as error:
            raise SnapshotDamaged(f"{where} cannot be read: {error}") from error
        if sha256(data) != entry.sha256:
            raise SnapshotDamaged(f"{where} does not have the digest that the manifest says")
        return data

    def _check_files(self, fragment: Fragment) -> None:
        """Checks a rank's data files as its fragment knows them against the manifest."""
        files = fragment.data_files.values()
        listed = {name for name in self._entries if (m := FILE_NAME.fullmatch(name)) and int(m[1]) == fragment.rank}
        held = {part.name for part in fragment.parts} if fragment.parts else {file.name for file in files}
        names = [data_name(fragment.rank)] * (fragment.file is not None) + [base.name for base in fragment.bases]
        if listed != held or [file.name for file in files] != names:
            raise SnapshotDamaged(
                f"'{self.place}': manifest and fragment of rank {fragment.rank} disagree about its data file"
            )
        for file in files:
            self._check_file(file, None if fragment.parts else self._entries[file.name])
        for part in fragment.parts:
            if part != self._entries[part.name]:
                raise SnapshotDamaged(f"'{self.place}/{part.name}': its size or digest is not that of the manifest")

    def _check_file(self, file: DataFile, entry: FileEntry | None) -> None:
        """Sizes and checksums before anything is allocated. entry: None for a file that is stored in parts."""
        legal = 0 < file.block_bytes <= MAX_BLOCK_BYTES and file.block_bytes % BLOCK_UNIT == 0
        blocks = -(-file.bytes // file.block_bytes) if legal else -1
        said = entry is None or (file.bytes, file.digest) == (entry.bytes, entry.sha256)
        if not said or blocks != len(file.crc32c):
            raise SnapshotDamaged(f"'{self.place}/{file.name}': its checksums are not those that the manifest says")
