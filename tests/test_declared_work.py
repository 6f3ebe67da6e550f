"""What a benchmark declares of an op beside what the compiler read of its kernels (TTIR): bytes, FLOP of products.

One row an op that has a point: the points that make up the op, and the shape that they have. Each tensor counts once
(what programs read again comes out of a cache) and whole where it is smaller than what is asked for. The exceptions
state what the formula leaves out. Passes within a program: tests/test_bytes.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from plait.bench.kernel_problems import PROBLEMS
from plait.bench.kernel_work import work
from plait.kernels.pinned import work_of
from plait.kernels.points import points
from tests.cases import needs_compiler

pytestmark = [pytest.mark.offline, needs_compiler]
FORWARD, BACKWARD, BOTH = "forward", "backward", "both"
COLS = {"rows": 8192, "cols": 4096}
FFN = {"rows": 8192, "cols": 14336}
PRODUCT = {"rows": 8192, "cols": 4096, "width": 4096}
ROPE = {"batch": 2, "tokens": 4096, "heads": 32, "kv_heads": 8, "dim": 128}
HEADS = {"batch": 2, "tokens": 4096, "heads": 32, "kv_heads": 8, "dim": 128}
LOGITS = {"rows": 768, "vocab": 128_256}


class Declared(NamedTuple):
    """An op's side at a shape. more: what the kernels do over the formula, as a factor; the reason is beside it."""

    op: str
    side: str
    shape: dict[str, int]
    points: tuple[str, ...]
    more: float = 1.0
    slack: float = 0.02  # statistics of rows, partial sums of a weight's gradient, tables
    dtype: str = "bfloat16"


ROWS = [
    Declared("rms_norm", FORWARD, COLS, ("rms_norm.forward.4096",)),
    Declared("rms_norm", BACKWARD, COLS, ("rms_norm.backward.4096",), slack=0.03),  # 257 partial sums
    Declared("rms_norm_residual", FORWARD, COLS, ("rms_norm_residual.forward.4096",)),
    Declared("rms_norm_residual", BACKWARD, COLS, ("rms_norm_residual.backward.4096",), slack=0.03),
    Declared("layer_norm", FORWARD, COLS, ("layer_norm.forward.4096",)),
    Declared("layer_norm", BACKWARD, COLS, ("layer_norm.backward.4096",), slack=0.06),  # of weight and bias
    Declared("layer_norm_residual", FORWARD, COLS, ("layer_norm_residual.forward.4096",)),
    Declared("layer_norm_residual", BACKWARD, COLS, ("layer_norm_residual.backward.4096",), slack=0.06),
    Declared("swiglu", FORWARD, FFN, ("swiglu.forward",)),
    Declared("swiglu", BACKWARD, FFN, ("swiglu.backward",)),
    Declared("geglu", FORWARD, FFN, ("geglu_tanh.forward",)),
    Declared("geglu", BACKWARD, FFN, ("geglu_tanh.backward",)),
    Declared("rope", FORWARD, ROPE, ("rope.halves.128",)),
    Declared("dropout", FORWARD, {"rows": 16384, "cols": 4096}, ("dropout.bf16",)),
    Declared("embedding", FORWARD, {**COLS, "vocab": 65536}, ("embedding.forward.bf16",)),
    Declared("cross_entropy", FORWARD, LOGITS, ("cross_entropy.stats.bf16",)),
    Declared("cross_entropy", BOTH, LOGITS, ("cross_entropy.stats.bf16", "cross_entropy.grad.bf16")),
    Declared("l2_norm", FORWARD, {"tensors": 1, "elements": 1 << 24}, ("l2_norm.run.bf16",)),
    Declared("adamw_", FORWARD, {"tensors": 1, "elements": 1 << 24}, ("adamw.run.fp32",), dtype="float32"),
    Declared("linear", FORWARD, PRODUCT, ("linear.forward",)),
    Declared("linear_dgrad", FORWARD, PRODUCT, ("linear.dgrad",)),
    Declared("linear_wgrad", FORWARD, PRODUCT, ("linear.wgrad",)),
    Declared("linear_swiglu", FORWARD, {**COLS, "width": 14336}, ("linear.swiglu",)),
    Declared("attention", FORWARD, HEADS, ("attention.forward.128",), slack=0.05),  # whole tiles at the diagonal
    # The scores and their gradient are made again in each of two kernels: seven products, not five.
    Declared("attention", BACKWARD, HEADS, ("attention.dq.128", "attention.dkdv.128"), more=7 / 5, slack=0.06),
]
# Ops without a point of their own, and why.
ELSEWHERE = {"linear_cross_entropy": "launches the points of linear and of cross_entropy, chunk by chunk"}


def declared(row: Declared) -> tuple[float, float]:
    """(FLOP, bytes) by the benchmark's formula; of a backward alone what it adds."""
    params = {"op": row.op, "dtype": row.dtype, **row.shape}
    both = [value or 0.0 for value in work({**params, "backward": row.side != FORWARD})]
    less = [value or 0.0 for value in work({**params, "backward": False})] if row.side == BACKWARD else [0.0, 0.0]
    return both[0] - less[0], both[1] - less[1]


def compiled(name: str) -> tuple[float, float]:
    """(FLOP, bytes) of a point by its TTIR, each tensor once a direction."""
    launch = points()[name]("sm_90")
    sizes: dict[str, int] = {}
    for argument, value in zip(launch.kernel.arg_names, launch.arguments, strict=False):
        tensor: Any = getattr(value, "base", value)
        if isinstance(tensor, torch.Tensor):
            sizes[argument] = tensor.numel() * tensor.element_size()
    found = work_of(launch, "sm_90")
    sides = [*found["loads"].items(), *found["stores"].items()]
    return found["flop"], sum(min(nbytes, sizes[argument]) for argument, nbytes in sides)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.op}-{row.side}")
def test_declared_work_is_what_the_kernels_do(row):
    flop, nbytes = declared(row)
    found = [sum(values) for values in zip(*map(compiled, row.points), strict=True)]
    wanted, got = (flop, found[0]) if flop else (nbytes, found[1])
    assert wanted > 0 and wanted * row.more * 0.999 <= got <= wanted * row.more * (1 + row.slack)


def test_every_op_is_here_or_says_why_not():
    ops = {row.op for row in ROWS}
    assert ops | set(ELSEWHERE) == {*PROBLEMS, "adamw_"} and not ops & set(ELSEWHERE)
