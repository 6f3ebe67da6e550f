"""The numbers of a run's summary, on steps whose times are made up, and the file that survives a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.metrics import History, Meter, StepRecord, peak_flops


def record(step: int, **changes) -> StepRecord:
    """A step of one second on two ranks."""
    facts = dict(
        step=step,
        loss=2.0,
        num_tokens=100,
        wall_s=1.0,
        pipeline_s=0.8,
        exposed_s=0.1,
        stall_s=0.01,
        busy_s=(0.4, 0.6),
    )
    return StepRecord(**{**facts, **changes})


def test_summary_of_equal_steps() -> None:
    meter = Meter(started_s=1000.0, reached=0, killed_s=None)
    for step in range(1, 5):
        meter.add(record(step))
    summary = meter.summary(now_s=1008.0, flops_token=10.0, peak=1000.0, world_size=2)
    assert summary["tokens_per_s"] == pytest.approx(100.0)
    assert summary["step_ms"] == pytest.approx(1000.0)
    assert summary["mfu"] == pytest.approx(100.0 * 10.0 / 2000.0)
    assert summary["bubble"] == pytest.approx(1 - 0.5 / 0.8)
    assert summary["exposed_communication"] == pytest.approx(0.1)
    assert summary["stall_s"] == pytest.approx(0.04)
    assert summary["goodput"] == pytest.approx(0.5)
    assert summary["slowest_rank"] == 1 and summary["slowest_lag"] == pytest.approx(0.2)
    assert summary["rto_s"] is None


def test_steps_done_again_are_no_goodput_and_end_the_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.metrics.time.time", lambda: 2002.0)
    meter = Meter(started_s=2000.0, reached=6, killed_s=1990.0)
    for step in (5, 6, 7):
        meter.add(record(step))
    summary = meter.summary(now_s=2004.0, flops_token=1.0, peak=None, world_size=2)
    assert summary["goodput"] == pytest.approx(1.0 / 4.0)
    assert summary["rto_s"] == pytest.approx(2002.0 - 1990.0)
    assert summary["restart_s"] == pytest.approx(2.0)
    assert summary["mfu"] is None


def test_no_step_no_numbers() -> None:
    assert Meter(0.0, 0, None).summary(1.0, 1.0, None, 1) == {}


def test_history_survives_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = History(path)
    for step in (1, 2, 3):
        first.add(step, float(step))
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    second = History(path)
    assert second.reached == 3 and second.killed_s is not None
    second.start_at(2)
    second.add(3, 30.0)
    assert second.losses == {1: 1.0, 2: 2.0, 3: 30.0}
    second.close(3)
    assert path.read_text().count("\n") == 7
    third = History(path)
    assert third.losses == second.losses and third.killed_s is None


def test_peaks_are_known_for_bf16_only() -> None:
    assert peak_flops("NVIDIA H200", "bfloat16") == 989e12
    assert peak_flops("NVIDIA H200", "float32") is None
    assert peak_flops("cpu", "bfloat16") is None
    assert peak_flops("NVIDIA A100-SXM4-80GB", "bfloat16") == 312e12
    for other in ("NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA H200 NVL", "NVIDIA H100 PCIe"):
        assert peak_flops(other, "bfloat16") is None
