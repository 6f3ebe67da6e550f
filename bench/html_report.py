"""`plait bench report`: result files as one self-contained HTML page: no network, no script. Measures nothing.

The newest file of each suite is its table; older ones are its history. The page says first who won where, then on
which machine, then every number with its interval, and how each was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from plait.bench.html_figures import DETAIL, is_limit, is_way_of
from plait.bench.html_history import history
from plait.bench.html_roofline import roofline_plot
from plait.bench.html_style import CSS
from plait.bench.html_tables import SHOWN, Line, further_columns, left_out, lines_of, suite_table
from plait.bench.html_tags import Element, digits, join, style, tag
from plait.bench.kernel_points import pinned_facts
from plait.bench.result_file import ResultFile
from plait.bench.roofline import card_for, datasheet, roof_for, standings


@dataclass(frozen=True)
class Section:
    """One suite: its files in the order of their dates, and the lines of the newest."""

    files: list[ResultFile]
    lines: list[Line]
    plot: Element | None

    @property
    def newest(self) -> ResultFile:
        return self.files[-1]

    @property
    def timed(self) -> bool:
        """False for lower bounds that a compiler's facts give: nothing ran."""
        return not any(one.case.params.get("card") for one in self.newest.cases.values())


Facts = dict[str, dict[str, float]]  # case -> figure -> value


def sections_of(files: list[ResultFile], facts: Facts, card: str) -> list[Section]:
    """One section a suite, in the order in which suites first appear."""
    suites: dict[str, list[ResultFile]] = {}
    for file in sorted(files, key=lambda one: one.date):
        suites.setdefault(file.suite, []).append(file)
    result = []
    for name in dict.fromkeys(file.suite for file in files):
        newest = suites[name][-1]
        known, measured = card_for(newest, card), roof_for(newest, files)
        found = standings(newest, known, measured)
        lines = lines_of(found, newest.cases, facts | pinned_facts(newest))
        sheet = datasheet(known) if known else None
        plot = roofline_plot([(line.standing, line.ours) for line in lines], sheet, measured)
        section = Section(suites[name], lines, plot if name != "ceilings" else None)
        # Lower bounds stand on the roof by themselves.
        result.append(section if section.timed else replace(section, plot=None))
    return result


def page(files: list[ResultFile], facts: Facts | None = None, card: str = "") -> str:
    """The page. facts: of the compiler, for our kernels, by case; card: whose data sheet, where not the machine's."""
    sections = sections_of(files, facts or {}, card)
    newest = max(files, key=lambda file: file.date)
    title = f"plait bench: {', '.join(section.newest.suite for section in sections)}"
    commit = (
        f"commit {newest.source.get('commit', 'unknown')!s:.12}{' (dirty)' if newest.source.get('dirty') else ''}"
    )
    links = [tag("a", name, href=f"#{name}") for name in (s.newest.suite for s in sections)]
    body = join(
        tag("h1", title),
        tag("p", f"{newest.date[:16].replace('T', ' ')} UTC, {commit}", class_="soft"),
        tag("nav", *links, tag("a", "machines and runs", href="#machines"), tag("a", "how to read", href="#how")),
        summary(sections),
        *(section_part(section) for section in sections),
        machines(sections),
        how_to_read(),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        style(CSS),
    )
    return "<!doctype html>\n" + tag("html", head, tag("body", body), lang="en") + "\n"


def summary(sections: list[Section]) -> Element | None:
    """Who won where: a row for each peer of a suite, by the intervals of the paired ratios."""
    rows = []
    for section in sections:
        ours = {line.result.ours for line in section.lines}
        peers = dict.fromkeys(
            line.provider
            for line in section.lines
            if line.ratio and not is_limit(line.provider) and not any(is_way_of(line.provider, one) for one in ours)
        )
        for peer in peers:
            ratios = [line.ratio for line in section.lines if line.provider == peer and line.ratio]
            faster, slower = (sum(test(r) for r in ratios) for test in (lambda r: r[1] > 1, lambda r: r[2] < 1))
            mean = math.exp(sum(math.log(ratio[0]) for ratio in ratios) / len(ratios))
            counts = {
                "cases": len(ratios),
                "faster": faster,
                "level": len(ratios) - faster - slower,
                "slower": slower,
            }
            cells = [tag("td", str(value), data_key=key, data_value=value) for key, value in counts.items()]
            cells.insert(0, tag("td", f"{digits(mean)}\u00d7", data_key="mean", data_value=repr(mean)))
            name = tag("a", section.newest.suite, href=f"#{section.newest.suite}")
            bounds = None if section.timed else tag("span", " lower bounds", class_="soft")
            first = tag("td", name, bounds, class_="t")
            rows.append(
                tag("tr", first, tag("td", peer, class_="t"), *cells, data_summary=f"{section.newest.suite}/{peer}")
            )
    if not rows:
        return None
    titles = ("suite", "peer", "peer / ours, mean", "cases", "ours faster", "level", "ours slower")
    head = tag("thead", tag("tr", *(tag("th", t, class_="t" if t in titles[:2] else None) for t in titles)))
    return tag("div", tag("table", head, tag("tbody", *rows), class_="short"), class_="box")


def section_part(section: Section) -> Element:
    """Plot, table, what is missing, history, and how the suite was measured."""
    file = section.newest
    kind = "" if section.timed else " Lower bounds by the compiler's facts: nothing was timed."
    count = "1 case" if len(file.cases) == 1 else f"{len(file.cases)} cases"
    source = f"{count} of {file.path}, {file.date[:10]}.{kind}"
    older = {name for one in section.files[:-1] for name in one.cases} - set(file.cases)
    source += f" {len(older)} more are in older files alone, and not here." if older else ""
    return tag(
        "section",
        tag("h2", file.suite),
        tag("p", source, class_="soft"),
        section.plot,
        suite_table(section.lines, section.timed) if section.lines else None,
        left_out(file.cases.values(), section.lines),
        history(section.files),
        how_measured(file, section.lines),
        id=file.suite,
    )


def how_measured(file: ResultFile, lines: list[Line]) -> Element | None:
    """Notes, checks and L2 policies of the cases, each text once."""
    found: dict[str, list[str]] = {}
    for name, result in file.cases.items():
        if result.note:
            found.setdefault(result.note, []).append(name)
        if result.cache:
            found.setdefault(f"L2 policy: {result.cache}", []).append(name)
        for provider, measured in result.providers.items():
            if measured.check:
                found.setdefault(f"checked: {measured.check}", []).append(f"{name}, {provider}")
            if measured.invalid:
                found.setdefault(f"INVALID: {measured.invalid}", []).append(f"{name}, {provider}")
    if not found:
        return None
    total = sum(len(result.providers) for result in file.cases.values())
    items = [
        tag(
            "li",
            text,
            tag(
                "span",
                f" \u2014 {where[0]}" if len(where) == 1 else f" \u2014 {len(where)} of {total}",
                class_="soft",
            ),
        )
        for text, where in found.items()
    ]
    run = {name: file.options[name] for name in ("rounds", "warmup", "processes", "seed") if name in file.options}
    first = tag("li", "run: " + ", ".join(f"{name} {value}" for name, value in run.items())) if run else None
    noted = {name for line in lines for name in line.measured.figures} - SHOWN - set(further_columns(lines))
    if noted:
        plain = [name for name in noted if not DETAIL.search(name)]
        said = f"in the result file besides: {len(noted)} figures of a provider and case"
        items.append(tag("li", said + (f", such as {', '.join(sorted(plain)[:6])}" if plain else "")))
    return tag("details", tag("summary", "How these numbers were measured"), tag("ul", first, *items))


def machines(sections: list[Section]) -> Element:
    """Each fingerprint once, and which run was on which."""
    known: list[dict[str, Any]] = []
    rows = []
    for file in (file for section in sections for file in section.files):
        if file.machine not in known:
            known.append(file.machine)
        commit = f"{file.source.get('commit', 'unknown')!s:.12}{' (dirty)' if file.source.get('dirty') else ''}"
        texts = [file.suite, file.date[:16].replace("T", " "), commit, str(known.index(file.machine) + 1)]
        cells = [tag("td", text, class_="t") for text in texts]
        rows.append(
            tag("tr", *cells, tag("td", tag("code", file.command or file.path), class_="t wrap"), data_run=file.path)
        )
    titles = ("suite", "date", "commit", "machine", "command")
    table = tag("table", tag("thead", tag("tr", *(tag("th", t, class_="t") for t in titles))), tag("tbody", *rows))
    boxes = [
        tag("div", tag("dl", *fingerprint_rows(machine, index)), class_="box")
        for index, machine in enumerate(known, 1)
    ]
    return tag("section", tag("h2", "Machines and runs"), *boxes, tag("div", table, class_="box"), id="machines")


def fingerprint_rows(machine: dict[str, Any], index: int) -> list[Element]:
    """A fingerprint as terms and descriptions."""
    rows = [tag("dt", "machine"), tag("dd", str(index))]
    for name, value in machine.items():
        if name == "gpus":
            value = "; ".join(", ".join(f"{v}" for v in gpu.values()) for gpu in value) or "none"
        rows += [tag("dt", name), tag("dd", str(value), data_fact=name)]
    return rows


HOW = {
    "time": "median of all samples; none is dropped. The interval holds the true median in 95 of 100 runs, by order "
    "statistics, whatever the distribution. Of fewer than six samples, whose number is then beside it, it is their "
    "range: no interval of theirs reaches 95 %.",
    "peer / ours, mean": "geometric mean of a peer's ratios over its cases; above 1 ours is faster. Counted as "
    "faster or slower where the interval of the case's ratio leaves 1 out.",
    "to ours": "a provider's time over ours, paired by round, with the 95 % interval of the median ratio; above 1 "
    "ours is faster. Green or red where the interval leaves 1 out.",
    "% data sheet, % measured": "least time by the roofline over the measured one. The roofline's time is the larger "
    "of declared bytes over bandwidth and declared FLOP over the dense rate of the dtype, fp32 without tf32.",
    "INVALID": "above 102 % of a ceiling: no kernel did that, so the number has no rate.",
    "regs, spills, shared, warps": "of the compiled machine code, worst kernel of the case.",
}


def how_to_read() -> Element:
    """What the columns mean."""
    rows = [part for name, text in HOW.items() for part in (tag("dt", name), tag("dd", text))]
    return tag("section", tag("h2", "How to read this"), tag("div", tag("dl", *rows), class_="box"), id="how")
