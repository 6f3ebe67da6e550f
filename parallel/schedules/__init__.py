"""Pipeline schedules as data: generators, proof, price, picture. Pure Python: imports no torch.

The grammar is in docs/schedules.md. `Schedule.check()` and `.simulate()` are the doors to check.py and simulate.py.
"""

from __future__ import annotations

from plait.parallel.schedules.action import Action, Op, ScheduleError, pair
from plait.parallel.schedules.check import CheckReport
from plait.parallel.schedules.costs import Costs, LayerCosts, Part, balanced_layers, layer_costs, shared
from plait.parallel.schedules.dual_pipe_v_schedule import dual_pipe_v
from plait.parallel.schedules.gpipe_schedule import gpipe
from plait.parallel.schedules.interleaved_schedule import interleaved
from plait.parallel.schedules.looped_bfs_schedule import looped_bfs
from plait.parallel.schedules.lowering import lower, on_one_rank
from plait.parallel.schedules.names import ANY_CHUNKS, NAMES, build
from plait.parallel.schedules.one_f_one_b_schedule import one_f_one_b
from plait.parallel.schedules.partition import split_layers
from plait.parallel.schedules.schedule import Schedule, from_csv, parse_csv
from plait.parallel.schedules.search import held, search
from plait.parallel.schedules.shapes import stage_map
from plait.parallel.schedules.simulate import Event, Message, Timeline, timeline
from plait.parallel.schedules.zb_h1_schedule import zb_h1
from plait.parallel.schedules.zb_h2_schedule import zb_h2
from plait.parallel.schedules.zb_v_schedule import zb_v

__all__ = [
    "ANY_CHUNKS",
    "Action",
    "CheckReport",
    "Costs",
    "Event",
    "LayerCosts",
    "Message",
    "NAMES",
    "Op",
    "Part",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "balanced_layers",
    "build",
    "dual_pipe_v",
    "from_csv",
    "gpipe",
    "held",
    "interleaved",
    "layer_costs",
    "looped_bfs",
    "lower",
    "on_one_rank",
    "one_f_one_b",
    "pair",
    "parse_csv",
    "search",
    "shared",
    "split_layers",
    "stage_map",
    "timeline",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
