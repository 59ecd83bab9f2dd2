"""What a run does about a collapse: warn, stop, or go back to the last good checkpoint.

Going back is done on disk and then by starting again as any interrupted run does, so a run that is killed after it went
back, or while it did, continues bit for bit.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trimtab.config import RunConfig
from trimtab.errors import RunError
from trimtab.files import append_lines, read_lines, replace_file
from trimtab.training.checkpoint import (
    STATE_FILE,
    checkpoints,
    cut_log,
    keep_lines,
    read_state,
)
from trimtab.training.monitor import Monitor

logger = logging.getLogger("trimtab")

LOGS = ("metrics.jsonl", "samples.jsonl", "timings.jsonl", "findings.jsonl")
DISCARDED = "discarded.jsonl"
MARGIN = 64
"""A run that may stop or go back keeps a checkpoint this many steps old: a collapse began before it was found."""
STOP = 1
"""The verdict that ends a run. 0 is to go on, STOP + 1 + N to go back to step N."""


@dataclass(frozen=True)
class Attempt:
    """How often a run has gone back, and what that changes; part of every checkpoint."""

    number: int = 0
    skipped: int = 0
    """Steps thrown away: the rows and draws of as many steps are passed over, as those led into the collapse."""
    rate: float = 1.0
    """Factor of the learning rate."""


class RolledBack(Exception):
    """The run has to start again from an earlier checkpoint."""

    def __init__(self, step: int, target: int) -> None:
        super().__init__(f"went back from step {step} to step {target}")
        self.step, self.target = step, target


class Guard:
    """Shows a run's metrics to the monitor, writes findings.jsonl and judges what is to be done.

    Made after the logs were cut: what the monitor knows follows from metrics.jsonl, so a resumed run knows the same.
    """

    def __init__(self, config: RunConfig, attempt: Attempt) -> None:
        self.run, self.settings, self.every = Path(config.output), config.monitor, config.checkpoint.every
        self.attempt = attempt
        self.monitor = Monitor(self.settings.false_alarms)
        for line in read_lines(self.run / "metrics.jsonl"):
            self.monitor.observe(line["step"], line)

    def observe(self, line: dict[str, Any]) -> None:
        """Take in a line of metrics.jsonl as it was written."""
        found = self.monitor.observe(line["step"], line)
        if found:
            append_lines(self.run / "findings.jsonl", [finding.line() for finding in found])
        for finding in found:
            logger.warning("step %d: %s", finding.step, finding.message)

    def verdict(self) -> int:
        """0 to go on, STOP, or STOP + 1 + N to go back to step N."""
        if self.monitor.collapse is None or self.settings.on_collapse not in ("stop", "rollback"):
            return 0
        good = self.last_good()
        if self.settings.on_collapse == "stop" or self.attempt.number >= self.settings.max_rollbacks or good is None:
            return STOP
        return STOP + 1 + step_of(good)

    def last_good(self) -> Path | None:
        """The newest checkpoint from before anything was found; None: none is left."""
        assert self.monitor.onset is not None
        return self._newest(self.monitor.onset - 1)

    def spare(self, step: int) -> list[Path]:
        """The checkpoints that must not be pruned at `step`."""
        onset, last = self.monitor.onset, step - MARGIN
        if onset is not None:
            good = self._newest(onset - 1)
            return [good] if good else []
        if self.settings.on_collapse not in ("stop", "rollback"):
            return []
        # One that is old enough, and the one that will be next.
        old, coming = self._newest(last), [path for path in checkpoints(self.run) if step_of(path) > last]
        return [*([old] if old else []), *coming[:1]]

    def _newest(self, last_step: int) -> Path | None:
        for path in reversed(checkpoints(self.run)):
            step = step_of(path)
            # A checkpoint that a signal left behind would not be there in an unbroken run.
            if step <= last_step and step % self.every == 0 and read_state(path) is not None:
                return path
        return None

    def reason(self) -> str:
        """Why the run stops, in one sentence."""
        collapse = self.monitor.collapse
        assert collapse is not None
        good = self.last_good()
        tries = f" after {self.attempt.number} rollbacks" if self.attempt.number else ""
        kept = f"the last good checkpoint is {good}" if good else "no checkpoint from before it is left"
        setting = f"monitor.on_collapse: {self.settings.on_collapse}"
        return f"stopped{tries}: {collapse.message} and stayed down; {kept} ({setting})"


def obey(verdict: int, step: int, guard: Guard | None) -> None:
    """Do what all processes agreed on.

    Raises:
        RunError: to stop.
        RolledBack: to go back.
    """
    if verdict > STOP:
        raise RolledBack(step, verdict - STOP - 1)
    if verdict == STOP:
        raise RunError(guard.reason() if guard else "stopped: the first process found a collapse")


def tidy_logs(run: Path, last_step: int, attempt: int) -> None:
    """Cut the logs to what the checkpoint at `last_step` knows (-1: nothing), that of unfinished rollbacks included."""
    for name in LOGS:
        cut_log(run / name, last_step)
    keep_lines(run / "findings.jsonl", lambda line: line.get("attempt", 0) <= attempt)
    keep_lines(run / DISCARDED, lambda line: line["attempt"] < attempt)


def roll_back(run: Path, back: RolledBack, rate_factor: float) -> None:
    """Make `back.target` the newest checkpoint and the last line of the logs; what came after goes to discarded.jsonl.

    Killed before the last line, the run resumes at the same checkpoint in its old attempt, collapses in the same way
    and comes here again.
    """
    target = run / "checkpoints" / f"step_{back.target}"
    state = json.loads((target / STATE_FILE).read_text(encoding="utf-8"))
    old = Attempt(**state.get("attempt", {}))
    new = Attempt(old.number + 1, old.skipped + back.step - back.target, old.rate * rate_factor)
    for path in checkpoints(run):
        if step_of(path) > back.target:
            shutil.rmtree(path)
    dropped: list[dict[str, Any]] = []
    for name in LOGS:
        # The findings come last: the collapse is among them.
        dropped = keep_lines(run / name, lambda line: bool(line["step"] <= back.target))
        append_lines(run / DISCARDED, [{**line, "attempt": old.number, "file": name} for line in dropped])
    message = f"{back}: other draws, the learning rate times {new.rate:g}"
    logger.warning("%s", message)
    collapse: dict[str, Any] = next((line for line in dropped if line.get("collapse")), {})
    mark = {"step": back.target, "onset": back.target, "message": message, "collapse": False, "attempt": new.number}
    append_lines(run / "findings.jsonl", [{**collapse, **mark}])
    replace_file(target / STATE_FILE, json.dumps({**state, "attempt": asdict(new)}, indent=1).encode())


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step_"))
