"""Every Python example of README runs as it stands, in an empty folder, and says something."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"^\*\*(.+?)\*\*[^\n]*\n+```python\n(.*?)```", README, re.M | re.S)


def test_readme_shows_each_piece_alone():
    text = "\n".join(code for _, code in EXAMPLES)
    assert len(EXAMPLES) >= 6
    for package in (
        "plait.kernels",
        "plait.parallel",
        "plait.parallel.schedules",
        "plait.ckpt",
        "plait.hf",
        "plait.bench",
    ):
        assert package in text, f"no example imports {package}"


@pytest.mark.parametrize("title, code", EXAMPLES, ids=[title for title, _ in EXAMPLES])
def test_example_runs_as_it_stands(title, code, tmp_path):
    result = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip(), f"example {title!r} printed nothing"


def test_readme_names_only_targets_and_commands_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^ {4}|`)make ([a-z-]+)", README, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), f"make {target} is not in the Makefile"
    from plait.cli import COMMANDS

    for command in re.findall(r"plait (\w+) ?[-`|]", README):
        assert command in COMMANDS, f"README names `plait {command}`"


def test_readme_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), f"README links to {target}"
