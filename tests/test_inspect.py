"""Offline compilation: rms_norm, swiglu and attention fit the registers of sm_90, read wide, use no fp64.

And what is compiled offline is what a card's JIT looks for, under the same key.
"""

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import driver

from plait.kernels import cli, pinned_code, pinned_work
from plait.kernels.inspect import compile_launch, compile_offline, meta, parse_arch, specialised
from plait.kernels.launch import Launch
from plait.kernels.points import points
from tests.cases import needs_compiler

# Streaming code hardly differs between architectures: sm_90 always, the others in the long run.
ARCHS = ["sm_90", *(pytest.param(arch, marks=pytest.mark.long) for arch in ("sm_80", "sm_100"))]

# Kernels whose name has a matmul in it must use Hopper's warp-group instructions.
MATMULS = ("forward.64", "forward.128", "dq", "dkdv")
NAMES = [
    "rms_norm.forward.4096",
    "rms_norm_residual.backward.8192",
    "swiglu.forward",
    "swiglu.backward",
    "attention.forward.64",
    "attention.dkdv.64",
    "attention.forward.128",
    "attention.delta.128",
    "attention.dq.128",
    "attention.dkdv.128",
]


@pytest.mark.offline
@pytest.mark.long  # the declared list of test_gate.py stays in the short run
@needs_compiler
@pytest.mark.parametrize("name", NAMES)
def test_compiles_for_sm_90_without_spills(name):
    facts = compile_offline(points()[name](), "sm_90")
    assert (facts.spill_loads, facts.spill_stores, facts.stack_bytes) == (0, 0, 0)
    assert 0 < facts.registers <= 255 and facts.shared_bytes <= 227 * 1024
    # A number argument typed fp64 by the compiler would show here.
    assert facts.count("DADD") + facts.count("DMUL") + facts.count("DFMA") == 0
    # No gradient is added up in memory: bits agree between runs.
    # (A TMA descriptor is published by an exchange, which adds nothing.)
    assert facts.count("RED.") + facts.count("ATOM") - facts.count("ATOMG.E.EXCH") == 0
    if name.startswith("attention") and any(m in name for m in MATMULS):
        assert facts.count("HGMMA") > 0
    elif "attention" not in name:
        loads = facts.count("LDG")
        assert facts.count("LDG.E.128") >= loads - 1  # the norm's one scalar per row is narrow


# Kernels that only read and write, for every architecture.
ELEMENTWISE = [f"rope.{style}.{head_dim}" for style in ("halves", "neighbours", "packed") for head_dim in (64, 128)]
ELEMENTWISE += [f"{op}.{side}" for op in ("swiglu", "geglu", "geglu_tanh") for side in ("forward", "backward")]
ELEMENTWISE += [
    f"{norm}.{side}"
    for norm in ("rms_norm_residual", "layer_norm_residual")
    for side in ("forward.8192", "forward.65536", "backward.8192", "backward.65536")
]


@pytest.mark.offline
@pytest.mark.long  # the declared list of test_gate.py stays in the short run
@needs_compiler
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_kernels_read_and_write_16_bytes_without_spills(name, arch):
    facts = compile_offline(points()[name](), arch)
    assert (facts.spill_loads, facts.spill_stores, facts.stack_bytes) == (0, 0, 0)
    # Half of the registers of a thread: two programs share a multiprocessor at least.
    assert 0 < facts.registers <= 128
    assert facts.count("DADD") + facts.count("DMUL") + facts.count("DFMA") == 0
    assert facts.count("RED.") + facts.count("ATOM") == 0
    assert facts.count("LDG.E.128") >= facts.count("LDG") - narrow(name) > 0
    assert facts.count("STG.E.128") >= facts.count("STG") - narrow(name) > 0


def narrow(name: str) -> int:
    """At most so many reads, and writes, of one number per row: mean and rstd."""
    return 2 if "norm" in name else 0


@pytest.mark.offline
@needs_compiler
def test_explain_prints_the_facts_of_one_kernel(capsys):
    assert cli.main(["explain", "swiglu.forward", "--arch", "sm_80"]) == 0
    text = capsys.readouterr().out
    assert "_gated_forward for sm_80" in text and "spill loads 0" in text and "EXIT" in text


def test_list_names_every_point_and_bad_names_exit_with_2(capsys):
    assert cli.main(["list"]) == 0
    assert capsys.readouterr().out.split() == list(points(every=True))
    assert cli.main(["explain", "no_such_kernel"]) == 2
    assert "no kernel 'no_such_kernel'" in capsys.readouterr().err
    assert cli.main(["explain", "swiglu.forward", "--arch", "hopper"]) == 2
    assert "expected a name such as" in capsys.readouterr().err
    assert set(NAMES) <= set(points())


@pytest.mark.parametrize("text,number", [("sm_90", 90), ("90", 90), ("sm_100", 100), ("sm_90a", 90)])
def test_architecture_names(text, number):
    assert parse_arch(text) == number


class Card:
    """A triton driver that names an architecture and has no device; its number keeps its kernels apart."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0


class Reached(Exception):
    """The JIT got as far as its compiler."""


def key_of(source: object, target: GPUTarget, options: dict) -> tuple[object, ...]:
    """All of triton's cache key that differs between launches: source with hints, target, options."""
    return source.hash(), target, make_backend(target).parse_options(dict(options)).hash()  # type: ignore[attr-defined]


def jit_key(launch: Launch, arch: int) -> tuple[object, ...]:
    """The key under which JITFunction.run on a card of `arch` looks for this launch."""
    found: list[tuple[object, ...]] = []

    def reach(source: object, *, target: GPUTarget, options: dict) -> None:
        found.append(key_of(source, target, options))
        raise Reached

    launch.kernel.device_caches.pop(arch, None)
    launch.kernel.device_caches[arch]  # the first access sets the kernel's compiler, which is replaced here
    launch.kernel.compile = reach
    with pytest.raises(Reached):
        launch.kernel.run(*launch.arguments, grid=launch.grid, warmup=True, **launch.keywords())
    launch.kernel.device_caches.pop(arch)
    return found[0]


@needs_compiler
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_offline_and_jit_look_under_the_same_key(arch, monkeypatch):
    """Hints of numbers that are not divisible by 16 were left out, so that a card compiled everything again."""
    monkeypatch.setattr(driver, "_active", Card(arch))
    for name, make in points().items():
        launch = make(f"sm_{arch}")
        source, options, target = specialised(launch, f"sm_{arch}")
        assert key_of(source, target, options) == jit_key(launch, arch), name


@triton.jit(do_not_specialize=["offset"])
def _odd_kernel(x_ptr, y_ptr, stride, offset, big, factor, flag, absent, BLOCK: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, BLOCK), 0.0)


@needs_compiler
@pytest.mark.parametrize("stride", [1, 7, 16, 2**31])
@pytest.mark.parametrize("offset", [0, 1, 16])
def test_numbers_are_specialised_as_the_jit_does(stride, offset, monkeypatch):
    """do_not_specialize was not heard: offsets 0 and 1 were compiled as divisible by 16 and as constants."""
    monkeypatch.setattr(driver, "_active", Card(90))
    x = meta(64, dtype=torch.float16)
    arguments = (x, x[3:], stride, offset, 2**40, 0.5, True, None)
    launch = Launch(_odd_kernel, (1,), arguments, {"BLOCK": 16}, 2, 5)
    source, options, target = specialised(launch, "sm_90")
    assert source.signature["offset"] == "i32" and (3,) not in source.constants
    assert not source.attrs.get((3,)) and not source.attrs.get((1,)) and source.attrs[(0,)]
    assert key_of(source, target, options) == jit_key(launch, 90)


# ---- what machine code shows beyond opcodes -----------------------------------------------------------------------

# Two loops, the second with more matrix instructions and a wait that was moved behind the code; padding at the end.
SASS = """
	//## File "/somewhere/kernels/flash.py", line 7
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @P0 BRA `(.L_x_2) ;
.L_x_0:
        /*0020*/                   LDG.E.128 R4, [R2.64] ;
        /*0030*/                   HGMMA.64x64x16.F32 R8, R4 ;
	//## File "/somewhere/kernels/flash.py", line 9
        /*0040*/                   STL [R1], R4 ;
        /*0050*/              @!P1 BRA `(.L_x_0) ;
.L_x_2:
        /*0060*/                   SYNCS.PHASECHK.TRYWAIT P0, [R3] ;
        /*0070*/              @!P0 BRA `(.L_x_9) ;
.L_x_3:
        /*0080*/                   HGMMA.64x64x16.F32 R8, R4 ;
        /*0090*/                   HGMMA.64x64x16.F32 R9, R4 ;
        /*00a0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00b0*/                   LDL R4, [R1] ;
        /*00c0*/              @P2 BRA `(.L_x_2) ;
        /*00d0*/                   EXIT ;
.L_x_9:
        /*00e0*/                   SYNCS.PHASECHK.TRYWAIT P0, [R3] ;
        /*00f0*/              @P0 BRA `(.L_x_3) ;
        /*0100*/                   BRA `(.L_x_9) ;
.L_x_10:
        /*0110*/                   BRA `(.L_x_10) ;
        /*0120*/                   NOP ;
"""


def test_the_hot_loop_is_found_by_control_flow():
    """The branch of a wait back into the loop looked like a loop of everything in between."""
    code, labels = pinned_code.parse(SASS)
    assert [len(loop) for loop in pinned_code.loops(code, labels)] == [4, 10, 3]
    hot = pinned_code.hot_loop(code, labels)
    assert (hot["HGMMA.64x64x16.F32"], hot["BAR.SYNC.DEFER_BLOCKING"], hot["SYNCS.PHASECHK.TRYWAIT"]) == (2, 1, 2)
    assert "LDG.E.128" not in hot and "NOP" not in hot


def test_without_matrix_instructions_the_loop_with_the_most_global_accesses_is_hot():
    code, labels = pinned_code.parse(SASS.replace("HGMMA.64x64x16.F32", "FFMA"))
    assert pinned_code.hot_loop(code, labels)["LDG.E.128"] == 1
    code, labels = pinned_code.parse(SASS.replace("HGMMA.64x64x16.F32", "FFMA").replace("LDG.E.128", "MOV"))
    assert pinned_code.hot_loop(code, labels) == {} and pinned_code.loops([], {}) == []


def test_spills_are_told_by_source_line():
    assert pinned_code.spill_lines(pinned_code.parse(SASS)[0]) == {"flash.py:9": 2}


def test_what_is_no_cubin_has_no_hash():
    with pytest.raises(ValueError, match="64-bit ELF"):
        pinned_code.code_hash(b"text")


@triton.jit
def _add_kernel(x_ptr, y_ptr, num_cols, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols, mask=cols < num_cols)
    tl.store(y_ptr + cols, x + 1.0, mask=cols < num_cols)


def _moved(jit: object, lines: int) -> object:
    """The same kernel further down in its file."""
    copy = triton.JITFunction(jit.fn)  # type: ignore[attr-defined]
    copy.starting_line_number += lines
    return copy


@pytest.mark.offline
@needs_compiler
def test_the_hash_is_of_the_instructions_and_not_of_line_numbers():
    launches = [Launch(k, (4,), (meta(1000), meta(1000), 1000), {"BLOCK": 256}) for k in (_add_kernel,)]
    launches.append(launches[0]._replace(constants={"BLOCK": 512}))
    here, wider = (compile_offline(launch, "sm_90") for launch in launches)
    again = compile_offline(launches[0]._replace(kernel=_moved(_add_kernel, 40)), "sm_90")
    assert here.code == again.code != wider.code and len(here.code) == 16


# ---- work by TTIR -------------------------------------------------------------------------------------------------


@triton.jit
def _sweep_kernel(x_ptr, y_ptr, flags_ptr, num_rows, num_cols, KNOWN: tl.constexpr, BLOCK: tl.constexpr):
    """Reads each row's first columns up to the row's number (causal), the last one whole, and writes one number."""
    row = tl.program_id(0)
    stop = row + 1 if KNOWN else tl.load(flags_ptr + row)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, stop, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * num_cols + cols, mask=cols < stop, other=0.0)
    if row == num_rows - 1:
        tl.store(y_ptr + row, tl.sum(total))


@triton.jit
def _dot_kernel(a_ptr, out_ptr, steps, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for step in range(steps):
        a = tl.load(a_ptr + step * BLOCK * BLOCK + rows)
        total = tl.dot(a, a, total)
    tl.store(out_ptr + rows, total)


def _work(launch: Launch) -> pinned_work.Work | None:
    numbers = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False))
    ttir = compile_launch(launch, "sm_90").asm["ttir"]
    return pinned_work.work(ttir, {k: v for k, v in numbers.items() if isinstance(v, int)}, launch.grid)


@pytest.mark.offline
@needs_compiler
@pytest.mark.parametrize("num_rows", [5, 264])
def test_bytes_are_counted_by_loops_and_masks(num_rows):
    x, y, flags = (
        meta(num_rows, 512, dtype=torch.float32),
        meta(num_rows, dtype=torch.float32),
        meta(8, dtype=torch.int32),
    )
    arguments = (x, y, flags, num_rows, 512)
    launch = Launch(_sweep_kernel, (num_rows,), arguments, {"KNOWN": True, "BLOCK": 32})
    found = _work(launch)
    assert found is not None and found.programs == num_rows and found.flop == 0
    assert found.loads == {"x_ptr": 4.0 * num_rows * (num_rows + 1) / 2} and found.stores == {"y_ptr": 4.0}
    assert found.bytes_per_program == (sum(found.loads.values()) + 4.0) / num_rows
    assert _work(launch._replace(constants={"KNOWN": False, "BLOCK": 32})) is None, "memory says how often"


@pytest.mark.offline
@needs_compiler
@pytest.mark.parametrize("steps", [1, 5, 100])
def test_flop_are_counted_by_tiles_and_turns(steps):
    found = _work(Launch(_dot_kernel, (3, 2), (meta(1 << 16), meta(4096, dtype=torch.float32), steps), {"BLOCK": 64}))
    assert found is not None and found.flop == 6 * steps * 2.0 * 64**3 and found.flop_per_program == found.flop / 6
    assert found.loads == {"a_ptr": 6 * steps * 64 * 64 * 2.0} and found.stores == {"out_ptr": 6 * 64 * 64 * 4.0}
