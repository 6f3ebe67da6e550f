"""A history of one root under everything at once: writers that compete for it, readers, a pruner; kill -9 and stops.

`python -m tests.walk --history 30` writes tests/results/history.json. The one idea (Jepsen's): each process logs what
it is about to do and what came of it, by one clock; afterwards every observation must be of a save that was begun,
bit for bit, none older than what was acknowledged before it began, and none older than the reader's one before.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from plait import _C
from plait.ckpt import PerRank, SnapshotError, SnapshotLocked, Snapshots
from plait.ckpt import cli as snapshot_cli
from plait.ckpt.candidates import newest_valid
from plait.ckpt.folders import leftovers, step_folders
from plait.ckpt.reader import read_manifest
from tests.cycles import blank, same

Event = dict[str, Any]
KEEP, PRUNED = 3, 2  # snapshots that a writer keeps, and the pruner
ROLES = ("write", "write", "write", "read", "read", "prune")
MOMENT_S = (0.005, 0.25)  # between two blows at some process
STOP_S = (0.05, 0.4)
FIRST_S = 30.0  # for the first acknowledged save


def state(nonce: int) -> dict[str, Any]:
    """What a save with this number holds: nine tenths are the same in each."""
    return {
        "frozen": torch.arange(20_000),
        "w": torch.arange(3_000) * (nonce + 1),
        "nonce": nonce,
        "rng": PerRank(nonce.to_bytes(8, "little")),
    }


class Log:
    """Appends events to a file that all processes have, each by one write."""

    def __init__(self, path: Path, who: str) -> None:
        self._fd, self._who = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), who

    def add(self, kind: str, **more: Any) -> None:
        event = {"kind": kind, "who": self._who, "at": time.monotonic(), **more}
        os.write(self._fd, json.dumps(event).encode() + b"\n")


def _write(root: Path, log: Log, number: int, chance: random.Random) -> None:
    """Comes to own the root, saves a few times, lets others have it."""
    count = 0
    while True:
        began = time.monotonic()
        options = {"delta": chance.random() < 0.5, "reuse_files": chance.random() < 0.5}
        try:
            snapshots = Snapshots(root, keep_last=KEEP, threads=1, **options)
        except SnapshotLocked:
            time.sleep(0.005)
            continue
        with snapshots:
            newest = snapshots.latest()
            log.add("open", began=began, step=newest)
            for step in range((newest or 0) + 1, (newest or 0) + chance.randint(2, 9)):
                count += 1
                nonce = 1000 * number + count
                log.add("begin", step=step, nonce=nonce)
                snapshots.save(step, state(nonce)).wait()
                log.add("saved", step=step, nonce=nonce)


def _read(root: Path, log: Log, number: int, chance: random.Random) -> None:
    while True:
        began = time.monotonic()
        try:
            found = Snapshots(root, read_only=True, threads=1).restore(blank(state(0)))
        except SnapshotError as error:
            log.add("refused", began=began, text=str(error))
            time.sleep(0.005)
            continue
        nonce = found.values["nonce"]
        whole = same(found.values, state(nonce))
        log.add("read", began=began, step=found.step, nonce=nonce, whole=whole, skipped=len(found.report.skipped))


def _prune(root: Path, log: Log, number: int, chance: random.Random) -> None:
    while True:
        if newest_valid(_C.PosixIo(), root) is not None:
            log.add("pruned", status=snapshot_cli.main(["prune", str(root), "--keep", str(PRUNED)]))
        time.sleep(chance.uniform(0.01, 0.1))


_DO: dict[str, Callable[[Path, Log, int, random.Random], None]] = {"write": _write, "read": _read, "prune": _prune}


def check(events: Sequence[Event]) -> list[str]:
    """Returns what is wrong with a history; empty when nothing is."""
    wrong = []
    begun = {(e["step"], e["nonce"]) for e in events if e["kind"] == "begin"}
    saved = sorted((e["at"], e["step"]) for e in events if e["kind"] == "saved")
    last: dict[str, int] = {}
    for event in sorted(events, key=lambda e: e["at"]):
        kind = event["kind"]
        if kind == "error" or (kind == "pruned" and event["status"] not in (0, 3)):
            wrong.append(f"an error: {event}")
        if kind not in ("read", "open", "refused"):
            continue
        durable = max((step for at, step in saved if at < event["began"]), default=0)
        if kind == "refused":
            if durable:
                wrong.append(f"nothing restored after step {durable} was acknowledged: {event}")
            continue
        if (event["step"] or 0) < durable:
            wrong.append(f"older than step {durable}, acknowledged before: {event}")
        if kind == "read":
            if not event["whole"] or (event["step"], event["nonce"]) not in begun:
                wrong.append(f"not the bits of any save of that step: {event}")
            if event["step"] < last.get(event["who"], 0):
                wrong.append(f"older than what this reader had before: {event}")
            last[event["who"]] = event["step"]
    return wrong


def run(seconds: float, seed: int = 1, folder: Path | None = None) -> dict[str, Any]:
    """Makes a history of so many seconds and checks it; returns the record. folder: where; in memory without.

    Keys: seconds, saved, read, blows {SIGKILL, SIGSTOP}, events (how many of which kind), lost (what is wrong).
    """
    place = folder or Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())
    inside = Path(tempfile.mkdtemp(prefix="plait-history-", dir=place))
    began, blows, pids, number = time.monotonic(), Counter[str](), dict[int, int](), 0
    root, log, chance = inside / "root", inside / "log", random.Random(seed)
    root.mkdir()
    try:
        for slot in range(len(ROLES)):
            number += 1
            pids[slot] = _start(slot, root, log, number, seed)
        deadline = began + FIRST_S
        while b'"saved"' not in (log.read_bytes() if log.exists() else b"") and time.monotonic() < deadline:
            time.sleep(0.01)
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            time.sleep(chance.uniform(*MOMENT_S))
            slot = chance.randrange(len(ROLES))
            if chance.random() < 0.2:
                os.kill(pids[slot], signal.SIGSTOP)
                time.sleep(chance.uniform(*STOP_S))
                os.kill(pids[slot], signal.SIGCONT)
                blows["SIGSTOP"] += 1
                continue
            _kill(pids.pop(slot))
            blows["SIGKILL"] += 1
            number += 1
            pids[slot] = _start(slot, root, log, number, seed)
        for slot in list(pids):
            _kill(pids.pop(slot))
        events = [json.loads(line) for line in log.read_text().splitlines()]
        lost = check(events) + _check_end(root, events)
    finally:
        for pid in pids.values():
            _kill(pid)
        shutil.rmtree(inside)
    kinds = Counter(event["kind"] for event in events)
    counts = {"saved": kinds["saved"], "read": kinds["read"], "blows": dict(sorted(blows.items()))}
    return {
        "seconds": round(time.monotonic() - began, 1),
        **counts,
        "events": dict(sorted(kinds.items())),
        "lost": lost,
    }


def _check_end(root: Path, events: Sequence[Event]) -> list[str]:
    """All are dead: the next owner finds the newest, removes what they left, and enough is kept."""
    durable = {event["step"] for event in events if event["kind"] == "saved"}
    with Snapshots(root, keep_last=KEEP, threads=1) as snapshots:
        wrong = [f"left: {path}" for path in leftovers(root, "f" * 16)]
        found = snapshots.restore(blank(state(0)))
        good = [folder for folder in step_folders(root) if read_manifest(_C.PosixIo(), folder.path)]
        snapshots.save(found.step + 1, state(0)).wait()
    if found.step < max(durable) or not same(found.values, state(found.values["nonce"])):
        wrong.append(f"step {found.step} in the end, step {max(durable)} was acknowledged")
    if len(good) < min(PRUNED, len(durable)):
        wrong.append(f"{len(good)} snapshots are left of {len(durable)}")
    return wrong


def _start(slot: int, root: Path, log: Path, number: int, seed: int) -> int:
    """Forks a process for a role; one whose work raises says so in the log."""
    pid = os.fork()
    if pid:
        return pid
    mine = Log(log, f"{ROLES[slot]}-{slot}" if ROLES[slot] == "read" else f"{ROLES[slot]}-{number}")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        torch.set_num_threads(1)
        _DO[ROLES[slot]](root, mine, number, random.Random(f"{seed} {number}"))
    except BaseException as error:
        mine.add("error", text=f"{type(error).__name__}: {error}")
    finally:
        os._exit(1)


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
