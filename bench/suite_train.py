"""The main job beside torch's own stack: whole training steps of the same model, weights and tokens on the same grid.

Every rank holds both trainers; a round runs one step of each. Step time is rank 0's wall clock between barriers; CPU
time is summed over all ranks and threads, so that it tells the work of a step apart from the waiting for a core. The
row of one process is the limit: what a grid spends above its CPU time is the overhead of being parallel.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from plait.bench.ending import scratch_folder
from plait.bench.peer_torch import Block, Stage, TorchStack
from plait.bench.providers import left_out, not_asked
from plait.bench.spec import Case, CaseResult, Measured, Options, Suite, WrongResultError
from plait.bench.timer import interleave, rounds_within
from plait.block import rotary_tables
from plait.config import build
from plait.launch import launch, run_in_place
from plait.model import full_state
from plait.model_config import ModelConfig, flop_per_token
from plait.parallel.collectives import all_reduce
from plait.parallel.mesh import Mesh
from plait.plan import RunPlan, make_plan, make_schedule
from plait.rank import Place, Rank
from plait.train import BETAS, EPS, MAX_NORM, WEIGHT_DECAY, Trainer, make_mesh

# Both trainers start from the same bits and sum in other orders: fp32 losses of the first steps stay this close.
LOSS_TOLERANCE = 1e-4
CHECKED_STEPS = 3
# (grid, peer's data parallelism, sequence parallel, schedule)
GRIDS = [
    ("dp=1,pp=1,tp=1", "ddp", False, "1f1b"),
    ("dp=2,pp=1,tp=1", "ddp", False, "1f1b"),
    ("dp=2,pp=1,tp=1", "fsdp2", False, "1f1b"),
    ("dp=1,pp=2,tp=1", "ddp", False, "1f1b"),
    ("dp=1,pp=2,tp=1", "ddp", False, "gpipe"),
    ("dp=1,pp=1,tp=2", "ddp", False, "1f1b"),
    ("dp=1,pp=1,tp=2", "ddp", True, "1f1b"),
    ("dp=2,pp=2,tp=1", "ddp", False, "1f1b"),
    ("dp=2,pp=1,tp=2", "ddp", False, "1f1b"),
    ("dp=1,pp=2,tp=2", "ddp", False, "1f1b"),
    ("dp=2,pp=2,tp=2", "ddp", False, "1f1b"),
    ("dp=2,pp=2,tp=2", "ddp", True, "1f1b"),
    ("dp=2,pp=2,tp=2", "fsdp2", True, "1f1b"),
]
DEFAULT = GRIDS[10:11]


def cases(full: bool) -> list[Case]:
    """One case a grid, `tiny` with an untied head (torch's pipeline has no tied weights), fp32."""
    result = []
    for mesh, data_parallel, sequence_parallel, schedule in GRIDS if full else DEFAULT:
        extra = (" SP" if sequence_parallel else "") + (f" {data_parallel}" if "dp=1" not in mesh else "")
        params = dict(
            mesh=mesh,
            data_parallel=data_parallel,
            sequence_parallel=sequence_parallel,
            schedule=schedule,
            preset="tiny",
        )
        plan = plan_of(params, Path(tempfile.gettempdir()))
        tokens = plan.config.global_batch * plan.config.seq
        flop = float(flop_per_token(plan.model, plan.config.seq) * tokens)
        result.append(Case(f"{mesh} {schedule}{extra}", {**params, "tokens": tokens}, flop=flop))
    return result


def plan_of(params: dict[str, Any], out: Path) -> RunPlan:
    """Returns the checked run of a case, with an untied head."""
    names = ("mesh", "sequence_parallel", "schedule", "preset")
    config = build({**{name: params[name] for name in names}, "out": out, "resume": "none"})
    plan = make_plan(config)
    model = replace(plan.model, tied=False)
    schedule = make_schedule(config, plan.sizes["pp"], plan.num_microbatches, tied=False)
    return replace(plan, model=model, schedule=schedule)


class Collector:
    """The launcher's view of a case: keeps the one record that rank 0 emits, and what ranks print."""

    def __init__(self) -> None:
        self.record: dict[str, Any] | None = None
        self.lines: list[str] = []

    def event(self, rank: int, record: dict[str, Any]) -> None:
        if record["kind"] == "bench":
            self.record = record
        elif record["kind"] == "launcher":
            self.lines.append(record["text"])

    def line(self, rank: int, text: str) -> None:
        self.lines.append(f"rank {rank}: {text}")

    def result(self, case: Case, code: int) -> dict[str, Any]:
        """The record of a run that ended with `code`; RuntimeError with what ranks printed, WrongResultError."""
        if self.record is None or code != 0:
            raise RuntimeError(f"case {case.name!r} failed with exit code {code}:\n" + "\n".join(self.lines[-20:]))
        if self.record["wrong"]:
            raise WrongResultError(f"case {case.name!r}: {self.record['wrong']}")
        return self.record

    def close(self) -> None:
        pass


def measure(case: Case, options: Options) -> CaseResult:
    """Runs one case on forked local ranks; RuntimeError with what they said when one fails."""
    with scratch_folder() as folder:
        plan = plan_of(case.params, Path(folder))

        def program(rank: Rank) -> None:
            run_rank(plan, case, options, rank)

        view = Collector()
        if plan.world_size == 1:
            code = run_in_place(program, Place(), view)
        else:
            code = launch(program, plan.world_size, view)
    record = view.result(case, code)
    tokens = case.params["tokens"]
    providers = {
        name: Measured(
            samples,
            check=f"losses of {CHECKED_STEPS} steps within {LOSS_TOLERANCE:g} of each other",
            figures={"tokens/s": tokens / median(samples), "CPU s/step": record["cpu_s"][name]},
        )
        for name, samples in record["samples_s"].items()
    } | not_asked(["torch"], options.providers)
    return CaseResult(case, "plait", providers)


def run_rank(plan: RunPlan, case: Case, options: Options, rank: Rank) -> None:
    """One rank of a case: builds both trainers, checks their losses against each other, times them."""
    rank.connect()
    mesh = make_mesh(plan, rank)
    ours = Trainer(plan, rank, mesh)
    peer = build_peer(plan, case, ours, mesh)
    begun = time.monotonic()
    everyone = mesh.axis(*mesh.grid.names)
    losses: dict[str, list[float]] = {"plait": [], "torch": []}
    peer_step = iter(range(10**9))

    def torch_step() -> None:
        step = next(peer_step)
        batch = ours.batches.at(step)
        losses["torch"].append(peer.step(batch.tokens, batch.targets, ours.learning_rate.at(step)))

    def plait_step() -> None:
        ours.step()
        losses["plait"].append(ours.loss)

    for _ in range(CHECKED_STEPS):
        begun_step = time.monotonic()
        plait_step()
        torch_step()
    took = torch.tensor([time.monotonic() - begun, time.monotonic() - begun_step])
    spent_s, round_s = all_reduce(took, everyone, "max").tolist()  # of the slowest: all take as many rounds
    options = rounds_within(options.budget_s, spent_s, round_s, options)
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses["plait"], losses["torch"], strict=True))
    wrong = "" if worst <= LOSS_TOLERANCE else f"losses {losses}, {worst:.2e} apart"
    steps = {"plait": plait_step, "torch": torch_step}  # torch is built and checked against, also where nobody asked
    steps = {name: step for name, step in steps.items() if not left_out(name, options.providers)}
    cpu_s, flag = dict.fromkeys(steps, 0.0), torch.zeros(1)
    samples: dict[str, list[float]] = {name: [] for name in steps}
    if not wrong:
        timed: dict[str, Callable[[], object]] = {name: with_cpu(step, cpu_s, name) for name, step in steps.items()}
        samples = interleave(timed, options, sync=lambda: all_reduce(flag, everyone))
    counted = torch.tensor(list(cpu_s.values()), dtype=torch.float64) / (options.rounds + options.warmup)
    counted = all_reduce(counted, everyone)
    ours.snapshots.close()
    rank.emit(
        {
            "kind": "bench",
            "wrong": wrong or ("" if math.isfinite(worst) else "a loss is not finite"),
            "samples_s": samples,
            "cpu_s": dict(zip(cpu_s, counted.tolist(), strict=True)),
        }
    )
    rank.disconnect()


def with_cpu(step: Callable[[], None], cpu_s: dict[str, float], name: str) -> Callable[[], None]:
    """Returns step with this process's CPU time, of all its threads, added up under name."""

    def run() -> None:
        start = time.process_time()
        step()
        cpu_s[name] += time.process_time() - start

    return run


def build_peer(plan: RunPlan, case: Case, ours: Trainer, mesh: Mesh) -> TorchStack:
    """Returns torch's stack with our weights, for this rank's place on the grid; collective."""
    weights = full_state(ours.stages, mesh)
    model, pp = plan.model, mesh.axis("pp")
    index = plan.schedule.stage_to_rank.index(pp.coord)
    stage = stage_of(model, ours.stages[index].plan.layers[index], weights, index == 0, index == pp.size - 1)
    stage.angles = rotary_tables(model, ours.positions, torch.float32)
    return TorchStack(
        stage,
        mesh.device_mesh,
        num_microbatches=plan.num_microbatches,
        schedule=plan.config.schedule,
        sequence_parallel=plan.config.sequence_parallel and mesh.axis("tp").size > 1,
        data_parallel=case.params["data_parallel"],
        weight_decay=WEIGHT_DECAY,
        max_norm=MAX_NORM,
        betas=BETAS,
        eps=EPS,
    )


def stage_of(model: ModelConfig, layers: range, weights: dict[str, Tensor], first: bool, last: bool) -> Stage:
    """Returns the peer's stage with these layers of our full weights."""
    blocks = {i: Block(model.dim, model.num_heads, model.num_kv_heads, model.ffn_dim, model.norm_eps) for i in layers}
    for i, block in blocks.items():
        w = {
            name.removeprefix(f"layers.{i}."): value
            for name, value in weights.items()
            if name.startswith(f"layers.{i}.")
        }
        set_weight(block.attention_norm, w["attention_norm.weight"])
        set_weight(block.attention.q, w["attention.q.weight"])
        set_weight(block.attention.k, w["attention.kv.weight"][0])
        set_weight(block.attention.v, w["attention.kv.weight"][1])
        set_weight(block.attention.out, w["attention.out.weight"])
        set_weight(block.ffn_norm, w["ffn_norm.weight"])
        set_weight(block.ffn.gate, w["ffn.gate_up.weight"][0])
        set_weight(block.ffn.up, w["ffn.gate_up.weight"][1])
        set_weight(block.ffn.down, w["ffn.down.weight"])
    embed = set_weight(nn.Embedding(model.vocab_size, model.dim), weights["embed.weight"]) if first else None
    norm = set_weight(nn.RMSNorm(model.dim, eps=model.norm_eps), weights["norm.weight"]) if last else None
    head = set_weight(nn.Linear(model.dim, model.vocab_size, bias=False), weights["head.weight"]) if last else None
    return Stage(blocks, embed, norm, head)


def set_weight(module: nn.Module, value: Tensor) -> nn.Module:
    """Copies value into module.weight; returns the module."""
    with torch.no_grad():
        module.get_parameter("weight").copy_(value)
    return module


ABOUT = "training steps of one model on one grid, ours and torch's own stack"
SUITE = Suite("train", ABOUT, cases, measure, small_s=60.0, rounds=8)
