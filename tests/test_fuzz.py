"""Damaged snapshots of all kinds, read by all that reads one: a few inputs of the fuzzer, more in the long run."""

from __future__ import annotations

import pytest

from tests.fuzz_manifest import run


def test_mutated_snapshots_are_refused_or_read_and_nothing_else():
    outcomes = run(60.0, 11, 150, None)
    assert outcomes["refused"] > 0 and set(outcomes) <= {"refused", "read", "restored"}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_mutated_snapshots_are_refused_or_read_and_nothing_else(record_property):
    outcomes = run(600.0, 12, 20_000, None)
    assert outcomes["refused"] > 100 and set(outcomes) <= {"refused", "read", "restored"}
    record_property("inputs", sum(outcomes.values()))
