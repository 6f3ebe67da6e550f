"""What full training state is: a nested dict of tensors, shards, numbers, strings, and objects with `state_dict()`.

Not a model's description: nothing here knows layers or grids. The one idea: a state is flattened once into tensors
(each a box of a named full tensor), values equal on all ranks, and values of this rank alone; the same tree, walked
again after a restore, gives everything back in its place. What cannot be stored is refused by its path before
anything is copied.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from plait.ckpt.box import Box, contains, full_box
from plait.ckpt.errors import StateError
from plait.ckpt.values import describe

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sharded:
    """A tensor that is the box (offset, shape) of a full tensor, or flat elements [a, b) of that box.

    shape: of the box; default the tensor's own. With `flat=(a, b)` it must be given and the tensor has b - a
    elements. replica: (index, count): `count` ranks hold exactly this box (or range); together they write it once.
    """

    tensor: torch.Tensor
    full_shape: Shape
    offset: Shape
    shape: Shape | None = None
    flat: tuple[int, int] | None = None
    replica: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class PerRank:
    """A plain value that belongs to this rank alone (a generator's state): stored by each rank, never shared."""

    value: Any


@dataclass(frozen=True)
class Leaf:
    """One tensor of the state on this rank: which part of which full tensor. `replica` None: on all ranks."""

    name: str
    path: str
    tensor: torch.Tensor
    full_shape: Shape
    box: Box
    flat: tuple[int, int] | None
    replica: tuple[int, int] | None


@dataclass
class Node:
    """A place in the state's tree. kind: dict, list, tuple, object, tensor, value, per_rank."""

    kind: str
    name: str
    path: str
    value: Any
    children: list[tuple[Any, Node]] = field(default_factory=list)


@dataclass
class Flat:
    """A flattened state: its tree, and what hangs on it by name."""

    root: Node
    tensors: dict[str, Leaf] = field(default_factory=dict)
    values: dict[str, Node] = field(default_factory=dict)
    per_rank: dict[str, Node] = field(default_factory=dict)


def flatten(state: Any, restoring: bool = False) -> Flat:
    """Flattens a state. Names are keys joined with "/"; a list without tensors inside is one value.

    restoring: objects may offer `restore_template()` instead of `state_dict()`, for state that they create lazily.
    Raises StateError naming the path of what cannot be stored, and for two things of one name.
    """
    flat = Flat(Node("dict", "", "state", state))
    if not isinstance(state, dict):
        raise StateError(f"state is {describe(state)}; it must be a dict")
    flat.root = _grow(flat, "", "state", state, restoring)
    return flat


def rebuild(node: Node, results: dict[str, Any]) -> Any:
    """Returns the node's value after a restore: `results` by name, the template's own tensors, containers as they
    were.

    Objects get `load_state_dict` with their part, in the order of the state.
    """
    if node.kind in ("value", "per_rank"):
        return results.get(node.name, node.value)
    if node.kind == "tensor":
        return node.value
    if node.kind == "object":
        content = rebuild(node.children[0][1], results)
        node.value.load_state_dict(content)
        return node.value
    pairs = [(key, rebuild(child, results)) for key, child in node.children]
    if node.kind == "dict":
        return type(node.value)(pairs)
    return [v for _, v in pairs] if node.kind == "list" else tuple(v for _, v in pairs)


def join(name: str, key: Any, path: str) -> str:
    """Returns the name of a child: "~", "/" and "@" inside a key are escaped.

    StateError for keys that have no name.
    """
    if type(key) not in (str, int):
        raise StateError(f"{path} has the key {key!r}; keys must be strings or integers")
    text = str(key).replace("~", "~0").replace("/", "~1").replace("@", "~2")
    if not name and text.startswith("__"):
        raise StateError(f"{path} has the key {key!r}; names that begin with two underscores are reserved")
    return f"{name}/{text}" if name else text


def _grow(flat: Flat, name: str, path: str, value: Any, restoring: bool, of_object: bool = False) -> Node:
    """Builds the node of `value` and files its leaves in `flat`. of_object: keys read as attributes in paths."""
    if isinstance(value, (torch.Tensor, Sharded)):
        _file(flat, name, path)
        flat.tensors[name] = leaf_of(name, path, value)
        return Node("tensor", name, path, value)
    if isinstance(value, PerRank):
        _file(flat, name, path)
        flat.per_rank[name] = Node("per_rank", name, path, value.value)
        return flat.per_rank[name]
    if type(value) in (dict, OrderedDict):
        node = Node("dict", name, path, value)
        for key, child in value.items():
            where = f"{path}.{key}" if of_object else f"{path}[{key!r}]"
            node.children.append((key, _grow(flat, join(name, key, path), where, child, restoring)))
        return node
    if type(value) in (list, tuple) and has_named(value):
        node = Node("list" if type(value) is list else "tuple", name, path, value)
        node.children = [
            (i, _grow(flat, join(name, i, path), f"{path}[{i}]", v, restoring)) for i, v in enumerate(value)
        ]
        return node
    if _is_object(value):
        content = _template(value) if restoring else value.state_dict()
        if not isinstance(content, dict):
            raise StateError(f"{path}.state_dict() gives {describe(content)}; it must give a dict")
        return Node("object", name, path, value, [("", _grow(flat, name, path, content, restoring, True))])
    _file(flat, name, path)
    flat.values[name] = Node("value", name, path, value)
    return flat.values[name]


def _file(flat: Flat, name: str, path: str) -> None:
    if name in flat.tensors or name in flat.values or name in flat.per_rank:
        raise StateError(f"{path} has the same name as another part of the state: {name!r}")


def _is_object(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and not isinstance(value, type)


def _template(value: Any) -> Any:
    """Returns the state into which an object restores; lazily made optimizer state is made first."""
    if callable(getattr(value, "restore_template", None)):
        return value.restore_template()
    if isinstance(value, torch.optim.Optimizer):
        materialize(value)
    return value.state_dict()


def has_named(value: Any) -> bool:
    """True when a list or tuple holds, at any depth, something that needs a name of its own."""
    if isinstance(value, (torch.Tensor, Sharded, PerRank)) or _is_object(value):
        return True
    if type(value) in (list, tuple):
        return any(has_named(v) for v in value)
    return type(value) in (dict, OrderedDict, Counter) and any(has_named(v) for v in value.values())


def materialize(optimizer: torch.optim.Optimizer) -> None:
    """Lets a fresh torch optimizer create its state: one step with zero gradients and learning rate 0, so that no
    parameter changes. Gradients and learning rates are put back."""
    if optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    gradients = [p.grad for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def leaf_of(name: str, path: str, value: Any) -> Leaf:
    """Describes one tensor; StateError when it cannot be stored or does not fit its own description."""
    if isinstance(value, Sharded):
        return _sharded_leaf(name, path, value)
    if hasattr(value, "device_mesh") and hasattr(value, "placements"):
        return _sharded_leaf(name, path, _from_dtensor(path, value))
    _check_plain(path, value)
    shape = tuple(value.shape)
    return Leaf(name, path, value.detach(), shape, full_box(shape), None, None)


def _check_plain(path: str, tensor: Any) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise StateError(f"{path} is {describe(tensor)}, a tensor subclass that cannot be stored; store its parts")
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
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
    return Leaf(name, path, tensor.detach(), full_shape, box, value.flat, (index, count))


def _from_dtensor(path: str, value: Any) -> Sharded:
    """Describes a DTensor's local shard; replicated mesh dims are replicas. No communication."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = value.device_mesh, value.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise StateError(f"{path} is a DTensor on a mesh that this rank is not part of")
    index, count = 0, 1
    for dim, placement in enumerate(placements):
        if placement.is_partial():
            raise StateError(f"{path} is a DTensor with a partial placement {placement}; reduce it first")
        if placement.is_replicate():
            index, count = index * mesh.size(dim) + coordinate[dim], count * mesh.size(dim)
    shape, offset = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    if prod(shape) == 0:  # torch puts an empty shard at an offset of its own choice
        offset = tuple(min(o, n) for o, n in zip(offset, value.shape, strict=True))
    return Sharded(value.to_local(), tuple(value.shape), tuple(offset), tuple(shape), None, (index, count))
