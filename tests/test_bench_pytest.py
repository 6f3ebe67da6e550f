"""pytest-benchmark users: a timer that waits for the device, and JSON that `plait bench compare` can judge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.bench import cli, pytest_device
from plait.bench.pytest_json import read_any
from plait.bench.result_file import ResultFileError
from tests import launchers

ROOT = Path(__file__).resolve().parent.parent
CONFTEST = (
    "from plait.bench.pytest_device import device_benchmark, device_timer, pytest_benchmark_update_machine_info\n"
)
TEST = """
import pytest
from plait.bench import pytest_device

@pytest.mark.benchmark(group="mine")
def test_it(device_benchmark):
    device_benchmark(lambda: sum(range(100)))
    assert device_benchmark.group == "mine" and device_benchmark._timer is pytest_device.synchronised

def test_other(benchmark):
    benchmark(lambda: None)
    assert benchmark._timer is not pytest_device.synchronised
"""


# An xdist worker's variables would switch pytest-benchmark off.
PROGRAM = """
import os, sys
import pytest
for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
    del os.environ[name]
os.chdir(FOLDER)
sys.exit(int(pytest.main(["-q", "-p", "no:cacheprovider", *ARGS])))
"""


def bench(folder: Path, *args: str) -> tuple[int, str]:
    """pytest in a process of its own: its exit code and output."""
    return launchers.program(PROGRAM.replace("FOLDER", repr(str(folder))).replace("ARGS", repr(args))).finish()


def test_the_timer_waits_for_the_device(monkeypatch):
    calls: list[str] = []
    cuda = pytest_device.torch.cuda
    monkeypatch.setattr(cuda, "synchronize", lambda: calls.append("sync"))
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(pytest_device.time, "perf_counter", lambda: float(len(calls)))
    assert pytest_device.synchronised() == 1.0, "the clock was read before the device was waited for"
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    assert pytest_device.synchronised() == 1.0 and calls == ["sync"]


def test_the_fixture_gives_its_timer_and_keeps_other_options(tmp_path):
    pytest.importorskip("pytest_benchmark", reason="extra `bench`")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_x.py").write_text(TEST)
    code, said = bench(tmp_path, "--benchmark-max-time=0.02", "--benchmark-json=a.json")
    assert code == 0 and "2 passed" in said, said
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["machine_info"]["plait"]["gpus"] == [] or data["machine_info"]["plait"]["cuda"]
    file = read_any(tmp_path / "a.json")
    assert set(file.cases) == {"test_x.py::test_it", "test_x.py::test_other"}
    assert file.machine["timer"] == "perf_counter, synchronised" or "synchronised" in file.machine["timer"]


def test_the_folder_of_the_suite_is_collected(tmp_path):
    pytest.importorskip("pytest_benchmark", reason="extra `bench`")
    args = ["bench/", "--benchmark-only", "-k", "geglu and not foreach", "--benchmark-max-time=0.05"]
    code, said = bench(ROOT, *args, f"--benchmark-json={tmp_path / 'b.json'}")
    assert code == 0 and "2 passed" in said, said
    names = set(read_any(tmp_path / "b.json").cases)
    assert len(names) == 2 and all("geglu" in name for name in names)


# ---- comparing ----------------------------------------------------------------------------------------------------


def written(path: Path, seconds: float, *, brand: str = "cpu", timer: str = "synchronised", hz: int = 1) -> Path:
    """A file of pytest-benchmark with one benchmark of ten rounds."""
    info = {"machine": "x86_64", "system": "Linux", "release": "6", "python_version": "3.11.7"}
    info |= {"python_implementation": "CPython", "cpu": {"brand_raw": brand, "count": 2, "hz_actual": [hz, 0]}}
    one = {
        "fullname": "t.py::test_a",
        "options": {"timer": timer},
        "stats": {"data": [seconds * (1 + i / 1e3) for i in range(10)]},
    }
    data = {"machine_info": info, "commit_info": {"id": "abc", "dirty": False}, "benchmarks": [one]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**data, "datetime": "2026-11-30T00:00:00", "version": "5"}))
    return path


def folder(path: Path, seconds: float) -> Path:
    """Five files: five processes, each with its own clock reading."""
    for index in range(5):
        written(path / f"{index}.json", seconds * (1 + index / 1e4), hz=index)
    return path


@pytest.mark.parametrize("factor, code, verdict", [(1.0, 0, "SAME"), (1.5, 1, "SLOWER"), (0.5, 0, "FASTER")])
def test_five_files_a_side_get_a_verdict(tmp_path, capsys, factor, code, verdict):
    base, head = folder(tmp_path / "base", 1e-3), folder(tmp_path / "head", 1e-3 * factor)
    assert cli.main(["compare", str(base), str(head)]) == code
    assert verdict in capsys.readouterr().out


def test_one_file_a_side_is_compared_and_inconclusive(tmp_path, capsys):
    base, head = (written(tmp_path / name, seconds) for name, seconds in (("a.json", 1e-3), ("b.json", 2e-3)))
    assert cli.main(["compare", str(base), str(head)]) == 0
    out = capsys.readouterr().out
    assert "INCONCLUSIVE" in out and "2.000" in out and "t.py::test_a" in out


@pytest.mark.parametrize("other", [{"brand": "another"}, {"timer": "perf_counter"}])
def test_another_machine_or_timer_is_not_compared(tmp_path, capsys, other):
    base, head = written(tmp_path / "a.json", 1e-3), written(tmp_path / "b.json", 1e-3, **other)
    assert cli.main(["compare", str(base), str(head)]) == 5
    folder(tmp_path / "mixed", 1e-3)
    written(tmp_path / "mixed" / "9.json", 1e-3, **other)
    with pytest.raises(ResultFileError, match="of another machine, timer or commit"):
        read_any(tmp_path / "mixed")


def test_a_clock_reading_is_no_fact_of_the_machine(tmp_path):
    """hz_actual differs from run to run."""
    one, two = (read_any(written(tmp_path / f"{hz}.json", 1e-3, hz=hz)) for hz in (1, 2))
    assert one.machine == two.machine


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda data: data["benchmarks"][0]["stats"].pop("data"),
            "stats.data: is missing; write it with --benchmark-json",
        ),
        (lambda data: data["benchmarks"][0]["stats"].update(data=["x"]), r"samples_s\[0\]: is x"),
        (lambda data: data.update(benchmarks=3), "benchmarks: is '3', of the wrong kind"),
        (lambda data: data.pop("machine_info"), "schema is None"),
    ],
)
def test_a_damaged_file_is_one_error_with_its_place(tmp_path, change, message):
    path = written(tmp_path / "a.json", 1e-3)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ResultFileError, match=message):
        read_any(path)


def test_a_folder_without_files_is_said(tmp_path, capsys):
    assert cli.main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert "holds no JSON of pytest-benchmark" in capsys.readouterr().err
