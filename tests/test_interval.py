"""When to save: the interval against a simulation of failures, and the trigger against a clock of the test."""

from __future__ import annotations

import math
import os
import signal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.ckpt.interval import DISK_ROOM, best_interval, daly
from plait.ckpt.trigger import SAVE, STOP, Trigger

UPTIMES = 2_000_000


def measured_optimum(stall_s: float, mtbf_s: float, durable_s: float, restart_s: float) -> float:
    """Simulates training under exponential failures at intervals around the best one; returns where the most work
    per hour was done, by a parabola through the top (the curve is flat there, so its top is between the noise)."""
    uptimes = torch.empty(UPTIMES, dtype=torch.float64)
    uptimes.exponential_(1 / mtbf_s, generator=torch.Generator().manual_seed(5))
    elapsed = float((uptimes + restart_s).sum())
    intervals = [daly(stall_s, mtbf_s) * math.exp(0.03 * i) for i in range(-14, 15)]
    work = []
    for seconds in intervals:  # the k-th save begins after k intervals and k - 1 stalls; it counts once durable
        saves = torch.floor((uptimes + stall_s - max(durable_s, stall_s)) / (seconds + stall_s)).clamp_(min=0)
        work.append(float(saves.sum()) * seconds / elapsed)
    x = torch.tensor(intervals, dtype=torch.float64).log()
    x0 = x.mean()
    design = torch.stack([torch.ones_like(x), x - x0, (x - x0) ** 2, (x - x0) ** 3], dim=1)
    fit = torch.linalg.lstsq(design, torch.tensor(work, dtype=torch.float64)[:, None]).solution.flatten()
    fine = torch.linspace(-0.4, 0.4, 8001, dtype=torch.float64)
    top = fine[(fit[1] * fine + fit[2] * fine**2 + fit[3] * fine**3).argmax()]
    assert abs(float(top)) < 0.39, "the top lies outside of what was tried"
    return math.exp(float(top + x0))


# stall, mean time between failures, time to durable, restart, in seconds
@pytest.mark.parametrize(
    ("stall_s", "mtbf_s", "durable_s", "restart_s"),
    [
        (1.0, 3600.0, 0.0, 0.0),
        (0.5, 3600.0, 20.0, 120.0),  # neither the write nor the restart moves the optimum
        (5.0, 7200.0, 60.0, 600.0),
        (60.0, 3600.0, 60.0, 60.0),  # s/M = 1.7 %: Young's square root alone is 6 % off
        (300.0, 3600.0, 300.0, 0.0),
    ],
)
def test_the_simulated_optimum_lies_within_5_percent(stall_s, mtbf_s, durable_s, restart_s):
    wanted = best_interval(stall_s, mtbf_s).seconds
    found = measured_optimum(stall_s, mtbf_s, durable_s, restart_s)
    assert abs(found / wanted - 1) < 0.05, (found, wanted)


def test_the_interval_is_bounded_by_the_disk_and_by_the_caller():
    free = best_interval(1.0, 7200.0)
    assert free.limit == "" and abs(free.seconds - 120.0) < 1.0
    assert abs(free.waste - (1 / 121 + 60 / 7200)) < 2e-4
    slow = best_interval(1.0, 7200.0, durable_s=600.0)
    assert (slow.seconds, slow.limit) == (DISK_ROOM * 600.0, "disk") and slow.waste > free.waste
    capped = best_interval(1.0, 7200.0, durable_s=600.0, max_s=60.0)
    assert (capped.seconds, capped.limit) == (60.0, "max")
    assert best_interval(0.0, 7200.0).seconds == 0.0 and daly(3.0, 1.0) == 1.0


@given(st.floats(1e-3, 1e3), st.floats(1e3, 1e7))
def test_cheaper_saves_and_more_failures_mean_shorter_intervals(stall_s, mtbf_s):
    here = best_interval(stall_s, mtbf_s)
    assert best_interval(stall_s / 2, mtbf_s).seconds < here.seconds
    assert best_interval(stall_s, mtbf_s / 2).seconds <= here.seconds * (1 + 1e-9)
    assert 0 < here.saving < here.waste <= 1


@pytest.mark.parametrize("wrong", [(-1.0, 10.0), (math.nan, 10.0), (1.0, 0.0), (1.0, math.inf)])
def test_numbers_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match="stall_s=|mtbf_s="):
        best_interval(*wrong)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Saved:
    """What a Trigger looks at of a handle."""

    def __init__(self, stall_s: float, durable_s: float | None, waited_s: float = 0.0) -> None:
        self.stall_s, self.durable_s, self.waited_s = stall_s, durable_s, waited_s

    def done(self) -> bool:
        return self.durable_s is not None


def test_steps_minutes_and_signals_each_save_once():
    clock = Clock()
    trigger = Trigger(steps=4, minutes=1, save_signals=(signal.SIGUSR1,), clock=clock)
    saves = {}
    for step in range(1, 13):
        clock.now += 25.0
        if step == 6:
            os.kill(os.getpid(), signal.SIGUSR1)
        if why := trigger.due(step):
            saves[step] = why
            trigger.saved(Saved(0.1, 1.0))
    trigger.close()
    assert saves == {3: "wish", 4: "step", 6: "wish", 8: "step", 11: "wish", 12: "step"}
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_all_ranks_save_at_one_step_whatever_their_clocks_say():
    """Only rank 0's clock counts; a signal on any rank does; the maximum and the sum of the wishes decide alike."""
    clocks = [Clock() for _ in range(3)]
    triggers = [Trigger(minutes=1, rank=rank, clock=clock) for rank, clock in enumerate(clocks)]
    triggers[2]._on_save(signal.SIGUSR1, None)
    for step, late in ((1, 1), (2, 0), (3, None)):
        if late is not None:
            clocks[late].now += 100.0
        wishes = [trigger.wish() for trigger in triggers]
        assert wishes == {1: [0, 0, SAVE], 2: [SAVE, 0, 0], 3: [0, 0, 0]}[step]
        for combine in (sum, max):
            due = {trigger.due(step, combine(wishes)) for trigger in triggers}
            assert due == {"wish" if any(wishes) else ""}
        if any(wishes):
            for trigger in triggers:
                trigger.saved(Saved(0.1, 1.0))


def test_a_stop_signal_saves_and_stops_and_the_second_is_the_end():
    trigger = Trigger(stop_signals=(signal.SIGUSR2,), grace_s=100.0)
    assert trigger.due(1) == ""
    os.kill(os.getpid(), signal.SIGUSR2)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL and signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert trigger.wish() == STOP and trigger.due(1) == "stop" and trigger.due(1, 5 * STOP + 3) == "stop"
    trigger.saved(Saved(0.1, 1.0))
    assert trigger.due(2) == "stop", "a save on the way out does not take the stop back"
    trigger.close()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_touching_a_file_saves_once(tmp_path):
    trigger = Trigger(touch=tmp_path / "save-now")
    other = Trigger(touch=tmp_path / "save-now", rank=1)
    (tmp_path / "save-now").touch()
    assert (trigger.due(1), other.wish()) == ("wish", 0)
    other.saved(Saved(0.1, 1.0))
    trigger.saved(Saved(0.1, 1.0))
    assert trigger.due(2) == "" and not (tmp_path / "save-now").exists()


def test_auto_measures_first_and_then_keeps_the_best_interval():
    """A day of steps of 1 s: the first save after a minute, the others at Daly's interval for what they cost."""
    clock, saves, seen = Clock(), [], []
    trigger = Trigger(mtbf_hours=2, max_minutes=30, clock=clock)
    assert trigger.interval() is None
    handle = None
    for step in range(1, 20_000):
        clock.now += 1.0
        if handle is not None and handle.durable_s is None and clock.now >= saves[-1] + 40.0:
            handle.durable_s = 40.0
            seen.append(trigger.interval())
        if trigger.due(step):
            handle = Saved(2.0, None)
            saves.append(clock.now)
            clock.now += handle.stall_s
            trigger.saved(handle)
    wanted = best_interval(2.0, 7200.0, 40.0)
    gaps = [b - a for a, b in zip(saves[1:], saves[2:], strict=False)]
    assert saves[0] == 60.0 and len(gaps) > 50 and wanted.limit == ""
    assert all(abs(gap - wanted.seconds - 2.0) <= 1.0 for gap in gaps)
    assert seen[-1] == best_interval(2.0, 7200.0, 40.0, max_s=1800.0)


def test_auto_waits_for_a_disk_that_is_slower_than_the_interval():
    clock = Clock()
    trigger = Trigger(mtbf_hours=1, clock=clock)
    slow = Saved(0.01, None)
    trigger.saved(slow)
    clock.now = 1000.0
    assert trigger.due(1) == ""  # still under way
    slow.durable_s = 900.0
    clock.now = 1005.0
    assert trigger.due(2) == "wish" and trigger.interval().limit == "disk"


def test_auto_tries_again_after_a_save_that_failed():
    clock = Clock()
    trigger = Trigger(mtbf_hours=1, clock=clock)
    failed = Saved(0.01, None)
    failed.done = lambda: True  # type: ignore[method-assign]
    trigger.saved(failed)
    clock.now = 59.0
    assert trigger.due(1) == ""
    clock.now = 61.0
    assert trigger.due(2) == "wish" and trigger.interval() is None


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"minutes": -1.0}, {"mtbf_hours": math.nan}])
def test_wrong_arguments_of_a_trigger_are_named(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        Trigger(**wrong)
