"""What full training state is: a nested dict of tensors, shards, numbers, strings, and objects with `state_dict()`.

Not a model's description: nothing here knows layers or grids. The one idea: a state is flattened once into tensors
(each a box of a named full tensor), values equal on all ranks, and values of this rank alone; the same tree, walked
again after a restore, gives everything back in its place. What cannot be stored is refused by its path before
anything is copied.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from plait.ckpt.aside import BARE, bare_digest
from plait.ckpt.errors import StateError
from plait.ckpt.lazy import ABSENT, Lazy, optimizer_template
from plait.ckpt.leaf import Leaf, Replicas, Sharded, leaf_of
from plait.ckpt.values import describe

_MAX_DEPTH = 100  # to which a container that holds itself is looked for, once Python's own limit was met


@dataclass(frozen=True)
class PerRank:
    """A plain value that belongs to this rank alone (a generator's state): stored by each rank, never shared.

    Or an object whose `state_dict()` gives such a value (a data loader).
    """

    value: Any


@dataclass
class Node:
    """A place in the state's tree. kind: dict, lazy, list, tuple, object, tensor, value, per_rank."""

    kind: str
    name: str
    path: str
    value: Any
    children: list[tuple[Any, Node]] = field(default_factory=list)

    def leaf_names(self) -> list[str]:
        """Returns the names of all tensors and values at or below this place."""
        if self.kind in ("tensor", "value", "per_rank"):
            return [self.name]
        return [name for _, child in self.children for name in child.leaf_names()]


@dataclass
class Flat:
    """A flattened state: its tree, and what hangs on it by name. lazy: see plait.ckpt.lazy. encoded: further values,
    in their JSON form, and signature: see plait.ckpt.structure."""

    root: Node
    tensors: dict[str, Leaf] = field(default_factory=dict)
    values: dict[str, Node] = field(default_factory=dict)
    per_rank: dict[str, Node] = field(default_factory=dict)
    lazy: list[Node] = field(default_factory=list)
    encoded: dict[str, Any] = field(default_factory=dict)
    signature: tuple[Any, ...] | None = None

    def absent(self, missing: Collection[str]) -> set[str]:
        """Returns the names of lazily made parts, and of all in them, of which the snapshot has nothing."""
        gone = set(missing)
        parts = [(node.name, names) for node in self.lazy if gone.issuperset(names := node.leaf_names())]
        return {name for part, names in parts for name in (part, *names)}


def flatten(state: Any, restoring: bool = False) -> Flat:
    """Flattens a state. Names are keys joined with "/"; a list without tensors inside is one value.

    restoring: objects may offer `restore_template()` instead of `state_dict()`, for state that they create lazily.
    Raises StateError naming the path of what cannot be stored, and for two things of one name.
    """
    flat = Flat(Node("dict", "", "state", state))
    if not isinstance(state, dict):
        raise StateError(f"state is {describe(state)}; it must be a dict")
    try:
        flat.root = _Grower(flat, restoring).grow("", "state", state)
    except RecursionError:
        raise StateError(
            f"{_loop_in(state, 'state', ()) or 'state'} contains itself, or is nested too deep"
        ) from None
    bare = [leaf.name for leaf in flat.tensors.values() if leaf.replica is None]
    if bare and not restoring:
        flat.values[BARE] = Node("value", BARE, "state", bare_digest(bare))
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
    there = [(key, child) for key, child in node.children if results.get(child.name) is not ABSENT]
    pairs = [(key, rebuild(child, results)) for key, child in there]
    if node.kind in ("dict", "lazy"):
        result: Any = {} if node.kind == "lazy" else type(node.value)()
        result.update(pairs)
        if hasattr(node.value, "_metadata"):  # the versions that a module's state_dict() carries
            result._metadata = node.value._metadata
        return result
    return [v for _, v in pairs] if node.kind == "list" else tuple(v for _, v in pairs)


def join(name: str, key: Any, path: str) -> str:
    """Returns the name of a child: "~", "/" and "@" inside a key are escaped.

    StateError for keys that have no name.
    """
    if type(key) not in (str, int):
        raise StateError(f"{path} has the key {key!r}; keys must be strings or integers")
    text = str(key).replace("~", "~0").replace("/", "~1").replace("@", "~2")
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise StateError(f"{path} has the key {key!r}, which is no text: half of a pair of surrogates is in it")
    if not name and text.startswith("__"):
        raise StateError(f"{path} has the key {key!r}; names that begin with two underscores are reserved")
    return f"{name}/{text}" if name else text


class _Grower:
    """Builds the tree of one state and files its leaves in `flat`."""

    def __init__(self, flat: Flat, restoring: bool) -> None:
        self.flat, self.restoring = flat, restoring

    def grow(self, name: str, path: str, value: Any, over: Any = None, of_object: bool = False) -> Node:
        """Builds the node of `value`. over: of the Replicas around it. of_object: paths show keys as attributes."""
        if isinstance(value, Replicas):
            return self.grow(name, path, value.value, value.over, of_object)
        if isinstance(value, (torch.Tensor, Sharded)):
            self._file(name, path)
            self.flat.tensors[name] = leaf_of(name, path, value, over)
            return Node("tensor", name, path, value)
        if isinstance(value, PerRank):
            return self._per_rank(name, path, value.value)
        if type(value) in (dict, OrderedDict, Lazy):
            node = Node("lazy" if type(value) is Lazy else "dict", name, path, value)
            for key, child in value.items():
                where = f"{path}.{key}" if of_object else f"{path}[{key!r}]"
                node.children.append((key, self.grow(join(name, key, path), where, child, over)))
            if type(value) is Lazy:
                self.flat.lazy.append(node)
            return node
        if type(value) in (list, tuple) and has_named(value):
            node = Node("list" if type(value) is list else "tuple", name, path, value)
            pairs = ((i, join(name, i, path), v) for i, v in enumerate(value))
            node.children = [(i, self.grow(child, f"{path}[{i}]", v, over)) for i, child, v in pairs]
            return node
        if is_object(value):
            value = unwrapped(value)
            content = self._content(path, value)
            return Node("object", name, path, value, [("", self.grow(name, path, content, over, True))])
        self._file(name, path)
        self.flat.values[name] = Node("value", name, path, value)
        return self.flat.values[name]

    def _per_rank(self, name: str, path: str, value: Any) -> Node:
        """A value of this rank alone, or an object with such a state."""
        self._file(name, path)
        there = is_object(value)
        node = Node("per_rank", name, path, value.state_dict() if there else value)
        self.flat.per_rank[name] = node
        return Node("object", name, path, value, [("", node)]) if there else node

    def _content(self, path: str, value: Any) -> dict[Any, Any]:
        """Returns the state of an object; in a restore what it restores into, with lazily made state made first."""
        if self.restoring and callable(getattr(value, "restore_template", None)):
            content = value.restore_template()
        elif self.restoring and isinstance(value, torch.optim.Optimizer):
            content = optimizer_template(value)
        else:
            content = value.state_dict()
        if not isinstance(content, dict):
            raise StateError(f"{path}.state_dict() gives {describe(content)}; it must give a dict")
        return content

    def _file(self, name: str, path: str) -> None:
        flat = self.flat
        if name in flat.tensors or name in flat.values or name in flat.per_rank:
            raise StateError(f"{path} has the same name as another part of the state: {name!r}")


def _loop_in(value: Any, path: str, above: tuple[int, ...]) -> str | None:
    """Returns the path of the first container found that is one of those around it."""
    if id(value) in above:
        return path
    if len(above) > _MAX_DEPTH or not isinstance(value, (dict, list, tuple)):
        return None
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return next((p for k, v in pairs if (p := _loop_in(v, f"{path}[{k!r}]", (*above, id(value))))), None)


def is_object(value: Any) -> bool:
    """True for what gives and takes a state of its own."""
    return callable(getattr(value, "state_dict", None)) and not isinstance(value, type)


def unwrapped(value: Any) -> Any:
    """Returns the module inside DistributedDataParallel, DataParallel and torch.compile: these prefix the names of
    all tensors, which would tie a snapshot to the way it was trained."""
    while isinstance(value, torch.nn.Module):
        compiled = type(value).__module__.startswith("torch._dynamo")
        inner = value._orig_mod if compiled else None
        if isinstance(value, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            inner = value.module
        if inner is None:
            break
        value = inner
    return value


def has_named(value: Any) -> bool:
    """True when a list or tuple holds, at any depth, something that needs a name of its own."""
    if isinstance(value, (torch.Tensor, Sharded, PerRank, Replicas)) or is_object(value):
        return True
    if type(value) in (list, tuple):
        return any(has_named(v) for v in value)
    return type(value) in (dict, OrderedDict, Counter) and any(has_named(v) for v in value.values())
