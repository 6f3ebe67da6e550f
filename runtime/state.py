"""The full state of a training run as `plait.ckpt` takes it: weights, optimizer, progress, generators.

The only place where a `Placement` of plait.parallel becomes a `Sharded` of plait.ckpt: neither knows the other. The
one idea: a tensor is said as its box of the full tensor and as one of how many equal copies, so that any other grid
can take it up; nothing in the state depends on wall clock, path, run or the number of steps that are still to come.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.ckpt import PerRank, Sharded
from plait.identity import Identity
from plait.parallel.random import capture_generators, restore_generators
from plait.parallel.sharded_adamw import Piece, ShardedAdamW


@dataclass
class Progress:
    """Where the run is: `step` steps are done."""

    run: Identity
    optimizer: ShardedAdamW
    step: int = 0
    tokens: int = 0

    @property
    def sample(self) -> int:
        """Global index of the next row."""
        return self.step * self.run.global_batch

    def advance(self, tokens: int) -> None:
        """One more step."""
        self.step += 1
        self.tokens += tokens

    def state_dict(self) -> dict[str, Any]:
        """Plain data, equal on all ranks."""
        return {
            "run": self.run.state_dict(),
            "step": self.step,
            "sample": self.sample,
            "tokens": self.tokens,
            "optimizer_steps": self.optimizer.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the place of a snapshot, which `plait.identity` found to be of this run."""
        self.step, self.tokens = state["step"], state["tokens"]
        self.optimizer.steps = state["optimizer_steps"]


class Generators:
    """The python, numpy and torch generators of this rank. Nothing of plait draws from them; user code may."""

    def __init__(self, seed: int) -> None:
        """Starts them from the run's seed, the same on all ranks."""
        random.seed(seed)
        torch.manual_seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)

    def state_dict(self) -> dict[str, Any]:
        """Each rank's own."""
        return {"rank": PerRank(capture_generators())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets them; a rank that the snapshot's grid did not have keeps its own."""
        restore_generators(state["rank"])


class Weights:
    """Weights, master weights and moments of this rank, as boxes of the full tensors."""

    def __init__(self, optimizer: ShardedAdamW) -> None:
        self.optimizer = optimizer
        self._kinds = self._describe()

    def state_dict(self) -> dict[str, Any]:
        """Views of live memory: name -> Sharded, by kind. The same objects each time, for the flat buffers that they
        view stay where they are: so a save knows them again (plait.ckpt.watch)."""
        return self._kinds

    def _describe(self) -> dict[str, dict[str, Sharded]]:
        kinds: dict[str, dict[str, Sharded]] = {"weights": {}, "master": {}, "exp_avg": {}, "exp_avg_sq": {}}
        for piece in self.optimizer.pieces():
            for kind, tensor in _tensors(piece):
                kinds[kind][piece.name] = Sharded(
                    tensor,
                    piece.placement.full_shape,
                    piece.placement.offset,
                    shape=piece.placement.shape,
                    flat=piece.flat,
                    replica=piece.replica,
                    holders=piece.placement.replica_ranks,
                )
        return {kind: tensors for kind, tensors in kinds.items() if tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The views hold the snapshot's values; brings the weights to the data-parallel peers. Collective."""
        self.optimizer.gather_params()


def _tensors(piece: Piece) -> Iterator[tuple[str, Tensor]]:
    yield "weights", piece.param
    if piece.master is not None:
        yield "master", piece.master
    yield "exp_avg", piece.exp_avg
    yield "exp_avg_sq", piece.exp_avg_sq


def run_state(progress: Progress) -> dict[str, Any]:
    """What a snapshot of a run holds. The order counts in a restore: generators come last."""
    return {
        "progress": progress,
        "training": Weights(progress.optimizer),
        "generators": Generators(progress.run.seed),
    }
