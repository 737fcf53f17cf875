"""Accuracy, top-k, log-likelihood and the Brier score with its parts."""

import math

import numpy as np
import pytest
import torch

from fedlas.metrics import accuracy, brier, nll, top_k
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
    confidence, hits = cases.binary(300)
    both = torch.stack([1 - confidence, confidence], 1)
    assert brier(both, hits) == pytest.approx(2 * oracle.brier_score_loss(hits, confidence), abs=1e-12)


def test_top_k_of_equal_probabilities_prefers_the_first_class():
    probs = torch.full((1, 4), 0.25)
    for label in range(4):
        for k in range(1, 5):
            assert top_k(probs, torch.tensor([label]), k) == float(label < k)
            assert top_k(probs, torch.eye(4)[label : label + 1], k) == float(label < k)
    with pytest.raises(ValueError, match=r"\bk\b.*0"):
        top_k(probs, torch.tensor([0]), 0)


def test_accuracy_with_soft_labels_and_for_binary_probabilities():
    probs = torch.tensor([[0.6, 0.4], [0.2, 0.8]])
    assert accuracy(probs, torch.tensor([[0.7, 0.3], [0.5, 0.5]])) == pytest.approx(0.6)
    assert accuracy(torch.tensor([0.4, 0.8, 0.6]), torch.tensor([0, 1, 0]), scope="positive") == pytest.approx(2 / 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_probability_of_zero_is_replaced_by_the_floor_and_counted(dtype):
    probs = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=dtype)
    found = nll(probs, torch.tensor([1, 0]))
    floor = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    assert found == pytest.approx((-math.log(floor) + math.log(2)) / 2)
    assert found.details == {"floor": floor, "floored": 1}
    soft = nll(probs, torch.tensor([[0.5, 0.5], [1.0, 0.0]], dtype=dtype))
    assert soft.details["floored"] == 1
    assert soft == pytest.approx((-0.5 * math.log(floor) + math.log(2)) / 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_probability_of_zero_has_one_floor_wherever_its_logarithm_is_taken(dtype):
    """Logits of probabilities had another floor, so that a calibrator and a report showed different NLLs."""
    labels = torch.tensor([1, 0])
    given = Predictions.from_probs(torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=dtype), labels)
    assert float(nll(given)) == pytest.approx(float(nll(Predictions(given.logits, labels))), rel=1e-6)
    assert mean_nll(given.logits, labels) == pytest.approx(float(nll(given)), rel=1e-6)


def test_zeros_of_other_classes_do_not_change_the_nll():
    found = nll(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    assert (float(found), found.details["floored"]) == (0.0, 0)
    assert nll(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0]])) == 0.0


def test_logits_need_no_floor():
    """The softmax of these logits underflows; the log-likelihood is still the logit's distance."""
    known = Predictions(torch.tensor([[0.0, 300.0]]), torch.tensor([0]))
    assert nll(known) == pytest.approx(300.0)
    assert nll(known).details["floored"] == 0
    assert nll(known.probs, known.labels).details["floored"] == 1


def test_soft_nll_is_the_cross_entropy():
    logits, soft = torch.randn(50, 4), torch.randn(50, 4).softmax(1)
    expected = torch.nn.functional.cross_entropy(logits.double(), soft.double())
    assert nll(Predictions(logits, soft)) == pytest.approx(float(expected), abs=1e-6)
    assert nll(logits.softmax(1), soft) == pytest.approx(float(expected), abs=1e-6)


def test_ignored_labels_are_left_out():
    probs, labels = torch.randn(6, 3).softmax(1), torch.tensor([0, 1, -1, 2, -1, 0])
    kept = labels >= 0
    for metric in (accuracy, nll, brier, top_k):
        assert metric(probs, labels, ignore_index=-1) == metric(probs[kept], labels[kept])


@pytest.mark.parametrize("soft", [False, True])
def test_brier_decomposition_equals_a_manual_calculation(soft):
    source = torch.Generator().manual_seed(0)
    probs = torch.randn(400, 3, generator=source).softmax(1)
    hot = torch.randn(400, 3, generator=source).mul(2).softmax(1)
    labels = hot if soft else torch.randint(3, (400,), generator=source)
    rows = (hot if soft else torch.eye(3)[labels]).double().numpy()
    p = probs.double().numpy()
    reliability = resolution = uncertainty = 0.0
    for k in range(3):
        frequency = rows[:, k].mean()
        uncertainty += (rows[:, k] ** 2).mean() - frequency**2
        index = np.ceil(p[:, k] * 15).astype(int)
        for b in set(index):
            inside = index == b
            share, often = inside.mean(), rows[inside, k].mean()
            reliability += share * (p[inside, k].mean() - often) ** 2
            resolution += share * (often - frequency) ** 2
    found = brier(probs, labels, bins=15)
    assert found == pytest.approx(float(brier(probs, labels)), abs=1e-15)
    assert found == pytest.approx(((p - rows) ** 2).sum(1).mean(), abs=1e-6)
    parts = found.details
    assert parts["reliability"] == pytest.approx(reliability, abs=1e-6)
    assert parts["resolution"] == pytest.approx(resolution, abs=1e-6)
    assert parts["uncertainty"] == pytest.approx(uncertainty, abs=1e-6)
    together = parts["reliability"] - parts["resolution"] + parts["uncertainty"] + parts["within_bins"]
    assert together == pytest.approx(float(found), abs=1e-14)


def test_constant_forecasts_have_no_within_bin_term():
    probs = torch.tensor([[0.8, 0.2]] * 10, dtype=torch.float64)
    found = brier(probs, torch.tensor([0] * 8 + [1] * 2), bins=15)
    assert found.details["reliability"] == pytest.approx(0, abs=1e-15)
    assert found.details["resolution"] == pytest.approx(0, abs=1e-15)
    assert found.details["within_bins"] == pytest.approx(0, abs=1e-15)
    assert found == pytest.approx(0.32)


def test_units_are_shown(golden):
    assert str(accuracy(golden)).startswith("accuracy 42.40 %")
    assert str(nll(golden)).startswith("NLL 1.647 (")
    assert "%" not in str(brier(golden))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_nll_of_logits_farther_apart_than_float32_reaches(dtype):
    far = 3e38
    logits = torch.tensor([[far, -far, 0.0], [0.0, 0.0, 0.0]], dtype=dtype)
    apart = 2 * float(logits[0, 0])
    hard = torch.tensor([1, 0])
    assert float(nll(Predictions(logits, hard))) == pytest.approx((apart + math.log(3)) / 2, rel=1e-6)
    soft = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    assert float(nll(Predictions(logits, soft))) == pytest.approx((apart / 2 + math.log(3)) / 2, rel=1e-6)


def test_a_soft_label_of_zero_on_an_impossible_class_has_no_loss():
    logits = torch.tensor([[1e308, -1e308]] * 2, dtype=torch.float64)
    assert float(nll(Predictions(logits, torch.tensor([[1.0, 0.0]] * 2, dtype=torch.float64)))) == 0
