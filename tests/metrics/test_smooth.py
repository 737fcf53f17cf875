"""Kernel calibration errors: smooth ECE is relplot's away from 0 and 1, KDE-ECE is its formula."""

import numpy as np
import pytest
import torch

from fedlas.metrics import ece, kde_ece, smooth_curve, smooth_ece
from fedlas.predictions import Predictions
from metrics import cases


def samples() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of confidence and hits: calibrated, over-confident, saturated, constant, a single one."""
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
    confidence, hits = samples()[name]
    confidence = confidence.clamp(0.01, 0.99)
    theirs, width = oracle.smECE(confidence.numpy(), hits.double().numpy(), return_width=True)
    ours = smooth_ece(confidence, hits, scope="positive")
    assert ours == pytest.approx(theirs, abs=1e-12)
    assert ours.details["bandwidth"] == width


@pytest.mark.parametrize(("mass", "at_one", "elsewhere"), [(0.7, 0.02, 0.15), (0.9, 0.01, 0.2), (0.6, 0.1, 0.02)])
def test_samples_of_confidence_one_count_as_much_as_others(mass, at_one, elsewhere):
    """Gaps of one sign do not cancel, so the smooth error is their mean; relplot counts confidences of 1 half."""
    oracle = cases.oracle("relplot")
    confidence = 1 - 0.5 * torch.linspace(0.001, 1, 3_000, dtype=torch.float64) ** 4
    ones = torch.ones(round(3_000 * mass / (1 - mass)), dtype=torch.float64)
    accuracy = torch.cat([confidence - elsewhere, ones - at_one])
    confidence = torch.cat([confidence, ones])
    truth = float((confidence - accuracy).mean())
    assert smooth_ece(confidence, accuracy, scope="positive") == pytest.approx(truth, rel=0.03)
    assert abs(oracle.smECE(confidence.numpy(), accuracy.numpy()) - truth) > 0.1 * truth


def test_a_narrow_kernel_is_convolved_as_relplot_does():
    """Nearly calibrated data push the width to its end, where the grid has 10,001 points."""
    oracle = cases.oracle("relplot")
    confidence = torch.linspace(0, 1, 20_001, dtype=torch.float64)
    soft = confidence.clone()
    theirs = oracle.smECE(confidence.numpy(), soft.numpy())
    assert smooth_ece(confidence, soft, scope="positive") == pytest.approx(theirs, abs=1e-12)


def kde_by_hand(confidence: np.ndarray, hits: np.ndarray, width: float, points: int = 4_001) -> float:
    grid = np.linspace(0, 1, points)
    density, right = np.zeros(points), np.zeros(points)
    for c, y in zip(confidence, hits, strict=True):
        for centre in (c, -c, 2 - c):
            u = (grid - centre) / width
            kernel = np.where(np.abs(u) < 1, 35 / 32 * (1 - u**2) ** 3, 0) / width
            density += kernel / len(confidence)
            right += kernel * y / len(confidence)
    gap = np.abs(grid * density - right)
    return float((gap[1:] + gap[:-1]).sum() / 2 / (points - 1))


@pytest.mark.parametrize("width", [None, 0.3, 0.02])
def test_kde_ece_equals_its_formula(width):
    confidence, hits = cases.binary(300, shift=0.1)
    found = kde_ece(confidence, hits, bandwidth=width, scope="positive")
    expected_width = width or 1.06 * float(confidence.std()) * 300**-0.2
    assert found.details["bandwidth"] == pytest.approx(expected_width)
    assert found == pytest.approx(kde_by_hand(confidence.numpy(), hits.numpy(), expected_width), abs=2e-5)


def test_kde_ece_of_a_constant_confidence():
    found = kde_ece(torch.full((40,), 0.9), torch.arange(40) % 2, scope="positive")
    assert found == pytest.approx(0.4, abs=1e-3)


def test_kernel_errors_are_near_the_binned_one(golden):
    assert smooth_ece(golden) == pytest.approx(float(ece(golden)), abs=0.01)
    assert kde_ece(golden) == pytest.approx(float(ece(golden)), abs=0.01)


def test_kernel_errors_do_not_depend_on_order():
    confidence, hits = cases.binary(500, shift=0.1)
    order = torch.randperm(500)
    for metric in (smooth_ece, kde_ece):
        assert metric(confidence[order], hits[order], scope="positive") == pytest.approx(
            metric(confidence, hits, scope="positive"), abs=1e-13
        )


def test_predictions_and_soft_labels_work():
    known = Predictions(torch.randn(20, 3), torch.randn(20, 3).softmax(1))
    assert 0 <= smooth_ece(known) <= 1
    assert "soft" in kde_ece(known).scope


def window_by_hand(confidence: np.ndarray, hits: np.ndarray, place: float, width: float) -> tuple[float, ...]:
    """What the window around a place sees, sample by sample, with mirror images at both ends."""
    mass, squares, total, right = 0.0, 0.0, 0.0, 0.0
    for c, y in zip(confidence, hits, strict=True):
        weight = sum(
            np.exp(-(((place - image) / width) ** 2) / 2) for image in (c, -c, 2 - c, c + 2, c - 2, 4 - c, -2 - c)
        )
        mass, squares, total, right = mass + weight, squares + weight**2, total + weight * c, right + weight * y
    return mass, total / mass, right / mass, mass**2 / squares


def test_smooth_curve_matches_its_window():
    confidence, hits = cases.binary(400, shift=0.1)
    found = smooth_curve(confidence, hits, scope="positive", points=21)
    assert found.bandwidth == smooth_ece(confidence, hits, scope="positive").details["bandwidth"]
    for number in range(0, len(found.center), 5):
        place = float(found.center[number])
        mass, mean, right, worth = window_by_hand(confidence.numpy(), hits.numpy(), place, found.bandwidth)
        density = mass / (np.sqrt(2 * np.pi) * found.bandwidth * 400)
        # Samples lie on a grid, each shared between its two neighbours.
        for ours, theirs in zip(
            (found.confidence, found.accuracy, found.density, found.samples), (mean, right, density, worth), strict=True
        ):
            assert float(ours[number]) == pytest.approx(theirs, rel=2e-3, abs=1e-4)
    assert torch.equal(found.gap, found.confidence - found.accuracy)


def test_smooth_gap_of_a_calibrated_model_is_zero_for_any_density():
    """Smoothing the accuracy itself would show a gap wherever confidences are denser on one side."""
    confidence = 1 - torch.rand(4_000, dtype=torch.float64) ** 4
    found = smooth_curve(confidence, confidence.clone(), scope="positive")
    assert float(found.gap.abs().max()) < 1e-9
    assert float(torch.trapezoid(found.density, found.center)) == pytest.approx(1, abs=0.02)


def test_a_smooth_curve_is_drawn_only_where_there_are_samples():
    found = smooth_curve(torch.full((50,), 0.9), torch.ones(50), scope="positive", points=101)
    assert float(found.center.min()) > 0.5
    assert found.samples.max() <= 50 + 1e-9
    one = smooth_curve(torch.tensor([0.3]), torch.tensor([1]), scope="positive")
    assert len(one.center) > 0
    with pytest.raises(ValueError, match=r"points.*1"):
        smooth_curve(torch.rand(9), torch.ones(9), scope="positive", points=1)
