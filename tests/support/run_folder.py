"""What a run left behind."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class RunFolder:
    """Reads the files of a run."""

    path: Path

    def lines(self, name: str) -> list[dict[str, Any]]:
        """A JSONL file."""
        return [json.loads(line) for line in (self.path / name).read_bytes().splitlines()]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, step 0 first."""
        return self.lines("metrics.jsonl")

    @property
    def steps(self) -> list[int]:
        """The steps in metrics.jsonl."""
        return [line["step"] for line in self.metrics]

    def column(self, name: str) -> list[Any]:
        """One metric at steps 1, 2, ..."""
        return [line[name] for line in self.metrics if line["step"] > 0]

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint."""
        return max((self.path / "checkpoints").glob("step_*"), key=lambda p: int(p.name.removeprefix("step_")))

    @property
    def weights(self) -> dict[str, Tensor]:
        """The newest checkpoint's tensors."""
        return load_weights(self.checkpoint)

    @property
    def everything(self) -> dict[str, bytes]:
        """Each file that must not depend on when a run was stopped, by its content."""
        files = [self.path / name for name in ("metrics.jsonl", "samples.jsonl")]
        files += sorted(self.checkpoint.glob("*.safetensors"))
        return {f"{self.checkpoint.name}/{file.name}": file.read_bytes() for file in files}


def load_weights(folder: Path) -> dict[str, Tensor]:
    """A model folder's tensors."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest difference of two models in any weight."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).detach().abs().max()) for name in one)
