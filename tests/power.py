"""What a power loss may leave of a folder: an adversary that knows which operations were synced, and keeps or loses
each of the others by chance, in any order.

Built from the log of FaultIo, by POSIX alone: data is on disk after fsync of its file, a name after fsync of its
folder; until then a file may be whole, empty, cut, zero, or torn by sectors, and a create, rename, unlink, mkdir or
rmdir may have happened or not, whatever came after it. No file system is worse; most are better.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

SECTOR = 512
Ops = list[tuple[str, str]]


@dataclass
class Pending:
    """What was done and not synced. names: (kind, path, other path or where the file was at the start), in order."""

    dirty: list[str] = field(default_factory=list)
    names: list[tuple[str, str, str]] = field(default_factory=list)


def pending(ops: Ops, root: Path, start: Path) -> Pending:
    """Returns what operations on `root`, a copy of `start`, left unsynced. Paths are those in the log."""
    found, origin = Pending(), {}
    for base, folders, files in os.walk(start):
        for name in [*folders, *files]:
            path = os.path.relpath(os.path.join(base, name), start)
            origin[f"{root}/{path}"] = path
    for name, path in ops:
        if name in ("pwrite", "ftruncate", "fallocate") and path not in found.dirty:
            found.dirty.append(path)
        elif name in ("fsync", "fdatasync"):
            found.dirty = [p for p in found.dirty if p != path]
        elif name == "open" and path not in origin:
            origin[path] = ""
            found.names.append(("create", path, ""))
        elif name == "mkdir" and path not in origin:
            origin[path] = ""
            found.names.append(("mkdir", path, ""))
        elif name in ("unlink", "rmdir"):
            found.names.append((name, path, origin.pop(path, "")))
            found.dirty = [p for p in found.dirty if p != path]
        elif name == "fsync_dir":
            found.names = [row for row in found.names if os.path.dirname(row[2 * (row[0] == "rename") or 1]) != path]
        elif name == "rename":
            source, target = path.split(" -> ")
            replaced = origin.pop(target, "")
            origin = {_moved(p, source, target): o for p, o in origin.items()}
            found.dirty = [_moved(p, source, target) for p in found.dirty]
            found.names = [_moved_row(row, source, target) for row in found.names]
            found.names.append(("rename", source, target))
            if replaced:
                found.names.insert(-1, ("unlink", target, replaced))  # what the name stood for may come back
    return found


def lose(found: Pending, root: Path, logged_root: Path, start: Path, chance: Random) -> list[str]:
    """Applies a loss to `root`, a copy of what the operations left; returns what was lost, for a message."""
    lost = []

    def here(path: str) -> Path:
        return root / os.path.relpath(path, logged_root)

    for path in found.dirty:
        how = chance.choice(["keep", "empty", "cut", "zero", "torn"])
        if how != "keep" and here(path).is_file():
            _damage(here(path), how, chance)
            lost.append(f"{how} {path}")
    share = chance.choice([0.1, 0.5, 0.9, 1.0])
    for kind, path, other in reversed(found.names):
        if chance.random() < share and _undo(kind, here(path), other, here, start):
            lost.append(f"undone {kind} {path}")
    return lost


def _undo(kind: str, path: Path, other: str, here: Callable[[str], Path], start: Path) -> bool:
    """Undoes one change of a folder, where what came later allows it."""
    if kind == "create" and path.is_file():
        path.unlink()
    elif kind == "mkdir" and path.is_dir():
        shutil.rmtree(path)
    elif kind == "rmdir" and not path.exists() and path.parent.is_dir():
        path.mkdir()
    elif kind == "unlink" and other and not path.exists() and path.parent.is_dir() and (start / other).is_file():
        shutil.copyfile(start / other, path)
    elif kind == "rename":
        target = here(other)
        if not target.exists() or path.exists() or not path.parent.is_dir():
            return False
        target.rename(path)
    else:
        return False
    return True


def _damage(path: Path, how: str, chance: Random) -> None:
    size = path.stat().st_size
    if how in ("empty", "cut"):
        os.truncate(path, 0 if how == "empty" else chance.randrange(size + 1))
        return
    data = bytearray(path.read_bytes())
    for at in range(0, size, SECTOR):
        if how == "zero" or chance.random() < 0.5:
            data[at : at + SECTOR] = bytes(len(data[at : at + SECTOR]))
    path.write_bytes(data)


def _moved(path: str, source: str, target: str) -> str:
    return target + path[len(source) :] if path == source or path.startswith(source + "/") else path


def _moved_row(row: tuple[str, str, str], source: str, target: str) -> tuple[str, str, str]:
    """A row inside a renamed folder follows it; an unlink's or mkdir's origin is a path at the start and stays."""
    kind, path, other = row
    inside = path.startswith(source + "/") or (path == source and kind in ("create", "mkdir"))
    path = _moved(path, source, target) if inside else path
    return (kind, path, _moved(other, source, target) if kind == "rename" and inside else other)
