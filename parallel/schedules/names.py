"""Schedules by name, for command lines and configurations. Adding a generator: write it, give it a line here."""

from __future__ import annotations

from plait.parallel.schedules.dual_pipe_v_schedule import dual_pipe_v
from plait.parallel.schedules.gpipe_schedule import gpipe
from plait.parallel.schedules.interleaved_schedule import interleaved
from plait.parallel.schedules.looped_bfs_schedule import looped_bfs
from plait.parallel.schedules.one_f_one_b_schedule import one_f_one_b
from plait.parallel.schedules.schedule import Schedule
from plait.parallel.schedules.zb_h1_schedule import zb_h1
from plait.parallel.schedules.zb_h2_schedule import zb_h2
from plait.parallel.schedules.zb_v_schedule import zb_v

ANY_CHUNKS = {"interleaved": interleaved, "looped_bfs": looped_bfs}
_ONE_CHUNK = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb_h1": zb_h1, "zb_h2": zb_h2}
_VEE = {"zb_v": zb_v, "dual_pipe_v": dual_pipe_v}
NAMES = ("gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_h2", "zb_v", "dual_pipe_v")


def build(name: str, num_ranks: int, num_microbatches: int, chunks: int | None = None) -> Schedule:
    """The schedule of that name, one of NAMES. `chunks`: stages per rank; None: 2, or 1 where a rank has one stage.

    Raises ValueError for another name, or for chunks that the schedule does not have.
    """
    if name in ANY_CHUNKS:
        return ANY_CHUNKS[name](num_ranks, 2 if chunks is None else chunks, num_microbatches)
    if name in _ONE_CHUNK:
        if chunks not in (None, 1):
            raise ValueError(f"chunks={chunks}: {name} has one stage per rank; {' and '.join(ANY_CHUNKS)} take more")
        return _ONE_CHUNK[name](num_ranks, num_microbatches)
    if name in _VEE:
        if chunks not in (None, 2):
            raise ValueError(f"chunks={chunks}: {name} has two stages per rank, in V shape")
        return _VEE[name](num_ranks, num_microbatches)
    raise ValueError(f"schedule {name!r} is none of {', '.join(NAMES)}")
