"""The oracles of matmul.py in plain torch: fp32 inside, fp64 for fp64; no cleverness."""

import math

import torch

from plait.kernels.activations import ACTIVATIONS, activate, activation_grad
from plait.kernels.gated import geglu_ref, swiglu_ref
from plait.kernels.launch import compute_dtype
from plait.kernels.matmul_direct import drop

# Gated activations of the layer before, whose gradient `linear_dgrad` can end in; the position is the kernels' code.
GATES = ("swiglu", "geglu", "geglu_tanh")


def _gate_ref(gate_up: torch.Tensor, gate: str) -> torch.Tensor:
    if gate == "swiglu":
        return swiglu_ref(gate_up)
    return geglu_ref(gate_up, approximate="tanh" if gate == "geglu_tanh" else "none")


def linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng: torch.Tensor | None = None,
    sample_offset: int = 0,
    row_offset: int = 0,
    col_offset: int = 0,
) -> torch.Tensor:
    """The oracle; differentiable by torch."""
    dtype = compute_dtype(x.dtype)
    out = x.to(dtype) @ weight.to(dtype).t()
    if bias is not None:
        out = out + bias.to(dtype)
    out = activate(out, ACTIVATIONS.index(activation))
    if rng is not None and dropout_p > 0.0:
        out = drop(out, (rng, dropout_p, sample_offset, row_offset, col_offset))
    if residual is not None:
        out = out + residual.to(dtype)
    return out.to(x.dtype)


def linear_dgrad_ref(
    dout: torch.Tensor, weight: torch.Tensor, *, pre: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    """The oracle of linear_dgrad."""
    dtype = compute_dtype(dout.dtype)
    dx = dout.to(dtype) @ weight.to(dtype)
    if pre is not None and activation in GATES:
        leaf = pre.to(dtype).detach().requires_grad_()
        with torch.enable_grad():
            hidden = _gate_ref(leaf, activation)
        return torch.autograd.grad(hidden, leaf, dx)[0].to(dout.dtype)
    return (dx if pre is None else activation_grad(dx, pre.to(dtype), ACTIVATIONS.index(activation))).to(dout.dtype)


def linear_wgrad_ref(x: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    """The oracle of linear_wgrad, in the compute dtype."""
    dtype = compute_dtype(x.dtype)
    tokens = math.prod(x.shape[:-1])
    return dout.to(dtype).reshape(tokens, dout.shape[-1]).t() @ x.to(dtype).reshape(tokens, x.shape[-1])


def linear_swiglu_ref(x: torch.Tensor, gate_up_weight: torch.Tensor) -> torch.Tensor:
    """The oracle of linear_swiglu."""
    dtype = compute_dtype(x.dtype)
    return swiglu_ref(x.to(dtype) @ gate_up_weight.to(dtype).t()).to(x.dtype)
