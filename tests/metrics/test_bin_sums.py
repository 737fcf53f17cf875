"""The edge rule, equal-mass edges, and sums that stay exact."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedlas.metrics.bin_sums import (
    Bins,
    EdgeRule,
    _scatter_add,
    bin_index,
    bin_statistics,
    class_statistics,
    count_up,
    equal_mass_edges,
    equal_width_edges,
    exact,
    interpolated_edges,
)
from fedlas.metrics.binning import Binning

confidences = hnp.arrays(np.float64, st.integers(1, 60), elements=st.floats(0, 1, width=32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_edge_belongs_to_the_lower_bin_in_every_dtype(dtype):
    for bins in range(1, 51):
        k = torch.arange(bins + 1)
        on_edge = (k.double() / bins).to(dtype)
        index = bin_index(on_edge, equal_width_edges(bins), EdgeRule.RIGHT)
        assert index.tolist() == [0, *range(bins)], (bins, dtype)


def test_values_next_to_an_edge_are_binned_on_either_side():
    for dtype in (torch.float32, torch.float64):
        for bins in (3, 10, 15):
            edge = equal_width_edges(bins)[1:-1].to(dtype)
            zeros, ones = torch.zeros_like(edge), torch.ones_like(edge)
            just_below, just_above = torch.nextafter(edge, zeros), torch.nextafter(edge, ones)
            assert bin_index(just_below, equal_width_edges(bins), EdgeRule.RIGHT).tolist() == list(range(bins - 1))
            assert bin_index(just_above, equal_width_edges(bins), EdgeRule.RIGHT).tolist() == list(range(1, bins))


def test_half_precision_edges_agree_with_float32_edges():
    tenths = torch.arange(11) / 10
    for dtype in (torch.float16, torch.bfloat16):
        index = bin_index(tenths.to(dtype), equal_width_edges(10), EdgeRule.RIGHT)
        assert index.tolist() == [0, *range(10)], dtype


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (EdgeRule.RIGHT, [0, 0, 0, 1, 1]),
        (EdgeRule.RIGHT_OPEN, [-1, 0, 0, 1, 1]),
        (EdgeRule.LEFT, [0, 0, 1, 1, 1]),
        (EdgeRule.LEFT_OPEN, [0, 0, 1, 1, 2]),
    ],
)
def test_every_rule_at_every_kind_of_edge(rule, expected):
    values = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    assert bin_index(values, equal_width_edges(2), rule).tolist() == expected


@given(confidences, st.integers(1, 20))
def test_counts_and_sums_of_bins_add_up(confidence, bins):
    values = torch.from_numpy(confidence)
    correct = values > 0.5
    for edges in (equal_width_edges(bins), equal_mass_edges(values, bins)):
        bin_sums = bin_statistics(values, correct, edges, EdgeRule.RIGHT)
        assert int(bin_sums.counts.sum()) == len(values)
        assert float(bin_sums.confidence_sum.sum()) == pytest.approx(float(values.sum()), abs=1e-12)
        assert float(bin_sums.correct_sum.sum()) == int(correct.sum())


@given(confidences, st.integers(1, 20))
def test_interpolated_edges_are_those_of_numpy(confidence, bins):
    n = len(confidence)
    expected = np.interp(np.linspace(0, n, bins + 1), np.arange(n), np.sort(confidence))
    assert interpolated_edges(torch.from_numpy(confidence), bins).numpy() == pytest.approx(expected, abs=1e-15)


def test_official_equal_mass_bins_omit_the_least_confident_sample():
    values = torch.rand(10_000)
    bins = bin_statistics(values, values > 0.5, interpolated_edges(values, 15))
    assert int(bins.counts.sum()) == 9_999
    assert set(bins.counts.tolist()) <= {666, 667}


@given(st.integers(1, 200), st.integers(1, 20))
def test_sizes_of_equal_mass_bins_differ_by_at_most_one(n, bins):
    values = (torch.randperm(n) + 1) / n
    counts = bin_statistics(values, values > 0.5, equal_mass_edges(values, bins), EdgeRule.RIGHT).counts
    assert counts.tolist() == [len(part) for part in np.array_split(np.arange(n), bins)]


def test_equal_confidences_share_a_bin():
    values = torch.tensor([0.3, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.95])
    index = bin_index(values, equal_mass_edges(values, 4), EdgeRule.RIGHT)
    assert len(set(index[1:7].tolist())) == 1


def test_interpolated_edges_assign_ties_to_the_first_bin():
    values = torch.cat([torch.linspace(0.1, 0.9, 50), torch.ones(50)])
    counts = bin_statistics(values, values > 0.5, interpolated_edges(values, 10)).counts
    assert counts[-4:].tolist() == [0, 0, 0, 0]
    assert int(counts.max()) >= 50


def test_empty_bins_have_no_gap():
    bins = bin_statistics(torch.tensor([0.9, 0.95]), torch.tensor([True, False]), equal_width_edges(4))
    assert bins.counts.tolist() == [0, 0, 0, 2]
    assert bins.gap[:3].tolist() == [0, 0, 0]
    assert float(bins.gap[3]) == pytest.approx(0.425, abs=1e-7)


def test_adding_bins_with_other_edges_raises():
    values = torch.rand(100, dtype=torch.float64)
    edges = equal_width_edges(7)
    expected = bin_statistics(values, values > 0.5, edges)
    parts = [bin_statistics(part, part > 0.5, edges) for part in values.split(33)]
    added = parts[0] + parts[1] + parts[2] + parts[3]
    assert torch.equal(added.counts, expected.counts)
    assert torch.allclose(added.confidence_sum, expected.confidence_sum, atol=1e-13, rtol=0)
    assert added.n == 100
    assert torch.equal(added.cpu().counts, expected.counts)
    assert torch.allclose(expected.confidence - expected.accuracy, expected.gap, atol=1e-15)
    with pytest.raises(ValueError, match="edges"):
        expected + bin_statistics(values, values > 0.5, equal_width_edges(8))


def test_sums_and_counts_of_half_precision_are_exact():
    values = torch.full((5_000,), 0.5, dtype=torch.bfloat16)
    bins = bin_statistics(values, torch.ones(5_000, dtype=torch.bool), equal_width_edges(2))
    assert bins.counts.dtype == torch.int64
    assert bins.confidence_sum.dtype == torch.float64
    assert bins.counts.tolist() == [5_000, 0]
    assert bins.confidence_sum.tolist() == [2_500.0, 0.0]


@pytest.mark.parametrize("rule", list(EdgeRule))
@pytest.mark.parametrize("bins", [1, 2, 15])
@pytest.mark.parametrize("soft", [False, True])
def test_class_histograms_equal_one_histogram_per_column(rule, bins, soft):
    probs = torch.randn(300, 6).mul(3).softmax(1)
    probs[:5] = torch.eye(6)[:5]
    labels = torch.randn(300, 6).softmax(1) if soft else torch.randint(0, 6, (300,))
    class_sums = class_statistics(probs, labels, equal_width_edges(bins), rule)
    for k in range(6):
        correct = labels[:, k] if soft else labels == k
        column_sums = bin_statistics(probs[:, k], correct, equal_width_edges(bins), rule)
        assert torch.equal(class_sums.counts[k], column_sums.counts)
        assert torch.allclose(class_sums.confidence_sum[k], column_sums.confidence_sum, atol=1e-12, rtol=0)
        assert torch.allclose(class_sums.correct_sum[k], column_sums.correct_sum, atol=1e-6 if soft else 0, rtol=0)


def test_equal_mass_class_histograms_have_edges_per_class():
    probs = torch.randn(100, 3).softmax(1)
    bins = Binning(5, "mass").fill_classes(probs, torch.randint(0, 3, (100,)))
    assert bins.edges.shape == (3, 6)
    assert bins.counts.tolist() == [[20] * 5] * 3


def test_sums_are_on_the_cpu_if_a_device_has_no_float64(monkeypatch):
    """The CPU stands in for a device without float64: every sum must be moved."""
    moved_dtypes = []
    monkeypatch.setattr("fedlas.metrics.bin_sums.NO_FLOAT64", {"cpu"})
    original = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: moved_dtypes.append(self.dtype) or original(self))
    exact(torch.ones(3, dtype=torch.float32))
    bin_statistics(torch.rand(4), torch.ones(4, dtype=torch.bool), equal_width_edges(2))
    assert moved_dtypes.count(torch.float32) >= 2
    assert torch.bool in moved_dtypes


def test_zero_bins_raise():
    for edges in (
        equal_width_edges,
        lambda b: equal_mass_edges(torch.rand(4), b),
        lambda b: interpolated_edges(torch.rand(4), b),
    ):
        with pytest.raises(ValueError, match=r"bins.*\b0\b"):
            edges(0)


def test_gap_times_share_is_the_weighted_gap():
    values = torch.rand(50, dtype=torch.float64)
    bins: Bins = bin_statistics(values, values > 0.7, equal_width_edges(5))
    assert torch.allclose(bins.gap * bins.counts / bins.n, bins.weighted_gap, atol=1e-15)


@pytest.mark.parametrize("soft", [False, True])
def test_large_tables_are_processed_in_parts(monkeypatch, soft):
    probs = torch.randn(300, 6).mul(3).softmax(1)
    labels = torch.randn(300, 6).softmax(1) if soft else torch.randint(0, 6, (300,))
    expected = class_statistics(probs, labels, equal_width_edges(15))
    monkeypatch.setattr("fedlas.metrics.bin_sums.MOST_AT_ONCE", 500)
    processed_in_parts = class_statistics(probs, labels, equal_width_edges(15))
    assert torch.equal(processed_in_parts.counts, expected.counts)
    assert processed_in_parts.n == 300
    assert torch.allclose(processed_in_parts.confidence_sum, expected.confidence_sum, atol=1e-12, rtol=0)
    assert torch.allclose(processed_in_parts.correct_sum, expected.correct_sum, atol=1e-12, rtol=0)


def test_copies_of_cells_add_up():
    """On a device each thread has a copy of every cell; a meta device tests shape and type."""
    index, values = torch.randint(5, (1000,)), torch.rand(1000, dtype=torch.float64)
    device = torch.device("meta")
    assert _scatter_add(values.to(device), index.to(device), 5).shape == (5,)
    assert count_up(index.to(device), 5).dtype == torch.int64
