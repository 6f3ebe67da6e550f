"""The ops under the modes of torch that change what a call means: autocast, gradients of gradients, another card."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode

from plait import kernels
from plait.bench import suite_launch
from plait.kernels import launch, tables
from plait.kernels.launch import Launch
from tests.cases import needs_compiler, needs_plain, normal

pytestmark = needs_plain
TARGET = torch.tensor([0, 2, 1])

# name -> (op, its oracle, shapes of what it differentiates); one argument after the other is a leaf.
OPS = {
    "linear": (kernels.linear, kernels.linear_ref, ((3, 4), (6, 4))),
    "linear silu": (
        lambda x, w: kernels.linear(x, w, activation="silu"),
        lambda x, w: kernels.linear_ref(x, w, activation="silu"),
        ((3, 4), (6, 4)),
    ),
    "linear_swiglu": (kernels.linear_swiglu, kernels.linear_swiglu_ref, ((3, 4), (6, 4))),
    "swiglu": (kernels.swiglu, kernels.swiglu_ref, ((3, 4),)),
    "geglu": (kernels.geglu, kernels.geglu_ref, ((3, 4),)),
    "rms_norm": (kernels.rms_norm, kernels.rms_norm_ref, ((3, 4), (4,))),
    "layer_norm": (kernels.layer_norm, kernels.layer_norm_ref, ((3, 4), (4,), (4,))),
    "attention": (kernels.attention, kernels.attention_ref, ((1, 3, 2, 16),) * 3),
    "cross_entropy": (
        lambda x: kernels.cross_entropy(x, TARGET), lambda x: kernels.cross_entropy_ref(x, TARGET), ((3, 5),)
    ),
    "linear_cross_entropy": (
        lambda x, w: kernels.linear_cross_entropy(x, w, TARGET),
        lambda x, w: kernels.linear_cross_entropy_ref(x, w, TARGET),
        ((3, 4), (5, 4)),
    ),
    "linear_cross_entropy, gradients in the backward": (
        lambda x, w: kernels.linear_cross_entropy(x, w, TARGET, grad_in_forward=False),
        lambda x, w: kernels.linear_cross_entropy_ref(x, w, TARGET),
        ((3, 4), (5, 4)),
    ),
}  # fmt: skip
TWICE = ("linear",)  # the others have one derivative


def _leaves(shapes, dtype):
    return [normal(*shape, seed=i).to(dtype).requires_grad_() for i, shape in enumerate(shapes)]


def _gradients(op, leaves):
    return torch.autograd.grad(op(*leaves).square().sum(), leaves, create_graph=True)


@pytest.mark.parametrize("name", OPS)
def test_a_gradient_with_a_graph_is_the_gradient(name):
    op, oracle, shapes = OPS[name]
    leaves = _leaves(shapes, torch.float64)
    for found, expected in zip(_gradients(op, leaves), _gradients(oracle, leaves), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", OPS)
def test_a_second_derivative_is_right_or_refused_and_never_a_part_of_it(name):
    op, oracle, shapes = OPS[name]
    leaves = _leaves(shapes, torch.float64)

    def second(function):
        # The cubes have a second derivative of their own, which alone would be a wrong answer.
        first = _gradients(lambda *xs: function(*xs).sum() + sum(x.pow(3).sum() for x in xs), leaves)
        return torch.autograd.grad(sum(x.square().sum() for x in first), leaves)

    if name not in TWICE:
        with pytest.raises(RuntimeError, match="has no second derivative"):
            second(op)
        return
    for found, expected in zip(second(op), second(oracle), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", OPS)
def test_autocast_changes_neither_dtype_nor_bits(name):
    """Inside of an op torch's own products would turn to bf16: on the CPU, and on a card where torch multiplies."""
    op, _, shapes = OPS[name]
    leaves = _leaves(shapes, torch.float32)
    expected = op(*leaves)
    gradients = torch.autograd.grad(expected.sum(), leaves)
    with torch.autocast("cpu", torch.bfloat16):
        found = op(*leaves)
        with torch.no_grad():
            assert torch.equal(op(*leaves), expected)
        under = torch.autograd.grad(found.sum(), leaves)
    assert found.dtype == torch.float32 and torch.equal(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(under, gradients, strict=True))


@needs_compiler
def test_a_tensor_of_another_card_is_computed_on_its_own(monkeypatch):
    """Launched on the current card it would be read across cards, on a stream that waits for nothing, or fault."""
    current, seen = [0], []

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            self.before, current[0] = current[0], self.device

        def __exit__(self, *error):
            current[0] = self.before

    class OnCard(torch.Tensor):
        def get_device(self):
            return 1

    class Kernel(triton.JITFunction):
        def __init__(self):
            self.arg_names = ["x_ptr"]

        def __hash__(self):
            return 2

        def __eq__(self, other):
            return self is other

    def compiled(kernel, device, *others):
        return {(5, 1, 1): lambda *arguments: seen.append((device, current[0]))}, ()

    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(launch, "_compiled", compiled)
    with suite_launch.stubbed():
        monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(get_current_device=lambda: current[0]))
        Launch(Kernel(), (5,), (torch.zeros(4).as_subclass(OnCard),), {}).run()
    assert seen == [(1, 1)] and current == [0]


def _forget():
    launch._compiled.cache_clear()
    launch._compiled_kind.cache_clear()


@needs_compiler
def test_offsets_that_change_from_step_to_step_do_not_ask_triton_again():
    """More offsets than the first cache holds, in turn, were 60 us each: what triton takes to tell its arguments."""

    class Kernel(triton.JITFunction):
        def __init__(self):
            self.arg_names, self.asked = ["x_ptr", "offset"], 0

        def __hash__(self):
            return 3

        def __eq__(self, other):
            return self is other

        def warmup(self, *arguments, **keywords):
            self.asked += 1
            return defaultdict(lambda: lambda *arguments: None)

    kernel, x = Kernel(), torch.zeros(4)
    with suite_launch.stubbed():
        for offset in (*range(5000), *range(5000)):
            Launch(kernel, (1,), (x, offset), {}).run()
    _forget()
    assert kernel.asked == 3  # 1, divisible by 16, other


@needs_compiler
def test_a_table_written_in_a_capture_needs_no_kernel_that_was_not_loaded_before(monkeypatch):
    """A module may not be loaded while a stream is captured; a count of 1 or 32 was a kernel of its own."""
    compiled = []
    _forget()
    with suite_launch.stubbed():
        monkeypatch.setattr(
            triton.compiler, "compile", lambda *a, **k: compiled.append(a) or suite_launch._Unlaunched()
        )
        monkeypatch.setattr(tables._write_numbers, "device_caches", defaultdict(tables._write_numbers.create_binder))
        for count in (1, 5, 16, 32, 33, 64):
            for one in tables.write_launches([2**40 + i for i in range(count)], torch.empty(64, dtype=torch.int64)):
                one.run()
    _forget()
    assert len(compiled) == 1


def test_a_backward_of_fake_tensors_looks_at_no_value():
    """What estimates memory runs forward and backward on fake CPU tensors, outside of the compiler."""
    with FakeTensorMode():
        x, weight = torch.ones(3, 4, requires_grad=True), torch.ones(5, 4, requires_grad=True)
        kernels.linear_cross_entropy(x, weight, torch.zeros(3, dtype=torch.int64)).backward()
    assert x.grad.shape == (3, 4) and weight.grad.shape == (5, 4)


def test_weights_that_add_up_to_zero_have_the_gradient_of_a_constant_divisor():
    target = torch.tensor([0, 1, 2, 1])
    for values in ([1.0, -1.0, 1.0, -1.0], [1.0, -1.0, 3.0, 0.0], [0.0] * 4):
        found = []
        for op in (kernels.linear_cross_entropy, kernels.linear_cross_entropy_ref):
            x, head = normal(4, 3).double().requires_grad_(), normal(5, 3, seed=1).double()
            weights = torch.tensor(values, dtype=torch.float64, requires_grad=True)
            op(x, head, target, weight_per_token=weights).backward()
            found.append(weights.grad)
        torch.testing.assert_close(*found)


X, HEAD, LSE = torch.ones(3, 4), torch.ones(5, 4), torch.ones(3)
RNG = torch.tensor([1, 2])


def _head_grad(lse=LSE, dloss=LSE, **options):
    return kernels.linear_cross_entropy_grad(X, HEAD, TARGET, lse, dloss, num_classes=5, **options)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: _head_grad(lse=torch.ones(2)), ValueError, r"lse \(2,\)"),
        (lambda: _head_grad(dloss=torch.ones(())), ValueError, r"dloss \(\)"),
        (lambda: _head_grad(lse=LSE.double()), TypeError, "lse is torch.float64"),
        (lambda: _head_grad(out=HEAD.half()), TypeError, "out is torch.float16"),
        (lambda: kernels.linear_dgrad(torch.ones(3, 5), HEAD, activation="silu"), ValueError, "needs pre"),
        (lambda: kernels.linear(X, HEAD, dropout_p=0.5, rng=RNG, row_offset=-1), ValueError, "row_offset is -1"),
        (
            lambda: kernels.attention(*[torch.ones(1, 2, 1, 16)] * 3, dropout_p=0.5, rng=RNG, head_offset=-1),
            ValueError,
            "head_offset is -1",
        ),
    ],
)
def test_an_argument_that_a_kernel_would_read_past_or_ignore_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_rotating_in_place_what_a_graph_needs_is_refused():
    """The kernel writes behind autograd's back: the gradient came out as if nothing had been turned."""
    leaf, k, angle = torch.ones(1, 3, 2, 8, requires_grad=True), torch.ones(1, 3, 1, 8), torch.ones(3, 4)
    with pytest.raises(ValueError, match="q requires a gradient"):
        kernels.rope_(leaf * 1, k, angle.cos(), angle.sin())
    with torch.no_grad():
        kernels.rope_(leaf, k, angle.cos(), angle.sin())


def test_a_main_gradient_stays_out_of_the_graph_of_what_is_added_to_it():
    x = torch.ones(3, 4, requires_grad=True)
    weight, table = torch.zeros(5, 4), torch.zeros(5, 4)
    kernels.linear_wgrad(x, torch.ones(3, 5), weight, True)
    kernels.embedding_wgrad(TARGET, x, table, accumulate=True)
    assert weight.sum() > 0 and table.sum() > 0
    assert not weight.requires_grad and not table.requires_grad
