"""Streaming metrics: the same number in any split, merged or synchronised, in memory that does not grow."""

import itertools
import math
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlas import metrics
from fedlas.metrics.registry import all_metrics
from metrics import cases

METRICS = list(all_metrics().values())


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
@settings(max_examples=15)
@given(cuts=st.lists(st.integers(0, 200), max_size=4), seed=st.integers(0, 3))
def test_batches_match_all_data_at_once(metric, cuts, seed):
    probs, labels = cases.saturated(200, 4, seed)
    boundaries = [0, *sorted(cuts), 200]
    parts = [(probs[a:b], labels[a:b]) for a, b in itertools.pairwise(boundaries) if b > a]
    accumulator = metric.accumulator()
    for part in parts[::2]:
        accumulator.update(*part)
    other = metric.accumulator()
    for part in parts[1::2]:
        other.update(*part)
    result = accumulator.merge(other).compute()
    expected = metric(probs, labels)
    assert float(result) == pytest.approx(float(expected), abs=1e-12)
    assert result.definition == expected.definition


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_logits_match_probabilities(metric, golden):
    accumulator = metric.accumulator().update_logits(golden.logits[:500], golden.labels[:500])
    accumulator.update_logits(golden.logits[500:].numpy(), golden.labels[500:].numpy())
    assert float(accumulator.compute()) == pytest.approx(float(metric(golden)), abs=1e-12)
    assert float(metric.accumulator().update(golden).compute()) == pytest.approx(
        float(accumulator.compute()), abs=1e-12
    )


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_merge_adds_into_the_first_and_returns_it(metric, golden):
    first, second = metric.accumulator().update(golden), metric.accumulator().update(golden)
    assert first.merge(second) is first
    assert float(second.compute()) == pytest.approx(float(metric(golden)), abs=1e-12)
    doubled = torch.cat([golden.probs, golden.probs]), torch.cat([golden.labels, golden.labels])
    assert float(first.compute()) == pytest.approx(float(metric(*doubled)), abs=1e-8)
    assert float(metric.accumulator().merge(second).compute()) == pytest.approx(float(second.compute()), abs=1e-12)


def test_probabilities_given_as_logits_warn_in_the_first_batch():
    """Regression: their softmax was evaluated silently."""
    probs, labels = cases.saturated(200, 4, 0)
    accumulator = metrics.ece.accumulator()
    with pytest.warns(UserWarning, match="use update"):
        accumulator.update_logits(probs, labels)
    accumulator.update_logits(probs, labels)  # warnings are errors


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_compute_without_samples_raises(metric):
    with pytest.raises(ValueError, match="update"):
        metric.accumulator().compute()


def test_merging_different_accumulators_raises(golden):
    with pytest.raises(ValueError, match="merge"):
        metrics.ece.accumulator(15).merge(metrics.ece.accumulator(10))
    with pytest.raises(ValueError, match="merge"):
        metrics.ece.accumulator().merge(metrics.mce.accumulator())
    with pytest.raises(ValueError, match="merge"):
        metrics.ece.accumulator(scope="positive").merge(metrics.ece.accumulator())


def test_equal_width_accumulators_store_only_sums():
    probs, labels = cases.saturated(1_000, 10)
    for stream, classes in (
        (metrics.ece.accumulator(), 1),
        (metrics.mce.accumulator(), 1),
        (metrics.classwise_ece.accumulator(), 10),
        (metrics.brier.accumulator(), 10),
        (metrics.accuracy.accumulator(), 1),
    ):
        for _ in range(3):
            stream.update(probs, labels)
        stored_tensors = [t for t in tensors_in(stream) if t.ndim]
        assert sum(t.numel() for t in stored_tensors) <= 3 * 15 * classes + 16, stream.metric.name


def tensors_in(value, depth: int = 4) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if depth == 0:
        return []
    children = value if isinstance(value, list) else list(vars(value).values()) if hasattr(value, "__dict__") else []
    return [tensor for child in children for tensor in tensors_in(child, depth - 1)]


def test_equal_mass_accumulators_store_five_bytes_per_sample():
    probs, labels = cases.saturated(1_000, 10)
    stream = metrics.aece.accumulator().update(probs, labels)
    assert sum(t.numel() * t.element_size() for t in tensors_in(stream)) == 5_000
    assert (
        sum(
            t.numel() * t.element_size()
            for t in tensors_in(metrics.aece.accumulator().update(probs.bfloat16(), labels))
        )
        == 5_000
    )


def test_counts_are_right_beyond_two_to_the_24():
    """Counting 20 million ones in float32 stops at 16,777,216 (torchmetrics, MONAI, torch-uncertainty)."""
    row = torch.tensor([[0.75, 0.25]], dtype=torch.float32)
    probs = row.expand(1_000_000, 2).contiguous()
    labels = (torch.arange(1_000_000) % 4 == 0).long()
    stream = metrics.ece.accumulator(4)
    for _ in range(20):
        stream.update(probs, labels)
    bins = stream.histogram().bins
    assert bins.counts.tolist() == [0, 0, 20_000_000, 0]
    assert bins.correct_sum[2] == 15_000_000
    assert stream.compute() == 0.0
    assert stream.compute().n == 20_000_000


def test_logits_in_bf16_are_softened_in_float32(golden):
    logits = golden.logits.bfloat16()
    result = metrics.ece.accumulator().update_logits(logits, golden.labels).compute()
    assert result == metrics.ece(logits.float().softmax(1), golden.labels)
    assert result == pytest.approx(metrics.ece(golden), abs=5e-3)


def test_binary_and_multi_label_heads():
    confidence, labels = cases.binary(300)
    logits = torch.logit(confidence)
    expected = metrics.ece(confidence, labels, scope="positive")
    for shape in ((300,), (300, 1)):
        accumulator = metrics.ece.accumulator(scope="positive").update_logits(logits.reshape(shape), labels)
        assert accumulator.compute() == pytest.approx(expected, abs=1e-9)
    two_columns = torch.stack([torch.zeros_like(logits), logits], 1)
    assert metrics.ece.accumulator(scope="positive").update_logits(two_columns, labels).compute() == pytest.approx(
        expected, abs=1e-9
    )
    with pytest.raises(ValueError, match=r'\(300,\).*scope="positive"'):
        metrics.ece.accumulator().update_logits(logits, labels)
    multi_label_logits = torch.randn(50, 3)
    multi_label_targets = torch.randint(0, 2, (50, 3))
    accumulator = metrics.ece.accumulator(scope="multi-label").update_logits(multi_label_logits, multi_label_targets)
    assert accumulator.compute() == metrics.ece(multi_label_logits.sigmoid(), multi_label_targets, scope="multi-label")


def test_maps_and_ignored_labels():
    logits, labels = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
    labels[0, 0] = 255
    accumulator = metrics.ece.accumulator(ignore_index=255)
    for i in range(2):
        accumulator.update_logits(logits[i : i + 1], labels[i : i + 1])
    assert accumulator.compute() == pytest.approx(metrics.ece(logits.softmax(1), labels, ignore_index=255), abs=1e-12)
    assert metrics.nll.accumulator(ignore_index=255).update_logits(logits, labels).compute() == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=255)), abs=1e-6
    )


def test_invalid_logits_raise():
    with pytest.raises(ValueError, match=r"logits.*row 1"):
        metrics.ece.accumulator().update_logits(torch.tensor([[0.0, 1.0], [math.nan, 0.0]]), torch.tensor([0, 1]))
    with pytest.raises(TypeError, match="floating-point"):
        metrics.ece.accumulator().update_logits(torch.tensor([[0, 1]]), torch.tensor([0]))


def test_accumulators_that_do_not_exist_raise():
    with pytest.raises(ValueError, match="function"):
        metrics.over_ece.accumulator(binning="mass", scope="class-wise")
    with pytest.raises(ValueError, match="function"):
        metrics.classwise_ece.accumulator(compat="official")


def test_presets_and_equal_mass_stream_too(golden):
    first_half = golden.probs[:500], golden.labels[:500]
    second_half = golden.probs[500:], golden.labels[500:]
    for compat in ("official", "netcal", "torchmetrics", "uncertainty-calibration"):
        result = metrics.ece.accumulator(compat=compat).update(*first_half).update(*second_half).compute()
        assert result == pytest.approx(metrics.ece(golden, compat=compat), abs=1e-12)
    assert metrics.aece.accumulator(compat="official").update(*first_half).update(
        *second_half
    ).compute() == metrics.aece(golden, compat="official")
    parts = [
        part.accumulator(binning="mass").update(*first_half).update(*second_half).compute()
        for part in (metrics.over_ece, metrics.under_ece)
    ]
    assert sum(parts) == pytest.approx(metrics.aece(golden), abs=1e-12)


def test_definition_names_two_dtypes(golden):
    accumulator = (
        metrics.ece.accumulator().update(golden.probs, golden.labels).update(golden.probs.double(), golden.labels)
    )
    assert accumulator.compute().dtype == "float32 and float64"


def test_sync_of_a_single_process_is_the_identity(golden):
    for metric in METRICS:
        accumulator = metric.accumulator().update(golden)
        before = float(accumulator.compute())
        assert float(accumulator.sync().compute()) == before


def all_streams() -> list[metrics.AbstractAccumulator]:
    return [metric.accumulator() for metric in METRICS]


def compute_in_process(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    probs, labels = cases.saturated(301, 4)
    # In the second split the first process has no samples.
    for name, end in (("split", 100), ("empty", 0)):
        rows = slice(0, end) if rank == 0 else slice(end, 301)
        results = []
        for stream in all_streams():
            if len(labels[rows]):
                stream.update(probs[rows], labels[rows])
            results.append(float(stream.sync().compute()))
        torch.save(torch.tensor(results, dtype=torch.float64), f"{folder}/{name}{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_equal_one(tmp_path):
    mp.spawn(_work_with_path, args=(str(tmp_path), list(sys.path)), nprocs=2)
    probs, labels = cases.saturated(301, 4)
    expected = [float(stream.update(probs, labels).compute()) for stream in all_streams()]
    for name in ("split0", "split1", "empty0", "empty1"):
        assert torch.load(tmp_path / f"{name}.pt").tolist() == pytest.approx(expected, abs=1e-12), name


def _work_with_path(rank: int, folder: str, path: list[str]) -> None:
    sys.path[:] = path
    compute_in_process(rank, folder)
