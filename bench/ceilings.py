"""What it means when a number exceeds what a device can do: it is INVALID, with the likely cause. Measures nothing.

Peaks are peaks.py's; above 102 % of its ceiling no kernel did that.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from plait.bench.peaks import Card, card_of
from plait.bench.spec import CaseResult

TOLERANCE = 1.02  # above the ceiling: what timers and clocks above the nominal one may explain
LAUNCH_S = 1e-5  # a sample below this is about a launch: nobody waited for the device
L2_GAIN = 4  # L2 over memory bandwidth, rounded up: published microbenchmarks of these cards give 2 to 3


def impossible(result: CaseResult, seconds: float, card: Card) -> str:
    """Returns why this time cannot be true on the card, with the likely cause; '' where it can."""
    case, peak = result.case, card.most_flop_per_s(str(result.case.params.get("dtype")))
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
    card = card_of(machine)
    if card is None or result.case.params.get("device") != "cuda":
        return False
    for measured in result.providers.values():
        if measured.samples_s:
            measured.invalid = impossible(result, median(measured.samples_s), card)
    return any(measured.invalid for measured in result.providers.values())
