"""What a run has to tell, sent to the trackers that people use: TensorBoard, Weights & Biases, MLflow.

All three are given the same: the lines of a run's log (`Run.log`), the numbers of a `Report`, matplotlib figures such
as those of `fedlas.report.figures`, and what the run was asked to do. A number has the same name everywhere, with
slashes between its parts:

    val/ece, train/loss, gate/positive   from a line of the log, at its epoch
    test/ece, test/ece_low               from a report: the split, the metric, the ends of its interval
    test/temperature/ece                 the same after a calibrator
    test/ood/svhn/entropy/auroc          how well foreign data is told apart

Histograms go to TensorBoard and W&B; MLflow has none. While a run trains, TensorBoard needs nothing from here: the
recipe's `tensorboard=true` writes the same file into the run folder.
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
from fedlas.evaluation import Report, State
from fedlas.extras import optional_module
from fedlas.metrics.result import Result
from fedlas.records import Board, Histogram, histograms_in, numbers_in

AT_ONCE = 1000  # MLflow takes no more numbers in one request, and no more than a tenth of it in settings

Kind = TypeVar("Kind", bound="AbstractTracker")


class AbstractTracker(ABC):
    """Takes down what is known about one run; as a context manager it is closed at the end."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Send one line of a run's log."""
        if "epoch" not in record:
            raise UserError(
                f"a line of a log knows its epoch; this has only {', '.join(map(str, record)) or 'nothing'}"
            )
        epoch = int(record["epoch"])
        self.numbers(numbers_in(record), epoch)
        for name, histogram in histograms_in(record):
            self.histogram(name, histogram, epoch)

    def log_all(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Send the whole log of a run: `tracker.log_all(run.log)`."""
        for record in records:
            self.log(record)

    def report(self, report: Report, *, name: str | None = None, epoch: int | None = None) -> None:
        """Send the numbers of a report.

        Args:
            report: what `fedlas.evaluate` gave.
            name: what the names of its numbers begin with; by default the split.
            epoch: which epoch the predictions are of; None for those of a finished run.
        """
        self.numbers(numbers_of(report, name), epoch)

    @abstractmethod
    def numbers(self, values: Mapping[str, float], epoch: int | None = None) -> None:
        """Send numbers of an epoch, or of the run as a whole."""

    @abstractmethod
    def histogram(self, name: str, histogram: Histogram, epoch: int) -> None:
        """Send a histogram, where the tracker knows them."""

    @abstractmethod
    def figure(self, name: str, figure: Any, epoch: int | None = None) -> None:
        """Send a matplotlib figure."""

    @abstractmethod
    def settings(self, values: Mapping[str, Any]) -> None:
        """Send what the run was asked to do: `tracker.settings(run.recipe.to_dict())`."""

    @abstractmethod
    def close(self, *, failed: bool = False) -> None:
        """Say that nothing more comes."""

    def __enter__(self: Kind) -> Kind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)


class TensorBoard(AbstractTracker):
    """Writes files for TensorBoard.

    Args:
        folder: where they go.
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
        rows = [f"| {name} | {word} |" for name, word in _words(values).items()]
        self.board.writer.add_text("settings", "\n".join(["| setting | value |", "|---|---|", *rows]))

    def close(self, *, failed: bool = False) -> None:  # noqa: ARG002 (its files know no failure)
        self.board.close()


class WeightsAndBiases(AbstractTracker):
    """Sends to Weights & Biases; with `mode="offline"` it writes a folder that `wandb sync` sends later.

    The horizontal axis of its charts is the epoch. Numbers of the run as a whole are in its summary.

    Args:
        run: a run that was begun already, which is left open at the end.
        init: passed on to `wandb.init`, such as project, name, dir and mode, where no run is given.
    """

    def __init__(self, run: Any = None, **init: Any) -> None:
        self._wandb = _brought("wandb")
        if run is not None and init:
            raise UserTypeError(f"a run that was begun already takes no {', '.join(init)}")
        self._begun_here = run is None
        self.run = self._wandb.init(**init) if run is None else run
        if self._begun_here:
            self.run.define_metric("epoch")
            self.run.define_metric("*", step_metric="epoch")

    def numbers(self, values: Mapping[str, float], epoch: int | None = None) -> None:
        if epoch is None:
            self.run.summary.update(dict(values))
        else:
            self._log(values, epoch)

    def histogram(self, name: str, histogram: Histogram, epoch: int) -> None:
        made = self._wandb.Histogram(np_histogram=(list(histogram.counts), histogram.limits))
        self._log({name: made}, epoch)

    def figure(self, name: str, figure: Any, epoch: int | None = None) -> None:
        self._log({name: self._wandb.Image(_pixels(figure))}, epoch)

    def settings(self, values: Mapping[str, Any]) -> None:
        self.run.config.update(dict(values))

    def close(self, *, failed: bool = False) -> None:
        if self._begun_here:
            self.run.finish(exit_code=int(failed))

    def _log(self, values: Mapping[str, Any], epoch: int | None) -> None:
        # Its own count of steps may only grow, which epochs of a run that is continued do not.
        self.run.log({**values, **({} if epoch is None else {"epoch": epoch})})


class MLflow(AbstractTracker):
    """Sends to MLflow. Figures become artifacts of the run, in `figures/`.

    Args:
        uri: a server's address, or "sqlite:///mlflow.db"; None for what MLflow itself is set to.
        experiment: which experiment the run belongs to; it is made if it is not there.
        run_name: what the run is called.
        run_id: a run that was begun already, which is left open at the end.
    """

    def __init__(
        self,
        uri: str | None = None,
        *,
        experiment: str = "fedlas",
        run_name: str | None = None,
        run_id: str | None = None,
    ) -> None:
        self._entities = _brought("mlflow.entities")
        self.client = _brought("mlflow").MlflowClient(tracking_uri=uri)
        self._begun_here = run_id is None
        self.run_id: str = run_id or self._begin(experiment, run_name)

    def numbers(self, values: Mapping[str, float], epoch: int | None = None) -> None:
        now = int(time.time() * 1000)
        made = [self._entities.Metric(_allowed(name), value, now, epoch or 0) for name, value in values.items()]
        for start in range(0, len(made), AT_ONCE):
            self.client.log_batch(self.run_id, metrics=made[start : start + AT_ONCE])

    def histogram(self, name: str, histogram: Histogram, epoch: int) -> None:
        pass

    def figure(self, name: str, figure: Any, epoch: int | None = None) -> None:
        when = "" if epoch is None else f"-{epoch}"
        self.client.log_figure(self.run_id, figure, f"figures/{_allowed(name)}{when}.png")

    def settings(self, values: Mapping[str, Any]) -> None:
        made = [self._entities.Param(_allowed(name), word) for name, word in _words(values).items()]
        for start in range(0, len(made), AT_ONCE // 10):
            self.client.log_batch(self.run_id, params=made[start : start + AT_ONCE // 10])

    def close(self, *, failed: bool = False) -> None:
        if self._begun_here:
            self.client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")

    def _begin(self, experiment: str, run_name: str | None) -> str:
        known = self.client.get_experiment_by_name(experiment)
        place = self.client.create_experiment(experiment) if known is None else known.experiment_id
        begun: str = self.client.create_run(place, run_name=run_name).info.run_id
        return begun


def numbers_of(report: Report, name: str | None = None) -> dict[str, float]:
    """List the numbers of a report by the names that trackers show.

    Args:
        report: what `fedlas.evaluate` gave.
        name: what they begin with; by default the split, or "predictions" where it has no name.
    """
    start = name or report.split or "predictions"
    found = _of_state(report.before, start)
    for calibrator, state in report.after.items():
        found |= _of_state(state, f"{start}/{calibrator}")
    return found


def _of_state(state: State, start: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for metric, result in state.results.items():
        found |= _of_result(result, f"{start}/{metric}")
    found |= {f"{start}/{word}": float(value) for word, value in state.parameters.items()}
    for foreign, scores in state.detection.sets.items() if state.detection is not None else ():
        for score, separation in scores.items():
            for one in fields(separation):
                name = f"{start}/ood/{foreign}/{score}/{one.name}"
                found |= _of_result(getattr(separation, one.name), name)
    return found


def _of_result(result: Result, name: str) -> dict[str, float]:
    ends = result.interval
    return {name: float(result)} | ({} if ends is None else {f"{name}_low": ends.low, f"{name}_high": ends.high})


def _words(values: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Write settings as words, those of a group behind its name and a slash."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _words(value, f"{above}{name}/")
        else:
            found[f"{above}{name}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return found


def _pixels(figure: Any) -> NDArray[np.uint8]:
    """Draw a figure; wandb and torch would do it through pyplot, which wants a screen or a setting."""
    agg = optional_module("matplotlib.backends.backend_agg")
    if not isinstance(figure, optional_module("matplotlib.figure").Figure):
        raise UserTypeError(f"a matplotlib figure is expected, not a {type(figure).__name__}")
    canvas = agg.FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _allowed(name: str) -> str:
    """Replace what MLflow allows in no name."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _brought(name: str) -> Any:
    """Import a tracker, which people bring themselves."""
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(f"{package} is needed for this: pip install {package}") from error
