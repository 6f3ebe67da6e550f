"""A fault at every operation of every kind of save: errors, short and torn writes, kills, power loss.

`python -m tests.walk --faults 10000` (`make faults`) walks all kinds of cycles.py, counts, ends at the first loss,
and writes what it did to tests/results/faults.json. Fewer faults take every so many operations. The tests of
test_walk.py walk the same. `--history 30` (`make history`) does what history.py says instead. The one idea: each walk
is a process of its own on copies of one small run in memory, so that a fault costs some 40 ms and nothing of one walk
(a lock, a thread) reaches another.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

from plait import _C
from plait.ckpt import SnapshotError, capture, part
from tests import history
from tests.cycles import (
    CYCLES,
    OLD,
    PLACES,
    SHORT_S,
    Cycle,
    Ios,
    check_and_go_on,
    commits,
    durable_commits,
    make_old,
    newest,
)
from tests.faults import KILLED, in_child
from tests.power import lose, pending

CUTS = (1, 511, 512, 4096)  # bytes of a short or torn write
LOSSES = 12  # ways of losing what was not synced, at each operation of a whole walk
_ONE = b"\x01"  # what a walk tells after each fault
BLOCK_BYTES = 1 << 20  # so that a small state needs slabs
RECORD = Path(__file__).resolve().parent / "results" / "faults.json"
WHOLE = 12_000  # about what all walks have together
Indices = Callable[[int, int], range]  # (operations, kind of fault) -> those to walk


def small_blocks(patch: Callable[[Any, str, int], None] = setattr) -> None:
    """Sets the size of blocks in the modules that capture and write."""
    for module in (capture, part):
        patch(module, "BLOCK_BYTES", BLOCK_BYTES)


class Walker:
    """One cycle on copies of one run. ops: of each rank, without a fault. count: faults injected; tell: is called
    after each. where: the latest one."""

    def __init__(self, cycle: Cycle, folder: Path, tell: Callable[[], None] = lambda: None) -> None:
        self.cycle, self.folder, self.tell = cycle, folder, tell
        self.where: object = "without a fault"
        self.count = self._folders = 0
        self.old = make_old(cycle, folder / "old")
        root = self.fresh()
        ios = self.ios({})
        cycle.run(root, ios, cycle.steps)
        self.ops = [list(io.ops) for io in ios]
        self.logged = root
        shutil.rmtree(root)

    def fresh(self) -> Path:
        self._folders += 1
        return Path(shutil.copytree(self.old, self.folder / f"copy-{self._folders:05d}"))

    def ios(self, faulty: dict[int, Any]) -> Ios:
        """One for each rank, counting unless it is given."""
        return Ios(faulty.get(rank, io) for rank, io in enumerate(self.cycle.ios()))

    def run(self, root: Path, rank: int, script: list[tuple[int, str, int]], sticky: bool = False) -> bool:
        """Runs the cycle with a fault on one rank; returns whether it raised the OSError or an error about it."""
        ios = self.ios({rank: self.cycle.fault(script, sticky)})
        if sticky or any(action.startswith("errno") and number != errno.EINTR for _, action, number in script):
            ios.timeout_s = SHORT_S  # the rank may be unable to say that it failed
        try:
            self.cycle.run(root, ios, self.cycle.steps)
        except (OSError, SnapshotError):
            return True
        return False

    def check(self, root: Path, allowed: Sequence[int], where: object) -> None:
        """One fault has been injected: checks what must hold, and counts."""
        check_and_go_on(self.cycle, root, allowed, where)
        self.count += 1
        self.tell()

    def fault(self, *where: object) -> Path:
        """Returns a fresh copy for the fault that comes next."""
        self.where = where
        return self.fresh()

    def allowed(self, index: int, exact: bool) -> list[int]:
        """Steps that may restore after a fault at an operation of rank 0: from what was committed before it."""
        before = newest(commits(self.ops[0], len(self.cycle.roots) * self.cycle.ranks > 2), index)
        steps = [step for step in (OLD, *self.cycle.steps) if step >= before]
        return steps[:1] if exact else steps


def walk_errors(walker: Walker, indices: Indices, stickies: tuple[bool, ...] = (False, True)) -> None:
    """An error at each operation; from there on too, where `stickies` has it: then two ranks wait for each other."""
    cycle = walker.cycle
    kinds = [("errno", number, sticky) for number in cycle.errors for sticky in stickies]
    if not isinstance(cycle.ios()[0], _C.FaultIo):
        kinds += [("errno_after", errno.EIO, False)]
    for shift, (action, number, sticky) in enumerate(kinds):
        name = f"{action} {errno.errorcode[number]} {'from there on' if sticky else 'once'}"
        for rank, ops in enumerate(walker.ops):
            for index in indices(len(ops), shift):
                root = walker.fault(name, rank, index, ops[index])
                raised = walker.run(root, rank, [(index, action, number)], sticky)
                steps = walker.allowed(index if rank == 0 else 0, exact=False)
                if number == errno.EINTR and not sticky:
                    assert not raised, walker.where
                if not raised and not sticky and ops[index][0] != "statvfs":
                    steps = list(cycle.steps[-1:])
                walker.check(root, steps, walker.where)


def walk_short(walker: Walker, indices: Indices) -> None:
    """A write or read that the kernel cuts short: goes on where it stopped."""
    for shift, num_bytes in enumerate(CUTS):
        for rank, ops in enumerate(walker.ops):
            cut = [i for i, (name, _) in enumerate(ops) if name in ("pwrite", "pread")]
            for index in (cut[i] for i in indices(len(cut), shift)):
                root = walker.fault("short", num_bytes, rank, index, ops[index])
                assert not walker.run(root, rank, [(index, "short", num_bytes)]), walker.where
                walker.check(root, walker.cycle.steps[-1:], walker.where)


def walk_kills(walker: Walker, indices: Indices) -> None:
    """kill -9 before, after and in the middle of each operation; of all ranks, as when a machine dies."""
    kinds = [("crash_before", 0), ("crash_after", 0), *(("crash_short", n) for n in CUTS)]
    if not isinstance(walker.cycle.ios()[0], _C.FaultIo):
        kinds = kinds[:2]
    for shift, (action, value) in enumerate(kinds):
        for rank, ops in enumerate(walker.ops):
            points = [i for i, (name, _) in enumerate(ops) if action != "crash_short" or name == "pwrite"]
            for index in (points[i] for i in indices(len(points), shift)):
                root = walker.fault(action, value, rank, index, ops[index])
                status = in_child(partial(walker.run, root, rank, [(index, action, value)]))
                assert status == KILLED, walker.where
                steps = walker.allowed(index + (action == "crash_after"), exact=True)
                if len(kinds) == 2:  # calls from Python say nothing of the commit
                    steps = [OLD, *walker.cycle.steps]
                elif walker.cycle.ranks > 1 or walker.cycle.restore is not None:
                    steps = [OLD, *walker.cycle.steps] if rank else walker.allowed(index, exact=False)
                walker.check(root, steps, walker.where)


def walk_power_losses(walker: Walker, indices: Indices, losses: int) -> None:
    """The machine dies before each operation; what was not synced is lost in part, torn or out of order."""
    ops = walker.ops[0]
    for index in indices(len(ops) + 1, 0):
        killed = walker.fault("power loss", index, ops[index : index + 1])
        status = in_child(partial(walker.run, killed, 0, [(index, "crash_before", 0)]))
        assert status == (KILLED if index < len(ops) else 0)
        log = [(name, path.replace(str(walker.logged), str(killed))) for name, path in ops[:index]]
        first, last = newest(durable_commits(log), index), newest(commits(log), index)
        left = pending(log, killed, walker.old)
        for number in range(losses):
            root, chance = walker.fresh(), Random(f"{index} {number}")
            shutil.rmtree(root)
            shutil.copytree(killed, root)
            lost = lose(left, root, killed, walker.old, chance)
            steps = [step for step in (OLD, *walker.cycle.steps) if first <= step <= last]
            walker.where = ("power loss", index, ops[index : index + 1], lost)
            walker.check(root, steps, walker.where)
        shutil.rmtree(killed)


class Walk(NamedTuple):
    """One walk of the counted run: a kind of save and a kind of fault. run: does it, at some operations."""

    name: str
    cycle: Cycle
    run: Callable[[Walker, Indices], None]


def all_walks(losses: int = LOSSES) -> list[Walk]:
    """Every kind of fault in every kind of save, the longest first."""
    found = []
    for name, cycle in {**CYCLES, **PLACES}.items():
        is_log = isinstance(cycle.ios()[0], _C.FaultIo)  # system calls of the extension
        if name in CYCLES and cycle.ranks == 1 and name != "restore":  # else the losses' order is not that of the log
            found.append(Walk(f"{name}: power", cycle, lambda w, i: walk_power_losses(w, i, losses)))
        if cycle.ranks == 1:
            found.append(Walk(f"{name}: errors", cycle, walk_errors))
        else:  # one rank gets the error, the other learns of it
            found.append(Walk(f"{name}: errors once", cycle, lambda w, i: walk_errors(w, i, (False,))))
            found.append(Walk(f"{name}: errors that stay", cycle, _errors_that_stay))
        if is_log or name == "tier's data":
            found.append(Walk(f"{name}: short", cycle, walk_short))
        if name != "restore":
            found.append(Walk(f"{name}: kills", cycle, walk_kills))
    return sorted(found, key=lambda walk: (walk.cycle.ranks == 1, not walk.name.endswith(("power", "stay", "once"))))


def _errors_that_stay(walker: Walker, indices: Indices) -> None:
    """The other rank cannot be told and waits for a time limit, so these are some of all."""
    walk_errors(walker, lambda count, shift: indices(count, shift)[:: len(walker.cycle.errors)], (True,))


def every(stride: int) -> Indices:
    """Every so many operations, others for each kind of fault; 1: all."""
    return lambda count, shift: range((shift * 7 + 5) % min(stride, max(1, count)), count, stride)


class Running:
    """One walk in a child process, which tells its faults by bytes on a pipe and a loss by a text."""

    def __init__(self, walk: Walk, folder: Path, stride: int) -> None:
        self.name, self.count, self.began, self.text = walk.name, 0, time.monotonic(), b""
        self.pipe, told = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.pipe)
            _walk_in_child(walk, folder, stride, told)
        os.close(told)

    def read(self) -> bool:
        """Takes what was told; False at the end of the process."""
        data = os.read(self.pipe, 1 << 16)
        self.count += data.count(_ONE)
        self.text += data.replace(_ONE, b"")
        return bool(data)

    def end(self, kill: bool = False) -> int:
        """Waits for the process, or ends it; returns its exit status."""
        if kill:
            os.kill(self.pid, signal.SIGKILL)
        os.close(self.pipe)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _walk_in_child(walk: Walk, folder: Path, stride: int, told: int) -> None:
    status = 1
    walker = None
    try:
        small_blocks()
        folder.mkdir()
        walker = Walker(walk.cycle, folder, lambda: _tell(told, _ONE))
        walk.run(walker, every(stride))
        status = 0
    except BaseException:
        where = "the run without a fault" if walker is None else walker.where
        _tell(told, f"LOST in {walk.name}: {where}\n{traceback.format_exc()}".encode())
    finally:
        os._exit(status)


def _tell(told: int, data: bytes) -> None:
    while data:
        data = data[os.write(told, data) :]


def run_walks(
    walks: Sequence[Walk], stride: int, workers: int, say: Callable[[str], None], folder: Path | None = None
) -> dict[str, Any]:
    """Runs the walks, so many at once, until all are through or something is lost; returns the record. folder: where
    the snapshots are, in memory without.

    Keys: faults, seconds, walks ({name: faults}), lost (a list of texts, empty when nothing is).
    """
    began = said = time.monotonic()
    waiting, running, lost = list(walks), list[Running](), list[str]()
    counts: dict[str, int] = {}
    place = folder or Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix="plait-faults-", dir=place) as inside:
        while (waiting and not lost) or running:
            while waiting and not lost and len(running) < workers:
                running.append(Running(waiting[0], Path(inside) / f"walk-{len(waiting)}", stride))
                del waiting[0]
            ready, _, _ = select.select([run.pipe for run in running], [], [], 5.0)
            for run in [run for run in running if run.pipe in ready and not run.read()]:
                running.remove(run)
                status, counts[run.name] = run.end(), run.count
                say(f"  {run.name}: {run.count} faults in {time.monotonic() - run.began:.0f} s")
                if status != 0:
                    lost.append(run.text.decode(errors="replace") or f"LOST in {run.name}: it ended with {status}")
            if lost:
                for run in running:
                    counts[run.name] = run.count
                    run.end(kill=True)
                running = []
            if time.monotonic() > said + 10.0:
                said = time.monotonic()
                faults = sum(counts.values()) + sum(run.count for run in running)
                say(f"{faults} faults, {len(lost)} lost, {said - began:.0f} s")
    walked = dict(sorted(counts.items()))
    return {"faults": sum(counts.values()), "seconds": time.monotonic() - began, "walks": walked, "lost": lost}


def _commit() -> str:
    """The last commit of what is walked, with "+" where files differ from it; empty outside of git."""
    paths = ["ckpt", "csrc", *(f"tests/{name}.py" for name in ("walk", "cycles", "faults", "power", "history"))]

    def git(*command: str) -> str:
        where = RECORD.parents[2]
        return subprocess.run(
            ["git", *command, "--", *paths], cwd=where, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("log", "-1", "--format=%h") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _history(options: argparse.Namespace) -> int:
    heading = {"date": time.strftime("%Y-%m-%d %H:%M"), "commit": _commit()}
    record = history.run(options.history, folder=options.folder)
    print(*record["lost"], json.dumps(record["events"]), sep="\n", flush=True)
    if not record["lost"]:
        path = options.record.with_name("history.json")
        path.write_text(json.dumps({**heading, **record}, indent=1) + "\n")
    return 1 if record["lost"] else 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Counts injected faults and what they lost.")
    parser.add_argument("--faults", type=int, default=10_000, help="at least so many where all walks have as many")
    parser.add_argument("--workers", type=int, default=3, help="walks at once; those of two ranks mostly wait")
    parser.add_argument("--only", default="", help="walks whose name begins so; nothing is recorded")
    parser.add_argument("--folder", type=Path, help="where snapshots are written; without: in memory")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--history", type=float, help="instead: so many seconds of history.py, into history.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.history is not None:
        return _history(options)
    walks = [walk for walk in all_walks() if walk.name.startswith(options.only)]
    stride = max(1, WHOLE // options.faults)
    heading = {"date": time.strftime("%Y-%m-%d %H:%M"), "commit": _commit()}
    record = run_walks(walks, stride, options.workers, lambda text: print(text, flush=True), options.folder)
    print(*record["lost"], sep="\n")
    print(f"{record['faults']} faults, {len(record['lost'])} lost, {record['seconds']:.0f} s", flush=True)
    if record["lost"]:
        return 1
    if not options.only and record["faults"] < options.faults:
        print(f"fewer than --faults {options.faults}: all there are", flush=True)
        return 2
    if not options.only:
        options.record.write_text(
            json.dumps({**heading, **record, "seconds": round(record["seconds"])}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
