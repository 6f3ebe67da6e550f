"""A fault at every few operations of every kind of save: errors, short and torn writes, kills, power loss.

`make faults` takes all of them, counted (walk.py). Each kind of save is a Cycle of cycles.py, whose docstring says
what must hold after each fault.
"""

from __future__ import annotations

import json
import os
import shutil

import pytest

from tests import history
from tests.cycles import CYCLES, PLACES, Cycle
from tests.walk import (
    Walk,
    Walker,
    all_walks,
    main,
    run_walks,
    small_blocks,
    walk_errors,
    walk_kills,
    walk_power_losses,
    walk_short,
)

WALKS = {walk.name: walk for walk in all_walks()}


# 11 s and more beside other work; the fault that it had is mended (docs/log.md, 2026-11-30).
_LONG = {"partner": pytest.mark.long}


@pytest.fixture(params=[pytest.param(name, marks=_LONG.get(name, ())) for name in {**CYCLES, **PLACES}])
def cycle(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cycle:
    """A kind of save."""
    small_blocks(monkeypatch.setattr)
    return {**CYCLES, **PLACES}[request.param]


def test_a_fault_at_every_few_operations_loses_nothing(cycle, request, tmp_path):
    """One operation in 47, another one for each kind of fault; fewer where ranks wait for each other."""
    name, stride = request.node.callspec.params["cycle"], 47 if cycle.ranks == 1 else 188
    walker = Walker(cycle, tmp_path)
    thinned = lambda count, shift: range((shift * 61 + 5) % stride, count, stride)  # noqa: E731
    walk_errors(walker, thinned, (False, True) if cycle.ranks == 1 else (False,))
    if f"{name}: short" in WALKS:
        walk_short(walker, thinned)
    if f"{name}: kills" in WALKS:
        walk_kills(walker, thinned)
    if f"{name}: power" in WALKS:
        walk_power_losses(walker, thinned, 3)
    assert walker.count >= 3


def test_the_counted_walk_says_how_many_and_writes_its_record(tmp_path, capsys):
    said: list[str] = []
    record = run_walks([WALKS["lock: errors"], WALKS["restore: short"]], 7, 2, said.append)
    assert record["lost"] == [] and record["walks"].keys() == {"lock: errors", "restore: short"}
    assert record["faults"] == sum(record["walks"].values()) > 5 and min(record["walks"].values()) > 0
    assert any(text.startswith("  lock: errors: ") for text in said)


def test_a_loss_ends_the_counted_walk_and_is_named(tmp_path, capsys, monkeypatch):
    """A save that gives up the older snapshot before the new one is there."""
    good = CYCLES["eager"]

    def run(root, ios, steps):
        for folder in root.glob("step-*"):
            shutil.rmtree(folder)
        good.run(root, ios, steps)

    bad = Walk("bad: errors", Cycle(good.steps, 1, good.state, run, save=good.run), walk_errors)
    monkeypatch.setattr("tests.walk.all_walks", lambda: [bad, WALKS["lock: errors"]])
    record = tmp_path / "record.json"
    assert main(["--faults", "1000", "--record", str(record), "--folder", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "LOST in bad: errors: ('errno EIO once', 0, " in out and "1 lost" in out and not record.exists()
    assert os.listdir(tmp_path) == []  # what was walked is gone


def test_the_record_holds_date_commit_and_the_faults_of_each_walk(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tests.walk.all_walks", lambda: [WALKS["restore: short"]])
    path = tmp_path / "record.json"
    assert main(["--faults", "1", "--record", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["walks"] == {"restore: short": record["faults"]} and record["lost"] == []
    assert record["date"].startswith("20") and {"commit", "seconds"} <= record.keys()
    assert main(["--faults", "100000", "--record", str(path)]) == 2
    assert "fewer than --faults 100000" in capsys.readouterr().out


def test_a_history_of_writers_readers_and_a_pruner_loses_nothing(tmp_path, capsys):
    """Of a second; `make history` takes 30."""
    assert main(["--history", "1", "--record", str(tmp_path / "faults.json")]) == 0, capsys.readouterr().out
    record = json.loads((tmp_path / "history.json").read_text())
    assert record["lost"] == [] and record["saved"] > 0 and record["read"] > 0 and record["blows"]["SIGKILL"] > 0


def test_what_is_wrong_with_a_history_is_found():
    good = [
        {"kind": "begin", "who": "w", "at": 1.0, "step": 1, "nonce": 7},
        {"kind": "saved", "who": "w", "at": 2.0, "step": 1, "nonce": 7},
        {"kind": "read", "who": "r", "began": 2.1, "at": 2.2, "step": 1, "nonce": 7, "whole": True},
        {"kind": "begin", "who": "w", "at": 2.3, "step": 2, "nonce": 8},
        {"kind": "read", "who": "r", "began": 2.4, "at": 2.5, "step": 2, "nonce": 8, "whole": True},
        {"kind": "open", "who": "v", "began": 2.6, "at": 2.7, "step": 2},
        {"kind": "pruned", "who": "p", "at": 2.8, "status": 3},
    ]
    assert history.check(good) == []
    late = {"began": 2.9, "at": 3.0}
    for bad, text in (
        ({**good[4], **late, "whole": False}, "not the bits"),
        ({**good[4], **late, "nonce": 7}, "not the bits"),
        ({**good[2], **late}, "older than what this reader had"),
        ({**good[5], **late, "step": None}, "older than step 1"),
        ({"kind": "refused", "who": "q", **late, "text": "none"}, "nothing restored"),
        ({**good[6], "status": 1}, "an error"),
        ({"kind": "error", "who": "w", "at": 3.0, "text": "OSError"}, "an error"),
    ):
        wrong = history.check([*good, bad])
        assert len(wrong) == 1 and text in wrong[0], (bad, wrong)
