"""The sides of `plait bench gate`: source trees whose plait runs in processes of its own, and their times.

Not the gate (gate.py). The one idea: what is compared is never imported here. Times of a case are medians of fresh
processes, one of each side beside the other, in an order drawn anew; a suspect is measured once more before it fails.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from plait.bench.result_file import ResultFile, read
from plait.bench.spec import CaseResult
from plait.bench.verdict import Decision, Paired, Rule, Verdict, confirmed


@dataclass(frozen=True)
class Finding:
    """One line of the outcome. kind: machine code, launches, time; failed: breaks the gate."""

    kind: str
    name: str
    text: str
    failed: bool = False


class Tree:
    """A source tree whose plait runs in processes of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(self, args: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
        """Runs python with this tree's plait, this process's own interpreter and environment otherwise."""
        paths = [str(self.root / "typings"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, "-P", *args]
        return subprocess.run(command, env=environment, cwd=self.root, input=text, capture_output=True, text=True)


def result_of(tree: Tree, args: list[str], folder: Path) -> ResultFile | str:
    """What `plait bench run ARGS` wrote, or why it wrote nothing."""
    done = tree.run(["-m", "plait", "bench", "run", *args, "--json", str(folder)])
    path = folder / f"{args[0]}.json"
    if path.exists():
        found = read(path)
        path.unlink()
        return found
    return f"exit {done.returncode}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}"


class Timed:
    """Times of both sides by fresh processes. `wrong`: cases of head whose result was wrong or impossible."""

    def __init__(
        self, base: Tree, head: Tree, suite: str, processes: int, rounds: int, seed: int, only: str, full: bool
    ) -> None:
        self.trees, self.suite, self.processes, self.rounds = {"base": base, "head": head}, suite, processes, rounds
        self.draw, self.only, self.full = random.Random(seed), only, full
        self.wrong: dict[str, str] = {}
        self.missing: dict[str, str] = {}

    def measure(self, names: list[str]) -> list[Paired]:
        """These cases (all where there is none) in fresh processes; process i of both sides runs side by side."""
        found: dict[str, list[tuple[float, float]]] = {}
        for _ in range(self.processes):
            seed, order = self.draw.getrandbits(31), ["base", "head"]
            self.draw.shuffle(order)
            results = {side: self.cases(self.trees[side], names, seed) for side in order}
            for name in results["head"]:
                times = [self.seconds(side, name, results[side].get(name)) for side in ("base", "head")]
                if all(times):
                    found.setdefault(name, []).append((times[0], times[1]))
        return [
            Paired(name, tuple(head / base for base, head in pairs), median(base for base, _ in pairs))
            for name, pairs in found.items()
            if name not in self.wrong and len(pairs) == self.processes
        ]

    def cases(self, tree: Tree, names: list[str], seed: int) -> dict[str, CaseResult]:
        """What one process (of each named case, one) measured."""
        found: dict[str, CaseResult] = {}
        with tempfile.TemporaryDirectory(prefix="plait-gate-") as folder:
            for only in names or [self.only]:
                args = [self.suite, "--rounds", str(self.rounds), "--seed", str(seed), f"--only={only}"]
                result = result_of(tree, [*args, *(["--full"] if self.full else [])], Path(folder))
                if isinstance(result, str):
                    raise RuntimeError(f"suite {self.suite} in {tree.root}: {result}")
                found |= {n: case for n, case in result.cases.items() if not names or n in names}
        return found

    def seconds(self, side: str, name: str, result: CaseResult | None) -> float:
        """The median of ours, 0 where there is none; notes why."""
        measured = result.providers.get(result.ours) if result and not result.error else None
        if measured is None or not measured.samples_s:
            text = (result.error if result else "") or "not there"
            notes = self.wrong if side == "head" and text.startswith("wrong result") else self.missing
            notes[name] = f"{side}: {text.splitlines()[0]}"
            return 0.0
        if measured.invalid:
            self.wrong[name] = f"{side}: {measured.invalid}"
            return 0.0
        return median(measured.samples_s)

    def findings(self, rule: Rule) -> tuple[list[Finding], set[Verdict]]:
        """The verdicts after the confirming run, and which of them there are."""
        first = self.measure([])
        runs = iter([first])  # the first run is there; a second one measures the suspects
        names = [case.name for case in first]
        try:
            decisions = (
                confirmed(lambda asked: next(runs, None) or self.measure(asked), names, rule)[1] if names else []
            )
        except ValueError as error:  # a suspect gave no numbers the second time
            raise RuntimeError(f"suite {self.suite}: {error}; {self.wrong | self.missing}") from error
        found = [Finding("time", d.name, said(d), d.verdict == Verdict.SLOWER) for d in decisions]
        found += [Finding("time", name, f"INVALID: {text}", failed=True) for name, text in self.wrong.items()]
        found += [
            Finding("time", name, f"no numbers, {text}", failed=text.startswith("head: "))
            for name, text in self.missing.items()
            if name not in self.wrong
        ]
        verdicts = {d.verdict for d in decisions} | ({Verdict.INVALID} if self.wrong else set())
        return found, verdicts


def said(decision: Decision) -> str:
    """A verdict in words."""
    text = f"{decision.verdict}: head / base {decision.ratio:.3f}, {decision.processes} processes"
    return f"{text}; {decision.reason}" if decision.reason else text
