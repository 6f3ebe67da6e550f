"""The suites beside the harness: work by formula, what is caught before a number is printed, what is left behind.

Shapes are tiny: nothing here asserts a time.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.bench import (
    cli,
    kernel_problems,
    kernel_shapes,
    pipeline_model,
    pipeline_stages,
    pipeline_table,
    snapshot_peers,
    suite_kernels,
    suite_pipeline,
    suite_snapshots,
    suite_train,
)
from plait.bench.kernel_work import work
from plait.bench.problem import EPS, Maker, Peer, Problem
from plait.bench.spec import Case, CaseResult, Options, WrongResultError
from plait.model_config import parameter_shapes
from plait.parallel.schedules import NAMES
from tests import launchers

QUICK = Options(rounds=2, warmup=1)
HEADS = {"batch": 1, "heads": 4, "kv_heads": 2, "dim": 16, "tokens": 8}
# op -> the smallest shape that has more than one row, head, chunk or tensor of everything
ROWS, SQUARE = {"rows": 3, "cols": 16}, {"rows": 3, "cols": 8, "width": 5}
TINY: dict[str, dict[str, int]] = {
    "rms_norm": ROWS,
    "rms_norm_residual": ROWS,
    "layer_norm": ROWS,
    "layer_norm_residual": ROWS,
    "swiglu": ROWS,
    "geglu": ROWS,
    "attention": HEADS,
    "linear": SQUARE,
    "linear_swiglu": SQUARE,
    "linear_dgrad": SQUARE,
    "linear_wgrad": SQUARE,
    "rope": HEADS,
    "cross_entropy": {"rows": 3, "vocab": 11},
    "linear_cross_entropy": {"rows": 3, "cols": 8, "vocab": 11},
    "embedding": {"rows": 5, "cols": 8, "vocab": 7},
    "dropout": {"rows": 3, "cols": 16},
    "l2_norm": {"tensors": 3, "elements": 9},
    "adamw_": {"tensors": 2, "elements": 9},
}


def tiny(op: str, backward: bool = True) -> Case:
    return kernel_shapes.make_case(op, TINY[op], "float32", "cpu", backward)


@pytest.mark.parametrize("name", cli.SUITES)
def test_default_cases_are_few_and_part_of_the_full_list(name):
    suite = cli.load(name)
    default, full = [[case.name for case in suite.cases(every)] for every in (False, True)]
    assert suite.name == name and 1 <= len(default) <= 20 and set(default) <= set(full)
    assert len(set(full)) == len(full)
    json.dumps([dataclasses.asdict(case) for case in suite.cases(True)])


# ---- kernels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("op", TINY)
def test_every_op_agrees_with_the_oracle_and_so_do_its_peers(op, backward):
    result = suite_kernels.measure(tiny(op, backward), QUICK)
    ran = {name: m for name, m in result.providers.items() if not m.skipped}
    assert next(iter(result.providers)) == result.ours == "plait" and len(ran) >= 2
    for measured in ran.values():
        assert len(measured.samples_s) == QUICK.rounds and min(measured.samples_s) > 0
        assert 0 <= measured.figures["error"] <= suite_kernels.TOLERANCE["float32"] and "float64" in measured.check
    for measured in result.providers.values():
        assert measured.check or measured.skipped.lower().startswith(("liger", "flash_attn"))
    assert "host_wall" in result.note


def test_torch_compile_takes_part_in_the_full_run_and_its_compilation_is_reported_apart():
    result = suite_kernels.measure(tiny("swiglu"), dataclasses.replace(QUICK, full=True))
    compiled = result.providers["compile"]
    assert not compiled.skipped and compiled.figures["first call s"] > max(compiled.samples_s)


@pytest.mark.parametrize(
    "op, backward, flop, nbytes",
    [
        ("linear", False, 2 * 3 * 8 * 5, 4 * (3 * 8 + 8 * 5 + 3 * 5)),
        ("linear", True, 6 * 3 * 8 * 5, 4 * (3 * 3 * 8 + 3 * 8 * 5 + 2 * 3 * 5)),
        ("linear_swiglu", False, 4 * 3 * 8 * 5, 4 * (3 * 8 + 2 * 8 * 5 + 3 * 5)),
        ("linear_dgrad", False, 2 * 3 * 8 * 5, 4 * (3 * 8 + 8 * 5 + 3 * 5)),
        ("linear_wgrad", False, 2 * 3 * 8 * 5, 4 * (3 * 8 + 3 * 5) + 8 * 8 * 5),  # the sum is read and written
        ("attention", False, 4 * 4 * 16 * (8 * 9 // 2), 4 * 8 * 16 * (2 * 4 + 2 * 2)),  # 36 of 64 pairs are visible
        ("attention", True, 14 * 4 * 16 * (8 * 9 // 2), 4 * 8 * 16 * (5 * 4 + 6 * 2)),
        ("linear_cross_entropy", True, 6 * 3 * 8 * 11, 4 * (3 * 3 * 8 + 3 * 8 * 11)),  # logits need not exist
        ("rms_norm", False, None, 4 * (2 * 3 * 16 + 16)),
        ("swiglu", True, None, 4 * 8 * 3 * 16),
        ("rope", False, None, 4 * 2 * 8 * (4 + 2) * 16),
        ("embedding", True, None, 5 * (8 + 2 * 4 * 8) + 5 * (8 + 4 * 8) + 4 * 7 * 8),
        ("adamw_", True, None, 28 * 2 * 9),
    ],
)
def test_work_by_formula(op, backward, flop, nbytes):
    case = tiny(op, backward)
    assert (case.flop, case.bytes_moved) == (flop, nbytes)


def test_unknown_op_is_named():
    with pytest.raises(ValueError, match="op: 'conv' has no formula in bench/kernel_work.py"):
        work({"op": "conv", "dtype": "float32", "backward": False})


def with_peer(monkeypatch: pytest.MonkeyPatch, peer: Callable[..., Any] | Peer, name: str = "broken") -> None:
    """Adds a provider to rms_norm."""
    build = kernel_problems.rms_norm

    def broken(p: dict[str, Any], make: Maker) -> Problem:
        problem = build(p, make)
        return dataclasses.replace(problem, ops={**problem.ops, name: peer})

    monkeypatch.setitem(kernel_problems.PROBLEMS, "rms_norm", broken)


def eager(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, w.shape, w, EPS)


def test_a_wrong_result_is_refused_by_name(monkeypatch):
    with_peer(monkeypatch, lambda x, w: eager(x, w) * 1.001)
    with pytest.raises(WrongResultError, match="broken: result 0 is off"):
        suite_kernels.measure(tiny("rms_norm"), QUICK)


def test_a_wrong_gradient_is_refused_by_its_place(monkeypatch):
    with_peer(monkeypatch, lambda x, w: eager(x, w) + (w - w.detach()))
    with pytest.raises(WrongResultError, match="broken: result 2 is off"):
        suite_kernels.measure(tiny("rms_norm"), QUICK)


def test_a_provider_that_remembers_its_result_is_refused(monkeypatch):
    kept: list[torch.Tensor] = []

    def replay(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept.append(eager(x, w))
        return kept[0]

    with_peer(monkeypatch, replay)
    with pytest.raises(WrongResultError, match="broken: result 0 is off by nan"):
        suite_kernels.measure(tiny("rms_norm", backward=False), QUICK)


def test_a_provider_that_goes_wrong_while_it_is_timed_is_refused(monkeypatch):
    calls: list[int] = []

    def tires(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return eager(x, w) if len(calls) < 4 else torch.zeros_like(x)

    with_peer(monkeypatch, tires)
    with pytest.raises(WrongResultError, match="broken: result 0"):
        suite_kernels.measure(tiny("rms_norm", backward=False), QUICK)


def test_a_peer_that_overwrites_its_inputs_harms_nobody(monkeypatch):
    def overwrites(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x.copy_(eager(x, w))

    with_peer(monkeypatch, Peer(overwrites), "aaa first in place")
    result = suite_kernels.measure(tiny("rms_norm", backward=False), QUICK)
    assert result.providers["aaa first in place"].figures["error"] < 1e-6


def test_a_peer_that_cannot_run_is_skipped_with_its_reason_but_ours_is_not(monkeypatch):
    def fails(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel for this card\nlong text")

    with_peer(monkeypatch, fails)
    result = suite_kernels.measure(tiny("rms_norm"), QUICK)
    assert result.providers["broken"].skipped == "cannot run: no kernel for this card"
    with_peer(monkeypatch, fails, "plait")
    with pytest.raises(RuntimeError, match="no kernel"):
        suite_kernels.measure(tiny("rms_norm"), QUICK)


# ---- snapshots ----------------------------------------------------------------------------------------------------


def small(quantity: str, folder: Path, mib: int = 1) -> Case:
    return Case(f"small {quantity}", {"mib": mib, "tensors": 5, "quantity": quantity, "folder": str(folder)})


def test_state_has_the_asked_size_and_no_round_shapes():
    state = suite_snapshots.make_state(1 << 20, 5, seed=0)
    assert snapshot_peers.size_of(state) == 1 << 20 and len({value.numel() for value in state.values()}) >= 3
    assert all(value.std() > 0.9 for value in state.values())
    with pytest.raises(ValueError, match="too few for 5 tensors"):
        suite_snapshots.make_state(4000, 5, seed=0)


@pytest.mark.parametrize("quantity", ["stall", "durable", "restore cold", "restore warm"])
def test_each_way_to_save_gives_the_bits_back_and_leaves_nothing(quantity, tmp_path, monkeypatch):
    left: list[list[Path]] = []
    turn = suite_snapshots.Bench.turn

    def watched(bench: suite_snapshots.Bench, name: str, **how: bool) -> None:
        turn(bench, name, **how)
        large = [p.relative_to(bench.root) for p in bench.root.rglob("*") if p.stat().st_size >= 1 << 19]
        ours = [p for p in large if p.parts[0] == "plait"]
        assert len(ours) <= 2, "its newest, and what the next save writes over"
        left.append([p for p in large if p not in ours])

    monkeypatch.setattr(suite_snapshots.Bench, "turn", watched)
    result = suite_snapshots.measure(small(quantity, tmp_path), QUICK)
    expected = {"plait", "torch.save", "safetensors", "dcp", "limit"}
    if "restore" not in quantity:
        expected |= {"dcp async", "dcp async cached"}
    assert set(result.providers) == expected
    for measured in result.providers.values():
        assert len(measured.samples_s) == QUICK.rounds and min(measured.samples_s) > 0
        assert ("stall_s" in measured.figures) == (quantity != "stall") and measured.figures["x limit"] > 0
    assert left and not any(left), "a save outlived its turn"
    assert list(tmp_path.iterdir()) == []


def test_a_load_that_changes_one_bit_is_refused(tmp_path, monkeypatch):
    load = snapshot_peers.TorchSave.load

    def flips(self: snapshot_peers.TorchSave, path: Path, state: snapshot_peers.State) -> None:
        load(self, path, state)
        state["layer.3"].view(torch.int32)[-1] ^= 1

    monkeypatch.setattr(snapshot_peers.TorchSave, "load", flips)
    with pytest.raises(WrongResultError, match=r"torch.save: layer.3 differs"):
        suite_snapshots.measure(small("durable", tmp_path), QUICK)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="bytes free; this case needs"):
        suite_snapshots.measure(small("stall", tmp_path, mib=1 << 30), QUICK)


@pytest.mark.parametrize("asked, taken", [(3, 3), (9, 5)])
def test_a_case_ends_when_its_time_is_up_but_not_before_the_least_rounds(asked, taken, tmp_path, monkeypatch):
    monkeypatch.setattr(suite_snapshots, "BUDGET_S", 0.0)
    result = suite_snapshots.measure(small("stall", tmp_path), Options(rounds=asked))
    assert {len(measured.samples_s) for measured in result.providers.values()} == {taken}
    assert f"{taken} rounds" in result.note


def test_missing_safetensors_is_a_reason_not_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_peers.importlib.util, "find_spec", lambda name: None)
    result = suite_snapshots.measure(small("stall", tmp_path), QUICK)
    assert result.providers["safetensors"].skipped == "safetensors is not installed"


# ---- pipeline -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index, makespan_s", [(0, 1.320), (1, 1.320), (2, 1.140)])
def test_the_plan_of_the_default_cases(index, makespan_s):
    # (M + P - 1) (F + B) = 11 * 120 ms; interleaved with v = 2: (M + (P - 1) / 2) * 120 ms
    assert suite_pipeline.plan_s(suite_pipeline.cases(False)[index].params) == pytest.approx(makespan_s)


def test_the_full_run_has_every_schedule_asleep_on_four_and_eight_ranks_idle_and_of_a_model():
    cases = suite_pipeline.cases(True)
    assert len({case.name for case in cases}) == len(cases)
    for kind, ranks in (("sleep", 4), ("sleep", 8), ("idle", 4), ("model", 4)):
        found = {c.params["schedule"] for c in cases if (c.params["kind"], c.params["pp"]) == (kind, ranks)}
        assert found == set(NAMES), (kind, ranks)
    for case in cases:  # what torch's schedules accept
        assert case.params["microbatches"] >= 2 * case.params["pp"]
        assert case.params["microbatches"] % case.params["pp"] == 0


def test_a_full_run_fits_ten_minutes():
    """Two steps a round, warm-up, checks before and after; 3 s to start ranks and end them."""
    total_s = 0.0
    unplanned_s = {"idle": 0.03, "model": 0.4}  # as seen on two cores, rounded up
    for case in suite_pipeline.cases(True):
        step_s = suite_pipeline.plan_s(case.params) or unplanned_s[case.params["kind"]]
        options = suite_pipeline.limited(Options(), case.params)
        total_s += 3 + 2 * (options.rounds + options.warmup + 2) * step_s * 1.1
    assert total_s < 600


def test_a_budget_takes_fewer_rounds():
    params = {**suite_pipeline.cases(False)[0].params, "rounds": 12}
    assert suite_pipeline.limited(Options(rounds=50), params).rounds == 12
    assert suite_pipeline.limited(Options(rounds=5), params).rounds == 5
    assert suite_pipeline.limited(Options(budget_s=2.2 * 1.320 * 7.5), params).rounds == 7
    assert suite_pipeline.limited(Options(budget_s=0.1), params).rounds == 3


class FakeExecutor:
    """An unsplit chain of the suite's stages, with a gradient that can be spoiled."""

    def __init__(self, spoil: float) -> None:
        params = {"forward_s": 1e-6, "input_s": 1e-6, "weight_s": 1e-6, "width": 3}
        self.stages = [pipeline_stages.TorchStage(index, 3, params) for index in range(3)]
        self.x = torch.randn(2, 3, generator=torch.Generator().manual_seed(1), dtype=pipeline_stages.DTYPE)
        self.spoil = spoil

    def step(self) -> float:
        y = self.x
        for stage in self.stages:
            y = stage(y)
        loss = y.sum() / self.x.shape[0]
        loss.backward()
        for stage in self.stages:
            assert stage.weight.grad is None
            stage.take_work()()
        self.stages[1].weight.grad *= self.spoil
        return loss.item()


@pytest.mark.parametrize("spoil", [1.0, 1.0 + 1e-9, 0.5, float("nan")])
def test_a_wrong_gradient_of_any_stage_is_seen(spoil):
    executor = FakeExecutor(spoil)
    fine = pipeline_stages.error_of(executor, executor.x, 3) <= suite_pipeline.TOLERANCE
    assert fine == (spoil == 1.0)
    assert all(stage.own.busy_s > 0 and stage.own.cpu_s > 0 for stage in executor.stages)


class LateClock:
    """Time in which a look takes 1 us, and each sleep ends `late_s` after it should."""

    def __init__(self, late_s: float) -> None:
        self.now_s, self.late_s = 0.0, late_s

    def perf_counter(self) -> float:
        self.now_s += 1e-6
        return self.now_s

    thread_time = perf_counter

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds + self.late_s


@pytest.mark.parametrize(
    "asked_s, late_s, work_s, lasts_s",
    [
        (40e-3, 0.0, 0.0, 40e-3), (40e-3, 9e-5, 1e-3, 40e-3),  # whatever its sleeps and its arithmetic take
        (40e-3, 3e-3, 0.0, 41e-3),  # but 3 ms without a core are not hidden: 38 + 3
        (40e-3, 0.0, 5e-3, 43e-3), (1e-3, 9e-5, 2e-4, 1e-3), (1e-4, 1.0, 5e-5, 1e-4), (1e-4, 1.0, 5e-4, 5e-4),
        (0.0, 1.0, 5e-3, 0.0),  # no sleeping stage: not counted
    ],
)  # fmt: skip
def test_a_sleep_that_ends_late_does_not_lengthen_a_stage(asked_s, late_s, work_s, lasts_s, monkeypatch):
    clock = LateClock(late_s)
    monkeypatch.setattr(pipeline_stages, "time", clock)
    own = pipeline_stages.OwnTime()
    for count in (1, 2):
        with own.lasting(asked_s):
            clock.now_s += work_s
        assert own.busy_s == pytest.approx(count * lasts_s, abs=count * 1e-5)
    assert own.cpu_s == pytest.approx(2 * max(lasts_s, work_s), abs=2e-5)


def test_peers_names_of_fused_weights_are_ours():
    """Gradients of k and v, gate and up are put together under our names, the rest keep theirs."""
    model = pipeline_model.model_of({"pp": 1})
    stage = suite_train.Stage(
        {0: suite_train.Block(model.dim, model.num_heads, model.num_kv_heads, model.ffn_dim, model.norm_eps)},
        torch.nn.Embedding(model.vocab_size, model.dim), torch.nn.RMSNorm(model.dim),
        torch.nn.Linear(model.dim, model.vocab_size, bias=False),
    )  # fmt: skip
    for number, parameter in enumerate(stage.parameters()):
        parameter.grad = torch.full_like(parameter, float(number))
    found = pipeline_model.named_gradients(stage)
    shapes = parameter_shapes(dataclasses.replace(model, num_layers=1))
    assert {name: tuple(grad.shape) for name, grad in found.items()} == shapes
    grads = dict(stage.named_parameters())
    for ours, names in (("attention.kv", ("attention.k", "attention.v")), ("ffn.gate_up", ("ffn.gate", "ffn.up"))):
        for index, name in enumerate(names):
            assert torch.equal(found[f"layers.0.{ours}.weight"][index], grads[f"layers.0.{name}.weight"].grad)


@pytest.mark.parametrize(
    "name, pp, m, count",
    [
        ("1f1b", 4, 8, 2 * (8 + 4 - 1)), ("gpipe", 8, 16, 2 * (16 + 8 - 1)),  # m + p - 1 times F and B
        ("zb_v", 8, 16, 6 * 16 + 8 - 1),  # a rank without a gap: F, I and W of two stages, after p - 1 others
    ],
)  # fmt: skip
def test_actions_that_follow_one_another_are_counted(name, pp, m, count):
    case = suite_pipeline.case_of("sleep", pp, m, 40.0, 16, 3, name)
    assert suite_pipeline.num_critical(case.params) == count


def test_the_table_has_ratios_to_plan_and_peer_and_host_times():
    case = suite_pipeline.cases(False)[1]
    record = {
        "plan_s": 0.1, "check": "checked", "samples_s": {"plait": [0.102] * 3, "torch": [0.110] * 3},
        "busy_s": {"plait": 0.2, "torch": 0.2}, "host_s": {"plait": 0.0192, "torch": 0.0384},
        "cpu_s": {"plait": 0.02, "torch": 0.04},
    }  # fmt: skip
    assert suite_pipeline.num_actions(case.params) == 64
    result = suite_pipeline.result_of(case, record)
    failed = CaseResult(suite_pipeline.cases(False)[0], "", {}, error="broke\nbadly")
    lines = pipeline_table.text([result, failed]).splitlines()
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells == [case.name, "100.0", "1.020", "1.100", "1.078", "100", "200", "2.00"]
    assert "failed: broke" in lines[3] and lines[-1].startswith("sleep: plan")
    ours = result.providers["plait"].figures
    assert ours["bubble"] == pytest.approx(1 - 0.2 / 0.306) and ours["host us/action"] == pytest.approx(100)
    assert ours["late us/critical action"] == pytest.approx(2000 / 22)
    assert "Schedule1F1B" in result.note


PROGRAM = """
import json
from plait.bench import suite_pipeline
from plait.bench.spec import Case, CaseResult, Options
quick = Options(rounds=2, warmup=1)
results = [suite_pipeline.measure(Case("tiny", params), quick) for params in json.loads(ARGUMENT)]
print(json.dumps([result.to_json()["providers"] for result in results]))
"""


@pytest.mark.ranks
def test_both_executors_run_every_schedule_and_agree_with_the_closed_form():
    """Two ranks, four micro-batches, each schedule asleep, idle; and once the real model under a split backward."""
    times = dict(forward_s=1e-4, input_s=1e-4, weight_s=1e-4)
    base = dict(pp=2, microbatches=4, width=3, rounds=9, kind="sleep")
    cases = [{**base, **times, "schedule": name, "chunks": suite_pipeline.CHUNKS.get(name, 1)} for name in NAMES]
    none = dict.fromkeys(times, 0.0)
    cases += [{**cases[1], **none, "kind": "idle"}, {**cases[6], **none, "kind": "model", "width": 0}]
    # in a process of its own: ranks are forked before torch is used
    status, out = launchers.program(PROGRAM.replace("ARGUMENT", repr(json.dumps(cases)))).finish()
    assert status == 0, out
    results = json.loads(out.splitlines()[-1])
    assert len(results) == len(cases)
    for params, providers in zip(cases, results, strict=True):
        assert set(providers) == {"plait", "torch"}
        for measured in providers.values():
            figures = measured["figures"]
            assert len(measured["samples_s"]) == 2 and 0 < figures["host us/action"] <= figures["CPU us/action"]
            assert ("step / plan" in figures) == (params["kind"] != "idle")
            if params["kind"] == "sleep":
                assert figures["slept"] >= 1 and figures["step / plan"] > 1 and 0 < figures["bubble"] < 1
