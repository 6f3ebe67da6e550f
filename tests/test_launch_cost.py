"""What a launch costs, counted: look-ups, compilations and calls; and the suite that times it. Asserts no time."""

import contextlib
import sys
import weakref
from unittest import mock

import pytest
import torch
import triton
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from plait import kernels
from plait.bench import suite_launch
from plait.bench.cli import load
from plait.bench.spec import Options
from plait.kernels import adamw_triton, launch, norms, plans, registration, tables
from plait.kernels.launch import Launch, signature_of
from tests.cases import needs_compiler, normal

pytestmark = needs_compiler


def counted_calls(call):
    """Python functions that `call` enters."""
    count = [0]

    def look(frame, event, argument):
        count[0] += event == "call"

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count[0]


# Python functions entered by one call, (forward, forward and backward), a twentieth above what was counted
# (2026-11-30); None: without a gradient. A bare launch and an empty op enter 23 and, each twice in a backward, 78.
# Not held here: how long lists of tensors are.
MOST_CALLS = {
    "linear gelu": (28, 121),
    "linear dropout": (31, 122),
    "linear residual": (28, 123),
    "linear_swiglu": (27, 104),
    "linear_dgrad slope, no gradient": (31, None),
    "linear_wgrad main, no gradient": (28, None),
    "attention": (26, 116),
    "rms_norm": (23, 92),
    "rms_norm residual": (23, 95),
    "layer_norm": (23, 97),
    "rope": (25, 91),
    "swiglu": (24, 86),
    "geglu": (24, 87),
    "dropout": (26, 91),
    "cross_entropy": (30, 97),
    # Its products by torch are bare launches here.
    "linear_cross_entropy": (59, 150),
    "embedding": (27, 96),
    "l2_norm, no gradient": (34, None),
    "adamw_, no gradient": (43, None),
}


def test_every_op_of_the_suite_has_a_ceiling():
    assert set(MOST_CALLS) == set(suite_launch.ops("meta"))


@pytest.mark.parametrize(
    "name,backward", [(name, i == 1) for name, most in MOST_CALLS.items() for i in (0, 1) if most[i] is not None]
)
def test_a_call_enters_few_python_functions(name, backward):
    with suite_launch.stubbed(), contextlib.nullcontext() if backward else torch.no_grad():
        call = suite_launch.providers(name, backward, "cpu")["plait"]
        for _ in range(3):
            call()
        assert counted_calls(call) <= MOST_CALLS[name][backward]


@pytest.mark.parametrize("name", [name for name, most in MOST_CALLS.items() if most[1] and name != "rope"])
def test_a_backward_makes_no_zeros_for_outputs_without_a_gradient(name):
    """Not rope, both of whose outputs have one: here that of k is not given."""
    with suite_launch.stubbed():
        call = suite_launch.providers(name, True, "cpu")["plait"]
        call()
        with _profiled() as profile:
            call()
    names = {event.name for event in profile.events()}
    assert "aten::zeros" not in names, names


@pytest.mark.parametrize("name", [name for name in MOST_CALLS if "l2_norm" not in name and "adamw" not in name])
def test_the_second_call_of_a_shape_plans_and_compiles_nothing_new(name):
    with suite_launch.stubbed():
        call = suite_launch.providers(name, "no gradient" not in name, "cpu")["plait"]
        call()
        before = plans._plan.cache_info(), launch._compiled.cache_info().misses
        call()
        after = plans._plan.cache_info(), launch._compiled.cache_info().misses
    assert after[0].misses == before[0].misses and after[0].hits > before[0].hits
    assert after[1] == before[1]


class _Recorder(triton.JITFunction):
    """A kernel that is never compiled: its launches are noted."""

    def __init__(self, *names):
        self.arg_names, self.seen = list(names), []

    def __hash__(self):
        return 4

    def __eq__(self, other):
        return self is other

    def warmup(self, *arguments, **keywords):
        return {(1, 1, 1): lambda *arguments: self.seen.append(arguments)}


def _build_two(site, x, y, kernel, scale):
    """Both rows by rows, y contiguous; the results are y and a new tensor."""
    out = site.empty(x.shape, x.dtype)
    arguments = (x.view(-1), y.contiguous(), out, y.stride(0), scale)
    return plans.Built((y, out), [launch.Launch(kernel, (1,), arguments, {})])


def test_pointers_and_results_of_a_plan_are_those_of_each_call():
    """Planned from one tensor given twice: what stands for it must not stand for two others."""
    kernel = _Recorder("x_ptr", "y_ptr", "out_ptr", "stride", "scale")
    x, y = torch.zeros(4, 16), torch.ones(4, 16)
    with suite_launch.stubbed():
        for pair in ((x, x), (x, y), (y, x)):
            given, out = plans.planned(_build_two, pair, kernel, 0.5)
            assert given is pair[1] and out.shape == x.shape and out.is_contiguous()
            found = [a.data_ptr() for a in kernel.seen[-1][:3]]
            assert found == [pair[0].data_ptr(), pair[1].data_ptr(), out.data_ptr()]
            assert kernel.seen[-1][3:] == (16, 0.5)
    assert [len(arguments) for arguments in kernel.seen] == [5] * 3


def test_a_step_of_torch_has_its_place_between_launches():
    kernel, seen = _Recorder("x_ptr", "y_ptr", "out_ptr", "stride", "scale"), []

    def step(y, number, out):
        seen.append((len(kernel.seen), y.shape, number, out.data_ptr()))

    def build(site, x, y, of_view):
        _, (first,) = _build_two(site, x, y, kernel, 0.5)
        out = first.arguments[2]
        return plans.Built((out,), [first, plans.Call(step, (y[1:] if of_view else y, 3, out)), first])

    x, wide = torch.zeros(4, 16), torch.zeros(4, 32)[:, ::2]
    with suite_launch.stubbed():
        for i, y in enumerate((x, x, wide, wide)):  # wide is copied in each call, so nothing is planned
            (out,) = plans.planned(build, (x, y), False)
            assert seen[-1] == (2 * i + 1, y.shape, 3, out.data_ptr()) and len(kernel.seen) == 2 * i + 2
        with pytest.raises(AssertionError):
            plans.planned(build, (x, x), True)


def test_layouts_options_and_cards_have_plans_of_their_own():
    kernel = _Recorder("x_ptr", "y_ptr", "out_ptr", "stride", "scale")
    home = torch.zeros(4 * 32 + 1)
    x, odd, wide = home[:64].view(4, 16), home[1:65].view(4, 16), home[:128].view(4, 32)[:, :16]
    with suite_launch.stubbed() as driver:
        before = plans._plan.cache_info().misses

        def plan(*pair, scale=0.5):
            plans.planned(_build_two, pair, kernel, scale)
            return plans._plan.cache_info().misses - before

        assert plan(x, x) == plan(x, x) == 1
        assert plan(x, odd) == 2 and plan(odd, x) == 3  # address
        assert plan(x, x.to(torch.float16)) == 4  # dtype
        assert plan(x, x, scale=1.0) == plan(x, x, scale=1) == 5  # equal numbers
        assert plan(x, x, scale=2.0) == 6
        # A copy is made in each call; its address is not that of the tensor that it was made from.
        assert plan(x, wide) == plan(x, wide) == 7
        copied, strided = kernel.seen[-1][1], kernel.seen[-1][3]
        assert copied.is_contiguous() and copied.data_ptr() != wide.data_ptr() and strided == 32
        driver.get_current_device = lambda: suite_launch.NO_CARD + 1
        assert plan(x, x) == 8


def test_plans_are_bounded_and_hold_no_tensor():
    assert plans._plan.cache_info().maxsize == 4096
    kernel = _Recorder("x_ptr", "y_ptr", "out_ptr", "stride", "scale")
    x = torch.zeros(4, 16)
    there = weakref.ref(x)
    with suite_launch.stubbed():
        plans.planned(_build_two, (x, x), kernel, 0.25)
    kernel.seen.clear()
    del x
    assert there() is None


def _stepped(lists, **how):
    numbers = {"step": 3, "lr": 0.5, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.25}
    kernels.adamw_(*lists, **{**numbers, **how})


def _five(seed=0):
    """Four lists of five tensors: more runs than are launched one by one."""
    return [[normal(48, dtype=torch.float32, seed=seed + i) for i in range(5)] for _ in range(4)]


LIST_OPS = {
    "adamw_": (adamw_triton, _stepped),
    "l2_norm": (norms, lambda lists: kernels.l2_norm(lists[0])),
    "l2_norm_squared": (norms, lambda lists: kernels.l2_norm_squared(lists[0])),
}


@pytest.mark.parametrize("name", LIST_OPS)
def test_lists_met_before_make_no_table_and_those_that_lie_elsewhere_do(name):
    module, op = LIST_OPS[name]
    lists, others = _five(), _five()
    with (
        suite_launch.stubbed() as driver,
        mock.patch.object(module, "device_table", wraps=tables.device_table) as made,
    ):
        op(lists), op(lists), op([list(some) for some in lists])
        assert made.call_count == 1
        assert driver.launches == (3 if name == "adamw_" else 6)
        op([others[0], *lists[1:]])
        assert made.call_count == 2
        narrow = [[x[:32] for x in some] for some in lists]  # the same addresses
        op(narrow), op(narrow)
        assert made.call_count == 3
        driver.get_current_stream = lambda device: 7  # its copy may not have come to this one
        op(lists)
        assert made.call_count == 4


def test_numbers_of_a_step_and_scalars_on_the_device_are_those_of_each_call():
    seen, lists, scale = [], _five(), torch.tensor(0.5)
    with (
        suite_launch.stubbed(),
        mock.patch.object(suite_launch._Unlaunched, "_nothing", lambda self, *arguments: seen.append(arguments)),
    ):
        for how in ({}, {"lr": 0.25}, {"grad_scale": scale}, {"grad_scale": scale.clone(), "lr": 0.25}):
            _stepped(lists, **how)
            _stepped(lists, **how)
    floats = [[x for x in arguments if isinstance(x, float)] for arguments in seen]
    assert all(1.0 - 0.5 * 0.25 in found for found in (*floats[:2], *floats[4:6]))
    assert all(1.0 - 0.25 * 0.25 in found for found in (*floats[2:4], *floats[6:]))
    tensors = [[x for x in arguments if isinstance(x, torch.Tensor)] for arguments in seen]
    assert [len(found) for found in tensors] == [1] * 4 + [2] * 4
    assert tensors[4][1] is tensors[5][1] is scale and tensors[6][1] is not scale


def test_lists_that_do_not_fit_are_refused_before_any_launch():
    lists = _five()
    with suite_launch.stubbed() as driver:
        for bad in (lists[3][:4], [*lists[3][:4], lists[3][4][:3]], [x.half() for x in lists[3]]):
            for _ in range(2):
                with pytest.raises((ValueError, TypeError), match="adamw_: .*exp_avg_sqs"):
                    _stepped([*lists[:3], bad])
        with pytest.raises(ValueError, match="expected cpu"):
            kernels.l2_norm([lists[0][0], torch.ones(2, device="meta")])
        assert driver.launches == 0


def test_ops_on_lists_compile_without_a_graph_break():
    lists = [[x.abs() for x in some[:2]] for some in _five()]
    copies = [[x.clone() for x in some] for some in lists]
    torch.compile(_stepped, fullgraph=True, backend="aot_eager")(copies)
    _stepped(lists)
    assert all(torch.equal(a, b) for a, b in zip(copies[0], lists[0], strict=True))
    norm = torch.compile(lambda lists: kernels.l2_norm(lists[0]), fullgraph=True, backend="aot_eager")
    assert torch.equal(norm(lists), kernels.l2_norm(lists[0]))


def test_what_is_kept_of_lists_holds_none_of_their_tensors_and_is_bounded():
    assert tables._remembered.cache_info().maxsize == 16
    lists = _five()
    there = [weakref.ref(x) for some in lists for x in some]
    with suite_launch.stubbed():
        _stepped(lists), kernels.l2_norm(lists[0])
    del lists
    assert not any(x() is not None for x in there)


def test_a_captured_graph_gets_tables_of_its_own(monkeypatch):
    class OnCard(torch.Tensor):
        def get_device(self):
            return suite_launch.NO_CARD

    now, built, lists = [False], [], [[torch.ones(2).as_subclass(OnCard)]]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[0])

    def build(device, lists):
        built.append(now[0])

    with suite_launch.stubbed():
        for now[0] in (False, True, True, False):
            tables.remembered(build, lists, ())
    assert built == [False, True, True]


def _keys(arguments):
    """How triton itself tells such arguments apart."""
    from triton.compiler import make_backend
    from triton.runtime.jit import native_specialize_impl

    backend = make_backend(suite_launch._NoDriver().get_current_target())
    return [native_specialize_impl(backend, x, False, True, True) for x in arguments]


def test_arguments_that_triton_tells_apart_have_different_signatures():
    home = torch.zeros(65, dtype=torch.bfloat16)
    values = [
        home[:64], home[1:], home.float(), home.half(), home.int(), home.long(), home.double(),
        0, 1, 2, 15, 16, 17, 32, 2**31 - 1, 2**31, 2**31 + 16, 2**63, -1, -16, 0.0, 1.0, 16.0, -(2.0**40),
    ]  # fmt: skip
    for one in values:
        for other in values:
            same = signature_of((one,)) == signature_of((other,))
            assert not same or _keys([one]) == _keys([other]), (one, other)
    for one in values:
        assert type(one) is not int or _keys([one]) == _keys([launch.representative(one)]), one


def test_a_kernel_is_compiled_for_what_its_arguments_are():
    """The stand-ins give triton the specialisation that the arguments themselves give."""
    home = torch.zeros(65, dtype=torch.bfloat16)
    for x in (home[:64], home[1:], home.float()):
        (stand_in,) = (launch._Pointer(*part) for part in signature_of((x,)))
        assert _keys([stand_in]) == _keys([x])


def test_a_launch_found_again_gets_its_own_arguments_and_constants():
    seen = []

    class Compiled:
        def __getitem__(self, grid):
            return lambda *arguments: seen.append((grid, arguments))

    class Kernel(triton.JITFunction):
        def __init__(self):
            self.arg_names = ["x_ptr", "n", "scale", "BLOCK", "WIDE"]
            self.compiled = 0

        def __hash__(self):
            return 1

        def __eq__(self, other):
            return self is other

        def warmup(self, *arguments, grid, **keywords):
            self.compiled += 1
            return Compiled()

    kernel, x = Kernel(), torch.zeros(4)
    with suite_launch.stubbed():
        for constants in ({"BLOCK": 4, "WIDE": True}, {"WIDE": True, "BLOCK": 4}, {"WIDE": False, "BLOCK": 4}):
            for scale in (0.5, 1.5):
                Launch(kernel, (7,), (x, 3, scale), constants).run()
        Launch(kernel, (1, 2, 3), (x, 3, 1.0), {"BLOCK": 4, "WIDE": True}, num_warps=8).run()
    assert kernel.compiled == 4  # a constant, their order, and the warps; no float
    assert [arguments[3:] for _, arguments in seen] == [(4, True)] * 4 + [(4, False)] * 2 + [(4, True)]
    assert [arguments[2] for _, arguments in seen] == [0.5, 1.5] * 3 + [1.0]
    assert seen[0][0] == (7, 1, 1) and seen[-1][0] == (1, 2, 3)


def test_no_gradient_asked_for_makes_no_node_and_one_asked_for_does():
    x = normal(3, 8).float()
    w = normal(8, seed=1).float()
    from plait.kernels import rms_norm

    assert rms_norm(x, w).grad_fn is None
    leaf = torch.nn.Parameter(w)
    assert rms_norm(x, leaf).grad_fn is not None
    with torch.no_grad():
        assert rms_norm(x, leaf).grad_fn is None


def test_traced_calls_stay_one_op_where_no_gradient_is_asked_for():
    from torch.fx.experimental.proxy_tensor import make_fx

    from plait.kernels import rms_norm

    traced = make_fx(lambda x: rms_norm(x, None))(torch.ones(2, 8))
    assert "plait.rms_norm" in traced.code.replace("torch.ops.", "")


@pytest.fixture
def called():
    """(a call of an op as `register` gives it, ways taken so far): by its dispatcher, gradient or kernel."""
    ways = []

    def way(name):
        return lambda *arguments, **keywords: ways.append(name)

    return registration._direct(way("op"), way("kernel"), way("gradient"), 2), ways


def test_a_plain_call_goes_to_the_kernel_and_one_with_a_gradient_to_its_function(called):
    call, ways = called
    x, leaf = torch.ones(2), torch.ones(2, requires_grad=True)
    call(x, None, 0.5), call(x, leaf, 0.5), call(torch.nn.Parameter(x), x)
    with torch.no_grad():
        call(leaf, leaf)
    assert ways == ["kernel", "gradient", "gradient", "kernel"]
    call = registration._direct(
        lambda *_: ways.append("op"), None, None, 1
    )  # its op says what a missing gradient means
    call(leaf)
    assert ways[4:] == ["op"]


class _Marked(torch.Tensor):
    """A subclass, which may dispatch by itself."""


def _profiled():
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


@pytest.mark.parametrize(
    "watching",
    [
        lambda: torch.autocast("cpu"),
        _profiled,
        lambda: FlopCounterMode(display=False),
        lambda: torch.device("cpu"),
        lambda: FakeTensorMode(allow_non_fake_inputs=True),
        torch.autograd.forward_ad.dual_level,
        lambda: mock.patch.object(torch.compiler, "is_compiling", lambda: True),
    ],
)
def test_a_call_that_somebody_watches_goes_by_the_dispatcher(called, watching):
    call, ways = called
    x = torch.ones(2)
    with watching():
        call(x, x)
    call(x, x)
    assert ways == ["op", "kernel"]


def test_a_call_of_what_may_dispatch_by_itself_goes_by_the_dispatcher(called):
    call, ways = called
    x = torch.ones(2)
    torch.func.vmap(lambda x: call(x, x) or x)(torch.ones(2, 2))
    call(x.as_subclass(_Marked), x), call(x, [x]), call(x.to("meta"), None), call(x, other=x)
    assert ways == ["op"] * 5


def test_a_view_of_the_negative_of_its_memory_is_not_read_as_its_memory():
    """The imaginary part of a conjugate is a plain tensor whose memory holds the negative of its values."""
    x = torch.complex(normal(4, 16).float(), normal(4, 16, seed=1).float()).conj().imag
    lists, read = [[torch.ones(4, 16)] for _ in range(4)], []

    def launched(self, *arguments):
        read.extend([a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments])

    with suite_launch.stubbed(), mock.patch.object(suite_launch._Unlaunched, "_nothing", launched):
        for weight in (torch.ones(16), torch.nn.Parameter(torch.ones(16))):
            kernels.rms_norm(x, weight)
        kernels.l2_norm([x])
        _stepped([lists[0], [x], *lists[2:]])
        assert x.is_neg() and len(read) > 40 and x.data_ptr() not in read
        kernels.rms_norm(x.resolve_neg().view_as(x), torch.ones(16))
        kernels.rms_norm(x._neg_view(), torch.ones(16))  # the memory itself
    assert x.data_ptr() in read


def test_the_profiler_and_dispatch_modes_see_the_op():
    from plait.kernels import swiglu

    with _profiled() as profile:
        swiglu(torch.ones(2, 8))
    assert "plait::swiglu" in {event.name for event in profile.events()}


def test_hooks_of_a_profiler_see_each_launch():
    ran, seen = [], []

    class Kernel(suite_launch._Unlaunched):
        def _nothing(self, *arguments):
            ran.append(arguments)

    with suite_launch.stubbed():
        run = launch._runner(Kernel(), (3,), 0)
        run("x")
        triton.knobs.runtime.launch_enter_hook.add(seen.append)
        try:
            run("x")
        finally:
            triton.knobs.runtime.launch_enter_hook.remove(seen.append)
        run("x")
    quick, slow, again = ran
    assert quick == again and quick[:3] == slow[:3] == (3, 1, 1) and quick[-1] == slow[-1] == "x"
    assert quick[6:9] == (None,) * 3 and slow[7] is triton.knobs.runtime.launch_enter_hook


def test_dual_tensors_are_refused_and_not_passed_through_without_a_tangent():
    from torch.autograd import forward_ad

    from plait.kernels import swiglu

    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(2, 8), torch.ones(2, 8))
        with pytest.raises(RuntimeError, match="jvp"):
            swiglu(x)


def test_the_suite_has_every_op_and_counts_what_it_launches():
    suite = load("launch")
    assert {case.name for case in suite.cases(False)} <= {case.name for case in suite.cases(True)}
    for name in ("swiglu fwd", "swiglu fwd+bwd", "adamw_, no gradient fwd"):
        (case,) = [case for case in suite.cases(True) if case.name == name]
        result = suite.measure(case, Options(rounds=2, warmup=0))
        ours = result.providers["plait"]
        assert ours.figures["launches"] == (2 if "bwd" in name else 1)
        alone = {"autograd"} if "bwd" in name else set()
        assert set(result.providers) == {"plait", "empty op", "bare launch", "floor"} | alone
        assert all(len(m.samples_s) == 2 and min(m.samples_s) > 0 for m in result.providers.values())
        assert "stubbed" in result.note


def test_the_stub_leaves_nothing_behind():
    def now():
        return triton.runtime.driver._active, triton.compiler.compile, launch.INTERPRETED, torch.get_num_threads()

    before = now()
    with suite_launch.stubbed():
        assert launch.use_triton(torch.ones(1)) and torch.get_num_threads() == 1
    assert now() == before
    assert not launch.use_triton(torch.ones(1))
