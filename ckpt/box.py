"""Boxes: axis-aligned blocks of a full tensor, and the arithmetic that moves data from any grid to any grid.

Pure integer maths, no tensors, no files. The one idea: whatever a rank holds (a shard, or a flat range of a shard) is
a list of boxes of the full tensor, each of which lies contiguously, row-major, in what the rank holds. Saving,
checking coverage and restoring are then all intersections of boxes.

All offsets and shapes are in elements. A box of a 0-dim tensor is ((), ()), with one element. Empty boxes are legal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

Shape = tuple[int, ...]


class Box(NamedTuple):
    """The elements offset[d] <= index[d] < offset[d] + shape[d] of a full tensor."""

    offset: Shape
    shape: Shape

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def shifted(self, by: Sequence[int]) -> Box:
        """Returns the box moved by `by`, for instance from coordinates of a shard to those of the full tensor."""
        return Box(tuple(o + b for o, b in zip(self.offset, by, strict=True)), self.shape)


class Part(NamedTuple):
    """A box of the full tensor and where its row-major elements begin in the memory that holds it."""

    box: Box
    start: int


class Span(NamedTuple):
    """Elements [start, start + length) of a row-major array; `box` of that array lies inside, row-major strided."""

    start: int
    length: int
    box: Box


def full_box(shape: Sequence[int]) -> Box:
    """Returns the box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def strides_of(shape: Sequence[int]) -> Shape:
    """Returns row-major strides in elements; an empty dim counts as one."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


def contains(outer: Box, inner: Box) -> bool:
    """True when every index of `inner` (also of an empty one) is a legal index or end of `outer`."""
    if len(outer.shape) != len(inner.shape):
        return False
    ends = zip(outer.offset, outer.shape, inner.offset, inner.shape, strict=True)
    return all(o <= i and i + n <= o + s for o, s, i, n in ends)


def intersect(a: Box, b: Box) -> Box | None:
    """Returns the common box, or None when there is no common element. ValueError on different numbers of dims."""
    if len(a.shape) != len(b.shape):
        raise ValueError(f"boxes of {len(a.shape)} and {len(b.shape)} dims have no intersection")
    offset = tuple(map(max, a.offset, b.offset))
    ends = (min(p + m, q + n) for p, m, q, n in zip(a.offset, a.shape, b.offset, b.shape, strict=True))
    shape = tuple(e - o for e, o in zip(ends, offset, strict=True))
    return Box(offset, shape) if all(n > 0 for n in shape) else None


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Part]:
    """Cuts elements [start, stop) of a row-major array into boxes: at most 2n - 1 of them for n dims.

    Each part's `start` counts from `start`: where the box begins in an array that holds just the range. In order.
    """
    shape = tuple(shape)
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"flat range [{start}, {stop}) is not inside {prod(shape)} elements of shape {shape}")
    if start == stop:
        return []
    if not shape:
        return [Part(Box((), ()), 0)]
    return [Part(box, at - start) for box, at in _flat_boxes(shape, start, stop, 0)]


def _flat_boxes(shape: Shape, start: int, stop: int, base: int) -> Iterator[tuple[Box, int]]:
    """Yields (box, absolute element) of [start, stop): a ragged head, whole rows, a ragged tail; recursive by dim."""
    row = prod(shape[1:])
    if len(shape) == 1 or (start % row == 0 and stop % row == 0):
        first, count = start // row, (stop - start) // row
        yield Box((first, *(0,) * (len(shape) - 1)), (count, *shape[1:])), base + start
        return
    first, last = start // row, (stop - 1) // row
    if first == last:
        yield from _inside_row(shape, first, start - first * row, stop - first * row, base + first * row)
        return
    whole_from, whole_to = -(-start // row), stop // row
    if start % row:
        yield from _inside_row(shape, first, start % row, row, base + first * row)
    if whole_to > whole_from:
        yield from _flat_boxes(shape, whole_from * row, whole_to * row, base)
    if stop % row:
        yield from _inside_row(shape, whole_to, 0, stop % row, base + whole_to * row)


def _inside_row(shape: Shape, index: int, start: int, stop: int, base: int) -> Iterator[tuple[Box, int]]:
    for box, at in _flat_boxes(shape[1:], start, stop, base):
        yield Box((index, *box.offset), (1, *box.shape)), at


def parts_of(box: Box, flat: tuple[int, int] | None) -> list[Part]:
    """Returns what a piece holds as boxes of the full tensor: the whole box, or flat elements [a, b) of it."""
    if flat is None:
        return [Part(box, 0)] if box.numel else []
    return [Part(p.box.shifted(box.offset), p.start) for p in flat_boxes(box.shape, *flat)]


def is_contiguous(shape: Sequence[int], box: Box) -> bool:
    """True when the box's elements lie next to each other in a row-major array of this shape."""
    inner = True  # every dim seen so far, from the last, is taken whole
    for size, count in zip(reversed(shape), reversed(box.shape), strict=True):
        if not inner and count > 1:
            return False
        inner = inner and count == size
    return True


def spans(shape: Sequence[int], box: Box, max_gap: int, max_length: int) -> Iterator[Span]:
    """Cuts a box of a row-major array into spans worth one read each.

    A contiguous box is one span of any length. Else rows are joined while what lies between them is at most
    `max_gap` elements and the span at most `max_length`, or taken one by one.
    """
    strides = strides_of(shape)
    start = sum(o * s for o, s in zip(box.offset, strides, strict=True))
    length = sum((n - 1) * s for n, s in zip(box.shape, strides, strict=True)) + 1
    if is_contiguous(shape, box):
        yield Span(start, length, box)
        return
    dim = next(d for d, n in enumerate(box.shape) if n > 1)
    row_length = length - (box.shape[dim] - 1) * strides[dim]
    rows = 1
    if strides[dim] - row_length <= max_gap:
        rows = max(1, 1 + (max_length - row_length) // strides[dim])
    if rows >= box.shape[dim] and _gaps_fit(strides, box.shape, max_gap):
        yield Span(start, length, box)
        return
    if not _gaps_fit(strides, (*(1,) * (dim + 1), *box.shape[dim + 1 :]), max_gap):
        rows = 1
    for first in range(0, box.shape[dim], rows):
        offset = (*box.offset[:dim], box.offset[dim] + first, *box.offset[dim + 1 :])
        count = min(rows, box.shape[dim] - first)
        yield from spans(shape, Box(offset, (*box.shape[:dim], count, *box.shape[dim + 1 :])), max_gap, max_length)


def _gaps_fit(strides: Shape, counts: Sequence[int], max_gap: int) -> bool:
    """True when no two neighbouring runs of the box are further apart than `max_gap`."""
    length = 1
    for stride, count in zip(reversed(strides), reversed(counts), strict=True):
        if count > 1 and stride - length > max_gap:
            return False
        length += (count - 1) * stride
    return True


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Returns the positions of two boxes with a common element, or None.

    A sweep along the dim with most different offsets: close to linear for the grids that shards come from.
    """
    live = [i for i, box in enumerate(boxes) if box.numel]
    if len(live) < 2:
        return None
    dims = range(len(boxes[live[0]].shape))
    if not dims:
        return live[0], live[1]
    sweep = max(dims, key=lambda d: len({boxes[i].offset[d] for i in live}))
    active: list[int] = []
    for i in sorted(live, key=lambda i: boxes[i].offset[sweep]):
        begin = boxes[i].offset[sweep]
        active = [j for j in active if boxes[j].offset[sweep] + boxes[j].shape[sweep] > begin]
        for j in active:
            if intersect(boxes[i], boxes[j]) is not None:
                return j, i
        active.append(i)
    return None


def cover_error(full_shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Returns why the boxes do not fill the full tensor exactly once, or None when they do."""
    whole = full_box(full_shape)
    for box in boxes:
        if not contains(whole, box):
            return f"box {box.offset}+{box.shape} is not inside the full shape {tuple(full_shape)}"
    pair = find_overlap(boxes)
    if pair is not None:
        a, b = boxes[pair[0]], boxes[pair[1]]
        return f"boxes {a.offset}+{a.shape} and {b.offset}+{b.shape} overlap"
    covered = sum(box.numel for box in boxes)
    if covered != whole.numel:
        return f"{whole.numel - covered} of {whole.numel} elements are in no piece"
    return None
