"""What a person sees of a run: lines, the live view, the summary, the plot and its fallback."""

from __future__ import annotations

import builtins
import io
from pathlib import Path
from typing import Any

import pytest

from plait.view import PlainView, RichView, clock, make_view, sparkline, summary_lines, write_plot

STEP = {
    "kind": "step",
    "step": 3,
    "steps": 10,
    "loss": 4.25,
    "norm": 1.5,
    "lr": 1e-3,
    "tokens_per_s": 12345.6,
    "bubble": 0.25,
    "stall_s": 0.0004,
    "eta_s": 65.0,
}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_lines_on_a_pipe() -> None:
    stream = io.StringIO()
    view = make_view(stream)
    assert type(view) is PlainView
    view.event(0, STEP)
    view.event(0, {"kind": "snapshot", "step": 2, "phase": "durable"})
    view.event(0, {"kind": "ranks", "pids": [5, 6]})
    view.event(0, {"kind": "unknown"})
    view.line(3, "hello")
    assert stream.getvalue().splitlines() == [
        "step 3/10 loss 4.2500 norm 1.500 lr 1.00e-03 tokens/s 12,346 bubble 25% stall 0.4 ms eta 1:05",
        "snapshot 2 durable",
        "ranks: pids 5 6",
        "[rank 3] hello",
    ]


def test_a_live_view_on_a_terminal() -> None:
    stream = Terminal()
    view = make_view(stream)
    assert isinstance(view, RichView)
    for step in range(1, 4):
        view.event(0, {**STEP, "step": step})
    view.event(0, {"kind": "snapshot", "step": 2, "phase": "saving"})
    view.line(1, "[bold]not markup")
    view.event(0, {"kind": "summary", "step": 3})
    view.close()
    text = stream.getvalue()
    for part in ("tokens/s", "12,346", "bubble", "ETA", "1:05", "stall 0.4 ms", "[bold]not markup", "--- summary"):
        assert part in text, part


def test_without_rich_the_terminal_gets_lines_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch, "rich")
    stream = Terminal()
    view = make_view(stream)
    assert type(view) is PlainView
    assert "rich is not installed" in stream.getvalue()


def test_summary_leaves_out_what_is_not_known() -> None:
    lines = summary_lines({"step": 1200, "mfu": None, "bubble": 0.123, "held_out_loss": 2.5})
    text = "\n".join(lines)
    assert "1,200" in text and "12.3%" in text and "2.5000" in text and "MFU" not in text


def test_plot_is_a_png(tmp_path: Path) -> None:
    path, reason = write_plot(tmp_path, [1, 2, 3], [3.0, 2.0, 1.5], 1.7)
    assert reason is None and path.name == "loss.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_numbers_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch, "matplotlib")
    path, reason = write_plot(tmp_path, [1, 2], [3.0, 2.5], None)
    assert reason is not None and "matplotlib is not installed" in reason
    assert path.read_text().split() == ["step,loss", "1,3.0", "2,2.5"]


def test_clock_and_sparkline() -> None:
    assert (clock(59.6), clock(3600), clock(61)) == ("1:00", "1:00:00", "1:01")
    assert sparkline([]) == "" and sparkline([1.0, 1.0]) == "__" and sparkline([0.0, 1.0]) == "_#"


def forbid(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Makes `import name` fail as if it were not installed."""
    real = builtins.__import__

    def importer(module: str, *rest: Any, **named: Any) -> Any:
        if module.partition(".")[0] == name:
            raise ImportError(f"No module named {name!r}")
        return real(module, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", importer)
