"""Pipeline schedules as data: generators, proof, price, picture. Pure Python: imports no torch.

The grammar is in docs/schedules.md. `Schedule.check()` and `.simulate()` are the doors to check.py and simulate.py.
"""

from __future__ import annotations

from plait.parallel.schedules.action import Action, Op, ScheduleError, pair
from plait.parallel.schedules.check import CheckReport
from plait.parallel.schedules.gpipe_schedule import gpipe
from plait.parallel.schedules.interleaved_schedule import interleaved
from plait.parallel.schedules.lowering import lower, on_one_rank
from plait.parallel.schedules.one_f_one_b_schedule import one_f_one_b
from plait.parallel.schedules.partition import split_layers
from plait.parallel.schedules.schedule import Schedule, from_csv, parse_csv
from plait.parallel.schedules.simulate import Costs, Event, Timeline, timeline

__all__ = [
    "Action",
    "CheckReport",
    "Costs",
    "Event",
    "Op",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "from_csv",
    "gpipe",
    "interleaved",
    "lower",
    "on_one_rank",
    "one_f_one_b",
    "pair",
    "parse_csv",
    "split_layers",
    "timeline",
]
