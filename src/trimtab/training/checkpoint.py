"""Checkpoints that are whole or absent, and log files that a resumed run continues as if it had never stopped.

A checkpoint is a plain Hugging Face folder with two more files: `trainer/optimizer.safetensors` and
`trainer_state.json`. It is written under a temporary name, fsynced and renamed. Nothing is pickled.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from trimtab import files

logger = logging.getLogger("trimtab")

STATE_FILE = "trainer_state.json"
# In a folder of its own: vLLM takes every *.safetensors beside the config for weights.
OPTIMIZER_FILE = "trainer/optimizer.safetensors"


def save_checkpoint(
    run: Path,
    step: int,
    *,
    write_model: Callable[[Path], None],
    optimizer: torch.optim.Optimizer,
    names: list[str],
    state: dict[str, Any],
    keep: int,
    spare: Collection[Path] = (),
) -> Path:
    """Write checkpoints/step_N and remove all but the newest `keep` and `spare`.

    Args:
        run: the run's folder.
        step: number of finished steps.
        write_model: saves model and tokenizer into a folder.
        optimizer: its tensors are stored by parameter name.
        names: parameter names in the optimizer's order.
        state: anything JSON that the run needs to continue.
        keep: how many checkpoints stay.
        spare: older checkpoints that stay as well.
    """
    target = run / "checkpoints" / f"step_{step}"
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_model(temporary)
    tensors = {}
    for index, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            tensors[f"{key}/{names[index]}"] = value.contiguous() if torch.is_tensor(value) else torch.tensor(value)
    (temporary / OPTIMIZER_FILE).parent.mkdir(exist_ok=True)
    save_file(tensors, temporary / OPTIMIZER_FILE)
    sizes = {str(p.relative_to(temporary)): p.stat().st_size for p in sorted(temporary.rglob("*")) if p.is_file()}
    (temporary / STATE_FILE).write_text(json.dumps({"step": step, "files": sizes, **state}, indent=1), encoding="utf-8")
    for path in temporary.rglob("*"):
        files.sync(path)
    files.sync(temporary)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    files.sync(target.parent)
    found = checkpoints(run)
    place = found.index(target)
    # What has a higher number was torn, or this run would have continued from there.
    for old in found[: max(0, place + 1 - keep)] + found[place + 1 :]:
        if old not in spare:
            shutil.rmtree(old, ignore_errors=True)
    return target


def checkpoints(run: Path) -> list[Path]:
    """Checkpoint folders by ascending step, whole or not."""
    found = []
    for path in (run / "checkpoints").glob("step_*"):
        number = path.name.removeprefix("step_")
        if path.is_dir() and number.isdigit():
            found.append((int(number), path))
    return [path for _, path in sorted(found)]


def newest_checkpoint(run: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole checkpoint and its state; torn ones are skipped with a warning."""
    for path in reversed(checkpoints(run)):
        state = read_state(path)
        if state is not None:
            return path, state
    return None


def read_state(path: Path) -> dict[str, Any] | None:
    """A checkpoint's state; None, with a warning, when the checkpoint is not whole."""
    try:
        state: dict[str, Any] = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        for name, size in state["files"].items():
            if (path / name).stat().st_size != size:
                raise ValueError(f"{name} has the wrong size")
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is not whole and is skipped: %s", path, error)
        return None
    return state


def load_optimizer(path: Path, optimizer: torch.optim.Optimizer, names: list[str]) -> None:
    """Put the stored tensors back; `names` are the parameter names in the optimizer's order."""
    stored = load_file(path / OPTIMIZER_FILE)
    state_dict = optimizer.state_dict()
    state: dict[int, dict[str, torch.Tensor]] = {}
    place = {name: index for index, name in enumerate(names)}
    for full, tensor in stored.items():
        key, _, name = full.partition("/")
        state.setdefault(place[name], {})[key] = tensor
    state_dict["state"] = state
    optimizer.load_state_dict(state_dict)


def trainable(model: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
    """Names and parameters that require a gradient, in the model's order."""
    pairs = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [name for name, _ in pairs], [parameter for _, parameter in pairs]


def cut_log(path: Path, last_step: int) -> None:
    """Drop every line after `last_step` (and a torn last line), so that the resumed run writes them again."""
    keep_lines(path, lambda line: bool(line["step"] <= last_step))


def keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Drop the lines of a log that are not wanted and those that are torn; a log that is not there stays so.

    Returns:
        What was dropped, without the torn lines.
    """
    kept, dropped = [], []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            values = json.loads(line)
            if wanted(values):
                kept.append(line + b"\n")
            else:
                dropped.append(values)
        except (ValueError, KeyError):
            continue
    if path.exists():
        files.replace_file(path, b"".join(kept))
    return dropped
