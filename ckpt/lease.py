"""Ownership of a root on a file system without flock (some NFS and FUSE mounts): a file whose age says who is alive.

Only where flock is refused; there it is asked instead of the kernel. The one idea: a file made with O_EXCL names the
owner, who touches it from a thread as long as it lives; all ages are between two times of the file server, so that no
clocks are compared. A takeover replaces the file whole, and who was replaced sees it before it commits.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from plait.ckpt.errors import SnapshotError, SnapshotLocked, naming
from plait.ckpt.owner import describe_owner, owner_is_alive, owner_is_here, read_record, this_process

LEASE_S = 120.0  # an owner on another host that was not seen for so long is dead
_RENEWALS = 8  # in that time


class Lease:
    """Owns ROOT/LOCK.lease from construction to `close()`. record: of this owner, with its session.

    SnapshotLocked names an owner that is alive. Thread rule: one thread; its own one only touches the file.
    """

    def __init__(self, root: Path, record: dict[str, Any], lease_s: float = LEASE_S) -> None:
        self.path, self._record, self._lease_s = root / "LOCK.lease", record, lease_s
        self.stale_owner: str | None = None
        self._take()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="plait-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises SnapshotError unless the file still names this owner."""
        if not self._is_mine():
            raise SnapshotError(f"'{self.path}' was taken over by {describe_owner(read_record(self.path))}")

    def close(self) -> None:
        """Lets go: removes the file if it is still this owner's."""
        self._stop.set()
        self._thread.join()
        if self._is_mine():
            with suppress(FileNotFoundError):
                os.unlink(self.path)

    def _take(self) -> None:
        mine = self.path.with_name(f"LOCK.lease.{secrets.token_hex(8)}")
        try:
            fd = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with naming("write", mine), open(fd, "wb") as file:
                file.write(json.dumps(self._record).encode() + b"\n")
                os.fsync(file.fileno())
            try:
                os.link(mine, self.path)  # whole or not at all, and by one of two that come together
                return
            except FileExistsError:
                self._refuse_if_alive(os.stat(mine).st_mtime)
            os.rename(mine, self.path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(mine)
        self.check()  # another one that found the owner dead may have been faster

    def _refuse_if_alive(self, now_s: float) -> None:
        owner = read_record(self.path)
        try:
            age_s = now_s - os.stat(self.path).st_mtime
        except FileNotFoundError:  # let go this moment
            return
        mine = all(owner.get(key) == value for key, value in this_process().items())  # another object of this process
        alive = mine or (owner_is_alive(owner) if owner_is_here(owner) else age_s < self._lease_s)
        if alive:
            raise SnapshotLocked(f"'{self.path}' is held by {describe_owner(owner)}, seen {age_s:.0f} s ago")
        self.stale_owner = describe_owner(owner)

    def _is_mine(self) -> bool:
        return read_record(self.path).get("session") == self._record["session"]

    def _renew(self) -> None:
        while not self._stop.wait(self._lease_s / _RENEWALS):
            try:
                if self._is_mine():
                    os.utime(self.path)
            except OSError:
                continue  # a server that is away for longer than the lease costs the ownership, which `check` says
