"""How far a long command is: a bar on a terminal, now and then a plain line elsewhere, nothing with `--json`.

Not part of any result: it goes to stderr. The one idea: a thread asks for a counter of bytes, so that the work itself
knows nothing of it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

BAR_S, LINE_S = 0.2, 30.0  # between two looks on a terminal, and elsewhere (a log)
_CELLS = 30


@contextmanager
def progress(
    label: str, total_bytes: int, done: Callable[[], int], quiet: bool, out: TextIO | None = None
) -> Iterator[None]:
    """Shows `done()` of `total_bytes` while the body runs. quiet: shows nothing."""
    out = out or sys.stderr
    if quiet:
        yield
        return
    bar, stop, began = out.isatty(), threading.Event(), time.monotonic()

    def show() -> None:
        while not stop.wait(BAR_S if bar else LINE_S):
            text = line(label, done(), total_bytes, time.monotonic() - began, bar)
            print(f"\r{text}\x1b[K" if bar else text, end="" if bar else "\n", file=out, flush=True)

    thread = threading.Thread(target=show, name="plait-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        if bar:
            print("\r\x1b[K", end="", file=out, flush=True)


def line(label: str, done: int, total: int, seconds: float, bar: bool) -> str:
    """Returns "label [###...] 12% 1.2 GiB of 9.8 GiB, 512.0 MiB/s" (without the bar for a log)."""
    part = min(1.0, done / total) if total else 1.0
    cells = f"[{'#' * int(part * _CELLS):.<{_CELLS}}] " if bar else ""
    speed = size_text(int(done / seconds)) if seconds > 0 else "0 B"
    return f"{label} {cells}{part:4.0%} {size_text(done)} of {size_text(total)}, {speed}/s"


def bytes_read() -> int:
    """Returns the bytes that this process has read so far, by whatever library; 0 where the system does not say."""
    try:
        with open("/proc/self/io") as file:
            return int(file.readline().removeprefix("rchar:"))
    except OSError:
        return 0


def size_text(num_bytes: int) -> str:
    """Returns "1.5 GiB" of a number of bytes."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{num_bytes} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
