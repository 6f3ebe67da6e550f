"""The quick way of a channel whose messages are all alike and stay on this machine: what stays is looked up once.

Not here: headers, lists, plain values, gloo and NCCL, which P2P sees to; it also takes what has no room here. A
message is one system call at either end and lies in a buffer, or, when it is large, in the memory that both ranks
share: the stage reads it where the sender wrote it, until it gives it back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from plait.parallel.headers import MAX_TENSORS, Channel, Specs
from plait.parallel.slots import Mapped, span_of
from plait.parallel.streams import FRAME, FRAME_COST, SMALL_BYTES, Inward, bytes_of

if TYPE_CHECKING:
    from plait.parallel.p2p import P2P


class Buffer:
    """The receive buffers of one message. `parts`: where a socket writes to, on CPU; the head comes first."""

    __slots__ = ("tensors", "parts", "_pool")

    def __init__(self, tensors: list[Tensor], pool: list[Buffer]) -> None:
        self.tensors, self._pool = tensors, pool
        self.parts: list[Any] = []
        if all(tensor.device.type == "cpu" for tensor in tensors):
            self.parts = [bytearray(FRAME.size), *(bytes_of(tensor) for tensor in tensors if tensor.nbytes)]

    def release(self) -> None:
        """Nobody may read the message any more."""
        self._pool.append(self)


class InSlot:
    """A message in shared memory. `release`: nobody may read it any more."""

    __slots__ = ("specs", "tensors", "release")

    def __init__(self, slot: Mapped, specs: Specs) -> None:
        self.specs, self.release = specs, slot.returner()
        self.tensors = slot.views([(spec.shape, spec.dtype) for spec in specs])


class WayOut:
    """Sends the messages of a verified channel."""

    __slots__ = ("_p2p", "_channel", "_entries", "_size", "_span", "_tag", "_heads", "_outward")

    def __init__(self, p2p: P2P, channel: Channel, specs: Specs) -> None:
        assert p2p.local is not None
        self._p2p, self._channel = p2p, channel
        self._entries = [(s.shape, s.dtype, ctypes.c_char * s.num_bytes if s.num_bytes else None) for s in specs]
        self._size, self._span = sum(s.num_bytes for s in specs), span_of(s.num_bytes for s in specs)
        self._tag, count = p2p.ends[channel].tag, p2p.num_microbatches
        self._heads = [FRAME.pack(self._tag + m * MAX_TENSORS, self._size) for m in range(count)]
        self._outward = p2p.local.outward(channel.target)

    def send(self, microbatch: int, tensors: Sequence[Any]) -> bool:
        """Sends the message, after which the tensors may change. False: nothing was sent, it is P2P.send's to do.

        ChannelError where the peer is gone.
        """
        parts: list[Any] = [self._heads[microbatch]]
        if len(tensors) != len(self._entries):
            return False
        for tensor, (shape, dtype, array) in zip(tensors, self._entries, strict=True):
            if not isinstance(tensor, Tensor) or tensor.shape != shape or tensor.dtype != dtype:
                return False
            if not tensor.is_contiguous():
                return False
            if array is not None:
                parts.append(array.from_address(tensor.data_ptr()))
        outward, size = self._outward, self._size
        try:
            if size > SMALL_BYTES:
                return outward.put_in_slot(self._tag + microbatch * MAX_TENSORS, tensors, size, self._span)
            if outward.room >= size + FRAME_COST:
                outward.room -= size + FRAME_COST
            elif not outward.has_room(size):
                return False
            outward.send(parts, FRAME.size + size)
        except RuntimeError as error:
            raise self._p2p.failure(error, self._channel, microbatch) from error
        return True


class WayIn:
    """Receives the messages of a verified channel. Nothing has to be posted."""

    __slots__ = ("_p2p", "_channel", "_specs", "_size", "_tag", "_heads", "_pool", "_inward")

    def __init__(self, p2p: P2P, channel: Channel, specs: Specs) -> None:
        self._p2p, self._channel, self._specs = p2p, channel, specs
        self._size = sum(s.num_bytes for s in specs)
        self._tag, count = p2p.ends[channel].tag, p2p.num_microbatches
        self._heads = [FRAME.pack(self._tag + m * MAX_TENSORS, self._size) for m in range(count)]
        self._pool = p2p.pool(specs)
        self._inward: Inward | None = None

    def take(self, microbatch: int) -> Buffer | InSlot:
        """Waits for the message. ChannelError, ChannelTimeout where the peer is gone or silent."""
        p2p, tag = self._p2p, self._tag + microbatch * MAX_TENSORS
        try:
            inward = self._inward or self._connected()
            if self._size > SMALL_BYTES:
                slot = inward.slot(tag, self._size)
                if slot is not None:
                    return self._seen(slot)
                buffer = p2p.buffer(self._specs)
            else:
                buffer = self._pool.pop() if self._pool else p2p.buffer(self._specs)
                if inward.fill(tag, self._heads[microbatch], buffer.parts, self._size):
                    return buffer
        except RuntimeError as error:
            raise p2p.failure(error, self._channel, microbatch) from error
        p2p.receive_elsewhere(self._channel, microbatch, buffer.tensors)
        return buffer

    def _connected(self) -> Inward:
        assert self._p2p.local is not None
        self._inward = self._p2p.local.inward(self._channel.source)
        return self._inward

    def _seen(self, slot: Mapped) -> InSlot:
        """The message in the slot, its views made once."""
        message: InSlot | None = slot.messages.get(self._tag)
        if message is None or message.specs is not self._specs:
            message = slot.messages[self._tag] = InSlot(slot, self._specs)
            self._p2p.places.add(slot.whole.untyped_storage().data_ptr())
        return message
