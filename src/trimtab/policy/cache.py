"""Two key-value caches behind transformers' interface: one that is written in place, one that shares a prompt.

transformers' own cache concatenates at every step, and repeats the prompt for every completion before it is needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

GROW = 64
"""Columns added at least when a preallocated cache is full."""


class PreallocatedLayer(DynamicLayer):
    """Keys and values of one layer in buffers with room to grow; `length` columns are filled."""

    keys: Any
    values: Any

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def get_seq_length(self) -> int:
        """Filled columns."""
        return self.length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new columns behind the filled ones and return views of all of them."""
        if not self.is_initialized:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
            self.length = key_states.shape[-2]
            return key_states, value_states
        start, end = self.length, self.length + key_states.shape[-2]
        if end > self.keys.shape[-2]:
            self._move(max(end, start + start // 2, start + GROW))
        self.length = end
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Pick (and repeat) rows of the batch, with room for more columns made on the way."""
        if self.is_initialized:
            self._move(max(self.keys.shape[-2], self.length + GROW), beam_idx)

    def _move(self, capacity: int, rows_N: Tensor | None = None) -> None:
        def move(buffer: Tensor) -> Tensor:
            filled = buffer[:, :, : self.length]
            rows = buffer.shape[0] if rows_N is None else rows_N.numel()
            moved = buffer.new_empty(rows, buffer.shape[1], capacity, buffer.shape[3])
            moved[:, :, : self.length] = filled if rows_N is None else filled.index_select(0, rows_N)
            return moved

        self.keys, self.values = move(self.keys), move(self.values)


class SharedPromptLayer(DynamicLayer):
    """A prompt's keys and values, held once and repeated for the completions only where attention reads them.

    The prompt's pass fills it; after `share` every further update sees prompt + completion, with gradient into both.
    """

    keys: Any
    values: Any
    rows_N: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The prompt's states as they are, then the prompt's states joined with the completions'."""
        if self.rows_N is None:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
            return key_states, value_states
        return (
            torch.cat([self.keys.index_select(0, self.rows_N), key_states], dim=-2),
            torch.cat([self.values.index_select(0, self.rows_N), value_states], dim=-2),
        )


def shared_prompt_cache() -> Cache:
    """A cache of shared prompts; a model with any state besides keys and values does not take it."""
    return Cache(layer_class_to_replicate=SharedPromptLayer)


def decoding_cache(config: Any) -> Cache:
    """The model's own kind of cache with its attention layers preallocated; recurrent states stay what they are.

    A sliding window keeps all its columns: it is the mask that hides them.
    """
    cache = DynamicCache(config=config)
    cache.layers = [
        PreallocatedLayer() if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) else layer
        for layer in cache.layers
    ]
    return cache


def cache_argument(forward: Callable[..., Any]) -> str:
    """What a model's forward calls its cache: `cache` since transformers 5.2x, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"
