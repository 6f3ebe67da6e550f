"""Python work beside training is cut into slices with pauses between them."""

from __future__ import annotations

from plait.ckpt import slices
from plait.ckpt.slices import PAUSE_S, SLICE_S, in_slices


class Clock:
    """Stands in for the module time. What the work takes is added by hand."""

    def __init__(self) -> None:
        self.now, self.pauses = 0.0, []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def test_after_each_slice_of_work_others_may_run(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(slices, "time", clock)
    seen, pauses_before = [], []
    for item in in_slices(range(8)):
        seen.append(item)
        pauses_before.append(len(clock.pauses))
        clock.now += 0.4 * SLICE_S
    assert seen == list(range(8))
    assert pauses_before == [0, 0, 0, 1, 1, 1, 2, 2]  # a slice is three of them
    assert clock.pauses == [PAUSE_S] * 2
