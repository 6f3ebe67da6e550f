"""The matmul kernels in the interpreter: shapes, strides, tiles, switches in pairs, splits, bytes; and the tables.

A case runs `product_launches` with a plan of its own, so that each tile and both ways to load are reached on small
matrices. The measure is the fp64 result; 16-bit results may err twice as much as torch's own in that dtype.
"""

import contextlib
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels import (
    activations,
    linear,
    linear_dgrad,
    linear_dgrad_ref,
    linear_ref,
    linear_swiglu,
    linear_swiglu_ref,
    linear_wgrad,
    matmul,
    matmul_launch,
)
from plait.kernels.launch import INTERPRETED, run_launches
from plait.kernels.matmul_launch import Epilogue, Plan, Tile, product_launches
from plait.kernels.philox import keep_mask_ref
from tests.cases import close, compare, dtype_support, interpret, needs_interpreter, normal

RNG = torch.tensor([3, 5])
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# (M, N, K): one of each, none of each, odd, a tile exactly, one more and one less, several tiles and groups.
SHAPES = (
    (1, 1, 1),
    (1, 70, 33),
    (70, 1, 33),
    (5, 7, 0),
    (0, 7, 3),
    (5, 0, 3),
    (13, 27, 55),
    (32, 64, 32),
    (33, 65, 33),
    (31, 63, 31),
    (130, 40, 20),
)
# Whole, in halves and in quarters; tall and wide.
TILES = (Tile(16, 16, 16, 4, 1, 1, 2), Tile(32, 64, 32, 4, 1, 2, 3), Tile(64, 32, 16, 4, 1, 4, 8))
LAYOUTS = ("contiguous", "transposed", "sliced", "stepped", "padded", "broadcast")
ARCHS = (80, 90)  # by pointers, by descriptors


@contextlib.contextmanager
def support(dtype):
    """`dtype_support`, and descriptors read as masked loads: what the shim for bf16 knows."""
    with dtype_support(dtype), pytest.MonkeyPatch.context() as patch:
        if INTERPRETED and dtype is torch.bfloat16:
            from triton.runtime import interpreter

            def load(self, source, indices, *hints):  # triton 3.6 has two where 3.9 has one
                pointers, mask = source.materialize_pointers(indices)
                return self.create_masked_load(pointers, mask, None)

            patch.setattr(interpreter.InterpreterBuilder, "create_descriptor_load", load)
        yield


def matrix(layout, rows, cols, dtype=torch.float32, seed=0):
    """[rows, cols] of normal values that lie in memory as the layout says."""
    if layout == "transposed":
        return normal(cols, rows, dtype=dtype, seed=seed).t()
    if layout == "sliced":  # aligned to nothing
        return normal(rows, cols + 3, dtype=dtype, seed=seed)[:, 1 : cols + 1]
    if layout == "stepped":
        return normal(rows, 2 * cols, dtype=dtype, seed=seed)[:, ::2]
    if layout == "padded":  # rows apart, each aligned
        return normal(rows, (cols + 15) // 16 * 16, dtype=dtype, seed=seed)[:, :cols]
    if layout == "broadcast":
        return normal(1, cols, dtype=dtype, seed=seed).expand(rows, cols)
    return normal(rows, cols, dtype=dtype, seed=seed)


def product(a, b, out, extra, how):
    """`product_launches`, run; nothing for an empty out."""
    if out.numel():
        run_launches(product_launches(a, b, out, extra, how))


def run(a, b, extra=None, how=None, out_dtype=None):
    """out[M, N], poisoned before it is written."""
    how = how or Plan(90, TILES[1], 1)
    out = torch.full((a.shape[0], b.shape[0]), float("nan"), dtype=out_dtype or a.dtype)
    product(a, b, out, extra or Epilogue(), how)
    return out


def no_worse_than_torch(actual, plain, exact, what):
    """The error of `actual` is at most twice that of `plain`, or of one rounding."""
    assert actual.dtype == plain.dtype and actual.shape == exact.shape
    if not actual.numel():
        return
    one = torch.finfo(actual.dtype).eps * float(exact.abs().max())
    error = float((actual.double() - exact).abs().max())
    allowed = 2.0 * max(float((plain.double() - exact).abs().max()), one)
    assert error <= allowed, f"{what}: error {error}, allowed {allowed}"


@interpret
@needs_interpreter
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_product_errs_no_more_than_twice_as_much_as_torch(shape, dtype, arch):
    rows, cols, inner = shape
    a, b = normal(rows, inner, dtype=dtype), normal(cols, inner, dtype=dtype, seed=1)
    for tile in TILES[1:]:
        with support(dtype):
            out = run(a, b, how=Plan(arch, tile, 1))
        no_worse_than_torch(out, a @ b.t(), a.double() @ b.double().t(), f"{shape} {tile}")


@interpret
@needs_interpreter
@pytest.mark.parametrize("kind_b", LAYOUTS)
@pytest.mark.parametrize("kind_a", LAYOUTS)
def test_operands_of_any_stride_give_the_bits_of_contiguous_ones(kind_a, kind_b):
    a, b = matrix(kind_a, 21, 40), matrix(kind_b, 37, 40, seed=1)
    want = run(a.contiguous(), b.contiguous(), how=Plan(80, TILES[1], 1))
    torch.testing.assert_close(want, a @ b.t(), rtol=1e-5, atol=1e-5)
    for arch in ARCHS:
        assert torch.equal(run(a, b, how=Plan(arch, TILES[1], 1)), want)


def test_descriptors_are_only_made_of_what_they_can_hold():
    def fits(layout, arch=90, cols=40, dtype=torch.bfloat16):
        return matmul_launch.fits_descriptor(matrix(layout, 24, cols, dtype), arch)

    assert fits("contiguous") and fits("transposed") and fits("padded", cols=37)
    assert not fits("contiguous", arch=80)
    assert not fits("contiguous", cols=37) and not fits("contiguous", cols=0)
    assert not (fits("sliced") or fits("stepped") or fits("broadcast"))
    assert fits("contiguous", cols=36, dtype=torch.float32)
    assert not matmul_launch.fits_descriptor(torch.zeros(80, dtype=torch.bfloat16)[4:76].view(9, 8), 90)


# What an epilogue can do, each with what it needs; M 21, N 37.
def _switches(dtype=torch.float32):
    return {
        "bias": {"bias": normal(37, dtype=dtype, seed=2)},
        "silu": {"activation": 3},
        "pre": {"keep_pre": True, "pre": torch.full((21, 37), float("nan"), dtype=dtype)},
        "dropout": {"mask": (RNG, 0.25, 1, 2, 4), "num_tokens": 7},
        "residual": {"residual": matrix("sliced", 21, 37, dtype, seed=3)},
        "accumulate": {"accumulate": True},
        "sums": {"sums": torch.full((21,), 0.5, dtype=torch.float32)},
    }


def _expected(a, b, extra, old):
    """(out, pre, sums) in fp64, step by step as the epilogue is documented."""
    out = a.double() @ b.double().t()
    if extra.bias is not None:
        out = out + extra.bias.double()
    pre = out
    out = activations.activate(out, extra.activation)
    if extra.slope:
        out = activations.activation_grad(out, extra.pre.double(), extra.slope)
    if extra.mask is not None:
        rng, p, sample, row, col = extra.mask
        samples = out.shape[0] // extra.num_tokens
        keep = keep_mask_ref(
            rng, p, range(sample, sample + samples), range(1), range(row, row + extra.num_tokens),
            range(col, col + out.shape[1]),
        )  # fmt: skip
        out = torch.where(keep.reshape(out.shape), out / (1.0 - p), 0.0)
    if extra.residual is not None:
        out = out + extra.residual.double()
    sums = a.double().sum(1)
    return (out + old, pre, sums + 0.5) if extra.accumulate else (out, pre, sums)


@interpret
@needs_interpreter
@pytest.mark.parametrize("num_splits", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("pair", list(itertools.combinations(_switches(), 2)), ids="+".join)
def test_switches_work_alone_and_in_pairs(pair, num_splits):
    a, b = normal(21, 40), normal(37, 40, seed=1)
    a, b = a.float(), b.float()
    chosen = _switches()
    for names, tile in ((pair[:1], TILES[1]), (pair[1:], TILES[2]), (pair, TILES[1]), (tuple(chosen), TILES[2])):
        fields = {k: v for name in names for k, v in _switches()[name].items()}
        extra = Epilogue(**fields)
        out = torch.full((21, 37), 1.5)
        product(a, b, out, extra, Plan(90, tile, num_splits))
        want, pre, sums = _expected(a, b, extra, 1.5)
        close(out, want, torch.float32, f"out of {names}", 2.0)
        if extra.keep_pre:
            close(extra.pre, pre, torch.float32, f"pre of {names}", 2.0)
        if extra.sums is not None:
            close(extra.sums, sums, torch.float32, f"sums of {names}", 2.0)


@interpret
@needs_interpreter
@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("code", [1, 2, 3, 4])
def test_activations_and_their_slopes(code, num_splits):
    a, b = normal(9, 40).float(), normal(11, 40, seed=1).float() / 4
    for extra in (
        Epilogue(activation=code),
        Epilogue(slope=code, pre=normal(9, 11, seed=4).float() * 3),
    ):
        out = run(a, b, extra, Plan(90, TILES[0], num_splits))
        close(out, _expected(a, b, extra, 0.0)[0], torch.float32, f"activation {code}", 2.0)


@interpret
@needs_interpreter
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_epilogue_errs_no_more_than_twice_as_much_as_torch(dtype):
    x, w, b = normal(29, 48, dtype=dtype), normal(36, 48, dtype=dtype, seed=1), normal(36, dtype=dtype, seed=2)
    residual = normal(29, 36, dtype=dtype, seed=3)
    for name in ("gelu", "gelu_tanh", "silu", "relu2"):
        with support(dtype):
            out = linear(x, w, b, activation=name, residual=residual)
        plain = (
            activations.activate(torch.nn.functional.linear(x, w, b), activations.ACTIVATIONS.index(name)) + residual
        )
        exact = linear_ref(x.double(), w.double(), b.double(), activation=name, residual=residual.double())
        no_worse_than_torch(out, plain, exact, name)


@interpret
@needs_interpreter
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("arch", ARCHS)
def test_dropout_draws_the_bits_of_its_oracle_on_every_tile(arch, tile):
    ones = torch.ones(30, 8)
    extra = Epilogue(mask=(RNG, 0.5, 2, 1, 8), num_tokens=15)
    keep = keep_mask_ref(RNG, 0.5, range(2, 4), range(1), range(1, 16), range(8, 8 + 50)).reshape(30, 50)
    for num_splits in (1, 2):
        out = run(ones, torch.ones(50, 8), extra, Plan(arch, tile._replace(block_inner=16), num_splits))
        assert torch.equal(out, torch.where(keep, 16.0, 0.0))


@interpret
@needs_interpreter
def test_parts_of_k_are_added_in_order_and_each_slice_is_written_whole():
    a, b = normal(20, 200).float(), normal(18, 200, seed=1).float()
    out = torch.full((20, 18), float("nan"))
    first, second = product_launches(a, b, out, Epilogue(), Plan(90, TILES[0], 4))
    first.arguments[2].fill_(float("nan"))  # the workspace
    for launch in (first, second):
        launch.run()
    spans = [(0, 64), (64, 128), (128, 192), (192, 200)]
    total = torch.zeros(20, 18)
    for low, high in spans:
        total += run(a[:, low:high].contiguous(), b[:, low:high].contiguous(), how=Plan(80, TILES[0], 1))
    assert torch.equal(out, total)


@interpret
@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, *(pytest.param(d, marks=pytest.mark.long) for d in DTYPES[::2])])
def test_two_runs_and_any_number_of_programs_have_the_same_bits(dtype, monkeypatch):
    a, b = normal(40, 70, dtype=dtype), normal(33, 70, dtype=dtype, seed=1)
    extra = Epilogue(bias=normal(33, dtype=dtype), activation=3)
    for how in (Plan(90, TILES[0], 1), Plan(90, TILES[0], 3)):
        with support(dtype):
            outs = [run(a, b, extra, how), run(a, b, extra, how)]
            monkeypatch.setitem(matmul_launch.MULTIPROCESSORS, 90, 3)  # a card of three: each program walks tiles
            outs.append(run(a, b, extra, how))
            monkeypatch.undo()
        assert all(torch.equal(out, outs[0]) for out in outs[1:])


def _gradients(op, dtype):
    x, dout = normal(2, 9, 24, dtype=dtype), normal(2, 9, 16, dtype=dtype, seed=1)
    weight, pre = normal(16, 24, dtype=dtype, seed=2), normal(2, 9, 24, dtype=dtype, seed=3)
    rows, grads = x.reshape(18, 24), dout.reshape(18, 16)
    if op == "dgrad":
        return linear_dgrad(dout, weight), dout @ weight, linear_dgrad_ref(dout.double(), weight.double())
    if op == "slope":
        plain = torch.nn.functional.silu(pre.detach().requires_grad_())
        (plain,) = torch.autograd.grad(plain.sum(), plain.grad_fn.next_functions[0][0].variable)
        exact = linear_dgrad_ref(dout.double(), weight.double(), pre=pre.double(), activation="silu")
        return linear_dgrad(dout, weight, pre=pre, activation="silu"), (dout @ weight) * plain, exact
    return linear_wgrad(x, dout), grads.t() @ rows, grads.double().t() @ rows.double()


@interpret
@needs_interpreter
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["dgrad", "slope", "wgrad"])
def test_gradients_err_no_more_than_twice_as_much_as_torch(op, dtype):
    with support(dtype):
        no_worse_than_torch(*_gradients(op, dtype), op)


@interpret
@needs_interpreter
@pytest.mark.parametrize("tokens", [1, 45, 1100])  # the last is split
@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_and_bias_gradients_are_added_into_fp32(dtype, tokens):
    x, dout = normal(tokens, 9, dtype=dtype), normal(tokens, 21, dtype=dtype, seed=1)
    main, bias = torch.full((21, 9), 256.0), torch.full((21,), 256.0)
    with support(dtype):
        for accumulate in (False, True):
            assert linear_wgrad(x, dout, main, accumulate, bias_grad=bias) is main
    exact = dout.double().t() @ x.double()
    scale = max(1.0, float(exact.abs().max()))
    close(main / scale, 2 * exact / scale, torch.float32, "main gradient", 4.0)
    close(bias / scale, 2 * dout.double().sum(0) / scale, torch.float32, "bias gradient", 4.0)


@interpret
@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
def test_public_ops_agree_with_their_oracles(dtype):
    x, weight, bias = (
        normal(2, 9, 12, dtype=dtype),
        normal(16, 12, dtype=dtype, seed=1),
        normal(16, dtype=dtype, seed=2),
    )
    residual = normal(2, 9, 16, dtype=dtype, seed=3)
    keywords = {"activation": "gelu", "dropout_p": 0.25, "rng": RNG, "sample_offset": 1, "row_offset": 3}
    with support(dtype):
        for place in ({"col_offset": 8}, {"col_offset": 5}):  # 5 is no multiple of the generator's four columns
            compare(
                lambda *t, place=place: linear(*t[:3], residual=t[3], **keywords, **place),
                lambda *t, place=place: linear_ref(*t[:3], residual=t[3], **keywords, **place),
                x, weight, bias, residual, factor=4.0,
            )  # fmt: skip
        compare(linear, linear_ref, x, weight, bias, factor=4.0)
        compare(
            lambda x, w: linear(x, w, dropout_p=0.5, rng=RNG),
            lambda x, w: linear_ref(x, w, dropout_p=0.5, rng=RNG),
            x, weight, factor=4.0,
        )  # fmt: skip


@interpret
@needs_interpreter
def test_a_key_whose_two_numbers_lie_apart_draws_the_same_bits():
    x, weight = normal(9, 12), normal(16, 12, seed=1)
    apart = torch.tensor([RNG[0], 99, RNG[1], 99])[::2]
    for activation in (None, "gelu"):
        results = []
        for rng in (RNG, apart):
            leaf = x.clone().requires_grad_()
            out = linear(leaf, weight, activation=activation, dropout_p=0.5, rng=rng)
            results.append((out.detach(), *torch.autograd.grad(out.sum(), leaf)))
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@interpret
@needs_interpreter
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (9, 37, 24), (70, 20, 40), (3, 5, 0), (0, 4, 8)])
def test_gate_and_up_in_one_pass(shape, dtype):
    """F is no multiple of the tile, so that a tile of gates reaches into the rows of up."""
    rows, width, inner = shape
    x, weight = normal(rows, inner, dtype=dtype), normal(2 * width, inner, dtype=dtype, seed=1)
    for kind in ("contiguous", "transposed"):
        strided = weight if kind == "contiguous" else weight.t().contiguous().t()
        out = torch.full((rows, width), float("nan"), dtype=dtype)
        gate_up = torch.full((rows, 2 * width), float("nan"), dtype=dtype)
        for arch in ARCHS:
            with support(dtype):
                for pre in (gate_up, None):
                    if out.numel():
                        how = Plan(arch, TILES[1], 1)
                        run_launches([matmul_launch.swiglu_launch(x, strided, out, pre, how)])
            exact = linear_swiglu_ref(x.double(), weight.double())
            gate, up = (x @ weight.t()).chunk(2, -1)
            no_worse_than_torch(out, torch.nn.functional.silu(gate) * up, exact, f"out by {arch}")
            no_worse_than_torch(gate_up, x @ weight.t(), x.double() @ weight.double().t(), f"gate_up by {arch}")


@interpret
@needs_interpreter
def test_gated_form_has_the_gradients_of_its_oracle():
    compare(linear_swiglu, linear_swiglu_ref, normal(2, 5, 12), normal(14, 12, seed=1))


@interpret
@needs_interpreter
def test_row_strides_beyond_32_bits_are_followed():
    """Three rows 2^30 + 16 elements apart: the second and third lie beyond 2^31 bytes and elements."""
    stride = (1 << 30) + 16
    storage = torch.empty(2 * stride + 64, dtype=torch.float16)  # pages but those of three rows stay untouched
    x, out = (storage.as_strided((3, 16), (stride, 1), start) for start in (0, 32))
    x.copy_(normal(3, 16))
    weight = normal(16, 16, dtype=torch.float16, seed=1)
    want = (x.double() @ weight.double().t()).contiguous()
    for arch in ARCHS:
        out.zero_()
        product(x, weight, out, Epilogue(residual=x), Plan(arch, TILES[0], 1))
        torch.testing.assert_close(out.double(), want + x.double(), rtol=4e-3, atol=4e-3)
        out.zero_()
        matmul.forward_into(x, weight, None, out)
        torch.testing.assert_close(out.double(), want, rtol=4e-3, atol=4e-3)
    # Contracted over the far rows, as the weight gradient is.
    got = linear_wgrad(x, weight[:3].contiguous())
    torch.testing.assert_close(got.double(), weight[:3].double().t() @ x.double(), rtol=4e-3, atol=4e-3)


@interpret
@needs_interpreter
@pytest.mark.parametrize("arch", ARCHS)
def test_nan_and_inf_stay_in_their_rows_and_columns(arch):
    a, b = normal(20, 19).float(), normal(18, 19, seed=1).float()
    a[3, 2], a[5, 18], b[17, 18] = float("nan"), float("inf"), float("inf")
    for num_splits in (1, 2):
        out = run(a, b, Epilogue(activation=4), Plan(arch, TILES[0], num_splits))
        want = (a @ b.t()).relu().square()
        torch.testing.assert_close(out, want, equal_nan=True, rtol=1e-4, atol=1e-4)
        assert out[:3, :17].isfinite().all()


@interpret
@needs_interpreter
def test_gradient_of_stride_zero_is_not_read_as_contiguous():
    x, weight, bias = (normal(*s, seed=i).requires_grad_() for i, s in enumerate(((6, 8), (5, 8), (5,))))
    for pick in (lambda y: y.sum(), lambda y: (y[..., ::2] * normal(6, 3, seed=3)).sum()):
        for name in (None, "gelu"):
            got = torch.autograd.grad(pick(linear(x, weight, bias, activation=name)), (x, weight, bias))
            want = torch.autograd.grad(pick(linear_ref(x, weight, bias, activation=name)), (x, weight, bias))
            for ours, theirs in zip(got, want, strict=True):
                torch.testing.assert_close(ours, theirs)


@interpret
@needs_interpreter
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_products(data):
    size = st.integers(0, 40)
    rows, cols, inner = data.draw(size), data.draw(size), data.draw(st.integers(0, 60))
    dtype = data.draw(st.sampled_from((torch.float64, *DTYPES)))
    a = matrix(data.draw(st.sampled_from(LAYOUTS)), rows, inner, dtype)
    b = matrix(data.draw(st.sampled_from(LAYOUTS)), cols, inner, dtype, seed=1)
    tile = data.draw(st.sampled_from(TILES))._replace(group=data.draw(st.integers(1, 9)))
    how = Plan(data.draw(st.sampled_from(ARCHS)), tile, data.draw(st.integers(1, 5)))
    bias = normal(cols, dtype=dtype, seed=2) if data.draw(st.booleans()) else None
    residual = matrix("sliced", rows, cols, dtype, seed=3) if data.draw(st.booleans()) else None
    extra = Epilogue(bias=bias, activation=data.draw(st.sampled_from((0, 3, 4))), residual=residual)
    with support(dtype):
        out, again = run(a, b, extra, how), run(a, b, extra, how)
    assert torch.equal(out, again)
    exact = _expected(a, b, extra, 0.0)[0]
    scale = max(1.0, float(exact.abs().max())) if exact.numel() else 1.0
    close(out / scale, exact / scale, dtype, "product", 2.0)


# Bytes that a launch moves between memory (L2 included) and programs, by the formula of its grid.
def _formula(shape, tile, num_splits, dtype, extra):
    rows, cols, inner = shape
    size, wide = torch.finfo(dtype).bits // 8, 4
    tiles_row, tiles_col = -(-rows // tile.block_row), -(-cols // tile.block_col)
    whole = rows * cols
    loaded = (tiles_col * rows + tiles_row * cols) * inner * size
    stored = 0
    finish_rows = tiles_row
    if num_splits > 1:  # slices out and in again
        loaded, stored = loaded + num_splits * whole * wide, stored + num_splits * whole * wide
        finish_rows = -(-rows // 4)
    loaded += (extra.bias is not None) * finish_rows * cols * size + (extra.residual is not None) * whole * size
    loaded += (extra.slope > 0) * whole * size + extra.accumulate * whole * size
    return loaded, stored + whole * size * (1 + extra.keep_pre)


@contextlib.contextmanager
def counted():
    """[bytes loaded, bytes stored] under masks by interpreted kernels."""
    import numpy as np
    from triton.runtime import interpreter

    builder, total = interpreter.InterpreterBuilder, [0, 0]
    load, store = builder.create_masked_load, builder.create_masked_store

    def moved(pointers, mask):
        wanted = np.asarray(mask.data).sum()  # of a descriptor triton 3.6 passes the array itself as the mask
        return int(wanted) * pointers.get_element_ty().primitive_bitwidth // 8

    def counted_load(self, pointers, mask, *rest, **more):
        total[0] += moved(pointers, mask)
        return load(self, pointers, mask, *rest, **more)

    def counted_store(self, pointers, value, mask, *rest, **more):
        total[1] += moved(pointers, mask)
        return store(self, pointers, value, mask, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", counted_load)
        patch.setattr(builder, "create_masked_store", counted_store)
        yield total


@interpret
@needs_interpreter
@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("names", [(), ("bias", "silu", "pre", "residual"), ("accumulate",)], ids="+".join)
def test_a_launch_moves_the_bytes_of_its_formula(names, arch, num_splits):
    """Each operand once per tile of the other; what the epilogue reads and writes, once."""
    a, b = normal(21, 40).float(), normal(37, 40, seed=1).float()
    extra = Epilogue(**{k: v for name in names for k, v in _switches()[name].items()})
    with counted() as total:
        run(a, b, extra, Plan(arch, TILES[2], num_splits))
    assert tuple(total) == _formula((21, 37, 40), TILES[2], num_splits, torch.float32, extra)


@interpret
@needs_interpreter
def test_the_gated_form_reads_x_once_per_tile_for_both_products():
    x, weight = normal(20, 32).float(), normal(2 * 64, 32, seed=1).float()
    out, gate_up = torch.empty(20, 64), torch.empty(20, 128)
    with counted() as total:
        run_launches([matmul_launch.swiglu_launch(x, weight, out, gate_up, Plan(90, TILES[1], 1))])
    assert tuple(total) == (4 * 32 * (20 + 128), 4 * 20 * (64 + 128))


@interpret
@needs_interpreter
@pytest.mark.parametrize("code", [0, 1, *(pytest.param(code, marks=pytest.mark.long) for code in (2, 3, 4))])
def test_activation_gradient_is_one_pass_with_the_sums_of_what_it_stored(code):
    dout, pre = normal(3, 90, 11).float(), normal(3, 90, 11, seed=1).float() * 2
    for mask in (None, (RNG, 0.25, 1, 2, 4)):
        with counted() as total:
            dpre, sums = activations.launch_backward(dout, pre if code else None, code, mask, True)
        exact = dout.double()
        if mask is not None:
            keep = keep_mask_ref(RNG, 0.25, range(1, 4), range(1), range(2, 92), range(4, 15))[:, 0]
            exact = torch.where(keep, exact / 0.75, 0.0)
        exact = activations.activation_grad(exact, pre.double(), code)
        close(dpre, exact, torch.float32, "dpre", 2.0)
        close(sums / 16, dpre.double().sum((0, 1)) / 16, torch.float32, "sums")
        again, sums_again = activations.launch_backward(dout, pre if code else None, code, mask, True)
        assert torch.equal(dpre, again) and torch.equal(sums, sums_again)
        programs = activations.row_programs(270)
        blocks = 270 // 4 + 1  # the generator's key is read for each block of 4 rows
        loaded = 4 * 270 * 11 * (1 + (code > 0)) + (0 if mask is None else 16 * blocks)
        loaded += 4 * programs * 11  # by the second stage
        assert total == [loaded, 4 * 270 * 11 + 4 * programs * 11 + 4 * 11]


def test_the_tables_have_a_row_for_every_class_and_nothing_that_does_not_fit():
    kinds = ("large", "deep", "small", "few_rows", "few_cols", "wide", "narrow")
    for arch, shared in ((80, 163), (90, 227), (100, 227)):
        for kind in kinds:
            assert ("any", arch, kind) in matmul_launch.TILES
        for (_, of, kind), tile in matmul_launch.TILES.items():
            if of == arch:
                size = 4 if kind in ("wide", "narrow") else 2
                stages = tile.num_stages * (tile.block_row + tile.block_col) * tile.block_inner * size
                assert stages <= shared * 1024 and tile.block_col % tile.parts == 0
    for (op, arch), limit in matmul_launch.TRITON_UP_TO.items():
        known = ("epilogue", "dropout", "swiglu", "slope", "gated_slope", "wgrad_wide")
        assert op in known and arch in (80, 90, 100) and limit > 0


def test_shape_classes_and_splits_depend_on_nothing_but_shape_and_arch():
    classify = matmul_launch.shape_class
    assert classify(8192, 4096, 4096, 2, 90) == "large"
    assert classify(8192, 4096, 4096, 4, 90) == "wide"
    assert classify(16, 4096, 4096, 2, 90) == "few_rows" and classify(4096, 16, 4096, 2, 90) == "few_cols"
    assert classify(256, 512, 128, 2, 90) == "small" and classify(256, 512, 4096, 2, 90) == "deep"
    tile = matmul_launch.TILES["any", 90, "deep"]
    assert matmul_launch.splits_of(tile, 256, 512, 4096, 90) == 8  # 64 blocks of K, none under 8
    assert matmul_launch.splits_of(tile, 256, 512, 128, 90) == 1
    assert matmul_launch.splits_of(tile, 8192, 4096, 14336, 90) == 1
    assert matmul_launch.splits_of(tile, 128, 128, 1 << 20, 90) == 16


def test_who_multiplies_on_a_card_is_a_row_of_the_table(monkeypatch):
    monkeypatch.setattr(matmul_launch, "INTERPRETED", False)

    def decide(op, rows, cols, inner, dtype=torch.bfloat16):
        a, b = (torch.empty(n, inner, dtype=dtype, device="meta") for n in (rows, cols))
        return matmul_launch.triton_multiplies(op, a, b)

    assert not decide("linear", 8192, 4096, 4096) and not decide("wgrad", 8192, 4096, 4096)
    assert decide("epilogue", 8192, 4096, 2048) and not decide("epilogue", 8192, 4096, 14336)
    assert decide("epilogue", 64, 512, 14336)
    assert not decide("epilogue", 8192, 4096, 2048, torch.float32)
    assert not decide("epilogue", 64, 512, 67)  # rows that are not aligned are read a few bytes at a time
    monkeypatch.setitem(matmul_launch.TRITON_UP_TO, ("linear", 90), 8192)  # as a measured row would
    assert decide("linear", 8192, 4096, 4096)


def test_fp32_is_multiplied_as_tf32_only_where_torch_was_told_so():
    def chosen(dtype=torch.float32):
        a = torch.empty(64, 64, dtype=dtype, device="meta")
        return product_launches(a, a, a, Epilogue(), Plan(90, TILES[1], 1))[0].constants["PRECISION"]

    before = torch.backends.cuda.matmul.fp32_precision
    try:
        assert chosen() == "ieee"
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert chosen() == "tf32" and chosen(torch.bfloat16) == "ieee"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert chosen() == "ieee"


def test_the_allocator_of_descriptors_is_not_left_set():
    from triton.runtime import _allocation

    before = _allocation._allocator.get()
    run_launches([])
    assert _allocation._allocator.get() is before
