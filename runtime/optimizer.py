"""The learning rate of a step: a pure function.

Not the optimizer (`plait.parallel.data.ShardedAdamW` updates the shards). The one idea: the rate depends on the step
and on the number of steps over which it decays, never on how long this run will be, so that four steps and then two
more equal six.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear warm-up to `peak`, then a cosine down to `floor * peak` at `decay_steps`, constant from there."""

    peak: float
    decay_steps: int
    warmup_steps: int = 0
    floor: float = 0.1

    def __post_init__(self) -> None:
        if not self.peak > 0.0:
            raise ValueError(f"peak is {self.peak}; it must be above 0")
        if self.decay_steps < 1:
            raise ValueError(f"decay_steps is {self.decay_steps}; it must be at least 1")
        if not 0 <= self.warmup_steps <= self.decay_steps:
            raise ValueError(f"warmup_steps is {self.warmup_steps}; it must be in [0, {self.decay_steps}]")
        if not 0.0 <= self.floor <= 1.0:
            raise ValueError(f"floor is {self.floor}; it must be in [0, 1]")

    @classmethod
    def over(cls, decay_steps: int, *, peak: float) -> LearningRate:
        """The default shape: a fiftieth of the steps, at most 2000, warms up (the usual choice, not tuned here)."""
        return cls(peak=peak, decay_steps=decay_steps, warmup_steps=min(2000, decay_steps // 50))

    def at(self, step: int) -> float:
        """The rate of `step` (from 0); the first warm-up step already moves."""
        if step < 0:
            raise ValueError(f"step is {step}; it must be at least 0")
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if step >= self.decay_steps:
            return self.peak * self.floor
        done = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        return self.peak * (self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * done)))
