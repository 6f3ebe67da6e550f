"""Copies a state into the staging pool. When a save returns, the caller may change anything but tensors of guarded
optimizers, which those change only after they are captured too (guard.py).

Not a writer. The one idea: the pool has the layout of the data file, so that writing is one pass over it; the layout
(and where each tensor lies in memory) is kept between saves and made anew as soon as anything about a tensor differs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from plait import _C
from plait.ckpt.captured import Captured
from plait.ckpt.device import DeviceCopies, DevicePiece, bytes_of, is_plain
from plait.ckpt.guard import Flight, Guard, Guards, Held, hold_in_place, versions_of
from plait.ckpt.layout import SMALL_BYTES, DataLayout, Placed, lay_out, shares_of
from plait.ckpt.leaf import Leaf
from plait.ckpt.state import Flat
from plait.ckpt.streams import CudaStreams, Streams
from plait.ckpt.structure import signature_of, tensors_of
from plait.ckpt.values import encode

BLOCK_BYTES = 4 << 20  # one CRC32C each; what a reader must take as a whole; a slot of the pool
MIN_POOL_BYTES = 2 * BLOCK_BYTES  # one is copied while one is written
_PIECE_ROOM = 8192  # of one tensor in the header, and before it in the file
_POOL_QUANTUM = 2 << 20  # huge page: what the pool is rounded to anyway


@dataclass(frozen=True)
class _Other:
    """A piece that torch has to copy: strided, or on a device. Elements [start, stop) of the tensor of a name."""

    name: str
    start: int
    stop: int
    file_offset: int
    num_bytes: int
    owner: Guard | None


@dataclass
class _Lazy:
    """What is read after the call of one optimizer's: names, and (address, bytes) of what lies on the host."""

    owner: Guard
    names: list[str] = field(default_factory=list)
    ranges: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class _Plan:
    """A layout with the copies that fill the pool.

    Holds addresses and no tensors, so that it keeps no memory alive.
    """

    signature: tuple[Any, ...]
    layout: DataLayout
    names: tuple[str, ...]  # of the pieces
    aliases: dict[str, str]
    staged: tuple[tuple[int, int, int, bool], ...]  # (address or 0, bytes, file offset, lazy) of each piece
    others: tuple[_Other, ...]
    lazy: tuple[_Lazy, ...]
    on_device: bool
    eager_bytes: int  # copied in the call


class Capturer:
    """Owns the staging pool. Thread rule: the training thread, while no write of the last capture runs.

    pool_bytes: 0, or all the staging memory there may be, taken now; a larger state then goes through it in slabs.
    pin: page-lock the pool for CUDA; None: when CUDA is in use, at the latest for the first state on a device, or
    not at all, with a warning, where the driver refuses.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        pool_bytes: int = 0,
        threads: int = 2,
        pin: bool | None = None,
        streams: Callable[[torch.device], Streams] = CudaStreams,
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._threads, self._pin = threads, pin
        self._is_fixed = pool_bytes > 0
        self._new_streams = streams
        self._streams: dict[torch.device, Streams] = {}
        self._plan: _Plan | None = None
        self._refused = False  # by the driver: pin=None goes on without
        self.guards = Guards()
        self.plans_made = 0
        self.pool: _C.StagingPool | None = self._new_pool(max(pool_bytes, MIN_POOL_BYTES)) if pool_bytes else None

    def prepare(self, flat: Flat, extra_bytes: int = 0, sizes: Sequence[int] = ()) -> None:
        """Plans a capture of this state and takes its staging memory, so that the first save is a warm one.

        extra_bytes: of state that is still to come. sizes: of tensors to come that ranks share as they do the others.
        """
        plan = self._planned(flat)
        _hold(flat, plan)
        held = sum(leaf.tensor.nbytes for name, leaf in flat.tensors.items() if name not in plan.aliases)
        mine = min(1.0, plan.layout.data_bytes / held) if held else 1.0
        extra_bytes += int(mine * sum(sizes)) + _PIECE_ROOM * len(sizes)
        pool = self._pool_of(len(plan.layout.header) + plan.layout.data_bytes + extra_bytes)
        if plan.on_device:
            self._pin_once(pool)

    def begin(self, step: int, flat: Flat) -> Captured:
        """Encodes all values and plans the copies; StateError names what cannot be stored. `finish` must follow."""
        objects = flat.encoded | {name: encode(node.value, node.path) for name, node in flat.values.items()}
        per_rank = {name: encode(node.value, node.path, tensors=True) for name, node in flat.per_rank.items()}
        plan = self._planned(flat)
        captured = Captured(plan.layout, plan.aliases, objects, per_rank, (self._rank, self._world_size))
        if not plan.layout.pieces:
            return captured
        pool = self._pool_of(captured.file_bytes)
        if plan.on_device:
            self._pin_once(pool)
        stage = _C.Stage(
            pool,
            plan.layout.header,
            plan.staged,
            captured.file_bytes,
            block_bytes=BLOCK_BYTES,
            threads=self._threads,
        )
        captured.stage, captured.pool = stage, pool
        captured.flight = Flight(step, stage, _hold(flat, plan, stage.slabs > 1), plan.names)
        # Copies of a device run into the pool, which nobody else may empty meanwhile; a short call would only wait
        # for the interpreter, which the writing thread keeps for 5 ms at a time.
        captured.first = captured.slabs == 1 and (plan.on_device or plan.eager_bytes < BLOCK_BYTES)
        return captured

    def finish(self, captured: Captured, flat: Flat) -> None:
        """Copies all that may change after the call. In slabs (`captured.slabs` > 1) a writer must be at work."""
        stage, flight, pool = captured.stage, captured.flight, self.pool
        if stage is None or flight is None:
            return
        assert self._plan is not None and pool is not None
        self.guards.flight = flight
        tensors = tensors_of(flat, [other.name for other in self._plan.others])
        others = list(zip(self._plan.others, tensors, strict=True))
        stage.start()
        if captured.slabs == 1:
            pieces = [DevicePiece(t, o.start, o.stop, o.file_offset, o.owner, o.name) for o, t in others if t.is_cuda]
            others = [(other, tensor) for other, tensor in others if not tensor.is_cuda]
            if pieces:
                flight.device = self._copy_from_device(stage, pool, pieces)
        for other, tensor in others:
            source = bytes_of(tensor, other.start, other.stop)
            for at, size in _cuts(other.file_offset, other.num_bytes, captured.slabs > 1):
                target = torch.frombuffer(pool.view(stage.open(at, size), size), dtype=torch.uint8)
                target.copy_(source[at - other.file_offset :][:size])
                stage.fill(at, size)
        stage.capture()

    def close(self) -> None:
        """Gives the pool and the hooks back."""
        self.guards.close()
        if self.pool is not None:
            self.pool.close()
        self.pool = self._plan = None

    def _copy_from_device(self, stage: _C.Stage, pool: _C.StagingPool, pieces: Sequence[DevicePiece]) -> DeviceCopies:
        def streams_of(device: torch.device) -> Streams:
            if device not in self._streams:
                self._streams[device] = self._new_streams(device)
            return self._streams[device]

        memory = torch.frombuffer(pool.view(0, pool.capacity), dtype=torch.uint8)

        def host(file_offset: int, num_bytes: int) -> torch.Tensor:
            at = stage.open(file_offset, num_bytes)
            return memory[at : at + num_bytes]

        copies = DeviceCopies(stage.fill, stage.cancel)
        copies.start(pieces, streams_of, host)
        return copies

    def _planned(self, flat: Flat) -> _Plan:
        signature = (self.guards.token(), flat.signature or signature_of(flat))
        if self._plan is None or self._plan.signature != signature:
            self._plan = self._new_plan(list(flat.tensors.values()), signature)
            self.plans_made += 1
        return self._plan

    def _new_plan(self, leaves: list[Leaf], signature: tuple[Any, ...]) -> _Plan:
        aliases = find_aliases(leaves)
        own = [leaf for leaf in leaves if leaf.name not in aliases]
        layout = lay_out(shares_of(own, self._rank, self._world_size))
        owners = self.guards.owners([placed.share.leaf.tensor for placed in layout.pieces])
        staged: list[tuple[int, int, int, bool]] = []
        others: list[_Other] = []
        lazy: dict[Guard, _Lazy] = {}
        for placed, found in zip(layout.pieces, owners, strict=True):
            leaf, share = placed.share.leaf, placed.share
            at, size = len(layout.header) + placed.data_offset, share.num_bytes
            in_reach = leaf.tensor.device.type == "cpu" and is_plain(leaf.tensor)
            may_wait = leaf.tensor.is_cuda or (in_reach and size >= SMALL_BYTES)
            owner = found if may_wait else None
            address = leaf.tensor.data_ptr() + share.start * leaf.tensor.element_size() if in_reach and size else 0
            staged.append((address, size, at, owner is not None))
            if owner is not None and size:
                waits = lazy.setdefault(owner, _Lazy(owner))
                waits.names.append(leaf.name)
                waits.ranges += [(address, size)] if in_reach else []
            if size and not in_reach:
                others.append(_Other(leaf.name, share.start, share.stop, at, size, owner))
        kept = DataLayout(layout.header, tuple(map(_without_data, layout.pieces)), layout.data_bytes)
        names = tuple(placed.share.leaf.name for placed in layout.pieces)
        on_device = any(leaf.tensor.is_cuda for leaf in own)
        eager, late = sum(size for _, size, _, waits in staged if not waits), tuple(lazy.values())
        return _Plan(signature, kept, names, aliases, tuple(staged), tuple(others), late, on_device, eager)

    def _pool_of(self, num_bytes: int) -> _C.StagingPool:
        """Returns the pool, grown when too small, unless its size was given."""
        if self.pool is None or (self.pool.capacity < num_bytes and not self._is_fixed):
            if self.pool is not None:
                self.pool.close()
            self.pool = None
            self.pool = self._new_pool(num_bytes)
        return self.pool

    def _new_pool(self, num_bytes: int) -> _C.StagingPool:
        capacity = max(_POOL_QUANTUM, -(-num_bytes // _POOL_QUANTUM) * _POOL_QUANTUM)
        pool = _C.StagingPool(capacity, self._threads, self._pin is True)
        if torch.cuda.is_initialized():
            self._pin_once(pool, early=True)
        return pool

    def _pin_once(self, pool: _C.StagingPool, early: bool = False) -> None:
        """With pin=None: page-locks the pool, or says once why copies from the device are slower without. early: that
        may still come, with the first tensor on the device and so a context."""
        if self._pin is not None or self._refused or pool.pinned:
            return
        try:
            pool.pin()
        except RuntimeError as error:
            if early:
                return
            self._refused = True
            warnings.warn(f"snapshots: the staging memory is not page-locked: {error}", RuntimeWarning, stacklevel=2)


def _hold(flat: Flat, plan: _Plan, in_slabs: bool = False) -> list[Held]:
    """Returns the tensors that are read after the call, as they are now; from here on those of the host stay where
    they are. In slabs those of a device are not among them: the call itself copies them."""
    held = []
    for lazy in plan.lazy:
        names, tensors = lazy.names, tensors_of(flat, lazy.names)
        if in_slabs:
            kept = [at for at, tensor in enumerate(tensors) if not tensor.is_cuda]
            names, tensors = [names[at] for at in kept], [tensors[at] for at in kept]
        held.append(Held(lazy.owner, names, tensors, versions_of(tensors), lazy.ranges))
        hold_in_place(tensors)
    return held


def _cuts(file_offset: int, num_bytes: int, at_blocks: bool) -> list[tuple[int, int]]:
    """Returns (file offset, bytes) of a range, cut at blocks when they have no common place in the pool."""
    cuts = []
    end = file_offset + num_bytes
    while file_offset < end:
        stop = min(end, (file_offset // BLOCK_BYTES + 1) * BLOCK_BYTES) if at_blocks else end
        cuts.append((file_offset, stop - file_offset))
        file_offset = stop
    return cuts


def find_aliases(leaves: Sequence[Leaf]) -> dict[str, str]:
    """Returns {name: first name of the same memory}, where place, dtype, strides and box are the same."""
    first: dict[tuple[Any, ...], str] = {}
    aliases = {}
    for leaf in sorted(leaves, key=lambda leaf: leaf.name):
        if leaf.tensor.numel() == 0:
            continue
        tensor = leaf.tensor
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        lazy_bits = (tensor.is_conj(), tensor.is_neg())
        key = (memory, lazy_bits, leaf.full_shape, leaf.box, leaf.flat)
        target = first.setdefault(key, leaf.name)
        if target != leaf.name:
            aliases[leaf.name] = target
    return aliases


def _without_data(placed: Placed) -> Placed:
    """Returns the same description over a tensor without memory, so that a kept plan keeps no storage alive."""
    share = placed.share
    leaf = share.leaf
    ghost = torch.empty(leaf.tensor.shape, dtype=leaf.tensor.dtype, device="meta")
    bare = Leaf(leaf.name, leaf.path, ghost, leaf.full_shape, leaf.box, leaf.flat, leaf.replica)
    return Placed(type(share)(bare, share.start, share.stop), placed.key, placed.shape, placed.data_offset)
