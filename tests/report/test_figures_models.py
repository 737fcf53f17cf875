"""OOD scores, feature norms and training curves: data against plain loops, figures against their data."""

import math

import pytest
import torch

from fedlas.evaluation import evaluate
from fedlas.ood import score_of
from fedlas.predictions import Predictions
from fedlas.report.figures import (
    alpha_data,
    alpha_figure,
    feedback_data,
    feedback_figure,
    indicator_data,
    norm_data,
    norm_figure,
    ood_data,
    roc_figure,
    score_figure,
    training_data,
    training_figure,
)
from report import pages


@pytest.fixture(scope="module")
def ood_case():
    predictions = pages.sample_predictions(200)
    sets = {"noise": pages.ood_predictions(90), "other": pages.ood_predictions(60, scale=0.5)}
    return predictions, sets, ood_data(predictions, sets, evaluate(predictions, ood=sets, intervals=False), "one")


def test_auroc_of_ood_scores_equals_pairwise_ranking(ood_case):
    predictions, sets, data = ood_case
    assert [ood_set.name for ood_set in data.sets] == ["noise", "other"]
    for ood_set in data.sets:
        for score in ood_set.scores:
            id_scores, ood_scores = (score_of(x, score.name).tolist() for x in (predictions, sets[ood_set.name]))
            pairs = [(b > a) + (a == b) / 2 for a in id_scores for b in ood_scores]
            assert score.auroc == pytest.approx(sum(pairs) / len(pairs), rel=1e-4)
            assert (score.false[0], score.true[0], score.false[-1], score.true[-1]) == (0, 0, 1, 1)
            for false, true in list(zip(score.false, score.true, strict=True))[1::7]:
                # Each point of the curve belongs to a threshold, which gives both rates.
                matches_some_threshold = any(
                    abs(sum(a >= t for a in id_scores) / len(id_scores) - false) < 1e-4
                    and abs(sum(b >= t for b in ood_scores) / len(ood_scores) - true) < 1e-4
                    for t in (*id_scores, *ood_scores)
                )
                assert matches_some_threshold
            low, high = score.edges[10], score.edges[20]
            expected_fraction = sum(low < value <= high for value in id_scores) / len(id_scores)
            assert sum(score.id[10:20]) == pytest.approx(expected_fraction, abs=1e-3)
            assert sum(score.ood) == pytest.approx(1, abs=1e-3)


def test_roc_curves_and_histograms_are_drawn_from_the_data(ood_case):
    _, _, data = ood_case
    figure = roc_figure(data)
    assert [panel.get_title() for panel in figure.axes] == ["noise", "other"]
    assert figure.get_suptitle() == "one"
    for panel, ood_set in zip(figure.axes, data.sets, strict=True):
        for line, score in zip(panel.lines[1:], ood_set.scores, strict=False):
            assert (list(line.get_xdata()), list(line.get_ydata())) == (list(score.false), list(score.true))
        lines = panel.lines[1 : 1 + len(ood_set.scores)]
        assert len({(line.get_marker(), line.get_linestyle(), line.get_color()) for line in lines}) == len(
            ood_set.scores
        )
    legend_texts = [text.get_text() for text in figure.legends[0].get_texts()]
    score_pairs = zip(*(ood_set.scores for ood_set in data.sets), strict=True)
    assert legend_texts == [
        f"{a.name.replace('_', ' ')}: {100 * a.auroc:.1f}, {100 * b.auroc:.1f}" for a, b in score_pairs
    ]
    figure = score_figure(data.sets[0])
    for panel, score in zip(figure.axes, data.sets[0].scores, strict=False):
        id_histogram, ood_histogram = panel.patches
        assert list(id_histogram.get_data().values) == list(score.id)
        assert list(ood_histogram.get_data().values) == list(score.ood)
        assert (id_histogram.get_hatch(), bool(ood_histogram.get_hatch())) == (None, True)


def test_missing_ood_data_is_an_error():
    predictions, sets = pages.sample_predictions(60), {"noise": pages.ood_predictions(20)}
    with pytest.raises(ValueError, match="evaluate"):
        ood_data(predictions, sets, evaluate(predictions, intervals=False), "x")
    with pytest.raises(ValueError, match="in ood"):
        ood_data(predictions, {}, evaluate(predictions, ood=sets, intervals=False), "x")


def test_norm_data_has_accuracy_and_confidence_by_decile():
    predictions = pages.sample_predictions(200)
    data = norm_data(predictions, "one")
    norms = [sum(abs(x) for x in row) for row in predictions.features.double().tolist()]
    mean = sum(norms) / 200
    deviation = math.sqrt(sum((x - mean) ** 2 for x in norms) / 199)
    assert (data.mean, data.deviation) == pytest.approx((mean, deviation), rel=1e-4)
    order = sorted(range(200), key=norms.__getitem__)
    assert data.samples == (20,) * 10
    for tenth in range(10):
        rows = order[20 * tenth : 20 * (tenth + 1)]
        assert data.nci[tenth] == pytest.approx(sum((norms[n] - mean) / deviation for n in rows) / 20, abs=1e-4)
        assert data.confidence[tenth] == pytest.approx(float(predictions.confidence[rows].mean()), rel=1e-4)
        assert data.accuracy[tenth] == pytest.approx(float(predictions.correct[rows].double().mean()), abs=1e-4)
    correct = int(predictions.correct.sum())
    assert (sum(data.correct), sum(data.incorrect)) == (correct, 200 - correct)
    (panel,) = norm_figure([data]).axes
    lines = {line.get_label(): line for line in panel.lines}
    assert list(lines["mean confidence"].get_ydata()) == list(data.confidence)
    assert list(lines["accuracy"].get_xdata()) == list(data.nci)
    assert lines["accuracy"].get_linestyle() != lines["mean confidence"].get_linestyle()
    assert "NCI" in panel.get_xlabel()
    assert panel.get_xlim() == (data.edges[0], data.edges[-1])


@pytest.mark.parametrize("compute", [norm_data, indicator_data])
def test_norms_that_cannot_be_normalised_raise(compute):
    with pytest.raises(ValueError, match=r"^(?!.*norm).*features"):
        compute(pages.sample_predictions(20, features=None), "x")
    with pytest.raises(ValueError, match="norm"):
        compute(pages.sample_predictions(20, features=torch.ones(20, 3)), "x")
    with pytest.raises(ValueError, match="norm"):
        compute(Predictions(torch.ones(1, 2), torch.zeros(1, dtype=torch.long), features=torch.ones(1, 3)), "x")


def training_log(epochs, parts=True):
    records = pages.training_log(epochs)
    for record in records if parts else ():
        record["val"] |= {"over_ece": 0.01 * record["epoch"], "under_ece": 0.3 / record["epoch"]}
    return records


def test_learning_curves_equal_the_log():
    records = training_log(9)
    records[4]["val"]["ece"] = None
    records.append({"epoch": 10, "diverged": {}})
    data = training_data(records, "run")
    assert data.epoch == tuple(range(1, 10))
    assert data.loss == pytest.approx([2 / epoch for epoch in data.epoch], rel=1e-4)
    assert data.accuracy == pytest.approx([0.9 - 0.5 / epoch for epoch in data.epoch], rel=1e-4)
    assert data.ece[4] is None
    assert data.ece[5] == pytest.approx(0.02 + 0.05 / 6, rel=1e-4)
    assert data.over == pytest.approx([0.01 * epoch for epoch in data.epoch], rel=1e-4)
    other = training_data(training_log(4), "other")
    loss, accuracy, error, parts = training_figure([data, other]).axes
    assert list(loss.lines[0].get_ydata()) == list(data.loss)
    assert list(accuracy.lines[1].get_ydata()) == pytest.approx([100 * value for value in other.accuracy])
    assert math.isnan(error.lines[0].get_ydata()[4])
    assert list(parts.lines[0].get_ydata()) == pytest.approx([100 * value for value in data.over])
    assert list(parts.lines[1].get_ydata()) == pytest.approx([-100 * value for value in data.under])
    assert error.lines[0].get_marker() != error.lines[1].get_marker()
    assert [panel.get_xlabel() for panel in (loss, accuracy, error, parts)] == ["epoch"] * 4


def test_training_figure_hides_the_panel_of_missing_over_and_under_ece():
    figure = training_figure([training_data(training_log(1, parts=False), "x")])
    figure.draw_without_rendering()
    assert list(figure.axes[0].lines[0].get_xdata()) == [1]
    assert [panel.get_visible() for panel in figure.axes] == [True, True, True, False]
    with pytest.raises(ValueError, match="epoch"):
        training_data([{"epoch": 1, "diverged": {}}], "x")


def test_alpha_curve_is_twice_a_sigmoid():
    data = alpha_data(pages.training_log(6), "run", {"loss_options": {"beta": 1.5}})
    assert data.beta == 1.5
    assert data.ratio == pytest.approx([1 - 0.03 * epoch for epoch in range(1, 7)])
    for gamma, up, down in zip(data.gamma, data.positive, data.negative, strict=True):
        assert up == pytest.approx(2 / (1 + math.exp(-1.5 * gamma)), rel=1e-4)
        assert down == pytest.approx(2 / (1 + math.exp(1.5 * gamma)), rel=1e-4)
    assert (data.edges[0], data.edges[-1]) == (-4.5, 4.5)  # one more bin on either side
    assert sum(data.fraction) == pytest.approx(1)
    ratio_panel, alpha_panel = alpha_figure([data]).axes
    assert list(ratio_panel.lines[1].get_ydata()) == list(data.ratio)
    up, down = alpha_panel.lines
    assert list(up.get_ydata()) == list(data.positive)
    assert up.get_linestyle() != down.get_linestyle()
    assert list(alpha_panel.patches[0].get_data().edges) == list(data.edges)
    assert alpha_panel.get_xlim() == (data.edges[0], data.edges[-1])


def test_alpha_figure_without_beta_or_histogram_shows_only_the_mean():
    records = pages.training_log(3)
    for record in records:
        del record["gate"]["gamma_histogram"]
    curves = [alpha_data(records, "bare"), alpha_data(pages.training_log(3), "no beta")]
    assert [(curve.gamma, curve.positive) for curve in curves] == [((), ()), ((), ())]
    assert curves[0].fraction == ()
    figure = alpha_figure(curves)
    figure.draw_without_rendering()
    assert figure.axes[0].get_position().width > 0.3  # no infinite value shrinks the panels
    assert not figure.axes[1].lines
    assert alpha_data([{k: v for k, v in record.items() if k != "gate"} for record in records], "x") is None
    assert alpha_data([], "x") is None


def test_strengths_and_gaps_of_every_bin_are_drawn_by_epoch():
    records = training_log(4)
    for record in records:
        record["lr"] = 0.1 if record["epoch"] < 3 else 0.01
        record["loss_state"] = {
            "strengths": [0.1 * record["epoch"], 0.2, 0.3],
            "gaps": [-0.05, 0.0, 0.02 * record["epoch"]],
            "edges": [0, 0.4, 0.6, 1],
        }
    data = feedback_data(records, "run")
    assert data.strengths[1] == pytest.approx((0.2, 0.2, 0.3))
    strength_panel, gap_panel = feedback_figure([data]).axes
    assert list(strength_panel.lines[0].get_ydata()) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert list(gap_panel.lines[2].get_ydata()) == pytest.approx([2, 4, 6, 8])
    assert list(strength_panel.lines[3].get_xdata()) == [3, 3], "the epoch in which the learning rate changes"
    del records[2]["loss_state"]
    assert feedback_data(records, "run") is None
    assert feedback_data([], "run") is None
