"""How ranks agree during a restore, without a message: each leaves a word in a folder and reads those of all others.

Not a barrier for training. The one idea: rounds are numbered and the session is new at every launch, so a folder name
means one round of one launch, and a rank that never comes is named at the time limit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plait import _C
from plait.ckpt.commit import Writer
from plait.ckpt.disks import Disks
from plait.ckpt.folders import announce, make_folder, remove_folder
from plait.ckpt.manifest import MAX_JSON_BYTES


class Agreement:
    """Rounds of exchange between the ranks of one launch under one folder. One rank alone exchanges with itself."""

    def __init__(self, writer: Writer, root: Path, session: str) -> None:
        self._writer, self._root, self._session = writer, root, session
        self._round = 0

    @property
    def is_alone(self) -> bool:
        return self._writer.world_size == 1

    @property
    def apart(self) -> bool:
        """True when the ranks' roots are on several disks."""
        disks = self._writer.disks
        return disks is not None and len(disks.leaders) > 1

    def exchange(self, word: Any) -> list[Any]:
        """Returns the words (plain JSON) of all ranks, by rank. SnapshotError naming ranks that gave none in time."""
        self._round += 1
        writer = self._writer
        if writer.world_size == 1:
            return [word]
        folder = self._folder(self._round)
        if writer.disks is not None:
            return self._exchange_by_store(writer.disks, folder, word)
        make_folder(writer.io, folder)
        announce(writer.io, folder / _word_name(writer.rank), json.dumps(word).encode())
        names = [_word_name(rank) for rank in range(writer.world_size)]

        def missing() -> list[int]:
            there = set(os.listdir(folder))
            return [rank for rank, name in enumerate(names) if name not in there]

        def late() -> str:
            return f"ranks {missing()} did not come to the restore within {writer.timeout_s:g} s ('{folder}')"

        look: Callable[[], bool | None] = lambda: None if missing() else True  # noqa: E731
        writer.wait(look, late)
        words = [json.loads(_C.read_small(writer.io, folder / name, MAX_JSON_BYTES)) for name in names]
        if writer.rank == 0:  # whoever left a word in this round has read all of the one before
            self._remove(self._round - 1)
        return words

    def _exchange_by_store(self, disks: Disks, folder: Path, word: Any) -> list[Any]:
        disks.tell(folder, _word_name(self._writer.rank), json.dumps(word).encode())
        names = [_word_name(rank) for rank in range(self._writer.world_size)]

        def look() -> list[bytes] | None:
            words = [disks.hear(folder, name) for name in names]
            return None if None in words else [w for w in words if w is not None]

        def late() -> str:
            absent = [rank for rank, name in enumerate(names) if disks.hear(folder, name) is None]
            return f"ranks {absent} did not come to the restore within {self._writer.timeout_s:g} s"

        return [json.loads(found) for found in self._writer.wait(look, late)]

    def clear(self) -> None:
        """Coordinator: removes the folder of the last round. All ranks must be past it (a commit proves that)."""
        if self._writer.rank == 0 and self._writer.world_size > 1:
            self._remove(self._round)

    def _remove(self, number: int) -> None:
        folder = self._folder(number)
        if folder.is_dir():
            remove_folder(self._writer.io, folder)

    def _folder(self, number: int) -> Path:
        return self._root / f".tmp-restore-{self._session}-{number}"


def _word_name(rank: int) -> str:
    return f"r{rank:05d}.ok"
