"""Metrics in torchmetrics equal fedlas metrics: over several updates, in collections and over two processes."""

import warnings
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import fedlas
from fedlas import metrics
from fedlas.metrics.registry import all_metrics
from start_method import START_METHOD

CLASSES = 5
METRICS = all_metrics()
NEED_CLASSES = {"classwise_ece"}


# torchmetrics takes seconds to import, so it is imported where it is used, in functions.


def build(name: str, inputs: str = "logits", **options: Any) -> Any:
    from fedlas.integrations import torchmetrics

    classes = {"num_classes": CLASSES} if name in NEED_CLASSES else {}
    return torchmetrics.CalibrationMetric(name, inputs, **classes, **options)


def collect(metrics: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return a collection of these metrics, or of the usual ones."""
    from torchmetrics import MetricCollection

    from fedlas.integrations.torchmetrics import calibration_metrics

    return MetricCollection(metrics or calibration_metrics("logits"), **options)


def samples(n: int = 300) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    labels = torch.randint(0, CLASSES, (n,), generator=generator)
    logits = 2 * torch.randn(n, CLASSES, generator=generator)
    logits[torch.arange(n), labels] += 1.5
    return logits, labels


def pieces() -> list[tuple[Tensor, Tensor]]:
    logits, labels = samples()
    sizes = [1, 99, 120, 80]
    return list(zip(logits.split(sizes), labels.split(sizes), strict=True))


def work(rank: int, folder: str) -> None:
    """Update with two of the four chunks on each process, and save the synchronised results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    collection = collect({name: build(name) for name in METRICS})
    for logits, labels in pieces()[2 * rank : 2 * rank + 2]:
        collection.update(logits, labels)
    torch.save([collection.compute(), collection.compute()], f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("inputs", ["logits", "probs"])
@pytest.mark.parametrize("name", METRICS)
def test_one_update_equals_the_metric(name, inputs):
    function = METRICS[name]
    logits, labels = samples()
    probs = logits.softmax(1)
    metric = build(name, inputs)
    metric.update(logits if inputs == "logits" else probs, labels)
    value = metric.compute()
    assert value.dtype == torch.float64
    # The NLL of logits needs no probabilities; fedlas takes logits as Predictions.
    of_logits = name == "nll" and inputs == "logits"
    expected = function(fedlas.Predictions(logits, labels)) if of_logits else function(probs, labels)
    assert float(value) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize("name", METRICS)
def test_updates_reset_and_batch_values(name):
    function = METRICS[name]
    metric = build(name)
    for _ in range(2):
        for logits, labels in pieces():
            of_batch = metric(logits, labels)
            assert float(of_batch) == pytest.approx(function(logits.softmax(1), labels), abs=1e-12, rel=1e-6)
        logits, labels = samples()
        assert float(metric.compute()) == pytest.approx(function(logits.softmax(1), labels), abs=1e-12, rel=1e-6)
        metric.reset()


@pytest.mark.parametrize("name", METRICS)
def test_ignored_samples_do_not_count(name):
    function = METRICS[name]
    logits, labels = samples()
    valid = labels != 2
    metric = build(name, ignore_index=2)
    metric.update(logits, labels)
    metric.update(logits[~valid], labels[~valid])  # a chunk without valid samples
    assert float(metric.compute()) == pytest.approx(function(logits[valid].softmax(1), labels[valid]), rel=1e-6)


@pytest.mark.parametrize("name", METRICS)
def test_copies_and_saved_states_continue(name):
    (first, *remaining), reference = pieces(), build(name)
    reference.update(*samples())
    metric, restored = build(name), build(name)
    metric.persistent(True)
    restored.persistent(True)
    metric.update(*first)
    restored.load_state_dict(metric.state_dict())
    for piece in remaining:
        metric.update(*piece)
        restored.update(*piece)
    assert float(metric.clone().compute()) == pytest.approx(float(reference.compute()), abs=1e-12)
    assert float(restored.compute()) == float(metric.compute())


def test_metrics_of_the_same_bins_share_sums_in_a_collection():
    grouped, separate = collect(), collect(compute_groups=False)
    for logits, labels in pieces():
        grouped.update(logits, labels)
        separate.update(logits, labels)
    groups = {frozenset(group) for group in grouped.compute_groups.values()}
    shared = frozenset({"ece", "over_ece", "under_ece"})
    assert groups == {frozenset({"accuracy"}), shared, frozenset({"aece"}), frozenset({"nll"})}
    assert grouped.compute() == separate.compute()


@pytest.mark.parametrize("other", [{"ignore_index": 4}, {"compat": "netcal"}, {"bins": 10}])
def test_metrics_with_other_rules_do_not_share_sums(other):
    """A first batch may give equal states for both; a collection would then merge the two metrics."""
    collection = collect({"plain": build("ece"), "other": build("ece", **other)})
    logits, labels = samples()
    collection.update(logits[labels < 4], labels[labels < 4])
    collection.update(logits[labels == 4], labels[labels == 4])
    probs = logits.softmax(1)
    result = collection.compute()
    assert float(result["plain"]) == pytest.approx(metrics.ece(probs, labels), abs=1e-12)
    assert float(result["other"]) == pytest.approx(metrics.ece(probs, labels, **other), abs=1e-12)


def test_the_type_of_updates_is_required(monkeypatch):
    logits, labels = samples()
    with pytest.raises(ValueError, match="row 0"):
        build("ece", "probs").update(logits, labels)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the checks of the tests would come first
    with pytest.raises(ValueError, match=r'softmax.*inputs="logits".*inputs="probs"'):
        build("ece", "softmax")


def test_probabilities_given_as_logits_warn_once():
    logits, labels = samples()
    metric = build("ece", "logits")
    with pytest.warns(UserWarning, match='pass inputs="probs"'):
        metric.update(logits.softmax(1), labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metric.update(logits.softmax(1), labels)


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_a_metric_without_samples_raises(name):
    with pytest.raises(ValueError, match="update"):
        build(name).compute()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_two_processes_equal_one(tmp_path: Path):
    reference = {name: build(name) for name in METRICS}
    mp.start_processes(work, args=(str(tmp_path),), nprocs=2, start_method=START_METHOD)
    for metric in reference.values():
        metric.update(*samples())
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    for result, second_result in (first, second):
        assert result == second_result
        for name, metric in reference.items():
            assert float(result[name]) == pytest.approx(float(metric.compute()), abs=1e-12), name
