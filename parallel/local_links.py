"""Messages between ranks of one machine by Unix sockets: one system call to send, one to receive, no thread between.

Not here: which message goes when, and what it holds (p2p.py, headers.py). The one idea: the kernel's buffer is the
message's way. gloo hands each message from thread to thread on both ends, and its sender waits for a lock that its
own I/O thread spins on; here the bytes are in the kernel when `send` returns, and whoever waits for them is woken by
the kernel itself.

    frame = tag (uint32), number of bytes (uint32), bytes      little endian; one stream per ordered pair of ranks

Frames come in the order in which they were sent and are taken by tag in any order. A send never waits for its
receiver, as `Schedule.check` assumes: a message that the buffer has no room for goes another way, and a frame without
bytes (their number is ELSEWHERE) says so. Messages of more than `limit_bytes` always go there, and both ends know. A
place (machine, address) travels with the headers.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import secrets
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor

_FRAME = struct.Struct("<II")
_HELLO = struct.Struct("<I")  # the sender's coord
_ROOM_BYTES = 1 << 16  # read at once: many small frames, or the head of a large one
_BUFFER_BYTES = 4 << 20  # asked of the kernel for each stream; it gives wmem_max at most
_FRAME_COST = 8192  # bytes of the buffer that the kernel takes beside a frame's own: its records, whole pages
ELSEWHERE = 0xFFFF_FFFF
_BYTE = ctypes.c_char


def machine(limit_bytes: int) -> str:
    """What two processes have in common that reach each other's sockets: boot, network namespace, largest message.

    Of a system that does not tell its boot: a name of its own, so that all messages go another way.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    text = boot.read_text(encoding="ascii").strip() if boot.exists() else secrets.token_hex(16)
    return f"{text}/{os.stat('/proc/self/ns/net').st_ino}/{limit_bytes}"


class LocalLinks:
    """The streams of one rank to and from others of its axis.

    Owns a listening socket and the sockets of its streams; one thread uses it. A failure of a stream raises
    RuntimeError in who sends or waits.
    """

    def __init__(self, coord: int, timeout_s: float) -> None:
        self._coord, self.timeout_s = coord, timeout_s
        self._names: dict[int, str] = {}  # of coords on this machine
        self._outward: dict[int, _Outward] = {}
        self._inward: dict[int, _Inward] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = f"plait-{secrets.token_hex(16)}"
        self._listener.bind("\0" + name)  # abstract: no file, gone with the process
        self._listener.listen(128)
        self._listener.settimeout(timeout_s)
        seconds, fraction = divmod(timeout_s, 1)
        self._limit = struct.pack("ll", int(seconds), int(fraction * 1e6))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        given = self._listener.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)  # half of it is for the kernel's own
        self.limit_bytes = given // 2 // 4  # the largest message: a few can be under way
        self._machine = machine(self.limit_bytes)
        self.place = [self._machine, name]

    def __del__(self) -> None:
        for outward in self._outward.values():
            outward.socket.close()
        for inward in self._inward.values():
            inward.socket.close()
        self._listener.close()

    def learn(self, coord: int, place: Sequence[str] | None) -> None:
        """Takes the place of the rank at `coord` from its header."""
        if place and place[0] == self._machine:
            self._names[coord] = place[1]

    def send(self, coord: int, tag: int, tensors: Sequence[Tensor]) -> bool:
        """Sends a message, after which the tensors may change at once. False: it has to go the other way."""
        size = 0
        for tensor in tensors:
            size += tensor.nbytes
        if not self.carries(coord, size):
            return False
        outward = self._outward.get(coord) or self._connect(coord)
        if not outward.has_room(size):
            outward.send([_FRAME.pack(tag, ELSEWHERE)], _FRAME.size)
            return False
        parts: list[Any] = [_FRAME.pack(tag, size)]
        for tensor in tensors:
            if nbytes := tensor.nbytes:
                parts.append((_BYTE * nbytes).from_address(tensor.data_ptr()))
        outward.send(parts, _FRAME.size + size)
        return True

    def receive(
        self, coord: int, tag: int, tensors: Sequence[Tensor], otherwise: Callable[[], Sequence[Any]]
    ) -> list[Any] | None:
        """What has to be waited for until the message is in the tensors; None: it comes the other way.

        `otherwise` receives the other way, once a frame says so; what it returns is waited for.
        """
        size = 0
        for tensor in tensors:
            size += tensor.nbytes
        return [_Message(self, coord, tag, tensors, size, otherwise)] if self.carries(coord, size) else None

    def carries(self, coord: int, num_bytes: int) -> bool:
        """Whether a message goes this way where there is room; both ends, which have met, say the same."""
        return coord in self._names and 0 < num_bytes <= self.limit_bytes

    def inward(self, coord: int) -> _Inward:
        """The stream from a coord; waits until it has connected."""
        known = self._inward.get(coord)
        if known is not None:
            return known
        while coord not in self._inward:
            try:
                stream, _ = self._listener.accept()
            except TimeoutError:
                raise RuntimeError(f"timed out: not connected within {self.timeout_s} s") from None
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, self._limit)  # recv alone, no poll before it
            _, user, _ = struct.unpack("iii", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            hello = stream.recv(_HELLO.size, socket.MSG_WAITALL) if user == os.getuid() else b""
            if len(hello) == _HELLO.size:
                self._inward[_HELLO.unpack(hello)[0]] = _Inward(stream)
            else:
                stream.close()
        return self._inward[coord]

    def _connect(self, coord: int) -> _Outward:
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, self._limit)
        try:
            stream.connect("\0" + self._names[coord])
            stream.sendall(_HELLO.pack(self._coord))
        except OSError as error:
            stream.close()
            raise RuntimeError(f"Connection closed by peer: {error}") from error
        outward = self._outward[coord] = _Outward(stream, coord, self.timeout_s)
        return outward


class _Message:
    """A message to be received."""

    __slots__ = ("_links", "_coord", "_tag", "_tensors", "_size", "_otherwise")

    def __init__(
        self, links: LocalLinks, coord: int, tag: int, tensors: Sequence[Tensor], size: int,
        otherwise: Callable[[], Sequence[Any]],
    ) -> None:  # fmt: skip
        self._links, self._coord, self._tag, self._tensors, self._size = links, coord, tag, tensors, size
        self._otherwise = otherwise

    def wait(self, timeout: timedelta) -> None:
        """Fills the tensors; `timeout` is for the other way, the links have their own."""
        inward = self._links.inward(self._coord)
        if not inward.take(self._links.timeout_s, self._tag, self._tensors, self._size):
            for work in self._otherwise():
                work.wait(timeout)


class _Outward:
    """The sending end of a stream, and what room its buffer has at least.

    Messages take half of the buffer. The other half is for frames that say ELSEWHERE, of which it holds at least a
    hundred: only a peer that leaves more of them unread makes `send` wait, and for the timeout at most.
    """

    def __init__(self, stream: socket.socket, coord: int, timeout_s: float) -> None:
        self.socket, self._coord, self._timeout_s = stream, coord, timeout_s
        self._most = stream.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2
        self._room = 0  # a lower bound, looked up when it is used up

    def has_room(self, size: int) -> bool:
        """Whether the buffer takes `size` bytes now; counts them as taken then."""
        cost = size + _FRAME_COST
        if cost > self._room:
            (taken,) = struct.unpack("i", fcntl.ioctl(self.socket.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))
            self._room = self._most - taken
        if cost > self._room:
            return False
        self._room -= cost
        return True

    def send(self, parts: Sequence[Any], size: int) -> None:
        """Sends buffers of `size` bytes in all."""
        try:
            taken = self.socket.sendmsg(parts)
        except BlockingIOError:
            taken = 0
        except OSError as error:
            raise RuntimeError(f"Connection closed by coord {self._coord}: {error}") from error
        if taken < size:
            raise RuntimeError(f"timed out: coord {self._coord} has read nothing for {self._timeout_s} s")


class _Inward:
    """The receiving end of a stream: a room for what was read, and frames that came before they were asked for."""

    def __init__(self, stream: socket.socket) -> None:
        self.socket = stream
        room = bytearray(_ROOM_BYTES)
        self._room = memoryview(room)
        self._address = ctypes.addressof(_BYTE.from_buffer(room))
        self._start = self._end = 0  # of what lies in the room unread
        self._early: dict[int, deque[bytearray | None]] = {}  # None: elsewhere

    def take(self, timeout_s: float, tag: int, tensors: Sequence[Tensor], size: int) -> bool:
        """Fills the tensors, of `size` bytes, with the frame of that tag; waits for it. False: it goes elsewhere."""
        if tag in self._early:
            return self._take_early(tag, tensors, size)
        while True:
            while self._end - self._start < _FRAME.size:
                self._read_more(timeout_s)
            found, length = _FRAME.unpack_from(self._room, self._start)
            self._start += _FRAME.size
            if found == tag and length == size:
                for tensor in tensors:
                    self._read(timeout_s, tensor.data_ptr(), tensor.nbytes)
                return True
            payload = None
            if length != ELSEWHERE:
                payload = bytearray(length)
                self._read(timeout_s, ctypes.addressof(_BYTE.from_buffer(payload)), length)
            self._early.setdefault(found, deque()).append(payload)
            if found == tag:
                return self._take_early(tag, tensors, size)

    def _take_early(self, tag: int, tensors: Sequence[Tensor], size: int) -> bool:
        queue = self._early[tag]
        payload = queue.popleft()
        if not queue:
            del self._early[tag]
        if payload is None:
            return False
        if len(payload) != size:
            raise RuntimeError(f"the message has {len(payload)} bytes, not {size}")
        address = ctypes.addressof(_BYTE.from_buffer(payload))
        for tensor in tensors:
            ctypes.memmove(tensor.data_ptr(), address, tensor.nbytes)
            address += tensor.nbytes
        return True

    def _read(self, timeout_s: float, target: int, size: int) -> None:
        """The next bytes, to an address: from the room, then straight from the kernel."""
        count = min(size, self._end - self._start)
        ctypes.memmove(target, self._address + self._start, count)
        self._start += count
        if count == size:
            return
        view = memoryview((_BYTE * size).from_address(target))
        while count < size:
            count += self._from_kernel(timeout_s, view[count:])

    def _read_more(self, timeout_s: float) -> None:
        """Adds to the room, whose rest goes to its front."""
        left = self._end - self._start
        if left:
            self._room[:left] = bytes(self._room[self._start : self._end])
        self._start, self._end = 0, left
        self._end += self._from_kernel(timeout_s, self._room[left:] if left else self._room)

    def _from_kernel(self, timeout_s: float, target: Any) -> int:
        try:
            count = self.socket.recv_into(target)
        except BlockingIOError:
            raise RuntimeError(f"timed out after {timeout_s} s") from None
        except OSError as error:
            raise RuntimeError(f"Connection closed by peer: {error}") from error
        if not count:
            raise RuntimeError("Connection closed by peer")
        return count
