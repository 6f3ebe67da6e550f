"""plait._C.Stage: a state on its way through the pool. Which blocks wait for which, what a fence copies, and every
way in which it ends: torn, cancelled, closed, or by a writer that gives up.

Blocks are small, so that few bytes make many; the writer is the real one unless a test says otherwise.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait import _C
from tests.csrc_memory import BLOCK, address_of, random_bytes, threads

HEADER = b"h" * 4096
HUGE = 2 << 20


def stage_of(pool, sizes, lazy=(), foreign=(), block_bytes=BLOCK, gap=0):
    """A stage of pieces of these sizes (with `gap` bytes before each), their memory, and the file's bytes."""
    memory = [random_bytes(size, seed=i) for i, size in enumerate(sizes)]
    pieces, at, content = [], len(HEADER), bytearray(HEADER)
    for index, size in enumerate(sizes):
        at += gap
        content += bytes(gap) + memory[index][:size]
        address = 0 if index in foreign or not size else address_of(memory[index])
        pieces.append((address, size, at, index in lazy))
        at += size
    return _C.Stage(pool, HEADER, pieces, at, block_bytes=block_bytes), memory, content, pieces


def writing(stage, path, **options):
    """Writes the stage in a thread; returns the thread and what it will hold: ("result" or "error")."""
    found = {}

    def write():
        try:
            found["result"] = _C.write_stage(_C.PosixIo(), path, stage, **options)
        except BaseException as error:
            found["error"] = error

    thread = threading.Thread(target=write)
    thread.start()
    return thread, found


@pytest.fixture
def pool():
    return _C.StagingPool(HUGE)


@pytest.mark.parametrize("gap", [0, 100])
@pytest.mark.parametrize("sizes", [[1], [0], [0, 5, 0], [BLOCK - 4096], [3 * BLOCK, 0, 17], [100] * 50])
def test_the_file_is_header_zeros_and_pieces_with_their_hashes(tmp_path, pool, sizes, gap):
    pool.view(0, HUGE)[:] = b"\xff" * HUGE  # what an earlier save left
    stage, memory, content, _ = stage_of(pool, sizes, gap=gap)
    stage.capture()
    for piece in memory:
        piece[:] = bytes(len(piece))  # captured: the caller may change anything
    result = _C.write_stage(_C.PosixIo(), tmp_path / "f", stage)
    assert (tmp_path / "f").read_bytes() == content
    assert result.crcs == _C.crc32c_blocks(content, BLOCK)
    originals = [random_bytes(size, seed=i)[:size] for i, size in enumerate(sizes)]
    assert stage.hashes() == [_C.xxh3_128(piece).hex() for piece in originals]
    assert stage.copied and stage.slabs == 1 and stage.held_bytes == 0


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 700_000), min_size=1, max_size=12),
    lazy=st.sets(st.integers(0, 11)),
    workers=st.integers(1, 3),
)
def test_a_pool_of_any_size_gives_the_same_file(tmp_path_factory, sizes, lazy, workers):
    """In slabs too: the pool has 8 slots, the state up to 33 blocks."""
    path = tmp_path_factory.mktemp("slabs") / "f"
    pool = _C.StagingPool(HUGE)
    stage, memory, content, pieces = stage_of(pool, sizes, lazy=lazy, block_bytes=256 << 10)
    thread, found = writing(stage, path, threads=workers)
    stage.capture()
    for index, piece in enumerate(memory):
        if index not in lazy:
            piece[:] = bytes(len(piece))
    stage.fence([(address, size) for address, size, _, _ in pieces])
    for piece in memory:
        piece[:] = bytes(len(piece))
    thread.join()
    assert "error" not in found and path.read_bytes() == content
    stage.close()
    assert threads() == set()


def test_what_may_wait_is_copied_by_the_fence_that_needs_it(pool):
    """A stage with only lazy pieces and no thread at work yet: the fence copies its own range and nothing else."""
    stage, memory, _, pieces = stage_of(pool, [BLOCK, BLOCK], lazy={0, 1})
    stage.fence([pieces[0][:2]])
    memory[0][:] = bytes(len(memory[0]))
    assert not stage.copied
    memory[1][:] = bytes(len(memory[1]))  # no fence
    with pytest.raises(_C.TornError) as caught:
        stage.capture()
        stage.wait_copied()
    assert caught.value.piece == 1


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 900_000), min_size=2, max_size=9),
    gap=st.integers(0, 70),
    pool_mib=st.sampled_from([2, 10]),
    order=st.randoms(use_true_random=False),
)
def test_fences_put_the_hashing_out_of_order_and_change_no_sum(tmp_path_factory, sizes, gap, pool_mib, order):
    """A thread hashes what it copies while nobody waits; what a fence copies before its turn is hashed later."""
    path = tmp_path_factory.mktemp("fences") / "f"
    pool = _C.StagingPool(pool_mib << 20)
    lazy = set(range(len(sizes)))
    stage, memory, content, pieces = stage_of(pool, sizes, lazy=lazy, block_bytes=256 << 10, gap=gap)
    thread, found = writing(stage, path, threads=2)
    stage.capture()
    for index in order.sample(sorted(lazy), len(sizes) // 2):
        stage.fence([pieces[index][:2]])
        memory[index][:] = bytes(len(memory[index]))
    thread.join()
    assert "error" not in found and path.read_bytes() == content
    assert found["result"].crcs == _C.crc32c_blocks(content, 256 << 10)
    originals = [random_bytes(size, seed=i)[:size] for i, size in enumerate(sizes)]
    assert stage.hashes() == [_C.xxh3_128(piece).hex() for piece in originals]
    stage.close()


def test_eager_blocks_keep_their_slots_so_that_the_call_returns_at_once(pool):
    """One small eager piece behind 3 MiB of lazy ones, a pool of 2 MiB: the call does not wait for any writer."""
    stage, memory, *_ = stage_of(pool, [3 << 20, 100], lazy={0}, block_bytes=256 << 10)
    assert stage.slabs == 2
    stage.capture()
    assert not stage.copied
    stage.close()
    del memory


def test_pieces_that_the_caller_fills_in_wait_for_their_slots(tmp_path, pool):
    stage, memory, content, pieces = stage_of(pool, [3 << 20, 3 << 20], foreign={0}, block_bytes=256 << 10)
    thread, found = writing(stage, tmp_path / "f")
    stage.start()  # capture() would wait for the second piece, which waits for the slots of the first
    _, size, begin, _ = pieces[0]
    at = begin
    while at < begin + size:
        step = min(begin + size, (at // (256 << 10) + 1) * (256 << 10)) - at
        offset = stage.open(at, step)
        pool.view(offset, step)[:] = memory[0][at - begin : at - begin + step]
        stage.fill(at, step)
        at += step
    stage.capture()
    thread.join()
    assert "error" not in found and (tmp_path / "f").read_bytes() == content


@pytest.mark.parametrize("end", ["cancel", "close", "error"])
def test_whoever_waits_is_told_when_it_is_over(tmp_path, pool, end):
    stage, memory, _, pieces = stage_of(pool, [4 << 20], lazy={0}, block_bytes=256 << 10)
    stage.capture()
    fenced = threading.Thread(target=stage.fence, args=([pieces[0][:2]],))
    fenced.start()  # waits for a writer
    if end == "error":
        io = _C.FaultIo([(0, "errno", 28)], sticky=True, only=["pwrite"])
        with pytest.raises(OSError):
            _C.unlink(io, tmp_path / "nothing")
        with pytest.raises(OSError, match="pwrite") as caught:
            _C.write_stage(io, tmp_path / "f", stage)
        assert caught.value.errno == 28
    elif end == "cancel":
        stage.cancel("the disk is gone")
        with pytest.raises(RuntimeError, match="the disk is gone"):
            _C.write_stage(_C.PosixIo(), tmp_path / "f", stage)
        with pytest.raises(RuntimeError, match="the disk is gone"):
            stage.open(4096, 1)
    else:
        stage.close()
    fenced.join()
    assert stage.copied and not (tmp_path / "f").exists()
    stage.close()
    assert threads() == set()
    del memory


def test_refuses_what_cannot_be(pool):
    big = random_bytes(10)
    one = (address_of(big), 10, 4096, False)
    cases = {
        "ends after file_bytes": ([one], 4100),
        "begins before the end of the one before it": ([one, one], 9000),
        "smaller than the file and than two blocks": ([one], 100 << 20),
    }
    for text, (pieces, file_bytes) in cases.items():
        with pytest.raises(ValueError, match=text):
            _C.Stage(pool, HEADER, pieces, file_bytes, block_bytes=HUGE)
    for pieces, text in (([(4096, 2**64 - 10, 4096, False)], "ends after"), ([], "file_bytes is 0")):
        with pytest.raises(ValueError, match=text):
            _C.Stage(pool, HEADER if pieces else b"", pieces, 9000 if pieces else 0, block_bytes=BLOCK)
    with pytest.raises(ValueError, match="threads"):
        _C.Stage(pool, HEADER, [one], 9000, threads=0)
    stage = _C.Stage(pool, HEADER, [one], 9000)
    stage.capture()
    with pytest.raises(ValueError, match="more than its bytes"):
        stage.fill(4096, 1)
    for at in (HUGE * 2, HUGE * 1000, 1 << 60):
        with pytest.raises(ValueError, match="more than its bytes"):
            stage.fill(at, 1)
    with pytest.raises(ValueError, match="not inside"):
        stage.open(9000, 1)
    slabs, memory, *_ = stage_of(pool, [3 << 20], foreign={0}, block_bytes=256 << 10)
    with pytest.raises(ValueError, match="not inside one block"):
        slabs.open((256 << 10) - 10, 11)
    slabs.close()
    del memory


@pytest.mark.timeout(60)
@pytest.mark.parametrize("num_eager", range(5, 10))
def test_eager_blocks_leave_the_others_a_ring_to_go_round_in(tmp_path, pool, num_eager):
    """A pool of eight blocks: with nine eager ones, or so many that the ring has no place, none has its own."""
    size = 256 << 10
    sizes = [size * num_eager - len(HEADER), 4 * size]
    stage, memory, content, pieces = stage_of(pool, sizes, lazy={1}, block_bytes=size)
    thread, found = writing(stage, tmp_path / "f")
    stage.capture()
    stage.fence([pieces[1][:2]])
    thread.join()
    assert "error" not in found and (tmp_path / "f").read_bytes() == content
    del memory


@pytest.mark.timeout(60)
def test_every_block_of_an_eager_piece_keeps_its_slot(pool):
    """It ends three blocks after it begins; the call does not wait for any writer."""
    stage, memory, *_ = stage_of(pool, [3 << 20, 600 << 10, 1 << 20], lazy={0, 2}, block_bytes=256 << 10)
    stage.capture()
    stage.close()
    del memory


def test_a_fence_in_the_middle_of_a_part_copies_the_part(pool):
    pool.close()
    wide = _C.StagingPool(4 << 20)
    stage, memory, content, pieces = stage_of(wide, [3 << 20], lazy={0}, block_bytes=4 << 20)
    address = pieces[0][0]
    stage.fence([(address + (1 << 20) + 5000, 10)])
    changed = 1 << 20
    memory[0][changed : changed + 900_000] = bytes(900_000)
    stage.capture()
    stage.wait_copied()
    offset = stage.open(len(HEADER), 1)
    assert wide.view(offset, 3 << 20) == content[len(HEADER) :]
    stage.close()
    wide.close()


@pytest.mark.parametrize("size", [100, BLOCK, 5 * BLOCK])
def test_a_change_behind_the_first_bytes_of_any_part_is_found(pool, size):
    stage, memory, _, _ = stage_of(pool, [size] * 12, lazy=set(range(12)))
    for piece in memory:
        piece[64:] = bytes(value ^ 1 for value in piece[64:])
    with pytest.raises(_C.TornError):
        stage.capture()
        stage.wait_copied()
    stage.close()


def test_the_first_reason_is_the_one_that_is_told(pool):
    stage, memory, *_ = stage_of(pool, [BLOCK])
    stage.cancel("the disk is gone")
    stage.cancel("later")
    stage.close()
    with pytest.raises(RuntimeError, match="the disk is gone"):
        stage.open(4096, 1)
    del memory


def has_open(path) -> int:
    """The descriptor of a file of this process, waited for."""
    while True:
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{fd}") == str(path):
                    return int(fd)


@pytest.mark.timeout(60)
def test_a_writer_that_waits_for_a_block_is_woken_by_the_end_and_its_file_is_not_inherited(tmp_path, pool):
    stage, memory, *_ = stage_of(pool, [BLOCK])
    thread, found = writing(stage, tmp_path / "f")
    flags = int(open(f"/proc/self/fdinfo/{has_open(tmp_path / 'f')}").read().split("flags:")[1].split()[0], 8)
    assert flags & os.O_CLOEXEC
    while not {name for name in threads() if name.startswith("plait-write")}:
        pass
    stage.cancel("the disk is gone")
    thread.join()
    assert "the disk is gone" in str(found["error"]) and not (tmp_path / "f").exists()
    del memory


def test_what_the_caller_still_fills_in_is_not_hashed_before(tmp_path, pool):
    """What lies behind it in the block is in: a writer that waits hashes what it can, in the file's order."""
    pool.view(0, HUGE)[:] = b"\xff" * HUGE
    stage, memory, content, pieces = stage_of(pool, [1000, 1000, BLOCK], foreign={0})
    stage.capture()
    thread, found = writing(stage, tmp_path / "f", threads=1)
    while not {name for name in threads() if name.startswith("plait-write")}:
        pass
    time.sleep(0.02)  # it has looked, most likely
    pool.view(stage.open(pieces[0][2], 1000), 1000)[:] = memory[0]
    stage.fill(pieces[0][2], 1000)
    thread.join()
    assert (tmp_path / "f").read_bytes() == content
    assert found["result"].crcs == _C.crc32c_blocks(content, BLOCK)
    assert stage.hashes() == [_C.xxh3_128(piece).hex() for piece in memory]


def test_threads_that_started_for_the_call_go_on_at_low_priority(pool):
    stage, memory, *_ = stage_of(pool, [8 << 20], lazy={0}, block_bytes=256 << 10)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    stage.start()  # in slabs: at the call's own priority, until only lazy parts are left; then they wait for a writer
    deadline = time.monotonic() + 20.0
    while (nices := nices_of("plait-copy")) != {max(own, 10)} and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert nices == {max(own, 10)}
    stage.close()
    del memory


def nices_of(name):
    """How nice the threads of this process are whose names begin so."""
    found = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as file:
            if file.read().startswith(name):
                found.add(os.getpriority(os.PRIO_PROCESS, int(task)))
    return found


def first_byte(path):
    """The first byte of a file's data so far; None before there is one."""
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(len(HEADER))
            return file.read(1) or None
    except FileNotFoundError:
        return None


@pytest.mark.parametrize("direct", [True, False])
def test_on_few_processors_writing_into_memory_waits_for_the_copies(direct):
    """Both copy: a fence would wait for what writers took the second processor from. tmpfs takes O_DIRECT since Linux
    6.6 and copies all the same."""
    pool = _C.StagingPool(25 * HUGE)
    stage, memory, content, _ = stage_of(pool, [48 << 20], lazy=[0], block_bytes=1 << 20)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(before)[:2]))  # of this thread, and of those that it starts
    seen = []
    try:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            path = f"{folder}/f"
            thread, found = writing(stage, path, direct=direct)
            stage.capture()
            while (byte := first_byte(path), stage.copied)[1] is False:
                seen.append(byte)
            thread.join()
            with open(path, "rb") as file:
                assert file.read() == content
    finally:
        os.sched_setaffinity(0, before)
    assert content[-1] == memory[0][-1]  # which is alive until here
    assert found["result"].crcs and set(seen) <= {None, b"\0"} and content[len(HEADER)] != 0


def test_who_waits_for_the_save_ends_the_wait_of_writers_for_copies():
    """Both threads copy, and writers hash: what is calm only spares a processor for training. Same file."""
    pool = _C.StagingPool(25 * HUGE)
    stage, memory, content, pieces = stage_of(pool, [48 << 20], lazy=[0], block_bytes=1 << 20)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(before)[:2]))
    try:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            thread, found = writing(stage, f"{folder}/f", direct=False)
            stage.hurry(1)
            stage.capture()
            thread.join()
            with open(f"{folder}/f", "rb") as file:
                assert file.read() == content and found["result"].crcs
    finally:
        os.sched_setaffinity(0, before)
    assert stage.hashes() == [_C.xxh3_128(bytes(content[pieces[0][2] :])).hex()] and len(memory[0])
