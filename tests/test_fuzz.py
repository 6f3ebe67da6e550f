"""Damaged snapshots of all kinds, read by all that reads one: a few inputs of the fuzzer, more in the long run."""

from __future__ import annotations

from random import Random

import pytest

from tests.fuzz_manifest import Choices, make_seeds, mutate, run


def test_mutated_snapshots_are_refused_or_read_and_nothing_else():
    outcomes = run(60.0, 11, 150, None)
    assert outcomes["refused"] > 0 and set(outcomes) <= {"refused", "read", "restored"}


def test_the_bytes_of_a_fuzzer_choose_the_mutation(tmp_path):
    """What `--guided` needs: the same bytes are the same input, and other bytes reach other inputs, of each seed."""
    seeds = make_seeds(tmp_path)
    inputs = {}
    for number in range(60):
        data = Random(number).randbytes(256)
        seed, again = Choices(data).choice(seeds), Choices(data).choice(seeds)
        assert mutate(seed, Choices(data)) == mutate(again, Choices(data))
        inputs[seed.name, tuple(sorted(mutate(seed, Choices(data))[0].items()))] = number
    assert {name for name, _ in inputs} == {seed.name for seed in seeds} and len(inputs) > 50
    assert [Choices(b"").choice("abc"), Choices(b"").random(), Choices(b"\x07\x00").randrange(256)] == ["a", 0.0, 7]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_mutated_snapshots_are_refused_or_read_and_nothing_else(record_property):
    outcomes = run(600.0, 12, 20_000, None)
    assert outcomes["refused"] > 100 and set(outcomes) <= {"refused", "read", "restored"}
    record_property("inputs", sum(outcomes.values()))
