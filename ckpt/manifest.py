"""The JSON files of a snapshot as dataclasses: fragment, objects, manifest, run; strict both ways.

Not the files' meaning across each other (commit.py and reader.py check that). The one idea: each file is one line of
JSON and one line with its SHA-256, and a reader accepts exactly the fields and types declared here. Grammar:
docs/format.md.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from plait.ckpt.errors import SnapshotDamaged

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MANIFEST = "MANIFEST.json"
OBJECTS = "objects.json"
RUN = "RUN.json"
MAX_JSON_BYTES = 1 << 30  # a fragment has about 400 bytes a piece: room for two million pieces
MAX_DIMS = 64

T = TypeVar("T", bound="DataclassInstance")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_shape(value: Any) -> bool:
    return type(value) is list and len(value) <= MAX_DIMS and all(map(_is_size, value))


def _is_pair(value: Any) -> bool:
    return _is_shape(value) and len(value) == 2


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_dict_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is dict and all(map(check, value.values()))


def _or_null(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


# declared kind -> whether a JSON value has it
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "size": _is_size,
    "size?": _or_null(_is_size),
    "text": _is_text,
    "text?": _or_null(_is_text),
    "shape": _is_shape,
    "pair": _is_pair,
    "pair?": _or_null(_is_pair),
    "crcs": lambda value: type(value) is list and all(type(v) is int and 0 <= v < 1 << 32 for v in value),
    "names": _is_dict_of(_is_text),
    "sizes": _is_dict_of(_is_size),
    "values": lambda value: type(value) is dict,
}


def _is(kind: str, **more: Any) -> Any:
    return field(metadata={"kind": kind}, **more)


def _has(part: type, kind: str = "list") -> Any:
    return field(metadata={"kind": kind, "part": part})


@dataclass(frozen=True)
class Piece:
    """One run of bytes in a data file: a box of a full tensor, or flat elements of that box."""

    name: str = _is("text")
    dtype: str = _is("text")
    logical_dtype: str | None = _is("text?")
    full_shape: tuple[int, ...] = _is("shape")
    offset: tuple[int, ...] = _is("shape")
    shape: tuple[int, ...] = _is("shape")
    flat: tuple[int, int] | None = _is("pair?")
    replica: tuple[int, int] = _is("pair")
    key: str = _is("text")
    file_offset: int = _is("size")
    num_bytes: int = _is("size")
    xxh3_128: str = _is("text")
    codec: str | None = _is("text?", default=None)
    source_step: int | None = _is("size?", default=None)


@dataclass(frozen=True)
class DataFile:
    """A data file: its size, and CRC32C of each block from byte 0."""

    name: str = _is("text")
    bytes: int = _is("size")
    block_bytes: int = _is("size")
    crc32c: tuple[int, ...] = _is("crcs")

    @property
    def digest(self) -> str:
        """SHA-256 of the CRC32C list as little-endian uint32."""
        return hashlib.sha256(struct.pack(f"<{len(self.crc32c)}I", *self.crc32c)).hexdigest()


@dataclass(frozen=True)
class Fragment:
    """What one rank wrote."""

    format: str = _is("text")
    step: int = _is("size")
    attempt: str = _is("text")
    rank: int = _is("size")
    world_size: int = _is("size")
    file: DataFile | None = _has(DataFile, "part?")
    pieces: tuple[Piece, ...] = _has(Piece)
    aliases: dict[str, str] = _is("names")
    objects: dict[str, Any] = _is("values")
    per_rank: dict[str, Any] = _is("values")


@dataclass(frozen=True)
class Objects:
    """All values that are not tensors and are equal on all ranks."""

    format: str = _is("text")
    values: dict[str, Any] = _is("values")


@dataclass(frozen=True)
class FileEntry:
    """One file as the manifest knows it."""

    name: str = _is("text")
    bytes: int = _is("size")
    sha256: str = _is("text")


@dataclass(frozen=True)
class Manifest:
    """The whole snapshot: present and self-consistent, or there is no snapshot."""

    format: str = _is("text")
    step: int = _is("size")
    attempt: str = _is("text")
    run: str = _is("text")
    epoch: int = _is("size")
    world_size: int = _is("size")
    grid: dict[str, int] = _is("sizes")
    commit: str = _is("text")
    files: tuple[FileEntry, ...] = _has(FileEntry)
    aliases: dict[str, str] = _is("names")
    num_tensors: int = _is("size")
    num_bytes: int = _is("size")


@dataclass(frozen=True)
class Run:
    """RUN.json: which run a folder belongs to."""

    format: str = _is("text")
    run: str = _is("text")


FORMATS = {
    Fragment: "plait-fragment-1",
    Objects: "plait-objects-1",
    Manifest: "plait-snapshot-1",
    Run: "plait-run-1",
}


def to_bytes(record: Fragment | Objects | Manifest | Run) -> bytes:
    """Returns the file's bytes: a line of JSON, a line with its digest."""
    line = json.dumps(vars(record), separators=(",", ":"), allow_nan=False, default=vars).encode()
    return line + b"\nsha256:" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def from_bytes(kind: type[T], data: bytes, where: str) -> T:
    """Reads a file's bytes; raises SnapshotDamaged naming `where` and what is wrong."""
    line, newline, tail = data.partition(b"\n")
    if not newline or tail != b"sha256:" + hashlib.sha256(line).hexdigest().encode() + b"\n":
        raise SnapshotDamaged(f"{where}: the digest in its last line does not match (truncated or changed)")
    try:
        raw = json.loads(line, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise SnapshotDamaged(f"{where}: is not JSON as written ({error})") from error
    record = _record(kind, raw, where)
    wanted = FORMATS.get(kind)
    if wanted is not None and record.format != wanted:  # type: ignore[attr-defined]
        raise SnapshotDamaged(f"{where}: format {raw['format']!r}; this plait reads {wanted!r}")
    return record


def sha256(data: bytes) -> str:
    """Returns the hex digest of a JSON file's bytes."""
    return hashlib.sha256(data).hexdigest()


def fragment_name(rank: int) -> str:
    """Returns the name of a rank's fragment."""
    return f"r{rank:05d}.json"


def data_name(rank: int) -> str:
    """Returns the name of a rank's data file."""
    return f"r{rank:05d}.safetensors"


def _record(kind: type[T], raw: Any, where: str) -> T:
    if type(raw) is not dict:
        raise SnapshotDamaged(f"{where}: {kind.__name__} is not an object")
    declared = kind.__dataclass_fields__
    if raw.keys() != declared.keys():
        odd = sorted(raw.keys() ^ declared.keys())
        raise SnapshotDamaged(f"{where}: {kind.__name__} has unknown or missing fields {odd}")
    return kind(**{name: _field(kind, name, raw[name], where) for name in declared})


def _field(owner: type[DataclassInstance], name: str, value: Any, where: str) -> Any:
    declared = owner.__dataclass_fields__[name].metadata
    kind = declared["kind"]
    if kind == "list":
        if type(value) is not list:
            raise SnapshotDamaged(f"{where}: {owner.__name__}.{name} is not a list")
        return tuple([_record(declared["part"], v, where) for v in value])
    if kind == "part?":
        return None if value is None else _record(declared["part"], value, where)
    if not _CHECKS[kind](value):
        text = str(value)[:80]
        raise SnapshotDamaged(f"{where}: {owner.__name__}.{name} has a wrong type or range: {text}")
    return tuple(value) if type(value) is list else value


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a doubled key")
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not allowed")
