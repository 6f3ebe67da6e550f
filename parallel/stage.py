"""One stage at work: forward, backward, and what lives between them. Knows its neighbours, not the schedule.

The one idea: every message in or out is held in a dict by micro-batch, filled by one action and emptied by another;
when all are empty again nothing of the step is alive. A neighbour on the same rank hands over directly, without copy.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.parallel.gradients import GradSink
from plait.parallel.p2p import P2P, Channel, Receipt, Sent, TensorSpec

_PLAIN_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}
_EVALUATE_IN_FLIGHT = 2  # messages of a forward-only run that may be under way before the oldest is waited for


class StepState:
    """What all stages of a rank share during one step."""

    def __init__(self) -> None:
        self.microbatches: list[dict[str, Any]] = []
        self.training = True
        self.divisor = 1.0
        self.live = 0  # (stage, micro-batch) pairs between F and B or I
        self.peak_live = 0
        self.waited_s = 0.0  # of the action that runs
        self.results: list[tuple[Tensor, Any, Mapping[str, Any]]] = []  # (loss, count, extras) of the last stage


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
        self.sink = GradSink()
        self._foreign: list[nn.Parameter] = []  # parameters whose gradient autograd itself accumulates
        for layer in module.modules():
            if hasattr(layer, "weight_grads"):
                layer.weight_grads = self.sink  # type: ignore[assignment]
            else:
                self._foreign += layer.parameters(recurse=False)
        self.specs: tuple[TensorSpec, ...] = ()  # of what the stage takes
        self._grad_specs: tuple[TensorSpec, ...] = ()  # of the gradients it sends back
        self._out_specs: tuple[TensorSpec, ...] = ()
        self._out_grad_specs: tuple[TensorSpec, ...] = ()
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

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Opens a step: says what will be received, from the first micro-batch's inputs."""
        if self.is_first:
            return
        specs = tuple(self.module.input_specs(inputs))  # type: ignore[operator]
        if specs != self.specs:
            self.specs = specs
            self._grad_specs = tuple(TensorSpec(s.shape, s.dtype) for s in specs if s.needs_grad)
        if self.take is not None:
            assert self.p2p is not None
            self.p2p.announce(self.take, self.first_forward, self.specs)

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
        """SEND_F. After the first, the stage knows which gradients will come back and says so."""
        assert self.p2p is not None and self.give is not None
        outputs = self._outgoing.pop(microbatch)
        self._describe(outputs, microbatch)
        tensors = [v.detach() if isinstance(v, Tensor) else _wrap(v, self.p2p.device) for v in outputs]
        sent = self.p2p.send(self.give, microbatch, tensors, self._out_specs)
        if not self.state.training:
            self._forward_only_sent(sent, microbatch)
            return
        self._sent[microbatch] = sent
        if microbatch == self.first_forward:
            wanted = self.p2p.peer_grads(self.give)
            grads = [s for s, w in zip(self._out_specs, wanted, strict=True) if w]
            self._out_grad_specs = tuple(TensorSpec(s.shape, s.dtype) for s in grads)
            assert self.take_grad is not None
            self.p2p.announce(self.take_grad, self.first_backward, self._out_grad_specs)

    def send_backward(self, microbatch: int) -> None:
        """SEND_B."""
        assert self.p2p is not None and self.give_grad is not None
        grads = self._outgoing_grads.pop(microbatch)
        self._sent_grads.append(self.p2p.send(self.give_grad, microbatch, grads, self._grad_specs))

    def finish(self) -> None:
        """Waits for the sends of the step that nothing has shown to be done."""
        for sent in self._sent_grads:
            sent.wait()
        self._sent_grads = []
        while self._sent_forward_only:
            self._finish_forward_only()

    def _describe(self, outputs: tuple[Any, ...], microbatch: int) -> None:
        """Sets the specs of what is sent; they may change between steps, not within one."""
        same = len(outputs) == len(self._out_specs) and all(
            value.shape == spec.shape and value.dtype == spec.dtype and not spec.plain
            if isinstance(value, Tensor)
            else spec.plain and _PLAIN_DTYPES[type(value)] == spec.dtype
            for value, spec in zip(outputs, self._out_specs, strict=True)
        )
        if same:
            return
        if microbatch != self.first_forward:
            raise ValueError(
                f"stage {self.index} micro-batch {microbatch}: outputs {[getattr(v, 'shape', v) for v in outputs]} "
                f"differ in shape or dtype from micro-batch {self.first_forward}'s; all of a step must be alike"
            )
        self._out_specs = tuple(
            TensorSpec(tuple(v.shape), v.dtype)
            if isinstance(v, Tensor)
            else TensorSpec((), _PLAIN_DTYPES[type(v)], plain=True)
            for v in outputs
        )

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
            self.next.hand_over(microbatch, outputs)
        else:
            self._outgoing[microbatch] = outputs
        if state.training:
            self._alive[microbatch] = (x, outputs)
            state.live += 1
            state.peak_live = max(state.peak_live, state.live)
        elif self.next is not None:
            self.next.borrow(microbatch, self._lent.pop(microbatch, []))
        elif self.is_last:
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
        return self._leaves(tensors)

    def hand_over(self, microbatch: int, outputs: Sequence[Any]) -> None:
        """Takes the outputs of the neighbour on this rank, cut from its graph."""
        if len(outputs) != len(self.specs):
            raise ValueError(
                f"stage {self.index} takes {len(self.specs)} entries, stage {self.index - 1} gave {len(outputs)}"
            )
        self._inbox[microbatch] = self._leaves(outputs)

    def borrow(self, microbatch: int, lent: list[tuple[tuple[TensorSpec, ...], Sequence[Tensor]]]) -> None:
        """Forward only: takes over the neighbour's buffers, which its outputs may alias."""
        self._lent.setdefault(microbatch, []).extend(lent)

    def _leaves(self, values: Sequence[Any]) -> tuple[Any, ...]:
        training = self.state.training
        return tuple(
            value
            if not isinstance(value, Tensor)
            else value.item()
            if spec.plain
            else value.detach().requires_grad_(training and spec.needs_grad)
            for value, spec in zip(values, self.specs, strict=True)
        )

    def backward(self, microbatch: int) -> None:
        """B: gradients of the input and of the weights."""
        self._backward(microbatch, deferring=False)
        self._give_back(microbatch)

    def backward_input(self, microbatch: int) -> None:
        """I: gradients of the input; layers that can split queue their weights' for W, others do all now."""
        self._backward(microbatch, deferring=True)
        if not self.sink.pending:
            self._give_back(microbatch)

    def backward_weight(self, microbatch: int) -> None:
        """W: the queued weight gradients of one micro-batch."""
        self.sink.run(microbatch)
        self._give_back(microbatch)

    def _backward(self, microbatch: int, *, deferring: bool) -> None:
        """Runs autograd from the outputs' gradients and passes the inputs' on. The graph is gone when it returns."""
        state, sink = self.state, self.sink
        if microbatch in self._sent:
            self._sent.pop(microbatch).wait()  # done: the gradient that comes back was made from it
        grads = self._output_grads(microbatch)
        x, outputs = self._alive.pop(microbatch)
        sink.microbatch, sink.deferring = microbatch, deferring
        roots, seeds = self._roots(outputs, grads)
        if roots:
            torch.autograd.backward(roots, seeds)
        state.live -= 1
        if self.is_first:
            self._own(microbatch, [])
            return
        leaves = [v for v, spec in zip(x, self.specs, strict=True) if spec.needs_grad]
        input_grads = [torch.zeros_like(v) if v.grad is None else v.grad for v in leaves]
        input_grads = self._own(microbatch, input_grads)
        if self.previous is not None:
            self.previous._grads[microbatch] = input_grads
        else:
            self._outgoing_grads[microbatch] = input_grads

    def _own(self, microbatch: int, grads: list[Tensor]) -> list[Tensor]:
        """Copies gradients that autograd passed through unchanged: they lie in a buffer that goes back to p2p."""
        lent = self._lent.get(microbatch)
        if lent is None:
            return grads
        places = {t.untyped_storage().data_ptr() for _, tensors in lent for t in tensors}
        for param in self._foreign:
            if param.grad is not None and param.grad.untyped_storage().data_ptr() in places:
                param.grad = param.grad.clone()
        return [g.clone() if g.untyped_storage().data_ptr() in places else g for g in grads]

    def _output_grads(self, microbatch: int) -> list[Tensor]:
        if self.is_last:
            return []
        given = self._grads.pop(microbatch)
        if isinstance(given, list):
            return given
        tensors = self._arrived(given)
        self._lent.setdefault(microbatch, []).append((given.specs, tensors))
        return tensors

    def _roots(self, outputs: tuple[Any, ...], grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs that autograd starts from, with their gradients: the loss over the divisor, or what came back."""
        if self.is_last:
            loss = outputs[0]
            if self._seed is None or self._seed[0] != self.state.divisor or self._seed[1].dtype != loss.dtype:
                self._seed = (self.state.divisor, torch.ones_like(loss) / self.state.divisor)
            return ([loss], [self._seed[1]]) if loss.requires_grad else ([], [])
        if self.next is not None:
            wanted: Sequence[bool] = [spec.needs_grad for spec in self.next.specs]
        else:
            assert self.p2p is not None and self.give is not None
            wanted = self.p2p.peer_grads(self.give)
        pairs = zip((o for o, w in zip(outputs, wanted, strict=True) if w), grads, strict=True)
        used = [(output, grad) for output, grad in pairs if output.requires_grad]
        return [output for output, _ in used], [grad for _, grad in used]

    # ---- buffers --------------------------------------------------------------------------------------------------

    def _arrived(self, receipt: Receipt) -> list[Tensor]:
        """Waits for a message and counts the time."""
        start = time.perf_counter()
        tensors = receipt.wait()
        self.state.waited_s += time.perf_counter() - start
        return tensors

    def _give_back(self, microbatch: int) -> None:
        """Returns the buffers of a micro-batch that is through with this stage."""
        for specs, tensors in self._lent.pop(microbatch, ()):
            assert self.p2p is not None
            self.p2p.release(specs, tensors)


def _wrap(value: Any, device: torch.device) -> Tensor:
    """A plain value as a 0-dim tensor."""
    return torch.tensor(value, dtype=_PLAIN_DTYPES[type(value)], device=device)
