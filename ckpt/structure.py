"""What a state looked like at the last save, so that the next one of the same shape is not walked tensor by tensor.

Not a promise of the caller: every save asks again. The one idea: what a plan depends on (which objects stand where,
and each tensor's address, shape, strides, dtype and device) can be compared by calls that loop in C, so that an
unchanged state costs Python only by container: a module, an optimizer, a dict. A DTensor is what it was as long as
its mesh, placements and shape are the same objects. Whatever differs, or is of a kind that is not watched (a module
with hooks on its state_dict that are not FSDP2's), is flattened anew.

Holds weak references and no tensor alive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import Any

import torch

from plait.ckpt.aside import BARE
from plait.ckpt.dtensors import is_dtensor
from plait.ckpt.leaf import Leaf, Replicas, Sharded
from plait.ckpt.optimizer import OptimizerState
from plait.ckpt.state import Flat, Node, PerRank, flatten, has_named, is_object, unwrapped
from plait.ckpt.values import encode
from plait.ckpt.watch import DictWatch, LocalWatch, ModuleWatch, OptimizerWatch, ShardedWatch, Watch

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_FIXED: tuple[Callable[[Any], Any], ...] = (type, attrgetter("shape"), attrgetter("layout"))
_MOVING: tuple[Callable[[Any], Any], ...] = (
    torch.Tensor.data_ptr,
    torch.Tensor.stride,
    torch.Tensor.is_conj,
    torch.Tensor.is_neg,
    attrgetter("dtype"),
    attrgetter("device"),
)


class Leaves(Mapping[str, Leaf]):
    """The leaves of a known structure over the tensors of now; each is made when it is asked for."""

    def __init__(self, known: dict[str, tuple[int, Leaf]], tensors: list[torch.Tensor]) -> None:
        self._known, self.tensors = known, tensors

    def __getitem__(self, name: str) -> Leaf:
        place, leaf = self._known[name]
        return replace(leaf, tensor=self.tensors[place].detach())

    def tensors_of(self, names: Sequence[str]) -> Iterator[torch.Tensor]:
        """Yields the tensors of leaves without making the leaves."""
        places = map(itemgetter(0), map(self._known.__getitem__, names))
        return map(torch.Tensor.detach, map(self.tensors.__getitem__, places))

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def tensors_of(flat: Flat, names: Sequence[str]) -> list[torch.Tensor]:
    """Returns the tensors of a flat state's leaves, detached."""
    leaves = flat.tensors
    return list(leaves.tensors_of(names)) if isinstance(leaves, Leaves) else [leaves[name].tensor for name in names]


class Flattener:
    """Flattens the states of one Snapshots for saving. `walks` counts those that were walked tensor by tensor."""

    def __init__(self) -> None:
        self._structure: _Structure | None = None
        self.walks = 0

    def flatten(self, state: Any) -> Flat:
        """Returns what `state.flatten` gives; `flat.signature` tells whether it differs from the last one."""
        flat = None if self._structure is None else self._structure.again(state)
        if flat is not None:
            return flat
        self.walks += 1
        flat = flatten(state)
        self._structure = _structure_of(state, flat)
        if self._structure is not None:
            flat.encoded, flat.values = self._structure.split(flat.values)
        signature_of(flat, self._structure)
        return flat


def signature_of(flat: Flat, structure: Any = None) -> tuple[Any, ...]:
    """Notes in a flat state, and returns, all that the plan of its capture depends on."""
    leaves = flat.tensors
    if isinstance(leaves, Leaves):
        tensors = leaves.tensors
    else:
        tensors = [leaf.tensor for leaf in leaves.values()]
    if structure is None:
        structure = [(f.name, f.full_shape, f.box, f.flat, f.replica, f.holders) for f in leaves.values()]
    flat.signature = (structure, *(list(map(of, tensors)) for of in _MOVING))
    return flat.signature


class _Structure:
    """One flattened state, to be found again. Compared by identity."""

    def __init__(self, root: _Part, flat: Flat, tensors: list[Any], local: LocalWatch) -> None:
        self._root, self._local = root, local
        nothing = torch.empty(0, device="meta")
        self._known = {n: (i, replace(f, tensor=nothing)) for i, (n, f) in enumerate(flat.tensors.items())}
        self._fixed = [list(map(of, tensors)) for of in _FIXED]
        static = {name for name in flat.values if name == BARE or name in root.fixed_names()}
        self._encoded = {name: encode(flat.values[name].value, flat.values[name].path) for name in static}

    def split(self, values: dict[str, Node]) -> tuple[dict[str, Any], dict[str, Node]]:
        """Returns the values that belong to the structure, encoded, and the others."""
        return self._encoded, {name: node for name, node in values.items() if name not in self._encoded}

    def again(self, state: Any) -> Flat | None:
        """Returns the state flattened, or None when it is not of this structure."""
        flat = Flat(Node("dict", "", "state", None))
        found: list[Any] = []
        tensors = self._local.tensors(found) if self._root.collect(state, flat, found) else None
        if tensors is None:
            return None
        if any(list(map(of, tensors)) != known for of, known in zip(_FIXED, self._fixed, strict=True)):
            return None  # types come first: what is no tensor any more has no shape to ask for
        flat.encoded = self._encoded
        flat.tensors = Leaves(self._known, tensors)  # type: ignore[assignment]  # only read from here on
        signature_of(flat, self)
        return flat


def _structure_of(state: Any, flat: Flat) -> _Structure | None:
    """Returns the structure of a state that was just flattened; None when a part of it cannot be watched."""
    root = _part_of(state, flat.root)
    if root is None:
        return None
    again, found = Flat(flat.root), []  # type: ignore[var-annotated]
    if not root.collect(state, again, found) or len(found) != len(flat.tensors):
        return None
    local = LocalWatch(found)
    tensors = local.tensors(found)
    assert tensors is not None
    pointers = [leaf.tensor.data_ptr() for leaf in flat.tensors.values()]
    if not all(type(t) in _PLAIN for t in tensors) or [t.data_ptr() for t in tensors] != pointers:
        return None  # a state_dict() that makes new tensors at each call, or in an order of its own
    return _Structure(root, flat, tensors, local)


class _Part:
    """A place in the tree of a state: how it is collected again. watch: of all tensors at and below it."""

    def __init__(self, node: Node, children: list[_Part], watch: Watch | None = None) -> None:
        self.kind, self.name, self.path = node.kind, node.name, node.path
        self.keys = [key for key, _ in node.children]
        self.children, self.watch = children, watch
        self.over: Any = None

    def fixed_names(self) -> set[str]:
        """Returns names of values that cannot change while the structure does not: each parameter's group."""
        found = set()
        for child in self.children:
            found |= child.fixed_names()
        if self.watch is not None and isinstance(self.watch, OptimizerWatch):
            found |= {grand.name for child in self.children if child.keys_are("group_of") for grand in child.children}
        return found

    def keys_are(self, last: str) -> bool:
        """True for the part of a dict that hangs on this key."""
        return self.name.endswith(f"/{last}")

    def collect(self, value: Any, flat: Flat, tensors: list[Any]) -> bool:
        """Adds what is here now; False when it is not what it was."""
        if type(value) is Replicas:
            if self.over is None or self.over != value.over:
                return False
            value = value.value
        elif self.over is not None:
            return False
        if self.watch is not None:
            value = unwrapped(value)
            found = self.watch.tensors(value)
            if found is None:
                return False
            tensors += found
            return self._collect_options(value, flat)
        if self.kind == "tensor":
            tensors.append(value)
            return _can_watch(value)
        if self.kind == "value":
            return self._collect_value(value, flat)
        if self.kind == "per_rank":
            flat.per_rank[self.name] = Node("per_rank", self.name, self.path, value.value)
            return type(value) is PerRank and not is_object(value.value)
        if self.kind == "object":
            value = unwrapped(value)
            return is_object(value) and self.children[0].collect(value.state_dict(), flat, tensors)
        return self._collect_children(value, flat, tensors)

    def _collect_children(self, value: Any, flat: Flat, tensors: list[Any]) -> bool:
        if self.kind == "dict":
            if type(value) not in (dict, OrderedDict) or list(value) != self.keys:
                return False
            parts = value.values()
        elif type(value) is {"list": list, "tuple": tuple}[self.kind] and len(value) == len(self.keys):
            parts = value
        else:
            return False
        return all(child.collect(part, flat, tensors) for child, part in zip(self.children, parts, strict=True))

    def _collect_value(self, value: Any, flat: Flat) -> bool:
        flat.values[self.name] = Node("value", self.name, self.path, value)
        return not (isinstance(value, dict) or isinstance(value, Sharded) or has_named([value]))

    def _collect_options(self, value: Any, flat: Flat) -> bool:
        """The options of an optimizer's groups, which change as it trains."""
        if isinstance(value, OptimizerState):
            groups = next(child for child in self.children if child.keys_are("groups"))
            for part, options in zip(groups.children, value.options().values(), strict=True):
                flat.values[part.name] = Node("value", part.name, part.path, options)
        return True


def _can_watch(value: Any) -> bool:
    return type(value) in _PLAIN or is_dtensor(value)


def _part_of(value: Any, node: Node) -> _Part | None:
    """Returns the part of a node of the tree over the value that it was made of; None when it cannot be watched."""
    if type(value) is Replicas:
        part = _part_of(value.value, node)
        if part is not None:
            part.over = value.over
        return part
    value = unwrapped(value)
    if node.kind == "object" and type(value) is PerRank:
        return None
    watch: Watch | None = None
    inner = node
    if node.kind == "object":
        inner = node.children[0][1]
        if isinstance(value, torch.nn.Module):
            if not ModuleWatch.fits(value):
                return None
            return _Part(Node("object", node.name, node.path, None), [], ModuleWatch(value))
        if isinstance(value, OptimizerState):
            if not OptimizerWatch.fits(value):
                return None
            watch = OptimizerWatch(value)
        elif isinstance(value, torch.optim.Optimizer):
            return None
    elif node.kind == "dict" and value and all(map(_can_watch, value.values())):
        return _Part(Node("dict", node.name, node.path, None), [], DictWatch(value))
    elif node.kind == "dict" and value and all(type(v) is Sharded for v in value.values()):
        return _Part(Node("dict", node.name, node.path, None), [], ShardedWatch(value))
    if node.kind == "tensor" and not _can_watch(value):
        return None
    content = inner.value if node.kind == "object" else value
    if node.kind == "object" and watch is None:
        child = _part_of(content, inner)
        return None if child is None else _Part(node, [child])
    children = []
    for key, child_node in inner.children:
        child = _part_of(content[key], child_node)
        if child is None:
            return None
        children.append(child)
    return _Part(inner, children, watch)
