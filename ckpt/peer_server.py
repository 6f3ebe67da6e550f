"""What a rank gives to the others of its own root, and takes from them: files by ranges, data files of attempts.

The asking side is partner.py. The one idea: a copy is taken only into an attempt that may still be committed; once
this rank has learned that it will not be, what was taken for it goes, and what comes later is refused, with why.
"""

from __future__ import annotations

import errno
import hmac
import json
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from plait.ckpt.folders import is_attempt, parse_step
from plait.ckpt.manifest import FILE_NAME, MANIFEST
from plait.ckpt.store import CHUNK_BYTES, Blocks, DirStore

MAX_LINE = 1 << 20  # of a request or an answer: names and sizes of one folder


class Taken:
    """The copies that other ranks put into attempts of this root. Thread rule: any thread, several at once.

    Attempts of one launch are numbered; the ranks are in the same one, or one apart.
    """

    def __init__(self, root: DirStore) -> None:
        self._root, self._lock = root, threading.Lock()
        self._names: dict[str, set[str]] = {}
        self._ended, self._reason = 0, ""

    def put(self, folder: str, name: str, num_bytes: int, blocks: Blocks) -> None:
        """Takes one file. OSError, and nothing of it is left, when it fails or the attempt was given up."""
        with self._lock:
            self._check(folder)
            self._forget(_number(folder) - 2)
            self._names.setdefault(folder, set()).add(name)
        try:
            self._root.begin(folder.removeprefix(".tmp-"))
            self._root.put_stream(folder, name, num_bytes, blocks)
            self.check(folder)
        except OSError:
            with suppress(OSError):  # the first error counts
                self._root.discard(folder, name)
            self.check(folder)  # the reason, not what its end did to this file
            raise

    def check(self, folder: str) -> None:
        """OSError, with why, when the attempt was given up."""
        with self._lock:
            self._check(folder)

    def give_up(self, folder: str, reason: str) -> None:
        """Removes what was taken for an attempt, and takes nothing more for it or an earlier one."""
        with self._lock:
            self._ended, self._reason = max(self._ended, _number(folder)), reason
            names = self._names.get(folder, set())
            self._forget(self._ended)
        for name in sorted(names):
            self._root.discard(folder, name)

    def _forget(self, number: int) -> None:
        self._names = {folder: names for folder, names in self._names.items() if _number(folder) > number}

    def _check(self, folder: str) -> None:
        if _number(folder) <= self._ended:
            raise OSError(errno.ECANCELED, f"that save was given up: {self._reason}")


def _number(folder: str) -> int:
    return int(folder.rpartition("-")[2])


class Server(socketserver.ThreadingTCPServer):
    """Gives files of one root, and takes data files into its attempts, for those who know the token."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, host: str, root: DirStore, token: str, timeout_s: float) -> None:
        super().__init__((host, 0), Request)
        self.root, self.token, self.timeout_s = root, token, timeout_s
        self.taken = Taken(root)
        self._ends = False

    def serve(self) -> None:
        """Takes connections, each in a thread of its own, until `end()`. Waits in the kernel, without looking up."""
        while not self._ends:
            try:
                self.process_request(*self.socket.accept())
            except OSError:  # ended; or no more descriptors for a while
                time.sleep(0.0 if self._ends else 0.1)
        self.server_close()

    def end(self) -> None:
        """Ends `serve`; connections that are served end by themselves. Any thread may call it, and does not wait."""
        self._ends = True
        with suppress(OSError):  # ended already
            self.socket.shutdown(socket.SHUT_RDWR)


class Request(socketserver.StreamRequestHandler):
    server: Server
    _takes = False

    def handle(self) -> None:
        self.connection.settimeout(self.server.timeout_s)
        try:
            request = json.loads(self.rfile.readline(MAX_LINE))
            if not hmac.compare_digest(str(request["token"]), self.server.token):
                raise PermissionError("the token is not that of this launch")
            data, more = self._answer(request)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            data, more = b"", {"error": str(error), "errno": getattr(error, "errno", None) or 5}
        self.wfile.write(json.dumps({"bytes": len(data), **more}).encode() + b"\n")
        self.wfile.write(data)
        if "error" in more and self._takes:  # bytes that nobody reads would reset the connection with the answer
            with suppress(OSError):
                while self.rfile.read1(CHUNK_BYTES):
                    pass

    def _answer(self, request: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
        root, operation = self.server.root, request["op"]
        if operation == "steps":
            return b"", {"steps": root.steps()}
        folder, name = str(request["folder"]), str(request.get("name", MANIFEST))
        if not (parse_step(Path(folder)) or is_attempt(folder)) or "/" in name or name.startswith("."):
            raise ValueError(f"'{folder}/{name}' is no name of a snapshot's file")
        if operation == "files":
            files = root.files(folder)
            if is_attempt(folder):
                self.server.taken.check(folder)  # after the look: why a file that was sent is not there any more
            return b"", {"files": files}
        start, stop = int(request["start"]), int(request["stop"])
        if operation == "get" and 0 <= start <= stop <= start + 2 * CHUNK_BYTES:
            return root.get(folder, name, start, stop), {}
        if operation == "put" and start == 0 and is_attempt(folder) and FILE_NAME.fullmatch(name):
            self._takes = True
            self.server.taken.put(folder, name, stop, lambda: self._chunks(stop))
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
