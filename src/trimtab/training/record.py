"""environment.json and the like: what a reader needs to believe a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from trimtab.config import RunConfig
from trimtab.environment import commit, describe_environment
from trimtab.files import read_lines, replace_file


def write_environment(run: Path, config: RunConfig, *, resumed_at: int | None) -> None:
    """Write config.yaml (resolved) and environment.json; a resumed run adds to the list of its starts."""
    text = yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True)
    replace_file(run / "config.yaml", text.encode())
    path = run / "environment.json"
    starts: list[dict[str, Any]] = []
    if resumed_at is not None and path.exists():
        starts = json.loads(path.read_text(encoding="utf-8"))["starts"]
    starts.append({"command": sys.argv, "resumed_at_step": resumed_at, "commit": commit()})
    environment = {**describe_environment(), "seed": config.seed, "starts": starts}
    replace_file(path, json.dumps(environment, indent=1).encode())


def write_model_card(folder: Path, run: Path, config: RunConfig, metrics: dict[str, float]) -> None:
    """README.md beside the weights: method, settings, data, results and what the run cost."""
    timings = read_lines(run / "timings.jsonl")
    seconds = sum(line.get("seconds", 0.0) + line.get("evaluation_seconds", 0.0) for line in timings)
    peak = max((line.get("peak_memory_mib", 0.0) for line in timings), default=0.0)
    results = "\n".join(f"| {key} | {value:.4g} |" for key, value in sorted(metrics.items()))
    settings = yaml.safe_dump(config.model_dump(exclude_defaults=True), sort_keys=False, allow_unicode=True)
    card = {
        "library_name": "transformers",
        "base_model": config.model.name,
        "tags": ["trimtab", config.method["name"]],
    }
    text = (
        f"---\n{yaml.safe_dump(card, sort_keys=False)}---\n\n"
        f"# {config.model.name} after {config.method['name']}\n\n"
        f"Trained with trimtab on {config.data.source}: {len(timings) - 1} steps in {seconds:.0f} s "
        f"(evaluations included), peak memory {peak:.0f} MiB.\n\n"
        f"## Settings\n\n```yaml\n{settings}```\n\n"
        f"## Metrics of the last step\n\n| metric | value |\n|---|---|\n{results}\n"
    )
    replace_file(folder / "README.md", text.encode())
