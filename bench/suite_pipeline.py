"""The pipeline executor beside torch's on stages that sleep: what is above the plan is overhead.

Every stage holds one number and hands on a small tensor times it; its forward and backward sleep. The plan is
`schedule.simulate()` with those sleeps as costs and free messages: step / makespan says what the executor, the
messages and the machine's timer add. Sleeping ranks need no core of their own, so this also works on two cores.
Loss and gradients of both executors are compared with the closed form before they are timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from plait.bench.spec import Case, CaseResult, Measured, Options, Suite, WrongResultError
from plait.bench.suite_train import Collector
from plait.bench.timer import interleave
from plait.launch import launch
from plait.parallel.collectives import all_reduce
from plait.parallel.mesh import Mesh
from plait.parallel.pipeline import Pipeline, TensorSpec
from plait.parallel.schedules import Costs, Schedule, gpipe, interleaved, one_f_one_b
from plait.rank import Rank

DTYPE = torch.float64
TOLERANCE = 1e-12  # relative, of loss and gradients against the closed form: fp64, sums of a few terms
TORCH = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
# (schedule, ranks, chunks, micro-batches, forward ms of one rank's stages together, elements handed on)
GRID = [
    ("gpipe", 4, 1, 8, 4.0, 16),
    ("1f1b", 4, 1, 8, 4.0, 16),
    ("interleaved", 4, 2, 8, 4.0, 16),
    ("1f1b", 4, 1, 32, 4.0, 16),
    ("interleaved", 4, 2, 32, 4.0, 16),
    ("interleaved", 4, 4, 8, 4.0, 16),
    ("1f1b", 4, 1, 8, 1.0, 16),
    ("1f1b", 4, 1, 8, 4.0, 1 << 18),
    ("interleaved", 4, 2, 8, 4.0, 1 << 18),
    ("1f1b", 8, 1, 16, 8.0, 16),
]
DEFAULT = GRID[:3]


def cases(full: bool) -> list[Case]:
    """Four ranks, eight micro-batches, F 4 ms and B 8 ms per rank; `full`: more of each, and messages of 2 MiB."""
    result = []
    for schedule, pp, chunks, microbatches, forward_ms, width in GRID if full else DEFAULT:
        params = dict(
            schedule=schedule,
            pp=pp,
            chunks=chunks,
            microbatches=microbatches,
            forward_s=forward_ms / 1e3 / chunks,
            backward_s=2 * forward_ms / 1e3 / chunks,
            width=width,
        )
        virtual = f" v={chunks}" if chunks > 1 else ""
        size = f" {width * 8 >> 10} KiB" if width > 1024 else ""
        result.append(Case(f"{schedule}{virtual} pp={pp} m={microbatches} F={forward_ms:g} ms{size}", params))
    return result


def schedule_of(params: dict[str, Any]) -> Schedule:
    """The case's schedule."""
    pp, microbatches = params["pp"], params["microbatches"]
    if params["schedule"] == "interleaved":
        return interleaved(pp, params["chunks"], microbatches)
    return {"gpipe": gpipe, "1f1b": one_f_one_b}[params["schedule"]](pp, microbatches)


class _Sleep(torch.autograd.Function):
    """x * weight, asleep for a while in both directions; adds what it slept to the stage's account."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: SleepingStage) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stage = stage
        stage.sleep(stage.forward_s)
        return x * weight

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor, None]:
        x, weight = ctx.saved_tensors
        ctx.stage.sleep(ctx.stage.backward_s)
        return dout * weight if ctx.needs_input_grad[0] else None, (dout * x).sum(), None


class SleepingStage(nn.Module):
    """One stage: [rows, width] -> [rows, width] times its number. `busy_s` grows by what it slept."""

    def __init__(self, index: int, num_stages: int, params: dict[str, Any]) -> None:
        super().__init__()
        self.forward_s, self.backward_s = params["forward_s"], params["backward_s"]
        self.index, self.last = index, index == num_stages - 1
        self.width = params["width"]
        self.weight = nn.Parameter(torch.tensor(weight_of(index), dtype=DTYPE))
        self.busy_s = 0.0

    def sleep(self, seconds: float) -> None:
        start = time.perf_counter()
        time.sleep(seconds)
        self.busy_s += time.perf_counter() - start


class OurStage(SleepingStage):
    """As plait.parallel.Pipeline calls it."""

    def input_specs(self, inputs: dict[str, Any]) -> tuple[TensorSpec, ...]:
        return (TensorSpec((inputs["x"].shape[0], self.width), DTYPE, needs_grad=True),)

    def forward(self, x: tuple[Tensor, ...], inputs: dict[str, Any]) -> tuple[Any, ...]:
        y = _Sleep.apply(x[0] if x else inputs["x"], self.weight, self)
        return (y.sum(), y.shape[0], {}) if self.last else (y,)


class TorchStage(SleepingStage):
    """As torch.distributed.pipelining calls it."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Sleep.apply(x, self.weight, self)
        return y


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
        self.x = x

    def step(self) -> float:
        rows = self.x.shape[0]
        return self.pipeline.step({"x": self.x}, torch.zeros(rows), rows, metrics="local").loss.item()


class TorchExecutor:
    """The same by torch's schedule of the same name, on the same ranks."""

    def __init__(self, params: dict[str, Any], mesh: Mesh, x: Tensor) -> None:
        coord, pp, microbatches = mesh.axis("pp").coord, params["pp"], params["microbatches"]
        num_stages = pp * params["chunks"]
        mine = range(coord, num_stages, pp)
        self.stages: list[SleepingStage] = [TorchStage(s, num_stages, params) for s in mine]
        group = mesh.group("pp")
        parts = [
            PipelineStage(stage, stage.index, num_stages, torch.device("cpu"), group=group) for stage in self.stages
        ]
        rows = x.shape[0]
        kind: Any = TORCH[params["schedule"]]
        self.schedule = kind(
            parts if params["schedule"] == "interleaved" else parts[0],
            microbatches,
            loss_fn=lambda output, target: output.sum() / rows,
            scale_grads=False,
        )
        self.args = (x,) if coord == 0 else ()
        self.target = torch.zeros(rows) if mine[-1] == num_stages - 1 else None

    def step(self) -> float:
        losses: list[Tensor] = []
        kwargs = {} if self.target is None else {"target": self.target, "losses": losses}
        self.schedule.step(*self.args, **kwargs)
        return float(sum(losses))


def measure(case: Case, options: Options) -> CaseResult:
    """Runs one case on forked local ranks; RuntimeError with what they said when one fails."""
    params = case.params
    plan = schedule_of(params).simulate(Costs(forward=params["forward_s"], backward=params["backward_s"]))
    view = Collector()
    code = launch(lambda rank: run_rank(params, options, rank), params["pp"], view)
    if view.record is None or code != 0:
        raise RuntimeError(f"case {case.name!r} failed with exit code {code}:\n" + "\n".join(view.lines[-20:]))
    if view.record["wrong"]:
        raise WrongResultError(f"case {case.name!r}: {view.record['wrong']}")
    nominal_s = params["microbatches"] * params["chunks"] * (params["forward_s"] + params["backward_s"])
    providers = {}
    for name, samples in view.record["samples_s"].items():
        busy_s = view.record["busy_s"][name]  # mean over ranks, summed over the counted rounds
        figures = {
            "step / plan": median(samples) / plan.makespan,
            "bubble": 1 - busy_s / sum(samples),
            "slept": busy_s / len(samples) / nominal_s,
        }
        providers[name] = Measured(samples, f"loss and gradients within {TOLERANCE:g} of the closed form", figures)
    note = (
        f"host_wall over gloo; plan: makespan {plan.makespan * 1e3:.3f} ms, bubble {plan.bubble:.4f}; slept: time "
        "asleep over what was asked for, all of it counted as busy"
    )
    return CaseResult(case, "plait", providers, note)


def run_rank(params: dict[str, Any], options: Options, rank: Rank) -> None:
    """One rank of a case: builds both executors, checks them, times them, checks them again."""
    rank.connect()
    mesh = Mesh.create(device_type="cpu", pp=params["pp"])
    axis = mesh.axis("pp")
    generator = torch.Generator().manual_seed(options.seed)
    x = torch.randn(params["microbatches"], params["width"], generator=generator, dtype=DTYPE)
    executors: dict[str, Executor | TorchExecutor] = {
        "plait": Executor(params, mesh, x),
        "torch": TorchExecutor(params, mesh, x),
    }
    num_stages = params["pp"] * params["chunks"]

    def check() -> str:
        """Returns what is wrong on any rank, '' for nothing; the same on all ranks."""
        for name, executor in executors.items():
            worst = error_of(executor, x, num_stages)
            if not all_reduce(torch.tensor([worst], dtype=DTYPE), axis, "max").item() <= TOLERANCE:
                return f"{name}: loss or gradients are off by more than {TOLERANCE:g}; {worst:g} on this rank"
        return ""

    wrong = check()
    flag = torch.zeros(1)
    samples: dict[str, list[float]] = {}
    busy_s: dict[str, float] = {}
    if not wrong:
        slept: dict[str, list[float]] = {name: [] for name in executors}
        samples = interleave(
            {name: with_sleep(executor, slept[name]) for name, executor in executors.items()},
            options,
            sync=lambda: all_reduce(flag, axis),
        )
        for name, values in slept.items():
            total = torch.tensor([sum(values[-options.rounds :])], dtype=DTYPE)
            busy_s[name] = all_reduce(total, axis).item() / axis.size
        wrong = check()
    if rank.rank == 0:
        rank.emit({"kind": "bench", "wrong": wrong, "samples_s": samples, "busy_s": busy_s})
    rank.disconnect()


def with_sleep(executor: Executor | TorchExecutor, slept: list[float]) -> Callable[[], None]:
    """Returns a step that also notes how long this rank's stages slept in it."""

    def run() -> None:
        before = sum(stage.busy_s for stage in executor.stages)
        executor.step()
        slept.append(sum(stage.busy_s for stage in executor.stages) - before)

    return run


def error_of(executor: Executor | TorchExecutor, x: Tensor, num_stages: int) -> float:
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


SUITE = Suite("pipeline", "the pipeline executor on sleeping stages, ours and torch's", cases, measure)
