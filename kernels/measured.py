"""Rows of the tile tables that were timed on a card: tuned/sm_90.json and the like, laid over the derived rows.

Not a tuner (tune.py writes the files) and no launch. The one idea: a row in Python is derived, never timed, and the
comment above its table says from what; a timed row lies in a file and says itself on which card, when and at which
commit. Files are read once, at import; a launcher asks a dict. Every rank of a job has the same files, so the same
tiles and the same bits; a row depends on its key alone.
"""

import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

FOLDER = Path(__file__).resolve().parent / "tuned"
_FORMAT = 1
# (kernel, arch, shape class ...): what a launcher knows of a launch; the class holds the dtype where rows differ.
Key = tuple[str | int, ...]
Tile = TypeVar("Tile")


class Origin(NamedTuple):
    """Who timed a row, and what it won over: microseconds of one call, and the tile that was in use before."""

    card: str
    driver: str
    torch: str
    triton: str
    date: str
    commit: str
    time_us: float
    before_us: float
    before: dict[str, int]


class Row(NamedTuple):
    """One timed row: the table of the launcher that asks, the key, the fields of the tile, the origin."""

    table: str
    key: Key
    tile: dict[str, int]
    origin: Origin


class Measured(dict[Key, Tile]):
    """The timed tiles of one table by (kernel, arch, shape class ...); empty where no file has any."""

    def __init__(self, name: str, tile_type: type[Tile], rows: Iterable[Row]):
        """ValueError where a row of the table has other fields than `tile_type`."""
        self.name = name
        for row in rows:
            if row.table == name:
                self[row.key] = as_tile(tile_type, row)

    @contextlib.contextmanager
    def trial(self, key: Key, tile: Tile) -> Iterator[None]:
        """Within it, `tile` is the row of `key`: for the tuner, which runs what a launcher would."""
        before = self.get(key)
        self[key] = tile
        try:
            yield
        finally:
            if before is None:
                del self[key]
            else:
                self[key] = before


def as_tile(tile_type: type[Tile], row: Row) -> Tile:
    """The row's tile; ValueError where its fields are not those of `tile_type`, which may have defaults."""
    try:
        return tile_type(**row.tile)
    except TypeError as error:
        raise ValueError(f"table {row.table!r}, row {row.key}: {error}; tune it again") from error


def measured(name: str, tile_type: type[Tile]) -> Measured[Tile]:
    """The timed rows of table `name` that this package ships."""
    return Measured(name, tile_type, shipped())


@functools.cache
def shipped() -> tuple[Row, ...]:
    """Every row of the package's files."""
    return tuple(row for path in sorted(FOLDER.glob("sm_*.json")) for row in read(path))


def path_of(arch: int) -> Path:
    """The package's file of architecture 80, 90 or 100."""
    return FOLDER / f"sm_{arch}.json"


def read(path: Path) -> list[Row]:
    """The rows of a file, none if there is none; ValueError naming the file where it is no table."""
    if not path.exists():
        return []
    try:
        document = json.loads(path.read_text())
        if document["format"] != _FORMAT:
            raise ValueError(f"format {document['format']}; this version reads {_FORMAT}")
        return [
            Row(row["table"], tuple(row["key"]), row["tile"], Origin(**row["origin"])) for row in document["rows"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: {type(error).__name__}: {error}; expected what `plait kernels tune` writes"
        ) from None


def write(path: Path, rows: Iterable[Row]) -> None:
    """Replaces `path`: after a crash it has the old rows or the new ones. Rows are in the order of their keys."""
    ordered = sorted(rows, key=lambda row: (row.table, [str(part) for part in row.key]))
    plain: list[dict[str, Any]] = [
        {"table": row.table, "key": row.key, "tile": row.tile, "origin": row.origin._asdict()} for row in ordered
    ]
    body = ",\n".join("    " + json.dumps(row) for row in plain)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f'{{\n  "format": {_FORMAT},\n  "rows": [\n{body}\n  ]\n}}\n')
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def merged(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """`old` with `new` over it, by table and key."""
    return list({(row.table, row.key): row for row in [*old, *new]}.values())
