"""Channels on real gloo ranks: messages stay apart; two ends that disagree both get an error, never wrong data."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch

from plait.parallel import local_links
from plait.parallel.mesh import Mesh
from plait.parallel.p2p import MAX_TENSORS, P2P, Channel, ChannelError, ChannelTimeout, TensorSpec
from tests.ranks import run_ranks

FORWARD = Channel(0, "F", 0, 1, 0)
SECOND = Channel(2, "F", 0, 1, 4)  # the next chunk between the same two ranks
BACK = Channel(1, "G", 1, 0, 1)


def connect(timeout_s: float = 20.0, num_microbatches: int = 8) -> P2P:
    mesh = Mesh.create(pp=2, timeout_s=timeout_s)
    return P2P(mesh, [FORWARD, SECOND, BACK], num_microbatches)


def exchange(
    p2p: P2P, rank: int, sent: torch.Tensor, expected: TensorSpec, microbatch: tuple[int, int] = (0, 0)
) -> str:
    """One message from rank 0 to 1; returns "ok" or what was raised."""
    try:
        if rank == 0:
            spec = TensorSpec(tuple(sent.shape), sent.dtype)
            p2p.send(FORWARD, microbatch[0], [sent], (spec,)).wait()
        else:
            p2p.announce(FORWARD, microbatch[1], (expected,))
            (got,) = p2p.receive(FORWARD, microbatch[1]).wait()
            assert torch.equal(got, sent)
    except ChannelError as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


# what goes out, what is expected, what both errors must say (None: it works)
CASES = {
    "equal": ((4, 3), torch.float32, (4, 3), torch.float32, None),
    "bf16 read as fp16": ((4, 3), torch.bfloat16, (4, 3), torch.float16, ("bfloat16[4, 3]", "float16[4, 3]")),
    "receive too small": ((100,), torch.float32, (10,), torch.float32, ("float32[100]", "float32[10]")),
    "receive too large": ((10,), torch.float32, (100,), torch.float32, ("float32[10]", "float32[100]")),
    "same bytes, other shape": ((4, 3), torch.float32, (3, 4), torch.float32, ("float32[4, 3]", "float32[3, 4]")),
    "int64 as float64": ((5,), torch.int64, (5,), torch.float64, ("int64[5]", "float64[5]")),
    "bf16": ((4, 3), torch.bfloat16, (4, 3), torch.bfloat16, None),
    "fp16": ((4, 3), torch.float16, (4, 3), torch.float16, None),
    "int64": ((7,), torch.int64, (7,), torch.int64, None),
    "bool": ((7,), torch.bool, (7,), torch.bool, None),
    "empty": ((0, 3), torch.float32, (0, 3), torch.float32, None),
    "0-dim": ((), torch.float64, (), torch.float64, None),
}


def run_case(rank: int, name: str) -> str:
    shape, dtype, want_shape, want_dtype, _ = CASES[name]
    sent = (torch.arange(torch.Size(shape).numel()) % 2).to(dtype).reshape(shape)
    return exchange(connect(), rank, sent, TensorSpec(want_shape, want_dtype))


@pytest.mark.parametrize("name", CASES)
def test_both_ends_say_what_they_have_or_the_message_arrives(name):
    """Cases 4 and 12: reinterpreted bits, SIGABRT for a small receive, an unwritten tail for a large one."""
    answers = run_ranks(2, run_case, name)
    words = CASES[name][4]
    if words is None:
        assert answers == ["ok", "ok"]
        return
    for rank, answer in enumerate(answers):
        assert answer.startswith("ChannelError: rank"), answer
        assert f"action {('0SEND_F0', '1RECV_F0')[rank]}" in answer and f"peer rank {1 - rank}" in answer
        assert all(word in answer for word in words), answer


def run_other_microbatch(rank: int) -> str:
    return exchange(connect(), rank, torch.ones(3), TensorSpec((3,), torch.float32), (1, 0))


def test_a_channel_that_starts_with_another_microbatch_is_an_error_on_both_ends():
    for answer in run_ranks(2, run_other_microbatch):
        assert "ChannelError" in answer and "micro-batch 1: float32[3]" in answer and "micro-batch 0" in answer


def run_swapped_entries(rank: int) -> str:
    """A message of two tensors, whose ends think of them in different order."""
    p2p = connect()
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.float64)]
    specs = tuple(TensorSpec(tuple(t.shape), t.dtype) for t in tensors)
    with pytest.raises(ChannelError) as caught:
        if rank == 0:
            p2p.send(FORWARD, 0, tensors, specs)
        else:
            p2p.announce(FORWARD, 0, specs[::-1])
            p2p.receive(FORWARD, 0).wait()
    return str(caught.value)


def test_swapped_entries_of_a_message_are_an_error_on_both_ends():
    for text in run_ranks(2, run_swapped_entries):
        assert "micro-batch 0: float32[3], float64[2]" in text and "micro-batch 0: float64[2], float32[3]" in text


def run_crossed(rank: int) -> None:
    """Messages of two channels and two micro-batches, waited for in the opposite order of sending."""
    p2p = connect()
    spec = (TensorSpec((5,), torch.float32),)
    value = lambda channel, m: torch.full((5,), 10.0 * channel.stage + m)  # noqa: E731
    if rank == 0:
        order = [(FORWARD, 0), (SECOND, 0), (FORWARD, 1), (SECOND, 1)]
        handles = [p2p.send(channel, m, [value(channel, m)], spec) for channel, m in order]
        for handle in handles:
            handle.wait()
    else:
        for channel in (FORWARD, SECOND):
            p2p.announce(channel, 0, spec)
        receipts = {(c, m): p2p.receive(c, m) for c, m in [(FORWARD, 0), (SECOND, 0), (FORWARD, 1), (SECOND, 1)]}
        for channel, m in [(SECOND, 1), (FORWARD, 1), (SECOND, 0), (FORWARD, 0)]:
            (got,) = receipts[channel, m].wait()
            assert torch.equal(got, value(channel, m)), (channel, m, got)


def test_messages_between_the_same_ranks_never_swap():
    """Case 4: two chunks between the same two ranks (p = 2 interleaved)."""
    run_ranks(2, run_crossed)


def run_posted_in_other_order(rank: int) -> None:
    """After the channels are verified gloo's tags keep messages apart even if the ends post in different orders."""
    p2p = connect()
    spec = (TensorSpec((4,), torch.float32),)
    for step in range(2):
        if rank == 0:
            sent = [p2p.send(c, step, [torch.full((4,), float(c.stage))], spec) for c in (FORWARD, SECOND)]
            for handle in sent:
                handle.wait()
        else:
            for channel in (FORWARD, SECOND):
                p2p.announce(channel, 0, spec)
            order = (FORWARD, SECOND) if step == 0 else (SECOND, FORWARD)
            receipts = [(channel, p2p.receive(channel, step)) for channel in order]
            for channel, receipt in receipts:
                assert torch.equal(receipt.wait()[0], torch.full((4,), float(channel.stage)))


def test_posting_in_another_order_gives_the_right_data():
    run_ranks(2, run_posted_in_other_order)


def run_batch(rank: int) -> None:
    """One message of a 4 MB and a 4 B tensor; the big one is read after the wait."""
    p2p = connect()
    big, small = torch.arange(1 << 20, dtype=torch.float32), torch.tensor([7], dtype=torch.int32)
    specs = (TensorSpec((1 << 20,), torch.float32), TensorSpec((1,), torch.int32))
    for m in range(3):
        if rank == 0:
            p2p.send(FORWARD, m, [big + m, small + m], specs).wait()
        else:
            p2p.announce(FORWARD, 0, specs)
            receipt = p2p.receive(FORWARD, m)
            got_big, got_small = receipt.wait()
            assert torch.equal(got_big, big + m) and torch.equal(got_small, small + m)
            receipt.release()


def test_every_tensor_of_a_message_is_waited_for():
    """Case 6: only the last of a batch was waited for."""
    run_ranks(2, run_batch)


def run_both_ways(rank: int) -> None:
    """Both ranks send first and receive after: gloo is a rendezvous, so blocking sends would hang."""
    p2p = connect()
    spec = (TensorSpec((1000,), torch.float32),)
    mine, theirs = (FORWARD, BACK) if rank == 0 else (BACK, FORWARD)
    for m in range(8):
        p2p.announce(theirs, 0, spec)
        handle = p2p.send(mine, m, [torch.full((1000,), float(rank))], spec)
        receipt = p2p.receive(theirs, m)
        (got,) = receipt.wait()
        assert got[0].item() == 1 - rank
        receipt.release()
        handle.wait()
    assert p2p.num_buffers == 1


def test_sends_do_not_wait_for_the_peer_and_buffers_are_reused():
    run_ranks(2, run_both_ways)


def run_new_shape(rank: int) -> str:
    """Shapes change on both ends, then on one end only."""
    p2p = connect(timeout_s=3.0)
    for rows in (4, 2, 4):
        assert exchange(p2p, rank, torch.ones(rows), TensorSpec((rows,), torch.float32)) == "ok"
    return exchange(p2p, rank, torch.ones(6), TensorSpec((4 if rank else 6,), torch.float32))


def test_a_shape_that_changes_on_one_end_only_is_an_error_on_both():
    for rank, answer in enumerate(run_ranks(2, run_new_shape)):
        gone = rank == 1 and "Connection closed" in answer  # rank 0 has given up before
        assert (answer.startswith("ChannelTimeout") or gone) and f"peer rank {1 - rank}" in answer, answer


def run_silent_peer(rank: int) -> tuple[str, bool]:
    """Rank 0 never sends its second message."""
    p2p = connect(timeout_s=1.0)
    spec = TensorSpec((3,), torch.float32)
    assert exchange(p2p, rank, torch.ones(3), spec) == "ok"
    if rank == 0:
        p2p._store.wait(["heard"], timedelta(seconds=30))
        return "", True
    started = time.monotonic()
    with pytest.raises(ChannelTimeout) as caught:
        p2p.receive(FORWARD, 1).wait()
    p2p._store.set("heard", "")
    assert isinstance(caught.value, TimeoutError)
    return str(caught.value), time.monotonic() - started < 15


def test_a_silent_peer_is_named_within_the_timeout():
    text, soon = run_ranks(2, run_silent_peer)[1]
    assert "rank 1 action 1RECV_F1" in text and "peer rank 0" in text and soon


def run_two_pipelines(rank: int) -> float:
    """dp = 2, pp = 2, each pipeline with its own length: headers and messages stay inside the pipeline."""
    mesh = Mesh.create(dp=2, pp=2)
    axis, row = mesh.axis("pp"), mesh.coords()["dp"]
    p2p = P2P(mesh, [FORWARD], 4)
    spec = (TensorSpec((3 + row, 2), torch.float32),)
    for m in range(4):
        if axis.coord == 0:
            p2p.send(FORWARD, m, [torch.full((3 + row, 2), float(row))], spec).wait()
        else:
            p2p.announce(FORWARD, 0, spec)
            (got,) = p2p.receive(FORWARD, m).wait()
            assert got.shape == (3 + row, 2) and got.mean().item() == row
    return float(row)


def test_two_pipelines_with_different_lengths():
    """Case 10: shapes exchanged without the group of the pipeline."""
    assert run_ranks(4, run_two_pipelines) == [0.0, 0.0, 1.0, 1.0]


def run_limits(rank: int) -> None:
    mesh = Mesh.create(pp=2)
    with pytest.raises(ValueError, match="exceed the tags of gloo"):
        P2P(mesh, [Channel(0, "F", 0, 1, 1 << 20)], 1 << 10)
    p2p = P2P(mesh, [FORWARD], 1)
    with pytest.raises(ValueError, match=f"{MAX_TENSORS} at most"):
        p2p.announce(FORWARD, 0, (TensorSpec((1,), torch.float32),) * (MAX_TENSORS + 1))


def test_limits_are_said():
    run_ranks(2, run_limits)


def run_far_apart(rank: int) -> None:
    """Ranks that say they are on two machines: gloo carries what the sockets would."""
    local_links.machine = lambda limit_bytes: f"machine {rank}"  # type: ignore[assignment]
    p2p, spec = connect(), (TensorSpec((5,), torch.float32),)
    for m in range(3):
        if rank == 0:
            p2p.send(FORWARD, m, [torch.full((5,), float(m))], spec).wait()
        else:
            p2p.announce(FORWARD, 0, spec)
            assert p2p.receive(FORWARD, m).wait()[0].eq(m).all()
    assert p2p.local is not None and not p2p.local._outward and not p2p.local._inward


def test_ranks_of_two_machines_use_gloo():
    run_ranks(2, run_far_apart)


def run_without_room(rank: int) -> None:
    """A socket whose buffer has room for a few messages: gloo carries the others, and frames say so."""
    local_links._BUFFER_BYTES = 20_000
    p2p, specs = connect(num_microbatches=24), (TensorSpec((64,), torch.float32), TensorSpec((2,), torch.int64))
    out, back = (FORWARD, BACK) if rank == 0 else (BACK, FORWARD)
    p2p.announce(back, 0, specs)
    p2p.send(out, 0, [torch.zeros(64), torch.zeros(2, dtype=torch.int64)], specs).wait()
    p2p.receive(back, 0).wait()
    torch.distributed.barrier()
    sent = [p2p.send(out, m, [torch.full((64,), m + 0.5), torch.tensor([m, rank])], specs) for m in range(24)]
    by_gloo = [bool(one._works) for one in sent]
    assert not any(by_gloo[:2]) and all(by_gloo[16:])
    torch.distributed.barrier()  # until here nobody reads
    receipts = [p2p.receive(back, m) for m in range(24)]
    for m in reversed(range(24)):
        values, place = receipts[m].wait()
        assert values.eq(m + 0.5).all() and place.tolist() == [m, 1 - rank]
    for one in sent:
        one.wait()


def test_what_a_socket_has_no_room_for_comes_by_gloo():
    run_ranks(2, run_without_room)
