"""l2_norm over many tensors against its oracle."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from plait.kernels import l2_norm, l2_norm_ref, l2_norm_squared, l2_norm_squared_ref
from plait.kernels.norms import first_launches, partials_launch, run_launch, table_launch
from tests.cases import TOLERANCE, dtype_support, interpret, needs_interpreter, normal
from tests.edges import no_32_bit_overflow

SHAPES = ((5,), (3, 4), (), (0,), (1000,))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_agrees_with_the_oracle(dtype):
    tensors = [normal(*s, dtype=dtype, seed=i) for i, s in enumerate(SHAPES)]
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    for op, oracle in ((l2_norm, l2_norm_ref), (l2_norm_squared, l2_norm_squared_ref)):
        got = op(tensors)
        assert got.dtype is wide and got.dim() == 0
        torch.testing.assert_close(got.double(), oracle([t.double() for t in tensors]), rtol=1e-6, atol=0)


def test_strided_tensors_and_mixed_dtypes():
    tensors = [normal(6, 5).t(), normal(4, 4, dtype=torch.float32)[:, ::2], normal(3, dtype=torch.bfloat16)]
    want = sum(t.double().square().sum() for t in tensors)
    torch.testing.assert_close(l2_norm_squared(tensors), want, rtol=1e-6, atol=0)


def test_sums_in_fp32_what_overflows_in_half():
    assert l2_norm([torch.full((4,), 3e4, dtype=torch.float16)]).item() == 6e4


def test_ten_thousand_scalars_in_one_call():
    assert l2_norm_squared([torch.ones(()) for _ in range(10_000)]).item() == 10_000


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_pass_through(bad):
    got = l2_norm([torch.ones(3), torch.tensor([1.0, bad])])
    assert got.isnan() if bad != bad else got.isinf()


def test_carries_no_gradient_and_refuses_bad_input():
    assert not l2_norm([torch.ones(3, requires_grad=True)]).requires_grad
    with pytest.raises(ValueError, match="no tensors"):
        l2_norm([])
    with pytest.raises(TypeError, match="torch.int64"):
        l2_norm([torch.ones(2).long()])
    with pytest.raises(ValueError, match="tensor is on meta"):
        l2_norm([torch.ones(2), torch.ones(2, device="meta")])


# ---- the kernels ----

# (shapes, how they lie): one run, a tail, several chunks, tables of each kind; strided ones of two to six dims.
LAYOUTS = {
    "whole": ((64,),),
    "tail": ((5000,),),
    "nothing": ((0,), (3, 0)),
    "scalar": ((),),
    "table": ((5,), (3, 4), (), (0,), (129,), (4100,), (16,)),
    "six dims": ((2, 3, 2, 1, 3, 2, 2), (2, 2)),
}


def _view(shape, dtype, layout, seed):
    values = normal(*shape, dtype=dtype, seed=seed)
    if layout == "transposed" and shape:
        return values.transpose(0, -1)
    if layout == "stepped" and shape:
        home = torch.full((*shape[:-1], 2 * shape[-1] + 1), float("nan"), dtype=dtype)
        return home[..., 1::2].copy_(values)
    if layout == "broadcast" and shape:
        return values[:1].expand(shape)
    lead = 1 if layout == "moved" else 0
    return torch.full((values.numel() + lead,), float("nan"), dtype=dtype)[lead:].view(shape).copy_(values)


def _check_kernel(tensors):
    with dtype_support(torch.bfloat16):
        got = l2_norm_squared(tensors)
        assert torch.equal(got, l2_norm_squared(tensors))
    wide = torch.float64 if any(t.dtype is torch.float64 for t in tensors) else torch.float32
    assert got.dtype is wide and got.dim() == 0
    relative = 1e-12 if all(t.dtype is torch.float64 for t in tensors) else 1e-6
    want = l2_norm_squared_ref([t.double() for t in tensors])
    torch.testing.assert_close(got.double(), want, rtol=relative, atol=0)


@interpret
@needs_interpreter
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", ["plain", "moved", "transposed", "stepped", "broadcast"])
@pytest.mark.parametrize("shapes", LAYOUTS)
def test_triton_agrees_with_the_oracle_in_any_layout(shapes, layout, dtype):
    _check_kernel([_view(s, dtype, layout, i) for i, s in enumerate(LAYOUTS[shapes])])


@interpret
@needs_interpreter
@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), max_size=5).map(tuple) | st.integers(0, 5000).map(lambda n: (n,)),
            st.sampled_from(list(TOLERANCE)),
            st.sampled_from(["plain", "moved", "transposed", "stepped", "broadcast"]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_triton_agrees_with_the_oracle_on_any_mixture(tensors):
    _check_kernel([_view(*how, i) for i, how in enumerate(tensors)])


@interpret
@needs_interpreter
def test_bits_do_not_depend_on_where_a_tensor_begins():
    values = normal(5000, dtype=torch.float32)
    whole = l2_norm_squared([values])
    for lead in (1, 2, 4, 7):
        moved = torch.zeros(5000 + lead)[lead:].copy_(values)
        assert torch.equal(l2_norm_squared([moved]), whole)


@interpret
@needs_interpreter
@pytest.mark.parametrize("bad,want", [(float("nan"), "nan"), (float("inf"), "inf"), (-float("inf"), "inf")])
@pytest.mark.parametrize("place", [0, 63, 4998])
def test_nan_and_inf_pass_through_the_kernels(bad, want, place):
    x = torch.ones(5000)
    x[place] = bad
    assert str(l2_norm([torch.ones(3), x, torch.ones(20, 3).t()]).item()) == want


@interpret
@needs_interpreter
def test_many_tensors_are_one_launch_and_one_partial_sum_each():
    tensors = [torch.full((1,), float(i % 7)) for i in range(100)]
    launches, partial = first_launches(tensors)
    assert len(launches) == 1
    launches[0].run()
    assert partial.tolist() == [float((i % 7) ** 2) for i in range(100)]


@interpret
@needs_interpreter
@pytest.mark.parametrize("count", [0, 1, 1024, 3000])
def test_more_partial_sums_than_one_pass_adds(count):
    out = torch.full((), float("nan"))
    partials_launch(torch.arange(float(count)), out).run()
    assert out.item() == count * (count - 1) / 2


@interpret
@needs_interpreter
def test_a_chunk_of_several_passes_ends_at_its_border():
    x, partial = normal(20_000, dtype=torch.float32), torch.full((4,), float("nan"))
    run_launch(x, partial, 4).run()
    want = torch.stack([part.double().square().sum() for part in x.split(4 * 2048)])
    torch.testing.assert_close(partial[:3].double(), want, rtol=1e-6, atol=0)
    assert partial[3].isnan()


@interpret
@needs_interpreter
def test_elements_beyond_32_bits_are_reached():
    """A table whose only row begins 2^32 elements before the tensor, first chunk counted from there."""
    first, x, partial = 1 << 32, normal(100, dtype=torch.float32), torch.zeros(1)
    row = [-first // 2048, first + 100, -first // 2048, x.data_ptr() - 4 * first]
    table_launch(torch.tensor(row), partial, 1, 1, 1, torch.float32, aligned=False).run()
    torch.testing.assert_close(partial[0].double(), x.double().square().sum(), rtol=1e-6, atol=0)


@interpret
@needs_interpreter
def test_one_tensor_of_more_than_two_billion_elements():
    """The last chunk; the pages before it are never touched."""
    x = torch.empty((1 << 31) + 40, dtype=torch.float16)
    x[-40:] = normal(40, dtype=torch.float16)
    partial = torch.zeros(2**20 + 1)
    launch = run_launch(x, partial, 1)
    assert launch.grid == (2**20 + 1,)
    with no_32_bit_overflow(first_program=2**20):
        launch._replace(grid=(1,)).run()
    torch.testing.assert_close(partial[-1].double(), x[-40:].double().square().sum(), rtol=1e-6, atol=0)


@interpret
@needs_interpreter
def test_ten_thousand_scalars_are_one_launch_whose_last_program_has_the_last():
    tensors = [torch.full((), float(i % 8)) for i in range(10_000)]
    launches, partial = first_launches(tensors)
    assert [launch.grid for launch in launches] == [(10_000,)] and partial.numel() == 10_000
    with no_32_bit_overflow(first_program=9_999):
        launches[0]._replace(grid=(1,)).run()
    assert partial[-1].item() == 49.0


@interpret
@needs_interpreter
def test_interpreted_op_passes_opcheck():
    for tensors in ([normal(5, 3)], [normal(40).float(), normal(4, 4).float().t()[:, 1:]]):
        opcheck(torch.ops.plait.l2_norm_squared.default, (tensors,))
