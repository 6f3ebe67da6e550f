"""Delta: what did not change is linked, not written; each snapshot stays whole whatever happens to the others."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from plait import _C
from plait.ckpt import Snapshots
from plait.ckpt.cli import main
from plait.ckpt.compare import compare
from plait.ckpt.delta import MAX_BASES, REST
from plait.ckpt.interop import assemble
from plait.ckpt.reader import SnapshotReader
from plait.ckpt.tiers import Tier
from tests.faults import KILLED, count_ops, flip, in_child, on_ranks

FROZEN = 40


def state(seed: int, frozen: int = FROZEN) -> dict:
    """Frozen layers that never change and an adapter that always does: 80 KiB and 4 KiB."""
    layers = {f"layer.{i}": torch.full((16, 32), float(i)) for i in range(frozen)}
    return {"layers": layers, "adapter": torch.full((32, 32), float(seed)), "empty": torch.zeros(0, 3), "n": seed}


def restored(root: Path, step: int | None = None, **more) -> int:
    found = state(-1)
    for tensor in found["layers"].values():
        tensor.fill_(-1)
    report = Snapshots(root, read_only=True, **more).restore(found, step=step)
    wanted = state(report.step)
    assert all(torch.equal(found["layers"][name], tensor) for name, tensor in wanted["layers"].items())
    assert torch.equal(found["adapter"], wanted["adapter"]) and report.values["n"] == report.step
    return report.step


def written(folder: Path) -> int:
    """Returns the bytes of data files that only this folder names."""
    return sum(p.stat().st_size for p in folder.glob("*.safetensors") if p.stat().st_nlink == 1)


def test_unchanged_tensors_are_linked_and_read_from_the_older_file(tmp_path):
    with Snapshots(tmp_path, delta=True) as snapshots:
        snapshots.save(1, state(1)).wait()
        snapshots.save(2, state(2)).wait()
    two = SnapshotReader(tmp_path / "step-000000002")
    sources = {piece.key: piece.source_step for piece in two.fragments[0].pieces}
    assert sources["adapter"] is None and sources["layers/layer.3"] == 1
    assert [base.name for base in two.fragments[0].bases] == ["r00000.s000000001.safetensors"]
    assert written(tmp_path / "step-000000002") < written(tmp_path / "step-000000001") + 20_000
    assert os.path.samefile(
        tmp_path / "step-000000001/r00000.safetensors", tmp_path / "step-000000002/r00000.s000000001.safetensors"
    )
    assert restored(tmp_path, 1) == 1 and restored(tmp_path, 2) == 2
    assert two.verify(0) == [] and list(compare(two, two)) == []


@pytest.mark.parametrize("gone", [(1,), (2,), (1, 2), (3,), (1, 3)])
def test_any_snapshot_can_be_removed_without_hurting_another(tmp_path, gone):
    with Snapshots(tmp_path, keep_last=None, delta=True) as snapshots:
        for step in (1, 2, 3):
            snapshots.save(step, state(step)).wait()
    for step in gone:
        shutil.rmtree(tmp_path / f"step-00000000{step}")
    for step in {1, 2, 3} - set(gone):
        assert restored(tmp_path, step) == step
    assert restored(tmp_path) == max({1, 2, 3} - set(gone))


def test_retention_keeps_one_and_it_is_whole(tmp_path):
    with Snapshots(tmp_path, keep_last=1, delta=True) as snapshots:
        for step in range(1, 9):
            snapshots.save(step, state(step)).wait()
            assert restored(tmp_path) == step
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-000000008"]
    assert len(list((tmp_path / "step-000000008").glob("*.safetensors"))) == 2  # its own file and one base: no chain


def test_the_number_of_older_files_is_bounded(tmp_path):
    """A part of the state changes at each save, another part each time."""
    full = {f"t{i}": torch.zeros(4096) for i in range(12)}
    with Snapshots(tmp_path, keep_last=None, delta=True) as snapshots:
        for step in range(1, 13):
            full[f"t{step % 12}"].fill_(step)
            snapshots.save(step, full).wait()
            fragment = SnapshotReader(tmp_path / f"step-{step:09d}").fragments[0]
            assert len(fragment.bases) <= MAX_BASES
            for base in fragment.bases:
                held = [p for p in fragment.pieces if fragment.data_file(p.source_step) == base]
                assert sum(p.num_bytes for p in held) >= 0.1 * base.bytes
    seen = {name: torch.zeros(4096) - 1 for name in full}
    Snapshots(tmp_path, read_only=True).restore(seen)
    assert all(torch.equal(seen[name], full[name]) for name in full)


def every_kind(seed: int) -> dict:
    """A tensor of each kind that a file may hold in its own way."""
    g = torch.Generator().manual_seed(seed)
    ints = torch.randint(-128, 128, (4096,), dtype=torch.int8, generator=g)
    floats = torch.randn(1000, generator=g)
    complexes = torch.randn(30, 7, dtype=torch.complex128, generator=g)
    return {
        "zero_d": floats[0].clone(),
        "empty": torch.zeros(3, 0, dtype=torch.int64),
        "fp8": floats.to(torch.float8_e4m3fn),
        "fp8_fnuz": floats.to(torch.float8_e5m2fnuz),
        "bf16": floats.bfloat16(),
        "complex": complexes,
        "conjugate": complexes.conj(),
        "negative": complexes.conj().imag,
        "int64": torch.randint(-(2**62), 2**62, (500,), generator=g),
        "uint32": torch.arange(seed, seed + 11).to(torch.uint32),
        "bool": floats > 0,
        "turned": floats.view(25, 40).t(),
        "expanded": floats[:30].expand(20, 30),
        "every_third": floats[::3],
        "quantised": ints.view(torch.float16),
        "int4_pairs": ints[100:612].view(torch.uint8),
        "nan": torch.tensor([float("nan"), -0.0, float(seed)]),
    }


def bits_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).tolist())


def test_each_kind_of_tensor_is_linked_and_comes_back_in_any_order_of_removal(tmp_path):
    """Three kinds change at each step, a tied pair at every third; older ones go by rmtree and by `prune`."""
    now, wanted, names = every_kind(0), {}, sorted(every_kind(0))
    tied, frozen = torch.arange(5000.0), torch.ones(9000)
    with Snapshots(tmp_path, keep_last=None, delta=True) as snapshots:
        for step in range(1, 9):
            now = {n: t if (i + step) % 6 else every_kind(step)[n] for i, (n, t) in enumerate(sorted(now.items()))}
            tied = tied if step % 3 else tied + 1
            snapshots.save(step, {**now, "tied": tied, "again": tied, "frozen": frozen}).wait()
            wanted[step] = {**now, "tied": tied, "again": tied, "frozen": frozen}
            if step == 4:
                shutil.rmtree(tmp_path / "step-000000003")  # while the next saves rest on it
    bases = [len(SnapshotReader(tmp_path / f"step-{s:09d}").fragments[0].bases) for s in (1, 2, 4, 5, 6, 7, 8)]
    assert bases[0] == 0 and min(bases[1:]) >= 1 and max(bases) <= MAX_BASES
    for gone in ((1,), (6, 2)):
        for step in gone:
            shutil.rmtree(tmp_path / f"step-{step:09d}")
    for keep in (4, 2, 1):
        assert main(["prune", str(tmp_path), "--keep", str(keep)]) == 0
        for folder in sorted(tmp_path.glob("step-*")):
            step = int(folder.name[5:])
            seen = {n: torch.zeros(t.shape, dtype=t.dtype) for n, t in wanted[step].items() if n != "again"}
            Snapshots(tmp_path, read_only=True).restore({**seen, "again": seen["tied"]}, step=step)
            assert all(bits_of(seen[n]) == bits_of(wanted[step][n]) for n in (*names, "tied", "frozen"))
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-000000008"]


def test_it_rests_where_nearly_everything_changes(tmp_path):
    values = {f"t{i}": torch.zeros(1024) for i in range(50)}
    with Snapshots(tmp_path, keep_last=None, delta=True) as snapshots:
        for step in range(1, 4):
            for name in list(values)[1:]:
                values[name].fill_(step)
            snapshots.save(step, values).wait()
            assert not SnapshotReader(tmp_path / f"step-{step:09d}").fragments[0].bases
        delta = snapshots._background._delta
        assert delta._rest == REST - 1


@pytest.mark.parametrize("change", ["structure", "back", "next_launch", "no_links"])
def test_what_cannot_be_compared_is_written_whole(tmp_path, change, monkeypatch):
    with Snapshots(tmp_path, keep_last=None, delta=True) as snapshots:
        snapshots.save(5, state(5)).wait()
        if change == "structure":
            snapshots.save(6, state(6, FROZEN + 1)).wait()
        elif change == "back":
            snapshots.save(4, state(4)).wait()
        elif change == "no_links":
            monkeypatch.setattr("plait.ckpt.delta.os.link", no_links)
            snapshots.save(6, state(6)).wait()
    if change == "next_launch":
        with Snapshots(tmp_path, keep_last=None, delta=True) as snapshots:
            snapshots.save(6, state(6)).wait()
    other = 4 if change == "back" else 6
    assert not SnapshotReader(tmp_path / f"step-{other:09d}").fragments[0].bases


def no_links(source, target):
    raise OSError(1, "no hard links here")


def test_a_foreign_reader_sees_the_newest_of_each(tmp_path):
    with Snapshots(tmp_path, keep_last=1, delta=True) as snapshots:
        for step in (1, 2, 3):
            snapshots.save(step, state(step)).wait()
    tensors = assemble(tmp_path / "step-000000003")
    wanted = state(3)
    assert torch.equal(tensors["adapter"], wanted["adapter"])
    assert all(torch.equal(tensors[f"layers/{name}"], tensor) for name, tensor in wanted["layers"].items())


def test_a_copy_holds_all_bytes(tmp_path):
    tier = Tier(tmp_path / "far", compress=True)
    with Snapshots(tmp_path / "near", delta=True, tiers=[tier]) as snapshots:
        snapshots.save(1, state(1)).wait("remote")
        snapshots.save(2, state(2)).wait("remote")
    shutil.rmtree(tmp_path / "near")
    shutil.rmtree(tmp_path / "far/step-000000001")
    assert restored(tmp_path / "none", tiers=[tier]) == 2


def test_three_ranks_each_link_their_own(tmp_path):
    big = {"w": torch.arange(1_500_000.0), "v": torch.zeros(300_000)}

    def save(rank: int) -> None:
        with Snapshots(tmp_path, rank=rank, world_size=3, session=3, delta=True) as snapshots:
            snapshots.save(1, big).wait()
            snapshots.save(2, {"w": big["w"], "v": torch.ones(300_000)}).wait()

    on_ranks(3, save)
    shutil.rmtree(tmp_path / "step-000000001")
    reader = SnapshotReader(tmp_path / "step-000000002")
    assert sum(len(f.bases) for f in reader.fragments) >= 2
    assert torch.equal(reader.read_full("w"), big["w"]) and reader.read_full("v").eq(1).all()


@pytest.mark.parametrize("action", ["crash_before", "crash_after"])
def test_killed_at_every_operation_of_a_delta(memory_path, action):
    def cycle(root: Path, io: _C.Io) -> None:
        with Snapshots(root, keep_last=1, threads=1, io=io, delta=True) as snapshots:
            snapshots.save(1, state(1)).wait()
            snapshots.save(2, state(2)).wait()

    ops = count_ops(lambda io: cycle(memory_path / "count", io))
    first = next(i for i, (name, path) in enumerate(ops) if name == "mkdir" and ".tmp-2-" in path)
    assert len(ops) - first > 20
    for index in range(first, len(ops)):
        root = memory_path / f"{action}-{index}"
        assert in_child(lambda r=root, i=index: cycle(r, _C.FaultIo([(i, action, 0)]))) == KILLED, ops[index]
        assert restored(root) in (1, 2), ops[index]
        with Snapshots(root, keep_last=1, delta=True) as snapshots:
            snapshots.save(3, state(3)).wait()
            snapshots.save(4, state(4)).wait()
        assert restored(root) == 4
        assert sorted(n for n in os.listdir(root) if "step" in n or n.startswith(".")) == ["step-000000004"]
        shutil.rmtree(root)


def test_a_damaged_base_is_named(tmp_path):
    with Snapshots(tmp_path, keep_last=1, delta=True) as snapshots:
        snapshots.save(1, state(1)).wait()
        snapshots.save(2, state(2)).wait()
    base = tmp_path / "step-000000002/r00000.s000000001.safetensors"
    data = bytearray(base.read_bytes())
    data[20_000] ^= 4
    base.write_bytes(data)
    with pytest.raises(RuntimeError, match="r00000.s000000001.safetensors.*layers/layer"):
        restored(tmp_path)


def test_a_base_is_one_inode_damage_in_it_is_found_in_every_step_and_a_copy_by_a_tool_is_none_of_them(tmp_path):
    """What docs/format.md says of hard links: cp -r parts them, cp -a keeps them, a tier has bytes of its own."""
    root, tier = tmp_path / "run", Tier(tmp_path / "far")
    with Snapshots(root, keep_last=None, delta=True, tiers=[tier]) as snapshots:
        for step in (1, 2, 3):
            snapshots.save(step, state(step)).wait("remote")
    subprocess.run(["cp", "-r", str(root), str(tmp_path / "apart")], check=True)
    subprocess.run(["cp", "-a", str(root), str(tmp_path / "linked")], check=True)
    shutil.copytree(root / "step-000000003", tmp_path / "one/step-000000003")
    flip(root / "step-000000001/r00000.safetensors", 20_000)
    for step in (1, 2, 3):
        with pytest.raises(RuntimeError, match="CRC32C"):
            restored(root, step)
    assert [restored(tmp_path / "apart", step) for step in (1, 2, 3)] == [1, 2, 3]
    assert restored(tmp_path / "one") == 3
    flip(tmp_path / "apart/step-000000001/r00000.safetensors", 20_000)
    assert restored(tmp_path / "apart") == 3
    flip(tmp_path / "linked/step-000000001/r00000.safetensors", 20_000)
    with pytest.raises(RuntimeError, match="CRC32C"):
        restored(tmp_path / "linked", 3)
    assert restored(root, tiers=[tier]) == 3
