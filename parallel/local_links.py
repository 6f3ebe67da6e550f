"""Messages between ranks of one machine: by Unix sockets, large ones in memory that both share; no thread between.

Not here: which message goes when, and what it holds (p2p.py, headers.py), the frames of a stream (streams.py), the
shared memory (slots.py). The one idea: the kernel's buffer is the message's way. gloo hands each message from thread
to thread on both ends, and its sender waits for a lock that its own I/O thread spins on; here the bytes are in the
kernel, or in a slot, when `send` returns, and whoever waits for them is woken by the kernel itself.

A send never waits for its receiver, as `Schedule.check` assumes: a message that has no room in the buffer, or no
slot, goes another way, and a frame says so. Messages of more than `limit_bytes` always go there, and both ends know.
A place (machine, address) travels with the headers.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.parallel.slots import MOST_BYTES, span_of
from plait.parallel.streams import Inward, Outward

_HELLO = struct.Struct("<I")  # the sender's coord; + _HANDS_OVER for the socket that hands slots over
_HANDS_OVER = 1 << 31
_BUFFER_BYTES = 4 << 20  # asked of the kernel for each stream; it gives wmem_max at most


def machine(limit_bytes: int) -> str:
    """What two processes have in common that reach each other's sockets: boot, network namespace, largest message.

    Of a system that does not tell its boot: a name of its own, so that all messages go another way.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    text = boot.read_text(encoding="ascii").strip() if boot.exists() else secrets.token_hex(16)
    return f"{text}/{os.stat('/proc/self/ns/net').st_ino}/{limit_bytes}"


class LocalLinks:
    """The streams of one rank to and from others of its axis.

    Owns a listening socket and the sockets of its streams, which close with it; one thread uses it. A failure of a
    stream raises RuntimeError in who sends or waits.
    """

    def __init__(self, coord: int, timeout_s: float) -> None:
        self._coord, self.timeout_s = coord, timeout_s
        self._names: dict[int, str] = {}  # of coords on this machine
        self._outward: dict[int, Outward] = {}
        self._inward: dict[int, Inward] = {}
        self._door = _Door(timeout_s)  # knows none of the others, so that nothing but the owner keeps them alive
        self.limit_bytes = MOST_BYTES
        self._machine = machine(self.limit_bytes)
        self.place = [self._machine, self._door.name]

    def __del__(self) -> None:
        for outward in self._outward.values():
            outward.close()
        self._door.close()

    def learn(self, coord: int, place: Sequence[str] | None) -> None:
        """Takes the place of the rank at `coord` from its header."""
        if place and place[0] == self._machine:
            self._names[coord] = place[1]

    def carries(self, coord: int, num_bytes: int) -> bool:
        """Whether a message goes this way where there is room; both ends, which have met, say the same."""
        return coord in self._names and 0 < num_bytes <= self.limit_bytes

    def send(self, coord: int, tag: int, tensors: Sequence[Tensor]) -> bool:
        """Sends a message, after which the tensors may change at once. False: it has to go the other way."""
        size = span_of(tensor.nbytes for tensor in tensors)
        if not self.carries(coord, size):
            return False
        outward = self.outward(coord)
        if outward.put(tag, tensors):
            return True
        outward.say_elsewhere(tag)
        return False

    def receive(
        self, coord: int, tag: int, tensors: Sequence[Tensor], otherwise: Callable[[], Sequence[Any]]
    ) -> list[Any] | None:
        """What has to be waited for until the message is in the tensors; None: it comes the other way.

        `otherwise` receives the other way, once a frame says so; what it returns is waited for.
        """
        if not self.carries(coord, span_of(tensor.nbytes for tensor in tensors)):
            return None
        return [_Message(self, coord, tag, tensors, otherwise)]

    def outward(self, coord: int) -> Outward:
        """The stream to a coord."""
        known = self._outward.get(coord)
        if known is None:
            name, limit = self._names[coord], self._door.limit
            hand = partial(_connected, name, self._coord + _HANDS_OVER, limit)
            stream = _connected(name, self._coord, limit)
            known = self._outward[coord] = Outward(stream, hand, coord, self.timeout_s)
        return known

    def inward(self, coord: int) -> Inward:
        """The stream from a coord; waits until it has connected."""
        known = self._inward.get(coord)
        if known is None:
            hand = partial(self._door.wait_for, coord + _HANDS_OVER)
            known = self._inward[coord] = Inward(self._door.wait_for(coord), hand, self.timeout_s)
        return known


class _Door:
    """Where others connect. Owns their sockets, each known by what it said first."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        seconds, fraction = divmod(timeout_s, 1)
        self.limit = struct.pack("ll", int(seconds), int(fraction * 1e6))
        self._streams: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.name = f"plait-{secrets.token_hex(16)}"
        self._listener.bind("\0" + self.name)  # abstract: no file, gone with the process
        self._listener.listen(128)
        self._listener.settimeout(timeout_s)

    def close(self) -> None:
        """Closes all sockets."""
        for stream in self._streams.values():
            stream.close()
        self._listener.close()

    def wait_for(self, hello: int) -> socket.socket:
        """The stream of who says that, when it has connected."""
        while hello not in self._streams:
            try:
                stream, _ = self._listener.accept()
            except TimeoutError:
                raise RuntimeError(f"timed out: not connected within {self.timeout_s} s") from None
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, self.limit)  # recv alone, no poll before it
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, self.limit)
            _, user, _ = struct.unpack("iii", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            said = stream.recv(_HELLO.size, socket.MSG_WAITALL) if user == os.getuid() else b""
            if len(said) == _HELLO.size:
                self._streams[_HELLO.unpack(said)[0]] = stream
            else:
                stream.close()
        return self._streams[hello]


def _connected(name: str, hello: int, limit: bytes) -> socket.socket:
    """A stream to the door of that name."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    try:
        stream.connect("\0" + name)
        stream.sendall(_HELLO.pack(hello))
    except OSError as error:
        stream.close()
        raise RuntimeError(f"Connection closed by peer: {error}") from error
    return stream


class _Message:
    """A message to be received."""

    __slots__ = ("_links", "_coord", "_tag", "_tensors", "_otherwise")

    def __init__(
        self, links: LocalLinks, coord: int, tag: int, tensors: Sequence[Tensor],
        otherwise: Callable[[], Sequence[Any]],
    ) -> None:  # fmt: skip
        self._links, self._coord, self._tag, self._tensors = links, coord, tag, tensors
        self._otherwise = otherwise

    def wait(self, timeout: timedelta) -> None:
        """Fills the tensors; `timeout` is for the other way, the links have their own."""
        if not self._links.inward(self._coord).copy(self._tag, self._tensors):
            for work in self._otherwise():
                work.wait(timeout)
