"""Snapshots out to and in from torch.save files, as a tree of tensors and plain values.

Nothing is unpickled but with weights_only=True, whose unpickler makes tensors and plain containers only. In the place
of every other object stands a Stranger, which has its class's name and nothing else: what hangs on one is refused by
its path, and can be left out.
"""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from plait.ckpt.errors import SnapshotDamaged, SnapshotError
from plait.ckpt.interop_tree import Chosen, Imported, appearing, need_file, read_tree, skipped
from plait.ckpt.values import describe

# How torch names what its unpickler refuses, and what it says of a file that is no pickle.
_REFUSED = re.compile(r"(?:GLOBAL|unsupported class|got <class) [`']?([\w.]+)")
_BROKEN = re.compile(r"WeightsUnpickler error:\s*(.+)")  # what stands before advises to run its code


def export_torch(chosen: Chosen, path: Path) -> list[str]:
    """Writes a part of a snapshot as a tree by torch.save; returns what was left out. The whole part is in memory.

    Names of one tensor share it. What was written is opened with weights_only=True before it gets its name.
    """
    tree = read_tree(chosen)
    with appearing(path, lambda part: part.unlink(missing_ok=True)) as part:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            torch.save(tree, file)
            file.flush()
            os.fsync(file.fileno())
        load_plain(part, mmap=True)
    return chosen.left_out


def import_torch(path: Path, skip: Sequence[str] = ()) -> Imported:
    """Reads a torch.save file. SnapshotError says what weights_only=True refuses; SnapshotDamaged, what is broken.

    A tensor or a list at the top is called "value"; what cannot be stored is refused by its path when it is saved.
    """
    content = load_plain(path, strangers=True)
    tree = content if isinstance(content, dict) else {"value": content}
    left: list[str] = []
    kept = _without(tree, "", skip, left)
    if refused := {name: stranger.kind for name, stranger in _strangers(kept, "")}:
        said = ", ".join(f"{kind} at {name!r}" for name, kind in list(refused.items())[:8])
        way = f"leave them out (--skip {next(iter(refused))!r})" if tree is content else "save its state_dict()"
        raise SnapshotError(
            f"'{path}' has {said}, which torch.load(weights_only=True) refuses: unpickling anything but tensors and "
            f"plain containers can run code; {way}"
        )
    return Imported(kept, left, step_of(tree))


class Stranger:
    """Stands where a file has an object of another class, of which nothing is made or run."""

    kind = ""  # the name of that class, or of the function whose result it was

    def __new__(cls, *_: Any, **__: Any) -> Stranger:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _strangers(tree: Any, name: str) -> Iterator[tuple[str, Stranger]]:
    """Finds them in a tree, with the paths by which they can be left out (not of a part of a list)."""
    if isinstance(tree, Stranger):
        yield name, tree
    elif isinstance(tree, dict):
        for key, child in tree.items():
            yield from _strangers(child, f"{name}/{key}" if name else str(key))
    elif isinstance(tree, (list, tuple)):
        for child in tree:
            yield from _strangers(child, name)


def _stand_ins(source: Path | io.BytesIO, known: Sequence[Any]) -> list[tuple[Any, str]]:
    """Returns a kind of Stranger for each class and function that weights_only=True would refuse in a file."""
    try:
        with torch.serialization.safe_globals(list(known)):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(source)
    except Exception:  # of a file that is broken, or older than zip: loading it says what is wrong
        return []
    finally:
        if isinstance(source, io.BytesIO):
            source.seek(0)
    return [(type("Stranger", (Stranger,), {"kind": name.removeprefix("builtins.")}), name) for name in names]


def load_plain(
    source: Path | io.BytesIO, where: str = "", mmap: bool = False, more: Sequence[Any] = (), strangers: bool = False
) -> Any:
    """Returns what torch.save wrote, by weights_only=True, on the CPU.

    more: further classes that may be made, of this caller's choice (harmless ones). strangers: put a Stranger where
    another class is, instead of refusing the file. where: names the source in errors; default its path.
    """
    where = where or f"'{source}'"
    if isinstance(source, Path):
        need_file(source)
    num_bytes = source.stat().st_size if isinstance(source, Path) else source.getbuffer().nbytes
    _check_archive(source, num_bytes, where)
    try:
        with torch.serialization.safe_globals([*more, *(_stand_ins(source, more) if strangers else ())]):
            content = torch.load(source, map_location="cpu", weights_only=True, **({"mmap": True} if mmap else {}))
    except (OSError, MemoryError):
        raise
    except Exception as error:  # broken bytes raise anything at all
        refused = sorted(set(_REFUSED.findall(str(error)))) if type(error).__name__ == "UnpicklingError" else []
        if refused:
            raise SnapshotError(
                f"{where} needs {', '.join(refused)}, which torch.load(weights_only=True) refuses: unpickling "
                "anything but tensors and plain containers can run code. Save it again as a state_dict of these"
            ) from error
        said = _BROKEN.search(str(error))
        raise SnapshotDamaged(
            f"{where} is no whole file of torch.save: {said[1] if said else _first_line(error)}"
        ) from error
    _check_repeats(content, num_bytes, where)
    return content


def _check_archive(source: Path | io.BytesIO, num_bytes: int, where: str) -> None:
    """Raises SnapshotDamaged for an archive whose records are larger than it is, compressed or one over the other:
    torch.save compresses nothing, torch.load expands whatever is there."""
    try:
        with zipfile.ZipFile(source) as archive:
            records = archive.infolist()
    except Exception:  # of a file that is broken, or older than zip: loading it says what is wrong
        return
    finally:
        if isinstance(source, io.BytesIO):
            source.seek(0)
    total = sum(record.file_size for record in records)
    if total > num_bytes:
        raise SnapshotDamaged(
            f"{where} has records of {total} bytes in a file of {num_bytes}, which none of torch.save has"
        )


def _check_repeats(content: Any, num_bytes: int, where: str) -> None:
    """Raises SnapshotDamaged for tensors that repeat their bytes (stride 0) to more than the file has: few bytes can
    claim any size, and a snapshot holds each element."""
    claimed = 0
    for name, tensor in _tensors(content, ""):
        own = tensor.numel() * tensor.element_size()
        if own > tensor.untyped_storage().nbytes():
            claimed += own
        if claimed > num_bytes:
            raise SnapshotDamaged(
                f"{where}: tensor {name!r} of shape {tuple(tensor.shape)} repeats its bytes to {own}, in a file of "
                f"{num_bytes}: save its .contiguous()"
            )


def _tensors(tree: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor) and tree.layout == torch.strided:
        yield name, tree
    elif isinstance(tree, (dict, list, tuple)):
        for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _tensors(child, f"{name}/{key}" if name else str(key))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _without(tree: Any, name: str, skip: Sequence[str], left: list[str]) -> Any:
    """Returns the tree without the names that were left out."""
    if not isinstance(tree, dict) or not skip:
        return tree
    kept = {}
    for key, child in tree.items():
        path = f"{name}/{key}" if name else str(key)
        if skipped([path], skip):
            kind = child.kind if isinstance(child, Stranger) else describe(child)
            left.append(f"{path}: left out by --skip ({kind})")
        else:
            kept[key] = _without(child, path, skip, left)
    return kept


def step_of(tree: dict[Any, Any]) -> int | None:
    """Returns the step that a checkpoint says it is of, under the usual names."""
    found = (tree.get(key) for key in ("step", "global_step", "iteration"))
    return next((n for n in found if type(n) is int and n >= 0), None)


def merge(parts: Sequence[tuple[str, dict[str, torch.Tensor]]], how: Callable[[str], int | None]) -> dict[str, Any]:
    """Returns full tensors from the parts of tensor-parallel ranks, in their order.

    parts: (where, tensors by name) of each. how: the dim along which a name is cut, None for a replicated one, whose
    copies must have the same bits. SnapshotError naming tensor and parts that do not fit together.
    """
    merged: dict[str, Any] = {}
    for where, tensors in parts[1:]:
        odd = sorted(tensors.keys() ^ parts[0][1].keys())
        if odd:
            raise SnapshotError(f"tensor {odd[0]!r} is in one of {parts[0][0]} and {where} only")
    for name, first in parts[0][1].items():
        dim, all_of = how(name), [tensors[name] for _, tensors in parts]
        if dim is None:
            for (where, _), other in zip(parts[1:], all_of[1:], strict=True):
                if other.dtype != first.dtype or not _same(first, other):
                    raise SnapshotError(
                        f"tensor {name!r} should be the same in {parts[0][0]} and {where}, and is not"
                    )
            merged[name] = first
            continue
        for (where, _), other in zip(parts, all_of, strict=True):
            shapes = [list(t.shape[:dim]) + list(t.shape[dim + 1 :]) for t in (first, other)]
            if dim >= first.dim() or first.dtype != other.dtype or shapes[0] != shapes[1]:
                raise SnapshotError(
                    f"tensor {name!r} is {other.dtype} {tuple(other.shape)} in {where} and {first.dtype} "
                    f"{tuple(first.shape)} in {parts[0][0]}: they do not fit along dim {dim}"
                )
        merged[name] = _cat(all_of, dim)
    return merged


def _cat(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Concatenates bit for bit, also dtypes for which torch has no cat."""
    shape = list(tensors[0].shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    full, at = torch.empty(shape, dtype=tensors[0].dtype), 0
    for tensor in tensors:
        full.narrow(dim, at, tensor.shape[dim]).copy_(tensor)
        at += tensor.shape[dim]
    return full


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*bits)
