"""The handle of one save: what the training loop may ask while the writing thread works.

Not a future with callbacks. The one idea: an error is raised once, by `wait()` or else by the next call of Snapshots.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from plait.ckpt.captured import Captured
from plait.ckpt.guard import Flight


class Handle:
    """One save. `stall_s`: how long the training thread was held (waiting for the save before included: `waited_s`).
    `nbytes`: what this rank writes. `durable_s`: from the call to the durable commit, None before. `folder`: once
    durable. `copies`: where tiers have it by now."""

    def __init__(self, step: int, sequence: int) -> None:
        self.step, self.sequence = step, sequence
        self.stall_s = self.waited_s = 0.0
        self.nbytes = self.held_bytes = 0
        self.slabs = 1
        self.expected_hold_s: float | None = None
        self.durable_s: float | None = None
        self.folder: Path | None = None
        self.began = time.monotonic()
        self.copies: list[str] = []
        self._flight: Flight | None = None
        self._finished, self._copied = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._raised = self._copy_raised = False
        self._lock = threading.Lock()  # guards the two below: each tier has a thread
        self._copies_left = 0
        self._copy_error: BaseException | None = None

    @property
    def fence_s(self) -> float:
        return self._flight.fence_s if self._flight is not None else 0.0

    def describe(self, captured: Captured, bytes_per_s: float | None) -> None:
        """Called by save: what is known before anything is copied."""
        self.nbytes, self.slabs, self.held_bytes = captured.num_bytes, captured.slabs, captured.held_bytes
        self.expected_hold_s = self.held_bytes / bytes_per_s if bytes_per_s else None
        self._flight = captured.flight

    def fence(self) -> None:
        """Returns when any tensor of the saved state may be changed. Only tensors of optimizers given to `guard()`
        are still read after `save` returned; their own steps call this themselves, other writes to them must."""
        if self._flight is not None:
            self._flight.fence()

    def done(self) -> bool:
        """True when the save is durable, or failed."""
        return self._finished.is_set()

    def wait(self, level: str = "local", timeout_s: float | None = None) -> None:
        """Waits until durable ("local"), or until every tier that takes this step has a verified copy ("remote").

        Raises what went wrong; TimeoutError when it is still under way after `timeout_s`.
        """
        if level not in ("local", "remote"):
            raise ValueError(f"level={level!r}: must be 'local' or 'remote'")
        began = time.monotonic()
        if not self._wait(timeout_s):
            raise TimeoutError(f"the snapshot of step {self.step} is not durable after {timeout_s} s")
        self.raise_once()
        if level == "remote":
            left = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - began))
            if self._copies_left and not self._copied.wait(left):
                raise TimeoutError(f"the snapshot of step {self.step} is not in all tiers after {timeout_s} s")
            self.raise_copy_once()

    def settle(self, timeout_s: float | None = None) -> None:
        """Waits until done and raises nothing."""
        self._wait(timeout_s)

    def _wait(self, timeout_s: float | None) -> bool:
        if self._flight is None or self.done():
            return self._finished.wait(timeout_s)
        self._flight.hurry(1)
        try:
            return self._finished.wait(timeout_s)
        finally:
            self._flight.hurry(-1)

    def raise_once(self) -> None:
        """Raises the save's error unless it was raised before."""
        if self._error is not None and not self._raised:
            self._raised = True
            raise self._error

    def raise_other(self, error: BaseException, reason: str) -> None:
        """Raises the save's error if it came before the caller's own, which ended it for this reason."""
        if isinstance(error, Exception) and self._error is not None and str(self._error) != reason:
            raise self._error from error

    def copied(self) -> bool:
        """True when nothing of it is being copied and no error of it is left to raise."""
        return not self._copies_left and (self._copy_error is None or self._copy_raised)

    def raise_copy_once(self) -> None:
        """Raises the first error of its copies, once all of them have ended, unless it was raised before."""
        if self._copy_error is not None and not self._copies_left and not self._copy_raised:
            self._copy_raised = True
            raise self._copy_error

    def expect(self, num_copies: int) -> None:
        """Called by the writing thread before `finish`: so many tiers take it."""
        self._copies_left = num_copies

    def copy_finished(self, error: BaseException | None) -> None:
        """Called by a tier's thread, last."""
        with self._lock:
            self._copy_error = self._copy_error or error
            self._copies_left -= 1
        if not self._copies_left:
            self._copied.set()

    def committed(self, folder: Path) -> None:
        """Called by the writing thread when the snapshot is durable; tidying up may still fail."""
        self.folder, self.durable_s = folder, time.monotonic() - self.began

    def finish(self, error: BaseException | None) -> None:
        """Called by the writing thread, last."""
        self._error = error
        self._finished.set()
