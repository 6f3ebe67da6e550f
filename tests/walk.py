"""Kinds of saves whose every operation can be made to fail, and what must hold after each fault.

Not tests: test_walk.py walks. The one idea: a run with the snapshot OLD is copied, a cycle of saves runs on the copy
with one fault, and then the newest snapshot that restores is whole, bit for bit, not older than what was durable
before the fault, and the next save works.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from plait import _C
from plait.ckpt import PerRank, Sharded, Snapshots
from plait.ckpt.folders import leftovers, step_folders
from tests.faults import on_ranks

OLD, NEXT = 1, 9
KEY = bytes(range(32))
TIMEOUT_S = 3.0  # how long a rank waits for one that failed in silence
LARGE = 20_000  # elements of what is captured lazily or, in slabs, strided

Ops = list[tuple[str, str]]
Ios = Sequence[_C.Io]


class Cycle(NamedTuple):
    """steps: what the cycle saves, in order. state: of a seed and rank; run: opens, saves, closes."""

    steps: tuple[int, ...]
    ranks: int
    state: Callable[[int, int], dict[str, Any]]
    run: Callable[[Path, Ios, tuple[int, ...]], None]
    key: bytes | None = None


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
        ranks: dict[str, Any] = {"rank": rank, "world_size": len(ios), "session": session, "timeout_s": TIMEOUT_S}
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


CYCLES = {
    "eager": _cycle(plain_state),
    "lazy": Cycle((2, 3), 1, lazy_state, _lazy),
    "slabs": _cycle(large_state, pool_bytes=1),
    "delta": _cycle(mostly_same_state, (2, 3), delta=True),
    "signed": _cycle(plain_state, key=KEY),
    "two ranks": _cycle(sharded_state, (2,), 2),
}


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


def restored(cycle: Cycle, root: Path, where: object) -> int:
    """Restores the newest good snapshot on each rank; returns its step after checking every bit."""
    session = secrets.randbits(60)

    def on_rank(rank: int) -> int:
        ranks: dict[str, Any] = {"rank": rank, "world_size": cycle.ranks, "session": session, "timeout_s": 20.0}
        options: dict[str, Any] = ranks if cycle.ranks > 1 else {}
        snapshots = Snapshots(root, read_only=True, key=cycle.key, **options)
        found = snapshots.restore(blank(cycle.state(0, rank)))
        assert same(found.values, cycle.state(found.step, rank)), f"not the bits of step {found.step}: {where}"
        return found.step

    steps = set(on_ranks(cycle.ranks, on_rank))
    assert len(steps) == 1, where
    return steps.pop()


def check_and_go_on(cycle: Cycle, root: Path, allowed: Sequence[int], where: object) -> None:
    """What must hold after any fault; removes the folder."""
    step = restored(cycle, root, where)
    assert step in allowed, f"step {step} was restored, not one of {allowed}: {where}"
    with ExitStack() as closing:
        if cycle.ranks == 1:
            owner = closing.enter_context(Snapshots(root, read_only=False, keep_last=1, threads=1, key=cycle.key))
            assert leftovers(root, "f" * 16) == [], where
            assert owner.latest() == step, where
    cycle.run(root, [_C.PosixIo() for _ in range(cycle.ranks)], (NEXT,))
    assert leftovers(root, "f" * 16) == [], where
    assert restored(cycle, root, where) == NEXT, where
    assert step_folders(root)[0].step == NEXT and len(step_folders(root)) <= 2, where
    shutil.rmtree(root)


def make_old(cycle: Cycle, root: Path) -> Path:
    """A run with the snapshot OLD."""
    cycle.run(root, [_C.PosixIo() for _ in range(cycle.ranks)], (OLD,))
    return root


def commits(ops: Ops) -> list[tuple[int, int]]:
    """(position of the rename, step) of each commit in a log."""
    found = []
    for index, (name, path) in enumerate(ops):
        match = re.search(r"/\.tmp-[^/]*$", path.partition(" -> ")[0])
        if name == "rename" and match:
            found.append((index, int(os.path.basename(path.partition(" -> ")[2])[5:14])))
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
