"""All figures at once: one style, no overlap, nothing outside the canvas, equal bytes for equal input."""

import json
import re
from dataclasses import replace
from itertools import combinations

import matplotlib as mpl
import pytest
import torch
from matplotlib import colors
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from fedlas.evaluation import evaluate
from fedlas.evaluation_report import Report
from fedlas.io import read_predictions
from fedlas.predictions import Predictions
from fedlas.report import figures
from fedlas.report.figures import confidence, gate, indicator, ood, reliability, saving, selective, style, training
from fedlas.report.html import report_page
from fedlas.report.model import Model
from report import pages

EXPECTED_FIGURES = {
    "reliability", "reliability_lines", "reliability_smooth", "over_under", "confidence", "risk_coverage", "norm",
    "training", "alpha", "gate", "class_map-sure", "class_map-unsure", "class_map-other", "roc-sure",
    "scores-sure-noise", "scores-sure-street-numbers",
}  # fmt: skip


MODULES = (confidence, gate, indicator, ood, reliability, selective, training)
# Figures that differ between one and several models: for one model they compare its states, otherwise the models.
STATE_FIGURES = (
    "reliability_figure", "reliability_lines_figure", "smooth_reliability_figure", "over_under_figure",
    "confidence_figure", "risk_figure", "norm_figure",
)  # fmt: skip


def draw_only(patch, only):
    """Draw only these figures, because drawing takes most of the time."""
    for module in MODULES:
        for name in [name for name in vars(module) if name.endswith("_figure") and name not in only]:
            patch.setattr(module, name, lambda *_: None)


def drawn_figures(models, only=None, **options):
    """Return the figures that `save_figures` would write, by name, with their data; None for those not in `only`."""
    figures_by_name = {}

    def collect(figure, data, folder, name, formats):
        assert name not in figures_by_name
        figures_by_name[name] = (figure, data)
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "save_with_data", collect)
        if only is not None:
            draw_only(patch, only)
        figures.save_figures(models, "nowhere", **options)
    return figures_by_name


@pytest.fixture(scope="module")
def models():
    return pages.models()


@pytest.fixture(scope="module")
def three_model_figures(models):
    return drawn_figures(models)


@pytest.fixture(scope="module")
def one_model_figures(models):
    return drawn_figures(models["sure"], only=STATE_FIGURES)


@pytest.fixture(scope="module")
def all_figures(three_model_figures, one_model_figures):
    """All different figures by name; assertion messages show the names."""
    groups = {"three models": three_model_figures, "one model": one_model_figures}
    named_figures = {
        f"{group} {name}": figure for group, results in groups.items() for name, (figure, _) in results.items()
    }
    return {name: figure for name, figure in named_figures.items() if figure is not None}


def boxes(figure, renderer):
    """Names and boxes of the panels with their labels, of legends and of titles, which must not overlap."""
    panels = [panel for panel in figure.axes if panel.get_visible() and panel.has_data()]
    panel_boxes = [(f"panel {panel.get_title()!r}", panel.get_tightbbox(renderer)) for panel in panels]
    other_artists = [*figure.legends, *([figure._suptitle] if figure._suptitle is not None else [])]
    return [*panel_boxes, *((str(artist), artist.get_window_extent(renderer)) for artist in other_artists)]


def layout_errors(figure):
    """List text that is cut off or of a wrong size, and parts that overlap."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    width, height = figure.bbox.size
    errors = []
    parts = boxes(figure, renderer)
    for part_name, box in parts:
        if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1:
            errors.append(f"{part_name} is cut off")
    texts = [text for text in figure.findobj(Text) if text.get_text().strip()]
    errors += [f"{x.get_text()!r} has {x.get_fontsize()} points" for x in texts if not 7 <= x.get_fontsize() <= 8]
    for (_, first_box), (_, second_box) in combinations(parts, 2):
        x = min(first_box.x1, second_box.x1) - max(first_box.x0, second_box.x0)
        y = min(first_box.y1, second_box.y1) - max(first_box.y0, second_box.y0)
        if x > 2 and y > 2:
            errors.append(f"{first_box} and {second_box} overlap")
    return errors


def test_every_available_figure_is_drawn(three_model_figures, one_model_figures):
    assert three_model_figures.keys() - {"ranks"} == EXPECTED_FIGURES
    expected_names = {
        name.removesuffix("-sure") for name in EXPECTED_FIGURES if name.endswith("-sure") or "-" not in name
    }
    assert one_model_figures.keys() == expected_names | {"scores-street-numbers", "scores-noise"}


def test_figure_file_names_match_the_overwrite_pattern(three_model_figures, one_model_figures):
    """The pattern decides which existing files may be overwritten."""
    predictions = pages.sample_predictions(60)
    report = evaluate(predictions, intervals=False)
    long_named_models = {
        f"{'a/b ö. ' * 9}{number}": Model(predictions=predictions, report=report) for number in range(2)
    }
    logs = {f"{number}": Model(report=report, log=pages.training_log()) for number in range(8)}
    log_figures = drawn_figures(logs, only=())
    for names in (
        three_model_figures.keys() - {"ranks"},
        one_model_figures,
        drawn_figures(long_named_models, only=()),
        log_figures,
    ):
        assert all(re.fullmatch(saving.NAMES, name) for name in names)
    assert {"reliability-2", "gate-2"} <= log_figures.keys()


@pytest.mark.campaign
def test_text_in_figures_is_legible_and_does_not_overlap(all_figures):
    assert {name: errors for name, figure in all_figures.items() if (errors := layout_errors(figure))} == {}


def test_legibility_check_detects_faults():
    with style.figure_of_size(style.COLUMN, 1.5) as figure:
        panel = figure.subplots()
        panel.set_title("a title that is much too long for a column of this width, and goes on")
        panel.set_xlabel("small", fontsize=5)
        figure.legend(panel.plot([0, 1], label="line"), ["over the panel"], loc="center")
    messages = " ".join(layout_errors(figure))
    assert "cut off" in messages
    assert "5.0 points" in messages
    assert "overlap" in messages


def test_figures_are_as_wide_as_a_column_or_a_page(all_figures):
    assert {figure.get_figwidth() for figure in all_figures.values()} == {style.COLUMN, style.PAGE} == {3.3, 6.9}
    assert all(figure.get_figheight() < 9.5 for figure in all_figures.values())


def luminance(colour):
    red, green, blue = colors.to_rgb(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_lines_of_one_panel_are_distinct_in_grey(all_figures):
    compared_pairs = 0
    for panel in [panel for figure in all_figures.values() for panel in figure.axes]:
        lines = [line for line in panel.lines if not line.get_label().startswith("_")]
        for first, second in combinations(lines, 2):
            compared_pairs += 1
            differs_in_grey = abs(luminance(first.get_color()) - luminance(second.get_color())) > 0.25
            line_styles = [(line.get_marker(), line.get_linestyle(), line.get_linewidth()) for line in (first, second)]
            assert differs_in_grey or line_styles[0] != line_styles[1], panel.get_title()
        areas = [area for area in panel.patches if area.get_label() and not area.get_label().startswith("_")]
        fills = [(area.get_hatch(), luminance(area.get_facecolor()[:3])) for area in areas]
        assert len(set(fills)) == len(fills)
    assert compared_pairs > 20


def test_forty_lines_differ_in_marker_or_dashes():
    line_styles = [style.line_style(n) for n in range(40)]
    assert len({(line_style.marker, str(line_style.dash)) for line_style in line_styles}) == 40
    first = line_styles[:3]
    assert all(abs(luminance(a.colour) - luminance(b.colour)) > 0.25 for a, b in combinations(first, 2))
    assert luminance(style.UNDER) - luminance(style.OVER) > 0.1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("costs $5 and $6", r"costs \$5 and \$6"),
        ("_hidden", " _hidden"),
        ("two\nlines\tand tab", "two lines and tab"),
        ("x" * 99, "x" * 31 + "…"),
        ("\u202eturned\x00", "□turned□"),
        ("長い", "□□"),
        ("", "(no name)"),
    ],
)
def test_safe_label_escapes_untrusted_names(text, expected):
    assert style.safe_label(text) == expected


@pytest.mark.campaign
def test_hostile_names_give_safe_file_names():
    models, _ = pages.hostile_models()
    name, model = next(iter(models.items()))
    ood_set = {key: model.ood[key] for key in list(model.ood)[1:2]}
    figures_by_name = drawn_figures(
        {name: replace(model, ood=ood_set), pages.HOSTILE[9]: Model(report=model.report)}, None
    )
    assert not [name for name in figures_by_name if not re.fullmatch(r"[A-Za-z0-9_-]{1,120}", name)]
    assert {
        name: errors for name, (figure, _) in figures_by_name.items() if figure and (errors := layout_errors(figure))
    } == {}


def test_figures_are_reproducible_under_any_matplotlib_style(tmp_path):
    predictions = pages.sample_predictions(80)
    files_by_style = {}
    for name, options in (("one", {}), ("two", {"font.size": 30, "axes.facecolor": "red", "savefig.bbox": "tight"})):
        with mpl.rc_context(options):
            data = figures.confidence_data(predictions, "model")  # hatches, dashes, filled steps and a legend
            figure = figures.confidence_figure([data])
            files = figures.save_with_data(figure, data, tmp_path / name, "figure", ("pdf", "png", "svg"))
        files_by_style[name] = {file.suffix: file.read_bytes() for file in files}
    assert files_by_style["one"] == files_by_style["two"]
    pdf, svg = files_by_style["one"][".pdf"], files_by_style["one"][".svg"].decode()
    assert b"CreationDate" not in pdf
    assert b"/Type3" not in pdf
    assert b"/FontFile2" in pdf
    assert ">confidence</text>" in svg
    assert "<dc:date>" not in svg


def test_save_figures_returns_its_files_with_the_drawn_data(tmp_path):
    predictions = pages.sample_predictions(60, features=None)
    files = figures.save_figures({"a": Model(predictions=predictions, posthoc=())}, tmp_path, ("svg",), resamples=50)
    assert sorted(files) == sorted(tmp_path.iterdir())
    contents = {file.stem: json.loads(file.read_text()) for file in files if file.suffix == ".json"}
    assert all(content["figure"] == name for name, content in contents.items())
    lines = contents["reliability_lines"]["data"]
    assert [line["title"] for line in lines] == ["uncalibrated"]
    assert sum(lines[0]["fraction"]) == pytest.approx(1)
    assert sum(contents["confidence"]["data"][0]["correct"]) == int(predictions.correct.sum())
    assert contents["class_map"]["classes"] == 10


def test_saved_report_without_samples_has_reliability_diagrams():
    report = evaluate(pages.sample_predictions(60), posthoc="temperature", intervals=False)
    figures_by_name = drawn_figures(Report.from_dict(report.to_dict(samples=False)), only=())
    assert figures_by_name.keys() == {"reliability", "reliability_lines", "over_under"}
    _, lines = figures_by_name["reliability_lines"]
    assert [line.title for line in lines] == ["uncalibrated", "temperature"]


def test_a_loaded_report_has_the_same_figures_and_page(tmp_path):
    report = evaluate(pages.sample_predictions(200), posthoc="temperature", resamples=100)
    report.save(tmp_path / "report.json")
    loaded = Report.load(tmp_path / "report.json")
    assert report_page(loaded) == report_page(report)
    expected, figures_by_name = (drawn_figures(source, only=()) for source in (report, loaded))
    assert expected.keys() > {"reliability_smooth", "confidence", "risk_coverage"}
    assert {name: data for name, (_, data) in figures_by_name.items()} == {
        name: data for name, (_, data) in expected.items()
    }


def test_too_few_samples_for_a_smooth_curve_have_the_other_figures():
    """Regression: the kernel covers no sample at any point of the curve."""
    names = drawn_figures(
        Model(predictions=Predictions(torch.zeros(3, 3), torch.arange(3)), posthoc=()), only=()
    ).keys()
    assert "reliability_smooth" not in names
    assert {"reliability", "confidence", "risk_coverage"} <= names


def test_many_models_are_spread_over_several_figures():
    predictions = pages.sample_predictions(60, features=None)
    report = evaluate(predictions, intervals=False)
    figure_functions = ("reliability_figure", "reliability_lines_figure")
    figures_by_name = drawn_figures({f"m{n}": Model(report=report) for n in range(7)}, figure_functions)
    assert {"reliability-1", "reliability-2"} < figures_by_name.keys()
    assert [len(data) for name, (_, data) in figures_by_name.items() if name.startswith("reliability-")] == [4, 3]
    for name in ("reliability-1", "reliability_lines"):
        assert layout_errors(figures_by_name[name][0]) == []


def gate_figures(models_with_logs):
    """Return the figures of gates; those of training, which take longer, are not drawn."""
    with pytest.MonkeyPatch.context() as patch:
        draw_only(patch, ("gate_figure",))
        return {name: (figure, data) for name, figure, data in saving._training_figures(models_with_logs)}


def test_gate_figure_includes_every_log_with_a_gate():
    log_without_gate = [{key: record[key] for key in ("epoch", "train", "val")} for record in pages.training_log()]
    figures_by_name = gate_figures(
        {"plain": Model(log=log_without_gate), "gated": Model(log=[{}, *pages.training_log()])}
    )
    figure, data = figures_by_name["gate"]
    assert [curve.name for curve in data.flip_rate] == ["gated"]
    assert data.positive[0].mean == tuple(record["gate"]["positive"] for record in pages.training_log())
    assert data.flip_rate[0].epochs == tuple(range(2, 13))
    assert [panel.get_title() for panel in figure.axes] == ["gated", "flip rate"]
    names = ["a name of some length", *(f"m{n}" for n in range(7))]
    eight_models = gate_figures({name: Model(log=pages.training_log()) for name in names})
    assert [len(eight_models[f"gate-{n}"][1].flip_rate) for n in (1, 2)] == [7, 1]
    assert layout_errors(eight_models["gate-1"][0]) == []
    assert "gate" not in gate_figures({"plain": Model(log=log_without_gate)})
    assert gate_figures({"short": Model(log=pages.training_log(1))})["gate"][1].flip_rate[0].mean == ()


def test_colliding_file_names_are_numbered():
    assert saving._suffixes(["a b", "a/b", "A-b", "…"]) == {
        "a b": "-a-b", "a/b": "-a-b-2", "A-b": "-A-b-3", "…": "-model"
    }  # fmt: skip
    assert saving._suffixes(["only one"]) == {"only one": ""}


@pytest.mark.parametrize(
    "predictions",
    [
        Predictions(torch.tensor([[0.0, 2.0]]), torch.tensor([1]), features=torch.ones(1, 3)),
        pytest.param(
            Predictions(torch.tensor([[3.0, 1.0]] * 8), torch.tensor([0, 1] * 4), features=torch.ones(8, 3)),
            marks=pytest.mark.campaign,
        ),
    ],
    ids=["one sample", "one confidence"],
)
def test_save_figures_accepts_few_and_unusual_samples(predictions):
    figures_by_name = drawn_figures(
        Model(predictions=predictions, posthoc=(), ood={"far": torch.zeros(3, predictions.num_classes)}), resamples=20
    )
    assert "norm" not in figures_by_name
    assert {"reliability", "class_map", "roc"} <= figures_by_name.keys()
    assert {name: errors for name, (figure, _) in figures_by_name.items() if (errors := layout_errors(figure))} == {}


def test_top_label_predictions_have_figures(tmp_path):
    path = tmp_path / "top.csv"
    path.write_text("confidence,prediction,label\n0.9,cat,cat\n0.4,dog,cat\n0.8,dog,dog\n")
    figures_by_name = drawn_figures(
        Model(predictions=read_predictions(path), posthoc=()), ("class_map_figure",), resamples=20
    )
    assert figures_by_name["class_map"][1].names == ("cat", "dog")


@pytest.mark.parametrize("formats", [(), ("gif",), "pdf"])
def test_unknown_formats_raise_before_evaluation(formats, tmp_path):
    with pytest.raises(ValueError, match="formats"):
        figures.save_figures(pages.sample_predictions(60), tmp_path / "x", formats)
    assert not (tmp_path / "x").exists()


def test_all_exported_names_exist():
    for name in figures.__all__:
        assert callable(getattr(figures, name))
    assert set(dir(figures)) >= {"save_figures", "reliability_figure"}
    with pytest.raises(AttributeError, match="nonsense"):
        figures.nonsense  # noqa: B018
