"""attention at its edges: what broke others, what no shape table has, random shapes and strides, NaN and infinity.

The same bodies run for the plain path and, marked `interpret`, for Triton. Agreement with the oracle over pairs
of switches is in test_flash.py.
"""

import contextlib
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels import attention, attention_ref, flash_tiles
from plait.kernels.attention_plain import Options
from plait.kernels.flash_launch import forward_launch
from plait.kernels.launch import INTERPRETED
from plait.kernels.philox import keep_mask_ref
from tests.cases import close, compare, dtype_support, interpret, needs_interpreter, normal
from tests.test_flash import RNG, both

NAN, INF = float("nan"), float("inf")


def _int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def _inputs(num_tokens, num_keys, heads=2, kv_heads=1, width=16, dtype=torch.float64, batch=1):
    q = normal(batch, num_tokens, heads, width, dtype=dtype)
    k, v = (normal(batch, num_keys, kv_heads, width, dtype=dtype, seed=i) for i in (1, 2))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


@contextlib.contextmanager
def _tiles(row, col):
    """Every kernel of wide dtypes in tiles of this size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_tiles, "WIDE_TILES", ((256, flash_tiles.Tile(row, col, 4, 1)),))
        yield


# Bugs, each named after its symptom.


@both
@pytest.mark.parametrize("packed", [True, False])
def test_slack_rows_are_written_over_what_memory_held(packed, monkeypatch, path):
    """Every output begins as NaN: rows past documents, of empty ones and without a key are written all the same."""
    allocate = torch.empty

    def poisoned(*shape, **options):
        made = allocate(*shape, **options)
        return made.fill_(NAN) if made.is_floating_point() else made

    cu = (_int32(0, 5, 5, 20), _int32(0, 2, 9, 15)) if packed else None
    q, k, v = _inputs(23, 19)
    dout, dlse = normal(*q.shape, seed=5), normal(1, 2, 23, seed=6)
    dlse[:, :, 20:] = 0.0
    monkeypatch.setattr(torch, "empty", poisoned)
    out, lse = attention(q, k, v, cu_seqlens=cu, return_lse=True)
    grads = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    monkeypatch.undo()
    want, want_lse = attention_ref(q, k, v, cu_seqlens=cu, return_lse=True)
    torch.testing.assert_close((out, lse), (want, want_lse))
    live = want_lse.isfinite()
    masked = torch.where(live, want_lse * dlse, 0.0).sum() + (want * dout).sum()
    torch.testing.assert_close(grads, torch.autograd.grad(masked, (q, k, v)))
    if packed:
        assert (out[:, 20:] == 0).all() and (lse[..., 20:] == -INF).all() and (grads[0][:, 20:] == 0).all()
        assert all((g[:, 15:] == 0).all() and (g[:, 2:9] == 0).all() for g in grads[1:])


@both
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [2**31 - 1, 2**31 - 5, 2**40])
def test_a_window_wider_than_32_bits_masks_nothing(window, causal, path):
    q, k, v = _inputs(9, 20)
    got = attention(q, k, v, causal=causal, window=window)
    torch.testing.assert_close(got, attention(q, k, v, causal=causal))
    grads = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (got, attention(q, k, v, causal=causal)))
    torch.testing.assert_close(*grads)


@both
def test_cu_seqlens_and_rng_of_any_stride(path):
    q, k, v = _inputs(12, 12)
    cu, rng = _int32(0, 99, 5, 99, 12, 99)[::2], torch.tensor([[11, 0], [-3, 0]])[:, 0]
    got = attention(q, k, v, cu_seqlens=cu, dropout_p=0.3, rng=rng)
    want = attention_ref(q, k, v, cu_seqlens=_int32(0, 5, 12), dropout_p=0.3, rng=RNG)
    torch.testing.assert_close(got, want)
    grads = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (got, want))
    torch.testing.assert_close(*grads)


@both
@pytest.mark.parametrize("slope", [1.0, NAN, INF])
def test_the_lse_gradient_of_a_masked_row_is_dropped(slope, path):
    q, k, v = _inputs(5, 2)
    out, lse = attention(q, k, v, return_lse=True)
    dlse = torch.ones_like(lse)
    dlse[:, :, :3] = slope
    grads = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), dlse))
    assert all(g.isfinite().all() for g in grads) and (grads[0][:, :3] == 0).all()
    seen = q[:, 3:].detach().requires_grad_()  # the rows that see a key, alone
    want = attention_ref(seen, k, v, return_lse=True)
    want = torch.autograd.grad(want, (seen, k, v), (torch.ones_like(want[0]), torch.ones_like(want[1])))
    torch.testing.assert_close(grads[0][:, 3:], want[0])
    torch.testing.assert_close(grads[1:], want[1:])


# What no table of switches has.

EDGES = {
    "one query of many keys, window and softcap": ((1, 50, 8, 1), {"window": 7, "softcap": 2.0}),
    "one query, one key": ((1, 1, 2, 2), {}),
    "seven query heads a key head": ((33, 33, 7, 1), {}),
    "rows that see nothing on either side of a window": ((40, 3, 2, 1), {"causal": False, "window": 2}),
    "window wider than the keys": ((18, 35, 2, 1), {"window": 35}),
    "window of one": ((20, 20, 1, 1), {"window": 1}),
    "window, full, more keys": ((19, 70, 2, 2), {"causal": False, "window": 9}),
    "packed, other lengths for keys": ((23, 31, 2, 1), {"cu": ((0, 7, 7, 20, 23), (0, 9, 12, 12, 31))}),
    "packed, window and softcap": ((30, 30, 2, 1), {"cu": ((0, 1, 30), (0, 1, 30)), "window": 4, "softcap": 1.0}),
    "packed, full": ((30, 24, 2, 1), {"cu": ((0, 11, 30), (0, 11, 24)), "causal": False}),
    "no queries": ((0, 5, 2, 1), {}),
    "no keys": ((5, 0, 2, 1), {}),
}


@both
@pytest.mark.parametrize(
    "edge,sinks",  # without keys and sinks the oracle has no graph: test_empty_documents_and_no_keys_at_all
    [case for case in itertools.product(EDGES, (False, True)) if case != ("no keys", False)],
)
def test_edges_agree_with_the_oracle(edge, sinks, path):
    (num_tokens, num_keys, heads, kv_heads), options = EDGES[edge]
    options = dict(options)
    if "cu" in options:
        options["cu_seqlens"] = tuple(_int32(*cu) for cu in options.pop("cu"))
    inputs = _inputs(num_tokens, num_keys, heads, kv_heads)
    sink = (normal(heads, seed=3),) if sinks else ()
    with_lse = torch.isfinite(attention_ref(*inputs, **options, return_lse=True)[1]).all() or sinks

    def run(function):
        return lambda q, k, v, *sink: function(
            q, k, v, sinks=sink[0] if sink else None, return_lse=with_lse, **options
        )

    compare(run(attention), run(attention_ref), *inputs, *sink)


@both
@pytest.mark.parametrize("shape", [(0, 4, 4, 2, 16), (2, 0, 0, 2, 16)])
def test_an_empty_batch_gives_empty_outputs_and_gradients(shape, path):
    batch, num_tokens, num_keys, heads, width = shape
    q, k, v = (torch.zeros(batch, n, heads, width, requires_grad=True) for n in (num_tokens, num_keys, num_keys))
    out, lse = attention(q, k, v, return_lse=True)
    assert out.shape == q.shape and lse.shape == (batch, heads, num_tokens)
    grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


@both
@pytest.mark.parametrize(
    "head_dim,value_dim", [(16, 64), (32, 32), (64, 16), (112, 112), (128, 128), (1, 3), (64, 256)]
)
def test_more_head_dims(head_dim, value_dim, path):
    q, k = normal(1, 6, 1, head_dim), normal(1, 6, 1, head_dim, seed=1)
    compare(_scaled(attention), _scaled(attention_ref), q, k, normal(1, 6, 1, value_dim, seed=2))


def _scaled(function):
    # The factor of the scores reaches the interpreter as fp32, where an eighth is exact.
    return lambda q, k, v: function(q, k, v, scale=0.125)


@both
def test_only_the_lse_of_packed_windows_gives_gradients(path):
    options = {"cu_seqlens": _int32(0, 9, 9, 20), "window": 5, "softcap": 3.0, "return_lse": True}
    inputs = _inputs(20, 20)
    got, want = (
        torch.autograd.grad(f(*inputs, **options)[1].square().sum(), inputs[:2]) for f in (attention, attention_ref)
    )
    torch.testing.assert_close(got, want)


@interpret
@needs_interpreter
def test_the_dropout_mask_has_the_same_bits_in_tiles_of_any_size():
    """With v = 1 on the diagonal, out holds the kept probabilities, and dv those of backward."""
    num, options = 40, {"causal": False, "dropout_p": 0.4, "rng": RNG, "head_offset": 3, "sample_offset": 2}
    q, k = (normal(1, num, 2, 16, dtype=torch.float32, seed=i) for i in range(2))
    v = torch.eye(num).view(1, num, 1, num).repeat(1, 1, 2, 1)
    keep = keep_mask_ref(RNG, 0.4, range(2, 3), range(3, 5), range(num), range(num))[0]
    for row, col in itertools.product((16, 32), (16, 32, 64)):
        with _tiles(row, col):
            leaf = v.clone().requires_grad_()
            out = attention(q, k, leaf, **options)
            (dv,) = torch.autograd.grad(out, leaf, v)
        assert torch.equal(out[0].transpose(0, 1) != 0, keep)
        assert torch.equal(dv[0].permute(1, 2, 0) != 0, keep)


@interpret
@needs_interpreter
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("head_dim", [24, 64])
def test_tma_descriptors_change_no_bit(packed, head_dim, monkeypatch):
    """The tile that reads keys by TMA against the same tile with pointers; NaN lies behind the keys' ends."""
    q = normal(1, 70, 2, head_dim, dtype=torch.float16)
    k, v = (normal(1, 140, 1, head_dim, dtype=torch.float16, seed=i) for i in (1, 2))
    k[:, 131:], v[:, 131:] = NAN, NAN
    options = {"cu_seqlens": (_int32(0, 33, 33, 70), _int32(0, 40, 41, 131))} if packed else {}
    sinks = normal(2, dtype=torch.float16, seed=4)

    def run(descriptors):
        tile = flash_tiles.Tile(32, 64, 4, 1, descriptors)
        tables = {kernel: {90: ((256, tile),)} for kernel in ("forward", "dq", "dkdv")}
        monkeypatch.setattr(flash_tiles, "DESCRIPTOR_TILES", tables)
        leaves = [x.detach().requires_grad_() for x in (q, *((k, v) if packed else (k[:, :131], v[:, :131])))]
        out, lse = attention(*leaves, sinks=sinks, return_lse=True, **options)
        dout = normal(*out.shape, dtype=torch.float16, seed=5)
        return out, lse, *torch.autograd.grad((out, lse), leaves, (dout, lse.detach().sin()))

    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a, b) and a.isfinite().all()


@interpret
@needs_interpreter
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("num_tokens,num_keys", [(70, 131), (131, 70), (1, 64), (64, 64)])
def test_one_masked_loop_for_groups_of_warps_changes_no_bit(causal, num_tokens, num_keys, monkeypatch):
    q, k, v = _inputs(num_tokens, num_keys, dtype=torch.float16)

    def run(specialized):
        tile = flash_tiles.Tile(32, 64, 4, 1, True, specialized)
        monkeypatch.setattr(flash_tiles, "DESCRIPTOR_TILES", {"forward": {90: ((256, tile),)}})
        out, lse = attention(q, k, v, causal=causal, return_lse=True)
        launch = forward_launch(q, k, v, *[None] * 4, Options(causal, 1.0, 0, 0.0, 0.0, 0, 0), out, lse)
        assert launch.constants["SPECIALIZED"] is specialized
        return out, lse

    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a, b) and not a.isnan().any()


@both
@pytest.mark.parametrize("scale", [-0.25, 0.0])
def test_a_scale_that_is_not_positive(scale, path):
    tensors = [x.detach() for x in _inputs(20, 26)]
    compare(*(lambda q, k, v, f=f: f(q, k, v, scale=scale) for f in (attention, attention_ref)), *tensors)


@both
@pytest.mark.long  # two runs are compared in test_flash.py
def test_bits_agree_over_ten_runs(path):
    inputs = _inputs(37, 37, dtype=torch.float32)

    def run():
        out = attention(*inputs, window=9, dropout_p=0.1, rng=RNG)
        return out, *torch.autograd.grad(out.square().sum(), inputs)

    first = run()
    assert all(torch.equal(a, b) for _ in range(9) for a, b in zip(first, run(), strict=True))


@both
@pytest.mark.parametrize("packed", [False, True])
def test_recompute_saves_neither_out_nor_lse_and_changes_no_bit(packed, path):
    inputs, sinks = _inputs(37, 37, dtype=torch.float32), normal(2, dtype=torch.float32, seed=3).requires_grad_()
    options = {"window": 9, "dropout_p": 0.1, "rng": RNG, "cu_seqlens": _int32(0, 8, 8, 30) if packed else None}
    small = [x for x in (RNG, options["cu_seqlens"], sinks) if x is not None]

    def run(recompute):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            out, lse = attention(*inputs, sinks=sinks, return_lse=True, recompute=recompute, **options)
        own = [x for x in saved if all(x.data_ptr() != y.data_ptr() for y in (*inputs, *small))]
        loss = out.square().sum() + lse[lse.isfinite()].sin().sum()
        return own, (out, lse, *torch.autograd.grad(loss, (*inputs, sinks)))

    (kept, base), (none, again) = run(False), run(True)
    assert sum(x.numel() for x in kept) == base[0].numel() + base[1].numel() and none == []
    assert all(torch.equal(a, b) for a, b in zip(base, again, strict=True))


@both
def test_backward_keeps_its_inputs_and_can_run_twice(path):
    q, k, v = _inputs(20, 20)
    out = attention(q.sin(), k.exp(), v.exp())  # sin, exp save what attention reads
    first, second = (torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    want = torch.autograd.grad(attention_ref(q.sin(), k.exp(), v.exp()).sum(), (q, k, v))
    torch.testing.assert_close(first, want)


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_error_is_at_most_twice_that_of_torch_in_the_same_dtype(dtype, path):
    """Root mean square against fp64, for out and every gradient; torch's own plain attention is the yardstick."""
    inputs = _inputs(64, 64, dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]

    def plain(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = (q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.25).masked_fill(
            ~torch.ones(64, 64).tril().bool(), -INF
        )
        return (scores.softmax(-1) @ v.repeat_interleave(2, 1)).transpose(1, 2)

    def values(function, tensors):
        out = function(*tensors)
        return out, *torch.autograd.grad(out, tensors, normal(*out.shape, dtype=dtype, seed=9).to(out.dtype))

    with dtype_support(dtype):
        ours = values(attention, inputs)
    for name, a, b, exact in zip(
        ("out", "dq", "dk", "dv"), ours, values(plain, inputs), values(plain, wide), strict=True
    ):
        error, limit = ((x.double() - exact).square().mean().sqrt() for x in (a, b))
        assert error <= 2 * limit, f"{name}: error {error:.2e}, torch's {limit:.2e}"


@pytest.mark.parametrize("options", [{}, {"window": 3, "softcap": 2.0}, {"dropout_p": 0.3, "rng": RNG}])
def test_gradcheck_of_the_oracle(options):
    inputs = [x.detach().requires_grad_() for x in (*_inputs(7, 9, width=4), normal(2, seed=5))]

    def run(q, k, v, sinks):
        return attention_ref(q, k, v, sinks=sinks, return_lse=True, **options)

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@both
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_nan_and_infinity_reach_the_rows_that_see_them_and_no_other(which, value, path):
    tensors = dict(zip("qkv", (x.detach() for x in _inputs(40, 40, 1)), strict=True))
    clean = attention(**tensors)
    tensors[which][0, 21, 0, 3] = value
    got, want = attention(**tensors)[0], attention_ref(**tensors)[0]
    seeing = torch.arange(40) == 21 if which == "q" else torch.arange(40) >= 21
    torch.testing.assert_close(got[seeing], want[seeing], equal_nan=True)
    assert not got[seeing].isfinite().all()
    # 0 * NaN of a masked value is NaN in torch; here it depends on the tile, so both are right.
    rest = clean[0].where(~got.isnan(), NAN) if which == "v" else clean[0]
    torch.testing.assert_close(got[~seeing], rest[~seeing], equal_nan=True)


@both
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_nan_in_a_document_changes_no_bit_of_its_neighbours(which, path):
    cu = _int32(0, 13, 30)

    def run(value):
        tensors = dict(zip("qkv", _inputs(30, 30), strict=True))
        with torch.no_grad():
            tensors[which][0, 13, 0, 0] = value
        out = attention(**tensors, cu_seqlens=cu)
        return out, *torch.autograd.grad(out.sum(), tuple(tensors.values()))

    for a, b in zip(run(1.0), run(NAN), strict=True):
        assert torch.equal(a[:, :13], b[:, :13]) and a.isfinite().all()


@interpret
@needs_interpreter
@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("packed", [False, True])
def test_no_32_bit_product_of_strides_overflows(which, packed, monkeypatch):
    """Each tensor in turn has its rows 2 GiB apart; the interpreter's debug mode stops at any 32-bit overflow."""
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(debug=True))
    stride = (1 << 30) + 16
    tensors = {
        name: normal(1, 3, 1, 16, dtype=torch.float16, seed=i) for i, name in enumerate(("q", "k", "v", "dout"))
    }
    storage = torch.empty(2 * stride + 16, dtype=torch.float16)  # only three rows are ever touched
    tensors[which] = storage.as_strided((1, 3, 1, 16), (0, stride, 16, 1)).copy_(tensors[which])
    options = {"cu_seqlens": _int32(0, 2, 3)} if packed else {}
    dout = tensors.pop("dout")
    leaves = [x.requires_grad_() for x in tensors.values()]
    wide = [x.detach().contiguous().requires_grad_() for x in leaves]
    out, want = attention(*leaves, **options), attention_ref(*wide, **options)
    close(out, want, torch.float16, "out")
    grads = torch.autograd.grad(out, leaves, dout), torch.autograd.grad(want, wide, dout)
    for got, expected, name in zip(*grads, "qkv", strict=True):
        close(got, expected, torch.float16, f"d{name}")


def _strided(draw, shape, seed):
    """The values of `normal` in a tensor that is contiguous, sliced, transposed, misaligned or broadcast."""
    layout = draw(st.sampled_from(("contiguous", "sliced", "heads first", "channels first", "shifted", "broadcast")))
    batch, num, heads, width = shape
    if layout == "sliced":
        return normal(batch, num, heads, width + 1, seed=seed)[..., 1:]
    if layout == "heads first":
        return normal(batch, heads, num, width, seed=seed).transpose(1, 2)
    if layout == "channels first":
        return normal(width, batch, num, heads, seed=seed).permute(1, 2, 3, 0)
    if layout == "shifted":
        return normal(batch * num * heads * width + 1, seed=seed)[1:].view(shape)
    if layout == "broadcast":
        return normal(batch, num, 1, width, seed=seed).expand(shape)
    return normal(*shape, seed=seed)


def _documents(draw, count):
    """(cu_seqlens, rows of the batch): lengths of `count` documents, none of them too, and slack behind the last."""
    lengths = [draw(st.sampled_from((0, 1, 2, 7, 16, 19))) for _ in range(count)]
    ends = list(itertools.accumulate(lengths, initial=0))
    return _int32(*ends), ends[-1] + draw(st.integers(0, 3))


@st.composite
def _calls(draw, packed=False):
    """Arguments of one call, with the masks that leave every row at least one key or a sink."""
    group, kv_heads, batch = (draw(st.integers(1, 2)) for _ in range(3))
    num_tokens, num_keys = draw(st.integers(1, 35)), draw(st.integers(1, 35))
    if packed:
        count, batch = draw(st.integers(1, 4)), 1
        (cu_q, num_tokens), (cu_k, num_keys) = (_documents(draw, count) for _ in range(2))
    width, value_width = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    heads = group * kv_heads
    shapes = (
        (batch, num_tokens, heads, width),
        (batch, num_keys, kv_heads, width),
        (batch, num_keys, kv_heads, value_width),
    )
    tensors = [_strided(draw, shape, i) for i, shape in enumerate(shapes)]
    options = {"causal": draw(st.booleans()), "scale": 0.25, "sinks": normal(heads, seed=4), "return_lse": True}
    if draw(st.booleans()):
        options["window"] = draw(st.integers(1, 40))
    if draw(st.booleans()):
        options["softcap"] = 2.0
    if draw(st.booleans()):
        options |= {"dropout_p": 0.25, "rng": RNG}
    if packed:
        options["cu_seqlens"] = (cu_q, cu_k)
    return tensors, options


@both
@settings(max_examples=6 if INTERPRETED else 40, deadline=None, derandomize=True)
@given(_calls())
def test_random_shapes_strides_and_switches_agree_with_the_oracle(path, call):
    tensors, options = call
    compare(lambda *x: attention(*x, **options), lambda *x: attention_ref(*x, **options), *tensors)


@both
@pytest.mark.parametrize("sinks", [True, False])
@settings(max_examples=4 if INTERPRETED else 25, deadline=None, derandomize=True)
@given(_calls(packed=True))
def test_random_pairs_of_documents_agree_with_the_oracle(path, sinks, call):
    """Other lengths for queries and keys, documents of either side empty, rows that see no key, slack."""
    tensors, options = call
    options = options if sinks else {**options, "sinks": None}
    leaves, wide = ([x.detach().requires_grad_() for x in tensors] for _ in range(2))
    out, lse = attention(*leaves, **options)
    want, want_lse = attention_ref(*wide, **options)
    torch.testing.assert_close((out, lse), (want, want_lse))
    dout, dlse = normal(*out.shape, seed=8), normal(*lse.shape, seed=9)
    got = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    seen = want_lse.isfinite()  # the lse of the others has no gradient, which the oracle makes NaN
    loss = (want * dout).sum() + torch.where(seen, want_lse, 0.0).mul(dlse.where(seen, 0.0)).sum()
    if not loss.requires_grad:  # no document has a key and a query
        assert all((x == 0).all() for x in got)
        return
    expected = torch.autograd.grad(loss, wide, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(got, expected)


def test_more_bad_input_is_refused():
    x = torch.ones(1, 4, 2, 8)
    for call, error, text in (
        (lambda: attention(x, x, x, window=-1), ValueError, "window is -1"),
        (lambda: attention(x, x, torch.ones(1, 4, 2, 257)), ValueError, "head dims 8 and 257"),
        (lambda: attention(x, x, x[:, :3]), ValueError, "do not fit"),
        (lambda: attention(x, x, x, sinks=torch.ones(2, device="meta")), ValueError, "sinks is on meta"),
        (lambda: attention(x, x, x, cu_seqlens=(_int32(0, 4), _int32(0, 2, 4))), ValueError, "documents"),
        (lambda: attention(x, x, x, cu_seqlens=_int32(0)), ValueError, "documents"),
    ):
        with pytest.raises(error, match=text):
            call()
