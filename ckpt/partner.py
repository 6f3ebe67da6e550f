"""Copies in the memory of another node: each rank's data file also goes into the partner's root, over TCP.

For roots in node-local memory (a tmpfs folder a node, `Snapshots(store=..., partner=Partner(...))`): files there
outlive the training processes, and the loss of one node loses no byte. Not a replica of everything: each data file is
in two roots. The one idea: the partner has the file before the fragment says that this rank is done, so what is
committed can be read after either node is gone; who needs a file asks the ranks that have it, and its checksums prove
it.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait import _C
from plait.ckpt.errors import SnapshotDamaged, SnapshotError
from plait.ckpt.folders import is_attempt, parse_step
from plait.ckpt.manifest import FILE_NAME, MANIFEST, DataFile
from plait.ckpt.store import CHUNK_BYTES, Blocks, DirStore, read_copy_manifest

_MAX_LINE = 1 << 20  # of a request or an answer: names and sizes of one folder


@dataclass(frozen=True)
class Partner:
    """host: the address of this node that the other ranks reach. shift: rank r keeps a copy for rank r - shift; take
    the number of ranks on a node, so that it is on another one. timeout_s: of one connection that says nothing."""

    host: str
    shift: int = 1
    timeout_s: float = 60.0


class _Server(socketserver.ThreadingTCPServer):
    """Gives files of one root, and takes data files into its attempts, for those who know the token."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, host: str, root: DirStore, token: str, timeout_s: float) -> None:
        super().__init__((host, 0), _Request)
        self.root, self.token, self.timeout_s = root, token, timeout_s
        self._ends = False

    def serve(self) -> None:
        """Takes connections, each in a thread of its own, until `end()`. Waits in the kernel, without looking up."""
        while not self._ends:
            try:
                self.process_request(*self.socket.accept())
            except OSError:  # ended; or no more descriptors for a while
                time.sleep(0.0 if self._ends else 0.1)

    def end(self) -> None:
        """Ends `serve`; connections that are served end by themselves."""
        self._ends = True
        self.socket.shutdown(socket.SHUT_RDWR)


class _Request(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        self.connection.settimeout(self.server.timeout_s)
        try:
            request = json.loads(self.rfile.readline(_MAX_LINE))
            if not hmac.compare_digest(str(request["token"]), self.server.token):
                raise PermissionError("the token is not that of this launch")
            data, more = self._answer(request)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            data, more = b"", {"error": str(error), "errno": getattr(error, "errno", None) or 5}
        self.wfile.write(json.dumps({"bytes": len(data), **more}).encode() + b"\n")
        self.wfile.write(data)

    def _answer(self, request: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
        root, operation = self.server.root, request["op"]
        if operation == "steps":
            return b"", {"steps": root.steps()}
        folder, name = str(request["folder"]), str(request.get("name", MANIFEST))
        if not (parse_step(Path(folder)) or is_attempt(folder)) or "/" in name or name.startswith("."):
            raise ValueError(f"'{folder}/{name}' is no name of a snapshot's file")
        if operation == "files":
            return b"", {"files": root.files(folder)}
        start, stop = int(request["start"]), int(request["stop"])
        if operation == "get" and 0 <= start <= stop <= start + 2 * CHUNK_BYTES:
            return root.get(folder, name, start, stop), {}
        if operation == "put" and start == 0 and is_attempt(folder) and FILE_NAME.fullmatch(name):
            root.begin(folder.removeprefix(".tmp-"))
            root.put_stream(folder, name, stop, lambda: self._chunks(stop))
            return b"", {}
        raise ValueError(f"{operation!r} of bytes {start} to {stop} of '{folder}/{name}' is not served")

    def _chunks(self, num_bytes: int) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(num_bytes, CHUNK_BYTES)))
        while num_bytes:
            part = buffer[: min(num_bytes, len(buffer))]
            filled = 0
            while filled < len(part):
                got = self.rfile.readinto(part[filled:])
                if not got:
                    raise OSError(104, f"the sender went away with {num_bytes} bytes to come")
                filled += got
            num_bytes -= len(part)
            yield part


class PeerStore:
    """The root of one rank, from another one. address: [host, port, token]."""

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
                for block in blocks() if blocks is not None else ():
                    connection.sendall(block)
                with connection.makefile("rb") as answer:
                    head = json.loads(answer.readline(_MAX_LINE))
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
        if not 0 < partner.shift < world_size:
            raise ValueError(f"Partner(shift={partner.shift}): must be in 1 .. world_size - 1 = {world_size - 1}")
        self._own, self._rank, self._partner = DirStore(root, io, session), rank, partner
        token = secrets.token_hex(16)
        self._server = _Server(partner.host, self._own, token, partner.timeout_s)
        self._thread = threading.Thread(target=self._server.serve, name=f"plait-peers-{rank}", daemon=True)
        self._thread.start()
        prefix = f"plait/{session}/peer"
        store.set(f"{prefix}/{rank}", json.dumps([partner.host, self._server.server_address[1], token]))
        addresses = [json.loads(store.get(f"{prefix}/{other}")) for other in range(world_size)]
        self._peers = [PeerStore(address, partner.timeout_s) for address in addresses]

    def send(self, folder: Path, files: Sequence[DataFile]) -> None:
        """Copies data files of an attempt into the same attempt of the partner. Verified as they are read here, and
        by their size there; a connection that breaks is an error of the save."""
        target = self._peers[(self._rank + self._partner.shift) % len(self._peers)]
        for file in files:
            target.put_stream(folder.name, file.name, file.bytes, lambda f=file: _blocks(folder, f))  # type: ignore[misc]
            there = target.files(folder.name).get(file.name)
            if there != file.bytes:
                raise SnapshotError(f"'{target.url}/{folder.name}/{file.name}' has {there} of {file.bytes} bytes")

    def unions(self) -> list[Union]:
        """Returns all roots as one place: first with the own root preferred, then with the others."""
        others = [peer for rank, peer in enumerate(self._peers) if rank != self._rank]
        return [Union([self._own, *others]), Union([*others, self._own])]

    def close(self) -> None:
        """Ends the server; connections that are served end by themselves. Again does nothing."""
        if not self._thread.is_alive():
            return
        self._server.end()
        self._thread.join()
        self._server.server_close()


def join_peers(
    partner: Partner | None, store: Any, root: Path, io: _C.Io, session: str, rank: int, world_size: int
) -> Peers | None:
    """Returns what `partner` asks for; None when it is None."""
    if partner is None:
        return None
    if store is None:
        raise ValueError("partner: ranks find each other through a store; give Snapshots one")
    return Peers(partner, store, root, io, session, rank, world_size)


class Union:
    """Several roots as one store for reading. A snapshot is there when all its files are, in whichever roots.

    steps() is the same on all ranks as long as nobody writes, as in a restore.
    """

    url = "peers:"
    local: Path | None = None

    def __init__(self, places: Sequence[DirStore | PeerStore]) -> None:
        self._places = places
        self._owners: dict[str, dict[str, DirStore | PeerStore]] = {}

    def steps(self) -> list[tuple[int, int, str]]:
        found = sorted({step for place in self._places for step in place.steps()}, reverse=True)
        return [step for step in found if self._is_whole(step[2])]

    def files(self, folder: str) -> dict[str, int]:
        sizes: dict[str, int] = {}
        owners: dict[str, DirStore | PeerStore] = {}
        for place in self._places:
            for name, size in place.files(folder).items():
                sizes.setdefault(name, size)
                owners.setdefault(name, place)
        self._owners[folder] = owners
        return sizes

    def get(self, folder: str, name: str, start: int, stop: int) -> bytes:
        if folder not in self._owners:
            self.files(folder)
        if name not in self._owners[folder]:
            raise FileNotFoundError(2, "no rank has it", f"{self.url}{folder}/{name}")
        return self._owners[folder][name].get(folder, name, start, stop)

    def _is_whole(self, folder: str) -> bool:
        try:
            wanted = {entry.name: entry.bytes for entry in read_copy_manifest(self, folder).files}
        except (SnapshotDamaged, FileNotFoundError):
            return False
        return wanted.items() <= self.files(folder).items()


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
