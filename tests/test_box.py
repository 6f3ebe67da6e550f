"""Boxes: intersections, flat ranges, spans and coverage, against plain index sets over small tensors."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.ckpt.box import (
    Box,
    contains,
    cover_error,
    find_overlap,
    flat_boxes,
    full_box,
    intersect,
    is_contiguous,
    parts_of,
    spans,
    strides_of,
)

SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def shape_and_box(draw):
    shape = draw(SHAPES)
    offset = tuple(draw(st.integers(0, n)) for n in shape)
    return shape, Box(offset, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True)))


def indices(shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor whose elements are their own row-major position."""
    return torch.arange(prod(shape)).reshape(shape)


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]


@given(shape_and_box(), st.data())
def test_intersection_holds_the_common_elements(case, data):
    shape, a = case
    offset = tuple(data.draw(st.integers(0, n)) for n in shape)
    b = Box(offset, tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True)))
    whole = indices(shape)
    common = set(cut(whole, a).flatten().tolist()) & set(cut(whole, b).flatten().tolist())
    found = intersect(a, b)
    assert (set() if found is None else set(cut(whole, found).flatten().tolist())) == common
    assert intersect(b, a) == found


@given(SHAPES, st.data())
def test_flat_range_becomes_few_boxes_that_hold_it_in_order(shape, data):
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    parts = flat_boxes(shape, start, stop)
    assert len(parts) <= max(1, 2 * len(shape) - 1)
    at = 0
    elements = []
    for part in parts:
        assert part.start == at
        at += part.box.numel
        elements += cut(indices(shape), part.box).flatten().tolist()
    assert elements == list(range(start, stop))


@given(shape_and_box(), st.integers(0, 40), st.integers(1, 60))
def test_spans_hold_the_box_and_nothing_twice(case, max_gap, max_length):
    shape, box = case
    if box.numel == 0:
        return
    whole = indices(shape)
    seen = []
    for span in spans(shape, box, max_gap, max_length):
        flat = whole.flatten()[span.start : span.start + span.length]
        view = torch.as_strided(flat, span.box.shape, strides_of(shape), flat.storage_offset())
        assert torch.equal(view, cut(whole, span.box))
        seen += view.flatten().tolist()
        if not is_contiguous(shape, span.box):
            assert span.length <= max_length
    assert sorted(seen) == cut(whole, box).flatten().tolist()


@given(shape_and_box())
def test_contiguous_means_one_run_of_memory(case):
    shape, box = case
    if box.numel == 0:
        return
    flat = cut(indices(shape), box).flatten()
    assert is_contiguous(shape, box) == bool((flat == torch.arange(int(flat[0]), int(flat[0]) + len(flat))).all())


@given(SHAPES, st.integers(1, 7), st.data())
def test_any_cut_into_flat_ranges_covers_exactly_once(shape, count, data):
    cuts = sorted(data.draw(st.integers(0, prod(shape))) for _ in range(count - 1))
    edges = [0, *cuts, prod(shape)]
    boxes = [p.box for a, b in zip(edges, edges[1:], strict=False) for p in parts_of(full_box(shape), (a, b))]
    assert cover_error(shape, boxes) is None
    if boxes:
        assert cover_error(shape, boxes[1:]) is not None
        assert "overlap" in str(cover_error(shape, [*boxes, boxes[0]]))


def test_a_box_outside_is_named():
    assert "not inside" in str(cover_error((4, 4), [Box((0, 0), (4, 5))]))
    assert "8 of 16 elements are in no piece" in str(cover_error((4, 4), [Box((0, 0), (2, 4))]))


@pytest.mark.parametrize("ranks", [4, 5, 7])
def test_six_rows_over_more_ranks_leave_empty_boxes_that_are_legal(ranks):
    rows = -(-6 // ranks)
    starts = [min(6, rank * rows) for rank in range(ranks)]
    boxes = [Box((s, 0), (min(6, s + rows) - s, 3)) for s in starts]
    assert any(box.numel == 0 for box in boxes)
    assert cover_error((6, 3), boxes) is None
    assert all(contains(full_box((6, 3)), box) for box in boxes)


def test_overlap_search_is_linear_for_a_grid_of_many_columns():
    """512 ranks x 2000 tensors must plan in about a second: a column cut must not compare all pairs."""
    calls = 0
    boxes = [Box((0, 8 * i), (16, 8)) for i in range(512)]

    class Counted(Box):
        __slots__ = ()

        @property
        def shape(self):  # type: ignore[override]
            nonlocal calls
            calls += 1
            return self[1]

    assert find_overlap([Counted(*box) for box in boxes]) is None
    assert calls < 20 * len(boxes)


def test_wrong_flat_range_and_dims_are_refused():
    with pytest.raises(ValueError, match=r"flat range \[2, 9\) is not inside 6"):
        flat_boxes((2, 3), 2, 9)
    with pytest.raises(ValueError, match="boxes of 1 and 2 dims"):
        intersect(Box((0,), (1,)), Box((0, 0), (1, 1)))
