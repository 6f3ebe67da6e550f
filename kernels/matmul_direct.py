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
from plait.kernels.launch import compute_dtype, use_triton
from plait.kernels.matmul_launch import Epilogue, Mask, gated_grad, product, swiglu, triton_multiplies

_functional = torch.nn.functional
_Tensors = tuple[torch.Tensor, torch.Tensor]


def drop(out: torch.Tensor, mask: Mask) -> torch.Tensor:
    """dropout of out[(B,) T, N] in plain torch."""
    rng, p, sample_offset, row_offset, col_offset = mask
    place = {"sample_offset": sample_offset, "row_offset": row_offset, "col_offset": col_offset}
    return dropout_ref(out if out.dim() == 3 else out[None], p, rng, **place).view(out.shape)


def flat(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _new_like(x: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(an empty [..., width] beside x[..., K], the same memory as a matrix)."""
    out = x.new_empty((*x.shape[:-1], width))
    return out, flat(out)


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
    allow_tf32: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """linear without checks or graph: the kernel itself, for code that has a backward of its own."""
    if use_triton(x):
        op = "linear" if residual is None else "epilogue"
        if triton_multiplies(op, rows := flat(x), weight, allow_tf32):
            out, matrix = _new_like(x, weight.shape[0])
            product(op, rows, weight, matrix, Epilogue(bias=bias, residual=residual, tf32=allow_tf32))
            return out
    out = _functional.linear(x, weight, bias)
    return out if residual is None else out.add_(residual)


def forward_into(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """x[M, K] @ weight[N, K]^T + bias into out[M, N], whose rows may lie apart; without checks or graph."""
    if use_triton(x) and triton_multiplies("linear", x, weight):
        product("linear", x, weight, out, Epilogue(bias=bias))
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def forward_act(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, activation: int,
    rng: torch.Tensor | None = None, p: float = 0.0, sample_offset: int = 0, row_offset: int = 0, col_offset: int = 0,
    allow_tf32: bool | None = None,
) -> _Tensors:  # fmt: skip
    """(out, the value before the activation; without one, empty)."""
    mask = None if rng is None else (rng.contiguous(), p, sample_offset, row_offset, col_offset)
    op = "epilogue" if mask is None else "dropout"
    if use_triton(x) and triton_multiplies(op, rows := flat(x), weight, allow_tf32):
        out, matrix = _new_like(x, weight.shape[0])
        pre = torch.empty_like(out) if activation else out.new_empty(0)
        extra = Epilogue(
            bias,
            activation,
            bool(activation),
            0,
            pre if activation else None,
            mask,
            _num_tokens(x),
            residual,
            tf32=allow_tf32,
        )
        product(op, rows, weight, matrix, extra)
        return out, pre
    pre = _functional.linear(x, weight, bias)
    out = activate(pre.to(compute_dtype(x.dtype)), activation)
    if mask is not None:
        out = drop(out, mask)
    if residual is not None:
        out = out.add_(residual)
    return out.to(x.dtype), pre if activation else pre.new_empty(0)


def _num_tokens(x: torch.Tensor) -> int:
    return x.shape[-2] if x.dim() > 1 else 1


def activation_backward(
    dout: torch.Tensor, pre: torch.Tensor | None, activation: int, rng: torch.Tensor | None = None, p: float = 0.0,
    sample_offset: int = 0, row_offset: int = 0, col_offset: int = 0, sums: bool = False,
) -> _Tensors:  # fmt: skip
    """(the gradient before activation and dropout, its column sums in dout's dtype or empty): one pass in Triton."""
    mask = None if rng is None else (rng.contiguous(), p, sample_offset, row_offset, col_offset)
    if use_triton(dout):
        dpre, total = activations.launch_backward(dout, pre, activation, mask, sums)
        return dpre, dout.new_empty(0) if total is None else total.to(dout.dtype)
    dpre = dout if mask is None else drop(dout, mask)
    dpre = (dpre.clone() if pre is None else activation_grad(dpre, pre, activation)).contiguous()
    return dpre, flat(dpre).sum(0) if sums else dpre.new_empty(0)


def dgrad(
    dout: torch.Tensor, weight: torch.Tensor, pre: torch.Tensor | None = None, activation: int = 0,
    allow_tf32: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """dout[..., N] @ weight[N, K] without checks or graph: for code that has a backward of its own.

    With `pre` [..., K] times the slope of the activation that made the layer's input from it.
    """
    if use_triton(dout):
        op = "dgrad" if pre is None else "slope"
        if triton_multiplies(op, rows := flat(dout), weight.t(), allow_tf32):
            dx, matrix = _new_like(dout, weight.shape[1])
            before = None if pre is None else pre.contiguous()
            product(op, rows, weight.t(), matrix, Epilogue(slope=activation, pre=before, tf32=allow_tf32))
            return dx
    dx = torch.mm(dout, weight) if dout.dim() == 2 else torch.matmul(dout, weight)
    return dx if pre is None else activation_backward(dx, pre, activation)[0]


def dgrad_gated(
    dout: torch.Tensor, weight: torch.Tensor, gate_up: torch.Tensor, form: int = 0, keep_hidden: bool = False,
    allow_tf32: bool | None = None,
) -> _Tensors:  # fmt: skip
    """(the gradient of gate_up [..., 2F], hidden [..., F] or empty); hidden = act(gate) * up, out = hidden weight^T.

    dout[..., N], weight[N, F], form a code of gated.FORMS; without checks or graph. In Triton the gradient of hidden
    is never stored: 2 F elements of traffic a row less than `dgrad` and the gate's backward after it, and 2 F less
    than `forward` of the gate for a hidden that was dropped.
    """
    width = weight.shape[1]
    if use_triton(dout) and triton_multiplies("gated_slope", rows := flat(dout), weight.t(), allow_tf32):
        (grad, matrix), kept = _new_like(dout, 2 * width), dout.new_empty(0)
        if keep_hidden:
            kept = dout.new_empty((*dout.shape[:-1], width))
        gated_grad(
            rows, weight.t(), gate_up.contiguous(), form, matrix, flat(kept) if keep_hidden else None, allow_tf32
        )
        return grad, kept
    dhidden = dgrad(dout, weight, allow_tf32=allow_tf32)
    if form == 0:
        grad, forward_of = gated.backward(dhidden, gate_up), gated.forward
    else:
        grad, forward_of = (
            gated.geglu_backward(dhidden, gate_up, form == 2),
            partial(gated.geglu_forward, tanh=form == 2),
        )
    return grad, forward_of(gate_up) if keep_hidden else dout.new_empty(0)


def wgrad(x: torch.Tensor, dout: torch.Tensor, allow_tf32: bool | None = None) -> torch.Tensor:
    """dout^T @ x over all leading dims, [N, K], without checks or graph."""
    rows, grads = flat(x), flat(dout).t()
    if use_triton(x) and triton_multiplies("wgrad", grads, rows.t(), allow_tf32):
        out = x.new_empty((grads.shape[0], rows.shape[1]))
        product("wgrad", grads, rows.t(), out, Epilogue(tf32=allow_tf32))
        return out
    return torch.mm(grads, rows)


def wgrad_sums(x: torch.Tensor, dout: torch.Tensor, allow_tf32: bool | None = None) -> _Tensors:
    """(the weight gradient, the bias gradient), in one pass over dout where Triton multiplies."""
    dweight, dbias = x.new_empty((dout.shape[-1], x.shape[-1])), x.new_empty(dout.shape[-1])
    wgrad_into(x, dout, dweight, False, dbias, allow_tf32)
    return dweight, dbias


def wgrad_into(
    x: torch.Tensor, dout: torch.Tensor, out: torch.Tensor, accumulate: bool, bias_grad: torch.Tensor | None = None,
    allow_tf32: bool | None = None,
) -> None:  # fmt: skip
    """`linear_wgrad` into out[N, K] and bias_grad[N], written or added to, without checks or graph."""
    rows, grads = flat(x), flat(dout).t()
    if use_triton(x):
        op = "wgrad" if out.dtype == x.dtype else "wgrad_wide"
        if triton_multiplies(op, grads, rows.t(), allow_tf32):
            extra = Epilogue(accumulate=accumulate, sums=bias_grad, tf32=allow_tf32)
            product(op, grads, rows.t(), out, extra)
            return
    if bias_grad is not None:
        total = grads.sum(1, dtype=compute_dtype(x.dtype))
        bias_grad.add_(total) if accumulate else bias_grad.copy_(total)
    if out.dtype == x.dtype:
        out.addmm_(grads, rows, beta=1.0 if accumulate else 0.0)
    elif x.is_cuda:
        added = torch.mm(grads, rows, out_dtype=out.dtype)
        out.add_(added) if accumulate else out.copy_(added)
    else:
        out.addmm_(grads.to(out.dtype), rows.to(out.dtype), beta=1.0 if accumulate else 0.0)


def forward_swiglu(x: torch.Tensor, weight: torch.Tensor, allow_tf32: bool | None = None) -> _Tensors:
    """(out, gate_up)."""
    if use_triton(x) and triton_multiplies("swiglu", rows := flat(x), weight, allow_tf32):
        (out, matrix), (gate_up, both) = _new_like(x, weight.shape[0] // 2), _new_like(x, weight.shape[0])
        swiglu(rows, weight, matrix, both, allow_tf32)
        return out, gate_up
    gate_up = _functional.linear(x, weight)
    return torch.ops.plait.swiglu(gate_up), gate_up
