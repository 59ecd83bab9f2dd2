"""Progress: bars on a terminal, plain lines elsewhere, nothing when asked for silence."""

from __future__ import annotations

import sys
import time
from typing import Any

SHOWN = ("reward", "eval/accuracy", "loss", "entropy", "grad_norm", "completions/mean_length")
SECONDS_BETWEEN_LINES = 10


class Progress:
    """Shows how far one piece of work is."""

    def __init__(self, *, title: str, unit: str = "step", quiet: bool = False) -> None:
        from rich.console import Console

        self.title, self.unit, self.quiet = title, unit, quiet
        self.console = Console(stderr=True)
        self.started = time.monotonic()
        self.first: int | None = None
        self.last_line = 0.0
        self._bar: Any = None
        self._task: Any = None

    def note(self, text: str) -> None:
        """A line of its own."""
        if not self.quiet:
            self.console.print(f"{self.title}: {text}", highlight=False, markup=False)

    def step(self, step: int, steps: int, metrics: dict[str, float]) -> None:
        """Show that `step` of `steps` training steps are done, with the metrics that people look at."""
        text = "  ".join(f"{name.rsplit('/', 1)[-1]} {metrics[name]:.4g}" for name in SHOWN if name in metrics)
        self.count(step, steps, text, line=step <= 1 or "eval/accuracy" in metrics)

    def count(self, done: int, total: int, text: str = "", *, line: bool = False) -> None:
        """Show that `done` of `total` are done.

        Args:
            done: finished so far.
            total: in all.
            text: what to show beside it.
            line: a log gets a line now and then, and always for the last; True asks for one here.
        """
        if self.quiet:
            return
        if self.console.is_terminal:
            self._show_bar(done, total, text)
            return
        if self.first is None:
            self.first, self.started = done, time.monotonic()
        now = time.monotonic()
        if line or done == total or now - self.last_line > SECONDS_BETWEEN_LINES:
            self.last_line = now
            rate = (now - self.started) / max(1, done - self.first)
            left = f"{rate * (total - done):.0f} s left" if self.first < done < total else ""
            print(
                "  ".join(part for part in (f"{self.title}: {self.unit} {done}/{total}", text, left) if part),
                file=sys.stderr,
                flush=True,
            )

    def _show_bar(self, done: int, total: int, text: str) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        if self._bar is None:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[text]}"),
                console=self.console,
            )
            self._task = self._bar.add_task(self.title, total=total, text=text)
            self._bar.start()
        self._bar.update(self._task, completed=done, text=text)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
