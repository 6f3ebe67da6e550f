"""`plait bench gate --base REF`: this tree beside a git ref: machine code, launches, and times where a GPU is.

Not the rules without a baseline (kernels/gate.py). The one idea: both sides are measured by the same ruler in one
job. The base is unpacked beside head and gets head's own tools to read machine code with; its suites are its own.
Without a GPU nothing is timed: machine code and the launches of every op decide.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from plait.bench import report, suite_launch
from plait.bench.compare import IMPOSSIBLE, INCONCLUSIVE, OK, REGRESSION
from plait.bench.ending import scratch_folder
from plait.bench.gate_sides import Finding, Timed, Tree, result_of
from plait.bench.spec import CaseResult
from plait.bench.verdict import Rule, Verdict
from plait.kernels import pinned
from plait.kernels.gate import default_points

ROOT = Path(__file__).resolve().parent.parent
TOOLS = (
    "inspect.py", "gate.py", "pinned.py", "pinned_amd.py", "pinned_code.py", "pinned_ir.py", "pinned_work.py",
    "pinned.json", "roof.py",
)  # fmt: skip
# Run in the base's tree: prints the row of every point on stdin that it has, one a line.
ROWS = """
import json, sys
from plait.kernels import pinned
from plait.kernels.points import points
known = points(every=True)
for name, arch in json.load(sys.stdin):
    if name in known:
        print(json.dumps([pinned.key_of(name, arch), pinned.measure(name, arch)._asdict()]), flush=True)
"""


@contextmanager
def unpacked(ref: str) -> Iterator[Tree]:
    """The tree of a git ref in a temporary folder, with head's tools; ValueError where git does not know the ref."""
    git = ["git", "-C", str(ROOT)]
    named = subprocess.run(
        [*git, "rev-parse", "--verify", "--end-of-options", f"{ref}^{{commit}}"], capture_output=True
    )
    if named.returncode:
        raise ValueError(f"--base: {ref!r} is no commit of {ROOT}: {named.stderr.decode().strip()}")
    done = subprocess.run([*git, "archive", named.stdout.decode().strip()], capture_output=True, check=True)
    with scratch_folder("plait-gate-") as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
            tar.extractall(folder, filter="tar")
        for name in TOOLS:
            shutil.copyfile(ROOT / "kernels" / name, Path(folder) / "kernels" / name)
        yield Tree(Path(folder))


def static(base: Tree, only: str) -> list[Finding]:
    """Every declared point of head beside the base's; RuntimeError where the base cannot be compiled at all."""
    chosen = [(name, arch) for name, arch in default_points() if only in name]
    done = base.run(["-c", ROWS], json.dumps(chosen))
    if done.returncode:
        raise RuntimeError(f"the base's kernels: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    rows = {key: pinned.Row(**row) for key, row in map(json.loads, done.stdout.splitlines())}
    accepted = pinned.Pins.read(pinned.PATH).data.get(pinned.toolchain(), {})
    return [code_finding(change, accepted.get(change.key)) for change in pinned.diff(rows, chosen)]


def code_finding(change: pinned.Change, accepted: pinned.Row | None) -> Finding:
    """What a change of machine code means: a worse row fails, unless head pins it with a reason."""
    said = "; ".join(change.said) or {"code": "other instructions, equal facts"}.get(change.status, "")
    excused = change.status == "worse" and accepted is not None and accepted.reason
    if excused and accepted is not None and change.row == accepted._replace(reason=""):
        return Finding("machine code", change.key, f"accepted: {said} ({accepted.reason})")
    return Finding("machine code", change.key, f"{change.status}: {said}".rstrip(": "), change.status == "worse")


def launches(base: Tree, head: Tree, only: str) -> list[Finding]:
    """The number of kernels that each op launches, forward and with backward: more of them fails."""
    if not any(only in case.name for case in suite_launch.cases(False)):
        return []
    with scratch_folder("plait-gate-") as folder:
        args = ["launch", "--rounds", "1", f"--only={only}"]
        sides = [result_of(tree, args, Path(folder)) for tree in (base, head)]
    if isinstance(sides[1], str):
        return [Finding("launches", "all", f"head cannot be counted: {sides[1]}", failed=True)]
    if isinstance(sides[0], str):
        return [Finding("launches", "all", f"NEW: the base cannot be counted: {sides[0]}")]
    counts = [{name: count_of(result) for name, result in side.cases.items()} for side in sides]  # type: ignore[union-attr]
    found = []
    for name, now in counts[1].items():
        before = counts[0].get(name)
        if now is None:
            found.append(Finding("launches", name, f"head: {sides[1].cases[name].error}", failed=before is not None))
        elif before is None:
            found.append(Finding("launches", name, f"NEW: {now:.0f}"))
        elif now != before:
            found.append(Finding("launches", name, f"{before:.0f} -> {now:.0f}", failed=now > before))
    return found or [Finding("launches", f"{len(counts[1])} cases", "same")]


def count_of(result: CaseResult) -> float | None:
    """The launches of ours, None where they were not counted."""
    return result.providers[result.ours].figures.get("launches") if result.ours in result.providers else None


def exit_code(found: list[Finding], verdicts: set[Verdict], strict: bool) -> int:
    """A wrong result outweighs a regression, which outweighs an open question."""
    if Verdict.INVALID in verdicts:
        return IMPOSSIBLE
    if any(one.failed for one in found):
        return REGRESSION
    return INCONCLUSIVE if strict and Verdict.INCONCLUSIVE in verdicts else OK


HEADER = ["what", "name", "base -> head", "gate"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Adds the command; the rule's and the files' options are the caller's."""
    gate = commands.add_parser("gate", help="this tree beside a git ref: exit 1 for a regression")
    gate.add_argument("--base", required=True, metavar="REF", help="the git ref to compare with, such as origin/main")
    gate.add_argument(
        "--only", default="", metavar="TEXT", help="only kernels, ops and cases whose name contains TEXT"
    )
    gate.add_argument(
        "--suite",
        action="append",
        metavar="SUITE",
        help="time this suite (default: kernels where a GPU is, else none)",
    )
    gate.add_argument("--full", action="store_true", help="every case of it")
    gate.add_argument("--processes", type=int, default=7, help="fresh processes of each side (default 7)")
    gate.add_argument("--rounds", type=int, default=20, help="in each process (default 20)")
    gate.add_argument("--seed", type=int, default=0, help="of orders and inputs (default 0)")
    gate.add_argument("--strict", action="store_true", help="exit 3 where a case is INCONCLUSIVE")
    return gate


def findings(args: argparse.Namespace, rule: Rule) -> tuple[list[Finding], set[Verdict]]:
    """Everything that the gate found, in the order in which it looked."""
    cuda = torch.cuda.is_available()
    with unpacked(args.base) as base:
        head = Tree(ROOT)
        found = static(base, args.only)
        if not cuda:
            found += launches(base, head, args.only)
        verdicts: set[Verdict] = set()
        for suite in args.suite or (["kernels"] if cuda else []):
            print(f"[timing suite {suite}]", file=sys.stderr, flush=True)
            timed = Timed(base, head, suite, args.processes, args.rounds, args.seed, args.only, args.full)
            more, those = timed.findings(rule)
            found, verdicts = found + more, verdicts | those
    return found, verdicts


def outcome(args: argparse.Namespace, rule: Rule) -> tuple[int, list[str], list[list[str]], dict[str, Any]]:
    """(exit code, text, rows under HEADER, plain data) of a gate."""
    found, verdicts = findings(args, rule)
    quiet = [one for one in found if one.text == "same"]
    rows = [[f.kind, f.name, f.text, "FAIL" if f.failed else "ok"] for f in found if f not in quiet]
    code = exit_code(found, verdicts, args.strict)
    text = (
        [f"this tree beside {args.base}", report.table(HEADER, rows)] if rows else [f"this tree beside {args.base}"]
    )
    text.append(f"{len(found)} looked at, {len(quiet)} the same, {sum(f.failed for f in found)} fail")
    return code, text, rows, {"base": args.base, "exit": code, "findings": [dataclasses.asdict(f) for f in found]}
