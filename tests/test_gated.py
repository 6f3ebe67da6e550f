"""swiglu and geglu: forward and gradient against the oracle, on the plain path and on the Triton kernels."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels import gated, geglu, geglu_ref, swiglu, swiglu_ref
from plait.kernels.inspect import compile_offline
from tests.cases import (
    TOLERANCE,
    close,
    compare,
    dtype_support,
    interpret,
    needs_compiler,
    needs_interpreter,
    needs_plain,
    normal,
)
from tests.edges import LAYOUTS, lay_out, no_worse_than_torch

# (leading dims, F): one element, odd, a power of two, more than one block of columns, no rows, no columns.
SHAPES = (((), 1), ((2, 3), 65), ((4,), 64), ((2,), 1500), ((0,), 8), ((3,), 0))
OPS = {
    "swiglu": (swiglu, swiglu_ref),
    "geglu": (geglu, geglu_ref),
    "geglu tanh": (partial(geglu, approximate="tanh"), partial(geglu_ref, approximate="tanh")),
}
# What a user of plain torch would write.
PEERS = {
    "swiglu": torch.nn.functional.silu,
    "geglu": torch.nn.functional.gelu,
    "geglu tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}
EACH = pytest.mark.parametrize("name", OPS)


@needs_plain
@EACH
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("leading,width", SHAPES)
def test_plain_path_agrees_with_the_oracle(leading, width, dtype, name):
    compare(*OPS[name], normal(*leading, 2 * width, dtype=dtype))


@interpret
@needs_interpreter
@EACH
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("leading,width", SHAPES)
def test_triton_agrees_with_the_oracle(leading, width, dtype, name):
    with dtype_support(dtype):
        compare(*OPS[name], normal(*leading, 2 * width, dtype=dtype))


@interpret
@EACH
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_of_any_layout(layout, name):
    compare(*OPS[name], lay_out(normal(5, 12), layout))


@interpret
@needs_interpreter
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=2).map(tuple),
    st.integers(0, 70),
    st.sampled_from(list(TOLERANCE)),
    st.sampled_from(LAYOUTS),
    st.sampled_from(LAYOUTS),
    st.sampled_from(list(OPS)),
    st.sampled_from([1.0, 8.0]),
)
def test_triton_agrees_with_the_oracle_on_anything(leading, width, dtype, layout, grad_layout, name, size):
    op, oracle = OPS[name]
    values = normal(*leading, 2 * width, dtype=dtype) * size
    gate_up = lay_out(values, layout if width else "plain").detach().requires_grad_()
    dout = normal(*leading, width, dtype=dtype, seed=2)
    dout = lay_out(dout, grad_layout if width else "plain")
    with dtype_support(dtype):
        out = op(gate_up)
        (grad,) = torch.autograd.grad(out, gate_up, dout)
    wide = gate_up.detach().double().requires_grad_()
    want = oracle(wide)
    scale = size * size
    close(out / scale, want / scale, dtype, "out")
    close(grad / scale, torch.autograd.grad(want, wide, dout.double())[0] / scale, dtype, "grad", 2.0)


@interpret
@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 4.0])
def test_16_bit_errors_are_at_most_twice_those_of_torch(dtype, name, size):
    def peer(gate_up):
        gate, up = gate_up.chunk(2, -1)
        return PEERS[name](gate) * up

    no_worse_than_torch(OPS[name][0], peer, OPS[name][1], normal(4, 2 * 65, dtype=dtype) * size)


@interpret
@EACH
def test_saturated_gates_are_finite(name):
    gate = torch.tensor([-3e38, -1e20, -1e4, -100.0, 0.0, 100.0, 1e4, 1e20, 3e38])
    gate_up = torch.cat((gate, torch.full((9,), 0.5))).requires_grad_()
    out = OPS[name][0](gate_up)
    (grad,) = torch.autograd.grad(out.sum(), gate_up)
    assert out.isfinite().all()
    torch.testing.assert_close(out, gate.clamp(min=0.0) * 0.5)
    if name != "geglu tanh" or gated.use_triton(gate_up):  # torch's own tanh slope is 0 times infinity beyond 1e19
        assert grad.isfinite().all()
        torch.testing.assert_close(grad[:9], torch.tensor([0.0] * 4 + [0.25] + [0.5] * 4))


@interpret
@EACH
def test_nan_and_inf_as_in_torch(name):
    gate = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0, 0.0])
    up = torch.tensor([1.0, 1.0, 1.0, float("inf"), float("inf")])
    # In fp64: torch's gelu of inf is NaN in fp32 where it has AVX-512.
    got, want = OPS[name][0](torch.cat((gate, up))), PEERS[name](gate.double()).float() * up
    torch.testing.assert_close(got[[0, 1, 3, 4]], want[[0, 1, 3, 4]], equal_nan=True)
    assert got[2].isnan() or got[2] == 0.0  # torch itself gives NaN or 0 by form and version


@interpret
@EACH
def test_huge_row_stride_does_not_overflow_32_bits(name):
    stride = (1 << 30) + 16
    storage = torch.empty(2 * stride + 8, dtype=torch.float16)  # never touched but for three rows
    far = storage.as_strided((3, 8), (stride, 1))
    far.copy_(normal(3, 8))
    dout = normal(3, 4, dtype=torch.float16, seed=1)
    results = []
    for gate_up in (far, far.contiguous()):
        leaf = gate_up.detach().requires_grad_()
        out = OPS[name][0](leaf)
        results.append((out, torch.autograd.grad(out, leaf, dout)[0]))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@interpret
@EACH
def test_backward_twice_gives_the_same_gradient_and_leaves_the_input_alone(name):
    gate_up = normal(3, 8).requires_grad_()
    produced = gate_up.exp()
    kept = produced.detach().clone()
    loss = OPS[name][0](produced).sum()
    first, second = (torch.autograd.grad(loss, gate_up, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and torch.equal(produced, kept)


@interpret
def test_direct_functions_are_the_op_without_a_graph():
    gate_up, dout = normal(3, 8).requires_grad_(), normal(3, 4, seed=1)
    for tanh, name in ((False, "geglu"), (True, "geglu tanh")):
        out = OPS[name][0](gate_up)
        (grad,) = torch.autograd.grad(out, gate_up, dout)
        with torch.no_grad():
            assert torch.equal(gated.geglu_forward(gate_up, tanh), out)
            assert torch.equal(gated.geglu_backward(dout, gate_up, tanh), grad)


@EACH
def test_gradcheck_of_the_reference_in_fp64(name):
    assert torch.autograd.gradcheck(OPS[name][1], (normal(2, 6).requires_grad_(),))


@pytest.mark.parametrize(
    "call,error,text",
    [
        (lambda: swiglu(torch.ones(2, 5)), ValueError, "swiglu: .* last dim must be even"),
        (lambda: swiglu(torch.ones(2, 4).long()), TypeError, "gate_up is torch.int64"),
        (lambda: geglu(torch.ones(2, 5)), ValueError, "geglu: .* last dim must be even"),
        (lambda: geglu(torch.ones(())), ValueError, "last dim must be even"),
        (
            lambda: geglu(torch.ones(2, 4), approximate="erf"),
            ValueError,
            "approximate is 'erf'; expected one of none",
        ),
    ],
)
def test_bad_input_is_refused_before_any_launch(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.offline
@pytest.mark.long  # the declared list of test_gate.py stays in the short run
@needs_compiler
@pytest.mark.parametrize("tanh", [None, False, True])
@pytest.mark.parametrize(
    "rows,width,step,dtype", [(1, 1, 2, torch.float32), (3, 65, 1 << 31, torch.float16)], ids=str
)
def test_edge_launches_compile(rows, width, step, dtype, tanh):
    """Sizes of 1, which the compiler folds away; odd ones beyond 32 bits; tanh None is swiglu."""
    gate_up = torch.empty_strided((rows, 2 * width), (step, 1), dtype=dtype, device="meta")
    out, grad = gate_up[:, :width], torch.empty(rows, 2 * width, dtype=dtype, device="meta")
    launches = (
        (gated.forward_launch(gate_up, grad[:, :width]), gated.backward_launch(out, gate_up, grad))
        if tanh is None
        else (
            gated.geglu_forward_launch(gate_up, grad[:, :width], tanh),
            gated.geglu_backward_launch(out, gate_up, grad, tanh),
        )
    )
    for launch in launches:
        facts = compile_offline(launch, "sm_90")
        assert (facts.spill_loads, facts.spill_stores, facts.count("DFMA") + facts.count("DMUL")) == (0, 0, 0)
