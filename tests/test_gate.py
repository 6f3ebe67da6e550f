"""The static gate: each rule is broken once by facts made up for it; the declared list keeps all of them."""

import pytest

from plait.kernels import cli
from plait.kernels.gate import (
    ARCHS,
    RULES,
    VARIANTS,
    Rule,
    check,
    default_points,
    judge,
    narrow_accesses,
    resident_warps,
    rule_of,
)
from plait.kernels.inspect import Facts
from plait.kernels.points import points
from tests.cases import needs_compiler

GOOD = Facts("kernel", "sm_90", 64, 0, 0, 0, 1024, 4, {"LDG.E.128": 4, "STG.E.128": 2, "HGMMA.64x64x16.F32": 8})
STRICT = Rule(min_warps=32, narrow=0, matrix=True)


def with_opcode(opcode: str) -> Facts:
    return GOOD._replace(instructions={**GOOD.instructions, opcode: 1})


def test_good_code_breaks_nothing():
    assert judge(GOOD, STRICT) == []


@pytest.mark.parametrize(
    "facts, text",
    [
        (GOOD._replace(spill_loads=3), "spills: 3 loads, 0 stores, 0 bytes of stack"),
        (GOOD._replace(spill_stores=2), "spills: 0 loads, 2 stores"),
        (GOOD._replace(stack_bytes=16), "16 bytes of stack"),
        (with_opcode("DFMA"), "1 fp64 instructions"),
        (with_opcode("RED.E.ADD.F32"), "1 atomic instructions"),
        (with_opcode("ATOMG.E.ADD"), "1 atomic instructions"),
        (with_opcode("LDG.E"), "1 global accesses under 128 bits; at most 0"),
        (with_opcode("STG.E.64"), "1 global accesses under 128 bits; at most 0"),
        (GOOD._replace(instructions={"HMMA.16816": 8}), "no HGMMA: the tensor cores of sm_90 are idle"),
        (GOOD._replace(registers=128), "16 warps fit on a multiprocessor; at least 32"),
        (GOOD._replace(shared_bytes=100 * 1024), "8 warps fit on a multiprocessor; at least 32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_broken_rule_is_said(facts, text):
    (said,) = judge(facts, STRICT)
    assert text in said


def test_shared_memory_atomics_descriptors_and_bulk_copies_are_no_fault():
    assert judge(with_opcode("ATOMS.CAS"), STRICT) == []
    assert judge(with_opcode("ATOMG.E.EXCH.STRONG.GPU"), STRICT) == []
    assert narrow_accesses(with_opcode("UTMALDG.2D")) == 0


@pytest.mark.parametrize(
    "registers, shared, warps_each, resident",
    [(32, 0, 4, 64), (33, 0, 4, 48), (255, 0, 4, 8), (128, 0, 8, 16), (32, 113 * 1024, 4, 8), (32, 0, 1, 32)],
)
def test_resident_warps_by_registers_shared_memory_and_blocks(registers, shared, warps_each, resident):
    facts = GOOD._replace(registers=registers, shared_bytes=shared, num_warps=warps_each)
    assert resident_warps(facts) == resident


def test_every_point_has_a_rule_and_every_rule_a_point():
    names = list(points(every=True))
    assert all(rule_of(name) for name in names)
    assert [prefix for prefix in RULES if not any(name.startswith(prefix) for name in names)] == []
    with pytest.raises(KeyError, match="'nothing.forward' has no rule"):
        rule_of("nothing.forward")


def test_the_declared_list_is_bounded_and_has_every_kind():
    chosen = default_points()
    assert len(chosen) <= 80 and {arch for _, arch in chosen} == set(ARCHS)
    kinds = {name.split(".")[0] for name in points()}
    assert {name.split(".")[0] for name, _ in chosen} == kinds
    assert [ending for ending in VARIANTS if not any(name.endswith(ending) for name in points())] == []


def test_check_judges_what_it_compiled():
    spilling = GOOD._replace(spill_loads=1)
    (verdict,) = check([("swiglu.forward", "sm_90")], compile_point=lambda launch, arch: spilling)
    assert verdict.name == "swiglu.forward" and verdict.broken[0].startswith("spills")


def test_check_refuses_names_and_architectures_that_do_not_exist(capsys):
    assert cli.main(["check", "no_such_kernel"]) == 2
    assert cli.main(["check", "swiglu", "--arch", "volta"]) == 2
    assert "no kernel 'no_such_kernel'" in capsys.readouterr().err


@pytest.mark.offline
@needs_compiler
@pytest.mark.parametrize("name, arch", default_points(), ids=lambda value: value)
def test_keeps_the_rules(name, arch):
    (verdict,) = check([(name, arch)])
    assert verdict.broken == []


@pytest.mark.offline
@needs_compiler
def test_check_on_the_command_line(capsys):
    assert cli.main(["check", "swiglu", "--arch", "sm_90"]) == 0
    assert "2 points checked, 0 break a rule" in capsys.readouterr().out
