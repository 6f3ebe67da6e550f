"""Ranks without a common folder (`store=`): what is on each disk, that their union is a snapshot, and what a failure
or a crash on one disk does to the others.

Threads with a HashStore play the ranks, but for one test with two processes.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from plait import _C
from plait.ckpt import PerRank, Sharded, SnapshotError, Snapshots, Tier
from plait.ckpt.partner import Partner
from plait.ckpt.reader import SnapshotReader, read_manifest
from tests.faults import failing, on_ranks, threads_end


def state_of(rank, seed):
    """A bare tensor that all ranks share, one row block for each, and a value per rank."""
    generator = torch.Generator().manual_seed(seed)
    shared, blocks = torch.randn(900_000, generator=generator), torch.randn(4, 1000, generator=generator)
    rows = blocks[2 * rank : 2 * rank + 2].clone()
    return {"shared": shared, "rows": Sharded(rows, (4, 1000), (2 * rank, 0)), "rank": PerRank(rank), "seed": seed}


def roots_of(tmp_path):
    return [tmp_path / f"node{rank}" for rank in range(2)]


def opened(tmp_path, store, rank, **options):
    options = {"timeout_s": 30, "session": 5, **options}
    return Snapshots(roots_of(tmp_path)[rank], rank=rank, world_size=2, store=store, **options)


def union(tmp_path, name="union"):
    """All disks' step folders copied into one root."""
    target = tmp_path / name
    for root in roots_of(tmp_path):
        for step in root.glob("step-*"):
            shutil.copytree(step, target / step.name, dirs_exist_ok=True)
    return target


def is_restored(root, seed):
    def restore(rank):
        blank = state_of(rank, 0)
        with_shared = Snapshots(root, rank=rank, world_size=2, session=77, read_only=True, timeout_s=30)
        values = with_shared.restore(blank).values
        wanted = state_of(rank, seed)
        assert torch.equal(blank["shared"], wanted["shared"])
        assert torch.equal(blank["rows"].tensor, wanted["rows"].tensor)
        return (values["rank"], values["seed"]) == (rank, seed)

    return on_ranks(2, restore) == [True, True]


def test_every_disk_has_its_data_and_all_small_files_and_the_union_is_a_snapshot(tmp_path):
    store = dist.HashStore()

    def save(rank):
        with opened(tmp_path, store, rank, keep_last=1) as snapshots:
            for seed in (1, 2):
                handle = snapshots.save(seed, state_of(rank, seed))
                handle.wait()
            return handle.folder

    folders = on_ranks(2, save)
    small = {"MANIFEST.json", "objects.json", "r00000.json", "r00001.json"}
    for rank, folder in enumerate(folders):
        assert set(os.listdir(folder)) == small | {f"r0000{rank}.safetensors"}
        assert [p.name for p in folder.parent.glob("*-*")] == ["step-000000002"]  # retention, no attempts left
        assert read_manifest(_C.PosixIo(), folder).commit == "disks"
    assert (folders[0] / "MANIFEST.json").read_bytes() == (folders[1] / "MANIFEST.json").read_bytes()
    assert is_restored(union(tmp_path), 2)
    with pytest.raises(SnapshotError, match=r"r00001\.safetensors.*No such file"):
        SnapshotReader(folders[0]).read_full("shared")


def test_two_processes_on_two_disks(tmp_path):
    code = (
        "import sys; from pathlib import Path; import torch.distributed as dist\n"
        "from tests.test_disks import opened, state_of\n"
        "tmp, rank = Path(sys.argv[1]), int(sys.argv[2])\n"
        "with opened(tmp, dist.FileStore(str(tmp / 'store'), 2), rank) as snapshots:\n"
        "    for seed in (1, 2):\n"
        "        snapshots.save(seed, state_of(rank, seed)).wait()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    children = [subprocess.Popen([*command, str(rank)], cwd=os.getcwd()) for rank in range(2)]
    assert [child.wait(120) for child in children] == [0, 0]
    assert is_restored(union(tmp_path), 2)


def test_a_root_that_rank_0_may_not_have_is_named_on_the_others_at_once(tmp_path):
    """They wait for its word, and would until the limit of the store."""
    store = dist.HashStore()  # waits 5 minutes
    root = roots_of(tmp_path)[0]

    def work(rank):
        with pytest.raises(SnapshotError, match=r"LOCK. is held by"):
            opened(tmp_path, store, rank, partner=Partner("127.0.0.1"))

    with Snapshots(root):
        on_ranks(2, work)
    gc.collect()
    assert threads_end("plait-peers")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk_ends_the_save_on_all_and_the_next_one_works(tmp_path, victim):
    store = dist.HashStore()

    def save(rank):
        with opened(tmp_path, store, rank) as snapshots:
            good = snapshots._background.writer
            if rank == victim:
                snapshots._background.writer = replace(good, io=failing("fallocate", 28))
            with pytest.raises((OSError, SnapshotError), match="fallocate"):
                snapshots.save(1, state_of(rank, 1)).wait()
            snapshots._background.writer = good
            snapshots.save(2, state_of(rank, 2)).wait()

    on_ranks(2, save)
    for root in roots_of(tmp_path):
        assert sorted(p.name for p in root.glob("*-*")) + sorted(p.name for p in root.glob(".t*")) == [
            "step-000000002"
        ]
    assert is_restored(union(tmp_path), 2)


def last_rename(tmp_path):
    """Returns which operation of rank 1's second save takes the step name."""
    store, counting = dist.HashStore(), _C.FaultIo([])

    def save(rank):
        with opened(tmp_path / "probe", store, rank) as snapshots:
            snapshots.save(1, state_of(rank, 1)).wait()
            if rank == 1:
                snapshots._background.writer = replace(snapshots._background.writer, io=counting)
            snapshots.save(2, state_of(rank, 2)).wait()

    on_ranks(2, save)
    (found,) = [
        i
        for i, (name, path) in enumerate(counting.ops)
        if name == "rename" and "-> " in path and path.endswith("step-000000002")
    ]
    return found


def test_a_disk_that_does_not_take_the_name_costs_no_older_snapshot(tmp_path):
    """The window between two disks' renames: rank 1's disk fails there, for good."""
    store, index = dist.HashStore(), last_rename(tmp_path)
    io = _C.FaultIo([(index, "errno", 5)], sticky=True, only=["rename", "fsync_dir"])

    def save(rank):
        snapshots = opened(tmp_path, store, rank, keep_last=1, timeout_s=3)
        snapshots.save(1, state_of(rank, 1)).wait()
        if rank == 1:
            snapshots._background.writer = replace(snapshots._background.writer, io=io)
        with pytest.raises((OSError, SnapshotError), match="rename|the disks of ranks .1. did not commit step 2"):
            snapshots.save(2, state_of(rank, 2)).wait()
        snapshots.close()

    on_ranks(2, save)
    assert io.ops[index][0] == "rename"
    both = union(tmp_path)
    assert "r00001.safetensors" not in os.listdir(both / "step-000000002")
    assert is_restored(both, 1)


def test_ranks_of_one_folder_with_a_store_are_one_disk(tmp_path):
    store = dist.HashStore()

    def save(rank):
        with Snapshots(tmp_path / "one", rank=rank, world_size=2, session=5, store=store, timeout_s=30) as snapshots:
            snapshots.save(1, state_of(rank, 1)).wait()
            blank = state_of(rank, 0)
            snapshots.restore(blank)  # agrees over the store
            assert torch.equal(blank["shared"], state_of(rank, 1)["shared"])

    on_ranks(2, save)
    assert is_restored(tmp_path / "one", 1)


@pytest.mark.parametrize("tier", [True, False], ids=["with a tier", "alone"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_lost_its_disk_and_one_that_did_not_restore_the_same(tmp_path, tier, lost):
    """Steps 1 to 3 on the disks, 2 in the tier: all take 2, and say why not 3; without a tier there is no way back,
    which all hear at once, and nobody takes it for a new run."""
    store = dist.HashStore()

    def launch(session, work):
        def one(rank):
            tiers = [Tier(tmp_path / "shared", every=2)] if tier else []
            with opened(tmp_path, store, rank, session=session, tiers=tiers) as snapshots:
                work(snapshots, rank)

        on_ranks(2, one)

    def save(snapshots, rank):
        assert snapshots.latest() is None
        for step in (1, 2, 3):
            snapshots.save(step, state_of(rank, step)).wait("remote")

    def restore(snapshots, rank):
        blank, wanted = state_of(rank, 0), state_of(rank, 2)
        text = f"rank {lost}: has no copy of it, here or in a tier"
        if not tier:
            for ask in (snapshots.latest, lambda: snapshots.restore(blank)):
                with pytest.raises(SnapshotError, match=f"step-000000003: {text}"):
                    ask()
            return
        assert snapshots.latest() == 2
        restored = snapshots.restore(blank)
        assert (restored.step, restored.report.skipped) == (2, (("step-000000003", text),))
        assert torch.equal(blank["shared"], wanted["shared"]) and restored.values["rank"] == rank
        assert torch.equal(blank["rows"].tensor, wanted["rows"].tensor)
        snapshots.save(3, state_of(rank, 3)).wait()

    launch(1, save)
    shutil.rmtree(roots_of(tmp_path)[lost])
    launch(2, restore)
