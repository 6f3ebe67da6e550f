"""Turns a plain schedule into what one rank carries out: sends, receives, gathering of parameters; or onto one rank.

SEND stands right after the action that makes the message. RECV stands a few actions before the one that uses it, and,
on each link (ordered pair of ranks), in the sender's order; so a link is first in, first out, with and without tags
(docs/schedules.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.parallel.schedules.action import BACKWARD, COMPUTE, Action, Op, singles
from plait.parallel.schedules.machine import Product, crosses, makes, needs, user_stage
from plait.parallel.schedules.schedule import Schedule
from plait.parallel.schedules.simulate import Costs

# Receives posted this many computing actions early: the transfer of one message hides behind the one before it, and
# one more action of slack absorbs a sender that runs late. Derived, not tuned.
LOOKAHEAD = 2


def lower(schedule: Schedule, *, lookahead: int = LOOKAHEAD, unshard: int = 0) -> Schedule:
    """The schedule with SEND_* and RECV_*; `unshard` > 0 adds UNSHARD and RESHARD that keep so many stages whole.

    Pairs are taken apart, so that the first half's message leaves before the second half runs. A lowered schedule is
    returned as it is. The input must pass `check`; so does the result.
    """
    if schedule.is_lowered:
        return schedule
    schedule = replace(schedule, lanes=tuple(tuple(singles(lane)) for lane in schedule.lanes))
    receives = _receives(schedule, lookahead)
    lanes = []
    for rank, lane in enumerate(schedule.lanes):
        new: list[Action] = []
        for index, action in enumerate(lane):
            new += receives[rank].get(index, ())
            new.append(action)
            computing = [s for s in action.singles if s.op in COMPUTE]
            new += [_send(p) for s in computing for p in makes(s) if crosses(p, schedule)]
        lanes.append(tuple(_add_unshard(new, unshard) if unshard else new))
    return replace(schedule, lanes=tuple(lanes))


def _send(product: Product) -> Action:
    stage, kind, microbatch = product
    return Action(stage, Op.SEND_F if kind == "F" else Op.SEND_B, microbatch)


def _receive(product: Product) -> Action:
    op = Op.RECV_F if product[1] == "F" else Op.RECV_B
    return Action(user_stage(product), op, product[2])


def _receives(schedule: Schedule, lookahead: int) -> list[dict[int, list[Action]]]:
    """Per rank: lane index -> receives to post before the action there."""
    links: dict[tuple[int, int], list[Product]] = {}  # in the sender's order
    for rank, lane in enumerate(schedule.lanes):
        for product in [p for s in singles(lane) if s.op in COMPUTE for p in makes(s) if crosses(p, schedule)]:
            links.setdefault((rank, schedule.stage_to_rank[user_stage(product)]), []).append(product)
    where = [_where(lane, schedule) for lane in schedule.lanes]
    posts: list[dict[int, list[Action]]] = [{} for _ in schedule.lanes]
    for (_, target), products in links.items():
        used, forward = where[target]
        # As early as wished, and no later than what follows on the link ...
        index = len(schedule.lanes[target])
        wished = []
        for product in reversed(products):
            index = min(index, max(0, used[product] - lookahead))
            wished.append(index)
        # ... but a gradient's shape is known only after the forward of its micro-batch, and order stays. Both bounds
        # lie before the user: the sender made this message, and all before it on the link, only after that forward.
        floor = 0
        for product, index in zip(products, reversed(wished), strict=True):
            if product[1] == "G":
                floor = max(floor, forward[user_stage(product), product[2]] + 1)
            floor = max(floor, index)
            posts[target].setdefault(floor, []).append(_receive(product))
    return posts


def _where(lane: Sequence[Action], schedule: Schedule) -> tuple[dict[Product, int], dict[tuple[int, int], int]]:
    """Lane index of the user of each product, and of each (stage, micro-batch)'s forward."""
    used: dict[Product, int] = {}
    forward: dict[tuple[int, int], int] = {}
    for index, action in enumerate(lane):
        for single in [s for s in action.singles if s.op in COMPUTE]:
            used.update((product, index) for product in needs(single, schedule.num_stages))
            if single.op is Op.F:
                assert single.microbatch is not None
                forward[single.stage, single.microbatch] = index
    return used, forward


def _add_unshard(lane: Sequence[Action], num_whole: int) -> list[Action]:
    """Gathers the next `num_whole` stages that the lane computes, and lets go of those that are not among them."""
    new: list[Action] = []
    whole: list[int] = []
    for index, action in enumerate(lane):
        if any(s.op in COMPUTE for s in action.singles):
            upcoming = list(dict.fromkeys(s.stage for s in singles(lane[index:]) if s.op in COMPUTE))
            wanted = upcoming[: max(num_whole, len({s.stage for s in action.singles}))]
            new += [Action(stage, Op.RESHARD) for stage in whole if stage not in wanted]
            new += [Action(stage, Op.UNSHARD) for stage in wanted if stage not in whole]
            whole = [s for s in whole if s in wanted] + [s for s in wanted if s not in whole]
        new.append(action)
    return new + [Action(stage, Op.RESHARD) for stage in whole]


def on_one_rank(schedule: Schedule) -> Schedule:
    """All stages on one rank, in the order in which the simulation starts their actions: same maths, no messages."""
    events = [
        (event.start, rank, index, event.action)
        for rank, lane in enumerate(schedule.simulate().lanes)
        for index, event in enumerate(lane)
    ]
    lane = tuple(action for _, _, _, action in sorted(events, key=lambda event: event[:3]))
    return replace(schedule, lanes=(lane,), stage_to_rank=(0,) * schedule.num_stages)


def idle_before(schedule: Schedule, rank: int) -> frozenset[tuple[int, int]]:
    """(stage, micro-batch) of backwards before which the rank stands idle for a forward of that stage or longer.

    By the simulation with default costs: there a second forward (recompute) of the stage costs no time.
    """
    costs, end, found = Costs.unit(schedule), 0.0, set()
    for event in schedule.simulate().lanes[rank]:
        for single in event.action.singles:
            needed = float(costs.of(Action(single.stage, Op.F))) - 1e-9  # times are floats here
            if single.op in BACKWARD and event.start - end >= needed:
                assert single.microbatch is not None
                found.add((single.stage, single.microbatch))
        end = event.end
    return frozenset(found)
