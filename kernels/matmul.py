"""linear: out = activation(x @ weight^T + bias) + residual, its two gradients as ops of their own, and linear_swiglu.

Activations: None, "gelu" (erf), "gelu_tanh", "silu", "relu2" (square of relu). `linear_dgrad` and `linear_wgrad` are
separate so that a schedule can run them at different times; the weight gradient can be added into an fp32 view of a
gradient bucket. The product is torch's matmul (fp32 without tf32 unless torch is told so); the epilogue runs in fp32
(fp64 for fp64). What is not here: communication inside the matmul, fp8.
"""

import torch

from plait.kernels.gated import swiglu_grad_op, swiglu_ref
from plait.kernels.launch import below_autograd, check, check_device, check_floating, compute_dtype, register

_functional = torch.nn.functional
# The position is the code that the registered ops carry.
ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu", "relu2")


def _activate(x: torch.Tensor, code: int) -> torch.Tensor:
    """The activation of number `code` on an fp32 or fp64 tensor."""
    if code == 1:
        return _functional.gelu(x)
    if code == 2:
        return _functional.gelu(x, approximate="tanh")
    if code == 3:
        return _functional.silu(x)
    return x.relu().square()


def _activation_grad(dout: torch.Tensor, pre: torch.Tensor, code: int) -> torch.Tensor:
    """dout * activation'(pre) in dout's dtype; arithmetic in the compute dtype."""
    dtype = compute_dtype(pre.dtype)
    wide, x = dout.to(dtype), pre.to(dtype)
    if code == 1:
        grad = torch.ops.aten.gelu_backward(wide, x)
    elif code == 2:
        grad = torch.ops.aten.gelu_backward(wide, x, approximate="tanh")
    elif code == 3:
        grad = torch.ops.aten.silu_backward(wide, x)
    else:
        grad = wide * x.relu().mul_(2.0)
    return grad.to(dout.dtype)


def linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The oracle; differentiable by torch."""
    dtype = compute_dtype(x.dtype)
    out = x.to(dtype) @ weight.to(dtype).t()
    if bias is not None:
        out = out + bias.to(dtype)
    if activation is not None:
        out = _activate(out, ACTIVATIONS.index(activation))
    if residual is not None:
        out = out + residual.to(dtype)
    return out.to(x.dtype)


def linear_dgrad_ref(dout: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The oracle of linear_dgrad."""
    dtype = compute_dtype(dout.dtype)
    return (dout.to(dtype) @ weight.to(dtype)).to(dout.dtype)


def linear_wgrad_ref(x: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    """The oracle of linear_wgrad, in the compute dtype."""
    dtype = compute_dtype(x.dtype)
    return dout.to(dtype).reshape(-1, dout.shape[-1]).t() @ x.to(dtype).reshape(-1, x.shape[-1])


def linear_swiglu_ref(x: torch.Tensor, gate_up_weight: torch.Tensor) -> torch.Tensor:
    """The oracle of linear_swiglu."""
    dtype = compute_dtype(x.dtype)
    return swiglu_ref(x.to(dtype) @ gate_up_weight.to(dtype).t()).to(x.dtype)


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """linear without checks or graph: the kernel itself, for code that has a backward of its own."""
    out = _functional.linear(x, weight, bias)
    return out if residual is None else out.add_(residual)


def forward_into(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """x[M, K] @ weight[N, K]^T + bias into out[M, N], whose rows may lie apart; without checks or graph."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _linear_act_kernel(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, activation: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, the value before the activation)."""
    pre = _functional.linear(x, weight, bias)
    out = _activate(pre.to(compute_dtype(x.dtype)), activation)
    if residual is not None:
        out = out.add_(residual)
    return out.to(x.dtype), pre


def dgrad(dout: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """dout[..., N] @ weight[N, K] without checks or graph: for code that has a backward of its own."""
    return torch.mm(dout, weight) if dout.dim() == 2 else torch.matmul(dout, weight)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _wgrad_kernel(x: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    return torch.mm(_flat(dout).t(), _flat(x))


def wgrad_into(x: torch.Tensor, dout: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
    """`linear_wgrad` into out[N, K], written or added to, without checks or graph."""
    rows, grads = _flat(x), _flat(dout).t()
    if out.dtype == x.dtype:
        out.addmm_(grads, rows, beta=1.0 if accumulate else 0.0)
    elif x.is_cuda:
        product = torch.mm(grads, rows, out_dtype=out.dtype)
        out.add_(product) if accumulate else out.copy_(product)
    else:
        out.addmm_(grads.to(out.dtype), rows.to(out.dtype), beta=1.0 if accumulate else 0.0)


def _linear_swiglu_kernel(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, gate_up)."""
    gate_up = _functional.linear(x, weight)
    return torch.ops.plait.swiglu(gate_up), gate_up


class _Linear(torch.autograd.Function):
    """Saves x and weight, both the caller's."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual):
        with below_autograd():
            out = _linear(x, weight, bias, residual)
        ctx.save_for_backward(x, weight)
        return out

    @staticmethod
    def backward(ctx, dout):
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, need_residual = ctx.needs_input_grad
        return (
            _dgrad(dout, weight) if need_x else None,
            _wgrad(x, dout) if need_weight else None,
            _flat(dout).sum(0) if need_bias else None,
            dout if need_residual else None,
        )


class _LinearAct(torch.autograd.Function):
    """Saves x and weight (the caller's) and the value before the activation: one output's bytes."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, activation):
        with below_autograd():
            out, pre = _linear_act(x, weight, bias, residual, activation)
        ctx.save_for_backward(x, weight, pre)
        ctx.activation = activation
        ctx.mark_non_differentiable(pre)
        return out, pre

    @staticmethod
    def backward(ctx, dout, _):
        x, weight, pre = ctx.saved_tensors
        need_x, need_weight, need_bias, need_residual, _ = ctx.needs_input_grad
        dpre = _act_grad(dout, pre, ctx.activation)
        return (
            _dgrad(dpre, weight) if need_x else None,
            _wgrad(x, dpre) if need_weight else None,
            _flat(dpre).sum(0) if need_bias else None,
            dout if need_residual else None,
            None,
        )


class _LinearSwiGLU(torch.autograd.Function):
    """Saves x and weight (the caller's) and gate_up: two outputs' bytes."""

    @staticmethod
    def forward(ctx, x, weight):
        with below_autograd():
            out, gate_up = _linear_swiglu(x, weight)
        ctx.save_for_backward(x, weight, gate_up)
        ctx.mark_non_differentiable(gate_up)
        return out, gate_up

    @staticmethod
    def backward(ctx, dout, _):
        x, weight, gate_up = ctx.saved_tensors
        dgate_up = swiglu_grad_op(dout, gate_up)
        return (
            _dgrad(dgate_up, weight) if ctx.needs_input_grad[0] else None,
            _wgrad(x, dgate_up) if ctx.needs_input_grad[1] else None,
        )


class _Dgrad(torch.autograd.Function):
    """The input gradient is linear in both arguments; saves both (the caller's)."""

    @staticmethod
    def forward(ctx, dout, weight):
        with below_autograd():
            dx = _dgrad(dout, weight)
        ctx.save_for_backward(dout, weight)
        return dx

    @staticmethod
    def backward(ctx, ddx):
        dout, weight = ctx.saved_tensors
        return _linear(ddx, weight, None, None), _wgrad(ddx, dout)


class _Wgrad(torch.autograd.Function):
    """The weight gradient is linear in both arguments; saves both (the caller's)."""

    @staticmethod
    def forward(ctx, x, dout):
        with below_autograd():
            dweight = _wgrad(x, dout)
        ctx.save_for_backward(x, dout)
        return dweight

    @staticmethod
    def backward(ctx, ddweight):
        x, dout = ctx.saved_tensors
        return _dgrad(dout, ddweight), _linear(x, ddweight, None, None)


def _out_like(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_linear = register(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual) -> Tensor",
    forward,
    lambda x, weight, bias, residual: _out_like(x, weight),
    _Linear.apply,
)
_linear_act = register(
    "linear_act(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, int activation) -> (Tensor, Tensor)",
    _linear_act_kernel,
    lambda x, weight, bias, residual, activation: (_out_like(x, weight), _out_like(x, weight)),
    _LinearAct.apply,
)
_act_grad = register(
    "activation_grad(Tensor dout, Tensor pre, int activation) -> Tensor",
    _activation_grad,
    lambda dout, pre, activation: dout.new_empty(dout.shape),
)
_dgrad = register(
    "linear_dgrad(Tensor dout, Tensor weight) -> Tensor",
    dgrad,
    lambda dout, weight: dout.new_empty((*dout.shape[:-1], weight.shape[1])),
    _Dgrad.apply,
)
_wgrad = register(
    "linear_wgrad(Tensor x, Tensor dout) -> Tensor",
    _wgrad_kernel,
    lambda x, dout: x.new_empty((dout.shape[-1], x.shape[-1])),
    _Wgrad.apply,
)
_wgrad_into = register(
    "linear_wgrad_(Tensor x, Tensor dout, Tensor(a!) out, bool accumulate) -> ()",
    wgrad_into,
    lambda x, dout, out, accumulate: None,
)
_linear_swiglu = register(
    "linear_swiglu(Tensor x, Tensor weight) -> (Tensor, Tensor)",
    _linear_swiglu_kernel,
    lambda x, weight: (x.new_empty((*x.shape[:-1], weight.shape[0] // 2)), _out_like(x, weight)),
    _LinearSwiGLU.apply,
)


def _check_product(op: str, x: torch.Tensor, weight: torch.Tensor, dim: int, name: str) -> None:
    check(
        weight.dim() == 2 and x.dim() >= 1 and x.shape[-1] == weight.shape[dim],
        lambda: f"{op}: {name} {tuple(x.shape)} does not fit weight {tuple(weight.shape)} ([out, in])",
    )


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """activation(x[..., K] @ weight[N, K]^T + bias[N]) + residual[..., N], in x's dtype (the same for all).

    Saves x and weight, with an activation also the value before it. Raises TypeError on dtypes, ValueError on an
    unknown activation, shapes or devices.
    """
    check_floating("linear", x=x, weight=weight)
    _check_product("linear", x, weight, 1, "x")
    if bias is not None:
        check_floating("linear", x=x, bias=bias)
        check(
            bias.shape == weight.shape[:1],
            lambda: f"linear: bias has shape {tuple(bias.shape)}; expected ({weight.shape[0]},)",
        )
    if residual is not None:
        check_floating("linear", x=x, residual=residual)
        check(
            residual.shape == (*x.shape[:-1], weight.shape[0]),
            lambda: f"linear: residual {tuple(residual.shape)} must be {(*x.shape[:-1], weight.shape[0])}",
        )
    if activation is None:
        return _linear(x, weight, bias, residual)
    check(activation in ACTIVATIONS, lambda: f"linear: activation {activation!r}; expected one of {ACTIVATIONS}")
    return _linear_act(x, weight, bias, residual, ACTIVATIONS.index(activation))[0]


def linear_dgrad(dout: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The input gradient dout[..., N] @ weight[N, K], in dout's dtype. Errors as `linear`."""
    check_floating("linear_dgrad", dout=dout, weight=weight)
    _check_product("linear_dgrad", dout, weight, 0, "dout")
    return _dgrad(dout, weight)


def linear_wgrad(
    x: torch.Tensor, dout: torch.Tensor, out: torch.Tensor | None = None, accumulate: bool = False
) -> torch.Tensor:
    """The weight gradient dout^T @ x over all leading dims, [N, K].

    Without `out` it comes in x's dtype. `out` (x's dtype or fp32, [N, K] or of that many elements with the same first
    dim times the others, contiguous) is overwritten, or added to with `accumulate`, and returned.
    Raises TypeError on dtypes, ValueError on shapes, devices, or an `out` that is not contiguous.
    """
    check_floating("linear_wgrad", x=x, dout=dout)
    check(
        x.dim() >= 1 and x.shape[:-1] == dout.shape[:-1],
        lambda: f"linear_wgrad: x {tuple(x.shape)} and dout {tuple(dout.shape)} must agree but for the last dim",
    )
    if out is None:
        return _wgrad(x, dout)
    check_device("linear_wgrad", x, out=out)
    if out.dtype not in (x.dtype, torch.float32) or (x.dtype is torch.float64 and out.dtype != x.dtype):
        raise TypeError(f"linear_wgrad: out is {out.dtype}; expected {x.dtype} or float32")
    shape = (dout.shape[-1], x.shape[-1])
    check(
        out.is_contiguous() and out.numel() == shape[0] * shape[1],
        lambda: f"linear_wgrad: out {tuple(out.shape)} must be contiguous with the elements of {shape}",
    )
    _wgrad_into(x, dout, out.view(shape), accumulate)
    return out


def linear_swiglu(x: torch.Tensor, gate_up_weight: torch.Tensor) -> torch.Tensor:
    """swiglu(x[..., K] @ gate_up_weight[2F, K]^T), giving [..., F]; gate rows first.

    Saves x, the weight and gate_up. Errors as `linear`; an odd number of weight rows is a ValueError.
    """
    check_floating("linear_swiglu", x=x, gate_up_weight=gate_up_weight)
    _check_product("linear_swiglu", x, gate_up_weight, 1, "x")
    check(
        gate_up_weight.shape[0] % 2 == 0,
        lambda: f"linear_swiglu: gate_up_weight has {gate_up_weight.shape[0]} rows; expected an even number",
    )
    return _linear_swiglu(x, gate_up_weight)[0]
