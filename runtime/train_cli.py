"""`plait train`: reads the flags, checks the whole run, then trains in place or on local ranks.

Nothing is started before everything that can be checked without a peer has been checked.
"""

from __future__ import annotations

import sys

from plait.config import ConfigError, RunConfig, parse

LOCKED = 3  # as `plait snapshot` has it


def main(argv: list[str]) -> int:
    """Exit code 0 when the run reached its end or was asked to stop and saved; 1 on failure; 2 on a bad flag; 3 when
    a running job writes to `--out`."""
    try:
        return run(parse(argv))
    except ConfigError as error:
        print(f"plait train: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of stdout left: the command line's own matter
        raise
    except OSError as error:  # the machine: a LOCK that cannot be read, no more processes
        print(f"plait train: {error}", file=sys.stderr)
        return 1


def run(config: RunConfig) -> int:
    """Checks the run, then starts it; raises ConfigError for what the grid, the model or the data refuse."""
    from plait.ckpt.errors import SnapshotLocked
    from plait.ckpt.lock import refuse_if_held
    from plait.launch import launch, run_in_place, torchrun_place
    from plait.plan import elastic_plan, make_plan
    from plait.rank import Place, Rank
    from plait.train import train
    from plait.view import make_view

    place = torchrun_place()
    if place is None or place.rank == 0:  # the rank that will hold the LOCK, so that it cannot meet its own
        try:
            refuse_if_held(config.out)
        except SnapshotLocked as error:
            print(f"plait train: --out {config.out}: {error}", file=sys.stderr)
            return LOCKED
    plan = make_plan(config) if place is None else elastic_plan(config, place.world_size)
    if place is not None and place.rank == 0 and plan.config.mesh != config.mesh:
        print(f"--mesh {config.mesh}: torchrun started {place.world_size} ranks, which are {plan.config.mesh}")

    def program(rank: Rank) -> None:
        train(plan, rank)

    if place is not None or plan.world_size == 1:
        return run_in_place(program, place or Place(), make_view())
    return launch(program, plan.world_size, make_view())
