"""How a flat gradient is summed over an axis: at once or node by node, in its own dtype or in 16 bits.

Not here: when (data.py, sharded_grads.py), and the collectives themselves. The one idea: a sum is a list of phases,
each one collective on a known part of the flat tensor, so that the phases of many buckets can travel together.

Between nodes a link is slow and shared by the ranks of a node. Hierarchical all-reduce: reduce-scatter in the node,
all-reduce of each rank's part across nodes, all-gather in the node; a node then sends 2 (n - 1) / n of the bytes
once, not once per rank (Horovod's NCCLHierarchicalAllreduce; Mikami et al. 2018, 2D-torus).
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from plait.parallel.collectives import Handle, all_gather, all_reduce, reduce_scatter
from plait.parallel.mesh import Axis

_PROBES = (64 << 10, 16 << 20)  # bytes
_MAX_BUCKET = 256 << 20


@dataclass(frozen=True)
class Phase:
    """One collective over `axis`: a sum of, a scatter into, or a gather from elements `part` of a flat tensor.

    `dtype`: what travels, summed in fp32 and rounded once; None: the tensor's own.
    """

    kind: Literal["all_reduce", "reduce_scatter", "all_gather"]
    axis: Axis
    part: tuple[int, int]
    dtype: torch.dtype | None = None

    def start(self, flat: Tensor) -> Handle:
        """Starts it in place; what lies outside `part` after a scatter is of no use."""
        mine = flat[self.part[0] : self.part[1]]
        if self.axis.size == 1:
            return Handle(None, mine)
        sends, gets = {
            "all_reduce": (mine, mine), "reduce_scatter": (flat, mine), "all_gather": (mine, flat),
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


def whole_sum(
    numel: int, axis: Axis, nodes: tuple[Axis, Axis] | None = None, dtype: torch.dtype | None = None
) -> list[Phase]:
    """The phases that give every rank of `axis` the sum. `nodes`: the axis inside a node and the one across nodes.

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
