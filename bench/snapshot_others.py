"""Other libraries' ways to save a state of tensors, each optional and used as its documentation says it is fastest.

They are no dependency of plait: bring them on the path, next to the torch that is here, without replacing it (this
ran with Python 3.11 and torch 2.13 on a CPU, beside what `.[dev]` installs):
    pip install --no-deps --target DIR torchsnapshot==0.1.0 'importlib-metadata<9' zipp nest_asyncio aiofiles psutil
    pip install --no-deps --target DIR nvidia-resiliency-ext==0.4.1 nvidia-ml-py pynvml defusedxml
    pip install --no-deps --target DIR orbax-checkpoint==0.12.8 jax==0.10.2 jaxlib==0.10.2 opt_einsum scipy etils \\
        importlib_resources tensorstore humanize simplejson msgpack protobuf uvloop absl-py prometheus-client
    pip install --no-deps --no-build-isolation --target DIR deepspeed==0.19.8 hjson py-cpuinfo einops
and run with PYTHONPATH=DIR. DeepSpeed compiles its writer when it is first used, for minutes (longer than a turn here
may last): do it before, with g++, ninja on PATH and libaio with its headers (Debian: libaio-dev), and the same
TORCH_EXTENSIONS_DIR if that is set. A build that was killed leaves a file `lock` there, for which the next one waits.
Without root: apt-get download libaio-dev libaio1, dpkg -x each of them AIO, CPATH=AIO/usr/include, and LIBRARY_PATH
and LD_LIBRARY_PATH=AIO/usr/lib/x86_64-linux-gnu, in the measured run too:
    PYTHONPATH=DIR python -c "from deepspeed.ops.op_builder import AsyncIOBuilder as a; a().load()"
    PYTHONPATH=DIR python -c "from deepspeed.ops.op_builder.utils import UtilsBuilder as u; u().load()"
"""

from __future__ import annotations

import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from plait.bench.snapshot_way import Pending, State, copy_into


class TorchSnapshot:
    """torchsnapshot's async_take, which never syncs, and restore."""

    package, syncs, note = "torchsnapshot", False, "async_take"

    def begin(self, folder: Path, state: State) -> Pending:
        pending = import_module("torchsnapshot").Snapshot.async_take(str(folder), {"state": self.holder(state)})
        return Pending(lambda: (pending.wait(), folder)[1], pending.done)

    def holder(self, state: State) -> Any:
        """Returns the state as torchsnapshot takes it."""
        holder = import_module("torchsnapshot").StateDict()
        holder.update(state)
        return holder

    def load(self, path: Path, state: State) -> None:
        holder = self.holder(state)
        import_module("torchsnapshot").Snapshot(str(path)).restore({"state": holder})
        if any(holder[name] is not value for name, value in state.items()):
            copy_into(state, dict(holder))

    def close(self) -> None:
        pass


class Nvrx:
    """nvidia-resiliency-ext's persistent worker process, which calls torch.save and never syncs.

    Its TorchAsyncCheckpoint needs CUDA: it copies device tensors only, so that tensors of the host would be saved as
    they are later. Here they are copied first into shared memory that is kept.
    """

    package, syncs = "nvidia-resiliency-ext", False
    note = "AsyncCallsQueue(persistent=True) with torch.save; copied first into shared memory that is kept"

    def __init__(self, state: State) -> None:
        self.core = import_module("nvidia_resiliency_ext.checkpointing.async_ckpt.core")
        # It asks for its rank.
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        self.queue = self.core.AsyncCallsQueue(persistent=True)
        self.staged = {name: torch.empty_like(value).share_memory_() for name, value in state.items()}

    def begin(self, folder: Path, state: State) -> Pending:
        folder.mkdir()
        for name, value in state.items():
            self.staged[name].copy_(value)
        self.queue.schedule_async_request(self.core.AsyncRequest(torch.save, (self.staged, folder / "state.pt"), []))
        return Pending(lambda: self.wait(folder), self.done)

    def done(self) -> bool:
        """Asks the worker; True when it has nothing under way."""
        self.queue.maybe_finalize_async_calls(blocking=False, no_dist=True)
        return bool(self.queue.get_num_unfinalized_calls() == 0)

    def wait(self, folder: Path) -> Path:
        """Asks until it is done; its own wait asks only ten times a second."""
        while not self.done():
            time.sleep(0.002)
        return folder

    def load(self, path: Path, state: State) -> None:
        copy_into(state, torch.load(path / "state.pt", weights_only=True, mmap=True))

    def close(self) -> None:
        self.queue.close()
        torch.distributed.destroy_process_group()


class DeepSpeed:
    """torch.save into DeepSpeed's FastFileWriter (libaio, direct, two buffers), which syncs; loaded by torch.load."""

    package, syncs = "deepspeed", True
    note = "FastFileWriter: 2 x 32 MiB locked, blocks of 1 MiB, 8 in flight, 2 threads"
    BUFFER, BLOCK, DEPTH, THREADS = 64 << 20, 1 << 20, 8, 2  # its defaults, with one more thread

    def __init__(self) -> None:
        self.io, builders = import_module("deepspeed.io"), import_module("deepspeed.ops.op_builder")
        # The CPU accelerator does not list the helper that the writer loads, though it is plain C++.
        writer, helpers = self.io.fast_file_writer, import_module("deepspeed.ops.op_builder.utils")
        writer.UtilsBuilder = helpers.UtilsBuilder
        if lock := _build_lock():
            raise RuntimeError(f"'{lock}' is there: a build is under way, or one was killed (then remove it)")
        builder = builders.AsyncIOBuilder()
        if not builder.is_compatible():
            raise RuntimeError(
                "libaio cannot be linked: libaio.so and its headers (Debian: libaio-dev) are not found"
            )
        self.handle = builder.load().aio_handle(self.BLOCK, self.DEPTH, False, True, self.THREADS)
        self.buffer = self.handle.new_cpu_locked_tensor(self.BUFFER, torch.empty(0, dtype=torch.uint8))

    def begin(self, folder: Path, state: State) -> Pending:
        folder.mkdir()
        config = self.io.FastFileWriterConfig(self.handle, self.buffer)
        writer = self.io.FastFileWriter(str(folder / "state.pt"), config)
        torch.save(state, writer)
        writer.close()
        return Pending(lambda: folder, lambda: True)

    def load(self, path: Path, state: State) -> None:
        copy_into(state, torch.load(path / "state.pt", weights_only=True, mmap=True))

    def close(self) -> None:
        self.handle.free_cpu_locked_tensor(self.buffer)


def _build_lock() -> Path | None:
    """Returns the file for which torch waits, for ever, before it builds or loads an extension; None without one."""
    root = (
        os.environ.get("TORCH_EXTENSIONS_DIR") or import_module("torch.utils.cpp_extension").get_default_build_root()
    )
    return next(Path(root).rglob("lock"), None)


class Orbax:
    """Orbax's AsyncCheckpointer over numpy arrays that share the tensors' memory, without compression."""

    package, syncs, note = (
        "orbax-checkpoint",
        True,
        "AsyncCheckpointer, PyTreeCheckpointHandler(use_compression=False)",
    )

    def __init__(self) -> None:
        self.ocp = ocp = import_module("orbax.checkpoint")
        self.checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=False))

    def begin(self, folder: Path, state: State) -> Pending:
        tree = {name: value.numpy() for name, value in state.items()}
        self.checkpointer.save(folder, args=self.ocp.args.PyTreeSave(tree))
        return Pending(lambda: (self.checkpointer.wait_until_finished(), folder)[1], folder.exists)

    def load(self, path: Path, state: State) -> None:
        import numpy

        each = self.ocp.RestoreArgs(restore_type=numpy.ndarray)
        wanted = self.ocp.args.PyTreeRestore(restore_args=dict.fromkeys(state, each))
        loaded = self.checkpointer.restore(path, args=wanted)
        copy_into(state, {name: torch.from_numpy(value) for name, value in loaded.items()})

    def close(self) -> None:
        self.checkpointer.close()
