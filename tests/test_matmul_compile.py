"""The matmul kernels compiled for each architecture with the tiles of its tables: no spills, wide, tensor cores."""

import pytest
import torch

from plait.kernels import matmul_points as matmul_points_file
from plait.kernels import points
from plait.kernels.inspect import compile_offline, parse_arch
from plait.kernels.matmul_launch import TILES, Epilogue, Plan, Tile, plan, product_launches, swiglu_launch
from plait.kernels.matmul_points import points as matmul_points
from tests.cases import needs_compiler

ARCHS = ("sm_80", "sm_90", "sm_100")
NAMES = tuple(matmul_points())
# Per multiprocessor, less what the driver keeps (CUDA programming guide, compute capabilities).
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
MATRIX = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA"}
# Without tensor cores: elementwise, and fp32 multiplied as fp32. The smallest tiles use mma on every card.
PLAIN = ("linear.finish", "linear.activation_grad", "linear.fp32")
SMALL = ("linear.few_rows",)
# A bias is read by column, a few bytes a thread, as are sums of rows; the generator's key is 8 bytes, read for each
# part of a tile: so many narrow loads and stores in the code, at most.
NARROW = 64


@pytest.mark.offline
@pytest.mark.long  # the declared list of test_gate.py stays in the short run
@needs_compiler
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", NAMES)
def test_compiles_without_spills_and_uses_the_tensor_cores(name, arch):
    launch = matmul_points()[name](arch=arch)
    facts = compile_offline(launch, arch)
    assert (facts.spill_loads, facts.spill_stores, facts.stack_bytes) == (0, 0, 0)
    assert 0 < facts.registers <= 255 and facts.shared_bytes <= SHARED_BYTES[arch]
    assert facts.count("DADD") + facts.count("DMUL") + facts.count("DFMA") == 0
    # Nothing is added up in memory. The exchange is how a descriptor, once per program, reaches memory.
    exchanges = facts.count("ATOMG.E.EXCH")
    assert facts.count("RED.") + facts.count("ATOM.") + facts.count("ATOMG") == exchanges <= 3
    matrix = "HMMA" if name in SMALL else MATRIX[arch]
    assert (facts.count(matrix) > 0) == (name not in PLAIN)
    # Tiles come by TMA where there is one, else by asynchronous copies of 16 bytes; both are wide.
    if name not in ("linear.finish", "linear.activation_grad"):
        assert (facts.count("UTMALDG") > 0) == (arch != "sm_80")
        copies = facts.count("LDGSTS")
        assert copies == sum(n for op, n in facts.instructions.items() if op.startswith("LDGSTS") and "128" in op)
        assert (copies > 0) == (arch == "sm_80")
    narrow = sum(n for op, n in facts.instructions.items() if op.startswith(("LDG.", "STG.")) and ".128" not in op)
    assert narrow <= NARROW


# Of each kernel and architecture one tile whose loads have a group of warps of their own.
GROUPED = (
    ("linear.epilogue", "sm_90", Tile(128, 256, 64, 4, 4, 4, specialized=True)),
    ("linear.split", "sm_90", Tile(128, 128, 64, 4, 4, 2, specialized=True)),
    ("linear.dgrad.gated", "sm_90", Tile(128, 128, 64, 4, 4, 4, specialized=True)),
    ("linear.epilogue", "sm_100", Tile(128, 256, 64, 8, 4, 4, specialized=True)),
    ("linear.swiglu", "sm_100", Tile(128, 128, 64, 8, 3, specialized=True)),
)


@pytest.mark.offline
@pytest.mark.long  # 3 to 15 s each
@needs_compiler
@pytest.mark.parametrize("name,arch,tile", GROUPED)
def test_a_group_of_warps_loads_and_the_others_multiply_without_a_barrier_of_all(name, arch, tile, monkeypatch):
    monkeypatch.setattr(
        matmul_points_file, "plan", lambda op, a, b, number: plan(op, a, b, number)._replace(tile=tile)
    )
    facts = compile_offline(matmul_points()[name](arch=arch), arch)
    assert (facts.spill_loads, facts.spill_stores, facts.stack_bytes) == (0, 0, 0)
    assert facts.num_warps == 12 and facts.registers * 12 * 32 <= 65536 and facts.count("USETMAXREG") > 0
    assert facts.shared_bytes <= SHARED_BYTES[arch]
    loop = {
        kind: sum(n for op, n in facts.loop.items() if op.startswith(kind)) for kind in ("BAR", "UTMALDG", "U", "H")
    }
    assert loop["UTMALDG"] == 0 and loop["BAR"] <= (2 if arch == "sm_90" else 0)
    assert sum(n for op, n in facts.loop.items() if op.startswith(MATRIX[arch])) >= 4


# (M, N, K, splits): sizes of 1 are constants to the compiler, odd ones rule out descriptors.
EDGES = (
    (1, 1, 1, 1),
    (1, 64, 64, 2),
    (64, 1, 64, 1),
    (64, 64, 1, 1),
    (63, 65, 67, 1),
    (63, 65, 67, 2),
    (64, 64, 0, 1),
)


@pytest.mark.offline
@pytest.mark.long  # the declared list of test_gate.py stays in the short run
@needs_compiler
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("rows,cols,inner,num_splits", EDGES)
def test_edge_sizes_compile(rows, cols, inner, num_splits, layout):
    """What the interpreter cannot show: it makes no constant of a 1."""

    def new(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    a, b = (new(n, inner) if layout == "rows" else new(inner, n).t() for n in (rows, cols))
    out, sums = new(rows, cols), new(rows, dtype=torch.float32)
    extra = Epilogue(new(cols), 1, True, 0, out, (new(2, dtype=torch.int64), 0.1, 0, 0, 0), rows, out, True, sums)
    odd = plan("dropout", a, b, 90).tile if inner == 67 else Tile(64, 64, 32, 4, 3, 2)
    launches = product_launches(a, b, out, extra, Plan(90, odd, num_splits))
    weight = new(2 * cols, inner)
    gated = plan("swiglu", a, weight, 90)
    launches.append(swiglu_launch(a, weight, out, new(rows, 2 * cols), gated))
    for launch in launches:
        facts = compile_offline(launch, "sm_90")
        assert (facts.spill_loads, facts.spill_stores, facts.stack_bytes) == (0, 0, 0)


def test_the_points_are_listed_with_the_others():
    assert set(NAMES) <= set(points.points())


@pytest.mark.parametrize("arch", ARCHS)
def test_the_points_take_the_tile_of_their_architecture(arch):
    number = parse_arch(arch)
    a, b = (torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta") for _ in range(2))
    assert plan("linear", a, b, number).tile == TILES["any", number, "large"]
    launch = matmul_points()["linear.forward"](arch=arch)
    assert launch.constants["DESCRIPTORS"] == (number >= 90)
    assert launch.constants["BLOCK_COL"] == TILES["any", number, "large"].block_col
