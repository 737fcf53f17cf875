"""The smooth ECE is relplot's away from confidences of 0 and 1."""

import numpy as np
import pytest
import torch

from fedlas.metrics import ece, smooth_curve, smooth_ece
from fedlas.predictions import Predictions
from metrics import cases


def samples() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Confidences and correctness: calibrated, over-confident, saturated, constant, a single sample."""
    probs, labels = cases.saturated()
    return {
        "calibrated": cases.binary(3_000),
        "over-confident": cases.binary(2_000, 1, shift=0.2),
        "saturated": (probs.amax(1).double(), (probs.argmax(1) == labels).long()),
        "constant": (torch.full((50,), 0.9, dtype=torch.float64), (torch.arange(50) % 2)),
        "one": (torch.tensor([0.3], dtype=torch.float64), torch.tensor([1])),
        "ends": (torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64), torch.tensor([0, 1, 1])),
    }


@pytest.mark.parametrize("name", list(samples()))
def test_smooth_ece_equals_relplot_away_from_the_ends(name):
    oracle = cases.oracle("relplot")
    confidence, correct = samples()[name]
    confidence = confidence.clamp(0.01, 0.99)
    relplot_error, relplot_bandwidth = oracle.smECE(confidence.numpy(), correct.double().numpy(), return_width=True)
    error = smooth_ece(confidence, correct, scope="positive")
    assert error == pytest.approx(relplot_error, abs=1e-12)
    assert error.details["bandwidth"] == relplot_bandwidth


@pytest.mark.parametrize(("mass", "at_one", "elsewhere"), [(0.7, 0.02, 0.15), (0.9, 0.01, 0.2), (0.6, 0.1, 0.02)])
def test_samples_of_confidence_one_count_as_much_as_others(mass, at_one, elsewhere):
    """Gaps of one sign do not cancel, so the smooth error is their mean; relplot counts confidences of 1 half."""
    oracle = cases.oracle("relplot")
    confidence = 1 - 0.5 * torch.linspace(0.001, 1, 3_000, dtype=torch.float64) ** 4
    ones = torch.ones(round(3_000 * mass / (1 - mass)), dtype=torch.float64)
    accuracy = torch.cat([confidence - elsewhere, ones - at_one])
    confidence = torch.cat([confidence, ones])
    expected = float((confidence - accuracy).mean())
    assert smooth_ece(confidence, accuracy, scope="positive") == pytest.approx(expected, rel=0.03)
    assert abs(oracle.smECE(confidence.numpy(), accuracy.numpy()) - expected) > 0.1 * expected


def test_a_narrow_kernel_is_convolved_as_relplot_does():
    """Nearly calibrated data have the smallest bandwidth, for which the grid has 10,001 points."""
    oracle = cases.oracle("relplot")
    confidence = torch.linspace(0, 1, 20_001, dtype=torch.float64)
    soft_labels = confidence.clone()
    relplot_error = oracle.smECE(confidence.numpy(), soft_labels.numpy())
    assert smooth_ece(confidence, soft_labels, scope="positive") == pytest.approx(relplot_error, abs=1e-12)


def test_smooth_ece_is_near_the_binned_one(golden):
    assert smooth_ece(golden) == pytest.approx(float(ece(golden)), abs=0.01)


def test_predictions_and_soft_labels_work():
    predictions = Predictions(torch.randn(20, 3), torch.randn(20, 3).softmax(1))
    assert 0 <= smooth_ece(predictions) <= 1
    assert "soft" in smooth_ece(predictions).scope


def window_by_hand(confidence: np.ndarray, correct: np.ndarray, center: float, width: float) -> tuple[float, ...]:
    """Weighted sums over samples in a Gaussian window around `center`, with reflections at 0 and 1."""
    mass, squares, confidence_sum, correct_sum = 0.0, 0.0, 0.0, 0.0
    for c, y in zip(confidence, correct, strict=True):
        weight = sum(
            np.exp(-(((center - image) / width) ** 2) / 2) for image in (c, -c, 2 - c, c + 2, c - 2, 4 - c, -2 - c)
        )
        mass, squares, confidence_sum, correct_sum = (
            mass + weight,
            squares + weight**2,
            confidence_sum + weight * c,
            correct_sum + weight * y,
        )
    return mass, confidence_sum / mass, correct_sum / mass, mass**2 / squares


def test_smooth_curve_matches_its_window():
    confidence, correct = cases.binary(400, shift=0.1)
    curve = smooth_curve(confidence, correct, scope="positive", points=21)
    assert curve.bandwidth == smooth_ece(confidence, correct, scope="positive").details["bandwidth"]
    for number in range(0, len(curve.center), 5):
        center = float(curve.center[number])
        mass, mean_confidence, accuracy, effective_samples = window_by_hand(
            confidence.numpy(), correct.numpy(), center, curve.bandwidth
        )
        density = mass / (np.sqrt(2 * np.pi) * curve.bandwidth * 400)
        # Samples lie on a grid, each shared between its two neighbours.
        for curve_values, expected in zip(
            (curve.confidence, curve.accuracy, curve.density, curve.samples),
            (mean_confidence, accuracy, density, effective_samples),
            strict=True,
        ):
            assert float(curve_values[number]) == pytest.approx(expected, rel=2e-3, abs=1e-4)
    assert torch.equal(curve.gap, curve.confidence - curve.accuracy)


def test_smooth_gap_of_a_calibrated_model_is_zero_for_any_density():
    """Smoothing the accuracy itself would show a gap wherever confidences are denser on one side."""
    confidence = 1 - torch.rand(4_000, dtype=torch.float64) ** 4
    curve = smooth_curve(confidence, confidence.clone(), scope="positive")
    assert float(curve.gap.abs().max()) < 1e-9
    assert float(torch.trapezoid(curve.density, curve.center)) == pytest.approx(1, abs=0.02)


def test_a_smooth_curve_is_drawn_only_where_there_are_samples():
    curve = smooth_curve(torch.full((50,), 0.9), torch.ones(50), scope="positive", points=101)
    assert float(curve.center.min()) > 0.5
    assert curve.samples.max() <= 50 + 1e-9
    curve_of_one_sample = smooth_curve(torch.tensor([0.3]), torch.tensor([1]), scope="positive")
    assert len(curve_of_one_sample.center) > 0
    with pytest.raises(ValueError, match=r"points.*1"):
        smooth_curve(torch.rand(9), torch.ones(9), scope="positive", points=1)
