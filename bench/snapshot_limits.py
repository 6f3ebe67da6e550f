"""What this machine allows, beside every save of the `snapshots` suite: copies in memory, direct writes and reads.

By the C library and system calls alone (memmove, pwrite, preadv), nothing of plait's: no format, no checksum.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from plait.bench.snapshot_way import State, pieces_of, size_of, sync_folders

PIECE = 4 << 20  # bytes of a request; larger ones and io_uring gave the same on the disk this was made on (2026-11)
_MEMMOVE = ctypes.CDLL(None).memmove  # gives the GIL back while it copies
_MEMMOVE.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class Limits:
    """One state's bytes in resident memory, to be copied, written and read."""

    def __init__(self, state: State) -> None:
        self.pieces, self.size = pieces_of(state), size_of(state)
        self.padded = -(-self.size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, self.padded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.copy(2)  # faults it in

    def copy(self, threads: int) -> float:
        """memmove of all tensors, an equal share of the bytes for each thread; returns the seconds."""
        shares: list[list[tuple[int, int, int]]] = [[] for _ in range(threads)]
        for address, nbytes, offset in self.pieces:
            shares[min(offset * threads // self.size, threads - 1)].append((address, nbytes, offset))

        def copy(share: list[tuple[int, int, int]]) -> None:
            for address, nbytes, offset in share:
                _MEMMOVE(self.address + offset, address, nbytes)

        return self.timed(threads, [lambda share=share: copy(share) for share in shares])  # type: ignore[misc]

    def write(self, path: Path, threads: int) -> float:
        """Direct pwrite into a new, preallocated file, fdatasync, folders synced; returns the seconds."""
        start = time.perf_counter()
        path.parent.mkdir()
        self.fill(path, os.O_CREAT | os.O_EXCL, threads)
        return time.perf_counter() - start

    def overwrite(self, path: Path, threads: int) -> float:
        """The same into the file of an earlier `write`, whose blocks are allocated and were written; the seconds."""
        start = time.perf_counter()
        self.fill(path, 0, threads)
        return time.perf_counter() - start

    def fill(self, path: Path, flags: int, threads: int) -> None:
        """Opens with these flags, writes all bytes, syncs file and folders."""
        fd = os.open(path, os.O_RDWR | os.O_DIRECT | flags)
        try:
            os.posix_fallocate(fd, 0, self.padded)
            self.timed(threads, self.requests(lambda view, at: os.pwrite(fd, view, at)))
            os.fdatasync(fd)
        finally:
            os.close(fd)
        sync_folders(path.parent)

    def read(self, path: Path, threads: int) -> float:
        """Direct preadv of the whole file into resident memory; returns the seconds."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            return self.timed(threads, self.requests(lambda view, at: os.preadv(fd, [view], at)))
        finally:
            os.close(fd)

    def requests(self, call: Callable[[memoryview, int], int]) -> list[Callable[[], None]]:
        """Returns the calls that move all bytes, one piece each; OSError where one moves fewer than asked for."""
        view = memoryview(self.memory)

        def move(at: int) -> None:
            piece = view[at : at + PIECE]
            if call(piece, at) != len(piece):
                raise OSError(f"a direct request at {at} moved fewer than its {len(piece)} bytes")

        return [lambda at=at: move(at) for at in range(0, self.padded, PIECE)]  # type: ignore[misc]

    def timed(self, threads: int, calls: list[Callable[[], None]]) -> float:
        """Makes the calls on so many threads, which are there before the clock starts; returns the seconds."""
        with ThreadPoolExecutor(threads) as pool:
            for waited in [pool.submit(time.sleep, 0.002) for _ in range(threads)]:
                waited.result()
            start = time.perf_counter()
            for done in [pool.submit(call) for call in calls]:
                done.result()
            return time.perf_counter() - start
