"""A folder in memory for walks that sync thousands of times; and what a run of the tests says at its end: how many
faults were injected, files damaged, inputs mutated."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

COUNTED = ("faults", "damages", "inputs")  # what tests record by `record_property`

MEMORY = "/dev/shm"
# torch.compile tries each vector extension of the CPU by a program of its own, 9 s of CPU: scalar code will do here.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """An empty folder whose syncs cost nothing, where there is one. A walk injects each fault itself; a
    save makes the same calls on any file system, but on a disk it waits for thousands of syncs."""
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="plait-test-", dir=MEMORY) as folder:
        yield Path(folder)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Sums what passed tests counted, of all worker processes."""
    for name in COUNTED:
        counts = [
            value
            for report in terminalreporter.getreports("passed")
            for key, value in report.user_properties
            if key == name
        ]
        if counts:
            terminalreporter.write_line(f"{name}: {sum(counts)} in {len(counts)} walks, nothing lost")
