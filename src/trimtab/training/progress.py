"""Progress: bars on a terminal, plain lines elsewhere, nothing when asked for silence."""

from __future__ import annotations

import sys
import time
from typing import Any

SHOWN = ("reward", "eval/accuracy", "loss", "entropy", "grad_norm", "completions/mean_length")


class Progress:
    """Shows the steps of one run."""

    def __init__(self, *, title: str, quiet: bool = False) -> None:
        from rich.console import Console

        self.title, self.quiet = title, quiet
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
        """Show that `step` of `steps` is done."""
        if self.quiet:
            return
        text = "  ".join(f"{name.rsplit('/', 1)[-1]} {metrics[name]:.4g}" for name in SHOWN if name in metrics)
        if self.console.is_terminal:
            self._bar_step(step, steps, text)
            return
        if self.first is None:
            self.first, self.started = step, time.monotonic()
        now = time.monotonic()
        # A log gets a line now and then, and always the first, the last and every evaluation.
        if step in (0, 1, steps) or "eval/accuracy" in metrics or now - self.last_line > 10:
            self.last_line = now
            rate = (now - self.started) / max(1, step - self.first)
            left = f"  {rate * (steps - step):.0f} s left" if step > self.first and step < steps else ""
            print(f"{self.title}: step {step}/{steps}  {text}{left}", file=sys.stderr, flush=True)

    def _bar_step(self, step: int, steps: int, text: str) -> None:
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
            self._task = self._bar.add_task(self.title, total=steps, text=text)
            self._bar.start()
        self._bar.update(self._task, completed=step, text=text)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
