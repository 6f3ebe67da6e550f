"""What rank 0 tells about a run: an event for each step and snapshot, then summary, plot and files.

Not the numbers (`plait.metrics`) and not how they look (`plait.view`). It writes `metrics.jsonl`, `summary.json` and
the plot into the run's folder, beside the snapshots and never into them.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from plait.ckpt import Handle
from plait.config import as_plain
from plait.metrics import History, Meter, StepRecord, peak_flops
from plait.model_config import flop_per_token, num_parameters
from plait.parallel.schedules import Schedule, Timeline
from plait.parallel.schedules.measured import FILE, to_json
from plait.plan import RunPlan
from plait.rank import Rank
from plait.view import write_plot


class Reporter:
    """Rank 0's voice. Owns the file of steps; `close` ends it."""

    def __init__(self, plan: RunPlan, rank: Rank, device: torch.device) -> None:
        self.plan, self.rank = plan, rank
        self.history = History(plan.config.out / "metrics.jsonl")
        self.meter = Meter(rank.started_s, self.history.reached, self.history.killed_s)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self.peak = peak_flops(name, plan.config.dtype)
        self.pending: list[tuple[int, Handle]] = []  # snapshots that are not durable yet

    def note(self, text: str) -> None:
        """Says one line."""
        self.rank.emit({"kind": "note", "text": text})

    def begin(self, step: int, resumed: str | None) -> None:
        """Says what will be trained, and from where."""
        config, model = self.plan.config, self.plan.model
        grid = " x ".join(f"{name} {size}" for name, size in self.plan.sizes.items())
        layers = f" of {', '.join(map(str, self.plan.layers_of))} layers" if self.plan.layers_of else ""
        self.note(
            f"{config.preset}: {num_parameters(model):,} parameters, grid {grid}, {self.plan.schedule.name}{layers}"
            f" with {self.plan.num_microbatches} micro-batches, zero {config.zero}, {config.dtype},"
            f" text {self.plan.corpus.path.name} ({self.plan.corpus.num_bytes:,} bytes)"
        )
        if resumed:
            self.note(f"resumed from {resumed}")
        self.history.start_at(step)

    def step(self, record: StepRecord, norm: float, lr: float) -> None:
        """Records a step and shows it; says which snapshots became durable meanwhile."""
        self.history.add(record.step, record.loss)
        self.meter.add(record)
        steps = self.plan.config.steps
        self.rank.emit(
            {
                "kind": "step",
                "step": record.step,
                "steps": steps,
                "loss": record.loss,
                "norm": norm,
                "lr": lr,
                "tokens_per_s": record.num_tokens / record.wall_s,
                "bubble": record.bubble,
                "stall_s": record.stall_s,
                "eta_s": (steps - record.step) * self.meter.recent_step_s,
            }
        )
        self.durable(wait=False)

    def saving(self, step: int, handle: Handle) -> None:
        """A snapshot was captured and is being written."""
        self.rank.emit({"kind": "snapshot", "step": step, "phase": "saving"})
        self.pending.append((step, handle))

    def durable(self, *, wait: bool) -> None:
        """Says which snapshots became durable; with `wait` all of them do first. Raises what went wrong with one."""
        left = []
        for step, handle in self.pending:
            if wait or handle.done():
                handle.wait()
                self.rank.emit({"kind": "snapshot", "step": step, "phase": "durable"})
            else:
                left.append((step, handle))
        self.pending = left

    def timeline(self, schedule: Schedule, measured: Timeline) -> None:
        """Writes the last step's timeline, for `plait schedule show --measured`."""
        _write(self.plan.config.out / FILE, to_json(schedule, measured))

    def close(self, step: int, tokens: int, held_out_loss: float | None, cut: str | None) -> None:
        """Ends the file of steps, draws the plot, shows and writes the summary. cut: where the evaluation was."""
        self.history.close(step)
        config = self.plan.config
        flops = flop_per_token(self.plan.model, config.seq)
        summary: dict[str, Any] = {"step": step, "tokens": tokens, "held_out_loss": held_out_loss, "evaluation": cut}
        summary |= self.meter.summary(time.time(), flops, self.peak, self.plan.world_size)
        losses = self.history.losses
        if losses:
            steps, values = zip(*sorted(losses.items()), strict=True)
            path, reason = write_plot(config.out, steps, values, held_out_loss)
            summary["plot"] = str(path)
            if reason:
                self.note(f"no plot: {reason}")
        self.rank.emit({"kind": "summary", **summary})
        if cut:
            self.note(f"held-out loss: none; {cut}")
        text = json.dumps({"config": as_plain(config), "grid": self.plan.sizes, **summary}, indent=1) + "\n"
        for target in (config.out / "summary.json", config.json):
            if target is not None:
                _write(target, text)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="ascii")
