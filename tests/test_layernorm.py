"""layer_norm: forward and every gradient against the oracle, on the plain path and on the Triton kernels."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels import layer_norm, layer_norm_ref, layernorm, norm_rows
from plait.kernels.inspect import compile_offline
from tests.cases import (
    TOLERANCE,
    WIDTHS,
    close,
    compare,
    dtype_support,
    interpret,
    needs_compiler,
    needs_interpreter,
    needs_plain,
    normal,
)
from tests.edges import (
    LAYOUTS,
    NORM_LIMITS,
    check_far_rows,
    check_kept_graph,
    check_odd_gradients,
    lay_out,
    limit_norms,
    no_worse_than_torch,
)

# Shapes around the width: none, one row, several leading dims, no rows at all.
LEADING = ((), (1,), (2, 3), (0,))
FORMS = ("plain", "weight", "bias", "both", "residual", "residual alone")


def _call(op, form):
    """`op` as a function of tensors alone: x, then what the form has."""
    return {
        "plain": lambda x: op(x),
        "weight": lambda x, w: op(x, w),
        "bias": lambda x, b: op(x, None, b),
        "both": lambda x, w, b: op(x, w, b),
        "residual": lambda x, w, b, r: op(x, w, b, residual=r),
        "residual alone": lambda x, r: op(x, residual=r),
    }[form]


def _inputs(leading, width, dtype, form):
    x, w, b = (
        normal(*leading, width, dtype=dtype),
        normal(width, dtype=dtype, seed=1),
        normal(width, dtype=dtype, seed=2),
    )
    r = normal(*leading, width, dtype=dtype, seed=3)
    return {
        "plain": (x,), "weight": (x, w), "bias": (x, b), "both": (x, w, b),
        "residual": (x, w, b, r), "residual alone": (x, r),
    }[form]  # fmt: skip


def _check(leading, width, dtype, form):
    compare(_call(layer_norm, form), _call(layer_norm_ref, form), *_inputs(leading, width, dtype, form), factor=2.0)


# In 16 bits the sum is rounded before it is normalised, which the fp64 oracle cannot see: a test of its own.
EXACT = [(d, f) for d in TOLERANCE for f in FORMS if not f.startswith("residual") or torch.finfo(d).bits > 16]


@needs_plain
@pytest.mark.parametrize("dtype,form", EXACT, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("leading", LEADING)
def test_plain_path_agrees_with_the_oracle(leading, width, dtype, form):
    _check(leading, width, dtype, form)


INTERPRETED = (
    [((2, 3), 65, torch.float64, form) for form in FORMS]
    + [((2,), 33, dtype, "both") for dtype in TOLERANCE]
    + [((), 1, torch.float32, "both"), ((0,), 64, torch.float32, "both")]
)


@interpret
@needs_interpreter
@pytest.mark.parametrize("leading,width,dtype,form", INTERPRETED, ids=str)
def test_triton_agrees_with_the_oracle(leading, width, dtype, form):
    with dtype_support(dtype):
        _check(leading, width, dtype, form)


@interpret
@needs_interpreter
@pytest.mark.parametrize("width", [8192, 8193, 32769, 65536])
@pytest.mark.parametrize("form", ["both", "residual alone"])
def test_rows_too_wide_for_the_registers(width, form):
    """Rows are walked in blocks: backward from 8,193 columns on, forward from 32,769."""
    _check((2,), width, torch.float32, form)


@interpret
@pytest.mark.parametrize("kind", NORM_LIMITS)
def test_programs_add_up_several_rows(monkeypatch, kind):
    """Seven rows over three programs: in tiles of two, one by one in registers, or in blocks of 4 columns."""
    limit_norms(monkeypatch, kind)
    for form in ("both", "residual"):
        compare(_call(layer_norm, form), _call(layer_norm_ref, form), *_inputs((7,), 10, torch.float64, form))


@interpret
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_of_any_layout(layout):
    x, r = lay_out(normal(4, 6), layout), lay_out(normal(4, 6, seed=3), layout)
    w, b = lay_out(normal(6, seed=1), "stepped"), lay_out(normal(6, seed=2), layout)
    compare(_call(layer_norm, "residual"), _call(layer_norm_ref, "residual"), x, w, b, r)


@interpret
@needs_interpreter
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 4), max_size=2).map(tuple),
    st.integers(1, 70),
    st.sampled_from(list(TOLERANCE)),
    st.sampled_from(LAYOUTS),
    st.sampled_from(FORMS),
    st.sampled_from(LAYOUTS),
)
def test_triton_agrees_with_the_plain_path_on_anything(leading, width, dtype, layout, form, grad_layout):
    inputs = [lay_out(t, layout) for t in _inputs(leading, width, dtype, form)]
    leaves = [t.detach().requires_grad_() for t in inputs]
    with dtype_support(dtype):
        value = _call(layer_norm, form)(*leaves)
        outputs = value if isinstance(value, tuple) else (value,)
        grads = [lay_out(normal(*y.shape, dtype=dtype, seed=9 + i), grad_layout) for i, y in enumerate(outputs)]
        got = [y.detach() for y in outputs] + list(torch.autograd.grad(outputs, leaves, grads))
    h = (inputs[0] + inputs[-1]) if form.startswith("residual") else inputs[0]
    wide = [h.double().requires_grad_(), *(t.double().requires_grad_() for t in inputs[1:])]
    if form.startswith("residual"):
        base = "both" if form == "residual" else "plain"
        y = _call(layer_norm_ref, base)(*wide[:-1])
        want = [y, wide[0], *torch.autograd.grad((y, wide[0]), wide[:-1], [g.double() for g in grads])]
        want.append(want[2])
    else:
        y = _call(layer_norm_ref, form)(*wide)
        want = [y, *torch.autograd.grad(y, wide, grads[0].double())]
    # A row of one number has variance 0: eps alone scales the rounding of its mean, 1 / sqrt(1e-5) = 316 times.
    factor = 20.0 if layout == "flat" else 2.0
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        size = max(1.0, float(b.detach().abs().max())) if b.numel() else 1.0
        close(a / size, b / size, dtype, f"value {i}", factor)


# ---- errors in 16 bits ----


@interpret
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 64), (5, 97)])
def test_16_bit_errors_are_at_most_twice_those_of_torch(dtype, shape):
    no_worse_than_torch(
        _call(layer_norm, "both"),
        lambda x, w, b: torch.nn.functional.layer_norm(x, shape[-1:], w, b),
        _call(layer_norm_ref, "both"),
        *_inputs(shape[:-1], shape[-1], dtype, "both"),
    )


@interpret
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_rounded_sum_is_what_is_normalised(dtype):
    x, w, b, r = _inputs((3,), 33, dtype, "residual")
    with dtype_support(dtype):
        y, h = layer_norm(x, w, b, residual=r)
        assert torch.equal(h, x + r) and torch.equal(y, layer_norm(h, w, b))


@interpret
def test_a_large_mean_does_not_cancel():
    """Mean 1000, deviation 1: E[x^2] - E[x]^2 in fp32 would lose the variance."""
    x = normal(3, 100, dtype=torch.float32) + 1000.0
    got, want = layer_norm(x), layer_norm_ref(x.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=2e-4)


@interpret
def test_eps_is_added_to_the_variance_under_the_root():
    x = torch.tensor([[1.0, -1.0, 1.0, -1.0], [3.0, 3.0, 3.0, 3.0]])
    torch.testing.assert_close(layer_norm(x, eps=3.0), torch.stack((x[0] / 2.0, torch.zeros(4))))


# ---- what autograd hands in ----


@interpret
def test_stride_zero_and_stepped_gradients_are_not_read_as_contiguous():
    check_odd_gradients(layer_norm, layer_norm_ref, normal(4, 8), normal(8, seed=1), normal(8, seed=2))


@interpret
def test_gradients_do_not_overwrite_what_a_producer_saved():
    check_kept_graph(layer_norm, layer_norm_ref, normal(3, 8), normal(8, seed=1), normal(8, seed=2))


@interpret
def test_only_one_of_the_two_outputs_used():
    inputs = [t.requires_grad_() for t in _inputs((3,), 8, torch.float64, "residual")]
    for pick in (0, 1):
        got = torch.autograd.grad(
            _call(layer_norm, "residual")(*inputs)[pick].square().sum(), inputs, allow_unused=True
        )
        want = torch.autograd.grad(
            _call(layer_norm_ref, "residual")(*inputs)[pick].square().sum(), inputs, allow_unused=True
        )
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)


@interpret
@pytest.mark.parametrize("narrow", [512, 0], ids=["tiles", "rows"])
def test_huge_row_stride_does_not_overflow_32_bits(monkeypatch, narrow):
    monkeypatch.setattr(norm_rows, "_MAX_NARROW", narrow)
    check_far_rows(
        layer_norm,
        normal(3, 8, dtype=torch.float16),
        normal(8, dtype=torch.float16, seed=1),
        normal(8, dtype=torch.float16, seed=2),
    )


@interpret
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_spoil_their_row_as_in_torch(bad):
    x = normal(3, 8, dtype=torch.float32)
    x[1, 5] = bad
    y = layer_norm(x, torch.ones(8), torch.zeros(8))
    want = torch.nn.functional.layer_norm(x, (8,), torch.ones(8), torch.zeros(8))
    assert torch.equal(y.isnan(), want.isnan()) and y[1].isnan().all() and y[[0, 2]].isfinite().all()


@interpret
def test_bits_agree_between_runs_and_rows_do_not_know_each_other():
    x, w, b = (t.requires_grad_() for t in _inputs((7,), 65, torch.float32, "both"))
    dy = normal(7, 65, dtype=torch.float32, seed=4)
    runs = [torch.autograd.grad(layer_norm(x, w, b), (x, w, b), dy) for _ in range(3)]
    assert all(torch.equal(a, c) for run in runs for a, c in zip(run, runs[0], strict=True))
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    assert torch.equal(layer_norm(x, w, b)[order], layer_norm(x[order], w, b))


@interpret
def test_direct_functions_are_the_op_without_a_graph():
    x, w, b, r = _inputs((2, 3), 8, torch.float64, "residual")
    dy, dh = normal(2, 3, 8, seed=5), normal(2, 3, 8, seed=6)
    leaves = [t.requires_grad_() for t in (x, r, w, b)]
    y, h = layer_norm(x, w, b, residual=r)
    want = torch.autograd.grad((y, h), leaves, (dy, dh))
    with torch.no_grad():
        got_y, got_h, mean, rstd = layernorm.forward(x, r, w, b, 1e-5)
        dx, dweight, dbias = layernorm.backward(dy, got_h, w, mean, rstd, dh, True)
    assert mean.shape == rstd.shape == (2, 3) and torch.equal(got_y, y) and torch.equal(got_h, h)
    for a, c in zip((dx, dx, dweight, dbias), want, strict=True):
        assert torch.equal(a, c)
    assert layernorm.backward(dy, got_h, None, mean, rstd, None, False)[1:] == (None, None)


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck_of_the_reference_in_fp64(form):
    inputs = [t.requires_grad_() for t in _inputs((2,), 5, torch.float64, form)]
    assert torch.autograd.gradcheck(_call(layer_norm_ref, form), inputs)


@pytest.mark.parametrize(
    "call,error,text",
    [
        (lambda: layer_norm(torch.ones(2, 4), torch.ones(5)), ValueError, "needs weight of its last dim"),
        (lambda: layer_norm(torch.ones(2, 4), None, torch.ones(5)), ValueError, "needs bias of its last dim"),
        (lambda: layer_norm(torch.ones(2, 4), torch.ones(4).half()), TypeError, "weight is torch.float16"),
        (lambda: layer_norm(torch.ones(2, 4), None, torch.ones(4).half()), TypeError, "bias is torch.float16"),
        (lambda: layer_norm(torch.ones(2, 4).int()), TypeError, "x is torch.int32"),
        (lambda: layer_norm(torch.ones(2, 4), residual=torch.ones(4)), ValueError, "residual has shape"),
        (lambda: layer_norm(torch.ones(2, 4), torch.ones(4, device="meta")), ValueError, "weight is on meta"),
        (lambda: layer_norm(torch.ones(())), ValueError, "x is a scalar"),
        (lambda: layer_norm(torch.ones(2, 0)), ValueError, "has 0 columns"),
        (lambda: layer_norm(torch.ones(1, 65537)), ValueError, "has 65537 columns; expected 1 to 65536"),
    ],
)
def test_bad_input_is_refused_before_any_launch(call, error, text):
    with pytest.raises(error, match=text):
        call()


# (rows, columns, distance of rows, weight, bias, residual, centred): sizes of 1, odd ones, wide, beyond 32 bits.
EDGES = (
    (1, 1, 1, True, True, True, True),
    (5, 97, 101, False, False, False, True),
    (5, 97, 1 << 31, False, True, True, True),
    (1, 33, 0, False, False, True, False),
    (3, 40001, 40001, False, False, False, False),
    (3, 40001, 1 << 31, False, True, True, True),
    (1, 65536, 65536, True, False, False, True),
)


@pytest.mark.offline
@pytest.mark.long  # the declared list of test_gate.py stays in the short run
@needs_compiler
@pytest.mark.parametrize("rows,cols,step,weighted,biased,summed,centred", EDGES, ids=str)
def test_edge_launches_compile(rows, cols, step, weighted, biased, summed, centred):
    """Of layer_norm, and (not centred) of rms_norm; forward and backward."""
    x = torch.empty_strided((rows, cols), (step, 1), dtype=torch.bfloat16, device="meta")
    y, parameter = torch.empty_like(x), torch.empty(cols, dtype=torch.bfloat16, device="meta")
    rstd = torch.empty(rows, device="meta")
    partial = torch.empty(rows, cols, device="meta")
    weight, bias = parameter if weighted else None, parameter if biased else None
    residual, mean = x if summed else None, rstd if centred else None
    sums = partial if weighted else None, partial if biased else None
    for launch in (
        norm_rows.forward_launch(x, residual, weight, bias, 1e-5, y, y, mean, rstd),
        norm_rows.backward_launch(x, x, weight, mean, rstd, residual, y, *sums, rows),
    ):
        facts = compile_offline(launch, "sm_90")
        assert (facts.spill_loads, facts.spill_stores, facts.count("DFMA") + facts.count("DMUL")) == (0, 0, 0)
