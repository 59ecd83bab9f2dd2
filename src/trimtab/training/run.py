"""From a configuration to a finished run: everything that can fail cheaply fails before the model loads."""

from __future__ import annotations

import copy
import importlib.util
import logging
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from trimtab.config import SFT, RunConfig
from trimtab.errors import InputError
from trimtab.policy.loading import Lora, Policy, load_policy, load_tokenizer, longest_sequence, resolve_model
from trimtab.policy.rollouts import Rollouts
from trimtab.policy.scorer import Scorer
from trimtab.seeds import derive_seed
from trimtab.tasks.rewards import load_rewards
from trimtab.training.checkpoint import newest_checkpoint
from trimtab.training.data import encode_rows, load_task_rows, prompt_limit
from trimtab.training.loop import Objective, train
from trimtab.training.progress import Progress
from trimtab.training.rl import GroupRelative, check_processes
from trimtab.training.sft import SupervisedFineTuning, encode_completions

logger = logging.getLogger("trimtab")

DECISIVE_KEYS = (
    *("method", "seed", "model", "sampling", "optimizer", "rewards", "prompt", "data"),
    *("training.batch_size", "training.updates_per_rollout", "training.mixed_precision"),
)
"""What a run cannot change half-way; it may train longer, log more, or split its batches otherwise."""


@dataclass(frozen=True)
class AdapterOff:
    """The reference of a LoRA run: the same model with its adapters switched off, so no second copy is held."""

    policy: Policy
    scorer: Scorer

    def score(self, rollouts: Rollouts, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """See `Scorer.score`."""
        with self.policy.model.disable_adapter():  # type: ignore[operator]
            return self.scorer.score(rollouts, temperature=temperature)


def run_training(config: RunConfig, *, quiet: bool = False, title: str | None = None) -> dict[str, float]:
    """Train as configured, or continue where the run's folder left off.

    Args:
        config: the resolved configuration.
        quiet: no progress.
        title: name in the progress display; default: the folder's.

    Returns:
        The last step's metrics.

    Raises:
        InputError: data, rewards or model cannot be used as configured.
        RunError: too many rows without a reward.
        Interrupted: a signal; the checkpoint is written.
    """
    if config.training.threads:
        torch.set_num_threads(config.training.threads)
    rewards = load_rewards(
        config.rewards if isinstance(config.rewards, str) else [r.model_dump() for r in config.rewards]
    )
    supervised = config.method["name"] == SFT
    needs_answer = isinstance(config.rewards, str) and not supervised
    for tracker in config.log.trackers:
        if importlib.util.find_spec(tracker) is None:
            raise InputError(f"log.trackers: {tracker} is not installed; pip install {tracker}, or leave it out")
    model = config.model
    resolve_model(model.name, model.gguf_file)
    rows = load_task_rows(
        config.data, config.prompt, required=["completion"] if supervised else ["answer"] if needs_answer else []
    )
    held_out_rows = None
    if config.evaluation.data is not None:
        held_out_rows = load_task_rows(
            config.evaluation.data, config.prompt, required=["answer"] if needs_answer else []
        )
    _check_output(config)

    tokenizer = load_tokenizer(
        model.name, revision=model.revision, gguf_file=model.gguf_file, trust_remote_code=model.trust_remote_code
    )
    positions = longest_sequence(model.name, model.gguf_file)
    limit = prompt_limit(config.data, positions, config.sampling.max_completion_tokens)
    prompts = encode_rows(rows, tokenizer, config.prompt, source=config.data.source, limit=limit)
    held_out = None
    if held_out_rows is not None and config.evaluation.data is not None:
        source = config.evaluation.data
        limit = prompt_limit(source, positions, config.sampling.max_completion_tokens)
        held_out = encode_rows(held_out_rows, tokenizer, config.prompt, source=source.source, limit=limit)

    completions = []
    if supervised:
        completions = encode_completions(prompts, tokenizer, config.sampling.max_completion_tokens)

    accelerator = Accelerator(
        mixed_precision=config.training.mixed_precision,
        log_with=list(config.log.trackers) or None,
        project_dir=config.output,
        cpu=not torch.cuda.is_available(),
    )
    check_processes(config, accelerator.num_processes)
    found = newest_checkpoint(Path(config.output))
    # New adapters are drawn from torch's global generator.
    torch.manual_seed(derive_seed(config.seed, "model"))
    policy = load_policy(
        model.name,
        tokenizer=tokenizer,
        revision=model.revision,
        gguf_file=model.gguf_file,
        dtype=model.dtype,
        lora=Lora(**model.lora.model_dump()) if model.lora else None,
        quantization=model.quantization,
        gradient_checkpointing=model.gradient_checkpointing,
        trust_remote_code=model.trust_remote_code,
        device=accelerator.device,
        checkpoint=found[0] if found else None,
    )
    policy.model.train()
    parts = (config, policy, prompts, held_out, rewards, accelerator)
    objective: Objective
    if supervised:
        objective = SupervisedFineTuning(*parts, completions=completions)
        per_step = config.training.batch_size
    else:
        objective = GroupRelative(*parts, reference=make_reference(config, policy, resumed=found is not None))
        per_step = config.prompts_per_step
    steps = config.training.steps or max(1, math.floor(config.training.epochs * len(prompts) / per_step))
    progress = Progress(title=title or Path(config.output).name, quiet=quiet or not accelerator.is_main_process)
    try:
        return train(config, policy, objective, accelerator, steps=steps, progress=progress, found=found)
    finally:
        progress.close()


def make_reference(config: RunConfig, policy: Policy, *, resumed: bool) -> Any:
    """The frozen policy that a KL term is measured against; None when the method's beta is 0 (no copy is made)."""
    beta = config.method.get("beta")
    if not beta:
        return None
    if config.model.lora is not None:
        return AdapterOff(policy, Scorer(policy.model))
    model = policy.model
    if resumed:
        # The policy has moved since; the reference is where it started.
        section = config.model
        model = load_policy(
            section.name,
            tokenizer=policy.tokenizer,
            revision=section.revision,
            gguf_file=section.gguf_file,
            dtype=section.dtype,
            trust_remote_code=section.trust_remote_code,
            device=policy.device,
        ).model
    else:
        model = copy.deepcopy(model)
    model.eval().requires_grad_(False)
    return Scorer(model)


def _check_output(config: RunConfig) -> None:
    """Refuse a folder that holds another run; remove what a killed checkpoint left."""
    run = Path(config.output)
    if run.exists() and not run.is_dir():
        raise InputError(f"output: {run} is a file; name a folder")
    for leftover in (run / "checkpoints").glob(".step_*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    parent = next((p for p in (run, *run.parents) if p.exists()), Path())
    if not os.access(parent, os.W_OK):
        raise InputError(f"output: {run} cannot be written; name another folder")
    previous = run / "config.yaml"
    if not previous.exists():
        return
    import yaml

    before = yaml.safe_load(previous.read_text(encoding="utf-8")) or {}
    now = config.model_dump()
    for key in DECISIVE_KEYS:
        section, _, name = key.partition(".")
        old, new = before.get(section), now[section]
        if name:
            old, new = (old or {}).get(name), new[name]
        if old != new:
            raise InputError(
                f"output: {run} holds a run with another {key}; continue it with the configuration it was started "
                "with, or name another folder"
            )
