"""How an op of this package is known to torch, and how it is called.

Not here: kernels and what they need (launch.py). The one idea: an op is registered once under ``plait::``; its
Autograd-key kernel is an ``autograd.Function`` that calls the same op below autograd, so that ``torch.compile`` and
tracing see one opaque call each way. A plain eager call that nobody watches skips torch's dispatcher, which takes
longer than all the rest: the same functions run, in the same order.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import _C, Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

below_autograd = _C._AutoDispatchBelowAutograd


def watched() -> bool:
    """Whether calls of ops are recorded or rewritten now: tracing, fake tensors, functional transforms."""
    return (
        _C._len_torch_dispatch_stack() > 0 or _C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    )


def observed() -> bool:
    """Whether torch's dispatcher has more to do for a call than to find the op's kernel."""
    return (
        torch.compiler.is_compiling()
        # What `watched` asks, in line: a call of it in every call of an op is host time.
        or _C._len_torch_dispatch_stack() > 0
        or _C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _C._len_torch_function_stack() > 0
        or _C._is_any_autocast_enabled()
        or _C._autograd._profiler_enabled()
        or _C._get_tracing_state() is not None
    )


_PLAIN = (int, bool, float, str)
_TENSORS = {Tensor, Parameter}


def all_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether none is of a subclass, which may dispatch by itself, or a view of the negative of its memory."""
    return _TENSORS.issuperset(map(type, tensors)) and not any(map(Tensor.is_neg, tensors))


def _quick(kernel: Callable[..., Any], autograd: Callable[..., Any], num_looked_at: int) -> Callable[..., Any]:
    """`autograd`, but `kernel` itself where no gradient is asked for: saves a graph node and a second dispatch.

    No tensor is behind the first `num_looked_at` arguments.
    """

    def call(*arguments: Any) -> Any:
        enabled = torch.is_grad_enabled()
        for x in arguments[:num_looked_at]:
            if x is None:
                continue
            kind = type(x)
            if kind is Tensor or kind is Parameter:
                if (enabled and x.requires_grad) or x.is_neg():
                    return autograd(*arguments)
            elif kind not in _PLAIN:  # a list, or a subclass of Tensor, which may dispatch by itself
                return autograd(*arguments)
        return autograd(*arguments) if watched() else kernel(*arguments)

    return call


def _direct(
    op: Any, kernel: Callable[..., Any], autograd: Callable[..., Any] | None, num_looked_at: int
) -> Callable[..., Any]:  # fmt: skip
    """`op`, without torch's dispatcher in a plain eager call: 7 us of host time for 3 arguments, 17 for 15.

    Positional arguments, the first a tensor, and tensors without a subclass, all on one device; all else, such as
    lists, goes to `op` itself. So does a view whose memory holds the negative of its values.
    """

    def call(*arguments: Any, **keywords: Any) -> Any:
        if keywords or observed():
            return op(*arguments, **keywords)
        enabled, wanted = torch.is_grad_enabled(), False
        for x in arguments[:num_looked_at]:
            if x is None:
                continue
            kind = type(x)
            if kind is Tensor or kind is Parameter:
                if x.is_neg():
                    return op(*arguments)
                wanted = wanted or (enabled and x.requires_grad)
            elif kind not in _PLAIN:
                return op(*arguments)
        if arguments[0].is_meta:
            return op(*arguments)
        if not wanted:
            return kernel(*arguments)
        return op(*arguments) if autograd is None else autograd(*arguments)

    return call


_AUTOCAST = _C.DispatchKeySet(_C.DispatchKey.AutocastCPU) | _C.DispatchKeySet(_C.DispatchKey.AutocastCUDA)


def _without_autocast(op: Callable[..., Any]) -> Callable[..., Any]:
    """`op` as it is outside of torch.autocast: its dtypes are those of its arguments, in the kernel too."""

    def call(*arguments: Any) -> Any:
        with _C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return op(*arguments)

    return call


class _Refusal(torch.autograd.Function):
    """Gives the first `count` of `tensors`, which then depend on all of them, and have no gradient."""

    @staticmethod
    def forward(ctx: Any, message: str, count: int, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.message = message
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        raise RuntimeError(ctx.message)


def without_zeros(ctx: Any, *outputs: torch.Tensor) -> None:
    """In a Function's forward: `outputs` have no gradient, and one that nobody gives is None in its backward.

    Else torch fills a tensor of each such output's size with zeros, a pass over memory in every backward.
    """
    ctx.mark_non_differentiable(*outputs)
    ctx.set_materialize_grads(False)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A Function's `backward` whose gradients have none of their own: to ask for one is an error, not a wrong number.

    torch's function of this name takes them for constants where only a saved tensor requires a gradient. Where all
    gradients that come in are None (`without_zeros`), so are those that go out.
    """
    name = backward.__qualname__.split(".")[0].lstrip("_")
    message = f"plait.kernels: {name} has no second derivative; expected a plain backward, or its oracle (..._ref)"

    @functools.wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None and not any([grad is not None for grad in grads]):
            return (None,) * len(ctx.needs_input_grad)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        outputs = found if isinstance(found, tuple) else (found,)
        return _Refusal.apply(message, len(outputs), *outputs, *grads, *ctx.saved_tensors)

    return call


def register(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    autograd: Callable[..., Any] | None = None,
) -> Any:
    """Defines ``plait::<schema>`` and returns what calls it.

    `kernel` serves every device, `fake` gives the outputs' shapes, `autograd` is the Autograd-key kernel (absent: the
    op has no gradient), asked only where there may be a gradient. The compiler keeps the inputs' stride order.
    torch.autocast changes nothing.
    """
    name = schema.split("(", 1)[0]
    qualified = f"plait::{name}"
    tags = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
    torch.library.define(qualified, schema[len(name) :], tags=tags)
    torch.library.impl(qualified, "CompositeExplicitAutograd", kernel)
    torch.library.register_fake(qualified, fake)
    op = getattr(torch.ops.plait, name).default
    num_looked_at = 1 + max(i for i, argument in enumerate(op._schema.arguments) if "Tensor" in str(argument.type))
    if autograd is not None:
        torch.library.impl(qualified, "Autograd", _quick(kernel, autograd, num_looked_at))
    for key in ("AutocastCPU", "AutocastCUDA"):
        torch.library.impl(qualified, key, _without_autocast(op))
    return _direct(op, kernel, autograd, num_looked_at)
