"""The card that `plait kernels tune` runs on: its facts, and a clock of CUDA events behind cold caches.

Not the walk (tune.py), which takes both as arguments. Needs a card; nothing here runs without one.
"""

import datetime
import importlib.metadata
import random
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import triton

from plait.kernels.launch import table_arch
from plait.kernels.tune import Card, Timer

# Bytes written before each timed call, in second level caches: one evicts what a call left, the others keep the card
# busy while the host gets the call under way, so that no launch is waited for (derived: 50 MB at 4 TB/s is 12 us).
_FLUSHES = 8


def _output(*command: str) -> str:
    """What a command prints, or "unknown" where there is no such command or it fails."""
    if shutil.which(command[0]) is None:
        return "unknown"
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.strip().split("\n")[0] if result.returncode == 0 else "unknown"


def source_commit() -> str:
    """The checkout's commit, with "+" where tracked files differ; plait's version where there is no checkout."""
    git = ("git", "-C", str(Path(__file__).resolve().parent))
    commit = _output(*git, "rev-parse", "--short", "HEAD")
    if commit == "unknown":
        return f"plait {importlib.metadata.version('plait')}"
    return commit + "+" * bool(_output(*git, "status", "--porcelain", "--untracked-files=no"))


def this_card() -> Card:
    """The current card; RuntimeError where torch finds none."""
    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    capability = 10 * properties.major + properties.minor
    driver = _output("nvidia-smi", f"--id={device.index}", "--query-gpu=driver_version", "--format=csv,noheader")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    shared = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # which torch's stub leaves out
    return Card(
        properties.name, device, table_arch(capability), capability, shared, driver, torch.__version__,
        triton.__version__, today, source_commit(),
    )  # fmt: skip


def event_timer(device: torch.device, seed: int = 0) -> Timer:
    """A timer of `device`: each round calls all once in an order drawn anew, each call behind flushed caches."""
    order = random.Random(seed)
    room = torch.empty(torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.int8, device=device)

    def time_us(calls: Mapping[str, Callable[[], object]], rounds: int) -> Mapping[str, Sequence[float]]:
        names, samples = list(calls), {name: [0.0] * rounds for name in calls}
        for call in calls.values():  # loads what the card has not loaded yet
            call()
        for index in range(rounds):
            order.shuffle(names)
            events = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in names}
            for name in names:
                for _ in range(_FLUSHES):
                    room.zero_()
                events[name][0].record()
                calls[name]()
                events[name][1].record()
            torch.cuda.synchronize(device)
            for name, (begin, end) in events.items():
                samples[name][index] = begin.elapsed_time(end) * 1000.0
        return samples

    return time_us
