"""Bootstrap distributions of binned gaps and of means.

The gap d of a sample is its confidence minus its correctness; it adds d / n to the weighted gap of its bin. There are
two ways to resample:

    cells     Samples of one bin with nearly equal gaps form a cell. The counts of the cells are multinomial, and the
              variance within cells is added as normal noise. The cost depends on bins and cells, not on samples.
    samples   Single samples are drawn, the same ones for two models.

`classwise.py` resamples the bins of all classes.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedlas.metrics.intervals.binomial import clopper_pearson_interval

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Part = Literal["both", "over", "under", "rms"]

LEVELS = 60  # cells per unit of gap; since the variance within cells is added, finer cells are not more accurate
AT_ONCE = 20_000_000  # largest number of draws in memory
FAR = 1e90  # larger values are scaled down, so that their cubes do not overflow
SPARSE = 10  # expected correct or incorrect predictions; bins with fewer are drawn from a binomial distribution
LARGE_RATIO = 1.5  # ratio of two variances; smaller ratios are common in calibrated bins
MANY = 100  # number of samples of a bin from which a single sample is negligible
CERTAIN = 1e-6  # expected variance of a bin whose confidences are all 0 or 1 up to rounding
NORMAL = 400.0  # variance of a binomial count from which the normal approximation is used
PRIOR = 5  # pseudo-count of soft labels that vary like hard ones
MOST_DRAWS = 4_000_000  # with more, the normal approximation is used: the same intervals in milliseconds


class Bounds(NamedTuple):
    """Smallest and largest possible value of a sample, and the threshold between small and large values."""

    low: float
    split: float
    high: float


@dataclass(frozen=True)
class BootstrapDistribution:
    """Bootstrap distribution of weighted gaps.

    Args:
        gaps: the gap of each bin times its fraction of samples.
        deviations: deviations of the gaps, one row per resample.
        fraction: fraction of all samples in each bin.
        noise: how the deviations depend on the true gaps; None if they do not.
    """

    gaps: Floats
    deviations: Floats
    fraction: Floats
    noise: "Noise | None" = None

    @property
    def error(self) -> Floats:
        """Standard error of each gap under calibration; for sparse bins at least that of the Jeffreys estimate."""
        deviation = np.asarray(self._around(np.zeros_like(self.gaps)).std(0))
        return deviation if self.noise is None else np.maximum(deviation, self.noise.least_error)

    def totals(self, truth: Floats, part: Part, cautious: bool = False) -> Floats:
        """Resample the total around supposed true gaps; `cautious` increases the noise of sparse bins."""
        return self.total(truth + self._around(truth, cautious), part)

    def total(self, gaps: Floats, part: Part) -> Floats:
        """Return the sum of absolute gaps, of positive or negative ones only, or the root of the mean square."""
        if part == "both":
            return np.asarray(np.abs(gaps).sum(-1))
        if part == "rms":
            return np.asarray(np.sqrt((gaps**2 / np.where(self.fraction > 0, self.fraction, 1)).sum(-1)))
        return np.asarray(np.maximum(gaps if part == "over" else -gaps, 0).sum(-1))

    def _around(self, truth: Floats, cautious: bool = False) -> Floats:
        return self.deviations if self.noise is None else self.noise.around(self.deviations, truth, cautious)


@dataclass(frozen=True)
class Binomial:
    """Number of samples, mean confidence and relative standard deviation of each bin.

    The number of correct predictions with unequal confidences c has the variance sum c (1 - c), less than that of a
    binomial count with their mean; `narrower` is the square root of the ratio.
    """

    count: Floats
    mean: Floats
    narrower: Floats

    @classmethod
    def of(cls, count: Floats, sums: Floats, squares: Floats) -> "Binomial":
        """Compute from the counts, the sums of confidences and the sums of their squares."""
        # Clip, because differences of sums have rounding errors.
        mean = np.clip(sums / np.maximum(count, 1), 0, 1)
        binomial = count * mean * (1 - mean)
        # Confidences of exactly 0 or 1 have no variance; use the binomial one for other true rates.
        varies = binomial > CERTAIN
        ratio = np.where(varies, (sums - squares) / np.where(varies, binomial, 1), 1.0)
        return cls(count, mean, np.sqrt(np.clip(ratio, 0, 1)))


@dataclass(frozen=True)
class Noise:
    """Distribution of the gaps of bins around supposed true gaps.

    The bootstrap underestimates the variance of sparse bins, those with few correct or few incorrect predictions: a bin
    without errors has a variance of zero. So the deviations of a bin are scaled to the mean deviation of a binomial
    count at the supposed rate, and those of sparse bins are replaced by deviations of binomial counts, in a given order
    of resamples.

    Args:
        bins: samples and mean confidence of each bin.
        correct: number of correct predictions in each bin.
        samples: number of samples in all bins; for soft labels the equivalent number of hard labels.
        sparse: mask of the sparse bins.
        order: for each sparse bin, the indices of the resamples in the order of their gaps.
        observed: mean deviation of each bin.
    """

    bins: Binomial
    correct: Floats
    samples: float
    sparse: NDArray[np.bool_]
    order: Ints
    observed: Floats

    @property
    def least_error(self) -> Floats:
        """Standard error of sparse gaps at the Jeffreys estimate of the accuracy."""
        rate = self.accuracy
        return np.where(self.sparse, np.sqrt(self.bins.count * rate * (1 - rate)) / self.samples, 0.0)

    @property
    def accuracy(self) -> Floats:
        """Jeffreys estimate of the accuracy of each bin."""
        return (self.correct + 0.5) / (self.bins.count + 1)

    @property
    def bounds(self) -> tuple[Floats, Floats]:
        """Smallest and largest possible gap of each bin."""
        fraction = self.bins.count / self.samples
        return fraction * (self.bins.mean - 1), fraction * self.bins.mean

    def around(self, deviations: Floats, truth: Floats, cautious: bool = False) -> Floats:
        """Return the deviations around supposed true gaps.

        The noise decreases with the supposed number of errors. Since the true rate is unknown, `cautious` computes the
        noise of sparse bins from the mean of the supposed and the observed rate, if its variance is clearly larger.
        """
        count, mean = self.bins.count, self.bins.mean
        rate = np.clip(mean - truth * self.samples / np.maximum(count, 1), 0, 1)
        # The number of samples in a bin varies between resamples too, which changes the sum of its gaps.
        size, binomial = np.abs(mean - rate), rate * (1 - rate)
        unequal = (size - np.abs(truth).sum()) ** 2 / np.where(binomial > 0, binomial, 1)
        wider = np.sqrt(1 + np.minimum(unequal, 1))
        expected = mean_deviation(count, rate) * self.bins.narrower * wider
        scaled = deviations * np.where(self.observed > 0, expected / np.where(self.observed > 0, self.observed, 1), 1.0)
        if cautious:
            middle = (rate + self.accuracy) / 2
            rate = np.where(middle * (1 - middle) > LARGE_RATIO * binomial, middle, rate)
        replacements = ranked_errors(count[self.sparse], 1 - rate[self.sparse], len(scaled))
        # Few samples of equal confidence have few possible gaps, which scaling would change.
        replacements *= np.where(count >= MANY, wider, 1.0)[self.sparse, None] / self.samples
        scaled[self.order, np.flatnonzero(self.sparse)[:, None]] = replacements
        return np.asarray(scaled)


class AbstractGaps(ABC):
    """Gaps of samples and bins, and their bootstrap distribution."""

    method: str

    @property
    @abstractmethod
    def weighted(self) -> Floats:
        """Gap of each bin times its fraction of samples; the absolute values add up to the error."""

    @property
    @abstractmethod
    def samples(self) -> int:
        """Number of pairs of confidence and correctness."""

    @property
    @abstractmethod
    def sample_gaps(self) -> Floats:
        """Gap of each sample, averaged over classes."""

    @abstractmethod
    def binomial(self) -> Binomial:
        """Return the expected number of correct predictions of each bin."""

    @abstractmethod
    def resample(self, resamples: int | None, rng: np.random.Generator) -> BootstrapDistribution:
        """Return the bootstrap distribution of the weighted gaps."""

    def unseen(self, level: float) -> tuple[float, float]:
        """Return how much the total may be below and above the resampled totals if there are too few errors."""
        del level
        return 0.0, 0.0

    def noise_floor(self) -> float:
        """Return the expected error of a calibrated model with these confidences."""
        expected = self.binomial()
        return float((mean_deviation(expected.count, expected.mean) * expected.narrower).sum() / self.samples)


@dataclass(frozen=True)
class Gaps(AbstractGaps):
    """Bin, confidence and gap of each sample."""

    index: Ints
    confidence: Floats
    gap: Floats
    bins: int
    soft: bool = False
    method = "bootstrap on fine cells, test inversion"

    @property
    def weighted(self) -> Floats:
        return self._sums(self.gap) / len(self.gap)

    @property
    def samples(self) -> int:
        return len(self.gap)

    @property
    def sample_gaps(self) -> Floats:
        return self.gap

    def binomial(self, weight: float = 1.0) -> Binomial:
        sums = (self._sums(values) for values in (np.ones_like(self.gap), self.confidence, self.confidence**2))
        return Binomial.of(*(weight * total for total in sums))

    def noise_floor(self) -> float:
        weight = self._hard_labels_per_label() if self.soft else 1.0
        expected = self.binomial(weight)
        deviation = mean_deviation(expected.count, expected.mean) * expected.narrower
        return float(deviation.sum() / (weight * self.samples))

    def resample(self, resamples: int | None, rng: np.random.Generator) -> BootstrapDistribution:
        return self.distribution(cell_deviations(self.index, self.gap, self.bins, resamples or 10_000, rng), rng)

    def distribution(self, deviations: Floats, rng: np.random.Generator, joint: bool = False) -> BootstrapDistribution:
        """Return the bootstrap distribution from the deviations of each resample.

        Sparse bins are drawn from a binomial. With `joint`, they keep the order of their deviations, so that two models
        that were resampled together stay correlated. A soft label counts as several hard ones, according to the
        variance of soft labels within bins.
        """
        fraction = self.binomial().count / self.samples
        weight = self._hard_labels_per_label() if self.soft else 1.0
        expected = self.binomial(weight)
        count, mean = expected.count, expected.mean
        correct = np.clip(count * mean - weight * self._sums(self.gap), 0, count)
        fewest = np.minimum(count * np.minimum(mean, 1 - mean), np.minimum(correct, count - correct))
        sparse = (count > 0) & (np.round(fewest, 6) < SPARSE)
        random = rng.random((int(sparse.sum()), len(deviations)))
        order = random.argsort(1)
        if joint:
            # Round, so that values that differ only by rounding errors are in random order.
            order = np.lexsort((random, np.round(deviations[:, sparse].T * self.samples, 9)), axis=1)
        # The rate determines the variance of hard labels, but not of soft ones.
        observed = np.zeros_like(count) if self.soft else np.abs(deviations).mean(0) * self.samples
        noise = Noise(expected, correct, weight * self.samples, sparse, order, observed)
        return BootstrapDistribution(self.weighted, deviations, fraction, noise)

    def _hard_labels_per_label(self) -> float:
        """Return the ratio of the variance of hard labels to that of the soft labels within bins, at least 1.

        The variance of a few labels is uncertain, so `PRIOR` pseudo-labels that vary like hard ones are added.
        """
        count = self._sums(np.ones_like(self.gap))
        correct = np.clip(self._sums(self.confidence - self.gap), 0, count)
        rate = (correct + 0.5) / (count + 1)
        hard = float((count * rate * (1 - rate)).sum()) / len(self.gap)
        mean = self._sums(self.gap) / np.maximum(count, 1)
        within = float(((self.gap - mean[self.index]) ** 2).sum())
        freedom = len(self.gap) - int((count > 0).sum())
        return max(1.0, hard * (freedom + PRIOR) / (within + PRIOR * hard))

    def _sums(self, values: Floats) -> Floats:
        return np.bincount(self.index, values, self.bins).astype(np.float64)


def mean_deviation(count: Floats, chance: Floats) -> Floats:
    """Return the mean absolute deviation of binomial counts (de Moivre's formula)."""
    above = np.floor(count * chance) + 1
    possible = (chance > 0) & (chance < 1) & (above <= count)
    n, k, p = np.where(possible, count, 1), np.where(possible, above, 1), np.where(possible, chance, 0.5)
    log_combinations = _log_factorial(n) - _log_factorial(k) - _log_factorial(n - k)
    return np.where(possible, 2 * k * np.exp(log_combinations + k * np.log(p) + (n - k + 1) * np.log1p(-p)), 0.0)


def ranked_errors(count: Floats, chance: Floats, resamples: int) -> Floats:
    """Return the quantiles of binomial errors minus their mean, for each bin in ascending order."""
    mean, variance = count * chance, count * chance * (1 - chance)
    ranked: Floats = _normal_ranks(resamples) * np.sqrt(variance)[:, None]
    small = np.flatnonzero((variance > 0) & (variance <= NORMAL))
    if not len(small):
        return ranked
    n, odds = count[small], chance[small] / (1 - chance[small])
    # One range that is wide enough for all bins, so that they are computed together.
    reach = 9 * np.sqrt(variance[small]) + 10
    first = np.maximum(np.floor(mean[small] - reach), 0)
    errors = first[:, None] + np.arange(int((2 * reach).max()) + 2)
    # P(k + 1) / P(k) is (n - k) / (k + 1) times the odds, up to n.
    steps = np.log(np.maximum(n[:, None] - errors[:, :-1], 1e-300) / (errors[:, :-1] + 1) * odds[:, None])
    logs = np.concatenate([np.zeros((len(small), 1)), steps.cumsum(1)], 1)
    below = np.exp(logs - logs.max(1, keepdims=True)).cumsum(1)
    until = np.rint(below / below[:, -1:] * resamples).astype(np.int64)
    times = np.concatenate([until[:, :1], until[:, 1:] - until[:, :-1]], 1)
    ranked[small] = np.repeat(errors.ravel(), times.ravel()).reshape(len(small), resamples) - mean[small, None]
    return ranked


@lru_cache(maxsize=4)
def _normal_ranks(resamples: int) -> Floats:
    quantiles = (torch.arange(resamples, dtype=torch.float64) + 0.5) / resamples
    return np.asarray(torch.special.ndtri(quantiles).numpy())


def _log_factorial(n: Floats) -> Floats:
    return torch.lgamma(torch.from_numpy(n) + 1).numpy()


def cell_deviations(index: Ints, gap: Floats, bins: int, resamples: int, rng: np.random.Generator) -> Floats:
    """Resample weighted gaps by multinomial counts of samples in fine cells."""
    n = len(gap)
    key = index * (2 * LEVELS + 1) + np.floor((gap + 1) * LEVELS).astype(np.int64)
    all_counts = np.bincount(key)
    occupied = np.flatnonzero(all_counts)
    count = all_counts[occupied]
    mean = np.bincount(key, gap)[occupied] / count
    variance = np.maximum(np.bincount(key, gap**2)[occupied] / count - mean**2, 0)
    bin_of = np.eye(bins)[occupied // (2 * LEVELS + 1)]
    draws = rng.multinomial(n, count / n, size=resamples).astype(np.float64)
    noise = np.sqrt(draws @ (bin_of * variance[:, None])) * rng.standard_normal((resamples, bins))
    return np.asarray(draws @ (bin_of * mean[:, None]) + noise) / n - np.bincount(index, gap, bins) / n


def sample_deviations(index: Ints, gap: Floats, bins: int, resamples: int, rng: np.random.Generator) -> Floats:
    """Resample weighted gaps of several models by drawing samples; rows of `index` and `gap` are models."""
    models, n = index.shape
    cell = index + bins * np.arange(models)[:, None]
    observed = np.bincount(cell.ravel(), gap.ravel(), models * bins) / n
    if n * resamples > MOST_DRAWS:
        return _normal_deviations(cell, gap, observed, resamples, rng)
    parts = []
    for rows in np.array_split(np.arange(resamples), max(1, n * resamples // AT_ONCE)):
        chosen = rng.integers(0, n, (len(rows), n))
        offset = models * bins * np.arange(len(rows))[:, None]
        sums = np.zeros(models * bins * len(rows))
        for cells, gaps in zip(cell, gap, strict=True):
            sums += np.bincount((cells[chosen] + offset).ravel(), gaps[chosen].ravel(), len(sums))
        parts.append(sums.reshape(len(rows), models * bins) / n)
    return np.asarray(np.concatenate(parts) - observed)


def _normal_deviations(cell: Ints, gap: Floats, observed: Floats, resamples: int, rng: np.random.Generator) -> Floats:
    """Draw deviations from the normal approximation of the bootstrap distribution."""
    n = cell.shape[1]
    products = np.zeros((len(observed), len(observed)))
    for first, gap_first in zip(cell, gap, strict=True):
        for second, gap_second in zip(cell, gap, strict=True):
            np.add.at(products, (first, second), gap_first * gap_second)
    values, vectors = np.linalg.eigh(products / n - np.outer(observed, observed))
    root = vectors * np.sqrt(np.maximum(values, 0) / n)
    return np.asarray(rng.standard_normal((resamples, len(observed))) @ root.T)


def mean_interval(
    values: Floats, level: float, resamples: int, rng: np.random.Generator, bounds: Bounds | None = None
) -> tuple[float, float]:
    """Return the bias-corrected and accelerated interval of a mean.

    If few values are large, or few are small, the interval is extended by the Clopper-Pearson interval of their
    fraction, because a bootstrap cannot draw unobserved values, such as errors from fifty correct predictions. This
    needs bounds of the values.
    """
    unit = far_unit(values)
    if unit > 1:
        scaled = None if bounds is None else Bounds(*(bound / unit for bound in bounds))
        low, high = mean_interval(values / unit, level, resamples, rng, scaled)
        return low * unit, high * unit
    mean = float(values.mean())
    low, high = (mean, mean) if bounds is None else sparse_mean_range(values, level, bounds)
    centred = values - mean
    sum_of_squares = float((centred**2).sum())
    if sum_of_squares == 0:
        return low, high
    means = mean + mean_deviations(values, resamples, rng)
    normal = NormalDist()
    fraction = float(np.clip((np.sum(means < mean) + np.sum(means <= mean)) / (2 * resamples), 1e-4, 1 - 1e-4))
    shift = normal.inv_cdf(fraction)
    cubes = centred * centred * centred  # ten times as fast as centred**3
    acceleration = float(cubes.sum()) / (6 * sum_of_squares**1.5)
    ends = []
    for tail in ((1 - level) / 2, (1 + level) / 2):
        z = shift + normal.inv_cdf(tail)
        ends.append(normal.cdf(shift + z / (1 - acceleration * z)))
    limits = np.quantile(means, ends)
    return min(low, float(limits[0])), max(high, float(limits[1]))


def sparse_mean_range(values: Floats, level: float, bounds: Bounds) -> tuple[float, float]:
    """Return the range of a mean if few values lie above or below a threshold; else return the mean as both ends."""
    mean, large = float(values.mean()), values > bounds.split
    n, count = len(values), int(large.sum())
    if min(count, n - count) >= SPARSE:
        return mean, mean
    least, most = clopper_pearson_interval(count, n, level)
    below = float(values[~large].mean()) if count < n else bounds.low
    above = float(values[large].mean()) if count else bounds.high
    # The mean of a few large losses is unknown too; assume that unobserved ones are as large as the largest.
    largest = float(values.max()) if 0 < count < SPARSE else above
    return (1 - least) * below + least * above, (1 - most) * below + most * largest


def signed_range(values: Floats, level: float, most: float) -> tuple[float, float]:
    """Return the range of a mean difference if few differences have one sign; else return the mean as both ends."""
    ends = []
    for side in (-1, 1):
        signed = side * values
        positive = signed > 0
        n, count = len(values), int(positive.sum())
        fraction = clopper_pearson_interval(count, n, level)[1] if count < SPARSE else count / n
        size = float(signed[positive].mean()) if count else most
        ends.append(side * (fraction * size + float(signed[~positive].sum()) / n))
    return ends[0], ends[1]


def mean_deviations(values: Floats, resamples: int, rng: np.random.Generator) -> Floats:
    """Resample a mean by multinomial counts of 200 groups of nearly equal values."""
    n, unit = len(values), far_unit(values)
    groups = np.array_split(np.sort(values / unit), min(n, 200))
    mean = np.array([group.mean() for group in groups])
    variance = np.array([group.var() for group in groups])
    draws, normal, rng.bit_generator.state = _group_draws(n, len(groups), resamples, _GeneratorKey(rng))
    noise = np.sqrt(draws @ variance) * normal
    return unit * (np.asarray(draws @ mean + noise) / n - float((values / unit).mean()))


def far_unit(values: Floats) -> float:
    """Return a power of two that scales values whose cubes would overflow; 1 for all others."""
    size = float(np.abs(values).max())
    return math.ldexp(1.0, min(1023, math.frexp(size)[1])) if size > FAR else 1.0


class _GeneratorKey:
    """A random generator as a cache key: generators of equal state are equal."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.key = repr(rng.bit_generator.state)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _GeneratorKey) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(maxsize=1)
def _group_draws(n: int, groups: int, resamples: int, start: _GeneratorKey) -> tuple[Floats, Floats, Any]:
    """Return multinomial counts of groups, normal numbers, and the new state of the generator.

    The result is cached: all means over the same samples start with the same seed and have groups of the same sizes, so
    a report with six means draws only once.
    """
    count = np.array([len(part) for part in np.array_split(np.arange(n), groups)])
    draws = start.rng.multinomial(n, count / n, size=resamples).astype(np.float64)
    return draws, start.rng.standard_normal(resamples), start.rng.bit_generator.state
