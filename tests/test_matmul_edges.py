"""linear where others break: dropout from any column on, tf32 by call, overflow, NaN, waves of small shards."""

import itertools

import pytest
import torch

from plait.kernels import (
    activations,
    dropout,
    linear,
    linear_dgrad,
    linear_swiglu,
    linear_wgrad,
    matmul,
    matmul_direct,
    matmul_launch,
)
from plait.kernels.launch import INTERPRETED, Launch
from plait.kernels.matmul_launch import Epilogue, Plan, product_launches
from plait.kernels.matmul_tables import shape_class, waves
from plait.kernels.philox import keep_mask_ref
from tests.cases import interpret, needs_interpreter, needs_plain, normal
from tests.test_matmul_triton import ARCHS, RNG, TILES, product, run, support

# Columns of the shards of a layer of 23: even, uneven, one column, none, an offset of each remainder by 4.
CUTS = (
    (0, 5, 11, 18, 23),
    *(pytest.param(cuts, marks=pytest.mark.long) for cuts in ((0, 12, 23), (0, 1, 2, 23, 23))),
)


@interpret
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("activation", ["relu2", pytest.param(None, marks=pytest.mark.long)])
def test_uneven_shards_draw_the_mask_of_the_whole_layer(cuts, activation):
    """Small integers, so that no sum rounds: the bits of the shards are those of the whole, gradients too."""
    x = normal(2, 5, 8).mul(2).round().float()
    weight = normal(23, 8, seed=1).mul(2).round().float()
    dout = normal(2, 5, 23, seed=2).mul(2).round().float()
    keywords = {"activation": activation, "dropout_p": 0.5, "rng": RNG, "sample_offset": 3, "row_offset": 1}

    def both(weight, dout, col_offset):
        leaf = x.clone().requires_grad_()
        w = weight.clone().requires_grad_()
        out = linear(leaf, w, col_offset=col_offset, **keywords)
        return out.detach(), *torch.autograd.grad(out, (leaf, w), dout)

    whole, dx, dweight = both(weight, dout, 0)
    parts = [both(weight[low:high], dout[..., low:high], low) for low, high in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat([out for out, *_ in parts], -1), whole)
    assert torch.equal(torch.cat([part[2] for part in parts]), dweight)
    assert torch.equal(sum(part[1] for part in parts), dx)
    unfused = dropout(linear(x, weight, activation=activation), 0.5, RNG, sample_offset=3, row_offset=1)
    assert torch.equal(unfused, whole)


@interpret
@needs_interpreter
@pytest.mark.parametrize("col_offset", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 7))])
@pytest.mark.parametrize("arch", ARCHS)
def test_dropout_from_any_column_draws_the_bits_of_its_oracle_on_every_tile(arch, col_offset):
    extra = Epilogue(mask=(RNG, 0.5, 2, 2**31, col_offset), num_tokens=15)
    rows = range(2**31, 2**31 + 15)
    keep = keep_mask_ref(RNG, 0.5, range(2, 4), range(1), rows, range(col_offset, col_offset + 50)).reshape(30, 50)
    for tile, num_splits in ((TILES[0], 2), (TILES[1], 1), (TILES[2], 1)):
        how = Plan(arch, tile._replace(block_inner=16), num_splits)
        out = run(torch.ones(30, 8), torch.ones(50, 8), extra, how)
        assert torch.equal(out, torch.where(keep, 16.0, 0.0))


@interpret
@needs_interpreter
@pytest.mark.parametrize("col_offset", [1, 2, 3, 2**31 - 4])
def test_activation_gradient_with_dropout_from_any_column(col_offset):
    dout, pre = normal(2, 9, 11).float(), normal(2, 9, 11, seed=1).float()
    mask = (RNG, 0.25, 1, 2, col_offset)
    dpre, sums = activations.launch_backward(dout, pre, 0, mask, True)
    keep = keep_mask_ref(RNG, 0.25, range(1, 3), range(1), range(2, 11), range(col_offset, col_offset + 11))[:, 0]
    assert torch.equal(dpre, torch.where(keep, dout * torch.tensor(1 / 0.75), 0.0))
    torch.testing.assert_close(sums, dpre.sum((0, 1)))


def _precisions(monkeypatch, call):
    """PRECISION of every launch that `call` makes."""
    found = []

    def look(*parts):
        launch = Launch(*parts)
        found.extend([launch.constants["PRECISION"]] if "PRECISION" in launch.constants else [])
        return launch

    monkeypatch.setattr(matmul_launch, "Launch", look)
    call()
    monkeypatch.undo()
    return set(found)


@interpret
@needs_interpreter
@pytest.mark.parametrize("allowed,expected", [(True, "tf32"), (False, "ieee"), (None, "ieee")])
def test_every_entry_point_passes_the_choice_of_tf32_on_to_every_product(monkeypatch, allowed, expected):
    x, w = normal(6, 8).float().requires_grad_(), normal(4, 8, seed=1).float().requires_grad_()
    bias, dout, pre = normal(4, seed=2).float().requires_grad_(), normal(6, 4, seed=3).float(), normal(6, 8).float()
    how = {"allow_tf32": allowed}
    calls = {
        "linear": lambda: linear(x, w, bias, **how).sum().backward(),
        "no bias": lambda: linear(x, w, residual=dout, **how).sum().backward(),
        "activation": lambda: linear(x, w, bias, activation="gelu", **how).sum().backward(),
        "dropout": lambda: linear(x, w, dropout_p=0.5, rng=RNG, **how).sum().backward(),
        "swiglu": lambda: linear_swiglu(x, w, **how).sum().backward(),
        "dgrad": lambda: linear_dgrad(dout, w, **how).sum().backward(),
        "slope": lambda: linear_dgrad(dout, w.detach(), pre=pre, activation="silu", **how),
        "gated": lambda: linear_dgrad(dout, w.detach(), pre=torch.cat((pre, pre), 1), activation="swiglu", **how),
        "wgrad": lambda: linear_wgrad(x, dout, **how).sum().backward(),
        "into": lambda: linear_wgrad(x.detach(), dout, torch.zeros(4, 8), True, **how),
    }
    for name, call in calls.items():
        assert _precisions(monkeypatch, call) == {expected}, name


def test_another_tf32_than_torch_s_is_multiplied_by_triton_on_a_card(monkeypatch):
    monkeypatch.setattr(matmul_launch, "INTERPRETED", False)
    a = torch.empty(64, 64, device="meta")
    decide = matmul_launch.triton_multiplies
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for setting, other in (("ieee", True), ("tf32", False)):
            torch.backends.cuda.matmul.fp32_precision = setting
            assert decide("linear", a, a, other) and not decide("linear", a, a, not other)
            assert not decide("linear", a, a, None) and not decide("linear", a.bfloat16(), a.bfloat16(), other)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_tf32_by_call_changes_nothing_on_the_cpu():
    x, w = normal(6, 8).float(), normal(4, 8, seed=1).float()
    assert torch.equal(linear(x, w, allow_tf32=True), linear(x, w, allow_tf32=False))


@interpret
def test_fp16_overflows_to_inf_as_in_torch():
    x = torch.full((3, 16), 128.0, dtype=torch.float16)
    w = torch.full((5, 16), 128.0, dtype=torch.float16)  # sums of 262,144; the largest fp16 is 65,504
    residual = torch.full((3, 5), -60000.0, dtype=torch.float16)
    with support(torch.float16):
        assert torch.equal(linear(x, w), torch.nn.functional.linear(x, w)) and linear(x, w).isinf().all()
        # Fused, one rounding at the end: the residual brings 65,536 back into range. In passes it comes too late.
        expected = 5536.0 if INTERPRETED else float("inf")
        assert torch.equal(linear(x / 4, w, residual=residual), torch.full((3, 5), expected, dtype=torch.float16))
        assert linear(x, w, activation="relu2").isinf().all()


@interpret
@pytest.mark.parametrize("name", [*matmul.ACTIVATIONS, "residual", "bias", "dropout"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_passes_through_each_epilogue_as_in_torch(name, value):
    x, w = normal(9, 12).float(), torch.eye(12)
    x[2, 3] = value
    bias, residual = torch.zeros(12), torch.zeros(9, 12)
    if name == "residual":
        got, want = linear(x, w, residual=residual), x @ w.t() + residual
    elif name == "bias":
        got, want = linear(x, w, bias), x @ w.t() + bias
    elif name == "dropout":
        got = linear(x, w, dropout_p=0.5, rng=RNG)
        keep = keep_mask_ref(RNG, 0.5, range(1), range(1), range(9), range(12))[0, 0]
        want = torch.where(keep, (x @ w.t()) * 2.0, 0.0)  # what is dropped is 0, also where it was NaN
    else:
        code = matmul.ACTIVATIONS.index(name)
        # In fp64: torch's gelu of inf is NaN in fp32 where it has AVX-512.
        got, want = linear(x, w, activation=name), activations.activate((x @ w.t()).double(), code).float()
    torch.testing.assert_close(got, want, equal_nan=True)


@interpret
@pytest.mark.parametrize("leading", [(), (5,), (2, 1, 3), (2, 0, 3)])
@pytest.mark.parametrize("inner,width", [(0, 4), (8, 0), (0, 0), (8, 4)])
def test_sizes_of_zero_in_any_dim_forward_and_backward(leading, inner, width):
    x, w = torch.ones(*leading, inner, requires_grad=True), torch.ones(width, inner, requires_grad=True)
    bias = torch.ones(width, requires_grad=True)
    for activation in (None, "gelu"):
        out = linear(x, w, bias, activation=activation)
        assert out.shape == (*leading, width)
        grads = torch.autograd.grad(out.sum(), (x, w, bias))
        assert [g.shape for g in grads] == [x.shape, w.shape, bias.shape]
        assert all(g.isfinite().all() for g in grads)
    gated = torch.ones(*leading, 2 * inner)
    assert linear_dgrad(torch.ones(*leading, width), w.detach(), pre=gated, activation="swiglu").shape == gated.shape


@interpret
@needs_interpreter
@pytest.mark.parametrize("op", ["gelu", "swiglu"])
def test_a_backward_whose_products_are_torchs_gives_the_same_gradients(op, monkeypatch):
    """On a card the tables leave most products without an epilogue to torch."""
    shapes = ((6, 16), (8, 16), (8,))
    x, w, bias = (normal(*shape, seed=i).float().requires_grad_() for i, shape in enumerate(shapes))
    inputs = (x, w) if op == "swiglu" else (x, w, bias)
    out = linear_swiglu(x, w) if op == "swiglu" else linear(x, w, bias, activation="gelu")
    want = torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True)
    asked = []
    monkeypatch.setattr(matmul_direct, "triton_multiplies", lambda name, *_: asked.append(name))
    got = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert asked == ["dgrad", "wgrad"]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@interpret
@needs_interpreter
def test_strides_and_alignment_reach_the_look_up_of_a_launch():
    """One shape, four ways to lie: a launch found again must be that of its own layout."""
    home = torch.randn(21 * 40 + 1)
    one = home[:-1].view(21, 40)
    off = home[1:].view(21, 40)
    turned = torch.randn(40, 21).t()
    wide = torch.randn(21, 80)[:, ::2]
    b = normal(16, 40, seed=1).float()
    for _ in range(2):
        for a in (one, off, turned, wide):
            how = Plan(90, TILES[0], 1)
            out = torch.empty(21, 16)
            product(a, b, out, Epilogue(), how)
            torch.testing.assert_close(out, a @ b.t(), rtol=1e-5, atol=1e-5)
    aligned, misaligned = (
        product_launches(a, b, torch.empty(21, 16), Epilogue(), Plan(90, TILES[0], 1))[0].constants["DESCRIPTORS"]
        for a in (one, off)
    )
    assert aligned and not misaligned


# (M, N, K, arch) -> (class, jobs, rounds, least share of the places filled): tensor parallelism's N/t and K/t.
WAVES = (
    (1, 4096, 4096, 90, "few_rows", 128, 1, 0.9),
    (16, 512, 4096, 90, "few_rows", 64, 1, 0.4),  # 16 parts of K at most
    (1, 4096, 128, 90, "few_rows", 32, 1, 0.2),  # two blocks of K: nothing to split
    (64, 512, 4096, 90, "small", 64, 1, 0.4),
    (64, 1792, 4096, 90, "small", 112, 1, 0.8),
    (64, 28672, 8192, 90, "large", 112, 1, 0.8),
    (256, 512, 4096, 90, "deep", 64, 1, 0.4),
    (256, 1280, 8192, 90, "deep", 120, 1, 0.9),
    (8192, 512, 4096, 90, "large", 128, 1, 0.9),
    (8192, 128, 4096, 90, "deep", 128, 1, 0.9),  # two parts of K
    (8192, 640, 5120, 90, "large", 192, 2, 0.7),  # 60 tiles in the second round: what stream-K would spread
    (8192, 4096, 128, 90, "large", 1024, 8, 0.9),
    (8192, 4096, 4096, 90, "large", 1024, 8, 0.9),
    (8192, 4096, 4096, 80, "large", 2048, 19, 0.9),
    (64, 512, 4096, 80, "small", 64, 1, 0.5),
    (256, 512, 4096, 100, "deep", 64, 1, 0.4),
    (8192, 512, 4096, 100, "large", 128, 1, 0.8),
)


@pytest.mark.parametrize("rows,cols,inner,arch,kind,jobs,rounds,filled", WAVES)
def test_shards_of_tensor_parallelism_fill_the_card(rows, cols, inner, arch, kind, jobs, rounds, filled):
    assert shape_class(rows, cols, inner, 2, arch) == kind
    found = waves(rows, cols, inner, arch)
    assert found[:2] == (jobs, rounds) and filled <= found.filled <= 1.0


def test_no_part_of_a_split_is_empty_and_none_is_short():
    for tile, steps in itertools.product((TILES[0], matmul_launch.TILES["any", 90, "deep"]), range(1, 300)):
        inner = steps * tile.block_inner
        parts = matmul_launch.splits_of(tile, 64, 64, inner, 90)
        each = -(-steps // parts)
        assert 1 <= parts <= 16 and (parts - 1) * each < steps
        assert parts == 1 or each >= (4 if tile.block_row == 16 else 8)


@needs_plain
def test_the_plain_path_takes_a_misaligned_view():
    home = torch.randn(41)
    x, w = home[1:].view(5, 8), torch.randn(4, 8)
    torch.testing.assert_close(linear(x, w), torch.nn.functional.linear(x.clone(), w))
