"""Actions and schedules: plain immutable data. Nothing here runs, prices or proves anything.

A schedule is one lane of actions per rank. `2F0` reads: stage 2, forward, micro-batch 0. The grammar and the meaning
of every operation are in docs/schedules.md; the text form is the one of torch.distributed.pipelining.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from plait.parallel.schedules.check import CheckReport
    from plait.parallel.schedules.simulate import Costs, Timeline


class Op(StrEnum):
    """What an action does. The values are torch.distributed.pipelining's names (TIE_GRAD is ours)."""

    F = "F"
    B = "B"
    I = "I"
    W = "W"
    TIE_GRAD = "TIE_GRAD"
    REDUCE_GRAD = "REDUCE_GRAD"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    OVERLAP_F_B = "OVERLAP_F_B"


COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W})
BACKWARD = frozenset({Op.B, Op.I})  # makes the gradient of the stage's input
WEIGHT = frozenset({Op.B, Op.W})  # makes weight gradients
SENDS = frozenset({Op.SEND_F, Op.SEND_B})
RECEIVES = frozenset({Op.RECV_F, Op.RECV_B})
PER_STAGE = frozenset({Op.TIE_GRAD, Op.REDUCE_GRAD, Op.UNSHARD, Op.RESHARD})  # no micro-batch

_SINGLE = re.compile(r"(\d+)([A-Z_]+?)(\d*)")
_PAIR = re.compile(r"\(([^()]*)\)([A-Z_]+)")


class ScheduleError(ValueError):
    """A schedule that cannot be run. `.rank` and `.action` (text) say where, None where it concerns no single one."""

    def __init__(self, message: str, rank: int | None = None, action: Action | str | None = None):
        super().__init__(message)
        self.rank = rank
        self.action = None if action is None else str(action)


class Action(NamedTuple):
    """One action of a lane. A pair (OVERLAP_F_B) has stage -1 and its two halves in `parts`."""

    stage: int
    op: Op
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.op.value}"
        return f"{self.stage}{self.op.value}{'' if self.microbatch is None else self.microbatch}"

    __repr__ = __str__

    @property
    def singles(self) -> tuple[Action, ...]:
        """The halves of a pair, or the action itself."""
        return self.parts or (self,)

    @staticmethod
    def parse(text: str) -> Action:
        """Reads `2F0`, `1REDUCE_GRAD` or `(2F3;5B1)OVERLAP_F_B`. Raises ScheduleError naming the text."""
        text = text.strip()
        if match := _PAIR.fullmatch(text):
            parts = tuple(Action.parse(part) for part in match[1].split(";"))
            if match[2] != Op.OVERLAP_F_B or len(parts) != 2 or any(part.op not in COMPUTE for part in parts):
                raise ScheduleError(f"action {text!r}: a pair is (stageFm;stageBm)OVERLAP_F_B", action=text)
            return Action(-1, Op.OVERLAP_F_B, None, parts)
        match = _SINGLE.fullmatch(text)
        if match is None or match[2] not in Op.__members__ or match[2] == Op.OVERLAP_F_B:
            raise ScheduleError(f"action {text!r}: expected stage, operation, micro-batch, as in 2F0", action=text)
        op = Op(match[2])
        if (op in PER_STAGE) == bool(match[3]):
            need = "no micro-batch" if op in PER_STAGE else "a micro-batch"
            raise ScheduleError(f"action {text!r}: {op.value} takes {need}", action=text)
        return Action(int(match[1]), op, int(match[3]) if match[3] else None)


def pair(forward: Action, backward: Action) -> Action:
    """The action that runs `forward` and `backward` (B or I) of different micro-batches as one."""
    return Action(-1, Op.OVERLAP_F_B, None, (forward, backward))


def singles(lane: Iterable[Action]) -> Iterator[Action]:
    """The lane with pairs taken apart."""
    for action in lane:
        yield from action.parts or (action,)


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
        """True when the lanes hold sends or receives."""
        return any(action.op in SENDS or action.op in RECEIVES for lane in self.lanes for action in lane)

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
