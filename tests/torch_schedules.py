"""Schedules as torch.distributed.pipelining itself makes them, as CSV text: no processes, no modules.

Not here: any test. torch's classes ask a stage only for sizes and ranks, which a stand-in answers.
"""

from __future__ import annotations

import csv
import io
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.stage import _PipelineStageBase


class StageSizes(_PipelineStageBase):
    """Answers what the schedule classes ask a stage, and nothing else."""

    def __init__(self, group_size: int, num_stages: int, rank: int) -> None:
        self.group_size, self.num_stages, self.group_rank, self.group = group_size, num_stages, rank, None
        self.stage_index_to_group_rank = None
        self.submod = None

    def _create_grad_recv_info(self, *args: Any, **kwargs: Any) -> None: ...
    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> None: ...
    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> None: ...


def torch_csv(name: str, num_ranks: int, chunks: int, num_microbatches: int) -> str:
    """The list of torch's schedule class `name`, written as torch writes its compute-only CSV."""
    order = torch_schedule(name, num_ranks, chunks, num_microbatches)
    out = io.StringIO()
    writer = csv.writer(out)
    for rank in sorted(order):
        writer.writerow(["" if action is None else str(action) for action in order[rank]])
    return out.getvalue()


def torch_schedule(name: str, num_ranks: int, chunks: int, num_microbatches: int) -> dict[int, list[Any]]:
    """rank -> torch's actions (None where idle)."""
    cls = getattr(torch_schedules, name)
    stages = [StageSizes(num_ranks, num_ranks * chunks, 0) for _ in range(chunks)]
    single = issubclass(cls, torch_schedules.PipelineScheduleSingle)
    schedule = cls(stages[0] if single else stages, num_microbatches)
    return schedule._get_pipeline_order() if single else schedule.pipeline_order
