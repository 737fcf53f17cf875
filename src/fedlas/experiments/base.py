"""The base class of experiments: planned runs, and the tables and figures made from their ledger lines.

plan(choice)   ─► recipes             (what has to be trained)
tables(ledger) ─► rows and columns    (from ledger lines and printed numbers alone)
draw(...)      ─► figures and their data

An experiment never trains: `reproduce.py` does, and writes each finished run into the ledger.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from fedlas.catalog import nearest
from fedlas.errors import UserError
from fedlas.experiments.ledger import TEST, Ledger, Line
from fedlas.report.tables import Table
from fedlas.training import protocol_named
from fedlas.training.recipe import Recipe
from fedlas.training.run_folder import Run

FOR = "For "  # prefix of notes on data that replaces the data of a heading
CHANGED = "Changed: "  # prefix of notes on fields that differ from the protocol

# Fields that decide to which cell of a table a run belongs; they have options of their own.
NAMING = {"data": "--data", "model": "--model", "loss": "--losses", "seed": "--seeds"}
LOOKS = (TEST, f"{TEST}-published")  # splits of the test images: our preprocessing, and that of the official code


@dataclass(frozen=True)
class Choice:
    """The part of an experiment that a user chooses; None leaves it to the experiment.

    Args:
        data: data sets.
        models: networks.
        losses: losses, or other rows of the experiment, by name.
        seeds: one run for each.
        protocol: "paper", "official", "fast" or "small".
        changes: fields of all recipes that shall be otherwise, as on the command line.
        split: split to evaluate: "test", or "test-published" with the normalisation of the official code.
        data_root: where data lies; experiments that take what is at hand look there.
    """

    data: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    losses: tuple[str, ...] | None = None
    seeds: tuple[int, ...] = (1, 2, 3)
    protocol: str = "paper"
    changes: Mapping[str, str] = field(default_factory=dict)
    split: str = TEST
    data_root: Path | None = None

    def __post_init__(self) -> None:
        if self.split not in LOOKS:
            raise UserError(f"nothing is evaluated on {self.split!r}; {nearest(self.split, list(LOOKS))}")
        for name, option in NAMING.items():
            if name in self.changes:
                raise UserError(f"{name} names a row, a column or a seed of the table: choose it with {option}")

    @property
    def summary(self) -> str:
        """The protocol in a sentence, with a remark if a field is changed."""
        return protocol_named(self.protocol).summary + (", but for what is changed" if self.changes else "")

    @property
    def changed(self) -> tuple[str, ...]:
        """A note on fields that differ from the protocol, if any."""
        said = ", ".join(f"{name}={value}" for name, value in self.changes.items())
        return (f"{CHANGED}{said}.",) if said else ()

    def of(self, known: Iterable[str], asked: Sequence[str] | None, kind: str) -> list[str]:
        """Return the requested names in the order of the known ones; raise if one is unknown."""
        names = list(known)
        for name in asked or ():
            if name not in names:
                raise UserError(f"this experiment has no {kind} {name!r}; {nearest(name, names)}")
        return [name for name in names if asked is None or name in asked]


@dataclass(frozen=True)
class PlannedRun:
    """One run of an experiment.

    Args:
        recipe: what to train.
        protocol: the recipe's protocol, by name.
        posthoc: which of its lines the experiment reads: as trained (None), or after a calibrator.
        split: split to evaluate.
        rows: the rows of the table that it fills, by name; without any, the loss says what it is.
    """

    recipe: Recipe
    protocol: str
    posthoc: tuple[str | None, ...] = (None,)
    split: str = TEST
    rows: tuple[str, ...] = ()

    def missing(self, ledger: Ledger) -> bool:
        """Return whether the ledger lacks a line of the run, or its OOD data."""
        return any(line is None or not set(self.recipe.ood) <= set(line.ood) for line in self.lines(ledger))

    def lines(self, ledger: Ledger) -> list[Line | None]:
        """Return the ledger line of each evaluation of the run."""
        return [ledger.find(self.recipe, one, self.split) for one in self.posthoc]


@dataclass(frozen=True)
class Drawing:
    """Inputs and output folder of figures.

    Args:
        ledger: what was measured.
        choice: what was asked for.
        folder: for figures and their data.
        find: gives the folder of a recipe's run, or None where it is not on this machine.
        data_root: where data lies.
        device: where networks look at images.
    """

    ledger: Ledger
    choice: Choice
    folder: Path
    find: Callable[[Recipe], Run | None]
    data_root: Path | None = None
    device: str | None = None


class AbstractExperiment(ABC):
    """One table or figure of the paper or of this project."""

    name: ClassVar[str]
    seeds: ClassVar[tuple[int, ...]] = (1, 2, 3)  # by default
    needs_runs: ClassVar[bool] = True
    draws_runs: ClassVar[bool] = False  # whether figures need the networks themselves, not only what they said

    @property
    def file_names(self) -> str:
        """Regular expression of the file names of tables and figures, without suffix."""
        return f"{re.escape(self.name)}([-_].*)?"

    @abstractmethod
    def plan(self, choice: Choice, ledger: Ledger) -> list[PlannedRun]:
        """Return the runs of the experiment, the most important first.

        Runs whose recipe depends on the results of others follow once those are in the ledger.
        """

    @abstractmethod
    def tables(self, ledger: Ledger, choice: Choice) -> list[Table]:
        """Return the tables; cells without runs are empty."""

    def draw(self, drawing: Drawing) -> list[Path]:
        """Draw the figures, none by default; return their files."""
        del drawing
        return []
