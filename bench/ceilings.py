"""What it means when a number exceeds what a device can do: it is INVALID, with the likely cause. Measures nothing.

Two ceilings: the data sheet's (peaks.py), and what the machine itself reached in the suite `ceilings`, where that was
measured. Above 102 % of either no kernel did that.
"""

from __future__ import annotations

import dataclasses
from statistics import median
from typing import TYPE_CHECKING, Any

from plait.bench.peaks import Card, card_of
from plait.bench.spec import CaseResult

if TYPE_CHECKING:
    from plait.bench.roofline import Roof

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


def beyond_measured(result: CaseResult, seconds: float, roof: Roof) -> str:
    """Returns why this time cannot be true beside what the machine itself reached; '' where it can.

    Bytes of "hot" data are no matter of memory: only their FLOP are held against it.
    """
    if roof.device == "cuda":  # no product of fp32 is faster than in tf32; where that was not measured, say nothing
        rates = {name: rate for name, rate in roof.flop_per_s.items() if name != "float32"}
        rates |= {"float32": rates["tfloat32"]} if "tfloat32" in rates else {}
        roof = dataclasses.replace(roof, flop_per_s=rates)
    bound = roof.bound(result.case)
    if bound is None or bound[0] <= TOLERANCE * seconds or (result.cache == "hot" and bound[1] == "memory"):
        return ""
    share = f"{bound[0] / seconds:.0%} of the measured ceiling of {bound[1].replace('compute', 'arithmetic')}"
    cause = "work skipped or replayed, a formula that counts too much, or ceilings taken while the machine was busy"
    if roof.device == "cuda" and seconds < LAUNCH_S:
        cause = "shorter than a launch, so the device was not waited for"
    elif bound[1] == "memory" and (result.case.bytes_moved or 0.0) <= roof.cache_bytes:
        cause = f"{(result.case.bytes_moved or 0.0) / 2**20:.0f} MiB sit in a cache of {roof.cache_bytes >> 20} MiB"
    return f"{share} ({roof.title}); likely cause: {cause}"


def mark_impossible(result: CaseResult, machine: dict[str, Any], roof: Roof | None = None) -> bool:
    """Sets `invalid` of each provider that is faster than the machine can be; returns whether there is one.

    Only cases that say where they run, by params["device"], are held against a ceiling: on a GPU its data sheet,
    and roof, what this machine reached.
    """
    card, device = card_of(machine), result.case.params.get("device")
    if not device or (roof is None and (card is None or device != "cuda")):
        return False
    for measured in result.providers.values():
        if not measured.samples_s:
            continue
        seconds = median(measured.samples_s)
        if card is not None and device == "cuda":
            measured.invalid = impossible(result, seconds, card)
        if roof is not None and not measured.invalid:
            measured.invalid = beyond_measured(result, seconds, roof)
    return any(measured.invalid for measured in result.providers.values())
