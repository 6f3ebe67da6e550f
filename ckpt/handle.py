"""The handle of one save: what the training loop may ask while the writing thread works.

Not a future with callbacks. The one idea: an error is raised once, by `wait()` or else by the next call of Snapshots.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path


class Handle:
    """One save. `stall_s`: how long the training thread was held (waiting for the save before included: `waited_s`).
    `nbytes`: what this rank writes. `durable_s`: from the call to the durable commit, None before. `folder`: once
    durable."""

    def __init__(self, step: int, sequence: int) -> None:
        self.step, self.sequence = step, sequence
        self.stall_s = self.waited_s = 0.0
        self.nbytes = 0
        self.durable_s: float | None = None
        self.folder: Path | None = None
        self.began = time.monotonic()
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self._raised = False

    def done(self) -> bool:
        """True when the save is durable, or failed."""
        return self._finished.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until durable; raises what went wrong. TimeoutError when it is still under way after `timeout_s`."""
        if not self._finished.wait(timeout_s):
            raise TimeoutError(f"the snapshot of step {self.step} is not durable after {timeout_s} s")
        self.raise_once()

    def settle(self, timeout_s: float | None = None) -> None:
        """Waits until done and raises nothing."""
        self._finished.wait(timeout_s)

    def raise_once(self) -> None:
        """Raises the save's error unless it was raised before."""
        if self._error is not None and not self._raised:
            self._raised = True
            raise self._error

    def committed(self, folder: Path) -> None:
        """Called by the writing thread when the snapshot is durable; tidying up may still fail."""
        self.folder, self.durable_s = folder, time.monotonic() - self.began

    def finish(self, error: BaseException | None) -> None:
        """Called by the writing thread, last."""
        self._error = error
        self._finished.set()
