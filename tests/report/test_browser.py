"""The report in a real browser, as a reader has it: from disk, offline, light and dark, wide and narrow."""

from pathlib import Path
from typing import Any

import pytest
from browser import opened

# Lowest contrast (WCAG 2) of the visible texts of the page, HTML and SVG, against the background that they stand on.
CONTRAST = """() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = (rgb) => rgb.slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = channels(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  let worst = [99, ""], seen = 0;
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, style = getComputedStyle(element);
    if (!walker.currentNode.data.trim() || style.visibility === "hidden" || !element.getClientRects().length) continue;
    const ink = channels(element.closest("svg") ? style.fill : style.color);
    const pair = [luminance(ink), luminance(ground(element))].sort((a, b) => b - a);
    const contrast = (pair[0] + 0.05) / (pair[1] + 0.05);
    seen += 1;
    if (contrast < worst[0]) worst = [contrast, walker.currentNode.data];
  }
  return [...worst, seen];
}"""


def drawn(page: Any, plots: int) -> None:
    """Wait until every chart is there."""
    page.wait_for_function(f"document.querySelectorAll('.plot svg').length === {plots}", timeout=20_000)


def plots(page: Any) -> int:
    return int(page.evaluate("document.querySelectorAll('.plot').length"))


def bars(page: Any) -> list[str]:
    """The texts beside the bars."""
    return page.evaluate(
        "[...document.querySelectorAll('#bars .mark-text.role-mark text')].map((text) => text.textContent)"
    )


def test_charts_are_drawn_tabs_work_without_a_mouse_and_nothing_is_asked_from_the_network(
    browser: Any, report: Path
) -> None:
    with opened(browser, report) as open_page:
        page = open_page.page
        drawn(page, plots(page))
        # Accuracy in two arms: a line each; the arm of two seeds has a band; the finding is marked on the entropy.
        count = (
            "(title) => [...document.querySelectorAll('figure')].find((f) => f.textContent.trim().startsWith(title))"
        )
        lines = page.evaluate(f"({count})('Held-out accuracy').querySelectorAll('.mark-line path').length")
        marks = page.evaluate(f"({count})('Entropy').querySelectorAll('.mark-rule.role-mark line').length")
        assert (lines, marks) == (2, 1)

        tab = page.locator('[role="tab"]')
        names = tab.all_inner_texts()
        assert names == ["Overview", "Evaluation", "Curves", "Groups", "Cost"]
        visible = page.locator('[role="tabpanel"]:visible')
        assert visible.count() == 1 and visible.get_attribute("id") == "overview"
        page.keyboard.press("Tab")
        for name in [*names[1:], names[0]]:
            page.keyboard.press("ArrowRight")
            assert page.evaluate("document.activeElement.textContent") == name
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
            assert visible.count() == 1 and visible.get_attribute("id") == name.lower()
        page.keyboard.press("End")
        assert visible.get_attribute("id") == "cost"
        assert (open_page.requests, open_page.errors) == ([], [])


def test_the_bars_follow_the_choice_of_model_data_metric_and_published_numbers(browser: Any, report: Path) -> None:
    with opened(browser, report) as open_page:
        page = open_page.page
        page.click("#tab-evaluation")
        page.wait_for_selector("#differences .mark-symbol.role-mark path")
        assert bars(page) == ["20.0", "30.0", "40.0"]
        assert page.locator("#differences-title").inner_text().startswith("GTPO on GSM8K minus the others")

        # By keyboard alone: the next data set.
        page.focus("#choose-data")
        page.keyboard.press("ArrowDown")
        page.wait_for_function("document.querySelector('#bars').textContent.includes('60.0')")
        assert bars(page) == ["40.0", "50.0", "60.0"]
        page.select_option("#choose-data", "AIME 2024")
        page.select_option("#choose-metric", "pass@4")
        page.select_option("#choose-focus", "GRPO on GSM8K")
        page.wait_for_function("document.querySelector('#bars').textContent.includes('44.0')")
        row = page.locator("#explorer-rows tr", has_text="no training").inner_text()
        assert "24.0" in row and "[19.0, 29.0]" in row and "+10.0" in row and "[+2.9, +17.1]" in row

        published = page.locator("tr.published:visible")
        assert published.count() == 0
        page.check("#show-published")
        page.wait_for_function("document.querySelector('#bars').textContent.includes('61.0')")
        assert published.count() == 1 and "61.0" in published.inner_text()
        assert bars(page) == ["24.0", "34.0", "44.0", "61.0"]

        page.select_option("#choose-model", "large")
        page.wait_for_function("document.querySelector('#differences-figure').hidden")
        assert (open_page.requests, open_page.errors) == ([], [])


@pytest.mark.parametrize(("width", "dark"), [(390, True), (390, False), (1280, True)])
def test_the_page_is_readable_at_every_width_and_in_both_schemes(
    browser: Any, report: Path, width: int, dark: bool
) -> None:
    with opened(browser, report, width=width, dark=dark) as open_page:
        page = open_page.page
        drawn(page, plots(page))
        for name in ("overview", "evaluation", "curves", "cost"):
            page.click(f"#tab-{name}")
            contrast, text, seen = page.evaluate(CONTRAST)
            assert seen > 20 and contrast >= 4.5, f"{name}: {text!r} has a contrast of {contrast:.2f}"
            assert open_page.overflow() <= 0, name
        page.click("#tab-evaluation")
        box = page.locator(".table:has(th:text('maj@16'))").first
        if width == 390:
            # The table scrolls in its box, and the names of its rows stay.
            box.evaluate("box => { box.scrollLeft = 200; }")
            assert box.evaluate("box => box.scrollLeft") > 0
            assert box.locator("tbody th").first.bounding_box()["x"] == box.bounding_box()["x"]
        assert open_page.errors == []
