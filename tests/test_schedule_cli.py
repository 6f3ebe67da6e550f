"""`plait schedule`: what it prints, writes and returns."""

from __future__ import annotations

import json

import pytest

from plait.parallel.cli import main
from plait.parallel.schedules import from_csv, interleaved, one_f_one_b
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
        (["fly"], "invalid choice"),
        ([], "required"),
    ],
)
def test_wrong_usage_is_said_and_returns_2(capsys, argv, message):
    assert main(argv) == 2
    assert message in capsys.readouterr().err
