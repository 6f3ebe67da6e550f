"""A fault at every operation of every kind of save: errors, short and torn writes, kills, power loss.

`make test` takes every few of them, `make test-long` all, and prints how many faults were injected (conftest.py).
Each kind of save is a Cycle of walk.py; its docstring says what must hold after each fault.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest

from plait import _C
from plait.ckpt import SnapshotError, capture, part
from tests.faults import KILLED, in_child
from tests.power import lose, pending
from tests.walk import CYCLES, OLD, Cycle, check_and_go_on, commits, durable_commits, make_old, newest

ERRORS = {
    "EIO once": (errno.EIO, False),
    "EIO from there on": (errno.EIO, True),
    "ENOSPC once": (errno.ENOSPC, False),
    "ENOSPC from there on": (errno.ENOSPC, True),
    "EINTR once": (errno.EINTR, False),
    "EINTR from there on": (errno.EINTR, True),
}
CUTS = (1, 511, 512, 4096)  # bytes of a short or torn write
ONE_RANK = [name for name in CYCLES if CYCLES[name].ranks == 1]
LOSSES = 24  # ways of losing what was not synced, at each operation of the long walk


@pytest.fixture(params=CYCLES)
def cycle(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cycle:
    """A kind of save. Blocks of 1 MiB, so that a small state needs slabs."""
    for module in (capture, part):
        monkeypatch.setattr(module, "BLOCK_BYTES", 1 << 20)
    return CYCLES[request.param]


@pytest.fixture
def thinned(cycle: Cycle) -> Callable[[int, int], range]:
    """Gives the operations to walk: one in 47 for a rank, another one for each kind of fault."""
    stride = 47 * cycle.ranks
    return lambda count, shift: range((shift * 7 + 5) % stride, count, stride)


class Walker:
    """One cycle on copies of one run. ops: of each rank, without a fault. count: faults injected."""

    def __init__(self, cycle: Cycle, folder: Path) -> None:
        self.cycle, self.folder = cycle, folder
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

    def ios(self, scripts: dict[int, _C.FaultIo]) -> list[_C.FaultIo]:
        """One Io a rank, counting unless it is given."""
        return [scripts.get(rank, _C.FaultIo([])) for rank in range(self.cycle.ranks)]

    def run(self, root: Path, rank: int, script: list[tuple[int, str, int]], sticky: bool = False) -> bool:
        """Runs the cycle with a fault on one rank; returns whether it raised the OSError or an error about it."""
        try:
            self.cycle.run(root, self.ios({rank: _C.FaultIo(script, sticky=sticky)}), self.cycle.steps)
        except (OSError, SnapshotError):
            return True
        return False

    def check(self, root: Path, allowed: Sequence[int], where: object) -> None:
        """One fault has been injected: checks what must hold, and counts."""
        check_and_go_on(self.cycle, root, allowed, where)
        self.count += 1

    def allowed(self, index: int, exact: bool) -> list[int]:
        """Steps that may restore after a fault at an operation of rank 0: from what was committed before it."""
        before = newest(commits(self.ops[0]), index)
        steps = [step for step in (OLD, *self.cycle.steps) if step >= before]
        return steps[:1] if exact else steps


def walk_errors(
    walker: Walker, indices: Callable[[int, int], range], stickies: tuple[bool, ...] = (False, True)
) -> None:
    """An error at each operation; from there on too, where `stickies` has it: then two ranks wait for each other."""
    kinds = [(name, *error) for name, error in ERRORS.items() if error[1] in stickies]
    for shift, (name, number, sticky) in enumerate(kinds):
        for rank, ops in enumerate(walker.ops):
            for index in indices(len(ops), shift):
                root, where = walker.fresh(), (name, rank, index, ops[index])
                raised = walker.run(root, rank, [(index, "errno", number)], sticky)
                steps = walker.allowed(index if rank == 0 else 0, exact=False)
                if name == "EINTR once":
                    assert not raised, where
                if not raised and not sticky and ops[index][0] != "statvfs":
                    steps = list(walker.cycle.steps[-1:])
                walker.check(root, steps, where)


def walk_short_writes(walker: Walker, indices: Callable[[int, int], range]) -> None:
    for shift, num_bytes in enumerate(CUTS):
        for rank, ops in enumerate(walker.ops):
            writes = [i for i, (name, _) in enumerate(ops) if name == "pwrite"]
            for index in (writes[i] for i in indices(len(writes), shift)):
                root, where = walker.fresh(), ("short", num_bytes, rank, index, ops[index])
                assert not walker.run(root, rank, [(index, "short", num_bytes)]), where
                walker.check(root, walker.cycle.steps[-1:], where)


def walk_kills(walker: Walker, indices: Callable[[int, int], range]) -> None:
    """kill -9 before, after and in the middle of each operation; of all ranks, as when a machine dies."""
    kinds = [("crash_before", 0), ("crash_after", 0), *(("crash_short", n) for n in CUTS)]
    for shift, (action, value) in enumerate(kinds):
        for rank, ops in enumerate(walker.ops):
            points = [i for i, (name, _) in enumerate(ops) if action != "crash_short" or name == "pwrite"]
            for index in (points[i] for i in indices(len(points), shift)):
                root, where = walker.fresh(), (action, value, rank, index, ops[index])
                status = in_child(lambda r=root, k=rank, s=(index, action, value): walker.run(r, k, [s]))
                assert status == KILLED, where
                steps = walker.allowed(index + (action == "crash_after"), exact=True)
                if walker.cycle.ranks > 1:
                    steps = [OLD, *walker.cycle.steps] if rank else walker.allowed(index, exact=False)
                walker.check(root, steps, where)


def walk_power_losses(walker: Walker, indices: Callable[[int, int], range], losses: int) -> None:
    """The machine dies before each operation; what was not synced is lost in part, torn or out of order."""
    ops = walker.ops[0]
    for index in indices(len(ops) + 1, 0):
        killed = walker.fresh()
        status = in_child(lambda r=killed, i=index: walker.run(r, 0, [(i, "crash_before", 0)]))
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
            walker.check(root, steps, (index, ops[index : index + 1], lost))
        shutil.rmtree(killed)


def test_a_fault_at_every_few_operations_loses_nothing(cycle, tmp_path, thinned):
    walker = Walker(cycle, tmp_path)
    walk_errors(walker, thinned, (False, True) if cycle.ranks == 1 else (False,))
    walk_short_writes(walker, thinned)
    walk_kills(walker, thinned)
    if cycle.ranks == 1:  # the operations of two ranks have no fixed order, which the losses need
        walk_power_losses(walker, thinned, 3)
    assert walker.count >= 5


def every(count: int, shift: int) -> range:
    """All operations."""
    return range(count)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["errors", "kills"])
def test_a_fault_at_every_operation_loses_nothing(cycle, kind, tmp_path, record_property):
    walker = Walker(cycle, tmp_path)
    if kind == "errors":
        walk_errors(walker, every)
        walk_short_writes(walker, every)
    else:
        walk_kills(walker, every)
    assert walker.count > 100
    record_property("faults", walker.count)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cycle", ONE_RANK, indirect=True)
def test_a_power_loss_at_every_operation_loses_nothing(cycle, tmp_path, record_property):
    walker = Walker(cycle, tmp_path)
    walk_power_losses(walker, every, LOSSES)
    assert walker.count > 100
    record_property("faults", walker.count)
