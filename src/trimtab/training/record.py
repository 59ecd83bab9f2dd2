"""environment.json and the like: what a reader needs to believe a run."""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml

from trimtab.config import RunConfig
from trimtab.training.checkpoint import replace_file

PACKAGES = ("trimtab", "torch", "transformers", "accelerate", "peft", "datasets", "tokenizers", "numpy", "math-verify")


def peak_memory_mib() -> float:
    """Largest memory of this process so far: of the GPU when there is one, else resident, in MiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def write_environment(run: Path, config: RunConfig, *, resumed_at: int | None) -> None:
    """Write config.yaml (resolved) and environment.json; a resumed run adds to the list of its starts."""
    text = yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True)
    replace_file(run / "config.yaml", text.encode())
    path = run / "environment.json"
    starts: list[dict[str, Any]] = []
    if resumed_at is not None and path.exists():
        starts = json.loads(path.read_text(encoding="utf-8"))["starts"]
    starts.append({"command": sys.argv, "resumed_at_step": resumed_at, "commit": commit()})
    environment = {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "machine": {
            "system": platform.platform(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
        "seed": config.seed,
        "starts": starts,
    }
    replace_file(path, json.dumps(environment, indent=1).encode())


def commit() -> str | None:
    """The commit of the source tree that runs, when this file is tracked in a git checkout."""
    here = Path(__file__)
    try:
        for question in (["ls-files", "--error-unmatch", here.name], ["rev-parse", "--verify", "HEAD"]):
            answer = subprocess.run(
                ["git", "-C", str(here.parent), *question], capture_output=True, text=True, timeout=5, check=True
            )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def write_model_card(folder: Path, run: Path, config: RunConfig, metrics: dict[str, float]) -> None:
    """README.md beside the weights: method, settings, data, results and what the run cost."""
    timings = [json.loads(line) for line in (run / "timings.jsonl").read_text(encoding="utf-8").splitlines()]
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
