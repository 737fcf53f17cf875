"""Reference implementations of kernel estimates and the noise floor in plain float64, for the campaign on numbers.

The library bins samples on a grid and convolves by FFT; here the kernels of all samples and of their reflections at 0
and 1 are added directly. The grid, that of relplot, is part of the definition. Where only rounding decides on the
bandwidth or on the points, there is no reference value.
"""

import math
from functools import lru_cache
from typing import Any

import exact_metrics
import numpy as np
from exact_metrics import Table
from numpy.typing import NDArray

Floats = NDArray[np.float64]
CLOSE = 1e-9  # difference below which rounding decides a comparison


def on_cells(values: list[float], weights: list[float], points: int) -> dict[int, float]:
    """Distribute each weight linearly over the two nearest grid points."""
    result: dict[int, float] = {}
    for value, weight in zip(values, weights, strict=True):
        position = min(max(value, 0.0), 1.0) * (points - 1)
        left = min(int(position), points - 2)
        for cell, fraction in ((left, 1 - (position - left)), (left + 1, position - left)):
            result[cell] = result.get(cell, 0.0) + fraction * weight
    return result


def kernel_sum(cells: dict[int, float], kernel: Floats, points: int) -> Floats:
    """Add the kernels of all cells and their reflections; a cell on the border is its own reflection."""
    last, half = points - 1, len(kernel) // 2
    total = np.zeros(points)
    for cell, weight in cells.items():
        images = [sign * cell + 2 * last * turn for sign in (1, -1) for turn in (-1, 0, 1)]
        for image in images:
            first, final = max(0, image - half), min(last, image - half + len(kernel) - 1)
            if first <= final:
                total[first : final + 1] += weight * kernel[first - image + half : final - image + half + 1]
    return total


@lru_cache(maxsize=4096)
def gaussian(width: float) -> tuple[int, Floats, Floats, Floats]:
    points = max(2000, round(20 / width)) // 2 + 1
    offsets = np.linspace(-0.5, 0.5, points)
    kernel = np.exp(-(offsets**2) / (2 * width**2)) / (math.sqrt(2 * math.pi) * width)
    return points, np.linspace(0, 1, points), kernel, np.linspace(0, 1, max(round(10 / width), 200))


def columns(table: Table) -> tuple[list[float], list[float]]:
    return [float(confidence) for confidence, _ in table.tops], [float(correct) for _, correct in table.tops]


def smoothed_error(table: Table, width: float) -> float:
    confidence, correct = columns(table)
    points, grid, kernel, mesh = gaussian(width)
    gaps = [a - b for a, b in zip(confidence, correct, strict=True)]
    gap, count = (
        np.interp(mesh, grid, kernel_sum(on_cells(confidence, weights, points), kernel, points))
        for weights in (gaps, [1.0] * len(gaps))
    )
    density = count + 0.0001
    return float(np.abs(gap).sum() / density.sum())


def smooth_width(table: Table) -> tuple[float, float] | None:
    """Find bandwidth and error by bisection; return None if rounding decides a step."""
    upper, lower = 1.0, 0.0
    value = smoothed_error(table, upper)
    if value > upper:
        return upper, value
    for _ in range(10):
        middle = (upper + lower) / 2
        error = math.inf if middle < 0.001 else smoothed_error(table, middle)
        if abs(middle - error) < CLOSE:
            return None
        if middle < error:
            lower = middle
        else:
            upper, value = middle, error
    return upper, value


def smooth_ece(table: Table) -> float | None:
    result = smooth_width(table)
    return None if result is None else result[1]


def smooth_curve(table: Table, points: int = 201) -> list[float] | None:
    """Return mean confidence and accuracy in a window at all points with samples."""
    result = smooth_width(table)
    if result is None:
        return None
    width, (confidence, correct) = result[0], columns(table)
    cells = gaussian(width)[0]
    count = on_cells(confidence, [1.0] * len(confidence), cells)
    sums = [on_cells(confidence, weights, cells) for weights in (confidence, correct)]
    position = np.linspace(0, 1, points)
    mass, totals = np.zeros(points), np.zeros((2, points))
    for cell in count:
        centre = cell / (cells - 1)
        images = [sign * centre + shift for sign in (1, -1) for shift in (-2, 0, 2)]
        kernel = sum(np.exp(-(((position - image) / width) ** 2) / 2) for image in images)
        mass += kernel * count[cell]
        totals += kernel * np.array([[cell_sums[cell]] for cell_sums in sums])
    if np.abs(mass - 1).min() < CLOSE:
        return None
    nonempty = mass >= 1
    return [*(totals[0][nonempty] / mass[nonempty]).tolist(), *(totals[1][nonempty] / mass[nonempty]).tolist()]


def noise_floor(table: Table, bins: int = 15, binning: str = "width") -> float | None:
    """Add the mean deviations of binomial counts, scaled to the variance of unequal confidences."""
    if table.soft:  # a soft label counts as several hard ones
        return None
    total = 0.0
    for item in exact_metrics.binned(table, table.tops, bins, binning):
        confidences = [float(table.tops[i][0]) for i in item]
        if confidences:
            n, rate = len(confidences), math.fsum(confidences) / len(confidences)
            variance = math.fsum(c * (1 - c) for c in confidences)
            binomial = n * rate * (1 - rate)
            narrower = math.sqrt(min(max(variance / binomial, 0.0), 1.0)) if binomial > 1e-6 else 1.0
            total += narrower * mean_deviation(n, rate)
    return total / table.n


def mean_deviation(n: int, rate: float) -> float:
    if not 0 < rate < 1:
        return 0.0
    return math.fsum(math.comb(n, k) * rate**k * (1 - rate) ** (n - k) * abs(k - n * rate) for k in range(n + 1))


def oracle_of(name: str) -> Any:
    """Return the reference implementation of a metric or of its accumulator."""
    return {"smooth_ece": smooth_ece, "SmoothECE": smooth_ece, "smooth_curve": smooth_curve,
            "noise_floor": noise_floor}.get(name)  # fmt: skip
