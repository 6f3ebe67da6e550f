"""Offline compilation of adamw_, l2_norm, dropout and embedding: no spills, no fp64, 16-byte accesses, no atomics."""

import pytest

from plait.kernels.inspect import compile_offline
from plait.kernels.points import points
from plait.kernels.stream_points import points as stream_points
from tests.cases import needs_compiler

# Point -> (reads of one number, accesses narrower than 16 bytes but for those): a row of a table, scalars, a key.
# AdamW's table has 4 to 6 columns that are read; bf16 with a master reads the factor too, rounding reads 8 more.
WIDE = {
    "adamw.run.fp32": 0,
    "adamw.table.fp32": 8,
    "adamw.run.bf16_master": 1,
    "adamw.table.bf16_master": 10,
    "adamw.run.bf16_rounded": 7,
    "adamw.table.bf16_rounded": 15,
    "l2_norm.run.fp32": 0,
    "l2_norm.table.bf16": 5,
    "dropout.fp32": 2,
    "dropout.bf16": 2,
    "embedding.forward.fp32": 0,
    "embedding.forward.bf16": 0,
    "embedding.windows": 6,
    "embedding.windows.accumulate": 4,
    "embedding.crossing": 16,
}
# What is left at the ends of runs, and strided tensors: right at any alignment, fast enough where it is rare.
NARROW = ["adamw.narrow.bf16_rounded", "adamw.strided.bf16_rounded", "adamw.strided.fp32", "l2_norm.strided.bf16"]


def _facts(name, arch):
    facts = compile_offline(points()[name](), arch)
    assert (facts.spill_loads, facts.spill_stores, facts.stack_bytes) == (0, 0, 0)
    assert facts.count("DADD") + facts.count("DMUL") + facts.count("DFMA") == 0
    assert facts.count("RED.") + facts.count("ATOM") == 0
    return facts


@pytest.mark.offline
@needs_compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", WIDE)
def test_streams_are_read_and_written_16_bytes_at_a_time(name, arch):
    facts = _facts(name, arch)
    # A third of the registers of a thread: six programs of four warps share a multiprocessor.
    assert 0 < facts.registers <= 85
    wide = facts.count("LDG.E.128")
    assert wide > 0 and facts.count("LDG") - wide <= WIDE[name]
    # The norm writes one number per chunk; rows of runs across windows are few and 256 columns a program.
    few = name.startswith("l2_norm") or name == "embedding.crossing"
    assert few or facts.count("STG.E.128") == facts.count("STG") > 0


@pytest.mark.offline
@needs_compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", NARROW)
def test_narrow_and_strided_kernels_do_not_spill(name, arch):
    assert 0 < _facts(name, arch).registers <= 168


def test_points_are_listed():
    names = set(stream_points())
    assert names <= set(points()) and set(WIDE) | set(NARROW) <= names
