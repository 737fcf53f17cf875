"""Predictions that several tests of the metrics share."""

import pytest

from fedlas.predictions import Predictions
from metrics import cases


@pytest.fixture(scope="session")
def golden() -> Predictions:
    return Predictions(*cases.golden_logits())


@pytest.fixture(scope="session")
def cooled() -> Predictions:
    """The golden samples at a temperature that nearly calibrates them."""
    logits, labels = cases.golden_logits()
    return Predictions(logits / 2.4, labels)
