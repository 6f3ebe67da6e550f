"""Runs the lanes of a schedule on an abstract machine, to prove that no rank waits for ever. No time, no tensors.

A *product* is what one action makes and another needs: (stage, "F" or "G", micro-batch), G being the gradient of a
stage's input. Asynchronous: a product is there for everybody once made (lowered schedules: once sent). Blocking: each
product that crosses ranks is a rendezvous of a blocking send and a blocking receive.
"""

from __future__ import annotations

from typing import NamedTuple

from plait.parallel.schedules.action import BACKWARD, RECEIVES, SENDS, Action, Op, ScheduleError
from plait.parallel.schedules.schedule import Schedule

Product = tuple[int, str, int]


def needs(single: Action, num_stages: int) -> list[Product]:
    """Products that F, B or I takes from the neighbouring stage."""
    assert single.microbatch is not None
    if single.op is Op.F and single.stage > 0:
        return [(single.stage - 1, "F", single.microbatch)]
    if single.op in BACKWARD and single.stage < num_stages - 1:
        return [(single.stage + 1, "G", single.microbatch)]
    return []


def makes(single: Action) -> list[Product]:
    """What the action makes for its neighbour stage."""
    assert single.microbatch is not None
    if single.op is Op.F:
        return [(single.stage, "F", single.microbatch)]
    return [(single.stage, "G", single.microbatch)] if single.op in BACKWARD else []


def user_stage(product: Product) -> int:
    """The stage that uses a product (may be out of range at the ends of the pipeline: then nobody does)."""
    stage, kind, _ = product
    return stage + 1 if kind == "F" else stage - 1


def carried(message: Action) -> Product:
    """The product that a SEND or RECV carries. SEND names the maker's stage, RECV the user's."""
    assert message.microbatch is not None
    if message.op in SENDS:
        return (message.stage, "F" if message.op is Op.SEND_F else "G", message.microbatch)
    if message.op is Op.RECV_F:
        return (message.stage - 1, "F", message.microbatch)
    return (message.stage + 1, "G", message.microbatch)


def crosses(product: Product, schedule: Schedule) -> bool:
    """True when maker and user of the product are on different ranks."""
    user = user_stage(product)
    return 0 <= user < schedule.num_stages and schedule.stage_to_rank[user] != schedule.stage_to_rank[product[0]]


def maker(product: Product) -> str:
    """The product's maker as text, for messages."""
    stage, kind, microbatch = product
    return f"{stage}{'F' if kind == 'F' else 'B'}{microbatch}"


class _Stuck(NamedTuple):
    """Where a rank stands for ever: at `action`, until `peer` does something."""

    action: Action
    peer: int
    reason: str


def prove_async(schedule: Schedule) -> None:
    """Raises ScheduleError with the cycle when the lanes deadlock although no send waits."""
    lowered = schedule.is_lowered
    there: set[Product] = set()
    at = [0] * schedule.num_ranks
    waiting: dict[Product, list[int]] = {}
    runnable = list(range(schedule.num_ranks))
    stuck: dict[int, _Stuck] = {}
    while runnable:
        rank = runnable.pop()
        lane = schedule.lanes[rank]
        stuck.pop(rank, None)
        while at[rank] < len(lane):
            action = lane[at[rank]]
            wanted = [p for s in action.singles if s.op in _COMPUTES for p in needs(s, schedule.num_stages)]
            missing = next((p for p in wanted if p not in there), None)
            if missing is not None:
                peer = schedule.stage_to_rank[missing[0]]
                stuck[rank] = _Stuck(action, peer, f"waits for {maker(missing)}")
                waiting.setdefault(missing, []).append(rank)
                break
            at[rank] += 1
            for product in _made(action, schedule, lowered):
                there.add(product)
                runnable.extend(waiting.pop(product, ()))
    if stuck:
        _report(schedule, stuck, "")


_COMPUTES = frozenset({Op.F, Op.B, Op.I})


def _made(action: Action, schedule: Schedule, lowered: bool) -> list[Product]:
    """Products that are there for their user once `action` has run."""
    if action.op in SENDS:
        return [carried(action)]
    made = [p for s in action.singles if s.op in _COMPUTES for p in makes(s)]
    return [p for p in made if not (lowered and crosses(p, schedule))]


def prove_blocking(schedule: Schedule) -> None:
    """Raises ScheduleError with the cycle when blocking sends and receives, one at a time, deadlock."""
    programs = [_blocking_program(schedule, rank) for rank in range(schedule.num_ranks)]
    at = [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                kind, product, _ = program[at[rank]]
                if kind != "send":
                    break
                peer = schedule.stage_to_rank[user_stage(product)]
                there = programs[peer][at[peer]] if at[peer] < len(programs[peer]) else None
                if there is None or there[:2] != ("recv", product):
                    break
                at[rank] += 1
                at[peer] += 1
                moved = True
    stuck = {}
    for rank, program in enumerate(programs):
        if at[rank] < len(program):
            kind, product, action = program[at[rank]]
            other = user_stage(product) if kind == "send" else product[0]
            reason = f"{'sends' if kind == 'send' else 'waits for'} {maker(product)}"
            stuck[rank] = _Stuck(action, schedule.stage_to_rank[other], reason)
    if stuck:
        _report(schedule, stuck, " with blocking sends and receives")


def _blocking_program(schedule: Schedule, rank: int) -> list[tuple[str, Product, Action]]:
    """The rank's sends and receives in order; computing never blocks, so it is left out."""
    program: list[tuple[str, Product, Action]] = []
    lowered = schedule.is_lowered
    for action in schedule.lanes[rank]:
        if action.op in SENDS:
            program.append(("send", carried(action), action))
        elif action.op in RECEIVES:
            program.append(("recv", carried(action), action))
        elif not lowered:
            parts = [s for s in action.singles if s.op in _COMPUTES]
            inward = [p for s in parts for p in needs(s, schedule.num_stages) if crosses(p, schedule)]
            outward = [p for s in parts for p in makes(s) if crosses(p, schedule)]
            program += [("recv", p, action) for p in inward] + [("send", p, action) for p in outward]
    return program


def _report(schedule: Schedule, stuck: dict[int, _Stuck], how: str) -> None:
    """Raises with the cycle of ranks that wait for each other (a rank may wait for itself)."""
    rank, path = min(stuck), []
    while rank in stuck and rank not in path:
        path.append(rank)
        rank = stuck[rank].peer
    cycle = path[path.index(rank) :] if rank in path else path
    steps = [f"rank {r} at {stuck[r].action} {stuck[r].reason} (rank {stuck[r].peer})" for r in cycle]
    end = " -> back to the first" if rank in path else f" -> rank {rank} has finished"
    raise ScheduleError(
        f"schedule {schedule.name}: deadlock{how}: " + "; ".join(steps) + end, cycle[0], stuck[cycle[0]].action
    )
