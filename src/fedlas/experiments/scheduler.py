"""The scheduler of many runs: skip finished runs, submit the others to an executor, and retry interrupted runs.

recipe ─► finished in its folder?  ─► yielded at once
      └─► executor: this process, one process per GPU, or Ray tasks
            ├ finished ─► yielded
            ├ locked   ─► retried later: another process holds the lock of the folder
            ├ stopped  ─► left for the next call, if the scheduler stopped it; otherwise retried
            ├ died     ─► retried, from its checkpoint
            └ failed   ─► logged at once, raised at the end; the other runs continue

The state of a run is in its folder. So the scheduler may be killed at any time; a new one reads the folders and
continues. Several schedulers may share a folder, and then share the work.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from fedlas.errors import UserError
from fedlas.experiments.executors.base import AbstractExecutor, Outcome
from fedlas.experiments.executors.local import ProcessExecutor, SerialExecutor
from fedlas.experiments.executors.ray import VISIBLE_AFTER, RayExecutor
from fedlas.extras import optional_module
from fedlas.training import Recipe, Run, RunError
from fedlas.training.run_folder import run_in

logger = logging.getLogger(__name__)

ExecutorName: TypeAlias = Literal["local", "ray"]

MAX_ATTEMPTS = 3  # for a run whose process died or was stopped by an external signal
POLL_INTERVAL = 1.0  # seconds between two polls of the runs and of the deadline
LOCK_RETRY_INTERVAL = 5.0  # seconds until a locked folder is tried again
LOCK_TIMEOUT = 3600.0  # seconds for which a locked folder may stay unchanged


class FailedRunsError(UserError):
    """Some runs failed; all others are finished.

    Args:
        reasons: reason of each failure, by the name of the run.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        super().__init__(f"{len(reasons)} {'run' if len(reasons) == 1 else 'runs'} failed: {listed}")


def train_recipes(
    recipes: Sequence[Recipe],
    *,
    folder: Path,
    executor: ExecutorName = "local",
    address: str | None = None,
    gpus_per_run: float | None = None,
    cpus_per_run: float = 1,
    device: str | None = None,
    data_root: Path | None = None,
    limit_minutes: float | None = None,
    workers: int | None = None,
    progress: bool | None = None,
) -> Iterator[Run]:
    """Train recipes and yield each run as it finishes.

    A run that is finished in its folder is yielded at once, an interrupted one is continued. A failed run does not stop
    the others; a `FailedRunsError` at the end names it.

    Args:
        recipes: what to train; equal recipes are trained once.
        folder: folder of the run folders. With Ray it must be storage that all nodes share.
        executor: "local" uses this machine, with one process per GPU if there are several; "ray" uses a cluster.
        address: address of the Ray cluster; by default `$RAY_ADDRESS`, or the cluster of this machine, or a new one.
        gpus_per_run: fraction of a GPU for each run, from 0 to 1; by default a whole one, if there are GPUs.
        cpus_per_run: CPUs that Ray reserves for each run.
        device: where to train; by default a GPU if there is one.
        data_root: folder of the data on every node; by default `$FEDLAS_DATA` there, or the user's cache.
        limit_minutes: stop cleanly after this time; the next call continues.
        workers: processes on this machine; by default one for each GPU, or fraction of a GPU.
        progress: show a progress bar where this process trains; None for terminals only.
    """
    deadline = time.monotonic() + 60 * limit_minutes if limit_minutes is not None else float("inf")
    check_options(
        folder=folder, executor=executor, address=address, gpus_per_run=gpus_per_run, cpus_per_run=cpus_per_run,
        workers=workers, limit_minutes=limit_minutes,
    )  # fmt: skip
    folder = Path(folder).resolve()
    jobs = [_Job(recipe, run_in(folder, recipe)) for recipe in _in_order(recipes)]
    ray = optional_module("ray", "cluster") if executor == "ray" else None
    devices = _worker_devices(device, gpus_per_run, workers) if executor == "local" else []

    def start_executor(count: int) -> AbstractExecutor:
        if ray is not None:
            return RayExecutor(
                ray, address, gpus=gpus_per_run, cpus=cpus_per_run, device=device, data_root=data_root, folder=folder
            )
        if len(devices) == 1:
            return SerialExecutor(devices[0], data_root, deadline, progress)
        return ProcessExecutor(devices[:count], data_root, deadline)

    return _Scheduler(jobs, start_executor, deadline).runs()


def check_options(
    *,
    folder: Path,
    executor: str = "local",
    address: str | None = None,
    gpus_per_run: float | None = None,
    cpus_per_run: float = 1,
    workers: int | None = None,
    limit_minutes: float | None = None,
) -> None:
    """Raise if `train_recipes` does not accept these options.

    Args:
        folder: as in `train_recipes`, like the other arguments.
        executor: local or ray.
        address: address of the cluster.
        gpus_per_run: fraction of a GPU.
        cpus_per_run: CPUs.
        workers: processes.
        limit_minutes: time limit.
    """
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not parent.is_dir():
        raise UserError(f"{parent} is not a folder; name a folder for the run folders (--runs)")
    if executor not in ("local", "ray"):
        raise UserError(f"executor must be local or ray, not {executor!r}")
    if executor == "local" and address is not None:
        raise UserError("address is the address of a Ray cluster; choose the executor ray")
    if executor == "ray" and workers is not None:
        raise UserError("workers are processes on this machine; with Ray, gpus_per_run and cpus_per_run decide")
    if workers is not None and workers < 1:
        raise UserError(f"workers must be at least 1, not {workers}")
    if gpus_per_run is not None and not 0 <= gpus_per_run <= 1:
        raise UserError(f"gpus_per_run must be from 0 to 1, not {gpus_per_run}; one run on many GPUs is for torchrun")
    if not cpus_per_run >= 0:
        raise UserError(f"cpus_per_run must be at least 0, not {cpus_per_run}")
    if limit_minutes is not None and not limit_minutes >= 0:
        raise UserError(f"limit_minutes must be at least 0, not {limit_minutes}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("torchrun is for one run on many GPUs; start many runs without it")


def _in_order(recipes: Sequence[Recipe]) -> list[Recipe]:
    """Drop duplicates; sort so that recipes sharing a compiled network, and then a compiled step, are adjacent."""
    networks: dict[tuple[Any, ...], int] = {}
    steps: dict[Recipe, int] = {}

    def position(recipe: Recipe) -> tuple[int, int]:
        shared = (recipe.data, recipe.model, str(recipe.model_options), recipe.batch_size, recipe.precision)
        network = networks.setdefault(shared, len(networks))
        return network, steps.setdefault(recipe.replace(seed=1), len(steps))

    unique: dict[str, Recipe] = {}
    for recipe in recipes:
        unique.setdefault(recipe.name, recipe)
    return sorted(unique.values(), key=position)


def _worker_devices(device: str | None, gpus_per_run: float | None, workers: int | None) -> list[str]:
    """Return the device of each process on this machine."""
    if device is None:
        device = "cuda" if gpus_per_run != 0 and torch.cuda.is_available() else "cpu"
    available = [f"cuda:{number}" for number in range(torch.cuda.device_count())] if device == "cuda" else [device]
    if not available:
        raise RunError("device is cuda, but torch sees no GPU here")
    devices = available * (int(1 / gpus_per_run) if gpus_per_run else 1)
    return devices if workers is None else [devices[n % len(devices)] for n in range(workers)]


@dataclass
class _Job:
    """A run to train, with its failed attempts and the time since which its folder is locked and unchanged."""

    recipe: Recipe
    run: Run
    attempts: int = 0
    locked_since: float | None = None
    modified: tuple[float, ...] = ()

    def finished(self) -> bool:
        """Return whether the run is finished; training raises later if the folder has other content."""
        try:
            return self.run.holds_finished_run(self.recipe)
        except (ValueError, TypeError):
            return False

    def lock_timed_out(self) -> bool:
        """Record that the folder is locked; return whether nothing in it has changed for `LOCK_TIMEOUT`."""
        now = time.monotonic()
        files = [file for file in (self.run.log_file, self.run.checkpoint) if file.exists()]
        modified = tuple(file.stat().st_mtime for file in files)
        if self.locked_since is None or modified != self.modified:
            self.locked_since, self.modified = now, modified
        return now - self.locked_since > LOCK_TIMEOUT


class _Scheduler:
    """The state of all jobs of one call of `train_recipes`."""

    def __init__(self, jobs: list[_Job], start_executor: Callable[[int], AbstractExecutor], deadline: float) -> None:
        self._jobs = {job.recipe.name: job for job in jobs}
        self._start_executor, self._deadline = start_executor, deadline
        self._queue: deque[_Job] = deque()
        self._delayed: list[tuple[float, _Job]] = []
        self._submitted: set[str] = set()
        self._failures: dict[str, str] = {}
        self._tracebacks: list[str] = []
        self._stopping = False

    def runs(self) -> Iterator[Run]:
        """Yield the runs in the order in which they finish."""
        done = [job for job in self._jobs.values() if job.finished()]
        names = {job.recipe.name for job in done}
        self._queue.extend(job for name, job in self._jobs.items() if name not in names)
        yielded = len(done)
        if done:
            logger.info("%d of %d runs are already finished", len(done), len(self._jobs))
        for job in done:
            yield job.run
        if self._queue and not self._time_is_up():
            for run in self._train(self._start_executor(len(self._queue))):
                yielded += 1
                yield run
        left = len(self._jobs) - yielded - len(self._failures)
        if left:
            logger.info("time is up: %d of %d runs are left; start again to continue them", left, len(self._jobs))
        if self._failures:
            error = FailedRunsError(self._failures)
            for note in self._tracebacks:
                error.add_note(note)
            raise error

    def _train(self, executor: AbstractExecutor) -> Iterator[Run]:
        try:
            while self._submitted or self._queue or self._delayed:
                if self._time_is_up() and not self._stopping:
                    self._stopping = True
                    executor.shutdown(wait=False)
                self._submit_jobs(executor)
                timeout = min(POLL_INTERVAL, max(0.0, self._deadline - time.monotonic()))
                runs = [self._handle(outcome) for outcome in executor.as_completed(timeout)]
                self._submit_jobs(executor)  # before yielding, because the caller may take long
                yield from (run for run in runs if run is not None)
        finally:
            executor.shutdown()

    def _time_is_up(self) -> bool:
        return time.monotonic() >= self._deadline

    def _submit_jobs(self, executor: AbstractExecutor) -> None:
        if self._stopping or self._time_is_up():
            self._queue.clear()
            self._delayed.clear()
        now = time.monotonic()
        self._queue.extend(job for moment, job in self._delayed if moment <= now)
        self._delayed = [(moment, job) for moment, job in self._delayed if moment > now]
        while self._queue and (executor.capacity is None or len(self._submitted) < executor.capacity):
            job = self._queue.popleft()
            self._submitted.add(job.recipe.name)
            executor.submit(job.recipe, job.run)

    def _handle(self, outcome: Outcome) -> Run | None:
        """Return a finished run; retry or give up an unfinished one."""
        self._submitted.remove(outcome.name)
        job = self._jobs[outcome.name]
        if job.finished() or (outcome.status == "finished" and _wait_until_visible(job)):
            return job.run  # also if the process died after it wrote the last file
        if outcome.status == "finished":
            self._fail(outcome, f"{job.run.folder} is not visible here; all nodes need one shared folder")
        elif outcome.status == "failed":
            self._fail(outcome, outcome.reason)
        elif self._stopping or self._time_is_up():
            pass  # left for the next call
        elif outcome.status == "locked":
            if job.locked_since is None:
                logger.info("%s: another process is training it", outcome.name)
            if job.lock_timed_out():
                state = f"locked, and unchanged for {LOCK_TIMEOUT / 60:g} minutes"
                self._fail(outcome, f"{state}; if no process trains it any more, delete {job.run.folder / '.lock'}")
            else:
                self._delayed.append((time.monotonic() + LOCK_RETRY_INTERVAL, job))
        else:
            job.attempts += 1
            if job.attempts < MAX_ATTEMPTS:
                logger.warning("%s: %s; continuing it", outcome.name, outcome.reason)
                self._queue.appendleft(job)
            else:
                self._fail(outcome, f"{outcome.reason}, in each of {MAX_ATTEMPTS} attempts")
        return None

    def _fail(self, outcome: Outcome, reason: str) -> None:
        logger.error("%s failed: %s", outcome.name, reason)
        self._failures[outcome.name] = reason
        if outcome.traceback:
            self._tracebacks.append(f"{outcome.name}:\n{outcome.traceback}")


def _wait_until_visible(job: _Job) -> bool:
    """Wait until the files of a run that finished on another machine are visible on this machine."""
    deadline = time.monotonic() + VISIBLE_AFTER
    while not job.finished():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True
