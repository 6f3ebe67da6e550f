"""adamw_ against its oracle and torch's AdamW, with master weights, a gradient factor on the device, many tensors.

The kernels are held to the oracle's bits: both moments equal; the weight within 1 ulp of fp32, since torch's own root
is (vectorised, on this CPU) up to 1 ulp off the nearest. A stochastically rounded parameter equals the rounding of
the kernel's own weight, bit for bit.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.library import opcheck

from plait.kernels import adamw_, adamw_ref
from plait.kernels.adamw_triton import Step, run_launch, step_launches, table_launch
from plait.kernels.rounding import stochastic_round_ref
from tests.cases import dtype_support, interpret, needs_interpreter, needs_plain, normal
from tests.edges import no_32_bit_overflow

NUMBERS = dict(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
SHAPES = ((5,), (3, 4), (), (0,), (129,))
RNG = torch.tensor([5, 9])
SCALARS = ("step", "lr", "grad_scale", "loss_scale", "found_inf")


def _state(dtype, wide, master):
    params = [normal(*s, dtype=dtype, seed=i) for i, s in enumerate(SHAPES)]
    masters = [normal(*s, dtype=wide, seed=i) for i, s in enumerate(SHAPES)] if master else None
    moments = [[torch.zeros(s, dtype=wide) for s in SHAPES] for _ in range(2)]
    return params, *moments, masters


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("scale", [None, 0.5, torch.tensor(0.5)])
def test_three_steps_agree_with_the_oracle_and_every_dtype_stays_what_it_is(dtype, master, scale):
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    params, averages, squares, masters = _state(dtype, wide, master)
    want = [[p.clone(), m.clone(), v.clone(), None] for p, m, v in zip(params, averages, squares, strict=True)]
    if masters:
        for row, weight in zip(want, masters, strict=True):
            row[3] = weight.clone()
    for step in (1, 2, 3):
        grads = [normal(*s, dtype=dtype, seed=10 * step + i) for i, s in enumerate(SHAPES)]
        adamw_(params, grads, averages, squares, masters, step=step, grad_scale=scale, **NUMBERS)
        for i, (p, m, v, w) in enumerate(want):
            p, m, v, wide_weight = adamw_ref(p, grads[i], m, v, w, step=step, grad_scale=scale, **NUMBERS)
            want[i] = [p, m, v, wide_weight if master else None]
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    coarse = tolerance if dtype in (torch.float64, torch.float32) else {"rtol": 1e-2, "atol": 1e-2}
    for i, (p, m, v, w) in enumerate(want):
        assert params[i].dtype is dtype and averages[i].dtype is squares[i].dtype is wide
        torch.testing.assert_close(params[i], p, **coarse)
        torch.testing.assert_close(averages[i], m, **tolerance)
        torch.testing.assert_close(squares[i], v, **tolerance)
        if masters:
            assert masters[i].dtype is wide
            torch.testing.assert_close(masters[i], w, **tolerance)
            assert torch.equal(params[i], masters[i].to(dtype))


def test_torch_agrees():
    weight = torch.nn.Parameter(normal(4, 5))
    mine, moments = weight.detach().clone(), [torch.zeros(4, 5, dtype=torch.float64) for _ in range(2)]
    peer = torch.optim.AdamW([weight], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, 5):
        weight.grad = normal(4, 5, seed=step)
        peer.step()
        adamw_([mine], [weight.grad], [moments[0]], [moments[1]], step=step, **NUMBERS)
    torch.testing.assert_close(mine, weight.detach(), rtol=1e-12, atol=1e-12)


def test_fp32_gradients_step_bf16_parameters():
    params, averages, squares, masters = _state(torch.bfloat16, torch.float32, True)
    grads = [normal(*s, dtype=torch.float32, seed=9) for s in SHAPES]
    before = [m.clone() for m in masters]
    adamw_(params, grads, averages, squares, masters, step=1, **NUMBERS)
    assert all((a != b).all() for a, b in zip(before, masters, strict=True))
    torch.testing.assert_close(averages[0], 0.1 * grads[0])


def test_ten_thousand_scalars_in_one_call():
    params = [torch.tensor(1.0) for _ in range(10_000)]
    grads, averages, squares = ([torch.full((), value) for _ in params] for value in (1.0, 0.0, 0.0))
    adamw_(params, grads, averages, squares, step=1, **NUMBERS)
    values = torch.stack(params)
    assert (values == values[0]).all() and values[0] < 1.0


def test_a_split_tensor_steps_as_the_whole_one():
    whole, parts = normal(64), normal(64)
    grad = normal(64, seed=1)
    moments = [torch.zeros(64, dtype=torch.float64) for _ in range(4)]
    adamw_([whole], [grad], [moments[0]], [moments[1]], step=1, **NUMBERS)
    cut = [slice(0, 7), slice(7, 64)]
    adamw_(
        [parts[c] for c in cut], [grad[c] for c in cut], [moments[2][c] for c in cut], [moments[3][c] for c in cut],
        step=1, **NUMBERS,
    )  # fmt: skip
    torch.testing.assert_close(whole, parts, rtol=1e-14, atol=1e-14)


def test_strided_tensors_step_as_contiguous_ones():
    strided, plain = normal(6, 5).t(), normal(6, 5).t().contiguous()
    grad = normal(5, 6, seed=1)
    moments = [torch.zeros(5, 6, dtype=torch.float64) for _ in range(4)]
    adamw_([strided], [grad], [moments[0]], [moments[1]], step=2, **NUMBERS)
    adamw_([plain], [grad], [moments[2]], [moments[3]], step=2, **NUMBERS)
    torch.testing.assert_close(strided, plain, rtol=1e-14, atol=1e-14)


def test_bad_input_is_refused():
    one, two = [torch.ones(2)], [torch.ones(3)]

    def step(*lists):
        adamw_(*lists, step=1, **NUMBERS)

    def scaled(**how):
        adamw_(one, one, one, one, step=1, **NUMBERS, **how)

    shared = torch.ones(1).expand(2)
    for call, error, text in (
        (lambda: step(one, [torch.ones(2).int()], one, one), TypeError, r"grads\[0\] is torch.int32"),
        (lambda: step([shared], one, one, one), ValueError, r"params\[0\] has strides .*share memory"),
        (lambda: step(one, one, [torch.ones(2, device="meta")], one), ValueError, r"exp_avgs\[0\] is on meta"),
        (lambda: scaled(grad_scale=torch.ones(1)), ValueError, "grad_scale has shape"),
        (lambda: scaled(loss_scale=torch.ones((), device="meta")), ValueError, "loss_scale is on meta"),
        (lambda: scaled(rng=torch.ones(2)), TypeError, "rng is torch.float32"),
        (lambda: scaled(rng=RNG, first_indices=[1, 2]), ValueError, "first_indices are"),
        (lambda: step(one, [], one, one), ValueError, "0 grads for 1 params"),
        (lambda: step(one, two, one, one), ValueError, r"grads\[0\] has shape"),
        (lambda: step(one, one, [torch.ones(2).half()], one), TypeError, "expected torch.float32"),
        (lambda: adamw_(one, one, one, one, step=0, **NUMBERS), ValueError, "step is 0"),
        (lambda: step([*one, torch.ones(2).half()], one * 2, one * 2, one * 2), ValueError, "several"),
    ):
        with pytest.raises(error, match=text):
            call()
    adamw_([], [], [], [], step=1, **NUMBERS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_divided_by_the_loss_scale(dtype):
    grads = [normal(3, dtype=dtype)]
    want = [torch.ones(3, dtype=dtype), torch.zeros(3), torch.zeros(3)]
    got = [x.clone() for x in want]
    adamw_([want[0]], grads, [want[1]], [want[2]], step=1, grad_scale=0.5 / 64, **NUMBERS)
    scales = {"grad_scale": 0.5, "loss_scale": torch.tensor(64.0)}
    adamw_([got[0]], grads, [got[1]], [got[2]], step=1, **scales, **NUMBERS)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_step_and_learning_rate_may_be_tensors():
    numbers = {**NUMBERS, "lr": torch.tensor(0.01, dtype=torch.float64)}
    got, want = ([torch.ones(3), torch.zeros(3), torch.zeros(3)] for _ in range(2))
    adamw_([got[0]], [normal(3)], [got[1]], [got[2]], step=torch.tensor(3), **numbers)
    adamw_([want[0]], [normal(3)], [want[1]], [want[2]], step=3, **NUMBERS)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(ValueError, match="step is 0"):
        adamw_([got[0]], [normal(3)], [got[1]], [got[2]], step=torch.tensor(0), **numbers)


FOUND = [torch.tensor(0.0), torch.tensor(1.0)]


def _fused(params, grads, averages, squares, **more):
    """torch's fused AdamW, step 3."""
    torch._fused_adamw_(
        params, grads, averages, squares, [], [torch.tensor(3.0) for _ in params], lr=0.01, beta1=0.9, beta2=0.95,
        weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False, **more,
    )  # fmt: skip


@interpret
@pytest.mark.parametrize("found", FOUND, ids=["finite", "found"])
@pytest.mark.parametrize("bad", [1.0, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("layout", ["one run", "table"])
def test_found_inf_loss_scale_and_bad_gradients_are_those_of_torchs_fused_adamw(layout, bad, found):
    """Where one was found nothing changes; else NaN and inf go where torch's go."""
    shapes = ((40,),) if layout == "one run" else ((40,), (3, 4), (), (129,), (16,))
    mine, theirs = ([[normal(*s, dtype=torch.float32, seed=k) for s in shapes] for k in range(4)] for _ in range(2))
    for lists in (mine, theirs):
        lists[3] = [v.square() for v in lists[3]]
        lists[1][0][7] = bad
    before = [x.clone() for k in (0, 2, 3) for x in mine[k]]
    scale = torch.tensor(4.0)
    adamw_(*mine, step=3, loss_scale=scale, found_inf=found, **NUMBERS)
    _fused(*theirs, grad_scale=scale, found_inf=found)
    for k in (0, 2, 3):
        for a, b in zip(mine[k], theirs[k], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, equal_nan=True)
    if found:
        assert all(torch.equal(a, b) for a, b in zip(before, (x for k in (0, 2, 3) for x in mine[k]), strict=True))


@interpret
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_16_bits_follow_their_masters_and_stay_where_inf_was_found(dtype):
    start = normal(40, dtype=torch.float32)
    for found in FOUND:
        lists = [[start.to(dtype)], [normal(40, dtype=dtype, seed=1)], [torch.zeros(40)], [torch.zeros(40)]]
        master = [start.clone()]
        with dtype_support(dtype):
            adamw_(*lists, master, step=1, grad_scale=0.5, loss_scale=8.0, found_inf=found, **NUMBERS)
        assert torch.equal(lists[0][0], master[0].to(dtype))
        assert torch.equal(master[0], start) == bool(found)


def test_a_tensor_of_several_numbers_is_no_found_inf():
    one = [torch.ones(2)]
    with pytest.raises(ValueError, match="found_inf has shape"):
        adamw_(one, one, one, one, step=1, found_inf=torch.zeros(2), **NUMBERS)


@needs_plain
def test_nothing_waits_for_the_device():
    """A fake CUDA tensor refuses to give its value, as `.item()`, `bool` or `float` would ask for."""
    with FakeTensorMode():
        lists = [[torch.ones(3, device="cuda")] for _ in range(4)]
        scalars = {name: torch.tensor(2.0, device="cuda") for name in SCALARS}
        adamw_(*lists, rng=torch.ones(2, dtype=torch.int64, device="cuda"), **{**NUMBERS, **scalars})
        adamw_(*lists, step=1, grad_scale=0.5, loss_scale=2.0, **NUMBERS)
        for name in SCALARS:
            with pytest.raises(DataDependentOutputException):
                bool(scalars[name])


# ---- the kernels ----


def _laid_out(shape, dtype, layout, seed):
    """Values of normal(shape), contiguous from a 16-byte border, moved off it by one element, or strided."""
    values = normal(*shape, dtype=torch.float64, seed=seed)
    if layout == "transposed" and shape:
        return values.transpose(0, -1).contiguous().to(dtype).transpose(0, -1)
    if layout == "stepped" and shape:
        home = torch.zeros(*shape[:-1], 2 * shape[-1] + 1, dtype=dtype)
        view = home[..., 1::2]
    else:
        lead = {"moved": 1, "moved by 4": 4}.get(layout, 0)
        view = torch.zeros(values.numel() + lead, dtype=dtype)[lead:].view(shape)
    return view.copy_(values)


def _check_kernel(shapes, layouts, dtype, grad_dtype, master, how, first_indices=None):
    """One step of tensors laid out as named against the oracle; layouts: per parameter one per role."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    roles = (dtype, grad_dtype, wide, wide) + ((wide,) if master else ())
    lists = [
        [_laid_out(s, d, row[k], 10 * i + k) for i, (s, row) in enumerate(zip(shapes, layouts, strict=True))]
        for k, d in enumerate(roles)
    ]
    for v in lists[3]:
        v.square_()
    want = []
    starts = first_indices or [0, *itertools.accumulate(-(-x.numel() // 4) * 4 for x in lists[0])]
    rng = how.get("rng")
    for i, row in enumerate(zip(*lists, strict=True)):
        index = {"first_index": starts[i]} if rng is not None else {}
        numbers = {k: v for k, v in how.items() if k != "rng"} | NUMBERS
        want.append(adamw_ref(*(x.clone() for x in row), rng=rng, **index, **numbers))
    with dtype_support(torch.bfloat16):
        adamw_(*lists, first_indices=first_indices, **how, **NUMBERS)
    for i, (param, exp_avg, exp_avg_sq, weight) in enumerate(want):
        assert torch.equal(lists[2][i], exp_avg), f"exp_avgs[{i}]"
        assert torch.equal(lists[3][i], exp_avg_sq), f"exp_avg_sqs[{i}]"
        ulp = {"rtol": torch.finfo(wide).eps, "atol": torch.finfo(wide).eps}
        if master:
            torch.testing.assert_close(lists[4][i], weight, **ulp)
            exact = lists[4][i].to(dtype) if rng is None else stochastic_round_ref(lists[4][i], dtype, RNG, starts[i])
            assert torch.equal(lists[0][i], exact), f"params[{i}]"
        elif dtype in (torch.bfloat16, torch.float16):
            # The weight before rounding is the oracle's up to a last place, which may lie on either side of a half.
            reach, got = torch.finfo(wide).eps * weight.abs(), lists[0][i]
            low, high = (
                w.to(dtype) if rng is None else stochastic_round_ref(w, dtype, RNG, starts[i])
                for w in (weight - reach, weight + reach)
            )
            assert ((low <= got) & (got <= high)).all(), f"params[{i}]"
        else:
            torch.testing.assert_close(lists[0][i], param, **ulp)
    return lists


# (shapes, layout of all tensors): one run, a body with a tail, several launches of one run, tables of each kind.
LAYOUTS = {
    "whole": (((64,),), "plain"),
    "tail": (((2000 + 7,),), "plain"),
    "head": (((100,),), "moved"),
    "table": (((5,), (3, 4), (), (0,), (129,), (2048,), (16,)), "plain"),
    "moved": (((5,), (48,), (1100,), (16,), (33,)), "moved"),
    "strided": (((6, 5), (2, 3, 4)), "stepped"),
    "same order": (((6, 5), (2, 3, 4)), "transposed"),
    "six dims": (((2, 3, 2, 1, 3, 2, 2),), "stepped"),
}
SWITCHES = [
    {"step": 1},
    {"step": 3, "grad_scale": torch.tensor(0.37), "loss_scale": torch.tensor(3.0), "rng": RNG},
    {"step": 2, "loss_scale": 3.0},
    {"step": 2, "grad_scale": 0.37, "rng": RNG},
]


# (parameter, gradient, with master)
DTYPES = (
    (torch.float32, torch.float32, False),
    (torch.bfloat16, torch.float32, True),
    (torch.bfloat16, torch.bfloat16, False),
    (torch.float16, torch.float16, True),
    (torch.float64, torch.float64, False),
)
# Each layout with each dtype, the switches in turn; on tables every switch with every dtype.
CASES = [(name, dtypes, (i + j) % 4) for i, name in enumerate(LAYOUTS) for j, dtypes in enumerate(DTYPES)]
CASES += [("table", dtypes, k) for dtypes in DTYPES for k in range(len(SWITCHES))]


@interpret
@needs_interpreter
@pytest.mark.parametrize("layout,dtypes,switches", CASES)
def test_triton_has_the_bits_of_the_oracle(layout, dtypes, switches):
    shapes, name = LAYOUTS[layout]
    _check_kernel(shapes, [[name] * 5] * len(shapes), *dtypes, SWITCHES[switches])


NAMES = st.sampled_from(["plain", "moved", "moved by 4", "transposed", "stepped"])
SHAPE = st.lists(st.integers(0, 9), max_size=4).map(tuple) | st.integers(0, 200).map(lambda n: (n,))
ROLES = st.lists(NAMES, min_size=5, max_size=5) | NAMES.map(lambda name: [name] * 5)
PARAMETERS = st.lists(st.tuples(SHAPE, ROLES), min_size=1, max_size=6)


@interpret
@needs_interpreter
@settings(max_examples=20, deadline=None)
@given(
    PARAMETERS,
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
    st.sampled_from(SWITCHES),
    st.integers(0, 2**40),
)
def test_triton_has_the_bits_of_the_oracle_on_any_layout(parameters, dtype, grad_dtype, master, how, start):
    shapes, layouts = zip(*parameters, strict=True)
    _check_kernel(shapes, layouts, dtype, grad_dtype, master, how, [start + 1001 * i for i in range(len(shapes))])


@interpret
@needs_interpreter
def test_a_stride_0_gradient_of_another_dtype_for_each_parameter():
    shapes = ((4, 6), (4, 6), (40,))
    lists = [[normal(*s, dtype=torch.float32, seed=i) for s in shapes] for i in range(4)]
    lists[1] = [torch.tensor(2.0).expand(4, 6), normal(1, 6).expand(4, 6), normal(40, dtype=torch.float16)]
    lists[3] = [v.square() for v in lists[3]]
    want = [adamw_ref(*row, step=1, **NUMBERS) for row in zip(*lists, strict=True)]
    adamw_(*lists, step=1, **NUMBERS)
    for i, (_, exp_avg, _, weight) in enumerate(want):
        assert torch.equal(lists[2][i], exp_avg)
        torch.testing.assert_close(lists[0][i], weight, rtol=2e-7, atol=2e-7)


@interpret
@needs_interpreter
def test_two_runs_have_equal_bits():
    shapes, layout = LAYOUTS["table"]
    arguments = (shapes, [[layout] * 5] * len(shapes), torch.bfloat16, torch.float32, True, SWITCHES[1])
    first, second = _check_kernel(*arguments), _check_kernel(*arguments)
    assert all(torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))


@interpret
@needs_interpreter
def test_stochastic_rounding_has_equal_bits_on_every_layout_and_split():
    def stepped(layout, cuts):
        lists = [[_laid_out((6, 50), d, layout, k)] for k, d in enumerate([torch.bfloat16, *[torch.float32] * 3])]
        lists[3][0].square_()
        if cuts:
            flat = [x[0].reshape(-1) for x in lists]
            pieces = list(itertools.pairwise([0, *cuts, 300]))
            parts = [[x[a:b] for a, b in pieces] for x in flat]
            adamw_(*parts, step=1, rng=RNG, first_indices=[7 + a for a, _ in pieces], **NUMBERS)
            return flat[0].view(6, 50)
        adamw_(*lists, step=1, rng=RNG, first_indices=[7], **NUMBERS)
        return lists[0][0]

    with dtype_support(torch.bfloat16):
        whole = stepped("plain", ())
        for layout in ("moved", "moved by 4", "transposed", "stepped"):
            assert torch.equal(stepped(layout, ()), whole), layout
        for cuts in ((1,), (3, 5, 7), (16, 17, 50, 51, 200)):
            assert torch.equal(stepped("plain", cuts), whole), cuts


@interpret
@needs_interpreter
def test_elements_beyond_32_bits_are_reached():
    """A table whose first chunk counts from 2^32 elements on, over addresses moved back by as much."""
    first, numel = 1 << 32, 40
    lists = [[normal(numel, dtype=torch.float32, seed=k)] for k in range(4)]
    lists[3][0].square_()
    want = adamw_ref(*(x[0].clone() for x in lists), step=1, **NUMBERS)
    moved = [x[0].data_ptr() - 4 * first for x in (*lists, lists[2])]
    table = torch.tensor([-first // 1024, first + numel, 0, 0, *moved])
    decay, rate, correction = 1.0 - 0.01 * 0.1, 0.01 / (1.0 - 0.9), 1.0 - 0.95
    step = Step((decay, rate, correction, 0.9, 1.0 - 0.9, 0.95, 1.0 - 0.95, 1e-8))
    table_launch(table, 1, 1, 1, [x[0] for x in lists], step, aligned=False).run()
    assert torch.equal(lists[0][0], want[0]) and torch.equal(lists[2][0], want[1])


@interpret
@needs_interpreter
def test_one_tensor_of_more_than_two_billion_elements():
    """The last block of a run; the pages before it are never touched. The four overlap where nobody looks."""
    numel = (1 << 31) + 40
    storage = torch.empty(numel + 4 * 2048)
    tensors = [storage[2048 * k : 2048 * k + numel] for k in range(4)]
    tails = [x[-40:] for x in tensors]
    for k, tail in enumerate(tails):
        tail.copy_(normal(40, dtype=torch.float32, seed=k).abs())
    want = adamw_ref(*(tail.clone() for tail in tails), step=1, **NUMBERS)
    numbers = (1.0 - 0.01 * 0.1, 0.01 / (1.0 - 0.9), 1.0 - 0.95, 0.9, 1.0 - 0.9, 0.95, 1.0 - 0.95, 1e-8)
    launch = run_launch(tensors, Step(numbers))
    assert launch.grid == (2**31 // 1024 + 1,)
    with no_32_bit_overflow(first_program=2**31 // 1024):
        launch._replace(grid=(1,)).run()
    torch.testing.assert_close(tails[0], want[0], rtol=2e-7, atol=2e-7)
    assert torch.equal(tails[2], want[1]) and torch.equal(tails[3], want[2])


@interpret
@needs_interpreter
def test_the_last_of_ten_thousand_scalars_in_one_launch():
    lists = [[torch.full((), value) for _ in range(10_000)] for value in (1.0, 1.0, 0.0, 0.0)]
    launches = step_launches(lists, Step((1.0, 0.1, 1.0, 0.9, 0.1, 0.9, 0.1, 1e-8)))
    assert [launch.grid for launch in launches] == [(10_000,)]
    with no_32_bit_overflow(first_program=9_999):
        launches[0]._replace(grid=(1,)).run()
    assert lists[2][-1].item() == pytest.approx(0.1) and lists[0][-1].item() < 1.0
    assert all(x.item() == 1.0 for x in lists[0][:-1])


@interpret
@needs_interpreter
def test_many_small_tensors_in_one_launch():
    lists = [[torch.full((1 + i % 3,), value) for i in range(300)] for value in (1.0, 1.0, 0.0, 0.0)]
    assert len(step_launches(lists, Step((1.0, 0.1, 1.0, 0.9, 0.1, 0.9, 0.1, 1e-8)))) == 1
    adamw_(*lists, step=1, **NUMBERS)
    values = torch.cat(lists[0])
    assert (values == values[0]).all() and values[0] < 1.0


@interpret
@needs_interpreter
def test_autograd_sees_that_weights_changed():
    weight, other = torch.ones(20, requires_grad=True), torch.ones(20)
    out = (weight * weight).sum()
    adamw_([weight], [other], [other * 0], [other * 0], step=1, **NUMBERS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@interpret
@needs_interpreter
def test_tensors_as_step_and_rate_are_read_by_the_kernel():
    def stepped(step, lr, **how):
        lists = [[normal(40, dtype=torch.float32, seed=k)] for k in range(4)]
        lists[3][0].square_()
        adamw_(*lists, step=step, **{**NUMBERS, "lr": lr}, **how)
        return lists

    for step in (1, 1000):
        got, want = stepped(torch.tensor(step), torch.tensor(0.01, dtype=torch.float64)), stepped(step, 0.01)
        torch.testing.assert_close(got, want, rtol=2e-7, atol=2e-7)


@interpret
@needs_interpreter
def test_interpreted_op_passes_opcheck():
    lists = [[normal(5, 3, seed=k).float(), normal(7, seed=k).float()] for k in range(4)]
    lists[3] = [v.square() for v in lists[3]]
    numbers = (1, 0.1, 0.9, 0.99, 1e-8, 0.1)
    for extra in ((), (torch.tensor(2.0), RNG, [0, 15], torch.tensor([1.0, 0.1, 0.5]), torch.tensor(0.0))):
        opcheck(torch.ops.plait.adamw_.default, (*lists, [], torch.tensor(0.5), *numbers, *extra))
