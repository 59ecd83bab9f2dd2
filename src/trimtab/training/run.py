"""From a configuration to a finished run: everything that can fail cheaply fails before the model loads."""

from __future__ import annotations

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

from trimtab.config import RunConfig
from trimtab.config_method import SFT
from trimtab.errors import InputError
from trimtab.policy.loading import (
    Lora,
    load_configured,
    load_configured_tokenizer,
    longest_sequence,
    resolve_model,
)
from trimtab.progress import Progress
from trimtab.seeds import derive_seed
from trimtab.tasks.problems import Prompts, encode_rows, load_task_rows, prompt_limit
from trimtab.tasks.rewards import RewardPart, load_rewards, needed_columns
from trimtab.tasks.steps import StepScorer, load_step_scorer, step_columns
from trimtab.training.checkpoint import checkpoints, newest_checkpoint
from trimtab.training.combinations import check_combinations
from trimtab.training.loop import Objective, train
from trimtab.training.references import make_reference
from trimtab.training.rl import GroupRelative
from trimtab.training.rollback import RolledBack, roll_back
from trimtab.training.sft import SupervisedFineTuning, encode_completions
from trimtab.training.stored import Stored, StoredCompletions, read_stored
from trimtab.training.teachers import check_tokenizers, load_teachers

logger = logging.getLogger("trimtab")

DECISIVE_KEYS = (
    *("method", "seed", "model", "teachers", "sampling", "optimizer", "rewards", "process", "prompt", "data"),
    "off_policy",
    *("training.batch_size", "training.updates_per_rollout", "training.mixed_precision"),
)
"""What a run cannot change half-way; it may train longer, log more, or split its batches otherwise."""


@dataclass(frozen=True)
class Inputs:
    """All that a run reads, checked, before its model loads."""

    rewards: list[RewardPart]
    tokenizer: Any
    train: Prompts
    held_out: Prompts | None
    completions: list[list[int]]
    stored: dict[int, list[Stored]]


def read_inputs(config: RunConfig) -> Inputs:
    """Rewards, rows and tokenizer; nothing is written and no model loads.

    Raises:
        InputError: any of them cannot be used as configured.
    """
    # Asked of the launcher's variable: once the processes wait for each other, none may leave alone.
    check_processes(config, int(os.environ.get("WORLD_SIZE", "1")))
    rewards = load_rewards(
        config.rewards if isinstance(config.rewards, str) else [r.model_dump() for r in config.rewards]
    )
    for tracker in config.log.trackers:
        if importlib.util.find_spec(tracker) is None:
            raise InputError(f"log.trackers: {tracker} is not installed; pip install {tracker}, or leave it out")
    check_combinations(config)
    _warn(config)
    model = config.model
    resolve_model(model.name, model.gguf_file)
    supervised = config.method["name"] == SFT
    needed = [] if supervised else needed_columns(rewards)
    # A model needs no columns, and is not loaded to be asked.
    if config.process is not None and not Path(config.process.scorer).is_dir():
        needed = list(dict.fromkeys([*needed, *step_columns(load_step_scorer(config.process.scorer))]))
    # A preset's answer must stand in every row; a function of the user's own may know what to do without.
    every_row = needed if isinstance(config.rewards, str) else []
    sections = {"train": config.data, "held out": config.evaluation.data}
    rows = {
        name: load_task_rows(
            section, config.prompt, required=["completion"] if supervised and name == "train" else every_row
        )
        for name, section in sections.items()
        if section is not None
    }
    present = dict.fromkeys(column for row in rows["train"] for column in row)
    for column in needed:
        if column not in present:
            raise InputError(
                f"{config.data.source}: a reward function needs the column {column!r}, which no row has (columns there "
                f"are: {', '.join(map(repr, present))}); map it with data.columns"
            )
    _check_output(config)
    tokenizer = load_configured_tokenizer(model)
    if not supervised:
        check_tokenizers(config, tokenizer)
    positions, longest = longest_sequence(model.name, model.gguf_file), config.sampling.max_completion_tokens
    prompts = {
        name: encode_rows(
            rows[name],
            tokenizer,
            config.prompt,
            source=section.source,
            limit=prompt_limit(section, positions, longest),
        )
        for name, section in sections.items()
        if section is not None
    }
    completions = encode_completions(prompts["train"], tokenizer, longest) if supervised else []
    train = prompts["train"]
    stored: dict[int, list[Stored]] = {}
    if config.off_policy is not None and config.off_policy.data is not None:
        train, stored = read_stored(config, train, tokenizer)
    return Inputs(rewards, tokenizer, train, prompts.get("held out"), completions, stored)


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
        RunError: too many rows without a reward; a collapse that the run is to stop at.
        Interrupted: a signal; the checkpoint is written.
    """
    if config.training.threads:
        torch.set_num_threads(config.training.threads)
    inputs = read_inputs(config)
    accelerator = Accelerator(
        mixed_precision=config.training.mixed_precision,
        log_with=list(config.log.trackers) or None,
        project_dir=config.output,
        cpu=not torch.cuda.is_available(),
    )
    progress = Progress(title=title or Path(config.output).name, quiet=quiet or not accelerator.is_main_process)
    try:
        while True:
            try:
                return _train(config, inputs, accelerator, progress)
            except RolledBack as back:
                # What has to be forgotten is forgotten on disk, then the run continues like any that was killed.
                if accelerator.is_main_process:
                    roll_back(Path(config.output), back, config.monitor.rate_factor)
                accelerator.wait_for_everyone()
    finally:
        progress.close()
        if config.log.trackers:
            accelerator.end_training()


def _train(config: RunConfig, inputs: Inputs, accelerator: Accelerator, progress: Progress) -> dict[str, float]:
    """Build the run anew, from its newest checkpoint when there is one, and train."""
    found = newest_checkpoint(Path(config.output))
    # New adapters are drawn from torch's global generator.
    torch.manual_seed(derive_seed(config.seed, "model"))
    model = config.model
    policy = load_configured(
        model,
        tokenizer=inputs.tokenizer,
        lora=Lora(**model.lora.model_dump()) if model.lora else None,
        quantization=model.quantization,
        gradient_checkpointing=model.gradient_checkpointing,
        device=accelerator.device,
        checkpoint=found[0] if found else None,
    )
    policy.model.train()
    parts = (config, policy, inputs.train, inputs.held_out, inputs.rewards, accelerator)
    objective: Objective
    if config.method["name"] == SFT:
        objective = SupervisedFineTuning(*parts, completions=inputs.completions)
        per_step = config.training.batch_size
    else:
        objective = GroupRelative(
            *parts,
            reference=make_reference(config, policy, resumed=found is not None),
            teachers=load_teachers(config, policy),
            stored=StoredCompletions(config.off_policy, inputs.stored) if config.off_policy else None,
            steps=make_step_scorer(config, accelerator.device),
        )
        per_step = config.prompts_per_step
    steps = config.training.steps or max(1, math.floor(config.training.epochs * len(inputs.train) / per_step))
    return train(config, policy, objective, accelerator, steps=steps, progress=progress, found=found)


def make_step_scorer(config: RunConfig, device: torch.device | str) -> StepScorer | None:
    """What judges the steps of a completion; None without process rewards."""
    if config.process is None:
        return None
    section = config.process
    return load_step_scorer(section.scorer, delimiter=section.delimiter, separator=section.separator, device=device)


def _warn(config: RunConfig) -> None:
    """Say what is allowed and probably not meant."""
    evaluation = config.evaluation
    if evaluation.data is not None:
        if (evaluation.data.source, evaluation.data.split) == (config.data.source, config.data.split):
            logger.warning("evaluation.data is what the run trains on; a held-out score needs another split or file")
        missing = [k for k in evaluation.k if k > evaluation.samples]
        if missing:
            names = ", ".join(f"pass@{k}" for k in missing)
            logger.warning("%s left out: evaluation.samples is %d", names, evaluation.samples)
    if config.model.dtype == "bfloat16" and config.model.lora is None and config.optimizer.learning_rate < 1e-4:
        logger.warning(
            "bfloat16 weights keep three digits, so most updates at a learning rate of %g round to nothing; use "
            "model.dtype: float32 with training.mixed_precision: bf16, or model.lora",
            config.optimizer.learning_rate,
        )


def check_processes(config: RunConfig, processes: int) -> None:
    """Raise InputError unless the step's groups (rows, in supervised fine-tuning) can be shared out evenly."""
    size = 1 if config.method["name"] == SFT else config.sampling.group_size
    units = config.training.batch_size // size
    if units % processes:
        raise InputError(
            f"training.batch_size: {units} {'rows' if size == 1 else 'groups'} a step cannot be shared by {processes} "
            f"processes; make it a multiple of {processes * size}"
        )


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
    if not previous.exists() or not checkpoints(run):
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
