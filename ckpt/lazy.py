"""State that an optimizer makes only when it first steps: how a fresh one gets it before a restore.

Not a description of any optimizer. The one idea: a step with zero gradients at learning rate 0 makes all state and
changes no parameter; what the snapshot has not of it (a parameter without a gradient so far) is taken away again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch


class Lazy(dict[str, Any]):
    """A part of a restore template that the snapshot has as a whole, or not at all: then it is left out of what
    `load_state_dict` gets, and the optimizer makes it when it comes to need it, as the saved one would have."""


ABSENT = object()  # what `rebuild` finds in place of such a part


def materialize(optimizer: torch.optim.Optimizer) -> None:
    """Lets a torch optimizer create the state that it has not created yet: one step with zero gradients and learning
    rate 0 for the parameters without any, so that none changes. Gradients, learning rates and hooks are put back.

    An optimizer that steps by closure only (LBFGS) makes nothing.
    """
    groups = optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    fresh = {id(p) for p in parameters if p.requires_grad and not optimizer.state.get(p)}
    if not fresh or isinstance(optimizer, torch.optim.LBFGS):
        return
    gradients, rates = [p.grad for p in parameters], [group["lr"] for group in groups]
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    try:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if id(parameter) in fresh else None
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        optimizer.step()
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def optimizer_template(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the `state_dict()` of an optimizer whose state is all there, each parameter's part as Lazy."""
    materialize(optimizer)
    content = optimizer.state_dict()
    return {**content, "state": {key: Lazy(part) for key, part in content["state"].items()}}
