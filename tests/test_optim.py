"""adamw_ against its oracle and torch's AdamW, with master weights, a gradient factor on the device, many tensors."""

import pytest
import torch

from plait.kernels import adamw_, adamw_ref
from tests.cases import normal

NUMBERS = dict(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
SHAPES = ((5,), (3, 4), (), (0,), (129,))


def _state(dtype, wide, master):
    params = [normal(*s, dtype=dtype, seed=i) for i, s in enumerate(SHAPES)]
    masters = [normal(*s, dtype=wide, seed=i) for i, s in enumerate(SHAPES)] if master else None
    moments = [[torch.zeros(s, dtype=wide) for s in SHAPES] for _ in range(2)]
    return params, *moments, masters


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("scale", [None, 0.5, torch.tensor(0.5)])
def test_three_steps_agree_with_the_oracle_and_every_dtype_stays_what_it_is(dtype, master, scale):
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    params, averages, squares, masters = _state(dtype, wide, master)
    want = [[p.clone(), m.clone(), v.clone(), None] for p, m, v in zip(params, averages, squares, strict=True)]
    if masters:
        for row, weight in zip(want, masters, strict=True):
            row[3] = weight.clone()
    for step in (1, 2, 3):
        grads = [normal(*s, dtype=dtype, seed=10 * step + i) for i, s in enumerate(SHAPES)]
        adamw_(params, grads, averages, squares, masters, step=step, grad_scale=scale, **NUMBERS)
        for i, (p, m, v, w) in enumerate(want):
            p, m, v, wide_weight = adamw_ref(p, grads[i], m, v, w, step=step, grad_scale=scale, **NUMBERS)
            want[i] = [p, m, v, wide_weight if master else None]
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    coarse = tolerance if dtype in (torch.float64, torch.float32) else {"rtol": 1e-2, "atol": 1e-2}
    for i, (p, m, v, w) in enumerate(want):
        assert params[i].dtype is dtype and averages[i].dtype is squares[i].dtype is wide
        torch.testing.assert_close(params[i], p, **coarse)
        torch.testing.assert_close(averages[i], m, **tolerance)
        torch.testing.assert_close(squares[i], v, **tolerance)
        if masters:
            assert masters[i].dtype is wide
            torch.testing.assert_close(masters[i], w, **tolerance)
            assert torch.equal(params[i], masters[i].to(dtype))


def test_torch_agrees():
    weight = torch.nn.Parameter(normal(4, 5))
    mine, moments = weight.detach().clone(), [torch.zeros(4, 5, dtype=torch.float64) for _ in range(2)]
    peer = torch.optim.AdamW([weight], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, 5):
        weight.grad = normal(4, 5, seed=step)
        peer.step()
        adamw_([mine], [weight.grad], [moments[0]], [moments[1]], step=step, **NUMBERS)
    torch.testing.assert_close(mine, weight.detach(), rtol=1e-12, atol=1e-12)


def test_fp32_gradients_step_bf16_parameters():
    params, averages, squares, masters = _state(torch.bfloat16, torch.float32, True)
    grads = [normal(*s, dtype=torch.float32, seed=9) for s in SHAPES]
    before = [m.clone() for m in masters]
    adamw_(params, grads, averages, squares, masters, step=1, **NUMBERS)
    assert all((a != b).all() for a, b in zip(before, masters, strict=True))
    torch.testing.assert_close(averages[0], 0.1 * grads[0])


def test_ten_thousand_scalars_in_one_call():
    params = [torch.tensor(1.0) for _ in range(10_000)]
    grads, averages, squares = ([torch.full((), value) for _ in params] for value in (1.0, 0.0, 0.0))
    adamw_(params, grads, averages, squares, step=1, **NUMBERS)
    values = torch.stack(params)
    assert (values == values[0]).all() and values[0] < 1.0


def test_a_split_tensor_steps_as_the_whole_one():
    whole, parts = normal(64), normal(64)
    grad = normal(64, seed=1)
    moments = [torch.zeros(64, dtype=torch.float64) for _ in range(4)]
    adamw_([whole], [grad], [moments[0]], [moments[1]], step=1, **NUMBERS)
    cut = [slice(0, 7), slice(7, 64)]
    adamw_(
        [parts[c] for c in cut], [grad[c] for c in cut], [moments[2][c] for c in cut], [moments[3][c] for c in cut],
        step=1, **NUMBERS,
    )  # fmt: skip
    torch.testing.assert_close(whole, parts, rtol=1e-14, atol=1e-14)


def test_strided_tensors_step_as_contiguous_ones():
    strided, plain = normal(6, 5).t(), normal(6, 5).t().contiguous()
    grad = normal(5, 6, seed=1)
    moments = [torch.zeros(5, 6, dtype=torch.float64) for _ in range(4)]
    adamw_([strided], [grad], [moments[0]], [moments[1]], step=2, **NUMBERS)
    adamw_([plain], [grad], [moments[2]], [moments[3]], step=2, **NUMBERS)
    torch.testing.assert_close(strided, plain, rtol=1e-14, atol=1e-14)


def test_bad_input_is_refused():
    one, two = [torch.ones(2)], [torch.ones(3)]

    def step(*lists):
        adamw_(*lists, step=1, **NUMBERS)

    for call, error, text in (
        (lambda: step(one, [], one, one), ValueError, "0 grads for 1 params"),
        (lambda: step(one, two, one, one), ValueError, r"grads\[0\] has shape"),
        (lambda: step(one, one, [torch.ones(2).half()], one), TypeError, "expected torch.float32"),
        (lambda: adamw_(one, one, one, one, step=0, **NUMBERS), ValueError, "step is 0"),
        (lambda: step([*one, torch.ones(2).half()], one * 2, one * 2, one * 2), ValueError, "several"),
    ):
        with pytest.raises(error, match=text):
            call()
    adamw_([], [], [], [], step=1, **NUMBERS)
