"""The online merging optimizer against formulas written down a second time, and against what must never change."""

import copy
import math
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn

from trimtab.errors import InputError
from trimtab.merging._online_rules import _largest, first_mask, number_source, probability, second_mask
from trimtab.merging.online import OnlineMerging, load_weights
from trimtab.training.checkpoint import load_optimizer, save_checkpoint

Weights = dict[str, Tensor]


class Net(nn.Module):
    """A matrix, a vector, a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(80, 100)
        self.norm = nn.LayerNorm(100)

    def forward(self, rows: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.wide(rows.to(self.wide.weight.dtype)))
        return hidden.float()


def base_of(net: nn.Module, scale: float = 0.01, seed: int = 1) -> Weights:
    """Weights from which `net` may have been tuned."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: p.detach().float() - scale * torch.randn(p.shape, generator=generator)
        for name, p in net.named_parameters()
    }


def backward(net: nn.Module, step: int) -> None:
    """A gradient that depends on the step and on the weights."""
    rows = torch.randn(16, 80, generator=torch.Generator().manual_seed(step))
    net.zero_grad()
    (net(rows) - rows[:, :1].sin()).square().mean().backward()


def run(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        backward(net, step)
        optimizer.step()


def values(net: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def same(ours: Weights, theirs: Weights) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def adamw(net: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), **{"lr": 1e-2, **settings})


def merging(net: nn.Module, optimizer: torch.optim.Optimizer | None = None, **settings: Any) -> OnlineMerging:
    settings.setdefault("reference", base_of(net))
    return OnlineMerging(optimizer or adamw(net), net.named_parameters(), **settings)


RULES = [
    {"method": "linear", "keep": 1.0},
    {"method": "dare", "keep": 0.3},
    {"method": "dare", "keep": 0.3, "frozen": True},
    {"method": "ties", "keep": 0.3},
    {"method": "ties", "keep": 0.3, "election": "raw"},
    {"method": "topk", "keep": 0.3},
]
rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(map(str, rule.values())))


@pytest.mark.parametrize("method", ["dare", "ties", "topk", "linear"])
@pytest.mark.parametrize("form", ["update", "full"])
@pytest.mark.parametrize(
    "make",
    [
        lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1, fused=True),
        lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    ],
    ids=["adamw", "sgd"],
)
def test_without_alpha_and_with_everything_kept_it_is_the_wrapped_optimizer_bit_for_bit(
    method: str, form: str, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        plain, net = Net().to(dtype), Net().to(dtype)
        run(plain, make(plain), range(4))
        run(net, merging(net, make(net), method=method, form=form, alpha=0, keep=1.0), range(4))
        assert same(values(plain), values(net))


@rules
def test_a_step_follows_the_formula(rule: dict[str, Any]) -> None:
    plain, net = Net(), Net()
    before, tau = values(net), {name: p.detach() - base_of(net)[name] for name, p in net.named_parameters()}
    # As large as Adam's step, so that both sides win elections.
    optimizer = merging(net, alpha=0.4, seed=3, **rule)
    stored = {name: optimizer._tau[p] for name, p in net.named_parameters()}
    run(plain, adamw(plain), range(1))
    run(net, optimizer, range(1))
    for name, p in net.named_parameters():
        delta = values(plain)[name] - before[name]
        outcomes = torch.stack(expected(delta, tau[name], stored[name], rule))
        assert (outcomes - (p.detach() - before[name])).abs().amin(0).max() < 5e-7, name


def expected(delta: Tensor, tau: Tensor, stored: Tensor, rule: dict[str, Any]) -> list[Tensor]:
    """What an element may move by at α = 0.4, by sorting and selecting; all that random masks can bring about."""
    keep, alpha = rule["keep"], 0.4

    def largest(x: Tensor) -> Tensor:
        count = max(1, math.floor(x.numel() * keep + 1e-9))
        order = x.abs().flatten().argsort(descending=True, stable=True)[:count]
        return torch.zeros_like(x).flatten().index_fill(0, order, 1).view(x.shape) * x

    if rule["method"] == "linear":
        return [(1 - alpha) * delta + alpha * tau]
    if rule["method"] == "topk":
        return [(1 - alpha) * largest(delta) + alpha * largest(tau)]
    if rule["method"] == "ties":
        ours, theirs = largest(delta), largest(tau)
        a, b = (1 - alpha) * ours, alpha * theirs
        sign = (a + b).sign()
        if rule.get("election") == "raw":
            sign = torch.where(ours + theirs >= 0, 1.0, -1.0)
        return [torch.where(a.sign() == sign, a, 0) + torch.where(b.sign() == sign, b, 0)]
    a, b = (1 - alpha) * delta / probability(keep), alpha * tau / probability(keep)
    if "frozen" in rule:
        b = alpha * stored / probability(keep)
        return [a + b, b]
    return [a + b, a, b, torch.zeros_like(a)]


@pytest.mark.parametrize("method", ["dare", "ties"])
def test_the_authors_rule_is_reproduced_with_frozen_masks_raw_elections_and_one_step(method: str) -> None:
    plain, net = Net(), Net()
    optimizer = merging(net, method=method, keep=0.2, alpha=0.4, frozen=True, election="raw", seed=5)
    tau = {name: optimizer._tau[p].clone() for name, p in net.named_parameters()}
    reference_optimizer = adamw(plain, weight_decay=0.0)
    optimizer.optimizer.param_groups[0]["weight_decay"] = 0.0
    for step in range(3):
        before = values(net)
        backward(net, step)
        plain.load_state_dict(net.state_dict())
        backward(plain, step)
        reference_optimizer.step()
        optimizer.step()
        for name, p in net.named_parameters():
            delta = values(plain)[name] - before[name]
            if method == "ties":
                count = int(0.2 * delta.numel())
                mask = torch.zeros(delta.numel())
                mask[delta.abs().flatten().argsort(descending=True, stable=True)[:count]] = 1
                both = torch.stack([tau[name], delta * mask.view(delta.shape)])
                majority = (both.sum(0) >= 0) * 2 - 1
                both = both * (both.sign() == majority)
                assert torch.allclose(p, before[name] + 0.4 * both[0] + 0.6 * both[1], atol=3e-7)
            else:
                # Their dropout scales by 1 / p, and so does the one that made their tau.
                outcomes = [before[name] + 0.4 * tau[name] / probability(0.2) + 0.6 * d for d in (0, 5 * delta)]
                nearest = torch.stack([(p - outcome).abs() for outcome in outcomes])
                assert nearest.amin(0).max() < 2e-6
                if p.dim() > 1:
                    assert nearest.argmin(0).float().mean().item() == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize("kind", ["normal", "many equal", "constant", "a pattern the sample misses", "few", "one"])
def test_exactly_the_largest_changes_are_found_and_of_equal_ones_the_first(kind: str) -> None:
    change = torch.randn(100_003, generator=torch.Generator().manual_seed(0))
    if kind == "many equal":
        change = change.mul(4).round()
    if kind == "constant":
        change = change.sign()
    if kind == "a pattern the sample misses":
        change[::12] *= 1e-3
    if kind in ("few", "one"):
        change = change[: 50 if kind == "few" else 1]
    for count in {1, len(change) // 1000 + 1, len(change) // 2 + 1, len(change)}:
        order = change.abs().argsort(descending=True, stable=True)[:count]
        mask = _largest(change, torch.zeros_like(change), count)
        assert torch.equal(mask, torch.zeros_like(change).index_fill(0, order, 1)), count


@pytest.mark.parametrize("keep", [1e-6, 5e-4, 0.01, 0.3, 0.5, 0.999, 1.0])
def test_both_masks_keep_the_share_they_are_told_to_and_know_nothing_of_each_other(keep: float) -> None:
    numbers = number_source(0, torch.device("cpu"))(400_001)
    first = first_mask(numbers, keep, torch.empty(400_001))
    second = second_mask(numbers, keep, torch.empty(400_001))
    exact = probability(keep)
    assert exact == pytest.approx(keep, abs=2**-16)
    for mask, share in ((first, exact), (second, exact), (first * second, exact**2)):
        assert set(mask.unique().tolist()) <= {0.0, 1.0}
        assert mask.mean().item() == pytest.approx(share, abs=5 * math.sqrt(share * (1 - share) / 4e5) + 2**-17)


@pytest.mark.parametrize("rescale", ["inverse", "none"])
def test_rescaling_is_by_one_over_keep_or_not_at_all(rescale: str) -> None:
    net = Net()
    before = values(net)
    optimizer = merging(net, adamw(net, lr=0.0), keep=0.25, alpha=0.5, rescale=rescale)
    run(net, optimizer, range(1))
    moved = (net.wide.weight.detach() - before["wide.weight"]) / (before["wide.weight"] - base_of(Net())["wide.weight"])
    kept = moved[moved.abs() > 0.01]
    assert kept.median().item() == pytest.approx(2.0 if rescale == "inverse" else 0.5, rel=1e-4)
    assert len(kept) / moved.numel() == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["linear", "ties", "dare"])
@pytest.mark.parametrize("tau_dtype", [torch.float32, torch.bfloat16])
def test_at_learning_rate_zero_the_smallest_steps_of_tau_add_up(
    method: str, dtype: torch.dtype, tau_dtype: torch.dtype
) -> None:
    steps, alpha = 1000, 1e-8
    parameter = nn.Parameter(torch.full((1024,), 0.0625, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    # alpha tau is about 1e-10; the gap between two float32 numbers here is 7e-9, between two bfloat16 ones 5e-4.
    tau = torch.linspace(0.008, 0.012, 1024)
    start = parameter.detach().float().clone()
    keep = 1.0 if method == "linear" else 0.5
    optimizer = OnlineMerging(
        torch.optim.AdamW([parameter], lr=0.0),
        [("p", parameter)],
        reference={"p": start - tau},
        tuned={"p": start},
        method=method,
        keep=keep,
        alpha=alpha,
        tau_dtype=tau_dtype,
    )
    for _ in range(steps):
        optimizer.step()
    own = optimizer._own[parameter]
    exact = (own.get("master", parameter.detach()).double() - start) + own["carry"]
    drift = alpha * steps * (start - (start - tau)).double()
    if method == "ties":
        assert (exact[:512] == 0).all()
        exact, drift = exact[512:], drift[512:]
    if method == "dare":
        exact, drift = exact.sum(), drift.sum()
    assert torch.allclose(exact, drift, rtol=0.01, atol=0)
    # What the model sees is that, rounded once: 1e-7 is visible in float32.
    if dtype == torch.float32 and method == "linear":
        assert torch.allclose(parameter.detach().double() - start, drift, rtol=0.005, atol=4e-9)


def test_a_bfloat16_parameter_moves_though_each_of_its_steps_is_below_its_precision() -> None:
    plain, net = nn.Parameter(torch.ones(64, dtype=torch.bfloat16)), nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    inner = torch.optim.AdamW([net], lr=1e-4, weight_decay=0.0)
    optimizers = [
        torch.optim.AdamW([plain], lr=1e-4, weight_decay=0.0),
        OnlineMerging(inner, [("p", net)], reference={"p": torch.ones(64) - 0.1}, keep=0.5, alpha=1e-7),
    ]
    for _ in range(100):
        for parameter, optimizer in zip((plain, net), optimizers, strict=True):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            assert parameter.dtype == torch.bfloat16 and parameter.grad is not None
            assert parameter.grad.dtype == torch.bfloat16
    assert (plain == 1).all()
    assert net.float().mean().item() == pytest.approx(0.99, abs=1e-3)


@rules
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("form", ["update", "full"])
def test_every_parameter_moves_at_every_call(rule: dict[str, Any], steps: int, form: str) -> None:
    net = Net()
    optimizer = merging(net, alpha=1e-3, steps=steps, form=form, **rule)
    for step in range(7):
        before = values(net)
        run(net, optimizer, range(step, step + 1))
        assert all(not torch.equal(before[name], value) for name, value in values(net).items())


def test_step_k_makes_plain_steps_and_then_merges_their_sum() -> None:
    plain, net = Net(), Net()
    start, tau = values(net), {name: p.detach() - base_of(net)[name] for name, p in net.named_parameters()}
    optimizer, base = merging(net, method="linear", keep=1.0, alpha=0.2, steps=3), adamw(plain)
    for step in range(2):
        run(plain, base, range(step, step + 1))
        run(net, optimizer, range(step, step + 1))
        assert same(values(plain), values(net))
    run(plain, base, range(2, 3))
    run(net, optimizer, range(2, 3))
    for name, value in values(net).items():
        moved = 0.8 * (values(plain)[name] - start[name]) + 0.2 * tau[name]
        assert torch.allclose(value, start[name] + moved, atol=1e-6)
    assert all("anchor" not in own for own in optimizer._own.values())


def test_the_full_form_merges_task_vectors_over_the_base() -> None:
    plain, net = Net(), Net()
    start, base = values(net), base_of(net)
    run(plain, adamw(plain), range(1))
    run(net, merging(net, method="linear", keep=1.0, alpha=0.3, form="full"), range(1))
    for name, value in values(net).items():
        merged = base[name] + 0.7 * (values(plain)[name] - base[name]) + 0.3 * (start[name] - base[name])
        assert torch.allclose(value, merged, atol=1e-6)


@rules
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_resumed_in_the_middle_of_k_steps_equals_an_unbroken_one(
    rule: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    start, base = values(Net().to(dtype)), base_of(Net().to(dtype))
    settings = {"reference": base, "tuned": start, "alpha": 1e-3, "steps": 3, **rule}
    whole, half, rest = (Net().to(dtype) for _ in range(3))
    run(whole, merging(whole, **settings), range(10))
    first = merging(half, **settings)
    run(half, first, range(5))
    torch.save({"model": half.state_dict(), "optimizer": first.state_dict()}, tmp_path / "state.pt")
    stored = torch.load(tmp_path / "state.pt", weights_only=True)
    assert not any("tau" in key for values in stored["optimizer"]["state"].values() for key in values)
    rest.load_state_dict(stored["model"])
    second = merging(rest, **settings)
    second.load_state_dict(stored["optimizer"])
    run(rest, second, range(5, 10))
    assert same(values(whole), values(rest))


def test_a_checkpoint_of_the_training_loop_holds_all_that_a_resumed_run_needs(tmp_path: Path) -> None:
    start, base = values(Net().bfloat16()), base_of(Net().bfloat16())
    settings: dict[str, Any] = {"reference": base, "tuned": start, "alpha": 1e-3, "steps": 2}
    whole, half, rest = (Net().bfloat16() for _ in range(3))
    run(whole, merging(whole, **settings), range(6))
    first, second = merging(half, **settings), merging(rest, **settings)
    run(half, first, range(3))
    names = list(start)
    saved = save_checkpoint(
        tmp_path, 3, write_model=lambda folder: None, optimizer=first, names=names, state={}, keep=1
    )
    rest.load_state_dict(half.state_dict())
    load_optimizer(saved, second, names)
    run(rest, second, range(3, 6))
    assert same(values(whole), values(rest))


def test_a_state_saved_with_another_reference_is_refused_and_the_parameters_are_named() -> None:
    net = Net()
    optimizer = merging(net, alpha=0.1)
    run(net, optimizer, range(1))
    # Without the weights that training began with, tau is measured from where the run has come to.
    resumed = merging(net, alpha=0.1, reference=base_of(Net()))
    with pytest.raises(InputError, match=r"another reference task vector of wide\.weight.*tuned"):
        resumed.load_state_dict(optimizer.state_dict())


def test_the_state_of_the_wrapped_optimizer_alone_is_taken_over() -> None:
    net = Net()
    base = adamw(net)
    run(net, base, range(2))
    twin = copy.deepcopy(net)
    optimizer = merging(twin, alpha=0.0, keep=0.5, rescale="none")
    optimizer.load_state_dict(base.state_dict())
    steps = {int(values["step"]) for values in optimizer.state_dict()["state"].values()}
    assert steps == {2}
    run(twin, optimizer, range(2, 3))


def test_masks_depend_on_seed_name_and_step_and_not_on_order_or_neighbours() -> None:
    def moved(seed: int, *, reverse: bool = False, steps: int = 1) -> Weights:
        net = Net()
        parameters = list(net.parameters())[:: -1 if reverse else 1]
        inner = torch.optim.SGD(parameters, lr=0.0)
        optimizer = merging(net, inner, keep=0.5, alpha=0.5, seed=seed, reference=base_of(net, scale=1.0))
        before = values(net)
        for step in range(steps):
            before = values(net)
            run(net, optimizer, range(step, step + 1))
        return {name: value - before[name] for name, value in values(net).items()}

    assert same(moved(0), moved(0, reverse=True))
    one, other, later = (change["wide.weight"] != 0 for change in (moved(0), moved(1), moved(0, steps=2)))
    for mask in (other, later):
        assert (one == mask).float().mean().item() == pytest.approx(0.5, abs=0.03)
    weight, bias = (moved(0)[name] for name in ("norm.weight", "norm.bias"))
    assert not torch.equal(weight != 0, bias != 0)


def test_alpha_follows_the_learning_rate_only_when_told_to() -> None:
    for follows in (False, True):
        net = Net()
        before = values(net)
        inner = torch.optim.SGD(net.parameters(), lr=0.4)
        optimizer = merging(net, inner, method="linear", keep=1.0, alpha=0.5, alpha_follows_lr=follows)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.25)
        assert optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 0.1
        net.zero_grad()
        optimizer.step()
        scheduler.step()
        drift = (before["wide.weight"] - base_of(Net())["wide.weight"]) * 0.5 * (0.25 if follows else 1)
        assert torch.allclose(net.wide.weight.detach() - before["wide.weight"], drift, atol=1e-7)


def test_a_parameter_without_gradient_drifts_and_one_that_needs_none_stays() -> None:
    net = Net()
    before = values(net)
    optimizer = merging(net, method="linear", keep=1.0, alpha=0.1)
    net.norm.bias.requires_grad_(False)
    backward(net, 0)
    net.norm.weight.grad = None
    optimizer.step()
    assert torch.equal(net.norm.bias, before["norm.bias"])
    drift = 0.1 * (before["norm.weight"] - base_of(Net())["norm.weight"])
    assert torch.allclose(net.norm.weight.detach() - before["norm.weight"], drift, atol=1e-7)


def test_sparse_gradients_closures_groups_and_strided_parameters_work() -> None:
    table = nn.Embedding(50, 8, sparse=True)
    strided = nn.Parameter(torch.randn(8, 12).t())
    named = [("table", table.weight), ("strided", strided)]
    base = {name: parameter.detach() * 0.9 for name, parameter in named}
    before = {name: parameter.detach().clone() for name, parameter in named}
    groups = [{"params": [table.weight], "lr": 0.5}, {"params": [strided], "lr": 0.0}]
    optimizer = OnlineMerging(
        torch.optim.SGD(groups, lr=0.1), named, reference=base, method="linear", keep=1.0, alpha=0.5
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = table(torch.tensor([3])).sum() + strided.sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.item() == pytest.approx((before["table"][3].sum() + before["strided"].sum()).item(), rel=1e-4)
    assert torch.allclose(strided.detach(), before["strided"] * 1.05)
    expected_table = before["table"] * 1.05
    expected_table[3] -= 0.25
    assert torch.allclose(table.weight.detach(), expected_table, atol=1e-6)


def test_a_closure_sees_the_model_in_its_own_precision() -> None:
    net = Net().bfloat16()
    optimizer, seen = merging(net, alpha=1e-3), []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(4, 80)).square().mean()
        loss.backward()
        seen.append(net.wide.weight.dtype)
        return loss

    assert optimizer.step(closure).isfinite() and seen == [torch.bfloat16]


def test_names_come_from_an_optimizer_made_from_named_parameters() -> None:
    net = Net()
    optimizer = OnlineMerging(torch.optim.AdamW(net.named_parameters()), reference=base_of(net), alpha=0.1)
    run(net, optimizer, range(1))
    with pytest.raises(InputError, match="named_parameters"):
        OnlineMerging(adamw(net), reference=base_of(net))


def test_tau_may_be_stored_in_half_the_memory_and_where_one_likes() -> None:
    net = Net()
    optimizer = merging(net, tau_dtype=torch.bfloat16, tau_device="cpu", alpha=0.1)
    assert {tau.dtype for tau in optimizer._tau.values()} == {torch.bfloat16}
    run(net, optimizer, range(1))


def test_weights_that_do_not_fit_are_named_in_one_error() -> None:
    net = Net()
    base = base_of(net)
    del base["norm.weight"]
    base["wide.bias"] = torch.zeros(3)
    with pytest.raises(
        InputError, match=r"absent: norm\.weight \(reference\); .*wide\.bias \(\[100\], reference \[3\]\)"
    ):
        merging(net, reference=base)
    base = base_of(net)
    base["wide.weight"][0, 0] = math.nan
    with pytest.raises(InputError, match=r"wide\.weight holds NaN"):
        merging(net, reference=base)


def test_adapters_are_refused() -> None:
    from peft import LoraConfig, get_peft_model

    net = Net()
    base = base_of(net)
    adapted = get_peft_model(net, LoraConfig(r=2, target_modules=["wide"]))  # type: ignore[arg-type]
    trained = [(name, p) for name, p in adapted.named_parameters() if p.requires_grad]
    with pytest.raises(InputError, match=r"cannot train adapters .*lora_A"):
        OnlineMerging(torch.optim.AdamW([p for _, p in trained]), trained, reference=base)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keep": 0.0}, "0 < keep"),
        ({"alpha": 1.5}, "alpha"),
        ({"steps": 0}, "steps >= 1"),
        ({"method": "daer"}, "did you mean 'dare'"),
        ({"form": "eq1"}, "update, full"),
        ({"method": "linear", "keep": 0.5}, "set keep to 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        merging(Net(), **settings)


def test_a_parameter_group_cannot_come_later() -> None:
    with pytest.raises(InputError, match="cannot take a parameter group later"):
        merging(Net()).add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_weights_are_read_from_a_model_folder(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    weights = load_weights(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert {name for name, _ in model.named_parameters()} <= weights.keys()
    # Head and embedding are tied, and are found under both names.
    assert "lm_head.weight" in weights
    optimizer = OnlineMerging(
        torch.optim.AdamW(model.parameters()), model.named_parameters(), reference=str(tiny_model), tuned=tiny_model
    )
    assert all((tau == 0).all() for tau in optimizer._tau.values())


def train_one_of_two(rank: int, port: int, folder: str) -> None:
    """Half of each batch; gradients are averaged, and nothing else is said between the processes."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    net = Net()
    data_parallel = nn.parallel.DistributedDataParallel(net)
    optimizer = merging(net, torch.optim.SGD(net.parameters(), lr=0.1), keep=0.3, alpha=0.1, seed=7)
    for step in range(4):
        rows = torch.randn(16, 80, generator=torch.Generator().manual_seed(step))[rank * 8 :][:8]
        optimizer.zero_grad()
        (data_parallel(rows) - rows[:, :1].sin()).square().mean().backward()
        optimizer.step()
    torch.save(values(net), Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_stay_equal_and_end_where_one_does(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Processes of their own: a fork of this one would inherit locks of the threads that earlier tests started.
    processes = [subprocess.Popen([sys.executable, __file__, str(rank), str(port), str(tmp_path)]) for rank in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert same(first, second)
    alone = Net()
    run(alone, merging(alone, torch.optim.SGD(alone.parameters(), lr=0.1), keep=0.3, alpha=0.1, seed=7), range(4))
    for name, value in values(alone).items():
        assert torch.allclose(first[name], value, atol=1e-5)


if __name__ == "__main__":
    train_one_of_two(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
