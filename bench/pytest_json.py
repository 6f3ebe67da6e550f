"""Reads pytest-benchmark's JSON as a result file, so that `plait bench compare` can judge it. Runs nothing.

A file is one process; a folder of them is a run of several, in the order of their names (a verdict needs five). Only
stable facts make the machine: pytest-benchmark also writes a clock reading, which differs from run to run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from plait.bench.result_file import ResultFile, ResultFileError, get, measured_of, read, united
from plait.bench.spec import Case, CaseResult

SUITE, PROVIDER = "pytest-benchmark", "measured"
FACTS = ("machine", "system", "release", "python_implementation", "python_version")


def read_any(path: Path) -> ResultFile:
    """A result file, a file of pytest-benchmark, or a folder of such; raises ResultFileError."""
    if path.is_dir():
        return read_folder(path)
    data = parsed(path)
    return converted(path, data) if data is not None else read(path)


def parsed(path: Path) -> dict[str, Any] | None:
    """The content of a file of pytest-benchmark; None for anything else, which result_file.py reads or refuses."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and {"benchmarks", "machine_info"} <= set(data) else None


def read_folder(path: Path) -> ResultFile:
    """All files of pytest-benchmark in a folder as the processes of one run, with the benchmarks that all have."""
    files = []
    for place in sorted(path.glob("*.json")):
        data = parsed(place)
        if data is None:
            raise ResultFileError(f"{place}: is no JSON of pytest-benchmark")
        files.append(converted(place, data))
    if not files:
        raise ResultFileError(f"{path}: holds no JSON of pytest-benchmark")
    first = files[0]
    for other in files[1:]:
        if other.machine != first.machine or other.source != first.source:
            raise ResultFileError(f"{other.path}: is of another machine, timer or commit than {first.path}")
    names = [name for name in first.cases if all(name in file.cases for file in files)]
    whole = united([[file.cases[name] for name in names] for file in files])
    return ResultFile(
        str(path), SUITE, first.machine, first.source, dict(zip(names, whole, strict=True)), files[-1].date
    )


def converted(path: Path, data: dict[str, Any]) -> ResultFile:
    """One file; ResultFileError where it holds no samples."""
    try:
        cases, timers = {}, set()
        for index, raw in enumerate(get(data, "", "benchmarks", list)):
            place = f"benchmarks[{index}]"
            name, stats = get(raw, place, "fullname", str), get(raw, place, "stats", dict)
            if "data" not in stats:
                raise ValueError(
                    f"{place}.stats.data: is missing; write it with --benchmark-json or --benchmark-save-data"
                )
            samples = measured_of(f"{place}.stats", {"samples_s": stats["data"]})
            timers.add(str(get(raw, place, "options", dict).get("timer")))
            cases[name] = CaseResult(
                Case(name, {}), PROVIDER, {PROVIDER: samples}, "by pytest-benchmark, not interleaved"
            )
        return ResultFile(
            str(path), SUITE, machine_of(get(data, "", "machine_info", dict), timers), source_of(data), cases,
            get(data, "", "datetime", str, ""),
        )  # fmt: skip
    except ValueError as error:
        raise ResultFileError(f"{path}: {error}") from error


def machine_of(info: dict[str, Any], timers: set[str]) -> dict[str, Any]:
    """Stable facts, plait's fingerprint where pytest_device.py wrote one, and which timer it was."""
    cpu = info.get("cpu") or {}
    facts = {name: info.get(name) for name in FACTS}
    facts |= {"cpu": cpu.get("brand_raw"), "cores": cpu.get("count"), "gpus": [], "timer": ", ".join(sorted(timers))}
    return facts | (info.get("plait") or {})


def source_of(data: dict[str, Any]) -> dict[str, Any]:
    """Commit and dirty flag as pytest-benchmark saw them."""
    info = data.get("commit_info") or {}
    return {"commit": str(info.get("id", "unknown")), "dirty": bool(info.get("dirty", True))}
