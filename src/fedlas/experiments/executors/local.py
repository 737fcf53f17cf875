"""Executors of one machine: the current process, or one worker process per device."""

import atexit
import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from fedlas.experiments.executors.base import AbstractExecutor, Outcome, train, train_in_worker, wait_or_stop
from fedlas.training import Recipe, Run

SHUTDOWN_TIMEOUT = 20.0  # seconds for an idle process to end


class SerialExecutor(AbstractExecutor):
    """Train one run after the other in the current process.

    Args:
        device: where to train.
        data_root: folder of the data.
        deadline: a value of `time.monotonic()` at which the current run stops.
        progress: show a progress bar; None for terminals only.
    """

    capacity = 1

    def __init__(self, device: str, data_root: Path | None, deadline: float, progress: bool | None = None) -> None:
        self._options: dict[str, Any] = {"device": device, "data_root": data_root, "progress": progress}
        self._deadline = deadline
        self._submitted: tuple[Recipe, Run] | None = None

    def submit(self, recipe: Recipe, run: Run) -> None:
        self._submitted = recipe, run

    def as_completed(self, timeout: float) -> list[Outcome]:
        if self._submitted is None:
            time.sleep(timeout)
            return []
        (recipe, run), self._submitted = self._submitted, None
        return [train(recipe, run.folder, lambda: time.monotonic() >= self._deadline, **self._options)]


class _Worker:
    """A device, the process that uses it, and the name of the run that it trains."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.run_name: str | None = None
        self.process: Any = None
        self.pipe: Any = None


class ProcessExecutor(AbstractExecutor):
    """Train in one process per listed device.

    Processes share no lock, so a killed process cannot block the others.

    Args:
        devices: a device for each process.
        data_root: folder of the data.
        deadline: a value of `time.monotonic()` at which all runs stop.
    """

    def __init__(self, devices: list[str], data_root: Path | None, deadline: float) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._stop = self._context.RawValue("b", 0)  # without a lock, which a killed process would keep
        self._workers = [_Worker(device) for device in devices]
        self._shared = {"data_root": data_root, "deadline": deadline, "processes": len(devices)}
        self.capacity = len(devices)
        # Otherwise a program that exits with an unfinished iterator would wait for idle processes.
        atexit.register(self.shutdown)

    def submit(self, recipe: Recipe, run: Run) -> None:
        worker = next(worker for worker in self._workers if worker.run_name is None)
        if worker.process is None or not worker.process.is_alive():
            self._end(worker)
            worker.pipe, worker_end = self._context.Pipe()
            worker.process = self._context.Process(
                target=_run_worker, args=(worker_end, self._stop, worker.device), kwargs=self._shared
            )
            worker.process.start()
            worker_end.close()  # only the worker holds its end, so that its death closes the pipe
        worker.run_name = recipe.name
        with suppress(OSError):  # the worker has just died; `as_completed` reports it
            worker.pipe.send((recipe, run.folder))

    def as_completed(self, timeout: float) -> list[Outcome]:
        busy = [worker for worker in self._workers if worker.run_name is not None]
        pipes = [worker.pipe for worker in busy]
        wait_or_stop(lambda: wait(pipes, timeout) if pipes else time.sleep(timeout))
        return [outcome for worker in busy if (outcome := self._outcome(worker)) is not None]

    def _outcome(self, worker: _Worker) -> Outcome | None:
        alive = worker.process.is_alive()
        if alive and not worker.pipe.poll():
            return None
        name, worker.run_name = str(worker.run_name), None
        try:
            outcome: Outcome = worker.pipe.recv() if worker.pipe.poll() else Outcome(name, "died")
        except (EOFError, OSError):
            outcome = Outcome(name, "died")
        if outcome.status in ("died", "failed"):
            # An error may have left the GPU unusable for this process.
            self._end(worker)
        if outcome.status == "died":
            return outcome._replace(reason=f"its process died (exit code {worker.process.exitcode})")
        return outcome

    def _end(self, worker: _Worker) -> None:
        """End a process: at once if it is idle, otherwise after its current step."""
        if worker.process is None:
            return
        worker.pipe.close()
        worker.process.join(None if worker.run_name is not None else SHUTDOWN_TIMEOUT)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()

    def shutdown(self, *, wait: bool = True) -> None:
        self._stop.value = 1
        if not wait:
            return
        atexit.unregister(self.shutdown)
        for worker in self._workers:
            if worker.pipe is not None:
                worker.pipe.close()
        try:
            for worker in self._workers:
                self._end(worker)
        finally:
            for worker in self._workers:  # a second Ctrl-C ended the waiting
                if worker.process is not None and worker.process.is_alive():
                    worker.process.kill()
                    worker.process.join()


def _run_worker(
    pipe: Connection, stop: Any, device: str, *, data_root: Path | None, deadline: float, processes: int
) -> None:
    """Train the runs received through the pipe until it is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # The parent decides. During a run the first signal stops it; a second one must not interrupt its checkpoint.
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_stop_with_parent, args=(stop,), daemon=True).start()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    if device.startswith("cuda"):
        torch.cuda.set_device(device)

    def should_stop() -> bool:
        return bool(stop.value) or time.monotonic() >= deadline

    try:
        while True:
            recipe, folder = pipe.recv()
            pipe.send(train_in_worker(recipe, folder, should_stop, device=device, data_root=data_root))
    except (EOFError, OSError):
        return


def _stop_with_parent(stop: Any) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        stop.value = 1
