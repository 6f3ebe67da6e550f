"""What all foreign formats share: which part of a snapshot goes out, how names become a tree, how a tree comes in.

Not a format. The one idea: a name in a snapshot is a path ("model/layers.0.weight"), so a foreign tree and a snapshot
say the same thing; escapes of keys ("/", "@", "~") exist only inside.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from plait.ckpt.crypt import Key
from plait.ckpt.errors import SnapshotDamaged, SnapshotError
from plait.ckpt.folders import step_folders
from plait.ckpt.reader import SnapshotReader
from plait.ckpt.snapshots import Snapshots
from plait.ckpt.values import decode

POOL_BYTES = 256 << 20  # of staging for an import: a larger state goes through it in slabs


@dataclass(frozen=True)
class Chosen:
    """A part of a snapshot under the names that it gets outside. left_out: what has no place there, and why."""

    reader: SnapshotReader
    tensors: dict[str, str]  # name outside -> name in the snapshot
    values: dict[str, Any]
    paths: dict[str, tuple[str, ...]]  # name outside -> its keys: one of them may have a "/" of its own
    left_out: list[str] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes that are written: a tied tensor counts once per name."""
        return sum(self.reader.table.entry(name).num_bytes for name in self.tensors.values())

    @property
    def aliases(self) -> dict[str, str]:
        """Names outside of the same tensor: name -> the first one."""
        first: dict[str, str] = {}
        table = self.reader.table
        targets = {name: table.aliases.get(inner, inner) for name, inner in self.tensors.items()}
        return {n: first[t] for n, t in sorted(targets.items()) if first.setdefault(t, n) != n}


@dataclass
class Imported:
    """What a foreign checkpoint held: a state to save; what was left out, and why; the step that it names."""

    state: dict[str, Any]
    left_out: list[str] = field(default_factory=list)
    step: int | None = None


def choose(reader: SnapshotReader, select: str = "", strip: bool = False) -> Chosen:
    """Returns what lies at or below the name `select` ("model"); all for "". strip: cut that prefix off the names.

    SnapshotError when there is nothing, or when two get the same name.
    """

    paths: dict[str, tuple[str, ...]] = {}

    def below(names: Iterable[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in sorted(names):
            if not select or name == select or name.startswith(select + "/"):
                inner = name[len(select) + 1 :] if strip and select else name
                keys = tuple(map(_unescape, (inner or name.rpartition("/")[2]).split("/")))
                outer = "/".join(keys)
                if outer in found:
                    raise SnapshotError(f"{name!r} and {found[outer]!r} would both be called {outer!r}")
                found[outer], paths[outer] = name, keys
        return found

    select = select.strip("/")
    tensors = below(reader.table.names)
    values = {outer: decode(reader.values[name], f"value {name!r}") for outer, name in below(reader.values).items()}
    if not tensors and not values:
        roots = sorted({name.partition("/")[0] for name in reader.table.names | reader.values.keys()})
        raise SnapshotError(f"'{reader.place}' has nothing below {select!r}; it has {roots}")
    per_rank = below({name for fragment in reader.fragments for name in fragment.per_rank})
    left = [f"{name}: each rank has a value of its own" for name in per_rank]
    return Chosen(reader, tensors, values, paths, left)


def _unescape(key: str) -> str:
    """Returns a key as it was: the reverse of what `state.join` escapes."""
    return key.replace("~2", "@").replace("~1", "/").replace("~0", "~")


def nest_paths(leaves: Mapping[tuple[Any, ...], Any], numbers: bool = False) -> dict[Any, Any]:
    """Returns a tree of dicts from paths of keys. SnapshotError when one is both a leaf and a branch.

    numbers: keys of one dict that are all numbers become integers, as in the state of a torch optimizer.
    """
    groups: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for path, leaf in leaves.items():
        groups.setdefault(path[0], {})[path[1:]] = leaf
    as_numbers = numbers and all(type(k) is str and k.isdecimal() and str(int(k)) == k for k in groups)
    tree: dict[Any, Any] = {}
    for key, below in groups.items():
        if () in below and len(below) > 1:
            raise SnapshotError(f"{key!r} is a value and has parts: {[p[0] for p in below if p][:3]}")
        tree[int(key) if as_numbers else key] = below[()] if () in below else nest_paths(below, numbers)
    return tree


def read_tree(chosen: Chosen) -> dict[Any, Any]:
    """Returns all that was chosen as a tree in host memory; names of one tensor share it."""
    tensors: dict[str, torch.Tensor] = {}
    for outer, name in chosen.tensors.items():
        same = chosen.aliases.get(outer)
        tensors[outer] = tensors[same] if same in tensors else chosen.reader.read_full(name)
    leaves = {**chosen.values, **tensors}
    return nest_paths({chosen.paths[outer]: leaf for outer, leaf in leaves.items()}, numbers=True)


def save_imported(root: Path, found: Imported, step: int | None, prefix: str, key: Key | None) -> Path:
    """Saves what was imported as a snapshot; returns its folder.

    step: default that of the checkpoint, else 0. SnapshotLocked when a job writes there, SnapshotError when the step
    is there already, StateError naming what cannot be stored.
    """
    number = step if step is not None else found.step or 0
    if any(folder.step == number for folder in step_folders(root)):
        raise SnapshotError(f"'{root}' has a snapshot of step {number} already; give another --step")
    if not _has_leaf(found.state):
        raise SnapshotError("nothing is left to import")
    state = nest_paths({(*prefix.strip("/").split("/"),): found.state}) if prefix.strip("/") else found.state
    total = _bytes_of(state)
    pool = POOL_BYTES if total > POOL_BYTES else 0
    with Snapshots(root, keep_last=None, pool_bytes=pool, key=key) as snapshots:
        snapshots.save(number, state).wait()
    return next(folder.path for folder in step_folders(root) if folder.step == number)


def skipped(names: Iterable[str], patterns: Iterable[str]) -> set[str]:
    """Returns the names that a caller leaves out."""
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def _has_leaf(tree: Any) -> bool:
    if isinstance(tree, Mapping):
        return any(map(_has_leaf, tree.values()))
    return True


def _bytes_of(tree: Any) -> int:
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, Mapping):
        return sum(map(_bytes_of, tree.values()))
    return sum(map(_bytes_of, tree)) if isinstance(tree, (list, tuple)) else 0


@contextmanager
def appearing(path: Path, remove: Callable[[Path], None]) -> Iterator[Path]:
    """Gives a path beside the target to write to, which gets the target's name, durable, when the body succeeds; else
    it is removed, so that nothing that looks valid is left."""
    part = path.with_name(f".{path.name}.part")
    remove(part)
    try:
        yield part
        os.replace(part, path)
    except BaseException as error:
        remove(part)
        cause = _of_machine(error)
        if cause is not None and (cause is not error or cause.filename is None):
            raise OSError(cause.errno, f"write: {cause.strerror}", str(path)) from error
        raise
    sync(path.parent)


def _of_machine(error: BaseException | None) -> OSError | None:
    """Returns the error of the machine behind another one: torch turns a full disk into a RuntimeError."""
    while error is not None and not (isinstance(error, OSError) and error.errno is not None):
        error = error.__cause__ or error.__context__
    return error


def need_file(path: Path) -> Path:
    """Returns the path of a regular file (links are followed); SnapshotDamaged for a FIFO, which would be waited for,
    a device or a folder. What is not there is left to who opens it."""
    if path.exists() and not path.is_file():
        raise SnapshotDamaged(f"'{path}' is no regular file")
    return path


def sync(path: Path) -> None:
    """Makes a file's content, or a folder's names, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
