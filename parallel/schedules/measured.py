"""Timelines of runs: put together from each rank's own clock, written and read as JSON, and turned into costs.

Not how a run is measured (`Pipeline.timeline`) and nothing that needs torch. The one idea: no common clock is needed.
Between two ranks messages go both ways, and the quickest of each way say how far their clocks are apart, if both ways
take equally long (as NTP has it). All times are seconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from plait.parallel.schedules.action import BACKWARD, COMPUTE, Action, Op, ScheduleError
from plait.parallel.schedules.costs import Costs, peak_memory
from plait.parallel.schedules.machine import Product, crosses, makes, needs
from plait.parallel.schedules.schedule import Schedule, add_reduce_grad
from plait.parallel.schedules.simulate import Event, Timeline, timeline

FORMAT = "plait timeline 1"
FILE = "timeline.json"  # in a run's folder
_Message = tuple[
    Product, int, int, float, float, Event
]  # product, source, target, made, used, the event that uses it


def measured_timeline(
    schedule: Schedule, lanes: Sequence[Sequence[Event]], inseparable: Sequence[int] = ()
) -> Timeline:
    """The timeline of a step from what each rank measured on its own clock: computing actions in the lane's order.

    `inseparable`: stages whose module cannot split its backward (`Pipeline.inseparable`).
    """
    shifts = _shifts(schedule, lanes)
    moved = [
        [event._replace(start=event.start + shift, end=event.end + shift) for event in lane if _computes(event)]
        for lane, shift in zip(lanes, shifts, strict=True)
    ]
    messages, exposed = [], {}
    for product, source, target, made, used, event in _messages(schedule, moved):
        arrived = max(made, used) if event.wait else made
        messages.append((*product, source, target, made, arrived))
        exposed[event.action] = max(0.0, min(event.wait, event.start - made))
    known = [[event._replace(exposed=exposed.get(event.action, 0.0)) for event in lane] for lane in moved]
    peaks = schedule.check().peak_activations
    shares = [max(1, len(schedule.stages_of(rank))) for rank in range(schedule.num_ranks)]
    peak = max(n / share for n, share in zip(peaks, shares, strict=True))
    line = timeline(schedule.name, known, peak, messages=messages, memory=peak_memory(schedule, Costs()))
    return replace(line, inseparable=tuple(inseparable))


def _computes(event: Event) -> bool:
    return all(single.op in COMPUTE for single in event.action.singles)


def _messages(schedule: Schedule, lanes: Sequence[Sequence[Event]]) -> Iterator[_Message]:
    """Every message between ranks. Inside a pair the times are bounds: made not before, used not after."""
    made: dict[Product, tuple[int, float]] = {}
    for rank, lane in enumerate(lanes):
        for event in filter(_computes, lane):
            for single in event.action.singles:
                first_half = event.action.parts and single == event.action.parts[0]
                for product in makes(single):
                    made[product] = (rank, event.start if first_half else event.end)
    for rank, lane in enumerate(lanes):
        for event in filter(_computes, lane):
            for single in event.action.singles:
                second_half = event.action.parts and single == event.action.parts[1]
                for product in needs(single, schedule.num_stages):
                    if crosses(product, schedule):
                        source, at = made[product]
                        yield product, source, rank, at, event.end if second_half else event.start, event


def _shifts(schedule: Schedule, lanes: Sequence[Sequence[Event]]) -> list[float]:
    """What to add to each rank's clock to get rank 0's; 0 for a rank that no message reaches.

    Ranks are tied to those already placed by the shortest round trip first: it bounds the error best, which is half
    of what its quickest messages lay unused.
    """
    quickest: dict[tuple[int, int], float] = {}
    for _, source, target, made, used, _ in _messages(schedule, lanes):
        quickest[source, target] = min(quickest.get((source, target), math.inf), used - made)
    shifts = {0: 0.0}
    while True:
        open_pairs = [(near, far) for near, far in quickest if near in shifts and far not in shifts]
        if not open_pairs:
            return [shifts.get(rank, 0.0) for rank in range(schedule.num_ranks)]
        near, far = min(open_pairs, key=lambda pair: quickest[pair] + quickest[pair[::-1]])
        shifts[far] = shifts[near] + (quickest[far, near] - quickest[near, far]) / 2


# ---- files -------------------------------------------------------------------------------------------------------


def to_json(schedule: Schedule, measured: Timeline) -> str:
    """The timeline as text; lanes are lists of [action, start, end, wait], seconds."""
    return json.dumps(
        {
            "format": FORMAT,
            "name": schedule.name,
            "num_microbatches": schedule.num_microbatches,
            "stage_to_rank": schedule.stage_to_rank,
            "inseparable": measured.inseparable,
            "lanes": [[[str(e.action), e.start, e.end, e.wait] for e in lane] for lane in measured.lanes],
        }
    )


def read_timeline(path: str | Path) -> tuple[Schedule, Timeline]:
    """What a run's folder or a file of `to_json` holds; ValueError names the file and what is wrong with it."""
    path = Path(path)
    if path.is_dir():
        path /= FILE
        if not path.exists():
            raise ValueError(f"{path.parent}: the run has no {FILE}")
    try:
        return parse_timeline(json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: is no JSON: {error}") from error
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}", error.rank, error.action) from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_timeline(data: Any) -> tuple[Schedule, Timeline]:
    """The schedule that was run and its timeline; ValueError says what is wrong, ScheduleError for lanes unsound."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"is no timeline: needs an object with format {FORMAT!r}")
    try:
        lanes = [
            [Event(Action.parse(text), *map(_seconds, (start, end, wait))) for text, start, end, wait in lane]
            for lane in data["lanes"]
        ]
        place, microbatches, name = (
            tuple(map(int, data["stage_to_rank"])),
            int(data["num_microbatches"]),
            data["name"],
        )
        inseparable = sorted(set(map(int, data.get("inseparable", ()))))  # older files do not say
    except ScheduleError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"is a damaged timeline: {type(error).__name__} {error}") from error
    actions = tuple(add_reduce_grad([e.action for e in lane]) for lane in lanes)
    schedule = Schedule(str(name), len(place), microbatches, actions, place)
    schedule.check()
    if inseparable and not 0 <= inseparable[0] <= inseparable[-1] < len(place):
        raise ValueError(f"is a damaged timeline: inseparable stages {inseparable} of {len(place)}")
    return schedule, measured_timeline(schedule, lanes, inseparable)


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no time in seconds")
    return float(value)


# ---- costs -------------------------------------------------------------------------------------------------------


def measured_costs(schedule: Schedule, measured: Timeline) -> Costs:
    """Costs per stage: medians over micro-batches; `send` the median way of a message that was waited for.

    A backward seen only whole is taken to be half I and half W; of an action seen only inside pairs, F takes a third.
    Stages that could not split say so, so that `search` splits none of them.
    """
    seen: dict[tuple[int, Op, bool], list[float]] = {}  # stage, operation, whether inside a pair
    for event in (event for lane in measured.lanes for event in lane):
        paired = bool(event.action.parts)
        for single in event.action.singles:
            part = 1.0 if not paired else 1 / 3 if single.op is Op.F else 2 / 3
            seen.setdefault((single.stage, single.op, paired), []).append((event.end - event.start) * part)

    def typical(stage: int, op: Op) -> float | None:
        values = seen.get((stage, op, False)) or seen.get((stage, op, True))
        return median(values) if values else None

    columns: dict[str, list[float]] = {"forward": [], "backward": [], "input": [], "weight": []}
    for stage in range(schedule.num_stages):
        forward, whole, inputs, weight = (typical(stage, op) for op in (Op.F, Op.B, Op.I, Op.W))
        if whole is None:
            whole = (inputs or 0.0) + (weight or 0.0)
        columns["forward"].append(forward or 0.0)
        columns["backward"].append(whole)
        columns["input"].append(whole / 2 if inputs is None else inputs)
        columns["weight"].append(whole / 2 if weight is None else weight)
    ways: dict[str, list[float]] = {"F": [0.0], "G": [0.0]}
    waited = {s for lane in measured.lanes for e in lane if e.wait for s in e.action.singles}
    for message in measured.messages:
        step, ops = (1, {Op.F}) if message.kind == "F" else (-1, BACKWARD)
        if any(Action(message.stage + step, op, message.microbatch) in waited for op in ops):
            ways[message.kind].append(message.end - message.start)
    send, send_grad = (median(ways[kind][1:] or ways[kind]) for kind in ("F", "G"))
    splits = [stage not in measured.inseparable for stage in range(schedule.num_stages)]
    split = splits if measured.inseparable else True
    return Costs(**columns, send=send, send_grad=send_grad, split=split)
