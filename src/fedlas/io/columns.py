"""Column conventions: which columns of a table hold scores, labels, confidences and predictions.

    logits or probs           one array (npz), one list column (parquet)
    logit_NAME or prob_NAME   one column for each class (csv, parquet); NAME becomes the class name
    label                     class name, or class number if no class has that name; `label_NAME` hold soft labels
    confidence, prediction    instead of probabilities, if only the top class is known; `correct` (0 or 1) may replace
                              `label`, `prediction` or both
    index, feature_NAME       optional; `features`, `class_names`, `split` in npz
    id, path                  optional: the name of each sample, and its image file

These names are matched exactly; if none are found, common names of other tools are matched without regard to case.
Whether scores are probabilities or logits is never guessed from values. Scores whose name does not say it
(`predictions`, `outputs`, class names alone) are probabilities, which are checked, unless the caller says that they are
logits. `predictions` with `label_ids` are logits: a `PredictionOutput` of Hugging Face.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypedDict

from torch import Tensor

from fedlas.catalog import nearest
from fedlas.errors import UserError, UserTypeError, short_list
from fedlas.io.labels import LabelFile, is_number_text
from fedlas.predictions import SCORE_ROLES, ColumnRoles

LABELS = ("label", "labels")
LABEL_NAMES = {
    *LABELS, "target", "targets", "y", "y_true", "true", "truth", "ground_truth", "gt", "class", "true_label",
    "label_ids", "obs",
}  # fmt: skip
PROB_PREFIXES = ("prob_", "probs_", "proba_", "probability_", "p_", ".pred_")
LOGIT_PREFIXES = ("logit_", "logits_")
LOGIT_TABLES = {"logits", "logit"}
BINARY = {"probs", "proba", "probabilities", "probability", "y_prob", "y_proba", "y_score"}  # or one number a sample
PROB_TABLES = BINARY | {"prob", "softmax", "predictions", "prediction", "preds", "y_pred", "outputs", "output"}
# Names of tables that may hold probabilities or logits.
UNDECLARED = {"predictions", "prediction", "preds", "y_pred", "outputs", "output", "y_score"}
CONFIDENCES = {"confidence", "confidences", "conf", "max_prob", "prob"}
PREDICTIONS = {
    "prediction", "predictions", "pred", "preds", "predicted", "y_pred", "pred_label", "predicted_label",
    "predicted_class", ".pred_class",
}  # fmt: skip
CORRECT = {"correct", "hit", "is_correct"}
CLASS_NAMES = {"class_names", "classes", "classes_"}
# Columns that are matched exactly, and neither scores nor labels.
OTHERS = {"index", "id", "ids", "path", "paths", "class_names", "features", "split", "format"}
NUMERIC_PREFIXES = ("logit_", "prob_", "feature_", "label_")  # of columns that hold numbers
ROW_NAMES = {"", "unnamed: 0"}  # the row numbers that pandas and R write
RANKED_CLASSES = ("index_", "class_", "pred_", "prediction_")  # prefixes before a rank: the most likely classes (timm)


class ColumnOptions(TypedDict, total=False):
    """Roles of columns whose names do not show them.

    Attributes:
        label_column: column of the labels.
        prob_columns: columns of the classes: names, or a pattern such as "score_*"; or the name of one array.
        confidence_column: column of the confidence of the predicted class.
        prediction_column: column of the predicted class.
        correct_column: column of the correctness of the prediction: 0 or 1, true or false.
        header: whether a text file begins with a header.
        normalize: divide every row of probabilities by its sum.
        class_names: names of the classes of an array; the columns of a table name them.
    """

    label_column: str | None
    prob_columns: str | Sequence[str] | None
    confidence_column: str | None
    prediction_column: str | None
    correct_column: str | None
    header: bool
    normalize: bool
    class_names: Sequence[str] | None


class ReadOptions(ColumnOptions, total=False):
    """How a table of predictions is read.

    Attributes:
        logits: whether the scores are logits, if their names do not show it.
        labels: labels that are not in the table: an array or a file.
    """

    logits: bool
    labels: Any


def check_options(options: Mapping[str, Any], function: Callable[..., Any] | None = None) -> None:
    """Raise if a keyword is neither about columns nor one of the function that was called."""
    for name in options.keys() - ReadOptions.__annotations__.keys():
        own = () if function is None else inspect.signature(function).parameters.values()
        known = [parameter.name for parameter in own if parameter.kind is parameter.KEYWORD_ONLY]
        hint = nearest(name, list(dict.fromkeys([*known, *ReadOptions.__annotations__])))
        raise UserTypeError(f"unknown keyword {name!r}; {hint}")


class ScoreColumns(NamedTuple):
    """Columns that hold scores: one for each class, or one table.

    Attributes:
        logits: whether the names mean logits (True) or probabilities (False); None if they do not show it.
        names: class name of each column; empty for a table.
    """

    logits: bool | None
    names: Mapping[str, str]

    def roles(self, options: ReadOptions, path: object) -> dict[str, str]:
        """Return the names that fedlas uses for the columns."""
        if self.logits is False and options.get("logits"):
            listed = short_list(self.names, 6)
            raise UserError(
                f"{path}: --logits (logits=True) contradicts the names of {listed}, which are probabilities; leave it "
                f"out, or, if they are logits, name them with {option('prob_columns')}, too"
            )
        kind = "logit" if self.logits or options.get("logits") else "prob"
        return {column: f"{kind}_{name}" if name else f"{kind}s" for column, name in self.names.items()}


def find_roles(columns: Mapping[str, Any], options: ReadOptions, path: object) -> ColumnRoles:
    """Find the columns that hold scores, labels, confidences and predictions.

    Args:
        columns: values by name; the first row is enough, unless columns are named by class names alone.
        options: the columns that the caller names.
        path: the file, for errors.
    """
    if not options.get("header", True):
        return _roles_by_position(columns, options, path)
    names = label_names(columns, options, path)
    if any(dimensions(values) == 2 for values in columns.values()):
        names |= {name: "class_names" for name in columns if name.casefold() in CLASS_NAMES}
    roles = set(names.values())
    if "confidence" in roles and not roles & {"prediction", "correct"}:
        names |= _find_top_label({name: columns[name] for name in columns if name not in names}, names, path)
    if not _has_scores(names):
        names |= _find_scores(columns, names, options, path)
    exact = {name for name in columns if name in OTHERS or name.startswith(("feature_", "label_"))}
    classes = {role.partition("_")[2] for role in names.values() if role.startswith(("prob_", "logit_"))}
    label_columns = {name for name in exact if name.startswith("label_")}
    soft_labels = {name for name in label_columns if name.removeprefix("label_") in classes}
    if len(classes) > 1 and len(soft_labels) in {0, len(classes)}:  # in between, a name is probably misspelt
        exact -= label_columns - soft_labels
    unread = [name for name in columns if name not in names and name not in exact and name.casefold() not in ROW_NAMES]
    return ColumnRoles({name: role for name, role in names.items() if name in columns}, unread)


def _has_scores(names: Mapping[str, str]) -> bool:
    return any(role.startswith(SCORE_ROLES) for role in names.values())


def label_names(columns: Mapping[str, Any], options: ReadOptions, path: object) -> dict[str, str]:
    """Return the roles of labels and of the columns that the caller names; these do not depend on values."""
    names = _chosen_roles(columns, options, path)
    if "label" not in names.values() and options.get("labels") is None:
        names |= _find_labels(columns, names, path)
    return names


def table_kind(name: str) -> str | None:
    """Return "prob" or "logit" if a table of this name holds scores, else None."""
    bare = name.casefold()
    return "logit" if bare in LOGIT_TABLES else "prob" if bare in PROB_TABLES else None


def option(name: str) -> str:
    """Return the name of an option, for the command line and for Python."""
    return f"--{name.replace('_', '-')} (in Python {name}=)"


def header_advice(names: Iterable[str], options: ReadOptions) -> str:
    """Return advice if the header of a file is a row of numbers: the file may have no header."""
    cells = [cell for name in names if name.casefold() not in ROW_NAMES for cell in name.split(";")]  # 0,7;0,3
    if not cells or not options.get("header", True) or not all(map(is_number_text, cells)):
        return ""
    return "; if this is the first row of a text file without a header, add --no-header (in Python header=False)"


def _chosen_roles(columns: Mapping[str, Any], options: ReadOptions, path: object) -> dict[str, str]:
    """Return the roles of the columns that the caller names."""
    names: dict[str, str] = {}
    for role in ("label", "confidence", "prediction", "correct"):
        column = options.get(f"{role}_column")
        if column is not None and (role != "label" or options.get("labels") is None):
            names[_check_column(str(column), columns, f"{role}_column", options, path)] = role
    chosen = options.get("prob_columns")
    if chosen is None:
        return names
    if isinstance(chosen, str):
        chosen = [chosen] if chosen in columns else [name.strip() for name in chosen.split(",")]
    names_given = [str(name) for name in chosen]
    prefixes = (
        prefix for prefix in LOGIT_PREFIXES + PROB_PREFIXES if all(_has_prefix(name, prefix) for name in names_given)
    )
    shared = len(next(prefixes, ""))
    classes: dict[str, str] = {}
    for name in names_given:
        if name in columns or "*" not in name:
            classes[_check_column(name, columns, "prob_columns", options, path)] = name[shared:]
            continue
        pattern = re.compile("(.*)".join(map(re.escape, name.split("*"))))
        matches = {column: match for column in columns if column not in names and (match := pattern.fullmatch(column))}
        if not matches:
            _check_column(name, columns, "prob_columns", options, path)
        classes |= {column: "".join(match.groups()) or column for column, match in matches.items()}
    if len(classes) == 1:  # a table, or the probability of class 1
        classes = dict.fromkeys(classes, "")
    return names | ScoreColumns(None, classes).roles(options, path)


def _has_prefix(name: str, prefix: str) -> bool:
    return name.casefold().startswith(prefix) and len(name) > len(prefix)


def _check_column(name: str, columns: Mapping[str, Any], chosen: str, options: ReadOptions, path: object) -> str:
    """Return the name of a column; raise if there is no such column."""
    if name not in columns:
        advice = header_advice(columns, options)
        if chosen == "label_column":
            advice += (
                f"; labels may come from another file: {option('labels')}, for calibration data "
                f"{option('calibration_labels')}"
            )
        raise UserError(f"{path}: {option(chosen)} names {name!r}; the columns are {short_list(columns)}{advice}")
    return name


def _roles_by_position(columns: Mapping[str, Any], options: ReadOptions, path: object) -> ColumnRoles:
    """Return the roles in a file without header: all columns but the chosen ones are classes, in order."""
    names = _chosen_roles(columns, options, path)
    rest = [name for name in columns if name not in names]
    if _has_scores(names):
        scores = [name for name, role in names.items() if role.startswith(("prob_", "probs", "logit"))]
    else:
        scores, rest = rest, []
    classes = {name: str(number) if len(scores) > 1 else "" for number, name in enumerate(scores)}
    return ColumnRoles(names | ScoreColumns(None, classes).roles(options, path), rest)


def _find_labels(columns: Mapping[str, Any], taken: Mapping[str, str], path: object) -> dict[str, str]:
    """Find the column of labels: by its exact name, or by names of other tools."""
    exact = [name for name in LABELS if name in columns and name not in taken]
    names = exact or [name for name in columns if name.casefold() in LABEL_NAMES and name not in taken]
    if len(names) > 1:
        raise UserError(
            f"{path}: several columns may hold the labels: {', '.join(names)}; choose one with {option('label_column')}"
        )
    return dict.fromkeys(names, "label")


def _find_scores(
    columns: Mapping[str, Any], taken: Mapping[str, str], options: ReadOptions, path: object
) -> dict[str, str]:
    """Find the scores: by exact names, by names of other tools, or by class names."""
    free = {name: values for name, values in columns.items() if name not in taken}

    @cache
    def labels() -> set[str]:
        soft = {name.removeprefix("label_") for name in columns if name.startswith("label_")}
        return soft | _label_values(columns, taken, options)

    candidates = _find_exact(free)
    if not candidates and not {"confidence", "prediction"} <= {*free, *taken.values()}:
        candidates = _find_families(free, labels) or _find_by_class_name(free, labels)
    if not candidates:
        return _find_top_label(free, taken, path)
    if len(candidates) > 1:
        listed = "; ".join(short_list(candidate.names, 6) for candidate in candidates)
        raise UserError(
            f"{path}: several columns may hold the scores: {listed}; choose with {option('prob_columns')}, and add "
            f"--logits (logits=True) for logits"
        )
    scores = candidates[0]
    _check_ranks(scores, columns, path)
    if "label_ids" in columns and set(scores.names) == {"predictions"}:  # Hugging Face
        scores = scores._replace(logits=True)
    return scores.roles(options, path)


def _check_ranks(ranked: ScoreColumns, columns: Mapping[str, Any], path: object) -> None:
    """Raise if scores are those of the k most likely classes, whose numbers are in other columns (timm)."""
    ranks = list(ranked.names.values())
    for prefix in RANKED_CLASSES if _are_consecutive(ranks) else ():
        others = [f"{prefix}{rank}" for rank in ranks]
        if all(name in columns for name in others):
            scores = list(ranked.names)
            raise UserError(
                f"{path}: {short_list(scores, 6)} are scores of the most likely classes, which are in "
                f"{short_list(others, 6)}, not of class 0, 1, ...; evaluate the most likely one with "
                f"{option('confidence_column')} {scores[0]} and {option('prediction_column')} {others[0]}"
            )


def _find_exact(columns: Mapping[str, Any]) -> list[ScoreColumns]:
    """Find scores under the names that fedlas writes."""
    groups = [ScoreColumns(name == "logits", {name: ""}) for name in ("logits", "probs") if name in columns]
    for prefix in ("logit_", "prob_"):
        members = {name: name.removeprefix(prefix) for name in columns if name.startswith(prefix)}
        if members:
            groups.append(ScoreColumns(prefix == "logit_", members))
    return groups


def _find_families(columns: Mapping[str, Any], labels: Callable[[], set[str]]) -> list[ScoreColumns]:
    """Find scores under the names of other tools."""
    groups = []
    for name, values in columns.items():
        bare = name.casefold()
        if bare in LOGIT_TABLES | PROB_TABLES and (dimensions(values) == 2 or (bare in BINARY and is_number(values))):
            groups.append(ScoreColumns(None if bare in UNDECLARED else bare in LOGIT_TABLES, {name: ""}))
    for prefix in LOGIT_PREFIXES + PROB_PREFIXES:
        members = {
            name: name[len(prefix) :]
            for name in columns
            if _has_prefix(name, prefix) and name.casefold() not in PREDICTIONS
        }
        numbers = {name: word for name, word in members.items() if word.isdecimal()}
        if _are_consecutive(list(numbers.values())):
            members = numbers
        words = list(members.values())
        # p_value is not a class: this prefix needs class numbers, or names that occur among the labels.
        named = prefix != "p_" or not labels().isdisjoint(words)
        if len(members) > 1 and (named or _are_consecutive(words)):
            groups.append(ScoreColumns(prefix in LOGIT_PREFIXES, members))
    return groups


def _find_by_class_name(columns: Mapping[str, Any], labels: Callable[[], set[str]]) -> list[ScoreColumns]:
    """Find columns that are called by class numbers, or by names that occur among the labels.

    Columns of numbers between two of the latter are classes without samples.
    """
    numbers = {name: name for name in columns if name.isdecimal() and is_number(columns[name])}
    if _are_consecutive(list(numbers)):
        return [ScoreColumns(None, numbers)]
    order = [name for name, values in columns.items() if is_number(values)]
    positions = [position for position, name in enumerate(order) if name.strip() in labels()] if len(order) > 1 else []
    if len(positions) < 2:
        return []
    run = order[positions[0] : positions[-1] + 1]
    return [ScoreColumns(None, {name: name for name in run if not name.startswith("label_")})]


def _find_top_label(columns: Mapping[str, Any], taken: Mapping[str, str], path: object) -> dict[str, str]:
    """Find confidences, with predictions or correctness."""
    top: dict[str, str] = {}
    for role, known in (("confidence", CONFIDENCES), ("prediction", PREDICTIONS), ("correct", CORRECT)):
        if role in taken.values():
            continue
        names = [role] if role in columns else [name for name in columns if name.casefold() in known]
        names = [name for name in names if name not in top]
        if len(names) > 1:
            raise UserError(
                f"{path}: several columns may hold the {role}: {', '.join(names)}; choose with "
                f"{option(f'{role}_column')}"
            )
        top |= dict.fromkeys(names, role)
    roles = {*top.values(), *taken.values()}
    if "confidence" in roles and not roles & {"prediction", "correct"}:
        column = next(name for name, role in {**taken, **top}.items() if role == "confidence")
        raise UserError(
            f"{path}: {column!r} is read as the confidence, and the predicted class is missing: name its column with "
            f"{option('prediction_column')}, or that of correctness with {option('correct_column')}; if {column!r} is "
            f"the probability of the second of two classes, use {option('prob_columns')} {column}"
        )
    return top if "confidence" in roles else {}


def _label_values(columns: Mapping[str, Any], taken: Mapping[str, str], options: ReadOptions) -> set[str]:
    """Return the distinct labels as texts."""
    labels = options.get("labels")
    column = next((name for name, role in taken.items() if role == "label"), None)
    values = labels.values if isinstance(labels, LabelFile) else columns[column] if column is not None else labels
    if values is None or dimensions(values) != 1:
        return set()
    return {str(value).strip() for value in (values.tolist() if hasattr(values, "tolist") else values)}


def dimensions(values: Any) -> int:
    """Return the number of dimensions; NumPy would copy a list of texts into entries of one width."""
    ndim = getattr(values, "ndim", None)
    if ndim is not None:
        return int(ndim)
    if isinstance(values, Mapping | str) or not hasattr(values, "__len__"):
        return 0  # not an array: a number of epochs, or settings
    return 2 if len(values) and isinstance(values[0], list | tuple) else 1


def _are_consecutive(words: Sequence[str]) -> bool:
    """Return whether texts are the numbers from 0 or 1 on, in any order."""
    if len(words) < 2 or not all(word.isdecimal() and len(word) < 10 for word in words):
        return False
    numbers = sorted(map(int, words))
    return numbers[0] in {0, 1} and numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def is_number(values: Any) -> bool:
    """Return whether a column holds one number per sample, by its type or its first value."""
    if dimensions(values) != 1 or not len(values):
        return False
    if isinstance(values, Tensor):
        return True
    kind = getattr(getattr(values, "dtype", None), "kind", "O")
    if kind != "O":
        return kind in "fiu"
    return is_number_text(str(next(iter(values))).replace(",", "."))
