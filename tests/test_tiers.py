"""Tiers: copies in a directory and on an S3-compatible server, plain and coded; and all that can fail."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plait import _C
from plait.ckpt import Sharded, SnapshotDamaged, SnapshotError, SnapshotLocked, Snapshots
from plait.ckpt.cli import check_snapshot, main
from plait.ckpt.crypt import load_key
from plait.ckpt.reader import SnapshotReader
from plait.ckpt.tiers import Tier
from tests.faults import (
    KILLED,
    count_ops,
    empty_state,
    failing,
    flip,
    in_child,
    is_small_state,
    on_ranks,
    small_state,
)
from tests.s3_server import S3Server, s3_server

KEY = bytes(range(32))
CODINGS = ({}, {"compress": True}, {"encrypt": True}, {"compress": 3, "encrypt": True})
NAMES = ["plain", "zstd", "aes", "zstd_aes"]


@pytest.fixture
def server():
    with s3_server() as running:
        yield running


def s3(server: S3Server, **more) -> Tier:
    return Tier("s3://bucket/run", options=server.options, **more)


def restored(root: Path, tiers=(), key=None, step=None):
    """Restores the small state; returns (seed, report) after checking every bit."""
    snapshots = Snapshots(root, read_only=True, tiers=tiers, key=key)
    found = snapshots.restore(empty_state(), step=step)
    assert is_small_state(found.values, found.step), "a mixture was restored"
    return found.step, found.report


def big(seed: int) -> dict:
    """Nine blocks of several dtypes, a strided view, an odd tail."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(3000, 1001, generator=generator)
    turned = w[:, :1000].t()[:, ::2]
    return {"w": w, "half": w[:2000].bfloat16(), "t": turned, "i": torch.arange(300_001) + seed, "n": seed}


def empty_big() -> dict:
    return {k: torch.zeros(v.shape, dtype=v.dtype) if isinstance(v, torch.Tensor) else 0 for k, v in big(0).items()}


@pytest.mark.parametrize("coding", CODINGS, ids=NAMES)
@pytest.mark.parametrize("place", ["folder", "s3"])
def test_a_copy_restores_bit_for_bit_after_the_local_disk_is_gone(tmp_path, server, place, coding):
    key = KEY if coding.get("encrypt") else None
    tier = Tier(tmp_path / "far", **coding) if place == "folder" else s3(server, **coding)
    with Snapshots(tmp_path / "near", tiers=[tier], key=key) as snapshots:
        handle = snapshots.save(7, big(7))
        handle.wait("remote")
        assert len(handle.copies) == 1 and snapshots.latest() == 7
    shutil.rmtree(tmp_path / "near")
    state = empty_big()
    again = Snapshots(tmp_path / "new", read_only=True, tiers=[tier], key=key)
    assert again.latest() == 7
    found = again.restore(state)
    assert all(torch.equal(state[k], v) for k, v in big(7).items() if isinstance(v, torch.Tensor))
    assert found.values["n"] == 7 and str(found.report.folder) == handle.copies[0]
    assert place == "folder" or handle.copies[0].startswith("s3://bucket/run/step-000000007.")


def test_a_plain_copy_in_a_folder_is_a_snapshot_like_any_other(tmp_path):
    """Same bytes, same digests; a run that finds only the second folder goes on there, and as the same run."""
    with Snapshots(tmp_path / "near", tiers=[Tier(tmp_path / "far")]) as snapshots:
        snapshots.save(1, small_state(1)).wait("remote")
    near, far = tmp_path / "near/step-000000001", tmp_path / "far/step-000000001"
    assert sorted(os.listdir(near)) == sorted(os.listdir(far))
    assert all((near / name).read_bytes() == (far / name).read_bytes() for name in os.listdir(near))
    assert restored(tmp_path / "far")[0] == 1
    with Snapshots(tmp_path / "other", tiers=[Tier(tmp_path / "far")]) as snapshots:
        snapshots.save(2, small_state(2))
    runs = {SnapshotReader(tmp_path / p).manifest.run for p in ("far/step-000000001", "other/step-000000002")}
    assert len(runs) == 1


def test_a_part_is_a_valid_safetensors_file_and_names_its_codec(tmp_path):
    from safetensors import safe_open

    with Snapshots(tmp_path / "near", tiers=[Tier(tmp_path / "far", compress=True)]) as snapshots:
        snapshots.save(1, big(1)).wait("remote")
    parts = sorted((tmp_path / "far/step-000000001").glob("r*.safetensors"))
    assert len(parts) == 1
    with safe_open(parts[0], framework="pt") as file:
        keys = list(file.keys())
        assert all(file.get_tensor(key).dtype == torch.uint8 for key in keys)
    fragment = SnapshotReader(tmp_path / "far/step-000000001").fragments[0]
    assert len(keys) == len(fragment.file.crc32c) and {piece.codec for piece in fragment.pieces} == {"zstd"}
    with pytest.raises(SnapshotError):  # a plain reader refuses coded files by name instead of reading their bytes
        SnapshotReader(tmp_path / "far/step-000000001").read_full("w")


def test_the_command_line_reads_coded_copies(tmp_path, capsys):
    tiers = [Tier(tmp_path / "far", compress=True, encrypt=True), Tier(tmp_path / "zstd", compress=True)]
    with Snapshots(tmp_path / "near", tiers=tiers, key=KEY) as snapshots:
        snapshots.save(1, small_state(1)).wait("remote")
    secret = tmp_path / "key"
    secret.write_bytes(KEY)
    assert main(["verify", str(tmp_path / "zstd")]) == 0
    assert main(["verify", str(tmp_path / "far"), "--key-file", str(secret)]) == 0
    assert main(["diff", str(tmp_path / "near"), str(tmp_path / "far"), "--key-file", str(secret)]) == 0
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "far")]) == 2  # not damaged, as far as anyone knows
    assert "is encrypted, and no key was given (--key-file, --key-env)" in capsys.readouterr().err
    assert main(["ls", str(tmp_path / "far"), "--key-file", str(tmp_path / "absent")]) == 2
    assert restored(tmp_path / "far", key=KEY)[0] == 1  # a coded copy is a root like any other, for who has the key
    flip(next((tmp_path / "zstd/step-000000001").glob("*.p00000.safetensors")), 9000)
    assert main(["verify", str(tmp_path / "zstd")]) == 1


def test_a_shard_fetches_only_the_blocks_that_it_touches(tmp_path, server):
    tier = s3(server, compress=True)
    full = torch.randn(16, 1 << 20)
    with Snapshots(tmp_path / "near", tiers=[tier]) as snapshots:
        snapshots.save(1, {"w": full}).wait("remote")
    shard = torch.zeros(2, 1 << 20)
    state = {"w": Sharded(shard, (16, 1 << 20), (6, 0))}
    report = Snapshots(tmp_path / "new", read_only=True, tiers=[tier]).restore(state).report
    assert torch.equal(shard, full[6:8])
    assert report.bytes_read == 3 * (4 << 20)  # 8 MiB that begin 4096 bytes behind the start of a block


def test_a_damaged_local_block_is_filled_from_the_tier(tmp_path, server):
    tier = s3(server, compress=True)
    with Snapshots(tmp_path / "near", tiers=[tier]) as snapshots:
        snapshots.save(1, small_state(1)).wait("remote")
    flip(tmp_path / "near/step-000000001/r00000.safetensors", 9000)
    with pytest.raises(SnapshotError, match="CRC32C"):
        restored(tmp_path / "near")
    step, report = restored(tmp_path / "near", [tier])
    assert step == 1 and report.folder == tmp_path / "near/step-000000001" and not report.skipped
    assert len(report.filled) == 1 and "r00000.safetensors" in report.filled[0] and "filled from" in report.filled[0]


def test_a_truncated_local_file_gives_way_to_the_copy_of_the_same_step(tmp_path):
    tier = Tier(tmp_path / "far")
    with Snapshots(tmp_path / "near", tiers=[tier]) as snapshots:
        snapshots.save(1, small_state(1)).wait("remote")
        snapshots.save(2, small_state(2)).wait("remote")
    os.truncate(tmp_path / "near/step-000000002/r00000.safetensors", 100)
    step, report = restored(tmp_path / "near", [tier])
    assert step == 2 and report.folder == tmp_path / "far/step-000000002"
    assert report.skipped[0][0] == "step-000000002" and "has 100 bytes" in report.skipped[0][1]


def test_the_nearest_good_copy_is_taken(tmp_path):
    tiers = [Tier(tmp_path / "first"), Tier(tmp_path / "second")]
    with Snapshots(tmp_path / "near", tiers=tiers) as snapshots:
        snapshots.save(1, small_state(1)).wait("remote")
    assert restored(tmp_path / "near", tiers)[1].folder.parent.name == "near"
    shutil.rmtree(tmp_path / "near")
    assert restored(tmp_path / "near", tiers)[1].folder.parent.name == "first"
    flip(tmp_path / "first/step-000000001/MANIFEST.json", 30)
    step, report = restored(tmp_path / "near", tiers)
    assert report.folder.parent.name == "second" and len(report.skipped) == 1


@pytest.mark.parametrize("place", ["folder", "s3"])
def test_each_tier_has_its_own_retention(tmp_path, server, place):
    more = {"keep_last": 1, "keep_every": 4, "every": 2}
    tier = Tier(tmp_path / "far", **more) if place == "folder" else s3(server, **more)
    with Snapshots(tmp_path / "near", keep_last=2, tiers=[tier]) as snapshots:
        for step in range(2, 8):
            snapshots.save(step, small_state(step)).wait("remote")
        assert sorted(copy.step for copy in snapshots._tiers.copies(None)) == [4, 6]
    assert sorted(p.name for p in (tmp_path / "near").glob("step-*")) == ["step-000000006", "step-000000007"]
    if place == "s3":
        folders = {key.split("/")[2].partition(".")[0] for key in server.objects}
        assert folders == {"step-000000004", "step-000000006"}


def test_a_store_that_cannot_be_reached_is_tried_again_until_it_can(tmp_path, server):
    """The local snapshot stays as long as its copy is under way, whatever its own retention says."""
    server.fail = lambda number, method, path: 0 if number < 6 else None
    with Snapshots(tmp_path / "near", keep_last=1, tiers=[s3(server)]) as snapshots:
        snapshots.save(1, small_state(1)).wait()
        handle = snapshots.save(2, small_state(2))
        handle.wait("remote", timeout_s=120)
    assert restored(tmp_path / "gone", [s3(server)])[0] == 2
    assert len({key.split("/")[2] for key in server.objects}) == 2


def test_a_store_that_stays_away_is_reported_once_and_harms_nothing(tmp_path, server):
    snapshots = Snapshots(tmp_path / "near", tiers=[s3(server, retry_s=0.3)])
    server.fail = lambda number, method, path: 503
    handle = snapshots.save(1, small_state(1))
    handle.wait()
    with pytest.raises(OSError, match="s3://bucket/run"):
        handle.wait("remote")
    server.fail = lambda number, method, path: None
    snapshots.save(2, small_state(2)).wait("remote")
    server.fail = lambda number, method, path: 503
    failing = snapshots.save(3, small_state(3))
    while not failing.done() or failing._copies_left:
        time.sleep(0.01)
    with pytest.raises(OSError, match="s3://bucket/run"):  # nobody waited: the next call says it
        snapshots.save(4, small_state(4))
    server.fail = lambda number, method, path: None
    snapshots.close()
    assert restored(tmp_path / "near")[0] == 3


def test_bytes_that_change_on_the_way_are_found_by_reading_back(tmp_path, server):
    """The first upload arrives with a flipped byte; the copy is sent again."""
    stored = []

    class Bent(dict):
        def __setitem__(self, key, value):
            if key.endswith(".safetensors") and not stored:
                stored.append(key)
                value = value[:5000] + bytes([value[5000] ^ 1]) + value[5001:]
            super().__setitem__(key, value)

    server.objects = Bent()
    with Snapshots(tmp_path / "near", tiers=[s3(server)]) as snapshots:
        snapshots.save(1, small_state(1)).wait("remote")
    assert stored and restored(tmp_path / "gone", [s3(server)])[0] == 1
    puts = [path for method, path in server.requests if method == "PUT" and path.endswith(".safetensors")]
    assert len(puts) == 2


def test_disk_full_on_the_tier_is_an_error_of_the_copy_alone(tmp_path, monkeypatch):
    def full(fd, data, at):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    snapshots = Snapshots(tmp_path / "near", tiers=[Tier(tmp_path / "far")])
    with monkeypatch.context() as patch:
        patch.setattr("plait.ckpt.store.os.pwrite", full)
        handle = snapshots.save(1, small_state(1))
        with pytest.raises(OSError, match="far") as caught:
            handle.wait("remote")
    assert caught.value.errno == errno.ENOSPC and handle.done()
    snapshots.save(2, small_state(2)).wait("remote")
    snapshots.close()
    assert [p.name for p in (tmp_path / "far").glob("*step*")] == ["step-000000002"]
    assert not list((tmp_path / "far").glob(".tmp-*"))  # the remains of step 1 went with the next copy


def test_a_damaged_manifest_in_a_store_stops_neither_copies_nor_a_new_node(tmp_path, server):
    tier = s3(server, keep_last=1)
    with Snapshots(tmp_path / "near", tiers=[tier]) as snapshots:
        snapshots.save(1, small_state(1)).wait("remote")
        name = next(key for key in server.objects if key.endswith("MANIFEST.json"))
        server.objects[name] = server.objects[name].replace(b'"step":1', b'"step":7')
        snapshots.save(2, small_state(2)).wait("remote")
    with Snapshots(tmp_path / "new", tiers=[tier]) as snapshots:
        assert snapshots.restore(empty_state()).step == 2
        snapshots.save(3, small_state(3)).wait("remote")
    assert restored(tmp_path / "none", [tier])[0] == 3


def test_two_jobs_in_one_tier_folder_are_refused(tmp_path):
    with Snapshots(tmp_path / "a", tiers=[Tier(tmp_path / "far")]):
        with pytest.raises(SnapshotLocked, match="far"):
            Snapshots(tmp_path / "b", tiers=[Tier(tmp_path / "far")])


@pytest.mark.parametrize("coding", [{}, {"compress": True, "encrypt": True}], ids=["plain", "coded"])
def test_three_ranks_send_their_parts_together(tmp_path, coding):
    full = torch.randn(3, 400_000)
    tier = Tier(tmp_path / "far", **coding)

    def save(rank: int) -> None:
        state = {"w": Sharded(full[rank : rank + 1], (3, 400_000), (rank, 0)), "rep": torch.arange(200_000), "n": 5}
        with Snapshots(tmp_path / "near", rank=rank, world_size=3, session=9, tiers=[tier], key=KEY) as snapshots:
            snapshots.save(5, state).wait("remote")

    on_ranks(3, save)
    state = {"w": torch.zeros(3, 400_000), "rep": torch.zeros(200_000, dtype=torch.int64), "n": 0}
    Snapshots(tmp_path / "none", read_only=True, tiers=[tier], key=KEY).restore(state)
    assert torch.equal(state["w"], full) and torch.equal(state["rep"], torch.arange(200_000))


def save_with_copy(root: Path, far: Path, seed: int, io: _C.Io | None = None) -> None:
    with Snapshots(root, keep_last=1, threads=1, io=io, tiers=[Tier(far, keep_last=1, retry_s=0.0)]) as snapshots:
        snapshots.save(seed, small_state(seed)).wait("remote")


def copy_operations(ops: list[tuple[str, str]]) -> list[int]:
    """Those in the tier. How many there are in all is no constant (135 or 142 of the save of step 2, in memory and on
    a disk alike): the thread that first looks whether step 1 was copied holds it against retention, whose seven
    calls that remove it (rename, sync, four unlinks, rmdir) then come with the save after: a fast save finds it."""
    return [i for i, (_, path) in enumerate(ops) if "/far" in path]


@pytest.mark.parametrize("action", ["crash_before", "crash_after"])
def test_killed_at_every_operation_of_a_copy(memory_path, action):
    """One whole copy restores from the tier alone, and the next save ends with its copy and no remains."""
    old = memory_path / "old"
    save_with_copy(old / "near", old / "far", 1)

    def fresh(name: str) -> Path:
        return Path(shutil.copytree(old, memory_path / name))

    root = fresh("count")
    ops = count_ops(lambda io: save_with_copy(root / "near", root / "far", 2, io))
    indices = copy_operations(ops)
    assert len(indices) > 15
    killed = 0
    for index in indices:
        root = fresh(f"{action}-{index}")
        script = [(index, action, 0)]
        work = lambda r=root, s=script: save_with_copy(r / "near", r / "far", 2, _C.FaultIo(s))  # noqa: E731
        status = in_child(work)  # 0: two threads work at once, and this time there were fewer operations
        assert status in (KILLED, 0), (index, ops[index])
        killed += status == KILLED
        assert restored(root / "none", [Tier(root / "far")])[0] in (1, 2), (index, ops[index])
        save_with_copy(root / "near", root / "far", 3)
        assert restored(root / "none", [Tier(root / "far")])[0] == 3
        assert sorted(n for n in os.listdir(root / "far") if "step" in n or n.startswith(".")) == ["step-000000003"]
        shutil.rmtree(root)
    assert killed > len(indices) - 4


def test_killed_in_the_middle_of_the_data_of_a_copy_and_resumed(tmp_path):
    """What was committed but not copied when the process died is copied by the next one."""

    def die(root: Path) -> None:
        def torn(fd: int, data: memoryview | bytes, at: int) -> int:
            if isinstance(data, bytes):  # the LOCK's record
                return real(fd, data, at)
            real(fd, bytes(data[: len(data) // 2]), at)
            os._exit(KILLED)

        real, os.pwrite = os.pwrite, torn
        save_with_copy(root / "near", root / "far", 1)

    assert in_child(lambda: die(tmp_path)) == KILLED
    assert restored(tmp_path / "near")[0] == 1
    with pytest.raises(SnapshotError, match="holds no snapshot"):
        restored(tmp_path / "none", [Tier(tmp_path / "far")])
    Snapshots(tmp_path / "near", tiers=[Tier(tmp_path / "far")]).close()
    assert restored(tmp_path / "none", [Tier(tmp_path / "far")])[0] == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_an_error_at_every_operation_of_a_copy(memory_path, number):
    """The error is raised as the copy's, the local snapshot is good, and the next copy works."""
    old = memory_path / "old"
    save_with_copy(old / "near", old / "far", 1)
    root = Path(shutil.copytree(old, memory_path / "count"))
    ops = count_ops(lambda io: save_with_copy(root / "near", root / "far", 2, io))
    raised = 0
    for index in copy_operations(ops):
        root = Path(shutil.copytree(old, memory_path / f"error-{index}"))
        try:
            save_with_copy(root / "near", root / "far", 2, _C.FaultIo([(index, "errno", number)]))
        except (OSError, SnapshotDamaged) as error:  # two threads work at once: it may hit a read of the local one
            raised += 1
            assert str(root) in str(error), (index, ops[index])
        assert restored(root / "near")[0] == 2, (index, ops[index])
        assert restored(root / "none", [Tier(root / "far")])[0] in (1, 2), (index, ops[index])
        save_with_copy(root / "near", root / "far", 3)
        assert restored(root / "none", [Tier(root / "far")])[0] == 3
        shutil.rmtree(root)
    assert raised > 10


@pytest.mark.parametrize(
    "coding, every",
    [
        ({}, 9),
        pytest.param({}, 1, marks=pytest.mark.long),
        pytest.param({"compress": True, "encrypt": True}, 1, marks=pytest.mark.long),
    ],
    ids=["some", "plain", "coded"],
)
def test_the_process_dies_at_every_request_to_the_store(tmp_path, server, coding, every):
    """From some request on nothing gets through any more: the store holds the old copy or the new one, whole."""
    tier = s3(server, keep_last=1, retry_s=0.0, **coding)
    root = tmp_path / "near"
    with Snapshots(root, tiers=[tier], key=KEY) as snapshots:
        snapshots.save(1, small_state(1)).wait("remote")
        begin = len(server.requests)
        snapshots.save(2, small_state(2)).wait("remote")
        count = len(server.requests) - begin
    for cut in range(0, count, every):
        server.objects, server.times = {}, {}
        with Snapshots(tmp_path / f"n{cut}", tiers=[tier], key=KEY) as snapshots:
            snapshots.save(1, small_state(1)).wait("remote")
            first = len(server.requests)
            server.fail = lambda number, method, path, at=first + cut: 0 if number >= at else None
            with pytest.raises(OSError):
                snapshots.save(2, small_state(2)).wait("remote")
            server.fail = lambda number, method, path: None
            assert restored(tmp_path / "none", [tier], KEY)[0] in (1, 2), cut
            snapshots.save(3, small_state(3)).wait("remote")
        assert restored(tmp_path / "none", [tier], KEY)[0] == 3
        assert {key.split("/")[2].partition(".")[0] for key in server.objects} == {"step-000000003"}, cut


@pytest.mark.parametrize("coding", CODINGS, ids=NAMES)
def test_every_flipped_byte_of_a_copy_is_found(tmp_path, coding):
    """Each file of the copy, a byte every 61 and all of the first and last 300: named, never restored."""
    tier = Tier(tmp_path / "far", **coding)
    with Snapshots(tmp_path / "near", tiers=[tier], key=KEY) as snapshots:
        snapshots.save(1, {"w": torch.arange(5000.0), "n": 1}).wait("remote")
    folder = tmp_path / "far/step-000000001"
    tried = harmless = 0
    for path in sorted(folder.iterdir()):
        size = path.stat().st_size
        step = max(61, size // 40)
        for at in sorted({*range(0, size, step), *range(0, min(size, 24), 5), size - 1, size - 40}):
            flip(path, at, at % 8)
            snapshots = Snapshots(tmp_path / "none", read_only=True, tiers=[tier], key=KEY)
            state = {"w": torch.zeros(5000), "n": 0}
            try:
                snapshots.restore(state)
                harmless += (
                    1  # bits of a zstd frame that its decoder ignores: what came out is exact, and verify sees
                )
                assert torch.equal(state["w"], torch.arange(5000.0)), (path, at)
                assert coding.get("compress") and check_snapshot(folder, load_key(KEY))[0], (path, at)
            except SnapshotError as error:
                assert "step-000000001" in str(error)
            flip(path, at, at % 8)
            tried += 1
    assert tried > 80 and harmless < 5
    snapshots.restore({"w": torch.zeros(5000), "n": 0})


def test_a_new_run_learns_at_once_that_its_tier_cannot_be_reached(tmp_path, server):
    """Wrong credentials show before the first step, not after the first save; the driver's text names no store."""
    server.fail = lambda number, method, path: 403
    with pytest.raises(PermissionError, match="list: .*'s3://bucket/run/'"):
        Snapshots(tmp_path / "near", tiers=[s3(server)])
    with pytest.raises(PermissionError, match="s3://bucket/run"):
        Snapshots(tmp_path / "near", read_only=True, tiers=[s3(server)]).latest()


@pytest.mark.parametrize("place", ["folder", "s3"])
def test_a_tier_that_is_away_keeps_no_node_from_its_own_snapshots(tmp_path, server, place, monkeypatch):
    """A restart once failed while the store did not answer, whatever the local disk held."""
    tier = Tier(tmp_path / "far") if place == "folder" else s3(server)
    with Snapshots(tmp_path / "near", tiers=[tier]) as snapshots:
        snapshots.save(1, small_state(1)).wait("remote")
        snapshots.save(2, small_state(2)).wait("remote")
    flip(tmp_path / "near/step-000000002/r00000.safetensors", 9000)  # and none that could fill it
    server.fail = lambda number, method, path: 403
    if place == "folder":
        monkeypatch.setattr("plait.ckpt.store.DirStore.steps", lambda self: os.listdir(tmp_path / "near" / "LOCK"))
    assert Snapshots(tmp_path / "near", read_only=True, tiers=[tier]).latest() == 2
    step, report = restored(tmp_path / "near", [tier])
    assert step == 1 and [name for name, _ in report.skipped] == [tier.store(_C.PosixIo(), "").url, "step-000000002"]
    assert "CRC32C" in report.skipped[1][1]
    assert restored(tmp_path / "near", [tier], step=1)[0] == 1
    with pytest.raises(OSError):  # where there is nothing else, a run would begin anew
        restored(tmp_path / "new", [tier])


def test_files_of_a_copy_are_for_their_owner_only(tmp_path):
    before = os.umask(0)
    try:
        with Snapshots(tmp_path / "near", tiers=[Tier(tmp_path / "far")]) as snapshots:
            snapshots.save(1, small_state(1)).wait("remote")
    finally:
        os.umask(before)
    for root in ("near", "far"):
        for path in [tmp_path / root, *(tmp_path / root).rglob("*")]:
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == (0o700 if path.is_dir() else 0o600), (path, oct(mode))


def test_a_tier_that_makes_no_sense_is_refused(tmp_path):
    with pytest.raises(ValueError, match="every=0"):
        Tier(tmp_path, every=0)
    with pytest.raises(ValueError, match="keep_last=0"):
        Tier(tmp_path, keep_last=0)
    with pytest.raises(ValueError, match="key"):
        Snapshots(tmp_path / "near", tiers=[Tier(tmp_path / "far", encrypt=True)])
    with pytest.raises(ValueError, match="level="):
        Snapshots(tmp_path / "other").save(1, {"n": 1}).wait("everywhere")


def test_damage_without_a_good_copy_is_named(tmp_path):
    with Snapshots(tmp_path / "near", tiers=[Tier(tmp_path / "far")]) as snapshots:
        snapshots.save(1, small_state(1)).wait("remote")
    for root in ("near", "far"):
        flip(tmp_path / root / "step-000000001/r00000.safetensors", 9000)
    with pytest.raises(SnapshotError, match="r00000.safetensors"):
        restored(tmp_path / "near", [Tier(tmp_path / "far")])
    with pytest.raises(SnapshotDamaged):
        SnapshotReader(tmp_path / "far/step-000000001").read_full("model/layer.0")


def two_copies(tmp_path: Path, key: bytes | None = None, **coding) -> Tier:
    """Steps 1 and 2, here and in a folder."""
    tier = Tier(tmp_path / "far", retry_s=0.0, **coding)
    with Snapshots(tmp_path / "near", tiers=[tier], key=key) as snapshots:
        for step in (1, 2):
            snapshots.save(step, small_state(step)).wait("remote")
    return tier


@pytest.mark.parametrize("coding", CODINGS[::3], ids=NAMES[::3])
def test_a_read_error_anywhere_in_a_restore_costs_nothing_while_there_is_a_copy(tmp_path, coding):
    tier = two_copies(tmp_path, KEY, **coding)

    def restore(io: _C.Io):
        snapshots = Snapshots(tmp_path / "near", read_only=True, threads=1, tiers=[tier], key=KEY, io=io)
        return snapshots.restore(empty_state())

    ops = count_ops(restore)
    said = []
    for index, op in enumerate(ops):
        found = restore(_C.FaultIo([(index, "errno", errno.EIO)]))
        assert found.step == 2 and is_small_state(found.values, 2), op
        said += [*found.report.filled, *(reason for _, reason in found.report.skipped)]
    assert len(said) > len(ops) / 2 and all("Input/output error" in text for text in said), said
    assert {text.partition(" ")[0].rpartition("/")[2] for text in said} >= {"MANIFEST.json'", "r00000.safetensors'"}


def test_a_read_error_of_the_local_disk_during_a_copy_says_its_errno_and_harms_nothing(tmp_path):
    tier = two_copies(tmp_path)
    with Snapshots(tmp_path / "near", tiers=[tier]) as snapshots:
        snapshots.save(3, small_state(3)).wait("remote")
        copier = snapshots._tiers._lanes[0]._copier
        good, copier.launch = copier.launch, replace(copier.launch, io=failing("pread", errno.EIO))
        handle = snapshots.save(4, small_state(4))
        handle.wait()
        with pytest.raises(SnapshotDamaged, match=r"near/step-000000004/.*' cannot be read: .*Input/output error"):
            handle.wait("remote")
        copier.launch = good
        assert restored(tmp_path / "none", [tier])[0] == 3 and restored(tmp_path / "near", [tier])[0] == 4
        snapshots.save(5, small_state(5)).wait("remote")
    assert restored(tmp_path / "none", [tier])[0] == 5


def test_the_command_line_says_a_read_error_and_ends_with_1(tmp_path, capsys, monkeypatch):
    two_copies(tmp_path)
    near, posix = str(tmp_path / "near"), _C.PosixIo
    arguments = {
        "verify": [near],
        "show": [near],
        "copy": [near, str(tmp_path / "third"), "--retry-s", "0"],
        "diff": [near, near],
    }
    reported = set()
    for command, paths in arguments.items():
        for number in range(8):  # which Io of the process fails, and at which of its reads
            for nth in range(4):
                made: list[_C.FaultIo] = []
                reads = [i for i, (n, _) in enumerate(_ios(command, paths, monkeypatch, number)) if n == "pread"]
                shutil.rmtree(tmp_path / "third", ignore_errors=True)
                if nth >= len(reads):
                    break

                def faulty(made=made, number=number, at=reads[nth]):
                    made.append(_C.FaultIo([(at, "errno", errno.EIO)] if len(made) == number else []))
                    return made[-1]

                monkeypatch.setattr(_C, "PosixIo", faulty)
                capsys.readouterr()
                code, out = main([command, *paths]), "".join(capsys.readouterr())
                # RUN is its newest valid snapshot: where the manifest cannot be read, the one before
                other = command != "verify" and "step-000000001" in out
                if code == 0 and command == "copy":  # retention there reads too, when the copy is whole
                    monkeypatch.setattr(_C, "PosixIo", posix)
                    other = main(["verify", str(tmp_path / "third")]) == 0
                shutil.rmtree(tmp_path / "third", ignore_errors=True)
                assert other or (code == 1 and "Input/output error" in out), (command, number, reads[nth], out)
                reported.add(command)
    monkeypatch.setattr(_C, "PosixIo", posix)
    assert reported == arguments.keys()


def _ios(command: str, paths: list[str], monkeypatch, number: int) -> list[tuple[str, str]]:
    """The operations of the Io that a command makes as its `number`-th, without a fault."""
    ios: list[_C.FaultIo] = []

    def counting():
        ios.append(_C.FaultIo([]))
        return ios[-1]

    monkeypatch.setattr(_C, "PosixIo", counting)
    assert main([command, *paths]) == 0
    return list(ios[number].ops) if number < len(ios) else []


def test_a_snapshot_whose_files_cannot_be_looked_at_gives_way_to_the_one_before(tmp_path, monkeypatch, capsys):
    """It was an error of the whole restore, of retention and of ls."""
    tier = two_copies(tmp_path)
    real = os.stat

    def stat(path, *args, **named):
        if "near/step-000000002/r00000.safetensors" in str(path):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path, *args, **named)

    monkeypatch.setattr("plait.ckpt.reader.os.stat", stat)
    assert restored(tmp_path / "near")[0] == 1 and restored(tmp_path / "near", [tier])[0] == 2
    with Snapshots(tmp_path / "near", keep_last=1) as snapshots:
        assert snapshots.latest() == 1
        snapshots.save(3, small_state(3)).wait()
    assert sorted(path.name for path in (tmp_path / "near").glob("step-*")) == ["step-000000002", "step-000000003"]
    assert main(["ls", str(tmp_path / "near")]) == 1 and "Input/output error" in capsys.readouterr().out
