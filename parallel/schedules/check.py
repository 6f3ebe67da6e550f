"""Proves that a schedule can be run: matching, order, no deadlock, and how much it keeps alive. Runs nothing.

What is proved, in which order, is listed in docs/schedules.md. Each failure is a ScheduleError that
names rank and action.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.parallel.schedules.action import (
    BACKWARD,
    COMPUTE,
    RECEIVES,
    SENDS,
    WEIGHT,
    Action,
    Op,
    ScheduleError,
    singles,
)
from plait.parallel.schedules.machine import (
    Product,
    carried,
    crosses,
    maker,
    makes,
    needs,
    prove_async,
    prove_blocking,
    user_stage,
)
from plait.parallel.schedules.schedule import Schedule


@dataclass(frozen=True)
class CheckReport:
    """Peaks per rank, counted in (stage, micro-batch) pairs."""

    peak_activations: tuple[int, ...]  # from F until B or I
    peak_deferred: tuple[int, ...]  # weight gradients queued: from I until W


def check(schedule: Schedule, *, blocking: bool = False) -> CheckReport:
    """Raises ScheduleError unless the schedule can run; returns what it keeps alive.

    `blocking=True` asks the stronger question whether it would also run with blocking sends and receives, one at a
    time.
    """
    places = _places(schedule)
    _check_complete(schedule, places)
    _check_lane_order(schedule, places)
    _check_stage_actions(schedule, places)
    _check_channels(schedule)
    if schedule.is_lowered:
        _check_messages(schedule, places)
    _check_unshard(schedule)
    prove_async(schedule)
    if blocking:
        prove_blocking(schedule)
    return _peaks(schedule)


def _fail(schedule: Schedule, rank: int, action: Action | str, text: str) -> ScheduleError:
    return ScheduleError(f"schedule {schedule.name}: rank {rank} action {action}: {text}", rank, action)


def _places(schedule: Schedule) -> dict[Action, int]:
    """Every single action -> index in its lane (the halves of a pair share one). Refuses strays and duplicates."""
    for stage, rank in enumerate(schedule.stage_to_rank):
        if not 0 <= rank < schedule.num_ranks:
            raise ScheduleError(
                f"schedule {schedule.name}: stage {stage} is on rank {rank} of {schedule.num_ranks}", rank
            )
    places: dict[Action, int] = {}
    for rank, lane in enumerate(schedule.lanes):
        for index, action in enumerate(lane):
            for single in action.singles:
                _check_single(schedule, rank, single)
                if single in places and single.op not in (Op.UNSHARD, Op.RESHARD):
                    raise _fail(schedule, rank, single, f"duplicated (positions {places[single]} and {index})")
                places[single] = index
    return places


def _check_single(schedule: Schedule, rank: int, single: Action) -> None:
    """Stage, micro-batch and placement of one action."""
    if not 0 <= single.stage < schedule.num_stages:
        raise _fail(schedule, rank, single, f"no stage {single.stage}; stages are 0..{schedule.num_stages - 1}")
    if schedule.stage_to_rank[single.stage] != rank:
        owner = schedule.stage_to_rank[single.stage]
        raise _fail(schedule, rank, single, f"stage {single.stage} is on rank {owner}")
    counted = single.op in COMPUTE or single.op in SENDS or single.op in RECEIVES
    if not counted:
        if single.microbatch is not None:
            raise _fail(schedule, rank, single, f"{single.op.value} takes no micro-batch")
    elif single.microbatch is None or not 0 <= single.microbatch < schedule.num_microbatches:
        last = schedule.num_microbatches - 1
        raise _fail(schedule, rank, single, f"no micro-batch {single.microbatch}; micro-batches are 0..{last}")


def _check_complete(schedule: Schedule, places: dict[Action, int]) -> None:
    """Each F once; each backward once, whole (B) or in two (I and W). Duplicates are refused already."""
    for stage, rank in enumerate(schedule.stage_to_rank):
        for m in range(schedule.num_microbatches):
            has = {op: Action(stage, op, m) in places for op in (Op.F, Op.B, Op.I, Op.W)}
            if not has[Op.F]:
                raise _fail(schedule, rank, Action(stage, Op.F, m), "missing: every micro-batch runs forward once")
            if has[Op.B] and (has[Op.I] or has[Op.W]):
                extra = Action(stage, Op.I if has[Op.I] else Op.W, m)
                raise _fail(schedule, rank, extra, f"duplicated: {Action(stage, Op.B, m)} does it already")
            if not has[Op.B] and has[Op.I] != has[Op.W]:
                absent, present = (Op.W, Op.I) if has[Op.I] else (Op.I, Op.W)
                raise _fail(
                    schedule,
                    rank,
                    Action(stage, absent, m),
                    f"missing: {Action(stage, present, m)} needs its other half",
                )
            if not has[Op.B] and not has[Op.I]:
                raise _fail(schedule, rank, Action(stage, Op.B, m), "missing: every micro-batch runs backward once")


def _check_lane_order(schedule: Schedule, places: dict[Action, int]) -> None:
    """F before B or I, I before W, on each stage."""
    for single, index in places.items():
        if single.op not in (Op.B, Op.I, Op.W):
            continue
        first = Action(single.stage, Op.I if single.op is Op.W else Op.F, single.microbatch)
        if places[first] >= index:
            rank = schedule.stage_to_rank[single.stage]
            raise _fail(schedule, rank, single, f"stands before {first} (position {places[first]}), which it needs")


def _check_stage_actions(schedule: Schedule, places: dict[Action, int]) -> None:
    """One REDUCE_GRAD per stage after its last B or W; TIE_GRAD between them where the schedule is tied."""
    tied = {0, schedule.num_stages - 1} if schedule.tied else set()
    last: dict[int, tuple[int, Action]] = {}
    for single, index in places.items():
        if single.op in WEIGHT and index >= last.get(single.stage, (-1, single))[0]:
            last[single.stage] = (index, single)
    for stage, rank in enumerate(schedule.stage_to_rank):
        reduce, tie = Action(stage, Op.REDUCE_GRAD), Action(stage, Op.TIE_GRAD)
        after, before = last[stage]
        for action, wanted in ((tie, stage in tied), (reduce, True)):
            if not wanted:
                if action in places:
                    raise _fail(schedule, rank, action, "the stage carries no tied weight")
                continue
            if action not in places:
                raise _fail(schedule, rank, action, f"missing: it stands once after {before}")
            if places[action] <= after:
                raise _fail(schedule, rank, action, f"stands before {before}, which it needs")
            after, before = places[action], action


def _check_channels(schedule: Schedule) -> None:
    """Messages of one channel are used in the order in which they are made."""
    made: dict[tuple[int, str], list[int]] = {}
    used: dict[tuple[int, str], list[tuple[int, Action]]] = {}
    for lane in schedule.lanes:
        for single in singles(lane):
            if single.op is Op.F or single.op in BACKWARD:
                for stage, kind, m in makes(single):
                    made.setdefault((stage, kind), []).append(m)
                for stage, kind, m in needs(single, schedule.num_stages):
                    used.setdefault((stage, kind), []).append((m, single))
    for channel, uses in used.items():
        for expected, (m, action) in zip(made[channel], uses, strict=True):
            if m != expected:
                rank = schedule.stage_to_rank[action.stage]
                text = f"out of order: its channel carries {maker((*channel, expected))} first"
                raise _fail(schedule, rank, action, text)


def _check_messages(schedule: Schedule, places: dict[Action, int]) -> None:
    """Lowered schedules: each message sent once after its maker, posted once before its user, same order per link."""
    sent: dict[Product, Action] = {}
    posted: dict[Product, Action] = {}
    links: dict[tuple[int, int], tuple[list[Product], list[Product]]] = {}
    for rank, lane in enumerate(schedule.lanes):
        for action in lane:
            if action.op not in SENDS and action.op not in RECEIVES:
                continue
            product = carried(action)
            is_send = action.op in SENDS
            if not (0 <= product[0] < schedule.num_stages and crosses(product, schedule)):
                raise _fail(schedule, rank, action, f"no message: {maker(product)} does not cross ranks")
            (sent if is_send else posted)[product] = action
            link = (schedule.stage_to_rank[product[0]], schedule.stage_to_rank[user_stage(product)])
            links.setdefault(link, ([], []))[0 if is_send else 1].append(product)
    for single in [a for lane in schedule.lanes for a in singles(lane) if a.op in COMPUTE]:
        for product in [p for p in needs(single, schedule.num_stages) if crosses(p, schedule)]:
            _check_message(schedule, places, single, product, sent.get(product), posted.get(product))
    for (source, target), (sends, receives) in links.items():
        for first, second in zip(sends, receives, strict=True):
            if first != second:
                text = f"posted out of order: rank {source} sends {maker(first)} to rank {target} first"
                raise _fail(schedule, target, posted[second], text)


def _check_message(
    schedule: Schedule,
    places: dict[Action, int],
    user: Action,
    product: Product,
    send: Action | None,
    receive: Action | None,
) -> None:
    """One message of a lowered schedule."""
    stage, kind, m = product
    source, target = schedule.stage_to_rank[stage], schedule.stage_to_rank[user.stage]
    if send is None:
        missing = Action(stage, Op.SEND_F if kind == "F" else Op.SEND_B, m)
        raise _fail(schedule, source, missing, f"missing: rank {target} needs it for {user}")
    if receive is None:
        missing = Action(user.stage, Op.RECV_F if kind == "F" else Op.RECV_B, m)
        raise _fail(schedule, target, missing, f"missing: {user} needs it and rank {source} sends it")
    makers = [Action(stage, op, m) for op in ((Op.F,) if kind == "F" else (Op.B, Op.I))]
    made = next(places[a] for a in makers if a in places)
    if places[send] <= made:
        raise _fail(schedule, source, send, f"stands before {maker(product)}, whose result it sends")
    if places[receive] >= places[user]:
        raise _fail(schedule, target, receive, f"stands after {user}, which uses it")


def _check_unshard(schedule: Schedule) -> None:
    """Where a lane gathers parameters at all, a stage computes only while its parameters are there."""
    for rank, lane in enumerate(schedule.lanes):
        if not any(action.op is Op.UNSHARD for action in lane):
            continue
        whole: set[int] = set()
        for single in singles(lane):
            if single.op is Op.UNSHARD:
                if single.stage in whole:
                    raise _fail(schedule, rank, single, "duplicated: the stage is gathered already")
                whole.add(single.stage)
            elif single.op is Op.RESHARD or single.op in COMPUTE:
                if single.stage not in whole:
                    raise _fail(schedule, rank, single, f"missing {single.stage}UNSHARD before it")
                if single.op is Op.RESHARD:
                    whole.remove(single.stage)


def _peaks(schedule: Schedule) -> CheckReport:
    """Counts live activations and deferred weight gradients along each lane. In a pair the backward frees last."""
    activations, deferred = [], []
    for lane in schedule.lanes:
        live = queued = most_live = most_queued = 0
        for single in singles(lane):
            live += single.op is Op.F
            most_live = max(most_live, live)
            live -= single.op in BACKWARD
            queued += (single.op is Op.I) - (single.op is Op.W)
            most_queued = max(most_queued, queued)
        activations.append(most_live)
        deferred.append(most_queued)
    return CheckReport(tuple(activations), tuple(deferred))
