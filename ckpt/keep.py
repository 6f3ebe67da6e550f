"""Which snapshots stay and which go. Deciding is pure; removing is `folders.remove_step`.

Not a garbage collector of dead attempts. The one idea: only what a rule explicitly gives up is removed, after the new
snapshot is durable; whatever is damaged, foreign, newer than the step just written, or being read is left alone.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from plait import _C
from plait.ckpt.errors import SnapshotDamaged
from plait.ckpt.folders import StepFolder, remove_step, step_folders
from plait.ckpt.manifest import MANIFEST
from plait.ckpt.reader import read_manifest


@dataclass(frozen=True)
class Policy:
    """The newest `keep_last` stay, and every step that is a multiple of `keep_every`. keep_last None: all stay."""

    keep_last: int | None = 3
    keep_every: int | None = None

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError(f"keep_last={self.keep_last}: at least 1 must stay (None: all)")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"keep_every={self.keep_every}: must be a positive number of steps")

    def given_up(self, valid: Sequence[StepFolder], written: StepFolder) -> list[StepFolder]:
        """Returns those of `valid` (this run's, in any order) that may go now that `written` is durable.

        Oldest first.
        """
        if self.keep_last is None:
            return []
        ours = sorted((f for f in valid if f[:2] <= written[:2]), reverse=True)
        newest_of_step: dict[int, StepFolder] = {}
        for folder in ours:
            newest_of_step.setdefault(folder.step, folder)
        kept = set(list(newest_of_step)[: self.keep_last]) | {written.step}
        if self.keep_every is not None:
            kept |= {step for step in newest_of_step if step % self.keep_every == 0}
        return [f for f in reversed(ours) if f.step not in kept or f != newest_of_step[f.step]]


def retain(io: _C.Io, root: Path, policy: Policy, written: StepFolder, run: str, session: str) -> list[str]:
    """Removes what the policy gives up; returns the names. Called by the owner of the LOCK after a commit."""
    valid = []
    for folder in step_folders(root):
        try:
            if read_manifest(io, folder.path).run == run:
                valid.append(folder)
        except SnapshotDamaged:
            continue  # left for people to look at; `plait snapshot ls` names the reason
    removed = []
    for folder in policy.given_up(valid, written):
        with _alone(folder.path) as alone:
            if alone:
                remove_step(io, folder, session)
                removed.append(folder.path.name)
    return removed


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Holds a snapshot against retention while it is read (shared flock on its manifest)."""
    fd = os.open(folder / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


@contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Gives True when no reader holds the snapshot."""
    fd = os.open(folder / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)
