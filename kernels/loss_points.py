"""Launches of the cross entropy kernels, by name, for inspection without a GPU.

A chunk of the head's logits of 128,256 classes whole and over 8 ranks, of 50,257 (whose last block is narrow), and
16-bit logits of a caller. Gradients of the head are 16-bit; "in_place" is that of fp32 inputs. "loss", "mean" and
"add" are cross_entropy's own: a token's loss, the gradient of their mean, their sum.
"""

from collections.abc import Callable
from functools import partial

import torch

from plait.kernels.launch import Launch
from plait.kernels.loss_triton import add_launch, grad_launch, stats_launch, token_loss_launch

_ROWS = 768
# (name, classes of the shard, dtype of the logits, dtype of the gradient, softcap)
_POINTS = (
    ("128256", 128_256, torch.float32, torch.bfloat16, 0.0),
    ("16032", 16_032, torch.float32, torch.bfloat16, 0.0),
    ("50257", 50_257, torch.float32, torch.bfloat16, 0.0),
    ("softcap", 128_256, torch.float32, torch.bfloat16, 30.0),
    ("in_place", 128_256, torch.float32, torch.float32, 0.0),
    ("bf16", 128_256, torch.bfloat16, torch.bfloat16, 0.0),
)


def _rows(num_classes: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits as the head lays them out: rows start at multiples of 16 elements."""
    return torch.empty(_ROWS, -(-num_classes // 16) * 16, dtype=dtype, device="meta")[:, :num_classes]


def _launch(kernel: str, num_classes: int, dtype: torch.dtype, out_dtype: torch.dtype, softcap: float) -> Launch:
    logits, target = _rows(num_classes, dtype), torch.empty(_ROWS, dtype=torch.int64, device="meta")
    if kernel == "stats":
        return stats_launch(logits, target, 0, softcap, torch.empty(4, _ROWS, device="meta"))
    lse, grad = torch.empty(_ROWS, device="meta"), _rows(num_classes, out_dtype)
    return grad_launch(logits, target, lse, lse, 0, num_classes, 0.1, 1e-4, softcap, grad)


def _own(kernel: str) -> Launch:
    """A kernel of given bf16 logits, smoothed and with z-loss."""
    logits, target = _rows(128_256, torch.bfloat16), torch.empty(_ROWS, dtype=torch.int64, device="meta")
    lse, number = torch.empty(_ROWS, device="meta"), torch.empty((), device="meta")
    terms = (0, 128_256, 0.1, 1e-4, 0.0)
    if kernel == "loss":
        return token_loss_launch(logits, target, -100, *terms, lse, lse)
    if kernel == "mean":
        return grad_launch(logits, target, lse, number, *terms, logits, number)
    return add_launch(torch.empty(1 << 14, device="meta"), target, -100, True, number, number)


def points() -> dict[str, Callable[[], Launch]]:
    """Every point by name, as a function that makes its launch; statistics do not depend on the gradient's dtype."""
    return {
        f"cross_entropy.{kernel}.{name}": partial(_launch, kernel, num_classes, dtype, out_dtype, softcap)
        for kernel in ("stats", "grad")
        for name, num_classes, dtype, out_dtype, softcap in _POINTS
        if (kernel, name) != ("stats", "in_place")
    } | {f"cross_entropy.{name}": partial(_own, name.split(".")[-1]) for name in ("stats.loss", "grad.mean", "add")}
