"""Where GVPO and distillation converge: SGD on tables of logits, from samplers that have nothing to do with the target.

A world lists every outcome that a policy can produce, so a policy's distribution, its target and the divergence between
them are exact; only the training batches are drawn at random.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from trimtab.objectives import TokenWeights, distill_weights, gvpo_surrogate, gvpo_weights, loss_denominator

PROMPTS, GROUP = 48, 4
ROWS = PROMPTS * GROUP
REACHED, MISSED = 1e-6, 1e-2

Sampler = Callable[[Tensor, torch.Generator], Tensor]
"""From the policy's distribution over outcomes, and randomness: the outcomes of the batch, a group after the other."""
Weigh = Callable[..., TokenWeights]
"""From outcomes, ids, mask, rewards, group ids and log-probabilities of a batch: the weights."""


@dataclass
class World:
    """Outcomes O of up to T tokens; a policy is a table of logits (states S, vocabulary V)."""

    states_OT: Tensor
    ids_OT: Tensor
    mask_OT: Tensor
    shape: tuple[int, int]

    def token_logps(self, table_SV: Tensor) -> Tensor:
        return table_SV.log_softmax(dim=1)[self.states_OT, self.ids_OT]

    def logps(self, table_SV: Tensor) -> Tensor:
        return self.token_logps(table_SV).where(self.mask_OT, 0.0).sum(dim=1)

    def policy(self, seed: int, spread: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return spread * torch.randn(self.shape, dtype=torch.float64, generator=generator)


def bandit() -> World:
    """One choice among six."""
    column_O1 = torch.arange(6)[:, None]
    return World(torch.zeros_like(column_O1), column_O1, torch.ones_like(column_O1, dtype=torch.bool), (1, 6))


def two_steps() -> World:
    """Token 0 ends; tokens 1 and 2 lead to a state each, where a second token ends. Lengths 1 and 2, seven outcomes."""
    pairs = [(a, b) for a in (1, 2) for b in range(3)]
    ids_OT = torch.tensor([(0, 0), *pairs])
    states_OT = torch.tensor([(0, 0), *((0, a) for a, _ in pairs)])
    mask_OT = torch.tensor([(True, False), *((True, True) for _ in pairs)])
    return World(states_OT, ids_OT, mask_OT, (3, 3))


WORLDS = {"bandit": bandit(), "two steps": two_steps()}


def fixed(weights_O: Tensor) -> Sampler:
    return lambda policy_O, generator: torch.multinomial(weights_O, ROWS, True, generator=generator)


def skewed(world: World) -> Sampler:
    """The first outcome eight times as likely as the last."""
    outcomes = len(world.ids_OT)
    return fixed(8.0 ** -(torch.arange(outcomes) / (outcomes - 1)))


def uniform(world: World) -> Sampler:
    return fixed(torch.ones(len(world.ids_OT)))


def replay(world: World) -> Sampler:
    """Half of each group from a buffer of an older policy's samples, half from the policy as it is."""
    buffer_B = torch.multinomial(
        world.logps(world.policy(7)).exp(), 500, True, generator=torch.Generator().manual_seed(8)
    )

    def sample(policy_O: Tensor, generator: torch.Generator) -> Tensor:
        old_PG = buffer_B[torch.randint(len(buffer_B), (PROMPTS, GROUP // 2), generator=generator)]
        new_PG = torch.multinomial(policy_O, ROWS // 2, True, generator=generator).view(PROMPTS, -1)
        return torch.cat([old_PG, new_PG], dim=1).flatten()

    return sample


def train(
    world: World,
    sampler: Sampler,
    weigh: Weigh,
    *,
    rewards_O: Tensor | None = None,
    start_SV: Tensor | None = None,
    beta: float = 1.0,
    steps: int = 400,
    loss: Callable[..., tuple[Tensor, Any]] = gvpo_surrogate,
) -> Tensor:
    """Plain SGD from a policy of its own; returns the trained table of logits."""
    table_SV = (world.policy(3) if start_SV is None else start_SV).clone().requires_grad_()
    rewards_O = torch.zeros(len(world.ids_OT), dtype=torch.float64) if rewards_O is None else rewards_O
    groups_N = torch.arange(PROMPTS).repeat_interleave(GROUP)
    generator = torch.Generator().manual_seed(11)
    for _ in range(steps):
        logps_OT = world.token_logps(table_SV)
        rows_N = sampler(world.logps(table_SV.detach()).exp(), generator)
        logps_NT, mask_NT = logps_OT[rows_N], world.mask_OT[rows_N]
        found = weigh(rows_N, world.ids_OT[rows_N], mask_NT, rewards_O[rows_N], groups_N, logps_NT)
        denominator = loss_denominator(found.mask_NT, normaliser="groups", group_ids_N=groups_N)
        value, _ = loss(logps_NT, None, found.weights_NT, found.mask_NT, denominator=denominator)
        (gradient_SV,) = torch.autograd.grad(value, table_SV)
        table_SV.data -= 2.0 / beta * gradient_SV
    return table_SV.detach()


def gvpo(world: World, reference_SV: Tensor, beta: float) -> Weigh:
    reference_OT = world.token_logps(reference_SV)

    def weigh(rows_N: Tensor, *batch: Tensor) -> TokenWeights:
        *whole, logps_NT = batch
        return gvpo_weights(*whole, logps_NT=logps_NT, reference_logps_NT=reference_OT[rows_N], beta=beta)

    return weigh


def distillation(
    world: World, teachers: Sequence[Tensor], reference_SV: Tensor | None = None, **settings: Any
) -> Weigh:
    teachers_OT = [world.token_logps(teacher_SV) for teacher_SV in teachers]
    reference_OT = None if reference_SV is None else world.token_logps(reference_SV)

    def weigh(rows_N: Tensor, *batch: Tensor) -> TokenWeights:
        *whole, logps_NT = batch
        return distill_weights(
            *whole,
            logps_NT=logps_NT,
            reference_logps_NT=None if reference_OT is None else reference_OT[rows_N],
            teacher_logps_NT=[teacher_OT[rows_N] for teacher_OT in teachers_OT],
            **settings,
        )

    return weigh


def likelihood(
    logps_NT: Tensor, old_logps_NT: None, weights_NT: Tensor, mask_NT: Tensor, *, denominator: Tensor
) -> tuple[Tensor, None]:
    """-sum w l, written out; `weights_NT` may carry gradient."""
    return -(weights_NT * logps_NT).where(mask_NT, 0.0).sum() / denominator, None


def centred(values_N: Tensor) -> Tensor:
    values_PG = values_N.view(PROMPTS, GROUP)
    return (values_PG - values_PG.mean(dim=1, keepdim=True)).flatten()


def divergence(world: World, target_O: Tensor, table_SV: Tensor) -> float:
    """KL(target || policy), nats; the target in log-probabilities that need not be normalised."""
    target_O = target_O.log_softmax(dim=0)
    return float((target_O.exp() * (target_O - world.logps(table_SV))).sum())


def rewards_of(world: World) -> Tensor:
    return torch.tensor([1.0, 0.0, 0.5, -0.5, 0.2, 0.8, 0.0], dtype=torch.float64)[: len(world.ids_OT)]


# --- reinforcement learning ---


@pytest.mark.parametrize("sampler", ["skewed", "uniform", "teacher", "replay"])
@pytest.mark.parametrize("name", WORLDS)
def test_gvpo_reaches_the_one_optimum_from_any_sampler(name: str, sampler: str) -> None:
    world, beta = WORLDS[name], 0.5
    samplers = {
        "skewed": skewed(world),
        "uniform": uniform(world),
        "teacher": fixed(world.logps(world.policy(5)).exp()),
        "replay": replay(world),
    }
    reference_SV, rewards_O = world.policy(2), rewards_of(world)
    target_O = world.logps(reference_SV) + rewards_O / beta
    assert divergence(world, target_O, world.policy(3)) > MISSED
    assert divergence(world, target_O, reference_SV) > MISSED
    weigh = gvpo(world, reference_SV, beta)
    table_SV = train(world, samplers[sampler], weigh, rewards_O=rewards_O, beta=beta)
    assert divergence(world, target_O, table_SV) < REACHED


def test_a_reference_that_follows_the_policy_sharpens_it_round_by_round() -> None:
    # What `reference: rollout` does when every round is trained to its end: beta shrinks to beta / rounds.
    world, beta = two_steps(), 0.5
    first_SV = table_SV = world.policy(2)
    for _ in range(3):
        weigh = gvpo(world, table_SV, beta)
        table_SV = train(world, uniform(world), weigh, rewards_O=rewards_of(world), beta=beta, start_SV=table_SV)
    assert divergence(world, world.logps(first_SV) + 3 * rewards_of(world) / beta, table_SV) < REACHED
    assert divergence(world, world.logps(first_SV) + rewards_of(world) / beta, table_SV) > MISSED


def test_a_hole_in_the_support_leaves_its_mass_undetermined() -> None:
    world, beta, hole = bandit(), 0.5, 2
    reference_SV, rewards_O = world.policy(2), rewards_of(world)
    target_O = world.logps(reference_SV) + rewards_O / beta
    support_O = torch.arange(6) != hole
    mass = []
    for logit in (-2.0, 0.0, 2.0):
        start_SV = world.policy(3)
        start_SV[0, hole] = logit
        weigh = gvpo(world, reference_SV, beta)
        table_SV = train(world, fixed(support_O.double()), weigh, rewards_O=rewards_O, beta=beta, start_SV=start_SV)
        inside = world.logps(table_SV)[support_O].log_softmax(dim=0) - target_O[support_O].log_softmax(dim=0)
        assert inside.abs().max() < 1e-6
        mass.append(float(world.logps(table_SV)[hole].exp()))
    assert mass[0] < 0.5 * mass[1] < 0.25 * mass[2]


@pytest.mark.parametrize("attached", [False, True])
def test_weights_that_carry_gradient_converge_to_a_tempered_target(attached: bool) -> None:
    # In the gradient of -sum w l they add -sum l grad w, a second beta (l - mean l): l goes to (l_ref + R / beta) / 2.
    world, beta = two_steps(), 0.5
    reference_O, rewards_O = world.logps(world.policy(2)), rewards_of(world)
    target_O = reference_O + rewards_O / beta

    def weigh(rows_N: Tensor, *batch: Tensor) -> TokenWeights:
        _, mask_NT, rewards_N, _, logps_NT = batch
        logps_N = logps_NT.where(mask_NT, 0.0).sum(dim=1)
        w_N = centred(rewards_N - beta * ((logps_N if attached else logps_N.detach()) - reference_O[rows_N]))
        return TokenWeights(w_N[:, None] / (GROUP - 1) * mask_NT, mask_NT)

    found_SV = train(world, skewed(world), weigh, rewards_O=rewards_O, beta=2 * beta, loss=likelihood)
    right, wrong = (target_O / 2, target_O) if attached else (target_O, target_O / 2)
    assert divergence(world, right, found_SV) < REACHED
    assert divergence(world, wrong, found_SV) > MISSED


# --- distillation ---


@pytest.mark.parametrize("sampler", [skewed, uniform, replay])
@pytest.mark.parametrize("name", WORLDS)
def test_distillation_reaches_the_teacher(name: str, sampler: Callable[[World], Sampler]) -> None:
    world = WORLDS[name]
    teacher_SV = world.policy(4)
    assert divergence(world, world.logps(teacher_SV), world.policy(3)) > MISSED
    table_SV = train(world, sampler(world), distillation(world, [teacher_SV]))
    assert divergence(world, world.logps(teacher_SV), table_SV) < REACHED


@pytest.mark.parametrize("factor", [0.5, 1.5])
@pytest.mark.parametrize("name", WORLDS)
def test_lambda_interpolates_to_the_teacher_and_extrapolates_past_it(name: str, factor: float) -> None:
    world = WORLDS[name]
    teacher_SV, reference_SV = world.policy(4), world.policy(2)
    table_SV = train(world, skewed(world), distillation(world, [teacher_SV], reference_SV, lambdas=[factor]))
    target_O = (1 - factor) * world.logps(reference_SV) + factor * world.logps(teacher_SV)
    assert divergence(world, target_O, table_SV) < REACHED
    assert divergence(world, world.logps(teacher_SV), table_SV) > MISSED


def test_a_reward_tilts_the_teacher_and_the_teacher_is_the_anchor() -> None:
    world, beta = two_steps(), 0.5
    teacher_SV, rewards_O = world.policy(4), rewards_of(world)
    weigh = distillation(world, [teacher_SV], eta=1.0, beta=beta)
    table_SV = train(world, skewed(world), weigh, rewards_O=rewards_O, beta=beta)
    assert divergence(world, world.logps(teacher_SV) + rewards_O / beta, table_SV) < REACHED


def test_several_teachers_multiply() -> None:
    world = two_steps()
    teachers, reference_SV = [world.policy(4), world.policy(6)], world.policy(2)
    table_SV = train(world, skewed(world), distillation(world, teachers, reference_SV, lambdas=[0.3, 0.5]))
    target_O = sum(
        f * world.logps(policy_SV) for f, policy_SV in zip([0.3, 0.5, 0.2], [*teachers, reference_SV], strict=True)
    )
    assert isinstance(target_O, Tensor)
    assert divergence(world, target_O, table_SV) < REACHED


def test_a_length_factor_does_not_move_the_optimum_of_plain_distillation() -> None:
    world = two_steps()
    teacher_SV = world.policy(4)
    table_SV = train(world, skewed(world), distillation(world, [teacher_SV], length_power=1.0))
    assert divergence(world, world.logps(teacher_SV), table_SV) < REACHED


@pytest.mark.parametrize("power", [0.0, 1.0])
def test_a_length_factor_misses_the_target_when_the_teacher_is_extrapolated(power: float) -> None:
    # Why `length_power` is refused there: f log Z differs within a group. Without the factor the same weights arrive.
    world = two_steps()
    teacher_SV, reference_SV = world.policy(4), world.policy(2)
    teacher_SV[0], reference_SV[0] = torch.tensor([0.5, 0.45, 0.05]).log(), torch.tensor([0.1, 0.1, 0.8]).log()
    target_O = 1.5 * world.logps(teacher_SV) - 0.5 * world.logps(reference_SV)
    assert target_O.logsumexp(dim=0) > 0.5

    def weigh(rows_N: Tensor, *batch: Tensor) -> TokenWeights:
        _, mask_NT, _, _, logps_NT = batch
        f_N = mask_NT.sum(dim=1).double() ** -power
        w_N = -f_N * centred(f_N * (logps_NT.detach().where(mask_NT, 0.0).sum(dim=1) - target_O[rows_N]))
        return TokenWeights(w_N[:, None] / (GROUP - 1) * mask_NT, mask_NT)

    missed = divergence(world, target_O, train(world, skewed(world), weigh))
    assert missed > MISSED if power else missed < REACHED


def test_the_teachers_log_probability_as_a_reward_does_not_lead_to_the_teacher() -> None:
    # It leads to pi_ref pi_T / Z: the anchor at the reference stays.
    world = two_steps()
    teacher_SV, reference_SV = world.policy(4), world.policy(2)
    weigh = gvpo(world, reference_SV, 1.0)
    table_SV = train(world, skewed(world), weigh, rewards_O=world.logps(teacher_SV))
    assert divergence(world, world.logps(teacher_SV), table_SV) > MISSED
    assert divergence(world, world.logps(reference_SV) + world.logps(teacher_SV), table_SV) < REACHED


def test_the_token_form_reaches_the_teacher_on_the_students_own_samples() -> None:
    world = two_steps()
    teacher_SV = world.policy(4)

    def own(policy_O: Tensor, generator: torch.Generator) -> Tensor:
        return torch.multinomial(policy_O, ROWS, True, generator=generator)

    table_SV = train(world, own, distillation(world, [teacher_SV], form="token"), steps=600)
    assert divergence(world, world.logps(teacher_SV), table_SV) < REACHED
