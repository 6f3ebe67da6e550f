"""Shows how far a run is: a bar that redraws itself on a terminal, plain lines elsewhere. Never on stdout."""

from __future__ import annotations

from typing import TextIO

WIDTH = 24  # of the bar


class Progress:
    """`at(done, total, label)` after each piece; `close` ends the bar's line. Plain lines come at each new label and
    at each tenth of the way, so that a log of thousands of pieces stays short."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.terminal = stream, stream.isatty()
        self.label, self.tenth, self.drawn = "", -1, 0

    def at(self, done: int, total: int, label: str) -> None:
        """Shows that done of total pieces are over; label says what is next."""
        total = max(total, done)
        if self.terminal:
            filled = WIDTH * done // max(total, 1)
            text = f"[{'#' * filled}{'.' * (WIDTH - filled)}] {done}/{total} {label}"[:100]
            self.write("\r" + text.ljust(self.drawn))
            self.drawn = len(text)
            return
        tenth = 10 * done // max(total, 1)
        if (label, tenth) != (self.label, self.tenth):
            self.write(f"[{done}/{total}] {label}\n")
            self.label, self.tenth = label, tenth

    def close(self) -> None:
        """Leaves the bar's line."""
        if self.terminal and self.drawn:
            self.write("\r" + " " * self.drawn + "\r")
            self.drawn = 0

    def write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()
