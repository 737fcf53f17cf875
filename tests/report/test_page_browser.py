"""Every control of the report page, in a browser (see conftest.py), tested by its effect."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlas import formatting
from fedlas.evaluation import Report, evaluate
from fedlas.metrics.result import Interval, Result
from fedlas.predictions import Predictions, TopLabelPredictions
from fedlas.report.html import save_page
from fedlas.report.model import Model
from report import pages
from report.pages import NARROW, WIDE

pytestmark = pytest.mark.campaign


@pytest.fixture(scope="session")
def many(folder: Path) -> Path:
    return save_page(pages.many_classes(), folder / "many.html")


@pytest.fixture(scope="session")
def hostile(folder: Path) -> Path:
    models, options = pages.hostile()
    return save_page(models, folder / "hostile.html", **options)


@pytest.mark.parametrize("width", [NARROW, WIDE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["several", "many", "hostile"])
def test_page_has_no_horizontal_overflow(visit, request, name, width, scheme):
    here = visit(request.getfixturevalue(name), width, scheme)
    assert here.overflow() == 0
    here.open_all()
    here.page.wait_for_timeout(50)
    assert here.overflow() == 0
    wide = here.page.evaluate("""() => [...document.querySelectorAll("body *")].filter((one) => {
        if (one.closest('.scroll, svg, .hidden, .patterns') || one.closest('[hidden]')) return false;
        return one.getBoundingClientRect().right > document.documentElement.clientWidth + 1;
    }).map((one) => one.outerHTML.slice(0, 120))""")
    assert wide == []


def test_colours_follow_system_scheme_and_theme_switch(visit, several):
    for scheme in ("light", "dark"):
        here = visit(several, scheme=scheme)
        ground = "getComputedStyle(document.body).backgroundColor"
        system = here.page.evaluate(ground)
        here.page.select_option("#theme", "dark")
        dark = here.page.evaluate(ground)
        here.page.select_option("#theme", "light")
        light = here.page.evaluate(ground)
        assert dark != light
        assert system == {"light": light, "dark": dark}[scheme]
        here.page.select_option("#theme", "auto")
        assert here.page.evaluate(ground) == system
        here.page.select_option("#theme", "dark")
        here.page.emulate_media(media="print")
        assert here.page.evaluate(ground) == light


def test_reliability_diagrams_switch_the_binning(visit, several):
    here = visit(several)
    drawn = "#reliability-diagrams figure:first-child"
    widths = "one => one.getAttribute('width')"

    def bars() -> list[str]:
        return [one.evaluate(widths) for one in here.page.locator(f"{drawn} .bar").all()][:-1]  # less the legend

    assert "ECE" in here.text(f"{drawn} figcaption")
    filled = here.count("#reliability-diagrams > div:first-child .stop")
    here.page.check("#bins input[value=mass]")
    assert "AECE" in here.text(f"{drawn} figcaption")
    assert here.count("#reliability-diagrams > div:first-child .stop") == 15 != filled
    here.page.check("#bins input[value=smooth]")
    assert "smooth ECE" in here.text(f"{drawn} figcaption")
    assert here.count(f"{drawn} svg[role=group] .line") >= 1
    assert here.count(f"{drawn} svg[role=group] .bar") == 0
    here.page.check("#bins input[value=width]")
    assert here.count("#reliability-diagrams > div:first-child .stop") == filled


def test_empty_bins_are_not_drawn(visit, several):
    here = visit(several)
    states = here.page.evaluate("JSON.parse(document.getElementById('page-data').textContent).models[0].states")
    rows = states[0]["diagrams"]["width"]["bins"]
    first = "#reliability-diagrams > div:first-child svg[role=group]"
    assert here.count(f"{first} .stop") == len(rows) < 15
    assert here.count(f"{first} .bar") == here.count(f"{first} .whisker") == len(rows)
    assert here.count(f"{first} .density") == len(rows)


def test_uncalibrated_and_calibrated_diagrams_are_side_by_side(visit, several):
    here = visit(several)
    captions = "#reliability-diagrams figcaption"
    assert [one.inner_text().split("\n")[0] for one in here.page.locator(captions).all()] == [
        "Uncalibrated",
        "After temperature",
    ]
    here.page.uncheck("#beside")
    assert here.count(captions) == 1
    assert here.text(captions).startswith("After temperature")
    here.page.locator("#reliability-states input[type=radio]").nth(2).check()
    assert here.text(captions).startswith("After isotonic")
    here.page.check("#beside")
    assert here.count(captions) == 2
    here.page.locator("#reliability-states input[type=radio]").nth(0).check()
    assert here.count(captions) == 1
    assert here.text(captions).startswith("Uncalibrated")


def test_hover_and_keyboard_show_count_accuracy_and_confidence(visit, several):
    here = visit(several)
    row = here.page.evaluate(
        "JSON.parse(document.getElementById('page-data').textContent).models[0].states[0].diagrams.width.bins[3]"
    )
    drawing = "#reliability-diagrams > div:first-child .drawing"
    assert not here.page.locator(f"{drawing} .tip").is_visible()
    here.page.locator(f"{drawing} .stop").nth(3).hover()
    said = here.text(f"{drawing} .tip")
    assert f"{row[2]} samples" in said
    shown = [float(number) for number in re.findall(r"([\d.]+)\s%", said)]
    assert shown[0] == pytest.approx(100 * row[3], abs=0.051)  # mean confidence
    assert f"accuracy {formatting.percent(*row[4:7])} ({formatting.interval(*row[5:7])})" in said.replace("\u00a0", " ")
    here.page.mouse.move(2, 2)
    assert not here.page.locator(f"{drawing} .tip").is_visible()
    here.page.locator(f"{drawing} .stop").first.focus()
    assert here.page.locator(f"{drawing} .tip").is_visible()
    for _ in range(3):
        here.page.keyboard.press("ArrowRight")
    assert here.text(f"{drawing} .tip") == said
    focused = "document.activeElement.getAttribute('aria-label')"
    assert f"{row[2]} samples" in here.page.evaluate(focused)
    here.page.keyboard.press("End")
    last = here.page.evaluate(focused)
    here.page.keyboard.press("ArrowRight")
    assert here.page.evaluate(focused) == last
    here.page.keyboard.press("Home")
    here.page.keyboard.press("ArrowLeft")
    assert here.page.evaluate(focused) == here.page.locator(f"{drawing} .stop").first.get_attribute("aria-label")
    here.page.keyboard.press("Escape")
    assert not here.page.locator(f"{drawing} .tip").is_visible()


def test_figure_is_one_tab_stop_with_visible_focus(visit, several):
    here = visit(several)
    for drawing in here.page.locator("svg[role=group]").all():
        assert drawing.locator(".stop[tabindex='0']").count() == 1
        assert drawing.get_attribute("aria-label")
    here.page.locator("#beside").focus()
    here.page.keyboard.press("Tab")
    outline = here.page.evaluate("getComputedStyle(document.activeElement.querySelector('.hit')).strokeWidth")
    assert outline == "3px"
    here.page.keyboard.press("Tab")
    assert here.page.evaluate("document.activeElement.tagName") == "SUMMARY"
    assert here.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_tapping_a_bar_shows_its_tooltip(visit, several):
    here = visit(several, NARROW, has_touch=True, is_mobile=True)
    here.page.locator("#reliability-diagrams .stop").nth(2).tap()
    assert "samples" in here.text("#reliability-diagrams .tip")
    assert here.overflow() == 0


def test_every_figure_has_a_data_table(visit, several):
    here = visit(several)
    figures = here.page.locator("figure")
    assert figures.count() >= 12
    for figure in figures.all():
        assert figure.locator(".as-table").count() == 1
        assert figure.locator("tbody tr").count() == 0
        figure.locator(".as-table summary").click()
        figure.locator("tbody tr").first.wait_for(state="visible")
        figure.locator(".as-table summary").click()
        assert not figure.locator("table").is_visible()
    rows = here.page.evaluate(
        "JSON.parse(document.getElementById('page-data').textContent).models[0].states[0].diagrams.width.bins.length"
    )
    assert here.count("#reliability-diagrams > div:first-child tbody tr") == rows


def test_confidence_histogram_follows_state_and_scale(visit, several):
    here = visit(several)

    def heights() -> list[str]:
        return here.page.locator("#confidence-histogram svg[role=group] .correct").evaluate_all(
            "all => all.map((one) => one.getAttribute('height'))"
        )

    seen = [heights()]
    for scale in ("count", "log", "fraction"):
        here.page.check(f"#confidence-scale input[value={scale}]")
        seen.append(heights())
    assert seen[0] == seen[3]
    assert seen[0] != seen[1] != seen[2]
    here.page.locator("#confidence-states input").nth(1).check()
    assert heights() != seen[0]
    assert "After temperature" in here.text("#confidence-histogram figcaption")
    here.page.locator("#confidence-histogram .stop").last.hover()
    assert re.search(r"\d+ .*\n\d+ ", here.text("#confidence-histogram .tip"))


def test_the_class_table_is_sorted_by_every_column(visit, several):
    here = visit(several)

    def column(place: int) -> list[str]:
        return here.page.locator(f"#class-table tbody tr > :nth-child({place})").all_inner_texts()

    def numbers(place: int) -> list[float]:
        return [float(re.sub(r"[^\d.\-]", "", cell.replace("−", "-"))) for cell in column(place)]

    heads = here.page.locator("#class-table thead button")
    assert here.page.locator("#class-table th[aria-sort]").get_attribute("data-key") == "weight"
    sizes = [abs(value) for value in numbers(8)]
    assert sizes == sorted(sizes, reverse=True)
    heads.nth(0).click()
    assert column(1) == sorted(pages.CIFAR10)
    heads.nth(0).click()
    assert column(1) == sorted(pages.CIFAR10, reverse=True)
    for place in (2, 3, 4, 5, 6, 7, 9):
        heads.nth(place - 1).click()
        assert numbers(place) == sorted(numbers(place), reverse=True)
        assert here.page.locator("#class-table th[aria-sort]").get_attribute("aria-sort") == "descending"
        heads.nth(place - 1).click()
        assert numbers(place) == sorted(numbers(place))
        assert here.page.locator("#class-table th[aria-sort]").count() == 1


def test_class_table_is_searched_and_paged(visit, many):
    here = visit(many)
    assert here.count("#class-table tbody tr") == 20
    assert here.text("#class-count").startswith("1,000 of 1,000 ")
    assert here.text("#class-page") == "Page 1 of 50"
    assert here.page.locator("#class-before").is_disabled()
    first = here.text("#class-table tbody th")
    here.page.click("#class-after")
    assert here.text("#class-page") == "Page 2 of 50"
    assert here.text("#class-table tbody th") != first
    here.page.click("#class-before")
    assert here.text("#class-table tbody th") == first
    here.page.fill("#class-search", "KIND 77")
    assert here.text("#class-count").startswith("11 of 1,000 ")  # 77 and 770 to 779
    assert all("kind 77" in name for name in here.page.locator("#class-table tbody th").all_inner_texts())
    assert not here.page.locator("#class-after").is_visible()
    here.page.fill("#class-search", "nothing like it")
    assert here.count("#class-table tbody tr") == 0
    here.page.fill("#class-search", "")
    assert here.count("#class-table tbody tr") == 20
    # A search or a sort of a thousand classes is done before anyone notices.
    slowest = here.page.evaluate("""() => {
        const search = document.getElementById("class-search");
        const times = [];
        for (const wanted of ["k", "kind 1", "things", ""]) {
            const begun = performance.now();
            search.value = wanted;
            search.dispatchEvent(new Event("input"));
            document.body.getBoundingClientRect();
            times.push(performance.now() - begun);
        }
        for (const head of document.querySelectorAll("#class-table thead button")) {
            const begun = performance.now();
            head.click();
            document.body.getBoundingClientRect();
            times.push(performance.now() - begun);
        }
        return Math.max(...times);
    }""")
    assert slowest < 500


def test_selecting_a_class_shows_its_diagram(visit, several):
    here = visit(several)
    here.page.locator("#class-table tbody tr").nth(4).locator("td").first.click()
    name = here.page.locator("#class-table tbody tr").nth(4).locator("th").inner_text()
    assert here.text("#class-chosen") == name
    assert here.page.locator("#class-table tr.chosen th").inner_text() == name
    answers = here.page.locator("#class-table tbody tr").nth(4).locator("td").nth(1).inner_text()
    assert f"{answers} samples" in here.text("#class-diagram figcaption")
    before, caption = here.page.inner_html("#class-diagram .drawing"), here.text("#class-diagram figcaption")
    here.page.check("#class-kind input[value=of_probability]")
    assert here.page.inner_html("#class-diagram .drawing") != before
    assert here.text("#class-diagram figcaption") != caption
    here.page.locator("#class-table tbody th button").nth(2).focus()
    here.page.keyboard.press("Enter")
    assert here.text("#class-chosen") == here.page.locator("#class-table tbody tr").nth(2).locator("th").inner_text()
    probability = here.page.inner_html("#class-diagram .drawing")
    here.page.check("#class-kind input[value=of_predictions]")
    assert here.page.inner_html("#class-diagram .drawing") != probability


def test_class_map_is_ordered_and_paged(visit, several, many):
    here = visit(several)

    def rows() -> list[str]:
        return here.page.locator("#map-figure text.row").all_text_contents()

    first = rows()
    assert len(first) == 10
    seen = {tuple(first)}
    for order in ("over", "under", "predicted", "number"):
        here.page.select_option("#map-order", order)
        seen.add(tuple(rows()))
    assert rows() == list(pages.CIFAR10)
    assert len(seen) >= 3
    here.page.select_option("#map-order", "weight")
    assert rows() == first
    assert not here.page.locator("#map-after").is_visible()
    cells = here.page.evaluate(
        "JSON.parse(document.getElementById('page-data').textContent).models[0].class_table.of_predictions.flat().length"
    )
    assert here.count("#map-figure .stop") == cells
    here.page.locator("#map-figure .stop").nth(3).hover()
    assert re.search(r"\d samples?", here.text("#map-figure .tip"))
    here.page.locator("#map-figure .stop").first.focus()
    here.page.keyboard.press("ArrowDown")
    assert here.page.evaluate("document.activeElement.getAttribute('aria-label')").startswith(f"{first[1]},")
    here.page.keyboard.press("ArrowUp")
    assert here.page.evaluate("document.activeElement.getAttribute('aria-label')").startswith(f"{first[0]},")
    there = visit(many)
    before = there.page.inner_html("#map-figure")
    assert re.search(r" 1 .* 25 ", there.text("#map-page"))
    there.page.click("#map-after")
    assert re.search(r" 26 .* 50 ", there.text("#map-page"))
    assert there.page.inner_html("#map-figure") != before
    there.page.click("#map-before")
    assert there.page.inner_html("#map-figure") == before


def test_risk_curves_can_be_hidden(visit, several):
    here = visit(several)
    drawn = "#risk-figure svg[role=group] path.line"
    boxes = here.page.locator("#risk-lines input")
    assert boxes.count() == here.count(drawn) == 5  # three states of the first model, two other models
    for place in range(5):
        boxes.nth(place).uncheck()
    assert here.count(drawn) == 0
    boxes.nth(3).check()
    assert here.count(drawn) == 1
    here.page.locator("#risk-figure .stop").nth(6).hover()
    assert "unsure" in here.text("#risk-figure .tip")  # the name of the model


def test_ood_detection_changes_with_set_and_score(visit, several):
    here = visit(several)
    roc, numbers = "#ood-roc svg[role=group] .line-0", "#ood-numbers"
    seen = {(here.page.locator(roc).first.get_attribute("d"), here.text(numbers))}
    assert re.search("AUROC .*AUPR .*AUPR .*FPR .*95", here.text(numbers))
    scores = here.count("#ood-score option")
    assert scores >= 5
    for place in range(1, scores):
        here.page.select_option("#ood-score", str(place))
        seen.add((here.page.locator(roc).first.get_attribute("d"), here.text(numbers)))
    here.page.select_option("#ood-set", "1")
    seen.add((here.page.locator(roc).first.get_attribute("d"), here.text(numbers)))
    assert len(seen) == scores + 1
    assert "noise" in here.text("#ood-roc figcaption")
    assert here.count("#ood-table tbody tr") == 2 * scores
    here.page.locator("#ood-table summary").click()
    assert here.page.locator("#ood-table table").is_visible()
    for figure in ("#ood-histogram", "#ood-roc"):
        here.page.locator(f"{figure} .stop").nth(4).hover()
        assert here.text(f"{figure} .tip").count("%") >= 2


def test_norms_gate_and_alpha_are_drawn(visit, several):
    here = visit(several)
    for place in (
        "norm-histogram",
        "norm-groups",
        "training-curves",
        "training-gate",
        "training-ratio",
        "training-alpha",
    ):
        assert here.count(f"#{place} svg[role=group] .line") >= 1, place
        here.page.locator(f"#{place} .stop").nth(2).hover()
        assert here.text(f"#{place} .tip")
    assert "β = 4" in here.text("#training-alpha figcaption")
    here.page.locator("#training-gate .stop").first.focus()
    assert "+1 52.0" in here.text("#training-gate .tip")


def test_samples_are_shown_with_images(visit, several):
    here = visit(several)
    assert here.count("#sample-list li") == 12
    over = here.text("#sample-list")
    assert here.page.evaluate(
        "[...document.querySelectorAll('#sample-list img')].every((one) => one.naturalWidth === 8)"
    )
    assert all(one.get_attribute("alt") for one in here.page.locator("#sample-list img").all())
    here.page.check("#sample-kind input[value=under]")
    assert here.text("#sample-list") != over
    here.page.check("#sample-kind input[value=over]")
    assert here.text("#sample-list") == over


def test_comparison_section_lists_all_tests(visit, several):
    here = visit(several)
    tests = here.page.evaluate("JSON.parse(document.getElementById('page-data').textContent).comparison.tests.length")
    assert here.count("#comparison-tests tbody tr") == tests >= 12
    assert re.search(r"\d", here.text("#comparison-tests tbody"))
    assert here.count("#comparison-diagrams figure") == 3


def test_navigation_is_folded_in_a_narrow_window(visit, several):
    here = visit(several, NARROW)
    assert not here.page.locator("nav a").first.is_visible()
    here.page.click("nav summary")
    assert here.page.locator("nav a").first.is_visible()
    here.page.set_viewport_size({"width": WIDE, "height": 900})
    here.page.wait_for_function("document.getElementById('contents').open")
    assert not here.page.locator("nav summary").is_visible()
    assert here.page.locator("nav a").first.is_visible()


def test_navigation_links_reach_and_open_sections(visit, several):
    here = visit(several)
    for link in here.page.locator("nav a").all():
        link.click()
        assert here.page.evaluate("location.hash") == link.get_attribute("href")
    here.page.wait_for_function("document.querySelector('nav a[aria-current]') !== null")
    for summary in here.page.locator("#method summary, #summary summary").all():
        inside = summary.locator("xpath=following-sibling::*[1]")
        assert not inside.is_visible()
        summary.click()
        assert inside.is_visible()
    here.page.keyboard.press("Control+Home")
    here.page.evaluate("document.activeElement.blur()")
    here.page.keyboard.press("Tab")
    here.page.evaluate("document.querySelector('.skip').focus()")
    here.page.keyboard.press("Enter")
    assert here.page.evaluate("document.activeElement.id") == "main"


TESTED = (
    "#model", "#theme", "#bins", "#reliability-states", "#confidence-states", "#confidence-scale", "#class-search",
    "#class-table", "#class-before", "#class-after", "#class-kind", "#map-order", "#map-before", "#map-after",
    "#risk-lines", "#ood-set", "#ood-score", "#sample-kind", "#ood-table summary", ".as-table summary",
    "#method summary", "#summary summary", "#contents",
    ".downloads", "button.copy",  # test_page_downloads.py, test_page_recalibration.py
)  # fmt: skip


def test_every_control_has_a_test(visit, several):
    """A new control needs a test of its effect and an entry in the list above."""
    here = visit(several)
    left = here.page.evaluate(
        """(known) => [...document.querySelectorAll("input, select, button, summary, textarea, [contenteditable]")]
            .filter((one) => !known.some((place) => one.closest(place))).map((one) => one.outerHTML)""",
        list(TESTED),
    )
    assert left == []


def test_page_has_landmarks_labels_and_headings(visit, several):
    here = visit(several)
    for landmark in ("header", "nav[aria-label]", "main", "footer"):
        assert here.count(landmark) == 1
    assert here.count("h1") == 1
    faults = here.page.evaluate("""() => {
        const faults = [];
        for (const one of document.querySelectorAll("input, select")) {
            if (!one.labels.length) faults.push(`no label: ${one.outerHTML}`);
        }
        for (const one of document.querySelectorAll("fieldset")) {
            if (!one.querySelector("legend").textContent) faults.push(`no legend: ${one.outerHTML}`);
        }
        for (const one of document.querySelectorAll("section")) {
            const title = document.getElementById(one.getAttribute("aria-labelledby"));
            if (!title || title.tagName !== "H2") faults.push(`no title: ${one.id}`);
        }
        for (const one of document.querySelectorAll("[role=region], [role=group]")) {
            if (!one.getAttribute("aria-label")) faults.push(`no name: ${one.outerHTML.slice(0, 80)}`);
        }
        for (const one of document.querySelectorAll(".stop")) {
            if (one.getAttribute("role") !== "img" || !one.getAttribute("aria-label")) faults.push("silent mark");
        }
        const ids = [...document.querySelectorAll("[id]")].map((one) => one.id);
        if (new Set(ids).size !== ids.length) faults.push("an id twice");
        let level = 1;
        for (const one of document.querySelectorAll("h1, h2, h3, h4")) {
            const next = Number(one.tagName[1]);
            if (next > level + 1) faults.push(`heading jumps: ${one.textContent}`);
            level = next;
        }
        for (const one of document.querySelectorAll("table th")) {
            if (!one.getAttribute("scope")) faults.push(`no scope: ${one.outerHTML}`);
        }
        return faults;
    }""")
    assert faults == []


def test_untrusted_text_is_never_executed(visit, hostile):
    here = visit(hostile, NARROW)
    assert here.page.title() == pages.HOSTILE[0]
    for model in ("0", "1"):
        here.page.select_option("#model", model)
        for kind in ("over", "under"):
            here.page.check(f"#sample-kind input[value={kind}]")
        here.open_all()
        for row in range(here.count("#class-table tbody tr")):
            here.page.locator("#class-table tbody tr").nth(row).hover()
            here.page.locator("#class-table tbody tr").nth(row).locator("td").first.click()
        if here.page.locator("#ood-set").is_visible():
            for place in range(3):
                here.page.select_option("#ood-set", str(place))
    here.page.locator("#map-figure .stop").first.hover()
    assert here.page.evaluate("window.ran") is None
    assert here.count("main img, main b, main script") == 0
    names = here.page.evaluate(
        "[...document.querySelectorAll('#class-table tbody th bdi')].map((one) => one.textContent)"
    )
    assert pages.HOSTILE[0] in names
    assert pages.HOSTILE[6] in names
    assert max(map(len, names)) < 250
    assert here.overflow() == 0
    tall = here.page.evaluate(
        "Math.max(...[...document.querySelectorAll('#class-table tr')].map((one) => one.offsetHeight))"
    )
    assert tall < 120


def test_content_security_policy_blocks_injected_code(browser, hostile, tmp_path):
    """Even if a text got into the page as markup, it could not run, load or send anything."""
    text = hostile.read_text(encoding="utf-8")
    attack = '<script>window.ran = 1</script><img src="https://example.com/x.png"><p style="color:red" onclick="x()">'
    (tmp_path / "attack.html").write_text(text.replace('<main id="main"', attack + '<main id="main"'), encoding="utf-8")
    here = pages.Visit(browser, tmp_path / "attack.html")
    assert here.page.evaluate("window.ran") is None
    assert here.page.evaluate("fetch('https://example.com').then(() => 'sent', () => 'stopped')") == "stopped"
    here.context.close()
    assert sum("Content Security Policy" in fault for fault in here.faults) >= 4  # script, style, image, fetch
    # What the browser begins to load while it reads on is stopped by the policy, not by a missing network.
    assert [fault for fault in here.faults if fault.startswith("failed")] == ["failed: https://example.com/x.png csp"]


def binary() -> Predictions:
    probs = torch.rand(300, generator=torch.Generator().manual_seed(0))
    return Predictions.from_probs(probs, (probs > 0.4).long())


def softly_labelled() -> Predictions:
    given = pages.model(200, 3)
    return Predictions(given.logits, 0.8 * torch.nn.functional.one_hot(given.labels, 3).float() + 0.2 / 3)


def top_only() -> TopLabelPredictions:
    names = ["cat", "dog", "owl"]
    return TopLabelPredictions([0.9, 0.6, 0.8], labels=[0, 0, 2], prediction=[0, 1, 2], class_names=names)


def constant() -> Predictions:
    return Predictions.from_probs(torch.full((40, 2), 0.5), torch.arange(40) % 2)


def small() -> Predictions:
    return pages.model(150, 3)


ODD: dict[str, Any] = {
    "one sample": lambda: Model(predictions=small()[:1], posthoc=()),
    "binary": lambda: Model(predictions=binary()),
    "soft labels": lambda: Model(predictions=softly_labelled()),
    "top only": lambda: Model(predictions=top_only(), posthoc=()),
    "all right": lambda: Model(predictions=small()[small().correct], posthoc=()),
    "all wrong": lambda: Model(predictions=small()[~small().correct], posthoc=()),
    "constant": lambda: Model(predictions=constant(), posthoc=()),
    "report alone": lambda: Report.from_dict(evaluate(small(), posthoc="temperature", resamples=50).to_dict()),
    "one epoch": lambda: Model(predictions=small(), posthoc=(), log=pages.log(1)),
    "no gate": lambda: Model(predictions=small(), posthoc=(), log=[one | {"gate": {}} for one in pages.log()]),
    "foreign numbers alone": lambda: Model(
        predictions=small(), report=evaluate(small(), ood={"x": pages.ood_data(classes=3)}, intervals=False)
    ),
    "different samples": lambda: {
        "a": Model(predictions=small(), posthoc=()),
        "b": Model(predictions=small()[:99], posthoc=()),
        "c": evaluate(small(), intervals=False),
    },
}


@pytest.mark.parametrize("name", ODD)
def test_small_and_unusual_evaluations_give_pages(visit, tmp_path, name):
    here = visit(save_page(ODD[name](), tmp_path / "odd.html", resamples=50), NARROW)
    models = here.count("#model option")
    for model in range(max(1, models)):
        if models:
            here.page.select_option("#model", str(model))
        for radio in here.page.locator("main input[type=radio]:not([disabled])").all():
            if radio.is_visible():
                radio.check()
        here.open_all()
        here.page.wait_for_timeout(50)  # tables are filled when they are opened
        assert here.overflow() == 0
        assert not re.search(r"NaN|Infinity|undefined|null|\[object", here.page.inner_text("main"))
        broken = here.page.evaluate("""() => [...document.querySelectorAll("svg *")]
            .filter((one) => [...one.attributes].some((a) => /NaN|Infinity|undefined/.test(a.value))).length""")
        assert broken == 0


def test_print_layout_is_light_complete_and_without_controls(visit, several):
    here = visit(several, 720, "dark")
    here.page.emulate_media(media="print")
    here.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert here.overflow() == 0
    assert not here.page.locator("nav").is_visible()
    assert not here.page.locator("#bins").is_visible()
    assert here.page.locator("#method table").first.is_visible()
    assert here.page.pdf(format="A4")[:4] == b"%PDF"


def test_numbers_are_shown_without_javascript(browser, several):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(several.as_uri())
    assert "-confident" in page.locator("#summary").inner_text()
    assert page.locator(".numbers tbody tr").count() == 6
    assert page.locator("noscript").inner_text()
    context.close()


@pytest.mark.parametrize("value", [0.96014996, 0.96125, 0.91875])
def test_page_and_terminal_round_equally(visit, tmp_path, value):
    """96.014996 % was rounded to 96.015 and then to 96.02; exact ties were rounded up, and to even in the terminal."""
    report = evaluate(pages.model(60), intervals=False)
    ece = Result(value, report["ece"].definition, Interval(value, value))
    before = dataclasses.replace(report.before, results={**report.before.results, "ece": ece})
    here = visit(save_page(dataclasses.replace(report, before=before), tmp_path / "page.html"))
    text = here.text("#reliability figcaption")
    assert re.findall(r"\d\d\.\d\d", text)[:3] == [f"{100 * value:.2f}"] * 3
    assert f"{100 * value:.2f} [" in ece.cell()
