"""`plait snapshot`: what it prints, and the exit codes that scripts rely on."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import threading
from contextlib import contextmanager

import pytest
import torch

from plait.ckpt import PerRank, Sharded, Snapshots, Tier, cli_manage
from plait.ckpt.cli import main
from plait.ckpt.cli_progress import line, progress
from plait.ckpt.keep import pinned_folders, reading
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


def test_verify_says_that_a_signature_was_not_checked(tmp_path, capsys, monkeypatch):
    """It said "ok", as if the signature were. Nothing is damaged, so the exit code stays 0."""
    root, key = tmp_path / "run", bytes(range(32))
    with Snapshots(root, key=key, tiers=[Tier(f"file://{tmp_path}/far")]) as snapshots:
        snapshots.save(1, small_state(1)).wait("remote")
    for place in (root, f"file://{tmp_path}/far"):
        assert main(["verify", str(place)]) == 0
        assert "signed by key 42942e35, which was NOT CHECKED: no key was given" in capsys.readouterr().out
        code, report = answer(capsys, "verify", place)
        (row,) = report["snapshots"]
        assert (code, row["ok"], row["signed_by"], row["signature_checked"]) == (0, True, "42942e35", False)
        monkeypatch.setenv("MY_KEY", key.hex())
        code, report = answer(capsys, "verify", place, "--key-env", "MY_KEY")
        assert (code, report["snapshots"][0]["signature_checked"]) == (0, True)
        assert answer(capsys, "show", f"{place}@1")[1]["signed_by"] == "42942e35"
        monkeypatch.setenv("MY_KEY", "ab" * 32)
        code, report = answer(capsys, "verify", place, "--key-env", "MY_KEY")
        assert (code, report["snapshots"][0]["signature_checked"]) == (1, False)
    assert answer(capsys, "verify", root, "--key-env", "NO_SUCH_KEY") == (
        2,
        {"error": "--key-env NO_SUCH_KEY: the environment has no such variable"},
    )


def test_a_value_that_one_side_lacks_on_a_rank_is_not_called_different(tmp_path, capsys):
    for name, state in (("a", {"x": torch.ones(1), "rng": PerRank(3)}), ("b", {"x": torch.ones(1)})):
        with Snapshots(tmp_path / name) as snapshots:
            snapshots.save(1, state)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    text = capsys.readouterr().out
    assert "rng: is in the first only, on rank 0" in text and "1 difference (" in text


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
    assert main(["verify", str(run), "--key-file", str(tmp_path)]) == 2
    assert main(["copy", str(run), str(tmp_path / "copy"), "--retry-s", "nan"]) == 2
    assert not (tmp_path / "copy").exists() and main(["--help"]) == 0
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


def test_show_says_what_is_in_a_snapshot_and_who_wrote_it(tmp_path, capsys):
    full, tied = torch.arange(2000.0).reshape(2, 1000), torch.ones(3, dtype=torch.bfloat16)

    def work(rank):
        part = Sharded(full[rank : rank + 1], (2, 1000), (rank, 0))
        with Snapshots(tmp_path, rank=rank, world_size=2, session=1, grid={"tp": 2}) as snapshots:
            state = {"m": {"w": part, "a": tied, "b": tied}, "lr": 0.5, "rng": PerRank(rank)}
            snapshots.save(4, state, metrics={"loss": 2.5}).wait()

    on_ranks(2, work)
    code, report = answer(capsys, "show", tmp_path)
    assert code == 0 and (report["step"], report["world_size"], report["grid"]) == (4, 2, {"tp": 2})
    assert report["metrics"] == {"loss": 2.5} and report["values"] == {"lr": {"$float": (0.5).hex()}}
    found = {t["name"]: t for t in report["tensors"]}
    assert (found["m/w"]["dtype"], found["m/w"]["shape"], found["m/w"]["num_bytes"]) == ("float32", [2, 1000], 8000)
    assert found["m/w"]["ranks"] == [0, 1] and len(found["m/w"]["xxh3_128"]) == 2
    assert found["m/b"]["same_as"] == "m/a" and found["m/a"]["same_as"] is None
    assert [r["per_rank"] for r in report["ranks"]] == [["rng"], ["rng"]]
    assert {f["name"] for f in report["files"]} == {p.name for p in (tmp_path / "step-000000004").iterdir()} - {
        "MANIFEST.json"
    }
    assert [t["name"] for t in answer(capsys, "show", tmp_path, "--select", "*/w")[1]["tensors"]] == ["m/w"]
    assert main(["show", f"{tmp_path}@4"]) == 0
    text = capsys.readouterr().out
    assert "m/b" in text and "= m/a" in text and "lr = 0.5" in text and "7.8 KiB  0,1" in text
    assert answer(capsys, "show", f"{tmp_path}@5")[0] == 2


def test_diff_says_relative_difference_and_changed_bits(tmp_path, capsys):
    def save(root, **state):
        with Snapshots(root) as snapshots:
            snapshots.save(1, state)

    big = 2**62
    save(tmp_path / "a", f=torch.tensor([1.0, -8.0]), i=torch.tensor([big, 5]), b=torch.tensor([True]))
    save(tmp_path / "b", f=torch.tensor([1.0, -6.0]), i=torch.tensor([big + 1, 5]), b=torch.tensor([False]))
    _, report = answer(capsys, "diff", tmp_path / "a", tmp_path / "b")
    found = {d["name"]: d for d in report["differences"]}
    assert (found["f"]["max_difference"], found["f"]["max_relative"], found["f"]["num_bits"]) == (2.0, 0.25, 3)
    assert (found["i"]["max_difference"], found["i"]["num_bits"]) == (1.0, 1)  # in fp64 the two are equal
    assert (found["b"]["max_difference"], found["b"]["num_bits"]) == (1.0, 1)
    save(tmp_path / "c", f=torch.tensor([1.0, float("inf")]), i=torch.tensor([-big, 5]), b=torch.tensor([True]))
    _, report = answer(capsys, "diff", tmp_path / "a", tmp_path / "c")
    found = {d["name"]: d for d in report["differences"]}
    assert found["f"]["max_difference"] is None and found["i"]["max_difference"] == float(2 * big)


@pytest.fixture
def five(tmp_path):
    root = tmp_path / "five"
    with Snapshots(root, keep_last=None) as snapshots:
        for step in range(1, 6):
            snapshots.save(step, {"w": torch.full((10,), float(step))}).wait()
    return root


def steps(root):
    return sorted(int(path.name[5:]) for path in root.glob("step-*"))


def test_prune_keeps_the_newest_every_nth_and_the_pinned(five, capsys):
    assert answer(capsys, "pin", f"{five}@1") == (0, {"pinned": str(five / "step-000000001")})
    code, report = answer(capsys, "prune", five, "--keep", "1", "--every", "2", "--dry-run")
    assert (
        code == 0 and report["dry_run"] and report["removed"] == ["step-000000003"] and steps(five) == [1, 2, 3, 4, 5]
    )
    assert answer(capsys, "ls", five)[1]["snapshots"][-1]["pinned"] is True
    code, report = answer(capsys, "prune", five, "--keep", "1", "--every", "2")
    assert code == 0 and report["removed"] == ["step-000000003"] and steps(five) == [1, 2, 4, 5]
    assert report["kept"] == {
        "step-000000001": "pinned",
        "step-000000002": "a multiple of 2",
        "step-000000004": "a multiple of 2",
        "step-000000005": "one of the newest 1",
    }
    assert answer(capsys, "unpin", f"{five}@1")[1]["was_pinned"] is True
    assert answer(capsys, "unpin", f"{five}@1")[1]["was_pinned"] is False and not pinned_folders(five)
    with reading(five / "step-000000002"):
        code, report = answer(capsys, "prune", five, "--keep", "1")
    assert report["removed"] == ["step-000000001", "step-000000004"] and report["being_read"] == ["step-000000002"]


def test_prune_keeps_the_best_by_a_metric(tmp_path, capsys):
    """It once knew of no metric, and removed what a run keeps by `keep_best`."""
    with Snapshots(tmp_path, keep_last=None) as snapshots:
        for step, loss in enumerate([3.0, 1.0, 2.0, 2.5, math.nan], 1):
            snapshots.save(step, {"w": torch.ones(10)}, metrics={"loss": loss}).wait()
    code, report = answer(capsys, "prune", tmp_path, "--keep", "1", "--best", "loss=min:2", "--dry-run")
    assert (
        code == 0 and report["removed"] == ["step-000000001", "step-000000004"] and steps(tmp_path) == [1, 2, 3, 4, 5]
    )
    assert answer(capsys, "prune", tmp_path, "--keep", "1", "--best", "loss=min:2")[0] == 0
    assert steps(tmp_path) == [2, 3, 5]
    code, report = answer(capsys, "prune", tmp_path, "--keep", "1", "--best", "loss=max")
    assert steps(tmp_path) == [3, 5] and report["kept"]["step-000000003"] == "one of the best by its metric"
    for wrong in ("loss", "loss=least", "=min", "loss=min:0"):
        assert answer(capsys, "prune", tmp_path, "--keep", "1", "--best", wrong)[0] == 2


def test_prune_never_removes_the_last_good_one(five, capsys):
    """The newest has a flipped byte that its manifest does not show: the older ones are all there is."""
    for step in (4, 5):
        path = five / f"step-{step:09d}" / "r00000.safetensors"
        flip(path, path.stat().st_size - 1)
    for keep in ("1", "2"):
        code, report = answer(capsys, "prune", five, "--keep", keep)
        assert code == 1 and "none of those that would stay is good: step-000000005" in report["error"]
        assert steps(five) == [1, 2, 3, 4, 5]
    code, report = answer(capsys, "prune", five, "--keep", "3")
    assert code == 0 and report["removed"] == ["step-000000001", "step-000000002"]
    (five / "step-000000005" / "MANIFEST.json").write_bytes(b"")
    code, report = answer(capsys, "prune", five, "--keep", "2")  # counts good manifests only
    assert code == 0 and report["removed"] == [] and "damaged" in report["kept"]["step-000000005"]


def test_prune_needs_the_lock_and_sense(five, tmp_path, capsys):
    with Snapshots(five):
        code, report = answer(capsys, "prune", five, "--keep", "1")
        assert code == 3 and f"held by process {os.getpid()}" in report["error"]
        assert answer(capsys, "prune", five, "--keep", "1", "--dry-run")[0] == 0
    assert steps(five) == [1, 2, 3, 4, 5]
    assert answer(capsys, "prune", five, "--keep", "0")[0] == 2
    assert answer(capsys, "prune", tmp_path, "--keep", "1")[0] == 2
    assert main(["prune", str(five)]) == 2
    assert "--keep" in capsys.readouterr().err
    assert answer(capsys, "pin", five / "step-000000077")[0] == 2
    assert answer(capsys, "pin", tmp_path / "nowhere")[0] == 2


def save_three_ranks(root):
    def work(rank):
        part = Sharded(torch.arange(6000.0).reshape(6, 1000)[rank * 2 : rank * 2 + 2], (6, 1000), (rank * 2, 0))
        with Snapshots(root, rank=rank, world_size=3, session=1) as snapshots:
            snapshots.save(1, {"w": part, "n": 1}).wait()

    on_ranks(3, work)


CODINGS = {"plain": [], "zstd": ["--compress"], "sealed": ["--encrypt"], "both": ["--level", "3", "--encrypt"]}


@pytest.mark.parametrize("coding", CODINGS)
def test_a_snapshot_of_many_ranks_is_copied_and_back(tmp_path, capsys, coding):
    if "zstd" in coding or coding == "both":
        pytest.importorskip("zstandard", reason="compression needs zstandard")
    key = ["--key-file", tmp_path / "key"] if "--encrypt" in CODINGS[coding] else []
    (tmp_path / "key").write_text("ab" * 32)
    save_three_ranks(tmp_path / "run")
    code, report = answer(capsys, "copy", tmp_path / "run", tmp_path / "far", *CODINGS[coding])
    if key:
        assert code == 2 and "--encrypt needs a key: --key-file or --key-env" in report["error"]
        with Snapshots(tmp_path / "signed", key_file=tmp_path / "key") as snapshots:
            snapshots.save(1, {"w": torch.arange(6000.0).reshape(6, 1000), "n": 1}).wait()
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "signed").rename(tmp_path / "run")
        code, report = answer(capsys, "copy", tmp_path / "run", tmp_path / "far", *CODINGS[coding], *key)
    assert code == 0 and report["copy"] == str(tmp_path / "far" / "step-000000001"), report
    assert answer(capsys, "verify", tmp_path / "far", *key)[0] == 0
    assert answer(capsys, "copy", tmp_path / "run", tmp_path / "far", *key)[1]["copy"] == report["copy"]  # is there
    code, report = answer(capsys, "copy", tmp_path / "far", tmp_path / "back", *key)  # decoded on the way
    assert code == 0, report
    ours, theirs = (tmp_path / name / "step-000000001" for name in ("run", "back"))
    assert {p.name: p.read_bytes() for p in ours.iterdir()} == {p.name: p.read_bytes() for p in theirs.iterdir()}


@pytest.mark.parametrize("options", [[], ["--compress"]])
def test_the_bar_of_a_copy_ends_at_the_whole(tmp_path, capsys, monkeypatch, options):
    """It counted compressed bytes against plain ones, and stopped half-way."""
    seen = []

    @contextmanager
    def progress(label, total, done, quiet):
        yield
        seen.append((total, done()))

    with Snapshots(tmp_path / "run") as snapshots:
        snapshots.save(1, {"w": torch.zeros(1 << 18)})
    monkeypatch.setattr(cli_manage, "progress", progress)
    assert answer(capsys, "copy", tmp_path / "run", tmp_path / "copy", *options)[0] == 0
    assert [(total, total <= done <= total + 8192) for total, done in seen] == [(1 << 20, True)]


def test_an_encrypted_copy_of_an_unsigned_snapshot_needs_a_word(run, tmp_path, capsys):
    """The key was asked of the original too, so that a run without one could not be copied encrypted at all."""
    (tmp_path / "key").write_text("ab" * 32)
    flags = ["--encrypt", "--key-file", tmp_path / "key"]
    code, report = answer(capsys, "copy", run, tmp_path / "far", *flags)
    assert code == 1 and "is not signed, and a key was given" in report["error"]
    assert answer(capsys, "copy", run, tmp_path / "far", *flags, "--unsigned")[0] == 0
    assert answer(capsys, "verify", tmp_path / "far")[0] == 2
    assert answer(capsys, "verify", tmp_path / "far", *flags[1:])[0] == 0
    assert answer(capsys, "diff", run, tmp_path / "far", *flags[1:])[0] == 1
    assert answer(capsys, "diff", run, tmp_path / "far", *flags[1:], "--unsigned")[0] == 0


def test_a_copy_that_is_there_already_is_read_before_it_is_called_verified(run, tmp_path, capsys):
    far = tmp_path / "far"
    assert answer(capsys, "copy", run, far)[1]["was_there"] is False
    assert answer(capsys, "copy", run, far)[1]["was_there"] is True
    flip(far / "step-000000002" / "r00000.safetensors", 5000)
    code, report = answer(capsys, "copy", run, far)
    assert code == 1 and "step-000000002' was there already, and is damaged: block 0" in report["error"]


def test_a_copy_that_fails_leaves_nothing_of_its_attempt(run, tmp_path, capsys):
    """A full disk kept the folder of the attempt, which gc could not remove: it had no RUN.json yet."""
    flip(run / "step-000000002" / "r00000.safetensors", 5000)
    assert answer(capsys, "copy", run, tmp_path / "far")[0] == 1
    assert [path.name for path in (tmp_path / "far").iterdir()] == ["LOCK"]


def test_what_works_on_directories_says_so_of_a_url(tmp_path, capsys):
    """The URL was taken for a path: "'s3:/bucket/run' is no run folder"."""
    url = "s3://bucket/run"
    for command in (["gc", url], ["prune", url, "--keep", "1"], ["bench", url], ["import", url, tmp_path / "run"]):
        assert main([*map(str, command)]) == 2
        assert f"'{url}' is a store; this works on directories" in capsys.readouterr().err


def test_a_snapshot_is_no_foreign_checkpoint(run, tmp_path, capsys):
    """Its pieces came in as tensors, without values, checksums or step."""
    step = run / "step-000000002"
    for source in (run, step, step / "r00000.safetensors"):
        code, report = answer(capsys, "import", source, tmp_path / "into")
        assert code == 2 and "`plait snapshot copy` copies it" in report["error"]


def test_a_snapshot_is_copied_to_a_url_and_back(tmp_path, capsys):
    """Case 10: a store without descriptors, whose objects are whole once written."""
    url = f"memory://{tmp_path.name}/run"
    save_three_ranks(tmp_path / "run")
    code, report = answer(capsys, "copy", tmp_path / "run", url)
    assert code == 0 and report["copy"].startswith(f"{url}/step-000000001."), report
    for source in (url, f"{url}@1"):
        code, report = answer(capsys, "copy", source, tmp_path / "back")
        assert code == 0, report
    assert answer(capsys, "diff", tmp_path / "run", tmp_path / "back")[0] == 0
    assert len(list((tmp_path / "back").glob("step-*"))) == 1
    assert answer(capsys, "copy", f"{url}@2", tmp_path / "back")[0] == 2


def test_a_copy_needs_the_lock_the_run_and_a_good_source(run, five, tmp_path, capsys):
    assert answer(capsys, "copy", run, tmp_path / "far")[0] == 0
    with Snapshots(tmp_path / "far"):
        assert answer(capsys, "copy", f"{run}@1", tmp_path / "far")[0] == 3
    code, report = answer(capsys, "copy", five, tmp_path / "far")
    assert code == 2 and "belongs to run" in report["error"]
    path = run / "step-000000001" / "r00000.safetensors"
    flip(path, path.stat().st_size - 1)
    code, report = answer(capsys, "copy", f"{run}@1", tmp_path / "far")
    assert code == 1 and "block 0" in report["error"] and steps(tmp_path / "far") == [2]


def test_bench_writes_and_reads_the_disk(tmp_path, capsys):
    code, report = answer(capsys, "bench", tmp_path, "--mib", "4")
    assert code == 0 and report["num_bytes"] == 4 << 20 and report["write_s"] > 0 and report["read_s"] > 0
    assert list(tmp_path.iterdir()) == []
    assert main(["bench", str(tmp_path), "--mib", "1"]) == 0
    assert "plait bench run snapshots" in capsys.readouterr().out
    assert answer(capsys, "bench", tmp_path, "--mib", "0")[0] == 2
    code, report = answer(capsys, "bench", tmp_path, "--mib", "99999999")
    assert code == 2 and "by memory and free space" in report["error"], "once a traceback of torch"


class Terminal(io.StringIO):
    def __init__(self):
        super().__init__()
        self.shown = threading.Event()

    def isatty(self):
        return True

    def write(self, text):
        self.shown.set()
        return super().write(text)


def test_a_terminal_gets_a_bar_and_a_log_gets_lines(capsys):
    out = Terminal()
    with progress("verify", 2048, lambda: 1024, quiet=False, out=out):
        assert out.shown.wait(60)
    assert "verify [###############...............]  50% 1.0 KiB of 2.0 KiB" in out.getvalue()
    assert out.getvalue().endswith("\r\x1b[K")  # the bar is gone when the work is done
    plain = io.StringIO()
    with progress("verify", 2048, lambda: 1024, quiet=False, out=plain):
        pass
    assert plain.getvalue() == ""
    assert line("copy", 512, 2048, 2.0, bar=False) == "copy  25% 512 B of 2.0 KiB, 256 B/s"
    assert "100%" in line("copy", 0, 0, 0.0, bar=True)
    with progress("verify", 1, lambda: 1 // 0, quiet=True, out=out):
        pass


KEY_TEXT = "07" * 32


@pytest.fixture(params=["memory", "file", "folder"])
def tier(request, tmp_path):
    """Steps 1 and 2 of the small state, plain and coded with a key: (URL or folder of each, file with the key)."""
    secret = tmp_path / "key"
    secret.write_text(KEY_TEXT)
    name = request.node.name.replace("[", "-").replace("]", "")
    base = {"memory": f"memory://{name}", "file": f"file://{tmp_path}", "folder": str(tmp_path)}[request.param]
    tiers = [Tier(f"{base}/plain"), Tier(f"{base}/coded", compress=True, encrypt=True)]
    with Snapshots(tmp_path / "near", tiers=tiers, key_file=secret) as snapshots:
        for seed in (1, 2):
            snapshots.save(seed, small_state(seed)).wait("remote")
    return f"{base}/plain", f"{base}/coded", secret


def test_a_tier_is_listed_shown_verified_and_compared_like_a_run(tier, tmp_path, capsys):
    """ls and verify took directories alone, and file:// nothing could read."""
    plain, coded, secret = tier
    code, report = answer(capsys, "ls", plain)
    assert code == 0 and [(r["step"], r["ok"], r["num_tensors"]) for r in report["snapshots"]] == [
        (2, True, 12),
        (1, True, 12),
    ]
    code, report = answer(capsys, "show", f"{coded}@1", "--key-file", secret)
    assert (code, report["step"], report["codec"], len(report["tensors"])) == (0, 1, "zstd+aes-256-gcm", 12)
    assert report["folder"].startswith(coded.removeprefix("file://"))
    for path, more in ((plain, []), (coded, ["--key-file", secret])):
        code, report = answer(capsys, "verify", path, *more)
        assert code == 0 and [(r["step"], r["damage"]) for r in report["snapshots"]] == [(2, []), (1, [])]
        code, report = answer(capsys, "verify", path, "--step", 1, *more)
        assert code == 0 and [r["step"] for r in report["snapshots"]] == [1] and report["snapshots"][0]["bytes_read"]
    assert answer(capsys, "diff", plain, coded, "--key-file", secret)[0] == 0
    assert answer(capsys, "diff", tmp_path / "near", coded, "--key-file", secret)[0] == 0
    code, report = answer(capsys, "diff", f"{plain}@1", f"{plain}@2")
    assert code == 1 and any(d["name"] == "step" for d in report["differences"])


def test_what_is_wrong_with_a_tier_is_said_with_its_exit_code(tier, tmp_path, capsys):
    plain, coded, secret = tier
    other = tmp_path / "other"
    other.write_text("08" * 32)
    for command in ("show", "verify"):
        code, report = answer(capsys, command, f"{coded}@2" if command == "show" else coded)
        text = json.dumps(report)
        assert code == 2 and "is encrypted, and no key was given" in text, text
        code, report = answer(capsys, command, coded, "--key-file", other)
        assert code == 1 and "key" in json.dumps(report)
    for command in ("show", "verify", "ls"):
        code, report = answer(capsys, command, plain.replace("plain", "absent"))
        assert code == 2 and "absent" in report["error"], report
    for command in ("show", "verify"):
        code, report = answer(capsys, command, f"{plain}@7")
        assert code == 2 and "no snapshot of step 7" in report["error"], report
    assert answer(capsys, "show", "nowhere://bucket/run")[0] == 2
    if plain.startswith("memory"):
        code, report = answer(capsys, "pin", plain)
        assert code == 2 and "is a store; this works on directories" in report["error"]


def test_damage_in_a_store_is_found_by_verify_and_ls(tmp_path, capsys):
    import fsspec

    url = f"memory://{tmp_path.name}/run"
    with Snapshots(tmp_path / "near", tiers=[Tier(url)]) as snapshots:
        snapshots.save(1, small_state(1)).wait("remote")
    memory = fsspec.filesystem("memory")
    (data,) = (path for path in memory.find(f"/{tmp_path.name}") if path.endswith("safetensors"))
    memory.pipe_file(data, memory.cat_file(data)[:-1] + b"\x99")
    code, report = answer(capsys, "verify", url)
    assert code == 1 and "CRC32C" in report["snapshots"][0]["damage"][0]
    assert answer(capsys, "ls", url)[0] == 0  # which reads no data
    folder = data.rpartition("/")[0].rpartition("/")[2]
    assert answer(capsys, "verify", f"{url}/{folder}")[0] == 1
    memory.rm_file(data)
    code, report = answer(capsys, "ls", url)
    assert code == 1 and "is missing" in report["snapshots"][0]["reason"]
