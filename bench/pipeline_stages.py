"""Stages that sleep, and a step over them by each executor: ours and torch.distributed.pipelining's.

Every stage holds one number and hands on its input times it. F, I and W last as long as the plan prices them, from
their own start: a sleep, the arithmetic, and what is left asleep but for a short spin. A sleep alone ends when the
machine wakes its thread, 0.16 to 0.33 ms late with four ranks on two cores, and all of that was counted as the
executor's; what is over the plan now is the executor's, its messages', or a wait for a core. Both executors run the
same stages.

The weight gradient is taken apart from the input's in both: by the sink that Pipeline sets, and by the `dw_builder`
that torch's PipelineStage asks for, so that neither does anything twice. Loss and gradients have a closed form.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from plait.parallel.gradients import GradSink
from plait.parallel.mesh import Mesh
from plait.parallel.pipeline import Pipeline, TensorSpec
from plait.parallel.schedules import ANY_CHUNKS, Schedule, build

DTYPE = torch.float64
# When its arithmetic starts, before a stage's end: so that it hands over with warm caches, as a stage does that has
# computed all the time, and that ranks whose actions begin together do not want a core for arithmetic then, too. Cold
# it takes 0.1 to 0.25 ms, and of eight ranks four share a core.
LEAD_S = 2e-3
# The last part of a stage's time, which it spins: in the middle a sleep of some ms ends 0.07 ms late where a core is
# free (2 of a firecracker VM). A longer spin takes the core from ranks whose turn it is: with 0.25 ms ZB-H1 on eight
# was at 1.028 of its plan, with 0.1 ms at 1.016 (ZB-V 1.037 and 1.039, 1F1B 1.016 and 1.017).
SPIN_S = 100e-6
# Our schedule -> torch's class of the same one; zb_h2 has none, so that torch's runtime gets our list as CSV.
TORCH = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "zb_h1": "ScheduleInterleavedZeroBubble",
    "zb_h2": "_PipelineScheduleRuntime",
    "zb_v": "ScheduleZBVZeroBubble",
    "dual_pipe_v": "ScheduleDualPipeV",
}


def sleep_sharply() -> None:
    """Lets this thread's sleeps end when they should: by default Linux adds 50 us to each, to wake threads together.

    Measured on a firecracker VM, 10 ms: 71 us late in the middle, 121 us by default.
    """
    set_timer_slack = 29  # PR_SET_TIMERSLACK of linux/prctl.h, in ns
    if ctypes.CDLL(None, use_errno=True).prctl(set_timer_slack, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl PR_SET_TIMERSLACK")


def schedule_of(params: dict[str, Any]) -> Schedule:
    """The case's schedule."""
    name, chunks = params["schedule"], params["chunks"]
    return build(name, params["pp"], params["microbatches"], chunks if name in ANY_CHUNKS else None)


class _Product(torch.autograd.Function):
    """x * weight; I lasts as long as the stage's does, W is handed to the stage."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: SleepingStage) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stage = stage
        return x * weight

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        with ctx.stage.own.lasting(ctx.stage.input_s):
            dx = dout * weight if ctx.needs_input_grad[0] else None
        ctx.stage.later(x, dout)
        return dx, None, None


class OwnTime:
    """A stage's own work: each block lasts so many seconds from its start, asleep before and after what it does.

    Adds up `busy_s`, how long the blocks lasted, and `cpu_s`, the thread's CPU time inside them.
    """

    def __init__(self) -> None:
        self.busy_s = self.cpu_s = 0.0
        self._lasts_s = self._start_s = self._cpu_start_s = 0.0

    def lasting(self, seconds: float) -> OwnTime:
        """The next block's time; 0: as short as it is, and not counted as busy."""
        self._lasts_s = seconds
        return self

    def __enter__(self) -> None:
        self._start_s, self._cpu_start_s = time.perf_counter(), time.thread_time()
        if self._lasts_s > LEAD_S:
            time.sleep(self._lasts_s - LEAD_S)

    def __exit__(self, *_: object) -> None:
        clock = time.perf_counter
        if self._lasts_s:
            end = self._start_s + self._lasts_s
            if (left := end - SPIN_S - clock()) > 0:
                time.sleep(left)
            while clock() < end:
                pass
            self.busy_s += clock() - self._start_s
        self.cpu_s += time.thread_time() - self._cpu_start_s


class SleepingStage(nn.Module):
    """One stage: [rows, width] -> [rows, width] times its number. `own` counts its F, I and W."""

    def __init__(self, index: int, num_stages: int, params: dict[str, Any]) -> None:
        super().__init__()
        self.forward_s, self.input_s, self.weight_s = (params[f"{name}_s"] for name in ("forward", "input", "weight"))
        self.index, self.last = index, index == num_stages - 1
        self.width = params["width"]
        self.weight = nn.Parameter(torch.tensor(weight_of(index), dtype=DTYPE))
        self.own = OwnTime()

    def product(self, x: Tensor) -> Tensor:
        """F."""
        with self.own.lasting(self.forward_s):
            y: Tensor = _Product.apply(x, self.weight, self)
        return y

    def later(self, x: Tensor, dout: Tensor) -> None:
        """Takes the weight gradient's work, to be done with W."""
        raise NotImplementedError

    def weight_gradient(self, x: Tensor, dout: Tensor) -> None:
        """W."""
        with self.own.lasting(self.weight_s):
            grad = (dout * x).sum()
            self.weight.grad = grad if self.weight.grad is None else self.weight.grad + grad


class OurStage(SleepingStage):
    """As plait.parallel.Pipeline calls it."""

    def __init__(self, index: int, num_stages: int, params: dict[str, Any]) -> None:
        super().__init__(index, num_stages, params)
        self.weight_grads = GradSink()

    def later(self, x: Tensor, dout: Tensor) -> None:
        self.weight_grads.add(self.weight_grads.microbatch, self.weight_gradient, x, dout)

    def input_specs(self, inputs: dict[str, Any]) -> tuple[TensorSpec, ...]:
        return (TensorSpec((inputs["x"].shape[0], self.width), DTYPE, needs_grad=True),)

    def forward(self, x: tuple[Tensor, ...], inputs: dict[str, Any]) -> tuple[Any, ...]:
        y = self.product(x[0] if x else inputs["x"])
        return (y.sum(), y.shape[0], {}) if self.last else (y,)


class TorchStage(SleepingStage):
    """As torch.distributed.pipelining calls it."""

    def __init__(self, index: int, num_stages: int, params: dict[str, Any]) -> None:
        super().__init__(index, num_stages, params)
        self.work: Callable[[], None] = lambda: None

    def later(self, x: Tensor, dout: Tensor) -> None:
        self.work = lambda: self.weight_gradient(x, dout)

    def take_work(self) -> Callable[[], None]:
        """PipelineStage's dw_builder: asked for after each backward, run with its W (or at once for a whole one)."""
        work, self.work = self.work, lambda: None
        return work

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)


def weight_of(stage: int) -> float:
    """The number that a stage multiplies with."""
    return 1.0 + 0.125 * (stage % 3)


class Executor:
    """Our side of a case on one rank: `step` returns the loss (0 but on the last stage's rank)."""

    def __init__(self, params: dict[str, Any], mesh: Mesh, x: Tensor) -> None:
        schedule = schedule_of(params)
        mine = schedule.stages_of(mesh.axis("pp").coord)
        self.stages: list[SleepingStage] = [OurStage(s, schedule.num_stages, params) for s in mine]
        self.pipeline = Pipeline(dict(zip(mine, self.stages, strict=True)), schedule, mesh)
        self.x, self.target = x, torch.zeros(x.shape[0])

    def step(self) -> float:
        return self.pipeline.step({"x": self.x}, self.target, len(self.target), metrics="local").loss.item()


class TorchExecutor:
    """The same by torch's schedule of the same name, on the same ranks."""

    def __init__(self, params: dict[str, Any], mesh: Mesh, x: Tensor) -> None:
        schedule = schedule_of(params)
        mine = schedule.stages_of(mesh.axis("pp").coord)
        stages = [TorchStage(s, schedule.num_stages, params) for s in mine]
        self.stages: list[SleepingStage] = list(stages)
        parts = [torch_stage(stage, stage.index, schedule, mesh, dw_builder=stage.take_work) for stage in stages]
        rows = x.shape[0]
        self.schedule = torch_schedule(params, schedule, parts, lambda output, target: output.sum() / rows)
        self.args = (x,) if 0 in mine else ()
        self.target = torch.zeros(rows) if mine[-1] == schedule.num_stages - 1 else None

    def step(self) -> float:
        losses: list[Tensor] = []
        kwargs = {} if self.target is None else {"target": self.target, "losses": losses}
        self.schedule.step(*self.args, **kwargs)
        return float(sum(losses))


def torch_stage(module: nn.Module, index: int, schedule: Schedule, mesh: Mesh, **options: Any) -> PipelineStage:
    """The module as torch's stage on this rank."""
    group, cpu = mesh.group("pp"), torch.device("cpu")
    stage = PipelineStage(module, index, schedule.num_stages, cpu, group=group, **options)
    # torch 2.11 first sends a warm-up to each neighbour, also to this rank's own next stage, which gloo refuses.
    stage._get_init_p2p_neighbors_ops = list  # type: ignore[method-assign]
    return stage


def torch_schedule(
    params: dict[str, Any], schedule: Schedule, parts: list[PipelineStage], loss_fn: Callable[..., Tensor]
) -> Any:
    """torch's schedule of the case's name over this rank's stages."""
    kind: Any = getattr(torch_schedules, TORCH[params["schedule"]])
    single = issubclass(kind, torch_schedules.PipelineScheduleSingle)
    made = kind(parts[0] if single else parts, params["microbatches"], loss_fn=loss_fn, scale_grads=False)
    if kind is torch_schedules._PipelineScheduleRuntime:
        order = {
            rank: [torch_schedules._Action.from_str(cell) for cell in line.split(",")]
            for rank, line in enumerate(schedule.to_csv().splitlines())
        }
        made._prepare_schedule_with_comms(order, format="compute_only")
    return made


def error_of(executor: Any, x: Tensor, num_stages: int) -> float:
    """Runs a step and returns the largest relative error of this rank's loss and gradients; NaN stays NaN.

    Loss = sum(x) * product of all numbers / rows, so the gradient of a number is the loss divided by it.
    """
    for stage in executor.stages:
        stage.weight.grad = None
    loss = executor.step()
    expected = x.sum().item() / x.shape[0]
    for index in range(num_stages):
        expected *= weight_of(index)
    errors = [loss / expected - 1] if executor.stages[-1].last else [loss]
    for stage in executor.stages:
        grad = torch.nan if stage.weight.grad is None else stage.weight.grad.item()
        errors.append(grad * weight_of(stage.index) / expected - 1)
    return torch.tensor(errors, dtype=DTYPE).abs().max().item()
