"""Onlookers of a run: bars in the terminal, TensorBoard, or code of one's own."""

import inspect
import sys
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlas.catalog import nearest
from fedlas.extras import optional_module
from fedlas.records import Board
from fedlas.training.run_folder import Run

if TYPE_CHECKING:
    from fedlas.training.session import Bench


class AbstractCallback(ABC):  # noqa: B024 (every method may be left as it is)
    """Is told how a run goes on; write the methods that you need."""

    def begun(self, run: Run, bench: "Bench", epoch: int) -> None:  # noqa: B027
        """Tell that the run begins, or continues, with an epoch that counts from 0."""

    def advanced(self, step: int) -> None:  # noqa: B027
        """Tell that a step was handed to the device, which may not have done it yet; do not wait for it here."""

    def stepped(self, bench: "Bench", step: int) -> None:  # noqa: B027
        """Show network, gradients and loss after a step; whoever writes this method has no captured steps."""

    def epoch_ended(self, record: Mapping[str, Any]) -> None:  # noqa: B027
        """Show the line of the log."""

    def ended(self, run: Run) -> None:  # noqa: B027
        """Tell that the run is over, or stops."""


HOOKS = tuple(name for name in vars(AbstractCallback) if not name.startswith("_"))


def checked_callbacks(callbacks: Sequence[AbstractCallback]) -> tuple[AbstractCallback, ...]:
    """Refuse what is no list of onlookers, and an onlooker with a public method that nobody would ever call."""
    if isinstance(callbacks, (AbstractCallback, type)) or not isinstance(callbacks, Iterable):
        raise TypeError(f"callbacks takes a list, such as callbacks=[Watch()], not {callbacks!r}")
    found = tuple(callbacks)
    for one in found:
        if isinstance(one, type):
            raise TypeError(f"callbacks takes objects, not classes: {one.__name__}() instead of {one.__name__}")
        if not isinstance(one, AbstractCallback):
            raise TypeError(f"callbacks takes objects of classes that derive from AbstractCallback, not {one!r}")
        for name in dir(type(one)):
            if not name.startswith("_") and name not in HOOKS and inspect.isroutine(getattr(type(one), name)):
                hint = nearest(name, list(HOOKS))
                raise TypeError(f"{type(one).__name__}.{name} would never be called; {hint} Begin other names with _.")
    return found


def looks_at_steps(callback: AbstractCallback) -> bool:
    """Say whether a callback wants to see the device after each step."""
    return type(callback).stepped is not AbstractCallback.stepped


class ProgressBar(AbstractCallback):
    """A bar with the time left, silent where there is no terminal."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def begun(self, run: Run, bench: "Bench", epoch: int) -> None:  # noqa: ARG002
        rich = optional_module("rich.progress", "train")
        columns = ("[progress.description]{task.description}", rich.BarColumn(), "{task.completed}/{task.total}")
        # A console of its own: the one that rich shares may have been made for another terminal.
        console = optional_module("rich.console", "train").Console()
        left = rich.TimeRemainingColumn()
        self._bar = rich.Progress(*columns, left, "{task.fields[shown]}", transient=True, console=console)
        total = bench.recipe.epochs * bench.steps_per_epoch
        done = epoch * bench.steps_per_epoch
        self._task = self._bar.add_task(bench.recipe.loss, total=total, completed=done, shown="")
        self._bar.start()

    def advanced(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def epoch_ended(self, record: Mapping[str, Any]) -> None:
        val = record["val"]
        shown = f"epoch {record['epoch']}: accuracy {100 * val['accuracy']:.2f} %, ECE {100 * val['ece']:.2f} %"
        self._bar.update(self._task, shown=shown)

    def ended(self, run: Run) -> None:  # noqa: ARG002
        if self._bar is not None:
            self._bar.stop()


class TensorBoard(AbstractCallback):
    """Writes the log for TensorBoard, into the run folder."""

    def __init__(self) -> None:
        self._board: Board | None = None

    def begun(self, run: Run, bench: "Bench", epoch: int) -> None:  # noqa: ARG002
        self._board = Board(_board_folder(run), first=epoch + 1)

    def epoch_ended(self, record: Mapping[str, Any]) -> None:
        assert self._board is not None
        self._board.record(record)

    def ended(self, run: Run) -> None:  # noqa: ARG002
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
    """Give the onlookers that a run has by itself."""
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
