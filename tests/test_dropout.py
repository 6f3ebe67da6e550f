"""dropout and its Philox bits: fixed by position and key, the same in torch and in Triton."""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from plait.kernels import dropout, dropout_ref, philox_ref
from plait.kernels.dropout_op import forward_launch
from plait.kernels.philox import keep_mask_ref, keep_threshold, philox_keep, philox_load_key
from tests.cases import TOLERANCE, compare, dtype_support, interpret, needs_interpreter, normal

RNG = torch.tensor([42, 7])


def _words(key, counter):
    def scalar(value):
        return torch.tensor([value])

    words = philox_ref((scalar(key[0]), scalar(key[1])), tuple(scalar(c) for c in counter))
    return [w.item() for w in words]


def test_known_answers_of_philox_4x32_10():
    """Vectors of Random123's kat_vectors file."""
    ones = 0xFFFFFFFF
    assert _words((0, 0), (0, 0, 0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert _words((ones, ones), (ones, ones, ones, ones)) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert _words((0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)) == [
        0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1,
    ]  # fmt: skip


@triton.jit
def _keep_kernel(
    rng_ptr, out_ptr, sample, head, first_row, first_col, threshold, ROWS: tl.constexpr, COLS: tl.constexpr
):
    key_low, key_high = philox_load_key(rng_ptr)
    rows = first_row + tl.arange(0, ROWS)
    keep = philox_keep(
        key_low, key_high, tl.program_id(0) + sample, tl.program_id(0) + head, rows, first_col, threshold, COLS
    )
    out = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    tl.store(out_ptr + out, keep.to(tl.int8))


@interpret
@needs_interpreter
@pytest.mark.parametrize("rng", [(42, 7), (-1, -(2**62)), (2**63 - 1, 0)])
@pytest.mark.parametrize("sample,head,row,col", [(0, 0, 0, 0), (3, 1, 1000, 64), (2**31 - 9, 5, 77, 2**20)])
def test_triton_draws_the_same_bits(rng, sample, head, row, col):
    out = torch.empty(8, 16, dtype=torch.int8)
    threshold = keep_threshold(0.3)
    _keep_kernel[(1,)](torch.tensor(rng), out, sample, head, row, col, threshold, ROWS=8, COLS=16)
    place = (range(sample, sample + 1), range(head, head + 1), range(row, row + 8), range(col, col + 16))
    want = keep_mask_ref(torch.tensor(rng), 0.3, *place)
    assert torch.equal(out.bool(), want[0, 0])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(2, 3, 8), (1, 1, 5), (2, 0, 4)])
def test_agrees_with_the_oracle(dtype, shape):
    compare(lambda x: dropout(x, 0.25, RNG), lambda x: dropout_ref(x, 0.25, RNG), normal(*shape, dtype=dtype))


def test_every_split_of_the_tensor_draws_the_same_mask():
    x = torch.ones(4, 6, 11)
    whole = dropout(x, 0.5, RNG)
    for sample, row, col in ((0, 0, 0), (1, 2, 3), (3, 5, 10), (2, 0, 5)):
        part = dropout(x[sample:, row:, col:], 0.5, RNG, sample_offset=sample, row_offset=row, col_offset=col)
        assert torch.equal(part, whole[sample:, row:, col:])


def test_keeps_the_stated_share_and_the_mean():
    out = dropout(torch.ones(16, 64, 64), 0.3, RNG)
    share = (out != 0).double().mean().item()
    assert abs(share - 0.7) < 6 * (0.21 / out.numel()) ** 0.5
    torch.testing.assert_close(out[out != 0], torch.full((int((out != 0).sum()),), 1 / 0.7))


def test_masks_of_two_calls_differ_in_any_part_of_the_key():
    x = torch.ones(1, 8, 64)
    base = dropout(x, 0.5, RNG)
    for other in ((43, 7), (42, 8), (7, 42)):
        assert not torch.equal(base, dropout(x, 0.5, torch.tensor(other)))
    assert torch.equal(base, dropout(x, 0.5, RNG))


def test_gradient_uses_the_mask_of_the_forward_pass():
    x = normal(2, 3, 8).requires_grad_()
    out = dropout(x, 0.5, RNG, col_offset=2)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad != 0, out != 0)


def test_zero_probability_changes_nothing_and_bad_input_is_refused():
    x = torch.ones(1, 2, 3)
    assert dropout(x, 0.0, RNG) is x
    for call, error, text in (
        (lambda: dropout(x, 1.0, RNG), ValueError, "p is 1.0"),
        (lambda: dropout(x[0], 0.5, RNG), ValueError, r"expected \[B, T, D\]"),
        (lambda: dropout(x, 0.5, RNG[:1]), TypeError, "expected int64"),
        (lambda: dropout(x.int(), 0.5, RNG), TypeError, "x is torch.int32"),
        (lambda: dropout(x, 0.5, RNG, row_offset=-1), ValueError, "row_offset is -1"),
        (lambda: dropout(x, 0.5, RNG.to("meta")), ValueError, "rng is on meta"),
    ):
        with pytest.raises(error, match=text):
            call()


# ---- the kernel ----

# (shape, offsets of the first element): one element, odd, columns that begin within a group of four, several blocks.
PLACES = (
    ((1, 1, 1), (0, 0, 0)),
    ((2, 3, 8), (0, 0, 0)),
    ((1, 5, 7), (3, 1, 2)),
    ((3, 2, 65), (0, 1000, 3)),
    ((1, 300, 5), (2**31, 2**31, 0)),
    ((1, 2, 1100), (0, 2**20, 2**33 + 1)),
    ((0, 3, 4), (0, 0, 0)),
    ((2, 0, 4), (0, 0, 0)),
    ((2, 3, 0), (0, 0, 1)),
)


def _check_kernel(x, offsets, p=0.3):
    names = ("sample_offset", "row_offset", "col_offset")
    how = dict(zip(names, offsets, strict=True))
    with dtype_support(x.dtype):
        got = dropout(x, p, RNG, **how)
    assert got.is_contiguous() and got.dtype is x.dtype
    assert torch.equal(got, dropout_ref(x, p, RNG, **how))


@interpret
@needs_interpreter
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape,offsets", PLACES)
def test_triton_has_the_bits_of_the_oracle(shape, offsets, dtype):
    _check_kernel(normal(*shape, dtype=dtype), offsets)


@interpret
@needs_interpreter
@settings(max_examples=40, deadline=None)
@given(
    st.permutations(range(3)),
    st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 9) | st.integers(100, 140)),
    st.tuples(*[st.integers(1, 3)] * 3),
    st.tuples(*[st.booleans()] * 3),
    st.tuples(st.integers(0, 2**31), st.integers(0, 2**31), st.integers(0, 2**33)),
    st.sampled_from(list(TOLERANCE)),
    st.integers(1, 2**24 - 1).map(lambda n: n / 2**24),
)
def test_triton_has_the_bits_of_the_oracle_in_any_layout(order, shape, steps, broadcast, offsets, dtype, p):
    """Dims in any order in memory, steps, stride 0, a start off alignment."""
    sizes = [1 if broadcast[dim] else shape[dim] * steps[dim] for dim in order]
    home = normal(sizes[0] * sizes[1] * sizes[2] + 1, dtype=dtype)[1:].view(sizes)
    stepped = home[tuple(slice(None, None, steps[dim]) for dim in order)]
    x = stepped.permute([order.index(dim) for dim in range(3)]).expand(shape)
    _check_kernel(x, offsets, p)


@interpret
@needs_interpreter
@pytest.mark.parametrize("offset", [0, 3])
def test_block_sizes_change_no_bit(offset):
    x, outs = normal(2, 5, 38, dtype=torch.float32), []
    for block in (8, 32, 128):
        out = torch.empty_like(x)
        forward_launch(x, RNG, 0.4, 1, 2, offset, out, block).run()
        outs.append(out)
    assert all(torch.equal(a, b) for a, b in itertools.pairwise(outs))


@interpret
@needs_interpreter
def test_every_split_draws_the_same_mask_in_triton():
    x = torch.ones(4, 6, 11)
    whole = dropout(x, 0.5, RNG)
    for sample, row, col in ((0, 0, 0), (1, 2, 3), (3, 5, 10), (2, 0, 5)):
        part = dropout(x[sample:, row:, col:], 0.5, RNG, sample_offset=sample, row_offset=row, col_offset=col)
        assert torch.equal(part, whole[sample:, row:, col:])


@interpret
@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradient_of_the_kernel_is_the_same_op_also_for_a_stride_0_gradient(dtype):
    x = normal(2, 3, 9, dtype=dtype).requires_grad_()
    out = dropout(x, 0.5, RNG, col_offset=2)
    (grad,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    assert torch.equal(grad, torch.where(out == 0, 0.0, 2.0).to(dtype))
    dout = normal(9, 3, 2, dtype=dtype).transpose(0, 2)
    (grad,) = torch.autograd.grad(out, x, dout)
    assert torch.equal(grad, dropout_ref(dout, 0.5, RNG, col_offset=2))


@interpret
@needs_interpreter
def test_dropped_elements_are_zero_where_the_input_is_not_finite():
    x = torch.full((1, 8, 16), float("nan"))
    out = dropout(x, 0.5, RNG)
    assert torch.equal(out.isnan(), dropout(torch.ones_like(x), 0.5, RNG) != 0)
    assert (out[~out.isnan()] == 0).all()


@interpret
@needs_interpreter
def test_huge_strides_do_not_overflow_32_bits():
    stride = (1 << 30) + 16
    storage = torch.empty(4 * stride + 8, dtype=torch.float16)  # never touched but for six rows
    x = storage.as_strided((2, 3, 8), (2 * stride, stride, 1))
    x.copy_(normal(2, 3, 8))
    _check_kernel(x, (0, 0, 0))


@interpret
@needs_interpreter
def test_two_runs_have_equal_bits_and_the_op_passes_opcheck():
    x = normal(2, 3, 8, dtype=torch.float32)
    assert torch.equal(dropout(x, 0.25, RNG), dropout(x, 0.25, RNG))
    opcheck(torch.ops.plait.dropout.default, (x.requires_grad_(), RNG, 0.25, 1, 2, 3))
