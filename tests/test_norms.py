"""l2_norm over many tensors against its oracle."""

import pytest
import torch

from plait.kernels import l2_norm, l2_norm_ref, l2_norm_squared, l2_norm_squared_ref
from tests.cases import TOLERANCE, normal

SHAPES = ((5,), (3, 4), (), (0,), (1000,))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_agrees_with_the_oracle(dtype):
    tensors = [normal(*s, dtype=dtype, seed=i) for i, s in enumerate(SHAPES)]
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    for op, oracle in ((l2_norm, l2_norm_ref), (l2_norm_squared, l2_norm_squared_ref)):
        got = op(tensors)
        assert got.dtype is wide and got.dim() == 0
        torch.testing.assert_close(got.double(), oracle([t.double() for t in tensors]), rtol=1e-6, atol=0)


def test_strided_tensors_and_mixed_dtypes():
    tensors = [normal(6, 5).t(), normal(4, 4, dtype=torch.float32)[:, ::2], normal(3, dtype=torch.bfloat16)]
    want = sum(t.double().square().sum() for t in tensors)
    torch.testing.assert_close(l2_norm_squared(tensors), want, rtol=1e-6, atol=0)


def test_sums_in_fp32_what_overflows_in_half():
    assert l2_norm([torch.full((4,), 3e4, dtype=torch.float16)]).item() == 6e4


def test_ten_thousand_scalars_in_one_call():
    assert l2_norm_squared([torch.ones(()) for _ in range(10_000)]).item() == 10_000


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_pass_through(bad):
    got = l2_norm([torch.ones(3), torch.tensor([1.0, bad])])
    assert got.isnan() if bad != bad else got.isinf()


def test_carries_no_gradient_and_refuses_bad_input():
    assert not l2_norm([torch.ones(3, requires_grad=True)]).requires_grad
    with pytest.raises(ValueError, match="no tensors"):
        l2_norm([])
    with pytest.raises(TypeError, match="torch.int64"):
        l2_norm([torch.ones(2).long()])
    with pytest.raises(ValueError, match="tensor is on meta"):
        l2_norm([torch.ones(2), torch.ones(2, device="meta")])
