"""embedding on a vocabulary shard, and its weight gradient alone."""

import pytest
import torch

from plait.kernels import embedding, embedding_ref, embedding_wgrad
from tests.cases import TOLERANCE, close, compare, normal


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("vocab_start", [0, 3])
@pytest.mark.parametrize("shape", [(2, 7), (5,), (0,)])
def test_agrees_with_the_oracle(dtype, vocab_start, shape):
    tokens = torch.randint(0, 12, shape, generator=torch.Generator().manual_seed(0))
    compare(
        lambda w: embedding(tokens, w, vocab_start=vocab_start),
        lambda w: embedding_ref(tokens, w, vocab_start=vocab_start),
        normal(5, 4, dtype=dtype),
        factor=2.0,
    )


def test_shards_sum_to_the_whole_table():
    tokens, weight = torch.randint(0, 7, (3, 5)), normal(7, 4)
    parts = embedding(tokens, weight[:4]) + embedding(tokens, weight[4:], vocab_start=4)
    assert torch.equal(parts, embedding(tokens, weight))
    assert torch.equal(parts, torch.nn.functional.embedding(tokens, weight))


def test_a_token_of_another_shard_gives_zero_even_where_the_table_is_not_finite():
    weight = torch.full((2, 4), float("nan"))
    assert (embedding(torch.tensor([5, 9]), weight) == 0).all()


@pytest.mark.parametrize("dtype,out_dtype", [(d, d) for d in TOLERANCE] + [(torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradient_goes_into_a_bucket(dtype, out_dtype, accumulate):
    tokens = torch.tensor([[0, 3, 3], [9, 4, 3]])
    dout = normal(2, 3, 4, dtype=dtype)
    out = torch.full((3, 4), 2.0, dtype=out_dtype)
    embedding_wgrad(tokens, dout, out, vocab_start=2, accumulate=accumulate)
    want = torch.full((3, 4), 2.0 * accumulate, dtype=torch.float64)
    want[1] += dout[0, 1].double() + dout[0, 2].double() + dout[1, 2].double()
    want[2] += dout[1, 1].double()
    close(out, want, dtype, "dweight", 2.0)


def test_gradient_bits_agree_between_runs():
    tokens = torch.randint(0, 3, (2000,), generator=torch.Generator().manual_seed(0))
    weight = normal(3, 8, dtype=torch.float32).requires_grad_()
    dout = normal(2000, 8, dtype=torch.float32)
    runs = [torch.autograd.grad(embedding(tokens, weight), weight, dout)[0] for _ in range(10)]
    assert all(torch.equal(runs[0], run) for run in runs)


def test_bad_input_is_refused():
    with pytest.raises(TypeError, match="tokens are torch.int32"):
        embedding(torch.zeros(2, dtype=torch.int32), torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"expected \[V, D\]"):
        embedding(torch.zeros(2, dtype=torch.int64), torch.ones(3))
    with pytest.raises(ValueError, match="embedding_wgrad"):
        embedding_wgrad(torch.zeros(2, dtype=torch.int64), torch.ones(3, 4), torch.ones(3, 4))
