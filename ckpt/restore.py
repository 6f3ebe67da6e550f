"""Chooses a snapshot and brings a state back from it, onto any grid.

Not the reading of bytes (reader.py). The one idea: names, shapes and dtypes are all checked before the first byte of
a target changes; then the newest snapshot that every rank can read wins, and each one passed over is reported with
its reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from plait.ckpt.agree import Agreement
from plait.ckpt.candidates import Candidate
from plait.ckpt.capture import find_aliases
from plait.ckpt.device import bytes_of
from plait.ckpt.errors import SnapshotDamaged, SnapshotError, StateError
from plait.ckpt.interop_optimizer import adopt_optimizers
from plait.ckpt.lazy import ABSENT
from plait.ckpt.read_plan import Target
from plait.ckpt.reader import SnapshotReader
from plait.ckpt.state import Flat, flatten, rebuild
from plait.ckpt.tables import TensorEntry
from plait.ckpt.values import decode


@dataclass(frozen=True)
class Report:
    """What a restore did. Names are those of the snapshot ("model/norm.weight").

    folder: of the copy that was read; a text, its URL, where it is in a store or with partners. missing: in the state
    only, allowed and left as they were. unexpected: in the snapshot only, allowed and not read. per_rank_missing:
    PerRank values that the snapshot has for other ranks only; left as they were. cast: tensors converted to the
    state's dtype. skipped: newer snapshots passed over, with the reason. filled: damage of this copy that another one
    made good.
    """

    folder: Path | str
    saved_world_size: int
    saved_grid: dict[str, int]
    num_tensors: int
    bytes_read: int
    duration_s: float
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    per_rank_missing: tuple[str, ...]
    cast: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    filled: tuple[str, ...] = ()


@dataclass(frozen=True)
class Restored:
    """step: of the snapshot. report: what was done. values: the state as given, with tensors filled in place and
    numbers, strings and PerRank values as they were saved (objects have already taken theirs by
    `load_state_dict`)."""

    step: int
    report: Report
    values: dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """What the caller allows.

    Patterns are names with * and ?; cast: True, or patterns of tensors whose dtype may change.
    """

    allow_missing: Sequence[str]
    allow_unexpected: Sequence[str]
    cast: bool | Sequence[str]


@dataclass(frozen=True)
class _Match:
    """A state laid over a snapshot: what to read, and what the state alone has. twins: a tensor, memory into which
    another name of it is read, and what to say when they differ."""

    targets: tuple[Target, ...]
    results: dict[str, Any]
    missing: tuple[str, ...]
    per_rank_missing: tuple[str, ...]
    cast: tuple[str, ...]
    twins: tuple[tuple[torch.Tensor, torch.Tensor, str], ...]


def restore_state(
    listed: Callable[[], Sequence[Candidate]],
    root: Path,
    rank: int,
    agreement: Agreement,
    state: dict[str, Any],
    wanted: Wanted,
) -> Restored:
    """Restores from the first of the candidates that is good on all ranks, which call it together; one rank alone
    lists them again where one was removed meanwhile, since who writes here then has newer ones."""
    began = time.monotonic()
    folders = listed()
    flat = _flatten_together(state, folders[0], agreement)
    skipped: list[tuple[str, str]] = []
    while len(skipped) < len(folders):
        folder = folders[len(skipped)]
        with ExitStack() as held:
            opened = _open(folder, flat, rank, wanted, held)
            names = sorted(flat.tensors.keys() | flat.values.keys() | flat.per_rank.keys())
            words = agreement.exchange([folder.name, opened.status, opened.text, names])
            reason = _common_verdict(folder, words)
            if reason is None:
                assert opened.reader is not None and opened.match is not None
                unexpected = _unexpected(opened.reader, words, wanted)
                status, text = _read(opened.reader, opened.match)
                reason = _common_verdict(folder, agreement.exchange([folder.name, status, text]))
        if reason is not None:
            skipped.append((folder.name, reason))
            if agreement.is_alone:
                now = listed()
                if folder.name not in [candidate.name for candidate in now]:
                    folders, skipped = now, []
            continue
        reader, match = opened.reader, opened.match
        assert reader is not None and match is not None
        report = Report(
            folder=reader.location,
            saved_world_size=reader.manifest.world_size,
            saved_grid=reader.manifest.grid,
            num_tensors=len(match.targets),
            bytes_read=reader.bytes_read,
            duration_s=time.monotonic() - began,
            missing=match.missing,
            unexpected=unexpected,
            per_rank_missing=match.per_rank_missing,
            cast=match.cast,
            skipped=tuple(skipped),
            filled=tuple(reader.filled),
        )
        return Restored(folder.step, report, rebuild(flat.root, match.results))
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in skipped)
    raise SnapshotError(f"no snapshot under '{root}' can be restored:{reasons}")


def _flatten_together(state: dict[str, Any], first: Candidate, agreement: Agreement) -> Flat:
    """Flattens the state; a rank that cannot says so to the others, which would wait for it."""
    try:
        return flatten(state, restoring=True)
    except StateError as error:
        agreement.exchange([first.name, "mismatch", str(error), []])
        raise


@dataclass(frozen=True)
class _Opened:
    """What this rank found in a candidate. status: ok, damaged, or mismatch (the state does not fit: no fallback)."""

    status: str
    text: str
    reader: SnapshotReader | None = None
    match: _Match | None = None


def _open(folder: Candidate, flat: Flat, rank: int, wanted: Wanted, held: ExitStack) -> _Opened:
    """Opens a candidate, holds it against retention and lays the state over it. Reads no data."""
    try:
        held.enter_context(folder.hold())
        reader = folder.open()
        adopt_optimizers(flat, reader)
        return _Opened("ok", reader.manifest.attempt, reader, _match(flat, reader, rank, wanted))
    except SnapshotDamaged as error:
        return _Opened("damaged", str(error))
    except FileNotFoundError:
        return _Opened("damaged", f"'{folder.name}' has no MANIFEST.json: it was never finished, or was just removed")
    except OSError as error:
        return _Opened("damaged", f"'{folder.name}' cannot be read: {error}")
    except StateError as error:
        return _Opened("mismatch", str(error))


def _read(reader: SnapshotReader, match: _Match) -> tuple[str, str]:
    try:
        reader.read(match.targets)
    except SnapshotDamaged as error:
        return "damaged", str(error)
    except OSError as error:  # of a store
        return "damaged", f"'{reader.place}' cannot be read: {error}"
    for tensor, twin, text in match.twins:
        if not torch.equal(bytes_of(tensor, 0, tensor.numel()), bytes_of(twin, 0, twin.numel())):
            return "mismatch", text
    return "ok", reader.manifest.attempt


def _common_verdict(folder: Candidate, words: list[list[Any]]) -> str | None:
    """Returns why all ranks pass over a candidate, or None. Raises when the state of any rank does not fit it."""
    many = len(words) > 1
    for rank, (name, status, text, *_) in enumerate(words):
        if name != folder.name:
            raise SnapshotError(f"rank {rank} sees '{name}' where this rank sees '{folder.name}' as the newest")
        if status == "mismatch":
            raise StateError(f"{folder.name}: rank {rank}: {text}" if many else f"{folder.name}: {text}")
    for rank, (_, status, text, *_) in enumerate(words):
        if status == "damaged":
            return f"rank {rank}: {text}" if many else text
    if len({word[2] for word in words}) > 1:
        return "the ranks see different snapshots of that name"
    return None


def _match(flat: Flat, reader: SnapshotReader, rank: int, wanted: Wanted) -> _Match:
    """Lays the state over the snapshot. StateError lists names, shapes and dtypes that do not fit."""
    table, per_rank = reader.table, _per_rank_names(reader)
    stored = table.names
    missing = [n for n in flat.tensors if n not in stored] + [n for n in flat.values if n not in reader.values]
    missing += [n for n in flat.per_rank if n not in per_rank]
    absent = flat.absent(missing)
    missing = [n for n in missing if n not in absent]
    refused = [n for n in missing if not _allowed(n, wanted.allow_missing)]
    problems = []
    if refused:
        problems.append(f"missing in the snapshot: {_names(refused)}")
    tied = find_aliases(list(flat.tensors.values()))
    targets, cast, twins = [], [], []
    for name, leaf in flat.tensors.items():
        if name not in stored:
            continue
        entry = table.entry(name)
        if leaf.full_shape != entry.full_shape:
            problems.append(
                f"{leaf.path} has the full shape {leaf.full_shape}, the snapshot's {name!r} {entry.full_shape}"
            )
        elif leaf.tensor.dtype != entry.dtype and not (wanted.cast is True or _allowed(name, wanted.cast or ())):
            problems.append(
                f"{leaf.path} is {leaf.tensor.dtype}, the snapshot's {name!r} {entry.dtype}; allow it by cast="
            )
        else:
            other = table.entry(tied[name]) if tied.get(name) in stored else None
            if other is not None and _same_bytes(entry, other, leaf.path):
                continue
            memory = leaf.tensor
            if other is not None:  # cut in other pieces, so that only the bytes can tell
                memory = torch.empty_like(leaf.tensor)
                twins.append((leaf.tensor, memory, _differ(entry, other, leaf.path)))
            if leaf.tensor.dtype != entry.dtype:
                cast.append(name)
            targets.append(Target(entry, memory, leaf.box, leaf.flat))
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise StateError("; ".join(problems[:8]) + more)
    results: dict[str, Any] = dict.fromkeys(absent, ABSENT)
    results |= {n: decode(reader.values[n], f"value {n!r}") for n in flat.values if n in reader.values}
    own = reader.fragments[rank].per_rank if rank < len(reader.fragments) else {}
    results.update({n: decode(own[n], f"per-rank value {n!r}") for n in flat.per_rank if n in own})
    per_rank_missing = tuple(n for n in flat.per_rank if n in per_rank and n not in own)
    return _Match(tuple(targets), results, tuple(missing), per_rank_missing, tuple(cast), tuple(twins))


def _same_bytes(entry: TensorEntry, other: TensorEntry, path: str) -> bool:
    """True when two names tied in the state have the same bytes in the snapshot, so that one read serves both; False
    when their pieces do not tell."""
    if entry is other:
        return True
    mine, theirs = ({(s.piece.offset, s.piece.flat): s.piece.xxh3_128 for s in e.sources} for e in (entry, other))
    if mine.keys() == theirs.keys() and mine != theirs:
        raise StateError(_differ(entry, other, path))
    return mine == theirs


def _differ(entry: TensorEntry, other: TensorEntry, path: str) -> str:
    return f"{path} is tied in the state, but {entry.name!r} and {other.name!r} differ in the snapshot"


def _unexpected(reader: SnapshotReader, words: list[list[Any]], wanted: Wanted) -> tuple[str, ...]:
    """Returns names of the snapshot that no rank's state has. StateError when they are not allowed."""
    known = {name for word in words for name in word[3]}
    names = reader.table.names | reader.values.keys() | _per_rank_names(reader)
    unexpected = sorted(name for name in names if name not in known)
    refused = [name for name in unexpected if not _allowed(name, wanted.allow_unexpected)]
    if refused:
        raise StateError(f"{reader.place}: not in the state of any rank: {_names(refused)}")
    return tuple(unexpected)


def _per_rank_names(reader: SnapshotReader) -> set[str]:
    return {name for fragment in reader.fragments for name in fragment.per_rank}


def _allowed(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(repr(name) for name in names[:8]) + more
