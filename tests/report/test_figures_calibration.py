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


def samples(predictions):
    """Confidence and correctness of each sample, as plain numbers."""
    return list(zip(predictions.confidence.double().tolist(), predictions.correct.double().tolist(), strict=True))


def samples_in_bins(predictions, bins=15):
    """For each filled bin (lower, upper]: its number and its samples."""
    samples_by_bin = {}
    for confidence, correct in samples(predictions):
        samples_by_bin.setdefault(max(0, math.ceil(confidence * bins) - 1), []).append((confidence, correct))
    return dict(sorted(samples_by_bin.items()))


def reliability(predictions, title="one", level=0.95):
    return reliability_data(metrics.histogram(predictions).bins, float(metrics.ece(predictions)), title, level)


def legend_lines(panel):
    """The lines of a panel that a legend names."""
    return {line.get_label(): line for line in panel.lines if not line.get_label().startswith("_")}


@pytest.mark.parametrize("level", [0.95, 0.8])
def test_filled_bins_have_exact_ranges_and_empty_ones_are_left_out(level):
    predictions = pages.sample_predictions(300)
    data, expected_bins = reliability(predictions, level=level), samples_in_bins(predictions)
    assert len(data.confidence) == len(expected_bins) < 15
    for index, (number, bin_samples) in enumerate(expected_bins.items()):
        n, correct_count = len(bin_samples), sum(correct for _, correct in bin_samples)
        assert data.lower[index] == pytest.approx(number / 15)
        assert data.upper[index] == pytest.approx((number + 1) / 15)
        assert data.confidence[index] == pytest.approx(sum(c for c, _ in bin_samples) / n)
        assert data.accuracy[index] == pytest.approx(correct_count / n)
        assert data.fraction[index] == pytest.approx(n / 300)
        low = 0.0 if correct_count == 0 else beta.ppf((1 - level) / 2, correct_count, n - correct_count + 1)
        high = 1.0 if correct_count == n else beta.ppf((1 + level) / 2, correct_count + 1, n - correct_count)
        assert (data.low[index], data.high[index]) == pytest.approx((low, high), abs=1e-9)


def test_bars_end_at_accuracy_and_hatches_at_confidence():
    data = reliability(pages.sample_predictions(300))
    accuracy_panel, histogram_panel = reliability_figure({"model": [data]}).axes
    assert accuracy_panel.get_title() == f"one\nECE {100 * data.ece:.2f} %"
    assert list(accuracy_panel.lines[1].get_xdata()) == list(data.confidence)
    solid = [bar for bar in accuracy_panel.patches if bar.get_hatch() is None]
    hatched = [bar for bar in accuracy_panel.patches if bar.get_hatch() and bar.get_height()]
    assert [bar.get_height() for bar in solid] == list(data.accuracy)
    assert [bar.get_x() for bar in solid] == pytest.approx(data.lower)
    assert {bar.get_hatch()[0] for bar in hatched} == {"/", "\\"}
    for bar, confidence, accuracy in zip(hatched, data.confidence, data.accuracy, strict=True):
        assert (bar.get_y(), bar.get_y() + bar.get_height()) == pytest.approx(sorted((accuracy, confidence)))
        assert (bar.get_hatch()[0] == "/") == (confidence > accuracy)
    ranges = [segment[:, 1].tolist() for segment in accuracy_panel.collections[0].get_segments()]
    assert ranges == [list(pair) for pair in zip(data.low, data.high, strict=True)]
    assert [bar.get_height() for bar in histogram_panel.patches] == list(data.fraction)
    assert (accuracy_panel.get_xlim(), accuracy_panel.get_ylim(), histogram_panel.get_ylim()[0]) == ((0, 1), (0, 1), 0)
    assert accuracy_panel.get_ylabel() == "model\naccuracy"


def test_panels_that_share_an_axis_have_room_for_the_tallest_bar():
    flat = reliability(pages.sample_predictions(300, scale=0.4))
    peaked = reliability(pages.sample_predictions(300, scale=9.0))
    assert max(peaked.fraction) > 1.5 * max(flat.fraction)
    figure = reliability_figure({"": [flat, peaked]})
    assert figure.axes[2].get_ylim()[1] > max(peaked.fraction)
    flat, peaked = (confidence_data(pages.sample_predictions(300, scale=s), "x") for s in (0.4, 9.0))
    axes = confidence_figure([flat, peaked]).axes
    assert axes[0].get_ylim() == axes[1].get_ylim()
    tallest = max(max(patch.get_data().values) for panel in axes for patch in panel.patches)
    assert axes[0].get_ylim()[1] > tallest


def test_rows_of_different_lengths_label_their_lowest_panels():
    diagram = reliability(pages.sample_predictions(300))
    figure = reliability_figure({"a": [diagram, diagram, diagram], "b": [diagram]})
    titles = {axes.get_title() for axes in figure.axes if axes.axison}
    assert titles == {f"one\nECE {100 * diagram.ece:.2f} %", ""}
    labelled_panels = [panel for panel in figure.axes if panel.axison and panel.get_xlabel() == "confidence"]
    assert len(labelled_panels) == 3
    assert sum(panel.axison for panel in figure.axes) == 8


def test_several_models_are_lines_in_one_panel_with_bands():
    models = [reliability(pages.sample_predictions(300, scale=scale), name) for name, scale in (("a", 2.0), ("b", 0.4))]
    figure = reliability_lines_figure(models)
    panel, histogram_panel = figure.axes
    lines = legend_lines(panel)
    assert list(lines) == [f"{model.title}, ECE {100 * model.ece:.2f} %" for model in models]
    for line, band, model in zip(lines.values(), panel.collections, models, strict=True):
        assert list(line.get_xdata()) == list(model.confidence)
        assert list(line.get_ydata()) == list(model.accuracy)
        corners = {tuple(point) for point in band.get_paths()[0].vertices.tolist()}
        assert {
            *zip(model.confidence, model.low, strict=True),
            *zip(model.confidence, model.high, strict=True),
        } <= corners
    first, second = lines.values()
    assert first.get_marker() != second.get_marker()
    assert first.get_linestyle() != second.get_linestyle()
    for patch, model in zip(histogram_panel.patches, models, strict=True):
        values, edges, _ = patch.get_data()
        non_empty_steps = {edge: value for edge, value in zip(edges, values, strict=False) if value}
        assert list(non_empty_steps.values()) == list(model.fraction)
        assert list(non_empty_steps) == pytest.approx(model.lower)
    assert (panel.get_xlim(), panel.get_ylim()) == ((0, 1), (0, 1))
    assert not reliability_lines_figure([models[0]] * 5).axes[0].collections  # five bands would hide each other


def test_empty_bins_are_gaps_and_single_bins_have_an_interval():
    with_gap = Reliability(
        "gap", (0.1, 0.9), (0.5, 0.5), (0.3, 0.7), 0.4, (0.0, 0.8), (0.2, 1.0), (0.1, 0.2), (0.9, 0.8)
    )
    values, edges, _ = reliability_lines_figure([with_gap]).axes[1].patches[0].get_data()
    assert (list(values), list(edges)) == ([0.3, 0, 0.7], [0, 0.2, 0.8, 1])
    single_bin = Reliability("one", (0.9,), (1.0,), (1.0,), 0.1, (0.8,), (1.0,), (0.025,), (1.0,))
    panel = reliability_lines_figure([single_bin]).axes[0]
    assert panel.collections[-1].get_segments()[0].tolist() == [[0.9, 0.025], [0.9, 1.0]]


def test_smooth_diagram_equals_a_windowed_gap():
    predictions = pages.sample_predictions(300)
    data = smooth_reliability_data(predictions, "one")
    assert data.smooth_ece == pytest.approx(float(metrics.smooth_ece(predictions)))
    width = data.bandwidth
    for index in range(0, len(data.confidence), 9):
        t = data.confidence[index]
        weights = [
            sum(math.exp(-(((t - sign * c - shift) / width) ** 2) / 2) for sign in (1, -1) for shift in (-2, 0, 2))
            for c, _ in samples(predictions)
        ]
        pairs = list(zip(weights, samples(predictions), strict=True))
        gap = sum(w * (c - correct) for w, (c, correct) in pairs) / sum(weights)
        assert data.accuracy[index] == pytest.approx(min(1, max(0, t - gap)), abs=2e-3)
        assert data.density[index] == pytest.approx(sum(weights) / (math.sqrt(2 * math.pi) * width * 300), rel=1e-2)
        assert data.samples[index] == pytest.approx(sum(weights) ** 2 / sum(w * w for w in weights), rel=2e-2)
        assert data.low[index] <= data.accuracy[index] <= data.high[index]


def test_smooth_curves_are_cut_where_there_are_no_samples():
    confidences = (0.1, 0.11, 0.12, 0.8, 0.81)
    flat = (0.5,) * 5
    data = SmoothReliability("cut", confidences, flat, (0.4,) * 5, (0.6,) * 5, (1.0,) * 5, (9.0,) * 5, 0.01, 0.2)
    uncut = smooth_reliability_data(pages.sample_predictions(300), "whole")
    panel, density_panel = smooth_reliability_figure([data, uncut]).axes
    segments = [list(line.get_xdata()) for line in panel.lines[1:]]  # after the diagonal
    assert segments == [[0.1, 0.11, 0.12], [0.8, 0.81], list(uncut.confidence)]
    assert list(legend_lines(panel)) == ["cut, smooth ECE 20.00 %", f"whole, smooth ECE {100 * uncut.smooth_ece:.2f} %"]
    assert list(density_panel.lines[-1].get_ydata()) == list(uncut.density)
    assert len(panel.collections) == 3


def test_histograms_count_correct_and_incorrect_predictions():
    predictions = pages.sample_predictions(300)
    data = confidence_data(predictions, "one")
    for counts, is_correct in ((data.correct, 1), (data.incorrect, 0)):
        samples_by_bin = samples_in_bins(predictions, 25)
        assert list(counts) == [
            sum(correct == is_correct for _, correct in samples_by_bin.get(n, ())) for n in range(25)
        ]
    assert data.confidence == pytest.approx(sum(c for c, _ in samples(predictions)) / 300)
    assert data.accuracy == pytest.approx(sum(correct for _, correct in samples(predictions)) / 300)
    (panel,) = confidence_figure([data]).axes
    correct, incorrect = panel.patches
    assert list(correct.get_data().values) == pytest.approx([n / sum(data.correct) for n in data.correct])
    assert list(incorrect.get_data().values) == pytest.approx([n / sum(data.incorrect) for n in data.incorrect])
    assert correct.get_hatch() is None
    assert incorrect.get_hatch()
    lines = legend_lines(panel)
    assert lines["mean confidence"].get_xdata()[0] == data.confidence
    assert lines["accuracy"].get_xdata()[0] == data.accuracy
    assert lines["accuracy"].get_linestyle() != lines["mean confidence"].get_linestyle()
    assert re.search(f"{int(sum(data.correct))} .*{int(sum(data.incorrect))} ", panel.get_title())


def test_over_and_under_confidence_are_bars_on_opposite_sides():
    models = {"sure": pages.sample_predictions(300), "unsure": pages.sample_predictions(300, scale=0.4)}
    data = []
    for name, predictions in models.items():
        report = evaluate(predictions, resamples=50)
        data.append(over_under_data(report.before, name))
        gaps = [
            sum(c - correct for c, correct in bin_samples) / 300
            for bin_samples in samples_in_bins(predictions).values()
        ]
        assert data[-1].over == pytest.approx(sum(gap for gap in gaps if gap > 0))
        assert data[-1].under == pytest.approx(-sum(gap for gap in gaps if gap < 0))
        interval = report["over_ece"].interval
        assert data[-1].over_interval == (interval.low, interval.high)
    (panel,) = over_under_figure(data).axes
    widths = [bar.get_width() for bar in panel.patches]
    assert widths == pytest.approx([100 * x for model_data in data for x in (model_data.over, -model_data.under)])
    assert panel.patches[0].get_hatch() != panel.patches[1].get_hatch()
    assert [label.get_text() for label in panel.get_yticklabels()] == ["sure", "unsure"]
    error_bars = [list(line.get_xdata()) for line in panel.lines[:4]]
    assert error_bars[0] == pytest.approx([100 * end for end in data[0].over_interval])
    assert error_bars[3] == pytest.approx([-100 * end for end in data[1].under_interval])
    low, high = panel.get_xlim()
    assert low == -high
    assert high > max(abs(end) for pair in error_bars for end in pair)
    top, bottom = panel.get_ylim()
    assert top > bottom  # the first model is at the top


def test_over_under_figure_without_intervals_has_no_error_bars():
    data = over_under_data(evaluate(pages.sample_predictions(100), intervals=False).before, "x")
    assert (data.over_interval, data.under_interval) == (None, None)
    assert len(over_under_figure([data]).axes[0].lines) == 1  # the line at zero


def test_class_map_shows_the_gap_of_each_class_and_confidence():
    predictions = pages.sample_predictions(300, class_names=pages.CIFAR10)
    data = class_map_data(predictions, "one")
    assert data.names == pages.CIFAR10
    predicted = predictions.prediction.tolist()
    for k in range(10):
        for n in range(10):
            cell_samples = [
                (c, correct)
                for (c, correct), prediction in zip(samples(predictions), predicted, strict=True)
                if prediction == k and n / 10 < c <= (n + 1) / 10
            ]
            assert data.samples[k][n] == len(cell_samples)
            gap = sum(c - correct for c, correct in cell_samples) / len(cell_samples) if cell_samples else None
            assert data.gap[k][n] == (None if gap is None else pytest.approx(gap, rel=1e-4, abs=1e-9))
    (panel,) = class_map_figure(data).axes
    squares = {(round(s.get_y() + s.get_height() / 2 - 0.5), round(s.get_x() + s.get_width() / 2 - 0.5)): s
               for s in panel.patches}  # fmt: skip
    expected_gaps = {(k, n): gap for k, row in enumerate(data.gap) for n, gap in enumerate(row) if gap is not None}
    assert squares.keys() == expected_gaps.keys()
    for cell, gap in expected_gaps.items():
        area = squares[cell].get_width() * squares[cell].get_height()
        assert area == pytest.approx(0.92**2 * min(1, abs(gap) / 0.5))
        assert (squares[cell].get_facecolor() != colors.to_rgba("white")) == (gap > 0)
    assert [label.get_text() for label in panel.get_yticklabels()] == list(pages.CIFAR10)


def test_class_map_shows_the_most_miscalibrated_classes():
    predictions = pages.sample_predictions(600, classes=40)
    data = class_map_data(predictions, "one", most=7)
    class_errors = {}
    for k in range(40):
        class_predictions = (
            predictions[predictions.prediction == k] if bool((predictions.prediction == k).any()) else None
        )
        samples_by_bin = {} if class_predictions is None else samples_in_bins(class_predictions, 10)
        class_errors[k] = sum(
            abs(sum(c - correct for c, correct in bin_samples)) for bin_samples in samples_by_bin.values()
        )
    expected_classes = sorted(sorted(class_errors, key=class_errors.get, reverse=True)[:7])
    assert data.names == tuple(map(str, expected_classes))
    assert re.search("7 of .*40", class_map_figure(data).get_suptitle())


def test_risk_curve_equals_error_rates_of_the_most_confident_samples():
    predictions = pages.sample_predictions(120)
    data = risk_data(predictions, "one")
    order = sorted(samples(predictions), reverse=True)
    assert len({c for c, _ in order}) == 120
    error_count, risks = 0.0, []
    for k, (_, correct) in enumerate(order, start=1):
        error_count += 1 - correct
        risks.append(error_count / k)
    assert data.coverage == pytest.approx([k / 120 for k in range(1, 121)], rel=1e-4)
    assert data.risk == pytest.approx(risks, rel=1e-4)
    assert data.aurc == pytest.approx(sum(risks) / 120)
    correct_count = sum(correct for _, correct in order)
    assert data.best == pytest.approx([max(0, k - correct_count) / k for k in range(1, 121)], rel=1e-4)
    other = risk_data(pages.sample_predictions(120, seed=3), "other")
    (panel,) = risk_figure([data, other]).axes
    lines = legend_lines(panel)
    assert list(lines)[:2] == [f"{curve.title}, AURC {100 * curve.aurc:.2f} %" for curve in (data, other)]
    for line, curve in zip(lines.values(), (data, other), strict=False):
        assert list(line.get_ydata()) == pytest.approx([100 * risk for risk in curve.risk])
    assert list(panel.lines[0].get_ydata()) == pytest.approx([100 * risk for risk in data.best])
    assert panel.lines[0].get_linewidth() < panel.lines[1].get_linewidth()


@pytest.mark.parametrize(
    "predictions",
    [
        Predictions(torch.tensor([[0.0, 2.0]]), torch.tensor([1])),
        pytest.param(Predictions(torch.tensor([[3.0, 1.0]] * 8), torch.tensor([0, 1] * 4)), marks=pytest.mark.campaign),
        Predictions(torch.tensor([[3.0, 1.0], [9.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 0, 0])),
        Predictions(torch.tensor([[3.0, 1.0], [9.0, 0.0], [2.0, 0.0]]), torch.tensor([1, 1, 1])),
        Predictions(torch.zeros(5, 1), torch.zeros(5, dtype=torch.long)),
        Predictions(torch.tensor([[3.0, 1.0], [0.0, 2.0]]), torch.tensor([[0.9, 0.1], [0.4, 0.6]])),
        Predictions(torch.zeros(3, 3), torch.arange(3)),
    ],
    ids=["one sample", "one confidence", "no errors", "all wrong", "one class", "soft labels", "no smooth curve"],
)
def test_figures_of_few_and_unusual_samples_are_drawn(predictions):
    diagram = reliability(predictions)
    figures = [
        reliability_figure({"": [diagram]}),
        reliability_lines_figure([diagram]),
        smooth_reliability_figure([smooth_reliability_data(predictions, "x")]),
        confidence_figure([confidence_data(predictions, "x")]),
        over_under_figure([over_under_data(evaluate(predictions, intervals=False).before, "x")]),
        class_map_figure(class_map_data(predictions, "x")),
        risk_figure([risk_data(predictions, "x")]),
    ]
    for figure in figures:
        figure.draw_without_rendering()
        for panel in figure.axes:
            assert all(math.isfinite(end) for end in (*panel.get_xlim(), *panel.get_ylim()))
            assert panel.get_ylim()[0] != panel.get_ylim()[1]
