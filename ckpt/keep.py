"""Which snapshots stay and which go. Deciding is pure; removing is `folders.remove_step`.

Not a garbage collector of dead attempts. The one idea: only what a rule explicitly gives up is removed, after the new
snapshot is durable; whatever is damaged, foreign, pinned, newer than the step just written, or being read is left
alone.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from plait import _C
from plait.ckpt.errors import SnapshotDamaged, SnapshotError, naming
from plait.ckpt.folders import StepFolder, parse_step, remove_step, step_folders
from plait.ckpt.lock import NO_FLOCK
from plait.ckpt.manifest import MANIFEST, Manifest
from plait.ckpt.reader import read_manifest
from plait.ckpt.spare import clear_spares, spare_names

PIN = "PIN-"  # an empty file ROOT/PIN-step-... : that snapshot stays whatever the policy says


@dataclass(frozen=True)
class Policy:
    """The newest `keep_last` stay, every step that is a multiple of `keep_every`, and the best by a metric.

    keep_last None: all stay. keep_best: (metric, "min" or "max", how many), of what `save(metrics=...)` was given; of
    equals the newer is the better, and a snapshot without the metric (or with NaN) is none of them.
    """

    keep_last: int | None = 3
    keep_every: int | None = None
    keep_best: tuple[str, str, int] | None = None

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError(f"keep_last={self.keep_last}: at least 1 must stay (None: all)")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"keep_every={self.keep_every}: must be a positive number of steps")
        if self.keep_best is not None:
            wrong = f"keep_best={self.keep_best!r}: must be (metric, 'min' or 'max', a positive number)"
            if len(self.keep_best) != 3 or self.keep_best[1] not in ("min", "max"):
                raise ValueError(wrong)
            if type(self.keep_best[2]) is not int or self.keep_best[2] < 1:
                raise ValueError(wrong)

    def kept(
        self,
        valid: Sequence[StepFolder],
        written: StepFolder,
        pinned: Collection[StepFolder] = (),
        metrics: Mapping[StepFolder, Mapping[str, float]] | None = None,
    ) -> dict[StepFolder, str]:
        """Returns those of `valid` (this run's, in any order) that stay now that `written` is durable, and why."""
        reasons: dict[StepFolder, str] = {}
        newest_of_step: dict[int, StepFolder] = {}
        for folder in sorted(valid, reverse=True):
            if folder[:2] > written[:2]:
                reasons[folder] = "later than the one just written"
            else:
                newest_of_step.setdefault(folder.step, folder)
        past = list(newest_of_step.values())  # newest first; of one step only the newest
        for folder in past if self.keep_last is None else past[: self.keep_last]:
            reasons[folder] = f"one of the newest {self.keep_last or 'of all'}"
        for folder in past:
            if self.keep_every is not None and folder.step % self.keep_every == 0:
                reasons.setdefault(folder, f"a multiple of {self.keep_every}")
        for folder in self._best(past, metrics or {}):
            reasons.setdefault(folder, "one of the best by its metric")
        for folder in valid:
            if folder in pinned:
                reasons.setdefault(folder, "pinned")
            if folder[:2] == written[:2]:
                reasons.setdefault(folder, "just written")
        return reasons

    def _best(
        self, past: Sequence[StepFolder], metrics: Mapping[StepFolder, Mapping[str, float]]
    ) -> list[StepFolder]:
        if self.keep_best is None:
            return []
        name, direction, count = self.keep_best
        sign = 1.0 if direction == "min" else -1.0
        scores = ((sign * metrics.get(f, {}).get(name, math.nan), -f.step, f) for f in past)
        return [f for *_, f in sorted(score for score in scores if not math.isnan(score[0]))[:count]]

    def given_up(
        self,
        valid: Sequence[StepFolder],
        written: StepFolder,
        pinned: Collection[StepFolder] = (),
        metrics: Mapping[StepFolder, Mapping[str, float]] | None = None,
    ) -> list[StepFolder]:
        """Returns those of `valid` that may go, oldest first: the others of `kept`."""
        if self.keep_last is None:
            return []
        stay = self.kept(valid, written, pinned, metrics)
        return [folder for folder in sorted(valid) if folder not in stay]


def retain(
    io: _C.Io,
    root: Path,
    policy: Policy,
    written: StepFolder,
    run: str,
    session: str,
    spare_ranks: Collection[int] = (),
) -> list[str]:
    """Removes what the policy gives up; returns the names. Called by the owner of the LOCK after a commit.

    Removes nothing when the one just written does not verify any more: an older one may be the last good one.
    spare_ranks: whose data files of the one removed last are left for the next save to write over (spare.py).
    """
    valid, metrics = [], {}
    for folder in step_folders(root):
        try:
            manifest = read_manifest(io, folder.path)
        except SnapshotDamaged:
            continue  # left for people to look at; `plait snapshot ls` names the reason
        if manifest.run == run:
            valid.append(folder)
            metrics[folder] = metrics_of(manifest)
    removed: list[str] = []
    if all(folder[:2] != written[:2] for folder in valid):
        return removed
    for folder in policy.given_up(valid, written, pinned_folders(root), metrics):
        with _alone(folder.path) as alone:
            if alone and not _pin_of(folder.path).exists():  # pinned since: `pin` holds the snapshot meanwhile
                if spare_ranks and removed:
                    clear_spares(io, root, session)
                remove_step(io, folder, session, spare_names(folder.path, spare_ranks))
                removed.append(folder.path.name)
    return removed


def metrics_of(manifest: Manifest) -> dict[str, float]:
    """Returns what `save(metrics=)` was given."""
    return {name: float.fromhex(text) for name, text in manifest.metrics.items()}


def pin(io: _C.Io, folder: Path) -> None:
    """Keeps a snapshot from retention until `unpin`; durable when it returns. Again is no error.

    SnapshotError when it is no snapshot, or was just removed.
    """
    if parse_step(folder) is None:
        raise SnapshotError(f"'{folder}' has not the name of a snapshot")
    try:
        with reading(folder):
            _C.write_small(io, _pin_of(folder), b"", exclusive=False)
            _C.fsync_dir(io, folder.parent)
            there = folder.is_dir()
    except FileNotFoundError:
        there = False
    if not there:
        unpin(io, folder)
        raise SnapshotError(f"'{folder}' is no snapshot, or was just removed")


def unpin(io: _C.Io, folder: Path) -> bool:
    """Lets retention have a snapshot again; returns whether it was pinned."""
    try:
        _C.unlink(io, _pin_of(folder))
    except FileNotFoundError:
        return False
    _C.fsync_dir(io, folder.parent)
    return True


def pinned_folders(root: Path) -> set[StepFolder]:
    """Returns the pinned snapshots under a root."""
    return {folder for folder in step_folders(root) if _pin_of(folder.path).exists()}


def _pin_of(folder: Path) -> Path:
    return folder.with_name(PIN + folder.name)


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Holds a snapshot against retention while it is read (shared flock on its manifest, where there is flock)."""
    fd = os.open(folder / MANIFEST, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        try:
            with naming("flock", folder / MANIFEST):
                fcntl.flock(fd, fcntl.LOCK_SH)
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
        yield
    finally:
        os.close(fd)


@contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Gives True when no reader holds the snapshot; where there is no flock, nobody can hold it."""
    fd = os.open(folder / MANIFEST, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        try:
            with naming("flock", folder / MANIFEST):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
            free = True
        else:
            free = True
        yield free
    finally:
        os.close(fd)
