"""Copies one snapshot, of any number of ranks, to a folder or a URL: one process does every rank's part.

Not the copies that a run makes while it trains (uploads.py). The one idea: the same copier, one rank after the other;
a source that is itself coded is decoded on the way, so that what arrives depends on the target's choice alone.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from plait import _C
from plait.ckpt.codec import Coder
from plait.ckpt.copier import Copier
from plait.ckpt.crypt import Key
from plait.ckpt.errors import SnapshotError
from plait.ckpt.manifest import (
    OBJECTS,
    RUN,
    FileEntry,
    Fragment,
    Manifest,
    Run,
    fragment_name,
    from_bytes,
    sha256,
    to_bytes,
)
from plait.ckpt.read_plan import FileKey
from plait.ckpt.reader import SnapshotReader
from plait.ckpt.store import DirStore, find_copy
from plait.ckpt.tier_reader import TierReader
from plait.ckpt.tiers import Launch, Tier

_MAX_RUN_BYTES = 4096


def copy_whole(reader: SnapshotReader, tier: Tier, key: Key | None, sent: list[int]) -> tuple[str, bool]:
    """Copies an opened snapshot as `tier` says; returns "url/folder" of the copy, and False where one was there
    already, which was not looked at.

    sent: its first item grows by the bytes sent, as they were before coding. SnapshotLocked when a job copies into
    that folder, SnapshotError when it belongs to another run, OSError of the store, SnapshotDamaged of the original.
    """
    session, io, manifest = f"{secrets.randbits(64):016x}", _C.PosixIo(), reader.manifest
    store = tier.store(io, session)
    source = _Decoded(reader, key) if isinstance(reader, TierReader) else reader
    launch = Launch(0, manifest.world_size, session, io, key, manifest.run, 600.0, threading.Event())
    whole = _Whole(tier, store, launch)
    with _owned(store, manifest):
        there = find_copy(store, manifest.attempt)
        return f"{store.url}/{there or whole.copy_all(source, sent)}", there is None


@contextmanager
def _owned(store: object, manifest: Manifest) -> Iterator[None]:
    """Holds the LOCK of a directory; an object store has none."""
    if not isinstance(store, DirStore):
        yield
        return
    assert store.local is not None
    lock, path = store.lock(), store.local / RUN
    try:
        if path.exists():
            run = from_bytes(Run, _C.read_small(_C.PosixIo(), path, _MAX_RUN_BYTES), f"'{path}'").run
            if run != manifest.run:
                raise SnapshotError(f"'{store.local}' belongs to run {run}, the snapshot to run {manifest.run}")
        yield
    finally:
        lock.close()


class _Whole(Copier):
    """A copier that is every rank in turn."""

    def copy_all(self, source: SnapshotReader | _Decoded, sent: list[int]) -> str:
        """Copies all parts, then commits; returns the folder in the store."""
        attempt, launch = source.manifest.attempt, self.launch
        self._sent = sent
        cipher = launch.key.cipher(attempt) if self.tier.encrypt and launch.key is not None else None
        coder = Coder(self.tier.level, cipher)
        place = self._patiently(lambda: self.store.begin(attempt))
        try:
            for rank in range(launch.world_size):
                self.launch = replace(launch, rank=rank)
                self._send_part(source, place, coder, cipher)  # type: ignore[arg-type]
            self.launch = launch
            return self._finish(source, place, coder, cipher)  # type: ignore[arg-type]
        except BaseException:
            if isinstance(self.store, DirStore):  # no run looks after that folder, and its disk may be full
                with suppress(OSError):
                    self.store.remove(place, list(self.store.files(place)))
            raise

    def _pace(self, num_bytes: int, plain_bytes: int) -> None:
        super()._pace(num_bytes, plain_bytes)
        self._sent[0] += plain_bytes


class _Decoded:
    """A copy, coded or in a store, as the plain snapshot that it was made from: what a Copier asks of its source.

    The manifest is signed again, with the key; without one, a copy that was coded loses its signature.
    """

    def __init__(self, reader: SnapshotReader, key: Key | None) -> None:
        self._reader, self._key = reader, key
        self._small = {OBJECTS: reader._content(OBJECTS, reader.stored(OBJECTS))}
        entries = []
        for fragment in reader.fragments:
            pieces = tuple(replace(piece, codec=None) for piece in fragment.pieces)
            plain = replace(fragment, pieces=pieces, parts=())
            self._small[fragment_name(fragment.rank)] = to_bytes(plain)
            entries += [FileEntry(f.name, f.bytes, f.digest) for f in fragment.data_files.values()]
        entries += [FileEntry(name, len(data), sha256(data)) for name, data in self._small.items()]
        self.manifest = replace(reader.manifest, files=tuple(sorted(entries, key=lambda entry: entry.name)))

    def fragment(self, rank: int) -> Fragment:
        name = fragment_name(rank)
        return from_bytes(Fragment, self._small[name], f"'{self._reader.place}/{name}'")

    def stored(self, name: str) -> bytes:
        return self._small[name]

    def stored_manifest(self) -> bytes:
        return to_bytes(self.manifest, self._key)

    def read_range(self, file: FileKey, offset: int, num_bytes: int, address: int) -> None:
        self._reader.read_range(file, offset, num_bytes, address)
