"""`plait train`: reads the flags, checks the whole run, then trains in place or on local ranks.

Nothing is started before everything that can be checked without a peer has been checked.
"""

from __future__ import annotations

import sys

from plait.config import ConfigError, RunConfig, parse


def main(argv: list[str]) -> int:
    """Exit code 0 when the run reached its end or was asked to stop and saved; 1 on failure; 2 on a bad flag."""
    try:
        config = parse(argv)
        return run(config)
    except ConfigError as error:
        print(f"plait train: {error}", file=sys.stderr)
        return 2


def run(config: RunConfig) -> int:
    """Checks the run, then starts it; raises ConfigError for what the grid, the model or the data refuse."""
    from plait import launch, train, view

    try:
        plan = train.make_plan(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    joined = launch.torchrun_place()
    if joined is not None and joined.world_size != plan.world_size:
        raise ConfigError(f"--mesh {config.mesh} is {plan.world_size} ranks; torchrun started {joined.world_size}")
    if joined is not None or plan.world_size == 1:
        return launch.run_in_place(lambda rank: train.train(plan, rank), joined, view.make_view())
    return launch.launch(lambda rank: train.train(plan, rank), plan.world_size, view.make_view())
