"""Many runs, here or on many machines: who trains which recipe, and what happens when somebody dies.

recipe ─► finished in its folder?  ─► given at once
      └─► crew: this process, a process for each GPU, or Ray tasks
            ├ finished ─► given
            ├ busy     ─► tried again later: another process holds the folder's lock
            ├ stopped  ─► left for the next time, if we asked for it
            ├ died     ─► tried again, from its checkpoint
            └ failed   ─► told at once, named at the end; the others go on

All that is known of a run lies in its folder. So the launcher may be killed at any time: started again, it looks into
the folders and goes on. Several launchers may share a folder, and then share the work.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from fedlas.errors import UserError
from fedlas.experiments.cluster import VISIBLE_AFTER, Share, Tasks
from fedlas.experiments.crews import LOOK_EVERY, AbstractCrew, Alone, Outcome, Processes
from fedlas.extras import optional_module
from fedlas.training import Recipe, Run, RunError
from fedlas.training.recipe import differences
from fedlas.training.run_folder import run_in

How: TypeAlias = Literal["local", "ray"]

TRIES = 3  # of a run whose process died, or was told to stop by somebody else
AGAIN_AFTER = 5.0  # seconds until a locked folder is tried again
PATIENCE = 3600.0  # seconds for which a locked folder may stay as it is


class LaunchError(UserError):
    """Some runs failed; all others are done.

    Args:
        failed: why, by the name of the run.
    """

    def __init__(self, failed: Mapping[str, str]) -> None:
        self.failed = dict(failed)
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        super().__init__(f"{len(failed)} {'run' if len(failed) == 1 else 'runs'} failed: {reasons}")


def _silent(text: str) -> None:
    del text


def launched(
    recipes: Sequence[Recipe],
    *,
    folder: Path,
    how: How = "local",
    address: str | None = None,
    gpus_per_run: float | None = None,
    cpus_per_run: float = 1,
    device: str | None = None,
    data_root: Path | None = None,
    limit_minutes: float | None = None,
    workers: int | None = None,
    told: Callable[[str], None] = _silent,
) -> Iterator[Run]:
    """Train recipes and give each run as it finishes.

    A run that is finished in its folder is given at once, one that stands still is continued. What fails does not stop
    the others; a `LaunchError` at the end names it.

    Args:
        recipes: what to train; the same recipe is trained once.
        folder: every run gets a folder in it. With Ray it has to be storage that all nodes share.
        how: "local" takes this machine, with a process for each GPU where there are several; "ray" takes a cluster.
        address: of the Ray cluster; by default `$RAY_ADDRESS`, or the one that runs here, or a new one on this machine.
        gpus_per_run: share of a GPU for each run, from 0 to 1; by default a whole one, where there are GPUs.
        cpus_per_run: processors that Ray sets aside for each run.
        device: where to train; by default a GPU if there is one.
        data_root: where data lies, on every node; by default `$FEDLAS_DATA` there, or the user's cache.
        limit_minutes: stop cleanly after this time; the next launch goes on from there.
        workers: processes on this machine; by default one for each share of a GPU.
        told: gets a line when something happens.
    """
    until = time.monotonic() + 60 * limit_minutes if limit_minutes is not None else float("inf")
    check_launch(
        folder=folder, how=how, address=address, gpus_per_run=gpus_per_run, cpus_per_run=cpus_per_run, workers=workers,
        limit_minutes=limit_minutes,
    )  # fmt: skip
    jobs = [_Job(recipe, run_in(Path(folder).resolve(), recipe)) for recipe in _neighbours(recipes)]
    ray = optional_module("ray", "cluster") if how == "ray" else None
    places = _places(device, gpus_per_run, workers) if how == "local" else []

    def crew(count: int) -> AbstractCrew:
        if ray is not None:
            share = Share(gpus_per_run, cpus_per_run, device)
            return Tasks(ray, address, share, told, data_root=data_root, folder=Path(folder).resolve())
        if len(places) == 1:
            return Alone(places[0], data_root, until)
        return Processes(places[:count], data_root, until)

    return _Launch(jobs, crew, until, told).runs()


def check_launch(
    *,
    folder: Path,
    how: str = "local",
    address: str | None = None,
    gpus_per_run: float | None = None,
    cpus_per_run: float = 1,
    workers: int | None = None,
    limit_minutes: float | None = None,
) -> None:
    """Refuse what `launched` could not do, before anything is planned.

    Args:
        folder: as for `launched`, like all others.
        how: local or ray.
        address: of the cluster.
        gpus_per_run: share of a GPU.
        cpus_per_run: processors.
        workers: processes.
        limit_minutes: time.
    """
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    if not there.is_dir():
        raise UserError(f"{there} is no folder; run folders lie in one: name another for them (--runs)")
    if how not in ("local", "ray"):
        raise UserError(f"launch must be local or ray, not {how!r}")
    if how == "local" and address is not None:
        raise UserError("an address is that of a Ray cluster; launch with ray")
    if how == "ray" and workers is not None:
        raise UserError("workers are processes on this machine; on Ray, gpus_per_run and cpus_per_run decide")
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


def _neighbours(recipes: Sequence[Recipe]) -> list[Recipe]:
    """Leave out repetitions, and put side by side what can share a network, and within that a captured step."""
    networks: dict[tuple[Any, ...], int] = {}
    steps: dict[Recipe, int] = {}

    def place(recipe: Recipe) -> tuple[int, int]:
        shared = (recipe.data, recipe.model, str(recipe.model_options), recipe.batch_size, recipe.precision)
        network = networks.setdefault(shared, len(networks))
        return network, steps.setdefault(recipe.replace(seed=1), len(steps))

    once: dict[str, Recipe] = {}
    for recipe in recipes:
        once.setdefault(recipe.name, recipe)
    return sorted(once.values(), key=place)


def _places(device: str | None, gpus_per_run: float | None, workers: int | None) -> list[str]:
    """Give the device of every process on this machine."""
    if device is None:
        device = "cuda" if gpus_per_run != 0 and torch.cuda.is_available() else "cpu"
    found = [f"cuda:{number}" for number in range(torch.cuda.device_count())] if device == "cuda" else [device]
    if not found:
        raise RunError("device is cuda, but torch sees no GPU here")
    places = found * (int(1 / gpus_per_run) if gpus_per_run else 1)
    return places if workers is None else [places[n % len(places)] for n in range(workers)]


@dataclass
class _Job:
    """A run on its way: how often it was tried, and since when its folder is locked and stays as it is."""

    recipe: Recipe
    run: Run
    tries: int = 0
    locked_since: float | None = None
    seen: tuple[float, ...] = ()

    def finished(self) -> bool:
        """Whether the run is done; a folder with anything else in it is for the engine to complain about."""
        try:
            same = self.run.recipe_file.exists() and not differences(self.run.recipe, self.recipe)
            return same and self.run.finished_for(self.recipe)
        except (ValueError, TypeError):
            return False

    def given_up(self) -> bool:
        """Note that the folder is locked, and say whether nothing has happened in it for too long."""
        now = time.monotonic()
        files = [file for file in (self.run.log_file, self.run.checkpoint) if file.exists()]
        seen = tuple(file.stat().st_mtime for file in files)
        if self.locked_since is None or seen != self.seen:
            self.locked_since, self.seen = now, seen
        return now - self.locked_since > PATIENCE


class _Launch:
    """All jobs, from the first look into their folders to the last report."""

    def __init__(
        self, jobs: list[_Job], crew: Callable[[int], AbstractCrew], until: float, told: Callable[[str], None]
    ) -> None:
        self._jobs = {job.recipe.name: job for job in jobs}
        self._crew, self._until, self._told = crew, until, told
        self._waiting: deque[_Job] = deque()
        self._later: list[tuple[float, _Job]] = []
        self._out: set[str] = set()
        self._failed: dict[str, str] = {}
        self._traces: list[str] = []
        self._stopping = False

    def runs(self) -> Iterator[Run]:
        """Give the runs in the order in which they finish."""
        ready = [job for job in self._jobs.values() if job.finished()]
        names = {job.recipe.name for job in ready}
        self._waiting.extend(job for name, job in self._jobs.items() if name not in names)
        given = len(ready)
        if ready:
            self._told(f"{len(ready)} of {len(self._jobs)} runs are finished already")
        for job in ready:
            yield job.run
        if self._waiting and not self._time_is_up():
            for run in self._trained(self._crew(len(self._waiting))):
                given += 1
                yield run
        left = len(self._jobs) - given - len(self._failed)
        if left:
            self._told(f"time is up: {left} of {len(self._jobs)} runs are left; start again to go on with them")
        if self._failed:
            error = LaunchError(self._failed)
            for trace in self._traces:
                error.add_note(trace)
            raise error

    def _trained(self, crew: AbstractCrew) -> Iterator[Run]:
        try:
            while self._out or self._waiting or self._later:
                if self._time_is_up() and not self._stopping:
                    self._stopping = True
                    crew.stop()
                self._hand_out(crew)
                done = [self._judged(outcome) for outcome in crew.outcomes(self._nap())]
                self._hand_out(crew)  # before somebody takes their time with what is done
                yield from (run for run in done if run is not None)
        finally:
            crew.close()

    def _time_is_up(self) -> bool:
        return time.monotonic() >= self._until

    def _nap(self) -> float:
        return min(LOOK_EVERY, max(0.0, self._until - time.monotonic()))

    def _hand_out(self, crew: AbstractCrew) -> None:
        if self._stopping or self._time_is_up():
            self._waiting.clear()
            self._later.clear()
        now = time.monotonic()
        self._waiting.extend(job for moment, job in self._later if moment <= now)
        self._later = [(moment, job) for moment, job in self._later if moment > now]
        while self._waiting and crew.has_room():
            job = self._waiting.popleft()
            self._out.add(job.recipe.name)
            crew.give(job.recipe, job.run)

    def _judged(self, outcome: Outcome) -> Run | None:
        """Give a run that is done, and decide what becomes of one that is not."""
        self._out.remove(outcome.name)
        job = self._jobs[outcome.name]
        if job.finished() or (outcome.word == "finished" and _seen(job)):
            return job.run  # also where somebody died after the last file was written
        if outcome.word == "finished":
            self._fail(outcome._replace(reason=f"{job.run.folder} is not seen here; all nodes need one shared folder"))
        elif outcome.word == "failed":
            self._fail(outcome)
        elif self._stopping or self._time_is_up():
            pass  # it is left for the next time
        elif outcome.word == "busy":
            if job.locked_since is None:
                self._told(f"{outcome.name}: another process is working on it")
            if job.given_up():
                lock = job.run.folder / ".lock"
                still = f"locked, and unchanged for {PATIENCE / 60:g} minutes"
                self._fail(outcome._replace(reason=f"{still}; if no process works on it any more, delete {lock}"))
            else:
                self._later.append((time.monotonic() + AGAIN_AFTER, job))
        else:
            job.tries += 1
            if job.tries < TRIES:
                self._told(f"{outcome.name}: {outcome.reason}; it is continued")
                self._waiting.appendleft(job)
            else:
                self._fail(outcome._replace(reason=f"{outcome.reason}, {TRIES} times in all"))
        return None

    def _fail(self, outcome: Outcome) -> None:
        self._told(f"{outcome.name} failed: {outcome.reason}")
        self._failed[outcome.name] = outcome.reason
        if outcome.trace:
            self._traces.append(f"{outcome.name}:\n{outcome.trace}")


def _seen(job: _Job) -> bool:
    """Wait until a run that another machine has finished is finished here too."""
    end = time.monotonic() + VISIBLE_AFTER
    while not job.finished():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True
