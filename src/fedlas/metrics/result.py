"""Values of metrics with their definitions and confidence intervals.

A `Result` is a float with its definition: estimator, number of bins, edge rule, norm, scope, number, type and split of
the samples, and a confidence interval if one was computed. Values are fractions; they are shown as percentages by the
rules of `fedlas.formatting`.
"""

import html
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from fedlas import formatting
from fedlas.errors import UserError

ROUNDING = 1e-6  # tolerance when a value is compared with the limits of its interval
MIN_RESAMPLES = 20


def check_level(level: float, resamples: int | None = None) -> None:
    """Check a confidence level and a number of bootstrap resamples."""
    if not 0 < level < 1:
        raise UserError(f"level is {level}; it must lie between 0 and 1, such as 0.95")
    if resamples is not None and resamples < MIN_RESAMPLES:
        raise UserError(f"resamples is {resamples}; at least {MIN_RESAMPLES} are needed, better a thousand")


@dataclass(frozen=True)
class Interval:
    """A confidence interval.

    Args:
        low: lower limit.
        high: upper limit.
        level: confidence level.
        method: name of the method.
        note: explanation if the interval is unusually wide or narrow; empty otherwise.
    """

    low: float
    high: float
    level: float = 0.95
    method: str = ""
    note: str = ""

    @property
    def width(self) -> float:
        """Difference of the limits."""
        return self.high - self.low

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Definition:
    """The definition of a metric: everything that is needed to reproduce its value.

    Args:
        estimator: name of the metric.
        bins: number of bins.
        edges: kind of bins, and whether their lower or upper edge is included.
        norm: how the gaps of the bins are combined.
        scope: which confidences are used: of the top label, of every class, of the positive class, ...
        n: number of samples.
        dtype: type of the probabilities; those of logits are computed in float32 or better.
        split: split of the samples.
        compat: package or code whose rules are followed, such as "torchmetrics".
        unit: "fraction" is shown as percent, anything else unchanged.
    """

    estimator: str
    bins: int | None = None
    edges: str | None = None
    norm: str | None = None
    scope: str | None = None
    n: int = 0
    dtype: str = ""
    split: str | None = None
    compat: str | None = None
    unit: str = "fraction"

    def __str__(self) -> str:
        parts = [
            f"{self.bins} {self.edges}" if self.bins and self.edges else self.edges,
            self.norm,
            self.scope,
            f"as {self.compat}" if self.compat else None,
            f"split {self.split}" if self.split else None,
            f"n={self.n:,}",
            self.dtype,
        ]
        return "; ".join(part for part in parts if part)


class Result(float):
    """The value of a metric, with its definition, interval and details.

    Args:
        value: the value, a fraction rather than percent.
        definition: definition of the value.
        interval: confidence interval.
        details: further values, such as the parts of a decomposition or a p-value.
    """

    definition: Definition
    interval: Interval | None
    details: Mapping[str, Any]

    def __new__(
        cls,
        value: float,
        definition: Definition,
        interval: Interval | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> "Result":
        """Create the float and set its attributes."""
        result = super().__new__(cls, value)
        result.definition = definition
        result.interval = interval
        result.details = MappingProxyType(dict(details or {}))
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (float(self), self.definition, self.interval, dict(self.details))

    def __getattr__(self, name: str) -> Any:
        # Fields of the definition are attributes of the result: `result.bins`, `result.n`.
        if name in Definition.__dataclass_fields__:
            return getattr(self.definition, name)
        raise AttributeError(f"a Result has no {name!r}")

    @property
    def value(self) -> float:
        """The value as a plain float."""
        return float(self)

    def with_interval(self, interval: Interval, **details: Any) -> "Result":
        """Return the result with an interval and further details."""
        return type(self)(float(self), self.definition, interval, {**self.details, **details})

    def with_details(self, **details: Any) -> "Result":
        """Return the result with further details."""
        return type(self)(float(self), self.definition, self.interval, {**self.details, **details})

    @property
    def note(self) -> str:
        """Explanation of an unusual value or interval, such as one without the value; empty if there is none."""
        notes = [self._ties, self._interval_note]
        return "; ".join(note for note in notes if note)

    @property
    def _ties(self) -> str:
        fraction = self.details.get("saturated")
        if fraction is None:
            return ""
        return f"{100 * fraction:.0f} % of the confidences are 1 and rank as equal; if they were rounded, give logits"

    @property
    def _interval_note(self) -> str:
        if self.interval is None:
            return ""
        chance = self.details.get("noise_floor")
        if chance is None or float(self) <= self.interval.high + ROUNDING:
            return self.interval.note
        return (
            f"the value includes the error that finite samples show by chance ({self.text(chance)} for a calibrated "
            "model); the interval is of the true error, without it"
        )

    def with_split(self, split: str | None) -> "Result":
        """Return the result with another split."""
        return type(self)(float(self), replace(self.definition, split=split), self.interval, self.details)

    def __str__(self) -> str:
        noise_floor, std = self.details.get("noise_floor"), self.details.get("std")
        chance = "" if noise_floor is None else f", {self.text(noise_floor)} by chance"
        deviation = "" if std is None else f" ± {self.text(std)}"
        interval = "" if self.interval is None else f" {self._ends()} at {formatting.level(self.interval.level)}"
        return f"{self.definition.estimator} {self.text()}{deviation}{interval}{chance} ({self.definition})"

    def __repr__(self) -> str:
        return f"<{self}>"

    def _repr_html_(self) -> str:
        """Show the value and its definition in a notebook."""
        number, _, definition = str(self).partition(" (")
        return f"<b>{html.escape(number)}</b><br><small>{html.escape(definition.removesuffix(')'))}</small>"

    def __format__(self, spec: str) -> str:
        return str(self) if not spec else float(self).__format__(spec)

    def to_dict(self) -> dict[str, Any]:
        """Convert to types that JSON can store; NaN and infinity become None."""
        interval = None if self.interval is None else asdict(self.interval)
        fields = {"value": float(self), "interval": interval, **asdict(self.definition), "details": self.details}
        return {name: _plain(value) for name, value in fields.items()}

    def to_json(self) -> str:
        """Return everything as a JSON object."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Result":
        """Restore from the output of `to_dict`."""
        definition = Definition(**{name: fields[name] for name in Definition.__dataclass_fields__})
        interval = None if fields["interval"] is None else Interval(**fields["interval"])
        value = math.nan if fields["value"] is None else fields["value"]
        return cls(value, definition, interval, fields["details"])

    def to_latex(self) -> str:
        """Return the value and its interval for a LaTeX table."""
        value, _, ends = self.cell().partition(" ")
        return f"${value}$ {{\\scriptsize ${ends}$}}" if ends else f"${value}$"

    def text(self, value: float | None = None) -> str:
        """Return the value, or another number, with the unit and the decimals of this result."""
        number = float(self if value is None else value)
        text = formatting.number(number, *self._limits, percent=self._is_percentage)
        return f"{text} %" if self._is_percentage else text

    def cell(self) -> str:
        """Return the value and its interval as text without the unit, which `heading` includes."""
        return formatting.cell(float(self), *self._limits, percent=self._is_percentage)

    def heading(self) -> str:
        """Return the name of the metric and its unit, for the heading of a column of cells."""
        return f"{self.definition.estimator} %" if self._is_percentage else self.definition.estimator

    @property
    def _is_percentage(self) -> bool:
        return self.definition.unit == "fraction"

    @property
    def _limits(self) -> tuple[float, float] | tuple[None, None]:
        return (None, None) if self.interval is None else (self.interval.low, self.interval.high)

    def _ends(self) -> str:
        return self.cell().partition(" ")[2]


@dataclass(frozen=True)
class Comparison:
    """The difference of two models on the same samples.

    Args:
        first: the metric of the first model.
        second: the metric of the second model.
        interval: confidence interval of the difference, first minus second.
        p_value: p-value of the hypothesis of no difference.
        better: "first", "second", or None if the interval contains zero, or if the smaller NLL is only a lower bound
            because labels have probability zero.
        p_value_is_bound: whether the p-value is the smallest one that the resamples can show: an upper bound.
    """

    first: Result
    second: Result
    interval: Interval
    p_value: float
    better: Literal["first", "second"] | None
    p_value_is_bound: bool = False

    @property
    def difference(self) -> float:
        """The first model's value minus the second's."""
        return float(self.first) - float(self.second)

    def to_dict(self) -> dict[str, Any]:
        """Convert to types that JSON can store."""
        fields = {"first": self.first.to_dict(), "second": self.second.to_dict(), "difference": self.difference}
        fields |= {"p_value_is_bound": self.p_value_is_bound}
        return fields | {"interval": asdict(self.interval), "p_value": self.p_value, "better": self.better}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Comparison":
        """Restore from the output of `to_dict`."""
        first, second = (Result.from_dict(fields[name]) for name in ("first", "second"))
        rest = (fields[name] for name in ("p_value", "better", "p_value_is_bound"))
        return cls(first, second, Interval(**fields["interval"]), *rest)

    def _repr_html_(self) -> str:
        """Show the comparison in a notebook."""
        return f"<p>{html.escape(str(self))}</p>"

    def __str__(self) -> str:
        """Return the comparison as a sentence."""
        difference, ends = self.cells()
        points = " points" if self.first.definition.unit == "fraction" else ""
        p_value = formatting.p_value(self.p_value, is_bound=self.p_value_is_bound)
        verdict = "no significant difference" if self.better is None else f"the {self.better} model is better"
        return (
            f"{self.first.definition.estimator} differs by {difference}{points} (first minus second), "
            f"{ends} at {formatting.level(self.interval.level)}, {p_value}: {verdict}"
        )

    def cells(self) -> tuple[str, str]:
        """Return the difference and its interval as text; differences of percentages are in points."""
        percent = self.first.definition.unit == "fraction"
        return formatting.difference(self.difference, self.interval.low, self.interval.high, percent=percent)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
