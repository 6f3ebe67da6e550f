"""One provider's turn in a round of the `snapshots` suite, in a fresh process: its first save, saves after it, a save
beside training, and restores. What it loads is compared bit for bit with the state at the call of the save.

The process is forked from a server that has torch loaded and has computed nothing, so that it starts in milliseconds.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import shutil
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from plait.bench import snapshot_memory as memory
from plait.bench.providers import PROVIDERS, Need, lack_of
from plait.bench.snapshot_limits import Limits
from plait.bench.snapshot_others import DeepSpeed, Nvrx, Orbax, TorchSnapshot
from plait.bench.snapshot_peers import Dcp, DcpAsync, DcpProcess, Plait, Safetensors, TorchSaveFast
from plait.bench.snapshot_training import Loss, Nudge, Training
from plait.bench.snapshot_way import Pending, Provider, Saved, State, differing, save, sync_all, version_of
from plait.bench.spec import WrongResultError

Samples = dict[str, list[float]]
WARM = 2  # saves that are counted as warm: from the third on, since retention removes nothing before the second
BESIDE = 3  # saves beside the loop of one thread: single ones differ too much to decide by
MIB = 1 << 20
ODD = 1013  # elements by which tensor sizes differ: no multiple of a page, a block or a vector
COLD = 0.02  # share of a save's pages that may be left in the cache by the advice to drop them


class Way(NamedTuple):
    """A provider by name: what it imports (that memory is not the save's), and how it is made."""

    module: str
    make: Callable[[Path, State, Nudge], Provider]
    needs_cuda: bool = False


WAYS = {
    "plait": Way("plait.ckpt", lambda root, state, nudge: Plait(root)),
    "plait guarded": Way("plait.ckpt", lambda root, state, nudge: Plait(root, nudge)),
    "torch.save": Way("torch", lambda root, state, nudge: TorchSaveFast()),
    "safetensors": Way("safetensors.torch", lambda root, state, nudge: Safetensors()),
    "dcp": Way("torch.distributed.checkpoint", lambda root, state, nudge: Dcp(2)),
    "dcp async thread": Way("torch.distributed.checkpoint", lambda root, state, nudge: DcpAsync(True, 2)),
    "dcp async process": Way("torch.distributed.checkpoint", lambda root, state, nudge: DcpProcess(False, 2)),
    "dcp async process behind": Way("torch.distributed.checkpoint", lambda root, state, nudge: DcpProcess(True, 2)),
    "dcp async pinned": Way("torch.distributed.checkpoint", lambda root, state, nudge: DcpAsync(True, 2), True),
    "torchsnapshot": Way("torchsnapshot", lambda root, state, nudge: TorchSnapshot()),
    "nvidia-resiliency-ext": Way(
        "nvidia_resiliency_ext.checkpointing.async_ckpt.core", lambda root, state, nudge: Nvrx(state)
    ),
    "deepspeed": Way("deepspeed", lambda root, state, nudge: DeepSpeed()),
    "orbax": Way("orbax.checkpoint", lambda root, state, nudge: Orbax()),
}


def missing(name: str) -> str:
    """Returns why a provider cannot run here; '' where it can."""
    way = WAYS[name]
    top = way.module.partition(".")[0]
    if importlib.util.find_spec(top) is None:
        return f"{name} is not installed"
    if lacking := lack_of(PROVIDERS["snapshots"].get(name, Need())):
        return lacking
    if way.needs_cuda:
        return "pinned memory needs CUDA" if not torch.cuda.is_available() else "measured on a host's tensors only"
    return ""


def fast_state(nbytes: int, count: int, seed: int) -> State:
    """`count` fp32 tensors of slightly different sizes, `nbytes` together, out of 64 MiB of random normal numbers:
    each begins elsewhere in them, so that no compressor's window sees one twice."""
    source = torch.randn(16 * MIB, generator=torch.Generator().manual_seed(seed))
    even, total = nbytes // 4 // count, nbytes // 4
    sizes = [even + ODD * (index % 3 - 1) for index in range(count - 1)]
    sizes.append(total - sum(sizes))
    state = {}
    for index, size in enumerate(sizes):
        at = index * 7919 * 64 % len(source)
        value = torch.empty(size)
        for begin in range(0, size, len(source)):
            part = value[begin : begin + len(source)]
            part.copy_(source.roll(-at)[: len(part)] if at + len(part) > len(source) else source[at:][: len(part)])
        state[f"layer.{index}"] = value
    return state


class Turn:
    """A provider's turn under way. params: mib, tensors, seed, cold (whether the page cache can be dropped), and
    threads: the training loops that a save is timed beside."""

    def __init__(self, name: str, root: Path, params: dict[str, Any]) -> None:
        self.name, self.root, self.params = name, root, params
        self.state = fast_state(params["mib"] * MIB, params["tensors"], params["seed"])
        self.training = Training(self.state, params["step_s"])
        self.target = {name: torch.zeros_like(value).fill_(1.0) for name, value in self.state.items()}
        self.samples: Samples = {}
        self.count = 0
        importlib.import_module(WAYS[name].module)
        before = memory.forget_peak()
        start = time.perf_counter()
        self.provider = WAYS[name].make(root / "plait", self.state, self.training.optimizer)
        if isinstance(self.provider, Plait):
            self.provider.prepare(self.state)
        self.note("prepare", time.perf_counter() - start)
        self.before = before

    def note(self, quantity: str, value: float) -> None:
        """Keeps a sample."""
        self.samples.setdefault(quantity, []).append(value)

    def folder(self) -> Path:
        """Returns the folder of a new save."""
        self.count += 1
        return self.root / f"save-{self.count}"

    def saves(self) -> Path:
        """The first save and those after it, while nothing trains; returns the last one's folder."""
        last: Path | None = None
        for kind in ["first", "second", *["warm"] * WARM]:
            self.training.steps(1)
            saved = save(self.provider, self.folder(), self.state)
            self.note(f"stall {kind}", saved.stall_s)
            self.note(f"complete {kind}", saved.complete_s)
            self.note(f"durable {kind}", saved.durable_s)
            last = self.replace(last, saved)
        self.note("memory save", memory.peak_since(self.before))
        assert last is not None
        return last

    def replace(self, last: Path | None, saved: Saved) -> Path:
        """Removes the save before, which plait's retention has done already."""
        if last is not None and last.exists():
            shutil.rmtree(last)
        return saved.path

    def beside_training(self, threads: int, last: Path) -> tuple[Path, Loss]:
        """Saves beside a loop of so many threads; returns the last one's folder and what the loop lost to it."""
        self.training.set_threads(threads)
        for _ in range(BESIDE if threads == 1 else 1):
            folder = self.folder()

            def begin(folder: Path = folder) -> Pending:
                return self.provider.begin(folder, self.state)

            pending, loss = self.training.beside(begin)
            path = pending.wait()
            sync_all(path)
            self.note(f"lost {threads}", loss.lost_s)
            self.note(f"lost share {threads}", loss.lost_s / loss.complete_s)
            self.note(f"stall in training {threads}", loss.stall_s)
            self.note(f"fence and update {threads}", loss.fence_s)
            last = self.replace(last, Saved(0.0, 0.0, 0.0, path))
        return last, loss

    def restore(self, kind: str, path: Path, flipped: int) -> None:
        """Loads into poisoned tensors that are resident, and compares with the state when so many bits were
        flipped. Cold: the page cache has none of it (OSError where the kernel kept it); warm: it has all, read from
        the disk once more, so that no way finds pages that lie better or are in use longer than another's."""
        for value in self.target.values():
            value.fill_(float("nan"))
        memory.drop_from_cache(path)
        if kind == "cold":
            share = memory.resident_share(path)
            if share > COLD:
                raise OSError(f"{share:.0%} of '{path}' stayed in the page cache: no cold restore can be timed")
        else:
            memory.read_into_cache(path)
        before = memory.forget_peak()
        start = time.perf_counter()
        self.provider.load(path, self.target)
        self.note(f"restore {kind}", time.perf_counter() - start)
        self.note("memory restore", memory.peak_since(before))
        with self.training.optimizer.as_it_was(flipped):
            if key := differing(self.state, self.target):
                raise WrongResultError(f"{self.name}: {key} is not what it was when the save was called")

    def run(self) -> Samples:
        """Everything in order; returns all samples."""
        try:
            path, flipped = self.saves(), self.training.optimizer.flipped
            for threads in self.params["threads"]:
                path, loss = self.beside_training(threads, path)
                flipped = loss.flipped
            for kind in ["cold", "warm"] if self.params["cold"] else ["warm"]:
                self.restore(kind, path, flipped)
        finally:
            self.provider.close()
        return self.samples


def limits_of(root: Path, params: dict[str, Any]) -> Samples:
    """What the machine allows, as often as a provider saves warm."""
    state = fast_state(params["mib"] * MIB, params["tensors"], params["seed"])
    limits = Limits(state)
    samples: Samples = {}
    for index in range(WARM):
        samples.setdefault("memcpy", []).append(limits.copy(2))
        for threads in (2, 4):
            path = root / f"limit-{index}-{threads}" / "state"
            samples.setdefault(f"write {threads}", []).append(limits.write(path, threads))
            memory.drop_from_cache(path.parent)
            samples.setdefault(f"read {threads}", []).append(limits.read(path, threads))
            samples.setdefault(f"overwrite {threads}", []).append(limits.overwrite(path, threads))
            shutil.rmtree(path.parent)
    return samples


def run(name: str, root: Path, params: dict[str, Any]) -> dict[str, Any]:
    """Returns a turn's samples, or its error; name '' for the limits."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of peers, once a turn
            if not name:
                return {"samples": limits_of(root, params)}
            turn = Turn(name, root, params)
            gc.collect()  # due since the imports, 0.06 to 0.13 s: it would fall into somebody's first call
            return {"samples": turn.run(), "about": about(turn.provider)}
    except WrongResultError as error:
        return {"wrong": str(error)}
    except Exception as error:  # whatever a peer raises is its result
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error) else ''}"}


def about(provider: Provider) -> str:
    """Returns version and use of a provider, for people."""
    synced = "" if provider.syncs else "never syncs: fsync added here"
    parts = [f"{provider.package} {version_of(provider.package)}", provider.note, synced]
    return "; ".join(part for part in parts if part)


def child(connection: Connection, name: str, root: str, params: str) -> None:
    """A forked process: in a group of its own, so that it can be ended with all that it started."""
    os.setpgid(0, 0)
    with open(Path(root) / "output.txt", "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    answer = run(name, Path(root), json.loads(params))
    connection.send_bytes(json.dumps(answer).encode())
    connection.close()
