"""The `static` suite's losses, products and attention: what arithmetic binds, and cross entropy. Runs nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from plait.bench.static_case import BF16, COLS, FP16, VOCAB, Call, Context, Peer, PeerSide, StaticCase, named, zeros
from plait.kernels.flash_points import Point
from plait.kernels.inspect import parse_arch
from plait.kernels.launch import Launch
from plait.kernels.loss_triton import grad_launch, stats_launch
from plait.kernels.matmul_launch import Epilogue, plan, product_launches


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
        3 * product,
        3 * product,
        "both make the gradients in forward, from the logits of a chunk: 3 products",
    )
    return [direct, head]


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
