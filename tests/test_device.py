"""Device tensors: the order of calls between streams, held by a recording stand-in (this machine has no card).

Host tensors play the device's: what is copied is checked too, not only that it was asked for.
"""

from __future__ import annotations

import threading

import pytest
import torch

from plait.ckpt.device import SMALL_BYTES, DeviceCopies, DevicePiece, buckets_of, bytes_of, runs_of


class Recorder:
    """Streams that run at once and write down what was asked of them. `gate`: holds back `wait`, as a slow card."""

    def __init__(self):
        self.calls, self.events, self.gate = [], 0, threading.Event()
        self.gate.set()

    def begin(self):
        self.calls.append("copy stream waits for compute")

    def gather(self, parts):
        self.calls.append(f"gather {len(parts)}")
        return torch.cat(list(parts))

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
        pieces.append(DevicePiece(tensor, 0, tensor.numel(), at, owner))
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
        "copy stream waits for compute",
        "gather 2",  # small ones side by side are one copy
        "copy 120",
        f"copy {4 * SMALL_BYTES}",
        "record 1",
        "copy 14",
        "record 2",
        "compute waits for 2",  # nobody owns it: may be overwritten by the next kernel
        "compute waits for 1",  # the hook before the step
    ]
    assert filled == [(0, 120), (120, 4 * SMALL_BYTES), (120 + 4 * SMALL_BYTES, 14)]
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
