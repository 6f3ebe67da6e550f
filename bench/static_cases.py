"""The cases of the `static` suite that stream memory, and the list of all: our points beside others' kernels.

What a case is: static_case.py; what arithmetic binds: static_products.py. Runs and compiles nothing itself.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from plait import kernels
from plait.bench.static_case import (
    COLS,
    EMBEDDINGS,
    FFN,
    Call,
    Context,
    Peer,
    PeerSide,
    Side,
    StaticCase,
    named,
    zeros,
)
from plait.bench.static_products import attention_cases, loss_cases, matmul_case
from plait.kernels import embed, gated, layernorm, rmsnorm
from plait.kernels.norm_rows import num_partials


def norm_inputs(rows: int) -> SimpleNamespace:
    """x and gradients [rows, COLS], a weight, statistics."""
    stats = zeros(rows, dtype=torch.float32)
    return SimpleNamespace(x=zeros(rows, COLS), r=zeros(rows, COLS), dy=zeros(rows, COLS), w=zeros(COLS), s=stats)


def norm_cases() -> list[StaticCase]:
    """rms_norm with and without residual, layer_norm; forward and backward."""

    def ours(op: str, backward: bool) -> Side:
        def side(rows: int) -> Call:
            t = norm_inputs(rows)
            residual = t.r if op.endswith("residual") else None
            if op == "layer_norm" and backward:
                return lambda: layernorm.backward(t.dy, t.x, t.w, t.s, t.s, None, True)
            if op == "layer_norm":
                return lambda: layernorm.forward(t.x, None, t.w, t.w, 1e-6)
            if backward:
                return lambda: rmsnorm.backward(t.dy, t.x, t.w, t.s, residual)
            return lambda: rmsnorm.forward(t.x, residual, t.w, 1e-6)

        return side

    def liger(op: str, backward: bool) -> PeerSide:
        def side(module: Any, rows: int) -> Call:
            t = norm_inputs(rows)
            settings = (0.0, 0, COLS, 8)  # offset, casting mode of Llama, block and warps of its own forward
            match op, backward:
                case "rms_norm", False:
                    return lambda: module.rms_norm_forward(t.x, t.w, 1e-6, 0.0, "llama", False)
                case "rms_norm", True:
                    return lambda: module.rms_norm_backward(t.dy, t.x, t.w, t.s, *settings, True, False)
                case "rms_norm_residual", False:
                    return lambda: module.fused_add_rms_norm_forward(t.x, t.r, t.w, 1e-6, 0.0, "llama")
                case "rms_norm_residual", True:
                    return lambda: module.fused_add_rms_norm_backward(t.dy, t.r, t.x, t.w, t.s, *settings, 2, True)
                case _, False:
                    return lambda: module.layer_norm_forward(t.x, t.w, t.w, 1e-6)
            return lambda: module.layer_norm_backward(t.dy, t.x, t.w, t.w, t.s, t.s)

        return side

    def tutorial(backward: bool) -> PeerSide:
        def side(module: Any, rows: int) -> Call:
            t, context = norm_inputs(rows), Context()
            context.saved_tensors = (t.x, t.w, t.w, t.s, t.s)
            context.BLOCK_SIZE, context.num_warps, context.eps = COLS, 8, 1e-6  # type: ignore[attr-defined]
            if backward:
                return lambda: module.LayerNorm.backward(context, t.dy)
            return lambda: module.LayerNorm.forward(context, t.x, (COLS,), t.w, t.w, 1e-6)

        return side

    modules = {"rms_norm": "rms_norm", "rms_norm_residual": "fused_add_rms_norm", "layer_norm": "layer_norm"}
    streams = {"rms_norm": (2, 3), "rms_norm_residual": (4, 4), "layer_norm": (2, 3)}
    result = []
    for op, module in modules.items():
        for backward in (False, True):
            side = "backward" if backward else "forward"
            peers = {"liger": Peer((module,), liger(op, backward))}
            if op == "layer_norm":
                source = ("05-layer-norm.py", "LayerNorm")
                # Backward: 128 rows of partial sums under locks, which the first 128 rows write and others read too.
                under_lock = ("sums under a lock", 256) if backward else ()
                peers["tutorial"] = Peer(source, tutorial(backward), *under_lock)
            needed = 2.0 * COLS * 8192 * streams[op][backward]
            name = f"{op} {side} [8192, {COLS}]"
            launches = named(f"{op}.{side}.{COLS}")
            case = StaticCase(name, 8192, 8192 * COLS, launches, ours(op, backward), peers, 2, needed)
            result.append(case._replace(counted=8, programs=num_partials(8192, COLS)) if backward else case)
    return result


def gated_cases() -> list[StaticCase]:
    """swiglu and geglu on [8192, 2 x 14336]."""

    def ours(op: str, backward: bool) -> Side:
        def side(rows: int) -> Call:
            both, dout = zeros(rows, 2 * FFN), zeros(rows, FFN)
            if op == "swiglu":
                return (lambda: gated.backward(dout, both)) if backward else (lambda: gated.forward(both))
            if backward:
                return lambda: gated.geglu_backward(dout, both, True)
            return lambda: gated.geglu_forward(both, True)

        return side

    def liger(op: str, backward: bool) -> PeerSide:
        def side(module: Any, rows: int) -> Call:
            both, dout = zeros(rows, 2 * FFN), zeros(rows, FFN)
            gate, up = zeros(rows, FFN), zeros(rows, FFN)
            if op == "swiglu":
                if backward:
                    return lambda: module.swiglu_fused_gate_up_backward(both, dout)
                return lambda: module.swiglu_fused_gate_up_forward(both)
            if backward:
                return lambda: module.geglu_backward(gate, up, dout)
            return lambda: module.geglu_forward(gate, up)

        return side

    result = []
    for op, point in (("swiglu", "swiglu"), ("geglu tanh", "geglu_tanh")):
        for backward in (False, True):
            side, key = "backward" if backward else "forward", op.split()[0]
            note = "gate and up apart, gradients written over them" if key == "geglu" else "gate and up side by side"
            peers = {"liger": Peer((key,), liger(key, backward), note)}
            needed, name = 2.0 * FFN * 8192 * (5 if backward else 3), f"{op} {side} [8192, 2 x {FFN}]"
            launches = named(f"{point}.{side}")
            result.append(
                StaticCase(name, 8192, 8192 * FFN, launches, ours(key, backward), peers, 2, needed)
            )  # fmt: skip
    return result


def rope_case() -> StaticCase:
    """q [2, 4096, 32, 128] and k [2, 4096, 8, 128]; forward and backward are the same kernel."""

    def tensors(rows: int) -> tuple[torch.Tensor, ...]:
        return zeros(1, rows, 32, 128), zeros(1, rows, 8, 128), *(zeros(rows, 64, dtype=torch.float32) for _ in "cs")

    def ours(rows: int) -> Call:
        q, k, cos, sin = tensors(rows)
        return lambda: kernels.rope(q, k, cos, sin)

    def liger(module: Any, rows: int) -> Call:
        q, k, cos, sin = tensors(rows)
        cos, sin = torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None]
        return lambda: module.rope_forward(q.transpose(1, 2), k.transpose(1, 2), cos, sin)

    rows = 8192
    needed = rows * (2 * 40 * 128 * 2.0) + 4096 * 128 * 4.0
    peers = {"liger": Peer(("rope",), liger, "in place; tables of the whole head dim")}
    return StaticCase(
        "rope q [2, 4096, 32, 128], k 8 heads",
        rows,
        rows * 40 * 128,
        named("rope.halves.128"),
        ours,
        peers,
        4,
        needed,
    )


def embedding_cases() -> list[StaticCase]:
    """8192 different tokens of 32,000 rows of 4096: the gradient fills all rows."""

    def tokens_of(rows: int) -> torch.Tensor:
        return torch.arange(rows) * (EMBEDDINGS // (2 * rows))

    def ours(backward: bool) -> Side:
        def side(rows: int) -> Call:
            tokens, weight, dout = tokens_of(rows), zeros(EMBEDDINGS, COLS), zeros(rows, COLS)
            if not backward:
                return lambda: embed.forward(tokens, weight, 0)
            return lambda: embed.wgrad_into(dout, tokens, weight, 0, False)

        return side

    def liger(backward: bool) -> PeerSide:
        def side(module: Any, rows: int) -> Call:
            tokens, weight, dout, context = tokens_of(rows), zeros(EMBEDDINGS, COLS), zeros(rows, COLS), Context()
            context.saved_tensors = (tokens, weight)
            if not backward:
                return lambda: module.LigerEmbeddingFunction.forward(context, weight, tokens)
            return lambda: module.LigerEmbeddingFunction.backward(context, dout)

        return side

    rows, result = 8192, []
    for backward in (False, True):
        needed = rows * (8 + 2.0 * COLS) + 2.0 * COLS * (EMBEDDINGS if backward else rows)
        names = ("embedding.windows", "embedding.crossing") if backward else ("embedding.forward.bf16",)
        note = "sums by atomics: bits differ between runs" if backward else ""
        peers = {"liger": Peer(("experimental.embedding",), liger(backward), note)}
        name = f"embedding {'backward' if backward else 'forward'} [{rows}] of [{EMBEDDINGS}, {COLS}]"
        result.append(
            StaticCase(name, rows, rows * COLS, named(*names), ours(backward), peers, 16, needed)
        )  # fmt: skip
    return result


def all_cases() -> list[StaticCase]:
    """Every case; names are different."""
    return [
        *norm_cases(), *gated_cases(), rope_case(), *loss_cases(), *embedding_cases(), matmul_case(),
        *attention_cases(),
    ]  # fmt: skip
