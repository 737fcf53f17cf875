"""The paper's figure on gate stability: fraction of samples in each mode and flip rate, by epoch.

The mode psi of a training sample in an epoch is +1 or -1. The figure shows the fraction of samples in each mode, and
the flip rate: the fraction of samples whose mode differs from the previous epoch, among those seen in both epochs.
Runs log these numbers; mean and range over seeds are computed here. The runs are those of the main table.

The paper calls +1 "overconfident" and -1 "under-confident". However, the gate may simply lower the training loss
by psi = -sign(gamma), which makes alpha_i smaller than alpha. Therefore the table also has the mean of alpha_i / alpha
and the fraction of samples with psi = -sign(gamma).
"""

from dataclasses import dataclass
from pathlib import Path

from fedlas.experiments.base import AbstractExperiment, Choice, Drawing, PlannedRun
from fedlas.experiments.grid import Benchmark
from fedlas.experiments.ledger import Ledger, Line
from fedlas.report.figures import epoch_statistics, gate_data, gate_figure, save_with_data
from fedlas.report.tables import Cell, Column, Row, Table
from fedlas.training.protocols import compared_losses, list_recipes, recipe_for
from fedlas.training.recipe import Recipe

PAPER_DATA = "cifar10"


@dataclass(frozen=True)
class EpochStatistic:
    """A column of the table: one statistic in the first or the last epoch.

    Args:
        field: name of the statistic in the log.
        heading: heading of the column.
        last: whether to show the last epoch; otherwise, the first epoch that has the statistic.
        percent: whether it is shown times 100.
    """

    field: str
    heading: str
    last: bool = True
    percent: bool = True


STATISTICS = (
    EpochStatistic("positive", "psi = +1 %, first epoch", last=False),
    EpochStatistic("positive", "psi = +1 %, last epoch"),
    EpochStatistic("flip_rate", "flip rate %, second epoch", last=False),
    EpochStatistic("flip_rate", "flip rate %, last epoch"),
    EpochStatistic("alpha_ratio", "alpha_i / alpha, last epoch", percent=False),
    EpochStatistic("against_gamma", "psi = -sign(gamma) %, last epoch"),
)


class GateStability(AbstractExperiment):
    """Proportions of the two modes and flip rate by epoch, of both FeDLaS losses."""

    name = "gate_stability"

    def plan(self, choice: Choice, ledger: Ledger) -> list[PlannedRun]:
        """Return the runs of the main table that have a gate."""
        del ledger
        return [
            PlannedRun(recipe, choice.protocol)
            for benchmark in _benchmarks(choice)
            for loss in _losses(choice)
            for recipe in _recipes(choice, benchmark, loss)
        ]

    def tables(self, ledger: Ledger, choice: Choice) -> list[Table]:
        """Return a table of the first and the last epoch."""
        benchmarks, losses = _benchmarks(choice), _losses(choice)
        columns = tuple(
            Column(statistic.heading, benchmark.heading, percent=statistic.percent, ranked=False)
            for benchmark in benchmarks
            for statistic in STATISTICS
        )
        rows = tuple(
            Row(
                loss,
                paper,
                tuple(
                    _cell(ledger, choice, benchmark, loss, statistic)
                    for benchmark in benchmarks
                    for statistic in STATISTICS
                ),
            )
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
        for benchmark in _benchmarks(choice):
            lines_of_loss = {
                paper: _lines(drawing.ledger, choice, benchmark, loss) for loss, paper in _losses(choice).items()
            }
            finished = [line for lines in lines_of_loss.values() for line in lines]
            if not finished:
                continue
            recipe = finished[0].recipe
            milestones = recipe.milestones if recipe.schedule == "multi_step" else ()
            curves = {
                f"{name} ({len(lines)} seed{'s' if len(lines) > 1 else ''})": [line.curve for line in lines]
                for name, lines in lines_of_loss.items()
                if lines
            }
            title = f"{benchmark.heading}, {choice.protocol} protocol{' (changed)' if choice.changes else ''}"
            data = gate_data(curves, title, milestones)
            name = f"{self.name}-{choice.protocol}-{recipe.data}-{recipe.model}"
            files += save_with_data(gate_figure(data), data, drawing.folder, name)
        return files


def _losses(choice: Choice) -> dict[str, str]:
    """Return the requested losses with a gate, with the paper's names."""
    gated = {name: paper for name, paper in compared_losses().items() if name.startswith("fedlas_")}
    return {name: gated[name] for name in choice.select(gated, choice.losses, "loss")}


def _benchmarks(choice: Choice) -> list[Benchmark]:
    """Return the requested data sets and models; by default CIFAR-10 if the protocol has it."""
    known = list(dict.fromkeys(r.data for protocol, r in list_recipes(["ce"]) if protocol == choice.protocol))
    default = [PAPER_DATA] if PAPER_DATA in known else known[:1]
    data_sets = choice.select(known, default if choice.data is None else choice.data, "data set")
    return [
        Benchmark(data, model)
        for data in data_sets
        for model in choice.models or (recipe_for(data, protocol=choice.protocol).model,)
    ]


def _recipes(choice: Choice, benchmark: Benchmark, loss: str) -> list[Recipe]:
    recipes = [recipe_for(*benchmark, loss, protocol=choice.protocol, seed=seed) for seed in choice.seeds]
    return [recipe.with_settings(choice.changes) for recipe in recipes]


def _lines(ledger: Ledger, choice: Choice, benchmark: Benchmark, loss: str) -> list[Line]:
    lines = [ledger.find(recipe) for recipe in _recipes(choice, benchmark, loss)]
    return [line for line in lines if line is not None]


def _cell(ledger: Ledger, choice: Choice, benchmark: Benchmark, loss: str, statistic: EpochStatistic) -> Cell:
    all_epochs = [
        epoch_statistics(loss, [line.curve], statistic.field) for line in _lines(ledger, choice, benchmark, loss)
    ]
    values = tuple(epochs.mean[-1 if statistic.last else 0] for epochs in all_epochs if epochs.mean)
    return Cell(values, planned=len(choice.seeds))
