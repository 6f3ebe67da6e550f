"""The JSON files of a snapshot as dataclasses: fragment, objects, manifest, run; strict both ways.

Not the files' meaning across each other (commit.py and reader.py check that). The one idea: each file is one line of
JSON and one with its SHA-256; a reader accepts exactly the fields and types declared here. Grammar: docs/format.md.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from plait.ckpt.crypt import SIGNATURE, Key
from plait.ckpt.errors import SnapshotDamaged
from plait.ckpt.slices import in_slices
from plait.ckpt.values import is_float_text, no_constant, unique_keys

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MANIFEST = "MANIFEST.json"
OBJECTS = "objects.json"
RUN = "RUN.json"
MAX_JSON_BYTES = 1 << 30  # a fragment has about 400 bytes a piece: room for two million pieces
MAX_DIMS = 64
CODECS = (None, "zstd", "aes-256-gcm", "zstd+aes-256-gcm")  # of a piece: how a coded copy stores its blocks
FILE_NAME = re.compile(r"r(\d{5,})(?:\.s\d{9,})?(?:\.p(\d{5,}))?\.safetensors")  # a data file, a base, a part

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
    "floats": _is_dict_of(is_float_text),
    "sizes": _is_dict_of(_is_size),
    "values": lambda value: type(value) is dict,
}


def _is(kind: str, **more: Any) -> Any:
    return field(metadata={"kind": kind}, **more)


def _has(part: type, kind: str = "list") -> Any:
    return field(metadata={"kind": kind, "part": part})


def _may_have(part: type) -> Any:
    """A list that is left out of the file when it is empty."""
    return field(default=(), metadata={"kind": "list", "part": part, "optional": True})


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
class FileEntry:
    """One file as the manifest knows it."""

    name: str = _is("text")
    bytes: int = _is("size")
    sha256: str = _is("text")


@dataclass(frozen=True)
class Fragment:
    """What one rank wrote. bases: data files of older snapshots that hold pieces too; parts: of a coded copy."""

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
    bases: tuple[DataFile, ...] = _may_have(DataFile)
    parts: tuple[FileEntry, ...] = _may_have(FileEntry)

    def data_file(self, source_step: int | None) -> DataFile | None:
        """Returns the file that holds the pieces of a source_step: this rank's own one (None) or a base."""
        return self.data_files.get(source_step)

    @cached_property
    def data_files(self) -> dict[int | None, DataFile]:
        """All data files that hold pieces, by source_step."""
        own: dict[int | None, DataFile] = {} if self.file is None else {None: self.file}
        return own | {int(base.name.split(".")[1][1:]): base for base in self.bases if FILE_NAME.fullmatch(base.name)}


@dataclass(frozen=True)
class Objects:
    """All values that are not tensors and are equal on all ranks."""

    format: str = _is("text")
    values: dict[str, Any] = _is("values")


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
    metrics: dict[str, str] = field(default_factory=dict, metadata={"kind": "floats", "optional": True})


@dataclass(frozen=True)
class Run:
    """RUN.json: which run a folder belongs to."""

    format: str = _is("text")
    run: str = _is("text")


FORMATS = {Fragment: "plait-fragment-1", Objects: "plait-objects-1", Manifest: "plait-snapshot-1", Run: "plait-run-1"}


def to_bytes(record: Fragment | Objects | Manifest | Run, key: Key | None = None) -> bytes:
    """Returns the file's bytes: a line of JSON, a line with its digest; with a key, a line with its signature."""
    declared = record.__dataclass_fields__
    fields = {n: v for n in declared if (v := getattr(record, n)) or "optional" not in declared[n].metadata}
    line = f"{{{','.join(f'{_to_json(name)}:{_in_parts(value)}' for name, value in fields.items())}}}".encode()
    return line + b"\n" + _digest_line(line) + (b"" if key is None else key.sign(line).encode() + b"\n")


_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=vars).encode


def _in_parts(value: Any) -> str:
    """Returns the JSON of a field; a record's parts one by one, which may be many."""
    return f"[{','.join(map(_to_json, in_slices(value)))}]" if type(value) is tuple else _to_json(value)


def from_bytes(kind: type[T], data: bytes, where: str, key: Key | None = None) -> T:
    """Reads a file's bytes; raises SnapshotDamaged naming `where` and what is wrong.

    A manifest may be signed; with a key it must be, by this key. Without one its signature is not looked at.
    """
    line, newline, tail = data.partition(b"\n")
    wanted_tail = _digest_line(line)
    signature = b""
    if kind is Manifest and tail.startswith(wanted_tail):
        tail, signature = wanted_tail, tail[len(wanted_tail) :]
    if not newline or tail != wanted_tail or (signature and not SIGNATURE.fullmatch(signature)):
        raise SnapshotDamaged(f"{where}: the digest in its last line does not match (truncated or changed)")
    if key is not None:
        if not signature:
            raise SnapshotDamaged(f"{where}: is not signed, and a key was given")
        key.check(line, signature.decode().rstrip("\n"), where)
    try:
        raw = json.loads(line, object_pairs_hook=unique_keys, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise SnapshotDamaged(f"{where}: is not JSON as written ({error})") from error
    record = _record(kind, raw, where)
    wanted = FORMATS.get(kind)
    if wanted is not None and record.format != wanted:  # type: ignore[attr-defined]
        raise SnapshotDamaged(f"{where}: format {raw['format']!r}; this plait reads {wanted!r}")
    return record


def _digest_line(line: bytes) -> bytes:
    return b"sha256:" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def sha256(data: bytes) -> str:
    """Returns the hex digest of a JSON file's bytes."""
    return hashlib.sha256(data).hexdigest()


def fragment_name(rank: int) -> str:
    """Returns the name of a rank's fragment."""
    return f"r{rank:05d}.json"


def data_name(rank: int) -> str:
    """Returns the name of a rank's data file."""
    return f"r{rank:05d}.safetensors"


def base_name(rank: int, step: int) -> str:
    """Returns the name of the data file that a rank wrote for an older step, in a snapshot that still needs it."""
    return f"r{rank:05d}.s{step:09d}.safetensors"


def part_name(rank: int, step: int | None, number: int) -> str:
    """Returns the name of the number-th part of a data file in a coded copy."""
    return (data_name(rank) if step is None else base_name(rank, step)).replace(".safe", f".p{number:05d}.safe")


def _record(kind: type[T], raw: Any, where: str) -> T:
    if type(raw) is not dict:
        raise SnapshotDamaged(f"{where}: {kind.__name__} is not an object")
    if kind is Piece and raw.keys() == _PIECE.keys() and all(check(raw[n]) for n, check in _PIECE.items()):
        return kind(*[tuple(v) if type(v) is list else v for v in map(raw.__getitem__, _PIECE)])  # most of a file
    declared = kind.__dataclass_fields__
    odd = [n for n in sorted(raw.keys() ^ declared.keys()) if n in raw or "optional" not in declared[n].metadata]
    if odd:
        raise SnapshotDamaged(f"{where}: {kind.__name__} has unknown or missing fields {odd}")
    return kind(**{name: _field(kind, name, raw[name], where) for name in declared if name in raw})


_PIECE = {name: _CHECKS[declared.metadata["kind"]] for name, declared in Piece.__dataclass_fields__.items()}


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
