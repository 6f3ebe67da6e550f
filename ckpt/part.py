"""Writes this rank's part of an attempt: its data file, then its fragment, which says that the part is complete.

Not the commit (commit.py). The one idea: blocks are written as they are captured, and hashed on the way.
"""

from __future__ import annotations

import errno
from pathlib import Path

from plait import _C
from plait.ckpt.capture import BLOCK_BYTES
from plait.ckpt.captured import Captured
from plait.ckpt.commit import Writer, say
from plait.ckpt.delta import Change, Delta, link_bases
from plait.ckpt.folders import attempt_folder, make_folder, remove_shared
from plait.ckpt.manifest import FORMATS, DataFile, Fragment, data_name, fragment_name, to_bytes
from plait.ckpt.spare import allocated_bytes, take_spare


def write_part(
    writer: Writer, attempt: str, step: int, captured: Captured, delta: Delta | None = None
) -> tuple[Fragment, bytes]:
    """Writes and publishes this rank's data file and fragment, which it returns with its bytes. OSError names
    operation and path.

    delta: pieces that an older snapshot holds are referenced there instead.
    """
    folder = attempt_folder(writer.root, attempt)
    make_folder(writer.io, folder)
    path = folder / data_name(writer.rank)
    over = writer.reuse and take_spare(writer.io, writer.root, attempt.split("-")[1], path.name, path)
    file: DataFile | None = None
    bases: tuple[DataFile, ...] = ()
    change = delta.decide(step, captured) if delta is not None else None
    if change is not None and link_bases(change, folder):
        file = _write_changed(writer, path, captured, change, over)
        pieces, bases = change.pieces, change.bases
    else:
        if captured.layout.pieces:
            file = _write_data(writer, path, captured, over)
        pieces = captured.describe()
    if file is None and over:
        remove_shared(writer.io, path)
    if writer.peers is not None:
        writer.peers.send(folder, [*bases] if file is None else [file, *bases])
    fragment = Fragment(
        format=FORMATS[Fragment],
        step=step,
        attempt=attempt,
        rank=writer.rank,
        world_size=writer.world_size,
        file=file,
        pieces=pieces,
        aliases=captured.aliases,
        objects=captured.objects,
        per_rank=captured.per_rank,
        bases=bases,
    )
    data = to_bytes(fragment)
    say(writer, folder / fragment_name(writer.rank), data)
    return fragment, data


def _write_data(writer: Writer, path: Path, captured: Captured, over: bool) -> DataFile:
    file_bytes = captured.file_bytes
    _check_space(writer, path, file_bytes)
    assert captured.stage is not None and captured.flight is not None
    try:
        result = _C.write_stage(
            writer.io,
            path,
            captured.stage,
            threads=2 * writer.threads,  # half of them wait for the disk while the others hash
            rate_limit=writer.rate_limit,
            direct=writer.direct,
            nice=writer.nice,
            io_priority=writer.io_priority,
            over=over,
        )
    except _C.TornError as error:
        raise captured.flight.torn(int(error.piece)) from error
    captured.settle()
    return DataFile(path.name, file_bytes, BLOCK_BYTES, tuple(result.crcs))


def _write_changed(writer: Writer, path: Path, captured: Captured, change: Change, over: bool) -> DataFile | None:
    """Writes the pieces that no older snapshot holds; None when there are none."""
    layout = change.layout
    if not layout.pieces:
        captured.settle()
        return None
    file_bytes = len(layout.header) + layout.data_bytes
    _check_space(writer, path, file_bytes)
    result = _C.write_file(
        writer.io,
        path,
        layout.header,
        change.memory,
        file_bytes,
        block_bytes=BLOCK_BYTES,
        threads=2 * writer.threads,
        rate_limit=writer.rate_limit,
        direct=writer.direct,
        nice=writer.nice,
        io_priority=writer.io_priority,
        over=over,
    )
    captured.settle()
    return DataFile(path.name, file_bytes, BLOCK_BYTES, tuple(result.crcs))


def _check_space(writer: Writer, path: Path, file_bytes: int) -> None:
    """OSError (ENOSPC) unless the file has room, where a spare may lie already."""
    free = free_space(writer.io, path.parent) + allocated_bytes(path)
    if free < file_bytes:
        raise OSError(errno.ENOSPC, f"write: {file_bytes} bytes are needed, {free} are free", str(path))


def free_space(io: _C.Io, path: Path) -> int:
    """Returns the bytes that this user may still write."""
    return _C.free_bytes(io, path)
