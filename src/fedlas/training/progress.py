"""Progress bars, TensorBoard and the callbacks that a run has by default."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlas.extras import optional_module
from fedlas.records import Board
from fedlas.training.callbacks import AbstractCallback
from fedlas.training.run_folder import Run

if TYPE_CHECKING:
    from fedlas.training.session import Session


class ProgressBar(AbstractCallback):
    """A bar with the time left, silent where there is no terminal."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def on_train_start(self, run: Run, session: "Session", epoch: int) -> None:  # noqa: ARG002
        rich = optional_module("rich.progress", "train")
        columns = ("[progress.description]{task.description}", rich.BarColumn(), "{task.completed}/{task.total}")
        # A console of its own: the one that rich shares may have been made for another terminal.
        console = optional_module("rich.console", "train").Console()
        left = rich.TimeRemainingColumn()
        self._bar = rich.Progress(*columns, left, "{task.fields[shown]}", transient=True, console=console)
        total = session.recipe.epochs * session.steps_per_epoch
        done = epoch * session.steps_per_epoch
        self._task = self._bar.add_task(session.recipe.loss, total=total, completed=done, shown="")
        self._bar.start()

    def on_step_dispatched(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def on_epoch_end(self, record: Mapping[str, Any]) -> None:
        val = record["val"]
        shown = f"epoch {record['epoch']}: accuracy {100 * val['accuracy']:.2f} %, ECE {100 * val['ece']:.2f} %"
        self._bar.update(self._task, shown=shown)

    def on_train_end(self, run: Run) -> None:  # noqa: ARG002
        if self._bar is not None:
            self._bar.stop()


def _shown(progress: bool | None) -> bool:
    return sys.stderr.isatty() and sys.stdout.isatty() if progress is None else progress


@contextmanager
def downloads(progress: bool | None = None) -> Iterator[Callable[[str, int, int | None], None] | None]:
    """Show a bar for each file that a data set fetches: what is given here is for its `progress`.

    Args:
        progress: whether to show it; by default in a terminal.
    """
    if not _shown(progress):
        yield None
        return
    rich = optional_module("rich.progress", "train")
    columns = (rich.BarColumn(), rich.DownloadColumn(), rich.TransferSpeedColumn(), rich.TimeRemainingColumn())
    console = optional_module("rich.console", "train").Console()
    bar = rich.Progress("[progress.description]{task.description}", *columns, transient=True, console=console)
    tasks: dict[str, Any] = {}

    def fetched(name: str, have: int, total: int | None) -> None:
        if name not in tasks:
            bar.start()
            tasks[name] = bar.add_task(name)
        bar.update(tasks[name], completed=have, total=total)

    try:
        yield fetched
    finally:
        bar.stop()


class TensorBoard(AbstractCallback):
    """Writes the log for TensorBoard, into the run folder."""

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
    """Write the log of a finished run for TensorBoard, unless it is there."""
    if _board_folder(run).exists():
        return
    board = Board(_board_folder(run), first=1)
    for record in run.log:
        board.record(record)
    board.close()


def _board_folder(run: Run) -> Path:
    return run.own("tensorboard/any").parent


def default_callbacks(tensorboard: bool, progress: bool | None) -> list[AbstractCallback]:
    """Return the callbacks that a run has by default."""
    found: list[AbstractCallback] = [TensorBoard()] if tensorboard else []
    if _shown(progress):
        found.append(ProgressBar())
    return found
