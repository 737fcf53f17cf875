"""Exponents of time and memory are measured correctly and within their limits; training does not leak."""

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
from fedlas.metrics.registry import all_metrics


def _benchmark(name):
    """Load a benchmark by its path; its folder on `sys.path` would shadow test packages."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "benchmarks" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


growth = _benchmark("growth")


@pytest.mark.parametrize(("power", "expected"), [(1.0, 1.0), (2.0, 2.0)])
def test_exponent_of_a_power_law(power, expected):
    points = [growth.Point("x", "x", "N", 10**k, 1e-6 * (10**k) ** power, 0) for k in range(3, 8)]
    assert growth.exponent(points) == pytest.approx(expected)


def test_too_short_calls_have_no_exponent():
    assert growth.exponent([growth.Point("x", "x", "N", n, 1e-5, 0) for n in (10, 100, 1000)]) is None


def series(power, memory_power=1.0, kind="metric", name="x", against="N"):
    sizes = [10**k for k in range(3, 8)]
    return [growth.Point(kind, name, against, n, 1e-6 * n**power, int(2**10 * n**memory_power)) for n in sizes]


def test_quadratic_series_is_reported():
    assert growth.excesses(series(1.0)) == []
    assert growth.excesses(series(1.3)) == []
    for excess, kind in ((growth.excesses(series(2.0)), "time"), (growth.excesses(series(1.0, 2.0)), "memory")):
        assert len(excess) == 1
        assert re.match(rf"metric x N: {kind}.*2\.00.*1\.5", excess[0])


def test_quadratic_growth_in_classes_is_allowed_where_documented():
    for name, allowed in (("ce", 1.5), ("cpc", 2.5), ("fedlas_ls", 2.5)):
        assert growth.limit("loss", name, "C") == allowed
        assert growth.limit("loss", name, "N") == 1.5
    assert growth.excesses(series(2.0, kind="loss", name="cpc", against="C")) == []
    assert len(growth.excesses(series(3.0, kind="loss", name="cpc", against="C"))) == 1


@pytest.mark.parametrize(("added", "reported"), [(0.0, False), (0.2, False), (1.0, True), (5.0, True)])
def test_accumulator_of_sums_that_stores_samples_is_reported(added, reported):
    points = [growth.Point("stream", "ece", "N", 10**k, 1e-8 * 10**k, 2**27 + int(added * 10**k)) for k in range(3, 9)]
    messages = growth.excesses(points)
    assert len(messages) == reported
    assert all(message.startswith("stream ece N:") and f"{added:.1f} bytes" in message for message in messages)
    of_samples = [growth.Point("stream", "aurc", "N", p.size, p.seconds, p.memory) for p in points]
    assert growth.excesses(of_samples) == []


def test_all_metrics_are_measured():
    assert growth.metric_callables().keys() >= set(all_metrics())
    of_samples = {name for name in all_metrics() if not growth.stores_sums(name)}
    assert {"aece", "aurc", "smooth_ece"} <= of_samples
    assert not of_samples & {"accuracy", "ece", "nll", "brier", "classwise_ece"}


@pytest.mark.campaign
def test_memory_freed_by_a_point_is_not_reused_by_the_next():
    """Runs in a new process like the benchmark; memory freed by other tests would be reused too."""
    sizes = (2**25, 2**23, 2**24)
    script = f"import growth, torch; take = lambda n: lambda: torch.ones(n).sum(); sizes = {sizes}\n"
    script += "print([growth.measure_in_process(take, n)[1] for n in sizes])"
    options = {"cwd": Path(growth.__file__).parent, "capture_output": True, "text": True, "timeout": 300}
    process = subprocess.run([sys.executable, "-c", script], check=True, **options)
    for n, memory in zip(sizes, json.loads(process.stdout), strict=True):
        assert 4 * n <= memory < 4 * n + 4 * growth.LITTLE  # with libraries that were not loaded before


class Work(TorchDispatchMode):
    """Counts the elements that torch reads and writes, which do not depend on the machine."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if not func.is_view:
            leaves = tree_leaves((args, kwargs, output))
            self.numbers += sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
        return output


def counted(kind, name, against, make):
    """Measure at three sizes, with the number of elements in place of seconds."""
    points = []
    for size in {"N": (500, 1000, 2000), "C": (100, 200, 400)}[against]:
        call = make(size)
        with Work() as work:
            call()
        points.append(growth.Point(kind, name, against, size, work.numbers, 0))
    return points


@pytest.mark.parametrize("against", ["N", "C"])
def test_work_grows_within_limits(against):
    fixed = {"classes": 10} if against == "N" else {"n": 64}

    def series_of(kind, name, make):
        return counted(kind, name, against, lambda size: make(**{"n": size, "classes": size, **fixed}))

    points = [
        point
        for record in fedlas.list_losses()
        for point in series_of("loss", record.name, partial(growth.loss_step, record.name))
    ]
    for name, function in growth.metric_callables().items():
        points += series_of("metric", name, partial(growth.metric_call, function))
    assert growth.excesses(points) == []
    assert all(point.seconds > point.size for point in points)


def _all_pairs(probs, labels):
    return torch.cdist(probs, probs).mean() + metrics.ece(probs, labels)


def _one_by_one(probs, labels):
    return sum(float((probs[:, 0] - row[0]).abs().sum()) for row in probs)


@pytest.mark.parametrize("function", [_all_pairs, pytest.param(_one_by_one, marks=pytest.mark.campaign)])
def test_quadratic_work_is_reported(function):
    points = counted("metric", "x", "N", lambda n: growth.metric_call(function, n, 10))
    assert growth.exponent(points) > 1.9
    assert len(growth.excesses(points)) == 1


def bytes_kept(kind):
    """Return the bytes that an additional sample adds to an accumulator, from two numbers of updates."""
    stream, (logits, labels, *_), updates = kind(), growth.problem(20_000, 10), (20, 120)
    probs = logits.softmax(1)
    stream.update(probs, labels)
    first, second = (
        growth.measure_in_process(lambda n: lambda: [stream.update(probs, labels) for _ in range(n)], n)
        for n in updates
    )
    return (second[1] - first[1]) / (20_000 * (updates[1] - updates[0]))


@pytest.mark.campaign
def test_accumulator_of_sums_stores_no_samples():
    """An accumulator that stores samples is measured in the same way, in a new process without freed memory."""
    script = "from test_growth import bytes_kept, metrics as m; "
    script += "print(*(bytes_kept(metric.accumulator) for metric in (m.ece, m.aurc)))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    process = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    of_sums, of_samples = map(float, process.stdout.split())
    assert of_sums < growth.SUMS
    assert of_samples > 4 * growth.SUMS


@pytest.mark.campaign
def test_dead_process_raises_with_its_size():
    with pytest.raises(RuntimeError, match=r"\b7\b"):
        growth.measure_in_process(lambda n: lambda: os._exit(1), 7)


SHORT = {"data_options": {"train_samples": 100}, "model_options": {"width": 8}, "batch_size": 50}


@pytest.mark.parametrize(("epochs", "options"), [(30, SHORT), pytest.param(40, {}, marks=pytest.mark.campaign)])
def test_training_does_not_leak_memory_or_files(epochs, options):
    records = growth.training(epochs, **options)
    assert records[-1]["files"] == records[2]["files"]
    assert records[-1]["mib"] - records[9]["mib"] < 4
