"""The mathematics of post-training: tensors in, tensors out; no model, no files, no randomness it is not given."""

from trimtab.objectives.conflict import conflict_runs, conflict_weights, pushed_down_groups
from trimtab.objectives.entropy import entropy_filter, gtpo_weights, row_mean
from trimtab.objectives.groups import TokenWeights, group_advantages, outcome_weights
from trimtab.objectives.registry import METHODS, Method, find_method, register_method
from trimtab.objectives.surrogate import k3_divergence, loss_denominator, surrogate_loss

__all__ = [
    "METHODS",
    "Method",
    "TokenWeights",
    "conflict_runs",
    "conflict_weights",
    "entropy_filter",
    "find_method",
    "group_advantages",
    "gtpo_weights",
    "k3_divergence",
    "loss_denominator",
    "outcome_weights",
    "pushed_down_groups",
    "register_method",
    "row_mean",
    "surrogate_loss",
]
