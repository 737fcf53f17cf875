"""Binned calibration errors: golden values, and every pitfall that other packages fell into."""

import math

import numpy as np
import pytest
import torch

from fedlas.metrics import (
    aece,
    aurc,
    brier,
    classwise_ece,
    debiased_l2,
    ece,
    histogram,
    lp_error,
    mce,
    nll,
    over_ece,
    rms_error,
    signed_ece,
    top_k,
    under_ece,
)
from fedlas.predictions import Predictions, TopLabelPredictions
from metrics import cases


def test_official_presets_match_reference_values(golden):
    """Printed by the published code, which sums in float32; this library sums in float64."""
    assert ece(golden, compat="official") == pytest.approx(0.24641016125679016, abs=5e-8)
    assert aece(golden, compat="official") == pytest.approx(0.24567577242851257, abs=5e-8)
    assert classwise_ece(golden, compat="official") == pytest.approx(0.10570194572210312, abs=5e-8)
    over, under = (part(golden, compat="official") for part in (over_ece, under_ece))
    assert over == pytest.approx(0.24567575120937923, abs=5e-8)
    assert under == pytest.approx(0.0007344150892041323, abs=5e-8)


def test_confidence_one_is_in_the_last_bin():
    """torchmetrics#3510: it sat in a bin of its own, and 0.525 came out."""
    assert ece(*cases.two_classes([0.95, 1.0], [1, 0]), bins=10) == pytest.approx(0.475)


def test_a_saturated_model_has_the_same_ece_in_float32_and_float64():
    probs, labels = cases.saturated()
    assert float((probs.amax(1) == 1).double().mean()) > 0.1
    assert ece(probs, labels) == pytest.approx(ece(probs.double(), labels), abs=1e-12)


def test_confidence_zero_is_counted_once():
    """torchmetrics#1646 indexed -1; the published code raises KeyError or drops it."""
    bins = histogram(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0, 1, 1]), scope="positive").bins
    assert bins.counts[0] == 2
    assert int(bins.counts.sum()) == 3
    assert ece(torch.tensor([0.0, 0.0]), torch.tensor([0, 1]), scope="positive") == 0.5


def test_gap_uses_mean_confidence_rather_than_bin_centre():
    """pycalib#4: a model that says 0.9 and is right 9 times in 10 has no error."""
    assert ece(*cases.two_classes([0.9] * 10, [1] * 9 + [0])) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize(
    "metric", [ece, aece, classwise_ece, mce, rms_error, debiased_l2, signed_ece, nll, brier, aurc, top_k]
)
@pytest.mark.parametrize(
    ("probs", "labels", "message"),
    [
        ([[0.5, 0.5], [math.nan, 0.5]], [0, 1], "row 1"),
        ([[0.5, 0.5], [0.5, math.inf]], [0, 1], "row 1"),
        ([[0.9, 0.9], [0.5, 0.5]], [0, 1], "row 0"),
        ([[1.5, -0.5]], [0], "row 0"),
        ([[0.5, 0.5], [0.5, 0.5]], [0, 2], "labels.*row 1.*2"),
        ([[0.5, 0.5], [0.5, 0.5]], [-1, 0], "labels.*row 0"),
        ([[0.5, 0.5], [0.5, 0.5]], [0], "shape"),
    ],
)
def test_invalid_input_raises_an_error_that_names_the_row(metric, probs, labels, message):
    with pytest.raises(ValueError, match=message):
        metric(np.array(probs), np.array(labels))


def test_no_samples_are_an_error():
    with pytest.raises(ValueError, match="sample"):
        ece(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))


def test_row_sums_may_differ_from_one_by_rounding_of_the_dtype():
    probs, labels = cases.saturated(500)
    for dtype in (torch.bfloat16, torch.float16):
        assert ece(probs.to(dtype), labels) == pytest.approx(ece(probs, labels), abs=1e-2)
    with pytest.raises(ValueError, match="distribution"):
        ece(probs * 1.001, labels)


def test_logits_passed_as_probabilities_raise():
    """torchmetrics guesses by value: logits inside [0, 1] gave 0.150 instead of 0.505."""
    logits = torch.rand(100, 3)
    with pytest.raises(ValueError, match="distribution"):
        ece(logits, torch.zeros(100, dtype=torch.long))


def test_probs_without_labels_and_integer_probs_are_errors():
    with pytest.raises(TypeError, match="labels"):
        ece(torch.eye(3))
    with pytest.raises(TypeError, match="floating-point"):
        ece(torch.eye(3, dtype=torch.long), torch.arange(3))


def test_ties_of_the_top_probability_go_to_the_first_class():
    probs = torch.tensor([[0.4, 0.4, 0.2]])
    assert ece(probs, torch.tensor([0])) == pytest.approx(0.6)
    assert ece(probs, torch.tensor([1])) == pytest.approx(0.4)


def test_bf16_agrees_with_float32():
    """Sums in bf16 stop at 256; this library sums in float64 for every input type."""
    source = torch.Generator().manual_seed(1)
    probs = (torch.randn(20_000, 10, generator=source) * 2).softmax(1)
    labels = torch.randint(10, (20_000,), generator=source)
    assert ece(probs.bfloat16(), labels) == pytest.approx(ece(probs, labels), abs=1e-3)


def test_bin_fractions_are_float64(golden):
    """Dividing int64 counts by an int gives float32 in torch; the RMS error was off by 1e-9."""
    bins = histogram(golden).bins
    assert bins.fraction.dtype == torch.float64
    assert lp_error(golden, p=1) == pytest.approx(ece(golden), abs=1e-15)


def test_constant_confidence_has_a_nonzero_error():
    """The published AECE is 0 for a constant 0.9 that is right half of the time; the truth is 0.4."""
    probs, labels = cases.two_classes([0.9] * 20, [0, 1] * 10)
    assert aece(probs, labels) == pytest.approx(0.4)
    assert aece(probs, labels, compat="official") == 0.0


def test_equal_mass_with_fewer_samples_than_bins():
    """torch-uncertainty returned NaN: every sample is then a bin of its own."""
    probs, labels = cases.two_classes([0.6, 0.8, 0.9], [1, 0, 1])
    assert aece(probs, labels, bins=15) == pytest.approx((0.4 + 0.8 + 0.1) / 3)
    assert aece(probs[:1], labels[:1]) == pytest.approx(0.4)


def test_equal_mass_with_ties_does_not_fail():
    """netcal raises "smallest edge difference is numerically 0" on saturated models."""
    probs, labels = cases.saturated()
    error = aece(probs, labels)
    assert 0 < error < 1
    assert error.details["filled_bins"] < 15


def test_classes_that_never_occur_are_counted():
    """The published code averages over max(label) + 1 classes: 5 of these 10."""
    probs = torch.full((10, 10), 0.1)
    labels = torch.arange(10) % 5
    error = classwise_ece(probs, labels)
    assert len(error.details["per_class"]) == 10
    assert error == pytest.approx(0.1, abs=1e-7)
    assert len(classwise_ece(probs, labels, compat="official").details["per_class"]) == 5


def test_classwise_error_is_the_mean_over_columns(golden):
    probs, labels = golden.probs, golden.labels
    equal_width_errors = [
        float(ece(probs[:, k].contiguous(), (labels == k).long(), scope="positive")) for k in range(5)
    ]
    error = classwise_ece(golden)
    assert error.details["per_class"] == pytest.approx(equal_width_errors, abs=1e-12)
    assert error == pytest.approx(sum(equal_width_errors) / 5, abs=1e-12)
    equal_mass_errors = [
        float(aece(probs[:, k].contiguous(), (labels == k).long(), scope="positive")) for k in range(5)
    ]
    assert classwise_ece(golden, binning="mass") == pytest.approx(sum(equal_mass_errors) / 5, abs=1e-12)


def test_signed_ece_is_mean_confidence_minus_accuracy(golden):
    expected = golden.confidence.double().mean() - golden.correct.double().mean()
    assert signed_ece(golden) == pytest.approx(float(expected), abs=1e-14)


def test_norms_match_a_manual_calculation():
    probs, labels = cases.two_classes([0.6, 0.6, 0.9, 0.9], [1, 1, 1, 0])
    assert ece(probs, labels, bins=10) == pytest.approx(0.4)
    assert mce(probs, labels, bins=10) == pytest.approx(0.4)
    assert rms_error(probs, labels, bins=10) == pytest.approx(0.4)
    assert lp_error(probs, labels, bins=10, p=3) == pytest.approx(0.4)
    # Bins of accuracy 1 and 1/2: only the second one's gap has a variance, 1/4 over n - 1 = 1, to subtract.
    expected = 0.5 * 0.16 + 0.5 * (0.16 - 0.25)
    assert debiased_l2(probs, labels, bins=2) == pytest.approx(math.sqrt(expected) if expected > 0 else 0)


def test_lp_errors_rise_with_p_to_the_maximum(golden):
    errors = [float(lp_error(golden, p=p)) for p in (1, 1.5, 2, 4, 50)]
    assert errors == sorted(errors)
    assert errors[0] == pytest.approx(ece(golden), abs=1e-14)
    assert errors[-1] < mce(golden)
    with pytest.raises(ValueError, match=r"\bp\b.*0\.5"):
        lp_error(golden, p=0.5)


def test_soft_labels_match_the_mean_over_annotators():
    probs = torch.tensor([[0.7, 0.2, 0.1], [0.7, 0.2, 0.1]])
    labels = torch.tensor([[0.9, 0.1, 0.0], [0.5, 0.5, 0.0]])
    assert ece(probs, labels) == pytest.approx(0.0, abs=1e-7)
    assert ece(probs[:1], labels[:1]) == pytest.approx(0.2, abs=1e-7)
    assert "soft" in ece(probs, labels).scope
    with pytest.raises(ValueError, match="soft"):
        debiased_l2(probs, labels)


def test_one_hot_labels_equal_class_numbers(golden):
    one_hot = torch.nn.functional.one_hot(golden.labels, 5).float()
    for metric in (ece, aece, classwise_ece, mce, signed_ece):
        assert metric(golden.probs, one_hot) == pytest.approx(metric(golden), abs=1e-12)


def test_binary_samples_can_be_ignored():
    error = ece(torch.tensor([0.9, 0.2, 0.7]), torch.tensor([1, -1, 0]), scope="positive", ignore_index=-1)
    assert error.n == 2
    assert error == pytest.approx((0.1 + 0.7) / 2)


def test_binary_scope_takes_one_or_two_columns():
    confidence, labels = cases.binary(500)
    expected = ece(confidence, labels, scope="positive")
    assert ece(confidence[:, None], labels, scope="positive") == expected
    two_columns = torch.stack([1 - confidence, confidence], 1)
    assert ece(two_columns, labels, scope="positive") == expected
    assert ece(Predictions.from_probs(two_columns, labels), scope="positive") == expected
    assert ece(two_columns, labels) != expected
    with pytest.raises(ValueError, match="positive"):
        ece(confidence, labels)
    with pytest.raises(ValueError, match=r"positive.*\(3, 3\)"):
        ece(torch.eye(3), torch.arange(3), scope="positive")
    with pytest.raises(ValueError, match=r"row 1.*1\.5"):
        ece(torch.tensor([0.5, 1.5]), torch.tensor([0, 1]), scope="positive")


def test_multi_label_rows_need_not_sum_to_one():
    probs = torch.tensor([[0.9, 0.8], [0.9, 0.2]])
    labels = torch.tensor([[1, 1], [0, 0]])
    error = ece(probs, labels, scope="multi-label")
    assert error.details["per_class"] == pytest.approx((0.4, 0.2), abs=1e-7)
    with pytest.raises(ValueError, match=r"multi-label.*\(2, 2\).*\(2,\)"):
        ece(probs, torch.tensor([0, 1]), scope="multi-label")
    with pytest.raises(ValueError, match="row 0"):
        ece(probs + 0.5, labels, scope="multi-label")


def test_maps_are_pooled_over_positions():
    source = torch.Generator().manual_seed(0)
    maps = torch.randn(2, 4, 3, 5, generator=source).softmax(1)
    labels = torch.randint(4, (2, 3, 5), generator=source)
    table = maps.movedim(1, -1).reshape(-1, 4)
    for metric in (ece, aece, classwise_ece):
        assert metric(maps, labels) == pytest.approx(metric(table, labels.reshape(-1)), abs=1e-12)
    assert ece(maps, labels).n == 30


def test_ignored_positions_may_hold_invalid_values():
    source = torch.Generator().manual_seed(0)
    maps = torch.randn(2, 4, 6, generator=source).softmax(1)
    labels = torch.randint(4, (2, 6), generator=source)
    labels[0, :2] = 255
    valid = labels != 255
    expected = ece(maps.movedim(1, -1)[valid], labels[valid])
    maps[0, :, 0] = math.nan
    for metric in (ece, classwise_ece):
        assert metric(maps, labels, ignore_index=255).n == 10
    assert ece(maps, labels, ignore_index=255) == expected
    with pytest.raises(ValueError, match=r"row 0.*\(0,\)"):
        ece(maps, labels)
    with pytest.raises(ValueError, match="255"):
        ece(maps, torch.full((2, 6), 255), ignore_index=255)


def test_numpy_and_torch_and_predictions_agree(golden):
    probs, labels = golden.probs, golden.labels
    assert ece(probs.numpy(), labels.numpy()) == ece(probs, labels) == ece(golden)
    assert ece(probs.tolist(), labels.tolist()) == pytest.approx(ece(golden), abs=1e-7)


def test_class_wise_metrics_of_top_label_predictions_raise():
    predictions = TopLabelPredictions([0.8], [True])
    assert ece(predictions) == pytest.approx(0.2)
    with pytest.raises(ValueError, match=r"\btop\b"):
        classwise_ece(predictions)


def test_class_wise_errors_of_bf16(golden):
    probs = golden.probs.bfloat16()
    expected = [float(ece(probs[:, k].contiguous(), (golden.labels == k).long(), scope="positive")) for k in range(5)]
    assert classwise_ece(probs, golden.labels).details["per_class"] == pytest.approx(expected, abs=1e-12)


def test_unknown_options_raise(golden):
    from fedlas.metrics.binning import Binning
    from fedlas.metrics.inputs import pairs

    with pytest.raises(ValueError, match="class-wise"):
        pairs(golden, scope="class-wise")
    with pytest.raises(TypeError, match="multi-label"):
        ece(golden, scope="multi-label")
    with pytest.raises(ValueError, match=r"labels.*3.*2"):
        ece(torch.rand(2), torch.tensor([0, 1, 1]), scope="positive")
    assert Binning().rule.startswith("(lower, upper]")
    with pytest.raises(ValueError, match="equal-mass"):
        aece(golden, compat="torchmetrics")
