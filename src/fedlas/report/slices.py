"""Accuracy and calibration of slices of the samples: by predicted class, and by columns of metadata.

Slices by class use the predicted class: a calibrated model is calibrated on the samples predicted as a class, but not
on the samples with this label.

Slices are ranked by harm, the number of samples times the ECE. Only those with the largest harm are listed, and only
for these is an interval computed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from fedlas.metrics.base import Resampling
from fedlas.metrics.bin_sums import add_up, count_up, exact
from fedlas.metrics.binning import Binning
from fedlas.metrics.calibration_error import ece
from fedlas.metrics.inputs import Pairs, pairs
from fedlas.metrics.result import Result
from fedlas.predictions import AnyPredictions

SMALL = 100  # slices with fewer samples are marked as small
MOST_VALUES = 50  # largest number of values of a column
MOST_COLUMNS = 50
RESAMPLES = 1_000  # default number of resamples of the interval of a slice
CLASS = "predicted class"
MISSING = "missing"


@dataclass(frozen=True)
class Slice:
    """Samples with one value of a column.

    Args:
        column: name of the column.
        value: its value.
        n: number of samples.
        accuracy: fraction of correct predictions.
        ece: ECE, with its interval if requested.
        harm: number of samples times the ECE.
    """

    column: str
    value: str
    n: int
    accuracy: float
    ece: Result
    harm: float

    @property
    def is_small(self) -> bool:
        """Whether there are so few samples that the ECE is mostly sampling noise."""
        return self.n < SMALL


@dataclass(frozen=True)
class Slices:
    """The slices with the largest harm.

    Args:
        listed: slices by decreasing harm.
        total: number of all slices.
        skipped: columns without slices, because they have one value or too many values.
    """

    listed: Sequence[Slice]
    total: int
    skipped: Sequence[str]


@dataclass(frozen=True)
class _Column:
    """A column as group numbers.

    Args:
        name: name of the column.
        values: value of each group.
        codes: group of each sample.
    """

    name: str
    values: Sequence[str]
    codes: Int64[Tensor, " n"]


def slices(predictions: AnyPredictions, *, bins: int = 15, most: int = 50, how: Resampling | None = None) -> Slices:
    """Return the slices with the largest harm.

    Args:
        predictions: predictions with labels.
        bins: number of bins of the ECE.
        most: number of slices that are listed.
        how: how intervals are computed; None for none.
    """
    columns: list[_Column] = []
    skipped: list[str] = []
    if predictions.prediction is not None:
        columns.append(_class_column(predictions, predictions.prediction))
    for name, values in islice((predictions.metadata or {}).items(), MOST_COLUMNS):
        column = _group(name, values)
        if column is None:
            skipped.append(name)
        else:
            columns.append(column)
    samples = pairs(predictions)
    harms = [_harms(samples, column, bins) for column in columns]
    ranked = sorted(
        (
            (float(harm), column_number, group)
            for column_number, each in enumerate(harms)
            for group, harm in enumerate(each.tolist())
        ),
        key=lambda entry: (-entry[0], *entry[1:]),
    )
    ranked = [entry for entry in ranked if entry[0] >= 0]  # a harm of -1 means no samples
    listed = [_measure(samples, columns[column_number], group, bins, how) for _, column_number, group in ranked[:most]]
    return Slices(sorted(listed, key=lambda listed_slice: -listed_slice.harm), len(ranked), skipped)


def _class_column(predictions: AnyPredictions, prediction: Tensor) -> _Column:
    """Return the predicted class as a column."""
    names = predictions.class_names
    present, codes = prediction.cpu().unique(return_inverse=True)
    return _Column(CLASS, [f"class {k}" if names is None else names[k] for k in present.tolist()], codes)


def _group(name: str, values: Iterable[object]) -> _Column | None:
    """Return the groups of a column, its values; None for one or too many values."""
    texts = [MISSING if value is None or value == "" else str(value) for value in values]
    number_of = {text: code for code, text in enumerate(sorted(set(texts)))}
    if not 2 <= len(number_of) <= MOST_VALUES:
        return None
    return _Column(name, list(number_of), torch.tensor([number_of[text] for text in texts]))


def _harms(samples: Pairs, column: _Column, bins: int) -> Float64[Tensor, " groups"]:
    """Return the number of samples times the ECE of every group of a column; -1 without samples."""
    confidence, correct = exact(samples.confidence), exact(samples.correct)
    index = Binning(bins).index(samples.confidence).to(confidence.device)
    codes, groups = column.codes.to(confidence.device), len(column.values)
    gaps = add_up(confidence - correct, codes * bins + index, groups * bins).view(groups, bins)
    return gaps.abs().sum(1).masked_fill(count_up(codes, groups) == 0, -1).cpu()


def _measure(samples: Pairs, column: _Column, group: int, bins: int, how: Resampling | None) -> Slice:
    rows = (column.codes == group).nonzero()[:, 0].to(samples.confidence.device)
    definition = replace(samples.definition, n=len(rows))
    part = Pairs(samples.confidence[rows], samples.correct[rows], definition)
    options: dict[str, Any] = {"bins": bins}
    result = ece(part, **options) if how is None else ece.interval.measure(ece, part, None, how, **options)
    accuracy = float(exact(part.correct).mean())
    return Slice(column.name, column.values[group], len(rows), accuracy, result, len(rows) * float(result))
