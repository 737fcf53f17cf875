"""Calibration errors from bins: how far confidence is from accuracy.

With w_b the share of all n samples that fall into bin b, and gap_b its mean confidence minus its accuracy:

    ECE         sum_b w_b |gap_b|            over equally wide bins of the top-label confidence
    AECE        the same over bins that hold equally many samples
    O-ECE       sum_b w_b max(gap_b, 0)      over-confidence
    U-ECE       sum_b w_b max(-gap_b, 0)     under-confidence;  O + U = ECE
    signed ECE  sum_b w_b gap_b = O - U      mean confidence minus accuracy
    MCE         max_b |gap_b|
    Lp error    (sum_b w_b |gap_b|^p)^(1/p)  RMS error for p = 2
    debiased    (sum_b w_b (gap_b^2 - acc_b (1 - acc_b) / (n_b - 1)))^(1/2), the root of 0 where the sum is negative

Class-wise errors compare the probability of each class with how often it is the label, and average over classes
(before the root is taken; MCE takes the maximum). A class without samples counts like any other.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Unpack

from jaxtyping import Float64
from torch import Tensor

from fedlas.errors import UserError
from fedlas.metrics.bins import Bins
from fedlas.metrics.presets import Binning, Compat, Kind
from fedlas.metrics.result import Definition, Result
from fedlas.metrics.samples import Given, Pairs, Rows, Scope, Which, pairs, rows
from fedlas.predictions import Array, as_tensor

EVERY_CLASS: set[Scope] = {"class-wise", "multi-label"}


class Histogram(NamedTuple):
    """Filled bins, and what a result has to know about them."""

    bins: Bins
    about: Definition


class Common(Which, total=False):
    """What every binned error takes besides the number of bins; `histogram` explains it."""

    compat: Compat | None


class Options(Common, total=False):
    """The same, for errors that exist for bins of equal width and of equal mass."""

    binning: Kind


def histogram(
    probs: Given,
    labels: Array | None = None,
    bins: int = 15,
    *,
    binning: Kind = "width",
    scope: Scope = "top-label",
    compat: Compat | None = None,
    ignore_index: int | None = None,
) -> Histogram:
    """Sort predictions into bins; every error of this module is read from them.

    Args:
        probs: predictions, or rows of class probabilities.
        labels: class numbers, or soft labels; not needed with predictions.
        bins: how many.
        binning: "width" for bins of equal width, "mass" for bins that hold equally many samples.
        scope: what is compared: "top-label", "class-wise", "positive" (binary) or "multi-label".
        compat: follow the rules of other code, to reproduce its numbers.
        ignore_index: label of samples that do not count.
    """
    read = rows if scope in EVERY_CLASS else pairs
    return histogram_of(read(probs, labels, scope, ignore_index), Binning(bins, binning, compat))


def histogram_of(found: Pairs | Rows, way: Binning) -> Histogram:
    """Sort samples that are already checked into bins."""
    if isinstance(found, Rows):
        return Histogram(way.fill_classes(found.probs, found.labels), way.define(found.about))
    filled = found.once(("bins", way), lambda: way.fill(found.confidence, found.correct))
    return Histogram(filled, way.define(found.about))


def ece(probs: Given, labels: Array | None = None, bins: int = 15, **options: Unpack[Common]) -> Result:
    """Measure by how much confidence and accuracy differ, averaged over equally wide bins of confidence."""
    return l1_error(histogram(probs, labels, bins, **options), "ECE")


def aece(probs: Given, labels: Array | None = None, bins: int = 15, **options: Unpack[Common]) -> Result:
    """Measure by how much confidence and accuracy differ, averaged over bins that hold equally many samples."""
    return l1_error(histogram(probs, labels, bins, binning="mass", **options), "AECE")


def classwise_ece(
    probs: Given,
    labels: Array | None = None,
    bins: int = 15,
    *,
    binning: Kind = "width",
    compat: Compat | None = None,
    ignore_index: int | None = None,
) -> Result:
    """Measure the calibration error of each class's probability, averaged over all classes."""
    filled = histogram(
        probs, labels, bins, binning=binning, scope="class-wise", compat=compat, ignore_index=ignore_index
    )
    return l1_error(filled, "class-wise ECE")


def over_under(
    probs: Given, labels: Array | None = None, bins: int = 15, **options: Unpack[Options]
) -> tuple[Result, Result]:
    """Split the calibration error into over-confidence and under-confidence; the two add up to it."""
    filled = histogram(probs, labels, bins, **options)
    return over(filled), under(filled)


def signed_ece(probs: Given, labels: Array | None = None, bins: int = 15, **options: Unpack[Options]) -> Result:
    """Measure over-confidence minus under-confidence: positive when the model promises more than it keeps."""
    return signed(histogram(probs, labels, bins, **options))


def mce(probs: Given, labels: Array | None = None, bins: int = 15, **options: Unpack[Options]) -> Result:
    """Measure the largest gap between confidence and accuracy of any bin."""
    return largest(histogram(probs, labels, bins, **options))


def rms_error(probs: Given, labels: Array | None = None, bins: int = 15, **options: Unpack[Options]) -> Result:
    """Measure the root of the mean squared gap between confidence and accuracy."""
    return power_error(histogram(probs, labels, bins, **options), 2)


def lp_error(
    probs: Given, labels: Array | None = None, bins: int = 15, p: float = 2, **options: Unpack[Options]
) -> Result:
    """Measure the p-th root of the mean p-th power of the gaps; p = 1 is the ECE, p = 2 the RMS error."""
    return power_error(histogram(probs, labels, bins, **options), p)


def debiased_l2(
    probs: Given,
    labels: Array | None = None,
    bins: int = 15,
    binning: Kind = "mass",
    **options: Unpack[Common],
) -> Result:
    """Measure the RMS gap less the part that chance alone would produce in bins of this size (Kumar et al., 2019)."""
    filled = histogram(probs, labels, bins, binning=binning, **options)
    if "soft" in (filled.about.scope or ""):
        raise UserError("the debiased L2 error subtracts the variance of hard labels; these labels are soft")
    found = filled.bins
    chance = found.accuracy * (1 - found.accuracy) / (found.counts - 1).clamp_min(1)
    squares = (found.gap**2 - chance) * (found.counts >= 2)
    each = (squares * found.share).sum(-1).clamp_min(0)
    return _result(filled, "debiased L2 calibration error", "L2, debiased", float(each.mean()) ** 0.5, each**0.5)


def power_error(filled: Histogram, p: float) -> Result:
    """Take the p-th root of the mean p-th power of the gaps."""
    if not 1 <= p < math.inf:
        raise UserError(f"p is {p}; at least 1 is needed, and for the largest gap take mce")
    each = (filled.bins.share * filled.bins.gap.abs() ** p).sum(-1)
    name = "RMS calibration error" if p == 2 else f"L{p:g} calibration error"
    return _result(filled, name, f"L{p:g}", float(each.mean()) ** (1 / p), each ** (1 / p))


def per_image(
    metric: Callable[..., Result],
    probs: Array,
    labels: Array,
    *,
    ignore_index: int | None = None,
    **options: Any,
) -> Result:
    """Measure a metric on each image of a stack of maps, and average; images without a label that counts are left out.

    Args:
        metric: any metric of one value, such as `ece`.
        probs: class probabilities of shape `(n, classes, height, width)`.
        labels: class numbers of shape `(n, height, width)`.
        ignore_index: label of positions that do not count.
        options: passed on to the metric.
    """
    maps, truth = as_tensor(probs, "probs"), as_tensor(labels, "labels")
    if len(maps) != len(truth):
        raise UserError(f"labels has {len(truth)} rows for {len(maps)} samples")
    counted = [i for i, one in enumerate(truth) if ignore_index is None or bool((one != ignore_index).any())]
    if not counted:
        raise UserError("no image has a label that counts")
    found = [metric(maps[i : i + 1], truth[i : i + 1], ignore_index=ignore_index, **options) for i in counted]
    values = tuple(float(one) for one in found)
    first = found[0].definition
    about = replace(first, scope=f"{first.scope}, mean over images", n=sum(one.definition.n for one in found))
    details = {"images": len(values), "left_out": len(maps) - len(values), "values": values}
    return Result(sum(values) / len(values), about, None, details)


def l1_error(filled: Histogram, name: str) -> Result:
    """Add up the absolute gaps of all bins."""
    each = filled.bins.weighted_gap.abs().sum(-1)
    return _result(filled, name, "L1", float(each.mean()), each)


def over(filled: Histogram) -> Result:
    """Add up the gaps of the over-confident bins."""
    each = filled.bins.weighted_gap.clamp_min(0).sum(-1)
    return _result(filled, "O-ECE", "L1, over-confident bins", float(each.mean()), each)


def under(filled: Histogram) -> Result:
    """Add up the gaps of the under-confident bins."""
    each = (-filled.bins.weighted_gap).clamp_min(0).sum(-1)
    return _result(filled, "U-ECE", "L1, under-confident bins", float(each.mean()), each)


def signed(filled: Histogram) -> Result:
    """Add up the gaps of all bins with their signs."""
    each = filled.bins.weighted_gap.sum(-1)
    return _result(filled, "signed ECE", "signed sum", float(each.mean()), each)


def largest(filled: Histogram) -> Result:
    """Find the largest absolute gap of all bins."""
    each = filled.bins.gap.abs().amax(-1)
    return _result(filled, "MCE", "maximum", float(each.max()), each)


def _result(filled: Histogram, name: str, norm: str, value: float, each: Float64[Tensor, "*classes"]) -> Result:
    details = {"filled_bins": int((filled.bins.counts > 0).sum())}
    parts = {"per_class": tuple(each.tolist())} if each.ndim else {}
    return Result(value, replace(filled.about, estimator=name, norm=norm), details=details | parts)
