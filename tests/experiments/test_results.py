"""The repository's own results: every number can be computed again; tests/test_docs.py compares the page."""

from pathlib import Path

import pytest

from fedlas.experiments.kept import problems
from fedlas.experiments.ledger import Ledger
from fedlas.experiments.page import reproduction_page, results_tables

HOUSE = Path(__file__).parents[2]


def test_every_number_of_the_ledger_comes_out_again():
    assert list(problems(Ledger(HOUSE / "results"))) == []


@pytest.mark.slow
def test_every_interval_of_the_ledger_comes_out_again():
    assert list(problems(Ledger(HOUSE / "results"), intervals=True)) == []


def test_a_page_shows_what_was_run_and_what_was_not(ledger):
    page = reproduction_page(ledger)
    assert "4 trainings" in page
    assert "Nothing of it has been run yet." in page


def test_the_short_tables_hold_what_was_run_and_nothing_else(ledger, choice, tmp_path):
    (table,) = results_tables(ledger, choice)
    assert table.title == "digits, small_cnn, small protocol"
    assert [row.name for row in table.rows] == list(choice.losses)
    assert [column.name for column in table.columns] == ["accuracy %", "ECE %", "AECE %"]
    assert all(len(cell.values) == 2 for row in table.rows for cell in row.cells)
    assert results_tables(ledger) == [], "runs with other settings are no results of the protocol"
    assert results_tables(Ledger(tmp_path)) == []


def test_an_empty_ledger_makes_a_page_that_says_so(tmp_path):
    assert "The ledger is empty" in reproduction_page(Ledger(tmp_path))
