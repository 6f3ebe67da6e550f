"""`plait snapshot`: look at snapshots, compare, copy and thin them out, and bring them from and to other formats.

PATH is a step folder, RUN (its newest valid one) or RUN@STEP; to ls, show, verify, diff and copy, RUN may also be a
tier's URL (s3://bucket/run, file:///data/run). Exit codes: 0 ok or equal, 1 damaged or different,
2 usage, 3 locked by a running job. `--json` prints one JSON object. Long work shows a bar on a terminal.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from plait.ckpt import cli_convert, cli_manage, cli_show
from plait.ckpt.cli_show import DIFFERENT, LOCKED, USAGE
from plait.ckpt.cli_show import check_snapshot as check_snapshot
from plait.ckpt.errors import SnapshotDamaged, SnapshotError, SnapshotLocked, SnapshotSealed

_COMMANDS = {
    "ls": cli_show.list_snapshots,
    "show": cli_show.show,
    "verify": cli_show.verify,
    "diff": cli_show.diff,
    "prune": cli_manage.prune,
    "pin": cli_manage.pin,
    "unpin": cli_manage.unpin,
    "gc": cli_manage.gc,
    "copy": cli_manage.copy,
    "bench": cli_manage.bench,
    "export": cli_convert.export,
    "import": cli_convert.bring,
}


def main(argv: list[str]) -> int:
    """Runs one command; returns its exit code."""
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed help (0) or the usage error (2)
        return stop.code if isinstance(stop.code, int) else USAGE
    try:
        code, report, lines = _COMMANDS[arguments.command](arguments)
    except SnapshotLocked as error:
        return _fail(arguments.json, LOCKED, error)
    except SnapshotSealed as error:
        return _fail(arguments.json, USAGE, SnapshotSealed(f"{error} (--key-file, --key-env)"))
    except SnapshotDamaged as error:
        return _fail(arguments.json, DIFFERENT, error)
    except (SnapshotError, FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError) as error:
        return _fail(arguments.json, USAGE, error)
    except OSError as error:
        return _fail(arguments.json, DIFFERENT, error)
    except (ValueError, ImportError) as error:  # of --key-file, --keep; a driver or library that is not installed
        return _fail(arguments.json, USAGE, error)
    print(json.dumps(report) if arguments.json else "\n".join(lines))
    return code


def _fail(as_json: bool, code: int, error: BaseException) -> int:
    print(json.dumps({"error": str(error)}) if as_json else f"plait snapshot: {error}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON object")
    common.add_argument("--key-file", type=Path, help="the key of signed or encrypted snapshots")
    common.add_argument("--key-env", metavar="NAME", help="the same: the variable of the environment that holds it")
    parser = argparse.ArgumentParser(
        prog="plait snapshot", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, parents=[common], help=text, description=text)

    _add_looking(add)
    _add_managing(add)
    cli_convert.add_commands(add)
    return parser


def _add_looking(add: cli_convert.Add) -> None:
    add("ls", "list the snapshots of a run folder or of a tier (s3://bucket/run)").add_argument("root")
    show = add("show", "tensors, values, who wrote what, files with digests")
    show.add_argument("path")
    show.add_argument("--select", default="*", metavar="PATTERN", help='only names like "model/*"')
    verify = add("verify", "read every byte and compare it with its checksum")
    verify.add_argument("path", help="a run folder or a tier's URL (all its snapshots), or one snapshot")
    verify.add_argument("--step", type=int, help="only this step of a run folder")
    diff = add("diff", "compare two snapshots bit by bit, on full tensors")
    for side in ("a", "b"):
        diff.add_argument(side, help="a step folder, RUN (its newest valid one) or RUN@STEP; RUN may be a URL")
    diff.add_argument("--unsigned", action="store_true", help="the first is not signed: the key is for the second")


def _add_managing(add: cli_convert.Add) -> None:
    add("gc", "remove what dead attempts left behind").add_argument("root", type=cli_convert.local)
    prune = add("prune", "remove older snapshots; never the last good one, a pinned one or one being read")
    prune.add_argument("root", type=cli_convert.local)
    prune.add_argument("--keep", type=int, required=True, metavar="K", help="the newest K stay")
    prune.add_argument("--every", type=int, metavar="N", help="every step that is a multiple of N stays")
    best_help = "the best N (1) by a metric of `save(metrics=)` stay"
    prune.add_argument("--best", metavar="NAME=min|max[:N]", help=best_help)
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")
    add("pin", "keep a snapshot whatever retention says").add_argument("path")
    add("unpin", "let retention have it again").add_argument("path")
    copy = add("copy", "copy a snapshot, verified, to a folder or a URL (s3://bucket/run)")
    copy.add_argument("path")
    copy.add_argument("target")
    copy.add_argument("--compress", action="store_true", help="zstd on byte planes")
    copy.add_argument("--level", type=int, help="of zstd; says --compress")
    copy.add_argument("--encrypt", action="store_true", help="AES-256-GCM with the key of --key-file")
    copy.add_argument(
        "--unsigned",
        action="store_true",
        help="the original is not signed: it is taken as it is, and --encrypt signs its copy",
    )
    copy.add_argument("--retry-s", type=float, default=60.0, help="how long a store is tried again")
    bench = add("bench", "write and read a file as snapshots do; `plait bench run snapshots` measures whole saves")
    bench.add_argument("root", type=cli_convert.local, help="a folder on the disk in question")
    bench.add_argument("--mib", type=int, default=256, help="size of the file")
