"""GVPO and distillation, exactly: values by hand, identities of the gradient, invariances, and what is refused."""

import importlib
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from trimtab.objectives import (
    METHODS,
    TokenWeights,
    distill_surrogate,
    distill_weights,
    find_method,
    group_advantages,
    gvpo_loss,
    gvpo_residuals,
    gvpo_surrogate,
    gvpo_weights,
    loss_denominator,
    outcome_weights,
    reference_share,
    surrogate_loss,
)

NAN, INF = math.nan, math.inf
VOCABULARY, WIDTH = 5, 6
Batch = dict[str, Any]


def f64(*values: Any) -> Tensor:
    return torch.tensor(*values, dtype=torch.float64)


# --- a batch of three interleaved groups of 2, 3 and 5 rows, and policies that are tables of logits ---


def table(seed: int) -> Tensor:
    """A policy: logits of the next token by the last one; the last row is the state before the first token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCABULARY + 1, VOCABULARY, dtype=torch.float64, generator=generator)


def token_logps(table_UV: Tensor, ids_NT: Tensor) -> Tensor:
    before_NT = torch.cat([torch.full_like(ids_NT[:, :1], VOCABULARY), ids_NT[:, :-1]], dim=1)
    return table_UV.log_softmax(dim=1)[before_NT, ids_NT]


def batch(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    groups_N = torch.tensor([7, 2, -4, 2, -4, -4, 7, -4, 2, -4])
    ids_NT = torch.randint(VOCABULARY, (len(groups_N), WIDTH), generator=generator)
    lengths_N = torch.randint(1, WIDTH + 1, (len(groups_N),), generator=generator)
    return {
        "ids_NT": ids_NT,
        "mask_NT": torch.arange(WIDTH) < lengths_N[:, None],
        "rewards_N": torch.randn(len(groups_N), dtype=torch.float64, generator=generator),
        "group_ids_N": groups_N,
        "reference_logps_NT": token_logps(table(21), ids_NT),
        "teachers": [token_logps(table(seed), ids_NT) for seed in (22, 23)],
    }


def rows_of(data: Batch, rows: Tensor) -> Batch:
    taken = {key: value[rows] for key, value in data.items() if isinstance(value, Tensor)}
    return taken | {"teachers": [teacher[rows] for teacher in data["teachers"]]}


def whole_loss(data: Batch, table_UV: Tensor, **settings: Any) -> Tensor:
    return gvpo_loss(
        token_logps(table_UV, data["ids_NT"]),
        data["mask_NT"],
        data["rewards_N"],
        data["group_ids_N"],
        reference_logps_NT=data["reference_logps_NT"],
        **settings,
    )


def weigh(data: Batch, table_UV: Tensor, name: str = "gvpo", **settings: Any) -> TokenWeights:
    if name == "distill":
        settings = {"teacher_logps_NT": data["teachers"][: len(settings.get("lambdas", [1.0]))]} | settings
    return find_method(name).weights(
        data["ids_NT"],
        data["mask_NT"],
        data["rewards_N"],
        data["group_ids_N"],
        logps_NT=token_logps(table_UV, data["ids_NT"]),
        reference_logps_NT=data["reference_logps_NT"],
        **settings,
    )


def gradient_of(loss: Tensor, table_UV: Tensor) -> Tensor:
    return torch.autograd.grad(loss, table_UV)[0]


def split_gradient(data: Batch, weights: TokenWeights, parts: list[Tensor], denominator: Tensor) -> Tensor:
    """The gradient as a trainer makes it: weights of whole groups, then any micro-batches."""
    table_UV = table(20).requires_grad_()
    for part in parts:
        logps_NT = token_logps(table_UV, data["ids_NT"][part])
        loss, _ = gvpo_surrogate(
            logps_NT, None, weights.weights_NT[part], weights.mask_NT[part], denominator=denominator
        )
        loss.backward()
    assert table_UV.grad is not None
    return table_UV.grad


def stepped_gradient(data: Batch, name: str = "gvpo", **settings: Any) -> Tensor:
    weights = weigh(data, table(20), name, **settings)
    denominator = loss_denominator(weights.mask_NT, normaliser="groups", group_ids_N=data["group_ids_N"])
    return split_gradient(data, weights, [torch.arange(len(data["ids_NT"]))], denominator)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


def variance(values_G: Tensor) -> Tensor:
    return values_G.var(correction=1)


# --- by hand ---

MASK_NT = torch.tensor([[1, 1], [1, 0], [1, 1]])
ONE_GROUP_N = torch.zeros(3, dtype=torch.long)
LOGPS_NT = f64([[-1.0, -2.0], [-1.0, NAN], [-2.0, -1.0]])
REFERENCE_NT = f64([[-2.0, -2.0], [-1.0, INF], [-3.0, -2.0]])


def test_gvpos_weights_by_hand() -> None:
    # R - mean = 2, -2, 0; l - l_ref = 1, 0, 2, centred 0, -1, 1; w = 2, -2 + 0.5, -0.5; over k - 1 = 2
    found = gvpo_weights(
        MASK_NT, MASK_NT, f64([4, 0, 2]), ONE_GROUP_N, logps_NT=LOGPS_NT, reference_logps_NT=REFERENCE_NT, beta=0.5
    )
    close(found.weights_NT, f64([[1.0, 1.0], [-0.75, 0.0], [-0.25, -0.25]]))
    assert torch.equal(found.mask_NT, MASK_NT.bool())
    # d = -w up to a constant: Var = (4 + 2.25 + 0.25) / 2
    assert found.metrics["gvpo/variance"].item() == pytest.approx(3.25)
    assert found.metrics["gvpo/weight_max"].item() == pytest.approx(2)
    assert found.metrics["gvpo/log_ratio_abs"].item() == pytest.approx(1)
    assert found.metrics["gvpo/left_out"].item() == 0
    assert found.metrics["advantage_abs"].item() == pytest.approx(4 / 3)
    # half the variance
    loss = gvpo_loss(LOGPS_NT, MASK_NT, f64([4, 0, 2]), ONE_GROUP_N, reference_logps_NT=REFERENCE_NT, beta=0.5)
    assert loss.item() == pytest.approx(1.625)


def test_scale_by_beta_takes_the_factor_beta_out_of_the_weights() -> None:
    scaled = weigh(batch(), table(20), beta=0.3)
    plain = weigh(batch(), table(20), beta=0.3, scale_by_beta=False)
    close(plain.weights_NT, 0.3 * scaled.weights_NT)
    assert plain.metrics["gvpo/weight_max"] == scaled.metrics["gvpo/weight_max"]


def test_distillations_weights_by_hand() -> None:
    # l = -3, -1, -3; l_T = -4, -1, -5: l - l_T = 1, 0, 2; w = 0, 1, -1; over 2
    args = (MASK_NT, MASK_NT, f64([0, 0, 0]), ONE_GROUP_N)
    found = distill_weights(*args, logps_NT=LOGPS_NT, teacher_logps_NT=[REFERENCE_NT])
    close(found.weights_NT, f64([[0.0, 0.0], [0.5, 0.0], [-0.5, -0.5]]))
    assert found.metrics["distill/kl_1"].item() == pytest.approx(1)
    # f = 1/2, 1, 1/2: d = 1/2, 0, 1, mean 1/2; w = -f (d - mean) = 0, 1/2, -1/4; over 2
    found = distill_weights(*args, logps_NT=LOGPS_NT, teacher_logps_NT=[REFERENCE_NT], length_power=1.0)
    close(found.weights_NT, f64([[0.0, 0.0], [0.25, 0.0], [-0.125, -0.125]]))


def test_the_token_forms_weights_by_hand_and_nothing_is_centred() -> None:
    # l_T - l of each token, over k = 3
    args = (MASK_NT, MASK_NT, f64([0, 0, 0]), ONE_GROUP_N)
    found = distill_weights(*args, logps_NT=LOGPS_NT, teacher_logps_NT=[REFERENCE_NT], form="token", beta=3.0)
    close(found.weights_NT, f64([[-1.0, 0.0], [0.0, 0.0], [-1.0, -1.0]]))
    close(found.metrics["gvpo/weight_max"], f64(3.0))


# --- what the gradient is ---


@pytest.mark.parametrize("scale_by_beta", [False, True])
def test_autograd_of_the_loss_is_the_weight_form_and_the_variance_and_covariance_form(scale_by_beta: bool) -> None:
    data, beta = batch(), 0.3
    table_UV = table(20).requires_grad_()
    loss = whole_loss(data, table_UV, beta=beta)
    gradient_UV = gradient_of(loss, table_UV)
    assert gradient_UV.abs().max() > 1e-2
    stepped_UV = stepped_gradient(data, beta=beta, scale_by_beta=scale_by_beta)
    close(stepped_UV, gradient_UV / (beta if scale_by_beta else 1))
    # 1/2 Var(S - R) = 1/2 Var(S) + 1/2 Var(R) - Cov(S, R) with the implicit reward S = beta (l - l_ref)
    terms = []
    for group in data["group_ids_N"].unique():
        rows_N = data["group_ids_N"] == group
        own = rows_of(data, rows_N)
        distance_GT = token_logps(table_UV, own["ids_NT"]) - own["reference_logps_NT"]
        implicit_G = beta * distance_GT.where(own["mask_NT"], 0.0).sum(dim=1)
        covariance = torch.cov(torch.stack([implicit_G, own["rewards_N"]]))
        terms.append(0.5 * covariance[0, 0] + 0.5 * covariance[1, 1] - covariance[0, 1])
    decomposed = torch.stack(terms).mean()
    close(decomposed, loss)
    close(gradient_of(decomposed, table_UV), gradient_UV)


@pytest.mark.parametrize(
    "settings",
    [
        {"lambdas": [1.0], "eta": 0.0, "beta": 1.0},
        {"lambdas": [1.5], "eta": 0.0, "beta": 0.7},
        {"lambdas": [0.4, 0.9], "eta": 2.0, "beta": 0.3},
        {"lambdas": [1.0], "eta": 0.0, "beta": 0.7, "length_power": 0.5},
    ],
)
def test_with_teachers_too_the_weights_give_the_gradient_of_the_loss(settings: dict[str, Any]) -> None:
    data = batch()
    table_UV = table(20).requires_grad_()
    teachers = data["teachers"][: len(settings["lambdas"])]
    loss = whole_loss(data, table_UV, teacher_logps_NT=teachers, **settings)
    expected_UV = gradient_of(loss, table_UV) / settings["beta"]
    close(stepped_gradient(data, "distill", **settings), expected_UV)
    assert expected_UV.abs().max() > 1e-2


def test_over_beta_it_is_leave_one_out_reinforce_with_the_divergence_in_the_reward() -> None:
    data, beta = batch(), 0.3
    table_UV = table(20).requires_grad_()
    gradient_UV = gradient_of(whole_loss(data, table_UV, beta=beta) / beta, table_UV)
    logps_N = token_logps(table_UV, data["ids_NT"]).where(data["mask_NT"], 0.0).sum(dim=1)
    reference_N = data["reference_logps_NT"].where(data["mask_NT"], 0.0).sum(dim=1)
    shaped_N = data["rewards_N"] - beta * (logps_N.detach() - reference_N)
    advantages_N = group_advantages(shaped_N, data["group_ids_N"], baseline="leave_one_out")
    groups = [data["group_ids_N"] == group for group in data["group_ids_N"].unique()]
    reinforce = -torch.stack([(advantages_N * logps_N)[rows_N].mean() for rows_N in groups]).mean()
    close(gradient_of(reinforce, table_UV), gradient_UV)


@pytest.mark.parametrize("name", ["gvpo", "distill"])
def test_averaged_over_the_policys_own_groups_it_is_the_gradient_of_the_objective(name: str) -> None:
    # Every group of three that a policy over four outcomes can sample, weighed by its probability.
    rewards_V, others_V, beta = f64([1.0, -0.5, 0.3, 0.0]), table(3)[0, :4].log_softmax(dim=0), 0.4
    logits_V = table(20)[0, :4].requires_grad_()
    logps_V = logits_V.log_softmax(dim=0)
    objective = beta * (logps_V.exp() * (logps_V - others_V)).sum()
    if name == "gvpo":
        objective = objective - (logps_V.exp() * rewards_V).sum()
    expected_V = torch.autograd.grad(objective, logits_V, retain_graph=True)[0]
    found_V = torch.zeros(4, dtype=torch.float64)
    one = torch.ones(3, 1)
    for outcomes in itertools.product(range(4), repeat=3):
        rows_N = torch.tensor(outcomes)
        logps_NT, others_NT = logps_V[rows_N, None], others_V[rows_N, None]
        if name == "gvpo":
            rewards_N = rewards_V[rows_N]
            found = gvpo_weights(
                one, one, rewards_N, ONE_GROUP_N, logps_NT=logps_NT, reference_logps_NT=others_NT, beta=beta
            )
        else:
            found = distill_weights(
                one, one, 0 * rewards_V[rows_N], ONE_GROUP_N, logps_NT=logps_NT, teacher_logps_NT=[others_NT], beta=beta
            )
        loss, _ = gvpo_surrogate(logps_NT, None, found.weights_NT, found.mask_NT, denominator=1.0)
        probability = logps_V[rows_N].sum().exp().detach()
        found_V += probability * torch.autograd.grad(loss, logits_V, retain_graph=True)[0]
    close(found_V, expected_V)


@pytest.mark.parametrize("moved", [False, True])
def test_the_token_form_is_the_reverse_divergence_of_every_state_that_was_visited(moved: bool) -> None:
    # All completions of two tokens of four, each weighed by its probability under the student that sampled it. The
    # gradient is that of KL in the first state plus KL in the second ones, as often as they were visited (discount 0);
    # once the student has moved, the states are the older one's and the choices are corrected by the ratio.
    start, student_UV = VOCABULARY, table(20)[:, :4].requires_grad_()
    logps_UV, teacher_UV = student_UV.log_softmax(dim=1), table(22)[:, :4].log_softmax(dim=1)
    sampler_UV = table(25)[:, :4].log_softmax(dim=1) if moved else logps_UV.detach()
    divergence_U = (logps_UV.exp() * (logps_UV - teacher_UV)).sum(dim=1)
    expected = divergence_U[start] + (sampler_UV[start].exp() * divergence_U[:4]).sum()

    ids_NT = torch.tensor(list(itertools.product(range(4), repeat=2)))
    ones_NT, states_NT = torch.ones(16, 2), torch.stack([torch.full((16,), start), ids_NT[:, 0]], dim=1)
    found = distill_weights(
        ids_NT,
        ones_NT,
        torch.zeros(16),
        torch.arange(16),
        logps_NT=logps_UV[states_NT, ids_NT],
        teacher_logps_NT=[teacher_UV[states_NT, ids_NT]],
        form="token",
    )
    old_NT = sampler_UV[states_NT, ids_NT]
    weights_NT = found.weights_NT * old_NT.sum(dim=1, keepdim=True).exp()
    logps_NT = logps_UV[states_NT, ids_NT]
    loss, _ = distill_surrogate(logps_NT, old_NT, weights_NT, ones_NT, denominator=1.0, form="token")
    found_UV = torch.autograd.grad(loss, student_UV, retain_graph=True)[0]
    close(found_UV, gradient_of(expected, student_UV))


def test_the_first_update_from_the_rollouts_policy_is_reinforce_with_the_mean_as_baseline() -> None:
    data = batch()
    data["group_ids_N"] = torch.arange(10) % 2  # of equal size: REINFORCE divides by tokens, which is one factor then
    plain = outcome_weights(data["ids_NT"], data["mask_NT"], data["rewards_N"], data["group_ids_N"])
    table_UV = table(20).requires_grad_()
    logps_NT = token_logps(table_UV, data["ids_NT"])
    denominator = loss_denominator(plain.mask_NT, normaliser="tokens")
    loss, _ = surrogate_loss(
        logps_NT, None, plain.weights_NT, plain.mask_NT, denominator=denominator, normaliser="tokens"
    )
    expected_UV = gradient_of(loss, table_UV) * denominator / (2 * (5 - 1))
    same = data | {"reference_logps_NT": token_logps(table(20), data["ids_NT"])}
    for beta in (0.01, 1.0, 100.0):
        close(stepped_gradient(same, beta=beta), expected_UV)
    not_moved = gvpo_weights(data["ids_NT"], data["mask_NT"], data["rewards_N"], data["group_ids_N"], beta=7.0)
    close(not_moved.weights_NT, plain.weights_NT / (5 - 1))
    assert not_moved.metrics["gvpo/log_ratio_abs"] == 0


def test_while_the_policy_has_not_moved_groups_of_equal_rewards_have_exactly_no_weight() -> None:
    data = batch()
    rewards_N = torch.full((10,), 0.1)
    found = gvpo_weights(data["ids_NT"], data["mask_NT"], rewards_N, data["group_ids_N"])
    assert not found.weights_NT.any()
    assert found.mask_NT.equal(data["mask_NT"])


def test_distillation_without_a_teacher_is_gvpo() -> None:
    data = batch()
    found = weigh(data, table(20), "distill", lambdas=[], eta=1.0, beta=0.3)
    close(found.weights_NT, weigh(data, table(20), beta=0.3).weights_NT)


def test_the_weights_carry_no_gradient_and_the_old_policy_no_ratio() -> None:
    data = batch()
    table_UV = table(20).requires_grad_()
    weights = weigh(data, table_UV)
    assert not weights.weights_NT.requires_grad
    logps_NT = token_logps(table_UV, data["ids_NT"])
    gradients, logged = [], []
    for old_NT in (None, data["reference_logps_NT"]):
        loss, sums = gvpo_surrogate(logps_NT, old_NT, weights.weights_NT, weights.mask_NT, denominator=3.0)
        gradients.append(torch.autograd.grad(loss, table_UV, retain_graph=True)[0])
        logged.append(sums)
    assert torch.equal(*gradients)
    assert logged[0]["kl_old"] == 0
    assert logged[1]["kl_old"] > 0.1
    assert logged[1]["ratio"] != logged[0]["ratio"] == logged[0]["tokens"]


# --- invariances ---


@pytest.mark.parametrize("which", ["rewards_N", "reference_logps_NT", "teachers"])
def test_a_constant_of_the_prompt_in_reward_reference_or_teacher_changes_nothing(which: str) -> None:
    data = batch()
    moved = dict(data)
    shift_N = f64([3.0, -20.0, 0.7])[data["group_ids_N"].unique(return_inverse=True)[1]]
    if which == "rewards_N":
        moved[which] = data[which] + shift_N
    elif which == "teachers":
        moved[which] = [torch.cat([t[:, :1] + shift_N[:, None], t[:, 1:]], dim=1) for t in data[which]]
    else:
        moved[which] = torch.cat([data[which][:, :1] + shift_N[:, None], data[which][:, 1:]], dim=1)
    settings = {"lambdas": [0.4, 0.9], "eta": 2.0, "beta": 0.3}
    close(stepped_gradient(moved, "distill", **settings), stepped_gradient(data, "distill", **settings))
    losses = [whole_loss(d, table(20), teacher_logps_NT=d["teachers"], **settings).item() for d in (data, moved)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-10)


def test_new_row_order_and_new_group_labels_change_nothing() -> None:
    data = batch()
    order_N = torch.randperm(10, generator=torch.Generator().manual_seed(1))
    moved = rows_of(data, order_N)
    moved["group_ids_N"] = moved["group_ids_N"] * -1000 + 5
    close(weigh(moved, table(20)).weights_NT, weigh(data, table(20)).weights_NT[order_N])
    close(stepped_gradient(moved), stepped_gradient(data))


def test_reward_and_beta_times_c_scale_the_loss_by_c_squared() -> None:
    data, c = batch(), 3.7
    scaled = data | {"rewards_N": c * data["rewards_N"]}
    loss, loss_c = whole_loss(data, table(20), beta=0.3), whole_loss(scaled, table(20), beta=c * 0.3)
    close(loss_c, c**2 * loss)
    close(weigh(scaled, table(20), beta=c * 0.3).weights_NT, c * weigh(data, table(20), beta=0.3).weights_NT)


def test_prompts_are_averaged_whatever_the_sizes_of_their_groups_and_however_they_interleave() -> None:
    data = batch()
    alone = [rows_of(data, (data["group_ids_N"] == group).nonzero()[:, 0]) for group in data["group_ids_N"].unique()]
    assert sorted(len(group["ids_NT"]) for group in alone) == [2, 3, 5]
    close(stepped_gradient(data), torch.stack([stepped_gradient(group) for group in alone]).mean(dim=0))
    close(whole_loss(data, table(20)), torch.stack([whole_loss(group, table(20)) for group in alone]).mean())


@pytest.mark.parametrize("settings", [{}, {"name": "distill"}, {"name": "distill", "form": "token"}])
def test_micro_batches_of_any_size_give_the_same_gradient(settings: dict[str, Any]) -> None:
    data = batch()
    weights = weigh(data, table(20), **settings)
    denominator = loss_denominator(weights.mask_NT, normaliser="groups", group_ids_N=data["group_ids_N"])
    assert denominator.item() == 3
    expected_UV = split_gradient(data, weights, [torch.arange(10)], denominator)
    order_N = torch.randperm(10, generator=torch.Generator().manual_seed(5))
    for size in (1, 2, 3, 7):
        close(split_gradient(data, weights, list(order_N.split(size)), denominator), expected_UV)


@pytest.mark.parametrize("junk", [0.0, NAN, INF, -INF])
@pytest.mark.parametrize("settings", [{}, {"name": "distill"}, {"name": "distill", "form": "token"}])
def test_padding_and_what_stands_under_it_change_nothing(settings: dict[str, Any], junk: float) -> None:
    data = batch()
    logps_NT = token_logps(table(20), data["ids_NT"])

    def widened(values_NT: Tensor) -> Tensor:
        return torch.nn.functional.pad(values_NT.masked_fill(~data["mask_NT"], junk), (0, 3), value=junk)

    method = find_method(settings.get("name", "gvpo"))
    found = []
    for change in (lambda values_NT: values_NT, widened):
        wide = change is widened
        teachers = {"teacher_logps_NT": [change(data["teachers"][0])]} if "name" in settings else {}
        weights = method.weights(
            torch.nn.functional.pad(data["ids_NT"], (0, 3)) if wide else data["ids_NT"],
            torch.nn.functional.pad(data["mask_NT"], (0, 3)) if wide else data["mask_NT"],
            data["rewards_N"],
            data["group_ids_N"],
            logps_NT=change(logps_NT),
            reference_logps_NT=change(data["reference_logps_NT"]),
            **teachers,
            **{key: value for key, value in settings.items() if key != "name"},
        )
        own_NT = change(logps_NT).clone().requires_grad_()
        loss, _ = method.loss(own_NT, None, weights.weights_NT, weights.mask_NT, denominator=3.0)
        loss.backward()
        assert own_NT.grad is not None
        found.append((weights.weights_NT[:, :WIDTH], own_NT.grad[:, :WIDTH], own_NT.grad[:, WIDTH:]))
    close(found[1][0], found[0][0])
    close(found[1][1], found[0][1])
    assert not found[1][2].any()


def sharded_step(rank: int, world: int, folder: str) -> None:
    """One process of two: its own groups only; denominators and gradients are added over the processes."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    everything = batch()
    data = rows_of(everything, (everything["group_ids_N"].abs() % 4 // 2 == rank).nonzero()[:, 0])
    weights = weigh(data, table(20))
    denominator = loss_denominator(weights.mask_NT, normaliser="groups", group_ids_N=data["group_ids_N"])
    torch.distributed.all_reduce(denominator)
    gradient_UV = split_gradient(data, weights, list(torch.arange(len(data["ids_NT"])).split(2)), denominator)
    torch.distributed.all_reduce(gradient_UV)
    torch.save({"gradient_UV": gradient_UV, "rows": len(data["ids_NT"])}, Path(folder) / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


def test_groups_sharded_over_two_processes_give_the_gradient_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_UV = stepped_gradient(batch())
    # A spawned process imports its function by name, and pytest's name for this file is not importable there.
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    worker = importlib.import_module(Path(__file__).stem).sharded_step
    try:
        spawn(worker, args=(2, str(tmp_path)), nprocs=2)
    finally:
        sys.modules.pop(Path(__file__).stem, None)
    shards = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert sorted(shard["rows"] for shard in shards) == [5, 5]
    for shard in shards:
        close(shard["gradient_UV"], expected_UV)


# --- rows and groups that cannot take part ---


@pytest.mark.parametrize("missing", [NAN, INF, -INF])
@pytest.mark.parametrize("settings", [{}, {"name": "distill", "eta": 0.5}, {"name": "distill", "form": "token"}])
def test_a_row_without_a_reward_leaves_its_group_before_the_mean_is_taken(
    settings: dict[str, Any], missing: float
) -> None:
    data = batch()
    data["rewards_N"][2] = missing
    rest_N = torch.tensor([0, 1, 3, 4, 5, 6, 7, 8, 9])
    found = weigh(data, table(20), **settings)
    close(found.weights_NT[rest_N], weigh(rows_of(data, rest_N), table(20), **settings).weights_NT)
    assert not found.weights_NT[2].any()
    assert not found.mask_NT[2].any()
    assert found.metrics["gvpo/left_out"].item() == pytest.approx(0.1)
    if not settings:
        close(whole_loss(data, table(20)), whole_loss(rows_of(data, rest_N), table(20)))


def test_a_row_that_a_teacher_cannot_score_is_left_out_the_same_way() -> None:
    data = batch()
    rest_N = torch.tensor([0, 1, 3, 4, 5, 6, 7, 8, 9])
    expected_NT = weigh(rows_of(data, rest_N), table(20), "distill").weights_NT
    for unknown in (NAN, -INF):
        data["teachers"][0][2] = unknown
        found = weigh(data, table(20), "distill")
        close(found.weights_NT[rest_N], expected_NT)
        assert not found.mask_NT[2].any()


def test_the_gradient_is_finite_when_a_row_is_left_out() -> None:
    data = batch()
    data["rewards_N"][2], data["reference_logps_NT"][4] = NAN, -INF
    table_UV = table(20).requires_grad_()
    assert gradient_of(whole_loss(data, table_UV, beta=0.3), table_UV).isfinite().all()


def test_a_group_with_one_row_left_has_no_weight_and_does_not_count() -> None:
    data = batch()
    data["rewards_N"][0] = NAN  # of group 7, which has two rows
    found = weigh(data, table(20))
    assert not found.mask_NT[[0, 6]].any()
    assert loss_denominator(found.mask_NT, normaliser="groups", group_ids_N=data["group_ids_N"]).item() == 2
    rest = rows_of(data, (data["group_ids_N"] != 7).nonzero()[:, 0])
    close(stepped_gradient(data), stepped_gradient(rest))
    close(whole_loss(data, table(20)), whole_loss(rest, table(20)))
    data["rewards_N"][:] = NAN
    assert whole_loss(data, table(20)).item() == 0
    assert not weigh(data, table(20)).weights_NT.any()


def test_a_row_without_a_token_is_left_out() -> None:
    data = batch()
    data["mask_NT"][2] = False
    rest_N = torch.tensor([0, 1, 3, 4, 5, 6, 7, 8, 9])
    close(weigh(data, table(20)).weights_NT[rest_N], weigh(rows_of(data, rest_N), table(20)).weights_NT)


def test_groups_of_equal_rewards_are_kept_and_pull_towards_the_reference() -> None:
    data = batch()
    data["rewards_N"][:] = 1.0
    found = weigh(data, table(20))
    assert found.mask_NT.equal(data["mask_NT"])
    assert found.weights_NT.abs().max() > 1e-2
    assert found.metrics["frac_reward_zero_std"] == 1
    ratio_N = (token_logps(table(20), data["ids_NT"]) - data["reference_logps_NT"]).where(data["mask_NT"], 0.0).sum(1)
    first_N = found.weights_NT[:, 0]
    for group in data["group_ids_N"].unique():
        rows_N = data["group_ids_N"] == group
        assert first_N[rows_N].argmin() == ratio_N[rows_N].argmax()


def test_a_group_of_one_row_is_refused_with_the_key_except_in_the_token_form() -> None:
    data = rows_of(batch(), torch.tensor([0, 1, 3, 6, 9]))  # the last is alone
    for name in ("gvpo", "distill"):
        with pytest.raises(ValueError, match=r"sampling\.group_size must be at least 2"):
            weigh(data, table(20), name)
    with pytest.raises(ValueError, match=r"sampling\.group_size"):
        whole_loss(data, table(20))
    assert weigh(data, table(20), "distill", form="token").weights_NT[-1].any()


# --- what is supplied ---


def test_the_reference_is_needed_only_when_it_has_a_share_in_the_target() -> None:
    assert [reference_share(lambdas) for lambdas in ([1.0], [0.1, 0.2, 0.7], [], [1.5])] == [0, 0, 1, -0.5]
    data = batch()
    without = data | {"reference_logps_NT": None}
    found = weigh(without, table(20), "distill")
    close(found.weights_NT, weigh(data, table(20), "distill").weights_NT)
    assert "gvpo/log_ratio_abs" not in found.metrics
    for form in ("sequence", "token"):
        with pytest.raises(ValueError, match=r"reference_logps_NT is missing: the reference has the share -0\.5"):
            weigh(without, table(20), "distill", lambdas=[1.5], form=form)


def test_a_teacher_may_give_the_sum_of_its_own_tokens_in_the_sequence_form_alone() -> None:
    data = batch()
    sums_N = data["teachers"][0].where(data["mask_NT"], 0.0).sum(dim=1)
    found = weigh(data, table(20), "distill", teacher_logps_NT=[sums_N])
    close(found.weights_NT, weigh(data, table(20), "distill").weights_NT)
    with pytest.raises(ValueError, match="needs a teacher with the student's tokenizer"):
        weigh(data, table(20), "distill", teacher_logps_NT=[sums_N], form="token")


def test_half_precision_and_single_precision_come_back_in_single_precision() -> None:
    data = batch()
    data["reference_logps_NT"] = data["reference_logps_NT"].float()
    args = (data["ids_NT"], data["mask_NT"], data["rewards_N"].float(), data["group_ids_N"])
    for dtype in (torch.float32, torch.bfloat16):
        logps_NT = token_logps(table(20), data["ids_NT"]).to(dtype)
        found = gvpo_weights(*args, logps_NT=logps_NT, reference_logps_NT=data["reference_logps_NT"])
        assert found.weights_NT.dtype == torch.float32
    assert gvpo_weights(*args).weights_NT.dtype == torch.float32


def test_methods_whose_weights_follow_the_policy_say_so_and_what_is_supplied_is_no_setting() -> None:
    assert {name for name, method in METHODS.items() if method.at_every_update} == {"gvpo", "distill"}
    assert set(find_method("gvpo").settings()) == {"beta", "reference", "ema_decay", "scale_by_beta", "normaliser"}
    weights_settings, loss_settings = find_method("distill").split({"form": "token"})
    assert weights_settings["lambdas"] == [1.0]
    assert weights_settings["form"] == loss_settings["form"] == "token"
    assert loss_settings["normaliser"] == "groups"


def test_the_denominator_counts_groups_that_have_a_token_left() -> None:
    groups_N = torch.tensor([5, 5, -1, 8])
    mask_NT = torch.tensor([[1, 1], [0, 0], [1, 0], [0, 0]])
    assert loss_denominator(mask_NT, normaliser="groups", group_ids_N=groups_N).item() == 2
    assert loss_denominator(torch.zeros(4, 2), normaliser="groups", group_ids_N=groups_N).item() == 1
    with pytest.raises(ValueError, match="normaliser 'groups' needs group_ids_N"):
        loss_denominator(mask_NT, normaliser="groups")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gvpo", {"beta": 0.0}, r"beta must be above 0, not 0\.0"),
        ("gvpo", {"reference": "first"}, "reference must be one of rollout, frozen, ema, not 'first'"),
        ("gvpo", {"ema_decay": 1.0}, r"ema_decay must be at least 0 and below 1, not 1\.0"),
        ("distill", {"eta": -1.0}, r"eta must be at least 0, not -1\.0"),
        ("distill", {"length_power": -1.0}, r"length_power must be at least 0, not -1\.0"),
        ("distill", {"length_power": 1.0, "lambdas": [1.5]}, "length_power above 0 needs .* moves the optimum"),
        ("distill", {"length_power": 1.0, "eta": 1.0}, "length_power above 0 needs .* moves the optimum"),
        ("distill", {"length_power": 1.0, "lambdas": [0.5, 0.5]}, "length_power above 0 needs .* moves the optimum"),
        ("distill", {"form": "word"}, "form must be one of sequence, token, not 'word'"),
        ("distill", {"form": "token", "eta": 1.0}, "form 'token' has no place for the reward"),
        ("distill", {"form": "token", "length_power": 1.0}, "form 'token' weighs every token by itself"),
        ("distill", {"teacher_logps_NT": []}, "lambdas needs one number a teacher: it has 1, and there are 0 teachers"),
    ],
)
def test_settings_that_have_no_sound_meaning_are_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weigh(batch(), table(20), name, **settings)


def test_log_probabilities_that_are_missing_are_named() -> None:
    data = batch()
    args = (data["ids_NT"], data["mask_NT"], data["rewards_N"], data["group_ids_N"])
    with pytest.raises(ValueError, match="the frozen reference needs logps_NT"):
        gvpo_weights(*args, reference="frozen")
    with pytest.raises(ValueError, match="or neither while the policy has not moved"):
        gvpo_weights(*args, logps_NT=data["reference_logps_NT"])
    with pytest.raises(ValueError, match="distillation needs logps_NT"):
        distill_weights(*args, teacher_logps_NT=data["teachers"][:1])
    with pytest.raises(ValueError, match="normaliser must be one of groups, not 'rows'"):
        gvpo_surrogate(args[1], None, args[1], args[1], denominator=1.0, normaliser="rows")  # type: ignore[arg-type]


def test_the_residual_by_hand_with_two_teachers_and_a_reward() -> None:
    # beta (l - (1 - 1.2) l_ref - 0.7 l_T1 - 0.5 l_T2) - eta R, in one row
    one_NT = torch.ones(1, 2)
    found_N = gvpo_residuals(
        -1.0 * one_NT,
        one_NT,
        f64([3.0]),
        reference_logps_NT=-2.0 * one_NT,
        teacher_logps_NT=[-3.0 * one_NT, f64([-8.0])],
        lambdas=[0.7, 0.5],
        eta=2.0,
        beta=0.5,
    )
    # l = -2, l_ref = -4, l_T1 = -6, l_T2 = -8: 0.5 (-2 - 0.8 + 4.2 + 4) - 6
    assert found_N.tolist() == pytest.approx([-3.3])
