"""The `compat` presets reproduce the numbers of other packages, which are imported here and nowhere else."""

import warnings

import numpy as np
import pytest
import torch

from fedlas.metrics import aece, classwise_ece, debiased_l2, ece, lp_error, mce, rms_error
from metrics import cases


def problems() -> list[tuple[np.ndarray, np.ndarray]]:
    logits, labels = cases.golden_logits()
    probs = torch.from_numpy(logits).softmax(1).numpy()
    full, full_labels = (part.numpy() for part in cases.saturated())
    return [(probs, labels), (full, full_labels)]


@pytest.mark.parametrize("problem", [0, 1])
def test_torchmetrics_preset_equals_torchmetrics(problem):
    oracle = cases.oracle("torchmetrics.functional.classification")
    probs, labels = (torch.from_numpy(part) for part in problems()[problem])
    for norm, metric in (("l1", ece), ("l2", rms_error), ("max", mce)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torchmetrics_error = oracle.multiclass_calibration_error(
                probs, labels, probs.shape[1], n_bins=15, norm=norm
            )
        assert metric(probs, labels, compat="torchmetrics") == pytest.approx(float(torchmetrics_error), abs=1e-6), norm


def test_binary_torchmetrics_preset_equals_torchmetrics():
    oracle = cases.oracle("torchmetrics.functional.classification")
    confidence, labels = torch.tensor([0.95, 1.0]), torch.tensor([1, 0])
    torchmetrics_error = oracle.binary_calibration_error(confidence, labels, n_bins=10)
    assert float(torchmetrics_error) == pytest.approx(0.525)
    assert ece(confidence, labels, 10, scope="positive", compat="torchmetrics") == pytest.approx(0.525)
    assert ece(confidence, labels, 10, scope="positive") == pytest.approx(0.475)


@pytest.mark.parametrize("problem", [0, 1])
def test_netcal_preset_equals_netcal_equal_width(problem):
    oracle = cases.oracle("netcal.metrics")
    probs, labels = problems()[problem]
    assert ece(probs, labels, compat="netcal") == pytest.approx(oracle.ECE(15).measure(probs, labels), abs=1e-7)
    assert mce(probs, labels, compat="netcal") == pytest.approx(oracle.MCE(15).measure(probs, labels), abs=1e-6)


def test_netcal_preset_uses_the_edges_of_netcal():
    """[lower, upper): a confidence on an edge is in the bin above, where the published rule puts it below."""
    oracle = cases.oracle("netcal.metrics")
    confidence = np.array([0.5, 0.5, 0.55, 0.45, 1.0])
    labels = np.array([1, 1, 0, 0, 1])
    netcal_ece = oracle.ECE(10).measure(confidence, labels)
    assert ece(confidence, labels, 10, scope="positive", compat="netcal") == pytest.approx(netcal_ece)
    assert ece(confidence, labels, 10, scope="positive") != pytest.approx(netcal_ece)


def test_netcal_preset_equals_netcal_equal_mass():
    oracle = cases.oracle("netcal.metrics")
    probs, labels = problems()[0]
    netcal_ece = oracle.ECE(15, equal_intervals=False).measure(probs, labels)
    assert aece(probs, labels, compat="netcal") == pytest.approx(netcal_ece, abs=1e-9)


@pytest.mark.parametrize("problem", [0, 1])
def test_uncertainty_calibration_preset_equals_the_package_equal_width(problem):
    oracle = cases.oracle("calibration")
    probs, labels = problems()[problem]
    compat = "uncertainty-calibration"
    assert ece(probs, labels, compat=compat) == pytest.approx(oracle.get_ece(probs, labels), abs=1e-6)
    package_error = oracle.get_ece(probs, labels, mode="marginal")
    assert classwise_ece(probs, labels, compat=compat) == pytest.approx(package_error, abs=1e-6)


@pytest.mark.parametrize("problem", [0, 1])
def test_uncertainty_calibration_preset_equals_the_package_equal_mass(problem):
    oracle = cases.oracle("calibration")
    probs, labels = problems()[problem]
    compat = "uncertainty-calibration"
    assert aece(probs, labels, compat=compat) == pytest.approx(oracle.get_ece_em(probs, labels), abs=1e-6)
    package_error = oracle.lower_bound_scaling_top_ce(probs, labels, p=2, debias=False)
    assert rms_error(probs, labels, binning="mass", compat=compat) == pytest.approx(package_error, abs=1e-6)
    package_error = oracle.lower_bound_scaling_ce(probs, labels, p=3, debias=False, mode="marginal")
    error = lp_error(probs, labels, p=3, binning="mass", scope="class-wise", compat=compat)
    assert error == pytest.approx(package_error, abs=1e-6)


def test_uncertainty_calibration_preset_equals_the_package_debiased():
    oracle = cases.oracle("calibration")
    probs, labels = problems()[0]
    probs = probs.astype(np.float64)
    probs /= probs.sum(1, keepdims=True)
    for compat in (None, "uncertainty-calibration"):
        top_label_error = debiased_l2(probs, labels, compat=compat)
        assert top_label_error == pytest.approx(oracle.get_top_calibration_error(probs, labels), abs=1e-12)
        classwise_error = debiased_l2(probs, labels, scope="class-wise", compat=compat)
        assert classwise_error == pytest.approx(oracle.get_calibration_error(probs, labels), abs=1e-12)


def test_fewer_samples_than_bins_as_in_uncertainty_calibration():
    oracle = cases.oracle("calibration")
    confidence, labels = np.array([0.2, 0.6, 0.9]), np.array([0, 1, 1])
    package_error = oracle.get_ece_em(confidence, labels)
    assert aece(confidence, labels, scope="positive", compat="uncertainty-calibration") == pytest.approx(package_error)


def test_default_rules_match_other_packages_where_those_are_correct(golden):
    """Without ties and without confidences on an edge all rules agree."""
    probs, labels = golden.probs.numpy(), golden.labels.numpy()
    assert ece(golden) == pytest.approx(cases.oracle("netcal.metrics").ECE(15).measure(probs, labels), abs=1e-9)
    assert aece(golden) == pytest.approx(cases.oracle("calibration").get_ece_em(probs, labels), abs=1e-7)


def test_ece_equals_scikit_learns_calibration_curve():
    curve = cases.oracle("sklearn.calibration").calibration_curve
    confidence, labels = cases.binary(3_000)
    accuracy, mean_confidence = curve(labels.numpy(), confidence.numpy(), n_bins=15)
    counts = np.bincount(np.ceil(confidence.numpy() * 15).astype(int) - 1, minlength=15)
    expected = (np.abs(accuracy - mean_confidence) * counts[counts > 0]).sum() / len(labels)
    assert ece(confidence, labels, scope="positive") == pytest.approx(expected, abs=1e-12)


def test_the_official_aece_leaves_the_least_confident_sample_out(golden):
    """Regression vector: the published procedure and this library on the same samples."""
    assert aece(golden, compat="official") == pytest.approx(0.2456757540, abs=1e-9)
    assert aece(golden) == pytest.approx(0.2449411, abs=1e-6)
