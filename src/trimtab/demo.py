"""`trimtab demo`: GRPO and GTPO from the same warm start, at two learning rates, several seeds, on one page.

Every run is the ordinary `trimtab train` on a configuration that is left beside it, so each can be repeated by hand.
What comes out is shown whatever it is: nothing below depends on a result.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trimtab.errors import InputError, RunError
from trimtab.files import read_lines

METHODS = ("grpo", "gtpo")
RATES = {"healthy": 5e-5, "aggressive": 5e-4}
STEPS = 32
HELD_OUT = 256
MODEL = "builtin:arithmetic-varied"


@dataclass(frozen=True)
class Arm:
    """One method at one learning rate with one seed."""

    method: str
    pace: str
    seed: int

    @property
    def label(self) -> str:
        """Name in the table and the curves."""
        return f"{self.method.upper()}, {self.pace}"

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.method}-{self.pace}-seed{self.seed}"


def arms_of(folder: Path) -> list[Arm]:
    """The arms that a demo's folder holds, in the order of the table."""
    arms = [Arm(method, pace, seed) for pace in RATES for method in METHODS for seed in range(100)]
    return [arm for arm in arms if (folder / arm.name / "metrics.jsonl").exists()]


def arm_config(arm: Arm, folder: Path, steps: int) -> dict[str, Any]:
    """The configuration of one run: the paper's rewards, 8 prompts x 8 completions a step, one update a rollout."""
    return {
        "method": arm.method,
        "model": {"name": MODEL},
        "data": {"source": "builtin:arithmetic", "arithmetic": {"rows": 4000}},
        "rewards": "paper",
        "sampling": {"group_size": 8, "max_completion_tokens": 96},
        "optimizer": {"learning_rate": RATES[arm.pace], "max_grad_norm": 1.0},
        "training": {"steps": steps, "batch_size": 64, "threads": 1},
        "evaluation": {
            "data": {"source": "builtin:arithmetic", "split": "test", "limit": HELD_OUT, "arithmetic": {"seed": 1}},
            "every": max(1, steps // 2),
            "samples": 4,
            "k": [1, 4],
        },
        "checkpoint": {"every": max(1, steps // 2), "keep": 1},
        "log": {"samples_every": max(1, steps // 4)},
        "output": str(folder / arm.name),
        "seed": arm.seed,
    }


def run_demo(output: Path, *, seeds: int, steps: int | None, workers: int) -> None:
    """Run every arm, print the table and write the page.

    Args:
        output: folder of the runs and of index.html; finished runs in it are not repeated.
        seeds: seeds of each method at each rate.
        steps: training steps; None is the demo's own number.
        workers: runs at a time, one thread each.

    Raises:
        InputError: the folder holds a demo of another size.
        RunError: a run failed.
    """
    started = time.monotonic()
    steps = steps or STEPS
    arms = [Arm(m, pace, seed) for seed in range(seeds) for pace in RATES for m in METHODS]
    if output.exists() and not output.is_dir():
        raise InputError(f"--output: {output} is a file; name a folder")
    output.mkdir(parents=True, exist_ok=True)
    configs = {}
    for arm in arms:
        path = output / f"{arm.name}.yaml"
        text = yaml.safe_dump(arm_config(arm, output, steps), sort_keys=False)
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise InputError(
                f"{output} holds a demo with other settings; remove it or name another folder with --output"
            )
        path.write_text(text, encoding="utf-8")
        configs[arm] = path
    run_arms(configs, steps=steps, workers=workers)
    lines = {arm: read_lines(output / arm.name / "metrics.jsonl") for arm in arms}
    timings = {arm: read_lines(output / arm.name / "timings.jsonl") for arm in arms}
    rows = table_rows(lines, timings)
    print_table(rows)
    write_demo_page(output, rows, arms, steps=steps, seeds=seeds)
    print(f"page: {output / 'index.html'}   ({time.monotonic() - started:.0f} s)")


def run_arms(configs: dict[Arm, Path], *, steps: int, workers: int) -> None:
    """Start the runs, a few at a time, and follow their metrics files.

    Raises:
        RunError: a run failed; the others are stopped.
    """
    waiting = [arm for arm in configs if steps_done(configs[arm]) < steps]
    running: dict[Arm, subprocess.Popen[bytes]] = {}
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with progress_display(configs, steps) as show:
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    arm = waiting.pop(0)
                    log = configs[arm].with_suffix(".log").open("wb")
                    command = [sys.executable, "-m", "trimtab", "train", str(configs[arm]), "--quiet"]
                    running[arm] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
                    log.close()
                for arm, process in list(running.items()):
                    code = process.poll()
                    show(arm, steps_done(configs[arm]))
                    if code is None:
                        continue
                    del running[arm]
                    if code:
                        text = configs[arm].with_suffix(".log").read_text(encoding="utf-8", errors="replace").strip()
                        raise RunError(f"the run {arm.name} failed with exit code {code}: {text[-2000:]}")
                time.sleep(0.2)
        finally:
            for process in running.values():
                process.terminate()
            for process in running.values():
                process.wait()


@contextmanager
def progress_display(configs: dict[Arm, Path], steps: int) -> Iterator[Callable[[Arm, int], None]]:
    """One bar a run on a terminal; elsewhere a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if console.is_terminal:
        bars = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        tasks = {arm: bars.add_task(f"{arm.label}, seed {arm.seed}", total=steps, start=False) for arm in configs}
        seen: set[Arm] = set()

        def show(arm: Arm, done: int) -> None:
            if arm not in seen:
                seen.add(arm)
                bars.start_task(tasks[arm])
            bars.update(tasks[arm], completed=done)
            if done >= steps:
                bars.stop_task(tasks[arm])

        with bars:
            yield show
        return
    done_steps: dict[Arm, int] = {}
    last = time.monotonic()

    def line(arm: Arm, done: int) -> None:
        nonlocal last
        finished = done >= steps > done_steps.get(arm, 0)
        done_steps[arm] = done
        if finished or time.monotonic() - last > 15:
            last = time.monotonic()
            total = sum(done_steps.values())
            print(f"demo: {total} of {len(configs) * steps} steps; {arm.name} at {done}", file=sys.stderr, flush=True)

    yield line


def steps_done(config: Path) -> int:
    """Training steps that a run's metrics file holds; line 0 is the untouched model."""
    path = config.with_suffix("") / "metrics.jsonl"
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


def collapsed(lines: list[dict[str, Any]]) -> bool:
    """Whether a run ended below half of its first accuracy, or in the right format less than half of the time."""
    first, last = lines[0], lines[-1]
    return bool(last["eval/accuracy"] < 0.5 * first["eval/accuracy"] or last["eval/format"] < 0.5)


COLUMNS = (
    "method, rate",
    "accuracy",
    "pass@4",
    "format",
    "entropy",
    "pushed down, before",
    "pushed down, after",
    "collapsed",
    "seconds",
    "peak MiB",
)


def table_rows(
    lines: dict[Arm, list[dict[str, Any]]], timings: dict[Arm, list[dict[str, Any]]]
) -> list[tuple[str, ...]]:
    """The warm start, then each method at each rate: mean over seeds and, with several, the range."""
    # The arms of one seed start from the same evaluation, so one of them speaks for all.
    starts = list({arm.seed: run[0] for arm, run in lines.items()}.values())
    measured = ("eval/accuracy", "eval/pass@4", "eval/format", "eval/entropy")
    rows: list[tuple[str, ...]] = [
        ("warm start", *(spread([start[key] for start in starts]) for key in measured), *["–"] * 5)
    ]
    for label in dict.fromkeys(arm.label for arm in lines):
        arms = [arm for arm in lines if arm.label == label]

        def last(key: str, arms: list[Arm] = arms) -> list[float]:
            return [lines[arm][-1][key] for arm in arms]

        def pushed(which: str, arms: list[Arm] = arms) -> list[float]:
            return [pushed_share(lines[arm], which) for arm in arms]

        rows.append(
            (
                label,
                spread(last("eval/accuracy")),
                spread(last("eval/pass@4")),
                spread(last("eval/format")),
                spread(last("eval/entropy")),
                spread(pushed("before"), 2),
                spread(pushed("after"), 2),
                f"{sum(collapsed(lines[arm]) for arm in arms)} of {len(arms)}",
                spread([sum(t["seconds"] for t in timings[arm][1:]) for arm in arms], 0),
                spread([max(t.get("peak_memory_mib", 0.0) for t in timings[arm]) for arm in arms], 0),
            )
        )
    return rows


def pushed_share(lines: list[dict[str, Any]], which: str) -> float:
    """Over all steps: groups in which a shared correct token is pushed down, among groups that share one."""
    steps = [line for line in lines if line["step"] > 0]
    active = sum(line["pushed_down/active_groups"] for line in steps)
    return sum(line[f"pushed_down/{which}"] * line["pushed_down/active_groups"] for line in steps) / max(1.0, active)


def spread(values: list[float], digits: int = 3) -> str:
    """Mean, and the range over seeds."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def print_table(rows: list[tuple[str, ...]]) -> None:
    """The table turned on its side, so that it fits 80 columns: a line a measure, ranges below means."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("")
    for label, *_ in rows:
        table.add_column(label.replace(", ", "\n"), justify="right", no_wrap=True)
    for measure, *cells in list(zip(COLUMNS, *rows, strict=True))[1:]:
        table.add_row(measure, *(cell.replace(" (", "\n").rstrip(")") for cell in cells))
    Console().print(table)


CURVES = (
    ("eval/accuracy", "Held-out accuracy", "share of completions"),
    ("reward", "Mean reward", "0 to 20"),
    ("rewards/format/mean", "Format reward", "0 to 10"),
    ("entropy", "Entropy", "nats a token"),
    ("pushed_down/before", "Pushed down, plain advantages", "share of groups"),
    ("pushed_down/after", "Pushed down, the method's weights", "share of groups"),
    ("grad_norm", "Gradient norm before clipping", "norm"),
)


def demo_charts(lines: dict[Arm, list[dict[str, Any]]], titles: Sequence[str] | None = None) -> list[Any]:
    """Held-out accuracy and the training curves (or only those with the given titles), the seeds as a band."""
    from trimtab.report.charts import curve_chart

    charts = []
    for key, title, unit in CURVES:
        if titles is not None and title not in titles:
            continue
        series = []
        for arm, run in lines.items():
            points = [(line["step"], line[key]) for line in run if line.get(key) is not None]
            series.append((arm.label, arm.seed, [x for x, _ in points], [y for _, y in points]))
        charts.append(curve_chart(series, title=title, x_title="step", y_title=unit))
    return charts


def write_demo_page(output: Path, rows: list[tuple[str, ...]], arms: list[Arm], *, steps: int, seeds: int) -> None:
    """index.html: the report of the runs, opened by the demo's own table."""
    from trimtab.report.arms import arms_of as report_arms
    from trimtab.report.build import report_tabs
    from trimtab.report.page import Cell, Section, Table, write_page

    def two_lines(cell: str) -> Cell:
        mean, _, span = cell.rstrip(")").partition(" (")
        return Cell(mean, span)

    from trimtab.report.runs import read_run

    runs = [read_run(output / arm.name) for arm in arms]

    rates = ", ".join(f"{pace} {rate:g}" for pace, rate in RATES.items())
    what_came_out = Section(
        "What came out",
        paragraphs=(
            "Pushed down: among groups whose good and bad completions share a beginning, the share in which a shared "
            "token of a correct completion receives a negative update in total, under plain advantages (before) and "
            "under the method's own weights (after: GTPO's masks; GRPO has none). Collapsed: held-out accuracy below "
            "half of the warm start's, or the right format in fewer than half of the completions.",
        ),
        table=Table(COLUMNS, [[two_lines(cell) for cell in row] for row in rows]),
    )
    write_page(
        output / "index.html",
        title="GRPO and GTPO on the built-in arithmetic task",
        intro=(
            f"{seeds} seeds a row, {steps} steps of 8 prompts x 8 completions, the paper's rewards (format 0 to 10, "
            f"accuracy 0 to 10), learning rates {rates}. Accuracy, pass@4, format and entropy are sampled at "
            f"temperature 1 on {HELD_OUT} held-out problems, 4 completions each, after the last step. Below a mean: "
            "the lowest and the highest seed."
        ),
        tabs=report_tabs(report_arms(runs, {arm.name: arm.label for arm in arms}), first=[what_came_out]),
    )
