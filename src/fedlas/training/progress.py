"""Progress bars, TensorBoard, and the default callbacks of a run."""

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlas.extras import optional_module
from fedlas.progress import Progress, progress_bars
from fedlas.records import Board
from fedlas.training.callbacks import AbstractCallback
from fedlas.training.run_folder import Run

if TYPE_CHECKING:
    from fedlas.training.session import Session


class ProgressBar(AbstractCallback):
    """Progress bar with the remaining time."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def on_train_start(self, run: Run, session: "Session", epoch: int) -> None:  # noqa: ARG002
        rich = optional_module("rich.progress", "train")
        columns = ("[progress.description]{task.description}", rich.BarColumn(), "{task.completed}/{task.total}")
        # A separate console: rich's shared console may belong to another terminal.
        console = optional_module("rich.console", "train").Console()
        time_left = rich.TimeRemainingColumn()
        self._bar = rich.Progress(*columns, time_left, "{task.fields[shown]}", transient=True, console=console)
        total = session.recipe.epochs * session.steps_per_epoch
        done = epoch * session.steps_per_epoch
        self._task = self._bar.add_task(session.recipe.loss, total=total, completed=done, shown="")
        self._bar.start()

    def on_step_dispatched(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def on_epoch_end(self, record: Mapping[str, Any]) -> None:
        val = record["val"]
        summary = f"epoch {record['epoch']}: accuracy {100 * val['accuracy']:.2f} %, ECE {100 * val['ece']:.2f} %"
        self._bar.update(self._task, shown=summary)

    def on_train_end(self, run: Run) -> None:  # noqa: ARG002
        if self._bar is not None:
            self._bar.stop()


def _is_shown(progress: bool | None) -> bool:
    return sys.stderr.isatty() and sys.stdout.isatty() if progress is None else progress


def downloads(progress: bool | None = None) -> AbstractContextManager[Progress | None]:
    """Return a context that shows a bar for each download and yields the `progress` argument of a data set.

    Args:
        progress: whether to show it; by default in a terminal.
    """
    return progress_bars() if _is_shown(progress) else nullcontext()


class TensorBoard(AbstractCallback):
    """Writes the log for TensorBoard into the run folder."""

    def __init__(self) -> None:
        self._board: Board | None = None

    def on_train_start(self, run: Run, session: "Session", epoch: int) -> None:  # noqa: ARG002
        self._board = Board(_board_folder(run), first=epoch + 1)

    def on_epoch_end(self, record: Mapping[str, Any]) -> None:
        assert self._board is not None
        self._board.record(record)

    def on_train_end(self, run: Run) -> None:  # noqa: ARG002
        if self._board is not None:
            self._board.close()


def write_board(run: Run) -> None:
    """Write the log of a finished run for TensorBoard, unless it exists."""
    if _board_folder(run).exists():
        return
    board = Board(_board_folder(run), first=1)
    for record in run.log:
        board.record(record)
    board.close()


def _board_folder(run: Run) -> Path:
    return run.path_of("tensorboard/any").parent


def default_callbacks(tensorboard: bool, progress: bool | None) -> list[AbstractCallback]:
    """Return the default callbacks of a run."""
    callbacks: list[AbstractCallback] = [TensorBoard()] if tensorboard else []
    if _is_shown(progress):
        callbacks.append(ProgressBar())
    return callbacks
