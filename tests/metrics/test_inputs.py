"""Inputs of metrics: no argument is ignored, inputs are copied, and any memory layout is accepted."""

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlas import metrics
from fedlas.metrics.inputs import Pairs, pairs
from fedlas.predictions import Predictions


def random_problem(n: int = 300, classes: int = 4) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    return torch.randn(n, classes, generator=random).softmax(1), torch.randint(classes, (n,), generator=random)


def test_labels_next_to_predictions_raise():
    probs, labels = random_problem()
    predictions = Predictions.from_probs(probs, labels)
    for metric in (metrics.ece, metrics.nll, metrics.classwise_ece, metrics.aurc, metrics.accuracy):
        with pytest.raises(TypeError, match="labels"):
            metric(predictions, labels)
    with pytest.raises(TypeError, match="labels"):
        metrics.bootstrap(metrics.accuracy, predictions, labels)
    with pytest.raises(TypeError, match=r"pairs.*labels"):
        metrics.ece(pairs(predictions), labels)


def test_ignored_labels_of_predictions_are_left_out():
    probs, labels = random_problem()
    predictions = Predictions.from_probs(probs, labels)
    valid = labels != 2
    for metric in (metrics.ece, metrics.aece, metrics.nll, metrics.brier, metrics.classwise_ece, metrics.aurc):
        assert metric(predictions, ignore_index=2) == pytest.approx(
            float(metric(probs[valid], labels[valid])), abs=1e-12
        )
    with pytest.raises(ValueError, match=r"label.*\b1\b"):
        metrics.ece(Predictions.from_probs(probs, torch.ones_like(labels)), ignore_index=1)
    for samples in ((Predictions.from_probs(probs, probs),), (probs, probs)):
        with pytest.raises(ValueError, match="soft labels"):
            metrics.ece(*samples, ignore_index=1)


@pytest.mark.parametrize("make", [metrics.aece.accumulator, metrics.smooth_ece.accumulator, metrics.aurc.accumulator])
def test_accumulators_copy_their_inputs(make: type):
    confidence, labels = torch.rand(50), torch.randint(2, (50,))
    stream = make(scope="positive").update(confidence, labels)
    before = float(stream.compute())
    confidence.fill_(0.1)
    labels.fill_(1)
    assert float(stream.compute()) == before


def test_batches_with_only_ignored_labels_are_skipped():
    probs, labels = random_problem()
    for make in (
        metrics.ece.accumulator,
        metrics.aece.accumulator,
        metrics.nll.accumulator,
        metrics.brier.accumulator,
        metrics.classwise_ece.accumulator,
    ):
        stream = make(ignore_index=255)
        stream.update(probs[:9], torch.full((9,), 255)).update(probs[:0], labels[:0]).update(probs, labels)
        assert float(stream.compute()) == pytest.approx(float(make().update(probs, labels).compute()))


def test_batches_with_another_number_of_classes_raise():
    stream = metrics.classwise_ece.accumulator().update(*random_problem())
    before = float(stream.compute())
    with pytest.raises(ValueError, match=r"4.*3"):
        stream.update(*random_problem(classes=3))
    assert float(stream.compute()) == before


@pytest.mark.parametrize("metric", [metrics.ece, metrics.aece, metrics.classwise_ece, metrics.brier, metrics.nll])
def test_noncontiguous_tensors_are_accepted(metric):
    probs, labels = random_problem()
    expected = float(metric(probs, labels))
    layouts = [np.asfortranarray(probs.numpy()), probs.T.contiguous().T, probs.numpy()[::-1][::-1]]
    for layout in layouts:
        assert float(metric(layout, labels)) == pytest.approx(expected, abs=1e-12)


def test_modifying_returned_edges_has_no_effect():
    probs, labels = random_problem()
    before = float(metrics.ece(probs.double(), labels))
    metrics.histogram(probs.double(), labels).bins.edges.mul_(100)
    assert float(metrics.ece(probs.double(), labels)) == before


def test_binary_predictions_are_ranked_by_confidence():
    confidence = torch.tensor([0.9, 0.2, 0.6, 0.4, 0.1])
    labels = torch.tensor([1, 0, 0, 1, 0])
    two_columns = torch.stack([1 - confidence, confidence], dim=1)
    for metric in (metrics.aurc, metrics.e_aurc, metrics.augrc, metrics.risk_at_coverage):
        assert metric(confidence, labels, scope="positive") == pytest.approx(
            float(metric(two_columns, labels)), abs=1e-6
        )
    stream = metrics.aurc.accumulator(scope="positive").update(confidence, labels)
    assert stream.compute() == pytest.approx(float(metrics.aurc(two_columns, labels)), abs=1e-6)
    assert metrics.risk_at_coverage(confidence, labels, 1.0, scope="positive") == pytest.approx(
        1 - metrics.accuracy(confidence, labels, scope="positive")
    )


def test_binary_maps_are_pooled():
    maps = torch.rand(3, 1, 4, 5)
    labels = torch.randint(2, (3, 4, 5))
    expected = metrics.ece(maps.reshape(-1), labels.reshape(-1), scope="positive")
    assert metrics.ece(maps, labels, scope="positive") == pytest.approx(float(expected))


def test_aurc_of_tied_confidences_has_the_interval_of_accuracy():
    """With one confidence for all, the AURC is the share of errors, and so is what is known about it."""
    correct = (torch.rand(2000, generator=torch.Generator().manual_seed(0)) < 0.8).long()
    area = metrics.bootstrap(metrics.aurc, torch.full((2000,), 0.8), correct, scope="confidence")
    accuracy = metrics.bootstrap(metrics.accuracy, torch.full((2000,), 0.8), correct, scope="positive")
    assert area == pytest.approx(1 - accuracy)
    assert area.interval.width == pytest.approx(accuracy.interval.width, rel=0.1)


def test_aurc_intervals_lie_between_0_and_1():
    confidence = torch.linspace(0.5, 1, 200)
    area = metrics.bootstrap(metrics.aurc, confidence, (torch.arange(200) >= 180).long(), scope="confidence")
    assert area.interval.high <= 1
    excess_area = metrics.bootstrap(metrics.e_aurc, confidence, (torch.arange(200) >= 40).long(), scope="confidence")
    assert excess_area.interval.low >= 0


def test_numbers_of_bins_and_norms_are_checked():
    probs, labels = random_problem()
    for bins in (True, 0):
        with pytest.raises(ValueError, match=f"bins.*{bins}"):
            metrics.ece(probs, labels, bins=bins)
    with pytest.raises(ValueError, match="mce"):
        metrics.lp_error(probs, labels, p=float("inf"))


def test_brier_score_of_a_nearly_perfect_model_is_accurate():
    logits = torch.zeros(100, 10)
    logits[:, 0] = 12
    labels = torch.zeros(100, dtype=torch.long)
    float64_probs = logits.double().softmax(1)
    expected = float((float64_probs[:, 1:].square().sum(1) + (1 - float64_probs[:, 0]).square()).mean())
    assert metrics.brier(logits.softmax(1), labels) == pytest.approx(
        expected, rel=0.03
    )  # the probabilities are rounded


def test_half_precision_keeps_its_smallest_probabilities():
    probs = torch.tensor([[1 - 3e-5, 3e-5]], dtype=torch.float16)
    assert metrics.nll(probs, torch.tensor([1])) == pytest.approx(-float(np.log(float(probs[0, 1]))))


def test_torchmetrics_compares_in_float32():
    classification = pytest.importorskip("torchmetrics.functional.classification")
    random = torch.Generator().manual_seed(1)
    top = torch.randint(6, 11, (400,), generator=random).double() / 10
    probs = torch.stack([top, 1 - top], dim=1)
    probs = torch.cat([probs, torch.zeros(400, 1, dtype=torch.float64)], dim=1)
    labels = torch.randint(2, (400,), generator=random)
    torchmetrics_ece = classification.multiclass_calibration_error(probs, labels, 3, 10)
    assert metrics.ece(probs, labels, 10, compat="torchmetrics") == pytest.approx(float(torchmetrics_ece), abs=1e-6)


def test_pairs_of_another_scope_raise():
    binary_pairs = Pairs(*pairs(torch.rand(5), torch.ones(5).long(), "positive").__dict__.values())
    with pytest.raises(ValueError, match=r"positive.*top-label"):
        metrics.ece(binary_pairs)
