"""The plan of an experiment: its runs, which of them are missing, and the estimated training time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from fedlas.catalog import Catalog, summary
from fedlas.errors import UserError
from fedlas.experiments.base import AbstractExperiment, Choice, PlannedRun
from fedlas.experiments.ledger import TEMPERATURE, Ledger
from fedlas.training import check_parts
from fedlas.training.recipe import Recipe
from fedlas.training.run_folder import run_in

NAMED = 3  # folders in an error message

CATALOG = Catalog("fedlas.experiments", AbstractExperiment, "experiment")  # type: ignore[type-abstract]


@dataclass(frozen=True)
class Plan:
    """The runs of an experiment, and which of them are missing.

    Args:
        wanted: every run.
        missing: runs that the ledger lacks, in the order of training.
        minutes: estimated minutes of the missing runs with similar runs in the ledger; None without any.
        unknown: number of missing runs without similar runs in the ledger.
        again: number of missing runs that are in the ledger, but whose model a figure needs.
        device: device of the similar runs; None if unknown or several.
        unscaled: number of runs with a line as trained and none after temperature scaling.
    """

    wanted: tuple[PlannedRun, ...]
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
        done = len(self.wanted) - len(self.missing) + self.again
        again = f", {self.again} of them again: figures are drawn of the network itself" if self.again else ""
        word = "run" if len(self.wanted) == 1 else "runs"
        unscaled = f" ({self.unscaled} without temperature scaling)" if self.unscaled else ""
        return f"{len(self.wanted)} {word}, {done} in the ledger{unscaled}, {len(self.missing)} to train{again}" + (
            f" ({known})" if self.missing else ""
        )

    @property
    def protocols(self) -> str:
        """The protocols of all runs; some experiments have a protocol of their own."""
        return ", ".join(dict.fromkeys(one.protocol for one in self.wanted))

    def rows(self) -> list[list[str]]:
        """Return a row for each missing run: data, model, row, evaluation, seed, epochs, folder."""
        return [_row(one.recipe, one) for one in self.missing]


HEAD = ("data", "model", "row", "evaluated", "seed", "epochs", "folder")


def _row(recipe: Recipe, wanted: PlannedRun) -> list[str]:
    row = ", ".join(wanted.rows) or recipe.loss
    evaluated = ", ".join(one or "as trained" for one in wanted.posthoc)
    return [recipe.data, recipe.model, row, evaluated, str(recipe.seed), str(recipe.epochs), recipe.name]


def experiment_named(name: str) -> AbstractExperiment:
    """Return the experiment of a name."""
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
    """Return the plan of an experiment; runs that several rows share count once.

    Args:
        experiment: the experiment.
        choice: part of the experiment.
        ledger: finished runs.
        only: keep runs whose folder name contains this text; None for all.
        runs: folder of the run folders, if figures are to be drawn that need the models; otherwise None.
    """
    wanted: dict[str, PlannedRun] = {}
    for one in experiment.plan(choice, ledger):
        before = wanted.get(one.recipe.name)
        posthoc = (*before.posthoc, *one.posthoc) if before else one.posthoc
        rows = (*before.rows, *one.rows) if before else one.rows
        wanted[one.recipe.name] = replace(one, posthoc=tuple(dict.fromkeys(posthoc)), rows=tuple(dict.fromkeys(rows)))
    meant = tuple(one for name, one in wanted.items() if only is None or only in name)
    if only is not None and not meant:
        more = f" and {len(wanted) - NAMED} more" if len(wanted) > NAMED else ""
        held = f"there are {', '.join(list(wanted)[:NAMED])}{more}" if wanted else "none is planned"
        raise UserError(f"no planned run has a folder whose name contains {only!r}; {held}")
    here = runs if experiment.draws_runs else None
    missing = tuple(
        one for one in meant if one.missing(ledger) or (here is not None and not has_trained_run(here, one.recipe))
    )
    again = sum(not one.missing(ledger) for one in missing)
    for one in missing:
        check_parts(one.recipe)
    for line in (line for one in meant for line in one.lines(ledger) if line is not None):
        ledger.content_of(line)
    minutes, unknown, device = _minutes(missing, ledger)
    done = [one for one in meant if not one.missing(ledger)]
    unscaled = sum(ledger.find(one.recipe, TEMPERATURE, one.split) is None for one in done)
    return Plan(meant, missing, minutes, unknown, again, device, unscaled)


def has_trained_run(runs: Path, recipe: Recipe) -> bool:
    """Return whether a folder of run folders has the finished run of a recipe, with its checkpoint."""
    run = run_in(runs, recipe)
    return run.recipe_file.exists() and run.finished and run.checkpoint.exists()


def _minutes(missing: Sequence[PlannedRun], ledger: Ledger) -> tuple[float | None, int, str | None]:
    """Estimate the minutes of missing runs from ledger runs with the same data, model and batch size.

    Return the minutes, the number of runs without such ledger runs, and the device if all ran on one.
    """
    known: dict[tuple[Any, ...], list[float]] = {}
    asked, devices = {_kind(one.recipe) for one in missing}, set()
    for line in ledger.lines.values():
        if line.posthoc is None and line.seconds and (kind := _kind(line.recipe)) in asked:
            known.setdefault(kind, []).append(line.seconds / line.recipe.epochs)
            devices.add(line.environment.get("device_name"))
    seconds = [median(known[_kind(one.recipe)]) * one.recipe.epochs for one in missing if _kind(one.recipe) in known]
    device = str(*devices) if len(devices) == 1 and all(devices) else None
    return sum(seconds) / 60 if seconds or not missing else None, len(missing) - len(seconds), device


def _kind(recipe: Recipe) -> tuple[Any, ...]:
    return recipe.data, recipe.model, recipe.batch_size, recipe.precision
