"""The backward of linear with an epilogue and of linear_swiglu: the pass before the products and both, as one plan.

Not here: the kernels, and the gradients that a schedule runs one by one (matmul_direct.py). The one idea: three ops
in a row would look their launches up three times; here one look-up tells all, and which products torch does better.
"""

from typing import Any

import torch

from plait.kernels import activations, gated
from plait.kernels.launch import use_triton
from plait.kernels.matmul_direct import activation_backward, build_dgrad, build_wgrad, torch_dgrad, torch_wgrad
from plait.kernels.matmul_launch import torch_tf32
from plait.kernels.plans import Built, Site, planned


def _with_products(
    site: Site, first: Built, x: torch.Tensor, weight: torch.Tensor, need_x: bool, need_weight: bool,
    tf32: bool | None, of_torch: bool,
) -> Built:  # fmt: skip
    """Results (dx, dweight; None where unneeded or torch's), then `first`'s: the gradient of x @ weight^T, ..."""
    grad = first.results[0]
    assert grad is not None
    dx = build_dgrad(site, grad, weight, None, 0, tf32, of_torch) if need_x else None
    dweight = build_wgrad(site, x, grad, None, None, False, False, tf32, of_torch) if need_weight else None
    found = [built.results[0] if built else None for built in (dx, dweight)]
    launches = [launch for built in (first, dx, dweight) if built for launch in built.launches]
    return Built((*found, *first.results), launches)


def _build_act(
    site: Site, dout: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, pre: torch.Tensor | None,
    rng: torch.Tensor | None, activation: int, p: float, sample_offset: int, row_offset: int, col_offset: int,
    sums: bool, *products: Any,
) -> Built:  # fmt: skip
    place = (p, sample_offset, row_offset, col_offset)
    first = activations.build_backward(site, dout, pre, rng, activation, *place, sums)
    return _with_products(site, first, x, weight, *products)


def _build_swiglu(
    site: Site, dout: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, gate_up: torch.Tensor, *products: Any
) -> Built:
    return _with_products(site, gated.build_backward(site, dout, gate_up, 0), x, weight, *products)


def _rest(
    dx: torch.Tensor | None, dweight: torch.Tensor | None, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor,
    need_x: bool, need_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dx, dweight), by torch where they are needed and not there yet; unneeded ones empty."""
    if dx is None:
        dx = torch_dgrad(grad, weight) if need_x else x.new_empty(0)
    if dweight is None:
        dweight = torch_wgrad(x, grad) if need_weight else x.new_empty(0)
    return dx, dweight


def act_gradients(
    dout: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, pre: torch.Tensor | None, activation: int,
    need_x: bool, need_weight: bool, need_bias: bool, rng: torch.Tensor | None = None, p: float = 0.0,
    sample_offset: int = 0, row_offset: int = 0, col_offset: int = 0, allow_tf32: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dx, dweight, the bias gradient) of matmul_direct.forward_act; unneeded ones empty."""
    place = (p, sample_offset, row_offset, col_offset)
    dx = dweight = None
    if use_triton(dout):
        products = (need_x, need_weight, allow_tf32, torch_tf32(x))
        dx, dweight, dpre, dbias = planned(
            _build_act, (dout, x, weight, pre, rng), activation, *place, need_bias, *products
        )
    else:
        dpre, dbias = activation_backward(dout, pre, activation, rng, *place, need_bias)
    return *_rest(dx, dweight, dpre, x, weight, need_x, need_weight), dbias


def swiglu_gradients(
    dout: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, gate_up: torch.Tensor, need_x: bool, need_weight: bool,
    allow_tf32: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dx, dweight) of matmul_direct.forward_swiglu; unneeded ones empty."""
    dx = dweight = None
    if use_triton(dout):
        products = (need_x, need_weight, allow_tf32, torch_tf32(x))
        dx, dweight, grad = planned(_build_swiglu, (dout, x, weight, gate_up), *products)
    else:
        grad = gated.backward(dout, gate_up)
    return _rest(dx, dweight, grad, x, weight, need_x, need_weight)
