"""Slots: memory that two ranks of one machine share, through which large messages go with one copy.

Not here: what says which message lies in which slot (local_links.py), and who may read it how long (p2p.py). The one
idea: a slot is a file without a name (memfd), made by the sender when none is free, handed over once, mapped by both
and used again: the sender writes a message into it, the receiver reads it where it lies and gives the slot back. The
kernel frees it with its last process, however that ends; nothing lies under /dev/shm.

Bound: MOST_BYTES and MOST_SLOTS for each ordered pair of ranks. Where none is free and no more may be made, `lend`
says so and the message goes another way: nobody waits for a slot.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

MOST_BYTES = 256 << 20  # of all slots of one ordered pair, so of a message; the receiver needs no buffers for them
MOST_SLOTS = 128  # so that the notices of all of them fit into a socket's buffer of 208 KiB, Linux' default
ALIGN = 64  # of each tensor in a slot: a cache line
_NUMBER = struct.Struct("<I")
_NOTICES_BYTES = MOST_SLOTS * _NUMBER.size
_BYTE = ctypes.c_char


def span_of(sizes: Iterable[int]) -> int:
    """The bytes that tensors of so many bytes each take in a slot."""
    return sum(-(-size // ALIGN) * ALIGN for size in sizes)


class Slot:
    """The sender's end of a slot."""

    __slots__ = ("number", "capacity", "address", "is_new", "_map")

    def __init__(self, number: int, capacity: int, memory: mmap.mmap) -> None:
        self.number, self.capacity, self._map = number, capacity, memory
        self.address = ctypes.addressof(_BYTE.from_buffer(memory))
        self.is_new = True  # the receiver has not been told of it yet

    def write(self, tensors: Sequence[Tensor]) -> None:
        """Copies contiguous CPU tensors in, one after the other."""
        address = self.address
        for tensor in tensors:
            if num_bytes := tensor.nbytes:
                ctypes.memmove(address, tensor.data_ptr(), num_bytes)
                address += -(-num_bytes // ALIGN) * ALIGN


class Lender:
    """The slots of one direction, at the sender. `connect` makes the socket that hands them over, at first use.

    Owns the slots' memory on this side and that socket. A kernel that gives no memory ends the making of slots, once
    and with a line in the log.
    """

    def __init__(self, stream: socket.socket, connect: Callable[[], socket.socket]) -> None:
        self._stream, self._connect = stream, connect  # the stream brings the numbers of slots given back
        self._hand: socket.socket | None = None
        self._slots: dict[int, Slot] = {}
        self._free: list[Slot] = []
        self._is_refused = False

    def lend(self, size: int) -> Slot | None:
        """A free slot of `size` bytes at least, or a new one; None: there is none, and no more may be made."""
        slot = self._found(size)
        if slot is None:
            self._read_notices()
            slot = self._found(size) or self._made(size)
        return slot

    def close(self) -> None:
        """Lets go of the memory; what the receiver has mapped stays with it."""
        self._slots, self._free = {}, []
        if self._hand is not None:
            self._hand.close()

    def _found(self, size: int) -> Slot | None:
        """Takes the smallest free slot that is large enough."""
        best = None
        for slot in self._free:
            if slot.capacity >= size and (best is None or slot.capacity < best.capacity):
                best = slot
        if best is not None:
            self._free.remove(best)
        return best

    def _read_notices(self) -> None:
        """Takes back what the receiver is through with."""
        try:
            notices = self._stream.recv(_NOTICES_BYTES, socket.MSG_DONTWAIT)
        except OSError:  # none is there, or the peer is gone, as the send that follows says
            return
        self._free += [self._slots[number] for (number,) in _NUMBER.iter_unpack(notices)]

    def _made(self, size: int) -> Slot | None:
        """A new slot; free ones, which were too small, make way for it."""
        if self._is_refused:
            return None
        step = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 4))  # classes, so that lengths that vary can share
        capacity = -(-size // step) * step
        used = len(self._slots) - len(self._free)
        lent = sum(slot.capacity for slot in self._slots.values()) - sum(slot.capacity for slot in self._free)
        if used == MOST_SLOTS or lent + capacity > MOST_BYTES:
            return None
        try:
            while len(self._slots) == MOST_SLOTS or self._total() + capacity > MOST_BYTES:
                self._drop(self._free.pop())
            number = next(number for number in range(MOST_SLOTS) if number not in self._slots)
            slot = self._handed_over(number, capacity)
        except OSError as error:
            self._is_refused = True
            logging.getLogger(__name__).warning("no shared memory of %d bytes, messages by gloo: %s", capacity, error)
            return None
        self._slots[number] = slot
        return slot

    def _total(self) -> int:
        return sum(slot.capacity for slot in self._slots.values())

    def _drop(self, slot: Slot) -> None:
        """Lets go of a slot and has the receiver do the same, before it takes the next one over."""
        assert self._hand is not None
        self._hand.send(_NUMBER.pack(slot.number))
        del self._slots[slot.number]

    def _handed_over(self, number: int, capacity: int) -> Slot:
        """Makes the memory and sends its descriptor, which the receiver takes when a frame names the slot."""
        if self._hand is None:
            self._hand = self._connect()
        descriptor = os.memfd_create(f"plait slot {number}")
        try:
            os.posix_fallocate(descriptor, 0, capacity)  # an error now, not SIGBUS at the first write
            memory = mmap.mmap(descriptor, capacity)
            socket.send_fds(self._hand, [_NUMBER.pack(number)], [descriptor])
        finally:
            os.close(descriptor)
        return Slot(number, capacity, memory)


class Mapped:
    """The receiver's end of a slot. `messages`: views that who takes messages out keeps, by the channel's tag."""

    __slots__ = ("whole", "messages", "_notice", "_stream")

    def __init__(self, number: int, descriptor: int, stream: socket.socket) -> None:
        self._stream, self._notice = stream, _NUMBER.pack(number)
        size = os.fstat(descriptor).st_size
        self.whole: Tensor = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        self.messages: dict[int, Any] = {}

    def views(self, shapes: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
        """The tensors of a message that lies in it."""
        found, start = [], 0
        for shape, dtype in shapes:
            size = int(torch.Size(shape).numel()) * dtype.itemsize
            found.append(self.whole[start : start + size].view(dtype).view(shape))
            start += -(-size // ALIGN) * ALIGN
        return found

    def give_back(self) -> None:
        """Tells the sender that nobody reads the message any more."""
        give_back(self._stream, self._notice)

    def returner(self) -> Callable[[], None]:
        """`give_back`, which does not hold on to the memory."""
        return partial(give_back, self._stream, self._notice)


def give_back(stream: socket.socket, notice: bytes) -> None:
    """Sends the number of a slot back to its sender."""
    try:
        stream.send(notice)
    except BrokenPipeError:  # it is through with its part and needs no slot any more
        return


class Borrower:
    """The slots of one direction, at the receiver. `accept` waits for the socket that hands them over."""

    def __init__(self, stream: socket.socket, accept: Callable[[], socket.socket]) -> None:
        self._stream, self._accept = stream, accept
        self._mapped: dict[int, Mapped] = {}

    def slot(self, number: int, is_new: bool) -> Mapped:
        """The slot of that number; a new one is taken over. RuntimeError where the peer hands over another."""
        if not is_new:
            return self._mapped[number]
        hand, descriptors = self._accept(), list[int]()
        while not descriptors:
            data, descriptors, _, _ = socket.recv_fds(hand, _NUMBER.size, 1)
            if not data:
                raise RuntimeError("Connection closed by peer")
            if not descriptors:  # that slot is no more
                self._mapped.pop(*_NUMBER.unpack(data))
        try:
            if data != _NUMBER.pack(number):
                raise RuntimeError(f"Connection closed by peer: it handed over no slot {number}")
            mapped = self._mapped[number] = Mapped(number, descriptors[0], self._stream)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return mapped
