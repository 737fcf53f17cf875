"""Which samples of two predictions are the same: paired comparison, and overlap of calibration and test data.

`align_samples` reorders the predictions of a second model by sample ids, `check_same_samples` compares samples, classes
and labels of two models, and `samples_in_both` counts samples that a calibrator was fitted on and is evaluated on.
"""

import math
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from fedlas.errors import UserError, short_list
from fedlas.predictions import AnyPredictions, Predictions, describe_class_difference
from fedlas.predictions.arrays import Array, as_tensor
from fedlas.predictions.probabilities import slices_of

SAMPLE_NAMES = ("ids", "index")  # fields that identify samples, the more reliable first
SPLIT_PREFIXES = ("train", "val", "test")
NEAR = 1e-3  # largest difference of probabilities of the same sample, one of them rounded to three digits
CHANCE = 0.01  # fraction of equal rows that two different splits may have
INFORMATIVE = 0.2  # a row that agrees with a larger fraction of the rows of its label is no evidence


def warn_about_repeated_samples(predictions: AnyPredictions) -> None:
    """Warn if samples occur more than once, which intervals and cross-fitting do not know."""
    repeated = 0 if predictions.ids is None else len(predictions) - len(set(predictions.ids))
    if repeated:
        warnings.warn(
            f"{repeated:,} of {len(predictions):,} ids occur before: intervals assume independent samples and are too "
            "narrow, and cross-fitted calibrators have seen copies of their test samples; remove repeated rows",
            UserWarning,
            stacklevel=3,
        )


def align_samples(first: AnyPredictions, second: AnyPredictions) -> AnyPredictions:
    """Return the samples of the second model in the order of the first; raise if they are of another split.

    The same images may be a split of another name: `fedlas predict` adds a hash of the data's options. Therefore equal
    `ids` are enough. Equal `index` values are enough unless both names say what the splits are for, as "val" and "test"
    do: the samples of both may be numbered from zero and sorted by class.
    """
    field = next((name for name in SAMPLE_NAMES if None not in (getattr(first, name), getattr(second, name))), None)
    splits = first.split, second.split
    if field != "ids" and None not in splits and splits[0] != splits[1]:
        purposes = [_purposes(str(split)) for split in splits]
        if field is None or (all(purposes) and purposes[0].isdisjoint(purposes[1])):
            raise UserError(f"the first model was evaluated on the split {splits[0]!r}, the second on {splits[1]!r}")
    return second if field is None else _reorder(first, second, field)


def _purposes(split: str) -> set[str]:
    """Return which of train, val and test occur in the name of a split."""
    words = re.split("[^a-z]+", split.lower())
    return {prefix for prefix in SPLIT_PREFIXES for word in words if word.startswith(prefix)}


def _reorder(first: AnyPredictions, second: AnyPredictions, field: str) -> AnyPredictions:
    """Return the samples of the second model in the order of the first, by their ids or index."""
    first_names, second_names = _names(first, field), _names(second, field)
    if first_names == second_names:
        return second
    for which, names in {"first": first_names, "second": second_names}.items():
        name, count = Counter(names).most_common(1)[0]
        if count > 1:
            raise UserError(
                f"samples differ in order, and {name!r} occurs {count} times in {field} of the {which} model"
            )
    extra = set(first_names) - set(second_names), set(second_names) - set(first_names)
    if any(extra):
        counts = [f"{len(names):,}{f' (such as {min(names)!r})' if names else ''}" for names in extra]
        raise UserError(
            f"the models were evaluated on different samples: by their {field}, {counts[0]} occur only in the first "
            f"and {counts[1]} only in the second"
        )
    rows = {name: row for row, name in enumerate(second_names)}
    return second[[rows[name] for name in first_names]]


def _names(predictions: AnyPredictions, field: str) -> list[Any]:
    names = getattr(predictions, field)
    return list(names) if isinstance(names, tuple) else names.tolist()


def check_same_samples(first: AnyPredictions | Array, second: AnyPredictions | Array) -> None:
    """Raise if two models have other samples, classes or labels, as far as that is known."""
    if len(first) != len(second):
        raise UserError(f"the first model has {len(first)} samples, the second {len(second)}")
    if isinstance(first, AnyPredictions) and isinstance(second, AnyPredictions):
        for field in SAMPLE_NAMES:
            both_known = getattr(first, field) is not None and getattr(second, field) is not None
            if both_known and _names(first, field) != _names(second, field):
                raise UserError(f"{field} of the two models differ: other samples, or another order")
        _check_classes(first, second)
        _check_labels(first, second)


def _check_classes(first: AnyPredictions, second: AnyPredictions) -> None:
    """Raise if two models have different classes."""
    if not (first.has_all_classes and second.has_all_classes):
        return  # their file names only the classes that occur
    first_names, second_names = first.class_names, second.class_names
    if (
        first_names is not None
        and second_names is not None
        and first_names != second_names
        and sorted(first_names) == sorted(second_names)
    ):
        difference = describe_class_difference(first_names, second_names, ("the first model", "the second"))
        raise UserError(f"{difference}; give both the same order")
    first_names, second_names = _proper_class_names(first), _proper_class_names(second)
    if first_names is not None and second_names is not None and first_names != second_names:
        extra = {
            "first": sorted(set(first_names) - set(second_names)),
            "second": sorted(set(second_names) - set(first_names)),
        }
        parts = [f"{short_list(map(repr, names), 5)} only in the {which}" for which, names in extra.items() if names]
        raise UserError(f"the models have different classes: {'; '.join(parts)}")
    if first.num_classes != second.num_classes:
        raise UserError(f"the first model has {first.num_classes} classes, the second {second.num_classes}")


def _proper_class_names(predictions: AnyPredictions) -> tuple[str, ...] | None:
    """Return the class names; None where they are only the numbers of the columns."""
    names = predictions.class_names
    return None if names == tuple(map(str, range(predictions.num_classes))) else names


def _check_labels(first: AnyPredictions, second: AnyPredictions) -> None:
    """Raise if two models have different labels, with the first row that differs."""
    if first.given_labels is None or second.given_labels is None:
        return  # top-label predictions may have correctness only
    labels = as_tensor(first.labels, "labels"), as_tensor(second.labels, "labels").to(first.labels.device)
    if labels[0].ndim != labels[1].ndim:
        raise UserError("one model has hard labels, the other soft labels")
    if labels[0].shape != labels[1].shape:
        raise UserError(f"the soft labels have {labels[0].shape[1]} and {labels[1].shape[1]} classes")
    hard = labels[0].ndim == 1
    names = _label_names(first, second)
    first_labels, second_labels = _common_numbers(labels, names) if hard and names is not None else labels
    same = first_labels == second_labels if hard else (first_labels == second_labels).all(1)
    if bool(same.all()):
        return
    row, count = int((~same).nonzero()[0]), int((~same).sum())
    shown = [
        repr(words[int(numbers[row])]) if words is not None and hard else str(numbers[row].tolist())
        for words, numbers in zip(names or (first.class_names or second.class_names,) * 2, labels, strict=True)
    ]
    sample = f" ({first.ids[row]!r})" if first.ids is not None else ""
    raise UserError(
        f"labels: row {row}{sample} is {shown[0]} in the first model and {shown[1]} in the second; {count:,} of "
        f"{len(same):,} differ, so these are other samples, or in another order"
        + ("" if first.ids is not None else "; samples are matched by ids, in a file a column `id`")
    )


def _label_names(first: AnyPredictions, second: AnyPredictions) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return the class names by which labels are compared; None if both models number the classes alike.

    Top-label predictions number the classes that occur in their file. Numbers that occur there are class numbers if the
    other model has all classes and none of them has such a name.
    """
    complete = first.has_all_classes, second.has_all_classes
    if all(complete):
        return None
    first_names, second_names = (
        model.class_names or tuple(map(str, range(model.num_classes))) for model in (first, second)
    )
    if complete == (False, True) and _are_class_numbers(first_names, second_names):
        second_names = tuple(map(str, range(len(second_names))))
    if complete == (True, False) and _are_class_numbers(second_names, first_names):
        first_names = tuple(map(str, range(len(first_names))))
    return first_names, second_names


def _are_class_numbers(texts: Sequence[str], names: Sequence[str]) -> bool:
    return all(text.isdecimal() for text in texts) and set(texts).isdisjoint(names)


def _common_numbers(labels: Sequence[Tensor], names: Sequence[Sequence[str]]) -> list[Tensor]:
    """Renumber labels so that equal names have equal numbers."""
    number: dict[str, int] = {}
    tables = [torch.tensor([number.setdefault(name, len(number)) for name in model_names]) for model_names in names]
    return [table.to(numbers.device)[numbers] for table, numbers in zip(tables, labels, strict=True)]


def samples_in_both(evaluated: Predictions, calibration: Predictions) -> int:
    """Count the calibration samples that are evaluated too, as far as that is known: metrics on these are too good.

    Samples of the same `ids` or `index` are the same if label, predicted class and confidence agree up to rounding. The
    names alone prove little: two splits may both have an `img_0000.png`, or be numbered from zero and sorted by class.
    Without names, or if these find nothing, rows of equal scores and labels are counted.

    Rows may agree by chance if there are few classes or few digits, or if the confidence is one. How often that happens
    is estimated within the evaluated samples; only a larger number counts.
    """
    if calibration is evaluated:
        return len(calibration)
    if calibration.num_classes != evaluated.num_classes:
        return 0
    count = 0
    if evaluated.ids is not None and calibration.ids is not None:
        rows = dict(zip(evaluated.ids, range(len(evaluated)), strict=True))
        count = _count_named(evaluated, calibration, torch.tensor([rows.get(name, -1) for name in calibration.ids]))
    if not count and evaluated.index is not None and calibration.index is not None:
        count = _count_named(evaluated, calibration, _find_rows(evaluated.index.cpu(), calibration.index.cpu()))
    return count or _count_equal_rows(evaluated, calibration)


def _find_rows(index: Int64[Tensor, " n"], numbers: Int64[Tensor, " m"]) -> Int64[Tensor, " m"]:
    """Return the row of each wanted number; -1 if there is none."""
    order = index.argsort()
    ordered = index[order]
    position = torch.searchsorted(ordered, numbers).clamp_max(len(ordered) - 1)
    return torch.where(ordered[position] == numbers, order[position], -1)


def _count_named(evaluated: Predictions, calibration: Predictions, rows: Int64[Tensor, " m"]) -> int:
    """Count samples of the same name that also agree in label, class and confidence, if more do than by chance.

    Args:
        evaluated: predictions that are evaluated.
        calibration: predictions that a calibrator was fitted on.
        rows: for each calibration sample, the evaluated sample of the same name; -1 if there is none.
    """
    calibration_rows = (rows >= 0).nonzero()[:, 0]
    if not len(calibration_rows):
        return 0
    evaluated_rows = rows[calibration_rows]
    first, second = evaluated.confidence.cpu().double(), calibration.confidence.cpu().double()[calibration_rows]
    equal = (first[evaluated_rows] - second).abs() <= NEAR
    equal &= evaluated.prediction.cpu()[evaluated_rows] == calibration.prediction.cpu()[calibration_rows]
    equal &= _equal_labels(evaluated.labels.cpu()[evaluated_rows], calibration.labels.cpu()[calibration_rows])
    probability = _agreement_by_chance(evaluated, first)[evaluated_rows]
    informative = probability <= INFORMATIVE
    expected = float(probability[informative].sum())
    threshold = 1 + expected + 3 * math.sqrt(expected) + CHANCE * int(informative.sum())
    return int(equal.sum()) if int((equal & informative).sum()) > threshold else 0


def _equal_labels(first: Tensor, second: Tensor) -> Bool[Tensor, " n"]:
    if first.shape != second.shape:
        return torch.zeros(len(first), dtype=torch.bool)
    return first == second if first.ndim == 1 else ((first - second).abs() <= NEAR).all(1)


def _agreement_by_chance(evaluated: Predictions, confidence: Float64[Tensor, " n"]) -> Float64[Tensor, " n"]:
    """Return the fraction of the rows of its label, itself included, that each row agrees with in class and confidence.

    Itself is included because a label with few rows does not show that the next one would differ.
    """
    labels = evaluated.labels.cpu()
    classes = labels if labels.ndim == 1 else labels.argmax(1)
    # Sort by label, predicted class and confidence; confidences of different groups are never near each other.
    group = 2.0 * (classes * evaluated.num_classes + evaluated.prediction.cpu())
    key, order = (group + confidence).sort()
    agreeing = torch.searchsorted(key, key + NEAR, right=True) - torch.searchsorted(key, key - NEAR)
    return torch.empty_like(key).index_copy_(0, order, agreeing.double()) / torch.bincount(classes)[classes]


def _count_equal_rows(evaluated: Predictions, calibration: Predictions) -> int:
    """Count rows of equal scores and labels, if there are more than by chance."""
    evaluated_hashes, calibration_hashes = (
        row_hashes(predictions.scores, predictions.labels) for predictions in (evaluated, calibration)
    )
    if torch.equal(evaluated_hashes, calibration_hashes):
        return len(calibration)
    _, inverse, counts = evaluated_hashes.unique(return_inverse=True, return_counts=True)
    expected = float((counts[inverse] > 1).double().mean()) * len(calibration_hashes)
    threshold = 1 + 2 * expected + 3 * math.sqrt(max(expected, 1.0)) + CHANCE * len(calibration_hashes)
    common = int(torch.isin(calibration_hashes, evaluated_hashes).sum())
    return common if common > threshold else 0


def row_hashes(scores: Float[Tensor, "n classes"], labels: Tensor) -> Int64[Tensor, " n"]:
    """Return a hash of the scores and the label of each sample."""
    labels = labels.cpu()
    parts = [_hash(scores[rows].cpu().double()) for rows in slices_of(scores)]
    return torch.cat(parts) * 31 + (_hash(labels.double()) if labels.ndim == 2 else labels)


def _hash(table: Tensor) -> Int64[Tensor, " n"]:
    factors = torch.randint(2**62, (table.shape[1],), generator=torch.Generator().manual_seed(0)) * 2 + 1
    bits = (table + 0.0).view(torch.int64)  # minus zero is zero
    return ((bits ^ (bits >> 29)) * factors).sum(1)  # integers wrap around, in any order of summation
