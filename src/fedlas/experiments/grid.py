"""Base class of experiments whose table has methods in rows, and data sets and models in columns.

A subclass names the methods, data sets, models and metrics. The base class plans the runs and fills the cells from
ledger lines, with one value per seed and the paper's number.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import ClassVar, NamedTuple

from fedlas.errors import UserError
from fedlas.experiments import paper
from fedlas.experiments.base import AbstractExperiment, Choice, PlannedRun
from fedlas.experiments.ledger import TEST, Ledger, Line, Measure
from fedlas.formatting import PERCENT_DECIMALS
from fedlas.report.tables import Cell, Column, Row, Table, mean_rank_columns
from fedlas.training import official_preprocessing_differs, paper_models, protocol_named, recipe_for
from fedlas.training.recipe import Recipe

PAPER_PROTOCOLS = ("paper", "official")


class Benchmark(NamedTuple):
    """A data set and a model."""

    data: str
    model: str

    @property
    def heading(self) -> str:
        """The heading of its columns."""
        return f"{paper.data_name(self.data)}, {self.model}"


@dataclass(frozen=True)
class Measured:
    """A metric of a table.

    Args:
        metric: its name in ledger lines and in the paper's numbers.
        heading: heading of its column.
        higher_is_better: whether larger is better.
        ood: the OOD data set of an AUROC.
        ood_in_paper: name of the OOD data set in the paper's numbers.
        score: the OOD score of an AUROC.
        in_paper: whether the paper has this metric.
        percent: whether values are multiplied by 100.
        digits: number of decimals.
    """

    metric: str
    heading: str
    higher_is_better: bool = False
    ood: str | None = None
    ood_in_paper: str | None = None
    score: str = "entropy"
    in_paper: bool = True
    percent: bool = True
    digits: int = PERCENT_DECIMALS

    def column(self, group: str, *, compared: bool = True) -> Column:
        """Return the column of the metric, below the heading of its group."""
        return Column(self.heading, group, self.higher_is_better, self.percent, self.digits, compared=compared)

    def of(self, line: Line) -> Measure | None:
        """Return the value and interval in a ledger line."""
        measures = line.metrics if self.ood is None else line.ood.get(self.ood, {})
        return measures.get(self.metric if self.ood is None else self.score)


def evaluated_split(recipe: Recipe, choice: Choice) -> str:
    """Return the chosen split, or "test" if the official code preprocesses test images in the same way."""
    return choice.split if official_preprocessing_differs(recipe.data, recipe.data_options) else TEST


class AbstractGrid(AbstractExperiment):
    """A table with methods in rows, and data sets, models and metrics in columns."""

    title: ClassVar[str]
    compared: ClassVar[bool] = True  # whether the paper has numbers to compare with
    one_network: ClassVar[bool] = False  # whether to use only the first model of each data set
    ranked: ClassVar[tuple[str, ...]] = ()  # headings of the columns for which mean ranks are added

    @property
    def methods(self) -> dict[str, str]:
        """Rows in the paper's order, with the paper's names."""
        return paper.methods(self.name)

    def data_sets(self) -> Sequence[str]:
        """List the data sets, in the paper's order."""
        return paper.data_sets(self.name)

    def measured(self, data: str, choice: Choice) -> Sequence[Measured]:
        """Return the metrics of a data set; by default, the metrics of the paper's main table."""
        del data, choice
        return (
            Measured("accuracy", "accuracy %", higher_is_better=True),
            Measured("ece", "ECE %"),
            Measured("aece", "AECE %"),
        )

    def ood_data(self, data: str, choice: Choice) -> tuple[str, ...]:
        """Return the OOD data sets of a data set."""
        return tuple(sorted({measured.ood for measured in self.measured(data, choice) if measured.ood is not None}))

    def models(self, data: str, protocol: str) -> Sequence[str]:
        """Return the models of a data set under a protocol."""
        models = protocol_named(protocol).models(data)
        return models[:1] if self.one_network else models

    def benchmarks(self, choice: Choice) -> list[Benchmark]:
        """Return the chosen data sets and models."""
        protocol = protocol_named(choice.protocol)
        # By default, use the data sets of the paper for which the protocol has a network.
        data_sets = choice.data or [data for data in self.data_sets() if protocol.models(data)]
        benchmarks = []
        for data in data_sets:
            # If the protocol has no network for the data set, creating the recipe raises the error.
            models = choice.models or self.models(data, choice.protocol)
            models = models or (recipe_for(data, protocol=choice.protocol).model,)
            benchmarks += [Benchmark(data, model) for model in models]
        if not benchmarks:
            raise UserError(f"the protocol {protocol.name!r} has no network for the data of this experiment")
        return benchmarks

    def rows(self, choice: Choice) -> list[str]:
        """Return the chosen rows."""
        return choice.select(self.methods, choice.losses, "row")

    def recipe(self, benchmark: Benchmark, row: str, seed: int, choice: Choice, ledger: Ledger) -> Recipe | None:
        """Return the recipe of one run; None if it depends on runs that are not in the ledger."""
        del ledger
        recipe = recipe_for(benchmark.data, benchmark.model, loss_of(row), protocol=choice.protocol, seed=seed)
        recipe = recipe.with_settings(choice.changes)
        splits = tuple(dict.fromkeys((*recipe.splits, evaluated_split(recipe, choice))))
        return recipe.replace(ood=self.ood_data(benchmark.data, choice), splits=splits)

    def plan(self, choice: Choice, ledger: Ledger) -> list[PlannedRun]:
        return [
            PlannedRun(recipe, choice.protocol, (calibrator_of(row),), evaluated_split(recipe, choice), (row,))
            for benchmark in self.benchmarks(choice)
            for row in self.rows(choice)
            for seed in choice.seeds
            if (recipe := self.recipe(benchmark, row, seed, choice, ledger)) is not None
        ]

    def tables(self, ledger: Ledger, choice: Choice) -> list[Table]:
        benchmarks, rows = self.benchmarks(choice), self.rows(choice)
        cells = [
            (benchmark, measured) for benchmark in benchmarks for measured in self.measured(benchmark.data, choice)
        ]
        compared = choice.protocol in PAPER_PROTOCOLS and not choice.changes
        columns = [measured.column(benchmark.heading, compared=compared) for benchmark, measured in cells]
        filled = [
            Row(
                row,
                self.methods[row],
                tuple(cell for benchmark in benchmarks for cell in self._cells(ledger, choice, benchmark, row)),
            )
            for row in rows
        ]
        others = tuple(
            Row(row, about, tuple(self._cell((), choice, benchmark, row, measured) for benchmark, measured in cells))
            for row, about in self.methods.items()
            if row not in rows
        )
        name, notes = f"{self.name}-{choice.protocol}", self.notes(choice)
        table = Table(name, self.title, tuple(columns), tuple(filled), notes, others)
        if paper.mean_accuracies(self.name) and set(benchmarks) >= set(paper.benchmarks(self.name)):
            table = self._with_mean_accuracy(table, ledger, choice)
        return [mean_rank_columns(table, self.ranked) if len(rows) > 1 and self.ranked else table]

    def _with_mean_accuracy(self, table: Table, ledger: Ledger, choice: Choice) -> Table:
        """Add a column of the mean accuracy over all data sets and models of the paper."""
        benchmarks = [Benchmark(*benchmark) for benchmark in paper.benchmarks(self.name)]
        means = paper.mean_accuracies(self.name)

        def extended(row: Row, *, fill: bool) -> Row:
            values = [self._mean_accuracy(ledger, choice, benchmarks, row.name, seed) for seed in choice.seeds if fill]
            known = tuple(value for value in values if value is not None)
            cell = Cell(known, (), means.get(row.name), planned=len(choice.seeds))
            return replace(row, cells=(*row.cells, cell))

        group = f"All {len(benchmarks)} pairs of data and network"
        column = Column("mean accuracy %", group, higher_is_better=True, compared=table.columns[0].compared)
        note = (
            f"Mean accuracy over the paper's {len(benchmarks)} pairs of data set and network, computed per seed; empty "
            "until one seed has been run on all pairs."
        )
        single = [
            paper.value(self.name, row, *benchmark, metric="accuracy") for row in means for benchmark in benchmarks
        ]
        if not any(single):
            note += " The paper does not report the individual accuracies, so its means cannot be checked."
        return replace(
            table,
            columns=(*table.columns, column),
            rows=tuple(extended(row, fill=True) for row in table.rows),
            left_out=tuple(extended(row, fill=False) for row in table.left_out),
            notes=(*table.notes, note),
        )

    def _mean_accuracy(
        self, ledger: Ledger, choice: Choice, benchmarks: Sequence[Benchmark], row: str, seed: int
    ) -> float | None:
        """Return the mean accuracy of one seed; None if a run is missing."""
        lines = [self._line(ledger, choice, benchmark, row, seed) for benchmark in benchmarks]
        accuracies = [line.metrics["accuracy"][0] for line in lines if line is not None]
        return fmean(accuracies) if len(accuracies) == len(benchmarks) else None

    def notes(self, choice: Choice) -> tuple[str, ...]:
        """Return the notes below a table."""
        protocol = protocol_named(choice.protocol)
        test = (
            ()
            if choice.split == TEST
            else ("Test images are preprocessed as in the official code, where that differs.",)
        )
        paper_note = "The paper's numbers are those {}: for orientation, not for comparison."
        if choice.protocol in PAPER_PROTOCOLS:
            beside = (paper_note.format("without the changes"),) if choice.changes and self.compared else ()
            return (f"Protocol: {choice.summary}.", *choice.changed, *beside, *test)
        short = f"The {protocol.name} protocol ({choice.summary}): a short version of the comparison."
        long = f"{short} {paper_note.format('of its network and its many epochs')}"
        return (*test, long if self.compared else short, *choice.changed)

    def _line(self, ledger: Ledger, choice: Choice, benchmark: Benchmark, row: str, seed: int) -> Line | None:
        """Return the ledger line of one run, if any."""
        recipe = self.recipe(benchmark, row, seed, choice, ledger)
        return None if recipe is None else ledger.find(recipe, calibrator_of(row), evaluated_split(recipe, choice))

    def _cells(self, ledger: Ledger, choice: Choice, benchmark: Benchmark, row: str) -> list[Cell]:
        """Return the cells of a row for one data set and model, one per metric."""
        lines = self.lines(ledger, choice, benchmark, row)
        return [
            self._cell(lines, choice, benchmark, row, measured) for measured in self.measured(benchmark.data, choice)
        ]

    def lines(self, ledger: Ledger, choice: Choice, benchmark: Benchmark, row: str) -> list[Line]:
        """Return the ledger lines of a row for one data set and model, one per seed."""
        lines = [self._line(ledger, choice, benchmark, row, seed) for seed in choice.seeds]
        return [line for line in lines if line is not None]

    def _cell(self, lines: Sequence[Line], choice: Choice, benchmark: Benchmark, row: str, measured: Measured) -> Cell:
        measures = [measure for line in lines if (measure := measured.of(line)) is not None]
        models = (benchmark.model,) if choice.protocol in PAPER_PROTOCOLS else paper_models(benchmark.data)[:1]
        paper_values = [
            paper.value(self.name, row, benchmark.data, model, metric=measured.metric, ood=measured.ood_in_paper)
            for model in models
        ]
        return Cell(
            values=tuple(value for value, _, _ in measures),
            intervals=tuple((low, high) for _, low, high in measures if low is not None and high is not None),
            paper=paper_values[0] if paper_values and measured.in_paper else None,
            planned=len(choice.seeds),
        )


def loss_of(row: str) -> str:
    """Return the loss of a row such as "ce+temperature"."""
    return row.partition("+")[0]


def calibrator_of(row: str) -> str | None:
    """Return the calibrator of a row such as "ce+temperature"; None for a row without."""
    return row.partition("+")[2] or None
