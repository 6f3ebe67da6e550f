"""Offline compilation of adamw_, l2_norm, dropout and embedding: no spills, no fp64, 16-byte accesses, no atomics."""

import pytest
import torch

from plait.kernels import adamw_triton, dropout_op, embed_triton, norms, tables
from plait.kernels.inspect import compile_offline
from plait.kernels.points import points
from plait.kernels.stream_points import points as stream_points
from tests.cases import needs_compiler

# Streaming code hardly differs between architectures: sm_90 always, the others in the long run.
ARCHS = ["sm_90", *(pytest.param(arch, marks=pytest.mark.long) for arch in ("sm_80", "sm_100"))]

# Point -> (reads of one number, accesses narrower than 16 bytes but for those): a row of a table, scalars, a key.
# AdamW's table has 4 to 6 columns that are read; bf16 with a master reads the factor too, rounding reads 9 more.
WIDE = {
    "adamw.run.fp32": 0,
    "adamw.table.fp32": 8,
    "adamw.run.bf16_master": 1,
    "adamw.table.bf16_master": 10,
    "adamw.run.bf16_rounded": 8,
    "adamw.table.bf16_rounded": 16,
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
@pytest.mark.long  # the declared list of test_gate.py stays in the short run
@needs_compiler
@pytest.mark.parametrize("arch", ARCHS)
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
@pytest.mark.long  # the declared list of test_gate.py stays in the short run
@needs_compiler
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", NARROW)
def test_narrow_and_strided_kernels_do_not_spill(name, arch):
    assert 0 < _facts(name, arch).registers <= 168


def test_points_are_listed():
    names = set(stream_points())
    assert names <= set(points()) and set(WIDE) | set(NARROW) <= names


def _meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def _edges():
    """Launches whose sizes are 1, which the compiler folds away, or need 64 bits."""
    one, many, ids = _meta(1), _meta(2**33), _meta(1, dtype=torch.int64)
    cube, step = _meta(1, 1, 1), adamw_triton.Step((1.0, 0.1, 1.0, 0.9, 0.1, 0.9, 0.1, 1e-8), rng=ids)
    half = _meta(1, dtype=torch.float16)
    yield adamw_triton.run_launch([half, half, one, one], step, 5)
    yield adamw_triton.run_launch([many] * 4, step)
    yield adamw_triton.table_launch(ids, 1, 1, 1, [half, one, one, one, one], step, aligned=False)
    yield norms.run_launch(one, one, 1)
    yield norms.run_launch(many, one, 512)
    yield norms.table_launch(ids, one, 1, 1, 1, torch.float16, aligned=False)
    yield norms.partials_launch(one, one)
    yield dropout_op.forward_launch(cube, ids, 0.5, 1, 1, 1, cube)
    yield dropout_op.forward_launch(_meta(2, 2**17, 2**17).mT, ids, 0.5, 2**40, 2**31, 2**33, cube)
    yield embed_triton.forward_launch(ids, _meta(1, 1), 2**40, cube)
    yield from embed_triton.gradient_launches(_meta(1, 1), ids, ids, _meta(1, 2, 1), _meta(1, 1), True)
    yield from embed_triton.gradient_launches(
        _meta(2**20, 1), _meta(2**20, dtype=torch.int64), ids, _meta(2**16, 2, 1), _meta(2**33, 1), False
    )
    yield from tables.write_launches([2**40 + i for i in range(33)], ids)


@pytest.mark.offline
@pytest.mark.long  # the declared list of test_gate.py stays in the short run
@needs_compiler
def test_launches_of_size_1_and_beyond_32_bits_compile():
    for launch in _edges():
        facts = compile_offline(launch, "sm_90")
        assert facts.spill_loads == facts.spill_stores == 0, facts.name
