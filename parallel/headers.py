"""What both ends of a channel know of its messages before one moves: micro-batch, shapes, dtypes.

Not here: the messages themselves (p2p.py). A *header* is a JSON text in the store of the process group. The one idea:
a header lies there only when something is new, so that a message is bare tensors; and whatever the two ends could
think differently is compared, or made a part of the tag, before the first byte.

    static step   every micro-batch has the same shapes: both ends lay a header on first use and when shapes change
    listed step   each micro-batch has its own: the receiving end lays one header that lists them, at the start of
                  the step; the sending end holds each message against it. The gradients that come back have the
                  shapes of what was sent and need none
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.parallel.local_links import LocalLinks
from plait.parallel.mesh import Axis

MAX_TENSORS = 8  # per message; part of the tag
PLAIN_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


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

    @property
    def num_bytes(self) -> int:
        """Of one such tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


Specs = tuple[TensorSpec, ...]  # of one message


@dataclass(frozen=True, eq=False)
class Channel:
    """One direction across a stage boundary: "F" from stage to stage + 1, "G" (gradient) from stage to stage - 1.

    A key by identity: hashing the fields would cost more than what is looked up.
    """

    stage: int  # the maker's
    kind: str
    source: int  # coords on the pipeline axis
    target: int
    number: int  # distinct within one P2P, the same on both ends

    def __str__(self) -> str:
        user = self.stage + 1 if self.kind == "F" else self.stage - 1
        what = "activations" if self.kind == "F" else "gradients"
        return f"{what} of stage {self.stage} to stage {user}"


class End:
    """What one end of a channel knows of it since its last header."""

    __slots__ = ("specs", "each", "listed", "first", "generation", "tag", "verified", "peer_grads", "way")

    def __init__(self) -> None:
        self.specs: Specs | None = None  # of every message; None: no header yet, or a listed step
        self.each: Sequence[Specs] | None = None  # listed: of each micro-batch; the sender has them from its peer
        self.listed = False
        self.first = 0  # the micro-batch that opens the channel
        self.generation = 0  # how many headers there were
        self.tag = 0  # of the first tensor of micro-batch 0
        self.verified = False  # this generation's headers agree
        self.peer_grads: tuple[bool, ...] = ()  # at the sender: entries whose gradient the receiver sends back
        self.way: Any = None  # of its messages, when all are alike and stay on this machine (ways.py)

    def of(self, microbatch: int) -> Specs:
        """What the message of a micro-batch holds."""
        specs = self.specs if self.each is None else self.each[microbatch]
        assert specs is not None, "announce comes before receive"
        return specs


class Headers:
    """This rank's ends of the channels of one pipeline, and the texts of what goes wrong on them.

    Construction counts in the store, so all ranks of the axis construct their pipelines in the same order. `tags`:
    messages are told apart by tag (gloo); else by order alone (NCCL).
    """

    def __init__(
        self, axis: Axis, channels: Sequence[Channel], num_microbatches: int, *, tags: bool, timeout_s: float
    ) -> None:
        self.axis, self.num_microbatches, self.timeout_s, self.tags = axis, num_microbatches, timeout_s, tags
        self.timeout = timedelta(seconds=timeout_s)
        self.ends = {channel: End() for channel in channels}
        self._store = dist.distributed_c10d._get_default_store()
        ranks = "-".join(map(str, axis.ranks))
        self.local = LocalLinks(axis.coord, timeout_s) if tags else None  # their places travel with the headers
        self._prefix = f"plait/p2p/{ranks}/{self._store.add(f'plait/p2p/{ranks}/{axis.coord}', 1)}"

    def announce(self, channel: Channel, microbatch: int, specs: Specs) -> None:
        """Lays down this end's header if `specs` differ from the last; `microbatch` is the first that has them."""
        end = self.ends[channel]
        if specs != end.specs:
            self._open(channel, listed=False)
            end.specs, end.first = specs, microbatch
            self._lay(channel, end, [specs])

    def announce_each(self, channel: Channel, microbatch: int, each: Sequence[Specs]) -> None:
        """The receiving end enters a listed step: one header says what each micro-batch's message holds."""
        end = self._open(channel, listed=True)
        end.each, end.first = each, microbatch
        self._lay(channel, end, each)
        end.verified = not self._confirms(end)

    def agree(self, channel: Channel, each: Sequence[Specs]) -> None:
        """Enters a listed step of a channel whose ends both know what it carries: no header."""
        end = self._open(channel, listed=True)
        end.each, end.verified = each, True

    def follow(self, channel: Channel) -> None:
        """The sending end enters a listed step: what each message must be comes with the receiver's header."""
        self._open(channel, listed=True)

    def peer_grads(self, channel: Channel, microbatch: int) -> tuple[bool, ...]:
        """For each entry of a message sent: whether the receiver will send its gradient back."""
        end = self.ends[channel]
        return end.peer_grads if end.each is None else tuple(spec.needs_grad for spec in end.each[microbatch])

    def listed(self, channel: Channel) -> Sequence[Specs]:
        """What a channel that is in a listed step carries, by micro-batch; the sender knows it after its first."""
        each = self.ends[channel].each
        assert each is not None
        return each

    def hold_against_list(self, channel: Channel, end: End, microbatch: int, specs: Specs) -> None:
        """ChannelError unless the message is what the receiver's header lists."""
        if end.each is None:
            end.first = microbatch
            if self._confirms(end):
                self._lay(channel, end, [specs])
            theirs = self._read(channel, end)
            whole = theirs["listed"] and theirs["microbatch"] == microbatch
            end.each = [_parse(entries) for entries in theirs["entries"]] if whole else []
            end.verified = True
        expected = end.each[microbatch] if end.each else None
        if expected is None or _bare(expected) != _bare(specs):
            there = "another form or order" if expected is None else _text(microbatch, expected)
            where = self.where(channel, microbatch)
            raise ChannelError(f"{where}: this end has {_text(microbatch, specs)}, the other end {there}")

    def _open(self, channel: Channel, *, listed: bool) -> End:
        """Brings an end to its next header."""
        end = self.ends[channel]
        end.generation += 1
        end.specs, end.each, end.listed, end.verified, end.way = None, None, listed, False, None
        end.tag = (2 * channel.number + end.generation % 2) * self.num_microbatches * MAX_TENSORS
        return end

    def _confirms(self, end: End) -> bool:
        """Whether a listed step's sender answers with a header of its own: on first use, and where no tag tells."""
        return end.generation == 1 or not self.tags

    def _lay(self, channel: Channel, end: End, each: Sequence[Specs]) -> None:
        """Puts a header of this end into the store."""
        for specs in each:
            if len(specs) > MAX_TENSORS:
                raise ValueError(f"{channel}: {len(specs)} entries; a message has {MAX_TENSORS} at most")
        entries = [[[str(s.dtype)[6:], list(s.shape), s.needs_grad, s.plain] for s in specs] for specs in each]
        place = self.local and self.local.place
        header = {"microbatch": end.first, "listed": end.listed, "entries": entries, "place": place}
        self._store.set(self._key(channel, end, self.axis.coord), json.dumps(header))

    def _read(self, channel: Channel, end: End) -> dict[str, Any]:
        """Waits for the other end's header. That of a listed step is one of many: who reads it clears it away."""
        peer = channel.source + channel.target - self.axis.coord
        key = self._key(channel, end, peer)
        try:
            self._store.wait([key], self.timeout)
            header: dict[str, Any] = json.loads(self._store.get(key))
            if end.listed:
                self._store.delete_key(key)
        except RuntimeError as error:  # DistStoreError is one
            where = self.where(channel, end.first)
            raise ChannelTimeout(f"{where}: no header from the peer within {self.timeout_s} s: {error}") from error
        if self.local is not None:
            self.local.learn(peer, header["place"])
        return header

    def verify(self, channel: Channel) -> None:
        """Waits for the other end's header and compares; ChannelError shows both."""
        end = self.ends[channel]
        if end.verified:
            return
        theirs, mine = self._read(channel, end), end.of(end.first)
        specs = _parse(theirs["entries"][0])
        if (theirs["microbatch"], theirs["listed"], _bare(specs)) != (end.first, end.listed, _bare(mine)):
            where, form = self.where(channel, end.first), " of a list" * (theirs["listed"] != end.listed)
            text = f"this end has {_text(end.first, mine)}, the other end {_text(theirs['microbatch'], specs)}{form}"
            raise ChannelError(f"{where}: {text}")
        end.peer_grads = tuple(spec.needs_grad for spec in specs)
        end.verified = True

    def _key(self, channel: Channel, end: End, coord: int) -> str:
        """Where the end at `coord` lays the header."""
        return f"{self._prefix}/{channel.number}/{end.generation}/{coord}"

    def where(self, channel: Channel, microbatch: int) -> str:
        """This end of a message, for errors: rank, action, channel, peer."""
        sending = self.axis.coord == channel.source
        user = channel.stage + 1 if channel.kind == "F" else channel.stage - 1
        letter = "F" if channel.kind == "F" else "B"
        action = f"{channel.stage}SEND_{letter}{microbatch}" if sending else f"{user}RECV_{letter}{microbatch}"
        peer = self.axis.ranks[channel.target if sending else channel.source]
        return f"rank {self.axis.ranks[self.axis.coord]} action {action} ({channel}), peer rank {peer}"


def specs_of(values: Sequence[Any]) -> Specs:
    """What a message of these tensors and plain values holds."""
    return tuple(
        TensorSpec(tuple(v.shape), v.dtype)
        if isinstance(v, Tensor)
        else TensorSpec((), PLAIN_DTYPES[type(v)], plain=True)
        for v in values
    )


def fits(values: Sequence[Any], specs: Specs) -> bool:
    """Whether `specs` describe these tensors and plain values."""
    if len(values) != len(specs):
        return False
    for value, spec in zip(values, specs, strict=True):
        if isinstance(value, Tensor):
            if value.shape != spec.shape or value.dtype != spec.dtype or spec.plain:
                return False
        elif not spec.plain or PLAIN_DTYPES[type(value)] != spec.dtype:
            return False
    return True


def grad_specs(specs: Specs) -> Specs:
    """What comes back for a message: the gradients of the entries that need one."""
    return tuple(TensorSpec(s.shape, s.dtype) for s in specs if s.needs_grad)


def _parse(entries: Sequence[Sequence[Any]]) -> Specs:
    """The specs that a header describes."""
    return tuple(
        TensorSpec(tuple(shape), getattr(torch, dtype), grad, plain) for dtype, shape, grad, plain in entries
    )


def _bare(specs: Specs) -> list[tuple[Any, ...]]:
    """What both ends must agree on: who wants a gradient is the receiver's say alone."""
    return [(spec.shape, spec.dtype, spec.plain) for spec in specs]


def _text(microbatch: int, specs: Specs) -> str:
    entries = (f"{str(s.dtype)[6:]}{list(s.shape)}" + " plain" * s.plain for s in specs)
    return f"micro-batch {microbatch}: {', '.join(entries) or 'nothing'}"
