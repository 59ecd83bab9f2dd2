import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_rewards
from run_folder import RunFolder, distance, load_weights

from trimtab.errors import InputError
from trimtab.objectives import gvpo_loss
from trimtab.policy.loading import load_policy, load_tokenizer
from trimtab.policy.sampler import LocalSampler, SamplingParams
from trimtab.policy.scorer import Scorer
from trimtab.seeds import derive_seed
from trimtab.training.batches import step_rows
from trimtab.training.references import MovingAverage
from trimtab.training.stored import Stored, join_rollouts
from trimtab.training.teachers import Teacher, same_tokens, whole_texts

Train = Callable[..., RunFolder]

PROMPTS = ["1 + 2 =", "30 + 4 =", "5 + 6 =", "70 + 80 =", "9 + 9 ="]
GVPO = {"method": {"name": "gvpo", "beta": 0.5}, "training.steps": 3}


def write(path: Path, rows: list[dict[str, Any]]) -> dict[str, str]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"source": str(path)}


def stored(tokenizer: Any, text: str, *, truncated: bool = False) -> Stored:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return Stored([*ids, tokenizer.eos_token_id], text, 0.0, truncated, "test")


# GVPO in the loop


def test_at_the_first_update_every_reference_is_the_policy_itself(train: Train) -> None:
    runs = [
        train({"method": {"name": "gvpo", "reference": kind}, "training.steps": 1}, name=kind)
        for kind in ("rollout", "frozen", "ema")
    ]
    assert runs[0].metrics[1]["gvpo/log_ratio_abs"] == 0.0
    assert all(distance(runs[0].weights, run.weights) < 1e-6 for run in runs[1:])


def test_later_the_references_differ_as_they_should(train: Train) -> None:
    runs = {
        kind: train({"method": {"name": "gvpo", "reference": kind, "ema_decay": 0.5}, "training.steps": 4}, name=kind)
        for kind in ("rollout", "frozen", "ema")
    }
    moved = {kind: run.column("gvpo/log_ratio_abs")[3] for kind, run in runs.items()}
    assert moved["rollout"] == 0.0
    assert 1e-3 < moved["ema"] < moved["frozen"]


def test_with_several_updates_the_rollout_reference_stays_where_it_sampled(train: Train) -> None:
    run = train({"method": "gvpo", "training.steps": 2, "training.updates_per_rollout": 3})
    assert all(value > 1e-3 for value in run.column("gvpo/log_ratio_abs"))


def test_every_update_is_a_step_down_the_loss_in_one_piece(train: Train, tiny_model: Path) -> None:
    changes = {"method": {"name": "gvpo", "reference": "frozen", "beta": 0.5}, "training.updates_per_rollout": 3}
    run = train({**changes, "training.steps": 1, "optimizer": {"name": "sgd", "learning_rate": 0.05}})

    policy = load_policy(str(tiny_model))
    prompts = [policy.tokenizer(PROMPTS[row]).input_ids for row in step_rows(len(PROMPTS), 2, 1, 0)]
    sampler = LocalSampler(policy.model, end_ids=policy.end_ids, pad_id=policy.pad_id)
    rollouts = sampler.sample(prompts, 4, SamplingParams(max_tokens=8), derive_seed(0, 1, "rollout"))
    rewards_N = torch.tensor(toy_rewards.low_bytes(rollouts.completion_lists()))
    scorer = Scorer(policy.model)
    reference_NT = scorer.score(rollouts)[0].detach()
    for _ in range(3):
        policy.model.zero_grad()
        logps_NT, _ = scorer.score(rollouts)
        mask_NT, groups_N = rollouts.mask_NT, rollouts.group_ids_N
        loss = gvpo_loss(logps_NT, mask_NT, rewards_N, groups_N, reference_logps_NT=reference_NT, beta=0.5)
        (loss / 0.5).backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter -= 0.05 * parameter.grad
    assert distance(run.weights, dict(policy.model.named_parameters())) < 1e-5
    assert distance(run.weights, load_weights(tiny_model)) > 1e-3


@pytest.mark.parametrize("changes", [{"training.micro_batch_tokens": 16}, {"training.micro_batch_tokens": 40}])
def test_the_size_of_micro_batches_changes_nothing(changes: dict[str, Any], train: Train) -> None:
    common = {"method": {"name": "gvpo", "reference": "frozen"}, "training.steps": 2, "training.updates_per_rollout": 2}
    whole, split = train(common, name="whole"), train({**common, **changes}, name="split")
    assert distance(whole.weights, split.weights) < 1e-5


def test_gvpo_learns_the_toy_reward(train: Train) -> None:
    run = train({"method": "gvpo", "training.steps": 12})
    rewards = run.column("reward")
    assert sum(rewards[-3:]) > sum(rewards[:3])


def test_the_moving_average_follows_the_policy_and_puts_the_policy_back(tiny_model: Path) -> None:
    policy = load_policy(str(tiny_model))
    average = MovingAverage(policy, decay=0.75)
    name, parameter = next(iter(policy.model.named_parameters()))
    before = parameter.detach().clone()
    with torch.no_grad():
        parameter += 1.0
    average.follow()
    assert torch.allclose(average.average[name], before + 0.25)
    moved = parameter.detach().clone()
    rollouts = LocalSampler(policy.model, end_ids=policy.end_ids, pad_id=policy.pad_id).sample(
        [[0, 5]], 2, SamplingParams(max_tokens=4), 0
    )
    own, _ = Scorer(policy.model).score(rollouts)
    averaged, _ = average.score(rollouts)
    assert torch.equal(parameter, moved)
    assert float((own - averaged).detach().abs().max()) > 1e-4


def test_a_sampler_with_holes_is_warned_of(train: Train, caplog: pytest.LogCaptureFixture) -> None:
    train({"method": "gvpo", "training.steps": 1, "sampling.top_k": 5})
    assert "gvpo reaches its optimum where the sampler covers it" in caplog.text


def test_what_the_weights_are_made_of_is_measured_without_dropout(
    tiny_model: Path, train: Train, tmp_path: Path
) -> None:
    folder = tmp_path / "dropout"
    shutil.copytree(tiny_model, folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "attention_dropout": 0.5}))
    for kind, lora in (("frozen", None), ("ema", None), ("frozen", {"rank": 2})):
        changes = {"method": {"name": "gvpo", "reference": kind}, "model": {"name": str(folder), "lora": lora}}
        run = train({**changes, "training.steps": 1}, name=f"{kind} {bool(lora)}")
        assert run.metrics[1]["gvpo/log_ratio_abs"] < 1e-5


# Completions from elsewhere


def test_a_run_can_learn_from_a_file_alone_and_samples_nothing(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": p, "completion": f" {n}", "reward": float(n)} for p in PROMPTS[:4] for n in range(4)]
    monkeypatch.setattr(LocalSampler, "sample", None)
    off = {"share": 1.0, "data": write(tmp_path / "best.jsonl", rows)}
    run = train({"method": {"name": "gvpo", "beta": 0.01}, "off_policy": off, "training.steps": 30})
    assert run.column("off_policy/rows") == [1.0] * 30
    assert set(run.column("reward")) == {1.5}
    assert run.column("entropy") == [None] * 30
    # The best of the file has become likelier than the worst, on the prompts of the file.
    policy = load_policy(str(run.checkpoint))
    ids = [policy.tokenizer(p).input_ids for p in PROMPTS[:4]]
    answers = [
        Stored([*policy.tokenizer(f" {n}", add_special_tokens=False).input_ids, 1], "", 0, False, "") for n in (3, 0)
    ]
    rollouts = join_rollouts(None, ids, [answers] * 4, pad_id=2)
    logps_NT, _ = Scorer(policy.model).score(rollouts)
    best, worst = logps_NT.sum(dim=1).detach().view(4, 2).unbind(dim=1)
    assert bool((best > worst + 1).all())


def test_stored_completions_join_the_fresh_ones_of_their_prompt(train: Train, tmp_path: Path) -> None:
    rows = [{"prompt": p, "completion": " 7", "reward": 50.0, "source": "teacher"} for p in PROMPTS for _ in range(2)]
    off = {"share": 0.5, "data": write(tmp_path / "teacher.jsonl", rows)}
    run = train({**GVPO, "off_policy": off, "log": {"samples": 8, "samples_every": 1}})
    assert run.column("off_policy/rows") == [0.5] * 3
    assert run.column("off_policy/reward") == [50.0] * 3
    lines = [line for line in run.lines("samples.jsonl") if line["step"] == 1]
    by_group: dict[int, list[str]] = {}
    for line in lines:
        by_group.setdefault(line["group"], []).append(line["completion"])
    assert all(len(said) == 4 and said.count(" 7") >= 2 for said in by_group.values())
    # A stored completion says where it comes from, and its entropy is not known.
    assert {(line["source"], line["entropy"] is None) for line in lines} == {("fresh", False), ("teacher", True)}
    # The metrics of the policy are those of what it sampled.
    assert max(run.column("reward")) <= 10.0


def test_a_file_that_brings_all_rewards_needs_no_reward_function(train: Train, tmp_path: Path) -> None:
    rows = [{"prompt": PROMPTS[0], "completion": f" {n}", "reward": n} for n in range(3)]
    off = {"share": 1.0, "data": write(tmp_path / "scored.jsonl", rows)}
    run = train({**GVPO, "rewards": "none", "off_policy": off})
    assert run.column("reward") == [1.0] * 3
    del rows[1]["reward"]
    off = {"share": 1.0, "data": write(tmp_path / "scored.jsonl", rows)}
    with pytest.raises(InputError, match="row 2: no reward, and rewards: none; give one, or name functions"):
        train({**GVPO, "rewards": "none", "off_policy": off}, name="other")


def test_rows_without_a_reward_are_judged_by_the_runs_own_functions(train: Train, tmp_path: Path) -> None:
    rows = [{"prompt": p, "completion": c} for p in PROMPTS for c in ("!!", "\u00fc\u00fc")]
    off = {"share": 0.5, "data": write(tmp_path / "plain.jsonl", rows)}
    run = train({**GVPO, "off_policy": off, "log": {"samples": 8, "samples_every": 1}})
    judged = [line for line in run.lines("samples.jsonl") if line["completion"] in ("!!", "\u00fc\u00fc")]
    assert len({line["reward"] for line in judged}) == 2
    for line in judged:
        assert line["reward"] == pytest.approx(toy_rewards.low_bytes([line["token_ids"]])[0])


def test_the_replay_buffer_brings_earlier_completions_back(train: Train) -> None:
    changes = {**GVPO, "off_policy": {"share": 0.5, "replay": 2}, "training.steps": 4}
    run = train({**changes, "log": {"samples": 8, "samples_every": 1}})
    # Two prompts of five a step: the third step meets a prompt of the first pass again.
    assert run.column("off_policy/rows")[0] == 0.0
    assert run.column("off_policy/rows")[3] > 0.0
    lines = run.lines("samples.jsonl")
    early = {(str(line["prompt"]), tuple(line["token_ids"])) for line in lines if line["step"] <= 2}
    late = [(str(line["prompt"]), tuple(line["token_ids"])) for line in lines if line["step"] > 2]
    assert any(line in early for line in late)


def test_unusable_rows_are_counted_and_a_file_without_any_is_refused(
    train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = [
        {"prompt": PROMPTS[0], "completion": " 3", "reward": 1},
        {"prompt": PROMPTS[0], "completion": " 4", "reward": 0},
    ]
    odd = [
        {"prompt": "what?", "completion": " 3", "reward": 1},
        {"prompt": PROMPTS[1], "completion": "x" * 50, "reward": 1},
    ]
    with caplog.at_level(logging.WARNING):
        train({**GVPO, "off_policy": {"share": 1.0, "data": write(tmp_path / "mixed.jsonl", good + odd)}})
    assert (
        "of 4 rows 1 left out because their prompt is none of the training prompts, and 1 that are empty" in caplog.text
    )
    with pytest.raises(InputError, match="no training prompt has two completions there"):
        train({**GVPO, "off_policy": {"share": 1.0, "data": write(tmp_path / "odd.jsonl", odd)}}, name="other")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"completion": 3}, "row 1: the completion is a int; it must be text"),
        ({"completion": " 3", "reward": "good"}, "row 1: the reward is 'good'; it must be a number, or left out"),
        ({"completion": " 3", "reward": True}, "row 1: the reward is True"),
        ({"completion": " 3", "truncated": "no"}, "row 1: truncated is 'no'; it must be true or false, or left out"),
    ],
)
def test_a_row_of_the_wrong_kind_is_named(row: dict[str, Any], message: str, train: Train, tmp_path: Path) -> None:
    off = {"share": 0.5, "data": write(tmp_path / "bad.jsonl", [{"prompt": PROMPTS[0], **row}])}
    with pytest.raises(InputError, match=message):
        train({**GVPO, "off_policy": off})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "grpo", "off_policy": {"share": 0.5, "replay": 4}}, "off_policy: grpo corrects for who sampled"),
        ({"off_policy": {"share": 0.5}}, "name a file under off_policy.data, or keep own completions"),
        ({"off_policy": {"share": 1.0, "replay": 4}}, "with 1 nothing is sampled, so off_policy.data is needed"),
        ({"off_policy": {"share": 0.1, "replay": 4}}, "0.1 of a group of 4 is not even one completion"),
        ({"off_policy": {"share": 0.75, "replay": 4}}, "0.75 leaves 1 fresh completion of 4"),
        ({"method": "sft", "off_policy": {"share": 0.5, "replay": 4}}, "off_policy: method sft learns from"),
        ({"rewards": "none"}, "rewards: none, but gvpo learns from rewards"),
        ({"teachers": [{"name": "x"}]}, "teachers: gvpo takes none; use method: distill"),
        ({"method": "distill", "teachers": [{"name": "./nowhere"}]}, "teachers.0.name: there is no folder ./nowhere"),
        ({"method": "distill"}, "teachers: there are 0, but method.lambdas has 1 numbers"),
        ({"method": {"name": "gvpo", "beta": 0.0}}, "beta"),
    ],
)
def test_what_does_not_go_together_is_refused_before_a_model_loads(
    changes: dict[str, Any], message: str, train: Train
) -> None:
    with pytest.raises(InputError, match=message):
        train({"method": "gvpo", **changes})


# Teachers


def distil(tiny_model: Path, **settings: Any) -> dict[str, Any]:
    return {"method": {"name": "distill", **settings}, "teachers": [{"name": str(tiny_model)}], "rewards": "none"}


@pytest.fixture(scope="module")
def teacher_folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a strong opinion on the letter x: a teacher that its student can learn from."""
    policy = load_policy(str(tiny_model))
    x = policy.tokenizer("x", add_special_tokens=False).input_ids[0]
    with torch.no_grad():
        policy.model.get_output_embeddings().weight[x] *= 20.0  # type: ignore[operator]
    folder = tmp_path_factory.mktemp("teacher")
    policy.model.save_pretrained(folder)  # type: ignore[operator]
    policy.tokenizer.save_pretrained(folder)
    return folder


def test_a_teacher_that_is_the_student_leaves_the_weights_alone(train: Train, tiny_model: Path) -> None:
    run = train({**distil(tiny_model), "training.steps": 2, "optimizer.name": "sgd"})
    assert distance(run.weights, load_weights(tiny_model)) < 1e-6
    # Nothing judged it.
    assert run.column("reward") == [None, None]


@pytest.mark.parametrize("form", ["sequence", "token"])
def test_the_student_moves_towards_a_teacher_that_knows_the_answers(form: str, train: Train) -> None:
    teacher = train({"method": "sft", "training.steps": 30, "training.batch_size": 5}, name="teacher")
    changes = distil(teacher.checkpoint, form=form)
    run = train({**changes, "training.steps": 40, "training.batch_size": 32})
    divergence = run.column("distill/kl_1")
    assert sum(divergence[-5:]) < 0.5 * sum(divergence[:5])


def test_two_teachers_of_one_model_share_it_and_their_lambdas_add_up(train: Train, teacher_folder: Path) -> None:
    one = train({**distil(teacher_folder), "training.steps": 2}, name="one")
    halves = {**distil(teacher_folder, lambdas=[0.5, 0.5]), "training.steps": 2}
    two = train({**halves, "teachers": [{"name": str(teacher_folder)}] * 2}, name="two")
    assert distance(one.weights, two.weights) < 1e-5


def test_extrapolation_past_the_teacher_needs_the_reference_and_has_it(train: Train, teacher_folder: Path) -> None:
    run = train({**distil(teacher_folder, lambdas=[1.5]), "training.steps": 3})
    assert run.column("gvpo/log_ratio_abs")[2] > 0


def test_distillation_without_teachers_is_gvpo(train: Train) -> None:
    settings = {"beta": 0.5, "reference": "rollout"}
    gvpo = train({"method": {"name": "gvpo", **settings}, "training.steps": 2}, name="gvpo")
    distilled = {"method": {"name": "distill", "lambdas": [], "eta": 1.0, **settings}, "training.steps": 2}
    assert distance(train(distilled, name="distill").weights, gvpo.weights) < 1e-5


def test_a_verifier_can_be_added_to_the_teacher(train: Train, teacher_folder: Path) -> None:
    changes = {**distil(teacher_folder, eta=1.0), "training.steps": 2}
    changes["rewards"] = [{"function": "toy_rewards:low_bytes", "name": "low"}]
    assert len(train(changes).column("rewards/low/mean")) == 2


@pytest.fixture(scope="module")
def other_tokens(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture behind a tokenizer that counts its pieces from the other end."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = load_tokenizer(str(tiny_model))
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = document["model"]["vocab"]
    keep = {"<s>", "</s>", "<pad>"}
    names = sorted((n for n in vocabulary if n not in keep), key=lambda n: -vocabulary[n])
    # And forgets capitals: a completion with one does not come back.
    document["normalizer"] = {"type": "Lowercase"}
    document["model"]["vocab"] = {**{n: vocabulary[n] for n in keep}, **{n: i for i, n in enumerate(names, len(keep))}}
    backend = Tokenizer.from_str(json.dumps(document))
    folder = tmp_path_factory.mktemp("other-tokens")
    load_policy(str(tiny_model)).model.save_pretrained(folder)  # type: ignore[operator]
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
    return folder


def test_a_teacher_of_other_tokens_reads_the_text_and_rows_that_do_not_come_back_are_left_out(
    tiny_model: Path, other_tokens: Path
) -> None:
    student, policy = load_policy(str(tiny_model)), load_policy(str(other_tokens))
    assert same_tokens(student.tokenizer, student.tokenizer)
    assert not same_tokens(student.tokenizer, policy.tokenizer)
    teacher = Teacher("other", policy, Scorer(policy.model), same_tokens=False)
    texts = [" 3", " 44", " cut", " Upper", " 5"]
    rows = [
        Stored([*student.tokenizer(t, add_special_tokens=False).input_ids, 1], t, 0.0, t == " cut", "") for t in texts
    ]
    # A token that its text does not show.
    rows[4].ids.insert(0, 2)
    texts = whole_texts(student.tokenizer, [row.ids for row in rows], texts)
    prompt = "1 + 2 ="
    rollouts = join_rollouts(None, [student.tokenizer(prompt).input_ids], [rows], pad_id=2)
    sums_N = teacher.score(rollouts, [prompt] * 5, texts, temperature=1.0, budget=10_000)
    assert sums_N.isnan().tolist() == [False, False, True, True, True]
    own = policy.tokenizer
    alone = join_rollouts(None, [own(prompt).input_ids], [[stored(own, " 44")]], pad_id=2)
    logps_NT, _ = Scorer(policy.model).score(alone)
    assert float(sums_N[1]) == pytest.approx(float(logps_NT.detach().sum()), abs=1e-4)


def test_a_teachers_turn_ends_with_the_token_that_its_tokenizer_names(other_tokens: Path) -> None:
    policy = load_policy(str(other_tokens))
    rows = [stored(policy.tokenizer, " 44")]
    rollouts = join_rollouts(None, [policy.tokenizer("1 + 2 =").input_ids], [rows], pad_id=2)
    sums = [
        Teacher("other", replace(policy, end_ids=ends), Scorer(policy.model), same_tokens=False).score(
            rollouts, ["1 + 2 ="], [" 44"], temperature=1.0, budget=10_000
        )
        for ends in ((1,), (0, 1))
    ]
    assert torch.equal(*sums)


def test_a_teacher_of_other_tokens_teaches_whole_completions_only(train: Train, other_tokens: Path) -> None:
    run = train({**distil(other_tokens), "training.steps": 2, "sampling.max_completion_tokens": 16})
    assert all(0 <= share <= 1 for share in run.column("gvpo/left_out"))
    with pytest.raises(InputError, match="has another tokenizer than the student, so single tokens cannot be compared"):
        train({**distil(other_tokens, form="token")}, name="token")
