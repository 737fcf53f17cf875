"""The base class of experiments: planned runs, and the tables and figures made from their ledger lines.

plan(choice)   ─► runs to train
tables(ledger) ─► tables, from ledger lines and the paper's numbers alone
draw(...)      ─► figures and their data

An experiment does not train: `reproduce.py` trains the runs and writes each finished one into the ledger.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from fedlas.catalog import nearest, one_of
from fedlas.errors import UserError
from fedlas.experiments.ledger import TEST, Ledger, Line
from fedlas.report.tables import Table
from fedlas.training import protocol_named
from fedlas.training.recipe import OFFICIAL_SUFFIX, Recipe
from fedlas.training.run_folder import Run

SUBSTITUTED = "For "  # prefix of notes such as "For SVHN: ...", which name the data used in place of SVHN
CHANGED = "Changed: "  # prefix of notes on fields that differ from the protocol

# Fields that determine the table cell of a run, with the command-line option that sets each of them.
CELL_FIELDS = {"data": "--data", "model": "--model", "loss": "--losses", "seed": "--seeds"}
TEST_SPLITS = (TEST, f"{TEST}{OFFICIAL_SUFFIX}")  # normalisation of this package, and of the official code


@dataclass(frozen=True)
class Choice:
    """The part of an experiment to reproduce; None stands for the default of the experiment.

    Args:
        data: data sets.
        models: networks.
        losses: losses, or other rows of the table, by name.
        seeds: seeds; each row has one run per seed.
        protocol: training protocol: "paper", "official", "fast" or "small".
        changes: recipe fields to override in all runs, with values as strings (`--set` on the command line).
        split: split to evaluate: "test", or "test-published" with the normalisation of the official code.
        data_root: folder of the data sets; by default $FEDLAS_DATA, or the user's cache.
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
        one_of("split", self.split, TEST_SPLITS)
        for name, option in CELL_FIELDS.items():
            if name in self.changes:
                raise UserError(f"--set cannot change {name}, which determines the table cell of a run; use {option}")

    @property
    def summary(self) -> str:
        """The protocol in a sentence, with a remark if a field is changed."""
        return protocol_named(self.protocol).summary + (", except for the changed fields" if self.changes else "")

    @property
    def changed(self) -> tuple[str, ...]:
        """A note on fields that differ from the protocol, if any."""
        changes = ", ".join(f"{name}={value}" for name, value in self.changes.items())
        return (f"{CHANGED}{changes}.",) if changes else ()

    def select(self, known: Iterable[str], requested: Sequence[str] | None, kind: str) -> list[str]:
        """Return the requested names in the order of the known ones; raise if one is unknown."""
        names = list(known)
        for name in requested or ():
            if name not in names:
                raise UserError(f"this experiment has no {kind} {name!r}; {nearest(name, names)}")
        return [name for name in names if requested is None or name in requested]


@dataclass(frozen=True)
class PlannedRun:
    """One run of an experiment.

    Args:
        recipe: recipe of the run.
        protocol: name of the training protocol.
        posthoc: calibrators of the ledger lines that the experiment reads; None stands for no calibrator.
        split: split to evaluate.
        rows: names of the table rows that use the run; empty for the row named after the loss.
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
        return [ledger.find(self.recipe, posthoc, self.split) for posthoc in self.posthoc]


@dataclass(frozen=True)
class Drawing:
    """Inputs and output folder of figures.

    Args:
        ledger: ledger of finished runs.
        choice: part of the experiment.
        folder: output folder.
        find: returns the finished run of a recipe, or None if it is not on this machine.
        data_root: folder of the data sets.
        device: device for inference.
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
    seeds: ClassVar[tuple[int, ...]] = (1, 2, 3)  # default seeds
    needs_runs: ClassVar[bool] = True
    draws_runs: ClassVar[bool] = False  # whether figures need the trained networks and not only their predictions

    @property
    def file_names(self) -> str:
        """Regular expression of the file names of tables and figures, without suffix."""
        return f"{re.escape(self.name)}([-_].*)?"

    @abstractmethod
    def plan(self, choice: Choice, ledger: Ledger) -> list[PlannedRun]:
        """Return the runs of the experiment, the most important first.

        A run whose recipe depends on results of other runs is included only once those results are in the ledger.
        """

    def tables(self, ledger: Ledger, choice: Choice) -> list[Table]:
        """Return the tables, none by default; cells without runs are empty."""
        del ledger, choice
        return []

    def draw(self, drawing: Drawing) -> list[Path]:
        """Draw the figures, none by default; return their files."""
        del drawing
        return []
