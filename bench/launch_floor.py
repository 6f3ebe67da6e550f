"""What the suite `launch` measures an op against: a bare launch, an empty op, and a node of torch's autograd alone.

Nothing is timed here. All three are registered, called and differentiated as the ops of plait.kernels are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels import registration


@triton.jit
def bare_kernel(x_ptr):
    tl.store(x_ptr, 0.0)


class Alone(torch.autograd.Function):
    """Nothing but torch's own part: a node with as many inputs and gradients."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return torch.empty_like(inputs[0])

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        return ctx.saved_tensors


@functools.cache
def empty_op(num_inputs: int) -> Any:
    """An op of so many tensors that gives one like the first, and whose gradient is an op of the same kind."""
    tensors = ", ".join([f"Tensor x{i}" for i in range(num_inputs)])
    kinds = ", ".join(["Tensor"] * num_inputs)

    def gradients(dout: Tensor, *inputs: Tensor) -> Any:
        found = tuple([torch.empty_like(x) for x in inputs])
        return found if num_inputs > 1 else found[0]

    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            with registration.below_autograd():
                out: Tensor = op(*inputs)
            ctx.save_for_backward(*inputs)
            return out

        @staticmethod
        @registration.once_differentiable
        def backward(ctx: Any, dout: Tensor) -> Any:
            return grad(dout, *ctx.saved_tensors)

    def first_like(x: Tensor, *others: Tensor) -> Tensor:
        return torch.empty_like(x)

    name = f"bench_empty_{num_inputs}"
    registration.register(f"{name}({tensors}) -> Tensor", first_like, first_like, Empty.apply)
    registration.register(f"{name}_grad(Tensor dout, {tensors}) -> ({kinds})", gradients, gradients)
    # By torch's dispatcher, which the ops of plait.kernels may skip.
    op, grad = (getattr(torch.ops.plait, n).default for n in (name, f"{name}_grad"))
    return op
