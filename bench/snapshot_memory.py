"""What a save or a restore takes of this machine's memory, and what the page cache holds of its files.

By the kernel's own counters (proc(5), mincore(2)); nothing is sampled, so nothing is disturbed or missed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_FAILED = ctypes.c_void_p(-1).value


def forget_peak() -> int:
    """Begins a new peak; returns the bytes resident now."""
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
    return of_process("self", "VmRSS")


def peak_since(before: int) -> int:
    """Returns by how many bytes this process grew beyond `before` at most since forget_peak(), with what the
    processes below it took at most themselves: memory that they share with it counts once."""
    return max(0, of_process("self", "VmHWM") - before) + sum(map(_own_peak, below(os.getpid())))


def _own_peak(pid: int) -> int:
    return max(0, of_process(str(pid), "VmHWM") - of_process(str(pid), "RssShmem") - of_process(str(pid), "RssFile"))


def of_process(pid: str, field: str) -> int:
    """Returns bytes of one line of /proc/PID/status; 0 where the process or the line is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def below(pid: int) -> list[int]:
    """Returns the processes that descend from a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            children = [int(child) for child in (task / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        for child in children:
            found += [child, *below(child)]
    return found


def drop_from_cache(path: Path) -> None:
    """Asks the kernel to forget the cached pages of all files under path, which are synced already."""
    for file in files_of(path):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def read_into_cache(path: Path) -> None:
    """Reads all files under path, so that their pages are resident."""
    for file in files_of(path):
        with open(file, "rb", buffering=0) as stream:
            while stream.read(1 << 22):
                pass


def files_of(path: Path) -> list[Path]:
    """Returns the files below a folder."""
    return [file for file in sorted(path.rglob("*")) if file.is_file()]


def resident_share(path: Path) -> float:
    """Returns which share of the pages of all files under path is in the page cache, 0 to 1. Raises OSError."""
    pages = resident = 0
    for file in files_of(path):
        size = file.stat().st_size
        if size:
            count = -(-size // mmap.PAGESIZE)
            pages, resident = pages + count, resident + _resident_pages(file, size, count)
    return resident / max(pages, 1)


def _resident_pages(file: Path, size: int, count: int) -> int:
    fd = os.open(file, os.O_RDONLY)
    try:
        address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    finally:
        os.close(fd)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), f"mmap '{file}'")
    vector = ctypes.create_string_buffer(count)
    try:
        if _LIBC.mincore(address, size, vector) != 0:
            raise OSError(ctypes.get_errno(), f"mincore '{file}'")
    finally:
        _LIBC.munmap(address, size)
    return sum(byte & 1 for byte in vector.raw)
