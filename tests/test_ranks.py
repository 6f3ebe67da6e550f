"""The harness itself: results in order, failures with their traceback, hangs with their stacks, no process left."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import ROOT, RankError, run_ranks

pytestmark = pytest.mark.ranks


def body_sum(rank, offset):
    x = torch.full((3,), float(rank + offset))
    dist.all_reduce(x)
    print("hello")
    return rank, x, torch.get_num_threads(), os.getpid()


def body_raises(rank):
    if rank == 1:
        raise ValueError("the symptom")
    dist.barrier()


def body_hangs(rank):
    if rank == 0:
        threading.Event().wait()


def body_dies(rank):
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("n", [1, 2, 8])
def test_results_come_back_by_rank(n, capfd):
    results = run_ranks(n, body_sum, 2)
    assert [r[0] for r in results] == list(range(n))
    assert all(torch.equal(r[1], torch.full((3,), float(sum(range(2, n + 2))))) for r in results)
    assert all(r[2] == 1 for r in results)
    assert not any(alive(r[3]) for r in results)
    assert capfd.readouterr().out.count("hello") == n


def test_a_failure_raises_with_that_ranks_traceback():
    with pytest.raises(RankError, match=r"rank 1 of 4 failed(.|\n)*in body_raises(.|\n)*ValueError: the symptom"):
        run_ranks(4, body_raises)


def test_a_hang_ends_with_the_stacks():
    with pytest.raises(RankError, match=r"ranks \[0\] of 2 did not finish(.|\n)*in body_hangs"):
        run_ranks(2, body_hangs, timeout=2.0)
    assert len(run_ranks(2, body_sum, 0)) == 2  # the server lives on


def test_a_dead_rank_is_named_unless_expected():
    with pytest.raises(RankError, match=r"rank 2 died without a word: signal 9 \(SIGKILL\)"):
        run_ranks(3, body_dies)
    assert run_ranks(3, body_dies, expect_dead=(2,)) == [0, 1, None]
    with pytest.raises(RankError, match="expected to die"):
        run_ranks(3, body_dies, expect_dead=(1, 2))


def body_reports_and_hangs(rank, path):
    with open(path, "a") as file:
        file.write(f"{os.getpid()} {os.getppid()}\n")
    threading.Event().wait()


@pytest.mark.parametrize("victim", ["pytest", "server"])
def test_no_process_is_left_when_the_parent_is_killed(tmp_path, victim):
    path = tmp_path / "pids"
    code = (
        "import tests.ranks as r, tests.test_ranks as t\n"
        f"r.run_ranks(3, t.body_reports_and_hangs, {str(path)!r}, timeout=200)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert eventually(lambda: path.exists() and path.read_text().count("\n") == 3)
    rows = [[int(n) for n in line.split()] for line in path.read_text().splitlines()]
    pids, server = [row[0] for row in rows], rows[0][1]
    os.kill(parent.pid if victim == "pytest" else server, signal.SIGKILL)
    assert eventually(lambda: not any(alive(pid) for pid in [*pids, server, parent.pid]))
    if victim == "server":
        assert "the server of the ranks died" in parent.communicate()[1]
    parent.wait()
    parent.stderr.close()


def eventually(condition):
    """Polls for up to 60 s; waits on nothing but the condition."""
    limit = time.monotonic() + 60
    while not condition() and time.monotonic() < limit:
        select.select([], [], [], 0.02)
    return condition()
