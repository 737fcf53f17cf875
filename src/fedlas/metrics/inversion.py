"""From resampling to intervals of a sum of absolute gaps, or of squared ones, by test inversion.

The truth is unknown, but a line of possible truths can be laid through the observed gaps: each gap is moved towards
zero, or away from it, by the same multiple of its standard error. A possible truth is kept if the observed total is
nothing unusual among the totals that resampling shows around it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedlas.metrics.resampling import Floats, Part, World

MOST_STEPS = 40
PRECISION = 1e-6  # of the observed total
FURTHEST = 12.0  # standard errors; no truth further away can matter at any usual level
CURVE_POINTS = 40


@dataclass(frozen=True)
class Curve:
    """For a rising row of possible true totals, the chance of a total no larger than the observed one."""

    totals: Floats
    chance: Floats

    def at(self, share: float) -> float:
        """Find the true total at which the observed one is the given quantile; 0 where none is that small."""
        return float(np.interp(-share, -self.chance, self.totals))


def inverted_interval(world: World, part: Part, level: float) -> tuple[float, float]:
    """Find all totals that the observed one does not contradict."""
    observed = float(world.total(world.gaps, part))
    truth, most = possible_truths(world, part)

    def end(share: float) -> float:
        def quantile(shift: float) -> float:
            return float(np.quantile(world.totals(truth(shift), part), share))

        return float(world.total(truth(_crossing(quantile, observed, -FURTHEST, most)), part))

    return end((1 + level) / 2), end((1 - level) / 2)


def confidence_curve(world: World) -> Curve:
    """Ask of many possible truths how well they agree with the observed total."""
    observed = float(world.total(world.gaps, "both"))
    truth, most = possible_truths(world, "both")
    steps = np.linspace(0, 1, CURVE_POINTS)
    truths = [truth(shift) for shift in np.concatenate([most * (1 - steps), -FURTHEST / 2 * steps[1:]])]
    chances = [float((world.totals(one, "both") <= observed).mean()) for one in truths]
    totals = np.array([float(world.total(one, "both")) for one in truths])
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


def unbiased_totals(world: World) -> Floats:
    """Resample the total around the truth under which its mean is the observed one."""
    observed = float(world.total(world.gaps, "both"))
    truth, most = possible_truths(world, "both")

    def average(shift: float) -> float:
        return float(world.totals(truth(shift), "both").mean())

    return world.totals(truth(_crossing(average, observed, 0.0, most)), "both")


def possible_truths(world: World, part: Part) -> tuple[Callable[[float], Floats], float]:
    """Lay a line of possible truths through the observed gaps; also say how far along it all gaps are zero."""
    gaps, error = world.gaps, world.error
    size, sign = np.abs(gaps), np.sign(gaps)
    # A little further than the last gap reaches: rounding would leave 1e-19 of it, and 0 outside the interval.
    most = 1.000001 * float(np.max(size / np.where(error > 0, error, np.inf), initial=0.0))
    if part in {"both", "rms"}:
        return lambda shift: sign * np.maximum(size - shift * error, 0), most
    way = 1 if part == "over" else -1
    # Gaps of the other sign may be noise: what exceeds a standard error is taken for real, and the truth may lie
    # beyond zero once it is moved further than the gap.
    others = -np.maximum(size - error, 0)

    def truth(shift: float) -> Floats:
        moved = way * gaps - shift * error
        return way * np.where(sign == way, np.maximum(moved, 0), np.maximum(others, moved if shift < 0 else others))

    return truth, most


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
