"""Runs a function on n gloo ranks in well under a second: `run_ranks(8, body, arg)`.

Not here: any test. The one idea: a server process imports torch and plait once and forks the ranks of each call; it
never computes, so that a fork copies no threads. The server ends with its pytest process and the ranks end with the
server (PR_SET_PDEATHSIG), so that nothing is left over, however a test ends.

Only tests use pickle: for arguments and results between processes of one user on one machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import importlib.util
import inspect
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PR_SET_PDEATHSIG = 1


class RankError(AssertionError):
    """A rank failed, died or hung; the text holds its traceback or stacks, and what the ranks printed."""


def run_ranks(
    n: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, expect_dead: Sequence[int] = ()
) -> list[Any]:
    """Runs `fn(rank, *args)` on n ranks with an initialised gloo world; returns the results by rank.

    `fn` is a module-level function of a test file or of an importable module; arguments and results are copied. The
    first failure ends the other ranks and raises RankError; after `timeout` seconds so does a hang, with all stacks.
    Ranks in `expect_dead` must die by themselves (a signal or os._exit), and their result is None.
    """
    module = inspect.getmodule(fn)
    assert module is not None and "." not in fn.__qualname__, f"{fn} must be a function at the level of a module"
    request = {
        "n": n,
        "module": module.__name__,
        "file": module.__file__,
        "function": fn.__name__,
        "args": pickle.dumps(args),
        "timeout": timeout,
        "expect_dead": tuple(expect_dead),
        "path": [os.path.abspath(p) for p in sys.path],
    }
    channel = server(os.getpid())
    send(channel, request)
    reply = receive(channel)
    if reply is None:
        server.cache_clear()
        raise RankError("the server of the ranks died")
    if reply["output"]:
        print(reply["output"], end="")
    if "error" in reply:
        raise RankError(reply["error"])
    return [None if data is None else pickle.loads(data) for data in reply["results"]]


@functools.cache
def server(pid: int) -> socket.socket:
    """Starts the server of this process (a forked pytest worker gets its own) and returns the channel to it."""
    ours, theirs = socket.socketpair()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno()), str(pid)],
        pass_fds=[theirs.fileno()],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    return ours


# ---- messages ----------------------------------------------------------------------------------------------------


def send(channel: socket.socket, value: Any) -> None:
    """Sends one length-prefixed value."""
    data = pickle.dumps(value)
    channel.sendall(struct.pack("<Q", len(data)) + data)


def receive(channel: socket.socket) -> Any:
    """Receives one value; None when the other side is gone."""
    head = read_exactly(channel, 8)
    data = read_exactly(channel, struct.unpack("<Q", head)[0]) if head else None
    return pickle.loads(data) if data else None


def read_exactly(channel: socket.socket, count: int) -> bytes | None:
    """Reads `count` bytes; None when the other side is gone before."""
    data = bytearray()
    while len(data) < count:
        try:
            piece = channel.recv(min(count - len(data), 1 << 20))
        except ConnectionError:
            return None
        if not piece:
            return None
        data += piece
    return bytes(data)


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when its parent ends; also when that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


# ---- the server --------------------------------------------------------------------------------------------------


def serve(channel: socket.socket) -> None:
    """Answers requests, one after the other, until the other side closes."""
    while (request := receive(channel)) is not None:
        sys.path[:] = request["path"]
        with tempfile.TemporaryDirectory(prefix="plait-ranks-") as folder:
            try:
                reply = Ranks(request, Path(folder), channel).run()
            except Exception:
                reply = {"error": traceback.format_exc(), "output": ""}
        send(channel, reply)


def load_function(request: dict[str, Any]) -> Callable[..., Any]:
    """Imports the test module under the name that pytest gave it, from its file if the name alone is not enough."""
    name = request["module"]
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, request["file"])
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return getattr(sys.modules[name], request["function"])


class Ranks:
    """The ranks of one request: forks them, waits for what they report, and ends them all."""

    def __init__(self, request: dict[str, Any], folder: Path, channel: socket.socket) -> None:
        self.request, self.folder, self.channel = request, folder, channel
        self.n = request["n"]
        self.pids: list[int] = []
        self.pipes: list[socket.socket] = []

    def run(self) -> dict[str, Any]:
        """Returns the reply: results by rank, or an error text; and what the ranks printed."""
        function = load_function(self.request)
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        try:
            for rank in range(self.n):
                self.fork(rank, function, listener)
            listener.close()
            results, failure = self.collect()
        finally:
            self.end()
        output = "".join(self.printed(rank) for rank in range(self.n))
        if failure:
            return {"error": f"{failure}\n{output}", "output": ""}
        return {"results": results, "output": output}

    def fork(self, rank: int, function: Callable[..., Any], listener: socket.socket) -> None:
        """Forks one rank; it reports through a pipe and stays until it is killed, so that no peer loses it early."""
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with_parent(parent)
            for pipe in [ours, self.channel, *self.pipes]:
                pipe.close()
            run_rank(rank, function, self.request, self.folder, theirs, listener)
        theirs.close()
        self.pids.append(pid)
        self.pipes.append(ours)

    def collect(self) -> tuple[list[bytes | None], str]:
        """Waits for all reports; returns the results and the text of the earliest failure, "" without one."""
        results: list[bytes | None] = [None] * self.n
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        deadline = time.monotonic() + self.request["timeout"]
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return results, self.stacks(sorted(waiting.values()))
            failures = []
            for pipe in ready:
                rank = waiting.pop(pipe)
                report = receive(pipe)
                if report is None:
                    if rank not in self.request["expect_dead"]:
                        failures.append((time.monotonic(), f"rank {rank} died without a word: {self.exit_of(rank)}"))
                elif report["error"]:
                    failures.append((report["when"], f"rank {rank} of {self.n} failed:\n{report['error']}"))
                elif rank in self.request["expect_dead"]:
                    failures.append((report["when"], f"rank {rank} was expected to die, but it returned"))
                else:
                    results[rank] = report["result"]
            if failures:
                return results, min(failures)[1]
        return results, ""

    def exit_of(self, rank: int) -> str:
        """Says how a rank that is gone has ended."""
        _, status = os.waitpid(self.pids[rank], 0)
        self.pids[rank] = 0
        code = os.waitstatus_to_exitcode(status)
        return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"

    def stacks(self, ranks: Sequence[int]) -> str:
        """Makes the hanging ranks write the stacks of all their threads and returns them."""
        text = [f"ranks {list(ranks)} of {self.n} did not finish within {self.request['timeout']} s"]
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR1)
        limit = time.monotonic() + 3.0
        for rank in ranks:
            path = self.folder / f"stacks{rank}"
            while "most recent call first" not in path.read_text() and time.monotonic() < limit:
                select.select([], [], [], 0.02)
            select.select([], [], [], 0.1)  # the dump takes several writes
            text.append(f"---- rank {rank} hangs at:\n{path.read_text()}")
        return "\n".join(text)

    def end(self) -> None:
        """Kills and reaps every rank."""
        for pid in self.pids:
            if pid:
                os.kill(pid, signal.SIGKILL)
        for pid in self.pids:
            if pid:
                os.waitpid(pid, 0)
        for pipe in self.pipes:
            pipe.close()

    def printed(self, rank: int) -> str:
        """Returns the last 20 kB that a rank printed, each line with the rank in front."""
        path = self.folder / f"output{rank}"
        text = path.read_text(errors="replace")[-20000:] if path.exists() else ""
        return "".join(f"[rank {rank}] {line}\n" for line in text.splitlines())


def run_rank(
    rank: int,
    function: Callable[..., Any],
    request: dict[str, Any],
    folder: Path,
    pipe: socket.socket,
    listener: socket.socket,
) -> None:
    """The life of a rank: output into a file, gloo world, the function, one report; then it waits to be killed."""
    report: dict[str, Any] = {"error": "", "result": None}
    try:
        output = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
        stacks = open(folder / f"stacks{rank}", "w")  # lives as long as the process
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        store = start_world(rank, request["n"], request["timeout"], listener)
        report["result"] = pickle.dumps(function(rank, *pickle.loads(request["args"])))
        del store
    except BaseException:
        report["error"] = traceback.format_exc()
    report["when"] = time.monotonic()
    send(pipe, report)
    while True:
        signal.pause()


def start_world(rank: int, n: int, timeout: float, listener: socket.socket) -> Any:
    """Initialises torch.distributed over gloo; rank 0 serves the store on the socket that the server bound."""
    import datetime

    import torch

    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=timeout)
    host, port = listener.getsockname()
    options: dict[str, Any] = {"master_listen_fd": os.dup(listener.fileno())} if rank == 0 else {}
    listener.close()
    store = torch.distributed.TCPStore(host, port, n, rank == 0, limit, wait_for_workers=False, **options)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=limit)
    return store


def main() -> None:
    """Entry of the server: `ranks.py FD PARENT`."""
    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's; the server ends with it
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    import torch

    # Once, for all the ranks to come: each would import these at its first backward, optimizer or FSDP2, a second.
    import torch._dynamo
    import torch.fx.experimental.symbolic_shapes

    import plait.parallel.collectives  # noqa: F401

    torch.set_num_threads(1)
    serve(channel)


if __name__ == "__main__":
    main()
