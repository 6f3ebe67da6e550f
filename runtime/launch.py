"""Starts the ranks of one run on this machine, or joins those that torchrun started, and ends them as one.

Not elastic and no scheduler. The one idea: the launcher forks before any thread or CUDA use exists and then holds
nothing of the run (no lock, no store), so that it can be killed at any moment: the kernel ends the ranks with it.
Logs, events, deaths (pidfd) and signals all wake one select loop.

The first SIGTERM, SIGINT or SIGHUP asks every rank to finish its step, save and leave, and so does an output that can
no longer be written; what still runs STOP_BOUND_S later, or at a second SIGTERM or SIGINT, is killed. SIGUSR1 asks
for a snapshot after the step under way: one rank is told, and ranks agree on what any of them wishes.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

from plait.rank import (
    STOP_SIGNALS,
    Place,
    Program,
    Rank,
    StopRequest,
    View,
    Voice,
    explains_itself,
    heeded_signals,
    last_line,
    lost_a_peer,
    run_child,
    set_threads,
)

SAVE_SIGNAL = signal.SIGUSR1
STOP_BOUND_S = 60.0  # from the request to stop until the ranks are killed
KILL_GRACE_S = 2.0  # from SIGTERM to SIGKILL for the survivors of a dead rank, which at worst hang in a collective
SETTLE_S = 0.2  # after the first death: a killed rank and the peers that lost it become known in either order


def torchrun_place() -> Place | None:
    """My place under torchrun, which tells it through the environment, or None when it did not start me."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if "MASTER_ADDR" not in os.environ or not all(name in os.environ for name in names):
        return None
    return Place(*(int(os.environ[name]) for name in names))


def run_in_place(program: Program, place: Place, view: View) -> int:
    """Runs one rank in this process, the only one or one of torchrun's; returns the exit code as `launch` does."""
    started_s = time.time()
    signal.signal(SAVE_SIGNAL, lambda *_: None)  # until the program heeds it; by default it would end the process
    set_threads(place.local_world_size)
    voice, stop = Voice(view), StopRequest(bound_s=STOP_BOUND_S)

    def emit(record: dict[str, Any]) -> None:
        if place.rank == 0:
            voice.event(0, record)
            stop.requested |= voice.lost is not None

    try:
        program(Rank(place, emit, stop, started_s))
    except Exception as error:
        voice.close()
        if not lost_a_peer(error) and not explains_itself(error):
            traceback.print_exc()
        print(f"plait train: rank {place.rank} failed: {last_line(error)}", file=sys.stderr, flush=True)
        return 1
    finally:
        stop.close()
    voice.close()
    return voice.status() if voice.lost and stop.number is None else 0


def launch(program: Program, world_size: int, view: View, *, stop_bound_s: float = STOP_BOUND_S) -> int:
    """Forks `world_size` ranks; each runs `program(rank)`. Returns when all have ended, with the exit code.

    0: every rank returned. 1: a rank raised or died (its number, status and last error are said), or did not stop
    in time. 128 + signal: a second signal ended the run, or (SIGPIPE) nobody reads the output any more and the run
    was stopped and saved. No rank outlives this call or this process.
    Main thread only; `torch` must be imported and unused.
    """
    preload()
    return _Launcher(view, stop_bound_s).run(program, world_size)


def preload() -> None:
    """Imports what torch would import in every rank at its first backward (0.5 s each): once, before the fork."""
    import torch.fx.experimental.symbolic_shapes  # noqa: F401


@dataclass
class _Child:
    """A rank as the launcher sees it."""

    rank: int
    pid: int
    pidfd: int
    log_fd: int
    event_fd: int
    status: int | None = None  # exit code, or minus the signal; None while it runs
    error: dict[str, Any] | None = None  # what the rank itself said before it left
    last_line: str = ""
    pending: dict[int, bytes] = field(default_factory=dict)  # fd -> an unfinished line

    def describe(self) -> str:
        """`rank 3 (pid 77) was killed by SIGKILL; its last error: ...`"""
        assert self.status is not None
        how = f"exited with status {self.status}"
        if self.status < 0:
            how = f"was killed by {signal.Signals(-self.status).name}"
        said = f"; its last error: {self.error['text']}" if self.error else ""
        if not said and self.last_line:
            said = f"; its last line: {self.last_line}"
        return f"rank {self.rank} (pid {self.pid}) {how}{said}"


class _Launcher:
    """One launch: owns the children, their pipes and the signal handlers until `run` returns."""

    def __init__(self, view: View, stop_bound_s: float) -> None:
        self.view = Voice(view)
        self.stop_bound_s = stop_bound_s
        self.children: list[_Child] = []
        self.selector = selectors.DefaultSelector()
        self.signals: list[int] = []
        self.wishes = 0  # SAVE_SIGNALs that no rank was told yet

    def run(self, program: Program, world_size: int) -> int:
        wake_read, wake_write = socket.socketpair()
        wake_read.setblocking(False)
        wake_write.setblocking(False)
        self.selector.register(wake_read, selectors.EVENT_READ, lambda: wake_read.recv(4096))
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # none may fall between fork and handler
        old_wakeup = signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        old = {number: signal.signal(number, lambda n, _: self.signals.append(n)) for number in heeded_signals()}
        old[SAVE_SIGNAL] = signal.signal(SAVE_SIGNAL, self._wish)  # what a rank inherits until it heeds it: nothing
        try:
            self._fork_all(program, world_size, [wake_read.fileno(), wake_write.fileno()])
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
            return self._watch()
        finally:
            try:
                self._end_all(0.0)
            finally:
                signal.set_wakeup_fd(old_wakeup)
                for number, handler in old.items():
                    signal.signal(number, handler)
                signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
                self.selector.close()
                wake_read.close()
                wake_write.close()

    def _fork_all(self, program: Program, world_size: int, own_fds: list[int]) -> None:
        started_s = time.time()
        listener = socket.socket()  # bound here, so that nothing else can take the port before rank 0 listens
        listener.bind(("127.0.0.1", 0))
        listener.listen(world_size)
        own_fds = [*own_fds, self.selector.fileno()]
        sys.stdout.flush()
        sys.stderr.flush()
        gc.collect()
        gc.freeze()  # keeps the collector of a rank from touching, and so copying, the pages that all share
        launcher = os.getpid()
        for number in range(world_size):
            log_read, log_write = os.pipe()
            event_read, event_write = os.pipe()
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    signal.set_wakeup_fd(-1)
                    port = listener.getsockname()[1]
                    for fd in (*own_fds, log_read, event_read):
                        os.close(fd)
                    if number:
                        listener.close()
                    os.dup2(log_write, 1)
                    os.dup2(log_write, 2)
                    os.close(log_write)
                    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # gloo's protocol; the host name need not resolve
                    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
                    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
                    place = Place(number, world_size, number, world_size)
                    status = run_child(program, place, started_s, launcher, port, listener.fileno(), event_write)
                finally:
                    os._exit(status)  # nothing of the launcher's may run at exit
            os.close(log_write)
            os.close(event_write)
            child = _Child(number, pid, os.pidfd_open(pid), log_read, event_read)
            self.children.append(child)
            own_fds += [child.pidfd, log_read, event_read]
            for fd in (log_read, event_read):
                os.set_blocking(fd, False)
                self.selector.register(fd, selectors.EVENT_READ, lambda child=child, fd=fd: self._read(child, fd))
            self.selector.register(child.pidfd, selectors.EVENT_READ, lambda child=child: self._reap(child))
        listener.close()
        gc.unfreeze()
        self.view.event(0, {"kind": "ranks", "pids": [child.pid for child in self.children]})

    # --- the loop -----------------------------------------------------------------------------------------

    def _watch(self) -> int:
        deadline: float | None = None
        while self._running():
            self._poll(None if deadline is None else max(0.0, deadline - time.monotonic()))
            again = [number for number in self.signals[1:] if number != signal.SIGHUP]  # a terminal may repeat that
            if again:
                self._say("second signal: the ranks are killed, nothing more is saved")
                return 128 + again[0]
            if self._failed():
                return self._fail()
            if self.wishes and self._running():
                self.wishes = 0
                self._say(f"{SAVE_SIGNAL.name}: a snapshot after this step")
                signal.pidfd_send_signal(self._running()[0].pidfd, SAVE_SIGNAL)  # several could be of several steps
            if deadline is None and (self.signals or self.view.lost):
                deadline = time.monotonic() + self.stop_bound_s
                name = signal.Signals(self.signals[0]).name if self.signals else "no output"
                self._say(f"{name}: finishing the step and saving, at most {self.stop_bound_s:g} s; again to kill")
                self._signal(signal.SIGTERM)
            if deadline is not None and time.monotonic() >= deadline and self._running():
                late = ", ".join(str(child.rank) for child in self._running())
                self._say(f"ranks {late} did not stop within {self.stop_bound_s:g} s and are killed")
                return 1
        if self._failed():
            return self._fail()
        return self.view.status() if self.view.lost and not self.signals else 0

    def _fail(self) -> int:
        """Names the rank that is the cause, with its traceback where that says more, and ends the others."""
        until = time.monotonic() + SETTLE_S
        while self._running() and (left := until - time.monotonic()) > 0:
            self._poll(left)
        others = self._running()
        self._end_all(KILL_GRACE_S)
        failed = sorted((c for c in self._failed() if c not in others or c.error), key=self._turn)
        places: set[str] = set()
        for child in failed:
            if child.error is None:
                continue
            if child is not failed[0] and self._only_told(child):
                self.view.line(child.rank, f"stopped, because a peer failed ({child.error['text']})")
            elif child.error["place"] in places:
                self.view.line(child.rank, f"failed in the same way ({child.error['text']})")
            else:
                for line in child.error["traceback"].splitlines():
                    self.view.line(child.rank, line)
            places.add(child.error["place"])
        rest = "; the other ranks were stopped" if others else ""
        self._say(failed[0].describe() + rest)
        return 1

    def _turn(self, child: _Child) -> tuple[bool, bool, float]:
        """Sorts failed ranks, the cause first: a silent death, then an error of its own, then one that it was told;
        each by time. Peers of a dead rank fail too, a moment later."""
        error = child.error or {}
        return bool(error), self._only_told(child), error.get("monotonic_s", 0.0)

    def _only_told(self, child: _Child) -> bool:
        """Whether its error only says that a peer is gone, or passes on what another rank said."""
        if child.error is None:
            return False
        text = child.error["text"]
        said = [other.error["message"] for other in self._failed() if other.error and other.error["text"] != text]
        return child.error["lost_a_peer"] or any(message and text.endswith(message) for message in said)

    def _end_all(self, grace_s: float) -> None:
        """Ends every rank: SIGTERM, after the grace SIGKILL; returns when all are reaped and their logs are read."""
        if grace_s > 0.0:
            self._signal(signal.SIGTERM)
            until = time.monotonic() + grace_s
            while self._running() and (left := until - time.monotonic()) > 0:
                self._poll(left)
        self._signal(signal.SIGKILL)
        for child in self._running():
            self._reap(child)

    def _wish(self, number: int, frame: Any) -> None:
        self.wishes += 1

    def _running(self) -> list[_Child]:
        return [child for child in self.children if child.status is None]

    def _failed(self) -> list[_Child]:
        return [child for child in self.children if child.status not in (None, 0)]

    def _signal(self, number: int) -> None:
        for child in self._running():
            signal.pidfd_send_signal(child.pidfd, number)

    def _poll(self, timeout_s: float | None) -> None:
        for key, _ in self.selector.select(timeout_s):
            if key.fd in self.selector.get_map():  # an earlier callback of this round may have closed it
                key.data()

    def _read(self, child: _Child, fd: int) -> bool:
        """Reads what is there; False when there was nothing. Passes full lines on."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self.selector.unregister(fd)
            return False
        *lines, rest = (child.pending.get(fd, b"") + data).split(b"\n")
        child.pending[fd] = rest
        for line in lines:
            self._pass_on(child, fd, line)
        return True

    def _pass_on(self, child: _Child, fd: int, line: bytes) -> None:
        if fd == child.log_fd:
            text = line.decode(errors="replace").rstrip()
            child.last_line = text or child.last_line
            self.view.line(child.rank, text)
            return
        record = json.loads(line)
        if record["kind"] == "error":
            child.error = record
        else:
            self.view.event(child.rank, record)

    def _reap(self, child: _Child) -> None:
        """Takes the exit status, then what is left in the pipes."""
        _, status = os.waitpid(child.pid, 0)
        child.status = os.waitstatus_to_exitcode(status)
        self.selector.unregister(child.pidfd)
        os.close(child.pidfd)
        for fd in (child.log_fd, child.event_fd):
            while fd in self.selector.get_map() and self._read(child, fd):
                pass
            if fd == child.log_fd and child.pending.get(fd):
                self._pass_on(child, fd, child.pending[fd])
            if fd in self.selector.get_map():
                self.selector.unregister(fd)
            os.close(fd)

    def _say(self, text: str) -> None:
        self.view.event(0, {"kind": "launcher", "text": text})
