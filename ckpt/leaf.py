"""One tensor of a state: which part of which full tensor it is, and who else holds the same part.

Not the tree around it (state.py). The one idea: whatever the caller gives (a tensor, a Sharded, a DTensor) becomes
one Leaf, checked against its own description, before anything is copied.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from plait.ckpt.box import Box, contains, full_box
from plait.ckpt.dtensors import holding_of, is_dtensor
from plait.ckpt.errors import StateError
from plait.ckpt.values import describe

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sharded:
    """A tensor that is the box (offset, shape) of a full tensor, or flat elements [a, b) of that box.

    shape: of the box; default the tensor's own. With `flat=(a, b)` it must be given and the tensor has b - a
    elements. replica: (index, count): `count` ranks hold exactly this box (or range); together they write it once.
    holders: anything that names these ranks, for instance a tuple of them: tensors with equal `holders`, which all of
    these ranks must then have alike, are shared out together and so more evenly. None: each by itself.
    """

    tensor: torch.Tensor
    full_shape: Shape
    offset: Shape
    shape: Shape | None = None
    flat: tuple[int, int] | None = None
    replica: tuple[int, int] = (0, 1)
    holders: Hashable = None


@dataclass(frozen=True)
class Replicas:
    """Any part of a state whose tensors only some ranks hold: a pipeline stage, or a model under tensor parallelism
    whose data-parallel copies DTensor does not know of.

    over: the DeviceMesh of the ranks that hold it (`mesh["dp", "tp"]` of a stage): a bare tensor is on all of them,
    a DTensor is repeated along those dims of it that are not in its own mesh. Or (index, count): `count` ranks hold
    each tensor in it, this is the index-th of them; (0, 1) says that this rank alone has it.
    """

    value: Any
    over: Any


@dataclass(frozen=True)
class Leaf:
    """One tensor of the state on this rank: which part of which full tensor. `replica` None: on all ranks. holders:
    equal on this rank for tensors that the same ranks hold, all of them alike; None: not known."""

    name: str
    path: str
    tensor: torch.Tensor
    full_shape: Shape
    box: Box
    flat: tuple[int, int] | None
    replica: tuple[int, int] | None
    holders: Hashable = None


def leaf_of(name: str, path: str, value: Any, over: Any = None) -> Leaf:
    """Describes one tensor; StateError when it cannot be stored or does not fit its own description.

    over: of the Replicas around it.
    """
    if isinstance(value, Sharded):
        return _sharded_leaf(name, path, value)
    if is_dtensor(value):
        held = holding_of(path, value)
        outer, count = _copies(path, over, value.device_mesh) if over is not None else (0, 1)
        replica = (outer * held.replica[1] + held.replica[0], count * held.replica[1])
        whole = tuple(dim for dim, placement in enumerate(value.placements) if placement.is_replicate())
        holders: Hashable = ("mesh", hash(value.device_mesh), whole, _label(over))
        shard = Sharded(held.tensor, tuple(value.shape), held.offset, held.shape, None, replica, holders)
        return _sharded_leaf(name, path, shard)
    _check_plain(path, value)
    shape = tuple(value.shape)
    replica_of = None if over is None else _copies(path, over, None)
    holders = ("bare", _label(over))
    return Leaf(name, path, value.detach(), shape, full_box(shape), None, replica_of, holders)


def _label(over: Any) -> Hashable:
    """Returns what tells, on this rank, the ranks of one Replicas from those of another; None: not to be told."""
    return None if over is None else ("over", hash(over))


def _copies(path: str, over: Any, own_mesh: Any) -> tuple[int, int]:
    """Returns (index, count) that `Replicas.over` says of a bare tensor, or of a DTensor on `own_mesh`."""
    if isinstance(over, tuple):
        index, count = over
        if not 0 <= index < count:
            raise StateError(f"{path}: Replicas over {over}: must be (index, count) with 0 <= index < count")
        return index, count
    coordinate = over.get_coordinate()
    if coordinate is None:
        raise StateError(f"{path}: this rank is not in the mesh that Replicas names; leave it out on this rank")
    own: set[str] = set()
    names = over.mesh_dim_names or ()
    if own_mesh is not None:
        if not names or own_mesh.mesh_dim_names is None:
            raise StateError(f"{path}: Replicas tells a DTensor's mesh dims by name; give the meshes mesh_dim_names")
        for first in range(len(names)):  # torch names a flattened mesh dim "dp_cp"
            for last in range(first, len(names)):
                if "_".join(names[first : last + 1]) in own_mesh.mesh_dim_names:
                    own.update(names[first : last + 1])
    index, count = 0, 1
    for dim, at in enumerate(coordinate):
        if not names or names[dim] not in own:
            index, count = index * over.size(dim) + at, count * over.size(dim)
    return index, count


def _check_plain(path: str, tensor: Any) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise StateError(f"{path} is {describe(tensor)}, a tensor subclass that cannot be stored; store its parts")
    if tensor.is_nested or tensor.is_quantized:
        kind, parts = (
            ("nested", "unbind()") if tensor.is_nested else ("quantized", "int_repr(), scale and zero point")
        )
        raise StateError(f"{path} is a {kind} tensor, which cannot be stored; store its {parts}")
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise StateError(
            f"{path} is a {tensor.layout} tensor on {tensor.device}; only dense tensors with data can be stored"
        )


def _sharded_leaf(name: str, path: str, value: Sharded) -> Leaf:
    tensor = value.tensor
    _check_plain(path, tensor)
    if value.flat is not None and value.shape is None:
        raise StateError(f"{path}: flat={value.flat} needs shape, the shape of the box that it is a range of")
    shape = tuple(tensor.shape) if value.shape is None else tuple(value.shape)
    box, full_shape = Box(tuple(value.offset), shape), tuple(value.full_shape)
    if len(box.offset) != len(full_shape) or not contains(full_box(full_shape), box):
        raise StateError(f"{path}: box {box.offset}+{shape} is not inside the full shape {full_shape}")
    if value.flat is None and tuple(tensor.shape) != shape:
        raise StateError(f"{path}: the tensor has shape {tuple(tensor.shape)}, its box {shape}")
    if value.flat is not None:
        start, stop = value.flat
        if not 0 <= start <= stop <= prod(shape) or tensor.numel() != stop - start:
            raise StateError(f"{path}: flat={value.flat} does not fit {tensor.numel()} elements of a box {shape}")
    index, count = value.replica
    if not 0 <= index < count:
        raise StateError(f"{path}: replica={value.replica} must be (index, count) with 0 <= index < count")
    return Leaf(name, path, tensor.detach(), full_shape, box, value.flat, (index, count), value.holders)
