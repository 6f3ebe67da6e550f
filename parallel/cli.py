"""`plait schedule`: shows, proves, compares or searches pipeline schedules. No devices, no processes."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from plait.parallel.schedules import ANY_CHUNKS, NAMES, Costs, Schedule, ScheduleError, build, from_csv, held, search
from plait.parallel.schedules.costs import shared
from plait.parallel.schedules.draw import table
from plait.parallel.schedules.search import OBJECTIVES

_WHAT = f"{', '.join(NAMES)}, or a CSV file as torch.distributed.pipelining has it"
_COSTS = (
    "time of one rank's share of a micro-batch as F,I,W or F,I,W,SEND (a whole backward takes I + W), or a JSON file "
    'of lists per stage: {"forward": [...], "input": [...], "weight": [...], "send": 0.1} (default 1,1,1)'
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="plait schedule", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="draw the schedule in time")
    check = commands.add_parser("check", help="prove that the schedule can run")
    compare = commands.add_parser("compare", help="price schedules beside each other")
    find = commands.add_parser("search", help="the cheapest schedule under a memory limit")
    for command in (show, check):
        command.add_argument("schedule", help=_WHAT)
    compare.add_argument("schedules", nargs="*", help=f"{_WHAT} (default: all names)")
    for command in (show, check, compare, find):
        command.add_argument("--ranks", type=int, required=command is find, help="ranks of the pipeline axis")
        command.add_argument("--microbatches", type=int, required=command is find)
        command.add_argument(
            "--chunks", type=int, help="stages per rank, where a schedule leaves it open (default 2)"
        )
    for command in (show, compare, find):
        command.add_argument("--costs", help=_COSTS)
    for command in (show, find):
        for kind in ("svg", "perfetto", "csv"):
            command.add_argument(f"--{kind}", metavar="FILE", help=f"write {kind} to FILE as well")
    for command in (compare, find):
        command.add_argument(
            "--deferred",
            type=float,
            default=1.0,
            help="what a queued weight gradient keeps, of a stage's activations",
        )
    check.add_argument("--blocking", action="store_true", help="also with blocking sends and receives")
    find.add_argument("--memory", type=float, help="most that a rank holds, in micro-batches (default: --ranks)")
    find.add_argument("--no-split", action="store_true", help="the backward cannot be taken apart into I and W")
    find.add_argument("--objective", choices=OBJECTIVES, default="makespan")
    return parser


def parse_costs(text: str | None) -> Costs:
    """Costs from `--costs`; ValueError says what is wrong with the text or the file."""
    if text is None:
        return Costs()
    if text.endswith(".json"):
        given = json.loads(Path(text).read_text(encoding="utf-8"))
        unknown = set(given) - {"forward", "backward", "input", "weight", "send"}
        if unknown or not {"forward", "input", "weight"} <= set(given):
            raise ValueError(f"costs {text!r}: needs forward, input, weight and may have backward, send")
        pairs = zip(given["input"], given["weight"], strict=True)
        return Costs(**{"backward": [i + w for i, w in pairs], **given})
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (3, 4) or min(numbers) < 0:
        raise ValueError(f"costs {text!r}: expected F,I,W or F,I,W,SEND, numbers >= 0, or a .json file")
    forward, backward_input, weight, *send = numbers
    return Costs(forward, backward_input + weight, backward_input, weight, send[0] if send else 0.0)


def _named(name: str, args: argparse.Namespace) -> Schedule:
    """The schedule of that name or file."""
    if name.endswith(".csv"):
        return from_csv(name)
    if args.ranks is None or args.microbatches is None:
        raise ValueError(f"{name} needs --ranks and --microbatches")
    if name not in NAMES:
        raise ValueError(f"schedule {name!r} is none of {', '.join(NAMES)}, nor a .csv file")
    return build(name, args.ranks, args.microbatches, args.chunks)


def _draw(schedule: Schedule, args: argparse.Namespace) -> None:
    timeline = schedule.simulate(shared(parse_costs(args.costs), schedule))
    print(table(timeline, columns=max(40, shutil.get_terminal_size((240, 24)).columns - 10)))
    for path, text in (
        (args.svg, timeline.to_svg),
        (args.perfetto, timeline.to_perfetto),
        (args.csv, schedule.to_csv),
    ):
        if path:
            Path(path).write_text(text(), encoding="ascii")


def _show(args: argparse.Namespace) -> None:
    _draw(_named(args.schedule, args), args)


def _check(args: argparse.Namespace) -> None:
    schedule = _named(args.schedule, args)
    report = schedule.check(blocking=args.blocking)
    how = "also with blocking sends and receives" if args.blocking else "with asynchronous sends"
    print(
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} micro-batches: sound, {how}"
    )
    for rank, (alive, queued) in enumerate(zip(report.peak_activations, report.peak_deferred, strict=True)):
        stages = ",".join(map(str, schedule.stages_of(rank)))
        print(
            f"rank {rank}: stages {stages}; peak of live activations {alive}, of deferred weight gradients {queued}"
        )


def _compare(args: argparse.Namespace) -> None:
    """One line per schedule, quickest first."""
    costs = parse_costs(args.costs)
    rows = []
    for name in args.schedules or NAMES:
        own = args if args.schedules or name in ANY_CHUNKS else _without_chunks(args)
        schedule = _named(name, own)
        rows.append((schedule.simulate(shared(costs, schedule)), max(held(schedule, args.deferred))))
    print(f"{'schedule':<24} {'makespan':>10} {'bubble':>8} {'in span':>8} {'activations':>12} {'held':>6}")
    for timeline, most in sorted(rows, key=lambda row: row[0].makespan):
        print(
            f"{timeline.name:<24} {timeline.makespan:>10.6g} {timeline.bubble:>8.4f} {timeline.span_bubble:>8.4f} "
            f"{timeline.peak_activations:>12.4g} {most:>6.4g}"
        )


def _without_chunks(args: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), "chunks": None})


def _search(args: argparse.Namespace) -> None:
    found = search(
        args.ranks,
        args.microbatches,
        parse_costs(args.costs),
        memory_limit=args.memory,
        deferred=args.deferred,
        split=not args.no_split,
        chunks=(1, 2) if args.chunks is None else (args.chunks,),
        objective=args.objective,
    )
    _draw(found, args)
    print(f"held at most {max(held(found, args.deferred)):g} micro-batches on a rank, {found.num_stages} stages")


_COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "show": _show,
    "check": _check,
    "compare": _compare,
    "search": _search,
}


def main(argv: list[str]) -> int:
    """Returns 0, 1 for a schedule that cannot run, 2 for wrong usage."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed help (0) or the error (2)
        return int(stop.code or 0)
    try:
        _COMMANDS[args.command](args)
    except ScheduleError as error:
        print(error, file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"plait schedule: {error}", file=sys.stderr)
        return 2
    return 0
