"""Reads a snapshot out of a store, plain or coded: the same reader, whose blocks come from elsewhere.

Not a download: only the blocks that a target touches are fetched, each verified by the CRC32C of the plain file as it
arrives; memory is bounded by the chunks in flight.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from plait import _C
from plait.ckpt.codec import HEAD_BYTES, PART_BLOCKS, coder_of, unpack
from plait.ckpt.crypt import Cipher, Key, opened
from plait.ckpt.errors import SnapshotDamaged, SnapshotSealed
from plait.ckpt.manifest import FILE_NAME, MANIFEST, MAX_JSON_BYTES, DataFile, Manifest, part_name, sha256
from plait.ckpt.read_plan import FileKey
from plait.ckpt.reader import SnapshotReader, check_names
from plait.ckpt.store import CHUNK_BYTES, DirStore, Source, read_copy_manifest
from plait.ckpt.windows import Request


class TierReader(SnapshotReader):
    """One finished copy in a store. SnapshotDamaged and OSError from any method."""

    def __init__(
        self,
        store: Source,
        folder: str,
        threads: int = 4,
        key: Key | None = None,
        spare: Callable[[str], SnapshotReader | None] | None = None,
    ) -> None:
        self._store, self._place = store, folder
        self._sizes = store.files(folder)
        self._heads: dict[str, list[tuple[int, int]]] = {}
        super().__init__(Path(store.url) / folder, None, threads, key, spare)
        self._cipher: Cipher | None = None if key is None else key.cipher(self.manifest.attempt)

    @property
    def location(self) -> Path | str:
        return self.folder if self._store.local is not None else f"{self._store.url}/{self._place}"

    def verify(self, rank: int) -> list[str]:
        """As of any snapshot, and each part by its digest: also bytes that no decoder looks at."""
        damage = super().verify(rank)
        for part in self.fragments[rank].parts:
            if sha256(self._store.get(self._place, part.name, 0, part.bytes)) != part.sha256:
                damage.append(f"'{self.place}/{part.name}' does not have the digest that the manifest says")
        return damage

    def _open_manifest(self) -> Manifest:
        where = f"'{self._store.url}/{self._place}'"
        manifest = read_copy_manifest(self._store, self._place, self._key)
        check_names(manifest, where)
        for entry in manifest.files:
            size = self._sizes.get(entry.name)
            if size is None:
                raise SnapshotDamaged(f"'{self.place}/{entry.name}' is missing")
            if size != entry.bytes:
                raise SnapshotDamaged(
                    f"'{self.place}/{entry.name}' has {size} bytes, the manifest says {entry.bytes}"
                )
        return manifest

    def stored_manifest(self) -> bytes:
        """Returns the manifest's bytes, signature included."""
        return self._store.get(self._place, MANIFEST, 0, min(self._sizes[MANIFEST], MAX_JSON_BYTES))

    def _fetch(self, name: str, num_bytes: int) -> bytes:
        if num_bytes > MAX_JSON_BYTES:
            raise SnapshotDamaged(f"'{self.place}/{name}' has {num_bytes} bytes")
        return self._store.get(self._place, name, 0, num_bytes)

    def _content(self, name: str, stored: bytes) -> bytes:
        return opened(name, stored, self._cipher, f"'{self._store.url}/{self._place}/{name}'")

    def _read_blocks(self, key: FileKey, file: DataFile, requests: list[Request]) -> int:
        """Fetches the touched blocks in runs, several at once, and copies out of each what was asked for."""
        runs = list(_runs(file, requests, PART_BLOCKS * file.block_bytes))
        fetch = self._fetch_coded if self.fragments[key[0]].parts else self._fetch_plain

        def serve(run: tuple[int, int]) -> int:
            count = 0
            for block, data in fetch(key, file, *run):
                if _C.crc32c(data) != file.crc32c[block]:
                    error = _C.ChecksumError(f"'{self.place}/{file.name}': block {block} has another CRC32C")
                    error.path, error.block = f"{self.place}/{file.name}", block  # as the C++ reader says it
                    raise error
                _copy_out(data, block * file.block_bytes, requests)
                count += len(data)
            return count

        with ThreadPoolExecutor(self._threads, "plait-tier-read") as workers:
            return sum(workers.map(serve, runs))

    def _fetch_plain(self, key: FileKey, file: DataFile, first: int, stop: int) -> Iterator[tuple[int, bytes]]:
        size = file.block_bytes
        data = self._store.get(self._place, file.name, first * size, min(stop * size, file.bytes))
        for block in range(first, stop):
            yield block, data[(block - first) * size : (block - first + 1) * size]

    def _fetch_coded(self, key: FileKey, file: DataFile, first: int, stop: int) -> Iterator[tuple[int, bytes]]:
        fragment = self.fragments[key[0]]
        if not fragment.pieces:
            raise SnapshotDamaged(f"'{self.folder / file.name}': is stored in parts, and the rank has no pieces")
        coder = coder_of(fragment.pieces[0].codec, self._cipher)
        for block in range(first, stop):
            name = part_name(key[0], key[1], block // PART_BLOCKS)
            where = f"'{self._store.url}/{self._place}/{name}': block {block}"
            if coder.codec != fragment.pieces[0].codec:
                raise SnapshotSealed(f"{where}: is encrypted, and no key was given")
            start, end = self._part(file, name, block // PART_BLOCKS)[block % PART_BLOCKS]
            coded = self._store.get(self._place, name, start, end)
            plain = min(file.block_bytes, file.bytes - block * file.block_bytes)
            yield block, bytes(coder.decode(f"{file.name}/{block}", coded, plain, where))

    def _part(self, file: DataFile, name: str, number: int) -> list[tuple[int, int]]:
        """Returns where the blocks of a part lie, from its header, which is fetched once."""
        if name not in self._heads:
            first = number * PART_BLOCKS
            blocks = range(first, min(first + PART_BLOCKS, len(file.crc32c)))
            plain = [min(file.block_bytes, file.bytes - b * file.block_bytes) for b in blocks]
            where = f"'{self._store.url}/{self._place}/{name}'"
            size = self._sizes.get(name, 0)
            if size < HEAD_BYTES:
                raise SnapshotDamaged(f"{where}: has {size} bytes")
            head = self._store.get(self._place, name, 0, HEAD_BYTES)
            self._heads[name] = unpack(head, size, first, plain, where)
        return self._heads[name]


def open_folder(
    folder: Path,
    io: _C.Io | None = None,
    threads: int = 2,
    key: Key | None = None,
    spare: Callable[[str], SnapshotReader | None] | None = None,
) -> SnapshotReader:
    """Opens a step folder on a disk, plain or coded. SnapshotDamaged, also for an encrypted one without its key."""
    store = DirStore(folder.parent, io or _C.PosixIo(), "")
    if any((m := FILE_NAME.fullmatch(name)) and m[2] for name in store.files(folder.name)):
        return TierReader(store, folder.name, threads, key, spare)
    return SnapshotReader(folder, io, threads, key, spare)


def _runs(file: DataFile, requests: list[Request], most_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields [first, stop) of the blocks that the requests touch, each block once, in runs of at most CHUNK_BYTES."""
    touched: set[int] = set()
    for offset, num_bytes, _ in requests:
        if num_bytes:
            touched.update(range(offset // file.block_bytes, (offset + num_bytes - 1) // file.block_bytes + 1))
    longest = max(1, min(most_bytes, CHUNK_BYTES) // file.block_bytes)
    first = last = -1
    for block in sorted(touched):
        if first >= 0 and (block != last + 1 or block - first >= longest):
            yield first, last + 1
            first = block
        first = block if first < 0 else first
        last = block
    if first >= 0:
        yield first, last + 1


def _copy_out(data: bytes, at: int, requests: list[Request]) -> None:
    """Copies the part of a block (at byte `at` of the file) that each request wants to its address."""
    for offset, num_bytes, address in requests:
        start, stop = max(offset, at), min(offset + num_bytes, at + len(data))
        if start < stop:
            ctypes.memmove(address + start - offset, data[start - at : stop - at], stop - start)
