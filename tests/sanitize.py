"""Builds the extension with a sanitizer and runs its tests on that build: `python tests/sanitize.py address`.

Not a test itself: `make sanitize` runs it for each kind. The one idea: the build lies under build/sanitize/KIND and
takes the place of plait._C in this one process, so that the installed extension stays as it is. The sanitizer's
library must come first in a process, so the program starts itself again with it preloaded.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "build" / "sanitize" / "report"  # of a run that goes on: pytest drops what a passing test printed
# kind -> compiler flags, libraries to preload, options
KINDS = {
    "address": ("-fsanitize=address", ["libasan.so"], {"ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1"}),
    "undefined": (
        "-fsanitize=undefined -fno-sanitize-recover=all",
        ["libubsan.so"],
        {"UBSAN_OPTIONS": "print_stacktrace=1"},
    ),
    "thread": (
        "-fsanitize=thread",
        ["libtsan.so"],
        {
            "TSAN_OPTIONS": f"halt_on_error=0:exitcode=66:log_path={REPORT}:"
            f"suppressions={ROOT / 'tests' / 'tsan.supp'}"
        },
    ),
}
# What more runs on each build: damaged files for the reader; all threads of a lazy save. What a thread's shadow costs
# is no memory of ours.
MORE_TESTS = {
    "address": ["tests/test_fuzz.py", "-m", "not long"],
    "undefined": ["tests/test_fuzz.py", "-m", "not long"],
    "thread": ["tests/test_guard.py", "-k", "not test_memory_is_one_block"],
}


def build(kind: str) -> Path:
    """Compiles the extension with a sanitizer; returns the path of the module."""
    out = ROOT / "build" / "sanitize" / kind
    flags = f"-O1 -g -fno-omit-frame-pointer {KINDS[kind][0]}"
    environment = {**os.environ, "CXXFLAGS": flags, "LDFLAGS": KINDS[kind][0]}
    command = [sys.executable, "setup.py", "--quiet", "build_ext"]
    command += ["--build-lib", str(out), "--build-temp", str(out / "objects")]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return next((out / "plait").glob("_C*.so"))


def library(name: str) -> str:
    """Returns the path of one of the compiler's libraries."""
    compiler = os.environ.get("CXX", "g++")
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def run_tests(module: Path, arguments: list[str]) -> int:
    """Runs pytest in this process with `module` as plait._C; returns its exit status."""
    spec = importlib.util.spec_from_file_location("plait._C", module)
    assert spec is not None and spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    sys.modules["plait._C"] = extension
    spec.loader.exec_module(extension)
    import pytest

    import plait

    vars(plait)["_C"] = extension
    print(f"plait._C is {extension.__file__}", flush=True)
    return int(pytest.main(arguments))


def main(arguments: list[str]) -> int:
    kind, tests = arguments[0], arguments[1:]
    if tests[:1] == ["--in-place"]:  # started again below
        return run_tests(Path(tests[1]), tests[2:])
    module = build(kind)
    _, preloaded, options = KINDS[kind]
    tests = tests or [*sorted(str(path) for path in (ROOT / "tests").glob("test_csrc_*.py")), *MORE_TESTS[kind]]
    environment = {**os.environ, **options, "LD_PRELOAD": " ".join(map(library, [*preloaded, "libstdc++.so"]))}
    command = [sys.executable, "-P", __file__, kind, "--in-place", str(module), "-q", *tests]
    for old in REPORT.parent.glob(f"{REPORT.name}.*"):
        old.unlink()
    status = subprocess.run(command, cwd=ROOT, env=environment).returncode
    for report in sorted(REPORT.parent.glob(f"{REPORT.name}.*")):
        print(report.read_text(errors="replace"))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
