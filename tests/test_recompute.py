"""Recompute: the same bits with and without, once per micro-batch, and nothing left alive.

Policies none, full, selective are held against each other on the block of test_layers.py (dropout on, so that a
second forward that drew other numbers would show), alone and on two ranks, weight gradients at once and deferred.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from plait import kernels
from plait.parallel.collectives import split_seq
from plait.parallel.layers import ColumnParallelLinear, RMSNorm, RowParallelLinear
from plait.parallel.mesh import Axis, Mesh
from plait.parallel.recompute import POLICIES, recompute, replayable
from plait.parallel.vocab import VocabParallelHead
from tests.ranks import run_ranks
from tests.test_layers import HEAD_DIM, B, Block, D, T, assert_equal_bits, full_grads

MICROBATCHES = 3


class Sparing(Block):
    """The block with its gated activation declared cheap, as a model does it; counts its forwards and replays."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.forwards = 0
        self.activations = 0

    def swiglu(self, gate_up):
        self.activations += 1
        return kernels.swiglu(gate_up)

    def forward(self, x):
        self.forwards += 1
        q, kv = self.q(y := self.norm1(x)), self.kv(y)
        k, v = kv.view(B, T, 2, -1, HEAD_DIM).unbind(2)
        mixed = kernels.attention(q.view(B, T, self.local_q, HEAD_DIM), k.contiguous(), v.contiguous())
        x = x + self.drop(self.out(mixed.reshape(B, T, -1)), seed=9, step=2, sample_offset=6)
        return x + self.down(replayable(self.swiglu, self.gate_up(self.norm2(x))))


def policy_result(rank: int, tp: int, policies: list[str], deferring: bool, options: dict) -> dict:
    """Loss and full gradients of two blocks over micro-batches, all forwards first; each has its policy."""
    mesh = Mesh.create(tp=tp) if tp > 1 else Mesh.single()
    axis = mesh.axis("tp")
    blocks = nn.ModuleList(Sparing(axis, sequence_parallel=True, **options) for _ in range(2))
    head = VocabParallelHead(D, 11, axis, sequence_parallel=True, dtype=torch.float64)
    head.reset_parameters(1, 0.5, "head")
    sinks = [module.weight_grads for module in blocks.modules() if hasattr(module, "weight_grads")]
    generator = torch.Generator().manual_seed(1)
    result, losses, inputs = {}, [], []
    for policy in policies:
        x = torch.randn(B, T, D, dtype=torch.float64, generator=generator).requires_grad_()
        hidden = split_seq(x, axis, 1)
        for block in blocks:
            hidden = recompute(block, hidden, policy=policy)
        losses.append(head(hidden, torch.arange(B * T).view(B, T) % 11)[0])
        inputs.append(x)
    for microbatch, loss in enumerate(losses):
        for sink in sinks:
            sink.microbatch, sink.deferring = microbatch, deferring
        loss.backward()
    for microbatch in reversed(range(len(policies))):
        for sink in sinks:
            sink.run(microbatch)
    assert not any(sink.pending for sink in sinks)
    for microbatch, (loss, x) in enumerate(zip(losses, inputs, strict=True)):
        result[f"loss{microbatch}"], result[f"dx{microbatch}"] = loss.detach(), x.grad
    result["forwards"] = torch.tensor([block.forwards for block in blocks])
    result["activations"] = torch.tensor([block.activations for block in blocks])
    for name, grad in full_grads(blocks, mesh).items():
        result[name] = grad
    return result


def without_counts(result: dict) -> dict:
    return {name: value for name, value in result.items() if name not in ("forwards", "activations")}


@pytest.mark.ranks
@pytest.mark.parametrize("tp, options", [(1, {}), (2, {}), (2, {"keep_gathered": False})])
def test_losses_and_gradients_are_the_same_bits_under_every_policy(tp, options):
    """Case 48. Dropout is on: a second forward that drew other numbers, or none, would change them."""
    results = []
    for policy in POLICIES:
        arguments = (tp, [policy] * MICROBATCHES, False, options)
        results.append(run_ranks(tp, policy_result, *arguments)[0] if tp > 1 else policy_result(0, *arguments))
    for result in results[1:]:
        assert_equal_bits(without_counts(result), without_counts(results[0]))


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_policy_may_change_from_one_microbatch_to_the_next(policy):
    """Case 34."""
    plain = policy_result(0, 1, ["none"] * MICROBATCHES, False, {})
    for first in range(1, MICROBATCHES):
        policies = [policy] * first + ["none"] * (MICROBATCHES - first)
        assert_equal_bits(without_counts(policy_result(0, 1, policies, False, {})), without_counts(plain))


@pytest.mark.parametrize("deferring", [False, True])
@pytest.mark.parametrize("policy, forwards, activations", [("none", 1, 1), ("full", 2, 2), ("selective", 1, 2)])
def test_one_recompute_per_microbatch_and_layer(policy, forwards, activations, deferring):
    """Also with weight gradients apart, where others recompute once for each half of the backward."""
    result = policy_result(0, 1, [policy] * MICROBATCHES, deferring, {})
    assert result["forwards"].tolist() == [forwards * MICROBATCHES] * 2
    assert result["activations"].tolist() == [activations * MICROBATCHES] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_deferred_weight_gradients_keep_their_microbatch(policy):
    """W runs the micro-batches backwards here; the sums per parameter then differ only by their order."""
    now = policy_result(0, 1, [policy] * MICROBATCHES, False, {})
    later = policy_result(0, 1, [policy] * MICROBATCHES, True, {})
    for name, value in without_counts(now).items():
        torch.testing.assert_close(later[name], value, rtol=1e-12, atol=1e-12)


def norm_outputs(policy: str) -> tuple[list, list, torch.Tensor]:
    """Weak references to what norms and activation gave, after forward and after backward."""
    block = Sparing(Axis.single(), sequence_parallel=True)
    made: list[weakref.ref] = []

    def note(_module, _inputs, output):
        made.append(weakref.ref(output))

    for module in (block.norm1, block.norm2, block.drop, block.gate_up, block.out):
        module.register_forward_hook(note)
    x = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    y = recompute(block, x, policy=policy)
    gc.collect()
    after_forward = [ref() is not None for ref in made]
    y.sum().backward()
    gc.collect()
    return after_forward, [ref() is not None for ref in made], y


def test_what_a_policy_drops_is_gone_after_forward_and_everything_after_backward():
    order = ["norm1", "out", "drop", "norm2", "gate_up"]
    kept = {"none": {"norm1", "norm2", "gate_up"}, "selective": {"gate_up"}, "full": set()}
    for policy, names in kept.items():
        after_forward, after_backward, y = norm_outputs(policy)
        alive = {name for name, here in zip(order, after_forward, strict=False) if here}
        assert alive == names, policy
        assert not any(after_backward), policy
        del y


# ---- the function by itself --------------------------------------------------------------------------------------


class Foreign(nn.Module):
    """A module of torch's own, which draws from the global generator; several inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x, scale, other, *, power=1):
        y = self.dropout(torch.tanh(self.linear(x))) * scale
        return y + other["shift"], y.pow(power), torch.zeros(3, dtype=torch.int64)


def foreign_result(policy: str) -> list[torch.Tensor]:
    torch.manual_seed(3)
    module = Foreign()
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    outs = [recompute(module, x, 2.0, {"shift": 1.0}, policy=policy, power=2) for _ in range(2)]
    after = torch.rand(1)  # the generator goes on as if nothing had been recomputed
    (outs[0][0].sum() + outs[1][1].square().sum()).backward()
    return [*outs[0], *outs[1], x.grad, module.linear.weight.grad, module.linear.bias.grad, after, torch.rand(1)]


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_modules_that_draw_from_torchs_generator_draw_the_same_again(policy):
    for got, wanted in zip(foreign_result(policy), foreign_result("none"), strict=True):
        assert torch.equal(got, wanted)


def test_full_needs_no_input_with_a_gradient():
    norm = RMSNorm(6, Axis.single())
    x = torch.randn(2, 6)
    recompute(norm, x, policy="full").sum().backward()
    again = RMSNorm(6, Axis.single())
    again(x).sum().backward()
    assert torch.equal(norm.weight.grad, again.weight.grad)


def test_without_gradients_every_policy_is_a_plain_call():
    norm = RMSNorm(6, Axis.single())
    x = torch.randn(2, 6)
    with torch.no_grad():
        outs = [recompute(norm, x, policy=policy) for policy in POLICIES]
    assert all(torch.equal(out, outs[0]) and not out.requires_grad for out in outs)


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(ValueError, match="policy 'partial' must be one of none, full, selective"):
        recompute(nn.Identity(), torch.ones(1), policy="partial")


def test_a_view_of_a_cheap_tensor_is_kept_and_right():
    """The recipe belongs to the tensor itself: what is saved through a view is simply saved."""
    results = []
    for policy in ("none", "selective"):
        row = RowParallelLinear(6, 6, Axis.single())
        row.reset_parameters(0, 0.5, "row")
        x = torch.linspace(-1, 1, 24).view(2, 12).requires_grad_()
        recompute(lambda x, row=row: row(replayable(torch.tanh, x).view(2, 2, 6)), x, policy=policy).sum().backward()
        results.append((x.grad, row.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_cheap_tensor_with_many_readers_is_made_once_per_backward():
    made = []

    def cheap(x):
        made.append(1)
        return x * 2

    layers = [ColumnParallelLinear(6, 6, Axis.single()) for _ in range(3)]
    for layer in layers:
        layer.reset_parameters(0, 0.5, "w")
    x = torch.randn(2, 6, requires_grad=True)

    def block(x):
        y = replayable(cheap, x)
        return sum(layer(y) for layer in layers)

    recompute(block, x, policy="selective").sum().backward()
    assert len(made) == 2


def test_backward_twice_over_a_kept_graph_still_works():
    for policy in ("full", "selective"):
        row = RowParallelLinear(6, 6, Axis.single())
        row.reset_parameters(0, 0.5, "row")
        x = torch.randn(2, 6, requires_grad=True)
        y = recompute(lambda x, row=row: row(replayable(torch.tanh, x)), x, policy=policy).sum()
        y.backward(retain_graph=True)
        once = (x.grad.clone(), row.weight.grad.clone())
        y.backward()
        assert torch.equal(x.grad, 2 * once[0])
        torch.testing.assert_close(row.weight.grad, 2 * once[1])  # added product by product: not the same roundings


def test_a_norm_of_a_sum_is_made_again_from_the_sum():
    results = []
    for policy in POLICIES:
        norm = RMSNorm(6, Axis.single())
        column = ColumnParallelLinear(6, 6, Axis.single())
        column.reset_parameters(0, 0.5, "w")
        x, residual = (torch.linspace(-1, k, 12).view(2, 6).requires_grad_() for k in (1, 2))

        def block(x, residual, norm=norm, column=column):
            y, total = norm.add_and_norm(x, residual)
            return column(y) + total

        recompute(block, x, residual, policy=policy).square().sum().backward()
        results.append((x.grad, residual.grad, norm.weight.grad, column.weight.grad))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
