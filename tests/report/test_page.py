"""The report page as text: one file of bounded size, in which untrusted texts are data."""

import base64
import dataclasses
import hashlib
import json
import re
from contextlib import nullcontext
from html.parser import HTMLParser
from importlib import metadata

import pytest
import torch

from fedlas.evaluation import evaluate
from fedlas.evaluation_report import Report
from fedlas.metrics.registry import all_metrics
from fedlas.predictions import Predictions, TopLabelPredictions
from fedlas.report import html, sample_pictures
from fedlas.report.html import embedded, report_page, save_page, unbroken
from fedlas.report.model import Model
from fedlas.report.page_data import text_data
from fedlas.report.page_script import FOLDER, join_modules
from report import pages

pytest.importorskip("jinja2")

MOST_BYTES = 6_000_000


class Reader(HTMLParser):
    """Lists the elements of a page, and the text inside scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if tag in {"script", "style"} else ""
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] += data
        elif not self._inside:
            self.texts.append(data)


def data_of(text: str) -> dict:
    return json.loads(Reader(text).scripts[0])


def evaluated_model(n: int, **options) -> Model:
    """Return a model with a report without intervals, which take most of the time."""
    predictions = pages.sample_predictions(n, **options)
    return Model(predictions=predictions, report=evaluate(predictions, intervals=False))


@pytest.fixture(scope="module")
def three_model_html() -> str:
    return report_page(pages.models(), images=pages.images(), title="Three models", resamples=100)


@pytest.fixture(scope="module")
def hostile_html() -> str:
    models, options = pages.hostile_models()
    return report_page(models, **options)


def test_page_needs_only_predictions(tmp_path):
    path = save_page(pages.sample_predictions(200), tmp_path / "deep" / "page.html", resamples=50)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert len(data_of(text)["models"][0]["states"]) == 2  # uncalibrated, and a temperature
    assert [tag for tag, _ in Reader(text).tags].count("html") == 1


def test_page_is_reproducible_byte_for_byte(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1790000000")
    assert report_page(evaluated_model(60)) == report_page(evaluated_model(60))


def test_page_has_no_external_references(three_model_html):
    addresses = {
        value
        for tag, attributes in Reader(three_model_html).tags
        for name, value in attributes.items()
        if name in {"src", "href", "action", "data", "poster", "srcset"} and value and not value.startswith("#")
    }
    assert addresses == set()
    assert "@import" not in three_model_html
    style = re.search(r"<style>(.*?)</style>", three_model_html, re.DOTALL)[1]
    assert "url(" not in style


def test_content_security_policy_allows_only_the_embedded_script_and_style(three_model_html):
    reader = Reader(three_model_html)
    policy = next(a["content"] for t, a in reader.tags if a.get("http-equiv") == "Content-Security-Policy")
    style = re.search(r"<style>(.*?)</style>", three_model_html, re.DOTALL)[1]
    for text in (reader.scripts[1], style):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert not any(
        "style" in attributes or any(n.startswith("on") for n in attributes) for _, attributes in reader.tags
    )


def test_script_never_creates_markup_from_text():
    script = join_modules()
    for forbidden in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        "</script",
    ):
        assert forbidden not in script
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", script)


def test_pages_stay_below_one_megabyte(three_model_html):
    assert len(three_model_html.encode()) < 1_000_000
    large_page = report_page(pages.thousand_class_model())
    assert len(large_page.encode()) < 1_000_000
    assert len(data_of(large_page)["models"][0]["class_table"]["class"]) == 1_000


def test_a_page_of_ten_thousand_samples_is_small():
    metadata = {"site": [f"site {k % 40}" for k in range(10_000)], "id": [f"x{k}" for k in range(10_000)]}
    text = report_page(evaluated_model(10_000, metadata=metadata, ids=range(10_000)))
    assert len(text.encode()) < 1_500_000
    assert len(data_of(text)["models"][0]["slices"]["rows"]) == html.MOST_SLICES == 50


@pytest.mark.campaign
def test_a_page_of_a_million_top_labels_is_small():
    n, random = 1_000_000, torch.Generator().manual_seed(0)
    confidence, prediction = 1 - 0.9 * torch.rand(n, generator=random), torch.randint(100, (n,), generator=random)
    labels = torch.where(torch.rand(n, generator=random) < confidence, prediction, (prediction + 1) % 100)
    predictions = TopLabelPredictions(confidence, labels=labels, prediction=prediction, ids=range(n))
    text = report_page(Model(predictions=predictions, report=evaluate(predictions, intervals=False)))
    assert len(text.encode()) < 3_000_000
    assert len(data_of(text)["models"][0]["slices"]["rows"]) == 50


def test_class_diagram_limit_is_divided_among_models(monkeypatch):
    monkeypatch.setattr(html, "CLASS_DIAGRAMS", 8)
    data = data_of(report_page({"a": evaluated_model(60), "b": evaluated_model(60, seed=3)}))
    assert [len(model["class_table"]["of_predictions"]) for model in data["models"]] == [4, 4]


@pytest.mark.campaign
def test_page_of_many_classes_stays_below_the_size_limit():
    model = pages.thousand_class_model()
    text = report_page(
        {f"model {k}": dataclasses.replace(model, predictions=model.predictions) for k in range(3)}, resamples=50
    )
    assert len(text.encode()) < MOST_BYTES / 2
    generator = torch.Generator().manual_seed(0)
    predictions = Predictions(
        torch.randn(600, 20_000, generator=generator), torch.randint(20_000, (600,), generator=generator),
        class_names=[f"{'long name ' * 40}{k}" for k in range(20_000)],
    )  # fmt: skip
    text = report_page(Model(predictions=predictions, report=evaluate(predictions, intervals=False)))
    assert len(text.encode()) < MOST_BYTES / 2
    assert len(data_of(text)["models"][0]["class_table"]["of_predictions"]) <= html.CLASS_DIAGRAMS


def test_untrusted_text_is_embedded_only_as_data(hostile_html):
    """No element of the page comes from a text, and every text is included, truncated but otherwise unchanged."""
    reader = Reader(hostile_html)
    assert len(reader.scripts) == 2
    assert ATTACK_EFFECT not in reader.scripts[1]
    tags = {tag for tag, _ in reader.tags}
    assert "b" not in tags
    assert "img" not in tags
    data = json.loads(reader.scripts[0])
    assert data["names"][0] == [text_data(name) for name in pages.HOSTILE]
    assert data["title"] == pages.HOSTILE[0]
    assert any(pages.HOSTILE[0] in text for text in reader.texts)
    assert "49" not in " ".join(reader.texts[:5])
    embedded_json = re.search(r'id="page-data">(.*?)</script>', hostile_html, re.DOTALL)[1]
    assert embedded_json.isascii()
    assert not set("<>&") & set(embedded_json)
    assert max(len(name) for name in data["names"][0]) < 250
    rows = data["models"][0]["slices"]["rows"]
    assert {row[0] for row in rows} == {"predicted class", text_data(pages.HOSTILE[3])}
    assert text_data(pages.HOSTILE[0]) in {row[1] for row in rows if row[0] != "predicted class"}


ATTACK_EFFECT = "window.ran"


def test_embedded_json_round_trips():
    data = {name: [name] for name in map(text_data, pages.HOSTILE)}
    text = embedded(data)
    assert json.loads(text) == data
    assert not set("<>&\u2028\u2029") & set(text)
    with pytest.raises(ValueError, match="JSON"):
        embedded({"x": float("nan")})


def test_page_has_a_section_only_if_it_has_content(three_model_html):
    names = [a["id"] for t, a in Reader(three_model_html).tags if t == "section"]
    assert names == [
        "summary", "recalibration", "comparison", "reliability", "confidences", "slices", "classes", "map",
        "confusions", "selective", "ood", "norms", "training", "samples", "method",
    ]  # fmt: skip
    small_page = report_page(evaluated_model(60, features=None))
    names = [a["id"] for t, a in Reader(small_page).tags if t == "section"]
    assert not {"comparison", "ood", "norms", "training"} & set(names)


def test_page_can_be_made_from_a_saved_report(tmp_path):
    report = evaluate(pages.sample_predictions(200), posthoc="temperature", intervals=False)
    report.save(tmp_path / "report.json")
    text = report_page(Report.load(tmp_path / "report.json"))
    names = [a["id"] for t, a in Reader(text).tags if t == "section"]
    assert names == ["summary", "recalibration", "reliability", "confidences", "selective", "method"]


def test_page_shows_command_recipe_environment_and_definitions():
    model = dataclasses.replace(evaluated_model(60), recipe={"lr": 0.1, "loss": "ce"}, environment={"gpu": "H200"})
    text = report_page(model, command="fedlas evaluate x.npz --html y.html", environment={"host": "here"})
    page_text = " ".join(Reader(text).texts)
    for expected in (
        "fedlas evaluate x.npz --html y.html",
        "lr",
        "0.1",
        "H200",
        "here",
        "Brier score",
        "equal-width bins",
    ):
        assert expected in page_text
    for metric in all_metrics().values():
        assert metric.explanation
        assert metric.explanation in page_text


def header_of(text: str) -> dict[str, str]:
    """Return the entries of the header of a page."""
    block = re.search(r'<dl id="about".*?</dl>', text, re.DOTALL)[0]
    return dict(re.findall(r'<dt>(.*?)</dt><dd><bdi class="cut">(.*?)</bdi></dd>', block))


def test_header_shows_what_was_evaluated(monkeypatch, tmp_path):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1790000000")
    recipe = {"data": "cifar10", "model": "resnet18"}
    model = dataclasses.replace(evaluated_model(1_200), recipe=recipe, source=tmp_path / "run <1>.csv")
    text = report_page({"fedlas_ls": model}, command="fedlas evaluate x.npz")
    assert header_of(text) == {
        "Model": "fedlas_ls", "Architecture": "resnet18", "Data": "cifar10", "File": "run &lt;1&gt;.csv",
        "Split": "val", "Samples": "1,200", "Classes": "10", "Date": "2026-09-21", "fedlas": metadata.version("fedlas"),
    }  # fmt: skip
    assert text.index("fedlas evaluate x.npz") < text.index('<section id="summary"')
    assert text.count("fedlas evaluate x.npz") == 1
    header = header_of(report_page({"a": evaluated_model(60), "b": evaluated_model(80, split=None)}, resamples=50))
    assert (header["Model"], header["Samples"], header["Classes"], header["Split"]) == ("a, b", "60, 80", "10", "val")
    assert "Data" not in header


def test_thumbnails_come_from_arrays_or_files_and_are_capped(tmp_path, three_model_html, monkeypatch):
    data = data_of(three_model_html)
    rows = {str(sample["row"]) for m in data["models"] for kind in ("over", "under") for sample in m["samples"][kind]}
    assert set(data["pictures"]) == rows
    assert data["lost"] == 0
    images = pytest.importorskip("PIL.Image")
    paths = [tmp_path / f"{row}.png" for row in range(100)]
    for path in paths[:50]:
        images.new("RGB", (20, 20), (9, 99, 9)).save(path)
    model = evaluated_model(100)
    data = data_of(report_page(model, paths=paths))
    shown_rows = [sample["row"] for kind in ("over", "under") for sample in data["models"][0]["samples"][kind]]
    assert {int(row) for row in data["pictures"]} == {row for row in shown_rows if row < 50}
    assert data["lost"] == sum(row >= 50 for row in shown_rows)
    monkeypatch.setattr(sample_pictures, "PICTURE_BYTES", 300)
    assert sum(map(len, data_of(report_page(model, paths=paths))["pictures"].values())) <= 300


def test_each_model_shows_its_own_sample_ids_and_images(tmp_path):
    """Models may differ in their number of samples, and some have no ids."""
    images = pytest.importorskip("PIL.Image")
    for name, colour in {"a": (9, 99, 9), "b": (99, 9, 9)}.items():
        images.new("RGB", (20, 20), colour).save(tmp_path / f"{name}.png")
    models = {
        name: evaluated_model(n, ids=[f"{name} {k}" for k in range(n)], paths=[str(tmp_path / f"{name}.png")] * n)
        for name, n in {"a": 100, "b": 80}.items()
    }
    data = data_of(report_page(models | {"c": evaluated_model(60)}))
    assert data["lost"] == data["outside"] == 0
    images_by_model = {}
    for model in data["models"]:
        samples = [sample for kind in ("over", "under") for sample in model["samples"][kind]]
        assert {sample.get("id", "").split(" ")[0] for sample in samples} == {
            model["name"] if model["name"] != "c" else ""
        }
        images_by_model[model["name"]] = {data["pictures"].get(sample["picture"]) for sample in samples}
    assert images_by_model["a"].isdisjoint(images_by_model["b"])
    assert images_by_model["c"] == {None}


def test_image_paths_cannot_leave_the_predictions_folder(tmp_path):
    images = pytest.importorskip("PIL.Image")
    inside, outside = tmp_path / "inside", tmp_path / "other"
    for folder in (inside, outside):
        folder.mkdir()
        images.new("RGB", (20, 20), (9, 99, 9)).save(folder / "one.png")
    (inside / "link.png").symlink_to(outside / "one.png")
    allowed_by_path = {
        "one.png": True,
        "../other/one.png": False,
        str(outside / "one.png"): False,
        "link.png": False,
        "\0": False,
    }
    for path, is_allowed in allowed_by_path.items():
        model = dataclasses.replace(evaluated_model(60, paths=[path] * 60), image_folders=(inside,))
        with nullcontext() if is_allowed else pytest.warns(UserWarning, match=r"^\d+ pictures? "):
            data = data_of(text := report_page(model))
        count = sum(len(kind) for kind in data["models"][0]["samples"].values())
        assert (bool(data["pictures"]), data["outside"], data["lost"]) == (is_allowed, 0 if is_allowed else count, 0), (
            path
        )
        assert ("--images DIR" in text) is not is_allowed
        with_both_folders = dataclasses.replace(model, image_folders=(inside, outside))
        if path != "\0":
            assert data_of(report_page(with_both_folders))["pictures"]
    with_own_paths = dataclasses.replace(
        model, predictions=pages.sample_predictions(60, paths=[str(outside / "one.png")] * 60)
    )
    assert data_of(report_page(dataclasses.replace(with_own_paths, image_folders=None)))["pictures"]
    assert data_of(report_page(with_own_paths, paths=[outside / "one.png"] * 60))["pictures"]


def test_paired_tests_use_the_bins_of_the_reports():
    predictions = {name: pages.sample_predictions(200, scale=scale) for name, scale in {"a": 2.0, "b": 1.0}.items()}
    evaluated_models = {
        name: Model(predictions=model_predictions, report=evaluate(model_predictions, bins=4, intervals=False))
        for name, model_predictions in predictions.items()
    }
    for models, options in (
        (evaluated_models, {}),
        ({n: Model(predictions=p, posthoc=()) for n, p in predictions.items()}, {"bins": 4}),
    ):
        data = data_of(report_page(models, resamples=50, **options))
        ece_test = next(test for test in data["comparison"]["tests"] if test["metric"] == "ece")
        expected = float(evaluated_models["a"].report["ece"]) - float(evaluated_models["b"].report["ece"])
        assert ece_test["difference"] == pytest.approx(expected, rel=1e-4)
        shown_ece = data["models"][0]["states"][0]["results"]["ece"]["value"]
        assert shown_ece == pytest.approx(float(evaluated_models["a"].report["ece"]), rel=1e-4)


def test_invalid_input_raises():
    model = evaluated_model(100)
    with pytest.raises(ValueError, match=r"ids .*3 .*100 samples"):
        report_page(model, ids=[1, 2, 3])
    with pytest.raises(ValueError, match="samples is 99"):
        report_page(model, samples=99)
    with pytest.raises(ValueError, match="model"):
        report_page({})
    with pytest.raises(ValueError, match=r"a .*predictions.* report"):
        report_page({"a": Model()})
    with pytest.raises(Exception, match=r"a is list|Type-check"):
        report_page({"a": [1]})
    with pytest.raises(ValueError, match=r"0\.\.1"):
        report_page(model, images=torch.randn(100, 3, 4, 4))


def test_numbers_and_units_stay_on_one_line():
    assert unbroken("by 4.1 points; T = 1.6 at 95 %") == "by 4.1\u00a0points; T\u00a0=\u00a01.6 at 95\u00a0%"


COLOUR_VARIABLE = re.compile(r"--([\w-]+): (#[0-9a-f]{6})")


def luminance(colour: str) -> float:
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_meet_wcag_contrast():
    """WCAG 2, level AA: a contrast of 4.5 for text and of 3 for marks in figures."""
    style = (FOLDER / "page.css").read_text(encoding="utf-8")
    light, dark_by_choice, dark_by_system, printed = (
        dict(COLOUR_VARIABLE.findall(block)) for block in re.findall(r":root[^{]*\{([^}]*--ink[^}]*)\}", style)
    )
    assert dark_by_choice == dark_by_system
    for colour in (light, dark_by_choice, light | printed):
        for text in ("ink", "soft", "accent", "over", "under"):
            for background in ("paper", "card"):
                assert contrast(colour[text], colour[background]) >= 4.5, (text, background)
        for mark in ("bar", "correct", "incorrect", *(f"line-{k}" for k in range(6))):
            assert contrast(colour[mark], colour["paper"]) >= 3, mark
