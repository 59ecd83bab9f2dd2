"""Where randomness comes from: every draw is a function of a seed, a step and a name, never of what was drawn before.

So a resumed run equals an unbroken one, and a completion does not change when its neighbours do.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from any names and numbers; equal parts give equal seeds on every machine."""
    digest = hashlib.blake2b("\x1f".join(map(repr, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def row_uniforms(seed: int, rows: range, draws: int) -> npt.NDArray[np.float32]:
    """Uniform numbers in [0, 1), shape (rows, draws); each row depends on the seed and on its own number alone."""
    largest = np.nextafter(np.float32(1), np.float32(0))
    values = np.empty((len(rows), draws), dtype=np.float32)
    for place, row in enumerate(rows):
        values[place] = np.random.Generator(np.random.Philox(key=[seed, row])).random(draws)
    return np.minimum(values, largest)
