"""What a timed call of a problem is: forward, backward or both, on copies of the data that calls take in turn.

The one idea: a call returns its results, and whatever must be done before it (a forward, for a backward alone) is
somebody else's, untimed. Draws, times and compares nothing; kernel_jobs.py makes contenders of these calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch._functorch.config as functorch
from torch import Tensor

from plait.bench.problem import Op, Params

Results = Sequence[Tensor]


class Rotation:
    """Which copy of the data the next call takes. All providers of a case share it, so that a copy is used again only
    after all others, whoever used them; results are held as long as their copy, so that they are not written over
    what was written last."""

    def __init__(self, copies: int) -> None:
        self.copies, self.turn = copies, 0
        self.held: dict[tuple[object, int], Results] = {}

    def next(self) -> int:
        """The copy that comes now."""
        self.turn = (self.turn + 1) % self.copies
        return self.turn

    def restart(self) -> None:
        """The next call takes the first copy."""
        self.turn = self.copies - 1

    def over(self, calls: Sequence[Callable[[], Results]]) -> Callable[[], Results]:
        """One call that goes through these, one a copy; of a single copy, the call itself."""
        if len(calls) == 1:
            return calls[0]
        owner = object()

        def call() -> Results:
            index = self.next()
            self.held.pop((owner, index), None)  # freed first, so that its memory can be taken again
            results = self.held[owner, index] = calls[index]()
            return results

        return call


@dataclass(frozen=True)
class Data:
    """One copy: inputs, and the gradients of the outputs."""

    inputs: list[Tensor]
    douts: list[Tensor]

    def copied(self, backward: bool) -> Data:
        """Another one, of the same numbers elsewhere."""
        inputs = [value.detach().clone().requires_grad_(backward) for value in self.inputs]
        return Data(inputs, [value.clone() for value in self.douts])

    def take(self, other: Data) -> None:
        """Copies the other's numbers."""
        for value, source in zip([*self.inputs, *self.douts], [*other.inputs, *other.douts], strict=True):
            value.detach().copy_(source.detach())


def results_of(op: Op, inputs: Sequence[Tensor], douts: Sequence[Tensor], backward: bool) -> Results:
    """Outputs of op(*inputs) and, with `backward`, the gradients of the inputs for these output gradients."""
    if not backward:
        with torch.no_grad():
            out = op(*inputs)
        return out if isinstance(out, tuple) else (out,)
    out = op(*inputs)
    outs = out if isinstance(out, tuple) else (out,)
    grads = torch.autograd.grad(outs, inputs, douts)
    return [*(value.detach() for value in outs), *grads]


class Reverse:
    """The backward alone, on one copy of the data. `forward` goes there, untimed, whenever the inputs are new; a call
    comes back, with the graph kept for the next one."""

    def __init__(self, op: Op, data: Data) -> None:
        self.op, self.data = op, data
        self.outs: tuple[Tensor, ...] = ()

    def forward(self) -> None:
        self.outs = ()  # its memory first
        with functorch.patch(donated_buffer=False):  # torch.compile would give a backward what it needs once only
            out = self.op(*self.data.inputs)
        self.outs = out if isinstance(out, tuple) else (out,)

    def __call__(self) -> Results:
        return torch.autograd.grad(self.outs, self.data.inputs, self.data.douts, retain_graph=True)


def calls_over(op: Op, copies: Sequence[Data], p: Params) -> tuple[list[Callable[[], Results]], Callable[[], None]]:
    """What is timed, by copy, and what must be done before it whenever the inputs are new."""
    if not p.get("alone"):
        return [functools.partial(results_of, op, d.inputs, d.douts, p["backward"]) for d in copies], lambda: None
    reverses = [Reverse(op, data) for data in copies]

    def forward() -> None:
        for reverse in reverses:
            reverse.forward()

    return list(reverses), forward
