"""The command line of `plait bench`: its commands and options, defaults by pyproject.toml. Runs nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

from plait.bench import cli_views, gate, settings
from plait.bench.timer import POLICIES
from plait.bench.verdict import Rule

# suite -> module that holds its SUITE; imported only when it runs
SUITES = {
    "train": "plait.bench.suite_train",
    "kernels": "plait.bench.suite_kernels",
    "snapshots": "plait.bench.suite_snapshots",
    "pipeline": "plait.bench.suite_pipeline",
    "static": "plait.bench.suite_static",
    "launch": "plait.bench.suite_launch",
    "collectives": "plait.bench.suite_collectives",
    "ceilings": "plait.bench.suite_ceilings",
}
ABOUT = "runs suites, compares their result files, and says how far the tool itself can be believed"
ASKED = "beside ours, as `plait bench list` names them (default: all; plait: ours alone)"


def parser(chosen: settings.Settings | None = None) -> argparse.ArgumentParser:
    """Returns the command line of `plait bench`; its defaults are pyproject.toml's where that has some."""
    chosen = chosen or settings.Settings()
    floor_us = Rule.floor_s * 1e6 if chosen.floor is None else chosen.floor
    top = argparse.ArgumentParser(prog="plait bench", description=ABOUT)
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name the suites, their cases and who is measured beside ours")
    run = commands.add_parser("run", help="run suites; all of them when none is named")
    run.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    train = commands.add_parser("train", help="the main job beside torch's own stack (as `run train --full`)")
    ceilings = commands.add_parser("ceilings", help="what this machine reaches at best (as `run ceilings --full`)")
    for command in (run, train, ceilings):
        command.add_argument("--full", action="store_true", help="every case, not only the small default one")
        command.add_argument("--rounds", type=int, help="counted rounds per case (default: the suite's)")
        command.add_argument(
            "--processes", type=int, default=1, help="fresh processes; a verdict needs 5 (default 1)"
        )
        command.add_argument("--seed", type=int, default=0, help="of inputs and orders (default 0)")
        command.add_argument(
            "--budget", type=float, default=chosen.budget, metavar="SECONDS", help="for all cases of a suite together"
        )
        command.add_argument("--providers", default=",".join(chosen.providers or ()), metavar="NAME,...", help=ASKED)
        command.add_argument(
            "--cache",
            choices=POLICIES,
            help="L2 policy, where a suite has a choice: kernels (default: cold-rotate on a card, else hot)",
        )
        command.add_argument(
            "--ceilings",
            type=Path,
            metavar="FILE",
            help="above 102 %% of these a number is INVALID (default: this run's, else those in DIR of --json)",
        )
        command.add_argument("--junit", type=Path, metavar="FILE", help="write the outcome of all suites as JUnit")
        command.add_argument("--tutorials", default="", metavar="DIR", help="triton's, for the suite `static`")
        command.add_argument("--only", default="", metavar="TEXT", help="only the cases whose name contains TEXT")
        for kind in ("json", "csv", "md"):
            command.add_argument(f"--{kind}", type=Path, metavar="DIR", help=f"write DIR/SUITE.{kind}")
    compare = commands.add_parser("compare", help="ratios and verdicts of two result files, or pytest-benchmark's")
    compare.add_argument("base", type=Path, metavar="BASE")
    compare.add_argument("head", type=Path, metavar="HEAD")
    compare.add_argument(
        "--confirm", type=Path, nargs=2, metavar=("BASE2", "HEAD2"), help="a second, later run of both"
    )
    compare.add_argument("--relative", action="store_true", help="compare through a provider measured in both")
    compare.add_argument("--reference", default="", metavar="PROVIDER", help="the provider to compare through")
    compare.add_argument("--strict", action="store_true", help="exit 3 where a case is INCONCLUSIVE")
    gating = gate.add_parser(commands)
    itself = commands.add_parser("aa", help="a thing against itself: how often a verdict is false")
    itself.add_argument(
        "--device", choices=("fake", "cpu", "cuda"), default="cpu", help="fake: simulated noise models"
    )
    itself.add_argument("--suites", type=int, default=None, help="simulated suites a noise model (default 50)")
    itself.add_argument("--cases", type=int, default=10, help="in a suite (default 10)")
    itself.add_argument("--processes", type=int, default=5, help="fresh processes a run (default 5)")
    itself.add_argument("--rounds", type=int, default=20, help="in each process (default 20)")
    itself.add_argument("--seed", type=int, default=0)
    for command in (compare, gating):
        command.add_argument("--junit", type=Path, metavar="FILE", help="write the verdicts as JUnit")
    for command in (compare, itself, gating):
        command.add_argument("--alpha", type=float, default=Rule.alpha, help="chance of a false alarm in the suite")
        command.add_argument("--bound", type=float, default=Rule.bound, help="least relative change that matters")
        command.add_argument("--floor-us", type=float, default=floor_us, help="and in microseconds")
        for kind in ("json", "csv", "md"):
            command.add_argument(f"--{kind}", type=Path, metavar="FILE", help=f"write the outcome as {kind}")
    cli_views.add_parsers(commands)
    return top
