"""Collectives on CPU tensors as rounds of direct messages between the members of an axis.

Not here: gradients, CUDA tensors and arguments of users (collectives.py). The one idea: each member sends to each
other member at once and sums what it gets in the order of the coordinates. One round (two for a large all-reduce)
means few thread switches, and these are what a small collective between processes costs. An all-reduce of 64 KiB took
84 us between 2 ranks where gloo's took 187; between 8 ranks, on 2 busy cores, 5.7 ms against 19 ms (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.parallel.mesh import Axis

# Message tags of this file: apart from those of p2p.py, which stay below.
TAG = 1 << 30
SECOND_ROUND_TAG = TAG + 1  # its messages start at a wait, between the first rounds of later collectives
# From this size on an all-reduce of more than two ranks takes two rounds, which move 2/n of the bytes.
TWO_ROUNDS_BYTES = 32 << 10
COMBINE: dict[str, Callable[..., Any]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class Handle:
    """A started collective: `wait()` returns its result, which must not be read before; waiting again is harmless.

    RuntimeError of a wait names the operation, the axis and the peer that did not answer.
    """

    __slots__ = ("_error", "_finish", "_result")

    def __init__(self, finish: Callable[[], Tensor] | None, result: Tensor | None = None) -> None:
        self._finish, self._result = finish, result
        self._error: RuntimeError | None = None

    def wait(self) -> Tensor:
        """Blocks until the collective is done and returns its result; a failed one raises the same error again."""
        finish, self._finish = self._finish, None
        if finish is not None:
            try:
                self._result = finish()
            except RuntimeError as error:
                self._error = error
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


def post(axis: Axis, sends: dict[int, Tensor], receives: dict[int, Tensor], tag: int = TAG) -> list[tuple[int, Any]]:
    """Starts a message to and from each given coord, none for empty tensors; returns (coord, work) pairs.

    Coords are the group's own ranks, because groups are made of ascending global ranks. A peer that is gone is told
    by the wait, so that the others get their messages.
    """
    group = axis.group
    assert group is not None
    works: list[tuple[int, Any]] = []
    for start, messages in ((group.recv, receives), (group.send, sends)):
        for peer, tensor in messages.items():
            if tensor.numel():
                try:
                    works.append((peer, start([tensor], peer, tag)))
                except RuntimeError as error:
                    works.append((peer, _Failed(error)))
    return works


class _Failed:
    """A message that could not start."""

    def __init__(self, error: RuntimeError) -> None:
        self.error = error

    def wait(self) -> None:
        raise self.error


def wait_all(works: Sequence[tuple[int, Any]], what: str, axis: Axis) -> None:
    """Waits for every message; then RuntimeError names what was waited for, this rank and the first peer that failed.

    Also after a failure it waits for the others, because a message that its sender gives up never arrives: members
    that are left would run into their timeout instead of learning at once who is gone.
    """
    failure: RuntimeError | None = None
    for peer, work in works:
        try:
            work.wait()
        except RuntimeError as error:
            if failure is None:
                me = axis.ranks[axis.coord]
                text = f"{what} on axis {axis.name}: rank {me} waited for rank {axis.ranks[peer]}: {error}"
                failure = RuntimeError(text)
    if failure is not None:
        raise failure


def others_of(axis: Axis) -> list[int]:
    """Coords of the other members, beginning behind me, so that not all send to the same one first."""
    return [(axis.coord + step) % axis.size for step in range(1, axis.size)]


def combine(mine: Tensor, received: dict[int, Tensor], axis: Axis, op: str, out: Tensor | None) -> Tensor:
    """Combines the members' tensors in the order of the coordinates, 16-bit ones in fp32 with one rounding."""
    function = COMBINE[op]
    ordered = [mine if coord == axis.coord else received[coord] for coord in range(axis.size)]
    if axis.size == 2:  # one operation rounds once by itself
        return function(ordered[0], ordered[1], out=out)
    wide = torch.float32 if mine.dtype in (torch.bfloat16, torch.float16) else mine.dtype
    total = function(ordered[0].to(wide), ordered[1].to(wide))
    for part in ordered[2:]:
        function(total, part, out=total) if part.dtype == wide else function(total, part.to(wide), out=total)
    return total.to(mine.dtype) if out is None else out.copy_(total)


def start_all_reduce(tensor: Tensor, axis: Axis, op: str, out: Tensor | None) -> Handle:
    """All-reduce of a contiguous CPU tensor into `out` (may be the tensor; None: a new one)."""
    others = others_of(axis)
    if axis.size > 2 and tensor.numel() * tensor.element_size() >= TWO_ROUNDS_BYTES:
        return start_two_rounds(tensor, axis, op, out)
    received = {peer: torch.empty_like(tensor) for peer in others}
    works = post(axis, {peer: tensor for peer in others}, received)

    def finish() -> Tensor:
        wait_all(works, f"all_reduce {op}", axis)
        return combine(tensor, received, axis, op, out)

    return Handle(finish)


def start_two_rounds(tensor: Tensor, axis: Axis, op: str, out: Tensor | None) -> Handle:
    """All-reduce as reduce-scatter and all-gather over nearly equal pieces of the flat tensor."""
    others, flat = others_of(axis), tensor.view(-1)
    result = torch.empty_like(tensor) if out is None else out
    pieces, results = [], []
    for coord in range(axis.size):
        start, size = axis.split(flat.numel(), coord)
        pieces.append(flat[start : start + size])
        results.append(result.view(-1)[start : start + size])
    mine = pieces[axis.coord]
    received = {peer: torch.empty_like(mine) for peer in others}
    works = post(axis, {peer: pieces[peer] for peer in others}, received)

    def finish() -> Tensor:
        wait_all(works, f"all_reduce {op}", axis)
        part = combine(mine, received, axis, op, results[axis.coord])
        gather = post(
            axis, {peer: part for peer in others}, {peer: results[peer] for peer in others}, SECOND_ROUND_TAG
        )
        wait_all(gather, f"all_reduce {op}", axis)
        return result

    return Handle(finish)


def start_reduce_scatter(parts: Sequence[Tensor], axis: Axis, out: Tensor) -> Handle:
    """Sums the contiguous parts that the members hold for this coord into `out`, which may be my own part."""
    others = others_of(axis)
    received = {peer: torch.empty_like(parts[axis.coord]) for peer in others}
    works = post(axis, {peer: parts[peer] for peer in others}, received)

    def finish() -> Tensor:
        wait_all(works, "reduce_scatter", axis)
        return combine(parts[axis.coord], received, axis, "sum", out)

    return Handle(finish)


def start_all_gather(tensor: Tensor, axis: Axis, slots: Sequence[Tensor]) -> list[tuple[int, Any]]:
    """Starts to gather contiguous tensors of one shape into `slots`, one per coord; `tensor` may be my slot."""
    others = others_of(axis)
    works = post(axis, {peer: tensor for peer in others}, {peer: slots[peer] for peer in others})
    if slots[axis.coord].data_ptr() != tensor.data_ptr():
        slots[axis.coord].copy_(tensor)
    return works
