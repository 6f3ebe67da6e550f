"""`plait train` end to end on small grids: resume, other grids, determinism, stopping, and every refusal.

Bits are compared with `plait snapshot diff`, which compares full tensors and values whatever the grids.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from plait.ckpt import cli as snapshot_cli
from plait.config import ConfigError, parse
from plait.parallel import cli as schedule_cli
from plait.plan import EVAL_BATCHES, elastic_plan
from plait.train_cli import main
from tests import launchers

pytestmark = pytest.mark.ranks

SMALL = "--seq 16 --global-batch 8 --micro-batch 2 --save-every 100"


def run(flags: str) -> str:
    """Trains to the end; returns the output."""
    status, out = launchers.train(f"{SMALL} {flags}".split())
    assert status == 0, out
    return out


def metrics(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text())


def assert_equal(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two run folders hold the same newest snapshot, bit for bit."""
    capsys.readouterr()
    status = snapshot_cli.main(["diff", str(a), str(b)])
    assert status == 0, capsys.readouterr().out


def test_one_process_needs_no_process_group(tmp_path: Path) -> None:
    out = run(f"--steps 3 --out {tmp_path / 'run'} --json {tmp_path / 'said.json'}")
    assert "ranks: pids" not in out and "step 3/3" in out and "held-out loss" in out
    said = json.loads((tmp_path / "said.json").read_text())
    assert said["step"] == 3 and said["tokens"] == 3 * 8 * 16 and 3.0 < said["held_out_loss"] < 6.0
    assert said["config"]["seq"] == 16 and said["mfu"] is None
    assert (tmp_path / "run" / "loss.png").stat().st_size > 1000
    assert (tmp_path / "run" / "step-000000003" / "MANIFEST.json").is_file()


@pytest.mark.parametrize(
    "grid",
    [
        "--mesh dp=1",
        "--mesh dp=2 --zero 2 --dropout 0.1",
        pytest.param("--mesh dp=2 --zero 3 --dtype bfloat16", marks=pytest.mark.long),
        "--mesh dp=2,tp=2 --zero 1 --sequence-parallel --recompute selective --dropout 0.1",
        pytest.param("--mesh pp=2,tp=2 --schedule interleaved --recompute full", marks=pytest.mark.long),
        pytest.param("--mesh dp=2,pp=2 --dtype bfloat16", marks=pytest.mark.long),
    ],
)
def test_four_steps_and_two_more_equal_six(tmp_path: Path, grid: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(f"{grid} --steps 6 --out {tmp_path / 'straight'}")
    run(f"{grid} --steps 4 --out {tmp_path / 'halves'}")
    out = run(f"{grid} --steps 6 --out {tmp_path / 'halves'}")
    assert "resumed from" in out and "step 5/6" in out and "step 4/6" not in out
    assert_equal(tmp_path / "straight", tmp_path / "halves", capsys)
    for key in ("loss", "held_out_loss", "tokens", "step"):
        assert metrics(tmp_path / "straight")[key] == metrics(tmp_path / "halves")[key], key


def test_a_snapshot_goes_to_another_zero_stage_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(f"--mesh dp=2,pp=2 --zero 3 --dtype bfloat16 --steps 2 --out {tmp_path / 'three'}")
    one = "--mesh dp=2 --zero 1 --dtype bfloat16 --bucket-mib measured"
    out = run(f"{one} --steps 2 --from {tmp_path / 'three'} --out {tmp_path / 'one'}")
    run(f"--mesh dp=2 --zero 3 --dtype bfloat16 --steps 2 --from {tmp_path / 'one'} --out {tmp_path / 'back'}")
    assert re.search(r"buckets of (\d+) MiB, as measured; --bucket-mib \1 keeps them", out), out
    nodes = "--mesh dp=4 --zero 3 --node-size 2 --dtype bfloat16"
    run(f"{nodes} --steps 2 --from {tmp_path / 'one'} --out {tmp_path / 'nodes'}")
    assert_equal(tmp_path / "three", tmp_path / "nodes", capsys)
    assert_equal(tmp_path / "three", tmp_path / "one", capsys)
    assert_equal(tmp_path / "three", tmp_path / "back", capsys)


def test_same_seed_same_bits_other_seed_other_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = "--mesh dp=2,tp=2 --steps 3 --dropout 0.1"
    run(f"{grid} --out {tmp_path / 'a'}")
    run(f"{grid} --out {tmp_path / 'b'}")
    run(f"{grid} --out {tmp_path / 'c'} --seed 1")
    assert_equal(tmp_path / "a", tmp_path / "b", capsys)
    assert snapshot_cli.main(["diff", str(tmp_path / "a"), str(tmp_path / "c")]) == 1


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 x 2 x 2, with a snapshot of step 2 and the loss of step 4."""
    out = tmp_path_factory.mktemp("eight") / "run"
    run(f"--mesh dp=2,pp=2,tp=2 --steps 2 --out {out} --keep 9")
    run(f"--mesh dp=2,pp=2,tp=2 --steps 4 --out {out} --keep 9")
    assert schedule_cli.main(["show", "--measured", str(out)]) == 0
    return out


@pytest.mark.parametrize("mesh", ["dp=1,pp=1,tp=1", "dp=4,pp=1,tp=2", "dp=1,pp=4,tp=1", "dp=2,pp=1,tp=4"])
def test_a_snapshot_goes_to_another_grid(
    tmp_path: Path, eight: Path, mesh: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(f"--mesh {mesh} --steps 2 --from {eight}@2 --out {tmp_path / 'cut'}")
    status = snapshot_cli.main(["diff", str(eight / "step-000000002"), str(tmp_path / "cut")])
    assert status == 0, capsys.readouterr().out
    out = run(f"--mesh {mesh} --steps 4 --out {tmp_path / 'cut'}")
    assert "resumed from" in out
    assert metrics(tmp_path / "cut")["loss"] == pytest.approx(metrics(eight)["loss"], rel=1e-4)


def test_the_loss_does_not_depend_on_the_grid(tmp_path: Path) -> None:
    losses = []
    for index, grid in enumerate(
        ["dp=1", "dp=2,tp=2", "pp=4", "dp=2,pp=2 --zero 0 --schedule gpipe --layers-of 3,1"]
    ):
        run(f"--mesh {grid} --steps 5 --dropout 0.1 --out {tmp_path / str(index)}")
        losses.append(metrics(tmp_path / str(index))["loss"])
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-4)
    (tmp_path / "wire.toml").write_text('wire-dtype = "bfloat16"\nnode-size = 2\nzero = 2\nbucket-mib = 1\n')
    run(f"--mesh dp=4 --steps 5 --dropout 0.1 --config {tmp_path / 'wire.toml'} --out {tmp_path / 'wire'}")
    narrow = metrics(tmp_path / "wire")["loss"]
    assert narrow == pytest.approx(losses[0], rel=1e-2) and abs(narrow - losses[0]) > 1e-6


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2,pp=2"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_finishes_the_step_saves_and_exits_0(tmp_path: Path, mesh: str, number: signal.Signals) -> None:
    flags = f"{SMALL} --mesh {mesh} --steps 100000 --out {tmp_path / 'run'}"
    running = launchers.start(flags.split())
    assert running.read_until("step 3/100000")
    os.kill(running.pid, number)
    status, out = running.finish()
    assert status == 0, out
    done = max(int(line.split()[1].split("/")[0]) for line in out.splitlines() if line.startswith("step "))
    assert f"stopped at step {done} of 100000; it is saved" in out
    assert (tmp_path / "run" / f"step-{done:09d}" / "MANIFEST.json").is_file()
    if mesh != "dp=1":
        launchers.assert_gone(running.rank_pids)


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2,pp=2"])
def test_sigusr1_to_the_launcher_saves_once_and_the_run_goes_on(tmp_path: Path, mesh: str) -> None:
    flags = f"{SMALL} --mesh {mesh} --steps 100000 --save-every 90000 --out {tmp_path / 'run'}"
    running = launchers.start(flags.split())
    assert running.read_until("step 3/100000")
    os.kill(running.pid, signal.SIGUSR1)
    assert running.read_until("durable")
    (folder,) = (tmp_path / "run").glob("step-*/MANIFEST.json")
    step = int(folder.parent.name.removeprefix("step-"))
    assert running.read_until(f"step {step + 20}/100000")
    assert list((tmp_path / "run").glob("step-*/MANIFEST.json")) == [folder]
    os.kill(running.pid, signal.SIGTERM)
    status, out = running.finish()
    assert status == 0 and "stopped at step" in out, out


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2,pp=2"])
@pytest.mark.parametrize("numbers", [[signal.SIGHUP, signal.SIGHUP], []], ids=["hangup", "reader_left"])
def test_a_run_whose_output_is_gone_saves_before_it_ends(tmp_path: Path, mesh: str, numbers: list[int]) -> None:
    """The broken pipe ended it before the save."""
    out = tmp_path / "run"
    running = launchers.start(f"{SMALL} --mesh {mesh} --steps 100000 --out {out}".split())
    assert running.read_until("step 3/100000")
    running.out.close()
    for number in numbers:
        os.kill(running.pid, number)
    assert running.wait() == (0 if numbers else 128 + signal.SIGPIPE)
    assert len(list(out.glob("step-*/MANIFEST.json"))) == 1
    assert json.loads((out / "summary.json").read_text())["step"] >= 3


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2,pp=2"])
def test_a_signal_during_the_evaluation_ends_it_at_a_batch_with_exit_0(tmp_path: Path, mesh: str) -> None:
    """Case 40. It was not looked at: the evaluation went on to its end, or to the kill after the stop bound.

    On the grid one rank alone is asked, so that all stop at one batch only if they agree on it.
    """
    flags = f"--global-batch 64 --micro-batch 8 --seq 64 --mesh {mesh} --steps 1 --out {tmp_path / 'run'}"
    running = launchers.start(flags.split(), evaluate=EVAL_BATCHES)
    assert running.read_until("snapshot 1 durable")
    os.kill(running.pid if mesh == "dp=1" else running.rank_pids[1], signal.SIGTERM)
    status, out = running.finish()
    assert status == 0, out
    assert "--- summary" in out and "held-out loss: none; stopped after" in out
    said = metrics(tmp_path / "run")
    assert said["held_out_loss"] is None and said["evaluation"].startswith("stopped after") and said["step"] == 1
    status, out = launchers.train(flags.split())
    assert status == 0 and "nothing left to train" in out and metrics(tmp_path / "run")["held_out_loss"] > 3.0


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2"])
def test_a_second_run_in_the_same_folder_is_refused_before_a_rank_starts(tmp_path: Path, mesh: str) -> None:
    """Its ranks once started first, and it ended with 1 and a traceback."""
    flags = f"{SMALL} --mesh {mesh} --out {tmp_path / 'run'} --steps".split()
    first = launchers.start([*flags, "100000"])
    assert first.read_until("step 1/")
    owner = first.pid if mesh == "dp=1" else first.rank_pids[0]
    status, out = launchers.train([*flags, "100001"])
    assert status == 3, out
    assert "ranks: pids" not in out and "Traceback" not in out and len(out.splitlines()) == 1
    assert f"plait train: --out {tmp_path / 'run'}:" in out and f"is held by process {owner} on host" in out
    os.kill(first.pid, signal.SIGTERM)
    assert first.finish()[0] == 0


def test_a_killed_rank_is_named_and_nothing_half_is_left(tmp_path: Path) -> None:
    running = launchers.start(f"{SMALL} --mesh dp=2,tp=2 --steps 100000 --out {tmp_path / 'run'}".split())
    assert running.read_until("step 2/")
    assert len(os.listdir(f"/proc/{running.pid}/task")) == 1, "a launcher with threads must not fork"
    os.kill(running.rank_pids[3], signal.SIGKILL)
    status, out = running.finish()
    assert status == 1 and f"rank 3 (pid {running.rank_pids[3]}) was killed by SIGKILL" in out
    launchers.assert_gone(running.rank_pids)
    assert not list((tmp_path / "run").glob("step-*"))


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2"])
def test_a_touched_file_saves_after_the_step_under_way(tmp_path: Path, mesh: str) -> None:
    (tmp_path / "save-now").touch()
    out = run(f"--steps 3 --out {tmp_path} --mesh {mesh} --keep 1 --keep-best 1 --save auto --mtbf-hours 1")
    assert sorted(path.name for path in tmp_path.glob("step-*"))[-1] == "step-000000003"
    assert "snapshots every" in out and "cost" in out and not (tmp_path / "save-now").exists()
    losses = [json.loads((path / "MANIFEST.json").read_text().splitlines()[0]) for path in tmp_path.glob("step-*")]
    assert len(losses) in (1, 2) and all(float.fromhex(each["metrics"]["loss"]) > 3 for each in losses)


def test_a_second_start_reports_the_recovery_and_a_third_has_nothing_to_do(tmp_path: Path) -> None:
    flags = f"--mesh dp=2 --out {tmp_path / 'run'}"
    running = launchers.start(f"{SMALL} {flags} --save-every 2 --steps 100000".split())
    assert running.read_until("snapshot 2 durable") and running.read_until("^step ")
    os.kill(running.pid, signal.SIGKILL)
    assert running.finish()[0] == -signal.SIGKILL
    launchers.assert_gone(running.rank_pids)
    steps = max(
        json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1:]
    )
    out = run(f"{flags} --steps {steps + 2}")
    assert "RTO, kill to regained step" in out
    said = metrics(tmp_path / "run")
    assert said["rto_s"] > said["restart_s"] > 0.0 and 0.0 < said["goodput"] < 1.0
    out = run(f"{flags} --steps {steps + 2}")
    assert f"nothing left to train: step {steps + 2} of {steps + 2} is done" in out and "RTO" not in out
    assert not list((tmp_path / "run").glob(".tmp-*")), "what the ranks said to each other during the restore"


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    flags = f"{SMALL} --mesh dp=2 --steps 50 --lr 1e30 --out {tmp_path / 'run'}"
    status, out = launchers.train(flags.split())
    assert status == 1 and "gradient norm" in out and "a lower --lr may help" in out
    assert "Traceback" not in out, "the text says all"
    assert not list((tmp_path / "run").glob("step-*"))


def test_another_run_is_refused_at_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    run(f"--steps 1 --out {out}")
    for flags in ("--seed 5", "--preset small", "--dtype bfloat16", "--global-batch 16", "--seq 32"):
        assert main(f"{SMALL} --steps 2 --out {out} {flags}".split()) == 2
        assert flags.split()[0] in capsys.readouterr().err


def test_snapshots_that_are_all_damaged_are_no_fresh_start(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(f"--steps 2 --save-every 1 --out {out}")
    for manifest in out.glob("step-*/MANIFEST.json"):
        manifest.write_text("{}")
    status, said = launchers.train(f"{SMALL} --steps 4 --mesh dp=2 --out {out}".split())
    assert status == 1 and "can be restored" in said and "step-000000001" in said and "step 1/4" not in said


def test_resume_none_and_a_step_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    run(f"--steps 2 --save-every 1 --out {out}")
    assert main(f"{SMALL} --steps 4 --resume none --out {out}".split()) == 2
    assert "holds step-000000002; name another --out" in capsys.readouterr().err
    assert main(f"{SMALL} --steps 4 --resume 7 --out {out}".split()) == 2
    assert "holds step-000000002, step-000000001" in capsys.readouterr().err
    assert "step 2/3" in run(f"--steps 3 --resume 1 --out {out}")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mesh dp=2,pp=3,tp=3", "--mesh dp=2,pp=3,tp=3: tp is 3; it must divide num_heads"),
        ("--mesh pp=8", "--mesh pp=8: num_stages is 8; it must be in [1, 4]"),
        ("--mesh dp=3", "--mesh dp=3, --global-batch 8, --micro-batch 2: global_batch is 8"),
        ("--mesh dp=2,tp=", "--mesh dp=2,tp=: cannot read 'tp='"),
        ("--preset giant", "--preset 'giant' is unknown"),
    ],
)
def test_a_bad_run_is_refused_before_a_rank_starts(
    tmp_path: Path, flags: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(f"{SMALL} {flags} --out {tmp_path / 'run'}".split()) == 2
    said = capfd.readouterr()
    assert message in said.err and "ranks: pids" not in said.out


def test_torchrun_starts_the_same_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes with the environment that torchrun gives, which says more ranks than --mesh: dp is then 2."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    flags = f"{SMALL} --mesh dp=1 --steps 2 --out {tmp_path / 'run'}".split()
    command = [sys.executable, "-P", "-m", "plait", "train", *flags]
    workers = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [worker.communicate(timeout=launchers.END_S)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], said
    assert "step 2/2" in said[0] and "torchrun started 2 ranks, which are dp=2" in said[0] and "step" not in said[1]
    run(f"--mesh dp=2 --steps 2 --out {tmp_path / 'local'}")
    assert_equal(tmp_path / "run", tmp_path / "local", capsys)


def test_another_number_of_ranks_takes_the_grid_that_fits(tmp_path: Path) -> None:
    """`plait train` under torchrun refused to go on with fewer or more ranks."""
    config = parse(f"{SMALL} --mesh dp=2,tp=2 --out {tmp_path / 'run'}".split())
    for ranks, mesh in ((4, "dp=2,tp=2"), (2, "dp=1,tp=2"), (8, "dp=4,tp=2")):
        assert elastic_plan(config, ranks).config.mesh == mesh
    with pytest.raises(ConfigError, match=r"pp=1 x tp=2 do not make up 1 ranks; .* grids fit: dp=1,pp=1,tp=1$"):
        elastic_plan(config, 1)
    with pytest.raises(
        ConfigError, match=r"--mesh dp=3,.*; torchrun started 6 ranks, for which these grids fit: dp="
    ):
        elastic_plan(config, 6)  # the batch is not made up by three


def test_torchrun_with_a_world_that_no_grid_fits_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"RANK": "0", "WORLD_SIZE": "7", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "7", "MASTER_ADDR": "localhost"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    assert main(f"{SMALL} --mesh dp=2 --out {tmp_path / 'run'}".split()) == 2
    assert "torchrun started 7 ranks, for which these grids fit: none" in capsys.readouterr().err
