"""State that an optimizer makes only when it first steps: how a fresh one gets it before a restore, and how large it
will be.

Not a description of any optimizer. The one idea: a step with zero gradients at learning rate 0 makes all state and
changes no parameter; what the snapshot has not of it (a parameter without a gradient so far) is taken away again.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
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


def sizes_to_come(state: Any) -> list[int]:
    """Returns the bytes of each tensor that the optimizers in a state will make on this rank at their first step.

    Nothing is allocated and the optimizers stay as they are: copies of them step on tensors without memory. Only
    torch's own, as the step of another one may do more; those that cannot step so (Adafactor, ASGD) count as nothing.
    """
    found = {id(optimizer): optimizer for optimizer in _optimizers(state)}
    return [size for optimizer in found.values() for size in _sizes_of(optimizer)]


def _optimizers(value: Any) -> Iterator[torch.optim.Optimizer]:
    if isinstance(value, (Mapping, list, tuple)):
        for child in value.values() if isinstance(value, Mapping) else value:
            yield from _optimizers(child)
        return
    found = value.optimizer if hasattr(value, "restore_template") else value  # not a scheduler's
    if isinstance(found, torch.optim.Optimizer) and type(found).__module__.startswith("torch.optim."):
        yield found


def _sizes_of(optimizer: torch.optim.Optimizer) -> list[int]:
    ghost = object.__new__(type(optimizer))
    ghost.__dict__.update(vars(optimizer), state=defaultdict(dict))
    ghost._optimizer_step_pre_hooks, ghost._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    fresh = [
        [p for p in g["params"] if p.requires_grad and not optimizer.state.get(p)] for g in optimizer.param_groups
    ]
    ghost.param_groups = [
        {**group, "params": list(map(_without_memory, some)), "foreach": False, "fused": False}
        for group, some in zip(optimizer.param_groups, fresh, strict=True)
    ]
    step: Any = type(optimizer).step
    try:
        getattr(step, "__wrapped__", step)(ghost)  # without the hooks of all optimizers, which torch puts around it
    except (
        RuntimeError,
        TypeError,
        AssertionError,
    ):  # a value is asked for, a closure, or a device (capturable=True)
        return []
    made = [tensor for part in ghost.state.values() for tensor in part.values() if isinstance(tensor, torch.Tensor)]
    return [tensor.numel() * tensor.element_size() for tensor in made]


def _without_memory(parameter: torch.Tensor) -> torch.nn.Parameter:
    local = getattr(parameter, "_local_tensor", parameter)  # of a DTensor
    ghost = torch.nn.Parameter(torch.empty_like(local.detach(), device="meta"))
    ghost.grad = torch.empty_like(ghost)
    return ghost
