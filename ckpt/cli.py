"""`plait snapshot`: list, verify and compare snapshots, and remove what dead attempts left.

Exit codes: 0 ok or equal, 1 damaged or different, 2 usage, 3 locked by a running job. `--json` prints one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plait import _C
from plait.ckpt.compare import compare, find_snapshot
from plait.ckpt.crypt import Key, load_key
from plait.ckpt.errors import SnapshotDamaged, SnapshotError, SnapshotLocked
from plait.ckpt.folders import StepFolder, collect_garbage, leftovers, parse_step, step_folders
from plait.ckpt.lock import RootLock
from plait.ckpt.manifest import RUN
from plait.ckpt.owner import read_record
from plait.ckpt.tier_reader import open_folder
from plait.ckpt.values import decode

OK, DIFFERENT, USAGE, LOCKED = 0, 1, 2, 3
_NO_SESSION = "0" * 16


def main(argv: list[str]) -> int:
    """Runs one command; returns its exit code."""
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed help (0) or the usage error (2)
        return stop.code if isinstance(stop.code, int) else USAGE
    commands = {"ls": _list, "verify": _verify, "diff": _diff, "gc": _gc}
    try:
        code, report, lines = commands[arguments.command](arguments)
    except SnapshotLocked as error:
        return _fail(arguments.json, LOCKED, error)
    except SnapshotDamaged as error:
        return _fail(arguments.json, DIFFERENT, error)
    except (SnapshotError, FileNotFoundError, NotADirectoryError) as error:
        return _fail(arguments.json, USAGE, error)
    except OSError as error:
        return _fail(arguments.json, DIFFERENT, error)
    except ValueError as error:  # of --key-file
        return _fail(arguments.json, USAGE, error)
    print(json.dumps(report) if arguments.json else "\n".join(lines))
    return code


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON object")
    common.add_argument("--key-file", type=Path, help="the key of signed or encrypted snapshots")
    parser = argparse.ArgumentParser(
        prog="plait snapshot", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    root = commands.add_parser("ls", parents=[common], help="list the snapshots of a run folder")
    root.add_argument("root", type=Path)
    verify = commands.add_parser("verify", parents=[common], help="read every byte and compare it with its checksum")
    verify.add_argument("path", type=Path, help="a run folder (all its snapshots) or one step folder")
    verify.add_argument("--step", type=int, help="only this step of a run folder")
    diff = commands.add_parser("diff", parents=[common], help="compare two snapshots bit by bit, on full tensors")
    for side in ("a", "b"):
        diff.add_argument(side, help="a step folder, RUN (its newest valid one) or RUN@STEP")
    gc = commands.add_parser("gc", parents=[common], help="remove what dead attempts left behind")
    gc.add_argument("root", type=Path)
    return parser


def _fail(as_json: bool, code: int, error: BaseException) -> int:
    print(json.dumps({"error": str(error)}) if as_json else f"plait snapshot: {error}", file=sys.stderr)
    return code


def _list(arguments: argparse.Namespace) -> tuple[int, Any, list[str]]:
    _need_folder(arguments.root)
    rows = [_row(folder, load_key(key_file=arguments.key_file)) for folder in step_folders(arguments.root)]
    left = [path.name for path in leftovers(arguments.root, _NO_SESSION)]
    if not rows and not left and not (arguments.root / RUN).is_file():
        one = parse_step(arguments.root.absolute()) is not None
        hint = "it is one snapshot; `plait snapshot verify` takes one" if one else f"it has no {RUN} and no snapshot"
        raise SnapshotError(f"'{arguments.root}' is no run folder: {hint}")
    owner = read_record(arguments.root / "LOCK")
    lines = [f"{'snapshot':<20} {'ranks':>5} {'tensors':>8} {'bytes':>15}  grid / reason"]
    for row in rows:
        if row["ok"]:
            grid = ",".join(f"{k}={v}" for k, v in row["grid"].items())
            lines.append(
                f"{row['name']:<20} {row['world_size']:>5} {row['num_tensors']:>8} {row['num_bytes']:>15}  {grid}"
            )
        else:
            lines.append(f"{row['name']:<20} {'damaged':>30}  {row['reason']}")
    if not rows:
        lines = [f"'{arguments.root}' has no snapshot yet"]
    lines += [f"{name}  (unfinished; `plait snapshot gc` removes it)" for name in left]
    code = OK if all(row["ok"] for row in rows) else DIFFERENT
    return code, {"root": str(arguments.root), "snapshots": rows, "leftovers": left, "owner": owner}, lines


def _need_folder(path: Path) -> None:
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


def _verify(arguments: argparse.Namespace) -> tuple[int, Any, list[str]]:
    _need_folder(arguments.path)
    one = parse_step(arguments.path.absolute())
    folders = [one] if one is not None else step_folders(arguments.path)
    folders = [f for f in folders if arguments.step is None or f.step == arguments.step]
    if not folders:
        raise SnapshotError(
            f"'{arguments.path}' holds no snapshot" + (f" of step {arguments.step}" if arguments.step else "")
        )
    rows, lines, code = [], [], OK
    for folder in folders:
        damage, num_bytes = check_snapshot(folder.path, load_key(key_file=arguments.key_file))
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


def check_snapshot(folder: Path, key: Key | None = None) -> tuple[list[str], int]:
    """Reads all of a snapshot; returns what is damaged (file, block and tensors) and the bytes of data read."""
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
    damage = [text for rank in range(reader.manifest.world_size) for text in reader.verify(rank)]
    return damage, reader.bytes_read


def _diff(arguments: argparse.Namespace) -> tuple[int, Any, list[str]]:
    folders = [find_snapshot(arguments.a), find_snapshot(arguments.b)]
    for folder in folders:
        _need_folder(folder)
    a, b = (open_folder(folder, key=load_key(key_file=arguments.key_file)) for folder in folders)
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


def _gc(arguments: argparse.Namespace) -> tuple[int, Any, list[str]]:
    if not (arguments.root / RUN).is_file():
        raise FileNotFoundError(f"'{arguments.root}' is no run folder: it has no {RUN}")
    lock = RootLock(arguments.root, _NO_SESSION)
    try:
        removed = collect_garbage(_C.PosixIo(), arguments.root, _NO_SESSION)
    finally:
        lock.close()
    return OK, {"removed": removed}, [f"removed {name}" for name in removed] or ["nothing to remove"]
