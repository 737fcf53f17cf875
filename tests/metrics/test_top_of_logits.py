"""The top label of logits, a part of the table at a time."""

import math

import pytest
import torch

from fedlas import metrics
from fedlas.predictions import Predictions, probabilities
from fedlas.predictions.probabilities import top_of_logits


@pytest.mark.parametrize("at_once", [1, 7, 2**18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(50, 4), (6, 3, 5, 2)])
def test_parts_match_all_rows_at_once(monkeypatch, at_once, dtype, shape):
    monkeypatch.setattr(probabilities, "AT_ONCE", at_once)
    logits = (4 * torch.randn(shape)).to(dtype)
    wide_dtype = torch.promote_types(dtype, torch.float32)
    expected = logits.softmax(1, dtype=wide_dtype).max(1)
    confidence, prediction = top_of_logits(logits)
    assert torch.equal(confidence, expected.values)
    assert torch.equal(prediction, expected.indices)
    if len(shape) == 2:
        labels = torch.randint(4, (50,))
        loss = torch.nn.functional.cross_entropy(logits.to(wide_dtype), labels)
        assert metrics.nll(Predictions(logits, labels)) == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_logits_raise_an_error_that_names_the_row(value):
    """Minus infinity leaves no trace in the largest probability of a row."""
    logits = torch.randn(9, 4)
    logits[5, 2] = value
    labels = torch.zeros(9, dtype=torch.long)
    for feed in (
        metrics.ece.accumulator,
        metrics.classwise_ece.accumulator,
        metrics.nll.accumulator,
        metrics.aurc.accumulator,
    ):
        with pytest.raises(ValueError, match=r"logits.*row 5"):
            feed().update_logits(logits, labels)
    with pytest.raises(ValueError, match=r"logits.*row 5"):
        Predictions(logits, labels)


def test_huge_finite_logits_are_accepted():
    logits = torch.tensor([[3e38, -3e38, 0.0], [-3e38, -3e38, -3e38]])
    error = metrics.ece.accumulator().update_logits(logits, torch.tensor([0, 0])).compute()
    assert error == pytest.approx((0 + 2 / 3) / 2)


def test_no_logits_are_an_error():
    stream = metrics.ece.accumulator().update_logits(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))
    with pytest.raises(ValueError, match="update"):
        stream.compute()
