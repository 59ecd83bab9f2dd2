from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_folder import RunFolder

from trimtab.config_file import load_config
from trimtab.training.run import run_training


@pytest.fixture(autouse=True)
def _on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    # Exact equality is promised for CPUs; a machine with a GPU runs these tests as well.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def train(configure: Callable[..., Path]) -> Callable[..., RunFolder]:
    """Trains in this process: `train({"method": "grpo"}, name="other")`."""

    def run(changes: dict[str, Any] | None = None, *, name: str = "run") -> RunFolder:
        config = load_config(configure(changes, name=name))
        run_training(config, quiet=True)
        return RunFolder(Path(config.output))

    return run
