"""Reproduce an experiment: plan it, train missing runs, write the ledger and the tables.

plan ─► runs missing in the ledger ─► scheduler ─► run folders ─► ledger ─► tables

A run whose recipe depends on other runs is planned once they are finished, so planning is repeated until no run is
missing. The program can be stopped and started again at any time: finished runs are skipped, interrupted ones continue.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedlas.errors import UserError
from fedlas.experiments.base import AbstractExperiment, Choice, Drawing
from fedlas.experiments.ledger import TEST, Ledger, epoch_ledger, other_epoch
from fedlas.experiments.planning import has_trained_run, make_plan
from fedlas.experiments.scheduler import FailedRunsError, train_recipes
from fedlas.experiments.stored_predictions import record
from fedlas.report.tables import Table
from fedlas.training.recipe import Recipe
from fedlas.training.run_folder import Run, run_in


def reproduce(
    experiment: AbstractExperiment,
    choice: Choice,
    *,
    ledger: Ledger,
    runs: Path,
    only: str | None = None,
    limit_minutes: float | None = None,
    draws: bool = False,
    **options: Any,
) -> Iterator[list[Table]]:
    """Train missing runs; yield the tables whenever a run finishes and others remain.

    Args:
        experiment: the experiment.
        choice: the rows, columns and seeds of the experiment to run.
        ledger: ledger of finished runs.
        runs: folder of the run folders.
        only: train runs whose folder name contains this text; None for all.
        limit_minutes: time limit; the next call continues.
        draws: also train finished runs again if a figure needs their model and `runs` does not contain it.
        options: further options of `train_recipes`.
    """
    check_limit(limit_minutes)
    start, left = time.monotonic(), limit_minutes
    tried: set[str] = set()
    failed: dict[str, str] = {}
    while True:
        plan = make_plan(experiment, choice, ledger, only, runs if draws else None)
        new = [planned for planned in plan.missing if planned.recipe.name not in tried]
        if limit_minutes is not None:
            left = max(0.0, limit_minutes - (time.monotonic() - start) / 60)
        if not new or left == 0:
            break
        if tried:  # the plan has new runs, which depend on results of earlier runs
            yield experiment.tables(ledger, choice)
        tried |= {planned.recipe.name for planned in new}
        by_name = {planned.recipe.name: planned for planned in new}
        recipes = [planned.recipe for planned in new]
        try:
            trained = train_recipes(recipes, folder=runs, limit_minutes=left, **options)
            for count, run in enumerate(trained, start=1):
                planned = by_name[run.folder.name]
                if planned.missing(ledger):  # not missing: trained again only for its figures
                    record(run, planned.protocol, ledger, planned.split)
                    if planned.split == TEST:
                        other = other_epoch(run.recipe)
                        record(run, planned.protocol, epoch_ledger(ledger, other), state=other)
                if count < len(new):
                    yield experiment.tables(ledger, choice)
        except FailedRunsError as error:  # runs that do not depend on the failed ones continue
            failed |= error.reasons
    if failed:
        raise FailedRunsError(failed)


def check_limit(minutes: float | None) -> None:
    """Raise unless the time limit is positive or None."""
    if minutes is not None and not minutes > 0:
        raise UserError(f"limit_minutes must be a positive number, not {minutes:g}")


def save_results(
    experiment: AbstractExperiment, choice: Choice, *, ledger: Ledger, runs: Path, folder: Path, **where: Any
) -> list[Path]:
    """Write the tables of an experiment in every format and draw its figures; return the files."""

    def find(recipe: Recipe) -> Run | None:
        return run_in(runs, recipe) if has_trained_run(runs, recipe) else None

    written = [path for table in experiment.tables(ledger, choice) for path in table.save(folder)]
    return written + experiment.draw(Drawing(ledger, choice, folder, find, **where))
