"""Several result files of one suite over time: a line a case, with its intervals. Another machine breaks the line.

The files are in the order of their dates. Measures nothing; verdicts are compare.py's.
"""

from __future__ import annotations

from statistics import median

from plait.bench.html_tags import Element, digits, seconds_text, tag
from plait.bench.result_file import ResultFile
from plait.bench.roofline import same_hardware
from plait.bench.spec import CaseResult, Measured
from plait.bench.stats import median_interval

WIDTH, HEIGHT, EDGE = 320, 44, 8


def samples_at(file: ResultFile, case: str, provider: str) -> list[float]:
    """The provider's samples in this file; empty where it has none."""
    result: CaseResult | None = file.cases.get(case)
    measured: Measured | None = result.providers.get(provider) if result else None
    return measured.samples_s if measured and not measured.invalid else []


def history(files: list[ResultFile]) -> Element | None:
    """The table of all cases of the newest file that an older one has as well; None for a single file."""
    if len(files) < 2:
        return None
    newest, rows = files[-1], []
    for name, result in newest.cases.items():
        if result.error or not samples_at(newest, name, result.ours):
            continue
        if not any(samples_at(file, name, result.ours) for file in files[:-1]):
            continue
        rows.append(history_row(files, name, result))
    if not rows:
        return None
    titles = ("case", "over the runs, from 0", "first on this machine", "newest", "newest / first")
    head = tag("thead", tag("tr", *(tag("th", t, class_="t" if t in titles[:2] else None) for t in titles)))
    about = f"{len(files)} runs, {files[0].date[:10]} to {newest.date[:10]}; a line breaks where the machine changed."
    table = tag("div", tag("table", head, tag("tbody", *rows)), class_="box")
    return tag("div", tag("h3", "History"), tag("p", about, class_="soft"), table, class_="history")


def history_row(files: list[ResultFile], name: str, result: CaseResult) -> Element:
    """Ours and its peers over the files; the ratio is to the first run on the newest one's machine."""
    newest = files[-1]
    older = [file for file in files[:-1] if same_hardware(file.machine, newest.machine)]
    before = next((median(s) for file in older if (s := samples_at(file, name, result.ours))), None)
    after = median(samples_at(newest, name, result.ours))
    if before is None:
        first, change = tag("td", "none here", class_="soft"), tag("td")
    else:
        first = tag("td", seconds_text(before), data_key="first", data_value=repr(before))
        change = tag("td", f"{digits(after / before)}\u00d7", data_key="change", data_value=repr(after / before))
    newest_cell = tag("td", seconds_text(after), data_key="newest", data_value=repr(after))
    case, line_cell = tag("td", name, class_="t"), tag("td", trend(files, name, result), class_="t")
    return tag("tr", case, line_cell, first, newest_cell, change, data_history=name)


def trend(files: list[ResultFile], name: str, result: CaseResult) -> Element:
    """Medians with whiskers, evenly spaced; from 0 to the highest end of an interval."""
    providers = [p for p in result.providers if p != result.ours] + [result.ours]
    series = {provider: [samples_at(file, name, provider) for file in files] for provider in providers}
    most = max(median_interval(samples)[1] for many in series.values() for samples in many if samples)
    step = (WIDTH - 2 * EDGE) / (len(files) - 1)

    def y(seconds: float) -> float:
        return HEIGHT - 4 - (HEIGHT - 8) * seconds / most

    parts: list[Element] = []
    for provider, many in series.items():
        kind = "ours" if provider == result.ours else "peer"
        piece: list[str] = []
        for index, samples in enumerate(many):
            x = EDGE + index * step
            if index and not same_hardware(files[index - 1].machine, files[index].machine):
                parts += line(piece, kind)
                piece = []
            if not samples:
                continue
            (low, high), mid = median_interval(samples), median(samples)
            piece.append(f"{x:.1f},{y(mid):.1f}")
            parts.append(tag("line", x1=x, x2=x, y1=f"{y(low):.1f}", y2=f"{y(high):.1f}", class_=f"trend {kind}"))
            commit = f"{files[index].source.get('commit', '')!s:.8}"
            note = f"{provider}, {files[index].date[:10]} {commit}: {seconds_text(mid)}"
            parts.append(tag("circle", tag("title", note), cx=f"{x:.1f}", cy=f"{y(mid):.1f}", r=3, class_=kind))
        parts += line(piece, kind)
    return tag("svg", *parts, width=WIDTH, height=HEIGHT, role="img", aria_label=f"history of {name}")


def line(points: list[str], kind: str) -> list[Element]:
    """A polyline, where there are two points or more."""
    return [tag("polyline", points=" ".join(points), class_=f"trend {kind}")] if len(points) > 1 else []
