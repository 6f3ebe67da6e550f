"""FLOP and bytes of the ops of the `kernels` suite by formula: what an op has to do, not what one of them happens to.

Bytes: each input once, each output once; tests/test_bytes.py holds the ops that memory binds against what their
kernels touch. FLOP: two a multiply-add of the products; what an implementation computes twice counts once.
"""

from __future__ import annotations

from typing import Any

import torch

from plait.bench.problems_product import documents

Params = dict[str, Any]
# op -> rows of x's size moved (forward, forward and backward), the same of one row (weight, bias and their gradients)
STREAMS: dict[str, tuple[int, int, int, int]] = {
    "rms_norm": (2, 5, 1, 3),  # x -> y; x, dy -> dx; the weight and its gradient
    "rms_norm_residual": (4, 8, 1, 3),  # x, residual -> y, sum; sum, dy, dsum -> dx
    "layer_norm": (2, 5, 2, 5),
    "layer_norm_residual": (4, 8, 2, 5),
    "swiglu": (3, 8, 0, 0),  # gate, up -> y; gate, up, dy -> dgate, dup
    "geglu": (3, 8, 0, 0),
    "dropout": (2, 4, 0, 0),
}
PRODUCTS = ("linear", "linear_swiglu", "linear_dgrad", "linear_wgrad", "linear_cross_entropy")
WITHOUT_GRADIENT = ("linear_dgrad", "linear_wgrad", "l2_norm", "adamw_")
# No backward to time by itself: the gradients are made beside the loss, in the forward.
GRADIENT_IN_FORWARD = ("linear_cross_entropy",)


def pairs(p: Params) -> float:
    """Queries times the keys that each sees, of one head of one sample."""
    tokens = p["tokens"]

    def causal(length: int) -> float:
        return length * (length + 1) / 2

    match p.get("kind", "causal"):
        case "full":
            return float(tokens * tokens)
        case "decode":
            return float(tokens)
        case "window":
            window = max(1, tokens // 8)
            return causal(window) + (tokens - window) * float(window)
        case "packed":
            borders = documents(tokens)
            return sum(causal(b - a) for a, b in zip(borders, borders[1:], strict=False))
    return causal(tokens)


def product_bytes(p: Params, width: int) -> float:
    """Bytes of a product [rows, cols] x [width, cols]^T: operands and result once each way, sums in fp32 twice."""
    size, rows, cols, both = getattr(torch, p["dtype"]).itemsize, p["rows"], p["cols"], p["backward"]
    x, weight, out = rows * cols, width * cols, rows * p.get("width", 0)  # the head's logits are nobody's output
    if p["op"] == "linear_wgrad":
        return float(size * (x + out) + 8 * weight)
    extra = out * (p.get("epilogue") in ("residual", "dropout"))  # a residual, and its gradient
    return float(size * ((3 if both else 1) * (x + weight) + (2 if both else 1) * (out + extra)))


def work(p: Params) -> tuple[float | None, float | None]:
    """(FLOP, bytes): forward, with "backward" that too, with "alone" the backward by itself; FLOP None where the op
    only streams memory. ValueError for an op without a formula.

    A backward by itself is what it adds: it reads what the forward read and the gradients of the outputs, and writes
    those of the inputs. Statistics of rows that a forward keeps for it are small.
    """
    if not p.get("alone"):
        return whole_work(p)
    (flop, nbytes), (less_flop, less) = whole_work(p), whole_work({**p, "backward": False})
    return flop - less_flop if flop and less_flop else None, nbytes - less


def whole_work(p: Params) -> tuple[float | None, float]:
    """The same of a forward, or of both sides together."""
    size, backward, op = getattr(torch, p["dtype"]).itemsize, p["backward"], p["op"]
    if op in STREAMS:
        forward, both, row, rows = STREAMS[op]
        return None, float(
            size * p["cols"] * ((both if backward else forward) * p["rows"] + (rows if backward else row))
        )
    if op in PRODUCTS:
        width = p["vocab"] if op == "linear_cross_entropy" else p["width"] * (2 if op == "linear_swiglu" else 1)
        return 2.0 * p["rows"] * p["cols"] * width * (3 if backward else 1), product_bytes(p, width)
    match op:
        case "attention":  # two products; the backward has five. q, k, v -> out; q, k, v, dout -> dq, dk, dv
            flop = 4.0 * p["batch"] * p["heads"] * p["dim"] * pairs(p) * (3.5 if backward else 1)
            heads, keys = (5, 6) if backward else (2, 2)
            moved = p["batch"] * p["tokens"] * p["dim"] * (heads * p["heads"] + keys * p["kv_heads"])
            if p.get("kind") == "decode":  # one query: the keys and values are what costs
                values = p["batch"] * p["dim"] * (2 * p["tokens"] * p["kv_heads"] + 2 * p["heads"])
                return None, float(size * values)
            return flop, float(size * moved)
        case "rope":  # q, k -> q, k each way; the tables are small
            values = p["batch"] * p["tokens"] * (p["heads"] + p["kv_heads"]) * p["dim"]
            return None, float(size * values * (4 if backward else 2))
        case "embedding":  # tokens and rows -> y; tokens and dy -> all of dweight
            taken = p["rows"] * (8 + 2 * size * p["cols"])
            grad = p["rows"] * (8 + size * p["cols"]) + size * p["vocab"] * p["cols"]
            return None, float(taken + grad * backward)
        case "cross_entropy":  # logits -> loss; logits -> gradient
            return None, float(size * p["rows"] * p["vocab"] * (3 if backward else 1))
        case "l2_norm":
            return None, float(size * p["tensors"] * p["elements"])
        case "adamw_":  # parameter, gradient, both moments -> parameter, both moments
            return None, 7.0 * size * p["tensors"] * p["elements"]
    raise ValueError(f"op: {op!r} has no formula in bench/kernel_work.py")
