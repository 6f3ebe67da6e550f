"""The suite `collectives`: right results on real ranks, wrong ones refused, bytes by formula; points of kernels."""

from __future__ import annotations

import json

import pytest

from plait.bench import kernel_points, kernel_shapes, suite_collectives
from plait.bench.result_file import ResultFile
from plait.bench.spec import Case, CaseResult
from plait.kernels.points import points
from tests import launchers

PROGRAM = """
import json
from plait.bench import suite_collectives as suite
from plait.bench.spec import Case, Options, WrongResultError
params, wrong = json.loads(ARGUMENT)
if wrong:
    right = suite.wanted
    suite.wanted = lambda *args: right(*args) + 1.0
try:
    result = suite.measure(Case("tiny", params), Options(rounds=2, warmup=1))
except WrongResultError as error:
    print(json.dumps({"wrong": str(error)}))
else:
    print(json.dumps(result.to_json()))
"""


def measured(wrong: bool = False, **params: object) -> dict:
    """In a process of its own: ranks are forked before torch is used."""
    argument = json.dumps([{"kib": 4, "dtype": "float32", "device": "cpu", **params}, wrong])
    status, out = launchers.program(PROGRAM.replace("ARGUMENT", repr(argument))).finish()
    assert status == 0, out
    return json.loads(out.splitlines()[-1])


@pytest.mark.ranks
@pytest.mark.parametrize("name, ranks", [*((name, 2) for name in suite_collectives.BUS), ("all_reduce", 4)])
def test_both_sides_are_right_and_are_timed(name, ranks):
    result = measured(collective=name, ranks=ranks)
    assert list(result["providers"]) == ["plait", "torch"] and "host_wall over gloo" in result["note"]
    for one in result["providers"].values():
        assert len(one["samples_s"]) == 2 and min(one["samples_s"]) > 0 and "before and after" in one["check"]


@pytest.mark.ranks
def test_a_wrong_result_is_refused():
    assert "off by" in measured(True, collective="reduce_scatter", ranks=2)["wrong"]


def test_bytes_are_those_of_bus_bandwidth():
    found = {case.name: case.bytes_moved for case in suite_collectives.cases(True)}
    assert found["all_reduce 1024 KiB x 4 ranks"] == 1.5 * (1 << 20)
    assert found["all_gather 64 KiB x 2 ranks"] == 0.5 * (64 << 10) and found["p2p 4 KiB x 2 ranks"] == 2 * (4 << 10)
    assert len(suite_collectives.cases(False)) == len(suite_collectives.BUS)


# ---- shapes and points of kernels ---------------------------------------------------------------------------------


def test_a_case_names_only_points_that_exist_and_none_on_a_cpu():
    known, named = points(every=True), 0
    for case in kernel_shapes.cases(True, "cuda"):
        for point in case.params.get("points", ()):
            assert point in known, f"{case.name}: {point}"
            named += 1
    assert named >= 20
    assert not [case for case in kernel_shapes.cases(True, "cpu") if "points" in case.params]


def test_facts_are_the_worst_of_the_pinned_rows_of_the_machine(tmp_path):
    def row(registers: int, blocks: int) -> dict:
        return {"registers": registers, "spills": 1, "shared_bytes": 64, "warps": 8, "blocks": blocks}

    rows = {"a sm_90": row(32, 4), "b sm_90": row(96, 2), "a sm_80": row(1, 1), "b sm_80": row(1, 1)}
    path = tmp_path / "pinned.json"
    path.write_text(json.dumps({"schema": 1, "rows": {"triton 3.9.0, ptxas 12": rows}}))
    cases = {
        name: CaseResult(Case(name, {"points": named}), "", {}, error="x")
        for name, named in (("both", ["a", "b"]), ("unknown", ["a", "c"]), ("none", []))
    }

    def facts(machine: dict) -> dict:
        return kernel_points.pinned_facts(ResultFile("r", "kernels", machine, {}, cases), path)

    card = {"gpus": [{"name": "NVIDIA H200"}], "triton": "3.9.0"}
    assert facts(card) == {"both": {"registers": 96.0, "spills": 2.0, "shared bytes": 64.0, "warps": 16.0}}
    assert facts({**card, "triton": "3.8.0"}) == {} == facts({"gpus": [], "triton": "3.9.0"})
    assert kernel_points.pinned_facts(ResultFile("r", "k", card, {}, cases), tmp_path / "no.json") == {}
