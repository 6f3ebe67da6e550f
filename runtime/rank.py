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
from typing import Any, Protocol

import torch

from plait.ckpt.errors import SnapshotError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# What gloo's transport says when the other end is gone (gloo/transport/tcp/pair.cc); NCCL and stores raise DistError.
PEER_IS_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport")
PR_SET_PDEATHSIG = 1  # linux/prctl.h
GROUP_TIMEOUT_S = 600.0  # a peer that dies is noticed at once; this bounds one that hangs


def heeded_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask a run to stop; not SIGHUP when this process was told to ignore it, as by nohup."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if not (ignored and number == signal.SIGHUP))


class StopRequest:
    """A flag that the first SIGTERM, SIGINT or SIGHUP sets. The second signal ends the process: the kernel does it,
    so that it also works while Python waits in a collective. SIGHUP never is that second one: a closing terminal may
    send it twice. With `bound_s` the kernel ends the process that long after the first."""

    def __init__(self, *, bound_s: float | None = None, numbers: tuple[int, ...] | None = None) -> None:
        self.requested = False
        self.number: int | None = None  # the signal, if it was one
        self._bound_s = bound_s
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        self._numbers = heeded_signals() if numbers is None else numbers
        for number in self._numbers:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        self.requested, self.number = True, number
        for each in self._numbers:
            signal.signal(each, signal.SIG_IGN if each == signal.SIGHUP else signal.SIG_DFL)
        if self._bound_s is not None:
            signal.setitimer(signal.ITIMER_REAL, self._bound_s)

    def close(self) -> None:
        """Takes the bound back: the work is done."""
        signal.setitimer(signal.ITIMER_REAL, 0.0)


class View(Protocol):
    """What shows a run; called by one thread of one process."""

    def event(self, rank: int, record: dict[str, Any]) -> None: ...
    def line(self, rank: int, text: str) -> None: ...
    def close(self) -> None: ...


class Voice:
    """A view that falls silent when it cannot write (a closed terminal, a reader that left, a full disk); `lost` says
    why. The run is then stopped in good order; an error here would end it before a save."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.lost: OSError | None = None

    def event(self, rank: int, record: dict[str, Any]) -> None:
        self._try(self._view.event, rank, record)

    def line(self, rank: int, text: str) -> None:
        self._try(self._view.line, rank, text)

    def close(self) -> None:
        self._try(self._view.close)

    def status(self) -> int:
        """Exit code of a run that stopped because of `lost`: as a shell has it for a broken pipe, else 1."""
        if isinstance(self.lost, BrokenPipeError):
            return 128 + signal.SIGPIPE
        print(f"plait train: stopped, because the output cannot be written: {self.lost}", file=sys.stderr)
        return 1

    def _try(self, call: Callable[..., None], *arguments: Any) -> None:
        if self.lost is not None:
            return
        try:
            call(*arguments)
        except OSError as error:
            self.lost = error
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python still has in its buffers


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
    """`ValueError: text (note)`, one line."""
    name = type(error).__qualname__
    notes = [f"({note})" for note in getattr(error, "__notes__", ())]
    return " ".join(" ".join([f"{name}: {error}" if str(error) else name, *notes]).split())


def lost_a_peer(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone: what that one says is the cause."""
    import torch.distributed as dist

    told = isinstance(error, RuntimeError) and any(mark in str(error) for mark in PEER_IS_GONE)
    return told or isinstance(error, dist.DistError) or (error.__cause__ is not None and lost_a_peer(error.__cause__))


class Diverged(RuntimeError):
    """Loss or gradient is not finite; the text names the step."""


def explains_itself(error: BaseException) -> bool:
    """Whether its text says all: what the machine or a folder refused, or what the numbers came to. A traceback
    would bury it."""
    return isinstance(error, (OSError, SnapshotError, Diverged))


def error_record(error: BaseException) -> dict[str, Any]:
    """What the launcher needs to tell the cause from what follows from it; `place` is where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return {
        "text": last_line(error),
        "message": " ".join(str(error).split()),
        "traceback": last_line(error) if explains_itself(error) else "".join(traceback.format_exception(error)),
        "place": f"{frame.filename}:{frame.lineno}",
        "lost_a_peer": lost_a_peer(error),
        "monotonic_s": time.monotonic(),
    }


def run_child(
    program: Program, place: Place, started_s: float, launcher: int, port: int, listen_fd: int, event_fd: int
) -> int:
    """The life of a forked rank: dies with the launcher, reports its error as an event, and leaves it to the launcher
    to print the one that is the cause. Returns its exit code."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl PR_SET_PDEATHSIG")
    if os.getppid() != launcher:  # it died before the kernel knew of the bond
        return 1
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to all; the launcher passes on a SIGTERM
        signal.signal(number, signal.SIG_IGN)
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
        emit({"kind": "error", **error_record(error)})
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
