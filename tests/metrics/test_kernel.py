"""The top label of logits: by parts on the CPU, and by a kernel that reads them once, here in triton's interpreter."""

import importlib.util
import math
import os
import subprocess
import sys

import pytest
import torch

from fedlas import metrics
from fedlas.metrics import inputs
from fedlas.predictions import Predictions, probabilities
from fedlas.predictions.probabilities import top_of_logits

INTERPRETED = """
import math, torch
from fedlas.metrics.kernels.top_label import top_label
torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for rows, classes in ((7, 3), (70, 10), (5, 1000), (3, 1024), (2, 5000), (129, 1)):
        logits = (3 * torch.randn(rows, classes)).to(dtype)
        total, index = top_label(logits)
        confidence, prediction = logits.double().softmax(1).max(1)  # torch's own float32 differs by processor
        torch.testing.assert_close(1 / total.double(), confidence, rtol=1e-6, atol=0)
        assert torch.equal(index, prediction), (dtype, rows, classes)
        assert index.dtype == torch.int64
transposed = torch.randn(4, 6).t()
assert torch.equal(top_label(transposed)[1], transposed.argmax(1))
ties = torch.tensor([[0.0, 0.0, 1e-9, -1.0], [-3.0, 2.0, 2.0, 2.0]])
assert top_label(ties)[1].tolist() == [0, 1]
non_finite = torch.zeros(4, 5)
non_finite[0, 1], non_finite[1, 0], non_finite[2, 4] = math.nan, math.inf, -math.inf
assert torch.isnan(top_label(non_finite)[0]).tolist() == [True, True, True, False]
"""


@pytest.mark.campaign
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_kernel_matches_torch():
    settings = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    process = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=settings, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr


def test_kernel_is_not_used_on_the_cpu(monkeypatch):
    monkeypatch.setattr(inputs, "MANY_ROWS", 1)
    monkeypatch.setattr(inputs, "_kernel", lambda: pytest.fail("called"))
    assert inputs.top_of_logits_by_kernel(torch.zeros(3, 2)) is None


def test_torch_is_used_if_the_kernel_cannot_be_compiled(monkeypatch):
    """No triton, no compiler, no device: whatever it is, an exception must not reach the user."""
    inputs._kernel.cache_clear()
    monkeypatch.setitem(sys.modules, "fedlas.metrics.kernels.top_label", None)
    assert inputs._kernel() is None
    inputs._kernel.cache_clear()


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
