"""From the name of a table to the table: plan, train what is missing, write the ledger, lay out.

plan ─► what the ledger lacks ─► launch ─► run folders ─► ledger ─► tables

Runs whose recipe depends on others are planned when those are done, so planning is repeated until nothing is missing.
Everything can be stopped at any time, and started again: finished runs are found, broken ones continue.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fedlas.catalog import Catalog, summary
from fedlas.experiments.base import AbstractExperiment, Choice, Drawing, Wanted
from fedlas.experiments.kept import record
from fedlas.experiments.launch import launched
from fedlas.experiments.ledger import Ledger
from fedlas.report.tables import Table
from fedlas.train.recipe import Recipe
from fedlas.train.runs import Run

CATALOG = Catalog("fedlas.experiments", AbstractExperiment, "experiment")  # type: ignore[type-abstract]


@dataclass(frozen=True)
class Plan:
    """What an experiment wants, and what of it is missing.

    Args:
        wanted: every run.
        missing: those that the ledger lacks, in the order in which they will be trained.
        minutes: how long they will take, as far as the ledger knows such runs; None where it does not.
    """

    wanted: tuple[Wanted, ...]
    missing: tuple[Wanted, ...]
    minutes: float | None

    def __str__(self) -> str:
        known = "time unknown: the ledger has no such runs yet" if self.minutes is None else f"{self.minutes:.1f} min"
        done = len(self.wanted) - len(self.missing)
        return f"{len(self.wanted)} runs, {done} in the ledger, {len(self.missing)} to train" + (
            f" ({known})" if self.missing else ""
        )

    def rows(self) -> list[list[str]]:
        """List the runs that are missing: data, network, loss, how it is judged, seed, epochs, folder."""
        return [_row(one.recipe, one.posthoc) for one in self.missing]


HEAD = ("data", "model", "loss", "judged", "seed", "epochs", "folder")


def _row(recipe: Recipe, posthoc: Sequence[str | None]) -> list[str]:
    judged = ", ".join(one or "as trained" for one in posthoc)
    return [recipe.data, recipe.model, recipe.loss, judged, str(recipe.seed), str(recipe.epochs), recipe.name]


def experiment_named(name: str) -> AbstractExperiment:
    """Look an experiment up."""
    return CATALOG.find(name)()


def list_experiments() -> list[list[str]]:
    """List all experiments: name, and what it is."""
    return [[name, summary(cls)] for name, cls in CATALOG.entries.items()]


def planned(experiment: AbstractExperiment, choice: Choice, ledger: Ledger, only: str | None = None) -> Plan:
    """Say what is wanted, and what is missing; runs that several rows share count once.

    Args:
        experiment: what to make again.
        choice: which part of it.
        ledger: what was measured already.
        only: a part of the names of the run folders that are meant; None for all.
    """
    wanted: dict[str, Wanted] = {}
    for one in experiment.plan(choice, ledger):
        before = wanted.get(one.recipe.name)
        judged = (*before.posthoc, *one.posthoc) if before else one.posthoc
        wanted[one.recipe.name] = Wanted(one.recipe, one.protocol, tuple(dict.fromkeys(judged)))
    meant = tuple(one for name, one in wanted.items() if only is None or only in name)
    missing = tuple(one for one in meant if one.missing(ledger))
    return Plan(meant, missing, _minutes(missing, ledger))


def _minutes(missing: Sequence[Wanted], ledger: Ledger) -> float | None:
    """Estimate from runs of the same data, network and batch size: seconds an epoch."""
    known: dict[tuple[Any, ...], list[float]] = {}
    for line in ledger.lines.values():
        if line.posthoc is None and line.seconds:
            known.setdefault(_kind(line.recipe), []).append(line.seconds / line.recipe.epochs)
    if any(_kind(one.recipe) not in known for one in missing):
        return None
    return sum(median(known[_kind(one.recipe)]) * one.recipe.epochs for one in missing) / 60


def _kind(recipe: Recipe) -> tuple[Any, ...]:
    return recipe.data, recipe.model, recipe.batch_size, recipe.precision


def reproduce(
    experiment: AbstractExperiment,
    choice: Choice,
    *,
    ledger: Ledger,
    runs: Path,
    told: Callable[[str], None],
    only: str | None = None,
    limit_minutes: float | None = None,
    **launch: Any,
) -> Iterator[list[Table]]:
    """Train what is missing, and give the tables anew whenever a run is finished.

    Args:
        experiment: what to make again.
        choice: which part of it.
        ledger: where finished runs are written down.
        runs: folder of the run folders.
        told: gets a line when something happens.
        only: a part of the names of the run folders that are trained; None for all.
        limit_minutes: when to stop; the rest is done next time.
        launch: where to train, as for `launched`.
    """
    clock = _Clock(limit_minutes)
    tried: set[str] = set()
    while True:
        plan = planned(experiment, choice, ledger, only)
        new = [one for one in plan.missing if one.recipe.name not in tried]
        if not new or clock.over:
            return
        tried |= {one.recipe.name for one in new}
        by_name = {one.recipe.name: one for one in new}
        recipes = [one.recipe for one in new]
        for run in launched(recipes, folder=runs, limit_minutes=clock.left, told=told, **launch):
            one = by_name[run.folder.name]
            for posthoc in one.posthoc:
                record(run, one.protocol, posthoc, ledger)
            yield experiment.tables(ledger, choice)


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


def drawn(
    experiment: AbstractExperiment, choice: Choice, *, ledger: Ledger, runs: Path, folder: Path, **where: Any
) -> list[Path]:
    """Draw the figures of an experiment, and write its tables in every format."""

    def find(recipe: Recipe) -> Run | None:
        run = Run(runs / recipe.name)
        return run if run.recipe_file.exists() and run.finished else None

    written = [path for table in experiment.tables(ledger, choice) for path in table.save(folder)]
    return written + experiment.draw(Drawing(ledger, choice, folder, find, **where))
