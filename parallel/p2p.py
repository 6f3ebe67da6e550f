"""Messages between pipeline ranks: posted early, waited for late, never mistaken for one another.

Not here: which message goes when (schedules, pipeline.py). A *channel* is one direction across one stage boundary;
its messages come in the order of the schedule. On first use of a channel, and when its shapes change, its two ends
compare headers (headers.py): so a swapped, short, long or mistyped message is a ChannelError on both ends before a
byte of it moves. After that a message is bare tensors: no header, no synchronisation.

gloo tells messages apart by tag, of which the header's number is a part: ends that are not at the same header never
take each other's messages. NCCL has no tags: each ordered pair of ranks has a communicator of its own, on which both
ends post in the order that `check` has proved. CUDA tensors on gloo are staged through host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from plait.parallel.headers import (
    MAX_TENSORS,
    Channel,
    ChannelError,
    ChannelTimeout,
    Headers,
    Specs,
    TensorSpec,
)
from plait.parallel.mesh import Mesh
from plait.parallel.slots import span_of
from plait.parallel.ways import Buffer, InSlot, WayIn, WayOut

__all__ = ["MAX_TENSORS", "P2P", "Channel", "ChannelError", "ChannelTimeout", "Receipt", "Sent", "TensorSpec"]

_TAG_LIMIT = 1 << 30  # tags from here on belong to direct.py
Way = TypeVar("Way", WayIn, WayOut)
_Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]  # of one message


class Sent:
    """A started message. Owns its tensors until `wait` returns."""

    __slots__ = ("_p2p", "_channel", "_microbatch", "_works", "_tensors")

    def __init__(self, p2p: P2P, channel: Channel, microbatch: int, works: list[Any], tensors: list[Tensor]) -> None:
        self._p2p, self._channel, self._microbatch = p2p, channel, microbatch
        self._works, self._tensors = works, tensors

    def wait(self) -> None:
        """Blocks (NCCL: the current stream) until the tensors may change; then lets go of them."""
        if self._works:
            self._p2p.finish(self._works, self._channel, self._microbatch)
            self._works = self._tensors = []


class Receipt:
    """A message to be received: posted, or posted as soon as its channel is verified."""

    __slots__ = ("_p2p", "channel", "microbatch", "specs", "tensors", "_message", "_works")

    def __init__(self, p2p: P2P, channel: Channel, microbatch: int, specs: Specs) -> None:
        self._p2p, self.channel, self.microbatch, self.specs = p2p, channel, microbatch, specs
        self.tensors: list[Tensor] = []  # after `wait`
        quick = p2p.ends[channel].way is not None
        self._message: Buffer | InSlot | None = None if quick else p2p.buffer(specs)
        self._works: list[Any] | None = None  # None: not posted

    def post(self) -> None:
        """Starts the receive, where it is not a quick way's."""
        self._works = []
        if self._p2p.way_in(self.channel) is None:
            assert self._message is not None
            tensors = self._message.tensors
            self._works = self._p2p.start(self.channel, self.microbatch, tensors, sending=False)
        else:
            self.release()

    def wait(self) -> list[Tensor]:
        """Blocks (NCCL: the current stream) until the message is there; returns its tensors, to be released later."""
        if self._works is None:
            self._p2p.post_until(self)
        if self._message is None:
            way = self._p2p.way_in(self.channel)
            assert way is not None, "what is not posted has a quick way"
            self._message = way.take(self.microbatch)
        if self._works:
            self._p2p.finish(self._works, self.channel, self.microbatch)
        self._works, self.tensors = [], self._message.tensors
        if self._p2p.staged:
            self.tensors = [tensor.to(self._p2p.device, copy=True) for tensor in self.tensors]
            self._message.release()
        return self.tensors

    def release(self) -> None:
        """Nobody may read the tensors any more."""
        if self._message is not None and not self._p2p.staged:  # what was handed out then is a copy
            self._message.release()
            self._message = None


class P2P(Headers):
    """The channels of one pipeline on this rank.

    Owns the buffers of receives. One thread uses it. Construction makes communicators on NCCL, so all ranks of the
    axis construct their pipelines in the same order.
    """

    def __init__(
        self, mesh: Mesh, channels: Sequence[Channel], num_microbatches: int, *, tags: bool | None = None
    ) -> None:
        """`tags`: tell messages apart by tag, not by a communicator per link; None: what the backend can do."""
        if (max((c.number for c in channels), default=0) + 1) * num_microbatches * 2 * MAX_TENSORS >= _TAG_LIMIT:
            raise ValueError(f"{len(channels)} channels x {num_microbatches} micro-batches exceed the tags of gloo")
        axis, device = mesh.axis("pp"), mesh.device
        assert axis.group is not None, "a channel needs two ranks"
        self.device = device
        self.nccl = "nccl" in dist.get_backend_config(axis.group)
        self.staged = device.type == "cuda" and not self.nccl
        self._group: Any = axis.group
        tags = not self.nccl if tags is None else tags
        super().__init__(axis, channels, num_microbatches, tags=tags, timeout_s=mesh.timeout_s)
        self._links = {} if self.tags else self._communicators(mesh, channels)
        self._unposted: dict[int, list[Receipt]] = {c.source: [] for c in channels}  # per link, in its order
        self._free: dict[_Shapes, list[Buffer]] = {}
        self._used: set[_Shapes] = set()  # since the last listed step began
        self.num_buffers = 0  # tensors of receive buffers ever made
        self.places: set[int] = set()  # where received messages lie

    def _communicators(self, mesh: Mesh, channels: Sequence[Channel]) -> dict[tuple[int, int], Any]:
        """One communicator per link of this rank, made in one order on all ranks.

        Each carries one number at once: NCCL connects on first use and blocks the host until both ends come, which in
        the middle of a schedule could be a deadlock.
        """
        links = sorted({(c.source, c.target) for c in channels}, key=lambda link: (sorted(link), link))
        made: dict[tuple[int, int], Any] = {}
        for link in [link for link in links if self.axis.coord in link]:
            low, high = sorted(self.axis.ranks[coord] for coord in link)
            made[link] = mesh.new_group((low, high), f"link {link[0]} to {link[1]}")
            number = torch.zeros(1, device="cpu" if self.staged else self.device)
            sending = self.axis.coord == link[0]
            peer = _place(link, sending)
            (made[link].send([number], peer, 0) if sending else made[link].recv([number], peer, 0)).wait()
        return made

    # ---- sending --------------------------------------------------------------------------------------------------

    def send(self, channel: Channel, microbatch: int, tensors: Sequence[Tensor], specs: Specs) -> Sent:
        """Starts a message described by `specs`; the tensors must not change until the returned handle was waited on.

        On first use, or with other specs than the last time, first waits until the receiver's header is there; so
        does the first message of a listed step.
        """
        end = self.ends[channel]
        if end.listed:
            self.hold_against_list(channel, end, microbatch, specs)
        elif specs is not end.specs:
            self.announce(channel, microbatch, specs)
            self.verify(channel)
        way = self.way_out(channel)
        if way is not None and way.send(microbatch, tensors):
            return Sent(self, channel, microbatch, [], [])
        if self.staged:
            tensors = [tensor.cpu() for tensor in tensors]
        kept = []
        for tensor in tensors:
            kept.append(tensor.contiguous())
        works = self.start(channel, microbatch, kept, sending=True)
        return Sent(self, channel, microbatch, works, kept if works else [])

    # ---- receiving ------------------------------------------------------------------------------------------------

    def receive(self, channel: Channel, microbatch: int) -> Receipt:
        """Posts a receive with the announced specs into free buffers; `.wait()` gives the tensors.

        Before the channel is verified the receive, and all later ones of the link, are posted by the first `.wait()`.
        """
        end, unposted = self.ends[channel], self._unposted[channel.source]
        receipt = Receipt(self, channel, microbatch, end.of(microbatch))
        if end.verified and not unposted:
            receipt.post()
        else:
            unposted.append(receipt)
            self._post_verified(unposted)
        return receipt

    def post_until(self, receipt: Receipt) -> None:
        """Verifies and posts what the link still has to post, up to this receipt."""
        unposted = self._unposted[receipt.channel.source]
        while receipt in unposted:
            self.verify(unposted[0].channel)
            self._post_verified(unposted)

    def _post_verified(self, unposted: list[Receipt]) -> None:
        """Posts receives of a link in order, up to the first whose channel is not verified."""
        while unposted and self.ends[unposted[0].channel].verified:
            unposted.pop(0).post()

    def pool(self, specs: Specs) -> list[Buffer]:
        """The free receive buffers of messages that hold this."""
        shapes = tuple((spec.shape, spec.dtype) for spec in specs)
        self._used.add(shapes)
        return self._free.setdefault(shapes, [])

    def buffer(self, specs: Specs) -> Buffer:
        """A free receive buffer of those shapes and dtypes; a new one where there is none."""
        pool = self.pool(specs)
        if pool:
            return pool.pop()
        where = "cpu" if self.staged else self.device
        tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=where) for spec in specs]
        self.num_buffers += len(tensors)
        self.places.update(tensor.untyped_storage().data_ptr() for tensor in tensors)
        return Buffer(tensors, pool)

    def begin(self, listed: bool) -> None:
        """Opens a step. A listed one drops free buffers of shapes that were not asked for since the one before."""
        if listed:
            for shapes in self._free.keys() - self._used:
                for buffer in self._free.pop(shapes):
                    self.places -= {tensor.untyped_storage().data_ptr() for tensor in buffer.tensors}
            self._used.clear()
        else:
            for end in self.ends.values():
                end.listed = False

    # ---- quick ways -----------------------------------------------------------------------------------------------

    def way_out(self, channel: Channel) -> WayOut | None:
        """The quick way of a channel of this rank's messages; None where there is none, now or ever."""
        return self._way(channel, channel.target, WayOut)

    def way_in(self, channel: Channel) -> WayIn | None:
        """The same of messages to this rank."""
        return self._way(channel, channel.source, WayIn)

    def _way(self, channel: Channel, peer: int, kind: type[Way]) -> Way | None:
        end = self.ends[channel]
        if end.way is None and self._is_quick(channel, peer):
            assert end.specs is not None
            end.way = kind(self, channel, end.specs)
        way: Way | None = end.way
        return way

    def _is_quick(self, channel: Channel, peer: int) -> bool:
        """Whether all messages of a verified channel are alike, of tensors on CPU, and stay on this machine."""
        end = self.ends[channel]
        if end.specs is None or not end.verified or self.local is None or self.device.type != "cpu":
            return False
        size = span_of(spec.num_bytes for spec in end.specs)
        return not any(spec.plain for spec in end.specs) and self.local.carries(peer, size)

    def receive_elsewhere(self, channel: Channel, microbatch: int, tensors: Sequence[Tensor]) -> None:
        """Receives a message that had no room on its quick way."""
        tag = self.ends[channel].tag + microbatch * MAX_TENSORS
        self.finish(_post(self._group.recv, tensors, channel.source, tag, 1), channel, microbatch)

    # ---- both -----------------------------------------------------------------------------------------------------

    def start(self, channel: Channel, microbatch: int, tensors: Sequence[Tensor], *, sending: bool) -> list[Any]:
        """Starts the tensors of a message; returns works to wait for, none for an empty tensor."""
        if self.tags:
            group, peer = self._group, channel.target if sending else channel.source
            tag, step = self.ends[channel].tag + microbatch * MAX_TENSORS, 1
        else:
            link = (channel.source, channel.target)
            group, peer, tag, step = self._links[link], _place(link, sending), 0, 0
        post = group.send if sending else group.recv
        try:
            if self.local is not None:
                if sending:
                    if self.local.send(peer, tag, tensors):
                        return []
                elif local := self.local.receive(peer, tag, tensors, partial(_post, post, tensors, peer, tag, step)):
                    return local
            return _post(post, tensors, peer, tag, step)
        except RuntimeError as error:
            raise ChannelError(f"{self.where(channel, microbatch)}: {error}") from error

    def finish(self, works: Sequence[Any], channel: Channel, microbatch: int) -> None:
        """Waits for the tensors of a message; a failure becomes a ChannelError that names action and peer."""
        try:
            for work in works:
                work.wait() if self.nccl else work.wait(self.timeout)
        except RuntimeError as error:
            raise self.failure(error, channel, microbatch) from error

    def failure(self, error: RuntimeError, channel: Channel, microbatch: int) -> ChannelError:
        """What a failed message raises."""
        kind = ChannelTimeout if "timed out" in str(error).lower() else ChannelError
        return kind(f"{self.where(channel, microbatch)}: {error}")


def _post(post: Callable[..., Any], tensors: Sequence[Tensor], peer: int, tag: int, step: int) -> list[Any]:
    """Works of `post` for the tensors that are not empty; the tag grows by `step` for each."""
    works = []
    for tensor in tensors:
        if tensor.numel():
            works.append(post([tensor], peer, tag))
        tag += step
    return works


def _place(link: tuple[int, int], sending: bool) -> int:
    """The peer's rank in the communicator of a link, whose members stand in ascending order."""
    return 1 if (link[1] > link[0]) == sending else 0
