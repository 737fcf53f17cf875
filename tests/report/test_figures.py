"""Figures draw their data, and the data equals the result of plain loops."""

import json
import math
import re

import pytest
import torch
from matplotlib.text import Text

from fedlas.predictions import Predictions
from fedlas.report import figures
from fedlas.report.figures import (
    activations_data,
    activations_figure,
    epoch_statistics,
    gate_data,
    gate_figure,
    indicator_data,
    indicator_figure,
    save_figure,
    save_with_data,
    smoothing_data,
    smoothing_figure,
    theorem_data,
    theorem_figure,
)
from fedlas.report.figures.theorem import Theorems


def network(n=40, width=7, classes=4, *, signed=False, bias=False):
    """A made-up last layer: predictions with features, and the weights and bias that made them."""
    features = torch.randn(n, width) if signed else torch.randn(n, width).relu()
    weight = torch.randn(classes, width)
    shift = torch.randn(classes) if bias else None
    logits = features @ weight.t() + (0 if shift is None else shift)
    labels = torch.randint(0, classes, (n,))
    names = [f"class {n}" for n in range(classes)]
    return Predictions(logits, labels, features=features, index=torch.arange(n) + 100, class_names=names), weight, shift


def predictions_with_ties(n=60):
    """Predictions in which norms and confidences tie."""
    predictions, _, _ = network(n)
    logits = (2 * predictions.logits).round().clamp(-4, 9)
    return Predictions(logits, predictions.labels, features=predictions.features.round())


def middle_ranks(values):
    return [sum(v < x for v in values) + (sum(v == x for v in values) + 1) / 2 for x in values]


def pearson(x, y):
    mx, my = sum(x) / len(x), sum(y) / len(y)
    xy = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    return xy / math.sqrt(sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y))


def pairwise_auroc(scores, positive):
    pairs = [(a, b) for a, first_positive in zip(scores, positive, strict=True) if first_positive
             for b, second_positive in zip(scores, positive, strict=True) if not second_positive]  # fmt: skip
    return sum((a > b) + (a == b) / 2 for a, b in pairs) / len(pairs)


def test_indicator_data_equals_plain_loops():
    predictions = predictions_with_ties()
    data = indicator_data(predictions, "x")
    norms = [sum(abs(value) for value in row) for row in predictions.features.tolist()]
    assert len(set(norms)) < len(norms)
    confidence = [max(row) for row in predictions.probs.double().tolist()]
    mean = sum(norms) / len(norms)
    std = math.sqrt(sum((norm - mean) ** 2 for norm in norms) / (len(norms) - 1))
    assert data.nci == pytest.approx([(norm - mean) / std for norm in norms], rel=1e-6)
    assert data.confidence == pytest.approx(confidence, rel=1e-6)
    float32_confidence = predictions.confidence.tolist()  # ties as they are in float32
    assert data.rank_correlation == pytest.approx(pearson(middle_ranks(norms), middle_ranks(float32_confidence)))
    correct = [
        p == label for p, label in zip(predictions.prediction.tolist(), predictions.labels.tolist(), strict=True)
    ]
    assert list(data.correct) == correct
    assert data.norm_auroc == pytest.approx(pairwise_auroc(norms, correct))
    assert data.confidence_auroc == pytest.approx(pairwise_auroc(float32_confidence, correct))
    assert data.saturated == pytest.approx(sum(c > 0.99 for c in float32_confidence) / len(float32_confidence))


def test_indicator_counts_saturation_in_the_lowest_tenth_of_norms():
    logits = torch.tensor([[0.0, 9.0]] * 18 + [[0.0, 0.1]] * 2)
    norms = torch.arange(20.0).flip(0)[:, None]
    data = indicator_data(Predictions(logits, torch.ones(20, dtype=torch.long), features=norms), "x")
    assert (data.saturated, data.saturated_low) == (0.9, 0.0)
    assert math.isnan(data.norm_auroc)  # without errors the AUROC is undefined


def test_indicator_figure_draws_every_point():
    data = indicator_data(predictions_with_ties(), "some data")
    figure = indicator_figure(data)
    panel = next(axes for axes in figure.axes if axes.get_xlabel().startswith("normalised"))
    assert "softmax" in panel.get_ylabel()
    points = [tuple(point) for cloud in panel.collections for point in cloud.get_offsets().tolist()]
    assert sorted(points) == sorted(zip(data.nci, data.confidence, strict=True))
    assert [len(cloud.get_offsets()) for cloud in panel.collections] == [sum(data.correct), 60 - sum(data.correct)]
    assert "some data" in figure.get_suptitle()


def test_activations_have_extreme_norms_of_distinct_classes():
    predictions, _, _ = network(50)
    images = torch.randint(0, 256, (50, 1, 4, 4), dtype=torch.uint8)
    data = activations_data(predictions, images, "x", count=3)
    norms = predictions.features.double().abs().sum(1).tolist()
    order = sorted(range(50), key=lambda n: norms[n])
    for examples, norm_order in ((data.high, order[::-1]), (data.low, order)):
        expected_indices, classes = [], set()
        for index in norm_order:
            if int(predictions.labels[index]) not in classes and len(expected_indices) < 3:
                classes.add(int(predictions.labels[index]))
                expected_indices.append(index)
        assert [example.index for example in examples] == [index + 100 for index in expected_indices]
        for example, index in zip(examples, expected_indices, strict=True):
            assert example.norm == pytest.approx(norms[index])
            assert example.features == pytest.approx(predictions.features[index].tolist(), rel=1e-6)
            assert [list(row) for row in example.pixels] == images[index, 0].tolist()
            assert example.label == f"class {int(predictions.labels[index])}"
            assert example.prediction == f"class {int(predictions.prediction[index])}"
    flatness = {
        n: norms[n] ** 2 / sum(v * v for v in predictions.features[n].tolist()) / 7 for n in range(50) if norms[n]
    }
    assert data.flatness_high == pytest.approx(sum(flatness[n] for n in order[-5:]) / 5)
    assert data.flatness_low == pytest.approx(sum(flatness.get(n, 0) for n in order[:5]) / 5)


def test_activations_are_drawn_with_their_images():
    predictions, _, _ = network(50)
    images = torch.randint(0, 256, (50, 1, 4, 4), dtype=torch.uint8)
    data = activations_data(predictions, images, "x", count=2)
    figure = activations_figure(data)
    pictures = [axes.images[0].get_array().tolist() for axes in figure.axes if axes.images]
    assert pictures == [
        [list(row) for row in example.pixels] for example in (data.high[0], data.low[0], data.high[1], data.low[1])
    ]
    panels = [axes for axes in figure.axes if not axes.images]
    drawn_features = [panel.patches[0].get_data().values.tolist() for panel in panels]
    assert drawn_features[:2] == [list(data.high[0].features), list(data.low[0].features)]
    assert len({panel.get_ylim() for panel in panels}) == 1
    assert f"{data.high[0].norm:.1f}" in panels[0].get_title()


def sign(value):
    return 1 if value > 0 else -1


def theorem_by_loops(norms, features, weight):
    """Both sides of the theorem for every sample and class, in loops: [(gap, bound)]."""
    pairs = []
    for norm, a in zip(norms, features.double().tolist(), strict=True):
        for w in weight.double().tolist():
            hidden = sum(sign(w[k]) * a[k] for k in range(len(a)))
            bound = max(abs(value) for value in a) * sum(abs(sign(a[k]) - sign(w[k])) for k in range(len(a)))
            pairs.append((norm - hidden, bound))
    return pairs


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(("width", "classes"), [(1, 2), (7, 4), (33, 10)])
def test_the_theorem_holds_for_random_networks(width, classes, signed):
    predictions, weight, _ = network(30, width, classes, signed=signed)
    features = predictions.features.clone()
    features[0] = 0  # a sample without active units
    predictions = Predictions(features @ weight.t(), predictions.labels, features=features)
    data = theorem_data(predictions, weight)
    norms = features.double().abs().sum(1).tolist()
    expected_pairs = theorem_by_loops(norms, features, weight)
    assert all(-1e-9 <= gap <= bound + 1e-9 for gap, bound in expected_pairs)
    assert (data.violations, data.pairs) == (0, 30 * classes)
    assert data.largest_violation < 1e-9
    largest_hidden = [
        norm - min(gap for gap, _ in expected_pairs[n * classes : (n + 1) * classes]) for n, norm in enumerate(norms)
    ]
    assert data.norm == pytest.approx(norms, rel=1e-6)
    assert data.hidden == pytest.approx(largest_hidden, rel=1e-6, abs=1e-6)
    assert data.correlation == pytest.approx(pearson(norms, largest_hidden), nan_ok=True)
    assert data.mean_ratio == pytest.approx(sum(h / n for h, n in zip(largest_hidden, norms, strict=True) if n) / 30)
    ratios = [gap / bound if bound else 0 for gap, bound in expected_pairs]
    predicted = predictions.logits.argmax(1).tolist()
    predicted_ratios = [ratios[n * classes + predicted[n]] for n in range(30)]
    assert data.ratio_predicted == tuple(
        sum(min(19, max(0, int(20 * value))) == step for value in predicted_ratios) for step in range(20)
    )
    assert sum(data.ratio_others) == 30 * (classes - 1)


@pytest.mark.parametrize(("factor", "violated_bound"), [(0.3, "left"), (40.0, "right"), (math.nan, "unknown")])
def test_synthetic_violation_of_the_theorem_is_detected(factor, violated_bound):
    predictions, weight, _ = network(20)
    norms = predictions.features.abs().sum(1)
    assert theorem_data(predictions, weight, norms=norms).violations == 0
    norms[3] *= factor
    data = theorem_data(predictions, weight, norms=norms)
    expected_pairs = theorem_by_loops(norms.double().tolist(), predictions.features, weight)
    excesses = [max(-gap, gap - bound) / float(norms[n // 4]) for n, (gap, bound) in enumerate(expected_pairs)]
    if violated_bound == "unknown":
        assert (data.violations, data.largest_violation) == (4, math.inf)
    else:
        assert data.violations == sum(value > 1e-5 for value in excesses) > 0
        assert data.largest_violation == pytest.approx(max(excesses))


def test_rounding_of_norms_is_not_a_violation():
    features, weight = torch.rand(20, 1) + 1, torch.tensor([[1.0], [-1.0]])
    # With one unit every sample meets both bounds exactly.
    predictions = Predictions(features @ weight.t(), features=features)
    norms = features[:, 0] * (1 - 1e-6)
    data = theorem_data(predictions, weight, norms=norms)
    assert data.violations == 0 < data.largest_violation < 1e-5


def test_violated_assumptions_are_noted():
    predictions, weight, _ = network()
    assert theorem_data(predictions, weight).remarks == ()
    predictions, weight, _ = network(signed=True)
    (remark,) = theorem_data(predictions, weight).remarks
    assert f"{100 * float((predictions.features < 0).double().mean()):.2f} % of the features" in remark
    predictions, weight, bias = network(bias=True)
    (remark,) = theorem_data(predictions, weight, bias).remarks
    assert f"{float(bias.abs().max()):.3g}" in remark
    (remark,) = theorem_data(predictions, weight).remarks  # the bias is not passed, so the logits do not match
    assert re.search(r"logits.*\d %", remark)


def test_theorem_figure_draws_every_point():
    predictions, weight, bias = network(bias=True)
    theorem = theorem_data(predictions, weight, bias, title="one")
    sign_flipped = theorem_data(predictions, -weight, title="other")
    figure = theorem_figure(figures.Theorems("data", theorem, sign_flipped))
    first, second, last = figure.axes
    for panel, data in ((first, theorem), (second, sign_flipped)):
        points = [tuple(point) for point in panel.collections[0].get_offsets().tolist()]
        assert points == list(zip(data.hidden, data.norm, strict=True))
        assert panel.get_title().startswith(data.title)
        assert "hidden logit" in panel.get_xlabel()
    assert last.patches[0].get_data().values.tolist() == pytest.approx([n / 40 for n in theorem.ratio_predicted])
    assert "0 of 160 " in last.get_title()
    assert theorem.remarks[0] in figure.get_suptitle()


def test_smoothing_curves_are_drawn_in_the_order_of_beta():
    nci = torch.linspace(-1, 1, 5)
    curves = {(beta, mode): (nci, nci * 0 + beta / 10) for beta in (4.0, 0.5) for mode in ("negative", "positive")}
    data = smoothing_data(0.05, curves)
    expected_order = [(0.5, "positive"), (0.5, "negative"), (4.0, "positive"), (4.0, "negative")]
    assert [(curve.beta, curve.mode) for curve in data.curves] == expected_order
    (panel,) = smoothing_figure(data).axes
    for line, curve in zip(panel.lines, data.curves, strict=False):
        assert list(line.get_xdata()) == list(curve.nci)
        assert list(line.get_ydata()) == list(curve.alpha_i)
        assert line.get_linestyle() == {"positive": "-", "negative": "--"}[curve.mode]
    assert len({line.get_marker() for line in panel.lines[:4]}) == 2
    assert "NCI" in panel.get_xlabel()


def gate_log(flip_rates):
    return [{"epoch": epoch, "gate": {"flip_rate": rate}} for epoch, rate in enumerate(flip_rates, start=1)]


def test_epoch_statistics_have_mean_and_range_over_available_seeds():
    statistics = epoch_statistics("x", [gate_log([None, 0.4, 0.2]), gate_log([None, 0.2]), []], "flip_rate")
    assert statistics.epochs == (2, 3)
    assert statistics.mean == pytest.approx((0.3, 0.2))
    assert (statistics.low, statistics.high) == ((0.2, 0.2), (0.4, 0.2))
    assert statistics.per_seed == ((0.4, 0.2), (0.2, None), (None, None))
    assert epoch_statistics("x", [[{"epoch": 1, "gate": {}}]], "positive").epochs == ()
    zero_is_not_missing = epoch_statistics("x", [gate_log([None, 0.0])], "flip_rate")
    assert zero_is_not_missing.mean == (0.0,)


def gate_run(*fractions):
    """The log of a gate with these fractions of samples in positive mode, one for each epoch."""
    return [
        {"epoch": epoch, "gate": {"positive": f, "negative": 1 - f, "flip_rate": f / 2 if epoch > 1 else None}}
        for epoch, f in enumerate(fractions, start=1)
    ]


def test_gate_figure_draws_the_log():
    runs = {"one": [gate_run(0.2, 0.3, 0.4), gate_run(0.3, 0.4, 0.5)], "two": [gate_run(0.7, 0.8, 0.9)]}
    data = gate_data(runs, "title", (2,))
    assert data.positive[0].mean == pytest.approx((0.25, 0.35, 0.45))
    assert data.negative[1].mean == pytest.approx((0.3, 0.2, 0.1))
    assert data.flip_rate[0].epochs == (2, 3)
    figure = gate_figure(data)
    first, second, flips = figure.axes
    assert [panel.get_title() for panel in figure.axes] == ["one", "two", "flip rate"]
    means = {line.get_label(): list(line.get_ydata()) for line in first.lines if not line.get_label().startswith("_")}
    assert means == {"positive mode": pytest.approx([25, 35, 45]), "negative mode": pytest.approx([75, 65, 55])}
    assert len(first.lines) == 2 * 3 + 1  # for each mode two seeds and a mean, and one milestone
    assert len(second.lines) == 2 + 1  # a single seed is drawn only as the mean
    labels = [line.get_label() for line in flips.lines]
    assert [label for label in labels if not label.startswith("_")] == ["one", "two"]
    styles = {line.get_label(): (line.get_linestyle(), line.get_marker()) for line in flips.lines}
    assert styles["one"] != styles["two"]
    assert flips.get_xlabel() == "epoch"


def test_gate_figure_draws_the_flip_rate_of_every_loss():
    names = [f"loss {n}" for n in range(9)]
    figure = gate_figure(gate_data({name: [gate_run(*[n / 10] * 5)] for n, name in enumerate(names)}, ""))
    panels = {panel.get_title(): panel for panel in figure.axes}
    assert {*names, "flip rate"} <= panels.keys()
    lines = panels["flip rate"].lines
    assert [line.get_label() for line in lines] == names
    assert len({(line.get_marker(), str(line.get_linestyle())) for line in lines}) == 9
    assert figure._suptitle is None  # an empty title is not drawn


UNTRUSTED_NAME = r"$\frac $x_{$ and a name that goes on for longer than there is room on the whole page " * 3


def test_untrusted_names_are_not_rendered_as_math_in_figures():
    predictions, weight, bias = network(50)
    names = [f"{UNTRUSTED_NAME}{k}" for k in range(predictions.num_classes)]
    predictions_with_names = Predictions(
        predictions.logits, predictions.labels, features=predictions.features, class_names=names
    )
    images = torch.randint(0, 256, (50, 1, 4, 4), dtype=torch.uint8)
    theorem = theorem_data(predictions, weight, bias, title=UNTRUSTED_NAME)
    figures = [
        gate_figure(gate_data({UNTRUSTED_NAME: [gate_run(0.2, 0.2)], "other": [gate_run(0.3, 0.3)]}, UNTRUSTED_NAME)),
        indicator_figure(indicator_data(predictions_with_names, UNTRUSTED_NAME)),
        activations_figure(activations_data(predictions_with_names, images, UNTRUSTED_NAME, count=1)),
        theorem_figure(Theorems(UNTRUSTED_NAME, theorem, theorem)),
    ]
    for figure in figures:
        figure.draw_without_rendering()  # would raise at the first formula
        labels = [text.get_text() for text in figure.findobj(Text) if r"\frac" in text.get_text()]
        assert labels
        assert all(len(line) <= 110 and r"\$\frac" in line for text in labels for line in text.split("\n")[:1])


def test_a_figure_is_written_with_its_data(tmp_path):
    logits = torch.tensor([[0.0, 9.0]] * 18 + [[0.0, 0.1]] * 2)
    data = indicator_data(
        Predictions(logits, torch.ones(20, dtype=torch.long), features=torch.arange(20.0)[:, None]), "x"
    )
    files = save_with_data(indicator_figure(data), data, tmp_path / "new", "name")
    assert [path.name for path in files] == ["name.pdf", "name.png", "name.json"]
    assert files[0].read_bytes().startswith(b"%PDF")
    assert files[1].read_bytes().startswith(b"\x89PNG")
    saved_data = json.loads(files[2].read_text())
    assert saved_data["figure"] == "name"
    assert saved_data["nci"] == list(data.nci)
    assert saved_data["norm_auroc"] is None


def test_figures_are_written_atomically(tmp_path):

    class Broken:
        def savefig(self, file, **options):
            file.write(b"half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        save_figure(Broken(), tmp_path / "f.png")
    assert list(tmp_path.iterdir()) == []
