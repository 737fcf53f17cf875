"""Accuracy, top-k, log-likelihood and the Brier score with its parts."""

import math

import numpy as np
import pytest
import torch

from fedlas.metrics import accuracy, brier, nll, top_5, top_k
from fedlas.posthoc.base import mean_nll
from fedlas.predictions import Predictions
from metrics import cases


def test_scoring_rules_equal_reference_values(golden):
    assert accuracy(golden) == pytest.approx(0.424, abs=1e-12)
    assert nll(golden) == pytest.approx(1.6473982334136963, abs=1e-6)


def test_scoring_rules_equal_scikit_learn(golden):
    oracle = cases.oracle("sklearn.metrics")
    probs, labels = golden.probs.double().numpy(), golden.labels.numpy()
    probs = probs / probs.sum(1, keepdims=True)
    assert accuracy(probs, labels) == oracle.accuracy_score(labels, probs.argmax(1))
    assert nll(probs, labels) == pytest.approx(oracle.log_loss(labels, probs), abs=1e-12)
    for k in (1, 2, 4):
        assert top_k(probs, labels, k) == oracle.top_k_accuracy_score(labels, probs, k=k, labels=range(5))
    confidence, binary_labels = cases.binary(300)
    two_columns = torch.stack([1 - confidence, confidence], 1)
    assert brier(two_columns, binary_labels) == pytest.approx(
        2 * oracle.brier_score_loss(binary_labels, confidence), abs=1e-12
    )


def test_top_k_of_equal_probabilities_prefers_the_first_class():
    probs = torch.full((1, 4), 0.25)
    for label in range(4):
        for k in range(1, 5):
            assert top_k(probs, torch.tensor([label]), k) == float(label < k)
            assert top_k(probs, torch.eye(4)[label : label + 1], k) == float(label < k)
    with pytest.raises(ValueError, match=r"\bk\b.*0"):
        top_k(probs, torch.tensor([0]), 0)


def test_top_5_accumulates_soft_labels():
    """Regression: the accumulator failed with an error of torch about the type of an index."""
    probs, soft_labels = torch.randn(20, 8).softmax(1), torch.randn(20, 8).softmax(1)
    result = top_5.accumulator().update(probs[:9], soft_labels[:9]).update(probs[9:], soft_labels[9:]).compute()
    assert result == pytest.approx(float(top_5(probs, soft_labels)), abs=1e-12)
    assert result == pytest.approx(float(soft_labels.gather(1, probs.topk(5).indices).sum(1).mean()), abs=1e-6)


def test_accuracy_with_soft_labels_and_for_binary_probabilities():
    probs = torch.tensor([[0.6, 0.4], [0.2, 0.8]])
    assert accuracy(probs, torch.tensor([[0.7, 0.3], [0.5, 0.5]])) == pytest.approx(0.6)
    assert accuracy(torch.tensor([0.4, 0.8, 0.6]), torch.tensor([0, 1, 0]), scope="positive") == pytest.approx(2 / 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_probability_of_zero_is_replaced_by_the_floor_and_counted(dtype):
    probs = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=dtype)
    result = nll(probs, torch.tensor([1, 0]))
    floor = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    assert result == pytest.approx((-math.log(floor) + math.log(2)) / 2)
    assert result.details == {"floor": floor, "floored": 1}
    soft_result = nll(probs, torch.tensor([[0.5, 0.5], [1.0, 0.0]], dtype=dtype))
    assert soft_result.details["floored"] == 1
    assert soft_result == pytest.approx((-0.5 * math.log(floor) + math.log(2)) / 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_probability_of_zero_has_one_floor_wherever_its_logarithm_is_taken(dtype):
    """Logits of probabilities had another floor, so that a calibrator and a report showed different NLLs."""
    labels = torch.tensor([1, 0])
    predictions = Predictions.from_probs(torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=dtype), labels)
    assert float(nll(predictions)) == pytest.approx(float(nll(Predictions(predictions.logits, labels))), rel=1e-6)
    assert mean_nll(predictions.logits, labels) == pytest.approx(float(nll(predictions)), rel=1e-6)


def test_zeros_of_other_classes_do_not_change_the_nll():
    result = nll(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    assert (float(result), result.details["floored"]) == (0.0, 0)
    assert nll(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0]])) == 0.0


def test_logits_need_no_floor():
    """The softmax of these logits underflows; the log-likelihood is still the logit's distance."""
    predictions = Predictions(torch.tensor([[0.0, 300.0]]), torch.tensor([0]))
    assert nll(predictions) == pytest.approx(300.0)
    assert nll(predictions).details["floored"] == 0
    assert nll(predictions.probs, predictions.labels).details["floored"] == 1


def test_soft_nll_is_the_cross_entropy():
    logits, soft_labels = torch.randn(50, 4), torch.randn(50, 4).softmax(1)
    expected = torch.nn.functional.cross_entropy(logits.double(), soft_labels.double())
    assert nll(Predictions(logits, soft_labels)) == pytest.approx(float(expected), abs=1e-6)
    assert nll(logits.softmax(1), soft_labels) == pytest.approx(float(expected), abs=1e-6)


def test_ignored_labels_are_left_out():
    probs, labels = torch.randn(6, 3).softmax(1), torch.tensor([0, 1, -1, 2, -1, 0])
    valid = labels >= 0
    for metric in (accuracy, nll, brier, top_k):
        assert metric(probs, labels, ignore_index=-1) == metric(probs[valid], labels[valid])


@pytest.mark.parametrize("soft", [False, True])
def test_brier_decomposition_equals_a_manual_calculation(soft):
    source = torch.Generator().manual_seed(0)
    probs = torch.randn(400, 3, generator=source).softmax(1)
    soft_labels = torch.randn(400, 3, generator=source).mul(2).softmax(1)
    labels = soft_labels if soft else torch.randint(3, (400,), generator=source)
    label_rows = (soft_labels if soft else torch.eye(3)[labels]).double().numpy()
    p = probs.double().numpy()
    reliability = resolution = uncertainty = 0.0
    for k in range(3):
        frequency = label_rows[:, k].mean()
        uncertainty += (label_rows[:, k] ** 2).mean() - frequency**2
        index = np.ceil(p[:, k] * 15).astype(int)
        for b in set(index):
            in_bin = index == b
            share, bin_frequency = in_bin.mean(), label_rows[in_bin, k].mean()
            reliability += share * (p[in_bin, k].mean() - bin_frequency) ** 2
            resolution += share * (bin_frequency - frequency) ** 2
    score = brier(probs, labels, bins=15)
    assert score == pytest.approx(float(brier(probs, labels)), abs=1e-15)
    assert score == pytest.approx(((p - label_rows) ** 2).sum(1).mean(), abs=1e-6)
    parts = score.details
    assert parts["reliability"] == pytest.approx(reliability, abs=1e-6)
    assert parts["resolution"] == pytest.approx(resolution, abs=1e-6)
    assert parts["uncertainty"] == pytest.approx(uncertainty, abs=1e-6)
    total = parts["reliability"] - parts["resolution"] + parts["uncertainty"] + parts["within_bins"]
    assert total == pytest.approx(float(score), abs=1e-14)


def test_constant_forecasts_have_no_within_bin_term():
    probs = torch.tensor([[0.8, 0.2]] * 10, dtype=torch.float64)
    score = brier(probs, torch.tensor([0] * 8 + [1] * 2), bins=15)
    assert score.details["reliability"] == pytest.approx(0, abs=1e-15)
    assert score.details["resolution"] == pytest.approx(0, abs=1e-15)
    assert score.details["within_bins"] == pytest.approx(0, abs=1e-15)
    assert score == pytest.approx(0.32)


def test_units_are_shown(golden):
    assert str(accuracy(golden)).startswith("accuracy 42.40 %")
    assert str(nll(golden)).startswith("NLL 1.647 (")
    assert "%" not in str(brier(golden))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_nll_of_logits_farther_apart_than_float32_reaches(dtype):
    large = 3e38
    logits = torch.tensor([[large, -large, 0.0], [0.0, 0.0, 0.0]], dtype=dtype)
    distance = 2 * float(logits[0, 0])
    hard_labels = torch.tensor([1, 0])
    assert float(nll(Predictions(logits, hard_labels))) == pytest.approx((distance + math.log(3)) / 2, rel=1e-6)
    soft_labels = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    assert float(nll(Predictions(logits, soft_labels))) == pytest.approx((distance / 2 + math.log(3)) / 2, rel=1e-6)


def test_a_soft_label_of_zero_on_an_impossible_class_has_no_loss():
    logits = torch.tensor([[1e308, -1e308]] * 2, dtype=torch.float64)
    assert float(nll(Predictions(logits, torch.tensor([[1.0, 0.0]] * 2, dtype=torch.float64)))) == 0
