"""More cases of the campaign on numbers: OOD detection, intervals and comparisons.

These need other inputs than a table with labels, so each has its own input and reference: detection metrics count pairs
of scores with fractions, OOD scores are computed with 50 digits, and values with intervals are compared like metrics.
Only Wilson's interval has a reference; all intervals must be finite, ordered, within the range of their metric, contain
the value if it is a mean, and be equal for equal seeds.
"""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from statistics import NormalDist
from typing import Any

import mpmath
import number_cases
import torch
from number_cases import (
    EXTREMES,
    FLOATS,
    HUGE,
    LOGITS,
    NO_OPTIONS,
    Description,
    Draw,
    FindingError,
    Target,
    as_container,
    as_tensor,
    check_result,
    compare,
    compared,
    laid_out,
    metric_input,
    prob_rows,
    tensor_of,
    validity,
)
from torch import Tensor

from fedlas import metrics, ood
from fedlas.metrics import Interval

DIGITS = mpmath.mp.clone()
DIGITS.dps = 50
LEVELS = (0.95, 0.5, 0.9, 0.99, 0.0, 1.0, 95, -0.1, math.nan)


def valid_level(level: float) -> bool:
    return 0 < level < 1


def check_interval(
    name: str, interval: Interval, description: Description, low: float = 0.0, high: float = 1.0
) -> None:
    """Check that an interval is finite, ordered and within the range of its metric."""
    if not low - 1e-12 <= interval.low <= interval.high <= high + 1e-12 or not math.isfinite(interval.high):
        raise FindingError(f"{name}: the interval {interval.low!r}..{interval.high!r}: {description}")


# Detection


def score_list(draw: Draw) -> Any:
    """Draw scores of some samples, or an invalid input."""
    palette = draw.pick((EXTREMES, LOGITS, LOGITS[:4], LOGITS + HUGE[:-1], LOGITS + HUGE))
    n = draw.pick((3, 1, 2, 4, 6))
    result = torch.tensor([draw.pick(palette) for _ in range(n)], dtype=torch.float64)
    dtype = draw.pick((*FLOATS, torch.int64)) if bool(result.isfinite().all()) else FLOATS[0]
    return with_fault(draw, laid_out(draw, result.to(dtype)))


def with_fault(draw: Draw, table: Tensor) -> Any:
    """Return another container of a table, or rarely an invalid input."""
    faults: tuple[Callable[[], Any], ...] = (
        lambda: table[:0], lambda: table[..., :0], lambda: table[..., :1], lambda: table[..., None], lambda: table[0],
        lambda: table[None], table.sum, lambda: table.to("meta"), table.to_sparse, lambda: table.to(torch.complex64),
        table.bool, lambda: table.nan_to_num(0, 0, 0).long(), lambda: None, lambda: "abc", lambda: [[0.5], [0.1, 2.0]],
    )  # fmt: skip
    fault = 255 - draw.byte()
    return faults[fault]() if fault < len(faults) else as_container(draw, table)


def exact_scores(scores: Any) -> list[Any] | None:
    """Convert scores to exact numbers, keeping infinities; return None if they are invalid."""
    result = as_tensor(scores)
    if result is None or result.ndim != 1 or not len(result) or result.is_complex() or bool(result.isnan().any()):
        return None
    return [value if math.isinf(value) else Fraction(value) for value in result.double().tolist()]


def counts_by_threshold(id_scores: list[Any], ood_scores: list[Any], positive: str) -> list[tuple[Any, int, int]]:
    """Return the thresholds with the number of positives and negatives that have exactly that score."""
    hit, miss = (ood_scores, id_scores) if positive == "ood" else (id_scores, ood_scores)
    order = sorted({*id_scores, *ood_scores}, reverse=positive == "ood")
    return [(score, hit.count(score), miss.count(score)) for score in order]


def auroc(id_scores: list[Any], ood_scores: list[Any]) -> float:
    correct = sum(Fraction(x < y) + Fraction(int(x == y), 2) for x in id_scores for y in ood_scores)
    return float(correct / (len(id_scores) * len(ood_scores)))


def aupr(id_scores: list[Any], ood_scores: list[Any], positive: str = "ood") -> float:
    total, true_positives, predicted = Fraction(), 0, 0
    for _, positives, negatives in counts_by_threshold(id_scores, ood_scores, positive):
        true_positives, predicted = true_positives + positives, predicted + positives + negatives
        total += Fraction(positives * true_positives, predicted)
    return float(total / true_positives)


def fpr_at_tpr(id_scores: list[Any], ood_scores: list[Any], tpr: float = 0.95, positive: str = "ood") -> float:
    rows = counts_by_threshold(id_scores, ood_scores, positive)
    positives, negatives = sum(row[1] for row in rows), sum(row[2] for row in rows)
    true_positives = false_positives = 0
    for _, hit, miss in rows:
        true_positives, false_positives = true_positives + hit, false_positives + miss
        if true_positives / positives >= tpr:
            break
    return float(Fraction(false_positives, negatives))


def check_detection(name: str, draw: Draw) -> str:
    options: dict[str, Any] = {}
    valid = True
    if draw.byte() % 2:
        options["level"] = draw.pick(LEVELS)
        valid = valid_level(options["level"])
    if name != "auroc" and draw.byte() % 2:
        options["positive"] = draw.pick(("id", "ood", "out", None))
        valid = valid and options["positive"] in {"id", "ood"}
    if name == "fpr_at_tpr" and draw.byte() % 2:
        options["tpr"] = draw.pick((0.5, 1.0, 0.8, 0.01, 1 / 3, 0.0, 1.5, math.nan))
        valid = valid and 0 < options["tpr"] <= 1
    scores = score_list(draw), score_list(draw)
    exact_inputs = [exact_scores(item) for item in scores]
    description = Description(*scores, options)
    result = check_result(
        name, lambda: getattr(ood, name)(*scores, **options), valid and None not in exact_inputs, description
    )
    if result is None:
        return "refused"
    check_interval(name, result.interval, description)
    if not result.interval.low - 1e-12 <= result <= result.interval.high + 1e-12:
        raise FindingError(f"{name}: {float(result)!r} is outside its interval {result.interval}: {description}")
    reference: Callable[..., float] = {"auroc": auroc, "aupr": aupr, "fpr_at_tpr": fpr_at_tpr}[name]
    return compared(
        name, result, reference(*exact_inputs, **{k: v for k, v in options.items() if k != "level"}), 1e-12, description
    )


# Scores of logits and features


def split_largest(row: list[float]) -> tuple[Any, list[Any]]:
    """Return the largest logit of a row and the differences of the others to it."""
    values = sorted((DIGITS.mpf(value) for value in row), reverse=True)
    return values[0], [value - values[0] for value in values[1:]]


def max_probability(row: list[float]) -> Any:
    other_mass = DIGITS.fsum(DIGITS.exp(d) for d in split_largest(row)[1])
    return other_mass / (1 + other_mass)


def entropy(row: list[float]) -> Any:
    differences = split_largest(row)[1]
    other_mass = DIGITS.fsum(DIGITS.exp(d) for d in differences)
    return DIGITS.log1p(other_mass) - DIGITS.fsum(d * DIGITS.exp(d) for d in differences) / (1 + other_mass)


def max_logit(row: list[float]) -> Any:
    return -split_largest(row)[0]


def energy(row: list[float], temperature: float = 1.0) -> Any:
    top, differences = split_largest(row)
    return -(top + temperature * DIGITS.log1p(DIGITS.fsum(DIGITS.exp(d / temperature) for d in differences)))


def generalised_entropy(row: list[float], gamma: float = 0.1, top: int = 100) -> Any:
    weights = [DIGITS.exp(d) for d in split_largest(row)[1]]
    other_mass = DIGITS.fsum(weights)
    total = 1 + other_mass
    first = (other_mass / total / total) ** gamma  # p (1 - p) of the likeliest, where 1 - p may be next to nothing
    other_terms = [(w / total * (1 - w / total)) ** gamma for w in weights[: top - 1]]
    return first + DIGITS.fsum(other_terms)


def feature_norm(row: list[float], p: float = 1.0) -> Any:
    values = [abs(DIGITS.mpf(value)) for value in row]
    if p == math.inf:
        return -max(values)
    return -(DIGITS.fsum(value**p for value in values) ** (1 / DIGITS.mpf(p)))


SCORE_OPTIONS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "energy": {"temperature": (1.0, 0.5, 10.0, 0.01, 0.0, -1.0, math.inf, math.nan)},
    "generalised_entropy": {"gamma": (0.1, 1.0, 0.5, 0.0, 2.0, math.nan), "top": (100, 1, 2, 3, 0, -1)},
    "feature_norm": {"p": (1.0, 2.0, math.inf, 3.0, 0.5, 0.0, -1.0, math.nan)},
}
VALID_OPTIONS: Mapping[str, Callable[[Any], bool]] = {
    "temperature": lambda x: 0 < x < math.inf,
    "gamma": lambda x: 0 < x <= 1,
    "top": lambda x: x >= 1,
    "p": lambda x: x > 0,
}


def any_table(draw: Draw, width: int | None = None) -> Any:
    """Draw a table of numbers of any magnitude, or an invalid input."""
    n, width, dtype = draw.pick((3, 1, 2, 4)), width or draw.pick((3, 2, 4, 5, 1)), draw.pick(FLOATS)
    palette = draw.pick((LOGITS, LOGITS[:7], EXTREMES, LOGITS + HUGE[:6], LOGITS + HUGE))
    result = tensor_of([[draw.pick(palette) for _ in range(width)] for _ in range(n)], n, width, dtype)
    return with_fault(draw, laid_out(draw, result))


def float_rows(values: Any, of_logits: bool) -> list[list[float]] | None:
    """Convert rows to floats; a single column of logits is the second class of a binary head."""
    result = as_tensor(values)
    if result is None or result.dtype not in FLOATS or not result.numel() or not bool(result.isfinite().all()):
        return None
    if of_logits and (result.ndim == 1 or tuple(result.shape[1:]) == (1,)):
        return [[0.0, value] for value in result.double().reshape(-1).tolist()]
    return result.double().tolist() if result.ndim == 2 else None


def check_score(name: str, draw: Draw) -> str:
    options = {}
    if draw.byte() % 2:
        options = {option: draw.pick(values) for option, values in SCORE_OPTIONS.get(name, NO_OPTIONS).items()}
    table = any_table(draw)
    rows = float_rows(table, name != "feature_norm")
    valid = rows is not None and all(VALID_OPTIONS[option](value) for option, value in options.items())
    description = Description(table, options)
    result = check_result(name, lambda: getattr(ood, name)(table, **options), valid, description)
    if result is None or rows is None:
        return "refused"
    reference: Callable[..., Any] = globals()[name]
    return compare_scores(name, result.tolist(), [reference(row, **options) for row in rows], description)


def compare_scores(
    name: str, values: list[float], expected: list[Any], description: Description, absolute_tolerance: float = 1e-300
) -> str:
    """Compare with a tight tolerance, except for subnormal numbers."""
    for actual, reference in zip(values, expected, strict=True):
        overflows = abs(reference) > DIGITS.mpf("1.79e308") and math.isinf(actual)
        if not overflows and not abs(DIGITS.mpf(actual) - reference) <= 1e-10 * abs(reference) + absolute_tolerance:
            raise FindingError(f"{name}: {actual!r} instead of {float(reference)!r}: {description}")
    return "right"


def knn(rows: list[list[float]], known: list[list[float]], k: int) -> list[Any]:
    """Return distances of normalised rows; zero rows are not normalised."""

    def direction(row: list[float]) -> list[Any]:
        values = [DIGITS.mpf(value) for value in row]
        length = DIGITS.sqrt(DIGITS.fsum(value**2 for value in values))
        return [value / length for value in values] if length else values

    known_directions = [direction(row) for row in known]
    result = []
    for row in map(direction, rows):
        squares = sorted(
            DIGITS.fsum((a - b) ** 2 for a, b in zip(row, other, strict=True)) for other in known_directions
        )
        result.append(DIGITS.sqrt(squares[k - 1]))
    return result


def check_knn(draw: Draw) -> str:
    k = draw.pick((1, 2, 3, 0, -1, 50))
    width = draw.pick((2, 3, 1, None))
    features, known = any_table(draw, width), any_table(draw, width)
    rows, known_rows = float_rows(features, of_logits=False), float_rows(known, of_logits=False)
    valid = (
        rows is not None and known_rows is not None and len(rows[0]) == len(known_rows[0]) and 1 <= k <= len(known_rows)
    )
    description = Description(features, known, k)
    result = check_result("knn", lambda: ood.knn(features, known, k), valid, description)
    if result is None or rows is None or known_rows is None:
        return "refused"
    # Distances come from |a|^2 - 2ab + |b|^2, whose root magnifies the last digit near zero.
    return compare_scores("knn", result.tolist(), knn(rows, known_rows, k), description, 1e-7)


# Intervals and comparisons

SUMS = ("ece", "aece", "classwise_ece", "over_ece", "under_ece", "rms_error", "debiased_l2")
MEANS = ("signed_ece", "nll", "brier")
AREAS = ("aurc", "e_aurc", "augrc")  # need at least twenty errors, which these inputs never have
WITHOUT = ("mce", "top_k", "smooth_ece")


def bootstrap_options(draw: Draw) -> tuple[dict[str, Any], bool]:
    """Draw a level, a number of resamples and a seed; return whether they are valid."""
    result: dict[str, Any] = {"resamples": 20, "seed": draw.byte()}
    if draw.byte() % 4 == 3:
        result |= {"resamples": draw.pick((50, 200, 19, 0, -1)), "level": draw.pick(LEVELS)}
    return result, valid_level(result.get("level", 0.95)) and result["resamples"] >= 20


def check_bootstrap(draw: Draw) -> str:
    name = draw.pick((*SUMS, "accuracy", *MEANS, *SUMS, *AREAS, *WITHOUT))
    metric, (options, options_valid) = getattr(metrics, name), bootstrap_options(draw)
    if name in {*SUMS, "signed_ece"}:
        options["bins"] = draw.pick((15, 1, 2, 3))
    scores, labels = metric_input(draw)
    valid, rows = validity(scores, labels)
    valid = False if not options_valid or name in {*AREAS, *WITHOUT} else valid
    description = Description(name, scores, labels, options)
    result = check_result(
        f"bootstrap of {name}", lambda: metrics.bootstrap(metric, scores, labels, **options), valid, description
    )
    if result is None or rows is None:
        return "refused" if result is None else "taken"
    results = result if isinstance(result, tuple) else (result,)
    for item in results:
        check_interval(name, item.interval, description, *{"nll": (0.0, math.inf), "brier": (0.0, 2.0 + 1e-2),
                                                   "signed_ece": (-1.0, 1.0)}.get(name, (0.0, 1.0)))  # fmt: skip
        if name in MEANS and not item.interval.low - 1e-9 <= item <= item.interval.high + 1e-9:
            raise FindingError(f"{name}: {float(item)!r} is outside its interval {item.interval}: {description}")
    if name == "accuracy" and rows[1].ndim == 1:  # soft labels have another interval
        wilson(float(result), len(rows[0]), result.interval, description)
    if draw.byte() % 8 == 7:
        repeated = metrics.bootstrap(metric, scores, labels, **options)
        repeated_results = repeated if isinstance(repeated, tuple) else (repeated,)
        if [item.interval for item in repeated_results] != [item.interval for item in results]:
            raise FindingError(f"{name}: another interval from the same seed: {description}")
    bin_options = {option: value for option, value in options.items() if option == "bins"}
    return compare(name, result, rows, bin_options, description)


def wilson(rate: float, n: int, interval: Interval, description: Description) -> None:
    """Check that both ends solve (rate - x)^2 = z^2 x (1 - x) / n."""
    z = NormalDist().inv_cdf((1 + interval.level) / 2)
    for end in (interval.low, interval.high):
        if end not in {0.0, 1.0} and abs((rate - end) ** 2 - z**2 * end * (1 - end) / n) > 1e-9:
            raise FindingError(f"accuracy: {end!r} is no end of Wilson's interval: {description}")


def check_pair(draw: Draw) -> str:
    name = draw.pick(("ece", "aece", "accuracy", "nll", "brier", "mce"))
    metric, (options, options_valid) = getattr(metrics, name), bootstrap_options(draw)
    first, labels = metric_input(draw)
    second = first
    table = as_tensor(first)
    if table is not None and table.ndim == 2 and table.numel() and table.dtype in FLOATS and draw.byte() % 8:
        n, classes = len(table) + (draw.byte() == 255), table.shape[1] + (draw.byte() == 255)
        second = as_container(draw, tensor_of(prob_rows(draw, n, classes), n, classes, draw.pick(FLOATS)))
    checked = [validity(model, labels) for model in (first, second)]
    validities = [valid for valid, _ in checked]
    valid = False if not options_valid or name == "mce" or False in validities else None if None in validities else True
    description = Description(name, first, second, labels, options)
    call = lambda: metrics.paired_bootstrap(metric, first, second, labels, **options)  # noqa: E731
    result = check_result(f"paired bootstrap of {name}", call, valid, description)
    if result is None or any(rows is None for _, rows in checked):
        return "refused" if result is None else "taken"
    check_interval(name, result.interval, description, -math.inf, math.inf)
    low, high = result.interval.low, result.interval.high
    expected = None if low <= 0 <= high else "first" if (low > 0) == (name == "accuracy") else "second"
    if result.better != expected or not 0 <= result.p_value <= 1:
        raise FindingError(f"{name}: {result.better!r} with p = {result.p_value} and {low}..{high}: {description}")
    outcomes = {compare(name, value, rows, {}, description)
                for value, (_, rows) in zip((result.first, result.second), checked, strict=True) if rows}  # fmt: skip
    return "right" if outcomes == {"right"} else "taken"


def targets() -> list[Target]:
    """Return all fuzz targets of this module and of `number_cases`."""
    result = number_cases.targets()
    for name in ("auroc", "aupr", "fpr_at_tpr"):
        result.append(Target(name, "detection", lambda draw, name=name: check_detection(name, draw)))
    for name in ("max_probability", "entropy", "max_logit", "energy", "generalised_entropy", "feature_norm"):
        result.append(Target(name, "score", lambda draw, name=name: check_score(name, draw)))
    result += [Target("knn", "score", check_knn), Target("bootstrap", "interval", check_bootstrap)]
    return [*result, Target("paired_bootstrap", "interval", check_pair)]
