"""plait._C.read_ranges where the page cache has the file: read in place under a lease, and what becomes of that where
the file is wanted by others, where memory may not be locked, and where no lease is to be had.

Bytes that went through read() are counted by the kernel (rchar of proc(5)). Only file systems whose leases know of
every opener (ext4, XFS) are read in place; elsewhere those tests are skipped.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from plait import _C
from plait.bench.snapshot_memory import resident_share
from tests.csrc_memory import address_of, random_bytes

BLOCK = 4 << 20
SIZE = 3 * BLOCK + 5000
DATA = bytes(random_bytes(SIZE, seed=5))
CRCS = _C.crc32c_blocks(DATA, BLOCK)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(DATA)
    os.sync()
    if _C.io_facts(tmp_path)["filesystem"] not in ("ext4", "xfs"):
        pytest.skip("not ext4 or XFS: no lease there knows of every opener")
    return path


def read(path, ranges=((0, SIZE),), io=None, threads=8):
    """What lies in the ranges, and how many bytes went through read()."""
    targets = [bytearray(max(1, size)) for _, size in ranges]
    requests = [(at, size, address_of(t)) for (at, size), t in zip(ranges, targets, strict=True)]
    before = through_read()
    _C.read_ranges(io or _C.PosixIo(), path, SIZE, CRCS, requests, block_bytes=BLOCK, threads=threads)
    return [bytes(t[:size]) for (_, size), t in zip(ranges, targets, strict=True)], through_read() - before


def through_read() -> int:
    with open("/proc/self/io") as file:
        return int(next(line for line in file if line.startswith("rchar")).split()[1])


@pytest.mark.parametrize("threads", [1, 8])
def test_what_the_page_cache_has_is_not_copied_by_the_kernel(path, threads):
    [data], through = read(path, threads=threads)
    assert data == DATA and through < 65536  # of /proc/self/io itself


def test_parts_of_blocks_at_odd_places_are_taken_from_there_too(path):
    ranges = [(0, 1), (BLOCK - 7, 14), (2 * BLOCK + 1, 65537), (SIZE - 4999, 4999), (3 * BLOCK, 0)]
    found, through = read(path, ranges)
    assert found == [DATA[at : at + size] for at, size in ranges] and through < 65536


def test_a_flipped_bit_there_is_found(path):
    with open(path, "r+b") as file:
        file.seek(2 * BLOCK + 77)
        file.write(bytes([DATA[2 * BLOCK + 77] ^ 4]))
    with pytest.raises(_C.ChecksumError, match="block 2 .* does not match") as error:
        read(path)
    assert error.value.block == 2


def test_a_file_that_is_open_for_writing_is_read_the_other_way(path):
    with open(path, "r+b"):
        [data], through = read(path)
    assert data == DATA and through >= SIZE


def test_injected_faults_see_every_read(path):
    """A mapping makes no call that could fail."""
    io = _C.FaultIo()
    [data], through = read(path, io=io)
    assert data == DATA and through >= SIZE and "pread" in [name for name, _ in io.ops]


def test_the_lease_is_given_back_and_its_signal_is_left_alone(path):
    """Also where the checksum is wrong; whoever opens the file for writing afterwards does not wait."""
    before = signal.getsignal(signal.SIGURG)
    read(path)
    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    with open(path, "r+b") as file:
        file.write(b"x" + bytes([DATA[1] ^ 1]))
    with pytest.raises(_C.ChecksumError):
        read(path)
    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    assert signal.getsignal(signal.SIGURG) is before


READER = """
    import sys
    sys.path.insert(0, sys.argv[2])
    from tests import test_csrc_resident as t
    path, good, bad = sys.argv[1], 0, 0
    while good < 10 or good + bad < 60:
        try:
            good += t.read(path)[0] == [t.DATA]
        except t._C.ChecksumError:
            bad += 1
    print(good, bad)
"""


@pytest.mark.timeout(120)
def test_a_file_that_is_cut_and_written_again_and_again_ends_no_reader(path):
    """Touching a mapping behind the end of its file would be SIGBUS. The writer never waits long for the reader."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    reader = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(READER), str(path), root], stdout=subprocess.PIPE, text=True
    )
    longest, rounds = 0.0, 0
    while reader.poll() is None:
        began = time.monotonic()
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
        longest, rounds = max(longest, time.monotonic() - began), rounds + 1
        os.write(fd, DATA)
        os.close(fd)
        time.sleep(0.02)
    good, bad = map(int, reader.communicate()[0].split())
    assert reader.returncode == 0 and rounds > 3 and good > 0
    assert longest < 10  # The kernel would let it wait for 45 s.


def test_who_wants_a_file_that_is_read_from_the_disk_is_let_in_between_two_blocks(path):
    """Holes take no space and no place in the page cache. One thread, and many blocks after the one being read."""
    blocks = 64
    os.truncate(path, 0)
    os.truncate(path, blocks * BLOCK)
    crcs, target = _C.crc32c_blocks(bytes(BLOCK), BLOCK) * blocks, bytearray(b"x" * blocks)
    requests = [(i * BLOCK, 1, address_of(target) + i) for i in range(blocks)]

    def read_holes():
        _C.read_ranges(_C.PosixIo(), path, blocks * BLOCK, crcs, requests, block_bytes=BLOCK, threads=1)

    for _ in range(20):  # The system may let the opener sleep until all is read; never 20 times.
        reader = threading.Thread(target=read_holes)
        reader.start()
        while reader.is_alive() and is_free(path):
            pass
        os.close(os.open(path, os.O_WRONLY))
        when_let_in = through_read()
        reader.join()
        assert target == bytes(blocks)
        if through_read() - when_let_in > 2 * BLOCK:
            return
    pytest.fail("who opened the file for writing waited until all of it was read")


def is_free(path) -> bool:
    """Nobody has a lease on it; asking makes a lease end."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except BlockingIOError:
        return False
    return True


def test_readers_do_not_end_each_others_leases(path):
    """A lease of the test's own stands for that of another reader."""
    with open(path, "rb") as file:
        fcntl.fcntl(file, 10, signal.SIGURG)  # F_SETSIG
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        [data], through = read(path)
        assert data == DATA and through < 65536
        assert fcntl.fcntl(file, fcntl.F_GETLEASE) == fcntl.F_RDLCK


UNLOCKED = """
    import ctypes, os, resource, sys
    sys.path.insert(0, sys.argv[2])
    from tests import test_csrc_resident as t
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    if os.geteuid() == 0:
        os.setuid(65534)
        ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: /proc/self/io may be read again
    found, through = t.read(sys.argv[1])
    print(found == [t.DATA] and through >= t.SIZE)
"""


def test_where_memory_may_not_be_locked_the_kernel_copies(path):
    """RLIMIT_MEMLOCK of 0 and no capability to pass it; without a sanitizer, which makes mlock do nothing."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
        os.chmod(path.parent, 0o755)  # From inside, those above it do not count.
    command = [sys.executable, "-c", textwrap.dedent(UNLOCKED), path.name, root]
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=path.parent, env=env)
    assert done.stdout == "True\n", done.stderr
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK) != (0, 0)  # here


STRANGER = """
    import ctypes, os, sys
    sys.path.insert(0, sys.argv[2])
    from tests import test_csrc_resident as t
    os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: /proc/self/io may be read again
    print(t.read(sys.argv[1])[0] == [t.DATA])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_cold_file_of_somebody_else_is_read_past_the_page_cache(path):
    """mincore() says of it that all is there, to those who could not write to it."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path.parent.chmod(0o755)  # From inside, those above it do not count.
    path.chmod(0o644)
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, "-c", textwrap.dedent(STRANGER), path.name, root]
    done = subprocess.run(command, capture_output=True, text=True, cwd=path.parent)
    assert done.stdout == "True\n", done.stderr
    assert resident_share(path.parent) == 0


def test_the_mapping_is_gone_afterwards(path):
    """A restore takes no address space and locks no memory beyond its end."""

    def state():
        with open("/proc/self/status") as status, open("/proc/self/maps") as maps:
            locked = next(line for line in status if line.startswith("VmLck"))
            return locked.split()[1], str(path) in maps.read()

    before = state()
    read(path)
    assert state() == before and before[1] is False
