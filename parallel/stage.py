"""One stage at work: forward, backward, weight gradient, and the activations between them. Not which action is next.

What comes in and goes out is stage_messages.py's. The one idea: whatever a micro-batch holds lies in a dict by its
number, filled by one action and emptied by another; when all are empty again nothing of the step is alive. A
neighbour on the same rank hands over directly, without copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.parallel.p2p import P2P
from plait.parallel.recompute import recompute_early
from plait.parallel.results import StepState
from plait.parallel.stage_messages import StageMessages

# What torch.autograd.backward calls after checks that cost ten Python calls; the engine checks shapes itself.
_run_backward: Any = torch.autograd.Variable._execution_engine.run_backward


class StageRunner(StageMessages):
    """Runs one stage module of this rank.

    Owns the activations of its micro-batches from forward to backward. The sink takes the weight gradients of all
    layers of the stage that can split them off.
    """

    def __init__(self, index: int, num_stages: int, module: nn.Module, state: StepState, p2p: P2P | None) -> None:
        super().__init__(index, num_stages, module, state, p2p)
        self.idle_before: frozenset[int] = frozenset()  # micro-batches whose gradient the plan lets the rank wait for
        self._foreign: list[nn.Parameter] = []  # parameters whose gradient autograd itself accumulates
        for layer in module.modules():
            if hasattr(layer, "weight_grads"):
                layer.weight_grads = self.sink  # type: ignore[assignment]
            else:
                own = layer.parameters(recurse=False)
                self._foreign += [p for p in own if not hasattr(p, "device_mesh")]  # of FSDP2: copies
        self._fresh: list[nn.Parameter] = []  # those of them without a gradient yet
        # Blocks of FSDP2 gather their weights when autograd comes to them, not before.
        self._may_recompute = not any(hasattr(param, "device_mesh") for param in module.parameters())
        self._has_recomputed = False
        self._seed: tuple[float, Tensor] | None = None
        self.clear()

    def clear(self) -> None:
        """Lets go of everything that belongs to a step."""
        super().clear()
        self._alive: dict[int, tuple[tuple[Any, ...], tuple[Any, ...]]] = {}  # inputs and outputs
        self.sink.clear()

    def begin(self) -> None:
        """Opens a step."""
        self._fresh = [param for param in self._foreign if param.grad is None]
        super().begin()

    def finish(self) -> None:
        """Closes it."""
        super().finish()
        if self.state.training:
            self._may_recompute = self._has_recomputed

    # ---- computing ------------------------------------------------------------------------------------------------

    def forward(self, microbatch: int) -> None:
        """F: takes the input, runs the module, keeps both ends of the graph for backward."""
        state = self.state
        x = self._take(microbatch)
        outputs = self.module(x, state.microbatches[microbatch])
        if self.is_last:
            loss, count, extras = outputs
            state.results.append((loss.detach(), count, extras))
            outputs = (loss,)
        elif self.next is not None:
            self.next.hand_over(microbatch, self._apart(outputs) if microbatch in self._lent else outputs)
        else:
            self._outgoing[microbatch] = outputs
        if state.training:
            self._alive[microbatch] = (x, outputs)
            state.live += 1
            state.peak_live = max(state.peak_live, state.live)
        elif self.next is not None or self.is_last:
            self._give_back(microbatch)

    def _take(self, microbatch: int) -> tuple[Any, ...]:
        """The stage's input: () at the start, else what the neighbour gave, with gradients where the spec says."""
        if self.is_first:
            return ()
        given = self._inbox.pop(microbatch, None)
        if isinstance(given, tuple):
            return given
        return self._leaves(self._arrived(microbatch, given, self._take_way, self.take), microbatch)

    def hand_over(self, microbatch: int, outputs: Sequence[Any]) -> None:
        """Takes the outputs of the neighbour on this rank, cut from its graph."""
        if len(outputs) != (count := len(self.specs[microbatch])):
            raise ValueError(f"stage {self.index} takes {count} entries, stage {self.index - 1} gave {len(outputs)}")
        self._inbox[microbatch] = self._leaves(outputs, microbatch)

    def _leaves(self, values: Sequence[Any], microbatch: int) -> tuple[Any, ...]:
        training, leaves = self.state.training, []
        for value, spec in zip(values, self.specs[microbatch], strict=True):
            if not isinstance(value, Tensor):
                leaves.append(value)
            elif spec.plain:
                leaves.append(value.item())
            else:
                leaf = value.detach()
                if training and spec.needs_grad:
                    leaf.requires_grad = True
                leaves.append(leaf)
        return tuple(leaves)

    def backward(self, microbatch: int) -> None:
        """B: gradients of the input and of the weights."""
        self._backward(microbatch, deferring=False)
        self._free(microbatch)

    def backward_input(self, microbatch: int) -> None:
        """I: gradients of the input; layers that can split queue their weights' for W, others do all now."""
        self._backward(microbatch, deferring=True)
        if self.sink.holds(microbatch):
            self.state.deferred += 1
            self.state.peak_deferred = max(self.state.peak_deferred, self.state.deferred)
        self._free(microbatch)

    def backward_weight(self, microbatch: int) -> None:
        """W: the queued weight gradients of one micro-batch."""
        if self.sink.holds(microbatch):
            self.sink.run(microbatch)
            self.state.deferred -= 1
            self._free(microbatch)

    def _backward(self, microbatch: int, *, deferring: bool) -> None:
        """Runs autograd from the outputs' gradients and passes the inputs' on. The graph is gone when it returns."""
        state, sink = self.state, self.sink
        sink.microbatch, sink.deferring = microbatch, deferring
        x, outputs = self._alive.pop(microbatch)
        roots, seeds = self._loss_root(outputs[0]) if self.is_last else self._roots(microbatch, outputs)
        if roots:
            _run_backward(roots, seeds, False, False, (), allow_unreachable=True, accumulate_grad=True)
        state.live -= 1
        if self._fresh:
            self._own_fresh()
        if self.is_first:
            return
        grads = []
        for value, spec in zip(x, self.specs[microbatch], strict=True):
            if spec.needs_grad:
                grad = value.grad
                grads.append(torch.zeros_like(value) if grad is None else grad)
        if self.previous is None:
            self._outgoing_grads[microbatch] = grads
        else:
            self.previous._grads[microbatch] = self._apart(grads) if microbatch in self._lent else grads

    def _own_fresh(self) -> None:
        """Copies parameters' new gradients that lie in memory of p2p's: autograd passes some through unchanged.

        A gradient that is there already is added to, never replaced.
        """
        places = self.p2p.places if self.p2p is not None else ()
        for param in self._fresh:
            if param.grad is not None and param.grad.untyped_storage().data_ptr() in places:
                param.grad = param.grad.clone()
        self._fresh = [param for param in self._fresh if param.grad is None]

    def _loss_root(self, loss: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The loss of the last stage and its gradient, one over the divisor."""
        if self._seed is None or self._seed[0] != self.state.divisor or self._seed[1].dtype != loss.dtype:
            self._seed = (self.state.divisor, torch.ones_like(loss) / self.state.divisor)
        return ((loss,), (self._seed[1],)) if loss.requires_grad else ((), ())

    def _roots(self, microbatch: int, outputs: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Outputs that autograd starts from, with the gradients that came back for them."""
        grads = self._grads.pop(microbatch, None)
        if not isinstance(grads, list):
            if self._may_recompute:  # before the wait: what backward needs anyway, and more where there is time
                last = None if microbatch in self.idle_before else 1
                self._has_recomputed |= recompute_early(outputs, last) > 0
            grads = self._arrived(microbatch, grads, self._take_grad_way, self.take_grad)
            sent = self._sent.pop(microbatch, None)
            if sent is not None:
                sent.wait()  # done: the gradient was made from it
        roots, seeds, index = [], [], 0
        for output, wanted in zip(outputs, self._wanted(microbatch), strict=True):
            if wanted:
                if output.requires_grad:
                    roots.append(output)
                    seeds.append(grads[index])
                index += 1
        return tuple(roots), tuple(seeds)
