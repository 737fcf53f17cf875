"""Slices of the report page have the project's own metrics, sorted by harm."""

import pytest
import torch

from fedlas.metrics import ece
from fedlas.metrics.base import Resampling
from fedlas.predictions import Predictions, TopLabelPredictions
from fedlas.report.page_data import slice_data
from fedlas.report.slices import CLASS, MISSING, SMALL, slices
from report import pages


def with_metadata(n: int = 900) -> Predictions:
    """Predictions of three hospitals, one of them rare, and columns that have no slices."""
    sites = [None if k < 30 else "north" if k % 3 else "south" for k in range(n)]
    columns = {"site": sites, "id": [f"x{k}" for k in range(n)], "one": [1] * n}
    return pages.sample_predictions(n, metadata=columns)


def test_slices_hold_the_metrics_of_their_samples():
    predictions = with_metadata()
    all_slices = slices(predictions, bins=10)
    by_name = {(entry.column, entry.value): entry for entry in all_slices.listed}
    north = torch.tensor([site == "north" for site in predictions.metadata["site"]])
    chosen = {(CLASS, "class 3"): predictions.prediction == 3, ("site", "north"): north}
    for name, rows in chosen.items():
        part, entry = predictions[rows], by_name[name]
        assert entry.n == int(rows.sum())
        assert entry.accuracy == pytest.approx(float(part.correct.double().mean()), rel=1e-12)
        assert float(entry.ece) == pytest.approx(float(ece(part, bins=10)), rel=1e-12)
        assert entry.ece.definition.bins == 10
        assert entry.ece.definition.n == entry.n
        assert entry.harm == entry.n * float(entry.ece)
    assert all_slices.skipped == ["id", "one"]
    assert sum(entry.n for entry in all_slices.listed if entry.column == CLASS) == len(predictions)
    assert by_name["site", MISSING].is_small
    assert not by_name["site", "north"].is_small
    assert [entry.is_small for entry in all_slices.listed] == [entry.n < SMALL for entry in all_slices.listed]


def test_slices_are_sorted_by_harm_and_capped():
    predictions = with_metadata()
    all_slices, first_four = slices(predictions), slices(predictions, most=4)
    harms = [entry.harm for entry in all_slices.listed]
    assert harms == sorted(harms, reverse=True)
    assert [entry.value for entry in first_four.listed] == [entry.value for entry in all_slices.listed[:4]]
    assert all_slices.total == first_four.total == len(all_slices.listed) == 10 + 3


def test_slices_have_intervals_and_full_precision():
    all_slices = slices(with_metadata(), how=Resampling(0.9, 50))
    data = slice_data(all_slices)
    for entry, row in zip(all_slices.listed, data["rows"], strict=True):
        assert entry.ece.interval.level == 0.9
        assert row == [
            entry.column, entry.value, entry.n, entry.accuracy, float(entry.ece), entry.ece.interval.low,
            entry.ece.interval.high, entry.harm, entry.is_small,
        ]  # fmt: skip
    without_intervals = slice_data(slices(with_metadata()))
    assert all(row[5] is row[6] is None for row in without_intervals["rows"])


def test_top_label_predictions_have_slices():
    confidence = torch.linspace(0.5, 1, 400)
    metadata = {"site": ["a", "b"] * 200}
    predictions = TopLabelPredictions(confidence, torch.arange(400) % 3 > 0, metadata=metadata)
    assert {(entry.column, entry.value) for entry in slices(predictions).listed} == {("site", "a"), ("site", "b")}
    assert slices(TopLabelPredictions(confidence, torch.arange(400) % 3 > 0)).total == 0


def test_the_page_lists_slices(open_tab, folder):
    from fedlas.report.html import save_page

    path = save_page(with_metadata(), folder / "slices.html", resamples=50)
    tab = open_tab(path)
    assert tab.count("#slice-table tbody tr") == 13
    assert "id, one" in tab.text("#slice-note").replace("\n", "")
    assert tab.count("#slice-table .small-slice") >= 1
    assert "%" in tab.text("#slice-table .interval")
