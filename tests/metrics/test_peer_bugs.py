"""Mistakes that other packages make, each as a test. Tests of these mistakes are in other files:

confidence 1, 0; edges; number of bins; last bin; bin centres     test_calibration.py, test_bin_sums.py, test_presets.py
NaN, empty input, rows that do not sum to one, ties of the top    test_calibration.py
counts beyond 2^24, sums in bf16                   test_streaming.py, test_bin_sums.py, test_metrics_gpu.py
percent or fraction, definitions                                  test_result.py
equal mass: constants, order, N < bins    test_calibration.py, test_properties.py, test_bin_sums.py
class-wise: classes that never occur, mean over classes           test_calibration.py, test_presets.py
smooth ECE: kernel, bf16                                          test_smooth.py
AURC: ties                                                        test_selective.py
processes that hold unequally many samples                        test_streaming.py
"""

import math

import pytest
import torch

import fedlas
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
from metrics import cases


def test_nan_probabilities_raise():
    """torchmetrics returns 0.1888 for [nan, 0.5]."""
    for metric in (ece, aece, mce, smooth_ece, aurc):
        with pytest.raises(ValueError, match=r"probs.*row 0.*nan"):
            metric(torch.tensor([math.nan, 0.5]), torch.tensor([1, 0]), scope="positive")


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


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("bins", [1, 2, 15])
def test_a_constant_predictor_has_its_true_error(share, bins):
    """np.unique of equal quantiles leaves no bin at all, and an error of 0."""
    correct = (torch.arange(100) < 100 * share).long()
    confidence = torch.full((100,), 0.6, dtype=torch.float64)
    for metric in (ece, aece, mce, rms_error):
        assert metric(confidence, correct, bins, scope="positive") == pytest.approx(abs(0.6 - share), abs=1e-12)


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


def test_mmce_of_a_batch_without_errors_has_a_gradient():
    """The gradient of netcal's penalty, a square root, is NaN at 0."""
    loss = fedlas.build_loss("mmce", num_classes=3)
    logits = (8 * torch.eye(3)).requires_grad_()
    loss(logits, torch.arange(3)).backward()
    assert torch.isfinite(logits.grad).all()
    assert float(logits.grad.abs().sum()) > 0
