"""Draws a timeline, planned or measured: text for the terminal, SVG, and a trace for ui.perfetto.dev. Computes nothing.

Colours follow the papers' pictures: forward blue, backward green, input gradient teal, weight gradient orange.
"""

from __future__ import annotations

import json
from xml.sax.saxutils import escape

from plait.parallel.schedules.action import COMPUTE, Action, Op
from plait.parallel.schedules.simulate import Event, Timeline

_COLOURS = {
    Op.F: "#9ecae1",
    Op.B: "#a1d99b",
    Op.I: "#80cdc1",
    Op.W: "#fdae6b",
    Op.OVERLAP_F_B: "#bcbddc",
    Op.TIE_GRAD: "#d9d9d9",
    Op.REDUCE_GRAD: "#d9d9d9",
}
_ROW, _BAR, _LEFT, _TOP = 26, 22, 58, 26  # pixels
_MICROSECONDS = 1e6  # Perfetto counts in microseconds


def _label(action: Action, chunks: int) -> str:
    """`F3`, or `2F3` where a rank holds several stages; both halves of a pair."""
    if action.parts:
        return "+".join(_label(part, chunks) for part in action.parts)
    return str(action) if chunks > 1 else str(action)[len(str(action.stage)) :]


def _stages(lane: tuple[Event, ...]) -> int:
    return len({single.stage for event in lane for single in event.action.singles})


def _drawn(lane: tuple[Event, ...]) -> list[Event]:
    """Events that take time."""
    return [event for event in lane if event.end > event.start]


def table(timeline: Timeline, *, columns: int = 120) -> str:
    """One line per rank, time to the right, `.` for idle; action names where they fit.

    A cell is the shortest computing action or what makes the picture `columns` wide, whichever is longer.
    """
    actions = [e for lane in timeline.lanes for e in _drawn(lane) if any(s.op in COMPUTE for s in e.action.singles)]
    if not actions:
        return timeline.name
    width = max(len(_label(e.action, _stages(lane))) for lane in timeline.lanes for e in _drawn(lane)) + 1
    shortest = min(e.end - e.start for e in actions)
    cell = max(shortest, timeline.makespan * width / columns)  # time of one cell of `width` characters
    lines = []
    for rank, lane in enumerate(timeline.lanes):
        text = ["."] * (round(timeline.makespan / cell * width) + 1)
        for event in _drawn(lane):
            first = round(event.start / cell * width)
            last = max(first + 1, round(event.end / cell * width))
            name = _label(event.action, _stages(lane))[: last - first]
            text[first:last] = list(name.ljust(last - first, " " if len(name) + 1 > last - first else "-"))
            text[last - 1] = "|" if last - first > len(name) else text[last - 1]
        lines.append(f"rank {rank:<3} {''.join(text).rstrip('.')}")
    return "\n".join([*lines, _summary(timeline)])


def _summary(timeline: Timeline) -> str:
    return (
        f"{timeline.name}: makespan {timeline.makespan:g}, bubble {timeline.bubble:.3f}, "
        f"over ideal {timeline.bubble_over_ideal:.3f}, peak activations {timeline.peak_activations:g}"
    )


def to_svg(timeline: Timeline, *, width: int = 1200) -> str:
    """A standalone SVG picture, `width` pixels of time; each bar has its action and times as a tooltip."""
    scale = width / timeline.makespan if timeline.makespan else 1.0
    height = _TOP + _ROW * len(timeline.lanes) + 6
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + width + 8}" height="{height}" '
        f'font-family="monospace" font-size="11">',
        f'<text x="4" y="16">{escape(_summary(timeline))}</text>',
    ]
    for rank, lane in enumerate(timeline.lanes):
        top = _TOP + rank * _ROW
        out.append(f'<text x="4" y="{top + 15}">rank {rank}</text>')
        out.append(f'<rect x="{_LEFT}" y="{top}" width="{width}" height="{_BAR}" fill="#f4f4f4"/>')
        for event in _drawn(lane):
            out.append(_bar(event, _label(event.action, _stages(lane)), top, scale))
    return "\n".join([*out, "</svg>", ""])


def _bar(event: Event, label: str, top: int, scale: float) -> str:
    """One action as a rectangle, with its name where it fits (7 pixels a character)."""
    x, length = _LEFT + event.start * scale, (event.end - event.start) * scale
    tip = escape(f"{event.action}  {event.start:g} .. {event.end:g}")
    text = f'<text x="{x + 3:.2f}" y="{top + 15}">{escape(label)}</text>' if length > 7 * len(label) else ""
    return (
        f'<g><title>{tip}</title><rect x="{x:.2f}" y="{top}" width="{length:.2f}" height="{_BAR}" '
        f'fill="{_COLOURS[event.action.op]}" stroke="#ffffff"/>{text}</g>'
    )


def to_perfetto(timeline: Timeline, *, unit_s: float = 1.0) -> str:
    """Chrome trace JSON, one track per rank; times of the timeline are in units of `unit_s` seconds."""
    events: list[dict[str, object]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": timeline.name}}]
    for rank, lane in enumerate(timeline.lanes):
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
        for event in lane:
            events.append(
                {
                    "name": str(event.action),
                    "cat": event.action.op.value,
                    "ph": "X",
                    "pid": 0,
                    "tid": rank,
                    "ts": event.start * unit_s * _MICROSECONDS,
                    "dur": (event.end - event.start) * unit_s * _MICROSECONDS,
                    "args": {"wait": event.wait},
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
