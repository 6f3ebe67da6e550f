"""rms_norm: forward and every gradient against the oracle, on the plain path and on the Triton kernel."""

import pytest
import torch

from plait.kernels import rms_norm, rms_norm_ref
from tests.cases import (
    TOLERANCE,
    WIDTHS,
    compare,
    dtype_support,
    interpret,
    needs_interpreter,
    needs_plain,
    normal,
)

# Shapes around the width: none, one row, several leading dims, no rows at all.
LEADING = ((), (1,), (2, 3), (0,))


def _plain(x, weight):
    return rms_norm(x, weight)


def _plain_ref(x, weight):
    return rms_norm_ref(x, weight)


def _residual(x, weight, residual):
    return rms_norm(x, weight, residual=residual)


def _residual_ref(x, weight, residual):
    return rms_norm_ref(x, weight, residual=residual)


def _check(leading, width, dtype):
    x, weight = normal(*leading, width, dtype=dtype), normal(width, dtype=dtype, seed=1)
    compare(_plain, _plain_ref, x, weight)
    # The sum is rounded to the dtype before it is normalised; the fp64 oracle cannot see that.
    if dtype in (torch.float64, torch.float32):
        compare(_residual, _residual_ref, x, weight, normal(*leading, width, dtype=dtype, seed=2))


@needs_plain
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("leading", LEADING)
def test_plain_path_agrees_with_the_oracle(leading, width, dtype):
    _check(leading, width, dtype)


@interpret
@needs_interpreter
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("leading,width", [((), 1), ((2, 3), 65), ((300,), 3), ((1,), 1000), ((0,), 64)])
def test_triton_agrees_with_the_oracle(leading, width, dtype):
    # 300 rows are more than the programs of the backward pass: some take two rows.
    with dtype_support(dtype):
        _check(leading, width, dtype)


def _strided(dtype):
    """Sliced, transposed, broadcast and unaligned inputs of width 6."""
    wide = normal(5, 13, dtype=dtype)
    return {
        "sliced": wide[:, 3:9],
        "stepped": wide[:, 0:12:2],
        "transposed": normal(6, 5, dtype=dtype).t(),
        "broadcast": normal(1, 6, dtype=dtype).expand(5, 6),
    }


@interpret
@pytest.mark.parametrize("layout", ["sliced", "stepped", "transposed", "broadcast"])
def test_inputs_of_any_stride(layout):
    x = _strided(torch.float64)[layout]
    compare(_plain, _plain_ref, x, normal(6, seed=1))


@needs_plain
@pytest.mark.parametrize("layout", ["sliced", "stepped", "transposed", "broadcast"])
def test_inputs_of_any_stride_on_the_plain_path(layout):
    x = _strided(torch.float64)[layout]
    compare(_plain, _plain_ref, x, normal(6, seed=1))


@interpret
def test_stride_zero_and_stepped_gradients_are_not_read_as_contiguous():
    """`sum().backward()` hands in a gradient of stride 0; a slice of the output one of step 2."""
    x, weight = normal(4, 8).requires_grad_(), normal(8, seed=1).requires_grad_()
    for pick in (lambda y: y.sum(), lambda y: (y[..., ::2] * normal(4, 4, seed=3)).sum()):
        got = torch.autograd.grad(pick(rms_norm(x, weight)), (x, weight))
        want = torch.autograd.grad(pick(rms_norm_ref(x, weight)), (x, weight))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


@interpret
def test_gradients_do_not_overwrite_what_a_producer_saved():
    x, weight = normal(3, 8).requires_grad_(), normal(8, seed=1).requires_grad_()
    produced = x.exp()
    loss = rms_norm(produced, weight).square().sum()
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    want = torch.autograd.grad(rms_norm_ref(x.exp(), weight).square().sum(), (x, weight))
    for a, b, c in zip(first, second, want, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c)


@interpret
def test_huge_row_stride_does_not_overflow_32_bits():
    stride = (1 << 30) + 16
    storage = torch.empty(2 * stride + 8, dtype=torch.float16)  # never touched but for three rows
    x = storage.as_strided((3, 8), (stride, 1))
    x.copy_(normal(3, 8))
    got = rms_norm(x, normal(8, dtype=torch.float16, seed=1))
    want = rms_norm_ref(x.contiguous(), normal(8, dtype=torch.float16, seed=1))
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


@interpret
def test_nan_and_inf_stay_in_their_row():
    x = normal(3, 8, dtype=torch.float32)
    x[0, 2], x[1, 5] = float("nan"), float("inf")
    y = rms_norm(x, torch.ones(8))
    assert y[0].isnan().all()
    assert torch.equal(y.isnan(), rms_norm_ref(x, torch.ones(8)).isnan())
    assert y[2].isfinite().all()


@interpret
def test_rows_are_independent_of_their_order():
    x, weight = normal(7, 65, dtype=torch.float32), normal(65, dtype=torch.float32, seed=1)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    assert torch.equal(rms_norm(x, weight)[order], rms_norm(x[order], weight))


@pytest.mark.parametrize(
    "call,error,text",
    [
        (lambda: rms_norm(torch.ones(2, 4), torch.ones(5)), ValueError, "needs weight of its last dim"),
        (lambda: rms_norm(torch.ones(2, 4), torch.ones(4).half()), TypeError, "weight is torch.float16"),
        (lambda: rms_norm(torch.ones(2, 4).int(), torch.ones(4)), TypeError, "x is torch.int32"),
        (lambda: rms_norm(torch.ones(2, 4), torch.ones(4), residual=torch.ones(4)), ValueError, "residual has shape"),
        (lambda: rms_norm(torch.ones(2, 4), torch.ones(4, device="meta")), ValueError, "weight is on meta"),
    ],
)
def test_bad_input_is_refused_before_any_launch(call, error, text):
    with pytest.raises(error, match=text):
        call()
