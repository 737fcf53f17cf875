"""From the named columns of a table to predictions, and back."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedlas.errors import RowError, UserError, short_list
from fedlas.io.columns import (
    CONFIDENCES,
    CORRECT,
    LABELS,
    PREDICTIONS,
    ReadOptions,
    dimensions,
    find_roles,
    header_advice,
    is_number,
    option,
)
from fedlas.io.labels import (
    INTEGER,
    LabelFile,
    are_integers,
    as_integers,
    class_numbers,
    normalize_label,
    parse_correctness,
    warn_of_similar_names,
)
from fedlas.io.texts import Distinct, find_distinct, text_array
from fedlas.io.untrusted import content_errors
from fedlas.predictions import (
    SCORE_ROLES,
    AnyPredictions,
    ColumnRoles,
    Predictions,
    TopLabelPredictions,
    replace_fields,
)
from fedlas.predictions.arrays import RowLimits, as_tensor, check_labels

MAX_CLASSES = 2**20  # of a file: the metrics of each take a kilobyte, and a small file can claim any number
# Names of columns that hold one value, or one class, in a row.
SINGULAR = {
    "logits": "logit", "probs": "prob", "labels": "label", "features": "feature", "ids": "id", "paths": "path",
}  # fmt: skip
MAX_METADATA = 50  # columns
MAX_VALUES = 50  # of a column of metadata
MIN_CONFIDENCES = 20  # that a warning about low confidences of two classes needs


class Table(NamedTuple):
    """The content of a file.

    Attributes:
        columns: an array, or a column of texts, for each name.
        split: the split that the samples belong to, if the file names it.
        lines: of a text file, the line of each row, for errors.
        limits: how far the sum of each row of probabilities may be from one, if its digits show it.
        metadata: further columns, one value for each sample.
    """

    columns: Mapping[str, Any]
    split: str | None = None
    lines: Sequence[int] | None = None
    limits: RowLimits | None = None
    metadata: Mapping[str, Any] | None = None


class Content(NamedTuple):
    """Scores and labels of a table.

    Attributes:
        kind: what the scores are.
        scores: one row, or one confidence, for each sample.
        labels: class numbers or soft labels, if there are any.
        fields: further arguments of `Predictions` or `TopLabelPredictions`.
    """

    kind: Literal["logits", "probs", "confidence"]
    scores: Any
    labels: Any
    fields: dict[str, Any]


def build_predictions(table: Table, path: str | Path, options: ReadOptions, split: str | None = None) -> AnyPredictions:
    """Build predictions of the columns of a table.

    Columns that hold only the confidence of the predicted class become `TopLabelPredictions`.

    Args:
        table: the columns.
        path: the file that they come from, for errors.
        options: roles of columns, and labels from elsewhere.
        split: the split that the samples belong to, if the table does not name it.
    """
    labels, source = options.get("labels"), None
    with content_errors(path, table.lines):
        roles = find_roles(table.columns, options, path)
        if not roles.has_scores:
            raise _no_scores(table.columns, roles, options, path)
        columns = _rename_columns(table.columns, roles)
        class_names = options.get("class_names")
        if class_names is not None:
            if not columns.keys() & {"logits", "probs"}:
                raise UserError("class_names are those of an array; the columns of a table name its classes")
            columns["class_names"] = list(class_names)
        if "confidence" in columns and labels is None and not columns.keys() & {*LABELS, "correct"}:
            raise no_labels(roles, path)
        if isinstance(labels, LabelFile):
            n = len(columns[next(role for role in roles.names.values() if role.startswith(SCORE_ROLES))])
            source = f"{labels.path} (labels of {path})"
            columns["label"] = labels.for_samples(n, source)
            roles = roles._replace(names={**roles.names, labels.path.name: "label"})
        elif labels is not None:
            columns["label"] = labels
        content = _interpret(columns, path, source)
        if source is not None and content.kind != "confidence":
            with content_errors(source):
                check_labels(as_tensor(content.labels, "labels"), n, max(2, *np.shape(content.scores)[1:], 0))
        fields = {**content.fields, "split": table.split or split, "metadata": table.metadata}
        if content.kind == "logits":
            made: AnyPredictions = Predictions(content.scores, content.labels, **fields)
        elif content.kind == "confidence":
            made = TopLabelPredictions(content.scores, labels=content.labels, **fields)
        else:
            fields |= {"normalize": options.get("normalize", False), "limits": table.limits}
            with _mention_columns(table.columns, roles, content.scores):
                made = Predictions.from_probs(content.scores, content.labels, **fields)
        if isinstance(made, Predictions):
            _warn_of_other_predictions(table.columns, roles, made, path)
        metadata = {**_find_metadata(table.columns, roles.unread, made), **(made.metadata or {})}
        unread = [name for name in roles.unread if name not in metadata]
        names = dict(roles.names)
        if content.labels is not None and labels is None and "label" not in names.values():
            soft = {f"label_{name}" for name in made.class_names or ()}
            names |= {name: name for name in table.columns if name in soft}
        columns_read = ColumnRoles(names, unread, tuple(metadata))
        return replace_fields(made, metadata=metadata or None, columns=columns_read)


def _warn_of_other_predictions(
    columns: Mapping[str, Any], roles: ColumnRoles, predictions: Predictions, path: str | Path
) -> None:
    """Warn if a column of predicted classes, which is not needed, contradicts the scores."""
    names = [name for name in roles.unread if name.casefold() in PREDICTIONS]
    names += [name for name, role in roles.names.items() if role == "prediction"]
    by_column = any(role.startswith(("prob_", "logit_")) for role in roles.names.values())
    classes = predictions.num_classes
    for name in (name for name in names if dimensions(columns[name]) == 1):
        try:
            known = class_numbers(columns[name], predictions.class_names, path, by_column=by_column, classes=classes)
            numbers = check_labels(as_tensor(known, name), len(predictions), classes).to(predictions.scores.device)
        except (ValueError, TypeError):  # not a column of classes
            continue
        other = predictions.scores.gather(1, numbers[:, None])[:, 0] < predictions.scores.amax(1)
        if bool(other.any()):
            warnings.warn(
                f"{path}: {name} is not the most probable class in {int(other.sum()):,} of {len(other):,} rows and is "
                "not used; are the columns of the classes in another order?",
                stacklevel=3,
            )


def _find_metadata(
    columns: Mapping[str, Any], unread: Sequence[str], predictions: AnyPredictions
) -> dict[str, tuple[str, ...]]:
    """Return the columns without a role that group the samples, but not by their label or correctness."""
    metadata: dict[str, tuple[str, ...]] = {}
    for name in unread:
        if len(metadata) == MAX_METADATA:
            break
        groups = find_groups(name, columns[name])
        if groups is None or len(groups.codes) != len(predictions) or _repeats_outcome(groups, predictions):
            continue
        # Every row refers to one of a few texts, so a million rows take 8 megabytes.
        texts = ["" if _is_missing(value) else normalize_label(value) for value in groups.values]
        metadata[name] = tuple(map(texts.__getitem__, groups.codes.tolist()))
    return metadata


def find_groups(name: str, values: Any) -> Distinct | None:
    """Return the groups of a column that may be metadata: 2 to 50 values, each in two rows on average; else None.

    Confidences, predictions and correctness that are not needed beside probabilities are none.
    """
    if name.casefold() in CONFIDENCES | PREDICTIONS | CORRECT or dimensions(values) != 1:
        return None
    try:
        distinct = find_distinct(values)
    except TypeError:  # entries of a DataFrame that have no hash, such as lists
        return None
    return distinct if 2 <= len(distinct.values) <= min(MAX_VALUES, len(values) // 2) else None


def _repeats_outcome(groups: Distinct, predictions: AnyPredictions) -> bool:
    """Return whether groups are the classes of the labels, or the correct and the incorrect predictions."""
    labels, codes = predictions.given_labels, torch.as_tensor(groups.codes)
    if len(groups.values) == 2 and (labels is not None or isinstance(predictions, TopLabelPredictions)):
        first, correct = codes == codes[0], predictions.correct.cpu()
        if bool((first == correct).all()) or bool((first != correct).all()):
            return True
    if labels is None or labels.ndim != 1:
        return False
    texts = [normalize_label(value) for value in groups.values]
    numbers = {name: number for number, name in enumerate(predictions.class_names or ())}
    numbers |= {text: int(text) for text in texts if text not in numbers and text.isdecimal() and len(text) < 10}
    return bool((torch.tensor([numbers.get(text, -1) for text in texts])[codes.long()] == labels.cpu()).all())


def _is_missing(value: object) -> bool:
    """Return whether a value is an empty cell: None, or what pandas and NumPy have instead."""
    return value is None or (not isinstance(value, str) and str(value) in {"nan", "NaT", "<NA>"})


def _rename_columns(columns: Mapping[str, Any], roles: ColumnRoles) -> dict[str, Any]:
    """Return columns under the names that fedlas uses, without those that have no role."""
    others = {name: values for name, values in columns.items() if name not in roles.names and name not in roles.unread}
    return {role: columns[name] for name, role in roles.names.items()} | others


def _no_scores(columns: Mapping[str, Any], roles: ColumnRoles, options: ReadOptions, path: str | Path) -> UserError:
    """Return the error about a table in which no scores were found."""
    expected = "logits, probs, logit_NAME, prob_NAME, or confidence and prediction"
    advice = f"name the columns of the classes with {option('prob_columns')}"
    if "label" not in roles.names.values() and options.get("labels") is None:
        advice += f", or, if these are called by class names alone, that of the labels with {option('label_column')}"
    listed = f"its columns are {short_list(columns)}{header_advice(columns, options)}" if columns else "it is empty"
    return UserError(f"{path}: expected one of {expected}; {advice}; {listed}")


def no_labels(roles: ColumnRoles | None, path: object, labels: str = "labels") -> UserError:
    """Return the error about a table in which no labels were found; `labels` is the option that provides them."""
    others = () if roles is None else (*roles.metadata, *roles.unread)
    listed = f"; these columns have no known role: {short_list(others)}" if others else ""
    advice = f"name their column with {option('label_column')}, or give them with {option(labels)}"
    return UserError(f"{path}: no labels were found{listed}; {advice}")


@contextmanager
def _mention_columns(columns: Mapping[str, Any], roles: ColumnRoles, scores: Any) -> Iterator[None]:
    """List the columns that may wrongly be classes, or be none, if the sum of a row is too large or too small."""
    try:
        yield
    except RowError as error:
        row = scores[error.row] if np.ndim(scores) == 2 else np.ones(1)
        total, numbers = float(row.sum()), [name for name in roles.unread if is_number(columns[name])]
        classes = [column for column, role in roles.names.items() if role.startswith("prob_")]
        advice = f"name the columns of all classes with {option('prob_columns')}"
        if error.before == "probs: " and numbers and total < 1:
            listed = f"columns of numbers were not read: {short_list(numbers)}; if they are classes"
            after = f" sums to {total:.6g}, and {listed}, {advice}"
        elif error.before == "probs: " and classes and total > 1 and float(row.max()) <= 1:
            listed = f"the classes were read from {short_list(classes)}; if one of these is no class"
            after = f"{error.after}; {listed}, {advice}"
        else:
            raise
        raise RowError(error.before, error.row, after) from error


def _interpret(columns: Mapping[str, Any], path: str | Path, source: str | None) -> Content:
    """Find scores, labels and the other fields of predictions.

    Args:
        columns: values by the names that fedlas uses.
        path: the file, for errors.
        source: origin of the labels, if they are from another file.
    """
    prefixes = [kind for kind in ("logits", "probs") if kind in columns]
    prefixes += [kind for kind in ("logit_", "prob_") if any(name.startswith(kind) for name in columns)]
    if not prefixes and "confidence" in columns and columns.keys() & {"prediction", "correct"}:
        return _interpret_top_label(columns, path)
    prefix = prefixes[0]
    by_column = prefix.endswith("_")
    names, scores = _class_names(columns), columns.get(prefix)
    if scores is None:
        names = [name.removeprefix(prefix) for name in columns if name.startswith(prefix)]
        scores = _stack(columns, prefix, names, path)
        if len(names) == 1:  # the second class of a binary classifier
            names = ["0" if names[0] == "1" else f"not {names[0]}", names[0]]
    classes = np.shape(scores)[-1] if np.ndim(scores) > 1 else 0
    if classes > MAX_CLASSES:
        raise UserError(f"{path}: it has {classes:,} classes; from a file at most {MAX_CLASSES:,} are read")
    warn_of_similar_names(names)
    soft = names is not None and all(f"label_{name}" in columns for name in names)
    if soft and any(name in columns for name in LABELS):
        raise UserError(f"{path}: it has both a column of labels and label_NAME; leave one of them out")
    labels = None
    if soft:
        labels = _stack(columns, "label_", names or (), path)
    elif any(name.startswith("label") for name in columns):
        try:
            column = columns[_label_column(columns, source or path)]
            labels = class_numbers(column, names, source or path, by_column=by_column, classes=classes)
        except RowError as error:
            if source is None:
                raise
            raise UserError(str(error)) from error  # the lines of the predictions are not those of the labels
    wide = [name.removeprefix("feature_") for name in columns if name.startswith("feature_")]
    features = _stack(columns, "feature_", wide, path) if wide else columns.get("features")
    fields = {"features": features, "class_names": names, **_sample_fields(columns, path)}
    return Content("logits" if prefix.startswith("logit") else "probs", scores, labels, fields)


def _interpret_top_label(columns: Mapping[str, Any], path: str | Path) -> Content:
    """Find confidence and correctness of the predicted class, if nothing is known of other classes."""
    confidence = _stack(columns, "", ["confidence"], path)[:, 0]
    if not len(confidence):
        raise UserError(f"{path}: confidence has no rows; at least one sample is needed")
    names = _class_names(columns)
    used = {} if "correct" in columns and not set(LABELS) & columns.keys() else {"label": _label_column(columns, path)}
    used |= {"prediction": "prediction"} if "prediction" in columns else {}
    classes: dict[str, Any]
    if names is not None and all(are_integers(columns[name]) for name in used.values()):
        classes = {role: as_integers(columns[name], role) for role, name in used.items()}
    else:
        names, classes = _number_words({role: columns[name] for role, name in used.items()}, names, path)
    _warn_of_low_confidence(confidence, names or (), path)
    correct = parse_correctness(columns["correct"], path) if "correct" in columns else None
    fields = {"prediction": classes.get("prediction"), "correct": correct, "class_names": names}
    return Content("confidence", confidence, classes.get("label"), fields | _sample_fields(columns, path))


def _number_words(
    columns: Mapping[str, Any], names: list[str] | None, path: str | Path
) -> tuple[list[str] | None, dict[str, Any]]:
    """Return the class names that occur among labels and predictions, and the class numbers of these columns."""
    distinct = {role: find_distinct(column) for role, column in columns.items()}
    words = {
        role: [normalize_label(value) for value in distinct_values.values] for role, distinct_values in distinct.items()
    }
    if len(words) == 2 and _mixes_numbers_and_names(*words.values()):
        shown = ", ".join(some[0] for some in words.values())
        raise UserError(f"{path}: one of label and prediction holds numbers, the other names: {shown}")
    occurring = sorted({word for some in words.values() for word in some}, key=_by_number)
    if names is None and occurring:
        names = occurring
        warn_of_similar_names(names)
    number = {name: i for i, name in enumerate(names or ())}
    for word in occurring:
        if word not in number:
            raise UserError(f"{path}: {word!r} is none of class_names: {short_list(number)}")
    return names, {
        role: np.array([number[word] for word in some])[distinct[role].codes] for role, some in words.items()
    }


def _by_number(name: str) -> tuple[bool, str, str]:
    """Return a key that sorts numbers by their value, before all other names."""
    return not name.isdecimal(), name.zfill(20), name


def _mixes_numbers_and_names(labels: Sequence[str], predictions: Sequence[str]) -> bool:
    """Return whether all texts of one column are numbers and none of the other."""
    kinds = [{INTEGER.fullmatch(word) is not None for word in words} for words in (labels, predictions)]
    return kinds in ([{True}, {False}], [{False}, {True}])


def _warn_of_low_confidence(confidence: NDArray[Any], names: Sequence[str], path: str | Path) -> None:
    if len(names) == 2 and len(confidence) >= MIN_CONFIDENCES and bool((confidence < 0.5).any()):
        warnings.warn(
            f"{path}: the larger of two probabilities is never below 0.5, and some confidences are; if they are "
            f"probabilities of one class, call their column prob_NAME after it, such as prob_{names[1]}",
            stacklevel=2,
        )


def _class_names(columns: Mapping[str, Any]) -> list[str] | None:
    names = columns.get("class_names")
    return None if names is None else [str(name) for name in names]


def _label_column(columns: Mapping[str, Any], path: str | Path) -> str:
    names = [name for name in LABELS if name in columns]
    if len(names) != 1:
        raise UserError(f"{path}: expected one column `label` or `labels`; its columns are {short_list(columns)}")
    return names[0]


def _sample_fields(columns: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """Return what identifies the samples."""
    return {
        "index": as_integers(columns["index"], "index") if "index" in columns else None,
        "ids": _one_of(columns, ("id", "ids"), path),
        "paths": _one_of(columns, ("path", "paths"), path),
    }


def _one_of(columns: Mapping[str, Any], names: Sequence[str], path: str | Path) -> Any:
    """Return the column that has one of several names, or None."""
    present = [name for name in names if columns.get(name) is not None]
    if len(present) > 1:
        raise UserError(f"{path}: {' and '.join(present)} mean the same; leave one of them out")
    return columns[present[0]] if present else None


def _stack(columns: Mapping[str, Any], prefix: str, names: Sequence[str], path: str | Path) -> NDArray[Any]:
    """Return columns of numbers as one array."""
    arrays = [np.asarray(columns[f"{prefix}{name}"]) for name in names]
    view = _shared_view(arrays)
    if view is not None:
        return view
    # Columns of one floating-point type keep it: how far the sum of a row may be from one depends on it.
    dtypes = {array.dtype for array in arrays}
    dtype = dtypes.pop() if len(dtypes) == 1 and arrays[0].dtype.kind == "f" else np.float64
    try:
        return np.stack(arrays, axis=1).astype(dtype, copy=False)
    except ValueError as error:
        raise UserError(f"{path}: a {prefix}... column holds something that is not a number ({error})") from error


def _shared_view(arrays: Sequence[NDArray[Any]]) -> NDArray[Any] | None:
    """Return a view of the array that arrays are neighbouring columns of, without a copy; None if they are not."""
    first, step = arrays[0], arrays[0].itemsize
    for position, array in enumerate(arrays):
        same = array.base is first.base and array.dtype == first.dtype and array.strides == first.strides
        if first.base is None or not same or array.ctypes.data != first.ctypes.data + position * step:
            return None
    shape, strides = (len(first), len(arrays)), (*first.strides, step)
    return np.lib.stride_tricks.as_strided(first, shape, strides) if first.dtype.kind == "f" else None


def to_arrays(predictions: Predictions, probs: bool) -> dict[str, NDArray[Any]]:
    """Return the fields of predictions as arrays."""
    tensors = {"probs": predictions.probs} if probs else {"logits": predictions.logits}
    optional = {
        "labels": predictions.given_labels,
        "features": predictions.features,
        "index": predictions.index,
    }
    tensors |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    texts = {"ids": predictions.ids, "paths": predictions.paths}
    # numpy has no bfloat16.
    arrays = {
        name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().cpu().numpy()
        for name, tensor in tensors.items()
    }
    return arrays | {name: text_array(value) for name, value in texts.items() if value is not None}


def to_columns(predictions: Predictions, probs: bool) -> dict[str, NDArray[Any]]:
    """Return the fields of predictions as columns, one for each class, under the names that are read again."""
    names, columns = class_columns(predictions), dict[str, NDArray[Any]]()
    for name, array in to_arrays(predictions, probs).items():
        singular = SINGULAR.get(name, name)
        if array.ndim == 1:
            columns[singular] = array
        else:
            suffixes = names if name != "features" else tuple(map(str, range(array.shape[1])))
            columns |= {f"{singular}_{suffix}": array[:, i] for i, suffix in enumerate(suffixes)}
    if predictions.class_names is not None and "label" in columns:
        columns["label"] = text_array([names[i] for i in columns["label"].tolist()])
    return columns | {name: text_array(texts) for name, texts in metadata_columns(predictions, columns).items()}


def metadata_columns(predictions: Predictions, columns: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return metadata as texts, without columns whose name would give them a role beside the others."""
    texts = {
        name: ["" if _is_missing(value) else str(value) for value in values]
        for name, values in (predictions.metadata or {}).items()
        if name not in columns
    }
    return {
        name: values
        for name, values in texts.items()
        if name in find_roles({**columns, name: text_array(values)}, {}, "metadata").unread
    }


def class_columns(predictions: Predictions) -> tuple[str, ...]:
    """Return a column name for each class; raise if two could not be read again."""
    names = predictions.class_names or tuple(map(str, range(predictions.num_classes)))
    if len({name.strip() for name in names}) < len(names):
        raise UserError("two classes have the same name; a table with a column for each class needs different ones")
    return names
