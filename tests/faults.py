"""Small states for snapshot tests, and ways to break things: failing I/O, killed children, damaged files."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch

from plait import _C
from plait.ckpt import PerRank, Snapshots

KILLED = 137  # what FaultIo exits with
T = TypeVar("T")


def small_state(seed: int) -> dict[str, Any]:
    """About 64 KiB in a few tensors; every seed gives other bits everywhere."""
    generator = torch.Generator().manual_seed(seed)
    model = {f"layer.{i}": torch.randn(32, 64, generator=generator) for i in range(6)}
    moments = {name: torch.rand(tensor.shape, generator=generator) for name, tensor in model.items()}
    return {
        "model": model,
        "moments": moments,
        "step": seed,
        "loss": seed / 3,
        "rng": PerRank(bytes([seed % 256] * 5)),
    }


def empty_state() -> dict[str, Any]:
    """The same structure with nothing in it."""
    state = small_state(0)
    for part in ("model", "moments"):
        for tensor in state[part].values():
            tensor.zero_()
    return {**state, "step": -1, "loss": 0.0, "rng": PerRank(b"")}


def is_small_state(values: dict[str, Any], seed: int) -> bool:
    """True when restored values are exactly those of the seed: never a mixture."""
    wanted = small_state(seed)
    tensors = all(torch.equal(values[p][n], wanted[p][n]) for p in ("model", "moments") for n in wanted[p])
    return tensors and (values["step"], values["loss"], values["rng"]) == (seed, seed / 3, wanted["rng"].value)


def restored_seed(root: Path) -> int | None:
    """Restores the newest good snapshot into an empty state; returns its seed after checking every bit, or None."""
    snapshots = Snapshots(root, read_only=True)
    if snapshots.latest() is None:
        return None
    values = snapshots.restore(empty_state()).values
    assert is_small_state(values, values["step"]), "a mixture of two snapshots was restored"
    return values["step"]


def in_child(work: Callable[[], object]) -> int:
    """Runs `work` in a forked child; returns its exit status: 0, KILLED, or 1 for an exception."""
    pid = os.fork()
    if pid == 0:
        status = 1
        torch.set_num_threads(1)  # the parent's thread pool does not survive a fork
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    _, wait_status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(wait_status)


def on_ranks(world_size: int, work: Callable[[int], Any]) -> list[Any]:
    """Runs `work(rank)` in one thread a rank, without a process group; returns results, or raises the first error."""
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def threads_end(prefix: str) -> bool:
    """Waits, up to 10 s, until no thread has a name that begins so; whether it came to that."""
    deadline = time.monotonic() + 10.0
    while any(thread.name.startswith(prefix) for thread in threading.enumerate()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def failing(name: str, error: int) -> _C.FaultIo:
    """Returns an Io whose operations of one name all fail with an errno; the others work."""
    io = _C.FaultIo([(0, "errno", error)], sticky=True, only=[name])
    with pytest.raises(OSError):  # the scripted operation, whatever its name, starts it
        _C.free_bytes(io, "/")
    return io


def count_ops(work: Callable[[_C.FaultIo], None]) -> list[tuple[str, str]]:
    """Runs `work` with an Io that only counts; returns its operations in order."""
    io = _C.FaultIo([])
    work(io)
    return list(io.ops)


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Flips one bit of a file in place."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))


class Calls:
    """What _C.FaultIo is for the system calls of the extension, for calls from Python: numbers them and fails by a
    script of (index, action, value). Actions: errno, errno_after (the call is done, its answer lost), crash_before,
    crash_after, short (a pwrite of `value` bytes). sticky: from an errno on all fail."""

    def __init__(self, script: Sequence[tuple[int, str, int]] = (), sticky: bool = False) -> None:
        self._script, self._sticky = {index: (action, value) for index, action, value in script}, sticky
        self._lock, self._broken = threading.Lock(), 0
        self.ops: list[tuple[str, str]] = []

    def call(self, name: str, real: Callable[..., T], *args: Any, **named: Any) -> T:
        """Does the next call, or fails."""
        what = next((os.fspath(a) for a in args if isinstance(a, (str, os.PathLike))), "")
        with self._lock:
            action, value = self._script.get(len(self.ops), ("", 0))
            if self._broken:
                action, value = "errno", self._broken
            self.ops.append((name, str(what)))
            if self._sticky and action == "errno":
                self._broken = value
        if action == "crash_before":
            os._exit(KILLED)
        if action == "errno":
            raise OSError(value, os.strerror(value), what or None)  # a descriptor's call does not know its file
        if action == "short" and name == "pwrite":
            args = (args[0], memoryview(args[1])[:value], *args[2:])
        try:
            result = real(*args, **named)
        finally:  # also of a call that fails by itself, as a link to a name that is there
            if action == "crash_after":
                os._exit(KILLED)
        if action == "errno_after":
            raise OSError(value, os.strerror(value), what or None)
        return result


class _FaultyOs:
    """The module os, whose calls to the kernel pass through Calls."""

    NAMES = ("open", "pwrite", "pread", "fsync", "fdatasync", "ftruncate", "link", "rename", "unlink", "utime")

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in (*self.NAMES, "stat", "fstat", "posix_fadvise"):
            return real
        return lambda *args, **named: self._calls.call(name, real, *args, **named)


@contextmanager
def faulty_os(calls: Calls, *modules: ModuleType) -> Iterator[None]:
    """Lets what these modules call `os` fail by a script."""
    with ExitStack() as patches:
        for module in modules:
            patches.enter_context(mock.patch.object(module, "os", _FaultyOs(calls)))
        yield


class FaultyStore:
    """A store of copies whose requests pass through Calls: each may fail before or after it was served."""

    REQUESTS = ("steps", "unfinished", "begin", "finish", "files", "put", "put_stream", "get", "remove", "check")

    def __init__(self, store: Any, calls: Calls) -> None:
        self._store, self._calls = store, calls
        self.url, self.local = store.url, store.local

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)
        return lambda *args: self._calls.call(name, real, *args) if name in self.REQUESTS else real(*args)
