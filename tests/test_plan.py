"""What is refused before any rank starts: grid, model, batch, schedule, text and folder, each with its reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plait.plan
from plait.block import Options
from plait.ckpt import Snapshots
from plait.config import ConfigError, parse
from plait.model import LlamaStage, plan_stages
from plait.model_config import model_config
from plait.parallel.gradients import inseparable
from plait.parallel.mesh import Axis
from plait.parallel.schedules import Op, Schedule, one_f_one_b
from plait.parallel.schedules.action import singles
from plait.plan import make_plan

# flags, what the message must say: first the flag and the value that the user typed, then the reason
BAD = (
    ("--mesh dp=two", "--mesh dp=two: cannot read 'dp=two'"),
    ("--mesh dp=2,dp=2", "--mesh dp=2,dp=2: axis 'dp' is given twice"),
    ("--mesh dp=0", "--mesh dp=0: mesh axis dp=0: a size must be an integer of at least 1"),
    ("--mesh ep=2", "--mesh ep=2: no layer splits along 'ep'; valid axes: dp, pp, tp"),
    ("--mesh cp=2", "--mesh cp=2: no layer splits along 'cp'"),
    ("--mesh tp=3", "--mesh tp=3: tp is 3; it must divide num_heads = 8"),
    ("--mesh pp=5", "--mesh pp=5: num_stages is 5; it must be in [1, 4]"),
    ("--mesh pp=4 --schedule interleaved --chunks 2", "--mesh pp=4, --chunks 2: num_stages is 8"),
    (
        "--mesh tp=2 --seq 33 --sequence-parallel",
        "--mesh tp=2, --seq 33: seq is 33; under sequence parallel it must be a multiple of tp = 2",
    ),
    (
        "--mesh dp=2 --global-batch 7",
        "--mesh dp=2, --global-batch 7, --micro-batch 2: global_batch is 7; it must be a multiple of dp x",
    ),
    (
        "--global-batch 4 --micro-batch 3",
        "--mesh dp=1, --global-batch 4, --micro-batch 3: global_batch is 4; it must be a multiple of dp x",
    ),
    (
        "--mesh pp=2 --layers-of 1,2",
        "--mesh pp=2, --layers-of 1,2: layers_of=[1, 2]: must be 2 counts, one per stage, of 1 or more, that add up",
    ),
    ("--mesh pp=2 --layers-of 4,0", "--mesh pp=2, --layers-of 4,0: layers_of=[4, 0]: must be 2 counts"),
    ("--mesh pp=2 --layers-of 2;2", "--mesh pp=2, --layers-of 2;2: it takes layers per stage, comma separated, or"),
    ("--mesh dp=1 --zero 3", "--zero 3: zero=3 shards over dp, which has one rank; use zero=0"),
    ("--mesh dp=2,pp=2 --zero 3 --schedule zb_h1", "--zero 3: zero=3 with schedule zb_h1: it splits backward"),
    (
        "--mesh dp=2,tp=2 --zero 3 --node-size 2",
        "--zero 3, --node-size 2: zero=3 in nodes of 2 ranks needs several nodes with as many ranks of dp each, "
        "2 or more; one dp group is ranks (0, 2)",
    ),
    ("--mesh dp=2 --zero 3 --bucket-mib 8", "--bucket-mib 8, --zero 3: FSDP2 sums the gradients of each layer"),
    ("--mesh dp=2 --zero 3 --node-size 8", "--zero 3, --node-size 8: zero=3 in nodes of 8 ranks needs several nodes"),
    ("--dtype float64 --wire-dtype bfloat16", "--wire-dtype bfloat16, --dtype float64: the digits of a float64 run"),
    ("--mesh dp=4,tp=2 --node-size 3", "--node-size 3, --mesh dp=4,tp=2: the grid has 8 ranks, which nodes of 3 do"),
    ("--seq 100000000", "--seq 100000000: seq is 100000000; the training part of"),
)


@pytest.mark.parametrize(("flags", "message"), BAD, ids=[flags for flags, _ in BAD])
def test_what_cannot_run_is_refused_by_the_name_of_its_flag(tmp_path: Path, flags: str, message: str) -> None:
    """Messages once spoke of `tp`, `num_stages` or `mesh` to a user who had typed --mesh."""
    with pytest.raises(ConfigError) as caught:
        make_plan(parse([*flags.split(), "--out", str(tmp_path / "run")]))
    assert str(caught.value).startswith(message)


def test_an_empty_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"")
    with pytest.raises(ConfigError, match="^--data .*text: .* is empty"):
        make_plan(parse(["--data", str(tmp_path / "text"), "--out", str(tmp_path / "run")]))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="--out: .* cannot be: Not a directory"):
        make_plan(parse(["--out", str(tmp_path / "file" / "run")]))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_a_plan_holds_a_checked_schedule(tmp_path: Path, schedule: str) -> None:
    flags = f"--mesh dp=2,pp=2,tp=2 --schedule {schedule} --out {tmp_path / 'run'}"
    plan = make_plan(parse(flags.split()))
    assert plan.world_size == 8 and plan.num_microbatches == 4
    assert plan.schedule.num_ranks == 2 and plan.schedule.tied
    assert plan.schedule.num_stages == (4 if schedule == "interleaved" else 2)


def test_layers_per_stage_are_listed_or_balanced(tmp_path: Path) -> None:
    """The planner's counts reach the model: they could be priced but not trained with."""
    flags = f"--mesh pp=2 --out {tmp_path / 'run'} --layers-of"
    assert make_plan(parse(f"{flags} 3,1".split())).layers_of == (3, 1)
    assert make_plan(parse(f"{flags} 1,1,1,1 --schedule search".split())).schedule.num_stages == 4
    plan = make_plan(parse(f"{flags} balanced --preset 125m --global-batch 4 --seq 64".split()))
    assert plan.layers_of is not None and sum(plan.layers_of) == plan.model.num_layers
    assert plan.layers_of[0] > plan.layers_of[1], "the head counts"


def uses_w(plan: plait.plan.RunPlan) -> bool:
    return any(single.op is Op.W for lane in plan.schedule.lanes for single in singles(lane))


def test_search_splits_backward_only_where_the_model_and_zero_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parallel case 62: nobody has to say --no-split; the module itself is asked."""
    asked, search = [], plait.plan.search

    def asking(*arguments: Any, split: bool) -> Schedule:
        asked.append(split)
        return search(*arguments, split=split)

    monkeypatch.setattr(plait.plan, "search", asking)
    flags = f"--mesh dp=2,pp=4 --schedule search --out {tmp_path / 'run'}".split()
    plan = make_plan(parse(flags))
    again = make_plan(parse(flags))
    assert plan.schedule == again.schedule and plan.schedule.num_ranks == 4 and plan.schedule.tied
    assert not uses_w(make_plan(parse([*flags, "--zero", "3"])))
    whole = nn.Sequential(plait.plan.one_block_model(plan.model), nn.Linear(2, 2))
    monkeypatch.setattr(plait.plan, "one_block_model", lambda model: whole)
    assert not uses_w(make_plan(parse(flags))) and asked == [True, True, False, False]


@pytest.mark.parametrize("tied", [False, True])
def test_no_stage_of_the_model_says_that_it_cannot_split(tied: bool) -> None:
    """The last stage of a tied model did, for the second name of its head's weight: so a run's own costs kept every
    split schedule from `search`."""
    model = replace(model_config("tiny"), tied=tied)
    for num_stages in (1, 2, 4):
        stages = plan_stages(model, one_f_one_b(num_stages, 2))
        for index in range(num_stages):
            stage = LlamaStage(model, index, stages, Axis.single(), Options(device="meta"))
            assert inseparable(stage) == (), (num_stages, index)
    bare = nn.Module()  # its weight is somebody else's business: it says so
    bare.weight = nn.Parameter(torch.zeros(2, 2))
    assert inseparable(nn.Sequential(bare)) == ("0",)


def test_metrics_that_cannot_be_written_are_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    beyond = Path("/proc/a.json")  # root may, by the bits
    for target, message in ((tmp_path, "is a folder; name a file"), (beyond, "cannot make")):
        with pytest.raises(ConfigError, match=f"--json: .*{message}"):
            make_plan(parse(["--json", str(target), "--out", str(tmp_path / "run")]))
    make_plan(parse(["--json", str(tmp_path / "a.json"), "--out", str(tmp_path / "run")]))
    assert not (tmp_path / "a.json").exists(), "nothing lies there before the run has ended"


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--schedule", "/nowhere/a.csv"], "--schedule: cannot read '/nowhere/a.csv': No such file"),
        (["--schedule", "FOLDER.csv"], "--schedule: cannot read .*: Is a directory"),
        (["--global-batch", "9" * 20, "--micro-batch", "1"], "micro-batches a step; a schedule has at most 65536"),
    ],
)
def test_what_the_schedule_is_made_of_is_refused_in_one_line(flags, message, tmp_path) -> None:
    """A file that was not there ended in a traceback; a batch without bounds in nothing, for ever."""
    (tmp_path / "FOLDER.csv").mkdir()
    flags = [str(tmp_path / flag) if flag == "FOLDER.csv" else flag for flag in flags]
    with pytest.raises(ConfigError, match=message):
        make_plan(parse([*flags, "--out", str(tmp_path / "run")]))


def test_a_home_that_cannot_hold_the_default_text_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(plait.plan, "cache_folder", lambda: tmp_path / "file" / "cache")
    with pytest.raises(ConfigError, match="--data: cannot put the default text together in .*; name a text file"):
        make_plan(parse(["--out", str(tmp_path / "run")]))


def test_a_user_without_a_home_may_name_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number: no HOME, no entry in the users' list."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(plait.plan, "cache_folder", homeless)
    with pytest.raises(ConfigError, match="--data: no place for the default text: .* Name a text file with --data"):
        make_plan(parse(["--out", str(tmp_path / "run")]))
    (tmp_path / "text").write_text("some words of a text. " * 500)
    make_plan(parse(["--out", str(tmp_path / "run"), "--data", str(tmp_path / "text")]))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run folder with a snapshot of step 3 that holds what makes the run, and nothing else."""
    run = make_plan(parse(["--out", str(tmp_path / "run")])).identity.state_dict()
    with Snapshots(tmp_path / "run") as snapshots:
        snapshots.save(3, {"progress": {"run": run}})
    return tmp_path / "run"


# flags, what the message must say
OTHER_RUNS = (
    ("--preset small", "holds another model (dim is 256, not 128; "),
    ("--seed 5", "--seed is 5, but"),
    ("--dtype bfloat16", "--dtype is bfloat16, but"),
    ("--global-batch 32", "--global-batch is 32, but"),
    ("--seq 64", "--seq is 64, but"),
    ("--data TEXT", "was made on another text"),
    ("--resume 4", "--resume 4:"),
)


@pytest.mark.parametrize(("flags", "message"), OTHER_RUNS, ids=[flags for flags, _ in OTHER_RUNS])
def test_a_snapshot_of_another_run_is_refused_before_a_rank_starts(saved: Path, flags: str, message: str) -> None:
    (saved / "TEXT").write_bytes(b"another text " * 1000)
    with pytest.raises(ConfigError) as caught:
        make_plan(parse([*flags.replace("TEXT", str(saved / "TEXT")).split(), "--out", str(saved)]))
    assert message in str(caught.value) and "step-000000003" in str(caught.value)


def test_from_may_go_on_with_another_text_but_not_with_another_model(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"another text " * 1000)
    base = ["--out", str(tmp_path / "new"), "--from", str(saved)]
    make_plan(parse([*base, "--data", str(tmp_path / "text"), "--seq", "16", "--global-batch", "32"]))
    with pytest.raises(ConfigError, match="holds another model"):
        make_plan(parse([*base, "--preset", "small"]))
    with pytest.raises(ConfigError, match=r"--from .*@4: .* holds step-000000003"):
        make_plan(parse(["--out", str(tmp_path / "new"), "--from", f"{saved}@4"]))
    with pytest.raises(ConfigError, match=r"--from .* holds no snapshot"):
        make_plan(parse(["--out", str(tmp_path / "new"), "--from", str(tmp_path)]))


def test_from_is_not_ignored_when_out_has_snapshots(saved: Path, tmp_path: Path) -> None:
    """It was: the run went on from --out and said nothing. --resume says that this is meant."""
    base = ["--out", str(saved), "--from", f"{saved}@3"]
    for flags in ([], ["--resume", "none"]):
        with pytest.raises(ConfigError) as caught:
            make_plan(parse([*base, *flags]))
        said = str(caught.value)
        assert said.startswith(f"--from {saved}@3: --out {saved} already holds step-000000003;")
        assert "--resume latest" in said and "another --out" in said
    make_plan(parse([*base, "--resume", "latest"]))
    make_plan(parse([*base, "--resume", "3"]))
    make_plan(parse(["--from", str(saved), "--out", str(tmp_path / "new"), "--resume", "latest"]))
