"""Defences that were deleted one by one and that no other test missed: copies in tiers, stores and partners' roots.

As in test_defences.py, most tests call the function itself with what it must refuse or survive: whole copies meet
several defences in a row, and most stores never fail in the way that is meant.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait import _C
from plait.ckpt import SnapshotError, Snapshots, store, tier_reader, uploads
from plait.ckpt.codec import HEAD_BYTES, Coder, pack, unpack
from plait.ckpt.copier import Copier
from plait.ckpt.errors import SnapshotDamaged
from plait.ckpt.handle import Handle
from plait.ckpt.manifest import MANIFEST, MAX_JSON_BYTES, OBJECTS, DataFile
from plait.ckpt.partner import Peers, PeerStore, Union
from plait.ckpt.peer_server import Server, Taken
from plait.ckpt.reader import SnapshotReader
from plait.ckpt.remote import FsspecStore
from plait.ckpt.store import CHUNK_BYTES, DirStore, find_copy, retrying
from plait.ckpt.tier_reader import TierReader, open_folder
from plait.ckpt.tiers import Launch, Tier
from tests.faults import count_ops, small_state

IO = _C.PosixIo()
HEX = "0123456789abcdef"
ATTEMPT = f"5-{HEX}-3"
FOLDER = f".tmp-{ATTEMPT}"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again is tried again at once."""
    monkeypatch.setattr(store, "_FIRST_PAUSE_S", 1e-3)
    monkeypatch.setattr(store, "_LONGEST_PAUSE_S", 1e-3)


def saved(root: Path, *steps: int, **options: Any) -> Path:
    with Snapshots(root, threads=1, keep_last=None, **options) as snapshots:
        for step in steps:
            snapshots.save(step, small_state(step)).wait("remote")
    return root / f"step-{steps[-1]:09d}"


def launch(rank: int = 0, world_size: int = 1, run: str = "") -> Launch:
    return Launch(rank, world_size, HEX, IO, None, run, 0.5, threading.Event())


def copier_of(place: Any, folder: Path | None = None, **options: Any) -> Copier:
    run = "" if folder is None else SnapshotReader(folder).manifest.run
    tier = Tier(place.url, **{"retry_s": 0.05, **options.pop("tier", {})})
    return Copier(tier, place, launch(run=run, **options))


def mem(tmp_path: Path) -> str:
    """A place in fsspec's memory that no other test uses."""
    return f"memory:/{tmp_path}"


# ---- the directory ------------------------------------------------------------------------------------------------


def test_a_folder_with_too_little_space_is_not_begun(tmp_path, monkeypatch):
    there = DirStore(tmp_path, IO, HEX)
    folder = there.begin(ATTEMPT)
    monkeypatch.setattr(store._C, "free_bytes", lambda io, path: 99)
    with pytest.raises(OSError, match="100 bytes are needed, 99 are free") as caught:
        there.put_stream(folder, "f", 100, lambda: [memoryview(b"x" * 100)])
    assert caught.value.errno == errno.ENOSPC and there.files(folder) == {}
    there.put_stream(folder, "f", 99, lambda: [memoryview(b"x" * 99)])
    assert there.files(folder) == {"f": 99}


def test_short_writes_of_a_copy_go_on_and_its_bytes_leave_the_cache(tmp_path, monkeypatch):
    real, advised = os.pwrite, []
    monkeypatch.setattr(store.os, "pwrite", lambda fd, data, at: real(fd, data[: max(1, len(data) // 2)], at))
    monkeypatch.setattr(store.os, "posix_fadvise", lambda fd, *what: advised.append(what))
    there, blocks = DirStore(tmp_path, IO, HEX), [b"abcdefg", b"", b"h" * 1000]
    folder = there.begin(ATTEMPT)
    there.put_stream(folder, "f", 1007, lambda: map(memoryview, blocks))
    assert (tmp_path / folder / "f").read_bytes() == b"".join(blocks)
    assert advised == [(0, 0, os.POSIX_FADV_DONTNEED)]  # so that reading back asks the disk


def test_a_finished_copy_loses_its_name_durably_before_its_files(tmp_path):
    saved(tmp_path, 1)
    folder = "step-000000001"
    names = sorted(os.listdir(tmp_path / folder))
    ops = count_ops(lambda io: DirStore(tmp_path, io, HEX).remove(folder, names))
    assert [name for name, _ in ops] == ["rename", "fsync_dir", *["unlink"] * len(names), "rmdir"]
    assert ops[0][1].endswith(f".trash-{HEX}-{folder}") and ops[1][1] == str(tmp_path)


def test_a_torn_manifest_of_an_earlier_try_is_no_obstacle(tmp_path):
    there = DirStore(tmp_path, IO, HEX)
    for name in (MANIFEST, f"{MANIFEST}.part"):
        (tmp_path / there.begin(ATTEMPT) / name).write_bytes(b"torn")
    assert (tmp_path / there.finish(ATTEMPT, b"whole") / MANIFEST).read_bytes() == b"whole"


def test_a_copy_is_found_by_its_attempt_beside_damaged_and_other_ones(tmp_path):
    first = SnapshotReader(saved(tmp_path, 1)).manifest.attempt
    second = SnapshotReader(saved(tmp_path, 1).with_name("step-000000001-2")).manifest.attempt
    there = DirStore(tmp_path, IO, HEX)
    assert find_copy(there, first) == "step-000000001" and find_copy(there, second) == "step-000000001-2"
    (tmp_path / "step-000000001-2" / MANIFEST).write_bytes(b"damaged")
    assert find_copy(there, first) == "step-000000001" and find_copy(there, second) is None


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (OSError(errno.EIO, "away"), 3),
        (OSError(errno.ENOSPC, "full"), 1),
        (OSError(errno.EDQUOT, "full"), 1),
        (FileNotFoundError(2, "absent"), 1),
        (PermissionError(13, "refused"), 1),
    ],
)
def test_what_waiting_cannot_cure_is_not_tried_again(error, tries):
    count = []

    def call() -> str:
        count.append(1)
        if len(count) < 3:
            raise error
        return "there"

    if tries == 1:
        with pytest.raises(type(error)):
            retrying(call, 60.0, threading.Event())
    else:
        assert retrying(call, 60.0, threading.Event()) == "there"
    assert len(count) == tries


def test_nothing_is_tried_again_once_all_waiting_ends():
    stop, count = threading.Event(), []
    stop.set()

    def call() -> None:
        count.append(1)
        raise OSError(errno.EIO, "away")

    with pytest.raises(OSError, match="away"):
        retrying(call, 0.05, stop)
    assert len(count) == 1


# ---- an object store ----------------------------------------------------------------------------------------------


def test_whatever_a_driver_does_is_an_oserror_or_the_bytes(tmp_path, monkeypatch):
    there = FsspecStore(mem(tmp_path), {})
    there.put("a", "f", b"0123456789")
    assert there.get("a", "f", 2, 10) == b"23456789"
    with pytest.raises(OSError, match="8 bytes came where 9 were wanted"):
        there.get("a", "f", 2, 11)
    there.put("a", "g", b"")
    there.remove("a", ["f", "absent", "g"])
    assert there.files("a") == {}

    def fail(*args: object, **more: object) -> None:
        raise RuntimeError("the client's own")

    monkeypatch.setattr(there, "_fs", SimpleNamespace(cat_file=fail))
    with pytest.raises(OSError, match="get: RuntimeError: the client's own") as caught:
        there.get("a", "f", 0, 1)
    assert caught.value.errno == errno.EIO


# ---- a copy -------------------------------------------------------------------------------------------------------


class Store(DirStore):
    """A directory that does other things than it was told: `before(name, data)` returns what is put instead."""

    before: Callable[[str, bytes], bytes] = staticmethod(lambda name, data: data)

    def put(self, folder: str, name: str, data: bytes) -> None:
        super().put(folder, name, self.before(name, data))


def test_a_coded_part_that_comes_back_with_other_bytes_is_an_error(tmp_path):
    there = Store(tmp_path, IO, HEX)
    folder, copier = there.begin(ATTEMPT), copier_of(there)
    copier._send_part_file(folder, "p", b"12345")
    there.before = lambda name, data: data[:-1] + b"x"
    with pytest.raises(OSError, match="other bytes than were sent"):
        copier._send_part_file(folder, "p", b"12345")
    copier_of(there, tier={"verify": False})._send_part_file(folder, "p", b"12345")


def test_plain_bytes_that_come_back_wrong_are_sent_again(tmp_path, monkeypatch):
    folder = saved(tmp_path / "near", 1)
    there, bad = DirStore(tmp_path / "far", IO, HEX), [1, 2]
    real = there.check

    def check(place: str, file: DataFile) -> None:
        if bad:
            bad.pop()
            path = tmp_path / "far" / place / file.name
            data = bytearray(path.read_bytes())
            data[5000] ^= 1
            path.write_bytes(data)
        real(place, file)

    monkeypatch.setattr(there, "check", check)
    there_folder = copier_of(there, folder, tier={"retry_s": 60.0}).copy(folder)
    assert not bad and SnapshotReader(tmp_path / "far" / there_folder).verify(0) == []


def test_a_file_of_another_size_in_the_store_ends_the_copy_before_its_manifest(tmp_path):
    folder = saved(tmp_path / "near", 1)
    there = Store(tmp_path / "far", IO, HEX)

    def cut(name: str, data: bytes) -> bytes:
        if name == OBJECTS:  # the last file before the manifest: meanwhile something has cut another one
            os.truncate(next((tmp_path / "far").glob(".tmp-*/r00000.safetensors")), 4096)
        return data

    there.before = cut
    with pytest.raises(SnapshotError, match="r00000.safetensors' has 4096 of"):
        copier_of(there, folder).copy(folder)
    assert there.steps() == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_copy_fails_tells_the_others_why(tmp_path, monkeypatch, rank):
    folder = saved(tmp_path / "near", 1)
    there = DirStore(tmp_path / "far", IO, HEX)
    failing, other = (copier_of(there, folder, rank=r, world_size=2) for r in (rank, 1 - rank))

    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "the cable is cut")

    monkeypatch.setattr(failing, "_send_part", fail)
    with pytest.raises(OSError, match="the cable is cut"):
        failing.copy(folder)
    attempt = SnapshotReader(folder).manifest.attempt
    place = there.begin(attempt)
    if rank == 0:
        with pytest.raises(SnapshotError, match="the cable is cut"):
            other._finished(place, attempt)
    else:
        with pytest.raises(SnapshotError, match="rank 1 could not send its part: .*the cable is cut"):
            other._all_there(place)


def test_retention_in_a_store_removes_copies_of_this_run_alone_manifest_first(tmp_path, monkeypatch):
    tier = Tier(mem(tmp_path), keep_last=1)
    for name in "ab":
        saved(tmp_path / name, 1)  # two runs, which share a place
    saved(tmp_path / "a", 2, tiers=[tier])  # and copies of its step 1 too
    removed, real = [], FsspecStore.remove

    def remove(self: FsspecStore, folder: str, names: list[str]) -> None:
        removed.append((folder, list(names)))
        real(self, folder, names)

    monkeypatch.setattr(FsspecStore, "remove", remove)
    saved(tmp_path / "b", 2, 3, tiers=[tier])
    there = FsspecStore(mem(tmp_path), {})
    assert [step for step, *_ in there.steps()] == [3, 2], "one of each run"
    assert [folder.partition(".")[0] for folder, _ in removed] == ["step-000000001", "step-000000002"]
    assert all(names[0] == MANIFEST and len(names) == 4 for _, names in removed)
    assert SnapshotReader(tmp_path / "a/step-000000002").manifest.attempt in [
        store.read_copy_manifest(there, folder).attempt for _, _, folder in there.steps()
    ]


def test_what_other_attempts_left_in_a_tier_goes_and_what_comes_next_stays(tmp_path):
    folder = saved(tmp_path / "near", 5)
    there = DirStore(tmp_path / "far", IO, HEX)
    manifest = replace(SnapshotReader(folder).manifest, attempt=ATTEMPT)
    os.makedirs(tmp_path / "far/step-000000005")
    (tmp_path / "far/step-000000005" / MANIFEST).write_bytes((folder / MANIFEST).read_bytes())
    older, newer, dead = f"4-{HEX}-2", f"6-{HEX}-4", f"9-{'f' * 16}-9"
    for attempt in (older, newer, dead):
        (tmp_path / "far" / there.begin(attempt) / "r00001.json").write_bytes(b"x")
    trash = tmp_path / f"far/.trash-{'f' * 16}-step-000000001"
    trash.mkdir()
    copier_of(there, folder)._retain(manifest, "step-000000005")
    assert there.unfinished() == [newer]  # another rank has begun it already
    assert not trash.exists()


def test_what_is_still_to_be_copied_when_all_ends_is_given_up(tmp_path):
    ended: list[BaseException | None] = []
    copier = SimpleNamespace(tier=SimpleNamespace(every=1), launch=launch(), copy=lambda folder: "copied")
    copier.store = SimpleNamespace(url="far")
    copier.launch.stop.set()
    lane = uploads._Lane(copier)  # type: ignore[arg-type]
    handle = Handle(5, 0)
    handle.copy_finished = ended.append  # type: ignore[method-assign]
    lane.jobs.put((handle, tmp_path, ExitStack()))
    lane.close(None)
    assert [str(error) for error in ended] == ["the copy of step 5 was given up: Snapshots was closed"]


def test_blocks_of_another_attempt_of_the_step_fill_nothing(monkeypatch):
    found = {"step-000000005-2": "5-b-1", "step-000000005": "5-a-1"}
    tiers = uploads.Tiers([], IO, HEX, None, 1)
    others = SimpleNamespace(steps=lambda: [(5, 2, "step-000000005-2"), (5, 1, "step-000000005"), (4, 1, "x")])
    tiers.unions = [SimpleNamespace(steps=list), others]  # type: ignore[list-item]

    def reader(store: object, folder: str, *more: object) -> Any:
        return SimpleNamespace(manifest=SimpleNamespace(attempt=found[folder]))

    monkeypatch.setattr(uploads, "TierReader", reader)
    opened = [tiers._from_others(attempt) for attempt in ("5-a-1", "5-b-1", "5-c-1")]
    assert [one and one.manifest.attempt for one in opened] == ["5-a-1", "5-b-1", None]


# ---- reading a copy -----------------------------------------------------------------------------------------------


def coded(tmp_path: Path) -> Path:
    saved(tmp_path / "near", 1, tiers=[Tier(tmp_path / "far", compress=True)])
    return tmp_path / "far/step-000000001"


def test_a_coded_copy_with_a_file_missing_or_of_another_size_is_damaged(tmp_path):
    folder = coded(tmp_path)
    part = next(folder.glob("*.p00000.safetensors"))
    data = part.read_bytes()
    for wrong in (data[:-1], data + b"x", data[:100]):
        part.write_bytes(wrong)
        with pytest.raises(SnapshotDamaged, match=f"has {len(wrong)} bytes, the manifest says {len(data)}"):
            open_folder(folder)
    part.write_bytes(data)
    (folder / OBJECTS).unlink()
    with pytest.raises(SnapshotDamaged, match="objects.json' is missing"):
        open_folder(folder)


def test_a_bit_that_no_decoder_looks_at_is_found_by_verify(tmp_path):
    folder = coded(tmp_path)
    part = next(folder.glob("*.p00000.safetensors"))
    data = bytearray(part.read_bytes())
    data[data.index(b"\x28\xb5\x2f\xfd") + 4] ^= 0x10  # "unused bit" of a zstd frame's descriptor
    part.write_bytes(data)
    reader = open_folder(folder)
    assert torch.equal(reader.read_full("model/layer.0"), small_state(1)["model"]["layer.0"])
    assert [text.rpartition("' ")[2] for text in reader.verify(0)] == [
        "does not have the digest that the manifest says"
    ]


def test_a_fetch_is_of_one_chunk_and_of_each_block_once():
    file = DataFile("f", 100 << 20, 4 << 20, (0,) * 25)
    requests = [(0, 50 << 20, 0), (40 << 20, 60 << 20, 0), (3, 0, 0)]
    runs = list(tier_reader._runs(file, requests, 1 << 40))
    assert [block for first, stop in runs for block in range(first, stop)] == list(range(25))
    assert max(stop - first for first, stop in runs) * file.block_bytes <= CHUNK_BYTES
    assert list(tier_reader._runs(file, [(0, 1, 0), (8 << 20, 1, 0)], 1 << 40)) == [(0, 1), (2, 3)]


def test_a_small_file_that_says_it_is_huge_is_not_fetched():
    reader: Any = SimpleNamespace(place="s3://x", _place="x", _store=SimpleNamespace(get=lambda *a: b"fetched"))
    assert TierReader._fetch(reader, OBJECTS, MAX_JSON_BYTES) == b"fetched"
    with pytest.raises(SnapshotDamaged, match=f"has {MAX_JSON_BYTES + 1} bytes"):
        TierReader._fetch(reader, OBJECTS, MAX_JSON_BYTES + 1)


def test_a_part_whose_blocks_are_longer_than_they_can_be_or_end_elsewhere_is_damaged():
    plain = [100, 50]
    part = pack(8, [b"a" * 90, b"b" * 50])
    assert unpack(part[:HEAD_BYTES], len(part), 8, plain, "it") == [(4096, 4186), (4186, 4236)]
    with pytest.raises(SnapshotDamaged, match="does not fit"):
        unpack(part[:HEAD_BYTES], len(part) + 1, 8, plain, "it")
    longer = pack(8, [b"a" * 1000, b"b" * 50])
    with pytest.raises(SnapshotDamaged, match="does not fit"):
        unpack(longer[:HEAD_BYTES], len(longer), 8, plain, "it")
    for data in (b"abc", b"abcde"):
        with pytest.raises(SnapshotDamaged, match=f"{len(data)} bytes where 4 belong"):
            Coder(None, None).decode("f/0", data, 4, "it")


# ---- a partner's root ---------------------------------------------------------------------------------------------


def blocks_of(data: bytes, then: Callable[[], None] = lambda: None) -> Callable[[], Iterable[memoryview]]:
    def blocks() -> Iterator[memoryview]:
        yield memoryview(data)
        then()

    return blocks


def fail() -> None:
    raise OSError(errno.ECONNRESET, "the sender is gone")


def test_what_is_taken_for_an_attempt_goes_with_it(tmp_path):
    taken = Taken(DirStore(tmp_path, IO, HEX))
    taken.put(FOLDER, "r00001.safetensors", 3, blocks_of(b"abc"))
    with pytest.raises(OSError, match="the sender is gone"):
        taken.put(FOLDER, "r00002.safetensors", 3, blocks_of(b"abc", fail))
    assert os.listdir(tmp_path / FOLDER) == ["r00001.safetensors"]
    with pytest.raises(OSError, match="given up: rank 2 is dead"):  # learned of while the last bytes came
        taken.put(FOLDER, "r00003.safetensors", 3, blocks_of(b"abc", lambda: taken.give_up(FOLDER, "rank 2 is dead")))
    assert os.listdir(tmp_path / FOLDER) == []
    os.rmdir(tmp_path / FOLDER)
    for attempt in (FOLDER, f".tmp-4-{HEX}-2"):
        with pytest.raises(OSError, match="given up: rank 2 is dead"):
            taken.put(attempt, "r00001.safetensors", 3, lambda: pytest.fail("it was asked for"))
    assert os.listdir(tmp_path) == []
    taken.put(f".tmp-6-{HEX}-4", "r00001.safetensors", 3, blocks_of(b"abc"))


@contextmanager
def served(root: Path, timeout_s: float = 20.0) -> Iterator[tuple[Server, PeerStore]]:
    root.mkdir(exist_ok=True)
    server = Server("127.0.0.1", DirStore(root, IO, HEX), "token", timeout_s)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server, PeerStore(["127.0.0.1", server.server_address[1], "token"], timeout_s)
    finally:
        server.end()
        thread.join()


def asking(server: Server, **request: Any) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.server_address[1]), 10.0)
    connection.sendall(json.dumps({"token": "token", **request}).encode() + b"\n")
    return connection


PUT = {"op": "put", "folder": FOLDER, "name": "r00000.safetensors", "start": 0}


def test_a_server_gives_bounded_ranges_and_takes_data_files_alone(tmp_path):
    with served(tmp_path / "node") as (_, peer):
        with pytest.raises(OSError, match="is not served"):
            peer._ask({"op": "get", "folder": FOLDER, "name": "f", "start": 0, "stop": 2 * CHUNK_BYTES + 1})
        for name in (MANIFEST, "r00000.json", "abort.error", "x"):
            with pytest.raises(OSError, match="is not served"):
                peer.put_stream(FOLDER, name, 1, blocks_of(b"x"))
        for request in ({"op": "get"}, {**PUT, "stop": None}, {**PUT, "stop": "many"}, {"op": []}):
            with pytest.raises(OSError, match="folder|int"):  # an answer, and no closed connection
                peer._ask(request)
        assert peer.steps() == [] and os.listdir(tmp_path / "node") == []


def test_a_sender_that_goes_away_or_says_nothing_is_let_go(tmp_path):
    with served(tmp_path / "node") as (server, _):
        with asking(server, **PUT, stop=1000) as connection:
            connection.sendall(b"only a part")
            connection.shutdown(socket.SHUT_WR)
            assert b"the sender went away with 1000 bytes to come" in connection.makefile("rb").readline()
        assert os.listdir(tmp_path / "node" / FOLDER) == []
    with served(tmp_path / "node", timeout_s=0.05) as (server, _):
        with socket.create_connection(("127.0.0.1", server.server_address[1]), 10.0) as connection:
            assert b"timed out" in connection.makefile("rb").readline()


def test_who_is_refused_while_it_sends_learns_why(tmp_path):
    with served(tmp_path / "node") as (server, peer):
        server.taken.give_up(FOLDER, "rank 2 is dead")
        with pytest.raises(OSError, match="rank 2 is dead"):
            peer.put_stream(FOLDER, "r00000.safetensors", 64 << 20, lambda: [memoryview(bytes(8 << 20))] * 8)
        with asking(server, **PUT, stop=8 << 20) as connection:
            answer = connection.makefile("rb").readline()
            for _ in range(64):  # none of it resets the connection
                connection.sendall(bytes(128 << 10))
            assert b"rank 2 is dead" in answer


def test_an_answer_that_breaks_off_is_an_error(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection, connection.makefile("rb") as request:
                request.readline()
                connection.sendall(b'{"bytes": 10}\nabc')

        thread = threading.Thread(target=answer)
        thread.start()
        peer = PeerStore(["127.0.0.1", listening.getsockname()[1], "token"], 10.0)
        with pytest.raises(OSError, match="3 of 10 bytes came"):
            peer.get(FOLDER, "f", 0, 10)
        thread.join()


def test_a_copy_that_is_not_whole_at_the_partners_fails_the_save():
    peers = Peers.__new__(Peers)
    there = SimpleNamespace(url="tcp://x", put_stream=lambda *a: None, files=lambda folder: {"f": 99})
    peers._peers, peers._target = [there], 0  # type: ignore[list-item]
    peers.send(Path(FOLDER), [DataFile("f", 99, 4096, (0,))])
    with pytest.raises(SnapshotError, match="f' has 99 of 100 bytes"):
        peers.send(Path(FOLDER), [DataFile("f", 100, 4096, (0,))])
    with pytest.raises(FileNotFoundError, match="no rank has it"):
        Union([]).get(FOLDER, "f", 0, 1)
