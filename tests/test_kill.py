"""Kill and resume: whatever is killed and when, the run ends with the bits of a run that was never interrupted.

Kill points come from what the run says and from files that appear, chosen by a seeded generator; nothing waits by
the clock. A victim is one rank or the launcher; a moment is the end of a step, the start of a save, or the k-th file
of a save in flight.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from plait.ckpt import cli as snapshot_cli
from tests import launchers

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

SMALL = "--seq 8 --global-batch 4 --micro-batch 1 --save-every 2 --keep 2 --dropout 0.1"

# grid, number of kills of it; 20 in all, and many more in the longer walk
GRIDS = (
    ("dp=2,pp=2", 10),
    ("dp=2,tp=2", 10),
    pytest.param("dp=2,pp=2 --schedule interleaved --dtype bfloat16", 60, marks=pytest.mark.long),
)


def wait_for_moment(running: launchers.Running, chance: random.Random, out: Path) -> str:
    """Reads until a random moment of the run has come; says which. "" when the run ended before."""
    kind = chance.choice(["step", "saving", "file", "durable"])
    if kind == "step":
        for _ in range(chance.randint(1, 3)):
            if not running.read_until(r"^step "):
                return ""
        return "after a step"
    if kind == "durable":
        return "when durable" if running.read_until(r"^snapshot \d+ durable") else ""
    match = running.read_until(r"^snapshot (\d+) saving")
    if match is None or kind == "saving":
        return "as a save begins" if match else ""
    step, wanted = int(match[1]), chance.randint(1, 9)
    final = out / f"step-{step:09d}"
    while not final.exists():  # ends by itself: a save in flight ends in its folder, or the run has ended
        attempts = list(out.glob(f".tmp-{step}-*/*"))
        if len(attempts) >= wanted or not process_runs(running.pid):
            break
    return f"with {wanted} files of a save"


def process_runs(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def kill_one(running: launchers.Running, victim: int) -> None:
    """Kills the launcher (-1) or a rank; one that has just ended is no error."""
    try:
        os.kill(running.pid if victim < 0 else running.rank_pids[victim], signal.SIGKILL)
    except ProcessLookupError:
        pass


@pytest.mark.parametrize(("mesh", "kills"), GRIDS)
def test_killed_runs_end_with_the_bits_of_one_never_interrupted(
    tmp_path: Path, mesh: str, kills: int, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = 2 * kills + 8  # a start gains one or two steps before it is killed
    flags = f"{SMALL} --mesh {mesh} --steps {steps} --out".split()
    status, said = launchers.train([*flags, str(tmp_path / "straight")])
    assert status == 0, said

    chance, out, done, moments = random.Random(mesh), tmp_path / "killed", 0, []
    while done < kills:
        running = launchers.start([*flags, str(out)])
        assert running.read_until(r"^ranks: pids ")
        moment = wait_for_moment(running, chance, out)
        victim = chance.randrange(-1, 4)
        kill_one(running, victim)
        status, said = running.finish()
        launchers.assert_gone(running.rank_pids)
        if status == 0:  # the run ended before the kill: begin another
            break
        assert status == (-signal.SIGKILL if victim < 0 else 1), said
        if victim >= 0:
            assert f"rank {victim} (pid {running.rank_pids[victim]}) was killed by SIGKILL" in said, said
        done += 1
        moments.append((moment, victim))
    assert done == kills, f"the run ended after {done} kills: {moments}"

    status, said = launchers.train([*flags, str(out)])
    assert status == 0, said
    assert f"step {steps}/{steps}" in said
    capsys.readouterr()
    assert snapshot_cli.main(["diff", str(tmp_path / "straight"), str(out)]) == 0, capsys.readouterr().out
    assert snapshot_cli.main(["verify", str(out)]) == 0, capsys.readouterr().out
    assert not list(out.glob(".tmp-*")) and not list(out.glob(".trash-*"))
