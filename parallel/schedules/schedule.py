"""Schedules: plain immutable data, one lane of actions per rank. Nothing here runs, prices or proves anything.

`Schedule.check` and `Schedule.simulate` are doors to check.py and simulate.py. The CSV form is the one that
torch.distributed.pipelining reads and writes (docs/schedules.md, CSV).
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from plait.parallel.schedules.action import COMPUTE, RECEIVES, SENDS, WEIGHT, Action, Op, ScheduleError, singles

if TYPE_CHECKING:
    from plait.parallel.schedules.check import CheckReport
    from plait.parallel.schedules.simulate import Costs, Timeline


@dataclass(frozen=True)
class Schedule:
    """A lane of actions per rank; hashable, comparable, never changed in place.

    `stage_to_rank[stage]` is the coordinate on the pipeline axis that holds the stage. `tied` says that first and
    last stage carry copies of one weight, so that both have a TIE_GRAD.
    """

    name: str
    num_stages: int
    num_microbatches: int
    lanes: tuple[tuple[Action, ...], ...]
    stage_to_rank: tuple[int, ...]
    tied: bool = False

    def __post_init__(self) -> None:
        if self.num_stages < 1 or self.num_microbatches < 1 or not self.lanes:
            raise ScheduleError(
                f"schedule {self.name}: needs stages, micro-batches and ranks >= 1, got "
                f"num_stages={self.num_stages}, num_microbatches={self.num_microbatches}, num_ranks={len(self.lanes)}"
            )
        if len(self.stage_to_rank) != self.num_stages:
            raise ScheduleError(
                f"schedule {self.name}: stage_to_rank has {len(self.stage_to_rank)} entries "
                f"for {self.num_stages} stages"
            )

    @property
    def num_ranks(self) -> int:
        return len(self.lanes)

    @property
    def is_lowered(self) -> bool:
        """True when the lanes hold what only lowering adds: sends, receives, unsharding."""
        added = SENDS | RECEIVES | {Op.UNSHARD, Op.RESHARD}
        return any(action.op in added for lane in self.lanes for action in lane)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that rank (a coordinate on the pipeline axis) holds, ascending."""
        return tuple(stage for stage, owner in enumerate(self.stage_to_rank) if owner == rank)

    def with_tied(self) -> Schedule:
        """The same schedule for a weight shared by first and last stage: TIE_GRAD before each one's REDUCE_GRAD.

        With one stage the weight is shared in place and nothing changes.
        """
        if self.tied or self.num_stages == 1:
            return self
        ends = (0, self.num_stages - 1)
        lanes = []
        for lane in self.lanes:
            new: list[Action] = []
            for action in lane:
                if action.op is Op.REDUCE_GRAD and action.stage in ends:
                    new.append(Action(action.stage, Op.TIE_GRAD))
                new.append(action)
            lanes.append(tuple(new))
        return replace(self, lanes=tuple(lanes), tied=True)

    def check(self, *, blocking: bool = False) -> CheckReport:
        """Proves the schedule or raises ScheduleError; see plait.parallel.schedules.check."""
        from plait.parallel.schedules.check import check

        return check(self, blocking=blocking)

    def simulate(self, costs: Costs | None = None) -> Timeline:
        """Prices the schedule; see plait.parallel.schedules.simulate."""
        from plait.parallel.schedules.simulate import simulate

        return simulate(self, costs)

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """The text that torch.distributed.pipelining loads (docs/schedules.md, CSV); also written to `path`."""
        dropped = {Op.TIE_GRAD} if self.is_lowered else {Op.TIE_GRAD, Op.REDUCE_GRAD}
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        for lane in self.lanes:
            writer.writerow([str(action) for action in lane if action.op not in dropped])
        if path is not None:
            with open(path, "w", newline="", encoding="ascii") as file:
                file.write(out.getvalue())
        return out.getvalue()


def add_reduce_grad(lane: Sequence[Action]) -> tuple[Action, ...]:
    """The lane with REDUCE_GRAD right after each stage's last B or W, where the stage has none yet."""
    last: dict[int, int] = {}
    have = set()
    for index, action in enumerate(lane):
        for single in action.singles:
            if single.op in WEIGHT:
                last[single.stage] = index
            elif single.op is Op.REDUCE_GRAD:
                have.add(single.stage)
    after: dict[int, list[Action]] = {}
    for stage, index in last.items():
        if stage not in have:
            after.setdefault(index, []).append(Action(stage, Op.REDUCE_GRAD))
    new: list[Action] = []
    for index, action in enumerate(lane):
        new.append(action)
        new.extend(after.get(index, ()))
    return tuple(new)


def parse_csv(text: str, name: str = "csv") -> Schedule:
    """Reads torch's CSV text. Stages, micro-batches and placement are read off the actions; it is not checked yet."""
    lanes = []
    for row in csv.reader(io.StringIO(text)):
        lanes.append(add_reduce_grad([Action.parse(cell) for cell in row if cell.strip()]))
    while lanes and not lanes[-1]:
        lanes.pop()
    owner: dict[int, int] = {}
    num_microbatches = 0
    for rank, lane in enumerate(lanes):
        for action in singles(lane):
            if action.op not in COMPUTE:
                continue
            if owner.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"schedule {name}: rank {rank} action {action}: "
                    f"stage {action.stage} is also on rank {owner[action.stage]}",
                    rank,
                    action,
                )
            if action.op in WEIGHT:  # forwards may hold a stray micro-batch; check names it
                num_microbatches = max(num_microbatches, (action.microbatch or 0) + 1)
    missing = sorted(set(range(max(owner, default=-1) + 1)) - set(owner))
    if not owner or missing or not num_microbatches:
        raise ScheduleError(
            f"schedule {name}: no action for stages {missing}" if missing else f"schedule {name}: no actions"
        )
    return Schedule(name, len(owner), num_microbatches, tuple(lanes), tuple(owner[s] for s in range(len(owner))))


def from_csv(path: str | os.PathLike[str]) -> Schedule:
    """Reads a CSV file that plait or torch.distributed.pipelining wrote; `check` it before use."""
    with open(path, newline="", encoding="ascii") as file:
        return parse_csv(file.read(), os.path.basename(os.fspath(path)))
