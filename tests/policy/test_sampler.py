"""What is drawn, what is recorded of it, and how much is computed for it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from trimtab.policy import sampler as sampler_module
from trimtab.policy.rollouts import Rollouts
from trimtab.policy.sampler import LocalSampler, SamplingParams, draw, truncate
from trimtab.policy.scorer import Scorer, unwrap

Tiny = Callable[..., Any]
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
END = (1, 2, 3, 4)
"""Four end tokens of 64, so that rows finish at many different lengths."""
EVERY = ["llama", "qwen2", "gpt2", "mistral", "gemma2", "phi", "granite", "mixtral", "mamba", "lfm2"]


def sampler(model: nn.Module, end_ids: tuple[int, ...] = END) -> LocalSampler:
    return LocalSampler(model, end_ids=end_ids, pad_id=0)


def assert_same(found: Rollouts, expected: Rollouts) -> None:
    """The same tokens, and numbers that differ by rounding only."""
    assert found.completion_lists() == expected.completion_lists()
    assert found.truncated_N.tolist() == expected.truncated_N.tolist()
    for name in ("old_logps_NT", "entropies_NT"):
        width = found.mask_NT.shape[1]
        torch.testing.assert_close(getattr(found, name), getattr(expected, name)[:, :width], rtol=0, atol=1e-5)


def watch(model: nn.Module) -> list[tuple[int, int]]:
    """(rows, columns) of every forward pass."""
    shapes: list[tuple[int, int]] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


@pytest.mark.parametrize("architecture", EVERY)
def test_recorded_log_probabilities_and_entropies_are_those_of_the_scorer(architecture: str, tiny: Tiny) -> None:
    model = tiny(architecture)
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, max_tokens=12, min_tokens=2, entropy_temperature=1.2)
    rollouts = sampler(model).sample(PROMPTS, 4, params, 3)
    assert 12 > int(rollouts.mask_NT.sum(dim=1).min()) >= 2, "rows should differ in length"
    with torch.no_grad():
        logps_NT, entropies_NT = Scorer(model).score(rollouts, temperature=0.8, entropy_temperature=1.2)
    torch.testing.assert_close(rollouts.old_logps_NT, logps_NT, rtol=0, atol=1e-5)
    torch.testing.assert_close(rollouts.entropies_NT, entropies_NT, rtol=0, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_without_a_temperature_of_their_own_the_entropies_have_that_of_sampling(architecture: str, tiny: Tiny) -> None:
    model = tiny(architecture)
    rollouts = sampler(model).sample(PROMPTS, 2, SamplingParams(temperature=0.6, max_tokens=6), 3)
    with torch.no_grad():
        _, entropies_NT = Scorer(model).score(rollouts, temperature=0.6, entropy_temperature=0.6)
    torch.testing.assert_close(rollouts.entropies_NT, entropies_NT, rtol=0, atol=1e-5)


@pytest.mark.parametrize("architecture", EVERY)
def test_a_row_is_the_same_alone_and_among_other_neighbours(architecture: str, tiny: Tiny) -> None:
    samples = sampler(tiny(architecture))
    params = SamplingParams(max_tokens=12)
    whole = samples.sample(PROMPTS, 4, params, 7)
    assert len({len(row) for row in whole.completion_lists()}) > 3
    for group in range(3):
        rows = torch.arange(4 * group, 4 * group + 4)
        assert_same(samples.sample([PROMPTS[group]], 4, params, 7, first_row=4 * group), whole.select(rows))
    # Other prompts beside it, of another length, in the same places.
    others = samples.sample([[20, 21], PROMPTS[1], list(range(30, 41))], 4, params, 7)
    assert_same(others.select(torch.arange(4, 8)), whole.select(torch.arange(4, 8)))
    assert_same(samples.sample([PROMPTS[0]], 1, params, 7, first_row=2), whole.select(torch.tensor([2])))


@pytest.mark.parametrize("architecture", EVERY)
def test_rows_that_leave_the_batch_do_not_change_the_ones_that_stay(
    architecture: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(architecture)
    samples, params = sampler(model), SamplingParams(max_tokens=15)
    shapes = watch(unwrap(model))
    runs = {}
    for leave in (0.0, 0.5, 2.0):
        monkeypatch.setattr(sampler_module, "LEAVE", leave)
        shapes.clear()
        runs[leave] = (samples.sample(PROMPTS, 4, params, 11), [rows for rows, _ in shapes[1:]])
    assert_same(runs[0.0][0], runs[2.0][0])
    assert_same(runs[0.5][0], runs[2.0][0])
    lengths_N = runs[2.0][0].mask_NT.sum(dim=1)
    # A row of length t is fed t - 1 tokens: whoever has finished is gone at the next step, or nobody ever is.
    assert runs[0.0][1] == [int((lengths_N > step).sum()) for step in range(1, int(lengths_N.max()))]
    assert set(runs[2.0][1]) == {12}
    assert sorted(set(runs[0.5][1]), reverse=True) == list(dict.fromkeys(runs[0.5][1]))
    assert all(now == 12 or now <= 6 for now in runs[0.5][1])


def test_a_long_completion_outgrows_the_cache_without_a_trace(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from trimtab.policy import cache

    samples, params = sampler(tiny("llama"), (1,)), SamplingParams(max_tokens=40)
    expected = samples.sample(PROMPTS, 2, params, 2)
    monkeypatch.setattr(cache, "GROW", 1)
    assert_same(samples.sample(PROMPTS, 2, params, 2), expected)
    assert expected.mask_NT.shape[1] == 40


def test_each_prompt_runs_once_a_group_and_then_one_token_a_row(tiny: Tiny) -> None:
    model = tiny("llama")
    shapes = watch(model)
    sampler(model, (63,)).sample(PROMPTS, 4, SamplingParams(max_tokens=5, min_tokens=5), 0)
    # The fifth token predicts nothing, so it is never fed.
    assert shapes == [(3, 5)] + [(12, 1)] * 4


def test_the_mask_ends_with_the_first_end_token_and_says_which_rows_were_cut(tiny: Tiny) -> None:
    rollouts = sampler(tiny("llama")).sample(PROMPTS, 8, SamplingParams(max_tokens=10), 1)
    seen = set()
    for row, truncated in zip(rollouts.completion_lists(), rollouts.truncated_N.tolist(), strict=True):
        assert not set(row[:-1]) & set(END)
        assert truncated == (row[-1] not in END)
        assert len(row) == 10 or not truncated
        seen.add(truncated)
    assert seen == {True, False}
    assert rollouts.mask_NT.shape[1] == int(rollouts.mask_NT.sum(dim=1).max())
    # Behind the end there is padding with nothing recorded.
    assert rollouts.old_logps_NT is not None and rollouts.entropies_NT is not None
    behind_NT = ~rollouts.mask_NT
    assert behind_NT.any() and not rollouts.completion_ids_NT[behind_NT].any()
    assert not rollouts.old_logps_NT[behind_NT].any() and not rollouts.entropies_NT[behind_NT].any()
    assert (rollouts.old_logps_NT[rollouts.mask_NT] < 0).all()
    # A prefix: no hole in any row.
    assert torch.equal(rollouts.mask_NT.cummin(dim=1).values, rollouts.mask_NT)


def test_an_end_token_in_the_last_place_is_an_end_and_no_truncation(tiny: Tiny) -> None:
    samples = sampler(tiny("llama"), tuple(range(64)))
    rollouts = samples.sample(PROMPTS, 1, SamplingParams(max_tokens=3, min_tokens=0), 1)
    assert rollouts.mask_NT.tolist() == [[True]] * 3
    assert not rollouts.truncated_N.any()


def test_batches_stop_as_soon_as_every_row_has_ended_and_report_each_step(tiny: Tiny) -> None:
    steps: list[tuple[int, int]] = []
    rollouts = sampler(tiny("llama")).sample(
        PROMPTS, 2, SamplingParams(max_tokens=200), 1, on_step=lambda done, left: steps.append((done, left))
    )
    lengths_N = rollouts.mask_NT.sum(dim=1)
    assert steps == [(step, int((lengths_N > step).sum())) for step in range(1, int(lengths_N.max()) + 1)]
    assert steps[-1][1] == 0 and steps[-1][0] < 200


def test_end_tokens_are_banned_before_the_least_length_and_allowed_at_it(tiny: Tiny) -> None:
    samples = sampler(tiny("llama"), tuple(range(60)))
    for temperature in (1.0, 0.0):
        params = SamplingParams(temperature=temperature, max_tokens=9, min_tokens=4)
        rollouts = samples.sample(PROMPTS, 20, params, 1)
        assert (rollouts.completion_ids_NT[:, :4] >= 60).all()
        # 60 of 64 tokens end a row, so that most end at once.
        assert (rollouts.mask_NT.sum(dim=1) == 5).float().mean() > 0.5


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "lfm2"])
def test_temperature_zero_takes_the_likeliest_token_of_a_plain_loop(architecture: str, tiny: Tiny) -> None:
    model = tiny(architecture)
    rollouts = sampler(model, (1,)).sample(PROMPTS, 2, SamplingParams(temperature=0.0, max_tokens=8), 0)
    for row, found in enumerate(rollouts.completion_lists()):
        ids = list(PROMPTS[row // 2])
        for token in found:
            logits_V = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            assert token == int(logits_V.argmax())
            ids.append(token)
    assert rollouts.completion_lists()[::2] == rollouts.completion_lists()[1::2]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_first_tokens_are_distributed_as_the_model_says(temperature: float, tiny: Tiny) -> None:
    model, rows = tiny("llama", initializer_range=0.15), 5000
    params = SamplingParams(temperature=temperature, max_tokens=1)
    rollouts = sampler(model).sample([PROMPTS[0]], rows, params, 1234)
    logits_V = model(input_ids=torch.tensor([PROMPTS[0]]), use_cache=False).logits[0, -1]
    p_V = torch.softmax(logits_V.double() / temperature, dim=0).detach()
    counts_V = torch.bincount(rollouts.completion_ids_NT[:, 0], minlength=64)
    # Cells with an expectation below 5 are joined, as the test demands.
    common_V = p_V * rows >= 5
    assert int(common_V.sum()) > 5
    observed = [*counts_V[common_V].tolist(), int(counts_V[~common_V].sum())]
    expected = [*(p_V[common_V] * rows).tolist(), float(p_V[~common_V].sum()) * rows]
    if expected[-1] < 5:
        observed[-2:], expected[-2:] = [sum(observed[-2:])], [sum(expected[-2:])]
    assert stats.chisquare(observed, expected).pvalue > 0.001


def test_later_tokens_are_distributed_as_the_model_says(tiny: Tiny) -> None:
    model, rows = tiny("llama", initializer_range=0.15), 4000
    samples = sampler(model, (63,))
    rollouts = samples.sample([PROMPTS[0]], rows, SamplingParams(max_tokens=3, min_tokens=3), 5)
    assert rollouts.old_logps_NT is not None and rollouts.entropies_NT is not None
    # E[-log p] is the entropy: the surprise of what was drawn must agree with it within its own error, and end tokens
    # that are banned shift it by less than the tolerance (63 is one unlikely token of 64).
    for step in (1, 2):
        excess_N = -rollouts.old_logps_NT[:, step] - rollouts.entropies_NT[:, step]
        assert abs(float(excess_N.mean())) < 4 * float(excess_N.std()) / rows**0.5 + 0.02


# Powers of two, so that sums are exact.
P_V = [0.125, 0.5, 0.25, 0.0625, 0.0625]


@pytest.mark.parametrize(
    ("top_p", "top_k", "expected"),
    [
        (1.0, 0, P_V),
        (1.0, 2, [0, 0.5, 0.25, 0, 0]),
        (1.0, 5, P_V),
        (1.0, 99, P_V),
        # The smallest set that reaches top_p: 0.5 does at once, 0.51 needs a second token, 0.75 is met by two.
        (0.1, 0, [0, 0.5, 0, 0, 0]),
        (0.5, 0, [0, 0.5, 0, 0, 0]),
        (0.51, 0, [0, 0.5, 0.25, 0, 0]),
        (0.75, 0, [0, 0.5, 0.25, 0, 0]),
        (0.76, 0, [0.125, 0.5, 0.25, 0, 0]),
        # Top-k comes first and top-p is measured on what it leaves: 0.5 of 0.75 is two thirds.
        (0.66, 2, [0, 0.5, 0, 0, 0]),
        (0.67, 2, [0, 0.5, 0.25, 0, 0]),
    ],
)
def test_truncation_keeps_exactly_the_nucleus_and_the_top_k(top_p: float, top_k: int, expected: list[float]) -> None:
    p_NV = torch.tensor([P_V, P_V[::-1]])
    found_NV = truncate(p_NV, top_p=top_p, top_k=top_k)
    assert found_NV.tolist() == [expected, expected[::-1]]


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 3), (0.6, 0), (0.8, 4)])
def test_sampled_tokens_fill_the_truncated_support_and_never_leave_it(top_p: float, top_k: int, tiny: Tiny) -> None:
    model = tiny("llama", initializer_range=0.15)
    params = SamplingParams(max_tokens=1, top_p=top_p, top_k=top_k)
    rollouts = sampler(model).sample([PROMPTS[0]], 1500, params, 8)
    logits_V = model(input_ids=torch.tensor([PROMPTS[0]]), use_cache=False).logits[0, -1].detach()
    ranked = torch.softmax(logits_V, dim=0).sort(descending=True)
    allowed: set[int] = set()
    mass = 0.0
    total = float(ranked.values[: top_k or 64].sum())
    for probability, token in zip(ranked.values.tolist(), ranked.indices.tolist(), strict=True):
        if mass >= top_p * total or (top_k and len(allowed) == top_k):
            break
        allowed.add(token)
        mass += probability
    assert set(rollouts.completion_ids_NT[:, 0].tolist()) == allowed


def drawn(p: list[float], uniforms: list[float], **options: Any) -> list[int]:
    logits_NV = torch.tensor(p).log().expand(len(uniforms), -1)
    params = SamplingParams(**options)
    return draw(logits_NV, torch.tensor(uniforms), params, torch.tensor([0]), 0)[0].tolist()


def test_a_uniform_number_picks_the_token_whose_share_of_the_line_it_falls_on() -> None:
    # Shares end at 0.5, 0.75, 1; the lower border belongs to a share, the upper to the next.
    edges = [0.0, 0.4999, 0.5, 0.7499, 0.75, 1 - 2**-24]
    assert drawn([0.5, 0.25, 0.25], edges) == [0, 0, 1, 1, 2, 2]


def test_the_largest_uniform_number_never_picks_a_token_that_was_truncated_away() -> None:
    assert drawn([0.5, 0.3, 0.1, 0.1], [1 - 2**-24, 0.0], top_k=2) == [1, 0]
    assert drawn([0.1, 0.1, 0.3, 0.5], [1 - 2**-24, 0.0], top_k=2) == [3, 2]


def test_a_certain_end_token_is_still_banned_before_the_least_length() -> None:
    logits_NV = torch.tensor([[200.0, 0.0, 1.0]])
    token_N, logp_N, entropy_N = draw(
        logits_NV, torch.tensor([0.0]), SamplingParams(min_tokens=1), torch.tensor([0]), 0
    )
    assert token_N.tolist() == [1]
    # Recorded as the scorer would: under the whole distribution, where the end token is certain.
    assert logp_N.tolist() == [-200.0] and entropy_N.tolist() == [0.0]


@pytest.mark.parametrize("entropy_temperature", [None, 1.3])
def test_drawing_is_the_same_under_autocast(entropy_temperature: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_NV, uniforms_N = 3 * torch.randn(50, 300, generator=generator), torch.rand(50, generator=generator)
    params = SamplingParams(temperature=0.8, top_p=0.9, entropy_temperature=entropy_temperature)
    expected = draw(logits_NV, uniforms_N, params, torch.tensor([0]), 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = draw(logits_NV, uniforms_N, params, torch.tensor([0]), 0)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))


def test_equal_seeds_are_equal_to_the_bit_and_other_seeds_are_not(tiny: Tiny) -> None:
    samples, params = sampler(tiny("llama")), SamplingParams(max_tokens=10)

    def tensors(seed: int) -> dict[str, Tensor]:
        rollouts = samples.sample(PROMPTS, 4, params, seed)
        return {f.name: v for f in dataclasses.fields(rollouts) if isinstance(v := getattr(rollouts, f.name), Tensor)}

    first = tensors(1)
    torch.manual_seed(99)  # the global state plays no part
    again, other = tensors(1), tensors(2)
    assert len(first) == 8
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert first["completion_ids_NT"].tolist() != other["completion_ids_NT"].tolist()


def test_the_rows_of_a_prompt_differ_and_stand_next_to_each_other(tiny: Tiny) -> None:
    rollouts = sampler(tiny("llama")).sample(PROMPTS, 4, SamplingParams(max_tokens=10), 1)
    assert rollouts.group_ids_N.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert len(set(map(tuple, rollouts.completion_lists()))) > 9
    assert [ids[mask].tolist() for ids, mask in zip(rollouts.prompt_ids_PL, rollouts.prompt_mask_PL, strict=True)] == (
        PROMPTS
    )


def test_a_longer_limit_only_continues_the_rows(tiny: Tiny) -> None:
    samples = sampler(tiny("llama"))
    short = samples.sample(PROMPTS, 4, SamplingParams(max_tokens=4), 1).completion_lists()
    long = samples.sample(PROMPTS, 4, SamplingParams(max_tokens=12), 1).completion_lists()
    assert short == [row[:4] for row in long] and short != long


@pytest.mark.parametrize("training", [True, False])
def test_sampling_switches_dropout_off_and_leaves_the_mode_as_it_was(training: bool, tiny: Tiny) -> None:
    model = tiny("gpt2", resid_pdrop=0.9, embd_pdrop=0.9).train(training)
    rollouts = sampler(model).sample(PROMPTS, 2, SamplingParams(max_tokens=5), 1)
    assert all(module.training == training for module in model.modules())
    assert rollouts.old_logps_NT is not None and not rollouts.old_logps_NT.requires_grad
    model.eval()
    torch.testing.assert_close(rollouts.old_logps_NT, Scorer(model).score(rollouts)[0].detach(), rtol=0, atol=1e-5)


def test_the_mode_comes_back_when_sampling_fails(tiny: Tiny) -> None:
    model = tiny("llama")
    with pytest.raises(IndexError):
        sampler(model).sample([[9999]], 1, SamplingParams(max_tokens=2), 1)
    assert model.training


def test_gradient_checkpointing_does_not_change_what_is_sampled(tiny: Tiny) -> None:
    model = tiny("llama")
    params = SamplingParams(max_tokens=8)
    expected = sampler(model).sample(PROMPTS, 2, params, 1)
    model.gradient_checkpointing_enable()
    assert_same(sampler(model).sample(PROMPTS, 2, params, 1), expected)


def test_adapters_are_sampled_from(tiny: Tiny) -> None:
    from peft import LoraConfig, get_peft_model

    bare = tiny("llama")
    params = SamplingParams(max_tokens=8)
    before = sampler(bare).sample(PROMPTS, 2, params, 1)
    torch.manual_seed(1)
    model = get_peft_model(bare, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    rollouts = sampler(model).sample(PROMPTS, 2, params, 1)
    assert rollouts.completion_lists() != before.completion_lists()
    with torch.no_grad():
        torch.testing.assert_close(rollouts.old_logps_NT, Scorer(model).score(rollouts)[0], rtol=0, atol=1e-5)


def test_bfloat16_weights_record_float32(tiny: Tiny) -> None:
    model = tiny("llama", initializer_range=0.1).to(torch.bfloat16)
    rollouts = sampler(model).sample(PROMPTS, 2, SamplingParams(max_tokens=6), 1)
    assert rollouts.old_logps_NT is not None and rollouts.old_logps_NT.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(rollouts.old_logps_NT, Scorer(model).score(rollouts)[0], rtol=0.02, atol=0.1)
