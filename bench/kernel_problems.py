"""The ops of plait.kernels that have peers, as problems: inputs, oracle, and who computes them. Times nothing.

A problem is built from a case's params on one device. Inputs are random normal numbers; all providers share them,
except those that overwrite their inputs or want another layout: they get copies of their own. Bytes and FLOP are
formulas here (`work`): what the op has to move and multiply, not what an implementation happens to do.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from plait import kernels

Op = Callable[..., Any]  # tensors -> a tensor or a tuple of them
Params = dict[str, Any]
EPS = 1e-6


def same(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """As they are."""
    return tensors


@dataclass(frozen=True)
class Peer:
    """A provider with inputs of its own. `adapt` makes them from the shared ones; `unite` brings results
    (outputs, then gradients) into the layout of the oracle's."""

    op: Op
    adapt: Callable[[Sequence[Tensor]], Sequence[Tensor]] = lambda inputs: [value.clone() for value in inputs]
    unite: Callable[[Sequence[Tensor]], Sequence[Tensor]] = same


@dataclass(frozen=True)
class Problem:
    """ops: name -> how to compute it, or why it cannot run here (text). `inputs` are those that have gradients."""

    inputs: tuple[Tensor, ...]
    oracle: Op
    ops: dict[str, Op | Peer | str]
    stds: tuple[float, ...] = ()  # of the inputs; () is 1 for all


class Maker:
    """Draws the tensors of a problem."""

    def __init__(self, params: Params, seed: int) -> None:
        self.device, self.dtype = torch.device(params["device"]), getattr(torch, params["dtype"])
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Random normal numbers of the case's dtype."""
        return torch.randn(*shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def indices(self, count: int, limit: int) -> Tensor:
        """int64 [count] in [0, limit)."""
        return torch.randint(limit, (count,), generator=self.generator, device=self.device)

    def liger(self, name: str, use: Callable[[Any], Op | Peer]) -> Op | Peer | str:
        """use(Liger's function `name`), or why there is none."""
        if importlib.util.find_spec("liger_kernel") is None:
            return "liger_kernel is not installed"
        if self.device.type != "cuda":
            return "Liger's kernels need a GPU"
        return use(getattr(importlib.import_module("liger_kernel.transformers.functional"), name))


def rms_norm(p: Params, make: Maker) -> Problem:
    """x [rows, cols], weight [cols]."""
    cols = p["cols"]
    return Problem(
        (make.normal(p["rows"], cols), make.normal(cols)),
        lambda x, w: kernels.rms_norm_ref(x, w, EPS),
        {
            "plait": lambda x, w: kernels.rms_norm(x, w, EPS),
            "torch": lambda x, w: F.rms_norm(x, (cols,), w, EPS),
            "liger": make.liger("liger_rms_norm", lambda op: lambda x, w: op(x, w, EPS, in_place=False)),
        },
    )


def swiglu(p: Params, make: Maker) -> Problem:
    """gate_up [rows, 2 cols]; Liger takes the halves apart, and its backward overwrites them."""

    def eager(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def halves(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return [half.clone() for half in inputs[0].chunk(2, -1)]

    def unite(results: Sequence[Tensor]) -> Sequence[Tensor]:
        return [results[0], *([torch.cat(tuple(results[1:]), -1)] if results[1:] else [])]

    return Problem(
        (make.normal(p["rows"], 2 * p["cols"]),),
        kernels.swiglu_ref,
        {
            "plait": kernels.swiglu,
            "torch": eager,
            "liger": make.liger("liger_swiglu", lambda op: Peer(op, halves, unite)),
        },
    )


def attention(p: Params, make: Maker) -> Problem:
    """Causal, grouped queries: q [B, T, H, K], k and v [B, T, KV, K]."""
    batch, tokens, heads, kv_heads, dim = (p[name] for name in ("batch", "tokens", "heads", "kv_heads", "dim"))

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (value.transpose(1, 2) for value in (q, k, v))
        out: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        return out.transpose(1, 2)

    def by(backend: SDPBackend) -> Op:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return sdpa(q, k, v)

        return run

    ops: dict[str, Op | Peer | str] = {"plait": kernels.attention, "torch": sdpa}
    if make.device.type == "cuda":
        ops |= {"flash": by(SDPBackend.FLASH_ATTENTION), "cudnn": by(SDPBackend.CUDNN_ATTENTION)}
    inputs = tuple(make.normal(batch, tokens, n, dim) for n in (heads, kv_heads, kv_heads))
    return Problem(inputs, kernels.attention_ref, ops)


def linear(p: Params, make: Maker) -> Problem:
    """x [rows, cols], weight [width, cols]."""
    inputs = (make.normal(p["rows"], p["cols"]), make.normal(p["width"], p["cols"]))
    return Problem(inputs, kernels.linear_ref, {"plait": kernels.linear, "torch": F.linear})


def rope(p: Params, make: Maker) -> Problem:
    """q [B, T, H, K], k [B, T, KV, K]; eager torch as in Hugging Face's Llama. Liger rotates in place."""
    batch, tokens, heads, kv_heads, dim = (p[name] for name in ("batch", "tokens", "heads", "kv_heads", "dim"))
    inverse = 500000.0 ** (-torch.arange(0, dim, 2, device=make.device, dtype=torch.float32) / dim)
    angles = torch.arange(tokens, device=make.device, dtype=torch.float32)[:, None] * inverse  # [T, K/2]
    cos, sin = angles.cos(), angles.sin()
    cos_full, sin_full = (torch.cat((t, t), -1)[:, None].to(make.dtype) for t in (cos, sin))  # [T, 1, K]

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos_full + torch.cat((-second, first), -1) * sin_full

    def heads_first(op: Op) -> Op:
        def run(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
            out = op(q.transpose(1, 2), k.transpose(1, 2), cos_full.transpose(0, 1), sin_full.transpose(0, 1))
            return tuple(value.transpose(1, 2) for value in out)

        return run

    return Problem(
        (make.normal(batch, tokens, heads, dim), make.normal(batch, tokens, kv_heads, dim)),
        lambda q, k: kernels.rope_ref(q, k, cos, sin),
        {
            "plait": lambda q, k: kernels.rope(q, k, cos, sin),
            "torch": lambda q, k: (rotate(q), rotate(k)),
            "liger": make.liger("liger_rope", lambda op: Peer(heads_first(op))),
        },
    )


def linear_cross_entropy(p: Params, make: Maker) -> Problem:
    """x [rows, cols], weight [vocab, cols], drawn so that logits have a deviation of 1 as at a model's start."""
    target = make.indices(p["rows"], p["vocab"])
    return Problem(
        (make.normal(p["rows"], p["cols"]), make.normal(p["vocab"], p["cols"])),
        lambda x, w: kernels.linear_cross_entropy_ref(x, w, target),
        {
            "plait": lambda x, w: kernels.linear_cross_entropy(x, w, target),
            "torch": lambda x, w: F.cross_entropy(F.linear(x, w).float(), target),
            "liger": make.liger("liger_fused_linear_cross_entropy", lambda op: lambda x, w: op(x, w, target)),
        },
        stds=(1.0, p["cols"] ** -0.5),
    )


def embedding(p: Params, make: Maker) -> Problem:
    """tokens [rows], weight [vocab, cols]."""
    tokens = make.indices(p["rows"], p["vocab"])
    return Problem(
        (make.normal(p["vocab"], p["cols"]),),
        lambda w: kernels.embedding_ref(tokens, w),
        {"plait": lambda w: kernels.embedding(tokens, w), "torch": lambda w: F.embedding(tokens, w)},
    )


PROBLEMS: dict[str, Callable[[Params, Maker], Problem]] = {
    "rms_norm": rms_norm,
    "swiglu": swiglu,
    "attention": attention,
    "linear": linear,
    "rope": rope,
    "linear_cross_entropy": linear_cross_entropy,
    "embedding": embedding,
}


def work(p: Params) -> tuple[float | None, float | None]:
    """(FLOP, None) where the op is bound by arithmetic, else (None, bytes): forward, and backward where p asks."""
    size, backward = getattr(torch, p["dtype"]).itemsize, p["backward"]
    match p["op"]:
        case "rms_norm":  # x -> y; x, dy -> dx; the weight and its gradient
            per_row, shared = (5, 3) if backward else (2, 1)
            return None, float(size * p["cols"] * (per_row * p["rows"] + shared))
        case "swiglu":  # gate, up -> y; gate, up, dy -> dgate, dup
            return None, float(size * p["rows"] * p["cols"] * (8 if backward else 3))
        case "attention":  # two products over the causal half; the backward has five
            pairs = p["tokens"] * (p["tokens"] + 1) / 2
            return 4.0 * p["batch"] * p["heads"] * p["dim"] * pairs * (3.5 if backward else 1), None
        case "linear":
            return 2.0 * p["rows"] * p["cols"] * p["width"] * (3 if backward else 1), None
        case "linear_cross_entropy":  # what an implementation computes twice counts once
            return 2.0 * p["rows"] * p["cols"] * p["vocab"] * (3 if backward else 1), None
        case "rope":  # q, k -> q, k each way; the tables are small
            values = p["batch"] * p["tokens"] * (p["heads"] + p["kv_heads"]) * p["dim"]
            return None, float(size * values * (4 if backward else 2))
        case "embedding":  # tokens and rows -> y; tokens and dy -> all of dweight
            forward = p["rows"] * (8 + 2 * size * p["cols"])
            grad = p["rows"] * (8 + size * p["cols"]) + size * p["vocab"] * p["cols"]
            return None, float(forward + grad * backward)
        case "adamw_":  # parameter, gradient, both moments -> parameter, both moments
            return None, 7.0 * size * p["tensors"] * p["elements"]
    raise ValueError(f"op: {p['op']!r} is unknown; valid: {', '.join([*PROBLEMS, 'adamw_'])}")
