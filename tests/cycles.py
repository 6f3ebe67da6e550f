"""Kinds of saves whose every operation can be made to fail, and what must hold after each fault.

Not tests: walk.py walks. The one idea: a run with the snapshot OLD is copied, a cycle of saves runs on the copy with
one fault, and then the newest snapshot that restores is whole, bit for bit, not older than what was durable before
the fault, and the next save works. Wherever there is more than one place to restore from (disks, partners, tiers),
that holds for each.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed import HashStore

from plait import _C
from plait.ckpt import PerRank, Sharded, SnapshotError, SnapshotLocked, Snapshots, Tier, lease, lock
from plait.ckpt import store as store_module
from plait.ckpt.folders import leftovers, step_folders
from plait.ckpt.lock import RootLock
from plait.ckpt.partner import Partner
from plait.ckpt.remote import FsspecStore
from plait.ckpt.store import DirStore
from tests.faults import Calls, FaultyStore, faulty_os, on_ranks

OLD, NEXT = 1, 9
KEY = bytes(range(32))
SHORT_S, LONG_S = 2.0, 60.0  # how long a rank waits for one that may have failed in silence; for one that works
LARGE = 20_000  # elements of what is captured lazily or, in slabs, strided

Ops = list[tuple[str, str]]


class Ios(list[Any]):
    """A _C.Io, or what takes its place (faults.Calls), of each rank. timeout_s: how long a rank waits for another."""

    timeout_s = LONG_S


@dataclass(frozen=True)
class Cycle:
    """steps: what the cycle saves, in order. state: of a seed and rank. run: opens, saves, closes.

    save: makes OLD and goes on after a fault (None: `run` itself). restore: checks every bit of what restores from
    each place; returns the steps. roots: folders below the run's where nothing may be left over. fault: makes what
    numbers the operations and fails by a script. errors: that are thrown.
    """

    steps: tuple[int, ...]
    ranks: int
    state: Callable[[int, int], dict[str, Any]]
    run: Callable[[Path, Ios, tuple[int, ...]], None]
    key: bytes | None = None
    save: Callable[[Path, Ios, tuple[int, ...]], None] | None = None
    restore: Callable[[Cycle, Path, object], set[int]] | None = None
    roots: tuple[str, ...] = ("",)
    fault: Callable[[list[tuple[int, str, int]], bool], Any] = lambda script, sticky: _C.FaultIo(script, sticky)
    errors: tuple[int, ...] = (errno.EIO, errno.ENOSPC, errno.EINTR)

    def ios(self) -> Ios:
        """Of all ranks, without a fault; they count."""
        return Ios(self.fault([], False) for _ in range(self.ranks))

    def good_save(self, root: Path, steps: tuple[int, ...]) -> None:
        """Saves without a fault."""
        (self.save or self.run)(root, self.ios(), steps)


def bits(seed: int, numel: int) -> torch.Tensor:
    """float32 whose every element differs between seeds."""
    return torch.arange(numel, dtype=torch.float32) + 1_000_000 * seed


def plain_state(seed: int, rank: int = 0, numel: int = 3_000) -> dict[str, Any]:
    """A few tensors, a tied one, values and what belongs to one rank."""
    w = bits(seed, numel).reshape(-1, 10)
    return {
        "model": {"w": w, "tied": w, "odd": bits(seed, 77)[::2], "half": bits(seed, 33).half(), "none": w[:0]},
        "step": seed,
        "loss": seed / 3,
        "rng": PerRank(bytes([seed, rank] * 5)),
    }


def sharded_state(seed: int, rank: int) -> dict[str, Any]:
    """Rows of two ranks, and what both hold."""
    rows = bits(seed, 4_000).reshape(4, 1_000)[2 * rank : 2 * rank + 2].clone()
    return {
        "w": Sharded(rows, (4, 1_000), (2 * rank, 0)),
        "both": bits(seed, 2_000),
        "step": seed,
        "rng": PerRank(bytes([seed, rank] * 5)),
    }


def large_state(seed: int, rank: int = 0) -> dict[str, Any]:
    """More than a pool of 2 MiB holds."""
    return plain_state(seed, rank, 700_000)


def mostly_same_state(seed: int, rank: int = 0) -> dict[str, Any]:
    """Nine tenths are the same in each seed."""
    return {"frozen": bits(0, 30_000), "w": bits(seed, 3_000), "step": seed, "rng": PerRank(bytes([seed, rank] * 5))}


def _save_all(root: Path, ios: Ios, steps: tuple[int, ...], state: Any = plain_state, **options: Any) -> None:
    options = {"keep_last": 1, "threads": 1, **options}
    if len(ios) == 1:
        with Snapshots(root, io=ios[0], **options) as snapshots:
            for step in steps:
                snapshots.save(step, state(step, 0))
        return

    session = secrets.randbits(60)

    def rank_main(rank: int) -> None:
        ranks: dict[str, Any] = {"rank": rank, "world_size": len(ios), "session": session, "timeout_s": ios.timeout_s}
        with Snapshots(root, io=ios[rank], **ranks, **options) as snapshots:
            for step in steps:
                snapshots.save(step, state(step, rank))

    on_ranks(len(ios), rank_main)


def _lazy(root: Path, ios: Ios, steps: tuple[int, ...]) -> None:
    """Each save returns before its tensors are captured, and the optimizer writes to them at once."""
    w = torch.nn.Parameter(bits(steps[0], LARGE))
    optimizer = torch.optim.SGD([w], lr=1.0)
    with Snapshots(root, io=ios[0], keep_last=1, threads=1) as snapshots:
        snapshots.guard(optimizer)
        for step in steps:
            w.grad = w.detach() - bits(step, LARGE)
            optimizer.step()
            snapshots.save(step, {**lazy_state(step), "w": w})
            w.grad = torch.full_like(w, 0.5)
            optimizer.step()


def lazy_state(seed: int, rank: int = 0) -> dict[str, Any]:
    """What `_lazy` saves."""
    return {"w": bits(seed, LARGE), "step": seed, "rng": PerRank(bytes([seed, rank] * 5))}


def _cycle(state: Any, steps: tuple[int, ...] = (2,), ranks: int = 1, **options: Any) -> Cycle:
    return Cycle(
        steps,
        ranks,
        state,
        lambda root, ios, steps: _save_all(root, ios, steps, state, **options),
        options.get("key"),
    )


def blank(state: dict[str, Any]) -> dict[str, Any]:
    """The same structure with nothing in it."""

    def clear(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clear(v) for key, v in value.items()}
        if isinstance(value, Sharded):
            return Sharded(torch.zeros_like(value.tensor), value.full_shape, value.offset)
        if isinstance(value, torch.Tensor):
            return torch.zeros_like(value)
        return PerRank(b"") if isinstance(value, PerRank) else type(value)(0)

    cleared = clear(state)
    if "model" in cleared:
        cleared["model"]["tied"] = cleared["model"]["w"]
    return cleared


def same(found: Any, wanted: Any) -> bool:
    """True when values that were restored are those of a state, bit for bit."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, PerRank):
        return bool((found.value if isinstance(found, PerRank) else found) == wanted.value)
    if isinstance(wanted, Sharded):
        return same(found.tensor if isinstance(found, Sharded) else found, wanted.tensor)
    if isinstance(wanted, torch.Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    return type(found) is type(wanted) and bool(found == wanted)


def restored_by(
    cycle: Cycle, where: object, open_rank: Callable[[int, dict[str, Any]], Snapshots], alone: bool = False
) -> int:
    """Restores the newest good snapshot on each rank; returns its step after checking every bit."""
    session, leaving = secrets.randbits(60), threading.Barrier(cycle.ranks)

    def on_rank(rank: int) -> int:
        ranks: dict[str, Any] = {"rank": rank, "world_size": cycle.ranks, "session": session, "timeout_s": LONG_S}
        snapshots = open_rank(rank, {"read_only": True, "key": cycle.key, **(ranks if cycle.ranks > 1 else {})})
        try:
            found = snapshots.restore(blank(cycle.state(0, rank)))
            assert same(found.values, cycle.state(found.step, rank)), f"not the bits of step {found.step}: {where}"
        except BaseException:
            leaving.abort()
            raise
        leaving.wait(60.0)  # who serves another rank's files stays until that one has them
        snapshots.close()
        return found.step

    steps = set(on_ranks(cycle.ranks, on_rank))
    assert len(steps) == 1, where
    return steps.pop()


def _restored_here(cycle: Cycle, root: Path, where: object) -> set[int]:
    return {restored_by(cycle, where, lambda rank, options: Snapshots(root, **options))}


@contextmanager
def _view(root: Path) -> Iterator[Path]:
    """A folder beside the run's, gone afterwards."""
    folder = root.with_name(f"{root.name}-view")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_and_go_on(cycle: Cycle, root: Path, allowed: Sequence[int], where: object) -> None:
    """What must hold after any fault; removes the folder."""
    restore = cycle.restore or _restored_here
    steps = restore(cycle, root, where)
    assert steps <= set(allowed), f"steps {steps} were restored, not of {allowed}: {where}"
    if cycle.ranks == 1 and cycle.roots == ("",):
        with Snapshots(root, keep_last=1, threads=1, key=cycle.key) as owner:
            assert leftovers(root, "f" * 16) == [], where
            assert {owner.latest()} == steps, where
    cycle.good_save(root, (NEXT,))
    for folder in (root / name for name in cycle.roots):  # now: restores of several ranks leave their words
        assert leftovers(folder, "f" * 16) == [], where
        assert step_folders(folder)[0].step == NEXT and len(step_folders(folder)) <= 2, where
    assert restore(cycle, root, where) == {NEXT}, where
    shutil.rmtree(root)


def make_old(cycle: Cycle, root: Path) -> Path:
    """A run with the snapshot OLD."""
    cycle.good_save(root, (OLD,))
    return root


def commits(ops: Ops, on_disks: bool = False) -> list[tuple[int, int]]:
    """(position of the rename, step) of each commit in a log. on_disks: of the first one behind it that the rank does
    when it knows that all disks have renamed, which is to move LATEST."""
    found: list[tuple[int, int]] = []
    for index, (name, path) in enumerate(ops):
        if on_disks and found and name == "open" and path.endswith("/LATEST.part"):
            found[-1] = (index, found[-1][1])
        match = re.search(r"/\.tmp-[^/]*$", path.partition(" -> ")[0])
        if name == "rename" and match:
            found.append((len(ops) if on_disks else index, int(os.path.basename(path.partition(" -> ")[2])[5:14])))
    return found


def durable_commits(ops: Ops) -> list[tuple[int, int]]:
    """(position of the sync that makes it durable, step) of each commit in a log."""
    found = []
    for index, step in commits(ops):
        root = os.path.dirname(ops[index][1].partition(" -> ")[2])
        synced = [i for i in range(index + 1, len(ops)) if ops[i] == ("fsync_dir", root)]
        if synced:
            found.append((synced[0], step))
    return found


def newest(found: list[tuple[int, int]], before: int) -> int:
    """The step of the last of the commits at positions below `before`, or OLD."""
    return max([OLD, *(step for index, step in found if index < before)])


def _save_on_disks(root: Path, ios: Ios, steps: tuple[int, ...], partner: Partner | None = None) -> None:
    """Each rank has a root of its own; with a partner its data files are in both."""
    store, session = HashStore(), secrets.randbits(60)
    store.set_timeout(timedelta(seconds=ios.timeout_s))

    def rank_main(rank: int) -> None:
        ranks: dict[str, Any] = {"rank": rank, "world_size": 2, "session": session, "timeout_s": ios.timeout_s}
        more: dict[str, Any] = {"store": store, "partner": partner, "keep_last": 1, "threads": 1}
        with Snapshots(root / f"node{rank}", io=ios[rank], **ranks, **more) as snapshots:
            for step in steps:
                snapshots.save(step, sharded_state(step, rank))

    on_ranks(2, rank_main)


def _restored_from_union(cycle: Cycle, root: Path, where: object) -> set[int]:
    """From the folders of both disks, copied into one."""
    with _view(root) as union:
        for step in root.glob("node*/step-*"):
            shutil.copytree(step, union / step.name, dirs_exist_ok=True)
        return {restored_by(cycle, where, lambda rank, options: Snapshots(union, **options))}


def _restored_by_partners(cycle: Cycle, root: Path, where: object) -> set[int]:
    """With both nodes' memory, and without either's."""
    steps = set()
    for lost in (None, "node0", "node1"):
        with _view(root) as nodes:
            store = HashStore()
            shutil.copytree(root, nodes)
            if lost is not None:
                shutil.rmtree(nodes / lost)

            def open_rank(rank: int, options: dict[str, Any], nodes: Path = nodes, store: Any = store) -> Snapshots:
                return Snapshots(nodes / f"node{rank}", store=store, partner=Partner("127.0.0.1"), **options)

            steps.add(restored_by(cycle, (lost, where), open_rank))
    return steps


@dataclass(frozen=True)
class _FaultyTier(Tier):
    """Whose store fails by a script: a _C.Io, or Calls for a store that is asked by requests."""

    faults: Any = None

    def store(self, io: _C.Io, session: str) -> Any:
        if isinstance(self.faults, _C.Io):
            return DirStore(Path(self.url), self.faults, session)
        found = super().store(io, session)
        return FaultyStore(found, self.faults) if isinstance(found, FsspecStore) else found


def _far(root: Path, url: str) -> dict[str, Any]:
    return {"url": url.format(root=root), "options": {"auto_mkdir": True} if "://" in url else {}}


def _save_with_copies(root: Path, ios: Ios, steps: tuple[int, ...], url: str, coding: dict[str, Any]) -> None:
    """Faults are of the tier alone: the local snapshot is whole whatever happens there."""
    tier = _FaultyTier(**_far(root, url), **coding, keep_last=1, retry_s=0.0, faults=ios[0])
    in_python = isinstance(ios[0], Calls) and "://" not in url
    with faulty_os(ios[0], store_module) if in_python else nullcontext():
        with Snapshots(root / "near", keep_last=1, threads=1, tiers=[tier], key=KEY) as snapshots:
            for step in steps:
                handle = snapshots.save(step, plain_state(step))
                try:
                    handle.wait()
                except (OSError, SnapshotError) as error:
                    raise AssertionError(f"a fault of the tier harmed the local save of step {step}") from error
                handle.wait("remote")


def _restored_near_and_far(url: str) -> Callable[[Cycle, Path, object], set[int]]:
    def restore(cycle: Cycle, root: Path, where: object) -> set[int]:
        near = restored_by(cycle, where, lambda rank, options: Snapshots(root / "near", **options))
        tiers = (Tier(**_far(root, url)),)
        far = restored_by(cycle, where, lambda rank, options: Snapshots(root / "no", tiers=tiers, **options))
        assert far <= near, (far, near, where)
        return {near, far}

    return restore


def _copies(url: str = "{root}/far", fault: Any = None, **coding: Any) -> Cycle:
    return Cycle(
        (2,),
        1,
        plain_state,
        lambda root, ios, steps: _save_with_copies(root, ios, steps, url, coding),
        KEY,
        restore=_restored_near_and_far(url),
        roots=("near",) if "://" in url else ("near", "far"),
        **({} if fault is None else {"fault": fault, "errors": (errno.EIO, errno.ENOSPC)}),
    )


def _no_locks(fd: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def _save_as_owner(root: Path, ios: Ios, steps: tuple[int, ...], flock: bool) -> None:
    """Faults are of the files that say who owns the root. Nobody else comes in while this one may commit."""
    with nullcontext() if flock else mock.patch.object(fcntl, "flock", _no_locks):
        if not flock:
            dead = root / "LOCK.lease"  # whose owner was on a host that is gone: taken over
            root.mkdir(exist_ok=True)
            dead.write_text(json.dumps({"host": "gone", "pid": 1, "session": "d"}))
            os.utime(dead, (1.0, 1.0))
        with faulty_os(ios[0], lock, lease):
            snapshots = Snapshots(root, keep_last=1, threads=1)
        try:
            with faulty_os(ios[0], lock, lease):
                for step in steps:
                    snapshots.save(step, plain_state(step)).wait()
            _refuse_another(snapshots, root)
        finally:
            with faulty_os(ios[0], lock, lease):
                snapshots.close()


def _refuse_another(snapshots: Snapshots, root: Path) -> None:
    try:
        other = RootLock(root, "other")
    except SnapshotLocked:
        return
    try:
        assert snapshots._lock is not None
        snapshots._lock.check()
    except (OSError, SnapshotError):
        return
    finally:
        other.close()
    raise AssertionError("two own one root")


def _owner(flock: bool) -> Cycle:
    def run(root: Path, ios: Ios, steps: tuple[int, ...]) -> None:
        _save_as_owner(root, ios, steps, flock)

    return Cycle((2,), 1, plain_state, run, fault=Calls, errors=(errno.EIO, errno.ENOSPC, errno.ESTALE))


def _save_two(root: Path, ios: Ios, steps: tuple[int, ...]) -> None:
    _save_all(root, ios, tuple(s for step in steps for s in (step - 1, step)), keep_last=2)


def _restore_only(root: Path, ios: Ios, steps: tuple[int, ...]) -> None:
    """Faults are of the reading: what comes back has every bit, of the newest or of the one before."""
    found = Snapshots(root, read_only=True, threads=1, io=ios[0]).restore(blank(plain_state(0)))
    assert found.step in (OLD - 1, OLD) and same(found.values, plain_state(found.step)), found.step


CYCLES = {
    "eager": _cycle(plain_state),
    "lazy": Cycle((2, 3), 1, lazy_state, _lazy),
    "slabs": _cycle(large_state, pool_bytes=1),
    "delta": _cycle(mostly_same_state, (2, 3), delta=True),
    "signed": _cycle(plain_state, key=KEY),
    "over": _cycle(plain_state, (2, 3)),  # the third save writes over the first one's file
    "two ranks": _cycle(sharded_state, (2,), 2),
    "restore": Cycle((OLD,), 1, plain_state, _restore_only, save=_save_two),
}
_DISKS = ("node0", "node1")
PLACES = {  # of more than one place, and who owns one
    "disks": Cycle((2,), 2, sharded_state, _save_on_disks, restore=_restored_from_union, roots=_DISKS),
    "partner": Cycle(
        (2,),
        2,
        sharded_state,
        lambda root, ios, steps: _save_on_disks(root, ios, steps, Partner("127.0.0.1", timeout_s=ios.timeout_s)),
        restore=_restored_by_partners,
        roots=_DISKS,
    ),
    "tier": _copies(),
    "tier's data": _copies(fault=Calls),
    "coded tier": _copies(compress=True, encrypt=True),
    "object store": _copies("local://{root}/far", Calls),
    "coded objects": _copies("local://{root}/far", Calls, compress=True, encrypt=True),
    "lock": _owner(True),
    "lease": _owner(False),
}
