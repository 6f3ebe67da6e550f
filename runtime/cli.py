"""The `plait` command: finds the sub-command's `main` in one table and calls it. Nothing else happens here.

The table is the one place where a folder's command line is named from outside: each folder owns its own
sub-commands, imported only when called, so that `plait snapshot ls` never loads a kernel.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys

# command -> (module with `main(argv) -> exit code`, one line of help)
COMMANDS = {
    "train": ("plait.train_cli", "train a language model on a dp x pp x tp grid"),
    "doctor": ("plait.doctor", "say what this machine has and what plait will use"),
    "snapshot": ("plait.ckpt.cli", "list, verify, compare, prune, copy, export and import snapshots"),
    "schedule": ("plait.parallel.cli", "show, check, compare and search pipeline schedules"),
    "kernels": ("plait.kernels.cli", "compile kernels offline, check their machine code, tune their tiles"),
    "bench": ("plait.bench.cli", "run benchmarks beside their best peers"),
}


def usage() -> str:
    """Returns the help text: one line a command."""
    rows = [f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items()]
    return "usage: plait COMMAND [ARG ...]\n\n" + "\n".join(rows) + "\n\n`plait COMMAND --help` says more."


def main(argv: list[str]) -> int:
    """Runs one sub-command; returns its exit code, 2 for an unknown one."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"plait: unknown command {argv[0]!r}; valid: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module = importlib.import_module(COMMANDS[argv[0]][0])
    return int(module.main(argv[1:]))


def entry() -> None:
    """Console script: `plait`. Ctrl-C and a reader that left (`plait ... | head`) end it without a traceback."""
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except BrokenPipeError:
        _silence()
        status = 128 + signal.SIGPIPE
    except OSError as error:  # a full disk under the output, a file that a command did not expect to miss
        print(f"plait: {error}", file=sys.stderr)
        _silence()
        status = 1
    sys.exit(status)


def _silence() -> None:
    """Sends what Python flushes at its end nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":  # torchrun -m plait.cli
    entry()
