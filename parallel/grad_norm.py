"""The norm of all gradients of the grid, and the factor that clips them.

Not here: which rank counts which element (data.py, fully_sharded.py). The one idea: each rank sums over what it
counts, one all-reduce over the world adds the sums, and nobody waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from plait.kernels import l2_norm_squared
from plait.parallel.collectives import all_reduce
from plait.parallel.mesh import Mesh


def norm_power_of(parts: Sequence[Tensor], p: float, device: torch.device) -> Tensor:
    """Returns sum |g|^p over flat fp32 and fp64 tensors (max |g| for inf), fp64, 0-dim. ValueError for another p."""
    if p not in (1.0, 2.0, float("inf")):
        raise ValueError(f"p={p} must be 1, 2 or inf")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for dtype in (torch.float32, torch.float64):
        some = [part for part in parts if part.dtype == dtype]
        if some and p == 2.0:
            total += l2_norm_squared(some)
        elif some:
            norms = torch.stack(torch._foreach_norm(some, p))
            total = total + norms.sum() if p == 1.0 else torch.maximum(total, norms.max().double())
    return total


class GridNorm:
    """The norm of a grid's gradients for a class that knows its rank's part of it, `norm_power`."""

    mesh: Mesh

    def norm_power(self, p: float = 2.0) -> Tensor:
        """This rank's part of sum |g|^p over the grid (max |g| for inf), fp64, 0-dim."""
        raise NotImplementedError

    def norm_squared(self) -> Tensor:
        """This rank's part of the squared norm, fp64, 0-dim: the sum over the world is the squared norm."""
        return self.norm_power(2.0)

    def grad_norm(self, p: float = 2.0) -> Tensor:
        """The norm of all gradients of the grid, fp64, 0-dim, the same on every rank; collective over the world."""
        world = self.mesh.axis(*self.mesh.grid.names)
        total = all_reduce(self.norm_power(p), world, "max" if p == float("inf") else "sum")
        return total.sqrt() if p == 2.0 else total


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What to multiply the gradients by so that their norm is at most `max_norm`; 0-dim, of the norm's dtype.

    A norm that is not finite gives NaN, never a silent zero: the caller skips such a step.
    """
    if not max_norm > 0.0:
        raise ValueError(f"max_norm is {max_norm}; it must be above 0")
    factor = (max_norm / norm).clamp(max=1.0)
    return torch.where(norm.isfinite(), factor, torch.full_like(norm, math.nan))
