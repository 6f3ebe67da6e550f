"""rope against its oracle and against the complex numbers that it stands for."""

import pytest
import torch

from plait.kernels import rope, rope_, rope_ref
from tests.cases import TOLERANCE, compare, normal


def _tables(positions, pairs, rotary, theta=10000.0):
    angles = positions.double().unsqueeze(-1) * theta ** (-2.0 * torch.arange(pairs).double() / rotary)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rotary", [8, 4, 0])
@pytest.mark.parametrize("per_sample", [False, True])
def test_agrees_with_the_oracle(dtype, rotary, per_sample):
    positions = torch.arange(10).view(2, 5) if per_sample else torch.arange(5)
    cos, sin = _tables(positions, rotary // 2, max(rotary, 1))
    q, k = normal(2, 5, 4, 8, dtype=dtype), normal(2, 5, 1, 8, dtype=dtype, seed=1)
    compare(lambda q, k: rope(q, k, cos, sin), lambda q, k: rope_ref(q, k, cos, sin), q, k)


def test_partial_rotation_pairs_channels_half_the_rotary_width_apart():
    """Head 8, rotary 4, position 700: pairs (0, 2) and (1, 3) turn by 700 * theta^(-2 i / 4)."""
    cos, sin = _tables(torch.tensor([700]), 2, 4)
    q = normal(1, 1, 1, 8)
    out, _ = rope(q, q, cos, sin)
    for i in range(2):
        turned = torch.complex(q[0, 0, 0, i], q[0, 0, 0, i + 2]) * torch.polar(
            torch.tensor(1.0).double(), torch.tensor(700.0).double() * 10000.0 ** (-2 * i / 4)
        )
        torch.testing.assert_close(torch.complex(out[0, 0, 0, i], out[0, 0, 0, i + 2]), turned)
    assert torch.equal(out[..., 4:], q[..., 4:])


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    cos, sin = _tables(torch.arange(6), 4, 8)
    row = normal(1, 1, 1, 8)
    q, k = rope(row.expand(1, 6, 1, 8), row.expand(1, 6, 1, 8), cos, sin)
    torch.testing.assert_close(q.norm(dim=-1), row.norm().expand(1, 6, 1))
    products = q[0, :, 0] @ k[0, :, 0].t()
    torch.testing.assert_close(products[2, 0], products[5, 3])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_in_place_gives_the_same_bits(dtype):
    cos, sin = _tables(torch.arange(5), 3, 6)
    q, k = normal(2, 5, 4, 8, dtype=dtype), normal(2, 5, 1, 8, dtype=dtype, seed=1)
    want = rope(q, k, cos, sin)
    got = rope_(q, k, cos, sin)
    assert got[0] is q and torch.equal(q, want[0]) and torch.equal(k, want[1])


def test_bad_input_is_refused():
    q, k = torch.ones(1, 5, 2, 8), torch.ones(1, 5, 1, 8)
    for call, error, text in (
        (lambda: rope(q, k, torch.ones(4, 4), torch.ones(4, 4)), ValueError, r"must be \[T, R/2\]"),
        (lambda: rope(q, k, torch.ones(5, 5), torch.ones(5, 5)), ValueError, "needs a head dim of 10"),
        (lambda: rope(q, k[:, :4], torch.ones(5, 4), torch.ones(5, 4)), ValueError, "agree in B, T, K"),
        (lambda: rope(q, k.half(), torch.ones(5, 4), torch.ones(5, 4)), TypeError, "k is torch.float16"),
    ):
        with pytest.raises(error, match=text):
            call()
