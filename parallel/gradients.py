"""Where a weight gradient goes: into the parameter's flat bucket view, at once or when the schedule says W.

Not autograd's way: a layer of plait.parallel returns None for its weights in backward and adds the gradient itself.
The one idea: a parameter carries where its gradient lives (`param.main_grad`, set by plait.parallel.data) and whom to
tell (`param.on_grad`); a `GradSink` carries when the work is done. Attributes read here, all optional:

    param.main_grad   fp32 (fp64 for fp64) tensor of the parameter's shape; absent: `param.grad` is used
    param.lend_grad   callable(), sets a zeroed main_grad where that is None (ZeRO-2)
    param.on_grad     callable(param), called once per micro-batch when every use of the parameter was added
    param.grad_uses   how many layers use the parameter (2 for a tied embedding on one stage); absent: 1
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.kernels.matmul import wgrad_into


class GradSink:
    """Runs weight-gradient work at once, or keeps it by micro-batch until `run`.

    Purpose: one place per layer through which every weight gradient passes, so that a schedule can split a backward
    into I (input gradient) and W (weight gradient). Owns the queued functions and, through them, the tensors they
    close over; `run` frees them. One thread uses it at a time: the one that runs backward.
    """

    def __init__(self, *, deferring: bool = False) -> None:
        self.microbatch = 0  # the micro-batch whose backward runs; the executor sets it before each B or I
        self.deferring = deferring  # False: B, work runs inside backward; True: I, work waits for W
        self._queues: dict[int, list[Callable[[], None]]] = {}

    def add(self, microbatch: int, work: Callable[..., None], *args: Any) -> None:
        """Takes the weight-gradient work of one micro-batch; runs work(*args) now unless deferring."""
        if self.deferring:
            self._queues.setdefault(microbatch, []).append(partial(work, *args))
        else:
            work(*args)

    def run(self, microbatch: int) -> None:
        """Does the queued work of one micro-batch in the order in which it was added (action W), and frees it."""
        queue = self._queues.pop(microbatch, [])
        queue.reverse()
        with torch.no_grad():  # as inside backward, where work that is not deferred runs
            while queue:  # popped one by one, so that the tensors of each are freed before the next runs
                queue.pop()()

    def holds(self, microbatch: int) -> bool:
        """Whether work of the micro-batch is queued."""
        return microbatch in self._queues

    @property
    def pending(self) -> int:
        """The number of queued pieces of work over all micro-batches."""
        return sum(len(queue) for queue in self._queues.values())

    def clear(self) -> None:
        """Drops all queued work: for a step that is given up."""
        self._queues.clear()


def inseparable(module: nn.Module) -> tuple[str, ...]:
    """Names of the layers of a module whose weight gradients autograd makes, and which so cannot wait for W.

    A schedule with I and W runs them all the same, but their W is empty: `search(split=False)` leaves such schedules
    out. A layer that can split has a `weight_grads` sink; a frozen one has nothing to split, and neither have vectors
    (the scales of a norm, biases): their gradients are sums over what I reads anyway, no products that W could take;
    nor has a mere name for the weight of a layer that can: a module without a forward.
    """
    layers = dict(module.named_modules())
    split = {
        id(p) for layer in layers.values() if hasattr(layer, "weight_grads") for p in layer.parameters(recurse=False)
    }

    def makes_weight_gradients(layer: nn.Module) -> bool:
        is_name = type(layer).forward is nn.Module.forward
        own = layer.parameters(recurse=False)
        return any(p.requires_grad and p.dim() > 1 and not (is_name and id(p) in split) for p in own)

    return tuple(
        name for name, layer in layers.items() if not hasattr(layer, "weight_grads") and makes_weight_gradients(layer)
    )


def add_use(param: nn.Parameter) -> None:
    """Declares one more layer that adds to the gradient of the parameter in each micro-batch."""
    param.grad_uses = getattr(param, "grad_uses", 1) + 1  # type: ignore[attr-defined]


def notify(param: nn.Parameter) -> None:
    """Tells the owner of the gradient that one use was added; `on_grad` fires at the last use of a micro-batch."""
    on_grad = getattr(param, "on_grad", None)
    if on_grad is None:
        return
    uses = getattr(param, "grad_uses", 1)
    if uses > 1:
        seen = (getattr(param, "grad_uses_seen", 0) + 1) % uses
        param.grad_uses_seen = seen  # type: ignore[attr-defined]
        if seen:
            return
    on_grad(param)


def grad_home(param: nn.Parameter) -> Tensor:
    """Returns the tensor that a gradient of the parameter is added into; a new `param.grad` of zeros at need."""
    home = getattr(param, "main_grad", None)
    if home is None and (lend := getattr(param, "lend_grad", None)) is not None:
        lend()
        home = param.main_grad  # type: ignore[attr-defined]
    if home is not None:
        return home
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad


def accumulate(param: nn.Parameter, grad: Tensor) -> None:
    """Adds a contiguous gradient of the parameter's elements to where it lives, in the home's dtype; notifies."""
    home = grad_home(param)
    home.add_(grad if grad.shape == home.shape else grad.view(home.shape))
    notify(param)


def accumulate_linear(param: nn.Parameter, x: Tensor, dout: Tensor) -> None:
    """Adds dout^T x, the weight gradient of `linear`, without a temporary where the home is wide enough.

    Shapes: x [..., K], dout [..., N], param [..., K] with N rows over its leading dims.
    """
    home = grad_home(param)
    wgrad_into(x, dout, home if home.dim() == 2 else home.view(-1, home.shape[-1]), True)
    notify(param)
