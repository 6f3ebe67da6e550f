"""swiglu: forward and gradient against the oracle, on the plain path and on the Triton kernel."""

import pytest
import torch

from plait.kernels import swiglu, swiglu_ref
from tests.cases import TOLERANCE, compare, dtype_support, interpret, needs_interpreter, needs_plain, normal

# (leading dims, F): one element, odd, a power of two, more than one block of columns, no rows, no columns.
SHAPES = (((), 1), ((2, 3), 65), ((4,), 64), ((2,), 1500), ((0,), 8), ((3,), 0))


@needs_plain
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("leading,width", SHAPES)
def test_plain_path_agrees_with_the_oracle(leading, width, dtype):
    compare(swiglu, swiglu_ref, normal(*leading, 2 * width, dtype=dtype))


@interpret
@needs_interpreter
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("leading,width", SHAPES)
def test_triton_agrees_with_the_oracle(leading, width, dtype):
    with dtype_support(dtype):
        compare(swiglu, swiglu_ref, normal(*leading, 2 * width, dtype=dtype))


@interpret
@pytest.mark.parametrize("view", [lambda x: x[:, 1:11], lambda x: x.t(), lambda x: x[:1].expand(6, 12)])
def test_inputs_of_any_stride(view):
    compare(swiglu, swiglu_ref, view(normal(12, 12)))


@interpret
def test_saturated_gates_are_finite():
    gate = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])
    gate_up = torch.cat((gate, torch.full((5,), 2.0))).requires_grad_()
    out = swiglu(gate_up)
    (grad,) = torch.autograd.grad(out.sum(), gate_up)
    assert out.isfinite().all() and grad.isfinite().all()
    torch.testing.assert_close(out, torch.tensor([0.0, 0.0, 0.0, 200.0, 2e4]))


@interpret
def test_backward_twice_gives_the_same_gradient_and_leaves_the_input_alone():
    gate_up = normal(3, 8).requires_grad_()
    produced = gate_up.exp()
    kept = produced.detach().clone()
    loss = swiglu(produced).sum()
    first, second = (torch.autograd.grad(loss, gate_up, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and torch.equal(produced, kept)


@pytest.mark.parametrize(
    "call,error,text",
    [
        (lambda: swiglu(torch.ones(2, 5)), ValueError, "last dim must be even"),
        (lambda: swiglu(torch.ones(2, 4).long()), TypeError, "gate_up is torch.int64"),
    ],
)
def test_bad_input_is_refused_before_any_launch(call, error, text):
    with pytest.raises(error, match=text):
        call()
