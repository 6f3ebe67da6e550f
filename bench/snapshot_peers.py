"""Ways to save and load a state of tensors, as the `snapshots` suite compares them: ours, torch's, safetensors'.

Measures nothing. Libraries that are not needed elsewhere are in snapshot_others.py.
"""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import torch

from plait import _C
from plait.bench.snapshot_way import Pending, Provider, State, copy_into, pieces_of, size_of
from plait.bench.spec import Measured
from plait.ckpt import Snapshots
from plait.ckpt.handle import Handle


class Plait:
    """plait.ckpt.Snapshots as in a run: one object, its staging memory kept over the saves, a folder for each.

    guarded: the optimizer whose tensors are captured after the call, up to its next step; None: all in the call.
    """

    package, syncs = "plait", True

    def __init__(self, root: Path, guarded: torch.optim.Optimizer | None = None) -> None:
        self.note = "three lines" if guarded is not None else "without guard()"
        self.snapshots = Snapshots(root, keep_last=1)
        if guarded is not None:
            self.snapshots.guard(guarded)
        self.step = 0

    def prepare(self, state: State) -> None:
        """Takes the staging memory, as a run does before it trains."""
        self.snapshots.prepare(dict(state))

    def begin(self, folder: Path, state: State) -> Pending:
        self.step += 1
        handle = self.snapshots.save(self.step, dict(state))
        return Pending(lambda: _folder_of(handle), handle.done, durable_s=lambda: handle.durable_s)

    def load(self, path: Path, state: State) -> None:
        self.snapshots.restore(dict(state))

    def close(self) -> None:
        self.snapshots.close()


def _folder_of(handle: Handle) -> Path:
    handle.wait()
    assert handle.folder is not None
    return handle.folder


class Blocking:
    """A way whose save is over when its call returns."""

    package, syncs, note = "torch", False, ""

    def begin(self, folder: Path, state: State) -> Pending:
        self.write(folder, state)
        return Pending(lambda: folder, lambda: True)

    def write(self, folder: Path, state: State) -> None:
        """Saves into `folder`, which does not exist yet."""
        raise NotImplementedError

    def close(self) -> None:
        pass


class TorchSave(Blocking):
    """torch.save and torch.load(weights_only=True), both as they come."""

    mmap = False

    def write(self, folder: Path, state: State) -> None:
        folder.mkdir()
        torch.save(state, folder / "state.pt")

    def load(self, path: Path, state: State) -> None:
        copy_into(state, torch.load(path / "state.pt", weights_only=True, mmap=self.mmap))


class TorchSaveFast(TorchSave):
    """torch.save without its checksums (`torch.serialization.set_crc32_options(False)`), loaded with mmap=True."""

    mmap, note = True, "set_crc32_options(False), load(mmap=True)"

    def write(self, folder: Path, state: State) -> None:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            super().write(folder, state)
        finally:
            torch.serialization.set_crc32_options(before)


class Safetensors(Blocking):
    """safetensors' save_file and load_file, which maps the file."""

    package = "safetensors"

    def write(self, folder: Path, state: State) -> None:
        from safetensors.torch import save_file

        folder.mkdir()
        save_file(state, folder / "state.safetensors")

    def load(self, path: Path, state: State) -> None:
        from safetensors.torch import load_file

        copy_into(state, load_file(path / "state.safetensors"))


class Dcp(Blocking):
    """torch.distributed.checkpoint's save (which syncs its files) and load, in one process without a group."""

    syncs = True

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self.note = f"FileSystemWriter(thread_count={threads})"

    def writer(self, folder: Path) -> Any:
        """Returns DCP's writer of files."""
        from torch.distributed.checkpoint import FileSystemWriter

        return FileSystemWriter(folder, thread_count=self.threads)

    def write(self, folder: Path, state: State) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(state, storage_writer=self.writer(folder), no_dist=True)

    def load(self, path: Path, state: State) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(dict(state), checkpoint_id=path, no_dist=True)


def _lasts(stager: Any) -> bool:
    """Whether a stager serves a second save; torch 2.11's has forgotten by then how to copy (KeyError)."""
    try:
        for _ in range(2):
            stager.stage({"w": torch.zeros(1)})
    except KeyError:
        return False
    finally:
        stager.close()
    return True


class DcpAsync(Dcp):
    """DCP's async_save on a thread, as it comes; `cached` keeps its staging memory over the saves."""

    def __init__(self, cached: bool, threads: int = 1) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(threads)
        # Pinned memory and non-blocking copies need a GPU; these are also async_save's own choices.
        plain = StagingOptions(False, False, False, False)
        kept = cached and _lasts(DefaultStager(plain))
        self.stager = DefaultStager(plain) if kept else None
        self.note += ", a stager that is kept" if kept else ", as it comes"

    def begin(self, folder: Path, state: State) -> Pending:
        import torch.distributed.checkpoint as dcp

        future: Any = dcp.async_save(state, storage_writer=self.writer(folder), async_stager=self.stager)
        return Pending(lambda: (future.result(), folder)[1], future.done)

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()


class DcpProcess(DcpAsync):
    """DCP's async_save in a process of its own, staged in shared memory that is kept; in_background: the staging too
    ("zero overhead"), which then must have ended before a tensor changes."""

    def __init__(self, in_background: bool, threads: int = 1) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(False, threads)
        self.stager = DefaultStager(StagingOptions(False, True, in_background, False))
        self.note = f"FileSystemWriter(thread_count={threads}), shared memory that is kept"
        self.note += ", staged in the background, staging_completion awaited before a write" if in_background else ""
        self.in_background = in_background
        own = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=own, rank=0, world_size=1)  # it asks for one

    def begin(self, folder: Path, state: State) -> Pending:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        kind = AsyncCheckpointerType.PROCESS
        writer = self.writer(folder)
        said: Any = dcp.async_save(
            state, storage_writer=writer, async_stager=self.stager, async_checkpointer_type=kind
        )
        if not self.in_background:
            return Pending(lambda: (said.result(), folder)[1], said.done)
        done, staged = said.upload_completion, said.staging_completion
        return Pending(lambda: (done.result(), folder)[1], done.done, staged.result)

    def close(self) -> None:
        super().close()
        torch.distributed.destroy_process_group()


class Limit(Blocking):
    """What this machine allows: memcpy of the state into resident memory by two threads, then its bytes written and
    read directly, without a format. By plait's C++, since torch's copy waits in OpenMP on a busy machine."""

    package, syncs = "plait", True

    def __init__(self, state: State) -> None:
        self.pool = _C.StagingPool(size_of(state))
        self.io = _C.PosixIo()
        self.crcs: list[int] = []

    def begin(self, folder: Path, state: State) -> Pending:
        self.pool.copy_in(pieces_of(state))
        start = time.perf_counter()  # of the write alone
        took: list[float] = []

        def write() -> Path:
            folder.mkdir()
            size = size_of(state)
            self.crcs = _C.write_file(self.io, folder / "state", b"", [(self.pool.address, size, 0)], size).crcs
            took.append(time.perf_counter() - start)
            return folder

        return Pending(write, lambda: bool(took), durable_s=lambda: took[0])

    def load(self, path: Path, state: State) -> None:
        requests = [(offset, nbytes, address) for address, nbytes, offset in pieces_of(state)]
        _C.read_ranges(self.io, path / "state", size_of(state), self.crcs, requests)

    def close(self) -> None:
        self.pool.close()


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
