"""Which elements of a task vector survive, and what they are multiplied by.

A trim is a function that gets the pieces of one task vector in order and zeroes and scales elements in place. What it
must know of the whole vector (a threshold, a sum) is found in passes of its own beforehand, so nothing is kept but the
piece at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from trimtab.errors import InputError
from trimtab.merging._streams import Inputs
from trimtab.merging.selection import Cut, count_of, find_cuts, mask_maker
from trimtab.seeds import derive_seed

Trim = Callable[[Tensor], Tensor]
Kind = Literal["magnitude", "outliers", "random", "rank"]
Rescale = bool | Literal["l1"]


def make_trim(
    model: Inputs, index: int, kind: Kind, rescale: Rescale, *, density: float, gamma: float, epsilon: float
) -> Trim:
    """The trim of one model, to be given the pieces of its task vector τ once, in order.

    Args:
        model: its tensor, and the base.
        index: the model's place among those merged; random masks depend on it, on the seed and on the key alone.
        kind: `magnitude`: the `density` largest survive (TIES). `outliers`: the `density` largest that come after the
            `gamma` largest (Model Breadcrumbs); with `density` + `gamma` above 1 fewer of the largest go. `random`:
            each with probability `density` (DARE). `rank`: with a probability that rises from `density` − `epsilon` to
            `density` + `epsilon` with the rank of its magnitude in its row (DELLA).
        rescale: give what survives the size of the whole: by 1 / its own probability for the random kinds, else (and
            for `l1`) by the ratio of Σ |τ| before and after.
        density: share that survives. 1 leaves τ as it is, bit for bit; 0 makes it zero.
        gamma: share of the largest that is dropped.
        epsilon: half the width of the range of probabilities.

    Raises:
        InputError: the probabilities of `rank` leave 0 to 1.
    """
    if density == 1:
        return lambda vector: vector
    if density == 0:
        return torch.Tensor.zero_
    if kind in ("magnitude", "outliers"):
        kept = kept_count(density, model.size)
        dropped = min(count_of(gamma, model.size), model.size - kept) if kind == "outliers" else 0
        inner, outer = find_cuts(lambda: (vector.abs_() for vector in model.stream()), [dropped, dropped + kept])

        def start() -> Trim:
            return _between(inner, outer)
    else:
        if kind == "rank" and epsilon > min(density, 1 - density) + 1e-9:
            raise InputError(
                f"A density of {density} with an epsilon of {epsilon} gives probabilities outside 0 to 1; use an "
                f"epsilon of at most {min(density, 1 - density):.4g}."
            )
        seed = derive_seed(model.seed, "merge", model.key, index)

        def start() -> Trim:
            generator = np.random.Generator(np.random.Philox(key=seed))
            if kind == "random":
                return _random(generator, density, rescale is True)
            return _by_rank(generator, density, epsilon, model.width, rescale is True)

    if rescale == "l1" or (rescale and kind in ("magnitude", "outliers")):
        return _scaled(start(), _l1_factor(model.stream(whole_rows=kind == "rank"), start()))
    return start()


def kept_count(share: float, size: int) -> int:
    """A positive share of a tensor is at least one element, so that no small tensor is lost as a whole."""
    return max(1, count_of(share, size)) if share > 0 and size else 0


def _between(inner: Cut, outer: Cut) -> Trim:
    """Zero everything outside the outer cut and everything inside the inner one."""
    inside, within = mask_maker(outer), mask_maker(inner)

    def trim(vector: Tensor) -> Tensor:
        magnitudes = vector.abs()
        kept = inside(magnitudes)
        return vector.mul_(kept if inner.threshold == math.inf else kept & ~within(magnitudes))

    return trim


def _random(generator: np.random.Generator, density: float, rescale: bool) -> Trim:
    """Keep each element with one probability. DARE, arXiv 2311.03099, section 3.2."""

    def trim(vector: Tensor) -> Tensor:
        kept = torch.from_numpy(generator.random(len(vector), dtype=np.float32) < density)
        vector.mul_(kept.to(vector.device))
        return vector.div_(density) if rescale else vector

    return trim


def _by_rank(generator: np.random.Generator, density: float, epsilon: float, width: int, rescale: bool) -> Trim:
    """Keep each element with a probability that rises with its rank in its row. DELLA, arXiv 2406.11617, section 3."""
    # A row of one element has no smallest and largest.
    ranks = np.linspace(-1, 1, width) if width > 1 else np.zeros(1)
    probabilities = (density + epsilon * ranks).astype(np.float32)

    def trim(vector: Tensor) -> Tensor:
        bits = vector.abs().cpu().numpy().view(np.int32).reshape(-1, width).astype(np.int64)
        # Sorting (magnitude, column) in one integer is several times faster than sorting columns by magnitude.
        columns = np.sort(bits << 32 | np.arange(width), axis=1) & 0xFFFFFFFF
        chance = np.empty(columns.shape, dtype=np.float32)
        np.put_along_axis(chance, columns, probabilities[None], axis=1)
        kept = generator.random(chance.shape, dtype=np.float32) < chance
        factor = np.divide(kept, chance if rescale else 1, out=np.zeros_like(chance), where=kept)
        return vector.mul_(torch.from_numpy(factor.reshape(-1)).to(vector.device))

    return trim


def _scaled(trim: Trim, factor: float) -> Trim:
    return trim if factor == 1 else lambda vector: trim(vector).mul_(factor)


def _l1_factor(vectors: Iterable[Tensor], trim: Trim) -> float:
    """Σ |τ| before a trim over Σ |τ| after it; 1 when nothing is left."""
    before = after = 0.0
    for vector in vectors:
        before += vector.abs().sum(dtype=torch.float64).item()
        after += trim(vector).abs_().sum(dtype=torch.float64).item()
    return before / after if after else 1.0
