"""The shapes of the `kernels` suite: which cases it has on a CPU and on a card. Data alone.

By op a list of shapes; the first is the default one. On a card every op has those of Llama-3 8B, 70B and 405B and of
GPT-3 175B over 8192 tokens, and an odd one; on a CPU small ones, and one with odd sizes.
"""

from __future__ import annotations

from typing import Any

from plait.bench.kernel_points import points_of
from plait.bench.kernel_work import GRADIENT_IN_FORWARD, WITHOUT_GRADIENT, work
from plait.bench.spec import Case

Params = dict[str, Any]
Shapes = dict[str, list[Params]]
HEADS = {"batch": 1, "heads": 8, "kv_heads": 2, "dim": 64}
EPILOGUES = ("bias", "gelu", "residual", "dropout")
KINDS = ("full", "window", "packed", "decode")  # of attention, beside causal


def _norms(*shapes: Params) -> Shapes:
    return {op: list(shapes) for op in ("rms_norm", "rms_norm_residual", "layer_norm", "layer_norm_residual")}


def _linear(first: Params, *more: Params) -> list[Params]:
    """Plain products of all shapes, each epilogue at the first."""
    return [first, *({**first, "epilogue": epilogue} for epilogue in EPILOGUES), *more]


def _attention(first: Params, *more: Params) -> list[Params]:
    return [first, *({**first, "kind": kind} for kind in KINDS), *more]


_GATED = [{"rows": 512, "cols": 1024}, {"rows": 1024, "cols": 8192}, {"rows": 511, "cols": 1000}]
_SQUARE = {"rows": 256, "cols": 512, "width": 512}
_HEAD = [{"rows": 256, "cols": 256, "vocab": 4096}, {"rows": 512, "cols": 512, "vocab": 32000}]
CPU_SHAPES: Shapes = {
    **_norms({"rows": 512, "cols": 1024}, {"rows": 4096, "cols": 4096}, {"rows": 511, "cols": 1000}),
    "swiglu": _GATED,
    "geglu": _GATED,
    "attention": _attention({**HEADS, "tokens": 256}, {**HEADS, "tokens": 1024}, {**HEADS, "tokens": 255}),
    "linear": _linear(_SQUARE, {"rows": 512, "cols": 2048, "width": 2048}),
    "linear_swiglu": [_SQUARE],
    "linear_dgrad": [_SQUARE],
    "linear_wgrad": [_SQUARE],
    "rope": [{**HEADS, "tokens": 256}, {**HEADS, "tokens": 2048}],
    "cross_entropy": [{"rows": 256, "vocab": 4096}, {"rows": 255, "vocab": 5003}],
    "linear_cross_entropy": _HEAD,
    "embedding": [{"rows": 512, "cols": 256, "vocab": 4096}, {"rows": 2048, "cols": 1024, "vocab": 32000}],
    "dropout": [{"rows": 256, "cols": 512}],
    "l2_norm": [{"tensors": 16, "elements": 1 << 16}],
    "adamw_": [{"tensors": 16, "elements": 1 << 16}, {"tensors": 300, "elements": 1 << 16}],
}
# (model dim, ffn dim, heads, key heads, vocabulary)
_LLAMA_8B, _LLAMA_70B, _LLAMA_405B, _GPT_3 = (
    (4096, 14336, 32, 8, 128_256),
    (8192, 28672, 64, 8, 128_256),
    (16384, 53248, 128, 8, 128_256),
    (12288, 49152, 96, 96, 50_257),
)
_LLAMAS = (_LLAMA_8B, _LLAMA_70B, _LLAMA_405B)
_MODELS = (*_LLAMAS, _GPT_3)
_ROWS = 8192


def _heads(model: tuple[int, ...], tokens: int) -> Params:
    return {"batch": 1, "heads": model[2], "kv_heads": model[3], "dim": 128, "tokens": tokens}


def _product(model: tuple[int, ...]) -> Params:
    return {"rows": _ROWS, "cols": model[0], "width": model[1]}


# What no model of ours has: sizes that no tile divides.
_ODD_HEADS = {"batch": 1, "heads": 12, "kv_heads": 4, "dim": 96, "tokens": 4095}
_ODD_PRODUCT = {"rows": 8191, "cols": 4000, "width": 4104}
_ODD_HEAD = {"rows": 4095, "cols": 4000, "vocab": 32_003}
_FFNS = [*({"rows": _ROWS, "cols": model[1]} for model in _MODELS), {"rows": 8191, "cols": 13_001}]


def _layer(model: tuple[int, ...]) -> Params:
    """A layer's weights as one of 8 data parallel ranks holds them: eight flat tensors of the shard."""
    dim, ffn, heads, kv_heads, _ = model
    products = 3 if model in _LLAMAS else 2  # gated or not
    weights = 2 * dim * dim * (heads + kv_heads) // heads + products * dim * ffn
    return {"tensors": 8, "elements": weights // 64}


_STATES = [{"tensors": 64, "elements": 1 << 22}, *map(_layer, _MODELS), {"tensors": 301, "elements": 100_003}]
CUDA_SHAPES: Shapes = {
    **_norms(*({"rows": _ROWS, "cols": model[0]} for model in _MODELS), {"rows": 8191, "cols": 4000}),
    "swiglu": _FFNS,
    "geglu": _FFNS,
    "attention": _attention(
        _heads(_LLAMA_8B, 4096),
        {**_heads(_LLAMA_70B, 8192), "oracle": "float32"},
        _heads(_LLAMA_405B, 2048),
        _heads(_GPT_3, 2048),
        _ODD_HEADS,
    ),
    "linear": _linear({"rows": _ROWS, "cols": 4096, "width": 4096}, *map(_product, _MODELS), _ODD_PRODUCT),
    "linear_swiglu": [*map(_product, _MODELS), _ODD_PRODUCT],
    "linear_dgrad": [*map(_product, _MODELS), _ODD_PRODUCT],
    "linear_wgrad": [*map(_product, _MODELS), _ODD_PRODUCT],
    "rope": [*(_heads(model, _ROWS) for model in _MODELS), _ODD_HEADS],
    "cross_entropy": [
        {"rows": 4096, "vocab": 128_256},
        {"rows": 4096, "vocab": 50_257},
        {"rows": 4095, "vocab": 32_003},
    ],
    "linear_cross_entropy": [*({"rows": 4096, "cols": model[0], "vocab": model[4]} for model in _MODELS), _ODD_HEAD],
    "embedding": [*({"rows": _ROWS, "cols": model[0], "vocab": model[4]} for model in _MODELS), _ODD_HEAD],
    "dropout": [*({"rows": _ROWS, "cols": model[0]} for model in _MODELS), {"rows": 8191, "cols": 4001}],
    "l2_norm": _STATES,
    "adamw_": _STATES,
}
APART_TOO = ("attention",)  # in the default list; with `full` all ops have their forward and their backward alone
FORWARD, BACKWARD, BOTH = " fwd", " bwd", " fwd+bwd"


def cases(full: bool, device: str) -> list[Case]:
    """One shape an op, forward and backward together; `full`: all shapes, each side alone, torch.compile."""
    result = []
    for op, shapes in (CUDA_SHAPES if device == "cuda" else CPU_SHAPES).items():
        # The optimizer works on fp32 masters; torch's has no others.
        dtype = "bfloat16" if device == "cuda" and op != "adamw_" else "float32"
        for index, shape in enumerate(shapes if full else shapes[:1]):
            for part in parts_of(op, shape) if full or op in APART_TOO else parts_of(op, shape)[-1:]:
                case = make_case(op, shape, dtype, device, part != FORWARD, index == 0, alone=part == BACKWARD)
                result.append(case)
    return result


def parts_of(op: str, shape: Params) -> tuple[str, ...]:
    """What of an op can be timed; the last: all of it."""
    if op in WITHOUT_GRADIENT or shape.get("kind") == "decode":
        return (FORWARD,)
    return (FORWARD, BOTH) if op in GRADIENT_IN_FORWARD else (FORWARD, BACKWARD, BOTH)


def make_case(
    op: str, shape: Params, dtype: str, device: str, backward: bool, compiled: bool = True, alone: bool = False
) -> Case:
    """The case with its name and its work by formula. `compiled`: torch.compile takes part in a full run; `alone`:
    the backward without its forward."""
    parts = parts_of(op, shape)
    backward = backward and len(parts) > 1
    params = {"op": op, **shape, "dtype": dtype, "device": device, "backward": backward, "compiled": compiled}
    params |= {"alone": True} if alone and backward else {}
    if params.get("alone") and BACKWARD not in parts:
        raise ValueError(f"op: {op!r} has no backward of its own: its gradients are made in the forward")
    sizes = " ".join(f"{name}={value}" for name, value in shape.items() if name != "oracle")
    params |= {"points": points} if (points := points_of(params)) else {}
    flop, nbytes = work(params)
    part = BACKWARD if params.get("alone") else BOTH if backward else FORWARD
    part = "" if op in WITHOUT_GRADIENT else part
    return Case(f"{op}{part} {sizes} {dtype}", params, flop=flop, bytes_moved=nbytes)
