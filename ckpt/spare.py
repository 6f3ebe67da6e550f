"""Data files of the snapshot that retention removed last, which the next save writes over instead of making new ones.

Not the proof that nobody else has such a file (csrc/writer.cpp asks the kernel, on the descriptor that it then
writes). The one idea: blocks that are allocated and were written once are written again about twice as fast as new
ones, and nothing has to be freed. A spare lies in its `.trash-` folder without a manifest; the save moves it into its
attempt by one rename, so that it is in one place at a time and always in one that the next owner of the LOCK removes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path

from plait import _C
from plait.ckpt.folders import remove_folder, session_trash
from plait.ckpt.manifest import MANIFEST, data_name

FILE_SYSTEMS = ("ext4", "xfs", "tmpfs")  # those of csrc/io.cpp that know who has a file open


def can_reuse(root: Path) -> bool:
    """False where no file could be reused, so that none is to be kept; also on a disk that takes no file just now."""
    try:
        return _C.io_facts(root)["filesystem"] in FILE_SYSTEMS
    except OSError:
        return False


def spare_names(trash: Path, ranks: Collection[int]) -> set[str]:
    """Returns the data files of these ranks in a folder that goes: those with one name, as a base has another."""
    found = set()
    for name in map(data_name, ranks):
        try:
            info = os.lstat(trash / name)
        except FileNotFoundError:
            continue
        if stat.S_ISREG(info.st_mode) and info.st_nlink == 1:
            found.add(name)
    return found


def take_spare(io: _C.Io, root: Path, session: str, name: str, target: Path) -> bool:
    """Moves the spare of a name to `target`, which does not exist; False when there is none.

    Only out of a folder without a manifest: its removal is durable then, and no snapshot can come back with it.
    """
    for trash in session_trash(root, session):
        if (trash / name).exists() and not (trash / MANIFEST).exists():
            try:
                _C.rename(io, trash / name, target)
            except FileNotFoundError:  # rank 0 was clearing it away
                continue
            return True
    return False


def allocated_bytes(path: Path) -> int:
    """Returns the space that a file has, which writing over it does not need again; 0 when there is none."""
    try:
        return os.lstat(path).st_blocks * 512  # of 512 bytes on every file system, stat(2)
    except FileNotFoundError:
        return 0


def clear_spares(io: _C.Io, root: Path, session: str) -> None:
    """Removes what no save took. Only the owner of the LOCK may call it."""
    for trash in session_trash(root, session):
        remove_folder(io, trash)
