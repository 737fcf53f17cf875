"""Reliability, confidence, over- and under-confidence, risk: data against plain loops, figures against their data."""

import math
import re

import pytest
import torch
from matplotlib import colors
from scipy.stats import beta

from fedlas import metrics
from fedlas.evaluation import evaluate
from fedlas.predictions import Predictions
from fedlas.report.figures import (
    Reliability,
    SmoothReliability,
    class_map_data,
    class_map_figure,
    confidence_data,
    confidence_figure,
    over_under_data,
    over_under_figure,
    reliability_data,
    reliability_figure,
    reliability_lines_figure,
    risk_data,
    risk_figure,
    smooth_reliability_data,
    smooth_reliability_figure,
)
from report import pages


def samples(given):
    """Confidence and correctness of each sample, as plain numbers."""
    return list(zip(given.confidence.double().tolist(), given.correct.double().tolist(), strict=True))


def in_bins(given, bins=15):
    """For each filled bin (lower, upper]: its number and its samples."""
    found = {}
    for confidence, correct in samples(given):
        found.setdefault(max(0, math.ceil(confidence * bins) - 1), []).append((confidence, correct))
    return dict(sorted(found.items()))


def reliability(given, title="one", level=0.95):
    return reliability_data(metrics.histogram(given).bins, float(metrics.ece(given)), title, level)


def labelled(panel):
    """The lines of a panel that a legend names."""
    return {line.get_label(): line for line in panel.lines if not line.get_label().startswith("_")}


@pytest.mark.parametrize("level", [0.95, 0.8])
def test_filled_bins_have_exact_ranges_and_empty_ones_are_left_out(level):
    given = pages.model(300)
    data, filled = reliability(given, level=level), in_bins(given)
    assert len(data.confidence) == len(filled) < 15
    for place, (number, inside) in enumerate(filled.items()):
        n, right = len(inside), sum(correct for _, correct in inside)
        assert data.lower[place] == pytest.approx(number / 15)
        assert data.upper[place] == pytest.approx((number + 1) / 15)
        assert data.confidence[place] == pytest.approx(sum(c for c, _ in inside) / n)
        assert data.accuracy[place] == pytest.approx(right / n)
        assert data.fraction[place] == pytest.approx(n / 300)
        low = 0.0 if right == 0 else beta.ppf((1 - level) / 2, right, n - right + 1)
        high = 1.0 if right == n else beta.ppf((1 + level) / 2, right + 1, n - right)
        assert (data.low[place], data.high[place]) == pytest.approx((low, high), abs=1e-9)


def test_bars_end_at_accuracy_and_hatches_at_confidence():
    data = reliability(pages.model(300))
    above, below = reliability_figure({"model": [data]}).axes
    solid = [bar for bar in above.patches if bar.get_hatch() is None]
    hatched = [bar for bar in above.patches if bar.get_hatch() and bar.get_height()]
    assert [bar.get_height() for bar in solid] == list(data.accuracy)
    assert [bar.get_x() for bar in solid] == pytest.approx(data.lower)
    assert {bar.get_hatch()[0] for bar in hatched} == {"/", "\\"}
    for bar, confidence, accuracy in zip(hatched, data.confidence, data.accuracy, strict=True):
        assert (bar.get_y(), bar.get_y() + bar.get_height()) == pytest.approx(sorted((accuracy, confidence)))
        assert (bar.get_hatch()[0] == "/") == (confidence > accuracy)
    ranges = [segment[:, 1].tolist() for segment in above.collections[0].get_segments()]
    assert ranges == [list(pair) for pair in zip(data.low, data.high, strict=True)]
    assert [bar.get_height() for bar in below.patches] == list(data.fraction)
    assert (above.get_xlim(), above.get_ylim(), below.get_ylim()[0]) == ((0, 1), (0, 1), 0)
    assert above.get_ylabel() == "model\naccuracy"


def test_panels_that_share_an_axis_have_room_for_the_tallest_bar():
    spread, peaked = reliability(pages.model(300, scale=0.4)), reliability(pages.model(300, scale=9.0))
    assert max(peaked.fraction) > 1.5 * max(spread.fraction)
    figure = reliability_figure({"": [spread, peaked]})
    assert figure.axes[2].get_ylim()[1] > max(peaked.fraction)
    spread, peaked = (confidence_data(pages.model(300, scale=s), "x") for s in (0.4, 9.0))
    axes = confidence_figure([spread, peaked]).axes
    assert axes[0].get_ylim() == axes[1].get_ylim()
    tallest = max(max(patch.get_data().values) for panel in axes for patch in panel.patches)
    assert axes[0].get_ylim()[1] > tallest


def test_rows_of_different_lengths_label_their_lowest_panels():
    one = reliability(pages.model(300))
    figure = reliability_figure({"a": [one, one, one], "b": [one]})
    places = {place.get_title() for place in figure.axes if place.axison}
    assert places == {f"one\nECE {100 * one.ece:.2f} %", ""}
    named = [panel for panel in figure.axes if panel.axison and panel.get_xlabel() == "confidence"]
    assert len(named) == 3
    assert sum(panel.axison for panel in figure.axes) == 8


def test_several_models_are_lines_in_one_panel_with_bands():
    models = [reliability(pages.model(300, scale=scale), name) for name, scale in (("a", 2.0), ("b", 0.4))]
    figure = reliability_lines_figure(models)
    panel, below = figure.axes
    drawn = labelled(panel)
    assert list(drawn) == [f"{one.title}, ECE {100 * one.ece:.2f} %" for one in models]
    for line, band, one in zip(drawn.values(), panel.collections, models, strict=True):
        assert list(line.get_xdata()) == list(one.confidence)
        assert list(line.get_ydata()) == list(one.accuracy)
        corners = {tuple(point) for point in band.get_paths()[0].vertices.tolist()}
        assert {*zip(one.confidence, one.low, strict=True), *zip(one.confidence, one.high, strict=True)} <= corners
    first, second = drawn.values()
    assert first.get_marker() != second.get_marker()
    assert first.get_linestyle() != second.get_linestyle()
    for patch, one in zip(below.patches, models, strict=True):
        values, edges, _ = patch.get_data()
        filled = {edge: value for edge, value in zip(edges, values, strict=False) if value}
        assert list(filled.values()) == list(one.fraction)
        assert list(filled) == pytest.approx(one.lower)
    assert (panel.get_xlim(), panel.get_ylim()) == ((0, 1), (0, 1))
    assert not reliability_lines_figure([models[0]] * 5).axes[0].collections  # five bands would hide each other


def test_empty_bins_are_gaps_and_single_bins_have_an_interval():
    gap = Reliability("gap", (0.1, 0.9), (0.5, 0.5), (0.3, 0.7), 0.4, (0.0, 0.8), (0.2, 1.0), (0.1, 0.2), (0.9, 0.8))
    values, edges, _ = reliability_lines_figure([gap]).axes[1].patches[0].get_data()
    assert (list(values), list(edges)) == ([0.3, 0, 0.7], [0, 0.2, 0.8, 1])
    alone = Reliability("one", (0.9,), (1.0,), (1.0,), 0.1, (0.8,), (1.0,), (0.025,), (1.0,))
    panel = reliability_lines_figure([alone]).axes[0]
    assert panel.collections[-1].get_segments()[0].tolist() == [[0.9, 0.025], [0.9, 1.0]]


def test_smooth_diagram_equals_a_windowed_gap():
    given = pages.model(300)
    data = smooth_reliability_data(given, "one")
    assert data.smooth_ece == pytest.approx(float(metrics.smooth_ece(given)))
    width = data.bandwidth
    for place in range(0, len(data.confidence), 9):
        t = data.confidence[place]
        weights = [
            sum(math.exp(-(((t - sign * c - shift) / width) ** 2) / 2) for sign in (1, -1) for shift in (-2, 0, 2))
            for c, _ in samples(given)
        ]
        pairs = list(zip(weights, samples(given), strict=True))
        gap = sum(w * (c - right) for w, (c, right) in pairs) / sum(weights)
        assert data.accuracy[place] == pytest.approx(min(1, max(0, t - gap)), abs=2e-3)
        assert data.density[place] == pytest.approx(sum(weights) / (math.sqrt(2 * math.pi) * width * 300), rel=1e-2)
        assert data.samples[place] == pytest.approx(sum(weights) ** 2 / sum(w * w for w in weights), rel=2e-2)
        assert data.low[place] <= data.accuracy[place] <= data.high[place]


def test_smooth_curves_are_cut_where_there_are_no_samples():
    places = (0.1, 0.11, 0.12, 0.8, 0.81)
    flat = (0.5,) * 5
    data = SmoothReliability("cut", places, flat, (0.4,) * 5, (0.6,) * 5, (1.0,) * 5, (9.0,) * 5, 0.01, 0.2)
    whole = smooth_reliability_data(pages.model(300), "whole")
    panel, below = smooth_reliability_figure([data, whole]).axes
    drawn = [list(line.get_xdata()) for line in panel.lines[1:]]  # after the diagonal
    assert drawn == [[0.1, 0.11, 0.12], [0.8, 0.81], list(whole.confidence)]
    assert list(labelled(panel)) == ["cut, smooth ECE 20.00 %", f"whole, smooth ECE {100 * whole.smooth_ece:.2f} %"]
    assert list(below.lines[-1].get_ydata()) == list(whole.density)
    assert len(panel.collections) == 3


def test_histograms_count_correct_and_incorrect_predictions():
    given = pages.model(300)
    data = confidence_data(given, "one")
    for kind, wanted in ((data.correct, 1), (data.incorrect, 0)):
        inside = in_bins(given, 25)
        assert list(kind) == [sum(right == wanted for _, right in inside.get(n, ())) for n in range(25)]
    assert data.confidence == pytest.approx(sum(c for c, _ in samples(given)) / 300)
    assert data.accuracy == pytest.approx(sum(right for _, right in samples(given)) / 300)
    (panel,) = confidence_figure([data]).axes
    right, wrong = panel.patches
    assert list(right.get_data().values) == pytest.approx([n / sum(data.correct) for n in data.correct])
    assert list(wrong.get_data().values) == pytest.approx([n / sum(data.incorrect) for n in data.incorrect])
    assert right.get_hatch() is None
    assert wrong.get_hatch()
    drawn = labelled(panel)
    assert drawn["mean confidence"].get_xdata()[0] == data.confidence
    assert drawn["accuracy"].get_xdata()[0] == data.accuracy
    assert drawn["accuracy"].get_linestyle() != drawn["mean confidence"].get_linestyle()
    assert re.search(f"{int(sum(data.correct))} .*{int(sum(data.incorrect))} ", panel.get_title())


def test_over_and_under_confidence_are_bars_on_opposite_sides():
    models = {"sure": pages.model(300), "unsure": pages.model(300, scale=0.4)}
    data = []
    for name, given in models.items():
        report = evaluate(given, resamples=50)
        data.append(over_under_data(report.before, name))
        gaps = [sum(c - right for c, right in inside) / 300 for inside in in_bins(given).values()]
        assert data[-1].over == pytest.approx(sum(gap for gap in gaps if gap > 0))
        assert data[-1].under == pytest.approx(-sum(gap for gap in gaps if gap < 0))
        interval = report["over_ece"].interval
        assert data[-1].over_interval == (interval.low, interval.high)
    (panel,) = over_under_figure(data).axes
    widths = [bar.get_width() for bar in panel.patches]
    assert widths == pytest.approx([100 * x for one in data for x in (one.over, -one.under)])
    assert panel.patches[0].get_hatch() != panel.patches[1].get_hatch()
    assert [label.get_text() for label in panel.get_yticklabels()] == ["sure", "unsure"]
    ends = [list(line.get_xdata()) for line in panel.lines[:4]]
    assert ends[0] == pytest.approx([100 * end for end in data[0].over_interval])
    assert ends[3] == pytest.approx([-100 * end for end in data[1].under_interval])
    low, high = panel.get_xlim()
    assert low == -high
    assert high > max(abs(end) for pair in ends for end in pair)
    top, bottom = panel.get_ylim()
    assert top > bottom  # the first model stands above


def test_over_under_figure_without_intervals_has_no_error_bars():
    data = over_under_data(evaluate(pages.model(100), intervals=False).before, "x")
    assert (data.over_interval, data.under_interval) == (None, None)
    assert len(over_under_figure([data]).axes[0].lines) == 1  # the line at zero


def test_class_map_shows_the_gap_of_each_class_and_confidence():
    given = pages.model(300, class_names=pages.CIFAR10)
    data = class_map_data(given, "one")
    assert data.names == pages.CIFAR10
    answers = given.prediction.tolist()
    for k in range(10):
        for n in range(10):
            inside = [
                (c, right)
                for (c, right), answer in zip(samples(given), answers, strict=True)
                if answer == k and n / 10 < c <= (n + 1) / 10
            ]
            assert data.samples[k][n] == len(inside)
            gap = sum(c - right for c, right in inside) / len(inside) if inside else None
            assert data.gap[k][n] == (None if gap is None else pytest.approx(gap, rel=1e-4, abs=1e-9))
    (panel,) = class_map_figure(data).axes
    squares = {(round(s.get_y() + s.get_height() / 2 - 0.5), round(s.get_x() + s.get_width() / 2 - 0.5)): s
               for s in panel.patches}  # fmt: skip
    filled = {(k, n): gap for k, row in enumerate(data.gap) for n, gap in enumerate(row) if gap is not None}
    assert squares.keys() == filled.keys()
    for place, gap in filled.items():
        area = squares[place].get_width() * squares[place].get_height()
        assert area == pytest.approx(0.92**2 * min(1, abs(gap) / 0.5))
        assert (squares[place].get_facecolor() != colors.to_rgba("white")) == (gap > 0)
    assert [label.get_text() for label in panel.get_yticklabels()] == list(pages.CIFAR10)


def test_class_map_shows_the_most_miscalibrated_classes():
    given = pages.model(600, classes=40)
    data = class_map_data(given, "one", most=7)
    off = {}
    for k in range(40):
        mine = given[given.prediction == k] if bool((given.prediction == k).any()) else None
        inside = {} if mine is None else in_bins(mine, 10)
        off[k] = sum(abs(sum(c - right for c, right in one)) for one in inside.values())
    wanted = sorted(sorted(off, key=off.get, reverse=True)[:7])
    assert data.names == tuple(map(str, wanted))
    assert re.search("7 of .*40", class_map_figure(data).get_suptitle())


def test_risk_curve_equals_error_rates_of_the_most_confident_samples():
    given = pages.model(120)
    data = risk_data(given, "one")
    order = sorted(samples(given), reverse=True)
    assert len({c for c, _ in order}) == 120
    wrong, risks = 0.0, []
    for k, (_, right) in enumerate(order, start=1):
        wrong += 1 - right
        risks.append(wrong / k)
    assert data.coverage == pytest.approx([k / 120 for k in range(1, 121)], rel=1e-4)
    assert data.risk == pytest.approx(risks, rel=1e-4)
    assert data.aurc == pytest.approx(sum(risks) / 120)
    hits = sum(right for _, right in order)
    assert data.best == pytest.approx([max(0, k - hits) / k for k in range(1, 121)], rel=1e-4)
    other = risk_data(pages.model(120, seed=3), "other")
    (panel,) = risk_figure([data, other]).axes
    lines = labelled(panel)
    assert list(lines)[:2] == [f"{one.title}, AURC {100 * one.aurc:.2f} %" for one in (data, other)]
    for line, one in zip(lines.values(), (data, other), strict=False):
        assert list(line.get_ydata()) == pytest.approx([100 * risk for risk in one.risk])
    assert list(panel.lines[0].get_ydata()) == pytest.approx([100 * risk for risk in data.best])
    assert panel.lines[0].get_linewidth() < panel.lines[1].get_linewidth()


@pytest.mark.parametrize(
    "given",
    [
        Predictions(torch.tensor([[0.0, 2.0]]), torch.tensor([1])),
        pytest.param(Predictions(torch.tensor([[3.0, 1.0]] * 8), torch.tensor([0, 1] * 4)), marks=pytest.mark.campaign),
        Predictions(torch.tensor([[3.0, 1.0], [9.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 0, 0])),
        Predictions(torch.tensor([[3.0, 1.0], [9.0, 0.0], [2.0, 0.0]]), torch.tensor([1, 1, 1])),
        Predictions(torch.zeros(5, 1), torch.zeros(5, dtype=torch.long)),
        Predictions(torch.tensor([[3.0, 1.0], [0.0, 2.0]]), torch.tensor([[0.9, 0.1], [0.4, 0.6]])),
    ],
    ids=["one sample", "one confidence", "no errors", "all wrong", "one class", "soft labels"],
)
def test_figures_of_few_and_unusual_samples_are_drawn(given):
    one = reliability(given)
    figures = [
        reliability_figure({"": [one]}),
        reliability_lines_figure([one]),
        smooth_reliability_figure([smooth_reliability_data(given, "x")]),
        confidence_figure([confidence_data(given, "x")]),
        over_under_figure([over_under_data(evaluate(given, intervals=False).before, "x")]),
        class_map_figure(class_map_data(given, "x")),
        risk_figure([risk_data(given, "x")]),
    ]
    for figure in figures:
        figure.draw_without_rendering()
        for panel in figure.axes:
            assert all(math.isfinite(end) for end in (*panel.get_xlim(), *panel.get_ylim()))
            assert panel.get_ylim()[0] != panel.get_ylim()[1]
