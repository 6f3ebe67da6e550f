"""Small files, folder operations and FaultIo of plait._C.

Each operation is failed at each of its system calls: an errno once, an interrupt, a short transfer, a crash before
and after. What may follow: OSError with that errno and the path, or (interrupt, short transfer) success.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
import threading

import pytest

from plait import _C
from tests.csrc_memory import address_of, descriptors

DATA = b"every byte of a small file " * 50


def test_write_then_read(tmp_path):
    io = _C.PosixIo()
    path = tmp_path / "small"
    _C.write_small(io, path, DATA)
    assert path.read_bytes() == DATA == _C.read_small(io, path, len(DATA))
    assert os.stat(path).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("data", [b"", b"x"])
def test_empty_and_tiny(tmp_path, data):
    io = _C.PosixIo()
    _C.write_small(io, str(tmp_path / "f"), data)
    assert _C.read_small(io, os.fsencode(tmp_path / "f"), 1) == data


def test_an_existing_file_is_refused_and_kept(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError) as caught:
        _C.write_small(_C.PosixIo(), path, DATA)
    assert caught.value.errno == errno.EEXIST and f"open '{path}'" in str(caught.value)
    assert path.read_bytes() == b"old"
    for data in (b"new", b"a longer one", b"short"):
        _C.write_small(_C.PosixIo(), path, data, exclusive=False)
        assert path.read_bytes() == data


def test_a_file_above_max_bytes_is_refused(tmp_path):
    (tmp_path / "f").write_bytes(b"123")
    with pytest.raises(OSError, match="more than 2 bytes") as caught:
        _C.read_small(_C.PosixIo(), tmp_path / "f", 2)
    assert caught.value.errno == errno.EFBIG


def test_folder_operations(tmp_path):
    io = _C.PosixIo()
    _C.mkdir(io, tmp_path / "a")
    _C.write_small(io, tmp_path / "a" / "f", b"1")
    _C.fsync_dir(io, tmp_path / "a")
    _C.rename(io, tmp_path / "a", tmp_path / "b")
    _C.fsync_dir(io, tmp_path)
    assert (tmp_path / "b" / "f").read_bytes() == b"1" and not (tmp_path / "a").exists()
    with pytest.raises(OSError, match="rmdir") as caught:
        _C.rmdir(io, tmp_path / "b")
    assert caught.value.errno == errno.ENOTEMPTY
    _C.unlink(io, tmp_path / "b" / "f")
    _C.rmdir(io, tmp_path / "b")
    assert os.listdir(tmp_path) == []
    assert _C.free_bytes(io, tmp_path) > 0
    assert _C.free_bytes(io, "/proc") == 2**63 - 1  # knows no size, as ramfs and some in user space: not a full disk


def test_free_bytes_are_those_that_this_user_may_have(tmp_path):
    info = os.statvfs(tmp_path)
    free, total = info.f_bavail * info.f_frsize, info.f_blocks * info.f_frsize
    got = _C.free_bytes(_C.PosixIo(), tmp_path)
    assert abs(got - free) <= abs(got - total)  # others write meanwhile


SYSCALLS = {"x86_64": {"fsync": 74, "fdatasync": 75}, "aarch64": {"fsync": 82, "fdatasync": 83}}


def refuse(name: str) -> None:
    """Lets the kernel answer a system call of this process with EIO from here on (seccomp)."""
    number = SYSCALLS[platform.machine()][name]
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | errno.EIO), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    filters = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, filters, 0, 0):
        os._exit(77)


@pytest.mark.skipif(platform.machine() not in SYSCALLS, reason="system calls have other numbers here")
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("fsync", lambda io, p: _C.fsync_dir(io, p)),
        ("fsync", lambda io, p: _C.write_small(io, p / "f", DATA)),
        ("fdatasync", lambda io, p: _C.write_file(io, p / "f", DATA, [], len(DATA))),
    ],
)
def test_a_sync_is_one_of_the_kernels(tmp_path, name, call):
    """Not only of the log of FaultIo: where the kernel refuses it, it is an error."""
    child = os.fork()
    if child == 0:
        refuse(name)
        try:
            call(_C.PosixIo(), tmp_path)
        except OSError as error:
            os._exit(3 if error.errno == errno.EIO and name in str(error) else 4)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 77:
        pytest.skip("no seccomp here")
    assert status == 3 and os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda io, p: _C.read_small(io, p, 9), "open"),
        (lambda io, p: _C.unlink(io, p), "unlink"),
        (lambda io, p: _C.rmdir(io, p), "rmdir"),
        (lambda io, p: _C.fsync_dir(io, p), "fsync_dir"),
        (lambda io, p: _C.free_bytes(io, p), "statvfs"),
        (lambda io, p: _C.mkdir(io, p / "below"), "mkdir"),
        (lambda io, p: _C.rename(io, p, p.with_name("b")), "rename"),
    ],
)
def test_errors_name_operation_and_path(tmp_path, call, text):
    path = tmp_path / "absent"
    with pytest.raises(FileNotFoundError) as caught:
        call(_C.PosixIo(), path)
    assert caught.value.errno == errno.ENOENT
    assert f"{text} '{path}" in str(caught.value)


def small_cycle(io: _C.Io, folder) -> bytes:
    """Uses every operation outside data files once."""
    _C.mkdir(io, folder / "a")
    _C.write_small(io, folder / "a" / "f", DATA)
    data = _C.read_small(io, folder / "a" / "f", len(DATA))
    _C.fsync_dir(io, folder / "a")
    _C.rename(io, folder / "a" / "f", folder / "a" / "g")
    _C.free_bytes(io, folder)
    _C.unlink(io, folder / "a" / "g")
    _C.rmdir(io, folder / "a")
    return data


CYCLE = "mkdir open pwrite fsync close open file_size pread close fsync_dir rename statvfs unlink rmdir".split()


def test_operations_are_counted_in_order(tmp_path):
    io = _C.FaultIo()
    assert small_cycle(io, tmp_path) == DATA
    assert [name for name, _ in io.ops] == CYCLE
    assert io.ops[1] == ("open", str(tmp_path / "a" / "f")) and io.ops[2][1] == str(tmp_path / "a" / "f")
    assert io.ops[10] == ("rename", f"{tmp_path / 'a' / 'f'} -> {tmp_path / 'a' / 'g'}")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EAGAIN])
@pytest.mark.parametrize("index", range(len(CYCLE)))
def test_every_operation_failing_is_an_error(tmp_path, index, number):
    before = descriptors()
    io = _C.FaultIo([(index, "errno", number)])
    with pytest.raises(OSError) as caught:
        small_cycle(io, tmp_path)
    assert caught.value.errno == number and str(tmp_path) in str(caught.value)
    assert io.ops[index][0] == CYCLE[index]
    assert descriptors() == before
    if CYCLE[index] in {"pwrite", "fsync"} or index == 4:  # An unfinished new file does not stay.
        assert os.listdir(tmp_path / "a") == []


@pytest.mark.parametrize("index", range(len(CYCLE)))
def test_every_operation_interrupted_is_done_again(tmp_path, index):
    io = _C.FaultIo([(index, "errno", errno.EINTR)])
    assert small_cycle(io, tmp_path) == DATA
    repeated = CYCLE[index] != "close"  # Linux has closed it: a second close could hit another file.
    assert len(io.ops) == len(CYCLE) + repeated


def test_interrupts_for_ever_end(tmp_path):
    with pytest.raises(InterruptedError):
        _C.write_small(_C.FaultIo([(1, "errno", errno.EINTR)], sticky=True), tmp_path / "f", DATA)


def test_direct_io_interrupted_for_ever_ends(tmp_path):
    """It was asked for again without an end, and took all memory with the log of it."""
    io, data = _C.FaultIo([(1, "errno", errno.EINTR)], sticky=True), bytearray(8192)
    with pytest.raises(InterruptedError, match="set_direct"):
        _C.write_file(io, tmp_path / "f", b"", [(address_of(data), 8192, 0)], 8192)
    assert io.ops[1][0] == "set_direct"


@pytest.mark.parametrize("bytes_moved", [0, 1, len(DATA) - 1])
@pytest.mark.parametrize("index", [2, 7])
def test_short_transfers_go_on(tmp_path, index, bytes_moved):
    io = _C.FaultIo([(index, "short", bytes_moved)])
    if index == 7 and bytes_moved == 0:
        assert small_cycle(io, tmp_path) == b""  # Nothing read is the end of a file.
    else:
        assert small_cycle(io, tmp_path) == DATA
        assert len(io.ops) == len(CYCLE) + 1


def test_sync_is_not_tried_again_after_it_failed(tmp_path):
    io = _C.FaultIo([(2, "errno", errno.EIO)])
    with pytest.raises(OSError, match="fsync"):
        _C.write_small(io, tmp_path / "f", DATA)
    assert [name for name, _ in io.ops] == ["open", "pwrite", "fsync", "unlink", "close"]


def test_sticky_errors_hit_everything_later_or_what_is_named(tmp_path):
    io = _C.FaultIo([(1, "errno", errno.ENOSPC)], sticky=True)
    with pytest.raises(OSError):
        _C.write_small(io, tmp_path / "f", DATA)
    assert (tmp_path / "f").exists()  # Its removal failed too.
    with pytest.raises(OSError):
        _C.mkdir(io, tmp_path / "a")
    io = _C.FaultIo([(1, "errno", errno.ENOSPC)], sticky=True, only=["pwrite"])
    with pytest.raises(OSError):
        _C.write_small(io, tmp_path / "g", DATA)
    assert not (tmp_path / "g").exists()
    _C.mkdir(io, tmp_path / "a")
    with pytest.raises(OSError, match="pwrite"):
        _C.write_small(io, tmp_path / "g", DATA)


@pytest.mark.parametrize("action", ["crash_before", "crash_after"])
@pytest.mark.parametrize("index", range(len(CYCLE)))
def test_crash_at_every_operation(tmp_path, index, action):
    child = os.fork()
    if child == 0:
        small_cycle(_C.FaultIo([(index, action, 0)]), tmp_path)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 137
    done = CYCLE[: index + (action == "crash_after")]
    assert (tmp_path / "a").exists() == ("mkdir" in done and "rmdir" not in done)
    assert (tmp_path / "a" / "g").exists() == ("rename" in done and "unlink" not in done)
    if "pwrite" in done and "rename" not in done:
        assert (tmp_path / "a" / "f").read_bytes() == DATA


def test_crash_in_the_middle_of_a_write(tmp_path):
    child = os.fork()
    if child == 0:
        _C.write_small(_C.FaultIo([(1, "crash_short", 10)]), tmp_path / "f", DATA)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 137
    assert (tmp_path / "f").read_bytes() == DATA[:10]


def test_unknown_actions_are_refused():
    with pytest.raises(ValueError, match="crash_befor'"):
        _C.FaultIo([(0, "crash_befor", 0)])


def test_another_python_thread_runs_during_a_call(tmp_path):
    """Opening a fifo for writing waits for its reader, another Python thread, which the endless switch interval keeps
    from running until the call lets go of the GIL: if it did not, this would never end."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    start = threading.Event()

    def read() -> None:
        start.wait()
        open(fifo, "rb").close()

    thread = threading.Thread(target=read)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        start.set()
        with pytest.raises(OSError, match="sync") as caught:  # what was opened has no disk behind it
            _C.write_small(_C.PosixIo(), fifo, b"", exclusive=False)
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    assert caught.value.errno == errno.EINVAL


def test_names_that_are_not_utf8(tmp_path):
    io = _C.PosixIo()
    path = os.fsencode(tmp_path) + b"/\xff\xfe"
    _C.write_small(io, path, DATA)
    assert _C.read_small(io, os.fsdecode(path), len(DATA)) == DATA
    with pytest.raises(FileExistsError, match="open '.*\udcff\udcfe'"):
        _C.write_small(io, path, DATA)
    with pytest.raises(_C.ChecksumError, match="\udcff") as caught:
        _C.read_ranges(io, path, 0, [], [])
    assert os.fsencode(caught.value.path) == path
