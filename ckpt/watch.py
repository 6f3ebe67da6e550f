"""Finds the tensors of a module, of an optimizer or of a dict again without walking them in Python.

Each watch was made of one object when its state was flattened, and answers with its tensors in the order in which
flattening met them, or with None when anything about its structure is not what it was. The one idea: structure is
keys, identities and the absence of hooks, and all of these compare by calls that loop in C. Holds weak references.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, compress, count, repeat
from operator import attrgetter, call, contains, is_
from typing import Any, Protocol

import torch
from torch import nn

from plait.ckpt.dtensors import is_dtensor
from plait.ckpt.leaf import Sharded
from plait.ckpt.optimizer import OptimizerState

_PLAIN_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")


class Watch(Protocol):
    """Remembers one object's structure."""

    def tensors(self, value: Any) -> list[Any] | None: ...


class DictWatch:
    """A dict whose values are all tensors."""

    def __init__(self, value: dict[Any, Any]) -> None:
        self._keys = list(value)

    def tensors(self, value: Any) -> list[Any] | None:
        same = type(value) in (dict, OrderedDict) and list(value) == self._keys
        return list(value.values()) if same else None


class LocalWatch:
    """The memory of this rank behind tensors of which some are DTensors: what the others know of these (mesh,
    placements, shape) are the same objects again, of types that do not change."""

    _SPEC = tuple(map(attrgetter, ("_spec.mesh", "_spec.placements", "_spec.tensor_meta")))

    def __init__(self, tensors: list[Any]) -> None:
        self._types, self._mask = list(map(type, tensors)), list(map(is_dtensor, tensors))
        self._specs = self._specs_of(list(compress(tensors, self._mask)))
        behind = count(len(tensors))
        self._order = [next(behind) if shard else place for place, shard in enumerate(self._mask)]

    def tensors(self, found: list[Any]) -> list[Any] | None:
        """Returns the tensors with each DTensor replaced by its local one; None when anything else differs."""
        if not self._specs:
            return found
        if list(map(type, found)) != self._types:
            return None
        shards = list(compress(found, self._mask))
        if not all(map(is_, self._specs_of(shards), self._specs)):
            return None
        return list(map([*found, *map(attrgetter("_local_tensor"), shards)].__getitem__, self._order))

    def _specs_of(self, shards: list[Any]) -> list[Any]:
        return list(chain.from_iterable(map(part, shards) for part in self._SPEC))


class ShardedWatch:
    """A dict whose values are all Sharded, the same objects again: of these only the tensor's memory can change."""

    def __init__(self, value: dict[Any, Sharded]) -> None:
        self._keys, self._refs = list(value), list(map(weakref.ref, value.values()))

    def tensors(self, value: Any) -> list[Any] | None:
        if type(value) not in (dict, OrderedDict) or list(value) != self._keys:
            return None
        if not all(map(is_, value.values(), map(call, self._refs))):
            return None
        return list(map(attrgetter("tensor"), value.values()))


class ModuleWatch:
    """A module whose state_dict() is torch's own, down to every submodule, without hooks but those of FSDP2, which
    bring its parameters back into shards."""

    def __init__(self, module: nn.Module) -> None:
        modules = list(_walk(module))
        self._refs = list(map(weakref.ref, modules))
        self._children, self._local_names, self._keys, self._not_saved = self._structure(modules)
        values = list(chain.from_iterable(map(dict.values, _dicts(modules))))
        skipped = [self._not_saved[i // 2] if i % 2 else frozenset() for i in range(2 * len(modules))]
        saved = [k not in some for some, keys in zip(skipped, self._keys, strict=True) for k in keys]
        self._nones = list(map(is_, values, repeat(None)))
        self._mask = [keep and not none for keep, none in zip(saved, self._nones, strict=True)]

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """True when nothing about the module's state is of its own making."""
        return not _is_special(list(_walk(module)))

    def tensors(self, value: Any) -> list[Any] | None:
        modules = list(map(call, self._refs))
        if modules[0] is not value or not all(map(isinstance, modules, repeat(nn.Module))):
            return None
        if _is_special(modules):
            return None
        list(map(call, _pre_hooks(modules)))
        known = (self._children, self._local_names, self._keys, self._not_saved)
        if self._structure(modules) != known:
            return None
        values = list(chain.from_iterable(map(dict.values, _dicts(modules))))
        if list(map(is_, values, repeat(None))) != self._nones:
            return None
        return list(compress(values, self._mask))

    @staticmethod
    def _structure(modules: list[Any]) -> tuple[list[int], list[Any], list[Any], list[Any]]:
        """Ids of all children, their names, names of parameters and buffers, and which buffers are not saved."""
        children = list(map(attrgetter("_modules"), modules))
        return (
            list(map(id, chain.from_iterable(map(dict.values, children)))),
            list(chain.from_iterable(children)),
            list(map(tuple, _dicts(modules))),
            list(map(frozenset, map(attrgetter("_non_persistent_buffers_set"), modules))),
        )


class OptimizerWatch:
    """A torch optimizer by parameter name, whose state of every parameter is tensors only, under the same keys."""

    def __init__(self, value: OptimizerState) -> None:
        optimizer = value.optimizer
        self._names = list(value.names)
        self._refs = list(map(weakref.ref, _parameters(optimizer)))
        self._owners = list(map(weakref.ref, optimizer.state))
        self._keys = list(map(tuple, optimizer.state.values()))

    @staticmethod
    def fits(value: OptimizerState) -> bool:
        """True when the optimizer's state_dict() is torch's own and holds nothing but tensors."""
        optimizer = value.optimizer
        parts = optimizer.state.values()
        plain = not _is_special_optimizer(optimizer)
        options = chain.from_iterable(group.values() for group in optimizer.param_groups)
        no_tensors = not any(isinstance(option, torch.Tensor) for option in options)
        return plain and no_tensors and all(isinstance(t, torch.Tensor) for part in parts for t in part.values())

    def tensors(self, value: Any) -> list[Any] | None:
        if type(value) is not OptimizerState or value.names != self._names:
            return None
        optimizer = value.optimizer
        here = _parameters(optimizer)
        if (
            _is_special_optimizer(optimizer)
            or len(here) != len(self._refs)
            or len(optimizer.state) != len(self._owners)
        ):
            return None
        if not all(map(is_, chain(here, optimizer.state), map(call, chain(self._refs, self._owners)))):
            return None
        parts = list(optimizer.state.values())
        if set(map(type, parts)) - {dict} or list(map(tuple, parts)) != self._keys:
            return None
        return list(chain.from_iterable(map(dict.values, parts)))


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _walk(module: nn.Module) -> Iterator[nn.Module]:
    """Yields modules as state_dict() visits them: one that has two names twice."""
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _walk(child)


def _dicts(modules: list[Any]) -> list[dict[str, Any]]:
    """Returns parameters and buffers of all modules, in the order of state_dict()."""
    both = zip(map(attrgetter("_parameters"), modules), map(attrgetter("_buffers"), modules), strict=True)
    return list(chain.from_iterable(both))


def _is_special(modules: list[Any]) -> bool:
    """True when a module's state is of its own making: by its class, a method put into the object, or a hook."""
    kinds, own = set(map(type, modules)), list(map(vars, modules))
    return (
        any(getattr(kind, name) is not getattr(nn.Module, name) for kind in kinds for name in _PLAIN_METHODS)
        or any(any(map(contains, own, repeat(name))) for name in _PLAIN_METHODS)
        or any(map(attrgetter("_state_dict_hooks"), modules))
        or not all(map(_is_fsdp2, _pre_hooks(modules)))
    )


def _pre_hooks(modules: list[Any]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, map(attrgetter("_state_dict_pre_hooks"), modules))))


def _is_fsdp2(hook: Any) -> bool:
    """True for the hook that brings the parameters of one FSDP2 module back into shards, and does nothing else."""
    code = getattr(hook, "__code__", None)
    return code is not None and (code.co_name, code.co_names, hook.__module__) == (
        "to_sharded_hook",
        ("_to_sharded",),
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    )


def _is_special_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """The same of an optimizer."""
    hooks = (optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_state_dict_post_hooks)
    own = "state_dict" in vars(optimizer) or type(optimizer).state_dict is not torch.optim.Optimizer.state_dict
    return own or any(hooks)
