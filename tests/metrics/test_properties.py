"""Properties that hold for all predictions, searched for counterexamples."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlas.metrics import (
    accuracy,
    aece,
    augrc,
    aurc,
    brier,
    classwise_ece,
    debiased_l2,
    ece,
    histogram,
    ks_test,
    lp_error,
    mce,
    nll,
    over_ece,
    rms_error,
    signed_ece,
    smooth_ece,
    under_ece,
)

ALL_METRICS = [
    ece,
    aece,
    classwise_ece,
    mce,
    rms_error,
    signed_ece,
    smooth_ece,
    nll,
    brier,
    accuracy,
    aurc,
    augrc,
]


@st.composite
def problems(draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities with ties, edges, zeros and ones, in float32 or float64, and labels."""
    n, classes = draw(st.integers(1, 40)), draw(st.integers(2, 5))
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    probs = random.dirichlet(np.full(classes, draw(st.sampled_from([0.05, 0.5, 5.0]))), n)
    if draw(st.booleans()):
        # Tenths and fifteenths lie on edges, and tie.
        steps = draw(st.sampled_from([1, 2, 10, 15]))
        counts = np.array([random.multinomial(steps, row) for row in probs])
        probs = counts / steps
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    return torch.from_numpy(probs.astype(dtype)), torch.from_numpy(random.integers(0, classes, n))


@pytest.mark.parametrize("metric", ALL_METRICS, ids=lambda metric: metric.__name__)
@settings(max_examples=20)
@given(problem=problems(), seed=st.integers(0, 100))
def test_the_order_of_samples_does_not_matter(metric, problem, seed):
    probs, labels = problem
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    assert float(metric(probs[order], labels[order])) == pytest.approx(float(metric(probs, labels)), abs=1e-10)


@pytest.mark.parametrize("metric", [ece, classwise_ece, mce, rms_error, signed_ece, nll, brier, accuracy])
@settings(max_examples=20)
@given(problem=problems(), times=st.integers(2, 4))
def test_doubling_every_sample_changes_nothing(metric, problem, times):
    probs, labels = problem
    repeated = metric(probs.repeat(times, 1), labels.repeat(times))
    assert float(repeated) == pytest.approx(float(metric(probs, labels)), abs=1e-10)


@given(problems(), st.integers(1, 20), st.sampled_from(["width", "mass"]), st.sampled_from(["top-label", "class-wise"]))
def test_over_and_under_add_up_to_the_error(problem, bins, binning, scope):
    over, under = (part(*problem, bins, binning=binning, scope=scope) for part in (over_ece, under_ece))
    assert over >= 0
    assert under >= 0
    expected = lp_error(*problem, bins, p=1, binning=binning, scope=scope)
    assert over + under == pytest.approx(float(expected), abs=1e-12)
    assert over - under == pytest.approx(float(signed_ece(*problem, bins, binning=binning, scope=scope)), abs=1e-12)


@given(problems(), st.integers(1, 20), st.sampled_from(["width", "mass"]))
def test_every_sample_is_in_exactly_one_bin(problem, bins, binning):
    bin_sums = histogram(*problem, bins, binning=binning).bins
    assert int(bin_sums.counts.sum()) == len(problem[1]) == bin_sums.n
    class_sums = histogram(*problem, bins, binning=binning, scope="class-wise").bins
    assert class_sums.counts.sum(1).tolist() == [len(problem[1])] * problem[0].shape[1]


@given(problems(), st.integers(1, 20))
def test_errors_lie_in_their_range_and_order(problem, bins):
    mean_gap, rms_gap, largest_gap = ece(*problem, bins), rms_error(*problem, bins), mce(*problem, bins)
    assert 0 <= mean_gap <= rms_gap + 1e-12 <= largest_gap + 2e-12 <= 1 + 1e-6
    assert abs(signed_ece(*problem, bins)) <= mean_gap + 1e-12
    assert debiased_l2(*problem, bins, binning="width") <= rms_gap + 1e-12
    assert ks_test(*problem) <= 1
    assert augrc(*problem) <= aurc(*problem) + 1e-12


@given(problems(), st.integers(1, 12), st.integers(1, 4))
def test_finer_bins_do_not_decrease_the_error(problem, bins, parts):
    """Bins that are cut into parts can only show more; with float64 the edges of both agree."""
    probs = problem[0].double()
    probs = probs / probs.sum(1, keepdim=True)
    assert ece(probs, problem[1], bins * parts) >= ece(probs, problem[1], bins) - 1e-7


@given(st.integers(1, 30), st.integers(0, 10), st.integers(1, 20))
def test_a_calibrated_model_has_no_error(groups, seed, bins):
    """Of 8 samples with confidence k / 8, k are correct: the error is 0 for any number of bins."""
    random = np.random.default_rng(seed)
    correct_counts = random.integers(0, 9, groups)
    confidence = torch.from_numpy(np.repeat(correct_counts / 8, 8))
    correct = torch.from_numpy(np.concatenate([np.arange(8) < k for k in correct_counts]).astype(np.int64))
    for metric in (ece, aece, mce, rms_error):
        assert metric(confidence, correct, bins, scope="positive") == pytest.approx(0, abs=1e-12)
