"""Binned calibration errors.

With w_b the fraction of all n samples in bin b, and gap_b its mean confidence minus its accuracy:

    ECE         sum_b w_b |gap_b|            over equally wide bins of the top-label confidence
    AECE        the same over bins with equally many samples
    O-ECE       sum_b w_b max(gap_b, 0)      over-confidence
    U-ECE       sum_b w_b max(-gap_b, 0)     under-confidence;  O + U = ECE
    signed ECE  sum_b w_b gap_b = O - U      mean confidence minus accuracy
    MCE         max_b |gap_b|
    Lp error    (sum_b w_b |gap_b|^p)^(1/p)  RMS error for p = 2
    debiased    (sum_b w_b (gap_b^2 - acc_b (1 - acc_b) / (n_b - 1)))^(1/2), 0 if the sum is negative

Class-wise errors compare the probability of each class with its frequency, and average over classes
(before the root is taken; MCE takes the maximum). A class without samples counts like any other.
"""

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float64
from torch import Tensor

from fedlas.errors import UserError
from fedlas.metrics.accumulators import AbstractHistogram
from fedlas.metrics.base import AbstractBinned, AbstractFreelyBinned
from fedlas.metrics.binning import Compat, Histogram, Kind, histogram
from fedlas.metrics.inputs import MetricInput, Scope
from fedlas.metrics.intervals.methods import GapInversion, MeanBootstrap
from fedlas.metrics.intervals.resampling import AbstractGaps, Bounds
from fedlas.metrics.paired import PairedGaps
from fedlas.metrics.result import Result
from fedlas.predictions.arrays import Array


class AbstractECE(AbstractBinned):
    """Mean gap between confidence and accuracy over bins, whose kind is part of the definition."""

    in_summary = True
    is_logged = True
    interval = GapInversion()
    paired = PairedGaps()

    def __call__(
        self,
        probs: MetricInput,
        labels: Array | None = None,
        bins: int = 15,
        *,
        scope: Scope = "top-label",
        compat: Compat | None = None,
        ignore_index: int | None = None,
    ) -> Result:
        """Compute the metric.

        Args:
            probs: predictions, or rows of class probabilities.
            labels: class numbers, or soft labels; not needed with predictions.
            bins: number of bins.
            scope: which confidences are used: "top-label", "class-wise", "positive" (binary) or "multi-label".
            compat: name of another package or code whose binning rules are followed, to reproduce its values.
            ignore_index: label of samples that are ignored.
        """
        return self.measure(probs, labels, bins, scope=scope, compat=compat, ignore_index=ignore_index)

    def of_bins(self, histogram: Histogram) -> Result:
        return l1_error(histogram, self.title)


class ECE(AbstractECE):
    """Expected calibration error: mean gap between confidence and accuracy over bins of equal width."""

    name = "ece"
    title = "ECE"
    explanation = (
        "Absolute difference of confidence and accuracy, averaged over bins of confidence. 0 is perfect; a "
        "finite sample of a calibrated model has an ECE above 0, its noise floor."
    )
    is_compared = True
    order = 20


class AECE(AbstractECE):
    """Adaptive ECE: mean gap between confidence and accuracy over bins with equally many samples."""

    name = "aece"
    title = "AECE"
    explanation = "The ECE over bins with equally many samples."
    binning = "mass"
    order = 30


class ClasswiseECE(AbstractBinned):
    """Calibration error of the probability of each class, averaged over all classes.

    Of two classes, `details` has the mean probability of the second (`mean_prob`) and its frequency (`rate`).
    """

    name = "classwise_ece"
    title = "class-wise ECE"
    explanation = "The ECE of the probability of each class, averaged over all classes."
    needs_all_classes = True
    in_summary = True
    order = 60
    interval = GapInversion()

    def __call__(
        self,
        probs: MetricInput,
        labels: Array | None = None,
        bins: int = 15,
        *,
        binning: Kind = "width",
        compat: Compat | None = None,
        ignore_index: int | None = None,
    ) -> Result:
        """Compute the metric; see `AbstractBinned`."""
        options: dict[str, Any] = {"binning": binning, "compat": compat, "ignore_index": ignore_index}
        return self.measure(probs, labels, bins, scope="class-wise", **options)

    def of_bins(self, histogram: Histogram) -> Result:
        result, bins = l1_error(histogram, self.title), histogram.bins
        if len(bins.counts) != 2:
            return result
        mean, rate = (float(sums[1].sum()) / bins.n for sums in (bins.confidence_sum, bins.correct_sum))
        return result.with_details(mean_prob=mean, rate=rate)

    def gaps(self, probs: MetricInput, labels: Array | None = None, bins: int = 15, **options: Any) -> AbstractGaps:
        return super().gaps(probs, labels, bins, **options, scope="class-wise")

    def accumulator(self, bins: int = 15, **options: Any) -> AbstractHistogram:
        return super().accumulator(bins, **options, scope="class-wise")


class AbstractSide(AbstractFreelyBinned):
    """The part of the ECE from bins whose gap has one sign."""

    sign: ClassVar[int]
    side: ClassVar[str]
    in_summary = True

    def of_bins(self, histogram: Histogram) -> Result:
        per_class = (self.sign * histogram.bins.weighted_gap).clamp_min(0).sum(-1)
        return _result(histogram, self.title, f"L1, {self.side} bins", float(per_class.mean()), per_class)


class OverECE(AbstractSide):
    """Over-confidence: the part of the ECE from bins whose confidence is above their accuracy."""

    name = "over_ece"
    title = "O-ECE"
    explanation = "The part of the ECE from bins where confidence is above accuracy."
    sign = 1
    side = "over-confident"
    is_logged = True
    order = 40
    interval = GapInversion("over")


class UnderECE(AbstractSide):
    """Under-confidence: the part of the ECE from bins whose confidence is below their accuracy."""

    name = "under_ece"
    title = "U-ECE"
    explanation = "The part of the ECE from bins where confidence is below accuracy."
    sign = -1
    side = "under-confident"
    is_logged = True
    order = 50
    interval = GapInversion("under")


class SignedECE(AbstractFreelyBinned):
    """Over-confidence minus under-confidence: mean confidence minus accuracy."""

    name = "signed_ece"
    title = "signed ECE"
    explanation = "Mean confidence minus accuracy: positive for over-confidence, negative for under-confidence."
    higher_is_better = None
    order = 110
    interval = MeanBootstrap(Bounds(-1.0, 0.0, 1.0))

    def of_bins(self, histogram: Histogram) -> Result:
        per_class = histogram.bins.weighted_gap.sum(-1)
        return _result(histogram, self.title, "signed sum", float(per_class.mean()), per_class)

    def contributions(self, probs: MetricInput, labels: Array | None = None, **options: Any) -> Tensor:
        return torch.from_numpy(self.gaps(probs, labels, **options).sample_gaps)


class MCE(AbstractFreelyBinned):
    """Maximum calibration error: the largest gap between confidence and accuracy of any bin."""

    name = "mce"
    title = "MCE"
    explanation = "The largest absolute difference of confidence and accuracy in any bin, however few samples it has."
    order = 120

    def of_bins(self, histogram: Histogram) -> Result:
        per_class = histogram.bins.gap.abs().amax(-1)
        return _result(histogram, self.title, "maximum", float(per_class.max()), per_class)


class RMSError(AbstractFreelyBinned):
    """Root of the mean squared gap between confidence and accuracy."""

    name = "rms_error"
    title = "RMS calibration error"
    explanation = "Root of the mean squared difference of confidence and accuracy over bins."
    order = 130
    interval = GapInversion("rms")

    def of_bins(self, histogram: Histogram) -> Result:
        return _power_error(histogram, 2)


class DebiasedL2(AbstractFreelyBinned):
    """RMS gap without the bias of finite samples (Kumar et al., 2019)."""

    name = "debiased_l2"
    title = "debiased L2 calibration error"
    explanation = "The RMS calibration error without the bias from finite samples."
    binning = "mass"
    needs_hard_labels = True
    order = 180
    interval = GapInversion("rms")

    def of_bins(self, histogram: Histogram) -> Result:
        if "soft" in (histogram.definition.scope or ""):
            raise UserError("the debiased L2 error subtracts the variance of hard labels; these labels are soft")
        bins = histogram.bins
        variance = bins.accuracy * (1 - bins.accuracy) / (bins.counts - 1).clamp_min(1)
        squares = (bins.gap**2 - variance) * (bins.counts >= 2)
        per_class = (squares * bins.fraction).sum(-1).clamp_min(0)
        return _result(histogram, self.title, "L2, debiased", float(per_class.mean()) ** 0.5, per_class**0.5)


ece, aece, classwise_ece = ECE(), AECE(), ClasswiseECE()
over_ece, under_ece, signed_ece = OverECE(), UnderECE(), SignedECE()
mce, rms_error, debiased_l2 = MCE(), RMSError(), DebiasedL2()


def lp_error(probs: MetricInput, labels: Array | None = None, bins: int = 15, p: float = 2, **options: Any) -> Result:
    """Return the p-th root of the mean p-th power of the gaps; p = 1 is the ECE, p = 2 the RMS error.

    Args:
        probs: predictions, or rows of class probabilities.
        labels: class numbers, or soft labels; not needed with predictions.
        bins: number of bins.
        p: the power, at least 1.
        options: options of `histogram`.
    """
    return _power_error(histogram(probs, labels, bins, **options), p)


def _power_error(histogram: Histogram, p: float) -> Result:
    if not 1 <= p < math.inf:
        raise UserError(f"p is {p}; it must be finite and at least 1; the largest gap is mce")
    per_class = (histogram.bins.fraction * histogram.bins.gap.abs() ** p).sum(-1)
    name = "RMS calibration error" if p == 2 else f"L{p:g} calibration error"
    return _result(histogram, name, f"L{p:g}", float(per_class.mean()) ** (1 / p), per_class ** (1 / p))


def l1_error(histogram: Histogram, name: str) -> Result:
    """Return the sum of the absolute gaps of all bins."""
    per_class = histogram.bins.weighted_gap.abs().sum(-1)
    return _result(histogram, name, "L1", float(per_class.mean()), per_class)


def _result(histogram: Histogram, name: str, norm: str, value: float, per_class: Float64[Tensor, "*classes"]) -> Result:
    details = {"filled_bins": int((histogram.bins.counts > 0).sum())}
    parts = {"per_class": tuple(per_class.tolist())} if per_class.ndim else {}
    return Result(value, replace(histogram.definition, estimator=name, norm=norm), details=details | parts)
