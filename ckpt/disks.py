"""Ranks without a common folder: their words go through a torch.distributed Store as well as into files.

Not a process group and no collective. The one idea: every disk gets the same small files (all fragments, objects,
manifest) and the data files of its own ranks, so that the union of the folders is an ordinary snapshot; and no disk
takes the step name before all have everything, nor gives up an older snapshot before all have taken it. A crash
between two disks' renames leaves a step that only some have: no union of it is whole, and the one before still is.

A restore reads data files only where a rank can see them: from the union (all folders copied into one root, or a tier
that all ranks upload to), or from the own disk for parts that lie wholly on it.

    key PREFIX/where/RANK        which disk a rank writes to: host, boot, device and inode of its root; the run there
    key PREFIX/ATTEMPT/NAME      the file NAME of the attempt folder: rNNNNN.json, .error, .ok, abort.error, ...
    key PREFIX/ATTEMPT/ready.R   the leader (lowest rank) of a disk has all small files durably: the next free
                                 generation of the step there
    key PREFIX/ATTEMPT/commit    from rank 0, when all are ready: the folder's name, which every leader renames to
    key PREFIX/ATTEMPT/done.R    that disk has renamed and synced
    key PREFIX/ATTEMPT/durable   from rank 0, when all are done: older snapshots may go
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from plait import _C
from plait.ckpt.errors import SnapshotDamaged, SnapshotError
from plait.ckpt.folders import ABORT, announce, next_generation, parse_step, step_name
from plait.ckpt.manifest import MANIFEST, OBJECTS, RUN, Run, fragment_name, from_bytes

RUN_BYTES = 4096  # of RUN.json, at most


class Disks:
    """Who writes to which disk, and their words. Made on all ranks together; `wait` of a Writer bounds all waiting.

    leaders: the lowest rank of each disk; it owns the LOCK there, and renames. here: the ranks of this one's disk.
    known_run: of the first disk that has one: a new disk of rank 0 goes on with it.
    """

    def __init__(self, store: Any, io: _C.Io, session: str, rank: int, world_size: int, root: Path) -> None:
        self._store, self._prefix = store, f"plait/{session}"
        self._rank, self._world_size = rank, world_size
        self._said: list[str] = []
        if not root.is_dir():
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            _C.fsync_dir(io, root.parent)
        store.set(f"{self._prefix}/where/{rank}", json.dumps([place_of(root), run_in(io, root)]))
        words = [
            json.loads(store.get(f"{self._prefix}/where/{other}")) for other in range(world_size)
        ]  # its own limit
        places = [word[0] for word in words]
        self.known_run: str | None = next((word[1] for word in words if word[1]), None)
        self.leaders = sorted({places.index(place) for place in places})
        self.here = frozenset(r for r, place in enumerate(places) if place == places[rank])
        self.is_leader = rank in self.leaders

    def tell(self, folder: Path, name: str, data: bytes) -> None:
        """Says what the file of an attempt folder holds."""
        key = f"{self._prefix}/{folder.name}/{name}"
        self._store.set(key, data)
        self._said.append(key)

    def hear(self, folder: Path, name: str) -> bytes | None:
        """Returns what was said, or None so far."""
        key = f"{self._prefix}/{folder.name}/{name}"
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    def forget(self) -> None:
        """Takes back this rank's words of the save before last, which every rank is past."""
        attempts = [key.rsplit("/", 1)[0] for key in self._said]
        latest = list(dict.fromkeys(attempts))[-2:]
        for key in [key for key, attempt in zip(self._said, attempts, strict=True) if attempt not in latest]:
            self._store.delete_key(key)
            self._said.remove(key)

    def share_run(self, run: str | None, error: str = "") -> str:
        """Rank 0 says the run's id, or why it cannot open its root; the others hear it, or raise that."""
        key = f"{self._prefix}/run"
        if run is not None:
            self._store.set(key, json.dumps([run, error]))
        told, wrong = json.loads(self._store.get(key))
        if wrong and self._rank != 0:
            raise SnapshotError(f"rank 0 could not open its root: {wrong}")
        return str(told)

    def pull(self, io: _C.Io, folder: Path) -> None:
        """Leader: brings the words of ranks on other disks into this disk's folder, the manifest last."""
        if not self.is_leader or not folder.is_dir():
            return
        there = set(os.listdir(folder))
        ranks = [r for r in range(self._world_size) if r not in self.here]
        names = [f"r{rank:05d}.{kind}" for rank in ranks for kind in ("json", "error", "ok")]
        if 0 not in self.here:
            names += [ABORT, OBJECTS]
        for name in names:
            data = None if name in there else self.hear(folder, name)
            if data is not None:
                announce(io, folder / name, data)
        wanted = {fragment_name(rank) for rank in range(self._world_size)} | {OBJECTS}
        manifest = None
        if 0 not in self.here and MANIFEST not in there and wanted <= set(os.listdir(folder)):
            manifest = self.hear(folder, MANIFEST)
        if manifest is not None:
            announce(io, folder / MANIFEST, manifest)
            _C.fsync_dir(io, folder)
            step = int(folder.name.split("-")[1])
            self.tell(folder, f"ready.{self._rank}", str(next_generation(folder.parent, step)).encode())

    def generations(self, folder: Path) -> list[int] | None:
        """Rank 0: what the other leaders said when they were ready; None before all did."""
        words = [self.hear(folder, f"ready.{leader}") for leader in self.leaders if leader != 0]
        return [int(word) for word in words if word is not None] if None not in words else None

    def all_done(self, folder: Path) -> bool | None:
        """Rank 0: True when all other disks have renamed, else None."""
        words = [self.hear(folder, f"done.{leader}") for leader in self.leaders if leader != 0]
        return None if None in words else True

    def missing(self, folder: Path, word: str) -> list[int]:
        """Returns the leaders that have not said a word."""
        return [leader for leader in self.leaders if leader and self.hear(folder, f"{word}.{leader}") is None]

    def follow(self, io: _C.Io, folder: Path) -> Path | None:
        """Leader of another disk: goes one step on; the step folder once the snapshot is durable on all disks."""
        self.pull(io, folder)
        name = self.hear(folder, "commit")
        if name is None:
            return None
        final = folder.parent / name.decode()
        if parse_step(final) is None:
            raise SnapshotError(f"rank 0 says to commit '{folder}' as {name!r}, which is no step folder")
        if folder.is_dir():
            _C.rename(io, folder, final)
            _C.fsync_dir(io, folder.parent)
            self.tell(folder, f"done.{self._rank}", b"")
        return final if self.hear(folder, "durable") is not None else None

    def name_for(self, root: Path, step: int, generations: list[int]) -> str:
        """Returns the folder name that is free on all disks."""
        return step_name(step, max([next_generation(root, step), *generations]))


def run_in(io: _C.Io, root: Path) -> str | None:
    """Returns the id of the run in a root, None when there is none that can be read."""
    try:
        return from_bytes(Run, _C.read_small(io, root / RUN, RUN_BYTES), RUN).run
    except (SnapshotDamaged, OSError):
        return None  # whoever owns the root says why


def place_of(root: Path) -> str:
    """Returns host, boot, device and inode of a root: equal for ranks that have one folder."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    info = os.stat(root)
    return f"{socket.gethostname()} {boot} {info.st_dev} {info.st_ino}"
