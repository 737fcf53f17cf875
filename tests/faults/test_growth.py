"""Cost grows as it should: the slope of a few points, and nothing that grows while a run trains."""

import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import growth
from fedlas import metrics


@pytest.mark.parametrize(("power", "shown"), [(1.0, 1.0), (2.0, 2.0)])
def test_the_slope_of_a_power_is_its_exponent(power, shown):
    points = [growth.Point("x", "x", "N", 10**k, 1e-6 * (10**k) ** power, 0) for k in range(3, 8)]
    assert growth.exponent(points) == pytest.approx(shown)


def test_calls_that_are_too_short_have_no_exponent():
    assert growth.exponent([growth.Point("x", "x", "N", n, 1e-5, 0) for n in (10, 100, 1000)]) is None


@pytest.mark.parametrize("name", ["ece", "aece", "nll", "aurc"])
def test_metrics_are_not_quadratic(name):
    call = partial(growth.metric_call, getattr(metrics, name), classes=10)
    points = list(growth.series("metric", name, "N", [20_000, 80_000, 320_000], call, 60))
    assert (growth.exponent(points) or 0) < 1.6


def test_a_stream_of_sums_keeps_no_samples():
    stream, (logits, labels, *_) = metrics.ECE(), growth.problem(100_000, 10)
    probs = logits.softmax(1)
    stream.update(probs, labels)
    _, memory = growth.measured(lambda: [stream.update(probs, labels) for _ in range(20)], rounds=1)
    assert memory < 64 * 2**20


@pytest.mark.slow
def test_training_holds_no_more_with_every_epoch():
    seen = growth.training(12)
    assert seen[-1]["files"] == seen[2]["files"]
    assert seen[-1]["mib"] - seen[4]["mib"] < 30
