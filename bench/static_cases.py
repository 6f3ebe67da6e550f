"""The cases of the `static` suite: our points beside the kernels of others that compute the same thing.

A side is a function of a number of rows that prepares inputs and returns the call whose launches are meant. Ours and
each peer get the same shapes and dtypes; the calls are recorded for the compiler (static_peers.py) and run in the
interpreter to be counted (static_counts.py). Runs and compiles nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from plait import kernels
from plait.kernels import embed, gated, layernorm, rmsnorm
from plait.kernels.flash_points import Point
from plait.kernels.inspect import parse_arch
from plait.kernels.launch import Launch
from plait.kernels.loss_triton import grad_launch, stats_launch
from plait.kernels.matmul_launch import Epilogue, plan, product_launches
from plait.kernels.points import points

Call = Callable[[], object]
Side = Callable[[int], Call]  # rows -> the call
PeerSide = Callable[[Any, int], Call]  # the peer's module, rows -> the call
BF16, FP16 = torch.bfloat16, torch.float16
COLS, FFN, VOCAB, EMBEDDINGS = 4096, 14336, 128_256, 32_000


class Peer(NamedTuple):
    """Where a peer's code is (a module of Liger's, or a tutorial's file and its definitions), and its call."""

    source: tuple[str, ...]
    call: PeerSide
    note: str = ""


class StaticCase(NamedTuple):
    """One op at one shape. `rows` are those of the table; the interpreter counts `counted` rows and twice as many,
    0: formulas alone. bytes_needed: each input and output once. elements: of the output."""

    name: str
    rows: int
    elements: int
    launches: Callable[[str], list[Launch]]  # of an architecture
    ours: Side | None
    peers: dict[str, Peer]
    counted: int
    bytes_needed: float
    flop: float = 0.0  # of the algorithm that both run
    flop_peer: float = 0.0  # where it differs
    note: str = ""


def named(*names: str) -> Callable[[str], list[Launch]]:
    """Launches of our points."""
    return lambda arch: [points(every=True)[name](arch) for name in names]


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Kernels do not branch on values; zeros are pages that nobody touched."""
    return torch.zeros(shape, dtype=dtype)


class Context:
    """What an autograd.Function's forward and backward need of its ctx."""

    needs_input_grad = (True,) * 8

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors


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
                peers["tutorial"] = Peer(source, tutorial(backward), "sums under a lock" if backward else "")
            needed = 2.0 * COLS * 8192 * streams[op][backward]
            name = f"{op} {side} [8192, {COLS}]"
            launches = named(f"{op}.{side}.{COLS}")
            counted = 264 if backward else 2  # our backward has 264 programs, theirs one a multiprocessor
            result.append(StaticCase(name, 8192, 8192 * COLS, launches, ours(op, backward), peers, counted, needed))
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


def loss_cases() -> list[StaticCase]:
    """Cross entropy of bf16 logits with its gradient, and linear cross entropy by formula."""

    def ours(rows: int) -> Call:
        logits, target, lse = zeros(rows, VOCAB), torch.zeros(rows, dtype=torch.int64), torch.zeros(rows)
        stats, grad = torch.empty(4, rows), torch.empty(rows, VOCAB, dtype=BF16)

        def call() -> None:
            stats_launch(logits, target, 0, 0.0, stats).run()
            grad_launch(logits, target, lse, lse, 0, VOCAB, 0.0, 0.0, 0.0, grad).run()

        return call

    def liger(module: Any, rows: int) -> Call:
        logits, target = zeros(rows, VOCAB).requires_grad_(), torch.zeros(rows, dtype=torch.int64)
        options = (None, -100, 0.0, 0.0, "mean", None, False)
        return lambda: torch.no_grad()(module.cross_entropy_forward)(logits, target, *options)

    tokens = 4096
    direct = StaticCase(
        f"cross entropy, loss and gradient [{tokens}, {VOCAB}]",
        tokens,
        tokens * VOCAB,
        named("cross_entropy.stats.bf16", "cross_entropy.grad.bf16"),
        ours,
        {"liger": Peer(("cross_entropy",), liger, "gradient over the logits, made in forward")},
        2,
        tokens * VOCAB * 2.0 * 3,
    )
    product = 2.0 * tokens * COLS * VOCAB
    head = StaticCase(
        f"linear cross entropy [{tokens}, {COLS}] x {VOCAB}",
        tokens,
        tokens * VOCAB,
        named("cross_entropy.stats.128256", "cross_entropy.grad.128256"),
        None,
        {"liger": Peer(("cross_entropy",), liger, "products: logits, dx, dweight")},
        0,
        2.0 * COLS * (2 * tokens + 2 * VOCAB),
        4 * product,
        3 * product,
        "backward makes the logits again: 4 products for 3",
    )
    return [direct, head]


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


def matmul_case() -> StaticCase:
    """[8192, 4096] x [4096, 4096]^T in fp16, which is what the tutorials write."""
    rows, width = 8192, COLS

    def launches(arch: str) -> list[Launch]:
        new = partial(torch.empty, dtype=FP16, device="meta")
        a, b, out = new(rows, COLS), new(width, COLS), new(rows, width)
        return product_launches(a, b, out, Epilogue(), plan("linear", a, b, parse_arch(arch)))

    def tiled(module: Any, _: int) -> Call:
        a, b = zeros(rows, COLS, dtype=FP16), zeros(width, COLS, dtype=FP16)
        return lambda: module.matmul(a, b.t())

    def persistent(module: Any, _: int) -> Call:
        a, b = zeros(rows, COLS, dtype=FP16), zeros(width, COLS, dtype=FP16)
        return lambda: module.matmul_descriptor_persistent(a, b, False)

    peers = {
        "tutorial 03": Peer(("03-matrix-multiplication.py", "matmul"), tiled),
        "tutorial 09": Peer(("09-persistent-matmul.py", "matmul_descriptor_persistent"), persistent),
    }
    return StaticCase(
        f"linear [{rows}, {COLS}] x {width} fp16", rows, rows * width, launches, None, peers, 0,
        2.0 * (rows * COLS + width * COLS + rows * width), 2.0 * rows * COLS * width,
    )  # fmt: skip


def attention_cases() -> list[StaticCase]:
    """Causal, fp16, 32 heads of 128 (ours with 8 for keys); backward makes the scores again, twice."""
    batch, tokens, heads, dim = 2, 4096, 32, 128

    def launches(kinds: tuple[str, ...]) -> Callable[[str], list[Launch]]:
        return lambda arch: [Point(kind, dim, dim, "plain", "fp16").launch(arch) for kind in kinds]

    def tutorial(backward: bool) -> PeerSide:
        def side(module: Any, _: int) -> Call:
            q, context = zeros(batch, heads, tokens, dim, dtype=FP16), Context()
            context.sm_scale, context.HEAD_DIM = 0.1, dim  # type: ignore[attr-defined]
            context.saved_tensors = (q, q, q, q, zeros(batch, heads, tokens, dtype=torch.float32))
            if backward:
                return lambda: module._attention.backward(context, q)
            return lambda: module._attention.forward(context, q, q, q, True, 0.1)

        return side

    product = 2.0 * batch * heads * dim * tokens * (tokens + 1) / 2
    operand = 2.0 * batch * heads * tokens * dim
    result = []
    for backward, kinds in ((False, ("forward",)), (True, ("delta", "dq", "dkdv"))):
        peers = {"tutorial": Peer(("06-fused-attention.py", "_attention"), tutorial(backward))}
        name = f"attention {'backward' if backward else 'forward'} causal [{batch}, {tokens}, {heads}, {dim}] fp16"
        result.append(
            StaticCase(
                name, batch * tokens, batch * tokens * heads * dim, launches(kinds), None, peers, 0,
                operand * (8 if backward else 4), product * (7 if backward else 2),
            )
        )  # fmt: skip
    return result


def all_cases() -> list[StaticCase]:
    """Every case; names are different."""
    return [
        *norm_cases(), *gated_cases(), rope_case(), *loss_cases(), *embedding_cases(), matmul_case(),
        *attention_cases(),
    ]  # fmt: skip
