"""Defences that were deleted one by one and that no other test missed: ranks that agree, and the thread that commits.

Tables of what several ranks say, words between disks, what is told of a failure, what a commit leaves and removes. As
in test_defences.py, most tests call the function itself.
"""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from plait import _C
from plait.ckpt import Sharded, SnapshotError, SnapshotLocked, Snapshots, StateError, background
from plait.ckpt.disks import Disks, place_of
from plait.ckpt.errors import SnapshotDamaged
from plait.ckpt.handle import Handle
from plait.ckpt.lock import RootLock
from plait.ckpt.manifest import MANIFEST, OBJECTS, Fragment, fragment_name
from plait.ckpt.reader import SnapshotReader
from plait.ckpt.tables import build_table
from plait.ckpt.tiers import Tier
from tests.faults import failing, on_ranks, small_state

IO = _C.PosixIo()
HEX = "0123456789abcdef"


def two_fragments(tmp_path: Path) -> list[Fragment]:
    """Of two ranks that have all the same."""
    with Snapshots(tmp_path, threads=1) as snapshots:
        snapshots.save(1, {"w": torch.arange(5), "v": torch.ones(3)})
    (first,) = SnapshotReader(tmp_path / "step-000000001").fragments
    return [first, replace(first, rank=1)]


def test_what_ranks_say_of_a_tensor_must_fit(tmp_path):
    first, second = two_fragments(tmp_path)
    assert build_table([first, second], "it").tensors.keys() == {"w", "v"}
    others = tuple(replace(piece, xxh3_128="0" * 32) for piece in second.pieces)
    nowhere = tuple(replace(piece, source_step=9) for piece in second.pieces)
    for fragments, text in (
        ([first, replace(second, pieces=others)], "rank 1, tensor '[vw]': other bytes than rank 0 has"),
        ([replace(first, pieces=nowhere)], r"the rank has no data file \(source_step 9\)"),
        ([replace(first, aliases={"x": "absent"})], "'x' stands for 'absent', which no rank has"),
        (
            [replace(first, aliases={"x": "w"}), replace(second, aliases={"x": "v"})],
            "'x' is the same memory as 'v' on rank 1 but as 'w' on rank 0",
        ),
    ):
        with pytest.raises(SnapshotDamaged, match=text):
            build_table(fragments, "it")


# ---- disks --------------------------------------------------------------------------------------------------------


def two_disks(tmp_path: Path) -> tuple[list[Disks], Path]:
    """Both ranks' disks, and the folder of an attempt on that of rank 1."""
    store = HashStore()
    disks = on_ranks(2, lambda rank: Disks(store, IO, HEX, rank, 2, tmp_path / f"node{rank}"))
    folder = tmp_path / "node1" / f".tmp-5-{HEX}-1"
    folder.mkdir()
    return disks, folder


def test_a_disk_is_ready_with_all_files_and_renames_to_a_step_folder_alone(tmp_path):
    (zero, one), folder = two_disks(tmp_path)
    assert place_of(tmp_path / "node0") != place_of(tmp_path / "node1")
    zero.tell(folder, MANIFEST, b"manifest")
    zero.tell(folder, fragment_name(0), b"fragment")
    (folder / fragment_name(1)).write_bytes(b"own")
    one.pull(IO, folder)
    assert MANIFEST not in os.listdir(folder) and zero.generations(folder) is None, "objects.json is still to come"
    zero.tell(folder, OBJECTS, b"objects")
    one.pull(IO, folder)
    assert (folder / MANIFEST).read_bytes() == b"manifest" and zero.generations(folder) == [1]
    zero.tell(folder, "commit", b"../evil")
    with pytest.raises(SnapshotError, match="is no step folder"):
        one.follow(IO, folder)
    zero.tell(folder, "commit", b"step-000000005")
    assert one.follow(IO, folder) is None and zero.all_done(folder), "others may not be done"
    zero.tell(folder, "durable", b"")
    assert one.follow(IO, folder) == tmp_path / "node1/step-000000005"


def test_words_of_a_save_are_taken_back_two_saves_later(tmp_path):
    (zero, one), folder = two_disks(tmp_path)
    folders = [folder.with_name(f".tmp-{n}-{HEX}-{n}") for n in range(3)]
    for each in folders:
        zero.tell(each, "commit", b"x")
    zero.forget()
    assert [one.hear(each, "commit") for each in folders] == [None, b"x", b"x"]


def test_another_disk_syncs_its_folder_before_it_is_ready_and_its_root_before_it_is_done(tmp_path):
    store, io = HashStore(), _C.FaultIo([])

    def work(rank: int) -> None:
        options = {"rank": rank, "world_size": 2, "session": 5, "timeout_s": 60.0, "store": store}
        with Snapshots(tmp_path / f"node{rank}", io=io if rank else IO, **options) as snapshots:
            snapshots.save(1, {"w": Sharded(torch.ones(1, 9), (2, 9), (rank, 0))})

    on_ranks(2, work)
    names = [(name, Path(path).name) for name, path in io.ops]
    came = next(i for i, (name, path) in enumerate(names) if name == "rename" and path == MANIFEST)
    final = next(i for i, (name, path) in enumerate(names) if name == "rename" and path == "step-000000001")
    assert any(name == "fsync_dir" and path.startswith(".tmp-1-") for name, path in names[came:final])
    assert names[final + 1] == ("fsync_dir", "node1")


# ---- a restore of several ranks -----------------------------------------------------------------------------------


def test_the_words_of_a_restore_are_removed_round_by_round_and_by_settle(tmp_path):
    value = torch.arange(5)
    with Snapshots(tmp_path, threads=1) as snapshots:
        snapshots.save(1, {"w": value})
    options: dict[str, Any] = {"world_size": 2, "session": 5, "read_only": True, "timeout_s": 60.0}
    both = [Snapshots(tmp_path, rank=rank, **options) for rank in range(2)]
    on_ranks(2, lambda rank: both[rank].restore({"w": torch.zeros_like(value)}))
    assert len(list(tmp_path.glob(".tmp-restore-*"))) == 1, "of the last round, which rank 1 may still read"
    both[0].settle()
    assert not list(tmp_path.glob(".tmp-restore-*"))


# ---- the thread that commits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["state", "disk"])
def test_why_one_rank_failed_is_what_the_other_one_hears(tmp_path, rank, how):
    def work(own: int) -> str:
        bad = own == rank
        io = failing("fdatasync", errno.EIO) if bad and how == "disk" else IO
        options = {"rank": own, "world_size": 2, "session": 5, "timeout_s": 4.0, "io": io}
        snapshots = Snapshots(tmp_path, **options)
        value = (lambda: 0) if bad and how == "state" else 0
        try:
            snapshots.save(1, {"w": Sharded(torch.ones(1, 9), (2, 9), (own, 0)), "f": value}).wait()
        except (SnapshotError, StateError, OSError) as error:
            return str(error)
        finally:
            snapshots.close(timeout_s=0.0)
        return ""

    said = on_ranks(2, work)
    assert all(("is a function" if how == "state" else "fdatasync") in text for text in said), said


def test_a_commit_removes_what_earlier_attempts_left_and_not_what_later_ones_have_begun(tmp_path):
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, small_state(1)).wait()
        for number in (1, 2, 3):
            (tmp_path / f".tmp-7-{snapshots._session}-{number}").mkdir()
        snapshots.save(2, small_state(2)).wait()
        assert sorted(path.name[-1] for path in tmp_path.glob(".tmp-7-*")) == ["2", "3"]


def test_a_clean_up_at_the_end_that_fails_is_raised_once(tmp_path, monkeypatch):
    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "rmdir")

    snapshots = Snapshots(tmp_path)
    snapshots.save(1, small_state(1)).wait()
    monkeypatch.setattr(background, "clear_spares", fail)
    with pytest.raises(OSError, match="rmdir"):
        snapshots.close()
    snapshots.close()


def test_a_tier_that_another_job_has_leaves_the_root_free(tmp_path):
    (tmp_path / "far").mkdir()
    lock = RootLock(tmp_path / "far", "theirs")
    with pytest.raises(SnapshotLocked) as caught:
        Snapshots(tmp_path / "near", tiers=[Tier(tmp_path / "far")])
    Snapshots(tmp_path / "near").close()
    assert "far" in str(caught.value)
    lock.close()


def test_the_first_error_of_several_copies_is_told_once_all_have_ended():
    handle = Handle(1, 0)
    handle.expect(3)
    handle.copy_finished(OSError("first"))
    handle.copy_finished(OSError("second"))
    handle.raise_copy_once()
    assert not handle.copied()
    handle.copy_finished(None)
    with pytest.raises(OSError, match="first"):
        handle.raise_copy_once()
    handle.raise_copy_once()
