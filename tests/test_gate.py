"""The static gate: each rule is broken once by facts made up for it; the declared list keeps all of them.

And the ratchet: what is worse than the committed rows fails, with the row; an unknown toolchain is NEW.
"""

import json
import subprocess

import pytest

from plait.kernels import cli, pinned
from plait.kernels.gate import (
    AMD,
    ARCHS,
    RULES,
    VARIANTS,
    Rule,
    amd_points,
    check,
    default_points,
    judge,
    narrow_accesses,
    resident_blocks,
    resident_warps,
    rule_of,
    wide_share,
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
        (with_opcode("STG.E.U8"), "1 global accesses under 128 bits; at most 0"),
        (GOOD._replace(instructions={"HMMA.16816": 8}), "no HGMMA: the tensor cores of sm_90 are idle"),
        (GOOD._replace(registers=128), "16 warps fit on a multiprocessor; at least 32"),
        (GOOD._replace(shared_bytes=100 * 1024), "8 warps fit on a multiprocessor; at least 32"),
        (GOOD._replace(tensor_columns=256), "8 warps fit on a multiprocessor; at least 32"),
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


@pytest.mark.parametrize(
    "change, blocks, limiter",
    [
        ({"registers": 96}, 5, "registers"),
        ({"registers": 32, "shared_bytes": 100 * 1024}, 2, "shared memory"),
        ({"registers": 32, "tensor_columns": 512}, 1, "tensor memory"),
        ({"registers": 16, "num_warps": 8}, 8, "warps"),
        ({"registers": 16, "num_warps": 1}, 32, "blocks"),
    ],
)
def test_blocks_say_what_limits_them(change, blocks, limiter):
    assert resident_blocks(GOOD._replace(**change)) == (blocks, limiter)


def test_less_than_95_percent_in_wide_accesses_breaks_a_streaming_rule_without_a_reason():
    facts = GOOD._replace(instructions={"LDG.E.128": 4, "LDG.E": 1, "HGMMA": 1})  # 64 of 68 bytes
    assert wide_share(facts) == 64 / 68
    assert judge(facts, STRICT._replace(narrow=1)) == ["94.1% of bytes in 128-bit accesses; at least 95%"]
    assert judge(facts, STRICT._replace(narrow=1, wide=0.9)) == judge(facts, STRICT._replace(narrow=None)) == []
    lax = {prefix: rule for prefix, rule in RULES.items() if rule.wide < 0.95 or rule.mma}
    assert all(rule.reason for rule in lax.values()) and not any(
        rule.reason for prefix, rule in RULES.items() if prefix not in lax
    )


def test_more_shared_memory_than_a_block_may_have_is_said():
    said = judge(GOOD._replace(shared_bytes=228 * 1024), STRICT._replace(min_warps=0))
    assert said == [f"{228 * 1024} bytes of shared memory; at most {227 * 1024}"]


def test_every_point_has_a_rule_and_every_rule_a_point():
    names = list(points(every=True))
    assert all(rule_of(name) for name in names)
    assert [prefix for prefix in RULES if not any(name.startswith(prefix) for name in names)] == []
    with pytest.raises(KeyError, match="'nothing.forward' has no rule"):
        rule_of("nothing.forward")


def test_the_declared_list_is_bounded_and_has_every_kind():
    chosen = default_points()
    assert len(chosen) <= 80 and {arch for _, arch in chosen} - {AMD} == set(ARCHS)
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
    for command in (["check"], ["pin"], ["diff"], ["explain"]):  # well written, and nobody knows its limits
        assert cli.main([*command, "swiglu.forward", "--arch", "sm_42"]) == 2
        assert "'sm_42' are known; valid: sm_80, sm_90, sm_100, gfx942" in capsys.readouterr().err


# ---- the ratchet --------------------------------------------------------------------------------------------------

KEY = "swiglu.forward sm_90"
ROW = pinned.row_of(GOOD._replace(loop={"HGMMA.64x64x16.F32": 8, "BAR.SYNC": 2}, code="ab"), None)._replace(
    programs=4, flop=64.0, nbytes=1000.0, bound_us=0.5, bound_by="memory"
)


def test_nothing_to_check_is_no_success(capsys):
    """`check --arch sm_13` once checked 0 points, and returned 0."""
    for command in ("check", "diff", "pin"):
        assert cli.main([command, "--arch", "sm_13"]) == 2
        assert "no limits of 'sm_13' are known; valid: sm_80, sm_90, sm_100, gfx942" in capsys.readouterr().err


@pytest.mark.parametrize("content", [bytes(range(256)), b"[" * 100_000])
def test_a_base_that_is_no_file_of_rows_is_one_line(content, tmp_path, capsys):
    (tmp_path / "a.json").write_bytes(content)
    assert cli.main(["diff", "--base", str(tmp_path / "a.json")]) == 2
    assert "a.json: is no file of pinned rows" in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_is_one_line(monkeypatch, capsys):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "cache")

    monkeypatch.setattr(cli, "compile_offline", full)
    assert cli.main(["explain", "rms_norm.forward.128"]) == 2
    assert capsys.readouterr().err == "plait kernels explain: [Errno 28] No space left on device: 'cache'\n"


def test_a_row_holds_what_the_facts_say():
    assert (ROW.warps, ROW.blocks, ROW.limiter, ROW.resident_warps) == (4, 8, "registers", 32)
    assert (ROW.matrix, ROW.matrix_in_loop, ROW.barriers_in_loop, ROW.wide_share) == ("HGMMA", 8, 2, 1.0)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"registers": 65}, "registers 64 -> 65"),
        ({"stack_bytes": 8}, "bytes of stack 0 -> 8"),
        (
            {"spills": 3, "spill_lines": {"flash.py:7": 2, "flash.py:9": 1}},
            "spills 0 -> 3; (most of them at flash.py:7",
        ),
        ({"shared_bytes": 2048}, "bytes of shared memory 1024 -> 2048"),
        ({"tensor_columns": 64}, "columns of tensor memory 0 -> 64"),
        ({"blocks": 7}, "resident warps 32 -> 28"),
        ({"wide_share": 0.5}, "share of 128-bit accesses 1 -> 0.5"),
        ({"matrix": "HMMA"}, "matrix instructions of the hot loop HGMMA -> HMMA"),
        ({"matrix": "", "matrix_in_loop": 0}, "matrix instructions of the hot loop HGMMA -> none"),
        ({"flop": 65.0}, "FLOP 64 -> 65"),
        ({"nbytes": 1001.0}, "bytes asked for 1000 -> 1001"),
    ],
)
def test_whatever_is_worse_than_pinned_is_said(change, text):
    found = pinned.compare(KEY, ROW, ROW._replace(**change))
    assert found.status == "worse" and text in "; ".join(found.said)
    assert pinned.compare(KEY, ROW._replace(**change), ROW).status == "better"


@pytest.mark.parametrize(
    "change, status",
    [
        ({}, "same"),
        ({"code": "cd"}, "code"),
        ({"barriers_in_loop": 3, "instructions": 99, "code": "cd"}, "code"),  # shown, and no failure
        ({"bound_us": 9.0, "code": "cd"}, "code"),
        ({"flop": -1.0, "nbytes": -1.0}, "same"),  # not known on a side
        ({"registers": 40, "shared_bytes": 2048}, "worse"),  # one thing better and another worse
    ],
)
def test_what_is_not_held_is_no_failure(change, status):
    assert pinned.compare(KEY, ROW, ROW._replace(**change)).status == status


def test_a_point_that_is_not_pinned_is_new_and_one_without_a_point_is_gone():
    assert pinned.compare(KEY, None, ROW).status == "NEW"
    assert pinned.compare(KEY, ROW, None).status == "gone"


def test_pins_only_tighten_unless_a_reason_is_given_and_kept():
    pins, worse, better = pinned.Pins({}), ROW._replace(registers=70), ROW._replace(registers=50)

    def pin(row, reason=""):
        return pinned.pin(pins, "tool", [pinned.compare(KEY, pins.data.get("tool", {}).get(KEY), row)], reason)

    assert len(pin(ROW)) == 1 and pin(ROW) == []
    with pytest.raises(pinned.PinError, match="swiglu.forward sm_90 is worse: registers 64 -> 70; give --reason"):
        pin(worse)
    assert pins.data["tool"][KEY] == ROW
    pin(worse, "wider tiles win on the card")
    pin(worse._replace(code="ef"))
    assert pins.data["tool"][KEY].reason == "wider tiles win on the card"
    pin(better)
    assert pins.data["tool"][KEY] == better


def test_a_file_of_pins_is_read_back_the_same_and_has_a_line_a_row(tmp_path):
    pins = pinned.Pins({"a": {KEY: ROW, "x sm_80": ROW._replace(reason="why")}, "b": {KEY: ROW}})
    pins.write(tmp_path / "pins.json")
    text = (tmp_path / "pins.json").read_text()
    assert pinned.Pins.read(tmp_path / "pins.json").data == pins.data
    assert sum("registers" in line for line in text.splitlines()) == 3 and json.loads(text)["schema"] == 1
    assert pinned.Pins.read(tmp_path / "none.json").data == {}


@pytest.mark.parametrize(
    "text, message",
    [("[1", "is no file of pinned rows"), ('{"schema": 2, "rows": {}}', "schema is 2"), ("{}", "is no file"),
     ('{"schema": 1, "rows": {"t": {"k": {"registers": 1}}}}', "is no file of pinned rows")],
)  # fmt: skip
def test_a_damaged_file_of_pins_is_named(text, message, tmp_path, capsys):
    path = tmp_path / "pins.json"
    path.write_text(text)
    with pytest.raises(pinned.PinError, match=message):
        pinned.Pins.read(path)
    assert cli.main(["diff", "swiglu", "--base", str(path)]) == 2
    assert f"plait kernels diff: {path}" in capsys.readouterr().err


WORK = {"programs": 1, "flop": 0.0, "nbytes": 8.0, "bound_us": 0.5, "bound_by": "memory"}


@pytest.fixture
def made_up(monkeypatch, tmp_path):
    """The command line with facts that are made up and a file of pins of its own; returns (its path, the facts)."""
    facts = {"now": GOOD._replace(registers=32, num_warps=8, instructions={"LDG.E.128": 4, "STG.E.128": 2})}
    path = tmp_path / "pinned.json"
    monkeypatch.setattr(pinned, "PATH", path)
    monkeypatch.setattr(pinned, "toolchain", lambda: "a toolchain")
    monkeypatch.setattr(pinned, "work_of", lambda launch, arch: dict(WORK))
    monkeypatch.setattr(pinned, "compile_offline", lambda launch, arch: facts["now"]._replace(arch=arch))
    monkeypatch.setattr(check, "__kwdefaults__", {"compile_point": pinned.compile_offline})
    return path, facts


def test_check_says_new_for_an_unknown_toolchain_and_fails_for_a_worse_row(made_up, capsys):
    path, facts = made_up
    args = ["swiglu.forward", "--arch", "sm_90"]
    assert cli.main(["check", *args]) == 0
    said = capsys.readouterr().out
    assert "NEW: a toolchain has no pinned rows" in said and "ok, NEW" in said
    assert cli.main(["pin", *args, "--out", str(path)]) == 0
    assert cli.main(["check", *args, "--json", str(path.with_name("out.json"))]) == 0
    assert "NEW" not in capsys.readouterr().out.split("rows written")[1]
    (point,) = json.loads(path.with_name("out.json").read_text())["points"]
    assert (point["key"], point["status"], point["row"]["registers"]) == (KEY, "ok", 32)
    facts["now"] = facts["now"]._replace(registers=40)
    assert cli.main(["check", *args]) == 1
    assert "worse than pinned: registers 32 -> 40; resident warps 64 -> 48" in capsys.readouterr().out
    assert cli.main(["diff", *args]) == 1
    assert f"{KEY:48s} worse   registers 32 -> 40" in capsys.readouterr().out
    assert cli.main(["pin", *args, "--out", str(path)]) == 2
    assert "give --reason TEXT" in capsys.readouterr().err
    assert cli.main(["pin", *args, "--out", str(path), "--reason", "measured faster"]) == 0
    assert cli.main(["check", *args]) == 0
    assert '"reason": "measured faster"' in path.read_text()


def test_diff_takes_a_file_or_a_git_ref_as_its_base(made_up, capsys):
    path, facts = made_up
    args = ["swiglu.forward", "--arch", "sm_90"]
    assert cli.main(["pin", *args, "--out", str(path)]) == 0
    repository = path.parent
    for words in (["init", "-q"], ["add", path.name], ["commit", "-qm", "pins"]):
        subprocess.run(
            ["git", "-C", str(repository), "-c", "user.name=n", "-c", "user.email=e@x", *words], check=True
        )
    facts["now"] = facts["now"]._replace(registers=24, code="other")
    path.write_text('{"schema": 1, "rows": {}}')
    assert cli.main(["diff", *args, "--base", "HEAD"]) == 0
    assert "better  registers 32 -> 24" in capsys.readouterr().out
    assert cli.main(["diff", *args, "--base", "no-such-ref"]) == 2
    assert "'no-such-ref' is no file and no git ref with pinned.json" in capsys.readouterr().err
    assert cli.main(["diff", *args]) == 0
    assert "NEW: the base has no rows of a toolchain" in capsys.readouterr().out


def test_pin_and_diff_refuse_names_that_do_not_exist(capsys):
    for command in ("pin", "diff"):
        assert cli.main([command, "no_such_kernel"]) == 2
        assert "no kernel 'no_such_kernel'" in capsys.readouterr().err


def test_every_declared_point_is_pinned_for_every_toolchain_of_the_file():
    declared = {pinned.key_of(name, arch) for name, arch in default_points() + amd_points()}
    found = pinned.Pins.read(pinned.PATH).data
    assert found and all(declared <= set(rows) for rows in found.values())


@pytest.mark.offline
@needs_compiler
@pytest.mark.parametrize("name, arch", default_points(), ids=lambda value: value)
def test_keeps_the_rules_and_is_no_worse_than_pinned(name, arch):
    (verdict,) = check([(name, arch)])
    assert verdict.broken == []
    rows = pinned.Pins.read(pinned.PATH).data.get(pinned.toolchain(), {})  # of an unknown toolchain: NEW
    change = pinned.compare(
        pinned.key_of(name, arch), rows.get(pinned.key_of(name, arch)), pinned.measure(name, arch, verdict.facts)
    )
    assert change.status in ("same", "code", "better", "NEW"), change.said


@pytest.mark.offline
@needs_compiler
def test_check_on_the_command_line(capsys):
    assert cli.main(["check", "swiglu", "--arch", "sm_90"]) == 0
    assert "2 points checked, 0 break a rule" in capsys.readouterr().out
    if amd_points():
        assert cli.main(["check", "swiglu", "--arch", AMD]) == 0
        assert "2 points checked, 0 break a rule" in capsys.readouterr().out
