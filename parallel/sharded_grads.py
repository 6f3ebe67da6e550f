"""ZeRO-2: the whole gradient of a bucket exists only from its first weight gradient of a micro-batch to its last.

Not here: which buckets there are (data.py), the other ZeRO stages. The one idea: a bucket that begins to fill borrows
a zeroed full-size buffer; when its last gradient of the micro-batch has arrived, the buffer is reduce-scattered, this
rank's part is added to the shard that the bucket keeps, and the buffer goes to the next bucket. At most
MAX_IN_FLIGHT sums are under way; they are started and waited for in one order on all dp ranks. Vectors have buckets
of their own: a split backward has their gradients in I, those of the matrices in W.

Gradients then take bytes / dp plus a few buckets, and each micro-batch sends what ZeRO-1 sends once per step
(Rajbhandari et al. 2020, section 5.2; gradient accumulation over M micro-batches sends M times).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.parallel.buckets import Bucket, Slot
from plait.parallel.wire import Relay, advance_all

MAX_IN_FLIGHT = 2  # one travels while the next one's gradients are computed


@dataclass
class _Flight:
    """A reduce-scatter under way: this rank's part arrives in its place of `full`."""

    bucket: Bucket
    full: Tensor
    sums: Relay


class GradShards:
    """The full-size gradient buffers that the buckets of one `DataParallel` share.

    Rule: the thread that runs backward. `num_buffers` counts those made; it stays as it is after the first step.
    """

    def __init__(self) -> None:
        self.num_buffers = 0
        self._free: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}
        self._flights: deque[_Flight] = deque()

    def lend(self, bucket: Bucket) -> None:
        """Gives the bucket a zeroed buffer and its parameters a `main_grad` in it; does nothing when it has one."""
        if bucket.full is not None:
            return
        like = bucket.grads
        free = self._free.get((bucket.numel, like.dtype, like.device))
        if free:
            bucket.full = free.pop().zero_()
        else:
            self.num_buffers += 1
            bucket.full = torch.zeros(bucket.numel, dtype=like.dtype, device=like.device)
        for slot in bucket.slots:
            slot.param.main_grad = bucket.view(bucket.full, slot)  # type: ignore[attr-defined]

    def arrived(self, bucket: Bucket, slot: Slot, stage: Sequence[Bucket]) -> None:
        """A gradient of a micro-batch is complete; starts the sums of the stage's buckets that it completes.

        A buffer may hold more than that micro-batch (a schedule does I of the next before W of this): sums add up
        whichever buffer a gradient went into. A parameter that gets none holds its bucket's buffer to the end.
        """
        bucket.arrivals[slot] += 1
        for before, other in zip((None, *stage), stage, strict=False):
            in_turn = before is None or before.passes > other.passes
            if in_turn and all(other.arrivals[s] > other.passes for s in other.slots):
                self._start(other)

    def complete(self, stage: Sequence[Bucket]) -> None:
        """The step's gradients of a stage are there: starts what parameters without a gradient still hold up."""
        num_passes = max([1, *(bucket.passes + (bucket.full is not None) for bucket in stage)])
        for bucket in stage:
            while bucket.passes < num_passes:
                self._start(bucket)
            bucket.started = True

    def finish(self) -> None:
        """Waits until all parts are added to their shards. RuntimeError names a peer that did not answer."""
        advance_all([flight.sums for flight in self._flights])
        while self._flights:
            self._settle()

    def drop(self) -> None:
        """Ends what is under way and forgets it, also when peers are gone."""
        for flight in self._flights:
            flight.sums.drop()
        self._flights.clear()

    @property
    def is_idle(self) -> bool:
        """True when no sum is under way."""
        return not self._flights

    def _start(self, bucket: Bucket) -> None:
        while len(self._flights) >= MAX_IN_FLIGHT:
            self._settle()
        if bucket.nodes is not None:  # on to the next phase, in the node or across
            for flight in self._flights:
                flight.sums.advance()
        self.lend(bucket)  # its gradients may all have gone with an earlier sum
        full = bucket.full
        assert full is not None
        self._flights.append(_Flight(bucket, full, Relay(bucket.scatter, full)))
        bucket.passes += 1
        bucket.give_back()

    def _settle(self) -> None:
        flight = self._flights[0]
        flight.sums.wait()
        self._flights.popleft()
        start, stop = flight.bucket.shard
        flight.bucket.grads.add_(flight.full[start:stop])
        full = flight.full
        self._free.setdefault((full.numel(), full.dtype, full.device), []).append(full)
