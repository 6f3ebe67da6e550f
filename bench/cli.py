"""`plait bench`: lists the suites, runs them, writes one JSON file a suite and prints one table.

Exit codes: 0 measured, 2 usage, 4 a provider computed a wrong result (then no number is printed for its case).
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from pathlib import Path

from plait.bench import report
from plait.bench.spec import Options, Suite, WrongResultError

# suite -> module that holds its SUITE; imported only when it runs
SUITES = {
    "train": "plait.bench.suite_train",
    "kernels": "plait.bench.suite_kernels",
    "snapshots": "plait.bench.suite_snapshots",
    "pipeline": "plait.bench.suite_pipeline",
}


def parser() -> argparse.ArgumentParser:
    """Returns the command line of `plait bench`."""
    top = argparse.ArgumentParser(prog="plait bench", description=__doc__.splitlines()[0] if __doc__ else None)
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name the suites and their cases")
    run = commands.add_parser("run", help="run suites; all of them when none is named")
    run.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    train = commands.add_parser(
        "train", help="the main job beside torch's own stack (the same as `run train --full`)"
    )
    for command in (run, train):
        command.add_argument("--full", action="store_true", help="every case, not only the small default one")
        command.add_argument(
            "--rounds", type=int, default=None, help="counted rounds per case (default: the suite's)"
        )
        command.add_argument("--json", type=Path, default=None, metavar="DIR", help="write DIR/SUITE.json")
        command.add_argument("--only", default="", metavar="TEXT", help="only the cases whose name contains TEXT")
    return top


def load(name: str) -> Suite:
    """Returns a suite by name; raises ValueError naming the valid ones."""
    if name not in SUITES:
        raise ValueError(f"suite: {name!r} is unknown; valid: {', '.join(SUITES)}")
    suite: Suite = importlib.import_module(SUITES[name]).SUITE
    return suite


def run_suite(suite: Suite, options: Options, only: str, command: str, folder: Path | None) -> None:
    """Measures the suite's cases one by one, shows where it is on stderr, prints the table, writes the file."""
    cases = [case for case in suite.cases(options.full) if only in case.name]
    if not cases:
        raise ValueError(f"--only: no case of suite {suite.name} contains {only!r}")
    results = []
    for index, case in enumerate(cases):
        print(f"[{suite.name} {index + 1}/{len(cases)}] {case.name}", file=sys.stderr, flush=True)
        results.append(suite.measure(case, options))
    print(f"\n{suite.name}: {suite.about}\n\n{report.markdown(results)}\n", flush=True)
    if folder is not None:
        path = folder / f"{suite.name}.json"
        report.write_json(path, report.document(suite, results, options, command))
        print(f"written: {path}", file=sys.stderr)


def main(argv: list[str]) -> int:
    """Runs `plait bench ARGV`; returns its exit code."""
    args = parser().parse_args(argv)
    if args.command == "list":
        for name in SUITES:
            suite = load(name)
            print(f"{name}: {suite.about}")
            for case in suite.cases(True):
                print(f"  {case.name}")
        return 0
    names = ["train"] if args.command == "train" else args.suites or list(SUITES)
    full = args.full or args.command == "train"
    options = Options(full=full) if args.rounds is None else Options(full=full, rounds=args.rounds)
    try:
        for name in names:
            run_suite(load(name), options, args.only, f"plait bench {shlex.join(argv)}", args.json)
    except ValueError as error:
        print(f"plait bench: {error}", file=sys.stderr)
        return 2
    except WrongResultError as error:
        print(f"plait bench: wrong result: {error}", file=sys.stderr)
        return 4
    return 0
