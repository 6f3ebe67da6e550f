"""Types of the extension that csrc/ builds. Memory is passed as addresses; sizes, offsets and rates are in bytes."""

import os
from collections.abc import Sequence
from typing import TypeAlias, TypedDict

from typing_extensions import Buffer

_Path: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]

class ChecksumError(RuntimeError):
    """A file differs from what was written; `block` is the damaged block, -1 when the file's size is wrong."""

    path: str
    block: int

class Io: ...

class PosixIo(Io):
    def __init__(self) -> None: ...

class FaultIo(Io):
    """Fails the operations that `script` numbers: (index, action, value), action = errno | short | crash_before |
    crash_after | crash_short. With `sticky` an errno also hits all later operations (or those named in `only`)."""

    def __init__(
        self, script: Sequence[tuple[int, str, int]] = (), sticky: bool = False, only: Sequence[str] = ()
    ) -> None: ...
    @property
    def ops(self) -> list[tuple[str, str]]: ...

def crc32c_fold_width() -> int: ...
def crc32c(data: Buffer, value: int = 0, width: int = 64) -> int: ...
def crc32c_blocks(data: Buffer, block_bytes: int) -> list[int]: ...
def xxh3_128(data: Buffer) -> bytes: ...

class PoolView:
    def __buffer__(self, flags: int, /) -> memoryview: ...

class StagingPool:
    """Warm, huge-page aligned memory. Copies are (address, nbytes, pool_offset) in both directions."""

    def __init__(self, capacity_bytes: int, threads: int = 2, pin: bool = False) -> None: ...
    @property
    def capacity(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def pinned(self) -> bool: ...
    def pin(self) -> None: ...
    def copy_in(self, copies: Sequence[tuple[int, int, int]]) -> None: ...
    def copy_out(self, copies: Sequence[tuple[int, int, int]]) -> None: ...
    def view(self, offset: int, nbytes: int) -> memoryview: ...
    def close(self) -> None: ...

class WriteResult:
    @property
    def crcs(self) -> list[int]: ...
    @property
    def direct(self) -> bool: ...
    @property
    def fallback_reason(self) -> str: ...
    @property
    def reused(self) -> bool: ...

def write_file(
    io: Io,
    path: _Path,
    header: bytes | bytearray,
    pieces: Sequence[tuple[int, int, int]],
    file_bytes: int,
    *,
    block_bytes: int = 4194304,
    threads: int = 2,
    rate_limit: int = 0,
    direct: bool = True,
    nice: int = 0,
    io_priority: str = "normal",
    over: bool = False,
) -> WriteResult:
    """pieces: (address, nbytes, file_offset). io_priority: normal, low, idle. over: there is an old file, to be
    written over where nothing else refers to it, else to be removed."""

class TornError(RuntimeError):
    """Memory of a lazy piece changed before it was copied; `piece` is its index."""

    piece: int

class Stage:
    """One state on its way through the pool, in the blocks of its file. pieces, in file order: (address, or 0 for what
    the caller fills in, nbytes, file_offset, lazy)."""

    def __init__(
        self,
        pool: StagingPool,
        header: bytes,
        pieces: Sequence[tuple[int, int, int, bool]],
        file_bytes: int,
        *,
        block_bytes: int = 4194304,
        threads: int = 2,
    ) -> None: ...
    @property
    def slabs(self) -> int: ...
    @property
    def held_bytes(self) -> int: ...
    @property
    def copied(self) -> bool: ...
    def start(self) -> None: ...
    def capture(self) -> None: ...
    def hurry(self, more: int) -> None: ...
    def fence(self, ranges: Sequence[tuple[int, int]]) -> None: ...
    def wait_copied(self) -> None: ...
    def open(self, file_offset: int, nbytes: int) -> int: ...
    def fill(self, file_offset: int, nbytes: int) -> None: ...
    def cancel(self, reason: str) -> None: ...
    def hashes(self) -> list[str]: ...
    def close(self) -> None: ...

def stream_copy(address: int, source: Buffer, width: int = 64) -> None: ...
def write_stage(
    io: Io,
    path: _Path,
    stage: Stage,
    *,
    threads: int = 2,
    rate_limit: int = 0,
    direct: bool = True,
    nice: int = 0,
    io_priority: str = "normal",
    over: bool = False,
) -> WriteResult:
    """Writes a stage's blocks as they are copied."""

def read_ranges(
    io: Io,
    path: _Path,
    file_bytes: int,
    crcs: Sequence[int],
    requests: Sequence[tuple[int, int, int]],
    *,
    block_bytes: int = 4194304,
    threads: int = 4,
    direct: bool = True,
) -> int:
    """requests: (file_offset, nbytes, address). Returns the bytes read."""

def write_small(io: Io, path: _Path, data: bytes | bytearray, exclusive: bool = True) -> None: ...
def read_small(io: Io, path: _Path, max_bytes: int) -> bytes: ...
def rename(io: Io, source: _Path, target: _Path) -> None: ...
def free_bytes(io: Io, path: _Path) -> int: ...
def fsync_dir(io: Io, path: _Path) -> None: ...
def unlink(io: Io, path: _Path) -> None: ...
def mkdir(io: Io, path: _Path) -> None: ...
def rmdir(io: Io, path: _Path) -> None: ...

class _Probe(TypedDict):
    available: bool
    reason: str
    host_register: bool
    driver_version: int

class CudaDriver:
    @staticmethod
    def probe(initialize: bool = False) -> _Probe:
        """`initialize` calls cuInit: not in a process that will fork workers."""

    @staticmethod
    def relax_captures() -> bool:
        """The calling thread's waits and another thread's graph capture leave each other alone from here on."""

class _IoFacts(TypedDict):
    direct_io: bool
    direct_io_reason: str
    io_uring: bool
    io_uring_reason: str
    filesystem: str
    free_bytes: int
    total_bytes: int

def io_facts(path: _Path) -> _IoFacts: ...
