"""embedding on a vocabulary shard, and its weight gradient alone."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from plait.kernels import embedding, embedding_ref, embedding_wgrad
from tests.cases import (
    TOLERANCE,
    close,
    compare,
    dtype_support,
    interpret,
    needs_interpreter,
    normal,
    slow_interpreted,
)
from tests.edges import no_32_bit_overflow


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


@interpret
@pytest.mark.parametrize("padding_idx", [0, 3, 6])
def test_padding_idx_gives_its_row_and_no_gradient_as_in_torch_also_on_shards(padding_idx):
    tokens = torch.tensor([[0, 3, 3, 6], [6, 1, 0, 3]])
    weight, dout = normal(7, 4).requires_grad_(), normal(2, 4, 4, seed=1)
    want = torch.nn.functional.embedding(tokens, weight, padding_idx=padding_idx)
    (want_grad,) = torch.autograd.grad(want, weight, dout)
    got = embedding(tokens, weight, padding_idx=padding_idx)
    assert torch.equal(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, weight, dout)[0], want_grad)
    parts = [embedding(tokens, weight[a:b], vocab_start=a, padding_idx=padding_idx) for a, b in ((0, 4), (4, 7))]
    assert torch.equal(sum(parts), want)
    torch.testing.assert_close(torch.autograd.grad(sum(parts), weight, dout)[0], want_grad)
    with pytest.raises(ValueError, match="padding_idx is -1; expected none below 0"):
        embedding(tokens, weight, padding_idx=-1)


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
    with pytest.raises(TypeError, match="tokens are torch.int32"):
        embedding_wgrad(torch.zeros(2, dtype=torch.int32), torch.ones(2, 4), torch.ones(3, 4))
    with pytest.raises(ValueError, match="share memory"):
        embedding_wgrad(torch.zeros(2, dtype=torch.int64), torch.ones(2, 4), torch.ones(1, 4).expand(3, 4))
    with pytest.raises(ValueError, match="out is on meta"):
        embedding_wgrad(torch.zeros(2, dtype=torch.int64), torch.ones(2, 4), torch.ones(3, 4, device="meta"))
    with pytest.raises(ValueError, match="embedding_wgrad"):
        embedding_wgrad(torch.zeros(2, dtype=torch.int64), torch.ones(3, 4), torch.ones(3, 4))


# ---- the kernels ----

# (tokens, rows, width): nothing, one, one window exactly, runs across windows, one run of many windows, wide rows.
SIZES = ((0, 3, 4), (1, 1, 1), (16, 3, 5), (17, 20, 3), (100, 3, 8), (400, 1, 4), (40, 7, 1100), (5, 3, 0))


def _tokens(count, num_rows, start):
    """Tokens of this shard and of its neighbours."""
    return torch.randint(start - 1, start + num_rows + 1, (count,), generator=torch.Generator().manual_seed(count))


def _sums(tokens, dout, out, start, accumulate):
    """The oracle of the gradient in fp64."""
    want = out.double() if accumulate else torch.zeros(out.shape, dtype=torch.float64)
    inside = (tokens >= start) & (tokens < start + out.shape[0])
    return want.index_add_(0, tokens[inside] - start, dout[inside].double())


@interpret
@needs_interpreter
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("count,num_rows,width", SIZES)
def test_triton_copies_rows_bit_for_bit(count, num_rows, width, dtype):
    tokens, weight = _tokens(count, num_rows, 5), normal(num_rows, width, dtype=dtype)
    with dtype_support(dtype):
        got = embedding(tokens, weight, vocab_start=5)
    assert torch.equal(got, embedding_ref(tokens, weight, vocab_start=5))


@interpret
@needs_interpreter
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, *map(slow_interpreted, (torch.float16, torch.float64))]
)
@pytest.mark.parametrize("count,num_rows,width", SIZES)
def test_triton_gradient_agrees_with_the_oracle(count, num_rows, width, dtype):
    tokens, dout = _tokens(count, num_rows, 5), normal(count, width, dtype=dtype, seed=1)
    weight = normal(num_rows, width, dtype=dtype).requires_grad_()
    with dtype_support(dtype):
        (grad,) = torch.autograd.grad(embedding(tokens, weight, vocab_start=5), weight, dout)
    assert grad.dtype is dtype
    # Sums are fp32 and rounded once: no factor for the number of tokens.
    want = _sums(tokens, dout, weight, 5, False)
    close(grad, want, dtype, "dweight", max(1.0, float(want.abs().max()) if want.numel() else 1.0))


LAYOUTS = {
    "plain": lambda x: x,
    "moved": lambda x: torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x),
    "transposed": lambda x: x.t().contiguous().t(),
    "stepped": lambda x: torch.full((x.shape[0], 2 * x.shape[1]), 7.0, dtype=x.dtype)[:, ::2].copy_(x),
}


@interpret
@needs_interpreter
@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 120),
    st.integers(1, 7),
    st.integers(1, 6),
    st.integers(0, 40),
    st.integers(0, 3),
    st.sampled_from([(d, d) for d in TOLERANCE] + [(torch.bfloat16, torch.float32), (torch.float16, torch.float32)]),
    st.booleans(),
    st.sampled_from(list(LAYOUTS)),
    st.sampled_from([*LAYOUTS, "broadcast"]),
)
def test_whole_numbers_are_summed_exactly(
    count, spread, num_rows, width, start, dtypes, accumulate, out_layout, layout
):
    """Sums of small whole numbers have one right answer in every dtype and order; other shards stay out.

    Few distinct tokens make runs across windows. The rows around `out` must keep what they hold.
    """
    generator = torch.Generator().manual_seed(1000 * count + width)
    tokens = torch.randint(0, spread, (count,), generator=generator)
    dout = torch.randint(-1, 2, (count, width), generator=generator).to(dtypes[0])
    dout = dout[:1].expand(count, width) if layout == "broadcast" else LAYOUTS[layout](dout)
    home = LAYOUTS[out_layout](normal(num_rows + 2, width).round().to(dtypes[1]))
    out, around = home[1:-1], home[[0, -1]].clone()
    want = _sums(tokens, dout, out, start, accumulate)
    with dtype_support(torch.bfloat16):
        embedding_wgrad(tokens, dout, out, vocab_start=start, accumulate=accumulate)
    assert torch.equal(out.double(), want) and torch.equal(home[[0, -1]], around)


@interpret
@needs_interpreter
def test_tokens_of_one_window_are_added_in_their_order():
    """fp32 sums of 16 tokens: the bits of adding one after the other."""
    tokens, dout = torch.tensor([2, 0, 2, 2, 0, 2, 2, 2]), normal(8, 5, dtype=torch.float32) * 1e4
    want = torch.zeros(3, 5)
    for token, row in zip(tokens.tolist(), dout, strict=True):
        want[token] += row
    assert torch.equal(embedding_wgrad(tokens, dout, torch.empty(3, 5)), want)


@interpret
@needs_interpreter
@pytest.mark.parametrize("count", [17 * 16, 17 * 16 + 1, 35 * 16])
def test_a_run_of_more_windows_than_one_pass_adds(count):
    dout = torch.ones(count + 9, 2)
    tokens = torch.cat((torch.full((count,), 1), torch.tensor([0] * 5 + [2] * 4)))
    assert embedding_wgrad(tokens, dout, torch.empty(3, 2))[:, 0].tolist() == [5.0, count, 4.0]


@interpret
@needs_interpreter
def test_gradient_bits_of_the_kernel_agree_between_runs():
    tokens = torch.randint(0, 3, (100,), generator=torch.Generator().manual_seed(0))
    dout = normal(100, 8, dtype=torch.float32)
    runs = [embedding_wgrad(tokens, dout, torch.empty(3, 8)) for _ in range(3)]
    assert all(torch.equal(runs[0], run) for run in runs)


@interpret
@needs_interpreter
@pytest.mark.parametrize("starts", [(0, 1, 4, 7), (0, 0, 7)])
def test_gradient_bits_of_shards_are_those_of_the_whole_table(starts):
    """Windows are cut where they are for the whole: a run is added in the same groups."""
    tokens = torch.randint(-1, 8, (120,), generator=torch.Generator().manual_seed(0))
    dout = normal(120, 8, dtype=torch.float32)
    shards = [
        embedding_wgrad(tokens, dout, torch.empty(stop - start, 8), vocab_start=start)
        for start, stop in itertools.pairwise(starts)
    ]
    assert torch.equal(torch.cat(shards), embedding_wgrad(tokens, dout, torch.empty(7, 8)))


@interpret
@needs_interpreter
def test_rows_without_a_token_keep_their_bits_when_accumulating():
    out = torch.full((4, 3), float("nan"))
    out[1] = 1.0
    embedding_wgrad(torch.tensor([1, 1]), torch.ones(2, 3), out, accumulate=True)
    assert out[1].tolist() == [3.0] * 3 and out[[0, 2, 3]].isnan().all()
    embedding_wgrad(torch.tensor([1, 1]), torch.ones(2, 3), out)
    assert out.tolist() == [[0.0] * 3, [2.0] * 3, [0.0] * 3, [0.0] * 3]


@interpret
@needs_interpreter
def test_nan_stays_in_its_row_and_other_shards_stay_out():
    dout = torch.ones(40, 3)
    dout[7], dout[8] = float("nan"), float("inf")
    tokens = torch.arange(40) % 5
    tokens[8] = 99
    out = embedding_wgrad(tokens, dout, torch.empty(5, 3))
    assert out[2].isnan().all() and out[[0, 1, 3, 4]].isfinite().all()
    assert (embedding(torch.tensor([5, 9]), torch.full((2, 4), float("nan"))) == 0).all()


@interpret
@needs_interpreter
def test_huge_strides_do_not_overflow_32_bits():
    stride = (1 << 30) + 16
    storage = torch.empty(3 * stride + 8, dtype=torch.float16)  # never touched but for four rows
    table = storage.as_strided((4, 8), (stride, 1))
    table.copy_(normal(4, 8))
    tokens = torch.tensor([3, 0, 2, 3])
    small = torch.empty(2, 8, dtype=torch.float16)
    with no_32_bit_overflow():
        assert torch.equal(embedding(tokens, table), embedding_ref(tokens, table.contiguous()))
        embedding_wgrad(tokens, torch.ones(4, 8, dtype=torch.float16), table)
        assert table[:, 0].tolist() == [1.0, 0.0, 1.0, 2.0]
        embedding_wgrad(torch.tensor([0, 1, 1, 1]), table, small)
    assert small[:, 0].tolist() == [1.0, 3.0]


@interpret
@needs_interpreter
def test_autograd_sees_that_a_bucket_changed():
    home = torch.ones(3, 4)
    out = (torch.ones(3, 4, requires_grad=True) * home).sum()
    embedding_wgrad(torch.tensor([1]), torch.ones(1, 4), home, accumulate=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@interpret
@needs_interpreter
def test_interpreted_ops_pass_opcheck():
    tokens, dout = torch.tensor([[0, 3, 7], [5, 4, 2]]), normal(2, 3, 4).float()
    ops = torch.ops.plait
    opcheck(ops.embedding.default, (tokens, normal(5, 4).float().requires_grad_(), 2))
    opcheck(ops.embedding_grad.default, (dout, tokens, 5, 2))
    for accumulate in (False, True):
        opcheck(ops.embedding_grad_.default, (dout, tokens, normal(5, 4).float(), 2, accumulate))
