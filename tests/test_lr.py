"""The learning rate of plait.optimizer."""

from __future__ import annotations

import pytest

from plait.optimizer import LearningRate


def test_warm_up_is_linear_and_ends_at_the_peak():
    rate = LearningRate(peak=2.0, warmup_steps=4, decay_steps=20)
    assert [rate.at(step) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_cosine_halves_midway_and_stays_at_the_floor():
    rate = LearningRate(peak=1.0, warmup_steps=10, decay_steps=30, floor=0.2)
    assert rate.at(20) == pytest.approx(0.6)
    assert rate.at(29) > 0.2
    assert [rate.at(step) for step in (30, 31, 10**9)] == [0.2] * 3


def test_rate_never_rises_after_the_warm_up():
    rate = LearningRate(peak=1.0, warmup_steps=7, decay_steps=100)
    rates = [rate.at(step) for step in range(7, 120)]
    assert all(a >= b for a, b in zip(rates, rates[1:], strict=False))


@pytest.mark.parametrize("decay_steps", [1, 2, 49, 50, 51, 10**6])
def test_default_shape_holds_for_any_length(decay_steps):
    rate = LearningRate.over(decay_steps, peak=1.0)
    assert 0.0 < rate.at(0) <= 1.0 and rate.at(decay_steps) == 0.1
    assert rate.warmup_steps <= 2000


@pytest.mark.parametrize(
    "bad, text",
    [
        (dict(peak=0.0, decay_steps=1), "peak is 0.0"),
        (dict(peak=1.0, decay_steps=0), "decay_steps is 0"),
        (dict(peak=1.0, decay_steps=4, warmup_steps=5), "warmup_steps is 5; it must be in [0, 4]"),
        (dict(peak=1.0, decay_steps=4, floor=1.5), "floor is 1.5"),
    ],
)
def test_bad_values_are_named(bad, text):
    with pytest.raises(ValueError) as error:
        LearningRate(**bad)
    assert text in str(error.value)
