"""Every control of the report page, in a browser (see conftest.py), tested by its effect."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlas import formatting
from fedlas.evaluation import evaluate
from fedlas.evaluation_report import Report
from fedlas.metrics.result import Interval, Result
from fedlas.predictions import Predictions, TopLabelPredictions
from fedlas.report.html import save_page
from fedlas.report.model import Model
from report import pages
from report.pages import NARROW, WIDE

pytestmark = pytest.mark.campaign


@pytest.fixture(scope="session")
def thousand_class_page(folder: Path) -> Path:
    return save_page(pages.thousand_class_model(), folder / "thousand-classes.html")


@pytest.fixture(scope="session")
def hostile_page(folder: Path) -> Path:
    models, options = pages.hostile_models()
    return save_page(models, folder / "hostile.html", **options)


@pytest.mark.parametrize("width", [NARROW, WIDE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["three_model_page", "thousand_class_page", "hostile_page"])
def test_page_has_no_horizontal_overflow(open_tab, request, name, width, scheme):
    tab = open_tab(request.getfixturevalue(name), width, scheme)
    assert tab.overflow() == 0
    tab.open_all()
    tab.page.wait_for_timeout(50)
    assert tab.overflow() == 0
    overflowing = tab.page.evaluate("""() => [...document.querySelectorAll("body *")].filter((element) => {
        if (element.closest('.scroll, svg, .hidden, .patterns') || element.closest('[hidden]')) return false;
        return element.getBoundingClientRect().right > document.documentElement.clientWidth + 1;
    }).map((element) => element.outerHTML.slice(0, 120))""")
    assert overflowing == []


def test_colours_follow_system_scheme_and_theme_switch(open_tab, three_model_page):
    for scheme in ("light", "dark"):
        tab = open_tab(three_model_page, scheme=scheme)
        background = "getComputedStyle(document.body).backgroundColor"
        system = tab.page.evaluate(background)
        tab.page.select_option("#theme", "dark")
        dark = tab.page.evaluate(background)
        tab.page.select_option("#theme", "light")
        light = tab.page.evaluate(background)
        assert dark != light
        assert system == {"light": light, "dark": dark}[scheme]
        tab.page.select_option("#theme", "auto")
        assert tab.page.evaluate(background) == system
        tab.page.select_option("#theme", "dark")
        tab.page.emulate_media(media="print")
        assert tab.page.evaluate(background) == light


def test_reliability_diagrams_switch_the_binning(open_tab, three_model_page):
    tab = open_tab(three_model_page)
    figure = "#reliability-diagrams figure:first-child"
    assert "ECE" in tab.text(f"{figure} figcaption")
    non_empty_bins = tab.count("#reliability-diagrams > div:first-child .stop")
    tab.page.check("#bins input[value=mass]")
    assert "AECE" in tab.text(f"{figure} figcaption")
    assert tab.count("#reliability-diagrams > div:first-child .stop") == 15 != non_empty_bins
    tab.page.check("#bins input[value=smooth]")
    assert "smooth ECE" in tab.text(f"{figure} figcaption")
    assert tab.count(f"{figure} svg[role=group] .line") >= 1
    assert tab.count(f"{figure} svg[role=group] .bar") == 0
    tab.page.check("#bins input[value=width]")
    assert tab.count("#reliability-diagrams > div:first-child .stop") == non_empty_bins


def test_empty_bins_are_not_drawn(open_tab, three_model_page):
    tab = open_tab(three_model_page)
    rows = tab.data()["models"][0]["states"][0]["diagrams"]["width"]["bins"]
    diagram = "#reliability-diagrams > div:first-child svg[role=group]"
    assert tab.count(f"{diagram} .stop") == len(rows) < 15
    assert tab.count(f"{diagram} .bar") == tab.count(f"{diagram} .whisker") == len(rows)
    assert tab.count(f"{diagram} .density") == len(rows)


def test_uncalibrated_and_calibrated_diagrams_are_side_by_side(open_tab, three_model_page):
    tab = open_tab(three_model_page)
    captions = "#reliability-diagrams figcaption"
    assert [caption.inner_text().split("\n")[0] for caption in tab.page.locator(captions).all()] == [
        "Uncalibrated",
        "After temperature",
    ]
    tab.page.uncheck("#beside")
    assert tab.count(captions) == 1
    assert tab.text(captions).startswith("After temperature")
    tab.page.locator("#reliability-states input[type=radio]").nth(2).check()
    assert tab.text(captions).startswith("After isotonic")
    tab.page.check("#beside")
    assert tab.count(captions) == 2
    tab.page.locator("#reliability-states input[type=radio]").nth(0).check()
    assert tab.count(captions) == 1
    assert tab.text(captions).startswith("Uncalibrated")


def test_hover_and_keyboard_show_count_accuracy_and_confidence(open_tab, three_model_page):
    tab = open_tab(three_model_page)
    row = tab.data()["models"][0]["states"][0]["diagrams"]["width"]["bins"][3]
    drawing = "#reliability-diagrams > div:first-child .drawing"
    assert not tab.page.locator(f"{drawing} .tip").is_visible()
    tab.page.locator(f"{drawing} .stop").nth(3).hover()
    tooltip = tab.text(f"{drawing} .tip")
    assert f"{row[2]} samples" in tooltip
    percentages = [float(number) for number in re.findall(r"([\d.]+)\s%", tooltip)]
    assert percentages[0] == pytest.approx(100 * row[3], abs=0.051)  # mean confidence
    accuracy = f"accuracy {formatting.percent(*row[4:7])} ({formatting.interval(*row[5:7])})"
    assert accuracy in tooltip.replace("\u00a0", " ")
    tab.page.mouse.move(2, 2)
    assert not tab.page.locator(f"{drawing} .tip").is_visible()
    tab.page.locator(f"{drawing} .stop").first.focus()
    assert tab.page.locator(f"{drawing} .tip").is_visible()
    for _ in range(3):
        tab.page.keyboard.press("ArrowRight")
    assert tab.text(f"{drawing} .tip") == tooltip
    focused = "document.activeElement.getAttribute('aria-label')"
    assert f"{row[2]} samples" in tab.page.evaluate(focused)
    tab.page.keyboard.press("End")
    last_label = tab.page.evaluate(focused)
    tab.page.keyboard.press("ArrowRight")
    assert tab.page.evaluate(focused) == last_label
    tab.page.keyboard.press("Home")
    tab.page.keyboard.press("ArrowLeft")
    assert tab.page.evaluate(focused) == tab.page.locator(f"{drawing} .stop").first.get_attribute("aria-label")
    tab.page.keyboard.press("Escape")
    assert not tab.page.locator(f"{drawing} .tip").is_visible()


def test_figure_is_one_tab_stop_with_visible_focus(open_tab, three_model_page):
    tab = open_tab(three_model_page)
    for drawing in tab.page.locator("svg[role=group]").all():
        assert drawing.locator(".stop[tabindex='0']").count() == 1
        assert drawing.get_attribute("aria-label")
    tab.page.locator("#beside").focus()
    tab.page.keyboard.press("Tab")
    outline = tab.page.evaluate("getComputedStyle(document.activeElement.querySelector('.hit')).strokeWidth")
    assert outline == "3px"
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.tagName") == "SUMMARY"
    assert tab.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_tapping_a_bar_shows_its_tooltip(open_tab, three_model_page):
    tab = open_tab(three_model_page, NARROW, has_touch=True, is_mobile=True)
    tab.page.locator("#reliability-diagrams .stop").nth(2).tap()
    assert "samples" in tab.text("#reliability-diagrams .tip")
    assert tab.overflow() == 0


def test_every_figure_has_a_data_table(open_tab, three_model_page):
    tab = open_tab(three_model_page)
    figures = tab.page.locator("figure")
    assert figures.count() >= 12
    for figure in figures.all():
        assert figure.locator(".as-table").count() == 1
        assert figure.locator("tbody tr").count() == 0
        figure.locator(".as-table summary").click()
        figure.locator("tbody tr").first.wait_for(state="visible")
        figure.locator(".as-table summary").click()
        assert not figure.locator("table").is_visible()
    rows = tab.data()["models"][0]["states"][0]["diagrams"]["width"]["bins"]
    assert tab.count("#reliability-diagrams > div:first-child tbody tr") == len(rows)


def test_confidence_histogram_follows_state_and_scale(open_tab, three_model_page):
    tab = open_tab(three_model_page)

    def heights() -> list[str]:
        return tab.page.locator("#confidence-histogram svg[role=group] .correct").evaluate_all(
            "all => all.map((element) => element.getAttribute('height'))"
        )

    bar_heights = [heights()]
    for scale in ("count", "log", "fraction"):
        tab.page.check(f"#confidence-scale input[value={scale}]")
        bar_heights.append(heights())
    assert bar_heights[0] == bar_heights[3]
    assert bar_heights[0] != bar_heights[1] != bar_heights[2]
    tab.page.locator("#confidence-states input").nth(1).check()
    assert heights() != bar_heights[0]
    assert "After temperature" in tab.text("#confidence-histogram figcaption")
    tab.page.locator("#confidence-histogram .stop").last.hover()
    assert re.search(r"\d+ .*\n\d+ ", tab.text("#confidence-histogram .tip"))


def test_the_class_table_is_sorted_by_every_column(open_tab, three_model_page):
    tab = open_tab(three_model_page)

    def column(position: int) -> list[str]:
        return tab.page.locator(f"#class-table tbody tr > :nth-child({position})").all_inner_texts()

    def numbers(position: int) -> list[float]:
        return [float(re.sub(r"[^\d.\-]", "", cell.replace("−", "-"))) for cell in column(position)]

    header_buttons = tab.page.locator("#class-table thead button")
    assert tab.page.locator("#class-table th[aria-sort]").get_attribute("data-key") == "weight"
    sizes = [abs(value) for value in numbers(8)]
    assert sizes == sorted(sizes, reverse=True)
    header_buttons.nth(0).click()
    assert column(1) == sorted(pages.CIFAR10)
    header_buttons.nth(0).click()
    assert column(1) == sorted(pages.CIFAR10, reverse=True)
    for position in (2, 3, 4, 5, 6, 7, 9):
        header_buttons.nth(position - 1).click()
        assert numbers(position) == sorted(numbers(position), reverse=True)
        assert tab.page.locator("#class-table th[aria-sort]").get_attribute("aria-sort") == "descending"
        header_buttons.nth(position - 1).click()
        assert numbers(position) == sorted(numbers(position))
        assert tab.page.locator("#class-table th[aria-sort]").count() == 1


def test_class_table_is_searched_and_paged(open_tab, thousand_class_page):
    tab = open_tab(thousand_class_page)
    assert tab.count("#class-table tbody tr") == 20
    assert tab.text("#class-count").startswith("1,000 of 1,000 ")
    assert tab.text("#class-page") == "Page 1 of 50"
    assert tab.page.locator("#class-before").is_disabled()
    first = tab.text("#class-table tbody th")
    tab.page.click("#class-after")
    assert tab.text("#class-page") == "Page 2 of 50"
    assert tab.text("#class-table tbody th") != first
    tab.page.click("#class-before")
    assert tab.text("#class-table tbody th") == first
    tab.page.fill("#class-search", "KIND 77")
    assert tab.text("#class-count").startswith("11 of 1,000 ")  # 77 and 770 to 779
    assert all("kind 77" in name for name in tab.page.locator("#class-table tbody th").all_inner_texts())
    assert not tab.page.locator("#class-after").is_visible()
    tab.page.fill("#class-search", "nothing like it")
    assert tab.count("#class-table tbody tr") == 0
    tab.page.fill("#class-search", "")
    assert tab.count("#class-table tbody tr") == 20
    # A search or a sort of a thousand classes takes less than half a second.
    slowest = tab.page.evaluate("""() => {
        const search = document.getElementById("class-search");
        const times = [];
        for (const query of ["k", "kind 1", "things", ""]) {
            const start = performance.now();
            search.value = query;
            search.dispatchEvent(new Event("input"));
            document.body.getBoundingClientRect();
            times.push(performance.now() - start);
        }
        for (const head of document.querySelectorAll("#class-table thead button")) {
            const start = performance.now();
            head.click();
            document.body.getBoundingClientRect();
            times.push(performance.now() - start);
        }
        return Math.max(...times);
    }""")
    assert slowest < 500


def test_selecting_a_class_shows_its_diagram(open_tab, three_model_page):
    tab = open_tab(three_model_page)
    tab.page.locator("#class-table tbody tr").nth(4).locator("td").first.click()
    name = tab.page.locator("#class-table tbody tr").nth(4).locator("th").inner_text()
    assert tab.text("#class-chosen") == name
    assert tab.page.locator("#class-table tr.chosen th").inner_text() == name
    predicted_count = tab.page.locator("#class-table tbody tr").nth(4).locator("td").nth(1).inner_text()
    assert f"{predicted_count} samples" in tab.text("#class-diagram figcaption")
    before, caption = tab.page.inner_html("#class-diagram .drawing"), tab.text("#class-diagram figcaption")
    tab.page.check("#class-kind input[value=of_probability]")
    assert tab.page.inner_html("#class-diagram .drawing") != before
    assert tab.text("#class-diagram figcaption") != caption
    tab.page.locator("#class-table tbody th button").nth(2).focus()
    tab.page.keyboard.press("Enter")
    assert tab.text("#class-chosen") == tab.page.locator("#class-table tbody tr").nth(2).locator("th").inner_text()
    probability = tab.page.inner_html("#class-diagram .drawing")
    tab.page.check("#class-kind input[value=of_predictions]")
    assert tab.page.inner_html("#class-diagram .drawing") != probability


def test_class_map_is_ordered_and_paged(open_tab, three_model_page, thousand_class_page):
    tab = open_tab(three_model_page)

    def rows() -> list[str]:
        return tab.page.locator("#map-figure text.row").all_text_contents()

    initial_rows = rows()
    assert len(initial_rows) == 10
    row_orders = {tuple(initial_rows)}
    for order in ("over", "under", "predicted", "number"):
        tab.page.select_option("#map-order", order)
        row_orders.add(tuple(rows()))
    assert rows() == list(pages.CIFAR10)
    assert len(row_orders) >= 3
    tab.page.select_option("#map-order", "weight")
    assert rows() == initial_rows
    assert not tab.page.locator("#map-after").is_visible()
    bins_by_class = tab.data()["models"][0]["class_table"]["of_predictions"]
    assert tab.count("#map-figure .stop") == sum(map(len, bins_by_class))
    tab.page.locator("#map-figure .stop").nth(3).hover()
    assert re.search(r"\d samples?", tab.text("#map-figure .tip"))
    tab.page.locator("#map-figure .stop").first.focus()
    tab.page.keyboard.press("ArrowDown")
    assert tab.page.evaluate("document.activeElement.getAttribute('aria-label')").startswith(f"{initial_rows[1]},")
    tab.page.keyboard.press("ArrowUp")
    assert tab.page.evaluate("document.activeElement.getAttribute('aria-label')").startswith(f"{initial_rows[0]},")
    large_tab = open_tab(thousand_class_page)
    first_page = large_tab.page.inner_html("#map-figure")
    assert re.search(r" 1 .* 25 ", large_tab.text("#map-page"))
    large_tab.page.click("#map-after")
    assert re.search(r" 26 .* 50 ", large_tab.text("#map-page"))
    assert large_tab.page.inner_html("#map-figure") != first_page
    large_tab.page.click("#map-before")
    assert large_tab.page.inner_html("#map-figure") == first_page


def test_risk_curves_can_be_hidden(open_tab, three_model_page):
    tab = open_tab(three_model_page)
    curves = "#risk-figure svg[role=group] path.line"
    checkboxes = tab.page.locator("#risk-lines input")
    assert checkboxes.count() == tab.count(curves) == 5  # three states of the first model, two other models
    for index in range(5):
        checkboxes.nth(index).uncheck()
    assert tab.count(curves) == 0
    checkboxes.nth(3).check()
    assert tab.count(curves) == 1
    tab.page.locator("#risk-figure .stop").nth(6).hover()
    assert "unsure" in tab.text("#risk-figure .tip")  # the name of the model


def test_ood_detection_changes_with_set_and_score(open_tab, three_model_page):
    tab = open_tab(three_model_page)
    roc, numbers = "#ood-roc svg[role=group] .line-0", "#ood-numbers"
    contents = {(tab.page.locator(roc).first.get_attribute("d"), tab.text(numbers))}
    assert re.search("AUROC .*AUPR .*AUPR .*FPR .*95", tab.text(numbers))
    score_count = tab.count("#ood-score option")
    assert score_count >= 5
    for index in range(1, score_count):
        tab.page.select_option("#ood-score", str(index))
        contents.add((tab.page.locator(roc).first.get_attribute("d"), tab.text(numbers)))
    tab.page.select_option("#ood-set", "1")
    contents.add((tab.page.locator(roc).first.get_attribute("d"), tab.text(numbers)))
    assert len(contents) == score_count + 1
    assert "noise" in tab.text("#ood-roc figcaption")
    assert tab.count("#ood-table tbody tr") == 2 * score_count
    tab.page.locator("#ood-table summary").click()
    assert tab.page.locator("#ood-table table").is_visible()
    for figure in ("#ood-histogram", "#ood-roc"):
        tab.page.locator(f"{figure} .stop").nth(4).hover()
        assert tab.text(f"{figure} .tip").count("%") >= 2


def test_norms_gate_and_alpha_are_drawn(open_tab, three_model_page):
    tab = open_tab(three_model_page)
    for figure in (
        "norm-histogram",
        "norm-groups",
        "training-curves",
        "training-gate",
        "training-ratio",
        "training-alpha",
    ):
        assert tab.count(f"#{figure} svg[role=group] .line") >= 1, figure
        tab.page.locator(f"#{figure} .stop").nth(2).hover()
        assert tab.text(f"#{figure} .tip")
    assert "β = 4" in tab.text("#training-alpha figcaption")
    tab.page.locator("#training-gate .stop").first.focus()
    assert "+1 52.0" in tab.text("#training-gate .tip")


def test_samples_are_shown_with_images(open_tab, three_model_page):
    tab = open_tab(three_model_page)
    assert tab.count("#sample-list li") == 12
    over_confident_samples = tab.text("#sample-list")
    assert tab.page.evaluate(
        "[...document.querySelectorAll('#sample-list img')].every((element) => element.naturalWidth === 8)"
    )
    assert all(image.get_attribute("alt") for image in tab.page.locator("#sample-list img").all())
    tab.page.check("#sample-kind input[value=under]")
    assert tab.text("#sample-list") != over_confident_samples
    tab.page.check("#sample-kind input[value=over]")
    assert tab.text("#sample-list") == over_confident_samples


def test_comparison_section_lists_all_tests(open_tab, three_model_page):
    tab = open_tab(three_model_page)
    assert tab.count("#comparison-tests tbody tr") == len(tab.data()["comparison"]["tests"]) >= 12
    assert re.search(r"\d", tab.text("#comparison-tests tbody"))
    assert tab.count("#comparison-diagrams figure") == 3


def test_navigation_is_folded_in_a_narrow_window(open_tab, three_model_page):
    tab = open_tab(three_model_page, NARROW)
    assert not tab.page.locator("nav a").first.is_visible()
    tab.page.click("nav summary")
    assert tab.page.locator("nav a").first.is_visible()
    tab.page.set_viewport_size({"width": WIDE, "height": 900})
    tab.page.wait_for_selector("#contents[open]", state="attached")
    assert not tab.page.locator("nav summary").is_visible()
    assert tab.page.locator("nav a").first.is_visible()


def test_navigation_links_reach_and_open_sections(open_tab, three_model_page):
    tab = open_tab(three_model_page)
    for link in tab.page.locator("nav a").all():
        link.click()
        assert tab.page.evaluate("location.hash") == link.get_attribute("href")
    tab.page.wait_for_selector("nav a[aria-current]", state="attached")
    for summary in tab.page.locator("#method summary, #summary summary").all():
        content = summary.locator("xpath=following-sibling::*[1]")
        assert not content.is_visible()
        summary.click()
        assert content.is_visible()
    tab.page.keyboard.press("Control+Home")
    tab.page.evaluate("document.activeElement.blur()")
    tab.page.keyboard.press("Tab")
    tab.page.evaluate("document.querySelector('.skip').focus()")
    tab.page.keyboard.press("Enter")
    assert tab.page.evaluate("document.activeElement.id") == "main"


TESTED_CONTROLS = (
    "#model", "#theme", "#bins", "#reliability-states", "#confidence-states", "#confidence-scale", "#class-search",
    "#class-table", "#class-before", "#class-after", "#class-kind", "#map-order", "#map-before", "#map-after",
    "#risk-lines", "#ood-set", "#ood-score", "#sample-kind", "#ood-table summary", ".as-table summary",
    "#method summary", "#summary summary", "#contents",
    ".downloads", "button.copy",  # test_page_downloads.py, test_page_recalibration.py
)  # fmt: skip


def test_every_control_has_a_test(open_tab, three_model_page):
    """A new control needs a test of its effect, and an entry in `TESTED_CONTROLS`."""
    tab = open_tab(three_model_page)
    untested = tab.page.evaluate(
        """(tested) => [...document.querySelectorAll("input, select, button, summary, textarea, [contenteditable]")]
            .filter((element) => !tested.some((selector) => element.closest(selector)))
            .map((element) => element.outerHTML)""",
        list(TESTED_CONTROLS),
    )
    assert untested == []


def test_untrusted_text_is_never_executed(open_tab, hostile_page):
    tab = open_tab(hostile_page, NARROW)
    assert tab.page.title() == pages.HOSTILE[0]
    for model in ("0", "1"):
        tab.page.select_option("#model", model)
        for kind in ("over", "under"):
            tab.page.check(f"#sample-kind input[value={kind}]")
        tab.open_all()
        for row in range(tab.count("#class-table tbody tr")):
            tab.page.locator("#class-table tbody tr").nth(row).hover()
            tab.page.locator("#class-table tbody tr").nth(row).locator("td").first.click()
        if tab.page.locator("#ood-set").is_visible():
            for index in range(3):
                tab.page.select_option("#ood-set", str(index))
    tab.page.locator("#map-figure .stop").first.hover()
    assert tab.page.evaluate("window.ran") is None
    assert tab.count("main img, main b, main script") == 0
    names = tab.page.evaluate(
        "[...document.querySelectorAll('#class-table tbody th bdi')].map((element) => element.textContent)"
    )
    assert pages.HOSTILE[0] in names
    assert pages.HOSTILE[6] in names
    assert max(map(len, names)) < 250
    assert tab.overflow() == 0
    tallest_row = tab.page.evaluate(
        "Math.max(...[...document.querySelectorAll('#class-table tr')].map((element) => element.offsetHeight))"
    )
    assert tallest_row < 120


def test_content_security_policy_blocks_injected_code(browser, hostile_page, tmp_path):
    """Even if a text got into the page as markup, it could not run, load or send anything."""
    text = hostile_page.read_text(encoding="utf-8")
    attack = '<script>window.ran = 1</script><img src="https://example.com/x.png"><p style="color:red" onclick="x()">'
    (tmp_path / "attack.html").write_text(text.replace('<main id="main"', attack + '<main id="main"'), encoding="utf-8")
    tab = pages.BrowserTab(browser, tmp_path / "attack.html")
    assert tab.page.evaluate("window.ran") is None
    assert tab.page.evaluate("fetch('https://example.com').then(() => 'sent', () => 'stopped')") == "stopped"
    tab.context.close()
    assert sum("Content Security Policy" in error for error in tab.errors) >= 4  # script, style, image, fetch
    # The request fails because of the policy ("csp"), not because there is no network.
    assert [error for error in tab.errors if error.startswith("failed")] == ["failed: https://example.com/x.png csp"]


def binary_predictions() -> Predictions:
    probs = torch.rand(300, generator=torch.Generator().manual_seed(0))
    return Predictions.from_probs(probs, (probs > 0.4).long())


def soft_label_predictions() -> Predictions:
    predictions = pages.sample_predictions(200, 3)
    return Predictions(predictions.logits, 0.8 * torch.nn.functional.one_hot(predictions.labels, 3).float() + 0.2 / 3)


def top_label_predictions() -> TopLabelPredictions:
    names = ["cat", "dog", "owl"]
    return TopLabelPredictions([0.9, 0.6, 0.8], labels=[0, 0, 2], prediction=[0, 1, 2], class_names=names)


def constant_predictions() -> Predictions:
    return Predictions.from_probs(torch.full((40, 2), 0.5), torch.arange(40) % 2)


def small_predictions() -> Predictions:
    return pages.sample_predictions(150, 3)


UNUSUAL_INPUTS: dict[str, Any] = {
    "one sample": lambda: Model(predictions=small_predictions()[:1], posthoc=()),
    "binary": lambda: Model(predictions=binary_predictions()),
    "soft labels": lambda: Model(predictions=soft_label_predictions()),
    "top only": lambda: Model(predictions=top_label_predictions(), posthoc=()),
    "all right": lambda: Model(predictions=small_predictions()[small_predictions().correct], posthoc=()),
    "all wrong": lambda: Model(predictions=small_predictions()[~small_predictions().correct], posthoc=()),
    "constant": lambda: Model(predictions=constant_predictions(), posthoc=()),
    "report only": lambda: Report.from_dict(
        evaluate(small_predictions(), posthoc="temperature", resamples=50).to_dict()
    ),
    "one epoch": lambda: Model(predictions=small_predictions(), posthoc=(), log=pages.training_log(1)),
    "no gate": lambda: Model(
        predictions=small_predictions(), posthoc=(), log=[record | {"gate": {}} for record in pages.training_log()]
    ),
    "OOD metrics without OOD samples": lambda: Model(
        predictions=small_predictions(),
        report=evaluate(small_predictions(), ood={"x": pages.ood_predictions(classes=3)}, intervals=False),
    ),
    "different samples": lambda: {
        "a": Model(predictions=small_predictions(), posthoc=()),
        "b": Model(predictions=small_predictions()[:99], posthoc=()),
        "c": evaluate(small_predictions(), intervals=False),
    },
}


@pytest.mark.parametrize("name", UNUSUAL_INPUTS)
def test_small_and_unusual_evaluations_give_pages(open_tab, tmp_path, name):
    tab = open_tab(save_page(UNUSUAL_INPUTS[name](), tmp_path / "odd.html", resamples=50), NARROW)
    models = tab.count("#model option")
    for model in range(max(1, models)):
        if models:
            tab.page.select_option("#model", str(model))
        for radio in tab.page.locator("main input[type=radio]:not([disabled])").all():
            if radio.is_visible():
                radio.check()
        tab.open_all()
        tab.page.wait_for_timeout(50)  # tables are filled when they are opened
        assert tab.overflow() == 0
        assert not re.search(r"NaN|Infinity|undefined|null|\[object", tab.page.inner_text("main"))
        broken = tab.page.evaluate("""() => [...document.querySelectorAll("svg *")]
            .filter((element) => [...element.attributes].some((a) => /NaN|Infinity|undefined/.test(a.value))).length""")
        assert broken == 0


def test_print_layout_is_light_complete_and_without_controls(open_tab, three_model_page):
    tab = open_tab(three_model_page, 720, "dark")
    tab.page.emulate_media(media="print")
    tab.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert tab.overflow() == 0
    assert not tab.page.locator("nav").is_visible()
    assert not tab.page.locator("#bins").is_visible()
    assert tab.page.locator("#method table").first.is_visible()
    assert tab.page.pdf(format="A4")[:4] == b"%PDF"


def test_numbers_are_shown_without_javascript(browser, three_model_page):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(three_model_page.as_uri())
    assert "-confident" in page.locator("#summary").inner_text()
    assert page.locator(".numbers tbody tr").count() == 6
    assert page.locator("noscript").inner_text()
    context.close()


@pytest.mark.parametrize("value", [0.96014996, 0.96125, 0.91875])
def test_page_and_terminal_round_equally(open_tab, tmp_path, value):
    """96.014996 % was rounded to 96.015 and then to 96.02; exact ties were rounded up, and to even in the terminal."""
    report = evaluate(pages.sample_predictions(60), intervals=False)
    ece = Result(value, report["ece"].definition, Interval(value, value))
    before = dataclasses.replace(report.before, results={**report.before.results, "ece": ece})
    tab = open_tab(save_page(dataclasses.replace(report, before=before), tmp_path / "page.html"))
    text = tab.text("#reliability figcaption")
    assert re.findall(r"\d\d\.\d\d", text)[:3] == [f"{100 * value:.2f}"] * 3
    assert f"{100 * value:.2f} [" in ece.cell()
