"""A rank that dies or stalls in the middle of a step: every other one raises in time and names whom it waited for."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from plait.parallel.collectives import all_reduce
from plait.parallel.mesh import Mesh
from plait.parallel.pipeline import ChannelTimeout, Pipeline
from plait.parallel.schedules import build, one_f_one_b
from tests.ranks import run_ranks
from tests.test_executor import LARGE, Wide
from tests.test_pipeline import DTYPE, WIDTH, LinearStage

pytestmark = pytest.mark.ranks

TIMEOUT_S = 3.0
PATIENCE_S = 45.0  # a loaded machine; a hang would last until the ranks are ended, after 60 s
M = 6


class Doomed(LinearStage):
    """Ends or stops its process in the third forward, once it has a signal to do it with."""

    signal: int | None = None

    def forward(self, x: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, ...]:
        if self.signal is not None and inputs["microbatch"] == 2:
            os.kill(os.getpid(), self.signal)
        return super().forward(x, inputs)


def run_victim(rank: int, name: str, victim: int, how: int, folder: str) -> tuple[str, float, bool]:
    """One whole step, then one in which the victim falls; the last survivor ends what is left of it."""
    schedule = build(name, 4, M)
    stages: dict[int, Any] = {s: Doomed(s, schedule.num_stages) for s in schedule.stages_of(rank)}
    pipeline = Pipeline(stages, schedule, Mesh.create(pp=4, timeout_s=TIMEOUT_S))
    x, targets = torch.ones(M, WIDTH, dtype=DTYPE), torch.zeros(M, WIDTH, dtype=DTYPE)
    pipeline.step({"x": x}, targets, M)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"pid{rank}", str(os.getpid()))
    pid = int(store.get(f"pid{victim}"))
    store.set(f"ready{rank}", "")
    if rank == victim:
        store.wait([f"ready{other}" for other in range(4)])  # it may be the one that serves the store
        for stage in stages.values():
            stage.signal = how
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        pipeline.step({"x": x}, targets, M)
    took = time.monotonic() - started
    with pytest.raises(RuntimeError, match="this pipeline failed before"):
        pipeline.step({"x": x}, targets, M)
    Path(folder, f"raised{rank}").touch()
    if len(list(Path(folder).iterdir())) == 3 and how == signal.SIGSTOP:
        os.kill(pid, signal.SIGKILL)
    return str(caught.value), took, isinstance(caught.value, ChannelTimeout)


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "stalls"])
@pytest.mark.parametrize(
    "victim", [2, pytest.param(0, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)]
)
def test_every_other_rank_names_whom_it_waited_for(name, how, victim, tmp_path):
    results = run_ranks(4, run_victim, name, victim, int(how), str(tmp_path), expect_dead=(victim,))
    neighbours = 0
    for rank, result in enumerate(results):
        if rank == victim:
            continue
        text, took, timed_out = result
        assert took < PATIENCE_S, f"rank {rank} hung for {took:.1f} s"
        if "all_reduce" in text:  # its part of the schedule was done: it waited for the means
            assert re.search(rf"rank {rank} waited for rank [\d, ]*{victim}", text), text
            continue
        assert re.search(rf"rank {rank} action \d(SEND|RECV)_[FB]\d ", text) and "peer rank" in text, text
        neighbours += f"peer rank {victim}" in text
        assert timed_out or how == signal.SIGKILL or "Connection closed" in text, text
    assert neighbours, "no rank names the one that fell"


class DoomedWide(Wide):
    """Ends its process in the third backward of the second step, while messages lie in slots both ways."""

    steps = 0

    def forward(self, x: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, ...]:
        (y, *rest) = super().forward(x, inputs)
        self.steps += inputs["microbatch"] == 0
        if self.last and self.steps == 2 and inputs["microbatch"] == 2:
            y.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        return (y, *rest)


def run_killed_with_slots(rank: int) -> str:
    """Rank 1 dies; rank 0 still reads what lies in the slots."""
    pipeline = Pipeline({rank: DoomedWide(rank, 2)}, one_f_one_b(2, M), Mesh.create(pp=2, timeout_s=TIMEOUT_S))
    x, targets = torch.ones(M, LARGE, dtype=DTYPE), torch.zeros(M)
    pipeline.step({"x": x}, targets, M)
    with pytest.raises(RuntimeError) as caught:
        pipeline.step({"x": x}, targets, M)
    assert pipeline._p2p is not None and pipeline._p2p.local is not None
    assert pipeline._p2p.local.outward(1)._lender._slots, "no message lay in a slot"
    return str(caught.value)


def test_a_peer_that_dies_with_messages_in_shared_memory_is_named():
    files = set(os.listdir("/dev/shm"))
    text, _ = run_ranks(2, run_killed_with_slots, expect_dead=(1,))
    assert re.search(r"rank 0 action 0(RECV_B2|SEND_F\d) .*peer rank 1", text), text
    assert set(os.listdir("/dev/shm")) <= files, "something was left behind"


def run_crossed(rank: int) -> str:
    """dp = 2, pp = 2: each rank waits for the next one, half of them in a pipeline, half in an all-reduce."""
    mesh = Mesh.create(dp=2, pp=2, timeout_s=2.0)
    row, coord = mesh.coords()["dp"], mesh.axis("pp").coord
    pipeline = Pipeline({coord: LinearStage(coord, 2)}, one_f_one_b(2, 2), mesh)
    x, targets = torch.ones(2, WIDTH, dtype=DTYPE), torch.zeros(2, WIDTH, dtype=DTYPE)
    with pytest.raises(RuntimeError) as caught:
        if row == coord:
            pipeline.step({"x": x}, targets, 2)
        else:
            all_reduce(torch.ones(1), mesh.axis("dp"))
    return str(caught.value)


def test_groups_used_in_crossed_order_time_out_and_say_where():
    """Case 7: communicators whose ranks come in different order. Every rank names what is stuck."""
    texts = run_ranks(4, run_crossed)
    assert "rank 0 action 0SEND_F0" in texts[0] and "peer rank 1" in texts[0]
    assert "all_reduce sum on axis dp: rank 1 waited for rank 3" in texts[1]
    assert "all_reduce sum on axis dp: rank 2 waited for rank 0" in texts[2]
    assert "rank 3 action 1RECV_F0" in texts[3] and "peer rank 2" in texts[3]
