"""Fuzz targets of the campaign on numbers: every input must give a correct value or a clear error.

`Draw` turns bytes (from a coverage-guided fuzzer or a seed) into tables with extreme, subnormal, infinite
or missing values and wrong shapes. Whether an input is valid is decided here independently of the library, from shapes,
types and values. A valid input must give the value of exact or float64 arithmetic; an invalid input must raise
ValueError or TypeError with a message. Everything else is a finding. The outcome is "right" (the value was compared),
"refused" (a clear error was raised) or "taken" (a value was returned that cannot be compared, because rounding decides
or there is no reference).

The targets are collected automatically: all losses of the catalogue with their options, the functions of
`fedlas.metrics` that take probabilities and labels, and their accumulators. `more_cases.py` adds targets with other
inputs.
"""

import inspect
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "contract"), str(TESTS / "losses"), str(TESTS / "faults")]

import exact_metrics  # noqa: E402
import kernel_metrics  # noqa: E402
import loss_cases  # noqa: E402
import plain  # noqa: E402

import fedlas  # noqa: E402
from fedlas import metrics  # noqa: E402
from fedlas.metrics.base import AbstractMetric  # noqa: E402
from fedlas.metrics.registry import all_metrics  # noqa: E402

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
OTHER_DTYPES = (torch.int64, torch.bool, torch.complex64, torch.uint8)
ODD_LABELS = (torch.bool, torch.float32, torch.float16, torch.complex64)
INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.int16, torch.int8)
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EXTREMES = (
    0.0,
    -0.0,
    1.0,
    0.5,
    1 / 3,
    1e-3,
    5e-324,
    1.4e-45,
    1.2e-38,
    2.3e-308,
    6e-8,
    1 - 2**-53,
    1 - 2**-24,
    1 + 2**-23,
)
LOGITS = (0.0, 1.0, -1.0, 6.0, -6.0, 20.0, -20.0, 88.0, -104.0, 745.0, 1e4, -1e4, 6e4, 1e-3, 1e-40, 5e-324, -0.0)
HUGE = (1e30, -1e30, 3e38, -3e38, 1e300, -1e308, math.inf, -math.inf, math.nan)
CLASSES, WIDTH, SAMPLES = 5, 3, 12
NO_OPTIONS: Mapping[str, Any] = {}


class FindingError(AssertionError):
    """The library returned a wrong value, rejected a valid input, or raised an unclear error."""


class Draw:
    """Choices derived from bytes; after the last byte, every choice is the first option."""

    def __init__(self, content: bytes) -> None:
        self.remaining = iter(content)

    def byte(self) -> int:
        return next(self.remaining, 0)

    def pick(self, options: Any) -> Any:
        return options[next(self.remaining, 0) % len(options)]

    def integer(self, low: int, high: int) -> int:
        return low + self.byte() % (high - low + 1)


@dataclass(frozen=True)
class Target:
    """A fuzz target: its name, and the check of one input."""

    name: str
    kind: str
    check: Callable[[Draw], str] = field(repr=False)

    def __call__(self, content: bytes) -> str:
        """Check an input and return the outcome; a finding raises."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings(
                "ignore", "every row of the logits lies between"
            )  # a warning that does not affect the value
            return self.check(Draw(content))


# Tables of probabilities


def prob_rows(draw: Draw, n: int, classes: int) -> list[list[float]]:
    kind = draw.pick(("steps", "softmax", "one-hot", "tiny", "raw"))
    rows = []
    for _ in range(n):
        if kind == "steps":
            steps = draw.pick((15, 10, 2, 3, 4, 7))
            cuts = sorted(draw.integer(0, steps) for _ in range(classes - 1))
            row = [(b - a) / steps for a, b in zip([0, *cuts], [*cuts, steps], strict=True)]
        elif kind == "softmax":
            row = plain.softmax([draw.pick(LOGITS) for _ in range(classes)])
        elif kind == "raw":
            row = [draw.pick(EXTREMES + HUGE) for _ in range(classes)]
        else:
            row = [
                0.0 if kind == "one-hot" else draw.pick((5e-324, 1.4e-45, 6e-8, 1e-20, 1e-9)) for _ in range(classes)
            ]
            if classes:
                row[draw.integer(0, classes - 1)] = 1.0
        rows.append(row)
    return rows


def tensor_of(rows: list[list[float]], n: int, classes: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).reshape(n, classes).to(dtype)


def hard_labels(draw: Draw, n: int, classes: int) -> Tensor:
    top = max(classes - 1, 0)
    return torch.tensor([draw.integer(0, top) for _ in range(n)], dtype=draw.pick(INTEGERS))


def soft_labels(draw: Draw, n: int, classes: int) -> Tensor:
    return tensor_of(prob_rows(draw, n, classes), n, classes, draw.pick(FLOATS))


def laid_out(draw: Draw, table: Tensor) -> Tensor:
    """Return the same values in another memory layout."""
    layout = draw.pick(("plain", "transposed", "every second", "inside", "grad", "plain", "plain"))
    if table.is_meta or not table.numel():
        return table
    if layout == "transposed" and table.ndim == 2:
        return table.t().contiguous().t()
    if layout == "every second":
        return torch.stack([table, table], 1)[:, 1] if table.ndim == 1 else table.repeat_interleave(2, 0)[::2]
    if layout == "inside" and table.ndim == 2:
        return torch.cat([table, table], 1)[:, table.shape[1] :]
    return table.requires_grad_() if layout == "grad" and table.is_floating_point() else table


def as_container(draw: Draw, table: Tensor) -> Any:
    """Return the same values as an array, list or tensor."""
    container = draw.pick(("tensor", "tensor", "numpy", "backwards", "read-only", "big-endian", "lists"))
    if container == "tensor" or table.is_meta or table.requires_grad or table.dtype == torch.bfloat16:
        return table
    if container == "lists":
        return table.tolist()
    result = table.numpy()
    if container == "backwards":
        return result[::-1].copy()[::-1] if result.ndim else result
    if container == "big-endian":
        return result.astype(result.dtype.newbyteorder(">"))
    if container == "read-only":
        result = result.copy()
        result.flags.writeable = False
    return result


FAULTS: dict[str, Callable[[Draw, Any, Any], tuple[Any, Any]]] = {
    "none": lambda d, s, y: (s, y),
    "a cell": lambda d, s, y: (_with_cell(s, d.integer(0, 99), d.pick((*HUGE, -1e-9, -0.5, 2.0, -1e-320))), y),
    "a label": lambda d, s, y: (s, _with_cell(y, d.integer(0, 99), d.pick((-1, 5, 100, -100, 127, -128)))),
    "a soft label": lambda d, s, y: (s, _with_cell(y, d.integer(0, 99), d.pick((*HUGE, -1e-9, 0.5)))),
    "no samples": lambda d, s, y: (s[:0], y[:0]),
    "no classes": lambda d, s, y: (s[:, :0], y),
    "too few labels": lambda d, s, y: (s, y[:-1]),
    "one label": lambda d, s, y: (s, y[:1]),
    "one row": lambda d, s, y: (s[:1], y),
    "labels in a column": lambda d, s, y: (s, y[:, None]),
    "labels in a row": lambda d, s, y: (s, y[None]),
    "one column": lambda d, s, y: (s[:, :1], y),
    "turned": lambda d, s, y: (s.t(), y),
    "a vector": lambda d, s, y: (s.reshape(-1), y),
    "a number": lambda d, s, y: (s.sum(), y),
    "a label alone": lambda d, s, y: (s, y.sum()),
    "maps": lambda d, s, y: (s[..., None], y[..., None]),
    "scores of another type": lambda d, s, y: (s.nan_to_num(0, 0, 0).to(d.pick(OTHER_DTYPES)), y),
    "labels of another type": lambda d, s, y: (s, y.to(d.pick(ODD_LABELS))),
    "both elsewhere": lambda d, s, y: (s.to("meta"), y.to("meta")),
    "scores elsewhere": lambda d, s, y: (s.to("meta"), y),
    "labels elsewhere": lambda d, s, y: (s, y.to("meta")),
    "no labels": lambda d, s, y: (s, None),
    "words": lambda d, s, y: (d.pick(("abc", ["a", "b"], b"", {}, object(), 3, None)), y),
    "ragged": lambda d, s, y: ([[0.5, 0.5], [1.0]], y),
    "swapped": lambda d, s, y: (y, s),
    "sparse": lambda d, s, y: (s.to_sparse(), y),
    "one-hot": lambda d, s, y: (s, torch.eye(max(s.shape[1], 1), dtype=d.pick((torch.int64, torch.float32)))[y.long()]),
}  # fmt: skip


def _with_cell(table: Tensor, position: int, value: float) -> Tensor:
    if not table.numel() or (not table.is_floating_point() and not math.isfinite(value)):
        return table
    changed = table.detach().clone().contiguous()
    limits = None if table.is_floating_point() else torch.iinfo(table.dtype)
    if limits is not None and not limits.min <= value <= limits.max:
        return table
    changed.view(-1)[position % table.numel()] = value
    return changed


FAULT_CHOICES = (*["none"] * len(FAULTS), *FAULTS)


def with_fault(draw: Draw, scores: Tensor, labels: Tensor) -> tuple[Any, Any]:
    """Apply a random change to a valid input; half of the time none."""
    fault = draw.pick(FAULT_CHOICES)
    try:
        return FAULTS[fault](draw, scores, labels)
    except (RuntimeError, IndexError, TypeError, AttributeError):  # the change does not apply to this input
        return scores, labels


# Validity


def as_tensor(values: Any) -> Tensor | None:
    """Convert an input to a tensor of numbers; return None if that is impossible."""
    if isinstance(values, Tensor):
        return None if values.is_meta or values.layout != torch.strided else values.detach()
    try:
        result = np.asarray(values)
        return torch.tensor(result.tolist(), dtype=_torch_type(result.dtype)).reshape(result.shape)
    except (ValueError, TypeError, KeyError, RuntimeError, OverflowError):
        return None


def _torch_type(dtype: Any) -> torch.dtype:
    return {"f2": torch.float16, "f4": torch.float32, "f8": torch.float64, "i8": torch.int64, "i4": torch.int32,
            "i2": torch.int16, "i1": torch.int8, "u1": torch.uint8, "b1": torch.bool}[dtype.str[1:]]  # fmt: skip


def distributions(table: Tensor) -> bool | None:
    """Return whether all rows are distributions; None if rounding decides."""
    allowed = TOLERANCE[table.dtype]
    valid: bool | None = True
    for row in table.double().tolist():
        if any(not math.isfinite(value) or value < 0 for value in row):
            return False
        deviation = abs(math.fsum(row) - 1)
        if deviation > allowed + 4e-7:
            return False
        valid = None if deviation > allowed - 4e-7 else valid
    return valid


def rows_of(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor] | None:
    """Flatten maps to rows; return None if shapes do not match."""
    if scores.ndim < 2 or scores.shape[1] == 0 or scores.numel() == 0:
        return None
    space = (scores.shape[0], *scores.shape[2:])
    table = scores.movedim(1, -1).reshape(-1, scores.shape[1])
    if tuple(labels.shape) == space and not labels.is_floating_point() and not labels.is_complex():
        return table, labels.reshape(-1).long()
    if labels.shape == scores.shape and labels.is_floating_point():
        return table, labels.movedim(1, -1).reshape(-1, scores.shape[1])
    return None


def valid_labels(labels: Tensor, classes: int, ignored: int | None = None) -> bool | None:
    if labels.ndim == 2:
        return distributions(labels)
    return all(0 <= label < classes or label == ignored for label in labels.tolist())


fraction = lru_cache(maxsize=10_000)(Fraction)  # called repeatedly with few distinct values


def exact_table(table: Tensor, labels: Tensor) -> exact_metrics.Table:
    rows = [[fraction(value) for value in row] for row in table.double().tolist()]
    if labels.ndim == 2:
        truth = [[fraction(value) for value in row] for row in labels.double().tolist()]
    else:
        truth = [[fraction(float(k == label)) for k in range(table.shape[1])] for label in labels.tolist()]
    return exact_metrics.Table(rows, truth, table.dtype, labels.ndim == 2)


# Metrics


class Description:
    """A description of an input, formatted only for a finding."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __str__(self) -> str:
        return "; ".join(map(_formatted, self.values))


def _formatted(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    content = value.device if value.is_meta else value.to_dense().tolist()
    return f"{value.dtype} {tuple(value.shape)} {content}"


def check_result(name: str, call: Callable[[], Any], valid: bool | None, description: Description) -> Any:
    """Call a function; return its result, or None after a clear error about an invalid input."""
    try:
        result = call()
    except (ValueError, TypeError) as error:
        message = str(error)
        if len(message) < 10:
            raise FindingError(f"{name}: says only {message!r} about {description}") from error
        if valid and "soft" not in message:
            raise FindingError(f"{name}: rejects valid input ({message}): {description}") from error
        return None
    except Exception as error:
        raise FindingError(f"{name}: {type(error).__name__} ({error}) on {description}") from error
    if valid is False:
        raise FindingError(f"{name}: accepts invalid input and returns {result}: {description}")
    return result


def metric_input(draw: Draw) -> tuple[Any, Any]:
    n, classes = draw.pick((3, 1, 2, 4, 5, 6)), draw.pick((3, 2, 4, 5, 1))
    dtype = draw.pick(FLOATS)
    scores = tensor_of(prob_rows(draw, n, classes), n, classes, dtype)
    labels = soft_labels(draw, n, classes) if draw.byte() % 4 == 3 else hard_labels(draw, n, classes)
    scores, labels = with_fault(draw, laid_out(draw, scores), laid_out(draw, labels))
    if isinstance(scores, Tensor) and scores.layout == torch.strided:
        scores = as_container(draw, scores)
    if isinstance(labels, Tensor) and labels.layout == torch.strided:
        labels = as_container(draw, labels)
    return scores, labels


def validity(
    scores: Any, labels: Any, options: Mapping[str, Any] = NO_OPTIONS
) -> tuple[bool | None, tuple[Tensor, Tensor] | None]:
    """Return whether an input is valid for metrics (None: undecided), and its rows that are not ignored."""
    table, truth = as_tensor(scores), as_tensor(labels)
    if table is None or truth is None or table.dtype not in FLOATS:
        return False, None
    rows = rows_of(table, truth)
    if options.get("scope") == "positive" and (
        single_column(table) or (rows is None and tuple(truth.shape[1:]) in {(), (1,), (2,)})
    ):
        return None, None  # a probability of class 1, a column of labels or two columns of soft labels are valid
    if rows is None or not valid_options(options, rows):
        return False, None
    if (ignored := options.get("ignore_index")) is not None:
        counted = rows[1] != ignored
        rows = rows[0][counted], rows[1][counted]
        if not len(rows[1]):
            return False, None
    validities = (distributions(rows[0]), valid_labels(rows[1], rows[0].shape[1]))
    return (False if False in validities else None if None in validities else True), rows


def single_column(table: Tensor) -> bool:
    """Return whether there is one probability per sample."""
    return table.ndim < 2 or table.shape[1] == 1


def valid_options(options: Mapping[str, Any], rows: tuple[Tensor, Tensor]) -> bool:
    """Return whether options are valid by themselves and for this table."""
    valid_ranges = {"coverage": lambda x: 0 < x <= 1, "p": lambda x: 1 <= x < math.inf, "points": lambda x: x >= 2,
              "k": lambda x: x >= 1, "bins": lambda x: x >= 1}  # fmt: skip
    if not all(in_range(options[option]) for option, in_range in valid_ranges.items() if option in options):
        return False
    if options.get("scope") == "positive" and rows[0].shape[1] not in {1, 2}:
        return False
    return options.get("ignore_index") is None or rows[1].ndim == 1


def logit_input(draw: Draw) -> tuple[Any, Any]:
    n, classes, dtype = draw.pick((3, 1, 2, 4, 5, 6)), draw.pick((3, 2, 4, 5, 1)), draw.pick(FLOATS)
    palette = draw.pick((LOGITS, LOGITS, LOGITS[:7], LOGITS + HUGE))
    scores = tensor_of([[draw.pick(palette) for _ in range(classes)] for _ in range(n)], n, classes, dtype)
    labels = soft_labels(draw, n, classes) if draw.byte() % 4 == 3 else hard_labels(draw, n, classes)
    return with_fault(draw, laid_out(draw, scores), laid_out(draw, labels))


def logit_validity(scores: Any, labels: Any) -> tuple[bool | None, tuple[Tensor, Tensor] | None]:
    """Like `validity`, for logits; probabilities are computed in the documented dtype."""
    table, truth = as_tensor(scores), as_tensor(labels)
    if table is None or truth is None or table.dtype not in FLOATS:
        return False, None
    if table.ndim != 2 or table.shape[1] < 2:
        return None, None  # a single column is a binary head; maps have separate tests
    if truth.ndim == 2 and not truth.is_floating_point():
        return None, None  # `Predictions` takes a column of class numbers and one-hot rows, accumulators do not
    rows = rows_of(table, truth)
    if rows is None or not bool(table.isfinite().all()):
        return False, None
    valid = valid_labels(rows[1], table.shape[1])
    probs = table.softmax(1, torch.promote_types(table.dtype, torch.float32))
    if float((probs.double() - table.double().softmax(1)).abs().max()) > 1e-6:
        raise FindingError(f"softmax of {table.tolist()} is {probs.tolist()}")
    return valid, (probs, rows[1])


RANKED = {"aurc", "e_aurc", "augrc", "risk_coverage", "risk_at_coverage", "coverage_at_risk"}


def check_logits(name: str, call: Callable[[Any, Any], Any], options: dict[str, Any], draw: Draw) -> str:
    scores, labels = logit_input(draw)
    valid, rows = logit_validity(scores, labels)
    description = Description("logits", scores, labels, options)
    result = check_result(name, lambda: call(scores, labels), valid, description)
    if result is None or rows is None:
        return "refused" if result is None else "taken"
    if name.lower() == "nll":
        log_probs = [plain.log_softmax(row) for row in scores.detach().double().tolist()]
        truth = exact_table(*rows).labels
        losses = [
            -float(y) * p for ys, ps in zip(truth, log_probs, strict=True) for y, p in zip(ys, ps, strict=True) if y
        ]
        total = sum(map(Fraction, losses)) if math.inf not in losses else math.inf
        expected = float(total / len(log_probs))
        overflows = (
            total > sys.float_info.max and float(result) == math.inf
        )  # the sum of the losses overflows the dtype
        if not overflows and not math.isclose(float(result), expected, rel_tol=1e-5, abs_tol=1e-5):
            raise FindingError(f"{name}: {float(result)!r} instead of {expected!r}: {description}")
        return "right"
    confidences = rows[0].amax(1)
    if name in RANKED and len(confidences.unique()) < len(confidences):
        return "taken"  # logits rank samples of equal confidence by log(1 - confidence)
    return compare(name, result, rows, options, description)


def check_metric(name: str, metric: Callable[..., Any], draw: Draw) -> str:
    options = _options(metric, draw)
    if draw.byte() % 4 == 3:
        return check_logits(name, lambda s, y: metric(fedlas.Predictions(s, y), **options), options, draw)
    options |= more_options(name, draw)
    scores, labels = metric_input(draw)
    valid, rows = validity(scores, labels, options)
    description = Description(scores, labels, options)
    result = check_result(name, lambda: metric(scores, labels, **options), valid, description)
    if result is None or rows is None:
        return "refused" if result is None else "taken"
    return compare(name, result, rows, options, description)


def check_stream(name: str, metric: AbstractMetric, draw: Draw) -> str:
    stream, options = metric.accumulator, _options(metric.accumulator, draw)
    if draw.byte() % 4 == 3:
        return check_logits(name, lambda s, y: stream(**options).update_logits(s, y).compute(), options, draw)
    scores, labels = metric_input(draw)
    valid, rows = validity(scores, labels)
    parts = [(scores, labels)]
    if valid and draw.byte() % 2 == 0:
        cut = draw.integer(0, len(scores))
        parts = [(scores[:cut], labels[:cut]), (scores[cut:], labels[cut:])]
        parts = [part for part in parts if len(part[0])]
    merged = draw.byte() % 2

    def call() -> Any:
        first, second = stream(**options), stream(**options)
        for i, part in enumerate(parts):
            (second if i and merged else first).update(*part)
        return (first.merge(second) if merged and len(parts) > 1 else first).compute()

    description = Description(scores, labels, options, len(parts))
    result = check_result(name, call, valid, description)
    if result is None or rows is None:
        return "refused" if result is None else "taken"
    return compare(name, result, rows, options, description)


@cache
def _has_parameter(function: Any, parameter: str) -> bool:
    return parameter in inspect.signature(function).parameters


def _options(function: Any, draw: Draw) -> dict[str, Any]:
    bins = {"bins": draw.pick((15, 1, 2, 3, 10))} if _has_parameter(function, "bins") else {}
    return bins | ({"k": draw.integer(1, 5)} if _has_parameter(function, "k") else {})


WIDTH_OR_MASS = {"over_ece", "under_ece", "signed_ece", "mce", "rms_error", "lp_error", "histogram", "debiased_l2"}
BINNED = WIDTH_OR_MASS | {"ece"}
ROWS = {"nll", "brier", "top_k", "top_5", "classwise_ece"}  # metrics without a scope
PRESETS = ("official", "torchmetrics", "netcal", "uncertainty-calibration")
METRIC_OPTIONS = {
    "lp_error": {"p": (1, 2, 3, 1.5, 0.5, math.inf, math.nan)},
    "risk_at_coverage": {"coverage": (0.5, 1.0, 0.1, 0.7, 0.0, 1.5, math.nan)},
    "coverage_at_risk": {"risk": (0.0, 0.5, 1.0, 0.2)},
    "smooth_curve": {"points": (2, 11, 201, 1, 0)},
    "noise_floor": {"binning": ("mass", "width")},
}  # fmt: skip


def more_options(name: str, draw: Draw) -> dict[str, Any]:
    """Draw options of a metric besides bins and k; half of the time none."""
    if draw.byte() % 2 == 0:
        return {}
    result = {option: draw.pick(values) for option, values in METRIC_OPTIONS.get(name, {}).items()}
    variant = draw.pick(("ignored", "positive", "class-wise", "binning", "preset"))
    if variant == "ignored":
        result["ignore_index"] = draw.pick((0, 1, -100, 5))
    elif variant == "positive" and name not in ROWS:
        result["scope"] = "positive"
    elif variant == "class-wise" and name in BINNED:
        result["scope"] = "class-wise"
    if name in WIDTH_OR_MASS | {"classwise_ece"} and variant in {"binning", "class-wise"}:
        result["binning"] = draw.pick(("mass", "width"))
    if variant == "preset" and name in BINNED:
        result["compat"] = draw.pick(PRESETS)
        result |= {"binning": "width"} if name == "debiased_l2" else {}
    return result


ROOTED = {"debiased_l2"}  # the square root magnifies rounding errors near zero
NARROWED = {"noise_floor"}  # as does the square root of a part of the variance


def compare(
    name: str, result: Any, rows: tuple[Tensor, Tensor], options: dict[str, Any], description: Description
) -> str:
    """Compare a value with exact or plain float64 arithmetic; return "taken" if neither gives a value."""
    oracle = exact_metrics.oracle_of(name) or kernel_metrics.oracle_of(name)
    table = exact_table(*rows)
    table = replace(table, scope=options.get("scope", "top-label"))
    if oracle is None or (table.scope == "positive" and table.classes != 2):
        return "taken"
    if options.get("compat") and max(c for part in table.parts for c, _ in part) > 1:
        return "taken"  # rounding decides; the rules of other packages do not define this case
    coarse = (name.lower() in {"brier", "nll"} and table.dtype != torch.float64) or table.soft
    tolerance = 2e-6 if coarse else 1e-7 if name in NARROWED else 1e-11
    expected = oracle(table, **{key: value for key, value in options.items() if _has_parameter(oracle, key)})
    if expected is None:
        return "taken"
    return compared(name, result, expected, tolerance, description)


def compared(name: str, value: Any, expected: Any, tolerance: float, description: Description) -> str:
    """Compare numbers one by one; a reference of NaN is not compared."""
    values, expected_values = numbers(value), numbers(expected)
    if len(values) != len(expected_values):
        raise FindingError(f"{name}: {values} instead of {expected_values}: {description}")
    for actual, reference in zip(values, expected_values, strict=True):
        if math.isnan(reference) or (math.isinf(reference) and actual == reference):
            continue
        difference = abs(actual**2 - reference**2) if name in ROOTED else abs(actual - reference)
        if not difference <= tolerance * max(1.0, abs(reference)):
            raise FindingError(f"{name}: {actual!r} instead of {reference!r}: {description}")
    return "taken" if expected_values and all(map(math.isnan, expected_values)) else "right"


def numbers(result: Any) -> list[float]:
    """Return the numbers in the result of a metric."""
    if isinstance(result, (float, int)):
        return [float(result)]
    if isinstance(result, list):
        return result
    if isinstance(result, metrics.Histogram):
        return [float(count) for count in result.bins.counts.reshape(-1).tolist()]
    if isinstance(result, metrics.RiskCoverage):
        return result.risk.tolist()
    if isinstance(result, metrics.SmoothCurve):
        return [*result.confidence.tolist(), *result.accuracy.tolist()]
    return [float(item) for item in result]


# Losses


def loss_input(draw: Draw, soft: bool) -> list[Any]:
    n, dtype = draw.pick((3, 1, 2, 4, 5, 6)), draw.pick(FLOATS)
    palette = draw.pick((LOGITS, LOGITS, LOGITS[:7], LOGITS + HUGE))
    rows = [[draw.pick(palette) for _ in range(CLASSES)] for _ in range(n)]
    logits = laid_out(draw, tensor_of(rows, n, CLASSES, dtype))
    labels = soft_labels(draw, n, CLASSES) if soft and draw.byte() % 4 == 3 else hard_labels(draw, n, CLASSES)
    if not labels.is_floating_point() and draw.byte() % 4 == 3:
        labels = labels.to(torch.int64).index_fill(0, torch.tensor(0), -100)
    features = torch.tensor([[draw.pick(LOGITS) for _ in range(WIDTH)] for _ in range(n)], dtype=torch.float64)
    index = torch.tensor([draw.integer(0, SAMPLES - 1) for _ in range(n)])
    logits, labels = with_fault(draw, logits, labels)
    features = features.to(draw.pick(FLOATS))
    fault = draw.byte()
    if fault == 255:
        features = draw.pick((features[:-1], features.long(), features[:, 0], features.to("meta"), "abc"))
    if fault == 254:
        index = draw.pick((index[:-1], index.float(), index + SAMPLES, -1 - index, index.to("meta")))
    return [logits, labels, features, index]


def loss_validity(loss: Any, inputs: list[Any]) -> bool | None:  # noqa: PLR0911, PLR0912 (a list of invalid inputs)
    """Return whether an input is valid for a loss; None if undecided."""
    if not all(isinstance(item, Tensor) for item in inputs):
        return False
    logits, labels, features, index = inputs
    if any(item.layout != torch.strided for item in inputs):
        return False
    if len({item.device for item in inputs}) > 1:
        return False
    shape, space = tuple(logits.shape), (*logits.shape[:1], *logits.shape[2:])
    if not logits.is_floating_point() or logits.ndim < 2 or shape[1] != CLASSES:
        return False
    if logits.ndim > 2 or features.ndim > 2:
        return None  # maps have separate tests
    if not features.is_floating_point() or features.ndim != 2 or len(features) != len(logits):
        return False
    if index.is_floating_point() or tuple(index.shape) != shape[:1]:
        return False
    if labels.dtype == torch.bool or labels.is_complex():
        return False
    if labels.is_floating_point():
        if tuple(labels.shape) != shape or not loss.takes_soft_labels:
            return False
    elif tuple(labels.shape) != space:
        return False
    if logits.is_meta:
        return None
    if loss.index_limit is not None and any(not 0 <= i < SAMPLES for i in index.tolist()):
        return False
    if labels.is_floating_point():
        rows = labels.double().tolist()
        if any(not (value >= 0) for row in rows for value in row):
            return False
        deviation = max((abs(math.fsum(row) - 1) for row in rows), default=0.0)
        limit = max(1e-4, CLASSES * torch.finfo(labels.dtype).eps)
        return None if abs(deviation - limit) < 1e-6 else deviation <= limit
    return valid_labels(labels, CLASSES, -100)


@dataclass
class LossTarget:
    """One loss with one choice of options, in all reductions, and its references in float64."""

    case: loss_cases.Case
    built: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def pair(self, reduction: str) -> tuple[Any, Any]:
        if reduction not in self.built:
            sizes = {"num_classes": CLASSES, "num_samples": SAMPLES, "epochs": 5}
            sizes = {name: size for name, size in sizes.items() if name in self.case.record.keywords}
            losses = []
            for _ in range(2):
                torch.random.default_generator.manual_seed(0)
                options = sizes | dict(self.case.options) | {"reduction": reduction}
                losses.append(fedlas.build_loss(self.case.record.name, **options).eval())
            self.built[reduction] = losses[0], losses[1].double()
        return self.built[reduction]

    def check(self, draw: Draw) -> str:
        reduction = draw.pick(("mean", "sum", "none"))
        loss, reference = self.pair(reduction)
        inputs = loss_input(draw, loss.takes_soft_labels)
        valid = loss_validity(loss, inputs)
        description = Description(reduction, *inputs)
        torch.random.default_generator.manual_seed(0)
        result = check_result(str(self.case), lambda: loss(*inputs), valid, description)
        if result is None:
            return "refused"
        if result.is_meta or inputs[0].is_meta or inputs[0].layout != torch.strided or inputs[0].ndim != 2:
            return "taken"
        learns = any(True for _ in loss.parameters())
        # Parameters are in float32.
        return self.compare(result, reference, inputs, reduction, 1e-6 if learns else 1e-9, description)

    def compare(  # noqa: PLR0917
        self,
        loss: Tensor,
        reference: Any,
        inputs: list[Tensor],
        reduction: str,
        finest_tolerance: float,
        description: Description,
    ) -> str:
        logits = inputs[0].detach()
        counted = torch.ones(len(logits), dtype=torch.bool) if inputs[1].ndim == 2 else inputs[1] != -100
        invalid = bool((logits[counted].isnan() | (logits[counted] == math.inf)).any())
        if invalid and bool(loss.isfinite().all()):
            raise FindingError(f"{self.case}: {loss.tolist()} although a logit is no number: {description}")
        if invalid:
            return "right"  # a non-finite input may give a non-finite loss
        if not bool(logits[counted].isfinite().all()):
            return "taken"
        values = loss.detach().double().reshape(-1).tolist()
        in_float64 = inputs[0].dtype == torch.float64
        size = float(logits[counted].double().abs().amax()) if bool(counted.any()) else 1.0
        tolerance = finest_tolerance if in_float64 else 5e-4
        expected = [self._in_float64(reference, inputs)]
        if (
            in_float64
            and self.case.options == {}
            and reduction == "mean"
            and inputs[1].ndim == 1
            and bool(counted.all())
        ):
            expected += self._plain(inputs)
        outcome = "right"
        for item in expected:
            if close(values, item, tolerance, size, in_float64):
                continue
            if not self._on_a_step(reference, inputs, item):
                raise FindingError(f"{self.case}: {values} instead of {item}: {description}")
            outcome = "taken"
        return outcome

    def _on_a_step(self, reference: Any, inputs: list[Tensor], loss: list[float]) -> bool:
        """Return whether the input is so close to a threshold of the loss that rounding decides its side."""
        sizes = (1e-9, 1e-12) if inputs[0].dtype == torch.float64 else (1e-5,)
        for step in (sign * size for size in sizes for sign in (1, -1)):
            for number in range(CLASSES):
                shifted = self._in_float64(reference, inputs, step, number)
                if any(abs(a - b) > 50 * abs(step) * max(1.0, abs(b)) for a, b in zip(shifted, loss, strict=True)):
                    return True
        return False

    def _in_float64(self, reference: Any, inputs: list[Tensor], step: float = 0.0, column: int = 0) -> list[float]:
        """Return the loss in float64, optionally with one column of the logits shifted slightly."""
        logits = inputs[0].detach().double().clone()
        if step:
            logits[:, column] += step * logits[:, column].abs().clamp_min(1)
        # Soft labels are cast to the dtype that the loss computes in, where very small values become zero.
        casts_labels = inputs[1].dtype == torch.float64 and inputs[0].dtype != torch.float64
        labels = inputs[1].float() if casts_labels else inputs[1]
        torch.random.default_generator.manual_seed(0)
        with torch.no_grad():
            return reference(logits, labels, inputs[2].double(), inputs[3]).reshape(-1).tolist()

    def _plain(self, inputs: list[Tensor]) -> list[list[float]]:
        """Return the loss in plain loops, if it needs only logits and labels."""
        function = getattr(plain, self.case.record.name, None)
        if function is None:
            return []
        needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
        if len(needed) != 2 or not len(inputs[0]):
            return []
        try:
            return [[function(inputs[0].detach().tolist(), inputs[1].tolist())]]
        except (OverflowError, ZeroDivisionError):
            return []


def close(values: list[float], expected: list[float], tolerance: float, size: float, in_float64: bool) -> bool:
    largest = math.sqrt(torch.finfo(torch.float64 if in_float64 else torch.float32).max) / 100
    for actual, reference in zip(values, expected, strict=True):
        if math.isfinite(reference) and abs(actual - reference) <= tolerance * max(1.0, abs(reference), size):
            continue
        if math.isnan(actual) and math.isnan(reference):
            continue
        if not math.isfinite(actual) and (not math.isfinite(reference) or abs(reference) > largest or size > largest):
            continue  # overflows the dtype
        return False
    return True


# Targets


def metric_functions() -> dict[str, Callable[..., Any]]:
    """Return the public functions of probabilities and labels."""
    result = {name: getattr(metrics, name) for name in metrics.__all__}
    functions = {
        name: item for name, item in result.items() if inspect.isfunction(item) or isinstance(item, AbstractMetric)
    }
    return {
        name: item
        for name, item in functions.items()
        if list(inspect.signature(item).parameters)[:2] == ["probs", "labels"]
    }


def streams() -> dict[str, AbstractMetric]:
    """Return the accumulators of the metrics."""
    return dict(all_metrics())


def loss_targets() -> list[Target]:
    """Return one target per loss; the bytes choose its options."""
    result = []
    for record in fedlas.list_losses():
        cases = [LossTarget(case) for case in loss_cases.cases_of(record) if not case.random]
        result.append(Target(record.name, "loss", lambda draw, cases=cases: draw.pick(cases).check(draw)))
    return result


def targets() -> list[Target]:
    """Return all fuzz targets of this module."""
    result = loss_targets()
    for name, metric in metric_functions().items():
        result.append(Target(name, "metric", lambda draw, name=name, metric=metric: check_metric(name, metric, draw)))
    for name, kind in streams().items():
        result.append(Target(name, "stream", lambda draw, name=name, kind=kind: check_stream(name, kind, draw)))
    return result
