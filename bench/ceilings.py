"""What a device cannot exceed, and what it means when a number does. Measures nothing.

Peaks are the vendors', dense, and each row proves itself: FLOP/s = multiprocessors x FLOP per clock x clock
(tests/test_bench.py). A rate above 102 % of its ceiling is INVALID: no kernel did that.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from plait.bench.spec import CaseResult

TOLERANCE = 1.02  # above the ceiling: what timers and clocks above the nominal one may explain
LAUNCH_S = 1e-5  # a sample below this is about a launch: nobody waited for the device
L2_GAIN = 4  # L2 over memory bandwidth, rounded up: published microbenchmarks of these cards give 2 to 3


@dataclass(frozen=True)
class Ceiling:
    """One kind of card. flop_per_clock: of one multiprocessor, dense bf16; tf32 is half. bytes_per_s: memory."""

    part: str  # of the device's name
    multiprocessors: int
    flop_per_clock: int
    clock_hz: float
    bf16_flop_per_s: float
    bytes_per_s: float
    l2_bytes: int
    source: str


# Multiprocessors, clocks, peaks, memory as collected in stas00/ml-engineering, read 2026-11; L2: vendors' papers.
CARDS = (
    Ceiling("H200", 132, 4096, 1830e6, 989e12, 4.8e12, 50 << 20, "NVIDIA H200 SXM data sheet"),
    Ceiling("H100 80GB HBM3", 132, 4096, 1830e6, 989e12, 3.35e12, 50 << 20, "NVIDIA H100 SXM data sheet"),
    Ceiling("A100-SXM4-80GB", 108, 2048, 1410e6, 312e12, 2.04e12, 40 << 20, "NVIDIA A100 SXM 80 GB data sheet"),
    Ceiling("MI300X", 304, 2048, 2100e6, 1307e12, 5.3e12, 256 << 20, "AMD MI300X data sheet; its last-level cache"),
)


def ceiling_of(machine: dict[str, Any]) -> Ceiling | None:
    """Returns the ceiling of a fingerprint's first GPU, None where it has none or an unknown one."""
    gpus = machine.get("gpus") or [{}]
    return next((card for card in CARDS if card.part in str(gpus[0].get("name", ""))), None)


def peak_flop(card: Ceiling, dtype: str) -> float | None:
    """Returns dense FLOP/s for a dtype by its torch name; float32 may use tf32. None where it is not known."""
    return {
        "bfloat16": card.bf16_flop_per_s,
        "float16": card.bf16_flop_per_s,
        "float32": card.bf16_flop_per_s / 2,
    }.get(dtype)


def impossible(result: CaseResult, seconds: float, card: Ceiling) -> str:
    """Returns why this time cannot be true on the card, with the likely cause; '' where it can."""
    case, peak = result.case, peak_flop(card, str(result.case.params.get("dtype")))
    no_sync = "; likely cause: shorter than a launch, so the device was not waited for" if seconds < LAUNCH_S else ""
    if case.flop and peak and case.flop / seconds > TOLERANCE * peak:
        cause = no_sync or "; likely cause: work skipped or replayed, or a formula that counts FLOP not done"
        return f"{case.flop / seconds / 1e12:.0f} TFLOP/s, the peak is {peak / 1e12:.0f} ({card.source}){cause}"
    moved = case.bytes_moved or 0.0
    cached = moved <= card.l2_bytes and moved / seconds <= L2_GAIN * card.bytes_per_s
    if moved / seconds > TOLERANCE * card.bytes_per_s and not (cached and result.cache == "hot"):
        cause = no_sync or "; likely cause: work skipped or replayed, or a formula that counts bytes not moved"
        if cached:
            cause = f"; likely cause: {moved / 2**20:.0f} MiB sit in the L2 of {card.l2_bytes >> 20} MiB"
        return f"{moved / seconds / 1e9:.0f} GB/s, memory gives {card.bytes_per_s / 1e9:.0f} ({card.source}){cause}"
    return ""


def mark_impossible(result: CaseResult, machine: dict[str, Any]) -> bool:
    """Sets `invalid` of each provider that is faster than the machine can be; returns whether there is one.

    Only cases that say they run on the GPU, by params["device"], are held against its ceiling.
    """
    card = ceiling_of(machine)
    if card is None or result.case.params.get("device") != "cuda":
        return False
    for measured in result.providers.values():
        if measured.samples_s:
            measured.invalid = impossible(result, median(measured.samples_s), card)
    return any(measured.invalid for measured in result.providers.values())
