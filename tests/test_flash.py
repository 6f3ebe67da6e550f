"""attention: out, lse and every gradient against the oracle, the same tests for the plain path and for Triton.

Tests marked `interpret` run the kernels in the interpreter; `both` adds the plain path to the same body.
"""

import pytest
import torch

from plait.kernels import attention, attention_ref
from plait.kernels.launch import INTERPRETED
from tests.cases import close, compare, dtype_support, interpret, needs_interpreter, needs_plain, normal

RNG = torch.tensor([11, -3])
# The switches, tested in pairs below; window 3 and softcap 2 act on every shape here.
SWITCHES = {
    "full": {"causal": False},
    "window": {"window": 3},
    "softcap": {"softcap": 2.0},
    "dropout": {"dropout_p": 0.3, "rng": RNG, "head_offset": 1, "sample_offset": 5},
    "scale": {"scale": 0.25},
}
PAIRS = [(a, b) for i, a in enumerate(SWITCHES) for b in list(SWITCHES)[i:]]
# (T, S, heads, key heads): square, several tiles, a decode step, more keys, more queries (masked rows).
SHAPES = ((9, 9, 2, 2), (40, 40, 4, 2), (1, 37, 4, 1), (7, 20, 2, 1), (20, 7, 2, 1))


def both(test):
    """Runs a test in the plain process and, marked, in the interpreter."""
    return pytest.mark.parametrize(
        "path",
        [
            pytest.param("plain", marks=[needs_plain]),
            pytest.param("triton", marks=[interpret, needs_interpreter]),
        ],
    )(test)


def _check(shape, dtype=torch.float64, sinks=False, head_dim=16, value_dim=16, batch=1, **options):
    num_tokens, num_keys, heads, kv_heads = shape
    q = normal(batch, num_tokens, heads, head_dim, dtype=dtype)
    k = normal(batch, num_keys, kv_heads, head_dim, dtype=dtype, seed=1)
    v = normal(batch, num_keys, kv_heads, value_dim, dtype=dtype, seed=2)
    extra = (normal(heads, dtype=dtype, seed=3),) if sinks else ()
    # The lse of a row that sees nothing is -inf and has no gradient: those rows are tested on their own.
    with_lse = sinks or not (num_tokens > num_keys and options.get("causal", True))

    def run(function):
        def call(q, k, v, *sink):
            arguments = dict(options, sinks=sink[0] if sink else None)
            return function(q, k, v, return_lse=with_lse, **arguments)

        return call

    compare(run(attention), run(attention_ref), q, k, v, *extra)


@both
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sinks", [False, True])
def test_shapes_agree_with_the_oracle(shape, sinks, path):
    _check(shape, sinks=sinks, batch=2)


@both
@pytest.mark.parametrize("first,second", PAIRS)
def test_switches_agree_with_the_oracle_in_pairs(first, second, path):
    _check((20, 26, 2, 1), sinks=first == second, **(SWITCHES[first] | SWITCHES[second]))


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype, path):
    q, k, v = (normal(1, 24, h, 16, dtype=dtype, seed=i) for i, h in enumerate((2, 1, 1)))
    with dtype_support(dtype):
        compare(attention, attention_ref, q, k, v, factor=1.0 if dtype is torch.float32 else 2.0)


@both
@pytest.mark.parametrize(
    "head_dim,value_dim", [(8, 8), (40, 40), (80, 64), (96, 24), (160, 160), (192, 128), (256, 256)]
)
def test_head_dims_that_are_no_power_of_two_or_differ(head_dim, value_dim, path):
    # The factor of the scores reaches the interpreter as fp32; 4e-8 is its rounding.
    _check((6, 6, 1, 1), head_dim=head_dim, value_dim=value_dim, scale=0.125)


@both
def test_packed_documents_with_one_key_each_have_no_nan_in_dq(path):
    """Rows that see no key: out 0, lse -inf, dq 0, everything finite."""
    cu = (torch.tensor([0, 76, 110, 256], dtype=torch.int32), torch.tensor([0, 1, 2, 3], dtype=torch.int32))
    q, k, v = normal(1, 256, 1, 32), normal(1, 3, 1, 32, seed=1), normal(1, 3, 1, 32, seed=2)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = attention(q, k, v, cu_seqlens=cu, return_lse=True)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    seen = torch.zeros(256, dtype=torch.bool)
    seen[[75, 109, 255]] = True  # bottom-right: only the last query of a document sees its key
    assert (out[0, ~seen] == 0).all() and (lse[0, 0, ~seen] == float("-inf")).all()
    assert (grads[0][0, ~seen] == 0).all()
    torch.testing.assert_close(grads[0], torch.zeros_like(q))  # one key: its probability is 1 whatever q is
    assert all(g.isfinite().all() for g in grads)
    torch.testing.assert_close(out[0, seen], v[0])
    torch.testing.assert_close(grads[2], torch.ones_like(v))


@both
def test_causal_is_bottom_right_aligned_and_masked_rows_are_zero(path):
    q, k, v = normal(1, 5, 1, 16), normal(1, 2, 1, 16, seed=1), normal(1, 2, 1, 16, seed=2)
    out, lse = attention(q, k, v, return_lse=True)
    assert (out[0, :3] == 0).all() and (lse[0, 0, :3] == float("-inf")).all()
    torch.testing.assert_close(out[0, 3], v[0, 0])


@both
def test_lse_of_a_masked_row_is_the_sink(path):
    q, k, v = normal(1, 5, 2, 16), normal(1, 2, 1, 16, seed=1), normal(1, 2, 1, 16, seed=2)
    sinks = torch.tensor([0.5, -2.0], dtype=torch.float64)
    out, lse = attention(q, k, v, sinks=sinks, return_lse=True)
    assert (out[0, :3] == 0).all()
    torch.testing.assert_close(lse[0, :, :3], sinks.unsqueeze(1).expand(2, 3))


@both
def test_empty_documents_and_no_keys_at_all(path):
    cu = (torch.tensor([0, 0, 3], dtype=torch.int32), torch.tensor([0, 2, 5], dtype=torch.int32))
    q, k, v = (normal(1, n, 1, 16, seed=n).requires_grad_() for n in (3, 5, 5))
    out = attention(q, k, v, cu_seqlens=cu)
    dq, dk, dv = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert (dk[0, :2] == 0).all() and (dv[0, :2] == 0).all() and (dv[0, 2:] != 0).any()
    none = torch.zeros(1, 0, 1, 16, dtype=torch.float64, requires_grad=True)
    out = attention(q, none, none)
    grads = torch.autograd.grad(out.sum(), (q, none))
    assert (out == 0).all() and (grads[0] == 0).all() and grads[1].shape == none.shape


@both
def test_rows_past_the_last_document_are_zero(path):
    cu = torch.tensor([0, 4, 7], dtype=torch.int32)
    q, k, v = (normal(1, 12, 1, 16, seed=i).requires_grad_() for i in range(3))
    for _ in range(3):  # poison what the allocator may hand out again
        torch.full((1, 12, 1, 16), float("nan"), dtype=torch.float64)
        out = attention(q, k, v, cu_seqlens=cu)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        for value in (out, *grads):
            assert (value[0, 7:] == 0).all() and value.isfinite().all()


@both
@pytest.mark.parametrize("options", [{}, {"window": 2}, {"dropout_p": 0.2, "rng": RNG}])
def test_packed_documents_agree_with_the_oracle(options, path):
    cu = torch.tensor([0, 5, 5, 22, 30], dtype=torch.int32)
    _check((30, 30, 2, 1), cu_seqlens=cu, **options)


@both
def test_a_document_does_not_see_its_neighbours(path):
    cu = torch.tensor([0, 13, 30], dtype=torch.int32)
    q, k, v = (normal(1, 30, 1, 16, seed=i) for i in range(3))
    packed = attention(q, k, v, cu_seqlens=cu)
    for part in (slice(0, 13), slice(13, 30)):
        torch.testing.assert_close(packed[:, part], attention(q[:, part], k[:, part], v[:, part]))


@both
def test_window_of_two_sees_exactly_two_keys(path):
    q, k = torch.zeros(1, 4, 1, 16, dtype=torch.float64), torch.zeros(1, 4, 1, 16, dtype=torch.float64)
    v = torch.eye(4, 16, dtype=torch.float64).view(1, 4, 1, 16)
    half = 0.5
    want = torch.tensor(
        [[1, 0, 0, 0], [half, half, 0, 0], [0, half, half, 0], [0, 0, half, half]], dtype=torch.float64
    )
    torch.testing.assert_close(attention(q, k, v, window=2)[0, :, 0, :4], want)


@interpret
@needs_interpreter
def test_huge_row_stride_does_not_overflow_32_bits():
    stride = (1 << 30) + 16
    storage = torch.empty(2 * stride + 16, dtype=torch.float16)  # never touched but for three rows
    k = storage.as_strided((1, 3, 1, 16), (0, stride, 16, 1))
    k.copy_(normal(1, 3, 1, 16))
    q, v = (normal(1, 3, 1, 16, dtype=torch.float16, seed=i) for i in (1, 2))
    q.requires_grad_()
    out = attention(q, k, v)
    (dq,) = torch.autograd.grad(out.sum(), q)
    want = attention_ref(q, k.contiguous(), v)
    close(out, want, torch.float16, "out")
    close(dq, torch.autograd.grad(want.sum(), q)[0], torch.float16, "dq")


@both
def test_each_tensor_is_read_by_its_own_strides(path):
    q = normal(1, 2, 20, 16).transpose(1, 2)  # heads outermost
    k = normal(1, 20, 2, 17, seed=1)[..., :16]  # one channel more in memory
    v = normal(1, 16, 2, 20, seed=2).transpose(1, 3)  # channels outermost
    for tensors in ((q, k, v), (q, k[:, :1].expand(1, 20, 2, 16), v)):
        compare(attention, attention_ref, *tensors)
    x = q.detach().requires_grad_()
    (got,) = torch.autograd.grad(attention(x, k, v).sum(), x)  # a gradient of stride 0
    (want,) = torch.autograd.grad(attention_ref(x, k, v).sum(), x)
    torch.testing.assert_close(got, want)


@both
def test_dropout_masks_differ_between_seeds_and_repeat_for_the_same(path):
    q, k, v = (normal(1, 20, 2, 16, seed=i) for i in range(3))

    def run(seed, offset):
        return attention(q, k, v, dropout_p=0.5, rng=torch.tensor([seed, offset]))

    assert torch.equal(run(1, 2), run(1, 2))
    assert not torch.equal(run(1, 2), run(1, 3)) and not torch.equal(run(1, 2), run(2, 2))


@both
def test_dropout_depends_on_the_global_sample_and_head_only(path):
    q, k, v = (normal(3, 20, 4, 16, seed=i) for i in range(3))
    whole = attention(q, k, v, dropout_p=0.4, rng=RNG)
    part = attention(q[2:, :, 2:], k[2:, :, 2:], v[2:, :, 2:], dropout_p=0.4, rng=RNG, head_offset=2, sample_offset=2)
    torch.testing.assert_close(whole[2:, :, 2:], part)


@interpret
@needs_interpreter
def test_dropout_and_gradients_do_not_depend_on_tile_sizes(monkeypatch):
    from plait.kernels import flash_tiles

    q, k, v = (normal(1, 40, 2, 16, seed=i).requires_grad_() for i in range(3))

    def run():
        out = attention(q, k, v, dropout_p=0.4, rng=RNG)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    base = run()
    monkeypatch.setattr(flash_tiles, "WIDE_TILES", ((256, flash_tiles.Tile(16, 64, 4, 1)),))
    for a, b in zip(base, run(), strict=True):
        torch.testing.assert_close(a, b)


@both
def test_bits_agree_between_runs_and_with_recompute(path):
    from torch.utils.checkpoint import checkpoint

    q, k, v = (normal(1, 33, 2, 16, dtype=torch.float32, seed=i).requires_grad_() for i in range(3))

    def block(q, k, v):
        return attention(q, k, v, dropout_p=0.3, rng=RNG)

    def run(recompute):
        out = (
            checkpoint(block, q, k, v, use_reentrant=False, preserve_rng_state=False) if recompute else block(q, k, v)
        )
        return out, *torch.autograd.grad(out.sum(), (q, k, v))

    base = run(False)
    for recompute in (False, True, False):
        assert all(torch.equal(a, b) for a, b in zip(base, run(recompute), strict=True))


@both
def test_only_the_lse_gives_gradients_too(path):
    q, k, v = (normal(1, 9, 2, 16, seed=i).requires_grad_() for i in range(3))
    sinks = normal(2, seed=5).requires_grad_()
    got = torch.autograd.grad(attention(q, k, v, sinks=sinks, return_lse=True)[1].square().sum(), (q, k, v, sinks))
    want = torch.autograd.grad(attention_ref(q, k, v, sinks=sinks, return_lse=True)[1].square().sum(), (q, k, sinks))
    assert (got[2] == 0).all()
    for a, b in zip((got[0], got[1], got[3]), want, strict=True):
        torch.testing.assert_close(a, b)


@needs_plain
def test_torch_agrees_where_it_has_the_same_case():
    q, k, v = (normal(2, 33, h, 16, dtype=torch.float32, seed=h) for h in (4, 2, 2))
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    close(attention(q, k, v), want.transpose(1, 2), torch.float32, "out")


def _qkv(*shape, dtype=torch.float32):
    return (torch.ones(*(shape or (1, 4, 2, 8)), dtype=dtype),) * 3


BAD = [
    (lambda: attention(*_qkv(4, 2, 8)), ValueError, "expected 4"),
    (lambda: attention(*_qkv(dtype=torch.int32)), TypeError, "q is torch.int32"),
    (lambda: attention(_qkv()[0], _qkv()[0].half(), _qkv()[0].half()), TypeError, "k is torch.float16"),
    (lambda: attention(*_qkv(1, 4, 2, 264)), ValueError, "head dims 264"),
    (lambda: attention(*_qkv(), window=0), ValueError, "window is 0"),
    (lambda: attention(*_qkv(), dropout_p=0.1), ValueError, "dropout needs rng"),
    (lambda: attention(*_qkv(), dropout_p=1.0, rng=RNG), ValueError, "dropout_p is 1.0"),
    (lambda: attention(*_qkv(), dropout_p=0.1, rng=RNG.float()), TypeError, "rng is torch.float32"),
    (lambda: attention(torch.ones(1, 4, 3, 8), *_qkv()[1:]), ValueError, "multiple of 2 key heads"),
    (lambda: attention(*_qkv(), sinks=torch.ones(3)), ValueError, "expected 2 floats"),
    (lambda: attention(*_qkv(), softcap=-1.0), ValueError, "softcap is -1.0"),
    (lambda: attention(*_qkv(), cu_seqlens=torch.tensor([0, 4])), TypeError, "expected torch.int32"),
    (lambda: attention(*_qkv(2, 4, 2, 8), cu_seqlens=torch.tensor([0, 4]).int()), ValueError, "batch of 1"),
    (lambda: attention(_qkv()[0].to("meta"), *_qkv()[1:]), ValueError, "k is on cpu"),
]


@pytest.mark.parametrize("call,error,text", BAD)
def test_bad_input_is_refused_before_any_launch(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_interpreter_tests_run_in_the_interpreter():
    import os

    assert INTERPRETED == (os.environ.get("TRITON_INTERPRET") == "1")
