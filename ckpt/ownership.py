"""How rank 0 of a launch comes to own a root: folder, LOCK, nothing left of dead attempts, and the run's id.

Not the lock itself (lock.py). The one idea: nothing is removed or written before the LOCK is held.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from plait import _C
from plait.ckpt.disks import RUN_BYTES, Disks
from plait.ckpt.errors import SnapshotError
from plait.ckpt.folders import collect_garbage, publish
from plait.ckpt.lock import RootLock
from plait.ckpt.manifest import FORMATS, RUN, Run, from_bytes, to_bytes


@dataclass(frozen=True)
class Ownership:
    """What rank 0 of a launch holds while it writes: the LOCK, and the id of the run in this folder."""

    lock: RootLock
    run: str


def own(
    io: _C.Io,
    root: Path,
    rank: int,
    session: str,
    known_run: Callable[[], str | None],
    disks: Disks | None = None,
) -> Ownership | None:
    """Makes the folder; on rank 0 (with several disks: on the first rank of each) takes the LOCK and removes what
    dead attempts left. None on other ranks.

    known_run: gives the id of a run that a new folder goes on with, or None. SnapshotLocked names the owner when
    another job writes here.
    """
    new = not root.is_dir()
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (rank == 0 if disks is None else disks.is_leader):
        return None
    lock: RootLock | None = None
    try:
        if new:
            _C.fsync_dir(io, root.parent)
        lock = RootLock(root, session)
        collect_garbage(io, root, session)
        if disks is None:
            return Ownership(lock, _run_id(io, root / RUN, known_run))
        known = lambda: known_run() or disks.known_run  # noqa: E731
        told = disks.share_run(_run_id(io, root / RUN, known)) if rank == 0 else disks.share_run(None)
        run = _run_id(io, root / RUN, lambda: told)
        if run != told:
            raise SnapshotError(f"'{root}' holds run {run}, that of rank 0 holds run {told}")
        return Ownership(lock, run)
    except BaseException as error:
        if lock is not None:
            lock.close()
        if disks is not None and rank == 0:
            with suppress(RuntimeError):  # of a store that is gone: nobody waits for its word
                disks.share_run("", str(error) or type(error).__name__)
        raise


def _run_id(io: _C.Io, path: Path, known_run: Callable[[], str | None]) -> str:
    if not path.exists():
        publish(io, path, to_bytes(Run(FORMATS[Run], known_run() or secrets.token_hex(16))))
    return from_bytes(Run, _C.read_small(io, path, RUN_BYTES), f"'{path}'").run
