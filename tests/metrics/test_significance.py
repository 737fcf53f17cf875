"""Tests of calibration: statistics, p-values, and that p-values of calibrated models are uniform."""

import math

import numpy as np
import pytest
import torch

from fedlas.metrics import ks_test, kuiper_test, spiegelhalter_test
from fedlas.metrics.calibration_tests import _ks_tail, _kuiper_tail
from metrics import cases

# MAPIE 1.6.0 (kolmogorov_smirnov_*, kuiper_*, spiegelhalter_*) on the golden samples at temperature 2.4, float64
# confidences. It adds a jitter of 1e-8 to break ties, and its Spiegelhalter p-value is one-sided.
MAPIE = {"ks": (1.3652637974082311, 0.3442561605495269), "kuiper": (1.7286560718217963, 0.33112050982998187)}
MAPIE_SPIEGELHALTER = (-0.6364683434433089, 0.7377643960445939)


def test_tests_equal_mapie(temperature_scaled):
    for test, (statistic, p_value) in ((ks_test, MAPIE["ks"]), (kuiper_test, MAPIE["kuiper"])):
        details = test(temperature_scaled).details
        assert details["statistic"] == pytest.approx(statistic, abs=1e-6)
        assert details["p_value"] == pytest.approx(p_value, abs=1e-6)
    result = spiegelhalter_test(temperature_scaled)
    assert result == pytest.approx(MAPIE_SPIEGELHALTER[0], abs=1e-6)
    assert result.details["p_value"] == pytest.approx(2 * (1 - MAPIE_SPIEGELHALTER[1]), abs=1e-6)


def test_statistics_equal_a_manual_calculation():
    confidence = torch.tensor([0.2, 0.6, 0.9], dtype=torch.float64)
    correct = torch.tensor([1, 0, 1])
    scale = math.sqrt(0.2 * 0.8 + 0.6 * 0.4 + 0.9 * 0.1) / 3
    steps = [0.8 / 3, 0.2 / 3, 0.3 / 3]
    assert ks_test(confidence, correct, scope="positive") == pytest.approx(max(steps))
    assert ks_test(confidence, correct, scope="positive").details["statistic"] == pytest.approx(max(steps) / scale)
    assert kuiper_test(confidence, correct, scope="positive") == pytest.approx(max(steps) - 0)
    weights = [(0.8, 0.6), (-0.6, -0.2), (0.1, -0.8)]
    variance = sum(w * w * c * (1 - c) for (_, w), c in zip(weights, (0.2, 0.6, 0.9), strict=True))
    expected = sum(d * w for d, w in weights) / math.sqrt(variance)
    assert spiegelhalter_test(confidence, correct, scope="positive") == pytest.approx(expected)


@pytest.mark.parametrize(("tail", "critical_value"), [(_ks_tail, 2.2414), (_kuiper_tail, 2.4977)])
def test_p_values_equal_published_critical_values(tail, critical_value):
    """Known 5 % points of the maximum and the range; the two series on either side of 1 meet there."""
    assert tail(critical_value) == pytest.approx(0.05, abs=1e-4)
    assert tail(1 + 1e-9) == pytest.approx(tail(1 - 1e-9), abs=1e-7)
    assert tail(0.0) == 1.0
    assert 0 < tail(20.0) < 1e-80


@pytest.mark.parametrize("test", [ks_test, kuiper_test, spiegelhalter_test])
def test_p_values_of_calibrated_models_are_uniform(test):
    results = [test(*cases.binary(400, seed), scope="positive") for seed in range(300)]
    p_values = np.array([result.details["p_value"] for result in results])
    assert 0.01 <= np.mean(p_values < 0.05) <= 0.09
    assert 0.4 <= np.mean(p_values < 0.5) <= 0.62


def test_miscalibrated_models_have_small_p_values():
    confidence, correct = cases.binary(2_000, shift=0.1)
    for test in (ks_test, kuiper_test, spiegelhalter_test):
        assert test(confidence, correct, scope="positive").details["p_value"] < 1e-6


def test_order_does_not_matter_even_with_ties():
    confidence = torch.tensor([0.5] * 50 + [0.9] * 50, dtype=torch.float64)
    correct = torch.arange(100) % 3 % 2
    order = torch.randperm(100)
    for test in (ks_test, kuiper_test, spiegelhalter_test):
        in_order, shuffled = (
            test(confidence, correct, scope="positive"),
            test(confidence[order], correct[order], scope="positive"),
        )
        assert in_order == pytest.approx(float(shuffled), abs=1e-12)


def test_confidences_of_zero_and_one_have_p_value_zero_or_one():
    ones = torch.ones(5)
    for test in (ks_test, kuiper_test, spiegelhalter_test):
        assert test(ones, torch.ones(5, dtype=torch.long), scope="positive").details["p_value"] == 1.0
        assert test(ones, torch.tensor([1, 1, 1, 1, 0]), scope="positive").details["p_value"] == 0.0


def test_soft_labels_raise():
    with pytest.raises(ValueError, match="soft"):
        ks_test(torch.rand(5), torch.rand(5), scope="positive")
