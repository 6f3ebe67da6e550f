"""Device tensors: copied bit for bit whatever the card does first (tests/fake_gpu.py; this machine has none)."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from plait.ckpt import Snapshots, device, read_plan
from plait.ckpt.box import full_box
from plait.ckpt.device import DeviceCopies, DevicePiece, buckets_of, bytes_of, range_of, runs_of
from plait.ckpt.read_plan import Move, Target
from plait.ckpt.reader import SnapshotReader
from plait.ckpt.streams import CudaStreams
from plait.ckpt.windows import CudaLane, HostLane, Windows
from tests.fake_gpu import POISON, Card

# Which streams run as soon as they can: what is missing between two streams shows in one of these.
ORDERS = [(), ("compute",), ("copy",), ("compute", "copy")]
GUARD = object()
LAYOUTS = {
    "small": torch.randn(7),
    "large": torch.randn(5000),
    "half": torch.randn(33).bfloat16(),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "with gaps": torch.randn(40)[::2],
    "expanded": torch.randn(3, 1).expand(3, 5),
    "conj": torch.randn(6, dtype=torch.complex64).conj(),
    "neg": torch.randn(6, dtype=torch.complex64).conj().imag,
    "wide": torch.randn(4, 3, dtype=torch.complex128).t(),
    "fp8": torch.randn(4, 6).to(torch.float8_e4m3fn).t(),
    "bool": torch.tensor([[2, 0, 1], [0, 1, 255]], dtype=torch.uint8).view(torch.bool).t(),
    "fp4": torch.arange(24, dtype=torch.uint8).view(4, 6).view(torch.float4_e2m1fn_x2).t(),
    "scalar": torch.tensor(3),
}


@pytest.fixture(params=ORDERS, ids=str)
def card(request, monkeypatch):
    monkeypatch.setattr(device, "SMALL_BYTES", 1000)
    monkeypatch.setattr(device, "BUCKET_BYTES", 4000)
    with Card(request.param).install(monkeypatch) as card:
        yield card


@pytest.fixture
def slow(monkeypatch):
    """A card on which nothing runs before it is waited for."""
    monkeypatch.setattr(device, "BUCKET_BYTES", 4000)
    with Card().install(monkeypatch) as card:
        yield card


def raw_of(values):
    return bytes(bytes_of(values, 0, values.numel()).tolist())


class Save:
    """The copies of some tensors of a card, side by side in a file; checks each range when it is said to be there."""

    def __init__(self, card, tensors, owners, wanted):
        self.pieces, at = [], 0
        for tensor, owner in zip(tensors, owners, strict=True):
            self.pieces.append(DevicePiece(tensor, 0, tensor.numel(), at, owner, f"tensor {len(self.pieces)}"))
            at += self.pieces[-1].num_bytes
        self.memory = torch.full((at,), POISON, dtype=torch.uint8)
        card.lock_pages(self.memory)
        self.wanted, self.filled, self.wrong, self.failed = b"".join(wanted), [], [], []
        self.streams = CudaStreams(torch.device("cuda:1"))
        self.copies, self.card = DeviceCopies(self._fill, self.failed.append), card

    def start(self):
        """Nothing is waited for before `close` or `arrive`."""
        self.card.gate.clear()
        self.copies.start(self.pieces, lambda device: self.streams, lambda at, size: self.memory[at : at + size])
        self.pieces = []
        return self

    def _fill(self, at, size):
        self.filled.append((at, size))
        if bytes(self.memory[at : at + size].tolist()) != self.wanted[at : at + size]:
            self.wrong.append(at)

    def arrive(self):
        self.card.gate.set()
        self.copies._thread.join()

    def close(self):
        self.card.gate.set()
        self.copies.close()
        assert sum(size for _, size in self.filled) == len(self.wanted) or self.failed
        return self


def on_card(card, values, owners):
    """A save of tensors that the card has yet to compute."""
    tensors = [card.tensor(value) for value in values]
    return tensors, Save(card, tensors, owners, [raw_of(value) for value in values])


def scribble(tensor):
    """A write without a word to torch: a kernel of somebody else's."""
    start, size = range_of(tensor)
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    at = start - raw.data_ptr()
    raw[at : at + size].fill_(0x77)


@pytest.mark.parametrize("owner", [None, GUARD])
def test_what_is_saved_is_the_state_at_the_call(card, owner):
    """Computed late, overwritten at once (guarded ones by the step), and let go of: all before the card began."""
    values = [*LAYOUTS.values(), torch.randn(11)]
    tensors, save = on_card(card, values, [*[owner] * len(LAYOUTS), None])
    save.start()
    save.copies.hold_writes(GUARD)
    for tensor in tensors:
        scribble(tensor)
    del tensor, tensors
    save.close()
    assert save.wrong == save.failed == [] and save.copies.torn is None
    assert (card.syncs, card.pageable) == (0, 0), "the training thread waited for the card"


def test_memory_that_is_let_go_of_is_not_reused_before_it_was_copied(card):
    values = [torch.randn(3000), torch.randn(20), torch.randn(2500)]
    tensors, save = on_card(card, values, [GUARD, GUARD, GUARD])
    save.start()
    del tensors
    torch.cat([card.tensor(torch.zeros(10))] * 2)
    save.arrive()
    assert save.wrong == [] and save.copies.torn is None
    assert card.live["compute"] == 0, "kept after it was copied"
    save.close()


def test_a_write_without_a_word_is_found_by_samples_and_named(card):
    """A compiled or fused step runs no hook and moves no version: the samples must see it."""
    tensors, save = on_card(card, [torch.zeros(1000), torch.zeros(3), torch.zeros(4, 5).t()], [GUARD] * 3)
    save.start()
    for tensor in tensors[1:]:
        scribble(tensor)
    save.close()
    overtaken = card.first == ("compute",)
    assert (bool(save.wrong), save.copies.torn) == (overtaken, "tensor 1" if overtaken else None)


def test_only_the_next_write_waits_and_waits_once(slow):
    """Each hook waited for each bucket, at every step until the file was written."""
    tensors, save = on_card(slow, [torch.randn(500) for _ in range(5)], [None, *[GUARD] * 4])
    slow.waits.clear()
    save.start()
    assert [name for name, _ in slow.waits] == ["copy", "compute"], "the copies for the state, all for what none owns"
    slow.waits.clear()
    save.copies.hold_writes(GUARD)
    assert len(slow.waits) == 1
    save.copies.hold_writes(GUARD, [(tensors[1].data_ptr() + 8, 100)])
    assert len(slow.waits) == 2 and slow.waits[0][1].at > slow.waits[1][1].at, "for its own bucket"
    save.copies.hold_writes(object(), None)
    save.copies.hold_writes(GUARD, [(save.memory.data_ptr(), 100)])
    assert len(slow.waits) == 2 and save.filled == []
    save.arrive()
    save.copies.hold_writes(GUARD)
    assert len(slow.waits) == 2 and save.close().wrong == []


def test_a_write_to_a_strided_tensor_waits_for_its_copy(slow):
    (strided,), save = on_card(slow, [torch.randn(30, 20).t()], [GUARD])
    save.start()
    slow.waits.clear()
    save.copies.hold_writes(GUARD, [range_of(strided)])
    assert len(slow.waits) == 1 and save.close().wrong == []


def test_what_nobody_owns_is_copied_first_whatever_its_place(slow):
    tensors, save = on_card(slow, [torch.randn(10), torch.randn(20), torch.randn(7)], [GUARD, GUARD, None])
    save.start().close()
    assert save.filled == [(120, 28), (0, 120)], "small ones side by side are one copy"


def test_memory_of_the_card_for_gathered_tensors_is_that_of_a_bucket(card):
    """All that was gathered stayed on the card until the file was written: as much as the small tensors have."""
    values = [torch.randn(100) for _ in range(200)] + [torch.randn(30, 20).t() for _ in range(20)]
    tensors, save = on_card(card, values, [GUARD, None] * 110)
    card.peak = dict(card.live)
    save.start().close()
    assert save.wrong == [] and card.peak["copy"] <= 2 * 4000, "never more than a bucket, and samples"
    assert card.peak["compute"] <= sum(value.nbytes for value in values) + 110 * 64
    assert card.live["copy"] == 0
    del tensors


def test_a_step_inside_a_graph_capture_neither_waits_nor_breaks_it(card):
    """Waiting for an event of outside ends a capture; so does the wait of another thread that is not relaxed."""
    tensors, save = on_card(card, [torch.randn(3000)], [GUARD])
    save.start()
    card.capturing = card.compute
    save.copies.hold_writes(GUARD)  # the optimizer's hook
    save.close()
    assert save.failed == save.wrong == [] and card.broken_captures == 0
    again = Save(card, tensors, [None], [raw_of(torch.zeros(3000))])
    with pytest.raises(RuntimeError, match=r"a CUDA graph is captured on cuda:1: call save\(\) before or after"):
        again.start()
    assert card.capturing is card.compute and again.filled == []


def test_no_thread_makes_a_context_on_a_device_that_is_not_its_own(card):
    """Each rank's waiting thread was on device 0: a context of 0.5 GB of each rank of the node on one card."""
    _, save = on_card(card, [torch.randn(30), torch.randn(4000)], [GUARD, None])
    save.start().close()
    assert card.contexts == {1} and save.wrong == []


class Fails(CudaStreams):
    """Whose n-th event cannot be recorded."""

    def __init__(self, at):
        super().__init__(torch.device("cuda:1"))
        self.left = at

    def record(self):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("CUDA out of memory")
        return super().record()


def test_a_failed_start_leaves_no_copy_on_its_way_into_the_pool(slow):
    """The pool went back while the card still wrote into it: into the next snapshot, or into freed memory."""
    _, save = on_card(slow, [torch.ones(1000), torch.ones(9)], [None, GUARD])
    save.streams = Fails(2)
    with pytest.raises(RuntimeError, match="out of memory"):
        save.start()
    assert bytes(save.memory[:4].tolist()) == raw_of(torch.ones(1)), "waited for"
    save.memory.fill_(1)
    slow.finish()
    assert int(save.memory.max()) == 1


def test_a_card_that_fails_in_the_middle_is_waited_for_before_the_pool_goes_back(slow):
    _, save = on_card(slow, [torch.ones(4), torch.ones(4)], [1, 2])

    def fill(at, size):
        raise RuntimeError("the first bucket")

    save.copies._fill = fill
    save.start().close()
    assert save.failed == ["copying from the device failed: the first bucket"]
    save.memory.fill_(1)
    slow.finish()
    assert int(save.memory.max()) == 1


def test_a_failing_card_ends_the_save_with_its_words(slow, monkeypatch):
    _, save = on_card(slow, [torch.randn(5)], [None])
    text = "CUDA error: an illegal memory access was encountered"
    monkeypatch.setattr(save.streams, "wait", lambda event: (_ for _ in ()).throw(RuntimeError(text)))
    save.start().close()
    assert save.failed == [f"copying from the device failed: {text}"]


def test_buckets_have_one_owner_and_runs_have_no_gaps():
    tensors = [torch.zeros(3), torch.zeros(3), torch.zeros(3)]
    pieces = [
        DevicePiece(t, 0, 3, 12 * i, owner) for i, (t, owner) in enumerate(zip(tensors, [1, 1, 2], strict=True))
    ]
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

    def copy(self, target, *held):
        self.late.append((target, held))

    def record(self):
        late, self.late = self.late, []
        return late

    def wait(self, event):
        self.calls.append("wait")
        for target, held in event:
            HostLane().copy(target, *held)


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


@pytest.mark.parametrize(
    "target",
    [torch.zeros(60, 1024, dtype=torch.int32).t(), torch.zeros(1024, 60, dtype=torch.float64), torch.zeros(60, 1024)],
    ids=["strided", "cast", "contiguous"],
)
def test_a_restore_onto_a_card_passes_page_locked_memory_only(card, tmp_path, monkeypatch, target):
    """A strided target, another dtype: torch put these in order in host memory of its own first."""
    monkeypatch.setattr(read_plan, "WINDOW_BYTES", 64 << 10)
    tensor = torch.arange(60 << 10, dtype=torch.int32).reshape(target.shape)
    there = card.tensor(target)
    plain = there.is_contiguous() and there.dtype == torch.float32
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, {"w": tensor.float() if plain else tensor}).wait()
    reader = SnapshotReader(tmp_path / "step-000000001")
    reader._windows = partial(Windows, lambda device: CudaLane(torch.device("cuda:1")))
    monkeypatch.setattr(read_plan, "_move", partial(not_direct, read_plan._move))
    reader.read([Target(reader.table.entry("w"), there, full_box(tuple(target.shape)), None)])
    assert card.pageable == 0
    card.finish()
    assert card.value(there).equal(tensor.to(target.dtype))


def test_a_shard_with_gaps_is_put_in_order_on_the_card(card):
    lane = CudaLane(torch.device("cuda:1"))
    held, there = lane.memory(4 * 60), card.tensor(torch.zeros(6, 4))
    held.copy_(torch.arange(60.0).view(torch.uint8))
    lane.copy(there, held, torch.float32, (10, 1))
    lane.wait(lane.record())
    held.zero_()
    card.finish()
    assert card.value(there).equal(torch.arange(60.0).view(6, 10)[:, :4]) and card.pageable == 0


def not_direct(plain, *args):
    """The card's tensors are CPU tensors: none may be read into."""
    return plain(*args)._replace(direct=False)
