"""Lazy capture: which tensors may be copied after `save` returned, and what holds up a write to them until they are.

Not a copier (csrc/stage). The one idea: an optimizer is the only writer of its tensors, and says so before it writes;
so these may be read until then, and a write that came without a word is found by samples of the bytes and by
`_version`.
"""

from __future__ import annotations

import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from plait import _C
from plait.ckpt.device import DeviceCopies, range_of
from plait.ckpt.errors import TornSnapshot


class Held(NamedTuple):
    """The tensors of one guarded optimizer that are read after the call: kept alive, with their versions then.

    ranges: (address, bytes) of what is read in the host's memory.
    """

    owner: Guard
    names: Sequence[str]
    tensors: Sequence[torch.Tensor]
    versions: Sequence[int]
    ranges: Sequence[tuple[int, int]]


class Flight:
    """What one save still reads of the caller's memory. Thread rule: any thread.

    fence_s: how long writes were held up for it, in all.
    """

    def __init__(self, step: int, stage: _C.Stage, held: Sequence[Held], names: Sequence[str]) -> None:
        self._step, self._stage, self._names = step, stage, names
        self._held: Sequence[Held] = held
        self._lock = threading.Lock()
        self._checked: set[Guard] = set()
        self._torn: str | None = None
        self._over = False
        self.device: DeviceCopies | None = None
        self.fence_s = 0.0

    def fence(self, owner: Guard | None = None, tensors: Sequence[torch.Tensor] | None = None) -> None:
        """Returns when nothing is still to be read of `tensors`, or else of the owner's, or else of all.

        Device tensors are not waited for here: the device's compute stream is told to.
        """
        began = time.monotonic()
        with self._lock:
            if self._over:
                return
            held = [one for one in self._held if owner is None or one.owner is owner]
            self._check(held)
            stage, device = self._stage, self.device
        if not stage.copied:
            own = chain.from_iterable(one.ranges for one in held)
            stage.fence(list(own) if tensors is None else [range_of(t) for t in tensors if _on_host(t)])
        if device is not None:
            on_device = None if tensors is None else [range_of(t) for t in tensors if not _on_host(t)]
            device.hold_writes(owner, on_device)
        self.fence_s += time.monotonic() - began

    def hurry(self, more: int) -> None:
        """1: the training thread waits for the save, and its processor helps; -1: no longer."""
        with self._lock:
            if not self._over:
                self._stage.hurry(more)

    def settle(self) -> None:
        """The writing thread, after the last copy (whose samples have been compared): TornSnapshot when a write came
        before its fence."""
        with self._lock:
            if not self._over:
                self._check(self._held)
            if self.device is not None:
                self._torn = self._torn or self.device.torn
        if self._torn is not None:
            raise self._error(self._torn)

    def torn(self, piece: int) -> TornSnapshot:
        """Returns the error for a changed piece of the stage."""
        return self._error(self._names[piece])

    def end(self) -> None:
        """Lets go of everything: nothing is read from here on."""
        with self._lock:
            self._over = True
        self._stage.close()
        if self.device is not None:
            self.device.close()
        self._held, self.device = (), None

    def cancel(self, reason: str) -> None:
        """Gives the capture up; whoever waits for it is told why."""
        self._stage.cancel(reason)

    def _check(self, held: Sequence[Held]) -> None:
        """Compares versions of those that no fence has passed yet; after one, writes are allowed."""
        for one in held:
            if one.owner not in self._checked and (now := versions_of(one.tensors)) != one.versions:
                changed = (name for name, a, b in zip(one.names, one.versions, now, strict=True) if a != b)
                self._torn = self._torn or next(changed)
            self._checked.add(one.owner)

    def _error(self, name: str) -> TornSnapshot:
        return TornSnapshot(
            f"step {self._step}: {name!r} was changed after save() and before it was captured. Its optimizer was "
            "given to guard(), so only that may write to it; call handle.fence() before any other write"
        )


class Guard:
    """One guarded optimizer: torch's, or one with `register_write_pre_hook` and `pieces()` (ShardedAdamW)."""

    def __init__(self, optimizer: Any, before_write: Callable[[Guard, Sequence[torch.Tensor] | None], None]) -> None:
        if callable(getattr(optimizer, "register_write_pre_hook", None)):
            self._hook = optimizer.register_write_pre_hook(lambda tensors: before_write(self, tensors))
        elif callable(getattr(optimizer, "register_step_pre_hook", None)):
            self._hook = optimizer.register_step_pre_hook(lambda *_: before_write(self, None))
        else:
            raise TypeError(
                f"guard: {type(optimizer).__name__} has no register_step_pre_hook; its writes cannot be seen"
            )
        self._optimizer = weakref.ref(optimizer)

    def is_of(self, optimizer: Any) -> bool:
        """True when this guards that optimizer."""
        return self._optimizer() is optimizer

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yields the local tensors that this optimizer alone writes: parameters and state, as they are now."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        if callable(getattr(optimizer, "pieces", None)):
            for piece in optimizer.pieces():
                yield from _tensors_in(list(vars(piece).values()))
            return
        for group in optimizer.param_groups:
            yield from _tensors_in(group["params"])
        yield from _tensors_in(list(optimizer.state.values()))

    def token(self) -> tuple[int, ...]:
        """Returns what changes when the optimizer gets or loses parameters (its state shows in the saved state)."""
        optimizer = self._optimizer()
        groups = getattr(optimizer, "param_groups", ())
        return tuple(map(id, chain.from_iterable(group["params"] for group in groups)))

    def remove(self) -> None:
        """Takes the hook away."""
        self._hook.remove()


class Guards:
    """All guarded optimizers of one Snapshots, and the save in flight that their hooks wait for."""

    def __init__(self) -> None:
        self._guards: list[Guard] = []
        self.flight: Flight | None = None

    def add(self, optimizer: Any) -> None:
        """Guards an optimizer; a second call for the same one does nothing."""
        if not any(guard.is_of(optimizer) for guard in self._guards):
            reference = weakref.ref(self)
            self._guards.append(Guard(optimizer, lambda guard, tensors: _before_write(reference, guard, tensors)))

    def token(self) -> tuple[tuple[int, ...], ...]:
        """Returns what a plan depends on beside the state."""
        return tuple(guard.token() for guard in self._guards)

    def owners(self, tensors: Sequence[torch.Tensor]) -> list[Guard | None]:
        """Returns for each tensor the guard whose optimizer alone writes it: its bytes lie in one of that one's."""
        found: list[Guard | None] = [None] * len(tensors)
        if not self._guards:
            return found
        spans = sorted((*range_of(t), i) for i, guard in enumerate(self._guards) for t in guard.tensors())
        starts = [span[0] for span in spans]
        for index, tensor in enumerate(tensors):
            begin, size = range_of(tensor)
            found[index] = self._owner(spans, starts, begin, size)
        return found

    def _owner(self, spans: list[tuple[int, int, int]], starts: list[int], begin: int, size: int) -> Guard | None:
        for start, length, index in reversed(
            spans[max(0, bisect_right(starts, begin) - 4) : bisect_right(starts, begin)]
        ):
            if size and start <= begin and begin + size <= start + length:
                return self._guards[index]
        return None

    def close(self) -> None:
        """Takes all hooks away."""
        for guard in self._guards:
            guard.remove()
        self._guards = []


def _before_write(reference: weakref.ref[Guards], guard: Guard, tensors: Sequence[torch.Tensor] | None) -> None:
    guards = reference()
    flight = None if guards is None else guards.flight
    if flight is not None:
        flight.fence(guard, tensors)


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns the count of writes to each that torch knows of; -1 for one made in inference mode, which has none."""
    try:
        return list(map(attrgetter("_version"), tensors))
    except RuntimeError:
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def hold_in_place(tensors: Sequence[torch.Tensor]) -> None:
    """Makes a later resize of a host tensor's storage an error (torch's own, at the resize) instead of a read of
    freed memory. As `tensor.numpy()` does, and as lasting: copying threads hold its address."""
    for storage in filter(torch.UntypedStorage.resizable, map(torch.Tensor.untyped_storage, tensors)):
        if storage.device.type == "cpu":
            torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def _on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        yield local.detach()
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
