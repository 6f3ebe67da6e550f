"""Pieces that did not change since the last snapshot are not written again: the older data file is linked.

Not a chain: a piece refers to the file that holds its bytes, never to a reference. The one idea: the file of the
older step gets a second name in the new step folder (a hard link, made before the commit), so each snapshot is whole
by itself: any of them can be removed, by retention or by hand, without hurting another, and a crash leaves either an
attempt that is removed or a snapshot that has its files. What it costs: an old file stays as long as one snapshot
needs a part of it, so there are at most MAX_BASES of them and each must be worth it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from plait import _C
from plait.ckpt.captured import Captured
from plait.ckpt.folders import remove_shared
from plait.ckpt.layout import DataLayout, lay_out
from plait.ckpt.manifest import DataFile, Fragment, Piece, base_name, data_name

MAX_BASES = 4  # older data files that one snapshot of a rank may need
MIN_SAVED = 0.1  # of the bytes: below it all is written, and the next REST saves do not even compare
MIN_USED = 0.1  # of an older file: a base of which less is needed is not worth its space
REST = 8  # saves


@dataclass(frozen=True)
class Change:
    """What to write and what to link. memory: (address, bytes, file offset) of the pieces in `layout`. links: where
    each base lies now, and its name in the new folder."""

    layout: DataLayout
    memory: list[tuple[int, int, int]]
    pieces: tuple[Piece, ...]
    bases: tuple[DataFile, ...]
    links: tuple[tuple[Path, str], ...]


class Delta:
    """Remembers what this rank committed last in this launch. Thread rule: the writing thread.

    The first save of a launch is whole. So is one whose tensors are others than before, one that goes back in steps,
    and one that does not fit the staging pool, since its bytes are gone before they are known to be unchanged.
    """

    def __init__(self) -> None:
        self._last: tuple[Path, Fragment] | None = None
        self._rest = 0

    def committed(self, folder: Path, fragment: Fragment) -> None:
        """The next save is compared with this one."""
        self._last = (folder, fragment)

    def decide(self, step: int, captured: Captured) -> Change | None:
        """Compares by XXH3-128; None when all is to be written. Waits until all is copied."""
        if self._last is None or captured.stage is None or captured.slabs != 1 or self._last[1].step >= step:
            return None
        if self._rest:
            self._rest -= 1
            return None
        folder, last = self._last
        old = {piece.key: piece for piece in last.pieces}
        if old.keys() != {placed.key for placed in captured.layout.pieces}:
            return None
        captured.stage.wait_copied()
        new = captured.describe(_hashes(captured))
        same = [old[piece.key] for piece in new if piece.num_bytes and _same(piece, old[piece.key])]
        kept = _worth_it(same, last)
        if sum(piece.num_bytes for piece in kept.values()) < MIN_SAVED * captured.num_bytes:
            self._rest = REST
            return None
        return _change(folder, last, captured, new, kept)


def link_bases(change: Change, folder: Path) -> bool:
    """Gives the bases their names in an attempt's folder; durable with the folder, whose sync is part of the commit.

    False, and nothing is left, when the file system cannot: the snapshot is then written whole.
    """
    made = []
    try:
        for source, name in change.links:
            os.link(source, folder / name)
            made.append(folder / name)
    except OSError:
        for path in made:
            remove_shared(_C.PosixIo(), path)
        return False
    return True


def _hashes(captured: Captured) -> list[str]:
    """Returns XXH3-128 of all pieces, from the pool."""
    stage, pool = captured.stage, captured.pool
    assert stage is not None and pool is not None
    start, texts = len(captured.layout.header), []
    for placed in captured.layout.pieces:
        size = placed.share.num_bytes
        data = pool.view(stage.open(start + placed.data_offset, size), size) if size else b""
        texts.append(_C.xxh3_128(data).hex())
    return texts


def _same(new: Piece, old: Piece) -> bool:
    return replace(new, file_offset=old.file_offset, source_step=old.source_step, replica=old.replica) == old


def _worth_it(same: Sequence[Piece], last: Fragment) -> dict[str, Piece]:
    """Returns by key the unchanged pieces of those files that may stay bases."""
    used: dict[int | None, int] = {}
    for piece in same:
        used[piece.source_step] = used.get(piece.source_step, 0) + piece.num_bytes
    files = last.data_files
    worth = [source for source, size in used.items() if size >= MIN_USED * files[source].bytes]
    bases = sorted(worth, key=lambda source: used[source], reverse=True)[:MAX_BASES]
    return {piece.key: piece for piece in same if piece.source_step in bases}


def _change(folder: Path, last: Fragment, captured: Captured, new: Sequence[Piece], kept: dict[str, Piece]) -> Change:
    assert captured.stage is not None and captured.pool is not None
    old_start = len(captured.layout.header)
    placed_before = {placed.key: placed for placed in captured.layout.pieces}
    layout = lay_out([placed.share for placed in captured.layout.pieces if placed.key not in kept])
    start = len(layout.header)
    memory, offsets = [], {}
    for placed in layout.pieces:
        size = placed.share.num_bytes
        offsets[placed.key] = start + placed.data_offset
        if size:
            at = captured.stage.open(old_start + placed_before[placed.key].data_offset, size)
            memory.append((captured.pool.address + at, size, start + placed.data_offset))
    pieces = []
    for piece in new:
        if piece.key in kept:
            held = kept[piece.key]
            source = last.step if held.source_step is None else held.source_step
            pieces.append(replace(held, source_step=source, replica=piece.replica))
        else:
            pieces.append(replace(piece, file_offset=offsets[piece.key]))
    bases, links = [], []
    for source_step in sorted(
        {piece.source_step for piece in kept.values()}, key=lambda s: last.step if s is None else s
    ):
        file = last.data_files[source_step]
        name = base_name(last.rank, last.step if source_step is None else source_step)
        bases.append(replace(file, name=name))
        links.append((folder / (data_name(last.rank) if source_step is None else file.name), name))
    return Change(layout, memory, tuple(pieces), tuple(bases), tuple(links))
