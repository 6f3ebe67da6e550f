"""Every op with a gradient on anything: random shapes (empty ones too), dtypes, and a layout for each tensor.

Inputs and the gradients of outputs are transposed, sliced, stepped, off any 16-byte boundary, or broadcast by stride
0, between NaN that nobody may read. The oracle is the op's `_ref` on fp64 copies. The same body runs for the plain
path and, marked `interpret`, for Triton. Not here: attention (test_flash_edges.py), and ops without a gradient
(test_optim.py, test_norms.py).
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait import kernels
from plait.kernels.launch import INTERPRETED
from tests.cases import TOLERANCE, close, dtype_support, normal
from tests.edges import LAYOUTS, lay_out
from tests.test_flash import both

RNG = torch.tensor([5, -9])
SMALL = st.integers(0, 4)


def _lead(draw, most=2):
    return tuple(draw(st.lists(SMALL, max_size=most)))


def _norm(draw, biased):
    shape = (*_lead(draw), draw(st.integers(1, 40)))
    shapes = [shape] + [shape[-1:]] * draw(st.integers(0, 1 + biased))
    if not draw(st.booleans()):
        return shapes, lambda f: lambda x, *w: f(x, *w)
    return [*shapes, shape], lambda f: lambda x, *rest: f(x, *rest[:-1], residual=rest[-1])


def _rms_norm(draw):
    return _norm(draw, biased=False)


def _layer_norm(draw):
    return _norm(draw, biased=True)


def _gated(draw):
    return [(*_lead(draw), 2 * draw(st.integers(0, 30)))], lambda f: f


def _geglu(draw):
    approximate = draw(st.sampled_from(("none", "tanh")))
    shapes, _ = _gated(draw)
    return shapes, lambda f: lambda x: f(x, approximate=approximate)


def _linear(draw):
    lead = (draw(SMALL), draw(st.integers(0, 9)))
    inner, cols = draw(st.integers(0, 40)), draw(st.integers(0, 40))
    biased, added = draw(st.booleans()), draw(st.booleans())
    shapes = [(*lead, inner), (cols, inner)] + [(cols,)] * biased + [(*lead, cols)] * added
    options = {"activation": draw(st.sampled_from((None, "gelu", "gelu_tanh", "silu", "relu2")))}
    if draw(st.booleans()):
        options |= {"dropout_p": 0.25, "rng": RNG, "row_offset": 3, "col_offset": draw(st.integers(0, 5))}

    def calling(f):
        def call(x, weight, *rest):
            return f(x, weight, rest[0] if biased else None, residual=rest[-1] if added else None, **options)

        return call

    return shapes, calling


def _linear_swiglu(draw):
    inner = draw(st.integers(0, 30))
    return [(*_lead(draw), draw(st.integers(0, 5)), inner), (2 * draw(st.integers(0, 20)), inner)], lambda f: f


def _linear_dgrad(draw):
    rows, cols, inner = (draw(st.integers(0, 30)) for _ in range(3))
    return [(rows, cols), (cols, inner)], lambda f: f


def _linear_wgrad(draw):
    rows, cols, inner = (draw(st.integers(0, 30)) for _ in range(3))
    return [(rows, cols), (rows, inner)], lambda f: f


def _rope(draw):
    batch, tokens, width = draw(SMALL), draw(SMALL), draw(st.integers(1, 20))
    heads = [draw(st.integers(1, 3)) for _ in range(2)]
    angles = normal(*((batch,) if draw(st.booleans()) else ()), tokens, draw(st.integers(0, width // 2)))
    cos, sin = (_laid_out(draw, x) for x in (angles.cos(), angles.sin()))
    interleaved = draw(st.booleans())
    shapes = [(batch, tokens, h, width) for h in heads]
    return shapes, lambda f: lambda q, k: f(q, k, cos, sin, interleaved=interleaved)


def _dropout(draw):
    place = dict(zip(("sample_offset", "row_offset", "col_offset"), (draw(SMALL) for _ in range(3)), strict=True))
    shape = tuple(draw(st.integers(0, n)) for n in (3, 5, 40))
    return [shape], lambda f: lambda x: f(x, 0.3, RNG, **place)


def _tokens(draw, shape, low, high):
    values = torch.tensor([draw(st.integers(low, high)) for _ in range(math.prod(shape))], dtype=torch.int64)
    return values.repeat_interleave(2)[::2].view(shape) if draw(st.booleans()) else values.view(shape)


def _embedding(draw):
    rows = draw(st.integers(1, 6))
    tokens = _tokens(draw, _lead(draw), -2, rows + 4)
    start = draw(st.integers(0, 3))
    return [(rows, draw(st.integers(0, 20)))], lambda f: lambda weight: f(tokens, weight, vocab_start=start)


def _loss_options(draw, lead, classes):
    options = {
        "label_smoothing": draw(st.sampled_from((0.0, 0.1))), "z_loss": draw(st.sampled_from((0.0, 0.01))),
        "softcap": draw(st.sampled_from((0.0, 3.0))), "reduction": draw(st.sampled_from(("none", "sum", "mean"))),
        "ignore_index": 1,
    }  # fmt: skip
    return _tokens(draw, lead, 0, classes - 1), options


def _cross_entropy(draw):
    lead, classes = _lead(draw), draw(st.integers(1, 40))
    target, options = _loss_options(draw, lead, classes)
    if not draw(st.booleans()):
        return [(*lead, classes)], lambda f: lambda x: f(x, target, **options)
    return [(*lead, classes), lead], lambda f: lambda x, w: f(x, target, weight_per_token=w, **options)


def _linear_cross_entropy(draw):
    lead, classes, inner = _lead(draw), draw(st.integers(1, 40)), draw(st.integers(1, 20))
    target, options = _loss_options(draw, lead, classes)
    return [(*lead, inner), (classes, inner)], lambda f: lambda x, w: f(x, w, target, **options)


# name -> what draws (shapes of the differentiable inputs, how a function of this op is called with them).
OPS = {
    "rms_norm": _rms_norm, "layer_norm": _layer_norm, "swiglu": _gated, "geglu": _geglu, "linear": _linear,
    "linear_swiglu": _linear_swiglu, "linear_dgrad": _linear_dgrad, "linear_wgrad": _linear_wgrad, "rope": _rope,
    "dropout": _dropout, "embedding": _embedding, "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
}  # fmt: skip
# Roundings of 16 bits that a result sees: its own, that of the value before an activation, those of two products.
STEPS = {"linear": 3.0, "linear_swiglu": 4.0, "linear_cross_entropy": 4.0, "rms_norm": 2.0, "layer_norm": 2.0}


def _laid_out(draw, values):
    return lay_out(values, draw(st.sampled_from(LAYOUTS)) if values.numel() else "plain")


def _tuple(value):
    return value if isinstance(value, tuple) else (value,)


def _close(got, want, dtype, what, factor):
    assert got.dtype in (dtype, torch.float32, torch.float64)
    size = max(1.0, float(want.abs().max())) if want.numel() else 1.0
    close(got / size, want / size, dtype, what, factor)


@both
@pytest.mark.parametrize("name", OPS)
def test_values_and_gradients_agree_with_the_oracle_on_anything(name, path):
    op, oracle = getattr(kernels, name), getattr(kernels, f"{name}_ref")
    factor = STEPS.get(name, 1.5)

    @settings(max_examples=8 if INTERPRETED else 25, deadline=None, derandomize=True)
    @given(st.data())
    def check(data):
        shapes, calling = OPS[name](data.draw)
        dtype = data.draw(st.sampled_from(list(TOLERANCE)))
        values = [normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
        leaves = [_laid_out(data.draw, x).requires_grad_() for x in values]
        wide = [x.detach().double().requires_grad_() for x in leaves]
        expected = _tuple(calling(oracle)(*wide))
        douts = [_laid_out(data.draw, normal(*y.shape, dtype=dtype, seed=9 + i)) for i, y in enumerate(expected)]
        want = torch.autograd.grad(expected, wide, [d.double() for d in douts])
        with dtype_support(dtype):
            found = _tuple(calling(op)(*leaves))
            got = torch.autograd.grad(found, leaves, [d.to(y.dtype) for d, y in zip(douts, found, strict=True)])
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            _close(a.detach(), b.detach(), dtype, f"output {i}", factor)
        for i, (a, b, x) in enumerate(zip(got, want, leaves, strict=True)):
            assert a.dtype == x.dtype
            _close(a, b, dtype, f"gradient {i}", factor)

    check()


BAD = (math.nan, math.inf, -math.inf)


def _spoil(draw, x):
    """`x`, one of whose numbers is not finite."""
    if x.numel():
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = draw(st.sampled_from(BAD))
    return x


@both
@pytest.mark.parametrize("name", [name for name in OPS if name != "embedding"])  # test_embed.py: rows stay apart
def test_what_is_not_finite_passes_through_forward_and_backward_as_in_torch(name, path):
    """One number of an input or of an output's gradient: the same results are finite, and those agree.

    Whether the others are NaN or infinite depends on the order of a formula's terms, in torch too.
    """
    op, oracle = getattr(kernels, name), getattr(kernels, f"{name}_ref")
    # An ignored token gets a gradient of 0 whatever its loss gets, as from torch's kernel; by the formula 0 * NaN.
    upstream = name != "linear_cross_entropy"

    @settings(max_examples=6 if INTERPRETED else 30, deadline=None, derandomize=True)
    @given(st.data())
    def check(data):
        shapes, calling = OPS[name](data.draw)
        leaves = [normal(*shape, dtype=torch.float32, seed=i) for i, shape in enumerate(shapes)]
        spoilt = data.draw(st.integers(0, len(leaves) - 1 + upstream))
        if spoilt < len(leaves):
            _spoil(data.draw, leaves[spoilt])
        wide = [x.double().requires_grad_() for x in leaves]
        leaves = [x.requires_grad_() for x in leaves]
        expected = _tuple(calling(oracle)(*wide))
        douts = [normal(*y.shape, dtype=torch.float32, seed=9 + i) for i, y in enumerate(expected)]
        if spoilt == len(leaves):
            _spoil(data.draw, douts[0])
        want = torch.autograd.grad(expected, wide, [d.double() for d in douts])
        found = _tuple(calling(op)(*leaves))
        got = torch.autograd.grad(found, leaves, douts)
        for a, b in zip((*found, *got), (*expected, *want), strict=True):
            a, b = (x.double().nan_to_num(math.nan, math.nan, math.nan) for x in (a, b))
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)

    check()


def test_every_op_with_a_gradient_is_here():
    elsewhere = {"adamw_", "rope_", "l2_norm", "l2_norm_squared", "embedding_wgrad", "attention"}  # see above
    parts = {"linear_cross_entropy_grad", "linear_cross_entropy_stats", "merge_stats", "token_loss"}
    assert set(OPS) == {n for n in kernels.__all__ if not n.endswith("_ref")} - elsewhere - parts
