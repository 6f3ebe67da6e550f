"""What a launch costs, counted: look-ups, compilations and calls; and the suite that times it. Asserts no time."""

import sys

import pytest
import torch
import triton

from plait.bench import suite_launch
from plait.bench.cli import load
from plait.bench.spec import Options
from plait.kernels import launch, plans
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


# Python functions entered by one call, a tenth above what was counted (2026-11-30). A bare launch enters 18.
MOST_CALLS = {
    "linear gelu": 60,
    "linear residual": 60,
    "linear_swiglu": 62,
    "linear_wgrad main, no gradient": 58,
    "swiglu": 40,
    "attention": 106,
    "rms_norm": 59,
}


@pytest.mark.parametrize("name", MOST_CALLS)
def test_a_call_enters_few_python_functions(name):
    with suite_launch.stubbed(), torch.no_grad():
        op, inputs = suite_launch.ops("cpu")[name]
        for _ in range(3):
            op(*inputs)
        assert counted_calls(lambda: op(*inputs)) <= MOST_CALLS[name]


def test_the_second_call_of_a_shape_compiles_and_looks_up_nothing_new():
    with suite_launch.stubbed(), torch.no_grad():
        op, inputs = suite_launch.ops("cpu")["linear gelu"]
        op(*inputs)
        caches = (plans._plan,)
        before = [cache.cache_info() for cache in caches]
        op(*inputs)
        after = [cache.cache_info() for cache in caches]
    assert [info.misses for info in after] == [info.misses for info in before]
    assert all(now.hits > then.hits for now, then in zip(after, before, strict=True))


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
        assert set(result.providers) == {"plait", "empty op", "bare launch", "floor"}
        assert all(len(m.samples_s) == 2 and min(m.samples_s) > 0 for m in result.providers.values())
        assert "stubbed" in result.note


def test_the_stub_leaves_nothing_behind():
    before = triton.runtime.driver._active, triton.compiler.compile, launch.INTERPRETED
    with suite_launch.stubbed():
        assert launch.use_triton(torch.ones(1))
    assert (triton.runtime.driver._active, triton.compiler.compile, launch.INTERPRETED) == before
    assert not launch.use_triton(torch.ones(1))
