"""Copies in the memory of another node: each rank's data file also goes into the partner's root, over TCP.

For roots in node-local memory (a tmpfs folder a node, `Snapshots(store=..., partner=Partner(...))`): files there
outlive the training processes, and the loss of one node loses no byte. Not a replica of everything: each data file is
in two roots. The one idea: the partner has the file before the fragment says that this rank is done, so what is
committed can be read after either node is gone; who needs a file asks the ranks that have it, and its checksums prove
it.
"""

from __future__ import annotations

import json
import secrets
import select
import socket
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait import _C
from plait.ckpt.disks import place_of
from plait.ckpt.errors import SnapshotDamaged, SnapshotError
from plait.ckpt.manifest import (
    FILE_NAME,
    MANIFEST,
    MAX_JSON_BYTES,
    DataFile,
    FileEntry,
    Manifest,
    from_bytes,
    sha256,
)
from plait.ckpt.peer_server import MAX_LINE, Server
from plait.ckpt.store import CHUNK_BYTES, Blocks, DirStore


@dataclass(frozen=True)
class Partner:
    """host: the address of this node that the other ranks reach. shift: rank r has its copy with rank r + shift,
    whose root must be another one; None: with the rank in its place at the next root. timeout_s: of one connection
    that says nothing."""

    host: str
    shift: int | None = None
    timeout_s: float = 60.0


def partners(places: Sequence[str], shift: int | None) -> list[int]:
    """Returns the rank that keeps the copies of each rank. places: where the root of each rank is.

    ValueError when a copy would be in the same root as what it is a copy of.
    """
    world_size = len(places)
    homes = list(dict.fromkeys(places))
    if len(homes) == 1:
        raise ValueError("Partner: all ranks have one root, so that there is no other node for a copy")
    if shift is None:
        ranks = [[rank for rank, place in enumerate(places) if place == home] for home in homes]
        found = []
        for rank, place in enumerate(places):
            at = homes.index(place)
            there = ranks[(at + 1) % len(homes)]
            found.append(there[ranks[at].index(rank) % len(there)])
        return found
    found = [(rank + shift) % world_size for rank in range(world_size)]
    for rank, other in enumerate(found):
        if places[rank] == places[other]:
            raise ValueError(
                f"Partner(shift={shift}): ranks {rank} and {other} have one root, where a copy is lost with the "
                "original; shift=None chooses by the roots"
            )
    return found


class PeerStore:
    """The root of one rank, from another one. address: [host, port, token, place]."""

    def __init__(self, address: Sequence[Any], timeout_s: float) -> None:
        self._host, self._port, self._token = str(address[0]), int(address[1]), str(address[2])
        self._timeout_s = timeout_s
        self.url = f"tcp://{self._host}:{self._port}"

    def steps(self) -> list[tuple[int, int, str]]:
        return [(int(s), int(g), str(f)) for s, g, f in self._ask({"op": "steps"})[0]["steps"]]

    def files(self, folder: str) -> dict[str, int]:
        files: dict[str, int] = self._ask({"op": "files", "folder": folder})[0]["files"]
        return files

    def get(self, folder: str, name: str, start: int, stop: int) -> bytes:
        parts = []
        for at in range(start, stop, CHUNK_BYTES):
            end = min(stop, at + CHUNK_BYTES)
            parts.append(self._ask({"op": "get", "folder": folder, "name": name, "start": at, "stop": end})[1])
        return b"".join(parts)

    def put_stream(self, folder: str, name: str, num_bytes: int, blocks: Blocks) -> None:
        self._ask({"op": "put", "folder": folder, "name": name, "start": 0, "stop": num_bytes}, blocks)

    def _ask(self, request: dict[str, Any], blocks: Blocks | None = None) -> tuple[dict[str, Any], bytes]:
        """One request on one connection. OSError that names the peer."""
        what = f"{request['op']} '{self.url}/{request.get('folder', '')}/{request.get('name', '')}'"
        try:
            with socket.create_connection((self._host, self._port), self._timeout_s) as connection:
                connection.sendall(json.dumps({**request, "token": self._token}).encode() + b"\n")
                answered = select.poll()
                answered.register(connection, select.POLLIN)
                for block in blocks() if blocks is not None else ():
                    if answered.poll(0):  # before it has all: a refusal
                        break
                    connection.sendall(block)
                with connection.makefile("rb") as answer:
                    head = json.loads(answer.readline(MAX_LINE))
                    data = answer.read(int(head["bytes"]))
        except (ValueError, KeyError, OSError, RecursionError) as error:
            raise OSError(getattr(error, "errno", None) or 5, f"{what}: {error}") from error
        if "error" in head:
            raise OSError(int(head["errno"]), f"{what}: {head['error']}")
        if len(data) != head["bytes"]:
            raise OSError(5, f"{what}: {len(data)} of {head['bytes']} bytes came")
        return head, data


class Peers:
    """This rank's server, and the way to the others. Made on all ranks together; `close` ends the server.

    store: the torch.distributed Store of Disks, through which addresses and tokens are told.
    """

    def __init__(
        self, partner: Partner, store: Any, root: Path, io: _C.Io, session: str, rank: int, world_size: int
    ) -> None:
        if partner.shift is not None and not 0 < partner.shift < world_size:
            raise ValueError(f"Partner(shift={partner.shift}): must be in 1 .. world_size - 1 = {world_size - 1}")
        self._own, self._rank = DirStore(root, io, session), rank
        token = secrets.token_hex(16)
        server = Server(partner.host, self._own, token, partner.timeout_s)
        self._thread = threading.Thread(target=server.serve, name=f"plait-peers-{rank}", daemon=True)
        self._thread.start()
        self._taken = server.taken
        self._end = weakref.finalize(self, server.end)  # also when the ranks do not come together
        prefix = f"plait/{session}/peer"
        store.set(f"{prefix}/{rank}", json.dumps([partner.host, server.server_address[1], token, place_of(root)]))
        addresses = [json.loads(store.get(f"{prefix}/{other}")) for other in range(world_size)]
        self._homes = [str(address[3]) for address in addresses]
        self._target = partners(self._homes, partner.shift)[rank]
        self._peers = [PeerStore(address, partner.timeout_s) for address in addresses]

    def send(self, folder: Path, files: Sequence[DataFile]) -> None:
        """Copies data files of an attempt into the same attempt of the partner. Verified as they are read here, and
        by their size there; a connection that breaks is an error of the save."""
        target = self._peers[self._target]
        for file in files:
            target.put_stream(folder.name, file.name, file.bytes, lambda f=file: _blocks(folder, f))  # type: ignore[misc]
            there = target.files(folder.name).get(file.name)
            if there != file.bytes:
                raise SnapshotError(f"'{target.url}/{folder.name}/{file.name}' has {there} of {file.bytes} bytes")

    def unions(self) -> list[Union]:
        """Returns all roots as one place: first with the own root preferred, then with the others."""
        there = {place: peer for peer, place in zip(reversed(self._peers), reversed(self._homes), strict=True)}
        del there[self._homes[self._rank]]
        others = list(there.values())  # the first rank of each other root
        return [Union([self._own, *others]), Union([*others, self._own])]

    def give_up(self, folder: Path, reason: str) -> None:
        """Removes what other ranks sent into an attempt that will not be committed, and refuses what still comes."""
        self._taken.give_up(folder.name, reason)

    def close(self) -> None:
        """Ends the server; connections that are served end by themselves. Again does nothing."""
        self._end()
        self._thread.join()


def join_peers(
    partner: Partner | None, store: Any, root: Path, io: _C.Io, session: str, rank: int, world_size: int
) -> Peers | None:
    """Returns what `partner` asks for; None when it is None."""
    if partner is None:
        return None
    if store is None:
        raise ValueError("partner: ranks find each other through a store; give Snapshots one")
    return Peers(partner, store, root, io, session, rank, world_size)


_Copy = tuple[int, DirStore | PeerStore]  # bytes of a file, and whose it is


class Union:
    """Several roots as one store for reading. Of each file that root counts, the nearest first, where it has the size
    and (a small one) the digest of the manifest; of several manifests the one that most of the files there fit.

    steps() is what is in any root, whole or not, and the same on all ranks as long as nobody writes, as in a restore:
    who opens a snapshot says what is missing.
    """

    url = "peers:"
    local: Path | None = None

    def __init__(self, places: Sequence[DirStore | PeerStore]) -> None:
        self._places = places
        self._folders: dict[str, _Folder] = {}

    def steps(self) -> list[tuple[int, int, str]]:
        return sorted({step for place in self._places for step in place.steps()}, reverse=True)

    def files(self, folder: str) -> dict[str, int]:
        found = self._folders[folder] = _Folder(folder, self._places)
        return {name: copies[0][0] for name, copies in found.copies.items()}

    def get(self, folder: str, name: str, start: int, stop: int) -> bytes:
        if folder not in self._folders:
            self.files(folder)
        return self._folders[folder].get(name, start, stop)


class _Folder:
    """One snapshot in several roots. copies: (bytes, root) of each file, the one to read first."""

    def __init__(self, name: str, places: Sequence[DirStore | PeerStore]) -> None:
        self._name, self._wanted = name, dict[str, FileEntry]()
        self.copies: dict[str, list[_Copy]] = {}
        for place in places:
            for file, size in place.files(name).items():
                self.copies.setdefault(file, []).append((size, place))
        best = max((m for m in map(self._manifest, self.copies.get(MANIFEST, ())) if m is not None), default=None)
        if best is not None:
            *_, at, self._wanted = best
            copies = self.copies[MANIFEST]
            copies.insert(0, copies.pop(-at))
        for file, entry in self._wanted.items():
            self.copies.get(file, []).sort(key=lambda copy, entry=entry: copy[0] != entry.bytes)  # type: ignore[misc]

    def _manifest(self, copy: _Copy) -> tuple[int, int, str, int, dict[str, FileEntry]] | None:
        """Returns how many files here fit the manifest of one root, its epoch and attempt, minus its place, and its
        files; None when it is none."""
        size, place = copy
        try:
            data = place.get(self._name, MANIFEST, 0, min(size, MAX_JSON_BYTES + 1))
            manifest = from_bytes(Manifest, data, MANIFEST)
        except (SnapshotDamaged, OSError):
            return None  # where all are, the reader says why
        wanted = {entry.name: entry for entry in manifest.files}
        sizes = {(file, size) for file, copies in self.copies.items() for size, _ in copies}
        fits = sum((entry.name, entry.bytes) in sizes for entry in manifest.files)
        return fits, manifest.epoch, manifest.attempt, -self.copies[MANIFEST].index(copy), wanted

    def get(self, name: str, start: int, stop: int) -> bytes:
        if name not in self.copies:
            raise FileNotFoundError(2, "no rank has it", f"{Union.url}/{self._name}/{name}")
        entry, copies = self._wanted.get(name), self.copies[name]
        if entry is None or FILE_NAME.fullmatch(name) or (start, stop) != (0, entry.bytes):
            return copies[0][1].get(self._name, name, start, stop)
        for _, place in copies:
            with suppress(OSError):  # another one has it
                data = place.get(self._name, name, start, stop)
                if sha256(data) == entry.sha256:
                    return data
        return copies[0][1].get(self._name, name, start, stop)  # whose reader says what is wrong


def _blocks(folder: Path, file: DataFile) -> Iterator[memoryview]:
    """Yields a data file of this rank, verified."""
    pool = _C.StagingPool(min(file.bytes, CHUNK_BYTES), 1)
    try:
        for start in range(0, file.bytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, file.bytes - start)
            crcs, request = list(file.crc32c), (start, size, pool.address)
            _C.read_ranges(
                _C.PosixIo(), folder / file.name, file.bytes, crcs, [request], block_bytes=file.block_bytes, threads=1
            )
            yield pool.view(0, size)
    finally:
        pool.close()
