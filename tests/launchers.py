"""Runs `plait train` as a process of its own without paying for imports each time: `start(["--steps", "4"])`.

Not here: any test. The one idea: a server process imports torch, plait and matplotlib once and forks a fresh `plait
train`, or a program given as text, per request, with its output on a pipe that the test passes over. The server has
one thread, so that a fork copies no others; its children end with it, and it ends with the process that made it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

PR_SET_PDEATHSIG = 1
END_S = 120  # a bound against a hanging test, never a measure
KILL_GRACE_S = 0.3  # for survivors of a rank that a test killed, which hang in a collective: plait's 2 s at each kill


@dataclass
class Running:
    """One process: its id, what it has said so far, its ranks' process ids once it said them, how it ended."""

    pid: int
    out: IO[str]
    lines: list[str] = field(default_factory=list)
    status: int | None = None  # exit code or minus the signal, once it was waited for

    def read_until(self, pattern: str) -> re.Match[str] | None:
        """Reads lines until one matches; None when the output ends first."""
        for line in self.out:
            self.lines.append(line.rstrip("\n"))
            if match := re.search(pattern, line):
                return match
        return None

    @property
    def rank_pids(self) -> list[int]:
        """Process ids of the ranks; they must have been read."""
        found = [line for line in self.lines if line.startswith("ranks: pids ")]
        return [int(word) for word in found[0].split()[2:]]

    def finish(self) -> tuple[int, str]:
        """Reads to the end and waits: (exit code or minus the signal, all output)."""
        self.read_until("(?!)")  # no line: an empty one matches "$^"
        self.out.close()
        return self.wait(), "\n".join(self.lines)

    def wait(self) -> int:
        """Waits for the end and reads nothing: exit code or minus the signal."""
        if self.status is None:
            self.status = int(_ask({"wait": self.pid})["status"])
        return self.status


def start(argv: list[str], evaluate: int = 1) -> Running:
    """Starts `plait train ARGV`, which evaluates fewer held-out batches at its end than EVAL_BATCHES, and gives
    the survivors of a dead rank less time."""
    return _begin({"argv": argv, "evaluate": evaluate})


def train(argv: list[str]) -> tuple[int, str]:
    """Runs `plait train ARGV` to its end: (exit code, output)."""
    return start(argv).finish()


def program(code: str) -> Running:
    """Starts what `python -P -c CODE` would, with torch and plait imported already."""
    return _begin({"code": code})


def assert_gone(pids: list[int]) -> None:
    """Waits until each process has ended (a pidfd tells); fails when one does not."""
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        readable, _, _ = select.select([fd], [], [], END_S)
        os.close(fd)
        assert readable, f"process {pid} still runs"


def _begin(request: dict) -> Running:
    read, write = os.pipe()
    try:
        pid = _ask(request, [write])["pid"]
    finally:
        os.close(write)
    return Running(pid, os.fdopen(read, "r"))


def _ask(request: dict, fds: list[int] | None = None) -> dict:
    channel = _server(os.getpid())
    socket.send_fds(channel, [json.dumps(request).encode()], fds or [])
    channel.settimeout(END_S)
    return json.loads(channel.recv(1 << 16))


@functools.cache
def _server(pid: int) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-P", __file__, str(theirs.fileno())]
    # One thread: on shared cores, OpenMP threads that spin for each other make a step fifty times slower.
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=one_thread)
    theirs.close()
    return ours


def _serve(channel: socket.socket) -> None:
    """The server's loop; ends when the other side does."""
    import plait.train  # noqa: F401 - imported for all children
    from plait.launch import preload
    from plait.view import write_plot

    preload()
    with tempfile.TemporaryDirectory() as folder:
        write_plot(Path(folder), [1], [1.0], None)  # matplotlib and its fonts: a second of each run otherwise
    assert len(os.listdir("/proc/self/task")) == 1, "a server with threads must not fork"
    _die_with_parent()
    while True:
        data, fds, _, _ = socket.recv_fds(channel, 1 << 16, 1)
        if not data:
            return
        request = json.loads(data)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            channel.send(json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode())
            continue
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                _die_with_parent()
                channel.close()
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a test run under nohup ignores it
                os.dup2(fds[0], 1)
                os.dup2(fds[0], 2)
                os.close(fds[0])
                sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
                sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
                status = _child(request)
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(OSError):  # as where the reader has gone
                    sys.stdout.flush()
                os._exit(status)
        os.close(fds[0])
        channel.send(json.dumps({"pid": pid}).encode())


def _child(request: dict) -> int:
    """What a forked process does; returns its exit code."""
    if "code" in request:
        try:
            exec(compile(request["code"], "<program>", "exec"), {"__name__": "__main__"})
        except SystemExit as end:
            return int(end.code or 0)
        return 0
    import plait.launch
    import plait.train
    from plait.train_cli import main

    plait.train.EVAL_BATCHES = request["evaluate"]
    plait.launch.KILL_GRACE_S = KILL_GRACE_S
    return main(request["argv"])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
