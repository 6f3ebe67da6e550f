"""The commands of `plait snapshot` that only look: ls, show, verify, diff.

Each takes the parsed arguments and returns (exit code, report for --json, lines for people).
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from plait.ckpt.candidates import find_copies, is_url, local_path, opened_snapshot, split_step
from plait.ckpt.cli_progress import progress, size_text
from plait.ckpt.compare import compare
from plait.ckpt.crypt import Key, load_key, signing_key
from plait.ckpt.errors import SnapshotDamaged, SnapshotError, SnapshotSealed
from plait.ckpt.folders import leftovers, parse_step, step_folders
from plait.ckpt.keep import pinned_folders
from plait.ckpt.manifest import RUN
from plait.ckpt.owner import owner_is_alive, read_record
from plait.ckpt.reader import SnapshotReader
from plait.ckpt.tables import TensorEntry
from plait.ckpt.tier_reader import TierReader, open_folder
from plait.ckpt.values import decode

Answer = tuple[int, Any, list[str]]  # exit code, report, lines
OK, DIFFERENT, USAGE, LOCKED = 0, 1, 2, 3
NO_SESSION = "0" * 16


def list_snapshots(arguments: argparse.Namespace) -> Answer:
    """The snapshots of a run folder or a tier, newest first; 1 when one is damaged."""
    rows, left, owner = (_in_store if is_url(arguments.root) else _in_folder)(arguments)
    wide = max([20, *(len(row["name"]) for row in rows)])
    lines = [f"{'snapshot':<{wide}} {'ranks':>5} {'tensors':>8} {'bytes':>15}  grid / reason"]
    for row in rows:
        pinned = "  pinned" * row["pinned"]
        if row["ok"]:
            grid = ",".join(f"{k}={v}" for k, v in row["grid"].items())
            counts = f"{row['world_size']:>5} {row['num_tensors']:>8} {row['num_bytes']:>15}"
            lines.append(f"{row['name']:<{wide}} {counts}  {grid}{pinned}")
        else:
            lines.append(f"{row['name']:<{wide}} {'damaged':>30}  {row['reason']}{pinned}")
    if not rows:
        lines = [f"'{arguments.root}' has no snapshot yet"]
    lines += [f"{name}  (unfinished; `plait snapshot gc` removes it)" for name in left]
    code = OK if all(row["ok"] for row in rows) else DIFFERENT
    return code, {"root": arguments.root, "snapshots": rows, "leftovers": left, "owner": owner}, lines


def _in_folder(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str], dict[str, Any]]:
    """Returns rows, the names of what is unfinished, and the record of the owner."""
    root = local_path(arguments.root)
    need_folder(root)
    key, pins = key_of(arguments), pinned_folders(root)
    rows = [
        {**_row(f.path.name, f.step, partial(open_folder, f.path, key=key)), "pinned": f in pins}
        for f in step_folders(root)
    ]
    owner = read_record(root / "LOCK")
    left = [path.name for path in leftovers(root, NO_SESSION)]
    if owner.get("held") and owner_is_alive(owner):  # its spares are no leftovers
        left = [name for name in left if not name.startswith(f".trash-{owner.get('session')}-")]
    if not rows and not left and not (root / RUN).is_file():
        one = parse_step(root.absolute()) is not None
        hint = "it is one snapshot; `plait snapshot verify` takes one" if one else f"it has no {RUN} and no snapshot"
        raise SnapshotError(f"'{root}' is no run folder: {hint}")
    return rows, left, owner


def _in_store(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str], dict[str, Any]]:
    key = key_of(arguments)
    store, found = find_copies(arguments.root)
    rows = [
        {**_row(folder, step, partial(TierReader, store, folder, key=key)), "pinned": False} for step, folder in found
    ]
    return rows, store.unfinished(), {}


def key_of(arguments: argparse.Namespace) -> Key | None:
    """Returns the key that a command was given: a file, or the name of a variable of the environment."""
    if arguments.key_env is None:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            key = load_key(key_file=arguments.key_file)
        for warning in said if not arguments.json else ():
            print(f"plait snapshot: {warning.message}", file=sys.stderr)
        return key
    if arguments.key_env not in os.environ:
        raise ValueError(f"--key-env {arguments.key_env}: the environment has no such variable")
    try:
        return load_key(os.environ[arguments.key_env], arguments.key_file)
    except ValueError as error:
        raise ValueError(f"--key-env {arguments.key_env}: {error}") from None


def need_folder(path: Path) -> None:
    """Raises FileNotFoundError unless there is a folder."""
    if not path.is_dir():
        raise FileNotFoundError(f"'{path}' is not a folder")


def _row(name: str, step: int, opener: Callable[[], SnapshotReader]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "step": step}
    try:
        manifest = opener().manifest
    except SnapshotDamaged as error:
        return {**row, "ok": False, "reason": str(error)}
    wanted = ("attempt", "run", "epoch", "world_size", "grid", "num_tensors", "num_bytes")
    return {**row, "ok": True, **{name: getattr(manifest, name) for name in wanted}}


def show(arguments: argparse.Namespace) -> Answer:
    """One snapshot: who wrote it, its tensors and values, its files with their digests."""
    with opened_snapshot(arguments.path, key_of(arguments)) as reader:
        return _show(reader, arguments)


def _show(reader: SnapshotReader, arguments: argparse.Namespace) -> Answer:
    manifest, table, folder = reader.manifest, reader.table, reader.place
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
    signed = signing_key(reader.stored_manifest())
    files = [asdict(entry) for entry in manifest.files]
    report = {
        "folder": str(folder),
        **about,
        "codec": codec,
        "signed_by": signed,
        "tensors": tensors,
        "values": values,
        "ranks": ranks,
    }
    lines = [f"{folder}", *(f"{name + ':':<14}{value}" for name, value in about.items() if value not in ({}, None))]
    lines += [f"{'codec:':<14}{codec}"] * (codec is not None)
    lines += [f"{'signed by:':<14}key {signed}"] * (signed is not None)
    wide = max([44, *map(len, names)])
    lines += ["", f"{'tensor':<{wide}} {'dtype':<12} {'shape':<20} {'size':>11}  ranks"]
    for t in tensors:
        where = f"= {t['same_as']}" if t["same_as"] else ",".join(map(str, t["ranks"]))
        lines.append(
            f"{t['name']:<{wide}} {t['dtype']:<12} {t['shape']!s:<20} {size_text(t['num_bytes']):>11}  {where}"
        )
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
    """Reads every byte of one snapshot or of all in a folder; 1 when one is damaged, or not signed by the key that
    was given. Without a key a signature is named and not checked: that is no damage, so the exit code stays 0."""
    key = key_of(arguments)
    rows, lines, code = [], [], OK
    for step, name, opener in to_verify(arguments.path, arguments.step, key):
        damage, num_bytes, signed = check_copy(name, opener, quiet=arguments.json)
        row = {"name": name, "step": step, "ok": not damage, "damage": damage, "bytes_read": num_bytes}
        rows.append({**row, "signed_by": signed, "signature_checked": key is not None and not damage})
        lines.append(
            f"{name}: {'damaged' if damage else 'ok'} ({num_bytes} bytes read){_signature_text(signed, key)}"
        )
        lines += [f"  {text}" for text in damage]
        code = DIFFERENT if damage else code
    return code, {"snapshots": rows}, lines


def to_verify(text: str, step: int | None, key: Key | None) -> list[tuple[int, str, Callable[[], SnapshotReader]]]:
    """Returns (step, name, opener) of what a path or a URL names: all snapshots of a run, or one."""
    if is_url(text):
        store, found = find_copies(text, step)
        return [(number, folder, partial(TierReader, store, folder, key=key)) for number, folder in found]
    path = local_path(text)
    one = parse_step(path.absolute())
    if one is None and not path.is_dir():
        root, at = split_step(str(path))
        path, step = (Path(root), at) if at is not None and step is None else (path, step)
    need_folder(path)
    folders = [one] if one is not None else step_folders(path)
    folders = [f for f in folders if step in (None, f.step)]
    if not folders:
        raise SnapshotError(f"'{text}' holds no snapshot" + (f" of step {step}" if step is not None else ""))
    return [(f.step, f.path.name, partial(open_folder, f.path, key=key)) for f in folders]


def check_snapshot(folder: Path, key: Key | None = None, quiet: bool = True) -> tuple[list[str], int]:
    """Reads all of a snapshot; returns what is damaged (file, block and tensors) and the bytes of data read.

    quiet: shows no progress.
    """
    return check_copy(folder.name, partial(open_folder, folder, key=key), quiet)[:2]


def _signature_text(signed: str | None, key: Key | None) -> str:
    if signed is None:
        return ""
    return f", signed by key {signed}" + ("" if key is not None else ", which was NOT CHECKED: no key was given")


def check_copy(name: str, opener: Callable[[], SnapshotReader], quiet: bool) -> tuple[list[str], int, str | None]:
    """Returns the damage, the bytes of data read, and the id of the key that signed it."""
    signed = None
    try:
        reader = opener()
        signed = signing_key(reader.stored_manifest())
        reader.table  # noqa: B018  checks fragments and coverage
        for key, value in reader.values.items():
            decode(value, f"value {key!r}")
        for fragment in reader.fragments:
            for key, value in fragment.per_rank.items():
                decode(value, f"per-rank value {key!r} of rank {fragment.rank}")
    except SnapshotSealed:
        raise
    except SnapshotDamaged as error:
        return [str(error)], 0, signed
    total = sum(file.bytes for fragment in reader.fragments for file in fragment.data_files.values())
    with progress(f"verify {name}", total, lambda: reader.bytes_read, quiet):
        damage = [text for rank in range(reader.manifest.world_size) for text in reader.verify(rank)]
    return damage, reader.bytes_read, signed


def diff(arguments: argparse.Namespace) -> Answer:
    """Compares two snapshots bit by bit; 1 when they differ."""
    key = key_of(arguments)
    with (
        opened_snapshot(arguments.a, None if arguments.unsigned else key) as a,
        opened_snapshot(arguments.b, key) as b,
    ):
        return _diff(a, b, arguments)


def _diff(a: SnapshotReader, b: SnapshotReader, arguments: argparse.Namespace) -> Answer:
    total = a.manifest.num_bytes + b.manifest.num_bytes
    with progress("diff", total, lambda: a.bytes_read + b.bytes_read, arguments.json):
        found = list(compare(a, b))
    lines = [f"{d.name}: {d.text}" for d in found]
    same_ranks = len(a.fragments) == len(b.fragments)
    note = "" if same_ranks else "; per-rank values were not compared: the numbers of ranks differ"
    verdict = (
        f"{len(found)} difference{'s' * (len(found) > 1)}"
        if found
        else f"equal: {len(a.table.names)} tensors, {len(a.values)} values"
    )
    lines.append(f"{verdict} ('{a.place}', '{b.place}'{note})")
    report = {
        "equal": not found,
        "a": str(a.place),
        "b": str(b.place),
        "per_rank_compared": same_ranks,
        "differences": [asdict(d) for d in found],
    }
    return (DIFFERENT if found else OK), report, lines
