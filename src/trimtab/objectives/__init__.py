"""The mathematics of post-training: tensors in, tensors out; no model, no files, no randomness it is not given."""

from trimtab.objectives.conflict import conflict_runs, conflict_weights, pushed_down_groups
from trimtab.objectives.distill import distill_surrogate, distill_weights
from trimtab.objectives.entropy import entropy_filter, gtpo_weights, row_mean
from trimtab.objectives.groups import TokenWeights, group_advantages, outcome_weights
from trimtab.objectives.gvpo import gvpo_loss, gvpo_surrogate, gvpo_weights
from trimtab.objectives.process import process_advantages, process_weights
from trimtab.objectives.registry import METHODS, Method, find_method, register_method
from trimtab.objectives.residuals import gvpo_residuals, reference_share
from trimtab.objectives.surrogate import k3_divergence, loss_denominator, surrogate_loss

__all__ = [
    "METHODS",
    "Method",
    "TokenWeights",
    "conflict_runs",
    "conflict_weights",
    "distill_surrogate",
    "distill_weights",
    "entropy_filter",
    "find_method",
    "group_advantages",
    "gtpo_weights",
    "gvpo_loss",
    "gvpo_residuals",
    "gvpo_surrogate",
    "gvpo_weights",
    "k3_divergence",
    "loss_denominator",
    "outcome_weights",
    "process_advantages",
    "process_weights",
    "pushed_down_groups",
    "reference_share",
    "register_method",
    "row_mean",
    "surrogate_loss",
]
