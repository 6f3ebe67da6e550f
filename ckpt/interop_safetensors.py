"""Weights out to and in from safetensors: one file, or a Hugging Face folder of shards with its index.

Needs no other library. The one idea: sizes are known before any data is, so the header is written first and tensors
stream behind it; on the way in, the header is checked against the file before any memory is taken.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from plait.ckpt.compare import read_box, slices
from plait.ckpt.errors import SnapshotDamaged, SnapshotError
from plait.ckpt.interop_tree import Chosen, Imported, appearing, need_file, nest_paths, skipped, sync
from plait.ckpt.layout import DTYPES, can_exist, dtype_names, stored_bytes, torch_dtype
from plait.ckpt.reader import SnapshotReader
from plait.ckpt.values import no_constant, unique_keys

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 << 30  # as `save_pretrained` cuts
_MAX_HEADER_BYTES = 100_000_000  # as the safetensors library has it
_ALIASES, _DTYPES = "plait_aliases", "plait_dtypes"  # notes of ours in __metadata__: exact where the format is not


def write_file(path: Path, reader: SnapshotReader, tensors: Mapping[str, str], aliases: Mapping[str, str]) -> None:
    """Writes full tensors, verified as they are read, into one safetensors file, which appears whole and durable.

    tensors: name in the file -> name in the snapshot. aliases: noted, and written as copies. A dtype that
    safetensors lacks is written as U8 with the bytes of an element as last dim, and noted.
    """
    entries = {name: reader.table.entry(inner) for name, inner in tensors.items()}
    order = sorted(entries, key=lambda n: (-torch.empty((), dtype=entries[n].dtype).element_size(), n))
    header: dict[str, Any] = {}
    notes: dict[str, str] = {}
    at = 0
    for name in order:
        entry = entries[name]
        dtype, logical = dtype_names(entry.dtype)
        shape = list(entry.full_shape)
        if logical is not None:
            notes[name], shape = logical, [*shape, stored_bytes((), entry.dtype)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + entry.num_bytes]}
        at += entry.num_bytes
    metadata = {"format": "pt"}  # what Hugging Face's loaders ask for
    ours = {name: same for name, same in aliases.items() if name in tensors and same in tensors}
    metadata |= {_ALIASES: json.dumps(ours)} if ours else {}
    metadata |= {_DTYPES: json.dumps(notes)} if notes else {}
    text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise SnapshotError(f"'{path}': a header of {len(text)} bytes is more than safetensors allows")
    with appearing(path, lambda part: part.unlink(missing_ok=True)) as part:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                for box in slices(entries[name]):
                    file.write(_memory(read_box(reader, entries[name], box)))
            file.flush()
            os.fsync(file.fileno())


def export_file(chosen: Chosen, path: Path) -> list[str]:
    """Writes the tensors of a part of a snapshot into one file; returns the names of what was left out."""
    _need_tensors(chosen)
    write_file(path, chosen.reader, chosen.tensors, chosen.aliases)
    return [*chosen.left_out, *(f"{name}: is no tensor" for name in chosen.values)]


def export_folder(chosen: Chosen, path: Path, shard_bytes: int = SHARD_BYTES) -> list[str]:
    """Writes a Hugging Face folder: model.safetensors, or shards of at most `shard_bytes` (or one tensor) and an
    index. The folder appears whole; it must not be there."""
    _need_tensors(chosen)
    table, room = chosen.reader.table, 0
    shards: list[dict[str, str]] = []
    for name, inner in chosen.tensors.items():
        num_bytes = table.entry(inner).num_bytes
        if not shards or num_bytes > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name], room = inner, room - num_bytes
    count = len(shards)
    with appearing(path, lambda part: shutil.rmtree(part, ignore_errors=True)) as part:
        part.mkdir(mode=0o700)
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            name = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            write_file(part / name, chosen.reader, shard, chosen.aliases)
            weight_map |= dict.fromkeys(shard, name)
        if count > 1:
            metadata = {"total_size": chosen.num_bytes, _ALIASES: chosen.aliases}
            (part / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2) + "\n")
            sync(part / INDEX)
        sync(part)
    return [*chosen.left_out, *(f"{name}: is no tensor" for name in chosen.values)]


def _need_tensors(chosen: Chosen) -> None:
    if not chosen.tensors:
        raise SnapshotError(f"'{chosen.reader.place}': what was chosen has no tensor")


def import_safetensors(path: Path, skip: Sequence[str] = ()) -> Imported:
    """Reads a safetensors file or a Hugging Face folder. Names are paths: "a/b" is b in a.

    SnapshotDamaged naming file, tensor and reason; nothing is allocated before the header fits the file.
    """
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for file, wanted in _files(path).items():
        found, notes = read_file(file, lambda name, wanted=wanted: _wants(name, wanted, skip))  # type: ignore[misc]
        lost = sorted((wanted or set()) - found.keys() - skipped(wanted or (), skip))
        if lost:
            raise SnapshotDamaged(f"'{file}' has no tensor {lost[0]!r}, which '{INDEX}' says it has")
        twice = sorted(found.keys() & tensors.keys())
        if twice:
            raise SnapshotDamaged(f"'{file}': tensor {twice[0]!r} is in another shard too")
        tensors |= found
        aliases |= notes
    if path.is_dir() and (path / INDEX).is_file():
        aliases |= _texts(_index(path)["metadata"].get(_ALIASES, {}), path / INDEX)
    for name, same in aliases.items():
        if name in tensors and same in tensors and _same_bits(tensors[name], tensors[same]):
            tensors[name] = tensors[same]
    left = [] if not skip else [f"left out by --skip: {', '.join(skip)}"]
    return Imported(nest_paths({tuple(name.split("/")): tensor for name, tensor in tensors.items()}), left)


def _wants(name: str, wanted: set[str] | None, skip: Sequence[str]) -> bool:
    return (wanted is None or name in wanted) and not skipped([name], skip)


def _files(path: Path) -> dict[Path, set[str] | None]:
    """Returns the files to read, and which tensors of each (None: all)."""
    if not path.is_dir():
        return {path: None}
    if (path / INDEX).is_file():
        found: dict[Path, set[str] | None] = {}
        for name, file in _texts(_index(path)["weight_map"], path / INDEX).items():
            if Path(file).name != file:
                raise SnapshotDamaged(f"'{path / INDEX}': tensor {name!r} is said to be in {file!r}, not a file name")
            names = found.setdefault(path / file, set())
            assert names is not None
            names.add(name)
        return found
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise SnapshotError(f"'{path}' has neither {INDEX} nor a .safetensors file")
    return dict.fromkeys(files)


def _index(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads((path / INDEX).read_bytes(), object_pairs_hook=unique_keys, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise SnapshotDamaged(f"'{path / INDEX}' is not JSON: {error}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("weight_map"), dict):
        raise SnapshotDamaged(f"'{path / INDEX}' has no weight_map")
    return {"weight_map": raw["weight_map"], "metadata": raw.get("metadata") or {}}


def _texts(value: Any, where: Path) -> dict[str, str]:
    if not isinstance(value, dict) or any(type(text) is not str for text in value.values()):
        raise SnapshotDamaged(f"'{where}': names and texts were expected, not {str(value)[:60]}")
    return value


def read_file(path: Path, wants: Callable[[str], bool]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns the tensors of one file whose names are wanted, and which of its names were one tensor."""
    with open(need_file(path), "rb") as file:
        data_start, header, metadata = _header(file, path)
        logical = _note(metadata, _DTYPES, path)
        tensors = {}
        for name, (dtype, shape, start, num_bytes) in header.items():
            if not wants(name):
                continue
            stored = torch.empty(shape, dtype=dtype)
            file.seek(data_start + start)
            if num_bytes and file.readinto(_memory(stored)) != num_bytes:
                raise SnapshotDamaged(f"'{path}': ends inside tensor {name!r}")
            tensors[name] = _logical(stored, logical[name], path, name) if name in logical else stored
    return tensors, _note(metadata, _ALIASES, path)


def _header(file: BinaryIO, path: Path) -> tuple[int, dict[str, tuple[torch.dtype, list[int], int, int]], Any]:
    """Returns where data begins, {name: (dtype, shape, offset, bytes)} and the metadata, checked against the file."""
    file_bytes = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(_MAX_HEADER_BYTES, file_bytes - 8):
        raise SnapshotDamaged(f"'{path}' is no safetensors file: a header of {length} bytes in {file_bytes}")
    try:
        raw = json.loads(file.read(length), object_pairs_hook=unique_keys, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise SnapshotDamaged(f"'{path}': its header is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise SnapshotDamaged(f"'{path}': its header is not an object")
    metadata = raw.pop("__metadata__", {})
    found = {name: _entry(name, entry, path) for name, entry in raw.items()}
    end = 0
    for name, (_, _, start, num_bytes) in sorted(found.items(), key=lambda item: item[1][2:]):
        if start != end:
            raise SnapshotDamaged(f"'{path}': tensor {name!r} begins at byte {start} of the data, not at {end}")
        end = start + num_bytes
    if 8 + length + end != file_bytes:
        raise SnapshotDamaged(f"'{path}' has {file_bytes} bytes, its header says {8 + length + end}")
    return 8 + length, found, metadata


def _entry(name: str, entry: Any, path: Path) -> tuple[torch.dtype, list[int], int, int]:
    try:
        shape, (start, stop) = entry["shape"], entry["data_offsets"]
        numbers = [*shape, start, stop]
        if set(entry) != {"dtype", "shape", "data_offsets"} or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError("a wrong field")
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"dtype {entry['dtype']!r}")
        dtype = DTYPES[entry["dtype"]]
        if not can_exist(shape):
            raise ValueError(f"no tensor can have the shape {shape}"[:200])
        if len(shape) > 64 or stop - start != prod(shape) * stored_bytes((), dtype):
            raise ValueError(f"{stop - start} bytes for {entry['dtype']} of {shape}")
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise SnapshotDamaged(f"'{path}': tensor {name!r}: {error}") from error
    return dtype, shape, start, stop - start


def _note(metadata: Any, name: str, path: Path) -> dict[str, str]:
    try:
        return _texts(json.loads(metadata.get(name, "{}")), path)
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise SnapshotDamaged(f"'{path}': __metadata__ {name}: {error}") from error


def _logical(stored: torch.Tensor, dtype: str, path: Path, name: str) -> torch.Tensor:
    """Returns a tensor whose dtype safetensors lacks, from its bytes."""
    try:
        wide = torch_dtype("", dtype)
        if stored.dtype != torch.uint8 or stored.shape[-1:] != (stored_bytes((), wide),):
            raise ValueError(f"{stored.dtype} of {tuple(stored.shape)} are not the bytes of {dtype}")
    except ValueError as error:
        raise SnapshotDamaged(f"'{path}': tensor {name!r}: {error}") from error
    return stored.view(wide).reshape(stored.shape[:-1])


def _memory(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor, no copy; keeps the tensor alive (numpy may not be installed)."""
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        return memoryview(b"")
    assert tensor.is_contiguous()
    held = (ctypes.c_char * num_bytes).from_address(tensor.data_ptr())
    held.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(held).cast("B")


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = a.dtype == b.dtype and a.shape == b.shape
    return same and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
