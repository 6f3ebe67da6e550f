"""rope against its oracle and against the complex numbers that it stands for, on the plain path and in Triton."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels import rope, rope_, rope_ref, rotary
from plait.kernels.inspect import compile_offline
from plait.kernels.rotary_triton import Angles, rope_launch
from tests.cases import (
    TOLERANCE,
    close,
    compare,
    dtype_support,
    interpret,
    needs_compiler,
    needs_interpreter,
    normal,
)
from tests.edges import lay_out, no_32_bit_overflow, no_worse_than_torch

# (B, T, H, KV, K, R): a model's, one of everything, more heads than a block, odd head dim, no rotation, nothing.
SHAPES = (
    (2, 3, 4, 2, 16, 16),
    (1, 1, 1, 1, 2, 2),
    (1, 1, 40, 3, 128, 128),
    (2, 2, 3, 1, 7, 4),
    (1, 2, 5, 5, 70, 66),
    (1, 1, 2, 1, 256, 64),
    (1, 2, 3, 1, 8, 0),
    (1, 1, 3, 0, 8, 4),
    (1, 1, 0, 3, 8, 4),
    (0, 3, 2, 1, 8, 8),
    (2, 0, 2, 1, 8, 8),
)
STYLES = pytest.mark.parametrize("interleaved", [False, True])


def _tables(positions, pairs, rotary, theta=10000.0):
    angles = positions.double().unsqueeze(-1) * theta ** (-2.0 * torch.arange(pairs).double() / rotary)
    return angles.cos(), angles.sin()


def _positions(batch, tokens, per_sample):
    return torch.arange(batch * tokens).view(batch, tokens) * 37 if per_sample else torch.arange(tokens) * 37


def _check(shape, dtype, interleaved, per_sample):
    batch, tokens, heads, kv_heads, head_dim, turned = shape
    cos, sin = _tables(_positions(batch, tokens, per_sample), turned // 2, max(turned, 1))
    if dtype is not torch.float64:
        cos, sin = cos.float(), sin.float()
    q = normal(batch, tokens, heads, head_dim, dtype=dtype)
    k = normal(batch, tokens, kv_heads, head_dim, dtype=dtype, seed=1)
    compare(
        lambda q, k: rope(q, k, cos, sin, interleaved=interleaved),
        lambda q, k: rope_ref(q, k, cos.double(), sin.double(), interleaved=interleaved),
        q,
        k,
    )
    with torch.no_grad():
        want = rope(q, k, cos, sin, interleaved=interleaved)
        if q.numel() and k.numel():
            got = rope_(q, k, cos, sin, interleaved=interleaved)
            assert got[0] is q and torch.equal(q, want[0]) and torch.equal(k, want[1])


@STYLES
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("per_sample", [False, True])
def test_agrees_with_the_oracle_also_in_place(dtype, shape, interleaved, per_sample):
    _check(shape, dtype, interleaved, per_sample)


# A program of the interpreter takes 15 ms: every shape in one dtype, every dtype on two shapes.
INTERPRETED = [(shape, torch.float64) for shape in SHAPES] + [(s, d) for s in SHAPES[1:4:2] for d in TOLERANCE]


@interpret
@needs_interpreter
@STYLES
@pytest.mark.parametrize("shape,dtype", INTERPRETED, ids=str)
def test_triton_agrees_with_the_oracle_also_in_place(dtype, shape, interleaved):
    with dtype_support(dtype):
        _check(shape, dtype, interleaved, per_sample=shape[0] == 2)


# ---- any strides ----


def _packed(kind, dtype, batch, tokens, heads, kv_heads, head_dim):
    """(the tensor that holds all, its views q and k) with NaN where neither lies."""
    total = heads + 2 * kv_heads
    if kind == "qkv":  # q, k and v side by side, as one projection gives them
        home = torch.full((batch, tokens, total, head_dim), float("nan"), dtype=dtype)
        q, k = home[:, :, :heads], home[:, :, heads : heads + kv_heads]
    elif kind == "heads first":
        home = torch.full((batch, total, tokens, head_dim), float("nan"), dtype=dtype)
        q, k = home[:, :heads].transpose(1, 2), home[:, heads : heads + kv_heads].transpose(1, 2)
    elif kind == "tokens first":
        home = torch.full((tokens, batch, total, head_dim + 1), float("nan"), dtype=dtype)
        q, k = (x[..., 1:].transpose(0, 1) for x in (home[:, :, :heads], home[:, :, heads : heads + kv_heads]))
    else:  # dims first: no element has its neighbour beside it
        home = torch.full((head_dim, batch, total, tokens), float("nan"), dtype=dtype)
        q, k = (
            x.permute(1, 3, 2, 0) for x in (home[:, :, :heads], home[:, :, heads : heads + kv_heads])
        )  # fmt: skip
    return home, q, k


@interpret
@needs_interpreter
@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(["qkv", "heads first", "tokens first", "dims first"]),
    dtype=st.sampled_from(list(TOLERANCE)),
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 9), st.integers(1, 3)),
    head_dim=st.integers(1, 40),
    turned=st.integers(0, 20),
    interleaved=st.booleans(),
    per_sample=st.booleans(),
    stepped=st.sampled_from(["plain", "stepped", "transposed", "moved"]),
)
def test_triton_turns_any_layout_in_place_and_writes_nothing_else(
    kind, dtype, sizes, head_dim, turned, interleaved, per_sample, stepped
):
    batch, tokens, heads, kv_heads = sizes
    pairs = min(turned, head_dim // 2)
    home, q, k = _packed(kind, dtype, batch, tokens, heads, kv_heads, head_dim)
    q.copy_(normal(*q.shape, dtype=dtype)), k.copy_(normal(*k.shape, dtype=dtype, seed=1))
    cos, sin = (
        lay_out(t, stepped) for t in _tables(_positions(batch, tokens, per_sample), pairs, max(1, 2 * pairs))
    )  # fmt: skip
    before, nan = (q.clone(), k.clone()), home.isnan()
    want = rope_ref(q.double(), k.double(), cos, sin, interleaved=interleaved)
    with dtype_support(dtype):
        functional = rope(q, k, cos, sin, interleaved=interleaved)
        assert torch.equal(q, before[0]) and torch.equal(k, before[1])
        rope_(q, k, cos, sin, interleaved=interleaved)
    assert torch.equal(home.isnan(), nan)
    for got, same, wanted in zip((q, k), functional, want, strict=True):
        assert same.is_contiguous() and torch.equal(got, same)
        close(got, wanted, dtype, "turned")


@interpret
@STYLES
def test_gradients_and_inputs_of_any_stride(interleaved):
    cos, sin = _tables(torch.arange(5), 3, 6)
    q, k = normal(8, 4, 5, 2).permute(3, 2, 1, 0), normal(1, 5, 1, 8, seed=1).expand(2, 5, 3, 8)
    compare(
        lambda q, k: rope(q, k, cos, sin, interleaved=interleaved),
        lambda q, k: rope_ref(q, k, cos, sin, interleaved=interleaved),
        q,
        k,
    )
    q, k = q.contiguous().requires_grad_(), k.contiguous().requires_grad_()
    for pick in (lambda q, k: q.sum() + k.sum(), lambda q, k: (q[..., ::2] * normal(2, 5, 4, 4)).sum() + k.sum()):
        got = torch.autograd.grad(pick(*rope(q, k, cos, sin, interleaved=interleaved)), (q, k))
        want = torch.autograd.grad(pick(*rope_ref(q, k, cos, sin, interleaved=interleaved)), (q, k))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


@interpret
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_huge_strides_do_not_overflow_32_bits(dim):
    """Three elements 2^30 + 16 apart in one dim; in dim 3 the other half of a pair is 2^31 away."""
    shape = [1, 1, 1, 4]
    shape[dim] = 4 if dim == 3 else 3
    far = (1 << 30) + 16
    strides = [4, 4, 4, 1]
    strides[dim] = far
    storage = torch.empty((shape[dim] - 1) * far + 4, dtype=torch.float16)  # touched in a few pages only
    q = storage.as_strided(shape, strides)
    q.copy_(normal(*shape))
    k = normal(shape[0], shape[1], 1, 4, dtype=torch.float16, seed=1)
    cos, sin = _tables(torch.arange(shape[1]) + 5, 2, 4)
    want = rope_ref(q.double(), k.double(), cos, sin)
    for op, what in ((rope, "functional"), (rope_, "in place")):
        with no_32_bit_overflow():
            got = op(q, k, cos, sin)
        for a, b in zip(got, want, strict=True):
            close(a, b, torch.float16, what)


# ---- what a rotation is ----


@interpret
@STYLES
def test_pairs_turn_as_complex_numbers(interleaved):
    """Head 8, rotary 4, position 700: pairs (0, 2), (1, 3) or (0, 1), (2, 3) turn by 700 * theta^(-2 i / 4)."""
    cos, sin = _tables(torch.tensor([700]), 2, 4)
    q = normal(1, 1, 1, 8)
    out, _ = rope(q, q, cos, sin, interleaved=interleaved)
    for i in range(2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + 2)
        turned = torch.complex(q[0, 0, 0, a], q[0, 0, 0, b]) * torch.polar(
            torch.tensor(1.0).double(), torch.tensor(700.0).double() * 10000.0 ** (-2 * i / 4)
        )
        torch.testing.assert_close(torch.complex(out[0, 0, 0, a], out[0, 0, 0, b]), turned)
    assert torch.equal(out[..., 4:], q[..., 4:])


@interpret
@STYLES
@pytest.mark.parametrize("turned", [8, 4], ids=["whole", "partial"])
def test_positions_start_again_in_each_packed_document(interleaved, turned):
    """Three documents of 1, 4 and 2 tokens in one row, and cut differently in another, have each one's own bits."""
    lengths = ((1, 4, 2), (5, 2))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    cos, sin = (t.float() for t in _tables(positions, turned // 2, turned))
    q, k = normal(2, 7, 3, 8, dtype=torch.float32), normal(2, 7, 1, 8, dtype=torch.float32, seed=1)
    packed = rope(q, k, cos, sin, interleaved=interleaved)
    for sample, row in enumerate(lengths):
        start = 0
        for length in row:
            here = (slice(sample, sample + 1), slice(start, start + length))
            own = (t.float() for t in _tables(torch.arange(length), turned // 2, turned))
            alone = rope(q[here], k[here], *own, interleaved=interleaved)
            for a, b in zip(packed, alone, strict=True):
                assert torch.equal(a[here], b)
            start += length


@interpret
@STYLES
def test_rotation_keeps_lengths_and_depends_on_distance_only(interleaved):
    cos, sin = _tables(torch.arange(6), 4, 8)
    row = normal(1, 1, 1, 8)
    q, k = rope(row.expand(1, 6, 1, 8), row.expand(1, 6, 1, 8), cos, sin, interleaved=interleaved)
    torch.testing.assert_close(q.norm(dim=-1), row.norm().expand(1, 6, 1))
    products = q[0, :, 0] @ k[0, :, 0].t()
    torch.testing.assert_close(products[2, 0], products[5, 3])


@interpret
@STYLES
def test_both_styles_are_one_up_to_the_order_of_channels(interleaved):
    cos, sin = _tables(torch.arange(5), 4, 8)
    q, k = normal(2, 5, 4, 8), normal(2, 5, 1, 8, seed=1)
    order = torch.arange(8).view(4, 2).t().flatten() if interleaved else torch.arange(8).view(2, 4).t().flatten()
    got = rope(q, k, cos, sin, interleaved=interleaved)
    other = rope(q[..., order], k[..., order], cos, sin, interleaved=not interleaved)
    for a, b in zip(got, other, strict=True):
        torch.testing.assert_close(a[..., order], b, rtol=0, atol=1e-15)


@interpret
@STYLES
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("per_sample", [False, True])
def test_rotate_turns_q_and_k_side_by_side_and_back(dtype, per_sample, interleaved):
    """What a model's block does: a view [B, T, H + KV, K] of the packed projection, in place; v stays."""
    qkv = normal(2, 5, 8, 16, dtype=dtype)
    before = qkv.clone()
    cos, sin = _tables(_positions(2, 5, per_sample), 6, 12)
    turn = rotary.tables(cos, sin, dtype, interleaved)
    with dtype_support(dtype):
        assert rotary.rotate_(qkv[:, :, :6], turn, interleaved=interleaved).data_ptr() == qkv.data_ptr()
        want = torch.cat(rope_ref(*before.double().split((4, 4), 2), cos, sin, interleaved=interleaved), 2)
        close(qkv[:, :, :6], want[:, :, :6], dtype, "turned")
        assert torch.equal(qkv[:, :, 6:], before[:, :, 6:]) and torch.equal(qkv[..., 12:], before[..., 12:])
        rotary.rotate_(qkv[:, :, :6], turn, inverse=True, interleaved=interleaved)
    close(qkv, before, dtype, "back", 2.0)


@interpret
def test_nan_and_inf_stay_in_their_pair():
    cos, sin = _tables(torch.arange(1) + 3, 2, 4)
    q = normal(1, 1, 3, 4, dtype=torch.float32)
    q[0, 0, 0, 1], q[0, 0, 1, 0] = float("nan"), float("inf")
    got, _ = rope(q, q, cos.float(), sin.float())
    want, _ = rope_ref(q, q, cos.float(), sin.float())
    torch.testing.assert_close(got, want, equal_nan=True)
    assert got[0, 0, 0].isnan().tolist() == [False, True, False, True] and got[0, 0, 2].isfinite().all()


# ---- errors, bits, refusals ----


def _plain_torch(q, k, cos, sin):
    """As models write it in 16 bits: tables in the tensors' dtype, x * cos + rotate_half(x) * sin."""
    cos, sin = (torch.cat((t, t), -1).unsqueeze(-2).to(q.dtype) for t in (cos, sin))
    return tuple(
        x * cos + torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) * sin for x in (q, k)
    )


@interpret
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_errors_are_at_most_twice_those_of_plain_torch(dtype):
    cos, sin = _tables(torch.arange(7) * 100, 8, 16)
    q, k = normal(2, 7, 4, 16, dtype=dtype), normal(2, 7, 2, 16, dtype=dtype, seed=1)
    no_worse_than_torch(
        lambda q, k: rope(q, k, cos.float(), sin.float()),
        lambda q, k: _plain_torch(q, k, cos, sin),
        lambda q, k: rope_ref(q, k, cos, sin),
        q,
        k,
    )


@interpret
@STYLES
def test_tables_of_16_bits_are_read_as_they_are(interleaved):
    cos, sin = (t.bfloat16() for t in _tables(torch.arange(5), 4, 8))
    q, k = normal(2, 5, 4, 8, dtype=torch.float32), normal(2, 5, 1, 8, dtype=torch.float32, seed=1)
    with dtype_support(torch.bfloat16):
        got = rope(q, k, cos, sin, interleaved=interleaved)
    for a, b in zip(got, rope_ref(q, k, cos.float(), sin.float(), interleaved=interleaved), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@interpret
def test_bits_agree_between_runs_and_do_not_depend_on_the_batch():
    cos, sin = (t.float() for t in _tables(torch.arange(5), 4, 8))
    q, k = normal(3, 5, 4, 8, dtype=torch.float32), normal(3, 5, 1, 8, dtype=torch.float32, seed=1)
    first, second = rope(q, k, cos, sin), rope(q, k, cos, sin)
    alone = rope(q[1:2], k[1:2], cos, sin)
    for a, b, c in zip(first, second, alone, strict=True):
        assert torch.equal(a, b) and torch.equal(a[1:2], c)


@STYLES
def test_gradcheck_of_the_reference_in_fp64(interleaved):
    cos, sin = _tables(torch.arange(3), 2, 4)
    q, k = normal(2, 3, 2, 5).requires_grad_(), normal(2, 3, 1, 5, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda q, k: rope_ref(q, k, cos, sin, interleaved=interleaved), (q, k))


def test_bad_input_is_refused():
    q, k, table = torch.ones(1, 5, 2, 8), torch.ones(1, 5, 1, 8), torch.ones(5, 4)
    for call, error, text in (
        (lambda: rope(q, k, torch.ones(4, 4), torch.ones(4, 4)), ValueError, r"must be \[T, R/2\]"),
        (lambda: rope(q, k, torch.ones(5, 5), torch.ones(5, 5)), ValueError, "needs a head dim of 10"),
        (lambda: rope(q, k[:, :4], table, table), ValueError, "agree in B, T, K"),
        (lambda: rope(q, k.half(), table, table), TypeError, "k is torch.float16"),
        (lambda: rope(q, k, table.int(), table.int()), TypeError, "cos is torch.int32"),
        (lambda: rope(q, k, table, table.to("meta")), ValueError, "sin is on meta"),
        (lambda: rope_(q.expand(3, 5, 2, 8), k.repeat(3, 1, 1, 1), table, table), ValueError, "q has strides"),
        (lambda: rope_(q, k.expand(1, 5, 3, 8), table, table), ValueError, "k has strides"),
        (lambda: rope_(q, q[:, :, :1], table, table), ValueError, "begin at one address"),
    ):
        with pytest.raises(error, match=text):
            call()
    assert q.eq(1.0).all() and k.eq(1.0).all()


FAR = (1 << 31) + 16
# (q's shape, q's strides, KV, R, dtype): sizes of 1, which the compiler folds away; odd ones; beyond 32 bits.
EDGES = (
    ((1, 1, 1, 2), None, 1, 2, torch.float32),
    ((2, 3, 1, 7), None, 3, 4, torch.bfloat16),
    ((2, 3, 2, 8), None, 1, 0, torch.float16),
    ((2, 3, 3, 8), (FAR, FAR, FAR, FAR), 1, 8, torch.bfloat16),
    ((1, 1, 5, 6), (1, 1, 1, 5), 0, 6, torch.bfloat16),
)


@pytest.mark.offline
@pytest.mark.long  # the declared list of test_gate.py stays in the short run
@needs_compiler
@STYLES
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shape,strides,kv_heads,turned,dtype", EDGES, ids=str)
def test_edge_launches_compile(shape, strides, kv_heads, turned, dtype, in_place, interleaved):
    q = torch.empty(shape, dtype=dtype, device="meta")
    q = q if strides is None else torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    k = torch.empty((*shape[:2], kv_heads, shape[3]), dtype=dtype, device="meta")
    table = torch.empty((shape[1], turned // 2), dtype=dtype, device="meta")
    out = (q, k) if in_place else (torch.empty_like(q), torch.empty_like(k))
    angles = Angles(table, table, 0, turned // 2, 1)
    launch = rope_launch(q, k, *out, angles, turned // 2, inverse=True, interleaved=interleaved)
    if in_place and not turned:
        assert launch is None
    else:
        facts = compile_offline(launch, "sm_90")
        assert (facts.spill_loads, facts.spill_stores, facts.count("DFMA") + facts.count("DMUL")) == (0, 0, 0)
