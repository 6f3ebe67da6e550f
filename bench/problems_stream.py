"""Problems that memory binds: norms, gated activations, rope, embedding, dropout, cross entropy, l2_norm.

Each is a function of a case's params and a Maker (problem.py); the docstring gives the shapes. Times nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait import kernels
from plait.bench.problem import EPS, Maker, Op, Params, Peer, Problem, halves, unite_halves
from plait.kernels.philox import keep_mask_ref


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


def rms_norm_residual(p: Params, make: Maker) -> Problem:
    """x and residual [rows, cols], weight [cols]; gives the norm of the sum, and the sum."""
    cols = p["cols"]

    def eager(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x + residual
        return F.rms_norm(h, (cols,), weight, EPS), h

    return Problem(
        (make.normal(p["rows"], cols), make.normal(p["rows"], cols), make.normal(cols)),
        lambda x, r, w: kernels.rms_norm_ref(x, w, EPS, residual=r),
        {
            "plait": lambda x, r, w: kernels.rms_norm(x, w, EPS, residual=r),
            "torch": eager,
            "liger": make.liger(
                "liger_fused_add_rms_norm", lambda op: lambda x, r, w: op(x, r, w, EPS, in_place=False)
            ),
        },
    )


def layer_norm(p: Params, make: Maker) -> Problem:
    """x [rows, cols], weight and bias [cols]."""
    cols = p["cols"]
    return Problem(
        (make.normal(p["rows"], cols), make.normal(cols), make.normal(cols)),
        lambda x, w, b: kernels.layer_norm_ref(x, w, b, EPS),
        {
            "plait": lambda x, w, b: kernels.layer_norm(x, w, b, EPS),
            "torch": lambda x, w, b: F.layer_norm(x, (cols,), w, b, EPS),
            "liger": make.liger("liger_layer_norm", lambda op: lambda x, w, b: op(x, w, b, EPS)),
        },
    )


def layer_norm_residual(p: Params, make: Maker) -> Problem:
    """x and residual [rows, cols], weight and bias [cols]; gives the norm of the sum, and the sum."""
    cols = p["cols"]

    def eager(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        h = x + residual
        return F.layer_norm(h, (cols,), weight, bias, EPS), h

    return Problem(
        (make.normal(p["rows"], cols), make.normal(p["rows"], cols), make.normal(cols), make.normal(cols)),
        lambda x, r, w, b: kernels.layer_norm_ref(x, w, b, EPS, residual=r),
        {"plait": lambda x, r, w, b: kernels.layer_norm(x, w, b, EPS, residual=r), "torch": eager},
    )


def swiglu(p: Params, make: Maker) -> Problem:
    """gate_up [rows, 2 cols]; Liger takes the halves apart, and its backward overwrites them."""

    def eager(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    liger = make.liger("liger_swiglu", lambda op: Peer(op, halves, unite_halves))
    ops: dict[str, Op | Peer | str] = {"plait": kernels.swiglu, "torch": eager, "liger": liger}
    return Problem((make.normal(p["rows"], 2 * p["cols"]),), kernels.swiglu_ref, ops)


def geglu(p: Params, make: Maker) -> Problem:
    """gate_up [rows, 2 cols], gelu by tanh, which is what Liger has; it takes the halves apart."""

    def eager(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up

    return Problem(
        (make.normal(p["rows"], 2 * p["cols"]),),
        lambda gate_up: kernels.geglu_ref(gate_up, approximate="tanh"),
        {
            "plait": lambda gate_up: kernels.geglu(gate_up, approximate="tanh"),
            "torch": eager,
            "liger": make.liger("liger_geglu", lambda op: Peer(op, halves, unite_halves)),
        },
    )


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


def embedding(p: Params, make: Maker) -> Problem:
    """tokens [rows], weight [vocab, cols]."""
    tokens = make.indices(p["rows"], p["vocab"])
    return Problem(
        (make.normal(p["vocab"], p["cols"]),),
        lambda w: kernels.embedding_ref(tokens, w),
        {
            "plait": lambda w: kernels.embedding(tokens, w),
            "torch": lambda w: F.embedding(tokens, w),
            "liger": make.liger("LigerEmbeddingFunction", lambda op: lambda w: op(w, tokens)),
        },
    )


def dropout(p: Params, make: Maker) -> Problem:
    """x [1, rows, cols], p 0.1. The peer is given our mask ready-made, else no result could be compared."""
    rng, share = make.rng(), 0.1
    keep = keep_mask_ref(rng, share, range(1), range(1), range(p["rows"]), range(p["cols"]))[:, 0]
    return Problem(
        (make.normal(1, p["rows"], p["cols"]),),
        lambda x: kernels.dropout_ref(x, share, rng),
        {
            "plait": lambda x: kernels.dropout(x, share, rng),
            "torch": lambda x: torch.where(keep, x * (1.0 / (1.0 - share)), 0.0),
        },
    )


def cross_entropy(p: Params, make: Maker) -> Problem:
    """logits [rows, vocab]; Liger writes the gradient over them."""
    target = make.indices(p["rows"], p["vocab"])
    return Problem(
        (make.normal(p["rows"], p["vocab"]),),
        lambda logits: kernels.cross_entropy_ref(logits, target),
        {
            "plait": lambda logits: kernels.cross_entropy(logits, target),
            "torch": lambda logits: F.cross_entropy(logits.float(), target),
            "liger": make.liger("liger_cross_entropy", lambda op: Peer(lambda logits: op(logits, target))),
        },
        early=("liger",),
    )


def l2_norm(p: Params, make: Maker) -> Problem:
    """`tensors` tensors of `elements` elements; no gradient."""

    def foreach(*tensors: Tensor) -> Tensor:
        norms: Any = torch._foreach_norm(tensors, 2, dtype=torch.float32)
        return torch.linalg.vector_norm(torch.stack(norms))

    return Problem(
        tuple(make.normal(p["elements"]) for _ in range(p["tensors"])),
        lambda *tensors: kernels.l2_norm_ref(tensors),
        {"plait": lambda *tensors: kernels.l2_norm(tensors), "torch": foreach},
    )
