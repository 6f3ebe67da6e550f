"""rms_norm: forward and every gradient against the oracle, on the plain path and on the Triton kernel."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels import column_sums, norm_rows, norm_tiles, rms_norm, rms_norm_ref, rmsnorm
from plait.kernels.plans import planned
from tests.cases import (
    TOLERANCE,
    WIDTHS,
    close,
    compare,
    dtype_support,
    interpret,
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


def _plain(x, weight):
    return rms_norm(x, weight)


def _plain_ref(x, weight):
    return rms_norm_ref(x, weight)


def _residual(x, weight, residual):
    return rms_norm(x, weight, residual=residual)


def _residual_ref(x, weight, residual):
    return rms_norm_ref(x, weight, residual=residual)


def _unweighted(x, residual):
    return rms_norm(x, residual=residual)


def _unweighted_ref(x, residual):
    return rms_norm_ref(x, residual=residual)


def _check(leading, width, dtype):
    x, weight = normal(*leading, width, dtype=dtype), normal(width, dtype=dtype, seed=1)
    compare(_plain, _plain_ref, x, weight)
    compare(rms_norm, rms_norm_ref, x)  # without a weight
    # The sum is rounded to the dtype before it is normalised; the fp64 oracle cannot see that.
    if dtype in (torch.float64, torch.float32):
        residual = normal(*leading, width, dtype=dtype, seed=2)
        compare(_residual, _residual_ref, x, weight, residual)
        compare(_unweighted, _unweighted_ref, x, residual)


@needs_plain
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("leading", LEADING)
def test_plain_path_agrees_with_the_oracle(leading, width, dtype):
    _check(leading, width, dtype)


@interpret
@needs_interpreter
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("leading,width", [((), 1), ((2, 3), 65), ((1,), 1000), ((0,), 64)])
def test_triton_agrees_with_the_oracle(leading, width, dtype):
    with dtype_support(dtype):
        _check(leading, width, dtype)


@interpret
@needs_interpreter
@pytest.mark.parametrize("width", [8192, 8193, 32769, 65536])
def test_rows_too_wide_for_the_registers(width):
    """Rows are walked in blocks: backward from 8,193 columns on, forward from 32,769."""
    x, weight = normal(2, width, dtype=torch.float32), normal(width, dtype=torch.float32, seed=1)
    compare(_plain, _plain_ref, x, weight, factor=2.0)
    compare(_unweighted, _unweighted_ref, x, x.flip(0), factor=2.0)


@interpret
@pytest.mark.parametrize("kind", NORM_LIMITS)
def test_programs_add_up_several_rows(monkeypatch, kind):
    """Seven rows over three programs: in tiles of two, one by one in registers, or in blocks of 4 columns."""
    limit_norms(monkeypatch, kind)
    compare(_plain, _plain_ref, normal(7, 10), normal(10, seed=1))
    compare(_residual, _residual_ref, normal(7, 10), normal(10, seed=1), normal(7, 10, seed=2))


@interpret
@needs_interpreter
@pytest.mark.parametrize("rows,cols", [(1, 1), (31, 33), (33, 64), (264, 7), (0, 5)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_partial_sums_are_added_whatever_their_number(rows, cols, dtype):
    partial = normal(rows, cols, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    outs = [torch.full((cols + 1,), 7.0, dtype=dtype) for _ in range(2)]
    for out in outs:
        column_sums.sum_launch(partial, out[:cols]).run()
    close(outs[0][:cols], partial.sum(0), dtype, "sums")
    assert torch.equal(*outs) and outs[0][cols] == 7.0


@interpret
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_of_any_layout(layout):
    x, weight = lay_out(normal(5, 6), layout), lay_out(normal(6, seed=1), "stepped")
    compare(_plain, _plain_ref, x, weight)
    compare(_residual, _residual_ref, x, lay_out(weight, layout), lay_out(normal(5, 6, seed=2), layout))


@interpret
@needs_interpreter
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 4), max_size=2).map(tuple),
    st.integers(1, 70),
    st.sampled_from(list(TOLERANCE)),
    st.sampled_from(LAYOUTS),
    st.sampled_from(LAYOUTS),
    st.booleans(),
    st.booleans(),
)
def test_triton_agrees_with_the_oracle_on_anything(leading, width, dtype, layout, grad_layout, weighted, summed):
    x, residual = (lay_out(normal(*leading, width, dtype=dtype, seed=i), layout) for i in (0, 2))
    weight = lay_out(normal(width, dtype=dtype, seed=1), layout) if weighted else None
    dy, dh = (lay_out(normal(*leading, width, dtype=dtype, seed=i), grad_layout) for i in (3, 4))
    with dtype_support(dtype):
        y, h, rstd = rmsnorm.forward(x, residual if summed else None, weight, 1e-6)
        dx, dweight = rmsnorm.backward(dy, h, weight, rstd, dh if summed else None)
    assert torch.equal(h, x + residual if summed else x)
    wide = [h.double().requires_grad_()] + ([weight.double().requires_grad_()] if weighted else [])
    out = rms_norm_ref(*wide)
    want = [out, *torch.autograd.grad(out, wide, dy.double())]
    if summed:
        want[1] = want[1] + dh.double()
    assert (dweight is None) == (weight is None)
    for i, (a, b) in enumerate(zip([y, dx, dweight], want, strict=weighted)):
        size = max(1.0, float(b.detach().abs().max())) if b.numel() else 1.0
        close(a / size, b / size, dtype, f"value {i}", 2.0)


@interpret
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 64), (5, 97)])
def test_16_bit_errors_are_at_most_twice_those_of_torch(dtype, shape):
    no_worse_than_torch(
        rms_norm,
        lambda x, weight: torch.nn.functional.rms_norm(x, shape[-1:], weight, 1e-6),
        rms_norm_ref,
        normal(*shape, dtype=dtype),
        normal(shape[-1], dtype=dtype, seed=1),
    )


@interpret
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_rounded_sum_is_what_is_normalised(dtype):
    x, weight, residual = (
        normal(3, 33, dtype=dtype),
        normal(33, dtype=dtype, seed=1),
        normal(3, 33, dtype=dtype, seed=2),
    )
    with dtype_support(dtype):
        y, h = rms_norm(x, weight, residual=residual)
        assert torch.equal(h, x + residual) and torch.equal(y, rms_norm(h, weight))


@interpret
def test_eps_is_added_to_the_mean_square_under_the_root():
    x = torch.tensor([[1.0, -1.0, 1.0, -1.0], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(rms_norm(x, eps=3.0), torch.stack((x[0] / 2.0, torch.zeros(4))))


@interpret
def test_bits_agree_between_runs():
    x, weight = (
        normal(7, 65, dtype=torch.float32).requires_grad_(),
        normal(65, dtype=torch.float32).requires_grad_(),
    )
    dy = normal(7, 65, dtype=torch.float32, seed=4)
    first, second = (torch.autograd.grad(rms_norm(x, weight), (x, weight), dy) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_gradcheck_of_the_reference_in_fp64():
    x, weight, residual = (t.requires_grad_() for t in (normal(2, 5), normal(5, seed=1), normal(2, 5, seed=2)))
    assert torch.autograd.gradcheck(_residual_ref, (x, weight, residual))
    assert torch.autograd.gradcheck(rms_norm_ref, (x,))


@interpret
def test_stride_zero_and_stepped_gradients_are_not_read_as_contiguous():
    check_odd_gradients(rms_norm, rms_norm_ref, normal(4, 8), normal(8, seed=1))


@interpret
def test_gradients_do_not_overwrite_what_a_producer_saved():
    check_kept_graph(rms_norm, rms_norm_ref, normal(3, 8), normal(8, seed=1))


@interpret
@pytest.mark.parametrize("narrow", [512, 0], ids=["tiles", "rows"])
def test_huge_row_stride_does_not_overflow_32_bits(monkeypatch, narrow):
    monkeypatch.setattr(norm_rows, "_MAX_NARROW", narrow)
    check_far_rows(rms_norm, normal(3, 8, dtype=torch.float16), normal(8, dtype=torch.float16, seed=1))


@interpret
def test_nan_and_inf_stay_in_their_row():
    x = normal(3, 8, dtype=torch.float32)
    x[0, 2], x[1, 5] = float("nan"), float("inf")
    y = rms_norm(x, torch.ones(8))
    assert y[0].isnan().all()
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (8,), torch.ones(8), 1e-6), equal_nan=True)
    assert y[2].isfinite().all()


@interpret
def test_rows_are_independent_of_their_order():
    x, weight = normal(7, 65, dtype=torch.float32), normal(65, dtype=torch.float32, seed=1)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    assert torch.equal(rms_norm(x, weight)[order], rms_norm(x[order], weight))


@pytest.mark.parametrize(
    "call,error,text",
    [
        (lambda: rms_norm(torch.ones(2, 4), torch.ones(5)), ValueError, "needs weight of its last dim"),
        (lambda: rms_norm(torch.ones(2, 4), torch.ones(4).half()), TypeError, "weight is torch.float16"),
        (lambda: rms_norm(torch.ones(2, 4).int(), torch.ones(4)), TypeError, "x is torch.int32"),
        (lambda: rms_norm(torch.ones(2, 4), torch.ones(4), residual=torch.ones(4)), ValueError, "residual has shape"),
        (lambda: rms_norm(torch.ones(2, 4), torch.ones(4, device="meta")), ValueError, "weight is on meta"),
        (lambda: rms_norm(torch.ones(())), ValueError, "x is a scalar"),
        (lambda: rms_norm(torch.ones(2, 0)), ValueError, "has 0 columns"),
        (lambda: rms_norm(torch.ones(1, 65537)), ValueError, "has 65537 columns; expected 1 to 65536"),
    ],
)
def test_bad_input_is_refused_before_any_launch(call, error, text):
    with pytest.raises(error, match=text):
        call()


@interpret
@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows,width", [(1, 1), (7, 64), (33, 128), (5, 97), (3, 512)])
def test_narrow_rows_in_tiles_have_the_bits_of_rows_alone(monkeypatch, rows, width, dtype):
    """Also of layer_norm's kernels; the weight's gradient has another order of rows: within the budget."""
    x, r, dy = (normal(rows, width, dtype=dtype, seed=i) for i in range(3))
    w, b = normal(width, dtype=dtype, seed=3), normal(width, dtype=dtype, seed=4)

    def run(residual, bias):
        y, h, mean, rstd = planned(norm_rows.build_forward, (x, residual, w, bias), 1e-6, bias is not None)
        dx, *sums = norm_rows.run_backward(dy, h, w, mean, rstd, residual, bias is not None)
        return [y, h, rstd, dx] + ([] if mean is None else [mean]), [s for s in sums if s is not None]

    for residual, bias in ((None, None), (r, None), (None, b), (r, b)):
        with dtype_support(dtype):
            tiles, sums = run(residual, bias)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(norm_rows, "_MAX_NARROW", 0)
                alone, want = run(residual, bias)
        assert all(torch.equal(a, b) for a, b in zip(tiles, alone, strict=True))
        for a, c in zip(sums, want, strict=True):
            close(a / rows**0.5, c / rows**0.5, dtype, "sum over rows")


@pytest.mark.parametrize(
    "rows,cols,tile", [(0, 64, 1), (1, 64, 16), (100_000, 64, 16), (264 * 8, 128, 8), (9, 512, 2)]
)
def test_programs_of_the_backward_share_whole_tiles(rows, cols, tile):
    programs = norm_rows.num_partials(rows, cols)
    assert programs <= norm_tiles.NUM_TILE_PARTIALS
    if rows:
        assert norm_tiles.rows_of_tile(cols) == tile
        share = math.ceil(math.ceil(rows / tile) / programs) * tile
        assert (programs - 1) * share < rows <= programs * share
