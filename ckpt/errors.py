"""What can go wrong with a snapshot, as types: a caller decides by type, a person reads the text.

Errors of the machine (disk full, no permission) stay OSError with errno and path; these are all the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class SnapshotError(RuntimeError):
    """A snapshot cannot be written, found or read; the text names folder, file, tensor and reason."""


class SnapshotLocked(SnapshotError):
    """Another job writes to this folder; the text names its host and process."""


class SnapshotDamaged(SnapshotError):
    """A file of a snapshot is missing, truncated or has other bytes than its manifest says."""


class SnapshotSealed(SnapshotDamaged):
    """A file of a snapshot is encrypted, and no key was given: nothing says that it is damaged, but it is no use."""


class StateError(SnapshotError, ValueError):
    """The caller's state cannot be stored, or does not fit the snapshot; the text names the path in the state."""


class TornSnapshot(SnapshotError):
    """A tensor of a guarded optimizer was changed before it was captured, and not by that optimizer; nothing was
    committed."""


@contextmanager
def naming(operation: str, path: Path) -> Iterator[None]:
    """Adds operation and path to an OSError of a call that knows only a descriptor."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, f"{operation}: {os.strerror(error.errno)}", str(path)) from error
