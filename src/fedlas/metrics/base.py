"""Base classes of metrics, and of the methods for their confidence intervals and paired comparisons.

A metric is an object that is called like a function, `ece(probs, labels)`. Its class defines how to compute its value,
its values per sample (if it is a mean over samples), the state of its accumulator, its confidence interval and its
paired comparisons. All lists of metrics come from `fedlas.metrics.registry`; to add a metric, add a class to a module
of this folder.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Unpack

import numpy as np
from jaxtyping import Float64
from torch import Tensor

from fedlas.errors import UserError, UserTypeError
from fedlas.metrics.accumulators import (
    AbstractAccumulator,
    AbstractHistogram,
    BinAccumulator,
    PairAccumulator,
    SumAccumulator,
    sums_of,
)
from fedlas.metrics.bin_sums import Bins
from fedlas.metrics.binning import EVERY_CLASS, Binning, Compat, Histogram, Kind, histogram, samples_of
from fedlas.metrics.inputs import MetricInput, Pairs, Rows, Scope, Which, binary_predictions, pairs, rows
from fedlas.metrics.intervals.gaps import gaps_of
from fedlas.metrics.intervals.resampling import AbstractGaps
from fedlas.metrics.result import Comparison, Definition, Result, check_level
from fedlas.predictions.arrays import Array


class Resampling:
    """Settings of confidence intervals and tests.

    Args:
        level: confidence level.
        resamples: number of bootstrap resamples; by default that of the method.
        seed: random seed; equal seeds give equal intervals.
    """

    def __init__(self, level: float = 0.95, resamples: int | None = None, seed: int = 0) -> None:
        check_level(level, resamples)
        if not 0 <= seed < 2**63:
            raise UserError(f"seed is {seed}; a whole number from 0 to 2**63 - 1 is needed")
        self.level, self.resamples, self.seed = level, resamples, seed

    def rng(self) -> np.random.Generator:
        """Return a new random generator."""
        return np.random.default_rng(self.seed)


class AbstractIntervalMethod(ABC):
    """A method for confidence intervals of a metric."""

    @abstractmethod
    def measure(
        self, metric: "AbstractMetric", probs: MetricInput, labels: Array | None, how: Resampling, **options: Any
    ) -> Result:
        """Compute a metric with its interval."""

    def is_applicable(self, samples: Pairs) -> bool:
        """Return whether there are enough samples for an interval with known coverage."""
        del samples
        return True

    def of_mean(self, result: Result, values: Float64[Tensor, " n"], how: Resampling) -> Result:
        """Add an interval to a mean, computed from its values per sample."""
        del values, how
        raise UserError(f"no interval with known coverage exists for {result.definition.estimator}")


class EachSample(NamedTuple):
    """A mean over samples, and its value per sample."""

    mean: Result
    values: Float64[Tensor, " n"]


class AbstractPairedMethod(ABC):
    """A method that compares one metric of two models on the same samples."""

    @abstractmethod
    def compare(
        self,
        metric: "AbstractMetric",
        first: MetricInput,
        second: MetricInput,
        labels: Array | None,
        how: Resampling,
        **options: Any,
    ) -> Comparison:
        """Compare two models; their samples must be in the same order."""

    def compare_means(
        self,
        metric: "AbstractMetric",
        first: EachSample,
        second: EachSample,
        how: Resampling,
    ) -> Comparison:
        """Compare two models by the metric's values per sample."""
        del first, second, how
        raise UserError(f"{metric.name} is not a mean over samples")


class AbstractMetric(ABC):
    """A metric of probabilities and labels.

    Attributes:
        name: name of the metric in Python, files and options.
        title: name of the metric in tables and figures.
        explanation: description of the metric in reports, in one sentence.
        higher_is_better: None if neither direction is better.
        unit: "fraction" is shown as percent, anything else unchanged.
        needs_all_classes: whether the probabilities of all classes are needed.
        is_binned: whether it has an option for the number of bins.
        needs_hard_labels: whether it is undefined for soft labels.
        in_summary: whether it has a column in summary tables.
        is_compared: whether reports compare models by it.
        is_logged: whether training and the integrations log it by default.
        order: position in lists of metrics.
        interval: method of its confidence interval; None if no method with known coverage exists.
        paired: method of paired comparisons; None if there is none.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    explanation: ClassVar[str] = ""
    higher_is_better: ClassVar[bool | None] = False
    unit: ClassVar[str] = "fraction"
    needs_all_classes: ClassVar[bool] = False
    is_binned: ClassVar[bool] = False
    needs_hard_labels: ClassVar[bool] = False
    in_summary: ClassVar[bool] = False
    is_compared: ClassVar[bool] = False
    is_logged: ClassVar[bool] = False
    order: ClassVar[int] = 100
    interval: ClassVar[AbstractIntervalMethod | None] = None
    paired: ClassVar[AbstractPairedMethod | None] = None

    if TYPE_CHECKING:
        __call__: Callable[..., Result]
        # Returns an accumulator, which takes samples batch by batch; its arguments are the options of the metric.
        accumulator: Callable[..., AbstractAccumulator]

    @property
    def __name__(self) -> str:
        """Name of the metric, as for functions."""
        return self.name

    def __repr__(self) -> str:
        return f"<metric {self.name}>"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)  # a metric has no state

    def __hash__(self) -> int:
        return hash(self.name)

    def contributions(self, probs: MetricInput, labels: Array | None = None, **options: Any) -> Tensor:
        """Return one value per sample, in the order of the samples; their mean is the metric."""
        del probs, labels, options
        raise UserError(f"{self.name} is not a mean over samples")

    @abstractmethod
    def compute(self, accumulator: Any) -> Result:
        """Compute the metric of all samples of an accumulator."""


class AbstractMean(AbstractMetric):
    """A mean over samples of values that depend on the probabilities of all classes.

    Its columns are all that an accumulator or an evaluation keeps of the samples: accumulators add them up, evaluations
    store them for confidence intervals and paired tests.

    Attributes:
        column_names: names of the columns, the first one for the values; by default the name of the metric alone.
        fewest_classes: number of classes from which an evaluation includes the metric.
    """

    needs_all_classes = True
    column_names: ClassVar[tuple[str, ...]] = ()
    fewest_classes: ClassVar[int] = 0

    @abstractmethod
    def values(self, table: Rows) -> Tensor:
        """Return the value of each sample."""

    def columns(self, table: Rows) -> dict[str, Tensor]:
        """Return the columns: tensors with one value per sample, and scalars that are added up."""
        return {self.column: self.values(table)}

    def of_sums(self, sums: Mapping[str, float], class_bins: Bins | None, definition: Definition) -> Result:
        """Compute the metric.

        Args:
            sums: sum of each column.
            class_bins: bins of the probabilities of every class, if known.
            definition: definition of results, without the estimator.
        """
        del class_bins
        return self.result(sums[self.column] / definition.n, definition)

    @property
    def column(self) -> str:
        """Name of the column with the value of each sample."""
        return self.column_names[0] if self.column_names else self.name

    def __call__(self, probs: MetricInput, labels: Array | None = None, *, ignore_index: int | None = None) -> Result:
        """Compute the metric.

        Args:
            probs: predictions, or rows of class probabilities.
            labels: class numbers, or soft labels; not needed with predictions.
            ignore_index: label of samples that are ignored.
        """
        table = rows(probs, labels, ignore_index=ignore_index)
        return self.of_sums(sums_of(self.columns(table)), None, table.definition)

    def result(self, value: float, definition: Definition) -> Result:
        """Return a value with its definition."""
        return Result(value, replace(definition, estimator=self.title, scope=None, unit=self.unit))

    def contributions(self, probs: MetricInput, labels: Array | None = None, **options: Any) -> Tensor:
        return self.values(rows(probs, labels, **options))

    def accumulator(self, *, ignore_index: int | None = None) -> SumAccumulator:
        """Return an accumulator, which takes samples batch by batch."""
        return SumAccumulator(self, self.column_names or (self.name,), ignore_index)

    def compute(self, accumulator: SumAccumulator) -> Result:
        return self.of_sums(accumulator.totals(), accumulator.class_bins, accumulator.definition)


def check_is_no_name(metric: object) -> None:
    """Raise if the name of a metric was passed in place of the metric."""
    if isinstance(metric, str):
        raise UserTypeError(f"metric is the text {metric!r}; pass the metric, such as fedlas.metrics.ece")


class AbstractBinned(AbstractMetric):
    """A metric of the gaps between confidence and accuracy in bins.

    Attributes:
        binning: default kind of the bins.
    """

    is_binned = True
    binning: ClassVar[Kind] = "width"

    @abstractmethod
    def of_bins(self, histogram: Histogram) -> Result:
        """Compute the metric from a histogram."""

    def measure(self, probs: MetricInput, labels: Array | None, bins: int, **options: Any) -> Result:
        """Compute the metric; the options are those of `histogram`."""
        return self.of_bins(histogram(probs, labels, bins, **{"binning": self.binning, **options}))

    def gaps(
        self,
        probs: MetricInput,
        labels: Array | None = None,
        bins: int = 15,
        *,
        binning: Kind | None = None,
        scope: Scope = "top-label",
        compat: Compat | None = None,
        ignore_index: int | None = None,
    ) -> AbstractGaps:
        """Return the bin and the gap of every sample, from which intervals are computed."""
        samples = samples_of(probs, labels, scope, ignore_index)
        return gaps_of(samples, Binning(bins, binning or self.binning, compat))

    def accumulator(
        self,
        bins: int = 15,
        *,
        binning: Kind | None = None,
        scope: Scope = "top-label",
        compat: Compat | None = None,
        ignore_index: int | None = None,
    ) -> AbstractHistogram:
        """Return an accumulator, which takes samples batch by batch."""
        rule = Binning(bins, binning or self.binning, compat)
        if rule.kind == "width":
            return BinAccumulator(self, rule, scope, ignore_index)
        if scope in EVERY_CLASS:
            raise UserError("equal-mass bins of every class need all probabilities at once: use the function")
        return PairAccumulator(self, scope, ignore_index, binning=rule)

    def compute(self, accumulator: AbstractHistogram) -> Result:
        return self.of_bins(accumulator.histogram())


class AbstractFreelyBinned(AbstractBinned):
    """A metric that is defined for bins of equal width and of equal mass."""

    def __call__(
        self,
        probs: MetricInput,
        labels: Array | None = None,
        bins: int = 15,
        *,
        binning: Kind | None = None,
        scope: Scope = "top-label",
        compat: Compat | None = None,
        ignore_index: int | None = None,
    ) -> Result:
        """Compute the metric.

        Args:
            probs: predictions, or rows of class probabilities.
            labels: class numbers, or soft labels; not needed with predictions.
            bins: number of bins.
            binning: "width" for bins of equal width, "mass" for bins with equally many samples.
            scope: which confidences are used: "top-label", "class-wise", "positive" (binary) or "multi-label".
            compat: name of another package or code whose binning rules are followed, to reproduce its values.
            ignore_index: label of samples that are ignored.
        """
        options: dict[str, Any] = {"binning": binning or self.binning, "scope": scope, "compat": compat}
        return self.measure(probs, labels, bins, **options, ignore_index=ignore_index)


class AbstractTopLabel(AbstractMetric):
    """A metric of confidence and correctness, without bins.

    Attributes:
        ranked: whether the order of samples of equal confidence matters.
    """

    ranked: ClassVar[bool] = False

    @abstractmethod
    def of_pairs(self, samples: Pairs) -> Result:
        """Compute the metric of confidences and correctness."""

    def __call__(self, probs: MetricInput, labels: Array | None = None, **which: Unpack[Which]) -> Result:
        """Compute the metric.

        Args:
            probs: predictions, or rows of class probabilities.
            labels: class numbers, or soft labels; not needed with predictions.
            which: `scope` ("top-label", "positive" or "confidence") and `ignore_index`.
        """
        return self.of_pairs(self.read(probs, labels, **which))

    def read(self, probs: MetricInput, labels: Array | None = None, **which: Unpack[Which]) -> Pairs:
        """Return the confidence and correctness of each sample."""
        samples = pairs(probs, labels, **which, ranked=self.ranked)
        return binary_predictions(samples) if self.ranked else samples

    def values_of(self, samples: Pairs) -> Tensor:
        """Return one value per sample, in the order of the samples; their mean is the metric."""
        del samples
        raise UserError(f"{self.name} is not a mean over samples")

    def contributions(self, probs: MetricInput, labels: Array | None = None, **which: Any) -> Tensor:
        return self.values_of(self.read(probs, labels, **which))

    def accumulator(self, *, scope: Scope = "top-label", ignore_index: int | None = None) -> AbstractAccumulator:
        """Return an accumulator, which takes samples batch by batch."""
        return PairAccumulator(self, scope, ignore_index, ranked=self.ranked)

    def compute(self, accumulator: PairAccumulator) -> Result:
        return self.of_pairs(accumulator.pairs())
