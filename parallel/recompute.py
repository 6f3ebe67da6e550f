"""Recompute: drop a block's activations after forward and make them again in backward. Bit-identical by design.

Not here: which blocks are wrapped (the model's business) and any restoring of keys: plait's random numbers depend on
their place (random.py), so a second forward draws the same ones. Two means, one function:

    full       the block keeps its inputs only; backward runs the block's forward once more, then its backward
    selective  the block keeps what is dear (outputs of matmuls, attention and collectives) and drops tensors that a
               layer has declared cheap to make again (`replayable`): outputs of norms and of the gated activation

The one idea of "selective": a tensor carries how it is made from tensors that backward keeps anyway. Where an
autograd function saves such a tensor, a hook stores the recipe instead. Nothing else of the block runs twice, no op
is traced, and a tensor without a recipe is simply kept. Weight gradients go through their sinks in both: a block's
functions read `sink.microbatch` in backward, where the second forward runs too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

Policy = Literal["none", "full", "selective"]
POLICIES: tuple[Policy, ...] = ("none", "full", "selective")


def recompute(function: Callable[..., Any], *args: Any, policy: Policy = "none", **kwargs: Any) -> Any:
    """Calls function(*args, **kwargs) so that backward keeps only what the policy says.

    With "full", tensors that need a gradient must be positional arguments or parameters, the result a tensor or a
    tuple of tensors. The function must be deterministic given its arguments; draws from torch's own generators are
    repeated too. Without grad mode every policy is a plain call.
    """
    if policy not in POLICIES:
        raise ValueError(f"recompute policy {policy!r} must be one of {', '.join(POLICIES)}")
    if policy == "none" or not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if policy == "selective":
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            return function(*args, **kwargs)
    # Parameters are no arguments: without an argument that needs a gradient, autograd would not come back here.
    anchor = torch.empty(0, requires_grad=True)
    return _Full.apply(partial(function, **kwargs) if kwargs else function, anchor, *args)


# ---- full ------------------------------------------------------------------------------------------------------


class _Full(torch.autograd.Function):
    """Saves the tensor arguments; backward runs `function` again with gradients and backpropagates through it."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], anchor: Tensor, *args: Any) -> Any:
        before = _generator_states()
        result = function(*args)
        ctx.function, ctx.made = function, None
        ctx.generators = None if _same(before, _generator_states()) else before
        ctx.rest = tuple(None if isinstance(arg, Tensor) else arg for arg in args)
        ctx.places = tuple(i for i, arg in enumerate(args) if isinstance(arg, Tensor))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(args[i] for i in ctx.places))
        return result

    @staticmethod
    def backward(ctx: Any, *douts: Tensor | None) -> Any:
        (args, result), ctx.made = ctx.made or _again(ctx), None
        outs = result if isinstance(result, tuple) else (result,)
        pairs = [(out, dout) for out, dout in zip(outs, douts, strict=True) if dout is not None and out.requires_grad]
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [dout for _, dout in pairs])
        return None, None, *(arg.grad if isinstance(arg, Tensor) else None for arg in args)


def _again(ctx: Any) -> tuple[list[Any], Any]:
    """The second forward of a block: its arguments, cut from the graph, and its result."""
    args = list(ctx.rest)
    for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
        args[place] = tensor.detach().requires_grad_(ctx.needs_input_grad[2 + place])
    with torch.enable_grad():
        return args, _with_generators(ctx.generators, ctx.function, args)


def recompute_early(outputs: Iterable[Any], limit: int | None) -> int:
    """Runs the second forward of "full" blocks behind `outputs` now, the last first, and returns of how many.

    Backward then takes what is there: the same bits. For whoever must wait for the gradient of `outputs` anyway.
    `limit`: at most so many blocks (None: all); each keeps its activations until its own backward.
    """
    found: list[Any] = []
    seen: set[Any] = {None}
    waiting: list[Any] = [value.grad_fn for value in outputs if isinstance(value, Tensor)]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            if isinstance(node, _Full._backward_cls):
                found.append(node)
            waiting += [before for before, _ in node.next_functions]
    found.sort(key=lambda node: node._sequence_nr(), reverse=True)
    for node in found[:limit]:
        node.made = node.made or _again(node)
    return len(found[:limit])


def _generator_states() -> list[Tensor]:
    """The states of torch's default generators: of the CPU and, once it is in use, of the current CUDA device."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def _set_generator_states(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


def _same(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(torch.equal(b, a) for b, a in zip(before, after, strict=True))


def _with_generators(states: list[Tensor] | None, function: Callable[..., Any], args: list[Any]) -> Any:
    """Calls the function as at the given generator states (None: it does not draw); leaves them alone."""
    if states is None:
        return function(*args)
    present = _generator_states()
    _set_generator_states(states)
    try:
        return function(*args)
    finally:
        _set_generator_states(present)


# ---- selective -------------------------------------------------------------------------------------------------


class Recipe:
    """How to make one tensor again. Counts who asked for it, so that it is made once and freed after the last."""

    __slots__ = ("make", "waiting", "made")

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self.make = make
        self.waiting = 0  # saved uses that backward has not asked for yet
        self.made: Tensor | None = None

    def take(self) -> Tensor:
        """Returns the tensor, made at the first call and let go at the last one that waits."""
        tensor = self.made
        if tensor is None:
            with torch.no_grad():
                tensor = self.make()
        self.waiting -= 1
        self.made = tensor if self.waiting > 0 else None
        return tensor


def replayable(op: Callable[..., Tensor], *args: Any) -> Tensor:
    """Returns op(*args), marked as cheap to make again from its arguments, which should be kept anyway.

    The mark means something only under `recompute(policy="selective")`, and only for the tensor itself, not for views
    of it. Example: `hidden = replayable(kernels.swiglu, gate_up)`.
    """
    result = op(*args)
    if torch.is_grad_enabled():
        mark_replayable(result, op, *args)
    return result


def mark_replayable(result: Tensor, op: Callable[..., Any], *args: Any) -> None:
    """Marks `result`: op(*args) makes it again, bit for bit. Neither it nor the arguments may be changed in place."""
    result.plait_recipe = Recipe(partial(op, *args))  # type: ignore[attr-defined]


def _pack(tensor: Tensor) -> Tensor | Recipe:
    recipe = getattr(tensor, "plait_recipe", None)
    if recipe is None:
        return tensor
    recipe.waiting += 1
    return recipe


def _unpack(packed: Tensor | Recipe) -> Tensor:
    return packed.take() if isinstance(packed, Recipe) else packed
