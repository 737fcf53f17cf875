"""The paper's figure on gate stability: fraction of samples in each mode and flip rate, by epoch.

The mode psi of a training sample in an epoch is +1 or -1. The figure shows the fraction of samples in each mode, and
the flip rate: the fraction of samples whose mode differs from the previous epoch, among those seen in both epochs.
Runs log these numbers; mean and range over seeds are computed here. The runs are those of the main table.

The paper calls +1 "overconfident" and -1 "under-confident". Since the gate learns to lower the training loss, the
table has two more statistics: the mean of alpha_i / alpha, and the fraction of samples with psi = -sign(gamma).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fedlas.experiments.base import AbstractExperiment, Choice, Drawing, PlannedRun
from fedlas.experiments.ledger import Ledger, Line
from fedlas.experiments.paper import data_name
from fedlas.report.figures import epoch_statistics, gate_data, gate_figure, save_with_data
from fedlas.report.tables import Cell, Column, Row, Table
from fedlas.training.protocols import compared_losses, list_recipes, recipe_for
from fedlas.training.recipe import Recipe

PAPER = "cifar10"


class Place(NamedTuple):
    """A data set and a network; None for the protocol's first."""

    data: str
    model: str | None


@dataclass(frozen=True)
class Number:
    """A number of the table.

    Args:
        word: its name in the log.
        heading: what stands above its column.
        last: whether the last epoch counts, or the first that has the number.
        percent: whether it is shown times 100.
    """

    word: str
    heading: str
    last: bool = True
    percent: bool = True


NUMBERS = (
    Number("positive", "psi = +1 %, first epoch", last=False),
    Number("positive", "psi = +1 %, last epoch"),
    Number("flip_rate", "flip rate %, second epoch", last=False),
    Number("flip_rate", "flip rate %, last epoch"),
    Number("alpha_ratio", "alpha_i / alpha, last epoch", percent=False),
    Number("against_gamma", "psi = -sign(gamma) %, last epoch"),
)


class GateStability(AbstractExperiment):
    """Proportions of the two modes and flip rate by epoch, of both FeDLaS losses."""

    name = "gate_stability"

    def plan(self, choice: Choice, ledger: Ledger) -> list[PlannedRun]:
        """Return the runs of the main table that have a gate."""
        del ledger
        return [
            PlannedRun(recipe, choice.protocol)
            for place in _places(choice)
            for loss in _losses(choice)
            for recipe in _recipes(choice, place, loss)
        ]

    def tables(self, ledger: Ledger, choice: Choice) -> list[Table]:
        """Return a table of the first and the last epoch."""
        places, losses = _places(choice), _losses(choice)
        columns = tuple(
            Column(one.heading, _heading(choice, place), percent=one.percent, ranked=False)
            for place in places
            for one in NUMBERS
        )
        rows = tuple(
            Row(loss, paper, tuple(_cell(ledger, choice, place, loss, one) for place in places for one in NUMBERS))
            for loss, paper in losses.items()
        )
        notes = (
            f"Protocol: {choice.summary}.",
            *choice.changed,
            "psi = +1: more smoothing for larger feature norms. Flip rate: share of samples whose psi differs from the"
            " epoch before. psi = -sign(gamma) makes alpha_i smaller than alpha, which lowers the loss of samples that"
            " the network fits.",
        )
        return [Table(f"{self.name}-{choice.protocol}", "The gate in the course of training", columns, rows, notes)]

    def draw(self, drawing: Drawing) -> list[Path]:
        """Draw the paper's two plots for each data set and network that has runs."""
        choice, files = drawing.choice, []
        for place in _places(choice):
            found = {paper: _lines(drawing.ledger, choice, place, loss) for loss, paper in _losses(choice).items()}
            there = [line for lines in found.values() for line in lines]
            if not there:
                continue
            recipe = there[0].recipe
            milestones = recipe.milestones if recipe.schedule == "multi_step" else ()
            curves = {_counted(name, lines): [line.curve for line in lines] for name, lines in found.items() if lines}
            title = f"{_heading(choice, place)}, {choice.protocol} protocol{', changed' if choice.changes else ''}"
            data = gate_data(curves, title, milestones)
            name = f"{self.name}-{choice.protocol}-{recipe.data}-{recipe.model}"
            files += save_with_data(gate_figure(data), data, drawing.folder, name)
        return files


def _losses(choice: Choice) -> dict[str, str]:
    """Return the requested losses with a gate, with the paper's names."""
    gated = {name: paper for name, paper in compared_losses().items() if name.startswith("fedlas_")}
    return {name: gated[name] for name in choice.of(gated, choice.losses, "loss")}


def _places(choice: Choice) -> list[Place]:
    """Return the requested data sets and models; by default the paper's, if the protocol has a model."""
    known = list(dict.fromkeys(r.data for protocol, r in list_recipes(["ce"]) if protocol == choice.protocol))
    usual = [PAPER] if PAPER in known else known[:1]
    wanted = choice.of(known, usual if choice.data is None else choice.data, "data set")
    return [Place(data, model) for data in wanted for model in choice.models or (None,)]


def _recipes(choice: Choice, place: Place, loss: str) -> list[Recipe]:
    made = [recipe_for(*place, loss, protocol=choice.protocol, seed=seed) for seed in choice.seeds]
    return [recipe.with_settings(choice.changes) for recipe in made]


def _lines(ledger: Ledger, choice: Choice, place: Place, loss: str) -> list[Line]:
    found = [ledger.find(recipe) for recipe in _recipes(choice, place, loss)]
    return [line for line in found if line is not None]


def _cell(ledger: Ledger, choice: Choice, place: Place, loss: str, one: Number) -> Cell:
    courses = [epoch_statistics(loss, [line.curve], one.word) for line in _lines(ledger, choice, place, loss)]
    values = tuple(course.mean[-1 if one.last else 0] for course in courses if course.mean)
    return Cell(values, planned=len(choice.seeds))


def _heading(choice: Choice, place: Place) -> str:
    model = recipe_for(*place, protocol=choice.protocol).model
    return f"{data_name(place.data)}, {model}"


def _counted(name: str, lines: Sequence[Line]) -> str:
    return f"{name} ({len(lines)} seed{'s' if len(lines) > 1 else ''})"
