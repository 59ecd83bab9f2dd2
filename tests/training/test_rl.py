import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_folder import RunFolder, distance, load_weights
from torch import Tensor

from trimtab.config import RunConfig
from trimtab.config_file import load_config
from trimtab.objectives import gtpo_weights
from trimtab.policy.loading import Policy, load_policy
from trimtab.policy.sampler import LocalSampler, SamplingParams
from trimtab.seeds import derive_seed
from trimtab.training import rl
from trimtab.training.batches import step_rows
from trimtab.training.references import AdapterOff, Frozen, make_reference
from trimtab.training.run import check_processes

Train = Callable[..., RunFolder]
Configure = Callable[..., Path]
PLAIN_SGD = {"optimizer": {"name": "sgd", "learning_rate": 0.5, "max_grad_norm": 1e9}}


@pytest.mark.parametrize("method", ["gtpo", "grpo"])
def test_training_raises_the_mean_reward(method: str, train: Train) -> None:
    run = train({"method": method, "training": {"steps": 25, "batch_size": 32}, "sampling.group_size": 8})
    rewards = run.column("reward")
    assert sum(rewards[:5]) / 5 < 6
    assert sum(rewards[-5:]) / 5 > 8


@pytest.mark.parametrize("method", ["gtpo", "grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce"])
def test_every_method_trains_and_logs_finite_numbers(method: str, train: Train) -> None:
    run = train({"method": method, "training": {"steps": 2, "batch_size": 8, "updates_per_rollout": 2}})
    for line in run.metrics[1:]:
        assert all(isinstance(value, int | float) and math.isfinite(value) for value in line.values())
        assert line["grad_norm"] > 0
        assert line["ratio"] == pytest.approx(1.0, abs=0.2)


def test_metrics_have_the_names_that_trl_gave_them(train: Train) -> None:
    names = {
        *("reward", "reward_std", "rewards/low/mean", "entropy", "grad_norm", "loss", "learning_rate"),
        *("completions/mean_length", "completions/clipped_ratio", "frac_reward_zero_std"),
    }
    gtpo = train({"training.steps": 1}, name="gtpo").metrics[-1]
    assert names <= gtpo.keys()
    assert "kl" not in gtpo
    grpo = train({"method": {"name": "grpo", "beta": 0.04}, "training.steps": 2}, name="grpo")
    assert names <= grpo.metrics[-1].keys()
    assert grpo.column("kl")[0] == pytest.approx(0.0, abs=1e-6)
    assert grpo.column("kl")[1] > 1e-5


def test_the_metrics_of_a_rollout_are_what_its_samples_say(train: Train) -> None:
    changes = {
        "rewards": [
            {"function": "toy_rewards:low_bytes", "name": "low", "weight": 2.0},
            {"function": "toy_rewards:constant"},
        ],
        "log": {"samples": 8, "samples_every": 1},
        "training.steps": 2,
    }
    run = train(changes)
    for step, line in enumerate(run.metrics[1:], 1):
        samples = [s for s in run.lines("samples.jsonl") if s["step"] == step]
        assert len(samples) == 8
        rewards = torch.tensor([s["reward"] for s in samples])
        low = torch.tensor([s["rewards"]["low"] for s in samples])
        assert [s["rewards"]["constant"] for s in samples] == [1.0] * 8
        torch.testing.assert_close(rewards, 2 * low + 1)
        assert line["reward"] == pytest.approx(float(rewards.mean()))
        assert line["reward_std"] == pytest.approx(float(rewards.std()))
        assert line["rewards/low/mean"] == pytest.approx(float(low.mean()))
        assert line["rewards/constant/mean"] == 1.0
        assert line["entropy"] == pytest.approx(sum(s["entropy"] for s in samples) / 8)
        assert line["completions/clipped_ratio"] == sum(s["truncated"] for s in samples) / 8


def test_samples_are_whole_groups_that_say_what_was_asked_answered_and_earned(train: Train) -> None:
    run = train({"training.steps": 5, "log": {"samples": 3, "samples_every": 2}})
    samples = run.lines("samples.jsonl")
    assert [s["step"] for s in samples] == [2] * 4 + [4] * 4 + [5] * 4
    prompts = {"1 + 2 =", "30 + 4 =", "5 + 6 =", "70 + 80 =", "9 + 9 ="}
    for sample in samples:
        assert sample["prompt"] in prompts
        assert isinstance(sample["completion"], str)
        assert sample["reward"] == sample["rewards"]["low"]
    for start in (0, 4, 8):
        group = samples[start : start + 4]
        assert len({(sample["prompt"], sample["group"]) for sample in group}) == 1
        mean = sum(sample["reward"] for sample in group) / 4
        assert [sample["advantage"] for sample in group] == pytest.approx([s["reward"] - mean for s in group], abs=1e-4)


def test_the_weights_of_samples_are_those_that_the_method_gives_to_their_tokens(train: Train) -> None:
    run = train({"method": {"name": "gtpo", "gamma": 0.5}, "training.steps": 2, "log": {"samples": 4}})
    samples = run.lines("samples.jsonl")
    width = max(len(sample["token_ids"]) for sample in samples)

    def padded(name: str) -> Tensor:
        return torch.tensor([sample[name] + [0] * (width - len(sample[name])) for sample in samples])

    mask_NT = torch.tensor([[column < len(sample["token_ids"]) for column in range(width)] for sample in samples])
    expected = gtpo_weights(
        padded("token_ids"),
        mask_NT,
        torch.tensor([sample["reward"] for sample in samples]),
        torch.zeros(4, dtype=torch.long),
        padded("entropies"),
        gamma=0.5,
        entropy_filter="off",  # a random model is not confident
    )
    torch.testing.assert_close(padded("weights"), expected.weights_NT, atol=1e-4, rtol=1e-4)
    assert [sample["kept"] for sample in samples] == [True] * 4


def plain_step(tiny_model: Path, run: RunFolder) -> tuple[Policy, Callable[[], list[tuple[Tensor, Tensor]]]]:
    """The untouched policy, and what it thinks of step 1's completions: (logps_T, entropies_T), row by row."""
    policy = load_policy(str(tiny_model))
    prompts = [json.loads(line)["prompt"] for line in (run.path.parent / "rows.jsonl").read_bytes().splitlines()]
    ids = [policy.tokenizer(prompts[i]).input_ids for i in step_rows(5, 2, 1, 0)]
    sampler = LocalSampler(policy.model, end_ids=policy.end_ids, pad_id=policy.pad_id)
    rollouts = sampler.sample(ids, 4, SamplingParams(max_tokens=8), derive_seed(0, 1, "rollout"))

    def look() -> list[tuple[Tensor, Tensor]]:
        rows = []
        for row, completion in enumerate(rollouts.completion_lists()):
            prompt = ids[row // 4]
            logits_TV = policy.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            logps_TV = torch.log_softmax(logits_TV, dim=1)
            entropies_T = -(logps_TV.exp() * logps_TV).sum(dim=1)
            rows.append((logps_TV[torch.arange(len(completion)), completion], entropies_T))
        return rows

    return policy, look


def descend(policy: Policy, loss: Tensor) -> None:
    """One step of gradient descent at the rate of PLAIN_SGD."""
    policy.model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter -= 0.5 * parameter.grad  # type: ignore[operator]


LADDER = {"rewards": [{"function": "toy_rewards:ladder"}], "training.steps": 1, **PLAIN_SGD}
ADVANTAGES = [-5.0, 5.0, 0.0, 0.0] * 2
"""Of two groups with the rewards 0, 10, 5, 5."""


def test_two_updates_on_one_rollout_are_those_of_a_plain_forward_pass(train: Train, tiny_model: Path) -> None:
    run = train({"method": "reinforce", **LADDER, "training.updates_per_rollout": 2})
    policy, look = plain_step(tiny_model, run)
    old = [logps_T.detach() for logps_T, _ in look()]
    tokens = sum(map(len, old))
    for _ in range(2):
        ratios = [(logps_T - old_T).exp() for (logps_T, _), old_T in zip(look(), old, strict=True)]
        descend(
            policy, -sum((a * r_T.sum() for a, r_T in zip(ADVANTAGES, ratios, strict=True)), torch.zeros(())) / tokens
        )
    assert distance(dict(policy.model.named_parameters()), run.weights) < 1e-6
    assert distance(load_weights(tiny_model), run.weights) > 1e-3
    assert run.column("kl_old")[0] > 0


def test_an_entropy_penalty_with_gradient_reaches_rows_without_an_advantage(train: Train, tiny_model: Path) -> None:
    method = {"name": "gtpo", "entropy_penalty": "gradient", "gamma": 3.0, "conflict_sides": "none"}
    run = train({"method": method, **LADDER})
    policy, look = plain_step(tiny_model, run)
    rows = zip(ADVANTAGES, look(), strict=True)
    losses = [(-a * logps_T + 3.0 * entropies_T).mean() for a, (logps_T, entropies_T) in rows]
    descend(policy, torch.stack(losses).mean())
    assert distance(dict(policy.model.named_parameters()), run.weights) < 1e-6


def test_the_size_of_micro_batches_changes_nothing(train: Train) -> None:
    changes = {**PLAIN_SGD, "method": {"name": "grpo", "beta": 0.04}, "training": {"steps": 3, "batch_size": 16}}
    whole = train(changes, name="whole")
    for tokens in (1, 60):
        parts = train(
            {**changes, "training": {**changes["training"], "micro_batch_tokens": tokens}}, name=f"of{tokens}"
        )
        assert distance(whole.weights, parts.weights) < 1e-6
        assert parts.column("reward") == whole.column("reward")
        assert parts.column("loss") == pytest.approx(whole.column("loss"), abs=1e-6)


@pytest.mark.parametrize("method", ["gtpo", {"name": "gtpo", "entropy_penalty": "gradient"}, "grpo"])
def test_groups_of_equal_rewards_teach_nothing_and_the_run_goes_on(method: Any, train: Train, tiny_model: Path) -> None:
    run = train({"method": method, "rewards": [{"function": "toy_rewards:constant"}], "training.steps": 2})
    assert run.column("frac_reward_zero_std") == [1.0, 1.0]
    assert run.column("reward_std") == [0.0, 0.0]
    assert run.column("skipped_updates") == [1.0, 1.0]
    assert distance(load_weights(tiny_model), run.weights) == 0


def test_when_every_completion_is_truncated_and_masked_nothing_moves(train: Train, tiny_model: Path) -> None:
    run = train(
        {
            "method": {"name": "gtpo", "mask_truncated": True},
            "sampling.max_completion_tokens": 1,
            "training": {"steps": 2, "batch_size": 8, "updates_per_rollout": 2},
        }
    )
    assert run.column("completions/clipped_ratio") == [1.0, 1.0]
    assert run.column("loss") == [0.0, 0.0]
    assert run.column("grad_norm") == [0.0, 0.0]
    assert run.column("skipped_updates") == [2.0, 2.0]
    assert distance(load_weights(tiny_model), run.weights) == 0


def test_when_the_entropy_filter_drops_every_completion_nothing_moves(train: Train, tiny_model: Path) -> None:
    run = train({"method": {"name": "gtpo", "entropy_filter": "on"}, "training.steps": 2})
    assert run.column("gtpo/kept_fraction") == [0.0, 0.0]
    assert run.column("loss") == [0.0, 0.0]
    assert run.column("skipped_updates") == [1.0, 1.0]
    assert distance(load_weights(tiny_model), run.weights) == 0


@pytest.mark.parametrize(
    ("function", "fails"),
    [("raises_on_every_fourth", True), ("nan_on_every_fourth", True), ("none_on_every_fourth", False)],
)
def test_rows_that_a_reward_function_cannot_judge_are_left_out_and_counted(
    function: str, fails: bool, train: Train
) -> None:
    changes = {
        "rewards": [{"function": f"toy_rewards:{function}", "name": "low"}],
        "log": {"samples": 16, "samples_every": 1},
        "training": {"steps": 3, "batch_size": 16, "max_excluded_rows": 1.0},
    }
    run = train(changes)
    excluded = run.column("excluded_rows")
    assert 0 < sum(excluded) < 3
    assert run.column("reward_failures") == [16 * share if fails else 0.0 for share in excluded]
    for step, line in enumerate(run.metrics[1:], 1):
        rewards = [s["reward"] for s in run.lines("samples.jsonl") if s["step"] == step]
        judged = [reward for reward in rewards if reward is not None]
        assert line["excluded_rows"] == 1 - len(judged) / 16
        assert line["reward"] == pytest.approx(sum(judged) / len(judged))
        assert line["grad_norm"] > 0


def test_a_run_in_which_nothing_can_be_judged_goes_on_when_asked_to(train: Train, tiny_model: Path) -> None:
    changes = {"rewards": [{"function": "toy_rewards:broken"}], "training": {"steps": 2, "batch_size": 8}}
    run = train({**changes, "training": {**changes["training"], "max_excluded_rows": 1.0}})
    assert run.column("excluded_rows") == [1.0, 1.0]
    assert run.column("reward") == [None, None]
    assert run.column("skipped_updates") == [1.0, 1.0]
    assert distance(load_weights(tiny_model), run.weights) == 0


def test_too_many_rows_without_a_reward_stop_the_run_with_one_sentence(
    command: Callable[..., Any], configure: Configure
) -> None:
    path = configure({"rewards": [{"function": "toy_rewards:broken"}]})
    outcome = command("train", path, "--quiet")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == (
        "trimtab: step 1: 100% of the completions got no reward, more than training.max_excluded_rows = 50% allows "
        "(broken: ZeroDivisionError: no reward today)\n"
    )


def test_a_reward_function_gets_a_column_that_only_some_rows_have(train: Train, tmp_path: Path) -> None:
    def write() -> None:
        rows = [{"prompt": "a"}, {"prompt": "b", "hint": "xyz"}]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    write()
    changes = {"rewards": [{"function": "toy_rewards:needs_hint"}], "training.steps": 1, "log.samples": 8}
    run = train({**changes, "data.source": str(tmp_path / "rows.jsonl")})
    assert run.column("excluded_rows") == [0.0]
    for sample in run.lines("samples.jsonl"):
        assert sample["reward"] == len(sample["completion"]) + (3 if sample["prompt"] == "b" else 0)


def test_the_initial_entropy_is_measured_once_and_logged_as_step_0(
    train: Train, monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    measured = []
    begin = rl.GroupRelative.begin

    def counted(self: rl.GroupRelative) -> dict[str, float]:
        measured.append(begin(self))
        return measured[-1]

    monkeypatch.setattr(rl.GroupRelative, "begin", counted)
    run = train({"training.steps": 2})
    # A random model knows nothing: the entropy is nearly that of a uniform choice.
    assert run.metrics[0] == {"step": 0, "initial_entropy": pytest.approx(math.log(259), abs=0.05)}
    state = json.loads((run.checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["objective"]
    assert state["initial_entropy"] == run.metrics[0]["initial_entropy"]
    longer = train({"training.steps": 4})
    state = json.loads((longer.checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["objective"]
    assert (longer.checkpoint.name, state["initial_entropy"]) == ("step_4", run.metrics[0]["initial_entropy"])
    assert len(measured) == 1


def test_the_warning_about_gamma_comes_once(train: Train, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trimtab"):
        train({"training.steps": 2}, name="fits")
        assert "gamma" not in caplog.text
        small = [{"function": "toy_rewards:low_bytes", "weight": 0.01}]
        train({"rewards": small, "training.steps": 4}, name="small")
        train({"rewards": small, "training.steps": 6}, name="small")
    assert caplog.text.count("gamma times the entropy") == 1


def config_of(configure: Configure, changes: dict[str, Any]) -> RunConfig:
    return load_config(configure(changes))


def test_no_reference_model_is_held_unless_the_method_measures_a_divergence(
    configure: Configure, tiny_model: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(str(tiny_model))
    for method in ("gtpo", "grpo", {"name": "grpo", "beta": 0.0}):
        assert make_reference(config_of(configure, {"method": method}), policy, resumed=False) is None
    config = config_of(configure, {"method": {"name": "grpo", "beta": 0.04}})
    reference = make_reference(config, policy, resumed=False)
    assert isinstance(reference, Frozen)
    assert reference.scorer.model is not policy.model
    assert not any(p.requires_grad for p in reference.scorer.model.parameters())
    assert all(p.requires_grad for p in policy.model.parameters())


def test_the_reference_of_a_resumed_run_is_where_the_run_began(configure: Configure, tiny_model: Path) -> None:
    policy = load_policy(str(tiny_model))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter += 1
    config = config_of(configure, {"method": {"name": "grpo", "beta": 0.04}})
    reference = make_reference(config, policy, resumed=True)
    assert isinstance(reference, Frozen)
    began = dict(load_policy(str(tiny_model)).model.named_parameters())
    assert all(torch.equal(p, began[name]) for name, p in reference.scorer.model.named_parameters())


def test_the_reference_of_adapters_is_the_model_without_them(
    train: Train, configure: Configure, tiny_model: Path
) -> None:
    changes = {"model.lora": {"rank": 2}, "method": {"name": "grpo", "beta": 0.04}, "training.steps": 3}
    run = train(changes)
    assert run.column("kl")[0] == pytest.approx(0.0, abs=1e-6)
    assert run.column("kl")[2] > 1e-6
    policy = load_policy(str(tiny_model))
    assert isinstance(make_reference(config_of(configure, changes), policy, resumed=False), AdapterOff)


def test_a_step_that_the_processes_cannot_share_is_refused(configure: Configure) -> None:
    config = config_of(configure, {"training.batch_size": 12})
    check_processes(config, 1)
    check_processes(config, 3)
    with pytest.raises(ValueError, match="3 groups a step cannot be shared by 2 processes; make it a multiple of 8"):
        check_processes(config, 2)
    with pytest.raises(ValueError, match="5 rows a step cannot be shared by 2 processes; make it a multiple of 2"):
        check_processes(config_of(configure, {"method": "sft", "training.batch_size": 5}), 2)
