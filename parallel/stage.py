"""One stage at work: forward, backward, and what lives between them. Knows its neighbours, not the schedule.

The one idea: every message in or out is held in a dict by micro-batch, filled by one action and emptied by another;
when all are empty again nothing of the step is alive. A neighbour on the same rank hands over directly, without copy.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.parallel.gradients import GradSink
from plait.parallel.headers import PLAIN_DTYPES, Channel, Specs, TensorSpec, fits, grad_specs, specs_of
from plait.parallel.p2p import P2P, Receipt, Sent
from plait.parallel.recompute import recompute_early
from plait.parallel.results import StepState

# What torch.autograd.backward calls after checks that cost ten Python calls; the engine checks shapes itself.
_run_backward: Any = torch.autograd.Variable._execution_engine.run_backward
_EVALUATE_IN_FLIGHT = 2  # messages of a forward-only run that may be under way before the oldest is waited for


class StageRunner:
    """Runs one stage module of this rank.

    Owns the activations of its micro-batches from forward to backward, and the buffers lent by p2p for as long. The
    sink takes the weight gradients of all layers of the stage that can split them off.
    """

    def __init__(self, index: int, num_stages: int, module: nn.Module, state: StepState, p2p: P2P | None) -> None:
        self.index, self.module, self.state, self.p2p = index, module, state, p2p
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.previous: StageRunner | None = None  # neighbour on this rank; None: end of the pipeline or another rank
        self.next: StageRunner | None = None
        self.take: Channel | None = None  # channels to and from neighbours on other ranks
        self.give: Channel | None = None
        self.take_grad: Channel | None = None
        self.give_grad: Channel | None = None
        self.first_forward = self.first_backward = 0  # micro-batches that open the channels
        self.idle_before: frozenset[int] = frozenset()  # micro-batches whose gradient the plan lets the rank wait for
        self.sink = GradSink()
        self._foreign: list[nn.Parameter] = []  # parameters whose gradient autograd itself accumulates
        for layer in module.modules():
            if hasattr(layer, "weight_grads"):
                layer.weight_grads = self.sink  # type: ignore[assignment]
            else:
                own = layer.parameters(recurse=False)
                self._foreign += [p for p in own if not hasattr(p, "device_mesh")]  # of FSDP2: copies
        self._fresh: list[nn.Parameter] = []  # those of them without a gradient yet
        self._static: Specs | None = None  # what every micro-batch takes; None: not known, or a listed step
        self.specs: Sequence[Specs] = ()  # what the stage takes, by micro-batch
        self._grad_specs: Sequence[Specs] = ()  # of the gradients it sends back, by micro-batch
        self._out_specs: Specs = ()  # of its last outputs
        # Blocks of FSDP2 gather their weights when autograd comes to them, not before.
        self._may_recompute = not any(hasattr(param, "device_mesh") for param in module.parameters())
        self._has_recomputed = False
        self._wrapped: dict[type, tuple[Any, Tensor]] = {}
        self._seed: tuple[float, Tensor] | None = None
        self.clear()

    def clear(self) -> None:
        """Lets go of everything that belongs to a step."""
        self._inbox: dict[int, Receipt | tuple[Any, ...]] = {}
        self._grads: dict[int, Receipt | list[Tensor]] = {}
        self._alive: dict[int, tuple[tuple[Any, ...], tuple[Any, ...]]] = {}  # inputs and outputs
        self._lent: dict[int, list[tuple[tuple[TensorSpec, ...], Sequence[Tensor]]]] = {}  # buffers to give back
        self._outgoing: dict[int, tuple[Any, ...]] = {}
        self._outgoing_grads: dict[int, list[Tensor]] = {}
        self._sent: dict[int, Sent] = {}
        self._sent_grads: list[Sent] = []
        self._sent_forward_only: deque[tuple[Sent, int]] = deque()
        self.sink.clear()

    def begin(self) -> None:
        """Opens a step: says what will be received, from the micro-batches' inputs."""
        state = self.state
        self._fresh = [param for param in self._foreign if param.grad is None]
        if state.listed and self.give is not None and self.p2p is not None:
            self.p2p.follow(self.give)
        if self.is_first:
            return
        if state.listed:
            each = [tuple(self.module.input_specs(inputs)) for inputs in state.microbatches]  # type: ignore[operator]
            self._static, self.specs, self._grad_specs = None, each, [grad_specs(specs) for specs in each]
        else:
            specs = tuple(self.module.input_specs(state.microbatches[0]))  # type: ignore[operator]
            if specs != self._static:
                count = len(state.microbatches)
                self._static, self.specs, self._grad_specs = specs, [specs] * count, [grad_specs(specs)] * count
        if self.p2p is None or self.take is None or self.give_grad is None:
            return
        if self._static is not None:
            self.p2p.announce(self.take, self.first_forward, self._static)
        else:
            self.p2p.announce_each(self.take, self.first_forward, self.specs)
            if state.training:
                self.p2p.agree(self.give_grad, self._grad_specs)

    # ---- messages -------------------------------------------------------------------------------------------------

    def receive_forward(self, microbatch: int) -> None:
        """RECV_F."""
        assert self.p2p is not None and self.take is not None
        self._inbox[microbatch] = self.p2p.receive(self.take, microbatch)

    def receive_backward(self, microbatch: int) -> None:
        """RECV_B."""
        assert self.p2p is not None and self.take_grad is not None
        self._grads[microbatch] = self.p2p.receive(self.take_grad, microbatch)

    def send_forward(self, microbatch: int) -> None:
        """SEND_F. After the first, the stage knows which gradients will come back."""
        p2p, give = self.p2p, self.give
        assert p2p is not None and give is not None
        outputs = self._outgoing.pop(microbatch)
        self._describe(outputs, microbatch)
        tensors = []
        for value in outputs:
            tensors.append(value.detach() if isinstance(value, Tensor) else self._wrap(value))
        sent = p2p.send(give, microbatch, tensors, self._out_specs)
        if not self.state.training:
            self._forward_only_sent(sent, microbatch)
            return
        self._sent[microbatch] = sent
        if microbatch == self.first_forward:
            self._expect_gradients()

    def _expect_gradients(self) -> None:
        """Says what gradients this end expects: of the outputs sent, those that the receiver asked for."""
        p2p, give, take_grad = self.p2p, self.give, self.take_grad
        assert p2p is not None and give is not None and take_grad is not None
        if self.state.listed:
            p2p.agree(take_grad, [grad_specs(specs) for specs in p2p.listed(give)])
            return
        wanted = p2p.peer_grads(give, self.first_forward)
        grads = [TensorSpec(s.shape, s.dtype) for s, w in zip(self._out_specs, wanted, strict=True) if w]
        p2p.announce(take_grad, self.first_backward, tuple(grads))

    def send_backward(self, microbatch: int) -> None:
        """SEND_B."""
        assert self.p2p is not None and self.give_grad is not None
        grads = self._outgoing_grads.pop(microbatch)
        self._sent_grads.append(self.p2p.send(self.give_grad, microbatch, grads, self._grad_specs[microbatch]))

    def finish(self) -> None:
        """Waits for the sends of the step that nothing has shown to be done."""
        while self._sent_grads:
            self._sent_grads.pop().wait()
        while self._sent_forward_only:
            self._finish_forward_only()
        if self.state.training:
            self._may_recompute = self._has_recomputed

    def _describe(self, outputs: tuple[Any, ...], microbatch: int) -> None:
        """Sets the specs of what is sent; they may change within a step only if it is a listed one."""
        if fits(outputs, self._out_specs):
            return
        if microbatch != self.first_forward and not self.state.listed:
            raise ValueError(
                f"stage {self.index} micro-batch {microbatch}: outputs {[getattr(v, 'shape', v) for v in outputs]} "
                f"differ in shape or dtype from micro-batch {self.first_forward}'s; all of a step must be alike, "
                "unless the step gets a list of inputs"
            )
        self._out_specs = specs_of(outputs)

    def _forward_only_sent(self, sent: Sent, microbatch: int) -> None:
        self._sent_forward_only.append((sent, microbatch))
        if len(self._sent_forward_only) > _EVALUATE_IN_FLIGHT:
            self._finish_forward_only()

    def _finish_forward_only(self) -> None:
        sent, microbatch = self._sent_forward_only.popleft()
        sent.wait()
        self._give_back(microbatch)

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
        given = self._inbox.pop(microbatch)
        if isinstance(given, tuple):
            return given
        tensors = self._arrived(given)
        self._lent.setdefault(microbatch, []).append((given.specs, tensors))
        return self._leaves(tensors, microbatch)

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
                leaves.append(leaf.requires_grad_() if training and spec.needs_grad else leaf)
        return tuple(leaves)

    def backward(self, microbatch: int) -> None:
        """B: gradients of the input and of the weights."""
        self._backward(microbatch, deferring=False)
        self._give_back(microbatch)

    def backward_input(self, microbatch: int) -> None:
        """I: gradients of the input; layers that can split queue their weights' for W, others do all now."""
        self._backward(microbatch, deferring=True)
        if not self.sink.holds(microbatch):
            self._give_back(microbatch)
            return
        self.state.deferred += 1
        self.state.peak_deferred = max(self.state.peak_deferred, self.state.deferred)

    def backward_weight(self, microbatch: int) -> None:
        """W: the queued weight gradients of one micro-batch."""
        if self.sink.holds(microbatch):
            self.sink.run(microbatch)
            self.state.deferred -= 1
            self._give_back(microbatch)

    def _backward(self, microbatch: int, *, deferring: bool) -> None:
        """Runs autograd from the outputs' gradients and passes the inputs' on. The graph is gone when it returns."""
        state, sink = self.state, self.sink
        sink.microbatch, sink.deferring = microbatch, deferring
        x, outputs = self._alive.pop(microbatch)
        roots, seeds = self._loss_root(outputs[0]) if self.is_last else self._roots(microbatch, outputs)
        if roots:
            _run_backward(roots, seeds, False, False, (), allow_unreachable=True, accumulate_grad=True)
        state.live -= 1
        if self.is_first:
            self._own(microbatch, [])
            return
        grads = []
        for value, spec in zip(x, self.specs[microbatch], strict=True):
            if spec.needs_grad:
                grads.append(torch.zeros_like(value) if value.grad is None else value.grad)
        grads = self._own(microbatch, grads)
        if self.previous is not None:
            self.previous._grads[microbatch] = grads
        else:
            self._outgoing_grads[microbatch] = grads

    def _own(self, microbatch: int, grads: list[Tensor]) -> list[Tensor]:
        """Copies gradients that autograd passed through unchanged: they lie in a buffer that goes back to p2p."""
        if self.p2p is None or microbatch not in self._lent:
            return grads
        places = self.p2p.places
        if self._fresh:  # a gradient that is there already is added to, never replaced
            for param in self._fresh:
                if param.grad is not None and param.grad.untyped_storage().data_ptr() in places:
                    param.grad = param.grad.clone()
            self._fresh = [param for param in self._fresh if param.grad is None]
        return self._apart(grads)

    def _apart(self, values: Sequence[Any]) -> list[Any]:
        """The values, with copies of tensors that lie in a buffer of p2p: who gets them may need them longer."""
        places = self.p2p.places if self.p2p is not None else ()
        return [
            v.detach().clone() if isinstance(v, Tensor) and v.untyped_storage().data_ptr() in places else v
            for v in values
        ]

    def _loss_root(self, loss: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The loss of the last stage and its gradient, one over the divisor."""
        if self._seed is None or self._seed[0] != self.state.divisor or self._seed[1].dtype != loss.dtype:
            self._seed = (self.state.divisor, torch.ones_like(loss) / self.state.divisor)
        return ((loss,), (self._seed[1],)) if loss.requires_grad else ((), ())

    def _roots(self, microbatch: int, outputs: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Outputs that autograd starts from, with the gradients that came back for them."""
        grads = self._grads.pop(microbatch)
        if isinstance(grads, Receipt):
            if self._may_recompute:  # before the wait: what backward needs anyway, and more where there is time
                last = None if microbatch in self.idle_before else 1
                self._has_recomputed |= recompute_early(outputs, last) > 0
            receipt, grads = grads, self._arrived(grads)
            self._lent.setdefault(microbatch, []).append((receipt.specs, grads))
            self._sent.pop(microbatch).wait()  # done: the gradient was made from it
        roots, seeds, index = [], [], 0
        for output, wanted in zip(outputs, self._wanted(microbatch), strict=True):
            if wanted:
                if output.requires_grad:
                    roots.append(output)
                    seeds.append(grads[index])
                index += 1
        return tuple(roots), tuple(seeds)

    def _wanted(self, microbatch: int) -> Sequence[bool]:
        """For each output, whether the next stage gives a gradient back."""
        if self.next is not None:
            return [spec.needs_grad for spec in self.next.specs[microbatch]]
        assert self.p2p is not None and self.give is not None
        return self.p2p.peer_grads(self.give, microbatch)

    # ---- buffers --------------------------------------------------------------------------------------------------

    def _arrived(self, receipt: Receipt) -> list[Tensor]:
        """Waits for a message and counts the time."""
        start = time.perf_counter()
        tensors = receipt.wait()
        self.state.waited_s += time.perf_counter() - start
        return tensors

    def _wrap(self, value: Any) -> Tensor:
        """A plain value as a 0-dim tensor; the last one serves again while the value stays."""
        known = self._wrapped.get(type(value))
        if known is None or known[0] != value:
            assert self.p2p is not None
            tensor = torch.tensor(value, dtype=PLAIN_DTYPES[type(value)], device=self.p2p.device)
            known = self._wrapped[type(value)] = (value, tensor)
        return known[1]

    def _give_back(self, microbatch: int) -> None:
        """Returns the buffers of a micro-batch that is through with this stage."""
        for specs, tensors in self._lent.pop(microbatch, ()):
            assert self.p2p is not None
            self.p2p.release(specs, tensors)
