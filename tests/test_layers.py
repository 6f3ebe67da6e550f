"""Tensor-parallel layers against themselves on one rank: outputs, input gradients and full weight gradients in fp64.

Cases (sizes are small; every reason is beside its row):
    tp 1, 2, 4   with and without sequence parallelism        the parity that the layers promise
    8 q heads, 2 kv heads, tp 4                               kv weights on two ranks each, partial gradients
    kept, deferred, gathered again                            the same bits whatever the schedule and memory policy
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from plait import kernels
from plait.parallel.collectives import all_gather, all_reduce, split_seq
from plait.parallel.layers import (
    ColumnParallelLinear,
    Dropout,
    RMSNorm,
    RowParallelLinear,
    check_sequence,
    column_parallel,
    unit_box,
)
from plait.parallel.mesh import Axis, Mesh
from plait.parallel.placement import gather_full
from tests.ranks import run_ranks

# Sums over tp come in another order than one long sum; fp64 keeps that below this, relative to the largest element.
TOLERANCE = 1e-12
B, T, D, F, Q_HEADS, HEAD_DIM = 2, 8, 16, 24, 8, 4


class Block(nn.Module):
    """A transformer block with every layer under test: norm, q and kv from one gather, row, gate_up, dropout."""

    def __init__(self, axis: Axis, *, kv_heads: int = 4, sequence_parallel: bool, **options):
        super().__init__()
        common = {"dtype": torch.float64, "sequence_parallel": sequence_parallel}
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self.local_q = Q_HEADS // axis.size
        self.norm1 = RMSNorm(D, axis, **common)
        self.q = ColumnParallelLinear(D, Q_HEADS * HEAD_DIM, axis, units=Q_HEADS, bias=True, **common, **options)
        self.kv = ColumnParallelLinear(
            D, (2, kv_heads * HEAD_DIM), axis, units=kv_heads, bias=True, **common, **options
        )
        self.out = RowParallelLinear(Q_HEADS * HEAD_DIM, D, axis, bias=True, **common)
        self.drop = Dropout(0.1, axis, layer=3, site=1, split="sequence" if sequence_parallel else "none")
        self.norm2 = RMSNorm(D, axis, **common)
        self.gate_up = ColumnParallelLinear(D, (2, F), axis, **common, **options)
        self.down = RowParallelLinear(F, D, axis, **common)
        for name, module in self.named_children():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters(5, 0.3, f"layers.3.{name}")

    def forward(self, x):
        q, kv = column_parallel(self.norm1(x), self.q, self.kv)
        q = q.view(B, T, self.local_q, HEAD_DIM)
        k, v = kv.view(B, T, 2, -1, HEAD_DIM).unbind(2)
        mixed = kernels.attention(q, k.contiguous(), v.contiguous()).reshape(B, T, -1)
        x = x + self.drop(self.out(mixed), seed=9, step=2, sample_offset=6)
        return x + self.down(kernels.swiglu(self.gate_up(self.norm2(x))))


def full_grads(module: nn.Module, mesh: Mesh) -> dict[str, torch.Tensor]:
    """The gradients as one rank would have them: partial ones summed over their replicas, shards put together."""
    grads = {}
    for name, param in module.named_parameters():
        grad, placement = param.grad, param.placement
        if placement.sum_axes:
            grad = all_reduce(grad.clone(), mesh.line("replicas", placement.replica_ranks))
        grads[name] = gather_full(grad, placement, mesh)
    return grads


def block_result(
    rank: int,
    tp: int,
    sequence_parallel: bool,
    kv_heads: int = 4,
    options: dict | None = None,
    deferring: bool = False,
) -> dict[str, torch.Tensor]:
    """Forward and backward of two micro-batches on this rank; everything gathered to full tensors."""
    mesh = Mesh.create(tp=tp) if tp > 1 else Mesh.single()
    axis = mesh.axis("tp")
    block = Block(axis, kv_heads=kv_heads, sequence_parallel=sequence_parallel, **(options or {}))
    sinks = [module.weight_grads for module in block.modules() if hasattr(module, "weight_grads")]
    generator = torch.Generator().manual_seed(1)
    result = {}
    for microbatch in range(2):
        x = torch.randn(B, T, D, dtype=torch.float64, generator=generator).requires_grad_()
        dout = torch.randn(B, T, D, dtype=torch.float64, generator=generator)
        for sink in sinks:
            sink.microbatch, sink.deferring = microbatch, deferring
        if sequence_parallel:
            y = block(split_seq(x, axis, 1))
            y.backward(split_seq(dout, axis, 1))
            y = all_gather(y.detach(), axis, 1)
        else:
            y = block(x)
            y.backward(dout)
        result[f"y{microbatch}"], result[f"dx{microbatch}"] = y.detach(), x.grad
    for microbatch in range(2):
        for sink in sinks:
            sink.run(microbatch)
    return {**result, **full_grads(block, mesh)}


def assert_close(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        error = float((got[name] - value).abs().max() / value.abs().max())
        assert error < TOLERANCE, f"{name} is off by {error:.2e}"


def assert_equal_bits(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    assert not [name for name, value in wanted.items() if not torch.equal(got[name], value)]


@pytest.mark.ranks
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_block_on_tp_ranks_equals_one_rank(tp, sequence_parallel):
    alone = block_result(0, 1, sequence_parallel)
    results = run_ranks(tp, block_result, tp, sequence_parallel)
    for result in results:
        assert_close(result, alone)
        assert_equal_bits(result, results[0])


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_fewer_kv_heads_than_ranks_are_replicated_and_their_gradients_summed(sequence_parallel):
    """Case 51: two kv heads on four ranks."""
    alone = block_result(0, 1, sequence_parallel, 2)
    for result in run_ranks(4, block_result, 4, sequence_parallel, 2):
        assert_close(result, alone)


@pytest.mark.ranks
@pytest.mark.parametrize("tp", [1, 2])
def test_memory_and_schedule_policies_give_the_same_bits(tp):
    """Deferred weight gradients, and a gathered input that is dropped and gathered again."""
    variants = [({}, False), ({}, True), ({"keep_gathered": False}, False), ({"keep_gathered": False}, True)]
    results = []
    for options, deferring in variants:
        arguments = (tp, True, 4, options, deferring)
        results.append(run_ranks(tp, block_result, *arguments)[0] if tp > 1 else block_result(0, *arguments))
    for result in results[1:]:
        assert_equal_bits(result, results[0])


def test_two_runs_are_equal_bit_for_bit():
    assert_equal_bits(block_result(0, 1, True), block_result(0, 1, True))


# ---- placements: pure, an axis needs no process for them ---------------------------------------------------------


def coords(size: int) -> list[Axis]:
    """The axis as each of its ranks sees it; rank numbers are not the coordinates, to tell them apart."""
    return [Axis("tp", size, coord, tuple(range(10, 10 + size))) for coord in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("units", [1, 2, 4, 8])
def test_boxes_of_all_ranks_cover_the_full_tensor(size, units):
    held = torch.zeros(2, 16, D, dtype=torch.int64)
    for axis in coords(size):
        placement = ColumnParallelLinear(D, (2, 16), axis, units=units).weight.placement
        assert placement.full_shape == (2, 16, D)
        held[placement.box] += 1
        assert len(placement.replica_ranks) == (size // units if units < size else 0)
        assert placement.sum_axes == (("tp",) if units < size else ())
        assert not placement.replica_ranks or axis.ranks[axis.coord] in placement.replica_ranks
    assert bool((held == max(1, size // units)).all())


def test_q_heads_lie_with_the_kv_head_that_they_use():
    for axis in coords(4):
        q_start = unit_box(8 * HEAD_DIM, 8, axis)[0] // HEAD_DIM
        kv_start = unit_box(2 * HEAD_DIM, 2, axis)[0] // HEAD_DIM
        assert q_start // 4 == kv_start


@pytest.mark.parametrize("features, units, size", [(12, 3, 2), (12, 6, 4), (7, None, 2), (10, 4, 2), (12, 5, 5)])
def test_heads_that_fit_neither_way_are_refused_by_number(features, units, size):
    with pytest.raises(ValueError, match=rf"{features} features .* of size {size}"):
        unit_box(features, units, coords(size)[0])


def test_replicated_parameters_say_who_holds_them_so_that_a_norm_counts_them_once():
    axis = coords(2)[1]
    for param in (RMSNorm(D, axis).weight, RowParallelLinear(D, D, axis, bias=True).bias):
        assert param.placement.replica_ranks == (10, 11) and param.placement.sum_axes == ()
    assert RMSNorm(D, axis, sequence_parallel=True).weight.placement.sum_axes == ("tp",)
    assert RMSNorm(D, Axis.single(), sequence_parallel=True).weight.placement.sum_axes == ()


def sum_of_squares(rank: int) -> float:
    """The squared gradient norm of a block on 2 ranks: each parameter's share by its number of replicas."""
    mesh = Mesh.create(tp=2)
    axis = mesh.axis("tp")
    block = Block(axis, sequence_parallel=False)
    x = torch.randn(B, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    block(x).square().sum().backward()
    total = torch.zeros(1, dtype=torch.float64)
    for param in block.parameters():
        total += param.grad.square().sum() / max(1, len(param.placement.replica_ranks))
    return float(all_reduce(total, axis))


@pytest.mark.ranks
def test_norms_and_row_biases_are_not_counted_tp_times():
    block = Block(Axis.single(), sequence_parallel=False)
    x = torch.randn(B, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    block(x).square().sum().backward()
    alone = sum(float(p.grad.square().sum()) for p in block.parameters())
    assert run_ranks(2, sum_of_squares) == pytest.approx([alone, alone], rel=1e-12)


def norm_gradients(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(own, summed) gradient of a norm that sees half of the tokens."""
    mesh = Mesh.create(tp=2)
    axis = mesh.axis("tp")
    norm = RMSNorm(D, axis, sequence_parallel=True, dtype=torch.float64)
    x = torch.randn(B, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    norm(split_seq(x, axis, 1)).pow(3).sum().backward()
    own = norm.weight.grad
    return own, all_reduce(own.clone(), axis)


@pytest.mark.ranks
def test_sequence_parallel_norm_gradients_do_not_stay_different():
    """Case 43: summed over tp, the same bits on every replica."""
    norm = RMSNorm(D, Axis.single(), dtype=torch.float64)
    x = torch.randn(B, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    norm(x).pow(3).sum().backward()
    (own0, sum0), (own1, sum1) = run_ranks(2, norm_gradients)
    assert not torch.allclose(own0, own1)
    assert torch.equal(sum0, sum1)
    torch.testing.assert_close(sum0, norm.weight.grad, rtol=1e-12, atol=1e-12)


# ---- sequences, sizes, collectives -------------------------------------------------------------------------------


def odd_sequence(rank: int) -> str:
    """The error of a row layer whose 7 tokens cannot be scattered."""
    axis = Mesh.create(tp=2).axis("tp")
    layer = RowParallelLinear(D, D, axis, sequence_parallel=True)
    with pytest.raises(ValueError) as error:
        layer(torch.randn(1, 7, D // 2))
    return str(error.value)


@pytest.mark.ranks
def test_seven_tokens_on_two_ranks_are_refused_with_the_numbers():
    """Case 50."""
    with pytest.raises(ValueError, match="7 tokens cannot be split over axis tp of size 2"):
        check_sequence(7, coords(2)[0])
    check_sequence(8, coords(2)[0])
    for text in run_ranks(2, odd_sequence):
        assert "7" in text and "size 2" in text


def shapes_on_two_ranks(rank: int) -> list[tuple[int, ...]]:
    """Shapes through a sequence-parallel norm, column layer, replicated column layer and row layer."""
    axis = Mesh.create(tp=2).axis("tp")
    x = torch.randn(B, T // 2, D)
    column = ColumnParallelLinear(D, (2, F), axis, sequence_parallel=True)
    row = RowParallelLinear(F, D, axis, sequence_parallel=True)
    nn.init.zeros_(column.weight), nn.init.zeros_(row.weight)
    wide = column(RMSNorm(D, axis, sequence_parallel=True)(x))
    return [tuple(wide.shape), tuple(row(wide[..., : F // 2]).shape)]


@pytest.mark.ranks
def test_layers_take_sizes_from_the_constructor_not_from_the_local_length():
    """Case 52: x.shape[1] is the local length."""
    assert run_ranks(2, shapes_on_two_ranks) == [[(B, T, F), (B, T // 2, D)]] * 2


def collectives_of_a_block(rank: int, sequence_parallel: bool) -> tuple[int, int]:
    """How many collectives the layers start in forward and in backward."""
    from plait.parallel import layers

    started = []
    for name in ("all_gather", "all_reduce", "reduce_scatter"):
        real = getattr(layers, name)
        setattr(layers, name, lambda *a, _real=real, _name=name, **k: (started.append(_name), _real(*a, **k))[1])
    axis = Mesh.create(tp=2).axis("tp")
    block = Block(axis, sequence_parallel=sequence_parallel)
    x = torch.randn(B, T // 2 if sequence_parallel else T, D, dtype=torch.float64, requires_grad=True)
    y = block(x)
    forward = len(started)
    y.sum().backward()
    return forward, len(started) - forward


class Noted:
    """A handle that notes when it is waited for."""

    def __init__(self, events: list[str], name: str, handle: Any) -> None:
        self.events, self.name, self.handle = events, name, handle

    def wait(self) -> torch.Tensor:
        self.events.append(f"wait {self.name}")
        return self.handle.wait()


def order_of_a_backward(rank: int, column: bool, sequence_parallel: bool, keep_gathered: bool) -> list[str]:
    """What the backward of one layer does, in order; what a synchronous collective does is one event."""
    from plait.parallel import gradients, layers

    axis, events = Mesh.create(tp=2).axis("tp"), []

    def noting(name: str, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            events.append(f"start {name}" if options.get("async_op") else name)
            result = real(*args, **options)
            return Noted(events, name, result) if options.get("async_op") else result

        return call

    for name in ("all_gather", "all_reduce", "reduce_scatter"):
        setattr(layers, name, noting(name, getattr(layers, name)))
    layers.matmul = SimpleNamespace(**vars(layers.matmul))
    layers.matmul.dgrad = noting("dgrad", layers.matmul.dgrad)
    gradients.wgrad_into = noting("wgrad", gradients.wgrad_into)
    options: dict[str, Any] = dict(sequence_parallel=sequence_parallel, dtype=torch.float64)
    length = T // 2 if sequence_parallel else T
    if column:
        layer: Any = ColumnParallelLinear(D, F, axis, keep_gathered=keep_gathered, **options)
        x = torch.randn(B, length, D, dtype=torch.float64, requires_grad=True)
    else:
        layer = RowParallelLinear(F, D, axis, **options)
        x = torch.randn(B, T, F // 2, dtype=torch.float64, requires_grad=True)
    nn.init.ones_(layer.weight)
    y = layer(x)
    events.clear()
    y.sum().backward()
    return events


@pytest.mark.ranks
def test_reductions_and_second_gathers_hide_behind_the_weight_gradient():
    """The reduction of dx is under way during dW, and a gather of x during dgrad; a row layer's gather of dout, which
    both products need, hides behind nothing."""
    reducing = ["start reduce_scatter", "wgrad", "wait reduce_scatter"]
    for layer, wanted in {
        (True, True, True): ["dgrad", *reducing],
        (True, True, False): ["start all_gather", "dgrad", reducing[0], "wait all_gather", *reducing[1:]],
        (True, False, True): ["dgrad", "start all_reduce", "wgrad", "wait all_reduce"],
        (False, True, True): ["all_gather", "dgrad", "wgrad"],
    }.items():
        assert run_ranks(2, order_of_a_backward, *layer) == [wanted] * 2


@pytest.mark.ranks
def test_a_block_has_the_fewest_collectives():
    """q and kv share one; without sequence parallelism only rows forward and columns backward need one."""
    for sequence_parallel in (False, True):
        wanted = (4, 4) if sequence_parallel else (2, 2)
        assert run_ranks(2, collectives_of_a_block, sequence_parallel) == [wanted] * 2


def test_adding_and_norming_in_one_pass_equals_two():
    results = []
    for fused in (False, True):
        norm = RMSNorm(D, Axis.single(), dtype=torch.float64)
        generator = torch.Generator().manual_seed(1)
        x, residual = (torch.randn(B, T, D, dtype=torch.float64, generator=generator) for _ in range(2))
        x.requires_grad_(), residual.requires_grad_()
        y, total = norm.add_and_norm(x, residual) if fused else (norm(x + residual), x + residual)
        (y.pow(3).sum() + total.square().sum()).backward()
        results.append([y, total, x.grad, residual.grad, norm.weight.grad])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_an_output_that_nobody_uses_gives_a_gradient_of_zeros():
    axis = Axis.single()
    a, b = (ColumnParallelLinear(D, F, axis, dtype=torch.float64) for _ in range(2))
    for seed, layer in enumerate((a, b)):
        layer.reset_parameters(seed, 0.3, "layer")
    x = torch.randn(1, T, D, dtype=torch.float64, requires_grad=True)
    column_parallel(x, a, b)[0].sum().backward()
    assert not b.weight.grad.any()
    torch.testing.assert_close(x.grad, a.weight.detach().sum(0).expand_as(x))


def test_frozen_weights_get_no_gradient():
    column = ColumnParallelLinear(D, F, Axis.single(), bias=True)
    column.reset_parameters(0, 0.3, "layer")
    column.weight.requires_grad_(False)
    x = torch.randn(1, T, D, requires_grad=True)
    column(x).sum().backward()
    assert column.weight.grad is None and column.bias.grad is not None and x.grad is not None


# ---- dropout: pure, the mask is a function of the place ----------------------------------------------------------


def test_dropout_on_shards_draws_the_bits_of_one_rank():
    """Case 49. Shards must not repeat one mask: together they are the mask of the whole tensor; replicas agree."""
    x = torch.ones(B, T, D)
    key = {"seed": 3, "step": 5, "sample_offset": 4}
    whole = Dropout(0.5, Axis.single(), layer=1, site=2)(x, **key)
    assert 0.3 < float((whole == 0).float().mean()) < 0.7
    for split, dim in (("sequence", 1), ("features", 2)):
        layers = [Dropout(0.5, axis, layer=1, site=2, split=split) for axis in coords(4)]
        parts = [layer(part, **key) for layer, part in zip(layers, x.chunk(4, dim), strict=True)]
        assert torch.equal(torch.cat(parts, dim), whole)
        assert not torch.equal(parts[0], parts[1])
    for axis in coords(4):
        assert torch.equal(Dropout(0.5, axis, layer=1, site=2)(x, **key), whole)


def test_dropout_depends_on_every_part_of_its_key_and_on_the_global_sample():
    x = torch.ones(B, T, D)
    key = {"seed": 3, "step": 5, "sample_offset": 4}
    whole = Dropout(0.5, Axis.single(), layer=1, site=2)(x, **key)
    for change in ({"seed": 4}, {"step": 6}, {"sample_offset": 5}):
        assert not torch.equal(Dropout(0.5, Axis.single(), layer=1, site=2)(x, **{**key, **change}), whole)
    for place in ({"layer": 2, "site": 2}, {"layer": 1, "site": 1}):
        assert not torch.equal(Dropout(0.5, Axis.single(), **place)(x, **key), whole)
    second = Dropout(0.5, Axis.single(), layer=1, site=2)(x[1:], **{**key, "sample_offset": 5})
    assert torch.equal(second, whole[1:])


def test_dropout_in_eval_is_the_identity_and_bad_arguments_are_refused():
    layer = Dropout(0.5, Axis.single(), layer=0, site=0).eval()
    x = torch.randn(1, 2, 3)
    assert layer(x, seed=0, step=0) is x
    with pytest.raises(ValueError, match=r"p=1.0 must be in \[0, 1\)"):
        Dropout(1.0, Axis.single(), layer=0, site=0)
    with pytest.raises(ValueError, match="split='rows' must be"):
        Dropout(0.1, Axis.single(), layer=0, site=0, split="rows")
