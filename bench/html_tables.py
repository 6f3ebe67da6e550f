"""A suite of the report as one table: providers under their case, bars with intervals, rates, shares, static facts.

Columns are data; one that is empty for every row is left out. Every figure's cell carries its name and its full value
(data-key, data-value), so that a test can hold the page against the result file. Measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from plait.bench.html_figures import columns_of, is_limit, is_way_of, text_of, title_of
from plait.bench.html_tags import Element, bytes_text, digits, join, rate_text, seconds_text, share_text, tag
from plait.bench.roofline import Standing
from plait.bench.spec import CaseResult, Measured
from plait.bench.stats import MIN_INTERVAL, paired_ratio


@dataclass(frozen=True)
class Line:
    """One provider of one case, with where it stands under the roofs and its ratio to ours (value, low, high)."""

    result: CaseResult
    provider: str
    measured: Measured
    standing: Standing
    ratio: tuple[float, float, float] | None
    facts: dict[str, float]

    @property
    def ours(self) -> bool:
        return self.provider == self.result.ours

    def beside(self, samples: str, name: str) -> float | None:
        """The median of what the device's sensors said beside the samples, else the figure of this name."""
        readings = getattr(self.measured, samples, ())
        return median(readings) if readings else self.figure(name)

    def figure(self, *names: str) -> float | None:
        """The first of these figures that was measured, or a fact of the compiler's."""
        figures = {**self.facts, **self.measured.figures}
        return next((figures[name] for name in names if name in figures), None)


@dataclass(frozen=True)
class Column:
    """key: its name for machines. value: of a line, None where there is none; text: how the value is shown."""

    key: str
    title: str
    about: str
    value: Callable[[Line], float | None]
    text: Callable[[float], str]


def whole(value: float) -> str:
    return f"{value:.0f}"


def valid(get: Callable[[Standing], float | None]) -> Callable[[Line], float | None]:
    """A rate or share of the standing; none where the number cannot be true."""
    return lambda line: None if line.standing.invalid else get(line.standing)


COLUMNS = (
    Column("flop_rate", "FLOP/s", "declared FLOP over the median", valid(lambda s: s.flop_rate),
           lambda v: rate_text(v, "FLOP/s")),
    Column("byte_rate", "B/s", "declared bytes over the median", valid(lambda s: s.byte_rate),
           lambda v: rate_text(v, "B/s")),
    Column("of_sheet", "% data sheet", "roofline time by the card's data sheet over the median",
           valid(lambda s: s.of_sheet), share_text),
    Column("of_measured", "% measured", "roofline time by the measured ceilings over the median",
           valid(lambda s: s.of_measured), share_text),
    Column("clock", "clock", "SM clock beside the samples, MHz, median",
           lambda line: line.beside("clocks_mhz", "clock MHz"), whole),
    Column("power", "power", "W beside the samples, median", lambda line: line.beside("watts", "power W"), whole),
    Column("throttled", "throttled", "samples taken while the device held its clock down: marked, not dropped",
           lambda line: float(len(getattr(line.measured, "throttled", ()))) or None, whole),
    Column("energy", "energy", "J per iteration", lambda line: line.figure("energy J"), digits),
    Column("memory", "memory", "peak, net of what was live before",
           lambda line: line.figure("peak bytes", "memory bytes"), bytes_text),
    Column("registers", "regs", "registers per thread, worst kernel", lambda line: line.figure("registers"), whole),
    Column("spills", "spills", "loads and stores of local memory", lambda line: line.figure("spills"), whole),
    Column("shared", "shared", "shared memory of a block", lambda line: line.figure("shared bytes"), bytes_text),
    Column("warps", "warps", "occupancy: warps resident on a multiprocessor, of 64",
           lambda line: line.figure("warps"), whole),
)  # fmt: skip
SHOWN = {"clock MHz", "power W", "energy J", "peak bytes", "memory bytes", "registers", "spills"}
SHOWN |= {"shared bytes", "warps", "THROTTLED samples"}


def lines_of(
    standings: Iterable[Standing], cases: dict[str, CaseResult], facts: dict[str, dict[str, float]]
) -> list[Line]:
    """One line a standing; no ratio where either side cannot be true. facts: of the compiler, for our own kernels."""
    result, standings = [], list(standings)
    false = {(one.case.name, one.provider) for one in standings if one.invalid}
    for one in standings:
        case = cases[one.case.name]
        measured, ours = case.providers[one.provider], case.providers[case.ours]
        ratio = None
        paired = one.provider != case.ours and len(ours.samples_s) == len(measured.samples_s)
        if (
            paired
            and not is_limit(one.provider)
            and not false & {(one.case.name, one.provider), (one.case.name, case.ours)}
        ):
            ratio = paired_ratio(ours.samples_s, measured.samples_s)
        known = facts.get(one.case.name, {}) if one.provider == case.ours else {}
        result.append(Line(case, one.provider, measured, one, ratio, known))
    return result


def figure(key: str, value: float, text: str, class_: str | None = None) -> Element:
    """A cell with a figure."""
    return tag("td", text, class_=class_, data_key=key, data_value=repr(value))


def suite_table(lines: list[Line], timed: bool) -> Element:
    """The table. timed: False where samples are lower bounds by the compiler's facts and nothing ran."""
    columns = [column for column in COLUMNS if any(column.value(line) is not None for line in lines)]
    limited, others = any(line.standing.limiter for line in lines), further_columns(lines)
    titles = [("provider", "")] + [("time" if timed else "lower bound", "median of all samples")]
    titles += [("95 % interval", "of the median, from order statistics")] if timed else []
    titles += [
        ("", "time from 0, within the case; the mark is ours"),
        ("to ours", "this time over ours, paired by round"),
    ]
    titles += [(column.title, column.about) for column in columns]
    titles += [("bound by", "what the roofline says limits the case")] if limited else []
    titles += [(title_of(name), f"the suite's own figure: {name}") for name in others]
    head = tag(
        "thead",
        tag(
            "tr",
            *(
                tag(
                    "th",
                    t,
                    title=about or None,
                    class_="t" if t in ("provider", "bound by") else None,
                )
                for t, about in titles
            ),
        ),
    )
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(line.result.case.name, []).append(line)
    bodies = []
    for name, group in groups.items():
        title = tag("tr", tag("th", tag("span", name), colspan=len(titles), scope="rowgroup"), class_="head")
        rows = [row(line, group, columns, timed, limited, others) for line in group]
        bodies.append(tag("tbody", title, *rows, class_="case", data_case=name))
    return tag("div", tag("table", head, *bodies), class_="box")


def further_columns(lines: list[Line]) -> list[str]:
    """The names of the suite's own figures that are shown."""
    return columns_of((line.measured.figures for line in lines), SHOWN)


def row(
    line: Line, group: list[Line], columns: list[Column], timed: bool, limited: bool, others: list[str]
) -> Element:
    """One provider."""
    s = line.standing
    cells = [tag("td", line.provider, class_="name"), figure("seconds", s.seconds, seconds_text(s.seconds))]
    if timed:
        several = len(line.measured.samples_s) > 1
        low, high = seconds_text(s.low), seconds_text(s.high)
        low = low.split()[0] if low.split()[1] == high.split()[1] else low
        reach = f"{low} \u2013 {high}" if several else "one sample"
        count = len(line.measured.samples_s)
        reach += f" ({count})" if 1 < count < MIN_INTERVAL else ""
        cells.append(
            tag("td", reach, class_="soft", data_key="interval", data_low=repr(s.low), data_high=repr(s.high))
        )
    cells += [tag("td", bar(line, group), class_="bar"), ratio_cell(line)]
    for column in columns:
        value = column.value(line)
        cells.append(tag("td") if value is None else figure(column.key, value, column.text(value)))
    if limited:
        cells.append(tag("td", s.limiter, class_="t", data_key="limiter"))
    for name in others:
        value = line.measured.figures.get(name)
        cells.append(tag("td") if value is None else figure(f"figure {name}", value, text_of(name, value), "soft"))
    if s.invalid:
        cells[4 if timed else 3] = tag("td", "INVALID", class_="bad", title=s.invalid, data_key="invalid")
    kind = "ours" if line.ours else "way" if is_way_of(line.provider, line.result.ours) else None
    return tag("tr", *cells, class_="limit" if is_limit(line.provider) else kind, data_provider=line.provider)


def ratio_cell(line: Line) -> Element:
    """A peer's time over ours: above 1 ours is faster; green or red where the interval leaves 1 out."""
    if line.ratio is None:
        return tag("td", "1" if line.ours else "", class_="soft")
    value, low, high = line.ratio
    colour = "good" if low > 1 else "bad" if high < 1 else None
    several = len(line.measured.samples_s) > 1
    text = f"{digits(value)}\u00d7" + (f" ({digits(low)}\u2013{digits(high)})" if several else "")
    return figure("ratio", value, text, colour)


def bar(line: Line, group: list[Line]) -> Element:
    """The median as a bar from 0, its interval as a whisker, and where ours ends; the longest of the case is full."""
    most = max(one.standing.high for one in group)
    ours = next((one.standing.seconds for one in group if one.ours), None)

    def at(seconds: float) -> str:
        return f"{100 * seconds / most:.2f}%" if math.isfinite(most) and most > 0 else "0%"

    s = line.standing
    colour = "bad" if s.invalid else "ours" if line.ours else "peer"
    return tag(
        "svg",
        tag("rect", x=0, y=4, width=at(s.seconds), height=10, rx=2, class_=colour),
        tag("line", x1=at(s.low), x2=at(s.high), y1=9, y2=9, class_="reach") if s.high > s.low else None,
        tag("line", x1=at(ours), x2=at(ours), y1=0, y2=18, class_="mark") if ours and not line.ours else None,
        height=18,
        role="img",
        aria_label=f"{line.provider}: {seconds_text(s.seconds)}",
    )


def left_out(results: Iterable[CaseResult], lines: list[Line]) -> Element | None:
    """What has no numbers: failed cases and impossible ones one by one, skipped providers by their reason."""
    false = [(f"{s.case.name}, {s.provider}", s.invalid) for s in (line.standing for line in lines) if s.invalid]
    failed = [(one.case.name, one.error.splitlines()[0]) for one in results if one.error]
    skipped: dict[tuple[str, str], list[str]] = {}
    for one in results:
        for name, measured in one.providers.items():
            if measured.skipped:
                skipped.setdefault((name, measured.skipped), []).append(one.case.name)
    if not failed and not skipped and not false:
        return None
    items = [tag("li", tag("b", "failed", class_="bad"), f" {name}: {why}", data_failed=name) for name, why in failed]
    items += [
        tag("li", tag("b", "INVALID", class_="bad"), f" {name}: {why}", data_invalid=name) for name, why in false
    ]
    for (name, why), cases in skipped.items():
        where = cases[0] if len(cases) == 1 else f"{len(cases)} cases"
        items.append(tag("li", tag("b", name), f" left out of {where}: {why}", data_skipped=name))
    return join(tag("h3", "Without a number"), tag("ul", *items))
