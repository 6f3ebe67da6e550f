"""The pipeline executor beside torch's: every schedule, on stages that sleep, that do nothing, and of a real model.

Sleeping: the plan is `schedule.simulate()` with those sleeps as costs and free messages. A stage takes as long as the
plan says (pipeline_stages.py), so that step / plan says what the executor, the messages and waiting for a core add.
Sleeping ranks need no core of their own, so that this works on two. Host time is the CPU time of a rank's own thread
outside of its stages' own F (with its record for autograd), I and W, over all its actions: what an executor takes to
run an action. A real model's stages are not told apart from what runs them. Both executors run the same stages;
results are checked before and after timing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from plait.bench import pipeline_model, pipeline_stages
from plait.bench.pipeline_stages import DTYPE, TORCH, schedule_of
from plait.bench.pipeline_table import NOTES, text
from plait.bench.providers import left_out, not_asked
from plait.bench.spec import Case, CaseResult, Measured, Options, Suite
from plait.bench.suite_train import Collector
from plait.bench.timer import interleave
from plait.launch import launch
from plait.parallel.collectives import all_reduce
from plait.parallel.mesh import Axis, Mesh
from plait.parallel.schedules import NAMES, Costs, Event, Timeline
from plait.parallel.schedules.action import COMPUTE, singles
from plait.parallel.schedules.machine import makes, needs
from plait.parallel.schedules.measured import measured_costs
from plait.parallel.timelines import gather_timeline
from plait.rank import Rank

TOLERANCE = 1e-12  # relative, of loss and gradients against the closed form: fp64, sums of a few terms
CHUNKS = {"interleaved": 2, "looped_bfs": 2, "zb_v": 2, "dual_pipe_v": 2}
# kind, ranks, micro-batches, forward ms of one rank's stages together (I and W take as long each), elements handed
# on, most rounds: torch's DualPipeV wants two micro-batches a rank, and a step of eight ranks is long. 40 ms, because
# what an action adds does not grow with it: figures over the plan are comparable at the same sleep alone.
SLEEPS = [("sleep", 4, 8, 40.0, 16, 4), ("sleep", 8, 16, 40.0, 16, 3)]
IDLES = [("idle", 4, 8, 0.0, 16, 20)]
MODELS = [("model", 4, 8, 0.0, 0, 6)]
BIG = ("sleep", 4, 8, 40.0, 1 << 18, 3)  # messages of 2 MiB
DEFAULT = [(*SLEEPS[0], name) for name in ("gpipe", "1f1b", "interleaved")]


def cases(full: bool) -> list[Case]:
    """Four ranks, eight micro-batches, F 40 ms and B 80 ms per rank; `full`: every schedule, four and eight ranks."""
    if not full:
        return [case_of(*row) for row in DEFAULT]
    rows = [(*row, name) for row in (*SLEEPS, *IDLES, *MODELS) for name in NAMES]
    rows += [(*BIG, name) for name in ("1f1b", "interleaved")]
    rows += [("model", 8, 16, 0.0, 0, 6, name) for name in ("1f1b", "zb_v")]
    return [case_of(*row) for row in rows]


def case_of(kind: str, pp: int, microbatches: int, unit_ms: float, width: int, rounds: int, schedule: str) -> Case:
    """One case, its times per stage."""
    chunks = CHUNKS.get(schedule, 1)
    times = dict.fromkeys(("forward_s", "input_s", "weight_s"), unit_ms / 1e3 / chunks)
    params = dict(
        kind=kind, schedule=schedule, pp=pp, chunks=chunks, microbatches=microbatches, width=width, rounds=rounds
    )
    what = {"sleep": f"F={unit_ms:g} ms", "idle": "no work", "model": "model"}[kind]
    size = f" {width * 8 >> 10} KiB" if width > 1024 else ""
    return Case(f"{schedule} pp={pp} m={microbatches} {what}{size}", {**params, **times})


def measure(case: Case, options: Options) -> CaseResult:
    """Runs one case on forked local ranks; RuntimeError with what they said when one fails."""
    params = case.params
    options = limited(options, params)
    view = Collector()
    code = launch(lambda rank: run_rank(params, options, rank), params["pp"], view)
    result = result_of(case, view.result(case, code))
    result.providers |= not_asked(["torch"], options.providers)
    return result


def limited(options: Options, params: Mapping[str, Any]) -> Options:
    """No more rounds than the case has, nor than its share of the budget holds: a round is two steps, which sleep."""
    rounds, warmup = min(options.rounds, params["rounds"]), options.warmup
    if params["kind"] == "sleep":
        warmup = 0  # the check ran a step, and sleeping needs no warmth
        if options.budget_s:
            rounds = max(3, min(rounds, int(options.budget_s / (2.2 * plan_s(params)))))
    return replace(options, rounds=rounds, warmup=warmup)


def plan_s(params: Mapping[str, Any]) -> float:
    """The simulated makespan of the case's sleeps."""
    return planned(params).makespan


def planned(params: Mapping[str, Any]) -> Timeline:
    """The case's sleeps in time."""
    forward, inputs, weight = (params[f"{name}_s"] for name in ("forward", "input", "weight"))
    return schedule_of(dict(params)).simulate(Costs(forward, inputs + weight, inputs, weight))


def num_critical(params: Mapping[str, Any]) -> int:
    """How many actions follow one another, each waiting for the one before, until the plan's last end.

    What an action takes beyond its sleep is paid so many times: two stages a rank halve the sleeps, not that.
    """
    line, num_stages = planned(params), schedule_of(dict(params)).num_stages
    before: dict[Any, Event] = {}  # of a rank its last event, of a product its maker
    depth: dict[Any, int] = {}
    events = [(rank, event) for rank, lane in enumerate(line.lanes) for event in lane]
    events = [(r, e) for r, e in events if all(single.op in COMPUTE for single in e.action.singles)]
    for rank, event in sorted(events, key=lambda item: item[1].end):
        singles_of = event.action.singles
        needed = [rank, *(product for single in singles_of for product in needs(single, num_stages))]
        waited = [before[key] for key in needed if key in before and before[key].end > event.start - 1e-9]
        depth[event.action] = 1 + max((depth[earlier.action] for earlier in waited), default=0)
        before[rank] = event
        before |= {product: event for single in singles_of for product in makes(single)}
    end = max(event.end for _, event in events)
    return max(depth[event.action] for _, event in events if event.end > end - 1e-9)


def num_actions(params: Mapping[str, Any]) -> int:
    """F, B, I and W of all ranks in a step; a pair is two."""
    return sum(s.op in COMPUTE for lane in schedule_of(dict(params)).lanes for s in singles(lane))


def result_of(case: Case, record: Mapping[str, Any]) -> CaseResult:
    """The record of the ranks as figures."""
    params, sleeping = case.params, case.params["kind"] == "sleep"
    plan, actions = record["plan_s"], num_actions(case.params)
    nominal_s = (
        params["microbatches"] * params["chunks"] * sum(params[f"{n}_s"] for n in ("forward", "input", "weight"))
    )
    providers = {}
    for name, samples in record["samples_s"].items():
        rounds = len(samples)
        figures = {"plan_s": plan, "step / plan": median(samples) / plan} if plan else {}
        if sleeping:
            busy_s = record["busy_s"][name]  # mean over ranks, summed over the counted rounds
            figures |= {"bubble": 1 - busy_s / sum(samples), "slept": busy_s / rounds / nominal_s}
            figures["late us/critical action"] = (median(samples) - plan) / num_critical(params) * 1e6
        host_s, cpu_s = record["host_s"][name], record["cpu_s"][name]  # summed over ranks and rounds
        figures["host us/action"] = host_s / rounds / actions * 1e6
        figures["CPU us/action"] = cpu_s / rounds / actions * 1e6
        figures["wall us/action"] = median(samples) * params["pp"] / actions * 1e6
        providers[name] = Measured(samples, record["check"], figures)
    return CaseResult(case, "plait", providers, NOTES[params["kind"]] + peer_note(params))


def peer_note(params: Mapping[str, Any]) -> str:
    """How torch runs the case."""
    own = "; torch has no zb_h2: its runtime ran our list" if params["schedule"] == "zb_h2" else ""
    return f"; torch: {TORCH[params['schedule']]}{own}"


# ---- one rank ----------------------------------------------------------------------------------------------------


def run_rank(params: dict[str, Any], options: Options, rank: Rank) -> None:
    """One rank of a case: builds both executors, checks them, times them, checks them again."""
    rank.connect()
    pipeline_stages.sleep_sharply()
    mesh = Mesh.create(device_type="cpu", pp=params["pp"])
    axis = mesh.axis("pp")
    executors, error_of, tolerance = made(params, mesh, options.seed)
    executors = {name: one for name, one in executors.items() if not left_out(name, options.providers)}

    def check() -> str:
        """Returns what is wrong on any rank, '' for nothing; the same on all ranks."""
        for name, executor in executors.items():
            worst = error_of(executor)
            if not all_reduce(torch.tensor([worst], dtype=DTYPE), axis, "max").item() <= tolerance:
                return f"{name}: loss or gradients are off by more than {tolerance:g}; {worst:g} on this rank"
        return ""

    flag = torch.zeros(1)
    accounts = {name: Account(executor) for name, executor in executors.items()}
    samples: dict[str, list[float]] = {}
    plan, wrong = 0.0, check()
    if not wrong:
        interleave(
            {name: account.step for name, account in accounts.items()}, options, sync=lambda: all_reduce(flag, axis)
        )
        samples = spans(accounts, options.rounds, axis)
        plan = plan_s(params) or planned_by_run(params, executors["plait"])
        wrong = check()
    sums = {}
    for key in ("busy_s", "host_s", "cpu_s"):
        mine = torch.tensor([account.total(key, options.rounds) for account in accounts.values()], dtype=DTYPE)
        sums[key] = dict(zip(accounts, (all_reduce(mine, axis)).tolist(), strict=True))
    busy_s = {name: total / axis.size for name, total in sums["busy_s"].items()}
    if rank.rank == 0:
        oracle = "unsplit model" if params["kind"] == "model" else "closed form"
        said = f"loss and gradients within {tolerance:g} of the {oracle}"
        record = {"kind": "bench", "wrong": wrong, "samples_s": samples, "check": said, "plan_s": plan}
        rank.emit({**record, **sums, "busy_s": busy_s})
    rank.disconnect()


def spans(accounts: Mapping[str, Account], rounds: int, axis: Axis) -> dict[str, list[float]]:
    """Each counted step from its start on the first rank, which opens every schedule, to the end of the last to end.

    Ranks of one machine share the clock. What brings them together again, some ms among cold processes, is no part of
    a step. Collective.
    """
    first = axis.coord == 0
    starts, ends = (
        torch.tensor([account.notes[key][-rounds:] for account in accounts.values()], dtype=DTYPE)
        for key in ("start_s", "end_s")
    )
    starts = all_reduce(starts if first else torch.zeros_like(starts), axis)
    return dict(zip(accounts, (all_reduce(ends, axis, "max") - starts).tolist(), strict=True))


def made(params: dict[str, Any], mesh: Mesh, seed: int) -> tuple[dict[str, Any], Callable[[Any], float], float]:
    """Both executors of a case, what says how wrong a step of one is, and how wrong it may be."""
    generator = torch.Generator().manual_seed(seed)
    schedule = schedule_of(params)
    if params["kind"] == "model":
        shape = (params["microbatches"], pipeline_model.SIZES["max_seq"] + 1)
        rows = torch.randint(pipeline_model.SIZES["vocab_size"], shape, generator=generator)
        ours = pipeline_model.Executor(params, mesh, rows)
        loss, gradients = pipeline_model.unsplit(ours, rows, params["microbatches"])
        last = schedule.num_stages - 1 in schedule.stages_of(mesh.axis("pp").coord)
        both = {"plait": ours, "torch": pipeline_model.TorchExecutor(params, mesh, rows, ours)}
        return both, lambda e: pipeline_model.error_of(e, loss, gradients, last), pipeline_model.TOLERANCE
    x = torch.randn(params["microbatches"], params["width"], generator=generator, dtype=DTYPE)
    executors = {
        "plait": pipeline_stages.Executor(params, mesh, x),
        "torch": pipeline_stages.TorchExecutor(params, mesh, x),
    }
    return executors, lambda executor: pipeline_stages.error_of(executor, x, schedule.num_stages), TOLERANCE


def planned_by_run(params: dict[str, Any], executor: Any) -> float:
    """The makespan simulated from our last step's own times; 0 where stages do nothing. Collective."""
    if params["kind"] == "idle":
        return 0.0
    line, schedule = gather_timeline(executor.pipeline), schedule_of(params)
    assert line is not None, "steps were timed"
    return schedule.simulate(replace(measured_costs(schedule, line), send=0.0, send_grad=0.0)).makespan


class Account:
    """Runs an executor's steps and keeps, per step: `busy_s` that its stages slept, `cpu_s` of all threads of the
    process and `host_s` of this one, both without what the stages' own work takes; when it started and ended."""

    def __init__(self, executor: Any) -> None:
        self.executor = executor
        self.notes: dict[str, list[float]] = {key: [] for key in ("busy_s", "host_s", "cpu_s", "start_s", "end_s")}

    def step(self) -> None:
        slept, own_cpu = self._stages()
        cpu, host = time.process_time(), time.thread_time()
        self.notes["start_s"].append(time.perf_counter())
        self.executor.step()
        self.notes["end_s"].append(time.perf_counter())
        host, cpu = time.thread_time() - host, time.process_time() - cpu
        slept_now, own_cpu_now = self._stages()
        self.notes["busy_s"].append(slept_now - slept)
        self.notes["host_s"].append(host - (own_cpu_now - own_cpu))
        self.notes["cpu_s"].append(cpu - (own_cpu_now - own_cpu))

    def _stages(self) -> tuple[float, float]:
        """What the stages have slept, and their own CPU time."""
        stages = self.executor.stages
        if isinstance(stages, dict):  # a real model
            return 0.0, 0.0
        return sum(stage.own.busy_s for stage in stages), sum(stage.own.cpu_s for stage in stages)

    def total(self, key: str, rounds: int) -> float:
        """Over the counted rounds, the last ones."""
        return sum(self.notes[key][-rounds:])


ABOUT = "every schedule on sleeping stages and on a small model, ours and torch's"
SUITE = Suite("pipeline", ABOUT, cases, measure, text, small_s=60.0, rounds=6)
