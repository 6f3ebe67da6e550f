"""Tensors on a device: copied into the pool by a stream of their own while training goes on.

Not for host tensors. The one idea: order is kept by events between streams, never by the host: the copies wait for
what was computed before the call, and what is computed later waits for the copies where it would overwrite them.
Has not run on a card yet: the order of calls is held by a recording stand-in for `Streams` (tests/test_device.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

BUCKET_BYTES = 64 << 20  # one event each; a transfer of this size runs at the link's full rate
SMALL_BYTES = 1 << 20  # tensors below are gathered, so that copies are large


class DevicePiece(NamedTuple):
    """Row-major bytes of a device tensor and their place in the file. owner: whose write waits for it, None: all."""

    tensor: torch.Tensor
    start: int
    stop: int
    file_offset: int
    owner: Any

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

    def gather(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Joins [n] uint8 tensors on the copy stream."""

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

    def gather(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            return torch.cat(list(parts))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def record(self) -> Any:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def hold(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def wait(self, event: Any) -> None:
        event.synchronize()


class _Bucket(NamedTuple):
    owner: Any
    event: Any
    streams: Streams
    ranges: tuple[tuple[int, int], ...]  # (file offset, bytes)


class DeviceCopies:
    """The device copies of one save. `close()` returns when none runs.

    start() gives all copies to the copy stream; unowned tensors may be overwritten by what the compute stream gets
    after it, owned ones after `hold_writes(owner)`. A thread then tells `fill(file_offset, bytes)` of what is there,
    or `fail(text)`. Sources are kept until they have been read.
    """

    def __init__(self, fill: Callable[[int, int], None], fail: Callable[[str], None]) -> None:
        self._fill, self._fail = fill, fail
        self._buckets: list[_Bucket] = []
        self._kept: list[torch.Tensor] = []
        self._thread: threading.Thread | None = None

    def start(
        self,
        pieces: Sequence[DevicePiece],
        streams_of: Callable[[torch.device], Streams],
        host: Callable[[int, int], torch.Tensor],
    ) -> None:
        """Starts all copies. `host(file_offset, bytes)` gives the pool's memory, [bytes] uint8."""
        devices = {piece.tensor.device for piece in pieces}
        for device in sorted(devices, key=str):
            here = [piece for piece in pieces if piece.tensor.device == device]
            streams = streams_of(device)
            sources = {
                piece.file_offset: bytes_of(piece.tensor, piece.start, piece.stop) for piece in here
            }  # strided ones: computed first
            streams.begin()
            for bucket in buckets_of(here):
                self._copy(bucket, sources, streams, host)
        for copied in self._buckets:
            if copied.owner is None:
                copied.streams.hold(copied.event)
        self._thread = threading.Thread(target=self._arrive, name="plait-device", daemon=True)
        self._thread.start()

    def hold_writes(self, owner: Any) -> None:
        """Lets the compute streams wait until the owner's tensors (None: all) have been read."""
        for bucket in self._buckets:
            if owner is None or bucket.owner is owner:
                bucket.streams.hold(bucket.event)

    def close(self) -> None:
        """Waits for the copies that run."""
        if self._thread is not None:
            self._thread.join()
        self._buckets, self._kept, self._thread = [], [], None

    def _copy(
        self,
        pieces: list[DevicePiece],
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
        self._buckets.append(_Bucket(pieces[0].owner, streams.record(), streams, tuple(ranges)))

    def _arrive(self) -> None:
        try:
            for bucket in self._buckets:
                bucket.streams.wait(bucket.event)
                for file_offset, num_bytes in bucket.ranges:
                    self._fill(file_offset, num_bytes)
        except BaseException as error:  # a failed copy ends the save, not this thread alone
            self._fail(f"copying from the device failed: {error}")


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
