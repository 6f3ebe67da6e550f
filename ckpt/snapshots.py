"""`Snapshots`: the one object a training loop holds. Save without waiting for the disk, restore onto any grid.

Not a trainer's policy of when to save. The one idea: `save` copies and returns; one thread per object writes and
commits; whatever went wrong there is raised by `handle.wait()` or else by the next call, once.

Thread rule: one training thread calls the methods; `prepare` or else the first save starts its own.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from plait import _C
from plait.ckpt.agree import Agreement
from plait.ckpt.aside import METRICS, check_metrics
from plait.ckpt.background import GRACE_S, Background
from plait.ckpt.candidates import Seen, candidates, newest_step, newest_valid
from plait.ckpt.capture import Capturer
from plait.ckpt.commit import Writer
from plait.ckpt.crypt import Key, load_key
from plait.ckpt.disks import Disks
from plait.ckpt.errors import SnapshotError
from plait.ckpt.group import options_of_group
from plait.ckpt.handle import Handle
from plait.ckpt.keep import Policy
from plait.ckpt.lazy import sizes_to_come
from plait.ckpt.lock import RootLock
from plait.ckpt.ownership import own
from plait.ckpt.partner import Partner
from plait.ckpt.restore import Restored, Wanted, restore_state
from plait.ckpt.state import Node
from plait.ckpt.structure import Flattener
from plait.ckpt.tiers import Launch, Tier
from plait.ckpt.uploads import Tiers


class Snapshots:
    """Snapshots of one run under `root`. Under torch.distributed: `Snapshots.of_process_group(root)`.

    keep_last, keep_every, keep_best: retention (keep.Policy). rank, world_size, session: of this launch; `session` is
    any integer equal on all ranks and new at every launch, needed when world_size > 1. grid: noted in the manifest.
    timeout_s: how long a rank is waited for before it is named. pool_bytes: all the staging memory there may be,
    taken and faulted in now; a larger state goes through it in slabs (see Handle). 0: as much as the state needs,
    taken by `prepare` or else by the first save. pin: page-lock it for CUDA; None: once a state is on a device.
    threads: for copying; twice as many write and four times as many read, which mostly wait. Writing runs at `nice`
    and `io_priority` (normal, low, idle). rate_limit: bytes per second for writing, 0 none. read_only: takes no LOCK,
    saves nothing. delta: what did not change since the last save is linked, not written (plait.ckpt.delta). tiers:
    where committed snapshots are copied in the background (tiers.Tier), nearest first; a restore takes the nearest
    good copy. key, key_file: 32 bytes or their hex digits, or a file with them: it signs manifests, which must then
    be signed by it, and seals encrypted tiers. agreement_root: where ranks agree during a restore, when they cannot
    write to `root`. store: a torch.distributed Store, when the ranks' roots are not one folder (plait.ckpt.disks);
    all then make the object together. partner: data files also go into another rank's root (plait.ckpt.partner).
    reuse_files: a save writes over the data files of the snapshot that retention removed last, about twice as fast as
    new ones; the disk holds that snapshot's space until the next save or `close()`. What anything else has open,
    mapped or linked is not reused; False where other hosts read this disk. io: the system calls (tests fail them).

    Rank 0 takes the LOCK: SnapshotLocked names the owner when another job writes here. It also removes what dead
    attempts left behind. Make the object after any fork.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        keep_best: tuple[str, str, int] | None = None,
        rank: int = 0,
        world_size: int = 1,
        session: int | None = None,
        grid: Mapping[str, int] | None = None,
        timeout_s: float = 600.0,
        pool_bytes: int = 0,
        threads: int = 2,
        rate_limit: int = 0,
        direct: bool = True,
        pin: bool | None = None,
        nice: int = 10,
        io_priority: str = "low",
        read_only: bool = False,
        agreement_root: str | Path | None = None,
        store: Any = None,
        partner: Partner | None = None,
        delta: bool = False,
        tiers: Sequence[Tier] = (),
        key: bytes | str | Key | None = None,
        key_file: str | Path | None = None,
        reuse_files: bool = True,
        io: _C.Io | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must be in 0 .. world_size - 1 = {world_size - 1}")
        if world_size > 1 and session is None:
            raise ValueError("session: several ranks need one integer, equal on all and new at every launch")
        if io_priority not in ("normal", "low", "idle") or not 0 <= nice <= 19:
            raise ValueError(f"io_priority={io_priority!r}, nice={nice}: must be normal, low or idle, and 0 to 19")
        self.root = Path(root).absolute()
        self.rank, self.world_size = rank, world_size
        self.policy = Policy(keep_last, keep_every, keep_best)
        self.waits = 0
        self._session = f"{(secrets.randbits(64) if session is None else session) & (2**64 - 1):016x}"
        self._grid = dict(grid or {})
        self._io = io or _C.PosixIo()
        self._key = load_key(key, key_file)
        self._tiers = Tiers(tiers, self._io, self._session, self._key, threads)
        stop = threading.Event()
        disks = Disks(store, self._io, self._session, rank, world_size, self.root) if store is not None else None
        limits = (threads, rate_limit, direct, timeout_s, stop, nice, io_priority)
        peers = self._tiers.join(partner, store, self.root, rank, world_size)
        writer = Writer(self._io, self.root, rank, world_size, *limits, self._key, disks, peers, reuse_files)
        self._agreement = Agreement(writer, Path(agreement_root or root).absolute(), self._session)
        self._seen = Seen(self._io, self.root, threads, self._tiers, self._key, self._agreement)
        self._capturer: Capturer | None = None
        self._background: Background | None = None
        self._lock: RootLock | None = None
        self._flattener, self._sequence = Flattener(), 0
        self._last: Handle | None = None
        if not read_only:
            owned = own(self._io, self.root, rank, self._session, self._tiers.known_run, disks)
            self._lock = None if owned is None else owned.lock
            self._background = Background(
                writer, self._session, self.policy, self._agreement, self._grid, owned, self._tiers, delta
            )
            run = "" if owned is None else owned.run
            end = threading.Event()  # not that of the writer: copies go on while it is closed
            launch = Launch(rank, world_size, self._session, self._io, self._key, run, timeout_s, end)
            try:
                self._tiers.start(launch, newest_valid(self._io, self.root, self._key) if tiers else None)
            except BaseException:
                self.close(timeout_s=0.0)
                raise
            self._capturer = Capturer(rank, world_size, pool_bytes, threads, pin)

    @classmethod
    def of_process_group(cls, root: str | Path, **options: Any) -> Snapshots:
        """Makes the object on all ranks of torch.distributed's default group, whose rank, world size and session it
        asks for, with store=True or `partner` also its store. Without a group the same as `Snapshots(root, ...)`."""
        return cls(root, **options_of_group(options))

    def save(
        self,
        step: int,
        state: dict[str, Any],
        *,
        force: bool = False,
        metrics: Mapping[str, float] | None = None,
    ) -> Handle:
        """Captures `state` as it is now and returns; writing and commit go on in the background.

        All ranks call it with the same step, in the same order. One save is in flight at a time: another one waits
        for it (and is counted in `waits` unless `force`, which says that the wait is meant, as at the end of a run);
        skipping would leave ranks with different ideas of what was saved. CUDA tensors without a guard are captured
        in the order of the caller's current stream alone. Raises an earlier save's error first, StateError for what
        cannot be stored; nothing of this step is then written. metrics: noted in the manifest for `keep_best`.
        """
        background, capturer = self._writing()
        if type(step) is not int or step < 0:
            raise ValueError(f"step={step!r}: must be an integer >= 0")
        began = time.monotonic()
        if self._last is not None and not self._last.done():
            self.waits += not force
            self._last.settle()
        waited_s = time.monotonic() - began
        self.check()
        self._sequence += 1
        handle = Handle(step, self._sequence)
        try:
            flat = self._flattener.flatten(state)
            if metrics:
                flat.values[METRICS] = Node("value", METRICS, "metrics", check_metrics(metrics))
            captured = capturer.begin(step, flat)
        except BaseException as error:
            background.refuse(handle, error)
            raise
        handle.began, handle.waited_s = began, waited_s
        handle.describe(captured, self._bytes_per_s())
        background.capture(handle, captured, lambda: capturer.finish(captured, flat))
        self._last = handle
        handle.stall_s = time.monotonic() - began
        return handle

    def guard(self, optimizer: Any) -> None:
        """Lets `save` return before the tensors of this optimizer are captured: parameters and state, which then it
        alone may write to. Its next step waits for what it is about to overwrite (by `register_write_pre_hook`, else
        by torch's `register_step_pre_hook`), so nothing is to be called by the user.

        Whatever else writes to them after a save (an average swapped in, a resize, a replayed CUDA graph, a compiled
        step, which runs no hooks) needs `handle.fence()` first. A write without it is found by samples of the bytes
        and by tensor._version, most but not all: the save then fails with TornSnapshot. Tensors below 64 KiB, and
        those that no guarded optimizer writes, are still captured in the call. Guard again after a restart only; the
        guard ends with `close()`.
        """
        self._writing()[1].guards.add(optimizer)

    def prepare(self, state: dict[str, Any], *, extra_bytes: int = 0) -> None:
        """Takes the staging memory for `state` and faults it in, so that the first save stalls like any other.

        To be called before training, after a restore if there is one. What torch's optimizers make at their first
        step counts already; extra_bytes: of other state that is still to come. Not needed with `pool_bytes`.
        """
        self.wait()
        background, capturer = self._writing()
        background.start()
        capturer.prepare(self._flattener.flatten(state), extra_bytes, sizes_to_come(state))

    def restore(
        self,
        state: dict[str, Any],
        *,
        step: int | None = None,
        allow_missing: Sequence[str] = (),
        allow_unexpected: Sequence[str] = (),
        cast: bool | Sequence[str] | None = None,
    ) -> Restored:
        """Fills `state` from the newest snapshot that all ranks can read, or from that of `step`. See Restored.

        All ranks call it together. Names are strict both ways: what only the state has, or only the snapshot (over
        all ranks), is an error unless a pattern in `allow_missing` / `allow_unexpected` names it. Another dtype is an
        error unless `cast` (True, or patterns) allows the conversion; another full shape always is. A damaged
        snapshot is passed over with its reason in `report.skipped`. SnapshotError lists every candidate and why it
        was rejected; after an error that was found while reading, tensors of the state may hold parts of a snapshot.
        """
        self.wait()
        wanted = Wanted(tuple(allow_missing), tuple(allow_unexpected), cast if cast is not None else False)
        listed = partial(candidates, self._seen, step)
        return restore_state(listed, self.root, self.rank, self._agreement, state, wanted)

    def settle(self) -> None:
        """Removes what the ranks left in the folder to agree on a restore, once all of them have returned from it,
        which the caller knows; else the next commit does."""
        self._agreement.clear()

    def latest(self) -> int | None:
        """Returns the step of the newest snapshot with right manifest and sizes, here or in a tier (with disks of
        their own: on all ranks, which call it together); None: there is none. SnapshotError: none is good."""
        return newest_step(self._seen)

    def wait(self) -> None:
        """Waits for the save in flight; raises its error, or that of an earlier one, unless it was raised before."""
        if self._last is not None:
            self._last.wait()

    def check(self) -> None:
        """Raises the error of a finished save unless it was raised before. Does not wait."""
        if self._last is not None and self._last.done():
            self._last.raise_once()
        self._tiers.check()

    def _writing(self) -> tuple[Background, Capturer]:
        if self._background is None or self._capturer is None:
            raise SnapshotError(f"'{self.root}' was opened read-only, or is closed: nothing can be saved")
        return self._background, self._capturer

    def _bytes_per_s(self) -> float | None:
        """Returns how fast the last durable save was written, for what the next one says of itself."""
        last = self._last
        return last.nbytes / last.durable_s if last is not None and last.durable_s else None

    def close(self, timeout_s: float | None = None) -> None:
        """Waits for the save in flight, lets go of thread, memory and LOCK; raises what is still to be raised.

        timeout_s: how long to wait for other ranks; after that the save in flight is given up. None: as long as a
        save may.
        """
        if self._last is not None:
            self._last.settle(timeout_s)
        if self._background is not None:
            if self._lock is not None and (self._last is None or self._last.done()):
                self._background.bury()
            self._background.close()
        try:
            self._tiers.close(timeout_s)
            if self._capturer is not None:
                self._capturer.close()
        finally:
            self._capturer, lock, self._lock = None, self._lock, None
            if lock is not None:
                lock.close()
        self.check()
        if self._background is not None:
            self._background.check()  # what its thread had to say at its end

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close(timeout_s=GRACE_S)
        except (SnapshotError, OSError) as later:
            error.add_note(f"and closing the snapshots failed: {later}")
