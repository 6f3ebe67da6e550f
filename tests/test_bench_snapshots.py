"""The whole cases of the `snapshots` suite: every provider's turn, what is left behind, what is refused, the table.

States are tiny: nothing here asserts a time.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from plait.bench import (
    providers,
    snapshot_device,
    snapshot_memory,
    snapshot_others,
    snapshot_table,
    snapshot_turn,
    snapshot_whole,
    suite_snapshots,
)
from plait.bench.snapshot_training import Nudge, Training
from plait.bench.snapshot_way import Pending, save
from plait.bench.spec import Case, CaseResult, Measured, Options, WrongResultError
from tests.ranks import run_ranks

PARAMS = {"mib": 1, "tensors": 5, "seed": 0, "step_s": 0.001, "cold": True, "threads": [1, 2]}
HERE = ["plait", "plait guarded", "torch.save", "safetensors", "dcp", "dcp async thread"]  # no 2nd process


def whole(folder: Path, ways: list[str], place: str = "disk", mib: int = 1) -> Case:
    params = {"mib": mib, "tensors": 5, "quantity": "all", "place": place, "step_s": 0.001}
    return Case("tiny", {**params, "folder": str(folder), "ways": ways}, bytes_moved=float(mib << 20))


# ---- one turn ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HERE)
def test_a_turn_measures_everything_and_checks_what_it_loads(name, tmp_path):
    threads = torch.get_num_threads()
    answer = snapshot_turn.run(name, tmp_path, PARAMS)
    torch.set_num_threads(threads)
    samples = answer["samples"]
    assert len(samples["stall first"]) == 1 and len(samples["durable warm"]) == snapshot_turn.WARM
    assert {"lost 1", "lost 2", "lost share 2", "restore cold", "restore warm", "memory save"} <= samples.keys()
    for whole_s, part_s in zip(samples["durable warm"], samples["stall warm"], strict=True):
        assert 0 < part_s <= whole_s
    assert re.match(r"\w+ \d", answer["about"])


def test_warm_saves_of_ours_write_over_the_file_that_retention_gave_up_as_in_a_long_run(tmp_path, monkeypatch):
    inodes = []

    def noted(provider, folder, state):
        saved = save(provider, folder, state)
        inodes.append(os.stat(saved.path / "r00000.safetensors").st_ino)
        return saved

    monkeypatch.setattr(snapshot_turn, "save", noted)
    samples = snapshot_turn.run("plait", tmp_path, {**PARAMS, "threads": [1]})["samples"]
    assert inodes[:2] == inodes[2:] and inodes[0] != inodes[1]
    assert len(samples["durable second"]) == 1 and len(inodes) == 2 + snapshot_turn.WARM


@pytest.mark.parametrize("name", ["torchsnapshot", "nvidia-resiliency-ext", "deepspeed", "orbax", "dcp async pinned"])
def test_a_way_that_cannot_run_here_says_why(name, monkeypatch):
    monkeypatch.setattr(snapshot_turn.importlib.util, "find_spec", lambda top: None if top != "torch" else top)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    expected = "pinned memory needs CUDA" if name.endswith("pinned") else f"{name} is not installed"
    assert snapshot_turn.missing(name) == expected


def test_deepspeed_without_libaio_or_a_compiler_names_what_it_lacks(monkeypatch):
    """Its own text is "not compatible due to hardware/software issue. None"."""
    monkeypatch.setattr(snapshot_turn.importlib.util, "find_spec", lambda top: top)
    need = providers.PROVIDERS["snapshots"]["deepspeed"]
    assert need.library == "libaio.so.1" and need.programs == ("g++", "ninja")
    absent = need._replace(library="libaio_of_nobody.so.1")
    monkeypatch.setattr(snapshot_turn, "PROVIDERS", {"snapshots": {"deepspeed": absent}})
    assert snapshot_turn.missing("deepspeed").startswith("libaio_of_nobody.so.1: cannot open shared object file")
    assert providers.state_of(absent, False).startswith("missing: libaio_of_nobody.so.1: ")
    assert providers.lack_of(providers.Need(programs=("sh", "no_such"))) == "no_such is not on the path"


def test_a_build_of_deepspeed_that_was_killed_is_named_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert snapshot_others._build_lock() is None
    (tmp_path / "async_io").mkdir()
    (tmp_path / "async_io" / "lock").touch()
    assert snapshot_others._build_lock() == tmp_path / "async_io" / "lock"


def test_a_way_that_saves_later_values_is_wrong_not_fast(tmp_path, monkeypatch):
    class Late(snapshot_turn.TorchSaveFast):
        """Writes when it is waited for: what an asynchronous save without a copy does."""

        def begin(self, folder, state):
            def wait():
                if not folder.exists():
                    self.write(folder, state)
                return folder

            calls = iter([False, True])
            return Pending(wait, lambda: next(calls))

    monkeypatch.setitem(snapshot_turn.WAYS, "late", snapshot_turn.Way("torch", lambda root, state, nudge: Late()))
    answer = snapshot_turn.run("late", tmp_path, {**PARAMS, "threads": [1]})
    assert "layer.0 is not what it was when the save was called" in answer["wrong"]


@pytest.mark.parametrize("there", [True, False])
def test_what_leaves_a_device_is_measured_where_there_is_one(monkeypatch, there):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    names = [case.name for full in (False, True) for case in suite_snapshots.cases(full)]
    assert names.count("1024 MiB in 300, from the device") == 2 * there


def test_a_save_from_a_device_is_timed_beside_a_copy_and_compared(tmp_path, monkeypatch):
    """On the CPU: the code is the same but for page-locked memory and the wait for the device."""
    params = {"mib": 1, "tensors": 5, "quantity": "from device", "device": "cpu", "folder": str(tmp_path)}
    case = Case("small", params, bytes_moved=float(1 << 20))
    result = suite_snapshots.measure(case, Options(rounds=2, warmup=0))
    ours, limit = result.providers["plait"], result.providers["limit"]
    assert len(ours.samples_s) == len(limit.samples_s) == 2 and min(ours.samples_s + limit.samples_s) > 0
    assert ours.figures["x limit"] == pytest.approx(
        sum(a / b for a, b in zip(ours.samples_s, limit.samples_s, strict=True)) / 2
    )
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(snapshot_device.Snapshots, "restore", lambda *_: None)
    with pytest.raises(WrongResultError, match="layer.0 differs"):
        suite_snapshots.measure(case, Options(rounds=1, warmup=0))


def test_the_state_has_its_size_and_the_nudges_can_be_taken_back():
    state = snapshot_turn.fast_state(1 << 20, 5, seed=0)
    assert sum(value.nbytes for value in state.values()) == 1 << 20 and len({v.numel() for v in state.values()}) >= 3
    before = {name: value.clone() for name, value in state.items()}
    nudge = Nudge(state)
    nudge.step()
    nudge.step()
    assert all(not torch.equal(before[name], value) for name, value in state.items())
    assert all(torch.isfinite(value).all() for value in state.values())
    with nudge.as_it_was(0):
        assert all(torch.equal(before[name], value) for name, value in state.items())
    assert all(not torch.equal(before[name], value) for name, value in state.items())


def test_a_loop_trains_on_until_the_save_is_complete_and_waits_for_its_fence_before_each_change():
    training = Training(snapshot_turn.fast_state(1 << 20, 5, seed=0), step_s=0.001)
    answers, fences = iter([False, False, True]), []
    pending, loss = training.beside(
        lambda: Pending(lambda: Path(), lambda: next(answers), lambda: fences.append(training.optimizer.count))
    )
    assert len(fences) == 3 and fences == sorted(set(fences)) and loss.flipped != training.optimizer.flipped
    assert loss.complete_s > 0 and loss.stall_s >= 0


def peak_of_a_copy(rank: int) -> int:
    before = snapshot_memory.forget_peak()
    with mmap.mmap(-1, 128 << 20) as memory:  # the heap might have had as much resident already, and lose some now
        for _ in range(128):
            memory.write(b"x" * (1 << 20))
    return snapshot_memory.peak_since(before)


def test_memory_of_a_save_is_seen_though_it_is_freed_again():
    (peak,) = run_ranks(
        1, peak_of_a_copy
    )  # a process of its own: no thread of an earlier test takes memory meanwhile
    assert 64 << 20 <= peak < 256 << 20


def test_pages_are_known_to_be_in_the_cache_or_not(tmp_path):
    (tmp_path / "file").write_bytes(os.urandom(1 << 20))
    snapshot_turn.sync_all(tmp_path)
    snapshot_memory.read_into_cache(tmp_path)
    assert snapshot_memory.resident_share(tmp_path) == 1.0
    snapshot_memory.drop_from_cache(tmp_path)
    assert snapshot_memory.resident_share(tmp_path) <= snapshot_turn.COLD


# ---- rounds --------------------------------------------------------------------------------------------------------


def test_rounds_take_everyone_and_leave_nothing(tmp_path):
    case = whole(tmp_path, ["plait", "safetensors", "torchsnapshot"])
    result = snapshot_whole.measure(case, Options(rounds=2))
    ours, peer = result.providers["plait"], result.providers["safetensors"]
    assert len(ours.samples_s) == len(peer.samples_s) == 2 * snapshot_turn.WARM
    assert len([name for name in ours.figures if name.startswith("stall first s #")]) == 2
    ratios = ("stall first / memcpy", "direct write / durable", "direct overwrite / durable")
    for name in (*ratios, "direct read / restore cold"):
        assert 0 < ours.figures[f"{name} low"] <= ours.figures[name] <= ours.figures[f"{name} high"]
    assert "never syncs: fsync added here" in peer.check and "fsync" not in ours.check
    for kind in snapshot_whole.LIMITS:
        assert len(result.providers[f"limit: {kind}"].samples_s) == 2 * snapshot_turn.WARM
    assert list(tmp_path.iterdir()) == []
    json.dumps(result.to_json())


def test_a_way_that_fails_or_dies_is_reported_with_its_error_but_ours_ends_the_run(tmp_path):
    rounds = snapshot_whole.Rounds(tmp_path, PARAMS, ["torch.save"])
    assert "KeyError" in rounds.turn("no such way")["error"]
    rounds.params = {**PARAMS, "mib": 0}
    assert "RuntimeError" in rounds.turn("torch.save")["error"]  # sizes below 0
    assert list(tmp_path.iterdir()) == []
    answers = {"": {"samples": {}}, "torch.save": {"wrong": "layer.0 differs"}, "plait": {"error": "it broke"}}
    rounds.turn = answers.get  # type: ignore[assignment, method-assign]
    assert list(rounds.round(random.Random(0))) == ["limits", "torch.save"]
    assert rounds.out == {"torch.save": "failed: layer.0 differs"} and rounds.names == []
    rounds.names = ["plait"]
    with pytest.raises(RuntimeError, match="plait: it broke"):
        list(rounds.round(random.Random(0)))


def test_a_turn_that_is_killed_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_whole, "TURN_S", 0.05)
    rounds = snapshot_whole.Rounds(tmp_path, {**PARAMS, "mib": 64}, ["torch.save"])
    assert rounds.turn("torch.save") == {"error": "not done after 0.05 s"}
    assert list(tmp_path.iterdir()) == []


def test_no_room_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="bytes free; this case needs"):
        snapshot_whole.measure(whole(tmp_path, ["plait"], mib=1 << 30), Options(rounds=1))
    assert list(tmp_path.iterdir()) == []


def test_the_disk_is_not_a_folder_in_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(snapshot_whole._C, "io_facts", lambda folder: {"filesystem": "tmpfs"})
    with pytest.raises(ValueError, match="place 'disk': none of"):
        snapshot_whole.folder_of("disk")


PROGRAM = """
import sys
from plait.bench import cli, suite_snapshots
from plait.bench.spec import Case
params = {"mib": 4, "tensors": 5, "quantity": sys.argv[2], "place": "disk", "step_s": 0.001, "folder": sys.argv[1]}
object.__setattr__(suite_snapshots.SUITE, "cases", lambda full: [Case("tiny", params)])
if __name__ == "__main__":
    sys.exit(cli.main(["run", "snapshots", "--rounds", "3"]))
"""


@pytest.mark.parametrize(
    "number, quantity",
    [
        (signal.SIGTERM, "all"),
        pytest.param(signal.SIGINT, "all", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, "durable", marks=pytest.mark.long),
        pytest.param(signal.SIGINT, "durable", marks=pytest.mark.long),
    ],
)
def test_a_run_that_is_ended_by_a_signal_leaves_no_folder_and_no_process(number, quantity, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    folder = tmp_path / "disk"
    folder.mkdir()
    command = [sys.executable, "-P", str(program), str(folder), quantity]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while run.poll() is None and not any(p.stat().st_size >= 1 << 20 for p in files(folder)):
            time.sleep(0.01)
        assert run.poll() is None, "it was over before it could be ended"
        children = snapshot_memory.below(run.pid)
        run.send_signal(number)
        assert run.wait(60) != 0
    finally:
        run.kill()
        run.wait()
    assert list(folder.iterdir()) == []
    for pid in children:
        assert gone(pid), f"process {pid} is left"


def files(folder: Path) -> list[Path]:
    """Returns what can be seen of a folder that others change meanwhile."""
    try:
        return [path for path in folder.rglob("*") if path.is_file()]
    except OSError:
        return []


def gone(pid: int) -> bool:
    """True when a process has ended, within some seconds."""
    for _ in range(500):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


# ---- the table -----------------------------------------------------------------------------------------------------


def figures_of(stall: float, durable: float, cold: float, warm: float) -> dict[str, float]:
    """What results_of writes, with two rounds of equal samples beside limits of 0.1 s."""
    found: dict[str, float] = {"memory save bytes": 2.0 * 2**20, "memory restore bytes": 0.0}
    values = {"stall first s": stall, "stall warm s": stall, "complete warm s": durable, "durable warm s": durable}
    values |= {"restore cold s": cold, "restore warm s": warm, "lost 1 s": 0.01, "lost 2 s": 0.2}
    values |= {
        "lost share 1": 0.02,
        "lost share 2": 0.3,
        "stall first / warm": 1.0,
        "stall warm / memcpy": stall / 0.1,
    }
    values |= {"direct write / durable": 0.1 / durable, "direct read / restore cold": 0.1 / cold}
    for name, value in values.items():
        found |= snapshot_whole.spread(name, [value, value])
        found |= {f"{name} #{index}": value for index in (1, 2)}
    return found


def made(**slower: float) -> CaseResult:
    """A result in which a peer takes so many times longer than ours."""

    def measured(factor: float, check: str) -> Measured:
        figures = figures_of(0.12 * factor, 0.105 * factor, 0.108 * factor, 0.05 * factor)
        return Measured([0.105 * factor] * 2, check, figures)

    providers = {name: measured(1.0, "plait 1") for name in snapshot_table.OURS}
    providers |= {name.replace("_", " "): measured(factor, "2; fsync added here") for name, factor in slower.items()}
    providers["orbax"] = Measured(skipped="orbax is not installed")
    providers["limit: memcpy"] = Measured([0.1, 0.1], "system calls alone", {})
    return CaseResult(whole(Path("/"), []), "plait", providers, "how it was measured")


def test_goals_are_met_or_not_by_the_numbers_beside_them():
    lines = snapshot_table.goals(made(safetensors=2.0, dcp_async=1.9)).splitlines()
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:4]] for line in lines[2:]}
    assert len(cells) == len(snapshot_table.GOALS)
    assert cells["eager stall <= 1.3 x memcpy, x"] == ["1.20 (1.20-1.20) met", "-"]
    assert cells["lazy stall <= 5 ms, ms"] == ["-", "120.00 (120.00-120.00) NOT met"]
    assert cells["durable at >= 90 % of direct writing, %"][0] == "95.24 (95.24-95.24) met"
    assert cells["durable >= 2 x sooner than every asynchronous peer, x"][1] == "1.90 (1.90-1.90) NOT met"
    assert cells["training time lost <= 5 % of the save, all cores, %"][0] == "30.00 (30.00-30.00) NOT met"
    assert cells["warm restore as fast as safetensors, x"][0] == "2.00 (2.00-2.00) met"


def test_a_loop_of_one_thread_is_no_loop_on_all_cores():
    figures = {
        name: value for name, value in figures_of(0.1, 0.2, 0.3, 0.4).items() if not re.match(r"lost.* 2\b", name)
    }
    cells = snapshot_table.row("plait", Measured([0.2], "", figures))
    place = snapshot_table.HEADER.index("lost, 1 thread")
    assert cells[place : place + 2] == ["10 ms, 2 (2-2) %", "-"]


def test_a_goal_without_its_peers_says_nothing():
    line = next(line for line in snapshot_table.goals(made(safetensors=2.0)).splitlines() if "asynchronous" in line)
    assert [cell.strip() for cell in line.split("|")[2:4]] == ["-", "-"]


def test_the_table_has_everyone_with_reason_or_numbers_and_comes_from_the_file_too(tmp_path, capsys):
    results = [made(safetensors=2.0)]
    text = snapshot_table.text(results)
    assert "| orbax " in text and "orbax is not installed" in text and "memcpy 0.01 (0.01-0.01)" in text
    assert "how it was measured" in text and "- safetensors: 2; fsync added here" in text
    path = tmp_path / "snapshots.json"
    suite = suite_snapshots.SUITE
    content = snapshot_table.report.document(suite, results, Options(), "plait bench run snapshots")
    snapshot_table.report.write_json(path, content)
    assert snapshot_table.main([str(path)]) == 0
    assert capsys.readouterr().out.strip() == text.strip()
    assert snapshot_table.main([str(tmp_path / "none.json")]) == 2 and snapshot_table.main([]) == 2
