"""Page-locking of the staging pool, with a driver that writes its calls down (tests/fake_cuda.cpp; no card here)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from plait import _C

HERE = Path(__file__).parent
START = """
import ctypes, os, threading, torch
from plait import _C
driver = ctypes.CDLL("libcuda.so.1")
HUGE = 2 << 20
"""
SAVE = """
import warnings
from plait.ckpt.capture import Capturer
from plait.ckpt.state import flatten
warnings.simplefilter("error", RuntimeWarning)
torch.cuda.is_initialized = lambda: True
capturer = Capturer(0, 1, pool_bytes=8 << 20)
assert not capturer.pool.pinned  # no context yet, and nothing is said of it
driver.fake_first_tensor()
flat = flatten({"w": torch.ones(4)})
plan = capturer._planned(flat)
object.__setattr__(plan, "on_device", True)
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("driver")
    command = [compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", HERE / "fake_cuda.cpp"]
    subprocess.run(command, check=True, timeout=120)
    return folder


def calls_of(driver, tmp_path, program, **environment):
    """Runs a program whose CUDA driver is the fake one; returns its calls with their results."""
    calls = tmp_path / "calls"
    places = {"LD_LIBRARY_PATH": str(driver), "FAKE_CUDA_CALLS": str(calls)}
    command = [sys.executable, "-P", "-c", START + program]
    done = subprocess.run(command, env=os.environ | places | environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return calls.read_text().splitlines() if calls.exists() else []


def test_a_pool_is_unpinned_by_any_thread_in_the_context_that_pinned_it(driver, tmp_path):
    """The last view of a pool may go in the writing thread, which has no context: the memory stayed registered."""
    program = """
driver.fake_first_tensor()
pool = _C.StagingPool(HUGE, pin=True)
assert pool.pinned
held = [pool.view(0, 10)]
pool.close()
thread = threading.Thread(target=held.clear)
thread.start()
thread.join()
"""
    assert calls_of(driver, tmp_path, program) == ["register 0", "push 0", "unregister 0", "pop 0"]


def test_a_pool_made_before_the_first_tensor_is_pinned_later(driver, tmp_path):
    program = """
pool = _C.StagingPool(HUGE)
try:
    pool.pin()
except RuntimeError as error:
    assert "no CUDA context" in str(error), error
assert not pool.pinned
driver.fake_first_tensor()
pool.pin()
pool.pin()
assert pool.pinned
"""
    assert calls_of(driver, tmp_path, program) == ["register 0", "push 0", "unregister 0", "pop 0"]


def test_a_state_on_a_device_pins_a_pool_that_was_made_before_cuda(driver, tmp_path):
    """`Snapshots(root, pool_bytes=...)` before the model is moved: its copies were pageable, and so synchronous."""
    program = SAVE + "captured = capturer.begin(1, flat)\nassert capturer.pool.pinned\ncaptured.release()\n"
    assert calls_of(driver, tmp_path, program)[0] == "register 0"


def test_a_driver_that_refuses_costs_speed_and_not_the_save(driver, tmp_path):
    """pin=None raised what the driver said (a limit of locked memory) from the constructor or the first save."""
    program = SAVE + (
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always')\n"
        "    capturer.begin(1, flat).release()\n"
        "    capturer.begin(2, flat).release()\n"
        "assert ['cuMemHostRegister: out of memory (2)' in str(one.message) for one in said] == [True], said\n"
        "try:\n"
        "    Capturer(0, 1, pool_bytes=8 << 20, pin=True)\n"
        "except RuntimeError as error:\n"
        "    assert 'out of memory (2)' in str(error)\n"
        "else:\n"
        "    raise AssertionError('pin=True was not an error')\n"
    )
    assert calls_of(driver, tmp_path, program, FAKE_CUDA_REFUSES="1") == ["register 2", "register 2"]


def test_a_thread_that_waits_leaves_the_graph_captures_of_others_alone(driver, tmp_path):
    """CUDA's own mode for it, of the thread and of its context; without a driver there is nothing to do."""
    assert _C.CudaDriver.relax_captures() == _C.CudaDriver.probe()["available"]
    program = """
assert not _C.CudaDriver.relax_captures()
driver.fake_first_tensor()
assert _C.CudaDriver.relax_captures()
"""
    assert calls_of(driver, tmp_path, program) == ["relax 201", "relax 0"]
