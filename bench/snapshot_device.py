"""How fast a state leaves a device: from a save's call until its bytes are in the host's memory, beside one copy of
as many bytes into page-locked memory by the driver, in turn.

One case of the `snapshots` suite, where there is a CUDA device. The clock stops when the compute stream may write
again: `fence()` lets it wait for the copies, and the host then waits for it. Writing goes on meanwhile and is waited
for before the next turn.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch

from plait.bench.ending import scratch_folder
from plait.bench.snapshot_turn import MIB, fast_state
from plait.bench.snapshot_way import State, differing, size_of
from plait.bench.spec import Case, CaseResult, Measured, Options, WrongResultError
from plait.bench.stats import paired_ratio
from plait.ckpt import Snapshots

NOTE = (
    "host_wall, one process; limit: one copy_ of as many bytes into page-locked memory; goal: at most 1.11 times that"
)


def cases(mib: int, tensors: int) -> list[Case]:
    """One case where torch sees a CUDA device, else none."""
    if not torch.cuda.is_available():
        return []
    params = {"mib": mib, "tensors": tensors, "quantity": "from device", "device": "cuda"}
    return [Case(f"{mib} MiB in {tensors}, from the device", params, bytes_moved=float(mib * MIB))]


class Device:
    """A state on a device, the snapshots that save it, and a buffer with its page-locked copy. On the CPU, for tests
    of this code, nothing is page-locked."""

    def __init__(self, root: Path, case: Case, seed: int) -> None:
        params = case.params
        self.device = torch.device(params["device"])
        on_host = fast_state(params["mib"] * MIB, params["tensors"], seed)
        self.state: State = {name: value.to(self.device) for name, value in on_host.items()}
        self.source = torch.ones(size_of(self.state), dtype=torch.uint8, device=self.device)
        self.locked = torch.empty(len(self.source), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        self.snapshots = Snapshots(root, keep_last=1)
        self.snapshots.prepare(dict(self.state))
        self.step = 0

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def copy(self) -> float:
        """The driver's copy; returns the seconds."""
        self.wait()
        start = time.perf_counter()
        self.locked.copy_(self.source, non_blocking=True)
        self.wait()
        return time.perf_counter() - start

    def save(self) -> float:
        """A save of changed tensors, until all are on the host; returns the seconds once it is durable."""
        self.step += 1
        for value in self.state.values():
            value[0] = float(self.step)
        self.wait()
        start = time.perf_counter()
        handle = self.snapshots.save(self.step, dict(self.state))
        handle.fence()
        self.wait()
        seconds = time.perf_counter() - start
        handle.wait()
        return seconds

    def check(self) -> None:
        """Loads the last save and compares bit for bit; WrongResultError."""
        target = {name: torch.zeros_like(value) for name, value in self.state.items()}
        self.snapshots.restore(dict(target))
        if name := differing(self.state, target):
            raise WrongResultError(f"plait: {name} differs from what was saved")


def measure(case: Case, options: Options) -> CaseResult:
    """Runs the case; params: mib, tensors, device, and a `folder` to write to (default: the temporary one)."""
    order = random.Random(options.seed)
    samples: dict[str, list[float]] = {"plait": [], "limit": []}
    with scratch_folder(inside=case.params.get("folder")) as root:
        bench = Device(Path(root), case, options.seed)
        turns = {"plait": bench.save, "limit": bench.copy}
        try:
            for index in range(1 + options.rounds):  # the first one makes streams and buffers
                for name in order.sample(list(turns), len(turns)):
                    seconds = turns[name]()
                    samples[name] += [seconds] if index else []
            bench.check()
        finally:
            bench.snapshots.close()
    figures = {"x limit": paired_ratio(samples["limit"], samples["plait"])[0]}
    ours = Measured(samples["plait"], "loaded and compared bit for bit", figures)
    limit = Measured(samples["limit"], "one copy_ into page-locked memory", {"x limit": 1.0})
    return CaseResult(case, "plait", {"plait": ours, "limit": limit}, NOTE)
