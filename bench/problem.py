"""What a problem of the `kernels` suite is: inputs, oracle, and who computes it; and where its tensors come from.

A problem is built from a case's params on one device. Inputs are random normal numbers; all providers share them,
except those that overwrite their inputs or want another layout: they get copies of their own. Times nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Op = Callable[..., Any]  # tensors -> a tensor or a tuple of them
Params = dict[str, Any]
EPS = 1e-6


def same(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """As they are."""
    return tensors


@dataclass(frozen=True)
class Peer:
    """A provider with inputs of its own. `adapt` makes them from the shared ones; `unite` brings results
    (outputs, then gradients) into the layout of the oracle's."""

    op: Op
    adapt: Callable[[Sequence[Tensor]], Sequence[Tensor]] = lambda inputs: [value.clone() for value in inputs]
    unite: Callable[[Sequence[Tensor]], Sequence[Tensor]] = same


@dataclass(frozen=True)
class Problem:
    """ops: name -> how to compute it, or why it cannot run here (text). `inputs` are those that have gradients;
    `early`: those whose forward makes the gradients, so that their backward alone is no work."""

    inputs: tuple[Tensor, ...]
    oracle: Op
    ops: dict[str, Op | Peer | str]
    stds: tuple[float, ...] = ()  # of the inputs; () is 1 for all
    early: tuple[str, ...] = ()


class Maker:
    """Draws the tensors of a problem."""

    def __init__(self, params: Params, seed: int) -> None:
        self.device, self.dtype = torch.device(params["device"]), getattr(torch, params["dtype"])
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Random normal numbers of the case's dtype."""
        return torch.randn(*shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def indices(self, count: int, limit: int) -> Tensor:
        """int64 [count] in [0, limit)."""
        return torch.randint(limit, (count,), generator=self.generator, device=self.device)

    def rng(self) -> Tensor:
        """The seed and offset of a mask, int64 [2]."""
        return torch.tensor([17, 5], device=self.device)

    def liger(self, name: str, use: Callable[[Any], Op | Peer]) -> Op | Peer | str:
        """use(Liger's function `name`, or its Function of that name), or why there is none."""
        if importlib.util.find_spec("liger_kernel") is None:
            return "liger_kernel is not installed"
        if self.device.type != "cuda":
            return "Liger's kernels need a GPU"
        if name.endswith("Function"):
            return use(getattr(importlib.import_module("liger_kernel.ops"), name).apply)
        return use(getattr(importlib.import_module("liger_kernel.transformers.functional"), name))

    def flash(self, name: str, use: Callable[[Any], Op]) -> Op | str:
        """use(the function `name` of flash_attn), or why there is none."""
        if importlib.util.find_spec("flash_attn") is None:
            return "flash_attn is not installed"
        if self.device.type != "cuda":
            return "flash_attn needs a GPU"
        return use(getattr(importlib.import_module("flash_attn"), name))


def halves(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Copies of gate and up, for a provider that takes them apart."""
    return [half.clone() for half in inputs[0].chunk(2, -1)]


def unite_halves(results: Sequence[Tensor]) -> Sequence[Tensor]:
    """The output, and the gradients of gate and up side by side."""
    return [results[0], *([torch.cat(tuple(results[1:]), -1)] if results[1:] else [])]
