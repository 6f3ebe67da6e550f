"""`plait bench`: runs suites, compares their result files, and says how far the tool itself can be believed.

Exit codes: 0 ok, 1 a regression, or a case that could not be measured, 2 usage or unreadable input, 3 inconclusive
(with --strict), 4 a wrong result or an impossible number, 5 results from machines that cannot be compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from plait.bench import aa, cli_views, gate, outputs, providers, report, runner, settings
from plait.bench import compare as comparing
from plait.bench.cli_parser import SUITES, parser
from plait.bench.ending import Ending
from plait.bench.progress import Progress
from plait.bench.pytest_json import read_any as read
from plait.bench.spec import Options, Suite
from plait.bench.verdict import Rule


def load(name: str) -> Suite:
    """Returns a suite by name; raises ValueError naming the valid ones."""
    if name not in SUITES:
        raise ValueError(f"suite: {name!r} is unknown; valid: {', '.join(SUITES)}")
    suite: Suite = importlib.import_module(SUITES[name]).SUITE
    return suite


def list_suites() -> int:
    """Prints every suite with its providers, found here or not, and all its cases; a star: in the default run."""
    for name in SUITES:
        suite = load(name)
        print(f"{name}: {suite.about}")
        for peer, need in providers.PROVIDERS.get(name, {}).items():
            print(f"  beside ours: {peer} ({providers.state_of(need, torch.cuda.is_available())})")
        default = {case.name for case in suite.cases(False)}
        for case in suite.cases(True):
            print(f"  {'*' if case.name in default else ' '} {case.name}")
    return 0


def run(args: argparse.Namespace, command: str) -> int:
    """Measures the suites, prints a table of each, writes the files asked for; returns the worst exit code."""
    at_least(args, processes=1, rounds=1, budget=0, seed=0)
    if args.tutorials and not Path(args.tutorials).is_dir():
        raise ValueError(f"--tutorials: no folder {args.tutorials!r}")
    alone = args.command in SUITES  # `plait bench train`, `plait bench ceilings`
    names = [args.command] if alone else args.suites or args.settings.suites or tuple(SUITES)
    full = args.full or alone
    base = Options(seed=args.seed, full=full, processes=args.processes, tutorials=args.tutorials)
    asked = tuple(name.strip() for name in args.providers.split(",") if name.strip())
    providers.check_asked(asked, names)
    codes: list[int] = []
    entries: list[outputs.Entry] = []
    names = sorted(names, key=lambda name: name != "ceilings")  # first: the others are held against them
    suites, roof = [load(name) for name in names], runner.known_ceilings(args.ceilings, args.json)
    if args.cache and not any(suite.caches for suite in suites):
        raise ValueError(f"--cache: no choice of L2 policies in {', '.join(names)}; the suite kernels has one")
    cache = args.cache or args.settings.cache or ""
    for suite in suites:
        options = dataclasses.replace(
            base,
            rounds=args.rounds if args.rounds is not None else base.rounds if full else suite.rounds,
            budget_s=budget_of(suite, full) if args.budget is None else args.budget,
            providers=providers.asked_in(suite.name, asked),
            cache=cache if suite.caches else "",
        )
        how = runner.run_here if options.processes == 1 else runner.run_processes
        results, code = how(suite, options, args.only, roof if suite.name != "ceilings" else None)
        roof = (runner.reached(results) if suite.name == "ceilings" else None) or roof
        text = f"{suite.name}: {suite.about}\n\n{runner.table_of(suite, results)}\n"
        print(f"\n{text}", flush=True)
        entries += (mine := outputs.entries_of(suite.name, results))
        args.ci.publish(mine, text, sys.stdout)
        runner.write_files(suite, results, options, command, {"json": args.json, "csv": args.csv, "md": args.md})
        codes.append(code)
    if args.junit:
        report.write_text(args.junit, outputs.junit(entries))
    return max(codes)


def budget_of(suite: Suite, full: bool) -> float:
    """Seconds for all cases, where nobody says; 0 for no limit."""
    return suite.budget_s if full else suite.small_s or suite.budget_s


def compare(args: argparse.Namespace, command: str) -> int:
    """Prints the verdicts of two result files; returns the exit code they call for."""
    base, head = read(args.base), read(args.head)
    confirm = (read(args.confirm[0]), read(args.confirm[1])) if args.confirm else None
    found = comparing.compare(
        base, head, rule_of(args), relative=args.relative, reference=args.reference, confirm=confirm
    )
    text = [f"{base.suite}: head {head.title()} beside base {base.title()}; above 1, head is slower"]
    if found.machine:
        text.append(f"machines differ ({found.machine}): only ratios to a provider measured in both")
    cells = [row.cells() for row in found.rows]
    text.append(report.table(comparing.HEADER, cells))
    if found.controls:
        text += ["controls, in which nothing of ours is:"]
        text.append(report.table(comparing.HEADER, [row.cells() for row in found.controls]))
    text.append(comparing.outcome(found, args.strict))
    code = found.exit_code(args.strict)
    content = {
        "command": command,
        "base": base.title(),
        "head": head.title(),
        "machine": found.machine,
        "exit": code,
        "rows": [row.to_json() for row in found.rows],
        "controls": [row.to_json() for row in found.controls],
    }
    show(args, text, comparing.HEADER, [*cells, *(row.cells() for row in found.controls)], content)
    tell(args, outputs.verdicts_of(base.suite, found), text)
    if code == comparing.REGRESSION and confirm is None:
        print("plait bench: not confirmed; measure both again and give --confirm BASE2 HEAD2", file=sys.stderr)
    return code


def itself(args: argparse.Namespace, command: str) -> int:
    """Prints how often equal things were called different; exit 1 where more suites than alpha raise an alarm."""
    at_least(args, cases=1, processes=1, rounds=1, seed=0)
    rule, progress, processes = rule_of(args), Progress(sys.stderr), args.processes
    if args.device == "fake":
        suites = 50 if args.suites is None else args.suites
        if suites < 1:
            raise ValueError(f"--suites: {suites}; need at least 1")
        tallies = aa.fake_trials(
            rule,
            suites=suites,
            cases=args.cases,
            processes=processes,
            seed=args.seed,
            rounds=args.rounds,
            progress=lambda done, total: progress.at(done, total, "suites"),
        )
    else:
        if args.suites not in (None, 1):
            raise ValueError(f"--suites: {args.suites}; a real device measures one suite, call again for more")
        if args.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device: cuda is not available here; valid: fake, cpu")
        shown = aa.counted(lambda done: progress.at(done, processes, f"processes on {args.device}"))
        tallies = [aa.real_trial(rule, args.device, args.cases, processes, args.seed, args.rounds, shown)]
    progress.close()
    text = [f"a thing against itself on {args.device}: {processes} processes a run, suspects measured once more"]
    rows = [tally.row() for tally in tallies]
    text += [report.table(aa.HEADER, rows), "< : 95 % upper bound of the rate (Clopper-Pearson)"]
    code = 1 if any(tally.too_many(rule) for tally in tallies) else 0
    more = "more" if code else "no more"
    text.append(f"{more} suites with a false alarm than alpha {rule.alpha:g} in each direction explains; exit {code}")
    show(args, text, aa.HEADER, rows, {"command": command, "exit": code, "tallies": [t.to_json() for t in tallies]})
    return code


def gated(args: argparse.Namespace, command: str) -> int:
    """Prints what differs between this tree and the base; returns the exit code it calls for."""
    at_least(args, processes=1, rounds=1, seed=0)
    for name in args.suite or []:
        load(name)
    code, text, rows, content = gate.outcome(args, rule_of(args))
    show(args, text, gate.HEADER, rows, {"command": command, **content})
    tell(args, outputs.gate_entries(rows), text)
    return code


def tell(args: argparse.Namespace, entries: list[outputs.Entry], text: list[str]) -> None:
    """Tells the CI server, and writes JUnit where it is asked for."""
    args.ci.publish(entries, "\n\n".join(text) + "\n", sys.stdout)
    if args.junit:
        report.write_text(args.junit, outputs.junit(entries))


def at_least(args: argparse.Namespace, **least: int) -> None:
    """Raises ValueError for an option below its least value."""
    for name, value in least.items():
        said = getattr(args, name)
        if said is not None and not said >= value:
            raise ValueError(f"--{name}: {getattr(args, name)}; need at least {value}")


def rule_of(args: argparse.Namespace) -> Rule:
    return Rule(alpha=args.alpha, bound=args.bound, floor_s=args.floor_us / 1e6)


def show(
    args: argparse.Namespace, text: list[str], header: list[str], rows: list[list[str]], content: dict[str, Any]
) -> None:
    """Prints the text, and writes it and its data to the files asked for."""
    print("\n\n".join(text))
    if args.json:
        report.write_json(args.json, content)
    if args.csv:
        report.write_text(args.csv, report.csv_text(header, rows))
    if args.md:
        report.write_text(args.md, "\n\n".join(text) + "\n")


def main(argv: list[str]) -> int:
    """Runs `plait bench ARGV`; returns its exit code."""
    try:
        chosen = settings.load(settings.find(Path.cwd()), SUITES, providers.ALL)
    except (ValueError, OSError) as error:
        print(f"plait bench: {error}", file=sys.stderr)
        return 2
    args = parser(chosen).parse_args(argv)
    args.ci, args.settings = outputs.Ci.of(os.environ), chosen
    if args.command == "list":
        return list_suites()
    act = {"compare": compare, "aa": itself, "gate": gated}.get(args.command, run)
    try:
        with Ending():
            if args.command in cli_views.ACTIONS:
                return cli_views.ACTIONS[args.command](args)
            return act(args, f"plait bench {shlex.join(argv)}")
    except comparing.IncomparableError as error:
        print(f"plait bench: {error}", file=sys.stderr)
        return comparing.INCOMPARABLE
    except BrokenPipeError:  # the reader of stdout left: the command line's own matter
        raise
    except (ValueError, OSError) as error:  # OSError: a file to be written
        print(f"plait bench: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"plait bench: {error}", file=sys.stderr)
        return 1
