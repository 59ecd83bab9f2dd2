"""Exactly the k largest of many numbers, without sorting them and without a second copy of them.

The bits of a float32 that is not negative order as the number does. So a histogram of the upper 16 bits finds the
bucket of the k-th largest number, and a histogram of the lower 16 bits inside that bucket finds the number itself: two
passes in O(n), and two tables of fixed size whatever n is.

Among equal numbers the one that comes first ranks higher, so "the k largest" is one set, and contains the k - 1
largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

_LOW_BITS = 16
_LOW_MASK = (1 << _LOW_BITS) - 1
# The sign bit of a number that is not negative is 0, so 15 bits are left above the lower 16.
_HIGH_BUCKETS = 1 << 15
_LOW_BUCKETS = 1 << _LOW_BITS


@dataclass(frozen=True)
class Cut:
    """Where the k largest numbers end.

    Attributes:
        threshold: the k-th largest number; infinite for k = 0.
        taken: how many of the numbers that equal the threshold are among the k largest, the first ones.
        equal: how many numbers equal the threshold.
    """

    threshold: float
    taken: int
    equal: int


def count_of(share: float, size: int) -> int:
    """How many elements a share of `size` is, rounded down.

    The share counts as the decimal number it is written as: 0.29 of 100 is 29, though 0.29 * 100 is 28.999999999999996.
    """
    return math.floor(Fraction(repr(float(share))) * size)


def find_cuts(chunks: Callable[[], Iterable[Tensor]], counts: Sequence[int]) -> list[Cut]:
    """The cut of each count, from two passes over the numbers.

    Args:
        chunks: starts a pass: the numbers in one-dimensional float32 tensors, none of them negative or NaN.
        counts: how many to keep, each from 0 to the number of numbers.

    Raises:
        ValueError: a count is outside that range.
    """
    high = torch.zeros(_HIGH_BUCKETS, dtype=torch.int64)
    for chunk in chunks():
        high += _histogram(_bits(chunk) >> _LOW_BITS, _HIGH_BUCKETS)
    size = int(high.sum())
    if any(not 0 <= count <= size for count in counts):
        raise ValueError(f"cannot keep {list(counts)} of {size} numbers")
    places = [_bucket_of(high, count) if count else None for count in counts]
    wanted = {place[0] for place in places if place}
    low = {bucket: torch.zeros(_LOW_BUCKETS, dtype=torch.int64) for bucket in wanted}
    for chunk in chunks() if wanted else ():
        bits = _bits(chunk)
        upper = bits >> _LOW_BITS
        for bucket in wanted:
            low[bucket] += _histogram(bits[upper == bucket] & _LOW_MASK, _LOW_BUCKETS)
    return [_cut(place[0], place[1], low[place[0]]) if place else Cut(math.inf, 0, 0) for place in places]


def mask_maker(cut: Cut) -> Callable[[Tensor], Tensor]:
    """A function from chunks to masks of the numbers above the cut; it must see all chunks, once, in their order."""
    if cut.taken == cut.equal:
        return lambda chunk: chunk >= cut.threshold
    left = cut.taken

    def mask(chunk: Tensor) -> Tensor:
        nonlocal left
        kept = chunk > cut.threshold
        if left:
            first = (chunk == cut.threshold).nonzero()[:left, 0]
            kept[first] = True
            left -= len(first)
        return kept

    return mask


def largest_mask(values: Tensor, count: int) -> Tensor:
    """Mask of exactly the `count` elements of largest magnitude, in the shape of `values`; the first of equal ones.

    Raises:
        ValueError: there are not so many elements, or one of them is NaN.
    """
    magnitudes = values.detach().reshape(-1).float().abs()
    if magnitudes.isnan().any():
        raise ValueError("NaN has no place among the largest")
    (cut,) = find_cuts(lambda: [magnitudes], [count])
    return mask_maker(cut)(magnitudes).reshape(values.shape)


def _bits(chunk: Tensor) -> Tensor:
    return chunk.view(torch.int32)


def _histogram(buckets: Tensor, length: int) -> Tensor:
    return torch.bincount(buckets, minlength=length).cpu()


def _bucket_of(histogram: Tensor, count: int) -> tuple[int, int]:
    """The bucket in which the count-th number from the top lies, and its rank inside the bucket, from 1."""
    from_top = histogram.flip(0).cumsum(0)
    place = int(torch.searchsorted(from_top, count))
    bucket = len(histogram) - 1 - place
    return bucket, count - int(from_top[place] - histogram[bucket])


def _cut(bucket: int, rank: int, low: Tensor) -> Cut:
    lower, taken = _bucket_of(low, rank)
    bits = torch.tensor([bucket << _LOW_BITS | lower], dtype=torch.int32)
    return Cut(bits.view(torch.float32).item(), taken, int(low[lower]))
