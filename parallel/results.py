"""What a rank's stages share during a step, and its result: sums of the last stage become means on every rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.parallel.collectives import all_reduce
from plait.parallel.mesh import Mesh

_MAX_EXTRAS = 14  # with loss and count the message is 16 numbers, whatever a stage returns
_NAME_BYTES = 1024


@dataclass(frozen=True)
class StepResult:
    """fp64 0-dim tensors on the mesh's device. Means over the divisor but `count`, which is a sum."""

    loss: Tensor
    count: Tensor
    extras: dict[str, Tensor]


class StepState:
    """What all stages of a rank share during one step."""

    def __init__(self) -> None:
        self.microbatches: list[dict[str, Any]] = []
        self.listed = False  # each micro-batch has shapes of its own
        self.training = True
        self.divisor = 1.0
        self.live = 0  # (stage, micro-batch) pairs between F and B or I
        self.peak_live = 0
        self.deferred = 0  # those with queued weight gradients, from I to W
        self.peak_deferred = 0
        self.waited_s = 0.0  # of the action that runs
        self.results: list[tuple[Tensor, Any, Mapping[str, Any]]] = []  # (loss, count, extras) of the last stage


class Results:
    """Adds up what the last stage returned and shares it. The names of the extras travel once."""

    def __init__(self, mesh: Mesh, *, is_last: bool) -> None:
        self.device, self.is_last = mesh.device, is_last
        # Ranks of one tp group hold the same loss already.
        self._axis = mesh.axis(*[name for name in mesh.sizes if name != "tp"])
        self._names: list[str] | None = None

    def collect(
        self, results: Sequence[tuple[Tensor, Any, Mapping[str, Any]]], divisor: float | None, metrics: str
    ) -> StepResult:
        """Sums over micro-batches, and over the mesh for metrics="mean"; divisor=None divides by the count."""
        if not results and (metrics == "local" or self._axis.size == 1):
            loss, count = (torch.zeros((), dtype=torch.float64, device=self.device) for _ in range(2))
            return StepResult(loss, count, {})
        names = sorted(results[0][2]) if results else []
        sums = [self._sum([r[0] for r in results]), self._sum([r[1] for r in results])]
        sums += [self._sum([r[2][name] for r in results]) for name in names]
        if metrics == "mean" and self._axis.size > 1:
            names, sums = self._shared(names, sums)
        count = sums[1]
        below = count.clamp(min=1) if divisor is None else divisor
        return StepResult(sums[0] / below, count, {n: s / below for n, s in zip(names, sums[2:], strict=True)})

    def _sum(self, values: list[Any]) -> Tensor:
        """Sum of tensors or numbers in fp64; one addition per micro-batch, in order."""
        if values and isinstance(values[0], Tensor):
            return torch.stack([v.detach() for v in values]).double().sum()
        return torch.tensor(float(sum(values)), dtype=torch.float64, device=self.device)

    def _shared(self, names: list[str], sums: list[Tensor]) -> tuple[list[str], list[Tensor]]:
        """One all-reduce of 16 numbers; only last stages contribute."""
        if len(names) > _MAX_EXTRAS:
            raise ValueError(f"extras has {len(names)} entries, {_MAX_EXTRAS} at most: {names}")
        if self._names is None:
            self._names = self._share_names(names)
        if self.is_last and names != self._names:
            raise ValueError(f"extras has entries {names}; the first step had {self._names}")
        message = torch.zeros(2 + _MAX_EXTRAS, dtype=torch.float64, device=self.device)
        if self.is_last:
            message[: len(sums)] = torch.stack(sums)
        all_reduce(message, self._axis)
        return self._names, list(message[: 2 + len(self._names)].unbind())

    def _share_names(self, names: list[str]) -> list[str]:
        """Every rank learns the names from the last stages, which all have the same."""
        text = json.dumps(names).encode() if self.is_last else b""
        if len(text) > _NAME_BYTES:
            raise ValueError(f"names of extras take {len(text)} bytes, {_NAME_BYTES} at most: {names}")
        message = torch.zeros(_NAME_BYTES, dtype=torch.int32, device=self.device)
        if text:
            message[: len(text)] = torch.tensor(list(text), dtype=torch.int32, device=self.device)
        all_reduce(message, self._axis, "max")
        return json.loads(bytes(message.tolist()).rstrip(b"\0"))
