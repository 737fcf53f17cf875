"""The bootstrap behind the intervals: how gaps and means vary when samples are drawn anew.

A sample of gap d in bin b adds d / n to that bin's weighted gap. Resampling is drawn in one of two ways:

    cells     samples of one bin and nearly one gap form a cell; the counts of the cells are multinomial, and the
              variance inside the cells is added as normal noise. Costs bins x cells, not samples.
    samples   every sample is drawn on its own, for two models at once.

The bins of every class are resampled in `class_gaps.py`.
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

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Part = Literal["both", "over", "under", "rms"]

LEVELS = 60  # cells per unit of gap; what varies inside a cell is added back, so finer ones only cost time
AT_ONCE = 20_000_000  # draws held in memory at a time
FAR = 1e90  # values beyond are made smaller before they are raised to the third power
RARE = 10  # hits or errors; a bin that expects fewer is not drawn from its own samples
CLEARLY = 1.5  # times the variance; less is common among calibrated bins
MANY = 100  # samples of a bin, from which single ones no longer matter
CERTAIN = 1e-6  # expected variance of hits, below which a bin's confidences are all 0 or 1 but for rounding
NORMAL = 400.0  # variance of hits from which the normal limit stands for them
PRIOR = 5  # soft labels that are supposed to vary like hard ones
MOST_DRAWS = 4_000_000  # beyond, the normal limit gives the same intervals, and takes milliseconds instead of seconds


class Bounds(NamedTuple):
    """What values of a mean can be at most and at least, and what tells the large from the small ones."""

    low: float
    split: float
    high: float


@dataclass(frozen=True)
class World:
    """Observed weighted gaps, and how resampling moves them.

    Args:
        gaps: the gap of every bin times its share of samples.
        deviations: one row of changes for every resample.
        share: of all samples, in every bin.
        noise: how the deviations depend on the truth; None if they do not.
    """

    gaps: Floats
    deviations: Floats
    share: Floats
    noise: "Noise | None" = None

    @property
    def error(self) -> Floats:
        """Standard error of every gap, were the model calibrated; no less than few samples can know."""
        shown = np.asarray(self._around(np.zeros_like(self.gaps)).std(0))
        return shown if self.noise is None else np.maximum(shown, self.noise.least_error)

    def totals(self, truth: Floats, part: Part, cautious: bool = False) -> Floats:
        """Resample the total around a possible truth; cautiously, where too little noise would claim too much."""
        return self.total(truth + self._around(truth, cautious), part)

    def total(self, gaps: Floats, part: Part) -> Floats:
        """Add up gaps: all absolute values, only the positive or the negative ones, or the root of the mean square."""
        if part == "both":
            return np.asarray(np.abs(gaps).sum(-1))
        if part == "rms":
            return np.asarray(np.sqrt((gaps**2 / np.where(self.share > 0, self.share, 1)).sum(-1)))
        return np.asarray(np.maximum(gaps if part == "over" else -gaps, 0).sum(-1))

    def _around(self, truth: Floats, cautious: bool = False) -> Floats:
        return self.deviations if self.noise is None else self.noise.around(self.deviations, truth, cautious)


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
        # Sums that are left of others may lie a rounding error outside, and would have no root below.
        mean = np.clip(sums / np.maximum(count, 1), 0, 1)
        binomial = count * mean * (1 - mean)
        # Confidences of exactly 0 or 1 have no variance to compare with; their hits vary as soon as the truth differs.
        known = binomial > CERTAIN
        ratio = np.where(known, (sums - squares) / np.where(known, binomial, 1), 1.0)
        return cls(count, mean, np.sqrt(np.clip(ratio, 0, 1)))


@dataclass(frozen=True)
class Noise:
    """How the gaps of bins of hits vary around a possible truth.

    Bins that expect few hits or few errors, or that have shown few, mislead the bootstrap: one that happens to have
    none shows no noise at all. So the deviations of a bin are scaled to the mean deviation of binomial hits of the
    supposed rate, and those of rare bins are replaced by such hits themselves, in a given order of resamples.

    Args:
        bins: samples and mean confidence of every bin.
        hits: in every bin.
        samples: how many there are in all bins; of soft labels, how many hard ones they are worth.
        rare: which bins are replaced.
        order: for each of those, the resamples from the smallest to the largest gap.
        shown: the mean deviation of every bin.
    """

    bins: Binomial
    hits: Floats
    samples: float
    rare: NDArray[np.bool_]
    order: Ints
    shown: Floats

    @property
    def least_error(self) -> Floats:
        """Standard error of rare gaps at the observed rate, half a hit and half an error added (Jeffreys)."""
        rate = self.seen
        return np.where(self.rare, np.sqrt(self.bins.count * rate * (1 - rate)) / self.samples, 0.0)

    @property
    def seen(self) -> Floats:
        """Share of hits in every bin, half a hit and half an error added."""
        return (self.hits + 0.5) / (self.bins.count + 1)

    @property
    def bounds(self) -> tuple[Floats, Floats]:
        """The gaps of bins without a hit, and without an error; no truth lies beyond."""
        share = self.bins.count / self.samples
        return share * (self.bins.mean - 1), share * self.bins.mean

    def around(self, deviations: Floats, truth: Floats, cautious: bool = False) -> Floats:
        """Make the deviations those of a possible truth.

        The less errors a truth supposes, the less noise it has. Which of the gaps the truth lies below is not known,
        so cautious noise of rare bins is that of a rate half way to the observed one, where that is clearly more.
        """
        count, mean = self.bins.count, self.bins.mean
        rate = np.clip(mean - truth * self.samples / np.maximum(count, 1), 0, 1)
        # Not only hits vary but also how many samples there are of each bin, which moves a sum of unequal gaps.
        size, binomial = np.abs(mean - rate), rate * (1 - rate)
        unequal = (size - np.abs(truth).sum()) ** 2 / np.where(binomial > 0, binomial, 1)
        wider = np.sqrt(1 + np.minimum(unequal, 1))
        wanted = mean_deviation(count, rate) * self.bins.narrower * wider
        made = deviations * np.where(self.shown > 0, wanted / np.where(self.shown > 0, self.shown, 1), 1.0)
        if cautious:
            middle = (rate + self.seen) / 2
            rate = np.where(middle * (1 - middle) > CLEARLY * binomial, middle, rate)
        drawn = ranked_errors(count[self.rare], 1 - rate[self.rare], len(made))
        # Three samples of one confidence can show four gaps and no others; scaled, they would not be the observed ones.
        drawn *= np.where(count >= MANY, wider, 1.0)[self.rare, None] / self.samples
        made[self.order, np.flatnonzero(self.rare)[:, None]] = drawn
        return np.asarray(made)


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
        """Return the number of correct predictions that every bin expects."""

    @abstractmethod
    def resample(self, resamples: int | None, rng: np.random.Generator) -> World:
        """Draw deviations of the weighted gaps."""

    def unseen(self, level: float) -> tuple[float, float]:
        """Say how far the total may lie below and above what resampling shows, where that says little."""
        del level
        return 0.0, 0.0

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

    def binomial(self, weight: float = 1.0) -> Binomial:
        sums = (self._sums(values) for values in (np.ones_like(self.gap), self.confidence, self.confidence**2))
        return Binomial.of(*(weight * one for one in sums))

    def noise_floor(self) -> float:
        weight = self._hard_labels_per_label() if self.soft else 1.0
        hits = self.binomial(weight)
        return float((mean_deviation(hits.count, hits.mean) * hits.narrower).sum() / (weight * self.samples))

    def resample(self, resamples: int | None, rng: np.random.Generator) -> World:
        return self.world(cell_deviations(self.index, self.gap, self.bins, resamples or 10_000, rng), rng)

    def world(self, deviations: Floats, rng: np.random.Generator, joint: bool = False) -> World:
        """Say how deviations would change if the truth were another.

        Rare bins are drawn anew; those of a model that was resampled together with another keep the order of their
        deviations, so that the two stay together. A soft label counts as several hard ones, as many as explain how
        little soft labels vary within a bin.
        """
        share = self.binomial().count / self.samples
        weight = self._hard_labels_per_label() if self.soft else 1.0
        expected = self.binomial(weight)
        count, mean = expected.count, expected.mean
        hits = np.clip(count * mean - weight * self._sums(self.gap), 0, count)
        fewest = np.minimum(count * np.minimum(mean, 1 - mean), np.minimum(hits, count - hits))
        rare = (count > 0) & (np.round(fewest, 6) < RARE)
        mixed = rng.random((int(rare.sum()), len(deviations)))
        order = mixed.argsort(1)
        if joint:
            # Rounded, so that what is equal but for its last digits is in random order.
            order = np.lexsort((mixed, np.round(deviations[:, rare].T * self.samples, 9)), axis=1)
        # Soft labels of large bins show their own variance; only that of hard labels follows from the rate.
        shown = np.zeros_like(count) if self.soft else np.abs(deviations).mean(0) * self.samples
        noise = Noise(expected, hits, weight * self.samples, rare, order, shown)
        return World(self.weighted, deviations, share, noise)

    def _hard_labels_per_label(self) -> float:
        """Return the ratio of the variance of hard labels to that of the soft labels within bins, at least 1.

        A few labels say little about their variance, so some that vary like hard ones are added (`PRIOR`).
        """
        count = self._sums(np.ones_like(self.gap))
        hits = np.clip(self._sums(self.confidence - self.gap), 0, count)
        rate = (hits + 0.5) / (count + 1)
        hard = float((count * rate * (1 - rate)).sum()) / len(self.gap)
        mean = self._sums(self.gap) / np.maximum(count, 1)
        within = float(((self.gap - mean[self.index]) ** 2).sum())
        free = len(self.gap) - int((count > 0).sum())
        return max(1.0, hard * (free + PRIOR) / (within + PRIOR * hard))

    def _sums(self, values: Floats) -> Floats:
        return np.bincount(self.index, values, self.bins).astype(np.float64)


def mean_deviation(count: Floats, chance: Floats) -> Floats:
    """Find the mean of |hits - count chance| for binomial hits (de Moivre's formula)."""
    above = np.floor(count * chance) + 1
    possible = (chance > 0) & (chance < 1) & (above <= count)
    n, k, p = np.where(possible, count, 1), np.where(possible, above, 1), np.where(possible, chance, 0.5)
    ways = _log_factorial(n) - _log_factorial(k) - _log_factorial(n - k)
    return np.where(possible, 2 * k * np.exp(ways + k * np.log(p) + (n - k + 1) * np.log1p(-p)), 0.0)


def ranked_errors(count: Floats, chance: Floats, resamples: int) -> Floats:
    """List for every bin binomial errors less their mean, from few to many, as often as each is expected."""
    mean, variance = count * chance, count * chance * (1 - chance)
    ranked: Floats = _normal_ranks(resamples) * np.sqrt(variance)[:, None]
    few = np.flatnonzero((variance > 0) & (variance <= NORMAL))
    if not len(few):
        return ranked
    n, odds = count[few], chance[few] / (1 - chance[few])
    # Far enough to leave nothing out, and the same for all bins, so that they are computed together.
    reach = 9 * np.sqrt(variance[few]) + 10
    first = np.maximum(np.floor(mean[few] - reach), 0)
    errors = first[:, None] + np.arange(int((2 * reach).max()) + 2)
    # One error more multiplies the chance by (n - k) / (k + 1) times the odds, and by nothing beyond n.
    steps = np.log(np.maximum(n[:, None] - errors[:, :-1], 1e-300) / (errors[:, :-1] + 1) * odds[:, None])
    logs = np.concatenate([np.zeros((len(few), 1)), steps.cumsum(1)], 1)
    below = np.exp(logs - logs.max(1, keepdims=True)).cumsum(1)
    until = np.rint(below / below[:, -1:] * resamples).astype(np.int64)
    times = np.concatenate([until[:, :1], until[:, 1:] - until[:, :-1]], 1)
    ranked[few] = np.repeat(errors.ravel(), times.ravel()).reshape(len(few), resamples) - mean[few, None]
    return ranked


@lru_cache(maxsize=4)
def _normal_ranks(resamples: int) -> Floats:
    share = (torch.arange(resamples, dtype=torch.float64) + 0.5) / resamples
    return np.asarray(torch.special.ndtri(share).numpy())


def _log_factorial(n: Floats) -> Floats:
    return torch.lgamma(torch.from_numpy(n) + 1).numpy()


def cell_deviations(index: Ints, gap: Floats, bins: int, resamples: int, rng: np.random.Generator) -> Floats:
    """Resample weighted gaps by drawing how many samples fall into each fine cell."""
    n = len(gap)
    key = index * (2 * LEVELS + 1) + np.floor((gap + 1) * LEVELS).astype(np.int64)
    every = np.bincount(key)
    found = np.flatnonzero(every)
    count = every[found]
    mean = np.bincount(key, gap)[found] / count
    variance = np.maximum(np.bincount(key, gap**2)[found] / count - mean**2, 0)
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


def mean_interval(
    values: Floats, level: float, resamples: int, rng: np.random.Generator, bounds: Bounds | None = None
) -> tuple[float, float]:
    """Find the bias-corrected and accelerated interval of a mean.

    Where few values are large, or few small, the interval holds what the exact range of their share allows as well:
    a bootstrap of fifty right answers knows nothing but right answers. Without bounds nothing is known of such values.
    """
    unit = far_unit(values)
    if unit > 1:
        smaller = None if bounds is None else Bounds(*(one / unit for one in bounds))
        low, high = mean_interval(values / unit, level, resamples, rng, smaller)
        return low * unit, high * unit
    mean = float(values.mean())
    low, high = (mean, mean) if bounds is None else few_large_range(values, level, bounds)
    centred = values - mean
    spread = float((centred**2).sum())
    if spread == 0:
        return low, high
    means = mean + mean_deviations(values, resamples, rng)
    normal = NormalDist()
    share = float(np.clip((np.sum(means < mean) + np.sum(means <= mean)) / (2 * resamples), 1e-4, 1 - 1e-4))
    shift = normal.inv_cdf(share)
    cubes = centred * centred * centred  # ten times as fast as centred**3
    acceleration = float(cubes.sum()) / (6 * spread**1.5)
    ends = []
    for tail in ((1 - level) / 2, (1 + level) / 2):
        z = shift + normal.inv_cdf(tail)
        ends.append(normal.cdf(shift + z / (1 - acceleration * z)))
    found = np.quantile(means, ends)
    return min(low, float(found[0])), max(high, float(found[1]))


def few_large_range(values: Floats, level: float, bounds: Bounds) -> tuple[float, float]:
    """Find how far a mean may lie off when values above a split are few, or those below; else the mean itself."""
    mean, large = float(values.mean()), values > bounds.split
    n, count = len(values), int(large.sum())
    if min(count, n - count) >= RARE:
        return mean, mean
    least, most = few_range(count, n, level)
    below = float(values[~large].mean()) if count < n else bounds.low
    above = float(values[large].mean()) if count else bounds.high
    # The mean of a few large losses is not known either; the next ones are supposed to be as large as the largest.
    largest = float(values.max()) if 0 < count < RARE else above
    return (1 - least) * below + least * above, (1 - most) * below + most * largest


def signed_range(values: Floats, level: float, most: float) -> tuple[float, float]:
    """Find how far a mean difference may lie off when few differences have one sign; else the mean itself."""
    ends = []
    for side in (-1, 1):
        signed = side * values
        ours = signed > 0
        n, count = len(values), int(ours.sum())
        share = few_range(count, n, level)[1] if count < RARE else count / n
        size = float(signed[ours].mean()) if count else most
        ends.append(side * (share * size + float(signed[~ours].sum()) / n))
    return ends[0], ends[1]


def few_range(count: int, n: int, level: float) -> tuple[float, float]:
    """Find the exact range of a share (Clopper and Pearson), where few of n samples are in it, or few are not."""
    if 2 * count > n:
        low, high = few_range(n - count, n, level)
        return 1 - high, 1 - low
    tail = (1 - level) / 2
    low = 0.0 if count == 0 else _share_at(count - 1, n, 1 - tail)
    return low, _share_at(count, n, tail)


def _share_at(count: int, n: int, chance: float) -> float:
    """Find the share of which at most `count` of n samples are seen with the given chance."""
    ways = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(count + 1)]
    low, high = 0.0, 1.0
    for _ in range(60):
        share = (low + high) / 2
        logs = (way + k * math.log(share) + (n - k) * math.log1p(-share) for k, way in enumerate(ways))
        low, high = (share, high) if math.fsum(map(math.exp, logs)) > chance else (low, share)
    return high


def mean_deviations(values: Floats, resamples: int, rng: np.random.Generator) -> Floats:
    """Resample a mean by drawing how many samples fall into each of 200 groups of nearly equal value."""
    n, unit = len(values), far_unit(values)
    groups = np.array_split(np.sort(values / unit), min(n, 200))
    mean = np.array([group.mean() for group in groups])
    variance = np.array([group.var() for group in groups])
    drawn, normal, rng.bit_generator.state = _group_draws(n, len(groups), resamples, _Start(rng))
    noise = np.sqrt(drawn @ variance) * normal
    return unit * (np.asarray(drawn @ mean + noise) / n - float((values / unit).mean()))


def far_unit(values: Floats) -> float:
    """Find a power of two to divide values by whose cubes would be infinite; one for all others."""
    size = float(np.abs(values).max())
    return math.ldexp(1.0, min(1023, math.frexp(size)[1])) if size > FAR else 1.0


class _Start:
    """Where random numbers begin, as a key: generators that would give the same numbers are equal."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.key = repr(rng.bit_generator.state)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Start) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(maxsize=1)
def _group_draws(n: int, groups: int, resamples: int, start: _Start) -> tuple[Floats, Floats, Any]:
    """Draw how many samples fall into each group, normal numbers, and give what the generator goes on with.

    Every mean over the same samples begins with the same seed and has groups of the same sizes, so the last draws are
    kept: a report with six means draws once.
    """
    count = np.array([len(part) for part in np.array_split(np.arange(n), groups)])
    drawn = start.rng.multinomial(n, count / n, size=resamples).astype(np.float64)
    return drawn, start.rng.standard_normal(resamples), start.rng.bit_generator.state
