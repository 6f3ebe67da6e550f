"""`Snapshots` in a loop: fidelity of every tensor, what a save freezes, when errors surface, who may write."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from plait import _C
from plait.ckpt import PerRank, Sharded, SnapshotError, SnapshotLocked, Snapshots, StateError, optimizer_state
from plait.ckpt.compare import compare
from plait.ckpt.interop import assemble, export
from plait.ckpt.lock import refuse_if_held
from plait.ckpt.reader import SnapshotReader
from tests.faults import empty_state, failing, flip, in_child, is_small_state, on_ranks, restored_seed, small_state

# Each row: a tensor whose kind some snapshot library refuses, converts or stores with more than its bytes.
BITS = torch.arange(256, dtype=torch.uint8)
TENSORS = {
    "float64": torch.tensor([0.1, -0.0, float("inf")], dtype=torch.float64),
    "nan_payload": torch.tensor([0x7FC0BEEF, -0x400001], dtype=torch.int32).view(torch.float32),
    "float16": BITS.view(torch.float16),
    "bfloat16": BITS.view(torch.bfloat16),
    "e4m3": BITS.view(torch.float8_e4m3fn),
    "e5m2": BITS.view(torch.float8_e5m2),
    "e8m0": BITS.view(torch.float8_e8m0fnu),
    "e4m3fnuz": BITS.view(torch.float8_e4m3fnuz),
    "complex64": BITS.view(torch.complex64),
    "complex128": BITS.view(torch.complex128),
    "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negative_view": torch.tensor([1 + 2j]).conj().imag,
    "bool": torch.tensor([True, False, True]),
    "int8": BITS.view(torch.int8),
    "uint16": BITS.view(torch.uint16),
    "uint32": BITS.view(torch.uint32),
    "uint64": BITS.view(torch.uint64),
    "int64": torch.tensor([2**62, -(2**63)]),
    "zero_dim": torch.tensor(7.5),
    "one": torch.ones(1),
    "empty": torch.zeros(0, 5),
    "empty_dims": torch.zeros(3, 0, 2, dtype=torch.int16),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "strided": torch.arange(20)[1::3],
    "expanded": torch.tensor([3.0]).expand(4),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "parameter": torch.nn.Parameter(torch.randn(3, 3)),
}


def bits(tensor: torch.Tensor) -> bytes:
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach().resolve_conj().resolve_neg())
    return bytes(plain.reshape(-1).view(torch.uint8).tolist())


def blank_like(tensor: torch.Tensor) -> torch.Tensor:
    return (
        torch.zeros(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
        .view(tensor.dtype)
        .reshape(tensor.shape)
    )


def test_every_dtype_and_layout_comes_back_bit_for_bit(tmp_path):
    blanks = {name: blank_like(tensor) for name, tensor in TENSORS.items()}
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, {"t": TENSORS}).wait()
        snapshots.restore({"t": blanks})
    for name, tensor in TENSORS.items():
        assert bits(blanks[name]) == bits(tensor), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_tensors_are_captured_at_the_call_and_restored(tmp_path):
    weights = torch.randn(1000, 300, device="cuda")
    before, target = weights.cpu(), torch.zeros(300, 1000, device="cuda")
    with Snapshots(tmp_path) as snapshots:
        handle = snapshots.save(1, {"w": weights.t(), "half": weights[:7].bfloat16()})
        weights.zero_()
        handle.wait()
        half = torch.zeros(7, 300, dtype=torch.bfloat16, device="cuda")
        snapshots.restore({"w": target, "half": half})
    assert torch.equal(target.cpu(), before.t()) and torch.equal(half.cpu(), before[:7].bfloat16())


def test_strided_targets_are_filled_in_place(tmp_path):
    source = {"a": torch.randn(6, 4), "b": torch.randn(5).to(torch.bfloat16), "c": torch.randn(2, 3, 4)}
    big = torch.zeros(6, 9)
    target = {
        "a": big[:, 2:6],
        "b": torch.zeros(15, dtype=torch.bfloat16)[::3],
        "c": torch.zeros(4, 2, 3).permute(1, 2, 0),
    }
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, source).wait()
        snapshots.restore(target)
    for name in source:
        assert torch.equal(source[name], target[name])
    assert big[:, :2].eq(0).all() and big[:, 6:].eq(0).all()


def test_data_files_open_with_plain_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    tensors = {k: t for k, t in TENSORS.items() if k not in ("e8m0",)}
    with Snapshots(tmp_path) as snapshots:
        folder = folder_of(snapshots.save(1, tensors))
    with safetensors.safe_open(folder / "r00000.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["pieces"])["zero_dim"] == [[], [], [], None]
        for name, tensor in tensors.items():
            assert bits(file.get_tensor(name)) == bits(tensor), name


def folder_of(handle):
    handle.wait()
    assert handle.folder is not None
    return handle.folder


def test_a_foreign_reader_puts_shards_together(tmp_path):
    pytest.importorskip("safetensors")
    full = torch.randn(600, 700)

    def save(rank):
        low, high = (0, 250) if rank == 0 else (250, 600)
        state = {
            "w@x": Sharded(full[low:high], (600, 700), (low, 0)),
            "rep": torch.arange(700_000.0),
            "odd": TENSORS["complex128"],
        }
        with Snapshots(tmp_path, rank=rank, world_size=2, session=5) as snapshots:
            return folder_of(snapshots.save(3, state))

    folder = on_ranks(2, save)[0]
    found = assemble(folder)
    assert torch.equal(found["w~2x"], full) and torch.equal(found["rep"], torch.arange(700_000.0))
    assert bits(found["odd"]) == bits(TENSORS["complex128"])
    names = export(folder, tmp_path / "full.safetensors")
    from safetensors.torch import load_file

    back = load_file(tmp_path / "full.safetensors")
    assert set(names) == {n for n in back if not n.startswith("__pad")} and torch.equal(back["w~2x"], full)


def test_a_view_is_stored_with_its_own_bytes_only(tmp_path):
    """Case 43: a slice of a large tensor must not bring its storage along."""
    big = torch.arange(1_000_000.0)
    with Snapshots(tmp_path) as snapshots:
        handle = snapshots.save(1, {"w": big[:10]})
        folder = folder_of(handle)
    assert handle.nbytes == 40 and (folder / "r00000.safetensors").stat().st_size < 10_000


def test_tied_tensors_are_stored_once_and_both_come_back(tmp_path):
    tied = torch.randn(100, 10)
    target = torch.zeros(100, 10)
    with Snapshots(tmp_path) as snapshots:
        handle = snapshots.save(1, {"head": tied, "embed": tied, "part": tied[:50]})
        folder = folder_of(handle)
        assert SnapshotReader(folder).manifest.aliases == {"head": "embed"}
        assert handle.nbytes == 4 * (1000 + 500)
        separate = {"head": torch.zeros(100, 10), "embed": torch.zeros(100, 10), "part": torch.zeros(50, 10)}
        snapshots.restore(separate)
        snapshots.restore({"head": target, "embed": target, "part": torch.zeros(50, 10)})
    assert torch.equal(separate["head"], tied) and torch.equal(separate["embed"], tied) and torch.equal(target, tied)


def test_tied_state_refuses_a_snapshot_in_which_the_two_differ(tmp_path):
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, {"a": torch.zeros(4), "b": torch.ones(4)}).wait()
        one = torch.zeros(4)
        with pytest.raises(StateError, match="tied in the state, but 'b' and 'a' differ"):
            snapshots.restore({"a": one, "b": one})


# ---- what a save freezes


def test_values_are_those_of_the_call_whatever_the_loop_does_next(tmp_path):
    """Case 1, 2, 17, L7: in-place updates, the 0-dim step and plain numbers change right after save returns."""
    weights, count = torch.randn(300, 1000), torch.tensor(3.0)
    state = {"w": weights, "step_tensor": count, "step": 3, "history": [1, 2]}
    before = weights.clone()
    with Snapshots(tmp_path) as snapshots:
        handle = snapshots.save(3, state)
        weights.fill_(2)
        count += 1
        state["step"] = 4
        state["history"].append(9)
        handle.wait()
        target = {"w": torch.zeros(300, 1000), "step_tensor": torch.tensor(0.0), "step": 0, "history": []}
        values = snapshots.restore(target).values
    assert torch.equal(target["w"], before) and target["step_tensor"] == 3
    assert values["step"] == 3 and values["history"] == [1, 2]


def test_replaced_storage_is_seen_by_the_next_save(tmp_path):
    """Case 3: a cached plan must not write the first save's memory again."""
    parameter = torch.nn.Parameter(torch.zeros(1000))
    target = torch.zeros(1000)
    with Snapshots(tmp_path, keep_last=None) as snapshots:
        for step in range(1, 4):
            parameter.data = parameter.data.clone() + 1
            snapshots.save(step, {"w": parameter})
        snapshots.wait()
        for step in range(1, 4):
            snapshots.restore({"w": target}, step=step)
            assert target.eq(step).all()


def test_an_unchanged_structure_is_planned_once_and_no_tensor_is_kept_alive(tmp_path):
    """Case 4 and 6: the kept plan holds addresses, and the pool is made once."""
    import weakref

    state = small_state(1)
    with Snapshots(tmp_path) as snapshots:
        for step in range(4):
            snapshots.save(step, state)
        capturer = snapshots._capturer
        assert capturer is not None and capturer.plans_made == 1
        snapshots.wait()
        reference = weakref.ref(state["model"]["layer.0"])
        del state
        gc.collect()
        assert reference() is None


def test_fifty_saves_keep_no_memory(tmp_path):
    """Case 6: a peer's process grew by the whole state with every save, another by its staging buffers."""

    def resident_bytes() -> int:
        return int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) << 10

    state, sizes = {"w": torch.zeros(1 << 20)}, []
    with Snapshots(tmp_path, keep_last=1) as snapshots:
        for step in range(50):
            state["w"].fill_(step)
            snapshots.save(step, state).wait()
            sizes.append(resident_bytes())
    assert sizes[-1] - sizes[9] < 8 << 20, "40 saves of 4 MiB: a copy left by each would be 160 MiB"


def test_model_optimizer_and_scheduler_continue_as_if_never_stopped(tmp_path):
    def parts(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5, 6], gamma=0.5)

    def train(model, optimizer, scheduler, steps):
        for step in steps:
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            scheduler.step()

    def state(model, optimizer, scheduler):
        return {
            "model": model,
            "optimizer": optimizer_state(model, optimizer),
            "schedule": scheduler,
            "plain": optimizer,
        }

    straight = parts(0)
    train(*straight, range(4))
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(4, state(*straight))
        train(*straight, range(4, 8))
        resumed = parts(1)
        snapshots.restore(state(*resumed))
    train(*resumed, range(4, 8))
    for a, b in zip(straight[0].state_dict().values(), resumed[0].state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(straight[1].state.values(), resumed[1].state.values(), strict=True):
        assert all(torch.equal(a[k], b[k]) for k in a)
    assert straight[2].get_last_lr() == resumed[2].get_last_lr()


# ---- errors surface, once


def test_a_failed_save_is_raised_by_the_next_call_and_harms_nothing(tmp_path):
    """Case L14, 18: an error nobody asked for must not get lost."""
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, small_state(1)).wait()
    io = failing("fdatasync", 5)
    snapshots = Snapshots(tmp_path, io=io)
    snapshots.save(2, small_state(2))
    snapshots._last.settle()
    with pytest.raises(OSError, match="fdatasync.*r00000.safetensors"):
        snapshots.save(3, small_state(3))
    handle = snapshots.save(4, small_state(4))
    with pytest.raises(OSError, match="fdatasync"):
        handle.wait()
    snapshots.close()  # raised once already
    assert restored_seed(tmp_path) == 1
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".tmp-")]


def test_close_raises_what_was_not_raised_and_lets_go_of_everything(tmp_path):
    snapshots = Snapshots(tmp_path, io=failing("fallocate", 28))
    snapshots.save(1, small_state(1))
    with pytest.raises(OSError) as caught:
        snapshots.close()
    assert caught.value.errno == 28
    Snapshots(tmp_path).close()  # the LOCK is free
    assert not [t for t in threading.enumerate() if t.name.startswith("plait-snapshots")]


def test_a_program_that_ends_without_close_still_finishes_its_save(tmp_path):
    code = (
        "import sys, torch; from plait.ckpt import Snapshots\n"
        "snapshots = Snapshots(sys.argv[1], rate_limit=4 << 20)\n"
        "snapshots.save(1, {'w': torch.ones(500_000)})\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code, str(tmp_path)], check=True)
    assert Snapshots(tmp_path, read_only=True).latest() == 1


def test_a_hundred_failed_saves_leak_nothing(tmp_path):
    Snapshots(tmp_path).close()  # makes RUN.json
    snapshots = Snapshots(tmp_path, io=failing("fsync_dir", 5))
    before = None
    for step in range(100):
        with pytest.raises(OSError, match="fsync"):
            snapshots.save(step, {"w": torch.zeros(10)}).wait()
        now = (len(os.listdir("/proc/self/fd")), threading.active_count(), sorted(os.listdir(tmp_path)))
        before = before or now
        assert now == before
    snapshots.close()


def test_what_cannot_be_stored_stops_the_save_before_anything_is_written(tmp_path):
    with Snapshots(tmp_path) as snapshots:
        with pytest.raises(StateError, match=r"state\['bad'\]"):
            snapshots.save(1, {"w": torch.zeros(3), "bad": {1, 2}})
        assert snapshots.latest() is None
        assert not list(tmp_path.glob(".tmp*"))
        snapshots.save(1, {"w": torch.zeros(3)}).wait()
        assert snapshots.latest() == 1


def test_saves_in_quick_succession_wait_and_are_counted(tmp_path):
    with Snapshots(tmp_path, rate_limit=2 << 20) as snapshots:
        state = {"w": torch.randn(300_000)}
        snapshots.save(1, state)
        assert snapshots._last is not None and not snapshots._last.done()
        handle = snapshots.save(2, state)
        assert snapshots.waits == 1 and handle.waited_s > 0 and handle.stall_s >= handle.waited_s
        snapshots.save(3, state, force=True)
        assert snapshots.waits == 1
    assert [f.step for f in _folders(tmp_path)] == [3, 2, 1]


def _folders(root):
    from plait.ckpt.folders import step_folders

    return step_folders(root)


def test_wait_with_a_time_limit_gives_up_and_says_so(tmp_path):
    with Snapshots(tmp_path, rate_limit=1 << 20) as snapshots:
        handle = snapshots.save(1, {"w": torch.randn(300_000)})
        with pytest.raises(TimeoutError, match="step 1 is not durable"):
            handle.wait(timeout_s=0.0)
        handle.wait()
        assert handle.durable_s is not None and handle.done()


# ---- one writer


def test_a_second_writer_is_refused_and_the_owner_named(tmp_path):
    with Snapshots(tmp_path):
        with pytest.raises(SnapshotLocked, match=f"held by process {os.getpid()} on host"):
            Snapshots(tmp_path)
        assert in_child(lambda: Snapshots(tmp_path)) == 1
        Snapshots(tmp_path, read_only=True).close()
    Snapshots(tmp_path).close()


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    """A data-loader worker forked by the owner outlives it; the next job must not be locked out."""
    snapshots = Snapshots(tmp_path)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)  # lives until the parent lets it go
        os._exit(0)
    os.close(read)
    snapshots.close()
    Snapshots(tmp_path).close()
    os.close(write)
    os.waitpid(pid, 0)


def test_a_stale_owner_is_recognised(tmp_path):
    assert in_child(lambda: Snapshots(tmp_path)) == 0  # ends without close
    record = json.loads((tmp_path / "LOCK").read_text())
    assert record["held"] is True
    snapshots = Snapshots(tmp_path)
    assert snapshots._lock is not None
    assert f"process {record['pid']}" in str(snapshots._lock.stale_owner)
    assert snapshots._lock.epoch == record["epoch"] + 1
    snapshots.close()


def test_a_look_at_the_lock_names_the_owner_and_takes_nothing(tmp_path):
    """For a launcher, which forks: a child would keep a lock that it held."""
    refuse_if_held(tmp_path)
    assert not list(tmp_path.iterdir())
    with Snapshots(tmp_path):
        with pytest.raises(SnapshotLocked, match=f"held by process {os.getpid()} on host"):
            refuse_if_held(tmp_path)
        assert in_child(lambda: refuse_if_held(tmp_path)) == 1
    refuse_if_held(tmp_path)
    assert in_child(lambda: Snapshots(tmp_path)) == 0  # ends without close
    before = (tmp_path / "LOCK").read_text()
    num_open = len(os.listdir("/proc/self/fd"))
    refuse_if_held(tmp_path)
    assert (tmp_path / "LOCK").read_text() == before and len(os.listdir("/proc/self/fd")) == num_open
    Snapshots(tmp_path).close()


def test_an_owner_that_was_replaced_does_not_commit(tmp_path):
    snapshots = Snapshots(tmp_path)
    record = json.loads((tmp_path / "LOCK").read_text())
    (tmp_path / "LOCK").write_text(json.dumps({**record, "epoch": record["epoch"] + 1, "pid": 99, "host": "other"}))
    with pytest.raises(SnapshotError, match="was taken over by process 99 on host other"):
        snapshots.save(1, small_state(1)).wait()
    assert snapshots.latest() is None
    snapshots.close()


def test_wrong_arguments(tmp_path):
    with pytest.raises(ValueError, match="rank=2 must be in"):
        Snapshots(tmp_path, rank=2, world_size=2, session=1)
    with pytest.raises(ValueError, match="session"):
        Snapshots(tmp_path, rank=1, world_size=2)
    with pytest.raises(ValueError, match="keep_last=0"):
        Snapshots(tmp_path, keep_last=0)
    with Snapshots(tmp_path) as snapshots, pytest.raises(ValueError, match="step=-1"):
        snapshots.save(-1, {})
    with pytest.raises(SnapshotError, match="read-only, or is closed"):
        Snapshots(tmp_path, read_only=True).save(1, {})


# ---- several ranks


def test_a_dead_rank_is_named_and_nobody_hangs(tmp_path):
    """Case 15: rank 2 never comes; all others get the error within the time limit."""

    def save(rank):
        if rank == 2:
            return "dead"
        snapshots = Snapshots(tmp_path, rank=rank, world_size=4, session=9, timeout_s=0.5)
        with pytest.raises(SnapshotError) as caught:
            snapshots.save(1, {"w": torch.zeros(100)}).wait()
        snapshots.close()
        return str(caught.value)

    began = time.monotonic()
    texts = on_ranks(4, save)
    assert "ranks [2] did not finish their part of step 1 within 0.5 s" in texts[0]
    assert all("ranks [2]" in t or "rank 0 did not commit" in t for t in (texts[1], texts[3]))
    assert time.monotonic() - began < 60
    assert Snapshots(tmp_path, read_only=True).latest() is None


def test_one_rank_that_fails_fails_all_with_its_text(tmp_path):
    def save(rank):
        io = failing("fallocate", 28) if rank == 1 else None
        snapshots = Snapshots(tmp_path, rank=rank, world_size=3, session=9, timeout_s=30, io=io)
        with pytest.raises((SnapshotError, OSError)) as caught:
            snapshots.save(1, {"w": torch.zeros(1_000_000)}).wait()
        snapshots.close()
        return str(caught.value)

    texts = on_ranks(3, save)
    assert all("fallocate" in text and "r00001.safetensors" in text for text in texts)
    assert "rank 1 could not write its part of step 1" in texts[2]


def test_a_rank_whose_state_is_refused_tells_the_others(tmp_path):
    def save(rank):
        snapshots = Snapshots(tmp_path, rank=rank, world_size=2, session=9, timeout_s=30)
        with pytest.raises(SnapshotError) as caught:
            snapshots.save(1, {"x": {1} if rank == 1 else 1}).wait()
        snapshots.close()
        return str(caught.value)

    assert all("a set, which cannot be stored" in text for text in on_ranks(2, save))


def test_values_that_differ_between_ranks_are_refused(tmp_path):
    def save(rank):
        snapshots = Snapshots(tmp_path, rank=rank, world_size=2, session=9, timeout_s=30)
        with pytest.raises(SnapshotError, match="value 'seed' is 0 on rank 0 but 1 on rank 1; wrap"):
            snapshots.save(1, {"seed": rank}).wait()
        snapshots.close()

    on_ranks(2, save)


def test_after_a_failed_attempt_the_next_one_works_and_tidies_up(tmp_path):
    """Case L13: the disk is full for one rank, then it is not."""

    def save(rank):
        with Snapshots(tmp_path, rank=rank, world_size=2, session=9, timeout_s=30) as snapshots:
            good = snapshots._background.writer
            if rank == 1:
                snapshots._background.writer = dataclasses.replace(good, io=failing("fallocate", 28))
            with pytest.raises((SnapshotError, OSError), match="fallocate"):
                snapshots.save(1, {"w": torch.zeros(1_000_000)}).wait()
            assert rank == 1 or not list(tmp_path.glob(".tmp-1-*/*.safetensors"))
            snapshots._background.writer = good
            snapshots.save(2, small_state(2)).wait()

    on_ranks(2, save)
    assert sorted(n for n in os.listdir(tmp_path) if n.startswith((".tmp", "step"))) == ["step-000000002"]


@pytest.mark.parametrize("victims", [(1,), (0,), (0, 1, 2)])
def test_a_full_disk_leaves_no_attempt_behind(tmp_path, victims):
    """Fragments of the other ranks, and the abort, once stayed until the next start: 200 KB at eight ranks."""

    def save(rank):
        io = failing("fallocate", 28) if rank in victims else None
        snapshots = Snapshots(tmp_path, rank=rank, world_size=3, session=9, timeout_s=30, io=io)
        with pytest.raises((SnapshotError, OSError), match="fallocate"):
            snapshots.save(1, {"w": torch.zeros(1_000_000)}).wait()
        snapshots.close()

    on_ranks(3, save)
    assert sorted(os.listdir(tmp_path)) == ["LOCK", "RUN.json"]


def test_a_fragment_that_finds_no_room_makes_room_for_its_error(tmp_path):
    """The data fits and the fragment does not: the rank gives its data back before it says so."""
    ops = _C.FaultIo([])
    ios = [_C.FaultIo([]), ops]

    def save(rank, first_full):
        io = _C.FaultIo([(first_full, "errno", 28)]) if first_full is not None and rank == 1 else ios[rank]
        root = tmp_path / str(first_full)
        snapshots = Snapshots(root, rank=rank, world_size=2, session=9, timeout_s=30, threads=1, io=io)
        if first_full is None:
            snapshots.save(1, {"w": torch.zeros(1_000_000)}).wait()
        else:
            with pytest.raises((SnapshotError, OSError), match="r00001.json.part"):
                snapshots.save(1, {"w": torch.zeros(1_000_000)}).wait()
        snapshots.close()
        return list(io.ops)

    counted = on_ranks(2, lambda rank: save(rank, None))[1]
    full = next(i for i, (name, path) in enumerate(counted) if name == "pwrite" and "r00001.json.part" in path)
    done = on_ranks(2, lambda rank: save(rank, full))[1][full + 1 :]
    freed = next(i for i, (name, path) in enumerate(done) if name == "unlink" and path.endswith("r00001.safetensors"))
    said = next(i for i, (name, path) in enumerate(done) if "r00001.error" in path)
    assert freed < said
    assert sorted(os.listdir(tmp_path / str(full))) == ["LOCK", "RUN.json"]


def test_a_rank_that_comes_late_to_a_failed_attempt_still_learns_why(tmp_path):
    """What is left of the attempt waits for it."""
    failed = threading.Event()

    def save(rank):
        if rank == 2:
            assert failed.wait(30)
        io = failing("fallocate", 28) if rank == 0 else None
        snapshots = Snapshots(tmp_path, rank=rank, world_size=3, session=9, timeout_s=30, io=io)
        with pytest.raises((SnapshotError, OSError), match="fallocate"):
            snapshots.save(1, {"w": torch.zeros(1_000_000)}).wait()
        snapshots.close()
        if rank == 0:
            assert os.listdir(next(tmp_path.glob(".tmp-1-*")))
            failed.set()

    on_ranks(3, save)


def test_a_state_that_rank_0_alone_refuses_is_told_to_the_others(tmp_path):
    """They waited for two time limits, 20 minutes."""

    def save(rank):
        snapshots = Snapshots(tmp_path, rank=rank, world_size=2, session=9, timeout_s=20)
        with pytest.raises(SnapshotError, match="a set, which cannot be stored"):
            snapshots.save(1, {"x": {1} if rank == 0 else 1}).wait()
        snapshots.close()

    on_ranks(2, save)
    assert sorted(os.listdir(tmp_path)) == ["LOCK", "RUN.json"]


def test_each_rank_gets_its_own_generator_back(tmp_path):
    """Case 29: never a replica of rank 0's."""

    def run(rank, world_size, session):
        with Snapshots(tmp_path, rank=rank, world_size=world_size, session=session) as snapshots:
            state = {"rng": PerRank(torch.tensor([rank * 11])), "w": torch.zeros(4)}
            if session == 1:
                snapshots.save(1, state).wait()
                return None
            restored = snapshots.restore({**state, "rng": PerRank("none")})
            return restored.values["rng"], restored.report.per_rank_missing

    on_ranks(4, lambda rank: run(rank, 4, 1))
    assert [int(v[0]) for v in on_ranks(4, lambda rank: run(rank, 4, 2))] == [0, 11, 22, 33]
    more = on_ranks(6, lambda rank: run(rank, 6, 3))
    assert [v[1] for v in more] == [()] * 4 + [("rng",)] * 2 and more[5][0] == "none"


def test_two_snapshots_of_other_grids_compare_equal(tmp_path):
    full = torch.randn(12, 50)

    def save(rank, world_size, root):
        rows = 12 // world_size
        state = {"w": Sharded(full[rank * rows : (rank + 1) * rows], (12, 50), (rank * rows, 0)), "n": 3}
        with Snapshots(root, rank=rank, world_size=world_size, session=1) as snapshots:
            return folder_of(snapshots.save(1, state))

    a = on_ranks(3, lambda rank: save(rank, 3, tmp_path / "a"))[0]
    b = on_ranks(2, lambda rank: save(rank, 2, tmp_path / "b"))[0]
    assert list(compare(SnapshotReader(a), SnapshotReader(b))) == []


def test_a_loop_over_random_saves_restores_the_newest(tmp_path):
    with Snapshots(tmp_path, keep_last=2) as snapshots:
        for seed in range(6):
            snapshots.save(seed, small_state(seed))
        snapshots.wait()
        restored = snapshots.restore(empty_state())
        assert restored.step == 5 and is_small_state(restored.values, 5)
        flip(tmp_path / "step-000000005" / "r00000.safetensors", 5000)
        restored = snapshots.restore(empty_state())
        assert restored.step == 4 and is_small_state(restored.values, 4)
        ((name, reason),) = restored.report.skipped
        assert name == "step-000000005" and "block 0" in reason and "(holds model/layer.0" in reason
