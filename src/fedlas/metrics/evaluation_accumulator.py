"""All metrics of one set of predictions, from one pass over it.

A table of 50,000 x 1,000 probabilities is large and its metrics are small. An `EvaluationAccumulator` takes predictions
batch by batch and keeps a few numbers per sample (confidence, correctness, log(1 - confidence), and the columns that
metrics of all classes ask for) and one histogram per class. Every metric of the registry is computed from those. Only
the interval of the class-wise ECE needs the probabilities themselves, which are kept up to `MAX_PROBS`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedlas.metrics.accumulators import MAXIMA, sums_of
from fedlas.metrics.base import AbstractBinned, AbstractMean, AbstractMetric, EachSample, Resampling
from fedlas.metrics.bin_sums import SUMS, Bins, exact
from fedlas.metrics.binning import Binning, Histogram, histogram_of
from fedlas.metrics.inputs import Pairs, Rows, pairs, rows
from fedlas.metrics.intervals.methods import bootstrap
from fedlas.metrics.paired import check_draws, paired_method
from fedlas.metrics.registry import all_metrics, default_comparison_metrics
from fedlas.metrics.result import Comparison, Definition, Result
from fedlas.predictions import AnyPredictions, Predictions

MAX_PROBS = 20_000_000  # number of probabilities up to which an evaluation bootstraps class-wise errors


class EvaluationAccumulator:
    """Accumulates all metrics of one set of predictions.

    Args:
        bins: number of bins of calibration errors.
    """

    def __init__(self, bins: int = 15) -> None:
        self.binning = Binning(bins)
        self.class_bins: Bins | None = None
        self.metrics = all_metrics()
        self._definitions: list[Definition] = []
        self._parts: list[dict[str, Tensor]] = []
        self._tables: list[tuple[Tensor, Tensor]] | None = []  # probabilities and labels; None if they are too many
        self._top: Pairs | None = None

    def update(self, part: AnyPredictions) -> None:
        """Add predictions."""
        self._top = None
        top = pairs(part, ranked=True)
        columns = {"confidence": top.confidence, "correct": top.correct}
        if top.log_uncertainty is not None:
            columns["log_uncertainty"] = top.log_uncertainty
        self._definitions.append(top.definition)
        if isinstance(part, Predictions):
            table = rows(part)
            self._keep_table(table.probs, table.labels)
            class_bins = self.binning.fill_classes(table.probs, table.labels)
            self.class_bins = class_bins if self.class_bins is None else self.class_bins + class_bins
            for metric in self.metrics.values():
                if isinstance(metric, AbstractMean) and _is_included(metric, table):
                    columns |= metric.columns(table)
        self._parts.append(columns)

    def _keep_table(self, probs: Tensor, labels: Tensor) -> None:
        if self._tables is not None:
            self._tables.append((probs, labels))
            if sum(table.numel() for table, _ in self._tables) > MAX_PROBS:
                self._tables = None

    def columns(self) -> dict[str, Tensor]:
        """Return the columns of all samples; values without dimensions are added up."""
        return {name: self._column(name) for name in self._parts[0]}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the stored columns: a few numbers per sample and one histogram per class."""
        columns = {name: column for name, column in self.columns().items() if column.ndim}
        if self.class_bins is not None:
            columns |= {f"class_{name}": getattr(self.class_bins, name) for name in SUMS}
        return {name: column.cpu() for name, column in columns.items()}

    @classmethod
    def from_state_dict(
        cls, columns: Mapping[str, Tensor], split: str | None = None, bins: int = 15
    ) -> "EvaluationAccumulator":
        """Return an accumulator with a saved state; how many losses were floored is no longer known."""
        accumulator = cls(bins)
        definition = pairs(columns["confidence"], columns["correct"], "confidence").definition
        accumulator._definitions.append(replace(definition, scope="top-label", split=split))
        samples = len(columns["confidence"])
        accumulator._tables = None
        accumulator._parts.append(
            {n: column for n, column in columns.items() if not n.startswith("class_") and len(column) == samples}
        )
        if "class_counts" in columns:
            counts, confidence, correct = (columns[f"class_{name}"] for name in SUMS)
            edges = accumulator.binning.edges(columns["confidence"][:0])
            accumulator.class_bins = Bins(edges, counts, confidence, correct, samples, accumulator.binning.rule)
        return accumulator

    def histograms(self) -> dict[str, Bins]:
        """Return the bins of the top label, of equal width and of equal mass, for reliability diagrams."""
        binnings = {"width": self.binning, "mass": replace(self.binning, kind="mass")}
        return {name: histogram_of(self.top, binning).bins.cpu() for name, binning in binnings.items()}

    def compute(self, how: Resampling | None = None) -> dict[str, Result]:
        """Compute every metric.

        Args:
            how: how to compute intervals, of metrics for which a method with known coverage exists; None for none.
        """
        columns = self.columns()
        sums = sums_of(columns)
        results = {}
        for name, metric in self.metrics.items():
            result = None
            if isinstance(metric, AbstractMean):
                result = self._of_columns(metric, columns, sums, how)
            elif not metric.needs_all_classes:
                result = _of_top_labels(metric, self.top, self.binning.bins, how)
            elif isinstance(metric, AbstractBinned):
                result = self._of_class_bins(metric, how)
            if result is not None:
                results[name] = result
        return results

    def compare(
        self,
        other: "EvaluationAccumulator",
        first_results: Mapping[str, Result],
        second_results: Mapping[str, Result],
        how: Resampling,
    ) -> dict[str, Comparison]:
        """Compare two sets of predictions of the same samples by paired tests.

        Args:
            other: the second set of predictions.
            first_results: results of this accumulator.
            second_results: results of the other one.
            how: confidence level, resamples and seed; with fewer resamples than the level needs there are no tests.
        """
        try:
            check_draws(how)
        except ValueError:
            return {}
        comparisons = {}
        columns = self.columns(), other.columns()
        for name, metric in default_comparison_metrics().items():
            if name not in first_results or name not in second_results:
                continue
            method = paired_method(metric)
            if metric.is_binned:
                test = method.compare(metric, self.top, other.top, None, how, bins=self.binning.bins)
                comparisons[name] = replace(test, first=first_results[name], second=second_results[name])
                continue
            first, second = (
                EachSample(result[name], exact(accumulator._values(metric, own_columns)))
                for accumulator, result, own_columns in zip(
                    (self, other), (first_results, second_results), columns, strict=True
                )
            )
            comparisons[name] = method.compare_means(metric, first, second, how)
        return comparisons

    def _values(self, metric: AbstractMetric, columns: Mapping[str, Tensor]) -> Tensor:
        return columns[metric.column] if isinstance(metric, AbstractMean) else metric.contributions(self.top)

    def _column(self, name: str) -> Tensor:
        parts = [part[name] for part in self._parts]
        if parts[0].ndim:
            return torch.cat(parts)
        return torch.stack(parts).amax() if name in MAXIMA else torch.stack(parts).sum()

    @property
    def top(self) -> Pairs:
        """The confidence of the most probable class of each sample, and whether it was correct."""
        if self._top is None:
            confidence, correct = self._column("confidence"), self._column("correct")
            uncertainty = self._column("log_uncertainty") if "log_uncertainty" in self._parts[0] else None
            definition = replace(self._definitions[0], n=len(confidence))
            self._top = Pairs(confidence, correct, definition, uncertainty)
        return self._top

    @property
    def _class_definition(self) -> Definition:
        """Definition of results of the probabilities of all classes."""
        scope = (self._definitions[0].scope or "").replace("top-label", "class-wise")
        return replace(self._definitions[0], scope=scope, n=len(self.top.confidence))

    def _of_columns(
        self, metric: AbstractMean, columns: Mapping[str, Tensor], sums: Mapping[str, float], how: Resampling | None
    ) -> Result | None:
        """Compute a mean from its columns, if they were stored."""
        if metric.column not in columns:
            return None
        result = metric.of_sums(sums, self.class_bins, self._class_definition)
        if how is None or metric.interval is None:
            return result
        return metric.interval.of_mean(result, exact(columns[metric.column]), how)

    def _of_class_bins(self, metric: AbstractBinned, how: Resampling | None) -> Result | None:
        """Compute a binned metric of all classes; its interval needs the probabilities."""
        if self.class_bins is None:
            return None
        definition = self._class_definition
        result = metric.of_bins(Histogram(self.class_bins, self.binning.define(definition)))
        if how is None or metric.interval is None or not self._tables:
            return result
        probs, labels = (torch.cat(parts) for parts in zip(*self._tables, strict=True))
        measured = metric.interval.measure(metric, Rows(probs, labels, definition), None, how, bins=self.binning.bins)
        assert measured.interval is not None
        return result.with_interval(measured.interval, noise_floor=measured.details["noise_floor"])


def _is_included(metric: AbstractMean, table: Rows) -> bool:
    """Return whether a metric is defined for these labels, and is informative for this number of classes."""
    soft = table.labels.ndim == 2
    return not (metric.needs_hard_labels and soft) and table.scores.shape[1] >= metric.fewest_classes


def _of_top_labels(metric: AbstractMetric, samples: Pairs, bins: int, how: Resampling | None) -> Result | None:
    """Compute a metric of top-label confidences, with its interval where that has known coverage."""
    if metric.needs_hard_labels and samples.correct.dtype != torch.bool:
        return None
    options: dict[str, Any] = {"bins": bins} if metric.is_binned else {}
    if how is None or metric.interval is None or not metric.interval.is_applicable(samples):
        return metric(samples, **options)
    return bootstrap(metric, samples, level=how.level, resamples=how.resamples, seed=how.seed, **options)
