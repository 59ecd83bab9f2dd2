"""What a method does to one sampled group, token by token, and to the tokens that its completions share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import InputError
from trimtab.objectives import conflict_runs, conflict_weights, group_advantages
from trimtab.report.sampled_groups import Completion, SampledGroup

EPS = 1e-6


@dataclass(frozen=True)
class SharedToken:
    """A token that completions above and below the group's mean hold at the same place.

    Attributes:
        side: `prefix`, positions counted from the first token, or `suffix`, from the last; both from 0.
        position: the place.
        text: the token's.
        token_id: the token's.
        rows: which completions hold it there.
        above: how many of them have a positive advantage.
        below: how many a negative one.
        before: sum over these rows of the plain weights, divided as the loss divides; see `WeighedGroup.share`.
        after: the same of the method's weights.
        protected: whether the method's masks change its weight in any of the rows.
    """

    side: str
    position: int
    text: str
    token_id: int
    rows: list[int]
    above: int
    below: int
    before: float
    after: float
    protected: bool


@dataclass(frozen=True)
class WeighedGroup:
    """A group with all its weights; lists run over completions, then tokens.

    Attributes:
        group: where it comes from.
        advantages: reward minus the group's mean; None without a reward.
        plain: what every token of a completion would carry without the method's masks, filter and penalty: its
            advantage, with the method's own baseline and normalisation.
        share: what a weight of the completion is multiplied with in sums over rows: mean length over own length where
            the loss divides each row by its length (so rows of equal length add up plainly), else 1.
        weights: the method's signed weights.
        lambdas: the conflict masks' factors; None for a method without masks.
        states: `kept`, or why no token of the completion is in the loss.
        kept: the same as a truth value.
        shared: prefix first, then suffix, each by position.
        notes: what a reader of the page should know.
    """

    group: SampledGroup
    advantages: list[float | None]
    plain: list[float]
    share: list[float]
    weights: list[list[float]]
    lambdas: list[list[float]] | None
    states: list[str]
    kept: list[bool]
    shared: list[SharedToken]
    notes: list[str]


def weigh_group(group: SampledGroup) -> WeighedGroup:
    """Fill in what the file does not hold, and sum up the shared tokens before and after the method's masks.

    Raises:
        InputError: the group's method cannot weigh it.
    """
    rows, settings = group.completions, group.settings
    ids_NT, mask_NT = _padded(rows)
    rewards_N = torch.tensor([float("nan") if c.reward is None else c.reward for c in rows], dtype=torch.float64)
    group_ids_N = torch.zeros(len(rows), dtype=torch.long)
    advantages_N = group_advantages(rewards_N, group_ids_N)
    plain_N = group_advantages(
        rewards_N,
        group_ids_N,
        baseline=settings.get("baseline", "mean"),
        normalise=settings.get("normalise", "none"),
    )
    notes = list(group.notes)
    if any(c.weights is None for c in rows):
        weights, computed_notes = _computed_weights(group, ids_NT, mask_NT, rewards_N)
        notes += computed_notes
    else:
        weights = [list(c.weights or []) for c in rows]
    kept = [any(w != 0 for w in row) if c.kept is None else c.kept for c, row in zip(rows, weights, strict=True)]
    masked_NT = mask_NT
    if not settings.get("filtered_rows_define_conflicts", True):
        masked_NT = mask_NT & torch.tensor(kept)[:, None]
    lambda_NT = None
    if "conflict_sides" in settings:
        lambda_NT = conflict_weights(
            ids_NT,
            masked_NT,
            advantages_N,
            group_ids_N,
            sides=settings["conflict_sides"],
            negative=settings["conflict_negative"],
            positive=settings["conflict_positive"],
            combine="product" if settings.get("compat") == "authors" else "union",
        )
    lengths = [len(c.tokens) for c in rows]
    mean_length = sum(lengths) / len(lengths)
    by_row = settings.get("normaliser", "rows") == "rows"
    result = WeighedGroup(
        group,
        [None if c.reward is None else a for c, a in zip(rows, advantages_N.tolist(), strict=True)],
        plain_N.tolist(),
        [mean_length / max(1, n) if by_row else 1.0 for n in lengths],
        weights,
        None if lambda_NT is None else [row[:n] for row, n in zip(lambda_NT.tolist(), lengths, strict=True)],
        [],
        kept,
        [],
        notes,
    )
    result.states.extend(_state(result, row) for row in range(len(rows)))
    runs = conflict_runs(ids_NT, masked_NT, advantages_N, group_ids_N)
    result.shared.extend(_shared_tokens(result, "prefix", runs[0]) + _shared_tokens(result, "suffix", runs[1]))
    return result


def _padded(rows: list[Completion]) -> tuple[Tensor, Tensor]:
    width = max(1, *(len(c.token_ids) for c in rows)) if rows else 1
    ids_NT = torch.tensor([c.token_ids + [0] * (width - len(c.token_ids)) for c in rows], dtype=torch.long)
    mask_NT = torch.arange(width)[None, :] < torch.tensor([len(c.token_ids) for c in rows])[:, None]
    return ids_NT, mask_NT


def _computed_weights(
    group: SampledGroup, ids_NT: Tensor, mask_NT: Tensor, rewards_N: Tensor
) -> tuple[list[list[float]], list[str]]:
    """The method's weights of a group whose file holds none, and what had to be left out for want of data."""
    rows, method = group.completions, group.method
    settings = method.accepted(group.settings)
    notes = [f"The weights are computed here with {method.title or method.name}."]
    entropies_NT = None
    if all(c.entropies is not None or c.entropy is not None for c in rows):
        entropies_NT = torch.zeros(ids_NT.shape, dtype=torch.float64)
        for row, c in enumerate(rows):
            # The methods use each row's mean alone, which a file may hold without the tokens' entropies.
            values = c.entropies if c.entropies is not None else [c.entropy or 0.0] * len(c.tokens)
            entropies_NT[row, : len(values)] = torch.tensor(values, dtype=torch.float64)
    elif settings.get("gamma") or settings.get("entropy_filter", "off") != "off":
        settings |= {"gamma": 0.0, "entropy_filter": "off", "compat": "paper"}
        notes.append("Entropies are missing, so the entropy filter and penalty are left out.")
    if entropies_NT is not None and settings.get("entropy_filter") == "auto" and group.initial_entropy is None:
        settings["entropy_filter"] = "off"
        notes.append("The initial entropy is not known, so the entropy filter is left out.")
    supplied = {
        "truncated_N": torch.tensor([c.truncated for c in rows]),
        "initial_entropy": group.initial_entropy,
    }
    try:
        weights_NT = method.weights(
            ids_NT,
            mask_NT,
            rewards_N,
            torch.zeros(len(rows), dtype=torch.long),
            entropies_NT,
            **method.accepted(supplied),
            **settings,
        ).weights_NT
    except ValueError as error:
        raise InputError(
            f"{method.name} cannot weigh the group: {error}; give the weights with the completions, or name another "
            "method"
        ) from None
    return [row[: len(c.tokens)] for row, c in zip(weights_NT.tolist(), rows, strict=True)], notes


def _state(group: WeighedGroup, row: int) -> str:
    """`kept`, or why no token of the completion is in the loss."""
    completion, settings = group.group.completions[row], group.group.settings
    if group.kept[row]:
        return "kept"
    if group.advantages[row] is None:
        return "dropped: no reward"
    if not any(abs(a or 0.0) > EPS for a in group.advantages):
        return "no weight: all rewards of the group are equal"
    if completion.truncated and settings.get("mask_truncated"):
        return "dropped: truncated"
    authors = settings.get("compat") == "authors"
    threshold = 0.7 if authors else settings.get("entropy_threshold")
    initial, mode = group.group.initial_entropy, settings.get("entropy_filter")
    filtering = authors or mode == "on" or (mode == "auto" and initial is not None and initial < (threshold or 0.0))
    if filtering and threshold is not None and completion.entropy is not None and completion.entropy > threshold:
        return f"dropped: entropy {completion.entropy:.2f} is above {threshold:.2f}"
    if abs(group.advantages[row] or 0.0) <= EPS:
        return "no weight: advantage 0"
    if group.lambdas is not None and not any(group.lambdas[row]):
        return "no weight: every token is protected"
    return "dropped"


def _shared_tokens(group: WeighedGroup, side: str, runs_NT: Tensor) -> list[SharedToken]:
    """Tokens in the runs of one side; the sums go over all completions that hold them there, in a run or not."""
    rows = group.group.completions

    def place(row: int, position: int) -> int:
        return position if side == "prefix" else len(rows[row].tokens) - 1 - position

    wanted: dict[tuple[int, int], str] = {}
    for row, flags in enumerate(runs_NT.tolist()):
        for column, inside in enumerate(flags):
            if inside:
                wanted[place(row, column), rows[row].token_ids[column]] = rows[row].tokens[column]
    found = []
    for (position, token_id), text in sorted(wanted.items(), key=lambda item: item[0]):
        holders = [
            row
            for row, c in enumerate(rows)
            if 0 <= place(row, position) < len(c.tokens) and c.token_ids[place(row, position)] == token_id
        ]
        signs = [group.advantages[row] or 0.0 for row in holders]
        found.append(
            SharedToken(
                side,
                position,
                text,
                token_id,
                holders,
                sum(sign > EPS for sign in signs),
                sum(sign < -EPS for sign in signs),
                sum(group.plain[row] * group.share[row] for row in holders),
                sum(group.weights[row][place(row, position)] * group.share[row] for row in holders),
                group.lambdas is not None and any(group.lambdas[row][place(row, position)] != 1 for row in holders),
            )
        )
    return found


def headline(group: WeighedGroup) -> str:
    """One or two sentences: how many shared tokens the plain advantages push down, and how many the method does."""
    name: Any = group.group.method.title or group.group.method.name
    shared = group.shared
    if not shared:
        if not any(abs(a or 0.0) > EPS for a in group.advantages):
            return "All completions earned the same, so nothing is pushed up or down against the group's mean."
        return "No token at the beginning or end is shared by a completion above the mean and one below it."
    before, after = sum(t.before < -EPS for t in shared), sum(t.after < -EPS for t in shared)
    said = (
        f"{len(shared)} tokens at the ends are shared by completions above and below the group's mean. "
        f"The plain advantages push {before or 'none'} of them down, {name} pushes {after or 'none'} down."
    )
    worst = min(shared, key=lambda token: token.before)
    if worst.before < -EPS:
        now = f"up by {worst.after:.2f}" if worst.after > EPS else f"down by {-worst.after:.2f}"
        ending = f"now it is pushed {now}" if worst.protected else f"{name} does not protect it"
        text = worst.text.strip() or "white space"
        where = f"{worst.side}, token {worst.position + 1}"
        said += f" “{text}” ({where}) would be pushed down by {-worst.before:.2f}; {ending}."
    return said
