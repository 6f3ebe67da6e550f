"""A DTensor as the box of its full tensor that this rank holds, from its mesh and placements alone.

Not a redistribution: no communication, no full tensor. The one idea: each mesh dim cuts what the dims before it left
of a tensor dim; following the cut as runs of indices (not as one offset) tells a shard that is one box, which can be
stored, from a strided one, which cannot.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch

from plait.ckpt.errors import StateError

Run = tuple[int, int]  # [start, stop) along one tensor dim


class Cut(NamedTuple):
    """Part `at` of `size` along one tensor dim. factor: of a _StridedShard, None for a plain Shard."""

    size: int
    at: int
    factor: int | None = None


class Holding(NamedTuple):
    """What this rank holds of a DTensor: its memory, the box, and which of how many equal copies."""

    tensor: torch.Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    replica: tuple[int, int]


def is_dtensor(value: Any) -> bool:
    """True for a DTensor (told by what it has, so that torch.distributed is not imported for the question)."""
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh") and hasattr(value, "placements")


def holding_of(path: str, value: Any) -> Holding:
    """Describes a DTensor's local shard; replicated mesh dims count as copies.

    StateError by path for a partial placement, a mesh without this rank, and a shard that is not one box.
    """
    mesh, placements = value.device_mesh, value.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise StateError(f"{path} is a DTensor on a mesh that this rank is not part of; leave it out on this rank")
    index, count = 0, 1
    cuts: list[list[Cut]] = [[] for _ in value.shape]
    for dim, placement in enumerate(placements):
        size, at = mesh.size(dim), coordinate[dim]
        if placement.is_partial():
            raise StateError(f"{path} is a DTensor with a partial placement {placement}; reduce it first")
        if placement.is_replicate():
            index, count = index * size + at, count * size
        else:
            cuts[placement.dim].append(Cut(size, at, getattr(placement, "split_factor", None)))
    runs = [runs_of(n, along) for n, along in zip(value.shape, cuts, strict=True)]
    local = value.to_local()
    if hasattr(local, "wait"):  # a collective's result that has not been waited for
        local = local.wait()
    shape = tuple(sum(stop - start for start, stop in along) for along in runs)
    if tuple(local.shape) != shape:
        raise StateError(f"{path} is a DTensor {tuple(placements)} whose shard is {tuple(local.shape)}, not {shape}")
    if prod(shape) and any(len(along) > 1 for along in runs):
        raise StateError(
            f"{path} is a DTensor {tuple(placements)} whose shard lies in several places of the full tensor; "
            "redistribute it, or give its parts as Sharded"
        )
    offset = tuple(along[0][0] if along else n for along, n in zip(runs, value.shape, strict=True))
    return Holding(local, offset, shape, (index, count))


def runs_of(numel: int, cuts: list[Cut]) -> list[Run]:
    """Returns the indices of a dim of `numel` that are left after the cuts of all mesh dims, outermost first.

    FSDP2 over tensor parallelism says _StridedShard for a cut inside the shard of the mesh dims after it, whose
    number is the factor; these are then cut first. torch's own arithmetic, from left to right with the factor, says
    the same of even shards, but of uneven ones it can name rows that another rank has (2.13; 7 rows, dp 3, tp 2).
    """
    strided = [i for i, c in enumerate(cuts) if c.factor is not None]
    if strided and all(cuts[i].factor == prod(c.size for c in cuts[i:] if c.factor is None) for i in strided):
        ordered = [c for c in cuts if c.factor is None] + [
            c._replace(factor=None) for c in cuts if c.factor is not None
        ]
    else:
        ordered = cuts
    runs = [(0, numel)]
    for each in ordered:
        runs = cut(runs, each.size, each.at, each.factor or 1)
    return runs


def cut(runs: list[Run], count: int, index: int, factor: int = 1) -> list[Run]:
    """Returns part `index` of `count` of the indices in `runs`, as torch.chunk cuts them; empty parts are [].

    factor: of torch's _StridedShard: the indices are first cut into that many parts, and each of these into `count`.
    """
    total = sum(stop - start for start, stop in runs)
    found: list[Run] = []
    for part in range(factor):
        outer = _chunk(0, total, factor, part)
        start, stop = _chunk(*outer, count, index)
        for run in _slice(runs, start, stop):
            if found and found[-1][1] == run[0]:
                run = (found.pop()[0], run[1])
            found.append(run)
    return found


def _chunk(start: int, stop: int, count: int, index: int) -> Run:
    """Returns [start, stop) of the index-th of `count` chunks: all as long as the first, the last ones shorter."""
    length = -(-(stop - start) // count)
    return min(start + index * length, stop), min(start + (index + 1) * length, stop)


def _slice(runs: list[Run], start: int, stop: int) -> list[Run]:
    """Returns the runs of the start-th to stop-th index in `runs`."""
    found, at = [], 0
    for first, last in runs:
        a, b = max(start - at, 0), min(stop - at, last - first)
        if a < b:
            found.append((first + a, first + b))
        at += last - first
    return found
