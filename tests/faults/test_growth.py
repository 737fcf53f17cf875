"""Growth is read off as it should be: the slope of a few points, and nothing that grows while a run trains."""

import importlib.util
import json
import os
import subprocess
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


def series(power, memory_power=1.0, kind="metric", name="x", against="N"):
    sizes = [10**k for k in range(3, 8)]
    return [growth.Point(kind, name, against, n, 1e-6 * n**power, int(2**10 * n**memory_power)) for n in sizes]


def test_a_quadratic_series_is_refused():
    assert growth.excesses(series(1.0)) == []
    assert growth.excesses(series(1.3)) == []
    assert growth.excesses(series(2.0)) == ["metric x N: time grows with the power 2.00; 1.5 is allowed"]
    assert growth.excesses(series(1.0, 2.0)) == ["metric x N: memory grows with the power 2.00; 1.5 is allowed"]


def test_the_square_of_classes_is_allowed_where_it_is_documented():
    for name, allowed in (("ce", 1.5), ("cpc", 2.5), ("fedlas_ls", 2.5)):
        assert growth.limit("loss", name, "C") == allowed
        assert growth.limit("loss", name, "N") == 1.5
    assert growth.excesses(series(2.0, kind="loss", name="cpc", against="C")) == []
    assert len(growth.excesses(series(3.0, kind="loss", name="cpc", against="C"))) == 1


@pytest.mark.parametrize(("each", "refused"), [(0.0, False), (0.2, False), (1.0, True), (5.0, True)])
def test_a_stream_of_sums_that_keeps_samples_is_refused(each, refused):
    points = [growth.Point("stream", "ECE", "N", 10**k, 1e-8 * 10**k, 2**27 + int(each * 10**k)) for k in range(3, 9)]
    said = growth.excesses(points)
    assert said == (
        [f"stream ECE N: takes {each:.1f} bytes for each further sample and should keep sums alone"] * refused
    )
    keeping = [growth.Point("stream", "AURC", "N", one.size, one.seconds, one.memory) for one in points]
    assert growth.excesses(keeping) == []


def test_what_one_point_has_freed_does_not_hide_what_the_next_takes():
    """In a new process, as the benchmark is: what other tests have freed would hide it too."""
    sizes = (2**25, 2**23, 2**24)
    script = f"import growth, torch; take = lambda n: lambda: torch.ones(n).sum(); sizes = {sizes}\n"
    script += "print([growth.apart(take, n)[1] for n in sizes])"
    where = {"cwd": Path(growth.__file__).parent, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, "-c", script], check=True, **where)
    for n, memory in zip(sizes, json.loads(done.stdout), strict=True):
        assert 4 * n <= memory < 4 * n + 4 * growth.LITTLE  # with libraries that were not loaded before


def test_a_stream_of_sums_keeps_no_samples():
    stream, (logits, labels, *_) = metrics.ECE(), growth.problem(100_000, 10)
    probs = logits.softmax(1)
    stream.update(probs, labels)
    _, memory = growth.apart(lambda n: lambda: [stream.update(probs, labels) for _ in range(n)], 20)
    assert memory < 64 * 2**20


def test_a_process_that_dies_is_named():
    with pytest.raises(RuntimeError, match="the process that measured size 7 died"):
        growth.apart(lambda n: lambda: os._exit(1), 7)


@pytest.mark.parametrize("epochs", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_training_holds_no_more_with_every_epoch(epochs):
    seen = growth.training(epochs)
    assert seen[-1]["files"] == seen[2]["files"]
    assert seen[-1]["mib"] - seen[4]["mib"] < 30
