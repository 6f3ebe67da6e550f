"""The search: sound, within its limit, never worse than a named one, as good as the zero-bubble paper's own."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.parallel.cli import main
from plait.parallel.schedules import NAMES, Costs, Op, ScheduleError, build, held, search, zb_h1
from plait.parallel.schedules.action import singles
from plait.parallel.schedules.costs import LayerCosts, Part, peak_memory, shared

# The paper's 1.5B model: what W keeps of what F kept, from its formulas 32 s b h and (34 h + 5 a s) s b with
# h = 2304, a = 24, s = 1024.
DEFERRED = 32 * 2304 / (34 * 2304 + 5 * 24 * 1024)
PAPER = {24: (18.522, 18.086, 9.337, 0.601), 64: (18.546, 18.097, 9.321, 0.762)}


def paper_costs(num_microbatches: int) -> Costs:
    forward, backward_input, weight, send = PAPER[num_microbatches]
    return Costs(forward, backward_input + weight, backward_input, weight, send)


@pytest.mark.parametrize(
    "num_microbatches, limit, published, allowed",
    [(24, 8, 0.1585, 0.0), (24, 16, 0.0433, 0.002), (64, 8, 0.0674, 0.0), (64, 16, 0.0026, 0.002)],
)
def test_reaches_the_papers_automatic_schedules(num_microbatches, limit, published, allowed):
    """ZB-1p at memory p and ZB-2p at 2p, one stage per rank, p = 8."""
    costs = paper_costs(num_microbatches)
    found = search(8, num_microbatches, costs, memory_limit=limit, deferred=DEFERRED, chunks=(1,), objective="span")
    assert max(held(found, DEFERRED)) <= limit + 1e-9
    assert round(found.simulate(costs).span_bubble, 4) <= published + allowed


@st.composite
def problem(draw):
    p, m, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 9)), draw(st.sampled_from([(1,), (2,), (1, 2)]))
    times = st.floats(0.5, 3.0)
    forward, backward_input, weight = draw(times), draw(times), draw(times)
    costs = Costs(forward, backward_input + weight, backward_input, weight, draw(st.floats(0.0, 1.0)))
    return p, m, chunks, costs, draw(st.floats(1.0, 2.0 * p)), draw(st.floats(0.0, 1.0)), draw(st.booleans())


@settings(max_examples=40, deadline=None)
@given(problem())
def test_is_sound_fits_and_is_never_worse_than_a_named_one(case):
    p, m, chunks, costs, limit, deferred, split = case
    found = search(p, m, costs, memory_limit=limit, deferred=deferred, split=split, chunks=chunks)
    found.check()
    assert max(held(found, deferred)) <= limit + 1e-9
    if not split:
        assert {single.op for lane in found.lanes for single in singles(lane)} == {Op.F, Op.B, Op.REDUCE_GRAD}
    makespan = found.simulate(shared(costs, found)).makespan
    for name in NAMES:
        for count in chunks:
            try:
                named = build(name, p, m, count)
            except ValueError:
                continue
            needs_split = any(single.op is Op.W for lane in named.lanes for single in singles(lane))
            if max(held(named, deferred)) <= limit and (split or not needs_split):
                assert makespan <= named.simulate(shared(costs, named)).makespan + 1e-6, named.name


def test_lists_fix_the_stages_and_uneven_ones_are_priced():
    """A head on the last stage that costs as much as three layers."""
    costs = Costs([1, 1, 1, 4], [2, 2, 2, 8], [1, 1, 1, 4], [1, 1, 1, 4], 0.1)
    found = search(4, 8, costs, memory_limit=6)
    assert found.num_stages == 4
    assert found.simulate(costs).makespan <= zb_h1(4, 8).simulate(costs).makespan
    two = search(2, 8, costs, memory_limit=6)
    assert two.num_stages == 4 and two.num_ranks == 2


@pytest.mark.parametrize("split", [False, True])
def test_more_chunks_are_tried_where_they_are_asked_for(split):
    """Interleaved with four chunks is better than with two where backward is whole and memory is there."""
    best = min(build("interleaved", 4, 8, chunks).simulate().makespan for chunks in (1, 2, 4))
    found = search(4, 8, memory_limit=8, split=split, chunks=(1, 2, 4))
    assert found.simulate().makespan <= best == 26.25


def test_a_named_schedule_is_the_answer_where_no_list_is_as_good():
    """Random problems rarely have one; here the best list takes 31.5."""
    costs = Costs(2, 3, 2, 1, 0)
    found = search(2, 6, costs, memory_limit=2, chunks=(2,))
    assert found.name == "search(zb_v)" and found.simulate(shared(costs, found)).makespan == pytest.approx(31)


def test_the_shortest_span_is_not_the_shortest_makespan():
    costs = Costs(1, 3, 1, 2, 0.1)

    def figures(objective: str) -> tuple[float, float]:
        line = search(4, 8, costs, memory_limit=6, chunks=(1,), objective=objective).simulate(costs)
        return line.makespan, max(lane[-1].end - lane[0].start for lane in line.lanes)

    by_makespan, by_span = figures("makespan"), figures("span")
    assert by_makespan[0] < by_span[0] and by_span[1] < by_makespan[1]


def test_of_equal_times_the_least_memory_is_taken():
    """GPipe is as quick as 1F1B and fits, but holds twice as much."""
    found = search(4, 8, memory_limit=8, split=False, chunks=(1,))
    assert found.simulate().makespan == 33 and max(held(found)) == 4


def test_held_counts_queued_weight_gradients():
    assert held(zb_h1(4, 8), 0.0) == (4, 3, 2, 1)
    assert held(zb_h1(4, 8), 1.0) == (4, 4, 4, 4)


@pytest.mark.parametrize("split", [False, [True, False, True, True], [True] * 4])
def test_a_stage_that_cannot_split_is_never_asked_to(split):
    """Whatever the prices say: with a flag per stage only those that can have I and W."""
    found = search(4, 6, Costs(1, 3, 1, 2, split=split), memory_limit=8, chunks=(1,))
    can = [split] * 4 if isinstance(split, bool) else split
    asked = {single.stage for lane in found.lanes for single in singles(lane) if single.op in (Op.I, Op.W)}
    assert asked <= {stage for stage in range(4) if can[stage]}
    assert bool(asked) == any(can)
    assert [stage for stage in range(4) if can[stage]] == sorted(asked)


def test_memory_may_have_a_unit_of_its_own():
    """Megabytes a stage: the default limit is P micro-batches of each rank's own stages, a limit counts the same."""
    costs = LayerCosts(4, Part(1, 1, 1, 10), Part(activation=3), Part(1, 1, 1, 50), deferred=0.5)
    found = search(4, 8, costs, chunks=(1,))
    sizes = [13, 10, 10, 60]
    peaks = peak_memory(found, shared(costs, found))
    assert all(peak <= 4 * size for peak, size in zip(peaks, sizes, strict=True))
    tight = search(4, 8, costs, chunks=(1,), memory_limit=60)
    assert max(peak_memory(tight, shared(costs, tight))) <= 60
    with pytest.raises(ScheduleError, match="memory_limit=59; the least .* is 60 in the unit"):
        search(4, 8, costs, chunks=(1,), memory_limit=59)


def test_layers_are_cut_for_each_number_of_chunks():
    """Eight layers and a head of two: with two chunks a rank the head weighs less on the busiest rank."""
    costs = LayerCosts(8, Part(1, 1, 1), head=Part(2, 2, 2))
    found = search(2, 6, costs, chunks=(1, 2))
    assert found.num_stages in (2, 4)
    assert found.simulate(shared(costs, found)).makespan <= zb_h1(2, 6).simulate(shared(costs, zb_h1(2, 6))).makespan
    with pytest.raises(ValueError, match="1 layers are fewer than the stages of 2 ranks"):
        search(2, 4, LayerCosts(1, Part(1, 1, 1)))


def test_a_limit_per_rank_is_kept():
    limits = [4.0, 2.0, 4.0, 4.0]
    found = search(4, 8, memory_limit=limits, chunks=(1,))
    assert all(peak <= limit for peak, limit in zip(held(found), limits, strict=True))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"memory_limit": 0.3}, "nothing fits memory_limit=0.3; the least that was seen to be needed is"),
        ({"memory_limit": [1.0]}, "memory_limit has 1 entries for 2 ranks"),
        ({"objective": "memory"}, "objective='memory': valid are makespan, span"),
        ({"deferred": 1.5}, "deferred=1.5"),
        ({"costs": Costs([1, 1, 1], 2, 1, 1)}, "lists for 3 stages; num_ranks=2 must divide them"),
        ({"costs": Costs([1, 1], [2, 2, 2], 1, 1)}, "lists for 2 and 3 stages; they must agree"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments, message):
    with pytest.raises((ScheduleError, ValueError), match=message.replace("[", r"\[")):
        search(2, 4, **arguments)


def test_command_line_compares_and_searches(capsys, tmp_path):
    assert main(["compare", "--ranks", "4", "--microbatches", "8", "--costs", "1,1,1,0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(NAMES) and lines[1].split()[:2] == ["zb_v", "26.8"]
    table = tmp_path / "found.csv"
    asked = ["search", "--ranks", "2", "--microbatches", "4", "--memory", "2", "--csv", str(table)]
    assert main(asked) == 0
    assert "held at most 2 micro-batches" in capsys.readouterr().out
    assert main(["compare", "1f1b", str(table), "--ranks", "2", "--microbatches", "4"]) == 0
    assert main([*asked, "--no-split"]) == 0
    capsys.readouterr()
    assert (
        main(["search", "--ranks", "2", "--microbatches", "4", "--chunks", "1,4", "--memory", "2.5,2", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["stages"] in (2, 8) and found["peak_memory"][0] <= 2.5 and found["peak_memory"][1] <= 2
    assert main(["search", "--ranks", "2", "--microbatches", "4", "--memory", "0.2"]) == 1
    assert "nothing fits" in capsys.readouterr().err
