"""`plait bench roofline | report`: the commands that read result files and measure nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

from plait.bench import html_report, report, roofline
from plait.bench.kernel_shapes import cases as kernel_cases
from plait.bench.result_file import ResultFile, read

IMPOSSIBLE = 4  # exit code: a number above its ceiling


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the commands of ACTIONS."""
    roof = commands.add_parser("roofline", help="what bounds each case, and its share of the ceilings")
    roof.add_argument("result", type=Path, nargs="?", metavar="RESULT", help="a result file; none: bounds alone")
    roof.add_argument(
        "--card", default="", metavar="NAME", help="whose data sheet, such as h200 (default: as measured)"
    )
    roof.add_argument(
        "--ceilings", type=Path, metavar="FILE", help="of `plait bench ceilings`, default: beside RESULT"
    )
    roof.add_argument("--only", default="", metavar="TEXT", help="only the cases whose name contains TEXT")
    roof.add_argument("--csv", type=Path, metavar="FILE")
    page = commands.add_parser("report", help="result files as one self-contained HTML page")
    page.add_argument(
        "results", type=Path, nargs="*", metavar="RESULT", help="files or folders (default: bench/results)"
    )
    page.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="default report.html")
    page.add_argument(
        "--card", default="", metavar="NAME", help="whose data sheet, such as h200 (default: as measured)"
    )


def show_roofline(args: argparse.Namespace) -> int:
    """Prints the table; 4 where a rate is above its ceiling."""
    if args.result is None:
        if not args.card:
            raise ValueError("--card: without a result file name a card, such as h200")
        named = roofline.card_named(args.card)
        roof = roofline.datasheet(named)
        cases = [case for case in kernel_cases(True, "cuda") if args.only in case.name]
        rows = [roofline.bound_cells(case, roof) for case in cases]
        print(report.table(roofline.BOUND_HEADER, rows))
        print(f"\nlower bounds on an {named.part}, nothing was timed: {named.source}, read {named.read}")
        write_csv(args.csv, roofline.BOUND_HEADER, rows)
        return 0
    file = read(args.result)
    card, measured = roofline.card_for(file, args.card), roofline.roof_for(file, [file, *ceilings_of(args)])
    found = [one for one in roofline.standings(file, card, measured) if args.only in one.case.name]
    rows = [roofline.cells(one) for one in found]
    print(report.table(roofline.HEADER, rows))
    print(
        f"\ndata sheet: {f'{card.source}, read {card.read}' if card else 'none for this machine; --card names one'}"
    )
    print(f"measured: {measured.title if measured else 'no ceilings of this machine; `plait bench ceilings`'}")
    write_csv(args.csv, roofline.HEADER, rows)
    return IMPOSSIBLE if any(one.invalid for one in found) else 0


def ceilings_of(args: argparse.Namespace) -> list[ResultFile]:
    """The file of --ceilings, else ceilings.json beside the result, else none."""
    beside = args.result.with_name("ceilings.json")
    if args.ceilings is not None:
        return [read(args.ceilings)]
    return [read(beside)] if beside.exists() and beside != args.result else []


def write_csv(path: Path | None, header: list[str], rows: list[list[str]]) -> None:
    if path is not None:
        report.write_text(path, report.csv_text(header, rows))


def write_report(args: argparse.Namespace) -> int:
    """Writes the page; ValueError where there is nothing to show."""
    files = [read(path) for path in files_of(args.results or [Path("bench/results")])]
    report.write_text(args.out, html_report.page(files, card=args.card))
    print(f"written: {args.out} ({', '.join(dict.fromkeys(file.suite for file in files))})")
    return 0


def files_of(places: list[Path]) -> list[Path]:
    """The places, each folder as the JSON files in it; ValueError for a folder without one."""
    found = []
    for place in places:
        inside = sorted(place.glob("*.json")) if place.is_dir() else [place]
        if not inside:
            raise ValueError(f"{place}: holds no result file; `plait bench run --json {place}` writes them")
        found += inside
    return found


ACTIONS = {"roofline": show_roofline, "report": write_report}
