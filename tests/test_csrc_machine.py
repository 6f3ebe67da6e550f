"""plait._C.io_facts and CudaDriver.probe: they answer on any machine, truly where it can be checked."""

from __future__ import annotations

import ctypes
import os

import pytest

from plait import _C


def test_facts_of_a_folder(tmp_path):
    facts = _C.io_facts(tmp_path)
    assert facts["direct_io"] == (facts["direct_io_reason"] == "")
    assert facts["io_uring"] == (facts["io_uring_reason"] == "")
    space = os.statvfs(tmp_path)
    assert facts["total_bytes"] == space.f_blocks * space.f_frsize
    assert 0 < facts["free_bytes"] <= facts["total_bytes"]
    assert os.listdir(tmp_path) == []


def test_direct_io_of_the_facts_is_what_the_writer_uses(tmp_path):
    result = _C.write_file(_C.PosixIo(), tmp_path / "f", b"x", [], 4096)
    assert _C.io_facts(tmp_path)["direct_io"] == result.direct


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs /dev/shm")
def test_the_file_system_is_named():
    assert _C.io_facts("/dev/shm")["filesystem"] == "tmpfs"


def test_an_unusable_folder_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="statfs"):
        _C.io_facts(tmp_path / "absent")
    with pytest.raises(OSError, match="create a file in '/proc'"):
        _C.io_facts("/proc")


def test_no_driver_is_an_answer():
    try:
        ctypes.CDLL("libcuda.so.1")
        present = True
    except OSError:
        present = False
    facts = _C.CudaDriver.probe()
    assert facts["host_register"] == present
    assert facts["available"] == (facts["reason"] == "")
    assert (facts["driver_version"] > 0) == facts["available"]
    if not present:
        assert "libcuda.so.1" in facts["reason"]
        assert _C.CudaDriver.probe(initialize=True) == facts
