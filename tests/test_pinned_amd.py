"""AMD's assembly in the words of the gate: text is read right, rules are broken once each, kernels keep all."""

import pytest

from plait.kernels import pinned, pinned_amd, pinned_code
from plait.kernels.gate import (
    AMD,
    AMD_SHORT,
    amd_points,
    check,
    judge,
    launch_of,
    resident_blocks,
    rule_of,
    wide_share,
)
from plait.kernels.inspect import Facts, amd_available, compile_launch
from plait.kernels.launch import Launch
from plait.kernels.points import points
from tests.cases import needs_compiler

TEXT = """
\t.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
kernel:                                 ; @kernel
\t.file\t1 "/somewhere" "flash.py"
\t.loc\t1 30 1 prologue_end             ; flash.py:30:1
\ts_load_dwordx2 s[2:3], s[0:1], 0x0
\ts_cbranch_scc1 .LBB0_2                ; comment
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
\t.loc\t1 41 9                          ; flash.py:41:9 @[ flash.py:50:2 ]
\tbuffer_load_dwordx4 v[0:3], v4, s[4:7], 0 offen
\tv_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
\ts_barrier
\tscratch_store_dword off, v1, s33      ; 4-byte Folded Spill
\ts_cbranch_vccnz .LBB0_1
.LBB0_2:
\tbuffer_store_short v0, v1, s[4:7], 0 offen
\tglobal_atomic_add_f32 v0, v1, s[0:1]
\tv_fma_f64 v[0:1], v[2:3], v[4:5], v[6:7]
\ts_endpgm
    .private_segment_fixed_size: 8
    .sgpr_count:     51
    .sgpr_spill_count: 1
    .vgpr_count:     130
    .vgpr_spill_count: 2
"""
GOOD = Facts("kernel", AMD, 128, 0, 0, 0, 1024, 4, {"LDG.E.128.buffer_load_dwordx4": 2, "MFMA.v_mfma_f32": 8})


def test_a_kernel_is_read_in_the_words_of_the_gate():
    read = pinned_amd.read(TEXT)
    assert (read["registers"], read["scalar_registers"], read["stack_bytes"], read["spilled"]) == (130, 51, 8, 3)
    assert read["instructions"] == {
        "s_load_dwordx2": 1, "s_cbranch_scc1": 1, "LDG.E.128.buffer_load_dwordx4": 1, "BAR.s_barrier": 1,
        "MFMA.v_mfma_f32_32x32x8_bf16": 1, "STL.scratch_store_dword": 1, "s_cbranch_vccnz": 1,
        "STG.E.U16.buffer_store_short": 1, "ATOMG.global_atomic_add_f32": 1, "DFMA.v_fma_f64": 1, "s_endpgm": 1,
    }  # fmt: skip
    assert read["spill_lines"] == {"flash.py:41": 1}
    assert sum(read["loop"].values()) == 5 and read["loop"]["MFMA.v_mfma_f32_32x32x8_bf16"] == 1


def test_the_hash_is_of_instructions_alone():
    same = TEXT.replace("/somewhere", "/elsewhere").replace("41 9", "42 9").replace("; comment", "")
    assert pinned_amd.read(same)["code"] == pinned_amd.read(TEXT)["code"]
    assert pinned_amd.read(TEXT.replace("v4, s[4:7]", "v5, s[4:7]"))["code"] != pinned_amd.read(TEXT)["code"]
    with pytest.raises(ValueError, match="amdgcn: says no vgpr_count"):
        pinned_amd.read("\ts_endpgm\n")


@pytest.mark.parametrize(
    "opcode, word",
    [("global_load_dwordx3", "LDG.E.96"), ("flat_load_ubyte", "LDG.E.U8"), ("buffer_load_short_d16", "LDG.E.U16"),
     ("global_load_lds_dword", "LDGSTS.E.32"), ("buffer_store_dwordx2", "STG.E.64"), ("scratch_load_dword", "LDL"),
     ("v_smfmac_f32_16x16x32_bf16", "MFMA"), ("v_add_f64", "DADD"), ("v_add_f32_e32", "")],
)  # fmt: skip
def test_opcodes_are_led_by_their_words(opcode, word):
    assert pinned_amd.worded(opcode) == (f"{word}.{opcode}" if word else opcode)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"spill_stores": 3}, "spills: 0 loads, 3 stores"),
        ({"stack_bytes": 8}, "8 bytes of stack"),
        ({"instructions": {"MFMA.x": 1, "DFMA.v_fma_f64": 1}}, "1 fp64 instructions"),
        ({"instructions": {"MFMA.x": 1, "ATOMG.global_atomic_add_f32": 1}}, "1 atomic instructions"),
        ({"instructions": {"v_fma_f32": 1}}, "no MFMA: the tensor cores of gfx942 are idle"),
        ({"shared_bytes": 65537, "num_warps": 4}, "65537 bytes of shared memory; at most 65536"),
    ],
)
def test_each_rule_is_broken_once(change, text):
    rule = rule_of("linear.forward", AMD)
    assert judge(GOOD, rule) == [] and rule.matrix and not rule_of("swiglu.forward", AMD).matrix
    assert text in judge(GOOD._replace(**change), rule)[0]


@pytest.mark.parametrize(
    "registers, shared, warps, blocks, limiter",
    [
        (128, 0, 4, 4, "registers"),  # four waves of a SIMD unit
        (129, 0, 4, 3, "registers"),  # registers go by eight
        (256, 0, 8, 1, "registers"),
        (500, 0, 4, 1, "registers"),
        (24, 0, 4, 8, "warps"),
        (24, 0, 1, 16, "blocks"),
        (24, 32768, 4, 2, "shared memory"),
    ],
)
def test_waves_of_a_compute_unit(registers, shared, warps, blocks, limiter):
    facts = GOOD._replace(registers=registers, shared_bytes=shared, num_warps=warps)
    assert resident_blocks(facts) == (blocks, limiter)


def test_shares_of_access_widths_are_those_of_amds_opcodes():
    narrow = GOOD._replace(instructions={"LDG.E.128.buffer_load_dwordx4": 1, "STG.E.U16.buffer_store_short": 2})
    assert wide_share(narrow) == 16 / 20 and wide_share(GOOD) == 1.0


def test_a_row_of_amd_has_its_matrix_instructions_and_scalar_registers():
    facts = GOOD._replace(loop={"MFMA.v_mfma_f32": 8, "BAR.s_barrier": 2}, scalar_registers=40)
    row = pinned.row_of(facts, None)
    assert (row.matrix, row.matrix_in_loop, row.barriers_in_loop, row.scalar_registers) == ("MFMA", 8, 2, 40)
    assert pinned_code.MATRIX[-1] == "MFMA" and pinned.compare("k", row, row._replace(matrix="")).status == "worse"


def _shape(launch: Launch) -> tuple[object, ...]:
    """All of a launch but its tensors."""
    return launch.kernel, launch.grid, launch.constants, launch.num_warps, launch.num_stages


def test_launches_take_the_tiles_of_sm_80_with_two_stages():
    for name in ("linear.forward", "attention.forward.128"):
        there, here = points()[name]("sm_80"), launch_of(name, AMD)
        assert there.num_stages > 2 and _shape(here) == _shape(there._replace(num_stages=2))
    assert launch_of("attention.dkdv.128", AMD).constants["BLOCK_ROW"] == 32
    name = "attention.dkdv.128"
    assert _shape(launch_of(name, "sm_90")) == _shape(points()[name]("sm_90")) != _shape(launch_of(name, AMD))


def test_the_kernels_of_the_short_run_are_declared_ones():
    assert set(AMD_SHORT) <= {name for name, _ in amd_points()} or not amd_available()


@pytest.mark.offline
@pytest.mark.long  # those of the short run are in test_gate.py
@needs_compiler
@pytest.mark.parametrize("name", [name for name, _ in amd_points() if name not in AMD_SHORT])
def test_compiles_for_gfx942_without_a_spill(name):
    (verdict,) = check([(name, AMD)])
    rows = pinned.Pins.read(pinned.PATH).data.get(pinned.toolchain(), {})
    change = pinned.compare(name, rows.get(pinned.key_of(name, AMD)), pinned.measure(name, AMD, verdict.facts))
    assert verdict.broken == [] and change.status in ("same", "code", "better", "NEW"), change.said


@pytest.mark.offline
@needs_compiler
@pytest.mark.skipif(not amd_available(), reason="this triton makes no code for AMD without ROCm")
def test_what_is_read_is_linked_into_a_code_object():
    compiled = compile_launch(launch_of("swiglu.forward", AMD), AMD)
    assert compiled.asm["hsaco"][:4] == b"\x7fELF" and "gfx942" in compiled.asm["amdgcn"]
