"""Host memory that bytes pass through on their way to targets that the disk cannot read into: strided ones, those of
another dtype, and memory of a device.

Not a reader. The one idea: two windows take turns. While the copies out of one are on their way to a device, the
other one is filled from the disk; each is filled again only when its own copies have arrived. A device's windows are
page-locked, so that its copies run by themselves. Has not run on a card yet: tests/fake_gpu.py stands in for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from plait.ckpt.box import Shape
from plait.ckpt.read_plan import Move, copy_bits, round_up

Request = tuple[int, int, int]  # file offset, bytes, address


class Lane(Protocol):
    """The calls to one device, so that a test can stand in for it. Events are opaque."""

    def memory(self, num_bytes: int) -> torch.Tensor:
        """Returns [num_bytes] uint8 of host memory that copies to the device may start from."""

    def copy(self, target: torch.Tensor, held: torch.Tensor, dtype: torch.dtype, strides: Shape) -> None:
        """Starts a copy of what lies in `held`, [bytes] uint8, with this dtype and these strides; it must keep its
        bytes until the next event has been waited for."""

    def record(self) -> Any:
        """Returns an event for all copies started so far."""

    def wait(self, event: Any) -> None:
        """Lets the calling thread wait for the event."""


class HostLane:
    """To memory of the host: nothing is left to wait for."""

    def memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, held: torch.Tensor, dtype: torch.dtype, strides: Shape) -> None:
        copy_bits(target, _laid_out(held, dtype, target.shape, strides))

    def record(self) -> Any:
        return None

    def wait(self, event: Any) -> None:
        pass


class CudaLane:
    """To a CUDA device, on the stream that the caller uses there, so that what it computes next sees the bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: torch.Tensor, held: torch.Tensor, dtype: torch.dtype, strides: Shape) -> None:
        source = _laid_out(held, dtype, target.shape, strides)
        if not (target.dtype == dtype and target.is_contiguous() and source.is_contiguous()):
            # In one piece, and put in order there: torch would do that here first, in memory that is not page-locked.
            there = target.new_empty(held.numel(), dtype=torch.uint8)
            there.copy_(held, non_blocking=True)
            source = _laid_out(there, dtype, target.shape, strides)
        copy_bits(target, source, non_blocking=True)

    def record(self) -> Any:
        event = torch.cuda.Event(blocking=True)  # sleeps instead of spinning
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: Any) -> None:
        event.synchronize()


def _laid_out(held: torch.Tensor, dtype: torch.dtype, shape: Shape, strides: Shape) -> torch.Tensor:
    typed = held.view(dtype)
    return typed.as_strided(shape, strides, typed.storage_offset())


_HOST = HostLane()


def lane_of(device: torch.device) -> Lane:
    """Returns the way to a device."""
    return CudaLane(device) if device.type == "cuda" else _HOST


class Windows:
    """The windows of one reading. A context: when it ends, all copies have arrived, also after an error."""

    def __init__(self, lane_of: Callable[[torch.device], Lane] = lane_of) -> None:
        self._lane_of = lane_of
        self._lanes: dict[torch.device, Lane] = {}
        self._memory: list[tuple[Lane, torch.Tensor] | None] = [None, None]
        self._pending: list[list[tuple[Lane, Any]]] = [[], []]
        self._turn = 0

    def fill(self, moves: list[Move], read: Callable[[list[Request]], None]) -> None:
        """Reads a list of moves: those that can go straight do, the others through the window whose turn it is."""
        staged = [move for move in moves if not move.direct]
        lanes = {device: self._lane(device) for device in dict.fromkeys(move.target.device for move in staged)}
        memory = self._take(sum(round_up(move.num_bytes) for move in staged), list(lanes.values()))
        requests, copies, at = [], [], 0
        for move in moves:
            if move.direct:
                requests.append((move.file_offset, move.num_bytes, move.target.data_ptr()))
                continue
            requests.append((move.file_offset, move.num_bytes, memory.data_ptr() + at))
            copies.append((move, memory[at : at + move.num_bytes]))
            at += round_up(move.num_bytes)
        read(requests)
        for move, held in copies:
            lanes[move.target.device].copy(move.target, held, move.source_dtype, move.source_strides)
        self._pending[self._turn] = [(lane, lane.record()) for lane in lanes.values() if lane is not _HOST]
        self._turn = 1 - self._turn if self._pending[self._turn] else self._turn

    def finish(self) -> None:
        """Returns when all copies have arrived."""
        for turn in (self._turn, 1 - self._turn):
            self._wait(turn)

    def _lane(self, device: torch.device) -> Lane:
        if device not in self._lanes:
            self._lanes[device] = self._lane_of(device)
        return self._lanes[device]

    def _take(self, num_bytes: int, lanes: list[Lane]) -> torch.Tensor:
        """Returns the window whose turn it is, empty of copies; of a device's kind when one is among the lanes."""
        self._wait(self._turn)
        lane = next((lane for lane in lanes if lane is not _HOST), _HOST)
        held = self._memory[self._turn]
        if held is None or held[0] is not lane or held[1].numel() < num_bytes:
            self._memory[self._turn] = None
            held = self._memory[self._turn] = (lane, lane.memory(num_bytes))
        return held[1]

    def _wait(self, turn: int) -> None:
        pending, self._pending[turn] = self._pending[turn], []
        for lane, event in pending:
            lane.wait(event)

    def __enter__(self) -> Windows:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()
