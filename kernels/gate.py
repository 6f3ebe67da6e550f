"""The static gate: rules that the machine code of every kernel must keep, checked without a GPU.

Not the compiler's facts themselves (inspect.py) and not the shapes (points.py). The one idea: a rule is data, found
by the longest prefix of a point's name, and judging is a pure function of facts and rule. What counts for all: no
spills, no fp64 arithmetic, no atomic sums (bits agree between runs); then, by rule, 128-bit accesses, the matrix
instructions of the architecture, and the warps that fit on a multiprocessor at once. AMD's gfx942 has no tables of
its own and nobody ran it: there the rules for all hold, the matrix instructions, and a wave for each SIMD unit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from plait.kernels.inspect import Facts, amd_available, compile_offline
from plait.kernels.launch import Launch
from plait.kernels.pinned_amd import ARCH as AMD
from plait.kernels.points import points

ARCHS = ("sm_80", "sm_90", "sm_100")


class Limits(NamedTuple):
    """Of one multiprocessor. registers: of 32 bits; granule: registers of a warp go by so many."""

    matrix: str  # the tensor core's instruction
    shared_bytes: int
    reserved_shared: int  # of each block
    registers: int
    granule: int
    lanes: int
    max_warps: int
    max_blocks: int
    simds: int = 1  # that the registers are divided among


# mma, wgmma, tcgen05 (PTX ISA 8.7); CUDA programming guide, compute capabilities. AMD CDNA 3 ISA, 2024-08, and LLVM's
# guide to AMDGPU: four SIMD units of 512 vector registers and eight waves, 64 KiB, barriers of 16 blocks.
LIMITS = {
    "sm_80": Limits("HMMA", 164 * 1024, 1024, 65536, 256, 32, 64, 32),
    "sm_90": Limits("HGMMA", 228 * 1024, 1024, 65536, 256, 32, 64, 32),
    "sm_100": Limits("UTCHMMA", 228 * 1024, 1024, 65536, 256, 32, 64, 32),
    AMD: Limits("MFMA", 64 * 1024, 0, 4 * 512 * 64, 8 * 64, 64, 32, 16, simds=4),
}
_TENSOR_COLUMNS = 512  # of a multiprocessor of sm_100 (PTX ISA 8.7, tcgen05.alloc)
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "96": 12, "128": 16}  # bytes by suffix; else 4


class Rule(NamedTuple):
    """What the machine code of a kernel must show beyond the rules for all."""

    min_warps: int  # resident on a multiprocessor at once
    narrow: int | None = None  # global accesses that may be under 128 bits; None: not a streaming kernel
    matrix: bool = False  # uses the tensor cores
    mma: bool = False  # by the older mma too, on any architecture
    wide: float = 0.95  # of a streaming kernel: least share of bytes in 128-bit accesses, by instructions
    reason: str = ""  # why less than 95 %, or mma, is right here


_ROWS = "a statistic per row of a thread"  # in tiles of narrow rows

# By prefix of the point's name; the longest that fits holds. Narrow accesses are statistics, scalars of a row, table
# entries and the ends of a range that 128 bits do not cover; warps are what the compiler left on sm_80 to sm_100.
RULES: dict[str, Rule] = {
    "swiglu": Rule(min_warps=48, narrow=0),
    "geglu": Rule(min_warps=48, narrow=0),
    "rms_norm": Rule(min_warps=32, narrow=1),
    "rms_norm.backward": Rule(min_warps=8, narrow=1),  # a row and its sum stay in registers
    "rms_norm_residual.backward": Rule(min_warps=8, narrow=1),
    "layer_norm": Rule(min_warps=24, narrow=2),
    "layer_norm.backward": Rule(min_warps=8, narrow=2),
    "layer_norm_residual.backward": Rule(min_warps=8, narrow=2),
    # Tiles of narrow rows: a statistic per row of a thread, and weights that 16 threads share.
    "rms_norm.forward.128": Rule(min_warps=40, narrow=2, wide=0.9, reason=_ROWS),
    "rms_norm.backward.128": Rule(min_warps=32, narrow=3, wide=0.8, reason=_ROWS),
    "rms_norm.backward.64": Rule(min_warps=24, narrow=3, wide=0.8, reason=_ROWS),
    "rms_norm_residual.backward.64": Rule(min_warps=24, narrow=3, wide=0.8, reason=_ROWS),
    "layer_norm.backward.64": Rule(min_warps=24, narrow=5, wide=0.7, reason=_ROWS),
    "layer_norm_residual.backward.64": Rule(min_warps=24, narrow=5, wide=0.7, reason=_ROWS),
    "rope": Rule(min_warps=24, narrow=0),
    "attention": Rule(min_warps=4, matrix=True),
    "attention.delta": Rule(min_warps=8),
    # With channels padded to 256 no tile of wgmma or tcgen05 is free of spills: mma (compiled offline).
    **{
        f"attention.{kernel}": Rule(min_warps=4, matrix=True, mma=True, reason="channels padded to 256 spill else")
        for kernel in (
            "dkdv.192",
            "dkdv.256",
            "dkdv.64x256",
            "dq.192.bounded",
            "dq.192.dropout",
            "dq.256.bounded",
            "dq.256.dropout",
        )
    },
    "cross_entropy.stats": Rule(min_warps=24, narrow=5, wide=0.5, reason="target, its logit, three statistics a row"),
    "cross_entropy.stats.50257": Rule(min_warps=24),  # rows of odd length start anywhere
    "cross_entropy.grad": Rule(min_warps=24, narrow=3, wide=0.85, reason="target, lse and dloss of a row"),
    "cross_entropy.grad.50257": Rule(min_warps=24),
    "cross_entropy.grad.mean": Rule(min_warps=24, narrow=4, wide=0.85, reason="target and lse of a row, two scalars"),
    "cross_entropy.add": Rule(min_warps=32),  # one program
    "linear": Rule(min_warps=4, matrix=True),
    "linear.few_rows": Rule(min_warps=8),  # 16 rows: fewer than wgmma and tcgen05 take, so mma everywhere
    "linear.finish": Rule(min_warps=16),
    "linear.activation_grad": Rule(min_warps=16),
    "linear.fp32": Rule(min_warps=4),  # without tf32 there is no tensor core for fp32
    "adamw.run": Rule(min_warps=24, narrow=8, wide=0.8, reason="scalars of the step"),
    "adamw.table": Rule(min_warps=16, narrow=16, wide=0.7, reason="scalars of the step, entries of the table"),
    "adamw.narrow": Rule(min_warps=8),
    "adamw.strided": Rule(min_warps=8),
    "l2_norm.run": Rule(min_warps=32, narrow=1, wide=0.85, reason="one sum a program"),
    "l2_norm.table": Rule(min_warps=32, narrow=6, wide=0.4, reason="entries of the table, one sum a program"),
    "l2_norm.narrow": Rule(min_warps=32),
    "l2_norm.strided": Rule(min_warps=16),
    "l2_norm.finish": Rule(min_warps=32),  # one program
    "column_sums": Rule(min_warps=32, narrow=1, wide=0.9, reason="one sum a column"),
    "tables.write": Rule(min_warps=32),  # one program of one warp
    "dropout": Rule(min_warps=48, narrow=2, wide=0.6, reason="seed and offset"),
    "embedding.forward": Rule(min_warps=48, narrow=0),
    "embedding.windows": Rule(min_warps=24),
    "embedding.crossing": Rule(min_warps=16),
}
# Endings of points that vary a kernel of the declared list: only `--all` takes them.
VARIANTS = (
    ".64", ".256", ".4096", ".65536", ".16032", ".50257", ".softcap", ".in_place", ".accumulate", ".fp32",
    ".narrow.bf16", ".strided.bf16", ".narrow.bf16_master", ".strided.bf16_master", ".table.bf16_rounded",
    ".narrow.bf16_rounded", ".strided.bf16_rounded", ".slope", ".dropout", ".any_column", ".gelu", ".gelu_tanh",
)  # fmt: skip


# On gfx942: rows and stages of what spills in sm_80's tile (182 registers of 438); and the points of the short run.
AMD_TILES = {"attention.dkdv": (32, 1)}
AMD_SHORT = (
    "swiglu.forward", "rms_norm_residual.backward.8192", "adamw.run.bf16_master", "attention.dq.128",
    "linear.forward",
)  # fmt: skip


def rule_of(name: str, arch: str = "") -> Rule:
    """The rule of a point on `arch`; KeyError where none fits: a new kernel states its own."""
    if arch == AMD:
        return Rule(min_warps=4, matrix=rule_of(name).matrix)
    if name.startswith("attention.") and name.endswith(".fp32"):
        return Rule(min_warps=4)  # without tf32 there is no tensor core for fp32
    fitting = [prefix for prefix in RULES if name.startswith(prefix)]
    if not fitting:
        raise KeyError(f"point {name!r} has no rule in kernels/gate.py; known prefixes: {', '.join(RULES)}")
    return RULES[max(fitting, key=len)]


def resident_blocks(facts: Facts) -> tuple[int, str]:
    """(blocks that fit on one multiprocessor, what limits them)."""
    most = LIMITS[facts.arch]
    registers_of_warp = max(1, -(-facts.registers * most.lanes // most.granule)) * most.granule
    warps = most.registers // most.simds // registers_of_warp * most.simds
    limits = {
        "registers": warps // facts.num_warps,
        "shared memory": most.shared_bytes // max(1, facts.shared_bytes + most.reserved_shared),
        "warps": most.max_warps // facts.num_warps,
        "blocks": most.max_blocks,
    }
    if facts.tensor_columns:
        limits["tensor memory"] = _TENSOR_COLUMNS // facts.tensor_columns
    limiter = min(limits, key=limits.__getitem__)
    return limits[limiter], limiter


def resident_warps(facts: Facts) -> int:
    """Warps of the kernel that fit on one multiprocessor at once."""
    return resident_blocks(facts)[0] * facts.num_warps


def access_bytes(facts: Facts) -> tuple[int, int]:
    """(bytes in 128-bit accesses, all) of global loads, stores and asynchronous copies, each instruction once.

    Bulk copies (TMA) have no width of their own and are left out. An instruction counts once however often it
    runs, so that the numbers of a row weigh more in a kernel of small blocks.
    """
    wide = total = 0
    for opcode, number in facts.instructions.items():
        if opcode.startswith(("LDG.", "STG.", "LDGSTS.")):
            width = next((size for suffix, size in _WIDTHS.items() if f".{suffix}" in f"{opcode}."), 4)
            wide, total = wide + (width == 16) * width * number, total + width * number
    return wide, total


def wide_share(facts: Facts) -> float:
    """The share of bytes in 128-bit accesses; 1 where there is no access but bulk copies."""
    wide, total = access_bytes(facts)
    return wide / total if total else 1.0


def narrow_accesses(facts: Facts) -> int:
    """Global loads and stores under 128 bits; bulk copies (TMA) do not count."""
    return sum(facts.count(kind) - facts.count(f"{kind}.E.128") for kind in ("LDG", "STG"))


def judge(facts: Facts, rule: Rule) -> list[str]:
    """What the machine code breaks, a sentence each; empty when it keeps the rule."""
    broken = []
    if facts.spill_loads or facts.spill_stores or facts.stack_bytes:
        broken.append(
            f"spills: {facts.spill_loads} loads, {facts.spill_stores} stores, {facts.stack_bytes} bytes of stack"
        )
    doubles = sum(facts.count(opcode) for opcode in ("DADD", "DMUL", "DFMA"))
    if doubles:
        broken.append(f"{doubles} fp64 instructions")
    # ATOMS is shared memory; an exchange hands over a TMA descriptor and adds nothing.
    atomics = sum(
        number
        for opcode, number in facts.instructions.items()
        if opcode.startswith(("RED.", "ATOM.", "ATOMG.")) and ".EXCH" not in opcode
    )
    if atomics:
        broken.append(f"{atomics} atomic instructions")
    narrow = narrow_accesses(facts)
    if rule.narrow is not None and narrow > rule.narrow:
        broken.append(f"{narrow} global accesses under 128 bits; at most {rule.narrow}")
    if rule.narrow is not None and wide_share(facts) < rule.wide:
        broken.append(f"{wide_share(facts):.1%} of bytes in 128-bit accesses; at least {rule.wide:.0%}")
    limits = LIMITS[facts.arch]
    most = limits.shared_bytes - limits.reserved_shared
    if facts.shared_bytes > most:
        broken.append(f"{facts.shared_bytes} bytes of shared memory; at most {most}")
    opcode = limits.matrix
    if rule.matrix and not facts.count(opcode) and not (rule.mma and facts.count("HMMA")):
        broken.append(f"no {opcode}: the tensor cores of {facts.arch} are idle")
    warps = resident_warps(facts)
    if warps < rule.min_warps:
        broken.append(f"{warps} warps fit on a multiprocessor; at least {rule.min_warps}")
    return broken


class Verdict(NamedTuple):
    """One point on one architecture."""

    name: str
    facts: Facts
    broken: list[str]


def _declared() -> list[str]:
    return [name for name in points() if not name.endswith(VARIANTS)]


def default_points() -> list[tuple[str, str]]:
    """The declared list of (point, architecture): at most 80, so that a run from nothing takes a few minutes.

    A kernel of every kind on sm_90; the matrix kernels, whose code differs most, on all architectures; some on AMD's.
    """
    declared = _declared()
    found = [(name, arch) for name in declared for arch in ARCHS if arch == "sm_90" or rule_of(name).matrix]
    return found + [point for point in amd_points() if point[0] in AMD_SHORT]


def amd_points() -> list[tuple[str, str]]:
    """Every kernel of the declared list on gfx942; none where this triton makes no code for it."""
    return [(name, AMD) for name in _declared()] if amd_available() else []


def launch_of(name: str, arch: str, known: Mapping[str, Callable[..., Launch]] | None = None) -> Launch:
    """The launch of a point on a card of `arch`, of `known` points (default: all). KeyError for another name.

    gfx942 takes sm_80's tiles with two stages at most, as a workgroup has 64 KiB, but for AMD_TILES.
    """
    make = (points(every=True) if known is None else known)[name]
    if arch != AMD:
        return make(arch)
    launch = make("sm_80")
    for prefix, (rows, stages) in AMD_TILES.items():
        if name.startswith(prefix):
            return launch._replace(constants=launch.constants | {"BLOCK_ROW": rows}, num_stages=stages)
    return launch._replace(num_stages=min(2, launch.num_stages))


def check(
    chosen: Iterable[tuple[str, str]], *, compile_point: Callable[[Launch, str], Facts] = compile_offline
) -> Iterator[Verdict]:
    """Compiles and judges (point, architecture) one by one; triton's cache makes a second run quick."""
    known = points(every=True)
    for name, arch in chosen:
        facts = compile_point(launch_of(name, arch, known), arch)
        yield Verdict(name, facts, judge(facts, rule_of(name, arch)))
