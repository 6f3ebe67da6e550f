"""One direction between two ranks of a machine: frames on a Unix socket, a small message or the place of a large one.

Not here: who is connected with whom (local_links.py), and the memory of large messages (slots.py).

    frame = tag (uint32), number of bytes (uint32), bytes                           up to SMALL_BYTES
          | tag, IN_SLOT + number of the slot (+ NEW at its first use), bytes       the message lies in the slot
          | tag, ELSEWHERE                                                          it comes another way

Little endian. Frames come in the order in which they were sent and are taken by tag in any order. On the way back the
same socket carries the numbers of slots that the receiver is through with.
"""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from plait.parallel.slots import Borrower, Lender, Mapped, span_of

FRAME = struct.Struct("<II")
_SLOT_FRAME = struct.Struct("<III")
SMALL_BYTES = 1 << 15  # above, one copy into shared memory is less work than two through the kernel
_ROOM_BYTES = 1 << 16  # read at once: at least one whole frame
FRAME_COST = 8192  # bytes of the buffer that the kernel takes beside a frame's own: its records, whole pages
ELSEWHERE = 0xFFFF_FFFF
IN_SLOT = 0x8000_0000
_NEW = 0x4000_0000
_BYTE = ctypes.c_char


class Outward:
    """The sending end of a stream, and what room its buffer has at least.

    Messages take half of the buffer. The other half is for frames that say ELSEWHERE, of which it holds at least a
    hundred: only a peer that leaves more of them unread makes `send` wait, and for the timeout at most.
    """

    def __init__(
        self, stream: socket.socket, connect: Callable[[], socket.socket], coord: int, timeout_s: float
    ) -> None:
        self._socket, self._coord, self._timeout_s = stream, coord, timeout_s
        self._lender = Lender(stream, connect)
        self._most = stream.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2
        self.room = 0  # a lower bound, looked up when it is used up

    def close(self) -> None:
        """Closes its sockets and lets go of its slots."""
        self._lender.close()
        self._socket.close()

    def put(self, tag: int, tensors: Sequence[Tensor]) -> bool:
        """Sends a message of contiguous tensors; False: there is no room for it."""
        size = 0
        for tensor in tensors:
            size += tensor.nbytes
        if size > SMALL_BYTES:
            return self.put_in_slot(tag, tensors, size, span_of(tensor.nbytes for tensor in tensors))
        if not self.has_room(size):
            return False
        parts: list[Any] = [FRAME.pack(tag, size)]
        for tensor in tensors:
            if num_bytes := tensor.nbytes:
                parts.append((_BYTE * num_bytes).from_address(tensor.data_ptr()))
        self.send(parts, FRAME.size + size)
        return True

    def put_in_slot(self, tag: int, tensors: Sequence[Tensor], size: int, span: int) -> bool:
        """The same by shared memory: `size` bytes, `span` with what aligns them."""
        if not self.has_room(0):
            return False
        slot = self._lender.lend(span)
        if slot is None:
            return False
        slot.write(tensors)
        mark = IN_SLOT | slot.number | (_NEW if slot.is_new else 0)
        slot.is_new = False
        self.send([_SLOT_FRAME.pack(tag, mark, size)], _SLOT_FRAME.size)
        return True

    def say_elsewhere(self, tag: int) -> None:
        """Tells that the message of that tag comes another way."""
        self.send([FRAME.pack(tag, ELSEWHERE)], FRAME.size)

    def has_room(self, size: int) -> bool:
        """Whether the buffer takes `size` bytes now; counts them as taken then."""
        cost = size + FRAME_COST
        if cost > self.room:
            (taken,) = struct.unpack("i", fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))
            self.room = self._most - taken
        if cost > self.room:
            return False
        self.room -= cost
        return True

    def send(self, parts: Sequence[Any], size: int) -> None:
        """Sends buffers of `size` bytes in all."""
        try:
            taken = self._socket.sendmsg(parts)
        except BlockingIOError:
            taken = 0
        except OSError as error:
            raise RuntimeError(f"Connection closed by coord {self._coord}: {error}") from error
        if taken < size:
            raise RuntimeError(f"timed out: coord {self._coord} has read nothing for {self._timeout_s} s")


class Inward:
    """The receiving end of a stream: a room for what was read, and frames that came before they were asked for."""

    def __init__(self, stream: socket.socket, hand: Callable[[], socket.socket], timeout_s: float) -> None:
        self.socket, self._timeout_s = stream, timeout_s
        self._borrower = Borrower(stream, hand)
        self._room = memoryview(bytearray(_ROOM_BYTES))
        self._start = self._end = 0  # of what lies in the room unread
        self._early: dict[int, deque[Any]] = {}  # what `_next` returns

    def fill(self, tag: int, head: bytes, parts: list[Any], size: int) -> bool:
        """Fills the views parts[1:], of `size` bytes, with the small frame of that tag; False: it goes elsewhere.

        parts[0] is a room for its head, which should be `head`. The frame that is expected lands where it belongs.
        """
        if self._start == self._end and not self._early:
            try:
                count = self.socket.recvmsg_into(parts)[0]
            except OSError as error:
                raise self._failure(error) from None
            if count == FRAME.size + size and parts[0] == head:
                return True
            if not count:
                raise RuntimeError("Connection closed by peer")
            self._start = self._end = 0
            for part in parts:  # another frame, or a piece: to the room
                taken = min(count, len(part))
                self._room[self._end : self._end + taken] = memoryview(part)[:taken]
                self._end, count = self._end + taken, count - taken
        payload = self._next(tag)
        if payload is None:
            return False
        if isinstance(payload, tuple):
            raise RuntimeError(f"the message has {payload[1]} bytes, not {size}")
        _spread(payload, parts[1:], size)
        return True

    def slot(self, tag: int, size: int) -> Mapped | None:
        """The slot that holds the large message of that tag, to be given back; None: it goes elsewhere."""
        found = self._next(tag)
        if found is None:
            return None
        slot, length = found if isinstance(found, tuple) else (None, len(found))
        if length != size:
            raise RuntimeError(f"the message has {length} bytes, not {size}")
        return slot

    def copy(self, tag: int, tensors: Sequence[Tensor]) -> bool:
        """Fills contiguous tensors with the frame of that tag; waits for it. False: it goes elsewhere."""
        size = sum(tensor.nbytes for tensor in tensors)
        views = [bytes_of(tensor) for tensor in tensors if tensor.nbytes]
        if size <= SMALL_BYTES:
            return self.fill(tag, FRAME.pack(tag, size), [bytearray(FRAME.size), *views], size)
        slot = self.slot(tag, size)
        if slot is not None:
            for tensor, view in zip(tensors, slot.views([(t.shape, t.dtype) for t in tensors]), strict=True):
                tensor.copy_(view)
            slot.give_back()
        return slot is not None

    def _next(self, tag: int) -> Any:
        """The frame of that tag: its bytes, or (slot, number of bytes), or None for ELSEWHERE."""
        queue = self._early.get(tag)
        if queue is not None:
            found = queue.popleft()
            if not queue:
                del self._early[tag]
            return found
        while True:
            came, found = self._frame()
            if came == tag:
                return found
            self._early.setdefault(came, deque()).append(found)

    def _frame(self) -> tuple[int, Any]:
        """The next frame of the stream."""
        self._need(FRAME.size)
        tag, length = FRAME.unpack_from(self._room, self._start)
        if length == ELSEWHERE:
            self._start += FRAME.size
            return tag, None
        if length & IN_SLOT:
            self._need(_SLOT_FRAME.size)
            tag, mark, size = _SLOT_FRAME.unpack_from(self._room, self._start)
            self._start += _SLOT_FRAME.size
            return tag, (self._borrower.slot(mark & ~(IN_SLOT | _NEW), bool(mark & _NEW)), size)
        self._need(FRAME.size + length)
        first = self._start + FRAME.size
        self._start = first + length
        return tag, bytes(self._room[first : self._start])

    def _need(self, count: int) -> None:
        """Reads until `count` bytes lie in the room; what is there goes to its front."""
        left = self._end - self._start
        if left >= count:
            return
        self._room[:left] = bytes(self._room[self._start : self._end])
        self._start, self._end = 0, left
        while self._end < count:
            self._end += self._from_kernel(self._room[self._end :])

    def _from_kernel(self, target: memoryview) -> int:
        try:
            count = self.socket.recv_into(target)
        except OSError as error:
            raise self._failure(error) from None
        if not count:
            raise RuntimeError("Connection closed by peer")
        return count

    def _failure(self, error: OSError) -> RuntimeError:
        if isinstance(error, BlockingIOError):
            return RuntimeError(f"timed out after {self._timeout_s} s")
        return RuntimeError(f"Connection closed by peer: {error}")


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, which must outlive what is returned."""
    return memoryview((_BYTE * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _spread(payload: bytes, views: Sequence[memoryview], size: int) -> None:
    """Copies the bytes of a frame into the views, of `size` bytes."""
    if len(payload) != size:
        raise RuntimeError(f"the message has {len(payload)} bytes, not {size}")
    start = 0
    for view in views:
        view[:] = payload[start : start + len(view)]
        start += len(view)
