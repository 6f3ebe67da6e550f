"""Long Python work of a background thread, cut so that the training thread is never kept from running for long.

Not a scheduler. The one idea: a thread that computes in Python keeps the GIL until another has asked for it for 5 ms
(sys.setswitchinterval, the whole process's), and a training loop asks at the end of every operation of torch. So
whoever works beside it lets go unasked, and long enough for the other to wake up.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

SLICE_S = 0.2e-3  # as long as a small operation of torch
PAUSE_S = 0.1e-3  # as long as a sleeping thread takes to wake up


def in_slices(items: Iterable[T]) -> Iterator[T]:
    """Yields the items, and sleeps between two of them when as much as a slice has passed."""
    began = time.monotonic()
    for item in items:
        yield item
        if time.monotonic() - began > SLICE_S:
            time.sleep(PAUSE_S)
            began = time.monotonic()
