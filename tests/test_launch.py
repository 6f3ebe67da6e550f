"""The launcher: it ends all ranks as one, says who failed and why, and leaves no process, however it ends.

Each case runs a small program in a fresh process with one thread, because a launcher forks before torch is used.
Nothing waits by the clock: tests read lines and wait for processes to end.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from plait.launch import KILL_GRACE_S
from tests import launchers
from tests.launchers import assert_gone

pytestmark = pytest.mark.ranks

HEAD = """
import os, signal, sys, time
import torch
import plait.launch
from plait.launch import launch
from plait.view import PlainView
signal.signal(signal.SIGHUP, signal.{hangup})
plait.launch.KILL_GRACE_S = {grace}
def wait():
    while True:
        signal.pause()
def hang():  # as a collective does: no Python runs
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    wait()
"""
TAIL = "\nsys.exit(launch(program, {world}, PlainView(sys.stdout), stop_bound_s={bound}))\n"
SHORT_S = 0.3  # grace where peers hang and have nothing to say


@contextmanager
def launched(
    body: str, world: int = 3, bound: float = 30.0, hangup: str = "SIG_DFL", grace: float = KILL_GRACE_S
) -> Iterator[launchers.Running]:
    """A launcher that runs `body` (defines `program`); killed at the end if it still runs. hangup: what it was told
    to do with SIGHUP; nohup says SIG_IGN. grace: seconds until survivors of a dead rank are killed."""
    head = HEAD.format(hangup=hangup, grace=grace)
    process = launchers.program(head + body + TAIL.format(world=world, bound=bound))
    try:
        yield process
    finally:
        if process.status is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        process.out.close()


def read_until(process: launchers.Running, marks: list[str]) -> list[str]:
    """Lines until each mark was seen once."""
    left, lines = list(marks), []
    while left:
        line = process.out.readline()
        assert line, f"ended without {left}; said {process.lines}"
        lines.append(line.rstrip())
        process.lines.append(lines[-1])
        left = [mark for mark in left if mark not in line]
    return lines


def test_all_ranks_return() -> None:
    body = """
def program(rank):
    rank.connect()
    total = torch.ones(()) * rank.rank
    torch.distributed.all_reduce(total)
    rank.emit({"kind": "note", "text": f"event {rank.rank} of {rank.place.world_size}: {total.item()}"})
    print("to stdout", rank.rank)
    print("to stderr", rank.rank, file=sys.stderr)
    rank.disconnect()
"""
    with launched(body) as process:
        status, out = process.finish()
    assert status == 0, out
    for rank in range(3):
        assert f"[rank {rank}] to stdout {rank}" in out
        assert f"[rank {rank}] to stderr {rank}" in out
        assert f"event {rank} of 3: 3.0" in out


def test_a_rank_that_raises_is_named_with_its_error() -> None:
    body = """
def program(rank):
    if rank.rank == 1:
        raise ValueError("the weights are blue")
    hang()
"""
    with launched(body, grace=SHORT_S) as process:
        read_until(process, ["ranks: pids"])
        status, out = process.finish()
        assert_gone(process.rank_pids)
    assert status == 1
    assert "rank 1 (pid" in out and "exited with status 1; its last error: ValueError: the weights are blue" in out
    assert "the other ranks were stopped" in out


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, *(pytest.param(n, marks=pytest.mark.long) for n in (signal.SIGSEGV, signal.SIGABRT))]
)
def test_a_killed_rank_is_named_with_its_signal(number: signal.Signals) -> None:
    body = """
def program(rank):
    print("about to wait", rank.rank)
    wait()
"""
    with launched(body, grace=SHORT_S) as process:
        read_until(process, ["ranks: pids"] + [f"about to wait {rank}" for rank in range(3)])
        os.kill(process.rank_pids[2], number)
        status, out = process.finish()
        assert_gone(process.rank_pids)
    assert status == 1
    assert f"rank 2 (pid {process.rank_pids[2]}) was killed by {number.name}; its last line: about to wait 2" in out


def test_the_first_to_fail_is_named_not_the_peers_that_lost_it() -> None:
    body = """
def program(rank):
    rank.connect()
    torch.distributed.barrier()
    print("joined", rank.rank)
    if rank.rank == 0:
        wait()
    torch.distributed.all_reduce(torch.ones(()))
"""
    with launched(body) as process:
        read_until(process, ["ranks: pids"] + [f"joined {rank}" for rank in range(3)])
        os.kill(process.rank_pids[0], signal.SIGKILL)
        status, out = process.finish()
    assert status == 1
    assert "rank 0 (pid" in out.splitlines()[-1] and "was killed by SIGKILL" in out.splitlines()[-1]


def test_a_rank_that_leaves_without_a_word() -> None:
    with launched("def program(rank):\n    os._exit(7) if rank.rank == 2 else hang()\n", grace=SHORT_S) as process:
        status, out = process.finish()
    assert status == 1 and "rank 2 (pid" in out and "exited with status 7" in out


def test_ranks_die_with_a_killed_launcher() -> None:
    body = "def program(rank):\n    print('up', rank.rank)\n    hang()\n"
    with launched(body) as process:
        read_until(process, ["ranks: pids", "up 0", "up 1", "up 2"])
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert_gone(process.rank_pids)


UNTIL_ASKED = """
def program(rank):
    print("up", rank.rank)
    while not rank.stop.requested:
        time.sleep(0.01)
    print("saved", rank.rank)
    open(f"{folder}/saved-{{rank.rank}}", "x").close()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_asks_every_rank_to_stop_and_exit_is_0(tmp_path: Path, number: signal.Signals) -> None:
    with launched(UNTIL_ASKED.format(folder=tmp_path)) as process:
        read_until(process, ["ranks: pids", "up 0", "up 1", "up 2"])
        os.kill(process.pid, number)
        status, out = process.finish()
        assert_gone(process.rank_pids)
    assert status == 0, out
    assert f"{number.name}: finishing the step" in out
    assert all(f"saved {rank}" in out for rank in range(3))


def test_a_closed_terminal_is_a_request_to_stop_for_launcher_and_ranks(tmp_path: Path) -> None:
    """SIGHUP ended all at once without a save. It comes to the whole process group, maybe twice, with no output."""
    with launched(UNTIL_ASKED.format(folder=tmp_path)) as process:
        read_until(process, ["ranks: pids", "up 0", "up 1", "up 2"])
        process.out.close()
        for pid in (*process.rank_pids, process.pid, process.pid):
            os.kill(pid, signal.SIGHUP)
        assert process.wait() == 0
        assert_gone(process.rank_pids)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved-0", "saved-1", "saved-2"]


def test_a_wish_to_save_reaches_one_rank_and_ends_nothing(tmp_path: Path) -> None:
    """SIGUSR1 ended the launcher, and with it the run."""
    body = """
def program(rank):
    if rank.rank != 2:  # that one does not heed it yet
        signal.signal(signal.SIGUSR1, lambda *_: print("wish of", rank.rank))
    print("up", rank.rank)
    while not rank.stop.requested:
        time.sleep(0.01)
"""
    with launched(body) as process:
        read_until(process, ["ranks: pids", "up 0", "up 1", "up 2"])
        for _ in range(2):
            os.kill(process.pid, signal.SIGUSR1)
            lines = read_until(process, ["SIGUSR1: a snapshot", "wish of 0"])
            assert not any("wish of 1" in line for line in lines)
        os.kill(process.rank_pids[2], signal.SIGUSR1)
        os.kill(process.pid, signal.SIGTERM)
        status, out = process.finish()
    assert status == 0 and "wish of 1" not in out and "killed" not in out, out


def test_a_hangup_never_counts_as_the_second_signal(tmp_path: Path) -> None:
    """Ctrl-C, then the window is closed: the save still comes to its end."""
    body = """
def program(rank):
    print("up", rank.rank)
    while not os.path.exists("{folder}/go"):
        time.sleep(0.01)
    print("saved", rank.rank)
"""
    with launched(body.format(folder=tmp_path)) as process:
        read_until(process, ["ranks: pids", "up 0", "up 1", "up 2"])
        os.kill(process.pid, signal.SIGINT)
        read_until(process, ["SIGINT: finishing"])
        os.kill(process.pid, signal.SIGHUP)
        while "State:\tS" not in (text := Path(f"/proc/{process.pid}/status").read_text()) or pending(text):
            pass  # until the launcher has taken the signal and waits again
        (tmp_path / "go").touch()
        status, out = process.finish()
    assert status == 0 and all(f"saved {rank}" in out for rank in range(3)), out


def pending(status: str) -> bool:
    """Whether a process has a signal that it has not taken yet, by its /proc/PID/status."""
    return any(int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd")))


def test_under_nohup_a_hangup_changes_nothing(tmp_path: Path) -> None:
    with launched(UNTIL_ASKED.format(folder=tmp_path), hangup="SIG_IGN") as process:
        read_until(process, ["ranks: pids", "up 0", "up 1", "up 2"])
        for pid in (process.pid, *process.rank_pids):
            os.kill(pid, signal.SIGHUP)
        os.kill(process.pid, signal.SIGTERM)
        status, out = process.finish()
    assert status == 0 and "SIGTERM: finishing" in out and "SIGHUP" not in out


def test_a_reader_that_leaves_ends_the_run_after_a_save(tmp_path: Path) -> None:
    """The launcher once died of the broken pipe, and with it the ranks."""
    body = UNTIL_ASKED.format(folder=tmp_path).replace("time.sleep(0.01)", "print('more')")
    with launched(body) as process:
        read_until(process, ["ranks: pids", "up 0", "up 1", "up 2"])
        process.out.close()
        assert process.wait() == 128 + signal.SIGPIPE
        assert_gone(process.rank_pids)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved-0", "saved-1", "saved-2"]


def test_output_that_cannot_be_written_ends_the_run_after_a_save(tmp_path: Path) -> None:
    """As on a full disk that holds the log."""
    body = UNTIL_ASKED.format(folder=tmp_path) + "\nos.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
    with launched(body) as process:
        status, out = process.finish()
    assert status == 1 and "the output cannot be written" in out and "No space left on device" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved-0", "saved-1", "saved-2"]


def test_only_the_rank_that_failed_first_prints_its_traceback() -> None:
    """Every rank printed one, and the cause was somewhere among them."""
    body = """
def program(rank):
    rank.connect()
    torch.distributed.barrier()
    if rank.rank == 1:
        raise ValueError("the weights are blue")
    torch.distributed.all_reduce(torch.ones(()))
"""
    with launched(body) as process:
        status, out = process.finish()
    assert status == 1 and out.count("Traceback") == 1, out
    assert "[rank 1] ValueError: the weights are blue" in out
    for rank in (0, 2):
        assert len([line for line in out.splitlines() if line.startswith(f"[rank {rank}]")]) == 1, out
        assert f"[rank {rank}] stopped, because a peer failed (" in out
    assert "rank 1 (pid" in out.splitlines()[-1]


def test_one_error_on_all_ranks_is_printed_once() -> None:
    body = "def program(rank):\n    raise RuntimeError('the loss is nan')\n"
    with launched(body) as process:
        status, out = process.finish()
    assert status == 1 and out.count("Traceback") == 1, out
    assert out.count("failed in the same way (RuntimeError: the loss is nan)") >= 1


def test_one_failure_in_each_rank_s_own_words_is_printed_once() -> None:
    """A disk that is full for all, each with its own file and size, once filled two screens with tracebacks."""
    body = "def program(rank):\n    raise OSError(28, f'{rank.rank} bytes are needed', f'r{rank.rank}')\n"
    with launched(body) as process:
        status, out = process.finish()
    assert status == 1 and "Traceback" not in out, "an error of the machine explains itself"
    assert len([line for line in out.splitlines() if "] OSError: [Errno 28]" in line]) == 1, out
    for line in [line for line in out.splitlines() if "failed in the same way" in line]:
        rank = line[6]
        assert (
            line == f"[rank {rank}] failed in the same way (OSError: [Errno 28] {rank} bytes are needed: 'r{rank}')"
        )


def test_a_rank_that_only_passes_on_what_another_said_is_not_the_cause() -> None:
    """As the coordinator of a save does, which may raise it before the rank that failed."""
    body = """
def program(rank):
    if rank.rank == 0:
        raise RuntimeError("rank 1 could not write: no room for 7 bytes")
    while not rank.stop.requested:
        time.sleep(0.01)
    if rank.rank == 1:
        raise ValueError("no room for 7 bytes")
"""
    with launched(body) as process:
        status, out = process.finish()
    assert status == 1 and out.count("Traceback") == 1, out
    assert "[rank 1] ValueError: no room for 7 bytes" in out
    assert "[rank 0] stopped, because a peer failed (RuntimeError: rank 1 could not write: no room for 7" in out
    assert out.splitlines()[-1].startswith("rank 1 (pid")


def test_another_error_of_another_rank_is_not_lost() -> None:
    body = """
def program(rank):
    print("up", rank.rank)
    while not rank.stop.requested and rank.rank == 2:
        time.sleep(0.01)
    if rank.rank == 2:
        raise KeyError("green")
    if rank.rank == 1:
        raise ValueError("the weights are blue")
    hang()
"""
    with launched(body) as process:
        status, out = process.finish()
    assert status == 1 and out.count("Traceback") == 2, out
    assert "[rank 1] ValueError: the weights are blue" in out and "[rank 2] KeyError: 'green'" in out
    assert "rank 1 (pid" in out.splitlines()[-1]


def test_the_last_error_is_the_error_and_not_a_note_added_to_it() -> None:
    body = """
def program(rank):
    error = ValueError("the weights\\nare blue")
    error.add_note("and closing failed")
    raise error
"""
    with launched(body, world=1) as process:
        status, out = process.finish()
    assert status == 1
    assert "its last error: ValueError: the weights are blue (and closing failed)" in out.splitlines()[-1]


def test_a_rank_that_does_not_stop_in_time_is_killed() -> None:
    with launched("def program(rank):\n    print('up', rank.rank)\n    hang()\n", bound=0.1) as process:
        read_until(process, ["ranks: pids", "up 0", "up 1", "up 2"])
        os.kill(process.pid, signal.SIGTERM)
        status, out = process.finish()
        assert_gone(process.rank_pids)
    assert status == 1 and "ranks 0, 1, 2 did not stop within 0.1 s" in out


def test_a_second_signal_ends_at_once() -> None:
    with launched("def program(rank):\n    print('up', rank.rank)\n    hang()\n") as process:
        read_until(process, ["ranks: pids", "up 0", "up 1", "up 2"])
        os.kill(process.pid, signal.SIGTERM)
        read_until(process, ["SIGTERM: finishing"])
        os.kill(process.pid, signal.SIGTERM)
        status, out = process.finish()
        assert_gone(process.rank_pids)
    assert status == 128 + signal.SIGTERM and "second signal" in out


def test_a_reader_that_goes_away_ends_ranks_that_do_not_stop() -> None:
    body = """
def program(rank):
    print("up", rank.rank)
    while True:
        print("more")
"""
    with launched(body, bound=0.5) as process:
        read_until(process, ["ranks: pids"])
        process.out.close()
        assert process.wait() != 0
        assert_gone(process.rank_pids)


def test_a_long_line_without_an_end_is_not_lost() -> None:
    body = "def program(rank):\n    sys.stdout.write('x' * 200000 + 'end')\n"
    with launched(body, world=1) as process:
        status, out = process.finish()
    assert status == 0 and "x" * 200000 + "end" in out
