import ast
import operator
import random
import re
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.errors import InputError
from trimtab.tasks.arithmetic import (
    STYLES,
    Step,
    canonical,
    check_equations,
    expression_of,
    make_rows,
    split_of,
)

ROW_KEYS = {"prompt", "answer", "completion", "expression", "operations"}
COMPLETION = re.compile(r"<reasoning>(.+)</reasoning><answer>(\d+)</answer>", re.DOTALL)
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
FIRST_TERSE_ROW = {
    "prompt": "Ben brings 6 cards. Soon there are 14 times as many. How many cards now?\n",
    "answer": "84",
    "completion": "<reasoning>6x14=84</reasoning><answer>84</answer>",
    "expression": "6x14",
    "operations": 1,
}
CHAIN = [Step(15, "+", 2, 17), Step(17, "x", 3, 51), Step(51, "-", 9, 42)]


def values_of(expression: str) -> list[int]:
    """Every number the expression passes through, by Python's own parser and precedence."""
    values = []

    def visit(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            value = OPERATORS[type(node.op)](visit(node.left), visit(node.right))
        else:
            assert isinstance(node, ast.Constant) and isinstance(node.value, int)
            value = node.value
        values.append(value)
        return value

    visit(ast.parse(expression.replace("x", "*"), mode="eval").body)
    return values


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(-(2**40), 2**40), mode=st.sampled_from(["terse", "varied"]), more=st.integers(1, 20))
def test_the_same_seed_gives_the_same_rows_and_a_smaller_n_gives_the_first_of_them(
    seed: int, mode: str, more: int
) -> None:
    rows = make_rows(10, seed=seed, mode=mode)
    assert rows == make_rows(10 + more, seed=seed, mode=mode)[:10]
    assert rows != make_rows(10, seed=seed + 1, mode=mode)


def test_the_rows_of_a_seed_stay_what_they_are_from_one_release_to_the_next() -> None:
    row = make_rows(1, seed=0, mode="terse")[0]
    assert row == FIRST_TERSE_ROW


@settings(max_examples=20, deadline=None)
@given(
    train_seed=st.integers(0, 10**9),
    test_seed=st.integers(0, 10**9),
    most=st.integers(1, 3),
    max_operand=st.integers(4, 40),
)
def test_train_and_test_never_share_a_problem(train_seed: int, test_seed: int, most: int, max_operand: int) -> None:
    make = partial(make_rows, 200, operations=(1, most), max_operand=max_operand)
    train = {row["expression"] for row in make(seed=train_seed, split="train")}
    test = {row["expression"] for row in make(seed=test_seed, split="test")}
    assert not train & test
    assert {split_of(expression) for expression in train} == {"train"}
    assert {split_of(expression) for expression in test} == {"test"}


def test_about_one_problem_in_eight_is_a_test_problem() -> None:
    expressions = [f"{left}+{right}" for left in range(100) for right in range(100)]
    share = sum(split_of(expression) == "test" for expression in expressions) / len(expressions)
    assert 0.11 < share < 0.14


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    fewest=st.integers(1, 4),
    extra=st.integers(0, 3),
    max_operand=st.integers(3, 60),
    max_result=st.integers(10, 200),
)
def test_answers_are_right_and_every_number_on_the_way_is_in_range(
    seed: int, fewest: int, extra: int, max_operand: int, max_result: int
) -> None:
    bounds = (fewest, fewest + extra)
    rows = make_rows(20, seed=seed, operations=bounds, max_operand=max_operand, max_result=max_result)
    for row in rows:
        assert set(row) == ROW_KEYS
        values = values_of(row["expression"])
        assert row["answer"] == str(values[-1])
        assert min(values) >= 0 and max(values) <= max_result
        assert max(int(number) for number in re.findall(r"\d+", row["expression"])) <= max_operand
        assert len(re.findall(r"[-+x]", row["expression"])) == row["operations"]
        assert fewest <= row["operations"] <= fewest + extra


@pytest.mark.parametrize("mode", ["terse", "varied"])
def test_a_completion_shows_each_equation_of_its_problem_once_and_ends_in_the_answer(mode: str) -> None:
    for row in make_rows(500, seed=3, mode=mode, operations=(1, 4)):
        match = COMPLETION.fullmatch(row["completion"])
        assert match and match[2] == row["answer"]
        assert [right for _, right in check_equations(row["completion"])] == [True] * row["operations"]


def test_a_prompt_names_the_numbers_in_order_and_ends_with_a_newline() -> None:
    for row in make_rows(200, seed=4):
        assert row["prompt"].endswith("?\n") and row["prompt"].count("\n") == 1
        assert re.findall(r"\d+", row["prompt"]) == re.findall(r"\d+", row["expression"])


def test_a_single_thing_is_not_named_in_the_plural() -> None:
    openings = [row["prompt"].split(".")[0] for row in make_rows(500, seed=5) if re.match(r"1\D", row["expression"])]
    assert openings
    assert all(re.search(r" 1 [a-z]+[^s]$", opening) for opening in openings)


def test_the_terse_completion_is_the_equations_alone() -> None:
    rows = make_rows(100, seed=6, mode="terse")
    for row in rows:
        body = row["completion"].removeprefix("<reasoning>").split("</reasoning>")[0]
        equations = body.split(" ; ")
        assert all(re.fullmatch(r"\d+[-+x]\d+=\d+", equation) for equation in equations)
        assert len(equations) == row["operations"]


def test_the_mode_changes_the_completions_and_nothing_else() -> None:
    terse, varied = make_rows(50, seed=7, mode="terse"), make_rows(50, seed=7, mode="varied")
    assert [{**row, "completion": None} for row in terse] == [{**row, "completion": None} for row in varied]
    assert all(one["completion"] != other["completion"] for one, other in zip(terse, varied, strict=True))


@pytest.mark.parametrize(
    ("style", "form"),
    [
        ("verbal", r"(add|gain|get|put on) 2\b.*15\+2=17.*17x3=51.*(take|lose|drop|remove) 9\b.*51-9=42$"),
        ("equation_first", r"15\+2=17 \w+ we (add|gain|get|put on) 2\b.*17x3=51.*51-9=42"),
        ("algebraic", r"(?:([a-p])=15\W+(?:and )?)?[a-p]=15\+2=17\W.*[a-p]=17x3=51\W.*[a-p]=51-9=42$"),
        ("symbols", r"(?:\w+ )?15\+2=17( ; |, |\. |; | and | \| )(?:\w+ )?17x3=51\W.*51-9=42$"),
    ],
)
def test_each_style_has_its_form_and_shows_every_equation(style: str, form: str) -> None:
    texts = [STYLES[style](CHAIN, random.Random(seed)) for seed in range(200)]
    assert any(re.match(f".*{form}" if style == "verbal" else form, text) for text in texts)
    assert all(re.search(r"15\+2=17.*17x3=51.*51-9=42", text) for text in texts)
    if style in ("algebraic", "symbols"):
        assert all(re.match(form, text) for text in texts)
    assert len(set(texts)) > 100


def test_each_style_is_drawn_for_about_a_quarter_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["verbal", "equation_first", "algebraic", "symbols"]
    assert list(STYLES) == names
    for name in names:
        monkeypatch.setitem(STYLES, name, partial("style:{}.".format, name))
    text = "".join(row["completion"] for row in make_rows(1000, seed=8))
    assert all(200 < text.count(f"style:{name}.") < 300 for name in names)


def test_the_letters_of_the_algebraic_style_last_for_a_long_chain() -> None:
    steps = [Step(value, "+", 1, value + 1) for value in range(1, 31)]
    text = STYLES["algebraic"](steps, random.Random(0))
    assert [right for _, right in check_equations(text)] == [True] * 30


def test_varied_solutions_of_one_problem_are_many() -> None:
    rows = make_rows(3000, seed=9, operations=(1, 1), max_operand=3, max_result=4)
    completions: dict[str, set[str]] = {}
    for row in rows:
        completions.setdefault(row["expression"], set()).add(row["completion"])
    assert min(len(texts) for texts in completions.values()) > 50


def test_harder_settings_give_longer_chains_and_larger_numbers() -> None:
    easy, hard = make_rows(200, seed=10), make_rows(200, seed=10, operations=(4, 6), max_operand=50, max_result=999)
    assert max(row["operations"] for row in easy) == 3
    assert min(row["operations"] for row in hard) == 4
    assert max(int(row["answer"]) for row in hard) > 99
    mean_length = [sum(len(row["completion"]) for row in rows) / 200 for rows in (easy, hard)]
    assert mean_length[1] > 1.5 * mean_length[0]


@pytest.mark.parametrize(
    ("signs", "expression"),
    [("+-", "9+2-2"), ("+x", "(9+2)x2"), ("x+", "9x2+2"), ("xx", "9x2x2"), ("-x-x", "((9-2)x2-2)x2")],
)
def test_an_expression_has_parentheses_only_where_precedence_needs_them(signs: str, expression: str) -> None:
    steps, value = [], 9
    for sign in signs:
        result = {"+": value + 2, "-": value - 2, "x": value * 2}[sign]
        steps.append(Step(value, sign, 2, result))
        value = result
    assert expression_of(steps) == expression
    assert values_of(expression)[-1] == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("15+2=17 ; 17+12=30", [("15+2=17", True), ("15+2=17 ; 17+12=30", False)]),
        ("so 3 x 4 = 12.", [("so 3 x 4 = 12", True)]),
        ("3*4=12 and 3×4=13", [("3*4=12", True), ("3*4=12 and 3×4=13", False)]),
        ("3-5=-2, 3-5=2", [("3-5=-2", True), ("3-5=-2, 3-5=2", False)]),
        ("15+2=17+12=29", [("15+2=17", True), ("15+2=17+12=29", True)]),
        ("k=2+3=5; take 4: 9-4=5", [("k=2+3=5", True), ("k=2+3=5; take 4: 9-4=5", True)]),
        ("- 2+2=5", [("- 2+2=5", False)]),
        ("1+2+3=6, 2 x 3 + 4 = 10, (1+2)x3+1=10", []),
        ("1.5+2=3, 1+2=3.5, a+2=5, 2+2=, =4, n12+2=14", []),
        ("", []),
    ],
)
def test_equations_are_found_where_they_end_and_judged(text: str, expected: list[tuple[str, bool]]) -> None:
    assert [(text[:end], right) for end, right in check_equations(text)] == expected


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"n": 0}, "n must be"),
        ({"n": 2.0}, "n must be"),
        ({"n": True}, "n must be"),
        ({"seed": "1"}, "seed must be"),
        ({"split": "validation"}, "train, test"),
        ({"mode": "long"}, "terse, varied"),
        ({"operations": (0, 2)}, "operations must be"),
        ({"operations": (3, 2)}, "operations must be"),
        ({"operations": 3}, "operations must be"),
        ({"operations": (1, 2, 3)}, "operations must be"),
        ({"max_operand": 0}, "max_operand must be"),
        ({"max_result": -1}, "max_result must be"),
    ],
)
def test_a_bad_argument_is_refused_by_name(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(InputError, match=named):
        make_rows(**{"n": 1, "seed": 0, **arguments})  # type: ignore[arg-type]


def test_settings_that_leave_a_split_empty_are_refused_instead_of_searched_for_ever() -> None:
    # One problem exists, 1-1, and it can be in one split only.
    make = partial(make_rows, 1, seed=0, operations=(1, 1), max_operand=1, max_result=1)
    full = split_of("1-1")
    empty = {"train": "test", "test": "train"}[full]
    assert make(split=full)[0]["expression"] == "1-1"
    with pytest.raises(InputError, match=f"no {empty} problem turned up"):
        make(split=empty)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("7+5", "5+7"),
        ("7x5", "5x7"),
        ("7+5-3", "7-3+5"),
        ("1+2+3", "3+1+2"),
        ("(7+5)x3", "(5+7)x3"),
        ("2x3+4", "3x2+4"),
    ],
)
def test_a_problem_and_its_mirror_are_one_problem_and_share_a_split(one: str, other: str) -> None:
    assert canonical(one) == canonical(other)
    assert split_of(one) == split_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("7-5", "5-7"),
        ("7+5", "7x5"),
        ("(7+5)x3", "7x3+5"),
        ("7+5-3", "7-5+3"),
        ("1+23", "12+3"),
        ("(1+2)x3+4", "(1+2)x4+3"),
    ],
)
def test_problems_that_differ_in_more_than_the_order_of_terms_stay_apart(one: str, other: str) -> None:
    assert canonical(one) != canonical(other)
