"""A progress bar for the terminal; a line now and then where there is none."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 32  # characters of the bar
REDRAW = 0.05  # seconds between two drawings
TENTHS = 10  # lines that are printed where nobody can see a bar move


class Progress:
    """Display of how many of `total` are done; `with` finishes the last line in any case."""

    def __init__(self, total: int, label: str, out: TextIO | None = None) -> None:
        self.total = total
        self.label = label
        self._out = out or sys.stderr
        self._moves = self._out.isatty()
        self._started = time.monotonic()
        self._drawn_at = 0.0
        self._tenth = -1
        self._done = 0

    def __enter__(self) -> Progress:
        self.show(0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._moves:
            self._draw("")
            self._out.write("\n")
            self._out.flush()

    def show(self, done: int, note: str = "") -> None:
        """Draw, if it is time to."""
        self._done = done
        now = time.monotonic()
        if self._moves:
            if done >= self.total or now - self._drawn_at >= REDRAW:
                self._drawn_at = now
                self._draw(note)
            return
        tenth = done * TENTHS // max(1, self.total)
        if tenth != self._tenth:
            self._tenth = tenth
            print(f"{self.label}: {self._figures()} {note}".rstrip(), file=self._out, flush=True)

    def _draw(self, note: str) -> None:
        filled = self._done * WIDTH // max(1, self.total)
        bar = "█" * filled + "░" * (WIDTH - filled)
        if "utf" not in (self._out.encoding or "").lower():
            bar = "#" * filled + "-" * (WIDTH - filled)
        self._out.write(f"\r\x1b[K{self.label} {bar} {self._figures()} {note}")
        self._out.flush()

    def _figures(self) -> str:
        seconds = time.monotonic() - self._started
        rate = f", {self._done / seconds:,.0f}/s" if seconds > 0.2 and self._done else ""
        return f"{self._done:,} of {self.total:,}{rate}"
