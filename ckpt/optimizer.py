"""A torch optimizer's state by parameter name, so that it does not depend on the order of parameters.

Not for ShardedAdamW, which describes its own shards. Knows torch.optim's state_dict layout and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch

from plait.ckpt.errors import StateError
from plait.ckpt.state import materialize


class OptimizerState:
    """An object with state_dict() and load_state_dict() for a snapshot's state; see `optimizer_state`."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        by_id = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names: list[str] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in by_id:
                    raise StateError(
                        f"the optimizer has a parameter {tuple(parameter.shape)} that is not in the model"
                    )
                self._names.append(by_id[id(parameter)])

    def state_dict(self) -> dict[str, Any]:
        """Returns {"state": {parameter name: {...}}, "param_groups": [{..., "params": [names]}]}."""
        raw = self._optimizer.state_dict()
        groups = [{**group, "params": [self._names[i] for i in group["params"]]} for group in raw["param_groups"]]
        return {"state": {self._names[i]: values for i, values in raw["state"].items()}, "param_groups": groups}

    def restore_template(self) -> dict[str, Any]:
        """Returns the same after letting a fresh optimizer make its state, so that there is something to fill."""
        materialize(self._optimizer)
        return self.state_dict()

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Takes what `state_dict` gave. StateError when the groups hold other parameters."""
        numbers = {name: i for i, name in enumerate(self._names)}
        groups = []
        for group in content["param_groups"]:
            unknown = [name for name in group["params"] if name not in numbers]
            if unknown:
                raise StateError(f"the snapshot's optimizer has parameters that this one has not: {unknown[:8]}")
            groups.append({**group, "params": [numbers[name] for name in group["params"]]})
        state = {numbers[name]: values for name, values in content["state"].items()}
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})


def optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Wraps an optimizer so that its state is stored by parameter name.

    StateError for parameters not in the model.
    """
    return OptimizerState(model, optimizer)
