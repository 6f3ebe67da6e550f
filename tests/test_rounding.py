"""Stochastic rounding: a neighbour of the number, the mean kept, bits fixed by key and index, edges of the dtypes."""

import pytest
import torch

from plait.kernels import adamw_
from plait.kernels.rounding import stochastic_round_ref
from tests.cases import dtype_support, interpret, needs_interpreter

RNG = torch.tensor([5, 9])


def _round(x, dtype, first_index=0):
    return stochastic_round_ref(x, dtype, RNG, first_index)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [1.0 + 2**-11, -3.14159, 1e-7, 2.0**-20, -(2.0**-26), 60000.0, 1e-39])
def test_stochastic_rounding_gives_a_neighbour_and_keeps_the_mean(dtype, value):
    x = torch.full((1 << 16,), value)
    got, nearest = _round(x, dtype).double(), x[0].to(dtype)
    away = torch.nextafter(nearest, torch.tensor(float("inf") if nearest < x[0] else -float("inf"), dtype=dtype))
    gap = (away.double() - nearest.double()).abs().item()
    assert ((got == nearest.double()) | (got == away.double())).all()
    assert abs(got.mean().item() - x[0].double().item()) <= 6 * 0.5 * gap / len(x) ** 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_leaves_exact_values_and_what_is_not_finite(dtype):
    largest = torch.finfo(dtype).max
    beyond = torch.nextafter(torch.tensor(largest), torch.tensor(float("inf"))).item()
    nan = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    for value in (0.0, -0.0, 1.5, -largest, beyond, float("inf"), -float("inf")):
        x = torch.full((64,), value)
        assert torch.equal(_round(x, dtype), x.to(dtype)), value
        assert torch.equal(_round(x, dtype).signbit(), x.signbit()), value
    assert _round(nan.repeat(32), dtype).isnan().all()


def test_random_words_follow_a_64_bit_index():
    x = torch.full((1000,), 1.001)
    whole = _round(x, torch.bfloat16, 2**32 - 500)
    for cut in (1, 2, 3, 500, 777):
        assert torch.equal(_round(x[cut:], torch.bfloat16, 2**32 - 500 + cut), whole[cut:])
    assert not torch.equal(whole[500:], _round(x[500:], torch.bfloat16, 0))


@interpret
@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_triton_rounds_numbers_at_the_edges_as_the_oracle(dtype):
    """With zero moments and gradients and no decay a step only rounds."""
    info = torch.finfo(dtype)
    edges = [0.0, -0.0, 1e-45, 2.0**-24, 3e-8, 6.1e-5, 1.0001, -1.5, info.max, info.max * 1.0009, float("inf")]
    master = torch.tensor([*edges, -float("inf"), float("nan"), 65519.0, 65521.0, 3.3961e38]).repeat(40)
    param, zeros = torch.zeros(master.numel(), dtype=dtype), [torch.zeros_like(master) for _ in range(3)]
    want = _round(master, dtype)
    with dtype_support(torch.bfloat16):
        numbers = dict(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0)
        adamw_([param], [zeros[0]], [zeros[1]], [zeros[2]], [master], step=1, rng=RNG, **numbers)
    assert torch.equal(param.isnan(), want.isnan())
    assert torch.equal(param.nan_to_num(0.0, 1.0, -1.0), want.nan_to_num(0.0, 1.0, -1.0))
    assert torch.equal(param.isinf(), want.isinf())
