"""Crash consistency of one save + commit + retention: killed, failed or cut short at every operation.

After each fault exactly two outcomes are legal: the old snapshot restores bit for bit, or the new one does; and the
next save works. The state has 64 KiB and one writer thread, so that operations have one fixed order.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
import traceback
from pathlib import Path
from random import Random

import pytest
import torch

from plait import _C
from plait.ckpt import Sharded, Snapshots
from plait.ckpt.folders import leftovers, step_folders
from tests.faults import KILLED, count_ops, failing, in_child, on_ranks, restored_seed, small_state

OLD, NEW, NEXT = 1, 2, 3


def save_new(root: Path, io: _C.Io) -> None:
    """The cycle under test: open the run, save, commit, retain one, close."""
    with Snapshots(root, keep_last=1, threads=1, io=io) as snapshots:
        snapshots.save(NEW, small_state(NEW))


@pytest.fixture
def old(memory_path):
    """A run with the old snapshot; each fault works on a copy of it."""
    root = memory_path / "old"
    with Snapshots(root, keep_last=1) as snapshots:
        snapshots.save(OLD, small_state(OLD))
    return root


def fresh(old: Path, name: str) -> Path:
    return Path(shutil.copytree(old, old.parent / name))


def check_and_go_on(root: Path, allowed: tuple[int, ...], where: object) -> int:
    """Checks the invariants after a fault, then saves again. Returns the seed that restored."""
    seed = restored_seed(root)
    assert seed in allowed, where
    assert Snapshots(root, read_only=True).latest() == seed, where
    with Snapshots(root, keep_last=1) as snapshots:
        assert leftovers(root, "f" * 16) == [], where  # whoever takes the LOCK has cleaned up
        assert snapshots.latest() == seed
        snapshots.save(NEXT, small_state(NEXT))
    assert restored_seed(root) == NEXT, where
    assert [f.step for f in step_folders(root)] == [NEXT], where
    return seed


def test_operations_are_in_the_order_of_the_page(old):
    """Case L15: data synced < fragment < manifest < rename < folder synced < LATEST < retention."""
    ops = count_ops(lambda io: save_new(fresh(old, "order"), io))
    names = [(name, path.rpartition("/")[2]) for name, path in ops]

    def at(name: str, tail: str) -> int:
        return next(i for i, op in enumerate(names) if op[0] == name and op[1].endswith(tail))

    order = [
        at("fdatasync", "r00000.safetensors"),
        at("close", "r00000.safetensors"),
        at("fsync", "r00000.json.part"),
        at("rename", "r00000.json"),
        at("fsync", "objects.json"),
        at("fsync", "MANIFEST.json.part"),
        at("rename", "MANIFEST.json"),
        at("rename", "step-000000002"),
    ]
    assert order == sorted(order)
    commit = order[-1]
    assert ops[commit + 1][0] == "fsync_dir" and ops[commit + 1][1].endswith("/order")
    assert ops[commit - 1][0] == "fsync_dir" and ".tmp-2-" in ops[commit - 1][1]
    assert at("rename", "LATEST") > commit + 1
    assert next(i for i, (n, p) in enumerate(ops) if n == "rename" and ".trash-" in p) > at("rename", "LATEST")
    assert not [op for op in names[:commit] if op[0] in ("unlink", "rmdir")]


def test_nothing_of_the_attempt_is_touched_after_a_rank_said_it_is_done(tmp_path):
    """Rank 0 may rename the folder as soon as it sees the last fragment: a later fsync of it failed the save."""
    ios = [_C.FaultIo([]), _C.FaultIo([])]

    def save(rank: int) -> None:
        with Snapshots(tmp_path, rank=rank, world_size=2, session=5, threads=1, io=ios[rank]) as snapshots:
            snapshots.save(NEW, {"w": torch.arange(64 << 10)}).wait()

    on_ranks(2, save)
    ops = [(name, path) for name, path in ios[1].ops if ".tmp-2-" in path]
    assert ops[-1][0] == "rename" and ops[-1][1].endswith("r00001.json")
    assert ("fsync_dir", ops[-1][1].rpartition(" -> ")[2].rpartition("/")[0]) in ops


@pytest.mark.parametrize("action", ["crash_before", "crash_after"])
def test_killed_at_every_operation(old, action):
    """Cases 12, L9, L10: kill -9 at each operation of the cycle; one allowed outcome on either side of the commit."""
    ops = count_ops(lambda io: save_new(fresh(old, "count"), io))
    commit = next(i for i, (name, path) in enumerate(ops) if name == "rename" and path.endswith("step-000000002"))
    assert len(ops) > 30
    for index in range(len(ops)):
        root = fresh(old, f"{action}-{index}")
        status = in_child(lambda r=root, i=index: save_new(r, _C.FaultIo([(i, action, 0)])))
        assert status == KILLED, (index, ops[index], status)
        done = index > commit or (index == commit and action == "crash_after")
        check_and_go_on(root, (NEW,) if done else (OLD,), (index, ops[index]))
        shutil.rmtree(root)


def test_killed_in_the_middle_of_every_write(old):
    ops = count_ops(lambda io: save_new(fresh(old, "count"), io))
    writes = [i for i, (name, _) in enumerate(ops) if name == "pwrite"]
    assert len(writes) >= 5
    for index in writes:
        for num_bytes in (1, 512, 4096):
            root = fresh(old, f"torn-{index}-{num_bytes}")
            status = in_child(lambda r=root, i=index, n=num_bytes: save_new(r, _C.FaultIo([(i, "crash_short", n)])))
            assert status == KILLED
            check_and_go_on(root, (OLD, NEW), (index, ops[index]))
            shutil.rmtree(root)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("sticky", [False, True], ids=["once", "from_there_on"])
def test_an_error_at_every_operation(old, number, sticky):
    """Case L13: the error is raised with its path, its own remains go as far as possible, the next save works."""
    ops = count_ops(lambda io: save_new(fresh(old, "count"), io))
    commit = next(i for i, (name, path) in enumerate(ops) if name == "rename" and path.endswith("step-000000002"))
    raised = 0
    for index in range(len(ops)):
        root = fresh(old, f"error-{index}")
        try:
            save_new(root, _C.FaultIo([(index, "errno", number)], sticky=sticky))
        except OSError as error:
            raised += 1
            assert error.errno == number and "'" in str(error), (index, ops[index])
            if not sticky:
                # an error in the one clean-up operation itself cannot be cleaned up; none of these is one
                assert not [n for n in os.listdir(root) if n.startswith(".tmp-")], (index, ops[index])
        allowed = (OLD,) if index < commit else (OLD, NEW) if index <= commit + 1 else (NEW,)
        if raised == 0 or ops[index][0] in TOLERATED:
            allowed = (OLD, NEW)
        check_and_go_on(root, allowed, (index, ops[index]))
        shutil.rmtree(root)
    assert raised > len(ops) * 2 // 3


# Operations whose failure has a working second way (direct I/O, preallocation): the save may still succeed.
TOLERATED = {"set_direct", "fallocate", "free_bytes", "pwrite", "file_size", "pread"}


@pytest.mark.parametrize("num_bytes", [1, 100, 511])
def test_short_writes_at_every_write_still_give_the_new_snapshot(old, num_bytes):
    ops = count_ops(lambda io: save_new(fresh(old, "count"), io))
    for index in [i for i, (name, _) in enumerate(ops) if name == "pwrite"]:
        root = fresh(old, f"short-{index}")
        save_new(root, _C.FaultIo([(index, "short", num_bytes)]))
        assert restored_seed(root) == NEW
        shutil.rmtree(root)


def test_a_failed_sync_is_never_tried_again(old):
    """fsyncgate: after one EIO the kernel may have dropped the pages; a second fsync that succeeds means nothing."""
    ops = count_ops(lambda io: save_new(fresh(old, "count"), io))
    for index in [i for i, (name, _) in enumerate(ops) if name in ("fdatasync", "fsync")]:
        root = fresh(old, f"sync-{index}")
        io = _C.FaultIo([(index, "errno", errno.EIO)])
        with pytest.raises(OSError):
            save_new(root, io)
        again = [op for op in io.ops[index + 1 :] if op == io.ops[index]]
        assert not again, ops[index]
        shutil.rmtree(root)


def test_removal_that_is_killed_twice_is_finished_by_the_third(old):
    """Recovery is itself crash-safe: kill at every operation of the clean-up of a dead attempt."""
    ops = count_ops(lambda io: save_new(fresh(old, "count"), io))
    before_rename = next(i for i, (n, p) in enumerate(ops) if n == "rename" and p.endswith("step-000000002"))
    left = fresh(old, "left")
    assert in_child(lambda: save_new(left, _C.FaultIo([(before_rename, "crash_before", 0)]))) == KILLED
    assert leftovers(left, "f" * 16)
    recovery = count_ops(lambda io: Snapshots(fresh(left, "recovery-count"), io=io).close())
    assert len(recovery) >= 5
    for index in range(len(recovery)):
        root = Path(shutil.copytree(left, old.parent / f"recovery-{index}"))
        assert in_child(lambda r=root, i=index: Snapshots(r, io=_C.FaultIo([(i, "crash_before", 0)]))) == KILLED
        check_and_go_on(root, (OLD,), (index, recovery[index]))
        shutil.rmtree(root)


def test_a_leftover_attempt_of_the_same_step_is_no_obstacle(old):
    """Case 15: the attempt's name is new at every launch."""
    root = fresh(old, "leftover")
    dead = root / f".tmp-{NEW}-{'0' * 15}1-1"
    dead.mkdir()
    (dead / "r00000.safetensors").write_bytes(b"half")
    (root / "LATEST.part").write_bytes(b"step-")
    save_new(root, _C.PosixIo())
    assert restored_seed(root) == NEW and leftovers(root, "f" * 16) == []


def test_disk_full_is_foreseen_before_a_byte_moves(tmp_path, monkeypatch):
    monkeypatch.setattr("plait.ckpt.part.free_space", lambda io, path: 1000)
    with Snapshots(tmp_path) as snapshots:
        with pytest.raises(OSError, match="are needed, 1000 are free") as caught:
            snapshots.save(1, small_state(1)).wait()
    assert caught.value.errno == errno.ENOSPC


def test_a_real_full_disk_leaves_nothing_and_the_next_save_works(tmp_path):
    """The disk fills up while data is preallocated; it is empty again after the clean-up."""
    snapshots = Snapshots(tmp_path, io=failing("fallocate", errno.ENOSPC))
    with pytest.raises(OSError, match="fallocate"):
        snapshots.save(1, small_state(1)).wait()
    snapshots.close()
    assert sorted(os.listdir(tmp_path)) == ["LOCK", "RUN.json"]
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(2, small_state(2))
    assert restored_seed(tmp_path) == 2


def rank_state(seed: int, rank: int) -> dict:
    """A sharded and a replicated part, each with the seed in every element."""
    full = torch.full((4, 300_000), float(seed))
    return {
        "w": Sharded(full[rank : rank + 1], (4, 300_000), (rank, 0)),
        "rep": torch.full((900_000,), seed),
        "n": seed,
    }


@pytest.mark.parametrize("victim", [0, 2])
def test_kill_9_of_one_of_four_processes_during_saves(tmp_path, victim):
    """No process group: rank `victim` dies by SIGKILL somewhere in a save, then the launcher ends the rest."""
    for round_number in range(3):
        read, write = os.pipe()
        pids = []
        for rank in range(4):
            pid = os.fork()
            if pid == 0:
                os._exit(_rank_main(tmp_path, rank, round_number, write if rank == victim else -1))
            pids.append(pid)
        os.close(write)
        assert os.read(read, 1) == b"x", "the victim failed before its second save"
        for pid in [pids[victim], *pids]:
            os.kill(pid, signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        os.close(read)
        assert codes[victim] == -signal.SIGKILL
        state = {"w": torch.zeros(4, 300_000), "rep": torch.zeros(900_000, dtype=torch.int64), "n": 0}
        restored = Snapshots(tmp_path, read_only=True).restore(state)
        seed = restored.values["n"]
        assert seed == restored.step and seed in (10 * round_number + 1, 10 * round_number + 2)
        assert state["w"].eq(seed).all() and state["rep"].eq(seed).all()


@pytest.mark.long
def test_random_kills_of_random_ranks(tmp_path):
    """100 rounds: a random rank of three ends at a random operation; one whole snapshot restores, never an older."""
    random = Random(7)
    newest = 0
    for round_number in range(100):
        victim, index = random.randrange(3), random.randrange(60)
        action = random.choice(["crash_before", "crash_after", "crash_short"])
        pids = []
        for rank in range(3):
            pid = os.fork()
            if pid == 0:
                script = [(index, action, 100)] if rank == victim else []
                os._exit(_round_main(tmp_path, rank, round_number, _C.FaultIo(script)))
            pids.append(pid)
        os.waitpid(pids[victim], 0)
        for pid in pids[:victim] + pids[victim + 1 :]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        snapshots = Snapshots(tmp_path, read_only=True)
        if snapshots.latest() is None:
            assert newest == 0
            continue
        state = {"w": torch.zeros(4, 300_000), "rep": torch.zeros(900_000, dtype=torch.int64), "n": 0}
        seed = snapshots.restore(state).values["n"]
        assert seed >= newest and state["w"].eq(seed).all() and state["rep"].eq(seed).all()
        newest = seed


def _round_main(root: Path, rank: int, round_number: int, io: _C.Io) -> int:
    torch.set_num_threads(1)
    try:
        with Snapshots(
            root, keep_last=2, rank=rank, world_size=3, session=round_number, timeout_s=60, io=io
        ) as snapshots:
            for step in (2 * round_number + 1, 2 * round_number + 2):
                state = rank_state(step, rank)
                if rank == 2:  # three ranks hold four rows
                    state["w"] = Sharded(torch.full((2, 300_000), float(step)), (4, 300_000), (2, 0))
                snapshots.save(step, state)
    except BaseException:
        return 1
    return 0


def _rank_main(root: Path, rank: int, round_number: int, signal_fd: int) -> int:
    torch.set_num_threads(1)  # the parent's thread pool does not survive a fork
    try:
        snapshots = Snapshots(
            root, rank=rank, world_size=4, session=round_number + 1, timeout_s=60, threads=1, rate_limit=4 << 20
        )
        snapshots.save(10 * round_number + 1, rank_state(10 * round_number + 1, rank)).wait()
        snapshots.save(10 * round_number + 2, rank_state(10 * round_number + 2, rank))
        if signal_fd >= 0:
            os.write(signal_fd, b"x")
            time.sleep(30)
        snapshots.close()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def test_four_ranks_write_each_byte_once(tmp_path):
    def save(rank):
        with Snapshots(tmp_path, rank=rank, world_size=4, session=1) as snapshots:
            handle = snapshots.save(1, rank_state(1, rank))
            handle.wait()
            return handle.nbytes

    written = on_ranks(4, save)
    assert sum(written) == 4 * 300_000 * 4 + 900_000 * 8
    assert max(written) < 1.5 * min(written)


def test_many_ranks_cost_a_fragment_each_and_a_slice_reads_one_data_file(tmp_path):
    """Cases 8, 38 and 42: rank 0 reads each fragment once, whatever is in it, and alone writes what all ranks have;
    replicated scalars and small boxes are not spread over the ranks' files, so a slice opens one of 16."""
    ranks, tp = 16, 2
    full = {f"w{i}": torch.arange(4096.0).reshape(64, 64) + i for i in range(20)}

    def shards(rank: int) -> dict[str, Sharded]:
        row, replica = 32 * (rank % tp), (rank // tp, ranks // tp)
        return {n: Sharded(w[row : row + 32].clone(), (64, 64), (row, 0), replica=replica) for n, w in full.items()}

    def save(rank: int) -> list[tuple[str, str]]:
        io = _C.FaultIo([])
        scalars = {f"s{i}": torch.tensor(float(i)) for i in range(50)}
        with Snapshots(tmp_path, rank=rank, world_size=ranks, session=1, threads=1, io=io) as snapshots:
            snapshots.save(1, {"w": shards(rank), "scalars": scalars}).wait()
        return list(io.ops)

    ops = on_ranks(ranks, save)
    fragments = [Path(path).name for name, path in ops[0] if name == "open" and "/r0" in path and ".json" in path]
    assert set(fragments) >= {f"r{rank:05d}.json" for rank in range(1, ranks)}
    assert max(fragments.count(name) for name in set(fragments)) <= 2
    assert all(name != "open" or "/r0" not in path or f"r{5:05d}" in path for name, path in ops[5])
    assert {rank for rank in range(ranks) for name, path in ops[rank] if path.endswith("objects.json")} == {0}
    io, part = _C.FaultIo([]), {n: s.tensor for n, s in shards(1).items()}
    for tensor in part.values():
        tensor.fill_(-1)
    state = {"w": {n: Sharded(t, (64, 64), (32, 0)) for n, t in part.items()}, "scalars": {"s7": torch.tensor(-1.0)}}
    Snapshots(tmp_path, read_only=True, io=io).restore(state, allow_unexpected=["scalars/*"])
    assert all(torch.equal(part[n], full[n][32:]) for n in full) and state["scalars"]["s7"] == 7
    opened = {path for name, path in io.ops if name == "open" and path.endswith(".safetensors")}
    assert len(opened) == 2  # the slice's own, and that of the scalars
