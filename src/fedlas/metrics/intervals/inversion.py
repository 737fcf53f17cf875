"""Confidence intervals of sums of absolute or squared gaps, by test inversion.

The candidates for the true gaps are a one-parameter family: each observed gap is moved towards zero, or away from it,
by the same multiple of its standard error. The interval contains the totals of all candidates whose bootstrap
distribution does not reject the observed total.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from fedlas.metrics.intervals.resampling import BootstrapDistribution, Floats, Part

MOST_STEPS = 40
PRECISION = 1e-6  # relative to the observed total
BISECTIONS = 16  # reduce a range of about 15 standard errors to less than a thousandth of one
SAME = 1e-9  # relative difference below which totals are equal up to rounding
TINY = 1e-15
ROUNDING = 1e-9  # rounding error of a gap; the standard error of a hundred million samples is about 1e-5
FURTHEST = 12.0  # standard errors; candidates further away are rejected at all usual levels
MOST_RESOLVED = 1000.0  # standard errors; a larger range needs more bisections
CURVE_POINTS = 40


Line = Callable[[float], Floats]


@dataclass(frozen=True)
class Curve:
    """Confidence curves: for increasing true totals, the probability of a total up to the observed one."""

    totals: list[Floats]
    chance: list[Floats]

    def at(self, quantile: float) -> float:
        """Return the true total for which the observed one is the given quantile; 0 if there is none."""
        rows = zip(self.totals, self.chance, strict=True)
        values = [float(np.interp(-quantile, -chance, totals)) for totals, chance in rows]
        return fmean(values) if quantile == 0.5 else min(values) if quantile > 0.5 else max(values)


def inverted_interval(distribution: BootstrapDistribution, part: Part, level: float) -> tuple[float, float]:
    """Return the interval of all totals that the observed one does not reject."""
    observed, tail = float(distribution.total(distribution.gaps, part)), (1 - level) / 2
    slack = SAME * observed + TINY
    lows, highs = [], []
    for truth, most in candidate_gaps(distribution, part):

        def large(shift: float, truth: Line = truth) -> bool:
            # Try both kinds of noise: with very few samples, only that without `cautious` reaches the observed total.
            totals_by_noise = (distribution.totals(truth(shift), part, cautious) for cautious in (False, True))
            return any(bool((totals >= observed - slack).mean() >= tail) for totals in totals_by_noise)

        def small(shift: float, truth: Line = truth) -> bool:
            return bool((distribution.totals(truth(shift), part) <= observed + slack).mean() < tail)

        lows.append(float(distribution.total(truth(_last(large, -FURTHEST, most)), part)))
        highs.append(float(distribution.total(truth(_last(small, -FURTHEST, most)), part)))
    return min(lows), max(highs)


def confidence_curve(distribution: BootstrapDistribution) -> Curve:
    """Return the probability of a total up to the observed one for many candidates."""
    observed = float(distribution.total(distribution.gaps, "both"))
    slack = SAME * observed + TINY
    curve = Curve([], [])
    for truth, most in candidate_gaps(distribution, "both"):

        def chance(shift: float, truth: Line = truth) -> float:
            totals = distribution.totals(truth(shift), "both")
            # Equal totals count half.
            return float((totals <= observed + slack).mean() + (totals < observed - slack).mean()) / 2

        # Use only the range in which the observed total is neither the largest nor the smallest of the resamples,
        # because the range of all shifts grows with the square root of n.
        first = _last(lambda shift: chance(shift) < 1, -FURTHEST, most)
        last = _last(lambda shift: chance(shift) <= 0, -FURTHEST, most)
        shifts = _grid(first, last)
        curve.totals.append(np.array([float(distribution.total(truth(shift), "both")) for shift in shifts]))
        curve.chance.append(np.minimum.accumulate(np.array([chance(shift) for shift in shifts])))
    return curve


def _grid(first: float, last: float) -> Floats:
    """Return decreasing shifts from the first to the last.

    All but the ends are multiples of a power of two, so that the curves of two models share their points and errors of
    interpolation cancel in their difference.
    """
    if first <= last:
        return np.array([first])
    step = 2.0 ** math.floor(math.log2((first - last) / CURVE_POINTS))
    inner = step * np.arange(math.ceil(first / step) - 1, math.floor(last / step), -1)
    return np.concatenate([[first], inner, [last]])


def difference_interval(first: Curve, second: Curve, correlation: float, level: float) -> tuple[float, float]:
    """Combine the intervals of two totals into one of their difference (MOVER; Zou and Donner)."""
    ends = []
    for curve, other_curve, sign in ((first, second, 1), (second, first, -1)):
        low, middle = curve.at((1 + level) / 2), curve.at(0.5)
        # A limit that is clipped at zero has no valid distance from the estimate; use the distance on the other side.
        distance_below = max(middle - low, curve.at((1 - level) / 2) - middle if low == 0 else 0.0)
        other, high = other_curve.at(0.5), other_curve.at((1 - level) / 2)
        distance_above = high - other
        reach = math.sqrt(
            max(distance_below**2 + distance_above**2 - 2 * correlation * distance_below * distance_above, 0)
        )
        ends.append(sign * max(low - high, middle - other - reach))
    return ends[0], ends[1]


def unbiased_totals(distribution: BootstrapDistribution) -> Floats:
    """Resample the total around the candidate under which its mean is the observed one."""
    observed = float(distribution.total(distribution.gaps, "both"))
    truth, most = candidate_gaps(distribution, "both")[0]

    def average(shift: float) -> float:
        return float(distribution.totals(truth(shift), "both").mean())

    return distribution.totals(truth(_crossing(average, observed, 0.0, most)), "both")


def candidate_gaps(distribution: BootstrapDistribution, part: Part) -> list[tuple[Line, float]]:
    """Return families of candidates for the true gaps, each with the shift at which all gaps are zero.

    A second family is added if gaps of sparse bins may be noise: ten correct predictions in a bin of confidence 0.98
    look under-confident, but the true gap is more likely to have the other sign, which has the larger range.
    """
    gaps, error = distribution.gaps, distribution.error
    size, sign = np.abs(gaps), np.sign(gaps)
    # Slightly larger than exact, so that rounding does not leave a gap of 1e-19 and exclude 0 from the interval.
    # Standard errors that are rounding errors count as zero.
    most = 1.000001 * float(np.max(size / np.where(error > ROUNDING * size, error, np.inf), initial=0.0))
    least, largest = (-np.inf, np.inf) if distribution.noise is None else distribution.noise.bounds

    if part in {"both", "rms"}:
        sides = [sign]
        if distribution.noise is not None:
            wider_side = np.where(distribution.noise.bins.mean > 0.5, 1.0, -1.0)
            sides[0] = np.where(sign == 0, wider_side, sign)
            unsure = distribution.noise.sparse & (size <= error) & (sides[0] != wider_side)
            sides += [np.where(unsure, wider_side, sides[0])] if unsure.any() else []

        def line(side: Floats) -> Line:
            return lambda shift: np.asarray(np.clip(side * np.maximum(size - shift * error, 0), least, largest))

        return [(line(side), most) for side in sides]
    direction = 1 if part == "over" else -1

    # Gaps of the other sign may be noise or real: one family reduces them by one standard error, the other keeps them.
    # True gaps may have the other sign if they are moved further than the gap.
    def part_line(others: Floats) -> Line:
        def truth(shift: float) -> Floats:
            moved = direction * gaps - shift * error
            values = np.where(
                sign == direction, np.maximum(moved, 0), np.maximum(others, moved if shift < 0 else others)
            )
            return np.asarray(np.clip(direction * values, least, largest))

        return truth

    return [(part_line(others), most) for others in (-np.maximum(size - error, 0), -size)]


def _last(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return the largest point at which a monotone condition holds, by bisection; `low` if it never does."""
    if holds(high):
        return high
    if high > MOST_RESOLVED and not holds(FURTHEST):
        high = FURTHEST
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _crossing(falling: Callable[[float], float], level: float, low: float, high: float) -> float:
    """Return where a decreasing function reaches a level, by the Illinois method; if it does not, return an end."""
    above, below = falling(low) - level, falling(high) - level
    if below >= 0:
        return high
    if above <= 0:
        return low
    before = 0.0
    for _ in range(MOST_STEPS):
        middle = (low * below - high * above) / (below - above)
        value = falling(middle) - level
        if abs(value) <= PRECISION * level:
            return middle
        if value > 0:
            low, above, below = middle, value, below / 2 if before > 0 else below
        else:
            high, below, above = middle, value, above / 2 if before < 0 else above
        before = value
    return (low + high) / 2
