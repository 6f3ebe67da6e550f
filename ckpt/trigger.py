"""When a loop saves: every N steps, every T minutes, at the best interval, at a signal, when a file is touched.

Not the saving and not a thread. The one idea: what a clock, a signal or a file says is only a wish of one rank; it
becomes a decision once it was summed or maximised over all ranks, in whatever all-reduce the loop does anyway, so
that all save at one step.

    trigger = Trigger(minutes=30, save_signals=(signal.SIGUSR1,), stop_signals=(signal.SIGTERM,))
    for step in range(1, steps + 1):
        ...
        wish = all_reduce(trigger.wish())                # one process: not needed
        if why := trigger.due(step, wish):
            trigger.saved(snapshots.save(step, state))
        if why == "stop":
            break
"""

from __future__ import annotations

import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from plait.ckpt.handle import Handle
from plait.ckpt.interval import Interval, best_interval

SAVE, STOP = 1, 1 << 20  # wishes: a sum over a million ranks, or a maximum, still tells one from the other
FIRST_S = 60.0  # with `mtbf_hours`: the first save, which measures what a save costs
_MEASURED = 5  # the last saves whose median counts


class Trigger:
    """Decides when to save.

    steps: at multiples of it. minutes: since the last save. mtbf_hours: mean time between failures of the whole job;
    the interval then follows from what saves are measured to cost (plait.ckpt.interval), at most `max_minutes`.
    save_signals: save at the end of the step that is under way. stop_signals: the same, and `due` says "stop"; a
    second one ends the process, and so does the kernel `grace_s` after the first. touch: saves when this file exists,
    and removes it. rank: only rank 0's clock and file count; signals count on every rank.

    Thread rule: the main thread makes it, where signals are given; `close()` gives the signals back.
    """

    def __init__(
        self,
        *,
        steps: int | None = None,
        minutes: float | None = None,
        mtbf_hours: float | None = None,
        max_minutes: float = 60.0,
        save_signals: Sequence[int] = (),
        stop_signals: Sequence[int] = (),
        grace_s: float | None = None,
        touch: str | Path | None = None,
        rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (("steps", steps), ("minutes", minutes), ("mtbf_hours", mtbf_hours)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value}: must be above 0")
        self._steps, self._rank, self._clock, self._grace_s = steps, rank, clock, grace_s
        self._every_s = None if minutes is None else 60.0 * minutes
        self._mtbf_s = None if mtbf_hours is None else 3600.0 * mtbf_hours
        self._max_s = 60.0 * max_minutes
        self._touch = None if touch is None else Path(touch)
        self._last_s = clock()
        self._wished = 0  # by signals
        self._handles: deque[Handle] = deque(maxlen=_MEASURED)
        self._before: dict[int, Any] = {}
        self._stop_signals = tuple(stop_signals)
        for number in save_signals:
            self._before[number] = signal.signal(number, self._on_save)
        for number in self._stop_signals:
            self._before[number] = signal.signal(number, self._on_stop)

    def wish(self) -> int:
        """Returns what this rank wants at the end of the step: 0, or a number to be summed, or maximised, over all
        ranks and given to `due`. Steps need no wish: they are the same on all ranks."""
        wished = self._wished
        if self._rank == 0 and (self._clock_says() or (self._touch is not None and self._touch.exists())):
            wished = max(wished, SAVE)
        return wished

    def due(self, step: int, wish: int | float | None = None) -> str:
        """Returns why all ranks save after `step`: "stop", "wish", "step", or "" when they do not.

        wish: over all ranks; None: this process is alone.
        """
        agreed = self.wish() if wish is None else wish
        if agreed >= STOP:
            return "stop"
        if agreed >= SAVE:
            return "wish"
        return "step" if self._steps is not None and step % self._steps == 0 else ""

    def saved(self, handle: Handle) -> None:
        """Notes a save: its cost, once known, sets the interval; wishes to save are met."""
        self._handles.append(handle)
        self._last_s = self._clock()
        if self._wished < STOP:
            self._wished = 0
        if self._rank == 0 and self._touch is not None:
            self._touch.unlink(missing_ok=True)

    def interval(self) -> Interval | None:
        """Returns the interval in force and the waste that it means; None without `mtbf_hours`, or before a save was
        durable."""
        durable = [handle.durable_s for handle in self._handles if handle.durable_s is not None]
        if self._mtbf_s is None or not durable:
            return None
        stall_s = statistics.median(handle.stall_s - handle.waited_s for handle in self._handles)
        return best_interval(stall_s, self._mtbf_s, statistics.median(durable), max_s=self._max_s)

    def close(self) -> None:
        """Gives the signals back; the work is done, so the grace of a stop ends nothing any more."""
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before = {}
        if self._grace_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _clock_says(self) -> bool:
        passed_s = self._clock() - self._last_s
        if self._every_s is not None and passed_s >= self._every_s:
            return True
        if self._mtbf_s is None:
            return False
        if self._handles and not self._handles[-1].done():
            return False
        interval = self.interval()  # None: nothing was saved yet, or not with success
        return passed_s >= (min(FIRST_S, self._max_s) if interval is None else interval.seconds)

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self._wished = max(self._wished, SAVE)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self._wished = STOP
        for each in self._stop_signals:
            signal.signal(each, signal.SIG_DFL)
        if self._grace_s is not None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)
