"""Mistakes that other packages make, each as a test. Tests of these mistakes are in other files:

confidence 1, 0; edges; number of bins; last bin; bin centres     test_calibration.py, test_bin_sums.py, test_presets.py
NaN, empty input, rows that do not sum to one, ties of the top    test_calibration.py
counts beyond 2^24, sums in bf16                   test_streaming.py, test_bin_sums.py, test_metrics_gpu.py
percent or fraction, definitions                                  test_result.py
equal mass: least confident sample, constants, order, N < bins    test_calibration.py, test_bin_sums.py
class-wise: classes that never occur, other defaults              test_calibration.py, test_presets.py
smooth ECE: kernel, bf16                                          test_smooth.py
AURC: ties                                                        test_selective.py
processes that hold unequally many samples                        test_streaming.py
"""

import inspect
import math

import numpy as np
import pytest
import torch

import fedlas
from fedlas import metrics
from fedlas.metrics import (
    aece,
    augrc,
    aurc,
    classwise_ece,
    debiased_l2,
    ece,
    histogram,
    mce,
    rms_error,
    smooth_ece,
)
from fedlas.predictions import Predictions
from fedlas.predictions.arrays import as_tensor
from metrics import cases


def positive_ece(confidence: list[float], labels: list[int], **options) -> float:
    return float(ece(torch.tensor(confidence, dtype=torch.float64), torch.tensor(labels), scope="positive", **options))


def test_nan_probabilities_raise():
    """torchmetrics returns 0.1888 for [nan, 0.5]."""
    for metric in (ece, aece, mce, smooth_ece, aurc):
        with pytest.raises(ValueError, match=r"probs.*row 0.*nan"):
            metric(torch.tensor([math.nan, 0.5]), torch.tensor([1, 0]), scope="positive")


def test_row_sum_above_one_raises():
    """torchmetrics accepts [[0.9, 0.9, 0.2]]."""
    for metric in (ece, classwise_ece, metrics.nll, metrics.brier, aurc, metrics.top_k):
        with pytest.raises(ValueError, match=r"row 0.*\[0\.9, 0\.9, 0\.2\]"):
            metric(torch.tensor([[0.9, 0.9, 0.2]]), torch.tensor([0]))


def test_logits_inside_zero_to_one_are_still_logits():
    """torchmetrics guesses batch by batch: such logits gave 0.150 instead of 0.505."""
    logits = torch.rand(400, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(400, dtype=torch.long)
    expected = float(ece(logits.softmax(1), labels))
    in_parts, at_once = ece.accumulator(), ece.accumulator()
    for part in range(0, 400, 100):
        in_parts.update_logits(logits[part : part + 100], labels[part : part + 100])
    at_once.update_logits(logits, labels)
    assert in_parts.compute() == pytest.approx(expected, abs=1e-12)
    assert at_once.compute() == pytest.approx(expected, abs=1e-12)
    assert ece(Predictions(logits, labels)) == pytest.approx(expected, abs=1e-12)
    assert abs(expected - float(ece(logits / logits.sum(1, keepdim=True), labels))) > 0.01


def test_logits_that_sum_to_one_are_still_softmaxed():
    """Softmax is applied to logits even if each row sums to one."""
    rows = torch.tensor([[0.9, 0.1], [0.8, 0.2]])
    result = ece.accumulator().update_logits(rows, torch.tensor([0, 0])).compute()
    assert result == pytest.approx(1 - float(rows.softmax(1)[:, 0].double().mean()), abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_documented_edge_rule_and_the_other_one(dtype):
    """(lower, upper] by default, [lower, upper) by `compat`; MONAI's eps made `right=` do nothing at the edges."""
    for bins in (10, 15, 16):
        on_edge = (torch.arange(1, bins, dtype=torch.float64) / bins).to(dtype)
        correct = torch.ones(bins - 1, dtype=torch.long)
        default_histogram = histogram(on_edge, correct, bins, scope="positive")
        assert default_histogram.bins.counts.tolist() == [1] * (bins - 1) + [0]
        assert "equal-width bins (lower, upper]" in default_histogram.definition.edges
    # Sixteenths are exact in every type, so that no rounding blurs the other rule.
    netcal_histogram = histogram(on_edge, correct, bins, scope="positive", compat="netcal")
    assert netcal_histogram.bins.counts.tolist() == [0] + [1] * 15
    assert "equal-width bins [lower, upper)" in netcal_histogram.definition.edges


def test_confidences_of_zero_and_one_are_counted_once():
    """A saturated binary model: nothing may be dropped at either end, nor counted twice."""
    assert positive_ece([0.0, 1.0, 0.0, 1.0], [0, 1, 1, 0], bins=10) == 0.5
    assert positive_ece([0.0, 1.0], [0, 1]) == 0.0
    bins = histogram(torch.tensor([0.0, 1.0, 0.5]), torch.tensor([0, 1, 1]), 2, scope="positive").bins
    assert bins.counts.tolist() == [2, 1]


def test_saturated_half_precision_logits_give_finite_metrics():
    """12 % of bf16 probabilities are exactly 1 at modest logits; softened in float32 hardly any are."""
    source = torch.Generator().manual_seed(0)
    logits = 6 * torch.randn(5_000, 10, generator=source)
    labels = torch.multinomial(logits.softmax(1), 1, generator=source)[:, 0]
    rounded = logits.bfloat16()
    assert float((rounded.softmax(1).amax(1) == 1).float().mean()) > 0.1
    assert float((Predictions(rounded, labels).confidence == 1).float().mean()) < 0.01
    assert ece(Predictions(rounded, labels)) == pytest.approx(ece(Predictions(logits, labels)), abs=3e-3)
    assert ece(rounded.softmax(1), labels) == pytest.approx(ece(Predictions(logits, labels)), abs=3e-3)


@pytest.mark.parametrize("metric", [ece, aece, classwise_ece, mce, rms_error, debiased_l2, smooth_ece, aurc, augrc])
def test_zero_error_is_a_float_in_every_norm(metric):
    """torchmetrics gives an int64 zero for its L2 norm."""
    error = metric(torch.eye(4), torch.arange(4))
    assert isinstance(error, float)
    assert type(error.value) is float
    assert error == pytest.approx(0.0, abs=1e-12)


def test_debiased_l2_differs_from_the_plain_error():
    """torchmetrics and torch-uncertainty have a `debias=` that nothing can turn on."""
    confidence, correct = cases.binary(1_000)
    biased = rms_error(confidence, correct, binning="mass", scope="positive")
    debiased = debiased_l2(confidence, correct, scope="positive")
    bins = histogram(confidence, correct, binning="mass", scope="positive").bins
    variance = (bins.fraction * bins.accuracy * (1 - bins.accuracy) / (bins.counts - 1)).sum()
    assert debiased**2 == pytest.approx(max(biased**2 - float(variance), 0), abs=1e-12)
    assert debiased < biased
    assert "debiased" in debiased.norm


def test_the_mean_over_bins_is_another_metric_than_aece():
    """netcal and MONAI call it ACE: every bin weighs the same, however few samples it holds."""
    oracle = cases.oracle("netcal.metrics")
    probs, labels = (part.numpy() for part in cases.saturated())
    bins = histogram(probs, labels, compat="netcal").bins
    average = float(bins.gap[bins.counts > 0].abs().mean())
    assert average == pytest.approx(oracle.ACE(15).measure(probs, labels), abs=1e-6)
    assert abs(average - float(aece(probs, labels))) > 0.01
    assert aece(probs, labels).estimator == "AECE"
    assert not hasattr(metrics, "ace"), "the name means three things"


def test_equal_mass_bins_of_tied_confidences_lose_no_sample():
    """Published edges fill 11 of 15 bins of a saturated model. The default fills fewer than 15, and loses no sample."""
    probs, labels = cases.saturated()
    published_bins = histogram(probs, labels, binning="mass", compat="official").bins
    default_bins = histogram(probs, labels, binning="mass").bins
    assert int(published_bins.counts.sum()) == len(labels) - 1
    assert int((published_bins.counts > 0).sum()) < 15
    assert int(default_bins.counts.sum()) == len(labels)
    assert default_bins.counts.max() >= int((probs.amax(1) == 1).sum())


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("bins", [1, 2, 15])
def test_a_constant_predictor_has_its_true_error(share, bins):
    """np.unique of equal quantiles leaves no bin at all, and an error of 0."""
    correct = (torch.arange(100) < 100 * share).long()
    confidence = torch.full((100,), 0.6, dtype=torch.float64)
    for metric in (ece, aece, mce, rms_error):
        assert metric(confidence, correct, bins, scope="positive") == pytest.approx(abs(0.6 - share), abs=1e-12)


def test_rounded_scores_use_the_same_debiased_estimator():
    """uncertainty-calibration takes scores for discrete when fewer than a quarter of them are distinct."""
    confidence, correct = cases.binary(4_000, shift=0.1)
    rounded = (confidence * 100).round() / 100
    assert len(rounded.unique()) < len(rounded) / 4
    exact, coarse = (debiased_l2(c, correct, scope="positive") for c in (confidence, rounded))
    assert exact.definition == coarse.definition
    assert coarse == pytest.approx(float(exact), abs=3e-3)
    half_precision = debiased_l2(confidence.bfloat16(), correct, scope="positive")
    assert half_precision.norm == exact.norm
    assert half_precision == pytest.approx(float(exact), abs=3e-3)


def test_class_wise_ece_has_no_threshold():
    """SCE and TACE drop small probabilities; a number that did would have to say so in its name."""
    assert "threshold" not in inspect.signature(classwise_ece).parameters
    probs = torch.full((50, 100), 0.01)
    result = classwise_ece(probs, torch.zeros(50, dtype=torch.long))
    assert result == pytest.approx((0.99 + 99 * 0.01) / 100, abs=1e-6)
    assert result.norm == "L1"


def test_classwise_ece_is_a_mean_over_classes_not_a_sum():
    probs, labels = cases.saturated(500, 4)
    result = classwise_ece(probs, labels)
    assert result == pytest.approx(sum(result.details["per_class"]) / 4, abs=1e-15)
    wider = torch.cat([probs, torch.zeros(500, 4)], 1)
    assert classwise_ece(wider, labels) == pytest.approx(float(result) / 2, abs=1e-12)


def test_smooth_ece_names_its_kernel_and_accepts_every_dtype():
    """torch-uncertainty has a logit kernel under the same name (0.105 where this one gives 0.063)."""
    probs, labels = cases.saturated()
    confidence, correct = probs.amax(1), probs.argmax(1) == labels
    result = smooth_ece(probs, labels)
    assert "Gaussian" in result.edges
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert smooth_ece(confidence.to(dtype), correct.long(), scope="positive") == pytest.approx(
            float(result), abs=3e-3
        )


def test_arrays_of_other_libraries_are_accepted():
    """Keras and JAX users: whatever numpy can read."""

    class OtherArray:
        def __init__(self, values: np.ndarray) -> None:
            self.values = values

        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            return self.values

        def __len__(self) -> int:
            return len(self.values)

    values = np.arange(6.0).reshape(2, 3)
    assert torch.equal(inspect.unwrap(as_tensor)(OtherArray(values), "probs"), torch.from_numpy(values))


def test_every_result_has_a_definition():
    """Six years of "which ECE is this?": estimator, bins, edges, norm, scope, n and type stand beside each number."""
    probs, labels = cases.saturated(200, 3)
    text = str(ece(Predictions.from_probs(probs, labels, split="test"), bins=20))
    for part in ("ECE", "20 equal-width bins (lower, upper]", "L1", "top-label", "test", "n=200", "float32"):
        assert part in text
    assert str(ece(probs, labels, compat="netcal")) != str(ece(probs, labels))


def test_mmce_of_a_batch_without_errors_has_a_gradient():
    """The gradient of netcal's penalty, a square root, is NaN at 0."""
    loss = fedlas.build_loss("mmce", num_classes=3)
    logits = (8 * torch.eye(3)).requires_grad_()
    loss(logits, torch.arange(3)).backward()
    assert torch.isfinite(logits.grad).all()
    assert float(logits.grad.abs().sum()) > 0


def test_the_weight_of_a_calibration_penalty_counts():
    """netcal's DCA ignores its weight: 0.2455 for 1 and for 10. In this library MMCE and MDCA have one."""
    source = torch.Generator().manual_seed(0)
    logits, labels = 3 * torch.randn(64, 5, generator=source), torch.randint(5, (64,), generator=source)
    cross_entropy = float(torch.nn.functional.cross_entropy(logits, labels))
    for name, keyword in (("mmce", "lambda_"), ("mdca", "beta")):
        loss_of_weight_1, loss_of_weight_10 = (
            float(fedlas.build_loss(name, num_classes=5, **{keyword: weight})(logits, labels)) for weight in (1.0, 10.0)
        )
        assert loss_of_weight_1 != loss_of_weight_10, name
        if name == "mmce":
            assert (loss_of_weight_10 - cross_entropy) == pytest.approx(
                10 * (loss_of_weight_1 - cross_entropy), rel=1e-4
            )
