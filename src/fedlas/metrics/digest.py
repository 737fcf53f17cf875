"""What the metrics of one set of predictions are made of, from one reading of it.

A table of 50,000 x 1,000 numbers is large and its metrics are small. A `Digest` takes predictions part by part, while
each part is in the cache, and keeps a few numbers a sample (confidence, correctness, log(1 - confidence), log-loss,
squared error, whether the label is among the first five) and one histogram per class. Every metric is read from those.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from fedlas.metrics import calibration, scoring, selective, significance, smooth
from fedlas.metrics.bins import Bins, exact
from fedlas.metrics.comparison import Comparison, EachSample, check_draws, paired_gaps, paired_means
from fedlas.metrics.interval import bootstrap, check_level, has_area_interval, mean_with_interval
from fedlas.metrics.presets import Binning
from fedlas.metrics.result import Definition, Result
from fedlas.metrics.samples import Pairs, pairs
from fedlas.predictions import AnyPredictions, Predictions

TOP = 5
COLUMNS = ("confidence", "correct", "log_uncertainty", "loss", "squared_error", "label_square", "among_first")
SUMS = ("counts", "confidence_sum", "correct_sum")
PAIRED_RESAMPLES = 2_000


class Intervals:
    """How intervals are to be made.

    Args:
        level: how often they should hold the true value.
        resamples: how many resamples to draw, the method's own number by default.
        seed: of the random numbers.
    """

    def __init__(self, level: float = 0.95, resamples: int | None = None, seed: int = 0) -> None:
        check_level(level, resamples)
        self.level, self.resamples, self.seed = level, resamples, seed

    def of(self, metric: Callable[..., Any], found: Pairs, **options: Any) -> Any:
        """Measure a metric of pairs with its interval."""
        return bootstrap(metric, found, level=self.level, resamples=self.resamples, seed=self.seed, **options)

    def of_mean(self, found: Result, values: Float64[Tensor, " n"]) -> Result:
        """Give a mean over samples its interval."""
        return mean_with_interval(found, values, self.level, self.resamples, np.random.default_rng(self.seed))


class Digest:
    """Keeps what metrics need while predictions pass by.

    Args:
        bins: how many bins calibration errors have.
    """

    def __init__(self, bins: int = 15) -> None:
        self.way = Binning(bins)
        self.classes: Bins | None = None
        self.floor, self.floored = 0.0, 0
        self._about: list[Definition] = []
        self._parts: list[dict[str, Tensor]] = []

    def take(self, part: AnyPredictions) -> None:
        """Take in some predictions."""
        found = pairs(part, ranked=True)
        kept = {"confidence": found.confidence, "correct": found.correct}
        if found.log_uncertainty is not None:
            kept["log_uncertainty"] = found.log_uncertainty
        self._about.append(found.about)
        if isinstance(part, Predictions):
            probs, labels = part.probs, part.labels
            given = part.given_probs
            losses = (
                scoring.logit_losses(part.logits, labels)
                if given is None
                else scoring.prob_losses(given, labels, part.decimals)
            )
            filled = self.way.fill_classes(probs, labels)
            self.classes = filled if self.classes is None else self.classes + filled
            self.floor, self.floored = losses.floor, self.floored + losses.floored
            kept["loss"] = losses.values
            kept["squared_error"] = scoring.squared_errors(probs, labels)
            kept["label_square"] = scoring.label_squares(labels)
            if labels.ndim == 1 and probs.shape[1] > TOP:
                kept["among_first"] = scoring.label_ranks(probs, labels) < TOP
        self._parts.append(kept)

    def columns(self) -> dict[str, Tensor]:
        """Give what is kept, a few numbers a sample and one histogram per class; `from_columns` takes it back."""
        kept = {name: self._column(name) for name in self._parts[0]}
        if self.classes is not None:
            kept |= {f"class_{name}": getattr(self.classes, name) for name in SUMS}
        return {name: one.cpu() for name, one in kept.items()}

    @classmethod
    def from_columns(cls, columns: Mapping[str, Tensor], split: str | None = None, bins: int = 15) -> "Digest":
        """Make a digest of what another one gave away; how many losses were floored is not known any more."""
        made = cls(bins)
        about = pairs(columns["confidence"], columns["correct"], "confidence").about
        made._about.append(replace(about, scope="top-label", split=split))
        made._parts.append({name: columns[name] for name in COLUMNS if name in columns})
        if "class_counts" in columns:
            counts, confidence, correct = (columns[f"class_{name}"] for name in SUMS)
            edges = made.way.edges(columns["confidence"][:0])
            made.classes = Bins(edges, counts, confidence, correct, len(columns["confidence"]), made.way.rule)
        return made

    def histograms(self, top: Pairs | None = None) -> dict[str, Bins]:
        """Return the bins of the top label, of equal width and of equal mass, for reliability diagrams.

        Args:
            top: the pairs of this digest; given again, what `results` has computed of them is used.
        """
        found = self.top if top is None else top
        ways = {"width": self.way, "mass": replace(self.way, kind="mass")}
        return {name: calibration.histogram_of(found, way).bins.cpu() for name, way in ways.items()}

    def results(self, intervals: Intervals | None = None, top: Pairs | None = None) -> dict[str, Result]:
        """Compute every metric.

        Args:
            intervals: how to compute intervals, of metrics for which a sound method exists; None for none.
            top: the pairs of this digest, which keep what is computed of them.
        """
        return _of_pairs(self.top if top is None else top, self.way.bins, intervals) | self._of_rows(intervals)

    def compare(
        self, other: "Digest", ours: Mapping[str, Result], theirs: Mapping[str, Result], intervals: Intervals
    ) -> dict[str, Comparison]:
        """Compare two digests of the same samples by paired tests of accuracy, ECE and NLL.

        Args:
            other: digest of the second set of predictions.
            ours: results of this digest.
            theirs: results of the other digest.
            intervals: confidence level, resamples and seed; with fewer resamples than the level needs there are no
                tests.
        """
        resamples = intervals.resamples or PAIRED_RESAMPLES
        options: dict[str, Any] = {"level": intervals.level, "resamples": resamples, "seed": intervals.seed}
        try:
            check_draws(intervals.level, resamples)
        except ValueError:
            return {}
        paired = paired_gaps(calibration.ece, self.top, other.top, bins=self.way.bins, **options)
        found = {"ece": replace(paired, first=ours["ece"], second=theirs["ece"])}
        means: dict[str, tuple[Callable[..., Result], str]] = {"accuracy": (scoring.accuracy, "correct")}
        means |= {} if self.classes is None else {"nll": (scoring.nll, "loss")}
        for name, (metric, column) in means.items():
            each = [
                EachSample(ours[name], exact(self._column(column))),
                EachSample(theirs[name], exact(other._column(column))),
            ]
            test = paired_means(metric, *each, **options)
            # With labels of probability zero our NLL is a lower bound, which theirs may exceed without being worse.
            if not (name == "nll" and self.floored and test.better == "first"):
                found[name] = test
        return found

    def _column(self, name: str) -> Tensor:
        return torch.cat([part[name] for part in self._parts])

    @property
    def top(self) -> Pairs:
        """The confidence of the likeliest class of each sample, and whether it was correct."""
        confidence, name = self._column("confidence"), "log_uncertainty"
        uncertainty = self._column(name) if name in self._parts[0] else None
        return Pairs(confidence, self._column("correct"), replace(self._about[0], n=len(confidence)), uncertainty)

    def _of_rows(self, intervals: Intervals | None) -> dict[str, Result]:
        """Compute every metric that asks for the probabilities of all classes."""
        if self.classes is None:
            return {}
        losses, squares, lengths = map(self._column, ("loss", "squared_error", "label_square"))
        scope = (self._about[0].scope or "").replace("top-label", "class-wise")
        about = replace(self._about[0], scope=scope, n=len(losses))
        nll = scoring.nll_result(float(losses.mean()), self.floored, self.floor, about)
        brier = scoring.brier_result(float(squares.sum()), float(lengths.sum()), self.classes, about)
        if intervals is not None:
            nll, brier = intervals.of_mean(nll, losses), intervals.of_mean(brier, squares)
        every_class = calibration.Histogram(self.classes, self.way.define(about))
        found = {"nll": nll, "brier": brier, "classwise_ece": calibration.l1_error(every_class, "class-wise ECE")}
        if "among_first" in self._parts[0]:
            named = replace(about, estimator=f"top-{TOP} accuracy", scope=f"top-{TOP}")
            found[f"top_{TOP}"] = Result(float(exact(self._column("among_first")).mean()), named)
        return found


def _of_pairs(found: Pairs, bins: int, intervals: Intervals | None) -> dict[str, Result]:
    """Compute every metric that asks for the confidence and correctness of the top class alone."""

    def measured(metric: Callable[..., Any], **options: Any) -> Any:
        return metric(found, **options) if intervals is None else intervals.of(metric, found, **options)

    over, under = measured(calibration.over_under, bins=bins)
    results: dict[str, Result] = {
        "accuracy": measured(scoring.accuracy),
        "ece": measured(calibration.ece, bins=bins),
        "aece": measured(calibration.aece, bins=bins),
        "over_ece": over,
        "under_ece": under,
        "signed_ece": measured(calibration.signed_ece, bins=bins),
        "mce": calibration.mce(found, bins=bins),
        "rms_error": measured(calibration.rms_error, bins=bins),
        "smooth_ece": smooth.smooth_ece(found),
    }
    areas = {"aurc": selective.aurc, "e_aurc": selective.e_aurc, "augrc": selective.augrc}
    enough = has_area_interval(found)
    results |= {name: measured(area) if enough else area(found) for name, area in areas.items()}
    if found.correct.dtype == torch.bool:
        # Soft labels vary less than hard ones, and these four count on how much hard ones vary.
        results["debiased_l2"] = measured(calibration.debiased_l2, bins=bins)
        results["ks_test"] = significance.ks_test(found)
        results["kuiper_test"] = significance.kuiper_test(found)
        results["spiegelhalter_test"] = significance.spiegelhalter_test(found)
    return results
