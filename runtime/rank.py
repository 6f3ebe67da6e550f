"""One rank as it sees itself: its place, its device, the flag that asks it to stop, and its process group.

Not the launcher (`plait.launch`). A rank runs alone, under torchrun, or forked by the launcher; the program that it
runs cannot tell which.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
PR_SET_PDEATHSIG = 1  # linux/prctl.h
GROUP_TIMEOUT_S = 600.0  # a peer that dies is noticed at once; this bounds one that hangs


class StopRequest:
    """A flag that the first SIGTERM or SIGINT sets. The second signal ends the process: the kernel does it, so that
    it also works while Python waits in a collective. With `bound_s` the kernel ends it that long after the first."""

    def __init__(self, *, bound_s: float | None = None, numbers: tuple[int, ...] = STOP_SIGNALS) -> None:
        self.requested = False
        self._bound_s = bound_s
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        self._numbers = numbers
        for number in numbers:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        self.requested = True
        for each in self._numbers:
            signal.signal(each, signal.SIG_DFL)
        if self._bound_s is not None:
            signal.setitimer(signal.ITIMER_REAL, self._bound_s)

    def close(self) -> None:
        """Takes the bound back: the work is done."""
        signal.setitimer(signal.ITIMER_REAL, 0.0)


@dataclass(frozen=True)
class Place:
    """Where a rank stands among all ranks and among those of its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


@dataclass(frozen=True)
class Rank:
    """What a program gets: its place, where its events go, the stop flag, and how to reach its peers."""

    place: Place
    emit: Callable[[dict[str, Any]], None]  # plain data only; the view reads rank 0's
    stop: StopRequest
    started_s: float  # time.time() when the run was started, before this rank was
    port: int | None = None  # of the store on this machine; None alone and under torchrun
    listen_fd: int | None = None  # rank 0: the listening socket of the store

    @property
    def rank(self) -> int:
        return self.place.rank

    def device(self) -> torch.device:
        """A GPU of its own where this machine has one for each local rank, else the CPU."""
        if torch.cuda.is_available() and self.place.local_world_size <= torch.cuda.device_count():
            return torch.device("cuda", self.place.local_rank)
        return torch.device("cpu")

    def connect(self) -> None:
        """Initialises the process group: NCCL beside gloo on GPUs, gloo elsewhere; nothing when alone. Collective."""
        device = self.device()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if self.place.world_size == 1:
            return
        import torch.distributed as dist

        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=GROUP_TIMEOUT_S)
        if self.port is None:
            dist.init_process_group(backend, timeout=timeout)
            return
        first = self.rank == 0
        store = dist.TCPStore(
            "127.0.0.1",
            self.port,
            self.place.world_size,
            is_master=first,
            master_listen_fd=self.listen_fd if first else None,
            wait_for_workers=False,
        )
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.place.world_size, timeout=timeout
        )

    def disconnect(self) -> None:
        """Leaves the process group, if any."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


Program = Callable[[Rank], None]


def set_threads(local_world_size: int) -> None:
    """Shares this machine's cores among the local ranks, fewer where torch was told so (OMP_NUM_THREADS).

    Before torch has started a thread.
    """
    share = len(os.sched_getaffinity(0)) // local_world_size
    torch.set_num_threads(max(1, min(share, torch.get_num_threads())))


def last_line(error: BaseException) -> str:
    """`ValueError: text`, one line."""
    return traceback.format_exception_only(error)[-1].strip().replace("\n", " ")


def run_child(
    program: Program, place: Place, started_s: float, launcher: int, port: int, listen_fd: int, event_fd: int
) -> int:
    """The life of a forked rank: dies with the launcher, reports its error as an event. Returns its exit code."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl PR_SET_PDEATHSIG")
    if os.getppid() != launcher:  # it died before the kernel knew of the bond
        return 1
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the launcher passes one on as SIGTERM
    stop = StopRequest(numbers=(signal.SIGTERM,))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    set_threads(place.local_world_size)

    def emit(record: dict[str, Any]) -> None:
        data = (json.dumps(record) + "\n").encode()
        while data:
            data = data[os.write(event_fd, data) :]

    rank = Rank(place, emit, stop, started_s, port=port, listen_fd=listen_fd)
    try:
        program(rank)
        return 0
    except BaseException as error:  # reported whatever it is: nobody else will say why this rank ended
        emit({"kind": "error", "text": last_line(error), "monotonic_s": time.monotonic()})
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
