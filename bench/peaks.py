"""What a card cannot exceed by its data sheet: dense peaks by dtype, memory, L2; each row with its source and date.

Each peak proves itself: FLOP/s = multiprocessors x FLOP per clock x clock (tests/test_peaks.py). The matrix and the
vector figures of one sheet hold at different clocks, so each has its own. Measures nothing, knows no result.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Peak:
    """Dense FLOP/s as the vendor prints it, and its factors. flop_per_clock: of one multiprocessor."""

    flop_per_s: float
    flop_per_clock: int
    clock_hz: float


@dataclass(frozen=True)
class Card:
    """One kind of card. part: of the device's name. peaks by torch's dtype name, and "tfloat32" beside "float32".

    read: when the figures were looked up; note: what is derived, and how.
    """

    part: str
    multiprocessors: int
    peaks: dict[str, Peak]
    bytes_per_s: float
    memory_gb: int
    l2_bytes: int
    source: str
    read: str
    arch: str = ""  # as triton's tools name it; "" where this code compiles nothing for it offline
    note: str = ""

    @property
    def bf16_flop_per_s(self) -> float:
        return self.peaks["bfloat16"].flop_per_s

    def flop_per_s(self, dtype: str) -> float | None:
        """Dense FLOP/s for a dtype by torch's name, float32 without tf32; None where the table has none."""
        return self.peaks[dtype].flop_per_s if dtype in self.peaks else None

    def most_flop_per_s(self, dtype: str) -> float | None:
        """The same, but of float32 what tf32 gives: no product of such inputs can be faster."""
        return self.flop_per_s("tfloat32" if dtype == "float32" else dtype)


def _hopper(source: str, part: str, bytes_per_s: float, memory_gb: int) -> Card:
    """H100 and H200 SXM differ in memory alone."""
    return Card(
        part,
        132,
        {
            "bfloat16": Peak(989e12, 4096, 1830e6),
            "float16": Peak(989e12, 4096, 1830e6),
            "float8": Peak(1979e12, 8192, 1830e6),
            "tfloat32": Peak(494.5e12, 2048, 1830e6),
            "float32": Peak(67e12, 256, 1980e6),  # the sheet's vector figures hold at the highest clock
        },
        bytes_per_s,
        memory_gb,
        50 << 20,
        source,
        _READ,
        "sm_90",
    )


# Units, clocks, peaks and memory as collected in stas00/ml-engineering from the vendors' sheets; L2: vendors' papers.
_READ = "2026-11"
CARDS = (
    _hopper("NVIDIA H200 SXM data sheet", "H200", 4.8e12, 141),
    _hopper("NVIDIA H100 SXM data sheet", "H100 80GB HBM3", 3.35e12, 80),
    Card(
        "A100-SXM4-80GB",
        108,
        {
            "bfloat16": Peak(312e12, 2048, 1410e6),
            "float16": Peak(312e12, 2048, 1410e6),
            "tfloat32": Peak(156e12, 1024, 1410e6),
            "float32": Peak(19.5e12, 128, 1410e6),
        },
        2.04e12,
        80,
        40 << 20,
        "NVIDIA A100 SXM 80 GB data sheet",
        _READ,
        "sm_80",
    ),
    Card(
        "B200",
        148,
        {
            "bfloat16": Peak(2250e12, 8192, 1855e6),
            "float16": Peak(2250e12, 8192, 1855e6),
            "float8": Peak(4500e12, 16384, 1855e6),
            "tfloat32": Peak(1125e12, 4096, 1855e6),
            "float32": Peak(74.4e12, 256, 1965e6),
        },
        8.0e12,
        180,
        126 << 20,
        "NVIDIA HGX B200 data sheet, an eighth of it",
        _READ,
        "sm_100",
        "the matrix clock of 1855 MHz follows from the printed peaks, the highest is 1965; fp32 is computed at 1965, "
        "since the 80 TFLOP/s that some sheets print would need 2.11 GHz",
    ),
    Card(
        "MI300X",
        304,
        {
            "bfloat16": Peak(1307e12, 2048, 2100e6),
            "float16": Peak(1307e12, 2048, 2100e6),
            "float8": Peak(2614e12, 4096, 2100e6),
            "tfloat32": Peak(653.7e12, 1024, 2100e6),
            "float32": Peak(163.4e12, 256, 2100e6),
        },
        5.3e12,
        192,
        256 << 20,
        "AMD MI300X data sheet",
        _READ,
        "gfx942",
        "L2 is the last-level cache",
    ),
)


def card_of(machine: dict[str, Any]) -> Card | None:
    """Returns the card of a fingerprint's first GPU, None where it has none or an unknown one."""
    name = str((machine.get("gpus") or [{}])[0].get("name", ""))
    # Whole words: a GH200 or GB200 is another card than its last four letters, and so is the NVL variant.
    return next((card for card in CARDS if re.search(rf"\b{re.escape(card.part)}\b(?! NVL)", name)), None)


def card_named(name: str) -> Card:
    """Returns the card whose part begins with the name, in any case ("h200"); ValueError naming the valid ones."""
    found = [card for card in CARDS if card.part.lower().startswith(name.lower())]
    if not name or len(found) != 1:
        raise ValueError(f"card: {name!r} is unknown; valid: {', '.join(card.part.split('-')[0] for card in CARDS)}")
    return found[0]
