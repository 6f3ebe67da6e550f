"""Restoring: any grid onto any grid bit for bit, strict both ways, damage found and named, older ones offered."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import zipfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait import _C
from plait.ckpt import PerRank, Sharded, SnapshotDamaged, SnapshotError, Snapshots, StateError
from plait.ckpt.box import Box
from plait.ckpt.capture import BLOCK_BYTES
from plait.ckpt.owner import read_record
from plait.ckpt.read_plan import Target
from plait.ckpt.reader import SnapshotReader
from tests.faults import empty_state, flip, is_small_state, on_ranks, restored_seed, small_state


def cut(total: int, parts: int, index: int) -> tuple[int, int]:
    """Returns (offset, size) as torch.chunk cuts: the last ones may be empty."""
    size = -(-total // parts)
    offset = min(total, index * size)
    return offset, min(size, total - offset)


def shard(full: torch.Tensor, dim: int, parts: int, index: int, fill: bool = True, **more) -> Sharded:
    """Returns part `index` of `full` along a dim, as its values or as zeros to be filled."""
    offset, size = cut(full.shape[dim], parts, index)
    local = full.narrow(dim, offset, size)
    where = tuple(offset if d == dim else 0 for d in range(full.dim()))
    return Sharded(
        local.clone() if fill else torch.zeros(local.shape, dtype=full.dtype), tuple(full.shape), where, **more
    )


def save_on(root: Path, world_size: int, state_of, step: int = 1, session: int = 1) -> Path:
    """Saves `state_of(rank)` on threads as ranks; returns the step folder."""

    def save(rank):
        with Snapshots(root, rank=rank, world_size=world_size, session=session, timeout_s=60) as snapshots:
            handle = snapshots.save(step, state_of(rank))
            handle.wait()
            return handle.folder

    return on_ranks(world_size, save)[0]


def restore_on(root: Path, world_size: int, state_of, session: int = 2, **how):
    """Restores into `state_of(rank)`; returns [(state, Restored)] by rank."""

    def restore(rank):
        state = state_of(rank)
        with Snapshots(root, rank=rank, world_size=world_size, session=session, timeout_s=60) as snapshots:
            return state, snapshots.restore(state, **how)

    return on_ranks(world_size, restore)


# ---- any grid to any grid


@pytest.mark.parametrize("ranks", [4, 5, 7])
def test_six_rows_over_more_ranks(tmp_path, ranks):
    """Case 22: empty shards are legal, on both sides."""
    full = torch.randn(6, 3)
    save_on(tmp_path, ranks, lambda rank: {"w": shard(full, 0, ranks, rank)})
    for others in (1, 2, 7):
        states = restore_on(
            tmp_path, others, lambda rank, n=others: {"w": shard(full, 1, n, rank, False)}, session=others + 9
        )
        for rank, (state, _) in enumerate(states):
            assert torch.equal(state["w"].tensor, shard(full, 1, others, rank).tensor)


@pytest.mark.parametrize("shape", [(), (1,), (0, 5)])
def test_tiny_and_empty_tensors_over_four_ranks(tmp_path, shape):
    """Case 21."""
    value = torch.full(shape, 3.5)
    save_on(tmp_path, 4, lambda rank: {"w": value, "s": Sharded(value, shape, (0,) * len(shape), replica=(rank, 4))})
    for state, _ in restore_on(tmp_path, 3, lambda rank: {"w": torch.zeros(shape), "s": torch.zeros(shape)}):
        assert torch.equal(state["w"], value) and torch.equal(state["s"], value)


def flat_shards(full: dict[str, torch.Tensor], parts: int, index: int, fill: bool) -> dict[str, Sharded]:
    """Cuts one flat buffer of all tensors into equal ranges, as a distributed optimizer does; returns my ranges."""
    total = sum(t.numel() for t in full.values())
    low, high = sum(cut(total, parts, index)[:1]), sum(cut(total, parts, index))
    mine, at = {}, 0
    for name, tensor in full.items():
        start, stop = max(low - at, 0), min(high - at, tensor.numel())
        at += tensor.numel()
        if stop > start:
            local = tensor.reshape(-1)[start:stop].clone() if fill else torch.zeros(stop - start)
            mine[name] = Sharded(local, tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape), (start, stop))
    return mine


@pytest.mark.parametrize(("before", "after"), [(4, 3), (4, 1), (3, 4), (1, 5)])
def test_flat_ranges_of_an_optimizer_move_to_another_number_of_ranks(tmp_path, before, after):
    """Case 26: the ranges cut through tensors at any element."""
    full = {"a": torch.randn(7, 11), "b": torch.randn(5), "c": torch.randn(3, 4, 5), "d": torch.randn(1)}
    save_on(tmp_path, before, lambda rank: {"m": flat_shards(full, before, rank, True)})
    for rank, (state, _) in enumerate(
        restore_on(tmp_path, after, lambda r: {"m": flat_shards(full, after, r, False)})
    ):
        wanted = flat_shards(full, after, rank, True)
        assert all(torch.equal(state["m"][n].tensor, wanted[n].tensor) for n in wanted)


def test_stages_move_between_ranks_and_strictness_holds_over_all_of_them(tmp_path):
    """Pipeline ranks know different names: what no rank has is unexpected, what one rank lacks is not."""
    layers = {f"layer.{i}": torch.randn(4, 4) for i in range(5)}

    def stage(rank, stages, fill=True, drop=()):
        first, count = cut(5, stages, rank)
        names = [f"layer.{i}" for i in range(first, first + count) if i not in drop]
        return {
            "model": {n: Sharded(layers[n].clone() if fill else torch.zeros(4, 4), (4, 4), (0, 0)) for n in names}
        }

    save_on(tmp_path, 2, lambda rank: stage(rank, 2))
    for rank, (state, _) in enumerate(restore_on(tmp_path, 4, lambda r: stage(r, 4, False))):
        assert all(torch.equal(s.tensor, layers[n]) for n, s in state["model"].items()), rank
    with pytest.raises(StateError, match="not in the state of any rank: 'model/layer.3'"):
        restore_on(tmp_path, 4, lambda r: stage(r, 4, False, drop=(3,)), session=3)


@st.composite
def cuts_of(draw, shape):
    """A random cut of a tensor into boxes, each held by one rank: by one dim, then every part by another."""
    parts = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 3))):
        box = parts.pop(draw(st.integers(0, len(parts) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[dim]))
        sizes = (at, box.shape[dim] - at)
        starts = (box.offset[dim], box.offset[dim] + at)
        for start, size in zip(starts, sizes, strict=True):
            parts.append(
                Box(
                    tuple(start if d == dim else o for d, o in enumerate(box.offset)),
                    tuple(size if d == dim else n for d, n in enumerate(box.shape)),
                )
            )
    return parts


@st.composite
def regrid(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    before, after = draw(cuts_of(shape)), draw(cuts_of(shape))
    flats = [draw(st.integers(0, box.numel)) for box in before]
    return shape, before, after, flats, draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]))


@given(case=regrid())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_grids_and_flat_ranges(tmp_path, case):
    """Each box of the old grid is held as two flat ranges; boxes of the new grid are filled, contiguous or not."""
    shape, before, after, flats, dtype = case
    full = torch.randint(0, 255, shape).to(dtype)
    root = tmp_path / os.urandom(8).hex()

    def take(box):
        return full[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]

    def state_of(rank):
        box, half = before[rank // 2], flats[rank // 2]
        flat = (0, half) if rank % 2 == 0 else (half, box.numel)
        local = take(box).reshape(-1)[flat[0] : flat[1]].clone()
        return {"w": Sharded(local, shape, box.offset, box.shape, flat)}

    folder = save_on(root, 2 * len(before), state_of)
    reader = SnapshotReader(folder)
    targets = []
    for box in after:
        room = torch.zeros(*box.shape[:-1], box.shape[-1] + 1, dtype=dtype)[..., : box.shape[-1]]
        targets.append(Target(reader.table.entry("w"), room, box, None))
    reader.read(targets)
    for target in targets:
        assert torch.equal(target.tensor, take(target.box))
    shutil.rmtree(root)


def test_only_the_needed_blocks_are_read_each_once(tmp_path):
    """Case 44: bytes read = touched blocks of 4 MiB, whatever the direction of the cut."""
    full = torch.randn(4096, 2048)  # 32 MiB: 8 blocks and the header's
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, {"w": full}).wait()
        for dim, parts, index in [(0, 8, 3), (0, 16, 0), (1, 8, 5), (1, 2, 1)]:
            part = shard(full, dim, parts, index, False)
            report = snapshots.restore({"w": part}).report
            assert torch.equal(part.tensor, shard(full, dim, parts, index).tensor)
            row = 2048 * 4
            low, high = (
                (part.offset[0] * row, (part.offset[0] + part.tensor.shape[0]) * row) if dim == 0 else (0, 4096 * row)
            )
            header = 4096
            first, last = (header + low) // BLOCK_BYTES, (header + high - 1) // BLOCK_BYTES
            end = min((last + 1) * BLOCK_BYTES, header + 4096 * row)
            assert report.bytes_read == end - first * BLOCK_BYTES, (dim, parts, index)


# ---- strict both ways


def test_shape_dtype_and_name_differences_are_errors_and_change_nothing(tmp_path):
    """Cases L16, 23, 24, 25."""
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, {"w": torch.ones(8, 8), "b": torch.ones(8), "lr": 0.1}).wait()
        for shape in [(4, 16), (8, 4), (1, 8), (64,)]:
            with pytest.raises(StateError) as caught:
                snapshots.restore({"w": torch.zeros(shape), "b": torch.zeros(8), "lr": 0.0})
            assert (
                str(shape) in str(caught.value)
                and "(8, 8)" in str(caught.value)
                and "state['w']" in str(caught.value)
            )
        kept = torch.zeros(8)
        with pytest.raises(StateError, match=r"state\['w'\] is torch.bfloat16, the snapshot's 'w' torch.float32"):
            snapshots.restore({"w": torch.zeros(8, 8, dtype=torch.bfloat16), "b": kept, "lr": 0.0})
        with pytest.raises(StateError, match="missing in the snapshot: 'extra'"):
            snapshots.restore({"w": torch.zeros(8, 8), "b": kept, "lr": 0.0, "extra": 1})
        with pytest.raises(StateError, match="not in the state of any rank: 'lr', 'w'"):
            snapshots.restore({"b": kept})
        assert kept.eq(0).all()


def test_allow_lists_and_cast_are_explicit_and_reported(tmp_path):
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, {"m": {"w": torch.full((8, 8), 1.5), "b": torch.ones(8)}, "lr": 0.1}).wait()
        state = {"m": {"w": torch.zeros(8, 8, dtype=torch.bfloat16), "new": torch.full((3,), 7.0)}, "epoch": 4}
        with pytest.raises(StateError):
            snapshots.restore(state, allow_missing=["m/new", "epoch"], allow_unexpected=["*"])
        restored = snapshots.restore(
            state, allow_missing=["m/n*", "epoch"], allow_unexpected=["m/b", "lr"], cast=["m/w"]
        )
    assert state["m"]["w"].eq(1.5).all() and state["m"]["new"].eq(7).all() and restored.values["epoch"] == 4
    report = restored.report
    assert (report.missing, report.unexpected, report.cast) == (("m/new", "epoch"), ("lr", "m/b"), ("m/w",))


def test_a_tensor_where_the_snapshot_has_a_number_is_an_error(tmp_path):
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, {"step": 3}).wait()
        with pytest.raises(StateError, match="missing in the snapshot: 'step'"):
            snapshots.restore({"step": torch.tensor(0)})


# ---- which snapshot


def test_no_snapshot_is_a_clear_answer(tmp_path):
    snapshots = Snapshots(tmp_path / "none", read_only=True)
    assert snapshots.latest() is None
    with pytest.raises(SnapshotError, match="holds no snapshot"):
        snapshots.restore({})


def test_the_newest_folder_without_manifest_is_skipped_with_a_reason(tmp_path):
    """Cases 14, 20: a higher number is not a better snapshot."""
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, small_state(1)).wait()
        (tmp_path / "step-000000009").mkdir()
        assert snapshots.latest() == 1
        restored = snapshots.restore(empty_state())
        assert restored.step == 1 and "no MANIFEST.json: it was never finished" in restored.report.skipped[0][1]


def test_latest_is_only_a_hint(tmp_path):
    with Snapshots(tmp_path) as snapshots:
        for seed in (1, 2):
            snapshots.save(seed, small_state(seed)).wait()
        for hint in ("step-000000001\n", "step-000000077\n", "../../etc/passwd", ""):
            (tmp_path / "LATEST").write_text(hint)
            assert snapshots.latest() == 2
        os.unlink(tmp_path / "LATEST")
    assert restored_seed(tmp_path) == 2


def test_a_named_step_and_the_second_generation_of_it(tmp_path):
    """L2, L9: a step saved again does not touch the old one until the new one is durable."""
    with Snapshots(tmp_path, keep_last=None) as snapshots:
        snapshots.save(5, small_state(5)).wait()
        snapshots.save(6, small_state(6)).wait()
        snapshots.save(5, small_state(55)).wait()
        assert (tmp_path / "step-000000005").is_dir() and (tmp_path / "step-000000005-2").is_dir()
        assert is_small_state(snapshots.restore(empty_state(), step=5).values, 55)
        flip(tmp_path / "step-000000005-2" / "MANIFEST.json", 9)
        assert is_small_state(snapshots.restore(empty_state(), step=5).values, 5)
        with pytest.raises(SnapshotError, match="no snapshot of step 7; there are step-000000006"):
            snapshots.restore(empty_state(), step=7)


def test_when_nothing_can_be_restored_every_reason_is_listed(tmp_path):
    with Snapshots(tmp_path) as snapshots:
        for seed in (1, 2):
            snapshots.save(seed, small_state(seed)).wait()
        flip(tmp_path / "step-000000002" / "r00000.safetensors", 9000)
        os.truncate(tmp_path / "step-000000001" / "r00000.json", 100)
        with pytest.raises(SnapshotError) as caught:
            snapshots.restore(empty_state())
    text = str(caught.value)
    assert "step-000000002: " in text and "block 0" in text and "step-000000001: " in text and "has 100 bytes" in text


@pytest.mark.parametrize("differ", [False, True])
def test_names_tied_in_the_state_but_cut_in_other_pieces_are_compared(tmp_path, differ):
    """By rows and by columns: no sums of pieces can be compared, and both would be read into one memory."""
    full = torch.arange(24.0).reshape(6, 4)
    other = full.clone()
    other[5, 3] += differ
    save_on(tmp_path, 2, lambda rank: {"a": shard(full, 0, 2, rank), "b": shard(other, 1, 2, rank)})
    target = torch.zeros(6, 4)
    with Snapshots(tmp_path) as snapshots:
        if differ:
            with pytest.raises(StateError, match="tied in the state, but 'b' and 'a' differ"):
                snapshots.restore({"a": target, "b": target})
        else:
            snapshots.restore({"a": target, "b": target})
            assert torch.equal(target, full)


def test_a_block_that_one_rank_alone_cannot_read_moves_all_ranks_to_the_older_one(tmp_path):
    """Never a mix: the damage lies where only rank 1 reads."""
    old, new = torch.zeros(2, 2_000_000), torch.ones(2, 2_000_000)
    save_on(tmp_path, 2, lambda rank: {"w": shard(old, 0, 2, rank)}, step=1)
    folder = save_on(tmp_path, 2, lambda rank: {"w": shard(new, 0, 2, rank)}, step=2, session=2)
    flip(folder / "r00001.safetensors", 5_000_000)
    for state, restored in restore_on(tmp_path, 2, lambda rank: {"w": shard(old, 0, 2, rank, False)}, session=3):
        assert restored.step == 1 and state["w"].tensor.eq(0).all()
        assert "rank 1: " in restored.report.skipped[0][1] and "r00001.safetensors" in restored.report.skipped[0][1]


def test_a_rank_that_does_not_come_to_the_restore_is_named(tmp_path):
    save_on(tmp_path, 2, lambda rank: {"w": torch.zeros(3)})

    def restore(rank):
        if rank == 1:
            return
        with Snapshots(tmp_path, rank=0, world_size=2, session=5, timeout_s=0.3) as snapshots:
            with pytest.raises(SnapshotError, match=r"ranks \[1\] did not come to the restore within 0.3 s"):
                snapshots.restore({"w": torch.zeros(3)})

    on_ranks(2, restore)


def test_a_state_that_is_wrong_on_one_rank_stops_all_with_its_text(tmp_path):
    save_on(tmp_path, 2, lambda rank: {"w": torch.zeros(4, 3)})

    def restore(rank):
        wrong = Sharded(torch.zeros(4, 3), (4, 3), (1, 0))
        with Snapshots(tmp_path, rank=rank, world_size=2, session=5, timeout_s=60) as snapshots:
            with pytest.raises(StateError, match=r"state\['w'\]: box \(1, 0\)\+\(4, 3\) is not inside"):
                snapshots.restore({"w": wrong if rank == 1 else torch.zeros(4, 3)})

    on_ranks(2, restore)


def test_a_snapshot_removed_while_it_is_chosen_is_passed_over(tmp_path):
    with Snapshots(tmp_path) as snapshots:
        for seed in (1, 2):
            snapshots.save(seed, small_state(seed)).wait()
        os.unlink(tmp_path / "step-000000002" / "MANIFEST.json")
        assert snapshots.restore(empty_state()).step == 1


def test_a_copied_snapshot_restores_elsewhere(tmp_path):
    with Snapshots(tmp_path / "a") as snapshots:
        snapshots.save(3, small_state(3)).wait()
    shutil.copytree(tmp_path / "a" / "step-000000003", tmp_path / "b" / "step-000000003")
    assert restored_seed(tmp_path / "b") == 3


# ---- damage


@pytest.fixture
def two_snapshots(tmp_path):
    """Steps 1 and 2; the damage goes into 2."""
    with Snapshots(tmp_path) as snapshots:
        for seed in (1, 2):
            snapshots.save(seed, small_state(seed)).wait()
    return tmp_path


def test_a_flipped_bit_in_every_4_kib_of_every_file_is_found(two_snapshots):
    """Cases L4, L6, 34: the older snapshot is offered each time."""
    folder = two_snapshots / "step-000000002"
    tried = 0
    for path in sorted(folder.iterdir()):
        size = path.stat().st_size
        for start in range(0, size, 4096):
            at = min(size - 1, start + (start // 4096 * 977) % 4096)
            flip(path, at, bit=tried % 8)
            assert restored_seed(two_snapshots) == 1, (path.name, at)
            flip(path, at, bit=tried % 8)
            tried += 1
    assert tried > 20 and restored_seed(two_snapshots) == 2


def rewrite(folder: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes a JSON file of a snapshot and makes all digests right again."""

    def with_digest(raw: dict[str, Any]) -> bytes:
        line = json.dumps(raw).encode()
        return line + b"\nsha256:" + hashlib.sha256(line).hexdigest().encode() + b"\n"

    raw = {n: json.loads((folder / n).read_bytes().partition(b"\n")[0]) for n in {name, "MANIFEST.json"}}
    change(raw[name])
    if name != "MANIFEST.json":
        data = with_digest(raw[name])
        (folder / name).write_bytes(data)
        entry = next(entry for entry in raw["MANIFEST.json"]["files"] if entry["name"] == name)
        entry["bytes"], entry["sha256"] = len(data), hashlib.sha256(data).hexdigest()
    (folder / "MANIFEST.json").write_bytes(with_digest(raw["MANIFEST.json"]))


@pytest.mark.parametrize("block_bytes", [(4 << 20) + 1, 5_000_000])
def test_a_block_size_that_no_reader_takes_is_damage_and_not_a_value_error(two_snapshots, block_bytes):
    folder = two_snapshots / "step-000000002"
    rewrite(folder, "r00000.json", lambda raw: raw["file"].update(block_bytes=block_bytes))
    with pytest.raises(SnapshotDamaged, match="checksums"):
        SnapshotReader(folder).verify(0)
    assert restored_seed(two_snapshots) == 1


def test_a_manifest_of_too_many_ranks_is_refused_at_once_instead_of_counting_them(two_snapshots):
    folder = two_snapshots / "step-000000002"
    rewrite(folder, "MANIFEST.json", lambda raw: raw.update(world_size=(1 << 63) - 1))
    with pytest.raises(SnapshotDamaged, match="files for 9223372036854775807 ranks"):
        SnapshotReader(folder)
    assert restored_seed(two_snapshots) == 1


def test_a_zeroed_page_is_found(two_snapshots):
    path = two_snapshots / "step-000000002" / "r00000.safetensors"
    data = bytearray(path.read_bytes())
    data[8192:12288] = bytes(4096)
    path.write_bytes(data)
    assert restored_seed(two_snapshots) == 1


def test_every_truncation_and_an_extension_are_found(two_snapshots):
    """Case L5, 35: nothing is read from a file whose size is wrong."""
    folder = two_snapshots / "step-000000002"
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        for size in sorted(
            {0, 1, 7, 8, 9, 4095, 4096, 4097, len(data) // 2, len(data) - 4096, len(data) - 1, len(data) + 1}
        ):
            if 0 <= size != len(data):
                path.write_bytes((data + b"\0")[:size])
                assert restored_seed(two_snapshots) == 1, (path.name, size)
        path.write_bytes(data)
    assert restored_seed(two_snapshots) == 2


def test_swapped_and_replayed_files_are_found(tmp_path):
    full = torch.randn(2, 1000)
    for step in (1, 2):
        save_on(tmp_path, 2, lambda rank, s=step: {"w": shard(full + s, 0, 2, rank)}, step=step, session=step)
    new, old = tmp_path / "step-000000002", tmp_path / "step-000000001"
    for name in ("r00000.safetensors", "r00000.json", "objects.json", "MANIFEST.json"):
        saved = (new / name).read_bytes()
        shutil.copy(old / name, new / name)
        state = {"w": torch.zeros(2, 1000)}
        if name == "objects.json":  # the two are equal, byte for byte
            assert saved == (old / name).read_bytes()
        else:
            assert Snapshots(tmp_path, read_only=True).restore(state).step == 1, name
        (new / name).write_bytes(saved)
    a, b = (new / "r00000.safetensors").read_bytes(), (new / "r00001.safetensors").read_bytes()
    (new / "r00000.safetensors").write_bytes(b)
    (new / "r00001.safetensors").write_bytes(a)
    assert Snapshots(tmp_path, read_only=True).restore({"w": torch.zeros(2, 1000)}).step == 1


class Bomb:
    """What a hostile file would like to run."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (os.mkdir, (str(self.marker),))


def test_a_pickle_in_any_file_runs_no_code(two_snapshots, tmp_path_factory):
    """Case L3, 9."""
    marker = tmp_path_factory.mktemp("bomb") / "exploded"
    import pickle  # here to build the attack; plait has no import of it

    bomb = pickle.dumps(Bomb(marker))
    archive = tmp_path_factory.mktemp("zip") / "a.pt"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", bomb)
    folder = two_snapshots / "step-000000002"
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        for attack in (bomb, archive.read_bytes(), bomb.ljust(len(data), b"\0")[: len(data)]):
            path.write_bytes(attack)
            assert restored_seed(two_snapshots) == 1
        path.write_bytes(data)
    (two_snapshots / "LATEST").write_bytes(bomb)
    (two_snapshots / "LOCK").write_bytes(bomb)
    assert restored_seed(two_snapshots) == 2
    Snapshots(two_snapshots).close()
    assert not marker.exists()


def test_sizes_are_checked_before_memory_is_taken(two_snapshots):
    """A fragment that claims a tensor of 2^60 elements, with digests made to match, is refused by its own sums."""
    from plait.ckpt.manifest import Fragment, Manifest, from_bytes, sha256, to_bytes

    folder = two_snapshots / "step-000000002"
    fragment = json.loads((folder / "r00000.json").read_bytes().split(b"\n")[0])
    fragment["pieces"][0]["full_shape"] = fragment["pieces"][0]["shape"] = [1 << 30, 1 << 30]
    line = json.dumps(fragment, separators=(",", ":")).encode()
    data = line + b"\nsha256:" + sha256(line).encode() + b"\n"
    from_bytes(Fragment, data, "legal by itself")
    (folder / "r00000.json").write_bytes(data)
    manifest = json.loads((folder / "MANIFEST.json").read_bytes().split(b"\n")[0])
    for entry in manifest["files"]:
        if entry["name"] == "r00000.json":
            entry.update(bytes=len(data), sha256=sha256(data))
    line = json.dumps(manifest, separators=(",", ":")).encode()
    sealed = line + b"\nsha256:" + sha256(line).encode() + b"\n"
    assert to_bytes(from_bytes(Manifest, sealed, "x")) == sealed
    (folder / "MANIFEST.json").write_bytes(sealed)
    with pytest.raises(SnapshotDamaged, match="8192 bytes for 1152921504606846976 elements"):
        _ = SnapshotReader(folder).table
    assert restored_seed(two_snapshots) == 1


def test_an_unreadable_file_is_a_reason_not_an_end(two_snapshots):
    io = _C.FaultIo([])
    Snapshots(two_snapshots, read_only=True, io=io).restore(empty_state())
    reads = [i for i, (name, path) in enumerate(io.ops) if name == "pread" and path.endswith("r00000.safetensors")]
    broken = _C.FaultIo([(reads[0], "errno", 5)])
    restored = Snapshots(two_snapshots, read_only=True, io=broken).restore(empty_state())
    assert restored.step == 1 and "cannot be read" in restored.report.skipped[0][1]
    assert is_small_state(restored.values, 1)


@pytest.mark.parametrize("kind", ["fifo", "link to a fifo", "folder", "device"])
@pytest.mark.parametrize("name", ["MANIFEST.json", "r00000.json", "objects.json", "r00000.safetensors"])
def test_what_is_no_regular_file_is_damage_and_not_waited_for(two_snapshots, tmp_path_factory, kind, name):
    """A FIFO in the place of MANIFEST.json was waited for without end."""
    path = two_snapshots / "step-000000002" / name
    path.unlink()
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "fifo"
    if kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        os.mkfifo(elsewhere)
        path.symlink_to(elsewhere)
    restored = Snapshots(two_snapshots, read_only=True).restore(empty_state())
    assert restored.step == 1 and name in restored.report.skipped[0][1]


def test_a_lock_that_is_a_fifo_is_not_waited_for(two_snapshots):
    (two_snapshots / "LOCK").unlink()
    os.mkfifo(two_snapshots / "LOCK")
    assert read_record(two_snapshots / "LOCK") == {}


def test_per_rank_values_need_their_rank_and_nothing_else(tmp_path):
    save_on(tmp_path, 2, lambda rank: {"rng": PerRank({"seed": rank, "state": (1, b"x")}), "w": torch.zeros(2)})
    (_, restored), *_ = restore_on(tmp_path, 1, lambda rank: {"rng": PerRank(None), "w": torch.zeros(2)})
    assert restored.values["rng"] == {"seed": 0, "state": (1, b"x")} and restored.report.saved_world_size == 2


def test_per_rank_values_are_strict_both_ways(tmp_path):
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, {"rng": PerRank(1)}).wait()
        with pytest.raises(StateError, match="not in the state of any rank: 'rng'"):
            snapshots.restore({})
        with pytest.raises(StateError, match="missing in the snapshot: 'other'"):
            snapshots.restore({"rng": PerRank(0), "other": PerRank(0)})
        restored = snapshots.restore({"other": PerRank(5)}, allow_missing=["other"], allow_unexpected=["rng"])
    assert restored.values == {"other": 5} and restored.report.per_rank_missing == ()


def test_struct_of_digest_is_what_the_page_says(tmp_path):
    """The data digest of the manifest is SHA-256 over CRC32C as little-endian uint32, of 4 MiB blocks from byte 0."""
    import hashlib

    with Snapshots(tmp_path) as snapshots:
        handle = snapshots.save(1, {"w": torch.randn(1_500_000)})
        handle.wait()
    reader = SnapshotReader(handle.folder)
    data = (handle.folder / "r00000.safetensors").read_bytes()
    crcs = [_C.crc32c(data[i : i + (4 << 20)]) for i in range(0, len(data), 4 << 20)]
    digest = hashlib.sha256(struct.pack(f"<{len(crcs)}I", *crcs)).hexdigest()
    entry = {e.name: e for e in reader.manifest.files}["r00000.safetensors"]
    assert (entry.bytes, entry.sha256) == (len(data), digest)
    (piece,) = reader.fragments[0].pieces
    body = data[piece.file_offset : piece.file_offset + piece.num_bytes]
    assert piece.xxh3_128 == _C.xxh3_128(body).hex() and piece.num_bytes == 4 * prod(piece.full_shape)
