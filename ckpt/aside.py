"""Values of plait's own that ride with those of a fragment to the commit, and are no part of the state.

Names that begin with two underscores; never in objects.json. BARE: which tensors a rank takes to be on all ranks. Not
coverage (tables.py): a tensor that nobody wrote leaves no trace there. Who writes a bare tensor is computed by each
rank alone, from the names that it has, so all must have the same ones; a checksum of them is compared. METRICS: what
`save(metrics=...)` was given; rank 0's go into the manifest.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from plait.ckpt.errors import StateError
from plait.ckpt.values import decode

BARE = "__bare__"
METRICS = "__metrics__"


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


def check_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics as plain floats; ValueError for what is none."""
    for name, value in metrics.items():
        if type(name) is not str or type(value) not in (int, float):
            raise ValueError(
                f"metrics: {name!r} is {value!r}; names are strings and values numbers (tensor: .item())"
            )
    return {name: float(value) for name, value in metrics.items()}


def metrics_of(objects: Mapping[str, Any]) -> dict[str, str]:
    """Returns the metrics among a fragment's values as the manifest has them: hex floats."""
    return {name: value.hex() for name, value in decode(objects.get(METRICS, {}), "metrics").items()}


def is_aside(name: str) -> bool:
    """True for the name of a value that is no part of the state."""
    return name in (BARE, METRICS)
