"""Addresses of Python buffers, and counts of this process's threads and descriptors, for the tests of plait._C."""

from __future__ import annotations

import ctypes
import os

import numpy

BLOCK = 8192  # Small blocks in most tests, so that few bytes make many blocks.


def address_of(buffer: bytearray | memoryview) -> int:
    """Returns the address of a writable, non-empty buffer, which the caller keeps alive."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def random_bytes(size: int, seed: int = 0) -> bytearray:
    """Returns `size` bytes (at least one is allocated) that are the same for the same seed."""
    return bytearray(numpy.random.default_rng(seed).bytes(size))


def threads() -> set[str]:
    """Returns the names of this process's threads that plait started."""
    names = set()
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                names.add(file.read().strip())
        except FileNotFoundError:  # It ended while we looked.
            pass
    return {name for name in names if name.startswith("plait-")}


def descriptors() -> int:
    """Returns the number of open descriptors."""
    return len(os.listdir("/proc/self/fd"))
