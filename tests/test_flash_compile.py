"""Offline compilation of attention: no spill, no fp64, no atomic sum in any tile of the table, on any architecture.

The short list runs with every `make test`; the whole table, with all head dims and dtypes, is marked `long`.
"""

from functools import partial

import pytest
import torch

from plait.kernels import flash_points
from plait.kernels.attention_plain import Options
from plait.kernels.flash_launch import forward_launch
from plait.kernels.flash_tiles import MEASURED, TILES, WIDE_TILES, Choice, Tile, delta_rows, fits_descriptor, tile_of
from plait.kernels.gate import judge, rule_of
from plait.kernels.inspect import Facts, compile_offline
from plait.kernels.launch import arch_of
from tests.cases import needs_compiler

ARCHS = ("sm_80", "sm_90", "sm_100")
# Shared memory that one program may have (CUDA programming guide, compute capabilities).
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
MATRIX = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA"}
SHORT = [(point, arch) for point in flash_points.default_points() for arch in ARCHS]
LONG = [(point, arch) for point in flash_points.all_points() for arch in ARCHS if (point, arch) not in SHORT]


def _each(cases, *marks):
    return [pytest.param(p, a, id=f"{p.name}-{a}", marks=marks) for p, a in cases]


@pytest.mark.offline
@pytest.mark.long  # the declared list of test_gate.py stays in the short run
@needs_compiler
@pytest.mark.parametrize("point,arch", _each(SHORT) + _each(LONG, pytest.mark.long, pytest.mark.timeout(600)))
def test_compiles_without_a_spill(point, arch):
    facts = compile_offline(point.launch(arch), arch)
    assert (facts.spill_loads, facts.spill_stores, facts.stack_bytes) == (0, 0, 0)
    assert 0 < facts.registers <= 255 and facts.shared_bytes <= SHARED_BYTES[arch]
    # A number argument typed fp64 by the compiler would show here.
    assert facts.count("DADD") + facts.count("DMUL") + facts.count("DFMA") == 0
    # No gradient is added up in memory: bits agree between runs.
    # TMA descriptors are published by an exchange each, of the two that a loop walks, which adds nothing.
    exchanges = facts.count("ATOMG.E.EXCH")
    assert facts.count("RED.") + facts.count("ATOM.") + facts.count("ATOMG") == exchanges
    assert exchanges == (2 if facts.count("UTMALDG") else 0)
    if point.dtype != "fp32" and point.kernel != "delta":
        assert facts.count("HMMA") + facts.count("HGMMA") + facts.count("UTCHMMA") > 0
    if (point, arch) in SHORT and point.kernel != "delta":
        assert facts.count(MATRIX[arch]) > 0


@pytest.mark.offline
@needs_compiler
@pytest.mark.parametrize(
    "width,col,stages", [(64, 128, 3), (128, 128, 2), pytest.param(128, 64, 3, marks=pytest.mark.long)]
)
def test_a_group_of_warps_loads_and_two_compute_at_their_own_pace(width, col, stages):
    """About 10 s each: the compiler's own pass for it takes long."""
    point, key = flash_points.Point("forward", width, width), ("forward", 90, width, "descriptors")
    with MEASURED.trial(key, Tile(128, col, 4, stages, True, True)):
        split = compile_offline(point.launch("sm_90"), "sm_90")
    assert (split.spill_loads, split.spill_stores, split.stack_bytes) == (0, 0, 0)
    assert split.num_warps == 12 and split.registers * split.num_warps * 32 <= 65536
    assert split.shared_bytes <= SHARED_BYTES["sm_90"]
    assert split.count("USETMAXREG") > 0 and split.count("RED.") + split.count("ATOM.") == 0
    # The loop waits for its own group of four warps only, and copies nothing itself.
    loop = {
        kind: sum(n for op, n in split.loop.items() if op.startswith(kind)) for kind in ("BAR", "UTMALDG", "HGMMA")
    }
    assert loop["BAR"] <= 2 and loop["UTMALDG"] == 0 and loop["HGMMA"] >= 12


def test_what_the_compiler_cannot_split_takes_the_tile_of_the_tables():
    new = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    q, k, lse = new(1, 256, 2, 128), new(1, 256, 1, 128), new(1, 2, 256)
    options = Options(True, 1.0, 0, 0.0, 0.0, 0, 0)
    cu, apart = torch.empty(2, dtype=torch.int32, device="meta"), new(1, 128, 2, 256).transpose(1, 3)

    def split(q=q, sinks=None, cu=None, options=options):
        return forward_launch(q, k, k, sinks, None, cu, cu, options, q, lse, 90).constants["SPECIALIZED"]

    with MEASURED.trial(("forward", 90, 128, "descriptors"), Tile(128, 128, 4, 2, True, True)):
        assert split() and split(options=options._replace(causal=False))
        assert not split(sinks=new(2)) and not split(cu=cu) and not split(apart)
        assert not split(options=options._replace(window=4))


def test_the_short_list_is_short_and_names_are_unique():
    assert len(SHORT) <= 30
    names = [point.name for point in flash_points.all_points()]
    assert len(set(names)) == len(names) and "attention.dkdv.192x128" in names and "attention.delta.64.fp32" in names


def test_every_kernel_has_a_tile_for_every_architecture_head_dim_and_switch():
    for rows in (rows for table in TILES.values() for rows in table.values()):
        assert [limit for limit, _ in rows if limit > 32] == [64, 128, 256] == sorted(limit for limit, _ in rows)[-3:]
        assert all(tile.block_row % 16 == 0 and tile.block_col % 16 == 0 for _, row in rows for tile in row if tile)
    assert {kernel: sorted(table) for kernel, table in TILES.items()} == {
        kernel: [80, 90, 100] for kernel in ("forward", "dq", "dkdv")
    }


def _choice(kernel, width):
    """The row of sm_80 for channels padded to `width`."""
    found: Choice = dict(TILES[kernel][80])[width]
    return found


def test_the_wider_head_dim_and_the_switches_choose_the_tile():
    q, v, padded = (torch.empty(1, 4, 1, width, dtype=torch.bfloat16) for width in (128, 256, 80))
    plain = Options(True, 1.0, 0, 0.0, 0.0, 0, 0)
    choice = _choice("dq", 256)
    assert tile_of("dq", q, q, v, plain, 80) == choice.plain and tile_of("dq", v, v, q, plain, 80) == choice.plain
    assert tile_of("dq", q, q, v, plain._replace(window=3), 80) == choice.bounded
    assert tile_of("dq", q, q, v, plain._replace(softcap=3.0), 80) == choice.bounded
    assert tile_of("dq", q, q, v, plain._replace(softcap=3.0, dropout_p=0.5), 80) == choice.dropout
    wide = q.float(), q.float(), v.float()
    assert tile_of("dq", *wide, plain, 90) == tile_of("dkdv", *wide, plain, 100) == WIDE_TILES[-1][1]
    assert tile_of("dq", *wide, plain, 80) == WIDE_TILES[-1][1]._replace(num_warps=8)  # four spill
    # 80 channels of 128 are masked.
    masked = _choice("dkdv", 128)
    assert tile_of("dkdv", padded, padded, padded, plain, 80) == masked.ragged != masked.plain
    assert tile_of("dkdv", padded, padded, padded, plain, 90).descriptors  # TMA fills what is padded
    assert tile_of("dkdv", q, q, v, plain, 80) == _choice("dkdv", 256).ragged != tile_of("dkdv", v, v, v, plain, 80)
    assert tile_of("dq", padded, padded, padded, plain, 80) == _choice("dq", 128).plain
    assert tile_of("dq", padded, padded, padded, plain._replace(window=3), 80) == _choice("dq", 128).ragged
    assert arch_of(q) == 90 and [delta_rows(width) for width in (8, 64, 80, 256)] == [64, 64, 32, 16]


def test_descriptors_are_for_rows_that_tma_can_read():
    x = torch.empty(2, 8, 3, 64, dtype=torch.bfloat16)
    plain = Options(True, 1.0, 0, 0.0, 0.0, 0, 0)
    assert (
        tile_of("forward", x, x, x, plain, 90).descriptors and not tile_of("forward", x, x, x, plain, 80).descriptors
    )
    assert not tile_of("forward", x, x, x, plain._replace(window=4), 90).descriptors
    assert not tile_of("forward", x.float(), x.float(), x.float(), plain, 90).descriptors
    flat = torch.empty(2 * 8 * 3 * 64 + 1, dtype=torch.bfloat16)
    for other in (
        x.transpose(1, 3)[..., :8],  # channels apart
        x[..., 1:],  # not aligned
        flat[1:].view(x.shape),
        torch.empty(2, 8, 3, 65, dtype=torch.bfloat16)[..., :64],  # rows of 130 bytes
        x[:, :1].expand(2, 8, 3, 64),  # rows over each other
    ):
        assert not fits_descriptor(other)
        assert not tile_of("forward", x, x, other, plain, 90).descriptors
        assert not tile_of("dq", x, x, other, plain, 90).descriptors
        assert not tile_of("dkdv", x, x, x, plain, 90, other).descriptors
    odd = flat[1:].view(x.shape)  # each kernel asks what it walks, and no more
    assert tile_of("dq", odd, x, x, plain, 90).descriptors and tile_of("dkdv", x, odd, odd, plain, 90, x).descriptors
    assert fits_descriptor(x.transpose(1, 2)) and fits_descriptor(x[..., 8:])


def test_head_dim_256_may_use_mma_but_not_leave_the_tensor_cores_idle():
    def broken(point, opcode):
        return judge(Facts("kernel", "sm_90", 200, 0, 0, 0, 1024, 8, {opcode: 8}), rule_of(point))

    for point in ("attention.dkdv.256", "attention.dkdv.192x128", "attention.dq.256.dropout"):
        assert broken(point, "HMMA.16816.F32.BF16") == broken(point, "HGMMA.64x64x16.F32.BF16") == []
        assert "no HGMMA" in broken(point, "FFMA")[0]
    for point in ("attention.dq.256", "attention.forward.256", "attention.dkdv.128"):
        assert "no HGMMA" in broken(point, "HMMA.16816.F32.BF16")[0]
