"""swiglu and geglu: out = act(gate) * up, with gate_up[..., 2F] = gate then up, act = silu or gelu.

swiglu backward, with s = sigmoid(gate): dgate = dout * up * s * (1 + gate * (1 - s)), dup = dout * gate * s.
gelu(x) = x * cdf(x), cdf the normal one by erf (gelu' = cdf + x * density), or its tanh form, which is x * sigmoid(u)
with u = 2 sqrt(2 / pi) (x + 0.044715 x^3) (gelu' = s + x * s * (1 - s) * u'). geglu backward: dgate = dout * up *
gelu', dup = dout * gelu. All recomputed from gate_up, the only tensor saved (the caller's). Arithmetic in fp32 (fp64
for fp64). Accesses per output element: 3 forward, 5 backward.
"""

import torch
import triton
import triton.language as tl

from plait.kernels.launch import (
    Launch,
    check_floating,
    compute_dtype,
    next_power_of_two,
    rows_of,
    triton_dtype,
    use_triton,
    widened,
)
from plait.kernels.plans import Built, Site, planned
from plait.kernels.registration import below_autograd, once_differentiable, register


def swiglu_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """The oracle; differentiable by torch."""
    gate, up = gate_up.to(compute_dtype(gate_up.dtype)).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def geglu_ref(gate_up: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """The oracle; differentiable by torch."""
    gate, up = gate_up.to(compute_dtype(gate_up.dtype)).chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate=approximate) * up).to(gate_up.dtype)


# Columns per program: 8 elements a thread of 4 warps, one 16-byte access each way in 16-bit (derived).
_BLOCK_COL = 1024
_APPROXIMATE = ("none", "tanh")  # torch's names; the second is true of `tanh`


# Codes that the kernels carry: swiglu, geglu, geglu with the tanh form.
FORMS = ("silu", "gelu", "gelu_tanh")


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-x * 1.4426950408889634))


@triton.jit
def gate_of(x, FORM: tl.constexpr):
    """The activation of a gate and its slope, by its code in FORMS."""
    if FORM == 0:
        sigmoid = _sigmoid(x)
        value = x * sigmoid
        slope = sigmoid + value * (1.0 - sigmoid)
    elif FORM == 1:
        below = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        slope = below + x * (tl.exp2(x * x * -0.7213475204444817) * 0.3989422804014327)
        value = x * below
    else:
        square = tl.minimum(x * x, 1.0e4)  # beyond it the sigmoid is 0 or 1, and x^2 would overflow times 0
        sigmoid = _sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * square))
        slope = sigmoid + x * sigmoid * (1.0 - sigmoid) * (1.5957691216057308 * (1.0 + 0.134145 * square))
        value = x * sigmoid
    return value, slope


@triton.jit
def _load_row(gate_up_ptr, stride_gate_up_row, num_cols, COMPUTE: tl.constexpr, BLOCK_COL: tl.constexpr):
    """(row, columns, mask, gate, up) of this program, grid (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_COL + tl.arange(0, BLOCK_COL)
    mask = cols < num_cols
    gate_ptr = gate_up_ptr + row * stride_gate_up_row + cols
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(COMPUTE)  # [BLOCK_COL]
    up = tl.load(gate_ptr + num_cols, mask=mask, other=0.0).to(COMPUTE)
    return row, cols, mask, gate, up


@triton.jit
def _gated_forward(
    gate_up_ptr, out_ptr, stride_gate_up_row, num_cols,
    FORM: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    row, cols, mask, gate, up = _load_row(gate_up_ptr, stride_gate_up_row, num_cols, COMPUTE, BLOCK_COL)
    value, _ = gate_of(gate, FORM)
    tl.store(out_ptr + row * num_cols + cols, (value * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gated_backward(
    dout_ptr, gate_up_ptr, grad_ptr, stride_dout_row, stride_gate_up_row, num_cols,
    FORM: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    row, cols, mask, gate, up = _load_row(gate_up_ptr, stride_gate_up_row, num_cols, COMPUTE, BLOCK_COL)
    dout = tl.load(dout_ptr + row * stride_dout_row + cols, mask=mask, other=0.0).to(COMPUTE)
    value, slope = gate_of(gate, FORM)
    element = grad_ptr.dtype.element_ty
    out_ptr = grad_ptr + row * (2 * num_cols) + cols
    tl.store(out_ptr, (dout * up * slope).to(element), mask=mask)
    tl.store(out_ptr + num_cols, (dout * value).to(element), mask=mask)


def forward_launch(gate_up: torch.Tensor, out: torch.Tensor, form: int = 0) -> Launch:
    """out [..., F] is contiguous; `form` is a code of FORMS."""
    rows, num_cols = rows_of(gate_up), out.shape[-1]
    block = min(_BLOCK_COL, next_power_of_two(num_cols))
    return Launch(
        _gated_forward,
        (rows.shape[0], -(-num_cols // block)),
        (rows, out, rows.stride(0), num_cols),
        {"FORM": form, "COMPUTE": triton_dtype(gate_up.dtype), "BLOCK_COL": block},
    )


def backward_launch(dout: torch.Tensor, gate_up: torch.Tensor, grad: torch.Tensor, form: int = 0) -> Launch:
    """grad [..., 2F] is contiguous; `form` is a code of FORMS."""
    rows, dout_rows, num_cols = rows_of(gate_up), rows_of(dout), dout.shape[-1]
    block = min(_BLOCK_COL, next_power_of_two(num_cols))
    return Launch(
        _gated_backward,
        (rows.shape[0], -(-num_cols // block)),
        (dout_rows, rows, grad, dout_rows.stride(0), rows.stride(0), num_cols),
        {"FORM": form, "COMPUTE": triton_dtype(gate_up.dtype), "BLOCK_COL": block},
    )


def geglu_forward_launch(gate_up: torch.Tensor, out: torch.Tensor, tanh: bool) -> Launch:
    """As `forward_launch`."""
    return forward_launch(gate_up, out, 1 + tanh)


def geglu_backward_launch(dout: torch.Tensor, gate_up: torch.Tensor, grad: torch.Tensor, tanh: bool) -> Launch:
    """As `backward_launch`."""
    return backward_launch(dout, gate_up, grad, 1 + tanh)


def _build_forward(site: Site, gate_up: torch.Tensor, form: int) -> Built:
    out = site.empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2), gate_up.dtype)
    return Built((out,), [forward_launch(gate_up, out, form)] if out.numel() else [])


def build_backward(site: Site, dout: torch.Tensor, gate_up: torch.Tensor, form: int) -> Built:
    grad = site.empty(gate_up.shape, gate_up.dtype)
    return Built((grad,), [backward_launch(dout, gate_up, grad, form)] if dout.numel() else [])


def forward(gate_up: torch.Tensor) -> torch.Tensor:
    """swiglu without checks or graph: the kernel itself, for code that has a backward of its own."""
    if not use_triton(gate_up):
        gate, up = widened(gate_up).chunk(2, dim=-1)
        out = torch.nn.functional.silu(gate).mul_(up)
        return out if out.dtype is gate_up.dtype else out.to(gate_up.dtype)
    found: torch.Tensor = planned(_build_forward, (gate_up,), 0)[0]
    return found


def backward(dout: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """The gradient of gate_up, contiguous, without checks or graph."""
    if not use_triton(gate_up):
        wide, dout = widened(gate_up), widened(dout)
        grad = torch.empty_like(wide, memory_format=torch.contiguous_format)
        (gate, up), (dgate, dup) = wide.chunk(2, dim=-1), grad.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)  # the one exponential; silu_backward would take another
        silu = torch.mul(gate, sigmoid)
        torch.mul(dout, silu, out=dup)
        torch.lerp(sigmoid, sigmoid.new_ones(()), silu, out=sigmoid)  # sigmoid + silu * (1 - sigmoid)
        torch.mul(torch.mul(dout, up, out=silu), sigmoid, out=dgate)
        return grad if grad.dtype is gate_up.dtype else grad.to(gate_up.dtype)
    found: torch.Tensor = planned(build_backward, (dout, gate_up), 0)[0]
    return found


def geglu_forward(gate_up: torch.Tensor, tanh: bool) -> torch.Tensor:
    """geglu without checks or graph: the kernel itself, for code that has a backward of its own."""
    if not use_triton(gate_up):
        gate, up = widened(gate_up).chunk(2, dim=-1)
        out = torch.nn.functional.gelu(gate, approximate=_APPROXIMATE[tanh]).mul_(up)
        return out if out.dtype is gate_up.dtype else out.to(gate_up.dtype)
    found: torch.Tensor = planned(_build_forward, (gate_up,), 1 + tanh)[0]
    return found


def geglu_backward(dout: torch.Tensor, gate_up: torch.Tensor, tanh: bool) -> torch.Tensor:
    """The gradient of gate_up, contiguous, without checks or graph."""
    if not use_triton(gate_up):
        (gate, up), wide_dout = widened(gate_up).chunk(2, dim=-1), widened(dout)
        dup = torch.nn.functional.gelu(gate, approximate=_APPROXIMATE[tanh]).mul_(wide_dout)
        dgate = torch.ops.aten.gelu_backward(wide_dout * up, gate, approximate=_APPROXIMATE[tanh])
        return torch.cat((dgate, dup), -1).to(gate_up.dtype)
    found: torch.Tensor = planned(build_backward, (dout, gate_up), 1 + tanh)[0]
    return found


class _SwiGLU(torch.autograd.Function):
    """Saves gate_up, the caller's tensor; nothing of its own."""

    @staticmethod
    def forward(ctx, gate_up):
        with below_autograd():
            out = _swiglu(gate_up)
        ctx.save_for_backward(gate_up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        return _swiglu_grad(dout, *ctx.saved_tensors)


_swiglu = register(
    "swiglu(Tensor gate_up) -> Tensor",
    forward,
    lambda gate_up: gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2)),
    _SwiGLU.apply,
)
_swiglu_grad = register(
    "swiglu_grad(Tensor dout, Tensor gate_up) -> Tensor",
    backward,
    lambda dout, gate_up: gate_up.new_empty(gate_up.shape),
)


class _GeGLU(torch.autograd.Function):
    """Saves gate_up, the caller's tensor; nothing of its own."""

    @staticmethod
    def forward(ctx, gate_up, tanh):
        with below_autograd():
            out = _geglu(gate_up, tanh)
        ctx.save_for_backward(gate_up)
        ctx.tanh = tanh
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        return _geglu_grad(dout, *ctx.saved_tensors, ctx.tanh), None


_geglu = register(
    "geglu(Tensor gate_up, bool tanh) -> Tensor",
    geglu_forward,
    lambda gate_up, tanh: gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2)),
    _GeGLU.apply,
)
_geglu_grad = register(
    "geglu_grad(Tensor dout, Tensor gate_up, bool tanh) -> Tensor",
    geglu_backward,
    lambda dout, gate_up, tanh: gate_up.new_empty(gate_up.shape),
)


def _check(op: str, gate_up: torch.Tensor) -> None:
    check_floating(op, gate_up=gate_up)
    if gate_up.dim() < 1 or gate_up.shape[-1] % 2 != 0:
        raise ValueError(f"{op}: gate_up has shape {tuple(gate_up.shape)}; its last dim must be even")


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of `gate_up[..., 2F]`, giving `[..., F]` in its dtype.

    Saves only gate_up. Raises TypeError on a dtype that is not floating, ValueError on an odd last dim.
    """
    _check("swiglu", gate_up)
    return _swiglu(gate_up)


def geglu(gate_up: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """gelu(first half) * second half of `gate_up[..., 2F]`, giving `[..., F]` in its dtype.

    `approximate` is "none" (by erf) or "tanh", as torch's gelu has it. Saves only gate_up. Raises TypeError on a
    dtype that is not floating, ValueError on an odd last dim or another `approximate`.
    """
    _check("geglu", gate_up)
    if approximate not in _APPROXIMATE:
        raise ValueError(f"geglu: approximate is {approximate!r}; expected one of {', '.join(_APPROXIMATE)}")
    return _geglu(gate_up, approximate == "tanh")
