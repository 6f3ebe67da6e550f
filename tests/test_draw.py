"""Pictures of timelines: what they show, and that they are well formed."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from plait.parallel.schedules import gpipe, interleaved, one_f_one_b, parse_csv
from plait.parallel.schedules.draw import table, to_perfetto
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
