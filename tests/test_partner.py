"""Copies in a partner's memory: two "nodes" are two roots on tmpfs, ranks are processes that die by kill -9."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch.distributed import HashStore, TCPStore

from plait import _C
from plait.ckpt import Sharded, SnapshotError, Snapshots
from plait.ckpt.manifest import DataFile
from plait.ckpt.partner import Partner, Peers, PeerStore
from tests.faults import failing, flip, on_ranks, threads_end

ROWS = 300_000
T = TypeVar("T")


@pytest.fixture
def nodes():
    """Two folders on tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield [Path(folder) / "a", Path(folder) / "b"]


def state(seed: int, rank: int) -> dict:
    full = torch.arange(4 * ROWS, dtype=torch.float32).reshape(4, ROWS) + seed
    own = full[2 * rank : 2 * rank + 2].clone()
    return {"w": Sharded(own, (4, ROWS), (2 * rank, 0)), "rep": torch.full((9,), seed), "n": seed}


def open_on(nodes: list[Path], store, rank: int, session: int, **more) -> Snapshots:
    partner = Partner("127.0.0.1")
    more = {"keep_last": 2, "timeout_s": 60.0, **more}
    return Snapshots(nodes[rank], rank=rank, world_size=2, session=session, store=store, partner=partner, **more)


def restore_all(nodes: list[Path], session: int, **more) -> list[int]:
    """Restores on both ranks in threads; returns their steps after checking every bit."""
    store = HashStore()

    def work(rank: int) -> int:
        found = state(-5, rank)
        with open_on(nodes, store, rank, session, **more) as snapshots:
            result = snapshots.restore(found)
            wanted = state(result.step, rank)
            assert torch.equal(found["w"].tensor, wanted["w"].tensor) and torch.equal(found["rep"], wanted["rep"])
            snapshots.save(result.step + 100, state(result.step + 100, rank)).wait()  # nobody leaves before the other
            return result.step

    return on_ranks(2, work)


def rank_process(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)  # the parent's thread pool does not survive a fork
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def test_a_lost_node_is_restored_from_its_partner(nodes):
    """Both processes die by SIGKILL; then one node's memory is gone. All bytes come back over TCP."""
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    read, write = os.pipe()

    def train(rank: int) -> None:
        store = TCPStore("127.0.0.1", master.port, is_master=False, timeout=timedelta(seconds=60))
        snapshots = open_on(nodes, store, rank, session=1)
        for step in (1, 2):
            snapshots.save(step, state(step, rank)).wait()
        os.write(write, b"x")
        time.sleep(120)

    pids = [rank_process(lambda r=rank: train(r)) for rank in range(2)]
    done = os.read(read, 1) + os.read(read, 1)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert done == b"xx"
    for lost in (0, 1):
        kept = nodes[lost].with_name("kept")
        shutil.copytree(nodes[1 - lost], kept)
        survivors = [nodes[lost].with_name(f"new-{lost}"), kept]
        assert restore_all(survivors if lost == 0 else survivors[::-1], session=2 + lost) == [2, 2]
        shutil.rmtree(kept)


def test_each_data_file_is_in_two_roots(nodes):
    store = HashStore()

    def work(rank: int) -> None:
        with open_on(nodes, store, rank, session=1) as snapshots:
            for step in (1, 2, 3):
                snapshots.save(step, state(step, rank)).wait()

    on_ranks(2, work)
    for node in nodes:
        assert sorted(p.name for p in node.glob("step-*")) == [
            "step-000000002",
            "step-000000003",
        ]  # retention on both
        names = sorted(p.name for p in (node / "step-000000003").glob("*.safetensors"))
        assert names == ["r00000.safetensors", "r00001.safetensors"]
        assert not list(node.glob(".tmp-*"))
    for name in names:
        assert (nodes[0] / "step-000000003" / name).read_bytes() == (nodes[1] / "step-000000003" / name).read_bytes()


def test_a_damaged_copy_gives_way_to_the_partners(nodes):
    store = HashStore()

    def work(rank: int) -> None:
        with open_on(nodes, store, rank, session=1) as snapshots:
            snapshots.save(1, state(1, rank)).wait()

    on_ranks(2, work)
    for rank in (0, 1):
        flip(nodes[rank] / f"step-000000001/r0000{rank}.safetensors", 9000)
    assert restore_all(nodes, session=2) == [1, 1]


@pytest.mark.parametrize("name", ["MANIFEST.json", "objects.json", "r00000.json", "r00001.json", "data"])
@pytest.mark.parametrize("how", ["truncated", "flipped", "removed"])
def test_any_file_of_one_root_may_be_damaged_while_the_other_has_it(nodes, name, how):
    """On rank 0's node in step 1, on rank 1's in step 2: all ranks still see the same, newest snapshot."""
    store = HashStore()

    def work(rank: int) -> None:
        with open_on(nodes, store, rank, session=1) as snapshots:
            for step in (1, 2):
                snapshots.save(step, state(step, rank)).wait()

    on_ranks(2, work)
    for rank in (0, 1):
        path = nodes[rank] / f"step-00000000{rank + 1}" / (name if name != "data" else f"r0000{rank}.safetensors")
        if how == "flipped":
            flip(path, 100 if path.suffix == ".json" else 9000)
        elif how == "truncated":
            os.truncate(path, path.stat().st_size - 30)
        else:
            path.unlink()
    assert restore_all(nodes, session=2) == [2, 2]


def test_both_nodes_of_a_file_lost_at_once_is_said_and_is_no_new_run(nodes):
    """Three nodes; ranks 1 and 2 are lost, and with them both copies of rank 1's file of all steps but one."""
    roots = [nodes[0].with_name(name) for name in "abc"]
    for step in (1, 2):
        store = HashStore()

        def save(rank: int, step: int = step, store: HashStore = store) -> None:
            launch = {"rank": rank, "world_size": 3, "session": step, "timeout_s": 60.0}
            with Snapshots(roots[rank], store=store, partner=Partner("127.0.0.1"), **launch) as snapshots:
                snapshots.save(step, crowd_state(step, rank, 3)).wait()

        on_ranks(3, save)

    def look(kept: set[str], session: int, saved: int | None) -> None:
        for root in roots:
            for folder in root.glob("step-*"):
                if f"{root.name}{int(folder.name[5:])}" not in kept:
                    shutil.rmtree(folder)
        store = HashStore()

        def work(rank: int) -> None:
            launch = {"rank": rank, "world_size": 3, "session": session, "timeout_s": 60.0, "read_only": True}
            with Snapshots(roots[rank], store=store, partner=Partner("127.0.0.1"), **launch) as snapshots:
                if saved is not None:
                    restored = snapshots.restore(crowd_state(0, rank, 3))
                    assert snapshots.latest() == restored.step == saved
                    assert "step-000000002/r00001.safetensors' is missing" in str(restored.report.skipped)
                else:
                    for ask in (snapshots.latest, lambda: snapshots.restore(crowd_state(0, rank, 3))):
                        with pytest.raises(SnapshotError, match=r"step-000000002/r00001.safetensors' is missing"):
                            ask()
                both.wait(30)

        both = threading.Barrier(3)
        on_ranks(3, work)

    look({"a1", "b1", "c1", "a2"}, 3, 1)
    look({"a1", "a2"}, 4, None)


def test_a_copy_is_there_while_the_partner_renames_its_own_files(nodes, monkeypatch):
    """Each time an attempt is listed, a small file of it gets its final name between the listing and a look at it."""
    scan, store, listed = os.scandir, HashStore(), []

    @contextmanager
    def scan_beside_a_rename(path):
        part = Path(path) / "r00007.ok.part"
        if not Path(path).name.startswith(".tmp-"):
            part = Path(path).with_name("none.part")
        part.touch()
        with scan(path) as entries:
            found = list(entries)
        part.unlink()
        listed.extend(entry.name for entry in found if entry.name == part.name)
        yield iter(found)

    monkeypatch.setattr(os, "scandir", scan_beside_a_rename)

    def work(rank: int) -> None:
        with open_on(nodes, store, rank, session=1) as snapshots:
            snapshots.save(1, state(1, rank)).wait()

    on_ranks(2, work)
    assert len(listed) >= 2


def attempts_of(nodes: list[Path]) -> list[str]:
    """What is in attempts on all nodes: names of data files, finished or not."""
    return sorted(p.name for node in nodes for p in node.glob(".tmp-*/*.safetensors*"))


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("late", [False, True], ids=["sent before", "sent after"])
def test_a_failed_save_leaves_no_copy_in_the_partners_memory(nodes, victim, late):
    """Else a disk that was full stays full: what is left of one save takes the room of the next."""
    store, sent, gone = HashStore(), threading.Event(), threading.Event()

    def work(rank: int) -> None:
        with open_on(nodes, store, rank, session=1) as snapshots:
            background = snapshots._background
            good, send = background.writer, background.writer.peers.send
            if rank == victim:
                background.writer = replace(good, io=failing("fallocate", 28))
                gone.wait(0 if late else 30)

            def send_then(*what):
                sent.wait(30 if late else 0)
                try:
                    send(*what)
                finally:
                    gone.set()

            if rank != victim:
                background.writer.peers.send = send_then
            handle = snapshots.save(1, state(1, rank))
            with pytest.raises((OSError, SnapshotError), match="fallocate"):
                handle.wait()
            sent.set()
            snapshots.wait()
            both.wait(30)
            if rank == 0:
                assert attempts_of(nodes) == []
            both.wait(30)
            background.writer, background.writer.peers.send = good, send
            snapshots.save(2, state(2, rank)).wait()

    both = threading.Barrier(2)
    on_ranks(2, work)
    assert [sorted(p.name for p in node.glob("*step-*")) for node in nodes] == [["step-000000002"]] * 2


def test_a_copy_that_did_not_fit_leaves_nothing(nodes, monkeypatch):
    """The partner's memory is full in the middle of a copy."""
    store, full, write = HashStore(), [28], os.pwrite

    def write_once_full(fd, data, at):
        if full and len(data) > 4096:  # not the LOCK
            raise OSError(full.pop(), "No space left on device")
        return write(fd, data, at)

    def work(rank: int) -> None:
        with open_on(nodes, store, rank, session=1) as snapshots:
            with pytest.raises((OSError, SnapshotError), match="No space left"):
                snapshots.save(1, state(1, rank)).wait()
            both.wait(30)
            assert attempts_of(nodes) == []

    both = threading.Barrier(2)
    monkeypatch.setattr(os, "pwrite", write_once_full)
    on_ranks(2, work)


def test_a_partner_that_gave_up_after_it_took_a_copy_says_why(nodes):
    """Its own part failed just then, and the sender found "None of 2404096 bytes" where its copy had been."""
    peers, store, attempt = {}, HashStore(), f".tmp-1-{'0' * 16}-1"

    def work(rank: int) -> None:
        (nodes[rank] / attempt).mkdir(parents=True)
        peers[rank] = Peers(Partner("127.0.0.1"), store, nodes[rank], _C.PosixIo(), "0" * 16, rank, 2)

    on_ranks(2, work)
    (nodes[0] / attempt / "r00000.safetensors").write_bytes(b"12345")
    target = peers[0]._peers[1]
    put = target.put_stream

    def put_then_give_up(*what):
        put(*what)
        peers[1].give_up(nodes[1] / attempt, "No space left on rank 1")

    target.put_stream = put_then_give_up
    with pytest.raises(OSError, match="that save was given up: No space left on rank 1"):
        peers[0].send(nodes[0] / attempt, [DataFile("r00000.safetensors", 5, 4096, (_C.crc32c(b"12345"),))])
    assert not list(nodes[1].glob("*/*.safetensors"))
    for peer in peers.values():
        peer.close()


def crowd_state(seed: int, rank: int, ranks: int) -> dict:
    """One row for each rank, and what all hold."""
    return {"w": Sharded(torch.full((1, 5000), seed * 10.0 + rank), (ranks, 5000), (rank, 0)), "n": seed}


@pytest.mark.parametrize("homes", [(0, 0, 1, 1), (0, 0, 1), (0, 1, 1), (0, 1, 2, 2, 0)], ids=str)
def test_several_ranks_of_a_node_have_their_copies_on_another_one(nodes, homes):
    """Every node in turn is lost; the partner is chosen from where the roots are."""
    ranks, roots = len(homes), [nodes[0].with_name(f"n{home}") for home in homes]

    def on_all(work: Callable[[Snapshots, int], T], where: list[Path], session: int) -> list[T]:
        store = HashStore()

        def one(rank: int) -> T:
            launch = {"rank": rank, "world_size": ranks, "session": session, "timeout_s": 60.0}
            with Snapshots(where[rank], store=store, partner=Partner("127.0.0.1"), **launch) as snapshots:
                found = work(snapshots, rank)
                snapshots.save(99, crowd_state(99, rank, ranks)).wait()  # nobody leaves before the others
                return found

        return on_ranks(ranks, one)

    def restore(snapshots: Snapshots, rank: int) -> bool:
        found, wanted = crowd_state(0, rank, ranks), crowd_state(5, rank, ranks)
        assert snapshots.restore(found, step=5).step == 5
        return torch.equal(found["w"].tensor, wanted["w"].tensor)

    on_all(lambda snapshots, rank: snapshots.save(5, crowd_state(5, rank, ranks)).wait(), roots, 1)
    for home in set(homes):
        names = [{p.name for p in (roots[r] / "step-000000005").glob("*.safetensors")} for r in range(ranks)]
        for rank, at in enumerate(homes):
            data = f"r{rank:05d}.safetensors"
            assert data in names[rank] and any(data in names[r] for r in range(ranks) if homes[r] != at)
        kept = [Path(f"{root}-{home}") for root in roots]
        for root, copy in set(zip(roots, kept, strict=True)):
            if root != roots[homes.index(home)]:
                shutil.copytree(root, copy)
        assert on_all(restore, kept, 10 + home) == [True] * ranks


def test_a_partner_on_the_same_node_is_refused(nodes):
    """Its copy would be lost with the original: by name, on all ranks, before anything is saved."""
    for homes, shift, wrong in (((0, 0, 1, 1), 1, "0 and 1"), ((0, 1, 0), 1, "2 and 0"), ((0, 0), None, "one root")):
        store = HashStore()

        def work(rank: int, homes=homes, shift=shift, wrong=wrong, store=store) -> None:
            with pytest.raises(ValueError, match=wrong):
                launch = {"rank": rank, "world_size": len(homes), "session": 1}
                Snapshots(nodes[homes[rank]], store=store, partner=Partner("127.0.0.1", shift), **launch)

        on_ranks(len(homes), work)
    gc.collect()
    assert threads_end("plait-peers")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_in_a_save_leaves_the_older_one_whole(nodes, victim):
    """Killed at operations all along the second save; then its node is lost as well."""
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def train(rank: int, session: int, index: int) -> None:
        store = TCPStore("127.0.0.1", master.port, is_master=False, timeout=timedelta(seconds=60))
        snapshots = open_on(nodes, store, rank, session, timeout_s=3.0, threads=1)
        snapshots.save(1, state(1, rank)).wait()
        if rank == victim:
            io = _C.FaultIo([(index, "crash_before", 0)])
            writer = snapshots._background.writer
            snapshots._background.writer = type(writer)(**{**vars(writer), "io": io})
        snapshots.save(2, state(2, rank)).wait()

    for session, index in enumerate((0, 4, 9, 14, 19, 24), 1):
        pids = [rank_process(lambda r=rank, s=session, i=index: train(r, s, i)) for rank in range(2)]
        os.waitpid(pids[victim], 0)
        os.kill(pids[1 - victim], signal.SIGKILL)
        os.waitpid(pids[1 - victim], 0)
        shutil.rmtree(nodes[victim])
        steps = restore_all(nodes, session=100 + session)
        assert steps[0] == steps[1] and steps[0] in (1, 2), (session, index)
        for node in nodes:
            shutil.rmtree(node)


def test_a_server_gives_nothing_without_its_token_and_no_other_names(nodes):
    peers: list[Peers] = []
    store = HashStore()

    def work(rank: int) -> None:
        nodes[rank].mkdir()
        peers.append(Peers(Partner("127.0.0.1"), store, nodes[rank], _C.PosixIo(), "0" * 16, rank, 2))

    on_ranks(2, work)
    good = peers[0]._peers[1]
    stranger = PeerStore(["127.0.0.1", int(good.url.rpartition(":")[2]), "0" * 32], 5.0)
    with pytest.raises(OSError, match="token"):
        stranger.steps()
    assert good.steps() == []
    for folder in ("..", "/etc", "step-000000001/..", ".trash-x", ""):
        with pytest.raises(OSError, match="is no name of a snapshot's file"):
            good.get(folder, "passwd", 0, 10)
    with pytest.raises(OSError, match="is not served"):
        good.put_stream("step-000000001", "r00000.safetensors", 1, lambda: [memoryview(b"x")])
    with pytest.raises(OSError, match="is no name"):
        good.put_stream(f".tmp-1-{'0' * 16}-1", "../evil", 1, lambda: [memoryview(b"x")])
    with socket.create_connection(("127.0.0.1", int(good.url.rpartition(":")[2]))) as connection:
        connection.sendall(b"not json\n")
        assert b"error" in connection.makefile("rb").readline()
    for peer in peers:
        peer.close()
        peer.close()


def test_a_partner_that_makes_no_sense_is_refused(tmp_path):
    with pytest.raises(ValueError, match="give Snapshots one"):
        Snapshots(tmp_path, partner=Partner("127.0.0.1"))
    with pytest.raises(ValueError, match="shift=2"):
        Peers(Partner("127.0.0.1", shift=2), HashStore(), tmp_path, _C.PosixIo(), "0" * 16, 0, 2)


def test_without_the_partner_a_lost_node_is_named(nodes):
    """What the copies are for: the same loss without them."""
    store = HashStore()

    def work(rank: int) -> None:
        with Snapshots(nodes[rank], rank=rank, world_size=2, session=1, store=store, timeout_s=60) as snapshots:
            snapshots.save(1, state(1, rank)).wait()

    on_ranks(2, work)
    shutil.rmtree(nodes[1])
    with pytest.raises(SnapshotError, match="no snapshot|no rank has it|cannot be read"):
        Snapshots(nodes[0], read_only=True).restore({**state(0, 0), "w": torch.zeros(4, ROWS)})
