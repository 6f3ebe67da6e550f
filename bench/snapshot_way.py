"""What a way to save and load a state of tensors is, as the `snapshots` suite times it, and what all of them need.

Each says when training may go on, what must be waited for before a tensor is changed, and when the save is over; what
a library never syncs is synced here afterwards, and timed apart. The ways are in snapshot_peers.py and
snapshot_others.py. Measures one save.
"""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor, equal, int32

State = dict[str, Tensor]


def nothing() -> None:
    """What is waited for where nothing has to be."""


class Pending(NamedTuple):
    """A save under way. `fence` is what its user must call before a tensor changes; `wait` returns the folder once
    its library calls the save complete, and `done` says whether it does. durable_s: the library's own time of it."""

    wait: Callable[[], Path]
    done: Callable[[], bool]
    fence: Callable[[], None] = nothing
    durable_s: Callable[[], float | None] = lambda: None


class Saved(NamedTuple):
    """One save: times from the call until training may go on, until its library calls it complete, and until the
    disk has it (files and folders synced here where the peer never does), and the folder that holds it."""

    stall_s: float
    complete_s: float
    durable_s: float
    path: Path


class Provider(Protocol):
    """One way to save and load a state. package: the distribution whose version counts. syncs: its files are on the
    disk when it calls a save complete. note: how it is used."""

    package: str
    syncs: bool
    note: str

    def begin(self, folder: Path, state: State) -> Pending:
        """Saves into `folder`, which does not exist yet; returns when training may go on."""

    def load(self, path: Path, state: State) -> None:
        """Fills the tensors of `state` from a save's folder."""

    def close(self) -> None:
        """Lets go of threads and memory."""


def save(provider: Provider, folder: Path, state: State) -> Saved:
    """Saves and waits until the disk has it; training stands still meanwhile."""
    start = time.perf_counter()
    pending = provider.begin(folder, state)
    stall_s = time.perf_counter() - start
    path = pending.wait()
    complete_s = time.perf_counter() - start
    if provider.syncs:
        sync_folders(path)
    else:
        sync_all(path)
    durable_s = pending.durable_s() or time.perf_counter() - start
    return Saved(stall_s, min(complete_s, durable_s), durable_s, path)


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


def differing(state: State, loaded: State) -> str | None:
    """Returns the first name whose fp32 tensors differ in a bit; None where all are the same."""
    return next((k for k, v in state.items() if not equal(v.view(int32), loaded[k].view(int32))), None)


def sync(path: Path) -> None:
    """fsync of one file or folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folders(folder: Path) -> None:
    """Makes the names durable: fsync of the folder and of the one that holds it."""
    sync(folder)
    sync(folder.parent)


def sync_all(folder: Path) -> None:
    """Makes all below a folder durable: each file and folder, and the one that holds it."""
    for path in folder.rglob("*"):
        sync(path)
    sync_folders(folder)


def version_of(package: str) -> str:
    """Returns a distribution's version; '' where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
