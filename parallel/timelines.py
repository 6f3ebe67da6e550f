"""The measured timeline of a pipeline's last step, gathered from its ranks. One all-reduce; no common clock needed.

What a timeline is, and its file, are parallel/schedules/measured.py's.
"""

from __future__ import annotations

import torch

from plait.parallel.collectives import all_reduce
from plait.parallel.pipeline import Pipeline
from plait.parallel.schedules import Event, Timeline, lower
from plait.parallel.schedules.action import COMPUTE
from plait.parallel.schedules.measured import measured_timeline


def gather_timeline(pipeline: Pipeline) -> Timeline | None:
    """The last step on all ranks of the pipeline axis; None where the pipeline did no step since it was made or since
    `evaluate`, which leaves nothing to time. Collective over the axis."""
    schedule, axis = pipeline.schedule, pipeline.mesh.axis("pp")
    lanes = lower(schedule).lanes  # what is run: pairs may have been taken apart
    actions = [[a for a in lane if all(single.op in COMPUTE for single in a.singles)] for lane in lanes]
    mine = {event.action: event[1:4] for event in pipeline.timeline}
    own = actions[axis.coord]
    if not all(action in mine for action in own):
        return None
    shape = (axis.size, max(map(len, actions)), 3)
    times = torch.zeros(shape, dtype=torch.float64, device=pipeline.mesh.device)
    times[axis.coord, : len(own)] = torch.tensor([mine[action] for action in own], dtype=torch.float64)
    times = all_reduce(times, axis)
    whole = torch.zeros(schedule.num_stages, dtype=torch.int64, device=pipeline.mesh.device)
    for stage, layers in pipeline.inseparable.items():
        whole[stage] = len(layers)
    whole = all_reduce(whole, axis)
    events = [
        [Event(action, *row) for action, row in zip(lane, rows, strict=False)]
        for lane, rows in zip(actions, times.tolist(), strict=True)
    ]
    return measured_timeline(schedule, events, whole.nonzero().flatten().tolist())
