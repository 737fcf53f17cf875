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

from fedlas.evaluation import Report, evaluate
from fedlas.io import read_predictions
from fedlas.predictions import Predictions
from fedlas.report import figures
from fedlas.report.figures import confidence, gate, indicator, ood, reliability, saving, selective, style, training
from fedlas.report.html import report_page
from fedlas.report.model import Model
from report import pages

ALL = {
    "reliability", "reliability_lines", "reliability_smooth", "over_under", "confidence", "risk_coverage", "norm",
    "training", "alpha", "gate", "class_map-sure", "class_map-unsure", "class_map-other", "roc-sure",
    "scores-sure-noise", "scores-sure-street-numbers",
}  # fmt: skip


MODULES = (confidence, gate, indicator, ood, reliability, selective, training)
# Figures that look different for one model: they show its states, those of several models the models.
OF_STATES = (
    "reliability_figure", "reliability_lines_figure", "smooth_reliability_figure", "over_under_figure",
    "confidence_figure", "risk_figure", "norm_figure",
)  # fmt: skip


def keep_only(patch, only):
    """Draw nothing but these figures, because drawing takes most of the time."""
    for module in MODULES:
        for name in [name for name in vars(module) if name.endswith("_figure") and name not in only]:
            patch.setattr(module, name, lambda *_: None)


def drawn(models, only=None, **options):
    """Return the figures that `save_figures` would write, by name, with their data; None for those not in `only`."""
    found = {}

    def keep(figure, data, folder, name, formats):
        assert name not in found
        found[name] = (figure, data)
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "save_with_data", keep)
        if only is not None:
            keep_only(patch, only)
        figures.save_figures(models, "nowhere", **options)
    return found


@pytest.fixture(scope="module")
def models():
    return pages.models()


@pytest.fixture(scope="module")
def several(models):
    found = drawn(models)
    ranks = figures.rank_data({name: [n, n + 1, 2 * n] for n, name in enumerate(("ce", "ls", "fedlas"))}, "ranks")
    return found | {"ranks": (figures.rank_figure(ranks), ranks)}


@pytest.fixture(scope="module")
def alone(models):
    return drawn(models["sure"], only=OF_STATES)


@pytest.fixture(scope="module")
def every(several, alone):
    """All different figures, with names for the messages of assertions."""
    both = {f"{kind} {name}": figure for kind, held in (("several", several), ("alone", alone))
            for name, (figure, _) in held.items()}  # fmt: skip
    return {name: figure for name, figure in both.items() if figure is not None}


def boxes(figure, renderer):
    """What must not overlap nor leave the page: panels with all that belongs to them, legends and titles."""
    panels = [panel for panel in figure.axes if panel.get_visible() and panel.has_data()]
    held = [(f"panel {panel.get_title()!r}", panel.get_tightbbox(renderer)) for panel in panels]
    others = [*figure.legends, *([figure._suptitle] if figure._suptitle is not None else [])]
    return [*held, *((str(one), one.get_window_extent(renderer)) for one in others)]


def complaints(figure):
    """List text that is cut off or too small, and parts that overlap."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    width, height = figure.bbox.size
    found = []
    parts = boxes(figure, renderer)
    for words, box in parts:
        if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1:
            found.append(f"{words} is cut off")
    written = [text for text in figure.findobj(Text) if text.get_text().strip()]
    found += [f"{x.get_text()!r} has {x.get_fontsize()} points" for x in written if not 7 <= x.get_fontsize() <= 8]
    for (_, one), (_, other) in combinations(parts, 2):
        x = min(one.x1, other.x1) - max(one.x0, other.x0)
        y = min(one.y1, other.y1) - max(one.y0, other.y0)
        if x > 2 and y > 2:
            found.append(f"{one} and {other} overlap")
    return found


def test_every_available_figure_is_drawn(several, alone):
    assert several.keys() - {"ranks"} == ALL
    bare = {name.removesuffix("-sure") for name in ALL if name.endswith("-sure") or "-" not in name}
    assert alone.keys() == bare | {"scores-street-numbers", "scores-noise"}


def test_figure_file_names_match_the_overwrite_pattern(several, alone):
    """The pattern decides which existing files may be overwritten."""
    given = pages.model(60)
    report = evaluate(given, intervals=False)
    many = {f"{'a/b ö. ' * 9}{number}": Model(predictions=given, report=report) for number in range(2)}
    logs = {f"{number}": Model(report=report, log=pages.log()) for number in range(8)}
    spread = drawn(logs, only=())
    for names in (several.keys() - {"ranks"}, alone, drawn(many, only=()), spread):
        assert all(re.fullmatch(saving.NAMES, name) for name in names)
    assert {"reliability-2", "gate-2"} <= spread.keys()


@pytest.mark.campaign
def test_text_in_figures_is_legible_and_does_not_overlap(every):
    assert {name: told for name, figure in every.items() if (told := complaints(figure))} == {}


def test_legibility_check_detects_faults():
    with style.figure_of_size(style.COLUMN, 1.5) as figure:
        panel = figure.subplots()
        panel.set_title("a title that is much too long for a column of this width, and goes on")
        panel.set_xlabel("small", fontsize=5)
        figure.legend(panel.plot([0, 1], label="line"), ["over the panel"], loc="center")
    told = " ".join(complaints(figure))
    assert "cut off" in told
    assert "5.0 points" in told
    assert "overlap" in told


def test_figures_are_as_wide_as_a_column_or_a_page(every):
    assert {figure.get_figwidth() for figure in every.values()} == {style.COLUMN, style.PAGE} == {3.3, 6.9}
    assert all(figure.get_figheight() < 9.5 for figure in every.values())


def luminance(colour):
    red, green, blue = colors.to_rgb(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_lines_of_one_panel_are_distinct_in_grey(every):
    seen = 0
    for panel in [panel for figure in every.values() for panel in figure.axes]:
        lines = [line for line in panel.lines if not line.get_label().startswith("_")]
        for one, other in combinations(lines, 2):
            seen += 1
            grey = abs(luminance(one.get_color()) - luminance(other.get_color())) > 0.25
            looks = [(line.get_marker(), line.get_linestyle(), line.get_linewidth()) for line in (one, other)]
            assert grey or looks[0] != looks[1], panel.get_title()
        areas = [area for area in panel.patches if area.get_label() and not area.get_label().startswith("_")]
        fills = [(area.get_hatch(), luminance(area.get_facecolor()[:3])) for area in areas]
        assert len(set(fills)) == len(fills)
    assert seen > 20


def test_forty_lines_differ_in_marker_or_dashes():
    looks = [style.line_style(n) for n in range(40)]
    assert len({(one.marker, str(one.dash)) for one in looks}) == 40
    first = looks[:3]
    assert all(abs(luminance(a.colour) - luminance(b.colour)) > 0.25 for a, b in combinations(first, 2))
    assert luminance(style.UNDER) - luminance(style.OVER) > 0.1


@pytest.mark.parametrize(
    ("text", "wanted"),
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
def test_safe_label_escapes_untrusted_names(text, wanted):
    assert style.safe_label(text) == wanted


@pytest.mark.campaign
def test_hostile_names_give_safe_file_names():
    models, _ = pages.hostile()
    name, model = next(iter(models.items()))
    one = {word: model.ood[word] for word in list(model.ood)[1:2]}
    found = drawn({name: replace(model, ood=one), pages.HOSTILE[9]: Model(report=model.report)}, None)
    assert not [name for name in found if not re.fullmatch(r"[A-Za-z0-9_-]{1,120}", name)]
    assert {name: told for name, (figure, _) in found.items() if figure and (told := complaints(figure))} == {}


def test_figures_are_reproducible_under_any_matplotlib_style(tmp_path):
    given = pages.model(80)
    kept = {}
    for name, own in (("one", {}), ("two", {"font.size": 30, "axes.facecolor": "red", "savefig.bbox": "tight"})):
        with mpl.rc_context(own):
            data = figures.confidence_data(given, "model")  # hatches, dashes, filled steps and a legend
            figure = figures.confidence_figure([data])
            files = figures.save_with_data(figure, data, tmp_path / name, "figure", ("pdf", "png", "svg"))
        kept[name] = {file.suffix: file.read_bytes() for file in files}
    assert kept["one"] == kept["two"]
    pdf, svg = kept["one"][".pdf"], kept["one"][".svg"].decode()
    assert b"CreationDate" not in pdf
    assert b"/Type3" not in pdf
    assert b"/FontFile2" in pdf
    assert ">confidence</text>" in svg
    assert "<dc:date>" not in svg


def test_save_figures_returns_its_files_with_the_drawn_data(tmp_path):
    given = pages.model(60, features=None)
    files = figures.save_figures({"a": Model(predictions=given, posthoc=())}, tmp_path, ("svg",), resamples=50)
    assert sorted(files) == sorted(tmp_path.iterdir())
    read = {file.stem: json.loads(file.read_text()) for file in files if file.suffix == ".json"}
    assert all(held["figure"] == name for name, held in read.items())
    lines = read["reliability_lines"]["data"]
    assert [one["title"] for one in lines] == ["uncalibrated"]
    assert sum(lines[0]["fraction"]) == pytest.approx(1)
    assert sum(read["confidence"]["data"][0]["correct"]) == int(given.correct.sum())
    assert read["class_map"]["classes"] == 10


def test_saved_report_without_samples_has_reliability_diagrams():
    report = evaluate(pages.model(60), posthoc="temperature", intervals=False)
    found = drawn(Report.from_dict(report.to_dict(samples=False)), only=())
    assert found.keys() == {"reliability", "reliability_lines", "over_under"}
    _, lines = found["reliability_lines"]
    assert [one.title for one in lines] == ["uncalibrated", "temperature"]


def test_a_loaded_report_has_the_same_figures_and_page(tmp_path):
    report = evaluate(pages.model(200), posthoc="temperature", resamples=100)
    report.save(tmp_path / "report.json")
    loaded = Report.load(tmp_path / "report.json")
    assert report_page(loaded) == report_page(report)
    fresh, again = (drawn(one, only=()) for one in (report, loaded))
    assert fresh.keys() > {"reliability_smooth", "confidence", "risk_coverage"}
    assert {name: data for name, (_, data) in again.items()} == {name: data for name, (_, data) in fresh.items()}


def test_many_models_are_spread_over_several_figures():
    given = pages.model(60, features=None)
    report = evaluate(given, intervals=False)
    shown = ("reliability_figure", "reliability_lines_figure")
    found = drawn({f"m{n}": Model(report=report) for n in range(7)}, shown)
    assert {"reliability-1", "reliability-2"} < found.keys()
    assert [len(data) for name, (_, data) in found.items() if name.startswith("reliability-")] == [4, 3]
    for name in ("reliability-1", "reliability_lines"):
        assert complaints(found[name][0]) == []


def gates_of(models):
    """Return the figures of gates; those of training, which take longer, are not drawn."""
    with pytest.MonkeyPatch.context() as patch:
        keep_only(patch, ("gate_figure",))
        return {name: (figure, data) for name, figure, data in saving._training_figures(models)}


def test_gate_figure_includes_every_log_with_a_gate():
    bare = [{word: one[word] for word in ("epoch", "train", "val")} for one in pages.log()]
    found = gates_of({"plain": Model(log=bare), "gated": Model(log=[{}, *pages.log()])})
    figure, data = found["gate"]
    assert [one.name for one in data.flip_rate] == ["gated"]
    assert data.positive[0].mean == tuple(one["gate"]["positive"] for one in pages.log())
    assert data.flip_rate[0].epochs == tuple(range(2, 13))
    assert [panel.get_title() for panel in figure.axes] == ["gated", "flip rate"]
    names = ["a name of some length", *(f"m{n}" for n in range(7))]
    many = gates_of({name: Model(log=pages.log()) for name in names})
    assert [len(many[f"gate-{n}"][1].flip_rate) for n in (1, 2)] == [7, 1]
    assert complaints(many["gate-1"][0]) == []
    assert "gate" not in gates_of({"plain": Model(log=bare)})
    assert gates_of({"short": Model(log=pages.log(1))})["gate"][1].flip_rate[0].mean == ()


def test_colliding_file_names_are_numbered():
    assert saving._suffixes(["a b", "a/b", "A-b", "…"]) == {
        "a b": "-a-b", "a/b": "-a-b-2", "A-b": "-A-b-3", "…": "-model"
    }  # fmt: skip
    assert saving._suffixes(["only one"]) == {"only one": ""}


@pytest.mark.parametrize(
    "given",
    [
        Predictions(torch.tensor([[0.0, 2.0]]), torch.tensor([1]), features=torch.ones(1, 3)),
        pytest.param(
            Predictions(torch.tensor([[3.0, 1.0]] * 8), torch.tensor([0, 1] * 4), features=torch.ones(8, 3)),
            marks=pytest.mark.campaign,
        ),
    ],
    ids=["one sample", "one confidence"],
)
def test_save_figures_accepts_few_and_unusual_samples(given):
    found = drawn(Model(predictions=given, posthoc=(), ood={"far": torch.zeros(3, given.num_classes)}), resamples=20)
    assert "norm" not in found
    assert {"reliability", "class_map", "roc"} <= found.keys()
    assert {name: told for name, (figure, _) in found.items() if (told := complaints(figure))} == {}


def test_top_label_predictions_have_figures(tmp_path):
    path = tmp_path / "top.csv"
    path.write_text("confidence,prediction,label\n0.9,cat,cat\n0.4,dog,cat\n0.8,dog,dog\n")
    found = drawn(Model(predictions=read_predictions(path), posthoc=()), ("class_map_figure",), resamples=20)
    assert found["class_map"][1].names == ("cat", "dog")


@pytest.mark.parametrize("formats", [(), ("gif",), "pdf"])
def test_unknown_formats_raise_before_evaluation(formats, tmp_path):
    with pytest.raises(ValueError, match="formats"):
        figures.save_figures(pages.model(60), tmp_path / "x", formats)
    assert not (tmp_path / "x").exists()


def test_all_exported_names_exist():
    for name in figures.__all__:
        assert callable(getattr(figures, name))
    assert set(dir(figures)) >= {"save_figures", "reliability_figure"}
    with pytest.raises(AttributeError, match="nonsense"):
        figures.nonsense  # noqa: B018
