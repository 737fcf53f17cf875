"""Calibration errors with kernel smoothing instead of bins.

Smooth ECE (Blasiok and Nakkiran, 2023), with a Gaussian kernel K_s of width s that is reflected at 0 and 1:

    smECE_s = mean over t in [0, 1] of | sum_i K_s(t, c_i) (c_i - correct_i) |,  weighted as in `_smoothed_error`
    smECE   = smECE_s at the width s where s = smECE_s, found by bisection in ten steps

The kernel of each sample has mass 1 on [0, 1], so a model whose gaps all have one sign has its mean gap as error, up
to discretisation. The reference implementation relplot differs in one point: it does not reflect samples at exactly 0
or 1, which therefore have half the weight. Grid, kernel, mesh and bisection are those of relplot, so the values are
equal if no confidence is 0 or 1.

It is computed by convolution on a fine grid, in O(n) plus a constant.

A smooth reliability diagram shows t - gap(t) with gap(t) = sum_i K_s(t, c_i) (c_i - correct_i) / sum_i K_s(t, c_i) and
the width s of the smooth ECE. The gap is smoothed rather than the accuracy, because the gap of a calibrated model is 0
for any density of confidences. The effective sample size at t is (sum K)^2 / sum K^2.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from jaxtyping import Complex128, Float64
from torch import Tensor

from fedlas.errors import UserError
from fedlas.metrics.base import AbstractTopLabel
from fedlas.metrics.bin_sums import add_up, exact
from fedlas.metrics.inputs import MetricInput, Pairs, Scope, pairs
from fedlas.metrics.result import Result
from fedlas.predictions.arrays import Array

SMALLEST = 0.001
MESH = 200
DENSITY_FLOOR = 0.0001


@dataclass(frozen=True)
class SmoothCurve:
    """Kernel-smoothed accuracy, wherever the window has at least one sample.

    Args:
        center: centre of the window, between 0 and 1.
        confidence: mean confidence in the window.
        accuracy: accuracy in the window.
        density: density of confidences; its integral over 0..1 is 1.
        samples: effective sample size of the window.
        bandwidth: width of the window.
    """

    center: Float64[Tensor, " points"]
    confidence: Float64[Tensor, " points"]
    accuracy: Float64[Tensor, " points"]
    density: Float64[Tensor, " points"]
    samples: Float64[Tensor, " points"]
    bandwidth: float

    @property
    def gap(self) -> Float64[Tensor, " points"]:
        """Mean confidence minus accuracy; positive means over-confident."""
        return self.confidence - self.accuracy


def smooth_curve(
    probs: MetricInput,
    labels: Array | None = None,
    *,
    points: int = 201,
    scope: Scope = "top-label",
    ignore_index: int | None = None,
) -> SmoothCurve:
    """Return the smooth reliability diagram, with the kernel width of the smooth ECE."""
    if points < 2:
        raise UserError(f"points is {points}; at least 2 are needed")
    samples = pairs(probs, labels, scope, ignore_index)
    width = float(smooth_ece.of_pairs(samples).details["bandwidth"])
    confidence, correct = exact(samples.confidence), exact(samples.correct)
    cells = _cells(width)
    ones = torch.ones_like(correct)
    count, total, positives = (_on_grid(confidence, values, cells) for values in (ones, confidence, correct))
    grid, center = (torch.linspace(0, 1, size, dtype=torch.float64, device=count.device) for size in (cells, points))
    occupied = count > 0  # skips empty cells
    grid, count, total, positives = (values[occupied] for values in (grid, count, total, positives))
    # Use samples and their mirror images up to a distance of two; the width is at most 1, so others have no weight.
    images = [sign * grid + shift for sign in (1, -1) for shift in (-2, 0, 2)]
    kernel = sum(((center[:, None] - image) / width).square().div(-2).exp() for image in images)
    assert isinstance(kernel, Tensor)
    mass = kernel @ count
    covered = mass >= 1  # the kernel is 1 at its centre
    mass = mass[covered]
    return SmoothCurve(
        center[covered],
        (kernel @ total)[covered] / mass,
        (kernel @ positives)[covered] / mass,
        mass / (math.sqrt(2 * math.pi) * width * len(confidence)),
        mass**2 / (kernel.square() @ count)[covered],
        width,
    )


def _cells(width: float) -> int:
    return max(2000, round(20 / width)) // 2 + 1


def _smoothed_error(mirrored: Complex128[Tensor, "2 waves"], width: float) -> float:
    """Return the mean absolute smoothed gap, from the transforms of the gaps and counts of a grid."""
    kernel, left, fraction = _gaussian(width, mirrored.device)
    smoothed = _convolved(mirrored, kernel)
    smooth_gap, density = torch.lerp(smoothed[:, left], smoothed[:, left + 1], fraction)
    density = density + DENSITY_FLOOR
    return float((smooth_gap / density).abs().mul(density).sum() / density.sum())


@lru_cache(maxsize=64)
def _gaussian(width: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the transform of the kernel of a width, and the position of its mesh on the grid (cached)."""
    with torch.inference_mode(mode=False):  # cached tensors must be usable outside of inference mode
        points = _cells(width)
        offsets = torch.linspace(-0.5, 0.5, points, dtype=torch.float64, device=device)
        kernel = torch.exp(-(offsets**2) / (2 * width**2)) / (math.sqrt(2 * math.pi) * width)
        mesh = torch.linspace(0, 1, max(round(10 / width), MESH), dtype=torch.float64, device=device)
        scaled = mesh * (points - 1)
        left = scaled.long().clamp(0, points - 2)
        return _around(kernel, points), left, scaled - left


def _on_grid(values: Float64[Tensor, " n"], weights: Float64[Tensor, " n"], points: int) -> Float64[Tensor, " points"]:
    """Split each weight between the two nearest points of a uniform grid on [0, 1]."""
    scaled = values.clamp(0, 1) * (points - 1)  # rounding may leave a confidence above one
    left = scaled.long().clamp(0, points - 2)
    fraction = scaled - left
    return add_up((1 - fraction) * weights, left, points) + add_up(fraction * weights, left + 1, points)


def _double_ends(values: Float64[Tensor, " points"]) -> Float64[Tensor, " points"]:
    """Double the values at the ends of a grid, where half of the kernel is lost and reflection does not restore it."""
    doubled = values.clone()
    doubled[0] *= 2
    doubled[-1] *= 2
    return doubled


def _mirrored(values: Float64[Tensor, "rows points"]) -> Complex128[Tensor, "rows waves"]:
    """Return the Fourier transform of values that are mirrored at both ends, and thus periodic."""
    waves: Tensor = torch.fft.rfft(torch.cat([values, values.flip(1)[:, 1:-1]], dim=1))
    return waves


def _around(kernel: Float64[Tensor, " width"], points: int) -> Complex128[Tensor, " waves"]:
    """Return the Fourier transform of a kernel as long as the grid, centred at 0, with the period of `_mirrored`."""
    padded = torch.nn.functional.pad(kernel, (0, 2 * (points - 1) - len(kernel)))
    waves: Tensor = torch.fft.rfft(padded.roll(-(len(kernel) // 2)))
    return waves


def _convolved(
    mirrored: Complex128[Tensor, "rows waves"], kernel: Complex128[Tensor, " waves"]
) -> Float64[Tensor, "rows waves"]:
    """Convolve values on a grid, given their transform by `_mirrored`."""
    smoothed: Tensor = torch.fft.irfft(mirrored * kernel, 2 * (len(kernel) - 1))
    return smoothed[:, : len(kernel)]


class SmoothECE(AbstractTopLabel):
    """Calibration error by kernel smoothing, with a width that is determined by the data."""

    name = "smooth_ece"
    title = "smooth ECE"
    explanation = "Calibration error with a kernel instead of bins; its width is chosen from the samples."
    order = 140

    def of_pairs(self, samples: Pairs) -> Result:
        confidence, correct = exact(samples.confidence), exact(samples.correct)
        gap, ones = confidence - correct, torch.ones_like(confidence)
        grids: dict[int, Tensor] = {}

        def error(width: float) -> float:
            points = _cells(width)
            if points not in grids:
                grids[points] = _mirrored(
                    torch.stack([_double_ends(_on_grid(confidence, values, points)) for values in (gap, ones)])
                )
            return _smoothed_error(grids[points], width)

        upper, lower = 1.0, 0.0
        value = error(upper)
        if value <= upper:
            for _ in range(10):
                middle = (upper + lower) / 2
                middle_error = math.inf if middle < SMALLEST else error(middle)
                if middle < middle_error:
                    lower = middle
                else:
                    upper, value = middle, middle_error
        definition = replace(
            samples.definition, estimator="smooth ECE", norm="L1", edges="Gaussian kernel reflected at 0 and 1"
        )
        return Result(value, definition, None, {"bandwidth": upper})


smooth_ece = SmoothECE()
