"""Defences that were deleted one by one and that no other test missed: each here fails without its line.

By module of ckpt/, in the order of a save: who owns a root, what is written, the commit, what goes, what is read.
Most call the function itself with what it must refuse, since whole saves meet several defences in a row.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from plait import _C
from plait.ckpt import Sharded, SnapshotError, SnapshotLocked, Snapshots, TornSnapshot, background, capture
from plait.ckpt import candidates as candidates_module
from plait.ckpt import commit as commit_module
from plait.ckpt import delta as delta_module
from plait.ckpt import keep as keep_module
from plait.ckpt import lease as lease_module
from plait.ckpt import part as part_module
from plait.ckpt.commit import Writer, abort, await_commit
from plait.ckpt.crypt import load_key
from plait.ckpt.delta import link_bases
from plait.ckpt.errors import SnapshotDamaged
from plait.ckpt.folders import (
    is_attempt,
    make_folder,
    next_generation,
    parse_step,
    remove_folder,
    remove_part,
    step_folders,
)
from plait.ckpt.keep import Policy, pin, reading, retain, unpin
from plait.ckpt.lease import Lease
from plait.ckpt.lock import RootLock
from plait.ckpt.manifest import Fragment, Manifest, from_bytes, sha256, to_bytes
from plait.ckpt.owner import owner_is_alive, this_process
from plait.ckpt.partner import Partner
from plait.ckpt.reader import SnapshotReader, read_manifest
from plait.ckpt.spare import allocated_bytes, can_reuse, spare_names, take_spare
from plait.ckpt.tier_reader import open_folder
from plait.ckpt.tiers import Tier
from tests.faults import Calls, count_ops, empty_state, failing, faulty_os, on_ranks, restored_seed, small_state
from tests.fuzz_manifest import _made_right, _with_digest

IO = _C.PosixIo()
HEX = "0123456789abcdef"


def _no_flock(*_: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks."""
    monkeypatch.setattr(fcntl, "flock", _no_flock)


def saved(root: Path, *steps: int, **options: Any) -> Path:
    """A run with these snapshots; returns the folder of the last."""
    with Snapshots(root, threads=1, **options) as snapshots:
        for step in steps:
            snapshots.save(step, small_state(step)).wait()
    return root / f"step-{steps[-1]:09d}"


def fails_on(*names: str, error: int = errno.EIO) -> _C.FaultIo:
    """An Io on which the operations of these names fail."""
    io = _C.FaultIo([(0, "errno", error)], sticky=True, only=list(names))
    with pytest.raises(OSError):  # the scripted operation, whatever its name, starts it
        _C.free_bytes(io, "/")
    return io


# ---- who owns a root ----------------------------------------------------------------------------------------------


def other_process() -> tuple[dict[str, Any], Callable[[], None]]:
    """The record of a living process, and what ends it."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    boot = this_process()
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()

    def end() -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    return {**boot, "pid": pid, "start_time": int(stat[19]), "session": "other", "epoch": 4, "held": True}, end


def test_where_flock_means_nothing_a_living_owner_of_the_record_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)
    record, end = other_process()
    try:
        (tmp_path / "LOCK").write_text(json.dumps(record))
        with pytest.raises(SnapshotLocked, match=f"process {record['pid']} .*which is alive"):
            RootLock(tmp_path, "mine")
    finally:
        end()
    assert RootLock(tmp_path, "mine").epoch == 5


def test_a_lock_that_could_not_be_taken_leaves_neither_descriptor_nor_lease(tmp_path, no_flock):
    record, end = other_process()
    try:
        (tmp_path / "LOCK").write_text(json.dumps(record))
        before = sorted(os.listdir("/proc/self/fd"))
        with pytest.raises(SnapshotLocked):
            RootLock(tmp_path, "mine")
    finally:
        end()
    assert sorted(os.listdir("/proc/self/fd")) == before and os.listdir(tmp_path) == ["LOCK"]
    assert not [thread for thread in threading.enumerate() if thread.name == "plait-lease"]


def test_what_the_record_says_reaches_the_disk_and_only_its_owner_reads_it(tmp_path, no_flock):
    calls = Calls()
    with faulty_os(calls, lease_module, __import__("plait.ckpt.lock", fromlist=["os"])):
        lock = RootLock(tmp_path, "mine")
        names = [name for name, _ in calls.ops]
        lock.close()
    assert "fsync" in names[: names.index("link")] and names[-3:] == ["pwrite", "ftruncate", "fsync"]
    assert (tmp_path / "LOCK").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("epoch", ["x", None, [1]])
def test_an_epoch_that_is_no_number_begins_anew(tmp_path, epoch):
    (tmp_path / "LOCK").write_text(json.dumps({"epoch": epoch, "held": False}))
    lock = RootLock(tmp_path, "mine")
    assert lock.epoch == 1
    lock.close()


def test_a_lock_file_that_was_replaced_or_taken_over_is_not_ours(tmp_path):
    lock = RootLock(tmp_path, "mine")
    shutil.copy(tmp_path / "LOCK", tmp_path / "copy")
    os.rename(tmp_path / "copy", tmp_path / "LOCK")  # the same words in another file, which another may have locked
    with pytest.raises(SnapshotError, match="was taken over"):
        lock.check()
    lock.close()
    lock = RootLock(tmp_path, "mine")
    theirs = json.dumps({**lock.record(), "epoch": lock.epoch + 1, "session": "theirs"})
    (tmp_path / "LOCK").write_text(theirs)
    lock.close()
    assert (tmp_path / "LOCK").read_text() == theirs  # who follows is not written over


def test_a_lease_that_was_replaced_stops_the_commit(tmp_path, no_flock):
    lock = RootLock(tmp_path, "mine")
    (tmp_path / "LOCK.lease").write_text(json.dumps({**this_process(), "session": "theirs"}))
    with pytest.raises(SnapshotError, match="LOCK.lease' was taken over"):
        lock.check()
    lock.close()


def test_a_copy_of_the_descriptor_in_a_child_holds_nothing(tmp_path):
    lock = RootLock(tmp_path, "mine")
    copy = os.dup(lock._fd)  # as of a child that was forked a moment ago
    lock.close()
    RootLock(tmp_path, "next").close()
    os.close(copy)

    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        held = RootLock(tmp_path, "parent")
        if os.fork() == 0:
            assert held.epoch
            os.write(write, b"x")
            signal.pause()
        signal.pause()
    os.read(read, 1)
    child = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        RootLock(tmp_path, "next").close()  # although the dead owner's child lives
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(read)
        os.close(write)


def test_of_two_that_find_a_dead_owner_one_gets_the_lease(tmp_path, monkeypatch):
    (tmp_path / "LOCK.lease").write_text(json.dumps({"host": "gone", "pid": 1, "session": "dead"}))
    os.utime(tmp_path / "LOCK.lease", (1.0, 1.0))
    real = os.rename

    def both(source, target):
        real(source, target)
        Path(target).write_text(json.dumps({**this_process(), "session": "faster"}))

    monkeypatch.setattr(lease_module.os, "rename", both)
    with pytest.raises(SnapshotError, match="was taken over"):
        Lease(tmp_path, {**this_process(), "session": "mine"})
    lease = Lease.__new__(Lease)
    lease.path = tmp_path / "absent"
    lease._refuse_if_alive(0.0)  # its owner let go this moment


def test_a_lease_is_renewed_after_an_error_and_never_when_it_is_another_ones(tmp_path, monkeypatch):
    touched, real = threading.Event(), os.utime
    errors = [OSError(errno.EIO, "the server is away")]

    def utime(path, *more):
        if errors and not more:
            raise errors.pop()
        real(path, *more)
        touched.set()

    monkeypatch.setattr(lease_module.os, "utime", utime)
    lease = Lease(tmp_path, {**this_process(), "session": "mine"}, lease_s=0.08)
    assert touched.wait(10.0) and not errors
    theirs = tmp_path / "theirs"
    theirs.write_text(json.dumps({**this_process(), "session": "theirs"}))
    real(theirs, (1.0, 1.0))
    os.rename(theirs, lease.path)
    time.sleep(0.05)
    lease.close()
    assert lease.path.stat().st_mtime == 1.0


def test_a_process_that_has_ended_and_was_not_waited_for_is_dead():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    start = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    assert not owner_is_alive({**this_process(), "pid": pid, "start_time": start})
    os.waitpid(pid, 0)


def test_nothing_is_removed_before_the_lock_is_held_and_a_new_root_is_durable(tmp_path):
    ops = count_ops(lambda io: Snapshots(tmp_path / "new", io=io).close())
    assert ("fsync_dir", str(tmp_path)) in ops
    root = tmp_path / "new"
    (root / f".tmp-3-{HEX}-1").mkdir()
    with Snapshots(root):
        (root / f".tmp-3-{HEX}-2").mkdir()
        with pytest.raises(SnapshotLocked):
            Snapshots(root)
        assert (root / f".tmp-3-{HEX}-2").is_dir() and not (root / f".tmp-3-{HEX}-1").exists()


def test_disks_of_two_runs_are_not_made_one(tmp_path):
    for node in ("node0", "node1"):  # an empty disk would take the run of the other
        saved(tmp_path / node, 1)
    store = HashStore()

    def work(rank: int) -> str:
        try:
            options = {"rank": rank, "world_size": 2, "session": 5, "timeout_s": 20.0, "store": store}
            Snapshots(tmp_path / f"node{rank}", **options).close(timeout_s=0.0)
        except SnapshotError as error:
            return str(error)
        return ""

    assert "holds run" in on_ranks(2, work)[1]


# ---- names and folders --------------------------------------------------------------------------------------------


def test_names_that_only_look_like_snapshots_or_attempts(tmp_path):
    (tmp_path / "step-000000005").write_text("a file")
    (tmp_path / "step-000000006-3").mkdir()
    assert [found.path.name for found in step_folders(tmp_path)] == ["step-000000006-3"]
    assert next_generation(tmp_path, 6) == 4
    assert is_attempt(f".tmp-6-{HEX}-1") and not is_attempt(f".tmp-restore-{HEX}-1")
    with pytest.raises(FileExistsError):
        make_folder(IO, tmp_path / "step-000000005")
    (tmp_path / f".tmp-6-{HEX}-1").mkdir()
    with pytest.raises(OSError, match="rmdir"):
        remove_folder(failing("rmdir", errno.EIO), tmp_path / f".tmp-6-{HEX}-1")


def test_all_that_a_rank_wrote_into_an_attempt_goes_and_nothing_of_another(tmp_path):
    mine = ["r00001.safetensors", "r00001.s000000003.safetensors", "r00001.json", "r00001.json.part"]
    for name in [*mine, "r00002.json", "r00002.s000000003.safetensors"]:
        (tmp_path / name).write_bytes(b"x")
    remove_part(IO, tmp_path, 1)
    assert sorted(os.listdir(tmp_path)) == ["r00002.json", "r00002.s000000003.safetensors"]


# ---- a rank's part ------------------------------------------------------------------------------------------------


def test_a_spare_is_a_file_of_ours_whose_snapshot_is_gone(tmp_path, monkeypatch):
    trash = tmp_path / f".trash-{HEX}-step-000000001"
    trash.mkdir()
    (trash / "r00000.safetensors").write_bytes(b"x")
    (trash / "MANIFEST.json").write_bytes(b"x")
    assert not take_spare(IO, tmp_path, HEX, "r00000.safetensors", tmp_path / "new")
    (trash / "MANIFEST.json").unlink()
    gone = failing("rename", errno.ENOENT)
    assert not take_spare(gone, tmp_path, HEX, "r00000.safetensors", tmp_path / "new")
    assert take_spare(IO, tmp_path, HEX, "r00000.safetensors", tmp_path / "new")
    (trash / "r00000.safetensors").symlink_to(tmp_path / "new")
    assert spare_names(trash, [0, 1]) == set()
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 24)
    assert allocated_bytes(tmp_path / "sparse") == 0

    def refuse(path):
        raise OSError(errno.EIO, "statfs")

    monkeypatch.setattr("plait.ckpt.spare._C", SimpleNamespace(io_facts=refuse))
    assert not can_reuse(tmp_path)


def test_links_that_failed_half_way_are_undone(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    links = [(tmp_path / "a", "r00000.s000000001.safetensors"), (tmp_path / "absent", "r00000.s000000002.x")]
    folder = tmp_path / "attempt"
    folder.mkdir()
    assert not link_bases(SimpleNamespace(links=links), folder) and os.listdir(folder) == []


def test_an_older_file_of_which_little_is_needed_is_no_base():
    files = {None: SimpleNamespace(bytes=1000), 1: SimpleNamespace(bytes=1000)}
    pieces = [SimpleNamespace(source_step=s, num_bytes=n, key=str(s)) for s, n in ((None, 100), (1, 99))]
    assert delta_module._worth_it(pieces, SimpleNamespace(data_files=files)).keys() == {"None"}


@pytest.mark.timeout(60)
def test_a_delta_through_slabs_is_written_whole(tmp_path, monkeypatch):
    for module in (capture, part_module):
        monkeypatch.setattr(module, "BLOCK_BYTES", 1 << 20)
    state = {"w": torch.arange(3 << 20, dtype=torch.float32)}
    with Snapshots(tmp_path, delta=True, pool_bytes=1, threads=1) as snapshots:
        for step in (1, 2):
            snapshots.save(step, state).wait()
    assert not list((tmp_path / "step-000000002").glob("*.s*.safetensors"))


@pytest.mark.parametrize("changes", [True, False])
def test_a_delta_finds_a_write_without_a_fence(tmp_path, monkeypatch, changes):
    """By the version, where the samples missed it: whether or not anything else is written."""
    net = torch.nn.Linear(512, 512)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Snapshots(tmp_path, delta=True, threads=1) as snapshots:
        snapshots.guard(optimizer)
        snapshots.save(1, {"model": net, "frozen": torch.zeros(1 << 18)}).wait()
        held = threading.Event()
        real = background.write_part
        monkeypatch.setattr(background, "write_part", lambda *a: (held.wait(30.0), real(*a))[1])
        if changes:
            with torch.no_grad():
                net.bias += 1
        handle = snapshots.save(2, {"model": net, "frozen": torch.zeros(1 << 18)})
        torch.autograd.graph.increment_version(net.weight)
        held.set()
        with pytest.raises(TornSnapshot, match="model/weight"):
            handle.wait()


def test_a_partner_has_the_older_files_of_a_delta_too(tmp_path):
    frozen, store = torch.arange(50_000.0).reshape(1, -1), HashStore()

    def work(rank: int) -> None:
        options = {"rank": rank, "world_size": 2, "session": 5, "timeout_s": 60.0, "keep_last": 1}
        more = {"store": store, "partner": Partner("127.0.0.1"), "delta": True}
        with Snapshots(tmp_path / f"node{rank}", **options, **more) as snapshots:
            for step in (1, 2):
                snapshots.save(step, {"w": Sharded(frozen, (2, 50_000), (rank, 0)), "n": step})

    on_ranks(2, work)
    names = [{p.name for p in (tmp_path / f"node{rank}/step-000000002").glob("*.s0*")} for rank in range(2)]
    assert names[0] == names[1] == {"r00000.s000000001.safetensors", "r00001.s000000001.safetensors"}


# ---- the commit ---------------------------------------------------------------------------------------------------


def writer(root: Path, rank: int = 0, world_size: int = 2, timeout_s: float = 5.0) -> Writer:
    return Writer(IO, root, rank, world_size, 1, 0, True, timeout_s, threading.Event())


def test_a_tensor_that_is_not_all_there_is_not_committed(tmp_path):
    with Snapshots(tmp_path) as snapshots:
        half = Sharded(torch.zeros(2, 8), (4, 8), (0, 0))
        with pytest.raises(SnapshotDamaged, match="not covered exactly once: 16 of 32"):
            snapshots.save(1, {"w": half}).wait()
    assert step_folders(tmp_path) == []


def _cut(folder: Path, fragment: Fragment) -> Fragment:
    os.truncate(folder / "r00000.safetensors", 4096)
    return fragment


def _of_another_step(folder: Path, fragment: Fragment) -> Fragment:
    return replace(fragment, step=7)


def _of_another_name(folder: Path, fragment: Fragment) -> Fragment:
    assert fragment.file is not None
    return replace(fragment, file=replace(fragment.file, name="r00003.safetensors"))


@pytest.mark.parametrize(
    ("hurt", "text"),
    [
        (_cut, "has 4096 bytes, its fragment says otherwise"),
        (_of_another_step, r"is of \(rank, attempt, step, world\) \(0, .*, 7, 1\), not of this attempt"),
        (_of_another_name, "its fragment says otherwise"),
    ],
)
def test_a_part_that_is_not_what_its_fragment_says_is_not_committed(tmp_path, monkeypatch, hurt, text):
    real = background.write_part

    def write_part(writer, attempt, *more):
        own, data = real(writer, attempt, *more)
        folder = tmp_path / f".tmp-{attempt}"
        changed = hurt(folder, own)
        (folder / "r00000.json").write_bytes(to_bytes(changed))
        return own, data

    monkeypatch.setattr(background, "write_part", write_part)
    with Snapshots(tmp_path) as snapshots:
        with pytest.raises(SnapshotDamaged, match=text):
            snapshots.save(1, small_state(1)).wait()
    assert step_folders(tmp_path) == []


def test_an_owner_that_was_replaced_while_it_wrote_its_manifest_does_not_commit(tmp_path, monkeypatch):
    real = commit_module.publish

    def publish(io, path, data):
        real(io, path, data)
        if path.name == "MANIFEST.json":
            record = json.loads((tmp_path / "LOCK").read_text())
            (tmp_path / "LOCK").write_text(json.dumps({**record, "epoch": 99, "session": "theirs"}))

    monkeypatch.setattr(commit_module, "publish", publish)
    with Snapshots(tmp_path) as snapshots, pytest.raises(SnapshotError, match="was taken over"):
        snapshots.save(1, small_state(1)).wait()
    assert step_folders(tmp_path) == []


def test_who_waits_learns_of_the_end_at_once_and_rank_0_is_waited_for_twice_as_long(tmp_path):
    snapshots = Snapshots(tmp_path, rank=0, world_size=2, session=5, timeout_s=20.0)
    snapshots.save(1, small_state(1))
    with pytest.raises(SnapshotError, match="rank 0 was closed while it waited; ranks .1. did not finish"):
        snapshots.close(timeout_s=0.0)
    said = SimpleNamespace(root=tmp_path, disks=None, timeout_s=1.0, wait=lambda look, late, limits=1: limits)
    assert await_commit(said, f"1-{HEX}-1", 1) == 2


def test_another_attempt_of_the_step_is_not_taken_for_the_own_one(tmp_path):
    saved(tmp_path, 5)
    with pytest.raises(SnapshotError, match=f"attempt 5-{HEX}-1 of step 5 was abandoned"):
        await_commit(writer(tmp_path, rank=1, timeout_s=0.2), f"5-{HEX}-1", 5)


def test_a_dead_ranks_part_goes_with_the_attempt(tmp_path):
    folder = tmp_path / f".tmp-5-{HEX}-1"
    folder.mkdir()
    for name in ("r00001.safetensors", "r00001.json"):
        (folder / name).write_bytes(b"x")
    abort(writer(tmp_path), f"5-{HEX}-1", "why")
    assert os.listdir(folder) == ["abort.error"]


def test_a_rank_whose_clean_up_fails_still_says_why_it_failed(tmp_path):
    def work(rank: int) -> str:
        io = fails_on("fallocate", "unlink") if rank else IO
        options = {"rank": rank, "world_size": 2, "session": 5, "timeout_s": 20.0, "io": io}
        snapshots = Snapshots(tmp_path, **options)
        with pytest.raises((OSError, SnapshotError)) as caught:
            snapshots.save(1, {"w": torch.zeros(2_000_000)}).wait()
        snapshots.close()
        return str(caught.value)

    assert "rank 1 could not write its part of step 1: [Errno 5] fallocate" in on_ranks(2, work)[0]


# ---- what goes ----------------------------------------------------------------------------------------------------


def test_nothing_goes_while_the_one_just_written_does_not_verify(tmp_path):
    saved(tmp_path, 1, 2, 3, keep_last=None)
    (tmp_path / "step-000000003/MANIFEST.json").write_bytes(b"")
    run = json.loads((tmp_path / "RUN.json").read_bytes().partition(b"\n")[0])["run"]
    written = parse_step(tmp_path / "step-000000003")
    assert written is not None
    assert retain(IO, tmp_path, Policy(1), written, run, HEX) == [] and len(step_folders(tmp_path)) == 3
    shutil.rmtree(written.path)
    written = parse_step(tmp_path / "step-000000002")
    assert written is not None
    with pytest.MonkeyPatch.context() as patch:  # pinned between the look at all pins and the removal
        patch.setattr(keep_module, "pinned_folders", lambda root: set())
        pin(IO, tmp_path / "step-000000001")
        assert retain(IO, tmp_path, Policy(1), written, run, HEX) == []
    unpin(IO, tmp_path / "step-000000001")
    assert retain(IO, tmp_path, Policy(1), written, run, HEX) == ["step-000000001"]


def test_a_pin_is_durable_holds_meanwhile_and_is_not_left_behind(tmp_path, monkeypatch):
    folder = saved(tmp_path, 1)
    for change in (pin, unpin):
        io = _C.FaultIo([])
        change(io, folder)
        assert io.ops[-1] == ("fsync_dir", str(tmp_path))
    real, free = _C.write_small, []

    def removed_meanwhile(io, path, data, **options):
        with keep_module._alone(folder) as alone:
            free.append(alone)
        real(io, path, data, **options)
        shutil.move(folder, tmp_path / "gone")

    monkeypatch.setattr(
        keep_module, "_C", SimpleNamespace(write_small=removed_meanwhile, fsync_dir=_C.fsync_dir, unlink=_C.unlink)
    )
    with pytest.raises(SnapshotError, match="was just removed"):
        pin(IO, folder)
    assert free == [False] and not list(tmp_path.glob("PIN-*"))


def test_another_error_of_flock_is_none_of_a_missing_one(tmp_path, monkeypatch):
    folder = saved(tmp_path, 1)

    def fail(fd, operation):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", fail)
    for held in (reading, keep_module._alone):
        with pytest.raises(OSError, match="Input/output error"), held(folder):
            pass


# ---- what is read -------------------------------------------------------------------------------------------------


def test_a_folder_with_the_name_of_another_step_is_damaged(tmp_path):
    saved(tmp_path, 1, 2)
    os.rename(tmp_path / "step-000000001", tmp_path / "step-000000007")
    with pytest.raises(SnapshotDamaged, match="is of step 1"):
        read_manifest(IO, tmp_path / "step-000000007")
    assert restored_seed(tmp_path) == 2


@pytest.mark.parametrize(("field", "value"), [("num_bytes", "12"), ("shape", [1] * 65), ("name", 3), ("flat", [1])])
def test_a_piece_of_wrong_types_is_damaged(tmp_path, field, value):
    path = saved(tmp_path, 1) / "r00000.json"
    raw = json.loads(path.read_bytes().partition(b"\n")[0])
    raw["pieces"][0][field] = value
    line = json.dumps(raw).encode()
    with pytest.raises(SnapshotDamaged, match=f"Piece.{field} has a wrong type"):
        from_bytes(Fragment, line + b"\nsha256:" + sha256(line).encode() + b"\n", "it")
    assert from_bytes(Manifest, (tmp_path / "step-000000001/MANIFEST.json").read_bytes(), "it").step == 1


def test_who_lists_a_root_while_another_writes_there_finds_the_newer_ones(tmp_path, monkeypatch):
    """Readers beside writers: what was listed was gone when it was looked at, and an older one that somebody read was
    still there. Then `latest()` and `restore()` said that there is none, or took the older one."""
    saved(tmp_path, 1, 2, 3)
    older, gone = (parse_step(tmp_path / f"step-{step:09d}") for step in (1, 2))
    shutil.rmtree(tmp_path / "step-000000002")
    real, listed = os.listdir, candidates_module.step_folders
    for outdated in ([gone], [gone, older]):
        names = [[folder.path.name for folder in outdated]]
        with monkeypatch.context() as patch:
            patch.setattr("plait.ckpt.folders.os.listdir", lambda path, n=names: n.pop() if n else real(path))
            assert [folder.step for folder in step_folders(tmp_path)] == [3, 1] and not names
        stale = [outdated]
        monkeypatch.setattr(candidates_module, "step_folders", lambda root, s=stale: s.pop() if s else listed(root))
        snapshots = Snapshots(tmp_path, read_only=True)
        assert snapshots.latest() == 3 and not stale
        stale.append(outdated)
        found = snapshots.restore(empty_state())
        assert found.step == 3 and found.report.skipped == () and not stale
    (tmp_path / "step-000000003/MANIFEST.json").write_bytes(b"")
    assert snapshots.latest() == 1
    found = snapshots.restore(empty_state())
    assert found.step == 1 and [name for name, _ in found.report.skipped] == ["step-000000003"]


def test_a_rank_with_coded_parts_and_no_pieces_is_damaged(tmp_path):
    """The fuzzer found it: StopIteration, which became a RuntimeError."""
    saved(tmp_path / "run", 1, tiers=[Tier(tmp_path / "copies", compress=True)])
    folder = tmp_path / "copies/step-000000001"
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    fragment = json.loads(files["r00000.json"].partition(b"\n")[0])
    files["r00000.json"] = _with_digest(json.dumps({**fragment, "pieces": []}).encode())
    for name, data in _made_right(files, Random(1)).items():
        (folder / name).write_bytes(data)
    with pytest.raises(SnapshotDamaged, match="no pieces"):
        open_folder(folder).read_range((0, None), 0, 1, torch.empty(1).data_ptr())
    assert "no pieces" in open_folder(folder).verify(0)[0]


def _rewritten(folder: Path, fragment: dict[str, Any], manifest: Callable[[dict[str, Any]], object] | None) -> None:
    """Writes a snapshot's fragment with other fields, all digests right again, then its manifest as changed."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    there = json.loads(files["r00000.json"].partition(b"\n")[0])
    files["r00000.json"] = _with_digest(json.dumps({**there, **fragment}).encode())
    files = _made_right(files, SimpleNamespace(random=lambda: 1.0))  # type: ignore[arg-type]
    said = json.loads(files["MANIFEST.json"].partition(b"\n")[0])
    if manifest is not None:
        manifest(said)
    files["MANIFEST.json"] = _with_digest(json.dumps(said).encode())
    for name, data in files.items():
        (folder / name).write_bytes(data)


def _entry(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    return next(entry for entry in manifest["files"] if entry["name"] == name)


_EMPTY = {"name": "r00000.s000000001.safetensors", "bytes": 0, "sha256": sha256(b"")}


@pytest.mark.parametrize(
    ("fragment", "manifest", "text"),
    [
        ({"step": 9}, None, "belongs to another snapshot"),
        ({"world_size": 2}, None, "belongs to another snapshot"),
        ({}, lambda m: m.update(num_tensors=99), "name different tensors"),
        ({}, lambda m: m.update(aliases={"x": "y"}), "name different tensors"),
        ({}, lambda m: m["files"].append({**_EMPTY, "name": "r00007.safetensors"}), "not the files of 1 ranks"),
        ({}, lambda m: m["files"].append(m["files"][0]), "not the files of 1 ranks"),
        ({}, lambda m: m["files"].remove(_entry(m, "objects.json")), "not the files of 1 ranks"),
        ({}, lambda m: m["files"].append(_EMPTY), "disagree about its data file"),
        ({"bases": [{"name": "x", "bytes": 0, "block_bytes": 4096, "crc32c": []}]}, None, "disagree about its data"),
        ({}, lambda m: _entry(m, "r00000.safetensors").update(sha256="0" * 64), "checksums are not those"),
        ({}, lambda m: _entry(m, "objects.json").update(sha256="0" * 64), "does not have the digest"),
        ({}, lambda m: _entry(m, "r00000.json").update(sha256="0" * 64), "does not have the digest"),
    ],
)
def test_a_manifest_and_a_fragment_that_do_not_fit_are_damaged(tmp_path, fragment, manifest, text):
    folder = saved(tmp_path, 1)
    (folder / "r00007.safetensors").write_bytes(b"")
    (folder / _EMPTY["name"]).write_bytes(b"")
    _rewritten(folder, fragment, manifest)
    with pytest.raises(SnapshotDamaged, match=text):
        reader = SnapshotReader(folder)
        assert reader.table.names and reader.values


@pytest.mark.parametrize("change", [{"crc32c": [-1]}, {"crc32c": [1 << 32]}, {"block_bytes": 1 << 27}])
def test_a_data_file_that_no_reader_may_believe_is_damaged(tmp_path, change):
    folder = saved(tmp_path, 1)
    raw = json.loads((folder / "r00000.json").read_bytes().partition(b"\n")[0])
    raw["file"] = {**raw["file"], "crc32c": raw["file"]["crc32c"][:1], **change}
    if "block_bytes" in change:
        _rewritten(folder, raw, None)
        with pytest.raises(SnapshotDamaged, match="checksums are not those"):
            assert SnapshotReader(folder).fragments
        return
    with pytest.raises(SnapshotDamaged, match="DataFile.crc32c has a wrong type"):
        from_bytes(Fragment, _with_digest(json.dumps(raw).encode()), "it")


def test_a_missing_data_file_and_a_part_of_a_tensor_are_damage(tmp_path):
    folder = saved(tmp_path, 1)
    pieces = json.loads((folder / "r00000.json").read_bytes().partition(b"\n")[0])["pieces"]
    wide = [{**pieces[0], "full_shape": [64, 64]}, *pieces[1:]]
    data = (folder / "r00000.safetensors").read_bytes()
    (folder / "r00000.safetensors").unlink()
    with pytest.raises(SnapshotDamaged, match="r00000.safetensors' is missing"):
        read_manifest(IO, folder)
    (folder / "r00000.safetensors").write_bytes(data)
    _rewritten(folder, {"pieces": wide}, None)
    with pytest.raises(SnapshotDamaged, match="not covered exactly once"):
        assert SnapshotReader(folder).table


def test_the_secrets_for_each_purpose_differ_and_the_name_of_a_key_tells_nothing():
    secret = bytes(range(32))
    key = load_key(secret)
    assert key is not None and key.id != secret[:4].hex()
    assert len({key._sign, key._seal, secret}) == 3
    assert len({key.cipher(attempt)._bound("r00000.json/0") for attempt in ("1-a-1", "1-a-2")}) == 2
