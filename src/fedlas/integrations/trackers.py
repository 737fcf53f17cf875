"""Loggers for experiment trackers: TensorBoard, Weights & Biases, MLflow.

All three log the records of a run (`Run.log`), the results of a `Report`, matplotlib figures such as those of
`fedlas.report.figures`, and the settings of the run. Names are the same in all trackers:

    val/ece, train/loss, gate/positive   from a log record, at its epoch
    test/ece, test/ece_low               from a report: split, metric, end of its confidence interval
    test/temperature/ece                 after a calibrator
    test/ood/svhn/entropy/auroc          out-of-distribution detection

TensorBoard and W&B support histograms; MLflow does not. For TensorBoard during training use `tensorboard=true` of the
recipe, which writes the same file into the run folder.
"""

import importlib
import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedlas.errors import MissingPackageError, UserError, UserTypeError
from fedlas.evaluation_report import Report, State
from fedlas.extras import optional_module
from fedlas.metrics.result import Result
from fedlas.records import Board, Histogram, histograms_in, numbers_in

AT_ONCE = 1000  # largest number of metrics in a request to MLflow; for parameters, a tenth of it

Kind = TypeVar("Kind", bound="AbstractTracker")


class AbstractTracker(ABC):
    """Base class of trackers, which log one run; as a context manager, a tracker is closed at the end."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Send a log record of a run."""
        if "epoch" not in record:
            raise UserError(f"a log record needs an epoch; this has only {', '.join(map(str, record)) or 'nothing'}")
        epoch = int(record["epoch"])
        self.numbers(numbers_in(record), epoch)
        for name, histogram in histograms_in(record):
            self.histogram(name, histogram, epoch)

    def log_all(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Send the whole log of a run: `tracker.log_all(run.log)`."""
        for record in records:
            self.log(record)

    def report(self, report: Report, *, name: str | None = None, epoch: int | None = None) -> None:
        """Send the results of a report.

        Args:
            report: a report of `fedlas.evaluate`.
            name: prefix of the names; by default the split.
            epoch: epoch of the predictions; None for a finished run.
        """
        self.numbers(numbers_of(report, name), epoch)

    @abstractmethod
    def numbers(self, values: Mapping[str, float], epoch: int | None = None) -> None:
        """Send scalars of an epoch, or of the whole run."""

    @abstractmethod
    def histogram(self, name: str, histogram: Histogram, epoch: int) -> None:
        """Send a histogram, if the tracker supports histograms."""

    @abstractmethod
    def figure(self, name: str, figure: Any, epoch: int | None = None) -> None:
        """Send a matplotlib figure."""

    @abstractmethod
    def settings(self, values: Mapping[str, Any]) -> None:
        """Send the settings of the run: `tracker.settings(run.recipe.to_dict())`."""

    @abstractmethod
    def close(self, *, failed: bool = False) -> None:
        """End the run."""

    def __enter__(self: Kind) -> Kind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)


class TensorBoard(AbstractTracker):
    """Writes files for TensorBoard.

    Args:
        folder: folder of the files.
    """

    def __init__(self, folder: str | Path) -> None:
        self.board = Board(folder)

    def numbers(self, values: Mapping[str, float], epoch: int | None = None) -> None:
        self.board.numbers(values, epoch or 0)

    def histogram(self, name: str, histogram: Histogram, epoch: int) -> None:
        self.board.histogram(name, histogram, epoch)

    def figure(self, name: str, figure: Any, epoch: int | None = None) -> None:
        self.board.writer.add_image(name, _pixels(figure), epoch or 0, dataformats="HWC")

    def settings(self, values: Mapping[str, Any]) -> None:
        rows = [f"| {name} | {value} |" for name, value in _as_text(values).items()]
        self.board.writer.add_text("settings", "\n".join(["| setting | value |", "|---|---|", *rows]))

    def close(self, *, failed: bool = False) -> None:  # noqa: ARG002 (its files have no status)
        self.board.close()


class WeightsAndBiases(AbstractTracker):
    """Logs to Weights & Biases; with `mode="offline"` to a folder that `wandb sync` uploads later.

    The x-axis of its charts is the epoch. Scalars of the whole run are in its summary.

    Args:
        run: an active run, which stays open at the end.
        init: options of `wandb.init`, such as project, name, dir and mode, if no run is given.
    """

    def __init__(self, run: Any = None, **init: Any) -> None:
        self._wandb = _import_tracker("wandb")
        if run is not None and init:
            raise UserTypeError(f"an active run takes no {', '.join(init)}")
        self._owns_run = run is None
        self.run = self._wandb.init(**init) if run is None else run
        if self._owns_run:
            self.run.define_metric("epoch")
            self.run.define_metric("*", step_metric="epoch")

    def numbers(self, values: Mapping[str, float], epoch: int | None = None) -> None:
        if epoch is None:
            self.run.summary.update(dict(values))
        else:
            self._log(values, epoch)

    def histogram(self, name: str, histogram: Histogram, epoch: int) -> None:
        converted = self._wandb.Histogram(np_histogram=(list(histogram.counts), histogram.limits))
        self._log({name: converted}, epoch)

    def figure(self, name: str, figure: Any, epoch: int | None = None) -> None:
        self._log({name: self._wandb.Image(_pixels(figure))}, epoch)

    def settings(self, values: Mapping[str, Any]) -> None:
        self.run.config.update(dict(values))

    def close(self, *, failed: bool = False) -> None:
        if self._owns_run:
            self.run.finish(exit_code=int(failed))

    def _log(self, values: Mapping[str, Any], epoch: int | None) -> None:
        # The step of wandb may only increase, unlike the epochs of a resumed run.
        self.run.log({**values, **({} if epoch is None else {"epoch": epoch})})


class MLflow(AbstractTracker):
    """Logs to MLflow. Figures are artifacts of the run, in `figures/`.

    Args:
        uri: address of a server, or "sqlite:///mlflow.db"; None for the default of MLflow.
        experiment: name of the experiment, which is created if it does not exist.
        run_name: name of the run.
        run_id: an active run, which stays open at the end.
    """

    def __init__(
        self,
        uri: str | None = None,
        *,
        experiment: str = "fedlas",
        run_name: str | None = None,
        run_id: str | None = None,
    ) -> None:
        self._entities = _import_tracker("mlflow.entities")
        self.client = _import_tracker("mlflow").MlflowClient(tracking_uri=uri)
        self._owns_run = run_id is None
        self.run_id: str = run_id or self._begin(experiment, run_name)

    def numbers(self, values: Mapping[str, float], epoch: int | None = None) -> None:
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(_allowed(name), value, now, epoch or 0) for name, value in values.items()]
        for start in range(0, len(metrics), AT_ONCE):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + AT_ONCE])

    def histogram(self, name: str, histogram: Histogram, epoch: int) -> None:
        pass

    def figure(self, name: str, figure: Any, epoch: int | None = None) -> None:
        suffix = "" if epoch is None else f"-{epoch}"
        self.client.log_figure(self.run_id, figure, f"figures/{_allowed(name)}{suffix}.png")

    def settings(self, values: Mapping[str, Any]) -> None:
        parameters = [self._entities.Param(_allowed(name), value) for name, value in _as_text(values).items()]
        for start in range(0, len(parameters), AT_ONCE // 10):
            self.client.log_batch(self.run_id, params=parameters[start : start + AT_ONCE // 10])

    def close(self, *, failed: bool = False) -> None:
        if self._owns_run:
            self.client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")

    def _begin(self, experiment: str, run_name: str | None) -> str:
        existing = self.client.get_experiment_by_name(experiment)
        experiment_id = self.client.create_experiment(experiment) if existing is None else existing.experiment_id
        run_id: str = self.client.create_run(experiment_id, run_name=run_name).info.run_id
        return run_id


def numbers_of(report: Report, name: str | None = None) -> dict[str, float]:
    """Return the results of a report by their names in trackers.

    Args:
        report: a report of `fedlas.evaluate`.
        name: prefix of the names; by default the split, or "predictions" without one.
    """
    start = name or report.split or "predictions"
    numbers = _of_state(report.before, start)
    for calibrator, state in report.after.items():
        numbers |= _of_state(state, f"{start}/{calibrator}")
    return numbers


def _of_state(state: State, start: str) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for metric, result in state.results.items():
        numbers |= _of_result(result, f"{start}/{metric}")
    numbers |= {f"{start}/{parameter}": float(value) for parameter, value in state.parameters.items()}
    for data, scores in state.detection.sets.items() if state.detection is not None else ():
        for score, separation in scores.items():
            for field in fields(separation):
                name = f"{start}/ood/{data}/{score}/{field.name}"
                numbers |= _of_result(getattr(separation, field.name), name)
    return numbers


def _of_result(result: Result, name: str) -> dict[str, float]:
    ends = result.interval
    return {name: float(result)} | ({} if ends is None else {f"{name}_low": ends.low, f"{name}_high": ends.high})


def _as_text(values: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Convert settings to text, with names like group/setting for nested ones."""
    texts: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            texts |= _as_text(value, f"{above}{name}/")
        else:
            texts[f"{above}{name}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return texts


def _pixels(figure: Any) -> NDArray[np.uint8]:
    """Render a figure; wandb and torch would use pyplot, which needs a display or a backend setting."""
    agg = optional_module("matplotlib.backends.backend_agg")
    if not isinstance(figure, optional_module("matplotlib.figure").Figure):
        raise UserTypeError(f"a matplotlib figure is expected, not a {type(figure).__name__}")
    canvas = agg.FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _allowed(name: str) -> str:
    """Replace characters that MLflow does not allow in names."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _import_tracker(name: str) -> Any:
    """Import the package of a tracker, which is not a dependency."""
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(f"{package} is needed for this: pip install {package}") from error
