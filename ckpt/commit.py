"""Turns an attempt into a snapshot: waits for the parts of all ranks (part.py), then manifest and rename.

Not a scheduler: it runs in the thread of its Snapshots, from start to end. The one idea: ranks speak through files in
the attempt folder only, and the snapshot exists from one rename on. The order is that of docs/format.md.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from plait import _C
from plait.ckpt.aside import metrics_of
from plait.ckpt.crypt import Key
from plait.ckpt.disks import Disks
from plait.ckpt.errors import SnapshotDamaged, SnapshotError
from plait.ckpt.folders import (
    ABORT,
    LATEST,
    announce,
    attempt_folder,
    make_folder,
    next_generation,
    publish,
    remove_folder,
    remove_part,
    remove_shared,
    step_folders,
    step_name,
)
from plait.ckpt.lock import RootLock
from plait.ckpt.manifest import (
    FORMATS,
    MANIFEST,
    MAX_JSON_BYTES,
    OBJECTS,
    FileEntry,
    Fragment,
    Manifest,
    Objects,
    base_name,
    data_name,
    fragment_name,
    from_bytes,
    sha256,
    to_bytes,
)
from plait.ckpt.partner import Peers
from plait.ckpt.slices import in_slices
from plait.ckpt.store import read_attempt
from plait.ckpt.tables import covered_table, merge_objects

BURY_S = 2.0  # how long a failed attempt waits for ranks to read why; they look every 0.1 s
_POLL_S = (0.002, 0.1)  # first and longest pause between two looks at the folder

T = TypeVar("T")
Own = tuple[Fragment, bytes]  # this rank's, and the file's content
Collected = tuple[list[Fragment], list[FileEntry]]


@dataclass(frozen=True)
class Writer:
    """How and as whom this rank writes. `stop` ends all waiting; `timeout_s` bounds it."""

    io: _C.Io
    root: Path
    rank: int
    world_size: int
    threads: int
    rate_limit: int
    direct: bool
    timeout_s: float
    stop: threading.Event
    nice: int = 10  # of the writing threads: below training
    io_priority: str = "low"
    key: Key | None = None  # signs the manifest
    disks: Disks | None = None  # ranks have no common folder
    peers: Peers | None = None  # takes this rank's data files to its partner
    reuse: bool = True  # a removed snapshot's data files

    def wait(self, look: Callable[[], T | None], late: Callable[[], str], limits: int = 1) -> T:
        """Looks until there is an answer. SnapshotError with `late()` after `limits` time limits."""
        deadline = time.monotonic() + limits * self.timeout_s
        pause = _POLL_S[0]
        while True:
            found = look()
            if found is not None:
                return found
            if time.monotonic() >= deadline:
                raise SnapshotError(late())
            if self.stop.wait(pause):
                raise SnapshotError(f"rank {self.rank} was closed while it waited; {late()}")
            pause = min(2 * pause, _POLL_S[1])


def say(writer: Writer, path: Path, data: bytes) -> None:
    """Announces a small file of an attempt, also to ranks on other disks."""
    announce(writer.io, path, data)
    if writer.disks is not None:
        writer.disks.tell(path.parent, path.name, data)


def post_error(writer: Writer, attempt: str, text: str) -> None:
    """Gives back the space of this rank's part, then tells the coordinator that it failed: the rank's last word."""
    folder = attempt_folder(writer.root, attempt)
    make_folder(writer.io, folder)
    try:
        _take_back(writer, folder, text)
    finally:
        say(writer, folder / f"r{writer.rank:05d}.error", text.encode())


def _take_back(writer: Writer, folder: Path, reason: str) -> None:
    """Removes what this rank wrote into an attempt that will not be committed, and what its peers sent here."""
    remove_part(writer.io, folder, writer.rank)
    if writer.peers is not None:
        writer.peers.give_up(folder, reason)


def coordinate(
    writer: Writer, attempt: str, step: int, lock: RootLock, run: str, grid: Mapping[str, int], own: Own
) -> Path:
    """Waits for all fragments, checks them together and commits. Returns the step folder. own: of this rank."""
    folder = attempt_folder(writer.root, attempt)
    fragments, entries = _collect(writer, folder, attempt, step, own)
    table = covered_table(fragments, f"attempt {attempt}", in_slices)
    objects = to_bytes(Objects(FORMATS[Objects], merge_objects(fragments)))
    lock.check()
    _C.write_small(writer.io, folder / OBJECTS, objects)
    entries.append(FileEntry(OBJECTS, len(objects), sha256(objects)))
    manifest = Manifest(
        format=FORMATS[Manifest],
        step=step,
        attempt=attempt,
        run=run,
        epoch=lock.epoch,
        world_size=writer.world_size,
        grid=dict(grid),
        commit="rename" if writer.disks is None else "disks",
        files=tuple(sorted(entries, key=lambda entry: entry.name)),
        aliases=table.aliases,
        num_tensors=len(table.tensors),
        num_bytes=sum(entry.num_bytes for entry in table.tensors.values()),
        metrics=metrics_of(fragments[0].objects),
    )
    publish(writer.io, folder / MANIFEST, to_bytes(manifest, writer.key))
    final = writer.root / _ready_name(writer, folder, step)
    lock.check()
    if writer.disks is not None:
        writer.disks.tell(folder, "commit", final.name.encode())
    _C.rename(writer.io, folder, final)
    _C.fsync_dir(writer.io, writer.root)
    return final


def _ready_name(writer: Writer, folder: Path, step: int) -> str:
    """Returns the step folder's name; with several disks, once all have the small files."""
    disks = writer.disks
    if disks is None:
        return step_name(step, next_generation(writer.root, step))
    for name in (OBJECTS, MANIFEST):
        disks.tell(folder, name, _C.read_small(writer.io, folder / name, MAX_JSON_BYTES))
    late = f"did not take the manifest of step {step} within {writer.timeout_s:g} s"
    generations = writer.wait(
        lambda: disks.generations(folder), lambda: f"the disks of ranks {disks.missing(folder, 'ready')} {late}"
    )
    return disks.name_for(writer.root, step, generations)


def await_disks(writer: Writer, attempt: str, step: int) -> None:
    """Coordinator, after its commit: waits until every disk has the snapshot under its name."""
    disks, folder = writer.disks, attempt_folder(writer.root, attempt)
    if disks is None:
        return
    late = f"did not commit step {step} within {writer.timeout_s:g} s; it can be read once they have"
    writer.wait(lambda: disks.all_done(folder), lambda: f"the disks of ranks {disks.missing(folder, 'done')} {late}")
    disks.tell(folder, "durable", b"")


def publish_latest(writer: Writer, folder: Path) -> None:
    """Moves the hint. The snapshot is durable already."""
    publish(writer.io, writer.root / LATEST, f"{folder.name}\n".encode())


def _collect(writer: Writer, folder: Path, attempt: str, step: int, own: Own) -> Collected:
    """Waits for the fragments of all ranks; checks each against this attempt and its data file's size."""

    def look() -> bool | None:
        if writer.disks is not None:
            writer.disks.pull(writer.io, folder)
        names = set(os.listdir(folder))
        failed = sorted(n for n in names if n.startswith("r") and n.endswith(".error"))
        if failed:
            text = _C.read_small(writer.io, folder / failed[0], MAX_JSON_BYTES).decode(errors="replace")
            raise SnapshotError(f"rank {int(failed[0][1:-6])} could not write its part of step {step}: {text}")
        return None if missing(names) else True

    def missing(names: set[str]) -> list[int]:
        return [rank for rank in range(writer.world_size) if fragment_name(rank) not in names]

    late = f"did not finish their part of step {step} within {writer.timeout_s:g} s ('{folder}')"
    writer.wait(look, lambda: f"ranks {missing(set(os.listdir(folder)))} {late}")
    fragments, entries = [], []
    for rank in range(writer.world_size):
        path = folder / fragment_name(rank)
        data = _C.read_small(writer.io, path, MAX_JSON_BYTES)
        fragment = own[0] if data == own[1] else from_bytes(Fragment, data, f"'{path}'")
        said = (fragment.rank, fragment.attempt, fragment.step, fragment.world_size)
        if said != (rank, attempt, step, writer.world_size):
            raise SnapshotDamaged(f"'{path}' is of (rank, attempt, step, world) {said}, not of this attempt")
        fragments.append(fragment)
        entries.append(FileEntry(path.name, len(data), sha256(data)))
        for source_step, file in fragment.data_files.items():
            name = data_name(rank) if source_step is None else base_name(rank, source_step)
            is_here = writer.disks is None or rank in writer.disks.here
            size = os.stat(folder / name).st_size if is_here else file.bytes
            if file.name != name or size != file.bytes:
                raise SnapshotDamaged(f"'{folder / name}' has {size} bytes, its fragment says otherwise")
            entries.append(FileEntry(name, size, file.digest))
    return fragments, entries


def abort(writer: Writer, attempt: str, text: str) -> None:
    """Coordinator: ends an attempt, gives the space back, and tells the other ranks why, also those still to come."""
    folder = attempt_folder(writer.root, attempt)
    if writer.world_size == 1:
        if folder.is_dir():
            remove_folder(writer.io, folder)
        return
    make_folder(writer.io, folder)
    try:
        _take_back(writer, folder, text)
        for name in sorted(os.listdir(folder)):
            if name.endswith((".safetensors", ".json")):
                remove_shared(writer.io, folder / name)
    finally:
        say(writer, folder / ABORT, text.encode())


def bury(writer: Writer, folder: Path) -> bool:
    """Coordinator: removes an aborted attempt once no other rank will touch it again, because each has left an error
    or has read why. False when they did not within BURY_S, or the disk did not let it: the next owner removes it."""

    def past() -> bool | None:
        if writer.disks is not None:
            writer.disks.pull(writer.io, folder)
        there = set(os.listdir(folder))
        words = ({f"r{rank:05d}.error", f"r{rank:05d}.ok"} for rank in range(1, writer.world_size))
        return True if all(there & word for word in words) else None

    try:
        replace(writer, timeout_s=BURY_S).wait(past, lambda: f"'{folder}' is still in use")
        remove_folder(writer.io, folder)
    except (SnapshotError, OSError):
        return False
    return True


def await_commit(writer: Writer, attempt: str, step: int) -> Path:
    """Other ranks: waits until the coordinator committed or gave up. SnapshotError with its text."""
    folder = attempt_folder(writer.root, attempt)

    def look() -> Path | None:
        if (folder / ABORT).is_file():
            text = _C.read_small(writer.io, folder / ABORT, MAX_JSON_BYTES).decode(errors="replace")
            raise _leave(writer, folder, SnapshotError(text))
        disks = writer.disks
        if disks is not None:
            said = disks.hear(folder, ABORT)
            if said is not None:
                raise _leave(writer, folder, SnapshotError(said.decode(errors="replace")))
            if disks.is_leader:
                return disks.follow(writer.io, folder)
        if folder.is_dir():
            return None
        for found in step_folders(writer.root):
            if found.step == step and read_attempt(writer.io, found.path) == attempt:
                return found.path
        raise SnapshotError(f"attempt {attempt} of step {step} was abandoned: '{folder}' is gone")

    late = f"rank 0 did not commit step {step} within {2 * writer.timeout_s:g} s ('{folder}')"
    # Rank 0 may itself wait one limit for a dead rank, and then names it.
    return writer.wait(look, lambda: late, limits=2)


def _leave(writer: Writer, folder: Path, error: SnapshotError) -> SnapshotError:
    """Takes back this rank's part of an aborted attempt; says that the rank will not touch it again."""
    try:
        _take_back(writer, folder, str(error))
        _C.write_small(writer.io, folder / f"r{writer.rank:05d}.ok", b"", exclusive=False)
        if writer.disks is not None:
            writer.disks.tell(folder, f"r{writer.rank:05d}.ok", b"")
    except OSError as later:
        error.add_note(f"and its part could not be removed: {later}")
    return error
