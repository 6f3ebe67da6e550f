"""For users of pytest-benchmark: a timer that waits for the device, and a fixture that gives it to their `benchmark`.

In a conftest.py (as in bench/conftest.py):

    from plait.bench.pytest_device import device_benchmark, device_timer, pytest_benchmark_update_machine_info

A test then asks for `device_benchmark` instead of `benchmark`. Its times are host wall clock with the device's queue
empty before and after each round: launch costs are in them, a launch without its kernel is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from plait.bench.device import fingerprint


def synchronised() -> float:
    """Seconds of the host's clock, after all that was launched is done; the host's clock alone without a device."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


@pytest.fixture
def device_timer(request: pytest.FixtureRequest) -> None:
    """Sets `synchronised` as the timer of this test's `benchmark`, which must come after; other options stay."""
    marker = request.node.get_closest_marker("benchmark")
    options = {**(marker.kwargs if marker else {}), "timer": synchronised}
    request.node.add_marker(pytest.mark.benchmark(**options), append=False)


@pytest.fixture
def device_benchmark(device_timer: None, benchmark: Callable[..., Any]) -> Callable[..., Any]:
    """pytest-benchmark's own fixture, asked for by name so that --benchmark-only sees it, with that timer."""
    return benchmark


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Adds plait's fingerprint, which knows the card, to pytest-benchmark's JSON."""
    machine_info["plait"] = fingerprint()
