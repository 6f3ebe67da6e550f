"""linear with its epilogues, its two gradients as ops of their own, and linear_swiglu, against their oracles."""

import pytest
import torch

from plait.kernels import (
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


def test_bad_input_is_refused_before_any_product():
    x, weight = torch.ones(2, 8), torch.ones(4, 8)
    for call, error, text in (
        (lambda: linear(x, weight.t()), ValueError, "does not fit weight"),
        (lambda: linear(x, weight.half()), TypeError, "weight is torch.float16"),
        (lambda: linear(x, weight, activation="tanh"), ValueError, "activation 'tanh'"),
        (lambda: linear(x, weight, torch.ones(3)), ValueError, "bias has shape"),
        (lambda: linear(x, weight, residual=torch.ones(4)), ValueError, "residual"),
        (lambda: linear_swiglu(x, torch.ones(3, 8)), ValueError, "expected an even number"),
        (lambda: linear_dgrad(x, weight), ValueError, "dout"),
        (lambda: linear_wgrad(x, torch.ones(3, 4)), ValueError, "must agree"),
        (lambda: linear_wgrad(x, torch.ones(2, 4), torch.ones(8, 4).t()), ValueError, "must be contiguous"),
        (lambda: linear_wgrad(x, torch.ones(2, 4), torch.ones(4, 8).half()), TypeError, "out is torch.float16"),
    ):
        with pytest.raises(error, match=text):
            call()
