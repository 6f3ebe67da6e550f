"""How a bench ends that is asked to by SIGTERM: by an exception in its main thread, so that folders and children go.

Nothing else ends it. The one idea: a handler's exception comes up wherever the main thread is. In a peer's
code it may be caught (torch's DCP makes a failed save of it and raises another one), in a finalizer it is printed
and forgotten; so it is raised again until the bench is over, but never while an exception is on its way, whose
cleaning up it would cut short.
"""

from __future__ import annotations

import _thread
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

AGAIN_S = 0.2  # after which it is raised again
PATIENCE = 100  # times that an exception on its way is let pass; then it is no cleaning up
TRIES, PAUSE_S = 50, 0.1  # of a removal: a thread of a peer may still write there


class Ending:
    """A context in the main thread: SIGTERM ends what is inside with SystemExit(143), whatever that is doing, and
    whatever came of it."""

    def __init__(self) -> None:
        self.asked = False
        self._over, self._passed = False, 0
        self._lock = threading.Lock()  # guards _over
        self._before: Any = None

    def __enter__(self) -> Ending:
        self._before = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self._over = True
        signal.signal(signal.SIGTERM, self._before)
        if self.asked:
            raise SystemExit(128 + signal.SIGTERM) from error

    def _handle(self, number: int, frame: object) -> None:
        if not self.asked:
            self.asked = True
            # Not threading.Thread, whose locks the code that is interrupted here may hold.
            _thread.start_new_thread(self._again, (threading.get_ident(),))
        self._passed += 1
        if not self._over and (sys.exception() is None or self._passed > PATIENCE):
            raise SystemExit(128 + number)

    def _again(self, main_thread: int) -> None:
        while True:
            time.sleep(AGAIN_S)
            with self._lock:
                if self._over:
                    return
                signal.pthread_kill(main_thread, signal.SIGTERM)


@contextmanager
def scratch_folder(prefix: str = "plait-bench-", inside: str | Path | None = None) -> Iterator[str]:
    """A temporary folder that is gone afterwards, also when the end of the bench comes during its removal."""
    path = tempfile.mkdtemp(prefix=prefix, dir=inside)
    try:
        yield path
    finally:
        try:
            _remove(path)
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _remove(path: str) -> None:
    for left in reversed(range(TRIES)):
        try:
            shutil.rmtree(path)
            return
        except OSError:
            if not left:
                raise
        time.sleep(PAUSE_S)
