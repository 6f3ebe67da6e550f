"""The roofline as an inline SVG: FLOP/s over FLOP per byte, both logarithmic, under data sheet and measured roofs.

Cases that only stream declare no FLOP: they stand in a strip of their own at the left, by their share of the
bandwidth. Draws what it is given and measures nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from plait.bench.html_tags import Element, digits, join, rate_text, share_text, tag
from plait.bench.roofline import Roof, Standing, dtype_of

WIDTH, HEIGHT = 1080, 480
STRIP, LEFT, RIGHT, TOP, BOTTOM = 190, 280, 1050, 50, 436  # the strip ends, the plane begins; edges in pixels
PREFIXES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("", 1.0))
CHAR = 6.3  # width of a letter of a label, about


@dataclass(frozen=True)
class Plane:
    """Decades of both axes."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, intensity: float) -> float:
        return LEFT + (RIGHT - LEFT) * (math.log10(intensity) - self.x_low) / (self.x_high - self.x_low)

    def y(self, rate: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (math.log10(rate) - self.y_low) / (self.y_high - self.y_low)


def plane_of(dots: list[Standing], roofs: list[Roof], dtypes: list[str]) -> Plane:
    """Whole decades around dots and ridges."""
    xs = [one.intensity or 1.0 for one in dots] + [roof.ridge(d) or 1.0 for roof in roofs for d in dtypes]
    ys = [one.flop_rate or 1.0 for one in dots] + [roof.flop_per_s.get(d, 1e9) for roof in roofs for d in dtypes]
    x_low, x_high = math.floor(math.log10(min(xs) / 1.5)), math.ceil(math.log10(max(xs) * 2.5))
    y_high = math.log10(max(ys) * 1.3)
    y_low = min(math.log10(min(ys) / 1.3), y_high - 1.0)
    return Plane(x_low, x_high, y_low, y_high)


def roof_lines(plane: Plane, roof: Roof, dtypes: list[str], sheet: bool) -> list[Element]:
    """One roof: its slope, and a ceiling for each dtype."""
    parts: list[Element] = []
    for dtype in dtypes:
        rate, ridge = roof.flop_per_s.get(dtype), roof.ridge(dtype)
        if not rate or not ridge:
            continue
        start = max(10**plane.x_low, 10**plane.y_low / roof.bytes_per_s)
        points = [(start, start * roof.bytes_per_s), (ridge, rate), (10**plane.x_high, rate)]
        path = " ".join(f"{plane.x(x):.1f},{plane.y(y):.1f}" for x, y in points if x >= start)
        parts.append(tag("polyline", points=path, class_="roof sheet" if sheet else "roof"))
    rates = ", ".join(f"{rate_text(roof.flop_per_s[d], 'FLOP/s')} {d}" for d in dtypes if d in roof.flop_per_s)
    text = f"{'dashed' if sheet else 'solid'}: {roof.title}, {rates}, {rate_text(roof.bytes_per_s, 'B/s')}"
    parts.append(tag("text", text, x=LEFT, y=TOP - (26 if sheet else 10), class_="rooftext"))
    return parts


def grid(plane: Plane) -> list[Element]:
    """A line and a number at each decade."""
    parts = []
    for power in range(math.ceil(plane.x_low), math.floor(plane.x_high) + 1):
        x = f"{plane.x(10.0**power):.1f}"
        parts.append(tag("line", x1=x, x2=x, y1=TOP, y2=BOTTOM, class_="axis"))
        text = digits(10.0**power, 1) if power < 0 else f"{10**power}" if power < 4 else f"{10 ** (power - 3)}k"
        parts.append(tag("text", text, x=x, y=BOTTOM + 16, text_anchor="middle", class_="tick"))
    steps = (1, 2, 5) if plane.y_high - plane.y_low < 2.5 else (1,)
    for rate in (step * 10.0**power for power in range(math.floor(plane.y_low), 20) for step in steps):
        if not plane.y_low <= math.log10(rate) <= plane.y_high:
            continue
        y, size = plane.y(rate), next(pair for pair in PREFIXES if rate >= pair[1])
        parts.append(tag("line", x1=LEFT, x2=RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="axis"))
        text = f"{rate / size[1]:.0f} {size[0]}FLOP/s"
        parts.append(tag("text", text, x=LEFT - 6, y=f"{y + 4:.1f}", text_anchor="end", class_="tick"))
    middle = (LEFT + RIGHT) / 2
    parts.append(tag("text", "FLOP per byte", x=middle, y=BOTTOM + 36, text_anchor="middle", class_="soft"))
    return parts


def dot(one: Standing, x: float, y: float, ours: bool, what: str) -> Element:
    """A point with its words for a pointer, and its values for a test."""
    colour = "bad" if one.invalid else "ours" if ours else "peer"
    return tag(
        "circle",
        tag("title", f"{one.case.name}, {one.provider}: {what}{'; INVALID' if one.invalid else ''}"),
        cx=f"{x:.1f}",
        cy=f"{y:.1f}",
        r=5 if ours else 4,
        class_=f"dot {colour}",
        data_case=one.case.name,
        data_provider=one.provider,
        data_x=None if one.intensity is None else repr(one.intensity),
        data_y=repr(one.flop_rate if one.intensity else share_of(one)),
    )


def share_of(one: Standing) -> float | None:
    """Of the measured ceiling where there is one, else of the data sheet."""
    return one.of_sheet if one.of_measured is None else one.of_measured


def strip(streams: list[tuple[Standing, bool]], against: str) -> list[Element]:
    """The cases without FLOP by their share of the bandwidth, 0 at the bottom; a case has a column of its own."""
    top = max(1.0, *(share_of(one) or 0.0 for one, _ in streams))
    parts = [tag("text", f"streaming: % of {against}", x=8, y=TOP - 10, class_="soft")]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = f"{BOTTOM - (BOTTOM - TOP) * share / top:.1f}"
        parts.append(tag("line", x1=40, x2=STRIP, y1=y, y2=y, class_="roof" if share == 1.0 else "axis"))
        parts.append(tag("text", f"{share:.0%}", x=34, y=float(y) + 4, text_anchor="end", class_="tick"))
    names = list(dict.fromkeys(one.case.name for one, _ in streams))
    for one, ours in sorted(streams, key=lambda pair: pair[1]):
        x = 52 + (STRIP - 64) * (names.index(one.case.name) + 0.5) / len(names)
        share = share_of(one) or 0.0
        what = f"{rate_text(one.byte_rate or 0.0, 'B/s')}, {share_text(share)}"
        parts.append(dot(one, x, BOTTOM - (BOTTOM - TOP) * share / top, ours, what))
    return parts


def labels(plane: Plane, ours: list[Standing], dots: list[Standing]) -> list[Element]:
    """Names beside our dots where there is room: the first place of six that meets no dot and no other name."""
    taken = [(plane.x(d.intensity or 1) - 6, plane.y(d.flop_rate or 1) - 6, 12.0, 12.0) for d in dots]
    parts = []
    for one in ours:
        x, y = plane.x(one.intensity or 1), plane.y(one.flop_rate or 1)
        name = str(one.case.params.get("op", one.case.name))
        text = name if len(name) <= 30 else name[:29] + "\u2026"
        wide = CHAR * len(text)
        for left, base in ((x + 8, y + 4), (x - 8 - wide, y + 4), (x - wide / 2, y - 10), (x - wide / 2, y + 20),
                           (x + 8, y + 18), (x + 8, y - 10)):  # fmt: skip
            box = (left, base - 10, wide, 12.0)
            if LEFT < left and left + wide < RIGHT and not any(meet(box, other) for other in taken):
                taken.append(box)
                parts.append(tag("text", text, x=f"{left:.1f}", y=f"{base:.1f}", class_="label"))
                break
    return parts


def meet(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    """Whether two boxes (left, top, width, height) overlap."""
    return a[0] < b[0] + b[2] and b[0] < a[0] + a[2] and a[1] < b[1] + b[3] and b[1] < a[1] + a[3]


def roofline_plot(found: list[tuple[Standing, bool]], sheet: Roof | None, measured: Roof | None) -> Element | None:
    """The plot of (standing, whether it is ours); None where nothing stands under a roof."""
    dots = [(one, ours) for one, ours in found if one.intensity and (one.of_sheet or one.of_measured)]
    streams = [(one, ours) for one, ours in found if not one.intensity and share_of(one)]
    roofs = [roof for roof in (sheet, measured) if roof]
    if not roofs or not (dots or streams):
        return None
    parts: list[Element] = []
    if streams:
        parts += strip(streams, "measured bandwidth" if measured else "data sheet")
    if dots:
        dtypes = sorted({dtype_of(one.case) for one, _ in dots})
        plane = plane_of([one for one, _ in dots], roofs, dtypes)
        parts += grid(plane)
        for roof in roofs:
            parts += roof_lines(plane, roof, dtypes, roof is sheet)
        for one, ours in sorted(dots, key=lambda pair: pair[1]):
            what = (
                f"{rate_text(one.flop_rate or 0, 'FLOP/s')} at {digits(one.intensity or 0)} FLOP/B, by {one.limiter}"
            )
            parts.append(dot(one, plane.x(one.intensity or 1), plane.y(one.flop_rate or 1), ours, what))
        parts += labels(plane, [one for one, ours in dots if ours], [one for one, _ in dots])
    width = WIDTH if dots else STRIP + 40
    plot = tag(
        "svg", *parts, viewBox=f"0 0 {width} {HEIGHT}", width=width, height=HEIGHT, role="img", aria_label="roofline"
    )
    return join(tag("div", plot, class_="box plot" if dots else "box"), key())


def key() -> Element:
    """What the colours mean."""
    ours, peer = (tag("span", class_=f"key {kind}") for kind in ("ours", "peer"))
    return tag("p", ours, "ours\u2003", peer, "peers", class_="soft")
