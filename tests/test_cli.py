"""The command as a process: started as a module, left by its reader, stopped from the keyboard."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from plait import cli

COMMAND = [sys.executable, "-P", "-m"]


@pytest.mark.parametrize("module", ["plait", "plait.cli"])
def test_a_module_runs_the_command_instead_of_nothing(module: str) -> None:
    """`torchrun -m plait.cli train` once did nothing and returned 0."""
    said = subprocess.run([*COMMAND, module, "nosuch"], capture_output=True, text=True, timeout=60)
    assert said.returncode == 2 and "unknown command 'nosuch'; valid: train" in said.stderr


def test_a_reader_that_left_causes_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    said = subprocess.run([*COMMAND, "plait", "--help"], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert said.returncode == 141 and said.stderr == ""


def test_a_full_disk_under_the_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        said = subprocess.run(
            [*COMMAND, "plait", "--help"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert said.returncode == 1 and said.stderr == "plait: [Errno 28] No space left on device\n"


def test_an_interrupt_causes_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "main", interrupted)
    with pytest.raises(SystemExit) as caught:
        cli.entry()
    assert caught.value.code == 130
