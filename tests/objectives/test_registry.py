"""The table of methods: every one worked by hand through its own defaults, and the errors for unknown names."""

import sys
from types import ModuleType

import pytest
import torch

from trimtab.objectives import registry
from trimtab.objectives.registry import METHODS, Method, find_method, nearest, register_method
from trimtab.objectives.surrogate import loss_denominator

# One group of three: rewards 4, 0, 2 (mean 2, std 2), lengths 2, 1, 3.
# Token 7 stands first in row 0 and row 1: GTPO's one conflict. Mean entropies 0.5, 0.2, 0.4.
IDS_NT = torch.tensor([[7, 5, 0], [7, 0, 0], [7, 6, 6]])
MASK_NT = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
REWARDS_N = torch.tensor([4.0, 0.0, 2.0])
ENTROPIES_NT = torch.tensor([[0.2, 0.8, 0.0], [0.2, 0.0, 0.0], [0.0, 0.4, 0.8]])
# Ratios 1.5 and 1.1 where the reward is good, 0.5 where it is bad, 1 elsewhere.
RATIO_NT = torch.tensor([[1.5, 1.1, 1.0], [0.5, 1.0, 1.0], [1.0, 1.0, 1.0]])
OLD_NT = torch.full((3, 3), -1.0)

PLAIN = [[1.0, 1.0, 0], [-1, 0, 0], [0, 0, 0]]
DOUBLE = [[2.0, 2.0, 0], [-2, 0, 0], [0, 0, 0]]
BY_HAND = {
    # A = 1, -1, 0; clip 0.2: (1.2 + 1.1) / 2 = 1.15 and -0.8; mean over 3 rows
    "grpo": (PLAIN, -(1.15 - 0.8) / 3),
    # A = 2, -2, 0; 2.4 + 2.2 - 1.6 = 3; over 3 rows of at most 4 tokens
    "dr_grpo": (DOUBLE, -3.0 / 12),
    # A = 1, -1, 0; clip 0.2 and 0.28: 1.28 + 1.1 - 0.8 = 1.58; over 6 tokens
    "dapo": (PLAIN, -1.58 / 6),
    # sequence ratios sqrt(1.65) = 1.28 and 0.5, clipped to 1.0004 and 0.9997; mean over 3 rows
    "gspo": (PLAIN, -(1.0004 - 0.9997) / 3),
    # A = 4 - 1, 0 - 3, 2 - 2; 3 (1.5 + 1.1) - 3 * 0.5 = 6.3; over 6 tokens
    "rloo": ([[3.0, 3.0, 0], [-3, 0, 0], [0, 0, 0]], -6.3 / 6),
    # A = 2, -2, 0; 2 (1.5 + 1.1) - 2 * 0.5 = 4.2; over 6 tokens
    "reinforce": (DOUBLE, -4.2 / 6),
    # A - 0.1 H = 1.95, -2.02, -0.04 times lambda (2, 1), (0), (1, 1, 1);
    # (3.9 * 1.5 + 1.95 * 1.1) / 2 = 3.9975, 0, -0.04; mean over 3 rows
    "gtpo": ([[3.9, 1.95, 0], [0, 0, 0], [-0.04, -0.04, -0.04]], -(3.9975 - 0.04) / 3),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_weights_and_loss_of_every_method_are_those_worked_by_hand(name: str) -> None:
    expected_weights, expected_loss = BY_HAND[name]
    method = find_method(name)
    weights_settings, loss_settings = method.split({})
    if name == "gtpo":
        weights_settings["initial_entropy"] = 0.5
    found = method.weights(
        IDS_NT, MASK_NT, REWARDS_N, torch.zeros(3, dtype=torch.long), ENTROPIES_NT, **weights_settings
    )
    torch.testing.assert_close(found.weights_NT, torch.tensor(expected_weights), atol=1e-6, rtol=0)
    loss, _ = method.loss(
        OLD_NT + RATIO_NT.log(),
        OLD_NT,
        found.weights_NT,
        found.mask_NT,
        denominator=loss_denominator(found.mask_NT, normaliser=loss_settings["normaliser"], max_length=4),
        **loss_settings,
    )
    assert loss.item() == pytest.approx(expected_loss, abs=1e-6)


def test_every_method_stands_under_its_own_name_with_a_source_and_a_summary() -> None:
    assert set(BY_HAND) <= set(METHODS)
    assert all(name == method.name and method.source and method.summary for name, method in METHODS.items())


def test_every_default_is_a_setting_of_one_of_the_methods_functions() -> None:
    for method in METHODS.values():
        assert set(method.defaults) <= set(method.settings())


def test_settings_carry_the_methods_defaults_and_not_what_the_trainer_supplies() -> None:
    settings = find_method("dapo").settings()
    assert settings["clip_high"].default == 0.28
    assert settings["clip_low"].default == 0.2
    assert settings["beta"].default == 0.0
    assert settings["normalise"].default == "std"
    assert not {"denominator", "truncated_N", "initial_entropy", "reference_logps_NT", "entropies_NT"} & set(settings)
    assert find_method("gtpo").settings()["clip_low"].default is None
    assert find_method("gtpo").settings()["gamma"].default == 0.1
    assert "gamma" not in find_method("grpo").settings()


def test_settings_are_split_between_the_two_functions_over_the_defaults() -> None:
    weights_settings, loss_settings = find_method("grpo").split({"beta": 0.04, "normalise": "none"})
    assert weights_settings == {
        "baseline": "mean",
        "normalise": "none",
        "mask_truncated": False,
        "drop_uniform_groups": False,
    }
    assert loss_settings == {"normaliser": "rows", "level": "token", "clip_low": 0.2, "clip_high": 0.2, "beta": 0.04}


def test_an_unknown_setting_is_refused_and_the_nearest_named() -> None:
    with pytest.raises(ValueError, match=r"grpo has no setting 'clip_hihg'; did you mean 'clip_high'\?"):
        find_method("grpo").split({"clip_hihg": 0.3})
    with pytest.raises(ValueError, match="grpo has no setting 'gamma'"):
        find_method("grpo").split({"gamma": 0.3})
    with pytest.raises(ValueError, match="has no setting 'denominator'"):
        find_method("grpo").split({"denominator": 3})


def test_an_unknown_method_is_refused_with_the_nearest_name_or_all_of_them() -> None:
    with pytest.raises(ValueError, match=r"there is no method 'grop'; did you mean 'grpo'\?"):
        find_method("grop")
    with pytest.raises(ValueError, match=r"there are .*dapo.*rloo"):
        find_method("zzzzzz")


def test_a_name_that_resembles_gtpo_is_told_which_of_its_namesakes_is_meant() -> None:
    with pytest.raises(ValueError, match=r"Group-relative Trajectory-based Policy Optimization, arXiv 2508\.03772"):
        find_method("gtpo_token")


def test_a_hint_names_the_closest_word_or_lists_all() -> None:
    assert nearest("alpah", ["alpha", "beta"]) == "; did you mean 'alpha'?"
    assert nearest("xyz", ["beta", "alpha"]) == "; there are alpha, beta"


def test_a_registered_method_is_found_and_its_name_cannot_be_taken_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "METHODS", dict(METHODS))
    mine = Method("mine", "nowhere", "nothing", defaults={"clip_low": 0.5})
    assert register_method(mine) is mine
    assert find_method("mine").split({})[1]["clip_low"] == 0.5
    with pytest.raises(ValueError, match="a method named 'mine' is registered already"):
        register_method(mine)


def test_a_method_is_loaded_from_a_module_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("somebody_elses_methods")
    module.best = Method("best", "nowhere", "nothing")  # type: ignore[attr-defined]
    module.number = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert find_method("somebody_elses_methods:best").name == "best"
    with pytest.raises(ValueError, match=r"number' is not a trimtab\.objectives\.Method but of type int"):
        find_method("somebody_elses_methods:number")
    for name in ("somebody_elses_methods:absent", "no_such_module_anywhere:best"):
        with pytest.raises(ValueError, match=f"method '{name}' cannot be loaded"):
            find_method(name)
