"""The record of an evaluation: `Report`, with a `State` before calibration and one after each calibrator.

`Report.save` writes it as JSON and `Report.load` restores it exactly, with the confidence and the correctness of each
sample. `fedlas.evaluation` computes it; `fedlas.report` shows it as text, tables, figures and a page.
"""

import base64
import html
import json
import math
from collections.abc import Collection, Iterator, KeysView, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlas.catalog import nearest
from fedlas.errors import UserError
from fedlas.extras import optional_module
from fedlas.formatting import align_columns, html_table, latex_table
from fedlas.io.atomic import write_atomic
from fedlas.io.untrusted import file_errors
from fedlas.metrics.bin_sums import Bins
from fedlas.metrics.inputs import Pairs
from fedlas.metrics.registry import summary_metrics
from fedlas.metrics.result import Comparison, Definition, Result
from fedlas.ood.detection import Detection
from fedlas.posthoc import Fit
from fedlas.posthoc.base import check_count, check_text

FORMAT = "fedlas.report/1"
UNCALIBRATED = "uncalibrated"  # name of the state before calibration
PAIR_COLUMNS = ("confidence", "correct", "log_uncertainty")
PAIR_DTYPES = {"bool": "|b1", "float32": "<f4", "float64": "<f8"}


@dataclass(frozen=True, eq=False)
class State:
    """The results of predictions before calibration, or after one calibrator: `state["ece"]`.

    Args:
        name: "uncalibrated", or the calibrator's name.
        results: every metric, by its name in `fedlas.metrics`.
        bins: bins of reliability diagrams: "width" and "mass".
        detection: results of OOD detection, if there is OOD data.
        fits: how the calibrator was fitted: once, or once for each fold.
        parameters: its scalar parameters, averaged over folds.
        leaked: number of evaluated samples that it was also fitted on, as far as is known.
        comparisons: paired tests by metric: the first model is without calibration, the second with the calibrator.
            Empty for the state before calibration and without intervals.
        pairs: confidence and correctness of each sample, in the order of the predictions, for curves and histograms.
    """

    name: str
    results: Mapping[str, Result]
    bins: Mapping[str, Bins]
    detection: Detection | None = None
    fits: tuple[Fit, ...] = ()
    parameters: Mapping[str, float] = field(default_factory=dict)
    leaked: int = 0
    comparisons: Mapping[str, Comparison] = field(default_factory=dict)
    pairs: Pairs | None = None

    def __getitem__(self, metric: str) -> Result:
        if metric not in self.results:
            raise KeyError(f"there is no {metric!r} here; {nearest(str(metric), list(self.results))}")
        return self.results[metric]

    def to_dict(self, *, samples: bool = True) -> dict[str, Any]:
        """Return plain values for JSON, with or without `pairs`."""
        return {
            "name": self.name,
            "results": {name: result.to_dict() for name, result in self.results.items()},
            "bins": {name: bins.to_dict() for name, bins in self.bins.items()},
            "detection": None if self.detection is None else self.detection.to_dict(),
            "fits": [asdict(fit) for fit in self.fits],
            "parameters": dict(self.parameters),
            "leaked": self.leaked,
            "comparisons": {name: test.to_dict() for name, test in self.comparisons.items()},
            "pairs": _pairs_to_dict(self.pairs) if samples and self.pairs is not None else None,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "State":
        """Return the state that `to_dict` described."""
        detection, pairs = fields["detection"], fields["pairs"]
        return cls(
            name=check_text(fields["name"], "name"),
            results={name: Result.from_dict(result) for name, result in fields["results"].items()},
            bins={name: Bins.from_dict(bins) for name, bins in fields["bins"].items()},
            detection=None if detection is None else Detection.from_dict(detection),
            fits=tuple(Fit.from_dict(fit) for fit in fields["fits"]),
            parameters=fields["parameters"],
            leaked=check_count(fields["leaked"], "leaked"),
            comparisons={name: Comparison.from_dict(test) for name, test in fields["comparisons"].items()},
            pairs=None if pairs is None else _pairs_from_dict(pairs),
        )


def _pairs_to_dict(pairs: Pairs) -> dict[str, Any]:
    """Return plain values for JSON; columns are little-endian arrays in base64."""
    columns = {name: getattr(pairs, name) for name in PAIR_COLUMNS}
    return {"definition": asdict(pairs.definition)} | {
        name: None if values is None else _encode(values.cpu()) for name, values in columns.items()
    }


def _encode(values: Tensor) -> dict[str, str]:
    plain = values if values.dtype in {torch.bool, torch.float64} else values.float()
    array = plain.numpy()
    array = array.astype(array.dtype.newbyteorder("<"))
    return {"dtype": str(plain.dtype).removeprefix("torch."), "base64": base64.b64encode(array.tobytes()).decode()}


def _decode(fields: Mapping[str, str]) -> Tensor:
    if fields["dtype"] not in PAIR_DTYPES:
        raise UserError(f"pairs have the type {fields['dtype']!r:.100}; one of {sorted(PAIR_DTYPES)} is needed")
    array = np.frombuffer(base64.b64decode(fields["base64"], validate=True), PAIR_DTYPES[fields["dtype"]])
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))


def _pairs_from_dict(fields: Mapping[str, Any]) -> Pairs:
    columns = {name: None if fields[name] is None else _decode(fields[name]) for name in PAIR_COLUMNS}
    confidence, correct, log_uncertainty = (columns[name] for name in PAIR_COLUMNS)
    if confidence is None or correct is None or not confidence.is_floating_point():
        raise UserError("pairs have no confidence or no correctness")
    if len({len(column) for column in columns.values() if column is not None}) > 1:
        raise UserError("the columns of pairs differ in length")
    if not all(bool(((x >= 0) & (x <= 1)).all()) for x in (confidence, correct.double())):
        raise UserError("pairs hold a confidence or correctness that is not in [0, 1]")
    if log_uncertainty is not None and bool(log_uncertainty.isnan().any()):
        raise UserError("pairs hold a log_uncertainty that is not a number")
    return Pairs(confidence, correct, Definition(**fields["definition"]), log_uncertainty)


@dataclass(frozen=True, eq=False)
class Report:
    """The evaluation of one set of predictions: `report["ece"]`, `report.after["temperature"]["ece"]`.

    Args:
        before: the results before calibration.
        after: the results after each calibrator, by its name.
        n: number of samples.
        classes: number of classes; 0 if unknown.
        split: name of the split.
    """

    before: State
    after: Mapping[str, State]
    n: int
    classes: int
    split: str | None = None

    def __getitem__(self, metric: str) -> Result:
        return self.before[metric]

    def __contains__(self, metric: object) -> bool:
        return metric in self.before.results

    def __iter__(self) -> Iterator[str]:
        return iter(self.before.results)

    def __len__(self) -> int:
        return len(self.before.results)

    def keys(self) -> KeysView[str]:
        """Return the names of the metrics, so that `dict(report)` works."""
        return self.before.results.keys()

    @property
    def states(self) -> tuple[State, ...]:
        """The state before calibration, then those after each calibrator."""
        return (self.before, *self.after.values())

    def to_dict(self, *, samples: bool = True) -> dict[str, Any]:
        """Return plain values for JSON.

        Args:
            samples: whether to include confidence and correctness of each sample, from which `from_dict` restores the
                report exactly; without them, a page or figures of the report lack curves and histograms.
        """
        fields = {"format": FORMAT, "n": self.n, "classes": self.classes, "split": self.split}
        return fields | {"states": [state.to_dict(samples=samples) for state in self.states]}

    def to_json(self) -> str:
        """Return the report as a JSON object."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with a row for each state and metric: value and interval, as fractions."""
        rows = [
            {
                "state": state.name,
                "metric": name,
                "value": float(result),
                "low": math.nan if result.interval is None else result.interval.low,
                "high": math.nan if result.interval is None else result.interval.high,
                "n": self.n,
            }
            for state in self.states
            for name, result in state.results.items()
        ]
        return optional_module("pandas").DataFrame(rows)

    def to_latex(self) -> str:
        """Return the table of `str(report)` as a LaTeX tabular with a row for each state."""
        names = self._shown
        head = ["", *(self.before[name].heading() for name in names)]
        rows = [[state.name, *(state[name].to_latex() for name in names)] for state in self.states]
        return latex_table(head, rows)

    def plot(self) -> Any:
        """Draw the reliability diagram of each state, side by side; return the matplotlib figure."""
        figure = optional_module("matplotlib.pyplot").figure(
            figsize=(3.2 * len(self.states), 3.4), layout="constrained"
        )
        for panel, state in zip(figure.subplots(1, len(self.states), squeeze=False)[0], self.states, strict=True):
            bins = state.bins["width"]
            filled = (bins.counts > 0).nonzero()[:, 0]
            lower, width = bins.edges[:-1][filled].tolist(), bins.edges.diff()[filled].tolist()
            panel.bar(lower, bins.accuracy[filled].tolist(), width, align="edge", edgecolor="white", label="accuracy")
            panel.plot(bins.confidence[filled].tolist(), bins.accuracy[filled].tolist(), "ko", markersize=3)
            panel.plot([0, 1], [0, 1], "k--", linewidth=0.8, label="calibrated")
            panel.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", title=f"{state.name}: ECE {state['ece']:.2%}")
        figure.axes[0].set_ylabel("accuracy")
        return figure

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Report":
        """Return the report that `to_dict` described."""
        if fields.get("format") != FORMAT:
            raise UserError(
                f"Report.load reads what Report.save wrote; the format of this is {fields.get('format')!r:.100}"
            )
        before, *after = (State.from_dict(state) for state in fields["states"])
        n, classes = (check_count(fields[name], name) for name in ("n", "classes"))
        split = None if fields["split"] is None else check_text(fields["split"], "split")
        if any(state.pairs is not None and len(state.pairs.confidence) != n for state in (before, *after)):
            raise UserError(f"the report is about {n} samples, but holds pairs of another number")
        return cls(before, {state.name: state for state in after}, n, classes, split)

    def save(self, path: str | Path) -> None:
        """Write a JSON file, atomically."""
        write_atomic(Path(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | Path) -> "Report":
        """Read a file that `save` wrote."""
        with file_errors(path):
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))

    @property
    def _shown(self) -> list[str]:
        return [name for name in summary_metrics() if name in self.before.results]

    def _rows(self) -> list[list[str]]:
        names = self._shown
        head = ["", *(self.before[name].heading() for name in names)]
        return [head, *([state.name, *(state[name].cell() for name in names)] for state in self.states)]

    @property
    def notes(self) -> list[str]:
        """Notes about values and intervals of the table."""
        return self.notes_on(summary_metrics())

    def notes_on(self, metrics: Collection[str]) -> list[str]:
        """Return notes about values and intervals of some metrics."""
        states_of: dict[tuple[str, str], list[str]] = {}
        for state in self.states:
            for result in (state.results[name] for name in metrics if name in state.results):
                if result.note:
                    states_of.setdefault((result.definition.estimator, result.note), []).append(state.name)
        return [f"{metric} ({', '.join(states)}): {note}." for (metric, note), states in states_of.items()]

    @property
    def _title(self) -> str:
        classes = f", {self.classes} classes" if self.classes else ""
        return f"{f'split {self.split}, ' if self.split else ''}n={self.n:,}{classes}"

    def _repr_html_(self) -> str:
        """Show the report in a notebook."""
        numbers = html_table(self._rows(), self._title)
        numbers += "".join(f"<p><small>{html.escape(note)}</small></p>" for note in self.notes)
        return numbers + "".join(
            html_table(state.detection.rows(), f"OOD detection, {state.name}")
            for state in self.states
            if state.detection is not None
        )

    def __repr__(self) -> str:
        numbers = [f"{name}={float(self.before[name]):.4g}" for name in ("accuracy", "ece", "nll") if name in self]
        after = f", after={list(self.after)}" if self.after else ""
        return f"Report({self._title}, {', '.join(numbers)}{after})"

    def __str__(self) -> str:
        lines = [*align_columns(self._rows()), *self.notes]
        detections = [f"\n{state.name}\n{state.detection}" for state in self.states if state.detection is not None]
        return "\n".join([self._title, *lines, *detections])
