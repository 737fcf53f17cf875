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
    given = pages.model()
    report = evaluate(given, resamples=50, posthoc="temperature")
    for state in report.states:
        data = page_data.state_data(state)
        for kind, metric in (("width", "ece"), ("mass", "aece")):
            rows = data["diagrams"][kind]["bins"]
            assert sum(row[2] for row in rows) == len(given)
            assert all(row[2] > 0 and row[5] <= row[4] <= row[6] for row in rows)
            error = sum(row[2] * abs(row[3] - row[4]) for row in rows) / len(given)
            assert error == pytest.approx(float(state[metric]), rel=1e-12)
            assert all(row[7] == row[3] - row[4] for row in rows)
        shown = data["results"]["ece"]  # not rounded: the page rounds once
        assert (shown["value"], shown["low"]) == (float(state["ece"]), state["ece"].interval.low)
        assert shown["noise_floor"] == state["ece"].details["noise_floor"]


def test_smooth_diagram_equals_smooth_curve():
    given = pages.model()
    data = page_data.smooth_data(pairs(given))
    curve = metrics.smooth_curve(given, points=101)
    assert [row[0] for row in data["points"]] == curve.center.tolist()
    wanted = (curve.center - curve.gap).clamp(0, 1)
    assert [row[1] for row in data["points"]] == pytest.approx(wanted.tolist(), rel=1e-12)
    assert all(row[2] <= row[1] <= row[3] and row[6] == row[0] - row[1] for row in data["points"])
    json.dumps(data, allow_nan=False)


def test_histograms_of_confidence_count_correct_and_incorrect_predictions():
    given = pages.model()
    data = page_data.confidence_data(pairs(given))
    assert sum(data["correct"]) == data["correct_total"] == int(given.correct.sum())
    assert sum(data["incorrect"]) == data["incorrect_total"] == len(given) - int(given.correct.sum())
    assert sum(data["incorrect_fraction"]) == pytest.approx(1)
    low, high = data["edges"][20], data["edges"][21]
    inside = (given.confidence > low) & (given.confidence <= high)
    assert data["correct"][20] == int((inside & given.correct).sum())
    assert data["accuracy"][20] == pytest.approx(float(given.correct[inside].double().mean()))
    assert data["accuracy"][0] is None  # an empty bin


def test_risk_curve_ends_at_the_error_rate_above_the_optimal_curve():
    given = pages.model(5_000)
    data = page_data.risk_data(pairs(given))
    assert len(data["risk"]) == page_data.POINTS
    assert data["coverage"][-1] == 1
    error = 1 - float(given.correct.double().mean())
    assert data["risk"][-1] == pytest.approx(error)
    assert data["best"][-1] == pytest.approx(error)
    assert all(best <= risk + 1e-12 for best, risk in zip(data["best"], data["risk"], strict=True))
    right = float(given.correct.double().mean())
    wanted = [max(0.0, 1 - right / coverage) for coverage in data["coverage"]]
    assert data["best"] == pytest.approx(wanted, abs=1e-12)
    most = given.confidence.argsort(descending=True)[:500]
    listed = {row[0]: row[1:] for row in data["listed"]}
    assert listed[0.1][0] == pytest.approx(1 - float(given.correct[most].double().mean()))
    assert listed[1][1] == pytest.approx(error)
    tiny = page_data.risk_data(pairs(given[:1]))
    assert tiny["coverage"] == [1]


def test_the_class_table_counts_predictions_and_labels():
    given = pages.model()
    report = evaluate(given, intervals=False)
    data = page_data.class_data(given, report)
    for k in range(10):
        said, truth = given.prediction == k, given.labels == k
        assert data["predicted"][k] == int(said.sum())
        assert data["labels"][k] == int(truth.sum())
        assert data["correct"][k] == int((said & truth).sum())
        assert data["recall"][k] == pytest.approx(float(said[truth].double().mean()))
        assert data["precision"][k] == pytest.approx(float(truth[said].double().mean()))
        assert data["confidence"][k] == pytest.approx(float(given.confidence[said].double().mean()))
        assert data["gap"][k] == pytest.approx(data["confidence"][k] - data["precision"][k])
    assert data["ece"] == list(metrics.classwise_ece(given).details["per_class"])
    assert sum(data["weight"]) == pytest.approx(float(report["signed_ece"]))
    without = page_data.class_data(given[given.prediction != 3])
    assert without["precision"][3] is without["gap"][3] is None
    assert without["weight"][3] == 0


@pytest.mark.parametrize("soft", [False, True])
def test_confusions_are_counted_and_averaged(soft):
    given = pages.model(3_000)
    labels = given.labels
    if soft:
        given = Predictions(given.logits, 0.8 * torch.eye(10)[labels] + 0.02)
    data = page_data.confusion_data(given)
    confused = {}
    for label, prediction, confidence in zip(labels, given.prediction, given.confidence.double(), strict=True):
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
    right = Predictions(torch.eye(3), torch.arange(3))
    assert page_data.confusion_data(right)["by_count"] == []


def cells_of(data, kind, k):
    """Bins of the diagram of a class: [bin, count, accuracy, low, high, confidence, gap, significant]."""
    cells = data[kind][data["drawn"].index(k)]
    return [[bin_, *data["accuracies"][place], *rest] for bin_, place, *rest in cells]


def test_class_diagram_equals_the_histogram_of_its_samples():
    given = pages.model()
    data = page_data.class_data(given)
    mine = given.prediction == 3
    alone = metrics.histogram(Pairs(given.confidence[mine], given.correct[mine], pairs(given).about), bins=10).bins
    cells = cells_of(data, "of_predictions", 3)
    filled = alone.counts.nonzero()[:, 0].tolist()
    assert [cell[0] for cell in cells] == filled
    assert [cell[1] for cell in cells] == alone.counts[filled].tolist()
    assert [cell[2] for cell in cells] == pytest.approx(alone.accuracy[filled].tolist())
    assert all(cell[6] == cell[5] - cell[2] for cell in cells)
    assert [cell[7] for cell in cells] == [not cell[3] <= cell[5] <= cell[4] for cell in cells]
    every = metrics.histogram(given, bins=10, scope="class-wise").bins
    filled = every.counts[3].nonzero()[:, 0].tolist()
    cells = cells_of(data, "of_probability", 3)
    assert [cell[:2] for cell in cells] == [[b, int(every.counts[3, b])] for b in filled]


def test_class_diagrams_are_bounded_and_read_in_parts(monkeypatch):
    given = pages.model()
    whole = page_data.class_data(given)
    monkeypatch.setattr("fedlas.predictions.probabilities.AT_ONCE", 700)
    parts = page_data.class_data(given)
    assert parts["accuracies"] == whole["accuracies"]
    assert [cell for row in parts["of_probability"] for cell in row] == [
        pytest.approx(cell, rel=1e-12) for row in whole["of_probability"] for cell in row
    ]
    few = page_data.class_data(given, most=3)
    assert len(few["drawn"]) == len(few["of_predictions"]) == len(few["of_probability"]) == 3
    most = sorted(whole["predicted"])[-3:]
    assert sorted(whole["predicted"][k] for k in few["drawn"]) == most


def test_soft_labels_and_top_label_predictions_have_a_class_table(tmp_path):
    given = pages.model(200, 3)
    soft = 0.8 * torch.nn.functional.one_hot(given.labels, 3).float() + 0.2 / 3
    data = page_data.class_data(Predictions(given.logits, soft))
    assert sum(data["labels"]) == pytest.approx(200, abs=0.1)
    page_data.sample_data(Predictions(given.logits, soft))
    path = tmp_path / "top.csv"
    path.write_text("confidence,prediction,label\n0.9,cat,cat\n0.4,dog,cat\n0.8,dog,dog\n")
    top = read_predictions(path)
    data = page_data.class_data(top, evaluate(top, intervals=False))
    assert data["class"] == [0, 1]
    assert data["of_probability"] is None
    assert page_data.sample_data(top)["over"][0]["label_probability"] is None


def test_shown_samples_are_the_most_over_and_under_confident():
    given = pages.model()
    data = page_data.sample_data(given, count=5)
    wrong = (~given.correct).nonzero()[:, 0]
    worst = wrong[given.confidence[wrong].argsort(descending=True)[:5]]
    assert [one["row"] for one in data["over"]] == worst.tolist()
    right = given.correct.nonzero()[:, 0]
    shy = right[given.confidence[right].argsort()[:5]]
    assert [one["row"] for one in data["under"]] == shy.tolist()
    one = data["over"][0]
    probs = given.probs[one["row"]]
    assert one["prediction"] == int(probs.argmax())
    assert one["label_probability"] == float(probs[one["label"]])
    assert page_data.sample_data(given[given.correct])["over"] == []


def test_ood_data_has_roc_curves_and_the_numbers_of_the_report():
    given, sets = pages.model(), {"noise": pages.ood_data()}
    report = evaluate(given, ood=sets, intervals=False)
    data = page_data.ood_data(given, sets, report)
    scores = data["sets"][0]["scores"]
    assert [one["name"] for one in scores] == list(report.before.detection.scores)
    for one in scores:
        measured = report.before.detection["noise"][one["name"]]
        assert one["results"][0]["value"] == float(measured.auroc)
        assert one["quantity"] == QUANTITIES[one["name"]]
        false, true = (torch.tensor(one["roc"][name], dtype=torch.float64) for name in ("fpr", "tpr"))
        assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
        assert float(torch.trapezoid(true, false)) == pytest.approx(float(measured.auroc), abs=5e-3)
        assert sum(one["histogram"]["id"]) == pytest.approx(1)
        assert sum(one["histogram"]["ood"]) == pytest.approx(1)
        rates = dict(one["roc"]["listed"])
        assert rates[1] == 1
        assert all(
            rates[rate] >= float(true[false <= rate].max()) for rate in rates
        )  # of all samples, not of the curve
        assert len(one["roc"]["fpr"]) <= page_data.POINTS + 1
    assert set(QUANTITIES) == set(ood.score_names())
    top = next(one for one in scores if one["name"] == "max_probability")
    assert (top["quantity"][0], max(top["histogram"]["edges"]) < 1) == ("1", True)  # it is 1 - p
    without = page_data.ood_data(given, {}, report)
    assert "roc" not in without["sets"][0]["scores"][0]
    assert page_data.ood_data(given, {}, evaluate(given, intervals=False)) is None


def test_scores_may_be_constant_or_infinite():
    flat = page_data.score_data(torch.ones(5), torch.ones(3))
    assert sum(flat["id"]) == pytest.approx(1)
    endless = torch.full((4,), torch.inf)
    json.dumps(page_data.score_data(endless, endless), allow_nan=False)
    json.dumps(page_data.score_data(torch.tensor([0.0, 1.0, torch.inf]), torch.tensor([2.0])), allow_nan=False)
    assert page_data.roc_data(ranking(torch.zeros(3), torch.zeros(2)))["tpr"] == [0, 1]


def test_norm_histogram_uses_feature_norms():
    given = pages.model()
    data = page_data.norm_data(given)
    norm = -ood.feature_norm(given.features)
    assert data["mean"] == pytest.approx(float(norm.double().mean()))
    assert sum(data["correct"]) == int(given.correct.sum())
    assert sum(row[0] for row in data["groups"]) == len(given)
    first = norm <= norm.sort().values[len(given) // 10 - 1]
    assert data["groups"][0][2] == pytest.approx(float(given.confidence[first].double().mean()), rel=1e-3)
    assert page_data.norm_data(pages.model(features=None)) is None
    assert page_data.norm_data(pages.model(features=torch.ones(700, 2))) is None


def test_training_log_becomes_curves():
    data = page_data.training_data(pages.log(), {"loss_options": {"beta": 4}})
    assert data["epoch"] == list(range(1, 13))
    assert data["beta"] == 4
    assert data["gate"]["flip_rate"][0] is None
    assert data["gate"]["flip_rate"][1] == pytest.approx(0.2)
    assert len(data["gate"]["gamma"]["counts"]) == 18
    broken = [*pages.log(3), {"epoch": 4, "diverged": {}}]
    assert page_data.training_data(broken)["epoch"] == [1, 2, 3]
    assert page_data.training_data([]) is None
    plain = [{k: v for k, v in one.items() if k != "gate"} | {"gate": {}} for one in pages.log()]
    assert "gate" not in page_data.training_data(plain)
    long = page_data.training_data(pages.log(3_000))
    assert len(long["epoch"]) <= page_data.EPOCHS + 1
    assert long["epoch"][-1] == 3_000


def test_models_on_the_same_samples_are_compared_in_pairs():
    given = {"a": pages.model(), "b": pages.model(scale=1.0), "c": pages.model(seed=3)}
    data = page_data.comparison_data(list(given), compare_models(given, resamples=1_000))
    assert {(test["first"], test["second"]) for test in data["tests"]} == {(0, 1), (0, 2), (1, 2)}
    found = next(t for t in data["tests"] if (t["first"], t["second"], t["metric"]) == (0, 1, "ece"))
    wanted = metrics.paired_bootstrap(metrics.ece, given["a"], given["b"], resamples=1_000)
    assert found["difference"] == wanted.difference
    assert (found["low"], found["high"]) == (wanted.interval.low, wanted.interval.high)
    assert found["better"] == {"first": 0, "second": 1}[wanted.better]
    other = page_data.comparison_data(["a", "b"], compare_models({"a": pages.model(), "b": pages.model(500)}))
    assert "500" in other["tests"][0]["reason"]
    assert page_data.comparison_data(["a"], ()) is None


def test_all_pairs_of_models_are_compared_with_corrected_p_values():
    """Regression: more than four models were compared only with the first, without correction."""
    given = {f"m{k}": pages.model(60, scale=0.6 + k / 5) for k in range(5)}
    found = [one for one in compare_models(given, resamples=200) if one.metric == "ece"]
    assert len({(one.first, one.second) for one in found}) == len(found) == 10
    single = {
        (one.first, one.second): metrics.paired_bootstrap(
            metrics.ece, given[one.first], given[one.second], resamples=200
        ).p_value
        for one in found
    }
    least = min(single.values())
    assert min(one.comparison.p_value for one in found) == pytest.approx(min(1.0, 10 * least))
    assert all(one.comparison.p_value >= single[one.first, one.second] for one in found)
    assert not any(one.comparison.better for one in found if one.comparison.p_value > 0.05)


def test_more_than_eight_models_are_compared_with_the_first_and_the_best():
    given = {f"m{k}": pages.model(60, scale=0.6 + k / 5) for k in range(9)}
    found = [one for one in compare_models(given, resamples=50, level=0.5) if one.metric == "ece"]
    assert len({(one.first, one.second) for one in found}) == len(found) == 15
    best = min(given, key=lambda name: float(metrics.ece(given[name])))
    assert {one.first for one in found} == {"m0", best}


def test_long_text_is_truncated_and_encodable():
    assert page_data.text_data("short") == "short"
    long = page_data.text_data("x" * 10_000)
    assert long.startswith("x" * 200)
    assert long.endswith("(10,000 characters)")
    assert len(long) < 230
    page_data.text_data("half a pair \ud800").encode()


def test_page_data_is_strict_json():
    for name, one in pages.models().items():
        data = page_data.model_data(name, one.report)
        assert json.loads(json.dumps(data, allow_nan=False)) == data
