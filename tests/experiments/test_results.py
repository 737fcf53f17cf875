"""The stored results of the repository can be recomputed; tests/test_docs.py compares the page."""

import re
from pathlib import Path

import pytest
from reproduction_page import reproduction_page, results_tables
from small_ledgers import minimal_ledger, minimal_line

from fedlas.experiments.ledger import Ledger
from fedlas.experiments.stored_predictions import problems
from fedlas.training import recipe_for

ROOT = Path(__file__).parents[2]


def test_ledger_metrics_are_reproduced_from_stored_predictions():
    assert list(problems(Ledger(ROOT / "results"))) == []


@pytest.mark.campaign
@pytest.mark.parametrize("folder", ["results", "results/best_epoch"])
def test_ledger_metrics_and_intervals_are_reproduced_from_stored_predictions(folder):
    ledger = Ledger(ROOT / folder)
    assert ledger.lines
    assert list(problems(ledger, intervals=True)) == []


def test_reproduction_page_lists_finished_and_missing_runs(ledger):
    page = reproduction_page(ledger)
    assert re.search(r"\b4 train", page)
    table, _, missing = page.rpartition("\n\n")
    assert missing.startswith("Not run yet: ")
    assert "`sota`" in missing
    assert "`smoothing_curve`" not in missing, "it needs no runs"
    assert not re.search(r"^\| `(sota|smoothing_curve)`", table, re.MULTILINE)


def test_results_tables_contain_only_finished_runs(ledger, choice, tmp_path):
    table, epochs = results_tables(ledger, choice)
    assert table.title == "digits, small_cnn, small protocol"
    assert epochs.title == f"{table.title}: last epoch and best epoch"
    assert [row.name for row in table.rows] == list(choice.losses)
    assert [column.name for column in table.columns] == ["accuracy %", "ECE %", "AECE %"]
    assert all(len(cell.values) == 2 for row in table.rows for cell in row.cells)
    assert table.notes == choice.changed
    assert results_tables(ledger) == [], "runs with other settings are no results of the protocol"
    assert results_tables(Ledger(tmp_path)) == []


def test_experiment_with_its_own_protocol_is_on_the_page_once(tmp_path):
    """The indicator has its own row on the page, and no results table."""
    recipes = [recipe_for("fashion_mnist", "small_cnn", "ce", protocol="small"), recipe_for("cifar10", protocol="fast")]
    lines = [minimal_line(recipe, protocol) for recipe, protocol in zip(recipes, ("small", "fast"), strict=True)]
    results_ledger = minimal_ledger(tmp_path, lines)
    page = reproduction_page(results_ledger)
    (row,) = re.findall(r"^\| `indicator`.*", page, re.MULTILINE)
    assert row.endswith("| small | 1 | 1 | 0 |  |")
    assert "`indicator`" not in page.replace(row, "")
    assert [table.title for table in results_tables(results_ledger)] == ["CIFAR-10, resnet18_cifar, fast protocol"]


def test_runs_of_the_closed_loop_protocol_are_in_no_table_of_the_paper(tmp_path):
    """The main table with the standard protocol has the same recipes, but only the pages of `closed_loop` have them."""
    results_ledger = minimal_ledger(
        tmp_path, [minimal_line(recipe_for("cifar100", None, "ls", protocol="standard"), "standard")]
    )
    assert results_tables(results_ledger) == []
    assert "`sota`" not in reproduction_page(results_ledger).partition("Not run yet")[0]


def test_empty_ledger_gives_a_page_without_tables(tmp_path):
    page = reproduction_page(Ledger(tmp_path))
    assert "empty" in page
    assert "\n|" not in page
