"""Tensor-parallel layers against themselves on one rank: outputs, input gradients and full weight gradients in fp64.

Cases (sizes are small; every reason is beside its row):
    tp 1, 2, 4   with and without sequence parallelism        the parity that the layers promise
    8 q heads, 2 kv heads, tp 4                               kv weights on two ranks each, partial gradients
    kept, deferred, gathered again                            the same bits whatever the schedule and memory policy
"""

from __future__ import annotations

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
    column_parallel,
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
    rank: int, tp: int, sequence_parallel: bool, kv_heads: int = 4, **options
) -> dict[str, torch.Tensor]:
    """Forward and backward of the block on this rank; everything gathered to full tensors."""
    mesh = Mesh.create(tp=tp) if tp > 1 else Mesh.single()
    axis = mesh.axis("tp")
    block = Block(axis, kv_heads=kv_heads, sequence_parallel=sequence_parallel, **options)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, T, D, dtype=torch.float64, generator=generator).requires_grad_()
    dout = torch.randn(B, T, D, dtype=torch.float64, generator=generator)
    if sequence_parallel:
        y = block(split_seq(x, axis, 1))
        y.backward(split_seq(dout, axis, 1))
        y = all_gather(y.detach(), axis, 1)
    else:
        y = block(x)
        y.backward(dout)
    return {"y": y.detach(), "dx": x.grad, **full_grads(block, mesh)}


def same(rank: int, tp: int, sequence_parallel: bool, kv_heads: int = 4, options: dict | None = None):
    return block_result(rank, tp, sequence_parallel, kv_heads, **(options or {}))


def assert_close(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        error = float((got[name] - value).abs().max() / value.abs().max())
        assert error < TOLERANCE, f"{name} is off by {error:.2e}"


@pytest.mark.ranks
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_block_on_tp_ranks_equals_one_rank(tp, sequence_parallel):
    alone = same(0, 1, sequence_parallel)
    for result in run_ranks(tp, same, tp, sequence_parallel):
        assert_close(result, alone)
