"""The commands of `plait snapshot` that change what is kept: gc, prune, pin, unpin, copy; and bench, a disk test.

Whatever removes or adds snapshots under a root holds its LOCK, so that a running job is never disturbed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from plait import _C
from plait.ckpt import keep
from plait.ckpt.candidates import find_snapshot, opened_snapshot
from plait.ckpt.cli_progress import progress, size_text
from plait.ckpt.cli_show import (
    DIFFERENT,
    NO_SESSION,
    OK,
    Answer,
    check_copy,
    check_snapshot,
    key_of,
    need_folder,
    to_verify,
)
from plait.ckpt.copy_whole import copy_whole
from plait.ckpt.crypt import Key
from plait.ckpt.errors import SnapshotDamaged
from plait.ckpt.folders import StepFolder, collect_garbage, step_folders
from plait.ckpt.lock import RootLock
from plait.ckpt.manifest import RUN, Manifest, Run, from_bytes
from plait.ckpt.tier_reader import open_folder
from plait.ckpt.tiers import Tier

_MAX_RUN_BYTES = 4096


def gc(arguments: argparse.Namespace) -> Answer:
    """Removes what dead attempts left behind."""
    _run_of(arguments.root)
    lock = RootLock(arguments.root, NO_SESSION)
    try:
        removed = collect_garbage(_C.PosixIo(), arguments.root, NO_SESSION)
    finally:
        lock.close()
    return OK, {"removed": removed}, [f"removed {name}" for name in removed] or ["nothing to remove"]


def _run_of(root: Path) -> str:
    """Returns the run that a folder belongs to; FileNotFoundError when it is no run folder."""
    path = root / RUN
    if not path.is_file():
        raise FileNotFoundError(f"'{root}' is no run folder: it has no {RUN}")
    return from_bytes(Run, _C.read_small(_C.PosixIo(), path, _MAX_RUN_BYTES), f"'{path}'").run


def prune(arguments: argparse.Namespace) -> Answer:
    """Removes what `--keep`, `--every` and `--best` give up, once one of those that stay was read and found good."""
    for flag, value in (("--keep", arguments.keep), ("--every", arguments.every)):
        if value is not None and value < 1:
            raise ValueError(f"{flag} {value}: must be at least 1")
    policy = keep.Policy(arguments.keep, arguments.every, _best_of(arguments.best))
    if arguments.dry_run:
        return _prune(arguments, policy)
    _run_of(arguments.root)
    lock = RootLock(arguments.root, NO_SESSION)
    try:
        return _prune(arguments, policy)
    finally:
        lock.close()


def _best_of(text: str | None) -> tuple[str, str, int] | None:
    """Returns keep.Policy's keep_best of "loss=min" or "loss=min:2"; ValueError for anything else."""
    if text is None:
        return None
    found = re.fullmatch(r"(.+)=(min|max)(?::([1-9]\d{0,8}))?", text)
    if found is None:
        raise ValueError(f"--best {text!r}: must be NAME=min, NAME=max, or one of them with :N")
    return found[1], found[2], int(found[3] or 1)


def _prune(arguments: argparse.Namespace, policy: keep.Policy) -> Answer:
    root, run, key = arguments.root, _run_of(arguments.root), key_of(arguments)
    manifests = _manifests(root, key)
    valid = [folder for folder, manifest in manifests.items() if manifest is not None and manifest.run == run]
    if not valid:
        raise SnapshotDamaged(f"'{root}' has no valid snapshot of its run; nothing is removed")
    newest, pins = max(valid), keep.pinned_folders(root)
    metrics = {f: keep.metrics_of(m) for f, m in manifests.items() if m is not None}
    reasons = policy.kept(valid, newest, pins, metrics)
    for folder, manifest in manifests.items():
        if folder not in valid:
            reasons[folder] = "damaged: left for people to look at" if manifest is None else "of another run"
    gone = policy.given_up(valid, newest, pins, metrics)
    if gone:
        _need_good([folder for folder in sorted(valid, reverse=True) if folder in reasons], key, arguments.json)
    names = [folder.path.name for folder in gone]
    if not arguments.dry_run:
        names = keep.retain(_C.PosixIo(), root, policy, newest, run, NO_SESSION)
    held = [folder.path.name for folder in gone if folder.path.name not in names]
    report = {
        "removed": names,
        "kept": {folder.path.name: reasons[folder] for folder in sorted(reasons)},
        "being_read": held,
        "dry_run": arguments.dry_run,
    }
    lines = [f"{'would remove' if arguments.dry_run else 'removed'} {name}" for name in names]
    lines += [f"kept {name}: it is being read" for name in held]
    lines += [f"kept {name}: {reason}" for name, reason in report["kept"].items()]
    return OK, report, lines


def _manifests(root: Path, key: Key | None) -> dict[StepFolder, Manifest | None]:
    """Returns all snapshots under a root with their manifests; None for a damaged one."""
    found: dict[StepFolder, Manifest | None] = {}
    for folder in step_folders(root):
        try:
            found[folder] = open_folder(folder.path, key=key).manifest
        except SnapshotDamaged:
            found[folder] = None
    return found


def _need_good(staying: list[StepFolder], key: Key | None, quiet: bool) -> None:
    """Reads those that would stay, newest first, until one is good in every byte. SnapshotDamaged when none is."""
    damage: list[str] = []
    for folder in staying:
        found, _ = check_snapshot(folder.path, key, quiet)
        if not found:
            return
        damage.append(f"{folder.path.name}: {found[0]}")
    raise SnapshotDamaged("nothing is removed: none of those that would stay is good: " + "; ".join(damage))


def pin(arguments: argparse.Namespace) -> Answer:
    """Keeps a snapshot from all retention."""
    folder = find_snapshot(arguments.path)
    need_folder(folder)
    keep.pin(_C.PosixIo(), folder)
    return OK, {"pinned": str(folder)}, [f"pinned '{folder}'"]


def unpin(arguments: argparse.Namespace) -> Answer:
    """Lets retention have a snapshot again."""
    folder = find_snapshot(arguments.path)
    need_folder(folder)
    was = keep.unpin(_C.PosixIo(), folder)
    return OK, {"unpinned": str(folder), "was_pinned": was}, [f"'{folder}' is {'no longer' if was else 'not'} pinned"]


def copy(arguments: argparse.Namespace) -> Answer:
    """Copies a snapshot to another folder or URL, read back and compared."""
    key = key_of(arguments)
    if not arguments.retry_s >= 0.0:
        raise ValueError(f"--retry-s {arguments.retry_s}: must be at least 0")
    if arguments.encrypt and key is None:
        raise ValueError("--encrypt needs a key: --key-file or --key-env")
    compress: bool | int = arguments.level if arguments.level is not None else arguments.compress
    tier = Tier(arguments.target, None, compress=compress, encrypt=arguments.encrypt, retry_s=arguments.retry_s)
    sent: list[int] = [0]
    with opened_snapshot(arguments.path, None if arguments.unsigned else key) as reader:
        source, total = reader.place, reader.manifest.num_bytes
        with progress(f"copy {reader.folder.name}", total, lambda: sent[0], arguments.json):
            place, copied = copy_whole(reader, tier, key, sent)
    report = {"source": source, "copy": place, "was_there": not copied}
    if copied:
        return OK, report, [f"copied '{source}' to '{place}', verified"]
    (_, name, opener), *_ = to_verify(place, None, key)
    if damage := check_copy(name, opener, arguments.json)[0]:
        raise SnapshotDamaged(f"'{place}' was there already, and is damaged: {damage[0]}")
    return OK, report, [f"'{place}' was there already, verified"]


def bench(arguments: argparse.Namespace) -> Answer:
    """Writes and reads one file as snapshots do; `plait bench run snapshots` has whole saves beside their peers."""
    need_folder(arguments.root)
    if arguments.mib < 1:
        raise ValueError(f"--mib {arguments.mib}: must be at least 1")
    num_bytes, path = arguments.mib << 20, arguments.root / ".plait-disk-test"
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most_bytes = min(memory_bytes // 4, shutil.disk_usage(arguments.root).free)  # what is written and what is read
    if num_bytes > most_bytes:
        raise ValueError(f"--mib {arguments.mib}: at most {most_bytes >> 20} here, by memory and free space")
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    report: dict[str, Any] = {"folder": str(arguments.root), "num_bytes": num_bytes}
    try:
        began = time.monotonic()
        result = _C.write_file(_C.PosixIo(), path, b"", [(data.data_ptr(), num_bytes, 0)], num_bytes)
        report["write_s"] = time.monotonic() - began
        back = torch.empty_like(data)
        began = time.monotonic()
        request = (0, num_bytes, back.data_ptr())
        _C.read_ranges(_C.PosixIo(), path, num_bytes, list(result.crcs), [request])
        report["read_s"] = time.monotonic() - began
    finally:
        path.unlink(missing_ok=True)
    if not data.equal(back):
        return DIFFERENT, {"error": f"'{path}' came back with other bytes"}, [f"'{path}' came back with other bytes"]
    write, read = (size_text(int(num_bytes / report[name])) for name in ("write_s", "read_s"))
    lines = [f"write: {write}/s, durable, with CRC32C", f"read: {read}/s, verified"]
    return OK, report, [*lines, "whole saves beside their peers: plait bench run snapshots"]
