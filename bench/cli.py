"""`plait bench`: lists the suites, runs them, writes one JSON file a suite and prints one table.

Exit codes: 0 measured, 1 a case could not be measured, 2 usage, 4 a provider computed a wrong result (then no number
is printed for its case). A case that fails takes no other with it: the table and the file say why it has no numbers.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import signal
import sys
from pathlib import Path

from plait.bench import report
from plait.bench.spec import Case, CaseResult, Options, Suite, WrongResultError

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


def measured(suite: Suite, case: Case, options: Options) -> tuple[CaseResult, int]:
    """Returns the case's result and exit code; a failure is a result without numbers that says what went wrong."""
    try:
        return suite.measure(case, options), 0
    except WrongResultError as error:
        text, code = f"wrong result: {error}", 4
    except (OSError, RuntimeError, ValueError) as error:
        text, code = f"{type(error).__name__}: {error}", 1
    print(f"plait bench: {case.name}: {text}", file=sys.stderr, flush=True)
    return CaseResult(case, "", {}, error=text), code


def run_suite(suite: Suite, options: Options, only: str, command: str, folder: Path | None) -> int:
    """Measures the suite's cases one by one, shows where it is on stderr, prints the table, writes the file.

    Returns the worst exit code of its cases.
    """
    cases = [case for case in suite.cases(options.full) if only in case.name]
    if not cases:
        raise ValueError(f"--only: no case of suite {suite.name} contains {only!r}")
    results, worst = [], 0
    for index, case in enumerate(cases):
        print(f"[{suite.name} {index + 1}/{len(cases)}] {case.name}", file=sys.stderr, flush=True)
        result, code = measured(suite, case, options)
        results.append(result)
        worst = max(worst, code)
    print(f"\n{suite.name}: {suite.about}\n\n{report.markdown(results)}\n", flush=True)
    if folder is not None:
        path = folder / f"{suite.name}.json"
        report.write_json(path, report.document(suite, results, options, command))
        print(f"written: {path}", file=sys.stderr)
    return worst


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
    # A suite's temporary folder goes by the way of an exception; SIGTERM alone would leave it on the disk.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        command = f"plait bench {shlex.join(argv)}"
        suites = [load(name) for name in names]
        return max([run_suite(suite, options, args.only, command, args.json) for suite in suites])
    except ValueError as error:
        print(f"plait bench: {error}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)
