"""Where a parameter sits: which box of the full tensor a rank holds, who holds the same, what its gradient is.

Not here: data parallelism, which replicates every parameter in the same way (data.py knows it), and snapshots. The
one idea: a layer states the facts of each of its parameters once, in a `Placement` set as `param.placement`, and
buckets, clipping, gathering and snapshots read them from there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from plait.parallel.collectives import all_gather
from plait.parallel.mesh import Mesh


@dataclass(frozen=True)
class Placement:
    """The logical box `offset`, `shape` of a full tensor of shape `full_shape`.

    Padding (of a vocabulary) is no part of the box: it is only ever further rows of dim 0 at the end of the local
    tensor, so that the box is a prefix of the flat local tensor. `replica_ranks`: the global ranks, ascending, that
    hold this box along the layer's axis, with this one; () when it is alone. `sum_axes`: the local gradient is a
    partial sum over `replica_ranks`, which lie along these axes; () when every replica computes the whole gradient.
    """

    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    replica_ranks: tuple[int, ...] = ()
    sum_axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.full_shape) == len(self.offset) == len(self.shape):
            raise ValueError(f"{self}: full_shape, offset and shape must have the same number of dims")
        for full, start, size in zip(self.full_shape, self.offset, self.shape, strict=True):
            if start < 0 or size < 0 or start + size > full:
                raise ValueError(f"{self}: the box leaves the full tensor")
        if tuple(sorted(set(self.replica_ranks))) != self.replica_ranks:
            raise ValueError(f"replica_ranks={self.replica_ranks} must be ascending, each once")
        if self.sum_axes and not self.replica_ranks:
            raise ValueError(f"sum_axes={self.sum_axes} needs replica_ranks: the ranks to sum over")

    @classmethod
    def whole(
        cls, shape: tuple[int, ...], replica_ranks: tuple[int, ...] = (), sum_axes: tuple[str, ...] = ()
    ) -> Placement:
        """Returns the placement of a tensor that is not split."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape), replica_ranks, sum_axes)

    @property
    def numel(self) -> int:
        """Number of logical elements held here."""
        return math.prod(self.shape)

    @property
    def box(self) -> tuple[slice, ...]:
        """The index of the box in the full tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))

    def local(self, tensor: Tensor) -> Tensor:
        """Returns the logical view, of shape `shape`, of a local tensor that may have padding rows behind it."""
        if tuple(tensor.shape[1:]) != self.shape[1:] or tensor.dim() != len(self.shape):
            raise ValueError(f"tensor of shape {tuple(tensor.shape)} does not hold the box {self.shape}")
        if not self.shape:
            return tensor
        if tensor.shape[0] < self.shape[0]:
            raise ValueError(f"tensor of shape {tuple(tensor.shape)} does not hold the box {self.shape}")
        return tensor[: self.shape[0]]


def placed(tensor: Tensor, placement: Placement) -> nn.Parameter:
    """Returns the tensor as a parameter that says where it sits."""
    param = nn.Parameter(tensor)
    param.placement = placement  # type: ignore[attr-defined]
    return param


def placement_of(param: Tensor) -> Placement:
    """Returns the parameter's placement; a parameter of a layer that states none is whole and held here alone."""
    placement = getattr(param, "placement", None)
    return Placement.whole(tuple(param.shape)) if placement is None else placement


def gather_full(tensor: Tensor, placement: Placement, mesh: Mesh, *names: str) -> Tensor:
    """Returns the full tensor from the shards along the axes `names` (default "tp"), on each of their ranks.

    ValueError when a part of the full tensor is on no rank, or when replicas differ in any bit.
    """
    axis = mesh.axis(*(names or ("tp",)))
    mine = placement.local(tensor.detach()).cpu().reshape(-1)
    facts = all_gather(torch.tensor([[*placement.offset, *placement.shape]]), axis).tolist()
    most = max(math.prod(row[len(placement.shape) :]) for row in facts)
    padded = torch.zeros(1, most, dtype=mine.dtype)
    padded[0, : mine.numel()] = mine
    full = torch.zeros(placement.full_shape, dtype=tensor.dtype)
    seen = torch.zeros(placement.full_shape, dtype=torch.bool)
    for row, data in zip(facts, all_gather(padded, axis), strict=True):
        dims = len(placement.shape)
        other = replace(placement, offset=tuple(row[:dims]), shape=tuple(row[dims:]))
        part = data[: other.numel].view(other.shape)
        if bool((seen[other.box] & (full[other.box] != part)).any()):
            raise ValueError(f"replicas of the box {other.offset}+{other.shape} differ")
        full[other.box] = part
        seen[other.box] = True
    if not bool(seen.all()):
        raise ValueError(f"{int((~seen).sum())} elements of the full tensor {placement.full_shape} are on no rank")
    return full.to(tensor.device)
