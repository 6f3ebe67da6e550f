"""Pictures of timelines: what they show, and that they are well formed."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from plait.parallel.schedules import Costs, gpipe, interleaved, one_f_one_b, parse_csv
from plait.parallel.schedules.draw import table, to_perfetto, to_svg
from tests.torch_schedules import torch_csv

MAKERS = [
    lambda: gpipe(2, 3),
    lambda: one_f_one_b(4, 8),
    lambda: interleaved(4, 2, 8),
    lambda: parse_csv(torch_csv("ScheduleZBVZeroBubble", 4, 2, 8)),
    lambda: parse_csv(torch_csv("ScheduleDualPipeV", 4, 2, 8)),
    lambda: one_f_one_b(2, 2).with_tied(),
]


def test_table_is_the_papers_picture():
    assert gpipe(2, 2).simulate().table().splitlines() == [
        "rank 0   F0|F1|.........B0---|B1---|",
        "rank 1   ...F0|F1|B0---|B1---|......",
        "gpipe: makespan 9, bubble 0.333, over ideal 0.500, peak activations 2",
    ]


def test_narrow_table_drops_stage_then_microbatch():
    timeline = interleaved(2, 2, 2).simulate()
    assert table(timeline).splitlines()[0].startswith("rank 0   0F0|0F1|2F0|2F1|")
    assert table(timeline, columns=40).splitlines()[0].startswith("rank 0   F0F1F0F1")
    assert table(timeline, columns=20).splitlines()[0].startswith("rank 0   FFFF")


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("columns", [30, 100, 300])
def test_every_row_of_a_table_is_as_long_as_the_makespan(make, columns):
    schedule = make()
    rows = table(schedule.simulate(), columns=columns).splitlines()[: schedule.num_ranks]
    assert len({len(row) for row in rows}) == 1 and len(rows[0]) <= max(columns, 100) + 9


@pytest.mark.parametrize("make", MAKERS)
def test_svg_has_one_bar_per_computing_action_inside_the_picture(make):
    timeline = make().simulate()
    root = ElementTree.fromstring(timeline.to_svg())
    titles = [node.text for node in root.iter("{http://www.w3.org/2000/svg}title")]
    drawn = [str(e.action) for lane in timeline.lanes for e in lane if e.end > e.start]
    assert [title.split()[0] for title in titles] == drawn
    width = float(root.attrib["width"])
    for bar in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(bar.attrib["x"]) + float(bar.attrib["width"]) <= width


@pytest.mark.parametrize("make", MAKERS)
def test_perfetto_trace_has_a_track_per_rank(make):
    schedule = make()
    timeline = schedule.simulate()
    events = json.loads(to_perfetto(timeline, unit_s=0.5))["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == sum(len(lane) for lane in timeline.lanes)
    assert {e["tid"] for e in spans} == set(range(schedule.num_ranks))
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(timeline.makespan * 0.5e6)


# ---- plan and run on one scale -----------------------------------------------------------------------------------

PLAN = one_f_one_b(3, 4).simulate(Costs(send=0.25))
SLOWER = one_f_one_b(3, 4).simulate(Costs(forward=1.5, backward=3.0, send=0.5))


def test_two_tables_have_one_scale():
    first, second = table(PLAN, SLOWER, columns=200).split("\n\n")
    rows = [text.splitlines() for text in (first, second)]
    assert [len(part) for part in rows] == [4, 4]
    assert f"1f1b: makespan {PLAN.makespan:g}" in rows[0][-1] and "exposed communication 0.042" in rows[0][-1]
    lengths = [len(part[0]) - len("rank 0   ") for part in rows]
    assert lengths[0] / lengths[1] == pytest.approx(PLAN.makespan / SLOWER.makespan, abs=0.02)


def test_a_tiny_action_does_not_blow_the_table_up():
    """A measured W of microseconds beside an F of milliseconds once asked for a line of thousands of characters."""
    timeline = parse_csv("0F0,0I0,0W0\n").simulate(Costs(1.0, 1.0, 1.0, 1e-6))
    row = table(timeline, columns=100).splitlines()[0]
    assert len(row) <= 110 and "F0" in row and "I0" in row


def test_svg_of_two_has_both_on_one_axis():
    root = ElementTree.fromstring(to_svg(PLAN, SLOWER, width=600, unit="s"))
    space = "{http://www.w3.org/2000/svg}"
    bars = [group.find(f"{space}rect") for group in root.iter(f"{space}g")]
    assert len(bars) == 2 * 3 * 8
    ends = [float(bar.attrib["x"]) + float(bar.attrib["width"]) - 58 for bar in bars]
    assert max(ends[24:]) == pytest.approx(600, abs=0.1)
    assert max(ends[:24]) == pytest.approx(600 * PLAN.makespan / SLOWER.makespan, abs=0.1)
    texts = ["".join(node.itertext()) for node in root.iter(f"{space}text")]
    assert "0 s" in texts and "forward" in texts and "backward" in texts and "weight gradient" not in texts
    assert sum(text.startswith("idle ") for text in texts) == 2 * 3
    assert {node.attrib["y"] for node in root.iter(f"{space}rect")} >= {"50", "158"}  # below each other


@pytest.mark.parametrize("make", MAKERS)
def test_svg_lines_are_messages_that_do_not_go_back_in_time(make):
    timeline = make().simulate()
    space = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(timeline.to_svg())
    lines = [line for line in root.iter(f"{space}line") if "opacity" in line.attrib]
    near = [m for m in timeline.messages if abs(m.source - m.target) == 1]
    assert len(lines) == len(near) and all(float(line.attrib["x2"]) >= float(line.attrib["x1"]) for line in lines)


def test_perfetto_of_two_has_two_processes_and_arrows_between_slices():
    events = json.loads(to_perfetto(PLAN, SLOWER))["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    slices = {(e["pid"], e["tid"]): [] for e in events if e["ph"] == "X"}
    for e in events:
        if e["ph"] == "X":
            slices[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    arrows = [e for e in events if e.get("cat") == "message"]
    assert len(arrows) == 2 * (len(PLAN.messages) + len(SLOWER.messages)) == 2 * 2 * 16
    for arrow in arrows:  # an arrow that lies in no slice is not drawn
        assert any(start < arrow["ts"] < end for start, end in slices[arrow["pid"], arrow["tid"]])
    starts, ends = ({a["id"]: a for a in arrows if a["ph"] == phase} for phase in "sf")
    assert starts.keys() == ends.keys() and all(ends[i]["ts"] > starts[i]["ts"] for i in starts)
