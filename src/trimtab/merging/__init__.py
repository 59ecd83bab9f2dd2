"""Merging models: pure functions of the tensors that bear one name in several models of one architecture."""

from trimtab.merging._settings import SETTINGS, Setting
from trimtab.merging.methods import METHODS, MergeMethod, find_method, merge_tensors
from trimtab.merging.selection import largest_mask

__all__ = ["METHODS", "SETTINGS", "MergeMethod", "Setting", "find_method", "largest_mask", "merge_tensors"]
