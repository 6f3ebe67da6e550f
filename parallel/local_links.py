"""Messages between ranks of one machine by Unix sockets: one system call to send, one to receive, no thread between.

Not here: which message goes when, and what it holds (p2p.py, headers.py). The one idea: the kernel's buffer is the
message's way. gloo hands each message from thread to thread on both ends, and its sender waits for a lock that its
own I/O thread spins on; here the bytes are in the kernel when `send` returns, and whoever waits for them is woken by
the kernel itself. Larger messages than the buffer takes stay with gloo, whose thread moves them meanwhile.

    frame = tag (uint32), number of bytes (uint32), bytes      little endian; one stream per ordered pair of ranks

Frames come in the order in which they were sent and are taken by tag in any order. What the kernel does not take at
once is kept and written on while this end waits for something. A place (machine, address) travels with the headers.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor

_FRAME = struct.Struct("<II")
_HELLO = struct.Struct("<I")  # the sender's coord
_ROOM_BYTES = 1 << 16  # read at once: many small frames, or the head of a large one
_BUFFER_BYTES = 4 << 20  # asked of the kernel for each stream; it gives wmem_max at most
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

    Owns a listening socket, the sockets of its streams and what the kernel did not take yet; one thread uses it. A
    failure of a stream raises RuntimeError in who sends or waits.
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

    def send(self, coord: int, tag: int, tensors: Sequence[Tensor]) -> list[Any] | None:
        """Sends a message; what is returned has to be waited for, the tensors may change at once. None: goes another
        way, as the other end finds as well: both have met."""
        size = 0
        for tensor in tensors:
            size += tensor.nbytes
        if not self.carries(coord, size):
            return None
        outward = self._outward.get(coord) or self._connect(coord)
        parts: list[Any] = [_FRAME.pack(tag, size)]
        for tensor in tensors:
            if nbytes := tensor.nbytes:
                parts.append((_BYTE * nbytes).from_address(tensor.data_ptr()))
        outward.send(parts, _FRAME.size + size)
        return [_Rest(self, outward)] if outward.rest else []

    def receive(self, coord: int, tag: int, tensors: Sequence[Tensor]) -> list[Any] | None:
        """What has to be waited for until the message is in the tensors. None: it comes another way."""
        size = 0
        for tensor in tensors:
            size += tensor.nbytes
        return [_Message(self, coord, tag, tensors, size)] if self.carries(coord, size) else None

    def carries(self, coord: int, num_bytes: int) -> bool:
        """Whether a message goes this way."""
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
            _, user, _ = struct.unpack("iii", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            hello = stream.recv(_HELLO.size, socket.MSG_WAITALL) if user == os.getuid() else b""
            if len(hello) == _HELLO.size:
                seconds, fraction = divmod(self.timeout_s, 1)
                limit = struct.pack("ll", int(seconds), int(fraction * 1e6))
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)  # recv alone, no poll before it
                self._inward[_HELLO.unpack(hello)[0]] = _Inward(stream)
            else:
                stream.close()
        return self._inward[coord]

    def _connect(self, coord: int) -> _Outward:
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        try:
            stream.connect("\0" + self._names[coord])
            stream.sendall(_HELLO.pack(self._coord))
        except OSError as error:
            stream.close()
            raise RuntimeError(f"Connection closed by peer: {error}") from error
        outward = self._outward[coord] = _Outward(stream, coord)
        return outward

    def advance(self, reading: socket.socket | None = None) -> bool:
        """Waits until a stream takes more of what is kept and writes that, or until `reading` has something; whether
        it has."""
        poll, kept = select.poll(), {o.socket.fileno(): o for o in self._outward.values() if o.rest}
        for number in kept:
            poll.register(number, select.POLLOUT)
        if reading is not None:
            poll.register(reading, select.POLLIN)
        ready = poll.poll(self.timeout_s * 1e3)
        if not ready:
            raise RuntimeError(f"timed out after {self.timeout_s} s")
        for number, _ in ready:
            if number in kept:
                kept[number].write_on()
        return any(number not in kept for number, _ in ready)

    @property
    def keeps(self) -> bool:
        """Whether something sent is not in the kernel yet."""
        for outward in self._outward.values():  # a generator would cost more than the rest
            if outward.rest:
                return True
        return False


class _Rest:
    """A message that the kernel has not taken whole."""

    __slots__ = ("_links", "_outward")

    def __init__(self, links: LocalLinks, outward: _Outward) -> None:
        self._links, self._outward = links, outward

    def wait(self, timeout: timedelta) -> None:
        """Writes until nothing of the stream is kept; `timeout` is that of the links."""
        while self._outward.rest:
            self._links.advance()


class _Message:
    """A message to be received."""

    __slots__ = ("_links", "_coord", "_tag", "_tensors", "_size")

    def __init__(self, links: LocalLinks, coord: int, tag: int, tensors: Sequence[Tensor], size: int) -> None:
        self._links, self._coord, self._tag, self._tensors, self._size = links, coord, tag, tensors, size

    def wait(self, timeout: timedelta) -> None:
        """Fills the tensors; `timeout` is that of the links."""
        self._links.inward(self._coord).take(self._links, self._tag, self._tensors, self._size)


class _Outward:
    """The sending end of a stream, and what the kernel did not take of it."""

    def __init__(self, stream: socket.socket, coord: int) -> None:
        self.socket, self._coord = stream, coord
        self.rest: deque[memoryview] = deque()

    def send(self, parts: Sequence[Any], size: int) -> None:
        """Sends buffers of `size` bytes in all; copies what the kernel does not take: they are the caller's again."""
        taken = 0
        if not self.rest:
            try:
                taken = self.socket.sendmsg(parts, (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
            except OSError as error:
                raise RuntimeError(f"Connection closed by coord {self._coord}: {error}") from error
        if taken < size:
            self.rest.append(memoryview(b"".join(parts))[taken:])

    def write_on(self) -> None:
        """Writes as much of what is kept as the kernel takes."""
        try:
            while self.rest:
                taken = self.socket.send(self.rest[0], socket.MSG_DONTWAIT)
                if taken < len(self.rest[0]):
                    self.rest[0] = self.rest[0][taken:]
                    return
                self.rest.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            raise RuntimeError(f"Connection closed by coord {self._coord}: {error}") from error


class _Inward:
    """The receiving end of a stream: a room for what was read, and frames that came before they were asked for."""

    def __init__(self, stream: socket.socket) -> None:
        self.socket = stream
        room = bytearray(_ROOM_BYTES)
        self._room = memoryview(room)
        self._address = ctypes.addressof(_BYTE.from_buffer(room))
        self._start = self._end = 0  # of what lies in the room unread
        self._early: dict[int, deque[bytearray]] = {}

    def take(self, links: LocalLinks, tag: int, tensors: Sequence[Tensor], size: int) -> None:
        """Fills the tensors, of `size` bytes, with the frame of that tag; waits for it."""
        if tag in self._early:
            self._take_early(tag, tensors, size)
            return
        while True:
            while self._end - self._start < _FRAME.size:
                self._read_more(links)
            found, length = _FRAME.unpack_from(self._room, self._start)
            self._start += _FRAME.size
            if found == tag and length == size:
                for tensor in tensors:
                    self._read(links, tensor.data_ptr(), tensor.nbytes)
                return
            payload = bytearray(length)
            self._read(links, ctypes.addressof(_BYTE.from_buffer(payload)), length)
            if found == tag:
                raise _wrong_size(length, size)
            self._early.setdefault(found, deque()).append(payload)

    def _take_early(self, tag: int, tensors: Sequence[Tensor], size: int) -> None:
        queue = self._early[tag]
        payload = queue.popleft()
        if not queue:
            del self._early[tag]
        if len(payload) != size:
            raise _wrong_size(len(payload), size)
        address = ctypes.addressof(_BYTE.from_buffer(payload))
        for tensor in tensors:
            ctypes.memmove(tensor.data_ptr(), address, tensor.nbytes)
            address += tensor.nbytes

    def _read(self, links: LocalLinks, target: int, size: int) -> None:
        """The next bytes, to an address: from the room, then straight from the kernel."""
        count = min(size, self._end - self._start)
        ctypes.memmove(target, self._address + self._start, count)
        self._start += count
        if count == size:
            return
        view = memoryview((_BYTE * size).from_address(target))
        while count < size:
            count += self._from_kernel(links, view[count:])

    def _read_more(self, links: LocalLinks) -> None:
        """Adds to the room, whose rest goes to its front."""
        left = self._end - self._start
        if left:
            self._room[:left] = bytes(self._room[self._start : self._end])
        self._start, self._end = 0, left
        self._end += self._from_kernel(links, self._room[left:] if left else self._room)

    def _from_kernel(self, links: LocalLinks, target: Any) -> int:
        while links.keeps and not links.advance(self.socket):
            pass
        try:
            count = self.socket.recv_into(target)
        except BlockingIOError:
            raise RuntimeError(f"timed out after {links.timeout_s} s") from None
        except OSError as error:
            raise RuntimeError(f"Connection closed by peer: {error}") from error
        if not count:
            raise RuntimeError("Connection closed by peer")
        return count


def _wrong_size(found: int, expected: int) -> RuntimeError:
    return RuntimeError(f"the message has {found} bytes, not {expected}")
