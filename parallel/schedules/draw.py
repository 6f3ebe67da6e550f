"""Draws timelines, planned or measured: text for the terminal, SVG, a trace for ui.perfetto.dev. Computes nothing.

Several timelines of one unit of time are drawn on one scale, one under the other, so that a plan and what was
measured compare by eye. Colours follow the papers' pictures: forward blue, backward green, input gradient teal,
weight gradient orange; the later a chunk of a rank, the darker.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from xml.sax.saxutils import escape

from plait.parallel.schedules.action import BACKWARD, Action, Op
from plait.parallel.schedules.simulate import Event, Timeline

_NAMES = {Op.F: "forward", Op.B: "backward", Op.I: "input gradient", Op.W: "weight gradient"}
_COLOURS = {
    Op.F: "#9ecae1",
    Op.B: "#a1d99b",
    Op.I: "#80cdc1",
    Op.W: "#fdae6b",
    Op.OVERLAP_F_B: "#bcbddc",
    Op.TIE_GRAD: "#d9d9d9",
    Op.REDUCE_GRAD: "#d9d9d9",
}
_DARKER = 0.11  # of the colour, taken off for each further chunk of the rank
_ROW, _BAR, _LEFT, _RIGHT, _HEAD, _AXIS, _LEGEND = 28, 22, 58, 96, 24, 34, 26  # pixels
_MICROSECONDS = 1e6  # Perfetto counts in microseconds


def _label(action: Action, chunks: int) -> str:
    """`F3`, or `2F3` where a rank holds several stages; both halves of a pair."""
    if action.parts:
        return "+".join(_label(part, chunks) for part in action.parts)
    return str(action) if chunks > 1 else str(action)[len(str(action.stage)) :]


def _stages(lane: tuple[Event, ...]) -> list[int]:
    return sorted({single.stage for event in lane for single in event.action.singles})


def _drawn(lane: tuple[Event, ...]) -> list[Event]:
    """Events that take time."""
    return [event for event in lane if event.end > event.start]


def _longest(timelines: tuple[Timeline, ...]) -> float:
    return max(timeline.makespan for timeline in timelines)


# ---- terminal ----------------------------------------------------------------------------------------------------


def table(*timelines: Timeline, columns: int = 240) -> str:
    """One line per rank, time to the right, `.` for idle; at most about `columns` characters.

    The shortest action gets room for its name; where that is too wide, stage and then micro-batch are left out, and
    an action shorter than a character may have none. All timelines have one scale.
    """
    events = [(e, lane) for line in timelines for lane in line.lanes for e in _drawn(lane)]
    if not events:
        return "\n".join(line.name for line in timelines)
    shortest = min(event.end - event.start for event, _ in events)
    longest = max(len(_label(event.action, len(_stages(lane)))) for event, lane in events)
    room = max(1, int(columns * shortest / _longest(timelines)))  # characters of the shortest action
    scale = min(min(room, longest + 1) / shortest, max(columns, 40) / _longest(timelines))
    return "\n\n".join("\n".join([*_lines(line, scale), summary(line)]) for line in timelines)


def _lines(timeline: Timeline, scale: float) -> Iterator[str]:
    for rank, lane in enumerate(timeline.lanes):
        text = ["."] * round(timeline.makespan * scale)
        chunks = len(_stages(lane))
        for event in _drawn(lane):
            first, last = round(event.start * scale), round(event.end * scale)
            text[first:last] = _cell(event.action, chunks, last - first)
        yield f"rank {rank:<3} {''.join(text)}"


def _cell(action: Action, chunks: int, size: int) -> str:
    """The action's name in exactly `size` characters, shortened until it fits; a bar ends it where there is room."""
    names = (_label(action, chunks), _label(action, 1), "+".join(s.op.value for s in action.singles))
    name = next((name for name in names if len(name) <= size), names[-1][:size])
    return name if len(name) == size else name.ljust(size - 1, "-") + "|"


def summary(timeline: Timeline) -> str:
    """The figures in a line."""
    exposed = timeline.exposed_communication
    return (
        f"{timeline.name}: makespan {timeline.makespan:.6g}, bubble {timeline.bubble:.3f}, "
        f"over ideal {timeline.bubble_over_ideal:.3f}, peak activations {timeline.peak_activations:g}"
        + (f", exposed communication {exposed:.3f}" if exposed else "")
    )


# ---- SVG ---------------------------------------------------------------------------------------------------------


def to_svg(*timelines: Timeline, width: int = 1200, unit: str = "") -> str:
    """A standalone SVG picture, `width` pixels of time; each bar has its action and times as a tooltip.

    Lines are messages, from their maker's end to their user's start. unit: what the time axis counts.
    """
    longest = _longest(timelines)
    scale = width / longest if longest else 1.0
    height = _LEGEND + sum(_HEAD + _ROW * len(line.lanes) for line in timelines) + _AXIS
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + width + _RIGHT}" height="{height}" '
        f'font-family="monospace" font-size="11">',
        f'<rect x="0" y="0" width="{_LEFT + width + _RIGHT}" height="{height}" fill="#ffffff"/>',
        *_legend(timelines),
    ]
    top, bottom = _LEGEND, height - _AXIS
    out += _axis(longest, scale, top + _HEAD, bottom, unit)
    for line in timelines:
        out += _panel(line, top, width, scale)
        top += _HEAD + _ROW * len(line.lanes)
    return "\n".join([*out, "</svg>", ""])


def _legend(timelines: tuple[Timeline, ...]) -> Iterator[str]:
    used = {single.op for line in timelines for lane in line.lanes for e in lane for single in e.action.singles}
    x = _LEFT
    for op, name in _NAMES.items():
        if op in used:
            yield f'<rect x="{x}" y="7" width="12" height="12" fill="{_COLOURS[op]}"/>'
            yield f'<text x="{x + 17}" y="17">{name}</text>'
            x += 17 + 7 * len(name) + 20
    yield f'<rect x="{x}" y="7" width="12" height="12" fill="#f0f0f0" stroke="#dddddd"/>'
    yield f'<text x="{x + 17}" y="17">idle</text>'


def _axis(longest: float, scale: float, top: int, bottom: int, unit: str) -> Iterator[str]:
    """Light vertical lines at round times, about ten, with their numbers below."""
    if not longest:
        return
    step = 10.0 ** math.floor(math.log10(longest / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if longest / (step * factor) <= 12)
    for tick in range(int(longest / step) + 1):
        x = _LEFT + tick * step * scale
        yield f'<line x1="{x:.2f}" y1="{top}" x2="{x:.2f}" y2="{bottom + 4}" stroke="#e4e4e4"/>'
        yield (
            f'<text x="{x:.2f}" y="{bottom + 18}" text-anchor="middle" fill="#555555">'
            f"{tick * step:.4g}{' ' + unit if unit and tick == 0 else ''}</text>"
        )


def _panel(timeline: Timeline, top: int, width: int, scale: float) -> Iterator[str]:
    yield f'<text x="4" y="{top + 16}" font-weight="bold">{escape(summary(timeline))}</text>'
    top += _HEAD
    for rank, (lane, bubble) in enumerate(zip(timeline.lanes, timeline.bubble_per_rank, strict=True)):
        y = top + rank * _ROW
        yield f'<text x="4" y="{y + 15}">rank {rank}</text>'
        length = timeline.makespan * scale
        yield f'<rect x="{_LEFT}" y="{y}" width="{length:.2f}" height="{_BAR}" fill="#f0f0f0"/>'
        stages = _stages(lane)
        for event in _drawn(lane):
            yield _bar(event, stages, y, scale)
        yield f'<text x="{_LEFT + width + 6}" y="{y + 15}" fill="#555555">idle {bubble:.1%}</text>'
    uses = {use: event.start for lane in timeline.lanes for event in lane for use in _uses(event)}
    for message in timeline.messages:
        x1 = _LEFT + message.start * scale
        x2 = _LEFT + uses.get(message[:3], message.end) * scale
        down = message.target > message.source
        y1, y2 = (
            top + message.source * _ROW + (_BAR if down else 0),
            top + message.target * _ROW + (0 if down else _BAR),
        )
        if abs(message.target - message.source) == 1:  # others would cross the rows between
            yield (
                f'<line x1="{x1:.2f}" y1="{y1}" x2="{x2:.2f}" y2="{y2}" '
                f'stroke="{"#3182bd" if message.kind == "F" else "#31a354"}" stroke-width="0.7" opacity="0.6"/>'
            )


def _uses(event: Event) -> Iterator[tuple[int, str, int | None]]:
    """The products that the event takes, as the first three fields of a message."""
    for single in event.action.singles:
        if single.op is Op.F:
            yield single.stage - 1, "F", single.microbatch
        elif single.op in BACKWARD:
            yield single.stage + 1, "G", single.microbatch


def _bar(event: Event, stages: list[int], top: int, scale: float) -> str:
    """One action as a rectangle, with its name where it fits (7 pixels a character)."""
    label = _label(event.action, len(stages))
    x, length = _LEFT + event.start * scale, (event.end - event.start) * scale
    waited = f"  waited {event.wait:.6g}" if event.wait else ""
    tip = escape(f"{event.action}  {event.start:.6g} .. {event.end:.6g}{waited}")
    text = f'<text x="{x + 3:.2f}" y="{top + 15}">{escape(label)}</text>' if length > 7 * len(label) else ""
    chunk = stages.index(event.action.singles[0].stage)
    return (
        f'<g><title>{tip}</title><rect x="{x:.2f}" y="{top}" width="{length:.2f}" height="{_BAR}" '
        f'fill="{_shade(_COLOURS[event.action.op], chunk)}" stroke="#ffffff" stroke-width="0.5"/>{text}</g>'
    )


def _shade(colour: str, chunk: int) -> str:
    """The colour of the rank's first chunk, darker for later ones."""
    keep = max(0.4, 1 - _DARKER * 1.5 * chunk)
    return "#" + "".join(f"{int(int(colour[i : i + 2], 16) * keep):02x}" for i in (1, 3, 5))


# ---- Perfetto ----------------------------------------------------------------------------------------------------


def to_perfetto(*timelines: Timeline, unit_s: float = 1.0) -> str:
    """Chrome trace JSON: a process per timeline, a track per rank, an arrow per message; times in unit_s seconds."""
    events: list[dict[str, object]] = []
    for pid, timeline in enumerate(timelines):
        events += _trace(timeline, pid, unit_s * _MICROSECONDS)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _trace(timeline: Timeline, pid: int, scale: float) -> Iterator[dict[str, object]]:
    yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": timeline.name}}
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}
    made: dict[tuple[int, str, int | None], float] = {}
    used: dict[tuple[int, str, int | None], float] = {}
    for rank, lane in enumerate(timeline.lanes):
        yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": rank, "args": {"name": f"rank {rank}"}}
        for event in lane:
            start, length = event.start * scale, (event.end - event.start) * scale
            args = {"wait_us": event.wait * scale, "exposed_us": event.exposed * scale}
            name, kind = str(event.action), event.action.op.value
            yield {
                "name": name, "cat": kind, "ph": "X", "pid": pid, "tid": rank, "ts": start, "dur": length,
                "args": args,
            }  # fmt: skip
            middle = start + length / 2  # an arrow is tied to the slice that its time lies in
            used |= dict.fromkeys(_uses(event), middle)
            for single in event.action.singles:
                if single.op is Op.F or single.op in BACKWARD:
                    made[single.stage, "F" if single.op is Op.F else "G", single.microbatch] = middle
    for index, message in enumerate(timeline.messages):
        key, ends = message[:3], ((message.source, made), (message.target, used))
        for phase, (rank, times) in zip(("s", "f"), ends, strict=True):
            yield {
                "name": f"{message.stage}{message.kind}{message.microbatch}", "cat": "message", "ph": phase,
                "bp": "e", "id": pid << 32 | index, "pid": pid, "tid": rank, "ts": times[key],
            }  # fmt: skip
