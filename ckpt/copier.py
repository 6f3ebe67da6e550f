"""Copies committed snapshots to one tier, as one rank.

Not the thread that does it (uploads.py). The one idea: a copy follows the commit order of a local snapshot: each rank
sends its data, reads it back, and then its fragment, which says that it is done; rank 0 has all fragments, puts
objects.json and, last, the manifest. Plain copies have the bytes and digests of the original; coded ones (codec.py)
are the same blocks in parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from plait import _C
from plait.ckpt.codec import PART_BLOCKS, Coder, pack, widths
from plait.ckpt.crypt import Cipher, opened, sealed
from plait.ckpt.errors import SnapshotDamaged, SnapshotError
from plait.ckpt.folders import StepFolder, collect_trash, publish
from plait.ckpt.keep import Policy, retain
from plait.ckpt.manifest import (
    FORMATS,
    MANIFEST,
    OBJECTS,
    RUN,
    DataFile,
    FileEntry,
    Fragment,
    Manifest,
    Run,
    fragment_name,
    from_bytes,
    part_name,
    sha256,
    to_bytes,
)
from plait.ckpt.reader import SnapshotReader
from plait.ckpt.store import CHUNK_BYTES, DirStore, Store, find_copy, read_copy_manifest, retrying
from plait.ckpt.tiers import Launch, Tier

T = TypeVar("T")
_POLL_S = (0.05, 1.0)  # first and longest pause between two looks for other ranks' parts


class Copier:
    """Copies snapshots to one tier, one at a time. Thread rule: one thread."""

    def __init__(self, tier: Tier, store: Store, launch: Launch) -> None:
        self.tier, self.store, self.launch = tier, store, launch
        self.policy = Policy(tier.keep_last, tier.keep_every)
        if tier.encrypt and launch.key is None:
            raise ValueError(f"Tier({str(tier.url)!r}, encrypt=True): give Snapshots a key or key_file")
        self._bytes, self._began = 0, 0.0

    def copy(self, folder: Path) -> str:
        """Copies one step folder as this rank's part of it; returns the folder in the store once it is whole there.

        OSError of the store, SnapshotDamaged of the original, SnapshotError of another rank.
        """
        launch, store = self.launch, self.store
        local = SnapshotReader(folder, launch.io, 1, launch.key)
        attempt = local.manifest.attempt
        done = self._patiently(lambda: find_copy(store, attempt))
        if done is not None:
            return done
        self._bytes, self._began = 0, time.monotonic()
        cipher = launch.key.cipher(attempt) if self.tier.encrypt and launch.key is not None else None
        coder = Coder(self.tier.level, cipher)
        try:
            place = self._patiently(lambda: store.begin(attempt))
            self._send_part(local, place, coder, cipher)
            if launch.rank == 0:
                return self._finish(local, place, coder, cipher)
            return self._until(
                lambda: self._finished(place, attempt), lambda: f"rank 0 did not finish the copy of {attempt}"
            )
        except BaseException as error:
            self._tell(attempt, error)
            raise

    def _send_part(self, local: SnapshotReader, place: str, coder: Coder, cipher: Cipher | None) -> None:
        """Sends this rank's data files, then its fragment."""
        rank = self.launch.rank
        name, fragment = fragment_name(rank), local.fragment(rank)
        stored = local.stored(name)
        if coder.codec is None:
            for step, file in fragment.data_files.items():
                self._send_plain(local, place, step, file)
        else:
            files = fragment.data_files.items()
            parts = tuple(part for step, file in files for part in self._send_coded(local, place, step, file, coder))
            pieces = tuple(replace(piece, codec=coder.codec) for piece in fragment.pieces) if parts else ()
            stored = sealed(name, to_bytes(replace(fragment, pieces=pieces, parts=parts)), cipher)
        self._patiently(lambda: self.store.put(place, name, stored))

    def _send_plain(self, local: SnapshotReader, place: str, step: int | None, file: DataFile) -> None:
        pool = _C.StagingPool(min(file.bytes, CHUNK_BYTES), 1)

        def blocks() -> Iterator[memoryview]:
            for start in range(0, file.bytes, CHUNK_BYTES):
                size = min(CHUNK_BYTES, file.bytes - start)
                local.read_range((self.launch.rank, step), start, size, pool.address)
                self._pace(size, size)
                yield pool.view(0, size)

        def send() -> None:
            self.store.put_stream(place, file.name, file.bytes, blocks)
            if self.tier.verify:
                try:
                    self.store.check(place, file)
                except _C.ChecksumError as error:
                    raise OSError(5, f"read back: {error}", f"{self.store.url}/{place}/{file.name}") from error

        try:
            self._patiently(send)
        finally:
            pool.close()

    def _send_coded(
        self, local: SnapshotReader, place: str, step: int | None, file: DataFile, coder: Coder
    ) -> Iterator[FileEntry]:
        """Sends a data file in parts; yields them as the manifest will know them."""
        rank, size = self.launch.rank, file.block_bytes
        item_bytes = widths(local.fragment(rank), step, file)
        pool = _C.StagingPool(min(file.bytes, PART_BLOCKS * size), 1)

        def encode(block: int, first: int) -> bytes:
            start = (block - first) * size
            raw = pool.view(start, min(size, file.bytes - block * size))
            return coder.encode(f"{file.name}/{block}", raw, item_bytes[block])

        try:
            with ThreadPoolExecutor(self.tier.threads, f"plait-code-{rank}") as workers:
                for number, first in enumerate(range(0, len(file.crc32c), PART_BLOCKS)):
                    blocks = range(first, min(first + PART_BLOCKS, len(file.crc32c)))
                    start = first * size
                    local.read_range((rank, step), start, min(len(blocks) * size, file.bytes - start), pool.address)
                    data = pack(first, list(workers.map(encode, blocks, [first] * len(blocks))))
                    self._pace(len(data), min(len(blocks) * size, file.bytes - start))
                    name = part_name(rank, step, number)
                    self._patiently(lambda n=name, d=data: self._send_part_file(place, n, d))  # type: ignore[misc]
                    yield FileEntry(name, len(data), sha256(data))
        finally:
            pool.close()

    def _send_part_file(self, place: str, name: str, data: bytes) -> None:
        self.store.put(place, name, data)
        if self.tier.verify and self.store.get(place, name, 0, len(data)) != data:
            raise OSError(5, "read back: other bytes than were sent", f"{self.store.url}/{place}/{name}")

    def _finish(self, local: SnapshotReader, place: str, coder: Coder, cipher: Cipher | None) -> str:
        """Rank 0: waits for all parts, puts the rest and the manifest, then removes what the policy gives up."""
        launch, store, manifest = self.launch, self.store, local.manifest
        self._until(lambda: self._all_there(place), lambda: f"not all ranks sent their part of {manifest.attempt}")
        objects = local.stored(OBJECTS)
        if coder.codec is None:
            ending = local.stored_manifest()
        else:
            objects = sealed(OBJECTS, objects, cipher)
            entries = [FileEntry(OBJECTS, len(objects), sha256(objects))]
            for rank in range(launch.world_size):
                entries += self._entries(place, rank, cipher)
            coded = replace(manifest, files=tuple(sorted(entries, key=lambda entry: entry.name)))
            ending = to_bytes(coded, launch.key)
            manifest = coded
        self._patiently(lambda: store.put(place, OBJECTS, objects))
        there = self._patiently(lambda: store.files(place))
        for entry in manifest.files:
            if there.get(entry.name) != entry.bytes:
                raise SnapshotError(
                    f"'{store.url}/{place}/{entry.name}' has {there.get(entry.name)} of {entry.bytes} bytes"
                )
        done = self._patiently(lambda: find_copy(store, manifest.attempt) or store.finish(manifest.attempt, ending))
        self._retain(manifest, done)
        return done

    def _entries(self, place: str, rank: int, cipher: Cipher | None) -> list[FileEntry]:
        """Reads a rank's fragment back; returns what it adds to the manifest."""
        name = fragment_name(rank)
        size = self._patiently(lambda: self.store.files(place))[name]
        stored = self._patiently(lambda: self.store.get(place, name, 0, size))
        where = f"'{self.store.url}/{place}/{name}'"
        fragment = from_bytes(Fragment, opened(name, stored, cipher, where), where)
        return [FileEntry(name, len(stored), sha256(stored)), *fragment.parts]

    def _retain(self, manifest: Manifest, done: str) -> None:
        """Removes what the policy gives up, and the remains of attempts that all ranks are past."""
        launch, store = self.launch, self.store
        copies = store.steps()
        written = next(StepFolder(s, g, Path(f)) for s, g, f in copies if f == done)
        if isinstance(store, DirStore):
            assert store.local is not None
            here = StepFolder(written.step, written.generation, store.local / done)
            if not (store.local / RUN).exists():  # so that it is a root like any other, of the same run
                publish(launch.io, store.local / RUN, to_bytes(Run(FORMATS[Run], manifest.run)))
            retain(launch.io, store.local, self.policy, here, launch.run, launch.session)
            collect_trash(launch.io, store.local)
        else:
            ours = [StepFolder(s, g, Path(f)) for s, g, f in copies if self._is_ours(f)]
            for old in self.policy.given_up(ours, written):
                self._remove(str(old.path))
        number = int(manifest.attempt.rpartition("-")[2])
        for attempt in store.unfinished():
            _, session, sequence = attempt.split("-")
            if session != launch.session or int(sequence) < number:
                self._remove(store.begin(attempt))

    def _is_ours(self, folder: str) -> bool:
        """True for a good copy of this run; others are left for people to look at."""
        try:
            return read_copy_manifest(self.store, folder).run == self.launch.run
        except SnapshotDamaged:
            return False

    def _remove(self, folder: str) -> None:
        names = sorted(self.store.files(folder), key=lambda name: (name != MANIFEST, name))
        self.store.remove(folder, names)

    def _all_there(self, place: str) -> bool | None:
        there = self.store.files(place)
        for name in sorted(there):
            if name.endswith(".error") and name != "abort.error":
                text = self.store.get(place, name, 0, there[name]).decode(errors="replace")
                raise SnapshotError(f"rank {int(name[1:-6])} could not send its part: {text}")
        return True if all(fragment_name(r) in there for r in range(self.launch.world_size)) else None

    def _finished(self, place: str, attempt: str) -> str | None:
        there = self.store.files(place)
        if "abort.error" in there:
            raise SnapshotError(
                self.store.get(place, "abort.error", 0, there["abort.error"]).decode(errors="replace")
            )
        return find_copy(self.store, attempt)

    def _tell(self, attempt: str, error: BaseException) -> None:
        """Tells the other ranks why this one stopped; they would wait for it."""
        if self.launch.world_size == 1:
            return
        rank = self.launch.rank
        try:
            name = f"r{rank:05d}.error" if rank else "abort.error"
            self.store.put(self.store.begin(attempt), name, str(error).encode())
        except OSError as later:
            error.add_note(f"and the other ranks could not be told: {later}")

    def _patiently(self, call: Callable[[], T]) -> T:
        return retrying(call, self.tier.retry_s, self.launch.stop)

    def _until(self, look: Callable[[], T | None], late: Callable[[], str]) -> T:
        """Looks until there is an answer; SnapshotError with `late()` after the time limit."""
        deadline, pause = time.monotonic() + self.launch.timeout_s + self.tier.retry_s, _POLL_S[0]
        while (found := self._patiently(look)) is None:
            if time.monotonic() > deadline or self.launch.stop.wait(pause):
                raise SnapshotError(f"{late()} ('{self.store.url}')")
            pause = min(2 * pause, _POLL_S[1])
        return found

    def _pace(self, num_bytes: int, plain_bytes: int) -> None:
        """Waits so that no more than rate_limit bytes a second are sent. plain_bytes: what they are before coding."""
        self._bytes += num_bytes
        if self.tier.rate_limit:
            self.launch.stop.wait(max(0.0, self._began + self._bytes / self.tier.rate_limit - time.monotonic()))
