"""plait._C.write_file: bytes, checksums, gaps, refusals, and each of its system calls failing.

Cases: sizes on both sides of a sector (512), a page (4096) and a block; sources at aligned and odd addresses, so that
both the straight and the copied path write; direct and buffered. The real file is compared, read by Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from plait import _C
from tests.csrc_memory import BLOCK, address_of, descriptors, random_bytes, threads

MIB = 1 << 20
SIZES = [0, 1, 511, 512, 513, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 4096, 5 * BLOCK + 4097]


def check_file(path, expected: bytes, result: _C.WriteResult, block_bytes: int = BLOCK) -> None:
    assert path.read_bytes() == expected
    assert result.crcs == _C.crc32c_blocks(expected, block_bytes)


@pytest.fixture(scope="module")
def pool():
    """Aligned memory with random bytes; from offset 0 direct I/O takes it straight."""
    pool = new_pool()
    yield pool
    pool.close()


def new_pool() -> _C.StagingPool:
    pool = _C.StagingPool(8 * MIB)
    data = random_bytes(8 * MIB, seed=1)
    pool.copy_in([(address_of(data), len(data), 0)])
    return pool


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("shift", [0, 1, 64])  # Page-aligned, odd, as torch aligns.
@pytest.mark.parametrize("size", SIZES)
def test_round_trip(tmp_path, pool, size, shift, direct):
    path = tmp_path / "f"
    pieces = [(pool.address + shift, size, 0)]
    result = _C.write_file(_C.PosixIo(), path, b"", pieces, size, block_bytes=BLOCK, direct=direct)
    check_file(path, bytes(pool.view(shift, size)), result)
    assert result.direct == direct and result.fallback_reason == ""
    assert os.stat(path).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("size", [4 * MIB - 1, 4 * MIB, 4 * MIB + 1])
def test_default_blocks(tmp_path, pool, size):
    path = tmp_path / "f"
    result = _C.write_file(_C.PosixIo(), path, b"head", [(pool.address, size, 4096)], 4096 + size)
    check_file(path, b"head" + bytes(4092) + bytes(pool.view(0, size)), result, 4 * MIB)


@pytest.mark.parametrize("threads_count", [1, 2, 5])
@pytest.mark.parametrize("direct", [True, False])
def test_many_pieces_in_any_order_and_gaps_are_zero(tmp_path, pool, direct, threads_count):
    lengths = [3, 5000, 1, 0, BLOCK, 4096, 2 * BLOCK + 17, 64, 12345]
    gaps = [100, 0, 1, 7, 4095, 0, BLOCK, 3 * BLOCK, 2]
    expected = bytearray(b"header")
    pieces = []
    for i, (length, gap) in enumerate(zip(lengths, gaps, strict=True)):
        expected += bytes(gap)
        pieces.append((pool.address + i * 100003, length, len(expected)))
        expected += pool.view(i * 100003, length)
    expected += bytes(777)
    path = tmp_path / "f"
    result = _C.write_file(
        _C.PosixIo(),
        path,
        b"header",
        pieces[::-1],
        len(expected),
        block_bytes=BLOCK,
        direct=direct,
        threads=threads_count,
    )
    check_file(path, bytes(expected), result)


def test_a_file_of_nothing_but_zeros_and_one_of_nothing(tmp_path):
    result = _C.write_file(_C.PosixIo(), tmp_path / "z", b"", [], 3 * BLOCK + 1, block_bytes=BLOCK)
    check_file(tmp_path / "z", bytes(3 * BLOCK + 1), result)
    result = _C.write_file(_C.PosixIo(), tmp_path / "e", b"", [(0, 0, 0)], 0, block_bytes=BLOCK)
    check_file(tmp_path / "e", b"", result)


def test_an_existing_file_is_refused_and_kept(tmp_path, pool):
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError, match="open '"):
        _C.write_file(_C.PosixIo(), path, b"new", [], 3)
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize(
    ("pieces", "options", "text"),
    [
        ([(4096, 10, 2)], {}, "overlaps"),  # the header
        ([(4096, 10, 50), (4096, 10, 59)], {}, "overlaps"),
        ([(4096, 10, 95)], {}, "ends after file_bytes 100"),
        ([(4096, 2**63, 2**63)], {}, "ends after file_bytes 100"),
        ([(4096, 2**64 - 10, 50)], {}, "ends after file_bytes 100"),  # The sum wraps around.
        ([(0, 10, 50)], {}, "address 0"),
        ([], {"block_bytes": 0}, "block_bytes is 0"),
        ([], {"block_bytes": 1000}, "multiple of 4096"),
        ([], {"threads": 0}, "threads is 0"),
    ],
)
def test_bad_arguments_are_refused_before_the_file_exists(tmp_path, pieces, options, text):
    with pytest.raises(ValueError, match=text):
        _C.write_file(_C.PosixIo(), tmp_path / "f", b"head", pieces, 100, **options)
    assert os.listdir(tmp_path) == []


# One thread and five blocks: the order of operations is fixed.
OPS = ["open", "set_direct", "fallocate", *["pwrite"] * 5, "ftruncate", "fdatasync", "close"]
SIZE = 4 * BLOCK + 1234


def write(io: _C.Io, path, pool: _C.StagingPool, shift: int = 64) -> _C.WriteResult:
    pieces = [(pool.address + shift, SIZE, 0)]
    return _C.write_file(io, path, b"", pieces, SIZE, block_bytes=BLOCK, threads=1)


def test_operations_and_their_order(tmp_path, pool):
    """Case 11: descriptors alone, so that no buffer of a library is left to flush before the sync."""
    io = _C.FaultIo()
    write(io, tmp_path / "f", pool)
    assert io.ops == [(name, str(tmp_path / "f")) for name in OPS]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EAGAIN])
@pytest.mark.parametrize("index", range(len(OPS)))
def test_every_operation_failing_is_an_error_and_leaves_nothing(tmp_path, pool, index, number):
    before = descriptors()
    io = _C.FaultIo([(index, "errno", number)])
    with pytest.raises(OSError) as caught:
        write(io, tmp_path / "f", pool)
    assert caught.value.errno == number and f"{OPS[index]} '{tmp_path / 'f'}'" in str(caught.value)
    assert os.listdir(tmp_path) == [] and descriptors() == before and threads() == set()
    names = [name for name, _ in io.ops]
    assert names[: index + 1] == OPS[: index + 1]
    assert set(names[index + 1 :]) <= {"unlink", "close"}  # Never again, in particular no sync.
    write(_C.PosixIo(), tmp_path / "f", pool)  # The next one works.


@pytest.mark.parametrize("index", range(len(OPS)))
def test_every_operation_interrupted_is_done_again(tmp_path, pool, index):
    io = _C.FaultIo([(index, "errno", errno.EINTR)])
    result = write(io, tmp_path / "f", pool)
    check_file(tmp_path / "f", bytes(pool.view(64, SIZE)), result)
    assert result.direct
    assert len(io.ops) == len(OPS) + (OPS[index] != "close")


@pytest.mark.parametrize("bytes_moved", [0, 1, 512, 4095, 4096, 4097, BLOCK - 1])
@pytest.mark.parametrize("shift", [0, 64])
@pytest.mark.parametrize("index", [3, 7])
@pytest.mark.parametrize("direct", [True, False])
def test_short_writes_go_on(tmp_path, pool, index, shift, bytes_moved, direct):
    io = _C.FaultIo([(index if direct else index - 1, "short", bytes_moved)])
    pieces = [(pool.address + shift, SIZE, 0)]
    options = {"block_bytes": BLOCK, "threads": 1, "direct": direct}
    result = _C.write_file(io, tmp_path / "f", b"", pieces, SIZE, **options)
    check_file(tmp_path / "f", bytes(pool.view(shift, SIZE)), result)
    assert result.direct == direct


def test_writes_that_never_move_a_byte_end(tmp_path, pool):
    io = _C.FaultIo([(i, "short", 0) for i in range(3, 40)])
    with pytest.raises(OSError, match="without progress") as caught:
        write(io, tmp_path / "f", pool)
    assert caught.value.errno == errno.EIO and os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("index", [1, 3, 5, 7])
def test_refused_direct_io_becomes_buffered_with_the_reason(tmp_path, pool, index, number):
    """Case L12: at the open, at a full block, and at the tail, which is no multiple of 512."""
    io = _C.FaultIo([(index, "errno", number)])
    result = write(io, tmp_path / "f", pool)
    check_file(tmp_path / "f", bytes(pool.view(64, SIZE)), result)
    assert not result.direct
    assert OPS[index].replace("set_direct", "O_DIRECT") in result.fallback_reason
    assert os.strerror(number) in result.fallback_reason


@pytest.mark.parametrize("index", range(3, 8))
def test_threads_leave_direct_io_in_the_middle(tmp_path, pool, index):
    io = _C.FaultIo([(index, "errno", errno.EINVAL)])
    pieces = [(pool.address + 64, MIB, 0)]
    result = _C.write_file(io, tmp_path / "f", b"", pieces, MIB, block_bytes=BLOCK, threads=4)
    check_file(tmp_path / "f", bytes(pool.view(64, MIB)), result)
    assert not result.direct and result.fallback_reason.startswith("direct pwrite refused")


def test_a_real_einval_of_a_buffered_write_is_an_error(tmp_path, pool):
    io = _C.FaultIo([(3, "errno", errno.EINVAL)], sticky=True, only=["pwrite"])
    with pytest.raises(OSError, match="pwrite") as caught:
        write(io, tmp_path / "f", pool)
    assert caught.value.errno == errno.EINVAL and os.listdir(tmp_path) == []


def test_a_file_system_without_fallocate_is_written_all_the_same(tmp_path, pool):
    result = write(_C.FaultIo([(2, "errno", errno.EOPNOTSUPP)]), tmp_path / "f", pool)
    check_file(tmp_path / "f", bytes(pool.view(64, SIZE)), result)


@pytest.mark.parametrize("action", ["crash_before", "crash_after"])
@pytest.mark.parametrize("index", range(len(OPS)))
def test_crash_at_every_operation(tmp_path, pool, index, action):
    child = os.fork()
    if child == 0:
        write(_C.FaultIo([(index, action, 0)]), tmp_path / "f", new_pool())  # a child inherits none
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 137
    done = OPS[: index + (action == "crash_after")]
    assert (tmp_path / "f").exists() == ("open" in done)
    if "ftruncate" in done:  # All bytes are there, also before the sync: the process died, not the machine.
        assert (tmp_path / "f").read_bytes() == bytes(pool.view(64, SIZE))


OVER = ["open", "is_sole", *OPS[1:]]  # of an old file that is written over


def write_over(io: _C.Io, path, pool: _C.StagingPool) -> _C.WriteResult:
    pieces = [(pool.address + 64, SIZE, 0)]
    return _C.write_file(io, path, b"", pieces, SIZE, block_bytes=BLOCK, threads=1, over=True)


def make_old(path, size: int) -> int:
    """An old file of other bytes; returns its inode."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.write(b"\xff" * size)
    return os.stat(path).st_ino


@pytest.mark.parametrize("size", [0, 1, BLOCK, SIZE - 1, SIZE, SIZE + 1, 9 * BLOCK + 5])
def test_an_old_file_is_written_over(tmp_path, pool, size):
    path, io = tmp_path / "f", _C.FaultIo()
    inode = make_old(path, size)
    result = write_over(io, path, pool)
    check_file(path, bytes(pool.view(64, SIZE)), result)
    assert [name for name, _ in io.ops] == OVER
    assert result.reused and result.direct and os.stat(path).st_ino == inode


def test_gaps_in_an_old_file_become_zero(tmp_path, pool):
    make_old(tmp_path / "f", 5 * BLOCK)
    result = _C.write_file(
        _C.PosixIo(),
        tmp_path / "f",
        b"head",
        [(pool.address, 10, 3 * BLOCK)],
        4 * BLOCK,
        block_bytes=BLOCK,
        over=True,
    )
    expected = b"head".ljust(3 * BLOCK, b"\0") + bytes(pool.view(0, 10)).ljust(BLOCK, b"\0")
    check_file(tmp_path / "f", expected, result)
    assert result.reused


def test_an_old_file_that_is_open_or_no_file_of_ours_is_replaced(tmp_path, pool):
    path = tmp_path / "f"
    make_old(path, SIZE)
    with open(path, "rb") as reader:
        result = write_over(_C.PosixIo(), path, pool)
        assert not result.reused and reader.read() == b"\xff" * SIZE
    check_file(path, bytes(pool.view(64, SIZE)), result)
    path.unlink()
    other = tmp_path / "other"
    make_old(other, SIZE)  # one that could be written over itself
    path.symlink_to(other)
    assert not write_over(_C.PosixIo(), path, pool).reused
    assert other.read_bytes() == b"\xff" * SIZE and not path.is_symlink()
    path.unlink()
    os.link(other, path)
    assert not write_over(_C.PosixIo(), path, pool).reused
    assert other.read_bytes() == b"\xff" * SIZE and os.stat(path).st_nlink == 1
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
        assert not write_over(_C.PosixIo(), path, pool).reused and os.stat(path).st_uid == 0


@pytest.mark.timeout(60)
def test_who_opens_a_file_that_is_written_over_does_not_wait(tmp_path, pool):
    """The lease that told that nobody has it open was given back."""
    path, data = tmp_path / "f", random_bytes(SIZE)
    make_old(path, SIZE)
    stage = _C.Stage(pool, b"", [(address_of(data), SIZE, 0, False)], SIZE, block_bytes=BLOCK)
    result = []
    writer = threading.Thread(
        target=lambda: result.append(_C.write_stage(_C.PosixIo(), path, stage, over=True, threads=1))
    )
    writer.start()
    while "plait-write-0" not in threads():
        pass
    os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    stage.capture()
    writer.join()
    assert result[0].reused and path.read_bytes() == data


@pytest.mark.parametrize("index", range(len(OVER)))
def test_every_operation_on_an_old_file_failing_leaves_nothing_or_a_new_file(tmp_path, pool, index):
    before, io = descriptors(), _C.FaultIo([(index, "errno", errno.EIO)])
    make_old(tmp_path / "f", SIZE)
    if OVER[index] in ("open", "is_sole"):
        result = write_over(io, tmp_path / "f", pool)
        check_file(tmp_path / "f", bytes(pool.view(64, SIZE)), result)
        assert not result.reused
    else:
        with pytest.raises(OSError, match=OVER[index]):
            write_over(io, tmp_path / "f", pool)
        assert os.listdir(tmp_path) == []
    assert descriptors() == before and threads() == set()


def test_asking_who_has_a_file_open_ends_no_process_that_opens_it(tmp_path, pool):
    """A lease is broken by whoever opens the file, with a signal that ends a process unless it is another one."""
    path, ends = tmp_path / "f", threading.Event()
    make_old(path, SIZE)

    def open_often() -> None:
        while not ends.is_set():
            with contextlib.suppress(FileNotFoundError):
                os.close(os.open(path, os.O_RDONLY))

    opener = threading.Thread(target=open_often)
    opener.start()
    for _ in range(300):
        _C.write_file(_C.PosixIo(), path, b"head", [], 4, over=path.exists())
    ends.set()
    opener.join()
    assert path.read_bytes() == b"head"


def test_a_hundred_failed_files_leak_nothing(tmp_path, pool):
    before = descriptors()
    for i in range(100):
        io = _C.FaultIo([(i % len(OPS), "errno", errno.EIO)])
        with pytest.raises(OSError):
            _C.write_file(
                io, tmp_path / "f", b"", [(pool.address, MIB, 0)], MIB, block_bytes=BLOCK, direct=True, threads=2
            )
    assert descriptors() == before and threads() == set() and os.listdir(tmp_path) == []


def test_rate_limit_and_background_write_the_same_bytes(tmp_path, pool):
    pieces = [(pool.address, MIB, 0)]
    options = {"block_bytes": BLOCK, "rate_limit": 8 * MIB, "nice": 10, "io_priority": "low"}
    start = time.monotonic()
    result = _C.write_file(_C.PosixIo(), tmp_path / "f", b"", pieces, MIB, **options)
    # A promise, not a measurement: all but the last block take their time, however fast the machine.
    assert time.monotonic() - start >= (MIB - BLOCK) / (8 * MIB)
    check_file(tmp_path / "f", bytes(pool.view(0, MIB)), result)


IOPRIO_GET = 252  # x86-64


def priorities(name):
    """(nice, I/O class, I/O level) of this process's threads whose names begin so."""
    libc, found = ctypes.CDLL(None, use_errno=True), set()
    for task in os.listdir("/proc/self/task"):
        try:
            stat = Path(f"/proc/self/task/{task}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
            continue
        if stat.split("(")[1].startswith(name):
            ioprio = libc.syscall(IOPRIO_GET, 1, int(task))
            if ioprio < 0:  # it ended since
                continue
            found.add((int(stat.rpartition(")")[2].split()[16]), ioprio >> 13, ioprio & 0x1FFF))
    return found


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of ioprio_get is that of x86-64")
@pytest.mark.parametrize(
    ("nice", "io_priority", "wanted"),
    [(0, "normal", (0, 0)), (10, "low", (2, 7)), (19, "idle", (3, 0))],
)
def test_the_writing_threads_have_the_priorities_asked_for(tmp_path, pool, nice, io_priority, wanted):
    options = {"block_bytes": BLOCK, "rate_limit": MIB, "nice": nice, "io_priority": io_priority}
    pieces, before = [(pool.address, MIB, 0)], os.nice(0)
    wanted_nice = nice or before
    thread = threading.Thread(
        target=_C.write_file, args=(_C.PosixIo(), tmp_path / "f", b"", pieces, MIB), kwargs=options
    )
    thread.start()
    seen = set()
    while thread.is_alive():  # a second, by the rate limit
        seen |= priorities("plait-write")
    thread.join()
    assert (wanted_nice, *wanted) in seen and os.nice(0) == before
    assert len(seen - {(before, 0, 0)}) <= 2  # the thread may be seen between the two calls


def test_unknown_priorities_are_refused(tmp_path, pool):
    for options in ({"nice": 20}, {"nice": -1}, {"io_priority": "high"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            _C.write_file(_C.PosixIo(), tmp_path / "f", b"", [(pool.address, MIB, 0)], MIB, **options)
    assert os.listdir(tmp_path) == []


FULL_DISK = """
import errno, os, sys
from plait import _C
folder, size = sys.argv[1], 2 << 20
pool = _C.StagingPool(size)
io = _C.PosixIo()
write = lambda name, n: _C.write_file(io, f"{folder}/{name}", b"", [(pool.address, n, 0)], n, block_bytes=65536)
print(write("small", 100001).fallback_reason)
try:
    write("large", size)
except OSError as error:
    assert error.errno == errno.ENOSPC, error
    assert "fallocate" in str(error), error
else:
    raise AssertionError("a full disk was not noticed")
assert os.listdir(folder) == ["small"]
os.unlink(f"{folder}/small")
write("next", 800000)
assert open(f"{folder}/next", "rb").read() == bytes(800000)
print("done")
"""


def test_a_real_full_disk_leaves_no_garbage(tmp_path):
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare(1)")
    in_namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = 'mount -t tmpfs -o size=1m none "$1"'
    trial = subprocess.run([*in_namespace, mount, "sh", str(tmp_path)], capture_output=True, text=True)
    if trial.returncode != 0:
        pytest.skip(f"may not mount a tmpfs in a user namespace: {trial.stderr.strip()}")
    script = mount + ' && exec "$2" -P -c "$3" "$1"'
    command = [*in_namespace, script, "sh", str(tmp_path), sys.executable, FULL_DISK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stdout + done.stderr
