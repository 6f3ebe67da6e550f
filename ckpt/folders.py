"""Names under a snapshot root, and what may be removed there.

Not the content of any file. The one idea: every name follows one grammar (docs/format.md), and nothing that does not
match it is ever touched; what is removed is renamed to `.trash-` first, so that a step folder is whole or has no step
name.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from plait import _C
from plait.ckpt.manifest import MANIFEST, data_name, fragment_name

LATEST = "LATEST"
ABORT = "abort.error"
PART = ".part"  # a small file that is not complete yet
_STEP = re.compile(r"step-(\d{9,})(?:-(\d+))?")
_ATTEMPT = re.compile(r"\.tmp-(?:\d+|restore)-([0-9a-f]{16})-\d+")
_TRASH = re.compile(r"\.trash-[0-9a-f]{16}-step-\d{9,}(?:-\d+)?")
_INSIDE = re.compile(
    r"(?:r\d{5,}\.(?:(?:s\d{9,}\.)?(?:p\d{5,}\.)?safetensors|json|ok|error)|MANIFEST\.json|objects\.json|abort\.error)(?:\.part)?"
)


class StepFolder(NamedTuple):
    """A folder with the name of a snapshot; newest last when sorted. Whether it holds one, its manifest says."""

    step: int
    generation: int
    path: Path


def step_name(step: int, generation: int = 1) -> str:
    """Returns the folder name of the generation-th snapshot of a step."""
    return f"step-{step:09d}" + (f"-{generation}" if generation > 1 else "")


def parse_step(path: Path) -> StepFolder | None:
    """Returns what a folder's name says, or None when it is not the name of a snapshot."""
    match = _STEP.fullmatch(path.name)
    if match is None or step_name(int(match[1]), int(match[2] or 1)) != path.name:
        return None
    return StepFolder(int(match[1]), int(match[2] or 1), path)


def is_attempt(name: str) -> bool:
    """True for the folder name of an attempt."""
    return _ATTEMPT.fullmatch(name) is not None and not name.startswith(".tmp-restore-")


def attempt_folder(root: Path, attempt: str) -> Path:
    """Returns where an attempt ("STEP-SESSION-SEQUENCE") is written."""
    return root / f".tmp-{attempt}"


def step_folders(root: Path) -> list[StepFolder]:
    """Returns all folders named like snapshots, newest first; empty when there is no root."""
    while root.is_dir():
        found = [named for name in os.listdir(root) if (named := parse_step(root / name)) is not None]
        there = sorted((f for f in found if f.path.is_dir()), reverse=True)
        if len(there) == len(found) or all(os.path.lexists(f.path) for f in found):
            return there
        # One was removed since it was listed: whoever writes here may have newer ones by now.
    return []


def next_generation(root: Path, step: int) -> int:
    """Returns the first generation of a step whose name is free."""
    return 1 + max((f.generation for f in step_folders(root) if f.step == step), default=0)


def make_folder(io: _C.Io, path: Path) -> None:
    """Makes a folder; another rank may have made it already."""
    try:
        _C.mkdir(io, path)
        os.chmod(path, 0o700)  # as the files in it: for their owner only
    except FileExistsError:
        if not path.is_dir():
            raise


def publish(io: _C.Io, path: Path, data: bytes) -> None:
    """Makes a small file appear whole and durable under its name: write beside it, sync, rename, sync the folder."""
    part = path.with_name(path.name + PART)
    _C.write_small(io, part, data, exclusive=False)
    _C.rename(io, part, path)
    _C.fsync_dir(io, path.parent)


def announce(io: _C.Io, path: Path, data: bytes) -> None:
    """Tells other ranks by a small file: whole and on disk when its name appears, which is the last thing done here.

    Who reads it may at once rename or remove the folder, so nothing of it is touched after the rename.
    """
    part = path.with_name(path.name + PART)
    _C.write_small(io, part, data, exclusive=False)
    _C.fsync_dir(io, path.parent)
    _C.rename(io, part, path)


def remove_folder(io: _C.Io, path: Path, but: Collection[str] = ()) -> None:
    """Removes a folder of ours, its manifest first. Files with foreign names, and those of `but`, are left, and with
    them the folder."""
    names = sorted((n for n in os.listdir(path) if _INSIDE.fullmatch(n)), key=lambda n: (n != MANIFEST, n))
    for name in names:
        if name not in but:
            remove_shared(io, path / name)
    if but:
        return
    try:
        _C.rmdir(io, path)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise


def session_attempts(root: Path, session: str) -> list[Path]:
    """Returns the attempt folders of one launch, by name."""
    return sorted(root.glob(f".tmp-[0-9]*-{session}-*"))


def remove_part(io: _C.Io, folder: Path, rank: int) -> None:
    """Removes what a rank wrote into an attempt that will not be committed."""
    bases = [path.name for path in folder.glob(f"r{rank:05d}.s*.safetensors")]
    for name in (data_name(rank), *bases, fragment_name(rank)):
        for path in (folder / name, folder / (name + PART)):
            if path.exists():
                remove_shared(io, path)


def remove_shared(io: _C.Io, path: Path) -> None:
    """Removes a file of a failed attempt, which its rank, the coordinator and a partner's server all clear away."""
    try:
        _C.unlink(io, path)
    except FileNotFoundError:  # the other one was faster
        pass


def session_trash(root: Path, session: str) -> list[Path]:
    """Returns the folders of snapshots that a launch is removing, by name."""
    return sorted(root.glob(f".trash-{session}-*"))


def remove_step(io: _C.Io, folder: StepFolder, session: str, but: Collection[str] = ()) -> None:
    """Removes a snapshot so that a crash at any point leaves it whole or without its name. but: files to leave."""
    root = folder.path.parent
    trash = root / f".trash-{session}-{folder.path.name}"
    _C.rename(io, folder.path, trash)
    _C.fsync_dir(io, root)
    remove_folder(io, trash, but)


def leftovers(root: Path, session: str) -> list[Path]:
    """Returns what dead attempts left: `.tmp-` of other sessions, all `.trash-`, unfinished small files."""
    found = []
    for name in sorted(os.listdir(root)):
        attempt = _ATTEMPT.fullmatch(name)
        if (
            (attempt and attempt[1] != session)
            or _TRASH.fullmatch(name)
            or name in (LATEST + PART, "RUN.json" + PART)
        ):
            found.append(root / name)
    return found


def collect_trash(io: _C.Io, root: Path) -> None:
    """Removes what was being removed when its process died. Only the owner of the LOCK may call it."""
    for name in sorted(os.listdir(root)):
        if _TRASH.fullmatch(name):
            remove_folder(io, root / name)


def collect_garbage(io: _C.Io, root: Path, session: str) -> list[str]:
    """Removes leftovers and returns their names. Only the owner of the LOCK may call it."""
    found = leftovers(root, session)
    for path in found:
        if path.is_dir():
            remove_folder(io, path)
        else:
            _C.unlink(io, path)
    return [path.name for path in found]
