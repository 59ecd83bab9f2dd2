"""How often the collapse monitor cries wolf on healthy runs, and how late it sees a collapse.

The runs: the built-in arithmetic task as in the demo (8 prompts x 8 completions a step, the paper's rewards, no
evaluation), GRPO for even seeds and GTPO for odd ones, each seed at three paces: *healthy* (learning rate 5e-5, 100
steps), *aggressive* (5e-4, 100 steps) and *late* (a linear warm-up to 5e-4 over the first 40 of 80 steps, so that a
healthy stretch comes before the collapse; seeds 5 to 14). A run that is there already is not repeated.

The truth that the monitor is held against knows nothing of it: a run's collapse begins at the first step from which
every mean of five consecutive accuracy rewards stays below half of the level that the healthy run of the same seed had
in its first ten steps, to the end of the run.

The monitor's constants were chosen on seeds 0 to 4, healthy and aggressive; the numbers that count are of the others.
Shares have Wilson's 95 % interval, delays (steps from the true beginning) their median and range.

`--synthetic` measures false alarms on made-up series instead, with autocorrelated noise and with progress: six reward
signals around zero, where a change of any size counts, which is the hardest case, and series with the levels and the
noise of a healthy run of the built-in task.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from trimtab.demo import METHODS, RATES, Arm, arm_config, run_arms
from trimtab.files import read_lines
from trimtab.training.monitor import Finding, Monitor, replay

STEPS = {"healthy": 100, "aggressive": 100, "late": 80}
SEEDS = 15
CHOSEN_ON = 5
ACCURACY = "rewards/accuracy/mean"


def write_config(arm: Arm, folder: Path) -> Path:
    """The configuration of one run."""
    steps = STEPS[arm.pace]
    pace = arm.pace if arm.pace in RATES else "aggressive"
    values = arm_config(Arm(arm.method, pace, arm.seed), folder, steps)
    del values["evaluation"]
    if arm.pace == "late":
        values["optimizer"]["warmup_ratio"] = 0.5
    values |= {
        "checkpoint": {"every": steps, "keep": 1},
        "log": {"samples": 0, "samples_every": steps},
        "output": str(folder / arm.name),
    }
    path = folder / f"{arm.name}.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return path


def true_onset(lines: list[dict[str, Any]], healthy: list[dict[str, Any]]) -> int | None:
    """First step of the collapse by the definition above; None: there is none."""
    level = statistics.fmean(line[ACCURACY] for line in healthy[1:11])
    values = [line[ACCURACY] for line in lines[1:]]
    means = [statistics.fmean(values[i : i + 5]) for i in range(len(values) - 4)]
    onset = len(means)
    while onset and means[onset - 1] < level / 2:
        onset -= 1
    return onset + 1 if onset < len(means) else None


def wilson(hits: int, count: int) -> str:
    """A share and its 95 % interval."""
    z, share = 1.96, hits / count
    centre, spread = share + z * z / (2 * count), z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    low, high = (max(0.0, (centre + sign * spread) / (1 + z * z / count)) for sign in (-1, 1))
    return f"{hits} of {count} ({low:.0%} to {high:.0%})"


def delays(values: list[int]) -> str:
    """Median and range."""
    return f"median {statistics.median(values):g}, {min(values)} to {max(values)}" if values else "none"


def report(runs: dict[Arm, list[dict[str, Any]]], seeds: list[int]) -> None:
    """Print false alarms and delays over the given seeds."""
    found: dict[Arm, list[Finding]] = {arm: replay(lines) for arm, lines in runs.items()}
    for pace in STEPS:
        arms = [arm for arm in runs if arm.pace == pace and arm.seed in seeds]
        if not arms:
            continue
        any_finding = sum(bool(found[arm]) for arm in arms)
        declared = {arm: next((f.step for f in found[arm] if f.collapse), None) for arm in arms}
        print(f"{pace}: runs with a finding {wilson(any_finding, len(arms))}; ", end="")
        print(f"with collapse declared {wilson(sum(d is not None for d in declared.values()), len(arms))}")
        onsets = {arm: true_onset(runs[arm], runs[Arm(arm.method, "healthy", arm.seed)]) for arm in arms}
        true = {arm: onset for arm, onset in onsets.items() if onset is not None}
        print(f"  collapsed in truth: {len(true)} of {len(arms)}")
        if not true:
            continue
        first = [found[arm][0].step - onset for arm, onset in true.items() if found[arm]]
        whole = [step - onset for arm, onset in true.items() if (step := declared[arm]) is not None]
        wrong = [found[arm][0].onset - onset for arm, onset in true.items() if found[arm]]
        print(f"  true beginning: {delays(list(true.values()))}")
        print(f"  from there to the first finding: {delays(first)}; to collapse declared: {delays(whole)}")
        print(f"  estimated beginning less true one: {delays(wrong)}")


def autocorrelated(count: int, correlation: float, generator: np.random.Generator) -> np.ndarray[Any, Any]:
    """Gaussian noise of variance 1 in which each value follows the one before."""
    values = generator.standard_normal(count)
    for place in range(1, count):
        values[place] = correlation * values[place - 1] + math.sqrt(1 - correlation**2) * values[place]
    return values


Maker = Callable[[Callable[[], "np.ndarray[Any, Any]"], "np.ndarray[Any, Any]"], dict[str, "np.ndarray[Any, Any]"]]


def around_zero(noise: Callable[[], np.ndarray[Any, Any]], progress: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Six reward signals of level 0; progress in units of the noise."""
    names = ("reward", "eval/accuracy", "eval/format", *(f"rewards/{part}/mean" for part in "abc"))
    return {name: noise() + progress for name in names}


def as_built_in(noise: Callable[[], np.ndarray[Any, Any]], progress: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Levels and noise of a healthy run of the built-in task."""
    return {
        "entropy": 0.44 * np.exp(0.03 * (noise() - progress)),
        "completions/mean_length": 47 * np.exp(0.08 * noise()),
        "grad_norm": 0.32 * np.exp(0.25 * noise()),
        "reward": 15 + 1.15 * (noise() + progress),
        "rewards/accuracy/mean": 5 + 1.15 * (noise() + progress),
        "rewards/format/mean": np.minimum(10.0, 9.95 + 0.09 * noise()),
    }


def synthetic(make: Maker, correlation: float, progress: float, *, steps: int, runs: int) -> int:
    """Runs with any finding, of `runs`."""
    generator = np.random.default_rng([round(100 * correlation), round(10 * progress)])
    alarms = 0
    for _ in range(runs):
        columns = make(lambda: autocorrelated(steps, correlation, generator), np.linspace(0, progress, steps))
        monitor = Monitor()
        lines = ({name: float(values[step]) for name, values in columns.items()} for step in range(steps))
        alarms += any(monitor.observe(step, line) for step, line in enumerate(lines))
    return alarms


def main() -> None:
    """Run what is missing, then print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("monitor_calibration"), help="folder of the runs")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--synthetic", action="store_true", help="made-up series instead of runs")
    parser.add_argument("--steps", type=int, default=300, help="synthetic: steps of a run")
    parser.add_argument("--runs", type=int, default=300, help="synthetic: runs a line")
    options = parser.parse_args()
    if options.synthetic:
        makers: dict[str, Maker] = {"around zero": around_zero, "as the built-in task": as_built_in}
        for name, make in makers.items():
            for correlation in (0.0, 0.3, 0.5, 0.7):
                for progress in (0.0, 3.0):
                    alarms = synthetic(make, correlation, progress, steps=options.steps, runs=options.runs)
                    share = wilson(alarms, options.runs)
                    print(f"{name}, autocorrelation {correlation}, progress {progress:g} sd: {share}", flush=True)
        return
    options.output.mkdir(parents=True, exist_ok=True)
    arms = [
        Arm(METHODS[seed % 2], pace, seed)
        for seed in range(SEEDS)
        for pace in STEPS
        if pace != "late" or seed >= CHOSEN_ON
    ]
    for pace, steps in STEPS.items():
        configs = {arm: write_config(arm, options.output) for arm in arms if arm.pace == pace}
        run_arms(configs, steps=steps, workers=options.workers)
    runs = {arm: read_lines(options.output / arm.name / "metrics.jsonl") for arm in arms}
    for title, seeds in (
        (f"seeds 0 to {CHOSEN_ON - 1}, on which the constants were chosen", list(range(CHOSEN_ON))),
        (f"seeds {CHOSEN_ON} to {SEEDS - 1}", list(range(CHOSEN_ON, SEEDS))),
    ):
        print(f"-- {title}")
        report(runs, seeds)


if __name__ == "__main__":
    main()
