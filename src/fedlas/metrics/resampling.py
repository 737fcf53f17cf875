"""The bootstrap behind the intervals: how gaps and means vary when samples are drawn anew.

A sample of gap d in bin b adds d / n to that bin's weighted gap. Resampling is drawn in one of two ways:

    cells     samples of one bin and nearly one gap form a cell; the counts of the cells are multinomial, and the
              variance inside the cells is added as normal noise. Costs bins x cells, not samples.
    samples   every sample is drawn on its own, for two models at once.

The bins of every class are resampled in `class_gaps.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Part = Literal["both", "over", "under", "rms"]

LEVELS = 60  # cells per unit of gap; what varies inside a cell is added back, so finer ones only cost time
AT_ONCE = 20_000_000  # draws held in memory at a time
RARE = 10  # hits or errors; a bin that expects fewer is not drawn from its own samples
MOST_DRAWS = 400_000_000  # beyond this the normal limit is as good as drawing, and far quicker


@dataclass(frozen=True)
class World:
    """Observed weighted gaps, and how resampling moves them.

    Args:
        gaps: the gap of every bin times its share of samples.
        deviations: one row of changes for every resample.
        share: of all samples, in every bin.
        scale: how the deviations depend on the truth; None if they do not.
    """

    gaps: Floats
    deviations: Floats
    share: Floats
    scale: Callable[[Floats], Floats] | None = None

    @property
    def error(self) -> Floats:
        """Standard error of every gap, were the model calibrated."""
        return np.asarray(self._around(np.zeros_like(self.gaps)).std(0))

    def totals(self, truth: Floats, part: Part) -> Floats:
        """Resample the total around a possible truth."""
        return self.total(truth + self._around(truth), part)

    def total(self, gaps: Floats, part: Part) -> Floats:
        """Add up gaps: all absolute values, only the positive or the negative ones, or the root of the mean square."""
        if part == "both":
            return np.asarray(np.abs(gaps).sum(-1))
        if part == "rms":
            return np.asarray(np.sqrt((gaps**2 / np.where(self.share > 0, self.share, 1)).sum(-1)))
        return np.asarray(np.maximum(gaps if part == "over" else -gaps, 0).sum(-1))

    def _around(self, truth: Floats) -> Floats:
        return self.deviations if self.scale is None else self.deviations * self.scale(truth)


@dataclass(frozen=True)
class Binomial:
    """The number of samples of every bin, their mean confidence, and how binomial their hits are.

    Hits of unequal confidences have the variance sum c (1 - c), a little less than hits of their mean confidence;
    `narrower` is the root of that ratio.
    """

    count: Floats
    mean: Floats
    narrower: Floats

    @classmethod
    def of(cls, count: Floats, sums: Floats, squares: Floats) -> "Binomial":
        """Find it from the sums of confidences and of their squares."""
        mean = sums / np.maximum(count, 1)
        binomial = count * mean * (1 - mean)
        return cls(count, mean, np.sqrt(np.clip((sums - squares) / np.where(binomial > 0, binomial, 1), 0, 1)))


class AbstractGaps(ABC):
    """What a sum of absolute gaps is made of, and how it varies."""

    method: str

    @property
    @abstractmethod
    def weighted(self) -> Floats:
        """The gap of every bin times its share of samples, so that absolute values add up to the error."""

    @property
    @abstractmethod
    def samples(self) -> int:
        """How many pairs of confidence and correctness there are."""

    @property
    @abstractmethod
    def sample_gaps(self) -> Floats:
        """The gap of every sample, averaged over classes."""

    @abstractmethod
    def binomial(self) -> Binomial:
        """Describe the hits that every bin expects."""

    @abstractmethod
    def resample(self, resamples: int | None, rng: np.random.Generator) -> World:
        """Draw deviations of the weighted gaps."""

    def noise_floor(self) -> float:
        """Average the error over labels that are drawn from the confidences themselves."""
        hits = self.binomial()
        return float((mean_deviation(hits.count, hits.mean) * hits.narrower).sum() / self.samples)


@dataclass(frozen=True)
class Gaps(AbstractGaps):
    """The bin, the confidence and the gap of every sample."""

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

    def binomial(self) -> Binomial:
        return Binomial.of(*(self._sums(v) for v in (np.ones_like(self.gap), self.confidence, self.confidence**2)))

    def resample(self, resamples: int | None, rng: np.random.Generator) -> World:
        return self.world(cell_deviations(self.index, self.gap, self.bins, resamples or 10_000, rng), rng)

    def world(self, deviations: Floats, rng: np.random.Generator | None = None) -> World:
        """Say how deviations would be scaled if the truth were another.

        Bins that expect few hits, or few errors, mislead the bootstrap: one that happens to have none shows no noise at
        all. So the deviations of a bin are scaled to the mean deviation of binomial hits of the supposed rate, and
        those of rare bins are drawn as such, where numbers to draw them are given (drawing them anew would part two
        models that were resampled together). Soft labels have no rate.
        """
        expected = self.binomial()
        count, mean = expected.count, expected.mean
        if self.soft:
            return World(self.weighted, deviations, count / self.samples)
        if rng is not None:
            deviations = deviations.copy()
            rare = count * np.minimum(mean, 1 - mean) < RARE
            hits = rng.binomial(count[rare].astype(np.int64), mean[rare], (len(deviations), int(rare.sum())))
            deviations[:, rare] = (count[rare] * mean[rare] - hits) / self.samples
        shown = np.abs(deviations).mean(0) * self.samples

        def scale(truth: Floats) -> Floats:
            rate = np.clip(mean - truth * self.samples / np.maximum(count, 1), 0, 1)
            wanted = mean_deviation(count, rate) * expected.narrower
            return np.where(shown > 0, wanted / np.where(shown > 0, shown, 1), 1.0)

        return World(self.weighted, deviations, count / self.samples, scale)

    def _sums(self, values: Floats) -> Floats:
        return np.bincount(self.index, values, self.bins).astype(np.float64)


def mean_deviation(count: Floats, chance: Floats) -> Floats:
    """Find the mean of |hits - count chance| for binomial hits (de Moivre's formula)."""
    above = np.floor(count * chance) + 1
    possible = (chance > 0) & (chance < 1) & (above <= count)
    n, k, p = np.where(possible, count, 1), np.where(possible, above, 1), np.where(possible, chance, 0.5)
    ways = _log_factorial(n) - _log_factorial(k) - _log_factorial(n - k)
    return np.where(possible, 2 * k * np.exp(ways + k * np.log(p) + (n - k + 1) * np.log1p(-p)), 0.0)


def _log_factorial(n: Floats) -> Floats:
    return torch.lgamma(torch.from_numpy(n) + 1).numpy()


def cell_deviations(index: Ints, gap: Floats, bins: int, resamples: int, rng: np.random.Generator) -> Floats:
    """Resample weighted gaps by drawing how many samples fall into each fine cell."""
    n = len(gap)
    key = index * (2 * LEVELS + 1) + np.floor((gap + 1) * LEVELS).astype(np.int64)
    found, cell = np.unique(key, return_inverse=True)
    count = np.bincount(cell)
    mean = np.bincount(cell, gap) / count
    variance = np.maximum(np.bincount(cell, gap**2) / count - mean**2, 0)
    home = np.eye(bins)[found // (2 * LEVELS + 1)]
    drawn = rng.multinomial(n, count / n, size=resamples).astype(np.float64)
    noise = np.sqrt(drawn @ (home * variance[:, None])) * rng.standard_normal((resamples, bins))
    return np.asarray(drawn @ (home * mean[:, None]) + noise) / n - np.bincount(index, gap, bins) / n


def sample_deviations(index: Ints, gap: Floats, bins: int, resamples: int, rng: np.random.Generator) -> Floats:
    """Resample weighted gaps of several models by drawing samples; rows of `index` and `gap` are models."""
    models, n = index.shape
    place = index + bins * np.arange(models)[:, None]
    seen = np.bincount(place.ravel(), gap.ravel(), models * bins) / n
    if n * resamples > MOST_DRAWS:
        return _normal_deviations(place, gap, seen, resamples, rng)
    drawn = []
    for rows in np.array_split(np.arange(resamples), max(1, n * resamples // AT_ONCE)):
        chosen = rng.integers(0, n, (len(rows), n))
        offset = models * bins * np.arange(len(rows))[:, None]
        sums = np.zeros(models * bins * len(rows))
        for one, its_gap in zip(place, gap, strict=True):
            sums += np.bincount((one[chosen] + offset).ravel(), its_gap[chosen].ravel(), len(sums))
        drawn.append(sums.reshape(len(rows), models * bins) / n)
    return np.asarray(np.concatenate(drawn) - seen)


def _normal_deviations(place: Ints, gap: Floats, seen: Floats, resamples: int, rng: np.random.Generator) -> Floats:
    """Draw deviations from the normal distribution that resampling of very many samples tends to."""
    n = place.shape[1]
    both = np.zeros((len(seen), len(seen)))
    for first, gap_first in zip(place, gap, strict=True):
        for second, gap_second in zip(place, gap, strict=True):
            np.add.at(both, (first, second), gap_first * gap_second)
    values, vectors = np.linalg.eigh(both / n - np.outer(seen, seen))
    root = vectors * np.sqrt(np.maximum(values, 0) / n)
    return np.asarray(rng.standard_normal((resamples, len(seen))) @ root.T)


def mean_interval(values: Floats, level: float, resamples: int, rng: np.random.Generator) -> tuple[float, float]:
    """Find the bias-corrected and accelerated interval of a mean."""
    mean = float(values.mean())
    centred = values - mean
    spread = float((centred**2).sum())
    if spread == 0:
        return mean, mean
    means = mean + mean_deviations(values, resamples, rng)
    normal = NormalDist()
    share = float(np.clip((np.sum(means < mean) + np.sum(means <= mean)) / (2 * resamples), 1e-4, 1 - 1e-4))
    shift = normal.inv_cdf(share)
    acceleration = float((centred**3).sum()) / (6 * spread**1.5)
    ends = []
    for tail in ((1 - level) / 2, (1 + level) / 2):
        z = shift + normal.inv_cdf(tail)
        ends.append(normal.cdf(shift + z / (1 - acceleration * z)))
    low, high = np.quantile(means, ends)
    return float(low), float(high)


def mean_deviations(values: Floats, resamples: int, rng: np.random.Generator) -> Floats:
    """Resample a mean by drawing how many samples fall into each of 200 groups of nearly equal value."""
    n = len(values)
    groups = np.array_split(np.sort(values), min(n, 200))
    count = np.array([len(group) for group in groups])
    mean = np.array([group.mean() for group in groups])
    variance = np.array([group.var() for group in groups])
    drawn = rng.multinomial(n, count / n, size=resamples).astype(np.float64)
    noise = np.sqrt(drawn @ variance) * rng.standard_normal(resamples)
    return np.asarray(drawn @ mean + noise) / n - float(values.mean())
