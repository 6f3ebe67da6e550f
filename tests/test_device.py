"""Device tensors: the order of calls between streams, held by a recording stand-in (this machine has no card).

Host tensors play the device's: what is copied is checked too, not only that it was asked for.
"""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from plait.ckpt import Snapshots, read_plan
from plait.ckpt.box import full_box
from plait.ckpt.device import BUCKET_BYTES, SMALL_BYTES, DeviceCopies, DevicePiece, buckets_of, bytes_of, runs_of
from plait.ckpt.read_plan import Move, Target
from plait.ckpt.reader import SnapshotReader
from plait.ckpt.windows import Windows


class Recorder:
    """Streams that run at once and write down what was asked of them. `gate`: holds back `wait`, as a slow card."""

    def __init__(self):
        self.calls, self.events, self.gate = [], 0, threading.Event()
        self.gate.set()

    def begin(self):
        self.calls.append("copy stream waits for compute")

    def gather(self, parts, now=False):
        self.calls.append(f"sample {len(parts)}" if now else f"gather {len(parts)}")
        return torch.cat(list(parts))

    def differ(self, a, b):
        return a != b

    def read(self, flags):
        return flags.tolist()

    def copy(self, target, source):
        self.calls.append(f"copy {source.numel()}")
        target.copy_(source)

    def record(self):
        self.events += 1
        self.calls.append(f"record {self.events}")
        return self.events

    def hold(self, event):
        self.calls.append(f"compute waits for {event}")

    def wait(self, event):
        self.gate.wait(30)
        if event == "broken":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def laid_out(tensors, owners):
    """Pieces side by side in a file."""
    pieces, at = [], 0
    for tensor, owner in zip(tensors, owners, strict=True):
        pieces.append(DevicePiece(tensor, 0, tensor.numel(), at, owner, f"tensor {len(pieces)}"))
        at += pieces[-1].num_bytes
    return pieces, torch.zeros(at, dtype=torch.uint8)


def started(pieces, memory, streams, fill=None, fail=None):
    copies = DeviceCopies(fill or (lambda at, size: None), fail or (lambda text: None))
    copies.start(pieces, lambda device: streams, lambda at, size: memory[at : at + size])
    return copies


def test_copies_wait_for_compute_and_only_the_next_write_waits_for_copies():
    guard = object()
    tensors = [torch.randn(10), torch.randn(20), torch.randn(SMALL_BYTES), torch.randn(7).bfloat16()]
    pieces, memory = laid_out(tensors, [guard, guard, guard, None])
    streams, filled = Recorder(), []
    copies = started(pieces, memory, streams, lambda at, size: filled.append((at, size)))
    copies.hold_writes(guard)
    copies.close()
    assert streams.calls == [
        "sample 3",  # on the compute stream, before it gets anything else
        "copy stream waits for compute",
        "copy 14",  # nobody owns it, so all later work waits for it: it goes first, whatever its place in the file
        "record 1",
        "gather 2",  # small ones side by side are one copy
        "copy 120",
        f"copy {4 * SMALL_BYTES}",
        "gather 3",  # the samples again
        "record 2",
        "compute waits for 1",
        "compute waits for 2",  # the hook before the step
    ]
    assert filled == [(120 + 4 * SMALL_BYTES, 14), (0, 120), (120, 4 * SMALL_BYTES)]
    assert copies.torn is None
    assert memory.tolist() == torch.cat([bytes_of(t, 0, t.numel()) for t in tensors]).tolist()


def test_nothing_waits_on_the_host_before_the_copies_have_arrived():
    pieces, memory = laid_out([torch.randn(5)], [object()])
    streams, filled = Recorder(), []
    streams.gate.clear()
    copies = started(pieces, memory, streams, lambda at, size: filled.append(at))
    copies.hold_writes(None)
    assert filled == []  # start and fence came back although the card is not done
    streams.gate.set()
    copies.close()
    assert filled == [0]


class Late(Recorder):
    """A card that copies only once it is waited for."""

    def __init__(self, fails_at=None):
        super().__init__()
        self.late, self.fails_at = [], fails_at

    def copy(self, target, source):
        if self.fails_at is not None and len(self.late) == self.fails_at:
            raise RuntimeError("CUDA out of memory")
        self.late.append((target, source))

    def differ(self, a, b):
        return a, b

    def read(self, flags):
        return (flags[0] != flags[1]).tolist()

    def wait(self, event):
        super().wait(event)
        for target, source in self.late:
            target.copy_(source)
        self.late = []


def test_a_failed_start_leaves_no_copy_on_its_way_into_the_pool():
    """The pool went back while the card still wrote into it: into the next snapshot, or into freed memory."""
    pieces, memory = laid_out([torch.ones(SMALL_BYTES), torch.ones(SMALL_BYTES)], [None, None])
    streams = Late(fails_at=1)
    with pytest.raises(RuntimeError, match="out of memory"):
        started(pieces, memory, streams)
    assert streams.late == [] and memory[: 4 * SMALL_BYTES].any()


def test_a_card_that_fails_in_the_middle_is_waited_for_before_the_pool_goes_back():
    pieces, memory = laid_out([torch.ones(4), torch.ones(4)], [1, 2])
    streams, failed = Late(), []

    def fill(at, size):
        raise RuntimeError("the first bucket")

    copies = started(pieces, memory, streams, fill, failed.append)
    copies.close()
    assert failed == ["copying from the device failed: the first bucket"] and streams.late == []


def test_a_write_without_a_word_is_found_by_samples_and_named():
    """A compiled or fused step runs no hook and moves no version: the samples must see it."""
    tensors = [torch.zeros(1000), torch.zeros(3), torch.zeros(500)]
    pieces, memory = laid_out(tensors, [1, 1, 1])
    streams = Recorder()
    plain = streams.copy

    def copy(target, source):
        plain(target, source)
        tensors[1].fill_(7.0)

    streams.copy = copy
    copies = started(pieces, memory, streams)
    copies.close()
    assert copies.torn == "tensor 1"


def test_a_write_hook_waits_for_its_own_tensors_only():
    """All copies of an optimizer were waited for before its first bucket was updated."""
    big = BUCKET_BYTES // 4
    tensors = [torch.empty(big), torch.empty(big)]
    pieces, memory = laid_out(tensors, [1, 1])
    streams = Recorder()
    copies = started(pieces, memory, streams)
    copies.hold_writes(1, [(tensors[1].data_ptr() + 8, 100)])
    assert [call for call in streams.calls if call.startswith("compute")] == ["compute waits for 2"]
    copies.hold_writes(2, None)
    copies.hold_writes(1, [(tensors[0].data_ptr(), 4)])
    copies.close()
    assert [call for call in streams.calls if call.startswith("compute")] == [
        "compute waits for 2",
        "compute waits for 1",
    ]


def test_a_failing_card_ends_the_save_with_its_words():
    pieces, memory = laid_out([torch.randn(5)], [None])
    streams, failed = Recorder(), []
    streams.record = lambda: "broken"
    started(pieces, memory, streams, fail=failed.append).close()
    assert failed == ["copying from the device failed: CUDA error: an illegal memory access was encountered"]


def test_buckets_have_one_owner_and_runs_have_no_gaps():
    tensors = [torch.zeros(3), torch.zeros(3), torch.zeros(3)]
    pieces, _ = laid_out(tensors, [1, 1, 2])
    assert [len(bucket) for bucket in buckets_of(pieces)] == [2, 1]
    apart = pieces[1]._replace(file_offset=100)
    assert [len(run) for run in runs_of([pieces[0], apart])] == [1, 1]


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(12.0).reshape(3, 4).t(), torch.tensor([1 + 2j]).conj().imag, torch.arange(6)[::2], torch.tensor(3)],
)
def test_bytes_of_any_layout(tensor):
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    assert bytes_of(tensor, 0, tensor.numel()).tolist() == plain.reshape(-1).view(torch.uint8).tolist()


class LateLane:
    """A way to a device whose copies arrive only when they are waited for; writes down what it is asked."""

    def __init__(self, calls):
        self.calls, self.late = calls, []

    def memory(self, num_bytes):
        self.calls.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def copy(self, target, source):
        self.late.append((target, source))

    def record(self):
        late, self.late = self.late, []
        return late

    def wait(self, event):
        self.calls.append("wait")
        for target, source in event:
            read_plan.copy_bits(target, source)


def restored_through(tmp_path, monkeypatch, tensor, target):
    """Reads one tensor through windows of 64 KiB; returns what was asked of the device."""
    monkeypatch.setattr(read_plan, "WINDOW_BYTES", 64 << 10)
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, {"w": tensor}).wait()
    calls: list = []
    reader = SnapshotReader(tmp_path / "step-000000001")
    reader._windows = partial(Windows, lambda device: LateLane(calls))
    plain = reader._ranges
    reader._ranges = lambda key, requests: (calls.append("read"), plain(key, requests))
    reader.read([Target(reader.table.entry("w"), target, full_box(tuple(tensor.shape)), None)])
    return calls


def test_a_window_is_read_while_the_copies_of_the_other_one_run(tmp_path, monkeypatch):
    tensor = torch.arange(60 << 10, dtype=torch.int32).reshape(60, 1024)
    target = torch.zeros(1024, 60, dtype=torch.int32).t()
    calls = restored_through(tmp_path, monkeypatch, tensor, target)
    size = 64 << 10
    assert calls == [size, "read", size, "read", "wait", "read", "wait", "read", "wait", "wait"]
    assert target.equal(tensor)


@pytest.mark.parametrize("shape", [(1, 70000), (3, 7, 4000), (300, 1, 300)])
def test_a_tensor_of_any_size_takes_two_windows_and_no_more(tmp_path, monkeypatch, shape):
    """A restore onto a device, or to another dtype, took as much host memory as its largest tensor."""
    tensor = torch.randn(shape)
    target = torch.zeros(shape, dtype=torch.float64)
    calls = restored_through(tmp_path, monkeypatch, tensor, target)
    sizes = [call for call in calls if isinstance(call, int)]
    assert max(sizes) <= 64 << 10 and calls.count("read") >= 4 and target.equal(tensor.double())


def test_copies_have_arrived_when_a_damaged_block_ends_the_reading(tmp_path, monkeypatch):
    monkeypatch.setattr(read_plan, "WINDOW_BYTES", 64 << 10)
    lane = LateLane([])
    target = torch.zeros(1000, 40).t()
    move = Move(0, 160_000, target, torch.float32, (1000, 1), False)
    with pytest.raises(OSError, match="gone"), Windows(lambda device: lane) as through:
        through.fill(list(read_plan.windows([move]))[0], lambda requests: None)
        through.fill([move], lambda requests: (_ for _ in ()).throw(OSError("gone")))
    assert lane.calls.count("wait") == 1
