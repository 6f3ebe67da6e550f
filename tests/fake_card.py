"""The suite `kernels` as if on a card: its ops run on CPU tensors, and beside each call a kernel is launched on a
FakeDevice, whose time is what the suite has to find. Holds no test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

from plait.bench import suite_kernels
from plait.bench.fake_device import Buffer, FakeDevice
from plait.bench.kernel_jobs import Contender, Job
from plait.bench.kernel_shapes import make_case
from plait.bench.spec import Case, CaseResult, Options

NORM = make_case("rms_norm", {"rows": 64, "cols": 256}, "float32", "cpu", True)
NBYTES = 4 * (2 * 64 * 256 + 256)  # x, dy, weight
L2 = 4 * NBYTES  # one copy sits in it, and four do
QUICK = Options(rounds=6, warmup=2)
Seconds = float | dict[str, float]  # of a kernel, by provider where they differ


class Replays(FakeDevice):
    """Whose replay of a graph also writes what the captured calls gave, as a card does."""

    last: Any = ()  # results of the last call
    counts = False  # energy: takes many calls

    def joules(self) -> float | None:
        return super().joules() if self.counts else None

    def capture(self, block: Callable[[], object]) -> Callable[[], object]:
        replay, static = super().capture(block), self.last
        values = [value.clone() for value in static]

        def run() -> None:
            replay()
            for value, right in zip(static, values, strict=True):
                value.copy_(right)

        return run


class Refuses(Replays):
    """Whose stream cannot be captured."""

    def capture(self, block: Callable[[], object]) -> Callable[[], object]:
        raise RuntimeError("operation not permitted when stream is capturing\nlong text")


def launching(job: Job, fake: FakeDevice, seconds: Seconds, hot_s: Seconds) -> Job:
    """The job, each of whose calls also launches a kernel on the fake device, on the data that the call takes."""
    data = [Buffer(int(job.nbytes)) for _ in range(job.rotation.copies)]

    def beside(name: str, contender: Contender) -> Contender:
        cold, hot = (value if isinstance(value, float) else value[name] for value in (seconds, hot_s))
        kernel = fake.kernel(cold, nbytes=int(job.nbytes), hot_s=hot, data=data, turn=lambda: job.rotation.turn)

        def call() -> Any:
            fake.last = results = contender.call()  # type: ignore[attr-defined]
            kernel()
            return results

        return dataclasses.replace(contender, call=call)

    job.contenders = {name: beside(name, contender) for name, contender in job.contenders.items()}
    return job


def measure_on(
    monkeypatch: pytest.MonkeyPatch,
    seconds: Seconds,
    hot_s: Seconds,
    cache: str = "",
    fake: FakeDevice | None = None,
    case: Case = NORM,
    **more: Any,
) -> CaseResult:
    """What the suite says of the case: kernel seconds with cold and hot data, how the device is, further options."""
    device, build = fake or Replays(l2_bytes=L2), suite_kernels.job_of

    def job_of(p: dict[str, Any], options: Options, l2_bytes: int) -> Job:
        return launching(build(p, options, l2_bytes), device, seconds, hot_s)

    with monkeypatch.context() as patch:
        patch.setattr(suite_kernels, "job_of", job_of)
        patch.setattr(suite_kernels, "queue_of", lambda name: device)
        return suite_kernels.measure(case, dataclasses.replace(QUICK, cache=cache, **more))


def medians(result: CaseResult) -> dict[str, float]:
    return {name: median(one.samples_s) for name, one in result.providers.items() if one.samples_s}
