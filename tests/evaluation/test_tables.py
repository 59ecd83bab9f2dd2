import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from trimtab.errors import InputError
from trimtab.evaluation.scores import HERE, PAPER, Score, read_scores_csv, write_scores_csv
from trimtab.evaluation.table_formats import latex, markdown, page, wide_csv
from trimtab.evaluation.tables import MISSING, TableData, table_data

Command = Callable[..., Any]


def score(method: str, value: float, data: str = "AIME 2024", k: int | None = 8, **changes: Any) -> Score:
    """A score of a model called Q_1 that was trained on GSM8K, measured here."""
    plain = Score("Q_1", "GSM8K" if method else "", method, data, "pass", k, value, source=HERE)
    return replace(plain, **changes)


def texts(data: TableData, column: str) -> list[str]:
    """A column's values, from its heading with the data set."""
    return [row[data.headings.index(column)].text for row in data.rows]


def methods(data: TableData) -> list[str]:
    return [row[data.columns.index("method")].text for row in data.rows]


def best(data: TableData, column: str) -> list[str]:
    """The methods of the rows whose value is marked."""
    place = data.headings.index(column)
    return [method for number, method in enumerate(methods(data)) if (number, place) in data.marks]


# Everything at once, and small enough to write out by hand below.
SMALL = [
    score(
        "GTPO",
        0.5,
        low=0.4,
        high=0.6,
        seeds=3,
        interval="Student t over seeds, 95 %",
        note="selected, step 200: best eval/accuracy",
    ),
    score("GRPO | b", 0.25, low=0.1, high=0.4, interval="bootstrap over problems, 95 %"),
    score("GTPO", 0.125, "AMC 2023", 16, metric="maj"),
    score("GTPO", 0.75, source=PAPER),
]

MARKDOWN = r"""pass@k and maj@k by data set; shares in percent.

| model | training | method | source | seeds | AIME 2024 pass@8 | AMC 2023 maj@16 |
| :--- | :--- | :--- | :--- | :--- | ---: | ---: |
| Q\_1 | GSM8K | GRPO \| b | here | 1 | 25.0 [10.0, 40.0] | – |
| Q\_1 | GSM8K | GTPO [a] | here | 1–3 | **50.0** [40.0, 60.0] | 12.5 n/a |
| Q\_1 | GSM8K | GTPO | paper [b] | 1 | 75.0 | – |

- [a] selected, step 200: best eval/accuracy
- [b] arXiv 2508.03772v5, Table 1
- [low, high], one seed: bootstrap over problems, 95 %
- [low, high], several seeds: Student t over seeds, 95 %
- n/a: no interval; one seed has none over seeds, nor have seeds of equal value
- bold: best of a model and training set, the untrained model included, within one source
"""

WIDE_CSV = """\
model,training,method,source,seeds,AIME 2024 pass@8,AIME 2024 pass@8 interval,AMC 2023 maj@16,AMC 2023 maj@16 interval
Q_1,GSM8K,GRPO | b,here,1,25.0,"[10.0, 40.0]",–,
Q_1,GSM8K,GTPO,here,1–3,50.0,"[40.0, 60.0]",12.5,n/a
Q_1,GSM8K,GTPO,paper,1,75.0,,–,
"""

LATEX = r"""% \usepackage{booktabs,adjustbox}
\begin{table}
\centering
\caption{pass@k and maj@k by data set; shares in percent.}
\begin{adjustbox}{max width=\linewidth}
\begin{tabular}{lllllrr}
\toprule
&  &  &  &  & \multicolumn{1}{c}{AIME 2024} & \multicolumn{1}{c}{AMC 2023} \\
\cmidrule(lr){6-6} \cmidrule(lr){7-7}
model & training & method & source & seeds & pass@8 & maj@16 \\
\midrule
Q\_1 & GSM8K & GRPO | b & here & 1 & \shortstack[r]{25.0 \\ \scriptsize {[}10.0, 40.0{]}} & -- \\
Q\_1 & GSM8K & GTPO\textsuperscript{a} & here & 1--3 & \shortstack[r]{\textbf{50.0} \\ \scriptsize {[}40.0, 60.0{]}} & \shortstack[r]{12.5 \\ \scriptsize n/a} \\
Q\_1 & GSM8K & GTPO & paper\textsuperscript{b} & 1 & 75.0 & -- \\
\bottomrule
\end{tabular}
\end{adjustbox}
"""  # noqa: E501

HTML_BODY = """\
<tbody>
<tr>
<th scope="row" class="label">Q_1</th>
<th scope="row" class="label">GSM8K</th>
<th scope="row" class="label">GRPO | b</th>
<th scope="row" class="label">here</th>
<th scope="row" class="label">1</th>
<td>25.0<br><small>[10.0, 40.0]</small></td>
<td>–</td>
</tr>
<tr>
<th scope="row" class="label">Q_1</th>
<th scope="row" class="label">GSM8K</th>
<th scope="row" class="label">GTPO<sup>a</sup></th>
<th scope="row" class="label">here</th>
<th scope="row" class="label">1–3</th>
<td><strong>50.0</strong><br><small>[40.0, 60.0]</small></td>
<td>12.5<br><small>n/a</small></td>
</tr>
<tr>
<th scope="row" class="label">Q_1</th>
<th scope="row" class="label">GSM8K</th>
<th scope="row" class="label">GTPO</th>
<th scope="row" class="label">paper<sup>b</sup></th>
<th scope="row" class="label">1</th>
<td>75.0</td>
<td>–</td>
</tr>
</tbody>
"""


def test_markdown_is_as_written_by_hand() -> None:
    assert markdown(table_data(SMALL)) == MARKDOWN


def test_wide_csv_is_as_written_by_hand() -> None:
    assert wide_csv(table_data(SMALL)) == WIDE_CSV


def test_latex_is_as_written_by_hand() -> None:
    found = latex(table_data(SMALL))
    assert found.startswith(LATEX)
    assert r"{[}a{]} selected, step 200: best eval/accuracy\par {[}b{]} arXiv" in found


def test_html_is_as_written_by_hand() -> None:
    assert HTML_BODY in page(table_data(SMALL))


def test_columns_have_the_papers_data_sets_first_and_k_ascending_within_the_metrics_as_asked_for() -> None:
    scores = [
        score("GTPO", 0.5, data, k, metric=metric)
        for data in ("mine", "AMC 2023", "AIME 2025", "AIME 2024")
        for k in (64, 8)
        for metric in ("pass", "maj")
    ]
    data = table_data(scores, ("maj", "pass"))
    assert data.headings[:9] == (
        "model",
        "training",
        "method",
        "seeds",
        "AIME 2024 maj@8",
        "AIME 2024 maj@64",
        "AIME 2024 pass@8",
        "AIME 2024 pass@64",
        "AIME 2025 maj@8",
    )
    assert list(dict.fromkeys(data.groups)) == ["", "AIME 2024", "AIME 2025", "AMC 2023", "mine"]


def test_rows_begin_with_the_untrained_model_sft_and_grpo_and_keep_the_order_of_the_others() -> None:
    named = ["GTPO", "DAPO", "GRPO (β = 0.04)", "", "SFT", "GRPO", "Dr. GRPO"]
    data = table_data([score(method, 0.5) for method in named])
    assert methods(data) == [MISSING, "SFT", "GRPO (β = 0.04)", "GRPO", "GTPO", "DAPO", "Dr. GRPO"]


def test_the_papers_row_follows_ones_own_even_when_the_model_is_written_otherwise() -> None:
    scores = [
        score("GRPO", 0.1, model="Qwen2.5-3B"),
        score("GTPO", 0.2, model="Qwen2.5-3B"),
        score("GRPO", 0.3, model="Qwen 2.5 3B", source=PAPER),
        score("GTPO", 0.4, model="Qwen 2.5 3B", source=PAPER),
    ]
    data = table_data(scores)
    assert texts(data, "AIME 2024 pass@8") == ["10.0", "30.0", "20.0", "40.0"]
    assert texts(data, "source") == ["here", "paper", "here", "paper"]
    assert data.breaks == frozenset()


def test_a_table_of_one_source_has_no_column_for_it_and_names_it_below_unless_it_is_ones_own() -> None:
    own, papers = (table_data([score("GTPO", 0.5, source=source, low=0.4, high=0.6)]) for source in (HERE, PAPER))
    assert "source" not in own.columns + papers.columns
    assert [note for note in own.notes if "source" in note] == []
    assert [note for note in papers.notes if "source" in note] == [f"source: {PAPER}"]


def test_the_best_is_marked_within_a_training_set_with_the_untrained_model_and_ties_are_all_marked() -> None:
    scores = [
        score("", 0.3),
        score("GRPO", 0.4),
        score("GTPO", 0.4),
        score("DAPO", 0.35),
        score("GRPO", 0.2, training="MATH"),
        score("GTPO", 0.1, training="MATH"),
    ]
    data = table_data(scores)
    assert [(row, data.rows[row][1].text) for row, _ in sorted(data.marks)] == [(1, "GSM8K"), (2, "GSM8K")]
    # Without the untrained model, which no run on MATH came up to, the best of MATH is one of its own.
    assert best(table_data(scores[1:]), "AIME 2024 pass@8") == ["GRPO", "GTPO", "GRPO"]
    assert data.breaks == {1, 4}


def test_an_untrained_model_is_marked_when_no_training_beats_it() -> None:
    assert best(table_data([score("", 0.5), score("GTPO", 0.4)]), "AIME 2024 pass@8") == [MISSING]


def test_values_that_read_alike_are_both_marked_and_more_digits_part_them() -> None:
    scores = [score("GRPO", 0.50010), score("GTPO", 0.50011)]
    assert best(table_data(scores), "AIME 2024 pass@8") == ["GRPO", "GTPO"]
    assert best(table_data(scores, digits=3), "AIME 2024 pass@8") == ["GTPO"]


def test_the_papers_best_and_ones_own_are_marked_apart() -> None:
    scores = [score(m, v, source=s) for s, d in ((HERE, 0.0), (PAPER, 0.5)) for m, v in (("SFT", d), ("GTPO", 0.3))]
    assert best(table_data(scores), "AIME 2024 pass@8") == ["SFT", "GTPO"]


def test_a_column_with_one_value_and_a_metric_without_a_best_have_no_mark() -> None:
    lone = [score("GRPO", 0.4), score("GTPO", 0.5, "AMC 2023")]
    tokens = [score(method, value, k=None, metric="tokens") for method, value in (("GRPO", 100.0), ("GTPO", 90.0))]
    for data in (table_data(lone), table_data(tokens, ("tokens",))):
        assert data.marks == frozenset()
        assert not any(note.startswith("bold") for note in data.notes)


def test_a_blank_line_of_a_csv_is_a_dash_in_the_table(tmp_path: Path) -> None:
    write_scores_csv(tmp_path / "paper.csv", [score(m, 0.5, d, source=PAPER) for m in ("GRPO", "GTPO") for d in "AB"])
    text = (tmp_path / "paper.csv").read_text(encoding="utf-8")
    blank = text.replace("GTPO,B,pass,8,0.5", "GTPO,B,pass,8,")
    assert blank != text
    (tmp_path / "paper.csv").write_text(blank, encoding="utf-8")
    data = table_data(read_scores_csv(tmp_path / "paper.csv"))
    assert texts(data, "B pass@8") == ["50.0", MISSING]
    assert "| GTPO | 1 | **50.0** | – |" in markdown(data)
    assert data.notes[0] == f"source: {PAPER}"


def test_units_are_percent_nats_and_tokens() -> None:
    scores = [
        score("GTPO", value, k=None, metric=metric, low=value, high=2 * value, interval="bootstrap")
        for metric, value in (("mean", 0.12345), ("entropy", 0.12345), ("tokens", 123.45))
    ]
    data = table_data(scores, ("mean", "entropy", "tokens"))
    assert data.columns[-3:] == ("accuracy", "entropy (nats)", "tokens")
    assert [str(cell) for cell in data.rows[0][-3:]] == [
        "12.3 [12.3, 24.7]",
        "0.123 [0.123, 0.247]",
        "123.5 [123.5, 246.9]",
    ]


def test_rows_with_the_same_note_share_a_footnote() -> None:
    scores = [
        score(m, 0.5, note=n) for m, n in (("SFT", "final"), ("GRPO", "selected"), ("GTPO", "final"), ("RLOO", ""))
    ]
    data = table_data(scores)
    assert [row[2].reference for row in data.rows] == ["a", "b", "a", ""]
    assert data.notes[:2] == ("[a] final", "[b] selected")


def test_footnotes_do_not_run_out_of_letters() -> None:
    data = table_data([score(f"method {n}", 0.5, note=f"note {n}") for n in range(60)])
    letters = [row[2].reference for row in data.rows]
    assert letters[25:28] == ["z", "aa", "bb"] and len(set(letters)) == 60


def test_no_metric_and_an_unknown_one_are_refused() -> None:
    with pytest.raises(InputError, match=r"no scores of maj \(there are: pass\)"):
        table_data(SMALL[:1], ("maj",))
    with pytest.raises(InputError, match="there is no 'maj_frist'; did you mean 'maj_first'"):
        table_data(SMALL, ("maj_frist",))


def test_two_values_for_one_place_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="Q_1 GSM8K GTPO has two values of pass@8 on AIME 2024; leave one out"):
        table_data([score("GTPO", 0.1), score("GTPO", 0.2)])


NASTY = r'a|b <i>&"x"</i> \x{y}_z* [u](v) 50% $1 #2 ~^'


@pytest.fixture
def nasty() -> TableData:
    """A table in which every text is full of what some format reads as its own."""
    return table_data(
        [
            score("GTPO", 0.5, NASTY, model=NASTY, training=NASTY, note=NASTY),
            score(NASTY, 0.25, NASTY, model=NASTY, training=NASTY),
        ],
        caption=NASTY,
    )


class Page(HTMLParser):
    """Collects cells, and checks that what opens closes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.cells[-1] += data


def test_html_escapes_every_text_and_says_what_each_heading_is_for(nasty: TableData) -> None:
    found = Page()
    found.feed(page(nasty))
    assert found.open == []
    assert not any(tag == "i" for tag, _ in found.tags)
    assert [cell for cell in found.cells if NASTY in cell][:2] == [NASTY, NASTY]
    assert all("scope" in attributes for tag, attributes in found.tags if tag == "th")
    assert [a["colspan"] for _, a in found.tags if a.get("scope") == "colgroup"] == ["1"]


def test_markdown_escapes_what_would_break_a_row_or_become_markup(nasty: TableData) -> None:
    lines = [line for line in markdown(nasty).splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {len(nasty.columns) + 1}
    assert r"a\|b \<i>&" in lines[2] and r"\_z\* [u\](v)" in lines[2]


def test_csv_gives_every_text_back(nasty: TableData) -> None:
    header, *rows = csv.reader(io.StringIO(wide_csv(nasty)))
    assert header[4] == f"{NASTY} pass@8"
    assert rows[0][:2] == [NASTY, NASTY]


def test_latex_escapes_every_text_and_its_structure_is_balanced(nasty: TableData) -> None:
    text = latex(nasty)
    assert r"a|b \textless{}i\textgreater{}\&''x''\textless{}/i\textgreater{}" in text
    assert r"\textbackslash{}x\{y\}\_z{*} {[}u{]}(v) 50\% \$1 \#2 \textasciitilde{}\textasciicircum{}" in text
    plain = re.sub(r"\\[{}%&$#_]", "", text)
    assert plain.count("{") == plain.count("}")
    depth = 0
    for brace in re.findall("[{}]", plain):
        depth += 1 if brace == "{" else -1
        assert depth >= 0
    environments = re.findall(r"\\(begin|end)\{(\w+)\}", plain)
    opened: list[str] = []
    for kind, name in environments:
        if kind == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert opened == [] and len(environments) == 6
    body = plain.split(r"\toprule")[1].split(r"\bottomrule")[0]
    lines = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert {line.count("&") for line in lines} == {len(nasty.columns) - 1}
    assert all("$" not in line for line in lines)
    assert not re.search(r"\\\\\s*[\[*]", body)


def test_latex_writes_greek_and_dashes_as_commands() -> None:
    text = latex(table_data([score("GRPO (β ≤ 0.04)", 0.5)]))
    assert r"GRPO ($\beta$ $\leq$ 0.04)" in text
    assert text.isascii()


def test_headings_over_several_columns_span_them() -> None:
    data = table_data([score("GTPO", 0.5, d, k) for d in ("AIME 2024", "AMC 2023") for k in (1, 8, 16)])
    assert r"&  &  &  & \multicolumn{3}{c}{AIME 2024} & \multicolumn{3}{c}{AMC 2023} \\" in latex(data)
    assert r"\cmidrule(lr){5-7} \cmidrule(lr){8-10}" in latex(data)
    assert '<th scope="colgroup" colspan="3">AMC 2023</th>' in page(data)


@pytest.fixture
def scores_file(tmp_path: Path) -> Path:
    write_scores_csv(tmp_path / "scores.csv", SMALL)
    return tmp_path / "scores.csv"


def test_the_command_prints_markdown(command: Command, scores_file: Path) -> None:
    outcome = command("table", scores_file)
    assert (outcome.code, outcome.out) == (0, MARKDOWN)


@pytest.mark.parametrize(
    ("ending", "beginning"), [("md", "pass@k"), ("tex", "% "), ("html", "<!DOCTYPE"), ("csv", "model,")]
)
def test_the_command_takes_the_format_from_the_files_ending(
    command: Command, scores_file: Path, tmp_path: Path, ending: str, beginning: str
) -> None:
    outcome = command("table", scores_file, "-o", tmp_path / f"table.{ending}")
    assert (outcome.code, outcome.out) == (0, "")
    assert (tmp_path / f"table.{ending}").read_text(encoding="utf-8").startswith(beginning)


def test_the_commands_csv_is_read_back_with_the_chosen_metrics_alone(
    command: Command, scores_file: Path, tmp_path: Path
) -> None:
    assert command("table", scores_file, "--metric", "maj", "-o", tmp_path / "maj.csv").code == 0
    assert read_scores_csv(tmp_path / "maj.csv") == [SMALL[2]]


def test_the_command_lays_evaluations_beside_a_file_of_scores(
    command: Command, scores_file: Path, tmp_path: Path
) -> None:
    found = {
        "problems": 1,
        "scores": [{"metric": "pass", "k": 8, "value": 0.1, "low": None, "high": None, "interval": ""}],
    }
    names = {"label": "Q_1", "model": "Q_1", "training": "", "method": "", "seed": None, "checkpoint": ""}
    (tmp_path / "eval").mkdir()
    results = {"subjects": [{**names, "data": {"AIME 2024": found}}]}
    (tmp_path / "eval" / "results.json").write_text(json.dumps(results), encoding="utf-8")
    outcome = command("table", tmp_path / "eval", scores_file)
    assert outcome.code == 0
    assert r"| Q\_1 | – | – | here | 1 | 10.0 n/a | – |" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--metric", "pas"], "metric: there is no 'pas'; did you mean 'pass'?"),
        (["--format", "tex"], "format: there is no 'tex'; did you mean 'latex'?"),
        (["-o", "no/such/folder/table.md"], "no/such/folder/table.md: cannot be written (No such file or directory)"),
        (["nothing-here"], "nothing-here/results.json: cannot be read"),
    ],
)
def test_the_command_refuses_in_one_sentence(
    command: Command, scores_file: Path, arguments: list[str], sentence: str
) -> None:
    outcome = command("table", scores_file, *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"trimtab: {sentence}") and outcome.err.count("\n") == 1
