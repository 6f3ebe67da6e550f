"""Our kernels beside Liger's and triton's tutorials without a GPU: the compiler's facts, bytes, lower bounds.

Times nothing: a sample is the roofline lower bound in seconds, the larger of bytes over memory bandwidth and FLOP
over the matrix peak of an H200 (peaks.py has the figures and their sources). Both sides are compiled for the same
architecture, dtype and shape. Bytes are counted in the interpreter where a kernel streams memory (accesses.py); of a
product they are each operand once, so that bounds are equal and registers, spills and warps tell the difference.
What a bound cannot show is said in the notes: fewer resident warps, spills, accesses under 128 bits.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

from plait.bench import report
from plait.bench.peaks import Card, card_named
from plait.bench.providers import NOT_ASKED, left_out
from plait.bench.spec import Case, CaseResult, Measured, Options, Suite
from plait.bench.static_case import Peer, StaticCase
from plait.bench.static_cases import all_cases
from plait.bench.static_counts import Counts, find
from plait.bench.static_peers import best, record
from plait.kernels.gate import access_bytes, narrow_accesses, resident_warps
from plait.kernels.inspect import Facts, compile_offline, parse_arch

ARCH = "sm_90"
CARD = card_named("h200")
TOLERANCE = 1.002  # bounds closer than this are equal: statistics of a row
MATRIX = ("HGMMA", "UTCHMMA", "HMMA")  # wgmma, tcgen05, mma


class Side(NamedTuple):
    """The kernels of one side, and in words which configurations they have."""

    facts: list[Facts]
    text: str


def lower_bound(nbytes: float, flop: float, card: Card = CARD) -> float:
    """Seconds that no implementation of this traffic and these products can be under."""
    return max(nbytes / card.bytes_per_s, flop / card.bf16_flop_per_s)


def matrix_of(facts: Facts) -> str:
    """The matrix instructions by family, such as "HGMMA x 8"; '' without."""
    families = [f"{family} x {count}" for family in MATRIX if (count := facts.count(family))]
    return ", ".join(families)


def measured(side: Side, nbytes: float, flop: float, case: StaticCase) -> Measured:
    """Figures of a side: the worst of its kernels, bytes and FLOP per element of the output."""
    wide, total = (sum(parts) for parts in zip(*map(access_bytes, side.facts), strict=True))
    figures = {
        "registers": max(facts.registers for facts in side.facts),
        "spills": sum(facts.spill_loads + facts.spill_stores for facts in side.facts),
        "shared bytes": max(facts.shared_bytes for facts in side.facts),
        "warps": min(resident_warps(facts) for facts in side.facts),
        "wide share": wide / total if total else 1.0,
        "narrow": sum(narrow_accesses(facts) for facts in side.facts),
        "matrix": sum(facts.count(family) for facts in side.facts for family in MATRIX),
        "bytes": nbytes,
        "bytes/element": nbytes / case.elements,
        "FLOP/element": flop / case.elements,
        "passes": nbytes / case.bytes_needed,
    }
    return Measured([lower_bound(nbytes, flop)], side.text, {key: float(value) for key, value in figures.items()})


def text_of(facts: Facts, chosen: str) -> str:
    """One kernel in words."""
    parts = [f"{facts.name}: {facts.registers} registers, {facts.num_warps} warps"]
    return "; ".join([*parts, *(part for part in (matrix_of(facts), chosen) if part)])


def our_side(case: StaticCase) -> Side:
    facts = [compile_offline(launch, ARCH) for launch in case.launches(ARCH)]
    return Side(facts, " | ".join(text_of(each, "") for each in facts))


def peer_side(case: StaticCase, peer: Peer, module: Any) -> Side:
    """What the peer launches, compiled; a side of no kernels where it launches none."""
    # Rows that programs share are an argument of the kernel: of few, it would be compiled for one.
    rows = 2 * case.counted if case.counted and not case.programs else case.rows
    if case.name.startswith("linear cross entropy"):
        rows = 2
    found = record(peer.call(module, rows), parse_arch(ARCH))
    chosen = [best(choices, ARCH) for choices in found]
    return Side([facts for facts, _ in chosen], " | ".join(text_of(*each) for each in chosen))


@functools.cache
def counts(tutorials: str, names: tuple[str, ...]) -> Counts:
    """The bytes of these cases, by one child process that counts while this one compiles."""
    return Counts(list(names), tutorials)


def cases(full: bool) -> list[Case]:
    """The first norm, which compiles in seconds; `full`: all of them, which takes minutes."""
    return [
        Case(
            case.name,
            {"op": case.name, "arch": ARCH, "card": CARD.part, "rows": case.rows, "dtype": "float16"},
            flop=case.flop or None,
            bytes_moved=case.bytes_needed,
        )
        for case in (all_cases() if full else all_cases()[:1])
    ]


def measure(case: Case, options: Options) -> CaseResult:
    """Compiles both sides, takes their bytes from the counts; skips peers that are not there, with the reason."""
    static = next(each for each in all_cases() if each.name == case.name)
    together = tuple(each.name for each in all_cases() if each.counted) if options.full else (case.name,)
    counted = counts(options.tutorials, together).of(case.name) if static.counted else {}
    tutorials = Path(options.tutorials) if options.tutorials else None
    own = counted.get("plait", static.bytes_needed)
    if isinstance(own, str):
        raise RuntimeError(f"{case.name}: {own}")
    providers = {"plait": measured(our_side(static), own, static.flop, static)}
    for name, peer in static.peers.items():
        module, nbytes = find(peer, tutorials), counted.get(name, static.bytes_needed)
        reason = next((value for value in (module, nbytes) if isinstance(value, str)), "")
        reason = NOT_ASKED if left_out(name, options.providers) else reason
        if reason or isinstance(nbytes, str):
            providers[name] = Measured(skipped=reason)
            continue
        flop = static.flop_peer or static.flop
        providers[name] = measured(peer_side(static, peer, module), nbytes, flop, static)
        providers[name].check += f" ({peer.note})" if peer.note else ""
    return CaseResult(case, "plait", providers, static.note)


def losses(ours: Measured, peer: Measured) -> list[str]:
    """Where our side is behind: a higher bound, spills, narrower accesses, fewer resident warps."""
    a, b = ours.figures, peer.figures
    found = []
    if ours.samples_s[0] > peer.samples_s[0] * TOLERANCE:
        more = "FLOP" if a["FLOP/element"] > b["FLOP/element"] else "bytes"
        found.append(f"more {more}: {ours.samples_s[0] / peer.samples_s[0]:.3f} x")
    if a["spills"] > b["spills"]:
        found.append(f"spills: {a['spills']:.0f}, theirs {b['spills']:.0f}")
    if a["narrow"] > b["narrow"] and a["wide share"] < b["wide share"]:
        found.append(f"narrow accesses: {a['narrow']:.0f}, theirs {b['narrow']:.0f}")
    if a["warps"] < b["warps"]:
        found.append(f"warps: {a['warps']:.0f}, theirs {b['warps']:.0f}")
    return found


def cell(one: Measured) -> str:
    """A side in one cell."""
    f = one.figures
    parts = [f"{one.samples_s[0] * 1e6:.1f} us", f"{f['registers']:.0f} reg", f"{f['warps']:.0f} warps"]
    parts += [f"{f['spills']:.0f} spills"] if f["spills"] else []
    parts += [f"{f['shared bytes'] / 1024:.0f} KiB"] if f["shared bytes"] >= 4096 else []
    parts += [f"{f['wide share']:.0%} wide"] if not f["matrix"] else [f"{f['matrix']:.0f} mma"]
    return ", ".join(parts)


HEADER = ["case", "ours: bound, worst kernel", "peer", "peer's", "peer / ours", "ours behind in"]


def table(results: list[CaseResult]) -> str:
    """A row for each case and peer: both sides, the ratio of their bounds (above 1, ours may be faster), losses."""
    rows = []
    for result in results:
        if result.error:
            rows.append([result.case.name, "-", "-", "-", "-", f"failed: {result.error.splitlines()[0]}"])
            continue
        ours = result.providers[result.ours]
        for name, peer in result.providers.items():
            if name == result.ours:
                continue
            if peer.skipped:
                rows.append([result.case.name, cell(ours), name, "-", "-", f"skipped: {peer.skipped}"])
                continue
            ratio = peer.samples_s[0] / ours.samples_s[0]
            behind = [*losses(ours, peer), *([result.note] if result.note else [])]
            rows.append([result.case.name, cell(ours), name, cell(peer), f"{ratio:.3f}", "; ".join(behind) or "-"])
    card = (
        f"lower bounds on an {CARD.part}: {CARD.bytes_per_s / 1e12:g} TB/s, {CARD.bf16_flop_per_s / 1e12:g} TFLOP/s"
    )
    return f"{report.table(HEADER, rows)}\n\n{card} ({CARD.source}); nothing was timed; compiled for {ARCH}"


SUITE = Suite("static", "our kernels beside others' by the compiler's facts; no GPU", cases, measure, text=table)
