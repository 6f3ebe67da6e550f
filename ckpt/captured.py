"""A captured state on its way to the disk: what the writing thread gets from the training thread.

Not a copier (capture.py) and not a writer (commit.py). The one idea: layout and values are as they were at the call,
and bytes come through the stage as soon as they are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plait import _C
from plait.ckpt.guard import Flight
from plait.ckpt.layout import DataLayout, Placed, dtype_names
from plait.ckpt.manifest import Piece
from plait.ckpt.slices import in_slices


class Captured:
    """What one rank will write for one save: the layout, the values as they were at the call, and the stage that the
    tensors' bytes come through. `stage` is None when this rank writes no bytes of tensors."""

    def __init__(
        self,
        layout: DataLayout,
        aliases: dict[str, str],
        objects: dict[str, Any],
        per_rank: dict[str, Any],
        rank: tuple[int, int],
    ) -> None:
        self.layout, self.aliases = layout, aliases
        self.objects, self.per_rank = objects, per_rank
        self.stage: _C.Stage | None = None
        self.pool: _C.StagingPool | None = None
        self.flight: Flight | None = None
        self.first = False  # captured before the writing thread hears of it
        self._rank = rank

    @property
    def num_bytes(self) -> int:
        return sum(placed.share.num_bytes for placed in self.layout.pieces)

    @property
    def file_bytes(self) -> int:
        return len(self.layout.header) + self.layout.data_bytes

    @property
    def slabs(self) -> int:
        """How often the pool is filled: 1 when it holds the whole state."""
        return self.stage.slabs if self.stage is not None else 1

    @property
    def held_bytes(self) -> int:
        """What is captured only when as much has been written; 0 when the pool holds the whole state."""
        return self.stage.held_bytes if self.stage is not None else 0

    def describe(self, hashes: Sequence[str] | None = None) -> tuple[Piece, ...]:
        """Returns the fragment's pieces. All blocks must have been written (their hashes are made on the way), unless
        `hashes` are given."""
        empty = _C.xxh3_128(b"").hex()
        pieces = self.layout.pieces
        if hashes is None:
            hashes = self.stage.hashes() if self.stage is not None else [empty] * len(pieces)
        return tuple(self._piece(placed, xxh3) for placed, xxh3 in in_slices(zip(pieces, hashes, strict=True)))

    def settle(self) -> None:
        """After writing: TornSnapshot when a tensor was changed before it was captured."""
        if self.flight is not None:
            self.flight.settle()

    def cancel(self, reason: str) -> None:
        """Gives the capture up: whoever waits for it is told the reason."""
        if self.stage is not None:
            self.stage.cancel(reason)

    def release(self) -> None:
        """Lets go of the caller's tensors and of the pool, once nobody writes from it any more."""
        if self.flight is not None:
            self.flight.end()
        elif self.stage is not None:
            self.stage.close()
        self.stage = self.flight = self.pool = None

    def _piece(self, placed: Placed, xxh3: str) -> Piece:
        share, leaf = placed.share, placed.share.leaf
        dtype, logical = dtype_names(leaf.tensor.dtype)
        return Piece(
            name=leaf.name,
            dtype=dtype,
            logical_dtype=logical,
            full_shape=leaf.full_shape,
            offset=leaf.box.offset,
            shape=leaf.box.shape,
            flat=share.flat,
            replica=leaf.replica or self._rank,
            key=placed.key,
            file_offset=len(self.layout.header) + placed.data_offset,
            num_bytes=share.num_bytes,
            xxh3_128=xxh3,
        )
