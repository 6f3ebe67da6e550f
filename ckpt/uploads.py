"""The tiers of a run: their threads that copy what was committed, and their copies as candidates of a restore.

Not the copying (copier.py). The one idea: a committed snapshot is held against retention (shared flock) until every
tier has it or has failed; the training thread learns of a failure by `handle.wait("remote")` or at the next call.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from plait import _C
from plait.ckpt.copier import Copier
from plait.ckpt.crypt import Key
from plait.ckpt.errors import SnapshotDamaged, SnapshotError
from plait.ckpt.folders import StepFolder
from plait.ckpt.handle import Handle
from plait.ckpt.keep import reading
from plait.ckpt.lock import RootLock
from plait.ckpt.partner import Partner, Peers, Union, join_peers
from plait.ckpt.reader import SnapshotReader
from plait.ckpt.store import DirStore, Source, read_copy_manifest
from plait.ckpt.tier_reader import TierReader, open_folder
from plait.ckpt.tiers import Launch, Tier


class Copy(NamedTuple):
    """A finished copy in a tier: a candidate of a restore."""

    step: int
    generation: int
    store: Source
    folder: str

    @property
    def name(self) -> str:
        return f"{self.store.url}/{self.folder}"


class Tiers:
    """All tiers of one Snapshots. Thread rule: the training thread, and `submit` the writing thread."""

    def __init__(self, tiers: Sequence[Tier], io: _C.Io, session: str, key: Key | None, threads: int) -> None:
        self._tiers = tuple(tiers)
        self._stores = [tier.store(io, session) for tier in tiers]
        self._io, self._key, self._threads = io, key, threads
        self._lanes: list[_Lane] = []
        self._locks: list[RootLock] = []
        self._copied: list[Handle] = []
        self._session = session
        self._peers: Peers | None = None
        self.unions: list[Union] = []  # the roots of all ranks (partner.Peers): the own one first, and last

    def join(self, partner: Partner | None, store: Any, root: Path, rank: int, world_size: int) -> Peers | None:
        """Finds the roots of the other ranks, where each rank's data files are in two; nothing without a partner."""
        self._peers = join_peers(partner, store, root, self._io, self._session, rank, world_size)
        self.unions = [] if self._peers is None else self._peers.unions()
        return self._peers

    def known_run(self) -> str | None:
        """Returns the run of the newest good copy, or None: a new, empty local root goes on with it."""
        for copy in self.copies(None):
            try:
                return read_copy_manifest(copy.store, copy.folder, self._key).run
            except SnapshotDamaged:
                continue  # a restore names it, with the reason
        return None

    def start(self, launch: Launch, newest: StepFolder | None) -> None:
        """Begins to copy. newest: what was committed before, which is copied first where it is missing. Rank 0 takes
        the LOCK of directories: SnapshotLocked names its owner."""
        for store in self._stores:
            if launch.rank == 0 and isinstance(store, DirStore):
                self._locks.append(store.lock())
        pairs = zip(self._tiers, self._stores, strict=True)
        self._lanes = [_Lane(Copier(tier, store, launch)) for tier, store in pairs]
        if newest is not None and self._lanes:
            self.submit(Handle(newest.step, 0), newest.path)

    def submit(self, handle: Handle, folder: Path) -> None:
        """Takes a committed snapshot over. Does not wait."""
        lanes = [lane for lane in self._lanes if handle.step % lane.every == 0]
        handle.expect(len(lanes))
        self._copied = [h for h in self._copied if not h.copied()] + [handle] * bool(lanes)
        for lane in lanes:
            held = ExitStack()
            held.enter_context(reading(folder))
            lane.jobs.put((handle, folder, held))

    def check(self) -> None:
        """Raises the error of a finished copy unless it was raised before. Does not wait."""
        for handle in list(self._copied):
            handle.raise_copy_once()

    def close(self, timeout_s: float | None) -> None:
        """Waits for copies in flight, up to the time limit, then gives them up; ends the threads and the server."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with ExitStack() as closing:  # each of them, whatever one of them raises
            if self._peers is not None:
                closing.callback(self._peers.close)
            for lock in self._locks:
                closing.callback(lock.close)
            for lane in self._lanes:
                closing.callback(lane.close, deadline)
            self._lanes, self._locks = [], []

    def copies(self, step: int | None, away: dict[str, OSError] | None = None) -> Iterator[Copy]:
        """Yields copies (of one step), newest first, those of an earlier tier before those of a later one. away:
        takes the errors of tiers that cannot be listed, by their URL; without it they are raised."""
        stores: list[Source] = [*self.unions[:1], *self._stores]
        found = []
        for number, store in enumerate(stores):
            try:
                listed = store.steps()
            except OSError as error:
                if away is None:
                    raise
                away[store.url] = error
                continue
            for at, generation, folder in listed:
                if step is None or at == step:
                    found.append((-at, number, -generation, Copy(at, generation, store, folder)))
        yield from (copy for *_, copy in sorted(found, key=lambda row: row[:3]))

    def open(self, copy: Copy) -> SnapshotReader:
        """Opens a copy: with the local reader where it is a plain one in a directory. SnapshotDamaged, OSError."""
        store = copy.store
        if store.local is not None:
            return open_folder(store.local / copy.folder, self._io, self._threads, self._key)
        spare = self._from_others if store in self.unions else None
        return TierReader(store, copy.folder, max(4, self._threads), self._key, spare)

    def _from_others(self, attempt: str) -> SnapshotReader | None:
        """Opens the same snapshot with the roots of the other ranks first, then with the tiers."""
        for step, _, folder in self.unions[1].steps():
            if step == int(attempt.partition("-")[0]):
                with suppress(SnapshotDamaged, OSError):  # of another generation
                    reader = TierReader(self.unions[1], folder, self._threads, self._key, self.spare)
                    if reader.manifest.attempt == attempt:
                        return reader
        return None

    def spare(self, attempt: str) -> SnapshotReader | None:
        """Opens the nearest good copy of an attempt, or returns None."""
        for copy in self.copies(int(attempt.partition("-")[0]), {}):
            try:
                reader = self.open(copy)
            except (SnapshotDamaged, OSError):
                continue  # the next tier; the damage that made us look is what is raised in the end
            if reader.manifest.attempt == attempt:
                return reader
        return None


class _Lane:
    """One tier's thread and its jobs, in order."""

    def __init__(self, copier: Copier) -> None:
        self.every = copier.tier.every
        self._copier, self._stop = copier, copier.launch.stop
        self.jobs: queue.SimpleQueue[tuple[Handle, Path, ExitStack] | None] = queue.SimpleQueue()
        name = f"plait-copies-{copier.launch.rank}"
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def close(self, deadline: float | None) -> None:
        """Finishes the jobs; after the deadline gives up what is left."""
        self.jobs.put(None)
        self._thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # of this thread alone, on Linux
        while (job := self.jobs.get()) is not None:
            handle, folder, held = job
            error: BaseException | None = None
            with held:
                try:
                    if self._stop.is_set():
                        raise SnapshotError(f"the copy of step {handle.step} was given up: Snapshots was closed")
                    handle.copies.append(f"{self._copier.store.url}/{self._copier.copy(folder)}")
                except BaseException as caught:  # kept for the training thread
                    error = caught
            handle.copy_finished(error)
