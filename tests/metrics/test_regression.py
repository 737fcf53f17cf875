"""Metrics, intervals and paired comparisons of generated predictions, pinned at full precision.

The expected numbers are in `regression.json`. `python tests/metrics/test_regression.py` writes them again; each
difference needs a reason.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedlas import evaluate
from fedlas.metrics import aurc, brier, nll, paired_bootstrap
from fedlas.predictions import Predictions, TopLabelPredictions

EXPECTED = Path(__file__).with_name("regression.json")
ROUNDING = 1e-12


def generated(name: str) -> Predictions | TopLabelPredictions:
    """Return predictions whose labels follow from sharper or softer logits than those given."""
    samples, classes, scale, seed = {
        "overconfident": (2_000, 10, 1.6, 1),
        "underconfident": (1_500, 100, 0.6, 2),
        "binary": (600, 2, 1.3, 3),
        "saturated": (400, 5, 12.0, 4),
        "soft": (300, 4, 1.5, 5),
        "top_label": (900, 6, 1.4, 6),
    }[name]
    rng = np.random.default_rng(seed)
    logits = 2.5 * rng.standard_normal((samples, classes))
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = (probs.cumsum(1) < rng.random((samples, 1))).sum(1).clip(max=classes - 1)
    scaled_logits = torch.from_numpy(scale * logits)
    if name == "soft":
        return Predictions(scaled_logits, torch.from_numpy(probs), split="test")
    if name == "top_label":
        confidence, top = scaled_logits.softmax(1).max(1)
        return TopLabelPredictions(confidence, correct=top == torch.from_numpy(labels), split="test")
    return Predictions(scaled_logits, torch.from_numpy(labels), split="test")


NAMES = ("overconfident", "underconfident", "binary", "saturated", "soft", "top_label")


def computed_values(name: str) -> dict[str, Any]:
    """Return all metrics with intervals, before and after temperature scaling, and paired comparisons."""
    predictions = generated(name)
    posthoc = () if isinstance(predictions, TopLabelPredictions) else ("temperature",)
    computed: dict[str, Any] = {}
    for state in evaluate(predictions, posthoc=posthoc, resamples=500, seed=7).states:
        for metric, result in state.results.items():
            bounds = [] if result.interval is None else [result.interval.low, result.interval.high]
            computed[f"{state.name} {metric}"] = [float(result), *bounds]
        for metric, comparison in state.comparisons.items():
            computed[f"{state.name} comparison {metric}"] = [
                comparison.interval.low,
                comparison.interval.high,
                comparison.p_value,
            ]
    if isinstance(predictions, Predictions) and name != "soft":
        other = Predictions(0.7 * predictions.logits, predictions.labels)
        for metric, function in {"nll": nll, "brier": brier, "aurc": aurc}.items():
            comparison = paired_bootstrap(function, predictions, other, resamples=500)
            computed[f"paired {metric}"] = [comparison.interval.low, comparison.interval.high, comparison.p_value]
    return {key: [value if math.isfinite(value) else None for value in values] for key, values in computed.items()}


@pytest.mark.parametrize("name", NAMES)
def test_metrics_match_the_pinned_values(name):
    expected = json.loads(EXPECTED.read_text())[name]
    computed = computed_values(name)
    assert computed.keys() >= expected.keys()  # metrics may be added
    for key, values in expected.items():
        if abs(values[0]) < ROUNDING and "comparison" not in key:  # the interval of a gap of zero depends on rounding
            assert abs(computed[key][0]) < ROUNDING, key
            continue
        assert computed[key] == pytest.approx(values, rel=1e-9, abs=ROUNDING), key


if __name__ == "__main__":
    EXPECTED.write_text(json.dumps({name: computed_values(name) for name in NAMES}, indent=1) + "\n")
