"""Who owns a root: dead owners of every kind, and file systems on which flock is refused."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time

import pytest
import torch

from plait import _C
from plait.ckpt import Snapshots, Tier, keep, lease, lock, store
from plait.ckpt.errors import SnapshotError, SnapshotLocked
from plait.ckpt.lease import Lease
from plait.ckpt.lock import RootLock, refuse_if_held
from plait.ckpt.owner import owner_is_alive, read_record, this_process
from tests.faults import Calls, faulty_os, in_child, restored_seed, small_state


def hold_in_child(root, work) -> int:
    """Runs `work` in this process while a child owns the root; returns the child's pid, which is then dead."""
    read, write = os.pipe()
    back_read, back_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        RootLock(root, "child")
        os.write(back_write, b"x")
        os.read(read, 1)
        os._exit(0)  # without close
    os.read(back_read, 1)
    try:
        work(pid)
    finally:
        os.write(write, b"x")
        os.waitpid(pid, 0)
        for fd in (read, write, back_read, back_write):
            os.close(fd)
    return pid


# what of a live process's record is changed, and whether its owner then counts as alive
@pytest.mark.parametrize(
    ("change", "alive"),
    [
        ({}, True),
        ({"start_time": 1}, False),  # the pid was given out again
        ({"boot_id": "of another boot"}, False),
        ({"host": "elsewhere"}, False),  # not to be asked
        ({"pid": 2**22 + 1}, False),
        ({"pid": "12"}, False),
        ({"start_time": None}, False),
    ],
)
def test_a_record_means_one_process_of_one_boot(tmp_path, change, alive):
    def look(pid):
        record = json.loads((tmp_path / "LOCK").read_text())
        assert record["pid"] == pid and owner_is_alive({**record, **change}) is alive

    hold_in_child(tmp_path, look)


def _refuse_flock(*_):
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.fixture
def no_flock(monkeypatch):
    """A file system without locks, as flock says it there."""

    monkeypatch.setattr(fcntl, "flock", _refuse_flock)


def test_without_flock_a_second_job_is_refused_and_a_dead_one_is_followed(tmp_path, no_flock):
    def refused(pid):
        with pytest.raises(SnapshotLocked, match=f"LOCK.lease' is held by process {pid} on host"):
            RootLock(tmp_path, "second")
        with pytest.raises(SnapshotLocked, match=f"held by process {pid}"):
            refuse_if_held(tmp_path)

    pid = hold_in_child(tmp_path, refused)
    refuse_if_held(tmp_path)
    lock = RootLock(tmp_path, "third")
    assert f"process {pid}" in str(lock.stale_owner)
    with pytest.raises(SnapshotLocked, match=f"held by process {os.getpid()}"):
        RootLock(tmp_path, "fourth")
    lock.check()
    lock.close()
    assert not list(tmp_path.glob("LOCK.lease*"))


def test_without_flock_an_owner_elsewhere_lives_as_long_as_it_is_seen(tmp_path, no_flock):
    other = {**this_process(), "host": "elsewhere", "session": "o"}
    lease = Lease(tmp_path, other, lease_s=0.8)
    for _ in range(3):
        time.sleep(0.4)  # longer than between two renewals; in sum longer than the lease
        with pytest.raises(SnapshotLocked, match="host elsewhere .*seen 0 s ago"):
            Lease(tmp_path, {**this_process(), "session": "mine"}, lease_s=0.8)
    lease._stop.set()  # the host is gone: nobody renews
    lease._thread.join()
    os.utime(lease.path, (1.0, 1.0))
    mine = Lease(tmp_path, {**this_process(), "session": "mine"}, lease_s=0.8)
    assert "elsewhere" in str(mine.stale_owner)
    with pytest.raises(SnapshotError, match="was taken over by process"):
        lease.check()
    lease.close()  # what is no longer its own stays
    mine.check()
    mine.close()


def test_without_flock_snapshots_are_saved_kept_and_restored(tmp_path, no_flock):
    with Snapshots(tmp_path, keep_last=1) as snapshots:
        for step in (1, 2):
            snapshots.save(step, small_state(step)).wait()
        assert in_child(lambda: Snapshots(tmp_path)) == 1
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000000002"] and restored_seed(tmp_path) == 2


def test_an_owner_with_the_same_epoch_but_another_session_stops_the_commit(tmp_path):
    """Two that took a stale lock at once have one epoch: the session tells which of them stands in the record."""
    with Snapshots(tmp_path) as snapshots:
        record = json.loads((tmp_path / "LOCK").read_text())
        (tmp_path / "LOCK").write_text(json.dumps({**record, "session": "f" * 16, "pid": 7}))
        with pytest.raises(SnapshotError, match="was taken over by process 7"):
            snapshots.save(1, small_state(1)).wait()
        assert snapshots.latest() is None


def test_another_error_of_flock_is_not_taken_for_a_missing_one(tmp_path, monkeypatch):
    def fail(fd, operation):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="flock: Input/output error.*LOCK"):
        RootLock(tmp_path, "mine")
    (tmp_path / "MANIFEST.json").touch()
    with pytest.raises(OSError, match="flock: Input/output error.*MANIFEST"), keep.reading(tmp_path):
        pass


def test_calls_that_know_only_a_descriptor_fail_with_the_path(tmp_path):
    """A disk gone read-only said "Read-only file system", and not where."""
    (tmp_path / "step-000000001").mkdir()
    (tmp_path / "step-000000001" / "f").write_bytes(b"12345")
    there = store.DirStore(tmp_path, _C.PosixIo(), "session")
    for module, op, work in (
        (store, "pread", lambda: there.get("step-000000001", "f", 0, 5)),
        (lease, "fsync", lambda: Lease(tmp_path, {"session": "mine"})),
    ):
        calls = Calls()
        with faulty_os(calls, module):
            done = work()
        index = [name for name, _ in calls.ops].index(op)
        if isinstance(done, Lease):
            done.close()
        with faulty_os(Calls([(index, "errno", errno.EIO)]), module), pytest.raises(OSError) as caught:
            work()
        assert caught.value.errno == errno.EIO and str(tmp_path) in caught.value.filename


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 4096, b"[1]", b"\xff", b"null"])
def test_a_lock_whose_record_says_nothing_is_of_nobody(tmp_path, text):
    """Torn by a power loss, or nested deeper than the parser goes."""
    (tmp_path / "LOCK").write_bytes(text)
    assert read_record(tmp_path / "LOCK") == {}
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, {"a": torch.zeros(3)}).wait()


@pytest.mark.parametrize("flock", [True, False])
def test_a_lock_whose_record_the_disk_refuses_at_the_end_is_let_go_all_the_same(tmp_path, monkeypatch, flock):
    """The walk found it: the flock stayed with the process, and nobody could save there until it ended."""
    if not flock:
        monkeypatch.setattr(fcntl, "flock", _refuse_flock)
    calls = Calls()
    with faulty_os(calls, lock):
        held = RootLock(tmp_path, "first")
        count = len(calls.ops)
        held.close()
    assert [name for name, _ in calls.ops[count:]][:1] == ["pwrite"]
    with faulty_os(Calls([(count, "errno", errno.ENOSPC)], sticky=True), lock):
        held = RootLock(tmp_path, "second")
        with pytest.raises(OSError, match="write: No space left.*LOCK"):
            held.close()
        held.close()
    RootLock(tmp_path, "third").close()


def test_a_tier_whose_lock_cannot_be_let_go_keeps_nothing_else(tmp_path, monkeypatch):
    tiers = [Tier(tmp_path / "a"), Tier(tmp_path / "b")]
    snapshots = Snapshots(tmp_path / "near", tiers=tiers)
    monkeypatch.setattr(snapshots._tiers._locks[1], "_write", _refuse_flock)
    with pytest.raises(OSError, match="No locks available"):
        snapshots.close()
    Snapshots(tmp_path / "near", tiers=tiers).close()
