"""Which copies of which snapshots a restore may try, in order: the newest first, of one snapshot the nearest first.

Only names are looked at here; whether a copy is good is found out when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from plait import _C
from plait.ckpt.crypt import Key
from plait.ckpt.errors import SnapshotDamaged, SnapshotError
from plait.ckpt.folders import StepFolder, step_folders
from plait.ckpt.keep import reading
from plait.ckpt.reader import SnapshotReader, read_manifest
from plait.ckpt.tier_reader import open_folder
from plait.ckpt.uploads import Tiers


@dataclass(frozen=True)
class Candidate:
    """One copy of a snapshot, not opened yet. name: equal on all ranks. hold: keeps it from retention meanwhile."""

    step: int
    name: str
    open: Callable[[], SnapshotReader]
    hold: Callable[[], AbstractContextManager[None]] = nullcontext


def candidates(
    io: _C.Io, root: Path, step: int | None, threads: int, tiers: Tiers, key: Key | None
) -> list[Candidate]:
    """Returns the copies to try: the newest first, of one the nearest first. SnapshotError when there is none."""
    found: list[tuple[int, int, Candidate]] = []
    for folder in step_folders(root) if not tiers.unions else ():  # with unions, which ranks see alike, it is in them
        if step is None or folder.step == step:
            opener = partial(open_folder, folder.path, io, threads, key, tiers.spare)
            found.append(
                (folder.step, 1, Candidate(folder.step, folder.path.name, opener, partial(reading, folder.path)))
            )
    for copy in tiers.copies(step):
        found.append((copy.step, 0, Candidate(copy.step, copy.name, partial(tiers.open, copy))))
    if not found:
        there = [folder.path.name for folder in step_folders(root)]
        wanted = "no snapshot" if step is None else f"no snapshot of step {step}"
        raise SnapshotError(f"'{root}' holds {wanted}" + (f"; there are {', '.join(there)}" if there else ""))
    return [candidate for *_, candidate in sorted(found, key=lambda row: row[:2], reverse=True)]


def newest_valid(io: _C.Io, root: Path, key: Key | None = None) -> StepFolder | None:
    """Returns the newest folder whose manifest verifies and whose files have their sizes, or None."""
    for folder in step_folders(root):
        try:
            read_manifest(io, folder.path, key)
        except SnapshotDamaged:
            continue
        return folder
    return None
