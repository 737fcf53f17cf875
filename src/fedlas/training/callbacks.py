"""Callbacks of a run: progress bars, TensorBoard, or user-defined ones."""

import inspect
import sys
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fedlas.catalog import nearest
from fedlas.extras import optional_module
from fedlas.records import Board
from fedlas.training.run_folder import Run

if TYPE_CHECKING:
    from fedlas.training.session import Session


class AbstractCallback(ABC):  # noqa: B024 (every method has a default)
    """Follows a run; override the methods that you need.

    Attributes:
        sees_steps: call `on_step_end` after each step. Steps are then not captured in a CUDA graph.
    """

    sees_steps: ClassVar[bool] = False

    def on_train_start(self, run: Run, session: "Session", epoch: int) -> None:  # noqa: B027
        """Handle the start of a run, or its continuation, at an epoch counted from 0."""

    def on_step_dispatched(self, step: int) -> None:  # noqa: B027
        """Handle a step that was dispatched to the device, which may not have finished it; do not wait for it here."""

    def on_step_end(self, session: "Session", step: int) -> None:  # noqa: B027
        """Handle the end of a step, with network, gradients and loss; needs `sees_steps = True`."""

    def on_epoch_end(self, record: Mapping[str, Any]) -> None:  # noqa: B027
        """Handle the end of an epoch, with its line of the log."""

    def on_train_end(self, run: Run) -> None:  # noqa: B027
        """Handle the end of a run, finished or stopped."""


HOOKS = tuple(name for name in vars(AbstractCallback) if name.startswith("on_"))


def check_callbacks(callbacks: Sequence[AbstractCallback]) -> tuple[AbstractCallback, ...]:
    """Return the callbacks; raise if one is no callback or has a public method that would never be called."""
    if isinstance(callbacks, (AbstractCallback, type)) or not isinstance(callbacks, Iterable):
        raise TypeError(f"callbacks takes a list, such as callbacks=[Watch()], not {callbacks!r}")
    found = tuple(callbacks)
    for callback in found:
        kind = type(callback)
        if isinstance(callback, type):
            raise TypeError(
                f"callbacks takes objects, not classes: {callback.__name__}() instead of {callback.__name__}"
            )
        if not isinstance(callback, AbstractCallback):
            raise TypeError(f"callbacks takes objects of classes that derive from AbstractCallback, not {callback!r}")
        for name in dir(kind):
            if not name.startswith("_") and name not in HOOKS and inspect.isroutine(getattr(kind, name)):
                hint = nearest(name, list(HOOKS))
                raise TypeError(f"{kind.__name__}.{name} would never be called; {hint} Begin other names with _.")
        if kind.on_step_end is not AbstractCallback.on_step_end and not callback.sees_steps:
            raise TypeError(f"{kind.__name__}.on_step_end would never be called; set sees_steps = True in the class")
    return found


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
    """Write what the log of a finished run tells, where nobody has written it for TensorBoard yet."""
    if _board_folder(run).exists():
        return
    board = Board(_board_folder(run), first=1)
    for record in run.log:
        board.record(record)
    board.close()


def _board_folder(run: Run) -> Path:
    return run.own("tensorboard/any").parent


def usual(tensorboard: bool, progress: bool | None) -> list[AbstractCallback]:
    """Give the callbacks that a run has by itself."""
    found: list[AbstractCallback] = [TensorBoard()] if tensorboard else []
    if _shown(progress):
        found.append(ProgressBar())
    return found


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
