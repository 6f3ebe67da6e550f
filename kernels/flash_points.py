"""Launches of the attention kernels by name, for inspection without a GPU: a short list, and the whole table.

Not the tiles (flash_tiles.py): a point takes whatever tile the launcher would take on that architecture. Names are
attention.KERNEL.HEAD_DIM[xVALUE_DIM][.VARIANT][.DTYPE]; plain bf16 has neither.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from plait.kernels.attention_plain import Options
from plait.kernels.flash_launch import delta_launch, forward_launch, gradient_launches
from plait.kernels.inspect import parse_arch
from plait.kernels.launch import Launch

KERNELS = ("forward", "delta", "dq", "dkdv")
# Variant -> (packed documents and sinks, window, softcap, dropout): the most registers that each tile must fit.
VARIANTS = {
    "plain": (False, 0, 0.0, 0.0),
    "packed": (True, 0, 0.0, 0.0),
    "bounded": (True, 256, 30.0, 0.0),
    "dropout": (True, 256, 30.0, 0.1),
}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_BATCH, _TOKENS, _HEADS, _KEY_HEADS, _DOCUMENTS = 2, 4096, 32, 8, 4


class Point(NamedTuple):
    """One kernel, compiled for one case."""

    kernel: str
    head_dim: int
    value_dim: int
    variant: str = "plain"
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        """As the file's first lines say."""
        width = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}x{self.value_dim}"
        parts = ["attention", self.kernel, width]
        parts += [self.variant] * (self.variant != "plain") + [self.dtype] * (self.dtype != "bf16")
        return ".".join(parts)

    def launch(self, arch: str = "sm_90") -> Launch:
        """What the launcher makes of meta tensors of this case on a card of `arch`."""
        number = parse_arch(arch)
        packed, window, softcap, dropout = VARIANTS[self.variant]
        options = Options(True, self.head_dim**-0.5, window, softcap, dropout, 0, 0)
        new = partial(torch.empty, device="meta", dtype=_DTYPES[self.dtype])
        batch = 1 if packed else _BATCH
        q, k = (new(batch, _TOKENS, heads, self.head_dim) for heads in (_HEADS, _KEY_HEADS))
        out, v = (new(batch, _TOKENS, heads, self.value_dim) for heads in (_HEADS, _KEY_HEADS))
        lse = new(batch, _HEADS, _TOKENS, dtype=torch.float32)
        rng = new(2, dtype=torch.int64) if dropout else None
        cu = new(_DOCUMENTS + 1, dtype=torch.int32) if packed else None
        if self.kernel == "forward":
            sinks = new(_HEADS) if packed else None
            return forward_launch(q, k, v, sinks, rng, cu, cu, options, out, lse, number)
        if self.kernel == "delta":
            return delta_launch(out, lse, out, lse, lse, lse)
        launches = gradient_launches(out, q, k, v, lse, lse, rng, cu, cu, options, q, k, v, number)
        return launches[0 if self.kernel == "dq" else 1]


def default_points() -> list[Point]:
    """The head dims that most models have, two kernels with every switch on."""
    found = [Point(kernel, 64, 64) for kernel in ("forward", "dq", "dkdv")]
    found += [Point(kernel, 128, 128) for kernel in KERNELS]
    found += [Point(kernel, 128, 128, "dropout") for kernel in ("forward", "dkdv")]
    return [*found, Point("forward", 256, 256)]


def _cases() -> Iterator[tuple[int, int, str, str]]:
    """(head dim, value dim, variant, dtype) of the whole table."""
    for width in (16, 32, 64, 80, 96, 112, 128, 192, 256):
        yield width, width, "plain", "bf16"
    yield 192, 128, "plain", "bf16"
    yield 64, 256, "packed", "bf16"
    for width in (32, 64, 96, 128, 192, 256):
        for variant in ("packed", "bounded", "dropout"):
            yield width, width, variant, "bf16"
        yield width, width, "plain", "fp16"
        yield width, width, "plain", "fp32"
        yield width, width, "dropout", "fp32"


def all_points() -> list[Point]:
    """Every tile of the table, padded and exact head dims, all dtypes; the short list is part of it."""
    table = [
        Point(kernel, *case)
        for case in _cases()
        for kernel in KERNELS
        if kernel != "delta" or case[2] == "plain"  # which knows none of the switches
    ]
    return list(dict.fromkeys([*default_points(), *table]))


def points(every: bool = False) -> dict[str, Callable[..., Launch]]:
    """The short list or the whole table by name; each takes arch="sm_90", whose tiles it launches."""
    return {point.name: point.launch for point in (all_points() if every else default_points())}
