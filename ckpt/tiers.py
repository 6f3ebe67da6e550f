"""Second places for snapshots: what a caller says about one, and who it is that copies.

Not the copying itself (copier.py), its thread (uploads.py) or the way back (tier_reader.py).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plait import _C
from plait.ckpt.codec import LEVEL
from plait.ckpt.crypt import Key
from plait.ckpt.keep import Policy
from plait.ckpt.remote import FsspecStore
from plait.ckpt.store import DirStore


@dataclass(frozen=True)
class Tier:
    """A second place for snapshots: a directory, or a URL that fsspec opens ("s3://bucket/run").

    keep_last, keep_every: retention there (keep.Policy); never less than the newest. every: only steps that are
    multiples of it. compress: zstd on byte planes (True, or a level). encrypt: AES-256-GCM with the key of Snapshots.
    rate_limit: bytes per second and rank, 0 none. verify: all data is read back and compared after it was sent.
    retry_s: how long a store that cannot be reached is tried again, with pauses doubled from 0.2 s to 30 s, before
    the copy fails. options: of the fsspec driver. threads: for coding.
    """

    url: str | Path
    keep_last: int | None = 3
    keep_every: int | None = None
    every: int = 1
    compress: bool | int = False
    encrypt: bool = False
    rate_limit: int = 0
    verify: bool = True
    retry_s: float = 600.0
    threads: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Policy(self.keep_last, self.keep_every)  # checks them
        if self.every < 1:
            raise ValueError(f"every={self.every}: must be a positive number of steps")

    @property
    def level(self) -> int | None:
        """The level of zstd, or None for no compression."""
        return None if self.compress is False else LEVEL if self.compress is True else self.compress

    def store(self, io: _C.Io, session: str) -> DirStore | FsspecStore:
        """Opens the place. ImportError names a missing driver."""
        text = str(self.url)
        if "://" in text and not text.startswith("file://"):
            return FsspecStore(text, self.options)
        return DirStore(Path(text.removeprefix("file://")), io, session)


@dataclass(frozen=True)
class Launch:
    """Who copies. key: of the run, None for none. run: its id (rank 0). stop: ends all waiting."""

    rank: int
    world_size: int
    session: str
    io: _C.Io
    key: Key | None
    run: str
    timeout_s: float
    stop: threading.Event
