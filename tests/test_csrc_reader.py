"""plait._C.read_ranges: what is read, what is verified, and what is refused.

A file of six blocks (the last one odd) is damaged in every block and cut or extended by one byte; each must raise
ChecksumError naming the block. Bytes read = the sizes of the touched blocks, whatever the requests.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import hypothesis
import pytest
from hypothesis import strategies

from plait import _C
from tests.csrc_memory import BLOCK, address_of, descriptors, random_bytes, threads

SIZE = 5 * BLOCK + 1234
DATA = bytes(random_bytes(SIZE, seed=2))
CRCS = _C.crc32c_blocks(DATA, BLOCK)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "f"
    source = bytearray(DATA)
    _C.write_file(_C.PosixIo(), path, b"", [(address_of(source), SIZE, 0)], SIZE, block_bytes=BLOCK)
    return path


def drop_cache(path) -> None:
    """Puts the file out of the page cache, so that direct reads are taken."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(path, ranges, io=None, **options) -> tuple[list[bytes], int]:
    """Reads (offset, nbytes) ranges, each into its own memory."""
    targets = [bytearray(n + 1) for _, n in ranges]
    requests = [(at, n, address_of(t)) for (at, n), t in zip(ranges, targets, strict=True)]
    options = {"block_bytes": BLOCK, **options}
    count = _C.read_ranges(io or _C.PosixIo(), path, SIZE, CRCS, requests, **options)
    assert all(t[n] == 0 for (_, n), t in zip(ranges, targets, strict=True))  # Not a byte too far.
    return [bytes(t[:n]) for (_, n), t in zip(ranges, targets, strict=True)], count


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("threads_count", [1, 2, 5])
def test_the_whole_file(path, direct, cached, threads_count):
    if cached:
        path.read_bytes()
    else:
        drop_cache(path)
    [data], count = read(path, [(0, SIZE)], direct=direct, threads=threads_count)
    assert data == DATA and count == SIZE


@pytest.mark.parametrize("cached", [True, False])
def test_a_block_size_far_above_the_file_takes_no_more_memory_than_the_file(path, cached):
    """A buffer had the size of a block, which the file's writer says: no machine has this one."""
    if not cached:
        drop_cache(path)
    target = bytearray(SIZE)
    requests = [(1, SIZE - 1, address_of(target))]
    _C.read_ranges(_C.PosixIo(), path, SIZE, [_C.crc32c(DATA)], requests, block_bytes=1 << 46)
    assert target[: SIZE - 1] == DATA[1:]


STEP = 1 << 20  # what a reader takes at once of a block that goes into several tensors
LONG = bytes(random_bytes(5 * STEP + 777, seed=3))
LONG_CRCS = _C.crc32c_blocks(LONG, 4 * STEP)


def read_long(path, requests, **options) -> list[tuple[str, str]]:
    """Reads of LONG in blocks of four steps; returns the system calls."""
    io = _C.FaultIo()
    _C.read_ranges(io, path, len(LONG), LONG_CRCS, requests, block_bytes=4 * STEP, **options)
    return io.ops


@pytest.mark.parametrize("cached", [True, False])
def test_a_block_goes_into_its_parts_step_by_step(tmp_path, cached):
    path = tmp_path / "long"
    path.write_bytes(LONG)
    if not cached:
        drop_cache(path)
    cuts = [0, 5, STEP - 1, STEP, STEP + 1, 3 * STEP - 7, 4 * STEP + 3, len(LONG) - 1, len(LONG)]
    target = bytearray(len(LONG))
    base = address_of(target)
    requests = [(a, b - a, base + a) for a, b in zip(cuts, cuts[1:], strict=False)]
    ops = read_long(path, [*requests[::2], *requests[1::2]])
    assert target == LONG
    assert [name for name, _ in ops].count("pread") == 6  # four of the first block, two of the second


@pytest.mark.parametrize("at", [0, STEP - 1, STEP, 4 * STEP - 1, 4 * STEP, len(LONG) - 1])
def test_a_flipped_bit_in_any_step_is_named(tmp_path, at):
    path = tmp_path / "long"
    damaged = bytearray(LONG)
    damaged[at] ^= 4
    path.write_bytes(damaged)
    target = bytearray(len(LONG))
    with pytest.raises(_C.ChecksumError, match=f"block {at // (4 * STEP)} .*does not match its CRC32C"):
        read_long(path, [(1, len(LONG) - 1, address_of(target))], threads=1)


@pytest.mark.parametrize("shift", [0, 1, 64])
@pytest.mark.parametrize("cached", [True, False])
def test_into_aligned_and_odd_addresses(path, cached, shift):
    pool = _C.StagingPool(SIZE + 64)
    if cached:
        path.read_bytes()
    else:
        drop_cache(path)
    _C.read_ranges(_C.PosixIo(), path, SIZE, CRCS, [(0, SIZE, pool.address + shift)], block_bytes=BLOCK)
    assert bytes(pool.view(shift, SIZE)) == DATA
    pool.close()


@pytest.mark.parametrize(
    ("ranges", "blocks"),
    [
        ([], []),
        ([(0, 0), (SIZE, 0)], []),
        ([(0, 1)], [0]),
        ([(BLOCK - 1, 1)], [0]),
        ([(BLOCK, 1)], [1]),
        ([(BLOCK - 1, 2)], [0, 1]),
        ([(SIZE - 1, 1)], [5]),
        ([(10, 20), (40, 5), (2 * BLOCK, BLOCK), (35, 3)], [0, 2]),
        ([(0, 100), (50, 100)], [0]),  # Ranges may overlap.
        ([(3 * BLOCK + 5, BLOCK), (0, SIZE)], [0, 1, 2, 3, 4, 5]),
    ],
)
def test_bytes_read_are_the_touched_blocks(path, ranges, blocks):
    drop_cache(path)
    io = _C.FaultIo()
    data, count = read(path, ranges, io)
    assert data == [DATA[at : at + n] for at, n in ranges]
    assert count == sum(min(BLOCK, SIZE - block * BLOCK) for block in blocks)
    assert [name for name, _ in io.ops].count("pread") == len(blocks)  # Each once.


@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], deadline=None)
@hypothesis.given(
    strategies.lists(strategies.tuples(strategies.integers(0, SIZE), strategies.integers(0, 3 * BLOCK)), max_size=8)
)
def test_any_ranges(path, ranges):
    ranges = [(at, min(n, SIZE - at)) for at, n in ranges]
    data, count = read(path, ranges)
    assert data == [DATA[at : at + n] for at, n in ranges]
    touched = {at // BLOCK + i for at, n in ranges if n for i in range((at % BLOCK + n - 1) // BLOCK + 1)}
    assert count == sum(min(BLOCK, SIZE - block * BLOCK) for block in touched)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("position", [0, 4095, BLOCK - 1])
@pytest.mark.parametrize("block", range(6))
def test_one_flipped_bit_in_any_block_is_named(path, block, position, direct):
    at = min(block * BLOCK + position, SIZE - 1)
    damaged = bytearray(DATA)
    damaged[at] ^= 1 << (at % 8)
    path.write_bytes(damaged)
    drop_cache(path)
    with pytest.raises(_C.ChecksumError, match=f"block {block} .*does not match its CRC32C") as caught:
        read(path, [(0, SIZE)], direct=direct)
    assert caught.value.block == block and caught.value.path == str(path) and str(path) in str(caught.value)
    others = [(b * BLOCK, 1) for b in range(6) if b != block]
    assert read(path, others, direct=direct)[0] == [DATA[b : b + 1] for b, _ in others]


def test_a_zeroed_page_is_noticed(path):
    damaged = bytearray(DATA)
    damaged[3 * BLOCK + 4096 : 4 * BLOCK] = bytes(4096)
    path.write_bytes(damaged)
    with pytest.raises(_C.ChecksumError, match="block 3"):
        read(path, [(3 * BLOCK, 1)])  # The page that was asked for is whole, its block is not.


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, SIZE - 1, SIZE + 1, SIZE + 4096])
def test_a_wrong_size_is_refused_before_any_read(path, size):
    path.write_bytes(DATA[:size] + bytes(max(0, size - SIZE)))
    io = _C.FaultIo()
    with pytest.raises(_C.ChecksumError, match=f"has {size} bytes, expected {SIZE}") as caught:
        read(path, [(0, 1)], io)
    assert caught.value.block == -1
    assert "pread" not in [name for name, _ in io.ops]


def test_two_swapped_blocks_are_noticed(path):
    path.write_bytes(DATA[BLOCK : 2 * BLOCK] + DATA[:BLOCK] + DATA[2 * BLOCK :])
    with pytest.raises(_C.ChecksumError, match="block 0"):
        read(path, [(0, 10)])


@pytest.mark.parametrize(
    ("ranges", "crcs", "options", "text"),
    [
        ([(SIZE, 1, 4096)], CRCS, {}, "ends after"),
        ([(2**63, 2**63, 4096)], CRCS, {}, "ends after"),
        ([(100, 2**64 - 10, 4096)], CRCS, {}, "ends after"),  # The sum wraps around.
        ([(0, 1, 0)], CRCS, {}, "address 0"),
        ([], CRCS[:-1], {}, "5 crcs"),
        ([], [*CRCS, 0], {}, "7 crcs"),
        ([], CRCS, {"threads": 0}, "threads is 0"),
        ([], CRCS, {"block_bytes": 100}, "multiple of 4096"),
    ],
)
def test_bad_arguments_are_refused(path, ranges, crcs, options, text):
    with pytest.raises(ValueError, match=text):
        _C.read_ranges(_C.PosixIo(), path, SIZE, crcs, ranges, **{"block_bytes": BLOCK, **options})


OPS = ["open", "file_size", "open", "set_direct", *["pread"] * 6, "close", "close"]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
@pytest.mark.parametrize("index", range(len(OPS)))
def test_every_operation_failing_is_an_error(path, index, number):
    before = descriptors()
    drop_cache(path)
    io = _C.FaultIo([(index, "errno", number)])
    with pytest.raises(OSError) as caught:
        read(path, [(0, SIZE)], io, threads=1)
    assert caught.value.errno == number and str(path) in str(caught.value)
    assert [name for name, _ in io.ops][: index + 1] == OPS[: index + 1]
    assert descriptors() == before and threads() == set()


@pytest.mark.parametrize("index", range(len(OPS)))
def test_every_operation_interrupted_is_done_again(path, index):
    drop_cache(path)
    io = _C.FaultIo([(index, "errno", errno.EINTR)])
    assert read(path, [(0, SIZE)], io, threads=1)[0] == [DATA]
    assert len(io.ops) == len(OPS) + (OPS[index] != "close")


@pytest.mark.parametrize("bytes_moved", [1, 512, 4095, 4096, 4097, BLOCK - 1])
@pytest.mark.parametrize("index", [4, 9])
def test_short_reads_go_on(path, index, bytes_moved):
    drop_cache(path)
    io = _C.FaultIo([(index, "short", bytes_moved)])
    assert read(path, [(0, SIZE)], io, threads=1)[0] == [DATA]
    io = _C.FaultIo([(index - 2, "short", bytes_moved)])
    assert read(path, [(0, SIZE)], io, threads=1, direct=False)[0] == [DATA]


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_ends_while_it_is_read_is_damaged(path, direct):
    drop_cache(path)
    io = _C.FaultIo([(i, "short", 0) for i in range(4 if direct else 2, 100)])
    with pytest.raises(_C.ChecksumError, match="block 0 .* ends after 0"):
        read(path, [(0, SIZE)], io, threads=1, direct=direct)


@pytest.mark.parametrize("index", [3, 4, 7, 9])
def test_refused_direct_io_becomes_buffered(path, index):
    drop_cache(path)
    io = _C.FaultIo([(index, "errno", errno.EINVAL)])
    assert read(path, [(0, SIZE)], io, threads=1) == ([DATA], SIZE)


@pytest.mark.timeout(60)
def test_direct_reads_that_never_fill_a_page_end(path):
    drop_cache(path)
    io = _C.FaultIo([(i, "short", 100) for i in range(4, 1000)])
    with pytest.raises(_C.ChecksumError, match="block 0 .* ends after 0"):
        read(path, [(0, SIZE)], io, threads=1)
    assert len(io.ops) < 100 or _C.io_facts(path.parent)["filesystem"] == "tmpfs"


def test_no_bytes_at_all_are_not_taken_for_a_block_whose_sum_is_theirs(path):
    """A file cut while it is read, and a writer who says that the sum is that of nothing."""
    crcs, target = [_C.crc32c(b"")] * len(CRCS), bytearray(SIZE)
    io = _C.FaultIo([(i, "short", 0) for i in range(2, 100)])
    with pytest.raises(_C.ChecksumError, match="block 0 .* ends after 0"):
        _C.read_ranges(
            io, path, SIZE, crcs, [(0, SIZE, address_of(target))], block_bytes=BLOCK, threads=1, direct=False
        )


def test_two_requests_for_one_block_are_both_filled_and_no_mapping_is_left(path):
    for cold in (True, False):
        data, _ = read(path, [(0, SIZE), (0, SIZE)])
        assert data == [DATA, DATA]
        if cold:
            path.read_bytes()
    with open("/proc/self/maps") as maps:
        assert str(path) not in maps.read()


@pytest.mark.parametrize("direct", [True, False])
def test_faults_of_reads_out_of_the_page_cache(tmp_path, direct):
    """Resident blocks that go into several tensors, copied past the caches: each operation failing, interrupted and
    short, in every step of every block. EINVAL says that the reads were buffered: of direct ones it is a refusal."""
    path, block = tmp_path / "f", STEP + 4096  # two steps each
    data = LONG[: block + 9000]
    path.write_bytes(data)
    assert path.read_bytes() == data
    cuts = [0, 5, STEP // 2, STEP - 1, STEP + 1000, block + 3, block + 5000, len(data)]
    crcs, target, before = _C.crc32c_blocks(data, block), bytearray(len(data)), descriptors()
    requests = [(a, b - a, address_of(target) + a) for a, b in zip(cuts, cuts[1:], strict=False)]
    names: list[str] = []

    def run(*script: tuple[int, str, int]) -> bool:
        target[::512] = bytes(len(target[::512]))
        io = _C.FaultIo(list(script))
        try:
            _C.read_ranges(io, path, len(data), crcs, requests, block_bytes=block, threads=1, direct=direct)
        finally:
            names[:] = [name for name, _ in io.ops]
        return target == data

    assert run()
    expected = names.copy()
    assert [name for name in expected if name not in ("open", "set_direct")] == [
        "file_size",
        *["pread"] * 3,
        *["close"] * (1 + direct),
    ]
    for index, name in enumerate(expected):
        for number in (errno.EIO, errno.EINVAL):
            if (name, number) != ("set_direct", errno.EINVAL):
                with pytest.raises(OSError) as caught:
                    run((index, "errno", number))
                assert caught.value.errno == number and str(path) in str(caught.value)
        assert run((index, "errno", errno.EINTR)) and len(names) == len(expected) + (name != "close")
        for moved in (1, 63, 3000, 4095) if name == "pread" else ():
            assert run((index, "short", moved)) and len(names) == len(expected) + 1
        if name == "pread":
            with pytest.raises(_C.ChecksumError, match="ends after"):
                run((index, "short", 0))
    assert descriptors() == before and threads() == set()


def test_an_empty_file(tmp_path):
    (tmp_path / "f").write_bytes(b"")
    assert _C.read_ranges(_C.PosixIo(), tmp_path / "f", 0, [], [(0, 0, 0)]) == 0


def from_the_disk() -> int:
    """Returns the bytes that this process has made the disk deliver so far."""
    with open("/proc/self/io") as lines:
        return int(dict(line.split(": ") for line in lines)["read_bytes"])


def test_resident_blocks_come_from_the_page_cache_and_others_pass_it_by(tmp_path):
    """Counted by the kernel: the second read of the cold half costs the disk as much as the first. What else this
    process reads meanwhile (a page of a library) only adds, so the least of a few tries counts."""
    path, block = tmp_path / "f", 256 << 10
    source = random_bytes(8 * block, seed=7)
    written = _C.write_file(
        _C.PosixIo(), path, b"", [(address_of(source), 8 * block, 0)], 8 * block, block_bytes=block
    )
    if not written.direct or _C.io_facts(tmp_path)["filesystem"] == "tmpfs":
        pytest.skip(f"needs direct I/O on a disk: {written.fallback_reason or 'tmpfs'}")
    target = bytearray(8 * block)
    requests = [(0, 8 * block, address_of(target))]

    def two_reads() -> list[int]:
        drop_cache(path)
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
            for at in range(0, 4 * block, block):
                os.pread(file.fileno(), block, at)
        costs = []
        for _ in range(2):
            target[:] = bytes(8 * block)
            before = from_the_disk()
            options = {"block_bytes": block}
            assert _C.read_ranges(_C.PosixIo(), path, 8 * block, written.crcs, requests, **options) == 8 * block
            costs.append(from_the_disk() - before)
            assert target == source[: 8 * block]
        return costs

    for _ in range(10):
        costs = two_reads()
        assert min(costs) >= 4 * block
        if costs == [4 * block, 4 * block]:
            return
    raise AssertionError(f"the disk gave {costs} bytes for {4 * block} that were not resident")


def test_memory_is_one_block_per_thread_whatever_is_asked_for(tmp_path):
    """A thousand scattered ranges of a 64 MiB file: the peak grows by the buffers, not by what passes through."""
    code = """
import sys
from plait import _C
from tests.csrc_memory import address_of
path, size, block = sys.argv[1], 64 << 20, 4 << 20
source = bytearray(size)
crcs = _C.write_file(_C.PosixIo(), path, b"", [(address_of(source), size, 0)], size).crcs
del source
def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) << 10
target = bytearray(1000 * 64)
requests = [(at * 64_000 + 7, 64, address_of(target) + 64 * at) for at in range(1000)]
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = peak()
assert _C.read_ranges(_C.PosixIo(), path, size, crcs, requests, threads=2) == size
grown = peak() - before
assert grown < 3 * block, grown
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "f")], check=True)
