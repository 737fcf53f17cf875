"""`closed_loop` against cross-entropy, temperature scaling and PS-KD, by the design in docs/closed_loop_design.md.

Six configurations of each method are compared on V2, without test predictions; the chosen ones are trained with the
seeds of the table. Data and methods can be selected; the protocol is always "standard".
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from torch import Tensor

from fedlas.experiments.base import AbstractExperiment, Choice, Wanted
from fedlas.experiments.grid import Measured
from fedlas.experiments.kept import kept_of
from fedlas.experiments.ledger import TEMPERATURE, V2, Ledger, Line
from fedlas.experiments.paper import data_name
from fedlas.experiments.versus import METRICS as COMPARED
from fedlas.metrics.comparison import of_each_sample
from fedlas.metrics.seeds import SeedComparison, ece_values, holm, over_seeds
from fedlas.report.tables import Cell, Column, Row, Table
from fedlas.train import recipe_for
from fedlas.train.recipe import Recipe

PROTOCOL = "standard"
SEARCH_SEED = 11
POSTHOC = (None, TEMPERATURE)
_DESIGN = json.loads(resources.files("fedlas.experiments").joinpath("closed_loop.json").read_text(encoding="utf-8"))
METHODS: Mapping[str, str] = _DESIGN["methods"]
OOD: Mapping[str, list[str]] = _DESIGN["ood"]
# Of each method, fields of the recipe that differ from the protocol, in the order of the design.
CONFIGURATIONS: Mapping[str, Sequence[Mapping[str, Any]]] = _DESIGN["configurations"]


@dataclass(frozen=True)
class Candidate:
    """A configuration in the search.

    Args:
        method: the loss.
        number: of the configuration, from 1.
    """

    method: str
    number: int

    @property
    def row(self) -> str:
        """Its row in the table of the search."""
        return f"{self.method} {self.number}"

    @property
    def about(self) -> str:
        """Its settings in a few words."""
        changes = CONFIGURATIONS[self.method][self.number - 1]
        return ", ".join(f"{name} {value}" for name, value in changes.get("loss_options", changes).items())


class ClosedLoopEvaluation(AbstractExperiment):
    """`closed_loop`, CE and PS-KD with equal search, raw and after temperature scaling; standard protocol."""

    name = "closed_loop"

    def plan(self, choice: Choice, ledger: Ledger) -> list[Wanted]:
        """List the runs of the search and, for each method whose search is complete, those of the primary table."""
        found = []
        for data in _data(choice):
            for candidate in _candidates(choice):
                recipe = search_recipe(data, candidate, choice)
                found.append(Wanted(recipe, PROTOCOL, POSTHOC, V2, (candidate.row,)))
        for data in _data(choice):
            for method in _methods(choice):
                for posthoc in POSTHOC:
                    chosen = selected(data, method, posthoc, choice, ledger)
                    if chosen is None:
                        continue
                    for seed in choice.seeds:
                        recipe = primary_recipe(data, chosen, seed, choice)
                        found.append(Wanted(recipe, PROTOCOL, POSTHOC, rows=(row_name(method, posthoc),)))
        return found

    def tables(self, ledger: Ledger, choice: Choice) -> list[Table]:
        """Make the table of the search, the primary table and, when all its runs are there, the comparisons."""
        return [_search_table(ledger, choice), _primary_table(ledger, choice), *_comparison_tables(ledger, choice)]


def search_recipe(data: str, candidate: Candidate, choice: Choice) -> Recipe:
    """Make the recipe of a configuration in the search, which makes no test predictions."""
    return _recipe(data, candidate, SEARCH_SEED, choice).replace(splits=("val",))


def primary_recipe(data: str, candidate: Candidate, seed: int, choice: Choice) -> Recipe:
    """Make the recipe of a run of the primary table."""
    return _recipe(data, candidate, seed, choice).replace(ood=tuple(OOD.get(data, ())))


def selected(data: str, method: str, posthoc: str | None, choice: Choice, ledger: Ledger) -> Candidate | None:
    """Return the configuration with the lowest NLL on V2; None as long as the search is not complete."""
    candidates = [one for one in _candidates(choice) if one.method == method]
    lines = [ledger.find(search_recipe(data, one, choice), posthoc, V2) for one in candidates]
    found = [line.metrics["nll"][0] for line in lines if line is not None]
    return candidates[found.index(min(found))] if len(found) == len(candidates) else None


def row_name(method: str, posthoc: str | None) -> str:
    """Return the row of a method in the primary table."""
    return method if posthoc is None else f"{method}+{posthoc}"


def _recipe(data: str, candidate: Candidate, seed: int, choice: Choice) -> Recipe:
    changes = CONFIGURATIONS[candidate.method][candidate.number - 1]
    model = choice.models[0] if choice.models else None
    made = recipe_for(data, model, candidate.method, protocol=PROTOCOL, seed=seed, **changes)
    return made.with_settings(choice.changes)


def _data(choice: Choice) -> tuple[str, ...]:
    return choice.data or ("cifar100", "cifar10")


def _methods(choice: Choice) -> list[str]:
    return choice.of(METHODS, choice.losses, "method")


def _candidates(choice: Choice) -> list[Candidate]:
    return [Candidate(method, n + 1) for method in _methods(choice) for n in range(len(CONFIGURATIONS[method]))]


def _search_table(ledger: Ledger, choice: Choice) -> Table:
    data_sets = _data(choice)
    headings = {None: "NLL", TEMPERATURE: "NLL after TS"}
    columns = tuple(
        Column(heading, data_name(data), percent=False, digits=4, ranked=False)
        for data in data_sets
        for heading in headings.values()
    )
    rows = tuple(
        Row(
            one.row, one.about, tuple(_search_cell(ledger, choice, data, one, p) for data in data_sets for p in POSTHOC)
        )
        for one in _candidates(choice)
    )
    notes = [
        f"V2, seed {SEARCH_SEED}. NLL after TS: the temperature is fitted on the other half of V2.",
        *choice.changed,
    ]
    for data in data_sets:
        chosen = {
            row_name(method, posthoc): selected(data, method, posthoc, choice, ledger)
            for method in _methods(choice)
            for posthoc in POSTHOC
        }
        known = ", ".join(f"{row}: {one.number}" for row, one in chosen.items() if one is not None)
        notes += [f"Selected on {data_name(data)}: {known}."] if known else []
    return Table("closed_loop-search", "Search of hyperparameters", columns, rows, tuple(notes))


def _search_cell(ledger: Ledger, choice: Choice, data: str, candidate: Candidate, posthoc: str | None) -> Cell:
    line = ledger.find(search_recipe(data, candidate, choice), posthoc, V2)
    return Cell(() if line is None else (line.metrics["nll"][0],), planned=1)


def _measured(data: str) -> tuple[Measured, ...]:
    return (
        Measured("accuracy", "accuracy %", higher_is_better=True),
        Measured("ece", "ECE %"),
        Measured("aece", "AECE %"),
        Measured("classwise_ece", "class-wise ECE %"),
        Measured("nll", "NLL"),
        Measured("brier", "Brier"),
        Measured("aurc", "AURC x 1000"),
        *(Measured("auroc", f"AUROC {data_name(ood)} %", higher_is_better=True, ood=ood) for ood in OOD.get(data, ())),
    )


def _primary_table(ledger: Ledger, choice: Choice) -> Table:
    places = [(data, one) for data in _data(choice) for one in _measured(data)]
    shown = {"NLL": (False, 4), "Brier": (False, 4), "AURC x 1000": (False, 2)}
    columns = tuple(
        Column(
            one.heading,
            data_name(data),
            one.higher_is_better,
            percent=shown.get(one.heading, (True, 2))[0],
            digits=shown.get(one.heading, (True, 2))[1],
        )
        for data, one in places
    )
    rows = []
    for method in _methods(choice):
        for posthoc in POSTHOC:
            lines = {data: _lines(ledger, choice, data, method, posthoc) for data in _data(choice)}
            cells = tuple(_cell(lines[data], one, choice) for data, one in places)
            rows.append(Row(row_name(method, posthoc), _label(method, posthoc), cells))
    notes = ("Weights of the last epoch; the temperature is fitted on V2. Mean and standard deviation over seeds.",)
    return Table("closed_loop-primary", "Closed loop, CE and PS-KD", columns, tuple(rows), notes + choice.changed)


def _lines(ledger: Ledger, choice: Choice, data: str, method: str, posthoc: str | None) -> list[Line]:
    chosen = selected(data, method, posthoc, choice, ledger)
    if chosen is None:
        return []
    found = [ledger.find(primary_recipe(data, chosen, seed, choice), posthoc) for seed in choice.seeds]
    return [line for line in found if line is not None]


def _cell(lines: list[Line], one: Measured, choice: Choice) -> Cell:
    scale = 1000 if one.metric == "aurc" else 1
    found = [measure for line in lines if (measure := one.of(line)) is not None]
    return Cell(tuple(scale * value for value, _, _ in found), planned=len(choice.seeds))


OURS = "closed_loop"
FEWEST_SEEDS = 5  # of the comparisons, by the design
OTHERS = (("ce", TEMPERATURE), ("pskd", None), ("pskd", TEMPERATURE))
TESTED = {"nll": "NLL", "aurc": "AURC x 1000"}
MARGINS = {"accuracy": ("accuracy", -0.005), "ece": ("ECE", 0.005), "brier": ("Brier", 0.005)}


def _comparison_tables(ledger: Ledger, choice: Choice) -> list[Table]:
    """Make the tables of the tests and of the margins; none until every run of both sides is in the ledger."""
    data_sets, seeds = _data(choice), len(choice.seeds)
    if seeds < FEWEST_SEEDS or set(OOD) - set(data_sets) or set(_methods(choice)) != set(METHODS):
        return []
    lines = {
        (data, method, posthoc): _lines(ledger, choice, data, method, posthoc)
        for data in data_sets
        for method, posthoc in ((OURS, None), *OTHERS)
    }
    if any(len(found) < seeds for found in lines.values()):
        return []
    tests = {
        (data, other, metric): _compared(lines[data, OURS, None], lines[data, *other], metric, ledger)
        for data in data_sets
        for other in OTHERS
        for metric in TESTED
    }
    adjusted = dict(zip(tests, holm([one.p_value for one in tests.values()]), strict=True))
    columns = [_plain_column(word) for word in ("difference", "low", "high", "p", "p (Holm)")]
    rows = []
    for (data, other, metric), one in tests.items():
        scale, ends = 1000 if metric == "aurc" else 1, one.interval()
        numbers = (scale * one.difference, scale * ends.low, scale * ends.high, one.p_value)
        about = f"{data_name(data)}: closed loop - {_label(*other)}, {TESTED[metric]}"
        cells = tuple(Cell((value,)) for value in (*numbers, adjusted[data, other, metric]))
        rows.append(Row(f"{data}/{row_name(*other)}/{metric}", about, cells))
    note = "Mean difference over seeds, 95 % interval over seeds and test samples (t), Holm correction over all rows."
    primary = Table("closed_loop-comparison", "Primary comparison", tuple(columns), tuple(rows), (note,))
    return [primary, _margin_table(ledger, lines, data_sets)]


def _margin_table(
    ledger: Ledger, lines: Mapping[tuple[str, str, str | None], list[Line]], data_sets: Sequence[str]
) -> Table:
    """Make the table of one-sided bounds against CE + TS beside their margins."""
    rows = []
    for data in data_sets:
        for metric, (name, margin) in MARGINS.items():
            one = _compared(lines[data, OURS, None], lines[data, "ce", TEMPERATURE], metric, ledger)
            ends = one.interval(0.9)
            bound = ends.low if margin < 0 else ends.high
            inside = float(bound > margin if margin < 0 else bound < margin)
            cells = tuple(Cell((value,)) for value in (one.difference, bound, margin, inside))
            rows.append(Row(f"{data}/{metric}", f"{data_name(data)}: {name}", cells))
    columns = tuple(_plain_column(word) for word in ("difference", "bound", "margin", "inside"))
    note = "closed loop - (CE + TS); one-sided 95 % bound over seeds and test samples. inside: 1 if within the margin."
    return Table("closed_loop-margins", "Margins against CE + TS", columns, tuple(rows), (note,))


def _compared(ours: Sequence[Line], theirs: Sequence[Line], metric: str, ledger: Ledger) -> SeedComparison:
    sides = [[_values(line, metric, ledger) for line in lines] for lines in (ours, theirs)]
    return over_seeds(*sides)


def _values(line: Line, metric: str, ledger: Ledger) -> Tensor:
    """Return one value per test sample, whose mean is the metric."""
    kept = kept_of(line, ledger)
    stored = kept.of_each_sample()
    if metric in stored:
        return stored[metric].values
    top = kept.tops()
    return ece_values(top) if metric == "ece" else of_each_sample(COMPARED[metric], top).values


def _plain_column(name: str) -> Column:
    return Column(name, percent=False, digits=4, ranked=False)


def _label(method: str, posthoc: str | None) -> str:
    return METHODS[method] if posthoc is None else f"{METHODS[method]} + TS"
