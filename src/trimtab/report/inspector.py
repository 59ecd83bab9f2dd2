"""The group inspector: a sampled group side by side, every token coloured by the weight that the method gives it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab.errors import InputError
from trimtab.files import replace_file
from trimtab.report.charts import json_in_html
from trimtab.report.group_weights import WeighedGroup, headline, weigh_group
from trimtab.report.page import asset, render_template
from trimtab.report.sampled_groups import SampledGroup, read_groups

TOKENS_IN_A_PAGE = 60_000
"""Groups are left out of a page above this, so that it opens at once (about 30 bytes a token)."""


def inspector_fragment(
    groups: Sequence[SampledGroup],
    *,
    selected: SampledGroup | None = None,
    prefix: str = "inspector",
    token_limit: int = TOKENS_IN_A_PAGE,
) -> str:
    """HTML of an inspector, without `<html>`: styles, markup and script in one, for a page of its own or a tab.

    Ids begin with `prefix`, class names with `tti-`; nothing is loaded from anywhere. Colours follow the reader's
    light or dark scheme.

    Args:
        groups: from `read_groups`, of one run or several (with labels).
        selected: shown first; default: the first group of the newest step.
        prefix: differs between the inspectors of one page.
        token_limit: further groups are left out above it, the selected one never, and the page says how many.

    Raises:
        InputError: a group's method cannot weigh it.
        ValueError: there is no group.
    """
    if not groups:
        raise ValueError("an inspector needs a group to show")
    shown = selected if selected is not None else newest(groups)
    chosen = within_limit(groups, shown, token_limit)
    data = {
        "selected": next(i for i, group in enumerate(chosen) if group is shown),
        "groups": [_group_data(weigh_group(group)) for group in chosen],
    }
    left_out = len(groups) - len(chosen)
    from markupsafe import Markup

    return render_template(
        "inspector.html.j2",
        prefix=prefix,
        css=asset("inspector.css"),
        js=asset("inspector.js"),
        data=Markup(json_in_html(data)),
        left_out=left_out,
    )


def write_inspector_page(
    path: Path, groups: Sequence[SampledGroup], *, step: int | None = None, title: str = "Group inspector"
) -> None:
    """Write one self-contained HTML page at `path`, creating its folder.

    Args:
        path: the HTML file.
        groups: from `read_groups`.
        step: which step's first group is shown at first; default: the newest.
        title: heading.

    Raises:
        InputError: there is no such step (with those there are), or the file cannot be written.
    """
    selected = newest(groups) if step is None else at_step(groups, step)
    from markupsafe import Markup

    fragment = Markup(inspector_fragment(groups, selected=selected))
    html = render_template("inspector_page.html.j2", title=title, fragment=fragment)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, html.encode())
    except OSError as error:
        raise InputError(
            f"{path}: the page cannot be written there ({error.strerror}); name a file in a folder you can write to"
        ) from error


def inspect_rollouts(
    path: Path,
    *,
    output: Path | None = None,
    step: int | None = None,
    method: str | None = None,
    tokenizer: str | None = None,
) -> Path:
    """Read a run folder or a JSONL file of rollouts and write its page; see `read_groups`.

    Returns:
        Where the page is: `output`, or `inspector.html` in the run's folder, or beside the file.
    """
    groups = read_groups(path, method=method, tokenizer=tokenizer)
    if output is None:
        output = path / "inspector.html" if path.is_dir() else path.with_suffix(".html")
    name = path.resolve().name if path.is_dir() else path.name
    write_inspector_page(output, groups, step=step, title=f"Group inspector: {name}")
    return output


def newest(groups: Sequence[SampledGroup]) -> SampledGroup:
    """The first group of the newest step; samples.jsonl puts groups whose rewards differ first."""
    last = max((group.step for group in groups if group.step is not None), default=None)
    return next(group for group in groups if group.step == last)


def at_step(groups: Sequence[SampledGroup], step: int) -> SampledGroup:
    """The first group of a step.

    Raises:
        InputError: there is none; the sentence names the steps there are.
    """
    steps = sorted({group.step for group in groups if group.step is not None})
    for group in groups:
        if group.step == step:
            return group
    if not steps:
        raise InputError(f"--step {step}: the rollouts name no steps; leave the option out")
    known = [*map(str, steps[:8]), "...", str(steps[-1])] if len(steps) > 10 else list(map(str, steps))
    raise InputError(f"--step {step}: no completions are logged at that step; there are steps {', '.join(known)}")


def within_limit(groups: Sequence[SampledGroup], selected: SampledGroup, limit: int) -> list[SampledGroup]:
    """The selected group and as many others as `limit` tokens allow, those of near steps first; order is kept."""

    def size(group: SampledGroup) -> int:
        return sum(len(c.tokens) for c in group.completions)

    near = sorted(
        (i for i, group in enumerate(groups) if group is not selected),
        key=lambda i: (abs((groups[i].step or 0) - (selected.step or 0)), groups[i].label != selected.label, i),
    )
    left = limit - size(selected)
    keep = {i for i, group in enumerate(groups) if group is selected}
    for i in near:
        left -= size(groups[i])
        if left < 0:
            break
        keep.add(i)
    return [group for i, group in enumerate(groups) if i in keep]


def _group_data(weighed: WeighedGroup) -> dict[str, Any]:
    """What the script draws. The highest advantage stands beside the lowest, then the next two, and so on."""
    group = weighed.group
    largest = max((abs(p) for p in weighed.plain), default=0.0) or 1.0
    ranked = sorted(range(len(group.completions)), key=lambda row: -(weighed.advantages[row] or 0.0))
    order = [ranked[i // 2] if i % 2 == 0 else ranked[-1 - i // 2] for i in range(len(ranked))]
    rows = []
    for row in order:
        c, plain = group.completions[row], abs(weighed.plain[row])
        rows.append(
            {
                "number": row + 1,
                "reward": c.reward,
                "rewards": c.rewards,
                "advantage": weighed.advantages[row],
                "entropy": c.entropy,
                "truncated": c.truncated,
                "kept": weighed.kept[row],
                "state": weighed.states[row],
                # Weights are drawn relative to this; a row at the mean has no plain weight of its own.
                "plain": plain if plain > 1e-6 else largest,
                "tokens": c.tokens,
                "ids": c.token_ids,
                "weights": [_short(w) for w in weighed.weights[row]],
                "entropies": None if c.entropies is None else [_short(h) for h in c.entropies],
                "lambdas": None if weighed.lambdas is None else [_short(x) for x in weighed.lambdas[row]],
            }
        )
    drawn = {row: place for place, row in enumerate(order)}
    name = group.label + ", " if group.label else ""
    step = "" if group.step is None else f"step {group.step}, "
    return {
        "name": f"{name}{step}group {group.place}",
        "prompt": group.prompt,
        "method": group.method.title or group.method.name,
        "headline": headline(weighed),
        "notes": weighed.notes,
        "rows": rows,
        "shared": [
            {
                "side": t.side,
                "position": t.position,
                "text": t.text,
                "id": t.token_id,
                "rows": [drawn[row] for row in t.rows],
                "above": t.above,
                "below": t.below,
                "before": _short(t.before),
                "after": _short(t.after),
                "protected": t.protected,
            }
            for t in weighed.shared
        ],
    }


def _short(value: float) -> float:
    return float(f"{value:.5g}")
