"""The report: which of a suite's own figures get a column, and how they are written; who is a limit and no peer.

A suite may note hundreds of figures (ends of intervals, each sample): a page shows some, the result file has all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from plait.bench.html_tags import bytes_text, digits, seconds_text, share_text

MOST = 8  # columns of a suite's own figures
# The ones that say most, in this order; then in the order in which a suite notes them.
FIRST = (
    "step / plan", "bubble", "host us/action", "tokens/s", "CPU s/step", "stall warm s", "stall first s",
    "restore cold s", "restore warm s", "lost share 1", "memory save bytes", "x limit", "us above the floor (min)",
    "host us/call", "LATE windows", "first call s", "error", "calls/sample",
)  # fmt: skip
DETAIL = re.compile(r" (low|high|#\d+)$")  # ends of an interval, single samples
UNITS = (" s", "_s", " bytes")  # that a value's own text has
LIMITS = ("limit", "floor", "empty op", "bare launch")


def is_limit(provider: str) -> bool:
    """Whether it is what nobody can be faster than, and so no peer."""
    return provider in LIMITS or provider.startswith("limit: ")


def is_way_of(provider: str, ours: str) -> bool:
    """Whether it is ours used in another way, such as "plait guarded"."""
    return provider.startswith(f"{ours} ")


def columns_of(all_figures: Iterable[Mapping[str, float]], without: set[str]) -> list[str]:
    """The names of the figures to show, at most MOST; without: those that have columns of their own already."""
    found = dict.fromkeys(
        name for figures in all_figures for name in figures if name not in without and not DETAIL.search(name)
    )
    first = [name for name in FIRST if name in found]
    return [*first, *(name for name in found if name not in first)][:MOST]


def title_of(name: str) -> str:
    """A figure's name without the unit that its values carry."""
    return next((name.removesuffix(unit) for unit in UNITS if name.endswith(unit)), name)


def text_of(name: str, value: float) -> str:
    """A figure as text."""
    if name.endswith((" s", "_s")):
        return seconds_text(value)
    if name.endswith(" bytes"):
        return bytes_text(value)
    if "share" in name:
        return share_text(value)
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else digits(value, 4)
