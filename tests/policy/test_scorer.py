"""Both scoring paths against one full forward pass a row, for many architectures."""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trimtab.policy.head import token_logps
from trimtab.policy.rollouts import Rollouts, pad_left
from trimtab.policy.scorer import Scorer, unwrap

Tiny = Callable[..., Any]
SHARED = ["llama", "qwen2", "gpt2", "mistral", "phi", "mixtral"]
PLAIN = ["gemma2", "granite", "mamba", "lfm2"]


def reference(
    model: nn.Module, rollouts: Rollouts, temperature: float = 1.0, entropy_temperature: float | None = None
) -> tuple[Tensor, Tensor]:
    """Row by row, without padding, cache, mask or positions: nothing that the scorer does is done here."""
    dtype = next(model.parameters()).dtype
    logps_NT = torch.zeros(rollouts.mask_NT.shape, dtype=dtype)
    entropies_NT = torch.zeros_like(logps_NT)
    for row, completion in enumerate(rollouts.completion_lists()):
        group = int(rollouts.group_ids_N[row])
        prompt = rollouts.prompt_ids_PL[group][rollouts.prompt_mask_PL[group]].tolist()
        ids_1S = torch.tensor([prompt + completion])
        logits_TV = model(input_ids=ids_1S, use_cache=False).logits[0, len(prompt) - 1 : -1]
        for place, token in enumerate(completion):
            logps_NT[row, place] = torch.log_softmax(logits_TV[place] / temperature, dim=0)[token]
            if entropy_temperature is not None:
                p_V = torch.softmax(logits_TV[place] / entropy_temperature, dim=0)
                entropies_NT[row, place] = -(p_V * p_V.log()).sum()
    return logps_NT, entropies_NT


def gradients(model: nn.Module, scores: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Of a loss with a different weight on every token's log-probability and entropy."""
    generator = torch.Generator().manual_seed(5)
    loss = sum((torch.randn(s.shape, generator=generator).to(s.dtype) * s).sum() for s in scores)
    assert isinstance(loss, Tensor)
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Parameter by parameter, relative to the whole gradient: a key's bias has a gradient of 0 but for rounding."""
    assert found.keys() == expected.keys()
    whole = float(torch.stack([g.norm() for g in expected.values()]).norm())
    assert whole > 0
    for name, gradient in expected.items():
        error = float((found[name] - gradient).norm())
        assert error <= tolerance * max(float(gradient.norm()), 0.01 * whole), name


@contextmanager
def recorded_inputs(module: nn.Module, key: str | None = None) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of what the module is called with, in order."""
    shapes: list[tuple[int, ...]] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shapes.append(tuple((kwargs[key] if key else args[0]).shape))

    handle = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield shapes
    finally:
        handle.remove()


@pytest.mark.parametrize("architecture", SHARED)
def test_the_shared_path_is_found_fit_for_this_architecture(architecture: str, tiny: Tiny) -> None:
    scorer = Scorer(tiny(architecture))
    assert scorer.shared and scorer.reason == ""


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("gemma2", "final_logit_softcapping"),
        ("granite", "logits_scaling"),
        ("mamba", "does not take a shared prompt"),
        ("lfm2", "does not take a shared prompt"),
    ],
)
def test_an_architecture_that_cannot_share_takes_the_plain_path_and_says_why(
    architecture: str, reason: str, tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="trimtab"):
        scorer = Scorer(tiny(architecture))
    assert not scorer.shared
    assert reason in scorer.reason
    assert [r.levelname for r in caplog.records if scorer.reason in r.getMessage()] == ["WARNING"]


@pytest.mark.parametrize("path", ["shared", "plain"])
@pytest.mark.parametrize("temperatures", [(1.0, None), (0.7, 1.3)])
@pytest.mark.parametrize("architecture", SHARED + PLAIN)
def test_scores_and_gradients_equal_one_full_pass_a_row(
    architecture: str, temperatures: tuple[float, float | None], path: str, tiny: Tiny, awkward: Rollouts
) -> None:
    if path == "shared" and architecture in PLAIN:
        path = "chosen"
    model = tiny(architecture)
    scorer = Scorer(model, shared={"shared": True, "plain": False, "chosen": None}[path])
    found = scorer.score(awkward, temperature=temperatures[0], entropy_temperature=temperatures[1])
    found_gradients = gradients(model, found)
    expected = reference(model, awkward, *temperatures)
    for values_NT, expected_NT in zip(found, expected, strict=True):
        assert values_NT.dtype == torch.float32
        torch.testing.assert_close(values_NT, expected_NT, rtol=0, atol=1e-5)
        assert not values_NT[~awkward.mask_NT].any()
    assert_same_gradients(found_gradients, gradients(model, expected), 1e-5)


# Those without a norm that rounds to float32.
@pytest.mark.parametrize("architecture", ["gpt2", "phi"])
def test_in_float64_the_shared_path_is_exact(architecture: str, tiny: Tiny, awkward: Rollouts) -> None:
    model = tiny(architecture).double()
    scorer = Scorer(model)
    assert scorer.shared
    found = scorer.score(awkward, temperature=0.7, entropy_temperature=1.3)
    found_gradients = gradients(model, found)
    expected = reference(model, awkward, 0.7, 1.3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert_same_gradients(found_gradients, gradients(model, expected), 1e-9)


@pytest.mark.parametrize("shared", [True, False])
def test_completions_of_one_token_need_no_second_pass(shared: bool, tiny: Tiny, awkward: Rollouts) -> None:
    rollouts = awkward.select(torch.tensor([1, 4]))
    assert rollouts.mask_NT.shape == (2, 1)
    model = tiny("llama")
    with recorded_inputs(model.model, "input_ids") as passes:
        found = Scorer(model, shared=shared).score(rollouts, entropy_temperature=1.0)
    assert len(passes) == 1
    torch.testing.assert_close(found, reference(model, rollouts, 1.0, 1.0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_a_single_unpadded_prompt_is_scored_like_any_other(shared: bool, tiny: Tiny, awkward: Rollouts) -> None:
    rollouts = awkward.select(torch.tensor([0, 3, 4]))
    assert rollouts.prompt_mask_PL.all()
    model = tiny("mistral")
    found = Scorer(model, shared=shared).score(rollouts, entropy_temperature=1.0)
    torch.testing.assert_close(found, reference(model, rollouts, 1.0, 1.0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mistral", "gemma2", "lfm2"])
def test_what_stands_under_the_padding_changes_nothing(architecture: str, tiny: Tiny, awkward: Rollouts) -> None:
    model = tiny(architecture)
    scorer = Scorer(model)
    expected = scorer.score(awkward, entropy_temperature=1.0)
    expected_gradients = gradients(model, expected)
    other = dataclasses.replace(
        awkward,
        prompt_ids_PL=awkward.prompt_ids_PL.where(awkward.prompt_mask_PL, 63),
        completion_ids_NT=awkward.completion_ids_NT.where(awkward.mask_NT, 17),
    )
    found = scorer.score(other, entropy_temperature=1.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert_same_gradients(gradients(model, found), expected_gradients, 1e-5)


def test_each_prompt_runs_once_and_the_head_sees_real_completion_tokens_only(
    tiny: Tiny, awkward: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    scorer = Scorer(model)
    seen: list[tuple[int, ...]] = []

    def note(hidden_MH: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(tuple(hidden_MH.shape))
        return token_logps(hidden_MH, *args, **kwargs)

    monkeypatch.setattr("trimtab.policy.scorer.token_logps", note)
    with recorded_inputs(model.model, "input_ids") as passes, recorded_inputs(model.lm_head) as heads:
        scorer.score(awkward)
    # Three prompts of at most 7 tokens; then six completions without their last column of at most 6.
    assert passes == [(3, 7), (6, 5)]
    # 6 + 1 + 4 + 3 + 1 + 5 tokens; the model's own head, which would see all of them, never runs.
    assert seen == [(20, 32)]
    assert heads == []


@pytest.mark.parametrize("shared", [True, False])
def test_gradient_reaches_tokens_that_only_the_prompt_holds(shared: bool, tiny: Tiny) -> None:
    prompt_ids_PL, prompt_mask_PL = pad_left([[10, 11, 12], [13]], 0)
    rollouts = Rollouts(
        prompt_ids_PL,
        prompt_mask_PL,
        torch.tensor([[20, 21], [22, 23], [24, 0]]),
        torch.tensor([[1, 1], [1, 1], [1, 0]]).bool(),
        torch.tensor([0, 0, 1]),
        torch.zeros(3, dtype=torch.bool),
    )
    model = tiny("llama")
    Scorer(model, shared=shared).score(rollouts)[0].sum().backward()
    used = model.get_input_embeddings().weight.grad.abs().sum(dim=1).nonzero()[:, 0].tolist()
    # Every prompt token and every completion token but the last of its row, which predicts nothing.
    assert used == [10, 11, 12, 13, 20, 22]


def test_the_caller_decides_whether_gradient_is_kept(tiny: Tiny, awkward: Rollouts) -> None:
    scorer = Scorer(tiny("llama"))
    with torch.no_grad():
        assert not scorer.score(awkward)[0].requires_grad
    assert scorer.score(awkward)[0].requires_grad


def lora(model: nn.Module, **options: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **options))  # type: ignore[arg-type]
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:  # zero at the start, where an ignored adapter would go unnoticed
            nn.init.normal_(parameter, std=0.3)
    return wrapped


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_adapters_take_the_shared_path_and_count(architecture: str, tiny: Tiny, awkward: Rollouts) -> None:
    bare = tiny(architecture)
    without_NT = Scorer(bare).score(awkward)[0].detach()
    model = lora(bare)
    scorer = Scorer(model)
    assert scorer.shared
    found = scorer.score(awkward, entropy_temperature=1.0)
    assert (found[0] - without_NT).abs().max() > 0.1
    found_gradients = gradients(model, found)
    assert found_gradients and all("lora_" in name for name in found_gradients)
    expected = reference(model, awkward, 1.0, 1.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert_same_gradients(found_gradients, gradients(model, expected), 1e-5)


def test_switching_the_adapters_off_scores_the_model_beneath(tiny: Tiny, awkward: Rollouts) -> None:
    bare = tiny("llama")
    expected_NT = Scorer(bare).score(awkward)[0].detach()
    model = lora(bare)
    scorer = Scorer(model)
    with model.disable_adapter():  # type: ignore[operator]
        torch.testing.assert_close(scorer.score(awkward)[0].detach(), expected_NT, rtol=0, atol=1e-6)


def test_an_adapter_on_the_head_takes_the_plain_path(tiny: Tiny, awkward: Rollouts) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny("llama"), LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    scorer = Scorer(model)
    assert not scorer.shared and "not a plain linear layer" in scorer.reason
    torch.testing.assert_close(
        scorer.score(awkward, entropy_temperature=1.0), reference(model, awkward, 1.0, 1.0), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("with_lora", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_gradient_checkpointing_takes_the_plain_path_with_the_same_gradients(
    architecture: str, with_lora: bool, tiny: Tiny, awkward: Rollouts
) -> None:
    def build() -> nn.Module:
        return lora(tiny(architecture)) if with_lora else tiny(architecture)

    torch.manual_seed(3)
    plain = build()
    expected = gradients(plain, Scorer(plain, shared=False).score(awkward))
    torch.manual_seed(3)
    model = build()
    model.load_state_dict(plain.state_dict())
    unwrap(model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    scorer = Scorer(model)
    assert not scorer.shared and "gradient checkpointing" in scorer.reason
    assert_same_gradients(gradients(model, scorer.score(awkward)), expected, 1e-5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("architecture", ["gpt2", "mamba"])
def test_looking_at_a_model_leaves_its_mode_weights_gradients_and_the_random_state_alone(
    architecture: str, training: bool, tiny: Tiny
) -> None:
    model = tiny(architecture).train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    Scorer(model)
    assert all(module.training == training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_is_no_reason_against_sharing_and_acts_in_training_mode_only(tiny: Tiny, awkward: Rollouts) -> None:
    model = tiny("gpt2", resid_pdrop=0.5)
    scorer = Scorer(model)
    assert scorer.shared
    torch.manual_seed(0)
    assert not torch.equal(scorer.score(awkward)[0], scorer.score(awkward)[0])
    model.eval()
    torch.testing.assert_close(scorer.score(awkward)[0], reference(model, awkward)[0], rtol=0, atol=1e-5)


def test_a_model_that_answers_differently_with_a_cache_is_found_out_by_the_comparison(tiny: Tiny) -> None:
    model = tiny("llama")

    def shift(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if kwargs.get("use_cache"):
            output.last_hidden_state = output.last_hidden_state + 0.01
        return output

    model.model.register_forward_hook(shift, with_kwargs=True)
    scorer = Scorer(model)
    assert not scorer.shared and scorer.reason.startswith("sharing the prompt changes log-probabilities by ")


@pytest.mark.parametrize(("shared", "reason"), [(True, ""), (False, "asked for")])
def test_a_path_that_is_asked_for_is_taken_without_a_look_or_a_warning(
    shared: bool, reason: str, tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny("llama")
    with recorded_inputs(model.model, "input_ids") as passes, caplog.at_level(logging.WARNING, logger="trimtab"):
        scorer = Scorer(model, shared=shared)
    assert (scorer.shared, scorer.reason, passes, caplog.records) == (shared, reason, [], [])


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_bfloat16_weights_and_bfloat16_autocast_share_and_stay_close(
    architecture: str, tiny: Tiny, awkward: Rollouts
) -> None:
    model = tiny(architecture, initializer_range=0.1)
    expected = Scorer(model).score(awkward, entropy_temperature=1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = Scorer(model, shared=True).score(awkward, entropy_temperature=1.0)
    half = model.to(torch.bfloat16)
    scorer = Scorer(half)
    assert scorer.shared
    for scores in (under_autocast, scorer.score(awkward, entropy_temperature=1.0)):
        assert scores[0].dtype == torch.float32
        torch.testing.assert_close(scores, expected, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotary_embedding_that_depends_on_the_length_takes_the_plain_path(kind: str, tiny: Tiny) -> None:
    model = tiny("llama")
    model.config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    scorer = Scorer(model)
    assert not scorer.shared and "depends on the length" in scorer.reason
