"""Which tensors a rank takes to be on all ranks, compared at the commit.

Not coverage (tables.py): a tensor that nobody wrote leaves no trace there. The one idea: who writes a bare tensor is
computed by each rank alone, from the names that it has, so all must have the same ones; a checksum of the names rides
with the values of a fragment and is compared and dropped when they are merged.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

from plait.ckpt.errors import StateError

BARE = "__bare__"  # the name of the value that holds the digest; never in objects.json


def bare_digest(names: Iterable[str]) -> dict[str, str]:
    """Returns {first key of the names: "number of names, checksum"}: equal on ranks with the same names."""
    by_key: dict[str, list[str]] = {}
    for name in sorted(names):
        by_key.setdefault(name.partition("/")[0], []).append(name)
    return {key: f"{len(some)}, {zlib.crc32(chr(10).join(some).encode()):08x}" for key, some in by_key.items()}


def check_bare(digests: Iterable[tuple[int, dict[str, Any]]]) -> None:
    """Compares the digests of all (rank, digest). StateError names the part of the state that differs."""
    (first_rank, first), *others = digests
    for rank, other in others:
        for key in sorted(first.keys() | other.keys()):
            if first.get(key) != other.get(key):
                numbers = [part.get(key, "0,").partition(",")[0] for part in (first, other)]
                raise StateError(
                    f"the bare tensors under state[{key!r}] are not the same on all ranks: {numbers[0]} on rank "
                    f"{first_rank}, {numbers[1]} on rank {rank}, by name; say which ranks hold them by "
                    "Replicas(value, over=mesh or (index, count)), Sharded, or a DTensor"
                )
