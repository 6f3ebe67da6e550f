"""The thread that writes what was captured and commits it: one save after the other, errors kept for the handle.

Not a pool and not a policy. The one idea: everything after the capture happens here, in the order of docs/format.md,
and the training thread learns of it only through the handle.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from pathlib import Path

from plait.ckpt.agree import Agreement
from plait.ckpt.captured import Captured
from plait.ckpt.commit import Writer, abort, await_commit, await_disks, bury, coordinate, post_error, publish_latest
from plait.ckpt.delta import Delta
from plait.ckpt.folders import parse_step, remove_folder, session_attempts
from plait.ckpt.handle import Handle
from plait.ckpt.keep import Policy, retain
from plait.ckpt.manifest import Fragment
from plait.ckpt.ownership import Ownership
from plait.ckpt.part import write_part
from plait.ckpt.spare import can_reuse, clear_spares
from plait.ckpt.uploads import Tiers

GRACE_S = 30.0  # how long a program that ends without close(), or fails, still waits for a save in flight


class Background:
    """Owns the writing thread, which `start()` or the first save starts and `close()` ends.

    Thread rule: the training thread calls the public methods. `writer` may be replaced between saves.
    """

    def __init__(
        self,
        writer: Writer,
        session: str,
        policy: Policy,
        agreement: Agreement,
        grid: Mapping[str, int],
        owned: Ownership | None,
        tiers: Tiers,
        delta: bool = False,
    ) -> None:
        self.writer = writer
        self._session, self._policy, self._agreement = session, policy, agreement
        self._grid, self._owned, self._tiers = dict(grid), owned, tiers
        self._delta = Delta() if delta else None
        self._thread: threading.Thread | None = None
        self._left: OSError | None = None  # of the clean-up at the end
        self._jobs: queue.SimpleQueue[tuple[Handle, Captured] | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Starts the writing thread unless it runs."""
        if self._thread is None:
            name = f"plait-snapshots-{self.writer.rank}"
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()
            weakref.finalize(self, _finish, self._jobs, self._thread)  # a program that ends without close()

    def submit(self, handle: Handle, captured: Captured) -> None:
        """Hands a state over, captured or being captured. The pool belongs to the save until the handle is done."""
        self.start()
        self._jobs.put((handle, captured))

    def capture(self, handle: Handle, captured: Captured, finish: Callable[[], None]) -> None:
        """Hands a state over and calls `finish`, which captures it: it is written meanwhile, unless it says that the
        capture comes first. Raises what `finish` does, or what ended the writing before it."""
        early = not captured.first
        if early:
            self.submit(handle, captured)
        try:
            finish()
        except BaseException as error:
            reason = f"the capture failed: {error}"
            captured.cancel(reason)
            if early:
                handle.settle()
                handle.raise_other(error, reason)
            else:
                captured.release()
                self.refuse(handle, error)
            raise
        if not early:
            self.submit(handle, captured)

    def refuse(self, handle: Handle, error: BaseException) -> None:
        """Tells the other ranks that nothing of this save was captured here, so that nobody waits for it."""
        if self.writer.world_size > 1:
            (self._tell if self.writer.rank else self._abort)(self._attempt(handle), error)

    def bury(self) -> None:
        """Rank 0: removes this launch's failed attempts once all ranks are past them."""
        for path in session_attempts(self.writer.root, self._session):
            if not bury(self.writer, path):
                break

    def close(self) -> None:
        """Ends all waiting for other ranks, and the thread."""
        self.writer.stop.set()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def check(self) -> None:
        """After `close`: raises, once, why the disk did not take the clean-up at the end of the thread."""
        left, self._left = self._left, None
        if left is not None:
            raise left

    def _attempt(self, handle: Handle) -> str:
        return f"{handle.step}-{self._session}-{handle.sequence}"

    def _work(self) -> None:
        """The writing thread: one save after the other until None."""
        while (job := self._jobs.get()) is not None:
            handle, captured = job
            error: BaseException | None = None
            try:
                self._write(handle, captured)
            except BaseException as caught:  # kept for the training thread
                error = caught
            captured.release()
            handle.finish(error)
            del job, handle, captured, error  # nothing of this save stays alive while the thread waits for the next
        try:  # here, so that a program that ends without close() leaves no spare either
            self._clear_spares()
        except OSError as later:
            self._left = later

    def _write(self, handle: Handle, captured: Captured) -> None:
        attempt, writer = self._attempt(handle), self.writer
        if writer.disks is not None:
            writer.disks.forget()
        if writer.rank != 0:
            try:
                fragment, _ = write_part(writer, attempt, handle.step, captured, self._delta)
            except BaseException as error:
                self._tell(attempt, error)
                raise
            folder = await_commit(writer, attempt, handle.step)
            self._committed(handle, folder, fragment)
            if self._owned is not None:  # the first rank of another disk
                publish_latest(writer, folder)
                self._tidy(folder, handle.sequence)
            return
        assert self._owned is not None
        try:
            own = write_part(writer, attempt, handle.step, captured, self._delta)
            folder = coordinate(writer, attempt, handle.step, self._owned.lock, self._owned.run, self._grid, own)
        except BaseException as error:
            self._abort(attempt, error)
            raise
        await_disks(writer, attempt, handle.step)
        self._committed(handle, folder, own[0])
        publish_latest(writer, folder)
        self._tidy(folder, handle.sequence)

    def _committed(self, handle: Handle, folder: Path, fragment: Fragment) -> None:
        """The snapshot is durable: the tiers take it over before retention can."""
        handle.committed(folder)
        if self._delta is not None:
            self._delta.committed(folder, fragment)
        self._tiers.submit(handle, folder)

    def _tell(self, attempt: str, error: BaseException) -> None:
        """Tells the coordinator that this rank failed, so that nobody waits for it."""
        try:
            post_error(self.writer, attempt, str(error))
        except OSError as later:  # then the coordinator's time limit names this rank
            error.add_note(f"and the coordinator could not be told: {later}")

    def _abort(self, attempt: str, error: BaseException) -> None:
        try:
            abort(self.writer, attempt, str(error))
        except OSError as later:  # the disk that failed the save may fail the clean-up; the next owner removes it
            error.add_note(f"and its remains could not be removed: {later}")

    def _tidy(self, folder: Path, sequence: int) -> None:
        """After a commit: retention, and the remains of this launch's failed attempts, which all ranks are past.

        Attempts after `sequence` are not: other ranks may be writing the next one already.
        """
        written = parse_step(folder)
        assert written is not None and self._owned is not None
        writer = self.writer
        self._clear_spares()  # that this save did not take; the next one's are of what goes now
        where = (writer.io, writer.root, self._policy, written, self._owned.run, self._session)
        retain(*where, self._spare_ranks())
        self._agreement.clear()
        for path in session_attempts(writer.root, self._session):
            if int(path.name.rpartition("-")[2]) < sequence:
                remove_folder(writer.io, path)

    @cached_property
    def _can_reuse(self) -> bool:
        return can_reuse(self.writer.root)

    def _spare_ranks(self) -> Collection[int]:
        """Returns whose data files retention leaves for the next save to write over."""
        writer = self.writer
        if not (writer.reuse and self._can_reuse):
            return ()
        return range(writer.world_size) if writer.disks is None else writer.disks.here

    def _clear_spares(self) -> None:
        """Owner of the LOCK: removes the data files that no save took."""
        if self._owned is not None and self.writer.reuse:
            clear_spares(self.writer.io, self.writer.root, self._session)


def _finish(jobs: queue.SimpleQueue[tuple[Handle, Captured] | None], thread: threading.Thread) -> None:
    """At the end of the program: lets the thread finish the save in flight."""
    jobs.put(None)
    thread.join(GRACE_S)
