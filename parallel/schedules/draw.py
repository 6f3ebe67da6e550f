"""Draws a timeline, planned or measured: text for the terminal, SVG, a trace for ui.perfetto.dev. Computes nothing.

Colours follow the papers' pictures: forward blue, backward green, input gradient teal, weight gradient orange.
"""

from __future__ import annotations

import json
from xml.sax.saxutils import escape

from plait.parallel.schedules.action import Action, Op
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


def table(timeline: Timeline, *, columns: int = 240) -> str:
    """One line per rank, time to the right, `.` for idle; at most about `columns` characters.

    The shortest action gets room for its name; where that is too wide, stage and then micro-batch are left out.
    """
    drawn = [e for lane in timeline.lanes for e in _drawn(lane)]
    if not drawn:
        return timeline.name
    shortest = min(event.end - event.start for event in drawn)
    room = max(1, int(columns * shortest / timeline.makespan))  # characters of the shortest action
    longest = max(len(_label(e.action, _stages(lane))) for lane in timeline.lanes for e in _drawn(lane))
    scale = min(room, longest + 1) / shortest
    lines = []
    for rank, lane in enumerate(timeline.lanes):
        text = ["."] * round(timeline.makespan * scale)
        for event in _drawn(lane):
            first, last = round(event.start * scale), round(event.end * scale)
            text[first:last] = _cell(event.action, _stages(lane), last - first)
        lines.append(f"rank {rank:<3} {''.join(text)}")
    return "\n".join([*lines, _summary(timeline)])


def _cell(action: Action, chunks: int, size: int) -> str:
    """The action's name in exactly `size` characters, shortened until it fits; a bar ends it where there is room."""
    names = (_label(action, chunks), _label(action, 1), "+".join(s.op.value for s in action.singles))
    name = next((name for name in names if len(name) <= size), names[-1][:size])
    return name if len(name) == size else name.ljust(size - 1, "-") + "|"


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
