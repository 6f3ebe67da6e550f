"""The problems of the `kernels` suite: every op of the list agrees with its oracle, and what it declares is right.

Each problem is built and computed once on tiny shapes by every provider that runs on a CPU, forward and gradients;
the FLOP that it declares are held against torch's own count of its eager peer. Bytes: tests/test_bytes.py.
"""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from plait.bench import kernel_shapes, suite_kernels
from plait.bench.kernel_jobs import problem_job
from plait.bench.kernel_problems import PROBLEMS
from plait.bench.kernel_work import PRODUCTS, WITHOUT_GRADIENT, pairs, work
from plait.bench.spec import Case, Options
from plait.bench.timer import rounds_within
from tests.cases import needs_plain

pytestmark = needs_plain
QUICK = Options(rounds=2, warmup=1)
HEADS = {"batch": 1, "heads": 4, "kv_heads": 2, "dim": 16, "tokens": 24}
SQUARE = {"rows": 6, "cols": 8, "width": 12}
# What tests/test_bench_suites.py does not have: the forms of an op that a param chooses.
FORMS = [
    *(("attention", {**HEADS, "kind": kind}) for kind in kernel_shapes.KINDS),
    *(("linear", {**SQUARE, "epilogue": epilogue}) for epilogue in kernel_shapes.EPILOGUES),
]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("op, shape", FORMS, ids=lambda value: value if isinstance(value, str) else str(value)[-24:])
def test_every_form_of_an_op_agrees_with_the_oracle(op, shape, backward):
    result = suite_kernels.measure(kernel_shapes.make_case(op, shape, "float32", "cpu", backward), QUICK)
    ran = [name for name, measured in result.providers.items() if not measured.skipped]
    assert ran[0] == "plait" and "torch" in ran
    assert all(result.providers[name].figures["error"] <= suite_kernels.TOLERANCE["float32"] for name in ran)


def test_an_epilogue_that_does_not_exist_is_refused():
    case = kernel_shapes.make_case("linear", {**SQUARE, "epilogue": "tanh"}, "float32", "cpu", False)
    with pytest.raises(ValueError, match="'tanh' is unknown; valid: bias, gelu, residual, dropout"):
        problem_job(case.params, 0, False)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_problem_has_shapes_and_a_formula_and_names_differ(device):
    cases = kernel_shapes.cases(True, device)
    default = kernel_shapes.cases(False, device)
    assert {case.params["op"] for case in cases} == {case.params["op"] for case in default} == {*PROBLEMS, "adamw_"}
    assert len({case.name for case in cases}) == len(cases) and {c.name for c in default} <= {c.name for c in cases}
    for case in cases:
        assert case.bytes_moved > 0 and (case.flop is None or case.flop > 0)
    json.dumps([case.params for case in cases])


def test_an_op_without_a_formula_says_so():
    with pytest.raises(ValueError, match="op: 'softmax' has no formula"):
        work({"op": "softmax", "dtype": "float32", "backward": False})


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("op", PRODUCTS)
def test_declared_flop_are_those_that_torch_counts_of_its_own_op(op, backward):
    shape = {"rows": 6, "cols": 8, "vocab": 16} if op == "linear_cross_entropy" else SQUARE
    case = kernel_shapes.make_case(op, shape, "float32", "cpu", backward)
    assert case.params["backward"] == (backward and op not in WITHOUT_GRADIENT)
    contender = problem_job(case.params, 0, False).contenders["torch"]
    contender.prepare()
    with FlopCounterMode(display=False) as counter:
        contender.call()
    assert counter.get_total_flops() == case.flop


@pytest.mark.parametrize("kind", ["causal", *kernel_shapes.KINDS])
def test_declared_pairs_of_attention_are_the_keys_that_each_query_sees(kind):
    tokens = 24
    params = {"tokens": tokens, "kind": kind}
    row, col = torch.arange(tokens)[:, None], torch.arange(tokens)
    seen = {
        "causal": col <= row,
        "full": col >= 0,
        "decode": (row == tokens - 1) & (col >= 0),
        "window": (col <= row) & (row - col < tokens // 8),
        "packed": (col <= row)
        & (
            torch.bucketize(row, torch.tensor([3, 9]), right=True)
            == torch.bucketize(col, torch.tensor([3, 9]), right=True)
        ),
    }[kind]
    assert pairs(params) == seen.expand(tokens, tokens).sum()


# ---- the budget ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "budget_s, spent_s, turn_s, rounds",
    [
        (0.0, 100.0, 1.0, 20),  # no budget
        (100.0, 0.0, 1.0, 20),  # plenty
        (10.0, 0.0, 1.0, 7),  # ten turns, three of them warm up
        (10.0, 9.0, 1.0, 5),  # too little for an interval of the median: the least
        (10.0, 20.0, 1.0, 5),
    ],
)
def test_rounds_shrink_to_what_is_left_of_the_budget(budget_s, spent_s, turn_s, rounds):
    options = rounds_within(budget_s, spent_s, turn_s, Options(rounds=20, warmup=3))
    assert options.rounds == rounds


def test_fewer_rounds_than_the_least_stay():
    assert rounds_within(1.0, 2.0, 1.0, Options(rounds=2)).rounds == 2


def test_cases_past_the_budget_are_not_measured_and_say_so(monkeypatch, capsys):
    from plait.bench import runner
    from plait.bench.spec import CaseResult, Measured, Suite

    now = iter([0.0, 0.0, 11.0])  # begin, first case, second case
    monkeypatch.setattr(runner.time, "monotonic", lambda: next(now))
    seen = []

    def measure(case: Case, options: Options) -> CaseResult:
        seen.append(options.budget_s)
        return CaseResult(case, "plait", {"plait": Measured([1.0])})

    suite = Suite("s", "about", lambda full: [Case("a", {}), Case("b", {})], measure)
    results, code = runner.run_here(suite, Options(budget_s=10.0), "")
    assert seen == [5.0] and code == 1  # half of it for the first of two
    assert results[1].error == "not measured: the budget of 10 s is spent"
    assert capsys.readouterr().err.splitlines() == [
        "[0/2] s: a",
        "  a: plait 1000000.0 us",
        "[1/2] s: b",
        "plait bench: b: not measured: the budget of 10 s is spent",
    ]
