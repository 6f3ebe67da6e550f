"""Problems that arithmetic binds: linear with its epilogues and gradients, linear_swiglu, attention, the head's loss.

Each is a function of a case's params and a Maker (problem.py); the docstring gives the shapes. Products of torch are
cuBLAS's on a card, attention's backends cuDNN's and flash attention's. Times nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from plait import kernels
from plait.bench.problem import Maker, Op, Params, Peer, Problem
from plait.kernels.philox import keep_mask_ref

DROPPED = 0.1  # share of elements that an epilogue drops


def linear(p: Params, make: Maker) -> Problem:
    """x [rows, cols], weight [width, cols]; with "epilogue": "bias", "gelu" (and bias), "residual" or "dropout"."""
    rows, width, epilogue = p["rows"], p["width"], p.get("epilogue", "")
    x, weight, bias, residual = (
        make.normal(*shape) for shape in ((rows, p["cols"]), (width, p["cols"]), (width,), (rows, width))
    )
    std = p["cols"] ** -0.5  # of weights: outputs have a deviation of 1
    if not epilogue:
        ops: dict[str, Op | Peer | str] = {"plait": kernels.linear, "torch": F.linear}
        return Problem((x, weight), kernels.linear_ref, ops)
    if epilogue == "bias":
        return Problem((x, weight, bias), kernels.linear_ref, {"plait": kernels.linear, "torch": F.linear})
    if epilogue == "gelu":
        return Problem(
            (x, weight, bias),
            lambda x, w, b: kernels.linear_ref(x, w, b, activation="gelu"),
            {
                "plait": lambda x, w, b: kernels.linear(x, w, b, activation="gelu"),
                "torch": lambda x, w, b: F.gelu(F.linear(x, w, b)),
            },
            (1.0, std, 1.0),
        )
    if epilogue == "residual":
        return Problem(
            (x, weight, residual),
            lambda x, w, r: kernels.linear_ref(x, w, residual=r),
            {
                "plait": lambda x, w, r: kernels.linear(x, w, residual=r),
                "torch": lambda x, w, r: torch.addmm(r, x, w.t()),
            },
            (1.0, std, 1.0),
        )
    if epilogue != "dropout":
        raise ValueError(f"epilogue: {epilogue!r} is unknown; valid: bias, gelu, residual, dropout")
    rng = make.rng()
    keep = keep_mask_ref(rng, DROPPED, range(1), range(1), range(rows), range(width))[0, 0]
    return Problem(
        (x, weight, residual),
        lambda x, w, r: kernels.linear_ref(x, w, residual=r, dropout_p=DROPPED, rng=rng),
        {
            "plait": lambda x, w, r: kernels.linear(x, w, residual=r, dropout_p=DROPPED, rng=rng),
            "torch": lambda x, w, r: torch.where(keep, F.linear(x, w) * (1.0 / (1.0 - DROPPED)), 0.0) + r,
        },
        (1.0, std, 1.0),
    )


def linear_swiglu(p: Params, make: Maker) -> Problem:
    """x [rows, cols], weight [2 width, cols]."""

    def eager(x: Tensor, weight: Tensor) -> Tensor:
        gate, up = F.linear(x, weight).chunk(2, -1)
        return F.silu(gate) * up

    return Problem(
        (make.normal(p["rows"], p["cols"]), make.normal(2 * p["width"], p["cols"])),
        kernels.linear_swiglu_ref,
        {"plait": kernels.linear_swiglu, "torch": eager},
        (1.0, p["cols"] ** -0.5),
    )


def linear_dgrad(p: Params, make: Maker) -> Problem:
    """dout [rows, width], weight [width, cols]; no gradient of its own."""
    return Problem(
        (make.normal(p["rows"], p["width"]), make.normal(p["width"], p["cols"])),
        kernels.linear_dgrad_ref,
        {"plait": kernels.linear_dgrad, "torch": lambda dout, weight: dout @ weight},
    )


def linear_wgrad(p: Params, make: Maker) -> Problem:
    """x [rows, cols], dout [rows, width], added into an fp32 gradient [width, cols]; no gradient of its own."""

    def ours(x: Tensor, dout: Tensor, out: Tensor) -> Tensor:
        return kernels.linear_wgrad(x, dout, out=out, accumulate=True)

    def eager(x: Tensor, dout: Tensor, out: Tensor) -> Tensor:
        if x.dtype == out.dtype:
            return torch.addmm(out, dout.t(), x, out=out)
        return out.add_(torch.mm(dout.t(), x, out_dtype=out.dtype))

    grad = make.normal(p["width"], p["cols"]).float()
    return Problem(
        (make.normal(p["rows"], p["cols"]), make.normal(p["rows"], p["width"]), grad),
        lambda x, dout, out: out + kernels.linear_wgrad_ref(x, dout),
        {"plait": Peer(ours), "torch": Peer(eager)},
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


def documents(tokens: int) -> list[int]:
    """Borders of the packed documents: an eighth, a quarter, and the rest."""
    return [0, tokens // 8, tokens // 8 + tokens // 4, tokens]


def attention(p: Params, make: Maker) -> Problem:
    """q [B, T, H, K], k and v [B, S, KV, K]; p["kind"]: causal, full, window, packed, decode (T 1)."""
    batch, tokens, heads, kv_heads, dim = (p[name] for name in ("batch", "tokens", "heads", "kv_heads", "dim"))
    kind, grouped = p.get("kind", "causal"), heads != kv_heads
    queries, window = (1 if kind == "decode" else tokens), max(1, tokens // 8)
    borders = documents(tokens)
    cu = torch.tensor(borders, dtype=torch.int32, device=make.device)
    how: dict[str, Any] = {"causal": kind not in ("full", "decode")}
    how |= {"window": window} if kind == "window" else {}
    how |= {"cu_seqlens": cu} if kind == "packed" else {}
    place = torch.arange(tokens, device=make.device)
    band = (place[:, None] >= place) & (place[:, None] - place < window) if kind == "window" else None

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (value.transpose(1, 2) for value in (q, k, v))
        causal = how["causal"] and band is None
        out: Tensor = F.scaled_dot_product_attention(q, k, v, attn_mask=band, is_causal=causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    def apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pieces = zip(borders, borders[1:], strict=False)
        return torch.cat([sdpa(q[:, a:b], k[:, a:b], v[:, a:b]) for a, b in pieces if a < b], 1)

    def by(backend: SDPBackend) -> Op:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return sdpa(q, k, v)

        return run

    def varlen(op: Op) -> Op:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            longest = max(b - a for a, b in zip(borders, borders[1:], strict=False))
            out: Tensor = op(q[0], k[0], v[0], cu, cu, longest, longest, causal=True)
            return out[None]

        return run

    ops: dict[str, Op | Peer | str] = {
        "plait": lambda q, k, v: kernels.attention(q, k, v, **how),
        "torch": apart if kind == "packed" else sdpa,
    }
    if kind == "packed":
        ops["flash_attn"] = make.flash("flash_attn_varlen_func", varlen)
    else:
        span = (window - 1, 0) if kind == "window" else (-1, -1)
        ops["flash_attn"] = make.flash(
            "flash_attn_func",
            lambda op: lambda q, k, v: op(q, k, v, causal=how["causal"], window_size=span),
        )
    if make.device.type == "cuda" and kind in ("causal", "full", "decode"):
        ops |= {"flash": by(SDPBackend.FLASH_ATTENTION), "cudnn": by(SDPBackend.CUDNN_ATTENTION)}
    shapes = ((queries, heads), (tokens, kv_heads), (tokens, kv_heads))
    inputs = tuple(make.normal(batch, length, n, dim) for length, n in shapes)
    return Problem(inputs, lambda q, k, v: kernels.attention_ref(q, k, v, **how), ops)
