"""Those who train on this machine, the process that we are in or one for each GPU; and what every crew can do."""

import atexit
import multiprocessing
import os
import signal
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from fedlas.training import AbstractCallback, Recipe, Run, RunError, StoppedError, StopSignals, fit

Word: TypeAlias = Literal["finished", "busy", "stopped", "died", "failed"]

FAREWELL = 20.0  # seconds for a process without work to end
LOOK_EVERY = 1.0  # seconds between two looks at the clock and at processes


class Outcome(NamedTuple):
    """How one try at a run ended.

    Args:
        name: of the run.
        word: in one word.
        reason: in one line.
        trace: where an error came from.
    """

    name: str
    word: Word
    reason: str = ""
    trace: str = ""


class AbstractCrew(ABC):
    """Those who train."""

    @abstractmethod
    def has_room(self) -> bool:
        """Whether one more run can be given."""

    @abstractmethod
    def give(self, recipe: Recipe, run: Run) -> None:
        """Give a run to whoever is free."""

    @abstractmethod
    def outcomes(self, seconds: float) -> list[Outcome]:
        """Wait for runs to end, not much longer than some seconds, and say how they did."""

    def stop(self) -> None:  # noqa: B027
        """Ask everybody to stop after the step that they are in."""

    def close(self) -> None:  # noqa: B027
        """Stop everybody, and leave nothing behind."""


class _StopWhen(AbstractCallback):
    """Stops a run after the step in which somebody wants it to."""

    def __init__(self, wanted: Callable[[], bool]) -> None:
        self.wanted = wanted

    def on_step_dispatched(self, step: int) -> None:
        if not self.wanted():
            return
        if threading.current_thread() is not threading.main_thread():
            # Signals reach the main thread alone; here the checkpoint that is there has to do.
            raise StoppedError(f"stopped after step {step}", signal.SIGTERM)
        listener = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        if isinstance(listener, StopSignals):  # else it has heard a signal already, and another one would kill
            signal.raise_signal(signal.SIGTERM)


class Trainer:
    """Trains recipes and reports how each run ended."""

    def __init__(self, device: str | None, data_root: Path | None, progress: bool | None) -> None:
        self.device, self.data_root, self.progress = device, data_root, progress

    def outcome(self, recipe: Recipe, folder: Path, wanted_stop: Callable[[], bool]) -> Outcome:
        """Train, and say how it went; only a signal that nobody here sent is raised, as StoppedError."""
        try:
            fit(
                recipe,
                out=folder,
                resume=True,
                callbacks=[_StopWhen(wanted_stop)],
                device=self.device,
                data_root=self.data_root,
                progress=self.progress,
            )
        except StoppedError as error:
            if not wanted_stop():
                raise
            return Outcome(recipe.name, "stopped", str(error))
        except Exception as error:
            if isinstance(error, RunError) and isinstance(error.__cause__, BlockingIOError):
                return Outcome(recipe.name, "busy")  # the lock was not to be had
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            return Outcome(recipe.name, "failed", reason, traceback.format_exc())
        return Outcome(recipe.name, "finished")


class Alone(AbstractCrew):
    """The current process; it trains one run after the other."""

    def __init__(self, device: str, data_root: Path | None, until: float) -> None:
        self._trainer = Trainer(device, data_root, progress=None)
        self._until = until
        self._job: tuple[Recipe, Run] | None = None

    def has_room(self) -> bool:
        return self._job is None

    def give(self, recipe: Recipe, run: Run) -> None:
        self._job = recipe, run

    def outcomes(self, seconds: float) -> list[Outcome]:
        if self._job is None:
            time.sleep(seconds)
            return []
        (recipe, run), self._job = self._job, None
        return [self._trainer.outcome(recipe, run.folder, lambda: time.monotonic() >= self._until)]


class _Place:
    """A device, the process that works on it, and what it works on."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.name: str | None = None
        self.process: Any = None
        self.pipe: Any = None


class Processes(AbstractCrew):
    """A process for each place on this machine; they share nothing that one of them could take to its grave."""

    def __init__(self, places: list[str], data_root: Path | None, until: float) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._stop = self._context.RawValue("b", 0)  # without a lock: who is killed would keep it
        self._places = [_Place(device) for device in places]
        self._shared = {"data_root": data_root, "until": until, "processes": len(places)}
        # Whoever keeps the iterator and ends the program would else wait for processes that wait for work.
        atexit.register(self.close)

    def has_room(self) -> bool:
        return any(place.name is None for place in self._places)

    def give(self, recipe: Recipe, run: Run) -> None:
        place = next(place for place in self._places if place.name is None)
        if place.process is None or not place.process.is_alive():
            self._dismiss(place)
            place.pipe, theirs = self._context.Pipe()
            given = (theirs, self._stop, place.device)
            place.process = self._context.Process(target=_work, args=given, kwargs=self._shared)
            place.process.start()
            theirs.close()  # theirs alone, so that its end is heard here
        place.name = recipe.name
        with suppress(OSError):  # it has just died, which is noticed when it is asked for the outcome
            place.pipe.send((recipe, run.folder))

    def outcomes(self, seconds: float) -> list[Outcome]:
        working = [place for place in self._places if place.name is not None]
        pipes = [place.pipe for place in working]
        heard(lambda: wait(pipes, seconds) if pipes else time.sleep(seconds))
        return [outcome for place in working if (outcome := self._outcome(place)) is not None]

    def _outcome(self, place: _Place) -> Outcome | None:
        alive = place.process.is_alive()
        if alive and not place.pipe.poll():
            return None
        name, place.name = str(place.name), None
        try:
            outcome: Outcome = place.pipe.recv() if place.pipe.poll() else Outcome(name, "died")
        except (EOFError, OSError):
            outcome = Outcome(name, "died")
        if outcome.word in ("died", "failed"):
            # An error may have left the GPU unusable for this process.
            self._dismiss(place)
        if outcome.word == "died":
            return outcome._replace(reason=f"its process died (exit code {place.process.exitcode})")
        return outcome

    def _dismiss(self, place: _Place) -> None:
        """Let a process end: at once where it has nothing to do, else after the step that it is in."""
        if place.process is None:
            return
        place.pipe.close()
        place.process.join(None if place.name is not None else FAREWELL)
        if place.process.is_alive():
            place.process.kill()
            place.process.join()

    def stop(self) -> None:
        self._stop.value = 1

    def close(self) -> None:
        atexit.unregister(self.close)
        self.stop()
        for place in self._places:
            if place.pipe is not None:
                place.pipe.close()
        try:
            for place in self._places:
                self._dismiss(place)
        finally:
            for place in self._places:  # somebody is in a hurry
                if place.process is not None and place.process.is_alive():
                    place.process.kill()
                    place.process.join()


def _work(pipe: Connection, stop: Any, device: str, *, data_root: Path | None, until: float, processes: int) -> None:
    """Train what comes through the pipe until it is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # Who started us decides. Heard in a run, the first signal stops it; a second must not hit its checkpoint.
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_stop_with_parent, args=(stop,), daemon=True).start()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    trainer = Trainer(device, data_root, progress=False)
    try:
        while True:
            recipe, folder = pipe.recv()
            pipe.send(even_if_stopped(trainer, recipe, folder, lambda: bool(stop.value) or time.monotonic() >= until))
    except (EOFError, OSError):
        return


def even_if_stopped(trainer: Trainer, recipe: Recipe, folder: Path, wanted_stop: Callable[[], bool]) -> Outcome:
    """Train, and take a signal of a stranger for a reason to go on elsewhere."""
    try:
        return trainer.outcome(recipe, folder, wanted_stop)
    except StoppedError as error:
        return Outcome(recipe.name, "stopped", f"stopped by {signal.Signals(error.signal_number).name}")


def _stop_with_parent(stop: Any) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        stop.value = 1


def heard(waiting: Callable[[], Any]) -> Any:
    """Wait for something, and raise StoppedError if a signal came meanwhile."""
    with StopSignals().listening() as signals:  # raised in the handler, an error would get lost inside Ray
        found = waiting()
    if signals.caught is not None:
        raise StoppedError("stopped; start again to go on", signals.caught)
    return found
