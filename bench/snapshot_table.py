"""The table of the `snapshots` suite's whole cases for people: what each way costs, beside the limits and the goals.

    python -m plait.bench.snapshot_table bench/results/snapshots.json

prints it from a result file, as `plait bench run snapshots --full --md DIR` wrote it. Measures nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

from plait.bench import report
from plait.bench.result_file import read
from plait.bench.spec import CaseResult, Measured
from plait.bench.stats import paired_ratio

OURS = ("plait", "plait guarded")
HEADER = ["way", "stall, first ms", "stall, warm ms", "x memcpy", "durable s", "% of direct write", "of overwrite"]
HEADER += [
    "fsync added s",
    "lost, 1 thread",
    "lost, all cores",
    "restore cold s",
    "% of direct read",
    "restore warm s",
]
HEADER += ["memory to save MiB", "to restore MiB"]
MIB = 1 << 20


def is_whole(result: CaseResult) -> bool:
    """True for a case that this table is for."""
    return result.case.params.get("quantity") == "all"


def text(results: list[CaseResult]) -> str:
    """Returns the tables of all results: the usual one for the small cases, then one a place with its goals."""
    small = [result for result in results if not is_whole(result)]
    parts = [report.markdown(small)] if small else []
    for result in filter(is_whole, results):
        parts.append(f"**{result.case.name}**")
        parts += [f"failed: {result.error}"] if result.error else [costs(result), goals(result), notes(result)]
    return "\n\n".join(parts)


def costs(result: CaseResult) -> str:
    """Returns the table of what each way costs: medians, with the interval of the warm saves."""
    rows = [row(name, measured) for name, measured in result.providers.items() if not name.startswith("limit: ")]
    return report.table(HEADER, rows)


def row(name: str, measured: Measured) -> list[str]:
    """Returns one provider's cells."""
    if measured.skipped or measured.invalid:
        reason = measured.skipped or f"INVALID: {measured.invalid}"
        return [name, reason, *["-"] * (len(HEADER) - 2)]
    figures = measured.figures
    added = figures["durable warm s"] - figures["complete warm s"]
    return [
        name,
        cell(figures, "stall first s", 1e3, ".1f"),
        cell(figures, "stall warm s", 1e3, ".1f"),
        cell(figures, "stall warm / memcpy", 1, ".2f"),
        cell(figures, "durable warm s", 1, ".2f"),
        cell(figures, "direct write / durable", 100, ".0f"),
        cell(figures, "direct overwrite / durable", 100, ".0f"),
        f"{added:.2f}" if "fsync added" in measured.check else "0",
        lost(figures, 1),
        lost(figures, most_threads(figures)) if most_threads(figures) > 1 else "-",
        cell(figures, "restore cold s", 1, ".2f"),
        cell(figures, "direct read / restore cold", 100, ".0f"),
        cell(figures, "restore warm s", 1, ".2f"),
        cell(figures, "memory save bytes", 1 / MIB, ".0f", False),
        cell(figures, "memory restore bytes", 1 / MIB, ".0f", False),
    ]


def cell(figures: dict[str, float], name: str, scale: float, form: str, interval: bool = True) -> str:
    """Returns a median with its interval; '-' where it was not measured."""
    if name not in figures:
        return "-"
    text = format(figures[name] * scale, form)
    if interval and f"{name} low" in figures:
        text += f" ({figures[f'{name} low'] * scale:{form}}-{figures[f'{name} high'] * scale:{form}})"
    return text


def most_threads(figures: dict[str, float]) -> int:
    """Returns how many threads the larger training loop had."""
    return max(
        (
            int(name.split()[2])
            for name in figures
            if name.startswith("lost share") and name[-1].isdigit() and "#" not in name
        ),
        default=1,
    )


def lost(figures: dict[str, float], threads: int) -> str:
    """Returns the training time lost beside a loop of so many threads: ms, and % of the save's duration."""
    if f"lost {threads} s" not in figures:
        return "-"
    share = cell(figures, f"lost share {threads}", 100, ".0f")
    return f"{figures[f'lost {threads} s'] * 1e3:.0f} ms, {share} %"


# goal, figure, scale, bound, whether it is the least (or the most) that is asked for, and for which way
GOALS = (
    ("first save stalls as a warm one, x", "stall first / warm", 1.0, 1.0, False, OURS),
    ("eager stall <= 1.3 x memcpy, x", "stall warm / memcpy", 1.0, 1.3, False, OURS[:1]),
    ("lazy stall <= 5 ms, ms", "stall warm s", 1e3, 5.0, False, OURS[1:]),
    ("durable at >= 90 % of direct writing, %", "direct write / durable", 100.0, 90.0, True, OURS),
    ("durable >= 2 x sooner than every asynchronous peer, x", "sooner", 1.0, 2.0, True, OURS),
    ("training time lost <= 5 % of the save, 1 thread, %", "lost share 1", 100.0, 5.0, False, OURS),
    ("training time lost <= 5 % of the save, all cores, %", "lost share all", 100.0, 5.0, False, OURS),
    (
        "cold restore, verified, at >= 90 % of direct reading, %",
        "direct read / restore cold",
        100.0,
        90.0,
        True,
        OURS,
    ),
    ("cold restore ahead of the fastest peer, x", "ahead cold", 1.0, 1.0, True, OURS),
    ("warm restore as fast as safetensors, x", "safetensors warm", 1.0, 1.0, True, OURS),
)


def goals(result: CaseResult) -> str:
    """Returns the goals with what was reached, medians with their intervals; met or not is said of the median, but
    of the interval for equality: `first save` is met where it reaches 1."""
    rows = []
    for goal, name, scale, bound, least, ways in GOALS:
        cells = []
        for way in OURS:
            figures = against_peers(result, way)
            if way not in ways or name not in figures:
                cells.append("-")
                continue
            value = figures[f"{name} low" if name == "stall first / warm" else name] * scale
            met = value >= bound if least else value <= bound
            cells.append(f"{cell(figures, name, scale, '.2f')} {'met' if met else 'NOT met'}")
        rows.append([goal, *cells])
    return report.table(["goal", *OURS], rows)


def against_peers(result: CaseResult, way: str) -> dict[str, float]:
    """Returns the figures of one of ours, with its ratios to the others: to the nearest of them, above 1 ours is
    faster. Empty where it has none."""
    ours = result.providers.get(way, Measured())
    if not ours.samples_s or ours.invalid:
        return {}
    figures = dict(ours.figures)
    all_cores = most_threads(figures)
    for part in ("", " low", " high"):
        if all_cores > 1:
            figures[f"lost share all{part}"] = figures[f"lost share {all_cores}{part}"]
    peers = {n: m for n, m in result.providers.items() if n not in OURS and not n.startswith("limit: ")}
    peers = {n: m for n, m in peers.items() if m.samples_s and not m.invalid}
    behind = {n: m for n, m in peers.items() if is_asynchronous(n)}
    figures |= nearest("sooner", ours, behind, "durable warm s")
    figures |= nearest("ahead cold", ours, peers, "restore cold s")
    figures |= nearest(
        "safetensors warm", ours, {n: m for n, m in peers.items() if n == "safetensors"}, "restore warm s"
    )
    return figures


def is_asynchronous(name: str) -> bool:
    """True for a peer that writes after its call returned."""
    return "async" in name or name in ("torchsnapshot", "nvidia-resiliency-ext", "orbax")


def nearest(name: str, ours: Measured, peers: dict[str, Measured], quantity: str) -> dict[str, float]:
    """Returns the least ratio of a peer's samples of a quantity to ours, paired, with its interval; {} if none."""
    ratios = [
        paired_ratio(samples(ours, quantity), samples(peer, quantity))
        for peer in peers.values()
        if quantity in peer.figures and quantity in ours.figures
    ]
    return dict(zip((name, f"{name} low", f"{name} high"), min(ratios), strict=True)) if ratios else {}


def samples(measured: Measured, quantity: str) -> list[float]:
    """Returns all samples of a quantity, in the order taken."""
    found: list[float] = []
    while f"{quantity} #{len(found) + 1}" in measured.figures:
        found.append(measured.figures[f"{quantity} #{len(found) + 1}"])
    return found


def notes(result: CaseResult) -> str:
    """Returns the limits with their rates, how it was measured, and how each way was used."""
    moved = result.case.bytes_moved or 0.0
    limits = []
    for name, measured in result.providers.items():
        if name.startswith("limit: "):
            rates = sorted(moved / seconds / 1e9 for seconds in measured.samples_s)
            limits.append(f"{name.removeprefix('limit: ')} {median(rates):.2f} ({rates[0]:.2f}-{rates[-1]:.2f})")
    lines = [f"Limits in the same rounds, GB/s (least to most): {', '.join(limits)}.", result.note]
    lines += [
        f"- {name}: {m.check or m.skipped}" for name, m in result.providers.items() if not name.startswith("limit")
    ]
    return "\n\n".join([*lines[:2], "\n".join(lines[2:])])


def main(argv: list[str]) -> int:
    """Prints the tables of a result file; 2 where it cannot be read."""
    if len(argv) != 1:
        print("usage: python -m plait.bench.snapshot_table RESULT.json", file=sys.stderr)
        return 2
    try:
        print(text(list(read(Path(argv[0])).cases.values())))
    except (OSError, ValueError) as error:
        print(f"snapshot_table: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
