"""From the name of a table to the table: plan, train what is missing, write the ledger, lay out.

plan ─► what the ledger lacks ─► scheduler ─► run folders ─► ledger ─► tables

Runs whose recipe depends on others are make_plan when those are done, so planning is repeated until nothing is missing.
Everything can be stopped at any time, and started again: finished runs are found, broken ones continue.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedlas.errors import UserError
from fedlas.experiments.base import AbstractExperiment, Choice, Drawing
from fedlas.experiments.ledger import Ledger
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
    """Train what is missing, and give the tables anew whenever a run is finished and another one still to come.

    Args:
        experiment: what to make again.
        choice: which part of it.
        ledger: where finished runs are written down.
        runs: folder of the run folders.
        only: a part of the names of the run folders that are trained; None for all.
        limit_minutes: when to stop; the rest is done next time.
        draws: whether figures shall be drawn, some of which need networks that the ledger knows and nobody has here.
        options: further options of `train_recipes`.
    """
    check_limit(limit_minutes)
    clock = _Clock(limit_minutes)
    tried: set[str] = set()
    failed: dict[str, str] = {}
    while True:
        plan = make_plan(experiment, choice, ledger, only, runs if draws else None)
        new = [one for one in plan.missing if one.recipe.name not in tried]
        if not new or clock.over:
            break
        if tried:  # those before were the last that anybody knew of
            yield experiment.tables(ledger, choice)
        tried |= {one.recipe.name for one in new}
        by_name = {one.recipe.name: one for one in new}
        recipes = [one.recipe for one in new]
        try:
            trained = train_recipes(recipes, folder=runs, limit_minutes=clock.left, **options)
            for count, run in enumerate(trained, start=1):
                one = by_name[run.folder.name]
                if one.missing(ledger):  # not if it was trained again for its figures alone
                    record(run, one.protocol, ledger, one.split)
                if count < len(new):
                    yield experiment.tables(ledger, choice)
        except FailedRunsError as error:  # what does not depend on the failed runs goes on
            failed |= error.reasons
    if failed:
        raise FailedRunsError(failed)


def check_limit(minutes: float | None) -> None:
    """Refuse a limit in which nothing could be done."""
    if minutes is not None and not minutes > 0:
        raise UserError(f"limit_minutes must be a positive number, not {minutes:g}")


class _Clock:
    """Counts the minutes that are left."""

    def __init__(self, minutes: float | None) -> None:
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def left(self) -> float | None:
        """How many minutes there are; None for any number."""
        return None if self._end is None else max(0.0, self._end - time.monotonic()) / 60

    @property
    def over(self) -> bool:
        """Whether there are none."""
        return self.left == 0.0


def save_results(
    experiment: AbstractExperiment, choice: Choice, *, ledger: Ledger, runs: Path, folder: Path, **where: Any
) -> list[Path]:
    """Draw the figures of an experiment, and write its tables in every format."""

    def find(recipe: Recipe) -> Run | None:
        return run_in(runs, recipe) if has_trained_run(runs, recipe) else None

    written = [path for table in experiment.tables(ledger, choice) for path in table.save(folder)]
    return written + experiment.draw(Drawing(ledger, choice, folder, find, **where))
