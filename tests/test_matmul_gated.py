"""The gradient of a gated activation as the end of the down projection's input gradient, against its oracle."""

import pytest
import torch

from plait.kernels import gated, linear_dgrad, linear_dgrad_ref, matmul_direct
from plait.kernels.launch import run_launches
from plait.kernels.matmul_launch import Epilogue, Plan, Tile, gated_grad_launch, product_launches, swiglu_launch
from plait.kernels.matmul_plain import GATES
from tests.cases import TOLERANCE, close, interpret, needs_interpreter, normal
from tests.test_matmul_triton import ARCHS, counted, matrix, no_worse_than_torch, product, support

# (M, N, F): one of each, odd, a tile exactly, several tiles, no sum, no rows.
SHAPES = ((1, 1, 1), (9, 21, 37), (16, 16, 32), (40, 18, 70), (3, 0, 5), (0, 4, 8))
# Whole, in halves, in quarters.
TILES = (Tile(16, 16, 16, 4, 1, 1, 2), Tile(32, 64, 16, 4, 1, 2, 3), Tile(16, 64, 32, 4, 1, 4, 8))


def run(dout, weight, gate_up, form, how, keep=True):
    """(gradient, hidden), poisoned before they are written."""
    grad = torch.full(gate_up.shape, float("nan"), dtype=dout.dtype)
    hidden = torch.full((len(dout), weight.shape[0]), float("nan"), dtype=dout.dtype) if keep else None
    if grad.numel():
        run_launches([gated_grad_launch(dout, weight, gate_up, form, grad, hidden, how)])
    return grad, hidden


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (0,), (2, 1, 3)])
def test_public_form_agrees_with_the_oracle_and_the_oracle_with_autograd(leading, gate, dtype):
    dout, weight = normal(*leading, 5, dtype=dtype), normal(5, 8, dtype=dtype, seed=1)
    gate_up = normal(*leading, 16, dtype=dtype, seed=2)
    got = linear_dgrad(dout, weight, pre=gate_up, activation=gate)
    want = linear_dgrad_ref(dout.double(), weight.double(), pre=gate_up.double(), activation=gate)
    assert got.dtype is dtype and got.shape == gate_up.shape
    close(got / 4, want / 4, dtype, "gradient", 2.0)


@interpret
@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", range(3))
def test_errs_no_more_than_twice_as_much_as_torch(form, shape, dtype):
    rows, inner, width = shape
    dout, weight = normal(rows, inner, dtype=dtype), normal(inner, width, dtype=dtype, seed=1)
    gate_up = normal(rows, 2 * width, dtype=dtype, seed=2)
    with support(dtype):
        grad, hidden = matmul_direct.dgrad_gated(dout, weight, gate_up, form, True)
    wide = [x.double() for x in (dout, weight, gate_up)]
    exact = linear_dgrad_ref(*wide[:2], pre=wide[2], activation=GATES[form])

    def by_torch(dout, weight, gate_up):
        gate, up = gate_up.detach().requires_grad_().chunk(2, -1)
        act = torch.nn.functional.silu(gate) if form == 0 else torch.nn.functional.gelu(
            gate, approximate=("none", "tanh")[form - 1]
        )  # fmt: skip
        out = act * up
        return torch.cat(torch.autograd.grad(out, (gate, up), dout @ weight), -1), out.detach()

    plain, plain_hidden = by_torch(dout, weight, gate_up)
    no_worse_than_torch(grad, plain, exact, f"gradient {shape}")
    no_worse_than_torch(hidden, plain_hidden, by_torch(*wide)[1], f"hidden {shape}")


@interpret
@needs_interpreter
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("keep", [True, False])
def test_has_the_bits_of_the_product_followed_by_the_gate(keep, tile, arch):
    dout, weight, gate_up = (
        normal(*s, dtype=torch.float16, seed=i) for i, s in enumerate(((29, 24), (40, 24), (29, 80)))
    )
    how = Plan(arch, tile, 1)
    for form in range(3):
        grad, hidden = run(dout, weight, gate_up, form, how, keep)
        dhidden = torch.empty(29, 40, dtype=torch.float16)
        product(dout, weight, dhidden, Epilogue(), how)
        if form == 0:
            want, want_hidden = gated.backward(dhidden, gate_up), gated.forward(gate_up)
        else:
            want = gated.geglu_backward(dhidden, gate_up, form == 2)
            want_hidden = gated.geglu_forward(gate_up, form == 2)
        assert torch.equal(grad, want)
        assert (hidden is None) if not keep else torch.equal(hidden, want_hidden)


@interpret
@needs_interpreter
@pytest.mark.parametrize("kind", ["transposed", "sliced", "stepped", "padded", "broadcast"])
def test_operands_of_any_stride_give_the_bits_of_contiguous_ones(kind):
    dout, weight, gate_up = matrix(kind, 21, 40), matrix(kind, 37, 40, seed=1), normal(21, 74, dtype=torch.float32)
    want, _ = run(dout.contiguous(), weight.contiguous(), gate_up, 0, Plan(80, TILES[1], 1))
    for arch in ARCHS:
        assert torch.equal(run(dout, weight, gate_up, 0, Plan(arch, TILES[1], 1))[0], want)


@interpret
@needs_interpreter
@pytest.mark.parametrize("keep", [True, False])
def test_the_gradient_of_hidden_is_neither_written_nor_read(keep):
    """Bytes by formula: each operand once a tile of the other, gate and up read, their gradients written."""
    dout, weight, gate_up = normal(20, 32).float(), normal(40, 32, seed=1).float(), normal(20, 80, seed=2).float()
    with counted() as total:
        run(dout, weight, gate_up, 0, Plan(90, TILES[1], 1), keep)
    assert tuple(total) == (4 * (20 * 32 + 40 * 32 + 20 * 80), 4 * 20 * (80 + (40 if keep else 0)))


def test_bad_input_is_refused():
    dout, weight = torch.ones(2, 4), torch.ones(4, 3)
    with pytest.raises(ValueError, match=r"pre has shape \(2, 3\); expected \(2, 6\)"):
        linear_dgrad(dout, weight, pre=torch.ones(2, 3), activation="swiglu")
    with pytest.raises(TypeError, match="pre is torch.float16"):
        linear_dgrad(dout, weight, pre=torch.ones(2, 6).half(), activation="geglu")


def grouped(specialized, num_splits=1):
    """A tile whose loads have a group of warps of their own, or the same without."""
    return Plan(90, Tile(32, 64, 32, 4, 1, 2, 3, specialized), num_splits)


@interpret
@needs_interpreter
@pytest.mark.parametrize("num_splits,with_sums", [(1, False), (2, False), (1, True)])
def test_loads_by_warps_of_their_own_change_no_bit_of_a_product(num_splits, with_sums):
    """Several tiles a program; the epilogue with all that it reads."""
    a, b = (matrix("padded", n, 40, torch.float16, seed=n) for n in (40, 72))
    bias, pre = normal(72, dtype=torch.float16, seed=2), torch.empty(40, 72, dtype=torch.float16)

    def run(specialized):
        out, sums = torch.full((40, 72), float("nan"), dtype=torch.float16), torch.zeros(40) if with_sums else None
        extra = Epilogue(bias, 1, True, 0, pre, None, 40, b[:40, :1].expand(40, 72), False, sums)
        first, *rest = product_launches(a, b, out, extra, grouped(specialized, num_splits))
        assert first.constants["SPECIALIZED"] is (specialized and not with_sums)
        run_launches([first._replace(grid=(2,)), *rest])
        return out, pre.clone(), torch.zeros(1) if sums is None else sums

    for x, y in zip(run(True), run(False), strict=True):
        assert torch.equal(x, y) and not x.isnan().any()


@interpret
@needs_interpreter
def test_loads_by_warps_of_their_own_change_no_bit_of_a_gate():
    x, weight = normal(40, 48, dtype=torch.float16), normal(272, 48, dtype=torch.float16, seed=1)
    gate_up, out = torch.empty(40, 272, dtype=torch.float16), torch.empty(40, 136, dtype=torch.float16)

    def run(specialized):
        first = swiglu_launch(x, weight, out, gate_up, grouped(specialized))
        second = gated_grad_launch(x, weight[:136], gate_up, 0, gate_up, None, grouped(specialized))
        assert first.constants["SPECIALIZED"] is second.constants["SPECIALIZED"] is specialized
        run_launches([first._replace(grid=(2,)), second._replace(grid=(2,))])
        return out.clone(), gate_up.clone()

    for one, other in zip(run(True), run(False), strict=True):
        assert torch.equal(one, other) and one.isfinite().all() and one.any()


def test_what_the_compiler_cannot_split_is_left_to_eight_warps():
    """Sums of rows are a second loop over K; a second half that no descriptor reaches is read by pointers."""

    def new(*shape):
        return torch.empty(shape, dtype=torch.float16, device="meta")

    def kind(launch):
        return launch.constants["SPECIALIZED"], launch.num_warps

    def product(specialized, sums=None):
        how = grouped(specialized)
        (launch,) = product_launches(new(64, 64), new(128, 64), new(64, 128), Epilogue(sums=sums), how)
        return launch

    assert kind(product(True)) == (True, 4) and not product(True).constants["FLATTEN"]
    assert kind(product(True, new(64))) == (False, 8) and kind(product(False)) == (False, 4)
    swiglu = [
        swiglu_launch(new(64, 64), w, new(64, 60), None, grouped(True)) for w in (new(120, 64), new(64, 120).t())
    ]
    assert [kind(launch) for launch in swiglu] == [(True, 4), (False, 8)]
