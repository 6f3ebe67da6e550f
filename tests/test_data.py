"""Data parallelism: gradients, norm and update of a grid against one process.

Models here are plain torch modules, so that autograd's own gradients pass through the hook; where a case needs what
layers do (partials, replicas, tied copies) it sets the placement and adds the gradient by hand. Tolerances: 1e-12 in
fp64; fp32 and 16 bits are compared bit for bit with the run that has the same order of sums.
"""

from __future__ import annotations

import math
import os
import signal
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from plait.kernels import adamw_ref
from plait.parallel import sharded_grads, wire
from plait.parallel.buckets import ALIGN, fill, overlap, round_up
from plait.parallel.data import DataParallel, ShardedAdamW, clip_factor, decays
from plait.parallel.gradients import accumulate, add_use
from plait.parallel.mesh import Axis, Mesh
from plait.parallel.placement import Placement
from tests.ranks import run_ranks

WIDTHS = (3, 7, 65, 1)  # odd, above ALIGN, and biases of 1 element
LR, DECAY, MAX_NORM = 0.05, 0.1, 0.5


def model_of(dtype=torch.float64):
    torch.manual_seed(1)
    layers = []
    for a, b in zip(WIDTHS, WIDTHS[1:], strict=False):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def batch_of(step, rows=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(rows, WIDTHS[0], generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.rand(rows, 1, generator=generator, dtype=torch.float64).to(dtype)
    return x, weight


def loss_of(model, x, weight, divisor):
    return (model(x).pow(2) * weight).sum() / divisor


def train_alone(steps, dtype=torch.float64):
    """One process, no buckets: autograd, a norm over all gradients, and the oracle of AdamW."""
    model = model_of(dtype)
    moments = {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in model.named_parameters()}
    norms = []
    for step in range(steps):
        x, weight = batch_of(step, dtype=dtype)
        model.zero_grad()
        loss_of(model, x, weight, weight.sum()).backward()
        norm = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm()
        norms.append(float(norm))
        for name, p in model.named_parameters():
            with torch.no_grad():
                new, *moments[name], _ = adamw_ref(
                    p, p.grad, *moments[name], step=step + 1, lr=LR, beta1=0.9, beta2=0.95, eps=1e-8,
                    weight_decay=DECAY if p.dim() > 1 else 0.0, grad_scale=clip_factor(norm, MAX_NORM),
                )  # fmt: skip
                p.copy_(new)
    return [p.detach().clone() for p in model.parameters()], norms


def train_parallel(dp, optimizer, model, steps, microbatches, dtype=torch.float64, first=0):
    """The same steps by `DataParallel`: rows dealt to dp coords and micro-batches, the loss over the global count."""
    norms = []
    for step in range(first, first + steps):
        x, weight = batch_of(step, dtype=dtype)
        divisor = weight.sum()
        dp.zero_grad()
        parts = list(
            zip(x.chunk(dp.axis.size * microbatches), weight.chunk(dp.axis.size * microbatches), strict=True)
        )
        for m in range(microbatches):
            if m == microbatches - 1:
                dp.open(0)
            loss_of(model, *parts[dp.axis.coord * microbatches + m], divisor).backward()
        dp.reduce(0)
        dp.finish()
        norm = dp.grad_norm()
        norms.append(float(norm))
        optimizer.step(LR, DECAY, clip_factor(norm, MAX_NORM))
    return norms


def body_train(rank, zero, bucket_bytes, steps, microbatches, dtype):
    mesh = Mesh.create(dp=dist.get_world_size())
    model = model_of(dtype)
    dp = DataParallel({0: model}, mesh, zero=zero, bucket_bytes=bucket_bytes)
    optimizer = ShardedAdamW(dp)
    norms = train_parallel(dp, optimizer, model, steps, microbatches, dtype)
    assert all(p.grad is None for p in model.parameters())
    return [p.detach().clone() for p in model.parameters()], norms


def close(a, b, rtol=1e-12):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=rtol)


@pytest.mark.ranks
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize(("n", "bucket_bytes", "microbatches"), [(2, 1, 1), (2, 1 << 20, 2), (4, 1000, 2), (1, 1, 4)])
def test_parity_with_one_process(n, bucket_bytes, microbatches, zero):
    weights, norms = train_alone(3)
    results = run_ranks(n, body_train, zero, bucket_bytes, 3, microbatches, torch.float64)
    for got, got_norms in results:
        close(got, weights)
        assert got_norms == pytest.approx(norms, rel=1e-12)


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("n", [2, 4])
def test_zero1_equals_zero0_bit_for_bit(n, dtype):
    """Case 36: precision x ZeRO; also the same run twice, and all ranks alike."""
    runs = [run_ranks(n, body_train, zero, 1000, 4, 2, dtype) for zero in (0, 1, 1)]
    first = runs[0][0]
    for run in runs:
        for weights, norms in run:
            assert norms == first[1]
            assert all(torch.equal(a, b) for a, b in zip(weights, first[0], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first[0], model_of(dtype).parameters(), strict=True))


@pytest.mark.ranks
def test_bf16_keeps_fp32_masters_that_move_below_a_bf16_step():
    """A learning rate too small for bf16 still adds up in the master weights."""
    master, start = run_ranks(2, body_master)[0]
    moved = (master - start).abs()
    assert float(moved.max()) > 0 and float((moved / start.abs().clamp(min=1e-3)).max()) < 2**-9


def body_master(rank):
    model = nn.Linear(16, 16, bias=False).bfloat16()
    nn.init.constant_(model.weight, 0.5)
    dp = DataParallel({0: model}, Mesh.create(dp=2), zero=1)
    optimizer = ShardedAdamW(dp)
    piece = next(iter(optimizer.pieces()))
    start = piece.master.clone()
    for _ in range(3):
        dp.zero_grad()
        dp.open(0)
        model(torch.ones(1, 16, dtype=torch.bfloat16)).sum().backward()
        dp.reduce(0)
        dp.finish()
        optimizer.step(1e-4)
    assert bool((model.weight == 0.5).all())
    return piece.master.clone(), start


# ---- what is sent, and when --------------------------------------------------------------------------------------


class Log:
    """Counts the sums that buckets start, and keeps what happened in order."""

    def __init__(self):
        self.events = []
        self.dtypes = set()
        for name in ("all_reduce", "reduce_scatter", "all_gather"):
            original = getattr(wire, name)

            def logged(tensor, axis, *args, _name=name, _original=original, **kwargs):
                self.events.append((_name, axis.name, tensor.numel()))
                self.dtypes.add(tensor.dtype)
                return _original(tensor, axis, *args, **kwargs)

            setattr(wire, name, logged)


def body_accumulate(rank, zero):
    log = Log()
    model = model_of()
    dp = DataParallel({0: model}, Mesh.create(dp=2), zero=zero)
    assert len(dp.buckets) == 1
    for m in range(3):
        x, weight = batch_of(m)
        if m == 2:
            dp.open(0)
        loss_of(model, x[rank::2], weight[rank::2], 1.0).backward()
        assert len(log.events) == (1 if m == 2 else 0)  # started by itself, inside the last backward
    dp.reduce(0)
    dp.finish()
    assert len(log.events) == 1
    start, stop = dp.buckets[0].owned
    return dp.buckets[0].grads[start:stop].clone()


@pytest.mark.ranks
@pytest.mark.parametrize("zero", [0, 1])
def test_accumulation_reduces_exactly_once(zero):
    """Case 32: three micro-batches, one message, nothing lost."""
    model = model_of()
    dp = DataParallel({0: model}, Mesh.single())
    for m in range(3):
        loss_of(model, *batch_of(m), 1.0).backward()
    want = dp.buckets[0].grads
    got = run_ranks(2, body_accumulate, zero)
    got = torch.cat(got) if zero else got[0]
    torch.testing.assert_close(got[: want.numel()], want, rtol=1e-12, atol=1e-12)


def body_overlap(rank):
    log = Log()
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(4)])
    for index, layer in enumerate(model):
        layer.weight.register_hook(lambda grad, i=index: log.events.append(("gradient", i)))
    dp = DataParallel({0: model}, Mesh.create(dp=2), bucket_bytes=1)
    dp.open(0)
    model(torch.ones(2, 16)).sum().backward()
    kinds = [event[0] for event in log.events]
    assert kinds == ["gradient", "all_reduce"] * 4, log.events
    assert [event[1] for event in log.events if event[0] == "gradient"] == [3, 2, 1, 0]
    dp.reduce(0)
    assert len(log.events) == 8
    dp.finish()


@pytest.mark.ranks
def test_reductions_start_while_backward_runs():
    run_ranks(2, body_overlap)


def body_order(rank):
    """Gradients arrive in another order on each rank; the messages keep theirs, and one that never comes is sent."""
    log = Log()
    params = [nn.Parameter(torch.zeros(64 * (i + 1))) for i in range(5)]
    dp = DataParallel({0: nn.ParameterList(params)}, Mesh.create(dp=2), bucket_bytes=1)
    dp.open(0)
    for index in [(4, 2, 3, 0), (0, 3, 2, 4)][rank]:
        accumulate(params[index], torch.full_like(params[index], float(rank + 1)))
    assert len(log.events) == 3  # 4, 3, 2; 1 has no gradient in this micro-batch and holds up 0
    dp.reduce(0)
    dp.finish()
    assert [event[2] for event in log.events] == [round_up(64 * (i + 1), 2 * ALIGN) for i in (4, 3, 2, 1, 0)]
    for index, param in enumerate(params):
        assert torch.equal(param.main_grad, torch.full_like(param, 0.0 if index == 1 else 3.0))


@pytest.mark.ranks
def test_messages_start_in_one_order_on_all_ranks():
    run_ranks(2, body_order)


# ---- ZeRO-2 ------------------------------------------------------------------------------------------------------


def body_sharded_grads(rank, microbatches):
    """Gradients take their share of the bytes and a few buffers, which later steps use again."""
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)])
    dp = DataParallel({0: model}, Mesh.create(dp=2), zero=2, bucket_bytes=4 * 64 * 64)
    assert len(dp.buckets) == 6
    kept = sum(bucket.grads.numel() for bucket in dp.buckets)
    assert kept == sum(p.numel() for p in model.parameters()) // 2
    counts = []
    for step in range(3):
        dp.zero_grad()
        for m in range(microbatches):
            generator = torch.Generator().manual_seed(8 * step + 2 * m + rank)
            model(torch.randn(2, 64, generator=generator)).pow(2).sum().backward()
            assert all(p.grad is None and p.main_grad is None for p in model.parameters())
        dp.open(0)
        dp.reduce(0)
        dp.finish()
        assert [bucket.passes for bucket in dp.buckets] == [microbatches] * 6
        counts.append(dp._shards.num_buffers)
    # one that fills, and those in flight; the number does not grow with buckets, micro-batches or steps
    assert counts == [counts[0]] * 3 and counts[0] <= 1 + sharded_grads.MAX_IN_FLIGHT
    return torch.cat([bucket.grads for bucket in dp.buckets])


@pytest.mark.ranks
@pytest.mark.parametrize("microbatches", [1, 3])
def test_zero2_keeps_a_share_of_the_gradients_and_a_few_buffers(microbatches):
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)])
    first, again = (run_ranks(2, body_sharded_grads, microbatches) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b) and a.numel() == sum(p.numel() for p in model.parameters()) // 2


def body_missing_gradient(rank):
    """Parameter c gets no gradient; a its second before b its first, as where I of one comes before W of another."""
    params = [nn.Parameter(torch.zeros(8, 8)) for _ in range(3)]
    dp = DataParallel({0: nn.ParameterDict(dict(zip("abc", params, strict=True)))}, Mesh.create(dp=2), zero=2)
    for index in (0, 0, 1, 1):
        accumulate(params[index], torch.full((8, 8), float(rank + 1)))
    dp.reduce(0)
    dp.finish()
    (bucket,) = dp.buckets
    with pytest.raises(RuntimeError, match="after its bucket was complete"):
        accumulate(params[0], torch.ones(8, 8))
    return bucket.grads.clone()


@pytest.mark.ranks
def test_zero2_takes_gradients_in_any_order_and_none():
    flat = torch.cat(run_ranks(2, body_missing_gradient))
    assert sorted(flat.tolist()) == [0.0] * (flat.numel() - 128) + [6.0] * 128


def body_sharded_order(rank):
    """Matrices of three sizes get their gradients in opposite orders on the two ranks, twice."""
    log = Log()
    params = [nn.Parameter(torch.zeros(16 * (i + 1), 8)) for i in range(3)]
    dp = DataParallel({0: nn.ParameterList(params)}, Mesh.create(dp=2), zero=2, bucket_bytes=1)
    for _ in range(2):
        for index in [(2, 1, 0), (0, 1, 2)][rank]:
            accumulate(params[index], torch.full_like(params[index], float(rank + 1)))
    dp.reduce(0)
    dp.finish()
    return [event[2] for event in log.events], [sorted(set(bucket.grads.tolist())) for bucket in dp.buckets]


@pytest.mark.ranks
def test_zero2_starts_its_sums_in_one_order_on_all_ranks():
    (sizes, first), (again, second) = run_ranks(2, body_sharded_order)
    assert sizes == again == [384, 256, 128] * 2
    assert first == second == [[6.0]] * 3


# ---- how a sum travels -------------------------------------------------------------------------------------------


def body_two_nodes(rank, node_size, wire_dtype):
    mesh = Mesh.create(dp=4, node_size=node_size)
    log = Log()
    model = model_of(torch.float32)
    dp = DataParallel({0: model}, mesh, wire_dtype=wire_dtype)
    x, weight = batch_of(0, dtype=torch.float32)
    dp.open(0)
    loss_of(model, x[rank::4], weight[rank::4], 1.0).backward()
    dp.reduce(0)
    dp.finish()
    return log.events, log.dtypes, dp.buckets[0].grads.clone()


@pytest.mark.ranks
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_sum_over_two_nodes_crosses_them_with_a_part(wire_dtype):
    """Two nodes of two ranks: half of the bucket crosses, once per rank; equal bits everywhere; 16 bits travel."""
    flat = run_ranks(4, body_two_nodes, 0, None)[0][2]
    numel = flat.numel()
    for events, dtypes, grads in (results := run_ranks(4, body_two_nodes, 2, wire_dtype)):
        assert events == [
            ("reduce_scatter", "dp_in_node", numel),
            ("all_reduce", "dp_across_nodes", numel // 2),
            ("all_gather", "dp_in_node", numel // 2),
        ]
        assert torch.equal(grads, results[0][2]) and dtypes == {wire_dtype or torch.float32}
        # each part is rounded once on the way into a node's sum, and twice as a sum
        bound = 3 * 2**-8 if wire_dtype else 1e-6
        assert float((grads - flat).abs().max() / flat.abs().max()) < bound
    for events, dtypes, grads in (results := run_ranks(4, body_two_nodes, 0, wire_dtype)):
        assert events == [("all_reduce", "dp", numel)] and dtypes == {wire_dtype or torch.float32}
        assert torch.equal(grads, results[0][2])


def body_zero_on_nodes(rank, zero, node_size, wire_dtype=None):
    """Two steps on nodes; then what one more step sends, the shard's place, and the weights."""
    model = model_of()
    dp = DataParallel(
        {0: model}, Mesh.create(dp=4, node_size=node_size), zero=zero, bucket_bytes=1000, wire_dtype=wire_dtype
    )
    optimizer = ShardedAdamW(dp)
    norms = train_parallel(dp, optimizer, model, 2, 2)
    log = Log()
    norms += train_parallel(dp, optimizer, model, 1, 1, first=2)
    sent = Counter((kind, axis, numel) for kind, axis, numel in log.events)
    return sent, [bucket.shard for bucket in dp.buckets], norms, [p.detach().clone() for p in model.parameters()]


@pytest.mark.ranks
@pytest.mark.parametrize("zero", [1, 2])
def test_zero_over_two_nodes_scatters_and_gathers_node_by_node(zero):
    """Half of a bucket crosses the nodes, both ways; shards cover it once; the run is that of one process."""
    weights, norms = train_alone(3)
    results = run_ranks(4, body_zero_on_nodes, zero, 2)
    for sent, _, got_norms, got in results:
        sizes = Counter(numel for kind, axis, numel in sent.elements() if axis == "dp_in_node" and "scatter" in kind)
        assert sizes and sent == Counter(
            {
                key: count
                for numel, count in sizes.items()
                for key in (
                    ("reduce_scatter", "dp_in_node", numel),
                    ("reduce_scatter", "dp_across_nodes", numel // 2),
                    ("all_gather", "dp_across_nodes", numel // 4),
                    ("all_gather", "dp_in_node", numel // 2),
                )
            }
        )
        close(got, weights)
        assert got_norms == pytest.approx(norms, rel=1e-12) and got_norms == results[0][2]
        assert all(torch.equal(a, b) for a, b in zip(got, results[0][3], strict=True))
    for shards in zip(*(places for _, places, _, _ in results), strict=True):
        quarter = shards[0][1] - shards[0][0]
        assert [start // quarter for start, _ in shards] == [0, 2, 1, 3]  # in the order (place in the node, node)
        assert all(stop - start == quarter for start, stop in shards)
    flat = run_ranks(4, body_zero_on_nodes, zero, 0)
    assert {axis for sent, *_ in flat for _, axis, _ in sent} == {"dp"}
    narrow = run_ranks(4, body_zero_on_nodes, zero, 2, torch.bfloat16)
    assert narrow[0][2] != norms and narrow[0][2] == pytest.approx(norms, rel=2e-2)


@pytest.mark.ranks
def test_pieces_of_a_run_on_nodes_cover_every_element_once_and_restore_without_them():
    results = run_ranks(4, body_pieces, 1, 4, 2)
    state = merge(results)
    for weights in run_ranks(2, body_restore, state, 2, 1):
        for name, weight in weights.items():
            logical = state[name].shape[1]
            assert torch.equal(weight.reshape(-1)[:logical], results[0][2][name].reshape(-1)[:logical])


def body_not_finite(rank, zero):
    """Norms, the factor that clips, and whether all of it is one on all ranks, for gradients that one rank spoils."""
    found, mesh = [], Mesh.create(dp=4, node_size=2)
    for value, wire_dtype in ((math.inf, None), (math.nan, None), (math.inf, torch.bfloat16), (1e5, torch.float16)):
        layer = nn.Linear(8, 8, bias=False)
        dp = DataParallel({0: layer}, mesh, zero=zero, wire_dtype=wire_dtype)
        dp.open(0)
        accumulate(layer.weight, torch.full((8, 8), value if rank == 1 else 1.0))
        dp.reduce(0)
        dp.finish()
        norms = [dp.grad_norm(p) for p in (2.0, 1.0, math.inf)]
        found.append([float(norm) for norm in norms] + [float(clip_factor(norms[0], 1.0))])
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_gradient_that_is_not_finite_on_one_rank_is_seen_by_all(zero):
    """Case 12: inf and NaN in the sums of any stage, and 1e5, which that kind of 16 bits does not hold; never clipped
    to a number, which would go on as if nothing had been."""
    results = run_ranks(4, body_not_finite, zero)
    for row in zip(*results, strict=True):
        for norm in row:
            assert not any(math.isfinite(value) for value in norm), norm
            assert [math.isnan(value) for value in norm] == [math.isnan(value) for value in row[0]]


def body_nodes(rank):
    mesh = Mesh.create(dp=2, tp=2, node_size=2)
    assert mesh.across_nodes(mesh.axis("tp")) is None  # inside a node
    assert mesh.across_nodes(mesh.axis("dp")) is None  # one rank of it on each node
    uneven = replace(mesh, node_size=3)
    assert uneven.across_nodes(mesh.axis("dp", "tp")) is None  # three and one
    inside, across = mesh.across_nodes(mesh.axis("dp", "tp"))
    return inside.ranks, across.ranks


@pytest.mark.ranks
def test_an_axis_is_split_where_it_spans_nodes_evenly():
    assert run_ranks(4, body_nodes) == [
        ((0, 1), (0, 2)), ((0, 1), (1, 3)), ((2, 3), (0, 2)), ((2, 3), (1, 3)),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="node_size=-1"):
        Mesh.create(node_size=-1)
    with pytest.raises(ValueError, match="wire_dtype=torch.int8"):
        DataParallel({0: nn.Linear(2, 2)}, Mesh.single(), wire_dtype=torch.int8)


def body_measured(rank):
    return wire.measured_bucket_bytes(Mesh.create(dp=2).axis("dp"))


@pytest.mark.ranks
def test_a_bucket_size_from_measured_bandwidth_is_one_on_all_ranks():
    first, second = run_ranks(2, body_measured)
    assert first == second and 1 << 20 <= first <= 256 << 20 and first.bit_count() == 1


def test_a_bucket_is_as_large_as_makes_its_fixed_cost_the_share(monkeypatch):
    """1 ms a message and 1 GB/s: at 19 MB the fixed cost is a twentieth, at 3 MB a quarter; powers of two."""
    for fixed, per_byte, share, wanted in (
        (1e-3, 1e-9, 0.05, 32 << 20),
        (1e-3, 1e-9, 0.25, 4 << 20),
        (1e-3, 1e-10, 0.05, 256 << 20),
        (1e-9, 1e-9, 0.05, 1 << 20),
    ):
        monkeypatch.setattr(wire, "_seconds", lambda axis, device, n, a=fixed, b=per_byte: a + b * n)
        monkeypatch.setattr(wire, "all_reduce", lambda tensor, axis, op: tensor)
        assert wire.measured_bucket_bytes(Axis("dp", 2, 0, (0, 1)), share=share) == wanted
    with pytest.raises(ValueError, match="share=1.0"):
        wire.measured_bucket_bytes(Mesh.single().axis("dp"), share=1.0)


# ---- sums that come before dp ------------------------------------------------------------------------------------


class Tied(nn.Module):
    """One of two stages that hold a copy of one weight, and a weight of its own."""

    def __init__(self, last):
        super().__init__()
        torch.manual_seed(5)
        copy = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
        setattr(self, "head" if last else "embed", copy)
        self.own = nn.Parameter(torch.randn(3, 3, dtype=torch.float64) + last)

    @property
    def copy(self):
        return self.head if hasattr(self, "head") else self.embed


def tied_gradient(step, dp_coord, last):
    generator = torch.Generator().manual_seed(step * 4 + dp_coord * 2 + last)
    return torch.randn(5, 3, dtype=torch.float64, generator=generator)


def body_tied(rank, zero):
    mesh = Mesh.create(dp=2, pp=2)
    log = Log()
    last = mesh.axis("pp").coord
    stage = Tied(last)
    dp = DataParallel({last: stage}, mesh, zero=zero, tied={last: stage.copy})
    optimizer = ShardedAdamW(dp)
    norms = []
    for step in range(3):
        dp.zero_grad()
        dp.open(last)
        accumulate(stage.own, torch.full((3, 3), 0.25, dtype=torch.float64))
        accumulate(stage.copy, tied_gradient(step, mesh.axis("dp").coord, last))
        with pytest.raises(RuntimeError, match="before tie"):
            dp.reduce(last)
        dp.tie(last)
        dp.reduce(last)
        dp.finish()
        norms.append(float(dp.grad_norm()))
        optimizer.step(LR, DECAY)
    counts = Counter(event[1] for event in log.events if event[0] != "all_gather")  # not those of new weights
    assert counts == {"dp": 6, "tied": 3}
    primary = {shard.name: shard.primary for shard in dp.shards()}
    assert primary.get("head", False) is False and primary.get("embed", True) is True
    return stage.copy.detach().clone(), stage.own.detach().clone(), norms


@pytest.mark.ranks
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_tied_copies_stay_equal_on_a_grid(zero):
    """Cases 24 and 39: tie before dp; both copies bit-equal after each step and equal to one process."""
    embed, owns = Tied(0).embed.detach(), [Tied(0).own.detach(), Tied(1).own.detach()]
    moments, norms = [torch.zeros_like(embed)] * 2, []
    for step in range(3):
        grad = sum(tied_gradient(step, d, last) for d in (0, 1) for last in (0, 1))
        norms.append(float((grad.square().sum() + 2 * 9 * 0.5**2).sqrt()))
        embed, *moments, _ = adamw_ref(
            embed, grad, *moments, step=step + 1, lr=LR, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=DECAY
        )
    results = run_ranks(4, body_tied, zero)
    for rank, (copy, own, got_norms) in enumerate(results):
        assert torch.equal(copy, results[0][0])
        assert torch.equal(own, results[rank % 2][1]) and not torch.equal(own, owns[rank % 2])
        assert got_norms == pytest.approx(norms, rel=1e-12)
    close([results[0][0]], [embed])


class Replicated(nn.Module):
    """A split matrix, a norm weight whose gradient is whole or partial, and a KV weight on pairs of tp ranks."""

    def __init__(self, axis, partial):
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
        self.matrix.placement = Placement((2 * axis.size, 3), (2 * axis.coord, 0), (2, 3))
        self.norm = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.norm.placement = Placement.whole((3,), axis.ranks, ("tp",) if partial else ())
        half = axis.size // 2
        first = axis.coord // half * half
        self.kv = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
        self.kv.placement = Placement(
            (4, 3), (first // half * 2, 0), (2, 3), axis.ranks[first : first + half], ("tp",)
        )


def draw(name, dp, pp, tp):
    seed = sum(ord(c) for c in name) * 1000 + dp * 100 + pp * 10 + tp
    return torch.randn((3,) if name == "norm" else (2, 3), generator=torch.Generator().manual_seed(seed)).double()


def body_replicated(rank, sizes, partial, zero):
    mesh = Mesh.create(**sizes)
    dp, pp, tp = (mesh.axis(name).coord for name in ("dp", "pp", "tp"))
    stage = Replicated(mesh.axis("tp"), partial)
    data = DataParallel({pp: stage}, mesh, zero=zero)
    data.zero_grad()
    data.open(pp)
    accumulate(stage.matrix, draw("matrix", dp, pp, tp))
    accumulate(stage.norm, draw("norm", dp, pp, tp if partial else 0))
    accumulate(stage.kv, draw("kv", dp, pp, tp))
    data.tie(pp)
    data.reduce(pp)
    data.finish()
    norms = [float(data.grad_norm(p)) for p in (1.0, 2.0, float("inf"))]
    assert float(data.norm_squared()) == float(data.norm_power(2.0))
    optimizer = ShardedAdamW(data)
    optimizer.step(LR, DECAY)
    return {name: p.detach().clone() for name, p in stage.named_parameters()}, norms, mesh.coords()


@pytest.mark.ranks
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [{"pp": 2, "tp": 2}, {"dp": 2, "tp": 4}, {"dp": 2, "pp": 2, "tp": 2}],
    ids=lambda s: str(list(s.values())),
)
def test_the_norm_counts_every_parameter_once(sizes, partial, zero):
    """Cases 37, 39, 41, 42: over pp, tp replicas, KV replicas and dp shards; p = 1, 2, inf; replicas bit-equal."""
    size = {"dp": 1, "pp": 1, "tp": 1, **sizes}
    half = size["tp"] // 2
    grads = []
    for pp in range(size["pp"]):
        every = [(d, t) for d in range(size["dp"]) for t in range(size["tp"])]
        grads += [sum(draw("matrix", d, pp, t) for d in range(size["dp"])) for t in range(size["tp"])]
        grads.append(sum(draw("norm", d, pp, t) for d, t in every if partial or t == 0))
        grads += [sum(draw("kv", d, pp, t) for d, t in every if t // half == unit) for unit in (0, 1)]
    flat = torch.cat([g.reshape(-1) for g in grads])
    want = [float(flat.abs().sum()), float(flat.norm()), float(flat.abs().max())]
    results = run_ranks(size["dp"] * size["pp"] * size["tp"], body_replicated, sizes, partial, zero)
    for weights, norms, coords in results:
        assert norms == pytest.approx(want, rel=1e-12)
        for other, _, place in results:
            if coords.get("pp") == place.get("pp"):
                assert torch.equal(weights["norm"], other["norm"])
                if coords["tp"] // half == place["tp"] // half:
                    assert torch.equal(weights["kv"], other["kv"])


def body_tokens(rank, microbatches):
    """Tokens masked unevenly: 3, 11, 5 and 1 valid ones."""
    mesh = Mesh.create(dp=2)
    model, valid = model_of(), (3, 11, 5, 1)
    dp = DataParallel({0: model}, mesh)
    x, _ = batch_of(0, rows=64)
    rows = x.split(16)
    for part in range(rank * 2, rank * 2 + 2):
        inputs = rows[part][: valid[part]].chunk(microbatches)
        for m, some in enumerate(inputs):
            if part % 2 and m == len(inputs) - 1:
                dp.open(0)
            (model(some).pow(2).sum() / sum(valid)).backward()
    dp.reduce(0)
    dp.finish()
    return [p.main_grad.clone() for p in model.parameters()]


@pytest.mark.ranks
@pytest.mark.parametrize("microbatches", [1, 4])
def test_gradients_are_those_of_the_mean_over_all_tokens(microbatches):
    """Cases 26 and 27: nothing is scaled by micro-batches, ranks or local token counts."""
    model = model_of()
    rows = batch_of(0, rows=64)[0].split(16)
    valid = torch.cat([part[:count] for part, count in zip(rows, (3, 11, 5, 1), strict=True)])
    model(valid).pow(2).mean().backward()
    for grads in run_ranks(2, body_tokens, microbatches):
        close(grads, [p.grad for p in model.parameters()])


# ---- a step that fails -------------------------------------------------------------------------------------------


def body_dead_replica(rank):
    mesh = Mesh.create(dp=4, timeout_s=3)
    model = model_of()
    dp = DataParallel({0: model}, mesh)
    before = [p.detach().clone() for p in model.parameters()]
    x, weight = batch_of(0)
    loss_of(model, x[:2], weight[:2], 1.0).backward()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    dp.open(0)
    with pytest.raises(RuntimeError, match="axis dp: rank . waited for rank"):
        loss_of(model, x[2:], weight[2:], 1.0).backward()
        dp.reduce(0)
        dp.finish()
    with pytest.raises(RuntimeError, match="drop"):
        dp.zero_grad()
    dp.drop()
    assert all(not bool(bucket.grads.any()) for bucket in dp.buckets)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    # the survivors go on as a grid of their own
    line = replace(mesh, timeout_s=30).line("dp", (0, 1, 2))
    for bucket in dp.buckets:
        bucket.axis = line
    dp.open(0)
    loss_of(model, x[rank::3], weight[rank::3], 1.0).backward()
    dp.reduce(0)
    dp.finish()
    return [p.main_grad.clone() for p in model.parameters()]


@pytest.mark.ranks
def test_a_dropped_step_leaves_no_gradient_behind():
    """Case 59: a replica dies between micro-batches; the survivors' next step has only its own gradients."""
    model = model_of()
    loss_of(model, *batch_of(0), 1.0).backward()
    results = run_ranks(4, body_dead_replica, expect_dead=(3,))
    for grads in results[:3]:
        close(grads, [p.grad for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(grads, results[0], strict=True))


def test_misuse_is_refused():
    model = nn.Linear(4, 4)
    for wrong in ({"zero": 3}, {"bucket_bytes": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            DataParallel({0: model}, Mesh.single(), **wrong)
    with pytest.raises(ValueError, match="not a trainable parameter|does not name it|do not name it"):
        DataParallel({0: model}, Mesh.single(), tied={0: model.weight}, tied_ranks=(1, 2))
    with pytest.raises(ValueError, match="two copies"):
        DataParallel({0: model}, Mesh.single(), tied={0: model.weight, 1: nn.Parameter(torch.zeros(4, 4))})
    dp = DataParallel({0: model}, Mesh.single())
    with pytest.raises(ValueError, match=r"stage=3 is not on this rank; it holds \[0\]"):
        dp.open(3)
    with pytest.raises(RuntimeError, match=r"finish\(\) before reduce\(\) of stages \[0\]"):
        dp.finish()
    with pytest.raises(ValueError, match="p=3"):
        dp.norm_power(3)
    for wrong in ({"betas": (0.9, 1.0)}, {"eps": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ShardedAdamW(dp, **wrong)


def test_a_gradient_that_comes_late_is_an_error_not_a_wrong_sum():
    model = nn.Linear(4, 4, bias=False)
    dp = DataParallel({0: model}, Mesh.single())
    dp.open(0)
    accumulate(model.weight, torch.ones(4, 4))
    with pytest.raises(RuntimeError, match="a gradient of weight arrived after its bucket was complete"):
        accumulate(model.weight, torch.ones(4, 4))
    dp.reduce(0)
    dp.finish()
    dp.zero_grad()
    add_use(model.weight)
    dp.open(0)
    accumulate(model.weight, torch.ones(4, 4))
    accumulate(model.weight, torch.ones(4, 4))
    dp.reduce(0)
    dp.finish()
    assert torch.equal(model.weight.main_grad, torch.full((4, 4), 2.0))


def body_other_layout(rank):
    with pytest.raises(ValueError, match=r"dp ranks \(0, 1\) hold different parameters"):
        DataParallel({0: nn.Linear(4, 4 + rank)}, Mesh.create(dp=2))


def test_a_weight_used_twice_counts_from_zero_after_a_step_given_up_half_way():
    """One of its two uses had arrived: the next step took its first use for the second, and reduced too early."""
    model = nn.Linear(2, 2, bias=False)
    add_use(model.weight)
    dp = DataParallel({0: model}, Mesh.single())
    arrived = []
    model.weight.on_grad = arrived.append
    accumulate(model.weight, torch.ones(2, 2))
    dp.zero_grad()
    accumulate(model.weight, torch.ones(2, 2))
    assert not arrived
    accumulate(model.weight, torch.ones(2, 2))
    assert len(arrived) == 1
    assert torch.equal(model.weight.main_grad, torch.full((2, 2), 2.0))


@pytest.mark.ranks
def test_ranks_with_different_parameters_are_refused():
    run_ranks(2, body_other_layout)


def test_one_parameter_in_two_stages_waits_for_both():
    shared = nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
    first, last = nn.Module(), nn.Module()
    first.embed, last.head = shared, shared
    dp = DataParallel({0: first, 3: last}, Mesh.single(), tied={0: shared, 3: shared})
    assert [len(b.slots) for b in dp.buckets] == [1] and dp.buckets[0].late
    for stage in (3, 0):
        dp.open(stage)
        accumulate(shared, torch.ones(3, 2, dtype=torch.float64))
        dp.tie(stage)
        dp.reduce(stage)
        assert dp.buckets[0].started == (stage == 0)
    dp.finish()
    assert torch.equal(shared.main_grad, torch.full((3, 2), 2.0, dtype=torch.float64))
    assert float(dp.grad_norm()) == pytest.approx(24**0.5)


def test_foreign_gradients_with_several_and_unused_outputs():
    """A weight used twice in one module, tuple outputs, one of them unused: autograd's sum is taken once."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
            self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)

        def forward(self, x):
            return x @ self.weight, torch.tanh(x @ self.weight), x * 2

    model, x = Twice(), torch.randn(5, 4, dtype=torch.float64)
    reference = model.weight.detach().clone().requires_grad_()
    ((x @ reference).sum() + (x @ reference).tanh().sum()).backward()
    dp = DataParallel({0: model}, Mesh.single())
    dp.open(0)
    a, b, _ = model(x)
    (a.sum() + b.sum()).backward()
    dp.reduce(0)
    dp.finish()
    torch.testing.assert_close(model.weight.main_grad, reference.grad)
    assert not bool(model.unused.main_grad.any()) and not hasattr(model.frozen, "main_grad")


# ---- state -------------------------------------------------------------------------------------------------------


def body_pieces(rank, zero, n, node_size=0):
    """Trains two steps, then says which logical elements this rank owns, with their values."""
    model = model_of(torch.bfloat16)
    model[0].weight.placement = Placement((5, 3), (0, 0), (5, 3))  # 2 of its 7 rows are padding
    dp = DataParallel({0: model}, Mesh.create(dp=n, node_size=node_size), zero=zero, bucket_bytes=1000)
    optimizer = ShardedAdamW(dp)
    train_parallel(dp, optimizer, model, 2, 1, torch.bfloat16)
    rows = []
    for piece in optimizer.pieces():
        a, b = piece.flat
        parts = (piece.param, piece.master, piece.exp_avg, piece.exp_avg_sq)
        assert all(part.shape == (b - a,) for part in parts) and b <= piece.placement.numel
        rows.append((piece.name, piece.flat, piece.replica, [part.clone() for part in parts]))
    return rows, optimizer.steps, {name: p.detach().clone() for name, p in model.named_parameters()}


def merge(results):
    """Puts pieces together; every element must be owned by exactly `count` ranks, with equal values."""
    sizes = {name: p.numel() for name, p in model_of().named_parameters()} | {"0.weight": 15}
    full = {name: torch.full((4, size), float("nan"), dtype=torch.float32) for name, size in sizes.items()}
    owners = {name: torch.zeros(size) for name, size in sizes.items()}
    for rows, _, _ in results:
        for name, (a, b), (index, count), parts in rows:
            assert 0 <= index < count
            owners[name][a:b] += 1 / count
            for row, part in zip(full[name], parts, strict=True):
                assert bool(row[a:b].isnan().all()) or torch.equal(row[a:b], part.float())
                row[a:b] = part.float()
    for name, counts in owners.items():
        torch.testing.assert_close(counts, torch.ones_like(counts), msg=f"owners of {name}")
    return full


@pytest.mark.ranks
@pytest.mark.parametrize("zero", [0, 1])
def test_pieces_cover_every_logical_element_once(zero):
    results = run_ranks(4, body_pieces, zero, 4)
    full = merge(results)
    for name, weight in results[0][2].items():
        assert torch.equal(full[name][0], weight.float().reshape(-1)[: full[name].shape[1]])
    assert not any(bool(rows.isnan().any()) for rows in full.values())


def body_restore(rank, state, n, zero):
    model = model_of(torch.bfloat16)
    model[0].weight.placement = Placement((5, 3), (0, 0), (5, 3))
    dp = DataParallel({0: model}, Mesh.create(dp=n), zero=zero, bucket_bytes=500)
    optimizer = ShardedAdamW(dp)
    for piece in optimizer.pieces():
        for target, row in zip(
            (piece.param, piece.master, piece.exp_avg, piece.exp_avg_sq), state[piece.name], strict=True
        ):
            target.copy_(row[slice(*piece.flat)])
    optimizer.steps = 2
    optimizer.gather_params()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.ranks
def test_pieces_restore_on_another_grid():
    results = run_ranks(4, body_pieces, 1, 4)
    state = merge(results)
    for n, zero in ((2, 1), (3, 1), (1, 0)):
        for weights in run_ranks(n, body_restore, state, n, zero):
            for name, weight in weights.items():
                logical = state[name].shape[1]
                assert torch.equal(weight.reshape(-1)[:logical], results[0][2][name].reshape(-1)[:logical])


def body_hooks(rank):
    model = model_of(torch.bfloat16)
    dp = DataParallel({0: model}, Mesh.create(dp=2), zero=1, bucket_bytes=1000)
    optimizer = ShardedAdamW(dp)
    announced, order = [], []

    def note(tensors):
        order.append("write")
        announced.extend((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors)

    handle = optimizer.register_write_pre_hook(note)
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: order.append("step"))
    live = [(t, t.clone()) for b in dp.buckets for t in (b.params,)]
    live += [(t, t.clone()) for piece in optimizer.pieces() for t in (piece.master, piece.exp_avg, piece.exp_avg_sq)]
    train_parallel(dp, optimizer, model, 1, 1, torch.bfloat16)
    assert order[0] == "step" and order.count("write") == 2 * len(dp.buckets) and order.count("step") == 1
    for tensor, old in live:
        changed = (tensor != old).nonzero().flatten().tolist()
        for index in changed:
            address = tensor.data_ptr() + index * tensor.element_size()
            assert any(start <= address < stop for start, stop in announced)
    handle.remove()
    train_parallel(dp, optimizer, model, 1, 1, torch.bfloat16, first=1)
    assert order.count("write") == 2 * len(dp.buckets) and order.count("step") == 2


@pytest.mark.ranks
def test_every_write_is_announced_before_it_happens():
    run_ranks(2, body_hooks)


def test_world_of_one_needs_no_process_group():
    assert not dist.is_initialized()
    weights, norms = train_alone(3)
    model = model_of()
    dp = DataParallel({0: model}, Mesh.single(), zero=1)
    got = train_parallel(dp, ShardedAdamW(dp), model, 3, 2)
    close([p.detach() for p in model.parameters()], weights)
    assert got == pytest.approx(norms, rel=1e-12)


def test_flat_layout_is_aligned_and_gaps_stay_zero():
    model = model_of()
    dp = DataParallel({0: model}, Mesh.single())
    optimizer = ShardedAdamW(dp)
    train_parallel(dp, optimizer, model, 2, 1)
    for bucket in dp.buckets:
        inside = torch.zeros(bucket.numel, dtype=torch.bool)
        for slot in bucket.slots:
            assert slot.offset % ALIGN == 0
            assert slot.param.untyped_storage().data_ptr() == bucket.params.untyped_storage().data_ptr()
            inside[slot.offset : slot.offset + slot.numel] = True
        assert not bool(bucket.params[~inside].any()) and not bool(bucket.grads[~inside].any())
        runs = list(bucket.runs(lambda slot: slot.decay))
        assert [run[0] for run in runs] == [True, False]  # one update call each
        assert runs[0][1] == 0 and runs[0][2] == runs[1][1] and runs[1][2] == bucket.numel


def test_fill_keeps_order_and_bounds():
    dp = DataParallel({0: model_of()}, Mesh.single())
    slots = [slot for bucket in dp.buckets for slot in bucket.slots]
    for bound in (1, 100, 1000, 1 << 20):
        lists = fill(slots, bound)
        assert [slot for some in lists for slot in some] == slots
        assert all(len(some) == 1 or sum(slot.numel * 8 for slot in some) <= bound for some in lists)
    assert overlap((0, 4), (2, 9)) == (2, 4) and overlap((0, 2), (2, 3)) is None


def test_only_matrices_decay():
    assert decays("w", torch.nn.Parameter(torch.zeros(2, 2))) and decays(
        "w", torch.nn.Parameter(torch.zeros(2, 3, 4))
    )
    assert not decays("w", torch.nn.Parameter(torch.zeros(2)))


def test_clip_factor_clips_only_what_is_above():
    norms = [0.0, 0.5, 1.0, 4.0]
    assert [clip_factor(torch.tensor(norm), 1.0).item() for norm in norms] == [1.0, 1.0, 1.0, 0.25]
    for norm in (math.inf, math.nan):
        assert math.isnan(clip_factor(torch.tensor(norm), 1.0).item())
    with pytest.raises(ValueError, match="max_norm is 0"):
        clip_factor(torch.tensor(1.0), 0)
