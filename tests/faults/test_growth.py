"""Growth is read off as it should be, counted work grows as it may, and nothing grows while a run trains."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fedlas
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


def test_a_quadratic_series_raises():
    assert growth.excesses(series(1.0)) == []
    assert growth.excesses(series(1.3)) == []
    for excess, what in ((growth.excesses(series(2.0)), "time"), (growth.excesses(series(1.0, 2.0)), "memory")):
        assert len(excess) == 1
        assert re.match(rf"metric x N: {what}.*2\.00.*1\.5", excess[0])


def test_the_square_of_classes_is_allowed_where_it_is_documented():
    for name, allowed in (("ce", 1.5), ("cpc", 2.5), ("fedlas_ls", 2.5)):
        assert growth.limit("loss", name, "C") == allowed
        assert growth.limit("loss", name, "N") == 1.5
    assert growth.excesses(series(2.0, kind="loss", name="cpc", against="C")) == []
    assert len(growth.excesses(series(3.0, kind="loss", name="cpc", against="C"))) == 1


@pytest.mark.parametrize(("each", "refused"), [(0.0, False), (0.2, False), (1.0, True), (5.0, True)])
def test_a_stream_of_sums_that_keeps_samples_raises(each, refused):
    points = [growth.Point("stream", "ECE", "N", 10**k, 1e-8 * 10**k, 2**27 + int(each * 10**k)) for k in range(3, 9)]
    excess = growth.excesses(points)
    assert len(excess) == refused
    assert all(one.startswith("stream ECE N:") and f"{each:.1f} bytes" in one for one in excess)
    keeping = [growth.Point("stream", "AURC", "N", one.size, one.seconds, one.memory) for one in points]
    assert growth.excesses(keeping) == []


@pytest.mark.campaign
def test_what_one_point_has_freed_does_not_hide_what_the_next_takes():
    """In a new process, as the benchmark is: what other tests have freed would hide it too."""
    sizes = (2**25, 2**23, 2**24)
    script = f"import growth, torch; take = lambda n: lambda: torch.ones(n).sum(); sizes = {sizes}\n"
    script += "print([growth.apart(take, n)[1] for n in sizes])"
    where = {"cwd": Path(growth.__file__).parent, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, "-c", script], check=True, **where)
    for n, memory in zip(sizes, json.loads(done.stdout), strict=True):
        assert 4 * n <= memory < 4 * n + 4 * growth.LITTLE  # with libraries that were not loaded before


class Work(TorchDispatchMode):
    """Counts the numbers that torch reads and writes, which are the same on every machine."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if not func.is_view:
            given = tree_leaves((args, kwargs, found))
            self.numbers += sum(one.numel() for one in given if isinstance(one, torch.Tensor))
        return found


def counted(kind, name, against, make):
    """Measure at three sizes, with counted work in place of seconds."""
    found = []
    for size in {"N": (500, 1000, 2000), "C": (100, 200, 400)}[against]:
        call = make(size)
        with Work() as seen:
            call()
        found.append(growth.Point(kind, name, against, size, seen.numbers, 0))
    return found


@pytest.mark.parametrize("against", ["N", "C"])
def test_work_grows_as_it_may(against):
    fixed = {"classes": 10} if against == "N" else {"n": 64}

    def series_of(kind, name, make):
        return counted(kind, name, against, lambda size: make(**{"n": size, "classes": size, **fixed}))

    points = [
        point
        for record in fedlas.list_losses()
        for point in series_of("loss", record.name, partial(growth.loss_step, record.name))
    ]
    for name, function in growth.metric_functions().items():
        points += series_of("metric", name, partial(growth.metric_call, function))
    assert growth.excesses(points) == []
    assert all(point.seconds > point.size for point in points)


def _all_pairs(probs, labels):
    return torch.cdist(probs, probs).mean() + metrics.ece(probs, labels)


def _one_by_one(probs, labels):
    return sum(float((probs[:, 0] - row[0]).abs().sum()) for row in probs)


@pytest.mark.parametrize("function", [_all_pairs, pytest.param(_one_by_one, marks=pytest.mark.campaign)])
def test_quadratic_work_is_found(function):
    points = counted("metric", "x", "N", lambda n: growth.metric_call(function, n, 10))
    assert growth.exponent(points) > 1.9
    assert len(growth.excesses(points)) == 1


def bytes_kept(kind):
    """Say what a further sample adds to a stream, from two numbers of updates."""
    stream, (logits, labels, *_), updates = kind(), growth.problem(20_000, 10), (20, 120)
    probs = logits.softmax(1)
    stream.update(probs, labels)
    few, many = (growth.apart(lambda n: lambda: [stream.update(probs, labels) for _ in range(n)], n) for n in updates)
    return (many[1] - few[1]) / (20_000 * (updates[1] - updates[0]))


@pytest.mark.campaign
def test_a_stream_of_sums_keeps_no_samples():
    """Half a byte is less than any sample takes; one that keeps samples is measured in the same way, and found.

    A new process does it: what other tests have freed, and this one has not given back, would hide what is kept.
    """
    asked = "from test_growth import bytes_kept, metrics as m; "
    asked += "print(*(bytes_kept(one.accumulator) for one in (m.ece, m.aurc)))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    found = subprocess.run(
        [sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    of_sums, of_samples = map(float, found.stdout.split())
    assert of_sums < growth.SUMS
    assert of_samples > 4 * growth.SUMS


@pytest.mark.campaign
def test_a_process_that_dies_is_named():
    with pytest.raises(RuntimeError, match=r"\b7\b"):
        growth.apart(lambda n: lambda: os._exit(1), 7)


SHORT = {"data_options": {"train_samples": 100}, "model_options": {"width": 8}, "batch_size": 50}


@pytest.mark.parametrize(("epochs", "options"), [(30, SHORT), pytest.param(40, {}, marks=pytest.mark.campaign)])
def test_training_holds_no_more_with_every_epoch(epochs, options):
    seen = growth.training(epochs, **options)
    assert seen[-1]["files"] == seen[2]["files"]
    assert seen[-1]["mib"] - seen[9]["mib"] < 4
