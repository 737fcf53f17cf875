"""From resampling to intervals of a sum of absolute gaps, or of squared ones, by test inversion.

The truth is unknown, but a line of possible truths can be laid through the observed gaps: each gap is moved towards
zero, or away from it, by the same multiple of its standard error. A possible truth is kept if the observed total is
nothing unusual among the totals that resampling shows around it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from fedlas.metrics.intervals.resampling import Floats, Part, World

MOST_STEPS = 40
PRECISION = 1e-6  # of the observed total
BISECTIONS = 16  # of some 15 standard errors, which leaves less than a thousandth of one
SAME = 1e-9  # totals that differ by less, relatively, are equal but for rounding
TINY = 1e-15
ROUNDING = 1e-9  # of a gap; a hundred million samples have standard errors of a hundred-thousandth
FURTHEST = 12.0  # standard errors; no truth further away can matter at any usual level
MOST_RESOLVED = 1000.0  # standard errors; of more, so few bisections would leave steps that are too large
CURVE_POINTS = 40


Line = Callable[[float], Floats]


@dataclass(frozen=True)
class Curve:
    """For rising rows of possible true totals, the chance of a total no larger than the observed one."""

    totals: list[Floats]
    chance: list[Floats]

    def at(self, share: float) -> float:
        """Find the true total at which the observed one is the given quantile; 0 where none is that small."""
        rows = zip(self.totals, self.chance, strict=True)
        found = [float(np.interp(-share, -chance, totals)) for totals, chance in rows]
        return fmean(found) if share == 0.5 else min(found) if share > 0.5 else max(found)


def inverted_interval(world: World, part: Part, level: float) -> tuple[float, float]:
    """Find all totals that the observed one does not contradict."""
    observed, tail = float(world.total(world.gaps, part)), (1 - level) / 2
    slack = SAME * observed + TINY
    lows, highs = [], []
    for truth, most in possible_truths(world, part):

        def large(shift: float, truth: Line = truth) -> bool:
            # Plain noise first: of very few samples only that can show exactly the observed total.
            drawn = (world.totals(truth(shift), part, cautious) for cautious in (False, True))
            return any(bool((totals >= observed - slack).mean() >= tail) for totals in drawn)

        def small(shift: float, truth: Line = truth) -> bool:
            return bool((world.totals(truth(shift), part) <= observed + slack).mean() < tail)

        lows.append(float(world.total(truth(_last(large, -FURTHEST, most)), part)))
        highs.append(float(world.total(truth(_last(small, -FURTHEST, most)), part)))
    return min(lows), max(highs)


def confidence_curve(world: World) -> Curve:
    """Ask of many possible truths how well they agree with the observed total."""
    observed = float(world.total(world.gaps, "both"))
    slack = SAME * observed + TINY
    curve = Curve([], [])
    for truth, most in possible_truths(world, "both"):

        def chance(shift: float, truth: Line = truth) -> float:
            totals = world.totals(truth(shift), "both")
            # Of equal totals half count, so that the middle of the curve is in the middle.
            return float((totals <= observed + slack).mean() + (totals < observed - slack).mean()) / 2

        # The range in which the observed total is neither the largest nor the smallest of all resamples. A fixed number
        # of points over all shifts, whose range grows with the square root of n, would miss it.
        first = _last(lambda shift: chance(shift) < 1, -FURTHEST, most)
        last = _last(lambda shift: chance(shift) <= 0, -FURTHEST, most)
        shifts = _grid(first, last)
        curve.totals.append(np.array([float(world.total(truth(shift), "both")) for shift in shifts]))
        curve.chance.append(np.minimum.accumulate(np.array([chance(shift) for shift in shifts])))
    return curve


def _grid(first: float, last: float) -> Floats:
    """Return falling shifts from the first to the last.

    All but the ends are multiples of a power of two, so that curves of two models have their points in common, and
    errors of interpolation cancel in their difference.
    """
    if first <= last:
        return np.array([first])
    step = 2.0 ** math.floor(math.log2((first - last) / CURVE_POINTS))
    inner = step * np.arange(math.ceil(first / step) - 1, math.floor(last / step), -1)
    return np.concatenate([[first], inner, [last]])


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


def unbiased_totals(world: World) -> Floats:
    """Resample the total around the truth under which its mean is the observed one."""
    observed = float(world.total(world.gaps, "both"))
    truth, most = possible_truths(world, "both")[0]

    def average(shift: float) -> float:
        return float(world.totals(truth(shift), "both").mean())

    return world.totals(truth(_crossing(average, observed, 0.0, most)), "both")


def possible_truths(world: World, part: Part) -> list[tuple[Line, float]]:
    """Lay lines of possible truths through the observed gaps; also say how far along them all gaps are zero.

    A second line is laid where gaps of rare bins may be noise: ten right answers in a bin of confidence 0.98 look
    under-confident, but the truth is more likely to lie far on the other side, where there is room.
    """
    gaps, error = world.gaps, world.error
    size, sign = np.abs(gaps), np.sign(gaps)
    # A little further than the last gap reaches: rounding would leave 1e-19 of it, and 0 outside the interval.
    # An error that rounding has left of none is none: bisection over its multiples would find nothing.
    most = 1.000001 * float(np.max(size / np.where(error > ROUNDING * size, error, np.inf), initial=0.0))
    least, largest = (-np.inf, np.inf) if world.noise is None else world.noise.bounds

    if part in {"both", "rms"}:
        sides = [sign]
        if world.noise is not None:
            roomier = np.where(world.noise.bins.mean > 0.5, 1.0, -1.0)
            sides[0] = np.where(sign == 0, roomier, sign)
            unsure = world.noise.rare & (size <= error) & (sides[0] != roomier)
            sides += [np.where(unsure, roomier, sides[0])] if unsure.any() else []

        def line(side: Floats) -> Line:
            return lambda shift: np.asarray(np.clip(side * np.maximum(size - shift * error, 0), least, largest))

        return [(line(side), most) for side in sides]
    way = 1 if part == "over" else -1

    # Gaps of the other sign may be noise, or real: what exceeds a standard error is taken for real on one line, all of
    # it on the other. The truth may lie beyond zero once it is moved further than the gap.
    def part_line(others: Floats) -> Line:
        def truth(shift: float) -> Floats:
            moved = way * gaps - shift * error
            found = np.where(sign == way, np.maximum(moved, 0), np.maximum(others, moved if shift < 0 else others))
            return np.asarray(np.clip(way * found, least, largest))

        return truth

    return [(part_line(others), most) for others in (-np.maximum(size - error, 0), -size)]


def _last(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Find the last point up to which something holds; the first one where it never does (bisection)."""
    if holds(high):
        return high
    if high > MOST_RESOLVED and not holds(FURTHEST):
        high = FURTHEST
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _crossing(falling: Callable[[float], float], level: float, low: float, high: float) -> float:
    """Find where a falling function reaches a level; an end of the range where it does not (Illinois method)."""
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
