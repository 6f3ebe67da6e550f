"""`plait kernels`: what the compiler makes of the kernels, and whether that keeps the rules. No GPU needed."""

import argparse
import sys

from plait.kernels.gate import ARCHS, Verdict, check, default_points, narrow_accesses, resident_warps
from plait.kernels.inspect import Facts, compile_offline, parse_arch
from plait.kernels.points import points


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="plait kernels", description="What the compiler makes of plait's kernels.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the names that check and explain know")
    explain = commands.add_parser("explain", help="registers, spills, shared memory, instruction mix of one kernel")
    explain.add_argument("name", help="a name from `plait kernels list`")
    explain.add_argument("--arch", default="sm_90", help="sm_80, sm_90 or sm_100 (default sm_90)")
    gate = commands.add_parser("check", help="the static rules: exit 0 kept, 1 broken, 2 usage")
    gate.add_argument("names", nargs="*", help="points or their prefixes (default: the declared list)")
    gate.add_argument("--arch", action="append", help=f"may be repeated (default: {', '.join(ARCHS)})")
    gate.add_argument("--all", action="store_true", help="every point and the whole attention table")
    return parser


def describe(facts: Facts, num_opcodes: int = 16) -> str:
    """`facts` as lines for a person: resources, then the most frequent opcodes."""
    lines = [
        f"{facts.name} for {facts.arch}",
        f"  registers {facts.registers}  warps {facts.num_warps}  shared {facts.shared_bytes} bytes",
        f"  stack {facts.stack_bytes} bytes  spill loads {facts.spill_loads}  spill stores {facts.spill_stores}",
        f"  instructions {sum(facts.instructions.values())}",
    ]
    frequent = sorted(facts.instructions.items(), key=lambda item: (-item[1], item[0]))[:num_opcodes]
    return "\n".join(lines + [f"    {number:6d} {opcode}" for opcode, number in frequent])


def row(verdict: Verdict) -> str:
    """A verdict as one line."""
    facts = verdict.facts
    return (
        f"{verdict.name:40s} {facts.arch:7s} {facts.registers:4d} registers {resident_warps(facts):3d} warps "
        f"{facts.shared_bytes:7d} shared {narrow_accesses(facts):4d} narrow  {'; '.join(verdict.broken) or 'ok'}"
    )


def _check(names: list[str], archs: list[str] | None, every: bool) -> int:
    known = list(points(every))
    unknown = [name for name in names if not any(point.startswith(name) for point in known)]
    if unknown:
        print(f"plait kernels: no kernel {unknown[0]!r}; `plait kernels list` has the names", file=sys.stderr)
        return 2
    if names:
        chosen = [(p, a) for p in known if p.startswith(tuple(names)) for a in archs or ARCHS]
    elif every:
        chosen = [(point, arch) for point in known for arch in archs or ARCHS]
    else:
        chosen = [(point, arch) for point, arch in default_points() if archs is None or arch in archs]
    num_broken = 0
    for verdict in check(chosen):
        print(row(verdict), flush=True)
        num_broken += bool(verdict.broken)
    print(f"{len(chosen)} points checked, {num_broken} break a rule")
    return 1 if num_broken else 0


def main(argv: list[str]) -> int:
    """0 on success, 1 when a rule is broken, 2 on a name or architecture that does not exist."""
    arguments = _parser().parse_args(argv)
    known = points(every=True)
    if arguments.command == "list":
        print("\n".join(known))
        return 0
    archs = [arguments.arch] if arguments.command == "explain" else arguments.arch
    try:
        archs = archs and [f"sm_{parse_arch(arch)}" for arch in archs]
    except ValueError as error:
        print(f"plait kernels: {error}", file=sys.stderr)
        return 2
    if arguments.command == "check":
        return _check(arguments.names, archs, arguments.all)
    if arguments.name not in known:
        print(f"plait kernels: no kernel {arguments.name!r}; `plait kernels list` has the names", file=sys.stderr)
        return 2
    print(describe(compile_offline(known[arguments.name](archs[0]), archs[0])))
    return 0
