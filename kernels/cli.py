"""`plait kernels`: what the compiler makes of the kernels, whether that keeps the rules, the cache, the tile tables.

Only `tune` needs a GPU.
"""

import argparse
import collections
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from plait.kernels import pinned, tune_card
from plait.kernels.gate import (
    AMD,
    ARCHS,
    LIMITS,
    Verdict,
    amd_points,
    check,
    default_points,
    launch_of,
    narrow_accesses,
    resident_blocks,
    resident_warps,
    wide_share,
)
from plait.kernels.inspect import Facts, compile_offline, parse_arch
from plait.kernels.measured import path_of
from plait.kernels.points import points
from plait.kernels.tune import Tools, text, tune_into
from plait.kernels.tune_cases import cases
from plait.kernels.warm import Warmed, chosen, warm


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="plait kernels", description="What the compiler makes of plait's kernels.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the names that check and explain know")
    explain = commands.add_parser("explain", help="registers, spills, shared memory, instruction mix of one kernel")
    explain.add_argument("name", help="a name from `plait kernels list`")
    explain.add_argument("--arch", default="sm_90", help="sm_80, sm_90, sm_100 or gfx942 (default sm_90)")
    gate = commands.add_parser("check", help="the static rules: exit 0 kept, 1 broken, 2 usage")
    gate.add_argument("names", nargs="*", help="points or their prefixes (default: the declared list)")
    gate.add_argument("--arch", action="append", help=f"may be repeated (default: {', '.join(ARCHS)})")
    gate.add_argument("--all", action="store_true", help="every point and the whole attention table")
    wrote = commands.add_parser("pin", help="write the facts of the declared points down: what check holds them to")
    differs = commands.add_parser("diff", help="which kernels' machine code or facts changed: exit 1 if one is worse")
    differs.add_argument(
        "--base", default="", help="a file of pinned rows or a git ref (default: the committed file)"
    )
    for command in (wrote, differs):
        command.add_argument("names", nargs="*", help="points or their prefixes (default: the declared list)")
        command.add_argument("--arch", action="append", help=f"may be repeated (default: {', '.join(ARCHS)})")
        command.add_argument("--all", action="store_true", help="every point and the whole attention table")
    wrote.add_argument("--out", type=Path, default=pinned.PATH, help="the file (default: kernels/pinned.json)")
    wrote.add_argument("--reason", default="", help="why a row that is worse is pinned all the same; kept in the row")
    for command in (gate, differs):
        command.add_argument("--json", type=Path, metavar="FILE", help="write the outcome as JSON")
    filled = commands.add_parser("warm", help="compile the declared launches into triton's cache: no GPU needed")
    filled.add_argument("names", nargs="*", help="points or their prefixes (default: all but attention's long table)")
    filled.add_argument("--arch", action="append", help=f"may be repeated (default: {', '.join(ARCHS)})")
    filled.add_argument("--all", action="store_true", help="the whole attention table too")
    tuned = commands.add_parser("tune", help="time candidate tiles on this card and keep the winners: needs a GPU")
    tuned.add_argument("names", nargs="*", help="cases or their prefixes (default: all; --dry-run lists them)")
    tuned.add_argument("--out", type=Path, help="the file of rows (default: kernels/tuned/sm_NN.json of this card)")
    tuned.add_argument("--budget-s", type=float, default=3600.0, help="no case begins after this (default 3600)")
    tuned.add_argument("--dry-run", action="store_true", help="list cases, rows in use and candidates; needs no GPU")
    return parser


def describe(facts: Facts, num_opcodes: int = 16) -> str:
    """`facts` as lines for a person: resources, then the most frequent opcodes and how many are in the hot loop."""
    lines = [
        f"{facts.name} for {facts.arch}",
        f"  registers {facts.registers}  warps {facts.num_warps}  shared {facts.shared_bytes} bytes",
        f"  stack {facts.stack_bytes} bytes  spill loads {facts.spill_loads}  spill stores {facts.spill_stores}",
        "  blocks {} on a multiprocessor, limited by {}".format(*resident_blocks(facts)),
        f"  bytes in 128-bit accesses {wide_share(facts):.1%}",
        f"  instructions {sum(facts.instructions.values())}, hot loop {sum(facts.loop.values())}",
        *(f"  spills at {place}: {number}" for place, number in sorted(facts.spill_lines.items())),
    ]
    frequent = sorted(facts.instructions.items(), key=lambda item: (-item[1], item[0]))[:num_opcodes]
    return "\n".join(
        lines + [f"    {number:6d} {facts.loop.get(opcode, 0):6d} {opcode}" for opcode, number in frequent]
    )


def row(verdict: Verdict) -> str:
    """A verdict as one line."""
    facts = verdict.facts
    return (
        f"{verdict.name:40s} {facts.arch:7s} {facts.registers:4d} registers {resident_warps(facts):3d} warps "
        f"{facts.shared_bytes:7d} shared {narrow_accesses(facts):4d} narrow  {'; '.join(verdict.broken) or 'ok'}"
    )


def _has_all(names: list[str], known: list[str], what: str, listed_by: str) -> bool:
    """Whether each name begins one of `known`; says which does not, and where names are listed."""
    unknown = [name for name in names if not any(point.startswith(name) for point in known)]
    if unknown:
        print(f"plait kernels: no {what} {unknown[0]!r}; `plait kernels {listed_by}` has the names", file=sys.stderr)
    return not unknown


def _chosen(names: list[str], archs: list[str] | None, every: bool) -> list[tuple[str, str]]:
    """(point, architecture) that a command line means: by name, every one, or the declared list; of gfx942, asked for
    by `--arch` or `--all`, the declared kernels."""
    known = list(points(every or bool(names)))
    if names:
        return [(p, a) for p in known if p.startswith(tuple(names)) for a in archs or ARCHS]
    if every:
        on_amd = amd_points() if archs is None or AMD in archs else []
        return [(point, arch) for point in known for arch in archs or ARCHS if arch != AMD] + on_amd
    if archs == [AMD]:
        return amd_points()
    return [(point, arch) for point, arch in default_points() if archs is None or arch in archs]


def _check(chosen: list[tuple[str, str]], out: Path | None) -> int:
    tool = pinned.toolchain()
    rows = pinned.Pins.read(pinned.PATH).data.get(tool, {})
    if not rows:
        print(f"NEW: {tool} has no pinned rows, so nothing is held to them; `plait kernels pin` writes them")
    num_broken, outcome = 0, []
    for verdict in check(chosen):
        key = pinned.key_of(verdict.name, verdict.facts.arch)
        change = pinned.compare(key, rows.get(key), pinned.measure(verdict.name, verdict.facts.arch, verdict.facts))
        broken = [*verdict.broken, *([f"worse than pinned: {'; '.join(change.said)}"] * (change.status == "worse"))]
        status = "FAIL" if broken else "NEW" if change.status == "NEW" else "ok"
        print(
            f"{row(verdict._replace(broken=broken))}{'' if broken or status == 'ok' else ', ' + status}", flush=True
        )
        num_broken += bool(broken)
        outcome.append({"key": key, "status": status, "broken": broken, "row": change.row and change.row._asdict()})
    print(f"{len(chosen)} points checked, {num_broken} break a rule")
    if out is not None:
        out.write_text(json.dumps({"toolchain": tool, "points": outcome}, indent=1) + "\n")
    return 1 if num_broken else 0


def _changes(changes: Iterable[pinned.Change]) -> Iterator[pinned.Change]:
    """Prints each change as it comes, and how many there were of each kind."""
    counts: collections.Counter[str] = collections.Counter()
    for change in changes:
        counts[change.status] += 1
        if change.status != "same":
            print(f"{change.key:48s} {change.status:7s} {'; '.join(change.said) or 'machine code'}", flush=True)
        yield change
    print(", ".join(f"{number} {status}" for status, number in sorted(counts.items())) or "no points")


def _pin(chosen: list[tuple[str, str]], path: Path, reason: str) -> int:
    tool, pins = pinned.toolchain(), pinned.Pins.read(path)
    changes = list(_changes(pinned.diff(pins.data.get(tool, {}), chosen)))
    written = pinned.pin(pins, tool, changes, reason)
    if written:
        pins.write(path)
    print(f"{len(written)} rows written to {path} ({tool})")
    return 0


def _diff(chosen: list[tuple[str, str]], base: str, out: Path | None) -> int:
    tool = pinned.toolchain()
    path = Path(base) if base else pinned.PATH
    pins = pinned.Pins.read(path) if not base or path.is_file() else pinned.from_git(base)
    if tool not in pins.data:
        print(f"NEW: the base has no rows of {tool}; it has {'; '.join(pins.data) or 'none'}")
    changes = list(_changes(pinned.diff(pins.data.get(tool, {}), chosen)))
    if out is not None:
        data = [{**change._asdict(), "row": change.row and change.row._asdict()} for change in changes]
        out.write_text(json.dumps({"toolchain": tool, "changes": data}, indent=1) + "\n")
    return 1 if any(change.status == "worse" for change in changes) else 0


def told(done: Warmed, number: int, total: int) -> str:
    """A warmed launch as one line."""
    how = f"failed: {done.error}" if done.error else "compiled" if done.compiled else "was there"
    return f"[{number:3d}/{total}] {done.name:40s} {done.arch:7s} {done.seconds:6.2f} s  {how}"


def _warm(names: list[str], archs: list[str], every: bool) -> int:
    if not _has_all(names, list(points(every)), "kernel", "list"):
        return 2
    todo = chosen(names, archs, every)
    start, finished = time.perf_counter(), []
    for done in warm(todo):
        finished.append(done)
        print(told(done, len(finished), len(todo)), flush=True)
    num_compiled = sum(done.compiled and not done.error for done in finished)
    num_failed = sum(bool(done.error) for done in finished)
    print(
        f"{len(todo)} launches in {time.perf_counter() - start:.2f} s: {num_compiled} compiled, {num_failed} failed"
    )
    return 1 if num_failed else 0


def _tune(names: list[str], out: Path | None, budget_s: float, dry_run: bool) -> int:
    if not _has_all(names, [case.name for case in cases()], "case", "tune --dry-run"):
        return 2
    wanted = cases(names)
    if dry_run:
        for case in wanted:
            for arch in (80, 90, 100):
                num_tiles = len(set(case.candidates(arch)))
                print(f"{case.name:32s} sm_{arch:<3d} {num_tiles:3d} candidates, in use {text(case.present(arch))}")
        return 0
    try:
        card = tune_card.this_card()
    except RuntimeError as error:
        print(f"plait kernels tune: {error}: it times kernels on a card; --dry-run needs none", file=sys.stderr)
        return 2
    if out is None and card.capability != card.arch:
        print(
            f"plait kernels tune: {card.name} (sm_{card.capability}) takes the rows of sm_{card.arch}, which other"
            " cards take as well; give --out FILE",
            file=sys.stderr,
        )
        return 2
    path = out or path_of(card.arch)
    tools = Tools(
        compile_offline, tune_card.event_timer(card.device), time.monotonic, lambda line: print(line, flush=True)
    )
    try:
        num_rows = tune_into(path, wanted, card, tools, budget_s)
    except KeyboardInterrupt:
        print(f"stopped; the rows won so far are in {path}", file=sys.stderr)
        return 130
    except (RuntimeError, ValueError) as error:
        print(f"plait kernels tune: {error}", file=sys.stderr)
        return 1
    print(f"{num_rows} rows won, in {path}")
    return 0


def main(argv: list[str]) -> int:
    """0 on success, 1 when a rule is broken or a kernel fails, 2 on what does not exist, a card for one, and on what
    cannot be read or written, such as the cache of compiled kernels."""
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except BrokenPipeError:  # the reader of stdout left: the command line's own matter
        raise
    except (pinned.PinError, OSError) as error:
        print(f"plait kernels {arguments.command}: {error}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "tune":
        return _tune(arguments.names, arguments.out, arguments.budget_s, arguments.dry_run)
    known = points(every=True)
    if arguments.command == "list":
        print("\n".join(known))
        return 0
    archs = [arguments.arch] if arguments.command == "explain" else arguments.arch
    try:
        archs = archs and [arch if arch == AMD else f"sm_{parse_arch(arch)}" for arch in archs]
        if arguments.command != "warm" and (unknown := [arch for arch in archs or () if arch not in LIMITS]):
            raise ValueError(f"arch: no limits of {unknown[0]!r} are known; valid: {', '.join(LIMITS)}")
    except ValueError as error:
        print(f"plait kernels: {error}", file=sys.stderr)
        return 2
    if arguments.command in ("check", "pin", "diff"):
        if not _has_all(
            arguments.names, list(points(arguments.command != "check" or arguments.all)), "kernel", "list"
        ):
            return 2
        wanted = _chosen(arguments.names, archs, arguments.all)
        if arguments.command == "check":
            return _check(wanted, arguments.json)
        if arguments.command == "pin":
            return _pin(wanted, arguments.out, arguments.reason)
        return _diff(wanted, arguments.base, arguments.json)
    if arguments.command == "warm":
        return _warm(arguments.names, archs or list(ARCHS), arguments.all)
    if arguments.name not in known:
        print(f"plait kernels: no kernel {arguments.name!r}; `plait kernels list` has the names", file=sys.stderr)
        return 2
    print(describe(compile_offline(launch_of(arguments.name, archs[0], known), archs[0])))
    return 0
