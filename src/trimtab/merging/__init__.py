"""Merging models: pure functions of the tensors that bear one name, and an engine that merges whole models on disk."""

from trimtab.merging._settings import SETTINGS, Setting
from trimtab.merging.engine import merge
from trimtab.merging.methods import METHODS, MergeMethod, find_method, merge_tensors
from trimtab.merging.plan import plan_merge
from trimtab.merging.selection import largest_mask

__all__ = [
    "METHODS",
    "SETTINGS",
    "MergeMethod",
    "Setting",
    "find_method",
    "largest_mask",
    "merge",
    "merge_tensors",
    "plan_merge",
]
