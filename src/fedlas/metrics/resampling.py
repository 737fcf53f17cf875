"""The bootstrap behind the intervals: deviations of gaps and of means under resampling, and what follows from them.

A sample of gap d in bin b adds d / n to that bin's weighted gap. Resampling is drawn in one of three ways:

    cells     samples of one bin and nearly one gap form a cell; the counts of the cells are multinomial, and the
              variance inside the cells is added as normal noise. Costs bins x cells, not samples.
    samples   every sample is drawn on its own, for two models at once.
    classes   the same for the bins of every class; all but the first bin of a class hold few entries of a row.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Part = Literal["both", "over", "under"]

LEVELS = 60  # cells per unit of gap; what varies inside a cell is added back, so finer ones only cost time
BISECTIONS = 20
FURTHEST = 12.0  # standard errors; no truth further away can matter at any usual level
CURVE_POINTS = 40
AT_ONCE = 20_000_000  # draws held in memory at a time
CLASSES_AT_ONCE = 32  # resamples of class-wise gaps that share one reading of the table
MOST_DRAWS = 400_000_000  # beyond this the normal limit is as good as drawing, and far quicker


@dataclass(frozen=True)
class Gaps:
    """The bin, the confidence and the gap of every sample; of every sample and class for class-wise errors."""

    index: Ints
    confidence: Floats
    gap: Floats
    bins: int

    @property
    def classes(self) -> int:
        """How many histograms there are."""
        return 1 if self.gap.ndim == 1 else self.gap.shape[1]

    @property
    def weighted(self) -> Floats:
        """The gap of every bin times its share of samples, so that absolute values add up to the error."""
        return self._sums(self.gap) / (len(self.gap) * self.classes)

    def resample(self, resamples: int | None, rng: np.random.Generator) -> Floats:
        """Draw deviations of the weighted gaps."""
        if self.gap.ndim == 1:
            return cell_deviations(self.index, self.gap, self.bins, resamples or 10_000, rng)
        drawn = class_deviations(self.index, self.gap, self.bins, resamples or 1_000, rng) / self.classes
        return drawn * self._sparse_correction(drawn)

    def noise_floor(self) -> float:
        """Average the error over labels that are drawn from the confidences themselves.

        The hits of a bin are binomial with its mean confidence, rescaled to the variance sum c (1 - c) that hits of
        unequal confidences have.
        """
        count, sums, squares = (self._sums(v) for v in (np.ones_like(self.gap), self.confidence, self.confidence**2))
        mean = sums / np.maximum(count, 1)
        binomial = count * mean * (1 - mean)
        share = np.sqrt(np.clip((sums - squares) / np.where(binomial > 0, binomial, 1), 0, 1))
        return float((mean_deviation(count, mean) * share).sum() / (len(self.gap) * self.classes))

    def _sparse_correction(self, drawn: Floats) -> Floats:
        """Find the factor that gives every bin of every class the mean deviation that its hits have.

        Most bins of most classes expect a handful of hits or less. A bin that happens to have none shows the bootstrap
        no noise at all, and one that has some shows too much. The rate of hits is therefore drawn towards the mean
        confidence with the weight of one expected hit, and the deviations are scaled to what binomial hits would show.
        """
        count, sums = self._sums(np.ones_like(self.gap)), self._sums(self.confidence)
        hits = sums - self._sums(self.gap)
        mean = sums / np.maximum(count, 1)
        rate = np.divide((hits + 1) * mean, count * mean + 1)
        shown = np.abs(drawn).mean(0) * (len(self.gap) * self.classes)
        return np.where(shown > 0, mean_deviation(count, np.clip(rate, 0, 1)) / np.where(shown > 0, shown, 1), 1.0)

    def _sums(self, values: Floats) -> Floats:
        place = self.index if self.gap.ndim == 1 else self.index + self.bins * np.arange(self.classes)
        return np.bincount(place.ravel(), values.ravel(), self.bins * self.classes).astype(np.float64)


def mean_deviation(count: Floats, chance: Floats) -> Floats:
    """Find the mean of |hits - count chance| for binomial hits (de Moivre's formula)."""
    above = np.floor(count * chance) + 1
    possible = (chance > 0) & (chance < 1) & (above <= count)
    n, k, p = np.where(possible, count, 1), np.where(possible, above, 1), np.where(possible, chance, 0.5)
    log_gamma = np.vectorize(math.lgamma, otypes=[np.float64])
    ways = log_gamma(n + 1) - log_gamma(k + 1) - log_gamma(n - k + 1)
    return np.where(possible, 2 * k * np.exp(ways + k * np.log(p) + (n - k + 1) * np.log1p(-p)), 0.0)


def total(gaps: Floats, part: Part) -> Floats:
    """Add up gaps: all absolute values, or only the positive or the negative ones."""
    signed = {"both": np.abs(gaps), "over": gaps, "under": -gaps}[part]
    return np.asarray(np.maximum(signed, 0).sum(-1))


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


def class_deviations(index: Ints, gap: Floats, bins: int, resamples: int, rng: np.random.Generator) -> Floats:
    """Resample the weighted gaps of all bins of all classes; `index` and `gap` have one column per class."""
    n, classes = gap.shape
    row, column = np.nonzero(index)
    place = column * bins + index[row, column]
    order = np.argsort(place, kind="stable")
    row, place, values = row[order], place[order], gap[row, column][order]
    starts = np.flatnonzero(np.r_[True, place[1:] != place[:-1]]) if len(place) else np.zeros(0, dtype=np.int64)
    drawn = np.zeros((resamples, classes * bins))
    for rows in np.array_split(np.arange(resamples), math.ceil(resamples / CLASSES_AT_ONCE)):
        weight = rng.multinomial(n, np.full(n, 1 / n), size=len(rows)) - 1.0
        part = drawn[rows[0] : rows[-1] + 1]
        if len(place):
            part[:, place[starts]] = np.add.reduceat(weight[:, row] * values, starts, axis=1)
        # The first bin of a class is what the others leave of its column.
        part[:, ::bins] = weight @ gap - part.reshape(len(rows), classes, bins).sum(2)
    return np.asarray(drawn / n)


def inverted_interval(gaps: Floats, deviations: Floats, part: Part, level: float) -> tuple[float, float]:
    """Find all totals that the observed one does not contradict, along the family of shrunken and grown gaps."""
    error = deviations.std(0)
    observed = float(total(gaps, part))
    truth = _family(gaps, error, part)
    most = _most(gaps, error)

    def end(share: float) -> float:
        def quantile(shift: float) -> float:
            return float(np.quantile(total(truth(shift) + deviations, part), share))

        return float(total(truth(_crossing(quantile, observed, -FURTHEST, most)), part))

    return end((1 + level) / 2), end((1 - level) / 2)


@dataclass(frozen=True)
class Curve:
    """For a rising row of possible true totals, the chance of a total no larger than the observed one."""

    totals: Floats
    chance: Floats

    def at(self, share: float) -> float:
        """Find the true total at which the observed one is the given quantile; 0 where none is that small."""
        return float(np.interp(-share, -self.chance, self.totals))


def confidence_curve(gaps: Floats, deviations: Floats) -> Curve:
    """Ask of many possible truths how well they agree with the observed total."""
    error = deviations.std(0)
    truth = _family(gaps, error, "both")
    observed = float(total(gaps, "both"))
    steps = np.linspace(0, 1, CURVE_POINTS)
    shifts = np.concatenate([_most(gaps, error) * (1 - steps), -FURTHEST / 2 * steps[1:]])
    chances = [float((total(truth(shift) + deviations, "both") <= observed).mean()) for shift in shifts]
    totals = np.array([float(total(truth(shift), "both")) for shift in shifts])
    return Curve(totals, np.minimum.accumulate(np.array(chances)))


def difference_interval(first: Curve, second: Curve, correlation: float, level: float) -> tuple[float, float]:
    """Put the intervals of two totals together to one of their difference (Zou and Donner's MOVER)."""
    ends = []
    for ours, theirs, side in ((first, second, 1), (second, first, -1)):
        low, middle = ours.at((1 + level) / 2), ours.at(0.5)
        # An end that is cut off at zero says nothing about the spread on its side; the other side's does.
        below = max(middle - low, ours.at((1 - level) / 2) - middle if low == 0 else 0.0)
        other, high = theirs.at(0.5), theirs.at((1 - level) / 2)
        above = high - other
        reach = math.sqrt(max(below**2 + above**2 - 2 * correlation * below * above, 0))
        ends.append(side * max(low - high, middle - other - reach))
    return ends[0], ends[1]


def unbiased_gaps(gaps: Floats, deviations: Floats) -> Floats:
    """Shrink gaps until the total that resampling shows on average is the observed one."""
    error = deviations.std(0)
    truth = _family(gaps, error, "both")
    observed = float(total(gaps, "both"))

    def average(shift: float) -> float:
        return float(total(truth(shift) + deviations, "both").mean())

    return truth(_crossing(average, observed, 0.0, _most(gaps, error)))


def _most(gaps: Floats, error: Floats) -> float:
    """Find how many standard errors it takes to move every gap to zero."""
    return float(np.max(np.abs(gaps) / np.where(error > 0, error, np.inf), initial=0.0))


def _family(gaps: Floats, error: Floats, part: Part) -> Callable[[float], Floats]:
    """Lay a line of possible truths through the observed gaps, by the number of standard errors they are moved."""
    size, sign = np.abs(gaps), np.sign(gaps)
    if part == "both":
        return lambda shift: sign * np.maximum(size - shift * error, 0)
    way = 1 if part == "over" else -1
    # Gaps of the other sign may be noise: what exceeds a standard error is taken for real, and the truth may lie
    # beyond zero once it is moved further than the gap.
    others = -np.maximum(size - error, 0)

    def truth(shift: float) -> Floats:
        moved = way * gaps - shift * error
        return way * np.where(sign == way, np.maximum(moved, 0), np.maximum(others, moved if shift < 0 else others))

    return truth


def _crossing(falling: Callable[[float], float], level: float, low: float, high: float) -> float:
    """Find where a falling function reaches a level; an end of the range where it does not."""
    if falling(high) >= level:
        return high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > level else (low, middle)
    return (low + high) / 2


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
