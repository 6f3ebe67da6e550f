"""How a flat gradient is summed over an axis: at once or node by node, in its own dtype or in 16 bits.

Not here: when (data.py, sharded_grads.py), and the collectives themselves. The one idea: a sum is a list of phases,
each one collective on a known part of the flat tensor, so that the phases of many buckets can travel together.

Between nodes a link is slow and shared by the ranks of a node. Hierarchical all-reduce: reduce-scatter in the node,
all-reduce of each rank's part across nodes, all-gather in the node; a node then sends 2 (n - 1) / n of the bytes
once, not once per rank (Horovod's NCCLHierarchicalAllreduce; Mikami et al. 2018, 2D-torus). With ZeRO the middle
phase is a reduce-scatter too, and new weights come back the same way: gathered across nodes, then in the node. So
that every phase is one run of memory, shards lie in the order (place in the node, node): `shard_of`.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from plait.parallel.collectives import Handle, all_gather, all_reduce, reduce_scatter
from plait.parallel.mesh import Axis

_PROBES = (64 << 10, 16 << 20)  # bytes
_MAX_BUCKET = 256 << 20

Nodes = tuple[Axis, Axis]  # an axis that spans nodes: inside this node, and across nodes


@dataclass(frozen=True)
class Phase:
    """One collective over `axis`: a sum of, a scatter into, or a gather from elements `part` of a flat tensor.

    `whole`: what is scattered or gathered, of which `part` is this coord's share; None: all of the flat tensor.
    `dtype`: what travels, summed in fp32 and rounded once; None: the tensor's own.
    """

    kind: Literal["all_reduce", "reduce_scatter", "all_gather"]
    axis: Axis
    part: tuple[int, int]
    dtype: torch.dtype | None = None
    whole: tuple[int, int] | None = None

    def start(self, flat: Tensor) -> Handle:
        """Starts it in place; what lies outside `part` after a scatter is of no use."""
        mine = flat[self.part[0] : self.part[1]]
        if self.axis.size == 1:
            return Handle(None, mine)
        whole = flat if self.whole is None else flat[self.whole[0] : self.whole[1]]
        sends, gets = {
            "all_reduce": (mine, mine), "reduce_scatter": (whole, mine), "all_gather": (mine, whole),
        }[self.kind]  # fmt: skip
        sent = sends if self.dtype is None else sends.to(self.dtype)
        got = gets if self.dtype is None else sent if self.kind == "all_reduce" else sent.new_empty(gets.shape)
        if self.kind == "all_reduce":
            handle = all_reduce(sent, self.axis, async_op=True)
        elif self.kind == "reduce_scatter":
            handle = reduce_scatter(sent, self.axis, out=got, async_op=True)
        else:
            handle = all_gather(sent, self.axis, out=got, async_op=True)
        return handle if self.dtype is None else Handle(lambda: gets.copy_(handle.wait()))


class Relay:
    """Phases on one flat tensor, each started when the one before was waited for; the first one at once.

    Rule: `advance` of several relays is called in one order on all ranks of their axes.
    """

    def __init__(self, phases: Sequence[Phase], flat: Tensor) -> None:
        self._flat, self._todo = flat, list(phases)
        self._handle: Handle | None = self._todo.pop(0).start(flat)

    def advance(self) -> bool:
        """Waits for the phase under way and starts the next one; False when there was nothing left to wait for."""
        if self._handle is None:
            return False
        self._handle.wait()
        self._handle = self._todo.pop(0).start(self._flat) if self._todo else None
        return True

    def wait(self) -> None:
        """Goes through to the end."""
        while self.advance():
            pass

    @property
    def is_done(self) -> bool:
        """True when the last phase was waited for."""
        return self._handle is None

    def drop(self) -> None:
        """Ends the phase under way, also when peers are gone, and leaves the others out."""
        handle, self._handle, self._todo = self._handle, None, []
        if handle is None:
            return
        try:
            handle.wait()
        except RuntimeError as error:
            logging.getLogger(__name__).warning("dropped a reduction that failed: %s", error)


def advance_all(relays: Sequence[Relay]) -> None:
    """Goes through all relays to the end, in rounds, so that each round's messages travel together."""
    while any([relay.advance() for relay in relays]):
        pass


def whole_sum(numel: int, axis: Axis, nodes: Nodes | None = None, dtype: torch.dtype | None = None) -> list[Phase]:
    """The phases that give every rank of `axis` the sum.

    `numel` is a multiple of the axis' size.
    """
    if nodes is None:
        return [Phase("all_reduce", axis, (0, numel), dtype)]
    inside, across = nodes
    part = part_of(numel, inside)
    return [
        Phase("reduce_scatter", inside, part, dtype),
        Phase("all_reduce", across, part, dtype),
        Phase("all_gather", inside, part, dtype),
    ]


def scattered_sum(
    numel: int, axis: Axis, nodes: Nodes | None = None, dtype: torch.dtype | None = None
) -> list[Phase]:
    """The phases that give every rank of `axis` the sum of its shard; the rest of the tensor is of no use then."""
    shard = shard_of(numel, axis, nodes)
    if nodes is None:
        return [Phase("reduce_scatter", axis, shard, dtype)]
    part = part_of(numel, nodes[0])
    return [
        Phase("reduce_scatter", nodes[0], part, dtype),
        Phase("reduce_scatter", nodes[1], shard, dtype, part),
    ]


def gathered(numel: int, axis: Axis, nodes: Nodes | None = None) -> list[Phase]:
    """The phases that give every rank of `axis` the shards of all."""
    shard = shard_of(numel, axis, nodes)
    if nodes is None:
        return [Phase("all_gather", axis, shard)]
    part = part_of(numel, nodes[0])
    return [Phase("all_gather", nodes[1], shard, None, part), Phase("all_gather", nodes[0], part)]


def shard_of(numel: int, axis: Axis, nodes: Nodes | None = None) -> tuple[int, int]:
    """This coord's shard of a flat tensor; of several nodes, the node's share of what its place in the node has."""
    if nodes is None:
        return part_of(numel, axis)
    first, last = part_of(numel, nodes[0])
    start, stop = part_of(last - first, nodes[1])
    return first + start, first + stop


def part_of(numel: int, axis: Axis) -> tuple[int, int]:
    """The range of this coord's part of a flat tensor that the axis cuts in equal parts."""
    size = numel // axis.size
    return axis.coord * size, (axis.coord + 1) * size


def measured_bucket_bytes(axis: Axis, device: torch.device | str = "cpu", *, share: float = 0.05) -> int:
    """Measures all-reduces and returns the bucket size, in bytes, at which the fixed cost is `share` of the time.

    A power of two from 1 MiB to 256 MiB, the same on all ranks; collective, below a second. time(n) = a + b n is
    fitted to 64 KiB and 16 MiB, the medians of 5 each. A layout of buckets is part of a run's bits (the norm adds
    shards up), so measure once and write the number down. ValueError unless 0 < share < 1.
    """
    if not 0.0 < share < 1.0:
        raise ValueError(f"share={share} must be above 0 and below 1: the fixed cost's part of the time of a sum")
    if axis.size == 1:
        return _MAX_BUCKET
    small, large = (_seconds(axis, device, num_bytes) for num_bytes in _PROBES)
    per_byte = max(large - small, 1e-9) / (_PROBES[1] - _PROBES[0])
    fixed = max(small - per_byte * _PROBES[0], 0.0)
    wanted = torch.tensor([fixed / share / per_byte], dtype=torch.float64, device=device)
    num_bytes = float(all_reduce(wanted, axis, "max"))
    return min(_MAX_BUCKET, 1 << max(20, math.ceil(math.log2(max(num_bytes, 1.0)))))


def _seconds(axis: Axis, device: torch.device | str, num_bytes: int) -> float:
    """The median time of an all-reduce; the first one, which opens connections, does not count."""
    tensor, times = torch.zeros(num_bytes // 4, device=device), []
    for _ in range(6):
        began = time.perf_counter()
        all_reduce(tensor, axis)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])
