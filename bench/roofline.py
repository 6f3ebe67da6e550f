"""Where a result stands under the roof: intensity, what bounds it, its share of the data sheet and of the measured.

A case's work is its declared bytes and FLOP; the roof's time for them is the larger of bytes over bandwidth and FLOP
over the rate of its dtype, and a share is that time over the measured one. Measures and prints nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from plait.bench.ceilings import beyond_measured
from plait.bench.peaks import Card, card_named, card_of
from plait.bench.result_file import ResultFile
from plait.bench.spec import Case
from plait.bench.stats import median_interval


@dataclass(frozen=True)
class Roof:
    """Bytes/s and FLOP/s by torch's dtype name; title says whose. device: "cuda" or "cpu", whose work it bounds;
    cache_bytes: of the last cache before its memory, 0 where it is not known."""

    title: str
    bytes_per_s: float
    flop_per_s: dict[str, float]
    device: str = "cuda"
    cache_bytes: int = 0

    def bound(self, case: Case) -> tuple[float, str] | None:
        """(least seconds, "memory" or "compute"); None where the case declares no work, ran on another device, moved
        its bytes between ranks ("bus"), or the roof has no rate for its dtype."""
        if device_of(case) != self.device or case.params.get("bytes") == "bus":
            return None
        rate = self.flop_per_s.get(dtype_of(case))
        by_memory = case.bytes_moved / self.bytes_per_s if case.bytes_moved and self.bytes_per_s else 0.0
        by_flop = case.flop / rate if case.flop and rate else 0.0
        if (case.flop and not rate) or not (by_memory or by_flop):
            return None
        return max((by_memory, "memory"), (by_flop, "compute"))

    def ridge(self, dtype: str) -> float | None:
        """FLOP per byte from which on arithmetic binds."""
        rate = self.flop_per_s.get(dtype)
        return rate / self.bytes_per_s if rate and self.bytes_per_s else None


def dtype_of(case: Case) -> str:
    return str(case.params.get("dtype", ""))


def device_of(case: Case) -> str:
    """Where the case's work is done: as it says, on the card that it names, else on the host."""
    return str(case.params.get("device") or ("cuda" if case.params.get("card") else "cpu"))


def datasheet(card: Card) -> Roof:
    """The card's own figures, fp32 without tf32."""
    rates = {dtype: peak.flop_per_s for dtype, peak in card.peaks.items()}
    return Roof(f"{card.part} data sheet", card.bytes_per_s, rates)


def measured_roof(file: ResultFile) -> Roof:
    """What the suite `ceilings` reached at best: of copy and read, and of each dtype's products, in any sample."""
    memory, device = 0.0, "cpu"
    rates: dict[str, float] = {}
    for result in file.cases.values():
        case = result.case
        device = device_of(case)
        for measured in result.providers.values():
            if not measured.samples_s or measured.invalid:
                continue
            seconds = min(measured.samples_s)
            if case.params.get("quantity") == "matmul":
                rates[dtype_of(case)] = max(rates.get(dtype_of(case), 0.0), (case.flop or 0.0) / seconds)
            else:
                memory = max(memory, (case.bytes_moved or 0.0) / seconds)
    if file.suite != "ceilings" or not memory:
        raise ValueError(f"{file.path}: holds no bandwidth of suite `ceilings`; `plait bench ceilings` measures it")
    card = card_of(file.machine) if device == "cuda" else None
    title = f"measured on this {'card' if device == 'cuda' else 'host'} by suite ceilings, {file.date[:10]}"
    return Roof(title.removesuffix(", "), memory, rates, device, card.l2_bytes if card else 0)


HARDWARE = ("cpu", "cores", "memory_gib")
CARD = ("name", "memory_gib", "power_limit")


def same_hardware(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether ceilings of one fingerprint say something about the other; versions and drivers may differ."""
    cards = [[[gpu.get(name) for name in CARD] for gpu in machine.get("gpus") or []] for machine in (a, b)]
    return all(a.get(name) == b.get(name) for name in HARDWARE) and cards[0] == cards[1]


def roof_for(file: ResultFile, files: list[ResultFile]) -> Roof | None:
    """The last of the files that holds ceilings of this file's hardware, as a roof; none for a card that only names
    itself (lower bounds)."""
    if any(one.case.params.get("card") for one in file.cases.values()):
        return None
    found = [one for one in files if one.suite == "ceilings" and same_hardware(one.machine, file.machine)]
    return measured_roof(found[-1]) if found else None


@dataclass(frozen=True)
class Standing:
    """One provider of one case under both roofs. Rates per second; None: not declared, or no such roof."""

    case: Case
    provider: str
    seconds: float
    low: float
    high: float
    flop_rate: float | None
    byte_rate: float | None
    limiter: str
    of_sheet: float | None
    of_measured: float | None
    invalid: str = ""

    @property
    def intensity(self) -> float | None:
        """FLOP per byte."""
        case = self.case
        return case.flop / case.bytes_moved if case.flop and case.bytes_moved else None


def standings(file: ResultFile, card: Card | None, measured: Roof | None) -> list[Standing]:
    """Every provider with numbers, in the file's order. card: its data sheet; measured: its ceilings."""
    result = []
    sheet = datasheet(card) if card else None
    for one in file.cases.values():
        above, reached = (roof.bound(one.case) if roof else None for roof in (sheet, measured))
        for name, provider in one.providers.items():
            if not provider.samples_s:
                continue
            seconds = median(provider.samples_s)
            share = reached[0] / seconds if reached else None
            invalid = provider.invalid
            if not invalid and measured and file.suite != "ceilings":
                invalid = beyond_measured(one, seconds, measured)
            result.append(
                Standing(
                    one.case,
                    name,
                    seconds,
                    *median_interval(provider.samples_s),
                    one.case.flop / seconds if one.case.flop else None,
                    one.case.bytes_moved / seconds if one.case.bytes_moved else None,
                    (above or reached or (0.0, ""))[1],
                    above[0] / seconds if above else None,
                    share,
                    invalid,
                )
            )
    return result


def card_for(file: ResultFile, name: str = "") -> Card | None:
    """The card that a file's numbers are held against: the named one, the machine's, or the static suite's own."""
    if name:
        return card_named(name)
    named = {str(one.case.params.get("card", "")) for one in file.cases.values()} - {""}
    return card_named(named.pop()) if len(named) == 1 else card_of(file.machine)


HEADER = ["case", "provider", "us", "FLOP/B", "bound by", "% data sheet", "% measured"]


def cells(one: Standing) -> list[str]:
    """A standing as a line of the terminal's table."""
    texts = [f"{one.intensity:.1f}" if one.intensity else "-", one.limiter or "-"]
    texts += ["-" if share is None else f"{share:.1%}" for share in (one.of_sheet, one.of_measured)]
    return [one.case.name, one.provider, f"{one.seconds * 1e6:.1f}", *texts[:3], one.invalid or texts[3]]


BOUND_HEADER = ["case", "GFLOP", "MB", "FLOP/B", "bound by", "us, at least"]


def bound_cells(case: Case, roof: Roof) -> list[str]:
    """A case without a measurement: its work by formula and the roof's time for it."""
    found = roof.bound(case)
    work = [
        f"{case.flop / 1e9:.2f}" if case.flop else "-",
        f"{case.bytes_moved / 1e6:.2f}" if case.bytes_moved else "-",
    ]
    ratio = f"{case.flop / case.bytes_moved:.1f}" if case.flop and case.bytes_moved else "-"
    return [case.name, *work, ratio, *((found[1], f"{found[0] * 1e6:.1f}") if found else ("-", "-"))]
