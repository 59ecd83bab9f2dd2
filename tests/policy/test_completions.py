"""The model in this process as something that completes prompts; how what is missing is told apart."""

from pathlib import Path

import pytest
import torch

from trimtab.policy.completions import Completion, LocalCompleter, Prompt, stretches
from trimtab.policy.loading import Policy, encode_prompt, load_policy
from trimtab.policy.rollouts import Rollouts, pad_left, pad_right
from trimtab.policy.sampler import SamplingParams
from trimtab.policy.scorer import Scorer

TEXTS = ["1 + 2 =", "a longer prompt than the others", "x", "30 + 4 ="]
PARAMS = SamplingParams(temperature=0.8, max_tokens=10)


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Policy:
    loaded = load_policy(str(tiny_model))
    # Ends half of the completions before the limit: the model is random, and one end token of 259 hardly comes up.
    return Policy(loaded.model, loaded.tokenizer, end_ids=(1, *range(40, 60)), pad_id=loaded.pad_id)


@pytest.fixture(scope="module")
def prompts(policy: Policy) -> list[Prompt]:
    return [Prompt(text, encode_prompt(policy.tokenizer, text)) for text in TEXTS]


def tokens(completions: list[list[Completion]]) -> list[list[list[int] | None]]:
    return [[completion.token_ids for completion in group] for group in completions]


def test_every_field_agrees_with_the_sampled_tokens(policy: Policy, prompts: list[Prompt]) -> None:
    found = LocalCompleter(policy).complete(prompts, 3, PARAMS, 4)
    assert [len(group) for group in found] == [3] * len(prompts)
    rows = [completion for group in found for completion in group]
    for row in rows:
        assert row.token_ids and row.logps
        assert row.tokens == len(row.token_ids) == len(row.logps) <= 10
        assert row.truncated == (row.token_ids[-1] not in policy.end_ids)
        assert row.text == policy.tokenizer.decode(row.token_ids, skip_special_tokens=True)
    assert {row.truncated for row in rows} == {True, False}
    ids_PL, prompt_mask_PL = pad_left([prompt.token_ids or [] for prompt in prompts], 2)
    ids_NT, mask_NT = pad_right([row.token_ids or [] for row in rows], 2)
    owners_N = torch.arange(len(prompts)).repeat_interleave(3)
    truncated_N = torch.tensor([row.truncated for row in rows])
    rollouts = Rollouts(ids_PL, prompt_mask_PL, ids_NT, mask_NT, owners_N, truncated_N)
    with torch.no_grad():
        logps_NT, entropies_NT = Scorer(policy.model).score(rollouts, temperature=0.8, entropy_temperature=0.8)
    told = torch.tensor([logp for row in rows for logp in row.logps or []])
    torch.testing.assert_close(told, logps_NT[mask_NT], rtol=0, atol=1e-4)
    means_N = entropies_NT.sum(dim=1) / mask_NT.sum(dim=1)
    torch.testing.assert_close(torch.tensor([row.entropy for row in rows]), means_N, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rows_at_once", [1, 2, 5, 7])
def test_nothing_depends_on_how_many_rows_run_at_once(rows_at_once: int, policy: Policy, prompts: list[Prompt]) -> None:
    whole = LocalCompleter(policy).complete(prompts, 5, PARAMS, 4)
    parts = LocalCompleter(policy, rows_at_once).complete(prompts, 5, PARAMS, 4)
    assert tokens(parts) == tokens(whole)
    assert len({str(row) for group in tokens(whole) for row in group}) > 10, "completions differ from one another"


def test_an_interrupted_evaluation_goes_on_with_the_draws_of_an_unbroken_one(
    policy: Policy, prompts: list[Prompt]
) -> None:
    completer = LocalCompleter(policy)
    whole = completer.complete(prompts, 2, PARAMS, 4)
    missing = [0, 2, 3]
    found = {
        place: group
        for stretch in stretches(missing)
        for place, group in zip(
            stretch,
            completer.complete([prompts[i] for i in stretch], 2, PARAMS, 4, first_row=2 * stretch.start),
            strict=True,
        )
    }
    assert [tokens([found[place]]) for place in missing] == [tokens([whole[place]]) for place in missing]


def test_each_prompt_is_handed_over_before_the_next_chunk_is_sampled(policy: Policy, prompts: list[Prompt]) -> None:
    completer = LocalCompleter(policy, rows_at_once=4)
    saved: dict[int, list[Completion]] = {}

    def save(place: int, completions: list[Completion]) -> None:
        saved[place] = completions
        if place == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        completer.complete(prompts, 2, PARAMS, 4, on_done=save)
    assert list(saved) == [0, 1, 2]
    assert tokens(list(saved.values())) == tokens(completer.complete(prompts[:3], 2, PARAMS, 4))


def test_a_prompt_without_token_ids_is_the_callers_mistake(policy: Policy, prompts: list[Prompt]) -> None:
    with pytest.raises(ValueError, match="encode_prompt"):
        LocalCompleter(policy).complete([prompts[0], Prompt("text only")], 1, PARAMS, 4)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([], []),
        ([3], [range(3, 4)]),
        ([0, 1, 2], [range(3)]),
        ([0, 2, 3, 7], [range(1), range(2, 4), range(7, 8)]),
    ],
)
def test_stretches_are_the_gap_free_parts(places: list[int], expected: list[range]) -> None:
    assert list(stretches(places)) == expected
