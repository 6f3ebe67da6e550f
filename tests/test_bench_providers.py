"""`--providers` in every suite that has peers: who was not asked for is not timed, and says so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plait.bench import cli, providers, runner, snapshot_peers, snapshot_turn, suite_kernels, suite_snapshots
from plait.bench.kernel_shapes import CPU_SHAPES, make_case
from plait.bench.spec import Case, CaseResult, Options, Suite
from tests import launchers

ALONE = Options(rounds=1, warmup=0, providers=(providers.OURS,))
# In a process of its own: ranks are forked before torch is used.
PROGRAM = """
import json, sys
from plait.bench import suite_collectives, suite_pipeline, suite_train
from plait.bench.spec import Case, Options
alone = Options(rounds=1, warmup=0, providers=("plait",))
zero = dict.fromkeys(("forward_s", "input_s", "weight_s"), 1e-5)
params = dict(pp=2, microbatches=4, width=3, rounds=9, kind="sleep", schedule="1f1b", chunks=1, **zero)
wire = dict(collective="all_reduce", ranks=2, kib=4, dtype="float32", device="cpu")
found = {
    "collectives": suite_collectives.measure(Case("c", wire), alone),
    "pipeline": suite_pipeline.measure(Case("p", params), alone),
    "train": suite_train.measure(suite_train.cases(True)[0], alone),
}
print(suite_pipeline.SUITE.text([found["pipeline"]]))
print(json.dumps({name: result.to_json() for name, result in found.items()}))
"""


@pytest.mark.ranks
def test_torch_is_not_timed_where_nobody_asked_for_it():
    code, said = launchers.program(PROGRAM).finish()
    assert code == 0, said
    *said_before, line = said.splitlines()
    for name, result in json.loads(line).items():
        sides = result["providers"]
        assert list(sides) == ["plait", "torch"], name
        assert len(sides["plait"]["samples_s"]) == 1 and sides["plait"]["check"], name
        assert sides["torch"]["skipped"] == providers.NOT_ASKED and not sides["torch"]["samples_s"], name
    assert any(row.startswith("| p ") for row in said_before)


def test_snapshots_of_those_asked_for_and_their_limit(tmp_path):
    case = Case("s", {"mib": 1, "tensors": 5, "quantity": "stall", "folder": str(tmp_path)})
    asked = Options(rounds=2, warmup=0, providers=("torch.save",))
    found = suite_snapshots.measure(case, asked).providers
    assert {name for name, one in found.items() if one.samples_s} == {"plait", "torch.save", "limit"}
    assert {one.skipped for one in found.values() if not one.samples_s} == {providers.NOT_ASKED}


def test_the_names_of_snapshots_are_those_of_its_cases(tmp_path):
    small, skipped = snapshot_peers.build(tmp_path, {})
    named = {*small, *skipped, *snapshot_turn.WAYS} - {"limit"}
    assert {name for name in named if not name.startswith(providers.OURS)} == set(providers.PROVIDERS["snapshots"])


def test_a_default_run_is_shorter_than_a_full_one_unless_told(monkeypatch, tmp_path):
    ran: dict[str, tuple[int, float]] = {}

    def here(suite: Suite, options: Options, only: str, roof: Any) -> tuple[list[CaseResult], int]:
        ran[suite.name] = (options.rounds, options.budget_s)
        return [], 0

    monkeypatch.setattr(runner, "run_here", here)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run"]) == 0 and list(ran) == ["ceilings", *(name for name in cli.SUITES if name != "ceilings")]
    assert ran["train"] == (8, 60.0) and ran["pipeline"] == (6, 60.0) and ran["launch"] == (20, 0.0)
    assert sum(seconds for _, seconds in ran.values()) <= 300.0
    assert cli.main(["run", "train", "kernels", "--full"]) == 0
    assert ran["train"] == (20, 0.0) and ran["kernels"] == (20, suite_kernels.BUDGET_S)
    assert cli.main(["run", "train", "--rounds", "3", "--budget", "9"]) == 0 and ran["train"] == (3, 9.0)


@pytest.mark.parametrize("op", CPU_SHAPES)
def test_the_names_of_kernels_are_those_of_its_cases(op):
    case = make_case(op, {**CPU_SHAPES[op][0], "rows": 3, "tokens": 8, "elements": 9}, "float32", "cpu", False)
    found = suite_kernels.measure(case, ALONE).providers
    assert set(found) <= {providers.OURS, *providers.PROVIDERS["kernels"]}
    assert [name for name, one in found.items() if one.samples_s] == [providers.OURS]


@pytest.mark.parametrize(
    "suites, asked, said",
    [
        (["pipeline"], ["liger"], "'liger' is measured in none of: pipeline (torch); 'plait' is ours alone"),
        (["launch", "ceilings"], ["torch"], "'torch' is measured in none of: launch (nobody), ceilings (nobody)"),
        (["pipeline", "static"], ["torch", "x"], "'x' is measured in none of: pipeline (torch), static (liger, "),
    ],
)
def test_a_name_that_no_suite_of_the_run_has_is_refused_with_those_it_has(suites, asked, said, capsys):
    assert cli.main(["run", *suites, "--providers", ",".join(asked)]) == 2
    assert said in capsys.readouterr().err


def test_each_suite_of_a_run_takes_those_it_has(monkeypatch, tmp_path):
    ran: dict[str, tuple[str, ...]] = {}

    def here(suite: Suite, options: Options, only: str, roof: Any) -> tuple[list[CaseResult], int]:
        ran[suite.name] = options.providers
        return [], 0

    monkeypatch.setattr(runner, "run_here", here)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "train", "static", "launch", "--providers", "torch, liger"]) == 0
    assert ran == {"train": ("torch",), "static": ("liger",), "launch": ("plait",)}
    assert cli.main(["run", "train", "--providers", "plait"]) == 0 and ran["train"] == ("plait",)
    assert cli.main(["run", "train"]) == 0 and ran["train"] == ()
