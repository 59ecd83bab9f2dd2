from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trimtab.errors import InputError
from trimtab.pivotal import SearchSettings, search
from trimtab.pivotal.local import LocalSearchPolicy, fingerprint, invert
from trimtab.pivotal.policy import Request
from trimtab.pivotal.trajectory import Question
from trimtab.policy.loading import Policy, load_policy
from trimtab.policy.sampler import truncate

Make = Callable[..., LocalSearchPolicy]
PROMPT, OTHER = (0, 40, 41, 42, 43), (0, 50)
IDS = (60, 61, 62, 63, 64, 65)


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Policy:
    return load_policy(str(tiny_model), dtype="float32", device="cpu")


@pytest.fixture
def make(policy: Policy) -> Make:
    return lambda **settings: LocalSearchPolicy(policy, **{"max_completion_tokens": 12, **settings})


def plain_distribution(policy: Policy, ids: tuple[int, ...], *, temperature: float, top_p: float) -> torch.Tensor:
    """At every position, by one plain forward pass."""
    with torch.no_grad():
        logits_TV = policy.model(torch.tensor([ids])).logits[0]
    p_TV = truncate(torch.softmax(logits_TV / temperature, dim=1), top_p=top_p, top_k=0)
    return p_TV / p_TV.sum(dim=1, keepdim=True)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_scores_are_those_of_the_distribution_that_rollouts_are_drawn_from(
    make: Make, policy: Policy, top_p: float
) -> None:
    local = make(temperature=0.7, top_p=top_p)
    for prompt in (PROMPT, OTHER, PROMPT):
        p_TV = plain_distribution(policy, prompt + IDS, temperature=0.7, top_p=top_p)[len(prompt) - 1 : -1]
        expected = p_TV.gather(1, torch.tensor(IDS)[:, None])[:, 0].clamp(min=torch.finfo(torch.float32).tiny).log()
        assert local.score([(prompt, IDS)])[0] == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_prefix_of_a_scored_trajectory_costs_one_token_and_gives_what_a_fresh_prefix_gives(make: Make) -> None:
    known, fresh = make(), make()
    known.score([(PROMPT, IDS)])
    before = known.prefilled_tokens
    assert before == len(PROMPT) + len(IDS)
    requests = [
        Request(PROMPT, IDS[:4], None, 0, 6, seed=1),
        Request(PROMPT, (), None, 0, 3, seed=2),
        Request(PROMPT, IDS[:2], IDS[2], 0, 5, seed=3),
    ]
    rows = known.sample(requests)
    assert known.prefilled_tokens == before + 3
    for request, own in zip(requests, rows, strict=True):
        assert fresh.sample([request])[0] == own
        for row in own:
            assert 1 <= len(row.token_ids) <= 12 - len(request.prefix_ids)
            assert row.truncated == (row.token_ids[-1] != 1)
            assert row.truncated <= (len(row.token_ids) == 12 - len(request.prefix_ids))


def test_a_continuation_depends_on_its_seed_and_number_alone(make: Make) -> None:
    local = make()
    whole = local.sample([Request(PROMPT, IDS[:2], None, 0, 8, seed=5), Request(OTHER, IDS, None, 0, 4, seed=6)])
    assert local.sample([Request(PROMPT, IDS[:2], None, 5, 3, seed=5)])[0] == whole[0][5:]
    assert local.sample([Request(OTHER, IDS, None, 2, 2, seed=6)])[0] == whole[1][2:]
    assert len(set(whole[0])) > 1


def test_first_tokens_follow_the_distribution_and_a_banned_one_never_comes(make: Make, policy: Policy) -> None:
    local = make(max_completion_tokens=1, temperature=0.1)
    p_V = plain_distribution(policy, PROMPT, temperature=0.1, top_p=1.0)[-1]
    likeliest = int(p_V.argmax())
    free, without = local.sample(
        [Request(PROMPT, (), None, 0, 4000, seed=1), Request(PROMPT, (), likeliest, 0, 4000, seed=2)]
    )
    share = torch.bincount(torch.tensor([row.token_ids[0] for row in free]), minlength=len(p_V)) / 4000
    assert p_V[likeliest] > 0.1
    assert float((share - p_V).abs().max()) < 0.03
    assert all(row.token_ids[0] != likeliest for row in without)
    p_V[likeliest] = 0
    share = torch.bincount(torch.tensor([row.token_ids[0] for row in without]), minlength=len(p_V)) / 4000
    assert float((share - p_V / p_V.sum()).abs().max()) < 0.03


def test_old_trajectories_are_forgotten_without_changing_a_rollout(make: Make) -> None:
    small, large = make(kept_tokens=12), make()
    request = Request(PROMPT, IDS[:3], None, 0, 4, seed=1)
    for local in (small, large):
        local.score([(PROMPT, IDS), (OTHER, IDS)])
    assert small.sample([request]) == large.sample([request])
    assert small.prefilled_tokens > large.prefilled_tokens


def test_a_search_on_a_model_is_free_the_second_time(make: Make, tmp_path: Path) -> None:
    questions = [Question("a", "", PROMPT), Question("b", "", OTHER)]
    settings = SearchSettings(start=4, step=4, cap=12, confirm=(4, 8), screen=8, trajectories=1)

    def judge(completion_ids: list[list[int]], **_: object) -> list[float]:
        return [float(sum(ids) % 2) for ids in completion_ids]

    first = search(make(), questions, judge, settings=settings, folder=tmp_path)
    assert first.finished and first.usage.rollouts > 0
    second = search(make(), questions, judge, settings=settings, folder=tmp_path)
    assert second.tokens == first.tokens and second.usage.rollouts == second.usage.prefilled_tokens == 0


def test_inverting_never_gives_a_token_of_no_probability() -> None:
    p_NV = torch.tensor([[0.0, 0.5, 0.5, 0.0]]).repeat(3, 1)
    assert invert(p_NV, torch.tensor([0.0, 0.5, 1.0])).tolist() == [1, 2, 2]


def test_greedy_decoding_is_refused(make: Make) -> None:
    with pytest.raises(InputError, match="temperature"):
        make(temperature=0.0)


def test_another_weight_is_another_model(policy: Policy) -> None:
    before = fingerprint(policy.model)
    parameter = next(policy.model.parameters())
    with torch.no_grad():
        parameter[0, 0] += 1
    assert fingerprint(policy.model) != before
    with torch.no_grad():
        parameter[0, 0] -= 1
