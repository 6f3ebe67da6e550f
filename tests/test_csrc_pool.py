"""plait._C.StagingPool: alignment, residency, copies both ways, views that outlive it, and what it refuses.

Also that a long call leaves the GIL: another Python thread takes turns while the copy runs, counted, not timed.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading

import pytest

from plait import _C
from tests.csrc_memory import address_of, random_bytes, threads

HUGE = 2 << 20
TASK = 4 << 20  # The share that one thread copies at a time.


@pytest.mark.parametrize(("asked", "capacity"), [(0, HUGE), (1, HUGE), (HUGE, HUGE), (HUGE + 1, 2 * HUGE)])
def test_whole_huge_pages(asked, capacity):
    pool = _C.StagingPool(asked)
    assert pool.capacity == capacity and pool.address % HUGE == 0 and not pool.pinned
    assert bytes(pool.view(0, capacity)) == bytes(capacity)


def resident_bytes(address: int, size: int) -> tuple[int, str]:
    """The resident bytes of the mappings that overlap the range, and their flags, from /proc/self/smaps."""
    resident, flags, inside = 0, "", False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first = line.split()[0]
            if not first.endswith(":"):
                begin, end = (int(x, 16) for x in first.split("-"))
                inside = begin < address + size and address < end
            elif inside and first == "Rss:":
                resident += int(line.split()[1]) << 10
            elif inside and first == "VmFlags:":
                flags += line
    return resident, flags


def test_faulted_in_at_construction():
    pool = _C.StagingPool(16 * HUGE)
    resident, flags = resident_bytes(pool.address, pool.capacity)
    assert resident >= 16 * HUGE
    assert " hg" in flags  # MADV_HUGEPAGE


@pytest.mark.parametrize("threads_count", [1, 2, 3])
@pytest.mark.parametrize("sizes", [[0], [1], [100, 0, 3], [TASK - 1, 2], [TASK, TASK + 1, 5], [3 * TASK + 77]])
def test_copies_in_and_out(sizes, threads_count):
    pool = _C.StagingPool(16 << 20, threads=threads_count)
    sources = [random_bytes(size + 1, seed=i) for i, size in enumerate(sizes)]
    targets = [bytearray(size + 1) for size in sizes]
    offsets = [3 + sum(sizes[:i]) + 5 * i for i in range(len(sizes))]
    pool.copy_in([(address_of(s), n, at) for s, n, at in zip(sources, sizes, offsets, strict=True)])
    for source, size, at in zip(sources, sizes, offsets, strict=True):
        assert pool.view(at, size) == source[:size]
        assert pool.view(at + size, 5) == bytes(5)
    pool.copy_out([(address_of(t), n, at) for t, n, at in zip(targets, sizes, offsets, strict=True)])
    for source, target, size in zip(sources, targets, sizes, strict=True):
        assert target == source[:size] + b"\0"
    assert threads() == set()


def test_thousands_of_small_copies():
    pool = _C.StagingPool(8 << 20)
    source = random_bytes(6 << 20)
    begin = address_of(source)
    copies = [(begin + at, 1000, at + 7) for at in range(0, 6 << 20, 1000)][:-1]
    pool.copy_in(copies)
    assert pool.view(7, len(copies) * 1000) == source[: len(copies) * 1000]


def test_views_are_writable_and_outlive_the_pool():
    pool = _C.StagingPool(HUGE)
    view = pool.view(100, 4)
    view[:] = b"abcd"
    assert pool.view(99, 6) == b"\0abcd\0"
    pool.close()
    assert view == b"abcd"
    view.release()


def test_a_closed_pool_is_refused_by_name():
    pool = _C.StagingPool(HUGE)
    pool.close()
    pool.close()
    for call in (
        lambda: pool.address,
        lambda: pool.capacity,
        lambda: pool.view(0, 1),
        lambda: pool.copy_in([]),
        lambda: pool.copy_out([]),
    ):
        with pytest.raises(ValueError, match="StagingPool is closed"):
            call()


def test_closing_gives_the_memory_back():
    pool = _C.StagingPool(16 * HUGE)
    address = pool.address
    pool.close()
    assert resident_bytes(address, 16 * HUGE)[0] < 16 * HUGE


@pytest.mark.parametrize(
    ("copy", "text"),
    [
        ((4096, 1, HUGE), "outside its 2097152 bytes"),
        ((4096, HUGE + 1, 0), "outside"),
        ((4096, 2**63, 2**63), "outside"),
        ((4096, 2**64 - 10, 100), "outside"),  # The sum wraps around.
        ((0, 1, 0), "address 0"),
    ],
)
def test_bad_copies_are_refused_before_any_byte_moves(copy, text):
    pool = _C.StagingPool(HUGE)
    source = bytearray(b"x" * 10)
    for method in (pool.copy_in, pool.copy_out):
        with pytest.raises(ValueError, match=text):
            method([(address_of(source), 10, 0), copy])
    assert pool.view(0, 10) == bytes(10) and source == b"x" * 10


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="threads is 0"):
        _C.StagingPool(HUGE, threads=0)
    with pytest.raises(ValueError, match="at most"):
        _C.StagingPool(2**63)
    with pytest.raises(OSError, match="mmap '[0-9]+ bytes of memory'") as caught:
        _C.StagingPool(2**46)
    assert caught.value.errno == 12  # ENOMEM


def test_pinning_without_a_driver_says_so():
    if _C.CudaDriver.probe()["available"]:
        pytest.skip("a CUDA driver is here")
    with pytest.raises(RuntimeError, match="pin=True needs the CUDA driver: libcuda.so.1"):
        _C.StagingPool(HUGE, pin=True)


@pytest.mark.gpu
def test_pinned_memory_copies_asynchronously():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.zeros(1, device="cuda")  # Makes the context that pinning needs.
    pool = _C.StagingPool(HUGE, pin=True)
    host = torch.frombuffer(pool.view(0, HUGE), dtype=torch.uint8)
    assert pool.pinned and host.is_pinned()
    host.copy_(torch.full((HUGE,), 7, dtype=torch.uint8, device="cuda"), non_blocking=True)
    torch.cuda.synchronize()
    assert bytes(pool.view(0, HUGE)) == b"\7" * HUGE
    del host
    pool.close()


def test_another_python_thread_runs_during_a_long_copy():
    """With an endless switch interval the other thread gets its turns only if the call itself lets go of the GIL."""
    pool = _C.StagingPool(64 << 20)
    copies = [(pool.address, 32 << 20, 32 << 20)] * 20  # 640 MiB: tens of milliseconds at any speed.
    start, turns = threading.Event(), 0

    def count() -> None:
        nonlocal turns
        start.wait()
        for _ in range(1000):
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        start.set()
        pool.copy_in(copies)
        seen = turns
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    assert seen == 1000


def in_child(check) -> int:
    """Exit status of a forked child that runs `check`: 0 when it is true."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if check() else 1)
        except BaseException:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_worker_does_not_get_the_pool():
    """A data loader forks at every epoch: each huge page of the pool was copied at the next save's first write to it,
    and a device or direct I/O under way went on with the old one."""
    pool = _C.StagingPool(8 * HUGE)
    assert " dc" in resident_bytes(pool.address, pool.capacity)[1], "do not copy on fork"


def test_a_child_that_drops_an_inherited_pool_unmaps_nothing_of_its_own():
    pools = [_C.StagingPool(HUGE)]
    address = pools[0].address
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]

    def drop() -> bool:
        private_there = 0x02 | 0x20 | 0x100000  # MAP_PRIVATE, MAP_ANONYMOUS, MAP_FIXED_NOREPLACE
        mine = libc.mmap(address, HUGE, 3, private_there, -1, 0)
        pools.clear()
        ctypes.memset(mine, 7, HUGE)
        return mine == address

    assert in_child(drop) == 0
