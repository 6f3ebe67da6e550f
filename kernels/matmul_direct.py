"""linear and its gradients without checks or graph: for code that has a backward of its own, and for the ops.

Not autograd and not registered: matmul.py has both. The one idea: each function asks the tables (matmul_launch.py)
whether Triton multiplies, with the epilogue in the same launch; else torch does, with the epilogue in passes of its
own. On the CPU it is always torch, with the bits of torch.
"""

import math
from functools import partial

import torch

from plait.kernels import activations, gated
from plait.kernels.activations import activate, activation_grad
from plait.kernels.dropout_op import dropout_ref
from plait.kernels.launch import Launch, compute_dtype, use_triton
from plait.kernels.matmul_launch import (
    Epilogue,
    Mask,
    gated_grad_launch,
    plan,
    product_launches,
    swiglu_launch,
    torch_tf32,
    triton_multiplies,
)
from plait.kernels.plans import Built, Site, planned

_functional = torch.nn.functional
_Tensors = tuple[torch.Tensor, torch.Tensor]


def drop(out: torch.Tensor, mask: Mask) -> torch.Tensor:
    """dropout of out[(B,) T, N] in plain torch."""
    rng, p, sample_offset, row_offset, col_offset = mask
    place = {"sample_offset": sample_offset, "row_offset": row_offset, "col_offset": col_offset}
    return dropout_ref(out if out.dim() == 3 else out[None], p, rng, **place).view(out.shape)


def flat(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _build_forward(
    site: Site, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
    rng: torch.Tensor | None, op: str, activation: int, p: float, sample_offset: int, row_offset: int,
    col_offset: int, tf32: bool | None, of_torch: bool,
) -> Built | None:  # fmt: skip
    """Results (out, the value before the activation or empty); `of_torch`, torch's choice of tf32, is read there."""
    rows = flat(x)
    if not triton_multiplies(op, rows, weight, tf32, site.arch):
        return None
    out = site.empty((*x.shape[:-1], weight.shape[0]), x.dtype)
    pre = site.empty(out.shape if activation else (0,), x.dtype)
    mask = None if rng is None else (rng.contiguous(), p, sample_offset, row_offset, col_offset)
    kept = pre if activation else None
    tokens = x.shape[-2] if x.dim() > 1 else 1
    extra = Epilogue(bias, activation, bool(activation), 0, kept, mask, tokens, residual, tf32=tf32)
    return Built((out, pre), _products(site, op, rows, weight, flat(out), extra))


def _products(
    site: Site, op: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, extra: Epilogue
) -> list[Launch]:
    """`product_launches` by the tables; none for an empty out."""
    return product_launches(a, b, out, extra, plan(op, a, b, site.arch), site) if out.numel() else []


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
    allow_tf32: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """linear without checks or graph: the kernel itself, for code that has a backward of its own."""
    if use_triton(x):
        op = "linear" if residual is None else "epilogue"
        found: _Tensors | None = planned(
            _build_forward, (x, weight, bias, residual, None), op, 0, 0.0, 0, 0, 0, allow_tf32, torch_tf32(x)
        )
        if found is not None:
            return found[0]
    out = _functional.linear(x, weight, bias)
    return out if residual is None else out.add_(residual)


def _build_into(
    site: Site, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, of_torch: bool
) -> Built | None:
    if not triton_multiplies("linear", x, weight, None, site.arch):
        return None
    return Built((), _products(site, "linear", x, weight, out, Epilogue(bias=bias)))


def forward_into(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """x[M, K] @ weight[N, K]^T + bias into out[M, N], whose rows may lie apart; without checks or graph."""
    if use_triton(x) and planned(_build_into, (x, weight, bias, out), torch_tf32(x)) is not None:
        return
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def forward_act(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, activation: int,
    rng: torch.Tensor | None = None, p: float = 0.0, sample_offset: int = 0, row_offset: int = 0, col_offset: int = 0,
    allow_tf32: bool | None = None,
) -> _Tensors:  # fmt: skip
    """(out, the value before the activation; without one, empty)."""
    if use_triton(x):
        op, place = "epilogue" if rng is None else "dropout", (p, sample_offset, row_offset, col_offset)
        found: _Tensors | None = planned(
            _build_forward, (x, weight, bias, residual, rng), op, activation, *place, allow_tf32, torch_tf32(x)
        )
        if found is not None:
            return found
    pre = _functional.linear(x, weight, bias)
    out = activate(pre.to(compute_dtype(x.dtype)), activation)
    if rng is not None:
        out = drop(out, (rng, p, sample_offset, row_offset, col_offset))
    if residual is not None:
        out = out.add_(residual)
    return out.to(x.dtype), pre if activation else pre.new_empty(0)


def activation_backward(
    dout: torch.Tensor, pre: torch.Tensor | None, activation: int, rng: torch.Tensor | None = None, p: float = 0.0,
    sample_offset: int = 0, row_offset: int = 0, col_offset: int = 0, sums: bool = False,
) -> _Tensors:  # fmt: skip
    """(the gradient before activation and dropout, its column sums in dout's dtype or empty): one pass in Triton."""
    mask = None if rng is None else (rng.contiguous(), p, sample_offset, row_offset, col_offset)
    if use_triton(dout):
        return activations.launch_backward(dout, pre, activation, mask, sums)
    dpre = dout if mask is None else drop(dout, mask)
    dpre = (dpre.clone() if pre is None else activation_grad(dpre, pre, activation)).contiguous()
    return dpre, flat(dpre).sum(0) if sums else dpre.new_empty(0)


def torch_dgrad(dout: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """dout[..., N] @ weight[N, K]."""
    return torch.mm(dout, weight) if dout.dim() == 2 else torch.matmul(dout, weight)


def torch_wgrad(x: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    """dout^T @ x over all leading dims, [N, K]."""
    return torch.mm(flat(dout).t(), flat(x))


def build_dgrad(
    site: Site, dout: torch.Tensor, weight: torch.Tensor, pre: torch.Tensor | None, activation: int,
    tf32: bool | None, of_torch: bool,
) -> Built | None:  # fmt: skip
    op, rows, turned = "dgrad" if pre is None else "slope", flat(dout), weight.t()
    if not triton_multiplies(op, rows, turned, tf32, site.arch):
        return None
    dx = site.empty((*dout.shape[:-1], weight.shape[1]), dout.dtype)
    extra = Epilogue(slope=activation, pre=None if pre is None else pre.contiguous(), tf32=tf32)
    return Built((dx,), _products(site, op, rows, turned, flat(dx), extra))


def dgrad(
    dout: torch.Tensor, weight: torch.Tensor, pre: torch.Tensor | None = None, activation: int = 0,
    allow_tf32: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """dout[..., N] @ weight[N, K] without checks or graph: for code that has a backward of its own.

    With `pre` [..., K] times the slope of the activation that made the layer's input from it.
    """
    if use_triton(dout):
        found: tuple[torch.Tensor] | None = planned(
            build_dgrad, (dout, weight, pre), activation, allow_tf32, torch_tf32(dout)
        )
        if found is not None:
            return found[0]
    dx = torch_dgrad(dout, weight)
    return dx if pre is None else activation_backward(dx, pre, activation)[0]


def _build_gated(
    site: Site, dout: torch.Tensor, weight: torch.Tensor, gate_up: torch.Tensor, form: int, keep_hidden: bool,
    tf32: bool | None, of_torch: bool,
) -> Built | None:  # fmt: skip
    op, rows, turned, leading = "gated_slope", flat(dout), weight.t(), dout.shape[:-1]
    if not triton_multiplies(op, rows, turned, tf32, site.arch):
        return None
    grad = site.empty((*leading, 2 * weight.shape[1]), dout.dtype)
    kept = site.empty((*leading, weight.shape[1]) if keep_hidden else (0,), dout.dtype)
    if not grad.numel():
        return Built((grad, kept))
    hidden, how = flat(kept) if keep_hidden else None, plan(op, rows, turned, site.arch)
    launch = gated_grad_launch(rows, turned, gate_up.contiguous(), form, flat(grad), hidden, how, tf32, site)
    return Built((grad, kept), [launch])


def dgrad_gated(
    dout: torch.Tensor, weight: torch.Tensor, gate_up: torch.Tensor, form: int = 0, keep_hidden: bool = False,
    allow_tf32: bool | None = None,
) -> _Tensors:  # fmt: skip
    """(the gradient of gate_up [..., 2F], hidden [..., F] or empty); hidden = act(gate) * up, out = hidden weight^T.

    dout[..., N], weight[N, F], form a code of gated.FORMS; without checks or graph. In Triton the gradient of hidden
    is never stored: 2 F elements of traffic a row less than `dgrad` and the gate's backward after it, and 2 F less
    than `forward` of the gate for a hidden that was dropped.
    """
    if use_triton(dout):
        found: _Tensors | None = planned(
            _build_gated, (dout, weight, gate_up), form, keep_hidden, allow_tf32, torch_tf32(dout)
        )
        if found is not None:
            return found
    dhidden = dgrad(dout, weight, allow_tf32=allow_tf32)
    if form == 0:
        grad, forward_of = gated.backward(dhidden, gate_up), gated.forward
    else:
        grad, forward_of = (
            gated.geglu_backward(dhidden, gate_up, form == 2),
            partial(gated.geglu_forward, tanh=form == 2),
        )
    return grad, forward_of(gate_up) if keep_hidden else dout.new_empty(0)


def build_wgrad(
    site: Site, x: torch.Tensor, dout: torch.Tensor, out: torch.Tensor | None, bias_grad: torch.Tensor | None,
    sums: bool, accumulate: bool, tf32: bool | None, of_torch: bool,
) -> Built | None:  # fmt: skip
    """Results (out, bias_grad), made here where out is None: then bias_grad with `sums` only."""
    rows, grads = flat(x).t(), flat(dout).t()
    op = "wgrad" if out is None or out.dtype == x.dtype else "wgrad_wide"
    if not triton_multiplies(op, grads, rows, tf32, site.arch):
        return None
    if out is None:
        out = site.empty((grads.shape[0], rows.shape[0]), x.dtype)
        bias_grad = site.empty(grads.shape[:1], x.dtype) if sums else None
    extra = Epilogue(accumulate=accumulate, sums=bias_grad, tf32=tf32)
    return Built((out, bias_grad), _products(site, op, grads, rows, out, extra))


def wgrad(x: torch.Tensor, dout: torch.Tensor, allow_tf32: bool | None = None) -> torch.Tensor:
    """dout^T @ x over all leading dims, [N, K], without checks or graph."""
    if use_triton(x):
        options = (False, False, allow_tf32, torch_tf32(x))
        found: _Tensors | None = planned(build_wgrad, (x, dout, None, None), *options)
        if found is not None:
            return found[0]
    return torch_wgrad(x, dout)


def wgrad_sums(x: torch.Tensor, dout: torch.Tensor, allow_tf32: bool | None = None) -> _Tensors:
    """(the weight gradient, the bias gradient), in one pass over dout where Triton multiplies."""
    if use_triton(x) and x.shape[-1] * dout.shape[-1]:
        options = (True, False, allow_tf32, torch_tf32(x))
        found: _Tensors | None = planned(build_wgrad, (x, dout, None, None), *options)
        if found is not None:
            return found
    dweight, dbias = x.new_empty((dout.shape[-1], x.shape[-1])), x.new_empty(dout.shape[-1])
    wgrad_into(x, dout, dweight, False, dbias, allow_tf32)
    return dweight, dbias


def wgrad_into(
    x: torch.Tensor, dout: torch.Tensor, out: torch.Tensor, accumulate: bool, bias_grad: torch.Tensor | None = None,
    allow_tf32: bool | None = None,
) -> None:  # fmt: skip
    """`linear_wgrad` into out[N, K] and bias_grad[N], written or added to, without checks or graph."""
    if use_triton(x) and out.numel():  # without columns there are sums alone
        options = (bias_grad is not None, accumulate, allow_tf32, torch_tf32(x))
        if planned(build_wgrad, (x, dout, out, bias_grad), *options) is not None:
            torch.autograd.graph.increment_version(out if bias_grad is None else (out, bias_grad))
            return
    rows, grads = flat(x), flat(dout).t()
    if bias_grad is not None:
        total = grads.sum(1, dtype=compute_dtype(x.dtype))
        bias_grad.add_(total) if accumulate else bias_grad.copy_(total)
    if not out.numel():
        return
    if out.dtype == x.dtype:
        out.addmm_(grads, rows, beta=1.0 if accumulate else 0.0)
    elif x.is_cuda:
        added = torch.mm(grads, rows, out_dtype=out.dtype)
        out.add_(added) if accumulate else out.copy_(added)
    else:
        out.addmm_(grads.to(out.dtype), rows.to(out.dtype), beta=1.0 if accumulate else 0.0)


def _build_swiglu(
    site: Site, x: torch.Tensor, weight: torch.Tensor, tf32: bool | None, of_torch: bool
) -> Built | None:
    """Results (out, gate_up)."""
    rows, leading = flat(x), x.shape[:-1]
    if not triton_multiplies("swiglu", rows, weight, tf32, site.arch):
        return None
    out = site.empty((*leading, weight.shape[0] // 2), x.dtype)
    gate_up = site.empty((*leading, weight.shape[0]), x.dtype)
    if not out.numel():
        return Built((out, gate_up))
    how = plan("swiglu", rows, weight, site.arch)
    return Built((out, gate_up), [swiglu_launch(rows, weight, flat(out), flat(gate_up), how, tf32, site)])


def forward_swiglu(x: torch.Tensor, weight: torch.Tensor, allow_tf32: bool | None = None) -> _Tensors:
    """(out, gate_up)."""
    if use_triton(x):
        found: _Tensors | None = planned(_build_swiglu, (x, weight), allow_tf32, torch_tf32(x))
        if found is not None:
            return found
    gate_up = _functional.linear(x, weight)
    return torch.ops.plait.swiglu(gate_up), gate_up
