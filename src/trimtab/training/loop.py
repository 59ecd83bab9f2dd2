"""The one training loop: accumulate, clip, step, log, evaluate, checkpoint, resume.

What is trained is an `Objective` (rl.py, sft.py): it yields the losses of micro-batches, the loop does the rest.
Everything random is a function of the seed, the step and a name, so a run that was killed and started again continues
bit for bit.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor

from trimtab.config import OptimizerSection, RunConfig
from trimtab.environment import peak_memory_mib
from trimtab.errors import Interrupted
from trimtab.files import append_lines
from trimtab.policy.loading import Policy, no_bars
from trimtab.progress import Progress
from trimtab.seeds import derive_seed
from trimtab.training.checkpoint import load_optimizer, save_checkpoint, trainable
from trimtab.training.record import write_environment, write_model_card
from trimtab.training.rollback import STOP, Attempt, Guard, obey, tidy_logs

logger = logging.getLogger("trimtab")


class Objective(Protocol):
    """What a kind of run gives to the loop."""

    def begin(self) -> dict[str, float]:
        """Called once on the untouched policy; what it returns is logged as step 0."""

    def updates(self, step: int) -> Iterator[Iterable[Tensor]]:
        """For each optimizer step of this training step, the micro-batch losses, computed as they are asked for."""

    def metrics(self) -> dict[str, float]:
        """The finished step's metrics, over all processes."""

    def samples(self, step: int) -> list[dict[str, Any]]:
        """Completions of the finished step that a person may want to read."""

    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics on held-out rows; empty when there are none."""

    def state(self) -> dict[str, Any]:
        """JSON that goes into every checkpoint."""

    def load_state(self, state: dict[str, Any]) -> None:
        """The opposite."""

    def save(self, folder: Path) -> None:
        """Write what else a resumed run needs into a checkpoint's folder."""

    def load(self, folder: Path) -> None:
        """The opposite."""


def learning_rate_at(step: int, steps: int, settings: OptimizerSection) -> float:
    """Learning rate of training step 1..steps: linear warm-up, then constant, linear or cosine down to 0."""
    warmup = settings.warmup_ratio * steps
    if step <= warmup:
        return settings.learning_rate * step / warmup
    if settings.schedule == "constant":
        return settings.learning_rate
    # A warm-up of 1.5 steps ends between two steps: the first one after it is at the peak, not above.
    progress = max(0.0, step - 1 - warmup) / max(1.0, steps - warmup)
    factor = 1.0 - progress if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.learning_rate * max(0.0, factor)


def make_optimizer(parameters: list[torch.nn.Parameter], settings: OptimizerSection) -> torch.optim.Optimizer:
    """The optimizer; biases and norms (vectors) get no weight decay, as is the custom."""
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=settings.learning_rate)
    betas = (settings.beta1, settings.beta2)
    # fused does the same arithmetic as foreach in one pass over memory
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, eps=settings.epsilon, fused=True)


def names_in_order(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[str]:
    """Parameter names in the optimizer's own order (its groups reorder them)."""
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def write_policy(accelerator: Accelerator, policy: Policy, folder: Path) -> None:
    """Save model and tokenizer as a plain Hugging Face folder (adapters only, when LoRA is trained)."""
    with no_bars():
        policy.model.save_pretrained(folder, save_function=accelerator.save)  # type: ignore[operator]
        policy.tokenizer.save_pretrained(folder)


def train(
    config: RunConfig,
    policy: Policy,
    objective: Objective,
    accelerator: Accelerator,
    *,
    steps: int,
    progress: Progress,
    found: tuple[Path, dict[str, Any]] | None = None,
) -> dict[str, float]:
    """Run (or continue) training until `steps` steps are done.

    Args:
        config: the resolved configuration.
        policy: at the newest checkpoint's weights when there is one.
        objective: what to train.
        accelerator: device, precision, processes, trackers.
        steps: training steps in all.
        progress: where to show it.
        found: that checkpoint and its state, from `newest_checkpoint`.

    Returns:
        The last line of metrics.

    Raises:
        Interrupted: SIGINT or SIGTERM; the checkpoint is written.
        RunError: the run collapsed and is to stop; the checkpoint is written.
        RolledBack: it collapsed and is to go back (rollback.py).
    """
    run = Path(config.output)
    main = accelerator.is_main_process
    names, parameters = trainable(policy.model)
    optimizer = make_optimizer(parameters, config.optimizer)
    ordered_names = names_in_order(optimizer, {id(p): n for n, p in zip(names, parameters, strict=True)})
    metrics_path, samples_path, timing_path = run / "metrics.jsonl", run / "samples.jsonl", run / "timings.jsonl"

    done, attempt = 0, Attempt()
    if found:
        path, state = found
        done = int(state["step"])
        if done >= steps:
            progress.note(f"nothing to do: {path} is the last of {steps} steps")
            return last_metrics(metrics_path)
        load_optimizer(path, optimizer, ordered_names)
        objective.load_state(state["objective"])
        objective.load(path)
        attempt = Attempt(**state.get("attempt", {}))
        progress.note(f"continuing from {path}")
    accelerator.wait_for_everyone()
    if main:
        run.mkdir(parents=True, exist_ok=True)
        # Without a checkpoint the run starts over, its step 0 included.
        tidy_logs(run, done if found else -1, attempt.number)
        write_environment(run, config, resumed_at=done if found else None)
    guard = Guard(config, attempt) if main and config.monitor.on_collapse != "off" else None
    if config.log.trackers and not accelerator.trackers:
        accelerator.init_trackers(config.log.project, config={"output": config.output, "seed": config.seed})

    last: dict[str, float] = {}
    with open(os.devnull if not main else metrics_path, "a", encoding="utf-8") as log, Signals() as signals:

        def record(step: int, metrics: dict[str, float], timing: dict[str, float]) -> None:
            line = {"step": step, **{key: _plain(value) for key, value in metrics.items()}}
            log.write(json.dumps(line) + "\n")
            log.flush()
            if guard:
                guard.observe(line)
            if main:
                append_lines(timing_path, [{"step": step, **timing}])
                if config.log.trackers:
                    accelerator.log({**metrics, **timing}, step=step)
            progress.step(step, steps, metrics)

        def write(folder: Path) -> None:
            write_policy(accelerator, policy, folder)
            objective.save(folder)

        def save(step: int) -> None:
            os.fsync(log.fileno())
            saved = save_checkpoint(
                run,
                step,
                write_model=write,
                optimizer=optimizer,
                names=ordered_names,
                state={"objective": objective.state(), "seed": config.seed, "attempt": asdict(attempt)},
                keep=config.checkpoint.keep,
                spare=guard.spare(step) if guard else (),
            )
            if step == steps:
                write_model_card(saved, run, config, last)

        if not found:
            started = time.perf_counter()
            torch.manual_seed(derive_seed(config.seed, 0, "torch"))
            last = {**objective.begin(), **objective.evaluate(0)}
            record(0, last, {"seconds": time.perf_counter() - started})
            if main and config.monitor.on_collapse == "rollback":
                save(0)
        obey(_agreed(accelerator, guard.verdict() if guard else 0), done, guard)

        for step in range(done + 1, steps + 1):
            started = time.perf_counter()
            drawn = step + attempt.skipped
            torch.manual_seed(derive_seed(config.seed, drawn, "torch"))
            rate = learning_rate_at(step, steps, config.optimizer) * attempt.rate
            for group in optimizer.param_groups:
                group["lr"] = rate
            norms, skipped = [], 0
            for losses in objective.updates(drawn):
                norm = update(losses, parameters, optimizer, accelerator, config.optimizer.max_grad_norm)
                if norm is None:
                    skipped += 1
                else:
                    norms.append(norm)
            last = objective.metrics()
            last |= {
                "grad_norm": sum(norms) / len(norms) if norms else 0.0,
                "learning_rate": rate,
                "skipped_updates": float(skipped),
            }
            trained = time.perf_counter()
            if step % config.evaluation.every == 0 or step == steps:
                last |= objective.evaluate(step)
            timing = {"seconds": trained - started, "evaluation_seconds": time.perf_counter() - trained}
            if main and (step % config.log.samples_every == 0 or step == steps):
                append_lines(samples_path, objective.samples(step))
            record(step, last, {**timing, "peak_memory_mib": peak_memory_mib()})
            stopping = _agreed(accelerator, signals.code)
            verdict = _agreed(accelerator, guard.verdict() if guard else 0)
            # A run that goes back has no use for a checkpoint of where it was.
            due = step % config.checkpoint.every == 0 or step == steps or stopping or verdict == STOP
            if main and due and (stopping or verdict <= STOP):
                save(step)
            if stopping and step < steps:
                raise Interrupted(stopping)
            if verdict:
                # A launcher ends the others when one process leaves, and this one's checkpoint may still be written.
                accelerator.wait_for_everyone()
            obey(verdict, step, guard)
    return last


def update(
    losses: Iterable[Tensor],
    parameters: list[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
    max_grad_norm: float,
) -> float | None:
    """One optimizer step over micro-batch losses that add up to the batch's loss.

    Returns:
        The gradient's norm before clipping; None when there was nothing to learn from (no loss, or a gradient that is
        not finite) and the step was left out, on all processes alike.
    """
    optimizer.zero_grad(set_to_none=True)
    count = 0
    for loss in losses:
        accelerator.backward(loss)
        count += 1
    if accelerator.num_processes > 1:
        count = int(accelerator.reduce(torch.tensor(count, device=accelerator.device), "sum"))
        if count:
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                # The denominators are those of all processes together, so gradients add up.
                parameter.grad = accelerator.reduce(parameter.grad, "sum")
    if not count:
        return None
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    if not bool(norm.isfinite()):
        logger.warning("the gradient is not finite; this update is left out")
        return None
    optimizer.step()
    return float(norm)


class Signals:
    """Turns SIGINT and SIGTERM into a flag that the loop reads after the step; a second SIGINT leaves at once."""

    def __init__(self) -> None:
        self.code = 0
        self._old: dict[int, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.code and number == signal.SIGINT:
            sys.exit(128 + number)
        self.code = 128 + number
        logger.warning("finishing this step, then writing a checkpoint")

    def __enter__(self) -> Signals:
        try:
            self._old = {n: signal.signal(n, self._handle) for n in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:
            # Only the main thread may install handlers; elsewhere the caller's stay in force.
            self._old = {}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)


def last_metrics(path: Path) -> dict[str, float]:
    """The metrics of a log's last line; empty when there is none."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    values = json.loads(lines[-2]) if len(lines) > 1 else {}
    return {key: math.nan if value is None else value for key, value in values.items() if key != "step"}


def _plain(value: float) -> float | None:
    """JSON has no NaN."""
    value = float(value)
    return value if math.isfinite(value) else None


def _agreed(accelerator: Accelerator, code: int) -> int:
    """The largest code of any process, by which all of them go."""
    if accelerator.num_processes == 1:
        return code
    return int(accelerator.gather(torch.tensor([code], device=accelerator.device)).max())
