"""Streams of one machine, both ends in this process: order, sizes, a kernel that is full, a peer that left."""

from __future__ import annotations

import gc
import os
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.parallel import local_links, slots
from plait.parallel.local_links import LocalLinks
from plait.parallel.streams import SMALL_BYTES

TIMEOUT = timedelta(seconds=5)


def pair(timeout_s: float = 5.0) -> tuple[LocalLinks, LocalLinks]:
    """Coords 0 and 1, which have met."""
    zero, one = LocalLinks(0, timeout_s), LocalLinks(1, timeout_s)
    zero.learn(1, one.place), one.learn(0, zero.place)
    return zero, one


def wait(works: list[Any]) -> None:
    for work in works:
        work.wait(TIMEOUT)


class Elsewhere:
    """The other way: messages by tag."""

    def __init__(self) -> None:
        self.messages: dict[int, Tensor] = {}

    def receive(self, tag: int, result: Tensor) -> list[Any]:
        result.copy_(self.messages.pop(tag))
        return []


def received(links: LocalLinks, coord: int, tag: int, like: Tensor, elsewhere: Elsewhere | None = None) -> Tensor:
    result = torch.empty_like(like)
    wait(links.receive(coord, tag, [result], partial((elsewhere or Elsewhere()).receive, tag, result)))
    return result


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_frames_are_taken_by_tag_in_any_order(order):
    zero, one = pair()
    sent = [torch.full((size,), float(size)) for size in (1, 5, 20_000, 3)]  # the third lies in a slot
    for tag, tensor in enumerate(sent):
        assert zero.send(1, tag, [tensor])
        tensor += 1  # the caller's again
    for tag in order:
        assert torch.equal(received(one, 0, tag, sent[tag]), sent[tag] - 1)


def test_a_tag_serves_again_and_both_ways():
    zero, one = pair()
    for value in range(3):
        zero.send(1, 7, [torch.tensor([value])])
        zero.send(1, 7, [torch.tensor([value + 10])])
        one.send(0, 7, [torch.tensor([-value])])
        assert received(one, 0, 7, torch.tensor([0])).item() == value
        assert received(one, 0, 7, torch.tensor([0])).item() == value + 10
        assert received(zero, 1, 7, torch.tensor([0])).item() == -value


@pytest.mark.parametrize("early", [False, True])
def test_tensors_of_a_message_keep_their_bits(early):
    zero, one = pair()
    sent = [
        torch.tensor(1.5, dtype=torch.bfloat16), torch.empty(0, 3), torch.tensor([True, False, True]),
        torch.tensor([float("nan"), 2.0], dtype=torch.float64), torch.arange(30_000).reshape(3, -1),
    ]  # fmt: skip
    zero.send(1, 1, sent)
    zero.send(1, 2, [torch.tensor([9])])
    got = [torch.empty_like(tensor) for tensor in sent]
    if early:
        assert received(one, 0, 2, torch.tensor([0])).item() == 9
    wait(one.receive(0, 1, got, list))
    for mine, theirs in zip(sent, got, strict=True):
        assert mine.view(torch.uint8).equal(theirs.view(torch.uint8)) if mine.dim() else mine.item() == theirs.item()


@pytest.mark.parametrize("early", [False, True])
def test_a_send_never_waits_and_what_the_buffer_has_no_room_for_is_said_to_go_elsewhere(early):
    """Both ends send more than the kernel holds before either receives: neither blocks, nothing is lost or mixed."""
    ends, elsewhere = pair(), (Elsewhere(), Elsewhere())
    count, size = 400, SMALL_BYTES // 8
    for tag in range(count):
        for coord, links in enumerate(ends):
            message = torch.full((size,), tag + 100 * coord)
            if not links.send(1 - coord, tag, [message]):
                elsewhere[coord].messages[tag] = message
    for other in elsewhere:
        assert 0 < len(other.messages) < count and min(other.messages) >= 3  # a few always fit
    for tag in reversed(range(count)) if early else range(count):
        for coord, links in enumerate(ends):
            got = received(links, 1 - coord, tag, torch.empty(size, dtype=torch.int64), elsewhere[1 - coord])
            assert got.eq(tag + 100 * (1 - coord)).all()
    assert not any(other.messages for other in elsewhere)
    for coord, links in enumerate(ends):  # read, so that there is room again
        assert links.send(1 - coord, 0, [torch.ones(size)])


def test_large_messages_lie_in_slots_that_serve_again():
    zero, one = pair()
    for value in range(5):
        sent = torch.full((20_000,), value)
        assert zero.send(1, value, [sent, torch.tensor(value)])
        sent += 1  # the caller's again
        got = [torch.empty(20_000, dtype=torch.int64), torch.tensor(0)]
        wait(one.receive(0, value, got, list))
        assert got[0].eq(value).all() and got[1].item() == value
    assert len(zero.outward(1)._lender._slots) == 1


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int8, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.complex128],
    ids=str,
)
def test_large_messages_keep_their_bits(dtype):
    """Also beside tensors that are empty, of no dimension, or of a length that no alignment divides."""
    zero, one = pair()
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (17, 6000), dtype=torch.uint8)
    sent = [bits.view(dtype), torch.empty(3, 0), bits[0, :5].clone(), torch.tensor(1.5, dtype=torch.float64), bits]
    assert zero.send(1, 3, sent)
    got = [torch.empty_like(tensor) for tensor in sent]
    wait(one.receive(0, 3, got, list))
    for mine, theirs in zip(sent, got, strict=True):
        assert mine.reshape(-1).view(torch.uint8).equal(theirs.reshape(-1).view(torch.uint8))


def test_a_large_message_of_a_peer_that_left_is_read_whole():
    zero, one = pair()
    zero.send(1, 0, [torch.full((100_000,), 7.0)])
    del zero
    assert received(one, 0, 0, torch.ones(100_000)).eq(7).all()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        received(one, 0, 1, torch.ones(100_000))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 0, 2, 1)])
def test_no_slot_is_written_while_it_is_read_and_where_none_is_left_the_message_goes_elsewhere(order, monkeypatch):
    monkeypatch.setattr(slots, "MOST_SLOTS", 3)
    (zero, one), elsewhere = pair(), Elsewhere()
    for turn in range(3):
        for tag in range(4):
            message = torch.full((10_000,), float(10 * turn + tag))
            if not zero.send(1, tag, [message]):
                elsewhere.messages[tag] = message
        assert list(elsewhere.messages) == [3]
        for tag in order:
            assert received(one, 0, tag, torch.empty(10_000), elsewhere).eq(10 * turn + tag).all()
    assert len(zero.outward(1)._lender._slots) == 3


def test_slots_stay_below_their_bound_and_a_small_one_makes_way_for_a_larger(monkeypatch):
    monkeypatch.setattr(slots, "MOST_BYTES", 1 << 19)
    zero, one = pair()
    for size in (10_000, 30_000, 20_000, 60_000, 10_000, 100_000, 10_000):  # fp32, at most 400 kB
        assert zero.send(1, 0, [torch.full((size,), float(size))])
        assert received(one, 0, 0, torch.empty(size)).eq(size).all()
        assert zero.outward(1)._lender._total() <= 1 << 19
    assert not zero.send(1, 0, [torch.zeros(1 << 18)])


def test_a_kernel_that_gives_no_memory_is_said_once(monkeypatch, caplog):
    def refuse(*_: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "memfd_create", refuse)
    (zero, one), elsewhere = pair(), Elsewhere()
    for tag in range(3):
        elsewhere.messages[tag] = torch.full((10_000,), float(tag))
        assert not zero.send(1, tag, [elsewhere.messages[tag]])
        assert received(one, 0, tag, torch.empty(10_000), elsewhere).eq(tag).all()
    assert [record.message for record in caplog.records] == [
        "no shared memory of 40960 bytes, messages by gloo: [Errno 12] Cannot allocate memory"
    ]


def test_a_large_message_of_another_size_is_an_error():
    zero, one = pair()
    zero.send(1, 0, [torch.ones(10_000)])
    with pytest.raises(RuntimeError, match="the message has 40000 bytes, not 48000"):
        received(one, 0, 0, torch.ones(12_000))
    zero.send(1, 1, [torch.ones(10_000)])
    with pytest.raises(RuntimeError, match="the message has 40000 bytes, not 4"):
        received(one, 0, 1, torch.ones(1))
    zero.send(1, 2, [torch.ones(1)])
    with pytest.raises(RuntimeError, match="the message has 4 bytes, not 40000"):
        received(one, 0, 2, torch.ones(10_000))


def test_slots_leave_nothing_behind():
    """Neither descriptors nor maps nor files, once both ends are gone."""

    def maps() -> list[str]:
        with open("/proc/self/maps", encoding="ascii") as lines:
            return [line for line in lines if "plait" in line]

    gc.collect()
    files, opened = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    zero, one = pair()
    zero.send(1, 0, [torch.ones(10_000)])
    received(one, 0, 0, torch.ones(10_000))
    assert len(maps()) == 2  # each end's
    del zero, one
    gc.collect()
    assert not maps() and len(os.listdir("/proc/self/fd")) == opened and set(os.listdir("/dev/shm")) == files


@pytest.mark.parametrize("asked", [4 << 20, 212_992, 50_000])
def test_what_is_counted_as_room_is_what_the_kernel_has(monkeypatch, asked):
    """Frames of every size fill half of the buffer: the kernel takes each of them whole and at once."""
    monkeypatch.setattr(local_links, "_BUFFER_BYTES", asked)
    zero, one = pair(timeout_s=0.1)
    for first, size in enumerate((1, 100, 4096, 5000, SMALL_BYTES // 4, SMALL_BYTES)):
        if size > asked // 8:
            continue
        tag = first << 20
        while zero.send(1, tag, [torch.full((size,), 1, dtype=torch.uint8)]):
            tag += 1
        assert tag - (first << 20) >= 2
        for taken in range(first << 20, tag):
            assert received(one, 0, taken, torch.empty(size, dtype=torch.uint8)).all()


def test_another_size_is_an_error_not_other_data():
    zero, one = pair()
    for tag, early in ((0, False), (1, True)):
        zero.send(1, tag, [torch.ones(3)])
        zero.send(1, 5, [torch.ones(1)])
        if early:
            received(one, 0, 5, torch.ones(1))
        with pytest.raises(RuntimeError, match="the message has 12 bytes, not 16"):
            received(one, 0, tag, torch.ones(4))


def test_who_waits_for_a_peer_that_says_nothing_is_told_in_time():
    zero, one = pair(timeout_s=0.1)
    with pytest.raises(RuntimeError, match="timed out: not connected within 0.1 s"):
        received(one, 0, 0, torch.ones(1))
    zero.send(1, 1, [torch.ones(1)])
    with pytest.raises(RuntimeError, match="timed out after 0.1 s"):
        received(one, 0, 0, torch.ones(1))
    assert received(one, 0, 1, torch.ones(1)).item() == 1  # what came meanwhile is kept
    with pytest.raises(RuntimeError, match="timed out: coord 1 has read nothing for 0.1 s"):
        for _ in range(100_000):  # of which each that finds no room says so
            zero.send(1, 2, [torch.ones(1 << 15)])


def test_a_peer_that_left_is_told_at_once_but_what_it_sent_arrives():
    zero, one = pair()
    zero.send(1, 0, [torch.ones(1)])
    del zero
    assert received(one, 0, 0, torch.ones(1)).item() == 1
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        received(one, 0, 1, torch.ones(1))
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        one.send(0, 0, [torch.ones(1)])


def test_a_sender_learns_that_its_peer_left():
    zero, one = pair()
    zero.send(1, 0, [torch.ones(1)])
    received(one, 0, 0, torch.ones(1))
    del one
    with pytest.raises(RuntimeError, match="Connection closed by coord 1"):
        zero.send(1, 1, [torch.ones(1)])


def test_ranks_of_other_machines_and_messages_too_large_go_another_way(monkeypatch):
    zero, one = pair()
    assert zero.carries(1, 1) and zero.carries(1, zero.limit_bytes)
    assert not zero.carries(1, zero.limit_bytes + 1) and not zero.carries(1, 0) and not zero.carries(2, 1)
    monkeypatch.setattr(local_links, "machine", lambda limit_bytes: "elsewhere")
    far = LocalLinks(2, 1.0)
    zero.learn(2, far.place), zero.learn(3, None)
    assert not zero.carries(2, 1) and not zero.carries(3, 1)
