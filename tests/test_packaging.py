"""A wheel built from a copy of the sources holds every package, the extension, the types marker and the licences;
an sdist holds what it takes to build that wheel, and the results that README quotes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "parallel", "ckpt", "bench", "runtime", "csrc")


def copy_of_the_sources(work: Path) -> Path:
    """A copy to build in, so that the checkout keeps its own build."""
    source = work / "source"
    source.mkdir()
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    tuned = source / "kernels" / "tuned"  # as `plait kernels tune` leaves it
    tuned.mkdir(exist_ok=True)
    (tuned / "sm_70.json").write_text('{"format": 1, "rows": []}')
    return source


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    work = tmp_path_factory.mktemp("wheel")
    source = copy_of_the_sources(work)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(work),
        ".",
    ]
    quick = {**os.environ, "CXXFLAGS": "-O0"}  # what is in the wheel is looked at, not how fast it is
    subprocess.run(command, cwd=source, env=quick, check=True, capture_output=True, text=True)
    return zipfile.ZipFile(next(work.glob("plait-*.whl")))


def test_wheel_holds_every_python_file(wheel):
    wanted = set()
    for folder in FOLDERS[:-1]:
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).parts
            wanted.add("/".join(("plait", *(parts[1:] if folder == "runtime" else parts))))
    missing = wanted - set(wheel.namelist())
    assert not missing, f"not in the wheel: {sorted(missing)}"


def test_wheel_holds_extension_marker_and_licences(wheel):
    names = wheel.namelist()
    assert any(n.startswith("plait/_C.") and n.endswith(".so") for n in names)
    assert "plait/py.typed" in names
    assert sum("licenses/" in n for n in names) >= 2


def test_wheel_holds_rows_that_were_timed_and_no_other_data(wheel):
    """Rows of the tile tables that were timed on a card, and pinned facts; bench's results stay in the sdist."""
    names = {name for name in wheel.namelist() if name.endswith(".json")}
    wanted = {f"plait/kernels/tuned/{path.name}" for path in (ROOT / "kernels" / "tuned").glob("*.json")}
    assert names == wanted | {"plait/kernels/tuned/sm_70.json", "plait/kernels/pinned.json"}


def test_sdist_holds_the_sources_and_the_results_that_readme_quotes(tmp_path):
    """bench/results/train.json was once missing: README's numbers could not be looked up from a release."""
    source = copy_of_the_sources(tmp_path)
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--formats=tar", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    with tarfile.open(next(tmp_path.glob("plait-*.tar"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    quoted = set(re.findall(r"\]\((bench/results/[\w.-]+)\)", (ROOT / "README.md").read_text()))
    assert quoted and quoted <= names, f"not in the sdist: {sorted(quoted - names)}"
    patterns = ("*.py", "*.json", "*.cpp", "*.hpp", "*.h", "LICENSE*")
    wanted = {str(path.relative_to(source)) for pattern in patterns for path in source.rglob(pattern)}
    wanted = {name for name in wanted if not name.startswith(("plait.egg-info", "build"))}
    assert wanted <= names, f"not in the sdist: {sorted(wanted - names)}"


def test_installed_wheel_imports_outside_the_checkout(wheel, tmp_path):
    wheel.extractall(tmp_path)
    code = (
        "import plait.ckpt, plait.parallel.schedules as s, plait._C, plait; print(plait.__file__);"
        "s.one_f_one_b(num_stages=2, num_microbatches=4).check()"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert str(tmp_path) in result.stdout
