"""Cuts what a step is called with into micro-batches: one mapping of inputs for each.

Not here: what a stage does with them. The one idea: a batch is split into views along its rows; or the caller has cut
it already, and lengths may differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def split(inputs: Mapping[str, Any], targets: Tensor, num_microbatches: int) -> list[dict[str, Any]]:
    """One dict per micro-batch, of views."""
    rows = targets.shape[0]
    if rows % num_microbatches:
        raise ValueError(
            f"targets has {rows} rows, which {num_microbatches} micro-batches do not divide; all micro-batches "
            f"must have the same number of rows, so use {rows - rows % num_microbatches} or "
            f"{rows + -rows % num_microbatches}"
        )
    size = rows // num_microbatches
    whole: dict[str, Any] = {}
    parts: dict[str, tuple[Tensor, ...]] = {"targets": targets.split(size)}
    for key, value in inputs.items():
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == rows and not key.startswith("shared_"):
            parts[key] = value.split(size)
        else:
            whole[key] = value
    return [
        {**whole, **{key: part[m] for key, part in parts.items()}, "microbatch": m} for m in range(num_microbatches)
    ]


def listed(inputs: Any, targets: Any, num_microbatches: int) -> list[dict[str, Any]]:
    """One dict per micro-batch from lists that hold one entry for each."""
    for name, value in (("inputs", inputs), ("targets", targets)):
        if isinstance(value, Tensor) or not isinstance(value, Sequence) or len(value) != num_microbatches:
            what = f"{len(value)} entries" if isinstance(value, Sequence) else f"a {type(value).__name__}"
            raise ValueError(
                f"{name} is {what}; with inputs by micro-batch both are lists with one entry for each of the "
                f"{num_microbatches} micro-batches"
            )
    pairs = zip(inputs, targets, strict=True)
    return [{**given, "targets": target, "microbatch": m} for m, (given, target) in enumerate(pairs)]
