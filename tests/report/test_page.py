import json
import os
import re

import pytest
import vl_convert

from trimtab.errors import InputError
from trimtab.report.charts import DARK_PALETTE, PALETTE, Mark, chart_libraries, curve_chart, save_chart
from trimtab.report.page import Cell, Section, Tab, Table, write_page

SERIES = [
    ("GTPO", 0, [0, 1, 2], [0.5, 0.6, 0.7]),
    ("GTPO", 1, [0, 1, 2], [0.7, 0.8, None]),
    ("GRPO", 0, [0, 1, 2], [0.4, float("nan"), 0.5]),
]


def accuracy_chart(series=SERIES, **options):
    return curve_chart(series, title="Accuracy", x_title="step", y_title="sampled accuracy", **options)


def write(path, *sections, title="Report", intro="What was measured."):
    write_page(path, title=title, intro=intro, tabs=[Tab("All", sections)])
    return path.read_text(encoding="utf-8")


def body_of(page):
    # The chart library in the head holds the tag in a string, never on a line of its own.
    return page.split("\n<body>\n")[1]


def points_of(chart):
    return {(point["label"], point["x"]): point for point in chart.to_dict()["data"]["values"]}


def specifications(page):
    return [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page)]


def test_a_page_with_charts_loads_nothing_from_anywhere(tmp_path):
    page = write(tmp_path / "report.html", Section("Curves", charts=[accuracy_chart()]))

    assert re.findall(r"<script[^>]+src", page) == []
    assert re.findall(r"<(?:img|iframe|object|embed|source)\b", body_of(page)) == []
    assert re.findall(r"<link[^>]+href=\"([^\"]*)\"", page) == ["data:,"]
    style = "".join(re.findall(r"<style>(.*?)</style>", page, re.DOTALL))
    assert "url(" not in style and "@import" not in style
    # The specifications name no host either, not even as the address of their schema.
    assert "://" not in body_of(page)


def test_text_from_a_run_is_escaped_everywhere(tmp_path):
    nasty = "<img src=x onerror=alert(1)> & \"quoted\" 'too'"
    page = write(
        tmp_path / "report.html",
        Section(nasty, [nasty], Table([nasty], [[nasty]], caption=nasty)),
        title=nasty,
        intro=nasty,
    )

    assert "<img" not in page
    assert page.count("&lt;img src=x onerror=alert(1)&gt; &amp; ") == 9


def test_a_label_cannot_end_the_script_that_draws_it(tmp_path):
    label = "</script><script>alert(1)</script><!--"
    page = write(tmp_path / "report.html", Section("Curves", charts=[accuracy_chart([(label, 0, [0], [1.0])])]))

    drawing = body_of(page)
    # The specification, and the script that draws it.
    assert drawing.count("<script") == drawing.count("</script>") == 2
    assert "<!--" not in drawing
    assert specifications(drawing)[0]["data"]["values"][0]["label"] == label


def test_table_numbers_stand_in_the_page_and_flush_right(tmp_path):
    table = Table(
        ["method", "pass@1", "time", "note"],
        [["GTPO", "0.512 ± 0.011", "3 min 2 s", "final"], ["7 of 9 runs", "n/a", "58 s", "12 steps fewer"]],
    )
    page = write(tmp_path / "report.html", Section("Results", table=table))

    assert re.findall(r"<th scope=\"col\"( class=\"number\")?>", page) == ["", ' class="number"', ' class="number"', ""]
    for cell in ("0.512 ± 0.011", "n/a", "3 min 2 s", "58 s"):
        assert f'<td class="number">{cell}</td>' in page
    assert "<td>final</td>" in page
    assert '<th scope="row">7 of 9 runs</th>' in page


def test_a_row_with_too_few_cells_is_refused_and_named():
    with pytest.raises(ValueError, match="table row 2 has 1 cells for 2 columns"):
        Table(["a", "b"], [["1", "2"], ["3"]])


def test_a_new_page_replaces_the_old_one_in_one_step(tmp_path, monkeypatch):
    path = tmp_path / "new folder" / "report.html"
    write(path, Section("First"))
    moves = []

    def replace(source, target):
        assert "First" in path.read_text(encoding="utf-8")
        moves.append((source.parent, target))
        os.rename(source, target)

    monkeypatch.setattr("pathlib.Path.replace", replace)
    page = write(path, Section("Second"))

    assert moves == [(path.parent, path)]
    assert "Second" in page and "First" not in page
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]


def test_a_failed_write_keeps_the_old_page_and_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    write(path, Section("First"))

    def fail(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(InputError, match=r"report\.html.*No space left on device"):
        write(path, Section("Second"))

    assert "First" in path.read_text(encoding="utf-8")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("name", ["", "file/report.html"])
def test_a_path_that_cannot_hold_a_page_is_an_input_error_naming_it(tmp_path, name):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InputError, match=re.escape(str(tmp_path / name))):
        write(tmp_path / name)


def test_the_chart_library_is_embedded_unchanged_and_once_for_all_charts(tmp_path):
    page = write(
        tmp_path / "report.html",
        Section("One", charts=[accuracy_chart()]),
        Section("Two", charts=[accuracy_chart(), accuracy_chart()]),
    )

    # Byte for byte: an escape in the wrong place of this much JavaScript breaks every chart of the page.
    assert page.count(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")) == 1
    assert chart_libraries() in page
    assert len(specifications(page)) == 3


def test_a_page_without_charts_carries_no_script(tmp_path):
    page = write(tmp_path / "report.html", Section("Words", ["Only words."]))
    assert "<script" not in page and len(page) < 10_000


def test_a_curve_is_the_mean_over_seeds_inside_the_lowest_and_highest():
    points = points_of(accuracy_chart())

    names = ("mean", "low", "high", "seeds")
    assert [points["GTPO", 0][name] for name in names] == pytest.approx([0.6, 0.5, 0.7, 2])
    # Where one seed has no value, the others speak, and where none has one there is no point.
    assert [points["GTPO", 2][name] for name in names] == [0.7, 0.7, 0.7, 1]
    assert sorted(x for label, x in points if label == "GRPO") == [0, 2]


def test_a_run_without_values_keeps_the_colours_of_the_others():
    chart = accuracy_chart([("silent", 0, [0], [None]), *SERIES]).to_dict()

    assert chart["layer"][1]["encoding"]["color"]["scale"] == {"domain": ["silent", "GTPO", "GRPO"]}
    assert chart["config"]["range"]["category"] == list(PALETTE)


def test_a_label_has_the_same_colour_in_every_chart_of_a_page():
    chart = accuracy_chart([SERIES[2]], labels=["GTPO", "GRPO"]).to_dict()
    assert chart["layer"][1]["encoding"]["color"]["scale"]["domain"] == ["GTPO", "GRPO"]


def test_in_a_page_the_colours_are_variables_that_both_schemes_define(tmp_path):
    page = write(tmp_path / "report.html", Section("Curves", charts=[accuracy_chart()]))
    (specification,) = specifications(page)

    assert specification["background"] == "transparent"
    assert not re.search(r"#[0-9a-fA-F]{3}", json.dumps(specification))
    for number, (light, dark) in enumerate(zip(PALETTE, DARK_PALETTE, strict=True), start=1):
        assert f"var(--series-{number})" in specification["config"]["range"]["category"]
        assert f"--series-{number}: {light};" in page and f"--series-{number}: {dark};" in page


def test_a_mark_is_a_line_at_its_step_in_the_colour_of_its_run():
    chart = accuracy_chart(marks=[Mark("GRPO", 1, "entropy rose")]).to_dict()
    rule, flag = chart["layer"][3:]
    assert rule["data"]["values"] == [{"label": "GRPO", "x": 1, "text": "entropy rose"}]
    assert rule["encoding"]["color"]["field"] == flag["encoding"]["color"]["field"] == "label"


def test_a_cell_may_have_a_second_line_and_stand_out(tmp_path):
    table = Table(["method", "pass@8"], [["GTPO", Cell("53.3", "[49.0, 57.1]", strong=True)]])
    page = write(tmp_path / "report.html", Section("Results", table=table))
    assert '<td class="number"><strong>53.3</strong><small>[49.0, 57.1]</small></td>' in page


def test_lines_past_the_end_of_the_palette_are_dashed():
    labels = [f"run {number}" for number in range(len(PALETTE) + 2)]
    encoding = accuracy_chart([(label, 0, [0], [1.0]) for label in labels]).to_dict()["layer"][1]["encoding"]

    dashes = encoding["strokeDash"]["scale"]["range"]
    looks = {(place % len(PALETTE), *dash) for place, dash in enumerate(dashes)}
    assert len(looks) == len(labels)


def test_a_given_domain_fixes_the_y_axis():
    chart = accuracy_chart(domain=(0, 1)).to_dict()
    assert chart["layer"][1]["encoding"]["y"]["scale"]["domain"] == [0, 1]


def test_xs_and_ys_of_different_lengths_are_refused_and_the_run_is_named():
    with pytest.raises(ValueError, match="'GTPO', seed 3: 2 x values but 1 y values"):
        accuracy_chart([("GTPO", 3, [0, 1], [0.5])])


def test_the_same_seed_twice_under_one_label_is_refused():
    with pytest.raises(ValueError, match="'GTPO' has seed 0 twice"):
        accuracy_chart([SERIES[0], SERIES[0]])


def test_a_curve_of_one_point_is_drawn_as_a_dot(tmp_path):
    def marks(xs, ys):
        save_chart(accuracy_chart([("GTPO", 0, xs, ys)]), tmp_path / "accuracy.svg")
        symbols = re.findall(r'aria-roledescription="point".*?/>', (tmp_path / "accuracy.svg").read_text("utf-8"))
        return sum('opacity="0"' not in symbol for symbol in symbols)

    assert marks([3], [0.5]) == 1
    assert marks([3, 4], [0.5, 0.6]) == 0


def test_a_chart_without_curves_is_refused():
    with pytest.raises(ValueError, match="'Accuracy' has no curve"):
        accuracy_chart([])


def test_a_chart_is_saved_as_a_picture(tmp_path):
    save_chart(accuracy_chart(), tmp_path / "accuracy.svg")
    save_chart(accuracy_chart(), tmp_path / "accuracy.png")

    svg = (tmp_path / "accuracy.svg").read_text(encoding="utf-8")
    assert svg.startswith("<svg") and "sampled accuracy" in svg
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_an_unknown_kind_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"accuracy\.pdf: a chart is saved as \.svg or \.png"):
        save_chart(accuracy_chart(), tmp_path / "accuracy.pdf")
