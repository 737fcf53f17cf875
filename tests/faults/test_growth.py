"""Growth is read off as it should be: the slope of a few points, and nothing that grows while a run trains."""

import importlib.util
import sys
from pathlib import Path

import pytest

from fedlas import metrics


def _benchmark(name):
    """Load a benchmark by its path: as a folder to search in, theirs would hide rooms of the tests."""
    found = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "benchmarks" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


growth = _benchmark("growth")


@pytest.mark.parametrize(("power", "shown"), [(1.0, 1.0), (2.0, 2.0)])
def test_the_slope_of_a_power_is_its_exponent(power, shown):
    points = [growth.Point("x", "x", "N", 10**k, 1e-6 * (10**k) ** power, 0) for k in range(3, 8)]
    assert growth.exponent(points) == pytest.approx(shown)


def test_calls_that_are_too_short_have_no_exponent():
    assert growth.exponent([growth.Point("x", "x", "N", n, 1e-5, 0) for n in (10, 100, 1000)]) is None


def test_a_stream_of_sums_keeps_no_samples():
    stream, (logits, labels, *_) = metrics.ECE(), growth.problem(100_000, 10)
    probs = logits.softmax(1)
    stream.update(probs, labels)
    _, memory = growth.measured(lambda: [stream.update(probs, labels) for _ in range(20)], rounds=1)
    assert memory < 64 * 2**20


@pytest.mark.parametrize("epochs", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_training_holds_no_more_with_every_epoch(epochs):
    seen = growth.training(epochs)
    assert seen[-1]["files"] == seen[2]["files"]
    assert seen[-1]["mib"] - seen[4]["mib"] < 30
