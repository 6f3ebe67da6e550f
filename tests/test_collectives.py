"""Collectives: values and gradients against one process, every dtype, bits, order, refusals.

Cases: ranks 2 (one message each way), 3 (uneven pieces), 4 (two rounds when large); sizes around the switch to two
rounds; dims that are not the first; tensors with strides.
"""

from __future__ import annotations

import pytest
import torch

from plait.parallel import collectives, direct
from plait.parallel.collectives import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    copy_to,
    gather_seq,
    reduce_from,
    reduce_scatter,
    reduce_scatter_seq,
    split_seq,
)
from plait.parallel.mesh import Axis, Mesh
from tests.ranks import RankError, run_ranks

pytestmark = pytest.mark.ranks
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


def part_of(rank, shape, dtype):
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 8).to(dtype)


def in_order(parts, dtype):
    """The sum that the collectives promise: in coordinate order, 16 bits in fp32 and rounded once."""
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(dtype)


def body_values(rank, n):
    axis = Mesh.create(tp=n).axis("tp")
    for dtype in DTYPES:
        for numel in (1, 7, direct.TWO_ROUNDS_BYTES // 8 + 5):
            parts = [part_of(r, (numel * n, 2), dtype) for r in range(n)]
            total = in_order(parts, dtype)
            assert torch.equal(all_reduce(parts[rank].clone(), axis), total), (dtype, numel)
            assert torch.equal(reduce_scatter(parts[rank], axis), total[rank * numel : (rank + 1) * numel]), (
                dtype,
                numel,
            )
            assert torch.equal(all_gather(parts[rank], axis), torch.cat(parts))
            assert torch.equal(all_gather(parts[rank], axis, 1), torch.cat(parts, 1))
            top = torch.stack(parts).amax(0)
            assert torch.equal(all_reduce(parts[rank].clone(), axis, "max"), top)
            got = broadcast(parts[rank].clone().t(), axis, n - 1)
            assert torch.equal(got, parts[n - 1].t())
    scalar = all_reduce(torch.tensor(float(rank)), axis, "min")
    assert scalar.shape == () and float(scalar) == 0.0
    assert torch.equal(all_gather(torch.tensor(rank), axis), torch.arange(n))
    assert all_reduce(torch.empty(0, 3), axis).shape == (0, 3)
    assert reduce_scatter(torch.empty(0, 3), axis).shape == (0, 3)
    barrier(axis)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_values_and_bits(n):
    run_ranks(n, body_values, n)


INF, NAN = float("inf"), float("nan")


def body_not_finite(rank, n):
    """Columns: inf on one rank; inf and -inf; NaN on one rank; what overflows as a sum only; plain numbers."""
    axis = Mesh.create(tp=n).axis("tp")
    first, last = rank == 0, rank == n - 1
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for repeats in (1, direct.TWO_ROUNDS_BYTES // (10 * n) + 1):  # one round and two
            large = torch.finfo(dtype).max
            row = [INF if first else 1.0, INF if first else -INF if last else 0.0, NAN if last else 1.0, large, 1.0]
            mine = torch.tensor(row, dtype=dtype).repeat(n * repeats, 1)
            whole = torch.tensor([INF, NAN, NAN, INF, float(n)], dtype=dtype).expand(n * repeats, 5)
            same = dict(rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(all_reduce(mine.clone(), axis), whole, **same)
            torch.testing.assert_close(reduce_scatter(mine, axis), whole[:repeats], **same)
            top = torch.tensor([INF, INF, NAN, large, 1.0], dtype=dtype).expand(n * repeats, 5)
            torch.testing.assert_close(all_reduce(mine.clone(), axis, "max"), top, **same)
            torch.testing.assert_close(all_gather(mine, axis)[: n * repeats, 0].isinf().all(), torch.tensor(True))


@pytest.mark.parametrize("n", [2, 4])
def test_inf_and_nan_come_out_as_such_on_every_rank(n):
    """Case 12: inf in an all-reduce, also where only the sum is too large for its dtype; never a plain number."""
    run_ranks(n, body_not_finite, n)


def body_in_flight(rank, n):
    """Many at once on one axis, of different sizes, with others started in between, and results in place."""
    axis = Mesh.create(dp=n).axis("dp")
    sizes = [3, 40_000, 1, 9_001, 20_000]
    flat = [part_of(rank + 10 * i, (size,), torch.float32) for i, size in enumerate(sizes)]
    expected = [
        in_order([part_of(r + 10 * i, (s,), torch.float32) for r in range(n)], torch.float32)
        for i, s in enumerate(sizes)
    ]
    handles = [all_reduce(t, axis, async_op=True) for t in flat]
    assert torch.equal(all_reduce(torch.ones(2), axis), torch.full((2,), float(n)))
    whole = torch.zeros(n * 5)
    mine = whole[rank * 5 : rank * 5 + 5].fill_(rank)
    gather = all_gather(mine, axis, out=whole, async_op=True)
    for handle, tensor, want in zip(handles, flat, expected, strict=True):
        assert handle.wait() is tensor and handle.wait() is tensor
        assert torch.equal(tensor, want)
    assert torch.equal(gather.wait(), torch.arange(n).repeat_interleave(5).float())
    shard = whole[rank * 5 : rank * 5 + 5]
    assert reduce_scatter(whole, axis, out=shard, async_op=True).wait() is shard
    assert torch.equal(shard, torch.full((5,), float(rank * n)))


@pytest.mark.parametrize("n", [2, 4])
def test_many_in_flight_keep_apart(n):
    run_ranks(n, body_in_flight, n)


def body_gradients(rank, n):
    """sum(w * f(x)) with different x and w per rank: gradients by hand."""
    axis = Mesh.create(tp=n).axis("tp")
    torch.manual_seed(0)
    xs, ws = torch.randn(n, 2, 4 * n, 3, dtype=torch.float64), torch.randn(n, 2, 4 * n, 3, dtype=torch.float64)
    wide = torch.randn(n, 2, 4 * n * n, 3, dtype=torch.float64)
    mine = slice(rank * 4, rank * 4 + 4)
    lane = slice(rank * 4 * n, (rank + 1) * 4 * n)
    table = [
        (lambda x: copy_to(x, axis), xs[rank], ws[rank], ws.sum(0)),
        (lambda x: reduce_from(x, axis), xs.sum(0), ws[rank], ws[rank]),
        (lambda x: split_seq(x, axis, 1), xs[rank][:, mine], ws[rank][:, mine],
         torch.cat([ws[r][:, r * 4 : r * 4 + 4] for r in range(n)], 1)),
        (lambda x: gather_seq(x, axis, 1), torch.cat(list(xs), 1), wide[rank], wide.sum(0)[:, lane]),
        (lambda x: reduce_scatter_seq(x, axis, 1), xs.sum(0)[:, mine], ws[rank][:, mine],
         torch.cat([ws[r][:, r * 4 : r * 4 + 4] for r in range(n)], 1)),
    ]  # fmt: skip
    for index, (function, value, weight, gradient) in enumerate(table):
        x = xs[rank].clone().requires_grad_()
        y = function(x)
        torch.testing.assert_close(y, value, rtol=1e-12, atol=1e-12, msg=f"value of {index}")
        # a gradient with strides, as a transposed consumer gives it
        (y.transpose(0, 1) * weight.transpose(0, 1)).sum().backward()
        torch.testing.assert_close(x.grad, gradient, rtol=1e-12, atol=1e-12, msg=f"gradient of {index}")


@pytest.mark.parametrize("n", [2, 4])
def test_gradients(n):
    run_ranks(n, body_gradients, n)


def body_shared_gradient(rank):
    """The incoming gradient may be held by others: backward must not write into it."""
    axis = Mesh.create(tp=2).axis("tp")
    x = torch.ones(3, requires_grad=True)
    grad = torch.full((3,), 2.0)
    copy_to(x, axis).backward(grad)
    assert torch.equal(grad, torch.full((3,), 2.0)) and torch.equal(x.grad, torch.full((3,), 4.0))


def test_backward_leaves_the_incoming_gradient_alone():
    run_ranks(2, body_shared_gradient)


def body_refusals(rank):
    axis = Mesh.create(tp=2).axis("tp")
    with pytest.raises(ValueError, match=r"dim 1 of shape \(3, 7\) is not divisible by axis tp of size 2"):
        split_seq(torch.zeros(3, 7), axis, 1)
    with pytest.raises(ValueError, match="op='mean' must be one of"):
        all_reduce(torch.zeros(1), axis, "mean")
    with pytest.raises(ValueError, match="contiguous"):
        all_reduce(torch.zeros(2, 3).t(), axis)
    with pytest.raises(ValueError, match=r"dim 0 \(got dim=1\)"):
        all_gather(torch.zeros(2), axis, 1, out=torch.zeros(4))
    with pytest.raises(ValueError, match="source=2 is not a coord"):
        broadcast(torch.zeros(1), axis, 2)


def test_refusals():
    run_ranks(2, body_refusals)


def body_timeout(rank):
    axis = Mesh.create(tp=2, timeout_s=0.5).axis("tp")
    if rank == 0:
        with pytest.raises(RuntimeError, match="all_reduce sum on axis tp: rank 0 waited for rank 1"):
            all_reduce(torch.zeros(1), axis)


def test_a_silent_peer_is_named_after_the_timeout():
    run_ranks(2, body_timeout)


def body_dead_peer(rank):
    axis = Mesh.create(tp=2).axis("tp")
    all_reduce(torch.zeros(1), axis)
    if rank == 1:
        import os

        os._exit(3)
    with pytest.raises(RuntimeError, match="axis tp: rank 0 waited for rank 1"):
        all_reduce(torch.zeros(1), axis)


def test_a_dead_peer_is_named():
    run_ranks(2, body_dead_peer, expect_dead=(1,))


def test_an_axis_of_one_calls_nothing():
    """No process group exists here: any call would fail."""
    axis = Axis.single()
    x = torch.ones(2, 3, requires_grad=True)
    for y in (copy_to(x, axis), reduce_from(x, axis), gather_seq(x, axis, 1), split_seq(x, axis, 0)):
        assert y is x
    assert reduce_scatter_seq(x, axis, 0) is x
    t = torch.ones(3)
    assert all_reduce(t, axis) is t and all_reduce(t, axis, async_op=True).wait() is t
    assert all_gather(t, axis) is t and reduce_scatter(t, axis) is t and broadcast(t, axis) is t
    barrier(axis)


def test_the_harness_sees_a_wrong_sum():
    """The oracle of this file, broken once: a rank that disagrees is noticed."""
    with pytest.raises(RankError, match="AssertionError"):
        run_ranks(2, body_wrong)


def body_wrong(rank):
    axis = Mesh.create(tp=2).axis("tp")
    assert torch.equal(collectives.all_reduce(torch.ones(1) * rank, axis), torch.zeros(1))
