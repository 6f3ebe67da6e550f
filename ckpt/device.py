"""Tensors on a device: copied into the pool by a stream of their own while training goes on.

Not for host tensors, and not the calls to a device (streams.py). The one idea: what no guard owns is copied first,
since all later work waits for it; what a guard owns is copied behind that, and only a write to it waits. It is
sampled before any later work and again behind its copy: so a write that came without a word is found.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from plait.ckpt.streams import Streams

BUCKET_BYTES = 64 << 20  # one event each; a transfer of this size runs at the link's full rate
SMALL_BYTES = 1 << 20  # tensors below are gathered, so that copies are large
_SAMPLE_BYTES = 64  # of each piece, compared before and after its copy
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


def is_plain(tensor: torch.Tensor) -> bool:
    """True when its memory has its row-major bytes."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def bytes_of(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Returns row-major elements [start, stop) as [num_bytes] uint8 where the tensor is: its own memory where it is
    plain, else a copy."""
    if not is_plain(tensor):
        tensor = tensor.resolve_conj().resolve_neg()
        # As integers: no value is interpreted, and a device copies dtypes that it cannot compute with.
        tensor = tensor.view(_SAME_SIZE.get(tensor.element_size(), tensor.dtype)).contiguous()
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())  # one element may have any stride
    if (start, stop) != (0, tensor.numel()):
        flat = flat[start:stop]
    return flat.view(torch.uint8)


def range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the address and the bytes that a tensor spans; (0, 0) for one without memory."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


class _Source(NamedTuple):
    """A piece and what of its tensor's memory tells its writes. plain: the piece's bytes where memory has them; None:
    they are put in order on the copy stream, when it is their turn."""

    piece: DevicePiece
    plain: torch.Tensor | None
    sample: torch.Tensor | None  # of an owned one, [n] uint8
    span: tuple[int, int]  # address and bytes on the device


@dataclass
class _Bucket:
    """Pieces of one owner, copied in one go. sources and before are let go of when the copy has arrived."""

    owner: Any
    streams: Streams
    sources: list[_Source]
    before: torch.Tensor | None  # samples at the call
    spans: list[tuple[int, int]]
    ranges: list[tuple[int, int]] = field(default_factory=list)  # (file offset, bytes)
    event: Any = None
    flags: torch.Tensor | None = None  # on the host: which bytes of the samples changed
    arrived: bool = False


class DeviceCopies:
    """The device copies of one save. `close()` returns when none runs.

    start() gives all copies to the copy streams; unowned tensors may be overwritten by what the compute stream gets
    after it, owned ones after `hold_writes(owner)`. A thread then tells `fill(file_offset, bytes)` of what is there,
    or `fail(text)`. Sources are kept until they have been read. `torn`: the name of a tensor that was overwritten
    before. Whatever fails, no copy runs into the pool after start() has raised or close() has returned.
    """

    def __init__(self, fill: Callable[[int, int], None], fail: Callable[[str], None]) -> None:
        self._fill, self._fail = fill, fail
        self._buckets: list[_Bucket] = []
        self._begun: list[Streams] = []
        self._thread: threading.Thread | None = None
        self.torn: str | None = None

    def start(
        self,
        pieces: Sequence[DevicePiece],
        streams_of: Callable[[torch.device], Streams],
        host: Callable[[int, int], torch.Tensor],
    ) -> None:
        """Starts all copies. `host(file_offset, bytes)` gives the pool's memory, [bytes] uint8. RuntimeError while a
        graph is captured."""
        by_device: dict[torch.device, list[DevicePiece]] = {}
        for piece in pieces:
            by_device.setdefault(piece.tensor.device, []).append(piece)
        lanes = [(streams_of(device), here) for device, here in by_device.items()]
        for streams, _ in lanes:
            streams.check()
        try:
            for streams, here in lanes:
                self._start(streams, here, host)
            self._hold([bucket for bucket in self._buckets if bucket.owner is None])
        except BaseException as error:
            self._drain(error)
            raise
        self._thread = threading.Thread(target=self._arrive, name="plait-device", daemon=True)
        self._thread.start()

    def _start(self, streams: Streams, here: list[DevicePiece], host: Callable[[int, int], torch.Tensor]) -> None:
        buckets = sorted(buckets_of(here), key=lambda bucket: bucket[0].owner is not None)
        known = [[_source_of(piece) for piece in bucket] for bucket in buckets]
        # On the compute stream, before all that it gets later.
        before = [None if sources[0].piece.owner is None else _samples(sources) for sources in known]
        num_flags = sum(samples.numel() for samples in before if samples is not None)
        flags = streams.memory(num_flags) if num_flags else None
        streams.begin()
        self._begun.append(streams)
        at = 0
        with streams.copying():
            for sources, samples in zip(known, before, strict=True):
                owner = sources[0].piece.owner
                bucket = _Bucket(owner, streams, sources, samples, [source.span for source in sources])
                self._copy(bucket, host)
                if flags is not None and samples is not None:
                    bucket.flags = flags[at : at + samples.numel()]
                    changed = torch.ne(samples, _samples(sources))
                    bucket.flags.copy_(changed.view(torch.uint8), non_blocking=True)
                    at += samples.numel()
                bucket.event = streams.record()
                self._buckets.append(bucket)

    def _copy(self, bucket: _Bucket, host: Callable[[int, int], torch.Tensor]) -> None:
        """Within copying(). What is made here is the copy stream's own: once let go of, it is for what that stream
        gets later, and so never more than a bucket's."""
        left = iter(bucket.sources)
        for run in runs_of([source.piece for source in bucket.sources]):
            parts = [_row_major(next(left)) for _ in run]
            joined = parts[0] if len(parts) == 1 else torch.cat(parts)
            bucket.ranges.append((run[0].file_offset, joined.numel()))
            host(*bucket.ranges[-1]).copy_(joined, non_blocking=True)

    def hold_writes(self, owner: Any, ranges: Sequence[tuple[int, int]] | None = None) -> None:
        """Lets the compute streams wait until the owner's tensors (None: all) have been read; ranges: (address,
        bytes) of those of them that are to be written, None: all."""
        self._hold(
            [
                bucket
                for bucket in self._buckets
                if (owner is None or bucket.owner is owner)
                and not bucket.arrived
                and (ranges is None or any(_overlap(mine, other) for mine in bucket.spans for other in ranges))
            ]
        )

    def close(self) -> None:
        """Waits for the copies that run."""
        if self._thread is not None:
            self._thread.join()
        self._buckets, self._begun, self._thread = [], [], None

    def _hold(self, buckets: list[_Bucket]) -> None:
        """Lets each compute stream wait for the last of its buckets, and so for those before it."""
        for bucket in {id(bucket.streams): bucket for bucket in buckets}.values():
            bucket.streams.hold(bucket.event)

    def _drain(self, error: BaseException) -> None:
        """After a failure: returns when nothing is on its way into the pool."""
        for streams in self._begun:
            try:
                streams.wait(streams.record())
            except Exception as later:  # a broken card: nothing moves any more
                error.add_note(f"and the copies under way could not be waited for: {later}")
        self._buckets, self._begun = [], []

    def _arrive(self) -> None:
        try:
            attended: Streams | None = None
            for bucket in self._buckets:
                if bucket.streams is not attended:
                    attended = bucket.streams
                    attended.attend()
                bucket.streams.wait(bucket.event)
                self._compare(bucket)
                bucket.arrived, bucket.sources, bucket.before = True, [], None
                for file_offset, num_bytes in bucket.ranges:
                    self._fill(file_offset, num_bytes)
        except BaseException as error:  # a failed copy ends the save, not this thread alone
            self._drain(error)
            self._fail(f"copying from the device failed: {error}")

    def _compare(self, bucket: _Bucket) -> None:
        """Notes the first piece whose samples changed while it was copied."""
        if bucket.flags is None or self.torn is not None or not bucket.flags.any():
            return
        at = 0
        for source in bucket.sources:
            assert source.sample is not None
            if bucket.flags[at : at + source.sample.numel()].any():
                self.torn = source.piece.name
                return
            at += source.sample.numel()


def _source_of(piece: DevicePiece) -> _Source:
    tensor = piece.tensor
    plain = bytes_of(tensor, piece.start, piece.stop) if is_plain(tensor) else None
    span = range_of(tensor) if plain is None else (plain.data_ptr(), plain.numel())
    if piece.owner is None:
        return _Source(piece, plain, None, span)
    memory = _memory_of(tensor) if plain is None else plain
    num_bytes = min(_SAMPLE_BYTES, memory.numel())
    # Anywhere, but not at the same place of all (Knuth's multiplier).
    at = piece.file_offset * 2654435761 % (memory.numel() - num_bytes + 1)
    return _Source(piece, plain, memory[at : at + num_bytes], span)


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns memory of which each byte is the tensor's, [n] uint8: all of it, or its first element."""
    span_bytes, item = range_of(tensor)[1], tensor.element_size()
    num_bytes = span_bytes if span_bytes == tensor.numel() * item else item
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage(), tensor.storage_offset() * item, (num_bytes,), (1,))


def _samples(sources: list[_Source]) -> torch.Tensor:
    """Returns the samples of an owned bucket, one behind the other."""
    return torch.cat([source.sample for source in sources if source.sample is not None])


def _row_major(source: _Source) -> torch.Tensor:
    if source.plain is not None:
        return source.plain
    return bytes_of(source.piece.tensor, source.piece.start, source.piece.stop)


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
