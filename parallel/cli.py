"""`plait schedule`: shows, proves, compares or searches pipeline schedules. No devices, no processes."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.parallel.schedules import (
    ANY_CHUNKS,
    NAMES,
    Schedule,
    ScheduleError,
    Timeline,
    build,
    from_csv,
    search,
    shared,
)
from plait.parallel.schedules.cost_files import HELP as COSTS
from plait.parallel.schedules.cost_files import read_costs
from plait.parallel.schedules.costs import AnyCosts, peak_memory
from plait.parallel.schedules.draw import table, to_perfetto, to_svg
from plait.parallel.schedules.measured import measured_costs, read_timeline
from plait.parallel.schedules.search import OBJECTIVES, can_run

_MOST_CELLS = 1 << 20  # ranks x micro-batches: a schedule is built whole, at 5 to 20 us a cell
_WHAT = f"{', '.join(NAMES)}, or a CSV file as torch.distributed.pipelining has it"


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r}: valid are finite numbers >= 0")
    return value


def _limits(text: str) -> list[float]:
    return [_positive(part) for part in text.split(",")]


def _chunks(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) <= _MOST_CELLS for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: valid are integers >= 1, comma separated")
    return tuple(dict.fromkeys(map(int, parts)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="plait schedule", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="draw the schedule in time, beside a run of it where one is given")
    check = commands.add_parser("check", help="prove that the schedule can run")
    compare = commands.add_parser("compare", help="price schedules beside each other")
    find = commands.add_parser("search", help="the cheapest schedule under a memory limit")
    show.add_argument("schedule", nargs="?", help=f"{_WHAT} (default: what --measured ran)")
    check.add_argument("schedule", help=_WHAT)
    compare.add_argument("schedules", nargs="*", help=f"{_WHAT} (default: all names)")
    for command in (show, check, compare, find):
        needed = command is find
        command.add_argument("--ranks", type=int, required=needed, help="ranks of the pipeline axis")
        command.add_argument("--microbatches", type=int, required=needed)
        if not needed:
            command.add_argument(
                "--chunks", type=int, help="stages per rank, where a schedule leaves it open (default 2)"
            )
        command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    for command in (show, compare, find):
        command.add_argument("--costs", help=COSTS)
        command.add_argument(
            "--deferred", type=_positive, help="what a queued weight gradient keeps, of a stage's activations"
        )
    for command in (show, find):
        for kind in ("svg", "perfetto", "csv"):
            command.add_argument(f"--{kind}", metavar="FILE", help=f"write {kind} to FILE as well")
    show.add_argument(
        "--measured", metavar="RUN", help="a run's folder or its timeline.json: drawn under the plan, on its scale"
    )
    check.add_argument("--blocking", action="store_true", help="also with blocking sends and receives")
    find.add_argument(
        "--chunks", type=_chunks, default=(1, 2), help="stages per rank to try, comma separated (default 1,2)"
    )
    find.add_argument(
        "--memory",
        type=_limits,
        help="most that a rank holds, or each rank, comma separated: micro-batches, or in the unit of the costs' "
        "activations (default: --ranks micro-batches of the rank's own stages)",
    )
    find.add_argument("--no-split", action="store_true", help="the backward cannot be taken apart into I and W")
    find.add_argument("--objective", choices=OBJECTIVES, default="makespan")
    return parser


# ---- what is asked for -------------------------------------------------------------------------------------------


def _costs(args: argparse.Namespace) -> AnyCosts:
    costs = read_costs(args.costs)
    if args.deferred is None:
        return costs
    if args.deferred > 1.0:
        raise ValueError(f"deferred={args.deferred}: valid are 0 (a queued weight gradient keeps nothing) to 1")
    return replace(costs, deferred=args.deferred)


def _named(name: str, args: argparse.Namespace) -> Schedule:
    """The schedule of that name or file."""
    if name.endswith(".csv"):
        return _from_file(name, args)
    if args.ranks is None or args.microbatches is None:
        raise ValueError(f"{name} needs --ranks and --microbatches")
    _check_size(args)
    if name not in NAMES:
        raise ValueError(f"schedule {name!r} is none of {', '.join(NAMES)}, nor a .csv file")
    return build(name, args.ranks, args.microbatches, args.chunks)


def _check_size(args: argparse.Namespace) -> None:
    """Refuses what would take minutes and all memory before the first word."""
    if args.ranks > 0 and args.microbatches > 0 and args.ranks * args.microbatches > _MOST_CELLS:
        raise ValueError(
            f"--ranks {args.ranks} x --microbatches {args.microbatches}: at most {_MOST_CELLS} are drawn"
        )


def _from_file(name: str, args: argparse.Namespace) -> Schedule:
    """A file says its sizes itself; flags that say others are refused."""
    try:
        schedule = from_csv(name)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: is no CSV file of a schedule: {error}") from error
    for flag, said, has in (
        ("--ranks", args.ranks, schedule.num_ranks),
        ("--microbatches", args.microbatches, schedule.num_microbatches),
    ):
        if said is not None and said != has:
            raise ValueError(f"{flag} {said}: {name} is for {has}")
    return schedule


def _rows(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in lane] for lane in schedule.lanes]


def _write(planned: Schedule, timelines: list[Timeline], args: argparse.Namespace, unit: str) -> None:
    """The files that were asked for."""
    for path, make in (
        (args.svg, lambda: to_svg(*timelines, unit=unit)),
        (args.perfetto, lambda: to_perfetto(*timelines)),
        (args.csv, planned.to_csv),
    ):
        if path:
            Path(path).write_text(make(), encoding="ascii")


def _picture(timelines: list[Timeline]) -> str:
    return table(*timelines, columns=max(40, shutil.get_terminal_size((240, 24)).columns - 10))


# ---- commands ----------------------------------------------------------------------------------------------------


def _show(args: argparse.Namespace) -> None:
    if args.schedule is None and args.measured is None:
        raise ValueError(f"show needs a schedule ({_WHAT}) or --measured RUN")
    if args.measured is None:
        schedule = _named(args.schedule, args)
        timelines = [schedule.simulate(shared(_costs(args), schedule))]
    else:
        ran, measured = read_timeline(args.measured)
        for name, size in (("ranks", ran.num_ranks), ("microbatches", ran.num_microbatches)):
            if getattr(args, name) is None:
                setattr(args, name, size)
        schedule = ran if args.schedule is None else _named(args.schedule, args)
        costs = _costs(args) if args.costs else _measured_prices(ran, measured, schedule)
        plan = schedule.simulate(shared(costs, schedule))
        timelines = [
            replace(plan, name=f"planned {plan.name}"),
            replace(measured, name=f"measured {measured.name}"),
        ]
    _write(schedule, timelines, args, "s" if args.measured else "")
    if args.json:
        _print_json({"lanes": _rows(schedule), "timelines": [line.figures() for line in timelines]})
        return
    print(_picture(timelines))
    if args.measured:
        plan, measured = timelines
        ratio = f"{measured.makespan / plan.makespan:.4f}" if plan.makespan else "none: the plan takes no time"
        print(f"\nmeasured / planned makespan: {ratio}")


def _measured_prices(ran: Schedule, measured: Timeline, schedule: Schedule) -> AnyCosts:
    """The run's own costs, for a plan of the run's stages; ValueError where the plan has other stages."""
    if schedule.num_stages != ran.num_stages:
        raise ValueError(
            f"{schedule.name} has {schedule.num_stages} stages, the run had {ran.num_stages}: its times say nothing "
            "about them; give --costs"
        )
    return measured_costs(ran, measured)


def _check(args: argparse.Namespace) -> None:
    schedule = _named(args.schedule, args)
    report = schedule.check(blocking=args.blocking)
    if args.json:
        _print_json(
            {
                "sound": True,
                "name": schedule.name,
                "ranks": schedule.num_ranks,
                "stages": schedule.num_stages,
                "microbatches": schedule.num_microbatches,
                "stage_to_rank": list(schedule.stage_to_rank),
                "peak_activations": list(report.peak_activations),
                "peak_deferred": list(report.peak_deferred),
            }
        )
        return
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
    """One line per schedule, quickest first; those that the costs cannot price or run say why."""
    costs = _costs(args)
    rows, left_out = [], []
    for name in args.schedules or NAMES:
        own = args if args.schedules or name in ANY_CHUNKS else _without_chunks(args)
        schedule = _named(name, own)
        try:
            prices = shared(costs, schedule)
            line = schedule.simulate(prices)
        except ValueError as error:
            if isinstance(error, ScheduleError) or args.schedules:
                raise
            left_out.append((schedule.name, str(error)))
            continue
        note = "" if can_run(schedule, prices) else "needs a split backward, which the costs say it has not"
        rows.append((line, max(map(float, peak_memory(schedule, prices))), note))
    if not rows:
        raise ValueError(f"the costs fit no schedule; {left_out[0][0]}: {left_out[0][1]}")
    rows.sort(key=lambda row: row[0].makespan)
    if args.json:
        found = [{**line.figures(), "held": most, "note": note} for line, most, note in rows]
        _print_json({"schedules": found, "left_out": [{"name": name, "why": why} for name, why in left_out]})
        return
    titles = ("makespan", "bubble", "in span", "exposed", "activations", "held")
    print(f"{'schedule':<24} " + " ".join(f"{t:>{w}}" for t, w in zip(titles, (10, 8, 8, 8, 12, 10), strict=True)))
    for line, most, note in rows:
        print(
            f"{line.name:<24} {line.makespan:>10.6g} {line.bubble:>8.4f} {line.span_bubble:>8.4f} "
            f"{line.exposed_communication:>8.4f} {line.peak_activations:>12.4g} {most:>10.5g}"
            + (f"  {note}" if note else "")
        )
    for name, why in left_out:
        print(f"{name:<24} left out: {why}")


def _without_chunks(args: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), "chunks": None})


def _search(args: argparse.Namespace) -> None:
    costs = _costs(args)
    _check_size(args)
    found = search(
        args.ranks,
        args.microbatches,
        costs,
        memory_limit=args.memory[0] if args.memory and len(args.memory) == 1 else args.memory,
        split=not args.no_split,
        chunks=args.chunks,
        objective=args.objective,
    )
    prices = shared(costs, found)
    line, most = found.simulate(prices), max(map(float, peak_memory(found, prices)))
    _write(found, [line], args, "")
    if args.json:
        _print_json({**line.figures(), "held": most, "stages": found.num_stages, "lanes": _rows(found)})
        return
    print(_picture([line]))
    in_shares = prices.activation is None
    unit = "micro-batches" if in_shares else "of the costs' unit of memory"
    print(f"held at most {most:g} {unit} on a rank, {found.num_stages} stages")


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps(content, allow_nan=False))


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
        if args.json:
            _print_json({"sound": False, "error": str(error), "rank": error.rank, "action": error.action})
        return 1
    except (ValueError, OSError) as error:
        print(f"plait schedule: {error}", file=sys.stderr)
        return 2
    return 0
