"""A torch optimizer's state by parameter name, so that it does not depend on the order of parameters, nor on which
rank has which of them.

Not for ShardedAdamW, which describes its own shards. Knows torch.optim's state_dict layout and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch

from plait.ckpt.errors import StateError
from plait.ckpt.lazy import Lazy, materialize
from plait.ckpt.state import unwrapped


class OptimizerState:
    """An object with state_dict() and load_state_dict() for a snapshot's state; see `optimizer_state`."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        by_id = {id(parameter): _plain(name) for name, parameter in unwrapped(model).named_parameters()}
        self.names: list[str] = []
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in by_id:
                    raise StateError(
                        f"parameter {place} of group {number} of the optimizer, {tuple(parameter.shape)}, "
                        "is not in the model (was it made before fully_shard or parallelize_module?)"
                    )
                self.names.append(by_id[id(parameter)])

    def state_dict(self) -> dict[str, Any]:
        """Returns {"state": {parameter name: {...}}, "groups": {number: [[option, value], ...]}, "group_of":
        {parameter name: number}}: each rank of a pipeline has its own parameters, and all agree on a group's options.
        """
        raw = self.optimizer.state_dict()
        group_of = {self.names[p]: i for i, group in _numbered(raw) for p in group["params"]}
        state = {self.names[p]: part for p, part in raw["state"].items()}
        return {"state": state, "groups": self.options(), "group_of": group_of}

    def options(self) -> dict[int, list[list[Any]]]:
        """Returns {number of a group: [[option, value], ...]}."""
        groups = enumerate(self.optimizer.param_groups)
        return {i: [[k, v] for k, v in group.items() if k not in BY_PLACE] for i, group in groups}

    def restore_template(self) -> dict[str, Any]:
        """Returns the same after letting a fresh optimizer make its state, so that there is something to fill."""
        materialize(self.optimizer)
        content = self.state_dict()
        return {**content, "state": {name: Lazy(part) for name, part in content["state"].items()}}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Takes what `state_dict` gave. StateError when the groups hold other parameters."""
        numbers = {name: p for p, name in enumerate(self.names)}
        groups = []
        for i, own in _numbered(self.optimizer.state_dict()):
            for p in own["params"]:
                saved = content["group_of"].get(self.names[p])
                if saved != i:
                    raise StateError(f"parameter {self.names[p]!r} is in group {i}, in the snapshot in {saved}")
            groups.append({**own, **dict(content["groups"][i])})
        state = {numbers[name]: part for name, part in content["state"].items()}
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


BY_PLACE = ("params", "param_names")  # of a group in torch's state_dict: one item a parameter


# What compiling or checkpointing one layer puts into the names of its parameters, and into no other's state.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def _plain(name: str) -> str:
    """Returns a parameter's name without the wrappers of layers, as DCP has it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _numbered(raw: dict[str, Any]) -> Any:
    return enumerate(raw["param_groups"])


def optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Wraps an optimizer so that its state is stored by parameter name.

    StateError for parameters not in the model.
    """
    return OptimizerState(model, optimizer)
