"""Weight gradients: where they go, when, in which dtype, and whom they tell."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch import nn

from plait.kernels import matmul_direct
from plait.kernels.plans import Site
from plait.parallel.gradients import GradSink, accumulate, accumulate_linear, add_use, grad_home, notify
from plait.parallel.layers import ColumnParallelLinear, RMSNorm
from plait.parallel.mesh import Axis
from plait.parallel.vocab import VocabParallelEmbedding


def test_work_runs_at_once_unless_the_sink_defers():
    done = []
    sink = GradSink()
    sink.add(0, lambda: done.append("now"))
    assert done == ["now"] and sink.pending == 0
    sink.deferring = True
    sink.add(1, lambda: done.append("later"))
    assert done == ["now"] and sink.pending == 1


def test_deferred_work_runs_per_microbatch_in_the_order_of_its_arrival():
    done = []
    sink = GradSink(deferring=True)
    for microbatch, name in ((0, "a0"), (1, "a1"), (0, "b0"), (1, "b1")):
        sink.add(microbatch, lambda name=name: done.append(name))
    sink.run(1)
    assert done == ["a1", "b1"] and sink.pending == 2
    sink.run(0)
    assert done == ["a1", "b1", "a0", "b0"] and sink.pending == 0
    sink.run(0)
    assert len(done) == 4, "work must not run twice"


def test_deferred_work_frees_its_tensors_one_by_one():
    sink = GradSink(deferring=True)
    tensors = [torch.zeros(1) for _ in range(2)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    seen = []

    def work(tensor):
        return lambda: seen.append((tensor.numel(), [ref() is not None for ref in alive]))

    for tensor in tensors:
        sink.add(0, work(tensor))
    del tensors, tensor
    sink.run(0)
    assert seen == [(1, [True, True]), (1, [False, True])]
    assert [ref() for ref in alive] == [None, None]


def test_a_step_given_up_leaves_no_work_behind():
    sink = GradSink(deferring=True)
    sink.add(0, lambda: pytest.fail("must not run"))
    sink.clear()
    sink.run(0)
    assert sink.pending == 0


def test_gradients_of_16_bit_weights_are_summed_in_the_wide_bucket():
    """1 + 256 x 2^-8: a bf16 sum would stay at 1, since 2^-8 is half a unit there."""
    param = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    param.main_grad = torch.ones(4)
    for _ in range(256):
        accumulate(param, torch.full((4,), 2.0**-8, dtype=torch.bfloat16))
    assert torch.equal(param.main_grad, torch.full((4,), 2.0)) and param.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_linear_adds_into_its_bucket_and_leaves_no_grad_for_autograd(dtype):
    layer = ColumnParallelLinear(8, (2, 6), Axis.single(), bias=True, dtype=dtype)
    layer.reset_parameters(0, 0.5, "layer")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bucket = torch.ones(2 * 6 * 8 + 2 * 6, dtype=wide)
    layer.weight.main_grad, layer.bias.main_grad = bucket[:96].view(2, 6, 8), bucket[96:].view(2, 6)
    x, dout = torch.randn(2, 5, 8, dtype=dtype), torch.randn(2, 5, 12, dtype=dtype)
    layer(x).backward(dout)
    assert layer.weight.grad is None and layer.bias.grad is None
    wanted = 1 + dout.to(wide).flatten(0, 1).t() @ x.to(wide).flatten(0, 1)
    torch.testing.assert_close(layer.weight.main_grad.view(12, 8), wanted)
    torch.testing.assert_close(layer.bias.main_grad.view(12), 1 + dout.to(wide).sum((0, 1)))


class NotingSite(Site):
    """Of a card of one architecture; notes how large the tensors are that a builder makes."""

    def __init__(self, arch: int) -> None:
        super().__init__(torch.device("meta"), None)
        self._arch, self.made = arch, []

    @property
    def arch(self) -> int:
        return self._arch

    def empty(self, shape, dtype):
        self.made.append(math.prod(shape))
        return super().empty(shape, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_on_a_gpu_one_product_adds_into_the_wide_main_gradient(arch, dtype):
    """What `accumulate_linear` launches there for 16 bits: one kernel, whose sum is the bucket itself. Other ways
    make a product [out, in] and add it in a second pass, as is done here for a weight of few tiles."""
    site = NotingSite(arch)
    x, dout = (torch.empty(4096, width, dtype=dtype, device="meta") for width in (4096, 6144))
    main = torch.empty(6144, 4096, device="meta")
    built = matmul_direct.build_wgrad(site, x, dout, main, None, False, True, None, False)
    assert built is not None and built.results[0] is main
    assert len(built.launches) == 1 and not site.made


def test_without_a_bucket_gradients_add_up_in_param_grad_like_autograd_does():
    layer = ColumnParallelLinear(8, 6, Axis.single(), dtype=torch.float64)
    layer.reset_parameters(0, 0.5, "layer")
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    layer(x).square().sum().backward()
    layer(2 * x).sum().backward()
    weight = layer.weight.detach().clone().requires_grad_()
    ((x @ weight.t()).square().sum() + (2 * x @ weight.t()).sum()).backward()
    torch.testing.assert_close(layer.weight.grad, weight.grad)


def test_the_owner_is_told_after_the_gradient_is_there():
    param = nn.Parameter(torch.zeros(3))
    seen = []
    param.on_grad = lambda p: seen.append((p is param, p.grad.clone()))
    accumulate(param, torch.ones(3))
    accumulate_linear(nn.Parameter(torch.zeros(3, 2)), torch.ones(4, 2), torch.ones(4, 3))  # has no owner
    assert len(seen) == 1 and seen[0][0] and torch.equal(seen[0][1], torch.ones(3))


def test_a_weight_used_twice_is_announced_once_per_microbatch():
    param = nn.Parameter(torch.zeros(3))
    add_use(param)
    seen = []
    param.on_grad = seen.append
    for microbatch in range(3):
        notify(param)
        assert len(seen) == microbatch
        notify(param)
        assert len(seen) == microbatch + 1


def test_every_layer_tells_the_owner_once_per_backward():
    axis = Axis.single()
    embed = VocabParallelEmbedding(11, 8, axis)
    norm = RMSNorm(8, axis)
    linear = ColumnParallelLinear(8, 6, axis, bias=True)
    embed.reset_parameters(0, 0.5, "embed"), linear.reset_parameters(0, 0.5, "linear")
    params = [*embed.parameters(), *norm.parameters(), *linear.parameters()]
    seen = []
    for param in params:
        param.on_grad = lambda p: seen.append(id(p))
    for _ in range(2):
        linear(norm(embed(torch.arange(6).view(1, 6)))).sum().backward()
    assert sorted(seen) == sorted(2 * [id(p) for p in params])


def test_a_missing_home_is_made_of_zeros():
    param = nn.Parameter(torch.ones(2, 3))
    assert torch.equal(grad_home(param), torch.zeros(2, 3)) and grad_home(param) is param.grad
