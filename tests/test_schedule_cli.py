"""`plait schedule`: what it prints, writes and returns."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from plait.parallel.cli import main
from plait.parallel.schedules import NAMES, Costs, Event, build, from_csv, interleaved, one_f_one_b
from plait.parallel.schedules.action import COMPUTE
from plait.parallel.schedules.measured import measured_timeline, to_json
from tests.torch_schedules import torch_csv


def test_show_draws_and_writes_every_form(capsys, tmp_path):
    files = {kind: tmp_path / f"a.{kind}" for kind in ("svg", "perfetto", "csv")}
    flags = [part for kind, path in files.items() for part in (f"--{kind}", str(path))]
    assert main(["show", "1f1b", "--ranks", "2", "--microbatches", "3", *flags]) == 0
    out = capsys.readouterr().out
    assert "rank 0" in out and "1f1b: makespan 12, bubble 0.250" in out
    assert files["svg"].read_text().startswith("<svg")
    assert json.loads(files["perfetto"].read_text())["traceEvents"]
    assert from_csv(files["csv"]).lanes == one_f_one_b(2, 3).lanes


def test_check_prints_the_peaks(capsys):
    assert main(["check", "interleaved", "--ranks", "2", "--microbatches", "4", "--chunks", "2"]) == 0
    out = capsys.readouterr().out
    peaks = interleaved(2, 2, 4).check().peak_activations
    assert "2 ranks, 4 stages, 4 micro-batches: sound" in out
    assert f"rank 0: stages 0,2; peak of live activations {peaks[0]}" in out


@pytest.mark.parametrize("flags", [["gpipe", "--ranks", "2", "--microbatches", "2", "--costs"], ["--measured"]])
def test_json_nested_without_end_is_no_traceback(flags, capsys, tmp_path):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert main(["show", *flags, str(tmp_path / "deep.json")]) == 2
    assert "recursion" in capsys.readouterr().err


def test_check_blocking_prints_the_cycle(capsys):
    assert main(["check", "1f1b", "--ranks", "2", "--microbatches", "4", "--blocking"]) == 1
    assert "deadlock with blocking sends and receives: rank 0 at" in capsys.readouterr().err


def test_check_of_torchs_csv_names_rank_and_action(capsys, tmp_path):
    path = tmp_path / "torch.csv"
    path.write_text(torch_csv("Schedule1F1B", 4, 1, 8))
    assert main(["check", str(path)]) == 1
    assert "rank 3 action 3F8" in capsys.readouterr().err
    path.write_text(torch_csv("ScheduleZBVZeroBubble", 4, 2, 8))
    assert main(["check", str(path)]) == 0


@pytest.mark.parametrize(
    "argv, message",
    [
        (["check", "zigzag", "--ranks", "2", "--microbatches", "2"], "'zigzag' is none of gpipe, 1f1b, interleaved"),
        (["show", "gpipe"], "gpipe needs --ranks and --microbatches"),
        (["show", "gpipe", "--ranks", "2", "--microbatches", "2", "--chunks", "3"], "one stage per rank"),
        (["check", "/nowhere/a.csv"], "No such file"),
        (["check", "gpipe", "--ranks", "2"], "gpipe needs --ranks and --microbatches"),
        (["check", "gpipe", "--ranks", "two", "--microbatches", "2"], "invalid int value: 'two'"),
        (["show", "gpipe", "--ranks", "4", "--microbatches", "9" * 8], "at most 1048576 are drawn"),
        (["search", "--ranks", "9" * 8, "--microbatches", "4"], "at most 1048576 are drawn"),
        (["show"], "show needs a schedule"),
        (["show", "--measured", "/nowhere"], "No such file"),
        (["show", "gpipe", "--ranks", "2", "--microbatches", "2", "--svg", "/nowhere/a.svg"], "No such file"),
        (["show", "gpipe", "--ranks", "2", "--microbatches", "2", "--costs", "1,2"], "expected F,I,W"),
        (["show", "gpipe", "--ranks", "2", "--microbatches", "2", "--costs", "a.json"], "No such file"),
        (["compare", "--ranks", "2", "--microbatches", "2", "--deferred", "2"], "deferred=2.0: valid are 0"),
        (["compare", "--ranks", "2", "--microbatches", "2", "--deferred", "x"], "valid are finite numbers >= 0"),
        (["search", "--ranks", "2", "--microbatches", "4", "--memory", "-1"], "valid are finite numbers >= 0"),
        (["search", "--ranks", "2", "--microbatches", "4", "--objective", "x"], "invalid choice: 'x'"),
        (["search", "--ranks", "2"], "the following arguments are required: --microbatches"),
        (["fly"], "invalid choice"),
        ([], "required"),
    ],
)
def test_wrong_usage_is_said_and_returns_2(capsys, argv, message):
    assert main(argv) == 2
    assert message in capsys.readouterr().err


# ---- files that are not what they should be ----------------------------------------------------------------------


def test_a_csv_that_is_no_schedule_is_one_line(capsys, tmp_path):
    for content, code, message in (
        (b"hello", 1, "action 'hello': expected stage, operation, micro-batch"),
        (b"", 1, "no actions"),
        (b"\xff\xfe0F0", 2, "is no CSV file of a schedule"),
    ):
        path = tmp_path / "a.csv"
        path.write_bytes(content)
        assert main(["check", str(path)]) == code
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1


def test_flags_that_contradict_a_file_are_refused(capsys, tmp_path):
    one_f_one_b(2, 4).to_csv(tmp_path / "a.csv")
    assert main(["check", str(tmp_path / "a.csv"), "--ranks", "2", "--microbatches", "4"]) == 0
    assert main(["check", str(tmp_path / "a.csv"), "--ranks", "3"]) == 2
    assert "--ranks 3: " in (err := capsys.readouterr().err) and "is for 2" in err


def test_costs_for_other_stages_are_refused_or_left_out(capsys, tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{"forward": [1, 1], "input": [1, 1], "weight": [1, 1]}')
    size = ["--ranks", "2", "--microbatches", "4", "--costs", str(path)]
    assert main(["show", "zb_v", *size]) == 2
    assert "costs.forward has 2 entries for 4 stages" in capsys.readouterr().err
    assert main(["compare", *size]) == 0
    out = capsys.readouterr().out
    assert sum("left out: costs.forward has 2 entries for 4" in line for line in out.splitlines()) == 4
    assert main(["compare", "zb_v", *size]) == 2
    path.write_text('{"forward": [1, 1, 1], "input": [1, 1, 1], "weight": [1, 1, 1]}')
    assert main(["compare", *size]) == 2
    assert "the costs fit no schedule" in capsys.readouterr().err


def test_compare_says_which_schedules_the_costs_cannot_run(capsys, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("forward = 1\ninput = 1\nweight = 1\nsplit = false\n")
    assert main(["compare", "--ranks", "2", "--microbatches", "4", "--costs", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    marked = {line.split()[0] for line in lines if "needs a split backward" in line}
    assert marked == {"zb_h1", "zb_h2", "zb_v", "dual_pipe_v"}
    assert main(["search", "--ranks", "2", "--microbatches", "4", "--costs", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not any("W" in action or "I" in action for lane in found["lanes"] for action in lane)


# ---- --json ------------------------------------------------------------------------------------------------------


def test_json_of_every_command(capsys):
    size = ["--ranks", "2", "--microbatches", "4", "--json"]
    assert main(["check", "zb_h1", *size]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["sound"] and said["peak_activations"] == list(build("zb_h1", 2, 4).check().peak_activations)
    assert main(["show", "zb_v", *size]) == 0
    said = json.loads(capsys.readouterr().out)
    plan = build("zb_v", 2, 4).simulate(Costs([0.5] * 4, [1.0] * 4, [0.5] * 4, [0.5] * 4))
    assert said["timelines"][0] == json.loads(json.dumps(plan.figures()))
    assert main(["compare", *size]) == 0
    said = json.loads(capsys.readouterr().out)
    assert len(said["schedules"]) == len(NAMES) and said["left_out"] == []
    spans = [row["makespan"] for row in said["schedules"]]
    assert spans == sorted(spans)
    assert main(["search", *size]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["makespan"] == spans[0] and said["held"] <= 2 and len(said["lanes"]) == 2


def test_json_of_a_schedule_that_cannot_run(capsys, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("0F0,0B0\n1B0,1F0\n")
    assert main(["check", str(path), "--json"]) == 1
    out, err = capsys.readouterr()
    said = json.loads(out)
    assert said["sound"] is False and said["rank"] == 1 and said["action"] == "1B0" and said["error"] == err.strip()


# ---- a run beside its plan ---------------------------------------------------------------------------------------


def a_run(folder: Path, name: str = "1f1b", p: int = 2, m: int = 4) -> Path:
    """A run's folder with the timeline of a step that took a little longer than its medians say."""
    schedule = build(name, p, m)
    lanes = schedule.simulate(Costs(0.01, 0.02, 0.01, 0.01, 0.002)).lanes
    events = [[Event(a, s + 0.001 * i, e + 0.001 * i, w) for i, (a, s, e, w, _) in enumerate(lane) if a.op in COMPUTE]
              for lane in lanes]  # fmt: skip
    (folder / "timeline.json").write_text(to_json(schedule, measured_timeline(schedule, events)))
    return folder


def test_show_draws_a_run_beside_its_plan_in_all_three_forms(capsys, tmp_path):
    run = a_run(tmp_path)
    files = [str(tmp_path / "a.svg"), str(tmp_path / "a.json")]
    assert main(["show", "--measured", str(run), "--svg", files[0], "--perfetto", files[1]]) == 0
    out = capsys.readouterr().out
    assert "planned 1f1b: makespan" in out and "measured 1f1b: makespan" in out
    assert float(out.splitlines()[-1].removeprefix("measured / planned makespan: ")) > 1
    texts = ["".join(node.itertext()) for node in ElementTree.parse(files[0]).iter()]
    assert any(text.startswith("planned 1f1b") for text in texts)
    assert any(text.startswith("measured 1f1b") for text in texts)
    events = json.loads(Path(files[1]).read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["planned 1f1b", "measured 1f1b"]


def test_show_plans_another_schedule_beside_a_run(capsys, tmp_path):
    run = str(a_run(tmp_path))
    assert main(["show", "gpipe", "--measured", run, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [line["name"] for line in said["timelines"]] == ["planned gpipe", "measured 1f1b"]
    assert main(["show", "zb_v", "--measured", run]) == 2
    assert "zb_v has 4 stages, the run had 2" in capsys.readouterr().err
    assert main(["show", "zb_v", "--measured", run, "--costs", "0.01,0.01,0.01"]) == 0


def test_a_runs_measured_times_are_costs(capsys, tmp_path):
    assert (
        main(["compare", "gpipe", "1f1b", "--ranks", "2", "--microbatches", "8", "--costs", str(a_run(tmp_path))])
        == 0
    )
    assert main(["search", "--ranks", "2", "--microbatches", "8", "--costs", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["stages"] == 2


def test_costs_of_nothing_are_no_traceback(capsys, tmp_path):
    """Only messages cost, or nothing at all: once a division by the busiest rank's zero time."""
    size = ["--ranks", "2", "--microbatches", "2"]
    files = ["--svg", str(tmp_path / "a.svg"), "--perfetto", str(tmp_path / "a.json")]
    for costs in ("0,0,0,1", "0,0,0"):
        for command in (["show", "gpipe", *files], ["compare"], ["search"]):
            assert main([*command, *size, "--costs", costs]) == 0, (command, costs)
    run = str(a_run(tmp_path))
    capsys.readouterr()
    assert main(["show", "--measured", run, "--costs", "0,0,0"]) == 0
    assert "none: the plan takes no time" in capsys.readouterr().out
