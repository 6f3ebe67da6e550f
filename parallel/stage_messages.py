"""What a stage takes from its neighbours and gives to them: activations one way, gradients the other.

Not here: computing (stage.py), and how a message travels (p2p.py, ways.py). The one idea: in a step like the one
before a channel has its quick way from the start, on which nothing is posted, nor described, nor waited for after it
was sent; every other message, and all of a first step, goes by P2P.
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
from plait.parallel.results import StepState
from plait.parallel.ways import WayIn, WayOut

_EVALUATE_IN_FLIGHT = 2  # messages of a forward-only run that may be under way before the oldest is waited for


class StageMessages:
    """The neighbours of one stage module of this rank, and what is between them and it.

    Owns what was received and not used up, and the memory lent by p2p for as long.
    """

    def __init__(self, index: int, num_stages: int, module: nn.Module, state: StepState, p2p: P2P | None) -> None:
        self.index, self.module, self.state, self.p2p = index, module, state, p2p
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.previous: Any = None  # neighbour on this rank; None: end of the pipeline or another rank
        self.next: Any = None
        self.take: Channel | None = None  # channels to and from neighbours on other ranks
        self.give: Channel | None = None
        self.take_grad: Channel | None = None
        self.give_grad: Channel | None = None
        self._take_way: WayIn | None = None  # their quick ways in this step
        self._give_way: WayOut | None = None
        self._take_grad_way: WayIn | None = None
        self._give_grad_way: WayOut | None = None
        self._quick_wanted: Sequence[bool] = ()  # for each output, with `_take_grad_way`: whether a gradient comes
        self.first_forward = self.first_backward = 0  # micro-batches that open the channels
        self._static: Specs | None = None  # what every micro-batch takes; None: not known, or a listed step
        self.sink = GradSink()
        self.specs: Sequence[Specs] = ()  # what the stage takes, by micro-batch
        self._grad_specs: Sequence[Specs] = ()  # of the gradients it sends back, by micro-batch
        self._out_specs: Specs = ()  # of its last outputs
        self._wrapped: dict[type, tuple[Any, Tensor]] = {}

    def clear(self) -> None:
        """Lets go of everything that belongs to a step."""
        self._inbox: dict[int, Receipt | tuple[Any, ...]] = {}
        self._grads: dict[int, Receipt | list[Tensor]] = {}
        self._lent: dict[int, list[Any]] = {}  # received messages to give back
        self._outgoing: dict[int, tuple[Any, ...]] = {}
        self._outgoing_grads: dict[int, list[Tensor]] = {}
        self._sent: dict[int, Sent] = {}
        self._sent_grads: list[Sent] = []
        self._sent_forward_only: deque[tuple[Sent, int]] = deque()

    # ---- a step's ends --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Opens a step: says what will be received, from the micro-batches' inputs, and finds the quick ways."""
        self._announce()
        self._take_way = self._give_way = self._take_grad_way = self._give_grad_way = None
        if self.p2p is None or self.state.listed:
            return
        self._take_way = self.p2p.way_in(self.take) if self.take else None
        self._give_way = self.p2p.way_out(self.give) if self.give else None
        self._take_grad_way = self.p2p.way_in(self.take_grad) if self.take_grad else None
        self._give_grad_way = self.p2p.way_out(self.give_grad) if self.give_grad else None
        if self._take_grad_way is not None and self.give is not None:
            self._quick_wanted = self.p2p.peer_grads(self.give, self.first_forward)

    @property
    def posts_nothing(self) -> bool:
        """Whether RECV_F and RECV_B do nothing in this step."""
        quick_forward = self.take is None or self._take_way is not None
        return quick_forward and (self.take_grad is None or self._take_grad_way is not None)

    def _announce(self) -> None:
        state = self.state
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

    def finish(self) -> None:
        """Waits for the sends of the step that nothing has shown to be done."""
        while self._sent_grads:
            self._sent_grads.pop().wait()
        while self._sent_forward_only:
            self._finish_forward_only()

    # ---- receiving ------------------------------------------------------------------------------------------------

    def receive_forward(self, microbatch: int) -> None:
        """RECV_F."""
        if self._take_way is None:
            assert self.p2p is not None and self.take is not None
            self._inbox[microbatch] = self.p2p.receive(self.take, microbatch)

    def receive_backward(self, microbatch: int) -> None:
        """RECV_B."""
        if self._take_grad_way is None:
            assert self.p2p is not None and self.take_grad is not None
            self._grads[microbatch] = self.p2p.receive(self.take_grad, microbatch)

    def _arrived(
        self, microbatch: int, receipt: Receipt | None, way: WayIn | None, channel: Channel | None
    ) -> list[Tensor]:
        """Waits for a message and counts the time."""
        start = time.perf_counter()
        message: Any = receipt
        if receipt is None and way is not None:
            message = way.take(microbatch)
        else:
            if receipt is None:  # its way ended in this step, when the shapes changed
                assert self.p2p is not None and channel is not None
                message = receipt = self.p2p.receive(channel, microbatch)
            receipt.wait()
        self.state.waited_s += time.perf_counter() - start
        if microbatch in self._lent:
            self._lent[microbatch].append(message)
        else:
            self._lent[microbatch] = [message]
        tensors: list[Tensor] = message.tensors
        return tensors

    def _free(self, microbatch: int) -> None:
        """Gives back what backward needed of messages, when weight gradients and those to send need it no more.

        The last of them does: a gradient may be the very message, and leaves before its memory is seen to.
        """
        if not self.sink.holds(microbatch) and microbatch not in self._outgoing_grads:
            self._give_back(microbatch)

    def _give_back(self, microbatch: int) -> None:
        """Returns the memory of messages to a micro-batch that is through with this stage."""
        for message in self._lent.pop(microbatch, ()):
            message.release()

    def _apart(self, values: Sequence[Any]) -> list[Any]:
        """The values, with copies of tensors that lie in memory of p2p's: who gets them may need them longer."""
        places, apart = self.p2p.places if self.p2p is not None else (), []
        for value in values:
            if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in places:
                value = value.detach().clone()
            apart.append(value)
        return apart

    # ---- sending --------------------------------------------------------------------------------------------------

    def send_forward(self, microbatch: int) -> None:
        """SEND_F. After the first, the stage knows which gradients will come back."""
        outputs = self._outgoing.pop(microbatch)
        way = self._give_way
        if way is not None and way.send(microbatch, outputs):
            if not self.state.training:
                self._give_back(microbatch)
            return
        p2p, give = self.p2p, self.give
        assert p2p is not None and give is not None
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
        self._take_grad_way = p2p.way_in(take_grad)
        self._quick_wanted = wanted

    def send_backward(self, microbatch: int) -> None:
        """SEND_B."""
        grads = self._outgoing_grads.pop(microbatch)
        way = self._give_grad_way
        if way is None or not way.send(microbatch, grads):
            assert self.p2p is not None and self.give_grad is not None
            grads = self._apart(grads) if microbatch in self._lent else grads
            self._sent_grads.append(self.p2p.send(self.give_grad, microbatch, grads, self._grad_specs[microbatch]))
        self._free(microbatch)

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

    def _wanted(self, microbatch: int) -> Sequence[bool]:
        """For each output, whether the next stage gives a gradient back."""
        if self.next is not None:
            return [spec.needs_grad for spec in self.next.specs[microbatch]]
        if self._take_grad_way is not None:
            return self._quick_wanted
        assert self.p2p is not None and self.give is not None
        return self.p2p.peer_grads(self.give, microbatch)

    def _wrap(self, value: Any) -> Tensor:
        """A plain value as a 0-dim tensor; the last one serves again while the value stays."""
        known = self._wrapped.get(type(value))
        if known is None or known[0] != value:
            assert self.p2p is not None
            tensor = torch.tensor(value, dtype=PLAIN_DTYPES[type(value)], device=self.p2p.device)
            known = self._wrapped[type(value)] = (value, tensor)
        return known[1]
