"""The table [tool.plait.bench] of pyproject.toml: which suites, for how long, beside whom. Parses, decides nothing.

    [tool.plait.bench]
    suites = ["kernels", "launch"]  # of a bare `plait bench run`
    budget = 120                    # seconds a suite
    floor = 0.5                     # microseconds: a change below is none
    providers = ["torch", "liger"]  # beside ours, in the suites that have them
    cache = "cold-rotate"           # the L2 policy, in the suites that have a choice

The nearest pyproject.toml at or above the working directory counts; the command line goes before it.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.bench.timer import POLICIES


@dataclass(frozen=True)
class Settings:
    """The table's values; None where it has none. budget in seconds, floor in microseconds."""

    suites: tuple[str, ...] | None = None
    budget: float | None = None
    floor: float | None = None
    providers: tuple[str, ...] | None = None
    cache: str | None = None


KEYS = tuple(Settings.__dataclass_fields__)


def find(folder: Path) -> Path | None:
    """The nearest pyproject.toml at or above the folder."""
    return next(
        (at / "pyproject.toml" for at in (folder, *folder.parents) if (at / "pyproject.toml").is_file()), None
    )


def load(path: Path | None, suites: Iterable[str], providers: Iterable[str]) -> Settings:
    """The file's table, checked; no file or no table: no settings. ValueError names file, key and what is valid."""
    if path is None:
        return Settings()
    try:
        table: Any = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is no TOML: {error}") from error
    for name in ("tool", "plait", "bench"):
        table = table.get(name, {}) if isinstance(table, dict) else None
    where = f"{path}: [tool.plait.bench]"
    if not isinstance(table, dict):
        raise ValueError(f"{where}: is no table")
    if unknown := sorted(set(table) - set(KEYS)):
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; valid: {', '.join(KEYS)}")
    return Settings(
        names(where, table, "suites", set(suites)),
        number(where, table, "budget"),
        number(where, table, "floor"),
        names(where, table, "providers", set(providers)),
        one_of(where, table, "cache", POLICIES),
    )


def names(where: str, table: dict[str, Any], key: str, valid: set[str]) -> tuple[str, ...] | None:
    """A list of names, each one of the valid."""
    if key not in table:
        return None
    value = table[key]
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{where}: {key} is {value!r}; need a list of names")
    if unknown := [one for one in value if one not in valid]:
        raise ValueError(f"{where}: {key}: {unknown[0]!r} is unknown; valid: {', '.join(sorted(valid))}")
    return tuple(value)


def one_of(where: str, table: dict[str, Any], key: str, valid: tuple[str, ...]) -> str | None:
    """One of these words."""
    if key in table and table[key] not in valid:
        raise ValueError(f"{where}: {key} is {table[key]!r}; valid: {', '.join(valid)}")
    return table.get(key)


def number(where: str, table: dict[str, Any], key: str) -> float | None:
    """A number of at least 0."""
    if key not in table:
        return None
    value = table[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{where}: {key} is {value!r}; need a number, 0 or more")
    return float(value)
