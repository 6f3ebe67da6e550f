"""The default cases of the suite `kernels` under pytest-benchmark: `pytest bench/ --benchmark-only`.

Needs pytest-benchmark (extra `bench`). The suite itself interleaves its providers and judges them; this is the door
for those who keep their benchmarks in pytest. Each result is held against the oracle before it is timed, and so is
that of the last call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from plait.bench.kernel_jobs import adamw_job, problem_job
from plait.bench.spec import Case
from plait.bench.suite_kernels import TOLERANCE, cases, check

PROVIDERS = ("plait", "torch", "torch foreach")


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("case", cases(False), ids=lambda case: case.name)
def test_kernel(device_benchmark: Callable[..., Any], case: Case, provider: str) -> None:
    """One provider of one case."""
    p = case.params
    job = adamw_job(p, 0) if p["op"] == "adamw_" else problem_job(p, 0, False)
    if provider not in job.contenders:
        pytest.skip(f"{p['op']} has no provider {provider!r} here")
    contender, tolerance = job.contenders[provider], TOLERANCE[p["dtype"]]
    job.redraw()
    wanted = job.oracle()
    contender.prepare()
    results = contender.call()
    check(provider, contender, results, wanted, tolerance)
    with torch.no_grad():
        for value in results if not contender.in_place else ():
            value.fill_(float("nan"))
    results = device_benchmark(contender.call)
    if not contender.in_place:
        check(provider, contender, results, wanted, tolerance)
