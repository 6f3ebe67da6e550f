"""The training loop: one rank's life from the grid to the summary.

Not the pieces: model, pipeline, data parallelism, optimizer and snapshots each work alone. The one idea: a step is a
pure function of the state (no clock, no length of the run), and all that ranks must agree on in it (loss, norm, the
wish to stop) travels in one all-reduce.
"""

from __future__ import annotations

import math
import secrets
import signal
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from plait.ckpt import Handle, Snapshots, Trigger
from plait.ckpt.folders import step_folders
from plait.config import MEASURED, split_source
from plait.data import Batches, held_out_batches
from plait.metrics import StepRecord
from plait.model import LlamaStage, build_stages
from plait.optimizer import LearningRate
from plait.parallel import collectives
from plait.parallel.data import DataParallel, ShardedAdamW, clip_factor
from plait.parallel.mesh import Mesh
from plait.parallel.pipeline import Pipeline
from plait.parallel.recompute import Policy
from plait.parallel.schedules.action import COMPUTE
from plait.parallel.timelines import gather_timeline
from plait.parallel.wire import measured_bucket_bytes
from plait.plan import EVAL_BATCHES, RunPlan
from plait.rank import Diverged, Rank
from plait.report import Reporter
from plait.state import Progress, run_state

if TYPE_CHECKING:
    from plait.parallel.fully_sharded import FullySharded

MAX_NORM = 1.0  # gradients are clipped to this global norm (GPT-3, Llama)
BETAS = (0.9, 0.95)  # GPT-3, Llama
WEIGHT_DECAY = 0.1  # GPT-3, Llama; matrices only
EPS = 1e-8
BUCKET_MIB = 16
SAVE_NOW = "save-now"  # touched in --out: a snapshot after the step under way


def train(plan: RunPlan, rank: Rank) -> None:
    """Trains to `--steps` or until asked to stop; raises what went wrong. Collective over all ranks of the grid."""
    rank.connect()
    Trainer(plan, rank, make_mesh(plan, rank)).run()
    rank.disconnect()


def make_mesh(plan: RunPlan, rank: Rank) -> Mesh:
    """The grid of a connected rank; without a process group when it is alone. Collective."""
    device_type = rank.device().type
    sizes: dict[str, Any] = dict(plan.sizes)
    if plan.world_size == 1:
        return Mesh.single(device_type)
    node_size = plan.config.node_size or rank.place.local_world_size
    return Mesh.create(device_type=device_type, node_size=node_size, **sizes)


class Trainer:
    """What one rank holds of a run, and its loop."""

    def __init__(self, plan: RunPlan, rank: Rank, mesh: Mesh) -> None:
        config = plan.config
        self.plan, self.rank, self.mesh = plan, rank, mesh
        self.everyone = mesh.axis(*mesh.grid.names)
        self.stages = stages = build_stages(
            plan.model,
            mesh,
            plan.schedule,
            seed=config.seed,
            dtype=plan.dtype,
            sequence_parallel=config.sequence_parallel,
            recompute=cast(Policy, config.recompute),
            dropout=config.dropout,
            layers_of=plan.layers_of,
        )
        self.dp = _data_parallel(plan, mesh, stages)
        self.optimizer = ShardedAdamW(self.dp, betas=BETAS, eps=EPS)
        self.pipeline = Pipeline(stages, plan.schedule, mesh, data_parallel=self.dp)
        self.learning_rate = LearningRate.over(config.lr_decay_steps, peak=config.lr)
        self.positions = torch.arange(config.seq, device=mesh.device)
        axis = mesh.axis("dp")
        self.batches = Batches(
            windows=plan.corpus.train_windows(config.seq),
            global_batch=config.global_batch,
            seed=config.seed,
            dp=axis.size,
            coord=axis.coord,
            device=mesh.device,
        )
        self.progress = Progress(plan.identity, self.optimizer)
        self.state = run_state(self.progress)
        self.trigger = Trigger(
            steps=config.save_every,
            minutes=config.save_every_minutes,
            mtbf_hours=config.mtbf_hours,
            save_signals=(signal.SIGUSR1,),
            touch=config.out / SAVE_NOW,
            rank=mesh.rank,
        )
        self.wish = 0.0  # of all ranks, to save after the last step
        self.loss = math.nan  # of the last step
        self.stall_s = 0.0  # since the last step ended
        self.saved: Handle | None = None  # the last snapshot
        self.session = self._agree_on_session()
        self.snapshots = Snapshots(
            config.out,
            keep_last=config.keep,
            keep_every=config.keep_every,
            keep_best=None if config.keep_best is None else ("loss", "min", config.keep_best),
            grid=plan.sizes,
            rank=mesh.rank,
            world_size=mesh.world_size,
            session=self.session,
        )
        collectives.barrier(self.everyone)  # rank 0 has the lock, and has removed what dead starts left
        self.reporter = Reporter(plan, rank, mesh.device) if mesh.rank == 0 else None
        if self.reporter and config.bucket_mib == MEASURED and isinstance(self.dp, DataParallel):
            size = self.dp.bucket_bytes >> 20
            self.reporter.note(f"buckets of {size} MiB, as measured; --bucket-mib {size} keeps them")

    def _agree_on_session(self) -> int:
        """A number that no other start of this run has, rank 0's on all ranks."""
        session = torch.tensor([secrets.randbits(62)], device=self.mesh.device)
        return int(collectives.broadcast(session, self.everyone))

    def run(self) -> None:
        """Restores, trains, evaluates, reports. The last state is durable before the evaluation begins."""
        config, reporter = self.plan.config, self.reporter
        with self.snapshots:
            resumed = self.restore()
            self.snapshots.guard(self.optimizer)  # captured while the next step computes; its update waits
            self.snapshots.prepare(self.state)  # the first save finds memory that is faulted in
            if reporter:
                reporter.begin(self.progress.step, resumed)
            stopping = self._steps()
            timeline = gather_timeline(self.pipeline)
            if reporter and timeline is not None:
                reporter.timeline(self.pipeline.schedule, timeline)
            self.snapshots.wait()
        self.trigger.close()
        if reporter:
            reporter.durable(wait=True)
            if (interval := self.trigger.interval()) is not None:
                reporter.note(f"snapshots every {interval.seconds:.0f} s cost {interval.waste:.2%} with failures")
            if stopping:
                reporter.note(f"stopped at step {self.progress.step} of {config.steps}; it is saved")
        held_out_loss, cut = (None, None) if stopping else self.evaluate()
        if reporter:
            reporter.close(self.progress.step, self.progress.tokens, held_out_loss, cut)

    def restore(self) -> str | None:
        """Takes up the newest good snapshot or the one that was asked for; says which, None for a fresh start."""
        config = self.plan.config
        empty = not step_folders(config.out)  # damaged ones are no fresh start: the restore says what is wrong
        if config.from_ is not None and empty:
            folder, step = split_source(config.from_)
            with Snapshots(
                folder,
                read_only=True,
                agreement_root=config.out,
                rank=self.mesh.rank,
                world_size=self.mesh.world_size,
                session=self.session + 1,
            ) as source:
                restored = source.restore(self.state, step=step)
                self._settle(source)
        elif config.resume == "none" or (config.resume == "latest" and empty):
            return None
        else:
            wanted = None if config.resume == "latest" else int(config.resume)
            restored = self.snapshots.restore(self.state, step=wanted)
            self._settle(self.snapshots)
        skipped = "".join(f"; passed over {name}: {reason}" for name, reason in restored.report.skipped)
        grid = ", ".join(f"{name}={size}" for name, size in restored.report.saved_grid.items())
        return f"{restored.report.folder}, saved on {grid}{skipped}"

    def _settle(self, snapshots: Snapshots) -> None:
        """Removes what the restore left behind; a run with nothing left to train would never commit over it."""
        collectives.barrier(self.everyone)
        snapshots.settle()

    def _steps(self) -> bool:
        """Steps until the end or a stop, whose state is saved; returns whether it was a stop."""
        config, stopping = self.plan.config, False
        if self.progress.step >= config.steps:
            if self.reporter:
                self.reporter.note(f"nothing left to train: step {self.progress.step} of {config.steps} is done")
            if self.snapshots.latest() is None:
                self.save(last=True)  # of --from: the other run's state, cut for this grid
        while self.progress.step < config.steps and not stopping:
            stopping = self.step()
            last = stopping or self.progress.step == config.steps
            if self.trigger.due(self.progress.step, self.wish) or last:
                self.save(last=last)
        return stopping

    def step(self) -> bool:
        """One optimizer step on the whole grid; returns whether all ranks stop after it.

        Raises Diverged, on all ranks, when loss or gradient is not finite; the weights are then those of before.
        """
        started = time.perf_counter()
        config, step = self.plan.config, self.progress.step
        batch = self.batches.at(step)
        lr = self.learning_rate.at(step)
        self.dp.zero_grad()
        inputs = batch.inputs(seed=config.seed, step=step, positions=self.positions)
        result = self.pipeline.step(inputs, batch.targets, batch.num_tokens, metrics="local")
        computed = time.perf_counter()
        self.dp.finish()
        self.loss, norm, stopping, busy_s = self._agree(result.loss)
        if not (math.isfinite(self.loss) and math.isfinite(norm)):
            raise Diverged(f"step {step + 1}: loss {self.loss}, gradient norm {norm}; a lower --lr may help")
        reduced = time.perf_counter()
        factor = clip_factor(torch.tensor(norm, dtype=torch.float64), MAX_NORM)
        fenced_s = self._fenced_s()
        self.optimizer.step(lr, WEIGHT_DECAY, float(factor))
        fenced_s = self._fenced_s() - fenced_s
        self.progress.advance(batch.num_tokens)
        if self.reporter:
            ended = time.perf_counter()
            record = StepRecord(
                step=self.progress.step,
                loss=self.loss,
                num_tokens=batch.num_tokens,
                wall_s=ended - started + self.stall_s,
                pipeline_s=computed - started,
                exposed_s=reduced - computed,
                stall_s=self.stall_s + fenced_s,
                busy_s=busy_s,
            )
            self.reporter.step(record, norm, lr)
        self.stall_s = 0.0
        return stopping

    def _fenced_s(self) -> float:
        """How long updates have waited so far for the last snapshot's capture."""
        return self.saved.fence_s if self.saved is not None else 0.0

    def _agree(self, loss: torch.Tensor) -> tuple[float, float, bool, list[float]]:
        """The step's one all-reduce over the grid: (mean loss, gradient norm, whether any rank was asked to stop,
        compute seconds by rank), and into `wish` whether any wants a snapshot. A loss counts once per tensor-parallel
        group, whose ranks all hold it."""
        busy_s = sum(event.end - event.start for event in self.pipeline.timeline if event.action.op in COMPUTE)
        message = torch.zeros(4 + self.mesh.world_size, dtype=torch.float64, device=self.mesh.device)
        if self.mesh.axis("tp").coord == 0:
            message[0] = loss
        message[1] = self.dp.norm_squared()
        message[2] = self.rank.stop.requested
        message[3] = self.trigger.wish()
        message[4 + self.mesh.rank] = busy_s
        collectives.all_reduce(message, self.everyone)
        total, squares, stops, self.wish, *by_rank = message.tolist()
        return total, math.sqrt(squares), stops > 0.0, by_rank

    def save(self, *, last: bool) -> None:
        """Captures the state; it becomes durable while the next steps run. Raises what an earlier one failed with."""
        metrics = {"loss": self.loss} if math.isfinite(self.loss) else None  # of the last step, if there was one here
        handle = self.snapshots.save(self.progress.step, self.state, force=last, metrics=metrics)
        self.saved = handle
        self.trigger.saved(handle)
        self.stall_s += handle.stall_s
        if self.reporter:
            self.reporter.saving(self.progress.step, handle)

    def evaluate(self) -> tuple[float | None, str | None]:
        """Mean loss per token of the first held-out batches: the same rows whatever the grid. Collective.

        None, and where it was cut, when a rank was asked to stop: the wish rides on the all-reduce of each batch.
        """
        config, axis = self.plan.config, self.mesh.axis("dp")
        windows = self.plan.corpus.held_out_windows(config.seq)
        max_rows = min(EVAL_BATCHES * config.global_batch, len(windows))
        num_batches = math.ceil(max_rows / config.global_batch)
        batches = held_out_batches(
            windows,
            global_batch=config.global_batch,
            dp=axis.size,
            coord=axis.coord,
            max_rows=max_rows,
            device=self.mesh.device,
        )
        total, count = 0.0, 0.0
        for done, batch in enumerate(batches, start=1):
            inputs = batch.inputs(seed=config.seed, step=self.progress.step, positions=self.positions)
            result = self.pipeline.evaluate(inputs, batch.targets, batch.num_tokens, metrics="local")
            message = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
            if self.mesh.axis("tp").coord == 0:
                message[0] = result.loss
            message[1] = self.rank.stop.requested
            loss, stops = collectives.all_reduce(message, self.everyone).tolist()
            if stops > 0.0 and done < num_batches:
                return None, f"stopped after {done} of {num_batches} batches"
            total += loss * batch.num_tokens
            count += batch.num_tokens
        return total / count, None


def _data_parallel(plan: RunPlan, mesh: Mesh, stages: Mapping[int, LlamaStage]) -> DataParallel | FullySharded:
    """What sums gradients over dp, and shards what --zero says."""
    tied, config = _tied(plan, mesh, stages), plan.config
    wire_dtype = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}[config.wire_dtype]
    if config.zero == 3:
        from plait.parallel.fully_sharded import FullySharded  # FSDP2 takes a while to import

        in_node = config.node_size is not None  # asked for, since it takes memory
        return FullySharded(stages, mesh, plan.schedule, in_node=in_node, wire_dtype=wire_dtype, **tied)
    if config.bucket_mib == MEASURED:
        size = measured_bucket_bytes(mesh.axis("dp"), mesh.device)
    else:
        size = int(config.bucket_mib or BUCKET_MIB) << 20
    return DataParallel(stages, mesh, zero=config.zero, bucket_bytes=size, wire_dtype=wire_dtype, **tied)


def _tied(plan: RunPlan, mesh: Mesh, stages: Mapping[int, LlamaStage]) -> dict[str, Any]:
    """Which of my stages hold a copy of the tied weight, and which ranks do; empty where there is one copy."""
    schedule = plan.schedule
    ends = (0, schedule.num_stages - 1)
    if not plan.model.tied or schedule.num_stages == 1:
        return {}
    tied = {index: stages[index].embed.weight for index in ends if index in stages}
    ranks = tuple(mesh.axis("pp").ranks[schedule.stage_to_rank[index]] for index in ends)
    return {"tied": tied, "tied_ranks": ranks} if tied else {}
