"""Turns case results into tables for people (Markdown, CSV) and one JSON file for machines. Measures nothing.

Ratios are peer time / our time over paired rounds, with the 95 % interval of their median: above 1, ours is faster.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
import os
from pathlib import Path
from statistics import median
from typing import Any

from plait.bench.device import fingerprint, source_commit
from plait.bench.spec import SCHEMA, CaseResult, Options, Suite
from plait.bench.stats import MIN_INTERVAL, median_interval, paired_ratio

Row = list[str]


def rows_of(result: CaseResult) -> list[Row]:
    """Returns one row a provider: case, provider, median ms with its interval, rates, ratio to ours, figures."""
    if result.error:
        return [[result.case.name, "-", "-", "-", "-", f"failed: {result.error.splitlines()[0]}"]]
    ours = result.providers[result.ours].samples_s
    rows = []
    for name, measured in result.providers.items():
        if measured.skipped:
            rows.append([result.case.name, name, "-", "-", "-", f"skipped: {measured.skipped}"])
            continue
        mid = median(measured.samples_s)
        low, high = median_interval(measured.samples_s)
        ratio = "1"
        if name != result.ours and ours:
            value, ratio_low, ratio_high = paired_ratio(ours, measured.samples_s)
            ratio = f"{value:.2f} ({ratio_low:.2f}-{ratio_high:.2f})"
        figures = ", ".join(f"{key} {value:.4g}" for key, value in measured.figures.items())
        if measured.invalid:
            rows.append([result.case.name, name, f"{mid * 1e3:.3f}", "INVALID", "-", measured.invalid])
            continue
        rows.append(
            [
                result.case.name,
                name,
                f"{mid * 1e3:.3f} ({low * 1e3:.3f}-{high * 1e3:.3f})",
                rate_of(result, mid),
                ratio,
                figures,
            ]
        )
    return rows


def line_of(result: CaseResult) -> str:
    """Returns the medians of a case in one line, ours first: what a run shows while the others are to come."""
    return ", ".join(
        f"{name} {median(one.samples_s) * 1e6:.1f} us" if one.samples_s and not one.invalid else f"{name} -"
        for name, one in sorted(result.providers.items(), key=lambda item: item[0] != result.ours)
    )


def rate_of(result: CaseResult, seconds: float) -> str:
    """Returns GFLOP/s or GB/s by the case's own formula, '-' where it has none."""
    if result.case.flop:
        return f"{result.case.flop / seconds / 1e9:.2f} GFLOP/s"
    if result.case.bytes_moved:
        return f"{result.case.bytes_moved / seconds / 1e9:.2f} GB/s"
    return "-"


def markdown(results: list[CaseResult]) -> str:
    """Returns the results as one Markdown table, columns padded so that a terminal shows it well too."""
    header = ["case", "provider", "ms, median (95 %)", "rate", "peer / ours", "figures"]
    rows = [row for result in results for row in rows_of(result)]
    notes: dict[str, list[str]] = {}
    for result in results:
        if result.note:
            notes.setdefault(result.note, []).append(result.case.name)
    said = [f"\n{names[0] if len(names) == 1 else f'{len(names)} cases'}: {note}" for note, names in notes.items()]
    counts = [len(one.samples_s) for result in results for one in result.providers.values() if one.samples_s]
    if few := [count for count in counts if count < MIN_INTERVAL]:
        sizes = f"{min(few)}" if min(few) == max(few) else f"{min(few)} to {max(few)}"
        note = f"{len(few)} rows of {sizes} samples: their range stands for the interval, which needs {MIN_INTERVAL}"
        said.append(f"\n{note}")
    return "\n".join([table(header, rows), *said])


def table(header: Row, rows: list[Row]) -> str:
    """Returns a Markdown table; a bar inside a cell is escaped."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


CSV_HEADER = ["suite", "case", "provider", "status", "median_s", "low_s", "high_s", "samples", "processes"]
CSV_HEADER += ["flop_per_s", "bytes_per_s", "peer_over_ours", "reason"]


def csv_rows(suite: str, results: list[CaseResult]) -> list[Row]:
    """Returns one row a provider under CSV_HEADER, numbers in full; empty where there is none."""
    rows = []
    for result in results:
        case = result.case
        if result.error:
            rows.append([suite, case.name, "", "failed", *[""] * 8, result.error])
        for name, measured in result.providers.items():
            if measured.skipped:
                rows.append([suite, case.name, name, "skipped", *[""] * 8, measured.skipped])
                continue
            mid, ours = median(measured.samples_s), result.providers[result.ours].samples_s
            numbers: list[float | None] = [mid, *median_interval(measured.samples_s)]
            numbers += [len(measured.samples_s), len(measured.by_process())]
            numbers += [work / mid if work else None for work in (case.flop, case.bytes_moved)]
            numbers.append(paired_ratio(ours, measured.samples_s)[0] if ours else None)
            cells = ["" if number is None else repr(number) for number in numbers]
            status = "invalid" if measured.invalid else "ok"
            rows.append([suite, case.name, name, status, *cells, measured.invalid])
    return rows


def csv_text(header: Row, rows: list[Row]) -> str:
    """Returns comma-separated lines (RFC 4180, but for line ends of one byte)."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([header, *rows])
    return out.getvalue()


def document(suite: Suite, results: list[CaseResult], options: Options, command: str) -> dict[str, Any]:
    """Returns the result file's content, schema version 1: all samples, the machine, commit, command and date."""
    return {
        "schema": SCHEMA,
        "suite": suite.name,
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "source": source_commit(),
        "machine": fingerprint(),
        "options": vars(options),
        "cases": [result.to_json() for result in results],
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes plain data as JSON, whole or not at all. Raises OSError."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes the file whole or not at all: a new file beside it, synced, then renamed over it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
