"""Selective prediction: the AURC family, with ties as averages over all orders."""

import itertools

import pytest
import torch

from fedlas import Predictions, evaluate, metrics
from fedlas.metrics import augrc, aurc, coverage_at_risk, e_aurc, risk_at_coverage, risk_coverage
from metrics import cases


def areas_by_hand(correct: list[int]) -> tuple[float, float]:
    """AURC and AUGRC of samples in descending order of confidence."""
    n, error_count, risk_sum, generalised = len(correct), 0, 0.0, 0.0
    for k, is_correct in enumerate(correct, start=1):
        error_count += 1 - is_correct
        risk_sum += error_count / k
        generalised += error_count / n
    return risk_sum / n, generalised / n


def test_risk_coverage_without_ties_equals_plain_loops():
    confidence = torch.tensor([0.9, 0.8, 0.7, 0.6])
    correct = torch.tensor([1, 0, 1, 0])
    area, generalised = areas_by_hand([1, 0, 1, 0])
    result = aurc(confidence, correct, scope="confidence")
    assert result == pytest.approx(area)
    assert augrc(confidence, correct, scope="confidence") == pytest.approx(generalised)
    assert result.details["augrc"] == pytest.approx(generalised)
    best_area, _ = areas_by_hand([1, 1, 0, 0])
    assert e_aurc(confidence, correct, scope="confidence") == pytest.approx(area - best_area)
    assert result.details["e_aurc"] == pytest.approx(area - best_area)


def test_ties_are_averaged_over_all_orders():
    """torch-uncertainty takes the order of the file: a spread of 14 % on bf16 scores."""
    confidence = torch.tensor([0.9, 0.7, 0.7, 0.7, 0.7, 0.2])
    correct = torch.tensor([1, 1, 0, 0, 1, 0])
    areas = [areas_by_hand([1, *middle, 0]) for middle in itertools.permutations([1, 0, 0, 1])]
    expected = [sum(values) / len(areas) for values in zip(*areas, strict=True)]
    for order in (torch.arange(6), torch.tensor([5, 3, 1, 4, 0, 2])):
        assert aurc(confidence[order], correct[order], scope="confidence") == pytest.approx(expected[0])
        assert augrc(confidence[order], correct[order], scope="confidence") == pytest.approx(expected[1])


def test_a_constant_confidence_has_the_error_rate_everywhere():
    confidence, correct = torch.full((8,), 0.5), torch.tensor([1, 0, 0, 1, 1, 1, 0, 1])
    curve = risk_coverage(confidence, correct, scope="confidence")
    assert curve.risk.tolist() == pytest.approx([3 / 8] * 8)
    assert curve.coverage.tolist() == [k / 8 for k in range(1, 9)]
    assert curve.generalised.tolist() == pytest.approx([3 / 8 * k / 8 for k in range(1, 9)])


def test_metrics_of_a_single_sample_are_defined():
    assert aurc(torch.tensor([0.3]), torch.tensor([0]), scope="confidence") == 1.0
    assert e_aurc(torch.tensor([0.3]), torch.tensor([0]), scope="confidence") == 0.0


def test_the_curve_ends_at_the_error_rate(golden):
    curve = risk_coverage(golden)
    assert float(curve.coverage[-1]) == 1.0
    assert float(curve.risk[-1]) == pytest.approx(1 - 0.424)


def test_risk_at_coverage_and_coverage_at_risk():
    confidence = torch.arange(10, 0, -1) / 10
    correct = torch.tensor([1, 1, 1, 1, 0, 1, 1, 0, 0, 0])
    assert risk_at_coverage(confidence, correct, 0.4, scope="confidence") == 0.0
    assert risk_at_coverage(confidence, correct, 0.5, scope="confidence") == pytest.approx(0.2)
    assert risk_at_coverage(confidence, correct, 0.7, scope="confidence").details["coverage"] == 0.7
    assert risk_at_coverage(confidence, correct, 0.71, scope="confidence").details["coverage"] == 0.8
    assert coverage_at_risk(confidence, correct, 0.0, scope="confidence") == 0.4
    assert coverage_at_risk(confidence, correct, 1 / 7, scope="confidence") == 0.7
    assert coverage_at_risk(confidence, correct, 0.4, scope="confidence") == 1.0
    assert coverage_at_risk(confidence, 1 - correct, 0.1, scope="confidence") == 0.0
    with pytest.raises(ValueError, match="coverage"):
        risk_at_coverage(confidence, correct, 0.0, scope="confidence")


def test_soft_labels_count_as_shares_of_errors():
    confidence, soft_labels = torch.tensor([0.9, 0.1]), torch.tensor([0.75, 0.5])
    assert aurc(confidence, soft_labels, scope="confidence") == pytest.approx((0.25 + 0.375) / 2)


def test_a_better_ranking_has_a_smaller_area():
    confidence, correct = cases.binary(1_000)
    assert aurc(confidence, correct, scope="confidence") < aurc(1 - confidence, correct, scope="positive")
    assert e_aurc(correct.float(), correct, scope="confidence") == pytest.approx(0, abs=1e-15)


def test_saturated_logits_are_ranked_by_what_is_left_for_other_classes():
    """In float32 most of these confidences are 1; as ties they raised the area by more than half."""
    source = torch.Generator().manual_seed(0)
    logits = 150 * torch.rand(2_000, 1, generator=source) * torch.eye(10)[torch.arange(2_000) % 10]
    logits += torch.randn(2_000, 10, generator=source)
    labels = (logits / 15).softmax(1).multinomial(1, generator=source)[:, 0]
    float64_logits = logits.double()
    top = float64_logits.argmax(1)
    log_remainder = float64_logits.scatter(1, top[:, None], -torch.inf).logsumexp(1) - float64_logits.logsumexp(1)
    area, generalised = areas_by_hand((top == labels)[log_remainder.argsort()].long().tolist())
    predictions = Predictions(logits, labels)
    assert aurc(predictions) == pytest.approx(area, rel=1e-9)
    assert augrc(predictions) == pytest.approx(generalised, rel=1e-9)
    assert float(aurc.contributions(predictions).mean()) == pytest.approx(area, rel=1e-9)
    assert evaluate(predictions, intervals=False)["aurc"] == pytest.approx(area, rel=1e-9)
    stream = metrics.aurc.accumulator()
    for part in (slice(0, 700), slice(700, 2_000)):
        stream.update_logits(logits[part], labels[part])
    assert stream.compute() == pytest.approx(area, rel=1e-9)
    assert aurc(logits.softmax(1), labels) > 1.5 * area  # what ties add


def test_two_classes_are_ranked_alike_by_one_logit_or_two():
    logits = torch.linspace(-80, 80, 400)
    labels = (logits + 30 * torch.sin(torch.arange(400.0)) > 0).long()
    predictions = Predictions(logits, labels)
    is_wrong = ((logits > 0).long() != labels)[logits.abs().argsort(descending=True, stable=True)]
    area, _ = areas_by_hand((~is_wrong).long().tolist())
    assert aurc(predictions, scope="positive") == pytest.approx(aurc(predictions))
    assert aurc(predictions) == pytest.approx(area, rel=0.02)  # each distance from zero occurs twice
    for head_logits in (logits, torch.stack([torch.zeros(400), logits], 1)):
        stream = metrics.aurc.accumulator(scope="positive", ignore_index=255).update_logits(head_logits, labels)
        stream.update_logits(head_logits[:3], torch.full((3,), 255))
        assert stream.compute() == pytest.approx(aurc(predictions))


def test_confidences_rounded_to_one_are_noted():
    """Regression: the AURC of probabilities whose ranking was lost had no note."""
    logits = 40 * torch.randn(400, 5, generator=torch.Generator().manual_seed(0))
    labels = (logits / 20).softmax(1).multinomial(1, generator=torch.Generator().manual_seed(1))[:, 0]
    rounded = aurc(logits.softmax(1), labels)
    fraction = float((logits.softmax(1).amax(1) == 1).double().mean())
    assert rounded.details["saturated"] == pytest.approx(fraction)
    assert f"{100 * fraction:.0f} % of the confidences" in rounded.note
    assert not aurc(Predictions(logits, labels)).note
    assert not aurc((logits / 40).softmax(1), labels).note
