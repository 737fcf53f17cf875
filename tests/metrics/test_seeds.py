"""Differences over seeds and test samples: variance, interval, p-value, coverage, Holm's method."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedlas.metrics import aurc, ece
from fedlas.metrics.paired import of_each_sample
from fedlas.metrics.seeds import SeedComparison, ece_values, holm, over_seeds
from fedlas.predictions import Predictions


def test_without_variance_of_test_samples_it_is_the_paired_t_test():
    differences = (0.3, 0.1, 0.25, -0.05, 0.2)
    comparison, expected = SeedComparison(differences, 0.0), stats.ttest_1samp(differences, 0.0)
    assert comparison.p_value == pytest.approx(expected.pvalue)
    interval = expected.confidence_interval(0.9)
    assert (comparison.interval(0.9).low, comparison.interval(0.9).high) == pytest.approx((interval.low, interval.high))


def test_the_variance_of_test_samples_is_that_of_the_seed_averaged_difference():
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.rand(3, 50, generator=generator, dtype=torch.float64) for _ in range(2))
    comparison = over_seeds(list(first), list(second))
    averaged = (first - second).mean(0).numpy()
    assert comparison.test_variance == pytest.approx(averaged.var(ddof=1) / 50)
    assert comparison.differences == pytest.approx([float(row.mean()) for row in first - second])
    assert comparison.standard_error == pytest.approx(
        math.sqrt(np.var(comparison.differences, ddof=1) / 3 + comparison.test_variance)
    )


@pytest.mark.campaign
@pytest.mark.parametrize("ratio", [0.1, 0.3, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("skewed", [False, True], ids=["normal", "skewed"])
def test_the_interval_covers_the_true_difference(ratio, skewed):
    """Seeds, samples and their interaction vary; `ratio`: variance of the mean over seeds to that over samples."""
    rng, n, seeds, trials, true_difference = np.random.default_rng(1), 200, 5, 1500, 0.2
    covered = 0
    for _ in range(trials):
        of_samples = rng.exponential(1, n) - 1 if skewed else rng.standard_normal(n)
        of_seeds = rng.standard_normal(seeds) * math.sqrt(ratio * seeds / n)
        differences = true_difference + of_seeds[:, None] + of_samples + 0.5 * rng.standard_normal((seeds, n))
        values = torch.from_numpy(differences)
        interval = over_seeds(list(values), [torch.zeros(n, dtype=torch.float64)] * seeds).interval()
        covered += interval.low <= true_difference <= interval.high
    assert covered / trials >= 0.94


def test_signed_gaps_average_to_the_ece():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(400, 4, generator=generator, dtype=torch.float64)
    predictions = Predictions(logits, torch.randint(4, (400,), generator=generator))
    assert float(ece_values(predictions).mean()) == pytest.approx(float(ece(predictions)))


def test_the_aurc_of_each_sample_varies_as_the_bootstrap_does():
    generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    logits = 2 * torch.randn(500, 4, generator=generator, dtype=torch.float64)
    predictions = Predictions(logits, (logits + 2 * torch.randn(500, 4, generator=generator)).argmax(1))
    sample_values = of_each_sample(aurc, predictions)
    assert float(sample_values.values.mean()) == pytest.approx(float(aurc(predictions)))
    resampled_areas = [float(aurc(predictions[torch.from_numpy(rng.integers(0, 500, 500))])) for _ in range(200)]
    assert float(sample_values.values.std()) / math.sqrt(500) == pytest.approx(np.std(resampled_areas), rel=0.15)


def test_one_seed_is_too_few_and_samples_must_be_the_same():
    values = [torch.zeros(4, dtype=torch.float64)]
    with pytest.raises(ValueError, match="two seeds"):
        over_seeds(values, values)
    with pytest.raises(ValueError, match="same test set"):
        over_seeds([*values, values[0][:3]], [*values, values[0][:3]])


def test_holm_adjustment_matches_the_paper():
    p_values = [0.01, 0.04, 0.03, 0.005]
    assert holm(p_values) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
