"""A save writes over the data files of the snapshot that retention removed last, and over nothing else.

Cases: what refers to a file besides us (a name, a descriptor, a mapping, a process, a mode that people gave it);
sizes that shrink and grow; each system call from the moment the file is taken until it is synced, failing or killed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from plait import _C
from plait.ckpt import Sharded, Snapshots, part, spare
from plait.ckpt import cli as snapshot_cli
from plait.ckpt.folders import leftovers
from plait.ckpt.keep import reading
from tests.faults import KILLED, count_ops, in_child, on_ranks

DATA = "r00000.safetensors"
READER = """
import sys
file = open(sys.argv[1], "rb")
print("open", flush=True)
sys.stdin.readline()
sys.stdout.buffer.write(file.read())
"""


def state(seed: int, numel: int = 30_001) -> dict[str, Any]:
    """Every element differs between seeds; sizes leave gaps and an odd end."""
    return {"w": torch.arange(numel, dtype=torch.float32) + 1_000_000 * seed, "odd": torch.full((77,), seed).byte()}


def data_file(root: Path, step: int) -> Path:
    return root / f"step-{step:09d}" / DATA


def save(snapshots: Snapshots, step: int, **options: Any) -> int:
    """Saves and returns the inode of the data file."""
    handle = snapshots.save(step, state(step, **options))
    handle.wait()
    assert handle.folder is not None
    return os.stat(handle.folder / DATA).st_ino


def trash(root: Path) -> list[Path]:
    return sorted(root.glob(".trash-*"))


def assert_is(root: Path, step: int, **options: Any) -> None:
    """The newest snapshot is that of a step, bit for bit."""
    values = {name: torch.zeros_like(value) for name, value in state(step, **options).items()}
    found = Snapshots(root, read_only=True).restore(values)
    assert found.step == step
    assert all(torch.equal(values[name], value) for name, value in state(step, **options).items())


def bytes_of_new(folder: Path, step: int, **options: Any) -> bytes:
    """What a data file holds that was made anew."""
    with Snapshots(folder, reuse_files=False) as snapshots:
        save(snapshots, step, **options)
    return data_file(folder, step).read_bytes()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("numel", [30_001, 1, 30_777, 1_200_000, 9_000])  # of the third save; 30,001 of the others
def test_the_third_save_is_in_the_file_of_the_first_and_holds_no_old_byte(tmp_path, numel, direct):
    root = tmp_path / "run"
    with Snapshots(root, keep_last=1, direct=direct) as snapshots:
        first, second = save(snapshots, 1), save(snapshots, 2)
        assert [path.name for path in trash(root)[0].iterdir()] == [DATA]  # no manifest, nothing else
        assert save(snapshots, 3, numel=numel) == first != second
        assert data_file(root, 3).read_bytes() == bytes_of_new(tmp_path / "new", 3, numel=numel)
        assert save(snapshots, 4) == second
        assert data_file(root, 4).read_bytes() == bytes_of_new(tmp_path / "new", 4)
        assert os.stat(data_file(root, 4)).st_mode & 0o7777 == 0o600
    assert trash(root) == []
    assert_is(root, 4)


@contextmanager
def hard_link(path: Path) -> Iterator[Any]:
    copy = path.parents[2] / "link"
    os.link(path, copy)
    yield copy.read_bytes


@contextmanager
def descriptor(path: Path) -> Iterator[Any]:
    with open(path, "rb") as file:
        yield file.read


@contextmanager
def mapping(path: Path, access: int = mmap.ACCESS_READ) -> Iterator[Any]:
    """Of a descriptor that is closed."""
    fd = os.open(path, os.O_RDONLY)
    mapped = mmap.mmap(fd, 0, access=access)
    os.close(fd)
    for held in os.listdir("/proc/self/fd"):  # Python's own copy of the descriptor
        if held.isdigit() and os.path.exists(f"/proc/self/fd/{held}"):
            if os.readlink(f"/proc/self/fd/{held}") == str(path):
                os.close(int(held))
    yield lambda: bytes(mapped)


@contextmanager
def process(path: Path) -> Iterator[Any]:
    child = subprocess.Popen([sys.executable, "-I", "-c", READER, path], stdin=-1, stdout=-1)
    assert child.stdout is not None and child.stdout.readline() == b"open\n"
    yield lambda: child.communicate(b"\n")[0]


@contextmanager
def mode(path: Path) -> Iterator[Any]:
    """Given to others to read."""
    os.chmod(path, 0o644)
    yield None


@pytest.mark.parametrize("reference", [hard_link, descriptor, mapping, process, mode])
def test_a_file_that_anything_else_refers_to_is_not_written_over(tmp_path, reference):
    root = tmp_path / "run"
    with Snapshots(root, keep_last=1) as snapshots:
        first = save(snapshots, 1)
        old = data_file(root, 1).read_bytes()
        with reference(data_file(root, 1)) as read:
            second = save(snapshots, 2)
            third = save(snapshots, 3)
            assert third != second and (third != first or read is None)  # an inode may be given out again
            assert data_file(root, 3).stat().st_mode & 0o777 == 0o600
            assert read is None or read() == old
        assert save(snapshots, 4) == second  # the next one again
    assert trash(root) == []
    assert_is(root, 4)


def test_without_leases_nothing_is_reused(tmp_path):
    """As on a file system that has none, or that cannot tell."""
    ops = count_ops(lambda io: cycle(tmp_path / "count", io))
    (asked,) = [i for i, (name, _) in enumerate(ops) if name == "is_sole"]
    io = _C.FaultIo([(asked, "errno", errno.EINVAL)])
    cycle(tmp_path / "run", io)
    assert [name for name, _ in io.ops[asked : asked + 4]] == ["is_sole", "close", "unlink", "open"]
    assert_is(tmp_path / "run", 3)


def test_one_that_is_read_is_neither_removed_nor_written_over(tmp_path):
    with Snapshots(tmp_path, keep_last=1) as snapshots:
        first, old = save(snapshots, 1), data_file(tmp_path, 1).read_bytes()
        with reading(tmp_path / "step-000000001"):
            assert first not in (save(snapshots, 2), save(snapshots, 3))
            assert data_file(tmp_path, 1).read_bytes() == old
    assert_is(tmp_path, 3)


def test_a_reader_with_a_lease_on_it_holds_no_save_up(tmp_path):
    """As a restore takes one, which may be stopped: the kernel lets a writer wait for 45 s."""
    with Snapshots(tmp_path, keep_last=1) as snapshots:
        first = save(snapshots, 1)
        save(snapshots, 2)
        with open(next(tmp_path.glob(f".trash-*/{DATA}")), "rb") as file:
            fcntl.fcntl(file, 10, signal.SIGURG)  # F_SETSIG
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            began = time.monotonic()
            assert save(snapshots, 3) != first and time.monotonic() - began < 20
    assert_is(tmp_path, 3)


def test_it_can_be_turned_off(tmp_path):
    io = _C.FaultIo()
    with Snapshots(tmp_path, keep_last=1, reuse_files=False, io=io) as snapshots:
        for step in (1, 2, 3):
            save(snapshots, step)
            assert trash(tmp_path) == []
    assert "is_sole" not in [name for name, _ in io.ops]


def test_where_the_file_system_cannot_tell_none_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(spare, "FILE_SYSTEMS", ("overlayfs",))
    with Snapshots(tmp_path, keep_last=1) as snapshots:
        for step in (1, 2, 3):
            save(snapshots, step)
            assert trash(tmp_path) == []


def test_only_the_one_removed_last_stays(tmp_path):
    with Snapshots(tmp_path, keep_last=4) as snapshots:
        for step in (1, 2, 3, 4):
            save(snapshots, step)
    with Snapshots(tmp_path, keep_last=2) as snapshots:
        save(snapshots, 5)
        assert [path.name.partition("-step-")[2] for path in trash(tmp_path)] == ["000000003"]


def test_each_rank_writes_over_its_own(tmp_path):
    meeting = threading.Barrier(2)

    def save_all(rank: int) -> list[int]:
        inodes = []
        with Snapshots(tmp_path, rank=rank, world_size=2, session=7, keep_last=1, timeout_s=60.0) as snapshots:
            for step in (1, 2, 3, 4):
                rows = torch.full((2, 30_000), float(10 * step + rank))
                handle = snapshots.save(step, {"w": Sharded(rows, (4, 30_000), (2 * rank, 0))})
                handle.wait()
                assert handle.folder is not None
                inodes.append(os.stat(handle.folder / f"r{rank:05d}.safetensors").st_ino)
                meeting.wait(60.0)  # retention is through before the next save begins
        return inodes

    zero, one = on_ranks(2, save_all)
    assert zero[:2] == zero[2:] and one[:2] == one[2:] and not set(zero) & set(one)
    values = {"w": torch.zeros(4, 30_000)}
    assert Snapshots(tmp_path, read_only=True).restore(values).step == 4
    assert values["w"][:, 0].tolist() == [40.0, 40.0, 41.0, 41.0] and trash(tmp_path) == []


def test_a_delta_reuses_no_base(tmp_path):
    frozen = torch.arange(60_000, dtype=torch.float32)

    def values(step: int) -> dict[str, Any]:
        return {"frozen": frozen, "w": torch.full((20_000,), float(step))}

    with Snapshots(tmp_path, keep_last=1, delta=True) as snapshots:
        for step in range(1, 7):
            snapshots.save(step, values(step)).wait()
            base = tmp_path / f"step-{step:09d}" / "r00000.s000000001.safetensors"
            assert step == 1 or os.stat(base).st_nlink == 1
            out = {"frozen": torch.zeros(60_000), "w": torch.zeros(20_000)}
            Snapshots(tmp_path, read_only=True).restore(out)
            assert all(torch.equal(out[name], value) for name, value in values(step).items())
        snapshots.save(7, values(6)).wait()  # nothing to write: what was taken is removed
        assert not data_file(tmp_path, 7).exists()
    assert trash(tmp_path) == []


def test_the_space_of_a_spare_counts_as_free(tmp_path, monkeypatch):
    with Snapshots(tmp_path, keep_last=1) as snapshots:
        first, _ = save(snapshots, 1), save(snapshots, 2)
        monkeypatch.setattr(part, "free_space", lambda io, path: 0)
        assert save(snapshots, 3) == first
        with pytest.raises(OSError, match="are needed") as caught:
            save(snapshots, 4, numel=60_000)
        assert caught.value.errno == errno.ENOSPC
        assert trash(tmp_path) == [] or not list(trash(tmp_path)[0].iterdir())  # its space is free now
        monkeypatch.undo()
        save(snapshots, 5)
    assert_is(tmp_path, 5)


def die_with_a_spare(root: Path) -> None:
    snapshots = Snapshots(root, keep_last=1)
    for step in (1, 2):
        save(snapshots, step)
    os._exit(7)


def test_a_dead_owners_spare_goes_at_the_next_start(tmp_path, capsys):
    assert in_child(lambda: die_with_a_spare(tmp_path)) == 7
    with Snapshots(tmp_path, keep_last=1) as snapshots:
        assert leftovers(tmp_path, "f" * 16) == []
        assert [save(snapshots, step) for step in (3, 4)]
    assert_is(tmp_path, 4)


def test_ls_calls_a_living_runs_spare_no_leftover(tmp_path, capsys):
    child = os.fork()
    if child == 0:  # another process, as people list
        torch.set_num_threads(1)
        with Snapshots(tmp_path, keep_last=1) as snapshots:
            for step in (1, 2):
                save(snapshots, step)
            os.kill(os.getpid(), 19)  # SIGSTOP
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    try:
        assert len(trash(tmp_path)) == 1
        assert snapshot_cli.main(["ls", str(tmp_path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["leftovers"] == []
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert snapshot_cli.main(["ls", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["leftovers"]) == 1  # its owner is dead


def cycle(root: Path, io: _C.Io) -> None:
    with Snapshots(root, keep_last=1, threads=1, io=io) as snapshots:
        for step in (1, 2, 3):
            save(snapshots, step)


# action, value, calls that it is tried at: all, those that move bytes, those that take space
KINDS = [
    ("crash_before", 0, None),
    ("crash_short", 511, ["pwrite"]),
    ("errno", errno.EIO, None),
    ("errno", errno.ENOSPC, ["rename", "fallocate", "pwrite"]),
]


@pytest.mark.parametrize(("action", "value", "calls"), KINDS)
def test_a_fault_at_each_call_from_taking_a_file_to_its_sync_harms_nothing(tmp_path, action, value, calls):
    ops = count_ops(lambda io: cycle(tmp_path / "count", io))
    first = next(i for i, (name, path) in enumerate(ops) if name == "rename" and path.endswith(f"/{DATA}"))
    names = [name for name, _ in ops[first:]]
    end = first + names.index("close") + 1
    assert {"open", "is_sole", "fallocate", "pwrite", "ftruncate", "fdatasync"} <= {n for n, _ in ops[first:end]}
    for index in range(first, end):
        if calls is not None and ops[index][0] not in calls:
            continue
        root = tmp_path / str(index)
        status = in_child(lambda r=root, i=index: cycle(r, _C.FaultIo([(i, action, value)])))
        harmless = action == "errno" and ops[index][0] in ("open", "is_sole")  # then a new file is made
        assert status == (KILLED if action != "errno" else 0 if harmless else 1), ops[index]
        assert_is(root, 3 if harmless else 2)
        with Snapshots(root, keep_last=1) as snapshots:
            assert leftovers(root, "f" * 16) == [], ops[index]
            save(snapshots, 4)
        assert sorted(n for n in os.listdir(root) if "step" in n or n.startswith(".")) == ["step-000000004"]
        assert_is(root, 4)
        shutil.rmtree(root)
