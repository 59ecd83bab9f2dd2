import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from run_folder import RunFolder, distance

from trimtab.errors import InputError
from trimtab.policy.loading import load_policy, load_tokenizer
from trimtab.tasks.problems import Prompts
from trimtab.training.sft import encode_completions

Train = Callable[..., RunFolder]


def test_training_lowers_the_loss(train: Train) -> None:
    run = train({"method": "sft", "training": {"steps": 20, "batch_size": 5}})
    losses = run.column("loss")
    assert losses[0] > 5 and losses[-1] < 2
    assert run.steps == list(range(21))


def test_the_loss_is_the_mean_over_all_tokens_of_the_batch_with_the_end_token(train: Train, tiny_model: Path) -> None:
    run = train({"method": "sft", "training": {"steps": 1, "batch_size": 5}})
    policy = load_policy(str(tiny_model))
    total, count = 0.0, 0
    for line in (run.path.parent / "rows.jsonl").read_bytes().splitlines():
        row = json.loads(line)
        prompt = policy.tokenizer(row["prompt"]).input_ids
        completion = [*policy.tokenizer(row["completion"], add_special_tokens=False).input_ids, 1]
        with torch.no_grad():
            logits_TV = policy.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        total -= float(torch.log_softmax(logits_TV, dim=1)[torch.arange(len(completion)), completion].sum())
        count += len(completion)
    assert run.column("loss") == [pytest.approx(total / count, rel=1e-5)]
    assert run.column("completions/mean_length") == [count / 5]


def test_the_size_of_micro_batches_changes_nothing(train: Train) -> None:
    changes = {"method": "sft", "optimizer": {"name": "sgd", "learning_rate": 0.5}}
    whole = train({**changes, "training": {"steps": 3, "batch_size": 4}}, name="whole")
    parts = train({**changes, "training": {"steps": 3, "batch_size": 4, "micro_batch_tokens": 1}}, name="parts")
    assert distance(whole.weights, parts.weights) < 1e-6


def test_samples_are_rows_of_the_step(train: Train) -> None:
    run = train({"method": "sft", "training": {"steps": 1, "batch_size": 3}})
    rows = [json.loads(line) for line in (run.path.parent / "rows.jsonl").read_bytes().splitlines()]
    pairs = [(row["prompt"], row["completion"]) for row in rows]
    samples = run.lines("samples.jsonl")
    assert len(samples) == 2
    assert all((sample["prompt"], sample["completion"]) in pairs for sample in samples)


def test_held_out_rows_are_evaluated_before_training_between_and_at_the_end(train: Train) -> None:
    run = train({"method": "sft", "training": {"steps": 5, "batch_size": 3}}, name="none")
    assert not any(key.startswith("eval/") for line in run.metrics for key in line)
    held_out = {"source": str(run.path.parent / "rows.jsonl")}
    evaluation = {"every": 2, "samples": 2, "k": [1, 2], "data": held_out}
    run = train({"method": "sft", "training": {"steps": 5, "batch_size": 3}, "evaluation": evaluation})
    assert [line["step"] for line in run.metrics if "eval/accuracy" in line] == [0, 2, 4, 5]
    assert {"eval/pass@1", "eval/pass@2", "eval/reward", "eval/rewards/low/mean"} <= run.metrics[0].keys()


def test_a_completion_longer_than_allowed_counts_its_end_token(tiny_model: Path) -> None:
    train = Prompts([{"completion": "abc"}], ["p"], [[0]], [1])
    tokenizer = load_tokenizer(str(tiny_model))
    assert [len(ids) for ids in encode_completions(train, tokenizer, 4)] == [3]
    with pytest.raises(
        InputError, match=r"^row 1: the completion has 4 tokens with its end, more than sampling\.max_co"
    ):
        encode_completions(train, tokenizer, 3)
