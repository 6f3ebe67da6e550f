"""Reads result files, schema version 1, into the values of spec.py, and unites those of several processes.

Fields that later versions of the tool added (error, invalid, processes, cache, throttled, clocks_mhz, watts) may be
missing; whatever else is
missing or of the wrong kind is one error that names the file and the place. Writing is report.py's.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from plait.bench.spec import SCHEMA, Case, CaseResult, Measured


class ResultFileError(ValueError):
    """A file is no result of this tool, or a damaged one."""


@dataclass(frozen=True)
class ResultFile:
    """What one run wrote: machine and source are the plain data of device.py; cases by name; date in ISO 8601."""

    path: str
    suite: str
    machine: dict[str, Any]
    source: dict[str, Any]
    cases: dict[str, CaseResult]
    date: str = ""
    command: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def title(self) -> str:
        """Returns path and commit, for people."""
        commit = str(self.source.get("commit", "unknown"))[:8]
        return f"{self.path} ({commit}{', dirty' if self.source.get('dirty') else ''})"


def read(path: Path) -> ResultFile:
    """Returns the result file's content; raises ResultFileError, also for a file that cannot be opened."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ResultFileError(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ResultFileError(f"{path}: is no JSON: {error}") from error
    try:
        if not isinstance(data, dict):
            raise ValueError(f"is a {type(data).__name__}, not an object")
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema is {data.get('schema')!r}; this tool reads {SCHEMA}")
        results = [case_of(f"cases[{i}]", raw) for i, raw in enumerate(get(data, "", "cases", list))]
        names = [result.case.name for result in results]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"cases: {twice[0]!r} is there twice")
        return ResultFile(
            str(path),
            get(data, "", "suite", str),
            get(data, "", "machine", dict),
            get(data, "", "source", dict),
            dict(zip(names, results, strict=True)),
            get(data, "", "date", str, ""),
            get(data, "", "command", str, ""),
            get(data, "", "options", dict, {}),
        )
    except ValueError as error:
        raise ResultFileError(f"{path}: {error}") from error


def get(data: Any, place: str, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """Returns data[name] of this kind; the default, where there is one, for a missing entry. ValueError otherwise."""
    where = f"{place}.{name}" if place else name
    if not isinstance(data, dict):
        raise ValueError(f"{place}: is a {type(data).__name__}, not an object")
    if name not in data:
        if default is not None:
            return default
        raise ValueError(f"{where}: is missing")
    value = data[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{where}: is {str(value)[:40]!r}, of the wrong kind")
    return value


def case_of(place: str, raw: Any) -> CaseResult:
    """Returns one entry of `cases`."""
    inner, optional = get(raw, place, "case", dict), (int, float, type(None))
    case = Case(
        get(inner, f"{place}.case", "name", str),
        get(inner, f"{place}.case", "params", dict),
        *(get(inner, f"{place}.case", name, optional) for name in ("flop", "bytes_moved")),
    )
    providers = {
        name: measured_of(f"{place}.providers.{name}", value)
        for name, value in get(raw, place, "providers", dict).items()
    }
    texts = {name: get(raw, place, name, str, "") for name in ("note", "error", "cache")}
    ours = get(raw, place, "ours", str)
    if not texts["error"] and ours not in providers:
        raise ValueError(f"{place}.ours: {ours!r} is not among its providers")
    return CaseResult(case, ours, providers, **texts)


def measured_of(place: str, raw: Any) -> Measured:
    """Returns one provider of a case."""
    samples, processes = get(raw, place, "samples_s", list), get(raw, place, "processes", list, [])
    for index, value in enumerate(samples):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and value > 0):
            raise ValueError(f"{place}.samples_s[{index}]: is {str(value)[:40]}; need seconds > 0")
    if processes and len(processes) != len(samples):
        raise ValueError(f"{place}.processes: {len(processes)} entries for {len(samples)} samples")
    if not all(isinstance(value, int) and value >= 0 for value in processes):
        raise ValueError(f"{place}.processes: need numbers of processes, 0 and up")
    throttled = get(raw, place, "throttled", list, [])
    if not all(isinstance(value, int) and 0 <= value < len(samples) for value in throttled):
        raise ValueError(f"{place}.throttled: need indices of samples, 0 to {len(samples) - 1}")
    skipped = get(raw, place, "skipped", str, "")
    if not samples and not skipped:
        raise ValueError(f"{place}.samples_s: is empty, and no reason under skipped")
    return Measured(
        [float(value) for value in samples],
        get(raw, place, "check", str, ""),
        get(raw, place, "figures", dict, {}),
        skipped,
        get(raw, place, "invalid", str, ""),
        processes,
        throttled,
        *(beside(raw, place, name, len(samples)) for name in ("clocks_mhz", "watts")),
    )


def beside(raw: Any, place: str, name: str, count: int) -> list[float]:
    """Returns the numbers beside `count` samples, or none."""
    values: list[float] = get(raw, place, name, list, [])
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    if not numbers or len(values) not in (0, count):
        raise ValueError(f"{place}.{name}: need a number for each of {count} samples, or none")
    return values


def united(runs: list[list[CaseResult]]) -> list[CaseResult]:
    """Returns the cases of several fresh processes as one result; runs[i] are process i's, in the same order.

    A case or provider that failed in one process has no numbers at all: what it did in the others is not the whole.
    Figures are medians over processes.
    """
    cases = []
    for results in zip(*runs, strict=True):
        first = results[0]
        error = next((f"process {i}: {r.error}" for i, r in enumerate(results) if r.error), "")
        providers = {}
        for name in () if error else first.providers:
            parts = [result.providers[name] for result in results]
            skipped = next((part.skipped for part in parts if part.skipped), "")
            providers[name] = Measured(
                [] if skipped else [seconds for part in parts for seconds in part.samples_s],
                first.providers[name].check,
                {key: median(part.figures[key] for part in parts) for key in parts[0].figures} if not skipped else {},
                skipped,
                next((part.invalid for part in parts if part.invalid), ""),
                [] if skipped else [i for i, part in enumerate(parts) for _ in part.samples_s],
                *([[], [], []] if skipped else conditions(parts)),
            )
        ours = first.ours or next((result.ours for result in results if result.ours), "")
        cases.append(CaseResult(first.case, ours, providers, first.note, error, first.cache))
    return cases


def conditions(parts: list[Measured]) -> list[list[Any]]:
    """Returns throttled, clocks_mhz and watts of all processes; the last two only where every process has them."""
    throttled, offset = [], 0
    for part in parts:
        throttled += [offset + index for index in part.throttled]
        offset += len(part.samples_s)
    clocks, watts = [part.clocks_mhz for part in parts], [part.watts for part in parts]
    return [throttled, *([x for one in each for x in one] if all(each) else [] for each in (clocks, watts))]
