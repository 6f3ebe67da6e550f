"""Carries out a schedule on this rank's stages: any that passes `check`; gloo, NCCL, or one rank without messages.

Not here: what a stage does (stage.py), how a message travels (p2p.py), which order is good (schedules). The one idea:
at construction the lane of this rank becomes a list of bound methods and micro-batches; a step just calls them in
order. Receives are posted where the lowered lane says and waited for by the action that uses them; sends are never
waited for by compute.

Gradients are sums over micro-batches of the gradient of loss_sum / divisor. Nothing else is ever scaled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from plait.parallel import microbatches
from plait.parallel.gradients import inseparable
from plait.parallel.headers import Channel, ChannelError, ChannelTimeout, TensorSpec
from plait.parallel.mesh import Mesh
from plait.parallel.p2p import P2P
from plait.parallel.results import Results, StepResult, StepState
from plait.parallel.schedules import Action, Event, Op, Schedule, lower, on_one_rank
from plait.parallel.schedules.action import BACKWARD, COMPUTE, PER_STAGE, WEIGHT, singles
from plait.parallel.schedules.lowering import idle_before
from plait.parallel.stage import StageRunner

__all__ = ["ChannelError", "ChannelTimeout", "GradientReducer", "Pipeline", "StepResult", "TensorSpec"]


class GradientReducer(Protocol):
    """What the pipeline asks of data parallelism (plait.parallel.data.DataParallel)."""

    whole_stages: int  # of a rank, whose weights are gathered at one time; 0: weights are never apart

    def unshard(self, stage: int) -> None:
        """UNSHARD: the stage's weights are needed soon; start to gather them."""

    def reshard(self, stage: int) -> None:
        """RESHARD: other stages come first; let go of the stage's gathered weights."""

    def open(self, stage: int) -> None:
        """The stage's last micro-batch is about to add its weight gradients."""

    def tie(self, stage: int) -> None:
        """TIE_GRAD: sum the gradient of the tied weight over its two copies."""

    def reduce(self, stage: int) -> None:
        """REDUCE_GRAD: the stage's gradients are complete on this rank; start what has not started."""


# One entry of the plan: the method, its argument, and the action for the timeline (None: not computing).
_Entry = tuple[Callable[[int], None], int, Action | None]
_POSTING = ("receive_forward", "receive_backward")  # methods


class Pipeline:
    """This rank's part of a pipeline.

    `stages` maps stage index to module, exactly the stages that the schedule places on this rank. A module has
    `forward(x: tuple, inputs: dict) -> tuple` with x = () on the first stage, and, unless it is the first,
    `input_specs(inputs) -> tuple[TensorSpec, ...]` of what it takes; the last returns (loss_sum, count, extras),
    extras a dict of 0-dim sums. `inseparable` names, by stage, the layers whose weight gradients cannot wait for W.

    On a mesh whose pipeline axis has size 1 a schedule for several ranks runs whole on this rank. Construction is
    collective over the pipeline axis. Raises ScheduleError or ValueError before any message.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        mesh: Mesh,
        *,
        data_parallel: GradientReducer | None = None,
    ) -> None:
        axis = mesh.axis("pp")
        if axis.size == 1 and schedule.num_ranks > 1:
            schedule = on_one_rank(schedule)
        if axis.size != schedule.num_ranks:
            raise ValueError(
                f"schedule {schedule.name} is for {schedule.num_ranks} ranks; mesh axis pp has {axis.size}"
            )
        mine = schedule.stages_of(axis.coord)
        if tuple(sorted(stages)) != mine:
            raise ValueError(
                f"stages={sorted(stages)}: schedule {schedule.name} places stages {list(mine)} on coordinate "
                f"{axis.coord} of pp"
            )
        self.report = schedule.check()
        self.schedule, self.mesh = schedule, mesh
        self._axis, self._data_parallel = axis, data_parallel
        self._state = StepState()
        lowered = lower(schedule, unshard=data_parallel.whole_stages if data_parallel is not None else 0)
        if lowered is not schedule:
            lowered.check()
        self._lane = lowered.lanes[axis.coord]
        channels = _channels(schedule)
        self._p2p = self._connect(channels)
        self._runners = {s: StageRunner(s, schedule.num_stages, stages[s], self._state, self._p2p) for s in mine}
        self._wire(channels)
        self.inseparable = {index: inseparable(stages[index]) for index in mine}
        messages = {a for a in self._lane if a.op in (Op.SEND_F, Op.RECV_F)}
        forward_only = [s for s in singles(self._lane) if s.op is Op.F or s in messages]
        plans = {True: self._make_plan(self._lane), False: self._make_plan(forward_only)}
        self._plans = {  # by training, and whether anything is to be posted
            (training, posts): [entry for entry in plan if posts or entry[0].__name__ not in _POSTING]
            for training, plan in plans.items()
            for posts in (True, False)
        }
        self._results = Results(mesh, is_last=schedule.num_stages - 1 in stages)
        self._events: list[tuple[Action, float, float, float]] = []
        self._broken = ""
        self._running: Action | str = ""  # for the text of a failure

    # ---- construction ---------------------------------------------------------------------------------------------

    def _connect(self, channels: list[Channel]) -> P2P | None:
        if self._axis.size == 1:
            return None
        mine = [c for c in channels if self._axis.coord in (c.source, c.target)]
        return P2P(self.mesh, mine, self.schedule.num_microbatches)

    def _wire(self, channels: list[Channel]) -> None:
        """Tells each stage its neighbours: local runners or channels."""
        by_maker = {(c.stage, c.kind): c for c in channels}
        compute = [s for s in singles(self._lane) if s.op in COMPUTE]
        idle = idle_before(self.schedule, self._axis.coord)
        for index, runner in self._runners.items():
            runner.previous, runner.next = self._runners.get(index - 1), self._runners.get(index + 1)
            runner.take, runner.give = by_maker.get((index - 1, "F")), by_maker.get((index, "F"))
            runner.take_grad, runner.give_grad = by_maker.get((index + 1, "G")), by_maker.get((index, "G"))
            mine = [s for s in compute if s.stage == index]
            runner.first_forward = next(s.microbatch or 0 for s in mine if s.op is Op.F)
            runner.first_backward = next(s.microbatch or 0 for s in mine if s.op in BACKWARD)
            runner.idle_before = frozenset(microbatch for stage, microbatch in idle if stage == index)

    def _make_plan(self, lane: Any) -> list[_Entry]:
        """The lane as calls; with data parallelism, `open` comes before each stage's last weight gradient."""
        last = {s.stage: index for index, a in enumerate(lane) for s in a.singles if s.op in WEIGHT}
        plan: list[_Entry] = []
        for index, action in enumerate(lane):
            if action.parts:
                plan += [(self._opener(), s.stage, None) for s in action.parts if self._opens(last, s, index)]
                calls = [(self._call(s), s.microbatch) for s in action.parts]
                plan.append((_both(calls), 0, action))
                continue
            if self._opens(last, action, index):
                plan.append((self._opener(), action.stage, None))
            if action.op in COMPUTE:
                plan.append((self._call(action), action.microbatch, action))
            elif action.op in PER_STAGE:
                if self._data_parallel is not None:
                    timed = action if action.op in (Op.TIE_GRAD, Op.REDUCE_GRAD) else None
                    plan.append((self._of_data_parallel(action.op), action.stage, timed))
            else:
                plan.append((self._call(action), action.microbatch, None))
        return plan

    def _opens(self, last: dict[int, int], action: Action, index: int) -> bool:
        return self._data_parallel is not None and action.op in WEIGHT and last[action.stage] == index

    def _opener(self) -> Callable[[int], None]:
        assert self._data_parallel is not None
        return self._data_parallel.open

    def _of_data_parallel(self, op: Op) -> Callable[[int], None]:
        dp = self._data_parallel
        assert dp is not None
        return {Op.TIE_GRAD: dp.tie, Op.REDUCE_GRAD: dp.reduce, Op.UNSHARD: dp.unshard, Op.RESHARD: dp.reshard}[op]

    def _call(self, action: Action) -> Callable[[int], None]:
        """The method of the stage's runner that does the action."""
        runner = self._runners[action.stage]
        return {
            Op.F: runner.forward,
            Op.B: runner.backward,
            Op.I: runner.backward_input,
            Op.W: runner.backward_weight,
            Op.SEND_F: runner.send_forward,
            Op.RECV_F: runner.receive_forward,
            Op.SEND_B: runner.send_backward,
            Op.RECV_B: runner.receive_backward,
        }[action.op]

    # ---- running --------------------------------------------------------------------------------------------------

    def step(
        self,
        inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        targets: Tensor | Sequence[Tensor],
        divisor: float,
        *,
        metrics: Literal["mean", "local"] = "mean",
    ) -> StepResult:
        """One step: forward and backward of all micro-batches; gradients are added to what is there.

        Every tensor of `inputs` whose dim 0 is that of `targets` (B) and whose key does not start with "shared_" is
        split into M equal parts, as `targets` is; stages get them with "microbatch", "targets" and in training
        "sum_grad" added: 1 / divisor, the gradient that loss_sum will get. Or `inputs` is a list of M such mappings
        and `targets` a list of M tensors, one for each micro-batch: nothing is split, and lengths may differ. All
        ranks of a pipeline get the same form and shapes.

        `divisor` is the number of tokens that the loss is a mean over. metrics="mean": all ranks get the means over
        the whole mesh, by one all-reduce; "local": no message, each rank gets its own share (zero without the last
        stage). Raises ValueError when M does not divide B or a list has not M entries; ChannelError, ChannelTimeout
        when a peer disagrees or is gone.
        """
        return self._one(inputs, targets, float(divisor), metrics, training=True)

    def evaluate(
        self,
        inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        targets: Tensor | Sequence[Tensor],
        divisor: float | None = None,
        *,
        metrics: Literal["mean", "local"] = "mean",
    ) -> StepResult:
        """Forward only, in eval mode, without gradients; arguments as in `step`. divisor=None: the mesh's count."""
        training = [m for runner in self._runners.values() for m in runner.module.modules() if m.training]
        for module in training:
            module.training = False
        try:
            return self._one(inputs, targets, None if divisor is None else float(divisor), metrics, training=False)
        finally:
            for module in training:
                module.training = True

    def _one(self, inputs: Any, targets: Any, divisor: float | None, metrics: str, *, training: bool) -> StepResult:
        """A step or an evaluation. A failure leaves the pipeline unusable, but holds on to nothing."""
        if self._broken:
            raise RuntimeError(f"this pipeline failed before ({self._broken}); make a new one")
        if metrics not in ("mean", "local"):
            raise ValueError(f"metrics={metrics!r} must be 'mean' or 'local'")
        state, count = self._state, self.schedule.num_microbatches
        listed = not isinstance(inputs, Mapping)
        cut = microbatches.listed if listed else microbatches.split
        state.microbatches = cut(inputs, targets, count)
        if training and divisor:
            for each in state.microbatches:
                each["sum_grad"] = 1.0 / divisor
        state.listed = listed and count > 1  # the only micro-batch needs no list
        state.training, state.divisor, state.results = training, divisor or 0.0, []
        state.live = state.peak_live = state.deferred = state.peak_deferred = 0
        self._running = "the start of the step"
        try:
            with torch.set_grad_enabled(training):
                self._run(training)
            self._running = "the means of the step"
            return self._results.collect(state.results, divisor, metrics)
        except BaseException as error:
            self._broken = f"{type(error).__name__} at {self._running}: {error}"
            for runner in self._runners.values():
                runner.clear()
            raise
        finally:
            state.microbatches = []

    def _run(self, training: bool) -> None:
        """Opens the step, calls its plan in order, and waits for what is still under way."""
        clock, state, events = time.perf_counter, self._state, []
        if self._p2p is not None:
            self._p2p.begin(state.listed)
        for runner in self._runners.values():
            runner.begin()
        posts = not all(runner.posts_nothing for runner in self._runners.values())
        for call, argument, action in self._plans[training, posts]:
            if action is None:
                call(argument)
                continue
            self._running, state.waited_s = action, 0.0
            start = clock()
            call(argument)
            events.append((action, start, clock(), state.waited_s))
        for runner in self._runners.values():
            runner.finish()
        self._events = events

    # ---- what was measured ----------------------------------------------------------------------------------------

    @property
    def timeline(self) -> tuple[Event, ...]:
        """The last step's computing actions in host seconds from its first: each starts when its messages are there.

        `wait` is how long it waited for them before. On CUDA these are times of the host, not of the device.
        """
        if not self._events:
            return ()
        origin = self._events[0][1]
        return tuple(Event(a, start + wait - origin, end - origin, wait) for a, start, end, wait in self._events)

    @property
    def peak_activations(self) -> int:
        """The most (stage, micro-batch) pairs alive at once in the last step; `report` has the proved figure."""
        return self._state.peak_live

    @property
    def peak_deferred(self) -> int:
        """The most (stage, micro-batch) pairs whose weight gradients were queued at once in the last step."""
        return self._state.peak_deferred

    @property
    def num_buffers(self) -> int:
        """Receive buffers made so far; constant after the first step with given shapes."""
        return self._p2p.num_buffers if self._p2p else 0


def _both(calls: list[tuple[Callable[[int], None], Any]]) -> Callable[[int], None]:
    """The halves of a pair, one after the other."""

    def run(_: int) -> None:
        for call, microbatch in calls:
            call(microbatch)

    return run


def _channels(schedule: Schedule) -> list[Channel]:
    """Every channel between ranks, with the same number on all ranks."""
    channels = []
    place = schedule.stage_to_rank
    for stage in range(schedule.num_stages - 1):
        if place[stage] != place[stage + 1]:
            channels.append(Channel(stage, "F", place[stage], place[stage + 1], 2 * stage))
            channels.append(Channel(stage + 1, "G", place[stage + 1], place[stage], 2 * stage + 1))
    return channels
