"""Where copies of snapshots lie: a store of folders with files, put whole and read by ranges; here, a directory.

Not a file system: no appends, no seeks, nothing is changed in place. The one idea: a copy is written into a place of
its own and exists from one act on (here a rename, elsewhere the put of its manifest, which comes last), so that a
store that dies at any moment holds whole copies and remains that have no name. remote.py and partner.py have others.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

from plait import _C
from plait.ckpt.crypt import Key
from plait.ckpt.errors import SnapshotDamaged, naming
from plait.ckpt.folders import (
    PART,
    announce,
    attempt_folder,
    make_folder,
    next_generation,
    parse_step,
    publish,
    remove_shared,
    step_folders,
    step_name,
)
from plait.ckpt.lock import RootLock
from plait.ckpt.manifest import MANIFEST, MAX_JSON_BYTES, DataFile, Manifest, from_bytes

T = TypeVar("T")
Blocks = Callable[[], Iterable[memoryview]]  # a file's bytes in order; called again for another try
CHUNK_BYTES = 16 << 20  # what is held of a file at once while it is copied
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0  # between tries: doubled each time


class Source(Protocol):
    """A place to read copies from. Every method may be called from any thread; what the machine refuses is an OSError
    that names operation and url. A folder is a name; what is in it is whole and durable."""

    url: str
    local: Path | None  # the directory, where it is one

    def steps(self) -> list[tuple[int, int, str]]:
        """Returns (step, generation, folder) of finished copies, newest first."""
        ...

    def files(self, folder: str) -> dict[str, int]:
        """Returns {name: bytes} of a folder; empty when there is none."""
        ...

    def get(self, folder: str, name: str, start: int, stop: int) -> bytes:
        """Returns bytes [start, stop) of a file; OSError when they are not all there."""
        ...


class Store(Source, Protocol):
    """A place of copies: files appear one by one, each whole and durable."""

    def unfinished(self) -> list[str]:
        """Returns the attempts ("STEP-SESSION-SEQUENCE") of copies that are not finished."""
        ...

    def begin(self, attempt: str) -> str:
        """Makes room for a copy; returns its folder. Several ranks may call it."""
        ...

    def finish(self, attempt: str, manifest: bytes) -> str:
        """Puts the manifest, last of all, after which the copy exists. Returns its folder."""
        ...

    def put(self, folder: str, name: str, data: bytes) -> None: ...

    def put_stream(self, folder: str, name: str, num_bytes: int, blocks: Blocks) -> None: ...

    def remove(self, folder: str, names: Sequence[str]) -> None:
        """Removes these files in this order, then the folder."""
        ...

    def check(self, folder: str, file: DataFile) -> None:
        """Reads a plain data file back. ChecksumError or OSError when it is not as it was sent."""
        ...


class DirStore:
    """A directory, with the commit order of a local root: a finished, plain copy is a snapshot like any other."""

    def __init__(self, path: Path, io: _C.Io, session: str) -> None:
        self.local: Path | None = path.absolute()
        self.url, self._root = str(path.absolute()), path.absolute()
        self._io, self._session = io, session

    def lock(self) -> RootLock:
        """Takes the LOCK of the directory: one job copies into it."""
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        return RootLock(self._root, self._session)

    def steps(self) -> list[tuple[int, int, str]]:
        return [(f.step, f.generation, f.path.name) for f in step_folders(self._root)]

    def unfinished(self) -> list[str]:
        if not self._root.is_dir():
            return []
        names = [name.removeprefix(".tmp-") for name in sorted(os.listdir(self._root)) if name.startswith(".tmp-")]
        return [name for name in names if name.partition("-")[0].isdigit()]

    def begin(self, attempt: str) -> str:
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = attempt_folder(self._root, attempt)
        make_folder(self._io, folder)
        return folder.name

    def finish(self, attempt: str, manifest: bytes) -> str:
        folder = attempt_folder(self._root, attempt)
        publish(self._io, folder / MANIFEST, manifest)
        step = int(attempt.partition("-")[0])
        final = self._root / step_name(step, next_generation(self._root, step))
        _C.rename(self._io, folder, final)
        _C.fsync_dir(self._io, self._root)
        return final.name

    def files(self, folder: str) -> dict[str, int]:
        sizes: dict[str, int] = {}
        with suppress(FileNotFoundError), os.scandir(self._root / folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another rank renamed or removed it since it was listed
                    if entry.is_file():
                        sizes[entry.name] = entry.stat().st_size
        return sizes

    def put(self, folder: str, name: str, data: bytes) -> None:
        announce(self._io, self._root / folder / name, data)

    def put_stream(self, folder: str, name: str, num_bytes: int, blocks: Blocks) -> None:
        path = self._root / folder / name
        part = path.with_name(name + PART)
        remove_shared(self._io, part)  # of an earlier try: what a failed sync left is never synced again
        free = _C.free_bytes(self._io, path.parent)
        if free < num_bytes:
            raise OSError(28, f"write: {num_bytes} bytes are needed, {free} are free", str(path))
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            at = 0
            for block in blocks():
                while block:
                    written = os.pwrite(fd, block, at)
                    at, block = at + written, block[written:]
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # what is read back comes from the disk
        except OSError as error:
            raise OSError(error.errno, f"write '{part}': {error.strerror}") from error
        finally:
            os.close(fd)
        _C.rename(self._io, part, path)
        _C.fsync_dir(self._io, path.parent)

    def discard(self, folder: str, name: str) -> None:
        """Removes a file of an attempt, whole or not; nothing when it is not there."""
        for path in (self._root / folder / (name + PART), self._root / folder / name):
            remove_shared(self._io, path)

    def get(self, folder: str, name: str, start: int, stop: int) -> bytes:
        path = self._root / folder / name
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            parts: list[bytes] = []
            with naming("read", path):
                while start < stop and (data := os.pread(fd, stop - start, start)):
                    parts.append(data)
                    start += len(data)
        finally:
            os.close(fd)
        if start < stop:
            raise OSError(5, f"read: ends at byte {start} of {stop}", str(path))
        return b"".join(parts)

    def remove(self, folder: str, names: Sequence[str]) -> None:
        path = self._root / folder
        if parse_step(path) is not None:  # loses its name first
            trash = self._root / f".trash-{self._session}-{folder}"
            _C.rename(self._io, path, trash)
            _C.fsync_dir(self._io, self._root)
            path = trash
        for name in names:
            remove_shared(self._io, path / name)
        _C.rmdir(self._io, path)

    def check(self, folder: str, file: DataFile) -> None:
        """Reads a plain data file back, past the page cache where the disk allows. ChecksumError or OSError."""
        pool = _C.StagingPool(min(file.bytes, CHUNK_BYTES), 1)
        try:
            for start in range(0, file.bytes, CHUNK_BYTES):
                request = (start, min(CHUNK_BYTES, file.bytes - start), pool.address)
                path = self._root / folder / file.name
                crcs = list(file.crc32c)
                _C.read_ranges(self._io, path, file.bytes, crcs, [request], block_bytes=file.block_bytes, threads=1)
        finally:
            pool.close()


def read_copy_manifest(store: Source, folder: str, key: Key | None = None) -> Manifest:
    """Returns the manifest of a finished copy. SnapshotDamaged when it is none, OSError when it cannot be had."""
    where = f"'{store.url}/{folder}/{MANIFEST}'"
    size = store.files(folder).get(MANIFEST)
    if size is None or size > MAX_JSON_BYTES:
        raise SnapshotDamaged(f"{where}: {'is missing' if size is None else f'has {size} bytes'}")
    return from_bytes(Manifest, store.get(folder, MANIFEST, 0, size), where, key)


def find_copy(store: Source, attempt: str) -> str | None:
    """Returns the folder of a finished copy of an attempt, or None."""
    step = int(attempt.partition("-")[0])
    for found, _, folder in store.steps():
        if found == step:
            try:
                if read_copy_manifest(store, folder).attempt == attempt:
                    return folder
            except (SnapshotDamaged, FileNotFoundError):
                continue
    return None


def read_attempt(io: _C.Io, folder: Path) -> str | None:
    """Returns the attempt of a step folder's manifest; None when it has no good one."""
    try:
        path = folder / MANIFEST
        return from_bytes(Manifest, _C.read_small(io, path, MAX_JSON_BYTES), f"'{path}'").attempt
    except (SnapshotDamaged, FileNotFoundError):
        return None


def retrying(call: Callable[[], T], retry_s: float, stop: threading.Event) -> T:
    """Calls until it works; an OSError is tried again after a pause, doubled from 0.2 s to 30 s, until `retry_s` are
    over or `stop` is set. What waiting cannot cure (absent, refused, disk full) is raised at once."""
    deadline, pause = time.monotonic() + retry_s, _FIRST_PAUSE_S
    while True:
        try:
            return call()
        except (FileNotFoundError, PermissionError, FileExistsError):
            raise
        except OSError as error:
            full = error.errno in (28, 122)  # ENOSPC, EDQUOT
            if full or time.monotonic() + pause > deadline or stop.wait(pause):
                raise
        pause = min(2 * pause, _LONGEST_PAUSE_S)
