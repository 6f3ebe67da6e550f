"""The commands of `plait snapshot` that only look: ls, show, verify, diff.

Each takes the parsed arguments and returns (exit code, report for --json, lines for people).
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from plait.ckpt.cli_progress import progress, size_text
from plait.ckpt.compare import compare, find_snapshot
from plait.ckpt.crypt import Key, load_key
from plait.ckpt.errors import SnapshotDamaged, SnapshotError
from plait.ckpt.folders import StepFolder, leftovers, parse_step, step_folders
from plait.ckpt.keep import pinned_folders
from plait.ckpt.manifest import RUN
from plait.ckpt.owner import read_record
from plait.ckpt.reader import SnapshotReader
from plait.ckpt.tables import TensorEntry
from plait.ckpt.tier_reader import open_folder
from plait.ckpt.values import decode

Answer = tuple[int, Any, list[str]]  # exit code, report, lines
OK, DIFFERENT, USAGE, LOCKED = 0, 1, 2, 3
NO_SESSION = "0" * 16


def list_snapshots(arguments: argparse.Namespace) -> Answer:
    """The snapshots of a run folder, newest first; 1 when one is damaged."""
    need_folder(arguments.root)
    key, pins = load_key(key_file=arguments.key_file), pinned_folders(arguments.root)
    rows = [{**_row(folder, key), "pinned": folder in pins} for folder in step_folders(arguments.root)]
    left = [path.name for path in leftovers(arguments.root, NO_SESSION)]
    if not rows and not left and not (arguments.root / RUN).is_file():
        one = parse_step(arguments.root.absolute()) is not None
        hint = "it is one snapshot; `plait snapshot verify` takes one" if one else f"it has no {RUN} and no snapshot"
        raise SnapshotError(f"'{arguments.root}' is no run folder: {hint}")
    owner = read_record(arguments.root / "LOCK")
    lines = [f"{'snapshot':<20} {'ranks':>5} {'tensors':>8} {'bytes':>15}  grid / reason"]
    for row in rows:
        pinned = "  pinned" * row["pinned"]
        if row["ok"]:
            grid = ",".join(f"{k}={v}" for k, v in row["grid"].items())
            counts = f"{row['world_size']:>5} {row['num_tensors']:>8} {row['num_bytes']:>15}"
            lines.append(f"{row['name']:<20} {counts}  {grid}{pinned}")
        else:
            lines.append(f"{row['name']:<20} {'damaged':>30}  {row['reason']}{pinned}")
    if not rows:
        lines = [f"'{arguments.root}' has no snapshot yet"]
    lines += [f"{name}  (unfinished; `plait snapshot gc` removes it)" for name in left]
    code = OK if all(row["ok"] for row in rows) else DIFFERENT
    return code, {"root": str(arguments.root), "snapshots": rows, "leftovers": left, "owner": owner}, lines


def need_folder(path: Path) -> None:
    """Raises FileNotFoundError unless there is a folder."""
    if not path.is_dir():
        raise FileNotFoundError(f"'{path}' is not a folder")


def _row(folder: StepFolder, key: Key | None) -> dict[str, Any]:
    row: dict[str, Any] = {"name": folder.path.name, "step": folder.step}
    try:
        manifest = open_folder(folder.path, key=key).manifest
    except SnapshotDamaged as error:
        return {**row, "ok": False, "reason": str(error)}
    wanted = ("attempt", "run", "epoch", "world_size", "grid", "num_tensors", "num_bytes")
    return {**row, "ok": True, **{name: getattr(manifest, name) for name in wanted}}


def show(arguments: argparse.Namespace) -> Answer:
    """One snapshot: who wrote it, its tensors and values, its files with their digests."""
    folder = find_snapshot(arguments.path)
    need_folder(folder)
    reader = open_folder(folder, key=load_key(key_file=arguments.key_file))
    manifest, table = reader.manifest, reader.table
    names = sorted(n for n in table.names if fnmatchcase(n, arguments.select))
    tensors = [_tensor_row(name, table.entry(name), table.aliases.get(name)) for name in names]
    values = {n: reader.values[n] for n in sorted(reader.values) if fnmatchcase(n, arguments.select)}
    ranks = [_rank_row(reader, rank) for rank in range(manifest.world_size)]
    wanted = (
        "step",
        "attempt",
        "run",
        "epoch",
        "world_size",
        "grid",
        "commit",
        "num_tensors",
        "num_bytes",
        "metrics",
    )
    about = {name: getattr(manifest, name) for name in wanted}
    about["metrics"] = {name: float.fromhex(text) for name, text in manifest.metrics.items()}
    codec = next((p.codec for f in reader.fragments for p in f.pieces if p.codec), None)
    files = [asdict(entry) for entry in manifest.files]
    report = {"folder": str(folder), **about, "codec": codec, "tensors": tensors, "values": values, "ranks": ranks}
    lines = [f"{folder}", *(f"{name + ':':<14}{value}" for name, value in about.items() if value not in ({}, None))]
    lines += [f"{'codec:':<14}{codec}"] * (codec is not None)
    lines += ["", f"{'tensor':<44} {'dtype':<12} {'shape':<20} {'size':>11}  ranks"]
    for t in tensors:
        where = f"= {t['same_as']}" if t["same_as"] else ",".join(map(str, t["ranks"]))
        lines.append(f"{t['name']:<44} {t['dtype']:<12} {t['shape']!s:<20} {size_text(t['num_bytes']):>11}  {where}")
    lines += ["", *(f"{name} = {str(decode(v, name))[:80]}" for name, v in values.items()), ""]
    lines += [f"rank {r['rank']}: {size_text(r['num_bytes'])} in {r['num_pieces']} pieces" for r in ranks]
    lines += ["", *(f"{f['sha256']}  {f['name']}  {f['bytes']} bytes" for f in files)]
    return OK, {**report, "files": files}, lines


def _tensor_row(name: str, entry: TensorEntry, same_as: str | None) -> dict[str, Any]:
    """ranks: who wrote it; xxh3_128: of each piece, in the order of the ranks."""
    return {
        "name": name,
        "dtype": str(entry.dtype).removeprefix("torch."),
        "shape": list(entry.full_shape),
        "num_bytes": entry.num_bytes,
        "ranks": sorted({source.rank for source in entry.sources}),
        "xxh3_128": [source.piece.xxh3_128 for source in entry.sources],
        "same_as": same_as,
    }


def _rank_row(reader: SnapshotReader, rank: int) -> dict[str, Any]:
    fragment = reader.fragments[rank]
    return {
        "rank": rank,
        "num_pieces": len(fragment.pieces),
        "num_bytes": sum(piece.num_bytes for piece in fragment.pieces),
        "per_rank": sorted(fragment.per_rank),
        "bases": [base.name for base in fragment.bases],
    }


def verify(arguments: argparse.Namespace) -> Answer:
    """Reads every byte of one snapshot or of all in a folder; 1 when one is damaged."""
    need_folder(arguments.path)
    one = parse_step(arguments.path.absolute())
    folders = [one] if one is not None else step_folders(arguments.path)
    folders = [f for f in folders if arguments.step is None or f.step == arguments.step]
    if not folders:
        raise SnapshotError(
            f"'{arguments.path}' holds no snapshot" + (f" of step {arguments.step}" if arguments.step else "")
        )
    rows, lines, code = [], [], OK
    for folder in folders:
        damage, num_bytes = check_snapshot(folder.path, load_key(key_file=arguments.key_file), quiet=arguments.json)
        rows.append(
            {
                "name": folder.path.name,
                "step": folder.step,
                "ok": not damage,
                "damage": damage,
                "bytes_read": num_bytes,
            }
        )
        lines.append(f"{folder.path.name}: {'damaged' if damage else 'ok'} ({num_bytes} bytes read)")
        lines += [f"  {text}" for text in damage]
        code = DIFFERENT if damage else code
    return code, {"snapshots": rows}, lines


def check_snapshot(folder: Path, key: Key | None = None, quiet: bool = True) -> tuple[list[str], int]:
    """Reads all of a snapshot; returns what is damaged (file, block and tensors) and the bytes of data read.

    quiet: shows no progress.
    """
    try:
        reader = open_folder(folder, key=key)
        reader.table  # noqa: B018  checks fragments and coverage
        for name, value in reader.values.items():
            decode(value, f"value {name!r}")
        for fragment in reader.fragments:
            for name, value in fragment.per_rank.items():
                decode(value, f"per-rank value {name!r} of rank {fragment.rank}")
    except SnapshotDamaged as error:
        return [str(error)], 0
    total = sum(file.bytes for fragment in reader.fragments for file in fragment.data_files.values())
    with progress(f"verify {folder.name}", total, lambda: reader.bytes_read, quiet):
        damage = [text for rank in range(reader.manifest.world_size) for text in reader.verify(rank)]
    return damage, reader.bytes_read


def diff(arguments: argparse.Namespace) -> Answer:
    """Compares two snapshots bit by bit; 1 when they differ."""
    folders = [find_snapshot(arguments.a), find_snapshot(arguments.b)]
    for folder in folders:
        need_folder(folder)
    a, b = (open_folder(folder, key=load_key(key_file=arguments.key_file)) for folder in folders)
    total = a.manifest.num_bytes + b.manifest.num_bytes
    with progress("diff", total, lambda: a.bytes_read + b.bytes_read, arguments.json):
        found = list(compare(a, b))
    lines = [f"{d.name}: {d.text}" for d in found]
    same_ranks = len(a.fragments) == len(b.fragments)
    note = "" if same_ranks else "; per-rank values were not compared: the numbers of ranks differ"
    verdict = f"{len(found)} differences" if found else f"equal: {len(a.table.names)} tensors, {len(a.values)} values"
    lines.append(f"{verdict} ('{folders[0]}', '{folders[1]}'{note})")
    report = {
        "equal": not found,
        "a": str(folders[0]),
        "b": str(folders[1]),
        "per_rank_compared": same_ranks,
        "differences": [asdict(d) for d in found],
    }
    return (DIFFERENT if found else OK), report, lines
