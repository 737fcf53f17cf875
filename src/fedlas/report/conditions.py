"""Failure conditions of an evaluation, such as `ece>0.05`, `temperature.ece>2%` or `ece.high>0.1`."""

import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fedlas.errors import UserError
from fedlas.evaluation_report import UNCALIBRATED, Report
from fedlas.metrics.registry import all_metrics

OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
CONDITION = re.compile(r"\s*([^<>=]+?)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(%?)\s*")


@dataclass(frozen=True)
class Condition:
    """A failure condition such as `ece>0.05`.

    Args:
        state: "uncalibrated", or the name of a calibrator.
        metric: name of the metric.
        end: "low" or "high" for an end of its interval, or "".
        sign: comparison operator.
        limit: number that the metric is compared with.
    """

    state: str
    metric: str
    end: str
    sign: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """Parse a condition."""
        match = CONDITION.fullmatch(text)
        if match is None:
            raise UserError(f"{text!r} is not a condition such as ece>0.05, temperature.ece>=2% or accuracy<0.9")
        name, sign, number, percent = match.groups()
        *before, last = name.split(".")
        end = last if last in {"low", "high"} else ""
        parts = before if end else [*before, last]
        if not 1 <= len(parts) <= 2:
            raise UserError(f"{text!r}: before {sign} stands METRIC, STATE.METRIC, or one of them with .low or .high")
        return cls(
            state=parts[0] if len(parts) == 2 else UNCALIBRATED,
            metric=parts[-1],
            end=end,
            sign=sign,
            limit=float(number) / (100 if percent else 1),
        )

    @property
    def name(self) -> str:
        """State, metric and end of the interval, separated by dots."""
        state = "" if self.state == UNCALIBRATED else self.state
        return ".".join(filter(None, [state, self.metric, self.end]))

    def check_names(self, states: Sequence[str], metrics: Sequence[str]) -> None:
        """Raise if the state or the metric is not one of these."""
        if self.state not in states:
            raise UserError(f"{self.name}: there is no {self.state!r} here, only {', '.join(states)}")
        if self.metric not in metrics:
            raise UserError(f"{self.name}: {self.metric!r} is not known; known: {', '.join(metrics)}")

    def value(self, report: Report) -> float:
        """Return the value in a report."""
        results = {state.name: state.results for state in report.states}
        self.check_names(list(results), list(results.get(self.state, ())))
        result = results[self.state][self.metric]
        if self.end and result.interval is None:
            raise UserError(f"{self.name}: {self.metric} has no interval")
        value = float(result) if not self.end else float(getattr(result.interval, self.end))
        if not math.isfinite(value):
            raise UserError(f"{self.name} is {value}, which cannot be compared")
        return value

    def holds(self, value: float) -> bool:
        """Return whether a value fulfils the condition."""
        return bool(OPERATORS[self.sign](value, self.limit))


def check_conditions(conditions: Sequence[str], posthoc: Sequence[str]) -> None:
    """Raise if conditions name unknown metrics or calibrators, before any work is done.

    Args:
        conditions: failure conditions, such as `ece>0.05`.
        posthoc: names of the calibrators that will be fitted.
    """
    metrics = all_metrics()
    for condition in map(Condition.parse, conditions):
        condition.check_names([UNCALIBRATED, *posthoc], list(metrics))
        if metrics[condition.metric].unit == "fraction" and condition.limit > 1:
            fraction = f"{condition.limit:g}% or {condition.limit / 100:g}"
            raise UserError(
                f"{condition.metric} is at most 1, so {condition.limit:g} cannot be its limit; write {fraction}"
            )
