"""Provide predictions for the tests of metrics."""

import pytest

from fedlas.predictions import Predictions
from metrics import cases


@pytest.fixture(scope="session")
def golden() -> Predictions:
    return Predictions(*cases.golden_logits())


@pytest.fixture(scope="session")
def temperature_scaled() -> Predictions:
    """Return the golden predictions, nearly calibrated by temperature scaling."""
    logits, labels = cases.golden_logits()
    return Predictions(logits / 2.4, labels)
