"""What a run of the tests says at its end: how many faults were injected, files damaged, inputs mutated."""

from __future__ import annotations

import pytest

COUNTED = ("faults", "damages", "inputs")  # what tests record by `record_property`


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
