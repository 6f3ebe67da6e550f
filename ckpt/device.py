"""Tensors on a device: copied into the pool by a stream of their own while training goes on.

Not for host tensors. The one idea: order is kept by events between streams, never by the host: the copies wait for
what was computed before the call, and what is computed later waits for the copies where it would overwrite them.
What no guard owns is copied first, since all later work waits for it. What a guard owns is sampled before any later
work and again behind its copy: so a write that came without a word is found.
Has not run on a card yet: the order of calls is held by a recording stand-in for `Streams` (tests/test_device.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

BUCKET_BYTES = 64 << 20  # one event each; a transfer of this size runs at the link's full rate
SMALL_BYTES = 1 << 20  # tensors below are gathered, so that copies are large
_SAMPLE_BYTES = 64  # of each piece, compared before and after its copy


class DevicePiece(NamedTuple):
    """Row-major bytes of a device tensor and their place in the file. owner: whose write waits for it, None: all.
    name: for errors."""

    tensor: torch.Tensor
    start: int
    stop: int
    file_offset: int
    owner: Any
    name: str = ""

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.tensor.element_size()


def bytes_of(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Returns row-major elements [start, stop) as [num_bytes] uint8 where the tensor is: its own memory where it is
    contiguous, else a copy."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    flat = plain.as_strided((plain.numel(),), (1,), plain.storage_offset())  # one element may have any stride
    return flat[start:stop].view(torch.uint8)


class Streams(Protocol):
    """The calls to one device, so that a test can record them. Events are opaque."""

    def begin(self) -> None:
        """Lets the copy stream wait for all that the compute stream has been given so far."""

    def gather(self, parts: Sequence[torch.Tensor], now: bool = False) -> torch.Tensor:
        """Joins [n] uint8 tensors on the copy stream; now: on the compute stream, before all that it gets later."""

    def differ(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Returns where two [n] uint8 tensors differ, [n] bool, on the copy stream."""

    def read(self, flags: torch.Tensor) -> list[bool]:
        """Lets the calling thread wait for flags, through the copy stream."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Starts a copy to host memory on the copy stream."""

    def record(self) -> Any:
        """Returns an event for all that the copy stream has been given so far."""

    def hold(self, event: Any) -> None:
        """Lets the compute stream wait for the event; the host goes on."""

    def wait(self, event: Any) -> None:
        """Lets the calling thread wait for the event."""


class CudaStreams:
    """torch's streams and events of one CUDA device; the copy stream lives as long as this object."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def begin(self) -> None:
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(ready)

    def gather(self, parts: Sequence[torch.Tensor], now: bool = False) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.current_stream(self._device) if now else self._stream):
            return torch.cat(list(parts))

    def differ(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            return a != b

    def read(self, flags: torch.Tensor) -> list[bool]:
        with torch.cuda.stream(self._stream):
            return list(flags.tolist())

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def record(self) -> Any:
        event = torch.cuda.Event(blocking=True)  # who waits for it sleeps: training needs the cores
        event.record(self._stream)
        return event

    def hold(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def wait(self, event: Any) -> None:
        event.synchronize()


class _Bucket(NamedTuple):
    pieces: list[DevicePiece]  # of one owner
    event: Any
    streams: Streams
    ranges: tuple[tuple[int, int], ...]  # (file offset, bytes)
    sources: tuple[tuple[int, int], ...]  # (address, bytes) on the device
    changed: torch.Tensor | None  # flags of the pieces' samples

    @property
    def owner(self) -> Any:
        return self.pieces[0].owner


class DeviceCopies:
    """The device copies of one save. `close()` returns when none runs.

    start() gives all copies to the copy stream; unowned tensors may be overwritten by what the compute stream gets
    after it, owned ones after `hold_writes(owner)`. A thread then tells `fill(file_offset, bytes)` of what is there,
    or `fail(text)`. Sources are kept until they have been read. `torn`: the name of a tensor that was overwritten
    before. Whatever fails, no copy runs into the pool after start() has raised or close() has returned.
    """

    def __init__(self, fill: Callable[[int, int], None], fail: Callable[[str], None]) -> None:
        self._fill, self._fail = fill, fail
        self._buckets: list[_Bucket] = []
        self._kept: list[torch.Tensor] = []
        self._begun: list[Streams] = []
        self._thread: threading.Thread | None = None
        self.torn: str | None = None

    def start(
        self,
        pieces: Sequence[DevicePiece],
        streams_of: Callable[[torch.device], Streams],
        host: Callable[[int, int], torch.Tensor],
    ) -> None:
        """Starts all copies. `host(file_offset, bytes)` gives the pool's memory, [bytes] uint8."""
        devices = {piece.tensor.device for piece in pieces}
        try:
            for device in sorted(devices, key=str):
                here = [piece for piece in pieces if piece.tensor.device == device]
                self._start(here, streams_of(device), host)
        except BaseException as error:
            self._drain(error)
            raise
        for copied in self._buckets:
            if copied.owner is None:
                copied.streams.hold(copied.event)
        self._thread = threading.Thread(target=self._arrive, name="plait-device", daemon=True)
        self._thread.start()

    def _start(self, here: list[DevicePiece], streams: Streams, host: Callable[[int, int], torch.Tensor]) -> None:
        sources = {
            piece.file_offset: bytes_of(piece.tensor, piece.start, piece.stop) for piece in here
        }  # strided ones: computed first
        buckets = sorted(buckets_of(here), key=lambda bucket: bucket[0].owner is not None)
        before = [self._sampled(bucket, sources, streams, now=True) for bucket in buckets]
        streams.begin()
        self._begun.append(streams)
        for bucket, samples in zip(buckets, before, strict=True):
            self._copy(bucket, samples, sources, streams, host)

    def hold_writes(self, owner: Any, ranges: Sequence[tuple[int, int]] | None = None) -> None:
        """Lets the compute streams wait until the owner's tensors (None: all) have been read; ranges: (address,
        bytes) of those of them that are to be written, None: all."""
        for bucket in self._buckets:
            if owner is not None and bucket.owner is not owner:
                continue
            if ranges is None or any(_overlap(mine, other) for mine in bucket.sources for other in ranges):
                bucket.streams.hold(bucket.event)

    def close(self) -> None:
        """Waits for the copies that run."""
        if self._thread is not None:
            self._thread.join()
        self._buckets, self._kept, self._begun, self._thread = [], [], [], None

    def _drain(self, error: BaseException) -> None:
        """After a failure: returns when nothing is on its way into the pool."""
        for streams in self._begun:
            try:
                streams.wait(streams.record())
            except Exception as later:  # a broken card: nothing moves any more
                error.add_note(f"and the copies under way could not be waited for: {later}")

    def _sampled(
        self, pieces: list[DevicePiece], sources: dict[int, torch.Tensor], streams: Streams, now: bool = False
    ) -> torch.Tensor | None:
        """Returns _SAMPLE_BYTES (or all) of each piece, one behind the other; None when nobody owns them."""
        if pieces[0].owner is None:
            return None
        parts = []
        for piece in pieces:
            spare = piece.num_bytes - _sample_bytes(piece)
            at = piece.file_offset * 2654435761 % (spare + 1)  # anywhere, but not at the same place of all (Knuth)
            parts.append(sources[piece.file_offset][at : at + _sample_bytes(piece)])
        self._kept.append(streams.gather(parts, now))
        return self._kept[-1]

    def _copy(
        self,
        pieces: list[DevicePiece],
        before: torch.Tensor | None,
        sources: dict[int, torch.Tensor],
        streams: Streams,
        host: Callable[[int, int], torch.Tensor],
    ) -> None:
        ranges = []
        for run in runs_of(pieces):
            parts = [sources[piece.file_offset] for piece in run]
            source = parts[0] if len(parts) == 1 else streams.gather(parts)
            self._kept += [*parts, source]
            ranges.append((run[0].file_offset, source.numel()))
            streams.copy(host(*ranges[-1]), source)
        after = self._sampled(pieces, sources, streams)
        changed = None if before is None or after is None else streams.differ(before, after)
        spans = tuple((source.data_ptr(), source.numel()) for source in (sources[p.file_offset] for p in pieces))
        self._buckets.append(_Bucket(pieces, streams.record(), streams, tuple(ranges), spans, changed))

    def _arrive(self) -> None:
        try:
            for bucket in self._buckets:
                bucket.streams.wait(bucket.event)
                self._compare(bucket)
                for file_offset, num_bytes in bucket.ranges:
                    self._fill(file_offset, num_bytes)
        except BaseException as error:  # a failed copy ends the save, not this thread alone
            self._drain(error)
            self._fail(f"copying from the device failed: {error}")

    def _compare(self, bucket: _Bucket) -> None:
        """Notes the first piece whose samples changed while it was copied."""
        if bucket.changed is None or self.torn is not None:
            return
        flags, at = bucket.streams.read(bucket.changed), 0
        for piece in bucket.pieces:
            if any(flags[at : at + _sample_bytes(piece)]):
                self.torn = piece.name
                return
            at += _sample_bytes(piece)


def _sample_bytes(piece: DevicePiece) -> int:
    return min(_SAMPLE_BYTES, piece.num_bytes)


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """True when two ranges of (address, bytes) have a byte in common."""
    return a[0] < b[0] + b[1] and b[0] < a[0] + a[1]


def buckets_of(pieces: Sequence[DevicePiece]) -> list[list[DevicePiece]]:
    """Cuts pieces, in file order, into lists of one owner and up to BUCKET_BYTES (or one piece)."""
    buckets: list[list[DevicePiece]] = []
    size = 0
    for piece in pieces:
        if not buckets or buckets[-1][-1].owner is not piece.owner or size + piece.num_bytes > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(piece)
        size += piece.num_bytes
    return buckets


def runs_of(pieces: Sequence[DevicePiece]) -> list[list[DevicePiece]]:
    """Joins small pieces that lie side by side in the file: one copy each."""
    runs: list[list[DevicePiece]] = []
    for piece in pieces:
        last = runs[-1][-1] if runs else None
        beside = last is not None and last.file_offset + last.num_bytes == piece.file_offset
        if last is not None and beside and max(last.num_bytes, piece.num_bytes) < SMALL_BYTES:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs
