"""Actions: what one rank does next. `2F0` reads: stage 2, forward, micro-batch 0.

The grammar and the meaning of every operation are in docs/schedules.md; the text form is the one of
torch.distributed.pipelining. Schedules, which are made of actions, are in schedule.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Any, NamedTuple


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

    def __init__(self, message: str, rank: int | None = None, action: object = None):
        super().__init__(message)
        self.rank = rank
        self.action = None if action is None else str(action)


class Action(NamedTuple):
    """One action of a lane. A pair (OVERLAP_F_B) has stage -1 and its two halves in `parts`."""

    stage: int
    op: Op
    microbatch: int | None = None
    parts: tuple[Any, ...] = ()  # of Action; mypy cannot follow a recursive tuple

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.op.value}"
        return f"{self.stage}{self.op.value}{'' if self.microbatch is None else self.microbatch}"

    def __repr__(self) -> str:
        return str(self)

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
