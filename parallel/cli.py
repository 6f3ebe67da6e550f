"""`plait schedule`: shows a pipeline schedule in time, or proves that it can run. No devices, no processes."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from plait.parallel.schedules import NAMES, Schedule, ScheduleError, build, from_csv
from plait.parallel.schedules.draw import table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="plait schedule", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("show", "draw the schedule in time"), ("check", "prove that the schedule can run")):
        command = commands.add_parser(name, help=text)
        command.add_argument(
            "schedule", help=f"{', '.join(NAMES)}, or a CSV file as torch.distributed.pipelining has it"
        )
        command.add_argument("--ranks", type=int, help="ranks of the pipeline axis")
        command.add_argument("--microbatches", type=int)
        command.add_argument("--chunks", type=int, help="stages per rank, for interleaved and looped_bfs (default 2)")
        if name == "check":
            command.add_argument("--blocking", action="store_true", help="also with blocking sends and receives")
        else:
            for kind in ("svg", "perfetto", "csv"):
                command.add_argument(f"--{kind}", metavar="FILE", help=f"write {kind} to FILE as well")
    return parser


def _schedule(args: argparse.Namespace) -> Schedule:
    """The schedule that the arguments name."""
    if args.schedule.endswith(".csv"):
        return from_csv(args.schedule)
    if args.ranks is None or args.microbatches is None:
        raise ValueError(f"{args.schedule} needs --ranks and --microbatches")
    if args.schedule not in NAMES:
        raise ValueError(f"schedule {args.schedule!r} is none of {', '.join(NAMES)}, nor a .csv file")
    return build(args.schedule, args.ranks, args.microbatches, args.chunks)


def _show(schedule: Schedule, args: argparse.Namespace) -> None:
    timeline = schedule.simulate()
    print(table(timeline, columns=max(40, shutil.get_terminal_size((240, 24)).columns - 10)))
    for path, text in (
        (args.svg, timeline.to_svg),
        (args.perfetto, timeline.to_perfetto),
        (args.csv, schedule.to_csv),
    ):
        if path:
            Path(path).write_text(text(), encoding="ascii")


def _check(schedule: Schedule, *, blocking: bool) -> None:
    report = schedule.check(blocking=blocking)
    how = "also with blocking sends and receives" if blocking else "with asynchronous sends"
    print(
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} micro-batches: sound, {how}"
    )
    for rank, (alive, queued) in enumerate(zip(report.peak_activations, report.peak_deferred, strict=True)):
        stages = ",".join(map(str, schedule.stages_of(rank)))
        print(
            f"rank {rank}: stages {stages}; peak of live activations {alive}, of deferred weight gradients {queued}"
        )


def main(argv: list[str]) -> int:
    """Returns 0, 1 for a schedule that cannot run, 2 for wrong usage."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed help (0) or the error (2)
        return int(stop.code or 0)
    try:
        schedule = _schedule(args)
        _show(schedule, args) if args.command == "show" else _check(schedule, blocking=args.blocking)
    except ScheduleError as error:
        print(error, file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"plait schedule: {error}", file=sys.stderr)
        return 2
    return 0
