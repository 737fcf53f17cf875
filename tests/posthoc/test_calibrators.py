"""Each calibrator against a second implementation of its definition or against another library."""

import numpy as np
import pytest
import torch
from calibrator_cases import binary_problem, problem
from scipy.optimize import minimize
from torch.nn import functional

from fedlas.posthoc import (
    Dirichlet,
    EnsembleTemperature,
    FeatureClipping,
    HistogramBinning,
    Isotonic,
    MatrixScaling,
    Platt,
    Probmetrics,
    Temperature,
    VectorScaling,
    load_calibrator,
)
from fedlas.posthoc.base import DoubtfulFit
from fedlas.predictions import Predictions


def problem_scaled_by_class(n: int = 1500) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits with a wrong factor and offset for each class."""
    logits, labels = problem(n, 3, scale=1.0)
    return logits / torch.tensor([0.5, 1.0, 2.0]) - torch.tensor([0.3, 0.0, -0.6]), labels


def test_vector_scaling_recovers_factors_and_offsets():
    logits, labels = problem_scaled_by_class(20_000)
    parameters = VectorScaling(penalty=0).fit(logits, labels).learned
    offset = parameters["offset"] - parameters["offset"].mean()
    expected_offset = torch.tensor([0.5, 1.0, 2.0]) * torch.tensor([0.3, 0.0, -0.6])
    torch.testing.assert_close(parameters["scale"], torch.tensor([0.5, 1, 2]).double(), atol=0.06, rtol=0)
    torch.testing.assert_close(offset, (expected_offset - expected_offset.mean()).double(), atol=0.06, rtol=0)


@pytest.mark.parametrize("full_matrix", [False, True])
def test_affine_maps_match_a_reference_solver(full_matrix: bool):
    logits, labels = problem_scaled_by_class(400)
    x = logits.numpy()

    def affine_logits(parameters: np.ndarray) -> np.ndarray:
        return (
            x @ parameters[3:].reshape(3, 3).T + parameters[:3] if full_matrix else x * parameters[3:] + parameters[:3]
        )

    def objective(parameters: np.ndarray) -> float:
        return float(functional.cross_entropy(torch.from_numpy(affine_logits(parameters)), labels))

    start = np.concatenate([np.zeros(3), np.eye(3).reshape(-1) if full_matrix else np.ones(3)])
    reference_loss = minimize(objective, start, method="BFGS", options={"gtol": 1e-7}).fun
    calibrator = (MatrixScaling if full_matrix else VectorScaling)(penalty=0).fit(logits, labels)
    assert calibrator.fitted.after == pytest.approx(reference_loss, abs=1e-7)


@pytest.mark.parametrize("cls", [VectorScaling, MatrixScaling, Dirichlet])
def test_a_large_penalty_reduces_to_temperature_scaling(cls: type):
    logits, labels = problem()
    expected = Temperature().fit(logits, labels).transform(logits).log_softmax(1)
    log_probs = cls(penalty=1e9).fit(logits, labels).transform(logits).log_softmax(1)
    torch.testing.assert_close(log_probs, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cls", [VectorScaling, MatrixScaling, Dirichlet])
@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_affine_maps_are_invariant_to_the_scale_of_logits(cls: type, scale: float):
    logits, labels = problem_scaled_by_class()
    probs = cls().fit(logits, labels).transform(logits).softmax(1)
    probs_of_scaled = cls().fit(scale * logits, labels).transform(scale * logits).softmax(1)
    if cls is not Dirichlet:  # its inputs are log-probabilities, which are not proportional to logits
        torch.testing.assert_close(probs_of_scaled, probs, atol=1e-5, rtol=1e-4)
    assert functional.nll_loss(probs_of_scaled.log(), labels) < functional.cross_entropy(scale * logits, labels)


def test_a_class_without_samples_keeps_a_finite_logit():
    logits, labels = problem(300, 5)
    labels = torch.where(labels == 4, 0, labels)
    for cls in (VectorScaling, MatrixScaling, Dirichlet):
        with pytest.warns(DoubtfulFit, match="1 of 5 classes .* class 4"):
            assert cls().fit(logits, labels).learned["offset"].abs().max() < 20


def test_matrix_scaling_corrects_swapped_classes():
    logits, labels = problem(2000, 3, scale=1.0)
    swapped = logits[:, [1, 0, 2]]
    prediction = MatrixScaling().fit(swapped, labels).transform(swapped).argmax(1)
    assert (prediction == labels).double().mean() > (logits.argmax(1) == labels).double().mean() - 0.01


def test_dirichlet_is_invariant_to_a_shift_of_logits():
    logits, labels = problem()
    shifted = logits + torch.linspace(-50, 50, len(logits), dtype=torch.float64)[:, None]
    calibrator, calibrator_of_shifted = Dirichlet().fit(logits, labels), Dirichlet().fit(shifted, labels)
    torch.testing.assert_close(
        calibrator.transform(logits), calibrator_of_shifted.transform(shifted), atol=1e-5, rtol=1e-5
    )


def test_isotonic_matches_scikit_learn():
    isotonic = pytest.importorskip("sklearn.isotonic")
    logits, labels = problem(500)
    logits = (4 * logits).round() / 4  # with ties
    new_logits, _ = problem(300, seed=1)
    calibrated = Isotonic().fit(logits, labels).transform(new_logits).exp()
    columns = []
    for k in range(4):
        curve = isotonic.IsotonicRegression(out_of_bounds="clip")
        curve.fit(logits.softmax(1)[:, k].numpy(), (labels == k).numpy().astype(float))
        columns.append(curve.predict(new_logits.softmax(1)[:, k].numpy()))
    table = np.stack(columns, 1)
    expected = table / table.sum(1, keepdims=True)
    np.testing.assert_allclose(calibrated.numpy(), expected, atol=1e-6)


def test_histogram_binning_returns_the_frequency_of_each_bin():
    logits, labels = problem(400, 3)
    probs = logits.softmax(1)
    calibrated = HistogramBinning(bins=10).fit(logits, labels).transform(logits).exp()
    expected = torch.empty_like(probs)
    for k in range(3):
        bin_index = (10 * probs[:, k]).ceil()
        for i in range(400):
            expected[i, k] = (labels[bin_index == bin_index[i]] == k).double().mean()
    torch.testing.assert_close(calibrated, expected / expected.sum(1, keepdim=True), atol=1e-6, rtol=1e-6)


def test_bins_of_equal_mass_hold_equally_many_samples():
    logits, labels = problem(400, 3)
    calibrator = HistogramBinning(bins=8, binning="mass").fit(logits, labels)
    for k, edges in enumerate(calibrator.learned["edges"]):
        counts, _ = np.histogram(logits.softmax(1)[:, k].numpy(), edges.numpy())
        assert counts.tolist() == [50] * 8


def test_a_constant_probability_is_one_bin_in_any_type():
    logits = torch.tensor([[2.0, 1.0]]).repeat(40, 1)
    labels = (torch.arange(40) < 10).long()
    calibrator = HistogramBinning(binning="mass").fit(logits.double(), labels)
    for dtype in (torch.float64, torch.float32):
        calibrated = calibrator.transform(logits.to(dtype)).exp()
        torch.testing.assert_close(calibrated[0], torch.tensor([0.75, 0.25], dtype=dtype))


def test_probabilities_in_an_empty_bin_are_unchanged():
    calibrator = HistogramBinning(bins=10).fit(torch.tensor([[4.0, 0.0], [0.0, 4.0]]), torch.tensor([0, 1]))
    new_logits = torch.tensor([[0.4, 0.0]])
    torch.testing.assert_close(calibrator.transform(new_logits).exp(), new_logits.softmax(1))


@pytest.mark.parametrize("cls", [HistogramBinning, Isotonic, EnsembleTemperature])
def test_calibrators_of_probabilities_return_logarithms_above_the_floor(cls: type):
    logits, labels = problem(100)
    log_probs = cls(floor=1e-3).fit(logits, labels).transform(logits)
    torch.testing.assert_close(log_probs.exp().sum(1), torch.ones(100, dtype=torch.float64))
    assert log_probs.exp().min() >= 1e-3 / (1 + 4e-3)
    with pytest.raises(ValueError, match=r"floor.*0"):
        cls(floor=0)


def test_ensemble_weights_are_optimal_on_the_simplex():
    logits, labels = problem(800, scale=3.0)
    labels = torch.where(torch.arange(800) % 9 == 0, torch.randint(4, (800,)), labels)  # some labels are noise
    calibrator = EnsembleTemperature().fit(logits, labels)
    weights, t = calibrator.learned["weights"].numpy(), float(calibrator.learned["temperature"])
    rows = np.arange(800)
    member_probs = np.stack(
        [(logits / t).softmax(1)[rows, labels], logits.softmax(1)[rows, labels], np.full(800, 0.25)], 1
    )

    def objective(w: np.ndarray) -> float:
        return float(-np.log(member_probs @ w).mean())

    reference = minimize(
        objective,
        np.full(3, 1 / 3),
        bounds=[(0, 1)] * 3,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-14},
    )
    assert weights.sum() == pytest.approx(1)
    assert weights.min() >= 0
    assert objective(weights) == pytest.approx(reference.fun, abs=1e-8)
    assert calibrator.fitted.after <= Temperature().fit(logits, labels).fitted.after + 1e-9


def test_platt_matches_logistic_regression():
    linear = pytest.importorskip("sklearn.linear_model")
    score, labels = binary_problem()
    regression = linear.LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(
        score[:, None].numpy(), labels.numpy()
    )
    calibrator = Platt(smooth=False).fit(score, labels)
    assert float(calibrator.learned["slope"]) == pytest.approx(regression.coef_.item(), rel=1e-4)
    assert float(calibrator.learned["offset"]) == pytest.approx(regression.intercept_.item(), rel=1e-3)


def test_platt_smooths_targets_as_in_the_paper():
    score = torch.tensor([-1000.0, 1000.0, 1000.0], dtype=torch.float64)
    labels = torch.tensor([0, 1, 1])
    probs = Platt().fit(score, labels).transform(score).sigmoid()
    torch.testing.assert_close(probs, torch.tensor([1 / 3, 3 / 4, 3 / 4]).double(), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"platt.*4.*vector_scaling"):
        Platt().fit(*problem())


def test_probmetrics_calibrators_are_found_by_name_and_by_class():
    pytest.importorskip("probmetrics")
    logits, labels = problem()
    for method in ("svs", "ETSCalibrator"):
        calibrator = Probmetrics(method=method).fit(logits, labels)
        assert calibrator.fitted.after < calibrator.fitted.before
    with pytest.raises(ValueError, match=r"'magic'.*ETSCalibrator"):
        Probmetrics(method="magic").fit(logits, labels)
    with pytest.raises(ValueError, match=r"nowhere.*pickle"):
        Probmetrics(method="svs").fit(logits, labels).save("nowhere")


class TestFeatureClipping:
    def predictions(self, n: int = 800, *, large: float = 40.0) -> tuple[Predictions, torch.Tensor, torch.Tensor]:
        """Predictions of a linear layer that is correct except for uninformative large values of one feature."""
        random = torch.Generator().manual_seed(0)
        weight = torch.randn(3, 6, generator=random)
        bias = torch.randn(3, generator=random)
        features = torch.rand(n, 6, generator=random)
        labels = torch.multinomial((features @ weight.T + bias).softmax(1), 1, generator=random)[:, 0]
        features[: n // 10, 0] *= large
        return Predictions(features @ weight.T + bias, labels, features=features, split="val"), weight, bias

    def test_large_features_are_clipped(self):
        predictions, weight, bias = self.predictions()
        clipping = FeatureClipping(weight, bias).fit(predictions)
        clipped = clipping.transform(predictions)
        assert clipping.threshold < 5
        before = functional.cross_entropy(predictions.logits, predictions.labels)
        assert functional.cross_entropy(clipped.logits, clipped.labels) < before
        clamped_features = predictions.features.clamp(-clipping.threshold, clipping.threshold)
        torch.testing.assert_close(clipped.logits, clamped_features @ weight.T + bias)
        assert clipped.split == "val"

    def test_good_features_are_unchanged(self):
        predictions, weight, bias = self.predictions(large=1.0)
        clipping = FeatureClipping(weight, bias).fit(predictions)
        before = functional.cross_entropy(predictions.logits, predictions.labels)
        clipped = clipping.transform(predictions)
        assert functional.cross_entropy(clipped.logits, clipped.labels) <= before

    def test_weights_of_another_layer_raise(self):
        predictions, weight, bias = self.predictions()
        with pytest.raises(ValueError, match="row 0"):
            FeatureClipping(-weight, bias).fit(predictions)
        with pytest.raises(ValueError, match=r"features.*6.*5"):
            FeatureClipping(weight[:, :5], bias).fit(predictions)
        with pytest.raises(ValueError, match="features"):
            FeatureClipping(weight, bias).fit(Predictions(predictions.logits, predictions.labels))
        with pytest.raises(RuntimeError, match=r"fit\("):
            FeatureClipping(weight, bias).transform(predictions)


def test_a_single_sample_without_its_dimension_raises_or_warns():
    """Regression: a row of two logits was silently read as two samples with one logit each."""
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(200, 3, generator=generator), torch.randint(3, (200,), generator=generator)
    with pytest.raises(ValueError, match=r"3 classes.*logits\[None\]"):
        Temperature().fit(logits, labels).transform(logits[0])
    binary = Temperature().fit(logits[:, :2], labels % 2)
    with pytest.warns(UserWarning, match=r"two samples.*logits\[None\]"):
        binary.transform(logits[0, :2])


def test_a_file_of_a_calibrator_of_another_package_says_how_to_read_it(tmp_path):
    """Regression: the file was called damaged."""
    calibrator = Temperature().fit(torch.randn(50, 3), torch.arange(50) % 3)
    calibrator.name = "shift"
    calibrator.save(tmp_path / "shift.safetensors")
    with pytest.raises(ValueError, match=r"'shift'.*`load` of the class"):
        load_calibrator(tmp_path / "shift.safetensors")


@pytest.mark.parametrize("offset", [1, 2, 8])
def test_a_flipped_bit_in_the_tensors_of_a_file_raises(tmp_path, offset):
    """Regression: a flipped bit made a temperature negative without an error."""
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(200, 4, generator=generator), torch.arange(200) % 4
    logits[torch.arange(200), labels] += 1
    fitted = Temperature().fit(logits, labels)
    path = tmp_path / "t.safetensors"
    fitted.save(path)
    assert torch.equal(load_calibrator(path).transform(logits), fitted.transform(logits))
    content = bytearray(path.read_bytes())
    content[-offset] ^= 0x80
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"t\.safetensors"):
        load_calibrator(path)


@pytest.mark.parametrize("entry", [b"floor", b"1e-0", b"isotonic", b"200"])
def test_a_flipped_bit_in_the_metadata_of_a_file_raises(tmp_path, entry):
    """Regression: options and fitting data in the metadata were not verified."""
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(200, 4, generator=generator), torch.arange(200) % 4
    path = tmp_path / "t.safetensors"
    Isotonic().fit(logits, labels).save(path)
    content = bytearray(path.read_bytes())
    content[content.index(entry) + len(entry) - 1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"t\.safetensors"):
        load_calibrator(path)


def test_probabilities_given_as_logits_warn():
    logits = torch.randn(200, 4)
    labels = torch.multinomial(logits.softmax(1), 1)[:, 0]
    with pytest.warns(UserWarning, match="every row of the logits lies between 0 and 1"):
        Temperature().fit(logits.softmax(1), labels)
    fitted = Temperature().fit(logits, labels)
    with pytest.warns(UserWarning, match="every row of the logits lies between 0 and 1"):
        fitted.transform(logits.softmax(1).numpy())
    fitted.transform(logits[:1].softmax(1))  # too few rows
    fitted.transform(Predictions.from_probs(logits.softmax(1), labels))
