"""`plait kernels`: lists the compiled points and explains one. Compiles offline; no GPU needed."""

import argparse
import sys

from plait.kernels.inspect import Facts, compile_offline, parse_arch
from plait.kernels.points import points


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="plait kernels", description="What the compiler makes of plait's kernels.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the names that explain knows")
    explain = commands.add_parser("explain", help="registers, spills, shared memory, instruction mix of one kernel")
    explain.add_argument("name", help="a name from `plait kernels list`")
    explain.add_argument("--arch", default="sm_90", help="sm_80, sm_90 or sm_100 (default sm_90)")
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


def main(argv: list[str]) -> int:
    """0 on success, 2 on a name or architecture that does not exist."""
    arguments = _parser().parse_args(argv)
    known = points()
    if arguments.command == "list":
        print("\n".join(known))
        return 0
    try:
        parse_arch(arguments.arch)
    except ValueError as error:
        print(f"plait kernels: {error}", file=sys.stderr)
        return 2
    if arguments.name not in known:
        print(f"plait kernels: no kernel {arguments.name!r}; `plait kernels list` has the names", file=sys.stderr)
        return 2
    print(describe(compile_offline(known[arguments.name](), arguments.arch)))
    return 0
