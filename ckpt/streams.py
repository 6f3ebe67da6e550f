"""What a capture asks of one device: streams, events, page-locked memory.

Not the copies (device.py). The one idea: order is kept by events between streams, never by the host: the copy stream
waits for what was computed before the call, and what is computed later waits for the copies where it would overwrite
them. Has not run on a card yet: tests/fake_gpu.py stands in for torch.cuda.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from plait import _C


class Streams(Protocol):
    """The calls to one device. Its compute stream is the one that is current there in the thread that calls; the
    copy stream is its own. Events are opaque."""

    def check(self) -> None:
        """RuntimeError while a graph is captured: copies would be made at each replay, and none now."""

    def begin(self) -> None:
        """Lets the copy stream wait for all that the compute stream has been given so far."""

    def copying(self) -> AbstractContextManager[Any]:
        """Within it, what the thread asks of the device goes to the copy stream."""

    def memory(self, num_bytes: int) -> torch.Tensor:
        """Returns [num_bytes] uint8 of host memory that the device copies to by itself."""

    def record(self) -> Any:
        """Returns an event for all that the copy stream has been given so far."""

    def hold(self, event: Any) -> None:
        """Lets the compute stream wait for the event; the host goes on."""

    def attend(self) -> None:
        """To be called by a thread of its own before it waits."""

    def wait(self, event: Any) -> None:
        """Lets the calling thread wait for the event."""


class CudaStreams:
    """torch's streams and events of one CUDA device; the copy stream lives as long as this object."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def check(self) -> None:
        if self._is_capturing():
            raise RuntimeError(f"a CUDA graph is captured on {self._device}: call save() before or after its capture")

    def begin(self) -> None:
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(ready)

    def copying(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def record(self) -> Any:
        event = torch.cuda.Event(blocking=True)  # who waits for it sleeps: training needs the cores
        event.record(self._stream)
        return event

    def hold(self, event: Any) -> None:
        # A captured stream must not wait for what is outside of the graph, and nothing is written during a capture.
        if not self._is_capturing():
            torch.cuda.current_stream(self._device).wait_event(event)

    def attend(self) -> None:
        # A new thread is on device 0, where its first call would make a context: 0.5 GB of each rank on one card.
        torch.cuda.set_device(self._device)
        _C.CudaDriver.relax_captures()

    def wait(self, event: Any) -> None:
        event.synchronize()

    def _is_capturing(self) -> bool:
        with torch.cuda.device(self._device):
            return bool(torch.cuda.is_current_stream_capturing())
