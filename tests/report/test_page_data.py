"""The data of the report page equals the metrics and has a bounded size."""

import json

import pytest
import torch

from fedlas import metrics, ood
from fedlas.comparison import compare_models
from fedlas.evaluation import evaluate
from fedlas.io import read_predictions
from fedlas.metrics.inputs import Pairs, pairs
from fedlas.ood.detection import ranking
from fedlas.ood.scores import QUANTITIES
from fedlas.predictions import Predictions
from fedlas.report import page_data
from report import pages


def test_diagrams_contain_every_sample_and_no_empty_bin():
    predictions = pages.sample_predictions()
    report = evaluate(predictions, resamples=50, posthoc="temperature")
    for state in report.states:
        data = page_data.state_data(state)
        for kind, metric in (("width", "ece"), ("mass", "aece")):
            rows = data["diagrams"][kind]["bins"]
            assert sum(row[2] for row in rows) == len(predictions)
            assert all(row[2] > 0 and row[5] <= row[4] <= row[6] for row in rows)
            error = sum(row[2] * abs(row[3] - row[4]) for row in rows) / len(predictions)
            assert error == pytest.approx(float(state[metric]), rel=1e-12)
            assert all(row[7] == row[3] - row[4] for row in rows)
        ece_data = data["results"]["ece"]  # not rounded: the page rounds once
        assert (ece_data["value"], ece_data["low"]) == (float(state["ece"]), state["ece"].interval.low)
        assert ece_data["noise_floor"] == state["ece"].details["noise_floor"]


def test_smooth_diagram_equals_smooth_curve():
    predictions = pages.sample_predictions()
    data = page_data.smooth_data(pairs(predictions))
    curve = metrics.smooth_curve(predictions, points=101)
    assert [row[0] for row in data["points"]] == curve.center.tolist()
    expected_accuracy = (curve.center - curve.gap).clamp(0, 1)
    assert [row[1] for row in data["points"]] == pytest.approx(expected_accuracy.tolist(), rel=1e-12)
    assert all(row[2] <= row[1] <= row[3] and row[6] == row[0] - row[1] for row in data["points"])
    json.dumps(data, allow_nan=False)


def test_histograms_of_confidence_count_correct_and_incorrect_predictions():
    predictions = pages.sample_predictions()
    data = page_data.confidence_data(pairs(predictions))
    assert sum(data["correct"]) == data["correct_total"] == int(predictions.correct.sum())
    assert sum(data["incorrect"]) == data["incorrect_total"] == len(predictions) - int(predictions.correct.sum())
    assert sum(data["incorrect_fraction"]) == pytest.approx(1)
    low, high = data["edges"][20], data["edges"][21]
    in_bin = (predictions.confidence > low) & (predictions.confidence <= high)
    assert data["correct"][20] == int((in_bin & predictions.correct).sum())
    assert data["accuracy"][20] == pytest.approx(float(predictions.correct[in_bin].double().mean()))
    assert data["accuracy"][0] is None  # an empty bin


def test_risk_curve_of_many_samples_is_subsampled():
    predictions = pages.sample_predictions(5_000)
    data = page_data.risk_data(pairs(predictions))
    assert len(data["risk"]) == page_data.POINTS
    accuracy = float(predictions.correct.double().mean())
    assert data["coverage"][-1] == 1
    assert data["risk"][-1] == pytest.approx(1 - accuracy)
    expected_best = [max(0.0, 1 - accuracy / coverage) for coverage in data["coverage"]]
    assert data["best"] == pytest.approx(expected_best, abs=1e-12)
    most_confident = predictions.confidence.argsort(descending=True)[:500]
    listed = {row[0]: row[1:] for row in data["listed"]}
    assert listed[0.1][0] == pytest.approx(1 - float(predictions.correct[most_confident].double().mean()))
    assert listed[1] == pytest.approx([1 - accuracy] * 2)
    single_sample = page_data.risk_data(pairs(predictions[:1]))
    assert single_sample["coverage"] == [1]


def test_the_class_table_counts_predictions_and_labels():
    predictions = pages.sample_predictions()
    report = evaluate(predictions, intervals=False)
    data = page_data.class_data(predictions, report)
    for k in range(10):
        is_predicted, is_labelled = predictions.prediction == k, predictions.labels == k
        assert data["predicted"][k] == int(is_predicted.sum())
        assert data["labels"][k] == int(is_labelled.sum())
        assert data["correct"][k] == int((is_predicted & is_labelled).sum())
        assert data["recall"][k] == pytest.approx(float(is_predicted[is_labelled].double().mean()))
        assert data["precision"][k] == pytest.approx(float(is_labelled[is_predicted].double().mean()))
        assert data["confidence"][k] == pytest.approx(float(predictions.confidence[is_predicted].double().mean()))
        assert data["gap"][k] == pytest.approx(data["confidence"][k] - data["precision"][k])
    assert data["ece"] == list(metrics.classwise_ece(predictions).details["per_class"])
    assert sum(data["weight"]) == pytest.approx(float(report["signed_ece"]))
    without_class_3 = page_data.class_data(predictions[predictions.prediction != 3])
    assert without_class_3["precision"][3] is without_class_3["gap"][3] is None
    assert without_class_3["weight"][3] == 0


@pytest.mark.parametrize("soft", [False, True])
def test_confusions_are_counted_and_averaged(soft):
    predictions = pages.sample_predictions(3_000)
    labels = predictions.labels
    if soft:
        predictions = Predictions(predictions.logits, 0.8 * torch.eye(10)[labels] + 0.02)
    data = page_data.confusion_data(predictions)
    confused = {}
    for label, prediction, confidence in zip(
        labels, predictions.prediction, predictions.confidence.double(), strict=True
    ):
        if label != prediction:
            confused.setdefault((int(label), int(prediction)), []).append(float(confidence))
    counts = sorted((len(values) for values in confused.values()), reverse=True)
    means = [sum(v) / len(v) for v in confused.values() if len(v) >= data["fewest"]]
    assert [row[2] for row in data["by_count"]] == counts[:10]
    assert [row[4] for row in data["by_confidence"]] == pytest.approx(sorted(means, reverse=True)[:10], rel=1e-12)
    for label, prediction, count, fraction, confidence in data["by_count"] + data["by_confidence"]:
        values = confused[label, prediction]
        assert count == len(values)
        assert fraction == count / int((labels == label).sum())
        assert confidence == pytest.approx(sum(values) / count, rel=1e-12)
    perfect = Predictions(torch.eye(3), torch.arange(3))
    assert page_data.confusion_data(perfect)["by_count"] == []


def cells_of(data, kind, k):
    """Bins of the diagram of a class: [bin, count, accuracy, low, high, confidence, gap, significant]."""
    cells = data[kind][data["drawn"].index(k)]
    return [[bin_, *data["accuracies"][accuracy_index], *other_values] for bin_, accuracy_index, *other_values in cells]


def test_class_diagram_equals_the_histogram_of_its_samples():
    predictions = pages.sample_predictions()
    data = page_data.class_data(predictions)
    predicted_as_3 = predictions.prediction == 3
    class_bins = metrics.histogram(
        Pairs(
            predictions.confidence[predicted_as_3], predictions.correct[predicted_as_3], pairs(predictions).definition
        ),
        bins=10,
    ).bins
    cells = cells_of(data, "of_predictions", 3)
    filled_bins = class_bins.counts.nonzero()[:, 0].tolist()
    assert [cell[0] for cell in cells] == filled_bins
    assert [cell[1] for cell in cells] == class_bins.counts[filled_bins].tolist()
    assert [cell[2] for cell in cells] == pytest.approx(class_bins.accuracy[filled_bins].tolist())
    assert all(cell[6] == cell[5] - cell[2] for cell in cells)
    assert [cell[7] for cell in cells] == [not cell[3] <= cell[5] <= cell[4] for cell in cells]
    classwise_bins = metrics.histogram(predictions, bins=10, scope="class-wise").bins
    filled_bins = classwise_bins.counts[3].nonzero()[:, 0].tolist()
    cells = cells_of(data, "of_probability", 3)
    assert [cell[:2] for cell in cells] == [[b, int(classwise_bins.counts[3, b])] for b in filled_bins]


def test_class_diagrams_are_bounded_and_read_in_parts(monkeypatch):
    predictions = pages.sample_predictions()
    full_data = page_data.class_data(predictions)
    monkeypatch.setattr("fedlas.predictions.probabilities.AT_ONCE", 700)
    chunked_data = page_data.class_data(predictions)
    assert chunked_data["accuracies"] == full_data["accuracies"]
    assert [cell for row in chunked_data["of_probability"] for cell in row] == [
        pytest.approx(cell, rel=1e-12) for row in full_data["of_probability"] for cell in row
    ]
    limited_data = page_data.class_data(predictions, most=3)
    assert len(limited_data["drawn"]) == len(limited_data["of_predictions"]) == len(limited_data["of_probability"]) == 3
    largest_counts = sorted(full_data["predicted"])[-3:]
    assert sorted(full_data["predicted"][k] for k in limited_data["drawn"]) == largest_counts


def test_soft_labels_and_top_label_predictions_have_a_class_table(tmp_path):
    predictions = pages.sample_predictions(200, 3)
    soft = 0.8 * torch.nn.functional.one_hot(predictions.labels, 3).float() + 0.2 / 3
    data = page_data.class_data(Predictions(predictions.logits, soft))
    assert sum(data["labels"]) == pytest.approx(200, abs=0.1)
    page_data.sample_data(Predictions(predictions.logits, soft))
    path = tmp_path / "top.csv"
    path.write_text("confidence,prediction,label\n0.9,cat,cat\n0.4,dog,cat\n0.8,dog,dog\n")
    top = read_predictions(path)
    data = page_data.class_data(top, evaluate(top, intervals=False))
    assert data["class"] == [0, 1]
    assert data["of_probability"] is None
    assert page_data.sample_data(top)["over"][0]["label_probability"] is None


def test_shown_samples_are_the_most_over_and_under_confident():
    predictions = pages.sample_predictions()
    data = page_data.sample_data(predictions, count=5)
    incorrect = (~predictions.correct).nonzero()[:, 0]
    most_over_confident = incorrect[predictions.confidence[incorrect].argsort(descending=True)[:5]]
    assert [sample["row"] for sample in data["over"]] == most_over_confident.tolist()
    correct = predictions.correct.nonzero()[:, 0]
    most_under_confident = correct[predictions.confidence[correct].argsort()[:5]]
    assert [sample["row"] for sample in data["under"]] == most_under_confident.tolist()
    sample = data["over"][0]
    probs = predictions.probs[sample["row"]]
    assert sample["prediction"] == int(probs.argmax())
    assert sample["label_probability"] == float(probs[sample["label"]])
    assert page_data.sample_data(predictions[predictions.correct])["over"] == []


def test_ood_data_has_roc_curves_and_the_numbers_of_the_report():
    predictions, sets = pages.sample_predictions(), {"noise": pages.ood_predictions()}
    report = evaluate(predictions, ood=sets, intervals=False)
    data = page_data.ood_data(predictions, sets, report)
    scores = data["sets"][0]["scores"]
    assert [score["name"] for score in scores] == list(report.before.detection.scores)
    for score in scores:
        detection = report.before.detection["noise"][score["name"]]
        assert score["results"][0]["value"] == float(detection.auroc)
        assert score["quantity"] == QUANTITIES[score["name"]]
        false, true = (torch.tensor(score["roc"][name], dtype=torch.float64) for name in ("fpr", "tpr"))
        assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
        assert float(torch.trapezoid(true, false)) == pytest.approx(float(detection.auroc), abs=5e-3)
        assert sum(score["histogram"]["id"]) == pytest.approx(1)
        assert sum(score["histogram"]["ood"]) == pytest.approx(1)
        rates = dict(score["roc"]["listed"])
        assert rates[1] == 1
        # Listed rates are computed from all samples, not from the points of the curve.
        assert all(rates[rate] >= float(true[false <= rate].max()) for rate in rates)
        assert len(score["roc"]["fpr"]) <= page_data.POINTS + 1
    assert set(QUANTITIES) == set(ood.score_names())
    top = next(score for score in scores if score["name"] == "max_probability")
    assert (top["quantity"][0], max(top["histogram"]["edges"]) < 1) == ("1", True)  # it is 1 - p
    without_samples = page_data.ood_data(predictions, {}, report)
    assert "roc" not in without_samples["sets"][0]["scores"][0]
    assert page_data.ood_data(predictions, {}, evaluate(predictions, intervals=False)) is None


def test_scores_may_be_constant_or_infinite():
    constant_data = page_data.score_data(torch.ones(5), torch.ones(3))
    assert sum(constant_data["id"]) == pytest.approx(1)
    infinite_scores = torch.full((4,), torch.inf)
    json.dumps(page_data.score_data(infinite_scores, infinite_scores), allow_nan=False)
    json.dumps(page_data.score_data(torch.tensor([0.0, 1.0, torch.inf]), torch.tensor([2.0])), allow_nan=False)
    assert page_data.roc_data(ranking(torch.zeros(3), torch.zeros(2)))["tpr"] == [0, 1]


def test_long_training_logs_are_subsampled():
    data = page_data.training_data(pages.training_log(3_000))
    assert len(data["epoch"]) <= page_data.EPOCHS + 1
    assert data["epoch"][-1] == 3_000
    assert len(data["gate"]["flip_rate"]) == len(data["epoch"])
    assert data["gate"]["flip_rate"][0] is None


def test_models_on_the_same_samples_are_compared_in_pairs():
    models = {
        "a": pages.sample_predictions(),
        "b": pages.sample_predictions(scale=1.0),
        "c": pages.sample_predictions(seed=3),
    }
    data = page_data.comparison_data(list(models), compare_models(models, resamples=1_000))
    assert {(test["first"], test["second"]) for test in data["tests"]} == {(0, 1), (0, 2), (1, 2)}
    ece_test = next(t for t in data["tests"] if (t["first"], t["second"], t["metric"]) == (0, 1, "ece"))
    expected = metrics.paired_bootstrap(metrics.ece, models["a"], models["b"], resamples=1_000)
    assert ece_test["difference"] == expected.difference
    assert (ece_test["low"], ece_test["high"]) == (expected.interval.low, expected.interval.high)
    assert ece_test["better"] == {"first": 0, "second": 1}[expected.better]
    unpaired = page_data.comparison_data(
        ["a", "b"], compare_models({"a": pages.sample_predictions(), "b": pages.sample_predictions(500)})
    )
    assert "500" in unpaired["tests"][0]["reason"]
    assert page_data.comparison_data(["a"], ()) is None


def test_all_pairs_of_models_are_compared_with_corrected_p_values():
    """Regression: more than four models were compared only with the first, without correction."""
    models = {f"m{k}": pages.sample_predictions(60, scale=0.6 + k / 5) for k in range(5)}
    ece_tests = [test for test in compare_models(models, resamples=200) if test.metric == "ece"]
    assert len({(test.first, test.second) for test in ece_tests}) == len(ece_tests) == 10
    uncorrected_p_values = {
        (test.first, test.second): metrics.paired_bootstrap(
            metrics.ece, models[test.first], models[test.second], resamples=200
        ).p_value
        for test in ece_tests
    }
    smallest_p_value = min(uncorrected_p_values.values())
    assert min(test.comparison.p_value for test in ece_tests) == pytest.approx(min(1.0, 10 * smallest_p_value))
    assert all(test.comparison.p_value >= uncorrected_p_values[test.first, test.second] for test in ece_tests)
    assert not any(test.comparison.better for test in ece_tests if test.comparison.p_value > 0.05)


def test_more_than_eight_models_are_compared_with_the_first_and_the_best():
    models = {f"m{k}": pages.sample_predictions(60, scale=0.6 + k / 5) for k in range(9)}
    ece_tests = [test for test in compare_models(models, resamples=50, level=0.5) if test.metric == "ece"]
    assert len({(test.first, test.second) for test in ece_tests}) == len(ece_tests) == 15
    best = min(models, key=lambda name: float(metrics.ece(models[name])))
    assert {test.first for test in ece_tests} == {"m0", best}


def test_long_text_is_truncated_and_encodable():
    assert page_data.text_data("short") == "short"
    long = page_data.text_data("x" * 10_000)
    assert long.startswith("x" * 200)
    assert long.endswith("(10,000 characters)")
    assert len(long) < 230
    page_data.text_data("half a pair \ud800").encode()


def test_page_data_is_strict_json():
    for name, model in pages.models().items():
        data = page_data.model_data(name, model.report)
        assert json.loads(json.dumps(data, allow_nan=False)) == data
