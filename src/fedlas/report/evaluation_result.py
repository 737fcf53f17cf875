"""The evaluation of one or more models: `EvaluationResult`, with its text, tables and JSON.

Functions that draw or write models take predictions, reports, `Model` objects or an `EvaluationResult`; `named_models`
returns a `Model` for each name.
"""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlas.comparison import PairedTest
from fedlas.errors import UserError, UserTypeError
from fedlas.evaluation_report import Report
from fedlas.formatting import html_table
from fedlas.metrics.registry import summary_metrics
from fedlas.ood.detection import Detection
from fedlas.predictions import AnyPredictions
from fedlas.report.conditions import Condition
from fedlas.report.model import Model
from fedlas.report.summary_text import headline, sentences

FORMAT = "fedlas.evaluation/1"
# The table of several models has metrics as columns, and a terminal has room for five; the page shows all metrics.
MULTI_MODEL_METRICS = ("accuracy", "ece", "over_ece", "under_ece", "nll")


@dataclass(frozen=True)
class EvaluationResult:
    """The evaluation of one or more models, and their paired comparisons.

    Args:
        models: each model with its predictions and report, by name.
        files: file of each model, by name; models that were not read from a file are missing.
        comparisons: paired tests of models on the same samples, or the reason why they cannot be compared.
        notes: steps that were skipped and why, and how p-values were corrected.
    """

    models: Mapping[str, Model]
    files: Mapping[str, Path]
    comparisons: Sequence[PairedTest] = ()
    notes: Sequence[str] = ()

    @property
    def reports(self) -> dict[str, Report]:
        """The report of every model."""
        return {name: model.report for name, model in self.models.items() if model.report is not None}

    def lines(self) -> list[str]:
        """Return the summary text: for each model a headline and its sentences."""
        lines = []
        for name, report in self.reports.items():
            lines += [
                f"{name}: {headline(report)}.",
                *(f"  {line}" for line in sentences(report)),
                *self._columns(name),
                "",
            ]
        for test in self.comparisons:
            verdict = f": {test.comparison}" if test.comparison is not None else f" are not compared: {test.reason}"
            lines.append(f"{test.first} and {test.second}{verdict}")
        return [*lines, *self.notes]

    def _columns(self, name: str) -> list[str]:
        """Return a line with the roles of the columns of the file of a model."""
        predictions = self.models[name].predictions
        if predictions is None or predictions.columns is None or name not in self.files:
            return []
        return [f"  Read from {self.files[name].name}: {predictions.columns}."]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and the rows: one column per state for a single model, one row per state for several."""
        reports = self.reports
        first = next(iter(reports.values())).before
        states = [(model, state) for model, report in reports.items() for state in report.states]
        metrics = list(summary_metrics()) if len(reports) == 1 else MULTI_MODEL_METRICS
        names = [name for name in metrics if any(name in state.results for _, state in states)]
        head = [first[name].heading() if name in first.results else name for name in names]
        cells = [[state[name].cell() if name in state.results else "" for name in names] for _, state in states]
        if len(reports) == 1:
            columns = zip(*cells, strict=True)
            return ["", *(state.name for _, state in states)], [[h, *row] for h, row in zip(head, columns, strict=True)]
        rows = [[model, state.name, *row] for (model, state), row in zip(states, cells, strict=True)]
        return ["model", "state", *head], rows

    def _repr_html_(self) -> str:
        """Show the result in a notebook."""
        head, rows = self.table()
        paragraphs = "".join(f"<p>{html.escape(line)}</p>" for line in self.lines() if line)
        tables = [detection._repr_html_() for detection in self._detections().values()]
        notes = "".join(f"<p><small>{html.escape(note)}</small></p>" for note in self.footnotes())
        return paragraphs + html_table([head, *rows]) + notes + "".join(tables)

    def footnotes(self) -> list[str]:
        """Return notes about values and intervals of the table."""
        if len(self.reports) == 1:
            return next(iter(self.reports.values())).notes
        return [
            f"{name}: {note}" for name, report in self.reports.items() for note in report.notes_on(MULTI_MODEL_METRICS)
        ]

    def detections(self) -> dict[str, str]:
        """Return the tables of OOD detection, by model and state."""
        return {name: str(detection) for name, detection in self._detections().items()}

    def _detections(self) -> dict[str, Detection]:
        return {
            f"{name}, {state.name}": state.detection
            for name, report in self.reports.items()
            for state in report.states
            if state.detection is not None
        }

    def failed(self, conditions: Sequence[str]) -> list[str]:
        """Return the conditions that hold, such as `ece>0.05`, `temperature.ece>2%`, `ece.high>0.1`, `accuracy<0.9`."""
        failures = []
        for text in conditions:
            condition = Condition.parse(text)
            for name, report in self.reports.items():
                value = condition.value(report)
                if condition.holds(value):
                    failures.append(f"{name}: {condition.name} is {value:.6g}, so {text.strip()} holds")
        return failures

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "format": FORMAT,
            "models": {
                name: {
                    "file": str(self.files[name]) if name in self.files else None,
                    "columns": next(iter(self._columns(name)), None),
                    "headline": headline(report),
                    "sentences": list(sentences(report)),
                    "report": report.to_dict(samples=False),
                }
                for name, report in self.reports.items()
            },
            "comparisons": [
                {"models": [test.first, test.second], "metric": test.metric}
                | ({"reason": test.reason} if test.comparison is None else test.comparison.to_dict())
                for test in self.comparisons
            ],
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """Return the result as a JSON object."""
        return json.dumps(self.to_dict(), allow_nan=False)


ModelLike = AnyPredictions | Report | Model
Models = ModelLike | Mapping[str, ModelLike] | EvaluationResult


def named_models(models: Models) -> dict[str, Model]:
    """Return a `Model` for each name."""
    inputs: Any = models.models if isinstance(models, EvaluationResult) else models
    if not isinstance(inputs, Mapping):
        inputs = {"model": inputs}
    if not inputs:
        raise UserError("no model is given")
    models_by_name: dict[str, Model] = {}
    for name, given in inputs.items():
        model = given
        if isinstance(given, AnyPredictions):
            model = Model(predictions=given)
        elif isinstance(given, Report):
            model = Model(report=given)
        elif not isinstance(given, Model):
            raise UserTypeError(
                f"{name} is {type(given).__name__}; Predictions, a Report or a Model is expected, such as "
                "Predictions.from_probs(probs, labels)"
            )
        if model.predictions is None and model.report is None:
            raise UserError(f"{name} has neither predictions nor a report")
        models_by_name[str(name)] = model
    return models_by_name
