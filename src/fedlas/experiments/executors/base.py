"""The interface of executors, and functions that train one run in the process of an executor."""

import signal
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from fedlas.training import AbstractCallback, Recipe, Run, RunError, StoppedError, StopSignals, fit

Status: TypeAlias = Literal["finished", "locked", "stopped", "died", "failed"]


class Outcome(NamedTuple):
    """Outcome of one attempt at a run.

    Args:
        name: name of the run.
        status: "locked" means that another process holds the lock of the run folder.
        reason: one line for the user.
        traceback: traceback of the error, if any.
    """

    name: str
    status: Status
    reason: str = ""
    traceback: str = ""


class AbstractExecutor(ABC):
    """Train submitted runs.

    Attributes:
        capacity: maximum number of runs submitted at a time; None for no limit.
    """

    capacity: int | None = None

    @abstractmethod
    def submit(self, recipe: Recipe, run: Run) -> None:
        """Submit a run."""

    @abstractmethod
    def as_completed(self, timeout: float) -> list[Outcome]:
        """Return the outcomes of runs that have ended; wait for one for about `timeout` seconds."""

    def shutdown(self, *, wait: bool = True) -> None:  # noqa: B027
        """Stop every run after its current step.

        Args:
            wait: wait for the runs and release all processes; otherwise return at once and let `as_completed` report.
        """


class _StopOnRequest(AbstractCallback):
    """Stop a run after the step in which a stop is requested."""

    def __init__(self, should_stop: Callable[[], bool]) -> None:
        self.should_stop = should_stop

    def on_step_dispatched(self, step: int) -> None:
        if not self.should_stop():
            return
        if threading.current_thread() is not threading.main_thread():
            # Only the main thread receives signals; elsewhere the run continues from its last checkpoint.
            raise StoppedError(f"stopped after step {step}", signal.SIGTERM)
        listener = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        if isinstance(listener, StopSignals):  # otherwise a signal was already caught, and a second one would kill
            signal.raise_signal(signal.SIGTERM)


def train(
    recipe: Recipe,
    folder: Path,
    should_stop: Callable[[], bool],
    *,
    device: str | None,
    data_root: Path | None,
    progress: bool | None,
) -> Outcome:
    """Train a run and return its outcome; raise StoppedError only for a signal that no executor sent."""
    try:
        fit(
            recipe,
            out=folder,
            resume=True,
            callbacks=[_StopOnRequest(should_stop)],
            device=device,
            data_root=data_root,
            progress=progress,
        )
    except StoppedError as error:
        if not should_stop():
            raise
        return Outcome(recipe.name, "stopped", str(error))
    except Exception as error:
        if isinstance(error, RunError) and isinstance(error.__cause__, BlockingIOError):
            return Outcome(recipe.name, "locked")
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return Outcome(recipe.name, "failed", reason, traceback.format_exc())
    return Outcome(recipe.name, "finished")


def train_in_worker(
    recipe: Recipe, folder: Path, should_stop: Callable[[], bool], *, device: str | None, data_root: Path | None
) -> Outcome:
    """Train a run in a worker process; report any signal as the outcome "stopped"."""
    try:
        return train(recipe, folder, should_stop, device=device, data_root=data_root, progress=False)
    except StoppedError as error:
        return Outcome(recipe.name, "stopped", f"stopped by {signal.Signals(error.signal_number).name}")


def wait_or_stop(blocking_call: Callable[[], Any]) -> Any:
    """Return the result of a blocking call; raise StoppedError if a signal arrived meanwhile."""
    with StopSignals().listening() as signals:  # Ray would swallow an error raised in the signal handler
        result = blocking_call()
    if signals.caught is not None:
        raise StoppedError("stopped; start again to continue", signals.caught)
    return result
