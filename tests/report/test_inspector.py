import json
import re
from pathlib import Path
from typing import Any

import pytest
from browser import OpenPage, opened

from trimtab.errors import InputError
from trimtab.objectives import METHODS
from trimtab.report.group_weights import headline, weigh_group
from trimtab.report.inspector import inspect_rollouts, inspector_fragment, within_limit, write_inspector_page
from trimtab.report.sampled_groups import read_groups

# Advantages 3, -3 and 0; lengths 6, 3 and 3, so shares 4/6, 4/3 and 4/3. The first and the last token conflict.
GROUP = [
    {"prompt": "q", "token_ids": [1, 2, 3, 4, 5, 9], "tokens": ["<r>", "a", "b", "c", "d", "<end>"], "reward": 6},
    {"prompt": "q", "token_ids": [1, 8, 9], "tokens": ["<r>", "x", "<end>"], "reward": 0},
    {"prompt": "q", "token_ids": [1, 2, 9], "tokens": ["<r>", "a", "<end>"], "reward": 3},
]
HOSTILE = "</script><img src=x onerror=alert(1)><!-- \u2028 '\" & </style>"


def write(path: Path, lines: list[dict[str, Any]], end: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + end, encoding="utf-8")
    return path


def sums(path: Path, method: str) -> list[tuple[str, int, int, float, float, bool]]:
    (group,) = read_groups(path, method=method)
    shared = weigh_group(group).shared
    return [(t.side, t.position, t.token_id, t.before, t.after, t.protected) for t in shared]


def near(*values: float) -> list[Any]:
    return [pytest.approx(value, abs=1e-5) for value in values]


# The numbers


def test_sums_over_shared_tokens_are_those_worked_out_by_hand(tmp_path: Path) -> None:
    path = write(tmp_path / "rollouts.jsonl", GROUP)
    for side, token_id, found in zip(("prefix", "suffix"), (1, 9), sums(path, "gtpo"), strict=True):
        # 3 * 4/6 - 3 * 4/3; then the positive row counts twice and the negative one not at all.
        assert found == (side, 0, token_id, *near(-2.0, 4.0), True)
    # The standard deviation is 3, and nothing is masked.
    assert [row[3:] for row in sums(path, "grpo")] == [(*near(-2 / 3, -2 / 3), False)] * 2
    # A leave-one-out baseline gives 4.5, -4.5 and 0; the loss does not divide by a row's length.
    assert [row[3:] for row in sums(path, "rloo")] == [(*near(0.0, 0.0), False)] * 2


def test_two_tokens_that_share_a_place_have_a_sum_each(tmp_path: Path) -> None:
    rows = [([1, 2, 9], 4), ([5, 3, 9], 4), ([1, 3, 8], 0), ([5, 2, 8], 0)]
    path = write(tmp_path / "rollouts.jsonl", [{"prompt": "q", "token_ids": ids, "reward": r} for ids, r in rows])
    # Every forward token stands in one row above and one below the mean: 2 - 2 before, 2 * 2 after.
    expected = [("prefix", p, i, *near(0.0, 4.0), True) for p, i in ((0, 1), (0, 5), (1, 2), (1, 3))]
    assert sums(path, "gtpo") == expected


def test_a_shared_token_knows_who_holds_it(tmp_path: Path) -> None:
    (group,) = read_groups(write(tmp_path / "rollouts.jsonl", GROUP))
    weighed = weigh_group(group)
    for shared in weighed.shared:
        # The completion at the mean holds both tokens but conflicts with nobody.
        assert (shared.rows, shared.above, shared.below) == ([0, 1, 2], 1, 1)
    assert weighed.weights == [[6, 3, 3, 3, 3, 6], [0, -3, 0], [0, 0, 0]]
    assert weighed.lambdas == [[2, 1, 1, 1, 1, 2], [0, 1, 0], [1, 1, 1]]
    assert weighed.states == ["kept", "kept", "no weight: advantage 0"]
    assert headline(weighed) == (
        "2 tokens at the ends are shared by completions above and below the group's mean. The plain advantages push 2 "
        "of them down, GTPO pushes none down. “<r>” (prefix, token 1) would be pushed down by 2.00; "
        "now it is pushed up by 4.00."
    )


NEEDS_MORE = {"distill": "logps_NT", "grpo_process": "step_ends_NS"}
"""What a method's weights depend on beside tokens and rewards, which no file of rollouts has."""


@pytest.mark.parametrize("method", sorted(METHODS.keys() - NEEDS_MORE.keys()))
def test_every_method_gives_a_page(method: str, tmp_path: Path) -> None:
    page = inspect_rollouts(write(tmp_path / "rollouts.jsonl", GROUP), method=method).read_text(encoding="utf-8")
    assert f"The weights are computed here with {METHODS[method].title or method}." in page


@pytest.mark.parametrize("method", sorted(NEEDS_MORE))
def test_a_method_that_needs_more_than_rewards_shows_the_weights_that_the_file_brings(
    method: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=f"{NEEDS_MORE[method]}.*; give the weights with the completions"):
        inspect_rollouts(write(tmp_path / "bare.jsonl", GROUP), method=method)
    weighed = [{**line, "weights": [1.0] * len(line["token_ids"])} for line in GROUP]
    run = run_folder(tmp_path / "run", weighed, {"name": method})
    assert "pushed up" in inspect_rollouts(run).read_text(encoding="utf-8")


def test_states_say_why_a_completion_has_no_weight(tmp_path: Path) -> None:
    lines = [
        {"prompt": "q", "token_ids": [1, 2], "reward": 4, "entropies": [0.1, 0.1]},
        {"prompt": "q", "token_ids": [3, 4], "reward": 0, "entropies": [0.9, 0.9]},
        {"prompt": "q", "token_ids": [1, 2], "reward": 0, "entropies": [0.1, 0.1]},
        {"prompt": "q", "token_ids": [3, 4], "reward": None, "entropies": [0.1, 0.1]},
        {"prompt": "p", "token_ids": [3, 4], "reward": 1, "entropies": [0.1, 0.1]},
        {"prompt": "p", "token_ids": [3, 4], "reward": 1, "entropies": [0.1, 0.1]},
    ]
    run = run_folder(tmp_path / "run", lines, {"name": "gtpo", "gamma": 0.0, "entropy_filter": "on"})
    first, second = (weigh_group(group) for group in read_groups(run))
    assert first.states == [
        "kept",
        "dropped: entropy 0.90 is above 0.69",
        "no weight: every token is protected",
        "dropped: no reward",
    ]
    assert second.states == ["no weight: all rewards of the group are equal"] * 2
    assert headline(second).startswith("All completions earned the same")


# What is read


def run_folder(path: Path, lines: list[dict[str, Any]], method: dict[str, Any]) -> Path:
    write(path / "samples.jsonl", lines)
    (path / "config.yaml").write_text(json.dumps({"method": method}), encoding="utf-8")
    (path / "metrics.jsonl").write_text('{"step": 0, "initial_entropy": 0.4}\n', encoding="utf-8")
    return path


def test_weights_of_a_run_are_used_as_they_are_and_another_method_weighs_anew(tmp_path: Path) -> None:
    lines = [row | {"step": 5, "weights": [0.5] * len(row["tokens"])} for row in GROUP]
    run = run_folder(tmp_path / "run", lines, {"name": "grpo"})
    (own,) = read_groups(run)
    assert weigh_group(own).weights == [[0.5] * 6, [0.5] * 3, [0.5] * 3]
    assert own.notes == ()
    (other,) = read_groups(run, method="gtpo")
    assert weigh_group(other).weights[0] == [6, 3, 3, 3, 3, 6]
    assert other.notes == ("The run used grpo; these are the weights that gtpo would give.",)


def test_a_run_of_before_tokens_were_kept_is_weighed_with_its_initial_entropy(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "prompt": "q", "completion": text, "reward": reward, "entropy": entropy}
        for text, reward, entropy in [("so 1 it is", 4, 0.1), ("so 2 it is", 0, 0.8), ("no", 2, 0.0)]
    ]
    (group,) = read_groups(run_folder(tmp_path / "run", lines, {"name": "gtpo"}))
    weighed = weigh_group(group)
    assert group.completions[0].tokens == ["so", " 1", " it", " is"]
    assert [note.startswith("The file holds no tokens") for note in group.notes] == [True]
    # lambda (A - gamma H), and the second row is above ln 2.
    assert weighed.weights[0] == [pytest.approx(x) for x in (3.98, 1.99, 3.98, 3.98)]
    assert weighed.states[1] == "dropped: entropy 0.80 is above 0.69"


def test_what_cannot_be_known_is_left_out_and_said(tmp_path: Path) -> None:
    (group,) = read_groups(write(tmp_path / "bare.jsonl", GROUP))
    assert "Entropies are missing, so the entropy filter and penalty are left out." in weigh_group(group).notes
    lines = [row | {"entropies": [2.0] * len(row["tokens"])} for row in GROUP]
    weighed = weigh_group(read_groups(write(tmp_path / "entropies.jsonl", lines))[0])
    assert "The initial entropy is not known, so the entropy filter is left out." in weighed.notes
    assert weighed.weights[0][1] == pytest.approx(3 - 0.1 * 2.0)


def test_a_tokenizer_makes_the_tokens_that_are_missing(tiny_model: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "q", "completion": text, "reward": r} for text, r in [("ab 1", 1), ("ab 2", 0)]]
    (group,) = read_groups(write(tmp_path / "rollouts.jsonl", lines), tokenizer=str(tiny_model))
    assert [c.tokens for c in group.completions] == [["a", "b", " ", "1"], ["a", "b", " ", "2"]]
    assert group.notes == ()


def test_groups_are_told_apart_by_step_and_name_or_by_prompt(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"step": 1, "group": "u7", "completion": "a", "reward": 1},
        {"step": 2, "group": "u7", "completion": "a", "reward": 1},
        {"step": 1, "group": "u7", "completion": "b", "reward": 0},
        {"prompt": [{"role": "user", "content": "hi"}], "completion": [{"content": "yes"}], "reward": 0},
    ]
    groups = read_groups(write(tmp_path / "rollouts.jsonl", lines))
    assert [(g.step, g.place, g.prompt, len(g.completions)) for g in groups] == [
        (1, "u7", "", 2),
        (2, "u7", "", 1),
        (None, 0, "hi", 1),
    ]


def test_a_torn_last_line_is_left_out_and_a_torn_line_before_it_is_refused_by_number(tmp_path: Path) -> None:
    torn = '{"prompt": "q", "comp'
    assert len(read_groups(write(tmp_path / "torn.jsonl", GROUP, torn))[0].completions) == 3
    with pytest.raises(InputError, match=r"torn\.jsonl, line 4: this is not JSON"):
        read_groups(write(tmp_path / "torn.jsonl", GROUP, torn + "\n"))
    with pytest.raises(InputError, match=r"torn\.jsonl: there is no completion in it yet"):
        read_groups(write(tmp_path / "torn.jsonl", [], torn))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([1], "this is no JSON object"),
        ({"prompt": "q", "completion": "a"}, "it needs a reward"),
        ({"prompt": "q", "completion": "a", "reward": "1"}, "it needs a reward"),
        ({"prompt": "q", "reward": 1}, "it needs a completion, tokens or token_ids"),
        ({"completion": "a", "reward": 1}, "it needs a prompt or a group"),
        ({"prompt": "q", "completion": "a", "reward": 1, "step": "one"}, "step must be a whole number, not 'one'"),
        ({"prompt": "q", "token_ids": ["1"], "reward": 1}, "token_ids must be a list of whole numbers"),
        ({"prompt": "q", "token_ids": [1], "tokens": ["a", "b"], "reward": 1}, "there are 2 tokens but 1 token_ids"),
        ({"prompt": "q", "token_ids": [1], "weights": [1, 2], "reward": 1}, "weights must be a list of 1 numbers"),
        ({"prompt": "q", "token_ids": [1], "entropies": ["x"], "reward": 1}, "entropies must be numbers"),
        ({"prompt": "q", "token_ids": [1], "reward": 1, "rewards": [1]}, "rewards must be an object"),
    ],
)
def test_a_line_that_cannot_be_used_is_refused_by_number(line: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"rollouts\.jsonl, line 4: {re.escape(said)}"):
        read_groups(write(tmp_path / "rollouts.jsonl", [*GROUP, line]))


def test_bad_input_is_one_sentence(command: Any, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", [row | {"step": step} for step in (5, 10) for row in GROUP], {"name": "gtpo"})
    cases: list[tuple[list[Any], str]] = [
        ([run, "--step", 7], "--step 7: no completions are logged at that step; there are steps 5, 10"),
        ([tmp_path / "none"], f"{tmp_path / 'none'}: there is no such file (give a run folder or a JSONL file"),
        ([tmp_path], f"{tmp_path}: there is no samples.jsonl (it is no run, or log.samples is 0)"),
        ([run, "--method", "gpto"], f"{run}: there is no method 'gpto'; did you mean 'gtpo'?"),
        ([run, "-o", run], f"{run}: the page cannot be written there"),
        ([run_folder(tmp_path / "sft", [], {"name": "sft"})], f"{tmp_path / 'sft'}: supervised fine-tuning weighs"),
        ([run / "samples.jsonl", "--tokenizer", tmp_path], f"--tokenizer {tmp_path}: no tokenizer can be loaded"),
        ([write(tmp_path / "plain.jsonl", GROUP), "--step", 1], "--step 1: the rollouts name no steps"),
    ]
    for arguments, said in cases:
        outcome = command("inspect", *arguments)
        assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1), outcome.err
        assert outcome.err.startswith(f"trimtab: {said}")


def test_the_command_writes_the_page_into_the_run(command: Any, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", [row | {"step": step} for step in (5, 10) for row in GROUP], {"name": "gtpo"})
    outcome = command("inspect", run)
    assert (outcome.code, outcome.out, outcome.err) == (0, f"written: {run / 'inspector.html'}\n", "")
    assert '"selected":1' in (run / "inspector.html").read_text(encoding="utf-8")
    command("inspect", run, "--step", 5, "-o", tmp_path / "new" / "page.html")
    assert '"selected":0' in (tmp_path / "new" / "page.html").read_text(encoding="utf-8")


def test_a_page_holds_the_groups_near_the_selected_one_that_fit(tmp_path: Path) -> None:
    groups = read_groups(write(tmp_path / "r.jsonl", [row | {"step": s} for s in (1, 2, 3, 4) for row in GROUP]))
    # 12 tokens a group.
    assert [g.step for g in within_limit(groups, groups[2], 36)] == [2, 3, 4]
    assert [g.step for g in within_limit(groups, groups[2], 1)] == [3]
    assert "3 more are not on this page" in inspector_fragment(groups, selected=groups[2], token_limit=1)
    assert "more are not on this page" not in inspector_fragment(groups)


# The page in a browser

METHOD_WEIGHTS = [[6, 3, 3, 3, 3, 6], [0, -3, 0], [0, 0, 0]]


def page_of(tmp_path: Path, *, hostile: bool = False) -> Path:
    lines = [
        row | {"step": step, "weights": weights, "entropies": [0.25] * len(weights), "rewards": {"format": 1}}
        for step in (5, 10)
        for row, weights in zip(GROUP, METHOD_WEIGHTS, strict=True)
    ]
    if hostile:
        lines[3] = lines[3] | {"tokens": [HOSTILE, "", "\n", " ", "e" * 200, HOSTILE], "prompt": "q"}
        lines += [line | {"group": HOSTILE, "prompt": HOSTILE, "rewards": {HOSTILE: 1}} for line in lines[3:6]]
    return inspect_rollouts(run_folder(tmp_path / "run", lines, {"name": "gtpo", "gamma": 0.0}))


def token(page: OpenPage, completion: int, index: int) -> Any:
    """A token by the completion's place on the page, where advantages are 3, -3 and 0."""
    return page.page.locator(".tti-text-block").nth(completion).locator(".tti-token").nth(index)


def style(element: Any, name: str) -> str:
    return str(element.evaluate(f"element => getComputedStyle(element)['{name}']"))


def contrast(element: Any) -> float:
    """WCAG contrast of an element's text with the nearest ground behind it."""
    return float(
        element.evaluate("""element => {
            const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
            const light = (colour) => {
                const [r, g, b] = channels(colour).map((v) => v / 255).map(
                    (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const solid = (colour) => channels(colour).length === 3 || channels(colour)[3] === 1;
            let behind = element;
            while (!solid(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
            const one = light(getComputedStyle(element).color), two = light(getComputedStyle(behind).backgroundColor);
            return (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
        }""")
    )


@pytest.mark.parametrize("dark", [False, True])
def test_tokens_are_coloured_by_their_weights(dark: bool, browser: Any, tmp_path: Path) -> None:
    with opened(browser, page_of(tmp_path), dark=dark) as page:
        strong, plain = token(page, 0, 0), token(page, 0, 1)
        zero, down = token(page, 1, 0), token(page, 1, 1)
        colours = [style(element, "backgroundColor") for element in (strong, plain, zero, down)]
        assert len(set(colours)) == 4
        assert style(token(page, 0, 5), "backgroundColor") == colours[0]
        assert style(token(page, 2, 1), "backgroundColor") == colours[2]

        def blue_less_red(colour: str) -> int:
            red, _, blue = map(int, re.findall(r"\d+", colour)[:3])
            return blue - red

        assert blue_less_red(colours[0]) > blue_less_red(colours[1]) > abs(blue_less_red(colours[2]))
        assert blue_less_red(colours[3]) < -abs(blue_less_red(colours[2]))
        # Not by colour alone: a solid line below what is pushed up, a dashed one below what is pushed down.
        assert [style(e, "borderBottomStyle") for e in (strong, plain, down)] == ["solid", "solid", "dashed"]
        assert style(zero, "borderBottomColor") in ("rgba(0, 0, 0, 0)", "transparent")
        assert min(contrast(page.page.locator(f"css={name}").first) for name in TEXTS) >= 4.5
        for element in (strong, plain, zero, down):
            assert contrast(element) >= 4.5
        assert (page.requests, page.errors) == ([], [])


TEXTS = (".tti-headline", ".tti-explain", ".tti-head dt", ".tti-head dd", ".tti-why", ".tti-sums", ".tti-detail span")


def test_a_completion_is_headed_by_what_it_earned(browser: Any, tmp_path: Path) -> None:
    with opened(browser, page_of(tmp_path)) as page:
        heads = page.page.locator(".tti-head").all_inner_texts()
        assert [re.split(r"\s+", head)[1] for head in heads] == ["1", "2", "3"]
        assert "kept" in heads[0] and "no weight: advantage 0" in heads[2]
        for words in ("6 (format 1)", "+3.00", "6 tokens", "0.250 nats a token"):
            assert words in heads[0]
        assert "−3.00" in heads[1]
        assert page.page.locator(".tti-sums").all_inner_texts() == ["−2.0 → +4.0"] * 2


def test_tokens_are_reached_and_explained_with_the_keyboard(browser: Any, tmp_path: Path) -> None:
    with opened(browser, page_of(tmp_path)) as page:
        keyboard, detail = page.page.keyboard, page.page.locator(".tti-detail")

        def focused() -> str:
            return str(page.page.evaluate("document.activeElement.textContent"))

        page.page.locator("summary").focus()
        keyboard.press("Tab")
        if page.page.evaluate("document.activeElement.tagName") == "PRE":
            keyboard.press("Tab")
        assert "shared prefix, held by 1 completion above the mean and 1 below" in detail.inner_text()
        assert "sum −2.00 by plain advantages, +4.00 by GTPO (protected)" in detail.inner_text()
        keyboard.press("Tab")
        assert "shared suffix" in detail.inner_text()
        keyboard.press("Tab")
        assert focused() == "<r>"
        assert "id 1; weight +6.0000; λ 2; entropy 0.250 nats; token 1 of the shared prefix" in detail.inner_text()
        keyboard.press("ArrowRight")
        assert focused() == "a"
        assert "id 2; weight +3.0000; λ 1; entropy 0.250 nats" in detail.inner_text()
        assert "shared" not in detail.inner_text()
        keyboard.press("End")
        keyboard.press("ArrowRight")
        assert focused() == "<end>"
        keyboard.press("Home")
        keyboard.press("ArrowDown")
        assert "completion 2, token 1; id 1; weight 0.0000; λ 0" in detail.inner_text()
        assert page.page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("<r>: completion 2")
        # One tab stop a completion.
        assert page.page.locator(".tti-rows [tabindex='0']").count() == 3
        assert page.errors == []


def test_a_shared_token_under_the_pointer_lights_up_in_all_completions(browser: Any, tmp_path: Path) -> None:
    with opened(browser, page_of(tmp_path)) as page:
        token(page, 0, 0).hover()
        assert page.page.locator(".tti-token.tti-same").all_inner_texts() == ["<r>"] * 3
        assert page.page.locator(".tti-column.tti-same").count() == 1
        assert style(token(page, 1, 0), "outlineStyle") == "solid"
        token(page, 0, 1).hover()
        assert page.page.locator(".tti-same").count() == 0


def test_another_group_is_shown_when_it_is_selected(browser: Any, tmp_path: Path) -> None:
    with opened(browser, page_of(tmp_path, hostile=True)) as page:
        select = page.page.locator("select")
        assert select.locator("option").all_inner_texts()[:2] == ["step 5, group 0", "step 10, group 0"]
        assert token(page, 0, 0).inner_text() == HOSTILE
        select.select_option("0")
        assert token(page, 0, 0).inner_text() == "<r>"
        assert page.page.locator(".tti-row").count() == 3


@pytest.mark.parametrize("width", [390, 1280])
def test_a_hostile_completion_stays_text_and_nothing_overflows(width: int, browser: Any, tmp_path: Path) -> None:
    path = page_of(tmp_path, hostile=True)
    with opened(browser, path, width=width) as page:
        for group in ("1", "2"):
            page.page.locator("select").select_option(group)
            assert token(page, 0, 0).inner_text() == HOSTILE
            assert token(page, 0, 1).inner_text() == "▯"
            assert page.page.locator("img").count() == 0
            assert page.overflow() <= 0
        assert (page.requests, page.errors) == ([], [])
    assert "<img" not in path.read_text(encoding="utf-8")


def test_completions_stand_side_by_side_and_below_each_other_on_a_phone(browser: Any, tmp_path: Path) -> None:
    path = page_of(tmp_path)
    for width, columns in ((1280, 3), (390, 1)):
        with opened(browser, path, width=width) as page:
            boxes = [row.bounding_box() for row in page.page.locator(".tti-row").all()]
            assert len({round(box["x"]) for box in boxes}) == columns
            assert all(box["width"] > 200 for box in boxes)
            assert page.overflow() <= 0


def test_two_inspectors_live_in_one_page(browser: Any, tmp_path: Path) -> None:
    groups = read_groups(
        write(tmp_path / "r.jsonl", [row | {"step": s} for s in (1, 2) for row in GROUP]), label="GTPO"
    )
    both = "".join(inspector_fragment(groups, prefix=prefix) for prefix in ("one", "two"))
    (tmp_path / "page.html").write_text(f"<!DOCTYPE html><meta charset=utf-8><body>{both}", encoding="utf-8")
    ids = re.findall(r'id="([^"]+)"', both)
    assert len(ids) == len(set(ids)) and all(name.startswith(("one", "two")) for name in ids)
    with opened(browser, tmp_path / "page.html") as page:
        page.page.locator("#two select").select_option(label="GTPO, step 1, group 0")
        assert [s.input_value() for s in page.page.locator("select").all()] == ["1", "0"]
        assert page.page.locator("#one .tti-token").count() == page.page.locator("#two .tti-token").count() > 12
        assert page.errors == []


def test_a_page_of_no_groups_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a group"):
        inspector_fragment([])
    groups = read_groups(write(tmp_path / "rollouts.jsonl", GROUP))
    write_inspector_page(tmp_path / "page.html", groups, title=HOSTILE)
    assert "<img" not in (tmp_path / "page.html").read_text(encoding="utf-8")
