"""Calibration errors without bins: the gap is smoothed by a kernel instead.

Smooth ECE (Blasiok and Nakkiran, 2023), with a Gaussian kernel K_s of width s that is reflected at 0 and 1:

    smECE_s = mean over t in [0, 1] of | sum_i K_s(t, c_i) (c_i - correct_i) |,  weighted as in `_smoothed_error`
    smECE   = smECE_s at the width s where s = smECE_s, found by bisection in ten steps

The kernel of every sample has mass 1 on [0, 1], so a model whose gaps all have one sign has its mean gap as error, up
to the mesh. The reference implementation relplot differs in one point: it has no mirror image of a sample at exactly 0
or 1, half of whose kernel is lost. Confidences of 1 then count half, and the average shifts to the other samples. Grid,
kernel, mesh and bisection are those of relplot, and away from 0 and 1 so are the values.

KDE-ECE (Zhang, Kailkhura and Han, 2020), with a triweight kernel K_h reflected at 0 and 1 and h = 1.06 std(c) n^(-1/5):

    KDE-ECE = integral over z of | z - a(z) | d(z),  d = mean_i K_h(z - c_i),  a = mean_i K_h(z - c_i) correct_i / d

Both put the samples on a fine grid and convolve there, so they cost O(n) and a fixed amount on top.

A smooth reliability diagram shows t - gap(t) with gap(t) = sum_i K_s(t, c_i) (c_i - correct_i) / sum_i K_s(t, c_i) and
the width s of the smooth ECE. It is the gap that is smoothed, not the accuracy: that of a calibrated model is 0 however
unevenly its confidences lie. The window at t is worth (sum K)^2 / sum K^2 samples.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from jaxtyping import Complex128, Float64
from torch import Tensor

from fedlas.errors import UserError
from fedlas.metrics.base import AbstractTopLabel
from fedlas.metrics.bin_statistics import add_up, exact
from fedlas.metrics.inputs import Given, Pairs, Scope, pairs
from fedlas.metrics.result import Result
from fedlas.predictions import Array

SMALLEST = 0.001
MESH = 200
DENSITY_FLOOR = 0.0001
KDE_POINTS = 2**13 + 1


@dataclass(frozen=True)
class SmoothCurve:
    """What a window that slides over confidence sees, wherever it holds at least one sample.

    Args:
        place: middle of the window, between 0 and 1.
        confidence: mean confidence in the window.
        accuracy: share of right answers in it.
        density: how densely confidences lie there; its integral over 0..1 is 1.
        samples: how many samples the window is worth.
        bandwidth: width of the window.
    """

    place: Float64[Tensor, " points"]
    confidence: Float64[Tensor, " points"]
    accuracy: Float64[Tensor, " points"]
    density: Float64[Tensor, " points"]
    samples: Float64[Tensor, " points"]
    bandwidth: float

    @property
    def gap(self) -> Float64[Tensor, " points"]:
        """Mean confidence minus accuracy: positive where the model is over-confident."""
        return self.confidence - self.accuracy


def smooth_curve(
    probs: Given,
    labels: Array | None = None,
    *,
    points: int = 201,
    scope: Scope = "top-label",
    ignore_index: int | None = None,
) -> SmoothCurve:
    """Slide a window as wide as the kernel of the smooth ECE over confidence: what a smooth diagram is drawn from."""
    if points < 2:
        raise UserError(f"points is {points}; at least 2 are needed")
    found = pairs(probs, labels, scope, ignore_index)
    width = float(smooth_result(found).details["bandwidth"])
    confidence, correct = exact(found.confidence), exact(found.correct)
    cells = _cells(width)
    one = torch.ones_like(correct)
    count, total, hits = (_on_grid(confidence, values, cells) for values in (one, confidence, correct))
    grid, place = (torch.linspace(0, 1, size, dtype=torch.float64, device=count.device) for size in (cells, points))
    filled = count > 0  # few samples fill few cells, and the kernel is wanted there alone
    grid, count, total, hits = (values[filled] for values in (grid, count, total, hits))
    # Each sample and its mirror images; those further away than two lengths weigh nothing, as no width is above 1.
    images = [sign * grid + shift for sign in (1, -1) for shift in (-2, 0, 2)]
    kernel = sum(((place[:, None] - image) / width).square().div(-2).exp() for image in images)
    assert isinstance(kernel, Tensor)
    mass = kernel @ count
    kept = mass >= 1  # the kernel is 1 at its centre
    mass = mass[kept]
    return SmoothCurve(
        place[kept],
        (kernel @ total)[kept] / mass,
        (kernel @ hits)[kept] / mass,
        mass / (math.sqrt(2 * math.pi) * width * len(confidence)),
        mass**2 / (kernel.square() @ count)[kept],
        width,
    )


def smooth_result(found: Pairs) -> Result:
    """Find the width at which the smoothed error equals it, and the error there."""
    confidence, correct = exact(found.confidence), exact(found.correct)
    gap, one = confidence - correct, torch.ones_like(confidence)
    grids: dict[int, Tensor] = {}

    def error(width: float) -> float:
        points = _cells(width)
        if points not in grids:
            grids[points] = _mirrored(
                torch.stack([_ends_twice(_on_grid(confidence, values, points)) for values in (gap, one)])
            )
        return _smoothed_error(grids[points], width)

    wide, narrow = 1.0, 0.0
    value = error(wide)
    if value <= wide:
        for _ in range(10):
            middle = (wide + narrow) / 2
            there = math.inf if middle < SMALLEST else error(middle)
            if middle < there:
                narrow = middle
            else:
                wide, value = middle, there
    about = replace(found.about, estimator="smooth ECE", norm="L1", edges="Gaussian kernel reflected at 0 and 1")
    return Result(value, about, None, {"bandwidth": wide})


def _cells(width: float) -> int:
    return max(2000, round(20 / width)) // 2 + 1


def _smoothed_error(mirrored: Complex128[Tensor, "2 waves"], width: float) -> float:
    """Smooth what `_mirrored` has made of the gaps and counts of a grid, and average the gap."""
    kernel, left, share = _gaussian(width, mirrored.device)
    smoothed = _convolved(mirrored, kernel)
    smooth_gap, density = torch.lerp(smoothed[:, left], smoothed[:, left + 1], share)
    density = density + DENSITY_FLOOR
    return float((smooth_gap / density).abs().mul(density).sum() / density.sum())


@lru_cache(maxsize=64)
def _gaussian(width: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Transform the kernel of a width, and say where its mesh lies on the grid; bisections meet the same widths."""
    with torch.inference_mode(mode=False):  # what is kept must serve elsewhere too
        points = _cells(width)
        offsets = torch.linspace(-0.5, 0.5, points, dtype=torch.float64, device=device)
        kernel = torch.exp(-(offsets**2) / (2 * width**2)) / (math.sqrt(2 * math.pi) * width)
        mesh = torch.linspace(0, 1, max(round(10 / width), MESH), dtype=torch.float64, device=device)
        scaled = mesh * (points - 1)
        left = scaled.long().clamp(0, points - 2)
        return _around(kernel, points), left, scaled - left


def _on_grid(place: Float64[Tensor, " n"], weights: Float64[Tensor, " n"], points: int) -> Float64[Tensor, " points"]:
    """Share each weight between the two nearest points of an even grid on [0, 1]."""
    scaled = place.clamp(0, 1) * (points - 1)  # rounding may leave a confidence above one
    left = scaled.long().clamp(0, points - 2)
    share = scaled - left
    return add_up((1 - share) * weights, left, points) + add_up(share * weights, left + 1, points)


def _ends_twice(values: Float64[Tensor, " points"]) -> Float64[Tensor, " points"]:
    """Double what lies on the ends of a grid: half of its kernel is outside, and no mirror image brings it back."""
    doubled = values.clone()
    doubled[0] *= 2
    doubled[-1] *= 2
    return doubled


def _mirrored(values: Float64[Tensor, "rows points"]) -> Complex128[Tensor, "rows waves"]:
    """Transform values on a grid that are mirrored at both ends; so they repeat, and need no padding."""
    waves: Tensor = torch.fft.rfft(torch.cat([values, values.flip(1)[:, 1:-1]], dim=1))
    return waves


def _around(kernel: Float64[Tensor, " width"], points: int) -> Complex128[Tensor, " waves"]:
    """Transform a kernel, at most twice as long as a grid, for what `_mirrored` makes of that grid."""
    period = 2 * (points - 1)
    # What the kernel reaches beyond the period comes round to its other end, and its middle lies at 0.
    around = torch.nn.functional.pad(kernel, (0, 2 * period - len(kernel))).reshape(2, period).sum(0)
    waves: Tensor = torch.fft.rfft(around.roll(-(len(kernel) // 2)))
    return waves


def _convolved(
    mirrored: Complex128[Tensor, "rows waves"], kernel: Complex128[Tensor, " waves"]
) -> Float64[Tensor, "rows waves"]:
    """Convolve values on a grid that `_mirrored` has transformed; there are as many points as waves."""
    smoothed: Tensor = torch.fft.irfft(mirrored * kernel, 2 * (len(kernel) - 1))
    return smoothed[:, : len(kernel)]


class SmoothECE(AbstractTopLabel):
    """Calibration error with a kernel whose width follows from the data, without bins."""

    name = "smooth_ece"
    title = "smooth ECE"
    order = 140

    def of_pairs(self, found: Pairs) -> Result:
        return smooth_result(found)


smooth_ece = SmoothECE()


def kde_ece(
    probs: Given,
    labels: Array | None = None,
    *,
    bandwidth: float | None = None,
    scope: Scope = "top-label",
    ignore_index: int | None = None,
) -> Result:
    """Measure the calibration error from kernel estimates of the confidence's density and of the accuracy."""
    found = pairs(probs, labels, scope, ignore_index)
    confidence, correct = exact(found.confidence), exact(found.correct)
    n = len(confidence)
    spread = float(confidence.std()) if n > 1 else 0.0
    # A constant confidence has no spread; one cell of the grid is then as wide as the kernel has to be.
    width = bandwidth or max(1.06 * spread * n**-0.2, 4 / (KDE_POINTS - 1))
    grid = torch.linspace(0, 1, KDE_POINTS, dtype=torch.float64, device=confidence.device)
    offsets = torch.linspace(-1, 1, 2 * KDE_POINTS - 1, dtype=torch.float64, device=confidence.device)
    kernel = 35 / 32 * (1 - (offsets / width).square()).clamp_min(0) ** 3 / width
    if width <= 1:
        # A kernel of a few cells does not add up to one where it is read off, and an error could exceed one.
        kernel = kernel / kernel.sum() * (KDE_POINTS - 1)
    both = [_ends_twice(_on_grid(confidence, weights, KDE_POINTS)) for weights in (torch.ones_like(correct), correct)]
    density, hits = _convolved(_mirrored(torch.stack(both)), _around(kernel, KDE_POINTS)) / n
    value = float(torch.trapezoid((grid * density - hits).abs(), grid))
    about = replace(found.about, estimator="KDE-ECE", norm="L1", edges="triweight kernel reflected at 0 and 1")
    return Result(value, about, None, {"bandwidth": width})
