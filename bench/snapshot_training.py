"""A training loop beside which a state is saved: what its steps lose to the save. An optimizer changes every tensor
at the end of each step.

The forward and backward passes are matrix products of fixed size on so many threads: one is the host thread of a job
whose device computes, as many as cores a job that computes on the CPU. Not a model. The one idea: the optimizer
flips known bits, so that what a save held at its call can be told from what it holds of later steps.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

import torch

from plait.bench.snapshot_way import Pending, State

STEP_S = 0.25  # as a card takes for a few hundred million parameters; stated in the table
BASELINE = 3  # steps before a save, and after it
NUDGED = 1 << 14  # a step changes one of so many elements, so all memory of a state is in use, as an optimizer's is
MATRIX = 384  # rows and columns: in cache, so that memory bandwidth is left to the copies, as a card leaves it


class Nudge(torch.optim.Optimizer):
    """Flips the bits of a mask, a new one at each step, in an element of every 64 KiB of every tensor.

    In all of the memory, for what nobody touches for seconds a hypervisor may take away, 150 us a region to get back.
    """

    def __init__(self, state: State) -> None:
        super().__init__(list(state.values()), {})
        self.views = [value.view(torch.int32)[::NUDGED] for value in state.values()]
        self.count = self.flipped = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Changes every tensor, after the hooks of whoever guards it."""
        self.count += 1
        self.flip(1 + self.count % 0xFFFF)

    def flip(self, mask: int) -> None:
        """Flips low bits of the mantissas: no value becomes NaN or denormal."""
        for view in self.views:
            view.bitwise_xor_(mask)
        self.flipped ^= mask

    @contextlib.contextmanager
    def as_it_was(self, flipped: int) -> Iterator[None]:
        """The tensors as they were when so many bits were flipped, as long as the block lasts."""
        mask = self.flipped ^ flipped
        self.flip(mask)
        try:
            yield
        finally:
            self.flip(mask)


class Loss(NamedTuple):
    """What a save cost the loop: time lost beyond the same steps alone, how long the save took in it, what of the
    loss was the call, what waiting for the fence, and the state's flipped bits at the call."""

    lost_s: float
    complete_s: float
    stall_s: float
    fence_s: float
    flipped: int


class Training:
    """The loop. threads: torch's, for the products."""

    def __init__(self, state: State, step_s: float = STEP_S) -> None:
        self.optimizer = Nudge(state)
        self.left, self.right = torch.randn(2, MATRIX, MATRIX)
        self.out = torch.empty(MATRIX, MATRIX)
        self.step_s, self.products = step_s, 1

    def set_threads(self, threads: int) -> None:
        """Computes on so many threads from now on, as many products a step as fill its time."""
        torch.set_num_threads(threads)
        self.compute(20)
        took = []
        for _ in range(10):  # the fastest: a disturbed one would make steps of another length
            start = time.perf_counter()
            self.compute(10)
            took.append(time.perf_counter() - start)
        self.products = max(1, round(self.step_s * 10 / min(took)))

    def compute(self, products: int) -> None:
        """Forward and backward."""
        for _ in range(products):
            torch.mm(self.left, self.right, out=self.out)

    def steps(self, count: int) -> list[float]:
        """Returns the seconds of so many steps without a save."""
        took = []
        for _ in range(count):
            start = time.perf_counter()
            self.compute(self.products)
            self.optimizer.step()
            took.append(time.perf_counter() - start)
        return took

    def beside(self, begin: Callable[[], Pending]) -> tuple[Pending, Loss]:
        """Begins a save between two steps and trains on until it is complete; steps alone are timed around it."""
        self.steps(1)
        alone = self.steps(BASELINE)
        flipped, fence_s, count = self.optimizer.flipped, 0.0, 0
        start = time.perf_counter()
        pending = begin()
        stall_s, complete_s = time.perf_counter() - start, 0.0
        while not complete_s:
            self.compute(self.products)
            at_fence = time.perf_counter()
            pending.fence()
            self.optimizer.step()
            now = time.perf_counter()
            fence_s, count = fence_s + now - at_fence, count + 1
            complete_s = now - start if pending.done() else 0.0
        alone += self.steps(BASELINE)
        lost_s = complete_s - count * median(alone)
        return pending, Loss(lost_s, pending.durable_s() or complete_s, stall_s, fence_s, flipped)
