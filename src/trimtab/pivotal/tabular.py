"""A language model that is a table, so that every success probability is known exactly.

A state and a position decide the distribution of the next token; state and token decide the next state; the last state
decides success. What the search finds on it can be compared with the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from trimtab.pivotal.policy import Continuation, Request
from trimtab.seeds import derive_seed, row_uniforms

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Table:
    """One question: T positions, S states, V tokens; it starts in state 0.

    Attributes:
        probabilities_TSV: of the next token.
        next_TSV: the state after it.
        success_S: whether a completion that ends in a state is right.
    """

    probabilities_TSV: Floats
    next_TSV: Ints
    success_S: npt.NDArray[np.bool_]

    @cached_property
    def rates_TS(self) -> Floats:
        """Exact success probability at each position (T + 1 of them) and state, by backward dynamic programming."""
        positions, states, _ = self.probabilities_TSV.shape
        rates = np.empty((positions + 1, states))
        rates[-1] = self.success_S
        for t in range(positions - 1, -1, -1):
            rates[t] = (self.probabilities_TSV[t] * rates[t + 1][self.next_TSV[t]]).sum(axis=1)
        return rates

    @cached_property
    def cumulative_TSV(self) -> Floats:
        """Running sums of the probabilities over the vocabulary."""
        return self.probabilities_TSV.cumsum(axis=2)

    def states(self, token_ids: Sequence[int]) -> list[int]:
        """The state before each token and after the last."""
        path = [0]
        for t, token in enumerate(token_ids):
            path.append(int(self.next_TSV[t, path[-1], token]))
        return path

    def success_rates(self, token_ids: Sequence[int]) -> list[float]:
        """Exact success probability before each token and after the last."""
        return [float(self.rates_TS[t, state]) for t, state in enumerate(self.states(token_ids))]


def make_table(seed: int, *, positions: int = 64, states: int = 6, tokens: int = 4, decisions: int = 12) -> Table:
    """A random question with a success rate in [0.2, 0.8].

    At `decisions` planted positions the tokens are about equally likely and lead to states drawn at random, so that
    what one of them gains another may lose again. Everywhere else one token has about 75 %; the unlikely others keep
    the state four times in five, so that most surprising tokens decide nothing.
    """
    for attempt in range(1000):
        random = np.random.default_rng(derive_seed(seed, attempt, "table"))
        peak_TS1 = random.uniform(0.65, 0.85, (positions, states, 1))
        rest = random.dirichlet(np.ones(tokens - 1), (positions, states))
        probabilities = np.concatenate([peak_TS1, (1 - peak_TS1) * rest], axis=2)
        following = np.broadcast_to(np.arange(states)[None, :, None], probabilities.shape).copy()
        stray = random.random(probabilities.shape) < 0.2
        stray[:, :, 0] = False
        following[stray] = random.integers(states, size=int(stray.sum()))
        places = random.choice(positions, decisions, replace=False)
        probabilities[places] = random.dirichlet(np.full(tokens, 3.0), (decisions, states))
        following[places] = random.integers(states, size=(decisions, states, tokens))
        table = Table(probabilities, following, np.arange(states) % 2 == 0)
        if 0.2 <= table.rates_TS[0, 0] <= 0.8:
            return table
    raise ValueError("no table with a success rate in [0.2, 0.8] came up; plant more decisions")


class TabularPolicy:
    """Tables as a `SearchPolicy`: question n is the prompt (n,); all completions have T tokens, without an end token.

    Attributes:
        decoded_tokens: sampled so far.
        prefilled_tokens: of prompts and prefixes, each run once and kept.
        prefilled_each_row: what they would be if every continuation ran its prefix anew.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = list(tables)
        self.identity: dict[str, Any] = {"model": "tabular", "tables": len(self.tables)}
        self.decoded_tokens = self.prefilled_tokens = self.prefilled_each_row = self.prefilled_each_call = 0
        self._known: set[tuple[int, ...]] = set()

    def sample(self, requests: Sequence[Request]) -> list[list[Continuation]]:
        """See `SearchPolicy`."""
        return [[Continuation(tuple(row), False) for row in self.sample_rows(request).tolist()] for request in requests]

    def sample_rows(self, request: Request) -> Ints:
        """The continuations of one request, (count, T - prefix)."""
        table, start = self.tables[request.prompt_ids[0]], len(request.prefix_ids)
        positions = table.probabilities_TSV.shape[0]
        rows = range(request.first, request.first + request.count)
        uniforms = row_uniforms(request.seed, rows, positions - start).astype(np.float64)
        state = np.full(request.count, table.states(request.prefix_ids)[-1])
        tokens = np.empty((request.count, positions - start), dtype=np.int64)
        for t in range(start, positions):
            cumulative = table.cumulative_TSV[t][state]
            if t == start and request.banned is not None:
                allowed = table.probabilities_TSV[t][state].copy()
                allowed[:, request.banned] = 0
                cumulative = allowed.cumsum(axis=1)
            target = uniforms[:, t - start, None] * cumulative[:, -1:]
            tokens[:, t - start] = (cumulative <= target).sum(axis=1)
            state = table.next_TSV[t][state, tokens[:, t - start]]
        self.decoded_tokens += tokens.size
        self.prefilled_each_row += request.count * (1 + start)
        self.prefilled_each_call += 1 + start
        self._prefill(request.prompt_ids + request.prefix_ids)
        return tokens

    def score(self, rows: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[list[float]]:
        """See `SearchPolicy`."""
        result = []
        for prompt_ids, token_ids in rows:
            table = self.tables[prompt_ids[0]]
            path = table.states(token_ids)
            steps = enumerate(zip(path, token_ids, strict=False))
            result.append([float(np.log(table.probabilities_TSV[t, state, token])) for t, (state, token) in steps])
            self._prefill(prompt_ids + token_ids)
        return result

    def decode(self, token_ids: Sequence[int]) -> str:
        """The numbers of the tokens."""
        return " ".join(map(str, token_ids))

    def judge(self, prompts: Sequence[Any], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        """The oracle: whether each completion ends in a state of success. Rows name their table in `prompts`."""
        return [
            float(self.tables[int(prompt)].success_rates(ids)[-1])
            for prompt, ids in zip(prompts, completion_ids, strict=True)
        ]

    def _prefill(self, ids: tuple[int, ...]) -> None:
        """Counts the tokens whose keys and values are not there from an earlier pass over the same tokens."""
        for end in range(len(ids), 0, -1):
            if ids[:end] in self._known:
                break
            self._known.add(ids[:end])
            self.prefilled_tokens += 1
