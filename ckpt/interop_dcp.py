"""Snapshots out to and in from directories of torch.distributed.checkpoint (DCP), of any number of ranks.

torch reads such a directory's `.metadata` by unpickling whatever it says; here it is read as data
(interop_records.py), and every number in it is checked against the files before memory is taken. Values and tensor
data are read with weights_only=True. One process, no process group.
"""

from __future__ import annotations

import io
import os
import shutil
import warnings
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from plait.ckpt.box import Box, cover_error
from plait.ckpt.errors import SnapshotDamaged, SnapshotError
from plait.ckpt.interop_records import Record, read_records
from plait.ckpt.interop_torch import load_plain, step_of
from plait.ckpt.interop_tree import Chosen, Imported, appearing, need_file, nest_paths, read_tree, skipped, sync
from plait.ckpt.layout import can_exist, stored_bytes

METADATA = ".metadata"
_MAX_METADATA_BYTES = 1 << 30


def export_dcp(chosen: Chosen, path: Path) -> list[str]:
    """Writes a part of a snapshot as a DCP directory, which appears whole; returns what was left out. The whole part
    is in memory. Names of one tensor are written as copies: DCP has no ties."""
    import torch.distributed.checkpoint as dcp

    tree = read_tree(chosen)
    with appearing(path, lambda part: shutil.rmtree(part, ignore_errors=True)) as part:
        part.mkdir(mode=0o700)
        try:
            with warnings.catch_warnings():  # that there is no process group, which no_dist says
                warnings.simplefilter("ignore", UserWarning)
                dcp.save(tree, storage_writer=dcp.FileSystemWriter(part, sync_files=True), no_dist=True)
        except dcp.CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            what = f"{type(cause).__name__}: {cause}"
            raise SnapshotError(f"'{path}': torch.distributed.checkpoint could not save: {what}") from cause
        for file in part.iterdir():
            file.chmod(0o600)
        sync(part)
    return chosen.left_out


def read_metadata(folder: Path) -> Record:
    """Returns what `.metadata` says. SnapshotError for what may not be in it, SnapshotDamaged for what is broken."""
    path = folder / METADATA
    size = need_file(path).stat().st_size
    if size > _MAX_METADATA_BYTES:
        raise SnapshotDamaged(f"'{path}' has {size} bytes")
    try:
        found = read_records(path.read_bytes())
    except SnapshotError as error:
        raise SnapshotError(f"'{path}': {error}") from error
    except OSError:
        raise
    except Exception as error:  # broken bytes raise anything at all
        raise SnapshotDamaged(f"'{path}' is not as DCP writes it: {type(error).__name__}: {error}") from error
    parts = [found.get(name) for name in ("state_dict_metadata", "storage_data")] if isinstance(found, Record) else []
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise SnapshotDamaged(f"'{path}' holds no DCP metadata")
    return found


def import_dcp(folder: Path, skip: Sequence[str] = ()) -> Imported:
    """Reads a DCP directory into full tensors and values, nested as they were saved (where DCP noted it).

    SnapshotDamaged naming file, tensor and reason; SnapshotError for a value that weights_only=True refuses, which
    can be left out by its name (a pattern in `skip`).
    """
    metadata = read_metadata(folder)
    paths, storage = metadata.get("planner_data"), metadata.get("storage_data")
    entries = {str(name): entry for name, entry in metadata.get("state_dict_metadata").items()}
    names = {name: _name_of(name, paths if isinstance(paths, dict) else {}) for name in entries}
    unwanted = skipped(("/".join(map(str, path)) for path in names.values()), skip)
    leaves: dict[tuple[Any, ...], Any] = {}
    left: list[str] = []
    with _Files(folder) as files:
        for name, entry in entries.items():
            path = names[name]
            if path in leaves:
                raise SnapshotDamaged(f"'{folder}': {name!r} is at {path}, where another one is")
            if "/".join(map(str, path)) in unwanted:
                left.append(f"{'/'.join(map(str, path))}: left out by --skip")
            elif isinstance(entry, Record) and entry.kind == "TensorStorageMetadata":
                leaves[path] = _tensor(name, entry, storage, files)
            else:
                data = files.read(name, storage.get((name, None)))
                leaves[path] = load_plain(io.BytesIO(data), f"'{folder}': value {name!r} (--skip leaves it out)")
    tree = _with_lists(nest_paths(leaves))
    return Imported(tree, left, step_of(tree))


def _with_lists(tree: Any) -> Any:
    """Returns the tree with its lists: in DCP's paths an integer is a place in a list, keys of dicts are texts."""
    if not isinstance(tree, dict):
        return tree
    below = {key: _with_lists(part) for key, part in tree.items()}
    is_list = below and all(type(key) is int for key in below) and sorted(below) == list(range(len(below)))
    return [below[place] for place in range(len(below))] if is_list else below


def _name_of(name: Any, paths: dict[Any, Any]) -> tuple[Any, ...]:
    path = paths.get(name)
    good = isinstance(path, tuple) and path and all(type(key) in (str, int) for key in path)
    return path if good else (str(name),)  # type: ignore[return-value]


def _tensor(name: str, entry: Record, storage: dict[Any, Any], files: _Files) -> torch.Tensor:
    """Puts one tensor together from its chunks, which must fill it exactly once."""
    where = f"'{files.folder}': tensor {name!r}"
    properties, shape, chunks = entry.get("properties"), entry.get("size"), entry.get("chunks")
    dtype = properties.get("dtype") if isinstance(properties, Record) else None
    chunks = [c for c in chunks if isinstance(c, Record)] if isinstance(chunks, list) else []
    boxes = [Box(chunk.get("offsets"), chunk.get("sizes")) for chunk in chunks]
    if not isinstance(dtype, torch.dtype) or not all(map(_is_shape, (shape, *(p for b in boxes for p in b)))):
        raise SnapshotDamaged(f"{where}: dtype {dtype}, shape {shape}, chunks {boxes[:4]} are none")
    if any(len(part) != len(shape) for box in boxes for part in box):
        raise SnapshotDamaged(f"{where} has shape {shape}, and chunks of other dims")
    reason = cover_error(shape, boxes)
    if reason is not None:
        raise SnapshotDamaged(f"{where} is not covered exactly once: {reason}")
    infos = [storage.get((name, box.offset)) for box in boxes]
    for box, info in zip(boxes, infos, strict=True):
        if files.size(name, info) < prod(box.shape) * stored_bytes((), dtype):
            raise SnapshotDamaged(
                f"{where}: chunk {box.offset}+{box.shape} has fewer bytes in its file than it needs"
            )
    full = torch.empty(shape, dtype=dtype)
    for box, info in zip(boxes, infos, strict=True):
        part = load_plain(io.BytesIO(files.read(name, info)), f"{where}: chunk {box.offset}")
        if not isinstance(part, torch.Tensor) or part.dtype != dtype or tuple(part.shape) != box.shape:
            what = f"{part.dtype} {tuple(part.shape)}" if isinstance(part, torch.Tensor) else type(part).__name__
            raise SnapshotDamaged(f"{where}: chunk {box.offset} is {what}, not {dtype} {box.shape}")
        full[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))].copy_(part)
    return full


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= 64 and all(type(n) is int for n in value) and can_exist(value)


class _Files:
    """The data files of a directory, each opened once. Their names and ranges come from outside and are checked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, BinaryIO] = {}

    def size(self, name: str, info: Any) -> int:
        """Returns the bytes of a range after checking that the file has them."""
        if not isinstance(info, Record):
            raise SnapshotDamaged(f"'{self.folder}': {METADATA} does not say where {name!r} lies")
        file, offset, length = (info.get(field) for field in ("relative_path", "offset", "length"))
        transforms = info.get("transform_descriptors")
        if transforms:
            raise SnapshotError(
                f"'{self.folder}': {name!r} went through {transforms}, a DCP extension; not supported"
            )
        where = f"'{self.folder / str(file)}': {name!r}"
        if type(file) is not str or Path(file).name != file or "\0" in file:
            raise SnapshotDamaged(f"{where}: not the name of a file in this directory")
        file_bytes = os.fstat(self._file(file).fileno()).st_size
        if any(type(n) is not int or n < 0 for n in (offset, length)):
            raise SnapshotDamaged(f"{where}: offset {offset!r}, length {length!r}")
        if offset + length > file_bytes:
            raise SnapshotDamaged(f"{where}: ends at byte {offset + length} of {file_bytes}")
        return int(length)

    def read(self, name: str, info: Any) -> bytes:
        """Returns the bytes of a range."""
        length = self.size(name, info)
        file = self._file(info.get("relative_path"))
        file.seek(info.get("offset"))
        return file.read(length)

    def _file(self, name: str) -> BinaryIO:
        if name not in self._open:
            try:
                self._open[name] = open(need_file(self.folder / name), "rb")
            except FileNotFoundError:
                raise SnapshotDamaged(f"'{self.folder / name}' is missing") from None
        return self._open[name]

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()
