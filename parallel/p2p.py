"""Messages between pipeline ranks: posted early, waited for late, never mistaken for one another.

Not here: which message goes when (schedules, pipeline.py). A *channel* is one direction across one stage boundary;
its messages come in the order of the schedule. On first use of a channel, and when its shapes change, both ends lay a
header (micro-batch, shapes, dtypes) into the store of the process group and compare: so a swapped, short, long or
mistyped message is a ChannelError on both ends before a byte of it moves. After that a message is bare tensors: no
header, no synchronisation.

gloo tells messages apart by tag. NCCL has no tags: each ordered pair of ranks has a communicator of its own, on which
both ends post in the order that `check` has proved. CUDA tensors on gloo are staged through host memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.parallel.mesh import Mesh

_TAG_LIMIT = 1 << 30  # tags from here on belong to direct.py
MAX_TENSORS = 8  # per message; part of the tag


class ChannelError(RuntimeError):
    """Two ends of a channel disagree, or a message failed. The text names channel, action, peer and both views."""


class ChannelTimeout(ChannelError, TimeoutError):
    """A peer did not answer in time. The text names the peer and the action that waited."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one entry of what a stage takes.

    `needs_grad`: its gradient is sent back. `plain`: a Python bool, int or float, which travels as a 0-dim tensor of
    that dtype and is handed over as a plain value.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool = False
    plain: bool = False


@dataclass(frozen=True)
class Channel:
    """One direction across a stage boundary: "F" from stage to stage + 1, "G" (gradient) from stage to stage - 1."""

    stage: int  # the maker's
    kind: str
    source: int  # coords on the pipeline axis
    target: int
    number: int  # distinct within one P2P, the same on both ends

    def __str__(self) -> str:
        user = self.stage + 1 if self.kind == "F" else self.stage - 1
        what = "activations" if self.kind == "F" else "gradients"
        return f"{what} of stage {self.stage} to stage {user}"


class _End:
    """What one end of a channel knows of it."""

    __slots__ = ("specs", "generation", "verified", "peer_grads")

    def __init__(self) -> None:
        self.specs: tuple[TensorSpec, ...] | None = None  # of the last message
        self.generation = 0  # how many headers this end has laid down
        self.verified = False  # this generation's headers agree
        self.peer_grads: tuple[bool, ...] = ()  # at the sender: entries whose gradient the receiver sends back


class Sent:
    """A started message. Owns its tensors until `wait` returns."""

    __slots__ = ("_p2p", "_channel", "_microbatch", "_works", "_tensors")

    def __init__(self, p2p: P2P, channel: Channel, microbatch: int, works: list[Any], tensors: list[Tensor]) -> None:
        self._p2p, self._channel, self._microbatch = p2p, channel, microbatch
        self._works, self._tensors = works, tensors

    def wait(self) -> None:
        """Blocks (NCCL: the current stream) until the tensors may change; then lets go of them."""
        for work in self._works:
            self._p2p.finish(work, self._channel, self._microbatch, sending=True)
        self._works = self._tensors = []


class Receipt:
    """A posted receive, or one that is posted as soon as its channel is verified."""

    __slots__ = ("_p2p", "channel", "microbatch", "specs", "_works", "_tensors")

    def __init__(self, p2p: P2P, channel: Channel, microbatch: int, specs: tuple[TensorSpec, ...]) -> None:
        self._p2p, self.channel, self.microbatch, self.specs = p2p, channel, microbatch, specs
        self._tensors = [p2p.buffer(spec) for spec in specs]
        self._works: list[Any] | None = None  # None: not posted

    def post(self) -> None:
        """Starts the receive."""
        self._works = [
            self._p2p.start(self.channel, self.microbatch, index, tensor, sending=False)
            for index, tensor in enumerate(self._tensors)
            if tensor.numel()
        ]

    def wait(self) -> list[Tensor]:
        """Blocks (NCCL: the current stream) until the message is there; returns its tensors, to be released later."""
        if self._works is None:
            self._p2p.post_until(self)
        for work in self._works or ():
            self._p2p.finish(work, self.channel, self.microbatch, sending=False)
        self._works = []
        if not self._p2p.staged:
            return self._tensors
        copies = [tensor.to(self._p2p.device, copy=True) for tensor in self._tensors]
        self._p2p.free(self.specs, self._tensors)
        return copies


class P2P:
    """The channels of one pipeline on this rank.

    Owns the buffers of receives. One thread uses it. Construction counts in the store, and makes communicators on
    NCCL, so all ranks of the axis construct their pipelines in the same order.
    """

    def __init__(
        self, mesh: Mesh, channels: Sequence[Channel], num_microbatches: int, *, tags: bool | None = None
    ) -> None:
        """`tags`: tell messages apart by tag, not by a communicator per link; None: what the backend can do."""
        if (max((c.number for c in channels), default=0) + 1) * num_microbatches * MAX_TENSORS >= _TAG_LIMIT:
            raise ValueError(f"{len(channels)} channels x {num_microbatches} micro-batches exceed the tags of gloo")
        axis, device = mesh.axis("pp"), mesh.device
        assert axis.group is not None, "a channel needs two ranks"
        self.axis, self.device, self.timeout_s = axis, device, mesh.timeout_s
        self.num_microbatches = num_microbatches
        self.nccl = "nccl" in dist.get_backend_config(axis.group)
        self.staged = device.type == "cuda" and not self.nccl
        self._group: Any = axis.group
        self._ends = {channel: _End() for channel in channels}
        self._timeout = timedelta(seconds=mesh.timeout_s)
        self._store = dist.distributed_c10d._get_default_store()
        ranks = "-".join(map(str, axis.ranks))
        self._prefix = f"plait/p2p/{ranks}/{self._store.add(f'plait/p2p/{ranks}/{axis.coord}', 1)}"
        self._tags = not self.nccl if tags is None else tags
        self._links = {} if self._tags else self._communicators(mesh, channels)
        self._unposted: dict[int, list[Receipt]] = {c.source: [] for c in channels}  # per link, in its order
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}
        self.num_buffers = 0  # receive buffers ever made

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

    def send(
        self, channel: Channel, microbatch: int, tensors: Sequence[Tensor], specs: tuple[TensorSpec, ...]
    ) -> Sent:
        """Starts a message described by `specs`; the tensors must not change until the returned handle was waited on.

        On first use, or with other specs than the last time, first waits until the receiver's header is there.
        """
        end = self._ends[channel]
        if specs != end.specs:
            self.announce(channel, microbatch, specs)
            self._verify(channel, sending=True)
        works, kept = [], []
        for index, tensor in enumerate(tensors):
            tensor = (tensor.cpu() if self.staged else tensor).contiguous()
            kept.append(tensor)
            if tensor.numel():
                works.append(self.start(channel, microbatch, index, tensor, sending=True))
        return Sent(self, channel, microbatch, works, kept)

    def peer_grads(self, channel: Channel) -> tuple[bool, ...]:
        """For each entry of the last message sent: whether the receiver will send its gradient back."""
        return self._ends[channel].peer_grads

    # ---- receiving ------------------------------------------------------------------------------------------------

    def announce(self, channel: Channel, microbatch: int, specs: tuple[TensorSpec, ...]) -> None:
        """Lays down this end's header if `specs` differ from the last; `microbatch` is the first that has them."""
        end = self._ends[channel]
        if specs == end.specs:
            return
        if len(specs) > MAX_TENSORS:
            raise ValueError(f"{channel}: {len(specs)} entries; a message has {MAX_TENSORS} at most")
        end.specs, end.verified = specs, False
        end.generation += 1
        entries = [[str(s.dtype), list(s.shape), s.needs_grad, s.plain] for s in specs]
        header = json.dumps({"microbatch": microbatch, "entries": entries})
        self._store.set(self._key(channel, end, self.axis.coord == channel.source), header)

    def receive(self, channel: Channel, microbatch: int) -> Receipt:
        """Posts a receive with the announced specs into free buffers; `.wait()` gives the tensors.

        Before the channel is verified the receive, and all later ones of the link, are posted by the first `.wait()`.
        """
        specs, unposted = self._ends[channel].specs, self._unposted[channel.source]
        assert specs is not None, "announce comes before receive"
        receipt = Receipt(self, channel, microbatch, specs)
        unposted.append(receipt)
        self._post_verified(unposted)
        return receipt

    def post_until(self, receipt: Receipt) -> None:
        """Verifies and posts what the link still has to post, up to this receipt."""
        unposted = self._unposted[receipt.channel.source]
        while receipt in unposted:
            self._verify(unposted[0].channel, sending=False)
            self._post_verified(unposted)

    def _post_verified(self, unposted: list[Receipt]) -> None:
        """Posts receives of a link in order, up to the first whose channel is not verified."""
        while unposted and self._ends[unposted[0].channel].verified:
            unposted.pop(0).post()

    def buffer(self, spec: TensorSpec) -> Tensor:
        """A free receive buffer of that shape and dtype."""
        free = self._free.get((spec.shape, spec.dtype))
        if free:
            return free.pop()
        self.num_buffers += 1
        return torch.empty(spec.shape, dtype=spec.dtype, device="cpu" if self.staged else self.device)

    def release(self, specs: tuple[TensorSpec, ...], tensors: Sequence[Tensor]) -> None:
        """Gives the tensors of a received message back as buffers; nobody may read them any more."""
        if not self.staged:  # what was handed out then is a copy
            self.free(specs, tensors)

    def free(self, specs: tuple[TensorSpec, ...], tensors: Sequence[Tensor]) -> None:
        """Takes receive buffers back."""
        for spec, tensor in zip(specs, tensors, strict=True):
            self._free.setdefault((spec.shape, spec.dtype), []).append(tensor)

    # ---- both -----------------------------------------------------------------------------------------------------

    def start(self, channel: Channel, microbatch: int, index: int, tensor: Tensor, *, sending: bool) -> Any:
        """Starts one tensor of a message; returns torch's Work."""
        if self._tags:
            group, peer = self._group, channel.target if sending else channel.source
            tag = (channel.number * self.num_microbatches + microbatch) * MAX_TENSORS + index
        else:
            link = (channel.source, channel.target)
            group, peer, tag = self._links[link], _place(link, sending), 0
        return group.send([tensor], peer, tag) if sending else group.recv([tensor], peer, tag)

    def finish(self, work: Any, channel: Channel, microbatch: int, *, sending: bool) -> None:
        """Waits for one tensor; a failure becomes a ChannelError that names action and peer."""
        try:
            work.wait() if self.nccl else work.wait(self._timeout)
        except RuntimeError as error:
            kind = ChannelTimeout if "timed out" in str(error).lower() else ChannelError
            raise kind(f"{self._where(channel, microbatch, sending)}: {error}") from error

    def _verify(self, channel: Channel, *, sending: bool) -> None:
        """Waits for the other end's header and compares; ChannelError shows both."""
        end = self._ends[channel]
        if end.verified:
            return
        mine = json.loads(self._store.get(self._key(channel, end, sending)))
        where = self._where(channel, mine["microbatch"], sending)
        try:
            key = self._key(channel, end, not sending)
            self._store.wait([key], self._timeout)
            theirs = json.loads(self._store.get(key))
        except RuntimeError as error:  # DistStoreError is one
            raise ChannelTimeout(f"{where}: no header from the peer within {self.timeout_s} s: {error}") from error
        if _essence(mine) != _essence(theirs):
            raise ChannelError(f"{where}: this end has {_text(mine)}, the other end {_text(theirs)}")
        end.peer_grads = tuple(entry[2] for entry in theirs["entries"])
        end.verified = True

    def _key(self, channel: Channel, end: _End, at_source: bool) -> str:
        return f"{self._prefix}/{channel.number}/{end.generation}/{'source' if at_source else 'target'}"

    def _where(self, channel: Channel, microbatch: int, sending: bool) -> str:
        user = channel.stage + 1 if channel.kind == "F" else channel.stage - 1
        letter = "F" if channel.kind == "F" else "B"
        action = f"{channel.stage}SEND_{letter}{microbatch}" if sending else f"{user}RECV_{letter}{microbatch}"
        peer = self.axis.ranks[channel.target if sending else channel.source]
        return f"rank {self.axis.ranks[self.axis.coord]} action {action} ({channel}), peer rank {peer}"


def _place(link: tuple[int, int], sending: bool) -> int:
    """The peer's rank in the communicator of a link, whose members stand in ascending order."""
    return 1 if (link[1] > link[0]) == sending else 0


def _essence(header: dict[str, Any]) -> Any:
    """What both ends must agree on: who wants a gradient is the receiver's say alone."""
    return header["microbatch"], [(dtype, shape, plain) for dtype, shape, _, plain in header["entries"]]


def _text(header: dict[str, Any]) -> str:
    entries = (
        f"{dtype.removeprefix('torch.')}{shape}" + " plain" * plain for dtype, shape, _, plain in header["entries"]
    )
    return f"micro-batch {header['microbatch']}: {', '.join(entries) or 'nothing'}"
