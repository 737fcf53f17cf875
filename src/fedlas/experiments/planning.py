"""The plan of an experiment: its runs, which of them are missing, and the estimated training time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from fedlas.catalog import Catalog, summary
from fedlas.errors import UserError, short_list
from fedlas.experiments.base import AbstractExperiment, Choice, PlannedRun
from fedlas.experiments.ledger import TEMPERATURE, Ledger
from fedlas.training import check_parts
from fedlas.training.recipe import Recipe
from fedlas.training.run_folder import run_in

NAMED = 4  # number of folders listed in an error message
HEAD = ("data", "model", "row", "evaluated", "seed", "epochs", "folder")  # of `Plan.rows`

CATALOG = Catalog("fedlas.experiments", AbstractExperiment, "experiment")  # type: ignore[type-abstract]


@dataclass(frozen=True)
class Plan:
    """The runs of an experiment, and which of them are missing.

    Args:
        runs: all runs.
        missing: runs that the ledger lacks, in the order of training.
        minutes: estimated duration of the missing runs that have similar runs in the ledger; None if there are none.
        unknown: number of missing runs without similar runs in the ledger.
        again: number of runs in the ledger that are trained again because a figure needs their model.
        device: device of the similar runs; None if unknown or several.
        unscaled: number of runs with a line before, but not after temperature scaling.
    """

    runs: tuple[PlannedRun, ...]
    missing: tuple[PlannedRun, ...]
    minutes: float | None
    unknown: int = 0
    again: int = 0
    device: str | None = None
    unscaled: int = 0

    def __str__(self) -> str:
        known = "time unknown: the ledger has no such runs yet"
        if self.minutes is not None:
            more = f" for {len(self.missing) - self.unknown} of them, of the others the ledger has no such runs yet"
            where = f" on {self.device}" if self.device else ""
            known = f"{self.minutes:.1f} min{where}{more if self.unknown else ''}"
        done = len(self.runs) - len(self.missing) + self.again
        again = f", {self.again} of them again: figures are drawn of the network itself" if self.again else ""
        noun = "run" if len(self.runs) == 1 else "runs"
        unscaled = f" ({self.unscaled} without temperature scaling)" if self.unscaled else ""
        return f"{len(self.runs)} {noun}, {done} in the ledger{unscaled}, {len(self.missing)} to train{again}" + (
            f" ({known})" if self.missing else ""
        )

    @property
    def protocols(self) -> str:
        """The protocols of all runs; some experiments use a fixed protocol."""
        return ", ".join(dict.fromkeys(planned.protocol for planned in self.runs))

    def rows(self) -> list[list[str]]:
        """Return a row for each missing run: data, model, row, evaluation, seed, epochs, folder."""
        rows = []
        for planned in self.missing:
            recipe, names = planned.recipe, ", ".join(planned.rows) or planned.recipe.loss
            evaluated = ", ".join(posthoc or "as trained" for posthoc in planned.posthoc)
            rows.append(
                [recipe.data, recipe.model, names, evaluated, str(recipe.seed), str(recipe.epochs), recipe.name]
            )
        return rows


def experiment_named(name: str) -> AbstractExperiment:
    """Return the experiment with a name."""
    return CATALOG.find(name)()


def list_experiments() -> list[list[str]]:
    """Return name and description of all experiments."""
    return [[name, summary(cls)] for name, cls in CATALOG.entries.items()]


def make_plan(
    experiment: AbstractExperiment,
    choice: Choice,
    ledger: Ledger,
    only: str | None = None,
    runs: Path | None = None,
) -> Plan:
    """Return the plan of an experiment; a run that several rows share is counted once.

    Args:
        experiment: the experiment.
        choice: the rows, columns and seeds to plan.
        ledger: finished runs.
        only: keep runs whose folder name contains this text; None for all.
        runs: folder of the run folders, if figures are to be drawn that need the models; otherwise None.
    """
    by_name: dict[str, PlannedRun] = {}
    for planned in experiment.plan(choice, ledger):
        before = by_name.get(planned.recipe.name)
        posthoc = (*before.posthoc, *planned.posthoc) if before else planned.posthoc
        rows = (*before.rows, *planned.rows) if before else planned.rows
        by_name[planned.recipe.name] = replace(
            planned, posthoc=tuple(dict.fromkeys(posthoc)), rows=tuple(dict.fromkeys(rows))
        )
    selected = tuple(planned for name, planned in by_name.items() if only is None or only in name)
    if only is not None and not selected:
        known = f"there are {short_list(by_name, NAMED)}" if by_name else "none is planned"
        raise UserError(f"no planned run has a folder whose name contains {only!r}; {known}")
    in_ledger = [planned for planned in selected if not planned.missing(ledger)]
    again = []
    if runs is not None and experiment.draws_runs:
        again = [planned for planned in in_ledger if not has_trained_run(runs, planned.recipe)]
    done = {planned.recipe.name for planned in in_ledger} - {planned.recipe.name for planned in again}
    missing = tuple(planned for planned in selected if planned.recipe.name not in done)
    for planned in missing:
        check_parts(planned.recipe)
    for line in (line for planned in selected for line in planned.lines(ledger) if line is not None):
        ledger.content_of(line)
    minutes, unknown, device = _minutes(missing, ledger)
    unscaled = sum(ledger.find(planned.recipe, TEMPERATURE, planned.split) is None for planned in in_ledger)
    return Plan(selected, missing, minutes, unknown, len(again), device, unscaled)


def has_trained_run(runs: Path, recipe: Recipe) -> bool:
    """Return whether a folder of run folders has the finished run of a recipe, with its checkpoint."""
    run = run_in(runs, recipe)
    return run.recipe_file.exists() and run.finished and run.checkpoint.exists()


def _minutes(missing: Sequence[PlannedRun], ledger: Ledger) -> tuple[float | None, int, str | None]:
    """Estimate the minutes of missing runs from ledger runs with the same data, model and batch size.

    Return the minutes, the number of runs without such ledger runs, and the device if all ran on one.
    """
    known: dict[tuple[Any, ...], list[float]] = {}
    kinds, devices = {_kind(planned.recipe) for planned in missing}, set()
    for line in ledger.lines.values():
        if line.posthoc is None and line.seconds and (kind := _kind(line.recipe)) in kinds:
            known.setdefault(kind, []).append(line.seconds / line.recipe.epochs)
            devices.add(line.environment.get("device_name"))
    seconds = [
        median(known[_kind(planned.recipe)]) * planned.recipe.epochs
        for planned in missing
        if _kind(planned.recipe) in known
    ]
    device = str(*devices) if len(devices) == 1 and all(devices) else None
    return sum(seconds) / 60 if seconds or not missing else None, len(missing) - len(seconds), device


def _kind(recipe: Recipe) -> tuple[Any, ...]:
    return recipe.data, recipe.model, recipe.batch_size, recipe.precision
