"""LOCK: one writer job per snapshot root.

Not a lease and no heartbeat: the kernel drops a dead owner's flock. The one idea: flock decides, the record inside
names the owner for people, and its epoch, one higher at every change of owner, lets a commit see that it was
replaced.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import weakref
from pathlib import Path
from typing import Any

from plait.ckpt.errors import SnapshotError, SnapshotLocked

_MAX_RECORD_BYTES = 4096


class RootLock:
    """Owns the flock of ROOT/LOCK from construction to `close()`. `epoch` is this ownership's number.

    Raises SnapshotLocked naming the owner when another process, or another object of this process, holds it.
    Thread rule: one thread. A forked child lets go of its copy, so that the lock ends with the parent.
    """

    def __init__(self, root: Path, session: str) -> None:
        self.path = root / "LOCK"
        self.stale_owner: str | None = None
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take(session)
        except BaseException:
            os.close(self._fd)
            raise
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(reference))

    def _take(self, session: str) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SnapshotLocked(f"'{self.path}' is held by {describe_owner(self.record())}") from None
        record = self.record()
        if record.get("held") and owner_is_alive(record):  # a file system on which flock means nothing
            raise SnapshotLocked(f"'{self.path}' is held by {describe_owner(record)}, which is alive")
        if record.get("held"):
            self.stale_owner = describe_owner(record)
        epoch = record.get("epoch", 0)
        self.epoch = (epoch if type(epoch) is int else 0) + 1
        self._write({**_this_process(), "session": session, "epoch": self.epoch, "held": True})

    def record(self) -> dict[str, Any]:
        """Returns the record in the file; empty when it cannot be read."""
        return read_record(self.path)

    def check(self) -> None:
        """Raises SnapshotError unless this object still is the owner."""
        record = self.record()
        if record.get("epoch") != self.epoch or os.fstat(self._fd).st_ino != os.stat(self.path).st_ino:
            raise SnapshotError(f"'{self.path}' was taken over by {describe_owner(record)}; nothing is committed")

    def close(self) -> None:
        """Lets go; a second call does nothing."""
        if self._fd < 0:
            return
        record = self.record()
        if record.get("epoch") == self.epoch:
            self._write({**record, "held": False})
        # A child forked a moment ago may not have run yet and still hold its copy: unlocking reaches that one too.
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._release()

    def _release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _write(self, record: dict[str, Any]) -> None:
        data = json.dumps(record).encode() + b"\n"
        os.pwrite(self._fd, data, 0)
        os.ftruncate(self._fd, len(data))
        os.fsync(self._fd)


def refuse_if_held(root: Path) -> None:
    """Raises SnapshotLocked naming the owner when another job holds ROOT/LOCK; takes nothing, and may be outdated at
    once: RootLock decides. For a process that will fork, whose children would keep a lock of its own.
    """
    path = root / "LOCK"
    record = read_record(path)
    if not record.get("held"):  # not even locked for a moment, in which a job that starts would be refused
        return
    if not owner_is_alive(record):  # or on another host, where only the flock can tell
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        finally:
            os.close(fd)
    raise SnapshotLocked(f"'{path}' is held by {describe_owner(record)}")


def _forget(reference: weakref.ref[RootLock]) -> None:
    lock = reference()
    if lock is not None:
        lock._release()


def read_record(path: Path) -> dict[str, Any]:
    """Returns the owner's record of a LOCK file; empty when there is none or it was torn by a power loss."""
    try:
        with open(path, "rb") as file:
            record = json.loads(file.read(_MAX_RECORD_BYTES))
    except (FileNotFoundError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def describe_owner(record: dict[str, Any]) -> str:
    """Returns "process 12 on host a" for people."""
    if not record:
        return "an unknown process"
    return f"process {record.get('pid')} on host {record.get('host')} (epoch {record.get('epoch')})"


def owner_is_alive(record: dict[str, Any]) -> bool:
    """True when the record's process runs on this machine now, and is not this one.

    Other machines cannot be asked.
    """
    here = _this_process()
    if record.get("host") != here["host"] or record.get("boot_id") != here["boot_id"]:
        return False
    pid = record.get("pid")
    return type(pid) is int and pid != here["pid"] and _start_time(pid) == record.get("start_time") is not None


def _this_process() -> dict[str, Any]:
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot_id = ""  # not Linux: pid and host remain
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "boot_id": boot_id, "start_time": _start_time(pid)}


def _start_time(pid: int) -> int | None:
    """Returns when a process started, in ticks since boot; None when it does not run (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # from the state on, see proc_pid_stat(5)
    return None if fields[0] in "ZX" else int(fields[19])
