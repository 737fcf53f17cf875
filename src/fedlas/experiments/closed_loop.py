"""Evaluation of `closed_loop` against cross-entropy, temperature scaling and PS-KD (docs/closed_loop_design.md).

Six configurations of each method are compared on V2, without test predictions; the selected ones are trained with all
seeds. Controls of the label budget, ablations, and other losses with published settings follow. Fashion-MNIST uses the
configurations of CIFAR-100. Data sets and methods can be selected; the protocol is always "standard".
"""

from itertools import product
from pathlib import Path

from fedlas.experiments import closed_loop_design as design
from fedlas.experiments.base import AbstractExperiment, Choice, Drawing, PlannedRun
from fedlas.experiments.closed_loop_tables import (
    ablation_table,
    comparison_tables,
    control_tables,
    primary_lines,
    primary_table,
    published_table,
    search_table,
    selection_table,
)
from fedlas.experiments.ledger import V2, Ledger
from fedlas.experiments.paper import data_name
from fedlas.report.figures import feedback_data, feedback_figure, save_with_data
from fedlas.report.tables import Table


class ClosedLoopEvaluation(AbstractExperiment):
    """`closed_loop`, CE and PS-KD with equal search, raw and after temperature scaling; standard protocol."""

    name = "closed_loop"
    seeds = (1, 2, 3, 4, 5)

    def plan(self, choice: Choice, ledger: Ledger) -> list[PlannedRun]:
        """Return the runs of the search and, for each method whose search is complete, all other runs."""
        runs = [
            PlannedRun(
                design.search_recipe(data, candidate, choice), design.PROTOCOL, design.POSTHOC, V2, (candidate.row,)
            )
            for data in design.data_sets(choice)
            for candidate in design.candidates(choice)
            if data not in design.CONFIRMATION
        ]
        recipes = [
            (design.row_name(*row), design.primary_recipe(data, row, seed, choice, ledger))
            for data in design.data_sets(choice)
            for row in product(design.methods(choice), design.POSTHOC)
            for seed in choice.seeds
        ]
        recipes += [
            (row, design.control_recipe(data, row, seed, choice, ledger))
            for data in design.control_data_sets(choice)
            for row in design.control_rows(choice)
            for seed in design.CONTROLS["seeds"]
        ]
        recipes += [
            (row, design.ablation_recipe(row, seed, choice, ledger))
            for row in design.ablation_rows(choice)
            for seed in design.ABLATIONS["seeds"]
        ]
        recipes += [
            (row, design.published_recipe(data, row, seed, choice))
            for data in design.published_data_sets(choice)
            for row in design.published_rows(choice)
            for seed in design.published_seeds(choice)
        ]
        return runs + [
            PlannedRun(recipe, design.PROTOCOL, design.POSTHOC, rows=(row,))
            for row, recipe in recipes
            if recipe is not None
        ]

    def tables(self, ledger: Ledger, choice: Choice) -> list[Table]:
        """Return all tables; those that follow the primary table only if their runs are finished."""
        searched = bool(design.methods(choice))
        return [
            *([search_table(ledger, choice), primary_table(ledger, choice)] if searched else []),
            *comparison_tables(ledger, choice),
            *selection_table(ledger, choice),
            *control_tables(ledger, choice),
            *ablation_table(ledger, choice),
            *published_table(ledger, choice),
        ]

    def draw(self, drawing: Drawing) -> list[Path]:
        """Draw strengths and calibration gaps by epoch, of the first run on each data set."""
        choice, row = drawing.choice, (design.OURS, None)
        lines = {data: primary_lines(drawing.ledger, choice, data, row) for data in design.data_sets(choice)}
        candidates = [feedback_data(finished[0].curve, data_name(data)) for data, finished in lines.items() if finished]
        feedback = [data for data in candidates if data is not None]
        if not feedback:
            return []
        return save_with_data(feedback_figure(feedback), feedback, drawing.folder, "closed_loop_feedback")
