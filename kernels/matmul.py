"""linear: out = dropout(activation(x @ weight^T + bias)) + residual, its two gradients as ops, and linear_swiglu.

Activations: None, "gelu" (erf), "gelu_tanh", "silu", "relu2" (square of relu). `linear_dgrad` and `linear_wgrad` are
separate so that a schedule can run them at different times; the weight gradient can be added into an fp32 view of a
gradient bucket. On the CPU torch multiplies and the epilogue runs in fp32 (fp64 for fp64). On a card the tables of
matmul_tables.py say by op and shape whether Triton multiplies with the epilogue fused, or torch. fp32 is multiplied
without tf32 unless torch, or a call by `allow_tf32`, is told so. What is not here: the oracles (matmul_plain.py),
communication inside the matmul, fp8.
"""

import math

import torch

from plait.kernels.activations import ACTIVATIONS
from plait.kernels.dropout_op import check_offsets, check_rng
from plait.kernels.launch import check, check_device, check_floating, use_triton
from plait.kernels.matmul_backward import act_gradients, swiglu_gradients
from plait.kernels.matmul_direct import (
    dgrad,
    dgrad_gated,
    flat,
    forward,
    forward_act,
    forward_swiglu,
    wgrad,
    wgrad_into,
    wgrad_sums,
)
from plait.kernels.matmul_direct import forward_into as forward_into
from plait.kernels.matmul_plain import GATES
from plait.kernels.matmul_plain import linear_dgrad_ref as linear_dgrad_ref
from plait.kernels.matmul_plain import linear_ref as linear_ref
from plait.kernels.matmul_plain import linear_swiglu_ref as linear_swiglu_ref
from plait.kernels.matmul_plain import linear_wgrad_ref as linear_wgrad_ref
from plait.kernels.registration import below_autograd, once_differentiable, register, without_zeros


class _Linear(torch.autograd.Function):
    """Saves x and weight, both the caller's."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, tf32=None):
        with below_autograd():
            out = _linear(x, weight, bias, residual, tf32)
        ctx.save_for_backward(x, weight)
        ctx.tf32 = tf32
        return out

    @staticmethod
    def backward(ctx, dout):
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, need_residual = ctx.needs_input_grad[:4]
        dweight = dbias = None
        if need_weight and need_bias and use_triton(x) and not torch.is_grad_enabled():
            dweight, dbias = _wgrad_sums(x, dout, ctx.tf32)  # has no gradient of its own
        else:
            dweight = _wgrad(x, dout, ctx.tf32) if need_weight else None
            dbias = flat(dout).sum(0) if need_bias else None
        dx = _dgrad(dout, weight, ctx.tf32) if need_x else None
        return dx, dweight, dbias, dout if need_residual else None, *(None,) * (len(ctx.needs_input_grad) - 4)


class _LinearAct(torch.autograd.Function):
    """Saves x, weight and rng (the caller's) and, with an activation, the value before it: one output's bytes."""

    @staticmethod
    def forward(
        ctx, x, weight, bias, residual, activation, rng=None, p=0.0, sample=0, row=0, col=0, tf32=None
    ):  # fmt: skip
        with below_autograd():
            out, pre = _linear_act(x, weight, bias, residual, activation, rng, p, sample, row, col, tf32)
        ctx.save_for_backward(x, weight, pre if activation else None, rng)
        ctx.activation, ctx.place, ctx.tf32 = activation, (p, sample, row, col), tf32
        without_zeros(ctx, pre)
        return out, pre

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _):
        x, weight, pre, rng = ctx.saved_tensors
        need_x, need_weight, need_bias, need_residual = ctx.needs_input_grad[:4]
        needs = (need_x, need_weight, need_bias)
        found = _act_grads(dout, x, weight, pre, ctx.activation, *needs, rng, *ctx.place, ctx.tf32)
        grads = [grad if need else None for grad, need in zip(found, needs, strict=True)]
        return *grads, dout if need_residual else None, *(None,) * (len(ctx.needs_input_grad) - 4)


class _LinearSwiGLU(torch.autograd.Function):
    """Saves x and weight (the caller's) and gate_up: two outputs' bytes."""

    @staticmethod
    def forward(ctx, x, weight, tf32=None):
        with below_autograd():
            out, gate_up = _linear_swiglu(x, weight, tf32)
        ctx.save_for_backward(x, weight, gate_up)
        ctx.tf32 = tf32
        without_zeros(ctx, gate_up)
        return out, gate_up

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _):
        x, weight, gate_up = ctx.saved_tensors
        need_x, need_weight, *others = ctx.needs_input_grad
        dx, dweight = _swiglu_grads(dout, x, weight, gate_up, need_x, need_weight, ctx.tf32)
        return dx if need_x else None, dweight if need_weight else None, *(None,) * len(others)


class _Dgrad(torch.autograd.Function):
    """The input gradient is linear in both arguments; saves both (the caller's)."""

    @staticmethod
    def forward(ctx, dout, weight, tf32=None):
        with below_autograd():
            dx = _dgrad(dout, weight, tf32)
        ctx.save_for_backward(dout, weight)
        ctx.tf32 = tf32
        return dx

    @staticmethod
    def backward(ctx, ddx):
        dout, weight = ctx.saved_tensors
        none = (None,) * (len(ctx.needs_input_grad) - 2)
        return _linear(ddx, weight, None, None, ctx.tf32), _wgrad(ddx, dout, ctx.tf32), *none


class _Wgrad(torch.autograd.Function):
    """The weight gradient is linear in both arguments; saves both (the caller's)."""

    @staticmethod
    def forward(ctx, x, dout, tf32=None):
        with below_autograd():
            dweight = _wgrad(x, dout, tf32)
        ctx.save_for_backward(x, dout)
        ctx.tf32 = tf32
        return dweight

    @staticmethod
    def backward(ctx, ddweight):
        x, dout = ctx.saved_tensors
        none = (None,) * (len(ctx.needs_input_grad) - 2)
        return _dgrad(dout, ddweight, ctx.tf32), _linear(x, ddweight, None, None, ctx.tf32), *none


def _out_like(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _gradients_like(
    x: torch.Tensor, weight: torch.Tensor, need_x: bool, need_weight: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape if need_x else (0,)), x.new_empty(weight.shape if need_weight else (0,))


_TF32 = "bool? allow_tf32=None"
_linear = register(
    f"linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, {_TF32}) -> Tensor",
    forward,
    lambda x, weight, bias, residual, allow_tf32=None: _out_like(x, weight),
    _Linear.apply,
)
_PLACE = "float p=0.0, int sample_offset=0, int row_offset=0, int col_offset=0"
_linear_act = register(
    "linear_act(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, int activation, Tensor? rng=None, "
    f"{_PLACE}, {_TF32}) -> (Tensor, Tensor)",
    forward_act,
    lambda x, weight, bias, residual, activation, *_: (
        _out_like(x, weight), _out_like(x, weight) if activation else x.new_empty(0)
    ),
    _LinearAct.apply,
)  # fmt: skip
_NEEDS = "bool need_x, bool need_weight"
_act_grads = register(
    f"linear_act_grad(Tensor dout, Tensor x, Tensor weight, Tensor? pre, int activation, {_NEEDS}, bool need_bias,"
    f" Tensor? rng=None, {_PLACE}, {_TF32}) -> (Tensor, Tensor, Tensor)",
    act_gradients,
    lambda dout, x, weight, pre, activation, need_x, need_weight, need_bias, *_: (
        *_gradients_like(x, weight, need_x, need_weight), x.new_empty(weight.shape[0] if need_bias else 0)
    ),
)  # fmt: skip
_swiglu_grads = register(
    f"linear_swiglu_grad(Tensor dout, Tensor x, Tensor weight, Tensor gate_up, {_NEEDS}, {_TF32})"
    " -> (Tensor, Tensor)",
    swiglu_gradients,
    lambda dout, x, weight, gate_up, *needs: _gradients_like(x, weight, *needs[:2]),
)
_dgrad_act = register(
    f"linear_dgrad_act(Tensor dout, Tensor weight, Tensor pre, int activation, {_TF32}) -> Tensor",
    dgrad,
    lambda dout, weight, pre, activation, allow_tf32=None: dout.new_empty((*dout.shape[:-1], weight.shape[1])),
)
_dgrad_gated = register(
    f"linear_dgrad_gated(Tensor dout, Tensor weight, Tensor gate_up, int form, {_TF32}) -> Tensor",
    lambda dout, weight, gate_up, form, allow_tf32=None: dgrad_gated(dout, weight, gate_up, form, False, allow_tf32)[
        0
    ],
    lambda dout, weight, gate_up, form, allow_tf32=None: dout.new_empty(gate_up.shape),
)
_wgrad_sums = register(
    f"linear_wgrad_sums(Tensor x, Tensor dout, {_TF32}) -> (Tensor, Tensor)",
    wgrad_sums,
    lambda x, dout, allow_tf32=None: (x.new_empty((dout.shape[-1], x.shape[-1])), x.new_empty(dout.shape[-1])),
)
_dgrad = register(
    f"linear_dgrad(Tensor dout, Tensor weight, {_TF32}) -> Tensor",
    lambda dout, weight, allow_tf32=None: dgrad(dout, weight, allow_tf32=allow_tf32),
    lambda dout, weight, allow_tf32=None: dout.new_empty((*dout.shape[:-1], weight.shape[1])),
    _Dgrad.apply,
)
_wgrad = register(
    f"linear_wgrad(Tensor x, Tensor dout, {_TF32}) -> Tensor",
    wgrad,
    lambda x, dout, allow_tf32=None: x.new_empty((dout.shape[-1], x.shape[-1])),
    _Wgrad.apply,
)
_wgrad_into = register(
    "linear_wgrad_(Tensor x, Tensor dout, Tensor(a!) out, bool accumulate, Tensor(b!)? bias_grad=None, "
    f"{_TF32}) -> ()",
    wgrad_into,
    lambda x, dout, out, accumulate, bias_grad=None, allow_tf32=None: None,
)
_linear_swiglu = register(
    f"linear_swiglu(Tensor x, Tensor weight, {_TF32}) -> (Tensor, Tensor)",
    forward_swiglu,
    lambda x, weight, allow_tf32=None: (x.new_empty((*x.shape[:-1], weight.shape[0] // 2)), _out_like(x, weight)),
    _LinearSwiGLU.apply,
)


def _check_product(
    op: str, x: torch.Tensor, weight: torch.Tensor, dim: int, name: str, allow_tf32: bool | None
) -> tuple[int, ...]:  # fmt: skip
    """The shape of x @ weight^T (dim 1) or x @ weight (dim 0), which exists."""
    if allow_tf32 is not None:
        _check_tf32(op, allow_tf32)
    of_x, sizes = x.shape, weight.shape
    if len(sizes) != 2 or not of_x or of_x[-1] != sizes[dim]:
        raise ValueError(f"{op}: {name} {tuple(of_x)} does not fit weight {tuple(sizes)} ([out, in])")
    return (*of_x[:-1], sizes[1 - dim])


def _check_tf32(op: str, allow_tf32: bool | None) -> None:
    if allow_tf32 is not None and not isinstance(allow_tf32, bool):
        raise TypeError(f"{op}: allow_tf32 is {allow_tf32!r}; expected True, False or None (torch's setting)")


_CODES = {activation: code for code, activation in enumerate(ACTIVATIONS)}


def _code(op: str, activation: str | None) -> int:
    code = _CODES.get(activation)
    if code is None:
        raise ValueError(f"{op}: activation {activation!r}; expected one of {ACTIVATIONS}")
    return code


def linear(
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
    allow_tf32: bool | None = None,
) -> torch.Tensor:
    """dropout(activation(x[..., K] @ weight[N, K]^T + bias[N])) + residual[..., N], in x's dtype (the same for all).

    Dropout as `dropout` does it, with its `rng` and offsets, for x[B, T, K] or [T, K]. Saves x and weight, with an
    activation also the value before it; the mask is drawn again in backward. `allow_tf32` says how fp32 is multiplied
    on a card, here and in backward; None is torch's setting. Raises TypeError on dtypes, ValueError on an unknown
    activation, dropout without rng, shapes or devices.
    """
    check_floating("linear", 2, x=x, weight=weight, bias=bias, residual=residual)
    shape = _check_product("linear", x, weight, 1, "x", allow_tf32)
    if bias is not None and bias.shape != shape[-1:]:
        raise ValueError(f"linear: bias has shape {tuple(bias.shape)}; expected ({shape[-1]},)")
    if residual is not None and residual.shape != shape:
        raise ValueError(f"linear: residual {tuple(residual.shape)} must be {shape}")
    code = _code("linear", activation)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"linear: dropout_p is {dropout_p}; expected 0 <= dropout_p < 1")
    if dropout_p == 0.0:
        if code == 0:
            return _linear(x, weight, bias, residual, allow_tf32)
        return _linear_act(x, weight, bias, residual, code, None, 0.0, 0, 0, 0, allow_tf32)[0]
    if rng is None:
        raise ValueError("linear: dropout_p > 0 needs rng, int64 [2] = (seed, offset)")
    check_rng("linear", rng, x)
    if len(shape) not in (2, 3):
        raise ValueError(f"linear: x {tuple(x.shape)} must be [B, T, K] or [T, K] for dropout")
    place = (sample_offset, row_offset, col_offset)
    check_offsets("linear", sample_offset=sample_offset, row_offset=row_offset, col_offset=col_offset)
    return _linear_act(x, weight, bias, residual, code, rng, dropout_p, *place, allow_tf32)[0]


def linear_dgrad(
    dout: torch.Tensor, weight: torch.Tensor, *, pre: torch.Tensor | None = None, activation: str | None = None,
    allow_tf32: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """The input gradient dout[..., N] @ weight[N, K], in dout's dtype. Errors as `linear`.

    With `pre` [..., K] and `activation` times activation'(pre): the gradient before the activation that made the
    input. With a gated one ("swiglu", "geglu", "geglu_tanh") `pre` is gate_up [..., 2K], and so is the result. Both
    forms have no gradient of their own.
    """
    check_floating("linear_dgrad", 2, dout=dout, weight=weight)
    shape = _check_product("linear_dgrad", dout, weight, 0, "dout", allow_tf32)
    if pre is None:
        check(activation is None, lambda: f"linear_dgrad: activation {activation!r} needs pre, the value before it")
        return _dgrad(dout, weight, allow_tf32)
    check_floating("linear_dgrad", dout=dout, pre=pre)
    gated = activation in GATES
    if gated:
        shape = (*shape[:-1], 2 * shape[-1])
    if pre.shape != shape:
        raise ValueError(f"linear_dgrad: pre has shape {tuple(pre.shape)}; expected {shape}")
    if gated:
        return _dgrad_gated(dout, weight, pre, GATES.index(activation), allow_tf32)
    code = _code("linear_dgrad", activation)
    return _dgrad_act(dout, weight, pre, code, allow_tf32) if code else _dgrad(dout, weight, allow_tf32)


def linear_wgrad(
    x: torch.Tensor,
    dout: torch.Tensor,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    *,
    bias_grad: torch.Tensor | None = None,
    allow_tf32: bool | None = None,
) -> torch.Tensor:
    """The weight gradient dout^T @ x over all leading dims, [N, K].

    Without `out` it comes in x's dtype. `out` (x's dtype or fp32, [N, K] or of that many elements with the same first
    dim times the others, contiguous) is overwritten, or added to with `accumulate`, and returned; so is `bias_grad`
    [N], of the same dtypes, with the sums of dout. Only the form without `out` has a gradient. Raises TypeError on
    dtypes, ValueError on shapes, devices, an `out` that is not contiguous or a `bias_grad` without `out`.
    """
    check_floating("linear_wgrad", 2, x=x, dout=dout)
    if allow_tf32 is not None:
        _check_tf32("linear_wgrad", allow_tf32)
    of_x, of_dout = x.shape, dout.shape
    if not of_x or of_x[:-1] != of_dout[:-1]:
        raise ValueError(f"linear_wgrad: x {tuple(of_x)} and dout {tuple(of_dout)} must agree but for the last dim")
    if out is None:
        check(bias_grad is None, lambda: "linear_wgrad: bias_grad needs out, which is written as it is")
        return _wgrad(x, dout, allow_tf32)
    shape = (of_dout[-1], of_x[-1])
    target = _target(x, "out", out, shape)
    sums = None if bias_grad is None else _target(x, "bias_grad", bias_grad, shape[:1])
    if torch.is_grad_enabled():
        with torch.no_grad():
            _wgrad_into(x, dout, target, accumulate, sums, allow_tf32)
    else:
        _wgrad_into(x, dout, target, accumulate, sums, allow_tf32)
    return out


def _target(x: torch.Tensor, name: str, out: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """`out` as a tensor of `shape`, checked."""
    if not isinstance(out, torch.Tensor) or out.device != x.device:
        check_device("linear_wgrad", x, **{name: out})
    kind, wide = x.dtype, out.dtype
    if wide is not kind and (wide is not torch.float32 or kind is torch.float64):
        raise TypeError(f"linear_wgrad: {name} is {wide}; expected {kind} or float32")
    if not out.is_contiguous() or out.numel() != math.prod(shape):
        raise ValueError(
            f"linear_wgrad: {name} {tuple(out.shape)} must be contiguous with the elements of {shape}"
        )  # fmt: skip
    return out if out.shape == shape else out.view(shape)


def linear_swiglu(x: torch.Tensor, gate_up_weight: torch.Tensor, *, allow_tf32: bool | None = None) -> torch.Tensor:
    """swiglu(x[..., K] @ gate_up_weight[2F, K]^T), giving [..., F]; gate rows first.

    Saves x, the weight and gate_up. Errors as `linear`; an odd number of weight rows is a ValueError.
    """
    check_floating("linear_swiglu", 2, x=x, gate_up_weight=gate_up_weight)
    _check_product("linear_swiglu", x, gate_up_weight, 1, "x", allow_tf32)
    check(
        gate_up_weight.shape[0] % 2 == 0,
        lambda: f"linear_swiglu: gate_up_weight has {gate_up_weight.shape[0]} rows; expected an even number",
    )
    return _linear_swiglu(x, gate_up_weight, allow_tf32)[0]
