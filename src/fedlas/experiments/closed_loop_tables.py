"""Tables of the evaluation of `closed_loop`: search, primary table, tests, controls, ablations, other losses."""

from collections.abc import Mapping, Sequence
from itertools import product

from torch import Tensor

from fedlas.comparison import paired_metrics
from fedlas.experiments import closed_loop_design as design
from fedlas.experiments.base import Choice
from fedlas.experiments.closed_loop_design import (
    OURS,
    POSTHOC,
    Candidate,
    data_sets,
    methods,
    row_name,
    select_configuration,
)
from fedlas.experiments.epochs import epoch_table
from fedlas.experiments.grid import Measured
from fedlas.experiments.ledger import TEMPERATURE, V2, Ledger, Line, epoch_ledger
from fedlas.experiments.paper import data_name
from fedlas.experiments.stored_predictions import load_stored_predictions
from fedlas.metrics.paired import of_each_sample
from fedlas.metrics.seeds import SeedComparison, ece_values, holm, over_seeds
from fedlas.report.tables import Cell, Column, Row, Table
from fedlas.training.recipe import Recipe

FEWEST_SEEDS = 5  # minimum for comparisons, by the design
OTHERS = (("ce", TEMPERATURE), ("pskd", None), ("pskd", TEMPERATURE))
TESTED = {"nll": "NLL", "aurc": "AURC x 1000"}
METRICS = (
    Measured("accuracy", "accuracy %", higher_is_better=True),
    Measured("ece", "ECE %"),
    Measured("aece", "AECE %"),
    Measured("classwise_ece", "class-wise ECE %"),
    Measured("nll", "NLL", percent=False, digits=4),
    Measured("brier", "Brier", percent=False, digits=4),
    Measured("aurc", "AURC x 1000", percent=False),
)
MARGINS = {"accuracy": ("accuracy", -0.005), "ece": ("ECE", 0.005), "brier": ("Brier", 0.005)}


def search_table(ledger: Ledger, choice: Choice) -> Table:
    """Return the table of the search: NLL on V2 of every configuration, with the selected ones in the notes."""
    searched = [data for data in data_sets(choice) if data not in design.CONFIRMATION]
    columns = tuple(
        Column(heading, data_name(data), percent=False, digits=4, ranked=False)
        for data in searched
        for heading in ("NLL", "NLL after TS")
    )
    rows = tuple(
        Row(
            candidate.row,
            candidate.description,
            tuple(_search_cell(ledger, choice, data, candidate, posthoc) for data in searched for posthoc in POSTHOC),
        )
        for candidate in design.candidates(choice)
    )
    notes = [
        f"V2, seed {design.SEARCH_SEED}. NLL after TS: the temperature is fitted on the other half of V2.",
        *choice.changed,
    ]
    for data in searched:
        chosen = {
            row_name(method, posthoc): select_configuration(data, method, posthoc, choice, ledger)
            for method in methods(choice)
            for posthoc in POSTHOC
        }
        numbers = ", ".join(f"{row}: {candidate.number}" for row, candidate in chosen.items() if candidate is not None)
        notes += [f"Selected on {data_name(data)}: {numbers}."] if numbers else []
    return Table("closed_loop-search", "Search of hyperparameters", columns, rows, tuple(notes))


def _search_cell(ledger: Ledger, choice: Choice, data: str, candidate: Candidate, posthoc: str | None) -> Cell:
    line = ledger.find(design.search_recipe(data, candidate, choice), posthoc, V2)
    return Cell(() if line is None else (line.metrics["nll"][0],), planned=1)


def primary_table(ledger: Ledger, choice: Choice) -> Table:
    """Return the primary table: every metric of every method, before and after temperature scaling."""
    measures = _measures(data_sets(choice))
    rows = []
    for row in product(methods(choice), POSTHOC):
        lines = {data: primary_lines(ledger, choice, data, row) for data in data_sets(choice)}
        rows.append(Row(row_name(*row), _label(*row), _cells(lines, measures, len(choice.seeds))))
    notes = ("Weights of the last epoch; the temperature is fitted on V2. Mean and standard deviation over seeds.",)
    title = "Closed loop, CE and PS-KD"
    return Table("closed_loop-primary", title, _columns(measures), tuple(rows), notes + choice.changed)


def primary_lines(
    ledger: Ledger, choice: Choice, data: str, row: tuple[str, str | None], seeds: Sequence[int] | None = None
) -> list[Line]:
    """Return the ledger lines of a row of the primary table."""
    seeds = choice.seeds if seeds is None else seeds
    return _finished_lines(ledger, [design.primary_recipe(data, row, seed, choice, ledger) for seed in seeds], row[1])


def selection_table(ledger: Ledger, choice: Choice) -> list[Table]:
    """Return the table of results of the last epoch and of the best epoch on V1; no table without the latter."""
    rows = {
        (row_name(method, posthoc), _label(method, posthoc)): {
            data_name(data): primary_lines(ledger, choice, data, (method, posthoc)) for data in data_sets(choice)
        }
        for method, posthoc in product(methods(choice), POSTHOC)
    }
    epochs = {"last": ledger, "best": epoch_ledger(ledger, "best")}
    return epoch_table("closed_loop-selection", rows, epochs, len(choice.seeds), "Best epoch: highest accuracy on V1.")


def comparison_tables(ledger: Ledger, choice: Choice) -> list[Table]:
    """Return the tables of tests and margins of each family of data sets whose runs are all in the ledger."""
    if len(choice.seeds) < FEWEST_SEEDS or set(methods(choice)) != set(design.METHODS):
        return []
    families = [family for family in design.FAMILIES if set(family) <= set(data_sets(choice))]
    return [table for family in families for table in _family_tables(ledger, choice, family)]


def _family_tables(ledger: Ledger, choice: Choice, family: Sequence[str]) -> list[Table]:
    lines = {
        (data, method, posthoc): primary_lines(ledger, choice, data, (method, posthoc))
        for data in family
        for method, posthoc in ((OURS, None), *OTHERS)
    }
    if any(len(finished) < len(choice.seeds) for finished in lines.values()):
        return []
    values = _SampleValues(ledger)
    tests = {
        (data, other, metric): values.compare(lines[data, OURS, None], lines[data, *other], metric)
        for data in family
        for other in OTHERS
        for metric in TESTED
    }
    adjusted = dict(zip(tests, holm([test.p_value for test in tests.values()]), strict=True))
    rows = []
    for (data, other, metric), test in tests.items():
        description = f"{data_name(data)}: closed loop - {_label(*other)}, {TESTED[metric]}"
        cells = (*_difference(test, metric), Cell((test.p_value,)), Cell((adjusted[data, other, metric],)))
        rows.append(Row(f"{data}/{row_name(*other)}/{metric}", description, cells))
    columns = tuple(_plain_column(heading) for heading in ("difference", "low", "high", "p", "p (Holm)"))
    note = "Mean difference over seeds, 95 % interval over seeds and test samples (t), Holm correction over all rows."
    names = ("comparison", "margins") if len(family) > 1 else ("confirmation", "confirmation-margins")
    title = "Primary comparison" if len(family) > 1 else f"Confirmation on {data_name(family[0])}"
    tests_table = Table(f"closed_loop-{names[0]}", title, columns, tuple(rows), (note,), row_heading="comparison")
    return [tests_table, _margin_table(f"closed_loop-{names[1]}", values, lines, family)]


def _margin_table(
    name: str, values: "_SampleValues", lines: Mapping[tuple[str, str, str | None], list[Line]], family: Sequence[str]
) -> Table:
    """Return the table of one-sided bounds of the difference from CE + TS, with their margins."""
    rows = []
    for data in family:
        for metric, (title, margin) in MARGINS.items():
            comparison = values.compare(lines[data, OURS, None], lines[data, "ce", TEMPERATURE], metric)
            ends = comparison.interval(0.9)
            bound = ends.low if margin < 0 else ends.high
            inside = float(bound > margin if margin < 0 else bound < margin)
            cells = tuple(Cell((value,)) for value in (comparison.difference, bound, margin, inside))
            rows.append(Row(f"{data}/{metric}", f"{data_name(data)}: {title}", cells))
    columns = tuple(_plain_column(title) for title in ("difference", "bound", "margin"))
    columns += (Column("inside", percent=False, digits=0, ranked=False),)
    note = "closed loop - (CE + TS); one-sided 95 % bound over seeds and test samples. inside: 1 if within the margin."
    return Table(name, "Margins against CE + TS", columns, tuple(rows), (note,), row_heading="metric")


def control_tables(ledger: Ledger, choice: Choice) -> list[Table]:
    """Return the tables of controls of the label budget, and of their differences from `closed_loop`."""
    seeds, sets = design.CONTROLS["seeds"], design.control_data_sets(choice)
    lines = {
        (row, data): _finished_lines(
            ledger, [design.control_recipe(data, row, seed, choice, ledger) for seed in seeds], TEMPERATURE
        )
        for data in sets
        for row in design.control_rows(choice)
    }
    if not any(lines.values()):
        return []
    measures = _measures(sets, ood=False)
    descriptions = {row: f"{design.CONTROLS['rows'][row]['about']} + TS" for row in design.control_rows(choice)}
    rows = [
        Row(row, description, _cells({data: lines[row, data] for data in sets}, measures, len(seeds)))
        for row, description in descriptions.items()
    ]
    ours = {data: primary_lines(ledger, choice, data, (OURS, None), seeds) for data in sets}
    rows.append(Row(OURS, _label(OURS, None), _cells(ours, measures, len(seeds))))
    note = (
        f"Seeds {', '.join(map(str, seeds))}; configurations of the + TS rows. Mean and standard deviation over seeds."
    )
    tables = [Table("closed_loop-controls", "Controls of the label budget", _columns(measures), tuple(rows), (note,))]
    values = _SampleValues(ledger)
    differences = [
        Row(
            f"{data}/{row}/{metric}",
            f"{data_name(data)}: closed loop - {descriptions[row]}, {TESTED[metric]}",
            _difference(values.compare(ours[data], theirs, metric), metric),
        )
        for (row, data), theirs in lines.items()
        for metric in TESTED
        if len(theirs) == len(ours[data]) == len(seeds)
    ]
    if differences:
        columns = tuple(_plain_column(heading) for heading in ("difference", "low", "high"))
        note = "Mean difference over seeds, 95 % interval over seeds and test samples (t)."
        title = "Closed loop against the controls"
        name = "closed_loop-controls-comparison"
        tables.append(Table(name, title, columns, tuple(differences), (note,), row_heading="comparison"))
    return tables


def ablation_table(ledger: Ledger, choice: Choice) -> list[Table]:
    """Return the table of ablations before temperature scaling; no table without runs."""
    data, seeds = design.ABLATIONS["data"], design.ABLATIONS["seeds"]
    lines = {
        row: _finished_lines(ledger, [design.ablation_recipe(row, seed, choice, ledger) for seed in seeds], None)
        for row in design.ablation_rows(choice)
    }
    if not any(lines.values()):
        return []
    measures = _measures([data], ood=False)
    descriptions = {row: design.ABLATIONS["variants"][row]["about"] for row in lines}
    row_lines = {OURS: primary_lines(ledger, choice, data, (OURS, None), seeds), **lines}
    rows = tuple(
        Row(row, descriptions.get(row, "selected configuration"), _cells({data: finished}, measures, len(seeds)))
        for row, finished in row_lines.items()
    )
    note = f"Seeds {', '.join(map(str, seeds))}, without temperature scaling; one factor at a time."
    return [Table("closed_loop-ablations", "Ablations of the closed loop", _columns(measures), rows, (note,))]


def published_table(ledger: Ledger, choice: Choice) -> list[Table]:
    """Return the table of losses with published settings, beside the searched methods; no table without runs."""
    sets, seeds = design.published_data_sets(choice), design.published_seeds(choice)
    published = {
        (row, posthoc): {
            data: _finished_lines(ledger, [design.published_recipe(data, row, seed, choice) for seed in seeds], posthoc)
            for data in sets
        }
        for row in design.published_rows(choice)
        for posthoc in POSTHOC
    }
    if not any(lines for by_data in published.values() for lines in by_data.values()):
        return []
    searched = {
        row: {data: primary_lines(ledger, choice, data, row, seeds) for data in sets}
        for row in (("ce", TEMPERATURE), ("pskd", None), (OURS, None))
    }
    names, measures = {**design.METHODS, **design.PUBLISHED["rows"]}, _measures(sets, ood=False)
    rows = tuple(
        Row(row_name(*row), _with_calibrator(names[row[0]], row[1]), _cells(by_data, measures, len(seeds)))
        for row, by_data in (published | searched).items()
        if any(by_data.values())
    )
    note = f"Seeds {', '.join(map(str, seeds))}. Mean and standard deviation over seeds."
    title = "Losses with published settings, not searched"
    return [Table("closed_loop-published", title, _columns(measures), rows, (note, *choice.changed))]


def _measures(sets: Sequence[str], *, ood: bool = True) -> list[tuple[str, Measured]]:
    """Return the metrics in the columns of a table, each with its data set."""
    measures = []
    for data in sets:
        measures += [(data, measured) for measured in METRICS]
        for name in design.OOD.get(data, ()) if ood else ():
            measures.append((data, Measured("auroc", f"AUROC {data_name(name)} %", higher_is_better=True, ood=name)))
    return measures


def _columns(measures: Sequence[tuple[str, Measured]]) -> tuple[Column, ...]:
    return tuple(measured.column(data_name(data)) for data, measured in measures)


def _cells(
    lines: Mapping[str, Sequence[Line]], measures: Sequence[tuple[str, Measured]], planned: int
) -> tuple[Cell, ...]:
    """Return the cells of a row, from the lines of each data set."""
    cells = []
    for data, measured in measures:
        scale = 1000 if measured.metric == "aurc" else 1
        values = [measure for line in lines[data] if (measure := measured.of(line)) is not None]
        cells.append(Cell(tuple(scale * value for value, _, _ in values), planned=planned))
    return tuple(cells)


def _finished_lines(ledger: Ledger, recipes: Sequence[Recipe | None], posthoc: str | None) -> list[Line]:
    lines = [ledger.find(recipe, posthoc) for recipe in recipes if recipe is not None]
    return [line for line in lines if line is not None]


def _difference(comparison: SeedComparison, metric: str) -> tuple[Cell, ...]:
    scale, ends = 1000 if metric == "aurc" else 1, comparison.interval()
    return tuple(Cell((scale * value,)) for value in (comparison.difference, ends.low, ends.high))


class _SampleValues:
    """Metrics of each test sample; the predictions of each ledger line are read once.

    Args:
        ledger: ledger with the stored predictions.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._read: dict[str, dict[str, Tensor]] = {}

    def compare(self, ours: Sequence[Line], theirs: Sequence[Line], metric: str) -> SeedComparison:
        """Compare two methods over their seeds."""
        return over_seeds(*([self._of(line)[metric] for line in lines] for lines in (ours, theirs)))

    def _of(self, line: Line) -> dict[str, Tensor]:
        """Return the values of each metric for all test samples; their mean is the metric."""
        if line.id not in self._read:
            predictions = load_stored_predictions(line, self._ledger)
            stored, top = predictions.of_each_sample(), predictions.tops()
            values = {name: metric.values for name, metric in stored.items()} | {"ece": ece_values(top)}
            values |= {
                name: of_each_sample(paired_metrics()[name], top).values
                for name in (*TESTED, *MARGINS)
                if name not in values
            }
            self._read[line.id] = values
        return self._read[line.id]


def _plain_column(name: str) -> Column:
    return Column(name, percent=False, digits=4, ranked=False)


def _label(method: str, posthoc: str | None) -> str:
    return _with_calibrator(design.METHODS[method], posthoc)


def _with_calibrator(name: str, posthoc: str | None) -> str:
    return name if posthoc is None else f"{name} + TS"
