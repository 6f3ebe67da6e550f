"""What each op keeps for backward beyond its own inputs and outputs: the column of README's table of ops, counted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from plait import kernels

T, D, F, V, HEADS, KV, K = 64, 32, 48, 40, 4, 2, 8
README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)


def kept(op: Callable[..., object], *inputs: torch.Tensor) -> float:
    """Bytes per token that the graph keeps and that are neither an input's nor an output's."""
    storages = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = op(*inputs)
    outputs = result if isinstance(result, tuple) else (result,)
    known = {x.untyped_storage().data_ptr() for x in (*inputs, *outputs)}
    return sum(size for place, size in storages.items() if place not in known) / T


target = torch.randint(V, (T,))
cos, sin = torch.randn(2, T, K // 2).unbind(0)
qkv = (bf16(1, T, HEADS, K), bf16(1, T, KV, K), bf16(1, T, KV, K))

# op as README names it -> (call, inputs, bytes per token, how README writes that)
CASES = {
    "linear": (kernels.linear, (bf16(T, D), bf16(F, D), bf16(F)), 0, "0"),
    "linear + residual": (
        lambda x, w, r: kernels.linear(x, w, residual=r), (bf16(T, D), bf16(F, D), bf16(T, F)), 0, "0",
    ),
    "linear + activation": (
        lambda x, w: kernels.linear(x, w, activation="silu"), (bf16(T, D), bf16(F, D)), 2 * F, "2 N",
    ),
    "linear_swiglu": (kernels.linear_swiglu, (bf16(T, D), bf16(2 * F, D)), 4 * F, "4 F"),
    "attention": (kernels.attention, qkv, 4 * HEADS, "4 H"),
    "attention, recompute": (lambda q, k, v: kernels.attention(q, k, v, recompute=True), qkv, 0, "0"),
    "rms_norm": (kernels.rms_norm, (bf16(T, D), bf16(D)), 4, "4"),
    "rms_norm + residual": (
        lambda x, w, r: kernels.rms_norm(x, w, residual=r), (bf16(T, D), bf16(D), bf16(T, D)), 4, "4",
    ),
    "layer_norm": (kernels.layer_norm, (bf16(T, D), bf16(D), bf16(D)), 8, "8"),
    "rope": (kernels.rope, (*qkv[:2], cos, sin), 0, "0"),
    "swiglu": (kernels.swiglu, (bf16(T, 2 * F),), 0, "0"),
    "geglu": (kernels.geglu, (bf16(T, 2 * F),), 0, "0"),
    "cross_entropy": (kernels.cross_entropy, (bf16(T, V), target), 4, "4"),
    "linear_cross_entropy": (kernels.linear_cross_entropy, (bf16(T, D), bf16(V, D), target), 4, "4 and dx, dW"),
    "embedding": (kernels.embedding, (target, bf16(V, D)), 0, "0"),
    "dropout": (
        lambda x: kernels.dropout(x, 0.1, rng=torch.tensor([1, 2])), (bf16(1, T, D),), 0, "0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_kept_for_backward_is_what_readme_says(name):
    op, inputs, wanted, written = CASES[name]
    row = re.search(rf"^\| {re.escape(name)} \|[^|]*\| ([^|]*) \|", README, re.M)
    assert row, f"README's table of ops has no row {name!r}"
    assert row[1] == written
    per_call = 16 / T  # a divisor and the like, whatever the number of tokens
    assert wanted <= kept(op, *inputs) <= wanted + per_call
