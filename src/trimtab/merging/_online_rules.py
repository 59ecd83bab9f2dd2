"""What the online merging optimizer does to a piece of one parameter: masks, the election, the compensated sum.

Everything works in place on pieces that stay in a core's cache, and masks are multiplied as numbers: on a processor,
`torch.where`, boolean indexing and `bernoulli_` take ten times as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trimtab.merging._trims import kept_count
from trimtab.merging.selection import Cut, find_cuts, largest_mask
from trimtab.seeds import derive_seed

Method = Literal["dare", "ties", "linear", "topk"]
Election = Literal["weighted", "raw"]
Rescale = Literal["inverse", "none"]

# Elements of a piece: on a processor few enough to stay in the cache, elsewhere enough that launching costs nothing.
PIECE_PROCESSOR = 1 << 15
PIECE_DEVICE = 1 << 24
# Elements that bracket the threshold of a larger tensor, and the size from which that pays.
_SAMPLE = 1 << 12
_FEW = 1 << 14
_RANDOM_BITS = 16


@dataclass(frozen=True)
class Rule:
    """How a change of a parameter and the reference's task vector become one.

    Attributes:
        method: `dare`, `ties`, `linear` or `topk`.
        keep: share of the elements that F keeps, in (0, 1].
        rescale: what dare multiplies the kept elements by: 1 / keep, or 1.
        election: of ties: the sign of the weighted sum, or of the plain sum.
        frozen: dare's mask of the task vector is drawn once, not at every step.
        seed: of the masks.
    """

    method: Method
    keep: float
    rescale: Rescale
    election: Election
    frozen: bool
    seed: int

    @property
    def random(self) -> bool:
        """Whether masks are drawn."""
        return self.method == "dare" and self.keep < 1

    @property
    def by_magnitude(self) -> bool:
        """Whether the largest elements are kept."""
        return self.method in ("ties", "topk") and self.keep < 1

    @property
    def factor(self) -> float:
        """What the kept elements are multiplied by."""
        return 1 / probability(self.keep) if self.random and self.rescale == "inverse" else 1.0

    def trim_reference(self, tau: Tensor, name: str) -> Tensor:
        """The part of F(τ) that is the same at every step, done once; F's factor for random masks is left out."""
        if self.by_magnitude:
            return tau * largest_mask(tau, kept_count(self.keep, tau.numel()))
        if self.random and self.frozen:
            draw = number_source(derive_seed(self.seed, "online merging", name), tau.device)
            mask = torch.empty(tau.numel(), device=tau.device)
            for piece in pieces(mask):
                first_mask(draw(piece.stop - piece.start), self.keep, mask[piece])
            return tau * mask.view(tau.shape)
        return tau


def pieces(flat: Tensor) -> list[slice]:
    """Slices that cover a flat tensor in order."""
    step = PIECE_PROCESSOR if flat.device.type == "cpu" else PIECE_DEVICE
    return [slice(start, min(start + step, len(flat))) for start in range(0, len(flat), step)]


def probability(keep: float) -> float:
    """The probability with which masks keep an element: the multiple of 2^-16 nearest to `keep`, never 0."""
    return _threshold(keep) / (1 << _RANDOM_BITS)


def number_source(seed: int, device: torch.device) -> Callable[[int], Tensor]:
    """A function from a length to that many uniform random numbers of 16 bits (int16), which the next call overwrites.

    Four numbers are cut from one random word, at a thirtieth of the cost of `bernoulli_`. The stream depends on the
    seed and on the kind of device.
    """
    generator = torch.Generator(device).manual_seed(seed)
    words = torch.empty(0, dtype=torch.int64, device=device)

    def draw(size: int) -> Tensor:
        words.resize_(-(-size // 4))
        return words.random_(-(1 << 63), None, generator=generator).view(torch.int16)[:size]

    return draw


def first_mask(numbers: Tensor, keep: float, out: Tensor) -> Tensor:
    """1 with `probability(keep)`, else 0, in the numbers of `out`."""
    # The numbers run from -2^15, and at keep = 1 the bound of a strict comparison would leave their type.
    return torch.le(numbers, _threshold(keep) - 1 - (1 << (_RANDOM_BITS - 1)), out=out)


def second_mask(numbers: Tensor, keep: float, out: Tensor) -> Tensor:
    """A second such mask from the same numbers, which are changed, independent of the first to within 2^-17.

    The first mask keeps the numbers in [0, k), this one those in [k − j, 2k − j): both are k wide, and they share
    j = k² / 2^16, which is what two independent masks share on average.
    """
    threshold = _threshold(keep)
    shift = threshold - round(threshold * threshold / (1 << _RANDOM_BITS))
    # At most 2^14, so it fits; the subtraction wraps around, as it should.
    return first_mask(numbers.sub_(shift), keep, out)


def _threshold(keep: float) -> int:
    return max(1, round(keep * (1 << _RANDOM_BITS)))


def merge(
    value: Tensor, anchor: Tensor, tau: Tensor, carry: Tensor | None, rule: Rule, alpha: float, seed: int
) -> None:
    """Put θ where the merge sends it: anchor + F(value − anchor) ⊕ F(τ) (arXiv 2405.17931, section 3).

    Args:
        value: flat parameter after the base optimizer's step; gets the result.
        anchor: flat parameter before it (Eq. 2), or the base model's (Eq. 1).
        tau: F(τ), flat, of any floating dtype and on any device (random masks not yet applied unless frozen).
        carry: what rounding has kept out of `value` so far; gets what is kept out now. None: no compensation.
        rule: what ⊕ is.
        alpha: weight of τ.
        seed: of this parameter's masks in this step.
    """
    draw = number_source(seed, value.device) if rule.random else None
    largest = _largest(value, anchor, kept_count(rule.keep, len(value))) if rule.by_magnitude else None
    parts = pieces(value)
    longest = parts[0].stop
    changes, masks = value.new_empty(longest), value.new_empty(longest)
    totals = value.new_empty(longest) if carry is None else None
    for piece in parts:
        part, start = value[piece], anchor[piece]
        change = torch.sub(part, start, out=changes[: len(part)])
        mask = masks[: len(part)]
        if largest is not None:
            change *= largest[piece]
        reference = tau[piece].to(device=part.device, dtype=part.dtype, non_blocking=True) if alpha else None
        total = totals[: len(part)].zero_() if totals is not None else carry[piece]  # type: ignore[index]
        if rule.method == "ties" and reference is not None:
            total += elect(change, reference, alpha, rule.election)
        else:
            _add_weighted(total, change, reference, mask, rule, alpha, draw)
        torch.add(start, total, out=part)
        if carry is not None:
            # Kahan: what the sum should have moved by, less what it did.
            total += torch.sub(start, part, out=change)


def _add_weighted(
    total: Tensor,
    change: Tensor,
    reference: Tensor | None,
    mask: Tensor,
    rule: Rule,
    alpha: float,
    draw: Callable[[int], Tensor] | None,
) -> None:
    """total += (1 − α) F(Δ) + α F(τ); the magnitudes' F is applied already."""
    numbers = None
    if draw is None:
        total.add_(change, alpha=1 - alpha)
    else:
        numbers = draw(len(change))
        total.addcmul_(change, first_mask(numbers, rule.keep, mask), value=(1 - alpha) * rule.factor)
    if reference is None:
        return
    if numbers is None or rule.frozen:
        total.add_(reference, alpha=alpha * rule.factor)
    else:
        total.addcmul_(reference, second_mask(numbers, rule.keep, mask), value=alpha * rule.factor)


def elect(change: Tensor, reference: Tensor, alpha: float, election: Election) -> Tensor:
    """Of a = (1 − α) F(Δ) and b = α F(τ), the sum of those with the elected sign (TIES, arXiv 2306.01708).

    Args:
        change: F(Δ); is changed.
        reference: F(τ), of its shape.
        alpha: weight of τ.
        election: `weighted`: the sign of a + b; a draw elects nobody. `raw`: the sign of F(Δ) + F(τ); a draw elects +.
    """
    if election == "raw":
        votes = change + reference
        positive = torch.ge(votes, 0, out=votes)
        ours, theirs = change.mul_(1 - alpha), reference * alpha
        above = ours.clamp_min(0).add_(theirs.clamp_min(0))
        below = ours.clamp_max_(0).add_(theirs.clamp_max_(0))
        return above.mul_(positive).add_(below.mul_(1 - positive))
    # Equal signs: |a + b| >= |a − b|, so this is a + b. Unequal ones: |a + b| + |a − b| is twice the larger of the two.
    change *= 1 - alpha
    both = torch.add(change, reference, alpha=alpha)
    size = both.abs()
    larger = torch.maximum(change.sub_(reference, alpha=alpha).abs_(), size, out=change).add_(size)
    return both.sign_().mul_(larger).mul_(0.5)


def _largest(value: Tensor, anchor: Tensor, count: int) -> Tensor:
    """Mask, in numbers, of exactly the `count` elements where two flat tensors differ most; the first of equal ones."""
    magnitudes = (value - anchor).abs_().float()
    if magnitudes.device.type == "cpu":
        cut = _cut(magnitudes.numpy(), count)
    else:
        (cut,) = find_cuts(lambda: (magnitudes[piece] for piece in pieces(magnitudes)), [count])
    if cut.taken == cut.equal:
        return torch.ge(magnitudes, cut.threshold, out=magnitudes)
    ties = magnitudes == cut.threshold
    places = torch.from_numpy(np.flatnonzero(ties.numpy())) if ties.device.type == "cpu" else ties.nonzero()[:, 0]
    return torch.gt(magnitudes, cut.threshold, out=magnitudes).index_fill_(0, places[: cut.taken], 1)


def _cut(numbers: npt.NDArray[np.float32], count: int) -> Cut:
    """As `find_cuts`, in a third of its time: a sample brackets the threshold, and only what lies between is selected.

    numpy counts and finds what is true several times as fast as torch does.
    """
    inside, above = numbers, 0
    if len(numbers) > _FEW:
        sample = np.sort(numbers[:: len(numbers) // _SAMPLE])[::-1]
        rank = count * len(sample) // len(numbers)
        # The rank of an element in the sample has a standard deviation of at most half of that root.
        slack = 2 * math.isqrt(len(sample))
        high = sample[rank - slack] if rank >= slack else np.float32(np.inf)
        low = sample[rank + slack] if rank + slack < len(sample) else np.float32(0)
        higher = numbers > high
        above = int(np.count_nonzero(higher))
        inside = numbers[np.flatnonzero((numbers >= low) ^ higher)]
        if not above < count <= above + len(inside):
            # The sample was not like the rest: the tensor has a pattern, or holds NaN.
            flat = torch.from_numpy(numbers)
            return find_cuts(lambda: (flat[piece] for piece in pieces(flat)), [count])[0]
    place = len(inside) - (count - above)
    threshold = np.partition(inside, place)[place]
    above += int(np.count_nonzero(inside > threshold))
    return Cut(float(threshold), count - above, int(np.count_nonzero(inside == threshold)))
