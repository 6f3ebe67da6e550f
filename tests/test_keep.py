"""Retention: what the policy gives up, and that it never touches anything else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait import _C
from plait.ckpt import SnapshotError, Snapshots
from plait.ckpt.folders import StepFolder, collect_garbage, parse_step, step_folders, step_name
from plait.ckpt.keep import Policy, pin, pinned_folders, reading, unpin
from tests.faults import flip, restored_seed, small_state


def folders(*steps: int) -> list[StepFolder]:
    return [StepFolder(step, 1, Path(step_name(step))) for step in steps]


def kept(policy: Policy, steps: list[int], written: int) -> list[int]:
    gone = policy.given_up(folders(*steps), folders(written)[0])
    return [step for step in steps if step not in {f.step for f in gone}]


# policy, steps, the one just written, what stays
@pytest.mark.parametrize(
    ("policy", "steps", "written", "left"),
    [
        (Policy(3), [10, 20, 30, 40], 40, [20, 30, 40]),
        (Policy(1), [10, 20], 20, [20]),
        (Policy(2, 20), [10, 20, 30, 40, 50, 60], 60, [20, 40, 50, 60]),
        (Policy(2, 7), [0, 1, 2, 3], 3, [0, 2, 3]),
        (Policy(None), [1, 2, 3], 3, [1, 2, 3]),
        (Policy(2), [10, 20, 100, 200], 20, [10, 20, 100, 200]),  # the run went back: 100 and 200 are not its past
        (Policy(1), [10, 20, 100, 200], 20, [20, 100, 200]),
        (Policy(1), [], 5, []),
    ],
)
def test_what_stays(policy, steps, written, left):
    assert kept(policy, steps, written) == left


@given(st.integers(1, 5), st.none() | st.integers(1, 5), st.sets(st.integers(0, 30), min_size=1), st.data())
def test_the_one_written_and_the_newest_stay(keep_last, keep_every, steps, data):
    written = data.draw(st.sampled_from(sorted(steps)))
    left = kept(Policy(keep_last, keep_every), sorted(steps), written)
    past = [s for s in sorted(steps) if s <= written]
    assert written in left and set(past[-keep_last:]) <= set(left) and set(steps) - set(past) <= set(left)
    assert len(left) >= min(keep_last, len(past))


def test_of_one_step_the_newest_generation_stays():
    old, new = StepFolder(5, 1, Path("step-000000005")), StepFolder(5, 2, Path("step-000000005-2"))
    assert Policy(3).given_up([old, new], new) == [old]


def test_names_follow_one_grammar():
    assert parse_step(Path("step-000000012")) == StepFolder(12, 1, Path("step-000000012"))
    assert parse_step(Path("step-1234567890-3")) is not None
    for name in (
        "step-12",
        "step-000000012-1",
        "step-000000012-02",
        "step-0000000012",
        "step-000000012.bak",
        "xstep-000000012",
    ):
        assert parse_step(Path(name)) is None, name


def test_saves_keep_k_and_every_nth(tmp_path):
    with Snapshots(tmp_path, keep_last=2, keep_every=3) as snapshots:
        for step in range(1, 9):
            snapshots.save(step, small_state(step))
    assert sorted(f.step for f in step_folders(tmp_path)) == [3, 6, 7, 8]
    assert restored_seed(tmp_path) == 8


def test_old_ones_go_only_after_the_new_one_is_durable(tmp_path):
    """Case 13 and L9: in the order of operations, the first removal comes after rename and sync of the new one."""
    with Snapshots(tmp_path, keep_last=1) as snapshots:
        snapshots.save(1, small_state(1))
    io = _C.FaultIo([])
    with Snapshots(tmp_path, keep_last=1, io=io) as snapshots:
        snapshots.save(2, small_state(2))
    ops = io.ops
    commit = next(i for i, (name, path) in enumerate(ops) if name == "rename" and path.endswith("step-000000002"))
    assert ops[commit + 1] == ("fsync_dir", str(tmp_path))
    trash = next(i for i, (name, path) in enumerate(ops) if name == "rename" and ".trash-" in path)
    unlinks = [(i, Path(path).name) for i, (name, path) in enumerate(ops) if name == "unlink"]
    assert trash > commit + 1 and ops[trash + 1] == ("fsync_dir", str(tmp_path))
    assert unlinks[0][0] > trash + 1 and unlinks[0][1] == "MANIFEST.json"


def test_one_that_is_read_is_not_removed(tmp_path):
    with Snapshots(tmp_path, keep_last=1) as snapshots:
        first = snapshots.save(1, small_state(1))
        first.wait()
        assert first.folder is not None
        with reading(first.folder):
            snapshots.save(2, small_state(2)).wait()
            assert first.folder.is_dir()
        snapshots.save(3, small_state(3)).wait()
        assert not first.folder.is_dir()


def test_damaged_foreign_and_later_ones_are_left_alone(tmp_path):
    import shutil

    with Snapshots(tmp_path / "other") as snapshots:
        snapshots.save(4, small_state(4))
    with Snapshots(tmp_path / "run", keep_last=1) as snapshots:
        snapshots.save(1, small_state(1)).wait()
        shutil.copytree(tmp_path / "other" / "step-000000004", tmp_path / "run" / "step-000000004")
        flip(tmp_path / "run" / "step-000000001" / "MANIFEST.json", 30)
        for step in (5, 6):
            snapshots.save(step, small_state(step)).wait()
    assert sorted(f.step for f in step_folders(tmp_path / "run")) == [1, 4, 6]


def test_garbage_collection_removes_only_its_own_names(tmp_path):
    """Case 19: a copied folder, and anything that does not follow the grammar, is not temporary."""
    snapshots = Snapshots(tmp_path)
    session = "0123456789abcdef"
    mine = [f".tmp-5-{session}-1", f".trash-{session}-step-000000004", f".tmp-restore-{session}-2"]
    other = [".tmp-5", ".trash", "step-000000009", ".tmp-5-xyz-1", f".tmp-5-{session}-1.bak", "notes.txt.part"]
    for name in (*mine, *other):
        (tmp_path / name).mkdir()
    (tmp_path / mine[0] / "r00000.safetensors").write_bytes(b"x")
    (tmp_path / mine[1] / "MANIFEST.json").write_bytes(b"x")
    (tmp_path / "LATEST.part").write_bytes(b"x")
    removed = collect_garbage(_C.PosixIo(), tmp_path, "f" * 16)
    assert sorted(removed) == sorted([*mine, "LATEST.part"])
    assert set(other) <= set(os.listdir(tmp_path))
    snapshots.close()


def test_a_foreign_file_in_a_dead_attempt_is_not_removed(tmp_path):
    folder = tmp_path / f".tmp-5-{'0' * 16}-1"
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    (folder / "r00000.json").write_text("x")
    collect_garbage(_C.PosixIo(), tmp_path, "f" * 16)
    assert os.listdir(folder) == ["thesis.txt"]


LOSSES = st.none() | st.floats(allow_nan=True, allow_infinity=True)
HISTORIES = st.lists(st.tuples(LOSSES, st.booleans()), min_size=1, max_size=25)  # (loss, pinned) by step


@given(
    HISTORIES, st.integers(1, 4), st.none() | st.integers(2, 6), st.integers(1, 3), st.sampled_from(["min", "max"])
)
def test_over_any_history_each_rule_holds_and_nothing_else_stays(history, last, every, best, direction):
    policy = Policy(last, every, ("loss", direction, best))
    there: list[StepFolder] = []
    metrics, pinned = {}, set()
    for step, (loss, is_pinned) in enumerate(history, start=1):
        written = folders(step)[0]
        there.append(written)
        metrics[written] = {} if loss is None else {"loss": loss}
        pinned |= {written} if is_pinned else set()
        gone = policy.given_up(there, written, pinned, metrics)
        assert gone == sorted(gone) and written not in gone
        there = [f for f in there if f not in gone]
    steps = {f.step for f in there}
    sign = 1 if direction == "min" else -1
    scored = [(sign * v, -s) for s, (v, _) in enumerate(history, start=1) if v is not None and v == v]
    rules = [set(range(max(1, len(history) - last + 1), len(history) + 1)), {-s for _, s in sorted(scored)[:best]}]
    rules.append({f.step for f in pinned})
    rules.append(set() if every is None else {s for s in range(1, len(history) + 1) if s % every == 0})
    assert steps == set().union(*rules)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=20))
def test_a_run_that_goes_back_loses_neither_its_past_nor_the_other_future(saves):
    """Steps in any order, again and again: the newest of the past stays, and later ones are never touched."""
    policy, there = Policy(2), []
    for step, _ in saves:
        generation = 1 + max((f.generation for f in there if f.step == step), default=0)
        written = StepFolder(step, generation, Path(step_name(step, generation)))
        there.append(written)
        later = {f for f in there if f[:2] > written[:2]}
        gone = policy.given_up(there, written)
        assert written not in gone and not later & set(gone)
        there = [f for f in there if f not in gone]
        past = sorted((f for f in there if f not in later), reverse=True)
        assert past[0] == written and len(past) <= 2


@pytest.mark.parametrize(
    "wrong",
    [{"keep_last": 0}, {"keep_every": 0}, {"keep_best": ("loss", "least", 1)}, {"keep_best": ("loss", "min", 0)}],
)
def test_a_wrong_policy_is_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Policy(**wrong)


def test_the_best_by_a_metric_stay(tmp_path):
    with Snapshots(tmp_path, keep_last=1, keep_best=("loss", "min", 2)) as snapshots:
        for step, loss in enumerate([3.0, 0.5, float("nan"), 0.25, 0.75, 9.0], start=1):
            snapshots.save(step, small_state(step), metrics={"loss": loss, "lr": 1})
        with pytest.raises(ValueError, match="'loss' is True; names are strings and values numbers"):
            snapshots.save(7, small_state(7), metrics={"loss": True})
    assert sorted(f.step for f in step_folders(tmp_path)) == [2, 4, 6]
    assert restored_seed(tmp_path) == 6  # metrics are no part of the state


def test_a_pinned_one_stays_until_it_is_unpinned(tmp_path):
    io = _C.PosixIo()
    with Snapshots(tmp_path, keep_last=1) as snapshots:
        first = snapshots.save(1, small_state(1))
        first.wait()
        assert first.folder is not None
        pin(io, first.folder)
        pin(io, first.folder)
        snapshots.save(2, small_state(2)).wait()
        assert {f.step for f in pinned_folders(tmp_path)} == {1} and first.folder.is_dir()
        assert unpin(io, first.folder) and not unpin(io, first.folder)
        snapshots.save(3, small_state(3)).wait()
        assert sorted(f.step for f in step_folders(tmp_path)) == [3]
        for name in ("step-000000001", "notes"):
            with pytest.raises(SnapshotError, match="is no snapshot|has not the name"):
                pin(io, tmp_path / name)
        assert not (tmp_path / "PIN-step-000000001").exists()


def test_nothing_is_removed_when_the_new_one_is_damaged_at_once(tmp_path, monkeypatch):
    """The last good one stays: between commit and retention the new one lost a byte."""
    with Snapshots(tmp_path, keep_last=1) as snapshots:
        snapshots.save(1, small_state(1)).wait()
        from plait.ckpt import background

        def hurt(writer, folder):
            flip(folder / "MANIFEST.json", 40)

        monkeypatch.setattr(background, "publish_latest", hurt)
        snapshots.save(2, small_state(2)).wait()
    assert sorted(f.step for f in step_folders(tmp_path)) == [1, 2] and restored_seed(tmp_path) == 1
