"""Which copies of which snapshots a restore may try, in order: the newest first, of one snapshot the nearest first;
and what a person may call one: STEP_FOLDER, RUN, RUN@STEP, or the same in a tier by its URL.

Only names are looked at here; whether a copy is good is found out when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from plait import _C
from plait.ckpt.agree import Agreement
from plait.ckpt.crypt import Key
from plait.ckpt.errors import SnapshotDamaged, SnapshotError
from plait.ckpt.folders import StepFolder, parse_step, step_folders, step_name
from plait.ckpt.keep import reading
from plait.ckpt.reader import SnapshotReader, read_manifest
from plait.ckpt.remote import FsspecStore
from plait.ckpt.tier_reader import TierReader, open_folder
from plait.ckpt.uploads import Tiers


@dataclass(frozen=True)
class Candidate:
    """One copy of a snapshot, not opened yet. name: equal on all ranks. hold: keeps it from retention meanwhile."""

    step: int
    name: str
    open: Callable[[], SnapshotReader]
    hold: Callable[[], AbstractContextManager[None]] = nullcontext


class Seen(NamedTuple):
    """What one rank sees of the snapshots of a run. agreement: also knows whether ranks have disks of their own."""

    io: _C.Io
    root: Path
    threads: int
    tiers: Tiers
    key: Key | None
    agreement: Agreement


def candidates(seen: Seen, step: int | None) -> list[Candidate]:
    """Returns the copies to try (of one step): the newest first, of one the nearest first; where ranks have disks of
    their own, one for each step that any rank sees. SnapshotError when there is none."""
    found = _on_all(seen, step)
    if not found:
        there = [folder.path.name for folder in step_folders(seen.root)]
        wanted = "no snapshot" if step is None else f"no snapshot of step {step}"
        raise SnapshotError(f"'{seen.root}' holds {wanted}" + (f"; there are {', '.join(there)}" if there else ""))
    return found


def newest_step(seen: Seen) -> int | None:
    """Returns the step of the first candidate that opens, on all ranks where they have disks of their own; None when
    there is none at all. SnapshotError that lists why none of them opens."""
    found, reasons = _on_all(seen, None), list[str]()
    while len(reasons) < len(found):
        candidate = found[len(reasons)]
        said = _why_not(candidate)
        words = seen.agreement.exchange(said) if _apart(seen) else [said]
        bad = [f"rank {rank}: {text}" if len(words) > 1 else text for rank, text in enumerate(words) if text]
        if not bad:
            return candidate.step
        reasons.append(f"\n  {candidate.name}: {bad[0]}")
        now = found if _apart(seen) else _on_all(seen, None)
        if candidate.name not in [other.name for other in now]:  # removed: whoever writes here then has newer ones
            found, reasons = now, []
    if reasons:
        raise SnapshotError(f"there are snapshots under '{seen.root}', and none is good:{''.join(reasons)}")
    return None


def _why_not(candidate: Candidate) -> str:
    try:
        candidate.open()
    except FileNotFoundError:
        return "was just removed"
    except (SnapshotDamaged, OSError) as error:
        return str(error)
    return ""


def _apart(seen: Seen) -> bool:
    return seen.agreement.apart and not seen.tiers.unions


def _on_all(seen: Seen, step: int | None) -> list[Candidate]:
    """Returns this rank's copies; where ranks have disks of their own, and one may be new or behind, one candidate
    for each step that any rank sees, so that all try the same in the same order, each with its nearest copy."""
    own = _all(seen, step)
    if not _apart(seen):
        return own
    steps: dict[int, list[Candidate]] = {}
    for candidate in own:
        steps.setdefault(candidate.step, []).append(candidate)
    every = {number for numbers in seen.agreement.exchange(sorted(steps)) for number in numbers}
    return [_nearest(number, steps.get(number, [])) for number in sorted(every, reverse=True)]


def _nearest(step: int, copies: list[Candidate]) -> Candidate:
    """Returns a candidate that opens the first of these copies that opens."""

    def open_first() -> SnapshotReader:
        error: Exception = SnapshotDamaged("has no copy of it, here or in a tier")
        for copy in copies:
            try:
                return copy.open()
            except (SnapshotDamaged, OSError) as found:
                error = found
        raise error

    @contextmanager
    def hold_all() -> Iterator[None]:
        with ExitStack() as held:
            for copy in copies:
                with suppress(OSError):  # it has no manifest, and will not open
                    held.enter_context(copy.hold())
            yield

    return Candidate(step, step_name(step), open_first, hold_all)


def _all(seen: Seen, step: int | None) -> list[Candidate]:
    io, root, threads, tiers, key, _ = seen
    found: list[tuple[int, int, Candidate]] = []
    for folder in step_folders(root) if not tiers.unions else ():  # with unions, which ranks see alike, it is in them
        if step is None or folder.step == step:
            opener = partial(open_folder, folder.path, io, threads, key, tiers.spare)
            found.append(
                (folder.step, 1, Candidate(folder.step, folder.path.name, opener, partial(reading, folder.path)))
            )
    away: dict[str, OSError] = {}
    for copy in tiers.copies(step, away):
        found.append((copy.step, 0, Candidate(copy.step, copy.name, partial(tiers.open, copy))))
    if away and not found:  # a run would begin anew, though it may have snapshots there
        raise next(iter(away.values()))
    first = [] if _apart(seen) else [_unreachable(url, error) for url, error in away.items()]
    return first + [candidate for *_, candidate in sorted(found, key=lambda row: row[:2], reverse=True)]


def _unreachable(url: str, error: OSError) -> Candidate:
    """Returns what is tried first, since it may hold newer ones, and so is named among those passed over."""

    def fail() -> SnapshotReader:
        raise error

    return Candidate(-1, url, fail)


def newest_valid(io: _C.Io, root: Path, key: Key | None = None) -> StepFolder | None:
    """Returns the newest folder whose manifest verifies and whose files have their sizes, or None."""
    folders = step_folders(root)
    while folders:
        try:
            read_manifest(io, folders[0].path, key)
            return folders[0]
        except SnapshotDamaged:  # or removed since it was listed: whoever writes here then has newer ones
            folders = folders[1:] if folders[0].path.is_dir() else step_folders(root)
    return None


def is_url(text: str) -> bool:
    """True for a tier that is no directory: "s3://bucket/run", but not "file:///data/run"."""
    return "://" in text and not text.startswith("file://")


def local_path(text: str) -> Path:
    """Returns the path of what is no URL, or of "file:///data/run"."""
    return Path(text.removeprefix("file://"))


def split_step(text: str) -> tuple[str, int | None]:
    """Returns "RUN@STEP" as (RUN, STEP); (text, None) when it names no step."""
    root, at, step = text.rpartition("@")
    return (root, int(step)) if at and step.isdecimal() else (text, None)


def find_snapshot(text: str) -> Path:
    """Returns the step folder of "STEP_FOLDER", "RUN" (its newest valid one) or "RUN@STEP". SnapshotError if none."""
    if is_url(text):
        raise SnapshotError(f"'{text}' is a store; this works on directories. `plait snapshot copy` brings one here")
    path = local_path(text)
    if parse_step(path) is not None:
        return path
    root, step = split_step(str(path))
    if step is not None and Path(root).is_dir():
        found = [folder for folder in step_folders(Path(root)) if folder.step == step]
        if not found:
            raise SnapshotError(f"'{root}' has no snapshot of step {step}")
        return found[0].path
    newest = newest_valid(_C.PosixIo(), path)
    if newest is None:
        raise SnapshotError(f"'{text}' is neither a snapshot nor a run folder with a valid one")
    return newest.path


def find_copies(text: str, step: int | None = None) -> tuple[FsspecStore, list[tuple[int, str]]]:
    """Returns a store and (step, folder) of the copies that a URL names, newest first: of a run, of one step of it
    ("URL@STEP", or `step`), or the one whose folder the URL is. SnapshotError if none, ImportError without driver."""
    url, at = split_step(text)
    wanted = step if step is not None else at
    store = FsspecStore(url, {})
    found = [(number, folder) for number, _, folder in store.steps() if wanted in (None, number)]
    parent, _, name = store.url.rpartition("/")
    if not found and name.startswith("step-"):
        store = FsspecStore(parent, {})
        found = [(number, folder) for number, _, folder in store.steps() if folder == name]
    if not found:
        raise SnapshotError(f"'{url}' has no snapshot" + ("" if wanted is None else f" of step {wanted}"))
    return store, found


@contextmanager
def opened_snapshot(text: str, key: Key | None) -> Iterator[SnapshotReader]:
    """Opens what a person names, a copy in a store too, held against retention where it is a directory."""
    if is_url(text):
        store, found = find_copies(text)
        yield TierReader(store, found[0][1], key=key)
        return
    folder = find_snapshot(text)
    if not folder.is_dir():
        raise FileNotFoundError(f"'{folder}' is not a folder")
    reader = open_folder(folder, key=key)
    with reading(folder):
        yield reader
