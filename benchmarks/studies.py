"""What the studies share: ordinary runs from the embedded warm start, a table of them, and the page that holds it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from trimtab.demo import Arm, arm_config, run_arms
from trimtab.files import read_lines

DOCS = Path(__file__).resolve().parent.parent / "docs"

Lines = list[dict[str, Any]]
Rows = list[tuple[str, ...]]


def run_study(
    arms: Sequence[Arm], change: Callable[[Arm, dict[str, Any]], None], folder: Path, *, steps: int, workers: int
) -> dict[Arm, Lines]:
    """Run what is not there yet: the demo's configuration (8 prompts x 8 completions a step), changed for each arm.

    Args:
        arms: method, setting and seed of each run.
        change: changes the configuration of an arm in place.
        folder: of the runs.
        steps: training steps, after which the held-out problems are judged.
        workers: runs at a time, one thread each.

    Returns:
        Every arm's metrics.
    """
    folder.mkdir(parents=True, exist_ok=True)
    configs = {}
    for arm in arms:
        values = arm_config(Arm("gtpo", "healthy", arm.seed), folder, steps)
        values["evaluation"]["every"] = steps
        values |= {"log": {"samples": 0, "samples_every": steps}, "output": str(folder / arm.name)}
        values["checkpoint"] = {"every": steps, "keep": 1}
        change(arm, values)
        configs[arm] = folder / f"{arm.name}.yaml"
        configs[arm].write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    run_arms(configs, steps=steps, workers=workers)
    return {arm: read_lines(folder / arm.name / "metrics.jsonl") for arm in arms}


def largest(runs: Sequence[Lines], key: str) -> list[float]:
    """The largest value that a metric had in each run; 0 where it was never measured."""
    return [max((line[key] for line in lines[1:] if line.get(key) is not None), default=0.0) for lines in runs]


def markdown(columns: Sequence[str], rows: Rows) -> str:
    """A Markdown table."""
    lines = [tuple(columns), ("---",) * len(columns), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def write_block(page: str, name: str, text: str) -> None:
    """Replace what stands between `<!-- NAME -->` and `<!-- end of NAME -->` on a page of the documentation.

    Raises:
        ValueError: the page has no such block.
    """
    path = DOCS / page
    before = path.read_text(encoding="utf-8")
    block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    if not block.search(before):
        raise ValueError(f"{path} has no block called {name}")
    path.write_text(block.sub(lambda found: f"{found[1]}{text}{found[2]}", before), encoding="utf-8")
