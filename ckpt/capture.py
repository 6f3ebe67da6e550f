"""Copies a state into the staging pool and describes what was copied. When `capture` returns, the caller may change
anything.

Not a writer. The one idea: the pool has the layout of the data file, so that writing is one pass over it; the layout
(and where each tensor lies in memory) is kept between saves and made anew as soon as anything about a tensor differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plait import _C
from plait.ckpt.layout import DataLayout, Placed, dtype_names, lay_out, shares_of
from plait.ckpt.manifest import Piece
from plait.ckpt.state import Flat, Leaf
from plait.ckpt.values import encode

_POOL_QUANTUM = 2 << 20  # huge page: what the pool is rounded to anyway


@dataclass(frozen=True)
class Captured:
    """What one rank will write for one save: the layout, and the values as they were at the call."""

    layout: DataLayout
    aliases: dict[str, str]
    objects: dict[str, Any]
    per_rank: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        return sum(placed.share.num_bytes for placed in self.layout.pieces)


@dataclass(frozen=True)
class _Plan:
    """A layout with the copies that fill the pool.

    Holds addresses and no tensors, so that it keeps no memory alive.
    """

    signature: tuple[Any, ...]
    layout: DataLayout
    aliases: dict[str, str]
    direct: tuple[tuple[int, int, int], ...]  # (source address, bytes, pool offset) of contiguous host tensors
    others: tuple[tuple[str, int, int, int], ...]  # (name, start, stop, pool offset): strided or on a device


class Capturer:
    """Owns the staging pool. Thread rule: the training thread, while no write of the last capture runs."""

    def __init__(self, rank: int, world_size: int, pool_bytes: int, threads: int, pin: bool) -> None:
        self._rank, self._world_size = rank, world_size
        self._threads, self._pin = threads, pin
        self._plan: _Plan | None = None
        self.plans_made = 0
        self.pool: _C.StagingPool | None = self._new_pool(pool_bytes) if pool_bytes else None

    def capture(self, flat: Flat) -> Captured:
        """Copies this rank's share of all tensors into the pool; encodes all values.

        StateError names what cannot be stored.
        """
        objects = {name: encode(node.value, node.path) for name, node in flat.values.items()}
        per_rank = {name: encode(node.value, node.path, tensors=True) for name, node in flat.per_rank.items()}
        plan = self._planned(list(flat.tensors.values()))
        pool = self._pool_of(plan.layout.data_bytes)
        if plan.direct:
            pool.copy_in(list(plan.direct))
        for name, start, stop, offset in plan.others:
            _copy_strided(flat.tensors[name].tensor, start, stop, pool, offset)
        return Captured(plan.layout, plan.aliases, objects, per_rank)

    def describe(self, captured: Captured) -> tuple[Piece, ...]:
        """Returns the fragment's pieces, hashed from the pool."""
        data_start = len(captured.layout.header)
        return tuple(self._piece(placed, data_start) for placed in captured.layout.pieces)

    def pieces_in_memory(self, captured: Captured) -> list[tuple[int, int, int]]:
        """Returns (address, bytes, file offset) of all pieces for the writer."""
        address = self._pool_of(captured.layout.data_bytes).address if captured.layout.data_bytes else 0
        data_start = len(captured.layout.header)
        placed_sizes = ((p.data_offset, p.share.num_bytes) for p in captured.layout.pieces)
        return [(address + at, size, data_start + at) for at, size in placed_sizes if size]

    def close(self) -> None:
        """Gives the pool back."""
        if self.pool is not None:
            self.pool.close()
        self.pool = self._plan = None

    def _planned(self, leaves: list[Leaf]) -> _Plan:
        signature = tuple(_signature(leaf) for leaf in leaves)
        if self._plan is None or self._plan.signature != signature:
            self._plan = self._new_plan(leaves, signature)
            self.plans_made += 1
        return self._plan

    def _new_plan(self, leaves: list[Leaf], signature: tuple[Any, ...]) -> _Plan:
        aliases = find_aliases(leaves)
        own = [leaf for leaf in leaves if leaf.name not in aliases]
        layout = lay_out(shares_of(own, self._rank, self._world_size))
        direct: list[tuple[int, int, int]] = []
        others: list[tuple[str, int, int, int]] = []
        pieces = []
        for placed in layout.pieces:
            leaf, share = placed.share.leaf, placed.share
            if share.num_bytes:
                if _is_plain_memory(leaf.tensor):
                    address = leaf.tensor.data_ptr() + share.start * leaf.tensor.element_size()
                    direct.append((address, share.num_bytes, placed.data_offset))
                else:
                    others.append((leaf.name, share.start, share.stop, placed.data_offset))
            pieces.append(_without_data(placed))
        kept = DataLayout(layout.header, tuple(pieces), layout.data_bytes)
        return _Plan(signature, kept, aliases, tuple(direct), tuple(others))

    def _pool_of(self, num_bytes: int) -> _C.StagingPool:
        """Returns the pool, grown when too small: the first save of a state pays, unless `pool_bytes` was given."""
        if self.pool is None or self.pool.capacity < num_bytes:
            if self.pool is not None:
                self.pool.close()
            self.pool = None
            self.pool = self._new_pool(num_bytes)
        return self.pool

    def _new_pool(self, num_bytes: int) -> _C.StagingPool:
        capacity = max(_POOL_QUANTUM, -(-num_bytes // _POOL_QUANTUM) * _POOL_QUANTUM)
        return _C.StagingPool(capacity, self._threads, self._pin)

    def _piece(self, placed: Placed, data_start: int) -> Piece:
        share, leaf = placed.share, placed.share.leaf
        dtype, logical = dtype_names(leaf.tensor.dtype)
        data: Any = b""
        if share.num_bytes:
            assert self.pool is not None
            data = self.pool.view(placed.data_offset, share.num_bytes)
        replica = leaf.replica or (self._rank, self._world_size)
        return Piece(
            name=leaf.name,
            dtype=dtype,
            logical_dtype=logical,
            full_shape=leaf.full_shape,
            offset=leaf.box.offset,
            shape=leaf.box.shape,
            flat=share.flat,
            replica=replica,
            key=placed.key,
            file_offset=data_start + placed.data_offset,
            num_bytes=share.num_bytes,
            xxh3_128=_C.xxh3_128(data).hex(),
        )


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


def _signature(leaf: Leaf) -> tuple[Any, ...]:
    """Returns all that a plan depends on: what the tensor is, and which memory it is now."""
    tensor = leaf.tensor
    memory = (tensor.data_ptr(), tensor.untyped_storage().data_ptr(), tensor.stride(), tensor.device)
    lazy_bits = (tensor.is_conj(), tensor.is_neg())
    return (
        leaf.name,
        tensor.dtype,
        leaf.full_shape,
        leaf.box,
        leaf.flat,
        leaf.replica,
        tensor.shape,
        memory,
        lazy_bits,
    )


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _copy_strided(tensor: torch.Tensor, start: int, stop: int, pool: _C.StagingPool, offset: int) -> None:
    """Copies row-major elements [start, stop) of a strided or device tensor into the pool: their own bytes only."""
    tensor = tensor.resolve_conj().resolve_neg()
    if (start, stop) != (0, tensor.numel()):
        tensor = tensor.contiguous().reshape(-1)[start:stop]
    num_bytes = (stop - start) * tensor.element_size()
    target = torch.frombuffer(pool.view(offset, num_bytes), dtype=torch.uint8).view(tensor.dtype)
    target.view(tensor.shape).copy_(tensor)


def _without_data(placed: Placed) -> Placed:
    """Returns the same description over a tensor without memory, so that a kept plan keeps no storage alive."""
    share = placed.share
    leaf = share.leaf
    ghost = torch.empty(leaf.tensor.shape, dtype=leaf.tensor.dtype, device="meta")
    bare = Leaf(leaf.name, leaf.path, ghost, leaf.full_shape, leaf.box, leaf.flat, leaf.replica)
    return Placed(type(share)(bare, share.start, share.stop), placed.key, placed.shape, placed.data_offset)
