"""Ways to save and load a state of tensors, as the `snapshots` suite compares them: ours, torch's, and the machine's.

Each says when training may go on and when the disk has everything; "+fsync" is added here where a peer never syncs.
Measures nothing but its own calls.
"""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from plait import _C
from plait.bench.spec import Measured
from plait.ckpt import Snapshots

State = dict[str, Tensor]


class Saved(NamedTuple):
    """One save: both times, from the call, and the folder that holds it."""

    stall_s: float
    durable_s: float
    path: Path


class Provider(Protocol):
    """One way to save and load a state."""

    def save(self, folder: Path, state: State) -> Saved:
        """Saves into `folder`, which does not exist yet, and waits until it is durable."""

    def load(self, path: Path, state: State) -> None:
        """Fills the tensors of `state` from a save's folder."""

    def close(self) -> None:
        """Lets go of threads and memory."""


class Plait:
    """plait.ckpt.Snapshots as in a run: one object, its staging memory kept over the saves, a folder for each."""

    def __init__(self, root: Path) -> None:
        self.snapshots = Snapshots(root)
        self.step = 0

    def save(self, folder: Path, state: State) -> Saved:
        self.step += 1
        handle = self.snapshots.save(self.step, dict(state))
        handle.wait()
        assert handle.durable_s is not None and handle.folder is not None
        return Saved(handle.stall_s, handle.durable_s, handle.folder)

    def load(self, path: Path, state: State) -> None:
        self.snapshots.restore(dict(state))

    def close(self) -> None:
        self.snapshots.close()


class TorchSave:
    """torch.save and torch.load(weights_only=True), with fsync of file and folder."""

    def save(self, folder: Path, state: State) -> Saved:
        start = time.perf_counter()
        folder.mkdir()
        with open(folder / "state.pt", "wb") as file:
            torch.save(state, file)
            stall_s = time.perf_counter() - start
            file.flush()
            os.fsync(file.fileno())
        sync_folders(folder)
        return Saved(stall_s, time.perf_counter() - start, folder)

    def load(self, path: Path, state: State) -> None:
        copy_into(state, torch.load(path / "state.pt", weights_only=True))

    def close(self) -> None:
        pass


class Safetensors(TorchSave):
    """safetensors' save_file and load_file, with fsync of file and folder."""

    def save(self, folder: Path, state: State) -> Saved:
        from safetensors.torch import save_file

        start = time.perf_counter()
        folder.mkdir()
        save_file(state, folder / "state.safetensors")
        stall_s = time.perf_counter() - start
        with open(folder / "state.safetensors", "rb") as file:
            os.fsync(file.fileno())
        sync_folders(folder)
        return Saved(stall_s, time.perf_counter() - start, folder)

    def load(self, path: Path, state: State) -> None:
        from safetensors.torch import load_file

        copy_into(state, load_file(path / "state.safetensors"))


class Dcp(TorchSave):
    """torch.distributed.checkpoint's save (which syncs its files) and load, in one process without a group."""

    def save(self, folder: Path, state: State) -> Saved:
        import torch.distributed.checkpoint as dcp

        start = time.perf_counter()
        dcp.save(state, checkpoint_id=folder)
        stall_s = time.perf_counter() - start
        sync_folders(folder)
        return Saved(stall_s, time.perf_counter() - start, folder)

    def load(self, path: Path, state: State) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(dict(state), checkpoint_id=path)


class DcpAsync(Dcp):
    """DCP's async_save on a thread, as it comes; `cached` keeps its staging memory over the saves."""

    def __init__(self, cached: bool) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        # Pinned memory and staging on another thread need a GPU; these are also async_save's own choices.
        self.stager = DefaultStager(StagingOptions(False, False, False, False)) if cached else None

    def save(self, folder: Path, state: State) -> Saved:
        import torch.distributed.checkpoint as dcp

        start = time.perf_counter()
        future: Any = dcp.async_save(state, checkpoint_id=folder, async_stager=self.stager)
        stall_s = time.perf_counter() - start
        future.result()
        sync_folders(folder)
        return Saved(stall_s, time.perf_counter() - start, folder)

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()


class Limit:
    """What this machine allows: memcpy of the state into resident memory by two threads, then its bytes written and
    read directly, without a format. By plait's C++, since torch's copy waits in OpenMP on a busy machine."""

    def __init__(self, state: State) -> None:
        self.pool = _C.StagingPool(size_of(state))
        self.io = _C.PosixIo()
        self.crcs: list[int] = []

    def save(self, folder: Path, state: State) -> Saved:
        start = time.perf_counter()
        self.pool.copy_in(pieces_of(state))
        stall_s = time.perf_counter() - start
        start = time.perf_counter()
        folder.mkdir()
        size = size_of(state)
        self.crcs = _C.write_file(self.io, folder / "state", b"", [(self.pool.address, size, 0)], size).crcs
        return Saved(stall_s, time.perf_counter() - start, folder)

    def load(self, path: Path, state: State) -> None:
        requests = [(offset, nbytes, address) for address, nbytes, offset in pieces_of(state)]
        _C.read_ranges(self.io, path / "state", size_of(state), self.crcs, requests)

    def close(self) -> None:
        self.pool.close()


def size_of(state: State) -> int:
    """Bytes of all tensors."""
    return sum(value.nbytes for value in state.values())


def pieces_of(state: State) -> list[tuple[int, int, int]]:
    """(address, nbytes, offset) of each tensor, packed."""
    pieces, offset = [], 0
    for value in state.values():
        pieces.append((value.data_ptr(), value.nbytes, offset))
        offset += value.nbytes
    return pieces


def copy_into(state: State, loaded: State) -> None:
    """Copies into the tensors that training holds; a name that is missing or too many is a KeyError."""
    if loaded.keys() != state.keys():
        raise KeyError(f"names differ: {sorted(loaded.keys() ^ state.keys())}")
    for name, value in state.items():
        value.copy_(loaded[name])


def sync_folders(folder: Path) -> None:
    """Makes the names durable: fsync of the folder and of the one that holds it."""
    for path in (folder, folder.parent):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def build(root: Path, state: State) -> tuple[dict[str, Provider], dict[str, Measured]]:
    """Returns the providers that can run here, ours with its run folder at `root`, and the others with the reason."""
    providers: dict[str, Provider] = {"plait": Plait(root), "torch.save": TorchSave()}
    skipped = {}
    if importlib.util.find_spec("safetensors") is not None:
        providers["safetensors"] = Safetensors()
    else:
        skipped["safetensors"] = Measured(skipped="safetensors is not installed")
    providers |= {"dcp": Dcp(), "dcp async": DcpAsync(False), "dcp async cached": DcpAsync(True)}
    return {**providers, "limit": Limit(state)}, skipped
