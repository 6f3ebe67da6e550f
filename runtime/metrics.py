"""What a run measures about itself: a record of every step, and the numbers of the summary computed from them.

Not the view. Definitions, since each of these words has several:

    tokens/s   tokens of the global batch over the time of the step, snapshot stalls included
    bubble     1 - mean over ranks of (time in F, B, I, W without waits) / time of the pipeline step
    exposed    share of the step that rank 0 spends after its last backward waiting for gradients, norm and weights
    stall      time that the training thread was held by a snapshot, in save and before an update
    goodput    time of steps that were new (not done again after a kill) over the time since the run was started
    RTO        from the last step that the killed run recorded (at most one step before the kill) until that step was
               done again; `restart` is the part of it since this run was started
    slowest    the rank with the longest compute time; its lag is that time over the median, minus 1
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Peak dense bf16 FLOP/s by a word of the device name, from the vendor's data sheets (without sparsity, SXM).
PEAK_BF16 = (("H200", 989e12), ("H100", 989e12), ("A100", 312e12), ("B200", 2250e12), ("L40S", 362e12))


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Peak FLOP/s of one device, None where it is not known: no CPU, and only bf16."""
    if dtype != "bfloat16":
        return None
    # Whole words: a GH200 or GB200 is another card than its last four letters, and so are the NVL and PCIe variants.
    is_other = re.search(r"\b(NVL|PCIe)\b", device_name)
    words = re.findall(r"[A-Z0-9]+", device_name)
    return None if is_other else next((peak for part, peak in PEAK_BF16 if part in words), None)


@dataclass(frozen=True)
class StepRecord:
    """One step as rank 0 saw it; times in seconds."""

    step: int
    loss: float
    num_tokens: int
    wall_s: float
    pipeline_s: float
    exposed_s: float
    stall_s: float
    busy_s: Sequence[float]  # by rank

    @property
    def bubble(self) -> float:
        """Share of the pipeline step in which ranks, on average, did not compute."""
        return max(0.0, 1.0 - statistics.fmean(self.busy_s) / self.pipeline_s) if self.pipeline_s > 0 else 0.0


class History:
    """The file of all steps of a run, over all its starts: `metrics.jsonl`, one object a line, last word wins."""

    def __init__(self, path: Path) -> None:
        self.losses: dict[int, float] = {}
        self.killed_s: float | None = None  # time.time() of the last record, if the start that made it did not end
        self.reached = 0  # the highest step that an earlier start finished
        whole = True
        if path.exists():
            text = path.read_text(encoding="ascii")
            for line in text.splitlines():
                self._take(line)
            whole = not text or text.endswith("\n")
        self._file = path.open("a", encoding="ascii")
        if not whole:
            self._write("")

    def _take(self, line: str) -> None:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # the last line of a killed start may be half
            return
        if "resumed" in record:
            self.losses = {at: loss for at, loss in self.losses.items() if at <= record["resumed"]}
            return
        if "ended" in record:
            self.killed_s = None
            return
        self.losses[record["step"]] = record["loss"]
        self.reached = max(self.reached, record["step"])
        self.killed_s = record["time_s"]

    def start_at(self, step: int) -> None:
        """Forgets losses after `step`: they are computed again."""
        self._take(json.dumps({"resumed": step}))
        self._write(json.dumps({"resumed": step}))

    def add(self, step: int, loss: float) -> None:
        """Appends a step; in the kernel's hands when this returns, so that a killed process does not lose it."""
        self.losses[step] = loss
        self._write(json.dumps({"step": step, "loss": loss, "time_s": time.time()}))

    def close(self, step: int) -> None:
        """Says that this start ended by itself, with everything saved."""
        self._write(json.dumps({"ended": step}))
        self._file.close()

    def _write(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()


@dataclass
class Meter:
    """Collects the steps of one start and computes its summary."""

    started_s: float  # time.time()
    reached: int  # step that an earlier start had reached
    killed_s: float | None  # about when it was killed; None: it ended by itself
    records: list[StepRecord] = field(default_factory=list)
    regained_s: float | None = None  # time.time() when `reached` was reached again

    def add(self, record: StepRecord) -> None:
        """Takes one step, just finished."""
        self.records.append(record)
        if self.regained_s is None and record.step >= self.reached:
            self.regained_s = time.time()

    @property
    def recent_step_s(self) -> float:
        """Mean time of the last ten steps, the first of the start left out where there are more: it warms up."""
        recent = [record.wall_s for record in self.records[1:][-10:]] or [self.records[-1].wall_s]
        return statistics.fmean(recent)

    def summary(self, now_s: float, flops_token: float, peak: float | None, world_size: int) -> dict[str, Any]:
        """The numbers of this start; empty when it made no step."""
        if not self.records:
            return {}
        steady = self.records[1:] or self.records
        step_s = statistics.median(record.wall_s for record in steady)
        tokens_per_s = sum(r.num_tokens for r in steady) / sum(r.wall_s for r in steady)
        busy = [sum(times) for times in zip(*(record.busy_s for record in steady), strict=True)]
        slowest = max(range(len(busy)), key=busy.__getitem__)
        middle = statistics.median(busy)
        wall_s = sum(record.wall_s for record in steady)
        new_s = sum(record.wall_s for record in self.records if record.step > self.reached)
        resumed = self.killed_s is not None and self.regained_s is not None
        return {
            "loss": self.records[-1].loss,
            "tokens_per_s": tokens_per_s,
            "step_ms": step_s * 1e3,
            "mfu": None if peak is None else tokens_per_s * flops_token / (peak * world_size),
            "bubble": statistics.fmean(record.bubble for record in steady),
            "exposed_communication": sum(record.exposed_s for record in steady) / wall_s,
            "stall_s": sum(record.stall_s for record in self.records),
            "goodput": new_s / (now_s - self.started_s),
            "rto_s": (self.regained_s or 0.0) - (self.killed_s or 0.0) if resumed else None,
            "restart_s": (self.regained_s or 0.0) - self.started_s if resumed else None,
            "slowest_rank": slowest if world_size > 1 else None,
            "slowest_lag": busy[slowest] / middle - 1.0 if world_size > 1 and middle > 0 else None,
        }
