"""`plait snapshot`: what it prints, and the exit codes that scripts rely on."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

from plait.ckpt import PerRank, Sharded, Snapshots
from plait.ckpt.cli import main
from tests.faults import flip, on_ranks, small_state


@pytest.fixture
def run(tmp_path):
    root = tmp_path / "run"
    with Snapshots(root, grid={"dp": 1}) as snapshots:
        for seed in (1, 2):
            snapshots.save(seed, small_state(seed)).wait()
    return root


def answer(capsys, *arguments):
    """Runs a command with --json; returns (exit code, the object it printed)."""
    code = main([*map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out or err)


def test_ls_shows_good_damaged_and_unfinished_ones(run, capsys):
    code, report = answer(capsys, "ls", run)
    assert code == 0
    assert [(r["step"], r["ok"], r["num_tensors"], r["grid"]) for r in report["snapshots"]] == [
        (2, True, 12, {"dp": 1}),
        (1, True, 12, {"dp": 1}),
    ]
    (run / f".tmp-3-{'a' * 16}-1").mkdir()
    (run / "step-000000009").mkdir()
    code, report = answer(capsys, "ls", run)
    assert code == 1 and report["leftovers"] == [f".tmp-3-{'a' * 16}-1"]
    assert "never finished" in report["snapshots"][0]["reason"]
    assert main(["ls", str(run)]) == 1
    text = capsys.readouterr().out
    assert "step-000000002" in text and "dp=1" in text and "gc` removes it" in text


def test_verify_reads_every_byte_and_names_the_tensor(run, capsys):
    """Case 36: damage gives exit code 1 and a machine-readable text."""
    code, report = answer(capsys, "verify", run)
    assert code == 0 and [r["ok"] for r in report["snapshots"]] == [True, True]
    path = run / "step-000000001" / "r00000.safetensors"
    assert report["snapshots"][1]["bytes_read"] == path.stat().st_size
    flip(path, path.stat().st_size - 1)
    assert answer(capsys, "verify", run / "step-000000002")[0] == 0
    assert answer(capsys, "verify", run, "--step", "2")[0] == 0
    code, report = answer(capsys, "verify", run)
    assert code == 1
    (text,) = report["snapshots"][1]["damage"]
    assert "r00000.safetensors" in text and "block 0" in text and "(holds model/layer.0" in text
    os.truncate(path, 10_000)
    assert "has 10000 bytes" in answer(capsys, "verify", run, "--step", "1")[1]["snapshots"][0]["damage"][0]


def test_every_kind_of_damage_gives_exit_code_1(run, capsys):
    for path in sorted((run / "step-000000002").iterdir()):
        data = path.read_bytes()
        for broken in (data[: len(data) // 2], b"", data + b" ", bytes(len(data))):
            path.write_bytes(broken)
            assert main(["verify", str(run / "step-000000002")]) == 1, path.name
        path.write_bytes(data)
    assert main(["verify", str(run)]) == 0
    capsys.readouterr()


def test_diff_is_bitwise_and_names_what_differs(run, tmp_path, capsys):
    assert answer(capsys, "diff", run, run / "step-000000002")[0] == 0
    code, report = answer(capsys, "diff", f"{run}@1", f"{run}@2")
    kinds = {d["name"]: d["kind"] for d in report["differences"]}
    assert code == 1 and kinds["model/layer.0"] == "bits" and kinds["step"] == "value" and kinds["rng"] == "per_rank"
    state = small_state(2)
    state["model"]["layer.3"][5, 7] += 0.5
    state["model"]["layer.4"][0, 0] = float("nan")
    del state["moments"]["layer.5"]
    state["model"]["layer.1"] = state["model"]["layer.1"].double()
    with Snapshots(tmp_path / "other") as snapshots:
        snapshots.save(2, state)
    code, report = answer(capsys, "diff", run, tmp_path / "other")
    found = {d["name"]: (d["kind"], d["num_different"]) for d in report["differences"]}
    assert code == 1 and found == {
        "model/layer.3": ("bits", 1),
        "model/layer.4": ("bits", 1),
        "model/layer.1": ("layout", 0),
        "moments/layer.5": ("only_a", 0),
    }
    largest = {d["name"]: d["max_difference"] for d in report["differences"]}
    assert largest["model/layer.3"] == pytest.approx(0.5) and largest["model/layer.4"] is None
    assert main(["diff", str(run), str(tmp_path / "other")]) == 1
    assert "model/layer.3: 1 of 2048 elements, largest difference 0.5" in capsys.readouterr().out


def test_diff_sees_minus_zero_and_compares_across_grids(tmp_path, capsys):
    full = torch.zeros(6, 1000)

    def save(root, world_size, tensor):
        def work(rank):
            rows = 6 // world_size
            part = Sharded(tensor[rank * rows : (rank + 1) * rows], (6, 1000), (rank * rows, 0))
            with Snapshots(root, rank=rank, world_size=world_size, session=1) as snapshots:
                snapshots.save(1, {"w": part, "n": 1, "rng": PerRank(rank)})

        on_ranks(world_size, work)

    save(tmp_path / "a", 3, full)
    save(tmp_path / "b", 2, full)
    code, report = answer(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert code == 0 and report["equal"] and not report["per_rank_compared"]
    other = full.clone()
    other[4, 3] = -0.0
    save(tmp_path / "c", 1, other)
    code, report = answer(capsys, "diff", tmp_path / "a", tmp_path / "c")
    assert code == 1 and report["differences"][0]["num_different"] == 1


def test_diff_of_a_damaged_snapshot_is_damage_not_a_difference_table(run, capsys):
    flip(run / "step-000000001" / "r00000.safetensors", 9000)
    code, report = answer(capsys, "diff", f"{run}@1", f"{run}@2")
    assert code == 1 and "block 0" in report["error"]


def test_gc_needs_the_lock(run, capsys):
    left = run / f".tmp-3-{'a' * 16}-1"
    left.mkdir()
    with Snapshots(run, read_only=False):
        left.mkdir(exist_ok=True)
        code, report = answer(capsys, "gc", run)
        assert code == 3 and f"held by process {os.getpid()}" in report["error"] and left.is_dir()
    code, report = answer(capsys, "gc", run)
    assert code == 0 and report["removed"] == [left.name]
    assert answer(capsys, "gc", run) == (0, {"removed": []})


def test_usage_errors_are_2(run, tmp_path, capsys):
    assert main([]) == 2
    assert main(["explode"]) == 2
    assert main(["ls", str(tmp_path / "nowhere")]) == 2
    assert main(["verify", str(tmp_path)]) == 2
    assert main(["verify", str(run), "--step", "77"]) == 2
    assert main(["diff", str(run), str(tmp_path)]) == 2
    assert main(["diff", f"{run}@77", str(run)]) == 2
    assert main(["gc", str(tmp_path)]) == 2
    assert main(["--help"]) == 0
    assert "tmp_path" not in capsys.readouterr().err


def test_ls_of_a_folder_that_is_no_run_is_an_error(run, tmp_path, capsys):
    """It once printed an empty table and returned 0, so that a mistyped path looked like a run without snapshots."""
    other = tmp_path / "photos"
    other.mkdir()
    (other / "cat.jpg").write_bytes(b"x")
    code, report = answer(capsys, "ls", other)
    assert code == 2 and f"'{other}' is no run folder" in report["error"]
    code, report = answer(capsys, "ls", run / "step-000000002")
    assert code == 2 and "it is one snapshot" in report["error"]
    copies = tmp_path / "copies"  # snapshots that were copied away without RUN.json can be listed
    shutil.copytree(run / "step-000000002", copies / "step-000000002")
    assert answer(capsys, "ls", copies)[0] == 0


def test_ls_of_a_run_without_a_snapshot_says_so(tmp_path, capsys):
    Snapshots(tmp_path / "run").close()
    code, report = answer(capsys, "ls", tmp_path / "run")
    assert code == 0 and report["snapshots"] == []
    assert main(["ls", str(tmp_path / "run")]) == 0
    assert "no snapshot yet" in capsys.readouterr().out


def test_a_snapshot_that_is_not_there_is_a_usage_error_and_no_damage(run, capsys):
    """A mistyped step once read as a damaged snapshot, with exit code 1."""
    for arguments in (("verify", run / "step-000000009"), ("diff", run, run / "step-000000009")):
        code, report = answer(capsys, *arguments)
        assert code == 2 and report["error"] == f"'{run / 'step-000000009'}' is not a folder"


def test_a_verified_copy_is_as_good_as_the_original(run, tmp_path, capsys):
    copy = tmp_path / "elsewhere" / "step-000000002"
    shutil.copytree(run / "step-000000002", copy)
    assert answer(capsys, "verify", copy)[0] == 0
    assert answer(capsys, "diff", run, copy)[0] == 0
