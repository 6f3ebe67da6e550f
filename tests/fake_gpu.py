"""A simulated card behind torch.cuda: streams that run late, events, and memory that goes to somebody else once it is
let go of. Holds no test.

Tensors of the card are CPU tensors whose every operation is put into the current stream and done later, in the most
unkind order that streams and events allow: what was not waited for is garbage, and stays so. `first` says which
streams run as soon as they can; the others run when somebody waits for them. Rules, as torch and CUDA have them: a
block that is freed is overwritten by its own stream, at that place in its order (the caching allocator); a copy from
or to host memory that is not page-locked, or not in one piece, holds up the host; a thread that nobody told uses
device 0; a captured stream must not wait for an event of outside, and another thread's wait ends the capture unless
the thread is relaxed. Not modelled: time, contents of graphs, peer copies.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from plait import _C

_VIEWS = {"view", "as_strided", "slice", "select", "detach", "alias", "set_", "transpose", "t", "expand"}
_VIEWS |= {"_conj", "_neg_view", "_unsafe_view"}
FREED, FRESH, POISON = 0xDB, 0xA5, 0xEE


class Stream:
    """A queue of calls on one device. `done` of `calls` have run."""

    def __init__(self, card: Card, device: int, name: str) -> None:
        self.card, self.index, self.name = card, device, name
        self.calls: list[Callable[[], None] | Event] = []
        self.done = 0

    def wait_event(self, event: Event) -> None:
        card = self.card
        card.touch()
        if card.capturing is self and not event.captured:
            raise RuntimeError("dependency created on uncaptured work in another stream")
        card.waits.append((self.name, event))
        self.put(event)

    def put(self, call: Callable[[], None] | Event) -> None:
        with self.card.lock:
            self.calls.append(call)
            self.card.drive()

    def run(self, stop: int) -> None:
        """Runs the calls before `stop`, and what they wait for."""
        while self.done < stop:
            call = self.calls[self.done]
            if isinstance(call, Event):
                call.stream.run(call.at)
            self.done += 1  # first: a call may free memory, which is a call too
            if not isinstance(call, Event):
                call()


class Event:
    """A place in a stream."""

    card: Card  # set by the class that Card makes of it

    def __init__(self, blocking: bool = False) -> None:
        self.blocking, self.captured = blocking, False

    def record(self, stream: Stream) -> None:
        self.card.touch()
        self.stream, self.at, self.captured = stream, len(stream.calls), self.card.capturing is stream

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)

    def synchronize(self) -> None:
        card = self.card
        card.touch()
        if threading.current_thread() is threading.main_thread():
            card.syncs += 1
        else:
            card.gate.wait(30)
        if card.capturing is not None and threading.get_ident() not in card.relaxed:
            card.broken_captures += 1
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        with card.lock:
            self.stream.run(self.at)


class Card(TorchDispatchMode):
    """The device, as a mode: within it, operations on its tensors go to the current stream. first: names of streams
    ("compute", "copy") that run as soon as they can. counts: syncs (the main thread was held up), pageable copies."""

    def __init__(self, first: tuple[str, ...] = (), device: int = 1) -> None:
        super().__init__()
        self.first, self.lock, self.gate = first, threading.RLock(), threading.Event()
        self.gate.set()
        self.syncs = self.pageable = self.broken_captures = 0
        self.waits: list[tuple[str, Event]] = []
        self.contexts: set[int] = set()
        self.relaxed: set[int] = set()
        self.capturing: Stream | None = None
        self.live: dict[str, int] = {}  # bytes of blocks by the stream that they belong to
        self.peak: dict[str, int] = {}
        self._devices: dict[int, int] = {}
        self._current: dict[tuple[int, int], Stream] = {}
        self._streams: list[Stream] = []
        self._memory: list[tuple[int, int, bytearray]] = []  # kept for ever: a card reads what it was told to
        self._locked: list[tuple[int, int]] = []
        self.compute = self.stream(device, "compute")

    def stream(self, device: int, name: str) -> Stream:
        made = Stream(self, device, name)
        self._streams.append(made)
        return made

    def install(self, patch: pytest.MonkeyPatch) -> Card:
        """Puts the card behind torch.cuda."""
        kind = type("Event", (Event,), {"card": self})
        for name, value in {
            "Stream": lambda device: self.stream(_index(device), "copy"),
            "Event": kind,
            "stream": self._on_stream,
            "device": self._on_device,
            "set_device": self._set_device,
            "current_stream": lambda device=None: self.current(None if device is None else _index(device)),
            "is_current_stream_capturing": lambda: self.capturing is self.current(None),
        }.items():
            patch.setattr(torch.cuda, name, value)
        self._set_device(self.compute.index)
        relax = staticmethod(lambda: self.relaxed.add(threading.get_ident()) is None)
        patch.setattr(_C.CudaDriver, "relax_captures", relax)
        return self

    def touch(self) -> int:
        """A call of this thread: makes a context on the device that it is on, and returns that."""
        device = self._devices.get(threading.get_ident(), 0)
        self.contexts.add(device)
        return device

    def current(self, device: int | None) -> Stream:
        device = self._devices.get(threading.get_ident(), 0) if device is None else device
        return self._current.get((threading.get_ident(), device), self.compute)

    def _set_device(self, device: Any) -> None:
        self._devices[threading.get_ident()] = _index(device)

    @contextmanager
    def _on_device(self, device: Any) -> Any:
        me = threading.get_ident()
        before = self._devices.get(me, 0)
        self._devices[me] = _index(device)
        yield
        self._devices[me] = before

    @contextmanager
    def _on_stream(self, stream: Stream) -> Any:
        key = (threading.get_ident(), stream.index)
        before = self._current.get(key)
        self._current[key] = stream
        with self._on_device(stream.index):
            yield
        if before is None:
            del self._current[key]
        else:
            self._current[key] = before

    def drive(self) -> None:
        """Lets the eager streams run as far as they can without another one."""
        for stream in self._streams:
            if stream.name not in self.first:
                continue
            while stream.done < len(stream.calls):
                call = stream.calls[stream.done]
                if isinstance(call, Event) and call.stream.done < call.at:
                    break
                stream.run(stream.done + 1)

    def finish(self) -> None:
        """All that was asked for is done."""
        with self.lock:
            for stream in self._streams:
                stream.run(len(stream.calls))

    # ---- memory -------------------------------------------------------------------------------------------------

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor of the card with these values, strides included, that its current stream has yet to compute."""
        with _disable_current_modes():
            span = sum((n - 1) * s for n, s in zip(values.shape, values.stride(), strict=True)) + 1
            start, item = values.storage_offset(), values.element_size()
            source = torch.empty(0, dtype=torch.uint8)
            source = source.set_(values.untyped_storage(), start * item, (span * item,), (1,)).clone()
            block = self._block(span * item)
            target = self._seen(block)
            made = block.view(values.dtype).as_strided(values.shape, values.stride())
            made = torch._neg_view(made) if values.is_neg() else made
            made = made.conj() if values.is_conj() else made
        self.current(None).put(lambda: _plainly(target.copy_, source))
        return made

    def lock_pages(self, memory: torch.Tensor) -> None:
        self._locked.append((memory.data_ptr(), memory.numel()))

    def holds(self, tensor: torch.Tensor) -> bool:
        return self._of(tensor) is not None

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is there now."""
        with _disable_current_modes():
            return self._seen(tensor).clone()

    def _block(self, num_bytes: int) -> torch.Tensor:
        """A block of the current stream, [num_bytes] uint8."""
        home, size = self.current(None), max(16, num_bytes)
        raw = bytearray([FRESH]) * size
        exported = (ctypes.c_char * size).from_buffer(raw)
        self._memory.append((ctypes.addressof(exported), size, raw))
        self.live[home.name] = self.live.get(home.name, 0) + num_bytes
        self.peak[home.name] = max(self.peak.get(home.name, 0), self.live[home.name])

        def freed() -> None:
            self.live[home.name] -= num_bytes

            def taken() -> None:  # by somebody else
                raw[:] = bytes([FREED]) * size

            home.put(taken)

        weakref.finalize(exported, freed).atexit = False
        return torch.frombuffer(exported, dtype=torch.uint8)[:num_bytes]

    def _of(self, tensor: torch.Tensor) -> tuple[int, int, bytearray] | None:
        at = tensor.data_ptr() if tensor.numel() else tensor.untyped_storage().data_ptr()
        return next((block for block in reversed(self._memory) if block[0] <= at < block[0] + block[1]), None)

    def _seen(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory as the card sees it: by address, whoever owns it."""
        block = self._of(tensor)
        if block is None:
            return tensor
        whole = torch.frombuffer(block[2], dtype=torch.uint8)
        whole = whole[: len(block[2]) // tensor.element_size() * tensor.element_size()].view(tensor.dtype)
        offset = (tensor.data_ptr() - block[0]) // tensor.element_size()
        seen = whole.as_strided(tensor.shape, tensor.stride(), offset)
        seen = torch._neg_view(seen) if tensor.is_neg() else seen
        return seen.conj() if tensor.is_conj() else seen

    # ---- operations ---------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if kwargs.pop("pin_memory", False):
            made = func(*args, **kwargs).fill_(POISON)
            self.lock_pages(made)
            return made
        tensors: list[torch.Tensor] = []
        tree_map_only(torch.Tensor, tensors.append, (args, kwargs))
        if name in _VIEWS or not any(map(self.holds, tensors)):
            return func(*args, **kwargs)
        if name in ("clone", "copy_") and tensors[0].dtype == torch.float4_e2m1fn_x2:
            raise NotImplementedError('"copy_" not implemented for Float4_e2m1fn_x2')  # as of torch 2.13's Copy.cu
        self.touch()
        stream = self.current(None)
        seen = tree_map_only(torch.Tensor, self._seen, (args, kwargs))
        if name.endswith("_"):
            return self._in_place(stream, lambda: _plainly(func, *seen[0], **seen[1]), args, kwargs)
        shaped = func(*args, **kwargs)  # of what is there: only the form counts
        made = self._block(shaped.numel() * shaped.element_size()).view(shaped.dtype)
        made = made.as_strided(shaped.shape, shaped.stride())
        target = self._seen(made)
        stream.put(lambda: _plainly(lambda: target.copy_(func(*seen[0], **seen[1]))))
        return made

    def _in_place(self, stream: Stream, call: Callable[[], Any], args: Any, kwargs: Any) -> torch.Tensor:
        target, others = args[0], [arg for arg in args[1:] if isinstance(arg, torch.Tensor)]
        host = next((t for t in (target, *others) if not self.holds(t)), None)
        stream.put(call)
        if host is not None:
            whole = all(t.is_contiguous() for t in (target, *others)) and target.dtype == others[0].dtype
            asynchronous = kwargs.get("non_blocking", len(args) > 2 and args[2])
            if not (whole and self._is_locked(host)):
                self.pageable += 1
            elif asynchronous:
                return target
            self.syncs += 1
            stream.run(len(stream.calls))
        return target

    def _is_locked(self, host: torch.Tensor) -> bool:
        at = host.data_ptr()
        return any(start <= at and at + host.nbytes <= start + size for start, size in self._locked)


def _index(device: Any) -> int:
    return device if isinstance(device, int) else (torch.device(device).index or 0)


def _plainly(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with _disable_current_modes(), torch.no_grad():
        call(*args, **kwargs)
