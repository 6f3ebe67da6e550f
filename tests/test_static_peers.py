"""The `static` suite: peers are found or said to be missing, their launches are recorded, losses are named.

Liger and triton's tutorials are no dependencies: a small file written here plays the tutorial.
"""

import json
import textwrap
from functools import partial

import pytest
import torch

from plait.bench import static_counts, static_peers, suite_static
from plait.bench.result_file import measured_of
from plait.bench.spec import CaseResult, Measured, Options
from plait.bench.static_case import Peer, StaticCase
from plait.bench.static_cases import all_cases
from plait.bench.static_peers import best, liger, pretend_card, record, tutorial
from plait.kernels.inspect import Facts
from plait.kernels.points import points
from tests.cases import interpret, needs_compiler, needs_interpreter

TUTORIAL = """
import no_such_module_anywhere
import torch
import triton
import triton.language as tl

DEVICE = triton.runtime.driver.active.get_active_torch_device()
CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (64, 256) for warps in (1, 8)]
raise SystemExit("the rest of a tutorial must not run")


def unused():
    return torch.zeros(1, device="cuda") + undefined_name


@triton.autotune(CONFIGS, key=["n"])
@triton.jit
def _double(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    tl.store(out_ptr + offsets, x + x, mask=offsets < n)


@triton.jit
def _count(x_ptr, n, scale, BLOCK: tl.constexpr):
    tl.store(x_ptr, n * scale.to(tl.float32))


def double(x):
    assert x.device.type == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    out = torch.empty(x.shape, device="cuda", dtype=x.dtype)
    programs = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    _count[(programs,)](x, 3, 0.5, BLOCK=16, num_warps=2, num_stages=5)
    _double[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
    return out
"""
FACTS = Facts("kernel", "sm_90", 64, 0, 0, 0, 1024, 4, {"LDG.E.128": 3, "STG.E": 2, "HGMMA.64x64x16.F32": 8})


@pytest.fixture
def module(tmp_path):
    (tmp_path / "01-double.py").write_text(textwrap.dedent(TUTORIAL))
    found = tutorial(tmp_path, "01-double.py", "double")
    assert not isinstance(found, str), found
    return found


# ---- finding them -------------------------------------------------------------------------------------------------


def test_what_is_not_there_is_said(tmp_path, monkeypatch):
    assert tutorial(None, "01-double.py", "double") == "triton's tutorials: not found (give --tutorials DIR)"
    assert str(tutorial(tmp_path, "01-double.py", "double")).endswith("01-double.py: not found")
    (tmp_path / "01-double.py").write_text("import torch\n")
    assert "has no double" in str(tutorial(tmp_path, "01-double.py", "double"))
    monkeypatch.setattr(static_peers.importlib.util, "find_spec", lambda name: None)
    assert liger("rms_norm") == "liger_kernel is not installed"


def test_the_card_is_only_said_to_be_there():
    x = torch.zeros(3)
    with pretend_card():
        assert x.device.type == "cuda"
        made = torch.ones(2, device="cuda")
        assert torch.cuda.get_device_properties(0).multi_processor_count == 132
    assert made.device.type == x.device.type == "cpu" and made.sum() == 2


# ---- recording ----------------------------------------------------------------------------------------------------


@needs_compiler
def test_a_launcher_is_recorded_with_its_grid_and_all_its_configurations(module):
    x = torch.ones(1000)
    single, tuned = record(lambda: module.double(x))
    assert x.sum() == 1000  # nothing ran
    (launch,) = single.launches
    assert (launch.grid, launch.num_warps, launch.num_stages) == ((132,), 2, 5)
    assert launch.arguments[1:] == (3, 0.5) and launch.constants == {"BLOCK": 16}
    assert [one.grid for one in tuned.launches] == [(16,), (16,), (4,), (4,)]
    assert [one.num_warps for one in tuned.launches] == [1, 8, 1, 8]
    assert tuned.texts[-1] == "BLOCK 256, 8 warps, 3 stages"


@needs_compiler
@pytest.mark.parametrize(
    "spilling, chosen",
    [
        ((), "BLOCK 256, 8 warps"),  # the largest tile, then the most warps
        ((("256", 8),), "BLOCK 256, 1 warps"),
        ((("256", 8), ("256", 1)), "BLOCK 64, 8 warps"),
    ],
)
def test_the_largest_tile_without_spills_is_taken_then_the_most_warps(module, monkeypatch, spilling, chosen):
    def compiled(launch, arch):
        bad = (str(launch.constants["BLOCK"]), launch.num_warps) in spilling
        return FACTS._replace(num_warps=launch.num_warps, spill_loads=int(bad), registers=32)

    monkeypatch.setattr(static_peers, "compile_offline", compiled)
    _, tuned = record(lambda: module.double(torch.ones(1000)))
    facts, text = best(tuned, "sm_90")
    assert text.startswith(chosen) and text.endswith("(of 4)") and facts.spill_loads == 0


@pytest.mark.offline
@needs_compiler
def test_what_a_peer_launches_compiles(module):
    _, tuned = record(lambda: module.double(torch.ones(1024)))
    facts, _ = best(tuned, "sm_90")
    assert facts.name == "_double" and facts.registers > 0
    assert suite_static.access_bytes(facts)[1] > 0


# ---- the cases ----------------------------------------------------------------------------------------------------


def test_cases_have_names_of_their_own_points_that_exist_and_a_bound():
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases)
    known = points(every=True)
    for case in cases:
        assert case.peers and case.bytes_needed > 0 and case.elements > 0
        assert (case.ours is None) == (case.counted == 0)
        assert all(launch.arguments for launch in case.launches("sm_90")), case.name
    assert {"rms_norm.forward.4096", "swiglu.backward"} <= set(known)


def test_a_bound_is_the_larger_of_bytes_and_flop():
    card = suite_static.CARD
    assert card.part == "H200"
    assert suite_static.lower_bound(4.8e12, 1.0) == 1.0 and suite_static.lower_bound(1.0, 989e12) == 1.0


def test_access_widths():
    facts = FACTS._replace(
        instructions={"LDG.E.128.CONSTANT": 2, "LDG.E.U16": 3, "STG.E": 1, "LDGSTS.E.BYPASS.128": 1}
    )
    assert suite_static.access_bytes(facts) == (48, 48 + 6 + 4)
    assert suite_static.access_bytes(FACTS._replace(instructions={"UTMALDG.2D": 9, "LDS.128": 2})) == (0, 0)
    assert suite_static.matrix_of(FACTS) == "HGMMA x 8"


CASE = StaticCase("c", 10, 100, lambda arch: [], None, {"them": Peer(("x",), lambda m, r: lambda: None)}, 0, 4.8e6)


def side(nbytes: float = 4.8e6, flop: float = 0.0, **facts: object) -> Measured:
    return suite_static.measured(suite_static.Side([FACTS._replace(**facts)], "text"), nbytes, flop, CASE)


@pytest.mark.parametrize(
    "ours, text",
    [
        (side(9.6e6), "more bytes: 2.000 x"),
        (side(flop=989e12), "more FLOP: 1000000.000 x"),
        (side(spill_loads=2, spill_stores=1), "spills: 3, theirs 0"),
        (side(instructions={"LDG.E": 5}), "narrow accesses: 5, theirs 2"),
        (side(registers=255), "warps: 8, theirs 32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_loss_is_named(ours, text):
    assert suite_static.losses(ours, side()) == [text]
    assert suite_static.losses(side(), side()) == []


def test_the_table_has_a_row_a_peer_and_says_what_is_missing():
    providers = {"plait": side(9.6e6), "liger": side(), "tutorial": Measured(skipped="not found")}
    case = suite_static.Case("c", {})
    text = suite_static.table([CaseResult(case, "plait", providers), CaseResult(case, "", {}, error="broke\nmore")])
    assert "| 0.500 " in text and "more bytes: 2.000 x" in text
    assert "skipped: not found" in text and "failed: broke" in text and "nothing was timed" in text
    for measured in providers.values():
        measured_of("providers", json.loads(json.dumps(vars(measured))))  # result JSON, version 1


def test_a_case_without_peers_is_measured_alone(monkeypatch):
    monkeypatch.setattr(suite_static, "all_cases", lambda: [CASE._replace(bytes_needed=1e6)])
    monkeypatch.setattr(suite_static, "our_side", lambda case: suite_static.Side([FACTS], "ours"))
    monkeypatch.setattr(suite_static, "find", lambda peer, tutorials: "x is not installed")
    (case,) = suite_static.cases(False)
    result = suite_static.measure(case, Options())
    assert result.providers["them"].skipped == "x is not installed"
    assert result.providers["plait"].samples_s == [1e6 / 4.8e12]


def test_a_peer_is_compiled_for_the_rows_of_the_case():
    seen = []
    peer = Peer(("p",), lambda module, rows: partial(seen.append, rows))
    suite_static.peer_side(CASE._replace(rows=1000, counted=8), peer, None)
    suite_static.peer_side(CASE._replace(rows=1000, counted=8, programs=256), peer, None)
    assert seen == [16, 1000]  # programs that share rows have as many as in the case


# ---- counting -----------------------------------------------------------------------------------------------------


@interpret
@needs_interpreter
def test_bytes_are_extrapolated_to_the_rows_of_the_case():
    case = next(case for case in all_cases() if case.name.startswith("swiglu forward"))
    assert static_counts.our_bytes(case) == case.bytes_needed


@interpret
@needs_interpreter
def test_partial_gradients_are_counted_of_few_programs():
    case = next(case for case in all_cases() if case.name.startswith("rms_norm backward"))
    cols, rows = 4096, case.rows
    # x, dy, dx in 16 bits and rstd; weight and its gradient; sums of 256 programs, written and read.
    formula = rows * (cols * 2 * 3 + 4) + 2 * cols * 2 + 256 * cols * 4 * 2
    assert case.programs == 256 and static_counts.our_bytes(case) == formula


def test_what_grows_with_rows_and_programs_is_extrapolated():
    seen = []

    def bytes_at(rows: int, programs: int) -> float:
        seen.append((rows, programs))
        return 100 + 7 * rows + 30 * programs

    case = CASE._replace(rows=1000, counted=8)
    assert static_counts.extrapolated(bytes_at, case, 0, 256) == 100 + 7000 + 30 * 256
    assert static_counts.extrapolated(bytes_at, case, 64, 0) == 100 + 7000
    assert seen == [(8, 4), (16, 4), (16, 8), (64, 0), (72, 0)]


@interpret
@needs_interpreter
def test_a_peer_that_converts_its_numbers_is_counted(tmp_path):
    (tmp_path / "01-double.py").write_text(
        textwrap.dedent(TUTORIAL)
        .replace('@triton.autotune(CONFIGS, key=["n"])\n', "")
        .replace("x, out, x.numel())", "x, out, x.numel(), BLOCK=64)")
    )
    module = tutorial(tmp_path, "01-double.py", "double")
    peer = Peer(("01-double.py", "double"), lambda found, rows: partial(found.double, torch.ones(rows)))
    case = CASE._replace(rows=1000, counted=100)
    # Each element read and written, 4 bytes each way; element 0 written by _count.
    assert static_counts.peer_bytes(peer, module, case) == 8 * 1000 + 4


LOCKED = """
import torch
import triton
import triton.language as tl


@triton.jit
def _locked(lock_ptr, out_ptr):
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(out_ptr + tl.program_id(0), tl.load(lock_ptr + 1))
    tl.atomic_xchg(lock_ptr + 1, 1)
    tl.atomic_xchg(lock_ptr, 0)


def locked(out):
    _locked[(out.numel(),)](torch.zeros(2, dtype=torch.int32), out)
"""


@interpret
@needs_interpreter
def test_a_peer_that_waits_for_a_lock_is_counted(tmp_path):
    (tmp_path / "02-lock.py").write_text(LOCKED)
    module, out = tutorial(tmp_path, "02-lock.py", "locked"), torch.zeros(4, dtype=torch.int32)
    with static_counts.lenient_interpreter():
        module.locked(out)
    assert out.tolist() == [0, 1, 1, 1]


def test_a_child_counts_one_case_after_the_other():
    names = [case.name for case in all_cases() if case.name.startswith("swiglu")]
    counts = static_counts.Counts(names, "")
    assert [counts.of(name)["plait"] for name in reversed(names)] == [1174405120, 704643072]


def test_a_child_that_fails_says_why():
    with pytest.raises(RuntimeError, match="KeyError: 'no such case'"):
        static_counts.Counts(["no such case"], "").of("no such case")
