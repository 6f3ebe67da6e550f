"""Launches of the matmul kernels by name, for inspection without a GPU.

Not the tiles (matmul_launch.py): a point takes whatever tile the launcher would take on that architecture. Shapes are
those of a layer of 4096 features over 8192 tokens, and of its eighth on a tensor-parallel rank.
"""

from collections.abc import Callable
from functools import partial

import torch

from plait.kernels import activations
from plait.kernels.inspect import meta, parse_arch
from plait.kernels.launch import Launch
from plait.kernels.matmul_launch import Epilogue, gated_grad_launch, plan, product_launches, swiglu_launch

_TOKENS, _MODEL, _FFN, _SHARD = 8192, 4096, 14336, 512
# The most that one launch does at once: the registers that each tile must fit.
_GELU, _SILU = 1, 3


def _product(
    op: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, extra: Epilogue, arch: str, stage: int = 0
) -> Launch:
    return product_launches(a, b, out, extra, plan(op, a, b, parse_arch(arch)))[stage]


def _forward(num_rows: int, dropout: bool, arch: str = "sm_90", stage: int = 0, col_offset: int = 0) -> Launch:
    """Bias, gelu and residual; pre is kept."""
    width = _MODEL if num_rows == _TOKENS else _SHARD
    out, rng = meta(num_rows, width), meta(2, dtype=torch.int64)
    mask = (rng, 0.1, 0, 0, col_offset) if dropout else None
    extra = Epilogue(meta(width), _GELU, True, 0, out, mask, num_rows, out)
    op = "dropout" if dropout else "epilogue"
    return _product(op, meta(num_rows, _MODEL), meta(width, _MODEL), out, extra, arch, stage)


def _plain(op: str, arch: str = "sm_90", dtype: torch.dtype = torch.bfloat16) -> Launch:
    """The product of forward (with bias), dgrad or wgrad alone."""
    x, weight = meta(_TOKENS, _MODEL, dtype=dtype), meta(_MODEL, _MODEL, dtype=dtype)
    if op == "wgrad":
        return _product(op, x.t(), x.t(), weight, Epilogue(), arch)
    b, bias = (weight.t(), None) if op == "dgrad" else (weight, meta(_MODEL, dtype=dtype))
    return _product(op, x, b, x, Epilogue(bias=bias), arch)


def _slope(arch: str = "sm_90") -> Launch:
    x = meta(_TOKENS, _MODEL)
    return _product("slope", x, meta(_MODEL, _MODEL).t(), x, Epilogue(slope=_GELU, pre=x), arch)


def _wgrad_wide(arch: str = "sm_90") -> Launch:
    """Into an fp32 main gradient, with the bias gradient."""
    x, out = meta(_TOKENS, _MODEL), meta(_MODEL, _MODEL, dtype=torch.float32)
    extra = Epilogue(accumulate=True, sums=meta(_MODEL, dtype=torch.float32))
    return _product("wgrad_wide", x.t(), x.t(), out, extra, arch)


def _gated(arch: str = "sm_90") -> Launch:
    x, weight, gate_up = meta(_TOKENS, _MODEL), meta(2 * _FFN, _MODEL), meta(_TOKENS, 2 * _FFN)
    return swiglu_launch(x, weight, meta(_TOKENS, _FFN), gate_up, plan("swiglu", x, weight, parse_arch(arch)))


def _gated_slope(form: int, arch: str = "sm_90") -> Launch:
    """The gradient of gate and up from the down projection's, hidden made again; weight lies as forward reads it."""
    dout, weight, gate_up = meta(_TOKENS, _MODEL), meta(_MODEL, _FFN).t(), meta(_TOKENS, 2 * _FFN)
    how = plan("gated_slope", dout, weight, parse_arch(arch))
    return gated_grad_launch(dout, weight, gate_up, form, gate_up, meta(_TOKENS, _FFN), how)


def _activation(arch: str = "sm_90", col_offset: int = 0) -> Launch:
    x, mask = meta(_TOKENS, _MODEL), (meta(2, dtype=torch.int64), 0.1, 0, 0, col_offset)
    return activations.backward_launch(x, x, _SILU, mask, x, meta(64, _MODEL, dtype=torch.float32))


def points() -> dict[str, Callable[..., Launch]]:
    """Every point by name; each takes arch="sm_90", whose row of the tables it launches."""
    return {
        "linear.forward": partial(_plain, "linear"),
        "linear.epilogue": partial(_forward, _TOKENS, False),
        "linear.epilogue.dropout": partial(_forward, _TOKENS, True),
        "linear.epilogue.dropout.any_column": partial(_forward, _TOKENS, True, col_offset=3),
        "linear.swiglu": _gated,
        "linear.dgrad": partial(_plain, "dgrad"),
        "linear.dgrad.slope": _slope,
        "linear.dgrad.gated": partial(_gated_slope, 0),
        "linear.dgrad.gated.gelu": partial(_gated_slope, 1),
        "linear.dgrad.gated.gelu_tanh": partial(_gated_slope, 2),
        "linear.wgrad": partial(_plain, "wgrad"),
        "linear.wgrad.main": _wgrad_wide,
        "linear.few_rows": partial(_forward, 16, False),
        "linear.split": partial(_forward, 256, False),
        "linear.finish": partial(_forward, 256, False, stage=1),
        "linear.activation_grad": _activation,
        "linear.activation_grad.any_column": partial(_activation, col_offset=3),
        "linear.fp32": partial(_plain, "linear", dtype=torch.float32),
    }
