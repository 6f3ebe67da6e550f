"""linear with its epilogues, its two gradients as ops of their own, and linear_swiglu, against their oracles."""

import pytest
import torch

from plait.kernels import (
    dropout,
    linear,
    linear_dgrad,
    linear_dgrad_ref,
    linear_ref,
    linear_swiglu,
    linear_swiglu_ref,
    linear_wgrad,
    linear_wgrad_ref,
)
from plait.kernels.matmul import ACTIVATIONS
from tests.cases import TOLERANCE, close, compare, normal

# Leading dims: none, one row, two, three, no rows.
LEADING = ((), (1,), (2, 3), (2, 1, 3), (0,))


@pytest.mark.parametrize("leading", LEADING)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogues_agree_with_the_oracle(activation, leading):
    def run(function):
        return lambda x, w, b, r: function(x, w, b, activation=activation, residual=r)

    inputs = (normal(*leading, 8), normal(5, 8, seed=1), normal(5, seed=2), normal(*leading, 5, seed=3))
    compare(run(linear), run(linear_ref), *inputs)
    compare(
        lambda x, w: linear(x, w, activation=activation),
        lambda x, w: linear_ref(x, w, activation=activation),
        *inputs[:2],
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dtypes(dtype):
    inputs = (normal(6, 8, dtype=dtype), normal(5, 8, dtype=dtype, seed=1), normal(5, dtype=dtype, seed=2))
    compare(linear, linear_ref, *inputs, factor=2.0)
    compare(
        linear_swiglu, linear_swiglu_ref, normal(6, 8, dtype=dtype), normal(10, 8, dtype=dtype, seed=1), factor=4.0
    )


@pytest.mark.parametrize("leading", LEADING)
def test_gradients_as_ops_agree_with_the_oracle_and_have_gradients(leading):
    x, dout, weight = normal(*leading, 8), normal(*leading, 5, seed=1), normal(5, 8, seed=2)
    compare(linear_dgrad, linear_dgrad_ref, dout, weight)
    compare(linear_wgrad, linear_wgrad_ref, x, dout)


@pytest.mark.parametrize("dtype,out_dtype", [(d, d) for d in TOLERANCE] + [(torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradient_goes_into_a_view_of_a_bucket(dtype, out_dtype, accumulate):
    x, dout = normal(2, 3, 8, dtype=dtype), normal(2, 3, 4, dtype=dtype, seed=1)
    bucket = torch.full((50,), 1.0, dtype=out_dtype)
    out = bucket[9:41].view(2, 2, 8)  # a parameter of shape (2, 2, 8) whose rows are the outputs
    assert linear_wgrad(x, dout, out, accumulate) is out
    want = linear_wgrad_ref(x.double(), dout.double()) + float(accumulate)
    close(out.view(4, 8) / 4, want / 4, dtype, "dweight", 2.0)
    assert (bucket[:9] == 1).all() and (bucket[41:] == 1).all()


def test_weight_gradient_summed_over_microbatches_in_fp32_keeps_what_bf16_loses():
    out = torch.full((1, 1), 256.0)
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    for _ in range(4):
        linear_wgrad(one, one, out, accumulate=True)
    assert out.item() == 260.0  # in bf16, 256 + 1 is 256


def test_uninitialised_memory_does_not_leak_into_a_gradient_that_overwrites():
    out = torch.full((4, 8), float("nan"))
    linear_wgrad(normal(3, 8, dtype=torch.float32), normal(3, 4, dtype=torch.float32), out)
    assert out.isfinite().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("leading", [(3,), (2, 3), (0, 3)])
def test_dropout_of_the_epilogue_agrees_with_the_oracle(leading, activation):
    def run(function):
        keywords = {"dropout_p": 0.5, "rng": torch.tensor([1, 2]), "sample_offset": 1, "row_offset": 2}
        return lambda x, w, b, r: function(x, w, b, activation=activation, residual=r, col_offset=3, **keywords)

    compare(
        run(linear), run(linear_ref),
        normal(*leading, 8), normal(5, 8, seed=1), normal(5, seed=2), normal(*leading, 5, seed=3),
    )  # fmt: skip


def test_dropout_of_the_epilogue_is_that_of_the_op():
    x, weight, rng = normal(2, 3, 8), normal(5, 8, seed=1), torch.tensor([1, 2])
    place = {"sample_offset": 1, "row_offset": 2, "col_offset": 3}
    want = dropout(linear(x, weight, activation="silu"), 0.5, rng, **place)
    assert torch.equal(linear(x, weight, activation="silu", dropout_p=0.5, rng=rng, **place), want)
    assert torch.equal(linear(x, weight, dropout_p=0.0), linear(x, weight))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_input_gradient_before_the_activation(activation, dtype):
    dout, weight = normal(2, 3, 5, dtype=dtype), normal(5, 8, dtype=dtype, seed=1)
    pre = normal(2, 3, 8, dtype=dtype, seed=2)
    got = linear_dgrad(dout, weight, pre=pre, activation=activation)
    want = linear_dgrad_ref(dout.double(), weight.double(), pre=pre.double(), activation=activation)
    close(got / 4, want / 4, dtype, "dpre", 2.0)
    # The oracle against autograd: the gradient of act(pre) @ weight^T for dout.
    wide = pre.double().requires_grad_()
    hidden = wide if activation is None else linear_ref(wide, torch.eye(8).double(), activation=activation)
    (auto,) = torch.autograd.grad(hidden @ weight.double().t(), wide, dout.double())
    torch.testing.assert_close(want, auto)


@pytest.mark.parametrize("dtype,out_dtype", [(d, d) for d in TOLERANCE] + [(torch.bfloat16, torch.float32)])
def test_bias_gradient_goes_with_the_weight_gradient(dtype, out_dtype):
    x, dout = normal(2, 3, 8, dtype=dtype), normal(2, 3, 4, dtype=dtype, seed=1)
    out, bias_grad = (
        torch.full((4, 8), float("nan"), dtype=out_dtype),
        torch.full((4,), float("nan"), dtype=out_dtype),
    )
    for _ in range(2):
        linear_wgrad(x, dout, out, accumulate=bool(out.isfinite().all()), bias_grad=bias_grad)
    close(bias_grad / 4, 2 * dout.double().sum((0, 1)) / 4, dtype, "dbias", 2.0)
    close(out / 4, 2 * linear_wgrad_ref(x.double(), dout.double()) / 4, dtype, "dweight", 2.0)


def test_no_input_features_and_several_leading_dims_give_gradients_of_zero_size():
    x, weight = torch.ones(2, 3, 0, requires_grad=True), torch.ones(4, 0, requires_grad=True)
    linear(x, weight).sum().backward()
    assert x.grad.shape == (2, 3, 0) and weight.grad.shape == (4, 0)


def test_bad_input_is_refused_before_any_product():
    x, weight = torch.ones(2, 8), torch.ones(4, 8)
    for call, error, text in (
        (lambda: linear(x, weight.t()), ValueError, "does not fit weight"),
        (lambda: linear(x, weight.half()), TypeError, "weight is torch.float16"),
        (lambda: linear(x, weight, activation="tanh"), ValueError, "activation 'tanh'"),
        (lambda: linear(x, weight, torch.ones(3)), ValueError, "bias has shape"),
        (lambda: linear(x, weight, dropout_p=0.5), ValueError, "needs rng"),
        (lambda: linear(x, weight, dropout_p=1.0), ValueError, "dropout_p is 1.0"),
        (lambda: linear(x, weight, dropout_p=0.5, rng=torch.ones(2)), TypeError, "rng is torch.float32"),
        (lambda: linear(x[0], weight, dropout_p=0.5, rng=torch.tensor([1, 2])), ValueError, "for dropout"),
        (lambda: linear_dgrad(weight, torch.ones(8, 3), pre=x), ValueError, "pre has shape"),
        (
            lambda: linear_dgrad(x, torch.ones(8, 3), pre=torch.ones(2, 3), activation="x"),
            ValueError,
            "activation 'x'",
        ),
        (lambda: linear_wgrad(x, x, bias_grad=torch.ones(8)), ValueError, "needs out"),
        (lambda: linear_wgrad(x, x, torch.ones(8, 8), bias_grad=torch.ones(3)), ValueError, "bias_grad"),
        (lambda: linear(x, weight, residual=torch.ones(4)), ValueError, "residual"),
        (lambda: linear_swiglu(x, torch.ones(3, 8)), ValueError, "expected an even number"),
        (lambda: linear_dgrad(x, weight), ValueError, "dout"),
        (lambda: linear_wgrad(x, torch.ones(3, 4)), ValueError, "must agree"),
        (lambda: linear_wgrad(x, torch.ones(2, 4), torch.ones(8, 4).t()), ValueError, "must be contiguous"),
        (lambda: linear_wgrad(x, torch.ones(2, 4), torch.ones(4, 8).half()), TypeError, "out is torch.float16"),
    ):
        with pytest.raises(error, match=text):
            call()
