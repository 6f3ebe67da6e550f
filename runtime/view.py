"""Shows a run: a live view on a terminal, one line a step elsewhere; the summary and the loss plot at its end.

It only reads events (plain data that rank 0 emits) and never touches the run. rich and matplotlib are optional
(extra `train`); without them the view is lines and the plot a CSV file, and it says so once.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

Event = dict[str, Any]


def make_view(stream: TextIO | None = None) -> PlainView:
    """The live view when the stream is a terminal and rich is there, else lines."""
    stream = stream or sys.stdout
    if not stream.isatty():
        return PlainView(stream)
    try:
        import rich  # noqa: F401
    except ImportError:
        view = PlainView(stream)
        view.write("no live view: rich is not installed (pip install 'plait[train]')")
        return view
    return RichView(stream)


def clock(seconds: float) -> str:
    """Seconds -> `m:ss` or `h:mm:ss`."""
    minutes, second = divmod(int(seconds + 0.5), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def step_line(event: Event) -> str:
    """One step in words."""
    return (
        f"step {event['step']}/{event['steps']} loss {event['loss']:.4f} norm {event['norm']:.3f}"
        f" lr {event['lr']:.2e} tokens/s {event['tokens_per_s']:,.0f} bubble {event['bubble']:.0%}"
        f" stall {event['stall_s'] * 1e3:.1f} ms eta {clock(event['eta_s'])}"
    )


def event_line(event: Event) -> str | None:
    """Any event in words; None for one that a line view has nothing to say about."""
    kind = event["kind"]
    if kind == "step":
        return step_line(event)
    if kind == "ranks":
        return "ranks: pids " + " ".join(map(str, event["pids"]))
    if kind == "snapshot":
        return f"snapshot {event['step']} {event['phase']}"
    if kind == "summary":
        return "\n".join(summary_lines(event))
    return event.get("text")


class PlainView:
    """One line an event, flushed at once, so that a pipe sees a step when it ends."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> None:
        self.stream.write(text + "\n")
        self.stream.flush()

    def event(self, rank: int, record: Event) -> None:
        text = event_line(record)
        if text is not None:
            self.write(text)

    def line(self, rank: int, text: str) -> None:
        self.write(f"[rank {rank}] {text}")

    def close(self) -> None:
        self.stream.flush()


class RichView(PlainView):
    """A table that is redrawn in place; logs and notes scroll above it."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(stream)
        self.console = Console(file=stream, highlight=False)
        self.live: Live | None = None
        self.last: Event = {}
        self.losses: list[float] = []
        self.saved = "none yet"

    def write(self, text: str) -> None:
        self.console.print(text, markup=False)

    def event(self, rank: int, record: Event) -> None:
        if record["kind"] == "step":
            self.last = record
            self.losses.append(record["loss"])
            self._draw()
        elif record["kind"] == "snapshot":
            self.saved = f"{record['step']} {record['phase']}"
            self._draw()
        else:
            if record["kind"] == "summary":
                self.close()
            super().event(rank, record)

    def _draw(self) -> None:
        from rich.live import Live

        if not self.last:
            return
        if self.live is None:  # only now: its thread must not exist while ranks are forked
            self.live = Live(console=self.console, refresh_per_second=8, transient=False)
            self.live.start()
        self.live.update(self._table())

    def _table(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        event = self.last
        table = Table.grid(padding=(0, 2))
        table.add_row("step", f"{event['step']} / {event['steps']}", ProgressBar(event["steps"], event["step"], 40))
        table.add_row("loss", f"{event['loss']:.4f}", sparkline(self.losses[-40:]))
        table.add_row("tokens/s", f"{event['tokens_per_s']:,.0f}", f"gradient norm {event['norm']:.3f}")
        table.add_row("bubble", f"{event['bubble']:.0%}", "share of the step in which ranks wait for the pipeline")
        table.add_row("snapshot", self.saved, f"stall {event['stall_s'] * 1e3:.1f} ms")
        table.add_row("ETA", clock(event["eta_s"]), f"learning rate {event['lr']:.2e}")
        return table

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None
        super().close()


def sparkline(values: list[float]) -> str:
    """Values as a row of ASCII levels, lowest `_`, highest `#`."""
    levels = "_.-=+*#"
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((value - low) * scale)] for value in values)


# --- the end of a run -------------------------------------------------------------------------------------------

# key, title, format; a row whose value is None is left out.
SUMMARY_ROWS = (
    ("step", "steps", "{:,}"),
    ("tokens", "tokens seen", "{:,}"),
    ("loss", "training loss", "{:.4f}"),
    ("held_out_loss", "held-out loss", "{:.4f}"),
    ("tokens_per_s", "tokens/s", "{:,.0f}"),
    ("step_ms", "step, median", "{:.1f} ms"),
    ("mfu", "MFU", "{:.1%}"),
    ("bubble", "bubble", "{:.1%}"),
    ("exposed_communication", "exposed communication", "{:.1%}"),
    ("stall_s", "snapshot stall, total", "{:.3f} s"),
    ("goodput", "goodput", "{:.1%}"),
    ("restart_s", "start to regained step", "{:.1f} s"),
    ("rto_s", "RTO, kill to regained step", "{:.1f} s"),
    ("slowest_rank", "slowest rank", "{}"),
    ("slowest_lag", "its lag over the median", "{:.1%}"),
    ("plot", "loss curve", "{}"),
)


def summary_lines(summary: Event) -> list[str]:
    """The summary as aligned lines."""
    rows = [(title, form.format(summary[key])) for key, title, form in SUMMARY_ROWS if summary.get(key) is not None]
    return ["--- summary", *(f"{title:<28}{text}" for title, text in rows)]


def write_plot(
    folder: Path, steps: Sequence[int], losses: Sequence[float], held_out: float | None
) -> tuple[Path, str | None]:
    """Writes `loss.png`, or without matplotlib `loss.csv`; returns the path and why it is not a picture, if so."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib.figure import Figure
    except ImportError:
        path = folder / "loss.csv"
        with path.open("w", newline="", encoding="ascii") as file:
            csv.writer(file).writerows([("step", "loss"), *zip(steps, losses, strict=True)])
        return path, "matplotlib is not installed (pip install 'plait[train]'): the losses are in a CSV file"
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, losses, linewidth=1.2, label="training")
    if held_out is not None:
        axes.axhline(held_out, linestyle="--", linewidth=1.0, color="tab:orange", label=f"held out {held_out:.3f}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    path = folder / "loss.png"
    figure.savefig(path, dpi=120)
    return path, None
