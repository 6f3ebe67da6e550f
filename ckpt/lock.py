"""LOCK: one writer job per snapshot root.

The one idea: flock decides, since the kernel drops a dead owner's; the record inside names the owner for people, and
its epoch, one higher at every change of owner, lets a commit see that it was replaced. Where the file system has no
flock, a lease decides (lease.py).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import weakref
from pathlib import Path
from typing import Any

from plait.ckpt.errors import SnapshotError, SnapshotLocked, naming
from plait.ckpt.lease import Lease
from plait.ckpt.owner import describe_owner, owner_is_alive, read_record, this_process

# What flock says on a file system that has none: NFS without a lock server, some FUSE and parallel file systems.
NO_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class RootLock:
    """Owns the flock of ROOT/LOCK from construction to `close()`. `epoch` is this ownership's number.

    Raises SnapshotLocked naming the owner when another process, or another object of this process, holds it.
    Thread rule: one thread. A forked child lets go of its copy, so that the lock ends with the parent.
    """

    def __init__(self, root: Path, session: str) -> None:
        self.path = root / "LOCK"
        self.stale_owner: str | None = None
        self._session = session
        self._lease: Lease | None = None
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take()
        except BaseException:
            os.close(self._fd)
            if self._lease is not None:
                self._lease.close()
            raise
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(reference))

    def _take(self) -> None:
        me = {**this_process(), "session": self._session}
        try:
            with naming("flock", self.path):
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SnapshotLocked(f"'{self.path}' is held by {describe_owner(self.record())}") from None
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
            self._lease = Lease(self.path.parent, me)
            self.stale_owner = self._lease.stale_owner
        record = self.record()
        if record.get("held") and owner_is_alive(record):  # a file system on which flock means nothing
            raise SnapshotLocked(f"'{self.path}' is held by {describe_owner(record)}, which is alive")
        if record.get("held"):
            self.stale_owner = describe_owner(record)
        epoch = record.get("epoch", 0)
        self.epoch = (epoch if type(epoch) is int else 0) + 1
        self._write({**me, "epoch": self.epoch, "held": True})

    def record(self) -> dict[str, Any]:
        """Returns the record in the file; empty when it cannot be read."""
        return read_record(self.path)

    def check(self) -> None:
        """Raises SnapshotError unless this object still is the owner."""
        if self._lease is not None:
            self._lease.check()
        record = self.record()
        mine = (record.get("epoch"), record.get("session")) == (self.epoch, self._session)
        if not mine or os.fstat(self._fd).st_ino != os.stat(self.path).st_ino:
            raise SnapshotError(f"'{self.path}' was taken over by {describe_owner(record)}; nothing is committed")

    def close(self) -> None:
        """Lets go, also where the disk does not take the record any more (OSError); a second call does nothing."""
        if self._fd < 0:
            return
        try:
            record = self.record()
            if record.get("epoch") == self.epoch:
                self._write({**record, "held": False})
        finally:
            self._let_go()

    def _let_go(self) -> None:
        try:
            if self._lease is not None:
                self._lease.close()
            else:  # a child forked a moment ago may not have run yet and still hold its copy: this reaches it too
                with naming("flock", self.path):
                    fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._release()

    def _release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _write(self, record: dict[str, Any]) -> None:
        data = json.dumps(record).encode() + b"\n"
        with naming("write", self.path):
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
            with naming("flock", path):
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
            return
        finally:
            os.close(fd)
    raise SnapshotLocked(f"'{path}' is held by {describe_owner(record)}")


def _forget(reference: weakref.ref[RootLock]) -> None:
    lock = reference()
    if lock is not None:
        lock._release()
