"""What a reader needs to know of the machine and the software to believe a result."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("trimtab", "torch", "transformers", "accelerate", "peft", "datasets", "tokenizers", "numpy", "math-verify")


def describe_environment() -> dict[str, Any]:
    """Versions of what matters, and the machine."""
    import torch

    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "machine": {
            "system": platform.platform(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
    }


def peak_memory_mib() -> float:
    """Largest memory of this process so far: of the GPU when there is one, else resident, in MiB."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


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
