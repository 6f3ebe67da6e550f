"""Forward, backward and both as cases of the `kernels` suite, and the shapes that every op is measured at.

The backward alone is the one with a trap: its forward must be over before the clock starts, and be made again where
inputs are new. Shapes are tiny; nothing here asserts a time.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from plait.bench import suite_kernels
from plait.bench.cli import budget_of
from plait.bench.kernel_problems import PROBLEMS
from plait.bench.kernel_shapes import BACKWARD, BOTH, CUDA_SHAPES, FORWARD, cases, make_case, parts_of
from plait.bench.problem import EPS, Problem
from plait.bench.spec import Case, WrongResultError
from plait.kernels import rms_norm_ref
from tests.cases import needs_plain
from tests.test_bench_suites import QUICK, TINY

pytestmark = needs_plain


def alone(op: str) -> Case:
    return make_case(op, TINY[op], "float32", "cpu", True, alone=True)


def adding(monkeypatch: pytest.MonkeyPatch, op: str, name: str, peer: Callable[..., Any]) -> None:
    """Gives the op's problem a provider."""
    build = PROBLEMS[op]

    def problem(p: dict[str, Any], make: Any) -> Problem:
        made = build(p, make)
        return dataclasses.replace(made, ops={**made.ops, name: peer})

    monkeypatch.setitem(PROBLEMS, op, problem)


@pytest.mark.parametrize("op", [op for op in TINY if BACKWARD in parts_of(op, TINY[op])])
def test_a_backward_alone_agrees_and_goes_no_way_forward(op, monkeypatch):
    """Its results are the gradients; the forward is over when the clock starts, in every round."""
    counts, build = Counter[str](), PROBLEMS[op]

    def counted(name: str, op: Any) -> Any:
        if not callable(op):
            return op
        return lambda *inputs: (counts.update([name]), op(*inputs))[1]

    def problem(p: dict[str, Any], make: Any) -> Problem:
        made = build(p, make)
        return dataclasses.replace(made, ops={name: counted(name, one) for name, one in made.ops.items()})

    monkeypatch.setitem(PROBLEMS, op, problem)
    case = alone(op)
    result = suite_kernels.measure(case, dataclasses.replace(QUICK, rounds=7))
    ran = [name for name, measured in result.providers.items() if not measured.skipped]
    assert ran[:2] == ["plait", "torch"] and all(len(result.providers[name].samples_s) == 7 for name in ran)
    # Forward at the rehearsal and before the check; torch's once more, for the shapes of its outputs.
    assert counts == {"plait": 2, "torch": 3}
    assert case.name.startswith(f"{op} bwd ")


def test_a_gradient_kept_from_other_inputs_is_found(monkeypatch):
    kept: list[Any] = []

    class Replays(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return rms_norm_ref(x, w, EPS)

        @staticmethod
        def backward(ctx: Any, dout: torch.Tensor) -> Any:
            with torch.enable_grad():
                x, w = (value.detach().requires_grad_() for value in ctx.saved_tensors)
                kept[1:] = [torch.autograd.grad(rms_norm_ref(x, w, EPS), (x, w), dout)]
            return tuple(value.clone() for value in kept[0])

    adding(monkeypatch, "rms_norm", "broken", lambda x, w: Replays.apply(x, w))
    with pytest.raises(WrongResultError, match="broken: result 0 is off"):
        suite_kernels.measure(alone("rms_norm"), QUICK)


def test_compiled_torch_goes_backward_alone_too():
    compiled = suite_kernels.measure(alone("swiglu"), dataclasses.replace(QUICK, full=True)).providers["compile"]
    assert not compiled.skipped and len(compiled.samples_s) == QUICK.rounds


def test_a_provider_that_makes_its_gradients_in_the_forward_has_no_backward_alone(monkeypatch):
    adding(monkeypatch, "cross_entropy", "liger", lambda logits: logits.sum())
    result = suite_kernels.measure(alone("cross_entropy"), QUICK)
    assert result.providers["liger"].skipped == "its forward makes the gradients: a backward alone has nothing to do"
    with pytest.raises(ValueError, match="'linear_cross_entropy' has no backward of its own"):
        alone("linear_cross_entropy")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_work_of_the_sides_adds_up_to_the_whole_in_every_case(device):
    by_rest: dict[str, dict[str, Case]] = {}
    for case in cases(True, device):
        for part in (BACKWARD, BOTH, FORWARD):
            if f"{part} " in case.name:
                by_rest.setdefault(case.name.replace(part, "", 1), {})[part] = case
                break
    threes = [parts for parts in by_rest.values() if len(parts) == 3]
    assert len(threes) > 20 and {len(parts) for parts in by_rest.values()} == {1, 2, 3}
    for parts in threes:
        one, two, both = (parts[part] for part in (FORWARD, BACKWARD, BOTH))
        assert one.bytes_moved + two.bytes_moved == both.bytes_moved > two.bytes_moved > 0
        assert (one.flop or 0) + (two.flop or 0) == (both.flop or 0)


# ---- shapes ------------------------------------------------------------------------------------------------------

# The published sizes: model dim, ffn dim, heads, key heads, vocabulary, weights of a layer without its norms.
MODELS = {
    "Llama-3 8B": (4096, 14336, 32, 8, 128_256, 218_103_808),
    "Llama-3 70B": (8192, 28672, 64, 8, 128_256, 855_638_016),
    "Llama-3 405B": (16384, 53248, 128, 8, 128_256, 3_187_671_040),
    "GPT-3": (12288, 49152, 96, 96, 50_257, 1_811_939_328),
}


def belongs(op: str, shape: dict[str, Any], model: tuple[int, ...]) -> bool:
    """Whether the shape is one of the model's own."""
    dim, ffn, heads, kv_heads, vocab, weights = model
    match op:
        case "swiglu" | "geglu":
            return shape["cols"] == ffn
        case "attention" | "rope":
            return (shape["heads"], shape["kv_heads"], shape["dim"]) == (heads, kv_heads, 128)
        case "linear" | "linear_swiglu" | "linear_dgrad" | "linear_wgrad":
            return (shape["cols"], shape["width"]) == (dim, ffn)
        case "cross_entropy":
            return shape["vocab"] == vocab
        case "linear_cross_entropy" | "embedding":
            return (shape["cols"], shape["vocab"]) == (dim, vocab)
        case "adamw_" | "l2_norm":  # a layer's shard over 8 ranks
            return shape["tensors"] * shape["elements"] == weights // 8
    return shape["cols"] == dim


@pytest.mark.parametrize("op", CUDA_SHAPES)
def test_every_op_has_the_shapes_of_each_model_and_an_odd_one(op):
    shapes = CUDA_SHAPES[op]
    for name, model in MODELS.items():
        assert any(belongs(op, shape, model) for shape in shapes), f"{op}: no shape of {name}"
    sizes = ("rows", "cols", "tokens", "elements", "vocab")
    assert any(shape.get(size, 0) % 2 for shape in shapes for size in sizes), f"{op}: no odd shape"


def test_the_default_run_on_a_card_has_time_for_its_compilers_and_ends_within_ten_minutes():
    """120 s for 20 cases with compiled peers ended as "not measured: the budget is spent", exit code 1."""
    small = cases(False, "cuda")
    assert {case.params["op"] for case in small} == set(CUDA_SHAPES)
    assert suite_kernels.SMALL_S["cuda"] >= 20.0 * len(small) and suite_kernels.SMALL_S["cuda"] <= 480.0
    assert budget_of(suite_kernels.SUITE, full=False) == suite_kernels.SMALL_S[suite_kernels.here()]
