"""Trainers take the online merging optimizer as it is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trimtab.merging.online import OnlineMerging

PROMPTS = ["1 + 2 =", "3 + 4 =", "5 + 6 =", "7 + 8 ="]


def load(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def merging(model: nn.Module, **settings: Any) -> OnlineMerging:
    base = {name: p.detach() * 0.9 for name, p in model.named_parameters()}
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return OnlineMerging(inner, model.named_parameters(), **{"reference": base, "alpha": 1e-3, **settings})


def arguments(output: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(output),
        "max_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        **more,
    }


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def all_moved(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(p.isfinite().all() and not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_trainer_of_transformers_takes_it_clips_schedules_and_resumes(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    tuned = weights(load(tiny_model)[0])

    def train(folder: Path, resume: Path | None = None, **more: Any) -> tuple[nn.Module, OnlineMerging]:
        model, tokenizer = load(tiny_model)
        rows = [{"input_ids": (ids := tokenizer(text)["input_ids"]), "labels": ids} for text in PROMPTS * 4]
        optimizer = merging(model, tuned=tuned, reference={name: value * 0.9 for name, value in tuned.items()})
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                **arguments(folder, max_grad_norm=0.5, lr_scheduler_type="linear", **more),
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
            ),
            train_dataset=rows,
            optimizers=(optimizer, None),
        )
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        return model, optimizer

    whole, optimizer = train(tmp_path, save_strategy="steps", save_steps=2)
    assert all_moved(whole, tuned)
    assert optimizer.param_groups[0]["lr"] == 0
    resumed, _ = train(tmp_path / "again", tmp_path / "checkpoint-2")
    assert all(torch.equal(p, weights(whole)[name]) for name, p in resumed.named_parameters())


def test_accelerate_prepares_it() -> None:
    from accelerate import Accelerator

    net = nn.Linear(4, 4)
    before = weights(net)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(net, merging(net))
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    assert not optimizer.step_was_skipped and all_moved(net, before)


def test_the_sft_trainer_of_trl_takes_it(tiny_model: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="needs TRL: pip install 'trimtab[oracle]'")
    from datasets import Dataset

    model, tokenizer = load(tiny_model)
    before = weights(model)
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**arguments(tmp_path), per_device_train_batch_size=2, max_length=32, bf16=False),
        train_dataset=Dataset.from_list([{"text": text + " 3"} for text in PROMPTS * 2]),
        processing_class=tokenizer,
        optimizers=(merging(model), None),
    )
    trainer.train()
    assert all_moved(model, before)


def test_the_grpo_trainer_of_trl_takes_it(tiny_model: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="needs TRL: pip install 'trimtab[oracle]'")
    from datasets import Dataset

    model, tokenizer = load(tiny_model)
    before = weights(model)
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=trl.GRPOConfig(
            **arguments(tmp_path),
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=4,
            bf16=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": text} for text in PROMPTS]),
        processing_class=tokenizer,
        optimizers=(merging(model, method="ties", keep=0.5), None),
    )
    trainer.train()
    assert all_moved(model, before)
