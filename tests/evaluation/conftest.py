"""Folders that look like runs, and an evaluation that takes a second."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path, tiny_model: Path) -> MakeRun:
    """Writes what a training run leaves: `make_run("gtpo-seed0", steps=[2, 4], accuracy={2: 0.5, 4: 0.25})`.

    The checkpoints are links to the tiny model.
    """

    def make(name: str, *, steps: list[int], seed: int = 0, method: str = "gtpo", accuracy: Any = None) -> Path:
        run = tmp_path / name
        (run / "checkpoints").mkdir(parents=True)
        values = {
            "method": method,
            "model": {"name": str(tiny_model)},
            "data": {"source": "builtin:arithmetic"},
            "prompt": {"template": "{prompt} "},
            "output": str(run),
            "seed": seed,
        }
        (run / "config.yaml").write_text(yaml.safe_dump(values))
        for step in steps:
            folder = run / "checkpoints" / f"step_{step}"
            folder.mkdir()
            for file in tiny_model.iterdir():
                (folder / file.name).symlink_to(file)
            (folder / "trainer_state.json").write_text("{}")
        lines = [{"step": step, "eval/accuracy": value} for step, value in (accuracy or {}).items()]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return run

    return make


Configure = Callable[..., Path]


@pytest.fixture
def evaluation(tmp_path: Path, tiny_model: Path) -> Configure:
    """Writes a configuration of `trimtab evaluate`: three problems, four samples of six tokens from the tiny model."""
    rows = [{"id": f"p{n}", "prompt": f"{n} + 1 =", "answer": n + 1} for n in range(3)]
    data = tmp_path / "problems.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def write(changes: dict[str, Any] | None = None) -> Path:
        values: dict[str, Any] = {
            "models": [{"model": str(tiny_model), "label": "tiny"}],
            "data": [{"source": str(data)}],
            "samples": 4,
            "k": [1, 4],
            "majority_k": [4],
            "sampling": {"max_completion_tokens": 6},
            "output": str(tmp_path / "evaluation"),
            **(changes or {}),
        }
        path = tmp_path / "evaluate.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write
