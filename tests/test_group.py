"""Rank, world and session taken from torch.distributed, without a collective."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist

from plait.ckpt import Partner, Snapshots
from plait.ckpt.group import launch_of_group
from tests.faults import on_ranks, restored_seed, small_state


def test_without_a_group_there_is_one_rank(tmp_path):
    assert launch_of_group() == {}
    with Snapshots.of_process_group(tmp_path, keep_last=1) as snapshots:
        snapshots.save(3, small_state(3))
    assert restored_seed(tmp_path) == 3


def test_each_object_of_a_launch_has_a_session_of_its_own(tmp_path):
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        first, second = launch_of_group(), launch_of_group()
        with Snapshots.of_process_group(tmp_path, rank=0) as snapshots:
            assert (snapshots.rank, snapshots.world_size) == (0, 1)
    finally:
        dist.destroy_process_group()
    assert first["session"] != second["session"] and (first["rank"], first["world_size"]) == (0, 1)


def test_partners_and_several_disks_meet_in_the_store_of_the_group(tmp_path, monkeypatch):
    """Nothing to pass but `partner`, or store=True; alone, neither is needed."""
    place, store = threading.local(), dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [store.clone(), store.clone()]  # as two processes have
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: clients[place.rank])
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: place.rank)

    def save(rank):
        place.rank = rank
        for name, options in (("partner", {"partner": Partner("127.0.0.1")}), ("disks", {"store": True})):
            with Snapshots.of_process_group(tmp_path / f"{name}{rank}", timeout_s=30, **options) as snapshots:
                snapshots.save(1, {"n": 1, "w": torch.full((3,), 2.0)}).wait()

    on_ranks(2, save)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with Snapshots.of_process_group(tmp_path / "alone", store=True) as snapshots:
        snapshots.save(3, small_state(3))
    assert restored_seed(tmp_path / "alone") == 3


def test_all_ranks_get_the_session_of_rank_0_also_when_it_comes_last(tmp_path, monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    place = threading.local()
    monkeypatch.setattr(dist, "get_rank", lambda: place.rank)

    def ask(rank):
        place.rank = rank
        return [launch_of_group() for _ in range(2)]

    answers = on_ranks(3, ask)
    for number in range(2):
        assert len({answer[number]["session"] for answer in answers}) == 1
    assert [answer[0]["rank"] for answer in answers] == [0, 1, 2]
    assert answers[0][0]["session"] != answers[0][1]["session"]
