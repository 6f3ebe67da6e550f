"""Snapshots out to and in from directories of torch.distributed.checkpoint (DCP), of any number of ranks.

torch reads such a directory's `.metadata` by unpickling whatever it says; here, only DCP's own records are made, and
every number in them is checked against the files before memory is taken. Values and tensor data are read with
weights_only=True. One process, no process group.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import warnings
from collections.abc import Sequence
from math import prod
from pathlib import Path, PosixPath
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.filesystem import _StorageInfo

from plait.ckpt.box import Box, cover_error
from plait.ckpt.errors import SnapshotDamaged, SnapshotError
from plait.ckpt.interop_torch import _step_of, load_plain
from plait.ckpt.interop_tree import Chosen, Imported, appearing, nest_paths, read_tree, skipped, sync
from plait.ckpt.layout import stored_bytes

METADATA = ".metadata"
_MAX_METADATA_BYTES = 1 << 30
_RECORDS = (
    records.Metadata,
    records.TensorStorageMetadata,
    records.BytesStorageMetadata,
    records.ChunkStorageMetadata,
    records.TensorProperties,
    records.MetadataIndex,
    records.StorageMeta,
    records._MEM_FORMAT_ENCODING,
    _StorageInfo,
)
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(record.__module__, record.__name__): record for record in _RECORDS},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,  # as Python 3.13 writes it
}


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
        sync(part)
    return chosen.left_out


class _Records(pickle.Unpickler):
    """Makes DCP's records and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get((module, name))
        if found is None and module == "torch":
            found = getattr(torch, name, None)
            found = found if isinstance(found, torch.dtype) else None
        if found is None:
            raise SnapshotError(f"it needs {module}.{name}, which is none of DCP's own records and is not made")
        return found

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it has a persistent id")


def read_metadata(folder: Path) -> records.Metadata:
    """Returns the directory's records, of the right types. SnapshotError for what is not allowed, SnapshotDamaged."""
    path = folder / METADATA
    size = path.stat().st_size
    if size > _MAX_METADATA_BYTES:
        raise SnapshotDamaged(f"'{path}' has {size} bytes")
    try:
        found = _Records(io.BytesIO(path.read_bytes())).load()
    except SnapshotError as error:
        raise SnapshotError(f"'{path}': {error}") from error
    except Exception as error:  # a broken pickle raises anything at all
        raise SnapshotDamaged(f"'{path}' is not as DCP writes it: {type(error).__name__}: {error}") from error
    fields = (getattr(found, "state_dict_metadata", None), getattr(found, "storage_data", None))
    if not isinstance(found, records.Metadata) or not all(isinstance(field, dict) for field in fields):
        raise SnapshotDamaged(f"'{path}' holds no DCP metadata")
    return found


def import_dcp(folder: Path, skip: Sequence[str] = ()) -> Imported:
    """Reads a DCP directory into full tensors and values, nested as they were saved (where DCP noted it).

    SnapshotDamaged naming file, tensor and reason; SnapshotError for a value that weights_only=True refuses, which
    can be left out by its name (a pattern in `skip`).
    """
    metadata = read_metadata(folder)
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    names = {str(name): _name_of(name, paths) for name in metadata.state_dict_metadata}
    unwanted = skipped(("/".join(map(str, path)) for path in names.values()), skip)
    leaves: dict[tuple[Any, ...], Any] = {}
    left: list[str] = []
    with _Files(folder) as files:
        for name, entry in metadata.state_dict_metadata.items():
            path = names[name]
            if "/".join(map(str, path)) in unwanted:
                left.append(f"{'/'.join(map(str, path))}: left out by --skip")
            elif isinstance(entry, records.TensorStorageMetadata):
                leaves[path] = _tensor(name, entry, metadata.storage_data, files)
            else:
                data = files.read(name, metadata.storage_data.get(records.MetadataIndex(name)))
                leaves[path] = load_plain(io.BytesIO(data), f"'{folder}': value {name!r} (--skip leaves it out)")
    tree = nest_paths(leaves)
    return Imported(tree, left, _step_of(tree))


def _name_of(name: Any, paths: dict[Any, Any]) -> tuple[Any, ...]:
    path = paths.get(name)
    good = isinstance(path, tuple) and path and all(type(key) in (str, int) for key in path)
    return path if good else (str(name),)  # type: ignore[return-value]


def _tensor(name: str, entry: records.TensorStorageMetadata, storage: dict[Any, Any], files: _Files) -> torch.Tensor:
    """Puts one tensor together from its chunks, which must fill it exactly once."""
    where = f"'{files.folder}': tensor {name!r}"
    dtype, shape = getattr(entry.properties, "dtype", None), tuple(entry.size)
    boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
    dims = [len(part) for box in boxes for part in (box.offset, box.shape)]
    if not isinstance(dtype, torch.dtype) or any(n != len(shape) for n in dims) or min(shape, default=0) < 0:
        raise SnapshotDamaged(f"{where} has dtype {dtype}, shape {shape} and {len(boxes)} chunks of other dims")
    reason = cover_error(shape, boxes)
    if reason is not None:
        raise SnapshotDamaged(f"{where} is not covered exactly once: {reason}")
    infos = [storage.get(records.MetadataIndex(name, box.offset)) for box in boxes]
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


class _Files:
    """The data files of a directory, each opened once. Their names and ranges come from outside and are checked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, BinaryIO] = {}

    def size(self, name: str, info: Any) -> int:
        """Returns the bytes of a range after checking that the file has them."""
        if not isinstance(info, _StorageInfo):
            raise SnapshotDamaged(f"'{self.folder}': {METADATA} does not say where {name!r} lies")
        if getattr(info, "transform_descriptors", None):
            raise SnapshotError(
                f"'{self.folder}': {name!r} went through {info.transform_descriptors}, a DCP extension; not supported"
            )
        where = f"'{self.folder / str(info.relative_path)}': {name!r}"
        if type(info.relative_path) is not str or Path(info.relative_path).name != info.relative_path:
            raise SnapshotDamaged(f"{where}: not the name of a file in this directory")
        file_bytes = os.fstat(self._file(info.relative_path).fileno()).st_size
        if any(type(n) is not int or n < 0 for n in (info.offset, info.length)):
            raise SnapshotDamaged(f"{where}: offset {info.offset!r}, length {info.length!r}")
        if info.offset + info.length > file_bytes:
            raise SnapshotDamaged(f"{where}: ends at byte {info.offset + info.length} of {file_bytes}")
        return info.length

    def read(self, name: str, info: Any) -> bytes:
        """Returns the bytes of a range."""
        length = self.size(name, info)
        file = self._file(info.relative_path)
        file.seek(info.offset)
        return file.read(length)

    def _file(self, name: str) -> BinaryIO:
        if name not in self._open:
            try:
                self._open[name] = open(self.folder / name, "rb")
            except FileNotFoundError:
                raise SnapshotDamaged(f"'{self.folder / name}' is missing") from None
        return self._open[name]

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()
