"""The differentiable half: ratio, clip, KL, entropy term and the explicit denominator."""

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from trimtab.objectives.entropy import gtpo_weights
from trimtab.objectives.surrogate import k3_divergence, loss_denominator, surrogate_loss

NAN, INF = math.nan, math.inf
MASK_NT = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])


# --- the denominator ---


def test_each_normaliser_counts_what_it_says() -> None:
    assert loss_denominator(MASK_NT).item() == 3
    assert loss_denominator(MASK_NT, normaliser="tokens").item() == 6
    assert loss_denominator(MASK_NT, normaliser="constant", max_length=8).item() == 24


def test_rows_without_tokens_do_not_count_and_an_empty_batch_still_divides_by_one() -> None:
    mask_NT = torch.tensor([[1, 1], [0, 0]])
    assert loss_denominator(mask_NT).item() == 1
    assert loss_denominator(mask_NT, normaliser="constant", max_length=5).item() == 5
    nothing_NT = torch.zeros(2, 2)
    assert loss_denominator(nothing_NT).item() == 1
    assert loss_denominator(nothing_NT, normaliser="tokens").item() == 1
    assert loss_denominator(nothing_NT, normaliser="constant", max_length=5).item() == 5


def test_a_constant_denominator_needs_the_longest_length_and_names_must_be_known() -> None:
    for max_length in (None, 0, -3):
        with pytest.raises(ValueError, match="needs max_length"):
            loss_denominator(MASK_NT, normaliser="constant", max_length=max_length)
    with pytest.raises(ValueError, match="normaliser must be one of rows, tokens, constant, groups, not 'mean'"):
        loss_denominator(MASK_NT, normaliser="mean")  # type: ignore[arg-type]


# --- values by hand ---

LOG_RATIO_NT = torch.tensor([[1.5, 1.1, 1.0], [0.5, 1.0, 1.0], [1.25, 0.75, 1.0]]).log()
WEIGHTS_NT = torch.tensor([[1.0, 1, 0], [-1, 0, 0], [-2, 2, 0]])


def loss_of(**options: Any) -> tuple[float, dict[str, Tensor]]:
    loss, sums = surrogate_loss(
        LOG_RATIO_NT - 1.0, torch.full((3, 3), -1.0), WEIGHTS_NT, MASK_NT, denominator=3, **options
    )
    return loss.item(), sums


def test_the_unclipped_loss_by_hand() -> None:
    # rows: (1.5 + 1.1) / 2 = 1.3; -0.5; (-2.5 + 1.5 + 0) / 3 = -1 / 3; minus the sum, over 3
    loss, sums = loss_of()
    assert loss == pytest.approx(-(1.3 - 0.5 - 1 / 3) / 3)
    assert sums["tokens"].item() == 6
    assert sums["clipped"].item() == 0
    assert sums["ratio"].item() == pytest.approx(1.5 + 1.1 + 0.5 + 1.25 + 0.75 + 1)
    # k3 of the policy against the old one, each token: 1/r - log(1/r) - 1 = 1/r + log r - 1
    assert sums["kl_old"].item() == pytest.approx(
        sum(1 / r + math.log(r) - 1 for r in (1.5, 1.1, 0.5, 1.25, 0.75, 1.0)), abs=1e-6
    )
    assert "kl" not in sums


def test_without_the_division_by_length_the_tokens_are_added() -> None:
    # 1.5 + 1.1 - 0.5 - 2.5 + 1.5 + 0 = 1.1
    assert loss_of(normaliser="tokens")[0] == pytest.approx(-1.1 / 3)
    assert loss_of(normaliser="constant")[0] == pytest.approx(-1.1 / 3)


def test_clipping_takes_the_smaller_gain_for_either_sign() -> None:
    # 1.5 -> 1.2 (A > 0); 1.1 stays; 0.5 -> 0.8 (A < 0): -0.8; 1.25 stays (A < 0, the pessimistic side): -2.5;
    # 0.75 stays (A > 0): 1.5; weight 0. Two clipped.
    loss, sums = loss_of(normaliser="tokens", clip_low=0.2, clip_high=0.2)
    assert loss == pytest.approx(-(1.2 + 1.1 - 0.8 - 2.5 + 1.5) / 3)
    assert sums["clipped"].item() == 2


def test_each_bound_of_the_clip_works_alone() -> None:
    loss, sums = loss_of(normaliser="tokens", clip_high=0.28)
    assert loss == pytest.approx(-(1.28 + 1.1 - 0.5 - 2.5 + 1.5) / 3)
    assert sums["clipped"].item() == 1
    assert loss_of(normaliser="tokens", clip_low=0.2)[0] == pytest.approx(-(1.5 + 1.1 - 0.8 - 2.5 + 1.5) / 3)


def test_the_sequence_ratio_is_the_geometric_mean_of_the_token_ratios() -> None:
    # sqrt(1.5 * 1.1) = 1.284523; 0.5; (1.25 * 0.75) ** (1/3) = 0.978717, whose weights cancel
    loss, sums = loss_of(level="sequence")
    assert loss == pytest.approx(-(math.sqrt(1.65) - 0.5) / 3, abs=1e-6)
    assert sums["ratio"].item() == pytest.approx(2 * math.sqrt(1.65) + 0.5 + 3 * 0.9375 ** (1 / 3), abs=1e-5)
    # clip to 1.0004 and to 0.9997; row 2: -2 s + 2 s with s = 0.9787: min(-1.9574, -1.9994) + min(1.9574, 1.9994)
    loss, _ = loss_of(level="sequence", clip_low=3e-4, clip_high=4e-4)
    third = (-2 * 0.9997 + 2 * 0.9375 ** (1 / 3)) / 3
    assert loss == pytest.approx(-(1.0004 - 0.9997 + third) / 3, abs=1e-6)


def test_the_kl_term_is_added_to_every_token() -> None:
    # q - p = log 2 everywhere: k3 = 2 - log 2 - 1 = 0.306853 a token, so a row's mean is that too
    reference_NT = LOG_RATIO_NT - 1.0 + math.log(2)
    k3 = 1 - math.log(2)
    loss, sums = loss_of(beta=0.04, reference_logps_NT=reference_NT)
    assert loss == pytest.approx(loss_of()[0] + 0.04 * k3, abs=1e-6)
    assert sums["kl"].item() == pytest.approx(6 * k3, abs=1e-5)
    loss, _ = loss_of(beta=0.04, reference_logps_NT=reference_NT, normaliser="tokens")
    assert loss == pytest.approx(loss_of(normaliser="tokens")[0] + 0.04 * 6 * k3 / 3, abs=1e-6)


def test_the_entropy_term_is_added_with_its_weights() -> None:
    # rows: 0.1 * (1 + 3) / 2 = 0.2; 0.1 * 5 = 0.5; weights 0
    entropies_NT = torch.tensor([[1.0, 3.0, NAN], [5.0, INF, NAN], [2.0, 2.0, 2.0]])
    entropy_weights_NT = torch.tensor([[0.1, 0.1, 0.1], [0.1, 0.1, 0.1], [0.0, 0.0, 0.0]])
    loss, _ = loss_of(entropies_NT=entropies_NT, entropy_weights_NT=entropy_weights_NT)
    assert loss == pytest.approx(loss_of()[0] + (0.2 + 0.5) / 3, abs=1e-6)


def test_without_old_log_probabilities_the_ratio_is_one_and_carries_the_gradient() -> None:
    logps_NT = torch.randn(3, 3, dtype=torch.float64).requires_grad_()
    loss, sums = surrogate_loss(logps_NT, None, WEIGHTS_NT.double(), MASK_NT, denominator=3.0)
    loss.backward()
    assert loss.item() == pytest.approx(-(1 - 1 + 0) / 3)
    assert sums["ratio"].item() == 6
    assert sums["kl_old"].item() == 0
    lengths_N1 = torch.tensor([[2.0], [1.0], [3.0]])
    torch.testing.assert_close(logps_NT.grad, (-WEIGHTS_NT / lengths_N1 / 3).double())


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="beta above 0 needs reference_logps_NT"):
        loss_of(beta=0.1)
    with pytest.raises(ValueError, match="entropy_weights_NT needs entropies_NT"):
        loss_of(entropy_weights_NT=WEIGHTS_NT)
    with pytest.raises(ValueError, match="level must be one of token, sequence, not 'word'"):
        loss_of(level="word")
    with pytest.raises(ValueError, match="normaliser must be one of"):
        loss_of(normaliser="mean")
    for name in ("clip_low", "clip_high", "beta"):
        with pytest.raises(ValueError, match=f"{name} must be at least 0, not -1"):
            loss_of(**{name: -1})


# --- extremes ---


def test_k3_by_hand_and_never_negative() -> None:
    found_N = k3_divergence(torch.zeros(3), torch.tensor([math.log(2), 0.0, -math.log(2)]))
    assert found_N.tolist() == pytest.approx([2 - math.log(2) - 1, 0, 0.5 + math.log(2) - 1], abs=1e-6)
    assert (k3_divergence(torch.zeros(1001), torch.linspace(-5, 5, 1001)) >= 0).all()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("log_ratio", [120.0, -120.0, 1e4, -1e4])
def test_extreme_log_ratios_give_a_finite_loss_and_a_finite_gradient(log_ratio: float, level: str) -> None:
    logps_NT = torch.full((2, 3), -1.0, requires_grad=True)
    loss, sums = surrogate_loss(
        logps_NT,
        torch.full((2, 3), -1.0 - log_ratio),
        torch.tensor([[1.0, 1, 1], [-1, -1, -1]]),
        torch.ones(2, 3),
        denominator=2,
        reference_logps_NT=torch.full((2, 3), -1.0 + log_ratio),
        beta=0.04,
        level=level,  # type: ignore[arg-type]
    )
    loss.backward()
    assert loss.isfinite()
    assert logps_NT.grad is not None
    assert logps_NT.grad.isfinite().all()
    assert all(value.isfinite().all() for value in sums.values())


def test_k3_still_pulls_back_a_token_that_the_reference_finds_impossible() -> None:
    # q - p = -120: exp vanishes, k3 = 120 - 1, and d k3 / d p = 1 - exp(q - p) = 1
    logps_N = torch.tensor([0.0], requires_grad=True)
    k3 = k3_divergence(logps_N, torch.tensor([-120.0]))
    k3.sum().backward()
    assert k3.item() == 119
    assert logps_N.grad is not None
    assert logps_N.grad.item() == 1


@pytest.mark.parametrize("junk", [NAN, INF, -INF])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_what_stands_under_padding_changes_neither_the_value_nor_the_gradient(level: str, junk: float) -> None:
    generator = torch.Generator().manual_seed(3)
    clean = [torch.randn(3, 3, dtype=torch.float64, generator=generator) for _ in range(6)]
    results = []
    for fill in (0.0, junk):
        tensors = [values_NT.masked_fill(MASK_NT == 0, fill) for values_NT in clean]
        logps_NT, entropies_NT = tensors[0].requires_grad_(), tensors[4].requires_grad_()
        loss, sums = surrogate_loss(
            logps_NT,
            tensors[1],
            tensors[2],
            MASK_NT,
            denominator=3,
            reference_logps_NT=tensors[3],
            entropies_NT=entropies_NT,
            entropy_weights_NT=tensors[5],
            level=level,  # type: ignore[arg-type]
            clip_low=0.2,
            clip_high=0.2,
            beta=0.04,
        )
        loss.backward()
        assert logps_NT.grad is not None
        assert entropies_NT.grad is not None
        assert (logps_NT.grad[MASK_NT == 0] == 0).all()
        results.append([loss.detach(), logps_NT.grad, entropies_NT.grad, *sums.values()])
    for first, second in zip(*results, strict=True):
        assert second.isfinite().all()
        assert torch.equal(first, second)


def test_a_batch_without_tokens_has_loss_exactly_zero_and_a_zero_gradient() -> None:
    logps_NT = torch.full((2, 2), NAN, requires_grad=True)
    mask_NT = torch.zeros(2, 2)
    loss, sums = surrogate_loss(
        logps_NT, logps_NT.detach(), mask_NT, mask_NT, denominator=loss_denominator(mask_NT), level="sequence"
    )
    loss.backward()
    assert loss.item() == 0
    assert logps_NT.grad is not None
    assert (logps_NT.grad == 0).all()
    assert all(value.item() == 0 for value in sums.values())


def test_half_precision_log_probabilities_are_accepted() -> None:
    loss, _ = surrogate_loss(LOG_RATIO_NT.bfloat16(), None, WEIGHTS_NT, MASK_NT, denominator=loss_denominator(MASK_NT))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(0, abs=1e-6)


# --- finite differences ---


@pytest.mark.parametrize("normaliser", ["rows", "tokens"])
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_gradient_agrees_with_finite_differences(
    level: str, clip: float | None, beta: float, normaliser: str
) -> None:
    generator = torch.Generator().manual_seed(7)

    def draw() -> Tensor:
        return torch.randn(4, 5, dtype=torch.float64, generator=generator)

    old_NT, weights_NT, reference_NT, entropies_NT, entropy_weights_NT = draw(), draw(), draw(), draw(), draw()
    # Ratios from about 0.5 to 2 lie on both sides of the clip; the seed leaves none within the step of a bound.
    logps_NT = old_NT + 0.3 * draw()
    mask_NT = torch.arange(5) < torch.tensor([[5], [3], [1], [0]])

    def loss(logps_NT: Tensor, entropies_NT: Tensor) -> Tensor:
        return surrogate_loss(
            logps_NT,
            old_NT,
            weights_NT,
            mask_NT,
            denominator=3.0,
            reference_logps_NT=reference_NT,
            entropies_NT=entropies_NT,
            entropy_weights_NT=entropy_weights_NT,
            normaliser=normaliser,  # type: ignore[arg-type]
            level=level,  # type: ignore[arg-type]
            clip_low=clip,
            clip_high=clip,
            beta=beta,
        )[0]

    assert torch.autograd.gradcheck(loss, (logps_NT.requires_grad_(), entropies_NT.requires_grad_()))


# --- one gradient for every way of splitting ---


def rollout(groups: int = 6, width: int = 7, vocabulary: int = 5) -> dict[str, Tensor]:
    """Interleaved groups of unequal sizes (2 to 5 rows) and lengths, with rewards and a bigram model's parameters."""
    generator = torch.Generator().manual_seed(11)
    sizes = torch.randint(2, 6, (groups,), generator=generator)
    group_ids_N = torch.arange(groups).repeat_interleave(sizes)
    group_ids_N = group_ids_N[torch.randperm(len(group_ids_N), generator=generator)]
    rows = len(group_ids_N)
    lengths_N1 = torch.randint(1, width + 1, (rows, 1), generator=generator)
    return {
        "ids_NT": torch.randint(0, vocabulary, (rows, width), generator=generator),
        "mask_NT": torch.arange(width) < lengths_N1,
        "rewards_N": torch.randint(0, 3, (rows,), generator=generator).float(),
        "group_ids_N": group_ids_N,
        "theta_VV": torch.randn(vocabulary, vocabulary, generator=generator),
        "reference_VV": torch.randn(vocabulary, vocabulary, generator=generator),
    }


def score(theta_VV: Tensor, ids_NT: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the tokens under a bigram softmax model; every row starts after token 0."""
    logps_NTV = torch.log_softmax(theta_VV[torch.nn.functional.pad(ids_NT, (1, 0))[:, :-1]], dim=-1)
    return logps_NTV.gather(-1, ids_NT[..., None]).squeeze(-1), -(logps_NTV.exp() * logps_NTV).sum(dim=-1)


def split_gradient(
    data: dict[str, Tensor], parts: list[Tensor], denominator: Tensor, normaliser: str, level: str
) -> tuple[Tensor, Tensor]:
    """Loss and gradient of one GTPO step: weights on all rows of `data`, the loss part by part, added up."""
    theta_VV = data["theta_VV"].clone().requires_grad_()
    with torch.no_grad():
        entropies_NT = score(theta_VV, data["ids_NT"])[1]
        found = gtpo_weights(
            data["ids_NT"],
            data["mask_NT"],
            data["rewards_N"],
            data["group_ids_N"],
            entropies_NT,
            entropy_filter="on",
            entropy_threshold=1.3,
            entropy_penalty="gradient",
        )
        old_NT = score(0.9 * theta_VV, data["ids_NT"])[0]
        reference_NT = score(data["reference_VV"], data["ids_NT"])[0]
    assert found.entropy_weights_NT is not None
    total = torch.zeros(())
    for part in parts:
        logps_NT, entropies_NT = score(theta_VV, data["ids_NT"][part])
        loss, _ = surrogate_loss(
            logps_NT,
            old_NT[part],
            found.weights_NT[part],
            found.mask_NT[part],
            denominator=denominator,
            reference_logps_NT=reference_NT[part],
            entropies_NT=entropies_NT,
            entropy_weights_NT=found.entropy_weights_NT[part],
            normaliser=normaliser,  # type: ignore[arg-type]
            level=level,  # type: ignore[arg-type]
            clip_low=0.1,
            clip_high=0.1,
            beta=0.04,
        )
        loss.backward()
        total = total + loss.detach()
    assert theta_VV.grad is not None
    return total, theta_VV.grad


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("normaliser", ["rows", "tokens", "constant"])
def test_micro_batches_of_any_size_give_the_same_loss_and_gradient(normaliser: str, level: str) -> None:
    data = rollout()
    rows = len(data["rewards_N"])
    denominator = loss_denominator(data["mask_NT"], normaliser=normaliser, max_length=9)  # type: ignore[arg-type]
    loss, gradient_VV = split_gradient(data, [torch.arange(rows)], denominator, normaliser, level)
    assert gradient_VV.abs().max() > 1e-3
    order_N = torch.randperm(rows, generator=torch.Generator().manual_seed(5))
    for size in (1, 2, 3, 5, rows - 1, rows):
        split_loss, split_VV = split_gradient(data, list(order_N.split(size)), denominator, normaliser, level)
        torch.testing.assert_close(split_loss, loss, atol=1e-6, rtol=0)
        torch.testing.assert_close(split_VV, gradient_VV, atol=1e-6, rtol=0)


def test_extra_columns_of_padding_change_neither_loss_nor_gradient() -> None:
    data = rollout()
    denominator = loss_denominator(data["mask_NT"])
    everything = [torch.arange(len(data["rewards_N"]))]
    loss, gradient_VV = split_gradient(data, everything, denominator, "rows", "token")
    for pad in (0, 4):
        wide = data | {
            "ids_NT": torch.nn.functional.pad(data["ids_NT"].masked_fill(~data["mask_NT"], pad), (0, 6), value=pad),
            "mask_NT": torch.nn.functional.pad(data["mask_NT"], (0, 6)),
        }
        wide_loss, wide_VV = split_gradient(wide, everything, denominator, "rows", "token")
        torch.testing.assert_close(wide_loss, loss, atol=1e-6, rtol=0)
        torch.testing.assert_close(wide_VV, gradient_VV, atol=1e-6, rtol=0)


def sharded_step(rank: int, world: int, folder: str) -> None:
    """One process of two: its own groups only; denominators and gradients are added over the processes."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    data = rollout()
    mine_N = data["group_ids_N"] % world == rank
    for name in ("ids_NT", "mask_NT", "rewards_N", "group_ids_N"):
        data[name] = data[name][mine_N]
    denominator = loss_denominator(data["mask_NT"])
    torch.distributed.all_reduce(denominator)
    rows = torch.arange(int(mine_N.sum()))
    loss, gradient_VV = split_gradient(data, list(rows.split(2)), denominator, "rows", "token")
    torch.distributed.all_reduce(loss)
    torch.distributed.all_reduce(gradient_VV)
    torch.save({"loss": loss, "gradient_VV": gradient_VV, "rows": len(rows)}, Path(folder) / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


def test_groups_sharded_over_two_processes_give_the_gradient_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rollout()
    everything = torch.arange(len(data["rewards_N"]))
    loss, gradient_VV = split_gradient(data, [everything], loss_denominator(data["mask_NT"]), "rows", "token")
    # A spawned process imports its function by name, and pytest's name for this file is not importable there.
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    worker = importlib.import_module(Path(__file__).stem).sharded_step
    try:
        spawn(worker, args=(2, str(tmp_path)), nprocs=2)
    finally:
        sys.modules.pop(Path(__file__).stem, None)
    shards = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert sum(shard["rows"] for shard in shards) == len(everything)
    assert min(shard["rows"] for shard in shards) > 0
    for shard in shards:
        torch.testing.assert_close(shard["loss"], loss, atol=1e-6, rtol=0)
        torch.testing.assert_close(shard["gradient_VV"], gradient_VV, atol=1e-6, rtol=0)
